"""The W12 product of one row: interpreted, and lowered."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import w12_array, w12_matmul, w12_row
from tests.checkpoints import w12_matrices
from tests.pallas_kernels import lowering
from tests.pallas_kernels.test_w12_hopper import expanded
from tests.pallas_kernels.test_w12_matmul import hard, magnitude, packed, rows

product = functools.partial(
  w12_matmul.matmul, out_dtype=jnp.float32, implementation="interpret"
)


def float64(x, dense) -> np.ndarray:
  return np.asarray(x, np.float64) @ np.asarray(dense, np.float64).T


class ProductTest(parameterized.TestCase):
  @parameterized.parameters(
    # Rows that no tile is full of.
    dict(shape=(278, 512), lanes=4, view=False),
    dict(shape=(278, 128), lanes=8, view=True),
    dict(shape=(262, 512), lanes=2, view=False),
  )
  def test_against_float64(self, shape, lanes, view):
    matrix, x = hard(*shape), rows(1, shape[1])
    w = packed(matrix)
    dense = w12_array.decode_view(w) if view else matrix
    found = w12_row.matmul(
      x, w, jnp.float32, view=view, interpret=True,
      tile=w12_row.RowTile(lanes=lanes),
    )  # fmt: skip
    self.assertEqual(found.shape, (1, shape[0]))
    error = np.abs(np.asarray(found, np.float64) - float64(x, dense))
    scale = magnitude(x, np.asarray(dense))
    self.assertLess((error / scale).max(), 1e-6)

  def test_is_what_one_row_takes(self):
    w, x = packed(w12_matrices.gaussian(256, 512)), rows(2, 512)
    text = jax.make_jaxpr(product)(x[:1], w).pretty_print()
    self.assertIn("w12_row", text)
    self.assertNotIn("w12_row", jax.make_jaxpr(product)(x, w).pretty_print())

  def test_lists_of_any_length(self):
    matrix = w12_matrices.gaussian(256, 512).astype(np.float32)
    matrix[7] *= np.where(np.arange(512) % 2, 1e9, 1)
    matrix[9:30, 3:] *= np.where(np.arange(509) % 3, 1, 1e12)
    matrix = matrix.astype(ml_dtypes.bfloat16)
    w, x = packed(matrix), rows(1, 512)
    counts = np.diff(w.row_start)
    self.assertGreater(counts.max(), 2 * w12_row.ENTRIES)
    self.assertEqual(counts.min(), 0)
    error = np.abs(np.asarray(product(x, w), np.float64) - float64(x, matrix))
    self.assertLess((error / magnitude(x, matrix)).max(), 1e-6)

  def test_infinities_and_nan(self):
    """They stay in their rows; an infinite x is in all of them."""
    matrix = w12_matrices.gaussian(256, 512)
    matrix[3, 4], matrix[5, 6] = np.inf, np.nan
    x = rows(1, 512)
    found = np.asarray(product(x, packed(matrix)))[0]
    self.assertEqual(found[3], np.inf * np.sign(float(x[0, 4])))
    self.assertTrue(np.isnan(found[5]))
    self.assertTrue(np.isfinite(np.delete(found, (3, 5))).all())
    plain = packed(np.ones((256, 512), ml_dtypes.bfloat16))
    infinite = np.asarray(product(x.at[0, 0].set(np.inf), plain))
    np.testing.assert_array_equal(infinite, np.inf)

  def test_same_kernel_on_decoded_tiles(self):
    w, x = packed(w12_matrices.gaussian(256, 512)), rows(1, 512)
    np.testing.assert_array_equal(
      product(x, w), product(x, w, expanded=expanded(w))
    )

  def test_what_it_does_not_take(self):
    w = w12_matrices.struct(256, 512)
    for x in (rows(2, 512), rows(1, 512).astype(jnp.float32)):
      with self.assertRaisesRegex(ValueError, "takes one bfloat16 row"):
        w12_row.matmul(x, w, jnp.float32, interpret=True)
    # A program's words, eight for each thread, have to divide the columns.
    for width, taken in ((512, True), (320, False), (576, False)):
      self.assertEqual(w12_row.pays(w12_matrices.struct(320, width)), taken)
    small = w12_row.RowTile(words=512)
    with self.assertRaisesRegex(ValueError, "fewer than 8 numbers"):
      w12_row.matmul(rows(1, 512), w, jnp.float32, tile=small, interpret=True)


class LoweringTest(parameterized.TestCase):
  @parameterized.product(gpu=tuple(lowering.SERVERS), view=(False, True))
  def test_lowers_at_27b_shapes(self, gpu, view):
    # The last tile is not full.
    w = w12_matrices.struct(14000, 5120)
    text = lowering.lower(
      functools.partial(w12_matmul.matmul, view=view, implementation="triton"),
      gpu,
      jax.ShapeDtypeStruct((1, w.shape[1]), jnp.bfloat16),
      w,
    )
    self.assertTrue(("w12_view_row" if view else "w12_row") in text)
    self.assertFalse("w12_finish" in text)
    self.assertTrue("__gpu$xla.gpu.triton" in text)


if __name__ == "__main__":
  absltest.main()
