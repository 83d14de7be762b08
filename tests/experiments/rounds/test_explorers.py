"""Exploring on two devices at once: leases, kills, the same result."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import leases
from experiments.rounds.explorers import Explorers
from experiments.rounds.log import Log
from specpilot_jax.errors import SpecPilotError
from tests.experiments.rounds import explored, scripted

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _data(monkeypatch, tmp_path):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))


def intervals(folder: pathlib.Path) -> list[dict]:
  return [
    json.loads(x) for x in (folder / "intervals").read_text().splitlines()
  ]


def overlap(one: dict, two: dict) -> bool:
  return one["began"] < two["ended"] and two["began"] < one["ended"]


def is_gone(pid: int) -> bool:
  """Waits for a process that is not this one's child."""
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline:
    try:
      state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
      return True
    if state.split()[0] == "Z":
      return True
    time.sleep(0.02)
  return False


def test_two_explore_at_once_and_tests_are_alone(tmp_path):
  """One of them is killed meanwhile; the result is that of one device."""
  folder = tmp_path / "two"
  folder.mkdir()
  (folder / "kill").touch()
  agent = explored.Agent()
  result = explored.run(folder, 0.05, agent)
  assert agent.devices <= {0, 1}
  lines = intervals(folder)
  screens = [x for x in lines if x["kind"] == "screen"]
  tests = [x for x in lines if x["kind"] == "test"]
  assert {x["device"] for x in screens} == {0, 1} and tests
  assert any(
    overlap(one, two)
    for one in screens
    for two in screens
    if one["device"] < two["device"]
  )
  for one in lines:
    for two in lines:
      same = one["device"] == two["device"]
      if one is not two and (same or "test" in (one["kind"], two["kind"])):
        assert not overlap(one, two)
  # The killed one was replaced, and its screening done again.
  assert len({x["pid"] for x in screens}) >= 2
  log = Log(folder / "events.jsonl")
  infra = [
    x for x in log if x["event"] == "done" and "killed" not in x["key"]
    and isinstance(x["result"], dict) and x["result"].get("kind") == "infra"
  ]  # fmt: skip
  (line,) = infra
  assert f"status {-signal.SIGKILL}" in line["result"]["reason"]
  assert f"{line['key']}/again" in log
  log.close()
  assert result == scripted.run(tmp_path / "one")
  assert all(is_gone(x["pid"]) for x in screens)
  with leases.pair(explored.SLOTS, deadline=0.0):
    pass


def test_a_round_that_is_killed_leaves_no_process_and_no_lease(tmp_path):
  folder = tmp_path / "killed"
  folder.mkdir()
  process = subprocess.Popen(
    [sys.executable, "-m", "tests.experiments.rounds.explored", str(folder)]
    + ["0.3"],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + 60
  while not (folder / "intervals").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
  pids = {x["pid"] for x in intervals(folder)}
  process.kill()
  process.wait()
  assert pids and all(is_gone(pid) for pid in pids)
  with leases.pair(explored.SLOTS, deadline=time.monotonic() + 20):
    pass
  assert scripted.run(folder) == scripted.run(tmp_path / "one")


def test_calls(tmp_path):
  make = functools.partial(explored.child, tmp_path, 0.0)
  with Explorers(explored.SLOTS[:1], make) as explorers:
    assert explorers.pids == []  # Nothing was asked of them yet.
    first = explorers.call("where")
    assert first["device"] == 0 and explorers.pids == [first["pid"]]
    with pytest.raises(SpecPilotError, match="^no prompts$"):
      explorers.call("fail")
    with pytest.raises(SpecPilotError, match="^KeyError: 'x'$"):
      explorers.call("stumble")
    assert explorers.call("where") == first
    os.kill(first["pid"], signal.SIGKILL)
    lost = explorers.call("where")
    assert lost["kind"] == "infra" and "device 0" in lost["reason"]
    assert explorers.pids == []
  assert is_gone(first["pid"])
