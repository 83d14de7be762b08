"""Loads in a report and on the console."""

from collections.abc import Mapping
from typing import Any

from experiments.blocks import Block, Heading, Table, Text
from experiments.console import number

HEADER = (
  "system", "tok/s", "vs ar", "vs stock", "steady", "vs stock", "TTFT p50",
  "p99", "TPOT p50", "p99 ms", "tau", "nodes/pass", "requests/pass",
  "queue p99", "good/s",
)  # fmt: skip

FULL = 0.8
"""Share of a closed loop's requests that decode in a pass, below which its
figures are those of another load."""

DEFINITIONS = (
  "Loads: NAME@cN keeps N requests on their way, NAME@Rrps sends R a second."
  " tok/s is output tokens over the time from the first arrival to the last"
  " token; steady leaves out a closed loop's start, until N requests have"
  " emitted, and its end, from when fewer than N are on their way. TTFT"
  " counts from the arrival, the queue is from the arrival to a slot. A pass"
  " verifies the anchors and drafts of several requests: nodes per pass counts"
  " them all. Each load is served by every system in turn, in an order that"
  " turns around from load to load."
)


def rows(systems: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
  """A row for each system and load, under `HEADER`."""
  return tuple(
    (
      name,
      number(s["output_throughput"], 1),
      number(s["speedup_vs_ar"], 2, "x"),
      number(s["speedup_vs_stock"], 2, "x"),
      number(s["steady_throughput"], 1),
      number(s["steady_speedup_vs_stock"], 2, "x"),
      number(s["p50_ttft_ms"], 0),
      number(s["p99_ttft_ms"], 0),
      number(s["p50_tpot_ms"], 2),
      number(s["p99_tpot_ms"], 2),
      number(s["acceptance_length"]),
      number(s["nodes_per_pass"], 1),
      number(s["requests_per_pass"], 1),
      number(s["p99_queue_ms"], 0),
      number(s["request_goodput"], 2),
    )
    for name, s in systems.items()
    if "level" in s
  )


def blocks(systems: Mapping[str, Any]) -> list[Block]:
  """The loads of a report; none where requests came one at a time."""
  found = rows(systems)
  if not found:
    return []
  return [Heading("Loads"), Text(DEFINITIONS), Table(HEADER, found)]


def notes(systems: Mapping[str, Any]) -> list[str]:
  """What a reader must know of closed loops that were not full."""
  found = []
  for name, s in systems.items():
    most = s.get("level", {}).get("max_concurrency")
    if s.get("steady_throughput") is None or most is None:
      continue
    if s["requests_per_pass"] < FULL * most:
      found.append(
        f"{name}: {s['requests_per_pass']:.1f} requests in a pass, not"
        f" {most}: the others waited for their prompts to be read"
      )
  return found
