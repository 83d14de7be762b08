"""What a lab hands to its checks: requests, controls, A/A sessions, marks."""

import dataclasses
import json
import math
import types
from typing import Any

import numpy as np
import pytest

from experiments import results
from experiments.controller import (
  draws,
  noise,
  paired_test,
  sandbox,
  session,
  tree,
)
from experiments.controller import lab as lab_lib
from experiments.controller.checks import CANDIDATE, STOCK
from experiments.controller.paired import Measured
from experiments.controller.process import EngineFault
from experiments.controller.systems import System
from experiments.hosts import Slot
from experiments.rounds.world import LabWorld, Sealed
from specpilot_jax.errors import SpecPilotError
from tests.exploits import standin

PASS = "    time.sleep(STEP_S)\n    tokens = []\n"


def faster(factor: int, options: str) -> System:
  patch = standin.change(
    standin.ENGINE, PASS, PASS.replace("STEP_S", f"STEP_S / {factor}")
  )
  return System(
    options=options, drafter="dflash", kernels="reference", patch=patch
  )


@pytest.fixture(name="lab")
def _lab(settings):
  with lab_lib.open_lab(settings) as lab:
    yield lab


def test_tests_and_screens_draw_other_requests(lab, tmp_path, monkeypatch):
  looked: list[set[str]] = []
  monkeypatch.setattr(
    lab, "_measure",
    lambda candidate, requests, warm_ups, *args: looked.append(
      {r.id for r in requests}
    ) or Measured({}, fault=EngineFault(STOCK, "died", "")),
  )  # fmt: skip
  for factor in (2, 3, 4):
    lab.screen(faster(factor, ""), lab.stock_system, 2, None, math.inf)
  assert len(looked[0]) == 2 * 2
  assert looked[0] == looked[1] == looked[2] == lab.ledger.used_requests
  assert lab.ledger.familywise == 0
  # Enough others are there for a decision, whatever cannot be cut anew.
  requests, _, seen = draws.for_test(
    lab.requests, lab.ledger.used_requests, lab.rng, lab_lib.WARM_UPS
  )
  assert not looked[0] & {r.id for r in requests} and seen == 0
  assert 34 <= len(requests) <= 36
  again = type(lab.ledger)(lab.ledger.path.stem, lab.ledger.path.parent)
  assert again.used_requests == looked[0]


def test_the_control_is_stock_and_never_the_champion(
  lab, tmp_path, monkeypatch
):
  monkeypatch.setattr(session, "SLOWED", 9.0)
  forced = []

  def force(run):
    records: dict[str, list] = {}
    for record in results.read_requests(run):
      records.setdefault(record["system"], []).append(record)
    forced.append(records)
    return standin.judge(records)

  monkeypatch.setattr(lab, "_force", force)
  monkeypatch.setattr(lab, "requests", lab.requests[:9])
  champion = faster(5, "champion=1")
  for name, against in (("one", champion), ("two", None)):
    folder = results.RunFolder(tmp_path / name)
    tested = lab.test(faster(9, "mine=1"), folder, math.inf, against)
    folder.close()
    assert tested.verdict.exactness is not None, tested.verdict
    assert tested.verdict.exactness.verdict == "pass"
  for records in forced:
    ids = [sorted(r["request"] for r in records[n]) for n in records]
    assert len(ids) == 2 and ids[0] == ids[1] and len(ids[0]) == 6
    own = lab.stock.record["options"]
    assert all(r["options"] == own for r in records[STOCK])
    assert all(r["options"] == {"mine": "1"} for r in records[CANDIDATE])
  measured = results.read_requests(tmp_path / "one")
  assert {"champion": "1"} in [r["options"] for r in measured]


def measured(
  units: int, late: bool = False, dropped: int = 0, **changes: Any
) -> Measured:
  seconds = np.ones((units, 2))
  return Measured(
    {STOCK: [], CANDIDATE: []},
    times=session.Times(seconds, seconds, False, late, dropped),
    **changes,
  )


