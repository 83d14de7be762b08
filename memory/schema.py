"""What a record says, and whether it says it rightly.

A record is a JSON object with exactly the fields of `Record`. It is written
once, in one form (`Record.encode`), and its hash is the entry's id: so nothing
in it can change without the id. What is found out later about an entry goes to
the log or to a new entry that supersedes it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memory.files import parse_json
from memory.manifest import digest
from specpilot_jax.errors import SpecPilotError

SCHEMA = 1
"""Version of the records that this release writes."""

Fields = dict[str, Any]

MIGRATIONS: Mapping[int, Callable[[Fields], Fields]] = {}
"""By version, what makes a record of it one of the next version. Pure
functions; files are never rewritten."""

MECHANISM, SYSTEM, NEGATIVE = KINDS = ("mechanism", "system", "negative")
"""An optimisation with its patch; a whole system, which is its dependencies and
what ties them together; a result that says what not to try again."""

FACTORS = ("tau", "kernel", "overhead", "batch")

NEEDS = ("gpu", "drafter", "sampled", "batch", "fp8")
"""What a deployment may have: a GPU, a drafter, a temperature above 0, several
requests at a time, weights in FP8."""

STATUSES = (
  "verified",  # accepted by a paired test of the controller
  "observed",  # measured, but not by such a test
  "replayed-ok",
  "replayed-null",
  "replayed-regression",
  "replayed-refused",  # by a check of the controller
  "not-applicable",
  "failed-to-apply",
  "rejected",
)

REASONS = (
  "inert", "slower", "small", "inexact", "refused", "floor", "infra", "unfit",
)  # fmt: skip
"""Why a negative result is one."""

_ID = r"mem-[0-9a-f]{16}"
_SHA = r"[0-9a-f]{64}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
  """Which deployment a figure is of; None is not known or does not matter.

  Attributes:
    target, drafter: names.
    dtype: of the weights as stock holds them.
    device: as the driver names it.
    driver, jax: versions.
    batch: requests at a time.
    context: tokens of a request at most.
    temperature: of sampling.
  """

  target: str | None = None
  drafter: str | None = None
  dtype: str | None = None
  device: str | None = None
  driver: str | None = None
  jax: str | None = None
  batch: int | None = None
  context: int | None = None
  temperature: float | None = None

  def shared(self, other: "Fingerprint") -> int:
    """Fields that are known and the same, the weightier ones counting more.

    Versions do not count: of figures of one deployment the newest is asked.

    >>> old = Fingerprint(device="H200", jax="1")
    >>> old.shared(Fingerprint(device="H200", jax="1"))
    8
    """
    weights = dict(
      device=8, target=4, drafter=2, batch=2, temperature=2, driver=0, jax=0
    )
    return sum(
      weights.get(field.name, 1)
      for field in dataclasses.fields(self)
      if getattr(self, field.name) is not None
      and getattr(self, field.name) == getattr(other, field.name)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
  """What was found on one deployment.

  Attributes:
    fingerprint: which one.
    status: of `STATUSES`.
    gain: speedup over what it was compared with, as a share (0.2 is 1.2x);
      None where that was not measured.
    bound: lower confidence bound of it.
    s_aa: noise of A/A sessions behind the bound.
    design: how it was measured, against what.
    evidence: file of the entry that holds the figures; empty for none.
    date: of the measurement, YYYY-MM-DD.
  """

  fingerprint: Fingerprint
  status: str
  gain: float | None = None
  bound: float | None = None
  s_aa: float | None = None
  design: str = ""
  evidence: str = ""
  date: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """An entry, without its patch and its evidence.

  Attributes:
    kind: of `KINDS`.
    title: what it is, one line.
    hypothesis: why it should help.
    factor: which part of the speed it acts on, of `FACTORS`; None for a system.
    settings: `option=value,...` that switch it on; stock without.
    options: registration of each option that it brings: name, domain, default,
      summary, factor, exactness, requires, conflicts.
    exactness: `class` (what it keeps), `proved_by` (names of checks), and
      figures of token forcing where there are some.
    constraints: what must hold for it to be correct.
    needs: of `NEEDS`, without which it does nothing.
    depends_on: ids without whose code it does not apply or run.
    conflicts_with: ids that it does not go together with, known at the time.
    supersedes: ids of entries that it stands for.
    reason: of `REASONS`, of a negative result alone.
    deployments: what was measured, where.
    prediction: what the cost model said before: `factor`, `gain` or `bound`.
    limits: where it ends.
    not_tested: what nobody has looked at.
    lessons: what to know before trying something like it.
    commit: of the repository whose code it was.
    date: of the record, YYYY-MM-DD.
    provenance: `by`, `source`.
    base: root hash of the base tree; None without a patch.
    tree_before, tree_after: root hashes of base and dependencies without and
      with the patch.
    sources: path to the hashes of that file before and after the patch; null
      where it is not there.
    files: hashes of the entry's other files, by name.
    schema: version.
  """

  kind: str
  title: str
  hypothesis: str = ""
  factor: str | None = None
  settings: str = ""
  options: tuple[Mapping[str, Any], ...] = ()
  exactness: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  constraints: tuple[str, ...] = ()
  needs: tuple[str, ...] = ()
  depends_on: tuple[str, ...] = ()
  conflicts_with: tuple[str, ...] = ()
  supersedes: tuple[str, ...] = ()
  reason: str | None = None
  deployments: tuple[Deployment, ...] = ()
  prediction: Mapping[str, Any] | None = None
  limits: tuple[str, ...] = ()
  not_tested: tuple[str, ...] = ()
  lessons: tuple[str, ...] = ()
  commit: str = ""
  date: str = ""
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  base: str | None = None
  tree_before: str | None = None
  tree_after: str | None = None
  sources: Mapping[str, Sequence[str | None]] = dataclasses.field(
    default_factory=dict
  )
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  schema: int = SCHEMA

  @property
  def option_names(self) -> tuple[str, ...]:
    return tuple(option["name"] for option in self.options)

  def encode(self) -> bytes:
    """The record's file; there is one form of it."""
    return encode(dataclasses.asdict(self))

  @property
  def id(self) -> str:
    return id_of(self.encode())


