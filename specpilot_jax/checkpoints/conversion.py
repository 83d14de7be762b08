"""From one checkpoint format to another; `checkpoints.convert` runs it."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import load_checkpoint
from specpilot_jax.errors import SpecPilotError

FORMATS = ("safetensors", "bf16")


def rounded(checkpoint: common.Checkpoint) -> common.Checkpoint:
  """The checkpoint with all weights in bfloat16, and a note where it lost.

  Raises:
    SpecPilotError: a finite weight that becomes infinite.
  """
  params, lost = {}, 0
  for name, array in checkpoint.params.items():
    params[name] = np.asarray(array).astype(common.BFLOAT16)
    if common.nonfinite(params[name]):
      raise SpecPilotError(
        f"{checkpoint.source}: tensor {name!r} overflows bfloat16"
      )
    back = params[name].astype(array.dtype)
    lost += int(np.count_nonzero(back != array))
  notes = checkpoint.notes
  if lost:
    notes = (*notes, "weights are rounded to bfloat16")
  return dataclasses.replace(checkpoint, params=params, notes=notes)


def different(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> str | None:
  """Name of the first parameter whose dtype, shape or bits differ."""
  for name in sorted(a.keys() | b.keys()):
    if name not in a or name not in b:
      return name
    x, y = np.ascontiguousarray(a[name]), np.ascontiguousarray(b[name])
    if x.dtype != y.dtype or x.shape != y.shape:
      return name
    if not np.array_equal(x.view(np.uint8), y.view(np.uint8)):
      return name
  return None


def convert(
  source: str,
  output: str,
  kind: str,
  *,
  round_to_bf16: bool = False,
  verify: bool = False,
) -> common.Checkpoint:
  """Writes a model in another format and returns what was written.

  Args:
    source: see `load_checkpoint`.
    output: folder that must not exist, or be empty.
    kind: one of `FORMATS`.
    round_to_bf16: round weights that are stored wider than bfloat16.
    verify: read the output back and compare every bit.

  Raises:
    SpecPilotError: a source that does not load, an output that is taken,
      weights that `bf16` would round without leave, a failed verification.
  """
  common.check_free(output)
  checkpoint = load_checkpoint(source)
  if round_to_bf16:
    checkpoint = rounded(checkpoint)
  if kind == "safetensors":
    from specpilot_jax.checkpoints import hf

    tokenizer = checkpoint.tokenizer
    hf.save(
      output,
      checkpoint.config,
      checkpoint.params,
      tokenizer_files=tokenizer.files if tokenizer else None,
    )
  else:
    for name, array in checkpoint.params.items():
      if array.dtype != common.BFLOAT16:
        raise SpecPilotError(
          f"{source}: tensor {name!r} is {array.dtype}; bf16 would round it:"
          " give --round_to_bf16"
        )
    from specpilot_jax.checkpoints import orbax

    orbax.save(output, checkpoint)
  if verify:
    wrong = different(checkpoint.params, load_checkpoint(output).params)
    if wrong is not None:
      raise SpecPilotError(
        f"{output}: parameter {wrong!r} reads back otherwise"
      )
  return checkpoint
