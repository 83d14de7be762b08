"""A conversion that is not finished yet, in a folder beside its output.

    NAME.partial/begun.json     what is converted, and how
                 journal.jsonl  a line for every parameter that is written
                 result/        what becomes NAME when it is whole

The result moves to its place complete or not at all. What ends before that
(a kill, a full disk) goes on from the journal when it is started again.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Generator, Mapping
from typing import Any

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.errors import SpecPilotError

SUFFIX = ".partial"
BEGUN = "begun.json"
JOURNAL = "journal.jsonl"
RESULT = "result"
_LOCK = "lock"
_DIGESTS = "sha256"


def folder_of(output: str | os.PathLike[str]) -> pathlib.Path:
  """Where a conversion to `output` is until it is finished."""
  output = pathlib.Path(os.path.abspath(output))
  return output.with_name(output.name + SUFFIX)


class Unfinished:
  """What is there of a conversion.

  Attributes:
    result: folder to write into.
    done: parameter -> what the journal says of it.
    refused: whether what its source holds is refused: nobody can go on.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.result = folder / RESULT
    self.done: dict[str, dict[str, Any]] = {}
    self.published = self.refused = False

  def read_journal(self) -> None:
    """Sets `done`; what a kill cut short does not count."""
    path = self.folder / JOURNAL
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in lines:
      try:
        entry = json.loads(line)
        self.done[entry.pop("name")] = entry
      except (ValueError, KeyError, AttributeError, TypeError):
        continue

  def record(self, name: str, entry: Mapping[str, Any]) -> None:
    """Notes that a parameter is written."""
    self.done[name] = dict(entry)
    line = json.dumps({"name": name, **entry})
    # A line of its own, even behind one that was cut short.
    with open(self.folder / JOURNAL, "a") as file:
      file.write(f"\n{line}\n")

  def forget(self, name: str) -> None:
    """Has a parameter written again."""
    del self.done[name]
    lines = [json.dumps({"name": n, **e}) for n, e in self.done.items()]
    text = "".join(f"{line}\n" for line in lines)
    common.write_whole(self.folder / JOURNAL, text.encode())

  def publish(self, output: pathlib.Path) -> None:
    """Moves the result to its place."""
    common.check_free(output)
    os.replace(self.result, output)
    self.published = True


@contextlib.contextmanager
def unfinished(
  output: str | os.PathLike[str], begun: Mapping[str, Any]
) -> Generator[Unfinished]:
  """Begins a conversion, or goes on with one.

  Args:
    output: where the result belongs; must not exist, or be an empty folder.
    begun: what is converted and how, all of which must be the same to go on;
      `sha256` has the digests of the source.

  Raises:
    SpecPilotError: the output is taken or cannot be written, another process
      converts to it, or what was begun is another conversion.
  """
  output = pathlib.Path(os.path.abspath(output))
  common.check_free(output)
  folder = folder_of(output)
  work = Unfinished(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as lock:
      _take(lock, folder)
      _compare(folder, begun)
      work.result.mkdir(exist_ok=True)
      work.read_journal()
      try:
        yield work
      finally:
        if work.published or work.refused or not work.done:
          shutil.rmtree(folder, ignore_errors=True)
  except OSError as error:
    again = "; run it again to go on where it stopped" if work.done else ""
    raise SpecPilotError(
      f"{output}: cannot be written"
      f" ({error.strerror or common.first_line(error)}){again}"
    ) from None


def _take(lock, folder: pathlib.Path) -> None:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise SpecPilotError(f"{folder}: another process converts to it") from None


def _compare(folder: pathlib.Path, begun: Mapping[str, Any]) -> None:
  """Refuses to go on with another conversion."""
  path = folder / BEGUN
  if not path.exists():
    if any(file.name != _LOCK for file in folder.iterdir()):
      raise SpecPilotError(f"{folder}: holds no unfinished conversion")
    text = json.dumps(dict(begun), indent=2) + "\n"
    common.write_whole(path, text.encode())
    return
  before = common.read_json(path)
  anew = f"; delete {folder} to begin anew"
  for key in sorted(begun.keys() | before.keys()):
    if key == _DIGESTS or before.get(key) == begun.get(key):
      continue
    raise SpecPilotError(
      f"{folder}: begun with {key}={before.get(key)!r}, not"
      f" {begun.get(key)!r}{anew}"
    )
  old = before.get(_DIGESTS)
  old = old if isinstance(old, dict) else {}
  new = begun[_DIGESTS]
  for file in sorted(old.keys() | new.keys()):
    if old.get(file) != new.get(file):
      raise SpecPilotError(
        f"{folder}: {file} of the source is not what it was when the"
        f" conversion began{anew}"
      )
