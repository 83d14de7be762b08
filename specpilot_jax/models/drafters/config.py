"""Shapes of learned drafters, and their `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from specpilot_jax import configs
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.yarn import Yarn

# Fields that say nothing about the function that a drafter computes.
_INERT = frozenset({
  "_name_or_path", "architectures", "attention_dropout", "auto_map", "dtype",
  "initializer_range", "layer_types", "max_window_layers", "model_type",
  "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
  "bos_token_id", "eos_token_id", "tie_word_embeddings",
})  # fmt: skip
_FIXED = {
  "attention_bias": (False,),
  "hidden_act": ("silu",),
  "is_causal": (False,),
  "rope_scaling": (None,),
}
_READ = frozenset({
  "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
  "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
  "rope_theta", "rope_parameters", "max_position_embeddings",
  "num_target_layers", "dflash_config", "use_sliding_window",
  "sliding_window",
})  # fmt: skip
_EITHER = frozenset({"target_layer_ids", "mask_token_id", "block_size"})
"""Fields that stand in `dflash_config` or beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
  """Shape of a block-diffusion drafter.

  Attributes:
    name: for reports.
    vocab_size, hidden_size: of its target, whose embedding and lm_head it
      uses.
    intermediate_size, num_layers, num_heads, num_kv_heads, head_dim,
    rope_theta, norm_eps: of its Qwen3-style layers.
    block_size: slots of a block, the anchor's included.
    mask_token_id: input token of the other slots.
    target_layers: taps; the residual stream after these target layers.
    num_target_layers: layers of the target that it was trained for.
    sliding_window: context tokens that it sees at most; None for all.
    yarn: scaling of its rotary embeddings, if any.
  """

  kind: ClassVar[str] = "dflash"
  architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)
  own: ClassVar[tuple[str, ...]] = ()
  """Attributes that are fields of `config.json` under the same name."""
  fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
  """Fields that this implementation supports at some values alone."""
  inert: ClassVar[frozenset[str]] = frozenset()

  name: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  norm_eps: float
  block_size: int
  mask_token_id: int
  target_layers: tuple[int, ...]
  num_target_layers: int
  sliding_window: int | None = None
  yarn: Yarn | None = None

  def __post_init__(self):
    def check(good, what):
      if not good:
        raise SpecPilotError(f"{self.name}: {what}")

    check(self.block_size >= 2, f"block_size {self.block_size} is below 2")
    check(
      self.num_heads % self.num_kv_heads == 0,
      f"num_heads {self.num_heads} is not a multiple of num_kv_heads"
      f" {self.num_kv_heads}",
    )
    check(
      0 <= self.mask_token_id < self.vocab_size,
      f"mask token {self.mask_token_id} is outside the vocabulary of"
      f" {self.vocab_size}",
    )
    check(len(self.target_layers) > 0, "target_layer_ids is empty")
    for tap in self.target_layers:
      check(
        0 <= tap < self.num_target_layers,
        f"target layer {tap} is not one of {self.num_target_layers}",
      )

  def check_target(self, target: ModelConfig) -> None:
    """Raises where the drafter was made for another target."""
    for field, own, other in (
      ("vocab_size", self.vocab_size, target.vocab_size),
      ("hidden_size", self.hidden_size, target.hidden_size),
      ("number of layers", self.num_target_layers, target.num_layers),
    ):
      if own != other:
        raise SpecPilotError(
          f"drafter {self.name} is for a target whose {field} is {own},"
          f" {target.name} has {other}"
        )

  def shape(self) -> dict[str, Any]:
    """All but its name, for a drafter of another kind that is like it."""
    shape = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    del shape["name"]
    return shape

  @property
  def num_slots(self) -> int:
    """Drafts of a block: the predictions of its last so many rows."""
    return self.block_size - 1

  @classmethod
  def from_hf(cls, config: Mapping[str, Any], name: str) -> "DrafterConfig":
    """Reads a released `config.json`; unknown fields are refused.

    Returns:
      A config of the class that its `architectures` name, of this one where
      there are none.
    """
    classes = {a: c for c in _classes(cls) for a in c.architectures}
    for architecture in config.get("architectures") or ():
      if architecture not in classes:
        raise SpecPilotError(
          f"{name}: architecture {architecture!r} is not one of"
          f" {', '.join(classes)}"
        )
      return classes[architecture]._read(config, name)
    return cls._read(config, name)

  @classmethod
  def _read(cls, config: Mapping[str, Any], name: str) -> Self:
    nested = dict(config.get("dflash_config") or {})
    either = _EITHER | cls.fixed.keys() | cls.inert | set(cls.own)
    for known, fields, prefix in (
      (_READ | _INERT | _FIXED.keys() | either, config, ""),
      (either, nested, "dflash_config."),
    ):
      for field in sorted(set(fields) - set(known)):
        raise SpecPilotError(f"{name}: unknown config field {prefix}{field}")
    for field in sorted(nested.keys() & config.keys()):
      if nested[field] != config[field]:
        raise SpecPilotError(
          f"{name}: {field} is {config[field]!r}, and {nested[field]!r} in"
          " dflash_config"
        )
    everything = {**config, **nested}
    for field, allowed in {**_FIXED, **cls.fixed}.items():
      if field in everything and everything[field] not in allowed:
        raise SpecPilotError(
          f"{name}: {field}={everything[field]!r} is not supported"
        )
    if str(config.get("dtype") or config.get("torch_dtype")) == "float16":
      raise SpecPilotError(
        f"{name}: float16 drafters overflow; convert it to bfloat16"
      )

    def need(field):
      if everything.get(field) is None:
        raise SpecPilotError(f"{name}: config field {field!r} is missing")
      return everything[field]

    theta, yarn = _rope(config, name)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
      window = None
    return cls(
      name=name,
      vocab_size=need("vocab_size"),
      hidden_size=need("hidden_size"),
      intermediate_size=need("intermediate_size"),
      num_layers=need("num_hidden_layers"),
      num_heads=need("num_attention_heads"),
      num_kv_heads=need("num_key_value_heads"),
      head_dim=need("head_dim"),
      rope_theta=theta,
      norm_eps=float(need("rms_norm_eps")),
      block_size=need("block_size"),
      mask_token_id=need("mask_token_id"),
      target_layers=tuple(need("target_layer_ids")),
      num_target_layers=need("num_target_layers"),
      sliding_window=window,
      yarn=yarn,
      **{field: need(field) for field in cls.own},
    )

  def _rope_fields(self) -> dict[str, Any]:
    if self.yarn is None:
      return {"rope_theta": self.rope_theta}
    yarn = dataclasses.asdict(self.yarn)
    fields = {"rope_type": "yarn", "rope_theta": self.rope_theta} | yarn
    return {"rope_parameters": fields}

  def to_hf(self) -> dict[str, Any]:
    """The released layout's `config.json`."""
    return {
      "architectures": list(self.architectures[:1]),
      "model_type": "qwen3",
      "dtype": "bfloat16",
      "vocab_size": self.vocab_size,
      "hidden_size": self.hidden_size,
      "intermediate_size": self.intermediate_size,
      "num_hidden_layers": self.num_layers,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "rms_norm_eps": self.norm_eps,
      **self._rope_fields(),
      "hidden_act": "silu",
      "attention_bias": False,
      "is_causal": False,
      "use_sliding_window": self.sliding_window is not None,
      "sliding_window": self.sliding_window,
      "block_size": self.block_size,
      "num_target_layers": self.num_target_layers,
      "dflash_config": {
        "target_layer_ids": list(self.target_layers),
        "mask_token_id": self.mask_token_id,
      },
    }


