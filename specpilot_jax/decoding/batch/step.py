"""The compiled pieces of decoding many requests: admit, prefill, step.

They are those of one request (`decoding.step`), mapped over slots. One thing is
not mapped, because there it pays that it is not: the target's pass, whose rows
are the nodes of all requests (`models.packed`).

State: keys and values lie in slots, `capacity` rows for each, beside the slot's
recurrent states and convolution windows. Pages would save what a short request
leaves empty of its slot; a hybrid has so little of it that they would save next
to nothing: of the 27B shapes (16 of 64 layers attend, 4 heads of 256) 4,096
rows are 256 MiB, so that 16 slots are 4 GiB beside 54 GB of weights (FP8: 27),
and the recurrent state of a slot, which no page can cut, is 144 MiB. A row is
found by its index, no table is read, and shapes are static.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.decoding import accept
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import policy as policy_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.packed import Both, Packed, Ridden, each, fit
from specpilot_jax.models.target import TargetOutput

FILTERED_ROWS = 16
"""Rows of logits that are sorted at once, where requests have filters."""


@state_lib.pytree
class Slots:
  """All that changes, and what each request has fixed; arrays lead with slots.

  Attributes:
    carry: of every slot. Its `history` is there whether or not a request has
      penalties.
    request: what the slot's request fixed when it was admitted.
    sampled: whether its temperature is above 0.
    learned: what the policy has learned of it; empty without one.
  """

  carry: step_lib.Carry
  request: step_lib.Request
  sampled: Bool[Array, " S"]
  learned: Any = ()


class Offer(NamedTuple):
  """What requests would verify, arrays lead with requests; for an `Allocate`.

  Attributes:
    nodes: of each request, within its own limits; `count` is 0 where a request
      takes no part.
    scores: sum of the lattice's scores along the path to each node; 0 for the
      anchor, -inf where there is no node. Of a chain those of the drafter's
      first choices, whichever drafts were drawn.
    live: requests that take part.
    lattice: what was drafted.
    first: the chains of first choices, nothing of them drawn.
    learned: what the policy has learned of each request.
    plan: what the host said of this step, traced.
    rows: of the pass, which the counts must not exceed in all; static.
  """

  nodes: state_lib.Nodes
  scores: Float[Array, "S N"]
  live: Bool[Array, " S"]
  lattice: draft_lib.Lattice
  first: draft_lib.Drafts
  learned: Any
  plan: Any
  rows: int


class Allocate(Protocol):
  """Who gets the rows of a pass. All is traced by jit.

  Whatever it says, outputs are the target's own: it decides which drafts are
  verified at all. Under rejection sampling it must not look at drafted tokens
  (DESIGN section 5).

  Attributes:
    dense: whether it is asked about the dense form too, where every node has a
      row, so that leaving some out saves nothing.
  """

  @property
  def dense(self) -> bool: ...

  def unplanned(self) -> Any:
    """Its plan where the host says none; a pytree of a plan's shapes."""
    ...

  def fresh(self) -> Any:
    """What it has learned of a request before its first step; a pytree."""
    ...

  def __call__(self, offer: Offer) -> state_lib.Nodes:
    """The offer's nodes, fewer of them where they are too many.

    The first nodes of a request are a tree of their own (`take_first`), any
    others that come with their ancestors are made one by `keep`. Anchors of
    live requests stay whatever it says; what is too much for the pass is taken
    from the last requests.
    """
    ...

  def learned(
    self, offer: Offer, verified: Int[Array, " S"], accepted: Int[Array, " S"]
  ) -> Any:
    """What it knows of each request behind a step.

    Args:
      verified: drafts of the longest path that was verified.
      accepted: drafts accepted, before a stop or the limit cut the run.
    """
    ...


def take_first(
  nodes: state_lib.Nodes, count: Int[Array, " S"]
) -> state_lib.Nodes:
  """The first nodes of every request."""
  return dataclasses.replace(nodes, count=jnp.minimum(nodes.count, count))


