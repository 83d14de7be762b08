"""The plots of a report, as PNG bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Systems = Mapping[str, Mapping[str, Any]]

# Distinct for readers with colour-blindness too (Okabe and Ito's palette). A
# system has one colour in all plots.
_COLOURS = {"ar": "#888888", "stock": "#0072b2", "candidate": "#d55e00"}
_OTHERS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")


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
  """Above the plot, where it hides nothing."""
  axes.legend(
    frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9
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
