"""The agent that proposes what the memory holds, asked before the others.

A round starts from what was proved elsewhere, and believes none of it: its
proposals pass the same screening, paired tests and proofs as all others. What
they gain was found before, and is no discovery.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.agents.protocol import Limits, Proposal, Session, Task
from memory import transfer
from memory.schema import Fingerprint
from memory.store import Store

PORT = "port-"
"""How the names of tasks begin that carry an entry over to other sources."""


class Recall:
  """Proposes the entries that fit a deployment.

  Args:
    choices: of `transfer.choose`, in the order in which to try them.
  """

  name = "memory"
  paid = False

  def __init__(self, choices: Sequence[transfer.Choice]):
    self._choices = [c for c in choices if c.system is not None]
    self.ports = tuple(c.port for c in choices if c.port is not None)

  @classmethod
  def of(
    cls,
    store: Store,
    fingerprint: Fingerprint,
    tree: Mapping[str, bytes],
    holds: Sequence[str],
  ) -> "Recall":
    """Those of a memory; see `transfer.choose`."""
    return cls(transfer.choose(store, fingerprint, tree, holds=holds))

  def tasks(self) -> Iterator[tuple[str, str | None]]:
    """(factor, option) of all that it has something for."""
    for choice in self._choices:
      factor, _, option = transfer.task_of(choice).partition("/")
      yield factor, None if option == "open" else option

  def port_tasks(self) -> dict[tuple[str, str], str]:
    """(factor, option) of what an agent that writes code has to carry over to
    these sources, with all that it is told: the clashes, and the patch."""
    return {
      (port.factor, f"{PORT}{port.entry}"): f"{port}\n\n{port.patch.decode()}"
      for port in self.ports
    }

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    del workspace
    found = [
      Proposal.from_dict(transfer.proposal(choice))
      for choice in self._choices
      if transfer.task_of(choice) == task.id
    ]
    return Session(proposals=tuple(found[: limits.proposals]))
