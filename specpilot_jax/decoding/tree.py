"""The best-first tree over a drafter's lattice, built on the device.

A node's score is the sum of the log-probabilities along its path, each given
the node's actual parent. The drafter's first choices are in the tree as far as
depth and budget allow. The other nodes are what a heap gives that starts with
the first slot's best candidate and, for each node that it gives, takes in the
node's best child and the node's next sibling. Equal scores: the lower token
id, then the older parent, first.

How, and why it is exact
- The heap is one number per node: where in the lattice that node's next child
  waits. It needs no second, since a sibling enters a heap only when the one
  before it leaves, so that a parent never has two children in it. The number's
  index is the parent's: `older parent first` is `lowest index first`, and no
  two entries have equal keys.
- Giving the first entry is one lexicographic reduction over the keys; then two
  numbers change, the parent's (its next sibling waits) and the new node's (its
  first child does). Both are written by comparing indices: a pass is one small
  reduction and one elementwise update, whatever the budget.
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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from specpilot_jax.models.state import Nodes, pytree

_LAST_ID = jnp.iinfo(jnp.int32).max

UNROLL = 8
"""Passes of the heap's loop that an accelerator runs without looking up. XLA
for an H200 makes six kernels of a pass, of eight together fourteen."""


@pytree
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
  """A lattice laid out flat; an address is one candidate under one parent.

  Addresses run over (slot, parent, rank), the rank fastest, best first: the
  next sibling of a candidate is one address further. Parents are the places of
  the slot before, or a single one where scores do not depend on it. One rank
  and one slot more than there are hold nothing, so that the sibling or child
  after the last needs no test.
  """

  scores: Float[Array, " A"]  # -inf: no candidate, nor any of higher rank
  tokens: Int[Array, " A"]
  children: Int[Array, " A"]  # address of the candidate's own first child
  ranks: int  # addresses per parent
  stride: int  # addresses per slot


class _Growth(NamedTuple):
  """A tree while it grows."""

  addresses: Int[Array, " N"]  # of the nodes; without meaning for the anchor
  parents: Int[Array, " N"]
  scores: Float[Array, " N"]
  waiting: Int[Array, " N"]  # address of the child that may be given next
  size: Int[Array, ""]


def best_first(
  anchor: Int[Array, ""],
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C"] | Float[Array, "S C C"],
  count: Int[Array, ""],
  *,
  nodes: int,
  valid_vocab: int,
  order: Integer[Array, "S C C"] | None = None,
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

  growth, chained = _chain(table, nodes, min(slots, nodes - 1), limit)
  index = jnp.arange(nodes, dtype=jnp.int32)

  def give(_, g: _Growth) -> _Growth:
    score, _, parent = _first(
      g.scores + _at(table.scores, g.waiting), _at(table.tokens, g.waiting)
    )
    live = (score > -jnp.inf) & (g.size < limit)
    address = _at(g.waiting, parent)
    # The best child of a node of the chain is the next of it.
    known = (address % table.ranks == 0) & (parent < chained)
    new = jnp.where(known, parent + 1, g.size)
    at_new = (index == new) & live
    at_parent = (index == parent) & live
    waiting = jnp.where(at_new, _at(table.children, address), g.waiting)
    return _Growth(
      addresses=jnp.where(at_new, address, g.addresses),
      parents=jnp.where(at_new, parent, g.parents),
      scores=jnp.where(at_new, score, g.scores),
      waiting=jnp.where(at_parent, address + 1, waiting),
      size=g.size + (live & ~known),
    )

  def grow(unroll: int):
    # Passes that find nothing more to give change nothing.
    passes = -(-(nodes - 1) // unroll) * unroll
    return lambda g: jax.lax.fori_loop(0, passes, give, g, unroll=unroll)

  growth = jax.lax.platform_dependent(growth, cpu=grow(1), default=grow(UNROLL))
  drafted = (index > 0) & (index < growth.size)
  ids = jnp.where(drafted, _at(table.tokens, growth.addresses), 0)
  below = jnp.where(drafted, 1 + growth.addresses // table.stride, 1)
  return Tree(
    tokens=ids.at[0].set(jnp.asarray(anchor, jnp.int32)),
    parents=growth.parents,
    depth=below.at[0].set(0),
    scores=growth.scores,
    mask=_ancestors(growth.parents, min(slots, nodes - 1)),
    count=growth.size,
  )


def marginal(
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C C"],
  *,
  valid_vocab: int,
  order: Integer[Array, "S C C"] | None = None,
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
  address = jnp.zeros((), jnp.int32)
  rows = []
  for _ in range(slots):
    rows.append(address + jnp.arange(candidates))
    address = _at(table.children, address)
  rows = jnp.stack(rows)
  return _at(table.tokens, rows), _at(table.scores, rows)


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
    places = jnp.zeros_like(tokens)  # As parents they are all the same.
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
  ranks = candidates + 1
  stride = scores.shape[1] * ranks
  slot = jnp.arange(slots, dtype=jnp.int32)[:, None, None]
  children = (slot + 1) * stride + places * ranks

  def flat(values, fill):
    pad = ((0, 1), (0, 0), (0, 1))
    return jnp.pad(values, pad, constant_values=fill).reshape(-1)

  return _Table(
    scores=flat(-negated, -jnp.inf),
    tokens=flat(tokens, 0),
    children=flat(children, 0),
    ranks=ranks,
    stride=stride,
  )


def _chain(table: _Table, nodes: int, slots: int, limit):
  """The tree of first choices before the heap gives any; and its drafts."""
  dtype = table.scores.dtype
  address, above = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
  addresses, scores = [address], [above]
  # Unrolled: a chain of scalars that a compiler fuses.
  for slot in range(slots):
    above = above + _at(table.scores, address)
    above = jnp.where(slot + 1 < limit, above, -jnp.inf)
    addresses.append(address)
    scores.append(above)
    address = _at(table.children, address)
  pad = (0, nodes - 1 - slots)
  scores = jnp.pad(jnp.stack(scores), pad, constant_values=-jnp.inf)
  size = (scores > -jnp.inf).sum(dtype=jnp.int32)
  index = jnp.arange(nodes, dtype=jnp.int32)
  # The last address holds nothing: only the anchor's first child waits.
  nothing = table.scores.shape[0] - 1
  growth = _Growth(
    addresses=jnp.pad(jnp.stack(addresses), pad),
    parents=jnp.where(index < size, index - 1, 0),
    scores=scores,
    waiting=jnp.where(index == 0, 0, nothing).astype(jnp.int32),
    size=size,
  )
  return growth, size - 1


def _at(values, index):
  """Elements at indices that are in range."""
  return values.at[index].get(mode="promise_in_bounds")


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
