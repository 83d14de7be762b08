"""Writers of checkpoints, parameter by parameter, for `conversion`."""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import orbax, orbax_arrays, stored, w12
from specpilot_jax.checkpoints.source import Source, assemble

MAX_OUTSIDE = 0.01
"""Share of a matrix outside the windows above which it stays bfloat16: its
lists would cost a kernel more than its planes save."""

Entry = dict[str, Any]
"""What a journal keeps of a parameter that is written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
  """A parameter to write.

  Attributes:
    name: its name.
    shape: its shape.
    dtype: of the blocks.
    is_matrix: see `layout.Fused`.
    blocks: gives its rows, block by block.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  is_matrix: bool
  blocks: Callable[[], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
  """A parameter that is ready to be written.

  Attributes:
    nbytes: in memory until it is.
    write: writes it, in any thread; raises whatever says that it cannot.
  """

  nbytes: int
  write: Callable[[], Entry]


class Writer(Protocol):
  """A checkpoint that is written parameter by parameter."""

  def working_bytes(self, parameter: Parameter) -> int:
    """In memory while one is prepared, blocks apart."""
    ...

  def prepare(self, parameter: Parameter) -> Prepared:
    """Makes one ready; raises what the blocks do."""
    ...

  def blocks(self, name: str, entry: Entry) -> Iterator[np.ndarray]:
    """Reads back what was written, checked against its entry.

    Raises:
      SpecPilotError: it is not what was written.
    """
    ...

  def close(self, entries: Mapping[str, Entry]) -> None:
    """Writes what belongs to the weights as a whole."""
    ...

  def finish(
    self,
    entries: Mapping[str, Entry],
    source: Source,
    notes: tuple[str, ...],
    conversion: Mapping[str, Any],
  ) -> None:
    """Adds what makes a checkpoint of the weights, metadata last."""
    ...


def digest(blocks: Iterable[np.ndarray]) -> str:
  """Of all bits of a parameter, however it is cut into blocks."""
  found = hashlib.sha256()
  for block in blocks:
    found.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
  return found.hexdigest()


class OrbaxWriter:
  """Entries are records of `stored`.

  Args:
    folder: of the checkpoint.
    encode: has matrices stored in W12.
  """

  def __init__(self, folder: pathlib.Path, *, encode: bool):
    self._folder = folder
    self._params = folder / orbax.PARAMS
    self._encode = encode

  def working_bytes(self, parameter: Parameter) -> int:
    size = math.prod(parameter.shape) * parameter.dtype.itemsize
    return size * 7 // 4 if self._encode and parameter.is_matrix else size

  def prepare(self, parameter: Parameter) -> Prepared:
    value, more = self._value(parameter)

    def write() -> Entry:
      self._params.mkdir(exist_ok=True)
      arrays = stored.arrays(parameter.name, value)
      with orbax_arrays.quiet():
        orbax_arrays.write(self._params, arrays)
      return stored.record(value) | more

    return Prepared(value.nbytes, write)

  def _value(self, parameter: Parameter) -> tuple[np.ndarray | W12Array, Entry]:
    """What to store; the matrix itself is given up where it is W12."""
    array = assemble(parameter.blocks(), parameter.shape, parameter.dtype)
    if not self._encode or not parameter.is_matrix:
      return array, {}
    value = w12.encode(array)
    outside = w12.report(value, parameter.name).outside_fraction
    if outside > MAX_OUTSIDE:
      why = f"{outside:.1%} of its weights are outside the windows of W12"
    elif value.nbytes >= array.nbytes:
      why = f"W12 takes {value.nbytes} bytes, bfloat16 {array.nbytes}"
    else:
      return value, {}
    return array, {"kept_bf16": why}

  def blocks(self, name: str, entry: Entry) -> Iterator[np.ndarray]:
    with orbax_arrays.quiet():
      value = stored.restore(self._params, name, entry)
    yield from stored.blocks(value)

  def close(self, entries: Mapping[str, Entry]) -> None:
    with orbax_arrays.quiet():
      orbax_arrays.write_tree(self._params, stored.tree(entries))

  def finish(
    self,
    entries: Mapping[str, Entry],
    source: Source,
    notes: tuple[str, ...],
    conversion: Mapping[str, Any],
  ) -> None:
    orbax.finish(
      self._folder,
      {name: entries[name] for name in source.dtypes},
      config=source.config,
      tokenizer=source.tokenizer,
      source=source.name,
      notes=notes,
      sha256=source.sha256,
      conversion=conversion,
    )
