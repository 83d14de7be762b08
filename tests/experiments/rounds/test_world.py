"""A round on the stand-in engine: real trees, processes, ledger and seal.

Code comes as patches, through every gate: what cheats is refused, what clashes
with the champion is a conflict, what is faster becomes the champion, and the
next round starts from it.
"""

import dataclasses
import json
import pathlib
import subprocess

import numpy as np
import pytest

from experiments import results
from experiments.agents.protocol import Proposal
from experiments.agents.replay import Replay
from experiments.controller import (
  draws,
  noise,
  session,
  statistics,
  two_devices,
)
from experiments.hosts import Slot
from experiments.rounds import job, phases, world
from experiments.rounds.log import Budget, Log
from experiments.rounds.world import LabWorld, Sealed
from specpilot_jax.errors import SpecPilotError
from tests.experiments.rounds import deployment
from tests.exploits import standin
from tests.notes import in_full_form

PASS = "    time.sleep(STEP_S)\n    tokens = []\n"
FAST = standin.change(
  standin.ENGINE, PASS, PASS.replace("STEP_S", "STEP_S / 9")
)
FASTER = standin.change(
  standin.ENGINE, PASS, PASS.replace("STEP_S", "STEP_S / 20")
)
CHEAT = standin.change(
  standin.ENGINE, PASS, "    return [7] * count\n    tokens = []\n"
)
SLOW = standin.change(
  standin.ENGINE, PASS, PASS.replace("STEP_S", "STEP_S * 3")
)
PROTECTED = FAST.replace(
  standin.ENGINE.encode(), b"experiments/controller/worker.py"
)


FACTORS = LabWorld.factors


def play(settings, folder, proposals, champion=phases.STOCK, aa_sessions=5):
  folder.mkdir()
  recorded = {"tau/open": proposals}
  log = Log(folder / "round.jsonl")
  plan = phases.Plan(
    directions=(("tau", None), ("overhead", None)),
    aa_sessions=aa_sessions,
    screen_units=(2,),
    champion=champion,
  )
  sealed = Sealed(long_requests=1, long_tokens=40)
  with LabWorld(settings, folder, sealed, aa_sessions=5) as world:
    return phases.Round(
      log, world, [Replay(recorded)], Budget(log), plan, folder / "agents"
    ).run()


def proposal(patch: bytes, **fields) -> Proposal:
  return Proposal(task="tau/open", patch=patch.decode(), **fields)


def test_a_patch_through_every_gate(settings, tmp_path, monkeypatch):
  """From its screening to the sealed test; and what is left to gain over it."""
  # Whatever else this machine does: times decide nothing here.
  monkeypatch.setattr(statistics, "MIN_UNITS", 4)
  monkeypatch.setattr(statistics, "MARGIN", -1.0)
  monkeypatch.setattr(statistics, "SKEW", -9.0)
  monkeypatch.setattr(phases, "GATE", -1.0)
  monkeypatch.setattr("experiments.rounds.world.LATE", 30)
  monkeypatch.setattr("experiments.rounds.world.PROFILED", 4)
  monkeypatch.setattr(session, "SLOWED", 9.0)
  monkeypatch.setattr(noise.Sessions, "s_aa", 0.0)
  settings = dataclasses.replace(settings, num_prompts=15)
  fast = proposal(FAST)
  result = play(settings, tmp_path / "one", [fast], aa_sessions=0)
  (trial,) = [t for t in result["trials"] if t["id"]]
  assert trial["verdict"] == "accept", trial
  assert result["accepted"] == [fast.id]
  assert result["sealed"]["verdict"] == "accept", result["sealed"]
  assert result["champion"] == {"options": "", "patch": fast.patch}

  # A champion that is a patch has factors of its own.
  stock = {"tau": 1.5, "kernel": 1.4, "overhead": 1.0, "acceptance": 1.5}
  monkeypatch.setattr(LabWorld, "factors", FACTORS)
  monkeypatch.setattr(LabWorld, "_profile", lambda self, own: dict(stock))
  with LabWorld(settings, tmp_path / "two", Sealed()) as two:
    told = two.factors(result["champion"])
    assert two.factors(phases.STOCK)["largest"] == "tau"
  assert told["tau"] == pytest.approx(1.5) and "with its patch" in told["of"]
  # Its passes take what the controller's clock says.
  assert told["kernel"] not in (None, 1.4) and told["overhead"] == 1.0


