"""Times the kernels as they ship, at a model's shapes, on this card.

    python -m experiments.kernel_times --model=qwen3.8-27b --output=kernels.json

Every product with W12 beside the best of XLA's, the kernels of the mixers
beside their floors, with errors; see `kernel_cases`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import devices, kernel_cases, results, tile_timing
from experiments.console import say
from pallas_kernels import gdn_verify
from specpilot_jax import cli, configs, loading
from specpilot_jax.errors import SpecPilotError

_MODEL = flags.DEFINE_string("model", "qwen3.8-27b", "Preset with a drafter.")
_ROWS = flags.DEFINE_list(
  "rows", ["1", "8", "16", "32", "64"], "Rows of x of the products."
)
_VIEW_ROWS = flags.DEFINE_list(
  "view_rows", ["16", "32"], "Rows of x of those with the 8-bit view."
)
_PRODUCTS = flags.DEFINE_list(
  "products", ["mosaic"], "Implementations of w12_matmul; none where empty."
)
_ATTENTION = flags.DEFINE_list(
  "attention", ["triton"], "Those of tree_attention."
)
_NODES = flags.DEFINE_list(
  "nodes",
  ["1", "16", "32", "64"],
  "Of a tree; where empty, neither trees' kernels nor prompts' are timed.",
)
_PREFIXES = flags.DEFINE_list(
  "prefixes", ["1024", "4096", "16384"], "Rows of keys before the tree."
)
_SHAPES = flags.DEFINE_list(
  "shapes", [], "Only these matrices, OUTxIN; all of the model by default."
)
_REQUESTS = flags.DEFINE_integer(
  "requests", 0, "Times the state's kernels for so many at once too.",
  lower_bound=0,
)  # fmt: skip
_FP8_ROWS = flags.DEFINE_list(
  "fp8_rows", [], "Times the model's products in FP8 too, with so many rows."
)
_FP8_TILES = flags.DEFINE_list(
  "fp8_tiles",
  [],
  "Times such products with tiles of the Hopper kernel; each is a matrix, rows"
  " of x and a tile's rows, columns, cluster and, if they are not to be chosen,"
  " blocks, stages and products in flight: 34816x5120:64:88x64x2x2x4x2.",
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def _counts(texts: Sequence[str], what: str, most: int) -> list[int]:
  for text in texts:
    if not text.isdecimal() or not 1 <= int(text) <= most:
      raise SpecPilotError(f"{what} must be 1 to {most}, got {text!r}")
  return [int(text) for text in texts]


def main() -> None:
  """Times what the flags ask for."""
  shapes = tile_timing.chosen_shapes(_MODEL.value, _SHAPES.value)
  row_counts = tile_timing.parse_rows(_ROWS.value)
  view_rows = tile_timing.parse_rows(_VIEW_ROWS.value)
  nodes = _counts(_NODES.value, "nodes", gdn_verify.MAX_NODES)
  prefixes = _counts(_PREFIXES.value, "prefixes", 1 << 20)
  fp8_rows = _counts(_FP8_ROWS.value, "fp8_rows", 1 << 16)
  loading.prepare_jax(None)
  kind = jax.devices()[0].device_kind
  if jax.default_backend() != "gpu":
    raise SpecPilotError(f"kernels are timed on an NVIDIA GPU, not on {kind}")
  device = devices.lookup(kind)
  config = configs.preset(tile_timing.model_name(_MODEL.value))
  content: dict[str, Any] = {"device_kind": kind, "model": _MODEL.value}
  began = time.monotonic()

  def keep(name, found):
    content[name] = found
    content["seconds"] = round(time.monotonic() - began, 1)
    if _OUTPUT.value is not None:
      results.write_whole(Path(_OUTPUT.value), results.as_text(content))

  keep("tree", [])
  for operations in (
    kernel_cases.recurrent(config, [n for n in nodes if n > 1]),
    kernel_cases.attention(config, nodes, prefixes, _ATTENTION.value),
    kernel_cases.prompt_attention(config),
  ):
    if nodes:
      content["tree"] += kernel_cases.time_operations(operations, device)
  keep("tree", content["tree"])
  if _REQUESTS.value:
    content["tree"] += kernel_cases.time_operations(
      kernel_cases.of_requests(
        config, _REQUESTS.value, [n for n in nodes if n > 1]
      ),
      device,
    )
  tiles = [kernel_cases.fp8_tile(text) for text in _FP8_TILES.value]
  codes = set(kernel_cases.fp8_shapes(config)) if fp8_rows else set()
  for shape in sorted(codes | {shape for shape, _, _ in tiles}):
    own = [(n, tile) for matrix, n, tile in tiles if matrix == shape]
    content["tree"] += kernel_cases.time_operations(
      kernel_cases.fp8(shape, fp8_rows if shape in codes else [], own), device
    )
  keep("tree", content["tree"])
  found: list[dict[str, Any]] = []
  for shape, count in sorted(shapes.items()):
    if _PRODUCTS.value:
      found += kernel_cases.products(
        shape, count, row_counts, view_rows, _PRODUCTS.value
      )
      keep("products", found)
  say(kernel_cases.operations_table(content["tree"]))
  if found:
    say(kernel_cases.summary(found))


if __name__ == "__main__":
  cli.run(main)
