"""Tree attention against a masked softmax written out."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import tree_attention
from tests import trees

attend = jax.jit(tree_attention.tree_attention)


def naive(q, k_nodes, v_nodes, k_prefix, v_prefix, length, parents, scale):
  """One node and one head at a time, over its own path alone."""
  out = np.zeros(q.shape)
  group = q.shape[1] // k_nodes.shape[1]
  for node in range(q.shape[0]):
    path = trees.path_to(parents, node)
    for head in range(q.shape[1]):
      kv = head // group
      k = np.concatenate([k_prefix[kv, :length], k_nodes[path, kv]])
      v = np.concatenate([v_prefix[kv, :length], v_nodes[path, kv]])
      score = k @ q[node, head] * scale
      weight = np.exp(score - score.max())
      out[node, head] = weight @ v / weight.sum()
  return out


class TreeAttentionTest(parameterized.TestCase):
  def inputs(self, seed, n, kv_heads, group, capacity, dim=4, size=1.0):
    rng = np.random.default_rng(seed)
    return (
      rng.normal(size=(n, kv_heads * group, dim)) * size,
      rng.normal(size=(n, kv_heads, dim)) * size,
      rng.normal(size=(n, kv_heads, dim)),
      rng.normal(size=(kv_heads, capacity, dim)) * size,
      rng.normal(size=(kv_heads, capacity, dim)),
    )

  @parameterized.product(size=(1, 6, 17), length=(0, 1, 11, 12), group=(1, 3))
  def test_float64(self, size, length, group):
    rng = np.random.default_rng(size)
    with jax.enable_x64(True):
      for seed, parents in enumerate(
        (list(range(-1, size - 1)), trees.random_parents(rng, size))
      ):
        arrays = self.inputs(seed, size, 2, group, capacity=12)
        out = attend(*arrays, np.int32(length), trees.mask_of(parents), 0.5)
        np.testing.assert_allclose(
          out, naive(*arrays, length, parents, 0.5), atol=1e-12
        )

  def test_rows_behind_the_length_do_not_matter(self):
    q, k, v, k_prefix, v_prefix = (
      x.astype(np.float32) for x in self.inputs(0, 5, 2, 2, capacity=9)
    )
    mask = trees.mask_of([-1, 0, 0, 1, 2])
    clean = attend(q, k, v, k_prefix, v_prefix, np.int32(4), mask, 0.5)
    k_prefix[:, 4:], v_prefix[:, 4:] = 1e4, -1e4
    dirty = attend(q, k, v, k_prefix, v_prefix, np.int32(4), mask, 0.5)
    np.testing.assert_array_equal(clean, dirty)

  def test_scores_far_apart(self):
    """Scores in the thousands neither overflow nor lose the largest."""
    arrays = self.inputs(1, 4, 1, 2, capacity=6, size=60.0)
    parents = [-1, 0, 1, 1]
    with jax.enable_x64(True):
      out = attend(*arrays, np.int32(6), trees.mask_of(parents), 1.0)
      np.testing.assert_allclose(
        out, naive(*arrays, 6, parents, 1.0), atol=1e-9
      )

  @parameterized.parameters((jnp.float32, 2e-6), (jnp.bfloat16, 3e-2))
  def test_lower_precision(self, dtype, tolerance):
    parents = [-1, 0, 0, 1, 2, 4]
    arrays = tuple(
      jnp.asarray(x, dtype) for x in self.inputs(2, 6, 2, 2, capacity=8)
    )
    out = attend(*arrays, np.int32(7), trees.mask_of(parents), 0.5)
    self.assertEqual(out.dtype, dtype)
    q, k, v, k_prefix, v_prefix = (np.asarray(x, np.float64) for x in arrays)
    exact = naive(q, k, v, k_prefix, v_prefix, 7, parents, 0.5)
    np.testing.assert_allclose(
      np.asarray(out, np.float64), exact, atol=tolerance
    )
