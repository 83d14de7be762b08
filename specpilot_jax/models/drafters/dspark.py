"""DSpark: DFlash whose slots know their parent, and how sure they are.

(arXiv 2607.05147.) Beyond DFlash:

- the anchor's row predicts too: a block of B rows drafts B tokens;
- a Markov head adds W2 W1[p] to the logits of a slot, p being the token in the
  slot before;
- a confidence head says how likely the slot's draft is to be accepted:
  sigmoid(w . [h ; W1[p]] + b).

Parameters beyond those of a DFlash of the same shape, with d channels, a
vocabulary of v and a Markov head of rank r: 2 v r + d + r + 1; at the shape of
Qwen3.8-27B 127.1 M.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import top_k
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.models import layers
from specpilot_jax.models.drafters.config import DSparkConfig
from specpilot_jax.models.drafters.dflash import (
  DFlash,
  DFlashDrafter,
  parents_of,
)

PASSES = 2
"""Times that the Markov head reads the whole vocabulary; see `lattice`."""


class MarkovHead(nnx.Module):
  """What a token adds to the logits of the next one."""

  def __init__(self, config: DSparkConfig, dtype, rngs):
    v, r = config.vocab_size, config.markov_rank
    init = nnx.initializers.normal(0.02)
    # Gathered and never multiplied with whole, so no matrix.
    self.markov_w1 = nnx.Param(init(rngs.params(), (v, r), dtype))
    self.markov_w2 = layers.Linear(r, v, dtype, rngs)

  def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... R"]:
    """Rows of the first factor."""
    table = self.markov_w1.get_value()
    rows = layers.rows(table, tokens.reshape(-1))
    return rows.reshape(*tokens.shape, table.shape[1])

  def logits(self, embedded: Float[Array, "N R"]) -> Float[Array, "N V"]:
    """Of every token, in the accumulation dtype."""
    w2 = self.markov_w2
    acc = layers.accumulation_dtype(embedded.dtype)
    weight = w2.weight.get_value()
    return layers.matmul(embedded, weight, acc, w2.w12, w2.view)

  def among(
    self, embedded: Float[Array, "S P R"], ids: Int[Array, "S C"]
  ) -> Float[Array, "S P C"]:
    """Of some tokens, in the accumulation dtype."""
    acc = layers.accumulation_dtype(embedded.dtype)
    rows = layers.rows(self.markov_w2.weight.get_value(), ids.reshape(-1))
    return jnp.einsum(
      "spr,scr->spc",
      embedded.astype(acc),
      rows.reshape(*ids.shape, -1).astype(acc),
      precision=layers.exact(acc),
    )


class ConfidenceHead(nnx.Module):
  """Whether a draft will be accepted, of its hidden state and its parent."""

  def __init__(self, config: DSparkConfig, dtype):
    size = config.hidden_size + config.markov_rank
    # One row: no product reads enough of it to be worth a matrix.
    self.weight = nnx.Param(jnp.zeros((size,), dtype))
    self.bias = nnx.Param(jnp.zeros((1,), dtype))

  def __call__(
    self, hidden: Float[Array, "... D"], embedded: Float[Array, "... R"]
  ) -> Float[Array, "..."]:
    """Log-odds, in the accumulation dtype; leading axes broadcast."""
    acc = layers.accumulation_dtype(hidden.dtype)
    w = self.weight.get_value().astype(acc)
    d = hidden.shape[-1]
    return (
      (hidden.astype(acc) * w[:d]).sum(-1)
      + (embedded.astype(acc) * w[d:]).sum(-1)
      + self.bias.get_value().astype(acc)[0]
    )


class DSpark(DFlash):
  """The drafter's own parameters."""

  def __init__(self, config: DSparkConfig, dtype, rngs: nnx.Rngs):
    super().__init__(config, dtype, rngs)
    self.markov_head = MarkovHead(config, dtype, rngs)
    self.confidence_head = ConfidenceHead(config, dtype)


class DSparkDrafter(DFlashDrafter):
  """DSpark as a drafter of an engine: see `DFlashDrafter`."""

  name = "dspark"

  def lattice(
    self,
    model: DFlash,
    hidden: Float[Array, "S D"],
    logits: Float[Array, "S V"],
    anchor: Int[Array, ""],
  ) -> Lattice:
    """The best tokens of every slot, scored given their parent.

    The candidates of a slot are the best by logit and Markov head, given a
    likely parent. That is the best token of the slot before, given the parent
    that is likely there, and so on: a chain, of which each pass over the
    vocabulary finds one slot more. `PASSES` of them, all slots at once and
    beginning with the best by logit alone, are exact for as many slots, and
    for all behind them whose parent the first guess had right.

    Scores [S, C, C] are log-probabilities over the whole vocabulary, in which
    all tokens but the candidates have the weights that the likely parent gives
    them: exact under that parent, and near it under the others.

    Args:
      model, hidden, logits, anchor: as for `DFlashDrafter.lattice`.
    """
    assert isinstance(model, DSpark)
    markov = model.markov_head
    full = logits
    for _ in range(PASSES):
      likely = parents_of(anchor, jnp.argmax(full, axis=-1))
      full = logits + markov.logits(markov.embed(likely))
    best, ids = top_k.top_k(full, self.candidates)
    total = jax.nn.logsumexp(full, axis=-1)
    inside = jnp.exp(best - total[:, None]).sum(axis=-1)
    outside = total + jnp.log(jnp.maximum(1 - inside, 0))

    embedded = markov.embed(parents_of(anchor, ids))
    own = jnp.take_along_axis(logits, ids, axis=-1)
    scores = own[:, None] + markov.among(embedded, ids)
    norm = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), outside[:, None])
    confidence = model.confidence_head(hidden[:, None], embedded)
    return self._lattice(
      ids, scores - norm[..., None], jax.nn.sigmoid(confidence)
    )
