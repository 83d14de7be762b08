"""The best-first tree over a drafter's lattice, built on the device.

A node's score is the sum of the log-probabilities along its path, each given
the node's actual parent. The drafter's first choices are in the tree as far as
depth and budget allow. The other nodes are what a heap gives that starts with
the first slot's best candidate and, for each node that it gives, takes in the
node's best child and the node's next sibling. Equal scores: the lower token
id, then the older parent, first.

How, and why it is exact
- The heap is a frontier with one place per node, which holds that node's best
  child not given yet. It needs no second: a sibling enters a heap only when the
  one before it leaves, so a parent never has two children in it. A place's
  index is the parent's, so `older parent first` is `lowest index first`, and no
  two entries have equal keys.
- Giving the first entry is one lexicographic reduction over the frontier;
  then two places change, the parent's (next sibling) and the new node's (first
  child). Both are written by comparing indices: a pass is one small reduction
  and one elementwise update, whatever the budget.
- Nodes of the chain stand in the tree before the first pass, oldest first. The
  heap gives them too, when their turn comes, and only then their siblings and
  children may follow. Each pass gives another node, so `nodes` - 1 passes
  suffice, and the loop's length is static.
- A tree is a prefix of every tree of a larger budget: the chain comes first,
  then the heap's order, which does not know the budget. Hence a limit on drafts
  can be a traced number.
- Sums are taken from the anchor outwards, one addition per slot, in the dtype
  of the scores (float32 at least): the same additions of the same numbers
  wherever the tree is built, so the same scores, ties and nodes. A path whose
  sum is not finite is no path.
"""

import dataclasses
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from jaxtyping import UInt8 as Byte

from specpilot_jax.models.state import Nodes

_LAST_ID = jnp.iinfo(jnp.int32).max


@typing.dataclass_transform(frozen_default=True)
def _pytree(cls):
  return jax.tree_util.register_dataclass(
    dataclasses.dataclass(frozen=True)(cls)
  )


@_pytree
class Tree:
  """Drafts to verify, parents first; node 0 is the anchor.

  Places from `count` on hold no node: they look like children of the anchor
  with the token 0 and the score -inf.

  Attributes:
    tokens: ids, int32.
    parents: index of each node's parent, -1 for the anchor, int32.
    depth: 0 for the anchor; a node of depth d is of slot d - 1, int32.
    scores: log-probability of the node's path, 0 for the anchor; float32, or
      float64 if the lattice is.
    mask: mask[i, j] is True where j is i or an ancestor of i.
    count: nodes that exist, the first of the arrays; at least 1, int32.
  """

  tokens: Int[Array, " N"]
  parents: Int[Array, " N"]
  depth: Int[Array, " N"]
  scores: Float[Array, " N"]
  mask: Bool[Array, "N N"]
  count: Int[Array, ""]

  @property
  def size(self) -> int:
    return self.tokens.shape[0]


class _Table(NamedTuple):
  """A lattice by (slot, parent's place, rank), best first.

  P is the number of parents that differ: the candidates, or 1 where the scores
  do not depend on the parent. One slot and one rank more than there are hold
  nothing, so that the child after the last needs no test.
  """

  scores: Float[Array, "S+1 P C+1"]  # -inf: no candidate, nor any behind it
  tokens: Int[Array, "S+1 P C+1"]
  places: Int[Array, "S+1 P C+1"]  # the candidate as a parent


class _Growth(NamedTuple):
  """A tree while it grows. Per node: what it is, and its frontier place."""

  tokens: Int[Array, " N"]
  parents: Int[Array, " N"]
  depth: Int[Array, " N"]
  scores: Float[Array, " N"]
  places: Int[Array, " N"]
  rank: Int[Array, " N"]  # of the child that waits
  next_scores: Float[Array, " N"]  # of the path to it; -inf where none waits
  next_tokens: Int[Array, " N"]
  size: Int[Array, ""]


