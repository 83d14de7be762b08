"""Entries that are kept, and what is seen of damage."""

import dataclasses
import json
import shutil

import pytest

from memory import files, log, reading, schema, sources
from memory.manifest import digest, manifest_of
from memory.schema import Deployment, Fingerprint
from memory.store import Store
from specpilot_jax.errors import SpecPilotError
from tests.memory import kit


def test_a_sound_memory_has_no_problems(made):
  root, ids = made
  assert reading.problems(root) == []
  assert reading.verify(root) == len(ids)


def test_trees_are_those_of_the_dependencies_and_the_patch(made):
  root, ids = made
  store = Store(root)
  third = store[ids["third"]].record
  before, after = (
    store.trees.before(ids["third"]),
    store.trees.after(ids["third"]),
  )
  # Both registrations, in the order in which they were recorded.
  assert sources.registered(before) == {"first", "second"}
  assert before[kit.REGISTRY].index(b"first") < before[kit.REGISTRY].index(
    b"second"
  )
  assert b"first\n" in before[kit.A] and b"second\n" in before[kit.B]
  assert third.tree_before == manifest_of(before).root_hash
  assert third.tree_after == manifest_of(after).root_hash
  assert set(third.sources) == {kit.A, kit.NEW, kit.REGISTRY}


def test_ids_are_of_content_and_additions_are_idempotent(place):
  root, ids = place
  store = Store(root)
  count = len(store.log)
  again = kit.add(store, "first", lambda t: kit.edited(t, kit.A, 3, "first"))
  assert again == ids["first"] and len(Store(root).log) == count
  other = kit.add(
    store,
    "first",
    lambda t: kit.edited(t, kit.A, 3, "first"),
    limits=["on Tuesdays"],
    supersedes=[ids["first"]],
  )
  store = Store(root)
  assert other != ids["first"] and store.superseded == {ids["first"]: other}
  current = {entry.id for entry in store.current()}
  assert other in current and ids["first"] not in current
  # What stands on the old one still does.
  assert reading.problems(root) == []


def test_what_does_not_reproduce_is_not_kept(place):
  root, _ = place
  store = Store(root)
  before = dict(store.trees.base(store.base_root))
  after = kit.edited(before, kit.A, 3, "x")
  fields = {"kind": "mechanism", "title": "t", "factor": "tau"}
  there = files.read_folder(root)
  with pytest.raises(
    SpecPilotError, match=f"not the tree.*{kit.B} was changed"
  ):
    store.add(
      fields,
      sources.patch(before, after),
      tree=kit.edited(after, kit.B, 3, "y"),
    )
  with pytest.raises(SpecPilotError, match="line 6 does not fit"):
    wrong = kit.edited(before, kit.A, 7, "seven")
    store.add(fields, sources.patch(wrong, kit.edited(wrong, kit.A, 8, "x")))
  with pytest.raises(SpecPilotError, match="generate.py: protected"):
    store.add(
      fields,
      sources.patch(before, before | {"specpilot_jax/generate.py": b"x\n"}),
    )
  with pytest.raises(SpecPilotError, match="a mechanism needs a patch"):
    store.add(fields)
  with pytest.raises(SpecPilotError, match="no entries begin with"):
    store.add(fields | {"depends_on": ["mem-00"]}, b"")
  assert files.read_folder(root) == there


def test_every_flipped_byte_is_named(place):
  root, ids = place
  for path in sorted((root / reading.ENTRIES).rglob("*")) + sorted(
    (root / reading.BASES).iterdir()
  ):
    if not path.is_file():
      continue
    data = path.read_bytes()
    name = path.relative_to(root).as_posix()
    for at in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
      path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
      found = reading.problems(root)
      assert any(f"{name} was changed" in p for p in found), (name, at, found)
      with pytest.raises(SpecPilotError, match="memory: "):
        Store(root)
    path.write_bytes(data)
  assert reading.problems(root) == []


def test_every_flipped_byte_of_the_log_is_seen(place):
  root, _ = place
  for name in (log.LOG, log.HEAD):
    data = (root / name).read_bytes()
    for at in range(0, len(data), 3):
      flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
      (root / name).write_bytes(flipped)
      _, found = log.read(root)
      assert any(name in p for p in found), (name, at, found)
    (root / name).write_bytes(data)


def _lines(root):
  return (root / log.LOG).read_bytes().splitlines(keepends=True)


def test_a_reordered_log_is_named(place):
  root, _ = place
  lines = _lines(root)
  lines[2], lines[3] = lines[3], lines[2]
  (root / log.LOG).write_bytes(b"".join(lines))
  assert reading.problems(root)[0] == (
    "log.jsonl:3: is line 4 of the chain: lines were removed, added or"
    " reordered"
  )


