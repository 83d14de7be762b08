"""An ablation in a report and on the console, from result.json alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import metrics, plots
from experiments.ablation.design import (
  ALL,
  ALL_BUT,
  GRID,
  MECHANISMS,
  ONE_AT_A_TIME,
)
from experiments.blocks import Block, Heading, Plot, Table, Text
from experiments.console import number, table

DEFINITION = (
  "Ablation: every system decodes the same requests, in turn, in an order that"
  " turns around. A ratio is TPOT of the system behind `over` by TPOT of the"
  " other, the geometric mean over their requests with its 95 % interval"
  " (Student's t on the logarithms): above 1 is faster. Each interval is of one"
  " comparison, in one process; promotion is the controller's paired test."
)
_UNDER_LOAD = (
  "Each system served a load once, one after the other, and requests of a load"
  " share passes: the intervals are of requests within these servings. What the"
  " machine did from one to the next is in the ratios and not in the intervals;"
  " repeat the run before believing them."
)
_DESIGNS = {
  GRID: "every combination of the values",
  ONE_AT_A_TIME: "one option at a time, the others at their first values",
  MECHANISMS: "each mechanism alone, all, and all but each",
}

Told = Mapping[str, Any]


def _levels(told: Told) -> list[str]:
  """Suffixes of the loads; one that is empty where requests came singly."""
  names = [c[side] for c in told["comparisons"] for side in ("of", "against")]
  return list(dict.fromkeys(metrics.at_level("", name) for name in names))


def _found(told: Told, of: str, against: str) -> Told | None:
  for comparison in told["comparisons"]:
    if (comparison["of"], comparison["against"]) == (of, against):
      return comparison
  return None


def _ratio(comparison: Told | None) -> str:
  """A ratio and its interval; a dash where there is none."""
  if comparison is None or comparison["tpot_ratio"] is None:
    return "-"
  low, high = comparison["ci95"]
  return f"{comparison['tpot_ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _same(comparison: Told | None) -> str:
  if comparison is None:
    return "-"
  return f"{comparison['same_output']} of {comparison['outputs']}"


def _figures(system: Told | None) -> tuple[str, ...]:
  if system is None:
    return ("-", "-", "-")
  return (
    number(system["output_throughput"], 1),
    number(system["acceptance_length"]),
    number(system["mean_tpot_ms"], 2),
  )


def _over(told: Told) -> list[str]:
  """What the arms of values are held against."""
  return list(dict.fromkeys((told["reference"], told["baseline"])))


def _label(told: Told, name: str) -> str:
  """The arm that a system stands for; its first one."""
  labels = [label for label, system in told["arms"].items() if system == name]
  return labels[0] if labels else name


def header_and_rows(
  result: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
  """The table: a row for each arm and load, or for each mechanism and load."""
  told, systems = result["ablation"], result["systems"]
  if told["design"] == MECHANISMS:
    return _of_mechanisms(told, systems)
  over = _over(told)
  header = (
    "arm", "tok/s", "tau", "TPOT ms", *(f"over {name}" for name in over),
    "same output",
  )  # fmt: skip
  rows = []
  for level in _levels(told):
    for label, name in told["arms"].items():
      found = [_found(told, name + level, other + level) for other in over]
      title = label if name == label else f"{label} ({name})"
      rows.append(
        (
          title + level,
          *_figures(systems.get(name + level)),
          *map(_ratio, found),
          _same(next(filter(None, found), None)),
        )
      )
  return header, tuple(rows)


def _of_mechanisms(told: Told, systems):
  base = told["baseline"]
  header = (
    "mechanism", "alone tok/s", "tau", f"alone over {base}", "without it tok/s",
    "tau", "all over all without it", f"same output as {base}",
  )  # fmt: skip
  rows = []
  everything = told["arms"][ALL]
  for level in _levels(told):
    for name, settings in told["axes"].items():
      alone = told["arms"][",".join(settings)] + level
      without = told["arms"][ALL_BUT + name] + level
      one = _found(told, alone, base + level)
      rows.append(
        (
          ",".join(settings) + level,
          *_figures(systems.get(alone))[:2],
          _ratio(one),
          *_figures(systems.get(without))[:2],
          _ratio(_found(told, everything + level, without)),
          _same(one),
        )
      )
    whole = _found(told, everything + level, base + level)
    rows.append(
      (
        ALL + level,
        *_figures(systems.get(everything + level))[:2],
        _ratio(whole),
        *_figures(systems.get(base + level))[:2],
        _ratio(whole),
        _same(whole),
      )
    )
  return header, tuple(rows)


def _headline(told: Told) -> str:
  axes = "; ".join(
    f"{name}: {', '.join(values)}" for name, values in told["axes"].items()
  )
  return f"ablation, {_DESIGNS[told['design']]}: {axes}"


def _diverged(told: Told) -> Iterator[str]:
  for c in told["comparisons"]:
    if c["same_output"] != c["outputs"]:
      yield (
        f"{c['of']} and {c['against']} differ in"
        f" {c['outputs'] - c['same_output']} of {c['outputs']} outputs: their"
        " times are of other tokens"
      )


def lines(result: Mapping[str, Any]) -> list[str]:
  """What the console says."""
  told = result["ablation"]
  if not told["comparisons"]:
    return [f"{_headline(told)}: nothing was decoded to compare"]
  out = [_headline(told), table(*header_and_rows(result)), *_diverged(told)]
  return [*out, f"note: {_UNDER_LOAD}"] if any(_levels(told)) else out


def _intervals(told: Told) -> dict[str, list[tuple[str, float, float, float]]]:
  """Label, ratio and ends of its interval, by what they are over."""
  # The one that every arm is in comes first, and with it their order.
  groups: dict[str, list[tuple[str, float, float, float]]] = {
    f"over {told['baseline']}": []
  }
  for c in told["comparisons"]:
    if c["tpot_ratio"] is None:
      continue
    level = metrics.at_level("", c["of"])
    of = c["of"].removesuffix(level)
    against = c["against"].removesuffix(level)
    group, label = f"over {against}", _label(told, of)
    added = told["design"] == MECHANISMS and against != told["baseline"]
    if added:
      # One series of what each mechanism adds to the others.
      dropped = next(
        name for name in told["axes"] if told["arms"][ALL_BUT + name] == against
      )
      group = "all over all without it"
      label = ",".join(told["axes"][dropped])
    groups.setdefault(group, []).append(
      (label + level, c["tpot_ratio"], *c["ci95"])
    )
  return {group: rows for group, rows in groups.items() if rows}


def blocks(result: Mapping[str, Any]) -> list[Block]:
  """The section of a report."""
  told = result["ablation"]
  found: list[Block] = [Heading("Ablation"), Text(_headline(told))]
  if not told["comparisons"]:
    return [*found, Text("Nothing was decoded to compare.")]
  found += [Table(*header_and_rows(result)), *map(Text, _diverged(told))]
  groups: Mapping[str, Sequence[tuple[str, float, float, float]]]
  groups = _intervals(told)
  if groups:
    found.append(
      Plot(
        "Decoding speed of the same requests, with 95 % intervals",
        plots.forest(groups, "ratio of TPOT; above 1 is faster"),
      )
    )
  found.append(Text(DEFINITION))
  if any(_levels(told)):
    found.append(Text(_UNDER_LOAD))
  return found
