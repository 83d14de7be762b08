"""One session of a paired test on one device: who decodes what, and when.

Requests are taken two by two. Of a pair (p, q) one group is S(p) C(p) C(q) S(q)
or C(p) S(p) S(q) C(q): both systems decode both requests, each once, so that no
reply can be repeated from memory, and a linear drift of the machine cancels.
Which of the two forms a group takes is drawn, half and half.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.controller import statistics
from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.process import Answer, EngineProcess

SOLO_REQUESTS = 8
"""Requests that stock also decodes alone, before and after: one of each eighth
of a session, so that no part of it is left to a candidate."""
SLOWED = 0.02
"""Share by which stock may be slower beside the candidate, at least."""

THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Bits of NVML's clocks event reasons: slow-down by hardware, by heat (software
and hardware), by the power brake."""

MAX_DROPPED = 0.25
"""Share of the units of a session that may be left out."""

State = dict[str, Any]
Watch = Callable[[], State | None]
"""What a card says of itself after a request; None where there is none."""

Sink = Callable[[str, Request, Answer, dict[str, Any]], None]
"""Takes an answer: system, request, answer, what else is known of it."""


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of a session.

  Attributes:
    stock, candidate: [units, 2], the requests of a pair, or the devices.
    divided: whether they are per token, since token counts differ.
    late: whether time ran out before all pairs were measured.
    dropped: units left out because the card was throttled for stock alone.
    swapped: whether the columns are two devices, a row one request on both.
  """

  stock: np.ndarray
  candidate: np.ndarray
  divided: bool
  late: bool
  dropped: int = 0
  swapped: bool = False

  @property
  def units(self) -> np.ndarray:
    """Log-ratios, one per unit."""
    if self.swapped:
      return statistics.two_device_units(self.stock, self.candidate)[0]
    return statistics.one_device_units(self.stock, self.candidate)

  @property
  def swap(self) -> statistics.Swap | None:
    """What two devices differ by; None of one device, or without a unit."""
    if not self.swapped or not len(self.stock):
      return None
    return statistics.swap(self.stock, self.candidate)

  @property
  def drops_too_many(self) -> bool:
    """Whether those left out are more than chance explains."""
    return self.dropped > MAX_DROPPED * (self.dropped + len(self.stock))


def pairs(requests: Sequence[Request]) -> list[tuple[Request, Request]]:
  """Requests two by two; an odd one at the end is left out."""
  return list(zip(requests[::2], requests[1::2], strict=False))


def order(
  first_stock: bool, pair: tuple[Request, Request]
) -> list[tuple[str, int]]:
  """(system, which of the pair) in the order of decoding."""
  outer, inner = (STOCK, CANDIDATE) if first_stock else (CANDIDATE, STOCK)
  return [(outer, 0), (inner, 0), (inner, 1), (outer, 1)]


def forms(units: int, rng: np.random.Generator) -> np.ndarray:
  """Whether each group begins with stock: half of them, in drawn order."""
  return rng.permutation(np.arange(units) % 2 == 0)


class Session:
  """Runs requests through the processes of stock and candidate.

  Args:
    vocab: ids are below it.
    sink: takes every timed answer.
    rng: of the order; the candidate must not know its seed.
    deadline: of `time.monotonic()`; no group is begun after it.
    watch: asked after every request, off the clock.
  """

  def __init__(
    self,
    *,
    vocab: int,
    sink: Sink,
    rng: np.random.Generator,
    deadline: float,
    watch: Watch = lambda: None,
  ):
    self.vocab, self.sink, self._rng = vocab, sink, rng
    self._deadline, self._watch = deadline, watch

  @property
  def is_late(self) -> bool:
    return time.monotonic() > self._deadline

  def draw_warm_ups(self, requests: Sequence[Request]) -> Sequence[Request]:
    """A drawn number of them."""
    return requests[: int(self._rng.integers(1, len(requests) + 1))]

  def warm_up(self, engine: EngineProcess, requests: Sequence[Request]) -> None:
    """Decodes some requests, a drawn number of them, untimed."""
    for request in self.draw_warm_ups(requests):
      engine.generate(request.prompt_ids, request.sampling, self.vocab)

  def warm_up_both(
    self,
    stock: EngineProcess,
    candidate: EngineProcess,
    requests: Sequence[Request],
  ) -> None:
    """Brings both to the same state, in drawn order.

    One of them was idle while the other started.
    """
    engines = [stock, candidate]
    if self._rng.random() < 0.5:
      engines.reverse()
    for engine in engines:
      self.warm_up(engine, requests)

  def draw_solo(self, requests: Sequence[Request]) -> list[Request]:
    """The requests of `solo`: of those that are timed, spread over them."""
    timed = [request for pair in pairs(requests) for request in pair]
    count = min(SOLO_REQUESTS, len(timed))
    parts = np.array_split(np.arange(len(timed)), count) if count else []
    return [timed[int(self._rng.choice(part))] for part in parts]

  def solo(
    self, stock: EngineProcess, requests: Sequence[Request]
  ) -> dict[str, float]:
    """Stock's seconds without a candidate, by request."""
    return {
      r.id: stock.generate(r.prompt_ids, r.sampling, self.vocab).seconds
      for r in requests
    }

  def run(
    self,
    stock: EngineProcess,
    candidate: EngineProcess,
    requests: Sequence[Request],
  ) -> Times:
    """Times all pairs of requests.

    Raises:
      EngineFault: of either process.
    """
    engines = {STOCK: stock, CANDIDATE: candidate}
    groups = pairs(requests)
    begins = forms(len(groups), self._rng)
    answers: dict[str, list[list[Answer]]] = {STOCK: [], CANDIDATE: []}
    late, dropped = False, 0
    for group, first_stock in zip(groups, begins, strict=True):
      if self.is_late:
        late = True
        break
      found: dict[tuple[str, int], Answer] = {}
      throttled = {STOCK: False, CANDIDATE: False}
      for place, (system, which) in enumerate(order(bool(first_stock), group)):
        found[system, which] = answer = self._one(engines, system, group[which])
        state = self._watch()
        throttled[system] |= is_throttled(state)
        extra = {"place": place} | ({"gpu": state} if state else {})
        self.sink(system, group[which], answer, extra)
      if favours(throttled):
        dropped += 1
        continue
      for system in engines:
        answers[system].append([found[system, which] for which in (0, 1)])
    return times_of(answers, late, dropped)

  def _one(self, engines, system: str, request: Request) -> Answer:
    (other,) = (e for name, e in engines.items() if name != system)
    other.check_quiet()
    before, started = other.processor_s(), time.perf_counter()
    answer = engines[system].generate(
      request.prompt_ids, request.sampling, self.vocab
    )
    other.check_idle(before, time.perf_counter() - started)
    return answer


