"""Matrices that W12 may find hard, by name."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import w12_array


def patterns(bits) -> np.ndarray:
  """bfloat16 of the patterns given."""
  return np.asarray(bits).astype(np.uint16).view(ml_dtypes.bfloat16)


def gaussian(rows: int, width: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  matrix = 0.02 * rng.standard_normal((rows, width), dtype=np.float32)
  return matrix.astype(ml_dtypes.bfloat16)


def every_pattern(rows: int, width: int) -> np.ndarray:
  """65,536 patterns in random order, or as many as there is room for."""
  order = np.random.default_rng(1).permutation(1 << 16)
  return patterns(np.resize(order, (rows, width)))


def _exponents(rng, low: int, high: int, shape) -> np.ndarray:
  """Random signs and mantissas, exponent fields low to high."""
  return (
    (rng.integers(0, 2, shape) << 15)
    | (rng.integers(low, high + 1, shape) << 7)
    | rng.integers(0, 128, shape)
  )


def few_exponents(rows: int, width: int) -> np.ndarray:
  """Five exponents a row: ties, gaps, and windows that are not the highest."""
  rng = np.random.default_rng(3)
  exponents = rng.integers(100, 126, (rows, 5))
  which = rng.integers(0, 5, (rows, width))
  chosen = np.take_along_axis(exponents, which, axis=1)
  return patterns(chosen << 7)


def adversarial() -> dict[str, np.ndarray]:
  """Seven rows of 40 that are all of a kind, or each of its own."""
  rng = np.random.default_rng(2)
  shape = (7, 40)
  near = _exponents(rng, 110, 120, shape)
  far = _exponents(rng, 20, 25, shape)
  sign = rng.integers(0, 2, shape) << 15
  one_far = near.copy()
  one_far[:, 3] = far[:, 3]
  some_zero = np.where(rng.random(shape) < 0.5, sign, near)
  kinds = {
    "equal": np.full(shape, 0x3F80),
    "zero": np.zeros(shape),
    "minus_zero": np.full(shape, 0x8000),
    "zeros_of_both_signs": sign,
    "half_zero": some_zero,
    "infinite": sign | 0x7F80,
    "nan_payloads": sign | 0x7F80 | rng.integers(1, 128, shape),
    "subnormal": sign | rng.integers(1, 128, shape),
    "smallest_normal": _exponents(rng, 1, 15, shape),
    "largest_normal": _exponents(rng, 240, 254, shape),
    "largest_and_nan": np.where(rng.random(shape) < 0.1, 0x7FFF, 0x7F7F),
    "one_far": one_far,
    "two_clusters": np.where(rng.random(shape) < 0.5, near, far),
    "every_exponent": _exponents(rng, 0, 255, shape),
    "one_kind_each": np.stack(
      [near[0], far[0], near[0] * 0, sign[0], sign[0] | 0x7FC1, sign[0] | 5]
      + [some_zero[0]]
    ),
  }
  return {name: patterns(bits) for name, bits in kinds.items()}


def struct(high: int, width: int) -> Any:
  """What a model holds of a matrix in W12, without numbers, for lowering.

  Args:
    high: a multiple of four.
  """

  def leaf(*shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)

  lanes = high // 4
  h, w = w12_array.tile_shape(lanes, width)
  plane = leaf(-(-lanes // h), width // w, h, w, dtype=jnp.uint16)
  return w12_array.W12Array(
    view01=plane,
    view23=plane,
    low=plane,
    base=leaf(high, dtype=jnp.uint8),
    row_start=leaf(high + 1, dtype=jnp.int32),
    columns=leaf(10, dtype=jnp.int32),
    values=leaf(10),
    shape=(high, width),
  )
