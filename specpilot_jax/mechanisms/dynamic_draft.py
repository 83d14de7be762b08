"""How much of its block a request verifies: 16, 12 or 8 positions.

The full block is always drafted; what is cut off is verification, the anchor's
position included in the count. A request's length follows from how sure the
drafter is of this block, corrected by how that has turned out of late, and from
what a node costs at the present load: where nodes cost nothing, all are
verified, as stock does. A shared budget's rows are paid for, whoever fills
them; there a request's drafts compete with those of others, corrected alike.

Exactness: the length depends on the drafter's laws and on earlier passes, not
on the tokens that were drawn, so it is exact under rejection sampling too.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.models import state as state_lib

LENGTHS = (16, 12, 8)
"""Positions that may be verified, the anchor included; the longest first."""

MEMORY = 0.9
"""What a pass keeps of the sums over those before: about 10 of them count."""


@state_lib.pytree
class Recent:
  """Sums over the latest passes of a request; zeros before its first.

  Attributes:
    expected: drafts of the verified positions that the drafter expected to be
      accepted.
    accepted: of the same, those that were.
  """

  expected: Float[Array, ""]
  accepted: Float[Array, ""]

  @classmethod
  def fresh(cls) -> "Recent":
    zero = jnp.zeros((), jnp.float32)
    return cls(zero, zero)


def survival(
  lattice: draft_lib.Lattice, first: draft_lib.Drafts
) -> Float[Array, " S"]:
  """Probability that all drafts up to each slot are accepted, as the drafter
  says it: by its confidence head where it has one, else by its scores.

  Args:
    lattice: what it offers.
    first: its chain, not drawn.
  """
  each = jnp.exp(first.log_law.max(axis=-1))
  if lattice.confidence is not None:
    # Of the chain's parents; the anchor is place 0.
    places = jnp.argmax(lattice.tokens == first.tokens[:, None], axis=-1)
    parents = jnp.concatenate([jnp.zeros((1,), places.dtype), places[:-1]])
    index = jnp.arange(places.shape[0])
    each = lattice.confidence[index, parents]
  # What is not a number promises nothing.
  counts = (jnp.arange(each.shape[0]) < first.count) & (each >= 0)
  each = jnp.where(counts, each, 0)
  return jnp.cumprod(each).astype(jnp.float32)


def trust(recent: Recent) -> Float[Array, "*S"]:
  """What of the drafter's expectation came true of late, above 0: one token of
  perfect agreement is assumed beside the passes seen."""
  return (recent.accepted + 1) / (recent.expected + 1)


def length(
  recent: Recent,
  survival: Float[Array, " S"],
  price: Float[Array, ""] | float,
  lengths: tuple[int, ...] = LENGTHS,
) -> Int[Array, ""]:
  """Positions to verify: those that are worth the most.

  Worth what their drafts are expected to emit, less what their nodes cost. The
  drafter's expectation counts as much as it came true of late (`trust`).

  Args:
    recent: of the request.
    survival: of the block.
    price: tokens that a node must bring, see `step_costs.node_price`.
    lengths: to choose from, the longest first.

  Returns:
    One of the lengths, the longest of equally good ones.
  """
  likely = jnp.minimum(trust(recent) * survival, 1)
  slots = jnp.arange(survival.shape[0])
  values = jnp.stack(
    [
      jnp.where(slots < positions - 1, likely - price, 0).sum()
      for positions in lengths
    ]
  )
  return jnp.asarray(lengths, jnp.int32)[jnp.argmax(values)]


def learned(
  recent: Recent,
  survival: Float[Array, " S"],
  verified: Int[Array, ""],
  accepted: Int[Array, ""],
) -> Recent:
  """What is known behind a pass.

  Args:
    recent: before it.
    survival: of its block.
    verified: drafts of its longest path.
    accepted: of them, before a stop or a limit cut the run.
  """
  slots = jnp.arange(survival.shape[0])
  expected = jnp.where(slots < verified, survival, 0).sum()
  return Recent(
    expected=MEMORY * recent.expected + expected,
    accepted=MEMORY * recent.accepted + accepted.astype(jnp.float32),
  )
