"""What changes while decoding, as explicit pytrees.

`TargetState` is what a target has committed: a forward pass reads it and never
writes it. A pass returns a *stash* per layer, enough to rebuild the state
after any accepted path; `decoding.commit` does that.
"""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation
from specpilot_jax import configs
from specpilot_jax.models import layers


@typing.dataclass_transform(frozen_default=True)
def pytree(cls):
  """A frozen dataclass whose fields are the children of a pytree."""
  return jax.tree_util.register_dataclass(
    dataclasses.dataclass(frozen=True)(cls)
  )


@pytree
class AttentionState:
  """Keys (after RoPE) and values of committed tokens, [kv heads, rows, dim].

  Rows from `TargetState.length` on are never read.
  """

  k: Float[Array, "Hkv T D"]
  v: Float[Array, "Hkv T D"]


@pytree
class GDNState:
  """Recurrent state (at least float32) and the last pre-convolution rows."""

  recurrent: Float[Array, "Hv K V"]
  conv: Float[Array, "W C"]  # W = kernel - 1 rows, oldest first


LayerState = AttentionState | GDNState


@pytree
class TargetState:
  """State of one request: `length` tokens are committed.

  Attributes:
    layers: one `AttentionState` or `GDNState` per layer.
    length: committed tokens; also the position of the next one.
  """

  layers: tuple[LayerState, ...]
  length: Int[Array, ""]


@pytree
class AttentionStash:
  """Keys and values of the pass's nodes."""

  k: Float[Array, "N Hkv D"]
  v: Float[Array, "N Hkv D"]


@pytree
class GDNStash:
  """Per node: normalised key, update u, path log-decay, pre-conv row.

  `kernel` is the implementation that makes a state of it.
  """

  k: Float[Array, "N Hk K"]
  u: Float[Array, "N Hv V"]
  decay: Float[Array, "N Hv"]
  rows: Float[Array, "N C"]
  kernel: Implementation = dataclasses.field(
    metadata={"static": True}, default="reference"
  )


@pytree
class GDNPrefillStash:
  """Prefill knows its path beforehand: the state after it, and the rows."""

  recurrent: Float[Array, "Hv K V"]
  rows: Float[Array, "N C"]


LayerStash = AttentionStash | GDNStash | GDNPrefillStash


class Rows(NamedTuple):
  """Rows of a pass, and which of them are a request's: nothing is copied yet.

  Attributes:
    array: a row per node of the request, or all rows of a pass.
    index: of each node's row, P where there is no node; None of rows that are
      the request's own.
  """

  array: Float[Array, "P C"]
  index: Int[Array, " N"] | None = None

  def of(self, node: Int[Array, " M"]) -> Float[Array, "M C"]:
    """The rows of some nodes; zeros where there is no node."""
    index = node if self.index is None else self.index[node]
    return jnp.take(self.array, index, axis=0, mode="fill", fill_value=0)

  def own(self, columns: slice = slice(None)) -> Float[Array, "N C"]:
    """Some columns of the request's rows, in the order of its nodes."""
    rows = self.array[:, columns]
    if self.index is None:
      return rows
    return jnp.take(rows, self.index, axis=0, mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
  """The tokens of one target pass: a tree, a chain, or a run of prompt.

  Attributes:
    tokens: ids in range; node 0 is the root (the anchor).
    parents: index of each node's parent, -1 for the root; parents first.
    depth: 0 for the root; position = committed length + depth.
    mask: mask[i, j] is True where j is i or an ancestor of i.
    count: nodes that exist, the first of the arrays.
    prefill: all `count` nodes will be committed and form one path.
  """

  tokens: Int[Array, " N"]
  parents: Int[Array, " N"]
  depth: Int[Array, " N"]
  mask: Bool[Array, "N N"]
  count: Int[Array, ""]
  prefill: bool = dataclasses.field(metadata={"static": True}, default=False)

  @property
  def size(self) -> int:
    return self.tokens.shape[0]

  @property
  def is_prompt(self) -> bool:
    """Several nodes of one path: a run of prompt, or one that is scored."""
    return self.prefill and self.size > 1

  def positions(self, length: Int[Array, ""]) -> Int[Array, " N"]:
    """Where the nodes stand behind `length` committed tokens."""
    return length + self.depth

  def over[R, S](
    self, mix: Callable[..., tuple[R, S]], rows: Any, *request: Any
  ) -> tuple[R, S]:
    """What mixes nodes of one request with each other and with its state.

    All else in a model is done row by row: a pass over several requests
    (`models.packed`) differs from that over one in this alone.

    Args:
      mix: (nodes, rows, *request) -> what becomes of the rows, and a stash.
      rows: a pytree of arrays, one row per node; of `Rows`, `mix` is told which
        are the request's, and copies what it needs.
      request: the request's state, and what else there is one of.
    """
    return mix(self, rows, *request)


def run_of(tokens: Int[Array, " N"], count, *, prefill: bool) -> Nodes:
  """One path: each token is the child of the one before it."""
  n = tokens.shape[0]
  index = jnp.arange(n, dtype=jnp.int32)
  return Nodes(
    tokens=tokens.astype(jnp.int32),
    parents=index - 1,
    depth=index,
    mask=jnp.tril(jnp.ones((n, n), dtype=bool)),
    count=jnp.asarray(count, jnp.int32),
    prefill=prefill,
  )


def init_state(
  config: configs.ModelConfig, capacity: int, dtype
) -> TargetState:
  """An empty state with room for `capacity` key and value rows."""
  acc = layers.accumulation_dtype(dtype)

  def layer(kind):
    if kind == configs.ATTENTION:
      shape = (config.num_kv_heads, capacity, config.head_dim)
      return AttentionState(
        k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype)
      )
    return GDNState(
      recurrent=jnp.zeros(
        (
          config.gdn_num_value_heads,
          config.gdn_key_head_dim,
          config.gdn_value_head_dim,
        ),
        acc,
      ),
      conv=jnp.zeros((config.gdn_conv_kernel - 1, config.gdn_conv_dim), dtype),
    )

  return TargetState(
    layers=tuple(layer(kind) for kind in config.layer_types),
    length=jnp.zeros((), jnp.int32),
  )


def reset_state(state: TargetState) -> TargetState:
  """Empties a used state: key and value rows stay but are never read."""

  def layer(s):
    if isinstance(s, AttentionState):
      return s
    return jax.tree.map(jnp.zeros_like, s)

  return TargetState(
    layers=tuple(layer(s) for s in state.layers),
    length=jnp.zeros_like(state.length),
  )
