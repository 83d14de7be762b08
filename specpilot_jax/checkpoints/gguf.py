"""GGUF files of Llama-style dense models, through the `gguf` package.

Quantised tensors are dequantised to float32; the checkpoint's notes say which
types and how many. llama.cpp's converter permutes the rows of q and k so that
RoPE acts on neighbouring dimensions (2i, 2i + 1); the permutation is undone
here, because this engine rotates halves (i, i + head_dim / 2).
"""

import collections
import contextlib
import math
import os
import pathlib
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from specpilot_jax import extras
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import gguf_header
from specpilot_jax.checkpoints.layout import EMBEDDING, LM_HEAD, Part, layout
from specpilot_jax.checkpoints.source import (
  Source,
  checked,
  fused_blocks,
  fused_dtypes,
  open_file,
  read_at,
  row_blocks,
)
from specpilot_jax.configs import ATTENTION, ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

_FIXED_NAMES = {
  EMBEDDING: "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  LM_HEAD: "output.weight",
}
_LAYER_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}

# `llama.*` metadata that is read below, or accepted with one value only.
_READ = frozenset({
  "block_count", "context_length", "embedding_length", "feed_forward_length",
  "attention.head_count", "attention.head_count_kv", "attention.key_length",
  "attention.value_length", "attention.layer_norm_rms_epsilon",
  "rope.freq_base", "rope.dimension_count", "vocab_size",
})  # fmt: skip
_NEUTRAL: dict[str, Any] = {
  "rope.scaling.type": "none",
  "rope.scale_linear": 1.0,
  "rope.scaling.factor": 1.0,
  "expert_count": 0,
  "expert_used_count": 0,
  "attention.causal": True,
}


def load(
  path: str | os.PathLike[str], name: str | None = None
) -> common.Checkpoint:
  """Loads a GGUF file of architecture `llama`.

  Args:
    path: the file.
    name: the config's name; the file's name by default.

  Raises:
    SpecPilotError: the `gguf` package is not installed; the file is damaged,
      of another architecture, or has metadata or tensors that are not
      understood; the line names the key or the tensor.
  """
  with open_source(path, name) as source:
    return source.checkpoint()


@contextlib.contextmanager
def open_source(
  path: str | os.PathLike[str], name: str | None = None
) -> Generator[Source]:
  """The same, to be read parameter by parameter while it is open."""
  path = pathlib.Path(path)
  gguf = extras.load("gguf", "gguf", f"{path}: reading GGUF")
  sizes = {int(k): v for k, v in gguf.GGML_QUANT_SIZES.items()}
  gguf_header.check(path, sizes)
  try:
    reader = gguf.GGUFReader(path)
    metadata = {key: f.contents() for key, f in reader.fields.items()}
  except (ValueError, KeyError, IndexError, OSError) as error:
    raise SpecPilotError(
      f"{path}: not a usable GGUF file: {common.first_line(error)}"
    ) from None
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(metadata, tensors, path, name or path.stem)
  tokenizer = None
  if "tokenizer.ggml.model" in metadata:
    tokenizer = Tokenizer.from_gguf_metadata(metadata, str(path))
    config = common.with_tokenizer(config, tokenizer, str(path))
  names = _names(config, tensors, path)
  kinds = gguf.GGMLQuantizationType
  plain = {
    kinds.F32: common.FLOAT32,
    kinds.F16: common.FLOAT16,
    kinds.BF16: common.BFLOAT16,
  }

  def dtype(part: Part) -> np.dtype:
    kind = tensors[names[part.name]].tensor_type
    return plain.get(kind, common.FLOAT32)

  table = layout(config)
  for part in (part for fused in table.values() for part in fused.parts):
    _check_shape(tensors[names[part.name]], part, path)
  dtypes = fused_dtypes(table, dtype)
  notes = _notes(reader.tensors, plain)
  # A vocabulary takes more memory, entry by entry, than many a parameter.
  del metadata, reader
  with contextlib.ExitStack() as stack:
    file = open_file(path, stack)

    def read(part: Part) -> Iterator[np.ndarray]:
      tensor = tensors[names[part.name]]
      heads = 0
      if part.name.endswith("self_attn.q_proj.weight"):
        heads = config.num_heads
      elif part.name.endswith("self_attn.k_proj.weight"):
        heads = config.num_kv_heads
      blocks = _blocks(tensor, path, file, gguf, plain, heads)
      return checked(blocks, str(path), tensor.name)

    digests = {path.name: common.sha256_of(path)}
    yield Source(
      config=config,
      tokenizer=tokenizer,
      name=str(path),
      notes=notes,
      sha256=digests,
      fingerprint=lambda: digests,
      dtypes=dtypes,
      read_blocks=lambda name: fused_blocks(table[name], dtypes[name], read),
    )


