"""Two-level verification: when it pays, and its replay.

A step of two levels drafts, looks at the drafts with a level-1 pass, drafts
again and verifies exactly. It pays where the tokens that it adds are worth the
time that it adds: `break_even`. Times are inputs, measured on a deployment.

The replay follows recorded lattices as `replay` does, with level 1's choices
recorded per commit and depth along the output. It is an *approximation* in
three places: the drafts behind a trunk are those that the drafter offered at
the trunk's end from exact taps, not from level 1's; behind a token that level 1
got wrong nothing is known, so a tree has no room left for the drafts beside it;
and with several passes trunks are longer than what was recorded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cost_model import replay
from experiments.cost_model.lattices import Recording
from specpilot_jax import configs
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import level_choice, two_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTimes:
  """Microseconds of a deployment's passes.

  Attributes:
    level_one: a pass with the view over the drafts.
    exact: the exact pass of a step of one level.
    exact_of_two: that of a step of two levels, which has more rows.
    draft: of the drafter.
    passes: of level 1 in a step of two levels.
  """

  level_one: float
  exact: float
  exact_of_two: float
  draft: float
  passes: int = 1

  def __post_init__(self):
    for name in ("level_one", "exact", "exact_of_two", "draft"):
      if not configs.is_positive(getattr(self, name)):
        raise SpecPilotError(
          f"pass time {name} must be above 0, got {getattr(self, name)!r}"
        )

  @property
  def step_times(self) -> level_choice.StepTimes:
    """Of whole steps, as `auto` weighs them."""
    return level_choice.StepTimes(
      one_us=self.exact + self.draft,
      two_us=self.passes * (self.level_one + self.draft)
      + self.exact_of_two
      + self.draft,
    )


def break_even(times: PassTimes) -> float:
  """The ratio of tokens per step, two levels over one, above which two pay.

  (C8 + C12 + 2 D) / (C12 + D), DESIGN section 5, with the exact passes of both
  steps told apart.

  >>> times = PassTimes(level_one=8, exact=12, exact_of_two=13, draft=2)
  >>> break_even(times)
  1.7857142857142858
  """
  steps = times.step_times
  return steps.two_us / steps.one_us


def tau_ratio(agreement: float, drafts: float) -> float:
  """Tokens per step with two levels over those with one, from agreement.

  One level emits 1 + drafts. Level 1 makes them a trunk, of which i tokens hold
  with probability agreement^i; behind all of it the same number of drafts is
  accepted again. A model of independent tokens: those that disagree cluster.

  Args:
    agreement: share of tokens at which view and exact pass choose alike.
    drafts: accepted on average.
  """
  if not 0 <= agreement <= 1 or drafts < 0:
    raise ValueError(f"agreement {agreement}, {drafts} drafts")
  accepted = np.float64(drafts)
  one, two = level_choice.expected_tokens(
    np.float64(agreement), accepted, accepted, numpy=np
  )
  return float(two / one)


def agreement_needed(times: PassTimes, drafts: float) -> float | None:
  """The agreement per token from which on two levels pay; None: never."""
  wanted = break_even(times)
  if tau_ratio(1.0, drafts) < wanted:
    return None
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    if tau_ratio(middle, drafts) < wanted:
      low = middle
    else:
      high = middle
  return high


@dataclasses.dataclass(frozen=True)
class Agreement:
  """How often the view chooses what the exact pass chooses.

  Attributes:
    tokens: judged.
    agreed: of them.
    runs: tokens between two that disagree, of each output in turn.
  """

  tokens: int
  agreed: int
  runs: tuple[int, ...]

  @classmethod
  def of(cls, outputs: Sequence[np.ndarray]) -> "Agreement":
    """From whether each token of each output agrees."""
    runs = []
    for same in outputs:
      ends = np.flatnonzero(np.append(~same, True))
      runs += (np.diff(np.append(-1, ends)) - 1).tolist()
    return cls(
      tokens=sum(same.size for same in outputs),
      agreed=int(sum(same.sum() for same in outputs)),
      runs=tuple(runs),
    )

  @property
  def per_token(self) -> float:
    return self.agreed / self.tokens

  @property
  def mean_run(self) -> float:
    """Runs that the end of an output cuts are counted as they are."""
    return float(np.mean(self.runs))


def recorded_agreement(recordings: Sequence[Recording]) -> dict[str, Any]:
  """What was recorded of level 1, for result.json.

  Returns:
    `tokens` judged and `agreement` per token right behind a commit, where level
    1 reads exact states alone; `mean_run` of tokens that agree;
    `agreement_by_depth`, behind so many tokens of level 1's own. On the
    output's own path: what level 1 chooses elsewhere is not known.
  """
  first = Agreement.of([level_one(r)[:, 0] for r in recordings])
  depths = level_one(recordings[0]).shape[1]
  by_depth: list[float | None] = []
  for depth in range(depths):
    inside = [level_one(r)[: len(r) - depth, depth] for r in recordings]
    joined = np.concatenate(inside)
    by_depth.append(float(joined.mean()) if joined.size else None)
  return {
    "tokens": first.tokens,
    "agreement": first.per_token,
    "mean_run": first.mean_run,
    "agreement_by_depth": by_depth,
  }


def describe(found: Mapping[str, Any]) -> str:
  """One line on what was recorded of level 1."""
  return (
    f"the view chooses like the exact pass at {found['agreement']:.2%} of"
    f" {found['tokens']} tokens, in runs of {found['mean_run']:.1f}"
  )


def level_one(recording: Recording) -> np.ndarray:
  """What was recorded of level 1.

  Raises:
    SpecPilotError: nothing was.
  """
  if recording.level_one is None:
    raise SpecPilotError(
      f"lattices of {recording.request} have no choices of level 1"
    )
  return recording.level_one


@dataclasses.dataclass(frozen=True)
class TwoLevel:
  """A system of two levels: see `replay.Policy`.

  Attributes:
    shape: of the drafts.
    drafts: what is verified of a lattice at once.
    passes: of level 1. Behind the tokens that its choices were recorded for it
      is taken to choose what the output says.
  """

  shape: Policy
  drafts: replay.Chain | replay.BestFirst
  passes: int = 1

  @property
  def nodes(self) -> int:
    return two_level.shape(self.shape, self.passes)[0]

  def path(self, recording: Recording, position: int) -> Sequence[int]:
    """As many indices as drafts are accepted; there is no smaller budget."""
    return range(1, 1 + self.accepted(recording, position))

  def accepted(self, recording: Recording, position: int) -> int:
    """Drafts of a step that the exact pass accepts."""
    if not recording.depth(position):
      return 0  # Nothing to look at: a step of one level.
    wrong = np.flatnonzero(~level_one(recording)[position])
    right = int(wrong[0]) if wrong.size else len(recording)
    chain, trunk = self.shape.tree == configs.CHAIN, 0
    for passes in range(1, 1 + self.passes):
      reach = trunk + self._behind(recording, position + trunk, trunk)
      if right <= reach:
        # Level 1 leaves the output inside of the drafts or right behind them.
        # What it refused of a chain hangs beside its trunk.
        return reach if chain else right
      # A tree of few nodes has no room for all of its trunk, or behind it.
      limit = self.shape.nodes * (1 + passes if chain else 1)
      trunk = min(reach + 1, limit - 1)
      if trunk <= reach or position + trunk >= len(recording):
        return trunk
    return trunk + self._behind(recording, position + trunk, trunk)

  def _behind(self, recording: Recording, end: int, trunk: int) -> int:
    """Drafts of the lattice at a trunk's end that are right."""
    if isinstance(self.drafts, replay.Chain):
      return len(self.drafts.path(recording, end))
    left = dataclasses.replace(
      self.drafts, nodes=max(1, self.shape.nodes - trunk)
    )
    return len(left.path(recording, end))


def follows(system: SystemConfig) -> bool:
  """Whether replay knows what a system of two levels does."""
  two = system.verification == configs.TWO_LEVEL
  return two and system.view == SystemConfig().view
