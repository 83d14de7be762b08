"""The agent that repeats what another one proposed; the test double."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.agents.protocol import Limits, Proposal, Session, Task
from specpilot_jax.errors import SpecPilotError


class Replay:
  """Proposals by task, recorded.

  Args:
    recorded: proposals by task id. A task that is not there is an error: a
      replay that goes another way repeats nothing.
  """

  name = "replay"
  paid = False

  def __init__(self, recorded: Mapping[str, Sequence[Proposal]]):
    self._recorded = {task: tuple(p) for task, p in recorded.items()}

  @property
  def tasks(self) -> tuple[str, ...]:
    return tuple(self._recorded)

  @classmethod
  def read(cls, path: Path) -> "Replay":
    """Reads JSON lines, one proposal each.

    Raises:
      SpecPilotError: names the line that is wrong.
    """
    recorded: dict[str, list[Proposal]] = {}
    try:
      lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
      raise SpecPilotError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
      raise SpecPilotError(f"{path}: not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or "task" not in fields:
          raise ValueError
        proposal = Proposal.from_dict(fields)
      except SpecPilotError as e:
        raise SpecPilotError(f"{path}:{number}: {e}") from None
      except (ValueError, TypeError):
        raise SpecPilotError(f"{path}:{number}: not a proposal") from None
      recorded.setdefault(proposal.task, []).append(proposal)
    return cls(recorded)

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    del workspace, limits
    if task.id not in self._recorded:
      raise SpecPilotError(
        f"replay: nothing was recorded for task {task.id!r}"
        f" (there: {', '.join(self._recorded) or 'nothing'})"
      )
    return Session(proposals=self._recorded[task.id])
