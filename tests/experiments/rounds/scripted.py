"""A world whose gains are written down, and a round in it as a program.

    python -m tests.experiments.rounds.scripted FOLDER SECONDS_PER_WORK

The result is printed as JSON. Every measurement that came to its end is a line
of FOLDER/paid.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from experiments.agents.protocol import Limits, Proposal, Session, Task, cut
from experiments.hosts import Slot
from experiments.rounds import phases
from experiments.rounds.log import Budget, Log

GAINS = {"a=1": 0.02, "b=1": 0.12, "c=1": 0.08, "d=1": 0.30, "e=1": -0.05}
"""True gains by option; together they add up, but d and c exclude each other,
f breaks outputs, and g is a patch that does not fit."""

DIRECTIONS = tuple(("tau", name) for name in "abcdefg") + (
  ("overhead", "h"),
  ("kernel", None),
)


class World:
  """Gains of `GAINS`, exactly; with a price in seconds."""

  def __init__(self, paid: pathlib.Path, seconds: float = 0.0):
    self._paid, self._seconds = paid, seconds
    self.gains = dict(GAINS)

  @property
  def parallel(self) -> int:
    return 1

  @property
  def noise(self) -> str:
    return "scripted"

  def device(self) -> contextlib.AbstractContextManager[Slot | None]:
    return contextlib.nullcontext()

  def _pay(self, what: str) -> None:
    time.sleep(self._seconds)
    with self._paid.open("a") as file:
      file.write(what + "\n")

  def _gain(self, options: str) -> float:
    return sum(self.gains.get(part, 0.0) for part in options.split(","))

  def factors(self, champion) -> dict[str, Any]:
    self._pay("factors")
    done = self._gain(champion["options"])
    return {"tau": 1.5 - done / 2, "kernel": 1.2, "overhead": 1.01}

  def aa(self) -> dict[str, Any]:
    self._pay("aa")
    return {"kind": "ok", "reason": "", "mean": 0.001}

  def check(self, system):
    parts = system["options"].split(",")
    if {"c=1", "d=1"} <= set(parts):
      return "option c=1 conflicts with d=1"
    if "misfit" in system["patch"]:
      return "pallas_kernels/x.py: the hunk at line 1 does not fit the base"
    return None

  def merge(self, champion, patch):
    if champion["patch"] and patch and champion["patch"] != patch:
      return {"conflict": "x.py: both patches change the same place"}
    return {"patch": champion["patch"] or patch}

  def replayed(self, system, against) -> dict[str, Any]:
    return {"bound": None}

  def screen(self, system, against, units) -> dict[str, Any]:
    self._pay(f"screen {system['options']} {units}")
    if "f=1" in system["options"].split(","):
      return {"kind": "refused", "reason": "token 3 is not the target's"}
    gain = self._gain(system["options"]) - self._gain(against["options"])
    return {
      "kind": "ok",
      "reason": "",
      "gain": gain,
      "upper": gain + 0.05 / units,
      "identical": 4,
      "outputs": 4,
    }

  def test(self, system, against) -> dict[str, Any]:
    self._pay(f"test {system['options']}")
    gain = self._gain(system["options"]) - self._gain(against["options"])
    return {
      "kind": "ok",
      "verdict": "accept" if gain > 0.02 else "reject",
      "reason": f"{gain:.2f}",
      "gain": gain,
      "bound": gain - 0.005,
    }

  def seal(self, system) -> dict[str, Any]:
    self._pay("seal")
    gain = self._gain(system["options"])
    return {
      "kind": "ok",
      "verdict": "accept",
      "reason": "",
      "speedup_vs_stock": 1 + gain,
      "lcb": gain - 0.005,
      "tokens_forced": 9,
    }


class Proposer:
  """One value of the option of a task; two for b; a patch for g."""

  name = "scripted"
  paid = False

  def propose(self, task: Task, workspace, limits: Limits) -> Session:
    if task.option is None:
      return Session(proposals=())
    options = f"{task.option}=1"
    made = [Proposal(task=task.id, options=options, hypothesis="scripted")]
    if task.option == "b":
      made.append(Proposal(task=task.id, options="b=2"))
    if task.option == "g":
      made = [Proposal(task=task.id, patch="misfit")]
    return cut(Session(proposals=tuple(made)), task, limits)


def plan(**changes) -> phases.Plan:
  base = phases.Plan(directions=DIRECTIONS, aa_sessions=3)
  return dataclasses.replace(base, **changes)


def run(folder: pathlib.Path, seconds: float = 0.0) -> dict:
  """A round in a folder that may have the beginning of one."""
  log = Log(folder / "events.jsonl")
  try:
    return phases.Round(
      log,
      World(folder / "paid", seconds),
      [Proposer()],
      Budget(log),
      plan(),
      folder / "agents",
    ).run()
  finally:
    log.close()


if __name__ == "__main__":
  print(json.dumps(run(pathlib.Path(sys.argv[1]), float(sys.argv[2]))))
