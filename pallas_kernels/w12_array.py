"""W12: a bfloat16 matrix in 12 bits a weight, without losing one of them.

Every row has a window of 15 exponents. A weight inside it is sign, 4-bit code
(1 to 15) and 7-bit mantissa; code 0 is a signed zero; any other weight stands
as it is in the row's sparse list, with a zero in its place. The sign, the code
and the upper three bits of the mantissa are a byte: the *view*, a coarser
matrix inside the exact one. The other four bits are apart.

A kernel decodes the four rows p, P + p, 2 P + p and 3 P + p at once (P is a
quarter of the rows), from lanes of 16 bits that hold their parts. In storage
the lanes lie row by row, [P, I]. In a model they lie tile by tile, so that what
a program reads at a time is one piece of memory. Nothing else touches the
planes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Bool, Int, Int32, UInt8, UInt16

TILE = 64
"""Rows and columns of a tile of lanes, unless the matrix is smaller."""

WINDOW = 15
"""Exponents of a row that have a code."""

MIN_BASE, MAX_BASE = 1, 240
"""Lowest exponent field of a window: all of it is of normal numbers, and the
row's scale 2^(base - 113) is one in float32."""

SCALE_OFFSET = 14
"""A decoded tile holds 2^(code - 15) for code; base + 14 is the exponent field
of the float32 that makes it the weight."""

MIN_ROOM = 1 << 10
"""Entries that the lists of a model's matrix have room for, at least."""

MIDPOINT = 8
"""Lower four bits of the mantissa in the view, which would be 4 % low without
them. Code 0 gets them too, as a kernel ORs them into every code at once: it
stands for 1/16 of the smallest number of code 1, far below what the view
rounds away elsewhere."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class W12Array:
  """A matrix [O, I] in W12; rows are padded to a multiple of four.

  Attributes:
    view01: view bytes of rows p (low half of a lane) and P + p (high half);
      row by row [P, I], or tile by tile [T, K, h, w] with h T >= P, w K = I.
    view23: those of rows 2 P + p and 3 P + p.
    low: lower mantissa bits: of row p in bits 0 to 3, of P + p in bits 4 to 7,
      and so on.
    base: exponent field of code 1 in each row.
    row_start: entries row_start[r] to row_start[r + 1] of the lists are row
      r's, in the order of their columns.
    columns, values: of weights outside the window, never none: what lies
      behind the last row's end fills up.
    shape: O and I.
  """

  view01: UInt16[Array, "P I"] | UInt16[Array, "T K h w"]
  view23: UInt16[Array, "P I"] | UInt16[Array, "T K h w"]
  low: UInt16[Array, "P I"] | UInt16[Array, "T K h w"]
  base: UInt8[Array, " R"]
  row_start: Int32[Array, " R1"]
  columns: Int32[Array, " n"]
  values: BFloat16[Array, " n"]
  shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

  @property
  def dtype(self) -> jnp.dtype:
    """Of the matrix."""
    return jnp.dtype(jnp.bfloat16)

  @property
  def ndim(self) -> int:
    return 2

  @property
  def nbytes(self) -> int:
    """Bytes of all parts."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

  @property
  def lanes(self) -> int:
    """P, a quarter of the padded rows."""
    return self.base.size // 4

  @property
  def tiled(self) -> bool:
    """Whether the planes lie tile by tile."""
    return self.low.ndim == 4


def tile_shape(lanes: int, columns: int) -> tuple[int, int]:
  """h and w of the tiles of planes [P, I]."""
  return min(TILE, pl.next_power_of_2(lanes)), math.gcd(TILE, columns)