def _config(metadata, tensors, path, name) -> ModelConfig:
  architecture = metadata.get("general.architecture")
  if architecture != "llama":
    raise SpecPilotError(
      f"{path}: GGUF architecture {architecture!r} is not supported (only"
      " 'llama')"
    )
  for key, value in metadata.items():
    short = key.removeprefix("llama.")
    if key.startswith("llama.") and short not in _READ:
      if short not in _NEUTRAL or value != _NEUTRAL[short]:
        raise SpecPilotError(
          f"{path}: metadata {key}={value!r} is not supported"
        )
    elif not key.startswith(("llama.", "general.", "tokenizer.", "GGUF.")):
      raise SpecPilotError(f"{path}: unknown metadata {key!r}")

  def number(short, default=None, kind=int):
    value = metadata.get("llama." + short, default)
    if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
      raise SpecPilotError(
        f"{path}: metadata llama.{short} must be a positive number, got"
        f" {value!r}"
      )
    return value

  def real(short, default=None) -> float:
    # Stored as float32: the shortest decimal that rounds to it is meant.
    return float(str(np.float32(number(short, default, (int, float)))))

  heads = number("attention.head_count")
  hidden = number("embedding_length")
  head_dim = number("attention.key_length", hidden // heads)
  for short in ("attention.value_length", "rope.dimension_count"):
    if number(short, head_dim) != head_dim:
      raise SpecPilotError(
        f"{path}: metadata llama.{short}={number(short)} differs from the"
        f" head size {head_dim}, which is not supported"
      )
  if _FIXED_NAMES[EMBEDDING] not in tensors:
    raise SpecPilotError(
      f"{path}: tensor {_FIXED_NAMES[EMBEDDING]!r} is missing"
    )
  rows = int(tensors[_FIXED_NAMES[EMBEDDING]].shape[-1])
  vocab_size = number("vocab_size", rows)
  end_ids = [
    metadata[key]
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    if key in metadata
  ]
  return ModelConfig(
    name=name,
    family="llama",
    vocab_size=vocab_size,
    hidden_size=hidden,
    intermediate_size=number("feed_forward_length"),
    layer_types=(ATTENTION,) * number("block_count"),
    num_heads=heads,
    num_kv_heads=number("attention.head_count_kv", heads),
    head_dim=head_dim,
    rotary_dim=head_dim,
    rope_theta=real("rope.freq_base", 10000.0),
    norm_eps=real("attention.layer_norm_rms_epsilon"),
    tie_embeddings=_FIXED_NAMES[LM_HEAD] not in tensors,
    context_length=number("context_length"),
    qk_norm=False,
    attention_gate=False,
    zero_centered_norm=False,
    bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    eos_token_ids=tuple(dict.fromkeys(end_ids)),
  )


def _gguf_name(hf_name: str) -> str:
  if hf_name in _FIXED_NAMES:
    return _FIXED_NAMES[hf_name]
  _, _, layer, rest = hf_name.split(".", 3)
  stem = rest.removesuffix(".weight")
  return f"blk.{layer}.{_LAYER_NAMES[stem]}.weight"


def _names(config, tensors, path) -> dict[str, str]:
  """Hugging Face name -> name in the file, all of which are there."""
  names = {
    part.name: _gguf_name(part.name)
    for fused in layout(config).values()
    for part in fused.parts
  }
  for extra in tensors.keys() - set(names.values()):
    raise SpecPilotError(f"{path}: unknown tensor {extra!r} for llama")
  for missing in [n for n in names.values() if n not in tensors][:1]:
    raise SpecPilotError(f"{path}: tensor {missing!r} is missing")
  return names


def _check_shape(tensor, part: Part, path) -> None:
  shape = tuple(int(n) for n in reversed(tensor.shape))
  if shape != part.shape:
    raise SpecPilotError(
      f"{path}: tensor {tensor.name!r} has shape {list(shape)}, expected"
      f" {list(part.shape)}"
    )


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q or k from interleaved rotary pairs to half-split ones.

  Row 2i + h of a head becomes row h * head_dim / 2 + i, h in {0, 1}.
  """
  pairs = rows.reshape(heads, -1, 2, rows.shape[1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def _blocks(tensor, path, file, gguf, plain, heads) -> Iterator[np.ndarray]:
  """The tensor's values in the stored float dtype, or in float32 where it is
  quantised; with `heads`, their rows as `_halves` orders them.
  """
  shape = tuple(int(n) for n in reversed(tensor.shape))
  # A vector is one row to the quantisation, and many to everybody else.
  rows = shape[0] if len(shape) > 1 else 1
  dtype = plain.get(tensor.tensor_type)
  stored = int(tensor.n_bytes) // rows
  width = math.prod(shape) // rows
  multiple = rows // heads if heads else 1
  row_bytes = 4 * width if dtype is None else stored
  for start, end in row_blocks((rows,), row_bytes, multiple):
    count = end - start
    offset = int(tensor.data_offset) + start * stored
    raw = read_at(file, path, offset, (count, stored), np.uint8)
    if dtype is not None:
      values = raw.view(dtype)
    else:
      try:
        values = gguf.quants.dequantize(raw, tensor.tensor_type)
      except (NotImplementedError, ValueError):
        raise SpecPilotError(
          f"{path}: tensor {tensor.name!r} has type"
          f" {tensor.tensor_type.name}, which cannot be dequantised"
        ) from None
      values = values.astype(np.float32, copy=False)
    if heads:
      values = _halves(values, count // multiple)
    yield values.reshape(count, *shape[1:]) if len(shape) > 1 else values[0]


def _notes(tensors, plain) -> tuple[str, ...]:
  counts = collections.Counter(
    t.tensor_type.name for t in tensors if t.tensor_type not in plain
  )
  if not counts:
    return ()
  listed = ", ".join(
    f"{kind} ({count} tensor{'s' if count > 1 else ''})"
    for kind, count in counts.most_common()
  )
  return (f"weights are dequantised {listed}",)
