"""Frames on a pipe: four bytes of length, then JSON.

Part of every engine's tree: nothing but the standard library is needed. The
reader takes nothing on trust: a length is checked before anything is stored.
"""

import json
import os
import struct
from typing import Any

MAX_BYTES = 1 << 20
"""Of a frame."""

_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
  """What came over a pipe is no frame."""


def encode(message: dict[str, Any]) -> bytes:
  """A message as a frame."""
  data = json.dumps(message, allow_nan=False).encode()
  if len(data) > MAX_BYTES:
    raise FrameError(f"a frame of {len(data)} bytes, at most {MAX_BYTES}")
  return _LENGTH.pack(len(data)) + data


class Decoder:
  """Bytes to messages, as they come."""

  def __init__(self):
    self._buffer = bytearray()

  @property
  def pending(self) -> int:
    """Bytes of a frame that is not whole yet."""
    return len(self._buffer)

  def feed(self, data: bytes) -> list[dict[str, Any]]:
    """The messages that are whole now.

    Raises:
      FrameError: too long, not JSON, not an object.
    """
    self._buffer += data
    messages = []
    while len(self._buffer) >= _LENGTH.size:
      (size,) = _LENGTH.unpack_from(self._buffer)
      if size > MAX_BYTES:
        raise FrameError(f"a frame of {size} bytes, at most {MAX_BYTES}")
      if len(self._buffer) < _LENGTH.size + size:
        break
      body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
      del self._buffer[: _LENGTH.size + size]
      try:
        message = json.loads(body)
      except (ValueError, RecursionError):
        raise FrameError("a frame that is not JSON") from None
      if not isinstance(message, dict):
        raise FrameError("a frame that is no JSON object")
      messages.append(message)
    return messages


def write(fd: int, message: dict[str, Any]) -> None:
  """Writes a frame, all of it."""
  view = memoryview(encode(message))
  while view:
    view = view[os.write(fd, view) :]


def read(fd: int, decoder: Decoder) -> list[dict[str, Any]] | None:
  """At least one message, blocking; None at the end of the pipe."""
  while True:
    data = os.read(fd, 1 << 16)
    if not data:
      return None
    messages = decoder.feed(data)
    if messages:
      return messages
