"""Small models, weights and tokenizers that the checkpoint tests build."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specpilot_jax import configs
from specpilot_jax.checkpoints.layout import layout
from specpilot_jax.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TEMPLATE = (
  "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def config(family: str = "llama", **changes) -> configs.ModelConfig:
  """A model of a few thousand parameters."""
  hybrid = family == "qwen3_5"
  fields: dict[str, Any] = dict(
    name="tiny",
    family=family,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    layer_types=(configs.GDN, configs.ATTENTION)
    if hybrid
    else (configs.ATTENTION,) * 2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=4 if hybrid else 8,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=False,
    context_length=64,
    qk_norm=family != "llama",
    attention_gate=hybrid,
    zero_centered_norm=hybrid,
    eos_token_ids=(2,),
  )
  if hybrid:
    fields |= dict(
      gdn_num_key_heads=2,
      gdn_num_value_heads=6,
      gdn_key_head_dim=8,
      gdn_value_head_dim=4,
      gdn_conv_kernel=4,
    )
  return configs.ModelConfig(**(fields | changes))


def params(
  c: configs.ModelConfig, dtype=np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
  """Random parameters in the shapes of `layout`."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(fused.shape, np.float32).astype(dtype)
    for name, fused in layout(c).items()
  }


BFLOAT16 = ml_dtypes.bfloat16


def byte_level_backend() -> tokenizers.Tokenizer:
  """A byte-level BPE of 284 ids, special and plain added tokens among them."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=280,
    special_tokens=["<|pad|>", "<|begin|>", "<|end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(["the cat on the mat, été été 日本日本"], trainer)
  extra = ("<think>", "<ｗide>", "Ġé", "two words")
  backend.add_tokens([tokenizers.AddedToken(t, special=False) for t in extra])
  return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
  """A SentencePiece-like BPE: `▁` for spaces, `<0xNN>` for unknown text."""
  pieces = ["<unk>", "<s>", "</s>"]
  pieces += [f"<0x{b:02X}>" for b in range(256)]
  pieces += ["▁", "a", "b", "▁a", "▁▁", "é", "日"]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab=vocab,
      merges=[("▁", "a"), ("▁", "▁")],
      byte_fallback=True,
      unk_token="<unk>",
    )
  )
  backend.add_special_tokens(["<unk>", "<s>", "</s>"])
  backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  return backend


def tokenizer_files(backend=None, **settings) -> dict[str, bytes]:
  """The files of a tokenizer in Hugging Face form."""
  backend = byte_level_backend() if backend is None else backend
  settings = {
    "bos_token": "<|begin|>",
    "eos_token": {"content": "<|end|>"},
    "chat_template": TEMPLATE,
  } | settings
  return {
    "tokenizer.json": backend.to_str().encode(),
    "tokenizer_config.json": json.dumps(settings).encode(),
  }


def tokenizer() -> Tokenizer:
  return Tokenizer.from_files(tokenizer_files(), "tiny")
