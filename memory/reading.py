"""Reads a memory from the disk, and says all that is wrong with it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from memory import files, schema, trees
from memory import log as log_lib
from memory.log import Line
from memory.manifest import digest
from memory.schema import Record
from specpilot_jax.errors import SpecPilotError

ROOT = Path(__file__).parent
ENTRIES, BASES = "entries", "base"
RECORD, PATCH = "record.json", "patch.diff"


@dataclasses.dataclass(frozen=True)
class Entry:
  """An entry as it was read and checked.

  Attributes:
    id: from its content.
    record: what it says.
    patch: relative to base and dependencies; empty without one.
    evidence: content by name, `evidence/NAME`.
  """

  id: str
  record: Record
  patch: bytes
  evidence: Mapping[str, bytes]


def problems(root: Path = ROOT) -> list[str]:
  """Everything that is wrong with a memory, a line each.

  All files are hashed, the log's chain and the graph of dependencies are
  followed, and every entry's trees are made from base and patches and compared
  with what was recorded.
  """
  if not root.is_dir():
    raise SpecPilotError(f"memory: {root} is not a folder")
  with files.settled(root):
    read = Reader(root)
  found = [*read.problems, *read.unfinished]
  made = read.trees()
  for name in read.entries:
    if name not in read.damaged:
      found += made.problems(name)
  return found


def verify(root: Path = ROOT) -> int:
  """Refuses a memory with a problem; the number of its entries.

  Raises:
    SpecPilotError: names all problems.
  """
  if found := problems(root):
    raise SpecPilotError(f"memory: {'; '.join(found)}")
  return sum(1 for _ in _names(root / ENTRIES))


def base_path(root: Path, hash_: str) -> Path:
  return root / BASES / f"{hash_[:16]}.json.gz"


def bases(root: Path, lines: Sequence[Line]) -> dict[str, bytes]:
  found = {}
  for line in lines:
    if line.event == log_lib.BASE:
      path = base_path(root, line.fields["root"])
      if path.is_file():
        found[line.fields["root"]] = path.read_bytes()
  return found


class Reader:
  """Reads all of a memory, and collects what is wrong with it.

  Attributes:
    lines: of the log.
    entries: by id, in the order of the log.
    problems: a line each.
    unfinished: what is there and not in the log, a line each: an addition that
      did not end leaves that, and the same again ends it.
    damaged: ids whose trees say nothing, since something below is wrong.
  """

  def __init__(self, root: Path):
    self.root = root
    self.problems: list[str] = []
    self.unfinished: list[str] = []
    self.entries: dict[str, Entry] = {}
    self.damaged: set[str] = set()
    if not root.is_dir():
      raise SpecPilotError(f"memory: {root} is not a folder")
    self.lines, wrong = log_lib.read(root)
    self.problems += wrong
    logged = self._logged()
    self._check_bases()
    self._read_entries(logged)
    self._check_graph(logged)
    self._check_log()
    if self.unfinished and not (root / log_lib.LOG).exists():
      self.unfinished.insert(0, f"{log_lib.LOG} is missing")

  def trees(self) -> trees.Trees:
    return trees.Trees(
      bases(self.root, self.lines),
      {name: entry.record for name, entry in self.entries.items()},
      lambda name: self.entries[name].patch,
    )

  def _logged(self) -> dict[str, int]:
    logged: dict[str, int] = {}
    for line in self.lines:
      if line.event == log_lib.ENTRY:
        if line.fields["id"] in logged:
          self.problems.append(
            f"{log_lib.LOG}:{line.number}: {line.fields['id']} again"
          )
        logged.setdefault(line.fields["id"], line.number)
    return logged

  def _check_bases(self) -> None:
    known = {}
    for line in self.lines:
      if line.event != log_lib.BASE:
        continue
      path = base_path(self.root, line.fields["root"])
      known[path.name] = line
      name = f"{BASES}/{path.name}"
      if not path.is_file():
        self.problems.append(f"{name} is missing")
      elif digest(path.read_bytes()) != line.fields["file_sha256"]:
        self.problems.append(f"{name} was changed")
    for name in _names(self.root / BASES):
      if name not in known:
        self.unfinished.append(f"{BASES}/{name} is not in {log_lib.LOG}")

  def _read_entries(self, logged: Mapping[str, int]) -> None:
    there = list(_names(self.root / ENTRIES))
    for name in there:
      if name not in logged:
        self.unfinished.append(
          f"{ENTRIES}/{name} is not in {log_lib.LOG}: it was put there, or its"
          " addition did not end (then add it again)"
        )
    for name, number in logged.items():
      if name not in there:
        self.problems.append(
          f"{ENTRIES}/{name} is missing: line {number} of {log_lib.LOG} has it"
        )
      else:
        self._read_entry(name)

  def _read_entry(self, name: str) -> None:
    where = f"{ENTRIES}/{name}"
    try:
      parts = files.read_folder(self.root / where)
    except SpecPilotError as e:
      self._damage(name, str(e))
      return
    data = parts.pop(RECORD, None)
    if data is None:
      self._damage(name, f"{where}/{RECORD} is missing")
      return
    if schema.id_of(data) != name:
      self._damage(name, f"{where}/{RECORD} was changed: it is not {name}")
    try:
      record = schema.decode(data)
      if schema.encode(files.parse_json(data)) != data:
        self._damage(name, f"{where}/{RECORD} is not written as records are")
    except SpecPilotError as e:
      self._damage(name, f"{where}/{RECORD}: {e}")
      return
    for file in sorted(record.files.keys() | parts.keys()):
      if file not in parts:
        self._damage(name, f"{where}/{file} is missing")
      elif file not in record.files:
        self._damage(name, f"{where}/{file} was added")
      elif digest(parts[file]) != record.files[file]:
        self._damage(name, f"{where}/{file} was changed")
    patch = parts.pop(PATCH, b"")
    self.entries[name] = Entry(name, record, patch, parts)

  def _damage(self, name: str, problem: str) -> None:
    self.damaged.add(name)
    self.problems.append(problem)

  def _check_graph(self, logged: Mapping[str, int]) -> None:
    records = {name: entry.record for name, entry in self.entries.items()}
    told = set()
    for name, record in records.items():
      where = f"{ENTRIES}/{name}"
      for field in ("depends_on", "conflicts_with", "supersedes"):
        for other in getattr(record, field):
          if other not in records:
            self._damage(
              name, f"{where}: {field} names {other}, which is not there"
            )
          elif logged[other] > logged[name]:
            self._damage(
              name, f"{where}: {field} names {other}, which came later"
            )
      try:
        below = trees.closure(records, record.depends_on)
        trees.closure(records, [name])
      except SpecPilotError as e:
        self.damaged.add(name)
        if "circle" in str(e) and frozenset(str(e).split()) not in told:
          told.add(frozenset(str(e).split()))
          self.problems.append(f"{ENTRIES}: {e}")
        continue
      if self.damaged.intersection(below):
        self.damaged.add(name)

  def _check_log(self) -> None:
    for line in self.lines:
      where = f"{log_lib.LOG}:{line.number}"
      names = []
      if line.event == log_lib.CONFLICT:
        names = line.fields["entries"]
      elif line.event == log_lib.STATUS:
        names = [line.fields["entry"]]
        try:
          schema.deployment("deployment", line.fields["deployment"])
        except SpecPilotError as e:
          self.problems.append(f"{where}: {e}")
      for name in names:
        if name not in self.entries:
          self.problems.append(f"{where}: {name} is not there")


def _names(folder: Path) -> Iterator[str]:
  """What is in a folder, but for what is not whole yet."""
  if folder.is_dir():
    for path in sorted(folder.iterdir()):
      if not path.name.startswith(files.PARTIAL):
        yield path.name
