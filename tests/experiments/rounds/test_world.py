"""A round on the stand-in engine: real trees, processes, ledger and seal.

Code comes as patches, through every gate: what cheats is refused, what clashes
with the champion is a conflict, what is faster becomes the champion, and the
next round starts from it.
"""

import dataclasses
import pathlib
import subprocess

import numpy as np

from experiments import results
from experiments.agents.protocol import Proposal
from experiments.agents.replay import Replay
from experiments.controller import draws, noise, session
from experiments.rounds import job, phases
from experiments.rounds.log import Budget, Log
from experiments.rounds.world import LabWorld, Sealed
from tests.exploits import standin

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


def play(settings, folder, proposals, champion=phases.STOCK):
  folder.mkdir()
  recorded = {"tau/open": proposals}
  log = Log(folder / "round.jsonl")
  plan = phases.Plan(
    directions=(("tau", None), ("overhead", None)),
    aa_sessions=5,
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
