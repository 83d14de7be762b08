"""Token forcing: stock scores a system's tokens, statistics give a verdict.

Stock is prefilled with prompt and output, and each output token must be its
own choice (with the request's noise where it samples) or lie within a
tolerance of it. The gap of a token is its distance from being the choice, in
logits; a *flip* is a token with a gap above 0.

The tolerance comes from a *control*: outputs whose gaps are rounding alone.
For `stock` these are the outputs of autoregressive decoding, for any other
system those of stock. It is 1.5 times the largest gap of the control, at most
0.5 logit. Most rounding flips lie below 0.25 in bfloat16 (one of 0.42 was
seen), state faults above 0.6.

In bfloat16 a gap holds the rounding of the scoring pass beside the system's
own, and its tail is heavy: of two sound sets of outputs the one may well have
a gap above 1.5 times the other's largest. A token above the tolerance is
therefore *adjudicated*: the same target in float32 scores the output again,
and a gap within the tolerance there excuses the token. Gaps above 0.5 logit
are scored again for the reader alone, and no more tokens are excused than
`excusable` allows. The flip rate counts excused tokens like all others.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specpilot_jax.errors import SpecPilotError

FACTOR = 1.5
CAP = 0.5
"""Largest tolerance, in logits; a control beyond it calibrates nothing."""
ALPHA = 0.001
"""Level of the one-sided Fisher test of flip rates."""
FLOORS = {
  "float64": 256 * 2.0**-52,
  "float32": 256 * 2.0**-23,
  "bfloat16": 8 * 2.0**-7,
}
"""Smallest tolerance, in logits: rounding that a control need not show.

A control of a few thousand tokens may have no tie at all, and must not make a
last-bit difference a fault. The largest logits of a language model are near
32, where a unit in the last place is 32 eps; the sums behind a logit leave a
few units, so 256 eps. In bfloat16 sums are float32 and only activations
round, so 8 eps.
"""
NARROW = ("bfloat16", "float16")
"""Dtypes whose rounding float32 adjudicates."""
DECILES = 10
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"


@dataclasses.dataclass(frozen=True)
class Scored:
  """One scored output: request id, token ids, and the gap of each token."""

  request: str
  tokens: tuple[int, ...]
  gaps: np.ndarray

  @property
  def flips(self) -> int:
    return int((self.gaps > 0).sum())

  @property
  def max_gap(self) -> float:
    return float(self.gaps.max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Control:
  """What is known of rounding: tokens scored, flips, largest gap."""

  name: str
  tokens: int
  flips: int
  max_gap: float

  def tolerance(self, dtype: str) -> float:
    """In logits; see the module."""
    return min(CAP, max(FACTOR * self.max_gap, FLOORS[dtype]))


def control_name(system: str) -> str:
  """The system whose outputs calibrate the tolerance for another."""
  return "ar" if system == "stock" else "stock"


def decile_rates(scored: Sequence[Scored]) -> list[float | None]:
  """Flips per token in each tenth of the outputs."""
  flips, tokens = np.zeros((2, DECILES), np.int64)
  for s in scored:
    at = np.arange(s.gaps.size) * DECILES // max(s.gaps.size, 1)
    flips += np.bincount(at[s.gaps > 0], minlength=DECILES)
    tokens += np.bincount(at, minlength=DECILES)
  return [
    float(f / n) if n else None for f, n in zip(flips, tokens, strict=True)
  ]


class Unavailable(Exception):
  """There are no float32 scores; says why, as a clause of a reason."""


Rescore = Callable[[int], np.ndarray]
"""float32 gaps [tokens] of the output of that index; raises `Unavailable`."""


@dataclasses.dataclass(frozen=True)
class Adjudicated:
  """A token above the tolerance that was scored again in float32."""

  request: str
  index: int
  token: int
  gap: float
  float32_gap: float
  accepted: bool


def excusable(tokens: int, control_tokens: int) -> int:
  """The most tokens of a system that float32 may excuse.

  A single gap in float32 says that its token is nearly a tie, not that rounding
  alone chose it: a system that takes the wrong side of ties could be excused
  token by token. If its gaps followed the control's law, whatever that is, all
  orders of the m + n gaps would be equally likely, and k or more of its m would
  exceed the largest of the control's n (so all the more the tolerance) with
  probability m/(m+n) (m-1)/(m+n-1) ... of k factors. The result is the largest
  k for which this is at least `ALPHA`: 9 where both have as many tokens.
  """
  allowed, p = 0, 1.0
  while allowed < tokens:
    p *= (tokens - allowed) / (tokens + control_tokens - allowed)
    if p < ALPHA:
      break
    allowed += 1
  return allowed


def _adjudicate(
  scored: Sequence[Scored],
  tolerance: float,
  limit: int,
  rescore: Rescore,
) -> tuple[list[Adjudicated], list[Scored], str]:
  """Scores tokens above the tolerance again.

  Returns:
    What was scored again; `scored` with gaps of 0 where a token is excused; a
    clause that says why something was not scored again, else empty.
  """
  above = [np.flatnonzero(s.gaps > tolerance) for s in scored]
  count = sum(a.size for a in above)
  if count > limit:
    clause = f"{count} tokens are above {tolerance:.3g}, float32 may excuse"
    return [], list(scored), f"; {clause} {limit}"
  again, left = [], list(scored)
  try:
    for i, s in enumerate(scored):
      if not above[i].size:
        continue
      float32, gaps = rescore(i), s.gaps.copy()
      for at in map(int, above[i]):
        accepted = s.gaps[at] <= CAP and float32[at] <= tolerance
        again.append(
          Adjudicated(
            request=s.request,
            index=at,
            token=s.tokens[at],
            gap=float(s.gaps[at]),
            float32_gap=float(float32[at]),
            accepted=bool(accepted),
          )
        )
        if accepted:
          gaps[at] = 0.0
      left[i] = dataclasses.replace(s, gaps=gaps)
  except Unavailable as e:
    return again, left, f"; {e}"
  return again, left, ""


def _first(scored: Sequence[Scored], above: float) -> dict[str, Any] | None:
  for s in scored:
    hits = np.flatnonzero(s.gaps > above)
    if hits.size:
      at = int(hits[0])
      return {
        "request": s.request,
        "index": at,
        "token": s.tokens[at],
        "gap": float(s.gaps[at]),
      }
  return None


def _in_float32(again: Sequence[Adjudicated], worst: float) -> str:
  """The float32 gap of the worst token that was not excused."""
  for a in again:
    if a.gap == worst and not a.accepted:
      return f", in float32 {a.float32_gap:.3g}"
  return ""


def flip_p_value(
  flips: int, tokens: int, control_flips: int, control_tokens: int
) -> float:
  """One-sided Fisher exact test: is the flip rate above the control's?"""
  table = [
    [flips, tokens - flips],
    [control_flips, control_tokens - control_flips],
  ]
  return float(stats.fisher_exact(table, alternative="greater").pvalue)


