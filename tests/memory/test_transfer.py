"""Replay on another deployment, with measurements that are written down."""

import dataclasses

import pytest

from memory import conflicts, merging, patches, reading, sources, transfer
from memory.schema import Fingerprint
from memory.store import Store
from memory.transfer import Outcome, System
from specpilot_jax.errors import SpecPilotError
from tests.memory import kit

HERE = Fingerprint(device="other card", target="zoo")


@pytest.fixture(name="store")
def _store(tmp_path):
  store, _ = kit.build(tmp_path)
  return store


def _title(entry) -> str:
  return entry.record.title.removeprefix("mechanism ")


def _titles(found) -> list[str]:
  return [_title(c.entry) for c in found]


def test_order_is_topological_and_then_by_score(store):
  found = transfer.choose(store, HERE, kit.BASE)
  # The third has a larger gain than the first, and stands on it.
  assert _titles(found) == ["second", "first", "third"]
  assert {c.state for c in found} == {transfer.APPLIES}
  scores = {"first": 9.0, "second": 1.0, "third": None}
  found = transfer.choose(
    store, HERE, kit.BASE, score=lambda e, _: scores[_title(e)]
  )
  assert _titles(found) == ["first", "second"]


def test_what_applies_is_the_change_alone(store):
  moved = {**kit.BASE, kit.A: b"# A new first line.\n" + kit.LINES}
  (first,) = [
    c for c in transfer.choose(store, HERE, moved) if _title(c.entry) == "first"
  ]
  assert first.system is not None
  made = patches.apply(moved, patches.parse(first.system.patch))
  assert made[kit.A] == moved[kit.A].replace(b"line 3\n", b"first\n")
  assert made[kit.B] == kit.LINES
  assert sources.registered(made) == {"first"}


def test_what_stands_on_others_brings_them(store):
  third = transfer.choose(store, HERE, kit.BASE)[-1]
  assert third.system is not None and third.system.settings == "third=on"
  made = patches.apply(kit.BASE, patches.parse(third.system.patch))
  assert made == store.trees.after(third.entry.id)


def test_sources_that_have_a_mechanism_are_left_as_they_are(store):
  last = store[[e for e in store.entries][3]]
  assert last.record.kind == "system"
  tree = dict(store.trees.after(last.id))
  tree[kit.NEW] = b"x = 3  # A later form.\n"
  for choice in transfer.choose(store, HERE, tree):
    assert choice.state == transfer.PRESENT
    assert choice.system == System(settings=choice.entry.record.settings)


def test_what_brings_no_option_is_known_by_its_lines(tmp_path):
  store = Store(tmp_path)
  store.add_base(kit.BASE)
  after = kit.edited(kit.edited(kit.BASE, kit.A, 3, "one"), kit.A, 9, "other")
  store.add(
    {"kind": "mechanism", "title": "lines", "factor": "kernel"},
    sources.patch(kit.BASE, after),
  )
  store = Store(tmp_path)
  states = []
  for tree in (kit.BASE, kit.edited(after, kit.A, 20, "moved on")):
    (choice,) = transfer.choose(store, HERE, tree)
    states.append((choice.state, choice.system is None))
  assert states == [(transfer.APPLIES, False), (transfer.PRESENT, True)]
  # Nothing to measure, nothing to note.
  done = transfer.replay(store, HERE, after, _Measure())
  assert done.tried == () and done.champion == transfer.STOCK


def test_what_a_later_entry_has_moved_is_there(tmp_path):
  """Lines of an entry that brings no option, in another file by now."""
  store = Store(tmp_path)
  store.add_base(kit.BASE)
  lines = kit.edited(kit.edited(kit.BASE, kit.A, 3, "one"), kit.A, 9, "other")
  first = store.add(
    {"kind": "mechanism", "title": "lines", "factor": "kernel"},
    sources.patch(kit.BASE, lines),
  )
  moved = {**kit.BASE, kit.NEW: b"one\nother\n"}
  store.add(
    {"kind": "mechanism", "title": "moved", "factor": "kernel",
     "depends_on": [first]},
    sources.patch(lines, moved),
  )  # fmt: skip
  store = Store(tmp_path)
  states = [c.state for c in transfer.choose(store, HERE, moved)]
  assert states == [transfer.PRESENT] * 2
  assert transfer.apply(store, [first], moved) == moved
  states = [c.state for c in transfer.choose(store, HERE, lines)]
  assert states == [transfer.PRESENT, transfer.APPLIES]


def test_what_clashes_is_a_task_that_names_file_and_place(store):
  moved = kit.edited(kit.BASE, kit.A, 3, "something else")
  found = {_title(c.entry): c for c in transfer.choose(store, HERE, moved)}
  assert found["second"].state == transfer.APPLIES
  for name in ("first", "third"):
    port = found[name].port
    assert found[name].state == transfer.CLASHES and port is not None
    (clash,) = port.clashes
    assert (clash.path, clash.line, clash.base) == (kit.A, 4, "line 3\n")
    assert (clash.ours, clash.theirs) == ("something else\n", "first\n")
    assert port.patch == found[name].entry.patch
    assert f"{kit.A}: both change line 4" in str(port)