def tile_plane(plane):
  """A plane [P, I] tile by tile, zeros below; numpy's or JAX's."""
  lanes, columns = plane.shape
  height, width = tile_shape(lanes, columns)
  tiles = -(-lanes // height)
  if tiles * height != lanes:
    below = tiles * height - lanes
    plane = jnp.pad(jnp.asarray(plane), ((0, below), (0, 0)))
  plane = plane.reshape(tiles, height, columns // width, width)
  return plane.transpose(0, 2, 1, 3)


def untile_plane(plane, lanes: int):
  """A plane row by row [P, I], whichever way it lies."""
  if plane.ndim == 2:
    return plane
  tiles, across, height, width = plane.shape
  plane = plane.transpose(0, 2, 1, 3).reshape(tiles * height, across * width)
  return plane[:lanes]


def list_room(entries: int) -> int:
  """Places of lists in a model: few sizes, so that kernels are compiled once.

  At most a quarter more than the entries, four sizes from one power of two to
  the next, and no fewer than `MIN_ROOM`.
  """
  room = max(entries, MIN_ROOM)
  step = 1 << max(0, room.bit_length() - 3)
  return -(-room // step) * step


def tile(w: W12Array) -> W12Array:
  """The same matrix as the kernel takes it: planes tile by tile, lists filled.

  Not for use inside a jit.
  """
  if w.tiled:
    return w
  behind = list_room(int(w.row_start[-1])) - w.columns.size
  fill = (0, max(0, behind))
  # Patterns, not numbers, are padded: a NaN keeps its payload.
  values = lax.bitcast_convert_type(jnp.asarray(w.values), jnp.uint16)
  return dataclasses.replace(
    _with_planes(w, tile_plane),
    columns=jnp.pad(jnp.asarray(w.columns), fill),
    values=lax.bitcast_convert_type(jnp.pad(values, fill), jnp.bfloat16),
  )


def untile(w: W12Array) -> W12Array:
  """The same matrix with planes row by row, as it is stored."""
  return _with_planes(w, lambda plane: untile_plane(plane, w.lanes))


def _with_planes(w: W12Array, change) -> W12Array:
  return dataclasses.replace(
    w, view01=change(w.view01), view23=change(w.view23), low=change(w.low)
  )


def bits(code: Int[Array, "..."], base: Int[Array, "..."]) -> Array:
  """The bfloat16 patterns of 12-bit codes, uint16.

  Args:
    code: sign, exponent code, mantissa: bits 11, 10 to 7, 6 to 0.
    base: exponent field of code 1.
  """
  sign, exponent, mantissa = code >> 11, (code >> 7) & 15, code & 127
  normal = ((exponent + base - 1) << 7) | mantissa
  return ((sign << 15) | jnp.where(exponent > 0, normal, 0)).astype(jnp.uint16)


def codes(
  w: W12Array, *, view: bool = False, midpoint: Bool[Array, ""] | bool = True
) -> Int32[Array, "R I"]:
  """The 12-bit codes of all rows, those that pad included.

  Args:
    view: the view's.
    midpoint: its lower mantissa bits are the midpoint; otherwise zeros.
  """
  w = untile(w)
  high = [x.astype(jnp.int32) for x in (w.view01, w.view23)]
  byte = jnp.concatenate([y for x in high for y in (x & 255, x >> 8)])
  if view:
    low = MIDPOINT * jnp.asarray(midpoint, jnp.int32)
  else:
    parts = w.low.astype(jnp.int32)
    low = jnp.concatenate([(parts >> (4 * i)) & 15 for i in range(4)])
  return (byte << 4) | low


def decode(w: W12Array) -> BFloat16[Array, "O I"]:
  """The matrix, bit for bit."""
  dense = bits(codes(w), w.base[:, None].astype(jnp.int32))
  rows = _rows_of_entries(w)
  exact = lax.bitcast_convert_type(w.values, jnp.uint16)
  # What fills the lists up has a row behind the last and is dropped.
  dense = dense.at[rows, w.columns].set(exact, mode="drop")
  return lax.bitcast_convert_type(dense[: w.shape[0]], jnp.bfloat16)


def decode_view(
  w: W12Array, *, midpoint: Bool[Array, ""] | bool = True
) -> BFloat16[Array, "O I"]:
  """The view's matrix: outside the window, 2^(base - 131) of either sign.

  Args:
    midpoint: see `MIDPOINT`; without it weights are cut off, and those outside
      the window are zeros.
  """
  code = codes(w, view=True, midpoint=midpoint)
  base = w.base[:, None].astype(jnp.int32)
  # Below base 5 that is a subnormal number, in units of 2^-133.
  least = jnp.where(base < 5, 1 << jnp.minimum(base + 2, 6), (base - 4) << 7)
  least = ((code >> 11) << 15) | least * jnp.asarray(midpoint, jnp.int32)
  dense = jnp.where((code >> 7) & 15 > 0, bits(code, base), least)
  dense = dense.astype(jnp.uint16)
  return lax.bitcast_convert_type(dense[: w.shape[0]], jnp.bfloat16)


def take(w: W12Array, rows: Int[Array, " N"]) -> BFloat16[Array, "N I"]:
  """Some rows of the matrix, bit for bit; ids are clipped to the range."""
  rows = jnp.clip(rows.astype(jnp.int32), 0, w.shape[0] - 1)
  quarter, lane = rows // w.lanes, rows % w.lanes

  def lanes_of(plane):
    if not w.tiled:
      return plane[lane].astype(jnp.int32)
    height = plane.shape[2]
    found = plane[lane // height, :, lane % height]
    return found.reshape(rows.size, w.shape[1]).astype(jnp.int32)

  pair = jnp.where(
    (quarter < 2)[:, None], lanes_of(w.view01), lanes_of(w.view23)
  )
  byte = (pair >> (8 * (quarter % 2))[:, None]) & 255
  low = (lanes_of(w.low) >> (4 * quarter)[:, None]) & 15
  dense = bits((byte << 4) | low, w.base[rows][:, None].astype(jnp.int32))
  start, end = w.row_start[rows], w.row_start[rows + 1]
  # As many as a row can have, and no loop whose length the device decides: it
  # would stand in the way of launching a step as one graph.
  at = start[:, None] + jnp.arange(w.shape[1], dtype=jnp.int32)
  here = at < end[:, None]
  at = jnp.minimum(at, w.columns.size - 1)
  column = jnp.where(here, w.columns[at], w.shape[1])
  # Patterns, not numbers, are gathered: a NaN keeps its payload.
  values = lax.bitcast_convert_type(w.values, jnp.uint16)[at]
  places = jnp.arange(rows.size)[:, None], column
  dense = dense.at[places].set(values, mode="drop")
  return lax.bitcast_convert_type(dense, jnp.bfloat16)


def _rows_of_entries(w: W12Array) -> Int32[Array, " n"]:
  """Behind the end of the last row stands one that there is not."""
  count, size = w.row_start.size - 1, w.columns.size
  rows = jnp.repeat(
    jnp.arange(count, dtype=jnp.int32),
    jnp.diff(w.row_start),
    total_repeat_length=size,
  )
  return jnp.where(jnp.arange(size) < w.row_start[-1], rows, count)
