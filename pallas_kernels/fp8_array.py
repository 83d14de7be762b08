"""FP8: a matrix of e4m3 codes with scales, as released FP8 checkpoints have it.

A scale belongs to a block of the matrix: 128 rows and columns, or a whole row
(an output channel). Rows that are multiplied with it become codes too, with a
scale for each row and as many columns as a block has. What a model computes is
defined by these roundings: an FP8 model is another model than the one that it
was made of.

Fused projections may end in rows that stay as they are: Gated DeltaNet's b and
a, which released checkpoints leave in bfloat16.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

E4M3 = jnp.float8_e4m3fn
MAX = 448.0
"""Largest number of e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning",
arXiv 2209.05433)."""

BLOCK = 128
"""Rows and columns of a block."""

FLOOR = 1e-10
"""Rows of smaller numbers are scaled as if this were their largest one, so that
no scale is zero."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Array:
  """A matrix [O, I]: codes times scales, then rows that are no codes.

  Attributes:
    codes: of the first Q rows.
    scale: what the codes of a block are multiplied by; block (r, c) has rows
      from r `block[0]` and columns from c `block[1]` on, the last ones fewer.
    rest: the other rows, of a wider type; there may be none.
    block: rows and columns of a block; columns are 128, or all of a row.
  """

  codes: Float[Array, "Q I"]
  scale: Float[Array, "R C"]
  rest: Float[Array, "P I"]
  block: tuple[int, int] = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, int]:
    """O and I."""
    rows, columns = self.codes.shape
    return rows + self.rest.shape[0], columns

  @property
  def dtype(self) -> jnp.dtype:
    """Of the rows that are no codes."""
    return jnp.dtype(self.rest.dtype)

  @property
  def ndim(self) -> int:
    return 2

  @property
  def size(self) -> int:
    rows, columns = self.shape
    return rows * columns

  @property
  def nbytes(self) -> int:
    """Bytes of all parts."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

  def astype(self, dtype: Any) -> "FP8Array":
    """The same codes and scales, the other rows in another type."""
    return dataclasses.replace(self, rest=self.rest.astype(dtype))


def scale_shape(
  rows: int, columns: int, block: tuple[int, int]
) -> tuple[int, int]:
  """Blocks of a matrix, down and across."""
  return -(-rows // block[0]), -(-columns // block[1])


def scale_of(largest: Float[Array, "..."]) -> Float[Array, "..."]:
  """The scale of a group of a row, of which the largest number is given."""
  acc = largest.dtype
  return jnp.maximum(largest, jnp.asarray(FLOOR, acc)) * jnp.asarray(
    1 / MAX, acc
  )


def codes_of(x: Array, scale: Array) -> Float[Array, "..."]:
  """x / scale as e4m3, ties to even."""
  # A scale is rounded, so that what it was made of may come out above `MAX`;
  # of that a cast makes NaN.
  return jnp.clip(x / scale, -MAX, MAX).astype(E4M3)


def quantize_rows(
  x: Float[Array, "N I"], columns: int
) -> tuple[Float[Array, "N I"], Float[Array, "N C"]]:
  """Rows as codes and scales, one for so many columns of a row.

  The largest number of a group becomes `MAX`: scale = max |x| / 448, code =
  x / scale (dynamic scales per token, as served FP8 models have them).

  Returns:
    Codes, and scales in at least float32.
  """
  acc = jnp.promote_types(x.dtype, jnp.float32)
  n, width = x.shape
  groups = -(-width // columns)
  wide = jnp.pad(x.astype(acc), ((0, 0), (0, groups * columns - width)))
  wide = wide.reshape(n, groups, columns)
  scale = scale_of(jnp.abs(wide).max(axis=2))
  codes = codes_of(wide, scale[:, :, None]).reshape(n, groups * columns)
  return codes[:, :width], scale


def quantize(
  weight: Float[Array, "Q I"], block: tuple[int, int]
) -> tuple[Float[Array, "Q I"], Float[Array, "R C"]]:
  """A matrix as codes and float32 scales, the largest of a block `MAX`.

  A block of zeros has scale 1.
  """
  rows, columns = weight.shape
  down, across = scale_shape(rows, columns, block)
  padding = (0, down * block[0] - rows), (0, across * block[1] - columns)
  wide = jnp.pad(weight.astype(jnp.float32), padding)
  wide = wide.reshape(down, block[0], across, block[1])
  largest = jnp.abs(wide).max(axis=(1, 3))
  scale = jnp.where(largest > 0, largest * jnp.float32(1 / MAX), 1)
  codes = codes_of(wide, scale[:, None, :, None])
  codes = codes.reshape(down * block[0], across * block[1])
  return codes[:rows, :columns], scale


def row_scales(w: FP8Array) -> Float[Array, "Q C"]:
  """The scales of every row of codes."""
  return jnp.repeat(w.scale, w.block[0], axis=0)[: w.codes.shape[0]]


def decode(w: FP8Array, dtype: Any = jnp.float32) -> Float[Array, "O I"]:
  """What the matrix stands for; exact in float64, rounded in float32."""
  columns = w.codes.shape[1]
  scale = jnp.repeat(row_scales(w), w.block[1], axis=1)[:, :columns]
  dense = w.codes.astype(dtype) * scale.astype(dtype)
  return jnp.concatenate([dense, w.rest.astype(dtype)])
