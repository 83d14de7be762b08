"""Drafters at the shapes of big ones: see `widen`.

A drafter's residual stream, heads and MLP units are copied as a target's are.
Beyond that:

- `fc` reads the concatenated taps: its columns are tiled within each tap;
- convolutions of groups of channels: a wide group is a copy of the small group
  with the same channels, so groups must divide the small residual stream;
- tables of a low rank (codebooks, the Markov head): the rank is tiled, and one
  of two factors that are multiplied is divided by the number of copies. Rows
  beyond the small vocabulary are random.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from specpilot_jax import configs
from specpilot_jax.checkpoints import widen
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash


def drafter_layer(c: DrafterConfig, r: widen.Ratios) -> dict[str, widen.Spread]:
  """Every parameter of a layer, by its name within the layer."""
  d, queries = c.hidden_size, c.num_heads * c.head_dim
  kv = (c.num_kv_heads * c.head_dim, r.attention)
  table = {
    "attention.q_proj.weight": widen.reader(
      widen.tiled((queries, r.attention)), d, r
    ),
    "attention.kv_proj.weight": widen.reader(widen.tiled(kv, kv), d, r),
    "attention.o_proj.weight": widen.writer(d, queries, r.attention, r),
    "attention.q_norm.weight": widen.unchanged(c.head_dim),
    "attention.k_norm.weight": widen.unchanged(c.head_dim),
  } | widen.around_mixer(d, c.intermediate_size, r)
  if isinstance(c, DFlash2Config):
    # Each of two taps of two sides by itself; the identity's rows are shared.
    groups = widen.tiled(*[(c.conv_groups, r.hidden)] * 4)
    both = widen.tiled((2, 1))
    channels = widen.tiled((d, r.hidden))
    for conv in ("attention_conv", "mlp_conv"):
      table[f"{conv}.base_kernel"] = widen.Spread(both, channels, channels=True)
      table[f"{conv}.kernel_projection.weight"] = widen.reader(groups, d, r)
  return table


def drafter_ends(c: DrafterConfig, r: widen.Ratios) -> dict[str, widen.Spread]:
  """A drafter's parameters outside its layers."""
  d = c.hidden_size
  residual = widen.tiled((d, r.hidden))
  taps = widen.tiled(*[(d, r.hidden)] * len(c.target_layers))
  table = {
    "fc.weight": widen.Spread(residual, taps, r.hidden),
    "hidden_norm.weight": widen.Spread(residual),
    "norm.weight": widen.Spread(residual),
  }
  if isinstance(c, DFlash2Config):
    rank = widen.tiled((c.selector_rank, r.rank))
    table["candidate_selector.hidden_projection.weight"] = widen.reader(
      rank, d, r
    )
  if isinstance(c, DSparkConfig):
    # What its elements read are copies of two kinds: see `_confidence`.
    table["confidence_head.weight"] = widen.Spread(
      widen.tiled((d, r.hidden), (c.markov_rank, r.rank))
    )
    table["confidence_head.bias"] = widen.unchanged(1)
  return table


def drafter_tables(
  c: DrafterConfig, r: widen.Ratios
) -> dict[str, tuple[np.ndarray, float]]:
  """Tables with a row per token: small column of each wide one, and factor."""
  if isinstance(c, DFlash2Config):
    names, rank = _CODEBOOKS, c.selector_rank
  elif isinstance(c, DSparkConfig):
    names, rank = _MARKOV, c.markov_rank
  else:
    return {}
  columns = widen.tiled((rank, r.rank))
  return dict(zip(names, ((columns, 1.0), (columns, 1 / r.rank)), strict=True))


_CODEBOOKS = tuple(
  f"candidate_selector.{which}_codebook"
  for which in ("predecessor", "successor")
)
_MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2.weight")
_RANKS = {
  DFlash2Config.kind: "selector_rank",
  DSparkConfig.kind: "markov_rank",
}


