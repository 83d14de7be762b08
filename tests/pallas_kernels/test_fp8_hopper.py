"""The Hopper kernel of products with FP8: planned, interpreted, lowered."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import fp8_hopper, fp8_matmul, fp8_tiles
from pallas_kernels.fp8_array import BLOCK, E4M3
from pallas_kernels.fp8_tiles import Tile
from tests.decoding import kit
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_fp8_matmul import (
  BFLOAT16,
  BLOCKS,
  exact,
  gaussian,
  made,
  packed,
  rows,
  struct,
)

SHAPES = (
  (34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144),
)  # fmt: skip
"""Matrices of a 27B model."""


def product(x, w, tile, out_dtype=jnp.float32):
  return fp8_hopper.matmul(x, w, out_dtype, tile=tile, interpret=True)


class ProductTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def programs(self, number: int) -> None:
    patch = mock.patch.object(fp8_hopper, "PROGRAMS", number)
    self.enterContext(patch)

  @parameterized.parameters(
    # Tiles that lie in two blocks of scales, and a last one of few rows; two
    # in turn for a program, through a ring of two slots.
    dict(shape=(272, 256), n=5, tile=Tile(88, 16, blocks=1, stages=2)),
    # Consumers share rows of x; several tiles of these.
    dict(shape=(104, 512), n=40, tile=Tile(40, 32)),
    # One scale for a tile.
    dict(shape=(72, 384), n=20, tile=Tile(64, 32)),
    # A scale for a row.
    dict(shape=(144, 256), n=20, tile=Tile(72, 16), block=(1, 256)),
    # Rows of x in two pieces.
    dict(shape=(80, 128), n=130, tile=Tile(80, 144), block=(1, 128)),
  )
  def test_against_float64(self, shape, n, tile, block=BLOCKS):
    self.programs(2)
    x, w = rows(n, shape[1]), packed(gaussian(*shape), block)
    wanted, size = exact(x, w)
    found = product(x, w, tile)
    self.assertEqual(found.shape, (n, shape[0]))
    error = np.abs(np.asarray(found, np.float64) - wanted) / size
    self.assertLess(error.max(), 1e-6)

  def test_any_tile_has_the_same_bits(self):
    """As each row has alone: blocks are added in the same order."""
    rng = np.random.default_rng(0)
    w = packed(gaussian(136, 512), BLOCKS)
    codes = rng.integers(-15, 16, (136, 512)).astype(E4M3)
    w = made(codes, w.scale, w.rest, w.block)
    x = rng.integers(-15, 16, (36, 512)) * rng.normal(size=(36, 1))
    x = x.astype(BFLOAT16)
    wanted = product(x, w, Tile(136 // 2 // 8 * 8, 48))
    for some, tile in (
      (slice(0, 36), Tile(128, 16, blocks=1)),
      (slice(3, 12), Tile(40, 16)),
      (slice(7, 8), Tile(96, 16, blocks=2)),
    ):
      np.testing.assert_array_equal(product(x[some], w, tile), wanted[some])

  def test_rounds_once(self):
    x, w = rows(3, 128), packed(gaussian(64, 128), BLOCKS)
    found = product(x, w, Tile(64, 16), jnp.bfloat16)
    wide = product(x, w, Tile(64, 16))
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))

  def test_of_a_batch_all_rows_are_one_product(self):
    x, w = rows(6, 128), packed(gaussian(64, 128), BLOCKS)
    run = functools.partial(product, w=w, tile=Tile(64, 16))
    found = jax.vmap(run)(x.reshape(2, 3, 128))
    np.testing.assert_array_equal(found.reshape(6, 64), run(x))
    with self.assertRaisesRegex(ValueError, "a batch of weights in FP8"):
      several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
      jax.vmap(product, in_axes=(None, 0, None))(x, several, Tile(64, 16))

  def test_what_it_does_not_take(self):
    for high, width, block in (
      (100, 256, BLOCKS), (64, 200, BLOCKS), (64, 256, (1, BLOCK)),
    ):  # fmt: skip
      w = packed(gaussian(high, width), block)
      self.assertFalse(fp8_hopper.takes(w))
      with self.assertRaisesRegex(ValueError, f"not .{high}, {width}. and"):
        product(rows(2, width), w, None)


class PlanTest(parameterized.TestCase):
  @parameterized.product(
    n=(1, 16, 33, 64, 128, 200, 256, 512, 4096), programs=(132, 114)
  )
  def test_tiles_are_such_as_the_kernel_has(self, n, programs):
    for high, width in SHAPES:
      tile = fp8_tiles.plan(n, high, programs).filled(width // BLOCK)
      self.assertEqual(tile.rows % 8, 0)
      self.assertLessEqual(tile.rows, 128)
      # Each program of a cluster asks for whole eights of rows of x.
      self.assertEqual(tile.columns % (8 * tile.cluster), 0)
      self.assertEqual(tile.own % tile.pieces, 0)
      piece = tile.own // tile.pieces
      self.assertEqual(piece % 8, 0)
      self.assertLessEqual(piece, fp8_tiles.WIDE)
      self.assertEqual(width // BLOCK % tile.blocks, 0)
      self.assertGreaterEqual(tile.stages, fp8_tiles.LEAST_STAGES)
      # TMA writes to multiples of 128 bytes.
      self.assertEqual(tile.scales * tile.columns * 4 % 128, 0)
      ring = tile.slot(tile.blocks) * tile.stages
      self.assertLessEqual(ring, fp8_tiles.SHARED_MEMORY)
      # Of a thread: sums, and products that are under way.
      sums = tile.own // 2 + tile.ahead * piece // 2
      self.assertLessEqual(sums, fp8_hopper.REGISTERS["multiply"] - 40)

  def test_no_rows_are_for_nothing(self):
    for high, _ in SHAPES:
      tile = fp8_tiles.plan(16, high)
      self.assertEqual(tile.columns, 16)
      at_once = fp8_tiles.clusters_of(tile, 132) * tile.cluster
      turns = -(-high // (tile.rows * at_once))
      # In as many turns no smaller tile would do, or it is a whole one.
      smaller = (tile.rows - 8) * at_once * turns
      self.assertTrue(smaller < high or tile.rows % 64 == 0)

  def test_many_rows_are_tiles_of_as_many(self):
    self.assertEqual(fp8_tiles.plan(512, 34816).columns, 256)
    self.assertIn(fp8_tiles.plan(257, 16384).columns, (144, 160))


class LoweringTest(parameterized.TestCase):
  @parameterized.parameters(
    ("NVIDIA H100 80GB HBM3", 16, 34816, 5120, BLOCKS),
    ("NVIDIA H200", 1, 5120, 17408, (1, 17408)),
    ("NVIDIA H200", 100, 5120, 6144, BLOCKS),
    ("NVIDIA H200", 512, 14336, 5120, BLOCKS),
    ("NVIDIA H200", 512, 16384, 5120, (1, 5120)),
  )
  def test_lowers_at_27b_shapes(self, gpu, n, high, width, block):
    text = lowering.lower(
      functools.partial(fp8_matmul.matmul, implementation="mosaic"),
      gpu,
      jax.ShapeDtypeStruct((n, width), jnp.bfloat16),
      struct(high, width, block),
    )
    self.assertTrue("mosaic_gpu" in text and "fp8_rows" in text)

  def test_lowers_in_float32(self):
    text = lowering.lower(
      functools.partial(
        fp8_matmul.matmul, out_dtype=jnp.float32, implementation="mosaic"
      ),
      "NVIDIA H200",
      jax.ShapeDtypeStruct((3, 256), jnp.float32),
      struct(200, 256, BLOCKS),
    )
    self.assertIn("mosaic_gpu", text)

  @parameterized.parameters((100, 256), (104, 300))
  def test_takes_triton_where_it_must(self, high, width):
    text = lowering.lower(
      functools.partial(fp8_matmul.matmul, implementation="mosaic"),
      "NVIDIA H200",
      jax.ShapeDtypeStruct((3, width), jnp.bfloat16),
      struct(high, width, BLOCKS),
    )
    self.assertNotIn("mosaic_gpu", text)
    self.assertIn("fp8_matmul", text)


if __name__ == "__main__":
  absltest.main()
