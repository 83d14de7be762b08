"""Serves a load: sends requests when they are due, keeps what comes back."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from experiments.metrics import MeasurementError
from experiments.serving.arrivals import Level
from specpilot_jax.decoding.batch.records import Figures
from specpilot_jax.decoding.batch.scheduler import (
  ERROR,
  Request,
  Scheduler,
  Update,
)
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import SamplingParams

_SLEEP_S = (1e-4, 0.05)
"""A sleep at least, for clocks that count in steps, and at most, so that a time
limit is noticed."""


class Policy(Protocol):
  """What serves: see `specpilot_jax.mechanisms.batching.BatchPolicy`."""

  def scheduler(self) -> Scheduler: ...

  def observe(self, update: Update) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """One request of a load.

  Attributes:
    id: unique in it.
    prompt: token ids.
    sampling: its settings; `max_tokens` fits behind the prompt.
  """

  id: str
  prompt: Sequence[int]
  sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class Served:
  """A request that was answered.

  Attributes:
    order: what was asked.
    arrival_s: after the start of the load; of a closed loop when it was sent.
    queue_ms: from the arrival to a slot.
    itl_ms: gaps between the passes that emitted for it.
    passes: the number of each of them, counted over the load.
    output: with times that count from the arrival.
  """

  order: Order
  arrival_s: float
  queue_ms: float
  itl_ms: tuple[float, ...]
  passes: tuple[int, ...]
  output: RequestOutput


@dataclasses.dataclass
class _Open:
  """A request on its way."""

  order: Order
  arrival_s: float
  admitted_s: float = math.nan
  times_s: list[float] = dataclasses.field(default_factory=list)
  passes: list[int] = dataclasses.field(default_factory=list)

  def closed(self, output: RequestOutput) -> Served:
    first, last = self.times_s[0], self.times_s[-1]
    metrics = dataclasses.replace(
      output.metrics,
      ttft_ms=1e3 * (first - self.arrival_s),
      e2e_ms=1e3 * (last - self.arrival_s),
    )
    pairs = zip(self.times_s[:-1], self.times_s[1:], strict=True)
    return Served(
      order=self.order,
      arrival_s=self.arrival_s,
      queue_ms=1e3 * (self.admitted_s - self.arrival_s),
      itl_ms=tuple(1e3 * (b - a) for a, b in pairs),
      passes=tuple(self.passes),
      output=dataclasses.replace(output, metrics=metrics),
    )


def serve(
  policy: Policy,
  orders: Sequence[Order],
  level: Level,
  *,
  seed: int = 0,
  deadline: float = math.inf,
  clock: Callable[[], float] = time.perf_counter,
  sleep: Callable[[float], None] = time.sleep,
) -> list[Served]:
  """Serves all orders at a level, in their order.

  Args:
    policy: what serves them; without requests.
    orders: the requests.
    level: when they come.
    seed: of the arrivals.
    deadline: of `clock`; nothing is sent after it, what was sent is answered.
    clock, sleep: in seconds.

  Returns:
    The answers in the order in which they ended.

  Raises:
    MeasurementError: a request whose logits turned NaN, or that was lost.
  """
  scheduler = policy.scheduler()
  due = level.arrivals_s(len(orders), seed)
  waiting = collections.deque(zip(due, orders, strict=True))
  most = level.max_concurrency or len(orders)
  live: dict[str, _Open] = {}
  served: list[Served] = []
  start, rounds = clock(), 0
  while waiting or live:
    now = clock() - start
    if start + now > deadline:
      waiting.clear()
    while waiting and waiting[0][0] <= now and len(live) < most:
      arrival, order = waiting.popleft()
      if not level.varies:
        arrival = now
      live[order.id] = _Open(order, arrival)
      scheduler.submit(
        Request(
          id=order.id,
          prompt=order.prompt,
          max_tokens=order.sampling.max_tokens,
          arrival_s=arrival,
          payload=order.sampling,
        )
      )
    if not live:
      if waiting:
        shortest, longest = _SLEEP_S
        sleep(min(max(waiting[0][0] - now, shortest), longest))
      continue
    updates = scheduler.advance(now)
    began, now = now, clock() - start
    for update in updates:
      policy.observe(update)
      # A round admits first; what it emits is known at its end.
      closed = _take(live, update, began if update.admitted else now, rounds)
      if closed is not None:
        served.append(closed)
    rounds += 1
    if not updates and not scheduler.busy:
      raise MeasurementError(f"{next(iter(live))} was never answered")
  return served


def _take(
  live: dict[str, _Open], update: Update, now: float, number: int
) -> Served | None:
  """Notes news of a request; what it was, once it is over."""
  request = live[update.request.id]
  if update.admitted:
    request.admitted_s = now
    return None
  figures: Any = update.figures
  if update.finish == ERROR:
    raise MeasurementError(f"{update.request.id}: {figures.error}")
  assert isinstance(figures, Figures)
  request.times_s.append(now)
  request.passes.append(number)
  if update.finish is None:
    return None
  del live[update.request.id]
  assert figures.output is not None
  return request.closed(figures.output)