def best_first(
  anchor: Int[Array, ""],
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C"] | Float[Array, "S C C"],
  count: Int[Array, ""],
  *,
  nodes: int,
  valid_vocab: int,
  order: Byte[Array, "S C C"] | Int[Array, "S C C"] | None = None,
  depth: Int[Array, ""] | int | None = None,
  drafts: Int[Array, ""] | int | None = None,
) -> Tree:
  """The best-first tree. All but `nodes` may be traced.

  Args:
    anchor: id of the last committed token.
    tokens: candidate ids per slot, each once; slot s stands s + 1 tokens after
      the anchor. In any order; ids outside the vocabulary are never chosen.
    scores: natural log-probabilities, any float dtype; -inf (or NaN) where
      there is no candidate. With a parent axis, axis 1 is the parent, a place
      in the slot before (the anchor is place 0 before the first slot), and
      axis 2 the candidate.
    count: slots that hold a draft, the first of the arrays.
    nodes: places of the tree, the anchor included; at least 1.
    valid_vocab: ids below it exist.
    order: with a parent axis, where axis 2 of `scores` is not the place of the
      candidate: the place that each entry is about.
    depth: of a path at most; None for all slots.
    drafts: nodes without the anchor at most; None for `nodes` - 1.
  """
  if nodes < 1:
    raise ValueError(f"a tree of {nodes} nodes, expected at least the anchor")
  slots = tokens.shape[0]
  slot_limit = jnp.asarray(count, jnp.int32)
  if depth is not None:
    slot_limit = jnp.minimum(slot_limit, depth)
  limit = jnp.asarray(nodes, jnp.int32)
  if drafts is not None:
    limit = 1 + jnp.clip(jnp.asarray(drafts, jnp.int32), 0, nodes - 1)
  table = _table(tokens, scores, order, slot_limit, valid_vocab)

  growth, chained = _chain(
    jnp.asarray(anchor, jnp.int32), table, nodes, min(slots, nodes - 1), limit
  )
  index = jnp.arange(nodes, dtype=jnp.int32)

  def give(_, g: _Growth) -> _Growth:
    score, token, parent = _first(g.next_scores, g.next_tokens)
    parent = jnp.minimum(parent, nodes - 1)
    live = (score > -jnp.inf) & (g.size < limit)
    above, slot = g.places[parent], g.depth[parent]
    rank = g.rank[parent]
    place = table.places[slot, above, rank]
    # The first child of a node of the chain is the next of it.
    known = (rank == 0) & (parent < chained)
    new = jnp.where(known, parent + 1, g.size)
    at_new = (index == new) & live
    at_parent = (index == parent) & live

    def put(values, value):
      return jnp.where(at_new, value, values)

    def wait(values, sibling, child):
      return jnp.where(at_parent, sibling, put(values, child))

    sibling = (slot, above, rank + 1)
    child = (slot + 1, place, 0)
    return _Growth(
      tokens=put(g.tokens, token),
      parents=put(g.parents, parent),
      depth=put(g.depth, slot + 1),
      scores=put(g.scores, score),
      places=put(g.places, place),
      rank=wait(g.rank, rank + 1, 0),
      next_scores=wait(
        g.next_scores,
        g.scores[parent] + table.scores[sibling],
        score + table.scores[child],
      ),
      next_tokens=wait(
        g.next_tokens, table.tokens[sibling], table.tokens[child]
      ),
      size=g.size + (live & ~known),
    )

  growth = jax.lax.fori_loop(0, nodes - 1, give, growth)
  return Tree(
    tokens=growth.tokens,
    parents=growth.parents,
    depth=growth.depth,
    scores=growth.scores,
    mask=_ancestors(growth.parents, min(slots, nodes - 1)),
    count=growth.size,
  )


def marginal(
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C C"],
  *,
  valid_vocab: int,
  order: Byte[Array, "S C C"] | Int[Array, "S C C"] | None = None,
) -> tuple[Int[Array, "S C"], Float[Array, "S C"]]:
  """A lattice that is blind to parents, for `best_first`: an ablation.

  Every parent gets the scores that hold under the drafter's first choice for
  the slot before it, the first choices following each other; so the chain of
  first choices, and the scores along it, stay what they were.

  Args:
    tokens, scores, valid_vocab, order: as for `best_first`.

  Returns:
    The candidates' ids, best first, and their scores.
  """
  slots, candidates = tokens.shape
  table = _table(tokens, scores, order, jnp.asarray(slots), valid_vocab)
  place = jnp.zeros((), jnp.int32)
  firsts = []
  for slot in range(slots):
    firsts.append(place)
    place = table.places[slot, place, 0]
  at = (jnp.arange(slots), jnp.stack(firsts))
  return (
    table.tokens[at][:, :candidates],
    table.scores[at][:, :candidates],
  )


def nodes_of(tree: Tree) -> Nodes:
  """The tree as the target's pass takes it."""
  return Nodes(
    tokens=tree.tokens,
    parents=tree.parents,
    depth=tree.depth,
    mask=tree.mask,
    count=tree.count,
  )


