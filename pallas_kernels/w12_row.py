"""y = x W^T with W in W12 for one row of x: one launch, no tensor cores.

A program has some lanes and all of their columns, so that nothing is left to
add up elsewhere. It keeps the next tiles on their way while it multiplies,
and asks for its lists first: they are needed last.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import dispatch, w12_array, w12_parts, w12_unpack
from pallas_kernels.w12_array import TILE, W12Array

EIGHT = 8
"""Numbers of 16 bits that a thread loads at once."""
ENTRIES = 32
"""Of a row's list that are applied at a time: most have fewer."""


@dataclasses.dataclass(frozen=True)
class RowTile:
  """How a product is cut up.

  Attributes:
    lanes: of a program, part of a tile of the planes; each holds four rows.
    words: of each plane that a program loads at a time, at most.
    num_warps: of Triton.
  """

  lanes: int = 4
  words: int = 1024
  num_warps: int = 4

  @property
  def blocks(self) -> int:
    """Tiles side by side that a program loads at a time."""
    return self.words // (self.lanes * TILE)


FEW_LANES = 2048
"""Lanes of a matrix below which programs have half as many, to be enough."""
MOST_WEIGHTS = 80 << 20
"""Of a matrix. On an H200 a second launch costs more than tensor cores save up
to 73 M weights (7 % of the time), no longer at 89 M."""


def takes(w: W12Array, tile: RowTile | None = None) -> bool:
  """Whether the kernel takes the matrix.

  Planes are in tiles of 64 by 64, and what a program loads at a time divides
  the columns: fewer would leave threads with fewer than eight numbers.
  """
  if not w.tiled or w.low.shape[2:] != (TILE, TILE):
    return False
  return w.low.shape[1] % (tile or tile_of(w)).blocks == 0


def pays(w: W12Array) -> bool:
  """Whether it is the faster one."""
  return takes(w) and w.shape[0] * w.shape[1] <= MOST_WEIGHTS


def tile_of(w: W12Array) -> RowTile:
  """How a matrix is cut up."""
  return RowTile(lanes=2) if w.lanes < FEW_LANES else RowTile()


@dispatch.once("out_dtype", "view", "midpoint", "tile", "interpret")
def matmul(
  x: Float[Array, "1 I"],
  w: W12Array,
  out_dtype,
  *,
  view: bool = False,
  midpoint: bool = True,
  expanded: Array | None = None,
  tile: RowTile | None = None,
  interpret: bool = False,
) -> Float[Array, "1 O"]:
  """x W^T as `w12_matmul.matmul` has it, for one row of x in bfloat16.

  Args:
    expanded: [4, T, K, h, w] bfloat16, see `w12_matmul.matmul`.
    interpret: step by step in JAX.
  """
  tile = tile or tile_of(w)
  if x.dtype != jnp.bfloat16 or x.shape[0] != 1 or not takes(w, tile):
    raise ValueError(
      "w12_row takes one bfloat16 row and planes in tiles of 64 by 64,"
      f" {tile.blocks} or a multiple of that side by side, not"
      f" {x.dtype}{x.shape} and {w.low.shape}"
    )
  if tile.words < EIGHT * 32 * tile.num_warps:
    raise ValueError(f"{tile} leaves threads with fewer than {EIGHT} numbers")
  planes = [w.view01, w.view23] if view else [w.view01, w.view23, w.low]
  if expanded is not None:
    planes = [expanded]
  lists = () if view else (w.row_start, w.columns, w.values)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    functools.partial(
      _program,
      planes=len(planes),
      lanes=tile.lanes,
      blocks=tile.blocks,
      assembly=not interpret,
      filled=w12_array.MIDPOINT if midpoint else 0,
    ),
    grid=(pl.cdiv(w.lanes, tile.lanes),),
    in_specs=[anywhere] * (2 + len(planes) + len(lists)),
    out_shape=jax.ShapeDtypeStruct((1, w.shape[0]), out_dtype),
    out_specs=anywhere,
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=1
    ),
    interpret=interpret,
    name="w12_view_row" if view else "w12_row",
  )(x, w.base, *planes, *lists)


