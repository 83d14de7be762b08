"""A replayed budget beside a real run of it.

A policy is followed on lattices that were recorded along stock's outputs; a
system that verifies chains of another length on the same requests says whether
that is what happens. In bfloat16 passes of different size round differently, so
that some outputs differ: figures over the requests whose outputs are the same
stand beside those over all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import metrics
from experiments.cost_model import replay
from experiments.cost_model.lattices import Recording
from specpilot_jax.mechanisms import registry

TAU_AGREES = 0.01
"""Share of tau that a replayed budget may be off a real run of it."""

Record = Mapping[str, Any]

_SAME = ("prompt_ids", "sampling", "target", "drafter")


def drafts_of(record: Record, block: int) -> int | None:
  """Drafts per pass of a system that replay can follow; None for another.

  Args:
    record: one of its requests.
    block: drafts of the drafter's whole block.
  """
  drafts = block
  for name, text in record["options"].items():
    option = registry.OPTIONS.get(name)
    if option is None:
      return None
    value = option.parse(text)
    if name == "num_drafts":
      drafts = block if value is None else int(value)
    elif name == "acceptance" and not record["sampling"]["temperature"]:
      continue  # Greedy decoding has one rule.
    elif value != option.default:
      return None
  return drafts


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
    `tau` replayed and `tau_measured` over all `requests` and, in `same_output`,
    over those whose outputs agree, where `steps_agreeing` of `steps` real steps
    are repeated too. None where replay does not follow the system, or no
    request is in both runs with the same prompt and sampling settings.
  """
  by_id = {r["request"]: r for r in records}
  pairs: list[tuple[Recording, Record]] = []
  block, drafts = 0, None
  for recording in recordings:
    record, own = by_id.get(recording.request), stock[recording.request]
    if record is None or recording.looped:
      continue
    if record["finish_reason"] == metrics.LOOP:
      continue
    if any(record.get(f) != own.get(f) for f in _SAME):
      continue
    block = recording.num_slots
    drafts = drafts_of(record, block)
    if drafts is None:
      return None
    pairs.append((recording, record))
  if not pairs or drafts is None:
    return None
  chain = replay.Chain(drafts)
  same = [
    (recording, record)
    for recording, record in pairs
    if record["output_ids"] == recording.output.tolist()
  ]
  out = {"system": system, "drafts": drafts, **_figures(pairs, chain)}
  out["same_output"] = None
  if same:
    out["same_output"] = _figures(same, chain) | {
      "steps": sum(len(_emitted(record)) for _, record in same),
      "steps_agreeing": sum(
        replay.agreement(recording, chain, _emitted(record))
        for recording, record in same
      ),
    }
  return out


def _emitted(record: Record) -> Sequence[int]:
  return record["metrics"]["emitted_per_step"]


def _figures(
  pairs: Sequence[tuple[Recording, Record]], chain: replay.Chain
) -> dict[str, Any]:
  followed = replay.replay([recording for recording, _ in pairs], chain)
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
    f"replay of a chain of {run['drafts']} beside {run['system']}: tau"
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
