"""The memory of this repository."""

import ast
import functools
import json
import shutil

import pytest

from memory import reading, rounds, schema, sources, transfer
from memory.reading import ROOT
from memory.schema import MECHANISM, NEGATIVE, Fingerprint
from memory.store import Store
from specpilot_jax.errors import SpecPilotError

H200 = Fingerprint(
  device="NVIDIA H200", target="widened:Qwen3.8-27B", drafter="dflash"
)


@pytest.fixture(name="store", scope="module")
def _store() -> Store:
  return Store()


@pytest.fixture(name="trees", scope="module")
def _trees(store):
  """Trees by id, each made once."""
  return {
    name: dict(store.trees.after(name))
    for name, entry in store.entries.items()
    if entry.record.base is not None
  }


def test_all_hashes_hold_and_all_trees_reproduce(monkeypatch, tmp_path):
  """From what the memory holds alone, wherever it lies: later commits of the
  repository change nothing."""

  def read(root=None):
    raise AssertionError("the checkout was read")

  monkeypatch.setattr(sources, "read", read)
  for part in (reading.ENTRIES, reading.BASES):
    shutil.copytree(ROOT / part, tmp_path / part)
  for name in ("log.jsonl", "head.json"):
    shutil.copy(ROOT / name, tmp_path / name)
  assert reading.problems(tmp_path) == []


def test_a_flipped_byte_of_any_file_is_named(tmp_path):
  for part in (reading.ENTRIES, reading.BASES):
    shutil.copytree(ROOT / part, tmp_path / part)
  for name in ("log.jsonl", "head.json"):
    shutil.copy(ROOT / name, tmp_path / name)
  originals = {}
  for path in sorted(tmp_path.rglob("*")):
    if path.is_file() and path.parent != tmp_path:
      data = path.read_bytes()
      at = len(data) // 2
      originals[path.relative_to(tmp_path).as_posix()] = data
      path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
  found = "\n".join(reading.Reader(tmp_path).problems)
  for name in originals:
    assert f"{name} was changed" in found or (
      # A record that cannot be read names no files.
      name.rpartition("/")[0].removesuffix("/evidence") in found
    ), name


def test_entries_are_small(store):
  size = sum(p.stat().st_size for p in ROOT.rglob("*") if p.is_file())
  assert sum(
    p.stat().st_size for p in (ROOT / reading.BASES).iterdir()
  ) < 300_000 * len(list((ROOT / reading.BASES).iterdir()))
  assert size < 200_000 * len(store.entries)


def test_trees_are_python_and_register_what_is_recorded(store, trees):
  for name, tree in trees.items():
    record = store.entries[name].record
    for path in record.sources:
      if path in tree:
        ast.parse(tree[path], path)
    assert set(record.option_names) <= sources.registered(tree)
    if record.kind == MECHANISM:
      # What it brings is new there.
      before = sources.registered(store.trees.before(name))
      assert before.isdisjoint(record.option_names)


def test_the_base_is_stock_alone(store):
  for line in store.log:
    if line.event == "base":
      tree = store.trees.base(line.fields["root"])
      assert sources.registered(tree) == {"acceptance", "num_drafts"}
      assert set(tree) >= {"specpilot_jax/decoding/engine.py"}
      assert not [p for p in tree if "/mechanisms/w12" in p or "two_level" in p]


def test_settings_are_of_the_options_of_their_own_tree(store, trees):
  registered = {name: sources.registered(tree) for name, tree in trees.items()}
  every = set().union(*registered.values())
  for name, entry in store.entries.items():
    record = entry.record
    # Without a tree: of what it is about.
    known = every if record.base is None else registered[name]
    for part in filter(None, record.settings.split(",")):
      assert part.partition("=")[0] in known, (record.title, part)


def _defined(text: bytes) -> set[str]:
  """Names that a module has, wherever it says them."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.add(node.name)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      found |= {alias.asname or alias.name for alias in node.names}
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      found.add(node.id)
  return found


def test_dependencies_are_what_code_needs(store, trees):
  """Whatever an entry's files import is in its own tree."""
  defined = functools.cache(_defined)
  for name, tree in trees.items():
    for path in store.entries[name].record.sources:
      for node in ast.walk(ast.parse(tree.get(path, b""))):
        top = getattr(node, "module", None) or ""
        if not isinstance(node, ast.ImportFrom) or (
          top.partition(".")[0] not in sources.PACKAGES
        ):
          continue
        folder = top.replace(".", "/")
        module = tree.get(f"{folder}.py", tree.get(f"{folder}/__init__.py"))
        assert module is not None, (name, path, top)
        for what in (alias.name for alias in node.names):
          assert (
            f"{folder}/{what}.py" in tree
            or f"{folder}/{what}/__init__.py" in tree
            or what in defined(module)
          ), (name, path, top, what)


def test_evidence_says_where_it_is_from(store):
  for entry in store.entries.values():
    record = entry.record
    assert record.date and record.commit
    for name, data in entry.evidence.items():
      told = json.loads(data)
      assert name in record.files
      assert {"source", "machine", "how", "figures"} <= set(told), name
    for found in record.deployments:
      assert found.evidence and found.design
    if record.kind == MECHANISM:
      assert record.limits and record.not_tested and record.constraints
      assert record.exactness["proved_by"]
    if record.kind == NEGATIVE:
      assert record.lessons


def test_replay_on_the_base_and_on_the_whole(store, trees):
  """On stock's sources all mechanisms apply and bring what they stand on; on
  those that have them there is nothing left to apply."""
  base = store.trees.base(store.base_root)
  system = [e.id for e in store.current() if e.record.kind == "system"][-1]
  found = transfer.choose(store, H200, base, holds=schema.NEEDS)
  assert {c.state for c in found} == {transfer.APPLIES}
  places = [c.entry.id for c in found]
  for choice in found:
    for below in store.below(choice.entry.id):
      assert places.index(below) < places.index(choice.entry.id)
    assert choice.system is not None and choice.system.patch
    made = transfer.apply(store, [choice.entry.id], base)
    assert made == trees[choice.entry.id]
  whole = [
    choice
    for choice in transfer.choose(
      store, H200, trees[system], holds=schema.NEEDS
    )
    if choice.entry.id in store.below(system)
  ]
  assert {c.state for c in whole} == {transfer.PRESENT}
  settings = {c.system.settings for c in whole if c.system is not None}
  assert "weights=w12" in settings and len(settings) >= 3


def test_the_nearest_deployment_decides_what_is_expected(store):
  packed = next(
    e for e in store.entries.values() if e.record.settings == "weights=w12"
  )
  found = transfer.nearest(packed.record.deployments, H200)
  assert found is not None and found.gain == 0.102


def test_registrations_are_this_releases(store):
  """Where the registry has moved on, records stay; today's are its own."""
  (option,) = rounds.registration(["weights"])
  assert schema._is_option(option)
  with pytest.raises(SpecPilotError, match="unknown option 'colour'"):
    list(rounds.registration(["colour"]))
