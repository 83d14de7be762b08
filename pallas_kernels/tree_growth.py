"""The best-first tree over a lattice: the heap over a `tree_table`.

What a tree is, and why its definition here is the heap's, `best_first` of the
engine says. Each node that the heap gives depends on the one before: in plain
JAX a loop of several launches a node, as a kernel a loop of one warp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int, Integer

from pallas_kernels import dispatch, tree_table
from pallas_kernels.tree_table import Table, at

UNROLL = 8
"""Passes of the reference's loop that an accelerator runs without looking up.
XLA for an H200 makes six kernels of a pass, of eight together fourteen."""

_LAST = jnp.iinfo(jnp.int32).max
_WARP = _WORD = 32
_READ_AT_ONCE = 1024
_MINUS_INFINITY = -0x7F800001
"""`_ordered` of the float32."""


class Grown(NamedTuple):
  """A tree's nodes, parents first; see the engine's `Tree`."""

  tokens: Int[Array, " N"]
  parents: Int[Array, " N"]
  depth: Int[Array, " N"]
  scores: Float[Array, " N"]
  mask: Bool[Array, "N N"]
  count: Int[Array, ""]


class _Growth(NamedTuple):
  """A tree while it grows."""

  addresses: Int[Array, " N"]  # of the nodes; without meaning for the anchor
  parents: Int[Array, " N"]
  scores: Float[Array, " N"]
  waiting: Int[Array, " N"]  # address of the child that may be given next
  size: Int[Array, ""]


def grow(
  anchor: Int[Array, ""],
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C"] | Float[Array, "S C C"],
  order: Integer[Array, "S C C"] | None,
  slots: Int[Array, ""],
  limit: Int[Array, ""],
  *,
  nodes: int,
  valid_vocab: Int[Array, ""] | int,
  implementation: dispatch.Implementation = "reference",
) -> Grown:
  """The best-first tree: the chain of first choices, then what a heap gives.

  Args:
    anchor: token of node 0.
    tokens, scores, order, slots, valid_vocab: as for `tree_table.table`.
    limit: nodes at most, the anchor included; 1 to `nodes`.
    nodes: places of the tree.
    implementation: the kernels take scores of up to 32 bits.
  """
  if dispatch.is_kernel(implementation):
    numbers = tree_table.numbers_of(slots, valid_vocab, anchor, limit)
    laid_out = tree_table.table_kernel(
      numbers, tokens, scores, order, implementation
    )
    return _grow_kernel(numbers, laid_out, nodes, implementation)
  laid_out = tree_table.table(tokens, scores, order, slots, valid_vocab)
  return _grow(anchor, laid_out, limit, nodes)


def _grow(anchor, table: Table, limit, nodes: int) -> Grown:
  slots = table.scores.shape[0] // table.stride - 1
  growth, chained = _chain(table, nodes, min(slots, nodes - 1), limit)
  index = jnp.arange(nodes, dtype=jnp.int32)

  def give(_, g: _Growth) -> _Growth:
    score, _, parent = _first(
      g.scores + at(table.scores, g.waiting), at(table.tokens, g.waiting)
    )
    live = (score > -jnp.inf) & (g.size < limit)
    address = at(g.waiting, parent)
    # The best child of a node of the chain is the next of it.
    known = (address % table.ranks == 0) & (parent < chained)
    new = jnp.where(known, parent + 1, g.size)
    at_new = (index == new) & live
    at_parent = (index == parent) & live
    waiting = jnp.where(at_new, at(table.children, address), g.waiting)
    return _Growth(
      addresses=jnp.where(at_new, address, g.addresses),
      parents=jnp.where(at_new, parent, g.parents),
      scores=jnp.where(at_new, score, g.scores),
      waiting=jnp.where(at_parent, address + 1, waiting),
      size=g.size + (live & ~known),
    )

  def passes(unroll: int):
    # Passes that find nothing more to give change nothing.
    number = -(-(nodes - 1) // unroll) * unroll
    return lambda g: lax.fori_loop(0, number, give, g, unroll=unroll)

  growth = lax.platform_dependent(growth, cpu=passes(1), default=passes(UNROLL))
  drafted = (index > 0) & (index < growth.size)
  ids = jnp.where(drafted, at(table.tokens, growth.addresses), 0)
  below = jnp.where(drafted, 1 + growth.addresses // table.stride, 1)
  return Grown(
    tokens=ids.at[0].set(jnp.asarray(anchor, jnp.int32)),
    parents=growth.parents,
    depth=below.at[0].set(0),
    scores=growth.scores,
    mask=ancestors(growth.parents, min(slots, nodes - 1)),
    count=growth.size,
  )


def _chain(table: Table, nodes: int, slots: int, limit):
  """The tree of first choices before the heap gives any; and its drafts."""
  dtype = table.scores.dtype
  address, above = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
  addresses, scores = [address], [above]
  # Unrolled: a chain of scalars that a compiler fuses.
  for slot in range(slots):
    above = above + at(table.scores, address)
    above = jnp.where(slot + 1 < limit, above, -jnp.inf)
    addresses.append(address)
    scores.append(above)
    address = at(table.children, address)
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


def _first(scores: Float[Array, " N"], tokens: Int[Array, " N"]):
  """Score, token and index of the highest score; ties: see the engine's."""
  index = jnp.arange(scores.shape[0], dtype=jnp.int32)

  def earlier(a, b):
    (score_a, token_a, index_a), (score_b, token_b, index_b) = a, b
    lower = (token_a < token_b) | ((token_a == token_b) & (index_a < index_b))
    wins = (score_a > score_b) | ((score_a == score_b) & lower)
    return tuple(jnp.where(wins, x, y) for x, y in zip(a, b, strict=True))

  last = jnp.asarray(_LAST, jnp.int32)
  least = jnp.asarray(-jnp.inf, scores.dtype)
  return lax.reduce((scores, tokens, index), (least, last, last), earlier, (0,))


