"""Files that are there whole or not at all, whatever ends the process.

Everything is written beside its place, forced to the disk and then renamed;
the folder is forced to the disk too, since a rename is an entry in it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from specpilot_jax.errors import SpecPilotError

PARTIAL = ".partial-"
"""How names of what is not whole yet begin."""

WAIT_S = 10.0
"""How long one waits for another process that writes."""


def parse_json(data: bytes | str) -> Any:
  """Reads JSON of unknown origin.

  >>> parse_json(b'{"a": [1]}')
  {'a': [1]}

  Raises:
    ValueError: no JSON, a number that is none (NaN), characters that UTF-8 has
      not, or more levels than anybody writes.
  """

  def refuse(constant: str) -> NoReturn:
    raise ValueError(constant)

  try:
    value = json.loads(data, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
  except RecursionError:
    raise ValueError("nested too deeply") from None
  return value


def _force(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
  try:
    with open(path, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
  except OSError as e:
    # A full disk names no file, and what is there of this one is of no use.
    with contextlib.suppress(OSError):
      path.unlink()
    raise SpecPilotError(f"{path}: {e.strerror}; not written") from None


def replace(path: Path, data: bytes) -> None:
  """Writes a file in place of what is there."""
  partial = path.with_name(PARTIAL + path.name)
  _write(partial, data)
  os.replace(partial, path)
  _force(path.parent)


def publish(folder: Path, files: Mapping[str, bytes]) -> None:
  """Makes a folder with these files, names relative to it.

  A folder of that name that is there already must hold the same.

  Raises:
    SpecPilotError: it holds something else.
  """
  if folder.exists():
    if read_folder(folder) != dict(files):
      raise SpecPilotError(f"{folder} is there and holds something else")
    return
  partial = folder.with_name(PARTIAL + folder.name)
  shutil.rmtree(partial, ignore_errors=True)
  try:
    for name, data in files.items():
      (partial / name).parent.mkdir(parents=True, exist_ok=True)
      _write(partial / name, data)
  except (OSError, SpecPilotError):
    shutil.rmtree(partial, ignore_errors=True)
    raise
  for place, _, _ in os.walk(partial):
    _force(Path(place))
  os.rename(partial, folder)
  _force(folder.parent)


def read_folder(folder: Path) -> dict[str, bytes]:
  """All files below a folder, by relative path.

  Raises:
    SpecPilotError: a symbolic link among them.
  """
  found = {}
  for path in (folder, *sorted(folder.rglob("*"))):
    if path.is_symlink():
      raise SpecPilotError(f"{path} is a symbolic link")
    if path.is_file():
      found[path.relative_to(folder).as_posix()] = path.read_bytes()
  return found


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
  """Keeps other processes from reading and writing a folder meanwhile.

  Raises:
    SpecPilotError: another process has it for longer than `WAIT_S`.
  """
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    if not _lock(descriptor, fcntl.LOCK_EX):
      raise SpecPilotError(f"{folder}: another process writes to it")
    yield
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def settled(folder: Path) -> Generator[None]:
  """Keeps others from writing to a folder while it is read, where it can.

  Whoever reads is not kept from it by a writer that hangs or by a file system
  without locks; what is half there then is named as such.
  """
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):
      _lock(descriptor, fcntl.LOCK_SH)
    yield
  finally:
    os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
  """Waits for a lock, and says whether it came."""
  end = time.monotonic() + WAIT_S
  while True:
    try:
      fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
      return True
    except BlockingIOError:
      if time.monotonic() >= end:
        return False
      time.sleep(0.02)
