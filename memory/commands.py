"""What `python -m memory` does: each command gives the lines to print."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import merging, reading, rounds, schema, sources, transfer
from memory.files import parse_json
from memory.manifest import digest
from memory.schema import NEGATIVE
from memory.store import Store
from specpilot_jax.errors import SpecPilotError


def percent(value: float | None) -> str:
  """A share as people read it.

  >>> percent(0.251), percent(None)
  ('+25.1 %', '-')
  """
  return "-" if value is None else f"{100 * value:+.1f} %"


def list_entries(store: Store, kind: str | None = None) -> Iterator[str]:
  """One line per entry, the order that of recording."""
  if kind is not None and kind not in schema.KINDS:
    raise SpecPilotError(f"--kind must be of {', '.join(schema.KINDS)}")
  gone = store.superseded
  for name, entry in store.entries.items():
    record = entry.record
    if kind not in (None, record.kind):
      continue
    gains = [d.gain for d in store.deployments(name) if d.gain is not None]
    best = percent(max(gains)) if gains else "-"
    what = record.reason if record.kind == NEGATIVE else record.kind
    line = f"{name}  {what:<9}  {record.factor or '-':<8}  {best:>8}  "
    line += record.title
    yield line + (f" (superseded by {gone[name]})" if name in gone else "")


def show(store: Store, name: str) -> Iterator[str]:
  """All of a record, and what was found of it since."""
  entry = store[name]
  record = entry.record
  yield f"{entry.id}: {record.title}"
  fields = dataclasses.asdict(record)
  for key in (
    "kind", "reason", "factor", "settings", "hypothesis", "needs", "exactness",
    "constraints", "limits", "not_tested", "lessons", "prediction", "commit",
    "date", "provenance",
  ):  # fmt: skip
    yield from _field(key, fields[key])
  for option in record.options:
    yield (
      f"option: {option['name']}={option['domain']} (stock:"
      f" {option['default']}; acts on {option['factor']}): {option['summary']}"
    )
  for key in ("depends_on", "conflicts_with", "supersedes"):
    for other in fields[key]:
      yield f"{key}: {other} ({store[other].record.title})"
  for names, reason in store.conflicts():
    if entry.id in names:
      yield f"conflict: {', '.join(sorted(names - {entry.id}))}: {reason}"
  if record.base is not None:
    yield f"base: {record.base}"
    yield f"tree: {record.tree_before} -> {record.tree_after}"
  for path, (before, after) in record.sources.items():
    kind = "added" if before is None else "removed" if after is None else ""
    yield f"source: {path}{f' ({kind})' if kind else ''}"
  for file in record.files:
    yield f"file: {reading.ENTRIES}/{entry.id}/{file}"
  for found in store.deployments(entry.id):
    where = {
      k: v
      for k, v in dataclasses.asdict(found.fingerprint).items()
      if v is not None
    }
    told = ", ".join(f"{k} {v}" for k, v in where.items())
    bound = f", bound {percent(found.bound)}" if found.bound is not None else ""
    yield (
      f"deployment: {found.status} {percent(found.gain)}{bound} on {told}"
      f"{f'; {found.design}' if found.design else ''}"
    )


def _field(key: str, value: Any) -> Iterator[str]:
  if isinstance(value, tuple | list):
    for line in value:
      yield f"{key}: {line}"
  elif isinstance(value, Mapping):
    for name, part in value.items():
      yield f"{key} {name}: {part}"
  elif value:
    yield f"{key}: {value}"


def graph(store: Store) -> Iterator[str]:
  """Entries with what each depends on, in a topological order."""
  for name, entry in store.entries.items():
    yield f"{name}  {entry.record.title}"
    for field in ("depends_on", "supersedes"):
      for other in getattr(entry.record, field):
        yield f"  {field} {other}  {store[other].record.title}"
  for names, reason in store.conflicts():
    yield f"conflict {' '.join(sorted(names))}  {reason}"


def verify(root: Path) -> Iterator[str]:
  """Says that a memory is sound.

  Raises:
    SpecPilotError: names all problems.
  """
  count = reading.verify(root)
  store = Store(root)
  trees = sum(e.record.base is not None for e in store.entries.values())
  yield (
    f"memory: {count} entries, {len(store.log)} lines of the log: all hashes"
    f" hold, {trees} source trees reproduce bit for bit"
  )


def _object(path: Path) -> dict[str, Any]:
  try:
    fields = parse_json(path.read_bytes())
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
  except ValueError:
    raise SpecPilotError(f"{path}: not JSON") from None
  if not isinstance(fields, dict):
    raise SpecPilotError(f"{path}: not a JSON object")
  return fields


def add(
  store: Store,
  record: Path,
  *,
  patch: Path | None = None,
  before: Path | None = None,
  after: Path | None = None,
  evidence: Sequence[Path] = (),
) -> Iterator[str]:
  """Adds an entry.

  Args:
    record: JSON with the fields of `schema.Record`; `options` may be names of
      registered ones.
    patch: over base and dependencies.
    before, after: checkouts without and with the change, instead; the change is
      taken to the entry's base and dependencies. Without `before` it is all in
      which they differ from `after`.
    evidence: files.

  Raises:
    SpecPilotError: as `Store.add`; changes that do not fit the dependencies,
      naming files and places.
  """
  fields = _object(record)
  options = fields.get("options", [])
  if isinstance(options, list) and any(
    isinstance(option, str) for option in options
  ):
    fields["options"] = list(rounds.registration(options))
  if before is not None and after is None:
    raise SpecPilotError("add: --before needs --after")
  data, tree = b"", None
  if patch is not None:
    if after is not None:
      raise SpecPilotError("add: either --patch or --after, not both")
    data = patch.read_bytes()
  elif after is not None:
    schema.check_ids("depends_on", fields.get("depends_on", ()))
    ids = [store[i].id for i in fields.get("depends_on", ())]
    ours = store.trees.together(fields.get("base") or store.base_root, ids)
    tree = sources.read(after)
    if before is not None:
      tree = merging.merge_trees(sources.read(before), ours, tree, both=True)
    data = sources.patch(ours, tree)
  files = {path.name: path.read_bytes() for path in evidence}
  if len(files) < len(evidence):
    raise SpecPilotError("add: two files of --evidence have one name")
  name = store.add(fields, data, files, tree=tree)
  yield f"{name}: {store[name].record.title}"


def add_base(store: Store, root: Path) -> Iterator[str]:
  """Keeps the sources of a checkout as a base tree."""
  yield f"base {store.add_base(sources.read(root))}"


def add_round(store: Store, folder: Path) -> Iterator[str]:
  """Takes a finished round into the memory."""
  found = rounds.add(store, folder)
  for name in found.added:
    yield f"{name}: {store[name].record.title}"
  for name, status in found.noted:
    yield f"{name}: {status}"
  for line in found.skipped:
    yield f"nothing kept of {line}"


def replay(
  store: Store,
  deployment: Path,
  *,
  onto: Path = sources.ROOT,
  holds: Sequence[str] = ("gpu", "drafter"),
  output: Path | None = None,
) -> Iterator[str]:
  """Chooses entries for a deployment and applies them to its sources.

  Nothing is measured here: what applies is written as proposals, which a round
  (`--job=round --agents=replay --proposals=FILE`) measures and proves.

  Args:
    deployment: JSON: a fingerprint, or the result.json of a run.
    onto: checkout whose sources it runs from.
    holds: needs of entries that it meets.
    output: file for proposals, JSON lines.
  """
  for need in holds:
    if need not in schema.NEEDS:
      raise SpecPilotError(
        f"--holds must be of {', '.join(schema.NEEDS)}, got {need!r}"
      )
  told = _object(deployment)
  try:
    if "deployment" in told and "sampling" in told:
      where = rounds.fingerprint_of(told)
    else:
      where = schema.fingerprint(told)
  except (KeyError, TypeError, AttributeError):
    raise SpecPilotError(f"{deployment}: damaged: no result.json") from None
  except SpecPilotError as e:
    raise SpecPilotError(f"{deployment}: {e}") from None
  tree = sources.read(onto)
  choices = transfer.choose(store, where, tree, holds=holds)
  lines = []
  for choice in choices:
    known = choice.nearest
    expected = "nothing measured"
    if known is not None:
      device = known.fingerprint.device or "a device"
      expected = f"{percent(known.gain)} on {device}"
    yield (
      f"{choice.entry.id}  {choice.state:<8}  {expected:<24}"
      f"  {choice.entry.record.title}: {choice.reason}"
    )
    if choice.system is not None and choice.system != transfer.STOCK:
      lines.append(json.dumps(transfer.proposal(choice)))
  for choice in choices:
    if choice.port is not None:
      for clash in choice.port.clashes:
        yield f"port {choice.entry.id}: {clash}"
  if output is not None:
    output.write_text("".join(f"{line}\n" for line in lines))
    yield f"{len(lines)} proposals: {output}"


def write_sources(store: Store, name: str, folder: Path) -> Iterator[str]:
  """Writes the sources that an entry stands for."""
  entry = store[name]
  if entry.record.base is None:
    raise SpecPilotError(f"{entry.id} has no tree")
  tree = store.trees.after(entry.id)
  sources.write(tree, folder)
  yield (
    f"{folder}: {len(tree)} files, tree {entry.record.tree_after}, patch"
    f" {digest(entry.patch)[:16]}"
  )
