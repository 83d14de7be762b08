"""Leases of devices: who waits for whom, and what a kill gives back."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import leases
from experiments.hosts import Slot
from specpilot_jax.errors import SpecPilotError

ROOT = pathlib.Path(__file__).parents[2]
FIRST, SECOND = Slot(index=0), Slot(index=1)


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path))


def is_free(lease, *args) -> bool:
  try:
    with lease(*args, deadline=0.0):
      return True
  except SpecPilotError as e:
    assert "leased to another process" in str(e)
    return False


def test_who_may_be_beside_whom():
  with leases.explore(FIRST):
    assert not is_free(leases.explore, FIRST)
    assert is_free(leases.explore, SECOND)
    assert not is_free(leases.pair, (FIRST, SECOND))
    # Also a pair of others: cores and power are shared.
    assert not is_free(leases.pair, (SECOND,))
  with leases.pair((FIRST,)):
    assert not is_free(leases.explore, SECOND)
    assert not is_free(leases.pair, (SECOND,))
  assert is_free(leases.pair, (FIRST, SECOND))


def test_without_devices_there_is_no_lease(tmp_path):
  with leases.pair(()), leases.explore(None):
    assert is_free(leases.pair, (FIRST, SECOND))


def holder(code: str) -> subprocess.Popen:
  """A process that has a lease when it has said so."""
  process = subprocess.Popen(
    [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout is not None
  assert process.stdout.readline() == "has it\n"
  return process


HOLD = """
import subprocess, sys, time
from experiments import leases
from experiments.hosts import Slot
with leases.explore(Slot(index=0)):
  CHILD
  print("has it", flush=True)
  time.sleep(60)
"""


def test_a_killed_process_gives_its_lease_back():
  """kill -9, with a child that lives on: it holds no lease."""
  child = (
    "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL);"
    " print(child.pid, file=sys.stderr)"
  )
  code = HOLD.replace("CHILD", child)
  process = subprocess.Popen(
    [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  assert process.stdout is not None and process.stderr is not None
  assert process.stdout.readline() == "has it\n"
  orphan = int(process.stderr.readline())
  try:
    assert not is_free(leases.explore, FIRST)
    assert not is_free(leases.pair, (FIRST, SECOND))
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(orphan, 0)  # It is there still.
    assert is_free(leases.pair, (FIRST, SECOND))
  finally:
    os.kill(orphan, signal.SIGKILL)
    process.stdout.close()
    process.stderr.close()


def test_a_pair_is_not_overtaken():
  """Who explores later waits behind a pair that waits already."""
  waits = (
    "from experiments import leases\nfrom experiments.hosts import Slot\n"
    "say = lambda text: print('has it', flush=True)\n"  # It waits: that is it.
    "with leases.pair((Slot(index=0),), say):\n  print('pair', flush=True)\n"
    "  import time; time.sleep(60)\n"
  )
  with contextlib.ExitStack() as stack:
    with leases.explore(FIRST):
      pair = stack.enter_context(holder(waits))
      try:
        # The device is free, the host is shared, but the pair was first.
        assert not is_free(leases.explore, SECOND)
      except BaseException:
        pair.kill()
        raise
    assert pair.stdout is not None and pair.stdout.readline() == "pair\n"
    assert not is_free(leases.explore, SECOND)
    pair.kill()
  assert is_free(leases.explore, SECOND)


def test_who_waits_says_so_once(monkeypatch):
  told = []
  with leases.explore(FIRST):
    deadline = time.monotonic() + 3 * leases.POLL_S
    with pytest.raises(SpecPilotError, match="host is leased"):
      with leases.pair((FIRST,), told.append, deadline):
        pass
  assert told == ["waiting for host, which is leased to another process"]
