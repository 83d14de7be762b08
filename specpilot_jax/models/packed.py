"""Nodes of several requests as the rows of one pass of a target.

A target's pass is row by row but for what mixes a request's nodes with each
other and with its state (`Nodes.over`). So the rows of all requests go through
every product with weights, norm and activation together: a weight is read once
for all of them. Only what mixes is mapped over requests.

Two forms
- *dense*: slots x nodes rows, a reshape to and from. Rows of nodes that do not
  exist are computed and not read. It is what stock needs: every drafter offers
  its whole block, and every row is used.
- *packed*: fewer rows than that, those of the nodes that exist, one request
  behind the other, with a number per row that says whose it is. Rows are what a
  pass costs (a product's time grows with them from some tens on), so that is
  the form where requests verify fewer nodes than they have places for. What
  mixes gets its rows gathered to slots x nodes: two small copies a layer, of
  activations, against products with fewer rows. On a product itself nothing is
  ragged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specpilot_jax.models.state import Nodes, Rows, TargetState, pytree


def each(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function of one request, of all: `jax.vmap`, but for a single one.

  That is computed as if there were no others: a batch of one costs what a
  request alone does. (A slice at a traced place, mapped, is a gather.)
  """

  def mapped(*arguments: Any) -> Any:
    if jax.tree.leaves(arguments)[0].shape[0] > 1:
      return jax.vmap(function)(*arguments)
    only = function(*jax.tree.map(lambda x: x[0], arguments))
    return jax.tree.map(lambda x: x[None], only)

  return mapped


@pytree
class Packed:
  """The nodes of S requests, N places each, as P rows.

  A target takes it as it takes `Nodes`, with a state whose arrays lead with
  the requests.

  Attributes:
    nodes: every array leads with the requests; `count` is 0 where a request
      takes no part.
    place: of each row, request * N + node; S * N of a row that is empty. None
      in the dense form.
    row: of each node; P of a node that does not exist. None in the dense form.
  """

  nodes: Nodes
  place: Int[Array, " P"] | None
  row: Int[Array, "S N"] | None

  @classmethod
  def of(cls, nodes: Nodes, rows: int | None = None) -> "Packed":
    """Nodes as so many rows, the dense form by default.

    Args:
      nodes: of which no more than `rows` exist in all; those that do not fit
        are lost (`fit` sees to it that none is).
    """
    slots, size = nodes.tokens.shape
    if rows is None or rows >= slots * size:
      return cls(nodes, None, None)
    start = jnp.cumsum(nodes.count) - nodes.count
    node = jnp.arange(size, dtype=jnp.int32)
    exists = node < nodes.count[:, None]
    row = jnp.where(exists, start[:, None] + node, rows)
    every = jnp.arange(slots * size, dtype=jnp.int32)
    place = jnp.full((rows,), slots * size, jnp.int32)
    place = place.at[row.reshape(-1)].set(every, mode="drop")
    return cls(nodes, place, row.astype(jnp.int32))

  @property
  def size(self) -> int:
    """Rows."""
    slots, size = self.nodes.tokens.shape
    return slots * size if self.place is None else self.place.shape[0]

  @property
  def is_prompt(self) -> bool:
    return self.nodes.prefill and self.nodes.tokens.shape[1] > 1

  @property
  def tokens(self) -> Int[Array, " P"]:
    return self.by_row(self.nodes.tokens)

  def positions(self, length: Int[Array, " S"]) -> Int[Array, " P"]:
    """Where the nodes stand, by row."""
    return self.by_row(length[:, None] + self.nodes.depth)

  def over(self, mix, rows: Any, *request: Any) -> tuple[Any, Any]:
    """See `Nodes.over`: request by request."""
    if isinstance(rows, Rows) and self.row is not None:
      out, stash = each(
        lambda nodes, index, *request: mix(
          nodes, Rows(rows.array, index), *request
        )
      )(self.nodes, self.row, *request)
    else:
      out, stash = each(mix)(
        self.nodes, jax.tree.map(self.by_request, rows), *request
      )
    return jax.tree.map(self.by_row, out), stash

  def by_row(self, x: Array) -> Array:
    """[S, N, ...] to [P, ...]; empty rows are zeros."""
    flat = x.reshape(-1, *x.shape[2:])
    if self.place is None:
      return flat
    return jnp.take(flat, self.place, axis=0, mode="fill", fill_value=0)

  def by_request(self, x: Array) -> Array:
    """[P, ...] to [S, N, ...]; packed, zeros where there is no node."""
    if self.row is None:
      return x.reshape(*self.nodes.tokens.shape, *x.shape[1:])
    return jnp.take(x, self.row, axis=0, mode="fill", fill_value=0)

  def spread(self, x: Array) -> Array:
    """[S, ...] to [P, ...]: what each row's request has of it."""
    slots, size = self.nodes.tokens.shape
    if self.place is None:
      return jnp.repeat(x, size, axis=0, total_repeat_length=slots * size)
    return jnp.take(x, self.place // size, axis=0, mode="clip")


def fit(
  count: Int[Array, " S"], rows: int, least: Int[Array, " S"]
) -> Int[Array, " S"]:
  """Counts of nodes that so many rows have room for.

  Every request keeps its first nodes; what there is no room for is taken from
  the last requests. Nothing is taken where all fit.

  Args:
    count: of each request.
    rows: of the pass; no fewer than `least` in all.
    least: nodes that a request keeps in any case: 1, its anchor, or 0.
  """
  more = jnp.maximum(count - least, 0)
  room = rows - least.sum()
  before = jnp.cumsum(more) - more
  return (least + jnp.clip(room - before, 0, more)).astype(jnp.int32)


@pytree
class Both[T]:
  """Something of the requests that verify, and of one that reads its prompt."""

  verify: T
  prompt: T


@pytree
class Ridden:
  """A pass that verifies, and takes a run of a prompt along.

  Its state, and what a target makes of it, is a `Both` wherever there is one
  per request.

  Attributes:
    verify: of the requests that decode; their rows come first.
    prompt: a run of one other request's prompt.
  """

  verify: Packed
  prompt: Nodes

  @staticmethod
  def state(verify: TargetState, prompt: TargetState) -> Any:
    """The state of such a pass."""
    return TargetState(
      layers=tuple(map(Both, verify.layers, prompt.layers)),  # type: ignore
      length=Both(verify.length, prompt.length),  # type: ignore
    )

  @property
  def size(self) -> int:
    """Rows."""
    return self.verify.size + self.prompt.size

  @property
  def is_prompt(self) -> bool:
    return False

  @property
  def tokens(self) -> Int[Array, " P"]:
    return jnp.concatenate([self.verify.tokens, self.prompt.tokens])

  def positions(self, length: Any) -> Int[Array, " P"]:
    """Where the nodes stand, by row."""
    return jnp.concatenate(
      [
        self.verify.positions(length.verify),
        self.prompt.positions(length.prompt),
      ]
    )

  def over(self, mix, rows: Any, *request: Any) -> tuple[Any, Any]:
    """See `Nodes.over`: each kind with its own states."""
    size = self.verify.size
    out, stash = self.verify.over(
      mix,
      jax.tree.map(lambda x: x[:size], rows),
      *(r.verify for r in request),
    )
    also, run = self.prompt.over(
      mix,
      jax.tree.map(lambda x: x[size:], rows),
      *(r.prompt for r in request),
    )
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, also)
    return rows, Both(stash, run)
