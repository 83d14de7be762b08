"""Figures from request records, pure functions of requests.jsonl.

Definitions
* TTFT: from the call to the first token. TPOT: (E2EL - TTFT) / (tokens - 1).
  ITL: gaps between chunks, one per verify pass (a chunk may hold many tokens).
* Acceptance length tau: tokens emitted per verify pass, bonus token included;
  *pooled* divides totals, *per request* is the mean over requests.
* Unconditional rate of position j: passes that accepted j or more drafts over
  all passes. Conditional: over the passes that accepted j - 1 and drafted j.
  A pass drafts positions as far as its longest path goes: all drafts of a
  chain, the depth of a tree.
* Identity: over passes that no stop and no limit cut, tau equals
  1 + the sum of the unconditional rates. It holds because each such pass emits
  its accepted drafts and one token more, which `check_identity` asserts.
* Of a load, requests side by side: throughput is over its duration, times count
  from the arrival; see `experiments.serving.figures`.
* `spec_decode_*` are vLLM's: rates in percent of drafted tokens, the
  acceptance length over passes that had a draft.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.serving import figures as serving

Record = Mapping[str, Any]

PERCENTILES = (50, 90, 95, 99)
LENGTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
LOOP = "loop"
AT = "@"
"""Between the name of a system and that of its load, where there is one."""


def at_level(system: str, of: str) -> str:
  """A system under the load of another; without one its bare name."""
  level = of.partition(AT)[2]
  return system + AT + level if level else system


class MeasurementError(RuntimeError):
  """A measurement contradicts itself: a fault of the engine or the runner."""


def _ratio(a: float, b: float) -> float | None:
  return a / b if b else None


def _spread(values: Sequence[float], name: str) -> dict[str, float | None]:
  """vLLM's names for a list of milliseconds; None where it is empty."""
  x = np.asarray([v for v in values if v is not None and math.isfinite(v)])
  functions = {"mean": np.mean, "median": np.median, "std": np.std}
  out = {
    f"{key}_{name}_ms": float(f(x)) if x.size else None
    for key, f in functions.items()
  }
  for p in PERCENTILES:
    out[f"p{p}_{name}_ms"] = float(np.percentile(x, p)) if x.size else None
  return out


def _steps(records: Sequence[Record], field: str) -> np.ndarray:
  return np.concatenate(
    [np.asarray(r["metrics"][field], np.int64) for r in records]
    or [np.zeros(0, np.int64)]
  )


def _depths(record: Record) -> Sequence[int]:
  """Positions drafted in each pass; records of chains alone may lack them."""
  m = record["metrics"]
  return m.get("depth_per_step", m["drafted_per_step"])


def check_identity(record: Record) -> None:
  """Token accounting of one request.

  Raises:
    MeasurementError: a pass that emitted something else than its accepted
      drafts and one more although nothing cut it, counts that do not add up,
      figures that do not follow from the passes and times beside them.
  """

  def require(condition, what):
    if not condition:
      where = f"{record['system']} {record['request']}"
      raise MeasurementError(f"{where}: {what}")

  m = record["metrics"]
  emitted = np.asarray(m["emitted_per_step"])
  drafted = np.asarray(m["drafted_per_step"])
  accepted = np.asarray(m["accepted_per_step"])
  depths = np.asarray(_depths(record))
  require(
    emitted.size == drafted.size == depths.size == accepted.size > 0,
    "passes differ in number between fields",
  )
  require(
    emitted.sum() == len(record["output_ids"]),
    f"{emitted.sum()} tokens emitted, {len(record['output_ids'])} recorded",
  )
  require(
    ((accepted >= 0) & (accepted <= depths) & (depths <= drafted)).all(),
    "a pass accepted more than it drafted",
  )
  # Only the last pass may be cut, and then it emits less.
  whole = emitted == accepted + 1
  require(
    whole[:-1].all() and (whole[-1] or 0 < emitted[-1] <= accepted[-1]),
    "a pass that nothing cut did not emit its accepted drafts and one more",
  )
  require(
    m["cut_steps"] == (~whole).sum(),
    f"{m['cut_steps']} passes counted as cut, {(~whole).sum()} are",
  )
  tokens = int(emitted.sum())
  decode_ms = m["e2el_ms"] - m["ttft_ms"]
  derived = {
    "num_spec_steps": emitted.size,
    "num_draft_tokens": int(drafted.sum()),
    "num_accepted_draft_tokens": int(accepted.sum()),
    "acceptance_length": tokens / emitted.size,
    "tpot_ms": decode_ms / (tokens - 1) if tokens > 1 else None,
  }
  for field, value in derived.items():
    require(_same(m[field], value), f"{field} is {m[field]}, expected {value}")
  require(
    len(m["itl_ms"]) == emitted.size - 1,
    f"{len(m['itl_ms'])} gaps between {emitted.size} passes",
  )


