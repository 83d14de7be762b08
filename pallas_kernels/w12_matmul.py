"""y = x W^T with W in W12, decoded in registers.

Weights are the left operand of the tensor cores, so that what a thread decodes
never leaves its registers; four rows share every lane that is loaded. Programs
split the columns too, so that all of them run at once; what they sum up lies
apart and is added in a fixed order. The sparse lists are applied in float32,
those of each of the four rows by another program.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import dispatch, w12_array
from pallas_kernels.w12_array import W12Array

MAX_ROWS = 64
"""Rows of x; more are a product with the decoded matrix."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """How a product is cut up.

  Attributes:
    lanes: of a program; each holds four rows of W.
    block: columns of a step.
    num_warps, num_stages: of Triton.
    shares: of the columns that each program of a row tile gets, in this order;
      the longest first, so that the short ones fill what is left over.
  """

  lanes: int = 64
  block: int = 64
  num_warps: int = 4
  num_stages: int = 3
  shares: tuple[int, ...] = (1, 1, 1, 1)


TILES = {8: Tile(), 16: Tile(), 32: Tile(), 64: Tile(), 128: Tile(lanes=32)}
"""By rows of x."""

ENTRIES = 4
"""Of a row's list that a program applies at a time."""


def matmul(
  x: Float[Array, "N I"],
  w: W12Array,
  *,
  out_dtype=None,
  view: bool = False,
  implementation: dispatch.Implementation = "reference",
) -> Float[Array, "N O"]:
  """x W^T, accumulated in float32 and rounded once.

  Args:
    out_dtype: of x unless given.
    view: multiplies the 8-bit view instead of the matrix.
    implementation: the kernel takes bfloat16 rows; more than `MAX_ROWS` are
      multiplied with the decoded matrix.
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  n = x.shape[0]
  if implementation == "reference" or n > MAX_ROWS:
    dense = w12_array.decode_view(w) if view else w12_array.decode(w)
    return jnp.einsum(
      "ni,oi->no",
      x,
      dense.astype(x.dtype),
      precision=None if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
      preferred_element_type=out_dtype,
    )
  parts = partial_sums(x, w, view=view, implementation=implementation)
  return sum_parts(parts)[:, : w.shape[0]].astype(out_dtype)


def sum_parts(parts: Float[Array, "S N R"]) -> Float[Array, "N R"]:
  """The parts in their order; XLA makes it part of what follows."""
  total = parts[0]
  for part in parts[1:]:
    total = total + part
  return total


def rows_of(n: int) -> int:
  """Rows that a kernel for n rows works on."""
  return max(8, 1 << (n - 1).bit_length())


def partial_sums(
  x: Float[Array, "N I"],
  w: W12Array,
  *,
  view: bool = False,
  implementation: dispatch.Implementation,
  tile: Tile | None = None,
  expanded: Array | None = None,
) -> Float[Array, "S N R"]:
  """What the programs sum up; the rows of W are padded.

  Args:
    view: the 8-bit view; the sparse lists have no part in it.
    tile: instead of the one in the table.
    expanded: [R, I] bfloat16, what decoding is to yield (2^(base - 113) times
      it is the weight): the same kernel without decoding, to check it.

  Returns:
    float32; row r's list, unless `view`, is in part r // (R / 4), or in its
    remainder by S where there are fewer parts than four.
  """
  if x.dtype != jnp.bfloat16:
    raise ValueError(f"w12_matmul's kernel does not take {x.dtype}")
  n, padded = x.shape[0], rows_of(x.shape[0])
  size, columns = w.low.shape
  tile = tile or TILES[padded]
  tile = dataclasses.replace(
    tile,
    lanes=min(tile.lanes, 1 << (size.bit_length() - 1)),
    block=math.gcd(columns, tile.block),
  )
  if tile.block < 16 or tile.lanes < 16:
    raise ValueError(f"w12_matmul's kernel does not take W of {w.shape}")
  steps = columns // tile.block
  tiles = pl.cdiv(size, tile.lanes)
  edges = _edges(steps, tile.shares)
  splits = len(edges) - 1
  planes = (w.view01, w.view23) if view else (w.view01, w.view23, w.low)
  if expanded is not None:
    planes = (expanded,)
  lists = () if view else (w.row_start, w.columns, w.values)
  program = functools.partial(
    _program,
    tile=tile,
    edges=edges,
    size=size,
    padded=padded,
    planes=len(planes),
    assembly=implementation == "triton",
  )
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    program,
    grid=(tiles, splits),
    in_specs=[anywhere] * (2 + len(planes) + len(lists)),
    out_specs=anywhere,
    out_shape=jax.ShapeDtypeStruct((splits, n, 4 * size), jnp.float32),
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=tile.num_stages
    ),
    interpret=implementation == "interpret",
    name="w12_view" if view else "w12_matmul",
  )(x, w.base, *planes, *lists)


def _program(
  x_ref, base_ref, *refs, tile, edges, size, padded, planes, assembly
):
  """Sums up four times `lanes` rows over a range of columns."""
  plane_refs, list_refs, out_ref = refs[:planes], refs[planes:-1], refs[-1]
  # The last program overlaps the one before and writes the same again.
  first = jnp.minimum(pl.program_id(0) * tile.lanes, size - tile.lanes)
  split, splits = pl.program_id(1), len(edges) - 1
  lanes = pl.ds(first, tile.lanes)
  row = jnp.arange(padded)[:, None]

  def step(k, totals):
    at = pl.ds(k * tile.block, tile.block)
    if padded == x_ref.shape[0]:
      x = x_ref[:, at]
    else:
      column = k * tile.block + jnp.arange(tile.block)[None, :]
      live = jnp.broadcast_to(row < x_ref.shape[0], (padded, tile.block))
      x = pltriton.load(x_ref.at[row, column], mask=live, other=0)
    if len(plane_refs) == 1:
      weights = [
        plane_refs[0][pl.ds(q * size + first, tile.lanes), at] for q in range(4)
      ]
    else:
      parts = [ref[lanes, at] for ref in plane_refs]
      unpack = _unpack_assembly if assembly else _unpack
      weights = [unpack(q, *parts) for q in range(4)]
    return [
      total + jnp.dot(weight, x.T, preferred_element_type=jnp.float32)
      for total, weight in zip(totals, weights, strict=True)
    ]

  zeros = jnp.zeros((tile.lanes, padded), jnp.float32)
  totals = lax.fori_loop(
    _select(edges[:-1], split), _select(edges[1:], split), step, [zeros] * 4
  )
  listed = []
  for q in range(-(-4 // splits) if list_refs else 0):
    q = split + q * splits
    rows = q * size + first + jnp.arange(tile.lanes)
    listed.append((q, _listed(x_ref, list_refs, rows, q < 4, padded)))
  for q, total in enumerate(totals):
    rows = pl.ds(q * size + first, tile.lanes)
    exponent = base_ref[rows].astype(jnp.int32) + w12_array.SCALE_OFFSET
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    total = (total * scale[:, None]).T
    for other, extra in listed:
      total = total + jnp.where(other == q, extra, 0.0)
    _store(out_ref, split, q * size + first, total)


def _store(out_ref, part, first, total):
  """Writes [padded rows of x, some of W] to a part, from row `first` of W."""
  padded, lanes = total.shape
  n = out_ref.shape[1]
  if n == padded:
    out_ref[part, :, pl.ds(first, lanes)] = total
    return
  row = jnp.arange(padded)[:, None]
  live = jnp.broadcast_to(row < n, total.shape)
  place = out_ref.at[part, row, first + jnp.arange(lanes)[None, :]]
  pltriton.store(place, total, mask=live)


def _edges(steps: int, shares: tuple[int, ...]) -> tuple[int, ...]:
  """Where each share of the steps begins, and the end; none is empty."""
  ends = [steps * s // sum(shares) for s in itertools.accumulate(shares)]
  return (0, *sorted({e for e in ends if e}))


def _select(values: tuple[int, ...], index):
  """values[index] of rising values, inside a kernel."""
  out = jnp.int32(values[0])
  for i in range(1, len(values)):
    out = jnp.where(index >= i, jnp.int32(values[i]), out)
  return out


def _listed(x_ref, list_refs, rows, wanted, padded):
  """What the lists of `rows` of W add: [padded, rows]; nothing if unwanted."""
  start_ref, column_ref, value_ref = list_refs
  wanted = jnp.broadcast_to(wanted, rows.shape)
  start = pltriton.load(start_ref.at[rows], mask=wanted, other=0)
  end = pltriton.load(start_ref.at[rows + 1], mask=wanted, other=0)
  each = jnp.arange(padded)[:, None, None]

  def entries(i, total):
    at = start[:, None] + (i * ENTRIES + jnp.arange(ENTRIES))[None, :]
    live = at < end[:, None]
    column = pltriton.load(column_ref.at[at], mask=live, other=0)
    value = pltriton.load(value_ref.at[at], mask=live, other=0)
    live = live[None] & (each < x_ref.shape[0])
    x = pltriton.load(x_ref.at[each, column[None]], mask=live, other=0)
    product = x.astype(jnp.float32) * value.astype(jnp.float32)[None]
    # What is no entry adds nothing, even to an infinity.
    return total + jnp.where(live, product, 0.0).sum(axis=2)

  return lax.fori_loop(
    0,
    pl.cdiv(jnp.max(end - start), ENTRIES),
    entries,
    jnp.zeros((padded, rows.size), jnp.float32),
  )


def _unpack(q, *parts):
  """Row q of every lane times 2^(113 - base), bfloat16."""
  byte = parts[q // 2].astype(jnp.int32) >> (8 * (q % 2))
  low = w12_array.MIDPOINT
  if len(parts) == 3:
    low = (parts[2].astype(jnp.int32) >> (4 * q)) & 15
  sign, field, mantissa = byte & 128, (byte >> 3) & 15, (byte & 7) << 4 | low
  pattern = (sign << 8) | ((field + 112) << 7) | mantissa
  normal = lax.bitcast_convert_type(pattern.astype(jnp.uint16), jnp.bfloat16)
  # Field 0 is below the normal numbers, as in bfloat16; some processors take
  # those for zeros, so that no product can make them.
  least = mantissa.astype(jnp.float32) * jnp.where(
    sign > 0, -(2.0**-21), 2.0**-21
  )
  return jnp.where(field > 0, normal, least.astype(jnp.bfloat16))


def _unpack_assembly(q, *parts):
  """The same for two lanes at a time."""
  pair, low = parts[q // 2], parts[2:]
  # Everything but the sign in place in a, the sign in b.
  sign = "$1"
  if q % 2:
    lines = ["shr.b32 a, $1, 4;"]
  else:
    lines = ["shl.b32 a, $1, 4;", "shl.b32 b, $1, 8;"]
    sign = "b"
  if low:
    nibble = "$2"
    lines.append(f"and.b32 b, {sign}, 0x80008000;")
    lines.append("lop3.b32 a, a, 0x07f007f0, b, 0xea;")  # (a & c) | b
    if q:
      lines.append(f"shr.b32 b, $2, {4 * q};")
      nibble = "b"
    lines.append(f"lop3.b32 a, {nibble}, 0x000f000f, a, 0xea;")
  else:
    # Taken by the mask: sign where it is set, a elsewhere.
    lines.append(f"lop3.b32 a, {sign}, a, 0x80008000, 0xe4;")
    lines.append("mov.b32 b, 0x87f087f0;")
    lines.append("lop3.b32 a, a, b, 0x00080008, 0xea;")
  lines.append("mov.b32 b, 0x77807780;")  # 2^112, twice.
  lines.append("mul.rn.bf16x2 $0, a, b;")
  body = " ".join(lines)
  (out,) = pltriton.elementwise_inline_asm(
    "{ .reg .b32 a, b; " + body + " }",
    args=[pair, *low],
    constraints=",".join(["=r"] + ["r"] * (1 + len(low))),
    pack=2,
    result_shape_dtypes=[jax.ShapeDtypeStruct(pair.shape, jnp.bfloat16)],
  )
  return out
