"""Bytes that a deployment holds on its device, from shapes alone.

Every figure is that of the arrays which the engine makes: the same functions
are traced for shapes. What a compiled step needs on top, its workspace, only
its executable knows (`memory_analysis`).
"""

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import fp8_array, w12_array
from specpilot_jax.checkpoints import fp8, layout
from specpilot_jax.configs import ModelConfig
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import DrafterConfig
from specpilot_jax.models.drafters.dflash import DFlash

OUTSIDE = 1.5e-4
"""Weights of a trained matrix outside the windows of W12: 1e-4 to 9e-4 in real
ones, 1.45e-4 in normal ones."""


@dataclasses.dataclass(frozen=True)
class Footprint:
  """Bytes by purpose; one request.

  Attributes:
    target_bytes: weights, embedding and lm_head included.
    drafter_bytes: the drafter's own weights; it shares the target's embedding
      and lm_head.
    kv_cache_bytes: keys and values of the target's attention layers.
    drafter_cache_bytes: keys and values of the drafter's context.
    recurrent_bytes: GDN states and convolution windows.
  """

  target_bytes: int
  drafter_bytes: int
  kv_cache_bytes: int
  drafter_cache_bytes: int
  recurrent_bytes: int

  @property
  def weight_bytes(self) -> int:
    return self.target_bytes + self.drafter_bytes

  @property
  def state_bytes(self) -> int:
    return self.kv_cache_bytes + self.drafter_cache_bytes + self.recurrent_bytes

  @property
  def total_bytes(self) -> int:
    return self.weight_bytes + self.state_bytes


def _bytes(leaves: Iterable[Any]) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def device_bytes() -> int | None:
  """Bytes that this process may hold on its device; None if unknown."""
  device = jax.devices()[0]
  if device.platform == "cpu":
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return (device.memory_stats() or {}).get("bytes_limit")


def capacity(max_seq_len: int, prefill_chunk: int, num_drafts: int) -> int:
  """Key and value rows that an engine reserves.

  A pass writes all of its rows behind the committed ones.
  """
  return max_seq_len + max(min(prefill_chunk, max_seq_len), 1 + num_drafts)


def target_bytes(config: ModelConfig, dtype: str) -> int:
  """Weights of a target built in `dtype`."""
  return _bytes(target_lib.structs(config, jnp.dtype(dtype)).values())


def drafter_bytes(config: DrafterConfig, dtype: str) -> int:
  """A learned drafter's own weights."""

  def make() -> DFlash:
    return learned.module(config, jnp.dtype(dtype), nnx.Rngs(0))

  return _bytes(assembly.structs(make).values())


def w12_bytes(target: ModelConfig, drafter: DrafterConfig | None) -> int:
  """The matrices of both in W12, where `OUTSIDE` of them are in lists."""

  def make() -> DFlash:
    assert drafter is not None
    return learned.module(drafter, jnp.bfloat16, nnx.Rngs(0))

  leaves = target_lib.structs(target, jnp.bfloat16)
  own = assembly.structs(make) if drafter else {}
  total = 0
  for name, leaf in (*leaves.items(), *own.items()):
    if not layers.is_matrix(name, leaf.shape):
      continue
    quarter = -(-leaf.shape[0] // 4)
    entries = w12_array.list_room(int(OUTSIDE * leaf.size))
    lists = 6 * entries + 4 * (4 * quarter + 1)
    height = w12_array.tile_shape(quarter, leaf.shape[1])[0]
    padded = -(-quarter // height) * height
    total += 6 * padded * leaf.shape[1] + 4 * quarter + lists
  return total


def fp8_bytes(config: ModelConfig, dtype: str) -> int:
  """Weights of a target in FP8, what is left in `dtype` included."""
  leaves = target_lib.structs(config, jnp.dtype(dtype))
  total = _bytes(leaves.values())
  size = jnp.dtype(dtype).itemsize
  for fused in layout.layout(config).values():
    heights = [p.shape[0] for p in fused.parts if fp8.converted(p)]
    if heights:
      rows, columns = sum(heights), fused.shape[1]
      block = fp8.joint_block(heights, fp8.BLOCKS)
      scales = fp8_array.scale_shape(rows, columns, block)
      total += 4 * math.prod(scales) - (size - 1) * rows * columns
  return total


def state_bytes(config: ModelConfig, rows: int, dtype: str) -> tuple[int, int]:
  """(keys and values, GDN states and convolution windows) of one request."""
  state = jax.eval_shape(
    lambda: state_lib.init_state(config, rows, jnp.dtype(dtype))
  )
  cache, recurrent = [], []
  for layer in state.layers:
    attention = isinstance(layer, state_lib.AttentionState)
    (cache if attention else recurrent).extend(jax.tree.leaves(layer))
  return _bytes(cache), _bytes(recurrent)


def drafter_cache_bytes(config: DrafterConfig, rows: int, dtype: str) -> int:
  """Keys and values of a drafter's context of `rows` tokens."""
  row = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  return row * rows * jnp.dtype(dtype).itemsize


def footprint(
  target: ModelConfig,
  drafter: DrafterConfig | None,
  *,
  dtype: str,
  max_seq_len: int,
  prefill_chunk: int = 64,
) -> Footprint:
  """What an engine of one resident request holds.

  Args:
    target, drafter: shapes; None decodes autoregressively.
    dtype: of weights and caches.
    max_seq_len, prefill_chunk: as `Engine` takes them.
  """
  drafts = 0 if drafter is None else drafter.num_slots
  rows = capacity(max_seq_len, prefill_chunk, drafts)
  cache, recurrent = state_bytes(target, rows, dtype)
  return Footprint(
    target_bytes=target_bytes(target, dtype),
    drafter_bytes=drafter_bytes(drafter, dtype) if drafter else 0,
    kv_cache_bytes=cache,
    drafter_cache_bytes=(
      drafter_cache_bytes(drafter, rows, dtype) if drafter else 0
    ),
    recurrent_bytes=recurrent,
  )
