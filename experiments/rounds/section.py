"""A round in a report and on the console."""

import json
from collections.abc import Mapping
from typing import Any

from experiments import plots
from experiments.blocks import Block, Heading, Plot, Table, Text
from experiments.console import table
from experiments.controller import section

HEADER = ("candidate", "screened", "measured", "bound", "verdict")


def _rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
  return [
    (
      t["option"] or t["task"],
      section.percent(t["evidence"], 1),
      section.percent(t["measured"], 2),
      section.percent(t["lcb"], 2),
      t["verdict"],
    )
    for t in result["trials"]
  ]


def lines(result: Mapping[str, Any]) -> list[str]:
  """What the console says of a finished round."""
  f = result["round"]["factors"]
  told = " x ".join(
    f"{name} {'not measured' if f[name] is None else format(f[name], '.3f')}"
    for name in ("tau", "kernel", "overhead")
  )
  out = [f"phase 0: {told} of {f['of']}; largest: {f['largest']}"]
  out.append(table(HEADER, _rows(result)))
  for t in result["trials"]:
    out.append(f"{t['option'] or t['task']}: {t['verdict']}: {t['reason']}")
  found = result["round"]
  if found.get("reused") or found.get("discovered"):
    out.append(
      f"accepted: {len(found['discovered'])} discovered,"
      f" {len(found['reused'])} reused from the memory"
      f" ({', '.join(result['memory']) or 'none'})"
    )
  s_aa = result["round"]["s_aa"]
  out.append(
    f"s_AA {'-' if s_aa is None else format(s_aa, '.3%')} of"
    f" {len(result['round']['aa_means'])} A/A sessions; chance of a false bound"
    f" among all tests, were all null: {result['round']['familywise']:.1%}"
  )
  # Rounds from before there were two devices say nothing of them.
  out += section.device_lines(result["round"].get("devices"))
  sealed = result["sealed"]
  if sealed is None:
    start = result["round"].get("start")
    out.append(
      f"champion: as before, nothing was added: {json.dumps(start)[:500]}"
      if start
      else "champion: none, nothing was accepted"
    )
  else:
    speedup = sealed["speedup_vs_stock"]
    out.append(
      f"sealed: {sealed['verdict']}: {sealed['reason']}; over stock"
      f" {'-' if speedup is None else format(speedup, '.3f')}x, lower bound"
      f" {section.percent(sealed['lcb'])}; {sealed['tokens_forced']} tokens of"
      " long outputs forced"
    )
    over_ar = f.get("stock_over_ar")
    if speedup is not None and over_ar is not None:
      out.append(
        f"over autoregressive decoding {speedup * over_ar:.2f}x: stock's"
        f" {over_ar:.2f}x of phase 0, times that"
      )
    out.append(f"champion: {json.dumps(result['champion'])[:500]}")
  return out


def blocks(result: Mapping[str, Any]) -> list[Block]:
  """The section of a report: the story of a round, phase by phase."""
  told = result["round"]
  every = lines(result)
  found: list[Block] = [Heading("Round")]
  known = [text for text in every if text.startswith("accepted: ")]
  end = next(i for i, text in enumerate(every) if text.startswith("s_AA "))
  found += [Text(text) for text in (every[0], *known, *every[end:])]
  found.append(
    Table(
      ("direction", "gain at most"),
      tuple(
        (d["id"], section.percent(d["bound"], 1)) for d in told["directions"]
      ),
    )
  )
  found.append(Table(HEADER, tuple(_rows(result))))
  found += [
    Text(f"{t['option'] or t['task']}: {t['verdict']}: {t['reason']}")
    for t in result["trials"]
  ]
  sealed = result["sealed"]
  if sealed and sealed["timed"]["log_ratios"]:
    timed = sealed["timed"]
    found.append(
      Plot(
        "The sealed test: gain over stock of each unit.",
        plots.gains(timed["log_ratios"], timed["bound"], timed["threshold"]),
      )
    )
  found += [Text(f"Isolation: {x}") for x in told["isolation"]["statement"]]
  return found
