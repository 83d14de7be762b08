"""Matrices in FP8 as a model takes them: checks, and the way to the device."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_array
from pallas_kernels.fp8_array import FP8Array
from specpilot_jax.errors import SpecPilotError

_E4M3 = np.dtype(fp8_array.E4M3)


def check(w: FP8Array, what: str) -> None:
  """Refuses codes and scales that are no matrix.

  Args:
    w: of NumPy's or JAX's arrays.
    what: for errors.

  Raises:
    SpecPilotError: codes that are not e4m3 or NaN, scales of another shape,
      that are not finite or not above zero, rows beside them that do not fit
      or are not finite.
  """
  if w.codes.dtype != _E4M3:
    raise SpecPilotError(
      f"{what} has codes of {w.codes.dtype}, expected {_E4M3}"
    )
  rows, columns = w.codes.shape
  # Scales are of 128 columns, or of whole rows.
  if w.block[0] < 1 or w.block[1] not in (fp8_array.BLOCK, columns):
    raise SpecPilotError(
      f"{what} has blocks of {list(w.block)}, expected {fp8_array.BLOCK}"
      f" columns or all {columns}"
    )
  wanted = fp8_array.scale_shape(rows, columns, w.block)
  if w.scale.shape != wanted:
    raise SpecPilotError(
      f"{what} has scales of shape {list(w.scale.shape)}, expected"
      f" {list(wanted)}"
    )
  if w.rest.shape[1] != columns:
    raise SpecPilotError(
      f"{what} has {w.rest.shape[1]} columns beside {columns} of codes"
    )
  lib = np if isinstance(w.codes, np.ndarray) else jnp
  counts = (
    ("codes that are NaN", (w.codes.view(np.uint8) & 0x7F) == 0x7F),
    ("scales that are NaN or infinite", ~lib.isfinite(w.scale)),
    ("scales that are not above 0", w.scale <= 0),
    ("values that are NaN or infinite", ~lib.isfinite(w.rest)),
  )
  for kind, bad in counts:
    count = int(bad.sum())
    if count:
      raise SpecPilotError(f"{what} has {count} {kind}")


def on_device(w: FP8Array, what: str, leaf: jax.ShapeDtypeStruct) -> FP8Array:
  """The matrix on the device, its other rows in the dtype of the model.

  Args:
    w: of NumPy's or JAX's arrays.
    what: for errors.
    leaf: shape and dtype of the parameter.

  Raises:
    SpecPilotError: as `check`; a wrong shape.
  """
  if w.shape != tuple(leaf.shape):
    raise SpecPilotError(
      f"{what} has shape {w.shape}, expected {tuple(leaf.shape)}"
    )
  placed = jax.tree.map(jnp.asarray, w)
  check(placed, what)
  return placed.astype(leaf.dtype)
