"""Attention of tree nodes over a committed prefix and over their ancestors.

Two score blocks share one softmax: [nodes, prefix], unmasked up to the
committed length, and [nodes, nodes], masked to ancestors-or-self. No mask has
the length of the context.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30
"""Score of an invisible position: finite, so that no row turns into NaN."""


def tree_attention(
  q: Float[Array, "N H D"],
  k_nodes: Float[Array, "N Hkv D"],
  v_nodes: Float[Array, "N Hkv D"],
  k_prefix: Float[Array, "Hkv T D"],
  v_prefix: Float[Array, "Hkv T D"],
  length: Int[Array, ""],
  mask: Bool[Array, "N N"],
  scale: float,
  first: Int[Array, ""] | int = 0,
) -> Float[Array, "N H D"]:
  """Softmax attention of each node over prefix [0, length) and ancestors.

  Query head h reads key head h // (H / Hkv). Scores, softmax and sums are in
  float32 (float64 for float64 inputs); probabilities are rounded to the
  values' dtype before the product, as in the family's reference model.

  Args:
    length: committed rows of the prefix; rows behind it are not read, whatever
      finite values they hold.
    mask: mask[i, j] is True where j is i or an ancestor of i.
    scale: factor on q k^T.
    first: first visible row of the prefix (a sliding window's edge).

  Returns:
    Attention outputs [N, H, D] in the dtype of q.
  """
  n, heads, dim = q.shape
  kv_heads, capacity, _ = k_prefix.shape
  acc = jnp.promote_types(q.dtype, jnp.float32)

  def einsum(spec, *operands):
    return jnp.einsum(
      spec,
      *operands,
      # float32 means float32 on a GPU too.
      precision=None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
      preferred_element_type=acc,
    )

  q = q.reshape(n, kv_heads, heads // kv_heads, dim)
  row = jnp.arange(capacity)
  visible = (row >= first) & (row < length)
  prefix = einsum("nkgd,ktd->kgnt", q, k_prefix) * scale
  prefix = jnp.where(visible, prefix, _MASKED)
  nodes = einsum("nkgd,mkd->kgnm", q, k_nodes) * scale
  nodes = jnp.where(mask, nodes, _MASKED)
  # Every node sees itself, so that the maximum is a real score.
  top = jnp.maximum(prefix.max(-1), nodes.max(-1))[..., None]
  prefix, nodes = jnp.exp(prefix - top), jnp.exp(nodes - top)
  total = prefix.sum(-1) + nodes.sum(-1)  # [Hkv, G, N]
  # Results heads first: XLA's CPU backend has no bfloat16 product that writes
  # the transposed form.
  out = einsum("kgnt,ktd->kgnd", prefix.astype(v_prefix.dtype), v_prefix)
  out += einsum("kgnm,mkd->kgnd", nodes.astype(v_nodes.dtype), v_nodes)
  out = jnp.moveaxis(out / total[..., None], 2, 0)
  return out.reshape(n, heads, dim).astype(q.dtype)
