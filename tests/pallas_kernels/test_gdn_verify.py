"""The tree-verify kernel: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gdn_verify
from tests import trees
from tests.pallas_kernels import lowering

KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 16, 32
interpreted = functools.partial(
  gdn_verify.verify, key_heads=KEY_HEADS, implementation="interpret"
)


def chain(size):
  return list(range(-1, size - 1))


def arguments(rng, size, *, repeat=3, decay=0.1):
  """mixed, projected, a_log, dt_bias, state; decays are about `decay`."""
  heads = KEY_HEADS * repeat
  channels = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
  return (
    rng.normal(size=(size, channels)),
    # z stands before the gates, and must not be read.
    np.where(
      np.arange(heads * VALUE_DIM + 2 * heads) < heads * VALUE_DIM,
      np.nan,
      rng.normal(size=(size, heads * VALUE_DIM + 2 * heads)),
    ),
    np.log(decay) + rng.normal(size=heads),
    rng.normal(size=heads),
    rng.normal(size=(heads, KEY_DIM, VALUE_DIM)),
  )


class VerifyTest(parameterized.TestCase):
  def check(self, given, parents, tolerance):
    mask = jnp.asarray(trees.mask_of(parents))
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in given]
      expected = gdn_verify.verify(*wide, mask=mask, key_heads=KEY_HEADS)
    narrow = [jnp.asarray(x, jnp.float32) for x in given]
    found = jax.jit(interpreted)(*narrow, mask=mask)
    for a, b in zip(found, expected, strict=True):
      self.assertEqual(a.dtype, jnp.float32)
      self.assertEqual(a.shape, b.shape)
      np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)

  @parameterized.product(size=(1, 5, 16, 33, 64), repeat=(1, 3))
  def test_against_the_reference_in_float64(self, size, repeat):
    rng = np.random.default_rng(size + repeat)
    for parents in (chain(size), trees.random_parents(rng, size)):
      self.check(arguments(rng, size, repeat=repeat), parents, 2e-5)

  @parameterized.parameters(16, 64)
  def test_repeated_keys(self, size):
    """Where a power series of the system cancels: (I + A)^-1 stays small."""
    rng = np.random.default_rng(0)
    mixed, projected, a_log, dt_bias, state = arguments(rng, size)
    keys = slice(KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM)
    mixed[:, keys] = mixed[:1, keys] + 1e-3 * rng.normal(
      size=mixed[:, keys].shape
    )
    heads = len(a_log)
    projected[:, -2 * heads : -heads] = 40.0  # beta is 1
    a_log[:] = -40.0  # no decay
    self.check((mixed, projected, a_log, dt_bias, state), chain(size), 5e-5)

  def test_decays_that_overflow_outside_the_path(self):
    given = arguments(np.random.default_rng(0), 16, decay=60.0)
    self.check(given, [-1, *[0] * 15], 2e-5)

  @parameterized.product(gpu=tuple(lowering.GPUS), nodes=(1, 16, 32, 64))
  def test_lowers_at_27b_shapes(self, gpu, nodes):
    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(
        gdn_verify.verify, key_heads=16, implementation="triton"
      ),
      gpu,
      shape(nodes, 10240),
      shape(nodes, 16480, dtype=jnp.bfloat16),
      shape(48),
      shape(48),
      shape(48, 128, 128),
      shape(nodes, nodes, dtype=jnp.bool_),
    )
    self.assertIn("gdn_verify", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_refusals(self):
    given = arguments(np.random.default_rng(0), 65)
    mask = jnp.asarray(trees.mask_of(chain(65)))
    narrow = [jnp.asarray(x, jnp.float32) for x in given]
    with self.assertRaisesRegex(ValueError, "at most 64 nodes, got 65"):
      interpreted(*narrow, mask=mask)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in given]
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        interpreted(*wide, mask=mask)


if __name__ == "__main__":
  absltest.main()
