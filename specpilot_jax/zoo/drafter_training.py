"""Training of block-diffusion drafters: random anchors, frozen target.

(arXiv 2602.06036.) For each anchor a block [anchor | masks] sees the context
features of the positions before it and its own rows, and is trained to say the
tokens that follow: slot k with weight exp(-(k - 1) / gamma).

DFlash2's selector learns beside that: its scores are trained as the logits
are, but among the candidates alone. DSpark's logits are those with the Markov
head's added; its confidence learns the overlap of the two laws (arXiv
2607.05147). Both are given the token that did stand before each slot.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.models import layers
from specpilot_jax.models.drafters.config import DFlash2Config
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.models.drafters.dflash2 import DFlash2
from specpilot_jax.models.drafters.dspark import DSpark
from specpilot_jax.zoo import recipes, training


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


class _Said(NamedTuple):
  """What is to be said in slots of blocks.

  Attributes:
    labels: the tokens.
    parents: those before them.
    logits: the target's, whose law stands for the label where the text was
      sampled; None where labels are always tokens.
    sampled: whether it was.
  """

  labels: Int[Array, " N"]
  parents: Int[Array, " N"]
  logits: Float[Array, "N V"] | None
  sampled: Bool[Array, " N"]


class _Terms(NamedTuple):
  """Per slot: what is minimised, and how good the drafter's law is."""

  nll: Float[Array, " N"]
  overlap: Float[Array, " N"]
  right: Bool[Array, " N"]


def _law_of(said: _Said, size: int, target_norm) -> Float[Array, "N V"]:
  """The law that stands for the label; computed where it is used."""
  label = jnp.arange(size) == said.labels[..., None]
  if said.logits is None:
    return label.astype(jnp.float32)
  law = jnp.exp(said.logits - target_norm[..., None])
  return jnp.where(said.sampled[:, None], law, label)


def _parts(logits, inside):
  return logits if inside is None else jnp.where(inside, logits, -1e30)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _terms(
  logits: Float[Array, "N V"],
  said: _Said,
  mix: float,
  inside: Bool[Array, "N V"] | None = None,
) -> _Terms:
  """Cross-entropy, mixed with the total variation distance between the
  drafter's law and the label's: what rejection sampling loses (DSpark, arXiv
  2607.05147, trains on both).

  Its gradient is written out so that one pass over the vocabulary computes it
  from what the forward pass read; `nll` alone has one, by `logits`.

  Args:
    mix: share of the distance.
    inside: the law is over these tokens alone, and what is said outside of them
      teaches the cross-entropy nothing.
  """
  return _terms_fwd(logits, said, mix, inside)[0]


def _terms_fwd(logits, said, mix, inside=None):
  masked = _parts(logits, inside)
  norm = jax.nn.logsumexp(masked, axis=-1)
  target_norm = None
  if said.logits is not None:
    target_norm = jax.nn.logsumexp(said.logits, axis=-1)
  law = _law_of(said, logits.shape[-1], target_norm)
  own = jnp.exp(masked - norm[..., None])
  overlap = jnp.minimum(own, law).sum(-1)
  part = law if inside is None else jnp.where(inside, law, 0)
  whole = jnp.ones_like(norm) if inside is None else part.sum(-1)
  cross = norm * whole - (part * logits).sum(-1)
  terms = _Terms(
    nll=(1 - mix) * cross + mix * (1 - overlap),
    overlap=overlap,
    right=jnp.argmax(masked, axis=-1) == said.labels,
  )
  return terms, (logits, said, inside, norm, target_norm, whole)


def _terms_bwd(mix, kept, grads):
  logits, said, inside, norm, target_norm, whole = kept
  law = _law_of(said, logits.shape[-1], target_norm)
  own = jnp.exp(_parts(logits, inside) - norm[..., None])
  part = law if inside is None else jnp.where(inside, law, 0)
  cross = whole[..., None] * own - part
  # Of sum_j min(own_j, law_j), where own_j is the smaller.
  less = own < law
  held = jnp.where(less, own, 0).sum(-1, keepdims=True)
  overlap = own * (less - held)
  slope = (1 - mix) * cross - mix * overlap
  return (grads.nll[..., None] * slope).astype(logits.dtype), None, None


_terms.defvjp(_terms_fwd, _terms_bwd)


@jax.custom_vjp
def _product(
  x: Float[Array, "N D"], table: Float[Array, "V D"]
) -> Float[Array, "N V"]:
  """Products with the rows of a table, in float32.

  Gradients are products in the dtype of x: that of the logits is the largest
  array of a step, and in float32 it was twice as large.
  """
  return jnp.einsum(
    "nd,vd->nv",
    x,
    table.astype(x.dtype),
    preferred_element_type=jnp.float32,
  )


def _product_fwd(x, table):
  return _product(x, table), (x, table)


def _product_bwd(kept, grad):
  x, table = kept
  grad = grad.astype(x.dtype)
  return (
    jnp.einsum("nv,vd->nd", grad, table.astype(x.dtype)),
    jnp.einsum("nv,nd->vd", grad, x, preferred_element_type=jnp.float32).astype(
      table.dtype
    ),
  )


