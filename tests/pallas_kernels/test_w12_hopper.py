"""The Hopper kernel of W12's products: interpreted, and lowered."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from pallas_kernels import w12_array, w12_hopper, w12_matmul, w12_parts
from tests.checkpoints import w12_matrices
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_w12_matmul import magnitude, packed, rows

product = functools.partial(
  w12_hopper.matmul, out_dtype=jnp.float32, interpret=True
)


def expanded(w: w12_array.W12Array) -> jax.Array:
  """What the kernel decodes, a quarter at a time."""
  tiles = [x.astype(jnp.int32) for x in (w.view01, w.view23)]
  low = w.low.astype(jnp.int32)
  quarters = []
  for q in range(4):
    byte = tiles[q // 2] >> (8 * (q % 2)) & 255
    code = byte << 4 | low >> (4 * q) & 15
    # 2^(base - 113) times it is the weight: base 113.
    bits = w12_array.bits(code, jnp.int32(113))
    quarters.append(lax.bitcast_convert_type(bits, jnp.bfloat16))
  return jnp.stack(quarters)


class ProductTest(parameterized.TestCase):
  def programs(self, number: int) -> None:
    patch = mock.patch.object(w12_hopper, "PROGRAMS", number)
    self.enterContext(patch)

  @parameterized.parameters(
    # Shares that begin and end amid columns, and rows that no tile is full of.
    dict(shape=(556, 192), n=5, programs=2, view=False),
    dict(shape=(256, 128), n=35, programs=3, view=True),
    # A decoder has two quarters of every tile.
    dict(shape=(300, 128), n=70, programs=3, view=False),
  )
  def test_against_float64(self, shape, n, programs, view):
    self.programs(programs)
    w = packed(w12_matrices.gaussian(*shape))
    self.assertGreater(int(w.row_start[-1]), 0)
    dense = w12_array.decode_view(w) if view else w12_array.decode(w)
    x = rows(n, shape[1])
    found = np.asarray(product(x, w, view=view), np.float64)
    dense = np.asarray(dense, np.float64)
    expected = np.asarray(x, np.float64) @ dense.T
    error = np.abs(found - expected) / magnitude(x, dense)
    self.assertLess(error.max(), 1e-6)

  def test_equals_the_product_with_decoded_tiles(self):
    self.programs(2)
    w, x = packed(w12_matrices.gaussian(256, 192)), rows(8, 192)
    np.testing.assert_array_equal(
      product(x, w), product(x, w, expanded=expanded(w))
    )

  def test_what_it_does_not_take(self):
    narrow = packed(w12_matrices.gaussian(128, 64))
    self.assertFalse(w12_hopper.takes(narrow))
    with self.assertRaisesRegex(ValueError, "tiles of 64 by 64, not bfloat16"):
      product(rows(8, 64), narrow)
    w = packed(w12_matrices.gaussian(256, 64))
    with self.assertRaisesRegex(ValueError, "takes bfloat16 rows.*float32"):
      product(rows(8, 64).astype(jnp.float32), w)


class SharesTest(parameterized.TestCase):
  @parameterized.parameters((34816, 5120), (5120, 17408), (248320, 5120))
  def test_a_program_for_every_multiprocessor(self, high, width):
    w = w12_matrices.struct(high, width)
    shares = w12_parts.Shares.of(w, w12_array.TILE, w12_hopper.PROGRAMS)
    self.assertEqual(shares.programs, w12_hopper.PROGRAMS)

  @parameterized.product(planes=(2, 3, 8), padded=(8, 16, 32, 64, 128))
  def test_a_slot_is_one_decoders(self, planes, padded):
    quarters = w12_hopper.meeting(padded)
    stages = w12_hopper.stages_of(planes, padded, quarters)
    self.assertGreaterEqual(stages, 2)
    if quarters:
      self.assertEqual(stages % w12_hopper.DECODERS, 0)


class LoweringTest(parameterized.TestCase):
  @parameterized.parameters(
    dict(gpu="NVIDIA H100 80GB HBM3", n=16, view=False),
    dict(gpu="NVIDIA H200", n=2, view=False),
    dict(gpu="NVIDIA H200", n=33, view=False),
    dict(gpu="NVIDIA H200", n=128, view=False),
    dict(gpu="NVIDIA H200", n=32, view=True),
  )
  def test_lowers_at_27b_shapes(self, gpu, n, view):
    w = w12_matrices.struct(16480, 5120)
    text = lowering.lower(
      functools.partial(w12_matmul.matmul, view=view, implementation="mosaic"),
      gpu,
      jax.ShapeDtypeStruct((n, w.shape[1]), jnp.bfloat16),
      w,
    )
    self.assertTrue("mosaic_gpu" in text and "w12_finish" in text)

  @parameterized.parameters((16, 128, 64), (1, 34816, 5120))
  def test_takes_triton_where_it_must(self, n, high, width):
    text = lowering.lower(
      functools.partial(w12_matmul.matmul, implementation="mosaic"),
      "NVIDIA H200",
      jax.ShapeDtypeStruct((n, width), jnp.bfloat16),
      w12_matrices.struct(high, width),
    )
    self.assertFalse("mosaic_gpu" in text)
    self.assertTrue("w12_matmul" in text)


if __name__ == "__main__":
  absltest.main()
