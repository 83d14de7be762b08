"""Two-level verification: a coarse pass makes a longer draft for the exact one.

Level 1 runs the target over the drafts with the nested 8-bit view of its
weights and with the noise of the exact pass, so that on agreement both choose
the same tokens. What it would accept, and the token it would add, are the
*trunk*: a likelier chain than the drafter's own. The drafter goes on from the
trunk's end, reading level 1's taps; then one exact pass verifies the trunk, the
new drafts behind it and, where nodes are left, the drafts that level 1 refused.

Level 1 accepts nothing and commits nothing. It runs on top of the committed
state, which no pass writes. What the drafter makes of its taps stands in the
drafter's context behind what is committed, where the step's commit writes over
all of it: no copy of the context is made, which may be as long as a prompt.

It pays where tau_two / tau_one > (C8 + C12 + 2 D) / (C12 + D), of the times of
a level-1 pass, an exact pass and a draft. `auto` weighs the same step by step:
see `level_choice`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from pallas_kernels import w12_array
from specpilot_jax import configs
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.policy import Limits, Policy
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.decoding.schedule import Seen
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import dynamic_draft, level_choice, w12
from specpilot_jax.mechanisms.level_choice import Plan, Recent, StepTimes
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.target import Target


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
  # Places behind all nodes look like some node and are nobody's ancestors.
  # (Nodes behind the limit keep their descendants, which are behind it too.)
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
    system: what it was made for.
    policy: of the drafts that a pass gets from the drafter at once.
    longest: nodes of a root path that an exact pass can verify.
    view: what level 1 reads of the target's weights, one of `configs.VIEWS`.
    graphdef: of a target whose parameters are `params`, which level 1 runs
      instead; None where it reads the exact pass's weights.
    params: of the schedule.
    variable: whether the drafter often offers nothing: then a step has one
      level.
    times: of the deployment; None where `auto` is to measure them.
  """

  system: SystemConfig
  policy: Policy
  longest: int
  view: str
  graphdef: Any = None
  params: Any = ()
  variable: bool = False
  times: StepTimes | None = None

  @property
  def auto(self) -> bool:
    """Whether each step decides; otherwise all have two levels."""
    return self.system.verification == configs.AUTO

  @property
  def rows(self) -> int:
    return self.shape(self.system.level_one_passes)[0]

  @property
  def path(self) -> int:
    return self.shape(self.system.level_one_passes)[1]

  def shape(self, passes: int) -> tuple[int, int]:
    """See the module's `shape`."""
    return shape(self.policy, passes, self.longest)

  def fresh(self) -> Recent:
    return Recent.fresh()

  def plan(self, engine: Engine, sampling: SamplingParams) -> Plan:
    """The times given, or those of the engine's own steps."""
    if not self.auto:
      return Plan.of(1, 1)  # Nothing is weighed.
    times = self.times or level_choice.step_times(engine, sampling)
    return Plan.of(times.one_us, times.two_us)

  def wanted(
    self,
    step: step_lib.StepFns,
    carry: step_lib.Carry,
    request: step_lib.Request,
    lattice: draft_lib.Lattice,
    drafted: step_lib.Drafted,
  ) -> Bool[Array, ""] | None:
    if not self.auto and not self.variable:
      # Not even behind a request's end: a step that decides has to wait for
      # the host, each time, and there is one such step.
      return None
    some = (drafted.nodes.count > 1) & ~carry.done
    if not self.auto:
      return some
    hoped = self._expected(step, carry, request, lattice)
    left = carry.remaining.astype(jnp.float32)
    return some & level_choice.pays(carry.schedule, hoped, left, request.plan)

  def _expected(self, step, carry, request, lattice):
    """Drafts that the drafter expects to be accepted, of those verified."""
    limits = request.limits
    first = draft_lib.chain(
      lattice,
      valid_vocab=step.config.valid_vocab,
      limit=jnp.minimum(limits.depth, limits.nodes - 1),
      sampling=request.sampling,
      position=carry.target.length,
      sample=False,
    )
    return dynamic_draft.survival(lattice, first).sum()

  def continued(
    self,
    step: step_lib.StepFns,
    params: Any,
    carry: step_lib.Carry,
    request: step_lib.Request,
    drafted: step_lib.Drafted,
  ) -> tuple[step_lib.Drafted, Any]:
    if self.graphdef is None:
      model = nnx.merge(step.graphdef, params[0])
    else:
      model = nnx.merge(self.graphdef, params[2])
    model = layers.read_view(model, self.view)
    context = carry.drafter
    for i in range(self.system.level_one_passes):
      drafted, context = self._longer(
        step, model, params, carry, context, request, drafted.nodes, i + 1
      )
    return drafted, context

  def _longer(
    self, step, model, params, carry, context, request, nodes, passes
  ) -> tuple[step_lib.Drafted, Any]:
    """Nodes, looked at and continued; and the context that they leave.

    Args:
      context: the drafter's; of tokens that are not committed it may hold what
        this pass looks at again.
      passes: of level 1, this one included.
    """
    limits, chain = request.limits, self.policy.tree == configs.CHAIN
    seen, taps = step.look(model, carry, request, nodes)
    rows, longest = self.shape(passes)
    path = seen.path[: min(self.shape(passes - 1)[1], nodes.size)]
    taken = seen.accepted + 1
    position = carry.target.length
    with jax.named_scope("drafter"):
      context = step.drafter.extend(
        params[1], context, nodes.tokens[path], taps[path], position, taken
      )
      choice = seen.emitted[seen.accepted]
      lattice = step.drafter.draft(params[1], context, choice, position + taken)

      limit = limits.nodes * (1 + passes if chain else 1)
      # A draft behind the last token that may be emitted is of no use.
      trunk = jnp.minimum(taken, jnp.maximum(carry.remaining - 1, 0))
      trunk = jnp.minimum(trunk, jnp.minimum(limit, longest) - 1)
      room = limits.nodes if chain else limits.nodes - trunk
      room = jnp.where(trunk == taken, room, 1)
      depth = jnp.minimum(limits.depth, longest - 1 - trunk)
      second = step.drafted(
        lattice,
        dataclasses.replace(request, limits=Limits(nodes=room, depth=depth)),
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
    drafted = step_lib.Drafted(
      longer, None, trunk=trunk, foreseen=seen.accepted
    )
    return drafted, context

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
    return recent.learned(self._expected(step, carry, request, lattice), seen)


def shape(
  policy: Policy, passes: int, longest: int = configs.MAX_NODES
) -> tuple[int, int]:
  """Rows of a pass behind so many passes of level 1, and nodes of a root path
  at most.

  A trunk is one longer than the drafts it was made of. Behind a chain all fits:
  trunk, new chain, and what is left of the chains before. A tree keeps its
  envelope, which trunk and new drafts share. A trunk, or what is drafted behind
  it, ends where a path is as long as the target's kernels take.

  Args:
    policy: of the drafts that a pass gets from the drafter at once.
    longest: nodes of a root path that a pass can verify.
  """
  rows = policy.rows
  if policy.tree == configs.CHAIN:
    rows *= 1 + passes
  return rows, min(rows, (1 + passes) * policy.path, longest)


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
    SpecPilotError: no drafter; more nodes than a pass may have, or than the
      kernel that reads the view takes; weights that W12 does not hold, or in
      FP8.
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
  policy, passes = Policy.of(system, drafter), system.level_one_passes
  rows, _ = shape(policy, passes)
  if rows > configs.MAX_NODES:
    raise SpecPilotError(
      f"level_one_passes={passes} makes passes of {rows} nodes of chains of"
      f" {policy.rows}, at most {configs.MAX_NODES} are possible"
    )
  graphdef, params = None, ()
  if target.weights != "w12":
    looked_at, _ = shape(policy, passes - 1)
    kernels_lib.check_products(
      target.kernels, looked_at, "w12", dtype=str(target.dtype)
    )
    make = coarse or functools.partial(coarse_target, target)
    graphdef, params = nnx.split(make(system.view))
  return TwoLevel(
    system=system,
    policy=policy,
    longest=kernels_lib.longest_path(target.kernels, target.config),
    view=system.view,
    graphdef=graphdef,
    params=params,
    variable=drafter.variable_length,
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
  decoded = target.kernels.w12_matmul == "reference" and view != layers.SCALED
  if not decoded:
    return w12.target(target)
  arrays = assembly.leaves(target)
  for name, leaf in arrays.items():
    # Rows that tokens look up are exact; a tied head is the same array.
    lookup, tied = name == "embed.weight", target.config.tie_embeddings
    if lookup and not tied:
      continue
    # One at a time: of one matrix alone there are both forms.
    held = w12.hold(name, leaf)
    if isinstance(held, w12_array.W12Array) and not lookup:
      midpoint = view == layers.MIDPOINT
      held = _decoded(held, midpoint=midpoint, dtype=target.dtype)
    arrays[name] = held
  return target_lib.assemble(
    target.config, arrays, target.dtype, target.kernels
  )


@functools.partial(jax.jit, static_argnames="dtype")
def _decoded(packed: w12_array.W12Array, *, midpoint, dtype) -> Array:
  """Compiled, so that codes of 32 bits each are never held."""
  return w12_array.decode_view(packed, midpoint=midpoint).astype(dtype)
