"""What is trained: shapes and schedules of the models that ship."""

import dataclasses

from specpilot_jax.configs import ATTENTION, GDN, ModelConfig
from specpilot_jax.models.drafters.config import DrafterConfig

SPECIAL_TOKENS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<|mask|>",
)
END_ID, MASK_ID = 0, 3
VOCABULARY = 4096

# Every dimension is a power of two below the 27B's: hidden 16x, MLP 32x,
# attention heads 4x, GDN heads 16x.
TARGET = ModelConfig(
  name="zoo",
  family="qwen3_5",
  vocab_size=VOCABULARY,
  hidden_size=320,
  intermediate_size=544,
  layer_types=(GDN, GDN, GDN, ATTENTION) * 2,
  num_heads=6,
  num_kv_heads=1,
  head_dim=256,
  rotary_dim=64,
  rope_theta=1e7,
  norm_eps=1e-6,
  tie_embeddings=True,
  context_length=8192,
  qk_norm=True,
  attention_gate=True,
  zero_centered_norm=True,
  gdn_num_key_heads=1,
  gdn_num_value_heads=3,
  gdn_key_head_dim=128,
  gdn_value_head_dim=128,
  gdn_conv_kernel=4,
  eos_token_ids=(END_ID,),
)

DFLASH = DrafterConfig(
  name="zoo-dflash",
  vocab_size=VOCABULARY,
  hidden_size=320,
  intermediate_size=544,
  num_layers=2,
  num_heads=4,
  num_kv_heads=1,
  head_dim=128,
  rope_theta=1e7,
  norm_eps=1e-6,
  block_size=16,
  mask_token_id=MASK_ID,
  target_layers=(1, 2, 4, 5, 6),
  num_target_layers=8,
  # Shorter than the training sequences, so that no distance between a block
  # and its context is new to the drafter however long a request gets.
  sliding_window=384,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """A stretch of training at one sequence length.

  Attributes:
    steps: optimiser steps.
    length: tokens per sequence.
    sequences: per step.
  """

  steps: int
  length: int
  sequences: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """Learning rate: linear warm-up, constant, linear decay to zero."""

  phases: tuple[Phase, ...]
  peak: float
  warmup: int
  decay_fraction: float = 0.3
  weight_decay: float = 0.1
  clip: float = 1.0
  seed: int = 0

  @property
  def steps(self) -> int:
    return sum(phase.steps for phase in self.phases)

  def phase_at(self, step: int) -> Phase:
    for phase in self.phases:
      if step < phase.steps:
        return phase
      step -= phase.steps
    raise ValueError(f"step {step} is behind the end of the schedule")
