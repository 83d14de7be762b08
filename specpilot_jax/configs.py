"""Frozen configurations: target models, presets, systems.

A `ModelConfig` describes a target of one of three families:

* `qwen3_5`: the hybrid of Qwen3.5, 3.6 and 3.8 (three Gated DeltaNet layers,
  then one gated full-attention layer),
* `qwen3`: dense Qwen3,
* `llama`: Llama-style dense (SmolLM2).

`ModelConfig.from_hf` reads a Hugging Face `config.json` and refuses any field
it does not know, so that a checkpoint never loads with a setting ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specpilot_jax.errors import SpecPilotError

GDN = "gdn"
ATTENTION = "attention"
FAMILIES = ("qwen3_5", "qwen3", "llama")
DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape and equations of a target model.

  Attributes:
    name: preset name or the checkpoint's folder name; for reports only.
    family: one of `FAMILIES`.
    vocab_size: rows of the embedding and of the lm_head (padding included).
    tokenizer_size: ids at or above it are never proposed, sampled or
      accepted; None means `vocab_size`.
    hidden_size: width of the residual stream.
    intermediate_size: SwiGLU units.
    layer_types: `GDN` or `ATTENTION` for each layer.
    num_heads, num_kv_heads, head_dim: full attention.
    rotary_dim: leading dimensions of a head that rotate (even).
    rope_theta: RoPE base.
    norm_eps: epsilon of every RMSNorm.
    tie_embeddings: lm_head is the embedding.
    context_length: prompt plus output tokens at most.
    qk_norm: RMSNorm over head_dim on q and k before RoPE.
    attention_gate: q_proj carries a sigmoid output gate per head.
    zero_centered_norm: layer, final, q and k norms scale by (1 + weight).
    gdn_num_key_heads, gdn_num_value_heads, gdn_key_head_dim,
    gdn_value_head_dim, gdn_conv_kernel: Gated DeltaNet; 0 without GDN layers.
    bos_token_id: None where the model has none.
    eos_token_ids: ids that end a request unless `ignore_eos`.
  """

  name: str
  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  layer_types: tuple[str, ...]
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rotary_dim: int
  rope_theta: float
  norm_eps: float
  tie_embeddings: bool
  context_length: int
  qk_norm: bool
  attention_gate: bool
  zero_centered_norm: bool
  gdn_num_key_heads: int = 0
  gdn_num_value_heads: int = 0
  gdn_key_head_dim: int = 0
  gdn_value_head_dim: int = 0
  gdn_conv_kernel: int = 0
  tokenizer_size: int | None = None
  bos_token_id: int | None = None
  eos_token_ids: tuple[int, ...] = ()

  def __post_init__(self):
    _check(self)

  @property
  def num_layers(self) -> int:
    return len(self.layer_types)

  @property
  def valid_vocab(self) -> int:
    """Ids below this exist in the tokenizer."""
    return (
      self.vocab_size if self.tokenizer_size is None else self.tokenizer_size
    )

  @property
  def gdn_key_dim(self) -> int:
    return self.gdn_num_key_heads * self.gdn_key_head_dim

  @property
  def gdn_value_dim(self) -> int:
    return self.gdn_num_value_heads * self.gdn_value_head_dim

  @property
  def gdn_conv_dim(self) -> int:
    """Channels of the causal convolution: q, k and v together."""
    return 2 * self.gdn_key_dim + self.gdn_value_dim

  @classmethod
  def from_hf(cls, config: Mapping[str, Any], name: str) -> "ModelConfig":
    """Reads a Hugging Face `config.json` (parsed).

    Args:
      config: the parsed file; the multimodal wrapper of Qwen3.5 to 3.8
        (`text_config` inside) and text-only configs are both accepted.
      name: what the config is called in errors and reports.

    Raises:
      SpecPilotError: unsupported family, unknown field, missing field, or a
        field whose value this engine does not implement; the line names it.
    """
    # Imported here because that module is built on this one.
    from specpilot_jax.checkpoints import hf_config

    return hf_config.from_hf(config, name)


ACCEPTANCE_RULES = ("match", "rejection")
WEIGHTS = ("bf16", "w12", "fp8")
TREES = CHAIN, BEST_FIRST, MARGINAL = ("chain", "best_first", "marginal")
VERIFICATIONS = ONE_LEVEL, TWO_LEVEL, AUTO = ("one_level", "two_level", "auto")
VIEWS = ("midpoint", "truncated", "scaled")
DRAFTER_VIEWS = (EXACT := "exact", *VIEWS)
SWITCH = OFF, ON = ("off", "on")

MAX_NODES = 128
"""Nodes of a verify pass at most."""

DEFAULT_TREE_NODES = 32
"""Nodes of a tree whose budget is not set."""


