"""Makes the golden checkpoints of this folder with `transformers`.

Every case is a small random-weight model that `transformers` itself wrote
(`save_pretrained`), with what `transformers` computes from it:

  config.json, model.safetensors   the checkpoint
  golden.npz
    token_ids [300] int32          input, uniform over the vocabulary
    logits [300, V/16] float32     one pass over all of them, float32, eager
                                   attention; every 16th token of the
                                   vocabulary, so that the files stay small
    logits_f64 [64, V/16] float64  the first 64 positions, float64 throughout
    greedy [64] int32              greedy tokens after token_ids[:32], cached
                                   one-token decoding in float32
    greedy_min_margin float64      smallest distance between the best and the
                                   second logit on that path
    float32_error float64          max |logits - logits_f64| on the first 64
                                   positions: the reference's own rounding

Weights are drawn so that mistakes show: norm weights, A_log, dt_bias and
convolutions are away from their initial values, logits have a standard
deviation of 1 to 3, the greedy path has margins above 1e-3 and at least 24
different tokens, and the reference's own float32 rounding is below 4e-5, a
fifth of what a comparison in float32 may allow. A seed that misses one of
these conditions is an error, not a file.

The script needs Python 3.11, torch 2.13 (CPU), transformers 5.24 and
safetensors, none of which the package itself needs:

  python tests/golden/make_golden.py            # all cases, beside the script
  python tests/golden/make_golden.py --out DIR --case llama

The same versions give the same files bit for bit.
"""

import argparse
import contextlib
import pathlib
import shutil
import sys
import zlib
from unittest import mock

import numpy as np
import safetensors.torch  # pyrefly: ignore[missing-import]
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]

# pyrefly: ignore[missing-import]
from transformers.models.qwen3_5 import configuration_qwen3_5 as qwen3_5

LENGTH = 300
PROMPT = 32
GREEDY = 64
KEPT = 16  # of so many logits, one
F64_LENGTH = 64
VOCAB = 160
LOGIT_SD = 2.0
TIED_SD = 0.3
MIN_MARGIN = 1e-3
MAX_ERROR = 4e-5
MIN_DISTINCT = 24

LINEAR = "linear_attention"
FULL = "full_attention"


def hybrid(layers, heads, gdn, *, tied, hidden=48, theta=1e4, dv=16):
  """Text config of the Qwen3.5 family.

  Args:
    layers: letters L (Gated DeltaNet) and F (full attention).
    heads: query heads, key-value heads; 32 wide, a quarter of it rotates.
    gdn: key heads (16 wide), value heads (`dv` wide).
    tied: whether lm_head is the embedding.
  """
  return dict(
    vocab_size=VOCAB,
    hidden_size=hidden,
    intermediate_size=96,
    num_hidden_layers=len(layers),
    layer_types=[LINEAR if c == "L" else FULL for c in layers],
    num_attention_heads=heads[0],
    num_key_value_heads=heads[1],
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=tied,
    rope_parameters=dict(
      rope_type="default", rope_theta=theta, partial_rotary_factor=0.25
    ),
    linear_num_key_heads=gdn[0],
    linear_num_value_heads=gdn[1],
    linear_key_head_dim=16,
    linear_value_head_dim=dv,
    linear_conv_kernel_dim=4,
  )


def dense(layers, heads, *, tied, theta, **kwargs):
  """Config of a dense model; arguments as in `hybrid`."""
  return dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=layers,
    num_attention_heads=heads[0],
    num_key_value_heads=heads[1],
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=tied,
    rope_parameters=dict(rope_type="default", rope_theta=theta),
    bos_token_id=None,
    eos_token_id=None,
    **kwargs,
  )


# name: (kind, dtype of the stored tensors, seed, config). The number in a
# hybrid's name is value heads per key head. `wrapper` is the multimodal
# layout in which the released models come.
CASES = {
  "hybrid1": (
    "hybrid", "float32", 1,
    hybrid("LFLF", (4, 2), (2, 2), tied=False),
  ),
  "hybrid2": (
    "hybrid", "float32", 2,
    hybrid("LLFLF", (6, 2), (2, 4), tied=False, dv=24),
  ),
  "hybrid3": (
    "wrapper", "bfloat16", 1,
    hybrid("LLLF", (6, 3), (2, 6), tied=False, theta=1e7),
  ),
  "hybrid1_tied": (
    "hybrid", "bfloat16", 41,
    hybrid("FLLF", (4, 1), (3, 3), tied=True),
  ),
  "hybrid2_tied": (
    "hybrid", "bfloat16", 18,
    hybrid("LFLF", (4, 4), (3, 6), tied=True),
  ),
  "hybrid3_tied": (
    "hybrid", "bfloat16", 4,
    hybrid("LFLF", (6, 2), (2, 6), tied=True, theta=1e7),
  ),
  "qwen3": (
    "qwen3", "float32", 2,
    dense(3, (6, 2), tied=False, theta=1e6),
  ),
  "llama": (
    "llama", "float16", 14,
    dense(4, (4, 2), tied=True, theta=1e5, rms_norm_eps=1e-5),
  ),
}  # fmt: skip


