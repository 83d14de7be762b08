"""The event log of a round: append only, and all that a resumed round knows.

Work is done by key. What has ended is never done again; what was begun and did
not end is done again, and its first beginning stays in the account. A line that
a killed process left unfinished is cut off.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specpilot_jax.errors import SpecPilotError

BEGUN, DONE, NOTE = "begun", "done", "note"
PROPOSE = "propose/"
"""Of the keys of agents' work, which takes no device."""


class Log:
  """One file of JSON lines, written by one process at a time: it is locked, and
  the kernel gives the lock back when the process ends, in whatever way.

  Args:
    path: made where it is not there.
    tell: called with key, result and seconds of work that has ended.
    clock: epoch seconds.

  Raises:
    SpecPilotError: another process writes it; it is damaged.
  """

  def __init__(
    self,
    path: Path,
    tell: Callable[[str, Any, float], None] | None = None,
    clock: Callable[[], float] = time.time,
  ):
    self.path = path
    self._tell, self._clock = tell, clock
    self._file = self._open()
    try:
      self._lines = self._read()
    except BaseException:
      self._file.close()
      raise
    self._results = {
      line["key"]: line["result"]
      for line in self._lines
      if line["event"] == DONE
    }
    self._lock = threading.RLock()

  def __iter__(self) -> Iterator[dict[str, Any]]:
    return iter(self._lines)

  def __contains__(self, key: str) -> bool:
    """Whether work of this key has ended."""
    return key in self._results

  def result(self, key: str) -> Any:
    return self._results[key]

  def do(
    self,
    key: str,
    work: Callable[[], Any],
    *,
    cost: Mapping[str, float] | None = None,
    check: Callable[[], None] = lambda: None,
  ) -> Any:
    """The result of some work, which is done where it has not been.

    Args:
      key: of the work, the same in every resumption.
      work: returns what JSON can hold.
      cost: what it may spend, written before it begins; see `spent`. A result
        with a field of that name tells what it did spend, in the end.
      check: called before it begins; may raise. Nothing else is begun between
        this and the line that says what may be spent.
    """
    if key in self._results:
      return self._results[key]
    with self._lock:  # Agents and devices work side by side.
      check()
      again = any(x["event"] == BEGUN and x["key"] == key for x in self._lines)
      self._append({"event": BEGUN, "key": key, "again": again, "cost": cost})
    began = self._clock()
    # What is used now is what a resumption will read.
    result = json.loads(json.dumps(work(), allow_nan=False))
    seconds = self._clock() - began
    self._append(
      {"event": DONE, "key": key, "result": result, "seconds": seconds}
    )
    self._results[key] = result
    if self._tell is not None:
      self._tell(key, result, seconds)
    return result

  def note(self, kind: str, **fields: Any) -> None:
    """Something to know that is no work."""
    self._append({"event": NOTE, "kind": kind, **fields})

  def spent(self, what: str) -> float:
    """Of all work begun so far, lost work included.

    What was written before is spent, or what the result tells, if that is
    more.
    """
    total, reserved = 0.0, {}
    for line in self._lines:
      if line["event"] == BEGUN and what in (line.get("cost") or {}):
        reserved[line["key"]] = line["cost"][what]
        total += line["cost"][what]
      elif line["event"] == DONE and line["key"] in reserved:
        result = line["result"]
        told = result.get(what) if isinstance(result, dict) else None
        total += max(0.0, (told or 0.0) - reserved[line["key"]])
    return total

  def seconds(self, besides: str | None = None) -> float:
    """Wall time of work that has ended.

    Args:
      besides: work whose key begins so is left out.
    """
    return sum(
      x["seconds"]
      for x in self._lines
      if x["event"] == DONE
      and not (besides is not None and x["key"].startswith(besides))
    )

  def close(self) -> None:
    self._file.close()

  def _append(self, line: Mapping[str, Any]) -> None:
    line = {"time": self._clock(), **line}
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    with self._lock:
      try:
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
      except OSError as e:
        raise SpecPilotError(f"{self.path}: {e.strerror}") from None
      self._lines.append(line)

  def _open(self) -> BinaryIO:
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      file = open(self.path, "ab")
    except OSError as e:
      raise SpecPilotError(f"{self.path}: {e.strerror}") from None
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      file.close()
      raise SpecPilotError(
        f"{self.path}: another process is at work on this round"
      ) from None
    return file

  def _read(self) -> list[dict[str, Any]]:
    try:
      data = self.path.read_bytes()
      whole = data[: data.rfind(b"\n") + 1]
      if len(whole) < len(data):
        os.truncate(self.path, len(whole))
    except OSError as e:
      raise SpecPilotError(f"{self.path}: {e.strerror}") from None
    lines = []
    for number, text in enumerate(whole.splitlines(), start=1):
      try:
        line = json.loads(text)
        if line["event"] not in (BEGUN, DONE, NOTE):
          raise ValueError
        if line["event"] == DONE:
          line["result"], float(line["seconds"])
      except (ValueError, KeyError, TypeError):
        raise SpecPilotError(f"{self.path}:{number}: damaged") from None
      lines.append(line)
    return lines


class BudgetSpent(Exception):
  """A limit of a round is reached; it can be taken up again with more."""


class Budget:
  """Limits of a round, checked before every piece of work.

  Args:
    log: what has been spent.
    trials: paired tests and screenings at most; None for any.
    device_s: seconds of work in all slices together, agents' left out.
    usd: money of agents: of each, what was reserved for it or what it said to
      have spent, the larger.
    deadline: of `time.monotonic()`, of this slice.
    faults: so many failures of the machine in a row end it.
  """

  def __init__(
    self,
    log: Log,
    *,
    trials: int | None = None,
    device_s: float | None = None,
    usd: float | None = None,
    deadline: float = float("inf"),
    faults: int = 3,
  ):
    self._log = log
    self._limits = {"trials": trials, "usd": usd}
    self._device_s, self._deadline, self._faults = device_s, deadline, faults
    self._in_a_row = 0

  def check(self, cost: Mapping[str, float]) -> None:
    """Raises BudgetSpent, naming the limit.

    Args:
      cost: what the work may spend; limits of other things do not stop it.
    """
    if time.monotonic() > self._deadline:
      raise BudgetSpent("the time of this slice")
    for name, limit in self._limits.items():
      if limit is None or name not in cost:
        continue
      spent = self._log.spent(name)
      if spent >= limit or spent + cost[name] > limit:
        raise BudgetSpent(f"{name}: {limit:g}")
    worked = self._log.seconds(besides=PROPOSE)
    if self._device_s is not None and worked >= self._device_s:
      raise BudgetSpent(f"seconds of work: {self._device_s:g}")
    if self._in_a_row >= self._faults:
      raise BudgetSpent(f"{self._faults} failures of the machine in a row")

  def tell(self, *, failed: bool) -> None:
    """Counts failures of the machine (not of candidates) in a row."""
    self._in_a_row = self._in_a_row + 1 if failed else 0
