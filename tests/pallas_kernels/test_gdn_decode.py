"""The decode kernel: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gdn_decode
from tests.pallas_kernels import lowering


def arguments(rng, *, key_heads=2, repeat=3, key_dim=16, value_dim=32, taps=4):
  heads = key_heads * repeat
  channels = 2 * key_heads * key_dim + heads * value_dim
  return (
    rng.normal(size=channels + heads * value_dim + 2 * heads),
    rng.normal(size=(taps - 1, channels)),
    rng.normal(size=(channels, taps)),
    rng.normal(size=heads),
    rng.normal(size=heads),
    rng.normal(size=(heads, key_dim, value_dim)),
  )


class DecodeTest(parameterized.TestCase):
  @parameterized.product(repeat=(1, 3), live=(True, False))
  def test_against_the_reference_in_float64(self, repeat, live):
    rng = np.random.default_rng(repeat)
    wide = arguments(rng, repeat=repeat)
    decode = functools.partial(gdn_decode.decode, key_heads=2)
    with jax.enable_x64(True):
      o, after = decode(*(jnp.asarray(x) for x in wide), live=jnp.asarray(live))
    narrow = [jnp.asarray(x, jnp.float32) for x in wide]
    found_o, found = jax.jit(
      functools.partial(decode, implementation="interpret")
    )(*narrow, live=jnp.asarray(live))
    np.testing.assert_allclose(found_o, o, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(found, after, atol=1e-5, rtol=1e-5)
    if not live:
      np.testing.assert_array_equal(found, narrow[-1])

  @parameterized.parameters(*lowering.GPUS)
  def test_lowers_at_27b_shapes(self, gpu):
    def shape(*dims, dtype=jnp.bfloat16):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(
        gdn_decode.decode, key_heads=16, implementation="triton"
      ),
      gpu,
      shape(16480),
      shape(3, 10240),
      shape(10240, 4),
      shape(48, dtype=jnp.float32),
      shape(48, dtype=jnp.float32),
      shape(48, 128, 128, dtype=jnp.float32),
      shape(dtype=jnp.bool_),
    )
    self.assertIn("gdn_decode", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    wide = arguments(np.random.default_rng(0))
    with jax.enable_x64(True):
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        gdn_decode.decode(
          *(jnp.asarray(x) for x in wide),
          live=jnp.asarray(True),
          key_heads=2,
          implementation="interpret",
        )


if __name__ == "__main__":
  absltest.main()