def test_which_aa_sessions_count(lab, monkeypatch):
  assert lab.units == 18
  for found, reason in (
    (
      Measured({}, fault=EngineFault(CANDIDATE, "died", "no memory")),
      "a process of stock: died: no memory",
    ),
    (measured(3, late=True), "time ran out"),
    (measured(13, dropped=5), "throttled in 5 of 18 units"),
    (measured(18, disturbed=True, slowed=0.4), "40.0% slower beside itself"),
  ):
    monkeypatch.setattr(lab, "_measure", lambda *args, found=found: found)
    with pytest.raises(noise.Unmeasured, match=f"A/A session: .*{reason}"):
      lab.aa_session(math.inf)
  assert len(lab.sessions) == 0
  # One throttled pair is no reason to lose the others.
  monkeypatch.setattr(lab, "_measure", lambda *args: measured(17, dropped=1))
  assert lab.aa_session(math.inf) == 0.0
  assert len(lab.sessions) == 1


def test_two_devices_are_another_design(settings, lab, monkeypatch):
  slots = (Slot(index=0), Slot(index=1))
  with lab_lib.open_lab(settings, slots) as two:
    assert two.units == 36 and lab.units == 18
    assert two.sessions.path != lab.sessions.path
    with lab_lib.open_lab(settings, slots[:1]) as one:
      assert not one.swaps
      assert len({x.sessions.path for x in (one, two, lab)}) == 3
    seconds = np.array([[1.0, 1.1]] * 30)
    times = session.Times(seconds, seconds * 1.01, False, False, swapped=True)
    found = Measured({STOCK: [], CANDIDATE: []}, times=times)
    monkeypatch.setattr(two, "_measure", lambda *args: found)
    assert two.aa_session(math.inf) == pytest.approx(-math.log(1.01))
    assert two.sessions.asymmetries == pytest.approx([math.log(1.1)])
    # Of 36 requests 16 are enough, where they are fresh.
    used = [r.id for r in two.requests[:20]]
    two.ledger.begin("x", used)
    chat = [
      dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, chat=True))
      for r in two.requests
    ]
    requests, _, seen = draws.for_test(
      chat, two.ledger.used_requests, two.rng, lab_lib.WARM_UPS, two._least
    )
    assert len(requests) == 18 and seen == 0
  for given, blocks, reason in (
    (slots, 4, "engines that share a device"),
    ((*slots, Slot(index=2)), 0, "one or two"),
  ):
    with pytest.raises(SpecPilotError, match=reason):
      with lab_lib.open_lab(settings, given, blocks):
        pass


def test_the_job_on_two_devices(settings, tmp_path, monkeypatch, capsys):
  """In slices: A/A sessions until they are enough, then the test."""
  monkeypatch.setattr(session, "SLOWED", 9.0)
  forced = {"verdict": "pass", "reason": "", "tokens": 9, "flips": 0}
  monkeypatch.setattr(
    lab_lib.Lab, "_force", lambda *args: forced | {"max_margin": None}
  )
  settings = dataclasses.replace(settings, num_prompts=7)
  candidate = dataclasses.replace(
    settings, flags=settings.flags | {"set": "num_drafts=3"}
  )

  def run(name, **changes):
    where = tmp_path / name
    mine = dataclasses.replace(settings, output_dir=where, **changes)
    assert paired_test.run(mine, candidate, None, 1, devices=(0, 1)) == 0
    return results.read_result(where)

  cut = run("cut", max_wall_s=0.0)
  assert cut["paired_test"] is None and cut["aa"]["means"] == []
  assert any("time ran out with 0 of 1" in note for note in cut["notes"])
  whole = run("whole")
  test = whole["paired_test"]
  assert len(whole["aa"]["means"]) == 1 == len(test["aa_means"])
  devices = test["devices"]
  assert devices["indices"] == [0, 1] and devices["emulated"]
  assert devices["swap"]["asymmetry"] == pytest.approx(0.0, abs=0.7)
  assert len(devices["aa_asymmetries"]) == 1 and test["design"] == (
    "two devices, swapped, 4 requests"
  )
  assert len(test["log_ratios"]) == 4
  assert any("times nothing" in note for note in whole["notes"])
  told = (tmp_path / "whole" / "report.md").read_text()
  assert "a request on both devices" in told
  out = capsys.readouterr().out
  for text in (told, out):
    assert "device 1 against device 0: time" in text
    assert "A/A: device 1 against device 0, by session" in text


