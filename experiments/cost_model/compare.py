"""A replayed budget beside a real run of it.

A policy is followed on lattices that were recorded along stock's outputs; a
system that verifies other chains, or trees, on the same requests says whether
that is what happens. In bfloat16 passes of different size round differently, so
that some outputs differ: figures over the requests whose outputs are the same
stand beside those over all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import metrics
from experiments.cost_model import budgets, replay, two_level
from experiments.cost_model.lattices import Recording
from specpilot_jax.configs import EXACT, ONE_LEVEL, SystemConfig
from specpilot_jax.mechanisms import registry

TAU_AGREES = 0.01
"""Share of tau that a replayed budget may be off a real run of it."""

Record = Mapping[str, Any]

_SAME = ("prompt_ids", "sampling", "target", "drafter")


def system_of(record: Record) -> SystemConfig | None:
  """The system that decoded a record; None for one that replay cannot follow:
  rejection sampling, two levels whose choices depend on the clock, and
  drafters that read a view of their weights.

  Args:
    record: one of its requests.
  """
  values: dict[str, Any] = {}
  for name, text in record["options"].items():
    option = registry.OPTIONS.get(name)
    if option is None:
      return None
    values[name] = option.parse(text)
  if not record["sampling"]["temperature"]:
    values.pop("acceptance", None)  # Greedy decoding has one rule.
  system = SystemConfig(**values)
  one = system.verification == ONE_LEVEL
  known = system.acceptance == "match" and (one or two_level.follows(system))
  # The lattices are those of the drafter's whole weights.
  known = known and system.drafter_view == EXACT
  return system if known else None


def wall_step_us(records: Sequence[Record]) -> float | None:
  """Measured time of a step: from first to last token, over the steps there.

  None where no request had a second step.
  """
  steps = sum(r["metrics"]["num_spec_steps"] - 1 for r in records)
  spent = sum(
    r["metrics"]["e2el_ms"] - r["metrics"]["ttft_ms"] for r in records
  )
  return 1e3 * spent / steps if steps else None


def compare(
  system: str,
  records: Sequence[Record],
  stock: Mapping[str, Record],
  recordings: Sequence[Recording],
) -> dict[str, Any] | None:
  """One system's run beside its replay on stock's lattices.

  Args:
    system: its name in the result.
    records: its requests.
    stock: stock's requests by their ids: their lattices were recorded.
    recordings: those lattices; only requests that loop in neither run count.

  Returns:
    `policy` in words, `tree`, `nodes` and `rows` of its passes, `weights`,
    `verification`,
    `step_us` measured; `tau` replayed and `tau_measured` over all `requests`
    and, in `same_output`, over those whose outputs agree, where
    `steps_agreeing` of `steps` real steps are repeated too. None where replay
    does not follow the system, or no request is in both runs with the same
    prompt and sampling settings.
  """
  by_id = {r["request"]: r for r in records}
  pairs: list[tuple[Recording, Record]] = []
  found: SystemConfig | None = None
  for recording in recordings:
    record, own = by_id.get(recording.request), stock[recording.request]
    if record is None or recording.looped:
      continue
    if record["finish_reason"] == metrics.LOOP:
      continue
    if any(record.get(f) != own.get(f) for f in _SAME):
      continue
    found = system_of(record)
    if found is None:
      return None
    if found.verification != ONE_LEVEL and recording.level_one is None:
      return None
    pairs.append((recording, record))
  if not pairs or found is None:
    return None
  slots = pairs[0][0].num_slots
  shape, policy = budgets.policy_of(found, slots)
  same = [
    (recording, record)
    for recording, record in pairs
    if record["output_ids"] == recording.output.tolist()
  ]
  out = {
    "system": system,
    "policy": budgets.label(found, slots),
    "tree": found.tree,
    "nodes": shape.nodes,
    "rows": shape.rows,
    "weights": found.weights,
    "verification": found.verification,
    "step_us": wall_step_us([record for _, record in pairs]),
    **_figures(pairs, policy),
  }
  out["same_output"] = None
  if same:
    out["same_output"] = _figures(same, policy) | {
      "steps": sum(len(_emitted(record)) for _, record in same),
      "steps_agreeing": sum(
        replay.agreement(recording, policy, _emitted(record))
        for recording, record in same
      ),
    }
  return out


def _emitted(record: Record) -> Sequence[int]:
  return record["metrics"]["emitted_per_step"]


def _figures(
  pairs: Sequence[tuple[Recording, Record]], policy: replay.Policy
) -> dict[str, Any]:
  followed = replay.replay([recording for recording, _ in pairs], policy)
  tokens = sum(len(record["output_ids"]) for _, record in pairs)
  measured = tokens / sum(len(_emitted(record)) for _, record in pairs)
  return {
    "requests": len(pairs),
    "tau": followed.tau,
    "tau_measured": measured,
    "difference": followed.tau / measured - 1,
  }


def describe(run: Mapping[str, Any]) -> str:
  """One line on a comparison."""
  line = (
    f"replay of {run['policy']} beside {run['system']}: tau"
    f" {run['tau']:.3f}, measured {run['tau_measured']:.3f}"
    f" ({run['difference']:+.2%}) over {run['requests']} requests"
  )
  same = run["same_output"]
  if same is None:
    return f"{line}, none with stock's output"
  return (
    f"{line}; {same['requests']} of them with stock's output: tau"
    f" {same['tau']:.3f}, measured {same['tau_measured']:.3f}"
    f" ({same['difference']:+.2%}), {same['steps_agreeing']} of"
    f" {same['steps']} steps repeated"
  )
