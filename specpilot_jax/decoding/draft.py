"""What a drafter offers: the lattice, the protocol, the chain policy."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specpilot_jax.decoding import sampling as sampling_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lattice:
  """A drafter's scored candidates.

  Attributes:
    tokens: candidate ids per slot; slot s stands s + 1 tokens after the anchor.
    scores: their log-probabilities up to a constant per slot; -inf drops one.
      Where a drafter conditions on the parent there is an axis more: axis 1 is
      the parent, a place in slot s - 1 (before slot 0 the anchor is place 0,
      the other places are never read), axis 2 the candidate's place in slot s,
      and the constant is one per slot and parent.
    count: slots that hold a draft, the first of the arrays.
    confidence: where the drafter says so, the probability that what it drafts
      for a slot is accepted, given the parent in that place of the slot before
      (before slot 0 the anchor is place 0).
  """

  tokens: Int[Array, "S C"]
  scores: Float[Array, "S C"] | Float[Array, "S C C"]
  count: Int[Array, ""]
  confidence: Float[Array, "S C"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
  """A chain of drafts and the law that each was drawn from.

  Attributes:
    tokens: one id per slot.
    count: drafts that exist, the first of `tokens`.
    candidates: ids that the law is over, per slot.
    log_law: normalised log-probabilities of the candidates, given the draft
      before where the drafter conditions on it.
    scores: of the drafts, as the lattice has them.
  """

  tokens: Int[Array, " S"]
  count: Int[Array, ""]
  candidates: Int[Array, "S C"]
  log_law: Float[Array, "S C"]
  scores: Float[Array, " S"]

  @property
  def path_scores(self) -> Float[Array, " S1"]:
    """Sums of scores along the chain: 0 for the anchor, -inf behind the last
    draft; [S + 1]."""
    there = jnp.arange(self.scores.shape[0]) < self.count
    steps = jnp.where(there, self.scores, -jnp.inf)
    return jnp.concatenate([jnp.zeros_like(steps[:1]), jnp.cumsum(steps)])


class Drafter(Protocol):
  """What the engine needs of a drafter. All methods are traced by jit.

  Attributes:
    name: for reports.
    num_slots: drafts that one call offers at most.
    taps: target layers whose residual stream `extend` wants.
    vocab_size: ids that it proposes from; None where it only repeats ids that
      the target has seen.
    variable_length: whether steps with few or no drafts are common, so that
      a pass of one node is worth an executable branch of its own.
    params: its weights, a pytree passed to every call.
  """

  name: str
  num_slots: int
  taps: tuple[int, ...]
  vocab_size: int | None
  variable_length: bool
  params: Any

  def init_context(self, capacity: int) -> Any:
    """An empty context with room for `capacity` committed tokens."""
    ...

  def extend(
    self,
    params: Any,
    context: Any,
    tokens: Int[Array, " P"],
    taps: Float[Array, "P L D"],
    start: Int[Array, ""],
    count: Int[Array, ""],
  ) -> Any:
    """Takes in `count` newly committed tokens, the first at `start`.

    All P rows from `start` on are written: what they held is gone. (Level 1 of
    two-level verification extends a context by what is not committed; the
    commit does so again from the same position.)
    """
    ...

  def draft(
    self,
    params: Any,
    context: Any,
    anchor: Int[Array, ""],
    position: Int[Array, ""],
  ) -> Lattice:
    """Candidates after the anchor, which stands at `position`.

    The context covers the positions before the anchor's.
    """
    ...


def chain(
  lattice: Lattice,
  *,
  valid_vocab: int,
  limit: Int[Array, ""],
  sampling: sampling_lib.Sampling,
  position: Int[Array, ""],
  sample: bool,
) -> Drafts:
  """One draft per slot: the best candidate, or a draw from the law.

  Each slot is looked at under the parent that the slot before has given. A
  candidate outside the vocabulary, or without a score, is never chosen; a slot
  that has no other ends the chain.

  Args:
    lattice: what the drafter offers.
    valid_vocab: ids below it exist.
    limit: no more drafts than this.
    sampling: temperature and seed of the request.
    position: of the anchor.
    sample: draw from the candidates' law at the request's temperature, as
      rejection sampling needs; otherwise take the best, lowest id on ties.
  """
  slots, places = lattice.tokens.shape
  there = (lattice.tokens >= 0) & (lattice.tokens < valid_vocab)
  given = lattice.scores.reshape(slots, -1, places)  # [S, parents, C]
  # Also false for NaN.
  valid = there[:, None] & (given > -jnp.inf)
  scores = jnp.where(valid, given, -jnp.inf)
  exists = jnp.any(valid, axis=-1)
  safe = jnp.where(exists[..., None], scores, 0.0)
  if sample:
    safe = safe / sampling.temperature
  log_law = jax.nn.log_softmax(safe, axis=-1)
  if sample:
    noise = sampling_lib.gumbel(
      sampling.seed,
      position + 1 + jnp.arange(slots, dtype=jnp.int32),
      places,
      sampling_lib.Stream.DRAFT,
      log_law.dtype,
    )
    best = jnp.argmax(log_law + noise[:, None], axis=-1)
  else:
    # Of the scores themselves: normalised, near ones may become equal.
    first = safe == safe.max(axis=-1, keepdims=True)
    ids = jnp.where(first, lattice.tokens[:, None], jnp.iinfo(jnp.int32).max)
    best = jnp.argmin(ids, axis=-1)
  parents, chosen = _walk(best)
  index = jnp.arange(slots, dtype=jnp.int32)
  scores = scores[index, parents, chosen]
  exists, log_law, valid = (x[index, parents] for x in (exists, log_law, valid))
  tokens = lattice.tokens[index, chosen]
  run = jnp.min(jnp.where(exists, slots, index), initial=slots)
  count = jnp.minimum(jnp.minimum(lattice.count, run), limit)
  return Drafts(
    tokens=jnp.where(exists, tokens, 0).astype(jnp.int32),
    count=jnp.maximum(count, 0).astype(jnp.int32),
    candidates=jnp.where(valid, lattice.tokens, 0).astype(jnp.int32),
    log_law=jnp.where(valid, log_law, -jnp.inf),
    scores=scores,
  )


def _walk(
  best: Int[Array, "S P"],
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
  """Parents and places along a chain.

  Args:
    best: the place that each parent chooses; one column where all choose alike.
  """
  if best.shape[1] == 1:
    return jnp.zeros(best.shape[0], jnp.int32), best[:, 0]
  # Unrolled: a chain of scalars that a compiler fuses.
  parents, chosen = [jnp.zeros((), best.dtype)], []
  for row in best:
    chosen.append(row[parents[-1]])
    parents.append(chosen[-1])
  return jnp.stack(parents[:-1]), jnp.stack(chosen)
