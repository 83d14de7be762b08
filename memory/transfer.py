"""What was proved once, tried again on another deployment: nothing is believed.

Entries are chosen by what they need and by the caller's score, and applied to
the sources at hand in the order of their dependencies. Each is then handed to
the caller, who measures and proves it; the status goes to the log of the
memory. A gain that was found before is never a discovery.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from memory import merging, patches, sources, trees
from memory.merging import Clash
from memory.reading import Entry
from memory.schema import MECHANISM, Deployment, Fingerprint
from memory.store import Store
from specpilot_jax.errors import SpecPilotError

PRESENT, APPLIES, CLASHES, UNFIT = "present", "applies", "clashes", "unfit"
"""Of an entry on some sources: they have it already; its change goes onto them;
they have changed where it does; or it needs what the deployment has not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """A candidate.

  Attributes:
    settings: `option=value,...` over stock.
    patch: over the sources at hand; empty for none.
  """

  settings: str = ""
  patch: bytes = b""


STOCK = System()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortTask:
  """What an agent has to do where an entry does not go onto the sources.

  Its result is a new entry that supersedes this one.

  Attributes:
    entry: id.
    title: of the entry.
    factor: of the speed that it acts on.
    clashes: every file and place where sources and entry clash.
    patch: the entry's, over its own base.
  """

  entry: str
  title: str
  factor: str
  clashes: tuple[Clash, ...]
  patch: bytes

  def __str__(self) -> str:
    places = "; ".join(str(clash) for clash in self.clashes)
    return f"port {self.entry} ({self.title}): {places}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """An entry on a deployment.

  Attributes:
    entry: what was chosen.
    state: of `PRESENT`, `APPLIES`, `CLASHES`, `UNFIT`.
    score: the caller's.
    nearest: what is known of it on the most similar deployment; None where
      nothing was measured.
    system: what to try; None where there is nothing.
    port: where it clashes, the task.
    reason: of its state, one line.
  """

  entry: Entry
  state: str
  score: float
  nearest: Deployment | None
  system: System | None = None
  port: PortTask | None = None
  reason: str = ""


def nearest(
  known: Sequence[Deployment], fingerprint: Fingerprint
) -> Deployment | None:
  """What was measured where most of the fingerprint is the same, of equals the
  newest; None where nothing was measured."""
  measured = [d for d in known if d.gain is not None]
  if not measured:
    return None
  return max(
    enumerate(measured),
    key=lambda pair: (pair[1].fingerprint.shared(fingerprint), pair[0]),
  )[1]


def recorded_gain(entry: Entry, found: Deployment | None) -> float:
  """A score: the gain on the nearest deployment, 0 where none is known."""
  del entry
  return 0.0 if found is None or found.gain is None else found.gain


MOST = 0.8
"""Share of a patch's lines that sources must have so that they have it."""


def is_present(
  entry: Entry,
  tree: Mapping[str, bytes],
  options: Collection[str] | None = None,
) -> bool:
  """Whether sources have a mechanism, perhaps in a later form.

  They do where they register its options and have the files that it adds; of
  one that brings neither, where they have most of the lines that it adds.

  Args:
    options: that the sources register; read from them by default.
  """
  record = entry.record
  added = [path for path, pair in record.sources.items() if pair[0] is None]
  if added or record.options:
    options = sources.registered(tree) if options is None else options
    return all(path in tree for path in added) and all(
      name in options for name in record.option_names
    )
  wanted, found = 0, 0
  for change in patches.parse(entry.patch, sources.check_source):
    there = set(tree.get(change.path, b"").decode().splitlines())
    lines = [line.rstrip("\n") for line in change.added_lines]
    lines = [line for line in lines if line.strip()]
    wanted += len(lines)
    found += sum(line in there for line in lines)
  return wanted > 0 and found >= MOST * wanted


def present(store: Store, tree: Mapping[str, bytes]) -> set[str]:
  """Ids of the entries that sources have.

  What has mechanisms of its own that stand on an entry has that entry too, even
  where a later one has moved its lines elsewhere.
  """
  found = set()
  options = sources.registered(tree)
  for name, entry in store.entries.items():
    if entry.patch and is_present(entry, tree, options):
      found.add(name)
      record = entry.record
      new = any(pair[0] is None for pair in record.sources.values())
      if record.kind == MECHANISM and (new or record.options):
        found.update(store.below(name))
  return found