def new_model(kind, config):
  """The model with its initial weights, in torch's default dtype."""
  if kind == "hybrid":
    return transformers.Qwen3_5ForCausalLM(
      qwen3_5.Qwen3_5TextConfig(**config, attn_implementation="eager")
    )
  if kind == "qwen3":
    return transformers.Qwen3ForCausalLM(
      transformers.Qwen3Config(**config, attn_implementation="eager")
    )
  if kind == "llama":
    return transformers.LlamaForCausalLM(
      transformers.LlamaConfig(**config, attn_implementation="eager")
    )
  # The image and video ids are outside the vocabulary, as no image is given.
  vision = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    in_channels=1,
    patch_size=2,
    out_hidden_size=config["hidden_size"],
    num_position_embeddings=16,
  )
  return transformers.Qwen3_5ForConditionalGeneration(
    transformers.Qwen3_5Config(
      text_config=config,
      vision_config=vision,
      tie_word_embeddings=config["tie_word_embeddings"],
      attn_implementation="eager",
    )
  )


def draw(name, shape, seed, hidden, zero_centred, tied):
  """Random float64 values for the tensor `name`.

  Its own generator for every name, so that no tensor's values depend on
  which others the model has.
  """
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  normal = rng.standard_normal(shape)
  if name.endswith("A_log"):
    # Decays from almost none to almost all of the state in a token.
    return np.log(rng.uniform(0.05, 2.0, shape))
  if name.endswith("dt_bias"):
    return normal - 1.0
  if name.endswith("conv1d.weight"):
    return 0.6 * normal
  if "norm" in name.split(".")[-2]:
    scale = 1.1 + 0.3 * normal
    if tied and shape[0] == hidden and "layers." not in name:
      # The final norm: makes up for the size of the tied embedding.
      scale *= LOGIT_SD / (TIED_SD * hidden**0.5)
    return scale - (zero_centred and "linear_attn" not in name)
  if name.endswith("bias"):
    return 0.3 * normal
  if name.endswith("embed_tokens.weight"):
    # A tied embedding is kept below what the layers add, or every token
    # would predict itself.
    return (TIED_SD if tied else 1.0) * normal
  gain = LOGIT_SD if name.endswith("lm_head.weight") else 1.0
  fan_in = int(np.prod(shape[1:]))
  return gain / fan_in**0.5 * normal


def fill(model, kind, seed, dtype):
  """Sets all parameters, rounded to the dtype that they are stored in."""
  text = model.config.get_text_config()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      values = draw(
        name,
        tuple(parameter.shape),
        seed,
        text.hidden_size,
        zero_centred=kind in ("hybrid", "wrapper"),
        tied=text.tie_word_embeddings,
      )
      parameter.copy_(torch.from_numpy(values).to(getattr(torch, dtype)))


