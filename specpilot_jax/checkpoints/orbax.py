"""Orbax checkpoints: exact copies of what was loaded, in one folder.

    specpilot.json   format name and version, config, notes, source hashes,
                     shape and dtype of every parameter
    params/          the weights, written and read by Orbax: arrays, or
                     dictionaries of the parts of a matrix in W12
    tokenizer/       the tokenizer in Hugging Face form, where there is one

The folder appears complete or not at all.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import fp8, stored, w12_storage
from specpilot_jax.checkpoints.layout import layout
from specpilot_jax.checkpoints.source import Source
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

METADATA = stored.METADATA
FORMAT = "specpilot-jax checkpoint"
VERSION = 1
W12_VERSION = 2
"""Of folders with a matrix in W12, which older releases must not read."""
PARAMS = "params"
_TOKENIZER = "tokenizer"


def save(folder: str | os.PathLike[str], checkpoint: common.Checkpoint) -> None:
  """Writes a checkpoint.

  Args:
    folder: must not exist, or be empty.
    checkpoint: its parameters may be numpy or JAX arrays, or `W12Array`.

  Raises:
    SpecPilotError: parameters that do not fit the config, or a folder that
      cannot be written.
  """
  import orbax.checkpoint as ocp

  config = checkpoint.config
  table = layout(config)
  fp8.refuse_to_write(checkpoint.params, config.name)
  for name in checkpoint.params:
    if name not in table:
      raise SpecPilotError(f"{config.name}: unknown parameter {name!r}")
  params = {}
  for name, fused in table.items():
    if name not in checkpoint.params:
      raise SpecPilotError(f"{config.name}: parameter {name!r} is missing")
    value = checkpoint.params[name]
    if not isinstance(value, W12Array):
      value = np.asarray(value)
    _check(value, config.name, name, fused.shape)
    params[name] = value
  records = {name: stored.record(value) for name, value in params.items()}
  tree: dict[str, Any] = {
    name: w12_storage.to_arrays(value) if isinstance(value, W12Array) else value
    for name, value in params.items()
  }
  with common.new_folder(folder) as staging:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(staging / PARAMS, tree)
      checkpointer.wait_until_finished()
    finish(
      staging,
      records,
      config=config,
      tokenizer=checkpoint.tokenizer,
      source=checkpoint.source,
      notes=checkpoint.notes,
      sha256=checkpoint.sha256,
    )


def finish(
  folder: pathlib.Path,
  records: Mapping[str, Mapping[str, Any]],
  *,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
  source: str,
  notes: tuple[str, ...],
  sha256: Mapping[str, str],
  conversion: Mapping[str, Any] | None = None,
) -> None:
  """Adds what makes a folder of weights a checkpoint, the metadata last.

  Args:
    folder: with the weights.
    records: see `stored.record`.
    config: see `Checkpoint`, as for the following.
    tokenizer: see there.
    source: see there.
    notes: see there.
    sha256: see there.
    conversion: what it was made from and how, where it was converted.

  Raises:
    OSError: it cannot be written.
  """
  files = {} if tokenizer is None else tokenizer.files
  has_w12 = any(stored.is_w12(entry) for entry in records.values())
  metadata = {
    "format": FORMAT,
    "version": W12_VERSION if has_w12 else VERSION,
    "config": dataclasses.asdict(config),
    "source": source,
    "notes": list(notes),
    "sha256": dict(sha256),
    "tokenizer_files": sorted(files),
    "params": {name: dict(entry) for name, entry in records.items()},
  }
  if conversion is not None:
    metadata["conversion"] = dict(conversion)
  text = json.dumps(metadata, indent=2) + "\n"
  if tokenizer is not None:
    (folder / _TOKENIZER).mkdir(exist_ok=True)
    tokenizer.save(folder / _TOKENIZER)
  common.write_whole(folder / METADATA, text.encode())


def load(
  folder: str | os.PathLike[str], *, weights: str = common.W12
) -> common.Checkpoint:
  """Reads a checkpoint that `save` or a conversion wrote, bit for bit.

  Args:
    folder: the checkpoint.
    weights: `w12` gives a matrix in W12 as a `W12Array` of NumPy leaves,
      `bf16` decodes it.

  Raises:
    SpecPilotError: no metadata, another version, a missing or damaged
      parameter or tokenizer file; the line names it.
  """
  common.check_weights_option(weights)
  with open_source(folder) as source:
    return source.checkpoint(decode=weights == common.BF16)


@contextlib.contextmanager
def open_source(folder: str | os.PathLike[str]) -> Generator[Source]:
  """The same, to be read parameter by parameter while it is open."""
  from specpilot_jax.checkpoints import orbax_arrays

  folder = pathlib.Path(folder).absolute()
  path = folder / METADATA
  metadata = common.read_json(path)
  if metadata.get("format") != FORMAT:
    raise SpecPilotError(
      f"{path}: format is {metadata.get('format')!r}, expected {FORMAT!r}"
    )
  if metadata.get("version") not in (VERSION, W12_VERSION):
    raise SpecPilotError(
      f"{path}: version is {metadata.get('version')!r}, this release reads"
      f" {VERSION} and {W12_VERSION}"
    )
  config = _config(_field(metadata, "config", dict, path), path)
  files = {}
  for file in _field(metadata, "tokenizer_files", list, path):
    try:
      files[file] = (folder / _TOKENIZER / file).read_bytes()
    except OSError as error:
      raise SpecPilotError(
        f"{folder / _TOKENIZER / file}: cannot be read ({error.strerror})"
      ) from None
  tokenizer = None
  if files:
    tokenizer = Tokenizer.from_files(files, str(folder / _TOKENIZER))
    # Only a check here: the ids in the metadata are those that were in use.
    common.with_tokenizer(config, tokenizer, str(folder))
  table = layout(config)
  params = folder / PARAMS
  records = _field(metadata, "params", dict, path)
  if not params.is_dir():
    raise SpecPilotError(f"{params}: the weights are missing")
  for name in table:
    if name in records:
      stored.check_record(name, records[name], str(path))
      stored.check_there(params, name, records[name])
  found = orbax_arrays.read_tree(params)
  for name in table:
    if name not in found or name not in records:
      raise SpecPilotError(f"{params}: parameter {name!r} is missing")
  for name in found:
    if name not in table:
      raise SpecPilotError(f"{params}: unknown parameter {name!r}")
  records = {name: records[name] for name in table}
  stored.check_keys(found, records, str(params))

  def read_stored(name: str) -> np.ndarray | W12Array:
    with orbax_arrays.quiet():
      value = stored.restore(params, name, records[name])
    _check(value, str(params), name, table[name].shape)
    return value

  yield Source(
    config=config,
    tokenizer=tokenizer,
    name=str(_field(metadata, "source", str, path)),
    notes=tuple(_field(metadata, "notes", list, path)),
    sha256=_field(metadata, "sha256", dict, path),
    fingerprint=lambda: _fingerprint(folder),
    dtypes={name: _dtype(name, entry, path) for name, entry in records.items()},
    read_blocks=lambda name: stored.blocks(read_stored(name)),
    read_stored=read_stored,
  )


def _check(value, where: str, name: str, shape: tuple[int, ...]) -> None:
  if not isinstance(value, W12Array):
    common.check_weight(value, where, name, shape)
  elif value.shape != tuple(shape):
    raise SpecPilotError(
      f"{where}: tensor {name!r} has shape {list(value.shape)}, expected"
      f" {list(shape)}"
    )


def _dtype(name: str, entry: Mapping[str, Any], path) -> np.dtype:
  for dtype in common.WEIGHT_DTYPES:
    if str(dtype) == entry.get("dtype"):
      return dtype
  raise SpecPilotError(
    f"{path}: parameter {name!r} has dtype {entry.get('dtype')!r}, supported"
    f" are {', '.join(map(str, common.WEIGHT_DTYPES))}"
  )


def _fingerprint(folder: pathlib.Path) -> dict[str, str]:
  """One digest for the metadata, one for all that Orbax wrote."""
  digest = hashlib.sha256()
  for path in sorted((folder / PARAMS).rglob("*")):
    if path.is_file():
      place = path.relative_to(folder).as_posix()
      digest.update(f"{place} {common.sha256_of(path)}\n".encode())
  return {
    METADATA: common.sha256_of(folder / METADATA),
    PARAMS: digest.hexdigest(),
  }


def _field(metadata, key, kind, path) -> Any:
  if not isinstance(metadata.get(key), kind):
    raise SpecPilotError(f"{path}: field {key!r} is missing or malformed")
  return metadata[key]


def _config(fields: dict[str, Any], path: pathlib.Path) -> ModelConfig:
  names = {field.name for field in dataclasses.fields(ModelConfig)}
  for name in sorted(names ^ fields.keys()):
    what = "missing" if name in names else "unknown"
    raise SpecPilotError(f"{path}: config field {name!r} is {what}")
  values: dict[str, Any] = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in fields.items()
  }
  try:
    return ModelConfig(**values)
  except TypeError as error:
    raise SpecPilotError(f"{path}: malformed config ({error})") from None
