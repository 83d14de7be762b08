"""Matrices into W12 and back on the host, bit for bit.

The layout is `pallas_kernels.w12_array`'s; here the leaves of a `W12Array` are
NumPy arrays. Rows pass in blocks that stay in the cache, through 16-bit
arithmetic. NumPy gives the interpreter's lock up for most of it: two matrices
in two threads take less time than one after the other.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels import w12_array
from pallas_kernels.w12_array import MAX_BASE, MIN_BASE, WINDOW, W12Array
from specpilot_jax.errors import SpecPilotError

BLOCK = 1 << 20
"""Weights of a block, unless four rows have more."""

_MAGNITUDE = 0x7FFF
_SIGN = 0x800
"""Of a 12-bit code."""
_INSIDE = WINDOW << 7
"""Magnitudes in a window."""


def check_matrix(weight) -> None:
  """Refuses what W12 cannot hold.

  Args:
    weight: anything with `dtype` and `shape`.

  Raises:
    SpecPilotError: not bfloat16, not a matrix, or without an element.
  """
  shape = tuple(weight.shape)
  if weight.dtype != ml_dtypes.bfloat16 or len(shape) != 2 or 0 in shape:
    raise SpecPilotError(
      "W12 holds bfloat16 matrices of at least one row and column, got "
      f"{weight.dtype} {list(shape)}"
    )


def encode(weight: np.ndarray) -> W12Array:
  """A matrix in W12.

  A row's window is the one that holds most of its weights among those whose
  highest exponent occurs in the row (any other can move down to one and lose
  nothing), and of equals the highest: what the view then lacks is small. A
  row without an exponent above MIN_BASE + 14 has the lowest window. The
  result depends on the bits of the matrix alone.

  >>> weight = np.array([[1.5, -0.02, 0.0, 3e38]], ml_dtypes.bfloat16)
  >>> packed = encode(weight)
  >>> again = np.asarray(w12_array.decode(packed))
  >>> bool((again.view(np.uint16) == weight.view(np.uint16)).all())
  True

  Args:
    weight: bfloat16 [O, I].

  Returns:
    NumPy leaves. A weight in the lists has +0 in its place, in the exact
    matrix and the view; where there is none, one entry fills up: column 0,
    value 0.

  Raises:
    SpecPilotError: as `check_matrix`, or more entries than int32 counts.
  """
  weight = np.asarray(weight)
  check_matrix(weight)
  rows, width = weight.shape
  lanes = -(-rows // 4)
  bits = weight.view(np.uint16)
  view01, view23, low = (np.empty((lanes, width), np.uint16) for _ in range(3))
  base = np.empty((4, lanes), np.uint8)
  counts = np.empty((4, lanes), np.int64)

  step = min(max(1, BLOCK // (4 * width)), lanes)
  scratch = np.empty((3, 4 * step * width), np.uint16)
  pieces = []
  for first in range(0, lanes, step):
    last = min(first + step, lanes)
    size = last - first
    raw, code, spare = scratch[:, : 4 * size * width].reshape(3, -1, width)
    for i in range(4):
      start = i * lanes + first
      found = bits[start : min(start + size, rows)]
      raw[i * size : i * size + len(found)] = found
      raw[i * size + len(found) : (i + 1) * size] = 0
    windows, at, patterns = _codes(raw, code, spare)
    base[:, first:last] = windows.reshape(4, size)
    _pack(
      code.reshape(4, size, width),
      view01[first:last],
      view23[first:last],
      low[first:last],
      spare[:size],
    )
    in_rows, places = np.divmod(at, width)
    in_row = np.bincount(in_rows, minlength=4 * size)
    counts[:, first:last] = in_row.reshape(4, size)
    cuts = np.searchsorted(in_rows, [size, 2 * size, 3 * size])
    places = np.split(places.astype(np.int32), cuts)
    pieces.append(list(zip(places, np.split(patterns, cuts), strict=True)))
  # A quarter after the other, not a block after the other.
  in_order = [piece[i] for i in range(4) for piece in pieces]
  columns = np.concatenate([places for places, _ in in_order])
  values = np.concatenate([patterns for _, patterns in in_order])
  if columns.size > np.iinfo(np.int32).max:
    raise SpecPilotError(
      f"W12 lists {2**31 - 1} weights at most, matrix {list(weight.shape)} has "
      f"{columns.size} outside its windows"
    )
  if not columns.size:
    columns, values = np.zeros(1, np.int32), np.zeros(1, np.uint16)
  row_start = np.zeros(4 * lanes + 1, np.int32)
  np.cumsum(counts.ravel(), out=row_start[1:])
  leaves: dict[str, Any] = {
    "view01": view01,
    "view23": view23,
    "low": low,
    "base": base.ravel(),
    "row_start": row_start,
    "columns": columns,
    "values": values.view(ml_dtypes.bfloat16),
  }
  return W12Array(**leaves, shape=(rows, width))


def decode(w: W12Array, first: int = 0, last: int | None = None) -> np.ndarray:
  """The matrix or a run of its rows, bit for bit.

  Args:
    w: leaves that are valid (`w12_storage.check`), NumPy's or others.
    first, last: rows first to last - 1; all without them.

  Returns:
    bfloat16 [last - first, I].
  """
  w = w12_array.untile(w)
  rows, width = w.shape
  last = rows if last is None else last
  view01, view23, low = map(np.asarray, (w.view01, w.view23, w.low))
  lanes = low.shape[0]
  begin = (np.asarray(w.base).astype(np.uint16) - 1) << 7
  result = np.empty((last - first, width), np.uint16)
  step = max(1, BLOCK // width)
  scratch = np.empty((2, min(step, lanes) * width), np.uint16)
  for i, pair in enumerate((view01, view01, view23, view23)):
    end = min(last, (i + 1) * lanes)
    for start in range(max(first, i * lanes), end, step):
      stop = min(start + step, end)
      part = slice(start - i * lanes, stop - i * lanes)
      code, other = scratch[:, : (stop - start) * width].reshape(2, -1, width)
      if i % 2:
        np.right_shift(pair[part], 4, out=code)
      else:
        np.left_shift(pair[part], 4, out=code)
      code &= 0x7F0
      np.right_shift(low[part], 4 * i, out=other)
      other &= 15
      code |= other
      zero = np.flatnonzero(code < 128)
      code += begin[start:stop, None]
      if i % 2:
        np.bitwise_and(pair[part], 0x8000, out=other)
      else:
        np.left_shift(pair[part], 8, out=other)
        other &= 0x8000
      out = result[start - first : stop - first]
      np.bitwise_or(code, other, out=out)
      out.reshape(-1)[zero] = other.reshape(-1)[zero]
  row_start = np.asarray(w.row_start[first : last + 1])
  entries = slice(row_start[0], row_start[-1])
  in_rows = np.repeat(np.arange(last - first), np.diff(row_start))
  exact = np.asarray(w.values[entries]).view(np.uint16)
  result[in_rows, np.asarray(w.columns[entries])] = exact
  return result.view(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Report:
  """Size of one matrix in W12, or of several together.

  Attributes:
    name: of the tensor or the set.
    weights: how many.
    outside: those in sparse lists.
    nbytes: of all parts: planes, windows, lists, padding.
  """

  name: str
  weights: int
  outside: int
  nbytes: int

  @property
  def bits_per_weight(self) -> float:
    return 8 * self.nbytes / self.weights

  @property
  def outside_fraction(self) -> float:
    """Share of the weights in sparse lists."""
    return self.outside / self.weights

  def __str__(self) -> str:
    return (
      f"{self.name}: {self.bits_per_weight:.3f} bits per weight, "
      f"{self.outside_fraction:.2e} outside the windows, "
      f"{self.nbytes / 1e6:,.2f} MB"
    )


@dataclasses.dataclass(frozen=True)
class SizeReport:
  """Sizes of a set of matrices in W12; `str` is a table.

  Attributes:
    tensors: one of each matrix, in the order given.
    total: of all.
  """

  tensors: tuple[Report, ...]
  total: Report

  def __str__(self) -> str:
    lines = [*self.tensors, self.total]
    wide = max(len(line.name) for line in lines)
    head = f"{'':{wide}}  bits/weight  outside        MB"
    return "\n".join(
      [head]
      + [
        f"{line.name:{wide}}  {line.bits_per_weight:11.3f}  "
        f"{line.outside_fraction:7.1e}  {line.nbytes / 1e6:8,.2f}"
        for line in lines
      ]
    )


def report(w: W12Array, name: str) -> Report:
  """The size of one matrix."""
  outside = int(np.asarray(w.row_start[-1]))
  return Report(name, w.shape[0] * w.shape[1], outside, w.nbytes)


def size_report(arrays: Mapping[str, W12Array]) -> SizeReport:
  """The sizes of matrices by name, and of all together.

  Raises:
    SpecPilotError: no matrix at all.
  """
  if not arrays:
    raise SpecPilotError("no W12 matrix to report the size of, expected some")
  tensors = tuple(report(w, name) for name, w in arrays.items())
  total = Report(
    "all",
    sum(r.weights for r in tensors),
    sum(r.outside for r in tensors),
    sum(r.nbytes for r in tensors),
  )
  return SizeReport(tensors, total)


def _codes(
  raw: np.ndarray, code: np.ndarray, magnitude: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Windows, codes and listed weights of some rows; all uint16 [N, I].

  Args:
    raw: patterns; overwritten.
    code: becomes the 12-bit codes.
    magnitude: overwritten.

  Returns:
    base [N], flat places of the listed weights in order, their patterns.
  """
  np.bitwise_and(raw, _MAGNITUDE, out=magnitude)
  base, at, present = _windows(magnitude, code)
  values = raw.reshape(-1)[at]
  raw >>= 4
  raw &= _SIGN
  code += 128
  code |= raw
  code.reshape(-1)[at] = np.where(present, 0, (values >> 4) & _SIGN)
  return base, at[present], values[present]