def encode(fields: Any) -> bytes:
  """JSON in the one form of records: keys in order, indented, UTF-8.

  >>> encode({"b": 1, "a": [True]})
  b'{\\n "a": [\\n  true\\n ],\\n "b": 1\\n}\\n'

  Raises:
    SpecPilotError: what JSON or UTF-8 has no form for.
  """
  try:
    text = json.dumps(
      fields, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    return text.encode() + b"\n"
  except (ValueError, TypeError, RecursionError) as e:
    raise SpecPilotError(f"cannot be written as JSON: {e}") from None


def id_of(record: bytes) -> str:
  """An entry's id: the hash of its record's file, which holds those of all
  its other files and, in `depends_on`, of all that it stands on.

  >>> id_of(b"{}")
  'mem-44136fa355b3678a'
  """
  return f"mem-{digest(record)[:16]}"


def migrate(
  fields: Fields,
  migrations: Mapping[int, Callable[[Fields], Fields]] | None = None,
  version: int | None = None,
) -> Fields:
  """A record of any earlier version as one of `version`, by default the newest.

  >>> renamed = {1: lambda r: {**r, "schema": 2, "name": r["title"]}}
  >>> migrate({"schema": 1, "title": "a"}, renamed, 2)["name"]
  'a'

  Raises:
    SpecPilotError: no version, or a newer one than this release reads.
  """
  migrations = MIGRATIONS if migrations is None else migrations
  version = SCHEMA if version is None else version
  found = fields.get("schema")
  if type(found) is not int or found < 1:
    raise SpecPilotError(f"schema must be a whole number from 1, got {found!r}")
  if found > version:
    raise SpecPilotError(f"schema {found}: this release reads up to {version}")
  for step in range(found, version):
    if step not in migrations:
      raise SpecPilotError(f"schema {step}: nothing leads to {step + 1}")
    fields = migrations[step](dict(fields))
    if fields.get("schema") != step + 1:
      raise SpecPilotError(f"schema {step}: its migration gives no {step + 1}")
  return fields


def decode(data: bytes) -> Record:
  """Reads a record's file and checks it.

  Raises:
    SpecPilotError: names the field that is wrong, and what was expected.
  """
  try:
    fields = parse_json(data)
  except ValueError:
    raise SpecPilotError("not JSON") from None
  if not isinstance(fields, dict):
    raise SpecPilotError("not a JSON object")
  return from_fields(migrate(fields))


def from_fields(fields: Mapping[str, Any]) -> Record:
  """A record from JSON values.

  >>> from_fields({"kind": "negative"})
  Traceback (most recent call last):
  specpilot_jax.errors.SpecPilotError: title is missing

  Raises:
    SpecPilotError: as `decode`.
  """
  known = {f.name: f for f in dataclasses.fields(Record)}
  _refuse_unknown(fields, known)
  values: Fields = {}
  for name, value in fields.items():
    _check(name, value, _FORMS[name])
    values[name] = tuple(value) if isinstance(value, list | tuple) else value
  values["deployments"] = tuple(
    deployment(f"deployments[{i}]", v)
    for i, v in enumerate(fields.get("deployments", ()))
  )
  for name in ("kind", "title"):
    if name not in values:
      raise SpecPilotError(f"{name} is missing")
  record = Record(**values)
  _check_together(record)
  return record


def check_ids(name: str, value: Any) -> None:
  """Refuses what is no list of ids or of beginnings of ids.

  Raises:
    SpecPilotError: names the field.
  """
  _check(name, value, ("a list of ids", _LINES[1]))


def _refuse_unknown(fields: Mapping[str, Any], known: Mapping[str, Any]):
  unknown = sorted(set(fields) - set(known))
  if unknown:
    raise SpecPilotError(
      f"unknown field {unknown[0]!r}; fields: {', '.join(known)}"
    )


def deployment(where: str, fields: Any) -> Deployment:
  if isinstance(fields, Deployment):
    fields = dataclasses.asdict(fields)
  if not isinstance(fields, Mapping):
    raise SpecPilotError(f"{where} must be an object")
  try:
    _refuse_unknown(fields, {f.name: f for f in dataclasses.fields(Deployment)})
    values = dict(fields)
    values["fingerprint"] = fingerprint(fields.get("fingerprint"))
    _check("status", fields.get("status"), _one_of(STATUSES))
    for name in ("gain", "bound", "s_aa"):
      _check(name, fields.get(name), _NUMBER)
    for name in ("design", "evidence"):
      _check(name, fields.get(name, ""), _TEXT)
    _check("date", fields.get("date", ""), _DATE)
  except SpecPilotError as e:
    raise SpecPilotError(f"{where}: {e}") from None
  return Deployment(**values)


def fingerprint(fields: Any) -> Fingerprint:
  """A fingerprint from JSON values.

  Raises:
    SpecPilotError: a field that is unknown or not of its type.
  """
  if not isinstance(fields, Mapping):
    raise SpecPilotError("fingerprint must be an object")
  known = {f.name: f for f in dataclasses.fields(Fingerprint)}
  _refuse_unknown(fields, known)
  for name, value in fields.items():
    form = _TEXT_OR_NONE
    if name in ("batch", "context"):
      form = _COUNT
    elif name == "temperature":
      form = _NUMBER
    _check(f"fingerprint {name}", value, form)
  return Fingerprint(**fields)


Form = tuple[str, Callable[[Any], bool]]


def _check(name: str, value: Any, form: Form) -> None:
  what, holds = form
  if not holds(value):
    raise SpecPilotError(f"{name} must be {what}, got {_short(value)}")


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) < 60 else f"{text[:57]}..."