def test_needs_are_asked_for(tmp_path):
  store = Store(tmp_path)
  store.add_base(kit.BASE)
  kit.add(store, "first", lambda t: kit.edited(t, kit.A, 3, "x"), needs=["gpu"])
  (choice,) = transfer.choose(Store(tmp_path), HERE, kit.BASE, holds=())
  assert (choice.state, choice.reason) == (transfer.UNFIT, "needs gpu")
  (choice,) = transfer.choose(Store(tmp_path), HERE, kit.BASE, holds=("gpu",))
  assert choice.state == transfer.APPLIES


def test_the_nearest_deployment_is_asked(store):
  entry = next(iter(store.entries.values()))
  near = dataclasses.replace(
    entry.record.deployments[0], fingerprint=HERE, gain=-0.05, evidence=""
  )
  store.note_status(entry.id, near)
  store = Store(store.root)
  assert transfer.nearest(store.deployments(entry.id), HERE) == near
  card = Fingerprint(device="card")
  found = transfer.nearest(store.deployments(entry.id), card)
  assert found == entry.record.deployments[0]
  assert transfer.nearest([], HERE) is None


class _Measure:
  """Gains by option; `third` is inexact, `second` slower."""

  def __init__(self):
    self.calls = []

  def __call__(self, choice, candidate: System, champion: System) -> Outcome:
    self.calls.append((candidate, champion))
    if "third=on" in candidate.settings:
      return Outcome(accepted=False, refused=True, reason="token 3")
    gain = 0.1 if "first=" in candidate.settings else -0.2
    return Outcome(accepted=gain > 0, gain=gain, bound=gain - 0.01)


def test_a_replay_keeps_what_passes_and_notes_all(store):
  measure = _Measure()
  done = transfer.replay(store, HERE, kit.BASE, measure, date="2026-12-01")
  status = {_title(c.entry): s for c, s, _ in done.tried}
  assert status == {
    "second": "replayed-regression",
    "first": "replayed-ok",
    "third": "replayed-refused",
  }
  assert done.champion.settings == "first=on"
  made = patches.apply(kit.BASE, patches.parse(done.champion.patch))
  assert sources.registered(made) == {"first"}
  # The third was tried on top of the champion, with what it stands on.
  candidate, champion = measure.calls[-1]
  assert champion == done.champion
  assert candidate.settings == "first=on,third=on"
  first = next(e.id for e in store.current() if _title(e) == "first")
  assert done.reused == (first,)
  again = Store(store.root)
  (newest,) = again.deployments(first)[1:]
  assert (newest.status, newest.gain) == ("replayed-ok", 0.1)
  assert newest.fingerprint == HERE and newest.date == "2026-12-01"
  assert reading.problems(store.root) == []
  assert len(again.entries) == 5  # Nothing that was reused is a new entry.


def test_settings_are_tuned_on_the_deployment(store):
  measure = _Measure()

  def tune(choice, champion):
    return ["first=more", "first=on"] if _title(choice.entry) == "first" else []

  done = transfer.replay(
    store, HERE, kit.BASE, measure, tune=tune, record=False
  )
  assert done.champion.settings == "first=more"
  assert all(len(store.deployments(e.id)) < 2 for e in store.current())


def test_known_conflicts_are_not_tried(store):
  ids = {_title(e): e.id for e in store.current()}
  store.note_conflict([ids["first"], ids["second"]], "both want it")

  def measure(choice, candidate, champion):
    return Outcome(accepted=True, gain=0.1)

  done = transfer.replay(Store(store.root), HERE, kit.BASE, measure)
  tried = {_title(c.entry): (s, c.reason) for c, s, _ in done.tried}
  assert tried["second"][0] == "replayed-ok"
  assert tried["first"][0] == "failed-to-apply"
  assert "both want it" in tried["first"][1]


def test_conflicts_are_found_by_delta_debugging(tmp_path):
  """Eight entries, two of which change one line; a third stands on one."""
  store = Store(tmp_path)
  store.add_base(kit.BASE)
  ids = []
  for i in range(8):
    line = 5 if i in (2, 6) else 10 + 2 * i
    ids.append(
      kit.add(
        store,
        f"o{i}",
        lambda t, line=line, i=i: kit.edited(t, kit.A, line, f"text {i}"),
      )
    )
  late = kit.add(
    store, "late", lambda t: kit.edited(t, kit.B, 3, "late"), [ids[6]]
  )
  store = Store(tmp_path)
  asked = []

  def passes(part):
    asked.append(part)
    return conflicts.merges(store, store.base_root, part)

  found = conflicts.smallest(store.records, [*ids, late], passes)
  assert len(found) == 2 and ids[2] in found
  assert {ids[6], late} & set(found)
  assert len(asked) == len(set(asked)) < 30
  with pytest.raises(SpecPilotError, match="pass together"):
    conflicts.smallest(store.records, ids[:2], passes)
  noted = conflicts.note_textual(store, ids)
  assert noted == (ids[2], ids[6])
  ((names, reason),) = Store(tmp_path).conflicts()
  assert names == {ids[2], ids[6]} and "same place" in reason
  with pytest.raises(merging.MergeError, match=f"{ids[6]}: .*line 6"):
    store.trees.together(store.base_root, ids)
