"""From a round's folder to the memory: entries, and statuses of known ones.

A round leaves `result.json` and `round.jsonl`; both are read as data. What it
found of a mechanism that the memory has goes to the log, as a status on that
deployment. What it found of code of its own becomes an entry: a mechanism where
it was accepted, a negative result where it was not. Its patch is over the
sources that the round ran on, which the memory must know as a tree.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import patches, schema, sources, transfer
from memory.files import parse_json
from memory.manifest import manifest_of
from memory.reading import Entry
from memory.schema import MECHANISM, NEGATIVE, Deployment, Fingerprint
from memory.store import Store
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

ACCEPT = "accept"
_REASONS = {
  "slower": "slower",
  "small": "small",
  "reject": "small",
  "validated": "small",
  "inert": "inert",
  "floor": "floor",
  "refused": "refused",
  "conflict": "unfit",
}
"""Verdicts of trials that say something of a candidate, as reasons."""


@dataclasses.dataclass(frozen=True)
class Trial:
  """A trial of a round, with the proposal that it was of."""

  told: Mapping[str, Any]
  options: str
  patch: str
  hypothesis: str

  @property
  def accepted(self) -> bool:
    return self.told["verdict"] == ACCEPT

  @property
  def measured(self) -> float | None:
    """Gain over the champion of then: of the paired test, or of screening."""
    paired = self.told.get("measured")
    return self.told.get("evidence") if paired is None else paired


@dataclasses.dataclass(frozen=True)
class Found:
  """What a round told the memory.

  Attributes:
    added: ids of entries.
    noted: ids of entries whose status was logged, with it.
    skipped: trials of which nothing was kept, each with the reason.
  """

  added: tuple[str, ...]
  noted: tuple[tuple[str, str], ...]
  skipped: tuple[str, ...]


def fingerprint_of(result: Mapping[str, Any]) -> Fingerprint:
  """The deployment of a result.json."""
  deployment, env = result["deployment"], result["environment"]
  return schema.fingerprint(
    {
      "target": deployment.get("target"),
      "drafter": deployment.get("drafter"),
      "dtype": deployment.get("dtype"),
      "device": deployment.get("device"),
      "driver": env.get("driver"),
      "jax": env.get("jax"),
      "batch": deployment.get("batch"),
      "context": deployment.get("max_seq_len"),
      "temperature": result["sampling"].get("temperature"),
    }
  )


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
  except UnicodeDecodeError:
    raise SpecPilotError(f"{path}: not UTF-8 text") from None


def proposal_id(fields: Mapping[str, Any]) -> str:
  """A proposal's id in its round, from its settings and its patch."""
  text = json.dumps([fields["options"], fields["patch"]])
  return "opt-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
  """A finished round: its result, and its trials with their proposals.

  Raises:
    SpecPilotError: no finished round, or a file that is damaged.
  """
  try:
    result = parse_json(_read(folder / "result.json"))
    lines = _read(folder / "round.jsonl").splitlines()
    events = [parse_json(line) for line in lines]
    if result["job"] != "round":
      raise SpecPilotError(f"{folder}: not of a round, of {result['job']!r}")
    proposals = {}
    for event in events:
      if event["event"] == "done" and event["key"].startswith("propose/"):
        for fields in event["result"]["proposals"]:
          proposals.setdefault(proposal_id(fields), fields)
    trials = [
      Trial(
        trial,
        proposals[trial["id"]]["options"],
        proposals[trial["id"]]["patch"],
        proposals[trial["id"]]["hypothesis"],
      )
      for trial in result["trials"]
      if trial["id"] is not None
    ]
    fingerprint_of(result)
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    if isinstance(e, SpecPilotError):
      raise
    raise SpecPilotError(f"{folder}: damaged: no result of a round") from None
  return result, trials


def concerned(store: Store, settings: str) -> list[Entry]:
  """The mechanisms that some settings switch on: those that register one of the
  options, but for those on which another of them stands."""
  names = {part.partition("=")[0] for part in settings.split(",")}
  found = [
    entry
    for entry in store.current()
    if entry.record.kind == MECHANISM
    and names.intersection(entry.record.option_names)
  ]
  below = {other for entry in found for other in store.below(entry.id)}
  return [entry for entry in found if entry.id not in below]


def status_of(trial: Trial) -> str | None:
  """The status that a trial gives to a known mechanism; None for none."""
  verdict, gain = trial.told["verdict"], trial.measured
  if verdict == ACCEPT:
    return "replayed-ok"
  if verdict == "refused":
    return "replayed-refused"
  if verdict == "conflict":
    return "not-applicable"
  if verdict in _REASONS:
    slower = gain is not None and gain < 0
    return "replayed-regression" if slower else "replayed-null"
  return None