def keep(nodes: state_lib.Nodes, kept: Bool[Array, "S N"]) -> state_lib.Nodes:
  """Some nodes of every request, in their order.

  Args:
    kept: with every node its ancestors.
  """
  return each(_keep)(nodes, kept)


def _keep(nodes: state_lib.Nodes, kept: Bool[Array, " N"]) -> state_lib.Nodes:
  size = nodes.size
  index = jnp.arange(size, dtype=jnp.int32)
  kept = kept & (index < nodes.count)
  order = jnp.argsort(~kept, stable=True).astype(jnp.int32)  # kept ones first
  place = jnp.zeros((size,), jnp.int32).at[order].set(index)
  count = kept.sum(dtype=jnp.int32)
  parents = nodes.parents[order]
  there = index < count
  mask = nodes.mask[order][:, order] & there[:, None] & there[None, :]
  return dataclasses.replace(
    nodes,
    tokens=jnp.where(there, nodes.tokens[order], 0),
    parents=jnp.where(
      there, jnp.where(parents >= 0, place[jnp.maximum(parents, 0)], -1), 0
    ),
    depth=jnp.where(there, nodes.depth[order], 1),
    # A node that does not exist sees itself: no row without a score.
    mask=mask | jnp.eye(size, dtype=bool),
    count=count,
  )


@state_lib.pytree
class Rider:
  """A run of a prompt that rides in a step; the slot takes no part in it."""

  slot: Int[Array, ""]
  tokens: Int[Array, " C"]
  count: Int[Array, ""]


@state_lib.pytree
class BatchOutput:
  """What the host reads of a step, a row per listed slot.

  Attributes:
    step: see `decoding.step.StepOutput`; nothing is emitted where a request
      takes no part.
    live: requests that took part.
    scores: of the nodes that were offered to verification; see `Offer`. None
      without a drafter.
  """

  step: step_lib.StepOutput
  live: Bool[Array, " S"]
  scores: Float[Array, "S N"] | None


def _at(tree: Any, index) -> Any:
  return jax.tree.map(lambda x: x[index], tree)


def _read(tree: Any, index) -> Any:
  """`_at`, at once: whoever reads later keeps arrays from being updated."""
  return jax.lax.optimization_barrier(_at(tree, index))


def _put(tree: Any, index, rows: Any) -> Any:
  """Writes rows at an index, or at several; those out of range are dropped."""
  return jax.tree.map(
    lambda x, row: x.at[index].set(row, mode="drop"), tree, rows
  )


