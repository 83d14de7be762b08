"""DFlash: a block-diffusion drafter that reads the target's hidden states.

(arXiv 2602.06036.) The residual stream after a few target layers, the *taps*,
is projected once per committed token and injected into every draft layer as
keys and values. A block [anchor | mask, mask, ...] attends to that context and
to itself, in both directions, and each mask slot predicts its own token with
the target's embedding and lm_head. One pass drafts the whole block.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import top_k, tree_attention
from pallas_kernels.w12_array import W12Array
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import layers
from specpilot_jax.models.drafters.config import DrafterConfig
from specpilot_jax.models.target import Target


class DraftAttention(nnx.Module):
  """Queries from the block; keys and values from context and block."""

  q_norm: layers.RMSNorm
  k_norm: layers.RMSNorm

  def __init__(self, config: DrafterConfig, dtype, rngs):
    self.config = config
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    self.q_proj = layers.Linear(config.hidden_size, q_rows, dtype, rngs)
    self.kv_proj = layers.Linear(config.hidden_size, 2 * kv_rows, dtype, rngs)
    self.o_proj = layers.Linear(q_rows, config.hidden_size, dtype, rngs)
    for name in ("q_norm", "k_norm"):
      norm = layers.RMSNorm(config.head_dim, config.norm_eps, False, dtype)
      setattr(self, name, norm)

  def queries(
    self, x: Float[Array, "N D"], positions: Int[Array, " N"]
  ) -> Float[Array, "N H K"]:
    c = self.config
    q = self.q_norm(self.q_proj(x).reshape(-1, c.num_heads, c.head_dim))
    return layers.rope(q, positions, c.head_dim, c.rope_theta, c.yarn)

  def keys_values(
    self, x: Float[Array, "N D"], positions: Int[Array, " N"]
  ) -> tuple[Float[Array, "N Hkv K"], Float[Array, "N Hkv K"]]:
    """Keys (normed, rotated) and values of context or block rows."""
    c = self.config
    k, v = jnp.split(self.kv_proj(x), 2, axis=-1)
    k = self.k_norm(k.reshape(-1, c.num_kv_heads, c.head_dim))
    k = layers.rope(k, positions, c.head_dim, c.rope_theta, c.yarn)
    return k, v.reshape(-1, c.num_kv_heads, c.head_dim)


class DraftLayer(nnx.Module):
  """A Qwen3 decoder layer whose attention also sees the context."""

  def __init__(self, config: DrafterConfig, dtype, rngs):
    def norm():
      return layers.RMSNorm(config.hidden_size, config.norm_eps, False, dtype)

    self.input_norm = norm()
    self.attention = DraftAttention(config, dtype, rngs)
    self.post_norm = norm()
    self.mlp = layers.MLP(
      config.hidden_size, config.intermediate_size, dtype, rngs
    )

  def attend(
    self, h: Float[Array, "N D"], positions: Int[Array, " N"], attention
  ) -> Float[Array, "N D"]:
    """What the attention sublayer adds, from its normed input."""
    q = self.attention.queries(h, positions)
    k, v = self.attention.keys_values(h, positions)
    return self.attention.o_proj(attention(q, k, v).reshape(h.shape[0], -1))

  def expand(self, h: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """What the MLP adds, from its normed input."""
    return self.mlp(h)

  def __call__(
    self, x: Float[Array, "N D"], positions: Int[Array, " N"], attention
  ) -> Float[Array, "N D"]:
    """The residual stream behind this layer.

    Args:
      attention: (q, k, v of the rows) -> attention output [N, H, K].
    """
    x = x + self.attend(self.input_norm(x), positions, attention)
    return x + self.expand(self.post_norm(x))


class DFlash(nnx.Module):
  """The drafter's own parameters; embedding and lm_head are the target's."""

  layer: ClassVar[type[DraftLayer]] = DraftLayer

  def __init__(self, config: DrafterConfig, dtype, rngs: nnx.Rngs):
    if jnp.dtype(dtype) == jnp.float16:
      raise SpecPilotError(
        f"{config.name}: float16 drafters overflow; use bfloat16"
      )
    self.config = config
    self.dtype = jnp.dtype(dtype)
    taps = len(config.target_layers)
    self.fc = layers.Linear(
      taps * config.hidden_size, config.hidden_size, dtype, rngs
    )
    self.hidden_norm = layers.RMSNorm(
      config.hidden_size, config.norm_eps, False, dtype
    )
    self.layers = nnx.List(
      [self.layer(config, dtype, rngs) for _ in range(config.num_layers)]
    )
    self.norm = layers.RMSNorm(
      config.hidden_size, config.norm_eps, False, dtype
    )

  def inject(
    self, taps: Float[Array, "N L D"], positions: Int[Array, " N"]
  ) -> list[tuple[Float[Array, "N Hkv K"], Float[Array, "N Hkv K"]]]:
    """Keys and values of context tokens, for each layer."""
    taps = taps.reshape(taps.shape[0], -1).astype(self.dtype)
    context = self.hidden_norm(self.fc(taps))
    return [
      layer.attention.keys_values(context, positions) for layer in self.layers
    ]

  def block(
    self,
    x: Float[Array, "N D"],
    positions: Int[Array, " N"],
    attend,
  ) -> Float[Array, "N D"]:
    """Final-normed hidden states of block rows.

    Args:
      x: input embeddings of one block, or of several in turn.
      positions: absolute positions of the rows.
      attend: (layer index, q, k, v of the rows) -> attention output; it knows
        the context and which rows belong together.
    """
    for i, layer in enumerate(self.layers):
      x = layer(x, positions, functools.partial(attend, i))
    return self.norm(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DFlashContext:
  """Per layer, keys and values of committed tokens before the anchor."""

  k: tuple[Float[Array, "Hkv T K"], ...]
  v: tuple[Float[Array, "Hkv T K"], ...]


class DFlashDrafter:
  """DFlash as a drafter of an engine.

  Args:
    model: the drafter.
    target: whose embedding and lm_head it uses (shared, not copied), and
      whose choice of kernels.
    candidates: best tokens per slot that the lattice holds; rejection sampling
      draws from their renormalised law.
    view: one of `layers.VIEWS`: products read that view of matrices in W12, the
      target's lm_head too; None for the matrices themselves.
  """

  name = "dflash"
  variable_length = False

  def __init__(
    self,
    model: DFlash,
    target: Target,
    *,
    candidates: int = 16,
    view: str | None = None,
  ):
    config = model.config
    config.check_target(target.config)
    kernels_lib.check_drafter(target.kernels, config.name, config.head_dim)
    self.config = config
    self.num_slots = config.num_slots
    self.taps: tuple[int, ...] = config.target_layers
    self.vocab_size: int | None = target.config.vocab_size
    self._valid = target.config.valid_vocab
    self._attention = target.kernels.tree_attention
    self.candidates = min(candidates, self._valid)
    self._w12 = target.kernels.w12_matmul
    self.view = view
    own = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(own):
      if isinstance(module, layers.Linear):
        module.w12, module.view = self._w12, view
    self._graphdef, state = nnx.split(own)
    head = target.embed if target.config.tie_embeddings else target.lm_head
    self.params: Any = (
      state,
      target.embed.weight.get_value(),
      head.weight.get_value(),
    )

  def model(self) -> DFlash:
    """The module, around the arrays of `params`."""
    return nnx.merge(self._graphdef, self.params[0])

  def init_context(self, capacity: int) -> DFlashContext:
    c = self.config
    shape = (c.num_kv_heads, capacity, c.head_dim)
    dtype = nnx.merge(self._graphdef, self.params[0]).dtype

    def rows():
      return tuple(jnp.zeros(shape, dtype) for _ in range(c.num_layers))

    return DFlashContext(k=rows(), v=rows())

  def extend(
    self,
    params: Any,
    context: DFlashContext,
    tokens: Int[Array, " P"],
    taps: Float[Array, "P L D"],
    start: Int[Array, ""],
    count: Int[Array, ""],
  ) -> DFlashContext:
    """Projects the taps of committed tokens into every layer's context."""
    model = nnx.merge(self._graphdef, params[0])
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    kept = (rows < count)[:, None, None]
    zero = jnp.zeros((), start.dtype)

    def write(cache, values):
      values = jnp.swapaxes(jnp.where(kept, values, 0), 0, 1)
      return lax.dynamic_update_slice(
        cache, values.astype(cache.dtype), (zero, start, zero)
      )

    fresh = model.inject(taps, start + rows)
    return DFlashContext(
      k=tuple(write(c, k) for c, (k, _) in zip(context.k, fresh, strict=True)),
      v=tuple(write(c, v) for c, (_, v) in zip(context.v, fresh, strict=True)),
    )

  def draft(
    self,
    params: Any,
    context: DFlashContext,
    anchor: Int[Array, ""],
    position: Int[Array, ""],
  ) -> Lattice:
    """The candidates of every slot, scored: see `lattice`."""
    state, embedding, head = params
    model = nnx.merge(self._graphdef, state)
    c = self.config
    tokens = jnp.full((c.block_size,), c.mask_token_id, jnp.int32)
    tokens = tokens.at[0].set(anchor)
    x = layers.rows(embedding, tokens).astype(model.dtype)
    positions = position + jnp.arange(c.block_size, dtype=jnp.int32)
    everything = jnp.ones((c.block_size, c.block_size), dtype=bool)
    first = jnp.zeros((), jnp.int32)
    if c.sliding_window is not None:
      first = jnp.maximum(position - c.sliding_window, 0)

    def attend(i, q, k, v):
      return tree_attention.tree_attention(
        q,
        k,
        v,
        context.k[i],
        context.v[i],
        position,
        everything,
        c.head_dim**-0.5,
        first=first,
        implementation=self._attention,
      )

    hidden = model.block(x, positions, attend)[-self.num_slots :]
    acc = layers.accumulation_dtype(model.dtype)
    if not isinstance(head, W12Array):
      head = head.astype(model.dtype)
    logits = layers.matmul(hidden, head, acc, self._w12, self.view)
    real = jnp.arange(logits.shape[-1]) < self._valid
    return self.lattice(
      model, hidden, jnp.where(real, logits, -jnp.inf), anchor
    )

  def lattice(
    self,
    model: DFlash,
    hidden: Float[Array, "S D"],
    logits: Float[Array, "S V"],
    anchor: Int[Array, ""],
  ) -> Lattice:
    """The best candidates of every slot, each slot for itself.

    Scores [S, C] are log-probabilities over the whole vocabulary.

    Args:
      model: the module.
      hidden: final-normed hidden states of the rows that predict.
      logits: theirs, -inf where there is no token.
      anchor: id of the last committed token.
    """
    del model, hidden, anchor
    scores, ids = top_k.top_k(
      jax.nn.log_softmax(logits, axis=-1), self.candidates
    )
    return self._lattice(ids, scores)

  def _lattice(self, ids, scores, confidence=None) -> Lattice:
    return Lattice(
      tokens=ids.astype(jnp.int32),
      scores=scores,
      count=jnp.asarray(self.num_slots, jnp.int32),
      confidence=confidence,
    )


def parents_of(
  anchor: Int[Array, ""], ids: Int[Array, "S ..."]
) -> Int[Array, "S ..."]:
  """What stands before each slot: the anchor, then the slot before it."""
  first = jnp.full_like(ids[:1], anchor)
  return jnp.concatenate([first, ids[:-1]])