@contextlib.contextmanager
def everything_float64():
  """Within it `transformers` computes in float64 where it says float32.

  Its modelling code names float32 for norms, RoPE, the softmax and the delta
  rule, whatever dtype the weights have; a double reference needs those
  widened too.
  """
  default = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with (
      mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
      mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
      yield
  finally:
    torch.set_default_dtype(default)


def one_pass(model, ids):
  """Logits [T, V] of the ids [T], without a cache."""
  with torch.no_grad():
    return model(input_ids=ids[None], use_cache=False).logits[0]


def one_token_at_a_time(model, ids):
  """Logits [T, V] through the cache.

  The delta rule takes its recurrent form here and its chunked form in
  `one_pass`: that the two agree to float64 rounding shows that nothing on
  the way is float32.
  """
  cache = transformers.DynamicCache(config=model.config.get_text_config())
  rows = []
  with torch.no_grad():
    for token in ids:
      out = model(input_ids=token[None, None], cache=cache, use_cache=True)
      rows.append(out.logits[0, 0])
  return torch.stack(rows)


def greedy_path(model, prompt):
  """Greedy tokens [GREEDY] and their margins [GREEDY], with the cache."""
  out = model.generate(
    prompt[None],
    attention_mask=torch.ones_like(prompt)[None],
    do_sample=False,
    max_new_tokens=GREEDY,
    eos_token_id=None,
    pad_token_id=0,
    return_dict_in_generate=True,
    output_logits=True,
  )
  best = torch.stack([step[0] for step in out.logits]).topk(2).values
  return out.sequences[0, len(prompt) :], best[:, 0] - best[:, 1]


def write_checkpoint(model, kind, dtype, seed, folder):
  """`save_pretrained` in the stored dtype, with what is released beside it."""
  stored = new_model(kind, CASES[folder.name][3]).to(getattr(torch, dtype))
  stored.load_state_dict(model.state_dict())
  stored.save_pretrained(folder)
  # Holds nothing but token ids, none of which these models have.
  (folder / "generation_config.json").unlink(missing_ok=True)
  path = folder / "model.safetensors"
  path.chmod(0o644)
  if kind != "wrapper":
    return
  # The released files carry a multi-token-prediction layer that the model
  # class of `transformers` has no parameters for and skips by name.
  tensors = safetensors.torch.load_file(path)
  hidden = stored.config.get_text_config().hidden_size
  shapes = {
    "mtp.fc.weight": (hidden, 2 * hidden),
    "mtp.norm.weight": (hidden,),
    "mtp.pre_fc_norm_embedding.weight": (hidden,),
    "mtp.pre_fc_norm_hidden.weight": (hidden,),
    "mtp.layers.0.input_layernorm.weight": (hidden,),
    "mtp.layers.0.mlp.down_proj.weight": (hidden, 96),
    "mtp.layers.0.self_attn.k_proj.weight": (96, hidden),
  }
  for name, shape in shapes.items():
    values = draw(name, shape, seed, hidden, zero_centred=True, tied=False)
    tensors[name] = torch.from_numpy(values).to(getattr(torch, dtype))
  safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def make(name, out):
  """Writes one case and prints its figures."""
  kind, dtype, seed, config = CASES[name]
  folder = out / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  model = new_model(kind, config).eval()
  fill(model, kind, seed, dtype)
  write_checkpoint(model, kind, dtype, seed, folder)
  # The figures belong to the file, not to the model in memory.
  loaded = type(model).from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )
  ids = torch.from_numpy(
    np.random.default_rng([seed, 7]).integers(0, VOCAB, LENGTH)
  )
  logits = one_pass(loaded, ids)
  tokens, margins = greedy_path(loaded, ids[:PROMPT])
  with everything_float64():
    double = new_model(kind, config).eval()
    double.load_state_dict(loaded.state_dict())
    logits_f64 = one_pass(double, ids)
    stepped = one_token_at_a_time(double, ids[:F64_LENGTH])
  if (gap := (logits_f64[:F64_LENGTH] - stepped).abs().max()) > 1e-11:
    sys.exit(f"error: something computed in float32: {gap:.2g}")
  error = (logits - logits_f64).abs().max().item()
  figures = dict(
    logit_sd=logits.std().item(),
    min_margin=margins.min().item(),
    distinct=len(set(tokens.tolist())),
    float32_error=error,
  )
  print(name, *(f"{k}={v:.3g}" for k, v in figures.items()), flush=True)
  if not (
    1.0 < figures["logit_sd"] < 3.0
    and figures["min_margin"] > MIN_MARGIN
    and figures["distinct"] >= MIN_DISTINCT
    and error < MAX_ERROR
  ):
    sys.exit(f"error: seed {seed} of case {name} misses a condition")
  np.savez_compressed(
    folder / "golden.npz",
    token_ids=ids.numpy().astype(np.int32),
    logits=logits[:, ::KEPT].numpy(),
    logits_f64=logits_f64[:F64_LENGTH, ::KEPT].numpy(),
    greedy=tokens.numpy().astype(np.int32),
    greedy_min_margin=np.float64(figures["min_margin"]),
    float32_error=np.float64(error),
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent
  )
  parser.add_argument("--case", choices=CASES, action="append")
  args = parser.parse_args()
  torch.manual_seed(0)
  torch.set_num_threads(1)
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  for name in args.case or CASES:
    make(name, args.out)


if __name__ == "__main__":
  main()
