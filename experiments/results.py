"""The files of a run: events.jsonl, requests.jsonl, result.json.

`events.jsonl` and `requests.jsonl` grow line by line while the run goes on;
`result.json` appears complete at its end.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError

SCHEMA = 1
RESULT, REQUESTS, EVENTS = "result.json", "requests.jsonl", "events.jsonl"

# Keys of schema 1; those of jobs that did not run are null or empty.
_EMPTY: dict[str, Any] = {
  "schema": SCHEMA,
  "job": None,
  "deployment": {},
  "environment": {},
  "prompts": {},
  "sampling": {},
  "systems": {},
  "requests_sha256": None,
  "token_forcing": {},
  "cost_model": None,
  "trials": [],
  "accepted": [],
  "sealed": None,
  "memory": [],
  "startup": {},
  "compilation": {},
  "recompiles": None,
  "stopped_early": False,
  "device_memory": None,
  "timing_s": {},
  "notes": [],
}

# Keys that results of earlier commits lack.
_ADDED: dict[str, Any] = {
  "paired_test": None,
  "round": None,
  "champion": None,
  "faults": None,
  "ablation": None,
}

# Fields of a record that token forcing and reports read, with their types.
_RECORD_FIELDS: dict[str, type] = {
  "request": str,
  "system": str,
  "domain": str,
  "prompt_ids": list,
  "output_ids": list,
  "sampling": dict,
  "options": dict,
  "finish_reason": str,
  "metrics": dict,
}

_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))

# Fields of a record's metrics: milliseconds and ratios, counts, and lists of
# either.
_NUMBERS = ("ttft_ms", "e2el_ms", "acceptance_length")
_COUNTS = (
  "num_spec_steps",
  "num_draft_tokens",
  "num_accepted_draft_tokens",
  "cut_steps",
)
_COUNT_LISTS = ("emitted_per_step", "drafted_per_step", "accepted_per_step")


def empty_result(job: str) -> dict[str, Any]:
  """A result.json of schema 1 with nothing in it."""
  # A copy by JSON, so that no two results share a list.
  return json.loads(json.dumps(_EMPTY | _ADDED)) | {"job": job}


def to_json(value: Any) -> Any:
  """Python and numpy values as JSON has them; NaN and infinity are null."""
  if isinstance(value, Mapping):
    return {str(key): to_json(v) for key, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_json(v) for v in value]
  if hasattr(value, "item"):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def check_output_dir(folder: Path) -> None:
  """Refuses a folder that cannot be written or that holds something.

  Nothing is made: a run that ends in an error leaves no folder behind.
  """
  if folder.exists():
    if not folder.is_dir():
      raise SpecPilotError(f"output_dir {folder} is not a folder")
    if is_unfinished(folder):
      raise SpecPilotError(
        f"output_dir {folder} holds an unfinished run ({RESULT} is missing);"
        " remove it or take another folder"
      )
    if any(folder.iterdir()):
      raise SpecPilotError(f"output_dir {folder} is not empty")
  place = folder.absolute()
  while not place.exists():
    place = place.parent
  if not place.is_dir():
    raise SpecPilotError(f"output_dir {folder}: {place} is not a folder")
  if not os.access(place, os.W_OK | os.X_OK):
    raise SpecPilotError(f"output_dir {folder}: {place} is not writable")


def is_unfinished(folder: Path) -> bool:
  """Whether a run began here and did not come to its end."""
  return (folder / EVENTS).exists() and not (folder / RESULT).exists()


class RunFolder:
  """Writes the files of one run.

  Args:
    path: made if it is not there.
  """

  def __init__(self, path: Path):
    self.path = path
    try:
      path.mkdir(parents=True, exist_ok=True)
      self._events = open(path / EVENTS, "a", encoding="utf-8")
      self._requests = open(path / REQUESTS, "a", encoding="utf-8")
    except OSError as e:
      raise SpecPilotError(f"output_dir {path}: {e.strerror}") from None

  def event(self, kind: str, **fields: Any) -> None:
    """Appends to events.jsonl; every event has `event` and `time` (epoch)."""
    _append(self._events, {"event": kind, "time": time.time(), **fields})

  def request(self, record: Mapping[str, Any]) -> None:
    """Appends to requests.jsonl."""
    _append(self._requests, record)

  def result(self, result: Mapping[str, Any]) -> None:
    """Writes result.json."""
    write_result(self.path, result)

  def close(self) -> None:
    self._events.close()
    self._requests.close()


def _append(file, record: Mapping[str, Any]) -> None:
  file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
  file.flush()


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
  """Writes result.json of a run."""
  write_whole(folder / RESULT, as_text(result))


_LONG_LIST = re.compile(r"\[\n\s*([^\[\]{}\"]*?)\n\s*\]")
"""A list of numbers over several lines; no string holds a line's end."""


def as_text(content: Any) -> str:
  """A JSON file's text; a list of numbers is one line."""
  text = json.dumps(to_json(content), indent=1, allow_nan=False)
  text = _LONG_LIST.sub(lambda m: f"[{' '.join(m[1].split())}]", text)
  return text + "\n"


