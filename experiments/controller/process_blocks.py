"""Sessions of engines that do not fit on a device together.

A block is four fresh processes one after the other, S C C S or C S S C, each
of which decodes all requests of the block. The unit is the block: requests of
one launch share what the launch adds. Each process sees each request once, and
has its own copy of the executables: nothing that the first launch of a system
wrote is there at the second.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.paired import (
  Bench,
  Measured,
  Subject,
  recorder,
)
from experiments.controller.process import Answer, EngineFault, EngineProcess
from experiments.controller.session import (
  Session,
  State,
  Times,
  Watch,
  favours,
  forms,
  is_throttled,
)

MEMORY_FRACTION = 0.9
"""Of the device, for a process that is alone on it."""


def again(request: Request) -> Request:
  """The request under the name that its second launch has."""
  prompt = dataclasses.replace(request.prompt, id=f"{request.id}#2")
  return dataclasses.replace(request, prompt=prompt)


def measure(
  bench: Bench,
  stock: Subject,
  candidate: Subject,
  requests: Sequence[Request],
  warm_ups: Sequence[Request],
  *,
  blocks: int,
  vocab: int,
  rng: np.random.Generator,
  deadline: float,
  folder=None,
  watch: Watch = lambda: None,
) -> Measured:
  """One session of blocks; arguments as `paired.measure` has them.

  Args:
    blocks: into which the requests are dealt; no more than there are requests.
      One in which the card was throttled for stock alone is left out, and so is
      one in which time ran out.
  """
  measured = Measured({STOCK: [], CANDIDATE: []})
  subjects = {STOCK: stock, CANDIDATE: candidate}
  sink = recorder(measured, subjects, folder)
  session = Session(vocab=vocab, sink=sink, rng=rng, deadline=deadline)
  answers: dict[str, list[list[list[Answer]]]] = {STOCK: [], CANDIDATE: []}
  late, dropped = False, 0
  # A block without a request has no time.
  blocks = min(blocks, len(requests))
  try:
    for name, subject in subjects.items():
      bench.prepare(name, subject)
    for index, first_stock in enumerate(forms(blocks, rng)):
      part = requests[index::blocks]
      if session.is_late:
        late = True
        break
      outer, inner = (STOCK, CANDIDATE) if first_stock else (CANDIDATE, STOCK)
      launches: dict[str, list[list[Answer]]] = {STOCK: [], CANDIDATE: []}
      throttled = {STOCK: False, CANDIDATE: False}
      taken: list[tuple[str, Request, Answer, dict[str, Any]]] = []
      try:
        for place, name in enumerate((outer, inner, inner, outer)):
          if session.is_late:
            late = True
            break
          second = len(launches[name]) == 1
          launch = bench.timed(
            name, subjects[name], memory_fraction=MEMORY_FRACTION
          )
          with EngineProcess(launch) as engine:
            measured.ready.setdefault(name, engine.ready)
            session.warm_up(engine, warm_ups)
            found = []
            for request in part:
              answer = engine.generate(
                request.prompt_ids, request.sampling, vocab
              )
              found.append(answer)
              state: State | None = watch()
              throttled[name] |= is_throttled(state)
              extra = {"place": place, "block": index}
              extra |= {"gpu": state} if state else {}
              named = again(request) if second else request
              taken.append((name, named, answer, extra))
          launches[name].append(found)
      finally:
        # Of a block that time broke off the systems have different requests.
        for args in () if late else taken:
          sink(*args)
      if late:
        break
      if favours(throttled):
        dropped += 1
        continue
      for name in answers:
        answers[name].append(launches[name])
    measured.times = _times(answers, late, dropped)
  except EngineFault as e:
    measured.fault = e
  return measured


def _times(answers, late: bool, dropped: int) -> Times:
  """Geometric means over a launch's requests, [blocks, 2 launches]."""

  def table(name: str, per_token: bool) -> np.ndarray:
    rows = [
      [
        np.exp(
          np.mean(
            [
              np.log(a.seconds / (len(a.token_ids) if per_token else 1))
              for a in launch
            ]
          )
        )
        for launch in block
      ]
      for block in answers[name]
    ]
    return np.asarray(rows, np.float64).reshape(-1, 2)

  counts = {
    name: [[len(a.token_ids) for a in x] for block in blocks for x in block]
    for name, blocks in answers.items()
  }
  divided = counts[STOCK] != counts[CANDIDATE]
  stock, candidate = (table(name, divided) for name in (STOCK, CANDIDATE))
  return Times(stock, candidate, divided, late, dropped)
