"""A tiny model, prompts, and a way to run `experiments.main` in-process."""

import json
import pathlib

import ml_dtypes
import numpy as np
from absl.testing import flagsaver

from experiments import main
from specpilot_jax import configs
from specpilot_jax.checkpoints import hf
from specpilot_jax.models import target as target_lib
from tests.checkpoints import builders

PROMPTS = ("the cat on the mat", "the mat on the cat on", "été été", "x")


def save_model(
  folder: pathlib.Path, *, layers: int = 2, exact: bool = False
) -> pathlib.Path:
  """A random Llama with a byte-level tokenizer.

  Args:
    exact: its weights are bfloat16 values.
  """
  config = builders.config(
    context_length=128,
    eos_token_ids=(2,),
    layer_types=(configs.ATTENTION,) * layers,
  )
  params = target_lib.random_params(config, 0, 1.3)
  if exact:
    params = {
      name: np.asarray(value).astype(ml_dtypes.bfloat16)
      for name, value in params.items()
    }
  hf.save(folder, config, params, tokenizer_files=builders.tokenizer_files())
  return folder


def save_prompts(path: pathlib.Path) -> pathlib.Path:
  lines = [
    {"id": f"p{i}", "domain": "even" if i % 2 == 0 else "odd", "prompt": text}
    for i, text in enumerate(PROMPTS)
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


def run(*args: object) -> int:
  """Runs a command line; the exit status."""
  with flagsaver.flagsaver():
    try:
      main.run(["main", *map(str, args)])
    except SystemExit as end:
      return end.code if isinstance(end.code, int) else 1
  return 0
