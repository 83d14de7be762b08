"""Residual sum and norm of one row: arithmetic interpreted, and lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import add_norm
from tests.pallas_kernels import lowering


class AddNormTest(parameterized.TestCase):
  @parameterized.product(
    size=(1, 7, 64, 80),
    zero_centered=(True, False),
    dtype=(jnp.bfloat16, jnp.float32),
  )
  def test_against_float64(self, size, zero_centered, dtype):
    rng = np.random.default_rng(size)
    given = [jnp.asarray(rng.normal(size=size), dtype) for _ in range(3)]
    x, delta, weight = (np.asarray(a, np.float64) for a in given)
    expected_sum = np.asarray(jnp.asarray(x + delta, dtype), np.float64)
    scale = 1 + weight if zero_centered else weight
    expected = expected_sum / np.sqrt((expected_sum**2).mean() + 1e-6) * scale
    for implementation in ("reference", "interpret"):
      total, out = jax.jit(
        functools.partial(
          add_norm.add_norm,
          eps=1e-6,
          zero_centered=zero_centered,
          implementation=implementation,
        )
      )(*given)
      self.assertEqual((total.dtype, out.dtype), (dtype, dtype))
      np.testing.assert_array_equal(np.asarray(total, np.float64), expected_sum)
      np.testing.assert_allclose(
        np.asarray(out, np.float64),
        expected,
        # On a CPU, XLA may normalise the sum without its rounding.
        rtol=2.0**-7 if dtype == jnp.bfloat16 else 1e-5,
        atol=1e-6,
      )

  @parameterized.product(gpu=tuple(lowering.GPUS), size=(320, 5120))
  def test_lowers(self, gpu, size):
    row = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    text = lowering.lower(
      functools.partial(
        add_norm.add_norm,
        eps=1e-6,
        zero_centered=True,
        implementation="triton",
      ),
      gpu,
      row,
      row,
      row,
    )
    self.assertIn("add_norm", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    with jax.enable_x64(True):
      row = jnp.ones(8)
      with self.assertRaisesRegex(ValueError, "does not take float64"):
        add_norm.add_norm(
          row,
          row,
          row,
          eps=1e-6,
          zero_centered=True,
          implementation="interpret",
        )


if __name__ == "__main__":
  absltest.main()
