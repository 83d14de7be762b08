"""The two-pass selection is `lax.top_k`, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from pallas_kernels import top_k


class TopKTest(parameterized.TestCase):
  @parameterized.product(
    size=(100, 20_000, 65 * top_k.CHUNK, 65 * top_k.CHUNK - 3),
    # So few values that nearly all tie; none tie.
    values=(3, 50, 10**9),
    masked=(False, True),
  )
  def test_equals_lax(self, size, values, masked):
    rng = np.random.default_rng(size + values)
    x = rng.integers(0, values, (3, size)).astype(np.float32)
    if masked:  # fewer than k are left
      x[:, 7:] = -np.inf
    k = 16
    expected = lax.top_k(jnp.asarray(x), k)
    found = jax.jit(top_k.top_k, static_argnums=1)(jnp.asarray(x), k)
    for a, b in zip(found, expected, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_all_in_one_chunk(self):
    x = np.zeros((1, 100 * top_k.CHUNK), np.float32)
    x[0, 3 * top_k.CHUNK : 4 * top_k.CHUNK] = np.arange(top_k.CHUNK)
    values, index = top_k.top_k(jnp.asarray(x), 16)
    last = 4 * top_k.CHUNK - 1
    np.testing.assert_array_equal(index[0], np.arange(last, last - 16, -1))
    np.testing.assert_array_equal(values[0], np.arange(255.0, 239.0, -1))


if __name__ == "__main__":
  absltest.main()
