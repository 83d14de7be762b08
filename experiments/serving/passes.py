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
"""Under the profiler, of each shape."""
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
    Of each shape `kind` (step, ridden or prefill), `slots`, `rows`, `step_us`
    (union of kernel intervals), `classes_us`, `kernels` (in a pass),
    `unnamed_us` and `heaviest`.
  """
  engine = policy.engine
  rides = engine.rider_chunk > 0 and engine.slots > 1
  shapes = [("step", rows) for rows in policy.rows_of(engine.slots, False)]
  if rides:
    shapes += [("ridden", rows) for rows in policy.rows_of(engine.slots, True)]
  shapes += [("prefill", size) for size in engine.prefill_sizes]
  found = []
  for kind, rows in shapes:
    try:
      _fill(engine, prompt, sampling, reads=kind != "step")
      found.append(
        {"kind": kind, "slots": engine.slots, "rows": rows}
        | _told(engine, *_pass(engine, kind, rows, len(prompt), sampling))
      )
    finally:
      for slot in range(engine.slots):
        engine.abort(slot)
      engine.wait()
  return found


def _fill(engine, prompt, sampling, *, reads: bool) -> None:
  """A request in every slot; the prompt of the last one unread, or not."""
  own = dataclasses.replace(
    sampling,
    max_tokens=engine.max_seq_len - len(prompt),
    ignore_eos=True,
    stop=(),
    stop_token_ids=(),
  )
  for slot in range(engine.slots):
    request = Request(
      id=f"profiled-{slot}",
      prompt=list(prompt),
      max_tokens=own.max_tokens,
      payload=own,
    )
    engine.admit(slot, request)
    start, last = 0, len(prompt) - 1
    if reads and slot == engine.slots - 1:
      return
    while start < last:
      chunk = Chunk(start, min(engine.prefill_chunk, last - start))
      engine.prefill(slot, chunk)
      start += chunk.count


def _pass(
  engine, kind: str, rows: int | None, length: int, sampling: SamplingParams
) -> tuple[Callable[[int], Any], jax.stages.Lowered]:
  """A pass, the i-th of its kind, and its executable before compilation."""
  reader = engine.slots - 1
  size = rows if kind == "prefill" else engine.rider_chunk
  # As much as a pass can take, as often as it is run.
  count = max(1, min(size or 1, (length - 2) // (LAZY + STEPS)))
  unread = rider_of(reader, np.zeros(size or 1, np.int32), count)
  if kind == "prefill":
    return (
      lambda i: engine.prefill(reader, Chunk(i * count, count), size),
      engine.lowered_prefill(unread),
    )
  stepped = list(range(engine.slots - (kind == "ridden")))
  limits = StepLimits(rows=rows)
  index = np.arange(engine.slots, dtype=np.int32)
  listed = index < len(stepped)
  rider = unread if kind == "ridden" else None
  lowered = engine.lowered(Features.of(sampling), index, listed, limits, rider)

  def step(i):
    chunks = [] if rider is None else [(reader, Chunk(i * count, count))]
    return engine.step(stepped, limits, chunks)

  return step, lowered


def _told(
  engine, run: Callable[[int], Any], lowered: jax.stages.Lowered
) -> dict[str, Any]:
  names = kernels.op_names(lowered.compile().as_text() or "")
  for i in range(LAZY):
    run(i)
  engine.wait()

  def steps():
    for i in range(STEPS):
      run(LAZY + i)
    engine.wait()

  activities = measure.trace(steps)
  told = kernels.breakdown(activities, names, STEPS)
  return {
    "step_us": told.step_us,
    "classes_us": told.classes,
    "kernels": told.kernels,
    "unnamed_us": told.unattributed_us,
    "heaviest": kernels.heaviest(activities, names, STEPS, HEAVIEST),
  }


HEADER = ("pass", "rows", "us", *kernels.CLASSES, "kernels")


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """A table of what `profile` found."""
  return [
    (
      one["kind"],
      "all" if one["rows"] is None else str(one["rows"]),
      f"{one['step_us']:,.0f}",
      *(f"{one['classes_us'][name]:,.0f}" for name in kernels.CLASSES),
      f"{one['kernels']:.0f}",
    )
    for one in found
  ]