def ancestors(parents: Int[Array, " N"], depth: int) -> Bool[Array, "N N"]:
  """Ancestors-or-self, by doubling the distance that a row covers."""
  mask = jnp.eye(parents.shape[0], dtype=bool)
  # The anchor as its own parent changes no row.
  above = jnp.maximum(parents, 0)
  for _ in range(depth.bit_length()):
    mask = mask | mask[above]
    above = above[above]
  return mask


def _ordered(bits):
  """Bits of a float32 as a number that is ordered as it is; and back."""
  return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _key(score):
  # No sum is -0, which would stand below 0: no table holds it.
  return _ordered(lax.bitcast_convert_type(score, jnp.int32))


def _score(key):
  return lax.bitcast_convert_type(_ordered(key), jnp.float32)


class _Frontier(NamedTuple):
  """What the heap's kernel keeps in registers; arrays lead with nodes.

  A child waits per node. `keys` orders them by score, `entries` are a node's
  index, and behind it the child's address: the first of equal ones is the one
  with the lowest token, then the lowest entry.
  """

  keys: Array
  tokens: Array
  entries: Array
  addresses: Array
  parents: Array
  scores: Array
  paths: tuple[Array, ...]  # ancestors-or-self, a bit each, in words of 32
  size: Array
  more: Array


