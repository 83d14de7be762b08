"""y = x W^T with W in FP8: rows become codes, codes are multiplied.

With c, s for the codes and scales of x, and C, S for those of W,

    y[n, o] = sum over blocks b of (sum over k in b of c[n, k] C[o, k])
              * (s[n, b] * S[o, b])

where b runs over the columns that share a scale: 128 of them, or all. The
reference says so in plain JAX. The kernel multiplies tiles of 128 columns in
the FP8 units and adds them in float32, in an order that depends on the shape of
W alone: what a row yields does not depend on how many rows there are.

A program has some rows of W, up to 128 rows of x and a run of blocks. Where
there would be too few programs the blocks are shared out; what each share sums
up is added in order, by XLA, which fuses that with what follows. With many rows
of x there are programs enough, and one has all shares, in the same order: as
parts in memory they would be more bytes than the matrix.

Hopper cards have a kernel of their own, `fp8_hopper`.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import (
  dispatch,
  fp8_array,
  fp8_dot,
  fp8_hopper,
  fp8_rows,
)
from pallas_kernels.fp8_array import BLOCK, FP8Array

MOST_ROWS = 128
"""Rows of a tile of x at most; more rows are several tiles."""

LEAST_ROWS = 16
"""Rows of a tile of x at least: of fewer the FP8 units are not used."""

PIECE = 128
"""Rows of x that the reference multiplies at once: it holds the products of all
blocks, 0.7 GB for the largest matrix of a 27B model."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """How a product is cut up.

  Attributes:
    rows: of W for a program.
    num_warps, num_stages: of Triton.
  """

  rows: int = 64
  num_warps: int = 4
  num_stages: int = 4


@dataclasses.dataclass(frozen=True)
class Card:
  """What suits a card.

  Attributes:
    programs: that it can hold at once, about; blocks are shared out among so
      many at most.
    multiprocessors: programs from which on each has all shares.
    tiles: by rows of x, a power of two.
    whole: tiles of such programs, the largest first.
  """

  programs: int
  multiprocessors: int
  tiles: dict[int, Tile]
  whole: tuple[Tile, ...]


HOPPER = Card(
  programs=660,
  multiprocessors=132,
  tiles={
    16: Tile(),
    32: Tile(),
    64: Tile(num_stages=3),
    128: Tile(rows=128, num_warps=8, num_stages=3),
  },
  whole=(
    Tile(rows=128, num_warps=8, num_stages=3),
    Tile(num_warps=8, num_stages=3),
  ),
)
"""132 multiprocessors that each hold five programs."""

SMALL = Card(
  programs=564,
  multiprocessors=188,
  tiles={
    16: Tile(num_stages=3),
    32: Tile(num_stages=3),
    64: Tile(num_stages=2),
    128: Tile(num_warps=8, num_stages=2),
  },
  whole=(Tile(num_warps=8, num_stages=2),),
)
"""188 multiprocessors of 99 KB of shared memory, such as an RTX PRO 6000's."""


def card() -> Card:
  """Of the GPU that is compiled for."""
  return HOPPER if dispatch.shared_memory() > 128 << 10 else SMALL


def rows_of(n: int) -> int:
  """Rows of a tile of x where there are n in all."""
  return min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(n)))


