"""The Gated DeltaNet layer of Qwen3.5 to 3.8 (facts: DESIGN section 3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gated_delta, gdn_decode
from specpilot_jax.configs import ModelConfig
from specpilot_jax.models import layers
from specpilot_jax.models.state import (
  GDNPrefillStash,
  GDNStash,
  GDNState,
  Nodes,
)

_L2_EPS = 1e-6  # inside the square root, as in the family's reference model


def conv_windows(parents: Int[Array, " N"], kernel: int) -> Int[Array, "N W"]:
  """Rows that each node's convolution reads, oldest first.

  Indices into [committed rows (kernel - 1) | nodes]: a node's window follows
  its parents, not the order in memory, and runs on into the committed rows.
  """
  n = parents.shape[0]
  node = jnp.arange(n, dtype=jnp.int32)
  window = [node]
  for _ in range(kernel - 1):
    # Above the root (-1) the ancestors are the committed rows, newest first.
    node = jnp.where(node >= 0, parents[jnp.maximum(node, 0)], node - 1)
    window.append(node)
  return jnp.stack(window[::-1], axis=1) + (kernel - 1)


def _l2_normalize(x: Array) -> Array:
  return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


class Projected(NamedTuple):
  """What a layer computes before its recurrence.

  Attributes:
    inputs: q, k, v, g, beta of `pallas_kernels.gated_delta`.
    z: output gate before its activation.
    rows: pre-convolution rows.
  """

  inputs: tuple[Array, Array, Array, Array, Array]
  z: Float[Array, "N HvV"]
  rows: Float[Array, "N C"]


class GatedDeltaNet(nnx.Module):
  """qkv, z, b and a fused as rows of one projection, in this order."""

  def __init__(
    self, config: ModelConfig, dtype, rngs, kernels: dispatch.Kernels
  ):
    self.config = config
    self.kernels = kernels
    heads = config.gdn_num_value_heads
    acc = layers.accumulation_dtype(dtype)
    rows = config.gdn_conv_dim + config.gdn_value_dim + 2 * heads
    self.in_proj = layers.Linear(config.hidden_size, rows, dtype, rngs)
    init = nnx.initializers.normal(0.02)
    self.conv_weight = nnx.Param(
      init(rngs.params(), (config.gdn_conv_dim, config.gdn_conv_kernel), dtype)
    )
    self.a_log = nnx.Param(jnp.zeros((heads,), acc))
    self.dt_bias = nnx.Param(jnp.ones((heads,), acc))
    self.norm = layers.RMSNorm(
      config.gdn_value_head_dim, config.norm_eps, False, dtype
    )
    self.out_proj = layers.Linear(
      config.gdn_value_dim, config.hidden_size, dtype, rngs
    )

  def project(
    self, x: Float[Array, "N D"], nodes: Nodes, state: GDNState
  ) -> Projected:
    """What the recurrence reads, and the output gate."""
    c = self.config
    acc = layers.accumulation_dtype(x.dtype)
    n, heads = x.shape[0], c.gdn_num_value_heads
    edges = (c.gdn_conv_dim, c.gdn_conv_dim + c.gdn_value_dim)
    rows, z, ba = jnp.split(self.in_proj(x), edges, axis=-1)
    b, a = jnp.split(ba.astype(acc), 2, axis=-1)  # [N, Hv] each
    beta = jax.nn.sigmoid(b)
    g = -jnp.exp(self.a_log[...]) * jax.nn.softplus(a + self.dt_bias[...])

    history = jnp.concatenate([state.conv, rows])
    width = c.gdn_conv_kernel
    if nodes.prefill:  # one path: a node's window is what precedes it
      windows = [history[j : j + n] for j in range(width)]
    else:
      index = conv_windows(nodes.parents, width)
      windows = [history[index[:, j]] for j in range(width)]
    weight = self.conv_weight[...].astype(acc)
    mixed = sum(w.astype(acc) * weight[:, j] for j, w in enumerate(windows))
    q, k, v = jnp.split(
      jax.nn.silu(mixed), (c.gdn_key_dim, 2 * c.gdn_key_dim), axis=-1
    )
    q, k = (
      _l2_normalize(y.reshape(n, c.gdn_num_key_heads, c.gdn_key_head_dim))
      for y in (q, k)
    )
    q = q * c.gdn_key_head_dim**-0.5
    v = v.reshape(n, heads, c.gdn_value_head_dim)
    return Projected(inputs=(q, k, v, g, beta), z=z, rows=rows)

  def output(
    self, o: Float[Array, "N Hv V"], z: Float[Array, "N HvV"]
  ) -> Float[Array, "N D"]:
    """Norm before the gate, both in the accumulation dtype; projection."""
    gate = jax.nn.silu(z.reshape(o.shape).astype(o.dtype))
    o = self.norm(o) * gate
    return self.out_proj(o.reshape(o.shape[0], -1).astype(z.dtype))

  def __call__(
    self, x: Float[Array, "N D"], nodes: Nodes, state: GDNState
  ) -> tuple[Float[Array, "N D"], GDNStash | GDNPrefillStash]:
    """Runs the nodes on top of the committed state, which is only read."""
    if nodes.prefill and not nodes.is_prompt:
      return self._decode(x, nodes, state)
    p = self.project(x, nodes, state)
    if nodes.prefill:
      o, recurrent = gated_delta.chunk_prefill(
        *p.inputs, state.recurrent, nodes.count
      )
      stash = GDNPrefillStash(recurrent=recurrent, rows=p.rows)
    else:
      o, u, decay = gated_delta.tree_verify(
        *p.inputs,
        state.recurrent,
        nodes.mask,
        implementation=self.kernels.gdn_tree_verify,
      )
      stash = GDNStash(k=p.inputs[1], u=u, decay=decay, rows=p.rows)
    return self.output(o, p.z), stash

  def _decode(
    self, x: Float[Array, "1 D"], nodes: Nodes, state: GDNState
  ) -> tuple[Float[Array, "1 D"], GDNPrefillStash]:
    """One token that is certain to be committed."""
    c = self.config
    projected = self.in_proj(x)
    o, recurrent = gdn_decode.decode(
      projected[0],
      state.conv,
      self.conv_weight[...],
      self.a_log[...],
      self.dt_bias[...],
      state.recurrent,
      nodes.count > 0,
      key_heads=c.gdn_num_key_heads,
      implementation=self.kernels.gdn_decode,
    )
    rows, z, _ = jnp.split(
      projected,
      (c.gdn_conv_dim, c.gdn_conv_dim + c.gdn_value_dim),
      axis=-1,
    )
    stash = GDNPrefillStash(recurrent=recurrent, rows=rows)
    return self.output(o[None], z), stash