def _rope(config: Mapping[str, Any], name: str) -> tuple[float, Yarn | None]:
  """Base of the wavelengths, and their scaling."""
  rope = dict(config.get("rope_parameters") or {})
  kind = rope.pop("rope_type", "default")
  if kind not in ("default", "yarn"):
    raise SpecPilotError(f"{name}: rope_type {kind!r} is not supported")
  theta = rope.pop("rope_theta", config.get("rope_theta"))
  if theta is None:
    raise SpecPilotError(f"{name}: config field 'rope_theta' is missing")
  fields = {f.name: f for f in dataclasses.fields(Yarn)}
  for field in sorted(rope.keys() - (fields if kind == "yarn" else {})):
    raise SpecPilotError(
      f"{name}: unknown config field rope_parameters.{field}"
    )
  if kind == "default":
    return float(theta), None
  rope = {field: value for field, value in rope.items() if value is not None}
  for field, described in fields.items():
    if described.default is dataclasses.MISSING and field not in rope:
      raise SpecPilotError(
        f"{name}: config field rope_parameters.{field} is missing"
      )
  yarn = Yarn(**rope)
  if yarn.factor < 1:
    raise SpecPilotError(f"{name}: YaRN factor {yarn.factor} is below 1")
  return float(theta), yarn


def _classes(base: type[DrafterConfig]) -> tuple[type[DrafterConfig], ...]:
  return (base, *base.__subclasses__())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
  """Shape of a DFlash2 drafter.

  Attributes:
    conv_group_size: consecutive channels that share a dynamic kernel.
    selector_rank: of the factors of the selector's table.
    selector_top_k: candidates per slot.
  """

  kind = "dflash2"
  architectures = ("DFlash2DraftModel",)
  own = ("conv_group_size", "selector_rank", "selector_top_k")
  fixed = {
    "conv_kernel_size": (2,),
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
  }

  conv_group_size: int
  selector_rank: int
  selector_top_k: int

  def __post_init__(self):
    super().__post_init__()
    if self.selector_rank < 1:
      raise SpecPilotError(
        f"{self.name}: selector_rank {self.selector_rank} is below 1"
      )
    if self.hidden_size % self.conv_group_size:
      raise SpecPilotError(
        f"{self.name}: hidden_size {self.hidden_size} is not a multiple of"
        f" conv_group_size {self.conv_group_size}"
      )
    if not 1 <= self.selector_top_k <= self.vocab_size:
      raise SpecPilotError(
        f"{self.name}: selector_top_k {self.selector_top_k} is not within the"
        f" vocabulary of {self.vocab_size}"
      )

  @property
  def conv_groups(self) -> int:
    return self.hidden_size // self.conv_group_size

  def to_hf(self) -> dict[str, Any]:
    config = super().to_hf()
    config["dflash_config"] |= {"conv_kernel_size": 2}
    config["dflash_config"] |= {
      field: getattr(self, field) for field in self.own
    }
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(DrafterConfig):
  """Shape of a DSpark drafter.

  Attributes:
    markov_rank: of the factors of the Markov head's table.
  """

  kind = "dspark"
  architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
  own = ("markov_rank",)
  fixed = {
    "sample_from_anchor": (True,),
    "markov_head_type": ("vanilla",),
    "enable_confidence_head": (True,),
    "confidence_head_with_markov": (True,),
    "projector_type": ("dspark",),
  }
  inert = frozenset({"num_anchors"})

  markov_rank: int

  def __post_init__(self):
    super().__post_init__()
    if self.markov_rank < 1:
      raise SpecPilotError(
        f"{self.name}: markov_rank {self.markov_rank} is below 1"
      )

  @property
  def num_slots(self) -> int:
    """The anchor's row predicts too."""
    return self.block_size

  def to_hf(self) -> dict[str, Any]:
    config = super().to_hf() | {
      field: getattr(self, field) for field in self.own
    }
    return config | {
      field: allowed[0]
      for field, allowed in self.fixed.items()
      if field != "projector_type"
    }


