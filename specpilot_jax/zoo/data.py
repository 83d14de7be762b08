"""Training text: permissively licensed Python and its documentation.

The corpus is the standard library and the installed distributions whose
metadata declares a permissive licence: their sources, their Markdown and
reStructuredText files, and the descriptions in their metadata. Files are
de-duplicated by content, split by file into training and held-out text, and
checked for overlap with the prompt sets that results are reported on.
"""

import concurrent.futures
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import multiprocessing
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specpilot_jax.errors import SpecPilotError

MIN_BYTES, MAX_BYTES = 400, 200_000
CODE = ".py"
DOCUMENTATION = (".md", ".rst")
MAX_LINE = 1000
"""Of code; longer ones are tables and generated. A paragraph may be longer."""
DOMAINS = ("code", "documentation")
HELD_OUT_PER_MILLE = dict(zip(DOMAINS, (10, 100), strict=True))
OVERLAP_WORDS = 10

_PERMISSIVE = re.compile(
  r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|Python-2\.0|ISC|Zlib"
  r"|HPND|Unlicense|0BSD)\b|2-Clause|3-Clause",
  re.IGNORECASE,
)
_LEGAL_TEXT = re.compile("licen[cs]e|copying|notice", re.IGNORECASE)
_RESTRICTED = re.compile(
  r"GPL|Proprietary|NVIDIA|Commercial|MPL", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Document:
  """One source file."""

  source: str  # distribution or "stdlib", then the path inside it
  licence: str
  text: str

  @property
  def domain(self) -> str:
    return domain_of(self.source)

  @property
  def digest(self) -> str:
    return hashlib.sha256(self.text.encode()).hexdigest()


def domain_of(source: str) -> str:
  """`code` or `documentation`, of a document's source."""
  return DOMAINS[not source.endswith(CODE)]


def _licence(metadata) -> str | None:
  """The declared licence where it is permissive, else None."""
  declared = [metadata.get("License-Expression") or ""]
  declared += [
    c.rpartition("::")[2].strip()
    for c in metadata.get_all("Classifier") or ()
    if c.startswith("License ::")
  ]
  if not any(declared):
    # The free-text field may hold a whole licence: its first line names it.
    declared = [(metadata.get("License") or "").strip().split("\n")[0][:80]]
  text = "; ".join(d for d in declared if d)
  if _RESTRICTED.search(text) or not _PERMISSIVE.search(text):
    return None
  return text


def _readable(path: pathlib.Path) -> str | None:
  try:
    if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
      return None
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError):
    return None
  if path.suffix == CODE:
    if max(map(len, text.splitlines()), default=0) > MAX_LINE:
      return None
  return text


def _description(metadata) -> str | None:
  """What a distribution says of itself, mostly its README."""
  body = metadata.get_payload() or metadata.get("Description") or ""
  text = body.strip() + "\n"
  return text if MIN_BYTES <= len(text.encode()) <= MAX_BYTES else None


def _stdlib() -> Iterator[Document]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in sorted(root.rglob("*.py")):
    inside = path.relative_to(root)
    if {"site-packages", "dist-packages", "__pycache__"} & set(inside.parts):
      continue
    if (text := _readable(path)) is not None:
      yield Document(f"stdlib/{inside}", "PSF-2.0", text)


def _distributions() -> Iterator[Document]:
  named = {}
  for dist in importlib.metadata.distributions():
    named.setdefault((dist.metadata["Name"] or "").lower(), dist)
  for name in sorted(named):
    dist = named[name]
    licence = _licence(dist.metadata)
    if licence is None:
      continue
    description = _description(dist.metadata)
    if description is not None:
      yield Document(f"{name}/DESCRIPTION.rst", licence, description)
    for file in sorted(dist.files or (), key=str):
      if file.suffix not in (CODE, *DOCUMENTATION) or ".." in file.parts:
        continue
      if file.suffix in DOCUMENTATION and _LEGAL_TEXT.search(str(file)):
        continue
      text = _readable(pathlib.Path(str(dist.locate_file(file))))
      if text is not None:
        yield Document(f"{name}/{file}", licence, text)


def corpus() -> list[Document]:
  """All documents, each content once, in the order of their digests."""
  unique: dict[str, Document] = {}
  for document in (*_stdlib(), *_distributions()):
    unique.setdefault(document.digest, document)
  return [unique[digest] for digest in sorted(unique)]


def is_held_out(document: Document) -> bool:
  """A split by file that never changes: one file in a hundred, and of the few
  that are documentation one in ten."""
  held_out = HELD_OUT_PER_MILLE[document.domain]
  return int(document.digest[:8], 16) % 1000 < held_out


def ngrams(text: str, words: int = OVERLAP_WORDS) -> set[tuple[str, ...]]:
  """Runs of words with letters in them (bare number tables match by chance)."""
  tokens = re.findall(r"\w+", text.lower())
  return {
    run
    for run in zip(*(tokens[i:] for i in range(words)), strict=False)
    if sum(any(c.isalpha() for c in word) for word in run) >= words // 2
  }


