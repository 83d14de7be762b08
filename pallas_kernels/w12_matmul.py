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
import operator
from typing import Any

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
"""Share of the programs that may be missing so that none has lanes of two
groups."""


@dataclasses.dataclass(frozen=True)
class _Shares:
  """Which program sums up what.

  A unit is one tile of the planes, or the part of it that a program's lanes
  are; units run over the columns of the first lanes, then of the next ones.

  Attributes:
    groups: of lanes.
    steps: units of a group.
    programs: no more than units.
  """

  groups: int
  steps: int
  programs: int

  @classmethod
  def of(cls, w: W12Array, tile: Tile) -> "_Shares":
    steps = w.low.shape[1]
    groups = pl.cdiv(w.lanes, tile.lanes)
    # A program that stays in one group has one pipeline to fill and to drain.
    # One that has to wait for another's end costs more than that.
    whole = groups * (tile.programs // groups)
    near = whole >= (1 - ALIGN) * tile.programs
    programs = whole if near else tile.programs
    return cls(groups, steps, min(programs, groups * steps))

  def begin(self, program):
    """First unit of a program."""
    return program * (self.groups * self.steps) // self.programs

  def owner(self, unit):
    """The program that a unit belongs to."""
    return ((unit + 1) * self.programs - 1) // (self.groups * self.steps)

  def first_owner(self, group):
    return self.owner(group * self.steps)

  def owners(self, group):
    """How many programs share a group's columns."""
    return (
      self.owner((group + 1) * self.steps - 1) - self.first_owner(group) + 1
    )

  @property
  def parts(self) -> int:
    """The most programs that share some columns."""
    return max(self.owners(group) for group in range(self.groups))


WIDE = Tile(lanes=64, num_warps=4, programs=264)
TILES = {8: Tile(), 16: Tile(), 32: Tile(), 64: WIDE}
"""By rows of x; measured on an H200 (132 multiprocessors)."""
LONG = 131_072
"""Rows of W (a vocabulary's) from which on `WIDE` is as fast or faster for any
number of rows of x: 1.1 % at 16, 2.5 % at 32."""

FINISH_ROWS, FINISH_N = 32, {8: 8, 16: 16, 32: 16, 64: 32}
"""Rows of W and of x that a program of the second kernel has at most, the
latter by rows of x. It waits three times for memory, so it is small and there
are many."""
FINISH_MANY = {8: 32_768, 16: 8192, 32: 8192, 64: 8192}
"""Rows of W, by rows of x, from which on that are programs enough; below, they
have half."""
ENTRIES = 32
"""Of the lists of its rows that such a program applies at a time: more than
32 rows of 5,120 have. Twice as many where its rows hold more than
`ENTRIES_WEIGHTS` weights."""
ENTRIES_WEIGHTS = 262_144


def matmul(
  x: Float[Array, "N I"],
  w: W12Array,
  *,
  out_dtype=None,
  view: bool = False,
  midpoint: bool = True,
  implementation: dispatch.Implementation = "reference",
  tile: Tile | None = None,
  expanded: Array | None = None,
) -> Float[Array, "N O"]:
  """x W^T, accumulated in float32 and rounded once.

  Args:
    w: the kernel takes planes in tiles.
    out_dtype: of x unless given.
    view: multiplies the 8-bit view instead of the matrix.
    midpoint: of the view, see `w12_array.decode_view`.
    implementation: the kernel takes bfloat16 rows; more than `MAX_ROWS` are
      multiplied with the decoded matrix.
    tile: of the kernel, instead of the one in the table.
    expanded: of the kernel, [4, T, K, h, w] bfloat16: what decoding is to
      yield in each quarter (2^(base - 113) times it is the weight). The same
      kernel without decoding, to check it.
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  n = x.shape[0]
  if implementation == "reference" or n > MAX_ROWS:
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
  return _matmul_kernel(
    x, w, out_dtype, view, implementation, tile, expanded, midpoint
  )


def _matmul_kernel(
  x, w, out_dtype, view, implementation, tile, expanded, midpoint
):
  """Two launches: what programs sum up, then all that is left to do."""
  if x.dtype != jnp.bfloat16:
    raise ValueError(f"w12_matmul's kernel does not take {x.dtype}")
  if not w.tiled:
    raise ValueError("w12_matmul's kernel takes planes in tiles")
  n = x.shape[0]
  _, _, height, width = w.low.shape
  tile = tile or (WIDE if w.shape[0] >= LONG else TILES[rows_of(n)])
  tile = dataclasses.replace(tile, lanes=min(tile.lanes, height))
  if width < 16 or tile.lanes < 16:
    raise ValueError(f"w12_matmul's kernel does not take W of {w.shape}")
  planes = (w.view01, w.view23) if view else (w.view01, w.view23, w.low)
  if expanded is not None:
    planes = (expanded,)
  lists = () if view else (w.row_start, w.columns, w.values)
  shares = _Shares.of(w, tile)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  call = functools.partial(
    pl.pallas_call, interpret=implementation == "interpret"
  )
  # Of the lists, an entry is of one column of x: side by side, a column's
  # numbers are one piece of memory.
  columns = (
    () if view else (jax.ShapeDtypeStruct((x.shape[1], rows_of(n)), x.dtype),)
  )
  parts, *columns = call(
    functools.partial(
      _stream,
      shares=shares,
      tile=tile,
      padded=rows_of(n),
      assembly=implementation == "triton",
      transpose=not view,
      filled=w12_array.MIDPOINT if midpoint else 0,
    ),
    grid=(shares.programs,),
    in_specs=[anywhere] * (2 + len(planes)),
    out_shape=[
      jax.ShapeDtypeStruct((shares.parts, n, 4 * w.lanes), jnp.float32),
      *columns,
    ],
    out_specs=[anywhere] * (1 + len(columns)),
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=tile.num_stages
    ),
    name="w12_view" if view else "w12_matmul",
  )(x, w.base, *planes)
  rows, few = w.shape[0], FINISH_N[rows_of(n)]
  many = rows >= FINISH_MANY[rows_of(n)]
  high = FINISH_ROWS if many else FINISH_ROWS // 2
  longer = high * w.shape[1] > ENTRIES_WEIGHTS
  return call(
    functools.partial(
      _finish,
      shares=shares,
      lanes=tile.lanes,
      few=few,
      high=high,
      entries=2 * ENTRIES if longer else ENTRIES,
    ),
    grid=(pl.cdiv(rows, high), pl.cdiv(n, few)),
    in_specs=[anywhere] * (1 + len(columns) + len(lists)),
    out_shape=jax.ShapeDtypeStruct((n, rows), out_dtype),
    out_specs=anywhere,
    compiler_params=pltriton.CompilerParams(
      num_warps=pl.cdiv(few, 8), num_stages=1
    ),
    name="w12_finish",
  )(parts, *columns, *lists)


def rows_of(n: int) -> int:
  """Rows that a kernel for n rows works on."""
  return max(8, 1 << (n - 1).bit_length())


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
      unpack = _unpack_assembly if assembly else _unpack
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
    exponent = base.astype(jnp.int32) + w12_array.SCALE_OFFSET
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    live = None if whole else lane < size
    total = (total * scale[:, None]).T
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


def _finish(parts_ref, *refs, shares, lanes, few, high, entries):
  """Adds parts in their order, then what the lists make of x."""
  list_refs, out_ref = refs[:-1], refs[-1]
  n, rows = out_ref.shape
  row = pl.program_id(0) * high + jnp.arange(high)
  each = pl.program_id(1) * few + jnp.arange(few)
  live = row < rows
  wanted = (each < n)[:, None] & live[None, :]
  spans = _spans(list_refs[1], high, row, rows) if list_refs else None
  # Of the parts, only what was summed up has been written.
  size = parts_ref.shape[2] // 4
  if size % high or lanes % high:
    owners = shares.owners(row % size // lanes)[None, :]
  else:
    owners = shares.owners(pl.program_id(0) * high % size // lanes)
  parts = [
    pltriton.load(
      parts_ref.at[part, each[:, None], row[None, :]],
      mask=wanted & (part < owners),
      other=0,
    )
    for part in range(parts_ref.shape[0])
  ]
  # Lists come first: their loads wait for one another, and for nothing else.
  if spans is not None:
    columns_ref, _, *entry_refs = list_refs
    parts.append(_listed(columns_ref, entry_refs, spans, each, entries).T)
  total = functools.reduce(operator.add, parts)
  place = out_ref.at[each[:, None], row[None, :]]
  pltriton.store(place, total.astype(out_ref.dtype), mask=wanted)


def _spans(start_ref, high, row, rows):
  """Where the lists of rows of W begin and end: of all, then of each."""
  first = pl.program_id(0) * high
  whole = start_ref[first], start_ref[jnp.minimum(first + high, rows)]
  # Rows that there are none of are behind every list.
  live, behind = row < rows, 2**31 - 1
  start = pltriton.load(start_ref.at[row], mask=live, other=behind)
  end = pltriton.load(start_ref.at[row + 1], mask=live, other=behind)
  return *whole, start, end


def _listed(columns_ref, entry_refs, spans, each, entries):
  """What the lists of rows of W make of rows `each` of x, float32.

  The lists of all rows follow one another: so many entries at a time are a
  small matrix, each in the row that it is of, and a product.

  Args:
    columns_ref: x [I, rows], each column a row.
    entry_refs: columns and values.
    spans: see `_spans`.
  """
  column_ref, value_ref = entry_refs
  first, last, start, end = spans

  def step(i, total):
    at = first + i * entries + jnp.arange(entries)
    real = at < last
    column = pltriton.load(column_ref.at[at], mask=real, other=0)
    value = pltriton.load(value_ref.at[at], mask=real, other=0)
    x = columns_ref[column[:, None], each[None, :]]
    # What is behind the last entry is in no row.
    own = (start[:, None] <= at[None, :]) & (at[None, :] < end[:, None])
    value = jnp.where(own, value.astype(jnp.float32)[None, :], 0.0)
    value = value.astype(jnp.bfloat16)
    return total + jnp.dot(value, x, preferred_element_type=jnp.float32)

  zeros = jnp.zeros((start.size, each.size), jnp.float32)
  return lax.fori_loop(0, pl.cdiv(last - first, entries), step, zeros)


def _unpack(q, *parts, filled=w12_array.MIDPOINT):
  """Row q of every lane times 2^(113 - base), bfloat16.

  Args:
    filled: lower mantissa bits of the view.
  """
  byte = parts[q // 2].astype(jnp.int32) >> (8 * (q % 2))
  low = filled
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


def _unpack_assembly(q, *parts, filled=w12_array.MIDPOINT):
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
    lines.append(f"lop3.b32 a, a, b, {filled << 16 | filled:#010x}, 0xea;")
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
