"""Safetensors files: a reader of blocks of rows, and a writer.

The library checks a file's header, but maps the whole file into memory, and
the order in which it writes metadata is random. Here data are read into
buffers of their own, and the same tensors give the same bytes.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints.source import open_file, read_at, row_blocks
from specpilot_jax.errors import SpecPilotError

_DTYPES = {
  "F32": np.dtype(np.float32),
  "I32": np.dtype(np.int32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
  "U16": np.dtype(np.uint16),
  "U8": np.dtype(np.uint8),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""By the library's names, in its order within a file: wider types first."""


class TensorFile:
  """An open file; the same names, shapes and types as in its header.

  Args:
    path: of the file.
    stack: an `ExitStack` that closes it.

  Raises:
    SpecPilotError: no file, truncated, or not safetensors.
  """

  def __init__(self, path: pathlib.Path, stack: contextlib.ExitStack):
    self.path = path
    if not path.is_file():
      raise SpecPilotError(f"{path}: not a file")
    try:
      with safetensors.safe_open(path, framework="numpy"):
        pass  # It has compared the header with the size of the file.
    except (safetensors.SafetensorError, OSError, ValueError) as error:
      raise SpecPilotError(
        f"{path}: truncated or not safetensors ({common.first_line(error)})"
      ) from None
    self._file = open_file(path, stack)
    size = int(read_at(self._file, path, 0, (), "<u8"))
    content = read_at(self._file, path, 8, (size,), np.uint8).tobytes()
    self._header = json.loads(content)
    self._begin = 8 + size
    # The library lets null pass for none.
    self.metadata: dict[str, str] = self._header.pop("__metadata__", None) or {}

  def names(self) -> list[str]:
    """Of the tensors, in the order of their places."""
    return sorted(self._header, key=lambda n: self._header[n]["data_offsets"])

  def dtype_name(self, name: str) -> str:
    """As the file has it, such as `BF16`."""
    return self._header[name]["dtype"]

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._header[name]["shape"])

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """A tensor of one axis or more, some rows at a time."""
    dtype, shape = self._dtype(name), self.shape(name)
    width = math.prod(shape[1:]) * dtype.itemsize
    for start, end in row_blocks(shape, width):
      yield self._read(name, start * width, (end - start, *shape[1:]), dtype)

  def read(self, name: str) -> np.ndarray:
    """A whole tensor.

    Raises:
      SpecPilotError: a type that no checkpoint here has.
    """
    return self._read(name, 0, self.shape(name), self._dtype(name))

  def _dtype(self, name: str) -> np.dtype:
    found = self.dtype_name(name)
    if found not in _DTYPES:
      raise SpecPilotError(
        f"{self.path}: tensor {name!r} has dtype {found}, supported are"
        f" {', '.join(_DTYPES)}"
      )
    return _DTYPES[found]

  def _read(self, name, offset, shape, dtype) -> np.ndarray:
    begin = self._begin + self._header[name]["data_offsets"][0]
    return read_at(self._file, self.path, begin + offset, shape, dtype)


def write(
  path: pathlib.Path,
  tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, str],
) -> None:
  """Writes a file that is there complete or not at all.

  Args:
    path: of the file; one that is there is replaced.
    tensors: by name; float32, int32, bfloat16, float16, uint16, uint8 or
      float8_e4m3fn.
    metadata: of the header.

  Raises:
    SpecPilotError: the file cannot be written, or a tensor has another type.
  """
  arrays = {n: np.ascontiguousarray(tensors[n]) for n in sorted(tensors)}
  for name, array in arrays.items():
    if array.dtype not in _DTYPES.values():
      raise SpecPilotError(
        f"{path}: tensor {name!r} has dtype {array.dtype}, supported are"
        f" {', '.join(str(dtype) for dtype in _DTYPES.values())}"
      )
  header: dict[str, Any] = {"__metadata__": dict(metadata)}
  order, offset = [], 0
  for kind, dtype in _DTYPES.items():
    for name, array in arrays.items():
      if array.dtype != dtype:
        continue
      header[name] = {
        "dtype": kind,
        "shape": list(tensors[name].shape),
        "data_offsets": [offset, offset + array.nbytes],
      }
      order.append(name)
      offset += array.nbytes
  text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
  text += b" " * (-len(text) % 8)
  partial = path.with_name(f".{path.name}.tmp")
  try:
    with open(partial, "wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      for name in order:
        file.write(arrays[name].reshape(-1).view(np.uint8))
    os.replace(partial, path)
  except OSError as error:
    partial.unlink(missing_ok=True)
    raise SpecPilotError(
      f"{path}: cannot be written ({error.strerror})"
    ) from None
