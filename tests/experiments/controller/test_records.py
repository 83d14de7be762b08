"""A/A sessions and the ledger, as they are kept."""

import json

import pytest

from experiments.controller import ledger, noise
from specpilot_jax.errors import SpecPilotError

MARK = noise.fingerprint({"target": "t"}, {"device": "d"}, "SCCS 32")


def test_sessions_are_kept_by_fingerprint(tmp_path):
  sessions = noise.Sessions(MARK, tmp_path)
  assert sessions.s_aa is None
  for value in (3e-3, -4e-3, 3e-3, -4e-3):
    sessions.add(value, 32)
  assert sessions.s_aa is None and len(sessions) == 4
  sessions.add(0.0, 32)
  again = noise.Sessions(MARK, tmp_path)
  assert again.s_aa == pytest.approx((50e-6 / 5) ** 0.5)
  other = noise.fingerprint({"target": "t"}, {"device": "e"}, "SCCS 32")
  assert noise.Sessions(other, tmp_path).s_aa is None


def test_another_run_may_add_meanwhile(tmp_path):
  one, two = noise.Sessions(MARK, tmp_path), noise.Sessions(MARK, tmp_path)
  one.add(0.001, 32)
  two.add(0.002, 32)
  assert noise.Sessions(MARK, tmp_path).means == [0.001, 0.002]


def test_what_the_swap_takes_out_of_the_noise(tmp_path):
  """Devices that differ by 2 %, and launches by 0.1 %."""
  sessions = noise.Sessions(MARK, tmp_path)
  for mean in (1e-3, -1e-3, 1e-3, -1e-3):
    sessions.add(mean, 32, 0.02)
  assert sessions.unswapped is None
  sessions.add(1e-3, 32, 0.02)
  again = noise.Sessions(MARK, tmp_path)
  assert again.asymmetries == [0.02] * 5
  assert again.s_aa == pytest.approx(1e-3)
  assert again.unswapped == pytest.approx((0.02, 0.02), rel=0.05)
  sessions.add(1e-3, 32)  # Of one device, were such a thing possible.
  assert sessions.unswapped is None
  with pytest.raises(SpecPilotError, match="asymmetry nan"):
    sessions.add(0.0, 32, float("nan"))


@pytest.mark.parametrize(
  "content", ["{", "{}", '{"schema": 1, "fingerprint": 0, "sessions": []}']
)
def test_damaged_sessions_are_refused(tmp_path, content):
  sessions = noise.Sessions(MARK, tmp_path)
  sessions.add(0.001, 32)
  sessions.path.write_text(content)
  with pytest.raises(SpecPilotError, match="damaged"):
    noise.Sessions(MARK, tmp_path)
  with pytest.raises(SpecPilotError, match="nan"):
    noise.Sessions({}, tmp_path).add(float("nan"), 1)


def test_a_test_spends_its_level_before_it_runs(tmp_path):
  book = ledger.Ledger("d" * 64, tmp_path)
  assert book.familywise == 0.0
  assert book.begin("candidate", ["b", "a"]) == 1
  # The process may die now.
  again = ledger.Ledger("d" * 64, tmp_path)
  assert again.familywise == pytest.approx(0.05)
  assert again.used_requests == {"a", "b"}
  assert again.begin("candidate", ["c"]) == 2
  assert again.familywise == pytest.approx(1 - 0.95**2)
  again.end(2, {"verdict": "accept"})
  with pytest.raises(SpecPilotError, match="has ended"):
    again.end(2, {"verdict": "reject"})
  with pytest.raises(SpecPilotError, match="was not begun"):
    again.end(3, {})
  states = [json.loads(x)["state"] for x in again.path.read_text().splitlines()]
  assert states == ["begun", "begun", "ended"]


def test_a_ledger_that_two_processes_share(tmp_path):
  """Each read it before the other wrote: no number and no level is lost."""
  first, second = (ledger.Ledger("d", tmp_path) for _ in range(2))
  assert first.begin("a", ["x"]) == 1
  assert second.begin("b", ["y"]) == 2
  assert second.used_requests == {"x", "y"}
  second.end(1, {"verdict": "accept"})
  with pytest.raises(SpecPilotError, match="has ended"):
    first.end(1, {"verdict": "reject"})
  assert first.begin("c", []) == 3


def test_a_line_that_was_being_written(tmp_path):
  book = ledger.Ledger("d", tmp_path)
  book.begin("c", [])
  whole = book.path.read_bytes()
  book.path.write_bytes(whole + b'{"state": "begun", "te\xc3')
  again = ledger.Ledger("d", tmp_path)
  assert again.begin("c", []) == 2
  assert book.path.read_bytes().startswith(whole + b"{")
  assert len(ledger.Ledger("d", tmp_path).begun) == 2


@pytest.mark.parametrize("line", ["{", "{}", '{"state": "begun"}'])
def test_a_damaged_ledger_is_refused(tmp_path, line):
  book = ledger.Ledger("d", tmp_path)
  book.begin("c", [])
  book.path.write_text(book.path.read_text() + line + "\n")
  with pytest.raises(SpecPilotError, match=":2: damaged"):
    ledger.Ledger("d", tmp_path)
