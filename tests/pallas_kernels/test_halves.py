"""Products of float32 matrices made of half-precision ones."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import halves


class HalvesTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 1, 2.0**-11), (3, 3, 2.0**-21), (1, 3, 2.0**-11)
  )
  def test_product(self, first, second, tolerance):
    """Within a rounding of each operand of the product of their lengths."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(32, 64)), rng.normal(size=(64, 16))
    found = halves.dot(
      halves.split(jnp.asarray(a, jnp.float32), first),
      halves.split(jnp.asarray(b, jnp.float32), second),
    )
    self.assertEqual(found.dtype, jnp.float32)
    bound = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)
    error = np.abs(np.asarray(found, np.float64) - a @ b)
    self.assertLess((error / bound).max(), tolerance)

  def test_transpose(self):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    for a, b in zip(
      halves.transpose(halves.split(x, 3)), halves.split(x.T, 3), strict=True
    ):
      np.testing.assert_array_equal(a, b)

  def test_window(self):
    tops = np.concatenate(
      [[0.0], 2.0 ** np.arange(-126, 128, dtype=np.float32), [3e38]]
    ).astype(np.float32)
    down, up = halves.window(jnp.asarray(tops))
    np.testing.assert_array_equal(down * up, 1)
    np.testing.assert_array_equal(np.frexp(down)[0], 0.5)  # rounds nothing
    inside = (tops >= 2.0**-103) & (tops < 2.0**105)
    scaled = np.asarray(down) * tops
    self.assertTrue((scaled[inside] >= 2.0**-7).all())
    self.assertTrue((scaled[inside] < 2.0**9).all())
    np.testing.assert_array_equal(
      np.asarray(down)[(tops >= 2.0**-7) & (tops < 2.0**9)], 1
    )

  def test_narrow_window(self):
    tops = 2.0 ** np.arange(-80, 100, dtype=np.float32) * np.float32(1.5)
    down, up = halves.window(jnp.asarray(tops), lowest=10, step=1)
    np.testing.assert_array_equal(down * up, 1)
    np.testing.assert_array_equal(down * tops, 1.5 * 2.0**10)


if __name__ == "__main__":
  absltest.main()