def judge(
  scored: Sequence[Scored],
  control: Control,
  *,
  dtype: str,
  min_control_tokens: int,
  rescore: Rescore | None = None,
) -> dict[str, Any]:
  """The verdict on a system.

  Args:
    scored: its outputs, at least one token each.
    control: what calibrates the tolerance.
    dtype: of the target that scored.
    min_control_tokens: with fewer the verdict is `inconclusive`, unless a gap
      exceeds the largest tolerance that any control could give.
    rescore: float32 scores for adjudication. Only a `NARROW` dtype needs them,
      and only a tolerance that its control calibrates can be applied to them.

  Returns:
    The entry in `token_forcing` of result.json. `first_failure` is the first
    token above the tolerance that was not excused, or the first flip where the
    rate failed.
  """
  tokens = sum(s.gaps.size for s in scored)
  flips = sum(s.flips for s in scored)
  max_margin = worst = max((s.max_gap for s in scored), default=0.0)
  tolerance = control.tolerance(dtype)
  limit = excusable(tokens, control.tokens)
  enough = control.tokens >= min_control_tokens
  again: list[Adjudicated] = []
  left, told = scored, ""
  if (
    rescore is not None
    and dtype in NARROW
    and enough
    and control.max_gap <= CAP
    and worst > tolerance
  ):
    again, left, told = _adjudicate(scored, tolerance, limit, rescore)
    worst = max((s.max_gap for s in left), default=0.0)
    told = _in_float32(again, worst) + told
  p_value = flip_p_value(flips, tokens, control.flips, control.tokens)
  first = None
  if tokens == 0:
    verdict, reason = INCONCLUSIVE, "there are no tokens to judge"
  elif control.max_gap > CAP:
    verdict = INCONCLUSIVE
    reason = (
      f"the control itself ({control.name}) has a gap of {control.max_gap:.3g},"
      f" above {CAP} logit"
    )
  elif worst > CAP:
    verdict, first = FAIL, _first(left, tolerance if enough else CAP)
    reason = f"largest gap {worst:.3g} is above any tolerance ({CAP} logit)"
    reason += told
  elif not enough:
    verdict = INCONCLUSIVE
    reason = (
      f"the control has {control.tokens} tokens, {min_control_tokens} are"
      " needed to calibrate the tolerance; for a verdict benchmark more prompts"
      " (--num_prompts), or other prompts too: controls accumulate over runs"
    )
  elif worst > tolerance:
    verdict, first = FAIL, _first(left, tolerance)
    reason = f"largest gap {worst:.3g} is above the tolerance {tolerance:.3g}"
    reason += told
  elif p_value < ALPHA:
    verdict, first = FAIL, _first(scored, 0.0)
    reason = (
      f"{flips} flips in {tokens} tokens against the control's"
      f" {control.flips} in {control.tokens} (p = {p_value:.2g})"
    )
  else:
    verdict = PASS
    told = f" ({len(again)} of them by float32 scores)" if again else ""
    reason = (
      f"all {tokens} tokens are stock's own choice or within {tolerance:.3g}"
      f" logit of it{told}; {flips} flips against the control's"
      f" {control.flips} in {control.tokens} tokens"
    )
  return {
    "verdict": verdict,
    "reason": reason,
    "tokens": tokens,
    "flips": flips,
    "max_margin": max_margin,
    "first_failure": first,
    "tolerance": tolerance,
    "flip_p_value": p_value,
    "alpha": ALPHA,
    "decile_flip_rates": decile_rates(scored),
    "control": dataclasses.asdict(control),
    "min_control_tokens": min_control_tokens,
    "adjudicated": len(again),
    "adjudicated_tokens": [dataclasses.asdict(a) for a in again],
    "max_excusable_tokens": limit,
  }


