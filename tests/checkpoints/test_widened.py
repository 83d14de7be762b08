"""Widened models by name: what they are made of, and at the 27B's shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import nnx

from pallas_kernels.w12_array import W12Array
from specpilot_jax import configs, loading
from specpilot_jax.checkpoints import widen, widen_drafter
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import config as drafter_config
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from specpilot_jax.zoo import recipes
from tests.notes import in_full_form

BIG = configs.preset("Qwen3.8-27B")
BIG_DRAFTER = drafter_config.PRESETS["Qwen3.8-27B"]
ONE_MB = 10**6


@functools.cache
def mid_size() -> loading.LoadedModel:
  return loading.load_target("widened:HYBRID-1280", "bfloat16")


class NamesTest(parameterized.TestCase):
  def test_a_widened_model(self):
    model = mid_size()
    self.assertEqual(model.config.name, "widened:hybrid-1280")
    self.assertIn("widened", model.notes[-1])
    self.assertIn("hybrid-1280", model.notes[-1])
    zoo = loading.load_target("zoo", "float32")
    self.assertEqual(model.sha256, zoo.sha256)
    assert model.tokenizer is not None
    self.assertEqual(model.config.tokenizer_size, model.tokenizer.size)
    # Of the text, and not of the shape.
    for field in ("eos_token_ids", "context_length", "tokenizer_size"):
      self.assertEqual(
        getattr(model.config, field), getattr(zoo.config, field), field
      )
    self.assertEqual(loading.default_drafter(model.config), "dflash")

  def test_its_drafter(self):
    drafter = loading.make_drafter("dflash", mid_size().target)
    assert isinstance(drafter, DFlashDrafter)
    wide = drafter_config.PRESETS["hybrid-1280"]
    self.assertEqual(
      drafter.config,
      dataclasses.replace(
        wide,
        mask_token_id=recipes.DFLASH.mask_token_id,
        sliding_window=recipes.DFLASH.sliding_window,
      ),
    )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(drafter.params)}
    self.assertEqual(dtypes, {jnp.dtype(jnp.bfloat16)})

  @in_full_form
  def test_straight_into_w12(self):
    """Matrices are W12 from the start, and the same ones."""
    source = loading.open_target("widened:hybrid-1280")
    target = source.build("bfloat16", weights="w12").target
    self.assertEqual(target.weights, "w12")
    packed = loading.make_drafter("dflash", target)
    plain = loading.make_drafter("dflash", mid_size().target)
    assert isinstance(packed, DFlashDrafter) and isinstance(
      plain, DFlashDrafter
    )
    for found, expected in (
      (target, mid_size().target),
      (packed.model(), plain.model()),
    ):
      expected = assembly.parameters(expected)
      for name, leaf in assembly.leaves(found).items():
        matrix = layers.is_matrix(name, leaf.shape)
        self.assertEqual(isinstance(leaf, W12Array), matrix, name)
      for name, leaf in assembly.parameters(found).items():
        self.assertTrue(bool((leaf == expected[name]).all()), name)

  @parameterized.parameters("widened:", "widened:qwen3.5-4b", "widened:zoo")
  def test_unknown(self, name):
    with self.assertRaisesRegex(
      SpecPilotError, "there are: widened:qwen3.8-27b, widened:hybrid-1280"
    ):
      loading.load_target(name)


class The27BTest(absltest.TestCase):
  """Nothing of its size is made: shapes, and what compiled code would need."""

  def test_ratios(self):
    self.assertEqual(
      widen.target_ratios(recipes.TARGET, BIG),
      widen.Ratios(hidden=16, mlp=32, attention=4, gdn=16),
    )
    self.assertEqual(
      widen_drafter.drafter_ratios(recipes.DFLASH, BIG_DRAFTER),
      widen.Ratios(hidden=16, mlp=32, attention=8),
    )
    taps = widen_drafter.drafter_taps(recipes.DFLASH, BIG_DRAFTER)
    self.assertEqual(
      widen.placement(recipes.TARGET.layer_types, BIG.layer_types, taps),
      (0, 1, 6, 23, 24, 34, 48, 63),
    )

  def spread_like(self, spread: widen.Spread, shape: tuple[int, ...]):
    sizes = [spread.rows.size]
    if spread.columns is not None:
      sizes.append(spread.columns.size)
    self.assertEqual(tuple(sizes), shape[: len(sizes)])

  def test_shapes(self):
    structs = target_lib.structs(BIG, jnp.bfloat16)
    ratios = widen.target_ratios(recipes.TARGET, BIG)
    count = 3  # embedding, final norm, lm_head
    for i, kind in enumerate(BIG.layer_types):
      table = widen.target_layer(recipes.TARGET, kind, ratios)
      count += len(table)
      for suffix, spread in table.items():
        self.spread_like(spread, structs[f"layers.{i}.{suffix}"].shape)
    self.assertLen(structs, count)

  def test_drafter_shapes(self):
    structs = assembly.structs(
      lambda: DFlash(BIG_DRAFTER, jnp.bfloat16, nnx.Rngs(0))
    )
    ratios = widen_drafter.drafter_ratios(recipes.DFLASH, BIG_DRAFTER)
    ends = widen_drafter.drafter_ends(recipes.DFLASH, ratios)
    table = widen_drafter.drafter_layer(recipes.DFLASH, ratios)
    for name, spread in ends.items():
      self.spread_like(spread, structs[name].shape)
    for i in range(BIG_DRAFTER.num_layers):
      for suffix, spread in table.items():
        self.spread_like(spread, structs[f"layers.{i}.{suffix}"].shape)
    self.assertLen(structs, len(ends) + BIG_DRAFTER.num_layers * len(table))

  def test_making_a_tensor_takes_no_memory_beyond_it(self):
    dtype = jnp.dtype(jnp.bfloat16)

    def array(*shape, dtype=dtype):
      return jax.ShapeDtypeStruct(shape, dtype)

    scale, key = array(dtype=jnp.float32), array(dtype=jnp.uint32)
    rows = array(34816, dtype=jnp.int32)
    columns = array(5120, dtype=jnp.int32)
    for lowered, size in (
      (
        widen._vocabulary.lower(
          array(4096, 320), columns, scale, key, size=248320, dtype=dtype
        ),
        248320,
      ),
      (
        widen._copied.lower(
          array(1088, 320), rows, columns, scale, dtype=dtype
        ),
        34816,
      ),
      (
        widen._drawn.lower(
          array(1088, 320), scale, key, shape=(34816, 5120), dtype=dtype
        ),
        34816,
      ),
    ):
      memory = lowered.compile().memory_analysis()
      assert memory is not None
      self.assertEqual(memory.output_size_in_bytes, size * 5120 * 2)
      self.assertLess(memory.temp_size_in_bytes, ONE_MB)


if __name__ == "__main__":
  absltest.main()
