"""One safetensors file whose bfloat16 matrices are in W12.

It has the tensors of a `model.safetensors`. A matrix that W12 makes smaller is
there as the arrays of `w12_storage`, named `<tensor>.<part>`; anything else
is there as it is. Nothing is changed: what is read is decoded, and the same
bits. The models that ship with the package are stored like this.
"""

import contextlib
import os
import pathlib
from collections.abc import Generator, Iterator, Mapping

import numpy as np

from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import w12, w12_storage
from specpilot_jax.checkpoints.source import row_blocks
from specpilot_jax.checkpoints.tensor_file import TensorFile, write
from specpilot_jax.errors import SpecPilotError

WEIGHTS = "model.w12.safetensors"
"""Beside `config.json`, in place of `model.safetensors`."""

FORMAT = "specpilot-w12"
VERSION = 1
"""Of the file; its metadata have both."""

_SHAPE = "shape"


class W12File:
  """An open file; names, shapes and types are those of the tensors.

  Args:
    path: of the file.
    stack: an `ExitStack` that closes it.

  Raises:
    SpecPilotError: no file, truncated, not safetensors; another format or
      version; a matrix of which a part is missing.
  """

  def __init__(self, path: pathlib.Path, stack: contextlib.ExitStack):
    self.path = path
    self._file = TensorFile(path, stack)
    self._check_metadata()
    self._matrices: dict[str, set[str]] = {}
    self._plain: list[str] = []
    for stored in self._file.names():
      name, _, part = stored.rpartition(".")
      if name and part in w12_storage.NAMES:
        self._matrices.setdefault(name, set()).add(part)
      else:
        self._plain.append(stored)
    for name, parts in self._matrices.items():
      for part in w12_storage.NAMES:
        if part not in parts:
          raise SpecPilotError(
            f"{path}: part {part!r} of tensor {name!r} is missing"
          )
      if name in self._plain:
        raise SpecPilotError(f"{path}: tensor {name!r} is there twice")

  def _check_metadata(self) -> None:
    expected = {"format": FORMAT, "version": str(VERSION)}
    for field, value in expected.items():
      found = self._file.metadata.get(field)
      if found != value:
        raise SpecPilotError(
          f"{self.path}: {field} is {found!r}, this release reads {value!r}"
        )

  def names(self) -> list[str]:
    return sorted([*self._plain, *self._matrices])

  def dtype_name(self, name: str) -> str:
    """As safetensors files have it, such as `BF16`."""
    return "BF16" if name in self._matrices else self._file.dtype_name(name)

  def shape(self, name: str) -> tuple[int, ...]:
    if name not in self._matrices:
      return self._file.shape(name)
    return tuple(self._file.read(f"{name}.{_SHAPE}").reshape(-1).tolist())

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """A tensor, some rows at a time; those of a matrix are decoded.

    Raises:
      SpecPilotError: parts that are no W12 matrix.
    """
    if name not in self._matrices:
      yield from self._file.blocks(name)
      return
    matrix = self.matrix(name)
    for start, end in row_blocks(matrix.shape, 2 * matrix.shape[1]):
      yield w12.decode(matrix, start, end)

  def read(self, name: str) -> np.ndarray:
    """A whole tensor, decoded; raises as the blocks do."""
    if name in self._matrices:
      return w12.decode(self.matrix(name))
    return self._file.read(name)

  def matrices(self) -> list[str]:
    """Names of the tensors that are in W12."""
    return sorted(self._matrices)

  def matrix(self, name: str) -> W12Array:
    """One of them as it is stored, checked."""
    parts = {
      part: self._file.read(f"{name}.{part}") for part in w12_storage.NAMES
    }
    return w12_storage.from_arrays(parts, f"{self.path}: tensor {name!r}")


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Generator[W12File]:
  """An open `W12File`; raises as that does."""
  with contextlib.ExitStack() as stack:
    yield W12File(pathlib.Path(path), stack)


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """All tensors of a file, decoded.

  Returns:
    The arrays that `save` was given, bit for bit, by name.

  Raises:
    SpecPilotError: no file, truncated, another format or version, a part that
      is missing, planes or lists that no encoder writes; the line names the
      file and the tensor.
  """
  with opened(path) as file:
    return {name: file.read(name) for name in file.names()}


def save(
  path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes tensors, bfloat16 matrices in W12; the file appears complete.

  The same tensors give the same bytes.

  Args:
    path: of the file; one that is there is replaced.
    tensors: by name, any shape; float32, bfloat16 or float16.

  Raises:
    SpecPilotError: a tensor of another type or with the name of a part of W12,
      or a file that cannot be written.
  """
  path = pathlib.Path(path)
  arrays: dict[str, np.ndarray] = {}
  for name, tensor in tensors.items():
    tensor = np.asarray(tensor)
    if tensor.dtype not in common.WEIGHT_DTYPES:
      raise SpecPilotError(
        f"{path}: tensor {name!r} has dtype {tensor.dtype}, supported are"
        f" {', '.join(str(dtype) for dtype in common.WEIGHT_DTYPES)}"
      )
    if name.rpartition(".")[2] in w12_storage.NAMES:
      raise SpecPilotError(f"{path}: tensor {name!r} is named like a W12 part")
    arrays |= _stored(name, tensor)
  write(path, arrays, {"format": FORMAT, "version": str(VERSION)})


def _stored(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
  if tensor.dtype == common.BFLOAT16 and tensor.ndim == 2 and tensor.size:
    parts = w12_storage.to_arrays(w12.encode(tensor))
    if sum(part.nbytes for part in parts.values()) < tensor.nbytes:
      return {f"{name}.{part}": array for part, array in parts.items()}
  return {name: tensor}
