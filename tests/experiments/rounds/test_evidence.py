"""The cheapest evidence, and rounds that are decided again by their times."""

import json
import math

import numpy as np
import pytest

from experiments import results
from experiments.controller import statistics
from experiments.cost_model import lattices
from experiments.rounds import evidence, phases, replayed
from experiments.rounds.log import Budget, Log
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry
from tests.experiments.cost_model.test_replay import random_recording
from tests.experiments.rounds import scripted

STEPS = {"ar": 10.0, "stock": 16.0}


@pytest.fixture(name="bound")
def _bound(tmp_path, monkeypatch):
  """`evidence.bound` on recorded lattices, of texts of options."""
  monkeypatch.setattr(
    results, "read_result",
    lambda folder: {
      "cost_model": {
        "systems": {n: {"measured_step_us": t} for n, t in STEPS.items()},
        "classes": {"drafter": {"measured_us": 2.0}},
      }
    },
  )  # fmt: skip
  lattices.save(
    tmp_path / lattices.LATTICES,
    [random_recording(seed, n=60, slots=15) for seed in range(4)],
  )

  def bound(mine, against=""):
    return evidence.bound(
      tmp_path, registry.parse_options(mine), registry.parse_options(against)
    )

  return bound


def test_replay_bounds_a_choice_of_nodes(bound):
  same = bound("num_drafts=15")
  assert same["bound"] == pytest.approx(0.0, abs=1e-12)
  assert (same["rows"], same["rows_against"]) == (16, 16)
  # No pass of more rows is faster: what it accepts is all that it can gain.
  wide = bound("tree=best_first,node_budget=48")
  assert wide["rows"] == 48 and wide["tau"] > wide["tau_against"]
  assert wide["bound"] >= wide["tau"] / wide["tau_against"] - 1
  # Of fewer rows a step takes that of one row and the drafter's at least.
  fewer = bound("num_drafts=1")
  assert fewer["rows"] == 2
  least = fewer["tau"] / fewer["tau_against"] * 16 / (10 + 2) - 1
  assert fewer["bound"] >= least - 1e-9 > phases.GATE - 1
  back = bound("", "num_drafts=1")
  assert back["bound"] > 0 and back["rows"] == 16


@pytest.mark.parametrize(
  "options", ["weights=w12", "verification=two_level", "num_drafts=40"]
)
def test_what_a_replay_says_nothing_of(bound, options):
  assert bound(options) is None
  assert bound("acceptance=rejection", "acceptance=rejection") is None


def test_without_lattices(tmp_path):
  stock = registry.parse_options("")
  assert evidence.bound(tmp_path, stock, stock) is None


def test_what_cannot_gain_is_not_timed(tmp_path):
  class World(scripted.World):
    def replayed(self, system, against):
      return {"bound": 0.02 if system["options"] == "d=1" else None}

  world = World(tmp_path / "paid")
  log = Log(tmp_path / "round.jsonl")
  result = phases.Round(
    log, world, [scripted.Proposer()], Budget(log), scripted.plan(),
    tmp_path / "agents",
  ).run()  # fmt: skip
  (trial,) = [t for t in result["trials"] if t["option"] == "d=1"]
  assert trial["verdict"] == "floor" and "+2.0% at most" in trial["reason"]
  assert "d=1" not in (tmp_path / "paid").read_text()


class Timed(scripted.World):
  """Decides by the gate over times that are drawn."""

  def __init__(self, paid):
    super().__init__(paid)
    self._rng = np.random.default_rng(0)

  def _times(self, system, against, units):
    gain = self._gain(system["options"]) - self._gain(against["options"])
    return self._rng.normal(math.log1p(gain), 0.01, units)

  def aa(self):
    return {"kind": "ok", "reason": "", "mean": 0.001}

  def screen(self, system, against, units):
    told = super().screen(system, against, units)
    if told["kind"] != "ok":
      return told
    r = self._times(system, against, units)
    upper = math.expm1(-statistics.t_bound(-r))
    return told | {
      "gain": math.expm1(r.mean()), "upper": upper, "log_ratios": list(r)
    }  # fmt: skip

  def test(self, system, against):
    r = self._times(system, against, 16)
    d = statistics.decide(r, 0.001)
    return {
      "kind": "ok", "verdict": d.verdict, "reason": f"gate: {d.reason}",
      "gain": d.gain, "bound": d.bound, "s_aa": d.s_aa, "units": 16,
      "threshold": d.threshold, "log_ratios": list(r),
      "identical": 32, "outputs": 32,
    }  # fmt: skip

  def seal(self, system):
    timed = self.test(system, phases.STOCK)
    return {
      "kind": "ok", "verdict": timed["verdict"], "reason": timed["reason"],
      "speedup_vs_stock": 1 + timed["gain"], "lcb": timed["bound"],
      "tokens_forced": 9, "timed": timed, "long": {"verdict": "pass"},
    }  # fmt: skip


@pytest.fixture(name="folder")
def _folder(tmp_path):
  """A finished round."""
  folder = tmp_path / "round"
  log = Log(folder / replayed.LOG)
  result = phases.Round(
    log, Timed(folder / "paid"), [scripted.Proposer()], Budget(log),
    scripted.plan(aa_sessions=5), folder / "agents",
  ).run()  # fmt: skip
  log.close()
  assert result["champion"]["options"] == "d=1,b=1"
  whole = results.empty_result("round") | {
    name: result[name] for name in ("trials", "accepted", "champion", "sealed")
  }
  whole["round"] = {
    "directions": result["directions"],
    "start": dict(phases.STOCK),
    "aa_means": [0.001] * 5,
  }
  results.write_result(folder, results.to_json(whole))
  return folder


def test_the_same_times_give_the_same_champion(folder, capsys):
  before = (folder / replayed.LOG).read_bytes()
  found = replayed.replay(folder)
  assert found.differences == ()
  assert found.outcome["champion"] == {"options": "d=1,b=1", "patch": ""}
  assert len(found.outcome["accepted"]) == 2
  assert replayed.main(["replayed", str(folder)]) == 0
  assert "as recorded" in capsys.readouterr().out
  assert (folder / replayed.LOG).read_bytes() == before


def change(folder, kind, edit):
  path = folder / replayed.LOG
  lines = [json.loads(text) for text in path.read_text().splitlines()]
  for line in lines:
    if line["event"] == "done" and line["key"].startswith(kind):
      edit(line["result"])
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_verdict_that_its_times_do_not_give(folder):
  """It is theirs that counts, and the difference is told."""

  def slower(told):
    told["log_ratios"] = [x - 0.2 for x in told["log_ratios"]]

  change(folder, "test/", lambda told: told.update(verdict="reject"))
  assert replayed.replay(folder).differences == ()
  change(folder, "seal/", lambda told: slower(told["timed"]))
  change(folder, "seal/", lambda told: slower(told["timed"]))
  found = replayed.replay(folder)
  assert found.outcome["accepted"] == []
  assert any("accepted: []" in text for text in found.differences)
  assert replayed.main(["replayed", str(folder)]) == 1


def test_decisions_that_were_not_recorded(folder):
  def slower(told):
    told["log_ratios"] = [x - 0.4 for x in told["log_ratios"]]

  change(folder, "test/", slower)
  with pytest.raises(SpecPilotError, match="go another way"):
    replayed.replay(folder)
