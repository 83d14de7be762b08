"""When requests come: open loop, closed loop, or as they came before."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specpilot_jax.errors import SpecPilotError

INFINITE = math.inf
"""Rate at which all requests are there at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
  """One load.

  Attributes:
    request_rate: requests per second, open loop; `INFINITE` for all at once.
    max_concurrency: requests that are sent and not answered at most; None for
      any number. With an infinite rate it is a closed loop: each answer sends
      the next request.
    burstiness: shape of the gamma law of the gaps between requests; 1 is a
      Poisson process, less comes in bursts, more is more even.
    recorded_s: arrival times of a recorded run, instead of a rate.
  """

  request_rate: float = INFINITE
  max_concurrency: int | None = None
  burstiness: float = 1.0
  recorded_s: tuple[float, ...] | None = None

  def __post_init__(self):
    if not self.request_rate > 0:
      raise SpecPilotError(
        f"request_rate must be above 0, or inf, got {self.request_rate:g}"
      )
    if self.max_concurrency is not None and self.max_concurrency < 1:
      raise SpecPilotError(
        f"max_concurrency must be at least 1, got {self.max_concurrency}"
      )
    if not 0 < self.burstiness < math.inf:
      raise SpecPilotError(
        f"burstiness must be above 0, got {self.burstiness:g}"
      )

  @property
  def is_open(self) -> bool:
    """Whether requests come by a clock and not when others are answered."""
    return self.recorded_s is not None or math.isfinite(self.request_rate)

  @property
  def varies(self) -> bool:
    """Whether it keeps another number of requests busy at any time."""
    return self.is_open or self.max_concurrency is None

  @property
  def name(self) -> str:
    """What tells a level from others of a run, for instance `c16` or `4rps`."""
    parts = []
    if self.recorded_s is not None:
      parts.append("recorded")
    elif math.isfinite(self.request_rate):
      parts.append(f"{self.request_rate:g}rps")
    if self.max_concurrency is not None:
      parts.append(f"c{self.max_concurrency}")
    return "-".join(parts) or "all"

  def arrivals_s(self, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests come, ascending.

    The gaps of an open loop follow the gamma law with shape `burstiness` and
    mean 1 / `request_rate`; the first request comes at once.

    Args:
      count: of requests.
      seed: of the gaps: the same one gives the same times.

    Raises:
      SpecPilotError: fewer recorded arrivals than requests.
    """
    if self.recorded_s is not None:
      if len(self.recorded_s) < count:
        raise SpecPilotError(
          f"{count} requests and {len(self.recorded_s)} recorded arrivals; give"
          f" --num_prompts={len(self.recorded_s)} or fewer"
        )
      return list(self.recorded_s[:count])
    if not self.is_open:
      return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(
      self.burstiness, 1 / (self.request_rate * self.burstiness), count
    )
    return (np.cumsum(gaps) - gaps[0]).tolist()


def recorded(path: Path, system: str | None = None) -> tuple[float, ...]:
  """Arrival times out of a run's requests.jsonl, or of any JSON lines.

  Args:
    path: the file, or a run's folder. Each line is an object with `arrival_s`,
      in seconds; where lines name a `system`, those of one count.
    system: which; that of the first line by default.

  Returns:
    The times ascending, the first of them 0.

  Raises:
    SpecPilotError: a line without a time; no lines.
  """
  if path.is_dir():
    path = path / "requests.jsonl"
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as e:
    reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
    raise SpecPilotError(f"{path}: {reason}") from None
  times: list[float] = []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      time = record["arrival_s"]
    except (ValueError, KeyError, TypeError):
      raise SpecPilotError(
        f"{path}:{number}: not a JSON object with arrival_s"
      ) from None
    good = isinstance(time, int | float) and not isinstance(time, bool)
    if not good or not 0 <= time < math.inf:
      raise SpecPilotError(
        f"{path}:{number}: arrival_s must be seconds from 0 on, got {time!r}"
      )
    if system is None:
      system = record.get("system")
    if record.get("system") == system:
      times.append(float(time))
  if not times:
    raise SpecPilotError(f"{path} holds no arrivals")
  return tuple(t - min(times) for t in sorted(times))


def levels(
  rates: Sequence[float],
  concurrencies: Sequence[int | None],
  burstiness: float,
  recorded_s: tuple[float, ...] | None,
) -> tuple[Level, ...]:
  """Every rate with every concurrency; a recording with every concurrency.

  Raises:
    SpecPilotError: a value out of range, a level twice, a rate beside a
      recording.
  """
  if recorded_s is not None and any(map(math.isfinite, rates)):
    raise SpecPilotError("recorded arrivals have their own rate: give one")
  found = tuple(
    Level(
      request_rate=rate,
      max_concurrency=most,
      burstiness=burstiness,
      recorded_s=recorded_s,
    )
    for rate in rates
    for most in concurrencies
  )
  names = [level.name for level in found]
  for name in names:
    if names.count(name) > 1:
      raise SpecPilotError(f"the load {name} is given twice")
  return found
