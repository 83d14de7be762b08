"""W12 on the host and its encoder on the device: every bit comes back."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import w12_array
from specpilot_jax.checkpoints import w12, w12_device, w12_storage
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import w12_matrices

ADVERSARIAL = w12_matrices.adversarial()
MATRICES = ADVERSARIAL | {
  "all_patterns": w12_matrices.every_pattern(257, 256),
  "all_patterns_alone": w12_matrices.every_pattern(1 << 16, 1),
  "all_patterns_in_a_row": w12_matrices.every_pattern(1, 1 << 16),
  "gaussian": w12_matrices.gaussian(50, 1000),
  "few_exponents": w12_matrices.few_exponents(1000, 9),
  "one": w12_matrices.gaussian(1, 1),
}


def assert_same_bits(found, expected) -> None:
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.dtype == expected.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def assert_same_arrays(found, expected) -> None:
  assert found.shape == expected.shape
  found = w12_storage.to_arrays(found)
  for name, part in w12_storage.to_arrays(expected).items():
    assert (found[name].dtype, found[name].shape) == (part.dtype, part.shape)
    assert found[name].tobytes() == part.tobytes(), name


def best_base(row: np.ndarray) -> int:
  """As `encode` defines it, one window after another."""
  exponents = (row.view(np.uint16) >> 7) & 255
  best, most = 1, -1
  for base in range(w12_array.MIN_BASE, w12_array.MAX_BASE + 1):
    last = base + w12_array.WINDOW - 1
    held = int(np.sum((exponents >= base) & (exponents <= last)))
    if held >= most and (base == 1 or last in exponents):
      best, most = base, held
  return best


class W12Test(parameterized.TestCase):
  @parameterized.named_parameters(MATRICES.items())
  def test_round_trip(self, matrix):
    w = w12.encode(matrix)
    w12_storage.check(w, "w")
    assert_same_bits(w12.decode(w), matrix)
    assert_same_arrays(w12.encode(matrix.copy()), w)
    assert_same_arrays(
      w12_storage.from_arrays(w12_storage.to_arrays(w), "w"), w
    )

  @parameterized.named_parameters(MATRICES.items())
  def test_device(self, matrix):
    w = w12_device.encode_on_device(jnp.asarray(matrix))
    for leaf in jax.tree.leaves(w):
      self.assertIsInstance(leaf, jax.Array)
    assert_same_arrays(w, w12.encode(matrix))

  @parameterized.named_parameters(MATRICES.items())
  def test_windows(self, matrix):
    rows = matrix[:: 1 + len(matrix) // 1001]
    base = w12.encode(rows).base
    self.assertEqual(
      base[: len(rows)].tolist(), [best_base(row) for row in rows]
    )
    self.assertEqual(base[len(rows) :].tolist(), [1] * (-len(rows) % 4))

  @settings(max_examples=150, deadline=None)
  @given(st.data())
  def test_random_shapes_and_patterns(self, data):
    shape = data.draw(st.tuples(st.integers(1, 13), st.integers(1, 40)))
    elements = data.draw(
      st.sampled_from(
        [
          st.integers(0, 0xFFFF),
          # A few exponents and values that are none's.
          st.one_of(
            st.integers(0x3C00, 0x3FFF),
            st.integers(0xBC00, 0xBFFF),
            st.sampled_from([0, 0x8000, 1, 0x7F80, 0xFFC1, 0x0080, 0x7F7F]),
          ),
        ]
      )
    )
    bits = data.draw(hnp.arrays(np.uint16, shape, elements=elements))
    matrix = w12_matrices.patterns(bits)
    w = w12.encode(matrix)
    w12_storage.check(w, "w")
    assert_same_bits(w12.decode(w), matrix)
    self.assertEqual(
      w.base[: len(matrix)].tolist(), [best_base(row) for row in matrix]
    )

  def test_blocks(self):
    """Blocks that end amid a quarter, on the host and on the device."""
    matrix = np.concatenate(
      [w12_matrices.gaussian(61, 40), *ADVERSARIAL.values()]
    )
    whole = w12.encode(matrix)
    sizes = {w12: 4 * 40 * 3, w12_device: 40 * 5, w12_storage: 40 * 7}
    jax.clear_caches()  # of executables for blocks of the usual size
    with contextlib.ExitStack() as stack:
      stack.callback(jax.clear_caches)
      for module, size in sizes.items():
        stack.enter_context(mock.patch.object(module, "BLOCK", size))
      w = w12.encode(matrix)
      w12_storage.check(w, "w")
      assert_same_arrays(w, whole)
      assert_same_bits(w12.decode(w), matrix)
      assert_same_arrays(w12_device.encode_on_device(jnp.asarray(matrix)), w)

  def test_memory_in_other_orders(self):
    matrix = w12_matrices.every_pattern(60, 30)
    for other in (matrix.T, matrix[::-1, ::2], np.asfortranarray(matrix)):
      w = w12.encode(other)
      assert_same_bits(w12.decode(w), other)
      assert_same_arrays(w, w12.encode(np.ascontiguousarray(other)))

  def test_some_rows(self):
    matrix = np.concatenate(list(ADVERSARIAL.values()))
    w = w12.encode(matrix)
    quarter = -(-len(matrix) // 4)
    for first, last in ((0, 1), (3, 9), (quarter - 1, 3 * quarter + 2)):
      assert_same_bits(w12.decode(w, first, last), matrix[first:last])
    assert_same_bits(w12.decode(w, len(matrix) - 1), matrix[-1:])
    assert_same_bits(w12.decode(w, 5, 5), matrix[5:5])

  def test_lists(self):
    """Zeros are in the planes; what is listed has +0 there."""
    matrix = np.full((5, 6), 0xBF80, np.uint16)
    matrix[3, 1:4] = [0x8000, 0x8001, 0xFFC5]
    w = w12.encode(w12_matrices.patterns(matrix))
    self.assertEqual(w.row_start.tolist(), [0, 0, 0, 0, 2, 2, 2, 2, 2])
    self.assertEqual(w.columns.tolist(), [2, 3])
    self.assertEqual(w.values.view(np.uint16).tolist(), [0x8001, 0xFFC5])
    # Row 3 is the second of two in the second quarter.
    self.assertEqual(
      (w.view01[1] >> 8).tolist(), [0xF8, 0x80, 0, 0, 0xF8, 0xF8]
    )

  def test_list_without_entries(self):
    w = w12.encode(w12_matrices.gaussian(3, 5))
    self.assertEqual(w.row_start.tolist(), [0] * 5)
    self.assertEqual((w.columns.tolist(), w.values.tolist()), ([0], [0.0]))

  def test_nothing_else_is_encoded(self):
    for dtype, shape in (
      (np.float32, (3, 4)),
      (np.float16, (3, 4)),
      (np.uint16, (3, 4)),
      (ml_dtypes.bfloat16, (4,)),
      (ml_dtypes.bfloat16, (1, 3, 4)),
      (ml_dtypes.bfloat16, (0, 4)),
      (ml_dtypes.bfloat16, (4, 0)),
    ):
      message = re.escape(f"got {np.dtype(dtype)} {list(shape)}")
      with self.assertRaisesRegex(SpecPilotError, message):
        w12.encode(np.zeros(shape, dtype))
      with self.assertRaisesRegex(SpecPilotError, message):
        w12_device.encode_on_device(jnp.zeros(shape, dtype))

  def test_bits_per_weight(self):
    for width, most in ((384, 12.15), (5120, 12.03)):
      w = w12.encode(w12_matrices.gaussian(2048, width))
      report = w12.report(w, "w")
      self.assertLessEqual(report.bits_per_weight, most)
      self.assertGreater(report.bits_per_weight, 12)

  def test_size_report(self):
    few = w12.encode(w12_matrices.gaussian(8, 4))
    listed = w12.encode(ADVERSARIAL["subnormal"])
    sizes = w12.size_report({"few": few, "listed": listed})
    one, two = sizes.tensors
    # Three planes, bases and row starts, and an entry that fills up.
    self.assertEqual(one.nbytes, 3 * 2 * 8 + 8 + 4 * 9 + 6)
    self.assertEqual((one.weights, one.outside), (32, 0))
    self.assertEqual((two.outside, two.outside_fraction), (7 * 40, 1.0))
    self.assertEqual(two.nbytes, 3 * 2 * 80 + 8 + 4 * 9 + 6 * 280)
    self.assertEqual(sizes.total.nbytes, one.nbytes + two.nbytes)
    self.assertEqual(sizes.total.weights, 32 + 280)
    table = str(sizes).splitlines()
    names = [line.split()[0] for line in table[1:]]
    self.assertEqual(names, ["few", "listed", "all"])
    self.assertIn("24.500", table[1])
    self.assertIn("listed: 62.971 bits per weight, 1.00e+00 outside", str(two))
    with self.assertRaisesRegex(SpecPilotError, "no W12 matrix"):
      w12.size_report({})


if __name__ == "__main__":
  absltest.main()
