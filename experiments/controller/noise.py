"""A/A sessions of a deployment, stored: what s_AA is made of.

One file per fingerprint. A driver, a JAX version, a host, a card or a design
that differs is another fingerprint, for which nothing is known yet, and without
s_AA there is no gate.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import results
from experiments.controller import paired, statistics
from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError

SCHEMA = 1
SHARE = 0.75
"""Of the units, that an A/A session has at least."""


class Unmeasured(SpecPilotError):
  """An A/A session says nothing: the machine's doing, so it may be repeated."""


def fingerprint(
  deployment: Mapping[str, Any], machine: Mapping[str, Any], design: str
) -> dict[str, Any]:
  """What the noise of a session depends on.

  Args:
    deployment: target, drafter, weights, dtype, batch and so on.
    machine: what the stock process said of its device, driver and versions.
    design: how sessions are run, with the number of units.
  """
  return {
    "deployment": dict(deployment),
    "machine": dict(machine),
    "host": platform.node(),
    "design": design,
  }


def digest(value: Any) -> str:
  """sha256 of the canonical JSON of a value."""
  text = json.dumps(
    results.to_json(value), sort_keys=True, separators=(",", ":")
  )
  return hashlib.sha256(text.encode()).hexdigest()


def fault(measured: paired.Measured, units: int) -> str | None:
  """Why an A/A session does not count; None where it does.

  Args:
    units: that it was to have.
  """
  broken, times = measured.fault, measured.times
  if broken is not None:  # Both of its engines are stock.
    return f"a process of stock: {broken.kind}: {broken.reason}"
  assert times is not None, "a session without a fault has times"
  if times.late:
    return "time ran out before its end"
  if measured.disturbed:
    return (
      f"stock is {measured.slowed:.1%} slower beside itself than alone: the"
      " machine was busy"
    )
  if len(times.stock) < max(2, SHARE * units):
    return f"the card was throttled in {times.dropped} of {units} units"
  return None


class Sessions:
  """The A/A sessions of one fingerprint.

  Args:
    mark: see `fingerprint`.
    folder: `noise` in the data folder by default.
  """

  def __init__(self, mark: Mapping[str, Any], folder: Path | None = None):
    self._mark = results.to_json(mark)
    folder = paths.data_dir() / "noise" if folder is None else folder
    self.path = folder / f"{digest(mark)[:16]}.json"
    self._sessions = self._read()

  def __len__(self) -> int:
    return len(self._sessions)

  @property
  def s_aa(self) -> float | None:
    """None while there are fewer than `statistics.MIN_SESSIONS`."""
    if len(self._sessions) < statistics.MIN_SESSIONS:
      return None
    return statistics.s_aa([s["mean"] for s in self._sessions])

  @property
  def means(self) -> list[float]:
    return [s["mean"] for s in self._sessions]

  @property
  def asymmetries(self) -> list[float]:
    """Of two devices: by session, the log of how much slower the second is."""
    return [s["asymmetry"] for s in self._sessions if "asymmetry" in s]

  @property
  def unswapped(self) -> tuple[float, float] | None:
    """What s_AA would be without the swap, with the candidate on the first
    device and on the second; None of one device, or too few sessions."""
    differ, means = self.asymmetries, self.means
    if len(differ) < len(means) or len(means) < statistics.MIN_SESSIONS:
      return None
    pairs = list(zip(means, differ, strict=True))
    return (
      statistics.s_aa([m + a for m, a in pairs]),
      statistics.s_aa([m - a for m, a in pairs]),
    )

  def add(
    self, mean: float, units: int, asymmetry: float | None = None
  ) -> None:
    """Keeps a session.

    Args:
      mean: of its log-ratios.
      units: how many.
      asymmetry: of two devices, see `statistics.Swap`.
    """
    if not all(math.isfinite(x) for x in (mean, asymmetry or 0.0)):
      raise SpecPilotError(
        f"an A/A session has the mean {mean} and the asymmetry {asymmetry}"
      )
    # Another run may have added some meanwhile.
    self._sessions = self._read()
    session = {"mean": mean, "units": units, "time": time.time()}
    if asymmetry is not None:
      session["asymmetry"] = asymmetry
    self._sessions.append(session)
    content = {
      "schema": SCHEMA, "fingerprint": self._mark, "sessions": self._sessions
    }  # fmt: skip
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise SpecPilotError(f"{self.path.parent}: {e.strerror}") from None
    results.write_whole(self.path, json.dumps(content, indent=1) + "\n")

  def _read(self) -> list[dict[str, Any]]:
    if not os.path.lexists(self.path):
      return []
    try:
      content = json.loads(self.path.read_text(encoding="utf-8"))
      good = (
        content["schema"] == SCHEMA
        and content["fingerprint"] == self._mark
        and all(
          math.isfinite(s["mean"]) and math.isfinite(s.get("asymmetry", 0.0))
          for s in content["sessions"]
        )
      )
    except (OSError, ValueError, KeyError, TypeError):
      good, content = False, {}
    if not good:
      raise SpecPilotError(
        f"{self.path}: damaged; remove it and run the A/A sessions again"
      )
    return content["sessions"]
