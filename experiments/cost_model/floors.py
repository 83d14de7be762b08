"""Floors: the time that a step's bytes and FLOPs take at the least.

Work is counted from the configurations of target and drafter, per class of
kernel, for one step: a verify pass over `nodes` nodes on top of `context`
committed tokens, the draft before it, the commit and the drafter's context
after it. A byte is counted once if an ideal kernel reads or writes it once:
weights, states, keys and values, and what passes from class to class.

    floor = max(FLOPs / (60 % of dense peak), bytes / (90 % of bandwidth))
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from ml_dtypes import bfloat16

from experiments import devices
from experiments.cost_model.kernels import (
  ATTENTION,
  CLASSES,
  DRAFTER,
  OTHER,
  PREFILL,
  RECURRENT,
  TARGET_GEMM,
)
from specpilot_jax import configs
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import dspark, learned
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)

FLOPS_SHARE, BYTES_SHARE = 0.6, 0.9
"""What the best kernels reach of the nominal figures."""


@dataclasses.dataclass(frozen=True)
class Work:
  """FLOPs (a multiply-add is two) and bytes of memory traffic."""

  flops: float = 0.0
  bytes: float = 0.0

  def __add__(self, other: "Work") -> "Work":
    return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Rates that a kernel can reach.

  Attributes:
    flops: per second.
    bytes: per second.
    source: where they come from.
    flops_limit, bytes_limit: rates that nothing can exceed; None where that
      is not known.
  """

  flops: float
  bytes: float
  source: str
  flops_limit: float | None = None
  bytes_limit: float | None = None

  @classmethod
  def of_device(cls, device: devices.Device, dtype: str) -> "Roofline":
    """60 % of a card's dense peak and 90 % of its bandwidth."""
    peak = device.peak(dtype)
    return cls(
      flops=FLOPS_SHARE * peak,
      bytes=BYTES_SHARE * device.bandwidth,
      source=(
        f"{device.name}: {FLOPS_SHARE:.0%} of {peak / 1e12:g} TFLOP/s in"
        f" {dtype}, {BYTES_SHARE:.0%} of {device.bandwidth / 1e12:g} TB/s"
      ),
      flops_limit=peak,
      bytes_limit=device.bandwidth,
    )

  def floor_us(self, work: Work) -> float:
    return 1e6 * max(work.flops / self.flops, work.bytes / self.bytes)

  def limit_us(self, work: Work) -> float | None:
    """The time at 100 % of the nominal figures."""
    if self.flops_limit is None or self.bytes_limit is None:
      return None
    return 1e6 * max(
      work.flops / self.flops_limit, work.bytes / self.bytes_limit
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """What a step does.

  Attributes:
    nodes: verified, anchor included.
    context: committed tokens that the pass reads, a mean.
    committed: tokens that the step commits, a mean: tau.
    certain: whether all nodes are committed whatever their logits say, as in
      reading a prompt and in decoding without drafts. The pass then leaves the
      state itself: nothing is stashed, and nothing read again.
  """

  nodes: float
  context: float
  committed: float
  certain: bool = False


def itemsize(dtype: str) -> int:
  """Bytes of one number."""
  return np.dtype(bfloat16 if dtype == "bfloat16" else dtype).itemsize


def _state_size(dtype: str) -> int:
  """Recurrent state and logits are at least float32."""
  return max(4, itemsize(dtype))


def matrices(config: configs.ModelConfig) -> dict[str, tuple[int, int, int]]:
  """The target's weight matrices by name: (count, out, in).

  The head is the embedding's own matrix where it is tied.
  """
  c = config
  attention = sum(kind == configs.ATTENTION for kind in c.layer_types)
  gdn = c.num_layers - attention
  q_rows = c.num_heads * c.head_dim
  packed = q_rows * (2 if c.attention_gate else 1)
  kv_rows = c.num_kv_heads * c.head_dim
  in_rows = c.gdn_conv_dim + c.gdn_value_dim + 2 * c.gdn_num_value_heads
  return {
    "gate_up": (c.num_layers, 2 * c.intermediate_size, c.hidden_size),
    "down": (c.num_layers, c.hidden_size, c.intermediate_size),
    "qkv": (attention, packed + 2 * kv_rows, c.hidden_size),
    "o_proj": (attention, c.hidden_size, q_rows),
    "in_proj": (gdn, in_rows, c.hidden_size),
    "out_proj": (gdn, c.hidden_size, c.gdn_value_dim),
    "head": (1, c.vocab_size, c.hidden_size),
  }


def _matmul(
  count: float, out: int, into: int, rows: float, size: int, out_size: int
) -> Work:
  return Work(
    flops=2 * count * rows * out * into,
    bytes=count * (out * into * size + rows * (into * size + out * out_size)),
  )


def target_gemm(
  config: configs.ModelConfig,
  dtype: str,
  nodes: float,
  *,
  head: bool = True,
  weights: str = "bf16",
) -> Work:
  """Every weight matrix once, its input and its output.

  Args:
    head: whether there are logits; reading a prompt needs none.
    weights: in `fp8` a code is a byte, and FLOPs with codes count half, as
      cards do twice as many of them. The head and the small projections of
      Gated DeltaNet have none.
  """
  size = itemsize(dtype)
  work = Work()
  for name, (count, out, into) in matrices(config).items():
    if name == "head" and not head:
      continue
    out_size = _state_size(dtype) if name == "head" else size
    work += _matmul(count, out, into, nodes, size, out_size)
    if weights == "fp8" and name != "head":
      small = 2 * config.gdn_num_value_heads if name == "in_proj" else 0
      codes = count * (out - small) * into
      work += Work(flops=-nodes * codes, bytes=-(size - 1) * codes)
  return work


def recurrent(config: configs.ModelConfig, dtype: str, step: Step) -> Work:
  """Gated DeltaNet between its projections, and its commit.

  The state is read by the pass, and read and written by the commit; the
  projected rows are read, the outputs written; keys, updates, decays and
  pre-convolution rows of the nodes are stashed, those of the path read back.
  Where the path is certain, the pass reads and writes the state, and that is
  all.
  """
  c = config
  gdn = sum(kind == configs.GDN for kind in c.layer_types)
  if not gdn:
    return Work()
  size, wide = itemsize(dtype), _state_size(dtype)
  n, path = step.nodes, step.committed
  heads, keys = c.gdn_num_value_heads, c.gdn_num_key_heads
  dk, dv = c.gdn_key_head_dim, c.gdn_value_head_dim
  state = heads * dk * dv
  stash = wide * (keys * dk + heads * dv + heads) + size * c.gdn_conv_dim
  projected = c.gdn_conv_dim + c.gdn_value_dim + 2 * heads
  conv_state = (c.gdn_conv_kernel - 1) * c.gdn_conv_dim
  flops = (
    2 * n * c.gdn_conv_dim * c.gdn_conv_kernel
    + 2 * 2 * n * state  # K S and Q S
    # K K^T and Q K^T of a group, the triangular solve, [Q K^T] U: each row
    # meets half of the others.
    + 2 * 2 * keys * dk * n * (n + 1) / 2
    + 2 * 2 * heads * dv * n * (n + 1) / 2
    + 2 * path * state  # the rebuilt state
  )
  moved = (
    size * c.gdn_conv_dim * c.gdn_conv_kernel
    + size * n * (projected + c.gdn_value_dim)
    + (2 if step.certain else 3) * (wide * state + size * conv_state)
    + (0 if step.certain else (n + path) * stash)
  )
  return Work(gdn * flops, gdn * moved)


def attention(config: configs.ModelConfig, dtype: str, step: Step) -> Work:
  """Full attention between its projections, and its commit.

  Keys and values of context and nodes are read once, the path's are written.
  """
  c = config
  layers = sum(kind == configs.ATTENTION for kind in c.layer_types)
  size, n = itemsize(dtype), step.nodes
  kv = 2 * c.num_kv_heads * c.head_dim
  q_rows = c.num_heads * c.head_dim
  # A node sees the context and, of a chain, half of the nodes.
  seen = step.context + (n + 1) / 2
  acts = q_rows * (3 if c.attention_gate else 2)
  return Work(
    flops=layers * 2 * 2 * n * seen * q_rows,
    bytes=layers * size * (kv * (step.context + n + step.committed) + n * acts),
  )


def other(
  config: configs.ModelConfig, dtype: str, nodes: float, *, head: bool = True
) -> Work:
  """Embedding rows, the residual stream around mixer and MLP, the choice.

  Per layer both norms read the stream and write their result, and both
  additions read the branch and write the stream.
  """
  c = config
  size = itemsize(dtype)
  stream = nodes * c.hidden_size
  logits = nodes * c.vocab_size if head else 0
  return Work(
    flops=c.num_layers * 2 * 5 * stream + logits,
    bytes=size * stream * (2 + c.num_layers * 2 * 4 + 2)
    + _state_size(dtype) * logits,
  )


def dflash(
  config: DrafterConfig, target: configs.ModelConfig, dtype: str, step: Step
) -> Work:
  """One block of a learned drafter, and the context of what is committed.

  Its weights and the target's head once; keys and values of the context once.
  """
  c = config
  size = itemsize(dtype)
  block, path = c.block_size, step.committed
  q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  d = c.hidden_size
  taps = len(c.target_layers)
  context = step.context
  if c.sliding_window is not None:
    context = min(context, c.sliding_window)
  work = Work()
  for out, into, rows in (
    (q_rows, d, block),
    # One reading serves the block and the committed tokens.
    (2 * kv_rows, d, block + path),
    (d, q_rows, block),
    (2 * c.intermediate_size, d, block),
    (d, c.intermediate_size, block),
  ):
    work += _matmul(c.num_layers, out, into, rows, size, size)
  work += _matmul(1, d, taps * d, path, size, size)
  wide = _state_size(dtype)
  slots = c.num_slots
  work += _matmul(1, target.vocab_size, d, slots, size, wide)
  work += Work(
    flops=c.num_layers * 2 * 2 * block * (context + block) * q_rows,
    bytes=size * c.num_layers * 2 * kv_rows * (context + block + path)
    + size * c.num_layers * 2 * block * q_rows,
  )
  # Embedding rows, and the candidates chosen from the logits.
  work += Work(
    flops=slots * target.vocab_size,
    bytes=size * block * d + wide * slots * target.vocab_size,
  )
  if isinstance(c, DFlash2Config):
    return work + _dflash2(c, size)
  if isinstance(c, DSparkConfig):
    return work + _dspark(c, size, wide)
  return work


def _table(slots: float, candidates: float, rank: int, size: int) -> Work:
  """Scores of candidates under those before them, of gathered rows."""
  return Work(
    flops=2 * slots * candidates**2 * rank,
    bytes=size * 2 * slots * candidates * rank,
  )


def _dflash2(c: DFlash2Config, size: int) -> Work:
  """Kernels of the convolutions, their taps, and the selector."""
  sublayers = 2 * c.num_layers
  kernels = _matmul(
    sublayers, 4 * c.conv_groups, c.hidden_size, c.block_size, size, size
  )
  # Both sides: two products and sums per channel, fused with what surrounds.
  taps = Work(flops=sublayers * 2 * 4 * c.block_size * c.hidden_size)
  slots, rank = c.num_slots, c.selector_rank
  return (
    kernels
    + taps
    + _matmul(1, rank, c.hidden_size, slots, size, size)
    + _table(slots, c.selector_top_k, rank, size)
  )


def _dspark(c: DSparkConfig, size: int, wide: int) -> Work:
  """The Markov head over the vocabulary, and over the candidates."""
  rank, slots = c.markov_rank, c.num_slots
  passes = _matmul(dspark.PASSES, c.vocab_size, rank, slots, size, wide)
  return passes + _table(slots, learned.CANDIDATES, rank, size)


def dflash_context(config: DrafterConfig, dtype: str, rows: float) -> Work:
  """Context rows of prompt tokens: projection of the taps, keys, values."""
  c = config
  size, d = itemsize(dtype), c.hidden_size
  kv_rows = c.num_kv_heads * c.head_dim
  return _matmul(1, d, len(c.target_layers) * d, rows, size, size) + _matmul(
    c.num_layers, 2 * kv_rows, d, rows, size, size
  )


def prompt_lookup(step: Step) -> Work:
  """One look at every known token, and the new ones written (int32)."""
  return Work(flops=step.context, bytes=4 * (step.context + 2 * step.committed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """What a step runs.

  Attributes:
    target: its configuration.
    dtype: of weights and activations.
    weights: `fp8` where the target's matrices are codes.
    drafter: of `loading.DRAFTERS`.
    drafter_config: of a learned drafter, else None.
  """

  target: configs.ModelConfig
  dtype: str
  drafter: str
  drafter_config: DrafterConfig | None
  weights: str = "bf16"

  def __post_init__(self):
    known = ("none", "prompt_lookup", *learned.KINDS)
    if self.drafter not in known:
      raise SpecPilotError(
        f"no floor is known of drafter {self.drafter!r} (of {', '.join(known)}"
        " it is)"
      )
    config = self.drafter_config
    kind = config.kind if config else None
    if kind != (self.drafter if self.drafter in learned.KINDS else None):
      raise SpecPilotError(
        f"drafter {self.drafter!r} and its configuration do not fit"
      )


def step_work(models: Models, step: Step) -> dict[str, Work]:
  """Work of one step by class; no prompt is read in it."""
  target, dtype = models.target, models.dtype
  drafter = Work()
  if models.drafter == "prompt_lookup":
    drafter = prompt_lookup(step)
  elif models.drafter_config is not None:
    drafter = dflash(models.drafter_config, target, dtype, step)
  return {
    TARGET_GEMM: target_gemm(target, dtype, step.nodes, weights=models.weights),
    RECURRENT: recurrent(target, dtype, step),
    ATTENTION: attention(target, dtype, step),
    DRAFTER: drafter,
    PREFILL: Work(),
    OTHER: other(target, dtype, step.nodes),
  }


def prefill_work(models: Models, rows: float, context: float) -> Work:
  """Work of a pass that reads `rows` prompt tokens behind `context` others."""
  step = Step(nodes=rows, context=context, committed=rows, certain=True)
  target, dtype = models.target, models.dtype
  work = (
    target_gemm(target, dtype, rows, head=False, weights=models.weights)
    + recurrent(target, dtype, step)
    + attention(target, dtype, step)
    + other(target, dtype, rows, head=False)
  )
  if models.drafter_config is not None:
    work += dflash_context(models.drafter_config, dtype, rows)
  return work


def floors_us(work: Mapping[str, Work], roofline: Roofline) -> dict[str, float]:
  """The floor of each class in microseconds."""
  return {name: roofline.floor_us(work[name]) for name in CLASSES}