def write_whole(path: Path, text: str) -> None:
  """Writes a file that is either complete or not there."""
  temporary = path.with_name(f".{path.name}.part")
  try:
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None


def read_result(folder: Path) -> dict[str, Any]:
  """Reads result.json of schema 1."""
  path = folder / RESULT
  if is_unfinished(folder):
    raise SpecPilotError(f"{folder}: an unfinished run ({RESULT} is missing)")
  content = _read(path)
  try:
    result = json.loads(content)
  except ValueError:
    raise SpecPilotError(f"{path}: not JSON") from None
  if not isinstance(result, dict) or result.get("schema") != SCHEMA:
    raise SpecPilotError(f"{path}: not a result of schema {SCHEMA}")
  missing = sorted(_EMPTY.keys() - result.keys())
  if missing:
    raise SpecPilotError(f"{path}: field {missing[0]!r} is missing")
  return _ADDED | result


def read_requests(path: Path) -> list[dict[str, Any]]:
  """Reads requests.jsonl, given itself or its run folder.

  Raises:
    SpecPilotError: names the line and the field that is wrong.
  """
  return [record for _, record in read_numbered_requests(path)]


def read_numbered_requests(path: Path) -> list[tuple[str, dict[str, Any]]]:
  """As `read_requests`, each record with `file:line` before it."""
  if path.is_dir():
    path = path / REQUESTS
  records, seen = [], set()
  for number, line in enumerate(_read(path).split("\n"), start=1):
    if not line.strip():
      continue
    where = f"{path}:{number}"
    try:
      record = json.loads(line)
    except ValueError:
      raise SpecPilotError(f"{where}: not JSON") from None
    check_record(record, where)
    key = (record["request"], record["system"])
    if key in seen:
      raise SpecPilotError(f"{where}: a second record of {' of '.join(key)}")
    seen.add(key)
    records.append((where, record))
  return records


def check_record(record: Any, where: str) -> None:
  """Refuses what is no line of requests.jsonl.

  Raises:
    SpecPilotError: `where` and the field that is wrong.
  """
  if not isinstance(record, dict):
    raise SpecPilotError(f"{where}: not a JSON object")
  for field, kind in _RECORD_FIELDS.items():
    if not isinstance(record.get(field), kind):
      raise SpecPilotError(
        f"{where}: field {field!r} is {record.get(field)!r}, expected"
        f" {kind.__name__}"
      )
  label = record.get("run")
  if label is not None and not (
    isinstance(label, dict) and isinstance(label.get("dtype"), str)
  ):
    raise SpecPilotError(f"{where}: field 'run' must be an object with a dtype")
  for field in ("prompt_ids", "output_ids"):
    ids = record[field]
    # bool is an int in Python, not in JSON.
    if not ids or any(type(i) is not int or i < 0 for i in ids):
      raise SpecPilotError(
        f"{where}: field {field!r} must be a list of token ids, not empty"
      )
  where += f": request {record['request']}"
  _check_metrics(record["metrics"], where)
  for field in _SAMPLING_FIELDS:
    if field not in record["sampling"]:
      raise SpecPilotError(f"{where}: field 'sampling' lacks {field!r}")
  try:
    sampling_of(record)
  except SpecPilotError as e:
    raise SpecPilotError(f"{where}: field 'sampling': {e}") from None


def _check_metrics(metrics: Mapping[str, Any], where: str) -> None:
  def number(value):
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and math.isfinite(value) and value >= 0

  def count(value):
    return type(value) is int and 0 <= value < 2**31

  def each(good):
    return lambda value: isinstance(value, list) and all(map(good, value))

  def require(field, good, expected):
    if field not in metrics:
      raise SpecPilotError(f"{where}: field 'metrics' lacks {field!r}")
    if not good(metrics[field]):
      raise SpecPilotError(
        f"{where}: metrics field {field!r} must be {expected}, got"
        f" {str(metrics[field])[:60]!r}"
      )

  for field in _NUMBERS:
    require(field, number, "a number from 0 on")
  for field in _COUNTS:
    require(field, count, "a whole number from 0 on")
  lists = _COUNT_LISTS
  if "depth_per_step" in metrics:  # Records of chains may lack it.
    lists += ("depth_per_step",)
  for field in lists:
    require(field, each(count), "a list of whole numbers from 0 on")
  require("itl_ms", each(number), "a list of numbers from 0 on")
  # A single token has none.
  require("tpot_ms", lambda v: v is None or number(v), "a number or null")


def sampling_of(record: Mapping[str, Any]) -> SamplingParams:
  """A record's sampling settings.

  Raises:
    SpecPilotError: unknown field, or a value out of range.
  """
  fields: dict[str, Any] = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in record["sampling"].items()
  }
  unknown = sorted(fields.keys() - set(_SAMPLING_FIELDS))
  if unknown:
    raise SpecPilotError(f"unknown setting {unknown[0]!r}")
  return SamplingParams(**fields)


def sha256(path: Path) -> str:
  """Of a file's bytes, in hexadecimal."""
  try:
    return hashlib.sha256(path.read_bytes()).hexdigest()
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError:
    raise SpecPilotError(f"{path}: not UTF-8 text") from None
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
