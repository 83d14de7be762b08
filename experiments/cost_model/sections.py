"""The cost model's part of a report, from result.json alone."""

from collections.abc import Mapping
from typing import Any

from experiments import plots
from experiments.blocks import Block, Heading, Plot, Table, Text
from experiments.console import number
from experiments.cost_model import budgets, compare, kernels, two_level
from experiments.cost_model import model as model_lib
from experiments.settings import STOCK
from specpilot_jax import configs

_DEFINITIONS = (
  "ceiling = tau factor x kernel factor x overhead factor. Tau factor: the"
  " best-first tree at its best budget and depth (most tokens per floor time),"
  " over"
  " stock's chain; both replayed on the lattices along stock's recorded outputs"
  " that did not loop. Kernel factor: profiled step time, the union of kernel"
  " intervals, over the sum of the classes' floors in a step of that tree."
  " Overhead factor: measured step time over profiled step time.",
  "Floor of a class: the longer of its FLOPs and its bytes at the rates that"
  " the table's source names, counted from the configurations of target and"
  " drafter.",
)


def factors_line(model: Mapping[str, Any]) -> str:
  """The three factors and their product, for console and report."""
  overhead = number(model["overhead_factor"], 3)
  return (
    f"cost model: ceiling {number(model['ceiling_speedup'], 2, 'x')} = tau"
    f" {model['tau_factor']:.3f} x kernel {model['kernel_factor']:.3f} x"
    f" overhead {overhead}; largest: {model['largest']}"
    + ("" if model["timing"] == model_lib.PROFILED else f" ({model['timing']})")
  )


def lines(model: Mapping[str, Any]) -> list[str]:
  """What the console says: factors, steps of each system, replays."""
  out = [factors_line(model)]
  for name, system in model["systems"].items():
    shares = ", ".join(
      f"{kind.replace('_', ' ')} {c['measured_us']:.0f}"
      for kind, c in system["classes"].items()
      if c["measured_us"]
    )
    out.append(
      f"step of {name}: {number(system['profiled_step_us'], 0)} us"
      f" {model['timing']} ({shares}), floor"
      f" {number(system['floor_step_us'], 0)} us, overhead factor"
      f" {number(system['overhead_factor'], 3)}"
    )
  for name, step in model.get("others", {}).items():
    shares = ", ".join(
      f"{kind.replace('_', ' ')} {us:.0f}"
      for kind, us in step["classes_us"].items()
      if us
    )
    out.append(
      f"step of {name}: {number(step['profiled_step_us'], 0)} us"
      f" {model['timing']} ({shares})"
    )
  ratio = model.get("verify_over_ar_step")
  if ratio is not None:
    nodes = model["systems"][STOCK]["nodes"]
    out.append(
      f"verify of {nodes} nodes: {ratio:.3f} times a step of autoregressive"
      " decoding"
    )
  stock = model["replay"]["stock"]
  out.append(
    f"replay of stock: {stock['steps_agreeing']} of {stock['steps']} steps, tau"
    f" {stock['tau']:.3f}, measured {stock['tau_measured']:.3f}"
  )
  if model["replay"].get("level_one"):
    found = model["replay"]["level_one"]
    out.append(two_level.describe(found))
    out.append(
      "two levels, replayed (approximated): tau "
      + ", ".join(
        f"{p['tau']:.2f} ({p['tree']} of {p['nodes']}"
        + (")" if p["passes"] == 1 else f", {p['passes']} passes)")
        for p in found["policies"]
      )
    )
  out += [compare.describe(run) for run in model["replay"]["real_runs"]]
  out += [
    budgets.describe(source, found)
    for source, found in model["replay"]["pass_times"].items()
  ]
  return out


