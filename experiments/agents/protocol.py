"""What the loop asks of an agent, and what it gets."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments.hosts import Slot
from specpilot_jax.errors import SpecPilotError


def number(value: Any, what: str, least: float = -math.inf) -> float:
  """A finite number that an agent said.

  Raises:
    SpecPilotError: it is none, or below `least`.
  """
  good = isinstance(value, int | float) and not isinstance(value, bool)
  try:
    if good and math.isfinite(value) and value >= least:
      return float(value)
  except OverflowError:  # A whole number that no float holds.
    pass
  bound = "" if least == -math.inf else f" of {least:g} or more"
  raise SpecPilotError(f"{what} must be a finite number{bound}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One direction to explore.

  Attributes:
    id: unique in a round, `factor/name`.
    factor: of the speed that it acts on: tau, kernel or overhead.
    option: a registered option; None leaves the way open.
    bound: gain that the cost model allows at most, as a share; None where that
      was not measured.
    champion: options of the system that proposals are made for.
    detail: what else there is to know; of a port, where an entry of the memory
      clashes with the sources, and its patch.
  """

  id: str
  factor: str
  option: str | None
  bound: float | None
  champion: str = ""
  detail: str = ""

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
  """A candidate: settings of options, code, or both.

  Attributes:
    task: id of the task that it answers.
    options: `option=value,...` over stock.
    patch: unified diff over the base; empty for none.
    hypothesis: why it should be faster, one line.
    prediction: gain that the agent expects, as a share; None where it does not
      say.
  """

  task: str
  options: str = ""
  patch: str = ""
  hypothesis: str = ""
  prediction: float | None = None

  @property
  def id(self) -> str:
    """From content alone: the same proposal twice is one."""
    text = json.dumps([self.options, self.patch])
    return "opt-" + hashlib.sha256(text.encode()).hexdigest()[:16]

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> "Proposal":
    """Reads `as_dict`.

    Raises:
      SpecPilotError: a field that is unknown or not of its type.
    """
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - known)
    if unknown:
      raise SpecPilotError(f"proposal: unknown field {unknown[0]!r}")
    for name in ("task", "options", "patch", "hypothesis"):
      if not isinstance(fields.get(name, ""), str):
        raise SpecPilotError(f"proposal: field {name!r} must be text")
      try:
        fields.get(name, "").encode()
      except UnicodeEncodeError:
        raise SpecPilotError(
          f"proposal: field {name!r} must be UTF-8 text"
        ) from None
    values = dict(fields)
    if fields.get("prediction") is not None:
      told = "proposal: field 'prediction'"
      values["prediction"] = number(fields["prediction"], told)
    return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What an agent may spend on a task.

  Attributes:
    seconds: of wall time.
    usd: of money; None where it may spend none.
    proposals: at most.
    device: that it may use meanwhile, leased to it; None where none is.
  """

  seconds: float = 600.0
  usd: float | None = None
  proposals: int = 8
  device: Slot | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
  """What an agent did.

  Attributes:
    proposals: in the order in which they should be tried.
    usd: money spent, as the agent says; None where it does not: not zero.
    transcript: what it said, shortened.
  """

  proposals: tuple[Proposal, ...]
  usd: float | None = None
  transcript: str = ""

  def as_dict(self) -> dict[str, Any]:
    return {
      "proposals": [p.as_dict() for p in self.proposals],
      "usd": self.usd,
      "transcript": self.transcript,
    }


class Agent(Protocol):
  """Proposes candidates for a task.

  Attributes:
    name: in keys of the log.
    paid: whether it may spend money.
  """

  name: str
  paid: bool

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    """Proposals for a task.

    Args:
      task: the direction.
      workspace: a folder of its own, empty.
      limits: kept by the agent; the loop cuts what goes beyond.
    """
    ...


def cut(session: Session, task: Task, limits: Limits) -> Session:
  """A session within its limits, each proposal once and for its own task."""
  kept: dict[str, Proposal] = {}
  for proposal in session.proposals:
    proposal = dataclasses.replace(proposal, task=task.id)
    if proposal.options or proposal.patch:
      kept.setdefault(proposal.id, proposal)
  return dataclasses.replace(
    session, proposals=tuple(kept.values())[: limits.proposals]
  )


def join(parts: Iterable[str]) -> str:
  """Option settings together: a later one of the same option wins."""
  merged: dict[str, str] = {}
  for text in parts:
    for part in filter(None, (p.strip() for p in text.split(","))):
      name, _, value = part.partition("=")
      merged[name.strip()] = value.strip()
  return ",".join(f"{name}={value}" for name, value in merged.items())
