"""Weights in W12: the same model, in engines too."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from pallas_kernels import w12_matmul
from pallas_kernels.dispatch import Kernels
from pallas_kernels.w12_array import W12Array
from specpilot_jax import footprint, loading
from specpilot_jax.checkpoints import w12 as codec
from specpilot_jax.configs import ATTENTION, GDN, SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry, w12
from specpilot_jax.models import assembly
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import DFlash2Config, DSparkConfig
from specpilot_jax.models.drafters.dflash import DFlashDrafter
from tests.checkpoints.test_widen import small_drafter
from tests.decoding import kit
from tests.notes import FULL, in_full_form
from tests.zoo.test_training import drafter_config

PACKED = SystemConfig(weights="w12")


def bfloat16_values(config, seed=0):
  """Parameters that W12 holds."""
  return {
    name: np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32)
    for name, value in target_lib.random_params(config, seed).items()
  }


def brief():
  """A layer of either kind."""
  return kit.hybrid(layer_types=(GDN, ATTENTION))


class EngineTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))

  @functools.cached_property
  def pair(self):
    """The zoo's; in the small form a hybrid without weights of its own."""
    if FULL:
      target = loading.load_target("zoo", "float64").target
      return target, loading.make_drafter("dflash", target)
    target = target_lib.build(brief(), bfloat16_values(brief()), "float64")
    return target, PromptLookup(3)

  def test_same_tokens_and_states(self):
    """Stock in W12, sampled: every bit of the carry.

    Compiled with optimisation: two programs may round differently without.
    """
    target, drafter = self.pair
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    packed = registry.prepare(PACKED, target, drafter)
    self.assertEqual(packed[0].weights, "w12")
    sampling = SamplingParams(
      temperature=1.0, seed=3, max_tokens=24, ignore_eos=True
    )

    def run(target, drafter, system):
      engine = Engine(
        target, drafter=drafter, system=system, max_seq_len=96, prefill_chunk=16
      )
      out = engine.generate(prompt, sampling)
      return (out.token_ids, out.metrics.emitted_per_step), engine._carry

    plain, carry = run(target, drafter, SystemConfig())
    found, packed_carry = run(*packed, PACKED)
    self.assertEqual(found, plain)
    jax.tree.map(np.testing.assert_array_equal, carry, packed_carry)

  def test_without_a_drafter(self):
    self.enterContext(kit.quick_compilation())
    plain = target_lib.build(brief(), bfloat16_values(brief()), "float64")
    target, drafter = registry.prepare(PACKED, plain, None)
    self.assertIsNone(drafter)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)

    def tokens(target, system):
      engine = Engine(target, system=system, max_seq_len=64, prefill_chunk=16)
      return engine.generate([5, 6, 7], sampling).token_ids

    self.assertEqual(tokens(target, PACKED), tokens(plain, SystemConfig()))


def wide():
  """A hybrid whose matrices the kernel takes."""
  return kit.hybrid(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    layer_types=(GDN, ATTENTION),
  )


class ModelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def test_every_matrix_and_nothing_else(self):
    config = kit.hybrid()
    target = target_lib.build(config, bfloat16_values(config), "float32")
    packed_target = w12.target(target)
    packed = assembly.leaves(packed_target)
    for name, leaf in target_lib.parameters(target).items():
      matrix = leaf.ndim == 2 and not name.endswith("conv_weight")
      self.assertEqual(isinstance(packed[name], W12Array), matrix, name)
      if not matrix:
        self.assertIs(packed[name], leaf)
        continue
      whole = codec.decode(jax.tree.map(np.asarray, packed[name]))
      np.testing.assert_array_equal(whole.astype(np.float32), leaf)
    decoded = target_lib.parameters(packed_target)
    for name, leaf in target_lib.parameters(target).items():
      np.testing.assert_array_equal(decoded[name].astype(leaf.dtype), leaf)

  @parameterized.parameters(DFlash2Config, DSparkConfig)
  def test_drafters_with_tables(self, made):
    """Tables of which rows are gathered alone stay as they are."""
    config = kit.hybrid()
    target = target_lib.build(config, bfloat16_values(config), "float32")
    shape = drafter_config(config, made)
    arrays = {
      name: array.astype(jnp.bfloat16).astype(jnp.float32)
      for name, array in assembly.parameters(
        small_drafter(jnp.float32, shape)
      ).items()
    }
    plain = learned.drafter(
      assembly.assemble(
        shape.name,
        lambda: learned.module(shape, jnp.float32, nnx.Rngs(0)),
        arrays,
      ),
      target,
    )
    packed = registry.prepare(PACKED, target, plain)[1]
    assert isinstance(packed, DFlashDrafter)
    self.assertIs(type(packed), type(plain))
    self.assertEqual(packed.candidates, plain.candidates)
    kept = {
      name
      for name, leaf in assembly.leaves(packed.model()).items()
      if not isinstance(leaf, W12Array) and leaf.ndim > 1
    }
    tables = {
      DFlash2Config: {
        f"candidate_selector.{which}_codebook"
        for which in ("predecessor", "successor")
      }
      | {
        f"layers.{i}.{conv}.base_kernel"
        for i in range(2)
        for conv in ("attention_conv", "mlp_conv")
      },
      DSparkConfig: {"markov_head.markov_w1"},
    }
    self.assertEqual(kept, tables[made])

    def lattice(drafter):
      context = drafter.init_context(16)
      draft = jax.jit(drafter.draft)
      return draft(drafter.params, context, jnp.int32(3), jnp.int32(0))

    for a, b in zip(
      jax.tree.leaves(lattice(plain)),
      jax.tree.leaves(lattice(packed)),
      strict=True,
    ):
      np.testing.assert_allclose(a, b, rtol=1e-5)

    # A view is read in every product, of its own matrices and of the head.
    views = []
    product = w12_matmul.matmul

    def matmul(x, weight, *, view=False, midpoint=True, **named):
      views.append((view, midpoint))
      return product(x, weight, view=view, midpoint=midpoint, **named)

    packed_target = registry.prepare(PACKED, target, None)[0]
    for view in ("truncated", "midpoint"):
      system = dataclasses.replace(PACKED, drafter_view=view)
      seen = registry.prepare(system, packed_target, packed)[1]
      assert isinstance(seen, DFlashDrafter)
      # Nothing is held twice.
      for a, b in zip(
        jax.tree.leaves(seen.params[0]),
        jax.tree.leaves(packed.params[0]),
        strict=True,
      ):
        self.assertIs(a, b)
      views.clear()
      with mock.patch.object(w12_matmul, "matmul", matmul):
        context = jax.eval_shape(functools.partial(seen.init_context, 16))
        at = jax.ShapeDtypeStruct((), jnp.int32)
        jax.eval_shape(seen.draft, seen.params, context, at, at)
        taps = jnp.zeros((2, len(seen.taps), config.hidden_size))
        rows = jax.ShapeDtypeStruct((2,), jnp.int32)
        jax.eval_shape(seen.extend, seen.params, context, rows, taps, at, at)
      expected = {DFlash2Config: 7 * 2 + 2, DSparkConfig: 5 * 2 + 1 + 2}[made]
      self.assertLen(views, expected + 1 + 2)
      self.assertEqual(set(views), {(True, view == "midpoint")})

  def test_views_of_what_has_none(self):
    target = target_lib.build(wide(), bfloat16_values(wide()), "float32")
    system = dataclasses.replace(PACKED, drafter_view="scaled")
    with self.assertRaisesRegex(SpecPilotError, "prompt_lookup has none"):
      registry.prepare(system, target, PromptLookup(3))
    self.assertIsNone(registry.prepare(system, target, None)[1])
    with self.assertRaisesRegex(SpecPilotError, "scaled requires weights=w12"):
      SystemConfig(drafter_view="scaled")
    with self.assertRaisesRegex(
      SpecPilotError, "drafter_view=.*needs a drafter"
    ):
      Engine(w12.target(target), system=system)

  @in_full_form
  def test_kernels_interpreted(self):
    """The kernels in every product, of one row and of a run of prompt."""
    config = wide()
    params = bfloat16_values(config)

    def tokens(kernels):
      target = target_lib.build(config, params, "bfloat16", kernels)
      target, _ = registry.prepare(PACKED, target, None)
      engine = Engine(target, system=PACKED, max_seq_len=256, prefill_chunk=128)
      sampling = SamplingParams(max_tokens=8, ignore_eos=True)
      return engine.generate([1, 2, 3, 1, 2, 3, 1, 2], sampling).token_ids

    self.assertEqual(tokens(Kernels(w12_matmul="interpret")), tokens(Kernels()))

  def test_scores_are_the_references(self):
    config = wide()
    target = target_lib.build(
      config,
      bfloat16_values(config),
      "bfloat16",
      Kernels(w12_matmul="interpret"),
    )
    target, _ = registry.prepare(PACKED, target, None)
    prompt, step, score = kit.kernel_calls(
      Engine(target, system=PACKED, max_seq_len=64, prefill_chunk=8),
      w12_matmul,
      "_matmul_kernel",
    )
    self.assertEqual(prompt, 4 * config.num_layers)
    self.assertGreaterEqual(step, prompt)
    self.assertEqual(score, 0)

  def test_values_that_bfloat16_does_not_hold(self):
    config = kit.hybrid()
    params = target_lib.random_params(config, 0)
    target = target_lib.build(config, params, "float32")
    with self.assertRaisesRegex(
      SpecPilotError, r"weights=w12: \d+ of \d+ values of 'embed.weight' are"
    ):
      registry.prepare(PACKED, target, None)

  def test_engine_refuses_what_it_is_not_given(self):
    config = kit.hybrid()
    target = target_lib.build(config, bfloat16_values(config), "float32")
    with self.assertRaisesRegex(SpecPilotError, "wants weights=w12.* in bf16"):
      Engine(target, system=PACKED)
    packed, _ = registry.prepare(PACKED, target, None)
    self.assertIs(registry.prepare(PACKED, packed, None)[0], packed)
    with self.assertRaisesRegex(SpecPilotError, "weights=bf16 cannot be made"):
      registry.prepare(SystemConfig(), packed, None)

  def test_planned_bytes(self):
    source = loading.open_target("zoo")
    config = loading.drafter_config("dflash", source.config)
    target = source.build("bfloat16").target
    drafter = loading.make_drafter("dflash", target)
    target, drafter = registry.prepare(PACKED, target, drafter)
    assert drafter is not None
    leaves = jax.tree.leaves(
      (assembly.leaves(target), drafter.params[0]),
      is_leaf=lambda x: isinstance(x, W12Array),
    )
    held = sum(x.nbytes for x in leaves if isinstance(x, W12Array))
    planned = footprint.w12_bytes(source.config, config)
    self.assertLess(abs(planned / held - 1), 0.005)


if __name__ == "__main__":
  absltest.main()