def is_throttled(state: State | None) -> bool:
  """Whether a card ran slower than it was asked to."""
  if state is None:
    return False
  reasons = str(state.get("clocks_event_reasons.active", "0"))
  try:
    return bool(int(reasons, 0) & THROTTLED)
  except ValueError:  # "[N/A]" of cards that do not tell.
    return False


def favours(throttled: Mapping[str, bool]) -> bool:
  """Whether throttling makes a candidate look faster than it is.

  A card that was throttled for the candidate alone may have been so by the
  candidate: that counts against it.

  Args:
    throttled: by system, whether the card was throttled in a unit.
  """
  return throttled[STOCK] and not throttled[CANDIDATE]


def times_of(
  answers: Mapping[str, Sequence[Sequence[Answer]]],
  late: bool,
  dropped: int,
  *,
  swapped: bool = False,
) -> Times:
  """Seconds, or seconds per token where the systems' token counts differ.

  Args:
    answers: by system, two per unit.
    late, dropped, swapped: see `Times`.
  """

  def table(of: Callable[[Answer], float], system: str) -> np.ndarray:
    rows = [[of(a) for a in row] for row in answers[system]]
    return np.asarray(rows, np.float64).reshape(-1, 2)

  tokens = {name: table(lambda a: len(a.token_ids), name) for name in answers}
  divided = not np.array_equal(tokens[STOCK], tokens[CANDIDATE])
  seconds = {name: table(lambda a: a.seconds, name) for name in answers}
  if divided:
    # Different work: time per token is what can be compared.
    seconds = {name: s / tokens[name] for name, s in seconds.items()}
  return Times(
    seconds[STOCK], seconds[CANDIDATE], divided, late, dropped, swapped
  )


def slow_down(
  before_s: Sequence[float],
  beside_s: Sequence[float],
  after_s: Sequence[float],
  noise: float | None,
) -> tuple[float | None, bool]:
  """How much slower stock is beside a candidate than alone.

  Args:
    before_s, after_s: stock's seconds alone, per request, before and after the
      candidate's life: their mean takes out a drift of the machine.
    beside_s: the same requests while the candidate was there.
    noise: s_AA.

  Returns:
    The slow-down as a share, None of fewer than two requests, which bound
    nothing; and whether its lower bound exceeds what noise explains. Then the
    times say nothing: the machine was busy with other things, or the candidate
    keeps its device busy.
  """
  count = min(len(before_s), len(after_s), len(beside_s))
  if count < 2:
    return None, False
  alone = (np.log(before_s[:count]) + np.log(after_s[:count])) / 2
  r = np.log(beside_s[:count]) - alone
  limit = max(SLOWED, 2 * (noise or 0.0))
  slower = bool(np.expm1(statistics.t_bound(r)) > limit)
  return float(np.expm1(r.mean())), slower
