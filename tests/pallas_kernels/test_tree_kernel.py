"""The tree-verify kernel: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gated_delta
from tests import trees
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_gated_delta import inputs

interpreted = functools.partial(
  gated_delta.tree_verify, implementation="interpret"
)


def chain(size):
  return list(range(-1, size - 1))


class TreeKernelTest(parameterized.TestCase):
  def check(self, tokens, state, parents, tolerance):
    mask = jnp.asarray(trees.mask_of(parents))
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in (*tokens, state)]
      expected = gated_delta.tree_verify(*wide, mask=mask)
    narrow = [jnp.asarray(x, jnp.float32) for x in (*tokens, state)]
    found = jax.jit(interpreted)(*narrow, mask=mask)
    for a, b in zip(found, expected, strict=True):
      self.assertEqual(a.dtype, jnp.float32)
      self.assertEqual(a.shape, b.shape)
      np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)

  @parameterized.product(size=(1, 5, 16, 33, 64), repeat=(1, 3))
  def test_against_the_reference_in_float64(self, size, repeat):
    rng = np.random.default_rng(size + repeat)
    for parents in (chain(size), trees.random_parents(rng, size)):
      tokens, state = inputs(
        rng, size, repeat=repeat, key_dim=16, value_dim=32, decay=0.1
      )
      self.check(tokens, state, parents, 2e-5)

  @parameterized.parameters(16, 64)
  def test_repeated_keys(self, size):
    """Where a power series of the system cancels: (I + A)^-1 stays small."""
    rng = np.random.default_rng(0)
    tokens, state = inputs(rng, size, key_dim=16, value_dim=32)
    q, k, v, g, beta = tokens
    same = k[:1] + 1e-3 * rng.normal(size=k.shape)
    same /= np.linalg.norm(same, axis=-1, keepdims=True)
    tokens = (q, same, v, np.zeros_like(g), np.ones_like(beta))
    self.check(tokens, state, chain(size), 2e-5)

  def test_decays_that_overflow_outside_the_path(self):
    tokens, state = inputs(
      np.random.default_rng(0), 16, key_dim=16, value_dim=32, decay=60.0
    )
    parents = [-1, *[0] * 15]
    self.check(tokens, state, parents, 2e-5)

  @parameterized.product(gpu=tuple(lowering.GPUS), nodes=(1, 16, 32, 64))
  def test_lowers_at_27b_shapes(self, gpu, nodes):
    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(gated_delta.tree_verify, implementation="triton"),
      gpu,
      shape(nodes, 16, 128),
      shape(nodes, 16, 128),
      shape(nodes, 48, 128),
      shape(nodes, 48),
      shape(nodes, 48),
      shape(48, 128, 128),
      shape(nodes, nodes, dtype=jnp.bool_),
    )
    self.assertIn("gdn_tree_verify", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_refusals(self):
    tokens, state = inputs(np.random.default_rng(0), 65)
    mask = jnp.asarray(trees.mask_of(chain(65)))
    narrow = [jnp.asarray(x, jnp.float32) for x in (*tokens, state)]
    with self.assertRaisesRegex(ValueError, "at most 64 nodes, got 65"):
      interpreted(*narrow, mask=mask)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in (*tokens, state)]
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        interpreted(*wide, mask=mask)


if __name__ == "__main__":
  absltest.main()
