"""y = x W^T with W in W12, decoded in registers.

Weights are the left operand of the tensor cores, so that what a thread decodes
never leaves its registers; four rows share every lane that is loaded. All
programs run at once and have the same share of the work: a run of tiles that
may begin and end amid the columns of some lanes; what they sum up there lies
apart. A second kernel adds it in a fixed order and applies the sparse lists.
(In the first one they would wait for memory that is busy, and hold registers.)
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import (
  dispatch,
  w12_array,
  w12_hopper,
  w12_parts,
  w12_row,
  w12_unpack,
)
from pallas_kernels.w12_array import W12Array
from pallas_kernels.w12_parts import Shares, rows_of

MAX_ROWS = 64
"""Rows of x; more are a product with the decoded matrix."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """How a product is cut up.

  Attributes:
    lanes: of a program, part of a tile of the planes; each holds four rows.
    num_warps, num_stages: of Triton.
    programs: that share the matrix, or a little less: what the card can hold
      at once, or fewer where those are enough.
  """

  lanes: int = 32
  num_warps: int = 2
  num_stages: int = 3
  programs: int = 528


ALIGN = 0.15
"""Share of the programs that may be missing so that each has one pipeline to
fill and to drain. One that has to wait for another's end costs more."""

WIDE = Tile(lanes=64, num_warps=4, programs=264)
TILES = {8: Tile(), 16: Tile(), 32: Tile(), 64: WIDE}
"""By rows of x; measured on an H200 (132 multiprocessors)."""
LONG = 131_072
"""Rows of W (a vocabulary's) from which on `WIDE` is as fast or faster for any
number of rows of x: 1.1 % at 16, 2.5 % at 32."""


LEAST = 16
"""Lanes and columns of a tile of the planes, at least."""


def takes(w: W12Array) -> bool:
  """Whether the kernel takes the matrix: tiles that tensor cores can multiply.

  Those of fewer lanes are of matrices of up to 32 rows; of fewer columns, where
  16 does not divide the columns.
  """
  return w.tiled and min(w.low.shape[2:]) >= LEAST


def max_rows(implementation: str, w: W12Array) -> int:
  """Rows of x that the kernel takes; more are multiplied with the decoded
  matrix. 0 where it does not take the matrix."""
  if implementation == "mosaic" and w12_hopper.takes(w):
    return w12_hopper.MAX_ROWS
  return MAX_ROWS if takes(w) else 0


