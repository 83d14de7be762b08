"""Residual sum and norm: arithmetic interpreted, and lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import add_norm
from tests.pallas_kernels import lowering


class AddNormTest(parameterized.TestCase):
  @parameterized.product(
    shape=((1, 1), (1, 80), (3, 7), (16, 64)),
    zero_centered=(True, False),
    dtype=(jnp.bfloat16, jnp.float32),
  )
  def test_against_float64(self, shape, zero_centered, dtype):
    rng = np.random.default_rng(shape)
    given = [
      jnp.asarray(rng.normal(size=size), dtype)
      for size in (shape, shape, shape[1])
    ]
    x, delta, weight = (np.asarray(a, np.float64) for a in given)
    expected_sum = np.asarray(jnp.asarray(x + delta, dtype), np.float64)
    scale = 1 + weight if zero_centered else weight
    power = (expected_sum**2).mean(axis=1, keepdims=True)
    expected = expected_sum / np.sqrt(power + 1e-6) * scale
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

  @parameterized.product(
    gpu=tuple(lowering.GPUS), shape=((1, 320), (1, 5120), (16, 5120))
  )
  def test_lowers(self, gpu, shape):
    rows = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    row = jax.ShapeDtypeStruct(shape[1:], jnp.bfloat16)
    text = lowering.lower(
      functools.partial(
        add_norm.add_norm,
        eps=1e-6,
        zero_centered=True,
        implementation="triton",
      ),
      gpu,
      rows,
      rows,
      row,
    )
    self.assertIn("add_norm", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    with jax.enable_x64(True):
      rows = jnp.ones((2, 8))
      with self.assertRaisesRegex(ValueError, "does not take float64"):
        add_norm.add_norm(
          rows,
          rows,
          rows[0],
          eps=1e-6,
          zero_centered=True,
          implementation="interpret",
        )


if __name__ == "__main__":
  absltest.main()
