"""Scores recorded requests with stock and applies `token_forcing`."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from experiments import environment, token_forcing
from experiments.settings import AR, STOCK
from specpilot_jax import paths
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.loading import LoadedModel

Record = Mapping[str, Any]


def min_control_tokens(chosen: int | None) -> int:
  """The chosen number, or what suits the device."""
  if chosen is not None:
    return chosen
  return 5_000 if jax.default_backend() == "cpu" else 20_000


def sampling_of(record: Record) -> SamplingParams:
  """A record's sampling settings.

  Raises:
    SpecPilotError: unknown field, or a value out of range.
  """
  fields = dict(record["sampling"])
  try:
    for name in ("stop", "stop_token_ids"):
      if name in fields:
        fields[name] = tuple(fields[name])
    return SamplingParams(**fields)
  except TypeError as e:
    raise SpecPilotError(
      f"request {record['request']}: sampling is not valid ({e})"
    ) from None


def calibration(
  model: LoadedModel, prefill_chunk: int, *, greedy: bool
) -> token_forcing.Calibration:
  """The stored controls of this deployment; see `token_forcing.Calibration`."""
  device = jax.devices()[0]
  return token_forcing.Calibration(
    paths.data_dir() / "calibration",
    {
      "weights": dict(sorted(model.sha256.items())),
      "dtype": str(model.target.dtype),
      "platform": device.platform,
      "device_kind": device.device_kind,
      "cpu": environment.cpu_model(),
      "jax": jax.__version__,
      "prefill_chunk": prefill_chunk,
      "sampling": "greedy" if greedy else "sampled",
    },
  )


@dataclasses.dataclass
class Forcing:
  """Judges systems by their recorded requests.

  Args:
    engine: the target, teacher-forced.
    store: controls of earlier runs.
    dtype: of the target.
    min_tokens: control tokens that a verdict needs.
    keep: whether this run's controls are stored. Only outputs that this
      process decoded itself should be.
    deadline: of `time.monotonic()`; no scoring starts after it.
    progress: called with a line after each request.
  """

  engine: Engine
  store: token_forcing.Calibration
  dtype: str
  min_tokens: int
  keep: bool
  deadline: float
  progress: Callable[[str], None]
  _cache: dict[tuple[str, float], token_forcing.Scored] = dataclasses.field(
    default_factory=dict
  )
  _late: bool = False

  def judge_all(
    self, records: Mapping[str, Sequence[Record]]
  ) -> dict[str, dict[str, Any]]:
    """Verdicts by system name; `ar` is a control and gets none."""
    verdicts = {}
    for system in sorted(records, key=lambda name: name != STOCK):
      if system != AR:
        verdicts[system] = self._judge(system, records)
    return verdicts

  def _judge(self, system: str, records) -> dict[str, Any]:
    if any(_is_rejection(r) for r in records[system]):
      return _undecided(
        "rejection sampling draws its own sample of the target's law, which no"
        " single choice of the target forces"
      )
    name = token_forcing.control_name(system)
    control_records = [r for r in records.get(name, ()) if not _is_rejection(r)]
    new = {
      token_forcing.output_key(record): token_forcing.entry_of(scored)
      for record, scored in self._score(control_records, token_forcing.CAP)
    }
    control = self.store.control(name, new)
    # Filter cut-offs are widened by the tolerance, so it must be known first.
    scored = [
      s for _, s in self._score(records[system], control.tolerance(self.dtype))
    ]
    if self._late:
      return _undecided("the time limit ended the scoring")
    verdict = token_forcing.judge(
      scored,
      control,
      dtype=self.dtype,
      min_control_tokens=self.min_tokens,
    )
    verdict["control_decile_flip_rates"] = token_forcing.decile_rates(
      [s for _, s in self._score(control_records, token_forcing.CAP)]
    )
    verdict["calibration_file"] = str(self.store.path)
    if self.keep:
      self.store.save(name, new)
    return verdict

  def _score(self, records: Sequence[Record], cut_tolerance: float):
    out = []
    for record in records:
      # Without filters the width of their cut-offs does not matter. Systems
      # often agree on an output; the score of the same tokens is the same.
      sampling = sampling_of(record)
      filters = sampling.top_k or sampling.top_p < 1 or sampling.min_p
      width = cut_tolerance if filters and sampling.temperature else 0.0
      key = (token_forcing.output_key(record), width)
      if key not in self._cache:
        if time.monotonic() > self.deadline:
          self._late = True
          continue
        scores = self.engine.score(
          record["prompt_ids"],
          record["output_ids"],
          sampling,
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
    line += (
      f"; first failure: request {first['request']}, output token"
      f" {first['index']}"
    )
  return line
