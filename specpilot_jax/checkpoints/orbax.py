"""Orbax checkpoints: exact copies of what was loaded, in one folder.

    specpilot.json   format name and version, config, notes, source hashes,
                     shape and dtype of every parameter
    params/          the weights, written and read by Orbax
    tokenizer/       the tokenizer in Hugging Face form, where there is one

The folder appears complete or not at all.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Generator
from typing import Any

import numpy as np

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints.layout import layout
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

METADATA = "specpilot.json"
FORMAT = "specpilot-jax checkpoint"
VERSION = 1
_PARAMS = "params"
_TOKENIZER = "tokenizer"


def save(folder: str | os.PathLike[str], checkpoint: common.Checkpoint) -> None:
  """Writes a checkpoint.

  Args:
    folder: must not exist, or be empty.
    checkpoint: its parameters may be numpy or JAX arrays.

  Raises:
    SpecPilotError: parameters that do not fit the config, or a folder that
      cannot be written.
  """
  import orbax.checkpoint as ocp

  config = checkpoint.config
  table = layout(config)
  for name in checkpoint.params:
    if name not in table:
      raise SpecPilotError(f"{config.name}: unknown parameter {name!r}")
  params = {}
  for name, fused in table.items():
    if name not in checkpoint.params:
      raise SpecPilotError(f"{config.name}: parameter {name!r} is missing")
    params[name] = np.asarray(checkpoint.params[name])
    common.check_weight(params[name], config.name, name, fused.shape)
  tokenizer = checkpoint.tokenizer
  files = {} if tokenizer is None else tokenizer.files
  metadata = {
    "format": FORMAT,
    "version": VERSION,
    "config": dataclasses.asdict(config),
    "source": checkpoint.source,
    "notes": list(checkpoint.notes),
    "sha256": dict(checkpoint.sha256),
    "tokenizer_files": sorted(files),
    "params": {
      name: {"shape": list(array.shape), "dtype": str(array.dtype)}
      for name, array in params.items()
    },
  }
  with common.new_folder(folder) as staging:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(staging / _PARAMS, params)
      checkpointer.wait_until_finished()
    if tokenizer is not None:
      (staging / _TOKENIZER).mkdir()
      tokenizer.save(staging / _TOKENIZER)
    (staging / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def load(folder: str | os.PathLike[str]) -> common.Checkpoint:
  """Reads a checkpoint that `save` wrote; arrays come back bit for bit.

  Raises:
    SpecPilotError: no metadata, another version, a missing or damaged
      parameter or tokenizer file; the line names it.
  """
  folder = pathlib.Path(folder).absolute()
  path = folder / METADATA
  metadata = common.read_json(path)
  if metadata.get("format") != FORMAT:
    raise SpecPilotError(
      f"{path}: format is {metadata.get('format')!r}, expected {FORMAT!r}"
    )
  if metadata.get("version") != VERSION:
    raise SpecPilotError(
      f"{path}: version is {metadata.get('version')!r}, this release reads"
      f" {VERSION}"
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
  params = _params(
    folder / _PARAMS, config, _field(metadata, "params", dict, path)
  )
  return common.Checkpoint(
    config=config,
    params=params,
    tokenizer=tokenizer,
    source=str(_field(metadata, "source", str, path)),
    notes=tuple(_field(metadata, "notes", list, path)),
    sha256=_field(metadata, "sha256", dict, path),
  )


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


def _params(
  folder: pathlib.Path, config: ModelConfig, recorded: dict[str, Any]
) -> dict[str, np.ndarray]:
  import jax
  import orbax.checkpoint as ocp

  if not folder.is_dir():
    raise SpecPilotError(f"{folder}: the weights are missing")
  table = layout(config)
  with (
    _quiet(),
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
  ):
    with _damage(folder):
      item = checkpointer.metadata(folder).item_metadata
      # Orbax logs what is wrong with it, and gives None.
      stored = None if item is None else dict(item.tree)
    if stored is None:
      raise SpecPilotError(
        f"{folder}: damaged Orbax checkpoint (unreadable metadata)"
      )
    for name in table:
      if name not in stored or name not in recorded:
        raise SpecPilotError(f"{folder}: parameter {name!r} is missing")
    for name in stored:
      if name not in table:
        raise SpecPilotError(f"{folder}: unknown parameter {name!r}")
    kinds = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored
    )
    with _damage(folder):
      params = checkpointer.restore(
        folder, args=ocp.args.PyTreeRestore(restore_args=kinds)
      )
  ordered = {}
  for name, fused in table.items():
    array = np.asarray(params[name])
    common.check_weight(array, str(folder), name, fused.shape)
    dtype = recorded[name].get("dtype")
    if str(array.dtype) != dtype:
      raise SpecPilotError(
        f"{folder}: parameter {name!r} has dtype {array.dtype}, {METADATA}"
        f" says {dtype}"
      )
    ordered[name] = array
  return ordered


@contextlib.contextmanager
def _damage(folder: pathlib.Path) -> Generator[None]:
  """Any failure inside is a damaged checkpoint."""
  try:
    yield
  except Exception as error:  # Orbax raises many kinds for damaged files.
    raise SpecPilotError(
      f"{folder}: damaged Orbax checkpoint ({common.first_line(error)})"
    ) from None


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  """Nothing is logged: what matters of it is in the error."""
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  before = [logger.disabled for logger in loggers]
  hook = sys.unraisablehook
  _AbandonedReads.install()
  for logger in loggers:
    logger.disabled = True
  try:
    yield
  except SpecPilotError:
    # The reads that Orbax gave up may end later than this.
    hook = sys.unraisablehook
    raise
  finally:
    sys.unraisablehook = hook
    for logger, disabled in zip(loggers, before, strict=True):
      logger.disabled = disabled


class _AbandonedReads:
  """An `unraisablehook` that drops what abandoned reads report.

  Orbax closes its event loop at the first read that fails. Each of the others
  then fails to call back, in a thread of its own and at any later time, and
  prints a traceback. All else goes to the hook that was there before.
  """

  def __init__(self, before):
    self._before = before

  def __call__(self, unraisable) -> None:
    error = unraisable.exc_value
    closed = isinstance(error, RuntimeError) and "loop is closed" in str(error)
    if not closed:
      self._before(unraisable)

  @classmethod
  def install(cls) -> None:
    if not isinstance(sys.unraisablehook, cls):
      sys.unraisablehook = cls(sys.unraisablehook)
