"""One token through a Gated DeltaNet mixer, between its two projections.

Convolution, gates, normalised keys and queries, the delta rule and the new
state, for autoregressive decoding: in plain JAX a dozen small operations around
one read and one write of the state, as a kernel a single launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float

from pallas_kernels import dispatch, gated_delta

COLUMNS, NUM_WARPS = 16, 2
"""Of a value head's state per program. On an H200, 48 heads of 128 x 128: 5.5
us; 32 columns 5.7, 64 with 4 warps 6.1, 128 with 8 warps 10.0."""


def decode(
  projected: Float[Array, " P"],
  conv: Float[Array, "W C"],
  conv_weight: Float[Array, "C W1"],
  a_log: Float[Array, " Hv"],
  dt_bias: Float[Array, " Hv"],
  state: Float[Array, "Hv K V"],
  live: Bool[Array, ""],
  *,
  key_heads: int,
  implementation: dispatch.Implementation = "reference",
) -> tuple[Float[Array, "Hv V"], Float[Array, "Hv K V"]]:
  """Output of one token before the gated norm, and the state after it.

      y = silu(conv(q | k | v));   q, k <- L2-normalised, q <- q K^-0.5
      g = -exp(a_log) softplus(a + dt_bias);   beta = sigmoid(b)
      u = beta (v - e^g S^T k)
      o = e^g S^T q + (q . k) u,   S' = e^g S + k u^T

  Args:
    projected: [q | k | v | z | b | a] of the token; z is not read.
    conv: the W = kernel - 1 rows [q | k | v] before it, oldest first.
    conv_weight: taps, the token's own last.
    state: float32 (float64 in the reference).
    live: False leaves the state as it is, bit for bit.
    key_heads: Hk; C = 2 Hk K + Hv V.
    implementation: the kernel takes a float32 state.
  """
  if implementation != "reference":
    return _decode_kernel(
      projected, conv, conv_weight, a_log, dt_bias, state, live, key_heads,
      implementation,
    )  # fmt: skip
  heads, key_dim, _ = state.shape
  channels = conv.shape[1]
  acc = state.dtype
  rows = jnp.concatenate([conv, projected[None, :channels]]).astype(acc)
  mixed = jax.nn.silu((rows * conv_weight.T.astype(acc)).sum(0))
  b, a = jnp.split(projected[-2 * heads :].astype(acc), 2)
  q, k, v, g, beta = gated_delta.prepare(
    mixed[None],
    b[None],
    a[None],
    a_log,
    dt_bias,
    key_heads=key_heads,
    key_dim=key_dim,
  )
  g, beta = jnp.where(live, g, 0), jnp.where(live, beta, 0)
  o, after = gated_delta.one_token(q, k, v, g, beta, state)
  return o[0], after


def _program(
  projected_ref,
  conv_ref,
  weight_ref,
  a_log_ref,
  dt_bias_ref,
  live_ref,
  state_ref,
  o_ref,
  after_ref,
  *,
  key_heads,
  key_dim,
  value_dim,
):
  """One value head, some columns of its state; its key head is computed anew
  by each program that reads it."""
  head, block = pl.program_id(0), pl.program_id(1)
  heads = pl.num_programs(0)
  columns = state_ref.shape[1]
  keys = key_heads * key_dim
  key_head = head // (heads // key_heads)
  taps = conv_ref.shape[0]
  value_start = 2 * keys + head * value_dim + block * columns

  def mixed(start, size):
    """Channels behind the convolution and its activation."""
    channel = start + lax.iota(jnp.int32, size)

    def tap(row, index):
      return row.astype(jnp.float32) * weight_ref[channel, index].astype(
        jnp.float32
      )

    total = tap(projected_ref[channel], taps)
    for i in range(taps):
      total += tap(conv_ref[i, channel], i)
    return total * jax.nn.sigmoid(total)

  unit = gated_delta.l2_normalize
  q = unit(mixed(key_head * key_dim, key_dim)) * key_dim**-0.5
  k = unit(mixed(keys + key_head * key_dim, key_dim))
  v = mixed(value_start, columns)
  gates = 2 * keys + 2 * heads * value_dim
  live = live_ref[0] != 0
  beta = jax.nn.sigmoid(projected_ref[gates + head].astype(jnp.float32))
  a = projected_ref[gates + heads + head].astype(jnp.float32)
  a += dt_bias_ref[head].astype(jnp.float32)
  softplus = jnp.maximum(a, 0) + jnp.log(1 + jnp.exp(-jnp.abs(a)))
  g = -jnp.exp(a_log_ref[head].astype(jnp.float32)) * softplus
  kept = jnp.exp(jnp.where(live, g, 0.0))
  beta = jnp.where(live, beta, 0.0)

  state = state_ref[...]  # [K, columns]
  of_key = jnp.sum(k[:, None] * state, axis=0)
  of_query = jnp.sum(q[:, None] * state, axis=0)
  u = beta * (v - kept * of_key)
  o_ref[...] = kept * of_query + jnp.sum(q * k) * u
  after_ref[...] = kept * state + k[:, None] * u[None, :]


@dispatch.once("key_heads", "implementation")
def _decode_kernel(
  projected, conv, conv_weight, a_log, dt_bias, state, live, key_heads,
  implementation,
):  # fmt: skip
  if state.dtype != jnp.float32:
    raise ValueError(f"decode's kernel takes float32, not {state.dtype}")
  heads, key_dim, value_dim = state.shape
  columns = min(COLUMNS, value_dim)

  def whole(x):
    return pl.BlockSpec(x.shape, lambda head, block: (0,) * x.ndim)

  tile = pl.BlockSpec(
    (None, key_dim, columns), lambda head, block: (head, 0, block)
  )
  small = (
    projected, conv, conv_weight, a_log, dt_bias,
    live.astype(jnp.int32).reshape(1),
  )  # fmt: skip
  return pl.pallas_call(
    functools.partial(
      _program, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim
    ),
    grid=(heads, value_dim // columns),
    in_specs=[*(whole(x) for x in small), tile],
    out_specs=[
      pl.BlockSpec((None, columns), lambda head, block: (head, block)),
      tile,
    ],
    out_shape=[
      jax.ShapeDtypeStruct((heads, value_dim), jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
    ],
    input_output_aliases={len(small): 1},  # each program reads its own tile
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS),
    interpret=implementation == "interpret",
    name="gdn_decode",
  )(*small, state)