@in_full_form
def test_patches_through_every_gate(settings, tmp_path, monkeypatch):
  # The stand-in's long outputs are 40 tokens.
  monkeypatch.setattr("experiments.rounds.world.LATE", 30)
  # Whatever else this machine does: sessions are measured as they come.
  monkeypatch.setattr(session, "SLOWED", 9.0)
  monkeypatch.setattr(noise.Sessions, "s_aa", 0.05)
  made = {
    "fast": proposal(FAST),
    "cheat": proposal(CHEAT),
    "slow": proposal(SLOW),
    "protected": proposal(PROTECTED),
  }
  result = play(settings, tmp_path / "one", list(made.values()))
  told = {
    name: next(t for t in result["trials"] if t["id"] == p.id)
    for name, p in made.items()
  }
  assert told["fast"]["verdict"] == "accept", told["fast"]
  assert told["cheat"]["verdict"] == "refused"
  assert "exactness" in told["cheat"]["reason"]
  assert told["slow"]["verdict"] in ("slower", "small")
  assert "protected" in told["protected"]["reason"]
  assert result["champion"] == {"options": "", "patch": made["fast"].patch}
  assert result["accepted"] == [made["fast"].id]
  sealed = result["sealed"]
  assert sealed["verdict"] == "accept", sealed
  assert sealed["speedup_vs_stock"] > 1.3
  assert sealed["long"]["verdict"] == "pass"
  assert sealed["timed"]["identical"] == sealed["timed"]["outputs"]

  # The next round starts there: what clashes with it cannot be stacked.
  again = play(
    settings,
    tmp_path / "two",
    [proposal(FASTER)],
    champion=result["champion"],
  )
  (trial,) = [t for t in again["trials"] if t["id"]]
  assert trial["verdict"] == "conflict"
  assert again["champion"] == result["champion"] and again["sealed"] is None
  # A/A sessions of the first round counted.
  events = (tmp_path / "two" / "round.jsonl").read_text()
  assert '"reused": true' in events


SLOTS = (Slot(index=0), Slot(index=1))


def test_a_round_on_two_devices(settings, tmp_path, monkeypatch):
  """Real trees and processes: two explore at once, tests swap the devices and
  are alone on the host."""
  monkeypatch.setattr(session, "SLOWED", 9.0)
  # So much noise that there is no champion, and no seal to wait for.
  monkeypatch.setattr(noise.Sessions, "s_aa", 9.0)
  monkeypatch.setattr(world, "on_device", deployment.on_device)
  folder = tmp_path / "two"
  folder.mkdir()
  path = folder / "intervals"
  # Taken back in the end.
  monkeypatch.setattr(two_devices, "measure", two_devices.measure)
  deployment.note(two_devices, "measure", "test", path)
  made = [proposal(FAST), proposal(CHEAT)]
  log = Log(folder / "round.jsonl")
  plan = phases.Plan(
    directions=(("tau", None),), aa_sessions=1, screen_units=(2,), workers=2
  )
  settings = dataclasses.replace(settings, num_prompts=19)
  sealed = Sealed(long_requests=1, long_tokens=40)
  with LabWorld(settings, folder, sealed, aa_sessions=1, slots=SLOTS) as two:
    lab = two.open()
    assert lab.swaps and lab.units == 16 and two.parallel == 2
    result = phases.Round(
      log, two, [Replay({"tau/open": made})], Budget(log), plan,
      folder / "agents",
    ).run()  # fmt: skip
  log.close()
  told = {t["id"]: t for t in result["trials"]}
  assert told[made[0].id]["verdict"] == "reject", told
  assert told[made[1].id]["verdict"] == "refused"
  lines = [json.loads(text) for text in path.read_text().splitlines()]
  kinds = {line["kind"] for line in lines}
  assert kinds == {"screen 0", "screen 1", "test"}

  def overlap(one, two):
    return one["began"] < two["ended"] and two["began"] < one["ended"]

  screens = [x for x in lines if x["kind"] != "test"]
  tests = [x for x in lines if x["kind"] == "test"]
  assert len(tests) == 2  # The A/A session and the test.
  assert any(
    overlap(a, b) for a in screens for b in screens if a["kind"] < b["kind"]
  )
  assert not any(overlap(a, b) for a in screens for b in tests)
  # What explores and what tests had devices of their own.
  (session_folder,) = (folder / "sessions").glob("*-test-*")
  records = results.read_requests(session_folder)
  assert {r["device"] for r in records} == {0, 1}
  assert len(list((folder / "sessions").glob("*-screen-*-on-[01]"))) >= 3


