"""The commit kernel: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gated_delta, gdn_commit
from tests import trees
from tests.decoding import kit
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_gated_delta import inputs

interpreted = jax.jit(
  functools.partial(gdn_commit.commit, implementation="interpret")
)


class CommitTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.product(size=(1, 5, 16, 33), repeat=(1, 3))
  def test_against_the_reference_in_float64(self, size, repeat):
    rng = np.random.default_rng(size)
    parents = trees.random_parents(rng, size)
    if size > gdn_commit.ROWS:  # a path that takes several steps
      parents = [*range(-1, size - 3), 5, size - 4]
    path = trees.path_to(parents, size - 1)
    (_, k, v, g, _), state = inputs(
      rng, size, repeat=repeat, key_dim=16, value_dim=32
    )
    # Nodes off the path must not be read.
    off = np.setdiff1d(np.arange(size), path)
    k[off] = v[off] = g[off] = np.nan
    padded = np.array(path + [size - 1] * (size - len(path)), np.int32)
    decay = np.zeros_like(g)
    decay[path] = np.cumsum(g[path], axis=0)
    for count in range(len(path) + 1):
      nodes, number = jnp.asarray(padded), jnp.int32(count)
      with jax.enable_x64(True):
        wide = [jnp.asarray(x) for x in (state, k, v, decay)]
        expected = gated_delta.commit(*wide, path=nodes, count=number)
      narrow = [jnp.asarray(x, jnp.float32) for x in (state, k, v, decay)]
      found = interpreted(*narrow, nodes, number)
      np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
      if count == 0:
        np.testing.assert_array_equal(found, narrow[0])

  @parameterized.product(gpu=tuple(lowering.GPUS), nodes=(8, 16, 64))
  def test_lowers_at_27b_shapes(self, gpu, nodes):
    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(gdn_commit.commit, implementation="triton"),
      gpu,
      shape(48, 128, 128),
      shape(nodes, 16, 128),
      shape(nodes, 48, 128),
      shape(nodes, 48),
      shape(nodes, dtype=jnp.int32),
      shape(dtype=jnp.int32),
    )
    self.assertIn("gdn_commit", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    (_, k, v, g, _), state = inputs(np.random.default_rng(0), 4)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x) for x in (state, k, v, g)]
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        interpreted(*wide, jnp.arange(4), jnp.int32(2))


if __name__ == "__main__":
  absltest.main()
