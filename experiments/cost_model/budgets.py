"""Which policy pays at which node budget: replayed tau over the time of a pass.

The time of a step depends on the rows of its pass, not on how many of them hold
a node: a tree has the rows of its envelope. Between measured numbers of rows
times are interpolated; beyond them nothing is said.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cost_model import replay, two_level
from experiments.cost_model.lattices import Recording
from specpilot_jax import configs
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.errors import SpecPilotError

LIMITED = "best_first_limited"
"""The best-first tree at the depth that serves each budget best: few nodes are
spent on the first slots, where they are likely, and not on a long chain."""

POLICIES = (*configs.TREES, LIMITED)

DEPTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
"""Limits of depth that are tried, beside none."""

PASSES, TWO_LEVEL_BUDGETS = (1, 2), (16, 32, 48)
"""Of level 1, and nodes of trees, that are replayed in two levels."""

GIVEN = "given"
"""Pass times that the caller knows, not this run."""

Entry = dict[str, Any]


def policy_of(system: SystemConfig, slots: int) -> tuple[Policy, replay.Policy]:
  """What a system verifies of a lattice, and its replay.

  Of two levels the policy is that of the drafts, the rows those of the exact
  pass.

  Raises:
    SpecPilotError: a limit beyond the drafter's slots; levels that replay does
      not follow.
  """
  one = system.verification == configs.ONE_LEVEL
  if not one and not two_level.follows(system):
    raise SpecPilotError(
      f"replay follows two levels by the {configs.VIEWS[0]} view in every step,"
      f" not verification={system.verification} with view={system.view}"
    )
  policy = Policy.of_slots(system, slots, "of the recorded lattices")
  drafts: replay.Chain | replay.BestFirst
  if policy.tree == configs.CHAIN:
    drafts = replay.Chain(policy.nodes - 1)
  else:
    drafts = replay.BestFirst(
      policy.nodes,
      depth=policy.path - 1,
      blind=policy.tree == configs.MARGINAL,
    )
  if one:
    return policy, drafts
  followed = two_level.TwoLevel(policy, drafts, system.level_one_passes)
  return dataclasses.replace(policy, rows=followed.nodes), followed


def label(system: SystemConfig, slots: int) -> str:
  """A policy in words."""
  policy, _ = policy_of(system, slots)
  two = system.verification != configs.ONE_LEVEL
  passes = system.level_one_passes
  times = "" if passes == 1 else f", {passes} passes of the first"
  levels = f" in two levels{times} (approximated)" if two else ""
  if policy.tree == configs.CHAIN:
    return f"a chain of {policy.nodes - 1}{levels}"
  depth = "" if system.tree_depth is None else f", {policy.path - 1} deep"
  return f"a {policy.tree} tree of {policy.nodes} nodes{depth}{levels}"


def curves(
  recordings: Sequence[Recording], stock_nodes: int
) -> dict[str, list[Entry]]:
  """Replayed tau by policy and budget.

  Args:
    recordings: of one drafter.
    stock_nodes: of stock's chain, a budget beside those of `replay.BUDGETS`.

  Returns:
    Per policy of `POLICIES`, rising in `nodes`: `nodes`, `rows` of the pass,
    `depth` of a limited tree, `tau` and `tau_per_request`. A chain is no longer
    than the slots. The depth is chosen on these recordings.
  """
  slots = recordings[0].num_slots
  budgets = sorted({stock_nodes, *replay.BUDGETS})
  out = {}
  for tree in configs.TREES:
    fitting = [n for n in budgets if tree != configs.CHAIN or n <= 1 + slots]
    policies = {
      n: policy_of(SystemConfig(tree=tree, node_budget=n), slots)
      for n in fitting
    }
    _, widest = policies[fitting[-1]]
    if isinstance(widest, replay.BestFirst):
      # The envelope of a small tree is no limit on its depth.
      widest = replay.BestFirst(fitting[-1], blind=widest.blind)
    swept = replay.sweep(recordings, widest, fitting)
    out[tree] = [
      {
        "nodes": n,
        "rows": policies[n][0].rows,
        "depth": None,
        "tau": swept[n].tau,
        "tau_per_request": swept[n].tau_per_request,
      }
      for n in fitting
    ]
  out[LIMITED] = _limited(recordings, out[configs.BEST_FIRST])
  return out


def in_two_levels(recordings: Sequence[Recording]) -> list[Entry]:
  """Replayed tau of two levels: which drafts serve them.

  Args:
    recordings: with level 1's choices.

  Returns:
    `passes` of level 1, `tree`, `nodes` of the drafts, `rows` of the exact
    pass, `tau` and `tau_per_request` of stock's chain and of trees.
  """
  out = []
  for passes in PASSES:
    for nodes in (None, *TWO_LEVEL_BUDGETS):
      system = SystemConfig(
        verification=configs.TWO_LEVEL,
        level_one_passes=passes,
        tree=configs.CHAIN if nodes is None else configs.BEST_FIRST,
        node_budget=nodes,
      )
      policy, followed = policy_of(system, recordings[0].num_slots)
      found = replay.replay(recordings, followed)
      out.append(
        {
          "passes": passes,
          "tree": policy.tree,
          "nodes": policy.nodes,
          "rows": policy.rows,
          "tau": found.tau,
          "tau_per_request": found.tau_per_request,
        }
      )
  return out


def _limited(
  recordings: Sequence[Recording], unlimited: Sequence[Entry]
) -> list[Entry]:
  """The best depth of each budget; the deepest of equal ones."""
  budgets = [entry["nodes"] for entry in unlimited]
  best = [dict(entry) for entry in unlimited]
  for depth in sorted(DEPTHS, reverse=True):
    if depth >= recordings[0].num_slots:
      continue
    widest = replay.BestFirst(budgets[-1], depth=depth)
    swept = replay.sweep(recordings, widest, budgets)
    for entry in best:
      found = swept[entry["nodes"]]
      if found.tau > entry["tau"]:
        entry |= {
          "depth": depth,
          "tau": found.tau,
          "tau_per_request": found.tau_per_request,
        }
  return best


def parse_times(text: str) -> dict[int, float]:
  """Pass times from `ROWS:US,ROWS:US,...`.

  Raises:
    SpecPilotError: another form, rows twice, a time that is not positive.
  """
  out: dict[int, float] = {}
  for part in text.split(","):
    found = re.fullmatch(r"([0-9]{1,6}):([0-9]+(?:[.][0-9]+)?)", part.strip())
    rows, us = (int(found[1]), float(found[2])) if found else (0, 0.0)
    if rows < 1 or us <= 0 or rows in out:
      raise SpecPilotError(
        f"pass times {part!r}: expected ROWS:MICROSECONDS, rows once each"
      )
    out[rows] = us
  return out


def pass_us(times: Mapping[int, float], rows: int) -> float | None:
  """The time of a step of so many rows; None outside of what was measured."""
  known = sorted(times)
  if not known or not known[0] <= rows <= known[-1]:
    return None
  return float(np.interp(rows, known, [times[r] for r in known]))


def measured_times(
  systems: Iterable[Mapping[str, Any]],
) -> dict[str, dict[int, float]]:
  """Step times by form of weights and rows, means over systems of equal rows.

  Args:
    systems: `weights`, `rows` and `step_us` of each; None where there is none.
      Steps of two levels are none: they say nothing of a pass.
  """
  found: dict[str, dict[int, list[float]]] = {}
  for system in systems:
    if system["step_us"] is not None:
      by_rows = found.setdefault(system["weights"], {})
      by_rows.setdefault(system["rows"], []).append(system["step_us"])
  return {
    weights: {rows: float(np.mean(us)) for rows, us in sorted(by_rows.items())}
    for weights, by_rows in found.items()
  }


def add_speeds(
  policies: Mapping[str, Sequence[Entry]],
  times: Mapping[str, Mapping[int, float]],
  stock_nodes: int,
) -> dict[str, Any]:
  """Puts tokens per second beside tau; and which budget is best.

  Args:
    policies: of `curves`; each entry gets `tok_s`, by source of times.
    times: pass times in microseconds by source and rows.
    stock_nodes: of stock's chain.

  Returns:
    By source: `us` by rows, `best` (policy, nodes, depth, tau, tok_s) and
    `over_stock`, its speed over that of stock's chain; None where the times
    say nothing.
  """
  out = {}
  for source, known in times.items():
    ranked: list[Entry] = []
    stock = None
    for tree, entries in policies.items():
      for entry in entries:
        us = pass_us(known, entry["rows"])
        speed = None if us is None else 1e6 * entry["tau"] / us
        entry.setdefault("tok_s", {})[source] = speed
        if speed is None:
          continue
        ranked.append(
          {
            "policy": tree,
            "nodes": entry["nodes"],
            "depth": entry["depth"],
            "tau": entry["tau"],
            "tok_s": speed,
          }
        )
        if tree == configs.CHAIN and entry["nodes"] == stock_nodes:
          stock = speed
    # Of equal ones the fewest nodes, a chain first.
    best = max(
      ranked,
      key=lambda e: (
        e["tok_s"],
        -e["nodes"],
        -POLICIES.index(e["policy"]),
      ),
      default=None,
    )
    out[source] = {
      "us": {str(rows): us for rows, us in known.items()},
      "best": best,
      "over_stock": best["tok_s"] / stock if best and stock else None,
    }
  return out


def describe(source: str, found: Mapping[str, Any]) -> str:
  """One line on the best budget of a source of pass times."""
  best = found["best"]
  if best is None:
    return f"best budget, pass times {source}: none has a known pass time"
  over = found["over_stock"]
  beside = "" if over is None else f", {over:.3f} times stock's"
  tree = configs.BEST_FIRST if best["policy"] == LIMITED else best["policy"]
  depth = "" if best["depth"] is None else f", {best['depth']} deep"
  return (
    f"best budget, pass times {source}: {tree} of {best['nodes']} nodes{depth},"
    f" tau {best['tau']:.3f}, {best['tok_s']:.1f} tok/s replayed{beside}"
  )