def _is_number(x: Any) -> bool:
  return x is None or (
    isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
  )


def _all(x: Any, holds: Callable[[Any], bool]) -> bool:
  return isinstance(x, list | tuple) and all(map(holds, x))


def _is_line(x: Any) -> bool:
  return isinstance(x, str) and "\n" not in x


def _matches(pattern: str) -> Callable[[Any], bool]:
  return lambda x: isinstance(x, str) and bool(re.fullmatch(pattern, x))


def _one_of(values: Sequence[str | None]) -> Form:
  named = ", ".join("null" if v is None else v for v in values)
  return f"of {named}", lambda x: x in values


_TEXT: Form = ("a line of text", _is_line)
_TEXT_OR_NONE: Form = (
  "a line of text or null",
  lambda x: x is None or _is_line(x),
)
_NUMBER: Form = ("a finite number or null", _is_number)
_COUNT: Form = (
  "a whole number from 1 or null",
  lambda x: x is None or (type(x) is int and x > 0),
)
_DATE: Form = (
  "a date YYYY-MM-DD or empty",
  _matches(r"(\d{4}-\d{2}-\d{2})?"),
)
_LINES: Form = ("a list of lines of text", lambda x: _all(x, _is_line))
_IDS: Form = ("a list of ids", lambda x: _all(x, _matches(_ID)))
_OBJECT: Form = ("an object", lambda x: isinstance(x, Mapping))
_HASH: Form = (
  "a sha256 or null",
  lambda x: x is None or _matches(_SHA)(x),
)

