"""Rows as e4m3 codes and scales, in one launch and as `fp8_matmul` takes them.

`fp8_array.quantize_rows` is the definition; of that XLA makes three kernels,
which take longer than the product of a small matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import dispatch, fp8_array
from pallas_kernels.fp8_array import BLOCK

ROWS = 8
"""Of a program, where scales are of blocks of columns."""

STEP = 2048
"""Columns that a program looks at at once, where a scale is of a whole row."""


def quantize(
  x: Float[Array, "N I"],
  columns: int,
  rows: int,
  implementation: dispatch.Implementation,
) -> tuple[Float[Array, "R J"], Float[Array, "C R"]]:
  """Codes and scales of rows, each row apart from the others.

  Args:
    columns: of a scale: `BLOCK` or all.
    rows: R, a multiple of `ROWS` from N on; the codes of those behind x are
      zeros, and so are those of columns up to J, the next multiple of `BLOCK`.
  """
  n, width = x.shape
  across = pl.cdiv(width, BLOCK)
  whole = columns >= width
  groups = 1 if whole else across
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    functools.partial(_whole, steps=pl.cdiv(width, STEP)) if whole else _blocks,
    grid=(rows,) if whole else (groups, rows // ROWS),
    in_specs=[anywhere],
    out_specs=[anywhere] * 2,
    out_shape=[
      jax.ShapeDtypeStruct((rows, across * BLOCK), fp8_array.E4M3),
      jax.ShapeDtypeStruct((groups, rows), jnp.float32),
    ],
    compiler_params=pltriton.CompilerParams(
      num_warps=8 if whole else 2, num_stages=1
    ),
    interpret=implementation == "interpret",
    name="fp8_rows",
  )(x)


def _load(x_ref, row, column):
  """Float32 of some rows and columns, zeros where there are none."""
  n, width = x_ref.shape
  live = (row < n)[:, None] & (column < width)[None, :]
  place = x_ref.at[row[:, None], column[None, :]]
  return pltriton.load(place, mask=live, other=0).astype(jnp.float32)


def _blocks(x_ref, code_ref, scale_ref):
  block = pl.program_id(0)
  first = pl.program_id(1) * ROWS
  row = first + jnp.arange(ROWS)
  x = _load(x_ref, row, block * BLOCK + jnp.arange(BLOCK))
  scale = fp8_array.scale_of(jnp.max(jnp.abs(x), axis=1))
  here = pl.ds(first, ROWS)
  code_ref[here, pl.ds(block * BLOCK, BLOCK)] = fp8_array.codes_of(
    x, scale[:, None]
  )
  scale_ref[block, here] = scale


def _whole(x_ref, code_ref, scale_ref, *, steps):
  """One row: its largest number first, then its codes."""
  row = pl.program_id(0) + jnp.arange(1)
  padded = code_ref.shape[1]

  def piece(i):
    column = i * STEP + jnp.arange(STEP)
    return column, _load(x_ref, row, column)

  def largest(i, found):
    return jnp.maximum(found, jnp.max(jnp.abs(piece(i)[1]), axis=1))

  scale = fp8_array.scale_of(
    lax.fori_loop(0, steps, largest, jnp.zeros(1, jnp.float32))
  )

  def write(i, _):
    column, x = piece(i)
    pltriton.store(
      code_ref.at[row[:, None], column[None, :]],
      fp8_array.codes_of(x, scale[:, None]),
      mask=(column < padded)[None, :],
    )

  lax.fori_loop(0, steps, write, None)
  scale_ref[0, pl.ds(pl.program_id(0), 1)] = scale
