"""The candidates of a lattice in order, laid out for a best-first tree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels import dispatch


class Table(NamedTuple):
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


def table(
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C"] | Float[Array, "S C C"],
  order: Integer[Array, "S C C"] | None,
  slots: Int[Array, ""],
  valid_vocab: Int[Array, ""] | int,
  *,
  implementation: dispatch.Implementation = "reference",
) -> Table:
  """Sorts the candidates under each parent; drops those that do not exist.

  Best first, of equal scores the lower token. What stands where there is no
  candidate, but for the score -inf, is not defined.

  Args:
    tokens, scores, order: as for the engine's `best_first`.
    slots: of the lattice, the first: the others hold nothing.
    valid_vocab: ids below it exist.
    implementation: the kernel takes scores of up to 32 bits.
  """
  if dispatch.is_kernel(implementation):
    numbers = numbers_of(slots, valid_vocab)
    return table_kernel(numbers, tokens, scores, order, implementation)
  own_slots, candidates = tokens.shape
  scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  tokens = tokens.astype(jnp.int32)
  if scores.ndim == 2:
    scores, tokens = scores[:, None], tokens[:, None]
    places = jnp.zeros_like(tokens)  # As parents they are all the same.
  else:
    shape = (own_slots, candidates, candidates)
    if order is None:
      order = jnp.arange(candidates)
    places = jnp.broadcast_to(jnp.asarray(order, jnp.int32), shape)
    tokens = jnp.take_along_axis(
      jnp.broadcast_to(tokens[:, None], shape), places, axis=-1
    )
  exists = (tokens >= 0) & (tokens < valid_vocab) & (scores > -jnp.inf)
  exists &= (jnp.arange(own_slots) < slots)[:, None, None]
  # Ascending, so the key is the negated score; +inf stands last.
  negated, tokens, places = lax.sort(
    (jnp.where(exists, -scores, jnp.inf), tokens, places), num_keys=2
  )
  # No -0, which a compiler may or may not turn into 0 where sums begin.
  sorted_scores = jnp.where(negated == 0, 0.0, -negated)
  ranks = candidates + 1
  stride = scores.shape[1] * ranks
  slot = jnp.arange(own_slots, dtype=jnp.int32)[:, None, None]
  children = (slot + 1) * stride + places * ranks

  def flat(values, fill):
    pad = ((0, 1), (0, 0), (0, 1))
    return jnp.pad(values, pad, constant_values=fill).reshape(-1)

  return Table(
    scores=flat(sorted_scores, -jnp.inf),
    tokens=flat(tokens, 0),
    children=flat(children, 0),
    ranks=ranks,
    stride=stride,
  )


def at(values, index):
  """Elements at indices that are in range."""
  return values.at[index].get(mode="promise_in_bounds")


def numbers_of(*numbers) -> Int[Array, " n"]:
  """In one array: what computes them is then a single launch."""
  return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])


def _rank(
  numbers_ref,
  tokens_ref,
  scores_ref,
  order_ref,
  score_ref,
  token_ref,
  child_ref,
):
  """Candidates of one slot under one parent, each written at its rank."""
  slot, parent = pl.program_id(0), pl.program_id(1)
  slots, candidates = tokens_ref.shape
  by_parent = len(scores_ref.shape) == 3
  ranks = candidates + 1
  stride = (candidates if by_parent else 1) * ranks
  valid_vocab = numbers_ref[1]
  # The slot behind the last reads the last, and holds nothing.
  own = jnp.minimum(slot, slots - 1)
  there = slot < jnp.minimum(numbers_ref[0], slots)
  size = pl.next_power_of_2(candidates)

  def read(shape, axis):
    """Key and tie-breakers, in the layout in which they are compared."""
    entry = lax.broadcasted_iota(jnp.int32, shape, axis)
    inside = entry < candidates
    row = (own, parent) if by_parent else (own,)
    score = pltriton.load(scores_ref.at[*row, entry], mask=inside, other=0)
    place = entry
    if order_ref is not None:
      place = pltriton.load(order_ref.at[*row, entry], mask=inside, other=0)
      place = place.astype(jnp.int32)
    token = pltriton.load(tokens_ref.at[own, place], mask=inside, other=-1)
    token = token.astype(jnp.int32)
    score = score.astype(jnp.float32)
    exists = (token >= 0) & (token < valid_vocab) & (score > -jnp.inf)
    score = jnp.where(exists & there, score, -jnp.inf)
    score = jnp.where(score == 0, 0.0, score)  # no -0
    return score, token, entry, place

  # Both vary along one axis only; broadcast by the comparison.
  score, token, entry, place = read((size, 1), 0)
  other_score, other_token, other_entry, _ = read((1, size), 1)
  lower = (other_token < token) | (
    (other_token == token) & (other_entry < entry)
  )
  before = (other_score > score) | ((other_score == score) & lower)
  # What pads comes before nothing.
  before = before & (other_entry < candidates)
  rank = jnp.sum(before.astype(jnp.int32), axis=1)[:, None]
  rank = jnp.where(entry < candidates, rank, candidates)

  child = (slot + 1) * stride + (place * ranks if by_parent else 0)
  child = jnp.where(score > -jnp.inf, child, 0)
  row = slot * stride + parent * ranks
  for ref, values, nothing in (
    (score_ref, score, -jnp.inf),
    (token_ref, token, 0),
    (child_ref, child, 0),
  ):
    pltriton.store(ref.at[row + rank], values)
    # Behind all ranks, by everyone at once.
    nothing = jnp.full_like(values, nothing)
    pltriton.store(ref.at[row + candidates + 0 * entry], nothing)


def table_kernel(
  numbers: Int[Array, " n"],
  tokens: Int[Array, "S C"],
  scores: Float[Array, "S C"] | Float[Array, "S C C"],
  order: Integer[Array, "S C C"] | None,
  implementation: dispatch.Implementation,
) -> Table:
  """`table`; slots and valid_vocab are the first of the numbers."""
  if scores.dtype.itemsize > 4:
    raise ValueError(f"a table's kernel takes float32, not {scores.dtype}")
  own_slots, candidates = tokens.shape
  parents = candidates if scores.ndim == 3 else 1
  ranks = candidates + 1
  stride = parents * ranks
  size = (own_slots + 1) * stride
  program, operands = _rank, (numbers, tokens, scores, order)
  if order is None or scores.ndim == 2:
    operands = (numbers, tokens, scores)

    def program(numbers_ref, tokens_ref, scores_ref, *planes):
      _rank(numbers_ref, tokens_ref, scores_ref, None, *planes)

  planes = pl.pallas_call(
    program,
    grid=(own_slots + 1, parents),
    out_shape=[
      jax.ShapeDtypeStruct((size,), dtype)
      for dtype in (jnp.float32, jnp.int32, jnp.int32)
    ],
    compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
    interpret=implementation == "interpret",
    name="tree_table",
  )(*operands)
  return Table(*planes, ranks=ranks, stride=stride)
