"""Records: what is refused, by name, and what is read again."""

import dataclasses

import pytest
from absl.testing import parameterized

from memory import schema
from memory.schema import Deployment, Fingerprint, Record
from specpilot_jax.errors import SpecPilotError

SHA = "0" * 64
GOOD = {
  "kind": "mechanism",
  "title": "a mechanism",
  "factor": "tau",
  "settings": "tree=best_first,node_budget=32",
  "base": SHA,
  "tree_before": SHA,
  "tree_after": "1" * 64,
  "sources": {"specpilot_jax/a.py": [None, SHA]},
  "files": {"patch.diff": SHA},
}

WRONG = (
  ("kind", "idea", "kind must be of mechanism, system, negative"),
  ("title", "two\nlines", "title must be a line of text"),
  ("factor", "speed", "factor must be of tau"),
  ("factor", None, "null for a system"),
  ("settings", "tree best_first", "settings must be option=value"),
  ("colour", "red", "unknown field 'colour'; fields: kind"),
  ("limits", "none", "limits must be a list of lines"),
  ("depends_on", ["opt-1"], "depends_on must be a list of ids"),
  (
    "depends_on",
    ["mem-ffffffffffffffff", "mem-0000000000000000"],
    "depends_on must be in order",
  ),
  ("date", "30.11.2026", "date must be a date"),
  ("commit", "main", "commit must be a commit"),
  ("base", "main", "base must be a sha256"),
  ("base", None, "go together"),
  ("files", {}, "sources must name what patch.diff changes"),
  ("files", {"patch.diff": SHA, "../x": SHA}, "files must be patch.diff or"),
  ("sources", {"a": [SHA, SHA]}, "two different hashes"),
  ("options", [{"name": "tree"}], "options must be a list of objects"),
  ("reason", "slower", "reason is of negative results alone"),
  ("schema", 0, "schema must be a whole number from 1"),
  ("schema", True, "schema must be a whole number from 1"),
  ("schema", 99, "schema 99: this release reads up to 1"),
  ("deployments", [{"status": "fast"}], "deployments[0]: fingerprint must be"),
  (
    "deployments",
    [{"fingerprint": {}, "status": "fast"}],
    "deployments[0]: status must be of verified",
  ),
  (
    "deployments",
    [{"fingerprint": {}, "status": "observed", "gain": "10 %"}],
    "gain must be a finite number",
  ),
  (
    "deployments",
    [{"fingerprint": {"gpu": "H200"}, "status": "observed"}],
    "unknown field 'gpu'",
  ),
  (
    "deployments",
    [{"fingerprint": {"batch": 0}, "status": "observed"}],
    "fingerprint batch must be a whole number from 1",
  ),
  (
    "deployments",
    [{"fingerprint": {}, "status": "observed", "evidence": "evidence/x"}],
    "evidence evidence/x is not in files",
  ),
)


class SchemaTest(parameterized.TestCase):
  @parameterized.parameters(*WRONG)
  def test_what_is_wrong_is_named(self, field, value, message):
    fields = {"schema": 1, **GOOD, field: value}
    with pytest.raises(SpecPilotError) as e:
      schema.decode(schema.encode(fields))
    assert message in str(e.value), str(e.value)
    assert "\n" not in str(e.value)

  @parameterized.parameters(b"", b"[]", b"{", b"\xff")
  def test_what_is_no_record_is_refused(self, data):
    with pytest.raises(SpecPilotError, match="not (a )?JSON|not JSON"):
      schema.decode(data)


def test_a_record_is_read_as_it_was_written():
  record = schema.from_fields(
    {
      **GOOD,
      "limits": ["größer"],
      "deployments": [
        Deployment(
          fingerprint=Fingerprint(device="H200", temperature=0.0),
          status="observed",
          gain=0.25,
        )
      ],
    }
  )
  again = schema.decode(record.encode())
  assert again == record and again.encode() == record.encode()
  assert again.id == record.id == schema.id_of(record.encode())
  other = dataclasses.replace(record, title="another")
  assert other.id != record.id


def test_negative_results_need_no_patch():
  fields = {
    "kind": "negative", "title": "x", "factor": "kernel", "reason": "slower",
  }  # fmt: skip
  assert schema.from_fields(fields).reason == "slower"
  with pytest.raises(SpecPilotError, match="reason must be of"):
    schema.from_fields({k: v for k, v in fields.items() if k != "reason"})


def test_migrations_run_one_after_the_other():
  migrations = {
    1: lambda r: {**r, "schema": 2, "limits": [r.pop("limit")]},
    2: lambda r: {**r, "schema": 3, "title": r["title"].upper()},
  }
  old = {"schema": 1, "title": "t", "limit": "none", "own": 1}
  kept = dict(old)
  new = schema.migrate(old, migrations, 3)
  assert new["limits"] == ["none"] and new["title"] == "T"
  assert new["own"] == 1 and old == kept
  with pytest.raises(SpecPilotError, match="nothing leads to 4"):
    schema.migrate(old, migrations, 4)
  with pytest.raises(SpecPilotError, match="gives no 2"):
    schema.migrate(old, {1: lambda r: r}, 2)


def test_old_records_are_read_and_stay_as_they_are(tmp_path, monkeypatch):
  """A store of the version before is sound, and its files are not written."""
  from memory import files, reading
  from memory.store import Store
  from tests.memory import kit

  _, ids = kit.build(tmp_path)
  before = files.read_folder(tmp_path)
  monkeypatch.setattr(schema, "SCHEMA", 2)
  monkeypatch.setattr(
    schema,
    "MIGRATIONS",
    {1: lambda r: {**r, "schema": 2, "title": f"{r['title']} (old)"}},
  )
  monkeypatch.setitem(schema._FORMS, "schema", ("2", lambda x: x == 2))
  store = Store(tmp_path)
  assert store[ids["first"]].record.title == "mechanism first (old)"
  assert reading.problems(tmp_path) == []
  assert files.read_folder(tmp_path) == before


def test_the_record_has_a_form_for_each_field():
  assert set(schema._FORMS) == {f.name for f in dataclasses.fields(Record)}
