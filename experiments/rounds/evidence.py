"""The cheapest evidence: what a choice of nodes can gain at most, by replay.

Recorded lattices say exactly what another chain or tree would have accepted,
without a device; the recorded requests are few, so that the one-sided 95 %
bound over them counts. What its steps would take is not known; but a pass of no
fewer rows is no faster, and one of fewer rows takes no less than that of a
single one and the drafter's. Both together bound the gain. What cannot gain
`phases.GATE` is not timed.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import results
from experiments.controller import statistics
from experiments.cost_model import budgets, lattices, replay
from specpilot_jax.configs import EXACT, ONE_LEVEL, SystemConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

NODES = ("num_drafts", "tree", "node_budget", "tree_depth")
"""Options that choose nodes, and change nothing else."""


def bound(
  profile: Path, system: SystemConfig, against: SystemConfig
) -> dict[str, Any] | None:
  """What a system can gain over another, by an exact replay of both.

  Args:
    profile: folder of a run of --job=profile of the deployment.
    system, against: both decode in one level, and differ in their choice of
      nodes alone.

  Returns:
    `tau` and `rows` of both, and `bound`: the upper bound of tau / tau' over
    requests, times t' / t, less 1, where t is t' for a pass of no fewer rows
    and that of the autoregressive step and the drafter otherwise. None where a
    replay says nothing: other options differ, there are no lattices of two
    requests, a limit is beyond them, or no step was timed.
  """
  options = [registry.assignments(s) for s in (system, against)]
  other = [n for n in options[0] if options[0][n] != options[1][n]]
  levels = {system.verification, against.verification}
  rules = {system.acceptance, against.acceptance}
  path = profile / lattices.LATTICES
  # Steps were timed, and lattices recorded, with all of the weights.
  if any(
    s.weights != "bf16" or s.drafter_view != EXACT for s in (system, against)
  ):
    return None
  if set(other) - set(NODES) or levels != {ONE_LEVEL} or not path.exists():
    return None
  if rules != {"match"}:  # Under another rule outputs depend on the drafts.
    return None
  recordings = lattices.load(path)
  try:
    mine, base = (
      budgets.policy_of(s, recordings[0].num_slots) for s in (system, against)
    )
  except SpecPilotError:  # Whoever builds the engine says so.
    return None
  rows = mine[0].rows, base[0].rows
  faster = 1.0
  if rows[0] < rows[1]:
    steps = _steps(results.read_result(profile))
    if steps is None:
      return None
    least = steps["ar"] + steps["drafter"]
    faster = max(1.0, steps["stock"] / least)
  found = [replay.replay(recordings, p) for _, p in (mine, base)]
  taus = [np.array([sum(e) / len(e) for e in x.emitted]) for x in found]
  upper = -statistics.t_bound(np.log(taus[1] / taus[0]))
  if not math.isfinite(upper):
    return None
  return {
    "tau": found[0].tau, "tau_against": found[1].tau, "rows": rows[0],
    "rows_against": rows[1], "bound": math.exp(upper) * faster - 1,
  }  # fmt: skip


def _steps(result: Mapping[str, Any]) -> dict[str, float] | None:
  """Step times in microseconds of `ar` and `stock`, and the drafter's share."""
  model = result["cost_model"]
  found = {"drafter": model["classes"]["drafter"]["measured_us"]}
  for name in ("ar", "stock"):
    told = model["systems"].get(name)
    if told is None or told["measured_step_us"] is None:
      return None
    found[name] = told["measured_step_us"]
  return found
