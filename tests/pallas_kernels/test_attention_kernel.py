"""The tree-attention kernel: its arithmetic interpreted, and its lowering."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import dispatch, tree_attention
from tests import trees
from tests.decoding import kit
from tests.pallas_kernels import lowering

interpreted = jax.jit(
  functools.partial(tree_attention.tree_attention, implementation="interpret"),
  static_argnames=("scale",),
)
SCALE = 0.3


def arguments(rng, n, kv_heads, group, capacity, dim=16):
  return (
    rng.normal(size=(n, kv_heads * group, dim)),
    rng.normal(size=(n, kv_heads, dim)),
    rng.normal(size=(n, kv_heads, dim)),
    rng.normal(size=(kv_heads, capacity, dim)),
    rng.normal(size=(kv_heads, capacity, dim)),
  )


class AttentionKernelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def check(self, arrays, length, mask, first, dtype, tolerance):
    rounded = [np.asarray(jnp.asarray(x, dtype), float) for x in arrays]
    with jax.enable_x64(True):
      wide = [*(jnp.asarray(x) for x in rounded), jnp.int32(length), mask]
      expected = tree_attention.tree_attention(*wide, scale=SCALE, first=first)
    narrow = [*(jnp.asarray(x, dtype) for x in arrays), jnp.int32(length), mask]
    found = interpreted(*narrow, scale=SCALE, first=jnp.int32(first))
    self.assertEqual(found.dtype, dtype)
    np.testing.assert_allclose(
      np.asarray(found, float), expected, atol=tolerance, rtol=tolerance
    )

  @parameterized.parameters(
    # nodes, length, first, capacity
    (1, 0, 0, 70),
    (1, 300, 0, 301),
    (6, 129, 0, 200),
    (17, 200, 150, 217),
    (64, 65, 64, 129),
  )
  def test_against_the_reference_in_float64(self, n, length, first, capacity):
    rng = np.random.default_rng(n)
    for group in (1, 3):
      arrays = arguments(rng, n, 2, group, capacity)
      for parents in (list(range(-1, n - 1)), trees.random_parents(rng, n)):
        mask = jnp.asarray(trees.mask_of(parents))
        self.check(arrays, length, mask, first, jnp.float32, 3e-6)

  def test_bfloat16(self):
    rng = np.random.default_rng(0)
    arrays = arguments(rng, 16, 2, 6, 200)
    mask = jnp.asarray(trees.mask_of(trees.random_parents(rng, 16)))
    self.check(arrays, 150, mask, 0, jnp.bfloat16, 2e-2)

  @parameterized.parameters((2, 0), (9, 100), (75, 0), (75, 64), (192, 30))
  def test_runs(self, n, length):
    """Each sees those before it; blocks that no row sees are skipped."""
    rng = np.random.default_rng(n)
    arrays = arguments(rng, n, 2, 3, 120)
    self.check(arrays, length, None, 0, jnp.float32, 3e-6)
    tile = tree_attention.Tile(rows=16, block=16, programs=24, num_warps=4)
    with mock.patch.object(tree_attention, "tile_for", return_value=tile):
      jax.clear_caches()
      self.check(arrays, length, None, 0, jnp.float32, 3e-6)
    jax.clear_caches()

  def test_a_run_sees_nothing_behind_it(self):
    rng = np.random.default_rng(0)
    q, k, v, *prefix = arguments(rng, 70, 2, 3, 40)

    def attend():
      arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, *prefix)]
      return interpreted(*arrays, jnp.int32(20), None, scale=SCALE)

    clean = attend()
    k[50:], v[50:] = 1e4, -1e4
    np.testing.assert_array_equal(attend()[:50], clean[:50])

  def test_rows_behind_the_length_do_not_matter(self):
    rng = np.random.default_rng(0)
    q, k, v, k_prefix, v_prefix = (
      x.astype(np.float32) for x in arguments(rng, 5, 2, 2, 150)
    )
    mask = jnp.asarray(trees.mask_of([-1, 0, 0, 1, 2]))

    def attend():
      arrays = (q, k, v, k_prefix, v_prefix)
      return interpreted(*arrays, jnp.int32(70), mask, scale=SCALE)

    clean = attend()
    k_prefix[:, 70:], v_prefix[:, 70:] = 1e4, -1e4
    dirty = attend()
    np.testing.assert_array_equal(clean, dirty)

  @parameterized.product(gpu=tuple(lowering.GPUS), nodes=(1, 16, 64, 512))
  def test_lowers_at_27b_shapes(self, gpu, nodes):
    def shape(*dims, dtype=jnp.bfloat16):
      return jax.ShapeDtypeStruct(dims, dtype)

    def attend(q, k, v, k_prefix, v_prefix, length, mask):
      return tree_attention.tree_attention(
        q, k, v, k_prefix, v_prefix, length, mask, 256**-0.5,
        implementation="triton",
      )  # fmt: skip

    mask = shape(nodes, nodes, dtype=jnp.bool_)
    text = lowering.lower(
      attend,
      gpu,
      shape(nodes, 24, 256),
      shape(nodes, 4, 256),
      shape(nodes, 4, 256),
      shape(4, 1296, 256),
      shape(4, 1296, 256),
      shape(dtype=jnp.int32),
      None if nodes > 64 else mask,  # a run of prompt
    )
    self.assertIn("__gpu$xla.gpu.triton", text)

  @parameterized.product(
    gpu=tuple(lowering.GPUS), rows=(16, 128, 192, 384), dim=(64, 128, 256),
    itemsize=(2, 4),
  )  # fmt: skip
  def test_tiles_fit_the_shared_memory(self, gpu, rows, dim, itemsize):
    with lowering.on(gpu):
      memory = dispatch.shared_memory()
    self.assertEqual(memory, 101376 if "RTX" in gpu else 232448)
    tile = tree_attention.tile_for(rows, dim, itemsize, memory)
    asked = tree_attention.shared_bytes(tile, dim, itemsize)
    self.assertLessEqual(asked, memory)
    self.assertEqual((tile.rows % 16, tile.block % 16), (0, 0))
    if itemsize == 2 and "RTX" not in gpu:  # nothing is cut
      uncut = tree_attention.TILES.get(rows, tree_attention.MANY_ROWS)
      self.assertEqual(tile, uncut)

  def test_shared_memory_that_the_compiler_asks_for(self):
    """As it was compiled for an H200, keys of 256 numbers."""
    for tile, itemsize, asked in (
      ((128, 64, 132, 8, 2), 2, 196608),
      ((128, 32, 132, 8, 3), 2, 163840),
      ((128, 32, 132, 8, 2), 2, 139264),
      ((64, 64, 132, 4, 2), 2, 163840),
      ((32, 64, 132, 4, 2), 2, 86016),
      ((16, 64, 64, 4, 2), 2, 75776),
      ((32, 32, 132, 4, 2), 4, 102528),
      ((16, 64, 64, 4, 2), 4, 151616),
    ):
      found = tree_attention.shared_bytes(
        tree_attention.Tile(*tile), 256, itemsize
      )
      self.assertBetween(found, asked, asked * 1.11)

  @parameterized.parameters((32, 64, 64), (32, 32, 1), (16, 16, 500))
  def test_small_tiles(self, rows, block, programs):
    """One part, a few, and more than are merged at once."""
    rng = np.random.default_rng(0)
    arrays = arguments(rng, 16, 2, 6, 200)
    mask = jnp.asarray(trees.mask_of(trees.random_parents(rng, 16)))
    tile = tree_attention.Tile(
      rows=rows, block=block, programs=programs, num_warps=4
    )
    with mock.patch.object(tree_attention, "tile_for", return_value=tile):
      jax.clear_caches()
      for length, first in ((0, 0), (150, 0), (199, 77), (64, 63)):
        self.check(arrays, length, mask, first, jnp.float32, 3e-6)
    jax.clear_caches()

  def test_nodes_in_several_blocks(self):
    """Where they do not fit at once; a row may see nothing of the first."""
    rng = np.random.default_rng(0)
    arrays = arguments(rng, 40, 1, 3, 100)
    tile = tree_attention.Tile(rows=16, block=16, programs=8, num_warps=4)
    self.assertEqual(tile.nodes, 16)
    with mock.patch.object(tree_attention, "tile_for", return_value=tile):
      jax.clear_caches()
      for parents in (
        [-1, *[0] * 39],
        trees.random_parents(rng, 40),
        [-1] * 40,  # each its own root
      ):
        mask = jnp.asarray(trees.mask_of(parents))
        for length in (0, 90):
          self.check(arrays, length, mask, 0, jnp.float32, 3e-6)
    jax.clear_caches()

  def test_float64_is_refused(self):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
      arrays = [jnp.asarray(x) for x in arguments(rng, 2, 1, 1, 9)]
      mask = jnp.asarray(trees.mask_of([-1, 0]))
      with self.assertRaisesRegex(ValueError, "does not take float64"):
        interpreted(*arrays, length=jnp.int32(4), mask=mask, scale=SCALE)


if __name__ == "__main__":
  absltest.main()
