"""A matrix in W12 as bfloat16, bit for bit: for products of many rows.

One kernel decodes the planes tile by tile; a second writes the weights of the
sparse lists over the zeros that stand for them. `w12_array.decode` says the
same in plain JAX, in a dozen operations a matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, BFloat16

from pallas_kernels import dispatch, w12_array, w12_parts
from pallas_kernels.w12_array import W12Array

LANES = 16
"""Of a tile that a program decodes, each of four rows."""
ROWS, ENTRIES = 32, 64
"""Rows whose lists a program writes, and entries at a time."""


def decode(
  w: W12Array, *, implementation: dispatch.W12Implementation = "reference"
) -> BFloat16[Array, "O I"]:
  """The matrix.

  Args:
    w: [O, I]; the kernels take planes in tiles.

  Raises:
    ValueError: planes row by row, for a kernel.
  """
  if implementation == "reference":
    return w12_array.decode(w)
  if not w.tiled:
    raise ValueError("w12_decode's kernel takes planes in tiles")
  return _decode_kernel(w, implementation == "interpret")


@dispatch.once("interpret")
def _decode_kernel(w, interpret):
  tiles, across, height, _ = w.low.shape
  lanes = min(LANES, height)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  call = functools.partial(
    pl.pallas_call,
    out_specs=anywhere,
    out_shape=jax.ShapeDtypeStruct(w.shape, jnp.uint16),
    interpret=interpret,
  )
  dense = call(
    functools.partial(_planes, lanes=lanes),
    grid=(tiles * (height // lanes), across),
    in_specs=[anywhere] * 4,
    compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
    name="w12_decode",
  )(w.base, w.view01, w.view23, w.low)
  patterns = lax.bitcast_convert_type(w.values, jnp.uint16)
  dense = call(
    _lists,
    grid=(pl.cdiv(w.shape[0], ROWS),),
    in_specs=[anywhere] * 4,
    input_output_aliases={0: 0},
    compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
    name="w12_decode_lists",
  )(dense, w.row_start, w.columns, patterns)
  return lax.bitcast_convert_type(dense, jnp.bfloat16)


def _planes(base_ref, view01_ref, view23_ref, low_ref, out_ref, *, lanes):
  """Decodes some lanes of a tile."""
  _, _, height, width = low_ref.shape
  size = base_ref.shape[0] // 4
  each = height // lanes
  group, k = pl.program_id(0), pl.program_id(1)
  at = (group // each, k, pl.ds(group % each * lanes, lanes))
  pairs = [view01_ref[at].astype(jnp.int32), view23_ref[at].astype(jnp.int32)]
  low = low_ref[at].astype(jnp.int32)
  lane = group * lanes + jnp.arange(lanes)
  column = k * width + jnp.arange(width)
  for q in range(4):
    row = q * size + lane
    live = (lane < size) & (row < out_ref.shape[0])
    base = pltriton.load(base_ref.at[row], mask=live, other=1)
    byte = (pairs[q // 2] >> (8 * (q % 2))) & 255
    code = (byte << 4) | ((low >> (4 * q)) & 15)
    pltriton.store(
      out_ref.at[row[:, None], column[None, :]],
      w12_array.bits(code, base.astype(jnp.int32)[:, None]),
      mask=jnp.broadcast_to(live[:, None], code.shape),
    )


def _lists(_, start_ref, column_ref, value_ref, out_ref):
  """Writes the lists of some rows, which follow one another."""
  rows = out_ref.shape[0]
  first_row = pl.program_id(0) * ROWS
  row = first_row + jnp.arange(ROWS)
  first, last, _, end = w12_parts.row_spans(start_ref, ROWS, row, rows)

  def step(i, carry):
    at = first + i * ENTRIES + jnp.arange(ENTRIES)
    real = at < last
    column = pltriton.load(column_ref.at[at], mask=real, other=0)
    value = pltriton.load(value_ref.at[at], mask=real, other=0)
    # As many rows as end before an entry are before its row.
    before = jnp.sum((end[:, None] <= at[None, :]).astype(jnp.int32), axis=0)
    pltriton.store(out_ref.at[first_row + before, column], value, mask=real)
    return carry

  lax.fori_loop(0, pl.cdiv(last - first, ENTRIES), step, 0)
