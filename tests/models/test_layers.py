"""The product with weights, at every number of rows that passes have."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.models import layers
from specpilot_jax.models.yarn import Yarn


class MatmulTest(parameterized.TestCase):
  @parameterized.product(
    rows=(1, 2, 4, 5, 8, 9, 16, 17, 40), dtype=("float32", "bfloat16")
  )
  def test_it_is_the_product(self, rows, dtype):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 24)), dtype)
    weight = jnp.asarray(rng.normal(size=(10, 24)), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for out_dtype in (None, jnp.float32):
      y = layers.matmul(x, weight, out_dtype)
      self.assertEqual(y.shape, (rows, 10))
      self.assertEqual(y.dtype, x.dtype if out_dtype is None else out_dtype)
      tolerance = 1e-5 if y.dtype == jnp.float32 else 0.1
      np.testing.assert_allclose(
        np.asarray(y, np.float64), exact, rtol=0, atol=tolerance
      )

  def test_a_row_does_not_depend_on_the_others(self):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 24)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(10, 24)), jnp.float32)
    others = x.at[1:].set(jnp.nan)
    np.testing.assert_array_equal(
      layers.matmul(others, weight)[0], layers.matmul(x, weight)[0]
    )

  def test_a_batch_of_single_rows_is_a_dot(self):
    """Not the products of the whole batch, 2,048 x 3,584 x 320 of them."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 1, 24)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(5, 10, 24)), jnp.bfloat16)
    one = layers.sum_of_products(jnp.float32)
    for weight, axis in ((weights[0], None), (weights, 0)):
      run = jax.vmap(one, in_axes=(0, axis))
      text = jax.jit(run).lower(x, weight).as_text()
      self.assertIn("dot_general", text)
      self.assertNotIn("stablehlo.multiply", text)
      each = [weight if axis is None else weight[i] for i in range(5)]
      expected = [one(row, own) for row, own in zip(x, each, strict=True)]
      np.testing.assert_allclose(run(x, weight), expected, atol=1e-5)
    self.assertNotIn("dot_general", jax.jit(one).lower(x[0], each[0]).as_text())


class RopeTest(parameterized.TestCase):
  YARN = Yarn(factor=32, original_max_position_embeddings=8192)

  def test_yarn_is_that_of_transformers(self):
    """Of a head of 128 and base 1e7, as transformers 5.17 computes them."""
    pairs = [0, 10, 16, 20, 24, 27, 28, 30, 40, 63]
    np.testing.assert_allclose(
      self.YARN.frequencies(128, 1e7)[pairs],
      [
        1.0, 8.05842131e-02, 1.54858502e-02, 3.97746312e-03, 8.39861517e-04,
        1.78699964e-04, 8.29882483e-05, 1.63530967e-05, 1.31780166e-06,
        4.01999056e-09,
      ],
      rtol=1e-6,
    )  # fmt: skip
    self.assertAlmostEqual(self.YARN.scale, 1.3465735902799727, places=12)

  def test_rotation(self):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)))
    positions = jnp.asarray([0, 5, 9000])
    plain = Yarn(factor=1, original_max_position_embeddings=8192)
    np.testing.assert_allclose(
      layers.rope(x, positions, 8, 1e4, plain),
      layers.rope(x, positions, 8, 1e4),
      rtol=1e-6,
    )
    scaled = layers.rope(x, positions, 8, 1e4, self.YARN)
    np.testing.assert_allclose(scaled[0], self.YARN.scale * x[0], rtol=1e-6)
    norms = np.linalg.norm(scaled, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(norms, self.YARN.scale, rtol=1e-5)
    # The first pair turns as it did, the last one slower.
    plain, slow = (
      frequencies(8, 1e4)
      for frequencies in (plain.frequencies, self.YARN.frequencies)
    )
    self.assertEqual(plain[0], slow[0])
    self.assertLess(slow[-1], plain[-1])
