"""Unified diffs that a candidate may consist of, read and applied strictly.

There is one reader, which both checks a patch and applies it, so that nothing
can mean one thing to the check and another to the tool. It knows additions,
changes and deletions of text files and refuses all else by name.
"""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from memory import merging
from memory.merging import lines_of
from specpilot_jax.errors import SpecPilotError

MAX_BYTES = 1 << 20
"""Of a patch."""

ALLOWED = (
  "pallas_kernels/*.py",
  "specpilot_jax/checkpoints/*.py",
  "specpilot_jax/decoding/*.py",
  "specpilot_jax/mechanisms/*.py",
  "specpilot_jax/models/*.py",
  "specpilot_jax/configs.py",
  "specpilot_jax/footprint.py",
  "specpilot_jax/kernels.py",
  "specpilot_jax/loading.py",
)
"""What a patch may touch; `*` also stands for folders below."""

FORBIDDEN_NAMES = (
  "conftest.py",
  "sitecustomize.py",
  "usercustomize.py",
  "setup.py",
  "__main__.py",
)
"""Python files that something other than an import of theirs runs."""

BUILD_FILES = (
  "pyproject.toml",
  "constraints.txt",
  "setup.cfg",
  "*.pth",
  "*.so",
  "*.flags",
  ".git*",
  ".ci/*",
  "scripts/*",
)

REVIEWED = (
  ("clocks", r"\b(time|timeit|perf_counter\w*|monotonic\w*)\b"),
  ("the interpreter", r"\b(ctypes|gc|inspect|sys\.modules|atexit|importlib)\b"),
  ("processes", r"\b(subprocess|multiprocessing|fork|signal|threading)\b"),
  ("the system", r"\b(os\.environ|socket|/proc|/dev|open\()"),
)
"""A lint: what a reader should look at. Finding nothing proves nothing."""


class PatchError(SpecPilotError):
  """A patch that is refused; says the path and the reason."""


@dataclasses.dataclass(frozen=True)
class Hunk:
  """A place of a file: lines before and after, with their line ends."""

  start: int  # Line of the old file, from 1; 0 of an empty one.
  old: tuple[str, ...]
  new: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FileChange:
  """What a patch does to one file: `add`, `change` or `delete`."""

  path: str
  kind: str
  hunks: tuple[Hunk, ...]

  @property
  def added_lines(self) -> list[str]:
    """Lines that were not in the old text of their hunk."""
    found = []
    for hunk in self.hunks:
      found += [line for line in hunk.new if line not in hunk.old]
    return found


def parse(
  patch: bytes, check: Callable[[str], None] | None = None
) -> list[FileChange]:
  """Reads a patch as `git diff` writes it.

  Args:
    patch: its text.
    check: refuses paths; `check_path` by default.

  Raises:
    PatchError: symbolic links, modes, binaries, renames, paths that a candidate
      may not touch, or anything that is not a whole diff.
  """
  if len(patch) > MAX_BYTES:
    raise PatchError(f"patch: {len(patch)} bytes, at most {MAX_BYTES}")
  if b"\0" in patch:
    raise PatchError("patch: binary content")
  try:
    text = patch.decode("utf-8")
  except UnicodeDecodeError:
    raise PatchError("patch: not UTF-8 text") from None
  if "\r" in text:
    raise PatchError("patch: carriage returns; lines must end in a newline")
  # Only at newlines: str.splitlines knows more line ends than git does.
  lines = [line + "\n" for line in text.split("\n")]
  if lines[-1] != "\n":
    raise PatchError("patch: its last line has no end")
  lines.pop()
  changes, at = [], 0
  while at < len(lines):
    change, at = _file(lines, at, check or check_path)
    changes.append(change)
  if not changes:
    raise PatchError("patch: empty")
  seen: set[str] = set()
  for change in changes:
    if change.path in seen:
      raise PatchError(f"patch: {change.path} appears twice")
    seen.add(change.path)
  return changes


