"""Scripted worlds that explore in processes of their own, one per device.

    python -m tests.experiments.rounds.explored FOLDER SECONDS_PER_WORK

runs a round in one, as `scripted` does.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys
import time

from experiments import leases
from experiments.hosts import Slot
from experiments.rounds import phases
from experiments.rounds.explorers import Explorers
from experiments.rounds.log import Budget, Log
from specpilot_jax.errors import SpecPilotError
from tests.experiments.rounds import scripted

SLOTS = (Slot(index=0), Slot(index=1))
KILLED = "d=1"
"""Option whose first screening kills its process."""


def told(folder: pathlib.Path, kind: str, began: float, device: int) -> None:
  line = {
    "kind": kind, "device": device, "pid": os.getpid(), "began": began,
    "ended": time.monotonic(),
  }  # fmt: skip
  with (folder / "intervals").open("a") as file:
    file.write(json.dumps(line) + "\n")


def meet(folder: pathlib.Path, device: int) -> None:
  """Waits until both devices are at work: at once, or one waits in vain."""
  (folder / f"begun-{device}").touch()
  deadline = time.monotonic() + 60
  while not (folder / f"begun-{1 - device}").exists():
    if time.monotonic() > deadline:
      raise SpecPilotError("the other device did not begin meanwhile")
    time.sleep(0.01)


class Child(scripted.World):
  """What a process of a device measures."""

  def __init__(self, folder: pathlib.Path, seconds: float, slot: Slot):
    super().__init__(folder / "paid", seconds)
    self._folder, self._slot = folder, slot

  def __enter__(self):
    return self

  def __exit__(self, *error):
    pass

  def screen(self, system, against, units):
    with leases.explore(self._slot):
      began = time.monotonic()
      meet(self._folder, self._slot.index)
      marker = self._folder / "kill"
      if system["options"] == KILLED and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
      result = super().screen(system, against, units)
      told(self._folder, "screen", began, self._slot.index)
      return result

  def fail(self):
    raise SpecPilotError("no prompts")

  def stumble(self):
    raise KeyError("x")

  def where(self):
    return {"device": self._slot.index, "pid": os.getpid()}


def child(folder: pathlib.Path, seconds: float, slot: Slot) -> Child:
  return Child(folder, seconds, slot)


class World(scripted.World):
  """Screens on devices, and tests with the host to itself."""

  def __init__(self, folder: pathlib.Path, seconds: float):
    super().__init__(folder / "paid", seconds)
    self._folder = folder
    make = functools.partial(child, folder, seconds)
    self.explorers = Explorers(SLOTS, make)

  @property
  def parallel(self):
    return len(self.explorers)

  def device(self):
    return self.explorers.device()

  def screen(self, system, against, units):
    return self.explorers.call("screen", system, against, units)

  def test(self, system, against):
    with leases.pair(SLOTS):
      began = time.monotonic()
      result = super().test(system, against)
      told(self._folder, "test", began, -1)
      return result


class Agent(scripted.Proposer):
  """Notes the device that is leased to it."""

  def __init__(self):
    self.devices: set[int] = set()

  def propose(self, task, workspace, limits):
    self.devices.add(limits.device.index)
    return super().propose(task, workspace, limits)


def run(folder: pathlib.Path, seconds: float, agent=None) -> dict:
  """A round in a folder that may have the beginning of one."""
  world = World(folder, seconds)
  log = Log(folder / "events.jsonl")
  with world.explorers, contextlib.closing(log):
    return phases.Round(
      log, world, [agent or Agent()], Budget(log), scripted.plan(workers=2),
      folder / "agents",
    ).run()  # fmt: skip


if __name__ == "__main__":
  # Its processes import what makes their worlds: not from a program.
  from tests.experiments.rounds import explored

  print(json.dumps(explored.run(pathlib.Path(sys.argv[1]), float(sys.argv[2]))))
