"""The ledger of tests: written before measuring, never changed.

Every line that begins a test spends its level, whatever comes of it: a run that
was broken off looked all the same. `familywise` of the lines so far is the
chance that at least one null candidate among them passed its bound. Screenings
spend no level; their requests are used all the same.

Processes may share a ledger: each reads and writes it under a lock. A last line
without an end was being written when its process died, before anything was
measured; it is taken away by the next one.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from experiments import results
from experiments.controller import statistics
from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError

BEGUN, ENDED, SCREENED = "begun", "ended", "screened"


class Ledger:
  """One file per deployment.

  Args:
    deployment: digest of what is promoted against.
    folder: `ledger` in the data folder by default.
  """

  def __init__(self, deployment: str, folder: Path | None = None):
    folder = paths.data_dir() / "ledger" if folder is None else folder
    self.path = folder / f"{deployment[:16]}.jsonl"
    self._lines = self._read()

  @property
  def begun(self) -> list[dict[str, Any]]:
    """Tests that were begun, in order."""
    return [line for line in self._lines if line["state"] == BEGUN]

  @property
  def familywise(self) -> float:
    """Chance of a false bound among the tests so far, were all null."""
    passed = 1.0
    for line in self.begun:
      passed *= 1 - line["alpha"]
    return 1 - passed

  @property
  def used_requests(self) -> set[str]:
    """Requests that earlier tests or screenings looked at, other processes'
    too."""
    self._lines = self._read()
    return {
      request
      for line in self._lines
      if line["state"] in (BEGUN, SCREENED)
      for request in line["requests"]
    }

  def begin(
    self,
    candidate: str,
    requests: Iterable[str],
    alpha: float = statistics.ALPHA,
  ) -> int:
    """Spends the level of a test; returns its number.

    Args:
      candidate: digest of the candidate.
      requests: ids of the requests it will be tested with.
    """
    with self._locked() as file:
      number = len(self.begun) + 1
      self._append(
        file,
        {
          "state": BEGUN,
          "test": number,
          "candidate": candidate,
          "requests": sorted(requests),
          "alpha": alpha,
          "time": time.time(),
        },
      )
    return number

  def screened(self, candidate: str, requests: Iterable[str]) -> None:
    """Records what a screening looked at: it spends no level, but what was
    chosen by these requests must not be tested with them.

    Args:
      candidate: digest of the candidate.
      requests: ids of its requests; those that are used already add nothing.
    """
    with self._locked() as file:
      new = sorted(set(requests) - self.used_requests)
      if new:
        self._append(
          file,
          {
            "state": SCREENED,
            "candidate": candidate,
            "requests": new,
            "time": time.time(),
          },
        )

  def end(self, test: int, outcome: Mapping[str, Any]) -> None:
    """Records what came of a test.

    Raises:
      SpecPilotError: it was not begun, or has ended: there is one look.
    """
    with self._locked() as file:
      if test not in {line["test"] for line in self.begun}:
        raise SpecPilotError(f"{self.path}: test {test} was not begun")
      ended = {x["test"] for x in self._lines if x["state"] == ENDED}
      if test in ended:
        raise SpecPilotError(f"{self.path}: test {test} has ended already")
      self._append(
        file,
        {"state": ENDED, "test": test, "outcome": dict(outcome)}
        | {"time": time.time()},
      )

  @contextlib.contextmanager
  def _locked(self) -> Generator[BinaryIO]:
    """The file, with what others wrote read, until the block ends."""
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      with open(self.path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        self._lines = self._read()
        yield file
    except OSError as e:
      raise SpecPilotError(f"{self.path}: {e.strerror}") from None

  def _append(self, file: BinaryIO, line: Mapping[str, Any]) -> None:
    line = results.to_json(line)
    whole = self.path.read_bytes().rpartition(b"\n")
    file.truncate(len(whole[0] + whole[1]))
    file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    self._lines.append(dict(line))

  def _read(self) -> list[dict[str, Any]]:
    if not self.path.exists():
      return []
    lines = []
    whole = self.path.read_bytes().rpartition(b"\n")[0]
    for number, text in enumerate(whole.splitlines(), start=1):
      try:
        line = json.loads(text)
        if line["state"] == BEGUN:
          float(line["alpha"]), list(line["requests"]), int(line["test"])
        elif line["state"] == SCREENED:
          list(line["requests"])
        elif line["state"] != ENDED:
          raise ValueError
      except (ValueError, KeyError, TypeError):
        raise SpecPilotError(f"{self.path}:{number}: damaged") from None
      lines.append(line)
    return lines
