"""The memory on disk: entries that are written once, and the log of them.

    base/<first 16 digits of its root hash>.json.gz     a base tree
    entries/<id>/record.json, patch.diff, evidence/     an entry
    log.jsonl, head.json                                see `log`

A folder comes before the line of the log that names it: what a crash leaves in
between is no entry yet, and adding the same again ends it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import files, schema, sources, trees
from memory import log as log_lib
from memory.log import Line
from memory.manifest import digest, manifest_of
from memory.reading import (
  BASES,
  ENTRIES,
  PATCH,
  RECORD,
  ROOT,
  Entry,
  Reader,
  base_path,
  bases,
)
from memory.schema import NEGATIVE, Deployment, Record
from specpilot_jax.errors import SpecPilotError


class Store:
  """A memory. Reading refuses one that is damaged (`reading.problems` says
  everything), but does not make trees.

  >>> import tempfile
  >>> folder = tempfile.TemporaryDirectory()
  >>> memory = Store(Path(folder.name))
  >>> name = memory.add(
  ...   {
  ...     "kind": "negative",
  ...     "title": "a kernel that lost",
  ...     "factor": "kernel",
  ...     "reason": "slower",
  ...   }
  ... )
  >>> memory[name].record.title, memory.log[0].event
  ('a kernel that lost', 'entry')

  Args:
    root: its folder; an empty one is an empty memory.

  Raises:
    SpecPilotError: names what is damaged, and how.
  """

  def __init__(self, root: Path = ROOT):
    self.root = root
    if not root.is_dir():
      raise SpecPilotError(f"memory: {root} is not a folder")
    with files.settled(root):
      self._read()

  def _read(self) -> None:
    read = Reader(self.root)
    if read.problems:
      more = len(read.problems) - 1
      raise SpecPilotError(
        f"memory: {read.problems[0]}{f' (and {more} more)' if more else ''}"
      )
    self.log: Sequence[Line] = read.lines
    self.entries: Mapping[str, Entry] = read.entries
    self.trees = read.trees()

  def __getitem__(self, name: str) -> Entry:
    """An entry by its id, or by a beginning of it that no other has.

    Raises:
      SpecPilotError: there is none, or more than one.
    """
    found = [i for i in self.entries if name and i.startswith(name)]
    if len(found) != 1:
      raise SpecPilotError(
        f"memory: {len(found) or 'no'} entries begin with {name!r}"
      )
    return self.entries[found[0]]

  @property
  def records(self) -> Mapping[str, Record]:
    return {name: entry.record for name, entry in self.entries.items()}

  @property
  def superseded(self) -> Mapping[str, str]:
    """Ids of entries that another one stands for, and that one's."""
    return {
      old: name
      for name, entry in self.entries.items()
      for old in entry.record.supersedes
    }

  def current(self) -> list[Entry]:
    """Entries that no other one stands for, as recorded."""
    gone = self.superseded
    return [e for name, e in self.entries.items() if name not in gone]

  def below(self, name: str) -> list[str]:
    """Ids of all that an entry stands on, as recorded."""
    whole = trees.closure(self.records, [name])
    return [other for other in whole if other != name]

  def conflicts(self) -> list[tuple[frozenset[str], str]]:
    """Sets of entries that do not go together, with the reason."""
    found = [
      (frozenset(line.fields["entries"]), line.fields["reason"])
      for line in self.log
      if line.event == log_lib.CONFLICT
    ]
    for name, entry in self.entries.items():
      for other in entry.record.conflicts_with:
        found.append((frozenset((name, other)), "recorded with the entry"))
    return found

  def deployments(self, name: str) -> list[Deployment]:
    """All that is known of an entry on deployments, the newest last."""
    later = [
      schema.deployment("status", line.fields["deployment"])
      for line in self.log
      if line.event == log_lib.STATUS and line.fields["entry"] == name
    ]
    return [*self.entries[name].record.deployments, *later]

  @property
  def base_root(self) -> str:
    """Root hash of the newest base tree.

    Raises:
      SpecPilotError: there is none.
    """
    roots = [x.fields["root"] for x in self.log if x.event == log_lib.BASE]
    if not roots:
      raise SpecPilotError("memory: it has no base tree")
    return roots[-1]

  def add_base(self, tree: Mapping[str, bytes], commit: str = "") -> str:
    """Keeps a base tree; its root hash."""
    root = manifest_of(tree).root_hash
    with files.locked(self.root):
      self._read()
      if any(
        line.event == log_lib.BASE and line.fields["root"] == root
        for line in self.log
      ):
        return root
      data = sources.pack(tree)
      (self.root / BASES).mkdir(exist_ok=True)
      files.replace(base_path(self.root, root), data)
      self._append(
        log_lib.BASE,
        {"root": root, "file_sha256": digest(data), "commit": commit},
      )
    return root

  def add(
    self,
    fields: Mapping[str, Any],
    patch: bytes = b"",
    evidence: Mapping[str, bytes] | None = None,
    *,
    tree: Mapping[str, bytes] | None = None,
  ) -> str:
    """Keeps an entry, where it reproduces; its id.

    Hashes and trees are filled in. The same entry again is no other one.

    Args:
      fields: of `schema.Record`, without those.
      patch: relative to base and dependencies.
      evidence: content by plain file name.
      tree: the sources that base, dependencies and patch must give, bit for
        bit; None where the patch is all that is known of them.

    Raises:
      SpecPilotError: a field that is wrong, a patch that does not fit, or
        another tree than `tree`; nothing is kept then.
    """
    with files.locked(self.root):
      self._read()
      entry = self._entry(fields, patch, evidence or {}, tree)
      (self.root / ENTRIES).mkdir(exist_ok=True)
      if entry.id not in self.entries:
        parts = {RECORD: entry.record.encode(), **entry.evidence}
        if patch:
          parts[PATCH] = patch
        files.publish(self.root / ENTRIES / entry.id, parts)
        self._append(log_lib.ENTRY, {"id": entry.id})
    return entry.id

  def _entry(
    self,
    fields: Mapping[str, Any],
    patch: bytes,
    evidence: Mapping[str, bytes],
    tree: Mapping[str, bytes] | None,
  ) -> Entry:
    values = dict(fields)
    own = ("files", "sources", "tree_before", "tree_after")
    given = [name for name in own if name in values]
    if given:
      raise SpecPilotError(f"memory: {given[0]} is filled in, not given")
    kept = {f"evidence/{name}": data for name, data in evidence.items()}
    hashes = {name: digest(data) for name, data in kept.items()}
    if patch:
      hashes[PATCH] = digest(patch)
    for name in ("depends_on", "conflicts_with", "supersedes"):
      schema.check_ids(name, values.get(name, ()))
      values[name] = sorted(self[i].id for i in values.get(name, ()))
    patched = bool(patch) or values.get("kind") != NEGATIVE
    base = values.get("base") or (self.base_root if patched else None)
    if not isinstance(base, str | None):
      raise SpecPilotError(f"memory: base must be a sha256, got {base!r}")
    probe = trees.Trees(
      bases(self.root, self.log),
      {
        **self.records,
        "new": Record(
          kind=str(values.get("kind")),
          title="",
          depends_on=tuple(values["depends_on"]),
          base=base,
        ),
      },
      lambda name: patch if name == "new" else self.entries[name].patch,
    )
    if base is not None:
      before, after = probe.before("new"), probe.after("new")
      if tree is not None and dict(after) != dict(tree):
        wrong = manifest_of(after).differences(manifest_of(tree))
        raise SpecPilotError(
          "memory: base + dependencies + patch is not the tree it was made of:"
          f" {wrong[0]}"
        )
      values |= {
        "base": base,
        "tree_before": manifest_of(before).root_hash,
        "tree_after": manifest_of(after).root_hash,
        "sources": trees.sources_of(before, after),
      }
    try:
      values["files"] = hashes
      record = schema.from_fields(values)
      # What is read back is what is kept.
      record = schema.decode(record.encode())
    except SpecPilotError as e:
      raise SpecPilotError(f"memory: {e}") from None
    return Entry(record.id, record, patch, kept)

  def note_conflict(self, ids: Sequence[str], reason: str) -> None:
    """Logs that some entries do not go together."""
    with files.locked(self.root):
      self._read()
      names = sorted({self[name].id for name in ids})
      if len(names) < 2:
        raise SpecPilotError("conflict: expected two entries or more")
      self._append(log_lib.CONFLICT, {"entries": names, "reason": reason})

  def note_status(self, name: str, deployment: Deployment) -> None:
    """Logs what a replay of an entry found; the entry stays as it is."""
    with files.locked(self.root):
      self._read()
      fields = dataclasses.asdict(deployment)
      schema.deployment("status", fields)
      if deployment.evidence:
        raise SpecPilotError("status: evidence is of entries alone")
      self._append(
        log_lib.STATUS, {"entry": self[name].id, "deployment": fields}
      )

  def _append(self, event: str, fields: Mapping[str, Any]) -> None:
    log_lib.append(self.root, self.log, event, fields)
    self._read()
