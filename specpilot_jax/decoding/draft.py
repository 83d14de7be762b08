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
    count: slots that hold a draft, the first of the arrays.
  """

  tokens: Int[Array, "S C"]
  scores: Float[Array, "S C"]
  count: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
  """A chain of drafts and the law that each was drawn from.

  Attributes:
    tokens: one id per slot.
    count: drafts that exist, the first of `tokens`.
    candidates: ids that the law is over, per slot.
    log_law: normalised log-probabilities of the candidates.
  """

  tokens: Int[Array, " S"]
  count: Int[Array, ""]
  candidates: Int[Array, "S C"]
  log_law: Float[Array, "S C"]


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
    """Takes in `count` newly committed tokens, the first at `start`."""
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

  A candidate outside the vocabulary is never chosen; a slot whose candidates
  all are ends the chain.

  Args:
    lattice: what the drafter offers.
    valid_vocab: ids below it exist.
    limit: no more drafts than this.
    sampling: temperature and seed of the request.
    position: of the anchor.
    sample: draw from the candidates' law at the request's temperature, as
      rejection sampling needs; otherwise take the best, lowest id on ties.
  """
  slots = lattice.tokens.shape[0]
  valid = (lattice.tokens >= 0) & (lattice.tokens < valid_vocab)
  scores = jnp.where(valid, lattice.scores, -jnp.inf)
  exists = jnp.any(scores > -jnp.inf, axis=-1)
  safe = jnp.where(exists[:, None], scores, 0.0)
  if sample:
    safe = safe / sampling.temperature
  log_law = jax.nn.log_softmax(safe, axis=-1)
  if sample:
    noise = sampling_lib.gumbel(
      sampling.seed,
      position + 1 + jnp.arange(slots, dtype=jnp.int32),
      lattice.tokens.shape[1],
      sampling_lib.Stream.DRAFT,
      log_law.dtype,
    )
    chosen = jnp.argmax(log_law + noise, axis=-1)
  else:
    best = log_law == log_law.max(axis=-1, keepdims=True)
    ids = jnp.where(best, lattice.tokens, jnp.iinfo(jnp.int32).max)
    chosen = jnp.argmin(ids, axis=-1)
  tokens = jnp.take_along_axis(lattice.tokens, chosen[:, None], axis=1)[:, 0]
  index = jnp.arange(slots, dtype=jnp.int32)
  run = jnp.min(jnp.where(exists, slots, index), initial=slots)
  count = jnp.minimum(jnp.minimum(lattice.count, run), limit)
  return Drafts(
    tokens=jnp.where(exists, tokens, 0).astype(jnp.int32),
    count=jnp.maximum(count, 0).astype(jnp.int32),
    candidates=jnp.where(valid, lattice.tokens, 0).astype(jnp.int32),
    log_law=jnp.where(valid, log_law, -jnp.inf),
  )
