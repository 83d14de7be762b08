"""Step times of a batch engine, measured on the engine itself.

What a pass costs depends on its shape alone: on the slots and rows that it was
compiled for, and on whether a prompt rides in it. So a few steps of requests
that say nothing are timed, for each shape that a policy chooses from.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from specpilot_jax.decoding.batch.engine import BatchEngine, StepLimits
from specpilot_jax.decoding.batch.scheduler import Chunk, Request
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms.step_costs import StepCosts

_TIMED_STEPS, _TIMED_ROUNDS = 4, 3
_CALLS = 1 + _TIMED_STEPS * _TIMED_ROUNDS


@dataclasses.dataclass(frozen=True)
class Profile:
  """Step times of an engine in microseconds, by the slots of a pass.

  The shortest of several rounds each.

  Attributes:
    steps: by rows.
    ridden: the same with a chunk of a prompt; empty where none rides.
    prefill_us: of a chunk's own pass, by its tokens at most.
  """

  steps: Mapping[int, StepCosts]
  ridden: Mapping[int, StepCosts]
  prefill_us: Mapping[int, float]

  def reading_us(self, tokens: int) -> float:
    """Of passes over so many tokens of a prompt."""
    most = max(self.prefill_us)
    whole, rest = divmod(tokens, most)
    us = whole * self.prefill_us[most]
    if rest:
      us += self.prefill_us[min(n for n in self.prefill_us if n >= rest)]
    return us

  def told(self) -> dict[str, Any]:
    """For a record."""

    def table(costs: Mapping[int, StepCosts]):
      return {
        str(slots): dict(zip(map(str, c.nodes), c.values, strict=True))
        for slots, c in costs.items()
      }

    return {
      "step_us": table(self.steps),
      "step_with_prompt_us": table(self.ridden),
      "prefill_us": {str(n): us for n, us in self.prefill_us.items()},
    }


def measure(
  engine: BatchEngine,
  rows_of: Callable[[int, bool], Iterable[int | None]],
  plan: Any,
  sampling: SamplingParams,
) -> Profile:
  """Times an engine's passes, all shapes; what is in them does not matter.

  Args:
    engine: compiled, without requests.
    rows_of: rows of the passes over so many slots, without and with a chunk of
      a prompt in them.
    plan: of its allocation.
    sampling: of the requests that are timed.
  """
  steps: dict[int, StepCosts] = {}
  ridden: dict[int, StepCosts] = {}
  for slots in engine.slot_buckets:
    whole = slots * engine.nodes
    found = {False: {}, True: {}}
    rides = engine.rider_chunk > 0 and engine.slots > 1
    for rider in (False, True) if rides else (False,):
      for rows in rows_of(slots, rider):
        limits = StepLimits(
          nodes=np.ones(engine.slots, np.int32),
          rows=rows,
          plan=plan,
          bucket=slots,
        )
        found[rider][rows or whole] = _step_us(
          engine, slots, limits, sampling, rider
        )
    for table, us in ((steps, found[False]), (ridden, found[True])):
      if us:
        table[slots] = StepCosts(tuple(us), tuple(us.values()))
  prefill_us = {
    n: _prefill_us(engine, sampling, n) for n in engine.prefill_sizes
  }
  profile = Profile(steps, ridden, prefill_us)
  engine.step_times.clear()  # of steps that nobody asked for
  return profile


def _timed(
  engine: BatchEngine, call: Callable[[int], Any], times: int
) -> float:
  """Microseconds of a call, of several in a row."""
  engine.wait()
  before = time.perf_counter()
  for i in range(times):
    call(i)
  engine.wait()
  return 1e6 * (time.perf_counter() - before) / times


def _rounds(
  engine: BatchEngine,
  call: Callable[[int], Any],
  times: int = _TIMED_STEPS,
  again: Callable[[], None] = lambda: None,
) -> float:
  """Of the shortest round.

  Args:
    call: the i-th of a round.
    again: before every round.
  """
  again()
  call(0)
  found = []
  for _ in range(_TIMED_ROUNDS):
    again()
    found.append(_timed(engine, call, times))
  # What disturbs a machine makes steps longer, never shorter.
  return min(found)


def _reads(engine: BatchEngine, most: int) -> tuple[int, int]:
  """Tokens of a chunk, and chunks that a prompt has room for.

  Whole ones: kernels stop where a chunk does.
  """
  room = engine.max_seq_len - 2
  count = min(most, room)
  return count, min(_TIMED_STEPS, room // count)


def _admit(engine, slot: int, sampling, prompt: int, tokens: int) -> None:
  if prompt + tokens > engine.max_seq_len:
    raise SpecPilotError(
      f"max_seq_len {engine.max_seq_len} is too short to time steps, which"
      f" takes {prompt + tokens}"
    )
  own = dataclasses.replace(
    sampling, max_tokens=tokens, ignore_eos=True, stop=(), stop_token_ids=()
  )
  engine.admit(
    slot,
    Request(
      id=f"timed-{slot}", prompt=[0] * prompt, max_tokens=tokens, payload=own
    ),
  )


def _step_us(engine, slots, limits, sampling, rider: bool) -> float:
  # Another slot has the prompt that rides; of all slots one of them, and the
  # pass has its shape all the same.
  reader = min(slots, engine.slots - 1) if rider else None
  stepped = [s for s in range(slots) if s != reader]
  count, times = _reads(engine, engine.rider_chunk or 1)
  try:
    for slot in stepped:
      _admit(engine, slot, sampling, 1, _CALLS + 1)
    if reader is None:
      return _rounds(engine, lambda i: engine.step(stepped, limits, ()))

    def again() -> None:
      engine.abort(reader)
      _admit(engine, reader, sampling, times * count + 1, 1)

    def ridden(i: int) -> None:
      engine.step(stepped, limits, ((reader, Chunk(i * count, count)),))

    return _rounds(engine, ridden, times, again)
  finally:
    for slot in range(engine.slots):
      engine.abort(slot)


def _prefill_us(engine, sampling, places: int) -> float:
  count, times = _reads(engine, places)

  def again() -> None:
    engine.abort(0)
    _admit(engine, 0, sampling, times * count + 1, 1)

  def read(i: int) -> None:
    engine.prefill(0, Chunk(i * count, count), places)

  try:
    return _rounds(engine, read, times, again)
  finally:
    engine.abort(0)
