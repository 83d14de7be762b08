"""The one-row product: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import matvec
from tests.pallas_kernels import lowering

interpreted = functools.partial(matvec.matvec, implementation="interpret")


class MatvecTest(parameterized.TestCase):
  @parameterized.product(
    shape=((16, 1024), (61, 48), (8, 512), (5, 7)),
    dtypes=(
      (jnp.bfloat16, jnp.bfloat16),
      (jnp.bfloat16, jnp.float32),
      (jnp.float32, jnp.float32),
    ),
  )
  def test_against_float64(self, shape, dtypes):
    dtype, out_dtype = dtypes
    rng = np.random.default_rng(shape[0])
    x = jnp.asarray(rng.normal(size=shape[1]), dtype)
    weight = jnp.asarray(rng.normal(size=shape), dtype)
    expected = np.asarray(weight, np.float64) @ np.asarray(x, np.float64)
    tolerance = 2.0**-8 if out_dtype == jnp.bfloat16 else 1e-5
    for function in (interpreted, matvec.matvec):
      found = jax.jit(functools.partial(function, out_dtype=out_dtype))(
        x, weight
      )
      self.assertEqual(found.dtype, out_dtype)
      np.testing.assert_allclose(
        np.asarray(found, np.float64),
        expected,
        rtol=tolerance,
        atol=1e-4,
      )

  @parameterized.product(
    shape=((16, 1024), (6, 48), (10, 7)), dtype=(jnp.bfloat16, jnp.float32)
  )
  def test_swiglu_against_float64(self, shape, dtype):
    rng = np.random.default_rng(shape[0])
    x = jnp.asarray(rng.normal(size=shape[1]), dtype)
    weight = jnp.asarray(rng.normal(size=shape), dtype)
    both = np.asarray(weight, np.float64) @ np.asarray(x, np.float64)
    gate, up = np.split(both, 2)
    expected = gate / (1 + np.exp(-gate)) * up
    tolerance = 2.0**-6 if dtype == jnp.bfloat16 else 1e-5
    for implementation in ("reference", "interpret"):
      found = jax.jit(
        functools.partial(matvec.swiglu, implementation=implementation)
      )(x, weight)
      self.assertEqual(found.dtype, dtype)
      np.testing.assert_allclose(
        np.asarray(found, np.float64),
        expected,
        rtol=tolerance,
        atol=tolerance * np.abs(expected).max(),
      )

  @parameterized.product(
    gpu=tuple(lowering.GPUS),
    case=(
      ("matvec", (34816, 5120)),
      ("matvec", (5120, 17408)),
      ("matvec", (16480, 5120)),
      ("matvec", (248320, 5120)),
      ("swiglu", (34816, 5120)),
    ),
  )
  def test_lowers_at_27b_shapes(self, gpu, case):
    name, shape = case
    settings = {"out_dtype": jnp.bfloat16} if name == "matvec" else {}
    text = lowering.lower(
      functools.partial(
        getattr(matvec, name), implementation="triton", **settings
      ),
      gpu,
      jax.ShapeDtypeStruct(shape[1:], jnp.bfloat16),
      jax.ShapeDtypeStruct(shape, jnp.bfloat16),
    )
    self.assertIn(name, text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    with jax.enable_x64(True):
      with self.assertRaisesRegex(ValueError, "does not take float64"):
        interpreted(jnp.ones(8), jnp.ones((8, 8)), out_dtype=jnp.float64)


if __name__ == "__main__":
  absltest.main()
