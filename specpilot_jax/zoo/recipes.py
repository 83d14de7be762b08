"""What is trained: shapes and schedules of the models that ship."""

import dataclasses

from specpilot_jax.configs import ATTENTION, GDN, ModelConfig
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)

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


# Of the same layers, heads, MLP and block; groups divide the hidden size.
DFLASH2 = DFlash2Config(
  name="zoo-dflash2",
  **DFLASH.shape(),
  conv_group_size=16,
  selector_rank=64,
  selector_top_k=16,
)

DSPARK = DSparkConfig(name="zoo-dspark", **DFLASH.shape(), markov_rank=64)

# At most 8 MB in bfloat16: a third of it projects the taps.
SMOLLM2_DFLASH = DrafterConfig(
  name="smollm2-dflash",
  vocab_size=49152,
  hidden_size=576,
  intermediate_size=512,
  num_layers=2,
  num_heads=6,
  num_kv_heads=2,
  head_dim=64,
  rope_theta=1e5,
  norm_eps=1e-5,
  block_size=8,
  mask_token_id=16,  # a special token that no text contains
  target_layers=(9, 19, 28),
  num_target_layers=30,
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
  """Learning rate: linear warm-up, constant, linear decay to zero.

  Attributes:
    muon: weight matrices are updated by Muon (orthogonalised momentum, scaled
      to the root mean square of Adam's updates, 0.2), all else by Adam.
  """

  phases: tuple[Phase, ...]
  peak: float
  warmup: int
  decay_fraction: float = 0.3
  weight_decay: float = 0.1
  clip: float = 1.0
  seed: int = 0
  muon: bool = False

  @property
  def steps(self) -> int:
    return sum(phase.steps for phase in self.phases)

  def scaled(self, scale: float) -> "Schedule":
    """All step counts multiplied."""
    if scale == 1.0:
      return self
    phases = tuple(
      dataclasses.replace(p, steps=max(1, int(p.steps * scale)))
      for p in self.phases
    )
    warmup = int(self.warmup * scale)
    return dataclasses.replace(self, phases=phases, warmup=warmup)

  def phase_at(self, step: int) -> Phase:
    for phase in self.phases:
      if step < phase.steps:
        return phase
      step -= phase.steps
    raise ValueError(f"step {step} is behind the end of the schedule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRecipe:
  """How a drafter is trained on what its target says.

  Attributes:
    target: name of the model that it drafts for.
    config: shape of the drafter.
    schedule: one phase; its `length` is that of the text's rows.
    anchors: blocks per row and step.
    gamma: decay of the slots' weights: exp(-(k - 1) / gamma).
    reach: share of each weight that is instead what the slot's overlap with
      its label is worth in accepted tokens.
    soft: rows that were sampled are taught the target's law at each slot in
      place of the token that was drawn from it.
    variation: share of the total variation distance in the loss, the rest
      being cross-entropy.
    temperatures: of the text's rows, in turn.
    rounds, rows: text files, and rows in each.
    prompt_tokens: of a row at most.
    visits: steps on a text file before the next one.
    surprise: of `text.Shelf`: how much likelier anchors are where the target
      did not expect the token.
    selector: weight of DFlash2's selector once it has its whole weight.
    selector_ramp: share of the steps before it has any, and share in which it
      then grows to the whole.
    confidence: weight of the cross-entropy of DSpark's confidence head.
  """

  target: str
  config: DrafterConfig
  schedule: Schedule
  anchors: int
  gamma: float
  reach: float
  soft: bool
  variation: float
  temperatures: tuple[float, ...]
  rounds: int
  rows: int
  prompt_tokens: int
  visits: int
  surprise: float
  selector: float = 0.0
  selector_ramp: float = 0.0005
  confidence: float = 0.0

  def selector_at(self, step: int) -> float:
    """Weight of the selector in a step."""
    ramp = self.selector_ramp * self.schedule.steps
    grown = min(max(step / ramp - 1, 0.0), 1.0) if ramp else 1.0
    return self.selector * grown


TARGET_SCHEDULE = Schedule(
  phases=(
    Phase(steps=7000, length=2048, sequences=32),
    Phase(steps=100, length=8192, sequences=8),
  ),
  peak=3e-3,
  warmup=300,
  muon=True,
)

ZOO_DRAFTER = DrafterRecipe(
  target="zoo",
  config=DFLASH,
  schedule=Schedule(
    phases=(Phase(steps=15_500, length=512, sequences=48),),
    peak=2e-3,
    warmup=400,
    weight_decay=0.01,
    muon=True,
  ),
  anchors=64,
  gamma=4.0,
  reach=0.7,
  soft=True,
  variation=0.8,
  temperatures=(0.0, 0.0, 1.0),
  rounds=24,
  rows=2048,
  prompt_tokens=128,
  visits=96,
  surprise=4.0,
)

# As the first drafter. What is published of the selector's training (SpecForge)
# is cross-entropy over the strict top 16 at weight 1; its scores take the same
# loss as the logits here, because the law that decoding follows is theirs.
ZOO_DFLASH2 = dataclasses.replace(ZOO_DRAFTER, config=DFLASH2, selector=1.0)

# Published (arXiv 2607.05147): 0.1 cross-entropy + 0.9 total variation + 1.0
# of the confidence, slots decaying with gamma 4. Muon, soft labels, reach and
# surprise stay: they say which slots and anchors count, not what is learnt.
ZOO_DSPARK = dataclasses.replace(
  ZOO_DRAFTER, config=DSPARK, variation=0.9, confidence=1.0
)

SMOLLM2_DRAFTER = DrafterRecipe(
  target="smollm2",
  config=SMOLLM2_DFLASH,
  schedule=Schedule(
    phases=(Phase(steps=10_000, length=512, sequences=32),),
    peak=2e-3,
    warmup=400,
    weight_decay=0.01,
    muon=True,
  ),
  anchors=64,
  gamma=4.0,
  reach=0.7,
  soft=False,
  variation=0.5,
  temperatures=(0.0, 0.0, 1.0),
  rounds=24,
  rows=1024,
  prompt_tokens=192,
  visits=64,
  surprise=0.0,
)

DRAFTERS = {
  "zoo": ZOO_DRAFTER,
  "zoo-dflash2": ZOO_DFLASH2,
  "zoo-dspark": ZOO_DSPARK,
  "smollm2": SMOLLM2_DRAFTER,
}
"""Recipes by name; that of `zoo` trains the target too."""
