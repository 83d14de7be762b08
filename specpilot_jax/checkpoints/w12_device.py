"""Matrices into W12 on the device that they are on."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int32, UInt8, UInt16

from pallas_kernels import w12_array
from pallas_kernels.w12_array import MIN_BASE, WINDOW, W12Array
from specpilot_jax.checkpoints import w12
from specpilot_jax.errors import SpecPilotError

BLOCK = 1 << 23
"""Weights whose windows and lists are found at once, unless a row has more."""
MIN_ENTRIES = 1 << 12
"""Lists are made with room for this times a power of two, then cut."""


def encode_on_device(weight: jax.Array) -> W12Array:
  """A matrix in W12 with planes in tiles, bit for bit as `w12.encode` has it.

  Beside the matrix and the result, memory is needed for two or three bytes for
  each weight of a block (18 MB for rows of 5,120 on a GPU, more on a CPU), and
  for the lists once more at up to twice their size. Waits for the device once,
  to learn how long the lists are, so it is not for use inside a jit.

  Args:
    weight: bfloat16 [O, I].

  Returns:
    Leaves on the device of the matrix.

  Raises:
    SpecPilotError: as `w12.encode`.
  """
  w12.check_matrix(weight)
  base, row_start = _windows(weight)
  entries = int(row_start[-1])
  if entries < 0:
    raise SpecPilotError(
      f"W12 lists {2**31 - 1} weights at most, matrix {list(weight.shape)} has "
      "more outside its windows"
    )
  room = MIN_ENTRIES
  while room < entries:
    room *= 2
  view01, view23, low = _planes(weight, base)
  lists = _lists(weight, base, row_start, room)
  columns, values = _cut(lists, w12_array.list_room(entries))
  return W12Array(
    view01=view01,
    view23=view23,
    low=low,
    base=base,
    row_start=row_start,
    columns=columns,
    values=values,
    shape=(weight.shape[0], weight.shape[1]),
  )


def _block(
  weight: Array, index: Array | int
) -> tuple[Array, UInt16[Array, "B I"]]:
  """First row and patterns of a block; the last one begins early if need be."""
  rows, width = weight.shape
  size = _block_size(rows, width)
  first = jnp.minimum(index * size, rows - size)
  block = lax.dynamic_slice_in_dim(weight, first, size)
  return first, lax.bitcast_convert_type(block, jnp.uint16)


def _block_size(rows: int, width: int) -> int:
  return min(max(1, BLOCK // width), rows)


def _num_blocks(rows: int, width: int) -> int:
  return -(-rows // _block_size(rows, width))


@jax.jit
def _windows(
  weight: BFloat16[Array, "O I"],
) -> tuple[UInt8[Array, " R"], Int32[Array, " R1"]]:
  """Windows of all rows, and where their lists begin."""
  rows, width = weight.shape

  def step(i, found):
    first, bits = _block(weight, i)
    new = _best_windows(bits & 0x7FFF)
    return tuple(
      lax.dynamic_update_slice_in_dim(old, part, first, 0)
      for old, part in zip(found, new, strict=True)
    )

  padded = 4 * -(-rows // 4)
  base = jnp.full(padded, MIN_BASE, jnp.uint8)
  outside = jnp.zeros(padded, jnp.int32)
  base, outside = lax.fori_loop(
    0, _num_blocks(rows, width), step, (base, outside)
  )
  row_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(outside)])
  return base, row_start


def _best_windows(
  magnitude: UInt16[Array, "B I"],
) -> tuple[UInt8[Array, " B"], Int32[Array, " B"]]:
  """Windows of some rows, and how many weights each leaves outside.

  From the window under a row's highest exponent on downwards, until what lies
  above is no less than what the best so far leaves out.
  """
  exponent = magnitude >> 7
  normal = (exponent > 0) & (exponent < 255)
  lowest = MIN_BASE + WINDOW - 1

  def count(mask):
    return jnp.sum(mask, axis=1, dtype=jnp.int32)

  def holds(top):
    return count(
      (exponent <= top[:, None]) & (exponent > top[:, None] - WINDOW)
    )

  def undecided(state):
    top, above, _, lost = state
    return (top > lowest) & (above < lost)

  def lower(state):
    top, above, best, lost = state
    above += count(exponent == top[:, None])
    top -= 1
    occurs = (top == lowest) | jnp.any(exponent == top[:, None], axis=1)
    left = normals - holds(top)
    better = undecided(state) & occurs & (left < lost)
    return (
      jnp.where(undecided(state), top, state[0]),
      jnp.where(undecided(state), above, state[1]),
      jnp.where(better, top, best),
      jnp.where(better, left, lost),
    )

  normals = count(normal)
  top = jnp.max(jnp.where(normal, exponent, 0), axis=1)
  top = jnp.maximum(top, lowest).astype(jnp.uint16)
  first = top, jnp.zeros_like(normals), top, normals - holds(top)
  _, _, best, lost = lax.while_loop(
    lambda state: jnp.any(undecided(state)), lower, first
  )
  base = (best - (WINDOW - 1)).astype(jnp.uint8)
  return base, lost + count((magnitude != 0) & ~normal)


@jax.jit
def _planes(
  weight: BFloat16[Array, "O I"], base: UInt8[Array, " R"]
) -> tuple[UInt16[Array, "T K h w"], ...]:
  rows = weight.shape[0]
  lanes = base.size // 4

  def codes(i: int) -> UInt16[Array, "P I"]:
    quarter = weight[i * lanes : min((i + 1) * lanes, rows)]
    missing = lanes - quarter.shape[0]
    bits = lax.bitcast_convert_type(quarter, jnp.uint16)
    bits = jnp.pad(bits, ((0, missing), (0, 0)))
    start = base[i * lanes : (i + 1) * lanes].astype(jnp.uint16) << 7
    magnitude = bits & 0x7FFF
    offset = magnitude - start[:, None]
    inside = offset < WINDOW << 7
    code = jnp.where(inside, offset + 128, 0)
    sign = jnp.where(inside | (magnitude == 0), (bits >> 4) & 0x800, 0)
    return sign | code

  a, b, c, d = (codes(i) for i in range(4))
  view01 = (a >> 4) | ((b << 4) & 0xFF00)
  view23 = (c >> 4) | ((d << 4) & 0xFF00)
  low = (a & 15) | ((b & 15) << 4) | ((c & 15) << 8) | (d << 12)
  return tuple(map(w12_array.tile_plane, (view01, view23, low)))


@functools.partial(jax.jit, static_argnames="room")
def _lists(
  weight: BFloat16[Array, "O I"],
  base: UInt8[Array, " R"],
  row_start: Int32[Array, " R1"],
  room: int,
) -> tuple[Int32[Array, " n"], BFloat16[Array, " n"]]:
  """Columns and values, and zeros behind them."""
  rows, width = weight.shape

  def step(i, found):
    first, bits = _block(weight, i)
    size = bits.shape[0]
    begin = lax.dynamic_slice_in_dim(base, first, size).astype(jnp.uint16) << 7
    magnitude = bits & 0x7FFF
    outside = magnitude - begin[:, None] >= WINDOW << 7
    listed = outside & (magnitude != 0)
    rank = jnp.cumsum(listed, axis=1, dtype=jnp.int32) - 1
    start = lax.dynamic_slice_in_dim(row_start, first, size)[:, None]
    place = jnp.where(listed, start + rank, room)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), bits.shape)
    columns, values = found
    return (
      columns.at[place].set(column, mode="drop"),
      values.at[place].set(bits, mode="drop"),
    )

  empty = jnp.zeros(room, jnp.int32), jnp.zeros(room, jnp.uint16)
  columns, values = lax.fori_loop(0, _num_blocks(rows, width), step, empty)
  return columns, lax.bitcast_convert_type(values, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _cut(lists: tuple[Array, Array], room: int) -> tuple[Array, Array]:
  columns, values = lists
  return columns[:room], values[:room]
