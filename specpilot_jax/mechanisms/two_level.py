"""Two-level verification: a coarse pass makes a longer draft for the exact one.

Level 1 runs the target over the drafts with the nested 8-bit view of its
weights and with the noise of the exact pass, so that on agreement both choose
the same tokens. What it would accept, and the token it would add, are the
*trunk*: a likelier chain than the drafter's own. The drafter goes on from the
trunk's end, reading level 1's taps; then one exact pass verifies the trunk, the
new drafts behind it and, where nodes are left, the drafts that level 1 refused.

Level 1 accepts nothing and commits nothing. It runs on top of the committed
state, which no pass writes; the drafter's context with its taps is a copy; all
of it is dropped before the exact pass is accepted and committed.

It pays where tau_two / tau_one > (C8 + C12 + 2 D) / (C12 + D), of the times of
a level-1 pass, an exact pass and a draft. `auto` weighs the same step by step,
from how sure the drafter is, how that turned out of late, and how often the
exact pass agreed with level 1: on the device, so that no step waits for the
host and none decides on what the host saw a step ago.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import w12_array
from specpilot_jax import configs
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.policy import Limits, Policy
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.decoding.schedule import Seen
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import w12
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.target import Target

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
    accepted: drafts that were: in steps of two levels, by level 1.
    judged: tokens of trunks that the exact pass judged.
    agreed: of them, those that it accepted.
  """

  steps: Float[Array, ""]
  expected: Float[Array, ""]
  accepted: Float[Array, ""]
  judged: Float[Array, ""]
  agreed: Float[Array, ""]


def expected_drafts(lattice: draft_lib.Lattice, first: draft_lib.Drafts):
  """How many of its first choices a drafter expects to be accepted.

  The sum of the probabilities of all runs, as its scores say them.

  Args:
    lattice: what it offers.
    first: its chain, not drawn.
  """
  each = jnp.exp(first.log_law.max(axis=-1))
  each = jnp.where(jnp.arange(each.shape[0]) < lattice.count, each, 0)
  return jnp.cumprod(each).sum().astype(jnp.float32)


