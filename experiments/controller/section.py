"""A paired test in a report and on the console."""

import math
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


def device_lines(devices: Mapping[str, Any] | None) -> list[str]:
  """What two devices differ by, and what the swap takes out of it."""
  if devices is None:
    return []
  one, two = devices["indices"]
  out = []
  swap, differ = devices["swap"], devices["aa_asymmetries"]
  if swap:
    error = swap["standard_error"]
    fixed, own = (
      [percent(math.expm1(r)) for r in swap[field]]
      for field in ("unswapped", "by_device")
    )
    out.append(
      f"device {two} against device {one}: time"
      f" {percent(math.expm1(swap['asymmetry']))} (standard error"
      f" {'-' if error is None else format(error, '.2%')}); without the swap"
      f" the mean gain would be {fixed[0]} with the candidate on {one} and"
      f" {fixed[1]} on {two}"
    )
    out.append(
      f"gain on device {one} {own[0]}, on device {two} {own[1]}, with what the"
      " machine drifted between the halves"
    )
  if differ:
    without = devices["aa_unswapped"]
    told = ", ".join(percent(math.expm1(a)) for a in differ)
    text = f"A/A: device {two} against device {one}, by session: {told}"
    if without and devices["s_aa"] is not None:
      text += (
        f"; s_AA {devices['s_aa']:.3%}, and {without[0]:.3%} or"
        f" {without[1]:.3%} without the swap"
      )
    out.append(text)
  return out


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
  out += device_lines(test.get("devices"))
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
    unit = "a pair of requests in S C C S order"
    if test.get("devices"):
      unit = "a request on both devices"
    found.append(
      Plot(
        f"Gain of each unit ({unit}), their geometric mean, its lower bound and"
        " the threshold.",
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
