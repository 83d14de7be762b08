"""What a load adds to a system's figures, out of its request records.

A record of a load has, beside what every record has, the `level` it belongs to,
`arrival_s` (after the load's start), and in its metrics `queue_ms` (from the
arrival to the slot) and `pass_per_step` (the number of each of its passes, so
that passes which requests share are counted once). Times to the first and to
the last token count from the arrival: a request that waits to be sent is late.

Names are vLLM's where it has one.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specpilot_jax.errors import SpecPilotError

Record = Mapping[str, Any]

OBJECTIVES = ("ttft", "tpot", "e2el")
"""What a service may promise, in milliseconds at most."""


def is_load(records: Sequence[Record]) -> bool:
  """Whether these requests were served beside each other."""
  return any("arrival_s" in record for record in records)


def objectives(texts: Sequence[str]) -> dict[str, float]:
  """`ttft:200`, `tpot:50`, `e2el:2000` as a dictionary, in milliseconds.

  Raises:
    SpecPilotError: another name, no number, a name twice.
  """
  found: dict[str, float] = {}
  for text in texts:
    name, _, value = text.partition(":")
    try:
      limit = float(value)
    except ValueError:
      limit = math.nan
    if name not in OBJECTIVES or not 0 < limit < math.inf or name in found:
      raise SpecPilotError(
        f"goodput {text!r}: expected NAME:MILLISECONDS, each name once, of"
        f" {', '.join(OBJECTIVES)}"
      )
    found[name] = limit
  return found


@dataclasses.dataclass(frozen=True)
class _Spans:
  """Of every request in milliseconds after the load's start."""

  arrival: np.ndarray
  end: np.ndarray

  @classmethod
  def of(cls, records: Sequence[Record]) -> "_Spans":
    arrival = np.array([1e3 * r["arrival_s"] for r in records])
    length = np.array([r["metrics"]["e2el_ms"] for r in records])
    return cls(arrival, arrival + length)

  @property
  def duration_ms(self) -> float:
    return float(self.end.max() - self.arrival.min())

  def most_at_once(self) -> int:
    """Requests between their arrival and their end; an end comes first."""
    times = np.concatenate([self.end, self.arrival])
    change = np.repeat([-1, 1], self.end.size)
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max())


def duration_ms(records: Sequence[Record]) -> float:
  """From the first arrival to the last token; one after another: the sum."""
  if is_load(records):
    return _Spans.of(records).duration_ms
  return float(sum(r["metrics"]["e2el_ms"] for r in records))


def figures(records: Sequence[Record]) -> dict[str, Any]:
  """The entries of result.json that only a load has.

  `nodes_per_pass` counts anchors and drafts of all requests of a pass;
  `max_output_tokens_per_s` is over whole seconds, counted from the first
  arrival. `steady_throughput` leaves out the start and the end of a closed loop
  of N requests: it is over the `steady_s` from when N requests have emitted to
  the first end behind the last arrival; None of other loads, and where there is
  no such time.

  Args:
    records: of one system at one level, at least one.
  """
  spans = _Spans.of(records)
  shared: dict[int, int] = {}
  for r in records:
    m = r["metrics"]
    for number, drafts in zip(
      m["pass_per_step"], m["drafted_per_step"], strict=True
    ):
      shared[number] = shared.get(number, 0) + 1 + drafts
  passes = len(shared)
  steps = sum(len(r["metrics"]["pass_per_step"]) for r in records)
  seconds = np.zeros(int(spans.duration_ms // 1e3) + 1, np.int64)
  start, end = _steady(records, spans)
  inside = 0
  for r, arrival in zip(records, spans.arrival, strict=True):
    m = r["metrics"]
    times = arrival - spans.arrival.min() + m["ttft_ms"]
    times = times + np.concatenate([[0], np.cumsum(m["itl_ms"])])
    at = np.minimum(times // 1e3, seconds.size - 1).astype(int)
    np.add.at(seconds, at, m["emitted_per_step"])
    counts = (start < times) & (times <= end)
    inside += int(np.asarray(m["emitted_per_step"])[counts].sum())
  level = records[0]["level"]
  wanted = level["goodput"]
  good = sum(_meets(r["metrics"], wanted) for r in records)
  return {
    "level": level,
    "request_goodput": (
      1e3 * good / spans.duration_ms if wanted and spans.duration_ms else None
    ),
    "good_requests": good if wanted else None,
    "max_concurrent_requests": spans.most_at_once(),
    "max_output_tokens_per_s": int(seconds.max()),
    "steady_s": (end - start) / 1e3 if end > start else None,
    "steady_throughput": 1e3 * inside / (end - start) if end > start else None,
    "passes": passes,
    "requests_per_pass": steps / passes,
    "nodes_per_pass": sum(shared.values()) / passes,
    "tokens_per_pass": sum(len(r["output_ids"]) for r in records) / passes,
  }


def _steady(records: Sequence[Record], spans: _Spans) -> tuple[float, float]:
  """When a closed loop is as full as it gets, in milliseconds after the first
  arrival; an empty time where it never is, or is none."""
  level = records[0]["level"]
  most = level.get("max_concurrency")
  closed = level.get("request_rate") == "inf" and not level.get("recorded")
  if not closed or most is None or len(records) <= most:
    return 0.0, 0.0
  ttft = np.array([r["metrics"]["ttft_ms"] for r in records])
  start = np.sort(spans.arrival + ttft)[most - 1]
  later = spans.end[spans.end > spans.arrival.max()]
  first = spans.arrival.min()
  return float(start - first), float(later.min() - first)


def _meets(metrics: Mapping[str, Any], wanted: Mapping[str, float]) -> bool:
  """A single token has no TPOT, and keeps what is promised of it."""
  return all(
    metrics[f"{name}_ms"] is None or metrics[f"{name}_ms"] <= limit
    for name, limit in wanted.items()
  )
