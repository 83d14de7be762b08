"""Hugging Face `config.json`: reading and writing `ModelConfig`.

Every field is accounted for: read, known to say nothing about the function in
inference, accepted with one value only, or refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specpilot_jax.configs import (
  ATTENTION,
  GDN,
  ModelConfig,
  is_integer,
  is_positive,
)
from specpilot_jax.errors import SpecPilotError

# Fields of config.json that say nothing about the function computed in
# inference (initialisation, training, bookkeeping, where to find code).
_INERT = frozenset({
  "_name_or_path", "architectures", "attention_dropout", "auto_map",
  "chunk_size_feed_forward", "dtype", "initializer_range", "is_decoder",
  "is_encoder_decoder", "is_llama_config", "language_model_only",
  "max_window_layers", "model_type", "output_attentions",
  "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
  "return_dict", "torch_dtype", "transformers.js_config",
  "transformers_version", "use_cache", "mtp_num_hidden_layers",
  "mtp_use_dedicated_embeddings", "full_attention_interval", "id2label",
  "label2id", "cross_attention_hidden_size", "add_cross_attention",
  "tie_encoder_decoder", "num_return_sequences", "mamba_ssm_dtype",
})  # fmt: skip

# Fields that are accepted only with these values: anything else would change
# the function.
_FIXED: dict[str, tuple[Any, ...]] = {
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "hidden_act": ("silu",),
  "use_sliding_window": (False, None),
  "sliding_window": (None,),
  "output_gate_type": ("swish", "silu", None),
  "attn_output_gate": (True,),
  "rope_scaling": (None,),
  "rope_interleaved": (False,),
  "mlp_only_layers": ([], None),
}

# Of these, what dense models do not have.
_HYBRID_ONLY = frozenset({"output_gate_type", "attn_output_gate"})

_SHARED = frozenset({
  "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
  "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
  "rope_theta", "rope_parameters", "tie_word_embeddings",
  "max_position_embeddings", "bos_token_id", "eos_token_id", "layer_types",
})  # fmt: skip
_FAMILY_FIELDS = {
  "qwen3_5": _SHARED | {
    "partial_rotary_factor", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
  },
  "qwen3": _SHARED,
  "llama": _SHARED,
}  # fmt: skip
_MODEL_TYPES = {
  "qwen3_5": "qwen3_5",
  "qwen3_5_text": "qwen3_5",
  "qwen3": "qwen3",
  "llama": "llama",
}
# Fields of the multimodal wrapper beside `text_config`.
_WRAPPER = frozenset({
  "vision_config", "text_config", "image_token_id", "video_token_id",
  "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings",
  "eos_token_id", "bos_token_id",
})  # fmt: skip
_LAYER_TYPES = {"linear_attention": GDN, "full_attention": ATTENTION}


def from_hf(config: Mapping[str, Any], name: str) -> ModelConfig:
  """Reads a parsed `config.json`; see `ModelConfig.from_hf`."""
  try:
    return _from_hf(_unwrapped(dict(config), name), name)
  except SpecPilotError:
    raise
  except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
    # A field of the wrong type, say a list where a string belongs.
    raise SpecPilotError(f"{name}: malformed config ({error})") from None


def _unwrapped(config: dict[str, Any], name: str) -> dict[str, Any]:
  """The text-only config inside a multimodal one."""
  if "text_config" not in config:
    return config
  _refuse_unknown(config, _WRAPPER | _INERT, name)
  text = config["text_config"]
  if not isinstance(text, Mapping):
    raise SpecPilotError(f"{name}: text_config is not a mapping")
  outer = config.get("model_type")
  text = {"model_type": f"{outer}_text", **text}
  families = {
    _MODEL_TYPES.get(str(kind)) for kind in (outer, text["model_type"])
  }
  if len(families) > 1:
    raise SpecPilotError(
      f"{name}: model_type {outer!r} holds a text_config of model_type"
      f" {text['model_type']!r}, which is not supported"
    )
  # The wrapper's end-of-turn ids are the ones that generation uses.
  for field in ("eos_token_id", "bos_token_id", "tie_word_embeddings"):
    if config.get(field) is not None:
      text[field] = config[field]
  return text


def _from_hf(config: dict[str, Any], name: str) -> ModelConfig:
  model_type = config.get("model_type")
  family = _MODEL_TYPES.get(str(model_type))
  if family is None:
    raise SpecPilotError(
      f"{name}: model_type {model_type!r} is not supported; supported:"
      f" {', '.join(sorted(_MODEL_TYPES))}"
    )
  hybrid = family == "qwen3_5"
  fixed = _FIXED.keys() - (frozenset() if hybrid else _HYBRID_ONLY)
  _refuse_unknown(config, _FAMILY_FIELDS[family] | _INERT | fixed, name)
  for field in sorted(fixed & config.keys()):
    value, allowed = config[field], _FIXED[field]
    # 0 is not False here.
    if not any(type(value) is type(a) and value == a for a in allowed):
      raise SpecPilotError(
        f"{name}: {field}={value!r} is not supported (only"
        f" {', '.join(repr(a) for a in allowed)})"
      )

  wanted = {
    is_integer: "positive integer",
    is_positive: "finite number above 0",
  }

  def need(field, good=is_integer, fields=config):
    value = fields.get(field)
    if value is None:
      raise SpecPilotError(f"{name}: config field {field!r} is missing")
    if not good(value) or value <= 0:
      raise SpecPilotError(
        f"{name}: config field {field!r} must be a {wanted[good]}, got"
        f" {value!r}"
      )
    return value

  heads = need("num_attention_heads")
  # Where `head_dim` is absent, the families differ in their defaults.
  default_dim = {"qwen3_5": 256, "qwen3": 128, "llama": None}[family]
  head_dim = (
    need("head_dim")
    if config.get("head_dim") is not None
    else default_dim or need("hidden_size") // heads
  )
  num_layers = need("num_hidden_layers")
  theta, partial = _rope(config, hybrid, need, name)
  layer_types = config.get("layer_types")
  if layer_types is None:
    interval = 1
    if hybrid:
      interval = need(
        "full_attention_interval",
        fields={"full_attention_interval": 4} | config,
      )
    layer_types = [
      "linear_attention" if (i + 1) % interval else "full_attention"
      for i in range(num_layers)
    ]
  if not _is_list(layer_types):
    raise SpecPilotError(f"{name}: layer_types is not a list")
  if len(layer_types) != num_layers:
    raise SpecPilotError(
      f"{name}: layer_types has {len(layer_types)} entries,"
      f" num_hidden_layers says {num_layers}"
    )
  for layer_type in layer_types:
    supported = list(_LAYER_TYPES) if hybrid else ["full_attention"]
    if layer_type not in supported:
      raise SpecPilotError(
        f"{name}: layer type {layer_type!r} is not supported for {family}"
      )
  eos = config.get("eos_token_id")
  eos_ids = () if eos is None else tuple(eos) if _is_list(eos) else (eos,)
  tied = config.get("tie_word_embeddings")
  if not (tied is None or isinstance(tied, bool)):
    raise SpecPilotError(
      f"{name}: tie_word_embeddings must be true or false, got {tied!r}"
    )
  gdn = {}
  if hybrid:
    gdn = dict(
      gdn_num_key_heads=need("linear_num_key_heads"),
      gdn_num_value_heads=need("linear_num_value_heads"),
      gdn_key_head_dim=need("linear_key_head_dim"),
      gdn_value_head_dim=need("linear_value_head_dim"),
      gdn_conv_kernel=need("linear_conv_kernel_dim"),
    )
  return ModelConfig(
    name=name,
    family=family,
    vocab_size=need("vocab_size"),
    hidden_size=need("hidden_size"),
    intermediate_size=need("intermediate_size"),
    layer_types=tuple(_LAYER_TYPES[t] for t in layer_types),
    num_heads=heads,
    num_kv_heads=heads
    if config.get("num_key_value_heads") is None
    else need("num_key_value_heads"),
    head_dim=head_dim,
    rotary_dim=int(head_dim * partial),
    rope_theta=float(theta),
    norm_eps=float(need("rms_norm_eps", is_positive)),
    tie_embeddings=bool(tied),
    context_length=need("max_position_embeddings"),
    qk_norm=family != "llama",
    attention_gate=hybrid,
    zero_centered_norm=hybrid,
    bos_token_id=config.get("bos_token_id"),
    eos_token_ids=eos_ids,
    **gdn,
  )


def _rope(config, hybrid, need, name) -> tuple[float, float]:
  """(base, share of a head that rotates), wherever the config says them."""
  rope = config.get("rope_parameters")
  rope = {} if rope is None else rope
  if not isinstance(rope, Mapping):
    raise SpecPilotError(f"{name}: rope_parameters is not a mapping")
  known = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
  if hybrid:
    # Multimodal RoPE sections: with text alone all three position ids are
    # equal, so that this is plain RoPE.
    known |= {"mrope_interleaved", "mrope_section"}
  for field in sorted(rope.keys() - known):
    raise SpecPilotError(
      f"{name}: unknown config field 'rope_parameters.{field}'"
    )
  for field in ("rope_type", "type"):
    if rope.get(field, "default") != "default":
      raise SpecPilotError(
        f"{name}: {field} {rope[field]!r} of rope_parameters is not supported"
        " (only 'default')"
      )

  def either(field, default=None):
    said = [f[field] for f in (rope, config) if f.get(field) is not None]
    values = [need(field, is_positive, {field: v}) for v in said or [default]]
    if values[0] != values[-1]:
      raise SpecPilotError(
        f"{name}: {field}={values[1]!r} contradicts rope_parameters.{field}="
        f"{values[0]!r}"
      )
    return values[0]

  theta = either("rope_theta")
  partial = either("partial_rotary_factor", 0.25 if hybrid else 1.0)
  if partial > 1 or (partial < 1 and not hybrid):
    raise SpecPilotError(
      f"{name}: partial_rotary_factor {partial!r} is not supported (only"
      f" {'0 to 1' if hybrid else '1'})"
    )
  return theta, partial


def _is_list(value) -> bool:
  return isinstance(value, (list, tuple))


def _refuse_unknown(config, known, name) -> None:
  unknown = sorted(set(config) - set(known))
  if unknown:
    raise SpecPilotError(f"{name}: unknown config field {unknown[0]!r}")


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """The `config.json` (text-only form) that `ModelConfig.from_hf` reads back.

  `tokenizer_size` has no field there; it comes back with the tokenizer.

  Args:
    config: the model.
    dtype: 'bfloat16', 'float16' or 'float32'.

  Raises:
    SpecPilotError: settings that the family's Hugging Face classes do not
      have.
  """
  hybrid = config.family == "qwen3_5"
  model_type, architecture = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
  }[config.family]
  rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
  if hybrid:
    rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
  eos = list(config.eos_token_ids)
  fields: dict[str, Any] = {
    "architectures": [architecture],
    "attention_bias": False,
    "bos_token_id": config.bos_token_id,
    "dtype": dtype,
    "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "max_position_embeddings": config.context_length,
    "model_type": model_type,
    "num_attention_heads": config.num_heads,
    "num_hidden_layers": config.num_layers,
    "num_key_value_heads": config.num_kv_heads,
    "rms_norm_eps": config.norm_eps,
    "rope_parameters": rope,
    "tie_word_embeddings": config.tie_embeddings,
    "vocab_size": config.vocab_size,
  }
  if config.family != "llama":
    fields["layer_types"] = [
      "linear_attention" if kind == GDN else "full_attention"
      for kind in config.layer_types
    ]
  if hybrid:
    fields |= {
      "linear_conv_kernel_dim": config.gdn_conv_kernel,
      "linear_key_head_dim": config.gdn_key_head_dim,
      "linear_num_key_heads": config.gdn_num_key_heads,
      "linear_num_value_heads": config.gdn_num_value_heads,
      "linear_value_head_dim": config.gdn_value_head_dim,
    }
  back = from_hf(fields, config.name)
  for field in dataclasses.fields(config):
    if field.name == "tokenizer_size":
      continue
    ours, theirs = (getattr(c, field.name) for c in (config, back))
    if ours != theirs:
      raise SpecPilotError(
        f"{config.name}: {field.name}={ours!r} cannot be written as a"
        f" {model_type} config (it would read as {theirs!r})"
      )
  return fields
