"""Where fetched models and prompt sets lie on this machine.

They are kept outside the repository, so that several checkouts share them:
`$SPECPILOT_DATA`, or `specpilot-jax` in the user's cache folder.
`python -m experiments.fetch NAME` puts them there.
"""

import os
from pathlib import Path

from specpilot_jax.errors import SpecPilotError

# The file of each asset that its readers open, below `data_dir()`.
ASSET_FILES = {
  "smollm2": "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
  "humaneval": "humaneval/HumanEval.jsonl.gz",
  "mtbench": "mtbench/question.jsonl",
  "gsm8k": "gsm8k/cases.jsonl",
}


def data_dir() -> Path:
  """The folder of fetched data; it need not exist.

  Returns:
    `$SPECPILOT_DATA` if set and not empty, else `specpilot-jax` below
    `$XDG_CACHE_HOME` (ignored unless absolute, as the XDG base directory
    specification demands) or `~/.cache`. Absolute.

  Raises:
    SpecPilotError: no home folder is known and neither variable is set.
  """
  try:
    if chosen := os.environ.get("SPECPILOT_DATA"):
      return Path(chosen).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
      cache = Path.home() / ".cache"
  except RuntimeError as e:
    raise SpecPilotError(
      "no home folder to keep data in; set SPECPILOT_DATA to a folder"
    ) from e
  return cache / "specpilot-jax"


def asset_path(name: str) -> Path:
  """The file of a fetched asset.

  Args:
    name: a key of `ASSET_FILES`.

  Raises:
    SpecPilotError: unknown name (the known ones are listed), or not fetched
      yet (the command that fetches it is named).
  """
  if name not in ASSET_FILES:
    raise SpecPilotError(
      f"unknown data set {name!r}; known: {', '.join(ASSET_FILES)}"
    )
  path = data_dir() / ASSET_FILES[name]
  if not path.is_file():
    raise SpecPilotError(
      f"{name} is not at {path}; "
      f"get it with: python -m experiments.fetch {name}"
    )
  return path
