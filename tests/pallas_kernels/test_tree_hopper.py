"""The Hopper kernel of tree attention: interpreted, and lowered."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import tree_attention, tree_hopper
from tests import trees
from tests.decoding import kit
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_attention_kernel import SCALE, arguments


class AttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    # Two warp groups that multiply, rows that are none, a window's edge; two
    # parts of two blocks.
    dict(n=17, group=3, capacity=208, length=197, first=61, programs=2),
    # Five parts: of one block, and of none.
    dict(n=17, group=3, capacity=208, length=197, first=61, programs=5),
    # One warp group, fewer nodes than TMA's eight, two key heads; one part, for
    # which slots are filled again.
    dict(n=3, group=2, heads=2, capacity=136, length=130, programs=2, slots=3),
    # Nodes in two blocks, and not one row of the prefix.
    dict(n=66, group=1, capacity=72, length=61, first=61, programs=1),
  )
  def test_against_float64(
    self, n, group, capacity, length, programs, first=0, heads=1, slots=8
  ):
    self.enterContext(kit.quick_compilation())
    patch = mock.patch.multiple(
      tree_hopper, PROGRAMS=programs, MOST_SLOTS=slots
    )
    self.enterContext(patch)
    rng = np.random.default_rng(n)
    arrays = arguments(rng, n, heads, group, capacity, dim=64)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    mask = jnp.asarray(trees.mask_of(trees.random_parents(rng, n)))
    found = tree_hopper.attend(
      *narrow,
      length=jnp.int32(length),
      mask=mask,
      scale=SCALE,
      first=jnp.int32(first),
      interpret=True,
    )
    self.assertEqual(found.dtype, jnp.bfloat16)
    with jax.enable_x64(True):
      wide = [jnp.asarray(np.asarray(x, float)) for x in narrow]
      expected = tree_attention.tree_attention(
        *wide,
        length=jnp.int32(length),
        mask=mask,
        scale=SCALE,
        first=first,
      )
    np.testing.assert_allclose(
      np.asarray(found, float), expected, atol=2e-2, rtol=2e-2
    )

  def test_what_it_does_not_take(self):
    def operands(dim=64, capacity=16, dtype=jnp.bfloat16):
      q, k = jnp.zeros((2, 2, dim), dtype), jnp.zeros((2, 1, dim), dtype)
      prefix = jnp.zeros((1, capacity, dim), dtype)
      return q, k, k, prefix, prefix, jnp.int32(3), jnp.eye(2, dtype=bool)

    for other, message in (
      (operands(dtype=jnp.float32), "not float32, 64, 16"),
      (operands(dim=32), "bfloat16, 32, 16"),
      (operands(capacity=17), "64, 17 and 0.3"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        tree_hopper.attend(*other, scale=SCALE)
    with self.assertRaisesRegex(ValueError, "16 and -0.3"):
      tree_hopper.attend(*operands(), scale=-SCALE)


def _shapes(nodes, dim, heads, kv_heads, capacity, batch=()):
  def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((*batch, *dims), dtype)

  node, prefix = (nodes, kv_heads, dim), (kv_heads, capacity, dim)
  return (
    shape(nodes, heads, dim), shape(*node), shape(*node), shape(*prefix),
    shape(*prefix), shape(dtype=jnp.int32),
    shape(nodes, nodes, dtype=jnp.bool_),
  )  # fmt: skip


def _attend(*operands):
  return tree_attention.tree_attention(
    *operands, scale=operands[0].shape[-1] ** -0.5, implementation="mosaic"
  )


class LoweringTest(parameterized.TestCase):
  @parameterized.parameters(
    ("NVIDIA H100 80GB HBM3", 16, 256, 24, 4, 2064),
    ("NVIDIA H200", 1, 256, 24, 4, 4096),
    ("NVIDIA H200", 64, 256, 24, 4, 1296),
    ("NVIDIA H200", 99, 128, 32, 8, 1296),
  )
  def test_lowers_at_27b_shapes(
    self, gpu, nodes, dim, heads, kv_heads, capacity
  ):
    shapes = _shapes(nodes, dim, heads, kv_heads, capacity)
    text = lowering.lower(_attend, gpu, *shapes)
    self.assertTrue("mosaic_gpu" in text and "_combine" in text)

  def test_few_nodes_behind_a_short_prefix_are_tritons(self):
    shapes = _shapes(32, 256, 24, 4, 1296)
    text = lowering.lower(_attend, "NVIDIA H200", *shapes)
    self.assertFalse("mosaic_gpu" in text)
    self.assertTrue("tree_attention" in text)

  def test_takes_triton_for_several_requests(self):
    shapes = _shapes(4, 64, 2, 1, 24, batch=(2,))
    text = lowering.lower(jax.vmap(_attend), "NVIDIA H200", *shapes)
    self.assertFalse("mosaic_gpu" in text)
    self.assertTrue("tree_attention" in text)


if __name__ == "__main__":
  absltest.main()
