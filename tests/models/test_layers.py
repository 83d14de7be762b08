"""The product with weights, at every number of rows that passes have."""

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.models import layers


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
