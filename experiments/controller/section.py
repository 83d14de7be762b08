"""A paired test in a report and on the console."""

from collections.abc import Mapping
from typing import Any

from experiments import plots
from experiments.blocks import Block, Heading, Plot, Table, Text


def percent(value: float | None, digits: int = 2) -> str:
  """A share for people; a dash where there is none."""
  return "-" if value is None else f"{value:+.{digits}%}"


def line(test: Mapping[str, Any]) -> str:
  """The verdict on one line."""
  verdict = test["verdict"]
  text = f"paired test {test['id']}: {verdict['verdict']}"
  return f"{text} by {verdict['check']}: {verdict['reason']}"


def lines(test: Mapping[str, Any]) -> list[str]:
  """What the console says of a test."""
  out = []
  d = test["verdict"]["decision"]
  if d:
    out.append(
      f"gain {percent(d['gain'])}, lower bound {percent(d['bound'])}"
      f" (t {percent(d['t_bound'])}, BCa {percent(d['bca_bound'])}) over"
      f" {d['units']} units; s_AA"
      f" {'-' if d['s_aa'] is None else format(d['s_aa'], '.3%')} of"
      f" {test['aa_sessions']} A/A sessions, threshold"
      f" {'-' if d['threshold'] is None else format(d['threshold'], '.2%')}"
    )
  exact = test["verdict"]["exactness"]
  if exact:
    out.append(
      f"outputs: {exact['verdict']}: {exact['identical']} of"
      f" {exact['outputs']} are stock's, token for token; {exact['reason']}"
    )
  out.append(
    f"test {test['test']} of this deployment; chance of a false bound among"
    f" them, were all null: {test['familywise']:.1%}"
  )
  if test["stock_slowed"] is not None:
    out.append(
      f"stock beside the candidate against alone: time"
      f" {percent(test['stock_slowed'])}"
    )
  out += [f"isolation: {text}" for text in test["isolation"]["statement"]]
  out += [f"needs review: {text}" for text in test["review"][:10]]
  out.append(line(test))
  return out


def blocks(test: Mapping[str, Any]) -> list[Block]:
  """The section of a report."""
  verdict = test["verdict"]["verdict"]
  kind = {"accept": "pass", "reject": "fail", "refused": "fail"}.get(
    verdict, "inconclusive"
  )
  found: list[Block] = [
    Heading("Paired test"),
    Text(line(test), f"verdict {kind}"),
  ]
  found += [Text(text) for text in lines(test)[:-1]]
  r = test["log_ratios"]
  if r:
    d = test["verdict"]["decision"] or {}
    found.append(
      Plot(
        "Gain of each unit (a pair of requests in S C C S order), their"
        " geometric mean, its lower bound and the threshold.",
        plots.gains(r, d.get("bound"), d.get("threshold")),
      )
    )
  found.append(
    Table(
      ("tree", "root hash"),
      tuple((name, text) for name, text in test["trees"].items()),
      left=True,
    )
  )
  return found
