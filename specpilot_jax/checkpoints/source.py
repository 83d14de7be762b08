"""A model that is read parameter by parameter, whatever its format.

The readers open one, and `load` is `open` with all parameters read. Data come
in blocks of rows, straight from the files into buffers of their own: memory
maps would count as memory for as long as the file is open.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints.layout import Fused, Part, layout
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

BLOCK_BYTES = 4 << 20
"""Of one block of rows, at most, unless a row has more: what caches hold."""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
  """A model on disk.

  Attributes:
    config: see `Checkpoint`.
    tokenizer: see `Checkpoint`.
    name: see `Checkpoint.source`.
    notes: see `Checkpoint`.
    sha256: see `Checkpoint`.
    fingerprint: hex digests of what is read, by file name; `sha256` unless
      the files are a conversion themselves.
    dtypes: of the parameters, in the order of `layout`.
    read_blocks: a parameter's rows, block by block.
    read_stored: where parameters may be stored in W12: one as it is stored,
      `W12Array` or array.
    fp8: names of the parameters in FP8, which have no rows to read.
    read_fp8: one of them, `FP8Array` of NumPy leaves.
  """

  config: ModelConfig
  tokenizer: Tokenizer | None
  name: str
  notes: tuple[str, ...]
  sha256: Mapping[str, str]
  fingerprint: Callable[[], Mapping[str, str]]
  dtypes: Mapping[str, np.dtype]
  read_blocks: Callable[[str], Iterator[np.ndarray]]
  read_stored: Callable[[str], Any] | None = None
  fp8: frozenset[str] = frozenset()
  read_fp8: Callable[[str], Any] | None = None

  @functools.cached_property
  def table(self) -> dict[str, Fused]:
    """See `layout`."""
    return layout(self.config)

  def nbytes(self, name: str) -> int:
    """Bytes of a parameter in its own dtype."""
    return math.prod(self.table[name].shape) * self.dtypes[name].itemsize

  def read(self, name: str) -> np.ndarray:
    """A whole parameter; raises as the blocks do."""
    blocks = self.read_blocks(name)
    return assemble(blocks, self.table[name].shape, self.dtypes[name])

  def checkpoint(self, *, decode: bool = False) -> common.Checkpoint:
    """The model with all parameters read; W12 stays W12 unless decoded, FP8
    stays FP8."""
    plain = self.read if decode or not self.read_stored else self.read_stored

    def read(name: str) -> Any:
      if name not in self.fp8:
        return plain(name)
      assert self.read_fp8 is not None
      return self.read_fp8(name)

    return common.Checkpoint(
      config=self.config,
      params={name: read(name) for name in self.dtypes},
      tokenizer=self.tokenizer,
      source=self.name,
      notes=self.notes,
      sha256=self.sha256,
    )


def assemble(
  blocks: Iterator[np.ndarray], shape: Sequence[int], dtype: np.dtype
) -> np.ndarray:
  """One array of blocks of rows: a copy, unless there is one block alone."""
  array = None
  start = 0
  for block in blocks:
    if array is None:
      if len(block) == shape[0]:
        array = block
        continue
      array = np.empty(tuple(shape), dtype)
    array[start : start + len(block)] = block
    start += len(block)
  assert array is not None  # Every parameter has rows.
  return array


def fused_dtypes(
  table: Mapping[str, Fused], of: Callable[[Part], np.dtype]
) -> dict[str, np.dtype]:
  """The parameters' dtypes: their tensors', or float32 where these differ,
  which holds the values of bfloat16 and float16 exactly.
  """
  dtypes = {}
  for name, fused in table.items():
    found = {of(part) for part in fused.parts}
    dtypes[name] = found.pop() if len(found) == 1 else common.FLOAT32
  return dtypes


def fused_blocks(
  fused: Fused,
  dtype: np.dtype,
  read: Callable[[Part], Iterator[np.ndarray]],
) -> Iterator[np.ndarray]:
  """The blocks of a parameter from those of its tensors."""
  for part in fused.parts:
    for block in read(part):
      shape = (len(block), *fused.shape[1:])
      yield block.reshape(shape).astype(dtype, copy=False)


def row_blocks(
  shape: Sequence[int], row_bytes: int, multiple: int = 1
) -> Iterator[tuple[int, int]]:
  """(first row, end) of blocks of a multiple of some rows."""
  size = max(1, BLOCK_BYTES // max(1, row_bytes) // multiple) * multiple
  for start in range(0, shape[0], size):
    yield start, min(start + size, shape[0])


def checked(
  blocks: Iterator[np.ndarray], where: str, name: str
) -> Iterator[np.ndarray]:
  """Blocks as they come, refused at the end if any value was not finite."""
  bad = 0
  for block in blocks:
    bad += common.nonfinite(block)
    if not bad:
      yield block
  if bad:
    raise SpecPilotError(
      f"{where}: tensor {name!r} has {bad} values that are NaN or infinite"
    )


def read_at(
  file: int, path: pathlib.Path, offset: int, shape: Sequence[int], dtype
) -> np.ndarray:
  """An array from a place in a file.

  Raises:
    SpecPilotError: the file ends before the array does, or cannot be read.
  """
  array = np.empty(tuple(shape), dtype)
  view = memoryview(array.reshape(-1).view(np.uint8))
  done = 0
  while done < len(view):
    try:
      count = os.preadv(file, [view[done:]], offset + done)
    except OSError as error:
      raise SpecPilotError(
        f"{path}: cannot be read ({error.strerror})"
      ) from None
    if count == 0:
      raise SpecPilotError(f"{path}: it ends at byte {offset + done} already")
    done += count
  return array


def open_file(path: pathlib.Path, stack) -> int:
  """A descriptor to read from, closed with the stack."""
  try:
    file = os.open(path, os.O_RDONLY)
  except OSError as error:
    raise SpecPilotError(f"{path}: cannot be read ({error.strerror})") from None
  stack.callback(os.close, file)
  return file
