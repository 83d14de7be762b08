"""Times the tiles of the W12 product on this card, beside XLA's bfloat16 ones.

    python -m experiments.autotune --model=qwen3.8-27b --rows=1,16,32,64

Every matrix shape of the model and its drafter, with weights in six buffers
that take turns, so that no cache helps. Times are unions of kernel intervals
of the JAX profiler and hold everything that a product needs: the sum over
parts, the sparse lists, exact zeros. What is printed last is the best tile of
each shape and number of rows against the best of XLA's forms, and the mean
weighted by bytes; tiles go into `pallas_kernels/w12_matmul.py`.
"""

import time
from pathlib import Path

import jax
from absl import flags

from experiments import results, tile_timing
from experiments.console import say
from specpilot_jax import cli, loading
from specpilot_jax.errors import SpecPilotError

_MODEL = flags.DEFINE_string("model", "qwen3.8-27b", "Preset with a drafter.")
_ROWS = flags.DEFINE_list("rows", ["1", "16", "32", "64"], "Rows of x.")
_VIEW = flags.DEFINE_boolean("view", False, "Time the 8-bit view too.")
_SHAPES = flags.DEFINE_list(
  "shapes", [], "Only these, OUTxIN; all of the model by default."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")
_MAX_WALL_S = flags.DEFINE_float(
  "max_wall_s", None, "No shape is begun after so many seconds."
)


def main() -> None:
  """Times what the flags ask for."""
  shapes = tile_timing.chosen_shapes(_MODEL.value, _SHAPES.value)
  row_counts = tile_timing.parse_rows(_ROWS.value)
  loading.prepare_jax(None)
  device = jax.devices()[0]
  if device.platform != "gpu":
    raise SpecPilotError(
      f"tiles are timed on an NVIDIA GPU, JAX runs on {device.platform}"
    )
  began, found = time.monotonic(), []
  for shape, count in sorted(shapes.items()):
    late = _MAX_WALL_S.value
    if late is not None and time.monotonic() - began > late:
      say(f"no time for {shape[0]} x {shape[1]} and what follows")
      break
    found += tile_timing.measure_shape(
      shape, count, row_counts, view=_VIEW.value
    )
  say(tile_timing.summary(found))
  if _OUTPUT.value is not None:
    content = {"device_kind": device.device_kind, "found": found}
    results.write_whole(Path(_OUTPUT.value), results.as_text(content))


if __name__ == "__main__":
  cli.run(main)
