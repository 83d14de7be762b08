"""Token forcing: stock scores a system's tokens, statistics give a verdict.

Stock is prefilled with prompt and output, and each output token must be its
own choice (with the request's noise where it samples) or lie within a
tolerance of it. The gap of a token is its distance from being the choice, in
logits; a *flip* is a token with a gap above 0.

The tolerance comes from a *control*: outputs whose gaps are rounding alone.
For `stock` these are the outputs of autoregressive decoding, for any other
system those of stock. It is 1.5 times the largest gap of the control, at most
0.5 logit. Rounding flips lie below 0.25 in bfloat16, state faults above 0.6.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
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
) -> dict[str, Any]:
  """The verdict on a system.

  Args:
    scored: its outputs, at least one token each.
    control: what calibrates the tolerance.
    dtype: of the target that scored.
    min_control_tokens: with fewer the verdict is `inconclusive`, unless a gap
      exceeds the largest tolerance that any control could give.

  Returns:
    The entry in `token_forcing` of result.json. `first_failure` is the first
    token above the tolerance, or the first flip where the rate failed.
  """
  tokens = sum(s.gaps.size for s in scored)
  flips = sum(s.flips for s in scored)
  worst = max((s.max_gap for s in scored), default=0.0)
  tolerance = control.tolerance(dtype)
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
    enough = control.tokens >= min_control_tokens
    verdict, first = FAIL, _first(scored, tolerance if enough else CAP)
    reason = f"largest gap {worst:.3g} is above any tolerance ({CAP} logit)"
  elif control.tokens < min_control_tokens:
    verdict = INCONCLUSIVE
    reason = (
      f"the control has {control.tokens} tokens, {min_control_tokens} are"
      " needed to calibrate the tolerance; for a verdict benchmark more prompts"
      " (--num_prompts), or other prompts too: controls accumulate over runs"
    )
  elif worst > tolerance:
    verdict, first = FAIL, _first(scored, tolerance)
    reason = f"largest gap {worst:.3g} is above the tolerance {tolerance:.3g}"
  elif p_value < ALPHA:
    verdict, first = FAIL, _first(scored, 0.0)
    reason = (
      f"{flips} flips in {tokens} tokens against the control's"
      f" {control.flips} in {control.tokens} (p = {p_value:.2g})"
    )
  else:
    verdict = PASS
    reason = (
      f"all {tokens} tokens are stock's own choice or within {tolerance:.3g}"
      f" logit of it; {flips} flips against the control's {control.flips} in"
      f" {control.tokens} tokens"
    )
  return {
    "verdict": verdict,
    "reason": reason,
    "tokens": tokens,
    "flips": flips,
    "max_margin": worst,
    "first_failure": first,
    "tolerance": tolerance,
    "flip_p_value": p_value,
    "alpha": ALPHA,
    "decile_flip_rates": decile_rates(scored),
    "control": dataclasses.asdict(control),
    "min_control_tokens": min_control_tokens,
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
