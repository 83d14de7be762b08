"""Loading and saving models: Hugging Face folders, GGUF files, Orbax."""

import os
import pathlib

from specpilot_jax.checkpoints.checkpoint import Checkpoint
from specpilot_jax.errors import SpecPilotError

__all__ = ["Checkpoint", "load_checkpoint"]

ZOO = "zoo"
"""Name of the model that ships with the package."""

# Models that are fetched by name: asset -> the preset that describes it.
SMOLLM2 = "SmolLM2-135M"
_ASSETS = {"smollm2": SMOLLM2}


def load_checkpoint(name_or_path: str | os.PathLike[str]) -> Checkpoint:
  """Loads a model by name or path.

  Args:
    name_or_path: `zoo`, `smollm2`, a Hugging Face folder, a `.gguf` file, or a
      folder written by `checkpoints.orbax.save`.

  Raises:
    SpecPilotError: not fetched, not found, or not loadable; one line says
      which, and what was expected.
  """
  # The readers are imported on use: Orbax alone takes a second.
  if str(name_or_path) == ZOO:
    import dataclasses

    from specpilot_jax.checkpoints import hf
    from specpilot_jax.zoo import store

    zoo = hf.load(store.TARGET)
    config = dataclasses.replace(zoo.config, name=ZOO)
    return dataclasses.replace(zoo, config=config, source=ZOO)
  if str(name_or_path) in _ASSETS:
    from specpilot_jax import paths
    from specpilot_jax.checkpoints import gguf

    name = str(name_or_path)
    return gguf.load(paths.asset_path(name), _ASSETS[name])
  path = pathlib.Path(name_or_path)
  if path.is_file() and path.suffix == ".gguf":
    from specpilot_jax.checkpoints import gguf

    return gguf.load(path)
  if path.is_dir():
    from specpilot_jax.checkpoints import hf, orbax

    if os.path.lexists(path / orbax.METADATA):
      return orbax.load(path)
    if os.path.lexists(path / hf.CONFIG):
      return hf.load(path)
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
