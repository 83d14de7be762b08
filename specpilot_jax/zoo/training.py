"""Training forward passes of targets: whole sequences, no committed state."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import gated_delta as gated_delta_kernels
from specpilot_jax.models import gated_delta, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target

QUERY_BLOCK = 1024
"""Queries that attend at once: bounds the scores held in memory."""


def causal_attention(
  q: Float[Array, "N H K"],
  k: Float[Array, "N Hkv K"],
  v: Float[Array, "N Hkv K"],
) -> Float[Array, "N H K"]:
  """Causal softmax attention; N a multiple of a block of queries.

  cuDNN's fused kernel for bfloat16 on a GPU; elsewhere blocks of queries that
  are computed again in the backward pass.
  """
  n, heads, dim = q.shape
  if q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
    return jax.nn.dot_product_attention(
      q[None], k[None], v[None], is_causal=True, implementation="cudnn"
    )[0]
  kv_heads = k.shape[1]
  block = min(n, QUERY_BLOCK)
  if n % block:
    raise ValueError(f"sequence of {n} is not a multiple of {block}")
  q = q.reshape(n // block, block, kv_heads, heads // kv_heads, dim)
  acc = layers.accumulation_dtype(q.dtype)

  @jax.checkpoint
  def attend(args):
    first, queries = args
    scores = jnp.einsum(
      "nkgd,tkd->kgnt", queries, k, preferred_element_type=acc
    )
    rows = first + jnp.arange(block)
    visible = rows[:, None] >= jnp.arange(n)[None, :]
    scores = jnp.where(visible, scores * dim**-0.5, -1e30)
    law = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("kgnt,tkd->nkgd", law, v)

  firsts = jnp.arange(0, n, block)
  out = jax.lax.map(attend, (firsts, q))
  return out.reshape(n, heads, dim)


@jax.custom_vjp
def lookup(
  table: Float[Array, "V D"], tokens: Int[Array, " N"]
) -> Float[Array, "N D"]:
  """Rows of a table. Its gradient is a product with one-hot rows: a scatter of
  65,536 rows into 4,096 took 51 ms of a step of 170 ms on an H200."""
  return jnp.take(table, tokens, axis=0)


def _lookup_fwd(table, tokens):
  return lookup(table, tokens), (tokens, table.shape[0])


def _lookup_bwd(kept, grad):
  tokens, rows = kept
  hot = jax.nn.one_hot(tokens, rows, dtype=grad.dtype)
  return jnp.einsum("nv,nd->vd", hot, grad), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


def hidden_states(
  model: Target, tokens: Int[Array, " N"], taps: tuple[int, ...] = ()
) -> tuple[Float[Array, "N D"], Float[Array, "N L D"]]:
  """Final-normed hidden states and taps of one sequence from its beginning.

  The function of `Target.__call__` on an empty state.
  """
  config = model.config
  n = tokens.shape[0]
  positions = jnp.arange(n, dtype=jnp.int32)
  nodes = state_lib.Nodes(
    tokens=tokens,
    parents=positions - 1,
    depth=positions,
    mask=jnp.ones((1, 1), bool),  # no layer reads it in prefill
    count=jnp.asarray(n, jnp.int32),
    prefill=True,
  )
  empty = state_lib.init_state(config, 1, model.dtype)

  def run(layer, x, i):
    h = layer.input_norm(x)
    if isinstance(layer.mixer, gated_delta.GatedDeltaNet):
      recurrent = empty.layers[i].recurrent
      p = layer.mixer.project(h, nodes, empty.layers[i])
      # float32 products at the speed of tensor cores, in both directions.
      o, _ = gated_delta_kernels.chunk_prefill(
        *layer.mixer.inputs(p), recurrent, nodes.count, lax.Precision.DEFAULT
      )
      h = layer.mixer.output(o, p.z)
    else:
      q, k, v, gate = layer.mixer.project(h, positions)
      h = layer.mixer.output(causal_attention(q, k, v), gate)
    x = x + h
    return x + layer.mlp(layer.post_norm(x))

  x = lookup(model.embed.weight[...], tokens)
  tapped = {}
  for i, layer in enumerate(model.layers):
    x = run(layer, x, i)
    if i in taps:
      tapped[i] = x
  features = jnp.zeros((n, 0, config.hidden_size), x.dtype)
  if taps:
    features = jnp.stack([tapped[i] for i in taps], axis=1)
  return model.norm(x), features


def next_token_loss(
  model: Target, tokens: Int[Array, "B N1"]
) -> Float[Array, ""]:
  """Mean negative log-likelihood in nats of tokens[:, 1:] given the rest."""
  inputs, targets = tokens[:, :-1], tokens[:, 1:]

  def one(inputs, targets):
    hidden, _ = hidden_states(model, inputs)
    logits = model.logits(hidden).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked

  return jax.vmap(one)(inputs, targets).mean()


def cast(params, dtype):
  """Master parameters in the compute dtype; decays keep float32."""

  def leaf(path, x):
    keep = any(getattr(p, "key", p) in ("a_log", "dt_bias") for p in path)
    return x if keep else x.astype(dtype)

  return jax.tree_util.tree_map_with_path(leaf, params)
