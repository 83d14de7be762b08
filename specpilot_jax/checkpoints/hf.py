"""Hugging Face folders: `config.json`, safetensors, tokenizer.

Weights are read tensor by tensor, in their stored dtype, and joined into the
fused parameters of `layout`. Every tensor of the file is accounted for: used,
or skipped because its name says that it belongs to the vision tower or to the
multi-token-prediction head, or refused.

Where `quantization_config` says so, matrices may be FP8 codes with scales
(`fp8`); they are read as `FP8Array`.

In place of `model.safetensors` a folder may have its tensors in W12
(`w12_file`), which `transformers` does not read; a conversion to safetensors
gives such a folder's tensors back, bit for bit.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from pallas_kernels.fp8_array import FP8Array
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import fp8 as fp8_lib
from specpilot_jax.checkpoints import w12_file
from specpilot_jax.checkpoints.hf_config import from_hf, to_hf
from specpilot_jax.checkpoints.layout import (
  EMBEDDING,
  LM_HEAD,
  Part,
  layout,
  split,
)
from specpilot_jax.checkpoints.source import (
  Source,
  assemble,
  checked,
  fused_blocks,
  fused_dtypes,
)
from specpilot_jax.checkpoints.tensor_file import TensorFile
from specpilot_jax.configs import ModelConfig, is_integer
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import fp8 as fp8_model
from specpilot_jax.tokenizer import TOKENIZER_FILE, Tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 2**30
"""Above this the weights are sharded, with an index."""

# Longest first: the text model sits under these in multimodal checkpoints.
_TEXT_PREFIXES = (
  ("model.language_model.lm_head.", "lm_head."),
  ("language_model.lm_head.", "lm_head."),
  ("model.language_model.", "model."),
  ("language_model.model.", "model."),
)
# Parts of the Qwen3.5 family's checkpoints that decoding text does not use.
_SKIPPED = {
  "vision": ("model.visual.", "visual."),
  "multi-token-prediction": ("mtp.", "model.mtp."),
}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def load(folder: str | os.PathLike[str]) -> common.Checkpoint:
  """Loads a folder as `transformers` writes it, single file or sharded, or
  one with a W12 file.

  Raises:
    SpecPilotError: anything missing, unknown, damaged, of the wrong shape or
      dtype, or not finite; the line names the file and the tensor.
  """
  with open_source(folder) as source:
    return source.checkpoint()


@contextlib.contextmanager
def open_source(folder: str | os.PathLike[str]) -> Generator[Source]:
  """The same, to be read parameter by parameter while it is open."""
  folder = pathlib.Path(folder)
  name = folder.resolve().name
  fields = common.read_json(folder / CONFIG)
  quantization = None
  if fields.get(fp8_lib.FIELD) is not None:
    quantization = fp8_lib.parse(fields.pop(fp8_lib.FIELD), name)
  config = from_hf(fields, name)
  tokenizer = None
  # What is there but is no file must not pass for absent.
  if os.path.lexists(folder / TOKENIZER_FILE):
    tokenizer = Tokenizer.from_hf_folder(folder)
  config = common.with_tokenizer(
    _merge_generation_config(config, folder), tokenizer, str(folder)
  )
  with contextlib.ExitStack() as stack:
    weights = _Weights(folder, config, stack, quantization)
    weights.check()
    sources = [CONFIG, *weights.files]
    sources += [GENERATION_CONFIG] * (folder / GENERATION_CONFIG).exists()
    sources += [] if tokenizer is None else sorted(tokenizer.files)
    digests = {f: common.sha256_of(folder / f) for f in sources}
    yield Source(
      config=config,
      tokenizer=tokenizer,
      name=str(folder),
      notes=weights.notes,
      sha256=digests,
      fingerprint=lambda: digests,
      dtypes=weights.dtypes(),
      read_blocks=weights.blocks,
      fp8=weights.fp8,
      read_fp8=weights.read_fp8,
    )


def _merge_generation_config(config: ModelConfig, folder: pathlib.Path):
  """Adds the end-of-text ids that only `generation_config.json` names."""
  path = folder / GENERATION_CONFIG
  if not os.path.lexists(path):
    return config
  eos = common.read_json(path).get("eos_token_id")
  ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
  for token in ids:
    if not is_integer(token) or not 0 <= token < config.vocab_size:
      raise SpecPilotError(
        f"{path}: eos_token_id {token!r} is outside the vocabulary of"
        f" {config.vocab_size}"
      )
  merged = tuple(dict.fromkeys((*config.eos_token_ids, *ids)))
  return dataclasses.replace(config, eos_token_ids=merged)


class _Weights:
  """The files with the weights, indexed by text-only tensor name."""

  def __init__(
    self,
    folder,
    config,
    stack,
    quantization: fp8_lib.Quantization | None = None,
  ):
    self._folder = folder
    self._config = config
    self._quantization = quantization
    self._table = layout(config)
    self.files, index = self._list_files()
    self._where: dict[str, tuple[TensorFile | w12_file.W12File, str, str]] = {}
    skipped = dict.fromkeys(_SKIPPED, 0)
    seen: dict[str, str] = {}
    for file in self.files:
      form = w12_file.W12File if file == w12_file.WEIGHTS else TensorFile
      shard = form(folder / file, stack)
      for stored in shard.names():
        if stored in seen:
          raise SpecPilotError(
            f"{folder}: tensor {stored!r} is in both {seen[stored]} and {file}"
          )
        seen[stored] = file
        if index is not None and index.get(stored) != file:
          raise SpecPilotError(
            f"{folder}/{file}: tensor {stored!r} is not listed there by {INDEX}"
          )
        kind = self._skipped_kind(stored)
        if kind is not None:
          skipped[kind] += 1
          continue
        name = _text_name(stored)
        if name in self._where:
          other = self._where[name][2]
          raise SpecPilotError(
            f"{folder}: tensors {other!r} and {stored!r} are the same"
          )
        self._where[name] = (shard, file, stored)
    for stored, file in (index or {}).items():
      if stored not in seen:
        raise SpecPilotError(
          f"{folder}/{file}: tensor {stored!r}, listed by {INDEX}, is missing"
        )
    self.notes = tuple(
      f"{count} {kind} tensors are not used"
      for kind, count in skipped.items()
      if count
    )

  def _list_files(self):
    """(files to read, the index's tensor -> file map or None)."""
    forms = (WEIGHTS, INDEX, w12_file.WEIGHTS)
    there = [f for f in forms if os.path.lexists(self._folder / f)]
    if w12_file.WEIGHTS in there and len(there) > 1:
      raise SpecPilotError(
        f"{self._folder}: both {there[0]} and {w12_file.WEIGHTS} are there"
      )
    if not there:
      raise SpecPilotError(
        f"{self._folder}: no {WEIGHTS} and no {INDEX}, nor {w12_file.WEIGHTS}"
      )
    if there[0] != INDEX:
      return [there[0]], None
    index = common.read_json(self._folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
      raise SpecPilotError(f"{self._folder / INDEX}: weight_map is missing")
    for file in index.values():
      if not isinstance(file, str) or pathlib.PurePath(file).name != file:
        raise SpecPilotError(
          f"{self._folder / INDEX}: {file!r} is not a file name"
        )
      if not (self._folder / file).is_file():
        raise SpecPilotError(
          f"{self._folder}: shard {file}, named by {INDEX}, is missing"
        )
    return sorted(set(index.values())), index

  def _skipped_kind(self, stored: str) -> str | None:
    if self._config.family == "qwen3_5":
      for kind, prefixes in _SKIPPED.items():
        if stored.startswith(prefixes):
          return kind
    return None

  def check(self) -> None:
    """Compares names, shapes and dtypes with the config's; reads no data but
    that of an output head that must equal the embedding.
    """
    table = self._table
    parts = {part.name: part for f in table.values() for part in f.parts}
    known = {*parts, *map(self._scale_name, parts)}
    if self._config.tie_embeddings:
      known.add(LM_HEAD)
    for name, (_, file, stored) in self._where.items():
      if name not in known:
        raise SpecPilotError(
          f"{self._folder}/{file}: unknown tensor {stored!r} for"
          f" {self._config.family}"
        )
    missing = [name for name in parts if name not in self._where]
    if missing:
      more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
      raise SpecPilotError(
        f"{self._folder}: tensor {missing[0]!r} is missing{more}"
      )
    for part in parts.values():
      self._check_header(part)
    if self._quantization is not None and not self.fp8:
      raise SpecPilotError(
        f"{self._folder}: {CONFIG} has a {fp8_lib.FIELD}, but no tensor is"
        f" {fp8_lib.E4M3_NAME}"
      )
    if self._config.tie_embeddings and LM_HEAD in self._where:
      self._check_tied(parts[EMBEDDING])

  def dtypes(self) -> dict[str, np.dtype]:
    return fused_dtypes(self._table, self._dtype)

  @functools.cached_property
  def fp8(self) -> frozenset[str]:
    """Parameters of which tensors are codes."""
    return frozenset(
      name
      for name, fused in self._table.items()
      if any(map(self._is_coded, fused.parts))
    )

  def read_fp8(self, name: str) -> FP8Array:
    """A parameter with its scales."""
    fused, quantization = self._table[name], self._quantization
    assert quantization is not None
    count = fp8_lib.split_rows(fused, str(self._folder), self._is_coded)
    coded = []
    for part in fused.parts[:count]:
      shard, file, stored = self._where[part.name]
      scales, _, scale_name = self._where[self._scale_name(part.name)]
      codes, scale = shard.read(stored), scales.read(scale_name)
      one = fp8_lib.join(
        [(codes, scale.astype(np.float32))], (), quantization.block
      )
      fp8_model.check(one, f"{self._folder}/{file}: tensor {stored!r}")
      coded.append((codes, one.scale))
    rest = [
      assemble(self._read(part), part.shape, self._dtype(part))
      for part in fused.parts[count:]
    ]
    return fp8_lib.join(coded, rest, quantization.block)

  def _is_coded(self, part: Part) -> bool:
    shard, _, stored = self._where[part.name]
    return shard.dtype_name(stored) == fp8_lib.E4M3_NAME

  def _scale_name(self, tensor: str) -> str:
    """Of the scales of a tensor; its own name where there can be none."""
    if self._quantization is None or not tensor.endswith(".weight"):
      return tensor
    return f"{tensor.removesuffix('weight')}{self._quantization.suffix}"

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    if name in self.fp8:
      raise SpecPilotError(
        f"{self._folder}: parameter {name!r} is in FP8 and has no rows of one"
        " type"
      )
    fused = self._table[name]
    dtypes = fused_dtypes({name: fused}, self._dtype)
    return fused_blocks(fused, dtypes[name], self._read)

  def _check_header(self, part: Part) -> None:
    shard, file, stored = self._where[part.name]
    shape, dtype = shard.shape(stored), shard.dtype_name(stored)
    supported = [*_DTYPES]
    if self._quantization is not None and fp8_lib.is_linear(part):
      supported.append(fp8_lib.E4M3_NAME)
    if dtype not in supported:
      raise SpecPilotError(
        f"{self._folder}/{file}: tensor {stored!r} has dtype {dtype},"
        f" supported are {', '.join(supported)}"
      )
    if shape != part.shape:
      raise SpecPilotError(
        f"{self._folder}/{file}: tensor {stored!r} has shape {list(shape)},"
        f" expected {list(part.shape)}"
      )

    if self._quantization is not None:
      self._check_scales(part, self._quantization)

  def _check_scales(
    self, part: Part, quantization: fp8_lib.Quantization
  ) -> None:
    """Of a tensor: that they are there where it is codes, and fit."""
    _, file, stored = self._where[part.name]
    where = f"{self._folder}/{file}: tensor"
    name = self._scale_name(part.name)
    if not self._is_coded(part):
      if name != part.name and name in self._where:
        raise SpecPilotError(
          f"{where} {self._where[name][2]!r} scales {stored!r}, which is not"
          f" {fp8_lib.E4M3_NAME}"
        )
      return
    if quantization.leaves(stored.removesuffix(".weight")):
      raise SpecPilotError(
        f"{where} {stored!r} is {fp8_lib.E4M3_NAME}, {CONFIG} says that it is"
        " not converted"
      )
    if name not in self._where:
      raise SpecPilotError(f"{where} {stored!r} has no {quantization.suffix}")
    shard, file, stored = self._where[name]
    where = f"{self._folder}/{file}: tensor {stored!r}"
    if shard.dtype_name(stored) not in _DTYPES:
      raise SpecPilotError(
        f"{where} has dtype {shard.dtype_name(stored)}, supported are"
        f" {', '.join(_DTYPES)}"
      )
    shapes = quantization.scale_shapes(part)
    if shard.shape(stored) not in shapes:
      raise SpecPilotError(
        f"{where} has shape {list(shard.shape(stored))}, expected"
        f" {list(shapes[0])}"
      )

  def _dtype(self, part: Part) -> np.dtype:
    shard, _, stored = self._where[part.name]
    if self._is_coded(part):
      return common.FLOAT32  # of what codes and scales stand for
    return np.dtype(_DTYPES[shard.dtype_name(stored)])

  def _read(self, part: Part) -> Iterator[np.ndarray]:
    shard, file, stored = self._where[part.name]
    return checked(shard.blocks(stored), str(self._folder / file), stored)

  def _check_tied(self, embedding: Part) -> None:
    head = Part(LM_HEAD, embedding.shape)
    self._check_header(head)
    same = self._dtype(head) == self._dtype(embedding)
    pairs = zip(self._read(head), self._read(embedding), strict=True)
    if not same or not all(np.array_equal(a, b) for a, b in pairs):
      raise SpecPilotError(
        f"{self._folder}: {CONFIG} ties the embeddings, but tensor"
        f" {self._where[LM_HEAD][2]!r} differs from {EMBEDDING!r}"
      )


def _text_name(stored: str) -> str:
  for prefix, ours in _TEXT_PREFIXES:
    if stored.startswith(prefix):
      return ours + stored.removeprefix(prefix)
  return stored


def save(
  folder: str | os.PathLike[str],
  config: ModelConfig,
  params: Mapping[str, Any],
  *,
  tokenizer_files: Mapping[str, bytes] | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  encode: bool = False,
) -> None:
  """Writes a folder that `transformers` and `load` read.

  The folder appears complete or not at all.

  Args:
    folder: must not exist, or be empty.
    config: the model.
    params: parameter name to array (bfloat16, float16 or float32).
    tokenizer_files: `Tokenizer.files`, or None.
    max_shard_bytes: above this the weights are sharded, with an index.
    encode: write one W12 file instead, which `load` alone reads.

  Raises:
    SpecPilotError: names, shapes or values that do not fit the config, or a
      folder that cannot be written.
  """
  table = layout(config)
  fp8_lib.refuse_to_write(params, config.name)
  for name in params:
    if name not in table:
      raise SpecPilotError(f"{config.name}: unknown parameter {name!r}")
  for name, fused in table.items():
    if name not in params:
      raise SpecPilotError(f"{config.name}: parameter {name!r} is missing")
    common.check_weight(
      np.asarray(params[name]), config.name, name, fused.shape
    )
  fields = to_hf(config, str(np.asarray(params["embed.weight"]).dtype))
  tensors: dict[str, np.ndarray] = {}
  for name, fused in table.items():
    tensors |= split(fused, np.ascontiguousarray(np.asarray(params[name])))
  nbytes = {tensor: array.nbytes for tensor, array in tensors.items()}
  files = {} if encode else shards(nbytes, max_shard_bytes)
  with common.new_folder(folder) as staging:
    if encode:
      w12_file.save(staging / w12_file.WEIGHTS, tensors)
    for file, names in files.items():
      shard = {tensor: tensors[tensor] for tensor in names}
      # transformers wants to know which framework's layout the rows have.
      try:
        safetensors.numpy.save_file(
          shard, staging / file, metadata={"format": "pt"}
        )
      except safetensors.SafetensorError as error:
        raise SpecPilotError(
          f"{folder}: cannot be written ({common.first_line(error)})"
        ) from None
    if len(files) > 1:
      total = sum(nbytes.values())
      weight_map = {tensor: f for f, names in files.items() for tensor in names}
      index = {"metadata": {"total_size": total}, "weight_map": weight_map}
      (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (staging / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    for file, content in (tokenizer_files or {}).items():
      (staging / file).write_bytes(content)


def shards(nbytes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
  """File name -> tensors in it.

  Args:
    nbytes: of each tensor, in the order in which files are filled.
    max_bytes: of a file, unless one tensor has more.
  """
  groups: list[list[str]] = [[]]
  size = 0
  for tensor, count in nbytes.items():
    if groups[-1] and size + count > max_bytes:
      groups.append([])
      size = 0
    groups[-1].append(tensor)
    size += count
  if len(groups) == 1:
    return {WEIGHTS: groups[0]}
  return {
    f"model-{i:05}-of-{len(groups):05}.safetensors": group
    for i, group in enumerate(groups, 1)
  }
