"""DFlash training: random anchors, decayed cross-entropy, frozen target.

(arXiv 2602.06036.) For each anchor a block [anchor | masks] sees the context
features of the positions before it and its own rows, and is trained to say the
tokens that follow: slot k with weight exp(-(k - 1) / gamma).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specpilot_jax.models import layers
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import training


def block_hidden(
  drafter: DFlash,
  embedding: Float[Array, "V D"],
  tokens: Int[Array, " N"],
  features: Float[Array, "N L D"],
  anchors: Int[Array, " A"],
) -> Float[Array, "A B D"]:
  """Hidden states of the blocks at the given anchors of one sequence."""
  c = drafter.config
  n, block = tokens.shape[0], c.block_size
  inputs = jnp.full((anchors.shape[0], block), c.mask_token_id, jnp.int32)
  inputs = inputs.at[:, 0].set(tokens[anchors])
  positions = anchors[:, None] + jnp.arange(block, dtype=jnp.int32)
  x = jnp.take(embedding, inputs.reshape(-1), axis=0).astype(drafter.dtype)
  context = drafter.inject(features, jnp.arange(n, dtype=jnp.int32))
  visible = jnp.arange(n)[None, :] < anchors[:, None]  # [A, N]
  if c.sliding_window is not None:
    recent = jnp.arange(n)[None, :] >= anchors[:, None] - c.sliding_window
    visible &= recent

  def attend(i, q, k, v):
    k_context, v_context = context[i]
    group = (anchors.shape[0], block, c.num_kv_heads)
    q = q.reshape(*group, -1, c.head_dim)
    k, v = k.reshape(*group, c.head_dim), v.reshape(*group, c.head_dim)

    def scores(spec, keys):
      return c.head_dim**-0.5 * jnp.einsum(
        spec,
        q,
        keys,
        preferred_element_type=layers.accumulation_dtype(q.dtype),
      )

    outside = scores("abkgd,tkd->kgabt", k_context)
    outside = jnp.where(visible[:, None, :], outside, -1e30)
    inside = scores("abkgd,ackd->kgabc", k)
    law = jax.nn.softmax(jnp.concatenate([outside, inside], -1), axis=-1)
    law = law.astype(v.dtype)
    return jnp.einsum("kgabt,tkd->abkgd", law[..., :n], v_context) + jnp.einsum(
      "kgabc,ackd->abkgd", law[..., n:], v
    )

  hidden = drafter.block(x, positions.reshape(-1), attend)
  return hidden.reshape(*inputs.shape, -1)


def loss(
  drafter: DFlash,
  target: Target,
  tokens: Int[Array, "R N"],
  anchors: Int[Array, "R A"],
  gamma: float,
) -> tuple[Float[Array, ""], Float[Array, " S"]]:
  """Decayed cross-entropy, and the top-1 accuracy of each slot.

  Args:
    tokens: sequences that the target generated.
    anchors: positions of anchors; anchor + block_size <= N.
    gamma: decay of the slots' weights.
  """
  slots = drafter.config.block_size - 1
  head = target.embed if target.config.tie_embeddings else target.lm_head
  embedding, head_weight = target.embed.weight[...], head.weight[...]

  def one(tokens, anchors):
    _, features = training.hidden_states(
      target, tokens, drafter.config.target_layers
    )
    hidden = block_hidden(
      drafter, embedding, tokens, jax.lax.stop_gradient(features), anchors
    )[:, 1:]
    logits = jnp.einsum(
      "asd,vd->asv",
      hidden,
      head_weight.astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    labels = tokens[anchors[:, None] + 1 + jnp.arange(slots)]
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - picked
    return nll, (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)

  nll, right = jax.vmap(one)(tokens, anchors)
  weights = jnp.exp(-jnp.arange(slots) / gamma)
  return (nll.mean((0, 1)) * weights).sum() / weights.sum(), right.mean((0, 1))