def runs_on(weights: str, held: str) -> bool:
  """Whether a system runs on a target as it is held.

  Args:
    weights: of the system; `bf16` takes a model of FP8 codes as it was built.
    held: of the target.
  """
  return weights == held or (weights, held) == ("bf16", "fp8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
  """How a deployment decodes. With no arguments it is stock.

  Attributes:
    acceptance: `match` follows the target's own choice; `rejection` is
      speculative sampling against the drafter's law (chains, temperature
      above 0).
    num_drafts: drafts verified per pass at most; None verifies the drafter's
      whole block.
    tree: which candidates a pass verifies. `chain`: the drafter's first
      choices; `best_first`: a tree of the highest scores, each given the node's
      own parent; `marginal`: the same, blind to parents.
    node_budget: nodes of a pass at most, the anchor included; None is the
      whole block for a chain and `DEFAULT_TREE_NODES` for a tree.
    tree_depth: drafts of a path at most; None is all that the drafter offers.
    weights: `bf16` holds matrices as they were built; `w12` in 12 bits,
      without changing a bit of them; `fp8` in e4m3 codes, which makes another
      model of them.
    verification: `one_level` is one exact pass over the drafts; `two_level`
      looks at them with the 8-bit view of the weights first, drafts on from
      there, and gives all to the exact pass; `auto` does so in steps where it
      is expected to pay.
    level_one_passes: passes with the view at most, each over what the one
      before it and the drafter made of the drafts.
    view: what the view says of the mantissa bits that it cuts off: the
      `midpoint`, nothing (`truncated`), or nothing and products `scaled` up.
    drafter_view: what the drafter reads of its weights in W12, and of the head
      that it shares: all of them (`exact`), or a view as above.
    shared_budget: `on` gives a batch's pass a number of nodes for all requests,
      which go to the drafts with the highest path scores.
    shared_nodes: that number, anchors included; None chooses it by the load.
    dynamic_draft: `on` verifies 16, 12 or 8 positions of a request in a batch.
    prompt_admission: `on` lets chunks of prompts ride in a batch's passes.
  """

  acceptance: str = "match"
  num_drafts: int | None = None
  tree: str = CHAIN
  node_budget: int | None = None
  tree_depth: int | None = None
  weights: str = "bf16"
  verification: str = ONE_LEVEL
  level_one_passes: int = 1
  view: str = VIEWS[0]
  drafter_view: str = EXACT
  shared_budget: str = OFF
  shared_nodes: int | None = None
  dynamic_draft: str = OFF
  prompt_admission: str = OFF

  def __post_init__(self):
    for name, known in (
      ("shared_budget", SWITCH),
      ("dynamic_draft", SWITCH),
      ("prompt_admission", SWITCH),
      ("weights", WEIGHTS),
      ("acceptance", ACCEPTANCE_RULES),
      ("tree", TREES),
      ("verification", VERIFICATIONS),
      ("view", VIEWS),
      ("drafter_view", DRAFTER_VIEWS),
    ):
      value = getattr(self, name)
      if value not in known:
        raise SpecPilotError(
          f"{name} {value!r} is not one of {', '.join(known)}"
        )
    for name, hint in (
      ("num_drafts", " (drafter=none decodes without drafts)"),
      ("node_budget", ""),
      ("tree_depth", ""),
      ("level_one_passes", ""),
      ("shared_nodes", ""),
    ):
      value = getattr(self, name)
      if value is None and name != "level_one_passes":
        continue
      if not is_integer(value):
        raise SpecPilotError(
          f"{name} must be an integer or None, got {value!r}"
        )
      if value < 1:
        raise SpecPilotError(f"{name} must be at least 1, got {value}{hint}")
    if self.shared_nodes is not None and self.shared_budget == OFF:
      raise SpecPilotError(
        f"shared_nodes={self.shared_nodes} conflicts with shared_budget={OFF}"
      )
    if self.level_one_passes > 1 and self.verification == AUTO:
      raise SpecPilotError(
        f"level_one_passes={self.level_one_passes} conflicts with"
        f" verification={AUTO}, which weighs one pass"
      )
    for name in ("level_one_passes", "view"):
      value = getattr(self, name)
      if self.verification == ONE_LEVEL and value != getattr(type(self), name):
        raise SpecPilotError(
          f"{name}={value} conflicts with verification={ONE_LEVEL}"
        )
    if self.drafter_view != EXACT and self.weights != "w12":
      raise SpecPilotError(
        f"drafter_view={self.drafter_view} requires weights=w12, got"
        f" {self.weights}"
      )
    if (self.node_budget or 0) > MAX_NODES:
      raise SpecPilotError(
        f"node_budget must be at most {MAX_NODES}, got {self.node_budget}"
      )

  def check_alone(self) -> None:
    """Refuses to decode one request at a time.

    Raises:
      SpecPilotError: a setting that is about several requests at once.
    """
    for name in ("shared_budget", "dynamic_draft", "prompt_admission"):
      if getattr(self, name) == ON:
        raise SpecPilotError(
          f"{name}={ON} is for several requests at once, this engine decodes"
          " one at a time"
        )

  def check_temperature(self, temperature: float) -> None:
    """Refuses requests that a system does not decode.

    Raises:
      SpecPilotError: rejection sampling of a tree, or of drafts that a coarser
        pass chose: its law holds for a drafter's chains.
    """
    if self.acceptance == "rejection" and self.tree != CHAIN and temperature:
      raise SpecPilotError(
        f"acceptance=rejection at temperature {temperature:g} is for chains,"
        f" not for tree={self.tree}; acceptance=match takes any tree"
      )
    if (
      self.acceptance == "rejection"
      and self.verification != ONE_LEVEL
      and temperature
    ):
      # The view's choices are not drawn from a law that could be rejected.
      raise SpecPilotError(
        f"acceptance=rejection at temperature {temperature:g} is for"
        f" verification={ONE_LEVEL}, not for {self.verification};"
        " acceptance=match takes any"
      )


def is_integer(value: Any) -> bool:
  """An `int` that is not a bool."""
  return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
  """A number above 0 that float32 holds (so neither NaN nor infinite)."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  return _SMALLEST <= value <= _LARGEST


_SMALLEST, _LARGEST = 1.18e-38, 3.4e38  # normal numbers of float32

_COUNTS = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "rotary_dim",
  "context_length",
)
_GDN_COUNTS = (
  "gdn_num_key_heads",
  "gdn_num_value_heads",
  "gdn_key_head_dim",
  "gdn_value_head_dim",
  "gdn_conv_kernel",
)
_REALS = ("rope_theta", "norm_eps")
_BOOLS = ("tie_embeddings", "qk_norm", "attention_gate", "zero_centered_norm")


def _require(condition: bool, name: str, what: str) -> None:
  if not condition:
    raise SpecPilotError(f"{name}: {what}")


def _check(c: ModelConfig) -> None:
  """Types, ranges and shape arithmetic that every later module relies on."""
  _require(
    isinstance(c.name, str), "model", f"name must be a string, got {c.name!r}"
  )
  _require(
    c.family in FAMILIES,
    c.name,
    f"family {c.family!r} is not one of {', '.join(FAMILIES)}",
  )
  for field in ("layer_types", "eos_token_ids"):
    value = getattr(c, field)
    _require(
      isinstance(value, tuple),
      c.name,
      f"{field} must be a tuple, got {value!r}",
    )
  _require(len(c.layer_types) > 0, c.name, "layer_types is empty")
  for layer_type in c.layer_types:
    _require(
      layer_type in (GDN, ATTENTION),
      c.name,
      f"layer type {layer_type!r} is not {GDN!r} or {ATTENTION!r}",
    )
  hybrid = GDN in c.layer_types
  for field in _COUNTS + _GDN_COUNTS:
    value = getattr(c, field)
    # Without GDN layers their sizes say nothing, and may be 0.
    zero = field in _GDN_COUNTS and not hybrid
    _require(
      is_integer(value) and value >= (0 if zero else 1),
      c.name,
      f"{field} must be a {'non-negative' if zero else 'positive'} integer,"
      f" got {value!r}",
    )
  for field in _REALS:
    value = getattr(c, field)
    _require(
      is_positive(value),
      c.name,
      f"{field} must be a finite number above 0, got {value!r}",
    )
  for field in _BOOLS:
    value = getattr(c, field)
    _require(
      isinstance(value, bool),
      c.name,
      f"{field} must be True or False, got {value!r}",
    )
  _require(
    c.num_heads % c.num_kv_heads == 0,
    c.name,
    f"num_heads {c.num_heads} is not a multiple of num_kv_heads"
    f" {c.num_kv_heads}",
  )
  _require(
    c.rotary_dim <= c.head_dim and c.rotary_dim % 2 == 0,
    c.name,
    f"rotary_dim {c.rotary_dim} must be even and at most head_dim {c.head_dim}",
  )
  _require(
    c.tokenizer_size is None or is_integer(c.tokenizer_size),
    c.name,
    f"tokenizer_size must be an integer or None, got {c.tokenizer_size!r}",
  )
  _require(
    0 < c.valid_vocab <= c.vocab_size,
    c.name,
    f"tokenizer has {c.valid_vocab} ids, the embedding {c.vocab_size} rows",
  )
  bos = () if c.bos_token_id is None else (c.bos_token_id,)
  for kind, tokens in (("eos", c.eos_token_ids), ("bos", bos)):
    for token in tokens:
      _require(
        is_integer(token) and 0 <= token < c.vocab_size,
        c.name,
        f"{kind} token id {token!r} is outside the vocabulary of"
        f" {c.vocab_size}",
      )
  if hybrid:
    _require(
      c.gdn_conv_kernel >= 2,
      c.name,
      f"gdn_conv_kernel must be at least 2, got {c.gdn_conv_kernel}",
    )
    _require(
      c.gdn_num_value_heads % c.gdn_num_key_heads == 0,
      c.name,
      f"{c.gdn_num_value_heads} GDN value heads are not a multiple of"
      f" {c.gdn_num_key_heads} key heads",
    )


def _hybrid(name, *, layers, gdn_heads, **kwargs) -> ModelConfig:
  """A preset of the Qwen3.5 family: three GDN layers, then one attention."""
  published: dict[str, Any] = dict(
    vocab_size=248320,
    tokenizer_size=248077,
    context_length=262144,
    eos_token_ids=(248046, 248044),
  )
  return ModelConfig(
    name=name,
    family="qwen3_5",
    layer_types=tuple(
      ATTENTION if (i + 1) % 4 == 0 else GDN for i in range(layers)
    ),
    head_dim=256,
    rotary_dim=64,
    rope_theta=1e7,
    norm_eps=1e-6,
    qk_norm=True,
    attention_gate=True,
    zero_centered_norm=True,
    gdn_num_key_heads=gdn_heads[0],
    gdn_num_value_heads=gdn_heads[1],
    gdn_key_head_dim=128,
    gdn_value_head_dim=128,
    gdn_conv_kernel=4,
    **(published | kwargs),
  )


def _presets() -> dict[str, ModelConfig]:
  presets = (
    _hybrid(
      "Qwen3.8-27B",
      layers=64,
      gdn_heads=(16, 48),
      hidden_size=5120,
      intermediate_size=17408,
      num_heads=24,
      num_kv_heads=4,
      tie_embeddings=False,
    ),
    _hybrid(
      "Qwen3.5-4B",
      layers=32,
      gdn_heads=(16, 32),
      hidden_size=2560,
      intermediate_size=9216,
      num_heads=16,
      num_kv_heads=4,
      tie_embeddings=True,
    ),
    _hybrid(
      "Qwen3.5-0.8B",
      layers=24,
      gdn_heads=(16, 16),
      hidden_size=1024,
      intermediate_size=3584,
      num_heads=8,
      num_kv_heads=2,
      tie_embeddings=True,
    ),
    # No published model: between the zoo and the 27B, each width by another
    # power of two, for checks of widening on a CPU.
    _hybrid(
      "hybrid-1280",
      layers=12,
      gdn_heads=(4, 12),
      hidden_size=1280,
      intermediate_size=1088,
      num_heads=12,
      num_kv_heads=2,
      tie_embeddings=False,
      vocab_size=6144,
      tokenizer_size=4096,
      context_length=8192,
      eos_token_ids=(0,),
    ),
    ModelConfig(
      name="Qwen3-8B",
      family="qwen3",
      vocab_size=151936,
      tokenizer_size=151669,
      hidden_size=4096,
      intermediate_size=12288,
      layer_types=(ATTENTION,) * 36,
      num_heads=32,
      num_kv_heads=8,
      head_dim=128,
      rotary_dim=128,
      rope_theta=1e6,
      norm_eps=1e-6,
      tie_embeddings=False,
      context_length=40960,
      qk_norm=True,
      attention_gate=False,
      zero_centered_norm=False,
      bos_token_id=151643,
      eos_token_ids=(151645,),
    ),
    ModelConfig(
      name="SmolLM2-135M",
      family="llama",
      vocab_size=49152,
      hidden_size=576,
      intermediate_size=1536,
      layer_types=(ATTENTION,) * 30,
      num_heads=9,
      num_kv_heads=3,
      head_dim=64,
      rotary_dim=64,
      rope_theta=1e5,
      norm_eps=1e-5,
      tie_embeddings=True,
      context_length=8192,
      qk_norm=False,
      attention_gate=False,
      zero_centered_norm=False,
      bos_token_id=1,
      eos_token_ids=(2,),
    ),
  )
  return {preset.name: preset for preset in presets}


PRESETS: dict[str, ModelConfig] = _presets()
"""Shapes by name, all but hybrid-1280 published; their sources are the models'
own `config.json`."""


def preset(name: str) -> ModelConfig:
  """Returns a preset, or raises `SpecPilotError` that lists them.

  >>> model = preset("Qwen3.8-27B")
  >>> model.hidden_size, model.layer_types.count(ATTENTION)
  (5120, 16)
  """
  try:
    return PRESETS[name]
  except KeyError:
    raise SpecPilotError(
      f"unknown preset {name!r}; presets: {', '.join(PRESETS)}"
    ) from None