@pytest.mark.parametrize(
  ("cut", "problem"),
  (
    (slice(0, -1), "log.jsonl: ends before line 6, which head.json names"),
    (slice(1, None), "log.jsonl:1: is line 2 of the chain"),
  ),
)
def test_a_cut_log_is_named(place, cut, problem):
  root, _ = place
  (root / log.LOG).write_bytes(b"".join(_lines(root)[cut]))
  assert reading.problems(root)[0].startswith(problem)


def test_a_log_with_an_edited_line_and_its_number_is_named(place):
  root, ids = place
  lines = _lines(root)
  lines[1] = lines[1].replace(ids["first"].encode(), ids["second"].encode())
  (root / log.LOG).write_bytes(b"".join(lines))
  assert reading.problems(root)[0] == (
    "log.jsonl:3: does not follow the line before: one of the two was changed"
  )


def test_all_problems_are_named(place):
  root, ids = place
  for name in ("first", "second"):
    path = root / "entries" / ids[name] / "record.json"
    path.write_bytes(path.read_bytes() + b" ")
  with pytest.raises(SpecPilotError) as e:
    reading.verify(root)
  for name in ("first", "second"):
    assert ids[name] in str(e.value)


def test_a_deleted_dependency_is_named(place):
  root, ids = place
  shutil.rmtree(root / "entries" / ids["second"])
  found = reading.problems(root)
  assert (
    f"entries/{ids['second']} is missing: line 3 of log.jsonl has it" in found
  )
  assert (
    f"entries/{ids['third']}: depends_on names {ids['second']}, which is not"
    " there" in found
  )
  assert not [p for p in found if ids["first"] in p or ids["negative"] in p]


def test_a_cycle_is_named(place):
  root, ids = place
  path = root / "entries" / ids["first"] / "record.json"
  record = json.loads(path.read_bytes())
  record["depends_on"] = [ids["third"]]
  path.write_bytes(schema.encode(record))
  found = reading.problems(root)
  ways = [p for p in found if "circle" in p]
  assert len(ways) == 1
  assert ids["first"] in ways[0] and ids["third"] in ways[0]
  assert ids["second"] not in ways[0]
  assert any(f"{ids['first']}/record.json was changed" in p for p in found)


def test_strange_files_are_named(place):
  root, ids = place
  (root / "entries" / ids["first"] / "notes.txt").write_text("x")
  (root / "entries" / "mem-0123456789abcdef").mkdir()
  (root / "base" / "other.json.gz").write_bytes(b"x")
  found = reading.problems(root)
  assert found[0] == f"entries/{ids['first']}/notes.txt was added"
  assert any("mem-0123456789abcdef is not in log.jsonl" in p for p in found)
  assert any("base/other.json.gz is not in log.jsonl" in p for p in found)


def test_a_record_that_lies_about_its_tree_is_named(place):
  """Hashes that agree are not enough: the tree is made again."""
  root, ids = place
  path = root / "entries" / ids["negative"]
  shutil.rmtree(path)
  (root / log.LOG).write_bytes(b"".join(_lines(root)[:-1]))
  (root / log.HEAD).unlink()
  record = dataclasses.replace(
    reading.Reader(root).entries[ids["first"]].record,
    tree_after="0" * 64,
    title="a lie",
  )
  data = record.encode()
  parts = files.read_folder(root / "entries" / ids["first"])
  files.publish(
    root / "entries" / schema.id_of(data), parts | {"record.json": data}
  )
  lines, _ = log.read(root)
  log.append(root, lines, log.ENTRY, {"id": schema.id_of(data)})
  assert reading.problems(root) == [
    f"{schema.id_of(data)} does not reproduce: base + dependencies + patch"
    f" gives tree {_tree_after(root, ids)}, recorded is"
    " 0000000000000000"
  ]


def _tree_after(root, ids):
  record = json.loads(
    (root / "entries" / ids["first"] / "record.json").read_bytes()
  )
  return record["tree_after"][:16]


def test_an_entry_is_a_folder_of_its_own(place, tmp_path):
  root, ids = place
  entry = root / "entries" / ids["first"]
  entry.rename(tmp_path / "elsewhere")
  entry.symlink_to(tmp_path / "elsewhere")
  assert reading.problems(root)[0].endswith(f"{entry} is a symbolic link")
  entry.unlink()
  entry.write_text("x")
  assert reading.problems(root)[0] == (
    f"entries/{ids['first']}/record.json is missing"
  )


def test_a_lost_log_is_named(place):
  root, _ = place
  (root / log.LOG).unlink()
  (root / log.HEAD).unlink()
  assert reading.problems(root)[0] == "log.jsonl is missing"