def matmul(
  x: Float[Array, "N I"],
  w: W12Array,
  *,
  out_dtype=None,
  view: bool = False,
  midpoint: bool = True,
  implementation: dispatch.W12Implementation = "reference",
  tile: Tile | None = None,
  expanded: Array | None = None,
) -> Float[Array, "N O"]:
  """x W^T, accumulated in float32 and rounded once.

  Args:
    w: the kernel takes planes in tiles.
    out_dtype: of x unless given.
    view: multiplies the 8-bit view instead of the matrix.
    midpoint: of the view, see `w12_array.decode_view`.
    implementation: kernels take bfloat16 rows, `max_rows` at most; of more, or
      of a matrix that is too small, it is the product's definition. `mosaic` is
      `w12_hopper`, and this kernel for matrices that it does not take and for
      one row of x. One row of a small matrix is `w12_row`'s in all of them.
    tile: of the kernel, instead of the one in the table.
    expanded: of the kernel, [4, T, K, h, w] bfloat16: what decoding is to
      yield in each quarter (2^(base - 113) times it is the weight). The same
      kernel without decoding, to check it.
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  n = x.shape[0]
  if implementation != "reference" and not w.tiled:
    raise ValueError("w12_matmul's kernel takes planes in tiles")
  if implementation == "reference" or n > max_rows(implementation, w):
    dense = w12_array.decode(w)
    if view:
      dense = w12_array.decode_view(w, midpoint=midpoint)
    return jnp.einsum(
      "ni,oi->no",
      x,
      dense.astype(x.dtype),
      precision=None if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
      preferred_element_type=out_dtype,
    )
  if n == 1 and tile is None and w12_row.pays(w):
    return w12_row.matmul(
      x, w, out_dtype, view=view, midpoint=midpoint, expanded=expanded,
      interpret=implementation == "interpret",
    )  # fmt: skip
  if implementation == "mosaic" and n > 1 and w12_hopper.takes(w):
    return w12_hopper.matmul(
      x, w, out_dtype, view=view, midpoint=midpoint, expanded=expanded
    )
  if implementation == "mosaic":
    implementation = "triton"
  return _matmul_kernel(
    x, w, out_dtype, view, implementation, tile, expanded, midpoint
  )


def _matmul_kernel(
  x, w, out_dtype, view, implementation, tile, expanded, midpoint
):
  """Two launches: what programs sum up, then all that is left to do."""
  if x.dtype != jnp.bfloat16:
    raise ValueError(f"w12_matmul's kernel does not take {x.dtype}")
  n = x.shape[0]
  _, _, height, width = w.low.shape
  tile = tile or (WIDE if w.shape[0] >= LONG else TILES[rows_of(n)])
  tile = dataclasses.replace(tile, lanes=min(tile.lanes, height))
  planes = (w.view01, w.view23) if view else (w.view01, w.view23, w.low)
  if expanded is not None:
    planes = (expanded,)
  shares = Shares.of(w, tile.lanes, tile.programs, ALIGN)
  parts, *columns = _sums(
    x, w.base, planes, shares, tile, implementation,
    lists=not view, midpoint=midpoint,
  )  # fmt: skip
  return w12_parts.finish(
    parts, w, n, out_dtype,
    columns=None if view else columns[0],
    shares=shares,
    run=tile.lanes, interpret=implementation == "interpret",
  )  # fmt: skip


@dispatch.once("shares", "tile", "implementation", "lists", "midpoint")
def _sums(x, base, planes, shares, tile, implementation, *, lists, midpoint):
  """Parts [T, rows of x, rows of W] and, for lists, x by columns."""
  n = x.shape[0]
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  # Of the lists, an entry is of one column of x: side by side, a column's
  # numbers are one piece of memory.
  columns = (
    (jax.ShapeDtypeStruct((x.shape[1], rows_of(n)), x.dtype),) if lists else ()
  )
  return pl.pallas_call(
    functools.partial(
      _stream,
      shares=shares,
      tile=tile,
      padded=rows_of(n),
      assembly=implementation == "triton",
      transpose=lists,
      filled=w12_array.MIDPOINT if midpoint else 0,
    ),
    grid=(shares.programs,),
    in_specs=[anywhere] * (2 + len(planes)),
    out_shape=[
      jax.ShapeDtypeStruct((shares.parts, n, base.size), jnp.float32),
      *columns,
    ],
    out_specs=[anywhere] * (1 + len(columns)),
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=tile.num_stages
    ),
    interpret=implementation == "interpret",
    name="w12_matmul" if lists else "w12_view",
  )(x, base, *planes)


def _stream(
  x_ref, base_ref, *refs, shares, tile, padded, assembly, transpose, filled
):
  """Sums up a program's share: four times `lanes` rows at a time.

  Where lists are to be applied, the columns of x are written as rows too.
  """
  outs = 2 if transpose else 1
  plane_refs, out_refs = refs[:-outs], refs[-outs:]
  width = plane_refs[0].shape[-1]
  program = pl.program_id(0)
  begin, end = shares.begin(program), shares.begin(program + 1)
  first = begin // shares.steps

  def group(i, _):
    start = (first + i) * shares.steps
    _stream_group(
      x_ref, base_ref, plane_refs, out_refs[0], first + i,
      jnp.maximum(begin - start, 0), jnp.minimum(end - start, shares.steps),
      program - shares.first_owner(first + i),
      tile=tile, padded=padded, assembly=assembly, filled=filled,
    )  # fmt: skip

  lax.fori_loop(0, (end - 1) // shares.steps - first + 1, group, None)
  if transpose:
    # Some columns for each program, when there is nothing else to load.
    def some(i, _):
      k = program + i * shares.programs
      x = _columns(x_ref, k * width, width, padded)
      out_refs[1][pl.ds(k * width, width), :] = x.T

    mine = (shares.steps - 1 - program) // shares.programs + 1
    lax.fori_loop(0, mine, some, None)


def _stream_group(
  x_ref, base_ref, plane_refs, out_ref, group, begin, end, part,
  *, tile, padded, assembly, filled,
):  # fmt: skip
  """Sums up steps `begin` to `end` - 1 of a group of lanes."""
  size = base_ref.shape[0] // 4
  height, width = plane_refs[0].shape[-2:]
  each = height // tile.lanes
  across = pl.ds(group % each * tile.lanes, tile.lanes)
  first = group * tile.lanes
  lane = first + jnp.arange(tile.lanes)

  def step(k, totals):
    x = _columns(x_ref, k * width, width, padded)
    at = (group // each, k, across)
    if len(plane_refs) == 1:
      weights: list[Any] = [plane_refs[0][q, *at] for q in range(4)]
    else:
      loaded = [ref[at] for ref in plane_refs]
      unpack = w12_unpack.in_assembly if assembly else w12_unpack.unpack
      weights = [unpack(q, *loaded, filled=filled) for q in range(4)]
    return [
      total + jnp.dot(weight, x.T, preferred_element_type=jnp.float32)
      for total, weight in zip(totals, weights, strict=True)
    ]

  zeros = jnp.zeros((tile.lanes, padded), jnp.float32)
  totals = lax.fori_loop(begin, end, step, [zeros] * 4)
  whole = size % tile.lanes == 0
  for q, total in enumerate(totals):
    if whole:
      base = base_ref[pl.ds(q * size + first, tile.lanes)]
    else:
      base = pltriton.load(
        base_ref.at[q * size + lane], mask=lane < size, other=1
      )
    live = None if whole else lane < size
    total = (total * w12_parts.scale_of(base)[:, None]).T
    _store(out_ref, part, q * size + first, total, live)


def _columns(x_ref, first, width, padded):
  """x [padded, width] from a column on, zeros below."""
  n = x_ref.shape[0]
  if n == padded:
    return x_ref[:, pl.ds(first, width)]
  row = jnp.arange(padded)[:, None]
  column = first + jnp.arange(width)[None, :]
  live = jnp.broadcast_to(row < n, (padded, width))
  return pltriton.load(x_ref.at[row, column], mask=live, other=0)


def _store(out_ref, part, first, total, live):
  """Writes [padded rows of x, some of W] to a part, from row `first` of W on.

  Args:
    live: which rows of W there are; None for all.
  """
  padded, count = total.shape
  n = out_ref.shape[1]
  if n == padded and live is None:
    out_ref[part, :, pl.ds(first, count)] = total
    return
  row = jnp.arange(padded)[:, None]
  mask = jnp.broadcast_to(row < n, total.shape)
  if live is not None:
    mask &= live[None, :]
  place = out_ref.at[part, row, first + jnp.arange(count)[None, :]]
  pltriton.store(place, total, mask=mask)
