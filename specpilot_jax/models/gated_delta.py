"""The Gated DeltaNet layer of Qwen3.5 to 3.8 (facts: DESIGN section 3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import (
  dispatch,
  gated_delta,
  gdn_decode,
  gdn_prefill,
  gdn_verify,
)
from specpilot_jax.configs import ModelConfig
from specpilot_jax.models import layers
from specpilot_jax.models.state import (
  GDNPrefillStash,
  GDNStash,
  GDNState,
  Nodes,
  Rows,
)


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


class Projected(NamedTuple):
  """What a layer computes before its recurrence.

  Attributes:
    fused: [pre-convolution rows | z | b | a], as the weights are fused.
    rows: pre-convolution rows.
    mixed: [q | k | v] behind convolution and activation.
    z: output gate before its activation.
  """

  fused: Float[Array, "N P"]
  rows: Float[Array, "N C"]
  mixed: Float[Array, "N C"]
  z: Float[Array, "N HvV"]


class GatedDeltaNet(nnx.Module):
  """qkv, z, b and a fused as rows of one projection, in this order."""

  def __init__(
    self, config: ModelConfig, dtype, rngs, kernels: dispatch.Kernels
  ):
    self.config = config
    self.kernels = kernels
    self.definition = False  # see `layers.by_definition`
    heads = config.gdn_num_value_heads
    acc = layers.accumulation_dtype(dtype)
    rows = config.gdn_conv_dim + config.gdn_value_dim + 2 * heads
    self.in_proj = layers.Linear(
      config.hidden_size,
      rows,
      dtype,
      rngs,
      kernels.w12_matmul,
      kernels.fp8_matmul,
    )
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
      config.gdn_value_dim,
      config.hidden_size,
      dtype,
      rngs,
      kernels.w12_matmul,
      kernels.fp8_matmul,
    )

  def project(
    self, x: Float[Array, "N D"], nodes: Nodes, state: GDNState
  ) -> Projected:
    """The input projection and the convolution, of one request."""
    fused = self.in_proj(x)
    rows, z, _ = self._split(fused)
    mixed = self._convolve(Rows(fused), nodes, state)
    return Projected(fused=fused, rows=rows, mixed=mixed, z=z)

  def _convolve(
    self, fused: Rows, nodes: Nodes, state: GDNState
  ) -> Float[Array, "N C"]:
    """[q | k | v] behind convolution and activation, of one request."""
    c = self.config
    acc = layers.accumulation_dtype(fused.array.dtype)
    width = c.gdn_conv_kernel
    if nodes.prefill:  # one path: a node's window is what precedes it
      history = jnp.concatenate([state.conv, self._rows(fused).own()])
      windows = [history[j : j + nodes.size] for j in range(width)]
    else:
      index = conv_windows(nodes.parents, width)
      windows = [self._tap(fused, state, index[:, j]) for j in range(width)]
    weight = self.conv_weight[...].astype(acc)
    mixed = sum(w.astype(acc) * weight[:, j] for j, w in enumerate(windows))
    return jax.nn.silu(mixed)

  def _tap(
    self, fused: Rows, state: GDNState, index: Int[Array, " N"]
  ) -> Float[Array, "N C"]:
    """Rows of [committed rows | nodes], read where they are.

    Joined before, they would be copied: of 16 requests of 16 nodes that took an
    H200 13 us a layer, and 21 more to put the rows in order.
    """
    committed = state.conv.shape[0]
    new = self._rows(fused).of(jnp.maximum(index - committed, 0))
    old = jnp.take(state.conv, index, axis=0, mode="clip")
    return jnp.where((index < committed)[:, None], old, new)

  def _rows(self, fused: Rows) -> Rows:
    """Pre-convolution rows."""
    return fused._replace(array=self._split(fused.array)[0])

  def _split(self, fused: Float[Array, "N P"]) -> list[Array]:
    """Pre-convolution rows, z, [b | a]."""
    c = self.config
    edges = (c.gdn_conv_dim, c.gdn_conv_dim + c.gdn_value_dim)
    return jnp.split(fused, edges, axis=-1)

  def inputs(self, p: Projected) -> tuple[Array, Array, Array, Array, Array]:
    """q, k, v, g, beta of `pallas_kernels.gated_delta`."""
    c = self.config
    _, _, ba = self._split(p.fused)
    b, a = jnp.split(ba.astype(p.mixed.dtype), 2, axis=-1)  # [N, Hv] each
    return gated_delta.prepare(
      p.mixed,
      b,
      a,
      self.a_log[...],
      self.dt_bias[...],
      key_heads=c.gdn_num_key_heads,
      key_dim=c.gdn_key_head_dim,
    )

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
    fused = self.in_proj(x)
    _, z, _ = self._split(fused)
    o, stash = nodes.over(self._recur, Rows(fused), state)
    return self.output(o, z), stash

  def _recur(
    self, nodes: Nodes, fused: Rows, state: GDNState
  ) -> tuple[Float[Array, "N Hv V"], GDNStash | GDNPrefillStash]:
    """Convolution and recurrence, of the nodes of one request."""
    if nodes.prefill and not nodes.is_prompt:
      return self._decode(fused.own(), nodes, state)
    mixed = self._convolve(fused, nodes, state)
    rows = self._rows(fused).own()
    # The gates come last, and are found from there.
    gates = slice(-2 * self.config.gdn_num_value_heads, None)
    gated = fused.array if fused.index is None else fused.own(gates)
    if nodes.prefill:
      o, recurrent = gdn_prefill.prefill(
        mixed,
        gated,
        self.a_log[...],
        self.dt_bias[...],
        state.recurrent,
        nodes.count,
        key_heads=self.config.gdn_num_key_heads,
        implementation=(
          "reference" if self.definition else self.kernels.gdn_prefill
        ),
      )
      stash = GDNPrefillStash(recurrent=recurrent, rows=rows)
    else:
      o, k, u, decay = gdn_verify.verify(
        mixed,
        gated,
        self.a_log[...],
        self.dt_bias[...],
        state.recurrent,
        nodes.mask,
        nodes.count,
        key_heads=self.config.gdn_num_key_heads,
        implementation=self.kernels.gdn_verify,
      )
      stash = GDNStash(
        k=k, u=u, decay=decay, rows=rows, kernel=self.kernels.gdn_commit
      )
    return o, stash

  def _decode(
    self, fused: Float[Array, "1 P"], nodes: Nodes, state: GDNState
  ) -> tuple[Float[Array, "1 Hv V"], GDNPrefillStash]:
    """One token that is certain to be committed."""
    o, recurrent = gdn_decode.decode(
      fused[0],
      state.conv,
      self.conv_weight[...],
      self.a_log[...],
      self.dt_bias[...],
      state.recurrent,
      nodes.count > 0,
      key_heads=self.config.gdn_num_key_heads,
      implementation=self.kernels.gdn_decode,
    )
    rows, _, _ = self._split(fused)
    return o[None], GDNPrefillStash(recurrent=recurrent, rows=rows)