@pytest.mark.parametrize(
  "data",
  (
    b"[" * 100_000,
    b'{"schema": NaN}',
    b'{"schema": 1, "title": "\\ud800"}',
    b'{"schema": 1e999}',
    b"\xff\xfe\x00",
    b"",
  ),
)
def test_a_record_of_anything_is_named(place, data):
  root, ids = place
  (root / "entries" / ids["first"] / "record.json").write_bytes(data)
  found = reading.problems(root)
  assert found[0] == (
    f"entries/{ids['first']}/record.json was changed: it is not {ids['first']}"
  )
  assert found[1].endswith("record.json: not JSON")


@pytest.mark.parametrize(
  ("event", "fields", "message"),
  (
    (["base"], {}, "is no event"),
    (log.ENTRY, {"id": "../../etc"}, "id must be an id"),
    (log.CONFLICT, {"entries": [{}], "reason": "x"}, "entries must be a list"),
    (log.BASE, {"root": "\0", "file_sha256": "", "commit": ""}, "root must be"),
    (
      log.STATUS,
      {"entry": "mem-0123456789abcdef", "deployment": {}},
      "fingerprint",
    ),
  ),
)
def test_a_forged_line_whose_chain_holds_is_named(
  place, event, fields, message
):
  root, _ = place
  lines, _ = log.read(root)
  log.append(root, lines, event, fields)
  found = reading.problems(root)
  assert found[0].startswith(f"log.jsonl:{len(lines) + 1}: ")
  assert message in found[0]


def test_status_and_conflicts_are_logged_and_nothing_is_edited(place):
  root, ids = place
  before = files.read_folder(root / "entries")
  store = Store(root)
  deployment = Deployment(
    fingerprint=Fingerprint(device="other"), status="replayed-ok", gain=0.05
  )
  store.note_status(ids["first"], deployment)
  store.note_conflict([ids["first"], ids["second"]], "both want it")
  store = Store(root)
  assert store.deployments(ids["first"])[-1] == deployment
  assert store.conflicts() == [
    (frozenset((ids["first"], ids["second"])), "both want it")
  ]
  assert files.read_folder(root / "entries") == before
  assert reading.problems(root) == []
  with pytest.raises(SpecPilotError, match="status must be of"):
    store.note_status(
      ids["first"], Deployment(fingerprint=Fingerprint(), status="good")
    )


def test_an_empty_memory_is_none(tmp_path):
  assert Store(tmp_path).entries == {}
  with pytest.raises(SpecPilotError, match="no base tree"):
    kit.add(Store(tmp_path), "first", lambda t: t)
  with pytest.raises(SpecPilotError, match="is not a folder"):
    Store(tmp_path / "nowhere")


def test_a_second_base_leaves_the_first_as_it_is(place):
  root, ids = place
  store = Store(root)
  first = store.base_root
  moved = kit.edited(kit.BASE, kit.B, 2, "moved")
  second = store.add_base(moved, "1234567")
  assert store.add_base(moved) == second == Store(root).base_root != first
  late = kit.add(store, "late", lambda t: kit.edited(t, kit.A, 12, "late"))
  assert Store(root)[late].record.base == second
  with pytest.raises(SpecPilotError, match=f"{ids['first']} stands on base"):
    store.trees.together(second, [ids["first"]])
  patch = sources.patch(moved, kit.edited(moved, kit.A, 3, "x"))
  with pytest.raises(SpecPilotError, match="stands on base"):
    store.add(
      {"kind": "mechanism", "title": "t", "factor": "tau",
       "depends_on": [ids["first"]]}, patch,
    )  # fmt: skip
  assert reading.problems(root) == []
  lines = (root / log.LOG).read_bytes()
  (root / log.LOG).write_bytes(lines.replace(second.encode(), first.encode()))
  assert "was changed" in reading.problems(root)[0]


def test_a_base_that_is_another_tree_is_named(place):
  """A file that agrees with the log, and a tree that does not."""
  root, ids = place
  store = Store(root)
  data = sources.pack(kit.edited(kit.BASE, kit.B, 2, "forged"))
  (root / reading.BASES / f"{store.base_root[:16]}.json.gz").write_bytes(data)
  (root / log.LOG).unlink()
  (root / log.HEAD).unlink()
  lines: list[log.Line] = []
  fields = {
    "root": store.base_root, "file_sha256": digest(data), "commit": "",
  }  # fmt: skip
  lines.append(log.append(root, lines, log.BASE, fields))
  for name in ids.values():
    lines.append(log.append(root, lines, log.ENTRY, {"id": name}))
  found = reading.problems(root)
  assert len(found) == 4
  assert all("its tree is another one" in problem for problem in found)


def test_a_conflict_is_of_several(place):
  root, ids = place
  with pytest.raises(SpecPilotError, match="two entries or more"):
    Store(root).note_conflict([ids["first"], ids["first"]], "x")
