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

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from pallas_kernels import tree_growth, tree_table
from pallas_kernels.dispatch import Implementation
from specpilot_jax.models.state import Nodes, pytree


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
  implementation: Implementation = "reference",
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
    implementation: of `tree_growth`; the kernels take scores of up to 32 bits.
  """
  if nodes < 1:
    raise ValueError(f"a tree of {nodes} nodes, expected at least the anchor")
  slot_limit = jnp.asarray(count, jnp.int32)
  if depth is not None:
    slot_limit = jnp.minimum(slot_limit, depth)
  limit = jnp.asarray(nodes, jnp.int32)
  if drafts is not None:
    limit = 1 + jnp.clip(jnp.asarray(drafts, jnp.int32), 0, nodes - 1)
  grown = tree_growth.grow(
    anchor,
    tokens,
    scores,
    order,
    slot_limit,
    limit,
    nodes=nodes,
    valid_vocab=valid_vocab,
    implementation=implementation,
  )
  return Tree(**grown._asdict())


def marginal(
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C C"],
  *,
  valid_vocab: int,
  order: Integer[Array, "S C C"] | None = None,
  implementation: Implementation = "reference",
) -> tuple[Int[Array, "S C"], Float[Array, "S C"]]:
  """A lattice that is blind to parents, for `best_first`: an ablation.

  Every parent gets the scores that hold under the drafter's first choice for
  the slot before it, the first choices following each other; so the chain of
  first choices, and the scores along it, stay what they were.

  Args:
    tokens, scores, valid_vocab, order, implementation: as for `best_first`.

  Returns:
    The candidates' ids, best first, and their scores.
  """
  slots, candidates = tokens.shape
  table = tree_table.table(
    tokens,
    scores,
    order,
    jnp.asarray(slots),
    valid_vocab,
    implementation=implementation,
  )
  address = jnp.zeros((), jnp.int32)
  rows = []
  for _ in range(slots):
    rows.append(address + jnp.arange(candidates))
    address = tree_table.at(table.children, address)
  rows = jnp.stack(rows)
  return tree_table.at(table.tokens, rows), tree_table.at(table.scores, rows)


def nodes_of(tree: Tree) -> Nodes:
  """The tree as the target's pass takes it."""
  return Nodes(
    tokens=tree.tokens,
    parents=tree.parents,
    depth=tree.depth,
    mask=tree.mask,
    count=tree.count,
  )