def _same(a: float | None, b: float | None) -> bool:
  if a is None or b is None:
    return a is b
  return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def acceptance(records: Sequence[Record]) -> dict[str, Any]:
  """Tau, histogram and rates over all passes of the records.

  Raises:
    MeasurementError: see `check_identity`.
  """
  for record in records:
    check_identity(record)
  emitted, drafted, accepted = (
    _steps(records, f"{field}_per_step")
    for field in ("emitted", "drafted", "accepted")
  )
  depths = np.concatenate(
    [np.asarray(_depths(r), np.int64) for r in records]
    or [np.zeros(0, np.int64)]
  )
  longest = int(depths.max(initial=0))
  positions = np.arange(1, longest + 1)
  reached = (accepted[None] >= positions[:, None]).sum(axis=1)
  offered = (
    (accepted[None] >= positions[:, None] - 1)
    & (depths[None] >= positions[:, None])
  ).sum(axis=1)
  whole = emitted == accepted + 1
  tau_whole = _ratio(int(emitted[whole].sum()), int(whole.sum()))
  by_length = {
    str(d): np.bincount(accepted[depths == d], minlength=d + 1).tolist()
    for d in np.unique(depths).tolist()
  }
  passes_with_draft = int((drafted > 0).sum())
  return {
    "verify_passes": emitted.size,
    "cut_passes": int((~whole).sum()),
    "drafted_tokens": int(drafted.sum()),
    "accepted_tokens": int(accepted.sum()),
    "acceptance_length_uncut": tau_whole,
    "histogram": np.bincount(accepted, minlength=longest + 1).tolist(),
    "histogram_by_draft_length": by_length,
    "unconditional_rates": [float(n / accepted.size) for n in reached],
    "conditional_rates": [
      _ratio(int(n), int(of)) for n, of in zip(reached, offered, strict=True)
    ],
    "spec_decode_num_drafts": passes_with_draft,
    "spec_decode_draft_tokens": int(drafted.sum()),
    "spec_decode_accepted_tokens": int(accepted.sum()),
    "spec_decode_acceptance_rate": (
      100 * accepted.sum() / drafted.sum() if drafted.any() else None
    ),
    "spec_decode_acceptance_length": (
      1 + accepted.sum() / passes_with_draft if passes_with_draft else None
    ),
    "spec_decode_per_position_acceptance_rates": [
      _ratio(int(n), passes_with_draft) for n in reached
    ],
  }


def _tau(records: Sequence[Record]) -> tuple[float | None, float | None]:
  """Pooled, and the mean over requests."""
  tokens = [len(r["output_ids"]) for r in records]
  passes = [len(r["metrics"]["emitted_per_step"]) for r in records]
  each = [t / p for t, p in zip(tokens, passes, strict=True)]
  return _ratio(sum(tokens), sum(passes)), _ratio(sum(each), len(each))


def _taus(records: Sequence[Record]) -> dict[str, float | None]:
  """Both kinds of tau, of all requests and of those that did not loop."""
  out = {}
  ended = [r for r in records if r["finish_reason"] != LOOP]
  for suffix, members in (("", records), ("_without_loops", ended)):
    pooled, each = _tau(members)
    out[f"acceptance_length{suffix}"] = pooled
    out[f"acceptance_length_per_request{suffix}"] = each
  return out


def _rates(records: Sequence[Record]) -> dict[str, float | None]:
  """Tokens per second, prefill included and not.

  Of a load they are those of the whole, per second of its duration; what single
  requests get is in their TPOT.
  """
  tokens = sum(len(r["output_ids"]) for r in records)
  e2el = serving.duration_ms(records)
  if serving.is_load(records):
    throughput = _ratio(1e3 * tokens, e2el)
    return {"output_throughput": throughput, "decode_throughput": None}
  ttft = sum(r["metrics"]["ttft_ms"] for r in records)
  return {
    "output_throughput": _ratio(1e3 * tokens, e2el),
    "decode_throughput": _ratio(1e3 * (tokens - len(records)), e2el - ttft),
  }


def _group(records: Sequence[Record]) -> dict[str, Any]:
  """Some requests of a system. Under a load they have no speed: while they were
  served others were too. Then there is their mean TPOT."""
  rates: dict[str, Any] = _rates(records)
  if serving.is_load(records):
    tpot = [r["metrics"]["tpot_ms"] for r in records]
    tpot = [ms for ms in tpot if ms is not None]
    rates = dict.fromkeys(rates)
    rates["mean_tpot_ms"] = _ratio(sum(tpot), len(tpot))
  return {
    "requests": len(records),
    "output_tokens": sum(len(r["output_ids"]) for r in records),
    "loop_requests": sum(r["finish_reason"] == LOOP for r in records),
    **_taus(records),
    **rates,
  }


