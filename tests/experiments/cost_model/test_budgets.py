"""Policies at every budget, and the depth that serves each best."""

import numpy as np
import pytest

from experiments.cost_model import budgets, replay
from specpilot_jax.configs import SystemConfig
from specpilot_jax.errors import SpecPilotError
from tests.experiments.cost_model.test_replay import random_recording


@pytest.mark.parametrize("conditional", [False, True])
def test_curves(conditional):
  recordings = [
    random_recording(seed, n=60, slots=15, conditional=conditional)
    for seed in range(3)
  ]
  found = budgets.curves(recordings, 11)
  assert tuple(found) == budgets.POLICIES
  assert [e["nodes"] for e in found["chain"]] == [8, 11, 16]
  expected = [8, 11, 16, 24, 32, 48, 64, 96]
  for tree in budgets.POLICIES[1:]:
    assert [e["nodes"] for e in found[tree]] == expected
    assert [e["rows"] for e in found[tree]] == [16, 16, 16, 32, 32, 48, 64, 96]
  for entry in found["chain"]:
    own = replay.replay(recordings, replay.Chain(entry["nodes"] - 1))
    assert (entry["tau"], entry["rows"]) == (own.tau, entry["nodes"])
  depths = set()
  for plain, limited in zip(
    found["best_first"], found[budgets.LIMITED], strict=True
  ):
    nodes = plain["nodes"]
    own = replay.replay(recordings, replay.BestFirst(nodes))
    assert (plain["tau"], plain["depth"]) == (own.tau, None)
    taus = {
      depth: replay.replay(recordings, replay.BestFirst(nodes, depth)).tau
      for depth in (*budgets.DEPTHS, None)
    }
    assert limited["tau"] == taus[limited["depth"]] == max(taus.values())
    depths.add(limited["depth"])
  # Random drafts are right for a token or two: a chain of 15 is a waste.
  assert depths - {None}


def test_policies_of_systems():
  for system, label, nodes, rows in (
    (SystemConfig(), "a chain of 15", 16, 16),
    (SystemConfig(num_drafts=4), "a chain of 4", 5, 5),
    (SystemConfig(node_budget=9), "a chain of 8", 9, 9),
    (SystemConfig(tree="best_first"), "a best_first tree of 32 nodes", 32, 32),
    (
      SystemConfig(tree="marginal", node_budget=33, tree_depth=6),
      "a marginal tree of 33 nodes, 6 deep",
      33,
      48,
    ),
  ):
    policy, followed = budgets.policy_of(system, 15)
    assert budgets.label(system, 15) == label
    assert (policy.nodes, policy.rows) == (followed.nodes, rows)
    assert policy.nodes == nodes
    if isinstance(followed, replay.BestFirst):
      assert followed.blind == (system.tree == "marginal")
      assert followed.depth == (system.tree_depth or 15)
  with pytest.raises(SpecPilotError, match="num_drafts=20 is more than the 15"):
    budgets.policy_of(SystemConfig(num_drafts=20), 15)


def test_step_times_are_means_of_equal_rows():
  rng = np.random.default_rng(0)
  systems = [
    {"weights": weights, "rows": rows, "step_us": us}
    for weights, rows, us in (
      ("bf16", 32, 200.0), ("bf16", 16, 100.0), ("bf16", 32, 220.0),
      ("w12", 32, 150.0), ("w12", 64, None),
    )
  ]  # fmt: skip
  rng.shuffle(systems)
  found = budgets.measured_times(systems)
  assert found["bf16"] == {16: 100, 32: 210} and found["w12"] == {32: 150}
  assert list(found["bf16"]) == [16, 32]
