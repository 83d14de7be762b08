"""Files that are there whole or not at all, whatever ends the process.

Everything is written beside its place, forced to the disk and then renamed;
the folder is forced to the disk too, since a rename is an entry in it.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path

from specpilot_jax.errors import SpecPilotError

PARTIAL = ".partial-"
"""How names of what is not whole yet begin."""


def _force(path: Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
  with open(path, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


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
  for name, data in files.items():
    (partial / name).parent.mkdir(parents=True, exist_ok=True)
    _write(partial / name, data)
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
  for path in sorted(folder.rglob("*")):
    if path.is_symlink():
      raise SpecPilotError(f"{path} is a symbolic link")
    if path.is_file():
      found[path.relative_to(folder).as_posix()] = path.read_bytes()
  return found


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
  """Keeps other processes from writing to a folder meanwhile.

  Raises:
    SpecPilotError: another process writes to it now.
  """
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise SpecPilotError(f"{folder}: another process writes to it") from None
    yield
  finally:
    os.close(descriptor)
