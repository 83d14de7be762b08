"""Leases of a host's devices, held by files that the kernel locks.

Two kinds. Who explores has a device for itself and shares the host with others
who explore. A pair is for tests: its devices, and the whole host, so that
nothing explores meanwhile: cores, power and memory would be shared.

A lease is a lock (flock(2)) on open files of the process that took it. The
kernel gives it back when that process ends, in whatever way.
"""

import contextlib
import fcntl
import math
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from experiments.hosts import Slot
from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError

HOST, NEXT = "host", "next"
POLL_S = 0.05

Say = Callable[[str], None]


def _silent(text: str) -> None:
  del text


@contextlib.contextmanager
def explore(
  slot: Slot | None, say: Say = _silent, deadline: float = math.inf
) -> Generator[None]:
  """One device, beside others who explore.

  Args:
    slot: the device; None takes no lease.
    say: told once, where it has to wait.
    deadline: of `time.monotonic()`.

  Raises:
    SpecPilotError: the deadline has passed; the files cannot be had.
  """
  if slot is None:
    yield
    return
  with contextlib.ExitStack() as stack:
    _take_host(stack, fcntl.LOCK_SH, say, deadline)
    _take(stack, slot.name, fcntl.LOCK_EX, say, deadline)
    yield


@contextlib.contextmanager
def pair(
  slots: Sequence[Slot], say: Say = _silent, deadline: float = math.inf
) -> Generator[None]:
  """Devices for a test, and nothing else on this host; see `explore`.

  Args:
    slots: one or two; none takes no lease.
  """
  with contextlib.ExitStack() as stack:
    if slots:
      _take_host(stack, fcntl.LOCK_EX, say, deadline)
    for slot in slots:
      _take(stack, slot.name, fcntl.LOCK_EX, say, deadline)
    yield


def folder() -> Path:
  """Where the locked files lie: all who lease must have the same."""
  return paths.data_dir() / "leases"


def _take_host(
  stack: contextlib.ExitStack, kind: int, say: Say, deadline: float
) -> None:
  """The host, in the order of asking: a pair that waits for those who explore
  is not overtaken by others who do. Whoever has it waits for no one in this
  queue, and devices are asked for after it."""
  with contextlib.ExitStack() as queue:
    _take(queue, NEXT, fcntl.LOCK_EX, say, deadline)
    _take(stack, HOST, kind, say, deadline)


def _take(
  stack: contextlib.ExitStack, name: str, kind: int, say: Say, deadline: float
) -> None:
  path = folder() / f"{name}.lock"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Python's files are closed in programs that this process starts: no
    # engine holds a lease, or could give it back.
    file = stack.enter_context(open(path, "ab"))
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
  told = False
  while True:
    try:
      fcntl.flock(file, kind | fcntl.LOCK_NB)
      return
    except BlockingIOError:
      pass
    if time.monotonic() > deadline:
      raise SpecPilotError(f"{name} is leased to another process")
    if not told:
      say(f"waiting for {name}, which is leased to another process")
      told = True
    time.sleep(POLL_S)
