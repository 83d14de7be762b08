"""Make an accepted path the state: KV compaction, GDN rebuild, conv window."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels import gdn_commit
from specpilot_jax.models.state import (
  AttentionStash,
  AttentionState,
  GDNPrefillStash,
  GDNState,
  LayerStash,
  LayerState,
  TargetState,
)


def _append_rows(cache: Array, rows: Array, path, count, length) -> Array:
  """Writes rows[path[:count]] at `length`; [Hkv, T, D] and [N, Hkv, D]."""
  on_path = (jnp.arange(path.shape[0]) < count)[:, None, None]
  # Rows behind the path are zeroed: nothing of a rejected node stays.
  chosen = jnp.where(on_path, rows[path], 0)
  zero = jnp.zeros((), length.dtype)
  return lax.dynamic_update_slice(
    cache, jnp.swapaxes(chosen, 0, 1).astype(cache.dtype), (zero, length, zero)
  )


def _commit_layer(
  state: LayerState, stash: LayerStash, path, count, length
) -> LayerState:
  if isinstance(stash, AttentionStash):
    assert isinstance(state, AttentionState)
    return AttentionState(
      k=_append_rows(state.k, stash.k, path, count, length),
      v=_append_rows(state.v, stash.v, path, count, length),
    )
  assert isinstance(state, GDNState)
  window = state.conv.shape[0]
  conv = lax.dynamic_slice_in_dim(
    jnp.concatenate([state.conv, stash.rows[path]]), count, window
  )
  if isinstance(stash, GDNPrefillStash):
    return GDNState(recurrent=stash.recurrent, conv=conv)
  recurrent = gdn_commit.commit(
    state.recurrent,
    stash.k,
    stash.u,
    stash.decay,
    path,
    count,
    implementation=stash.kernel,
  )
  return GDNState(recurrent=recurrent, conv=conv)


def commit(
  state: TargetState,
  stash: tuple[LayerStash, ...],
  path: Int[Array, " P"],
  count: Int[Array, ""],
) -> TargetState:
  """Appends the first `count` nodes of a root path to the state.

  Args:
    state: with room for length + P key and value rows.
    stash: of the pass that ran on top of `state`. A prefill's stash allows
      only its own path: all of its nodes.
    path: node indices from the root down; entries from `count` on are ignored.
    count: nodes to commit; 0 leaves the state as it is.
  """
  length = state.length

  def layer(s, t):
    scope = "attention" if isinstance(t, AttentionStash) else "recurrent"
    with jax.named_scope(scope):
      return _commit_layer(s, t, path, count, length)

  return TargetState(
    layers=tuple(layer(s, t) for s, t in zip(state.layers, stash, strict=True)),
    length=length + count,
  )
