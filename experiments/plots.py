"""The plots of a report, as PNG bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Systems = Mapping[str, Mapping[str, Any]]

# Distinct for readers with colour-blindness too (Okabe and Ito's palette, then
# Tol's muted one). A system has one colour in all plots.
_COLOURS = {"ar": "#888888", "stock": "#0072b2", "candidate": "#d55e00"}
_OTHERS = (
  "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#117733", "#999933",
  "#332288",
)  # fmt: skip


def _png(figure: Figure) -> bytes:
  out = io.BytesIO()
  # No software tag: it would carry an address.
  figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
  return out.getvalue()


def _axes(width: float = 6.4, height: float = 3.4):
  figure = Figure(figsize=(width, height), layout="constrained")
  axes = figure.subplots()
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(axis="y", alpha=0.25)
  axes.set_axisbelow(True)
  return figure, axes


def _colours(names: Sequence[str]) -> dict[str, str]:
  others = [name for name in names if name not in _COLOURS]
  return _COLOURS | {
    name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)
  }


def _legend(axes) -> None:
  """Above the plot, where it hides nothing; as many columns as fit, and a
  figure as high as its lines need."""
  _, labels = axes.get_legend_handles_labels()
  longest = max(map(len, labels), default=0)
  columns = min(4, max(1, 85 // (longest + 8)))
  height = axes.figure.get_figheight()
  axes.figure.set_figheight(height + 0.2 * (-(-len(labels) // columns) - 1))
  axes.legend(
    frameon=False,
    loc="lower left",
    bbox_to_anchor=(0, 1),
    ncols=columns,
    fontsize=9,
  )


def speed_by_group(systems: Systems, field: str, label: str) -> bytes:
  """Bars of tokens per second, by domain or by output length."""
  groups = list(dict.fromkeys(g for s in systems.values() for g in s[field]))
  figure, axes = _axes()
  width = 0.8 / len(systems)
  colours = _colours(list(systems))
  for i, (name, system) in enumerate(systems.items()):
    speeds = [
      (system[field].get(g) or {}).get("output_throughput") or 0 for g in groups
    ]
    at = np.arange(len(groups)) + (i - (len(systems) - 1) / 2) * width
    bars = axes.bar(at, speeds, width * 0.92, label=name, color=colours[name])
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
  axes.set_xticks(range(len(groups)), groups)
  axes.set_xlabel(label)
  axes.set_ylabel("output tokens per second")
  _legend(axes)
  return _png(figure)


def histogram(systems: Systems) -> bytes:
  """Share of verify passes by number of accepted drafts."""
  figure, axes = _axes()
  width = 0.8 / len(systems)
  colours = _colours(list(systems))
  for i, (name, system) in enumerate(systems.items()):
    counts = np.asarray(system["acceptance"]["histogram"], float)
    at = np.arange(counts.size) + (i - (len(systems) - 1) / 2) * width
    axes.bar(
      at, counts / counts.sum(), width * 0.92, label=name, color=colours[name]
    )
  longest = max(len(s["acceptance"]["histogram"]) for s in systems.values())
  axes.set_xticks(range(longest))
  axes.set_xlabel("accepted drafts of a verify pass")
  axes.set_ylabel("share of passes")
  _legend(axes)
  return _png(figure)


def position_rates(systems: Systems) -> bytes:
  """Acceptance rates per position, unconditional and conditional."""
  figure, axes = _axes()
  colours = _colours(list(systems))
  for name, system in systems.items():
    for field, style in (("unconditional", "-"), ("conditional", "--")):
      rates = system["acceptance"][f"{field}_rates"]
      axes.plot(
        np.arange(1, len(rates) + 1),
        [np.nan if r is None else r for r in rates],
        style,
        marker="o",
        markersize=4,
        color=colours[name],
        label=f"{name}, {field}",
      )
  # A rate of 1 keeps its whole marker.
  axes.set_ylim(0, 1.05)
  axes.set_xlabel("draft position")
  axes.set_ylabel("acceptance rate")
  _legend(axes)
  return _png(figure)


def paired_speedups(
  pairs: Mapping[str, Sequence[tuple[float, float]]],
) -> bytes:
  """Speedup of each request over its acceptance length.

  Args:
    pairs: system to (tau, speedup) of its requests.
  """
  figure, axes = _axes()
  colours = _colours(list(pairs))
  for name, points in pairs.items():
    x, y = np.asarray(points, float).T
    axes.scatter(x, y, s=18, alpha=0.75, color=colours[name], label=name)
  axes.axhline(1, color="#888888", linewidth=1)
  axes.set_xlabel("acceptance length of the request")
  axes.set_ylabel("TPOT of ar / TPOT of the system")
  _legend(axes)
  return _png(figure)


def decile_flips(forcing: Mapping[str, Mapping[str, Any]]) -> bytes:
  """Flip rates along the outputs, systems and their controls."""
  figure, axes = _axes()
  colours = _colours(list(forcing))
  at = np.arange(1, 11)
  for name, verdict in forcing.items():
    for field, label, style in (
      ("decile_flip_rates", name, "-"),
      ("control_decile_flip_rates", f"control of {name}", ":"),
    ):
      rates = verdict.get(field) or [None] * 10
      axes.plot(
        at,
        [np.nan if r is None else r for r in rates],
        style,
        marker="o",
        markersize=4,
        color=colours[name],
        label=label,
      )
  axes.set_xticks(at)
  # All zero is a line, not an empty plot.
  axes.set_ylim(0, max(1e-3, 1.1 * axes.get_ylim()[1]))
  axes.set_xlabel("tenth of the output")
  axes.set_ylabel("flips per token")
  _legend(axes)
  return _png(figure)


def waterfall(steps: Sequence[tuple[str, float]], label: str) -> bytes:
  """From a first value to a last one, through what each step takes away.

  Args:
    steps: names and values: the first and the last are totals, a value between
      them is what is left behind that step.
    label: of the vertical axis.
  """
  figure, axes = _axes()
  values = [value for _, value in steps]
  whole, less, more = _COLOURS["stock"], _OTHERS[0], _COLOURS["candidate"]
  for i, value in enumerate(values):
    total = i in (0, len(values) - 1)
    before = 0.0 if total else values[i - 1]
    colour = whole if total else less if value <= before else more
    bottom, top = sorted((before, value))
    axes.bar(i, top - bottom, 0.6, bottom=bottom, color=colour)
    text = f"{value:,.0f}" if total else f"{value - before:+,.0f}"
    axes.text(i, top, text, ha="center", va="bottom", fontsize=8)
    if i + 1 < len(values):
      # The level at which the next bar begins.
      axes.plot([i + 0.3, i + 0.7], [value, value], color="#888888", lw=1)
  axes.set_xticks(range(len(steps)), [name for name, _ in steps])
  axes.set_ylim(0, 1.1 * max(values))
  axes.set_ylabel(label)
  return _png(figure)


def classes_and_floors(classes: Mapping[str, Mapping[str, float]]) -> bytes:
  """Measured time of each kernel class beside its floor, logarithmic.

  Args:
    classes: `measured_us` and `floor_us`, and nothing else, by name.
  """
  figure, axes = _axes()
  at = np.arange(len(classes))
  for i, (field, name, colour) in enumerate(
    (
      ("measured_us", "measured", _COLOURS["stock"]),
      ("floor_us", "floor", _COLOURS["ar"]),
    )
  ):
    values = [c[field] for c in classes.values()]
    bars = axes.bar(
      at + (i - 0.5) * 0.4, values, 0.37, label=name, color=colour
    )
    labels = [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values]
    axes.bar_label(bars, labels, fontsize=8)
  axes.set_yscale("log")
  axes.set_ylim(
    bottom=0.5 * min(c[f] for c in classes.values() for f in c if c[f] > 0)
  )
  axes.set_xticks(at, [name.replace("_", " ") for name in classes])
  axes.set_ylabel("microseconds per step")
  _legend(axes)
  return _png(figure)


Points = Mapping[str, Sequence[tuple[int, float]]]


def tau_by_nodes(
  policies: Mapping[str, Sequence[Mapping[str, float]]], real: Points
) -> bytes:
  """Replayed acceptance length over the node budget, and what runs measured.

  Args:
    policies: `nodes` and `tau` by policy.
    real: points (nodes, tau) of real runs by policy.
  """
  return _by_nodes(policies, "tau", "acceptance length", real)


def speed_by_nodes(
  policies: Mapping[str, Sequence[Mapping[str, float]]], real: Points
) -> bytes:
  """The same of tokens per second (`tok_s`)."""
  return _by_nodes(policies, "tok_s", "tokens per second", real)


def _by_nodes(policies, field: str, axis: str, real: Points) -> bytes:
  figure, axes = _axes()
  colours = dict(
    zip(
      policies,
      (_COLOURS["stock"], _COLOURS["candidate"], *_OTHERS),
      strict=False,
    )
  )
  ticks = {b["nodes"] for entries in policies.values() for b in entries}
  for name, entries in policies.items():
    axes.plot(
      [b["nodes"] for b in entries],
      [b[field] for b in entries],
      marker="o",
      markersize=4,
      color=colours[name],
      label=f"{name}, replayed",
    )
  for name, points in real.items():
    x, y = np.asarray(sorted(points), float).T
    axes.plot(
      x, y, "x", markersize=8, color=colours[name], label=f"{name}, measured"
    )
    ticks |= set(x)
  axes.set_xticks(sorted(ticks))
  axes.set_ylim(bottom=0)
  axes.set_xlabel("nodes of a pass, anchor included")
  axes.set_ylabel(axis)
  _legend(axes)
  return _png(figure)


def gains(
  log_ratios: Sequence[float], bound: float | None, threshold: float | None
) -> bytes:
  """Gains of units in the order of measurement.

  Args:
    log_ratios: log(time of stock / time of candidate) of each unit.
    bound: lower bound of the mean gain, as a share.
    threshold: that it must exceed, as a share.
  """
  figure, axes = _axes()
  r = np.asarray(log_ratios)
  axes.plot(
    np.arange(1, r.size + 1), 100 * np.expm1(r), "o", markersize=4,
    color=_COLOURS["candidate"], label="unit",
  )  # fmt: skip
  for value, name, style in (
    (float(np.expm1(r.mean())), "geometric mean", "-"),
    (bound, "lower bound", "--"),
    (threshold, "threshold", ":"),
  ):
    if value is not None:
      axes.axhline(100 * value, ls=style, color="#444444", label=name)
  axes.set_xlabel("unit")
  axes.set_ylabel("gain over stock, per cent")
  _legend(axes)
  return _png(figure)


def forest(
  groups: Mapping[str, Sequence[tuple[str, float, float, float]]], label: str
) -> bytes:
  """Ratios with their intervals, one line each, against a line at 1.

  Args:
    groups: (name, ratio, lower end, upper end) by what they are over.
    label: of the horizontal axis.
  """
  names = list(dict.fromkeys(n for rows in groups.values() for n, *_ in rows))
  figure, axes = _axes(height=1.2 + 0.42 * len(names))
  axes.grid(axis="y", visible=False)
  axes.grid(axis="x", alpha=0.25)
  colours = (_COLOURS["stock"], _COLOURS["candidate"], *_OTHERS)
  for i, (group, rows) in enumerate(groups.items()):
    at = [names.index(n) + 0.18 * (i - (len(groups) - 1) / 2) for n, *_ in rows]
    middle, low, high = np.asarray([row[1:] for row in rows]).T
    axes.errorbar(
      middle, at, xerr=(middle - low, high - middle), fmt="o", markersize=4,
      capsize=3, color=colours[i % len(colours)], label=group,
    )  # fmt: skip
  axes.axvline(1, color="#888888", linewidth=1)
  axes.set_yticks(range(len(names)), names)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.set_xlabel(label)
  # Names may leave little width to the axes.
  axes.legend(
    frameon=False, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9
  )
  return _png(figure)