@dataclasses.dataclass(frozen=True)
class BatchFns:
  """The pure functions of a batch engine.

  Attributes:
    one: those of one request, with the features that any request of the batch
      needs. Requests that need less are decoded as they would be alone.
    allocate: who gets the rows of a packed pass; None where every request's
      own limits fit.
  """

  one: step_lib.StepFns
  allocate: Allocate | None = None

  def admit(
    self,
    slots: Slots,
    slot: Int[Array, ""],
    prompt: Int[Array, " T"],
    length: Int[Array, ""],
    limit: Int[Array, ""],
    request: step_lib.Request,
    sampled: Bool[Array, ""],
  ) -> Slots:
    """Gives a slot to a request; nothing of an earlier one stays.

    Keys and values are cleared too: a request that ended in NaN left some, and
    no weight of zero hides that.

    Args:
      prompt: padded to the capacity.
      length: ids of the prompt.
      limit: tokens that may be emitted.
    """
    used = _at(slots.carry, slot)
    used = dataclasses.replace(
      used, target=jax.tree.map(jnp.zeros_like, used.target)
    )
    # The state has room for penalties, whoever uses them.
    features = dataclasses.replace(self.one.features, penalties=True)
    fns = dataclasses.replace(self.one, features=features)
    carry = fns.reset(used, prompt, length, limit)
    learned = self.allocate.fresh() if self.allocate else ()
    return _put(slots, slot, Slots(carry, request, sampled, learned))

  def prefill(self, params: Any, slots: Slots, rider: Rider) -> Slots:
    """Commits a run of a slot's prompt, in a pass of its own."""
    carry = _read(slots.carry, rider.slot)
    carry = self.one.prefill(params, carry, rider.tokens, rider.count)
    return dataclasses.replace(
      slots, carry=_put(slots.carry, rider.slot, carry)
    )

  def step(
    self,
    params: Any,
    slots: Slots,
    index: Int[Array, " B"] | None,
    listed: Bool[Array, " B"],
    limits: policy_lib.Limits,
    plan: Any,
    rider: Rider | None,
    *,
    rows: int | None,
  ) -> tuple[Slots, BatchOutput]:
    """One pass over the requests of some slots.

    Args:
      index: the slots, each once; those out of range are none. None for all
        slots in their order, which spares copies to and from.
      listed: entries of `index` that take part.
      limits: of each, beside those of the request.
      plan: see `Offer`.
      rider: a run of another slot's prompt that the pass takes along.
      rows: of a packed pass, rider not included; None for the dense form.
        Where there is one for each slot nothing is drafted: a step of plain
        decoding, behind which the drafter's context is what it should be.
    """
    own = slots
    if index is not None:
      own = jax.tree.map(
        lambda x: jnp.take(x, index, axis=0, mode="clip"), slots
      )
    carry, history, done = own.carry, own.carry.history, own.carry.done
    live = listed & ~done
    carry = dataclasses.replace(
      carry,
      done=~live,
      history=history if self.one.features.penalties else None,
    )
    request = dataclasses.replace(
      own.request,
      limits=jax.tree.map(jnp.minimum, own.request.limits, limits),
    )
    own = dataclasses.replace(own, carry=carry, request=request)
    lattice, drafted, offer = None, None, None
    if rows is None or rows > live.shape[0]:
      lattice, drafted = self._draft(params, own)
    if drafted is not None:
      offer = self._offer(own, lattice, drafted, live, plan, rows)
    nodes = self._nodes(own, offer, live, rows)
    ridden = None
    if rider is not None:
      ridden = _read(slots.carry, rider.slot)
    seen, also = self._verify(
      params, _idle(own, live), drafted, nodes, rider, ridden, rows
    )
    after, out, _ = each(
      lambda carry, request, seen: self.one.finish(
        params, carry, request, seen, self.one.policy.path
      )
    )(carry, request, seen)
    after = dataclasses.replace(
      after,
      done=jnp.where(live, after.done, done),
      history=history if after.history is None else after.history,
    )
    learned = own.learned
    allocate = self._asked(rows)
    if allocate is not None and offer is not None:
      known = allocate.learned(offer, out.depth, out.accepted)
      learned = _where(live, known, learned)
    if index is None:
      slots = dataclasses.replace(slots, carry=after, learned=learned)
    else:
      slots = dataclasses.replace(
        slots,
        carry=_put(slots.carry, index, after),
        learned=_put(slots.learned, index, learned),
      )
    if rider is not None:
      run = state_lib.run_of(rider.tokens, rider.count, prefill=True)
      ridden = self.one.committed(params, ridden, run, also, rider.count)
      slots = dataclasses.replace(
        slots, carry=_put(slots.carry, rider.slot, ridden)
      )
    out = dataclasses.replace(out, drafted=jnp.maximum(out.drafted, 0))
    return slots, BatchOutput(
      out, live, None if offer is None else offer.scores
    )

  def _asked(self, rows: int | None) -> Allocate | None:
    """Who is asked about a pass of so many rows."""
    allocate = self.allocate
    if allocate is not None and rows is None and not allocate.dense:
      return None
    return allocate

  def _draft(self, params, own: Slots):
    """Lattices and nodes of all requests, each within its own limits."""
    fns, carry = self.one, own.carry
    drafter = fns.drafter
    if drafter is None:
      return None, None
    with jax.named_scope("drafter"):
      lattice = each(lambda *of_one: drafter.draft(params[1], *of_one))(
        carry.drafter, carry.anchor, carry.target.length
      )

      def nodes(fns):
        return each(
          lambda lattice, request, anchor, position, remaining: fns.drafted(
            lattice,
            request,
            anchor=anchor,
            position=position,
            remaining=remaining,
          )
        )(
          lattice, own.request, carry.anchor, carry.target.length,
          carry.remaining,
        )  # fmt: skip

      drafted = nodes(fns)
      if fns.rejects:  # drafts of a greedy request are not drawn
        greedy = dataclasses.replace(fns.features, greedy=True)
        best = nodes(dataclasses.replace(fns, features=greedy))
        drafted = _where(own.sampled, drafted, best)
    return lattice, drafted

  def _offer(self, own, lattice, drafted, live, plan, rows) -> Offer:
    """What all requests would verify."""
    fns, nodes = self.one, drafted.nodes
    slots, size = nodes.tokens.shape
    first = each(
      lambda lattice, sampling, position: draft_lib.chain(
        lattice,
        valid_vocab=fns.config.valid_vocab,
        limit=lattice.count,
        sampling=sampling,
        position=position,
        sample=False,
      )
    )(lattice, own.request.sampling, own.carry.target.length)
    count = jnp.where(live, nodes.count, 0)
    scores = drafted.scores
    if drafted.chain is not None:
      scores = each(lambda chain: chain.path_scores)(first)[:, :size]
    exists = jnp.arange(size) < count[:, None]
    return Offer(
      nodes=dataclasses.replace(nodes, count=count),
      scores=jnp.where(exists, scores, -jnp.inf),
      live=live,
      lattice=lattice,
      first=first,
      learned=own.learned,
      plan=plan,
      rows=slots * size if rows is None else rows,
    )

  def _nodes(self, own, offer: Offer | None, live, rows) -> state_lib.Nodes:
    """What is verified: of each request its anchor at least."""
    if offer is None:
      return each(
        lambda anchor, one: state_lib.run_of(anchor[None], one, prefill=True)
      )(own.carry.anchor, live)
    allocate = self._asked(rows)
    nodes = offer.nodes if allocate is None else allocate(offer)
    least = live.astype(jnp.int32)
    count = jnp.where(live, jnp.maximum(nodes.count, 1), 0)
    if rows is not None:
      count = fit(count, rows, least)
    return dataclasses.replace(nodes, count=count)

  def _verify(self, params, own, drafted, nodes, rider, ridden, rows):
    """One target pass over the nodes of all requests, and what rides in it."""
    size = nodes.tokens.shape[1]
    drafter = self.one.drafter
    alone = drafter is not None and drafter.variable_length and size > 1

    def whole():
      packed = Packed.of(nodes, rows)
      return self._pass(params, own, drafted, packed, rider, ridden)

    if not alone:
      return whole()

    def anchors():
      """Nobody has drafts: a pass of one node each."""
      roots = each(
        lambda anchor, one: state_lib.run_of(anchor[None], one, prefill=False)
      )(own.carry.anchor, nodes.count)
      seen, also = self._pass(
        params, own, None, Packed.of(roots), rider, ridden
      )
      pad = each(lambda x: step_lib.pad_nodes(x, 1, size))
      return pad(seen), also

    return jax.lax.cond(jnp.any(nodes.count > 1), whole, anchors)

  def _pass(self, params, own: Slots, drafted, packed: Packed, rider, ridden):
    """A pass over packed nodes, judged request by request."""
    fns, carry = self.one, own.carry
    model = nnx.merge(fns.graphdef, params[0])
    also = None
    if rider is None:
      out = model(packed, carry.target, fns.taps)
      taps, stash = out.taps, out.stash
    else:
      run = state_lib.run_of(rider.tokens, rider.count, prefill=True)
      out = model(
        Ridden(packed, run),
        Ridden.state(carry.target, ridden.target),
        fns.taps,
      )
      taps, stash = out.taps[: packed.size], _side(out.stash, "verify")
      also = TargetOutput(
        hidden=out.hidden[packed.size :],
        taps=out.taps[packed.size :],
        stash=_side(out.stash, "prompt"),
      )
    logits = model.logits(out.hidden[: packed.size])
    nan = packed.by_request(jnp.isnan(logits).any(axis=-1))
    if carry.history is not None:
      logits = packed.by_row(
        each(fns.penalized)(
          packed.by_request(logits), own.request, carry.history, packed.nodes
        )
      )
    acceptance = each(accept.match)(
      packed.nodes, packed.by_request(self._choices(logits, own, packed))
    )
    if fns.rejects and drafted is not None:
      law = packed.by_request(self._law(logits, own, packed))
      acceptance = _where(
        own.sampled,
        each(accept.rejection)(
          packed.nodes,
          drafted.chain,
          law,
          own.request.sampling,
          carry.target.length,
        ),
        acceptance,
      )
    seen = each(step_lib.Verified.of)(
      packed.nodes, packed.by_request(taps), stash, acceptance, nan
    )
    return seen, also

  def _by_row(self, function, logits, own, packed) -> Array:
    """What is drawn behind each node, of its logits and its request's settings.

    Filters sort a row. That is done for the rows of requests that have them
    alone, some at a time: without filters the settings mean the same.

    Args:
      function: of a row, its settings and its position, and the features.
    """
    features = self.one.features
    positions = packed.positions(own.carry.target.length) + 1
    sampling = own.request.sampling
    settings = jax.tree.map(packed.spread, sampling)

    def drawn(features, *rows):
      return each(
        lambda row, setting, position: function(
          row[None], setting, position[None], features
        )[0]
      )(*rows)

    plain = dataclasses.replace(features, filters=False)
    out = drawn(plain, logits, settings, positions)
    if not features.filters:
      return out
    filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    wanted = packed.spread(filters & own.sampled & ~own.carry.done)
    size = min(FILTERED_ROWS, packed.size)
    order = jnp.argsort(~wanted, stable=True)
    order = jnp.pad(order, (0, -packed.size % size))

    def some(i, out):
      index = jax.lax.dynamic_slice(order, (i * size,), (size,))
      rows = jax.tree.map(
        lambda x: jnp.take(x, index, axis=0), (logits, settings, positions)
      )
      there = i * size + jnp.arange(size) < wanted.sum()
      index = jnp.where(there, index, packed.size)
      return out.at[index].set(drawn(features, *rows), mode="drop")

    return jax.lax.fori_loop(0, -(-wanted.sum() // size), some, out)

  def _choices(self, logits, own, packed) -> Int[Array, " P"]:
    """What the target chooses behind each node, with its request's noise."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if self.one.features.greedy:
      return best
    drawn = self._by_row(
      lambda row, setting, position, features: sampling_lib.choose(
        row, setting, features, position
      ),
      logits,
      own,
      packed,
    )
    return jnp.where(packed.spread(own.sampled), drawn, best)

  def _law(self, logits, own, packed) -> Float[Array, "P V"]:
    return self._by_row(
      lambda row, setting, position, features: sampling_lib.law(
        row, setting, features
      ),
      logits,
      own,
      packed,
    )


def _idle(slots: Slots, live: Bool[Array, " S"]) -> Slots:
  """For a pass: who takes no part in it has no prefix to attend to."""
  target = slots.carry.target
  target = dataclasses.replace(target, length=jnp.where(live, target.length, 0))
  carry = dataclasses.replace(slots.carry, target=target)
  return dataclasses.replace(slots, carry=carry)


def _side(stash, side: str) -> tuple:
  """One half of what a ridden pass leaves."""
  assert all(isinstance(s, Both) for s in stash)
  return tuple(getattr(s, side) for s in stash)


def _where(condition: Bool[Array, " S"], yes: Any, no: Any) -> Any:
  """Request by request."""

  def pick(a, b):
    shape = (-1,) + (1,) * (a.ndim - 1)
    return jnp.where(condition.reshape(shape), a, b)

  return jax.tree.map(pick, yes, no)