def drafter_ratios(small: DrafterConfig, wide: DrafterConfig) -> widen.Ratios:
  """Copies of each width; raises as `target_ratios` does."""
  names = f"{small.name} to {wide.name}"
  fields = ("kind", "head_dim", "rope_theta", "yarn", "norm_eps", "block_size")
  widen.check_equal(names, small, wide, fields)
  if isinstance(small, DFlash2Config):
    fields = ("conv_group_size", "selector_top_k")
    widen.check_equal(names, small, wide, fields)
  if wide.vocab_size < small.vocab_size:
    raise SpecPilotError(
      f"{names}: the vocabulary of {wide.vocab_size} is smaller than"
      f" {small.vocab_size}"
    )
  rank = _RANKS.get(small.kind)
  if len(small.target_layers) != len(wide.target_layers):
    raise SpecPilotError(
      f"{names}: {len(small.target_layers)} taps cannot stand for"
      f" {len(wide.target_layers)}"
    )
  return widen.Ratios(
    hidden=widen.width_ratio(names, small, wide, "hidden_size"),
    mlp=widen.width_ratio(names, small, wide, "intermediate_size"),
    attention=widen.group_ratio(
      names, small, wide, "num_heads", "num_kv_heads"
    ),
    rank=widen.width_ratio(names, small, wide, rank) if rank else 1,
  )


def drafter_taps(
  small: DrafterConfig, wide: DrafterConfig
) -> tuple[tuple[int, int], ...]:
  """(small layer, wide layer) of each tap, for `widen_target`."""
  drafter_ratios(small, wide)
  return tuple(zip(small.target_layers, wide.target_layers, strict=True))


def widen_drafter(
  model: DFlash,
  wide: DrafterConfig,
  seed: int = 0,
  *,
  dtype: str = "bfloat16",
  hold: widen.Hold = widen.as_it_is,
) -> DFlash:
  """The function of a small drafter at the shape of a wide one.

  Args:
    model: the small drafter.
    wide: the shape. Its mask token and sliding window give way to the small
      drafter's. Its target must have been widened with the taps of
      `drafter_taps`.
    seed: of the weights of extra layers.
    dtype: of the result.
    hold: as `widen_target`.

  Raises:
    SpecPilotError: see `drafter_ratios`.
  """
  target_lib.check_dtype(dtype)
  small = model.config
  ratios = drafter_ratios(small, wide)
  config = dataclasses.replace(
    wide,
    mask_token_id=small.mask_token_id,
    sliding_window=small.sliding_window,
  )

  def make() -> DFlash:
    return learned.module(config, jnp.dtype(dtype), nnx.Rngs(0))

  maker = widen.Maker(assembly.parameters(model), assembly.structs(make), seed)
  kind = configs.ATTENTION
  kinds = (kind,) * wide.num_layers
  names = f"{small.name} to {wide.name}"
  placed = widen.placement((kind,) * small.num_layers, kinds, names=names)
  table = {kind: drafter_layer(small, ratios)}

  def ends() -> Iterator[tuple[str, Array]]:
    for name, spread in drafter_ends(small, ratios).items():
      made = maker.copy(name, name, spread)
      if name == "confidence_head.weight":
        made = _confidence(made, small, ratios)
      yield name, made
    for name, (columns, scale) in drafter_tables(small, ratios).items():
      yield name, maker.vocabulary(name, name, columns, scale)

  layers = maker.layers(kinds, placed, table)
  arrays = widen.held(itertools.chain(layers, ends()), hold)
  return assembly.assemble(config.name, make, arrays)


def _confidence(
  weight: Float[Array, " W"], small: DrafterConfig, r: widen.Ratios
) -> Float[Array, " W"]:
  """Divides each part of the vector by the copies that it reads."""
  residual = small.hidden_size * r.hidden
  copies = np.where(np.arange(weight.size) < residual, r.hidden, r.rank)
  return weight / jnp.asarray(copies, weight.dtype)
