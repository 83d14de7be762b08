"""Processes as /proc shows them: descendants, processor time, killing."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def _stat(pid: int) -> list[str] | None:
  """/proc/PID/stat from the state, field 3 of proc_pid_stat(5), on."""
  try:
    text = Path(f"/proc/{pid}/stat").read_text()
  except (OSError, ValueError):
    return None
  return text.rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
  """Children of a process, and theirs."""
  children: dict[int, list[int]] = {}
  for name in os.listdir("/proc"):
    if name.isdecimal() and (fields := _stat(int(name))):
      children.setdefault(int(fields[1]), []).append(int(name))

  def below(parent: int) -> Iterator[int]:
    for child in children.get(parent, ()):
      yield child
      yield from below(child)

  return list(below(pid))


def processor_s(pid: int) -> float:
  """User and system time of a process and its descendants, in seconds, with
  that of children which have ended and were waited for."""
  ticks = 0
  for member in (pid, *descendants(pid)):
    fields = _stat(member)
    if fields:
      ticks += sum(map(int, fields[11:15]))
  return ticks / os.sysconf("SC_CLK_TCK")


class Family:
  """The descendants that a process has now, held so that none is mistaken.

  Args:
    pid: of the process.
  """

  def __init__(self, pid: int):
    self._fds: list[int] = []
    for member in descendants(pid):
      with contextlib.suppress(ProcessLookupError):
        self._fds.append(os.pidfd_open(member))

  def __len__(self) -> int:
    return len(self._fds)

  def kill(self) -> None:
    """Kills those that are still there."""
    for fd in self._fds:
      with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)

  def close(self) -> None:
    for fd in self._fds:
      os.close(fd)
    self._fds = []


def kill_group(leader: int) -> None:
  """Kills a process group that may be gone."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(leader, signal.SIGKILL)
