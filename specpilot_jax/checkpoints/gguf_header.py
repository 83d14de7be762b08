"""Structure check of a GGUF file, before anything trusts its lengths.

Reads every length, count and offset with bounds checks, so that a truncated
or garbage file ends in one line instead of in a reader's endless loop or huge
allocation. Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import os
import struct

from specpilot_jax.errors import SpecPilotError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {
  0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8,
}  # fmt: skip
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class _Cursor:
  def __init__(self, path, data):
    self.path = path
    self.data = data
    self.offset = 0
    self.at = "header"

  def fail(self, what: str):
    raise SpecPilotError(f"{self.path}: not a usable GGUF file: {what}")

  def skip(self, size: int) -> int:
    """Moves on by `size` bytes and returns where they began."""
    start = self.offset
    if size > len(self.data) - start:
      self.fail(f"it ends inside {self.at} (truncated or damaged)")
    self.offset = start + size
    return start

  def number(self, code: str) -> int:
    start = self.skip(struct.calcsize("<" + code))
    return struct.unpack_from("<" + code, self.data, start)[0]

  def string(self) -> bytes:
    size = self.number("Q")
    start = self.skip(size)
    return self.data[start : start + size]

  def name(self) -> str:
    try:
      return self.string().decode()
    except UnicodeDecodeError:
      self.fail(f"a name after {self.at} is not UTF-8")
      raise

  def value(self, kind: int) -> None:
    if kind == _STRING:
      self.string()
    elif kind in _SCALAR_BYTES:
      self.skip(_SCALAR_BYTES[kind])
    elif kind == _ARRAY:
      item, count = self.number("I"), self.number("Q")
      if item in _SCALAR_BYTES:
        self.skip(_SCALAR_BYTES[item] * count)
      elif item == _STRING:
        for _ in range(count):  # Ends with the file at the latest.
          self.string()
      else:
        self.fail(f"{self.at} is an array of unknown type {item}")
    else:
      self.fail(f"{self.at} has unknown type {kind}")


def check(path: str | os.PathLike[str], block_sizes: dict) -> None:
  """Refuses a file whose structure does not fit its own length.

  Args:
    path: the file.
    block_sizes: tensor type number -> (elements, bytes) of one block.

  Raises:
    SpecPilotError: one line that names the file and the metadata key or the
      tensor at fault.
  """
  try:
    with open(path, "rb") as file:
      if os.fstat(file.fileno()).st_size == 0:
        raise SpecPilotError(f"{path}: not a usable GGUF file: it is empty")
      with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check(_Cursor(path, data), block_sizes)
  except OSError as error:
    raise SpecPilotError(f"{path}: cannot be read ({error.strerror})") from None


def _check(cursor: _Cursor, block_sizes: dict) -> None:
  if cursor.data[:4] != _MAGIC:
    cursor.fail("it does not begin with the letters GGUF")
  cursor.offset = 4
  version = cursor.number("I")
  if version not in _VERSIONS:
    cursor.fail(f"version {version}, supported are 2 and 3 (little-endian)")
  tensors, fields = cursor.number("Q"), cursor.number("Q")
  alignment = _DEFAULT_ALIGNMENT
  for _ in range(fields):
    key = cursor.name()
    cursor.at = f"metadata {key!r}"
    kind = cursor.number("I")
    start = cursor.offset
    cursor.value(kind)
    if key == "general.alignment" and kind == 4:
      alignment = struct.unpack_from("<I", cursor.data, start)[0]
  if alignment == 0 or alignment & (alignment - 1):
    cursor.fail(f"general.alignment {alignment} is not a power of two")
  spans = []
  for _ in range(tensors):
    name = cursor.name()
    cursor.at = f"the entry of tensor {name!r}"
    rank = cursor.number("I")
    if not 1 <= rank <= _MAX_DIMS:
      cursor.fail(f"tensor {name!r} has {rank} dimensions")
    shape = [cursor.number("Q") for _ in range(rank)]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in block_sizes:
      cursor.fail(f"tensor {name!r} has unknown type {kind}")
    elements = 1
    for size in shape:
      elements *= size
    block, block_bytes = block_sizes[kind]
    if elements == 0 or shape[0] % block:
      cursor.fail(f"tensor {name!r} has impossible shape {shape[::-1]}")
    spans.append((name, offset, elements // block * block_bytes))
  base = -(-cursor.offset // alignment) * alignment
  for name, offset, size in spans:
    if base + offset + size > len(cursor.data):
      cursor.fail(
        f"tensor {name!r} ends at byte {base + offset + size}, the file has"
        f" {len(cursor.data)} (truncated or damaged)"
      )
