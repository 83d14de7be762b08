"""The compiled pieces of decoding: reset, prefill, step, score.

A request's whole changing state is one `Carry`. Invariant between steps: the
target state and the drafter's context cover every token but the last, which is
the *anchor*; the anchor is the root of the next pass.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Kernels
from specpilot_jax import configs
from specpilot_jax.decoding import accept
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import policy as policy_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import tree as tree_lib
from specpilot_jax.decoding.commit import commit
from specpilot_jax.decoding.schedule import Schedule, Seen
from specpilot_jax.models import layers
from specpilot_jax.models import state as state_lib


@state_lib.pytree
class Params:
  """A target's parameters [0], its drafter's [1], and so on: for a call.

  A call takes its arguments apart: of modules and variables that happens in
  Python, and takes as long as a pass. Here there are only arrays to be taken
  apart, each once, whoever shares it; the functions put them together, while
  they are traced.

  Attributes:
    arrays: leaves of all of them.
    structures: the tree of each.
    places: where the leaves of each are among the arrays.
  """

  arrays: tuple[jax.Array, ...]
  structures: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
  places: tuple[tuple[int, ...], ...] = dataclasses.field(
    metadata={"static": True}
  )

  @classmethod
  def of(cls, *trees: Any) -> "Params":
    leaves, structures = zip(*map(jax.tree.flatten, trees), strict=True)
    arrays = {id(leaf): leaf for own in leaves for leaf in own}
    place = {key: at for at, key in enumerate(arrays)}
    places = tuple(tuple(place[id(leaf)] for leaf in own) for own in leaves)
    return cls(tuple(arrays.values()), structures, places)

  def __getitem__(self, index: int) -> Any:
    leaves = [self.arrays[at] for at in self.places[index]]
    return jax.tree.unflatten(self.structures[index], leaves)


@state_lib.pytree
class Request:
  """What a request fixes before its first step."""

  sampling: sampling_lib.Sampling
  stop_ids: Int[Array, " M"]  # padded with -1
  limits: policy_lib.Limits
  plan: Any = ()  # what the schedule weighs; empty without one


@state_lib.pytree
class Carry:
  """All that changes while one request decodes.

  Attributes:
    target: committed target state; its length is the anchor's position.
    drafter: the drafter's context, None without a drafter.
    anchor: the last committed token.
    remaining: tokens that may still be emitted.
    history: token counts, None unless penalties are on.
    done: a stop id or the limit ended the request: further steps do nothing.
    schedule: what the schedule of passes has learned of the request; empty
      without one.
  """

  target: state_lib.TargetState
  drafter: Any
  anchor: Int[Array, ""]
  remaining: Int[Array, ""]
  history: sampling_lib.History | None
  done: Bool[Array, ""]
  schedule: Any = ()


@state_lib.pytree
class StepOutput:
  """What the host reads of a step: tokens[:count] were emitted."""

  tokens: Int[Array, " N"]
  count: Int[Array, ""]
  drafted: Int[Array, ""]
  depth: Int[Array, ""]  # drafts of the longest path of the pass
  accepted: Int[Array, ""]  # before a stop or the limit cut the run
  stopped: Bool[Array, ""]
  exhausted: Bool[Array, ""]
  healthy: Bool[Array, ""]  # no logit was NaN
  trunk: Int[Array, ""]  # drafts of the pass that a coarser pass chose
  confirmed: Int[Array, ""]  # of them, those that were accepted


@state_lib.pytree
class ScoreOutput:
  """Per scored token: see `Engine.score`."""

  logprob: Float[Array, " N"]
  argmax: Int[Array, " N"]
  gap: Float[Array, " N"]


class Drafted(NamedTuple):
  """The nodes of a pass; the chain's law too where they are one.

  The first `trunk` drafts are those that a coarser pass chose, one path from
  the anchor; 0 where there was none. `foreseen` are the drafts that it accepted
  of what it looked at. `scores` are what the drafter gives the path to each
  node, a log-probability: 0 for the anchor, none where nobody asks for them.
  """

  nodes: state_lib.Nodes
  chain: draft_lib.Drafts | None
  trunk: Int[Array, ""]
  foreseen: Int[Array, ""]
  scores: Float[Array, " N"] | None = None


@state_lib.pytree
class Verified:
  """What a verify pass leaves for the commit; arrays lead with nodes."""

  tokens: Int[Array, " N"]
  count: Int[Array, ""]
  depth: Int[Array, ""]
  taps: Float[Array, "N L D"]
  stash: tuple[state_lib.LayerStash, ...]
  acceptance: accept.Acceptance
  healthy: Bool[Array, ""]
  trunk: Int[Array, ""]
  confirmed: Int[Array, ""]
  foreseen: Int[Array, ""]

  @classmethod
  def of(
    cls, nodes, taps, stash, acceptance, nan, trunk: Any = 0, foreseen: Any = 0
  ) -> "Verified":
    """A pass over `nodes` of one request; `nan` says where logits were NaN."""
    trunk = jnp.asarray(trunk, jnp.int32)
    # The trunk is the first nodes, each the child of the one before it.
    index = jnp.arange(nodes.size)
    of_trunk = (acceptance.path == index) & (index > 0) & (index <= trunk)
    exists = jnp.arange(nodes.size) < nodes.count
    return cls(
      tokens=nodes.tokens,
      count=nodes.count,
      depth=jnp.where(exists, nodes.depth, 0).max(),
      taps=taps,
      stash=stash,
      acceptance=acceptance,
      healthy=~jnp.any(nan & exists),
      trunk=trunk,
      confirmed=(of_trunk & (index <= acceptance.accepted)).sum(
        dtype=jnp.int32
      ),
      foreseen=jnp.asarray(foreseen, jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class StepFns:
  """The pure functions of one engine; static choices are bound here.

  Attributes:
    config: of the target.
    graphdef: of the target; every call's `params` are the target's state and
      the drafter's parameters, and a schedule's where it has some: a tuple of
      them, or `Params`.
    drafter: None for autoregressive decoding.
    policy: which candidates a pass verifies.
    kernels: of the target, and of what is done with a drafter's lattice.
    acceptance: `match` or `rejection` (the same at temperature 0; of chains).
    features: what sampling needs.
    schedule: what precedes the exact pass; None for nothing.
  """

  config: configs.ModelConfig
  graphdef: Any
  drafter: draft_lib.Drafter | None
  policy: policy_lib.Policy
  kernels: Kernels
  acceptance: str
  features: sampling_lib.Features
  schedule: Schedule | None = None

  def reset(
    self, carry: Carry, prompt: Int[Array, " P"], length, limit
  ) -> Carry:
    """Empties a carry for a prompt of `length` ids and `limit` tokens."""
    history = None
    if self.features.penalties:
      vocab = self.config.vocab_size
      inside = jnp.arange(prompt.shape[0]) < length
      present = jnp.zeros((vocab,), bool)
      # Ids behind the prompt's end are dropped.
      ids = jnp.where(inside, prompt, vocab)
      history = sampling_lib.History(
        output=jnp.zeros((vocab,), jnp.int32),
        prompt=present.at[ids].set(True, mode="drop"),
      )
    return Carry(
      target=state_lib.reset_state(carry.target),
      # The prompt is padded to the capacity.
      drafter=(
        self.drafter.init_context(prompt.shape[0]) if self.drafter else None
      ),
      anchor=prompt[length - 1],
      remaining=limit,
      history=history,
      done=jnp.zeros((), bool),
      schedule=self.schedule.fresh() if self.schedule else (),
    )

  def prefill(
    self, params: Any, carry: Carry, tokens, count, *, definition: bool = False
  ) -> Carry:
    """Commits `count` prompt tokens, the first of `tokens` [C].

    With `definition` no kernel takes part, see `layers.by_definition`.
    """
    model = nnx.merge(self.graphdef, params[0])
    if definition:
      model = layers.by_definition(model)
    nodes = state_lib.run_of(tokens, count, prefill=True)
    out = model(nodes, carry.target, self.taps)
    return self.committed(params, carry, nodes, out, nodes.count)

  @property
  def taps(self) -> tuple[int, ...]:
    return self.drafter.taps if self.drafter else ()

  def committed(self, params, carry, nodes, out, count) -> Carry:
    """A run of nodes becomes the state (prefill and scoring)."""
    path = jnp.arange(nodes.size, dtype=jnp.int32)
    return dataclasses.replace(
      carry,
      target=commit(carry.target, out.stash, path, count),
      drafter=self.extend(
        params, carry, nodes.tokens, out.taps, carry.target.length, count
      ),
    )

  def extend(self, params, carry, tokens, taps, start, count):
    if self.drafter is None:
      return None
    with jax.named_scope("drafter"):
      return self.drafter.extend(
        params[1], carry.drafter, tokens, taps, start, count
      )

  def penalized(self, logits, request, history, nodes):
    if history is None:
      return logits
    return sampling_lib.penalize(
      logits, request.sampling, history, nodes.tokens, nodes.mask
    )

  def step(
    self, params: Any, carry: Carry, request: Request
  ) -> tuple[Carry, StepOutput]:
    """Drafts, verifies, accepts, commits."""
    position = carry.target.length
    lattice, drafted, sizes = None, None, (1,)
    if self.drafter is not None:
      with jax.named_scope("drafter"):
        lattice = self.drafter.draft(
          params[1], carry.drafter, carry.anchor, position
        )
        drafted = self.drafted(
          lattice,
          request,
          anchor=carry.anchor,
          position=position,
          remaining=carry.remaining,
        )
      sizes = (self.policy.rows,)
      if self.drafter.variable_length and sizes != (1,):
        sizes = (1, *sizes)
    verify = functools.partial(
      self._verify, params, carry, request, drafted, pad_to=sizes[-1]
    )
    branches = [functools.partial(verify, size) for size in sizes]

    def at_once() -> tuple[Carry, StepOutput, Seen]:
      if drafted is None or len(branches) == 1:
        seen = branches[0]()
      else:
        seen = jax.lax.cond(drafted.nodes.count > 1, branches[1], branches[0])
      return self.finish(params, carry, request, seen, self.policy.path)

    schedule = self.schedule
    if schedule is None or lattice is None or drafted is None:
      return at_once()[:2]
    after, out, told = self._scheduled(
      schedule, params, carry, request, lattice, drafted, at_once
    )
    learned = schedule.learned(self, carry, request, lattice, told)
    return dataclasses.replace(after, schedule=learned), out

  def finish(
    self,
    params: Any,
    carry: Carry,
    request: Request,
    seen: Verified,
    path_nodes: int,
  ) -> tuple[Carry, StepOutput, Seen]:
    """What a pass accepted becomes the state, as far as no stop cuts it.

    Args:
      carry: the one before the pass, which ran on top of it.
      seen: the pass.
      path_nodes: of a root path of it at most.
    """
    position = carry.target.length
    # No path is longer than the drafter's slots, whatever the tree holds.
    acceptance = jax.tree.map(
      lambda x: x[:path_nodes] if x.ndim else x, seen.acceptance
    )
    cut = accept.cut(acceptance, request.stop_ids, carry.remaining)
    count = jnp.where(carry.done, 0, cut.count)
    path = acceptance.path
    history = carry.history
    if history is not None:
      index = jnp.arange(path.shape[0])
      history = dataclasses.replace(
        history,
        output=history.output.at[acceptance.emitted].add(
          (index < count).astype(jnp.int32)
        ),
      )
    last = acceptance.emitted[jnp.maximum(count - 1, 0)]
    carry = Carry(
      target=commit(carry.target, seen.stash, path, count),
      drafter=self.extend(
        params, carry, seen.tokens[path], seen.taps[path], position, count
      ),
      anchor=jnp.where(carry.done, carry.anchor, last),
      remaining=carry.remaining - count,
      history=history,
      done=carry.done | cut.stopped | cut.exhausted,
      schedule=carry.schedule,
    )
    out = StepOutput(
      tokens=acceptance.emitted,
      count=count,
      drafted=seen.count - 1,
      depth=seen.depth,
      accepted=acceptance.accepted,
      stopped=cut.stopped,
      exhausted=cut.exhausted,
      healthy=seen.healthy,
      trunk=seen.trunk,
      confirmed=seen.confirmed,
    )
    told = Seen(seen.trunk, seen.confirmed, acceptance.accepted, seen.foreseen)
    return carry, out, told

  @property
  def rejects(self) -> bool:
    return self.acceptance == "rejection" and not self.features.greedy

  def drafted(
    self,
    lattice: draft_lib.Lattice,
    request: Request,
    *,
    anchor: Int[Array, ""],
    position: Int[Array, ""],
    remaining: Int[Array, ""],
  ) -> Drafted:
    """The nodes of a pass over drafts.

    Args:
      lattice: what the drafter offers.
      request: its limits, and the noise of drafts that are drawn.
      anchor, position: the last committed token, and where it stands.
      remaining: tokens that may still be emitted.
    """
    limits = request.limits
    # A draft behind the last token that may be emitted is of no use. It limits
    # a path, not the number of siblings.
    depth = jnp.minimum(remaining - 1, limits.depth)
    vocab, none = self.config.valid_vocab, jnp.zeros((), jnp.int32)
    if self.policy.tree != configs.CHAIN:
      tree = self.policy.tree_of(
        lattice,
        anchor,
        nodes=limits.nodes,
        depth=depth,
        valid_vocab=vocab,
        implementation=self.kernels.tree_growth,
      )
      nodes = tree_lib.nodes_of(tree)
      return Drafted(nodes, None, none, none, scores=tree.scores)
    chain = draft_lib.chain(
      lattice,
      valid_vocab=vocab,
      limit=jnp.minimum(depth, limits.nodes - 1),
      sampling=request.sampling,
      position=position,
      sample=self.rejects,
    )
    tokens = chain.tokens[: self.policy.rows - 1]
    nodes = state_lib.run_of(
      jnp.concatenate([anchor[None], tokens]), 1 + chain.count, prefill=False
    )
    scores = chain.path_scores[: nodes.size]
    return Drafted(nodes, chain, none, none, scores=scores)

  def _verify(self, params, carry, request, drafted, size, *, pad_to):
    """One target pass over the anchor and, unless `size` is 1, the drafts.

    The result is padded to `pad_to` nodes, so that passes of different size
    can be branches of one executable.
    """
    model = nnx.merge(self.graphdef, params[0])
    count = jnp.ones((), jnp.int32)
    if size > 1:
      # Not to be told apart by the compiler: a chain's pass is that of a tree
      # of as many rows, to the last bit.
      nodes = jax.lax.optimization_barrier(drafted.nodes)
      count = nodes.count
    else:
      # Alone, the anchor is certain to be committed: a prefill of one token,
      # whose state needs no second pass. One that is done commits nothing.
      alone = pad_to == 1
      nodes = state_lib.run_of(
        carry.anchor[None],
        jnp.where(carry.done, 0, 1) if alone else count,
        prefill=alone,
      )
    out, logits = self._pass(model, carry, request, nodes)
    if self.rejects and size > 1:
      law = sampling_lib.law(logits, request.sampling, self.features)
      acceptance = accept.rejection(
        nodes, drafted.chain, law, request.sampling, carry.target.length
      )
    else:
      acceptance = accept.match(
        nodes, self._choices(logits, carry, request, nodes)
      )
    verified = Verified.of(
      nodes,
      out.taps,
      out.stash,
      acceptance,
      jnp.isnan(logits).any(axis=-1),
      *((drafted.trunk, drafted.foreseen) if size > 1 else ()),
    )
    # One that is done has its anchor to look at all the same.
    verified = dataclasses.replace(verified, count=count)
    return pad_nodes(verified, size, pad_to)

  def _scheduled(
    self, schedule, params, carry, request, lattice, drafted, at_once
  ) -> tuple[Carry, StepOutput, Seen]:
    """The exact pass over what a schedule makes of the drafts, or `at_once`.

    Either ends with its commit: what a pass leaves behind would have to be
    padded to that of the larger one, an array at a time.
    """
    rows, path = schedule.rows, schedule.path

    def looked_at():
      longer, context = schedule.continued(
        self, params, carry, request, drafted
      )
      seen = self._verify(params, carry, request, longer, rows, pad_to=rows)
      written = dataclasses.replace(carry, drafter=context)
      return self.finish(params, written, request, seen, path)

    def not_looked_at():
      after, out, told = at_once()
      tokens = pad_nodes(out.tokens, out.tokens.shape[0], path)
      return after, dataclasses.replace(out, tokens=tokens), told

    wanted = schedule.wanted(self, carry, request, lattice, drafted)
    if wanted is None:
      return looked_at()
    return jax.lax.cond(wanted, looked_at, not_looked_at)

  def _pass(self, model, carry, request, nodes):
    """A target's output at nodes, and its penalised logits."""
    out = model(nodes, carry.target, self.taps)
    return out, self.penalized(
      model.logits(out.hidden), request, carry.history, nodes
    )

  def _choices(self, logits, carry, request, nodes) -> Int[Array, " N"]:
    """What the target chooses behind each node, by the request's noise."""
    positions = carry.target.length + nodes.depth + 1
    return sampling_lib.choose(
      logits, request.sampling, self.features, positions
    )

  def look(
    self, model, carry: Carry, request: Request, nodes: state_lib.Nodes
  ) -> tuple[accept.Acceptance, Float[Array, "N L D"]]:
    """What another model would accept of nodes; nothing is committed.

    It draws with the noise that the target draws with: where both agree on the
    law they choose the same tokens.

    Args:
      model: a `Target` of the same shape, or a coarser reading of it.
      nodes: on top of what is committed.

    Returns:
      The path that it accepts with what it emits, and the taps of all nodes.
    """
    out, logits = self._pass(model, carry, request, nodes)
    chosen = self._choices(logits, carry, request, nodes)
    return accept.match(nodes, chosen), out.taps

  def choices(
    self, model, carry: Carry, request: Request, nodes: state_lib.Nodes
  ) -> Int[Array, " N"]:
    """What a model chooses behind each node, with the request's noise.

    Args:
      model, nodes: as for `look`.
    """
    _, logits = self._pass(model, carry, request, nodes)
    return self._choices(logits, carry, request, nodes)

  def score(
    self,
    params: Any,
    carry: Carry,
    request: Request,
    tokens: Int[Array, " C"],
    targets: Int[Array, " C"],
    count,
    tolerance,
  ) -> tuple[Carry, ScoreOutput]:
    """Scores `targets[i]` as the token after `tokens[i]`, then commits.

    tokens[0] is the anchor; each target but the last is the next token.
    """
    model = layers.by_definition(nnx.merge(self.graphdef, params[0]))
    nodes = state_lib.run_of(tokens, count, prefill=True)
    out = model(nodes, carry.target, self.taps)
    raw = model.logits(out.hidden)
    logits = self.penalized(raw, request, carry.history, nodes)
    logprob = jax.nn.log_softmax(raw, axis=-1)
    positions = carry.target.length + nodes.depth + 1
    result = ScoreOutput(
      logprob=jnp.take_along_axis(logprob, targets[:, None], axis=1)[:, 0],
      argmax=sampling_lib.choose(
        logits, request.sampling, self.features, positions
      ),
      gap=sampling_lib.choice_gap(
        logits, request.sampling, self.features, positions, targets, tolerance
      ),
    )
    history = carry.history
    if history is not None:
      inside = jnp.arange(targets.shape[0]) < count
      history = dataclasses.replace(
        history,
        output=history.output.at[targets].add(inside.astype(jnp.int32)),
      )
    carry = self.committed(params, carry, nodes, out, nodes.count)
    return dataclasses.replace(carry, history=history), result


def pad_nodes(tree, size: int, pad_to: int):
  """Pads the leading axis, the node axis, of every array of `tree`."""

  def pad(x):
    if x.ndim == 0 or size == pad_to:
      return x
    return jnp.pad(x, ((0, pad_to - size),) + ((0, 0),) * (x.ndim - 1))

  return jax.tree.map(pad, tree)
