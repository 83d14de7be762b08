"""The log of a memory: what was added when, each line tied to the one before.

A line is a JSON object on one line. `n` counts from 1, `previous` is the sha256
of the line before (zeros for the first), `event` says what happened:

    base      root, file_sha256, commit          a base tree
    entry     id                                 an entry
    conflict  entries, reason                    entries that do not go together
    status    entry, deployment                  what a replay found

A log that was edited, reordered or cut is therefore seen, the last by the file
`head.json`, which repeats number and hash of the last line. The log is written
first: a head that is behind is what a crash in between leaves.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import files
from memory.manifest import digest
from specpilot_jax.errors import SpecPilotError

LOG, HEAD = "log.jsonl", "head.json"
BASE, ENTRY, CONFLICT, STATUS = "base", "entry", "conflict", "status"
_Form = tuple[str, Callable[[Any], bool]]


def _matches(pattern: str) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, str) and bool(re.fullmatch(pattern, x))


_TEXT: _Form = ("a text", lambda x: isinstance(x, str))
_SHA: _Form = ("a sha256", _matches("[0-9a-f]{64}"))
_ID: _Form = ("an id", _matches(r"mem-[0-9a-f]{16}"))
_IDS: _Form = (
  "a list of ids",
  lambda x: isinstance(x, list) and all(map(_ID[1], x)),
)
_OBJECT: _Form = ("an object", lambda x: isinstance(x, dict))
_FIELDS: Mapping[str, Mapping[str, _Form]] = {
  BASE: {"root": _SHA, "file_sha256": _SHA, "commit": _TEXT},
  ENTRY: {"id": _ID},
  CONFLICT: {"entries": _IDS, "reason": _TEXT},
  STATUS: {"entry": _ID, "deployment": _OBJECT},
}
_FIRST = "0" * 64


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of the log.

  Attributes:
    number: from 1.
    event: what happened.
    fields: of that event.
    digest: sha256 of its text.
  """

  number: int
  event: str
  fields: Mapping[str, Any]
  digest: str


def read(root: Path) -> tuple[list[Line], list[str]]:
  """The log of a memory, and all that is wrong with it.

  Returns:
    Lines up to the first that is damaged or out of place, and problems.
  """
  path = root / LOG
  data = path.read_bytes() if path.exists() else b""
  texts = data.split(b"\n")
  if texts.pop() != b"":
    return [], [f"{LOG}: its last line has no end"]
  lines: list[Line] = []
  previous = _FIRST
  for number, text in enumerate(texts, start=1):
    try:
      lines.append(_line(number, text, previous))
    except SpecPilotError as e:
      return lines, [f"{LOG}:{number}: {e}"]
    previous = lines[-1].digest
  return lines, list(_head_problems(root, lines))


def _line(number: int, text: bytes, previous: str) -> Line:
  try:
    fields = files.parse_json(text)
    n, before, event = (fields.pop(k) for k in ("n", "previous", "event"))
  except (ValueError, KeyError, AttributeError, TypeError):
    raise SpecPilotError("damaged: no line of a log") from None
  if n != number:
    raise SpecPilotError(
      f"is line {n} of the chain: lines were removed, added or reordered"
    )
  if before != previous:
    raise SpecPilotError(
      "does not follow the line before: one of the two was changed"
    )
  known = _FIELDS.get(event) if isinstance(event, str) else None
  if known is None or set(fields) != set(known):
    raise SpecPilotError(f"{event!r} is no event, or has not its fields")
  for name, (what, holds) in known.items():
    if not holds(fields[name]):
      raise SpecPilotError(f"{name} must be {what}")
  line = Line(number, event, fields, digest(text))
  if _text(line, previous) != text:
    raise SpecPilotError("is not written as a log writes it")
  return line


def _text(line: Line, previous: str) -> bytes:
  fields = {
    "n": line.number,
    "previous": previous,
    "event": line.event,
    **line.fields,
  }
  text = json.dumps(fields, sort_keys=True, ensure_ascii=False, allow_nan=False)
  return text.encode()


def _head_problems(root: Path, lines: Sequence[Line]) -> Iterator[str]:
  path = root / HEAD
  if not path.exists():
    if len(lines) > 1:
      yield f"{HEAD} is missing"
    return
  try:
    head = files.parse_json(path.read_bytes())
    n, last = head["n"], head["digest"]
  except (ValueError, KeyError, TypeError):
    yield f"{HEAD}: damaged"
    return
  if type(n) is not int or not isinstance(last, str):
    yield f"{HEAD}: damaged"
    return
  if path.read_bytes() != _head(n, last):
    yield f"{HEAD}: is not written as a log writes it"
  elif n > len(lines):
    yield f"{LOG}: ends before line {n}, which {HEAD} names"
  elif n < 1 or n < len(lines) - 1:
    yield f"{HEAD}: is behind {LOG}"
  elif lines[n - 1].digest != last:
    yield f"{LOG}:{n}: is not the line that {HEAD} names"


def _head(number: int, last: str) -> bytes:
  return json.dumps({"n": number, "digest": last}).encode() + b"\n"


def append(
  root: Path, lines: Sequence[Line], event: str, fields: Mapping[str, Any]
) -> Line:
  """Writes the log with one more line, and its head.

  Args:
    root: of the memory.
    lines: of the log so far.
    event, fields: of the new line.
  """
  previous = lines[-1].digest if lines else _FIRST
  line = Line(len(lines) + 1, event, dict(fields), "")
  text = _text(line, previous)
  path = root / LOG
  before = path.read_bytes() if path.exists() else b""
  files.replace(path, before + text + b"\n")
  line = dataclasses.replace(line, digest=digest(text))
  files.replace(root / HEAD, _head(line.number, line.digest))
  return line