def _program(
  x_ref, base_ref, *refs, planes, lanes, blocks, assembly, filled
):  # fmt: skip
  """Four times `lanes` rows of W."""
  plane_refs, (*list_refs, out_ref) = refs[:planes], refs[planes:]
  steps, height = plane_refs[0].shape[-3:-1]
  size, rows = base_ref.shape[0] // 4, out_ref.shape[1]
  first = pl.program_id(0) * lanes
  lane = first + jnp.arange(lanes)
  row = [q * size + lane for q in range(4)]
  live = [(lane < size) & (r < rows) for r in row]
  # Eight numbers side by side are one thread's, which adds up their products.
  shape = (blocks, lanes, TILE // EIGHT, EIGHT)
  block, inner, eight, one = (
    lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4)
  )
  column = eight * EIGHT + one
  at_x = block * TILE + column

  def load(step):
    at = (
      first // height,
      step * blocks + block,
      first % height + inner,
      column,
    )
    if planes == 1:
      tiles = [plane_refs[0].at[(q, *at)] for q in range(4)]
    else:
      tiles = [ref.at[at] for ref in plane_refs]
    return [pltriton.load(t, eviction_policy="evict_first") for t in tiles]

  def multiply(step, loaded, totals):
    x = x_ref[0, at_x + step * (blocks * TILE)].astype(jnp.float32)
    if assembly:
      parts = [[t] for t in loaded]
      if planes > 1:
        parts = [[loaded[q // 2], *loaded[2:]] for q in range(4)]
      return [
        _add_products(_decoding(q, planes, filled), *each, x, total)
        for q, (each, total) in enumerate(zip(parts, totals, strict=True))
      ]
    weights: list[Any] = loaded
    if planes > 1:
      weights = [w12_unpack.unpack(q, *loaded, filled=filled) for q in range(4)]
    return [
      total + weight.astype(jnp.float32) * x
      for total, weight in zip(totals, weights, strict=True)
    ]

  def turn(step, carry):
    loaded, totals = carry
    ahead = load(step + 1)
    return ahead, multiply(step, loaded, totals)

  loaded = load(0)
  entries = []
  if list_refs:
    entries = [
      _entries(list_refs, *each) for each in zip(row, live, strict=True)
    ]
  totals = [jnp.zeros(shape, jnp.float32)] * 4
  last = steps // blocks - 1
  loaded, totals = lax.fori_loop(0, last, turn, (loaded, totals))
  totals = multiply(last, loaded, totals)
  for q, total in enumerate(totals):
    base = pltriton.load(base_ref.at[row[q]], mask=live[q], other=1)
    y = total.sum(3).sum(2).sum(0) * w12_parts.scale_of(base)
    if list_refs:
      y += _listed(x_ref, list_refs, *entries[q])
    pltriton.store(out_ref.at[0, row[q]], y.astype(out_ref.dtype), mask=live[q])


def _decoding(q, planes, filled) -> str:
  """PTX for two columns, see `w12_unpack.assembly`."""
  if planes == 1:
    return "mov.b32 $0, $1;"
  return w12_unpack.assembly(q, planes == 3, filled)


def _add_products(decoding, *args):
  """total + weights x, where the first of eight columns gets all products.

  In one piece, so that products and sums are fused and a thread keeps one sum,
  not eight: the other seven are known to be zero.

  Args:
    decoding: PTX, of $1 and $2 to $0.
    args: planes that are to be decoded, x and sums so far.
  """
  *parts, _, total = args
  pairs = EIGHT // 2
  # Operands: eight results, pairs of each plane, x, sums so far.
  first_x = EIGHT + pairs * len(parts)
  lines = [f"mov.f32 s, ${first_x + EIGHT};"]
  for i in range(pairs):
    names = {"$0": "r", "$1": f"${EIGHT + i}", "$2": f"${EIGHT + pairs + i}"}
    lines.append(re.sub(r"\$\d", lambda m, n=names: n[m[0]], decoding))
    lines.append("shl.b32 h, r, 16; mov.b32 w, h;")
    lines.append(f"fma.rn.f32 s, w, ${first_x + 2 * i}, s;")
    lines.append("and.b32 h, r, 0xffff0000; mov.b32 w, h;")
    lines.append(f"fma.rn.f32 s, w, ${first_x + 2 * i + 1}, s;")
  lines.append("mov.f32 $0, s;")
  lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(1, EIGHT)]
  registers = "{ .reg .b32 r, h; .reg .f32 w, s; "
  (out,) = pltriton.elementwise_inline_asm(
    registers + " ".join(lines) + " }",
    args=args,
    constraints=",".join(
      ["=&f"] * EIGHT + ["r"] * pairs * len(parts) + ["f"] * 2 * EIGHT
    ),
    pack=EIGHT,
    result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, total.dtype)],
  )
  return out


def _entries(list_refs, row, live):
  """Where the lists of some rows begin and end, and their first entries."""
  start_ref, *_ = list_refs
  start = pltriton.load(start_ref.at[row], mask=live, other=0)
  end = pltriton.load(start_ref.at[row + 1], mask=live, other=0)
  return start, end, *_some(list_refs, start, end)


def _some(list_refs, start, end):
  """Columns and values of entries from `start` on, [rows, `ENTRIES`].

  Behind the end, columns are -1.
  """
  _, column_ref, value_ref = list_refs
  at = start[:, None] + jnp.arange(ENTRIES)[None, :]
  real = at < end[:, None]
  column = pltriton.load(column_ref.at[at], mask=real, other=-1)
  return column, pltriton.load(value_ref.at[at], mask=real, other=0)


def _listed(x_ref, list_refs, start, end, column, value):
  """What the lists of some rows make of x, float32 [rows]."""

  def sums(column, value):
    x = pltriton.load(x_ref.at[0, column], mask=column >= 0, other=0)
    return (value.astype(jnp.float32) * x).sum(1)

  def more(i, total):
    return total + sums(*_some(list_refs, start + i * ENTRIES, end))

  rounds = pl.cdiv(jnp.max(end - start), ENTRIES)
  return lax.fori_loop(1, rounds, more, sums(column, value))
