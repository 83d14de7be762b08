"""The gate: from paired times to a decision.

A unit is an independent comparison: a pair of requests in S C C S order on one
device, a request with devices swapped on two, or the mean of a block of fresh
processes. Its value r is a log-ratio, log(time of stock / time of candidate),
so that exp(mean r) - 1 is the gain of the geometric mean.

The lower bound is Student's over units: at small numbers the bootstrap is
further off (one-sided 95 % bounds of 8 / 16 / 32 normal values covered .957 /
.955 / .952 with t, .907 / .925 / .943 with BCa). From 30 units on BCa is a
second opinion, and the smaller of the two counts.

Requests are independent only given the launches of the processes. What a launch
adds is not in the spread of r; it is in `s_aa`, the root mean square of whole
sessions of stock against stock, and the margin holds twice that.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import special, stats

from specpilot_jax.errors import SpecPilotError

Array = np.ndarray

ALPHA = 0.05
"""Of the one-sided bound."""
MARGIN = 0.01
"""Gain that a candidate must exceed, before the noise of launches."""
DIVERGED_MARGIN = 0.03
"""The same where outputs differ: the two did not do the same work."""
MIN_UNITS = 16
MIN_BLOCKS = 4
BOOTSTRAP_UNITS = 30
RESAMPLES = 9_999
MIN_SESSIONS = 5
"""A/A sessions without which there is no s_AA; `WANTED_SESSIONS` are asked."""
WANTED_SESSIONS = 8
ASYMMETRY = 0.02
"""Of two devices, in log time: beyond it one of them is to be looked at."""
SKEW, SKEW_UNITS, TRIM = -1.0, 64, 0.1

ACCEPT, REJECT, INCONCLUSIVE = "accept", "reject", "inconclusive"


def one_device_units(
  stock: Float[Array, "units 2"], candidate: Float[Array, "units 2"]
) -> Float[Array, " units"]:
  """Log-ratios of S C C S (or C S S C) groups on one device.

  Args:
    stock, candidate: seconds. The two columns of a row are the two requests of
      the group, the same for both systems, so that neither a linear drift nor
      the requests' own difference is left in r.
  """
  stock, candidate = _times(stock, "stock"), _times(candidate, "candidate")
  return (np.log(stock) - np.log(candidate)).mean(axis=1)


def two_device_units(
  stock: Float[Array, "units 2"], candidate: Float[Array, "units 2"]
) -> tuple[Float[Array, " units"], Float[Array, " units"]]:
  """Log-ratios of requests on two devices with swap, and the asymmetry.

  Args:
    stock, candidate: seconds; column d is the time on device d. Column 0 of
      the candidate was measured while column 1 of stock was, then swapped.

  Returns:
    r = (D1 + D2) / 2, from which device and phase cancel, and
    a = (D1 - D2) / 2, the log of how much slower device 1 is than device 0,
    with D1 = log(stock on 1 / candidate on 0) and
    D2 = log(stock on 0 / candidate on 1).
  """
  stock, candidate = _times(stock, "stock"), _times(candidate, "candidate")
  first = np.log(stock[:, 1]) - np.log(candidate[:, 0])
  second = np.log(stock[:, 0]) - np.log(candidate[:, 1])
  return (first + second) / 2, (first - second) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swap:
  """What swapping two devices took out of a session.

  Attributes:
    asymmetry: mean a, the log of how much slower device 1 is than device 0.
    standard_error: of it, over units.
    unswapped: mean D1 and mean D2: what a session without a swap would have
      measured in the place of mean r, with the candidate on device 0 and on 1.
    spread, unswapped_spread: standard deviations over units, of r and of D1 and
      D2 (root mean square of the two); None of a single unit.
    by_device: mean log(stock / candidate) on device 0 and on 1. The two systems
      were there in different halves: what the machine drifted between them is
      in both, with opposite signs.
  """

  asymmetry: float
  standard_error: float | None
  unswapped: tuple[float, float]
  spread: float | None
  unswapped_spread: float | None
  by_device: tuple[float, float]

  @property
  def is_large(self) -> bool:
    """Whether the devices differ by more than two good ones should."""
    return abs(self.asymmetry) > ASYMMETRY

  def as_dict(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "is_large": self.is_large}


def swap(
  stock: Float[Array, "units 2"], candidate: Float[Array, "units 2"]
) -> Swap:
  """What the devices of a session differ by; see `two_device_units`."""
  r, a = two_device_units(stock, candidate)
  first, second = r + a, r - a
  gains = (np.log(stock) - np.log(candidate)).mean(axis=0)
  several = len(r) > 1
  variances = [x.var(ddof=1) for x in (first, second)] if several else []
  return Swap(
    asymmetry=float(a.mean()),
    standard_error=float(a.std(ddof=1) / math.sqrt(len(a)))
    if several
    else None,
    unswapped=(float(first.mean()), float(second.mean())),
    spread=float(r.std(ddof=1)) if several else None,
    unswapped_spread=math.sqrt(np.mean(variances)) if several else None,
    by_device=(float(gains[0]), float(gains[1])),
  )


def _times(values, name: str) -> Float[Array, "units 2"]:
  times = np.asarray(values, np.float64)
  if times.ndim != 2 or times.shape[1] != 2 or not len(times):
    raise SpecPilotError(f"times of {name}: expected [units, 2], one at least")
  if not (np.isfinite(times).all() and (times > 0).all()):
    raise SpecPilotError(f"times of {name} must be finite and above 0")
  return times


def t_bound(r: Float[Array, " units"], alpha: float = ALPHA) -> float:
  """One-sided lower bound of the mean by Student's t over units."""
  k = len(r)
  if k < 2:
    return -math.inf
  quantile = float(special.stdtrit(k - 1, 1 - alpha))
  return float(r.mean() - quantile * r.std(ddof=1) / math.sqrt(k))