def choose(
  store: Store,
  fingerprint: Fingerprint,
  tree: Mapping[str, bytes],
  *,
  holds: Sequence[str] = ("gpu", "drafter"),
  score: Callable[[Entry, Deployment | None], float | None] = recorded_gain,
) -> list[Choice]:
  """Mechanisms for a deployment, in the order in which to try them.

  Dependencies come before what stands on them; among those that are free, the
  highest score does, then what was recorded earlier. Each choice that applies
  is made for the sources with all of its dependencies, and without the others.

  Args:
    store: the memory.
    fingerprint: of the deployment.
    tree: its sources.
    holds: which needs of entries it meets.
    score: expected gain of an entry, given what is known of it on the nearest
      deployment; None leaves the entry out.
  """
  chosen: dict[str, Choice] = {}
  there = present(store, tree)
  for entry in store.current():
    if entry.record.kind != MECHANISM:
      continue
    found = nearest(store.deployments(entry.id), fingerprint)
    value = score(entry, found)
    if value is not None:
      choice = Choice(entry=entry, state=UNFIT, score=value, nearest=found)
      chosen[entry.id] = _state(store, choice, tree, there, holds)
  return _ordered(store, chosen)


def _state(
  store: Store,
  choice: Choice,
  tree: Mapping[str, bytes],
  there: Collection[str],
  holds: Sequence[str],
) -> Choice:
  entry = choice.entry
  lacking = [need for need in entry.record.needs if need not in holds]
  if lacking:
    return dataclasses.replace(choice, reason=f"needs {', '.join(lacking)}")
  settings = entry.record.settings
  if entry.id in there:
    return dataclasses.replace(
      choice,
      state=PRESENT,
      # Without settings there is nothing to switch on.
      system=System(settings=settings) if settings else None,
      reason="the sources have it",
    )
  try:
    made = apply(store, [entry.id], tree, there)
  except merging.MergeError as e:
    return dataclasses.replace(
      choice,
      state=CLASHES,
      port=PortTask(
        entry=entry.id,
        title=entry.record.title,
        factor=entry.record.factor or "",
        clashes=e.clashes,
        patch=entry.patch,
      ),
      reason=str(e),
    )
  return dataclasses.replace(
    choice,
    state=APPLIES,
    system=System(settings=settings, patch=sources.patch(tree, made)),
    reason="its change goes onto the sources",
  )


def apply(
  store: Store,
  ids: Sequence[str],
  tree: Mapping[str, bytes],
  there: Collection[str] | None = None,
) -> dict[str, bytes]:
  """Sources with some entries and what they stand on.

  What the sources have already is left as it is there.

  Args:
    there: `present` of the sources, where it is known.

  Raises:
    MergeError: an entry clashes with the sources; names files and places.
  """
  made = dict(tree)
  there = present(store, tree) if there is None else there
  absent = [name for name in ids if name not in there]
  for name in trees.closure(store.records, absent):
    if store.entries[name].patch and name not in there:
      made = dict(store.trees.onto(name, made, both=True))
  return made


