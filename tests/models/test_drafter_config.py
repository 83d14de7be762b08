"""`config.json` of released drafters: what is read, and what is refused."""

import dataclasses
from typing import Any

from absl.testing import absltest, parameterized

from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import config as config_lib
from specpilot_jax.models.drafters.config import DrafterConfig

COMMON: dict[str, Any] = {
  "model_type": "qwen3",
  "dtype": "bfloat16",
  "vocab_size": 248320,
  "hidden_size": 5120,
  "intermediate_size": 17408,
  "num_hidden_layers": 5,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "rms_norm_eps": 1e-6,
  "hidden_act": "silu",
  "attention_bias": False,
  "max_position_embeddings": 262144,
  "num_target_layers": 64,
  "tie_word_embeddings": False,
}
TAPS = [5, 19, 33, 47, 61]
RELEASED: dict[str, dict[str, Any]] = {
  "dflash2": COMMON
  | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "sliding_window": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "dflash_config": {
      "block_size": 8,
      "conv_kernel_size": 2,
      "conv_group_size": 16,
      "selector_rank": 256,
      "selector_top_k": 16,
      "mask_token_id": 248070,
      "target_layer_ids": TAPS,
    },
  },
  "dspark": COMMON
  | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 7,
    "layer_types": ["full_attention"] * 5,
    "markov_rank": 256,
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 10000000,
      "factor": 32,
      "original_max_position_embeddings": 8192,
      "beta_fast": 32,
      "beta_slow": 1,
    },
    "dflash_config": {
      "projector_type": "dspark",
      "mask_token_id": 248070,
      "target_layer_ids": TAPS,
    },
  },
}


def edited(kind, field, value):
  """A released file with a field of it, or of `dflash_config`, changed."""
  config = dict(RELEASED[kind])
  nested = dict(config["dflash_config"])
  (nested if field in nested else config)[field] = value
  return config | {"dflash_config": nested}


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(*RELEASED)
  def test_released_shapes_are_the_presets(self, kind):
    preset = config_lib.PRESETS_BY_KIND[kind]["Qwen3.8-27B"]
    self.assertEqual(DrafterConfig.from_hf(RELEASED[kind], preset.name), preset)

  @parameterized.parameters(
    *(
      config
      for presets in config_lib.PRESETS_BY_KIND.values()
      for config in presets.values()
    )
  )
  def test_round_trip(self, config):
    back = DrafterConfig.from_hf(config.to_hf(), config.name)
    self.assertEqual(back, config)
    self.assertIs(type(back), type(config))

  def test_fields_of_the_training_code(self):
    """DeepSpec writes them side by side, without `dflash_config`."""
    config = dict(RELEASED["dspark"])
    nested = config.pop("dflash_config")
    del nested["projector_type"]
    config |= nested | {
      "architectures": ["Qwen3DSparkModel"],
      "markov_head_type": "vanilla",
      "enable_confidence_head": True,
      "confidence_head_with_markov": True,
      "sample_from_anchor": True,
      "num_anchors": 512,
    }
    preset = config_lib.PRESETS_BY_KIND["dspark"]["Qwen3.8-27B"]
    self.assertEqual(DrafterConfig.from_hf(config, preset.name), preset)

  @parameterized.parameters(
    ("dflash2", "surprise", 1, "unknown config field surprise"),
    ("dflash2", "markov_rank", 4, "unknown config field markov_rank"),
    ("dspark", "selector_rank", 4, "unknown config field selector_rank"),
    ("dflash2", "conv_kernel_size", 3, "conv_kernel_size=3 is not supported"),
    ("dflash2", "output_multiplier", 2.0, "output_multiplier=2.0"),
    ("dflash2", "final_logit_softcapping", 30.0, "final_logit_softcapping"),
    ("dflash2", "selector_top_k", None, "'selector_top_k' is missing"),
    ("dflash2", "conv_group_size", 24, "not a multiple of conv_group_size"),
    ("dflash2", "selector_top_k", 0, "selector_top_k 0"),
    ("dspark", "sample_from_anchor", False, "sample_from_anchor=False"),
    ("dspark", "markov_head_type", "gated", "markov_head_type='gated'"),
    ("dspark", "projector_type", "dflash", "projector_type='dflash'"),
    ("dspark", "markov_rank", None, "'markov_rank' is missing"),
    ("dspark", "markov_rank", 0, "markov_rank 0 is below 1"),
    ("dflash2", "selector_rank", 0, "selector_rank 0 is below 1"),
    ("dspark", "architectures", ["LlamaForCausalLM"], "'LlamaForCausalLM'"),
  )
  def test_refused(self, kind, field, value, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      DrafterConfig.from_hf(edited(kind, field, value), "d")
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.parameters(
    ("rope_type", "linear", "rope_type 'linear' is not supported"),
    ("factor", None, "rope_parameters.factor is missing"),
    ("factor", 0.5, "factor 0.5 is below 1"),
    ("attention_factor", 1.5, "unknown config field rope_parameters.attention"),
    ("truncate", False, "unknown config field rope_parameters.truncate"),
  )
  def test_refused_rope(self, field, value, pattern):
    rope = dict(RELEASED["dspark"]["rope_parameters"]) | {field: value}
    config = RELEASED["dspark"] | {"rope_parameters": rope}
    with self.assertRaisesRegex(SpecPilotError, pattern):
      DrafterConfig.from_hf(config, "d")

  def test_a_field_said_twice(self):
    config = RELEASED["dflash2"] | {"block_size": 8}
    self.assertEqual(DrafterConfig.from_hf(config, "d").block_size, 8)
    with self.assertRaisesRegex(
      SpecPilotError, "block_size is 7, and 8 in dflash_config"
    ):
      DrafterConfig.from_hf(config | {"block_size": 7}, "d")

  def test_slots(self):
    dflash, dflash2, dspark = (
      dataclasses.replace(presets["hybrid-1280"], block_size=16)
      for presets in config_lib.PRESETS_BY_KIND.values()
    )
    self.assertEqual(
      [c.num_slots for c in (dflash, dflash2, dspark)], [15, 15, 16]
    )


if __name__ == "__main__":
  absltest.main()
