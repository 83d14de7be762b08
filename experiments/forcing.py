"""Scores recorded requests with stock and applies `token_forcing`."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import (
  adjudication,
  endings,
  environment,
  metrics,
  results,
  token_forcing,
)
from experiments.console import number
from experiments.settings import AR, STOCK
from specpilot_jax import kernels, paths
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.loading import LoadedModel

Record = Mapping[str, Any]


def min_control_tokens(chosen: int | None) -> int:
  """The chosen number, or what suits the device."""
  if chosen is not None:
    return chosen
  return 5_000 if jax.default_backend() == "cpu" else 20_000


def calibration(
  model: LoadedModel, prefill_chunk: int, *, greedy: bool
) -> token_forcing.Calibration:
  """The stored controls of this deployment; see `token_forcing.Calibration`."""
  device = jax.devices()[0]
  return token_forcing.Calibration(
    paths.data_dir() / "calibration",
    {
      # A widened model is made of the small one's files.
      "target": model.config.name,
      "weights": dict(sorted(model.sha256.items())),
      "dtype": str(model.target.dtype),
      "kernels": kernels.as_dict(model.target.kernels),
      "platform": device.platform,
      "device_kind": device.device_kind,
      "cpu": environment.cpu_model(),
      "jax": jax.__version__,
      "prefill_chunk": prefill_chunk,
      "sampling": "greedy" if greedy else "sampled",
    }
    # Another model, of the same files; W12 is the same one.
    | ({"form": "fp8"} if model.target.weights == "fp8" else {}),
  )


@dataclasses.dataclass
class Forcing:
  """Judges systems by their recorded requests.

  An output that is token-identical to one scored before, after the same prompt
  and with the same sampling settings, shares its scores: the same computation
  gives the same gaps.

  Args:
    engine: the target, teacher-forced; its tokenizer finds stop strings.
    store: controls of earlier runs.
    dtype: of the target.
    min_tokens: control tokens that a verdict needs.
    keep: whether this run's controls are stored. Only outputs that this
      process decoded itself should be.
    deadline: of `time.monotonic()`; no scoring starts after it.
    progress: called with a line after each request.
    arbiter: scores in float32 what lies above the tolerance; see
      `token_forcing`.

  Attributes:
    notes: for the reader of the result.
  """

  engine: Engine
  store: token_forcing.Calibration
  dtype: str
  min_tokens: int
  keep: bool
  deadline: float
  progress: Callable[[str], None]
  arbiter: adjudication.Arbiter | None = None
  _cache: dict[tuple[str, float], token_forcing.Scored] = dataclasses.field(
    default_factory=dict
  )
  notes: list[str] = dataclasses.field(default_factory=list)
  _late: bool = False

  def judge_all(
    self, records: Mapping[str, Sequence[Record]]
  ) -> dict[str, dict[str, Any]]:
    """Verdicts by system name.

    `ar` is a control and gets a verdict only where its records are not whole.
    """
    engine = self.engine
    faults = {
      name: endings.faults(members, engine.config, engine.tokenizer)
      for name, members in records.items()
    }
    verdicts = {}
    for system in sorted(records, key=lambda name: name != STOCK):
      if system != AR:
        verdicts[system] = self._judge(system, records, faults)
      elif faults[AR]:
        verdicts[AR] = _failed(_undecided(""), faults[AR])
    return verdicts

  def _judge(self, system: str, records, faults) -> dict[str, Any]:
    name = token_forcing.control_name(system)
    if name not in records:
      name = AR  # A candidate beside nothing else.
    # Requests are compared with AR's where the control was not recorded.
    beside = records.get(name) or records.get(AR, ())
    own = [*faults[system], *endings.set_faults(records[system], beside)]
    unsound = {fault.request for fault in faults.get(name, ())}
    control_records = [
      r
      for r in records.get(name, ())
      if not _is_rejection(r) and r["request"] not in unsound
    ]
    verdict = self._force(system, records[system], name, control_records)
    if own:
      return _failed(verdict, own)
    if unsound and verdict["verdict"] == token_forcing.PASS:
      verdict |= {
        "verdict": token_forcing.INCONCLUSIVE,
        "reason": f"its control is not whole: {faults[name][0].text}",
      }
    return verdict

  def _force(self, system, records, name, control_records) -> dict[str, Any]:
    """The verdict on the tokens alone."""
    if any(_is_rejection(r) for r in records):
      return _undecided(
        "rejection sampling draws its own sample of the target's law, which no"
        " single choice of the target forces"
      )
    new = {
      token_forcing.output_key(record): token_forcing.entry_of(scored)
      for record, scored in self._score(control_records, token_forcing.CAP)
    }
    control = self.store.control(name, new)
    # Filter cut-offs are widened by the tolerance, so it must be known first.
    known = len(self._cache)
    tolerance = control.tolerance(self.dtype)
    scored = [s for _, s in self._score(records, tolerance)]
    if self._late:
      return _undecided("the time limit ended the scoring")

    def rescore(index: int) -> np.ndarray:
      assert self.arbiter is not None
      if time.monotonic() > self.deadline:
        raise token_forcing.Unavailable(
          "the time limit came before float32 could judge it"
        )
      record = records[index]
      return self.arbiter.gaps(record, _cut_width(record, tolerance))

    verdict = token_forcing.judge(
      scored,
      control,
      dtype=self.dtype,
      min_control_tokens=self.min_tokens,
      rescore=rescore if self.arbiter else None,
    )
    verdict["control_decile_flip_rates"] = token_forcing.decile_rates(
      [s for _, s in self._score(control_records, token_forcing.CAP)]
    )
    verdict["outputs"] = len(scored)
    verdict["outputs_sharing_scores"] = len(scored) + known - len(self._cache)
    verdict["calibration_file"] = self.store.path.name
    if self.keep:
      try:
        self.store.save(name, new)
      except SpecPilotError as e:
        # The measurement is worth more than its use as a later control.
        self.notes.append(f"the control {name} was not kept: {e}")
    return verdict

  def _score(self, records: Sequence[Record], cut_tolerance: float):
    out = []
    for record in records:
      # Systems often agree on an output; the score of the same tokens is the
      # same.
      width = _cut_width(record, cut_tolerance)
      key = (token_forcing.output_key(record), width)
      if key not in self._cache:
        if time.monotonic() > self.deadline:
          self._late = True
          continue
        scores = self.engine.score(
          record["prompt_ids"],
          record["output_ids"],
          results.sampling_of(record),
          cut_tolerance=width,
        )
        self._cache[key] = token_forcing.Scored(
          request=record["request"],
          tokens=tuple(record["output_ids"]),
          gaps=scores.gaps,
        )
        flips = self._cache[key].flips
        self.progress(
          f"{record['request']} {record['system']}:"
          f" {scores.gaps.size} tokens, {flips} flips"
        )
      scored = dataclasses.replace(self._cache[key], request=record["request"])
      out.append((record, scored))
    return out


def _cut_width(record: Record, tolerance: float) -> float:
  """How far filter cut-offs are widened; without filters it has no effect."""
  sampling = results.sampling_of(record)
  filters = sampling.top_k or sampling.top_p < 1 or sampling.min_p
  return tolerance if filters and sampling.temperature else 0.0


def _is_rejection(record: Record) -> bool:
  options = record["options"]
  sampled = bool(record["sampling"].get("temperature"))
  return options.get("acceptance") == "rejection" and sampled


def _undecided(reason: str) -> dict[str, Any]:
  return {
    "verdict": token_forcing.INCONCLUSIVE,
    "reason": reason,
    "tokens": 0,
    "flips": 0,
    "max_margin": None,
    "first_failure": None,
  }


def _failed(
  verdict: Mapping[str, Any], faults: Sequence[endings.Fault]
) -> dict[str, Any]:
  """The verdict where requests are not whole, whatever their tokens say."""
  first = faults[0]
  reason, failure = first.text, verdict["first_failure"]
  if len(faults) > 1:
    reason += f" ({len(faults)} such faults)"
  if verdict["verdict"] == token_forcing.FAIL:
    reason = f"{verdict['reason']}; {reason}"
  else:
    failure = {
      "request": first.request,
      "index": first.index,
      "token": None,
      "gap": None,
    }
  return {
    **verdict,
    "verdict": token_forcing.FAIL,
    "reason": reason,
    "first_failure": failure,
    "faults": [fault.text for fault in faults],
  }


def without_levels(
  records: Mapping[str, Sequence[Record]],
) -> dict[str, list[Record]]:
  """Records by system, whatever load they were served under.

  What a system says does not depend on its load: it is judged once, over all of
  them. A request that was served under several has a name for each.
  """
  out: dict[str, list[Record]] = {}
  for name, members in records.items():
    system, at, level = name.partition(metrics.AT)
    out.setdefault(system, []).extend(
      {**r, "system": system, "request": r["request"] + at + level} if at else r
      for r in members
    )
  return out


def num_outputs(records: Mapping[str, Sequence[Record]]) -> int:
  """Different outputs in the records: what there is to score."""
  return len(
    {
      json.dumps([r["prompt_ids"], r["sampling"], r["output_ids"]])
      for members in records.values()
      for r in members
    }
  )


def describe_verdict(system: str, verdict: Mapping[str, Any]) -> str:
  """One line for the console and the report."""
  line = f"token forcing: {system} {verdict['verdict']}: {verdict['reason']}"
  first = verdict.get("first_failure")
  if first:
    line += f"; first failure: request {first['request']}"
    if first["index"] is not None:
      line += f", output token {first['index']}"
  return line


_NAMED_TOKENS = 4


def describe_adjudication(
  system: str, verdict: Mapping[str, Any]
) -> str | None:
  """One line on tokens that float32 scored again; None where it had none."""
  tokens = verdict.get("adjudicated_tokens")
  if not tokens:
    return None
  named = [
    f"request {t['request']}, output token {t['index']}: gap"
    f" {number(t['gap'], 3)}, in float32 {number(t['float32_gap'], 3)},"
    f" {'accepted' if t['accepted'] else 'not accepted'}"
    for t in tokens[:_NAMED_TOKENS]
  ]
  if len(tokens) > _NAMED_TOKENS:
    named.append(f"{len(tokens) - _NAMED_TOKENS} more in {results.RESULT}")
  accepted = sum(t["accepted"] for t in tokens)
  return (
    f"adjudicated in float32: {system} {len(tokens)} above the tolerance,"
    f" {accepted} accepted ({'; '.join(named)})"
  )
