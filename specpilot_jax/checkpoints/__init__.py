"""Loading and saving models: Hugging Face folders, GGUF files, Orbax."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Generator

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints.checkpoint import Checkpoint
from specpilot_jax.checkpoints.source import Source
from specpilot_jax.errors import SpecPilotError

__all__ = ["Checkpoint", "Source", "load_checkpoint", "open_source"]

ZOO = "zoo"
"""Name of the model that ships with the package."""

# Models that are fetched by name: asset -> the preset that describes it.
SMOLLM2 = "SmolLM2-135M"
_ASSETS = {"smollm2": SMOLLM2}


def load_checkpoint(
  name_or_path: str | os.PathLike[str], *, weights: str = common.BF16
) -> Checkpoint:
  """Loads a model by name or path.

  Args:
    name_or_path: `zoo`, `smollm2`, a Hugging Face folder, a `.gguf` file, or a
      folder written by `checkpoints.orbax.save` or a conversion.
    weights: `bf16` decodes matrices that are stored in W12, `w12` gives them
      as `W12Array`.

  Raises:
    SpecPilotError: not fetched, not found, or not loadable; one line says
      which, and what was expected.
  """
  common.check_weights_option(weights)
  with open_source(name_or_path) as source:
    return source.checkpoint(decode=weights == common.BF16)


@contextlib.contextmanager
def open_source(name_or_path: str | os.PathLike[str]) -> Generator[Source]:
  """The same, to be read parameter by parameter while it is open."""
  # The readers are imported on use: Orbax alone takes a second.
  if str(name_or_path) == ZOO:
    from specpilot_jax.checkpoints import hf
    from specpilot_jax.zoo import store

    with hf.open_source(store.TARGET) as zoo:
      config = dataclasses.replace(zoo.config, name=ZOO)
      yield dataclasses.replace(zoo, config=config, name=ZOO)
    return
  with _reader(name_or_path) as source:
    yield source


def _reader(name_or_path) -> contextlib.AbstractContextManager[Source]:
  if str(name_or_path) in _ASSETS:
    from specpilot_jax import paths
    from specpilot_jax.checkpoints import gguf

    name = str(name_or_path)
    return gguf.open_source(paths.asset_path(name), _ASSETS[name])
  path = pathlib.Path(name_or_path)
  if path.is_file() and path.suffix == ".gguf":
    from specpilot_jax.checkpoints import gguf

    return gguf.open_source(path)
  if path.is_dir():
    from specpilot_jax.checkpoints import hf, orbax

    if os.path.lexists(path / orbax.METADATA):
      return orbax.open_source(path)
    if os.path.lexists(path / hf.CONFIG):
      return hf.open_source(path)
    raise SpecPilotError(
      f"{path}: neither a Hugging Face folder ({hf.CONFIG}) nor a saved"
      f" checkpoint ({orbax.METADATA})"
    )
  if path.exists():
    raise SpecPilotError(
      f"{path}: not a .gguf file; for safetensors give the folder"
    )
  raise SpecPilotError(
    f"model {str(name_or_path)!r} is neither a known name"
    f" ({', '.join((ZOO, *_ASSETS))}) nor an existing path"
  )
