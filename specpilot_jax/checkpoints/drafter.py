"""Learned drafters in the released safetensors layout, or that in W12."""

import json
import os
import pathlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import w12_file
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def layout(config: DrafterConfig) -> dict[str, list[tuple[str, tuple]]]:
  """Parameter -> the released tensors that are its rows, with shapes."""
  d, f = config.hidden_size, config.intermediate_size
  q = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  table: dict[str, list[tuple[str, tuple]]] = {
    "fc.weight": [("fc.weight", (d, len(config.target_layers) * d))],
    "hidden_norm.weight": [("hidden_norm.weight", (d,))],
    "norm.weight": [("norm.weight", (d,))],
  }
  for i in range(config.num_layers):
    layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
    table |= {
      f"{layer}.input_norm.weight": [(f"{layer}.input_layernorm.weight", (d,))],
      f"{layer}.post_norm.weight": [
        (f"{layer}.post_attention_layernorm.weight", (d,))
      ],
      f"{layer}.attention.q_proj.weight": [
        (f"{attention}.q_proj.weight", (q, d))
      ],
      f"{layer}.attention.kv_proj.weight": [
        (f"{attention}.k_proj.weight", (kv, d)),
        (f"{attention}.v_proj.weight", (kv, d)),
      ],
      f"{layer}.attention.o_proj.weight": [
        (f"{attention}.o_proj.weight", (d, q))
      ],
      f"{layer}.attention.q_norm.weight": [
        (f"{attention}.q_norm.weight", (config.head_dim,))
      ],
      f"{layer}.attention.k_norm.weight": [
        (f"{attention}.k_norm.weight", (config.head_dim,))
      ],
      f"{layer}.mlp.gate_up.weight": [
        (f"{layer}.mlp.gate_proj.weight", (f, d)),
        (f"{layer}.mlp.up_proj.weight", (f, d)),
      ],
      f"{layer}.mlp.down.weight": [(f"{layer}.mlp.down_proj.weight", (d, f))],
    }
  for name, tensor, shape in _beyond_dflash(config):
    table[name] = [(tensor, shape)]
  return table


def _beyond_dflash(
  config: DrafterConfig,
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
  """Parameter, released tensor and its shape."""
  d, v = config.hidden_size, config.vocab_size
  if isinstance(config, DFlash2Config):
    for i in range(config.num_layers):
      for conv in ("attention_conv", "mlp_conv"):
        base = f"layers.{i}.{conv}.base_kernel"
        yield base, base, (2, 2, d)
        projection = f"layers.{i}.{conv}.kernel_projection.weight"
        yield projection, projection, (4 * config.conv_groups, d)
    rank = config.selector_rank
    for part, shape in (
      ("predecessor_codebook", (v, rank)),
      ("successor_codebook", (v, rank)),
      ("hidden_projection.weight", (rank, d)),
    ):
      yield (name := f"candidate_selector.{part}"), name, shape
  if isinstance(config, DSparkConfig):
    rank = config.markov_rank
    first, second = (f"markov_head.markov_w{i}" for i in (1, 2))
    yield first, f"{first}.weight", (v, rank)
    yield f"{second}.weight", f"{second}.weight", (v, rank)
    head = "confidence_head"
    yield f"{head}.weight", f"{head}.proj.weight", (1, d + rank)
    yield f"{head}.bias", f"{head}.proj.bias", (1,)


def _flat(model: DFlash):
  graphdef, state = nnx.split(model)
  return graphdef, nnx.to_flat_state(state)


def save(
  folder: str | os.PathLike[str], model: DFlash, *, encode: bool = False
) -> None:
  """Writes config.json and model.safetensors (bfloat16).

  Args:
    folder: must not exist, or be empty.
    model: any float dtype.
    encode: write model.w12.safetensors instead, the same in W12.

  Raises:
    SpecPilotError: the folder exists and is not empty, or cannot be written.
  """
  _, flat = _flat(model)
  values = {".".join(map(str, path)): leaf[...] for path, leaf in flat}
  tensors = {}
  for name, parts in layout(model.config).items():
    rows = np.asarray(values[name].astype(jnp.bfloat16))
    rows = rows.reshape(-1, *parts[0][1][1:])
    start = 0
    for tensor, shape in parts:
      tensors[tensor] = np.ascontiguousarray(rows[start : start + shape[0]])
      start += shape[0]
  with common.new_folder(folder) as staging:
    if encode:
      w12_file.save(staging / w12_file.WEIGHTS, tensors)
    else:
      safetensors.numpy.save_file(
        tensors, staging / WEIGHTS, metadata={"format": "pt"}
      )
    text = json.dumps(model.config.to_hf(), indent=2) + "\n"
    (staging / CONFIG).write_text(text)


def load_config(folder: str | os.PathLike[str]) -> DrafterConfig:
  """A drafter's shape; raises as `load` does."""
  folder = pathlib.Path(folder)
  return DrafterConfig.from_hf(common.read_json(folder / CONFIG), folder.name)


def _read(
  folder: pathlib.Path,
) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
  """The file with the weights, and its tensors."""
  path, encoded = folder / WEIGHTS, folder / w12_file.WEIGHTS
  if encoded.is_file():
    if path.exists():
      raise SpecPilotError(
        f"{folder}: both {WEIGHTS} and {w12_file.WEIGHTS} are there"
      )
    return encoded, w12_file.load(encoded)
  if not path.is_file():
    raise SpecPilotError(
      f"{folder}: {WEIGHTS} is missing, and {w12_file.WEIGHTS} too"
    )
  try:
    return path, safetensors.numpy.load_file(path)
  except (safetensors.SafetensorError, OSError) as error:
    raise SpecPilotError(
      f"{path}: damaged ({common.first_line(error)})"
    ) from None


def load(folder: str | os.PathLike[str], dtype: str) -> DFlash:
  """Loads a DFlash, DFlash2 or DSpark drafter.

  Args:
    folder: with config.json and model.safetensors or model.w12.safetensors.
    dtype: `bfloat16`, `float32` or `float64`.

  Raises:
    SpecPilotError: a file, field or tensor that is missing, unknown, damaged,
      of the wrong shape or dtype, or not finite.
  """
  folder = pathlib.Path(folder)
  config = load_config(folder)
  path, tensors = _read(folder)
  table = layout(config)
  known = {tensor for parts in table.values() for tensor, _ in parts}
  for tensor in sorted(set(tensors) - known):
    raise SpecPilotError(f"{path}: unknown tensor {tensor!r}")
  for tensor in sorted(known - set(tensors)):
    raise SpecPilotError(f"{path}: tensor {tensor!r} is missing")
  abstract = nnx.eval_shape(lambda: learned.module(config, dtype, nnx.Rngs(0)))
  graphdef, flat = _flat(abstract)
  leaves = []
  for name_path, leaf in flat:
    rows = []
    for tensor, shape in table[".".join(map(str, name_path))]:
      if tensors[tensor].dtype == np.float16:
        raise SpecPilotError(
          f"{path}: float16 drafters overflow; convert it to bfloat16"
        )
      common.check_weight(tensors[tensor], str(path), tensor, shape)
      rows.append(tensors[tensor])
    value = jnp.asarray(np.concatenate(rows)).astype(leaf.dtype)
    leaves.append((name_path, leaf.replace(value.reshape(leaf.shape))))
  return nnx.merge(graphdef, nnx.from_flat_state(leaves))
