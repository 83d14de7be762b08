"""How a product with FP8 is cut up for a Hopper GPU, see `fp8_hopper`.

By a model of the card, of what binds: the FP8 units, adding up, memory, or the
L2 cache, from which every program reads rows of x again.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from jax.experimental import pallas as pl

from pallas_kernels.fp8_array import BLOCK

PROGRAMS = 132
"""Multiprocessors of an H100 or H200; some Hopper cards have fewer."""
CONSUMERS = 2
"""Warp groups that multiply; one more loads."""
SHARED_MEMORY = 224 << 10
"""Bytes of a program's ring."""
HIGH = 64
"""Rows of W of a warp group: those of a `wgmma`."""
WIDE = 128
"""Rows of x of a product at most: its sums are in registers twice."""
MOST_COLUMNS = 256
ROOMY = 192
"""Of them for a consumer, so many that registers are left for what is not a sum
of a product. With more, and several tiles one by one, `ptxas` spills some."""
MOST_BLOCKS = 4
"""Of 128 columns, that a slot of the ring has."""
LEAST_STAGES = 4
MOST_STAGES = 32
SUMS = 176
"""Registers of a thread for sums and products."""
EIGHT = 8
"""Rows of a tile in shared memory."""


@dataclasses.dataclass(frozen=True)
class Tile:
  """How a product is cut up.

  Attributes:
    rows: of W for a program at a time, a multiple of 8 up to 128; from 72 on
      each consumer has 64 of them, with fewer each has all and half of x.
    columns: rows of x, a multiple of 16 up to 256.
    cluster: programs that share them.
    blocks: of 128 columns in a slot of the ring; chosen where 0.
    stages: slots; chosen where 0.
    ahead: products of a consumer in flight; chosen where 0.
  """

  rows: int
  columns: int
  cluster: int = 1
  blocks: int = 0
  stages: int = 0
  ahead: int = 0

  @property
  def by_rows(self) -> bool:
    """Whether consumers share rows of W, not of x."""
    return self.rows > HIGH

  @property
  def padded(self) -> int:
    """Rows that products have."""
    return 2 * HIGH if self.by_rows else HIGH

  @property
  def own(self) -> int:
    """Rows of x of a consumer."""
    return self.columns if self.by_rows else self.columns // 2

  @property
  def pieces(self) -> int:
    """Products that a consumer's rows of x are."""
    return pl.cdiv(self.own, WIDE)

  def slot(self, blocks: int) -> int:
    """Bytes of a slot."""
    codes = (self.padded + self.columns) * BLOCK * blocks
    return codes + 4 * self.columns * self.scales_of(blocks)

  def scales_of(self, blocks: int) -> int:
    """Rows of scales of x in a slot, so many that it has 128s of bytes."""
    return blocks * (1 if self.columns * blocks % 32 == 0 else 2)

  @property
  def scales(self) -> int:
    """Those of the slots that it has."""
    return self.scales_of(self.blocks)

  def filled(self, blocks: int) -> "Tile":
    """With everything chosen, for a matrix of so many blocks across."""
    deep = self.blocks
    if not deep:
      deep = math.gcd(blocks, MOST_BLOCKS)
      while deep > 1 and SHARED_MEMORY // self.slot(deep) < LEAST_STAGES:
        deep //= 2
    stages = self.stages or SHARED_MEMORY // self.slot(deep)
    piece = self.own // self.pieces
    ahead = self.ahead or max(1, (SUMS - self.own // 2) // (piece // 2))
    return dataclasses.replace(
      self,
      blocks=deep,
      stages=min(stages, MOST_STAGES),
      ahead=min(ahead, deep * self.pieces),
    )


# Of a multiprocessor, in bytes a clock; what an H200 does at 1.76 GHz.
_FLOW = 26.0  # from the L2 cache, where all multiprocessors ask
_PORT = 40.0  # from it where few do
_MEMORY = 18.5  # from memory, a 132nd of its rate


def clusters_of(tile: Tile, programs: int) -> int:
  """Clusters of a launch at most: as many as a card holds at once.

  Its multiprocessors come in groups of at most 18, some of fewer, of which
  clusters of four leave a few: an H200 that was asked for 31 ran the last ones
  behind all others, in twice the time.
  """
  clusters = programs // tile.cluster
  return max(1, (clusters - 1) * 7 // 8) if tile.cluster > 2 else clusters


def cost(tile: Tile, n: int, w_rows: int, programs: int = PROGRAMS) -> float:
  """Clocks of a block of columns, of all tiles that a program does, about."""
  clusters = clusters_of(tile, programs)
  down = pl.cdiv(w_rows, tile.rows)
  across = pl.cdiv(n, tile.columns)
  units = pl.cdiv(down, tile.cluster) * across
  active = min(units, clusters)
  share = active * tile.cluster / programs
  # A product reads both tiles from shared memory.
  product = 4 * max(tile.own / 2, 16 + tile.own / 4)
  read = (tile.rows + tile.columns / tile.cluster) * BLOCK
  limits = (
    CONSUMERS * product,
    product + 1.3 * tile.own + 90,  # one after the other, scales and barriers
    read / _PORT,
    read * share / _FLOW,
    tile.rows * BLOCK * share / min(across, active) / _MEMORY,
  )
  # What is nearly as slow as the slowest is in its way now and then.
  step = sum(limit**6 for limit in limits) ** (1 / 6)
  turns = pl.cdiv(units, clusters)
  spills = 1.2 if tile.own > ROOMY and turns > 1 else 1
  return turns * step * (1 + 0.01 * tile.cluster) * spills


def tiles(n: int) -> Iterator[Tile]:
  """Those to choose from for n rows of x."""
  for cluster in (1, 2, 4):
    unit = max(16, EIGHT * cluster)
    parts = pl.cdiv(n, MOST_COLUMNS)
    columns = {pl.cdiv(pl.cdiv(n, parts + i), unit) * unit for i in range(3)}
    for column in sorted(columns):
      for row in range(EIGHT, 2 * HIGH + 1, EIGHT):
        yield Tile(row, column, cluster)


@functools.cache
def plan(n: int, w_rows: int, programs: int = PROGRAMS) -> Tile:
  """The tile for n rows of x and so many of W."""
  return min(tiles(n), key=lambda tile: cost(tile, n, w_rows, programs))