def test_aa_sessions_are_tried_again(tmp_path):
  answers = [None, 0.1, None, None, 0.2, None, None, None]

  def aa_session(deadline):
    mean = answers.pop(0)
    if mean is None:
      raise noise.Unmeasured("A/A session: time ran out before its end")
    sessions.append(mean)
    return mean

  sessions: list[float] = []
  lab: Any = types.SimpleNamespace(sessions=sessions, aa_session=aa_session)
  folder = results.RunFolder(tmp_path)
  assert paired_test.collect_aa(lab, 2, math.inf, folder) >= 0.0
  assert sessions == [0.1, 0.2]
  with pytest.raises(noise.Unmeasured):
    paired_test.collect_aa(lab, 3, math.inf, folder)
  folder.close()
  assert sessions == [0.1, 0.2] and not answers


def test_no_aa_session_is_begun_that_would_not_end(tmp_path, monkeypatch):
  """Of 5 seconds each, in 12: the third would be cut."""
  clock = [0.0]
  monkeypatch.setattr(
    paired_test, "time", types.SimpleNamespace(monotonic=lambda: clock[0])
  )

  def aa_session(deadline):
    clock[0] += 5.0
    sessions.append(0.0)
    return 0.0

  sessions: list[float] = []
  lab: Any = types.SimpleNamespace(sessions=sessions, aa_session=aa_session)
  folder = results.RunFolder(tmp_path)
  assert paired_test.collect_aa(lab, 8, 12.0, folder) == 5.0
  assert len(sessions) == 2
  folder.close()


def test_marks(settings, monkeypatch):
  """The noise is that of a code, a set of requests, and a way to isolate;
  tests are counted by deployment, whose dtype is part of it."""

  def marks(**changes):
    with lab_lib.open_lab(dataclasses.replace(settings, **changes)) as lab:
      return lab.sessions.path, lab.ledger.path

  own, tests = marks()
  assert marks() == (own, tests)
  sealed = marks(split="sealed")
  assert sealed[0] != own and sealed[1] == tests
  with monkeypatch.context() as patch:
    patch.setattr(sandbox, "available", lambda: sandbox.Layers(0, False, None))
    bare = marks()
    assert bare[0] not in (own, sealed[0]) and bare[1] == tests
  files = standin.base()
  other = files | {"specpilot_jax/other.py": b""}
  with monkeypatch.context() as patch:
    patch.setattr(tree, "read_base", lambda: other)
    changed = marks()
    assert changed[0] != own and changed[1] == tests
  registry = "specpilot_jax/mechanisms/registry.py"
  half = files | {registry: files[registry].replace(b"float32", b"bfloat16")}
  with monkeypatch.context() as patch:
    patch.setattr(tree, "read_base", lambda: half)
    assert marks()[1] != tests


def test_a_seal_that_stock_failed_is_no_verdict(
  settings, tmp_path, monkeypatch
):
  patch = faster(2, "").patch
  assert patch is not None
  system = {"options": "", "patch": patch.decode()}
  timed = {
    "kind": "ok", "verdict": "accept", "reason": "", "gain": 0.1, "bound": 0.1
  }  # fmt: skip
  monkeypatch.setattr(LabWorld, "_paired", lambda *args: timed)
  for engine, kind, verdict in (
    (STOCK, "infra", "inconclusive"),
    (CANDIDATE, "ok", "refused"),
  ):

    def generate(self, system, name, *args, engine=engine):
      raise EngineFault(engine, "died", "out of memory")

    monkeypatch.setattr(lab_lib.Lab, "generate", generate)
    with LabWorld(settings, tmp_path / engine, Sealed()) as world:
      told = world.seal(system)
    assert (told["kind"], told["verdict"]) == (kind, verdict)
    json.dumps(told)


def test_diagnostics_that_are_none_are_the_engines_fault(lab, tmp_path):
  patch = standin.change(
    standin.ENGINE, "emitted.append(len(new))", "emitted.append(str(len(new)))"
  )
  broken = System(
    options="", drafter="dflash", kernels="reference", patch=patch
  )
  folder = results.RunFolder(tmp_path)
  with pytest.raises(EngineFault, match="candidate: frames"):
    lab.generate(broken, CANDIDATE, lab.requests[:1], folder)
  folder.close()
