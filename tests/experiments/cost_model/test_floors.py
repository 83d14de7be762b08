"""Floors against counts by hand and against the models' own arrays."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments import devices
from experiments.cost_model import floors, kernels, model
from specpilot_jax import configs, loading
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.models.yarn import Yarn
from tests.decoding import kit

DRAFTER = DrafterConfig(
  name="d", vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=2,
  num_heads=4, num_kv_heads=2, head_dim=8, rope_theta=1e4, norm_eps=1e-6,
  block_size=6, mask_token_id=1, target_layers=(0, 2), num_target_layers=3,
)  # fmt: skip

CONFIGS = (
  DRAFTER,
  DFlash2Config(
    **(DRAFTER.shape()), name="d2", conv_group_size=8, selector_rank=4,
    selector_top_k=3,
  ),
  DSparkConfig(**(DRAFTER.shape()), name="ds", markov_rank=4),
)  # fmt: skip


def weights_read(config):
  """Elements of the matrices that products read, from the real shapes."""
  shapes = target_lib.parameter_shapes(config)
  total = 0
  for name, shape in shapes.items():
    is_head = name == "lm_head.weight" or (
      name == "embed.weight" and config.tie_embeddings
    )
    if len(shape) == 2 and (
      is_head or (name.startswith("layers") and "conv" not in name)
    ):
      total += shape[0] * shape[1]
  return total


@pytest.mark.parametrize(
  "config",
  [
    kit.hybrid(),
    kit.hybrid(tie_embeddings=True),
    *(configs.preset(n) for n in configs.PRESETS),
  ],
  ids=lambda c: f"{c.name}-{c.tie_embeddings}",
)
def test_matrices_are_those_of_the_model(config):
  counted = sum(n * out * i for n, out, i in floors.matrices(config).values())
  assert counted == weights_read(config)


def test_fp8_halves_what_is_codes():
  config = kit.hybrid()
  count = functools.partial(floors.target_gemm, config, "bfloat16", 5)
  plain, codes = count(), count(weights="fp8")
  # The head, and b and a of two GDN layers, have none.
  left = 61 * 32 + 2 * 8 * 32
  elements = weights_read(config) - left
  assert plain.flops - codes.flops == 5 * elements
  assert plain.bytes - codes.bytes == elements


def test_target_gemm_by_hand():
  config = kit.hybrid()
  nodes = 5
  work = floors.target_gemm(config, "float32", nodes)
  elements = weights_read(config)
  assert work.flops == 2 * nodes * elements
  # Rows in and out: per layer gate|up 32 -> 96 and down 48 -> 32; the
  # attention layer 32 -> 64 + 32 and 32 -> 32; two GDN layers 32 -> 64 + 32 +
  # 8 and 32 -> 32; the head 32 -> 61.
  rows = 3 * (32 + 96 + 48 + 32) + (32 + 96 + 64) + 2 * (32 + 104 + 64)
  assert work.bytes == 4 * (elements + nodes * (rows + 32 + 61))
  # Without logits there is no head.
  less = floors.target_gemm(config, "float32", nodes, head=False)
  assert work.bytes - less.bytes == 4 * (61 * 32 + nodes * (32 + 61))


def test_states_are_those_of_the_engine():
  config = kit.hybrid()
  state = state_lib.init_state(config, 10, jnp.bfloat16)
  step = floors.Step(nodes=0, context=10, committed=0)
  nbytes = {
    kind: sum(
      x.nbytes
      for own, layer in zip(config.layer_types, state.layers, strict=True)
      if own == kind
      for x in jax.tree.leaves(layer)
    )
    for kind in (configs.GDN, configs.ATTENTION)
  }
  # No nodes: keys and values read once; states read, read and written.
  assert (
    floors.attention(config, "bfloat16", step).bytes
    == nbytes[configs.ATTENTION]
  )
  conv_weights = 2 * 2 * config.gdn_conv_dim * config.gdn_conv_kernel
  assert (
    floors.recurrent(config, "bfloat16", step).bytes
    == 3 * nbytes[configs.GDN] + conv_weights
  )


def test_attention_by_hand():
  config = kit.hybrid()
  step = floors.Step(nodes=2, context=7, committed=1)
  work = floors.attention(config, "float32", step)
  # One layer, 4 heads of 8: each node meets 7 + 1.5 rows, twice.
  assert work.flops == 2 * 2 * 2 * 8.5 * 32
  # Keys and values: 2 kv heads of 8, twice; query, gate and output of nodes.
  assert work.bytes == 4 * (32 * (7 + 2 + 1) + 2 * 3 * 32)


def test_recurrent_by_hand():
  config = kit.hybrid()
  step = floors.Step(nodes=1, context=99, committed=1)
  work = floors.recurrent(config, "float32", step)
  # Per layer: convolution of 64 channels with 4 taps, K S and Q S of 4 heads of
  # 8 x 8, key products of 2 heads, value products of 4, commit.
  flops = 2 * 64 * 4 + 4 * 256 + 4 * 2 * 8 + 4 * 4 * 8 + 2 * 256
  stash = 4 * (2 * 8 + 4 * 8 + 4) + 4 * 64
  moved = (
    3 * 4 * 256 + 3 * 4 * 3 * 64 + 4 * 64 * 4 + 4 * (64 + 32 + 8 + 32)
    + 2 * stash
  )  # fmt: skip
  assert (work.flops, work.bytes) == (2 * flops, 2 * moved)


def test_a_certain_path_leaves_its_state_at_once():
  """One token without drafts, or a prompt: no stash, and no second reading."""
  config = kit.hybrid()
  for nodes in (1, 5):
    step = floors.Step(nodes=nodes, context=9, committed=nodes, certain=True)
    work = floors.recurrent(config, "float32", step)
    moved = (
      2 * 4 * 256 + 2 * 4 * 3 * 64 + 4 * 64 * 4
      + nodes * 4 * (64 + 32 + 8 + 32)
    )  # fmt: skip
    assert work.bytes == 2 * moved
    maybe = dataclasses.replace(step, certain=False)
    assert work.flops == floors.recurrent(config, "float32", maybe).flops
  models = floors.Models(
    target=config, dtype="float32", drafter="none", drafter_config=None
  )
  rest = (
    floors.target_gemm(config, "float32", 5, head=False)
    + floors.attention(config, "float32", step)
    + floors.other(config, "float32", 5, head=False)
  )
  read = floors.prefill_work(models, 5, 9)
  assert read.bytes == rest.bytes + work.bytes


def test_drafter_weights_are_those_of_the_module():
  model = DFlash(DRAFTER, jnp.float32, nnx.Rngs(0))
  own = sum(x.size for x in jax.tree.leaves(nnx.split(model)[1]) if x.ndim == 2)
  step = floors.Step(nodes=6, context=20, committed=3)
  work = floors.dflash(DRAFTER, kit.hybrid(), "float32", step)
  head = 61 * 32
  block = 6
  # Per layer: q 32, kv 32, o 32, gate|up 80 of width 32, down of width 40.
  rows = block * (32 * 32 * 2 + 80 * 32 + 32 * 40) + (block + 3) * 32 * 32
  attention = 2 * block * (20 + block) * 32
  # Three committed rows of two taps, five slots with logits.
  other = 3 * 64 * 32 + 5 * head
  assert work.flops == 2 * (2 * (rows + attention) + other) + 5 * 61
  nothing = dataclasses.replace(
    DRAFTER, block_size=2, num_layers=DRAFTER.num_layers
  )
  small = floors.dflash(
    nothing, kit.hybrid(), "float32", dataclasses.replace(step, committed=0)
  )
  assert small.bytes > 4 * (own + head)
  # More context costs keys and values of two layers: 2 x 2 heads x 8.
  more = floors.dflash(
    DRAFTER, kit.hybrid(), "float32", dataclasses.replace(step, context=21)
  )
  assert more.bytes - work.bytes == 4 * 2 * 32


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_what_was_profiled_is_read_back(config):
  yarn = Yarn(factor=4, original_max_position_embeddings=64)
  config = dataclasses.replace(config, yarn=yarn)
  models = floors.Models(
    target=kit.hybrid(), dtype="float32", drafter=config.kind,
    drafter_config=config,
  )  # fmt: skip
  told = {
    "target": dataclasses.asdict(models.target),
    "dtype": "float32",
    "drafter": models.drafter,
    "drafter_config": dataclasses.asdict(config),
  }
  assert model.models_of(json.loads(json.dumps(told))) == models


def test_what_other_drafters_add():
  step = floors.Step(nodes=6, context=20, committed=3)
  plain, dflash2, dspark = (
    floors.dflash(config, kit.hybrid(), "float32", step) for config in CONFIGS
  )
  # Four sublayers: kernels 16 of width 32 and 8 operations per channel, in six
  # rows; five slots whose three candidates have three parents, of rank 4.
  convolution = 4 * 6 * (2 * 16 * 32 + 8 * 32)
  selector = 5 * (2 * 4 * 32 + 2 * 9 * 4)
  assert dflash2.flops - plain.flops == convolution + selector
  assert dflash2.bytes - plain.bytes == 4 * (
    4 * (16 * 32 + 6 * (16 + 32)) + 4 * 32 + 5 * (4 + 32) + 2 * 5 * 3 * 4
  )
  # A sixth slot with logits, two products with the table of the vocabulary,
  # and sixteen candidates with as many parents.
  logits = 2 * 61 * 32 + 61
  markov = 6 * (2 * 2 * 61 * 4 + 2 * 256 * 4)
  assert dspark.flops - plain.flops == logits + markov
  assert dspark.bytes - plain.bytes == 4 * (
    32 + 2 * 61 + 2 * (61 * 4 + 6 * (4 + 61)) + 2 * 6 * 16 * 4
  )


def test_a_window_bounds_the_context():
  windowed = dataclasses.replace(DRAFTER, sliding_window=8)
  far, near = (
    floors.dflash(
      windowed,
      kit.hybrid(),
      "bfloat16",
      floors.Step(nodes=6, context=context, committed=1),
    )
    for context in (8, 9000)
  )
  assert far == near


def test_a_big_model_streams_its_weights():
  """Qwen3.8-27B in bfloat16 on an H200: facts that others count too."""
  config = configs.preset("Qwen3.8-27B")
  models = floors.Models(
    target=config, dtype="bfloat16", drafter="none", drafter_config=None
  )
  work = floors.step_work(
    models, floors.Step(nodes=1, context=900, committed=1)
  )
  total = sum(w.bytes for w in work.values())
  # 54 GB of weights less the embedding's 2.5 GB, and little else.
  assert 51e9 < work[kernels.TARGET_GEMM].bytes < 52e9
  assert total < 1.02 * work[kernels.TARGET_GEMM].bytes
  roofline = floors.Roofline.of_device(
    devices.lookup("NVIDIA H200"), "bfloat16"
  )
  at_peak = 1e6 * total / 4.8e12
  floor = sum(floors.floors_us(work, roofline).values())
  assert floor == pytest.approx(at_peak / 0.9, rel=0.01)
  assert roofline.limit_us(work[kernels.TARGET_GEMM]) == pytest.approx(
    0.9 * roofline.floor_us(work[kernels.TARGET_GEMM])
  )


def test_floor_takes_the_longer():
  roofline = floors.Roofline(flops=1e9, bytes=1e6, source="here")
  assert roofline.floor_us(floors.Work(flops=2e9, bytes=1e6)) == 2e6
  assert roofline.floor_us(floors.Work(flops=1e9, bytes=3e6)) == 3e6
  assert roofline.limit_us(floors.Work(1, 1)) is None


def test_drafters_without_a_floor():
  with pytest.raises(SpecPilotError, match="'medusa'"):
    floors.Models(
      target=kit.hybrid(), dtype="float32", drafter="medusa",
      drafter_config=None,
    )  # fmt: skip
  for name in loading.DRAFTERS:
    config = {c.kind: c for c in CONFIGS}.get(name)
    floors.Models(
      target=kit.hybrid(), dtype="float32", drafter=name, drafter_config=config
    )
  with pytest.raises(SpecPilotError, match="do not fit"):
    floors.Models(
      target=kit.hybrid(), dtype="float32", drafter="dflash2",
      drafter_config=DRAFTER,
    )  # fmt: skip


def test_prompt_passes_have_no_logits():
  models = floors.Models(
    target=kit.hybrid(), dtype="float32", drafter="dflash",
    drafter_config=DRAFTER,
  )  # fmt: skip
  work = floors.prefill_work(models, 16, 0)
  gemm = floors.target_gemm(models.target, "float32", 16, head=False)
  context = floors.dflash_context(DRAFTER, "float32", 16)
  assert work.flops > gemm.flops + context.flops
  assert context.flops == 2 * 16 * (64 * 32 + 2 * 32 * 32)
