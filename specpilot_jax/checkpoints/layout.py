"""Which Hugging Face tensors make up each parameter of a target.

Projections that read the same input are stored fused, as rows of one matrix.
Loading joins the rows (`source.fused_blocks`) and saving splits them; both read
this one table.
"""

import dataclasses

import numpy as np

from specpilot_jax.configs import GDN, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Part:
  """One Hugging Face tensor: its text-only name and its shape there."""

  name: str
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Fused:
  """A parameter: the tensors whose rows it is made of, and its shape."""

  parts: tuple[Part, ...]
  shape: tuple[int, ...]

  @property
  def is_matrix(self) -> bool:
    """Whether inputs are multiplied by it; a depthwise kernel is none."""
    return len(self.parts[0].shape) == 2


def _rows(*parts: tuple[str, int, int]) -> Fused:
  """Matrices [rows, columns] of one width, one below the other."""
  return Fused(
    tuple(Part(name, (rows, columns)) for name, rows, columns in parts),
    (sum(rows for _, rows, _ in parts), parts[0][2]),
  )


def _vector(name: str, size: int) -> Fused:
  return Fused((Part(name, (size,)),), (size,))


def _attention(c: ModelConfig, hf: str) -> dict[str, Fused]:
  query = c.num_heads * c.head_dim * (2 if c.attention_gate else 1)
  key = c.num_kv_heads * c.head_dim
  hf += "self_attn."
  table = {
    "qkv.weight": _rows(
      (hf + "q_proj.weight", query, c.hidden_size),
      (hf + "k_proj.weight", key, c.hidden_size),
      (hf + "v_proj.weight", key, c.hidden_size),
    ),
    "o_proj.weight": _rows(
      (hf + "o_proj.weight", c.hidden_size, c.num_heads * c.head_dim)
    ),
  }
  if c.qk_norm:
    for norm in ("q_norm.weight", "k_norm.weight"):
      table[norm] = _vector(hf + norm, c.head_dim)
  return table


def _gated_delta(c: ModelConfig, hf: str) -> dict[str, Fused]:
  heads, width = c.gdn_num_value_heads, c.gdn_value_dim
  hf += "linear_attn."
  return {
    "in_proj.weight": _rows(
      (hf + "in_proj_qkv.weight", c.gdn_conv_dim, c.hidden_size),
      (hf + "in_proj_z.weight", width, c.hidden_size),
      (hf + "in_proj_b.weight", heads, c.hidden_size),
      (hf + "in_proj_a.weight", heads, c.hidden_size),
    ),
    # A depthwise convolution has a middle axis of one input channel.
    "conv_weight": Fused(
      (Part(hf + "conv1d.weight", (c.gdn_conv_dim, 1, c.gdn_conv_kernel)),),
      (c.gdn_conv_dim, c.gdn_conv_kernel),
    ),
    "a_log": _vector(hf + "A_log", heads),
    "dt_bias": _vector(hf + "dt_bias", heads),
    "norm.weight": _vector(hf + "norm.weight", c.gdn_value_head_dim),
    "out_proj.weight": _rows((hf + "out_proj.weight", c.hidden_size, width)),
  }


def layout(config: ModelConfig) -> dict[str, Fused]:
  """Parameter name -> the Hugging Face tensors it is made of."""
  c = config
  table = {"embed.weight": _rows((EMBEDDING, c.vocab_size, c.hidden_size))}
  for i, layer_type in enumerate(c.layer_types):
    hf, ours = f"model.layers.{i}.", f"layers.{i}."
    table[ours + "input_norm.weight"] = _vector(
      hf + "input_layernorm.weight", c.hidden_size
    )
    mixer = _gated_delta if layer_type == GDN else _attention
    for name, fused in mixer(c, hf).items():
      table[ours + "mixer." + name] = fused
    table[ours + "post_norm.weight"] = _vector(
      hf + "post_attention_layernorm.weight", c.hidden_size
    )
    table[ours + "mlp.gate_up.weight"] = _rows(
      (hf + "mlp.gate_proj.weight", c.intermediate_size, c.hidden_size),
      (hf + "mlp.up_proj.weight", c.intermediate_size, c.hidden_size),
    )
    table[ours + "mlp.down.weight"] = _rows(
      (hf + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
    )
  table["norm.weight"] = _vector("model.norm.weight", c.hidden_size)
  if not c.tie_embeddings:
    table["lm_head.weight"] = _rows((LM_HEAD, c.vocab_size, c.hidden_size))
  return table


def split(fused: Fused, array: np.ndarray) -> dict[str, np.ndarray]:
  """The tensors of a parameter: name -> rows of `array`, as views."""
  tensors = {}
  start = 0
  for part in fused.parts:
    stop = start + part.shape[0]
    tensors[part.name] = array[start:stop].reshape(part.shape)
    start = stop
  return tensors