def add(store: Store, folder: Path, root: Path = sources.ROOT) -> Found:
  """Takes a finished round into the memory; the same again adds nothing.

  Args:
    store: the memory.
    folder: of the round.
    root: the checkout that the round ran from, for patches alone.

  Raises:
    SpecPilotError: no finished round, or patches over sources that are no tree
      of the memory.
  """
  result, trials = read(folder)
  fingerprint = fingerprint_of(result)
  date = str(result["environment"].get("time", ""))[:10]
  mark = hashlib.sha256(_read(folder / "result.json").encode()).hexdigest()[:16]
  added, noted, skipped = [], [], []
  stands_on = None
  for trial in trials:
    name = trial.told["id"]
    if trial.patch:
      if trial.told["verdict"] not in (*_REASONS, ACCEPT):
        skipped.append(f"{name}: {trial.told['verdict']} says nothing of it")
        continue
      if stands_on is None:
        stands_on = tree_of(store, sources.read(root))
      try:
        added.append(_entry(store, trial, result, stands_on, mark))
      except SpecPilotError as e:
        skipped.append(f"{name}: {e}")
      continue
    status, entries = status_of(trial), concerned(store, trial.options)
    if status is None or not entries:
      why = "no mechanism of the memory" if status else trial.told["verdict"]
      skipped.append(f"{name} ({trial.options}): {why}")
    for entry in entries if status else ():
      deployment = Deployment(
        fingerprint=fingerprint,
        status=status or "",
        gain=trial.measured,
        bound=trial.told.get("lcb"),
        s_aa=trial.told.get("s_aa"),
        design=f"{trial.options}: {_line(trial.told['reason'])} (round {mark})",
        date=date,
      )
      if deployment not in store.deployments(entry.id):
        store.note_status(entry.id, deployment)
        noted.append((entry.id, deployment.status))
  return Found(tuple(added), tuple(noted), tuple(skipped))


def tree_of(store: Store, tree: Mapping[str, bytes]) -> str:
  """The entry whose tree some sources are, the newest.

  Raises:
    SpecPilotError: there is none.
  """
  root = manifest_of(tree).root_hash
  for name, entry in reversed(list(store.entries.items())):
    if entry.record.tree_after == root and entry.record.kind != NEGATIVE:
      return name
  raise SpecPilotError(
    "memory: the sources are no tree of it; keep them first with: python -m"
    " memory add --record=FILE --after=DIR, a record of kind system"
  )


def _line(text: Any) -> str:
  return " ".join(str(text).split())


def _entry(
  store: Store,
  trial: Trial,
  result: Mapping[str, Any],
  stands_on: str,
  mark: str,
) -> str:
  """Keeps a trial of code of its own."""
  told = trial.told
  factor = str(told["task"]).partition("/")[0]
  commit = str(result["environment"].get("commit") or "")
  environment = result["environment"]
  fields: dict[str, Any] = {
    "kind": MECHANISM if trial.accepted else NEGATIVE,
    "title": _line(trial.hypothesis)[:200] or f"proposal {told['id']}",
    "hypothesis": _line(trial.hypothesis),
    "factor": factor,
    "settings": transfer.join(trial.options),
    "exactness": {
      "class": "token",
      "proved_by": ["paired test's token forcing"] if trial.accepted else [],
    },
    "depends_on": [stands_on],
    "prediction": None
    if told.get("prediction") is None
    else {"factor": factor, "gain": told["prediction"]},
    "lessons": [_line(told["reason"])],
    "not_tested": ["other deployments"],
    "commit": commit.removesuffix("-dirty")[:40],
    "date": str(environment.get("time", ""))[:10],
    "provenance": {"by": "round", "source": mark, "proposal": told["id"]},
    "deployments": [
      {
        "fingerprint": dataclasses.asdict(fingerprint_of(result)),
        "status": "verified" if trial.accepted else "rejected",
        "gain": trial.measured,
        "bound": told.get("lcb"),
        "s_aa": told.get("s_aa"),
        "design": "paired test of a round, over the champion of then",
        "evidence": "evidence/trial.json",
      }
    ],
  }
  if not trial.accepted:
    fields["reason"] = _REASONS[told["verdict"]]
  patch = trial.patch.encode()
  before = store.trees.after(stands_on)
  after = patches.apply(before, patches.parse(patch))
  new = sources.registered(after) - sources.registered(before)
  fields["options"] = sources.registration(after, sorted(new))
  evidence = {
    "trial.json": schema.encode(
      {
        "trial": told,
        "environment": environment,
        "sealed": result.get("sealed") if trial.accepted else None,
      }
    )
  }
  return store.add(fields, patch, evidence, tree=after)


def registration(names: Sequence[str]) -> Iterator[dict[str, Any]]:
  """Options as records have them, from this release's registry.

  >>> next(registration(["num_drafts"]))["default"]
  'block'

  Raises:
    SpecPilotError: an option that it does not have.
  """
  for name in names:
    if name not in registry.OPTIONS:
      raise SpecPilotError(
        f"unknown option {name!r}; options: {', '.join(registry.OPTIONS)}"
      )
    option = registry.OPTIONS[name]
    yield {
      "name": name,
      "domain": str(option.domain),
      "default": option.domain.format(option.default),
      "summary": option.summary,
      "factor": option.factor,
      "exactness": option.exactness,
      "requires": list(option.requires),
      "conflicts": list(option.conflicts),
    }