_OPTION_FIELDS = (
  "name", "domain", "default", "summary", "factor", "exactness", "requires",
  "conflicts",
)  # fmt: skip


def _is_option(x: Any) -> bool:
  if not isinstance(x, Mapping) or set(x) != set(_OPTION_FIELDS):
    return False
  lists = ("requires", "conflicts")
  return all(_all(x[n], _is_line) for n in lists) and all(
    _is_line(x[n]) for n in _OPTION_FIELDS if n not in lists
  )


def _is_sources(x: Any) -> bool:
  return isinstance(x, Mapping) and all(
    _all(pair, _HASH[1]) and len(pair) == 2 and pair[0] != pair[1]
    for pair in x.values()
  )


def _is_files(x: Any) -> bool:
  name = _matches(r"patch\.diff|evidence/[A-Za-z0-9_][A-Za-z0-9_.-]*")
  return isinstance(x, Mapping) and all(
    name(key) and _matches(_SHA)(value) for key, value in x.items()
  )


_FORMS: Mapping[str, Form] = {
  "schema": (f"{SCHEMA}", lambda x: x == SCHEMA),
  "kind": _one_of(KINDS),
  "title": ("a line of text, not empty", lambda x: _is_line(x) and bool(x)),
  "hypothesis": _TEXT,
  "factor": _one_of((*FACTORS, None)),
  "settings": (
    "option=value,option=value",
    _matches(r"|\w+=[^,=\s]+(,\w+=[^,=\s]+)*"),
  ),
  "options": (
    f"a list of objects with {', '.join(_OPTION_FIELDS)}",
    lambda x: _all(x, _is_option),
  ),
  "exactness": _OBJECT,
  "constraints": _LINES,
  "needs": (
    f"a list of {', '.join(NEEDS)}",
    lambda x: _all(x, lambda need: need in NEEDS),
  ),
  "depends_on": _IDS,
  "conflicts_with": _IDS,
  "supersedes": _IDS,
  "reason": _one_of((*REASONS, None)),
  "deployments": ("a list", lambda x: isinstance(x, list | tuple)),
  "prediction": ("an object or null", lambda x: x is None or _OBJECT[1](x)),
  "limits": _LINES,
  "not_tested": _LINES,
  "lessons": _LINES,
  "commit": ("a commit or empty", _matches(r"([0-9a-f]{7,40}(-dirty)?)?")),
  "date": _DATE,
  "provenance": _OBJECT,
  "base": _HASH,
  "tree_before": _HASH,
  "tree_after": _HASH,
  "sources": ("path to two different hashes or null", _is_sources),
  "files": ("patch.diff or evidence/NAME to sha256", _is_files),
}


def _check_together(record: Record) -> None:
  """What no field says alone."""
  negative = record.kind == NEGATIVE
  if negative and record.reason is None:
    raise SpecPilotError(f"reason must be of {', '.join(REASONS)}")
  if not negative and record.reason is not None:
    raise SpecPilotError("reason is of negative results alone")
  if (record.factor is None) != (record.kind == SYSTEM):
    raise SpecPilotError(
      f"factor must be of {', '.join(FACTORS)}, and null for a system"
    )
  trees = (record.base, record.tree_before, record.tree_after)
  patched = "patch.diff" in record.files
  if any(x is None for x in trees) and any(x is not None for x in trees):
    raise SpecPilotError("base, tree_before and tree_after go together")
  if patched and record.base is None:
    raise SpecPilotError("a patch needs base, tree_before and tree_after")
  if not negative and record.base is None:
    raise SpecPilotError(f"a {record.kind} needs a base")
  if patched != bool(record.sources):
    raise SpecPilotError("sources must name what patch.diff changes")
  if record.kind == MECHANISM and not patched:
    raise SpecPilotError("a mechanism needs a patch")
  for name in ("depends_on", "conflicts_with", "supersedes"):
    ids = getattr(record, name)
    if list(ids) != sorted(set(ids)):
      raise SpecPilotError(f"{name} must be in order, each id once")
  for deployment in record.deployments:
    if deployment.evidence and deployment.evidence not in record.files:
      raise SpecPilotError(f"evidence {deployment.evidence} is not in files")