def expected_tokens(
  agreement: Float[Array, ""], drafts: Float[Array, ""], usual: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Tokens that a step is expected to emit, with one level and with two.

  One level emits 1 + drafts. The trunk of two levels is as long: with agreement
  `a` per token it gives the sum of a^i over its tokens i, and behind all of it,
  with probability a^length, as many drafts as usual.

  Args:
    agreement: share of tokens at which level 1 and the exact pass agree.
    drafts: of the step, those that are expected to be accepted.
    usual: of a step of this request.
  """
  length = drafts + 1
  # 1 - a^length for an `a` near 1, of which a difference would leave rounding.
  doubt = jnp.maximum(1 - agreement, 1e-6)
  broken = -jnp.expm1(length * jnp.log1p(-doubt))
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
    hoped: `expected_drafts` of the step.
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


def composed(
  first: state_lib.Nodes,
  path: Int[Array, " P"],
  accepted: Int[Array, ""],
  choice: Int[Array, ""],
  second: state_lib.Nodes,
  *,
  trunk: Int[Array, ""],
  limit: Int[Array, ""],
  rows: int,
) -> state_lib.Nodes:
  """One tree of a looked-at tree and of what was drafted behind its best path.

  The trunk comes first, then `second`, then the nodes of `first` that are not
  on the path, where they hung before, as many as there is room for.

  Args:
    first: the nodes that were looked at.
    path: of its nodes, from the root down; `accepted` + 1 of them count.
    accepted: drafts on the path.
    choice: the token that follows the path.
    second: nodes whose root is that token.
    trunk: drafts of the trunk, at most `accepted` + 1; where it is shorter,
      `second` has its root alone.
    limit: nodes at most, at least `trunk` + 1.
    rows: places.
  """
  index = jnp.arange(rows, dtype=jnp.int32)
  own = jnp.arange(first.size, dtype=jnp.int32)
  places = jnp.arange(path.shape[0], dtype=jnp.int32)
  # Where the nodes of `first` go: along the trunk, or behind `second`.
  on_path = jnp.any(
    (path[:, None] == own) & (places <= accepted)[:, None], axis=0
  )
  beside = ~on_path & (own < first.count)
  rank = jnp.cumsum(beside, dtype=jnp.int32) - 1
  behind = trunk + second.count  # first place behind `second`
  place_of = jnp.where(on_path, first.depth, behind + rank)
  # And what comes to each place.
  along = path[jnp.minimum(index, jnp.minimum(accepted, path.shape[0] - 1))]
  by_rank = jnp.argsort(~beside, stable=True)
  aside = by_rank[jnp.clip(index - behind, 0, first.size - 1)]
  in_trunk, in_rest = index <= trunk, index >= behind
  mine = jnp.where(in_trunk, along, aside)
  of_second = jnp.clip(index - trunk, 0, second.size - 1)
  is_choice = in_trunk & (index > accepted)

  def pick(one, two):
    return jnp.where(in_trunk | in_rest, one[mine], two[of_second])

  tokens = jnp.where(is_choice, choice, pick(first.tokens, second.tokens))
  depth = jnp.where(in_trunk, index, trunk + second.depth[of_second])
  depth = jnp.where(in_rest, first.depth[mine], depth)
  parents = jnp.where(in_trunk, index - 1, trunk + second.parents[of_second])
  parents = jnp.where(
    in_rest, place_of[jnp.maximum(first.parents[mine], 0)], parents
  )
  # Columns of the trunk are ancestors of all of the trunk and of `second`.
  above = in_trunk[None] & (index <= index[:, None])
  drafted = ~in_trunk & ~in_rest
  hung = second.mask[of_second][:, of_second] & drafted[None]
  kept = first.mask[mine][:, mine] & ~is_choice[None] & ~drafted[None]
  mask = jnp.where(drafted[:, None], in_trunk[None] | hung, above)
  mask = jnp.where(in_rest[:, None], kept, mask)
  count = behind + beside.sum(dtype=jnp.int32)
  # Places without a node look like some node; none of them is an ancestor.
  mask = (mask & (index < count)[None]) | (index[:, None] == index)
  return state_lib.Nodes(
    tokens=tokens.astype(jnp.int32),
    parents=parents.astype(jnp.int32),
    depth=depth.astype(jnp.int32),
    mask=mask,
    count=jnp.minimum(count, jnp.minimum(limit, rows)).astype(jnp.int32),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class TwoLevel:
  """The schedule of an engine; see `decoding.schedule.Schedule`.

  Attributes:
    policy: of the drafts that a pass gets from the drafter at once.
    passes: of level 1.
    rows, path, params: of the schedule.
    view: what level 1 reads of the target's weights, one of `configs.VIEWS`.
    graphdef: of a target whose parameters are `params`, which level 1 runs
      instead; None where it reads the exact pass's weights.
    variable: whether the drafter often offers nothing: then a step has one
      level.
    auto: whether each step decides; otherwise all have two levels.
    times: of the deployment; None where `auto` is to measure them.
  """

  policy: Policy
  passes: int
  rows: int
  path: int
  view: str
  graphdef: Any = None
  params: Any = ()
  variable: bool = False
  auto: bool = False
  times: StepTimes | None = None

  def fresh(self) -> Recent:
    zero = jnp.zeros((), jnp.float32)
    return Recent(zero, zero, zero, zero, zero)

  def plan(self, engine: Engine, sampling: SamplingParams) -> Plan:
    """The times given, or those of the engine's own steps."""
    if not self.auto:
      return Plan.of(1, 1)  # Nothing is weighed.
    times = self.times or step_times(engine, sampling)
    return Plan.of(times.one_us, times.two_us)

  def wanted(
    self,
    step: step_lib.StepFns,
    carry: step_lib.Carry,
    request: step_lib.Request,
    lattice: draft_lib.Lattice,
    drafted: step_lib.Drafted,
  ) -> Bool[Array, ""] | None:
    some = drafted.nodes.count > 1
    if not self.auto:
      return some if self.variable else None
    hoped = self._expected(step, carry, request, lattice)
    left = carry.remaining.astype(jnp.float32)
    return some & pays(carry.schedule, hoped, left, request.plan)

  def _expected(self, step, carry, request, lattice):
    first = draft_lib.chain(
      lattice,
      valid_vocab=step.config.valid_vocab,
      limit=lattice.count,
      sampling=request.sampling,
      position=carry.target.length,
      sample=False,
    )
    return expected_drafts(lattice, first)

  def continued(
    self,
    step: step_lib.StepFns,
    params: Any,
    carry: step_lib.Carry,
    request: step_lib.Request,
    drafted: step_lib.Drafted,
  ) -> step_lib.Drafted:
    if self.graphdef is None:
      model = nnx.merge(step.graphdef, params[0])
    else:
      model = nnx.merge(self.graphdef, params[2])
    model = layers.read_view(model, self.view)
    nodes, trunk = drafted.nodes, jnp.zeros((), jnp.int32)
    for i in range(self.passes):
      nodes, trunk = self._longer(
        step, model, params, carry, request, nodes, i + 1
      )
    return step_lib.Drafted(nodes, None, trunk)

  def _longer(self, step, model, params, carry, request, nodes, passes):
    """Nodes, looked at and continued; and the drafts of their trunk.

    Args:
      passes: of level 1, this one included.
    """
    limits, chain = request.limits, self.policy.tree == configs.CHAIN
    seen, taps = step.look(model, carry, request, nodes)
    rows, path_nodes = self.shape(passes)
    path = seen.path[: min(path_nodes, nodes.size)]
    taken = seen.accepted + 1
    position = carry.target.length
    # A copy, dropped here: the carry's context never holds these taps.
    context = step.drafter.extend(
      params[1], carry.drafter, nodes.tokens[path], taps[path], position, taken
    )
    choice = seen.emitted[seen.accepted]
    lattice = step.drafter.draft(params[1], context, choice, position + taken)

    limit = limits.nodes * (1 + passes if chain else 1)
    # A draft behind the last token that may be emitted is of no use.
    trunk = jnp.minimum(taken, jnp.maximum(carry.remaining - 1, 0))
    trunk = jnp.minimum(trunk, limit - 1)
    room = limits.nodes if chain else limits.nodes - trunk
    room = jnp.where(trunk == taken, room, 1)
    second = step.drafted(
      lattice,
      dataclasses.replace(
        request, limits=Limits(nodes=room, depth=limits.depth)
      ),
      anchor=choice,
      position=position + taken,
      remaining=carry.remaining - taken,
    )
    longer = composed(
      nodes,
      path,
      seen.accepted,
      choice,
      second.nodes,
      trunk=trunk,
      limit=limit,
      rows=rows,
    )
    return longer, trunk

  def shape(self, passes: int) -> tuple[int, int]:
    """Rows of a tree behind so many passes of level 1, and nodes of a path."""
    return shape(self.policy, passes)

  def learned(
    self,
    step: step_lib.StepFns,
    carry: step_lib.Carry,
    request: step_lib.Request,
    lattice: draft_lib.Lattice,
    seen: Seen,
  ) -> Recent:
    recent: Recent = carry.schedule
    if not self.auto:
      return recent
    two = seen.trunk > 0
    accepted = jnp.where(two, seen.trunk - 1, seen.accepted)
    judged = seen.confirmed + (seen.confirmed < seen.trunk)
    hoped = self._expected(step, carry, request, lattice)
    keep = jnp.where(two, MEMORY, DRIFT)
    return Recent(
      steps=MEMORY * recent.steps + 1,
      expected=MEMORY * recent.expected + hoped,
      accepted=MEMORY * recent.accepted + accepted,
      judged=keep * recent.judged + judged,
      agreed=keep * recent.agreed + seen.confirmed,
    )


def shape(policy: Policy, passes: int) -> tuple[int, int]:
  """Rows of an exact pass behind so many passes of level 1, and nodes of a
  root path at most.

  A trunk is one longer than the drafts it was made of. Behind a chain all fits:
  trunk, new chain, and what is left of the chains before. A tree keeps its
  envelope, which trunk and new drafts share.
  """
  if policy.tree == configs.CHAIN:
    rows = (1 + passes) * policy.rows
    return rows, rows
  return policy.rows, min(policy.rows, (1 + passes) * policy.path)


def schedule(
  system: SystemConfig,
  target: Target,
  drafter: draft_lib.Drafter | None,
  *,
  times: StepTimes | None = None,
  coarse: Callable[[str], Target] | None = None,
) -> TwoLevel | None:
  """What precedes the exact pass of a system; None where nothing does.

  Level 1 reads the view inside of the exact pass's own weights where they are
  in W12; otherwise it has weights of its own beside them.

  Args:
    system: what is wanted.
    target, drafter: as `registry.prepare` makes them.
    times: of the deployment's steps; None where `auto` is to measure them.
    coarse: makes level 1's weights by the view, `coarse_target` by default;
      for systems that share them.

  Raises:
    SpecPilotError: no drafter; more nodes than a pass may have; weights that
      W12 does not hold, or in FP8.
  """
  if system.verification == configs.ONE_LEVEL:
    return None
  if drafter is None:
    raise SpecPilotError(
      f"verification={system.verification} needs a drafter: without one"
      " decoding is autoregressive"
    )
  if target.weights == "fp8":
    raise SpecPilotError(
      f"verification={system.verification} looks with the 8-bit view of"
      f" bfloat16 weights, {target.config.name} is in FP8"
    )
  policy = Policy.of(system, drafter)
  rows, path = shape(policy, system.level_one_passes)
  if rows > configs.MAX_NODES:
    raise SpecPilotError(
      f"level_one_passes={system.level_one_passes} makes passes of {rows} nodes"
      f" of chains of {policy.rows}, at most {configs.MAX_NODES} are possible"
    )
  graphdef, params = None, ()
  if target.weights != "w12":
    make = coarse or functools.partial(coarse_target, target)
    graphdef, params = nnx.split(make(system.view))
  return TwoLevel(
    policy=policy,
    passes=system.level_one_passes,
    rows=rows,
    path=path,
    view=system.view,
    graphdef=graphdef,
    params=params,
    variable=drafter.variable_length,
    auto=system.verification == configs.AUTO,
    times=times,
  )


def coarse_target(target: Target, view: str) -> Target:
  """A target beside another one, whose products are those of the view.

  Kernels read the view inside of W12. The reference would decode it in every
  pass: it gets the decoded matrices instead, the same numbers.

  Args:
    target: in bf16.
    view: one of `configs.VIEWS`.

  Raises:
    SpecPilotError: values that W12 does not hold.
  """
  coarse = w12.target(target)
  if target.kernels.w12_matmul != "reference" or view == layers.SCALED:
    return coarse
  arrays = assembly.leaves(coarse)
  lookup = "embed.weight"
  for name, leaf in arrays.items():
    # Rows that tokens look up are exact, and a tied head is the same array.
    if isinstance(leaf, w12_array.W12Array) and not (
      name == lookup and target.config.tie_embeddings
    ):
      whole = w12_array.decode(leaf)
      if name != lookup:
        whole = w12_array.decode_view(leaf, midpoint=view == layers.MIDPOINT)
      arrays[name] = whole.astype(target.dtype)
  return target_lib.assemble(
    target.config, arrays, target.dtype, target.kernels
  )


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
