"""What of a round was known before it: reused gains are no discoveries."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.agents.recall import Recall
from experiments.rounds.log import DONE, PROPOSE, Log
from memory import rounds
from memory.store import Store


@dataclasses.dataclass(frozen=True)
class Account:
  """The accepted proposals of a round.

  Attributes:
    entries: ids in the memory of those that it holds.
    reused: ids of proposals whose mechanism it holds.
    discovered: ids of the others.
  """

  entries: tuple[str, ...]
  reused: tuple[str, ...]
  discovered: tuple[str, ...]


def account(log: Log, accepted: Sequence[str], store: Store) -> Account:
  """Tells what was found from what was reused, by the log alone.

  Another setting of a mechanism that the memory holds is that mechanism, tuned.

  Args:
    log: of the round.
    accepted: ids of proposals.
    store: the memory that the round started with.
  """
  proposals, recalled = _proposals(log)
  entries: dict[str, None] = {}
  reused, discovered = [], []
  for name in accepted:
    known = []
    if name in recalled:
      known = [recalled[name]]
    elif not proposals[name]["patch"]:
      options = proposals[name]["options"]
      known = [entry.id for entry in rounds.concerned(store, options)]
    entries |= dict.fromkeys(known)
    (reused if known else discovered).append(name)
  return Account(tuple(entries), tuple(reused), tuple(discovered))


def _proposals(log: Log) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
  """All proposals of a round by id, and the entries of those recalled."""
  found: dict[str, Mapping[str, Any]] = {}
  recalled: dict[str, str] = {}
  for line in log:
    if line["event"] != DONE or not line["key"].startswith(PROPOSE):
      continue
    for fields in line["result"]["proposals"]:
      name = rounds.proposal_id(fields)
      found.setdefault(name, fields)
      if line["key"].endswith(f"/{Recall.name}"):
        recalled[name] = fields["hypothesis"].partition(":")[0]
  return found, recalled
