"""Sessions on two devices of one host, swapped.

Stock on one device and the candidate on the other decode the same request at
the same time; when all requests are done, fresh processes take each other's
places and decode them once more. With D1 = log(stock on 1 / candidate on 0) and
D2 = log(stock on 0 / candidate on 1) a request's unit is r = (D1 + D2) / 2:
what the devices differ by, and what the machine did in either half, is in both
systems alike and cancels. a = (D1 - D2) / 2 is what the devices differ by.

A process sees its own device alone and begins on cores of its own. Each sees a
request once and has its own copy of the executables: nothing that a half has
left is there in the other.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.paired import Bench, Measured, Subject, recorder
from experiments.controller.process import Answer, EngineFault, EngineProcess
from experiments.controller.process_blocks import MEMORY_FRACTION, again
from experiments.controller.session import (
  Session,
  State,
  favours,
  is_throttled,
  slow_down,
  times_of,
)
from experiments.hosts import Slot

Engines = Mapping[str, EngineProcess]


def together(
  engines: Engines,
  request: Request,
  vocab: int,
  pool: concurrent.futures.Executor,
) -> dict[str, Answer]:
  """Answers of all engines to one request, sent at the same time.

  Raises:
    EngineFault: of either; stock's, where both have one: what makes stock fail
      says nothing of the candidate.
  """
  ready = threading.Barrier(len(engines))

  def one(engine: EngineProcess) -> Answer:
    try:
      engine.check_quiet()
    except BaseException:
      ready.abort()
      raise
    ready.wait()
    return engine.generate(request.prompt_ids, request.sampling, vocab)

  begun = {name: pool.submit(one, e) for name, e in engines.items()}
  concurrent.futures.wait(begun.values())
  faults = {name: f.exception() for name, f in begun.items() if f.exception()}
  for name in (STOCK, CANDIDATE):
    fault = faults.get(name)
    # The other did not even begin, where one broke a rule before.
    if fault and not isinstance(fault, threading.BrokenBarrierError):
      raise fault
  return {name: f.result() for name, f in begun.items()}


class _Half:
  """One half of a session: who is on which device, and what came of it."""

  def __init__(self, place: int, slots: Mapping[str, Slot]):
    self.place, self.slots = place, slots
    self.answers: list[dict[str, Answer]] = []
    self.throttled: list[dict[str, bool]] = []
    self.beside: dict[str, float] = {}
    self.alone: dict[str, float] = {}
    self.late = False


def measure(
  bench: Bench,
  stock: Subject,
  candidate: Subject,
  requests: Sequence[Request],
  warm_ups: Sequence[Request],
  *,
  slots: Sequence[Slot],
  vocab: int,
  rng: np.random.Generator,
  deadline: float,
  noise: float | None = None,
  folder: Any = None,
  watch: Callable[[Slot], State | None] = lambda slot: None,
) -> Measured:
  """One session; arguments as `paired.measure` has them.

  Args:
    slots: the two devices. On which of them the candidate begins is drawn.
    requests: each is a unit. One in which a card was throttled for stock alone
      is left out, and so are those that time did not leave both halves for.
    watch: of a card, off the clock.
  """
  first, second = slots
  measured = Measured({STOCK: [], CANDIDATE: []})
  subjects = {STOCK: stock, CANDIDATE: candidate}
  sink = recorder(measured, subjects, folder)
  session = Session(vocab=vocab, sink=sink, rng=rng, deadline=deadline)
  places = [
    {STOCK: second, CANDIDATE: first}, {STOCK: first, CANDIDATE: second}
  ]  # fmt: skip
  if rng.random() < 0.5:
    places.reverse()
  halves = [_Half(i, place) for i, place in enumerate(places)]
  try:
    for name, subject in subjects.items():
      bench.prepare(name, subject, slot=first)
    for half in halves:
      _run(bench, half, subjects, requests, warm_ups, session, measured, watch)
      if half.late:
        break
  except EngineFault as e:
    measured.fault = e
    return measured
  compared = [(h, i) for h in halves for i in h.alone if i in h.beside]
  measured.slowed, measured.disturbed = slow_down(
    [h.alone[i] for h, i in compared],
    [h.beside[i] for h, i in compared],
    [h.alone[i] for h, i in compared],
    noise,
  )
  done = min(len(half.answers) for half in halves)
  rows: dict[str, list[list[Answer]]] = {STOCK: [], CANDIDATE: []}
  dropped = 0
  for i in range(done):
    # A card that is hot for both, one after the other, favours neither.
    if favours({n: any(h.throttled[i][n] for h in halves) for n in rows}):
      dropped += 1
      continue
    for name, row in rows.items():
      by_slot = {h.slots[name]: h.answers[i][name] for h in halves}
      row.append([by_slot[slot] for slot in slots])
  late = any(half.late for half in halves)
  measured.times = times_of(rows, late, dropped, swapped=True)
  return measured


def _run(
  bench: Bench,
  half: _Half,
  subjects: Mapping[str, Subject],
  requests: Sequence[Request],
  warm_ups: Sequence[Request],
  session: Session,
  measured: Measured,
  watch: Callable[[Slot], State | None],
) -> None:
  """Fresh processes, all requests, and stock alone behind the candidate's end.

  Raises:
    EngineFault: of either process.
  """
  engines: dict[str, EngineProcess] = {}
  with (
    concurrent.futures.ThreadPoolExecutor(len(subjects)) as pool,
    contextlib.ExitStack() as held,
    contextlib.ExitStack() as guest,
  ):
    try:
      # Both load at the same time; a process lives as long as the thread that
      # began it, so it is this one.
      for name, stack in ((STOCK, held), (CANDIDATE, guest)):
        launch = bench.timed(
          name, subjects[name], slot=half.slots[name],
          memory_fraction=MEMORY_FRACTION,
        )  # fmt: skip
        engines[name] = EngineProcess(launch)
        stack.push(engines[name])
        engines[name].begin()
      for name, engine in engines.items():
        engine.wait_ready()
        measured.ready.setdefault(name, engine.ready)
      for request in session.draw_warm_ups(warm_ups):
        together(engines, request, session.vocab, pool)
      for request in requests:
        if session.is_late:
          half.late = True
          break
        found = together(engines, request, session.vocab, pool)
        half.answers.append(found)
        half.beside[request.id] = found[STOCK].seconds
        hot = {}
        for name, answer in found.items():
          slot = half.slots[name]
          state = watch(slot)
          hot[name] = is_throttled(state)
          extra = {"place": half.place, "device": slot.index}
          extra |= {"gpu": state} if state else {}
          named = again(request) if half.place else request
          session.sink(name, named, answer, extra)
        half.throttled.append(hot)
      guest.close()
      if not half.late:
        alone = session.draw_solo(requests)
        half.alone = session.solo(engines[STOCK], alone)
    finally:
      for name, engine in engines.items():
        printed = engine.output.decode("utf-8", "replace")[-2000:]
        measured.output.setdefault(name, printed)
