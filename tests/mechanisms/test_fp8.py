"""FP8 targets made of bfloat16 ones, in engines."""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from experiments.agents.search import Search
from pallas_kernels import fp8_array, fp8_matmul
from pallas_kernels.dispatch import Kernels
from pallas_kernels.fp8_array import FP8Array
from specpilot_jax import footprint, loading
from specpilot_jax.configs import GDN, SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import fp8, registry, w12
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from tests.decoding import kit

CODES = SystemConfig(weights="fp8")
CONFIG = kit.hybrid()


@functools.cache
def quantized(dtype: str):
  return registry.prepare(CODES, kit.build(CONFIG, dtype), None)[0]


class LosslessTest(kit.Float64TestCase):
  """Against the one-token executable of the same FP8 target."""

  def test_tokens_and_states(self):
    target = quantized("float64")
    shape = {"max_seq_len": 128, "prefill_chunk": 8}
    plain = Engine(target, system=CODES, **shape)
    engine = kit.ScriptedEngine(
      target,
      drafter=kit.ScriptedDrafter(5, CONFIG),
      system=CODES,
      **shape,
    )
    sampling = SamplingParams(
      max_tokens=32, ignore_eos=True, temperature=1.0, seed=5
    )
    accepted, texts = 0, set()
    for i, prompt in enumerate(kit.prompts(3, CONFIG.vocab_size)):
      reference = kit.referee(plain, prompt, sampling)
      texts.add(reference.tokens)
      engine.load("mixed", reference.sequence, seed=i)
      accepted += sum(kit.compare(engine, reference).accepted)
      forced = plain.score(prompt, reference.tokens, sampling)
      self.assertLess(forced.gaps.max(), 1e-9)
    self.assertLen(texts, 3)
    self.assertGreater(accepted, 20)

  def test_rows_are_rounded_too(self):
    """It is not the model of what its codes stand for."""
    w: Any = assembly.leaves(quantized("float64"))["layers.0.mlp.down.weight"]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 48)))
    found = layers.matmul(x, w)
    self.assertEqual(found.dtype, jnp.float64)
    wider = x @ fp8_array.decode(w, jnp.float64).T
    error = np.abs(np.asarray(found - wider)).max() / np.abs(wider).max()
    self.assertGreater(error, 1e-3)
    self.assertLess(error, 0.1)


class ModelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def test_what_becomes_codes(self):
    plain = target_lib.parameters(kit.build(CONFIG, "float32"))
    for name, leaf in target_lib.parameters(quantized("float32")).items():
      linear = name.startswith("layers.") and name.endswith(
        ("_proj.weight", "qkv.weight", "gate_up.weight", "down.weight")
      )
      self.assertIs(isinstance(leaf, FP8Array), linear, name)
      if not linear:
        self.assertIs(leaf, plain[name])
        continue
      rest = 2 * CONFIG.gdn_num_value_heads if "in_proj" in name else 0
      self.assertEqual(leaf.rest.shape[0], rest)
      np.testing.assert_array_equal(leaf.rest, plain[name][-rest:][:rest])
      error = np.abs(np.asarray(fp8_array.decode(leaf)) - plain[name])
      self.assertLess(error.max(), 0.04 * np.abs(plain[name]).max())

  def test_kernel_interpreted(self):
    """In every product of a layer."""
    config = dataclasses.replace(CONFIG, layer_types=(GDN,))
    plain = fp8.target(kit.build(config, "float32"))
    nodes = state_lib.run_of(jnp.arange(5), jnp.int32(5), prefill=True)
    state = state_lib.init_state(config, 16, jnp.float32)

    def hidden(kernels):
      target = target_lib.assemble(
        config, target_lib.parameters(plain), jnp.float32, kernels
      )
      return nnx.jit(lambda model: model(nodes, state).hidden)(target)

    wanted = np.asarray(hidden(Kernels()))
    found = hidden(Kernels(fp8_matmul="interpret"))
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())

  def test_systems_that_run_on_it(self):
    plain, target = kit.build(CONFIG, "float32"), quantized("float32")
    self.assertEqual(target.weights, "fp8")
    # Stock takes a model as it was built.
    for system in (CODES, SystemConfig()):
      self.assertIs(registry.prepare(system, target, None)[0], target)
      Engine(target, system=system, max_seq_len=64)
    packed = SystemConfig(weights="w12")
    with self.assertRaisesRegex(
      SpecPilotError, "is in fp8, a system with weights=w12 cannot be made"
    ):
      registry.prepare(packed, target, None)
    with self.assertRaisesRegex(SpecPilotError, "wants weights=fp8.*in bf16"):
      Engine(plain, system=CODES)
    name = "layers.0.mlp.down.weight"
    with self.assertRaisesRegex(SpecPilotError, "is in FP8, W12 holds bfloat"):
      w12.hold(name, assembly.leaves(target)[name])
    rounded = jnp.asarray(assembly.leaves(plain)[name], jnp.bfloat16)
    with self.assertRaisesRegex(SpecPilotError, "is in W12, FP8 is made of"):
      fp8.hold(CONFIG)(name, w12.encode(name, rounded))

  def test_two_levels_have_no_view(self):
    system = dataclasses.replace(CODES, verification="two_level")
    with self.assertRaisesRegex(SpecPilotError, "two_level looks .* is in FP8"):
      registry.schedule(system, quantized("float32"), PromptLookup(3))

  def test_where_the_kernel_is(self):
    """In prompts and steps; scores come from the definition."""
    target = target_lib.assemble(
      CONFIG,
      target_lib.parameters(quantized("float32")),
      jnp.float32,
      Kernels(fp8_matmul="interpret"),
    )
    calls = kit.kernel_calls(
      Engine(target, system=CODES, max_seq_len=64, prefill_chunk=8),
      fp8_matmul,
      "_kernel",
    )
    products = 4 * CONFIG.num_layers
    self.assertEqual(calls, [products, products, 0])

  def test_build_refuses(self):
    name = "layers.0.mlp.down.weight"
    arrays = dict(target_lib.parameters(quantized("float32")))
    good = arrays[name]
    bad = {
      "scales that are NaN or infinite": good.scale.at[0].set(jnp.nan),
      "scales that are not above 0": good.scale.at[0].set(0),
      "scales of shape": jnp.ones((2, 1)),
    }
    changes = {text: {"scale": scale} for text, scale in bad.items()}
    changes |= {
      "codes of float8_e5m2": {"codes": good.codes.astype(jnp.float8_e5m2)},
      "codes that are NaN": {"codes": good.codes.at[0, 0].set(jnp.nan)},
      "blocks of": {"block": (128, 16)},
      "columns beside 48 of codes": {"rest": jnp.zeros((0, 4))},
      "values that are NaN": {
        "codes": good.codes[:-1],
        "rest": jnp.full((1, 48), jnp.nan),
      },
      "expected": {"codes": good.codes[:-1]},
    }
    for text, change in changes.items():
      with self.assertRaisesRegex(SpecPilotError, f"{name}' has .*{text}"):
        arrays[name] = dataclasses.replace(good, **change)
        target_lib.build(CONFIG, arrays, "float32")

  def test_zoo(self):
    """By name; what is planned is what is held."""
    source = loading.open_target("fp8:zoo")
    loaded = source.build("bfloat16")
    self.assertEqual(loaded.target.weights, "fp8")
    self.assertEqual(loaded.notes, (loading.FP8_NOTE,))
    self.assertEqual(source.config.name, "zoo")
    self.assertIsNotNone(loading.make_drafter("dflash", loaded.target))
    held = sum(
      x.nbytes for x in jax.tree.leaves(assembly.leaves(loaded.target))
    )
    planned = footprint.fp8_bytes(source.config, "bfloat16")
    self.assertEqual(planned, held)
    with self.assertRaisesRegex(SpecPilotError, "weights=w12 cannot be made"):
      source.build("bfloat16", weights="w12")

  def test_names(self):
    self.assertEqual(loading.located("zoo"), "zoo")
    self.assertEqual(loading.located("fp8:zoo"), "fp8:zoo")
    here = os.getcwd()
    self.assertEqual(loading.located("FP8:."), f"FP8:{here}")
    self.assertEqual(loading.located("."), here)
    with self.assertRaisesRegex(SpecPilotError, "name or path .* is empty"):
      loading.open_target("fp8:")

  def test_no_proposal(self):
    """It would win against a model that it is not."""
    option = registry.OPTIONS["weights"]
    self.assertEqual(
      list(Search(sampled=False, drafter=True)._values(option)), ["w12"]
    )


if __name__ == "__main__":
  absltest.main()