def bca_bound(
  r: Float[Array, " units"],
  alpha: float = ALPHA,
  *,
  resamples: int = RESAMPLES,
  seed: int = 0,
) -> float:
  """One-sided lower bound of the mean by the BCa bootstrap.

  Efron (1987): z0 = Phi^-1(share of resampled means below the mean), a = sum
  d^3 / (6 (sum d^2)^1.5) with jackknife deviations d, level =
  Phi(z0 + (z0 + z) / (1 - a (z0 + z))) with z = Phi^-1(alpha).

  Args:
    seed: of the resampling, so that a record gives the same figure again.
  """
  k, mean = len(r), float(r.mean())
  if k < 2 or not r.std():
    return mean
  rng = np.random.default_rng(seed)
  means = np.sort(r[rng.integers(0, k, (resamples, k))].mean(axis=1))
  below = np.searchsorted(means, mean) / resamples
  z0 = float(special.ndtri(np.clip(below, 0.5 / resamples, 1)))
  deviation = r - mean  # Proportional to the jackknife's, with its sign.
  cubes, squares = (deviation**3).sum(), (deviation**2).sum()
  a = float(cubes / (6 * squares**1.5))
  shifted = z0 + float(special.ndtri(alpha))
  level = float(special.ndtr(z0 + shifted / (1 - a * shifted)))
  return float(np.quantile(means, level))


def s_aa(session_means: Sequence[float]) -> float:
  """Noise of a whole session: root mean square of A/A sessions' mean r.

  The true mean is 0, so that all of them are degrees of freedom.

  Raises:
    SpecPilotError: fewer than `MIN_SESSIONS`; there is no gate without them.
  """
  means = np.asarray(session_means, np.float64)
  if len(means) < MIN_SESSIONS:
    raise SpecPilotError(
      f"s_AA needs at least {MIN_SESSIONS} A/A sessions, got {len(means)}"
    )
  if not np.isfinite(means).all():
    raise SpecPilotError("an A/A session has a mean that is not finite")
  return float(np.sqrt((means**2).mean()))