def _file(
  lines: Sequence[str], at: int, check: Callable[[str], None]
) -> tuple[FileChange, int]:
  header = re.fullmatch(r"diff --git a/(\S+) b/(\S+)\n", lines[at])
  if not header:
    raise PatchError(
      f"patch: line {at + 1} is not `diff --git a/PATH b/PATH`, without spaces"
    )
  path, kind = header[1], "change"
  if path != header[2]:
    raise PatchError(f"{path}: renamed to {header[2]}")
  at += 1
  while at < len(lines) and not lines[at].startswith(("--- ", "diff --git ")):
    kind = _extended(path, lines[at].rstrip("\n"), kind)
    at += 1
  check(path)
  old = "/dev/null" if kind == "add" else f"a/{path}"
  new = "/dev/null" if kind == "delete" else f"b/{path}"
  hunks: list[Hunk] = []
  if at < len(lines) and lines[at].startswith("--- "):
    if lines[at : at + 2] != [f"--- {old}\n", f"+++ {new}\n"]:
      raise PatchError(f"{path}: expected `--- {old}` and `+++ {new}`")
    at += 2
    while at < len(lines) and lines[at].startswith("@@ "):
      hunk, at = _hunk(path, lines, at)
      hunks.append(hunk)
  if kind == "change" and not hunks:
    raise PatchError(f"{path}: nothing is changed")
  return FileChange(path, kind, tuple(hunks)), at


def _extended(path: str, line: str, kind: str) -> str:
  """What a header line between `diff --git` and `---` makes of a change."""
  if re.fullmatch(r"index [0-9a-f]+\.\.[0-9a-f]+( 100644)?", line):
    return kind
  if line == "new file mode 100644":
    return "add"
  if line == "deleted file mode 100644":
    return "delete"
  for start, what in (
    ("new file mode 120000", "a symbolic link"),
    ("new file mode 160000", "a submodule"),
    ("index", "a symbolic link, a submodule or a mode other than 100644"),
    ("new file mode", "a file of a mode other than 100644"),
    ("deleted file mode", "a file of a mode other than 100644 is deleted"),
    ("old mode", "a change of mode"),
    ("new mode", "a change of mode"),
    ("rename", "renamed"),
    ("copy", "copied"),
    ("similarity", "renamed or copied"),
    ("GIT binary patch", "binary content"),
    ("Binary files", "binary content"),
  ):
    if line.startswith(start):
      raise PatchError(f"{path}: {what}")
  raise PatchError(f"{path}: unknown header line {line[:60]!r}")


_NO_NEWLINE = "\\ No newline at end of file\n"


def _hunk(path: str, lines: Sequence[str], at: int) -> tuple[Hunk, int]:
  head = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", lines[at])
  if not head:
    raise PatchError(f"{path}: damaged hunk header {lines[at].strip()!r}")
  counts = [int(head[2] or 1), int(head[4] or 1)]
  old: list[str] = []
  new: list[str] = []
  at += 1
  sides: list[list[str]] = []  # Of the last line.
  while at < len(lines):
    line = lines[at]
    if line.startswith("\\"):
      if line != _NO_NEWLINE or not sides:
        raise PatchError(f"{path}: line {line.strip()[:60]!r} in a hunk")
      for side in sides:
        side[-1] = side[-1].removesuffix("\n")
      sides = []
    elif [len(old), len(new)] == counts:
      break
    else:
      mark, text = line[0], line[1:]
      sides = {" ": [old, new], "-": [old], "+": [new]}.get(mark, [])
      if not sides:
        raise PatchError(f"{path}: line {line.strip()[:60]!r} in a hunk")
      for side in sides:
        if side and not side[-1].endswith("\n"):
          raise PatchError(f"{path}: a line after the end of the file")
        side.append(text)
    at += 1
  if [len(old), len(new)] != counts:
    raise PatchError(f"{path}: a hunk has not the lines that its header says")
  return Hunk(int(head[1]), tuple(old), tuple(new)), at


def check_path(path: str) -> None:
  """Refuses what a candidate may not touch.

  Raises:
    PatchError: path and reason.
  """
  parts = PurePosixPath(path).parts
  if path.startswith("/") or ".." in parts or "/".join(parts) != path:
    raise PatchError(f"{path}: not a plain path inside the tree")
  if not re.fullmatch(r"[A-Za-z0-9_./-]+", path):
    raise PatchError(f"{path!r}: a character that is not of [A-Za-z0-9_./-]")
  name = parts[-1]
  for pattern in BUILD_FILES:
    if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern):
      raise PatchError(f"{path}: a build file ({pattern})")
  if name in FORBIDDEN_NAMES or "__pycache__" in parts:
    raise PatchError(f"{path}: Python runs {name} by itself")
  if not any(fnmatch.fnmatchcase(path, pattern) for pattern in ALLOWED):
    raise PatchError(
      f"{path}: protected; a patch may touch {', '.join(ALLOWED)}"
    )
  if any(not re.fullmatch(r"[A-Za-z_]\w*", p) for p in parts[:-1]):
    raise PatchError(f"{path}: a folder that is no Python package")