_product.defvjp(_product_fwd, _product_bwd)


def _selected(
  drafter: DFlash2, logits: Float[Array, "N V"]
) -> Bool[Array, "N V"]:
  """The candidates: as large a logit as the last of the best."""
  config = drafter.config
  assert isinstance(config, DFlash2Config)
  best, _ = jax.lax.top_k(jax.lax.stop_gradient(logits), config.selector_top_k)
  return logits >= best[..., -1:]


def _of_slots(
  drafter: DFlash,
  hidden: Float[Array, "N D"],
  logits: Float[Array, "N V"],
  said: _Said,
  recipe: recipes.DrafterRecipe,
  selector: Float[Array, ""] | float,
) -> tuple[_Terms, Float[Array, " N"]]:
  """Terms of the drafter's own law, and the confidence's cross-entropy.

  Products with whole tables, although few candidates count: gradients of rows
  that are gathered would be scattered, which costs far more (`lookup`).
  """
  nothing = jnp.zeros(said.labels.shape)
  if isinstance(drafter, DSpark):
    markov = drafter.markov_head
    embedded = training.lookup(markov.markov_w1[...], said.parents)
    logits += _product(embedded, markov.markov_w2.weight[...])
    terms = _terms(logits, said, recipe.variation)
    odds = drafter.confidence_head(hidden, embedded)
    right = jax.lax.stop_gradient(terms.overlap)
    return terms, jax.nn.softplus(odds) - right * odds
  terms = _terms(logits, said, recipe.variation)
  if not isinstance(drafter, DFlash2):
    return terms, nothing
  table = drafter.candidate_selector
  context = table.hidden_projection(hidden) * training.lookup(
    table.predecessor_codebook[...], said.parents
  )
  chosen = _terms(
    logits + _product(context, table.successor_codebook[...]),
    said,
    recipe.variation,
    _selected(drafter, logits),
  )
  return chosen._replace(nll=terms.nll + selector * chosen.nll), nothing


LOGITS = 1 << 30
"""Logits held at a time; more of them are computed again, part by part."""


def loss(
  drafter: DFlash,
  embedding: Float[Array, "V D"],
  head: Float[Array, "V D"],
  text: Text,
  anchors: Int[Array, "R A"],
  recipe: recipes.DrafterRecipe,
  selector: Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, " S"]]:
  """Decayed loss, and the top-1 accuracy of each slot.

  Args:
    embedding, head: of the target.
    anchors: positions of anchors, at least one token before a row's end; slots
      behind the end do not count.
    recipe: its `gamma`, `reach`, `soft`, `variation` and `confidence`.
    selector: weight of the selector's part.
  """
  slots = drafter.config.num_slots
  decay = jnp.exp(-jnp.arange(slots) / recipe.gamma)

  def of_rows(text: Text, anchors):
    # All slots as rows of one matrix: of gradients of tables per text row, the
    # sum would be taken afterwards.
    def flat(values):
      return values.reshape(-1, *values.shape[3:])

    def row(text: Text, anchors):
      hidden = block_hidden(
        drafter, embedding, text.tokens, text.features, anchors
      )
      places = anchors[:, None] + 1 + jnp.arange(slots)
      counts = (places < text.ends).astype(jnp.float32)
      places = jnp.minimum(places, text.tokens.shape[0] - 1)
      return (
        hidden[:, -slots:],
        text.hidden[places - 1],
        text.tokens[places],
        text.tokens[places - 1],
        jnp.broadcast_to(text.sampled, places.shape),
        counts,
      )

    *rows, counts = jax.vmap(row)(text, anchors)
    hidden, before, labels, parents, sampled = map(flat, rows)
    logits = None
    if recipe.soft:
      logits = jax.lax.stop_gradient(_product(before, head))
    terms, doubt = _of_slots(
      drafter,
      hidden,
      _product(hidden, head),
      _Said(labels, parents, logits, sampled),
      recipe,
      selector,
    )
    counts = counts.reshape(-1, slots)
    terms = jax.tree.map(lambda x: x.reshape(counts.shape), terms)
    weights = (1 - recipe.reach) * decay + recipe.reach * _reach(terms.overlap)
    weights = jax.lax.stop_gradient(weights) * counts
    doubt = doubt.reshape(counts.shape)
    return terms.nll, terms.right * counts, counts, weights, doubt

  rows, per_row = anchors.shape
  most = max(1, LOGITS // (per_row * slots * head.shape[0]))
  at_once = max(n for n in range(1, rows + 1) if n <= most and rows % n == 0)
  if at_once == rows:
    parts = of_rows(text, anchors)
  else:
    parts = jax.lax.map(
      lambda args: jax.checkpoint(of_rows)(*args),
      jax.tree.map(
        lambda x: x.reshape(-1, at_once, *x.shape[1:]), (text, anchors)
      ),
    )
  nll, right, counts, weights, doubt = (x.reshape(-1, slots) for x in parts)
  value = (nll * weights).sum() / weights.sum()
  # The confidence of slots that are seldom reached is asked for too.
  decayed = decay * counts
  value += recipe.confidence * (doubt * decayed).sum() / decayed.sum()
  return value, right.sum(0) / counts.sum(0)