def _table(tokens, scores, order, slot_limit, valid_vocab) -> _Table:
  """Sorts the candidates under each parent; drops those that do not exist."""
  slots, candidates = tokens.shape
  scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  tokens = tokens.astype(jnp.int32)
  if scores.ndim == 2:
    scores, tokens = scores[:, None], tokens[:, None]
    places = jnp.zeros_like(tokens)
  else:
    shape = (slots, candidates, candidates)
    if order is None:
      order = jnp.arange(candidates)
    places = jnp.broadcast_to(jnp.asarray(order, jnp.int32), shape)
    tokens = jnp.take_along_axis(
      jnp.broadcast_to(tokens[:, None], shape), places, axis=-1
    )
  exists = (tokens >= 0) & (tokens < valid_vocab) & (scores > -jnp.inf)
  exists &= (jnp.arange(slots) < slot_limit)[:, None, None]
  # Ascending, so the key is the negated score; +inf stands last.
  negated, tokens, places = jax.lax.sort(
    (jnp.where(exists, -scores, jnp.inf), tokens, places), num_keys=2
  )
  pad = ((0, 1), (0, 0), (0, 1))
  return _Table(
    scores=jnp.pad(-negated, pad, constant_values=-jnp.inf),
    tokens=jnp.pad(tokens, pad),
    places=jnp.pad(places, pad),
  )


def _chain(anchor, table: _Table, nodes: int, slots: int, limit):
  """The tree of first choices, whose first entry waits; and its drafts."""
  dtype = table.scores.dtype
  place, above = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
  alive = jnp.ones((), bool)
  tokens, scores, places = [], [], []
  chained = jnp.zeros((), jnp.int32)
  # Unrolled: a chain of scalars that a compiler fuses.
  for slot in range(slots):
    first = (slot, place, 0)
    above = above + table.scores[first]
    alive = alive & (above > -jnp.inf) & (slot + 1 < limit)
    tokens.append(jnp.where(alive, table.tokens[first], 0))
    scores.append(jnp.where(alive, above, -jnp.inf))
    place = table.places[first]
    places.append(place)
    chained = chained + alive

  def padded(root, values, fill, dtype=jnp.int32):
    values = jnp.stack([jnp.asarray(v, dtype) for v in [root, *values]])
    return jnp.pad(values, (0, nodes - 1 - slots), constant_values=fill)

  index = jnp.arange(nodes, dtype=jnp.int32)
  waits = index == 0
  inside = index <= chained
  growth = _Growth(
    tokens=padded(anchor, tokens, 0),
    parents=jnp.where(inside, index - 1, 0),
    depth=jnp.where(inside, index, 1),
    scores=padded(0.0, scores, -jnp.inf, dtype),
    places=padded(0, places, 0),
    rank=jnp.zeros((nodes,), jnp.int32),
    next_scores=jnp.where(waits, table.scores[0, 0, 0], -jnp.inf),
    next_tokens=jnp.where(waits, table.tokens[0, 0, 0], 0),
    size=1 + chained,
  )
  return growth, chained


def _first(scores: Float[Array, " N"], tokens: Int[Array, " N"]):
  """Score, token and index of the highest score; ties: see the module."""
  index = jnp.arange(scores.shape[0], dtype=jnp.int32)

  def earlier(a, b):
    (score_a, token_a, index_a), (score_b, token_b, index_b) = a, b
    lower = (token_a < token_b) | ((token_a == token_b) & (index_a < index_b))
    wins = (score_a > score_b) | ((score_a == score_b) & lower)
    return tuple(jnp.where(wins, x, y) for x, y in zip(a, b, strict=True))

  last = jnp.asarray(_LAST_ID, jnp.int32)
  least = jnp.asarray(-jnp.inf, scores.dtype)
  return jax.lax.reduce(
    (scores, tokens, index), (least, last, last), earlier, (0,)
  )


def _ancestors(parents: Int[Array, " N"], depth: int) -> Bool[Array, "N N"]:
  """Ancestors-or-self, by doubling the distance that a row covers."""
  mask = jnp.eye(parents.shape[0], dtype=bool)
  # The anchor as its own parent changes no row.
  above = jnp.maximum(parents, 0)
  for _ in range(depth.bit_length()):
    mask = mask | mask[above]
    above = above[above]
  return mask