def test_settings_that_are_refused_leave_no_folder(settings, tmp_path):
  where = tmp_path / "round"
  few = dataclasses.replace(settings, num_prompts=3, output_dir=where)
  for told, reason in (
    (job.RoundSettings(), "at least to measure, got 3"),
    (job.RoundSettings(prompts=4), "at least to measure, got 4"),
    (job.RoundSettings(tokens=2_049), "end at 2048 tokens, got 2049"),
  ):
    with pytest.raises(SpecPilotError, match=reason):
      job.run(few, told)
  assert not where.exists()


def test_two_runners_do_not_write_one_round(settings, tmp_path):
  where = tmp_path / "round"
  log = Log(where / job.LOG)
  log.note("round", mark="x")
  settings = dataclasses.replace(settings, output_dir=where)
  with pytest.raises(SpecPilotError, match="another process is at work"):
    job.run(settings, job.RoundSettings())
  log.close()
  with pytest.raises(SpecPilotError, match="holds another round"):
    job.run(settings, job.RoundSettings())


def test_used_texts_are_cut_anew():
  rng = np.random.default_rng(0)
  (request,) = standin.requests(6)[5:]
  assert len(request.prompt_ids) == 33
  assert draws.fresh(request, set(), rng) == request
  used = {request.id}
  seen = set()
  for _ in range(16):
    cut = draws.fresh(request, used, rng)
    size = len(cut.prompt_ids)
    assert cut.id == f"{request.id}@{size}" and 16 <= size < 33
    assert list(cut.prompt_ids) == list(request.prompt_ids[:size])
    assert cut.id not in seen
    seen.add(cut.id)
    used.add(cut.id)
  chat = dataclasses.replace(
    request, prompt=dataclasses.replace(request.prompt, chat=True)
  )
  assert draws.fresh(chat, used, rng) == chat


def test_a_round_is_taken_up_again_with_other_limits(settings):
  def mark(flags=(), **changes):
    told = job.RoundSettings(**changes)
    changed = settings.flags | dict(flags)
    return job.round_mark(
      dataclasses.replace(settings, flags=changed), told, phases.STOCK
    )

  mine = mark()
  assert mine == mark(
    {"max_trials": "9", "max_usd": "2", "max_device_s": "1", "max_wall_s": "1"},
    max_trials=9, max_usd=2.0, max_device_s=1.0,
  )  # fmt: skip
  assert mine == mark({"agent_workers": "3"}, workers=3)
  assert mine != mark({"max_tokens": "9"})
  assert mine != mark(screen_units=(3,))


def test_factors_say_what_was_not_measured(settings, tmp_path, monkeypatch):
  system = {
    "kernel_factor": 1.5, "overhead_factor": None, "floor_step_us": 20.0
  }  # fmt: skip
  told = {
    "cost_model": {
      "tau_factor": 1.2,
      "systems": {"stock": system},
      "classes": {"matmul": {"measured_us": 30.0, "floor_us": 20.0}},
    },
    "systems": {"stock": {"acceptance_length": 3.0}},
  }

  def profile(command, **rest):
    where = next(x for x in command if x.startswith("--output_dir="))
    folder = pathlib.Path(where.partition("=")[2])
    folder.mkdir()
    (folder / results.RESULT).write_text("{}")

  monkeypatch.setattr(subprocess, "run", profile)
  monkeypatch.setattr(results, "read_result", lambda folder: told)
  factors = FACTORS(LabWorld(settings, tmp_path, Sealed()), phases.STOCK)
  assert factors["overhead"] is None
  assert (factors["tau"], factors["kernel"]) == (1.2, 1.5)
  assert factors["largest"] == "kernel"