def length_bucket(tokens: int) -> str:
  """Which range of output lengths a request falls into."""
  at = int(np.searchsorted(LENGTH_EDGES, tokens, side="left"))
  low = LENGTH_EDGES[at - 1] + 1
  return f"{low}-{LENGTH_EDGES[at]}" if at < len(LENGTH_EDGES) else f"{low}+"


def _grouped(records: Sequence[Record], key) -> dict[str, Any]:
  groups: dict[str, list[Record]] = {}
  for record in sorted(records, key=lambda r: len(r["output_ids"])):
    groups.setdefault(key(record), []).append(record)
  return {name: _group(members) for name, members in groups.items()}


def paired_speedup(
  records: Sequence[Record], reference: Sequence[Record]
) -> dict[str, Any] | None:
  """Geometric mean of the TPOT ratios of the same requests.

  Returns:
    `geomean`, its 95 % interval `ci95` (Student's t on the logarithms) and
    the number of `requests`; None with fewer than two.
  """
  by_id = {r["request"]: r["metrics"]["tpot_ms"] for r in reference}
  logs = [
    math.log(by_id[r["request"]] / r["metrics"]["tpot_ms"])
    for r in records
    if r["metrics"]["tpot_ms"] and by_id.get(r["request"])
  ]
  if len(logs) < 2:
    return None
  mean, error = np.mean(logs), stats.sem(logs)
  half = stats.t.ppf(0.975, len(logs) - 1) * error
  return {
    "geomean": math.exp(mean),
    "ci95": [math.exp(mean - half), math.exp(mean + half)],
    "requests": len(logs),
  }


def summarize(
  records: Sequence[Record], reference: Sequence[Record]
) -> dict[str, Any]:
  """The entry of one system in result.json.

  Args:
    records: of that system, at least one.
    reference: of autoregressive decoding; empty where it was not run.
  """
  loops = [r for r in records if r["finish_reason"] == LOOP]
  metrics = [r["metrics"] for r in records]
  duration_ms = serving.duration_ms(records)
  inputs = sum(len(r["prompt_ids"]) for r in records)
  outputs = sum(len(r["output_ids"]) for r in records)
  rates = _rates(records)
  base = _rates(reference)
  result: dict[str, Any] = {
    **rates,
    **_spread([m["tpot_ms"] for m in metrics], "tpot"),
    **_spread([m["ttft_ms"] for m in metrics], "ttft"),
    **_spread([gap for m in metrics for gap in m["itl_ms"]], "itl"),
    **_spread([m["e2el_ms"] for m in metrics], "e2el"),
    **_taus(records),
    "requests": len(records),
    "completed": len(records),
    "output_tokens": outputs,
    "total_input_tokens": inputs,
    "total_output_tokens": outputs,
    "loop_requests": len(loops),
    "finish_reasons": {
      reason: sum(r["finish_reason"] == reason for r in records)
      for reason in sorted({r["finish_reason"] for r in records})
    },
    "duration": duration_ms / 1e3,
    "request_throughput": _ratio(1e3 * len(records), duration_ms),
    "total_token_throughput": _ratio(1e3 * (inputs + outputs), duration_ms),
    "speedup_vs_ar": _over(rates, base, "output_throughput"),
    "decode_speedup_vs_ar": _over(rates, base, "decode_throughput"),
    "paired_speedup_vs_ar": paired_speedup(records, reference),
    "same_output_as_ar": same_outputs(records, reference),
    "acceptance": acceptance(records),
    "domains": _grouped(records, lambda r: r["domain"]),
    "lengths": _grouped(records, lambda r: length_bucket(len(r["output_ids"]))),
  }
  if serving.is_load(records):
    queue = [m["queue_ms"] for m in metrics]
    result |= _spread(queue, "queue") | serving.figures(records)
  return result


def _over(rates, base, field: str) -> float | None:
  if rates[field] is None or not base[field]:
    return None
  return rates[field] / base[field]


def same_outputs(
  records: Sequence[Record], reference: Sequence[Record]
) -> int | None:
  """Requests whose output equals autoregressive decoding's; None without."""
  if not reference:
    return None
  by_id = {r["request"]: r["output_ids"] for r in reference}
  return sum(by_id.get(r["request"]) == r["output_ids"] for r in records)