def apply(
  files: Mapping[str, bytes], changes: Sequence[FileChange]
) -> dict[str, bytes]:
  """Base and patch together.

  Hunks must match where their headers say, without fuzz: a patch is for one
  base.

  Args:
    files: content by path of the base.
    changes: as `parse` gives them.

  Raises:
    PatchError: a file or a line that is not as the patch says.
  """
  out = dict(files)
  for change in changes:
    path = change.path
    if (path in files) == (change.kind == "add"):
      there = "is there already" if change.kind == "add" else "is not there"
      raise PatchError(f"{path}: {there} in the base")
    old = lines_of(files.get(path, b"").decode("utf-8"))
    new: list[str] = []
    at = 0
    for hunk in change.hunks:
      start = hunk.start - 1 if hunk.old else hunk.start
      end = start + len(hunk.old)
      if not at <= start <= len(old) or tuple(old[start:end]) != hunk.old:
        raise PatchError(
          f"{path}: the hunk at line {hunk.start} does not fit the base"
        )
      new += [*old[at:start], *hunk.new]
      at = end
    new += old[at:]
    if any(not line.endswith("\n") for line in new[:-1]):
      raise PatchError(f"{path}: a line after the end of the file")
    if change.kind == "delete":
      if new:
        raise PatchError(f"{path}: is deleted, but not all of its lines are")
      del out[path]
    else:
      out[path] = "".join(new).encode()
  for change in changes:
    if change.kind == "add":
      _check_shadow(change.path, out)
  return out


def _check_shadow(path: str, files: Mapping[str, bytes]) -> None:
  """Refuses a folder beside a module of its name: Python imports the folder,
  and a reader looks at the module."""
  module = path.removesuffix(".py")
  names = [str(p) for p in PurePosixPath(path).parents]
  if any(name.startswith(f"{module}/") for name in files):
    names.append(module)
  for name in names:
    if f"{name}.py" in files:
      raise PatchError(f"{path}: a folder {name} beside {name}.py")


def render(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> bytes:
  """A patch from one tree to another, as `parse` reads it.

  Args:
    old, new: content by path, text.
  """
  parts = []
  for path in sorted(old.keys() | new.keys()):
    before, after = old.get(path), new.get(path)
    if before == after:
      continue
    parts.append(f"diff --git a/{path} b/{path}\n")
    if before is None:
      parts.append("new file mode 100644\n")
    if after is None:
      parts.append("deleted file mode 100644\n")
    names = (
      "/dev/null" if before is None else f"a/{path}",
      "/dev/null" if after is None else f"b/{path}",
    )
    lines = difflib.unified_diff(
      lines_of((before or b"").decode()),
      lines_of((after or b"").decode()),
      *names,
    )
    for line in lines:
      ended = line.endswith("\n")
      parts.append(line if ended else f"{line}\n\\ No newline at end of file\n")
  return "".join(parts).encode()


class Conflict(PatchError):
  """Two patches that change the same place; says which."""


def merge(base: Mapping[str, bytes], first: bytes, second: bytes) -> bytes:
  """Two patches over one base as one, by three-way merges of files.

  Raises:
    Conflict: both change the same place of a file, or one deletes what the
      other changes.
    PatchError: one of them is refused by itself.
  """
  if not first or not second:
    return first or second
  ours, theirs = (apply(base, parse(patch)) for patch in (first, second))
  try:
    return render(base, merging.merge_trees(base, ours, theirs))
  except merging.MergeError as e:
    raise Conflict(str(e)) from None


def review(changes: Sequence[FileChange]) -> list[str]:
  """Lines of a patch that a person should read, with what they touch."""
  return list(_reviewed(changes))


def _reviewed(changes: Sequence[FileChange]) -> Iterator[str]:
  for change in changes:
    for line in change.added_lines:
      for what, pattern in REVIEWED:
        if re.search(pattern, line):
          yield f"{change.path}: {what}: {line.strip()[:80]}"
