"""Configurations check the type and range of every field."""

import dataclasses
import math
from typing import Any

from absl.testing import absltest, parameterized

from specpilot_jax.configs import PRESETS, ModelConfig, SystemConfig, preset
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders

NOT_AN_INTEGER: tuple[Any, ...] = (
  1.0, 2.5, math.nan, math.inf, True, False, "2", (2,), [2]
)  # fmt: skip
NOT_POSITIVE: tuple[Any, ...] = (
  0.0, -1.0, 0, math.nan, math.inf, -math.inf, 1e39, 1e-60, 10**400,
  True, "1", None,
)  # fmt: skip


class ConfigTestCase(parameterized.TestCase):
  def refused(self, pattern, call, *args, **kwargs):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      call(*args, **kwargs)
    self.assertLen(str(caught.exception).splitlines(), 1)


class ModelConfigTest(ConfigTestCase):
  def values_refused(self, field, values, family="qwen3_5"):
    config = builders.config(family)
    for value in values:
      self.refused(field, dataclasses.replace, config, **{field: value})

  @parameterized.parameters(
    *(f.name for f in dataclasses.fields(ModelConfig) if f.type is int)
  )
  def test_integers(self, field):
    self.values_refused(field, (*NOT_AN_INTEGER, 0, -1, None))
    if field.startswith("gdn_"):
      # Dense models have none.
      self.values_refused(field, (*NOT_AN_INTEGER, -1, None), "llama")

  @parameterized.parameters(
    *(f.name for f in dataclasses.fields(ModelConfig) if f.type is float)
  )
  def test_reals(self, field):
    self.values_refused(field, NOT_POSITIVE)

  @parameterized.parameters(
    *(f.name for f in dataclasses.fields(ModelConfig) if f.type is bool)
  )
  def test_bools(self, field):
    self.values_refused(field, (0, 1, "false", "", None, 1.0))

  def test_every_field_is_of_a_tested_type(self):
    others = {
      f.name
      for f in dataclasses.fields(ModelConfig)
      if f.type not in (int, float, bool)
    }
    self.assertEqual(
      others,
      {"name", "family", "layer_types", "tokenizer_size", "bos_token_id",
       "eos_token_ids"},
    )  # fmt: skip
    self.values_refused("name", (None, 3))
    self.values_refused("family", (None, 3, "gpt", ["llama"]))
    self.values_refused("layer_types", (None, "gdn", ["gdn"]))
    config = builders.config()
    for value in ((), ("gdn", "mamba"), (1,), (["gdn"],)):
      self.refused("layer.type", dataclasses.replace, config,
                   layer_types=value)  # fmt: skip

  def test_token_ids(self):
    config = builders.config()
    for value in (*NOT_AN_INTEGER, -1, 300):
      for field, given in (
        ("bos_token_id", value),
        ("eos_token_ids", (value,)),
      ):
        self.refused(
          f"{field[:3]} token id", dataclasses.replace, config, **{field: given}
        )
    self.values_refused("eos_token_ids", ([2], 2, None))
    self.refused("tokenizer has 0 ids", dataclasses.replace, config,
                 tokenizer_size=0)  # fmt: skip
    self.refused("tokenizer has 301 ids", dataclasses.replace, config,
                 tokenizer_size=301)  # fmt: skip
    self.values_refused("tokenizer_size", NOT_AN_INTEGER)

  @parameterized.parameters(
    (dict(num_kv_heads=3), "num_heads 4 is not a multiple of num_kv_heads 3"),
    (dict(rotary_dim=3), "rotary_dim 3 must be even"),
    (dict(rotary_dim=10), "rotary_dim 10 must be even and at most head_dim 8"),
    (dict(gdn_conv_kernel=1), "gdn_conv_kernel must be at least 2"),
    (dict(gdn_num_key_heads=4), "6 GDN value heads are not a multiple of 4"),
  )
  def test_arithmetic(self, changes, pattern):
    config = builders.config("qwen3_5")
    self.refused(pattern, dataclasses.replace, config, **changes)

  def test_presets(self):
    self.assertIs(preset("Qwen3-8B"), PRESETS["Qwen3-8B"])
    self.refused("unknown preset 'x'; presets: Qwen3.8-27B", preset, "x")


class SystemTest(ConfigTestCase):
  @parameterized.parameters("num_drafts", "node_budget", "tree_depth")
  def test_counts(self, name):
    for value in NOT_AN_INTEGER:
      self.refused(f"{name} must be an integer", SystemConfig,
                   **{name: value})  # fmt: skip
    for value in (0, -1):
      self.refused(f"{name} must be at least 1", SystemConfig,
                   **{name: value})  # fmt: skip
    settings: dict[str, Any] = {name: 3}
    system = SystemConfig(**settings)
    self.assertEqual(getattr(system, name), 3)

  def test_largest_tree(self):
    SystemConfig(node_budget=128)
    self.refused("node_budget must be at most 128, got 129", SystemConfig,
                 node_budget=129)  # fmt: skip

  def test_tree(self):
    for value in (None, "", "best-first", ["chain"]):
      self.refused("tree .* chain, best_first, marginal", SystemConfig,
                   tree=value)  # fmt: skip

  def test_rejection_is_for_chains(self):
    for tree in ("best_first", "marginal"):
      system = SystemConfig(acceptance="rejection", tree=tree)
      system.check_temperature(0.0)  # Both rules are the same there.
      self.refused(
        f"temperature 0.7 is for chains, not for tree={tree}; .*=match",
        system.check_temperature,
        0.7,
      )
      SystemConfig(tree=tree).check_temperature(0.7)
    SystemConfig(acceptance="rejection").check_temperature(0.7)

  def test_for_batches(self):
    for name in ("shared_budget", "dynamic_draft", "prompt_admission"):
      for value in (None, True, "yes"):
        self.refused(f"{name} .* is not one of off, on", SystemConfig,
                     **{name: value})  # fmt: skip
    self.refused("shared_nodes=9 conflicts with shared_budget=off",
                 SystemConfig, shared_nodes=9)  # fmt: skip
    SystemConfig(shared_budget="on", shared_nodes=9)
    SystemConfig().check_alone()
    for name in ("shared_budget", "dynamic_draft", "prompt_admission"):
      settings: dict[str, Any] = {name: "on"}
      self.refused(f"{name}=on is for several requests at once",
                   SystemConfig(**settings).check_alone)  # fmt: skip

  def test_acceptance(self):
    for value in (None, "", 3, ["match"]):
      self.refused("acceptance", SystemConfig, acceptance=value)

  @parameterized.parameters("num_slots", "max_ngram", "min_ngram")
  def test_prompt_lookup(self, setting):
    for value in (*NOT_AN_INTEGER, None):
      self.refused(f"prompt_lookup: {setting} must be an integer",
                   PromptLookup, **{setting: value})  # fmt: skip


if __name__ == "__main__":
  absltest.main()
