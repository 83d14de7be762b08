"""A fixed number of verify nodes a pass, for the best drafts of all requests.

Stock verifies every request's whole block. In a batch that is compute spent on
drafts that will hardly be accepted, while those of another request would be.
Here a pass has so many nodes in all; they go to the drafts with the highest
path scores, whosever they are. Every request keeps its anchor, so that each
emits a token whatever its drafts are worth.

Which nodes are chosen
- Path scores are sums of log-probabilities: none is above its parent's. With
  equal scores the older node goes first, then the lower slot, so that what is
  chosen is a tree again, and the same one wherever it is computed.
- A score that is above its parent's (scores of a drafter that are not
  normalised) counts as its parent's.
- A request's own limits are in its tree: a budget that does not bind changes
  nothing, to the last bit.

Exactness: the target verifies what is chosen. Under rejection sampling nothing
that is chosen may depend on the tokens that were drawn: an offer's scores of a
chain are those of its drafter's first choices, which the laws alone decide.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.models.state import Nodes


def chosen(
  nodes: Nodes,
  scores: Float[Array, "S N"],
  live: Bool[Array, " S"],
  budget: Int[Array, ""] | int,
) -> Bool[Array, "S N"]:
  """Which nodes of all requests a pass verifies.

  Args:
    nodes: of S requests, N places each; `count` of them exist.
    scores: log-probability of each node's path. What stands where there is no
      node is not looked at.
    live: requests that take part.
    budget: nodes in all, anchors included. Anchors of live requests are
      chosen even where there are more of them.
  """
  slots, size = scores.shape
  index = jnp.arange(size, dtype=jnp.int32)
  exists = (index < nodes.count[:, None]) & live[:, None]
  # NaN, and paths that are none, are nobody's choice.
  scores = jnp.where(exists & (scores > -jnp.inf), scores, -jnp.inf)
  worst = jnp.where(nodes.mask, scores[:, None, :], jnp.inf).min(axis=-1)
  is_draft = exists & (index > 0) & (worst > -jnp.inf)
  worst = jnp.where(is_draft, worst, -jnp.inf).reshape(-1)
  slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
  age = (index * slots + slot).reshape(-1)
  # A rank is a count of better ones: one reduction, no sort.
  above = worst[:, None] > worst
  tied = (worst[:, None] == worst) & (age[:, None] < age)
  rank = (above | tied).sum(axis=0, dtype=jnp.int32).reshape(slots, size)
  drafts = jnp.asarray(budget, jnp.int32) - live.sum(dtype=jnp.int32)
  return (exists & (index == 0)) | (is_draft & (rank < drafts))


def allocate(
  nodes: Nodes,
  scores: Float[Array, "S N"],
  live: Bool[Array, " S"],
  budget: Int[Array, ""] | int,
  *,
  chains: bool,
) -> Nodes:
  """The nodes of a pass: those of each request that the budget reaches.

  Args:
    nodes, scores, live, budget: as for `chosen`.
    chains: every tree is a chain: then its first nodes are kept, and no array
      but the count changes.

  Returns:
    Nodes of the same shape; those of a request that is not live count 0.
  """
  kept = chosen(nodes, scores, live, budget)
  if not chains:
    return batch_step.keep(nodes, kept)
  return batch_step.take_first(nodes, kept.sum(axis=1, dtype=jnp.int32))
