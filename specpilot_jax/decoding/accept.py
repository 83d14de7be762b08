"""Which nodes of a verified tree become output.

Two rules. *match*: follow the child whose token is the target's own choice;
works on any tree and emits the target's sample whatever was drafted.
*rejection*: speculative sampling of chains (arXiv 2211.17192, 2302.01318):
accept a draft x with probability min(1, p(x) / q(x)), else sample from
max(p - q, 0); the law of the output is the target's, its tokens are not those
of autoregressive decoding with the same seed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.draft import Drafts
from specpilot_jax.models.state import Nodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
  """The accepted path and what it emits.

  Attributes:
    path: node indices from the root down; entry d has depth d. Behind the
      path any nodes.
    emitted: emitted[d] is the token that follows path[d]; for d below
      `accepted` it equals the token of path[d + 1], the last is the bonus.
    accepted: drafts accepted; `accepted` + 1 entries of both are valid.
  """

  path: Int[Array, " N"]
  emitted: Int[Array, " N"]
  accepted: Int[Array, ""]


def match(nodes: Nodes, choices: Int[Array, " N"]) -> Acceptance:
  """Longest path whose tokens equal the target's choice at their parents.

  Args:
    nodes: a tree; of equally long paths the one with the first node counts.
    choices: the target's choice at each node.
  """
  n = nodes.size
  index = jnp.arange(n, dtype=jnp.int32)
  parents = jnp.maximum(nodes.parents, 0)
  agrees = (nodes.tokens == choices[parents]) & (index < nodes.count)
  agrees = agrees | (index == 0)
  on_path = ~jnp.any(nodes.mask & ~agrees[None, :], axis=1)
  # Deepest first, then the lowest index.
  rank = jnp.where(on_path, nodes.depth * n + (n - 1 - index), -1)
  last = jnp.argmax(rank)
  ancestors = nodes.mask[last]
  # An ancestor per depth: no sort is needed, nor is there anything behind it.
  here = ancestors & (nodes.depth == index[:, None])  # [depth, nodes]
  path = jnp.where(here, index, 0).sum(axis=1, dtype=jnp.int32)
  return Acceptance(
    path=path,
    emitted=choices[path],
    accepted=nodes.depth[last].astype(jnp.int32),
  )


def rejection(
  nodes: Nodes,
  drafts: Drafts,
  target_law: Float[Array, "N V"],
  sampling: sampling_lib.Sampling,
  position: Int[Array, ""],
) -> Acceptance:
  """Speculative sampling of a chain.

  Args:
    nodes: [anchor | drafts], possibly padded.
    drafts: tokens drawn from their laws (the law of a certain draft is a
      point).
    target_law: the target's probabilities at each node.
    sampling: seed.
    position: of the anchor.
  """
  n, vocab = target_law.shape
  slots = n - 1
  index = jnp.arange(slots, dtype=jnp.int32)
  tokens = drafts.tokens[:slots]
  candidates = drafts.candidates[:slots]
  q = jnp.exp(drafts.log_law[:slots]).astype(target_law.dtype)
  dense_q = jnp.zeros((slots, vocab), target_law.dtype)
  dense_q = dense_q.at[index[:, None], candidates].add(q)
  rows = index[:, None]
  p_x = target_law[:slots][rows, tokens[:, None]][:, 0]
  q_x = dense_q[rows, tokens[:, None]][:, 0]
  positions = position + 1 + jnp.arange(n, dtype=jnp.int32)
  u = sampling_lib.uniform(
    sampling.seed, positions[:slots], sampling_lib.Stream.ACCEPT
  ).astype(target_law.dtype)
  passes = (u * q_x < p_x) & (index < nodes.count - 1)
  accepted = jnp.min(jnp.where(passes, slots, index), initial=slots).astype(
    jnp.int32
  )

  # The token after the accepted run: the residual law where a draft was
  # refused there, else the target's own.
  own = target_law[accepted]
  refused = accepted < nodes.count - 1
  padded_q = jnp.pad(dense_q, ((0, 1), (0, 0)))
  residual = jnp.maximum(own - padded_q[accepted], 0)
  # p = q up to rounding leaves no residual: then a refusal is a rounding
  # event itself and the target's law is the law of the token.
  use = refused & (residual.sum() > 0)
  final_law = jnp.where(use, residual, own)
  noise = sampling_lib.gumbel(
    sampling.seed,
    positions[accepted][None],
    vocab,
    sampling_lib.Stream.TARGET,
    target_law.dtype,
  )[0]
  final = jnp.argmax(jnp.log(final_law) + noise).astype(jnp.int32)
  drafted = jnp.concatenate([tokens, jnp.zeros((1,), jnp.int32)])
  path = jnp.arange(n, dtype=jnp.int32)
  emitted = jnp.where(path < accepted, drafted, final)
  return Acceptance(path=path, emitted=emitted, accepted=accepted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cut:
  """How many tokens of an acceptance are emitted, and whether that ends it."""

  count: Int[Array, ""]
  stopped: Bool[Array, ""]  # by a stop id, which is the last token
  exhausted: Bool[Array, ""]  # by the token limit


def cut(
  acceptance: Acceptance,
  stop_ids: Int[Array, " M"],
  remaining: Int[Array, ""],
) -> Cut:
  """Ends an accepted run at its first stop id or at the token limit.

  Args:
    acceptance: from either rule.
    stop_ids: padded with -1.
    remaining: tokens that the request may still emit, at least 1.
  """
  n = acceptance.emitted.shape[0]
  index = jnp.arange(n, dtype=jnp.int32)
  available = jnp.minimum(acceptance.accepted + 1, remaining)
  is_stop = jnp.any(acceptance.emitted[:, None] == stop_ids[None], axis=1)
  is_stop = is_stop & (index < available)
  first = jnp.min(jnp.where(is_stop, index, n), initial=n)
  stopped = first < n
  count = jnp.where(stopped, first + 1, available).astype(jnp.int32)
  return Cut(
    count=count, stopped=stopped, exhausted=~stopped & (count == remaining)
  )
