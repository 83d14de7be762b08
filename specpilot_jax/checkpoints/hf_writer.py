"""Writes a Hugging Face folder parameter by parameter.

A safetensors file begins with the place of every tensor in it, all of which
are known before the first is written: blocks of rows go straight to theirs.
The bytes are those that the `safetensors` library writes.
"""

import dataclasses
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import hf, source
from specpilot_jax.checkpoints.hf_config import to_hf
from specpilot_jax.checkpoints.layout import layout
from specpilot_jax.checkpoints.source import Source
from specpilot_jax.checkpoints.writers import Entry, Parameter, Prepared
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError

CONVERSION = "conversion.json"
"""Says what a folder was converted from; no reader needs it."""

# The library's names, and its order within a file: wider types first.
_TYPES = {common.FLOAT32: "F32", common.BFLOAT16: "BF16", common.FLOAT16: "F16"}


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where a tensor is: bytes of `file` from `offset`."""

  tensor: str
  file: str
  offset: int
  rows: int
  row_bytes: int


class HuggingFaceWriter:
  """See `writers.Writer`; entries have a checksum of every tensor.

  Args:
    folder: of the checkpoint.
    config: the model.
    dtypes: what the parameters are written in.
    max_shard_bytes: above this the weights are sharded, with an index.

  Raises:
    SpecPilotError: a config that has no form in Hugging Face's classes.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    config: ModelConfig,
    dtypes: Mapping[str, np.dtype],
    max_shard_bytes: int,
  ):
    self._folder = folder
    self._dtypes = dtypes
    self._shapes = {name: f.shape for name, f in layout(config).items()}
    self._fields = to_hf(config, str(dtypes["embed.weight"]))
    sizes: dict[str, tuple[str, np.dtype, tuple[int, ...]]] = {}
    for name, fused in layout(config).items():
      for part in fused.parts:
        sizes[part.name] = name, dtypes[name], part.shape
    nbytes = {
      tensor: math.prod(shape) * dtype.itemsize
      for tensor, (_, dtype, shape) in sizes.items()
    }
    self._total = sum(nbytes.values())
    self._shards = hf.shards(nbytes, max_shard_bytes)
    self._headers: dict[str, bytes] = {}
    self._places: dict[str, list[_Place]] = {name: [] for name in dtypes}
    for file, tensors in self._shards.items():
      kinds = list(_TYPES)
      tensors = sorted(tensors, key=lambda t: (kinds.index(sizes[t][1]), t))
      header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
      places, offset = [], 0
      for tensor in tensors:
        name, dtype, shape = sizes[tensor]
        end = offset + nbytes[tensor]
        header[tensor] = {
          "dtype": _TYPES[dtype],
          "shape": list(shape),
          "data_offsets": [offset, end],
        }
        width = nbytes[tensor] // shape[0]
        places.append((name, _Place(tensor, file, offset, shape[0], width)))
        offset = end
      text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
      content = text.encode()
      content += b" " * (-len(content) % 8)
      self._headers[file] = len(content).to_bytes(8, "little") + content
      for name, place in places:
        at = place.offset + len(self._headers[file])
        self._places[name].append(dataclasses.replace(place, offset=at))
    for name, fused in layout(config).items():
      order = [part.name for part in fused.parts]
      self._places[name].sort(key=lambda place: order.index(place.tensor))

  def working_bytes(self, parameter: Parameter) -> int:
    return 0

  def prepare(self, parameter: Parameter) -> Prepared:
    return Prepared(0, lambda: self._write_blocks(parameter))

  def _write_blocks(self, parameter: Parameter) -> Entry:
    places = self._places[parameter.name]
    sums = {place.tensor: 0 for place in places}
    rows = 0
    for block in parameter.blocks():
      block = np.ascontiguousarray(block)
      first = 0
      for place in places:
        start, end = max(rows, first), rows + len(block)
        end = min(end, first + place.rows)
        if start < end:
          content = block[start - rows : end - rows].reshape(-1).view(np.uint8)
          offset = place.offset + (start - first) * place.row_bytes
          self._write(place.file, offset, content)
          sums[place.tensor] = zlib.crc32(content, sums[place.tensor])
        first += place.rows
      rows += len(block)
    return {"crc32": sums}

  def _write(self, file: str, offset: int, content: np.ndarray) -> None:
    path = self._folder / file
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
      if new:
        _write_at(descriptor, 0, self._headers[file])
      _write_at(descriptor, offset, memoryview(content))
    finally:
      os.close(descriptor)

  def blocks(self, name: str, entry: Entry) -> Iterator[np.ndarray]:
    for place in self._places[name]:
      path = self._folder / place.file
      found = 0
      try:
        descriptor = os.open(path, os.O_RDONLY)
      except OSError as error:
        raise SpecPilotError(
          f"{path}: cannot be read ({error.strerror})"
        ) from None
      try:
        for start, end in source.row_blocks((place.rows,), place.row_bytes):
          offset = place.offset + start * place.row_bytes
          shape = (end - start, place.row_bytes)
          block = source.read_at(descriptor, path, offset, shape, np.uint8)
          found = zlib.crc32(block, found)
          yield block
      finally:
        os.close(descriptor)
      if found != entry["crc32"].get(place.tensor):
        raise SpecPilotError(
          f"{path}: tensor {place.tensor!r} is damaged: its bytes are not those"
          " that were written"
        )

  def close(self, entries: Mapping[str, Entry]) -> None:
    del entries
    if len(self._shards) == 1:
      return
    weight_map = {t: file for file, ts in self._shards.items() for t in ts}
    index = {
      "metadata": {"total_size": self._total},
      "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2) + "\n"
    common.write_whole(self._folder / hf.INDEX, text.encode())

  def finish(
    self,
    entries: Mapping[str, Entry],
    source: Source,
    notes: tuple[str, ...],
    conversion: Mapping[str, Any],
  ) -> None:
    del entries
    if source.tokenizer is not None:
      source.tokenizer.save(self._folder)
    about = {"notes": list(notes), **conversion}
    for file, value in ((CONVERSION, about), (hf.CONFIG, self._fields)):
      text = json.dumps(value, indent=2) + "\n"
      common.write_whole(self._folder / file, text.encode())


def _write_at(descriptor: int, offset: int, content) -> None:
  view = memoryview(content)
  while view:
    count = os.pwrite(descriptor, view, offset)
    view = view[count:]
    offset += count
