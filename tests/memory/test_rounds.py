"""A finished round taken into the memory."""

import hashlib
import json

import pytest

from memory import patches, reading, rounds, sources
from memory.schema import NEGATIVE
from memory.store import Store
from specpilot_jax.errors import SpecPilotError
from tests.memory import kit

ENVIRONMENT = {
  "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
  "driver": "580.1",
  "jax": "0.11.2",
  "time": "2026-12-01T05:54:46+0000",
}
DEPLOYMENT = {
  "target": "smollm2",
  "drafter": "dflash",
  "dtype": "bfloat16",
  "device": "another card",
  "batch": 1,
  "max_seq_len": 1280,
}


def proposal(options="", patch="", hypothesis="") -> dict:
  return {
    "task": "tau/open",
    "options": options,
    "patch": patch,
    "hypothesis": hypothesis,
    "prediction": 0.1,
  }


def name_of(fields) -> str:
  text = json.dumps([fields["options"], fields["patch"]])
  return "opt-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def write(folder, made) -> None:
  """A round's folder; `made` has (proposal, verdict, gain)."""
  folder.mkdir(exist_ok=True)
  trials = [
    {
      "id": name_of(fields), "task": "tau/open", "option": fields["options"],
      "patch": bool(fields["patch"]), "prediction": fields["prediction"],
      "evidence": gain, "measured": gain if verdict == "accept" else None,
      "lcb": None if gain is None else gain - 0.01, "s_aa": 0.001,
      "verdict": verdict, "reason": f"said\nso: {verdict}",
    }
    for fields, verdict, gain in made
  ]  # fmt: skip
  trials.append(
    {"id": None, "task": "tau/x", "verdict": "floor", "reason": "at most +1 %"}
  )
  result = {
    "job": "round",
    "deployment": DEPLOYMENT,
    "environment": ENVIRONMENT,
    "sampling": {"temperature": 0.0},
    "trials": trials,
    "sealed": {"verdict": "accept"},
  }
  (folder / "result.json").write_text(json.dumps(result))
  event = {
    "event": "done",
    "key": "propose/tau/open/search",
    "result": {"proposals": [fields for fields, _, _ in made]},
  }
  (folder / "round.jsonl").write_text(
    json.dumps({"event": "note", "kind": "round"}) + "\n" + json.dumps(event)
  )


@pytest.fixture(name="made")
def _made(tmp_path):
  """A memory, its ids, and a checkout whose sources are those of its system."""
  root = tmp_path / "memory"
  root.mkdir()
  store, ids = kit.build(root)
  tree = dict(store.trees.after(ids["system"]))
  sources.write(tree, tmp_path / "checkout")
  return store, ids, tree, tmp_path


def test_settings_are_statuses_of_known_mechanisms(made):
  store, ids, _, tmp_path = made
  write(
    tmp_path / "round",
    [
      (proposal("first=on"), "accept", 0.12),
      (proposal("second=on,first=on"), "slower", -0.05),
      (proposal("third=on"), "refused", None),
      (proposal("first=off"), "infra", None),
      (proposal("unknown=on"), "accept", 0.5),
    ],
  )
  found = rounds.add(store, tmp_path / "round", tmp_path / "checkout")
  assert found.added == ()
  assert found.noted == (
    (ids["first"], "replayed-ok"),
    (ids["first"], "replayed-regression"),
    (ids["second"], "replayed-regression"),
    (ids["third"], "replayed-refused"),
  )
  assert [line.partition(": ")[2] for line in found.skipped] == [
    "infra", "no mechanism of the memory",
  ]  # fmt: skip
  store = Store(store.root)
  (newest,) = store.deployments(ids["second"])[1:]
  assert newest.fingerprint.device == "another card"
  assert newest.fingerprint.context == 1280 and newest.date == "2026-12-01"
  assert newest.design.startswith("second=on,first=on: said so: slower (round")
  # The same again is nothing new.
  again = rounds.add(store, tmp_path / "round", tmp_path / "checkout")
  assert again.noted == () and len(Store(store.root).log) == len(store.log)
  assert reading.problems(store.root) == []


def test_code_becomes_entries_that_reproduce(made):
  store, ids, tree, tmp_path = made

  def patch(change) -> str:
    return sources.patch(tree, change(tree)).decode()

  good = proposal(
    "late=on",
    patch(lambda t: kit.register(kit.edited(t, kit.A, 27, "late"), "late")),
    "late drafts",
  )
  bad = proposal("", patch(lambda t: kit.edited(t, kit.B, 1, "bad")), "worse")
  misfit = proposal(
    "",
    sources.patch(kit.BASE, kit.edited(kit.BASE, kit.A, 3, "x")).decode(),
    "of other sources",
  )
  odd = proposal("late=two words", bad["patch"], "two\nlines")
  write(
    tmp_path / "round",
    [
      (good, "accept", 0.2),
      (bad, "slower", -0.1),
      (misfit, "conflict", None),
      (odd, "small", 0.0),
    ],
  )
  found = rounds.add(store, tmp_path / "round", tmp_path / "checkout")
  accepted, rejected = (Store(store.root)[name] for name in found.added)
  assert accepted.record.kind == "mechanism"
  assert accepted.record.depends_on == (ids["system"],)
  assert accepted.record.deployments[0].status == "verified"
  assert accepted.record.deployments[0].bound == pytest.approx(0.19)
  assert accepted.record.prediction == {"factor": "tau", "gain": 0.1}
  assert accepted.record.option_names == ("late",)
  assert b"sealed" in accepted.evidence["evidence/trial.json"]
  assert rejected.record.kind == NEGATIVE
  assert rejected.record.reason == "slower"
  assert rejected.record.lessons == ("said so: slower",)
  made_tree = Store(store.root).trees.after(accepted.id)
  assert made_tree == patches.apply(tree, patches.parse(good["patch"].encode()))
  line, other = found.skipped
  assert "does not fit the base" in line
  assert "settings must be option=value" in other
  assert reading.problems(store.root) == []
  again = rounds.add(
    Store(store.root), tmp_path / "round", tmp_path / "checkout"
  )
  assert again.added == found.added
  assert len(Store(store.root).entries) == 7


def test_code_over_unknown_sources_is_not_kept(made):
  store, _, tree, tmp_path = made
  (tmp_path / "checkout" / kit.A).write_bytes(b"moved on\n")
  patch = sources.patch(tree, kit.edited(tree, kit.A, 27, "late")).decode()
  write(tmp_path / "round", [(proposal("", patch), "accept", 0.2)])
  with pytest.raises(SpecPilotError, match="no tree of it; keep them first"):
    rounds.add(store, tmp_path / "round", tmp_path / "checkout")


@pytest.mark.parametrize(
  ("name", "text", "message"),
  (
    ("result.json", None, "No such file"),
    ("result.json", "{", "no result of a round"),
    ("result.json", '{"job": "benchmark"}', "not of a round"),
    ("round.jsonl", "{}\n", "no result of a round"),
  ),
)
def test_what_is_no_round_is_refused(made, name, text, message):
  store, _, _, tmp_path = made
  write(tmp_path / "round", [(proposal("first=on"), "accept", 0.1)])
  if text is None:
    (tmp_path / "round" / name).unlink()
  else:
    (tmp_path / "round" / name).write_text(text)
  with pytest.raises(SpecPilotError, match=message):
    rounds.add(store, tmp_path / "round")
