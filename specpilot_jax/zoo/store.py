"""Where the zoo's weights lie inside the package, and how they are written."""

import gzip
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from specpilot_jax.zoo import data, recipes

WEIGHTS = pathlib.Path(__file__).parent / "weights"
TARGET = WEIGHTS / "target"
DFLASH = WEIGHTS / "dflash"
SMOLLM2_DFLASH = WEIGHTS / "smollm2_dflash"
DRAFTERS = {
  "zoo": {
    "dflash": DFLASH,
    "dflash2": WEIGHTS / "dflash2",
    "dspark": WEIGHTS / "dspark",
  },
  "smollm2": {"dflash": SMOLLM2_DFLASH},
}
"""Drafters by the name of their target and their kind."""
PROMPTS = WEIGHTS / "prompts.jsonl"
LONG_PROMPTS = WEIGHTS / "prompts_512.jsonl.gz"

LONG_LENGTHS = (512, 1024)
"""Ids of the shortest and the longest of the long prompts."""
LONG_PER_HALF = 32
"""Long prompts of each domain in each half."""


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
  # Without the spaces that are most of it.
  compact = json.dumps(
    json.loads(tokenizer_json), ensure_ascii=False, separators=(",", ":")
  )
  return {
    "tokenizer.json": (compact + "\n").encode(),
    "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
  }


def write_target(
  folder: pathlib.Path,
  params: Mapping[str, np.ndarray],
  tokenizer_json: bytes,
) -> None:
  """Writes a trained target as it ships: a Hugging Face folder in bfloat16
  whose weights are a W12 file.

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
    encode=True,
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
  """Writes runs of lines of held-out files as prompts: both sets.

  A prompt begins at a random line: beginnings of files are mostly licences,
  docstrings and imports. One that does not encode to itself is left out.

  The short prompts are code, one of a file. The long ones are code and
  documentation in turn, `LONG_LENGTHS` ids each, taken from all distributions
  alike; the first half is for development, the second is sealed, and no file
  is in both. There are fewer where files are too few.

  Args:
    path: JSON lines of the short prompts; the long ones lie beside it, named as
      `LONG_PROMPTS`.
    held_out: `source` and `text` of each file.
    licences: of the distributions that sources begin with.
    backend: a `tokenizers.Tokenizer`.
    count: short prompts.
    tokens: ids of each.
    room: ids that the file must have beyond them.
  """
  by_domain: dict[str, list[tuple[str, str, str]]] = {
    domain: [] for domain in data.DOMAINS
  }
  for document in held_out:
    source, text = document["source"], document["text"]
    licence = licences.get(source.split("/")[0])
    if licence is not None:
      by_domain[data.domain_of(source)].append((source, licence, text))
  short = (
    {"source": f"{source}:{line + 1}", "licence": licence, "text": run}
    for index, (source, licence, text) in enumerate(by_domain["code"])
    for line, run in itertools.islice(
      _runs(text, index, backend, (tokens, tokens), room), 1
    )
  )
  _write_lines(path, itertools.islice(short, count))
  halves = [
    [
      _long_prompts(domain, by_domain[domain], half, backend)
      for domain in data.DOMAINS
    ]
    for half in range(2)
  ]
  size = min(len(prompts) for half in halves for prompts in half)
  _write_lines(
    path.with_name(LONG_PROMPTS.name),
    (prompts[i] for half in halves for i in range(size) for prompts in half),
  )


def _write_lines(path: pathlib.Path, prompts) -> None:
  text = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
  if path.suffix == ".gz":
    text = gzip.compress(text, mtime=0)  # the same bytes again
  path.write_bytes(text)


def _long_prompts(
  domain: str, documents: Sequence[tuple[str, str, str]], half: int, backend
) -> list[dict[str, str]]:
  """Prompts of a domain from one half of its documents."""
  streams: dict[str, list[Iterator[dict[str, str]]]] = {}

  def prompts(source, licence, text, seed):
    # From the first half of its lines: few documents are long.
    for line, run in _runs(text, seed, backend, LONG_LENGTHS, 0, first=0.5):
      where = f"{source}:{line + 1}"
      yield {"domain": domain, "source": where, "licence": licence, "text": run}

  for source, licence, text in documents:
    # Not the bytes that tell held-out files.
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[8:16])
    if seed % 2 == half:
      own = streams.setdefault(source.split("/")[0], [])
      own.append(prompts(source, licence, text, seed))
  in_turn = _in_turn([_in_turn(streams[name]) for name in sorted(streams)])
  return list(itertools.islice(in_turn, LONG_PER_HALF))


def _in_turn(streams: Sequence[Iterator]) -> Iterator:
  """One of each, then a second of each that has one, and so on."""
  rows = itertools.zip_longest(*streams)
  return (item for row in rows for item in row if item is not None)


def _runs(
  text: str,
  seed: int,
  backend,
  lengths: tuple[int, int],
  room: int,
  first: float = 1.0,
) -> Iterator[tuple[int, str]]:
  """Runs of lines of a text, from a random line on: (first line, run).

  Args:
    lengths: least and most ids of a run.
    room: ids behind a run that belong to no other.
    first: share of the lines in which the first run begins.
  """
  lines = text.splitlines(keepends=True)
  rng = np.random.default_rng(seed)
  line = int(rng.integers(max(1, int(first * len(lines)))))
  while line < len(lines):
    ids = backend.encode("".join(lines[line:])).ids
    most = min(lengths[1], len(ids) - room)
    if most < lengths[0]:
      return
    length = int(rng.integers(lengths[0], most + 1))
    run = backend.decode(ids[:length])
    if backend.encode(run).ids == ids[:length]:
      yield line, run
    line += len(backend.decode(ids[: length + room]).splitlines())