def shares_of(w: FP8Array, programs: int) -> int:
  """Programs that share the blocks of a row; no more than there are blocks.

  Counted with the smallest tiles, so that it is the same for any rows of x.
  """
  rows, columns = w.codes.shape
  whole = pl.cdiv(rows, Tile.rows)
  return max(1, min(programs // whole, pl.cdiv(columns, BLOCK)))


def cut(mine: Card, n: int, w: FP8Array) -> tuple[Tile, bool]:
  """The tile for n rows of x, whether a program has all shares."""
  height, rows = rows_of(n), w.codes.shape[0]
  if height == MOST_ROWS:
    for tile in mine.whole:
      if pl.cdiv(n, height) * pl.cdiv(rows, tile.rows) >= mine.multiprocessors:
        return tile, True
  return mine.tiles[height], False


def matmul(
  x: Float[Array, "N I"],
  w: FP8Array,
  *,
  out_dtype=None,
  implementation: dispatch.FP8Implementation = "reference",
  tile: Tile | None = None,
  shares: int | None = None,
  together: bool | None = None,
) -> Float[Array, "N Q"]:
  """x W^T for the rows of W that are codes, rounded once.

  Args:
    x: float32 is the least that its scales and sums have.
    w: its `rest` does not take part.
    out_dtype: of x unless given.
    implementation: kernels take any number of rows; `mosaic` is `fp8_hopper`,
      and this kernel for matrices that it does not take.
    tile: of this kernel, instead of that which suits the card.
    shares: of the blocks, likewise.
    together: whether one program has all of them, likewise.
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  if implementation == "reference":
    return _reference(x, w).astype(out_dtype)
  if implementation == "mosaic":
    if fp8_hopper.takes(w):
      return fp8_hopper.matmul(x, w, out_dtype)
    implementation = "triton"
  mine = card()
  own, enough = cut(mine, x.shape[0], w)
  return _kernel(
    x,
    w,
    implementation,
    tile or own,
    shares or shares_of(w, mine.programs),
    enough if together is None else together,
    jnp.dtype(out_dtype),
  )


def _reference(x, w):
  n = x.shape[0]
  if n <= PIECE:
    return _product(x, w)
  pieces = jnp.pad(x, ((0, -n % PIECE), (0, 0))).reshape(-1, PIECE, x.shape[1])
  return lax.map(lambda piece: _product(piece, w), pieces).reshape(
    -1, w.codes.shape[0]
  )[:n]


def _product(x, w):
  """The formula above, in the type of the scales of x."""
  block = w.block[1]
  codes, scale = fp8_array.quantize_rows(x, block)
  weights, acc = w.codes, scale.dtype
  # On a GPU XLA has products of codes; elsewhere they are numbers of the type.
  if jax.default_backend() != "gpu":
    codes, weights = codes.astype(acc), weights.astype(acc)
  product = functools.partial(
    jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=acc
  )
  scales = fp8_array.row_scales(w).astype(acc)
  if scale.shape[1] == 1:
    return product("ni,oi->no", codes, weights) * (scale * scales.T)
  columns = ((0, 0), (0, -codes.shape[1] % block))
  codes, weights = jnp.pad(codes, columns), jnp.pad(weights, columns)
  products = product(
    "nbk,obk->bno",
    codes.reshape(codes.shape[0], -1, block),
    weights.reshape(weights.shape[0], -1, block),
  )
  return (products * (scale.T[:, :, None] * scales.T[:, None, :])).sum(axis=0)


@dispatch.once("implementation", "tile", "shares", "together", "out_dtype")
def _kernel(x, w, implementation, tile, shares, together, out_dtype):
  n = x.shape[0]
  rows = w.codes.shape[0]
  height = rows_of(n)
  padded = pl.cdiv(n, height) * height
  programs = 1 if together else shares
  codes, scale = fp8_rows.quantize(x, w.block[1], padded, implementation)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  parts = pl.pallas_call(
    functools.partial(
      _sum_up, tile=tile, height=height, shares=shares, block=w.block
    ),
    # Programs next to one another have the same rows of W.
    grid=(padded // height, pl.cdiv(rows, tile.rows), programs),
    in_specs=[anywhere] * 4,
    out_specs=anywhere,
    out_shape=jax.ShapeDtypeStruct(
      (programs, padded, rows), out_dtype if programs == 1 else jnp.float32
    ),
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=tile.num_stages
    ),
    interpret=implementation == "interpret",
    name="fp8_matmul",
  )(codes, scale, w.codes, w.scale)
  total = functools.reduce(operator.add, [part[:n] for part in parts])
  return total.astype(out_dtype)


def _sum_up(
  x_ref, s_ref, w_ref, scale_ref, out_ref, *, tile, height, shares, block
):
  """What a share of the blocks, or all, yields for some rows of x and of W.

  Args:
    x_ref: codes [n, blocks * 128].
    s_ref: their scales [C, n].
    w_ref: codes [Q, I].
    scale_ref: their scales [R, C].
    out_ref: [programs, n, Q].
  """
  blocks = x_ref.shape[1] // BLOCK
  rows, width = w_ref.shape
  here = pl.ds(pl.program_id(0) * height, height)
  first, part = pl.program_id(1) * tile.rows, pl.program_id(2)
  programs = out_ref.shape[0]
  row = first + jnp.arange(tile.rows)
  whole = rows % tile.rows == 0

  def weights(b):
    if whole and width % BLOCK == 0:
      return w_ref[pl.ds(first, tile.rows), pl.ds(b * BLOCK, BLOCK)]
    column = b * BLOCK + jnp.arange(BLOCK)
    live = (row < rows)[:, None] & (column < width)[None, :]
    place = w_ref.at[row[:, None], column[None, :]]
    return pltriton.load(place, mask=live, other=0.0)

  def scales(c):
    """Of a column of blocks: [rows of W or one, rows of x]."""
    own = s_ref[c, here][None, :]
    if block[0] % tile.rows == 0:
      return scale_ref[first // block[0], c] * own
    at = scale_ref.at[row // block[0], c]
    return pltriton.load(at, mask=row < rows, other=0.0)[:, None] * own

  def product(b):
    codes = x_ref[here, pl.ds(b * BLOCK, BLOCK)]
    return fp8_dot.dot(weights(b), codes)

  def sum_of(share):
    begin, end = share * blocks // shares, (share + 1) * blocks // shares
    total = jnp.zeros((tile.rows, height), jnp.float32)
    if s_ref.shape[0] == 1:
      total = lax.fori_loop(begin, end, lambda b, t: t + product(b), total)
      return total * scales(0)

    def step(b, carry):
      # The next scales are on their way while the units are at work.
      total, scale = carry
      ahead = scales(jnp.minimum(b + 1, end - 1))
      return total + product(b) * scale, ahead

    return lax.fori_loop(begin, end, step, (total, scales(begin)))[0]

  total = sum_of(part)
  if programs < shares:
    total = lax.fori_loop(
      1, shares, lambda share, total: total + sum_of(share), total
    )
  total = total.astype(out_ref.dtype)
  if whole:
    out_ref[part, here, pl.ds(first, tile.rows)] = total.T
  else:
    each = pl.program_id(0) * height + jnp.arange(height)
    place = out_ref.at[part, each[:, None], row[None, :]]
    live = jnp.broadcast_to((row < rows)[None, :], (height, tile.rows))
    pltriton.store(place, total.T, mask=live)