def _dflash(target: str, **shape: Any) -> DrafterConfig:
  """A preset: block 16 and heads of 128, four query heads per kv head."""
  config = configs.PRESETS[target]
  return DrafterConfig(
    name=f"{target}-DFlash",
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=config.intermediate_size,
    head_dim=128,
    rope_theta=config.rope_theta,
    norm_eps=config.norm_eps,
    block_size=16,
    num_target_layers=config.num_layers,
    **shape,
  )


PRESETS: dict[str, DrafterConfig] = {
  "Qwen3.8-27B": _dflash(
    "Qwen3.8-27B",
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    mask_token_id=248070,
    target_layers=(5, 19, 33, 47, 61),
    sliding_window=2048,
  ),
  "hybrid-1280": _dflash(
    "hybrid-1280",
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    mask_token_id=3,
    target_layers=(1, 5, 8, 9, 10),
    sliding_window=384,
  ),
}
"""DFlash drafters by the preset of their target (`configs.PRESETS`)."""


def _dflash2(target: str, **shape: Any) -> DFlash2Config:
  return DFlash2Config(
    name=f"{target}-DFlash2",
    conv_group_size=16,
    selector_top_k=16,
    **(PRESETS[target].shape() | shape),
  )


def _dspark(target: str, **shape: Any) -> DSparkConfig:
  return DSparkConfig(
    name=f"{target}-DSpark", **(PRESETS[target].shape() | shape)
  )


KINDS: dict[str, type[DrafterConfig]] = {
  config.kind: config for config in (DrafterConfig, DFlash2Config, DSparkConfig)
}

PRESETS_BY_KIND: dict[str, dict[str, DrafterConfig]] = {
  DrafterConfig.kind: PRESETS,
  DFlash2Config.kind: {
    "Qwen3.8-27B": _dflash2("Qwen3.8-27B", block_size=8, selector_rank=256),
    "hybrid-1280": _dflash2("hybrid-1280", selector_rank=128),
  },
  DSparkConfig.kind: {
    "Qwen3.8-27B": _dspark(
      "Qwen3.8-27B",
      block_size=7,
      sliding_window=None,
      yarn=Yarn(factor=32, original_max_position_embeddings=8192),
      markov_rank=256,
    ),
    "hybrid-1280": _dspark("hybrid-1280", markov_rank=128),
  },
}
"""By kind, then as `PRESETS`; those of the 27B have the released blocks."""