def blocks(model: Mapping[str, Any]) -> list[Block]:
  """Factors, classes, replays; tables and plots."""
  timing = (
    "Step times are unions of kernel intervals under the JAX profiler."
    if model["timing"] == model_lib.PROFILED
    else "Classes were timed separately, as executables of their own; class"
    " other is what is left of the whole step, timed alone."
  )
  out: list[Block] = [
    Heading("Cost model"),
    Text(factors_line(model), "verdict"),
    *(Text(f"Note: {note}") for note in model["notes"]),
    Text(f"{timing} Rates: {model['roofline']['source']}."),
  ]
  steps = _waterfall(model)
  if steps:
    out.append(
      Plot(
        "From the measured time of a token to its ceiling",
        plots.waterfall(steps, "microseconds per output token"),
      )
    )
  # The floors of what was measured, as in the table: those of the best tree's
  # step are of more nodes.
  shown = {
    name: {field: c[field] for field in ("measured_us", "floor_us")}
    for name, c in model["systems"][STOCK]["classes"].items()
    if c["measured_us"] > 0
  }
  out += [
    _systems(model),
    *_verify(model),
    _classes(model),
    *_others(model),
    Plot(
      "Kernel classes of stock against floors", plots.classes_and_floors(shown)
    ),
    *_replay(model),
    *_heaviest(model),
    *(Text(line) for line in _DEFINITIONS),
  ]
  return out


def _waterfall(model) -> list[tuple[str, float]] | None:
  stock = model["systems"][STOCK]
  if stock["measured_step_us"] is None:
    return None
  tau = model["replay"]["stock"]["tau"]
  best = model["best_tree"]
  return [
    ("measured", stock["measured_step_us"] / tau),
    ("overhead", stock["profiled_step_us"] / tau),
    ("kernels", best["floor_us"] / tau),
    ("tau", best["floor_us"] / best["tau"]),
    ("ceiling", best["floor_us"] / best["tau"]),
  ]


def _systems(model) -> Table:
  return Table(
    (
      "step of",
      "nodes",
      "measured us",
      f"us {model['timing']}",
      "floor us",
      "kernel factor",
      "overhead factor",
      "kernels",
      "other",
    ),
    tuple(
      (
        name,
        str(s["nodes"]),
        number(s["measured_step_us"], 0),
        number(s["profiled_step_us"], 0),
        number(s["floor_step_us"], 0),
        number(s["kernel_factor"], 2),
        number(s["overhead_factor"], 3),
        number(s["kernels_per_step"], 0) if s["kernels_per_step"] else "-",
        number(100 * s["other_share"], 1, " %"),
      )
      for name, s in model["systems"].items()
    ),
  )  # fmt: skip


def _verify(model) -> list[Block]:
  return [
    Text(
      f"A step of {name} without the drafter ({s['nodes']} nodes) takes"
      f" {s['verify_over_ar_step']:.2f} times as long as a step of"
      " autoregressive decoding."
    )
    for name, s in model["systems"].items()
    if s.get("verify_over_ar_step") is not None
  ]


def _classes(model) -> Table:
  rows = []
  for name, system in model["systems"].items():
    for kind, c in system["classes"].items():
      if not c["measured_us"] and not c["floor_us"]:
        continue
      ratio = c["measured_us"] / c["floor_us"] if c["floor_us"] else None
      rows.append(
        (
          f"{name} {kind.replace('_', ' ')}",
          number(c["measured_us"], 1),
          number(c["floor_us"], 1),
          number(ratio, 2, "x"),
          number(c["bytes"] / 1e6, 1),
          number(c["flops"] / 1e9, 2),
        )
      )
  prefill = model["prefill_pass"]
  rows.append(
    (
      f"prefill pass of {prefill['rows']} tokens",
      number(prefill["measured_us"], 1),
      number(prefill["floor_us"], 1),
      number(prefill["measured_us"] / prefill["floor_us"], 2, "x"),
      "-",
      "-",
    )
  )
  return Table(
    ("class", "measured us", "floor us", "ratio", "MB", "GFLOP"), tuple(rows)
  )


def _others(model) -> list[Block]:
  """Steps of which no floors are counted."""
  found = model.get("others", {})
  if not found:
    return []
  return [
    Table(
      ("step of", "nodes", "us", *kernels.CLASSES, "kernels"),
      tuple(
        (
          name,
          str(s["nodes"]),
          number(s["profiled_step_us"], 0),
          *(number(s["classes_us"][kind], 0) for kind in kernels.CLASSES),
          number(s["kernels_per_step"], 0),
        )
        for name, s in found.items()
      ),
    )
  ]