def output_key(record: Mapping[str, Any]) -> str:
  """Names prompt, sampling and output together, so none counts twice."""
  parts = [record["prompt_ids"], record["sampling"], record["output_ids"]]
  text = json.dumps(parts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:20]


Entry = tuple[int, int, float]
"""Tokens, flips and largest gap of one control output."""


class Calibration:
  """Controls of one deployment, accumulated over runs in one file.

  Outputs count once however often they are produced again. An output whose
  gap exceeds `CAP` is used in its run, but not kept: it shows a fault, not
  rounding.

  Args:
    folder: of calibration files; made when one is saved.
    fingerprint: what rounding depends on; names the file.

  Raises:
    SpecPilotError: the file exists and is damaged.
  """

  def __init__(self, folder: Path, fingerprint: Mapping[str, Any]):
    self.fingerprint = dict(fingerprint)
    text = json.dumps(self.fingerprint, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    self.path = folder / f"{digest}.json"
    self._entries = self._read()

  def _read(self) -> dict[str, dict[str, Entry]]:
    try:
      content = json.loads(self.path.read_bytes())
      if content["fingerprint"] != self.fingerprint:
        raise ValueError
      return {
        str(name): {str(key): _entry(e) for key, e in entries.items()}
        for name, entries in content["controls"].items()
      }
    except FileNotFoundError:
      return {}
    except OSError as e:
      raise SpecPilotError(f"{self.path}: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
      raise SpecPilotError(
        f"{self.path}: damaged calibration file; remove it to calibrate anew"
      ) from None

  def control(self, name: str, new: Mapping[str, Entry]) -> Control:
    """What was stored and `new` together.

    Args:
      name: the system whose outputs these are.
      new: outputs of this run by `output_key`.
    """
    entries = (self._entries.get(name, {}) | dict(new)).values()
    return Control(
      name=name,
      tokens=sum(e[0] for e in entries),
      flips=sum(e[1] for e in entries),
      max_gap=max((e[2] for e in entries), default=0.0),
    )

  def check_writable(self) -> None:
    """Raises SpecPilotError where `save` could not write."""
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      # By trying: for a superuser or a full disk permissions say nothing.
      with tempfile.NamedTemporaryFile(
        dir=self.path.parent, prefix=f".{self.path.name}."
      ) as probe:
        probe.write(b"x")
    except OSError as e:
      raise SpecPilotError(
        f"calibration folder {self.path.parent} cannot be written: {e.strerror}"
      ) from None

  def save(self, name: str, new: Mapping[str, Entry]) -> None:
    """Adds outputs to the file, which is replaced as a whole."""
    kept = {key: e for key, e in new.items() if e[2] <= CAP}
    # Another run may have added to it meanwhile.
    self._entries = self._read()
    self._entries[name] = self._entries.get(name, {}) | kept
    content = {"fingerprint": self.fingerprint, "controls": self._entries}
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      handle, temporary = tempfile.mkstemp(
        dir=self.path.parent, prefix=f".{self.path.name}."
      )
      try:
        with os.fdopen(handle, "w") as out:
          json.dump(content, out)
        os.replace(temporary, self.path)
      except OSError:
        os.unlink(temporary)
        raise
    except OSError as e:
      raise SpecPilotError(f"{self.path}: {e.strerror}") from None


def _entry(value: Any) -> Entry:
  tokens, flips, gap = value
  good = isinstance(tokens, int) and isinstance(flips, int)
  if not (good and 0 <= flips <= tokens and 0 <= float(gap) < np.inf):
    raise ValueError
  return tokens, flips, float(gap)


def entry_of(scored: Scored) -> Entry:
  """A scored output as the calibration keeps it."""
  return scored.gaps.size, scored.flips, scored.max_gap
