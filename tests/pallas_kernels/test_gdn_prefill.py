"""The kernels for runs of prompt: arithmetic interpreted, and lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gdn_prefill
from tests.decoding import kit
from tests.pallas_kernels import lowering
from tests.pallas_kernels import test_gdn_verify as verify

INTERPRETED = jax.jit(
  functools.partial(
    gdn_prefill.prefill, key_heads=verify.KEY_HEADS, implementation="interpret"
  )
)


class PrefillTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def check(self, given, count, dtype):
    """Every output, and the state behind the last token that exists."""
    mixed, projected, *rest = verify.cast(given, dtype)
    outputs, state = verify.recurrence(
      *verify.tokens_of((mixed[:count], projected[:count], *rest)),
      verify.chain(count),
    )
    # What lies behind does not matter.
    mixed, projected = (x.at[count:].set(jnp.nan) for x in (mixed, projected))
    found, after = INTERPRETED(mixed, projected, *rest, jnp.int32(count))
    np.testing.assert_array_equal(
      found[-(-count // gdn_prefill.ROWS) * gdn_prefill.ROWS :], 0
    )
    for a, b in ((found[:count], outputs), (after, state[-1])):
      error = np.abs(np.asarray(a, np.float64) - b).max()
      self.assertLess(error / np.abs(b).max(), verify.TOLERANCES[dtype])

  @parameterized.product(
    case=((1, 1), (40, 33), (130, 70)),
    dtype=tuple(verify.TOLERANCES),
  )
  def test_against_the_recurrence_in_float64(self, case, dtype):
    size, count = case
    rng = np.random.default_rng(size)
    for decay in (1e-4, 0.1, 10.0):
      given = verify.arguments(rng, size, decay=decay)
      self.check(given, count, dtype)

  @parameterized.product(noise=(0.0, 1e-3), dtype=tuple(verify.TOLERANCES))
  def test_repeated_keys(self, noise, dtype):
    given = verify.arguments(np.random.default_rng(0), 96)
    given = verify.with_equal_keys(given, noise=noise)
    self.check(given, 96, dtype)

  @parameterized.product(dtype=tuple(verify.TOLERANCES))
  def test_little_is_forgotten_behind_much(self, dtype):
    """Sums of decays are large by then, what tokens differ by is small."""
    mixed, projected, a_log, *rest = verify.arguments(
      np.random.default_rng(0), 64
    )
    much = np.where(np.arange(64) < 32, 200, -5)[:, None]
    projected[:, -len(a_log) :] = much
    self.check((mixed, projected, 0 * a_log, *rest), 64, dtype)

  def test_no_token_leaves_the_state_as_it_is(self):
    given = verify.cast(
      verify.arguments(np.random.default_rng(0), 8), jnp.bfloat16
    )
    found, after = INTERPRETED(*given, jnp.int32(0))
    np.testing.assert_array_equal(after, given[-1])
    np.testing.assert_array_equal(found, 0)

  def test_magnitudes(self):
    rng = np.random.default_rng(0)
    for of_state, of_values in ((1e8, 1), (1, 1e8), (1e-8, 1e-8)):
      mixed, *rest, state = verify.arguments(rng, 40)
      mixed[:, 2 * verify.KEY_HEADS * verify.KEY_DIM :] *= of_values
      self.check((mixed, *rest, state * of_state), 40, jnp.float32)

  @parameterized.product(
    gpu=tuple(lowering.SERVERS),
    case=((512, jnp.bfloat16), (100, jnp.float32)),
  )
  def test_lowers_at_27b_shapes(self, gpu, case):
    size, dtype = case

    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(
        gdn_prefill.prefill, key_heads=16, implementation="triton"
      ),
      gpu,
      shape(size, 10240),
      shape(size, 16480, dtype=dtype),
      shape(48),
      shape(48),
      shape(48, 128, 128),
      shape(dtype=jnp.int32),
    )
    self.assertIn("gdn_prefill", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  def test_float64_is_refused(self):
    given = verify.arguments(np.random.default_rng(0), 3)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in given]
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        INTERPRETED(*wide, jnp.int32(3))


if __name__ == "__main__":
  absltest.main()