_POLICIES = {
  configs.CHAIN: "chain",
  configs.BEST_FIRST: "best-first tree",
  configs.MARGINAL: "tree blind to parents",
  budgets.LIMITED: "best-first tree, limited depth",
}


def _replay(model) -> list[Block]:
  r = model["replay"]
  stock, policies, times = r["stock"], r["policies"], r["pass_times"]
  nodes = stock["drafts"] + 1
  rows = [
    (
      _name(tree, b)
      + (" (stock)" if (tree, b["nodes"]) == (configs.CHAIN, nodes) else ""),
      number(b["tau"], 3),
      number(b["tau_per_request"], 3),
      number(b["tau"] / stock["tau"], 3, "x"),
      number(b["floor_us"], 0),
      number(b["tau_per_floor_ms"], 3),
      *(number(b["tok_s"][source], 1) for source in times),
    )
    for tree, entries in policies.items()
    for b in entries
    # A depth that limits nothing is in the table already.
    if tree != budgets.LIMITED or b["depth"] is not None
  ]
  out: list[Block] = [
    Text(
      f"Replay: {r['requests']} requests, {r['positions']} positions. Stock's"
      f" chain repeats {stock['steps_agreeing']} of {stock['steps']} steps of"
      f" the run; tau {stock['tau']:.3f}, measured"
      f" {stock['tau_measured']:.3f}."
    ),
    Table(
      (
        "policy",
        "tau",
        "tau per request",
        "over stock",
        "floor us",
        "tokens per ms of floor",
        *(f"tok/s, pass times {source}" for source in times),
      ),
      tuple(rows),
    ),
    *(Text(f"{compare.describe(run)}.") for run in r["real_runs"]),
    *(
      Text(f"{budgets.describe(source, found)}.")
      for source, found in times.items()
    ),
    Plot(
      "Acceptance length by node budget",
      plots.tau_by_nodes(
        {_POLICIES[tree]: entries for tree, entries in policies.items()},
        _real_points(r, "tau_measured"),
      ),
    ),
  ]
  for source in times:
    found = {
      _POLICIES[tree]: [
        {"nodes": b["nodes"], "tok_s": b["tok_s"][source]}
        for b in entries
        if b["tok_s"][source] is not None
      ]
      for tree, entries in policies.items()
    }
    # A single measured pass is no sweep.
    if max(map(len, found.values())) > 1:
      out.append(
        Plot(
          f"Replayed speed by node budget, pass times {source}",
          plots.speed_by_nodes(found, _real_points(r, "tok_s", source)),
        )
      )
  return out


def _name(tree: str, entry) -> str:
  name = _POLICIES[configs.BEST_FIRST if tree == budgets.LIMITED else tree]
  depth = "" if entry["depth"] is None else f", {entry['depth']} deep"
  return f"{name} of {entry['nodes']} nodes{depth}"


def _real_points(r, field: str, weights: str | None = None):
  """What was measured at the budgets of real runs: policy to points."""
  out: dict[str, list[tuple[int, float]]] = {}
  for run in r["real_runs"]:
    if weights is not None and run["weights"] != weights:
      continue
    value = run["tau_measured"]
    if field == "tok_s":
      if run["step_us"] is None:
        continue
      value *= 1e6 / run["step_us"]
    out.setdefault(_POLICIES[run["tree"]], []).append((run["nodes"], value))
  return out


def _heaviest(model) -> list[Block]:
  rows = tuple(
    (
      f"{name} {k['kernel']}",
      k["class"].replace("_", " "),
      number(k["per_step"], 1),
      number(k["us_each"], 2),
      number(k["us_per_step"], 1),
    )
    for name, system in (model["systems"] | model.get("others", {})).items()
    for k in system["heaviest"]
  )
  if not rows:
    return []
  header = ("kernel", "class", "per step", "us each", "us per step")
  return [Table(header, rows, left=True)]