def runs_of(texts: Sequence[str]) -> set[tuple[str, ...]]:
  """All `ngrams` of some texts."""
  return set().union(*map(ngrams, texts))


_forbidden: frozenset[tuple[str, ...]] = frozenset()


def _set_forbidden(forbidden: frozenset[tuple[str, ...]]) -> None:
  global _forbidden
  _forbidden = forbidden


def _overlaps(text: str) -> bool:
  return not _forbidden.isdisjoint(ngrams(text))


def without_overlap(
  documents: Sequence[Document], tests: Sequence[str]
) -> tuple[list[Document], list[str]]:
  """Drops documents that share a run of words with a test text.

  Returns:
    The documents kept, and the sources of those dropped.
  """
  forbidden = runs_of(tests)
  if not forbidden:
    return list(documents), []
  with concurrent.futures.ProcessPoolExecutor(
    # JAX has threads: a fork could deadlock.
    mp_context=multiprocessing.get_context("spawn"),
    initializer=_set_forbidden,
    initargs=(frozenset(forbidden),),
  ) as pool:
    found = list(pool.map(_overlaps, (d.text for d in documents), chunksize=64))
  kept = [d for d, bad in zip(documents, found, strict=True) if not bad]
  dropped = [d.source for d, bad in zip(documents, found, strict=True) if bad]
  return kept, dropped


def token_stream(
  documents: Sequence[Document], tokenizer, end_id: int, seed: int
) -> np.ndarray:
  """All documents as one run of uint16 ids, shuffled, each closed by `end_id`.

  Args:
    tokenizer: a `tokenizers.Tokenizer` of at most 65,536 ids.
  """
  order = np.random.default_rng(seed).permutation(len(documents))
  parts = []
  for start in range(0, len(order), 512):
    texts = [documents[i].text for i in order[start : start + 512]]
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
      parts.append(np.asarray([*encoding.ids, end_id], np.uint16))
  return np.concatenate(parts)


def _utf8(raw: bytes, path: pathlib.Path) -> str:
  try:
    return raw.decode()
  except UnicodeDecodeError as e:
    raise SpecPilotError(f"{path}: not UTF-8 text (byte {e.start})") from None


def test_strings(path: pathlib.Path) -> list[str]:
  """All strings of a .jsonl or .jsonl.gz file, or a text file as it is.

  Raises:
    SpecPilotError: not gzip, UTF-8 or JSON lines where it should be.
  """
  raw = path.read_bytes()
  if path.suffix == ".gz":
    try:
      raw = gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error):
      raise SpecPilotError(f"{path}: not a whole gzip file") from None
  text = _utf8(raw, path)
  if ".jsonl" not in path.name:
    return [text]
  strings: list[str] = []

  def walk(value):
    if isinstance(value, str):
      strings.append(value)
    elif isinstance(value, dict):
      for v in value.values():
        walk(v)
    elif isinstance(value, list):
      for v in value:
        walk(v)

  for value in json_lines(text, path):
    walk(value)
  return strings


def json_lines(text: str, path: pathlib.Path) -> Iterator[Any]:
  """The value of each line of `path`; one that is no JSON is named."""
  # Strings in JSON may hold other line separators as they are.
  for number, line in enumerate(text.split("\n"), start=1):
    if not line.strip():
      continue
    try:
      value = json.loads(line)
    except ValueError:
      raise SpecPilotError(f"{path}: line {number} is not JSON") from None
    yield value


def held_out_texts(path: pathlib.Path, every: int) -> dict[str, list[str]]:
  """Texts by domain of a run's `held_out.jsonl`, one file in `every`.

  Raises:
    SpecPilotError: not JSON lines of `source` and `text`.
  """
  texts: dict[str, list[str]] = {}
  records = list(json_lines(_utf8(path.read_bytes(), path), path))
  for record in records[::every]:
    try:
      source, text = record["source"], record["text"]
    except (TypeError, KeyError):
      raise SpecPilotError(f"{path}: not lines of source and text") from None
    texts.setdefault(domain_of(source), []).append(text)
  return texts


def manifest(
  train: Sequence[Document],
  held_out: Sequence[Document],
  dropped: Sequence[str],
) -> dict:
  """What a corpus was: counts, hashes, bytes per source with its licence."""

  def digest(documents):
    joined = "".join(d.digest for d in documents)
    return hashlib.sha256(joined.encode()).hexdigest()

  sources: dict[str, dict] = {}
  for document in train:
    name = document.source.split("/")[0]
    entry = sources.setdefault(name, {"licence": document.licence, "bytes": 0})
    entry["bytes"] += len(document.text.encode())
  return {
    "train_files": len(train),
    "train_bytes": sum(s["bytes"] for s in sources.values()),
    "train_sha256": digest(train),
    "held_out_files": len(held_out),
    "held_out_bytes": sum(len(d.text.encode()) for d in held_out),
    "held_out_sha256": digest(held_out),
    "dropped_for_overlap": list(dropped),
    "sources": sources,
  }