def _ordered(store: Store, chosen: Mapping[str, Choice]) -> list[Choice]:
  """A topological order: Kahn's, with the best of those that are free first."""
  place = {name: i for i, name in enumerate(store.entries)}
  below = {
    name: set(trees.closure(store.records, [name])).intersection(chosen)
    - {name}
    for name in chosen
  }
  ordered: list[Choice] = []
  while below:
    free = [name for name, needed in below.items() if not needed]
    name = min(free, key=lambda n: (-chosen[n].score, place[n]))
    ordered.append(chosen[name])
    del below[name]
    for needed in below.values():
      needed.discard(name)
  return ordered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What a caller found of a candidate.

  Attributes:
    accepted: it passed the paired test and the proof against the champion.
    refused: a check refused it, of exactness or another.
    gain, bound, s_aa: over the champion; None where not measured.
    reason: one line.
  """

  accepted: bool
  refused: bool = False
  gain: float | None = None
  bound: float | None = None
  s_aa: float | None = None
  reason: str = ""

  @property
  def status(self) -> str:
    """Of `schema.STATUSES`."""
    if self.refused:
      return "replayed-refused"
    if self.accepted:
      return "replayed-ok"
    slower = self.gain is not None and self.gain < 0
    return "replayed-regression" if slower else "replayed-null"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
  """A replay.

  Attributes:
    champion: the system at its end.
    tried: choices with their status and outcome, as they went; without an
      outcome where there was nothing to measure.
    reused: ids of entries whose gain is in the champion. They are not
      discoveries, whoever proposes them again.
    ports: tasks for agents.
  """

  champion: System
  tried: tuple[tuple[Choice, str, Outcome | None], ...]
  reused: tuple[str, ...]
  ports: tuple[PortTask, ...]


def replay(
  store: Store,
  fingerprint: Fingerprint,
  tree: Mapping[str, bytes],
  measure: Callable[[Choice, System, System], Outcome],
  *,
  tune: Callable[[Choice, System], Sequence[str]] | None = None,
  choices: Sequence[Choice] | None = None,
  start: System = STOCK,
  record: bool = True,
  date: str = "",
) -> Replayed:
  """Tries entries one after the other; what passes stays in the champion.

  Args:
    store: the memory.
    fingerprint: of the deployment.
    tree: its sources.
    measure: proves and measures a candidate against the champion, given the
      choice, the candidate and the champion.
    tune: other settings of an entry to try on this deployment, best first; the
      first that is accepted is kept. None tries what was recorded.
    choices: as `choose` gives them, which is the default.
    start: the champion before.
    record: notes the status of every entry in the memory.
    date: of the replay, YYYY-MM-DD.

  Raises:
    SpecPilotError: of `measure`, which ends the replay; what was found before
      is noted.
  """
  choices = choose(store, fingerprint, tree) if choices is None else choices
  champion, kept = start, []
  tried: list[tuple[Choice, str, Outcome | None]] = []
  for choice in choices:
    outcome, status = None, "not-applicable"
    if choice.state == PRESENT and choice.system is None:
      continue
    if choice.state == CLASHES:
      status = "failed-to-apply"
    elif choice.system is not None:
      candidate = _onto(store, choice, champion, [*kept], tree)
      if isinstance(candidate, str):
        status = "failed-to-apply"
        choice = dataclasses.replace(choice, reason=candidate)
      else:
        candidate, outcome = _best(choice, candidate, champion, measure, tune)
        status = outcome.status
        if outcome.accepted:
          champion = candidate
          kept.append(choice.entry.id)
    tried.append((choice, status, outcome))
    if record:
      _note(store, choice, status, outcome, fingerprint, date)
  return Replayed(
    champion=champion,
    tried=tuple(tried),
    reused=tuple(kept),
    ports=tuple(c.port for c in choices if c.port is not None),
  )


def _onto(
  store: Store,
  choice: Choice,
  champion: System,
  kept: Sequence[str],
  tree: Mapping[str, bytes],
) -> System | str:
  """The champion with an entry; why not, where they do not go together."""
  for names, reason in store.conflicts():
    if choice.entry.id in names and names <= {*kept, choice.entry.id}:
      return f"conflicts with {', '.join(sorted(names))}: {reason}"
  settings = join(champion.settings, choice.entry.record.settings)
  base = dict(tree)
  try:
    if champion.patch:
      check = sources.check_source
      base = patches.apply(base, patches.parse(champion.patch, check))
    made = apply(store, [choice.entry.id], base)
  except SpecPilotError as e:
    return str(e)
  return System(settings=settings, patch=sources.patch(tree, made))


def _best(
  choice: Choice,
  candidate: System,
  champion: System,
  measure: Callable[[Choice, System, System], Outcome],
  tune: Callable[[Choice, System], Sequence[str]] | None,
) -> tuple[System, Outcome]:
  """The first of an entry's settings that is accepted; the recorded ones, which
  come last, where none is."""
  for settings in tune(choice, champion) if tune is not None else ():
    text = join(champion.settings, settings)
    variant = dataclasses.replace(candidate, settings=text)
    if variant != candidate:
      outcome = measure(choice, variant, champion)
      if outcome.accepted:
        return variant, outcome
  return candidate, measure(choice, candidate, champion)


def _note(
  store: Store,
  choice: Choice,
  status: str,
  outcome: Outcome | None,
  fingerprint: Fingerprint,
  date: str,
) -> None:
  found = outcome or Outcome(accepted=False)
  store.note_status(
    choice.entry.id,
    Deployment(
      fingerprint=fingerprint,
      status=status,
      gain=found.gain,
      bound=found.bound,
      s_aa=found.s_aa,
      design=" ".join((found.reason or choice.reason).split()),
      date=date,
    ),
  )


def join(*parts: str) -> str:
  """Option settings together: a later one of the same option wins.

  >>> join("tree=chain,weights=w12", "tree=best_first")
  'tree=best_first,weights=w12'
  """
  merged: dict[str, str] = {}
  for text in parts:
    for part in filter(None, (p.strip() for p in text.split(","))):
      name, _, value = part.partition("=")
      merged[name.strip()] = value.strip()
  return ",".join(f"{name}={value}" for name, value in merged.items())


def task_of(choice: Choice) -> str:
  """The direction of a round that a choice belongs to: its option's where the
  sources have it, the open one of its factor otherwise."""
  names = choice.entry.record.option_names
  name = names[0] if names and choice.state == PRESENT else "open"
  return f"{choice.entry.record.factor}/{name}"


def proposal(choice: Choice) -> dict[str, Any]:
  """A choice as agents of a round write proposals."""
  assert choice.system is not None
  return {
    "task": task_of(choice),
    "options": choice.system.settings,
    "patch": choice.system.patch.decode(),
    "hypothesis": f"{choice.entry.id}: {choice.entry.record.title}",
    "prediction": choice.nearest.gain if choice.nearest else None,
  }
