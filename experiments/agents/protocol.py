"""What the loop asks of an agent, and what it gets."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from specpilot_jax.errors import SpecPilotError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One direction to explore.

  Attributes:
    id: unique in a round, `factor/name`.
    factor: of the speed that it acts on: tau, kernel or overhead.
    option: a registered option; None leaves the way open.
    bound: gain that the cost model allows at most, as a share.
    champion: options of the system that proposals are made for.
    feedback: what became of earlier proposals, coarsely, newest last.
  """

  id: str
  factor: str
  option: str | None
  bound: float
  champion: str = ""
  feedback: tuple[str, ...] = ()

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
    depends_on: ids of proposals that it needs.
  """

  task: str
  options: str = ""
  patch: str = ""
  hypothesis: str = ""
  prediction: float | None = None
  depends_on: tuple[str, ...] = ()

  @property
  def id(self) -> str:
    """From content alone: the same proposal twice is one."""
    text = json.dumps([self.options, self.patch, sorted(self.depends_on)])
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
    prediction = fields.get("prediction")
    if prediction is not None and not isinstance(prediction, int | float):
      raise SpecPilotError("proposal: field 'prediction' must be a number")
    values = dict(fields)
    values["depends_on"] = tuple(fields.get("depends_on", ()))
    return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What an agent may spend on a task.

  Attributes:
    seconds: of wall time.
    usd: of money; None where it may spend none.
    proposals: at most.
  """

  seconds: float = 600.0
  usd: float | None = None
  proposals: int = 8


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
  """Proposes candidates for a task."""

  name: str

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
