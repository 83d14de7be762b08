"""W12 matrices as plain named arrays, and checks of what comes from storage."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pallas_kernels import w12_array
from pallas_kernels.w12_array import MAX_BASE, MIN_BASE, WINDOW, W12Array
from specpilot_jax.errors import SpecPilotError

VERSION = 1
"""Of the layout of the arrays below."""

BLOCK = 1 << 20
"""Places of a plane that are looked at at once."""

_DTYPES = {
  "view01": np.uint16,
  "view23": np.uint16,
  "low": np.uint16,
  "base": np.uint8,
  "row_start": np.int32,
  "columns": np.int32,
  "values": ml_dtypes.bfloat16,
}
_METADATA = ("shape", "version")
NAMES = (*_DTYPES, *_METADATA)
"""Of the arrays of one matrix."""


def to_arrays(w: W12Array) -> dict[str, np.ndarray]:
  """A W12 matrix as named arrays, none empty; what fills up lists is left out.

  Returns:
    The parts of a `W12Array` by their names, and int32 `shape` [2] and
    `version` [1].
  """
  rows = w12_array.untile(w)
  arrays = {name: np.asarray(getattr(rows, name)) for name in _DTYPES}
  entries = max(1, int(arrays["row_start"][-1]))
  for name in ("columns", "values"):
    arrays[name] = arrays[name][:entries]
  arrays["shape"] = np.array(w.shape, np.int32)
  arrays["version"] = np.array([VERSION], np.int32)
  return arrays


def from_arrays(arrays: Mapping[str, np.ndarray], name: str) -> W12Array:
  """The W12 matrix that `to_arrays` named the parts of, after all checks.

  Args:
    arrays: exactly NAMES.
    name: of the matrix, for errors.

  Returns:
    NumPy leaves, of the memory that was given.

  Raises:
    SpecPilotError: a part is missing or unknown, another version, or `check`.
  """
  version = np.asarray(arrays.get("version", 0)).tolist()
  # Before the names: those of another version may be others.
  if "version" in arrays and version != [VERSION]:
    raise _error(name, f"version is {version}, expected [{VERSION}]")
  if set(arrays) != set(NAMES):
    raise _error(
      name, f"has the parts {sorted(arrays)}, expected {sorted(NAMES)}"
    )
  shape = np.asarray(arrays["shape"])
  if shape.dtype != np.int32 or shape.shape != (2,):
    raise _error(name, f"shape is {_kind(shape)}, expected int32 [2]")
  parts: dict[str, Any] = {part: np.asarray(arrays[part]) for part in _DTYPES}
  rows, width = shape.tolist()
  w = W12Array(**parts, shape=(rows, width))
  check(w, name)
  return w


def check(w: W12Array, name: str) -> None:
  """Refuses what `encode` cannot have written, choice of windows apart.

  Args:
    w: any leaves.
    name: of the matrix, for errors.

  Raises:
    SpecPilotError: names the matrix, the part, the first wrong place in it,
      and what was expected there.
  """
  parts: dict[str, Any] = {p: np.asarray(getattr(w, p)) for p in _DTYPES}
  w = W12Array(**parts, shape=w.shape)
  _check_shapes(w, name)
  _check_rows(w, name)
  _check_lists(w, name)
  _check_planes(w, name)


def _error(name: str, what: str) -> SpecPilotError:
  return SpecPilotError(f"W12 matrix {name}: {what}")


def _kind(array: np.ndarray) -> str:
  return f"{array.dtype} {list(array.shape)}"


def _first(mask: npt.ArrayLike) -> int | None:
  """Where a mask is first set."""
  wrong = np.asarray(mask)
  at = int(np.argmax(wrong)) if wrong.size else 0
  return at if wrong.size and wrong[at] else None


def _check_shapes(w: W12Array, name: str) -> None:
  rows, width = w.shape
  if rows < 1 or width < 1:
    raise _error(
      name, f"shape is {[rows, width]}, expected one row and column at least"
    )
  lanes = -(-rows // 4)
  plane = [lanes, width]
  shapes = {
    "view01": plane,
    "view23": plane,
    "low": plane,
    "base": [4 * lanes],
    "row_start": [4 * lanes + 1],
    "columns": [max(1, w.columns.size)],
    "values": [max(1, w.columns.size)],
  }
  for part, shape in shapes.items():
    array = getattr(w, part)
    if array.dtype != _DTYPES[part] or list(array.shape) != shape:
      raise _error(
        name,
        f"{part} is {_kind(array)}, expected {np.dtype(_DTYPES[part])} {shape}"
        f" for a matrix of {[rows, width]}",
      )


def _check_rows(w: W12Array, name: str) -> None:
  row = _first((w.base < MIN_BASE) | (w.base > MAX_BASE))
  if row is not None:
    raise _error(
      name,
      f"base of row {row} is {w.base[row]}, expected {MIN_BASE} to {MAX_BASE}",
    )
  start, size = w.row_start, w.columns.size
  if start[0] != 0:
    raise _error(name, f"row_start begins with {start[0]}, expected 0")
  row = _first(start[1:] < start[:-1])
  if row is not None:
    raise _error(
      name,
      f"row_start falls behind row {row} from {start[row]} to "
      f"{start[row + 1]}, expected no less",
    )
  if start[-1] > size:
    raise _error(
      name, f"row_start ends with {start[-1]}, expected {size} entries at most"
    )
  if start[w.shape[0]] != start[-1]:
    raise _error(
      name,
      f"row_start has entries behind row {w.shape[0] - 1}, the last one, "
      "expected none in rows that pad",
    )


def _check_lists(w: W12Array, name: str) -> None:
  width, end = w.shape[1], int(w.row_start[-1])
  rows = np.repeat(np.arange(w.base.size), np.diff(w.row_start))
  columns, patterns = w.columns[:end], w.values.view(np.uint16)[:end]
  at = _first((columns < 0) | (columns >= width))
  if at is not None:
    raise _error(
      name,
      f"columns of row {rows[at]} have {columns[at]}, expected 0 to "
      f"{width - 1}",
    )
  at = _first((columns[1:] <= columns[:-1]) & (rows[1:] == rows[:-1]))
  if at is not None:
    raise _error(
      name,
      f"columns of row {rows[at]} have {columns[at + 1]} behind "
      f"{columns[at]}, expected them to increase",
    )
  magnitude = patterns & 0x7FFF
  at = _first(magnitude == 0)
  if at is not None:
    raise _error(
      name,
      f"values of row {rows[at]} list a zero for column {columns[at]}, "
      "expected it in the planes",
    )
  offset = magnitude.astype(np.int32) - (w.base[rows].astype(np.int32) << 7)
  at = _first((offset >= 0) & (offset < WINDOW << 7))
  if at is not None:
    raise _error(
      name,
      f"values of row {rows[at]} list 0x{patterns[at]:04x} for column "
      f"{columns[at]}, expected it in the planes: it is in the window that "
      f"begins at {w.base[rows[at]]}",
    )
  at = _first((w.columns[end:] != 0) | (w.values.view(np.uint16)[end:] != 0))
  if at is not None:
    raise _error(
      name,
      f"entry {end + at} of columns and values, behind those of all rows, is "
      "not 0, expected 0 where lists are filled up",
    )
  lanes = len(w.low)
  quarter, lane = np.divmod(rows, lanes)
  pair = np.where(quarter < 2, w.view01[lane, columns], w.view23[lane, columns])
  byte = (pair >> 8 * (quarter % 2)) & 255
  low = (w.low[lane, columns] >> 4 * quarter) & 15
  at = _first((byte | low) != 0)
  if at is not None:
    raise _error(
      name,
      f"planes hold code 0x{(int(byte[at]) << 4) | int(low[at]):03x} for the "
      f"listed weight of row {rows[at]}, column {columns[at]}, expected 0x000",
    )


def _check_planes(w: W12Array, name: str) -> None:
  rows, width = w.shape
  lanes = len(w.low)
  step = max(1, BLOCK // width)
  for first in range(0, lanes, step):
    part = slice(first, first + step)
    low = w.low[part].reshape(-1)
    for i, pair in enumerate((w.view01, w.view01, w.view23, w.view23)):
      found = pair[part].reshape(-1)
      shift = 8 * (i % 2)
      at = np.flatnonzero((found & (0x78 << shift)) == 0)
      lower = ((found[at] >> shift) & 7) | ((low[at] >> (4 * i)) & 15)
      wrong = _first(lower != 0)
      if wrong is not None:
        row, column = divmod(int(at[wrong]), width)
        raise _error(
          name,
          f"planes hold code 0 with a mantissa for row "
          f"{i * lanes + first + row}, column {column}, expected mantissa 0",
        )
  for row in range(rows, 4 * lanes):
    quarter, lane = divmod(row, lanes)
    pair = (w.view01, w.view23)[quarter // 2][lane]
    byte = (pair >> 8 * (quarter % 2)) & 255
    column = _first(byte | ((w.low[lane] >> 4 * quarter) & 15))
    if column is not None:
      raise _error(
        name,
        f"planes are not 0 at column {column} of row {row}, which pads, "
        "expected 0",
      )