def _program(
  numbers_ref,
  score_ref,
  token_ref,
  child_ref,
  tokens_ref,
  parents_ref,
  depth_ref,
  scores_ref,
  mask_ref,
  count_ref,
  *,
  ranks,
  stride,
):
  """All of a tree, by one warp.

  Reductions are of int32 over whole warps, for which there is an instruction.
  """
  addresses, nodes = score_ref.shape[0], tokens_ref.shape[0]
  chain = min(addresses // stride - 1, nodes - 1)
  size = max(pl.next_power_of_2(nodes), _WARP)
  words = range(-(-nodes // _WORD))
  shift = addresses.bit_length()
  # In the last slot, and not the last of it: its sibling is in range.
  nothing = addresses - 2
  anchor, limit = numbers_ref[2], numbers_ref[3]
  index = lax.iota(jnp.int32, size)

  def bit(i, word):
    return jnp.where(i // _WORD == word, 1 << (i % _WORD), 0)

  def read(step, found):
    """Not negative if there is a candidate; the table is in the cache then.

    Loads of a pass wait for each other: they should find what they ask for.
    """
    at = step * _READ_AT_ONCE + lax.iota(jnp.int32, _READ_AT_ONCE)
    score, token, child = (
      pltriton.load(ref.at[at], mask=at < addresses, other=fill)
      for ref, fill in (
        (score_ref, -jnp.inf), (token_ref, -1), (child_ref, 0)
      )
    )  # fmt: skip
    here = jnp.where(score > -jnp.inf, token | child, -1)
    return jnp.maximum(found, jnp.max(here))

  found = lax.fori_loop(
    0, pl.cdiv(addresses, _READ_AT_ONCE), read, jnp.int32(-1)
  )

  def choose(i, carry):
    """A node of the chain."""
    address, above, at_nodes, scores = carry
    above = above + score_ref[address]
    above = jnp.where(i < limit, above, -jnp.inf)
    at_nodes = jnp.where(index == i, address, at_nodes)
    scores = jnp.where(index == i, above, scores)
    return child_ref[address], above, at_nodes, scores

  _, _, at_nodes, scores = lax.fori_loop(
    1,
    chain + 1,
    choose,
    (
      jnp.int32(0),
      jnp.float32(0),
      jnp.zeros((size,), jnp.int32),
      jnp.where(index == 0, 0.0, -jnp.inf).astype(jnp.float32),
    ),
  )
  count = jnp.sum((scores > -jnp.inf).astype(jnp.int32))
  chained = count - 1

  def path(word):
    """Of the chain's nodes all before, of places without node the anchor."""
    last = index - word * _WORD
    below = jnp.where(last < 31, (2 << jnp.clip(last, 0, 30)) - 1, -1)
    below = jnp.where(last < 0, 0, below)
    alone = bit(index, word) | (1 if word == 0 else 0)
    return jnp.where(index < count, below, alone)

  def give(g: _Frontier) -> _Frontier:
    best = jnp.max(g.keys)
    ties = g.keys == best
    token = jnp.min(jnp.where(ties, g.tokens, _LAST))
    ties = ties & (g.tokens == token)
    entry = jnp.min(jnp.where(ties, g.entries, _LAST))
    parent, address = entry >> shift, entry & ((1 << shift) - 1)
    sibling_score, sibling = score_ref[address + 1], token_ref[address + 1]
    below = child_ref[address]
    child_score, child = score_ref[below], token_ref[below]

    score = _score(best)
    live = score > -jnp.inf
    known = (address % ranks == 0) & (parent < chained)
    new = jnp.where(known, parent + 1, g.size)
    at_new = (index == new) & live
    is_parent = index == parent
    at_parent = is_parent & live

    def put(values, of_parent, of_new):
      values = jnp.where(at_new, of_new, values)
      return jnp.where(at_parent, of_parent, values)

    def descend(word, paths):
      above = jnp.sum(jnp.where(is_parent, paths, 0))
      return jnp.where(at_new, above | bit(new, word), paths)

    return _Frontier(
      keys=put(
        g.keys, _key(g.scores + sibling_score), _key(score + child_score)
      ),
      tokens=put(g.tokens, sibling, child),
      entries=put(g.entries, entry + 1, (new << shift) | below),
      addresses=jnp.where(at_new, address, g.addresses),
      parents=jnp.where(at_new, parent, g.parents),
      scores=jnp.where(at_new, score, g.scores),
      paths=tuple(descend(w, p) for w, p in zip(words, g.paths, strict=True)),
      size=g.size + (live & ~known).astype(jnp.int32),
      more=live,
    )

  root = index == 0
  g = lax.while_loop(
    # No pass behind these would change anything.
    lambda g: g.more & (g.size < limit),
    give,
    _Frontier(
      keys=jnp.where(root, _key(0.0 + score_ref[0]), _MINUS_INFINITY),
      tokens=jnp.where(root, token_ref[0], _LAST),
      entries=jnp.where(root, 0, (index << shift) | nothing),
      addresses=at_nodes,
      parents=jnp.where(index < count, index - 1, 0),
      scores=scores,
      paths=tuple(path(word) for word in words),
      size=count,
      more=found >= 0,
    ),
  )

  inside = index < nodes
  drafted = ~root & (index < g.size)
  tokens = pltriton.load(token_ref.at[g.addresses], mask=drafted, other=0)
  depth = jnp.where(drafted, 1 + g.addresses // stride, 1)
  for ref, values in (
    (tokens_ref, jnp.where(root, anchor, tokens)),
    (parents_ref, g.parents),
    (depth_ref, jnp.where(root, 0, depth)),
    (scores_ref, g.scores),
  ):
    pltriton.store(ref.at[index], values, mask=inside)
  count_ref[0] = g.size
  column = lax.iota(jnp.int32, _WORD)[None, :]
  for word, paths in zip(words, g.paths, strict=True):
    first = word * _WORD
    pltriton.store(
      mask_ref.at[index[:, None], first + column],
      ((paths[:, None] >> column) & 1) != 0,
      mask=inside[:, None] & (first + column < nodes),
    )


def _grow_kernel(numbers, table, nodes, implementation):
  addresses = table.scores.shape[0]
  # An entry is a node's index and an address: 31 bits of an int32.
  places = max(pl.next_power_of_2(nodes), _WARP)
  if addresses.bit_length() + (places - 1).bit_length() > 31:
    raise ValueError(
      f"tree_growth's kernel does not take {nodes} nodes over {addresses}"
      " addresses"
    )
  row = jax.ShapeDtypeStruct((nodes,), jnp.int32)
  *arrays, count = pl.pallas_call(
    functools.partial(_program, ranks=table.ranks, stride=table.stride),
    out_shape=[
      row,
      row,
      row,
      jax.ShapeDtypeStruct((nodes,), jnp.float32),
      jax.ShapeDtypeStruct((nodes, nodes), jnp.bool_),
      jax.ShapeDtypeStruct((1,), jnp.int32),
    ],
    compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
    interpret=implementation == "interpret",
    name="tree_growth",
  )(numbers, table.scores, table.tokens, table.children)
  return Grown(*arrays, count=count[0])
