"""DFlash training: random anchors, decayed cross-entropy, frozen target.

(arXiv 2602.06036.) For each anchor a block [anchor | masks] sees the context
features of the positions before it and its own rows, and is trained to say the
tokens that follow: slot k with weight exp(-(k - 1) / gamma).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.models import layers
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.zoo import recipes


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Text:
  """Rows that a target generated, and what it computed over them.

  Attributes:
    tokens: prompt, output, then anything.
    ends: where a row's output ends.
    sampled: whether it was sampled; else it is greedy.
    features: taps.
    hidden: final-normed hidden states.
  """

  tokens: Int[Array, "R N"]
  ends: Int[Array, " R"]
  sampled: Bool[Array, " R"]
  features: Float[Array, "R N L D"]
  hidden: Float[Array, "R N D"]


def _reach(overlap: Float[Array, "A S"]) -> Float[Array, "A S"]:
  """By how much the expected acceptance length grows with each slot's overlap.

  That length is sum_k prod_(j <= k) a_j for overlaps a, its derivative by a_j
  the chance of reaching slot j times what follows it: 1 + a_(j+1) * (1 + ...).
  """
  reached = jnp.cumprod(overlap, axis=1)[:, :-1]
  reached = jnp.pad(reached, ((0, 0), (1, 0)), constant_values=1)

  def behind(rest, a):
    return 1 + a * rest, rest

  _, rest = jax.lax.scan(
    behind, jnp.ones(overlap.shape[:1]), overlap.T, reverse=True
  )
  return reached * rest.T


LOGITS = 1 << 30
"""Logits held at a time; more of them are computed again, part by part."""


def loss(
  drafter: DFlash,
  embedding: Float[Array, "V D"],
  head: Float[Array, "V D"],
  text: Text,
  anchors: Int[Array, "R A"],
  recipe: recipes.DrafterRecipe,
) -> tuple[Float[Array, ""], Float[Array, " S"]]:
  """Decayed loss, and the top-1 accuracy of each slot.

  Cross-entropy, mixed with the total variation distance between the drafter's
  law and the label's: what rejection sampling loses (DSpark, arXiv
  2607.05147, trains on both).

  Args:
    embedding, head: of the target.
    anchors: positions of anchors, at least one token before a row's end; slots
      behind the end do not count.
    recipe: its `gamma`, `reach`, `soft` and `variation`.
  """
  slots = drafter.config.block_size - 1
  decay = jnp.exp(-jnp.arange(slots) / recipe.gamma)

  def one(row: Text, anchors):
    hidden = block_hidden(
      drafter, embedding, row.tokens, row.features, anchors
    )[:, 1:]
    places = anchors[:, None] + 1 + jnp.arange(slots)
    counts = (places < row.ends).astype(jnp.float32)
    places = jnp.minimum(places, row.tokens.shape[0] - 1)
    labels = row.tokens[places]

    def logits_of(hidden):
      return jnp.einsum(
        "asd,vd->asv",
        hidden,
        head.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
      )

    logits = logits_of(hidden)
    said = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    norm = jax.nn.logsumexp(logits, axis=-1)
    overlap = jnp.exp(said - norm)  # of the drafter's law with the label's
    if recipe.soft:
      law = jax.nn.softmax(logits_of(row.hidden[places - 1]), axis=-1)
      law = jax.lax.stop_gradient(law)
      own = jnp.exp(logits - norm[..., None])
      both = jnp.minimum(own, law).sum(-1)
      overlap = jnp.where(row.sampled, both, overlap)
      said = jnp.where(row.sampled, (law * logits).sum(-1), said)
    mix = recipe.variation
    nll = (1 - mix) * (norm - said) + mix * (1 - overlap)
    right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    weights = (1 - recipe.reach) * decay + recipe.reach * _reach(overlap)
    return nll, right, counts, jax.lax.stop_gradient(weights) * counts

  rows, per_row = anchors.shape
  at_once = max(1, LOGITS // (per_row * slots * head.shape[0]))
  if at_once >= rows:
    nll, right, counts, weights = jax.vmap(one)(text, anchors)
  else:
    nll, right, counts, weights = jax.lax.map(
      lambda args: jax.checkpoint(one)(*args),
      (text, anchors),
      batch_size=at_once,
    )
  value = (nll * weights).sum() / weights.sum()
  return value, (right * counts).sum((0, 1)) / counts.sum((0, 1))
