"""When a second level pays: what `verification=auto` weighs, step by step.

From how sure the drafter is, how that turned out of late, and how often the
exact pass agreed with level 1: on the device, so that no step waits for the
host and none decides on what the host saw a step ago. The times of both kinds
of steps are given, or measured on the engine itself.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specpilot_jax import configs
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.decoding.schedule import Seen
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import state as state_lib

MEMORY = 0.95
"""What a step keeps of the sums over the steps before it: about 20 of them
count."""

DRIFT = 0.99
"""What a step of one level keeps of the agreement that it does not see, so that
two levels are tried again some hundred steps later."""

DOUBT = 32.0
"""Tokens of perfect agreement that a request starts with, and returns to. With
few of them one early miss ended two levels for some hundred steps."""

TIMED_STEPS = 12
"""Of either kind, with drafts, whose median `auto` counts with."""

MOST_TIMED_STEPS = 400
"""After which it gives up looking for such."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Microseconds of a whole step on a deployment, by the levels that it has."""

  one_us: float
  two_us: float

  def __post_init__(self):
    for name in ("one_us", "two_us"):
      if not configs.is_positive(getattr(self, name)):
        raise SpecPilotError(
          f"{name} must be a time above 0, got {getattr(self, name)!r}"
        )


@state_lib.pytree
class Plan:
  """What `auto` weighs: step times by levels, in one unit."""

  one: Float[Array, ""]
  two: Float[Array, ""]

  @classmethod
  def of(cls, one: float, two: float) -> "Plan":
    return cls(jnp.asarray(one, jnp.float32), jnp.asarray(two, jnp.float32))


@state_lib.pytree
class Recent:
  """Sums over the latest steps of a request.

  Attributes:
    steps: how many.
    expected: drafts that the drafter expected to be accepted.
    accepted: drafts that were: in steps of two levels, by level 1, whose tree
      is that of a step of one level.
    judged: tokens of trunks that the exact pass judged.
    agreed: of them, those that it accepted.
  """

  steps: Float[Array, ""]
  expected: Float[Array, ""]
  accepted: Float[Array, ""]
  judged: Float[Array, ""]
  agreed: Float[Array, ""]

  @classmethod
  def fresh(cls) -> "Recent":
    zero = jnp.zeros((), jnp.float32)
    return cls(zero, zero, zero, zero, zero)

  def learned(self, hoped: Float[Array, ""], seen: Seen) -> "Recent":
    """The sums behind a step.

    Args:
      hoped: drafts of it that the drafter expected to be accepted.
      seen: what the exact pass said.
    """
    two = seen.trunk > 0
    accepted = jnp.where(two, seen.foreseen, seen.accepted)
    judged = seen.confirmed + (seen.confirmed < seen.trunk)
    keep = jnp.where(two, MEMORY, DRIFT)
    return Recent(
      steps=MEMORY * self.steps + 1,
      expected=MEMORY * self.expected + hoped,
      accepted=MEMORY * self.accepted + accepted,
      judged=keep * self.judged + judged,
      agreed=keep * self.agreed + seen.confirmed,
    )


def expected_tokens(
  agreement: Any, drafts: Any, usual: Any, numpy: Any = jnp
) -> tuple[Any, Any]:
  """Tokens that a step is expected to emit, with one level and with two.

  One level emits 1 + drafts. The trunk of two levels is as long: with agreement
  `a` per token it gives the sum of a^i over its tokens i, and behind all of it,
  with probability a^length, as many drafts as usual.

  Args:
    agreement: share of tokens at which level 1 and the exact pass agree.
    drafts: of the step, those that are expected to be accepted.
    usual: of a step of this request.
    numpy: what computes it: `jax.numpy`, or `numpy` of scalars of its own.
  """
  length = drafts + 1
  # 1 - a^length for an `a` near 1, of which a difference would leave rounding.
  doubt = numpy.maximum(1 - agreement, numpy.finfo(agreement.dtype).eps)
  broken = -numpy.expm1(length * numpy.log1p(-doubt))
  trunk = (1 - doubt) * broken / doubt
  return length, 1 + trunk + (1 - broken) * usual


def pays(
  recent: Recent,
  hoped: Float[Array, ""],
  left: Float[Array, ""],
  plan: Plan,
) -> Bool[Array, ""]:
  """Whether the tokens that a second level adds are worth its time.

  Worth what the same time gives in the request's usual steps, of the better
  kind. (Not what it gives in a step like this one: where drafts are poor a
  second level looks good beside them, and the step after this one better.)

  Args:
    recent: of the request.
    hoped: drafts that the drafter expects to be accepted in the step.
    left: tokens that may still be emitted.
    plan: step times.
  """
  drafts = (recent.accepted + 1) / (recent.expected + 1) * hoped
  usual = (recent.accepted + drafts) / (recent.steps + 1)
  agreement = (recent.agreed + DOUBT) / (recent.judged + DOUBT)
  one, two = expected_tokens(agreement, drafts, usual)
  usual_one, usual_two = expected_tokens(agreement, usual, usual)
  speed = jnp.maximum(usual_one / plan.one, usual_two / plan.two)
  more = jnp.minimum(two, left) - jnp.minimum(one, left)
  return more > speed * (plan.two - plan.one)


def step_times(engine: Engine, sampling: SamplingParams) -> StepTimes:
  """Times of an engine's steps with one level and with two, medians.

  Args:
    engine: with a schedule that decides; between requests.
    sampling: of the requests to come; they share its executable.

  Raises:
    SpecPilotError: no step had drafts to verify.
  """
  prompt = [0] * max(1, min(8, engine.max_seq_len - 2))
  sampling = dataclasses.replace(
    sampling,
    max_tokens=engine.max_seq_len,
    ignore_eos=True,
    stop=(),
    stop_token_ids=(),
  )
  found = []
  try:
    for forced in (Plan.of(0, 1), Plan.of(1, 0)):
      engine.set_plan(forced)
      found.append(_step_us(engine, prompt, sampling))
  finally:
    # Whatever happens: no later request is to follow a plan that was forced.
    engine.set_plan(None)
  return StepTimes(one_us=found[0], two_us=found[1])


def _step_us(
  engine: Engine, prompt: Sequence[int], sampling: SamplingParams
) -> float:
  spent, seen = [], 0
  with contextlib.closing(engine.steps(prompt, sampling)) as steps:
    before = time.perf_counter()
    for carry, result in steps:
      jax.block_until_ready(carry)
      now = time.perf_counter()
      # The first one compiles and waits for the prompt.
      if seen and result.drafted:
        spent.append(now - before)
      before = now
      seen += 1
      if len(spent) == TIMED_STEPS or seen == MOST_TIMED_STEPS:
        break
  if not spent:
    raise SpecPilotError(
      f"verification=auto cannot time steps of {engine.config.name}: none of"
      f" {seen} had drafts to verify; take one_level or two_level"
    )
  return 1e6 * statistics.median(spent)
