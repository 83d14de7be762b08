"""The kernels that decode W12, against the codec."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import w12_array, w12_decode
from specpilot_jax.checkpoints import w12
from tests.checkpoints import w12_matrices
from tests.pallas_kernels import lowering

decode = jax.jit(
  functools.partial(w12_decode.decode, implementation="interpret")
)


def check(matrix: np.ndarray) -> None:
  w = w12_array.tile(jax.tree.map(jnp.asarray, w12.encode(matrix)))
  found = np.asarray(decode(w))
  # Patterns: a NaN is not equal to itself.
  np.testing.assert_array_equal(found.view(np.uint16), matrix.view(np.uint16))


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters((1, 16), (9, 64), (70, 96), (257, 200))
  def test_every_pattern(self, high, width):
    check(w12_matrices.every_pattern(high, width))

  @parameterized.parameters(*w12_matrices.adversarial())
  def test_adversarial(self, name):
    check(w12_matrices.adversarial()[name])

  def test_no_lists(self):
    check(w12_matrices.few_exponents(70, 64))

  def test_planes_row_by_row(self):
    w = jax.tree.map(jnp.asarray, w12.encode(w12_matrices.gaussian(64, 64)))
    with self.assertRaisesRegex(ValueError, "takes planes in tiles"):
      w12_decode.decode(w, implementation="interpret")


class LoweringTest(parameterized.TestCase):
  @parameterized.parameters(*lowering.SERVERS)
  def test_lowers_at_27b_shapes(self, gpu):
    # The last tile is not full.
    w = w12_matrices.struct(16480, 5120)
    text = lowering.lower(
      functools.partial(w12_decode.decode, implementation="triton"), gpu, w
    )
    for name in ("w12_decode", "w12_decode_lists"):
      self.assertIn(f'"{name}"', text)


if __name__ == "__main__":
  absltest.main()
