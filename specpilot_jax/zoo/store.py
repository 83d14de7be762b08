"""Where the zoo's weights lie inside the package, and how they are written."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from specpilot_jax.zoo import recipes

WEIGHTS = pathlib.Path(__file__).parent / "weights"
TARGET = WEIGHTS / "target"
DFLASH = WEIGHTS / "dflash"
SMOLLM2_DFLASH = WEIGHTS / "smollm2_dflash"
DRAFTERS = {"zoo": DFLASH, "smollm2": SMOLLM2_DFLASH}
"""Drafters by the name of their target."""
PROMPTS = WEIGHTS / "prompts.jsonl"


def prompts() -> list[dict[str, str]]:
  """Lines of held-out files: `source`, `licence` and `text` of each."""
  lines = PROMPTS.read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines]


def tokenizer_files(tokenizer_json: bytes) -> dict[str, bytes]:
  """A Hugging Face tokenizer: base model, no chat template.

  Args:
    tokenizer_json: as the `tokenizers` library saves it.
  """
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": recipes.SPECIAL_TOKENS[recipes.END_ID],
    "model_max_length": recipes.TARGET.context_length,
    "clean_up_tokenization_spaces": False,
  }
  return {
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
  }


def write_target(
  folder: pathlib.Path,
  params: Mapping[str, np.ndarray],
  tokenizer_json: bytes,
) -> None:
  """Writes a trained target as a Hugging Face folder in bfloat16.

  Args:
    folder: must not exist, or be empty.
    params: of `recipes.TARGET`, any float dtype.
    tokenizer_json: its tokenizer.
  """
  from specpilot_jax.checkpoints import hf

  hf.save(
    folder,
    recipes.TARGET,
    {n: np.asarray(v).astype(ml_dtypes.bfloat16) for n, v in params.items()},
    tokenizer_files=tokenizer_files(tokenizer_json),
  )


def write_prompts(
  path: pathlib.Path,
  held_out: Sequence[Mapping[str, str]],
  licences: Mapping[str, str],
  backend,
  *,
  count: int = 128,
  tokens: int = 200,
  room: int = 256,
) -> None:
  """Writes a run of lines of each of some held-out files as prompts.

  A prompt begins at a random line: beginnings of files are mostly licences,
  docstrings and imports.

  Args:
    path: JSON lines to write.
    held_out: `source` and `text` of each file.
    licences: of the distributions that sources begin with.
    backend: a `tokenizers.Tokenizer`.
    count: prompts.
    tokens: ids per prompt; one that does not encode to itself is left out.
    room: ids that the file must have beyond them.
  """
  prompts = []
  for index, document in enumerate(held_out):
    licence = licences.get(document["source"].split("/")[0])
    if licence is None:
      continue
    lines = document["text"].splitlines(keepends=True)
    line = int(np.random.default_rng(index).integers(len(lines)))
    ids = backend.encode("".join(lines[line:])).ids
    if len(ids) < tokens + room:
      continue
    text = backend.decode(ids[:tokens])
    if backend.encode(text).ids != ids[:tokens]:
      continue
    prompts.append(
      {
        "source": f"{document['source']}:{line + 1}",
        "licence": licence,
        "text": text,
      }
    )
    if len(prompts) == count:
      break
  path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
