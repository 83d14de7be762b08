"""The files of a run: events.jsonl, requests.jsonl, result.json.

`events.jsonl` and `requests.jsonl` grow line by line while the run goes on;
`result.json` appears complete at its end.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
  "token_forcing": {},
  "cost_model": None,
  "trials": [],
  "accepted": [],
  "sealed": None,
  "memory": [],
  "compilation": {},
  "recompiles": None,
  "stopped_early": False,
  "timing_s": {},
  "notes": [],
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


def empty_result(job: str) -> dict[str, Any]:
  """A result.json of schema 1 with nothing in it."""
  # A copy by JSON, so that no two results share a list.
  return json.loads(json.dumps(_EMPTY)) | {"job": job}


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
    if any(folder.iterdir()):
      raise SpecPilotError(f"output_dir {folder} is not empty")
  place = folder.absolute()
  while not place.exists():
    place = place.parent
  if not place.is_dir():
    raise SpecPilotError(f"output_dir {folder}: {place} is not a folder")
  if not os.access(place, os.W_OK | os.X_OK):
    raise SpecPilotError(f"output_dir {folder}: {place} is not writable")


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
    text = json.dumps(to_json(result), indent=1, allow_nan=False)
    write_whole(self.path / RESULT, text + "\n")

  def close(self) -> None:
    self._events.close()
    self._requests.close()


def _append(file, record: Mapping[str, Any]) -> None:
  file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
  file.flush()


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
  return result


def read_requests(path: Path) -> list[dict[str, Any]]:
  """Reads requests.jsonl, given itself or its run folder.

  Raises:
    SpecPilotError: names the line and the field that is wrong.
  """
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
    _check_record(record, where)
    key = (record["request"], record["system"])
    if key in seen:
      raise SpecPilotError(f"{where}: a second record of {' of '.join(key)}")
    seen.add(key)
    records.append(record)
  return records


def _check_record(record: Any, where: str) -> None:
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
    if not ids or any(type(i) is not int for i in ids):
      raise SpecPilotError(
        f"{where}: field {field!r} must be a list of token ids, not empty"
      )


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError:
    raise SpecPilotError(f"{path}: not UTF-8 text") from None
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
