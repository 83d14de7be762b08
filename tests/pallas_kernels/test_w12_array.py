"""What plain JAX makes of W12 planes: the matrix, its rows, its view."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import w12_array
from specpilot_jax.checkpoints import w12, w12_storage
from tests.checkpoints import w12_matrices

MATRICES = w12_matrices.adversarial() | {
  "all_patterns": w12_matrices.every_pattern(257, 256),
  "all_patterns_alone": w12_matrices.every_pattern(1 << 16, 1),
  "all_patterns_in_a_row": w12_matrices.every_pattern(1, 1 << 16),
  "gaussian": w12_matrices.gaussian(33, 200),
}
decode = jax.jit(w12_array.decode)
decode_view = jax.jit(w12_array.decode_view)
take = jax.jit(w12_array.take)


def on_device(matrix: np.ndarray) -> w12_array.W12Array:
  return jax.tree.map(jnp.asarray, w12.encode(matrix))


def bits(array) -> np.ndarray:
  array = np.asarray(array)
  assert array.dtype == ml_dtypes.bfloat16
  return array.view(np.uint16)


class W12ArrayTest(parameterized.TestCase):
  @parameterized.named_parameters(MATRICES.items())
  def test_exact(self, matrix):
    w = on_device(matrix)
    np.testing.assert_array_equal(bits(decode(w)), bits(matrix))
    np.testing.assert_array_equal(
      bits(take(w, jnp.arange(len(matrix)))), bits(matrix)
    )

  @parameterized.named_parameters(MATRICES.items())
  def test_view(self, matrix):
    w = on_device(matrix)
    view = np.asarray(decode_view(w))
    exponent = (bits(matrix) >> 7) & 255
    base = np.asarray(w.base)[: len(matrix), None].astype(np.int64)
    inside = (exponent >= base) & (exponent < base + w12_array.WINDOW)
    exact = matrix[inside].astype(np.float64)
    close = view[inside].astype(np.float64)
    self.assertTrue(np.all(np.abs(close - exact) <= np.abs(exact) / 16))
    self.assertTrue(np.all(np.signbit(close) == np.signbit(exact)))
    # Code 0 is 1/16 of the smallest number of code 1, zeros with their sign.
    least = np.ldexp(1.0, np.broadcast_to(base, matrix.shape) - 131)
    outside = view[~inside].astype(np.float64)
    np.testing.assert_array_equal(np.abs(outside), least[~inside])
    zero = (bits(matrix) & 0x7FFF) == 0
    sign = bits(view) >> 15
    np.testing.assert_array_equal(sign[zero], (bits(matrix) >> 15)[zero])
    self.assertFalse(sign[~inside & ~zero].any())

  def test_view_of_every_mantissa(self):
    """Its upper three bits, and the middle of what they leave open."""
    matrix = w12_matrices.patterns([0x3F80 + np.arange(128)])
    view = bits(decode_view(on_device(matrix)))
    expected = (bits(matrix) & 0xFFF0) | w12_array.MIDPOINT
    np.testing.assert_array_equal(view, expected)

  def test_view_of_zeros(self):
    w = on_device(w12_matrices.adversarial()["zeros_of_both_signs"])
    codes = np.asarray(w12_array.codes(w, view=True))
    self.assertEqual(set(codes.ravel().tolist()), {8, 0x808})

  @parameterized.parameters(jnp.int8, jnp.uint16, jnp.int32)
  def test_take(self, dtype):
    matrix = w12_matrices.every_pattern(1003, 64)
    w = on_device(matrix)
    rows = np.array([0, 100, 100, 3, 127])
    found = take(w, jnp.asarray(rows, dtype))
    np.testing.assert_array_equal(bits(found), bits(matrix[rows]))

  def test_take_clips_and_takes_none(self):
    matrix = w12_matrices.every_pattern(9, 64)
    w = on_device(matrix)
    found = take(w, jnp.array([-1, -100, 9, 11, 12, 2**30]))
    expected = matrix[[0, 0, 8, 8, 8, 8]]
    np.testing.assert_array_equal(bits(found), bits(expected))
    self.assertEqual(take(w, jnp.zeros(0, jnp.int32)).shape, (0, 64))

  @parameterized.parameters((1, 1), (9, 64), (70, 96), (257, 200), (300, 128))
  def test_tiles(self, high, width):
    matrix = w12_matrices.every_pattern(high, width)
    w = on_device(matrix)
    tiled = w12_array.tile(w)
    self.assertTrue(tiled.tiled)
    self.assertIs(w12_array.tile(tiled), tiled)
    self.assertEqual(tiled.low.shape[2:], w12_array.tile_shape(w.lanes, width))
    back = w12_storage.to_arrays(tiled)
    for name, expected in w12_storage.to_arrays(w).items():
      # Bytes: a NaN is not equal to itself.
      self.assertEqual(back[name].tobytes(), expected.tobytes(), name)
    self.assertEqual(
      tiled.values.size, w12_array.list_room(int(w.row_start[-1]))
    )
    np.testing.assert_array_equal(bits(decode(tiled)), bits(matrix))
    np.testing.assert_array_equal(
      bits(decode_view(tiled)), bits(decode_view(w))
    )
    rows = jnp.arange(high)[:: max(1, high // 50)]
    np.testing.assert_array_equal(bits(take(tiled, rows)), bits(matrix[rows]))

  def test_list_room(self):
    """Room enough, a quarter more at most, and few sizes."""
    least = w12_array.MIN_ROOM
    rooms = [w12_array.list_room(n) for n in range(8 * least)]
    for n, room in enumerate(rooms):
      self.assertGreaterEqual(room, n)
      self.assertLessEqual(room, max(least, 1.25 * n))
    self.assertLen(set(rooms), 13)

  def test_no_loops(self):
    """What a step runs is one graph on a GPU only without them."""
    w = w12_array.tile(on_device(w12_matrices.gaussian(64, 64)))
    rows = jnp.zeros(3, jnp.int32)
    for lowered in (
      jax.jit(w12_array.take).lower(w, rows),
      jax.jit(w12_array.decode).lower(w),
      jax.jit(w12_array.decode_view).lower(w),
    ):
      self.assertNotIn("stablehlo.while", lowered.as_text())

  def test_fill_is_dropped(self):
    """Whatever stands behind the end of the last row."""
    matrix = w12_matrices.adversarial()["one_far"]
    w = on_device(matrix)
    w = dataclasses.replace(
      w,
      columns=jnp.append(w.columns, 2),
      values=jnp.append(w.values, jnp.bfloat16(7)),
    )
    np.testing.assert_array_equal(bits(decode(w)), bits(matrix))
    np.testing.assert_array_equal(bits(take(w, jnp.arange(7))), bits(matrix))

  def test_tree(self):
    w = w12.encode(w12_matrices.gaussian(5, 3))
    leaves, tree = jax.tree.flatten(w)
    self.assertLen(leaves, 7)
    again = jax.tree.unflatten(tree, leaves)
    self.assertEqual((again.shape, again.ndim), ((5, 3), 2))
    self.assertEqual(again.dtype, jnp.bfloat16)
    self.assertEqual(w.nbytes, 3 * 2 * 2 * 3 + 8 + 4 * 9 + 6)


if __name__ == "__main__":
  absltest.main()
