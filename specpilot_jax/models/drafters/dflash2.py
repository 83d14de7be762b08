"""DFlash2: DFlash with a convolution along the block and a selector.

Two modules beyond DFlash (`z-lab/Qwen3.8-27B-DFlash2`), and no pass more:

- before and after each attention and MLP, a depthwise convolution of two taps
  over the rows of a block. Its kernel is a learned one plus one that the
  sublayer's normed input gives for groups of consecutive channels;
- a table that scores the best tokens of a slot given the token in the slot
  before: S_t(p, c) = U_t(c) + <A[p] * (W h_t), B[c]>, with U the logits and h
  the final-normed hidden states.

Parameters beyond those of a DFlash of the same shape, with d channels in g
groups, n layers, a vocabulary of v and a selector of rank r:
2 n (4 d + 4 g d) + 2 v r + r d; at the shape of Qwen3.8-27B 194.2 M of 1.924 G.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import top_k
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.models import layers
from specpilot_jax.models.drafters.config import DFlash2Config
from specpilot_jax.models.drafters.dflash import (
  DFlash,
  DFlashDrafter,
  DraftLayer,
  parents_of,
)

SIDES = TAPS = 2
"""Before and after a sublayer; a row and the one before it."""


class GroupedConv(nnx.Module):
  """The two convolutions around one sublayer; at first the identity."""

  def __init__(self, config: DFlash2Config, dtype, rngs):
    d = config.hidden_size
    self.block_size = config.block_size
    self.groups = config.conv_groups
    identity = jnp.zeros((SIDES, TAPS, d), dtype).at[:, 0].set(1)
    self.base_kernel = nnx.Param(identity)
    self.kernel_projection = layers.Linear(
      d, SIDES * TAPS * self.groups, dtype, rngs
    )
    weight = self.kernel_projection.weight
    weight.set_value(jnp.zeros_like(weight.get_value()))

  def around(self, h: Float[Array, "N D"], sublayer) -> Float[Array, "N D"]:
    """The sublayer of convolved rows, convolved.

    Args:
      h: normed input, the rows of one block or of several in turn.
      sublayer: [N, D] -> [N, D].
    """
    acc = layers.accumulation_dtype(h.dtype)
    dynamic = self.kernel_projection(h).astype(acc)
    dynamic = dynamic.reshape(-1, self.block_size, SIDES, TAPS, self.groups, 1)
    base = self.base_kernel.get_value().astype(acc)
    base = base.reshape(SIDES, TAPS, self.groups, -1)
    kernel = base + dynamic  # [blocks, rows, sides, taps, groups, channels]
    return _convolved(sublayer(_convolved(h, kernel[:, :, 0])), kernel[:, :, 1])


def _convolved(
  x: Float[Array, "N D"], kernel: Float[Array, "M B T G C"]
) -> Float[Array, "N D"]:
  """y_t = kernel_t0 x_t + kernel_t1 x_(t-1); nothing before a block."""
  blocks, rows, _, groups, channels = kernel.shape
  now = x.reshape(blocks, rows, groups, channels).astype(kernel.dtype)
  before = jnp.pad(now, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
  y = kernel[:, :, 0] * now + kernel[:, :, 1] * before
  return y.reshape(x.shape).astype(x.dtype)


class ConvDraftLayer(DraftLayer):
  """A DFlash layer with convolutions around both sublayers."""

  def __init__(self, config: DFlash2Config, dtype, rngs):
    super().__init__(config, dtype, rngs)
    self.attention_conv = GroupedConv(config, dtype, rngs)
    self.mlp_conv = GroupedConv(config, dtype, rngs)

  def attend(self, h, positions, attention):
    sublayer = super().attend
    return self.attention_conv.around(
      h, lambda h: sublayer(h, positions, attention)
    )

  def expand(self, h):
    return self.mlp_conv.around(h, super().expand)


class CandidateSelector(nnx.Module):
  """Scores of a token given the one before it and the slot's hidden state."""

  def __init__(self, config: DFlash2Config, dtype, rngs):
    shape = (config.vocab_size, config.selector_rank)
    init = nnx.initializers.normal(0.02)
    # Gathered and never multiplied with whole, so no matrices.
    self.predecessor_codebook = nnx.Param(init(rngs.params(), shape, dtype))
    self.successor_codebook = nnx.Param(init(rngs.params(), shape, dtype))
    self.hidden_projection = layers.Linear(
      config.hidden_size, config.selector_rank, dtype, rngs
    )

  def __call__(
    self,
    hidden: Float[Array, "S D"],
    parents: Int[Array, "S P"],
    ids: Int[Array, "S C"],
  ) -> Float[Array, "S P C"]:
    """What a parent adds to a candidate's logit."""
    acc = layers.accumulation_dtype(hidden.dtype)

    def rows(table, index):
      taken = layers.rows(table.get_value(), index.reshape(-1))
      return taken.reshape(*index.shape, -1).astype(acc)

    context = self.hidden_projection(hidden).astype(acc)[:, None]
    return jnp.einsum(
      "spr,scr->spc",
      rows(self.predecessor_codebook, parents) * context,
      rows(self.successor_codebook, ids),
      precision=layers.exact(acc),
    )


class DFlash2(DFlash):
  """The drafter's own parameters."""

  layer = ConvDraftLayer

  def __init__(self, config: DFlash2Config, dtype, rngs: nnx.Rngs):
    super().__init__(config, dtype, rngs)
    self.candidate_selector = CandidateSelector(config, dtype, rngs)


class DFlash2Drafter(DFlashDrafter):
  """DFlash2 as a drafter of an engine: see `DFlashDrafter`."""

  name = "dflash2"

  def lattice(
    self,
    model: DFlash,
    hidden: Float[Array, "S D"],
    logits: Float[Array, "S V"],
    anchor: Int[Array, ""],
  ) -> Lattice:
    """The best tokens of every slot, scored given their parent.

    Candidates are the best by logit, whatever the parent. Scores [S, C, C] are
    log-softmax over the candidates of logit and selector, plus the log of the
    share that the logits alone give the candidates: a slot whose candidates
    are less sure to hold the token costs a path more.

    Args:
      model, hidden, logits, anchor: as for `DFlashDrafter.lattice`.
    """
    assert isinstance(model, DFlash2)
    best, ids = top_k.top_k(
      jax.nn.log_softmax(logits, axis=-1), self.candidates
    )
    added = model.candidate_selector(hidden, parents_of(anchor, ids), ids)
    law = jax.nn.log_softmax(best[:, None] + added, axis=-1)
    share = jax.nn.logsumexp(best, axis=-1)
    return self._lattice(ids, law + share[:, None, None])
