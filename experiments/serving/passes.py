"""Where the passes of a batch spend their time, on a GPU.

Passes of every shape that a system chooses from, over requests whose prompts
are read, under the JAX profiler: kernels by class, and the heaviest ones.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.cost_model import kernels, measure
from specpilot_jax.decoding.batch.engine import StepLimits, rider_of
from specpilot_jax.decoding.batch.scheduler import Chunk, Request
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.mechanisms import batching

STEPS = 3
"""Under the profiler, of each shape; fewer where a prompt has no room."""
LAZY = 1
"""Before them: what is lazy about a first call is not of a step."""
HEAVIEST = 16


def profile(
  policy: batching.BatchPolicy, prompt: Sequence[int], sampling: SamplingParams
) -> list[dict[str, Any]]:
  """The passes of a system, by shape.

  Args:
    policy: warmed up, without requests.
    prompt: of every request; a chunk of it rides where prompts do.
    sampling: of every request.

  Returns:
    Of each shape `kind` (step, ridden or prefill), `slots`, `rows`, `tokens` of
    a prompt in it, `step_us` (union of kernel intervals), `classes_us`,
    `kernels` (in a pass), `unnamed_us` and `heaviest`.
  """
  engine = policy.engine
  rides = engine.rider_chunk > 0 and engine.slots > 1
  shapes = [("step", rows) for rows in policy.rows_of(engine.slots, False)]
  if rides:
    shapes += [("ridden", rows) for rows in policy.rows_of(engine.slots, True)]
  shapes += [("prefill", size) for size in engine.prefill_sizes]
  found = []
  for kind, rows in shapes:
    size = 0 if kind == "step" else engine.rider_chunk
    if kind == "prefill":
      size = rows or 0
    # As much of a prompt as a pass takes, as often as it runs.
    room = engine.max_seq_len - 2
    times = LAZY + max(1, min(STEPS, room // max(size, 1) - LAZY))
    count = min(size, room // times)
    try:
      _fill(engine, prompt, sampling, unread=count * times)
      run, lowered = _pass(engine, kind, rows, size, count, sampling)
      found.append(
        {"kind": kind, "slots": engine.slots, "rows": rows, "tokens": count}
        | _told(engine, kind, run, lowered, times - LAZY)
      )
    finally:
      for slot in range(engine.slots):
        engine.abort(slot)
      engine.wait()
  return found


def _fill(engine, prompt, sampling, *, unread: int) -> None:
  """A request in every slot; that of the last one has so much to read."""
  for slot in range(engine.slots):
    reads = unread > 0 and slot == engine.slots - 1
    own = [0] * (unread + 1) if reads else list(prompt)
    room = engine.max_seq_len - len(own)
    request = Request(
      id=f"profiled-{slot}",
      prompt=own,
      max_tokens=room,
      payload=dataclasses.replace(
        sampling, max_tokens=room, ignore_eos=True, stop=(), stop_token_ids=()
      ),
    )
    engine.admit(slot, request)
    start, last = 0, len(own) - 1
    while start < last and not reads:
      chunk = Chunk(start, min(engine.prefill_chunk, last - start))
      engine.prefill(slot, chunk)
      start += chunk.count


def _pass(
  engine,
  kind: str,
  rows: int | None,
  size: int,
  count: int,
  sampling: SamplingParams,
) -> tuple[Callable[[int], Any], jax.stages.Lowered]:
  """A pass, the i-th of its kind, and its executable before compilation."""
  reader = engine.slots - 1
  unread = rider_of(reader, np.zeros(max(size, 1), np.int32), count)
  if kind == "prefill":
    return (
      lambda i: engine.prefill(reader, Chunk(i * count, count), size),
      engine.lowered_prefill(unread),
    )
  stepped = list(range(engine.slots - (kind == "ridden")))
  # What is in the rows does not matter. One node each, so that no request ends,
  # over all slots.
  limits = StepLimits(
    nodes=np.ones(engine.slots, np.int32), rows=rows, bucket=engine.slots
  )
  index = np.arange(engine.slots, dtype=np.int32)
  listed = index < len(stepped)
  rider = unread if kind == "ridden" else None
  lowered = engine.lowered(Features.of(sampling), index, listed, limits, rider)

  def step(i):
    chunks = [] if rider is None else [(reader, Chunk(i * count, count))]
    return engine.step(stepped, limits, chunks)

  return step, lowered


def _told(
  engine,
  kind: str,
  run: Callable[[int], Any],
  lowered: jax.stages.Lowered,
  times: int,
) -> dict[str, Any]:
  text = lowered.compile().as_text() or ""
  for i in range(LAZY):
    run(i)
  engine.wait()

  def steps():
    for i in range(times):
      run(LAZY + i)
    engine.wait()

  activities, names = kernels.named(
    measure.trace(steps), text, times, measure.owners(engine.params)
  )
  if kind == "prefill":  # by scope, and not all of it as reading
    activities = [dataclasses.replace(x, module="") for x in activities]
  told = kernels.breakdown(activities, names, times)
  return {
    "step_us": told.step_us,
    "classes_us": told.classes,
    "kernels": told.kernels,
    "unnamed_us": told.unattributed_us,
    "heaviest": kernels.heaviest(activities, names, times, HEAVIEST),
  }


CLASSES = tuple(c for c in kernels.CLASSES if c != kernels.PREFILL)
HEADER = ("pass", "rows", "prompt", "us", *CLASSES, "no name", "kernels")


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """A table of what `profile` found."""
  return [
    (
      one["kind"],
      "all" if one["rows"] is None else str(one["rows"]),
      str(one["tokens"]),
      f"{one['step_us']:,.0f}",
      *(f"{one['classes_us'][name]:,.0f}" for name in CLASSES),
      # In their classes by kernel name, or in the last.
      f"{one['unnamed_us']:,.0f}",
      f"{one['kernels']:.0f}",
    )
    for one in found
  ]
