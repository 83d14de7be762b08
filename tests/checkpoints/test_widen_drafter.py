"""Widening keeps what DFlash2 and DSpark add to DFlash."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax.checkpoints import widen_drafter
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly
from specpilot_jax.models.drafters import config as drafter_config_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import DFlash2Config, DSparkConfig
from specpilot_jax.zoo import recipes
from tests.checkpoints import test_widen
from tests.decoding import kit
from tests.zoo.test_training import drafter_config

SMALL = test_widen.SMALL
R = 4
"""Copies of channels, heads and units; ranks are copied twice."""
DFLASH2, DSPARK = (
  drafter_config(SMALL, made, sliding_window=9)
  for made in (DFlash2Config, DSparkConfig)
)
KINDS = (("dflash2", DFLASH2), ("dspark", DSPARK))


BREAKS = tuple(
  (kind, table, name, change)
  for kind, table, name, changes in (
    (
      DFLASH2,
      "drafter_layer",
      "attention_conv.base_kernel",
      (test_widen.columns_interleaved,),
    ),
    (
      DFLASH2,
      "drafter_layer",
      "mlp_conv.kernel_projection.weight",
      (
        test_widen.undivided,
        test_widen.columns_interleaved,
        test_widen.rows_as_one_block,
        test_widen.rows_interleaved,
      ),
    ),
    (
      DFLASH2,
      "drafter_ends",
      "candidate_selector.hidden_projection.weight",
      (test_widen.undivided, test_widen.rows_interleaved),
    ),
    (
      DSPARK,
      "drafter_ends",
      "confidence_head.weight",
      (test_widen.rows_as_one_block,),
    ),
    (
      DFLASH2,
      "drafter_tables",
      "candidate_selector.successor_codebook",
      (lambda table: (table[0], 1.0), lambda table: (table[0][::-1], table[1])),
    ),
    (
      DSPARK,
      "drafter_tables",
      "markov_head.markov_w2.weight",
      (lambda table: (table[0], 1.0), lambda table: (table[0][::-1], table[1])),
    ),
  )
  for change in changes
)


@functools.cache
def targets():
  """Small and wide: drafters use their embeddings and heads."""
  return test_widen.small_pair()[0], test_widen.widened(R)[0]


@functools.cache
def small(config):
  return test_widen.small_drafter(config=config)


def wide(config, dtype="float64"):
  return widen_drafter.widen_drafter(
    small(config),
    test_widen.wide_drafter(R, targets()[1].config, config),
    dtype=dtype,
  )


_RUNS = {}
"""Compiled by shapes: weights alone differ."""


def lattice(target, model):
  """What the drafter offers after the same taps, however often copied."""
  drafter = learned.drafter(model, target)

  def compute(params, taps):
    size = jnp.int32(taps.shape[0])
    tokens = jnp.zeros(taps.shape[0], jnp.int32)
    context = drafter.extend(
      params, drafter.init_context(64), tokens, taps, jnp.int32(0), size
    )
    return drafter.draft(params, context, jnp.int32(5), size)

  rng = np.random.default_rng(0)
  taps = rng.normal(size=(24, 2, SMALL.hidden_size))
  copies = model.config.hidden_size // SMALL.hidden_size
  run = _RUNS.setdefault(model.config, jax.jit(compute))
  return run(drafter.params, jnp.asarray(np.tile(taps, copies)))


def difference(config, model) -> float:
  """Of scores and confidence; infinite where candidates are others."""
  own = lattice(targets()[0], small(config))
  made = lattice(targets()[1], model)
  if not np.array_equal(own.tokens, made.tokens):
    return np.inf
  found = np.abs(own.scores - made.scores).max()
  if own.confidence is not None:
    found = max(found, np.abs(own.confidence - made.confidence).max())
  return float(found)


class FunctionTest(kit.Float64TestCase):
  @parameterized.named_parameters(*KINDS)
  def test_the_function_is_kept(self, config):
    model = wide(config)
    self.assertLess(difference(config, model), test_widen.TOLERANCE)
    own = lattice(targets()[0], small(config))
    # Parents matter, and so do slots.
    self.assertGreater(float(np.std(own.scores[1:], axis=1).min()), 1e-3)
    if config is DSPARK:
      self.assertGreater(float(np.std(own.confidence)), 1e-3)
    shapes = assembly.structs(
      lambda: learned.module(model.config, jnp.float64, nnx.Rngs(0))
    )
    made = assembly.parameters(model)
    self.assertEqual(
      {name: (array.shape, array.dtype) for name, array in made.items()},
      {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()},
    )

  @parameterized.parameters(*BREAKS)
  def test_no_rule_can_be_broken(self, config, table, name, change):
    with test_widen.changed(table, name, change):
      model = wide(config)
    self.assertGreater(difference(config, model), test_widen.SEEN)

  def test_the_confidence_reads_copies_of_two_kinds(self):
    with mock.patch.object(
      widen_drafter, "_confidence", lambda weight, *_: weight
    ):
      model = wide(DSPARK)
    self.assertGreater(difference(DSPARK, model), test_widen.SEEN)


class RefusalsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("kind", DFLASH2, DSPARK, {}, "kind is dflash2 in one and dspark"),
    ("rank", DFLASH2, DFLASH2, dict(selector_rank=12), "selector_rank 4 to 12"),
    ("markov", DSPARK, DSPARK, dict(markov_rank=6), "markov_rank 4 to 6"),
    (
      "groups",
      DFLASH2,
      DFLASH2,
      dict(conv_group_size=4),
      "conv_group_size is 8 in one and 4",
    ),
    (
      "vocabulary",
      DSPARK,
      DSPARK,
      dict(vocab_size=60, mask_token_id=3),
      "vocabulary of 60 is smaller than 61",
    ),
  )
  def test_shapes(self, config, other, changes, pattern):
    target = test_widen.wide_pair(R)[0]
    shape = dataclasses.replace(
      test_widen.wide_drafter(R, target, other), **changes
    )
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      widen_drafter.drafter_ratios(config, shape)
    self.assertLen(str(caught.exception).splitlines(), 1)

  def test_groups_that_do_not_divide(self):
    with self.assertRaisesRegex(SpecPilotError, "multiple of conv_group_size"):
      drafter_config(SMALL, DFlash2Config, conv_group_size=12)


class The27BTest(parameterized.TestCase):
  @parameterized.parameters(recipes.DFLASH2, recipes.DSPARK)
  def test_shapes(self, config):
    wide = drafter_config_lib.PRESETS_BY_KIND[config.kind]["Qwen3.8-27B"]
    wide = dataclasses.replace(wide, block_size=config.block_size, yarn=None)
    ratios = widen_drafter.drafter_ratios(config, wide)
    self.assertEqual(
      (ratios.hidden, ratios.mlp, ratios.attention, ratios.rank), (16, 32, 8, 4)
    )
    structs = assembly.structs(
      lambda: learned.module(wide, jnp.bfloat16, nnx.Rngs(0))
    )
    spreads = widen_drafter.drafter_ends(config, ratios) | {
      f"layers.{i}.{suffix}": spread
      for i in range(wide.num_layers)
      for suffix, spread in widen_drafter.drafter_layer(config, ratios).items()
    }
    tables = widen_drafter.drafter_tables(config, ratios)
    self.assertEqual({*spreads, *tables}, {*structs})
    for name, spread in spreads.items():
      shape = structs[name].shape
      self.assertEqual(spread.rows.size, shape[0], name)
      if spread.columns is not None:
        self.assertEqual(spread.columns.size, shape[-1], name)
    for name, (columns, _) in tables.items():
      self.assertEqual((248320, columns.size), structs[name].shape)


if __name__ == "__main__":
  absltest.main()