def _windows(
  magnitude: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The window of each row and the weights outside it.

  Args:
    magnitude: uint16 [N, I].
    offset: becomes magnitude less that of the window's begin, modulo 2^16.

  Returns:
    base [N], flat places of the weights outside, and which are not zero.
  """
  width = magnitude.shape[1]
  top = magnitude.max(axis=1) >> 7
  # The window under the highest exponent is mostly the best.
  base = np.clip(top, WINDOW, MAX_BASE + WINDOW - 1) - (WINDOW - 1)

  def outside():
    np.subtract(magnitude, base[:, None] << 7, out=offset)
    at = np.flatnonzero(offset >= _INSIDE)
    return at, magnitude.reshape(-1)[at] != 0

  at, present = outside()
  counts = np.bincount(at[present] // width, minlength=len(base))
  changed = False
  for row in np.flatnonzero((counts > 1) | (top == 255)):
    # A lower window gains no more than what lies below this one, and loses
    # those of the highest exponent.
    highest = top[row] << 7
    if (
      top[row] == 255
      or np.count_nonzero(magnitude[row] >= highest) < counts[row]
    ):
      best = _best_base(magnitude[row])
      changed |= best != base[row]
      base[row] = best
  if changed:
    at, present = outside()
  return base, at, present


def _best_base(magnitude: np.ndarray) -> int:
  """The window of a row [I], from all its exponents."""
  counts = np.bincount(magnitude >> 7, minlength=256)
  below = np.cumsum(counts)
  lowest, highest = MIN_BASE + WINDOW - 1, MAX_BASE + WINDOW - 1
  held = below[lowest : highest + 1] - below[MIN_BASE - 1 : MAX_BASE]
  occurs = counts[lowest : highest + 1] > 0
  occurs[0] = True
  return MAX_BASE - int(np.argmax(np.where(occurs, held, -1)[::-1]))


def _pack(
  codes: np.ndarray,
  view01: np.ndarray,
  view23: np.ndarray,
  low: np.ndarray,
  spare: np.ndarray,
) -> None:
  """Puts 12-bit codes [4, P, I] into planes [P, I], all uint16."""
  for out, first, second in (
    (view01, codes[0], codes[1]),
    (view23, codes[2], codes[3]),
  ):
    np.left_shift(second, 4, out=out)
    out &= 0xFF00
    np.right_shift(first, 4, out=spare)
    out |= spare
  np.left_shift(codes[3], 12, out=low)
  for i in range(3):
    np.bitwise_and(codes[i], 15, out=spare)
    if i:
      np.left_shift(spare, 4 * i, out=spare)
    low |= spare
