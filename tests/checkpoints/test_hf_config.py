"""config.json field by field: nothing malformed passes or ends in a traceback.

Python's JSON reader takes NaN and Infinity, so they can stand in a file.
"""

import json
import math
from typing import Any

from absl.testing import absltest, parameterized

from specpilot_jax.checkpoints import hf_config
from specpilot_jax.configs import FAMILIES, ModelConfig
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders

NOT_A_POSITIVE_INTEGER: tuple[Any, ...] = (
  0, -1, 2.0, 2.5, math.nan, math.inf, True, "2", [2], {}
)  # fmt: skip
NOT_A_POSITIVE_NUMBER: tuple[Any, ...] = (
  0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-60, 10**400,
  True, "1.5", [1.5], {},
)  # fmt: skip
NOT_A_BOOL: tuple[Any, ...] = ("false", "", 0, 1, 1.0, [], {})


def fields(family="qwen3_5") -> dict[str, Any]:
  """A valid config of the family."""
  return hf_config.to_hf(builders.config(family), "bfloat16")


class HfConfigTest(parameterized.TestCase):
  def refused(self, config, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      ModelConfig.from_hf(config, "m")
    text = str(caught.exception)
    self.assertLen(text.splitlines(), 1)
    self.assertStartsWith(text, "m: ")
    self.assertNotIn("malformed config", text)

  @parameterized.parameters(
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
  )  # fmt: skip
  def test_counts(self, field):
    for value in NOT_A_POSITIVE_INTEGER:
      self.refused(fields() | {field: value}, f"'{field}' must be a positive")

  def test_attention_interval(self):
    config = fields()
    del config["layer_types"]
    for value in NOT_A_POSITIVE_INTEGER:
      self.refused(
        config | {"full_attention_interval": value},
        "'full_attention_interval' must be a positive",
      )
    read = ModelConfig.from_hf(config | {"full_attention_interval": 2}, "m")
    self.assertEqual(read.layer_types, ("gdn", "attention"))

  def test_numbers(self):
    for value in NOT_A_POSITIVE_NUMBER:
      self.refused(
        fields() | {"rms_norm_eps": value}, "'rms_norm_eps' must be a finite"
      )
      for field in ("rope_theta", "partial_rotary_factor"):
        pattern = f"'{field}' must be a finite"
        config = fields()
        config["rope_parameters"][field] = value
        self.refused(config, pattern)
        # At the top, alone and beside one that is right.
        self.refused(fields() | {field: value}, pattern)
        del config["rope_parameters"][field]
        self.refused(config | {field: value}, pattern)

  @parameterized.parameters(*FAMILIES)
  def test_rope_in_both_places(self, family):
    config = fields(family)
    theta = config["rope_parameters"]["rope_theta"]
    same = ModelConfig.from_hf(config | {"rope_theta": theta}, "m")
    self.assertEqual(same, ModelConfig.from_hf(config, "m"))
    self.refused(
      config | {"rope_theta": 5.0},
      "rope_theta=5.0 contradicts rope_parameters.rope_theta=10000.0",
    )
    only_top = {k: v for k, v in config.items() if k != "rope_parameters"}
    if family == "qwen3_5":
      only_top["partial_rotary_factor"] = 0.5
      self.refused(
        config | {"partial_rotary_factor": 0.25},
        "partial_rotary_factor=0.25 contradicts",
      )
    read = ModelConfig.from_hf(only_top | {"rope_theta": theta}, "m")
    self.assertEqual(read, same)
    self.refused(only_top, "'rope_theta' is missing")

  def test_share_that_rotates(self):
    for family, share in (("qwen3_5", 1.5), ("qwen3", 0.5), ("llama", 0.5)):
      config = fields(family)
      config["rope_parameters"]["partial_rotary_factor"] = share
      self.refused(config, f"partial_rotary_factor {share} is not supported")

  @parameterized.parameters(
    (dict(rope_type="yarn"), "rope_type 'yarn'"),
    (dict(type="yarn"), "type 'yarn'"),
    (dict(rope_type="default", type="yarn"), "type 'yarn'"),
    (dict(rope_type="yarn", type="default"), "rope_type 'yarn'"),
    (dict(rope_type=["default"]), "rope_type .'default'."),
    (dict(factor=2.0), "unknown config field 'rope_parameters.factor'"),
  )
  def test_rope_parameters(self, changes, pattern):
    config = fields()
    config["rope_parameters"] |= changes
    self.refused(config, pattern)
    config = fields()
    config["rope_parameters"] |= {"type": "default", "mrope_section": [1, 1, 2]}
    ModelConfig.from_hf(config, "m")

  @parameterized.parameters("x", 3, False, ([],), True)
  def test_not_a_mapping(self, value):
    self.refused(
      fields() | {"rope_parameters": value}, "rope_parameters is not a mapping"
    )
    self.refused(
      {"model_type": "qwen3_5", "text_config": value},
      "text_config is not a mapping",
    )

  def test_bools(self):
    for value in NOT_A_BOOL:
      self.refused(
        fields() | {"tie_word_embeddings": value},
        "tie_word_embeddings must be true or false",
      )
      for field in ("attention_bias", "use_sliding_window", "attn_output_gate"):
        self.refused(fields() | {field: value}, f"{field}=.* is not supported")

  @parameterized.parameters("eos_token_id", "bos_token_id")
  def test_token_ids(self, field):
    for value in (True, False, 1.0, "2", -1, 300, {}, [[1]]):
      self.refused(fields() | {field: value}, f"{field[:3]} token id ")
    for value in ([True], [1, "2"], [1.5]):
      self.refused(fields() | {field: value}, f"{field[:3]} token id ")

  @parameterized.parameters(
    ("full_attention", "layer_types is not a list"),
    ({}, "layer_types is not a list"),
    (2, "layer_types is not a list"),
    (["full_attention"], "layer_types has 1 entries"),
    (["full_attention", "sliding_attention"], "'sliding_attention' is not"),
    (["full_attention", 1], "layer type 1 is not"),
    (["full_attention", ["full_attention"]], "layer type .* is not"),
  )
  def test_layer_types(self, value, pattern):
    self.refused(fields() | {"layer_types": value}, pattern)

  def test_what_dense_models_do_not_have(self):
    self.refused(
      fields("qwen3") | {"layer_types": ["full_attention", "linear_attention"]},
      "layer type 'linear_attention' is not supported for qwen3",
    )
    for field, value in (
      ("attn_output_gate", True),
      ("output_gate_type", "swish"),
      ("linear_num_key_heads", 2),
    ):
      self.refused(
        fields("llama") | {field: value}, f"unknown config field '{field}'"
      )
      ModelConfig.from_hf(fields() | {field: value}, "m")

  def test_wrappers(self):
    text = fields()
    wrapper = {"model_type": "qwen3_5", "text_config": text}
    plain = ModelConfig.from_hf(text, "m")
    self.assertEqual(ModelConfig.from_hf(wrapper, "m"), plain)
    self.refused(
      wrapper | {"model_type": "llama"},
      "'llama' holds a text_config of model_type 'qwen3_5_text'",
    )
    self.refused(
      wrapper | {"text_config": wrapper}, "unknown config field 'text_config'"
    )
    self.refused(
      wrapper | {"tie_word_embeddings": "false"}, "tie_word_embeddings must be"
    )
    without = {k: v for k, v in text.items() if k != "model_type"}
    read = ModelConfig.from_hf(wrapper | {"text_config": without}, "m")
    self.assertEqual(read, plain)

  @parameterized.parameters(*FAMILIES)
  def test_any_field_of_any_type(self, family):
    """Whatever stands in a field: it is read, or refused in one line."""
    config = fields(family)
    values = (None, True, 0, -1, 7, 1e300, math.nan, "x", "", [], ["x"], {})
    for field in config:
      for value in values:
        changed = json.loads(json.dumps(config | {field: value}))
        try:
          ModelConfig.from_hf(changed, "m")
        except SpecPilotError as error:
          self.assertLen(str(error).splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