def threshold(noise: float, *, diverged: bool) -> float:
  """Gain that the lower bound must exceed, as a share."""
  margin = MARGIN + 2 * noise
  return max(margin, DIVERGED_MARGIN) if diverged else margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """What the gate says of one candidate.

  Attributes:
    verdict: `accept`, `reject` or `inconclusive`.
    reason: one line.
    units: how many, k.
    gain: exp(mean r) - 1.
    bound: lower bound of the gain: the smaller of the two below.
    t_bound, bca_bound: of the gain; `bca_bound` is None below 30 units.
    s_aa: noise of a session, in log-ratio; None where it is not known.
    threshold: what the bound had to exceed; None without `s_aa`.
    skewness: of r.
  """

  verdict: str
  reason: str
  units: int
  gain: float
  bound: float
  t_bound: float
  bca_bound: float | None
  s_aa: float | None
  threshold: float | None
  skewness: float

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def decide(
  r: Float[Array, " units"],
  noise: float | None,
  *,
  diverged: bool = False,
  min_units: int = MIN_UNITS,
  alpha: float = ALPHA,
  resamples: int = RESAMPLES,
  seed: int = 0,
) -> Decision:
  """Accepts where the lower bound of the gain exceeds the threshold.

  Args:
    r: one log-ratio per unit.
    noise: s_AA; None where it was not measured: then nothing is accepted.
    diverged: whether outputs differ from stock's.
    min_units: fewer decide nothing; `MIN_BLOCKS` where units are blocks.
    alpha: of the bounds; the ledger may ask for a smaller one.
    resamples, seed: of the bootstrap.
  """
  r = np.asarray(r, np.float64)
  if r.ndim != 1 or not len(r) or not np.isfinite(r).all():
    raise SpecPilotError("log-ratios must be finite, one per unit")
  k = len(r)
  by_t = t_bound(r, alpha)
  by_bca = None
  if k >= BOOTSTRAP_UNITS:
    by_bca = bca_bound(r, alpha, resamples=resamples, seed=seed)
  bound = by_t if by_bca is None else min(by_t, by_bca)
  skew = float(stats.skew(r)) if k > 2 and r.std() else 0.0
  limit = None if noise is None else threshold(noise, diverged=diverged)
  verdict, reason = _verdict(r, bound, limit, skew, min_units)
  return Decision(
    verdict=verdict,
    reason=reason,
    units=k,
    gain=math.expm1(r.mean()),
    bound=math.expm1(bound),
    t_bound=math.expm1(by_t),
    bca_bound=None if by_bca is None else math.expm1(by_bca),
    s_aa=noise,
    threshold=limit,
    skewness=skew,
  )


def _verdict(r, bound, limit, skew, min_units) -> tuple[str, str]:
  k = len(r)
  if limit is None:
    return INCONCLUSIVE, "s_AA of this deployment is not known: no gate"
  if k < min_units:
    return INCONCLUSIVE, f"{k} units, at least {min_units} are needed"
  low = f"lower bound {math.expm1(bound):+.2%}"
  if not math.expm1(bound) > limit:
    return REJECT, f"{low} does not exceed {limit:.2%}"
  if skew < SKEW and k < SKEW_UNITS:
    # A few very slow requests: both bounds cover less than they say.
    trimmed = float(stats.trim_mean(r, TRIM))
    if abs(trimmed - r.mean()) > r.std(ddof=1) / math.sqrt(k):
      return INCONCLUSIVE, (
        f"skewness {skew:.1f} over {k} units, and the trimmed mean"
        f" {math.expm1(trimmed):+.2%} is more than a standard error from the"
        " mean"
      )
  return ACCEPT, f"{low} exceeds {limit:.2%}"


def familywise(alpha: float, tests: int) -> float:
  """Chance of at least one false bound in so many independent tests."""
  return -math.expm1(tests * math.log1p(-alpha)) if tests else 0.0
