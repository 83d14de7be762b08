"""Full attention: grouped queries, optional q/k norm and output gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, tree_attention
from specpilot_jax.configs import ModelConfig
from specpilot_jax.models import layers
from specpilot_jax.models.state import AttentionStash, AttentionState, Nodes


class Attention(nnx.Module):
  """Attention layer of all three families (q, k and v fused as rows)."""

  q_norm: layers.RMSNorm  # where the family has them
  k_norm: layers.RMSNorm

  def __init__(
    self, config: ModelConfig, dtype, rngs, kernels: dispatch.Kernels
  ):
    self.config = config
    self.kernels = kernels
    self.definition = False  # see `layers.by_definition`
    q_rows = config.num_heads * config.head_dim
    # Qwen3.5's q_proj packs [q | gate] for each head.
    self.q_rows = q_rows * (2 if config.attention_gate else 1)
    kv_rows = config.num_kv_heads * config.head_dim
    self.qkv = layers.Linear(
      config.hidden_size,
      self.q_rows + 2 * kv_rows,
      dtype,
      rngs,
      kernels.w12_matmul,
      kernels.fp8_matmul,
    )
    self.o_proj = layers.Linear(
      q_rows,
      config.hidden_size,
      dtype,
      rngs,
      kernels.w12_matmul,
      kernels.fp8_matmul,
    )
    if config.qk_norm:
      for name in ("q_norm", "k_norm"):
        norm = layers.RMSNorm(
          config.head_dim, config.norm_eps, config.zero_centered_norm, dtype
        )
        setattr(self, name, norm)

  def project(
    self, x: Float[Array, "N D"], positions: Int[Array, " N"]
  ) -> tuple[
    Float[Array, "N H K"],
    Float[Array, "N Hkv K"],
    Float[Array, "N Hkv K"],
    Float[Array, "N H K"] | None,
  ]:
    """Queries and keys (normed, rotated), values, and the gate if any."""
    c = self.config
    n = x.shape[0]
    kv_rows = c.num_kv_heads * c.head_dim
    q, k, v = jnp.split(
      self.qkv(x), (self.q_rows, self.q_rows + kv_rows), axis=-1
    )
    k = k.reshape(n, c.num_kv_heads, c.head_dim)
    v = v.reshape(n, c.num_kv_heads, c.head_dim)
    gate = None
    if c.attention_gate:
      q, gate = jnp.split(q.reshape(n, c.num_heads, 2 * c.head_dim), 2, axis=-1)
    else:
      q = q.reshape(n, c.num_heads, c.head_dim)
    if c.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q = layers.rope(q, positions, c.rotary_dim, c.rope_theta)
    k = layers.rope(k, positions, c.rotary_dim, c.rope_theta)
    return q, k, v, gate

  def output(
    self, out: Float[Array, "N H K"], gate: Float[Array, "N H K"] | None
  ) -> Float[Array, "N D"]:
    """Gates and projects what was attended to."""
    if gate is not None:
      out = out * jax.nn.sigmoid(gate)
    return self.o_proj(out.reshape(out.shape[0], -1))

  def __call__(
    self,
    x: Float[Array, "N D"],
    nodes: Nodes,
    positions: Int[Array, " N"],
    state: AttentionState,
    length: Int[Array, ""],
  ) -> tuple[Float[Array, "N D"], AttentionStash]:
    """Attends to the committed prefix and to each node's ancestors."""
    q, k, v, gate = self.project(x, positions)
    out, stash = nodes.over(self._attend, (q, k, v), state, length)
    return self.output(out, gate), stash

  def _attend(self, nodes: Nodes, rows, state: AttentionState, length):
    """Attention proper, of the nodes of one request."""
    q, k, v = rows
    scale = self.config.head_dim**-0.5
    implementation, mask = self.kernels.tree_attention, nodes.mask
    if nodes.is_prompt:
      mask = None
      implementation = self.kernels.prompt_attention
      if self.definition:
        implementation = "reference"
    out = tree_attention.tree_attention(
      q,
      k,
      v,
      state.k,
      state.v,
      length,
      mask,
      scale,
      implementation=implementation,
    )
    return out, AttentionStash(k=k, v=v)
