"""Stored W12 planes are refused with one line that says what is wrong."""

import numpy as np
from absl.testing import absltest, parameterized

from specpilot_jax.checkpoints import w12, w12_storage
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import w12_matrices

# Row 1 lists columns 0, 4 and 7, row 5 column 2; row 7 pads; P is 2. Row 2
# has -0 in column 3. All else is -1.5, of window 113 to 127.
_BITS = np.full((7, 8), 0xBFC0, np.uint16)
_BITS[1, [0, 4, 7]] = 0x0101
_BITS[5, 2] = 0x7FC3
_BITS[2, 3] = 0x8000
MATRIX = w12_matrices.patterns(_BITS)


def put(part, place, value):
  def change(arrays):
    arrays[part][place] = value

  return change


def clear_list(arrays):
  arrays["row_start"][6:] = 3


def shorten(part):
  def change(arrays):
    arrays[part] = arrays[part][:-1]

  return change


def cast(part, dtype):
  def change(arrays):
    arrays[part] = arrays[part].astype(dtype)

  return change


def empty_lists(arrays):
  arrays["columns"] = arrays["columns"][:0]
  arrays["values"] = arrays["values"][:0]


CASES = (
  ("plane_shape", shorten("view23"), r"view23 is uint16 \[1, 8\], expected"),
  ("plane_dtype", cast("low", np.int16), r"low is int16 \[2, 8\], expected ui"),
  ("base_shape", shorten("base"), r"base is uint8 \[7\], expected uint8 \[8\]"),
  ("starts_shape", shorten("row_start"), r"row_start is int32 \[8\], expected"),
  ("starts_dtype", cast("row_start", np.int64), "row_start is int64"),
  ("columns_dtype", cast("columns", np.int16), "columns is int16"),
  ("values_dtype", cast("values", np.float32), "values is float32"),
  ("lists_differ", shorten("values"), r"values is bfloat16 \[3\], expected"),
  ("lists_empty", empty_lists, r"columns is int32 \[0\], expected int32 \[1\]"),
  ("base_0", put("base", 3, 0), "base of row 3 is 0, expected 1 to 240"),
  ("base_241", put("base", 0, 241), "base of row 0 is 241, expected 1 to 240"),
  ("start", put("row_start", 0, 1), "row_start begins with 1, expected 0"),
  ("negative", put("row_start", 0, -1), "row_start begins with -1, expected 0"),
  ("falls", put("row_start", 3, 1), "falls behind row 2 from 3 to 1"),
  ("beyond", put("row_start", slice(6, 9), 5), "ends with 5, expected 4 ent"),
  ("in_padding", put("row_start", slice(6, 8), 3), "entries behind row 6, the"),
  ("column_8", put("columns", 3, 8), "columns of row 5 have 8, expected 0 to"),
  ("column_-1", put("columns", 0, -1), "columns of row 1 have -1, expected 0"),
  ("twice", put("columns", 1, 0), "columns of row 1 have 0 behind 0, expected"),
  ("order", put("columns", 2, 3), "columns of row 1 have 3 behind 4, expected"),
  ("lists_zero", put("values", 3, 0), "row 5 list a zero for column 2"),
  ("lists_minus_0", put("values", 3, -0.0), "row 5 list a zero for column 2"),
  ("inside", put("values", 1, 2.0**-14), "list 0x3880 for column 4, expected"),
  ("inside_top", put("values", 1, 1.75), "that begins at 113"),
  ("behind_the_end", clear_list, "entry 3 of columns and values, behind those"),
  # Row 1 is the low half of view01's second row, bits 4 to 7 of low no more.
  ("listed_view", put("view01", (1, 4), 0xFC80), "code 0x800 for the listed"),
  ("listed_low", put("low", (1, 0), 0x0001), "code 0x001 for the listed wei"),
  ("zero_view", put("view01", (0, 3), 0x84FC), "mantissa for row 2, column 3"),
  ("zero_low", put("low", (0, 3), 0x0010), "mantissa for row 2, column 3, exp"),
  ("padding", put("view23", (1, 5), 0x80FC), "not 0 at column 5 of row 7, whi"),
  ("shape_kind", cast("shape", np.int64), r"shape is int64 \[2\], expected"),
  ("shape_low", put("shape", 1, 0), r"shape is \[7, 0\], expected one row"),
  ("other_rows", put("shape", 0, 9), r"view01 is uint16 \[2, 8\], expected"),
  ("fewer_rows", put("shape", 0, 5), "entries behind row 4|not 0 at column"),
  ("version", put("version", 0, 2), r"version is \[2\], expected \[1\]"),
  ("missing", lambda a: a.pop("low"), r"has the parts \['base'"),
  ("no_version", lambda a: a.pop("version"), r"has the parts \['base'"),
  ("unknown", lambda a: a.update(more=a["low"]), "'more'"),
)


class W12StorageTest(parameterized.TestCase):
  def test_arrays(self):
    arrays = w12_storage.to_arrays(w12.encode(MATRIX))
    self.assertEqual(tuple(arrays), w12_storage.NAMES)
    self.assertEqual(arrays["shape"].tolist(), [7, 8])
    self.assertEqual(arrays["version"].tolist(), [w12_storage.VERSION])
    self.assertTrue(all(array.size for array in arrays.values()))
    w = w12_storage.from_arrays(arrays, "layers.0")
    self.assertEqual(w.shape, (7, 8))
    self.assertEqual(w.columns.tolist(), [0, 4, 7, 2])
    self.assertEqual(w12.decode(w).tobytes(), MATRIX.tobytes())

  def test_lists_may_be_filled_up(self):
    arrays = w12_storage.to_arrays(w12.encode(MATRIX))
    for part in ("columns", "values"):
      arrays[part] = np.append(arrays[part], np.zeros(3, arrays[part].dtype))
    filled = w12_storage.from_arrays(arrays, "w")
    self.assertEqual(w12.decode(filled).tobytes(), MATRIX.tobytes())

  @parameterized.named_parameters(*CASES)
  def test_refused(self, change, message):
    arrays = w12_storage.to_arrays(w12.encode(MATRIX))
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(arrays)
    with self.assertRaisesRegex(SpecPilotError, message) as caught:
      w12_storage.from_arrays(arrays, "layers.0.mlp")
    self.assertStartsWith(str(caught.exception), "W12 matrix layers.0.mlp: ")
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
