"""Who explores: a process per device; its world leases it while it measures.

    python -m experiments.rounds.explorers COMMANDS REPLIES

with two open file descriptors. The process gets what makes its world, then any
number of calls of its methods, one at a time. It ends when the pipe does: when
the round does, in whatever way. A process that was killed is replaced at the
next call; its lease went back with it, and its engines died with it.
"""

import contextlib
import dataclasses
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from experiments import leases
from experiments.controller import procfs, tree
from experiments.hosts import Slot
from specpilot_jax.errors import SpecPilotError

LENGTH_BYTES = 8
CHILD_END_S = 10.0

Maker = Callable[[Slot], contextlib.AbstractContextManager[Any]]
"""Makes a world for a device; a function of a module, or a partial of one, for
it is pickled."""


class _Died(Exception):
  """The process at the other end is gone."""


def _write(fd: int, value: Any) -> None:
  data = pickle.dumps(value)
  view = memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data)
  try:
    while view:
      view = view[os.write(fd, view) :]
  except BrokenPipeError:
    raise _Died from None


def _read(fd: int) -> Any:
  """The next value.

  Raises:
    _Died: the pipe has ended.
  """

  def take(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
      part = os.read(fd, count - len(data))
      if not part:
        raise _Died
      data += part
    return bytes(data)

  return pickle.loads(take(int.from_bytes(take(LENGTH_BYTES), "big")))


class _Worker:
  """The process of one device."""

  def __init__(self, slot: Slot, make: Maker):
    self.slot, self._make = slot, make
    self._process: subprocess.Popen[bytes] | None = None
    self._commands = self._replies = -1

  @property
  def pid(self) -> int | None:
    return None if self._process is None else self._process.pid

  def _begin(self) -> None:
    command_read, self._commands = os.pipe()
    self._replies, reply_write = os.pipe()
    inherited = (command_read, reply_write)
    line = [sys.executable, "-m", "experiments.rounds.explorers"]
    try:
      self._process = subprocess.Popen(
        [*line, *map(str, inherited)],
        stdin=subprocess.DEVNULL,
        cwd=tree.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C is the round's own to handle.
      )
    finally:
      for fd in inherited:
        os.close(fd)
    _write(self._commands, (self.slot, self._make))

  def call(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """The result of a method of its world; of kind `infra` where it died."""
    try:
      if self._process is None:
        self._begin()
      _write(self._commands, (method, args))
      kind, value = _read(self._replies)
    except _Died:
      status = self.close()
      return {
        "kind": "infra",
        "reason": f"the process that explores on device {self.slot.index} ended"
        f" with status {status}",
      }
    if kind == "error":
      raise SpecPilotError(value)
    return value

  def close(self) -> int | None:
    """Ends it; its exit status, None where there was none."""
    process, self._process = self._process, None
    for name in ("_commands", "_replies"):
      fd = getattr(self, name)
      if fd >= 0:
        os.close(fd)
        setattr(self, name, -1)
    if process is None:
      return None
    try:
      return process.wait(timeout=CHILD_END_S)
    except subprocess.TimeoutExpired:
      family = procfs.Family(process.pid)
      process.kill()
      family.kill()
      family.close()
      return process.wait()


class Explorers:
  """Processes of several devices; use as a context.

  Args:
    slots: the devices.
    make: of a world, in each process.
  """

  def __init__(self, slots: Sequence[Slot], make: Maker):
    self._workers = [_Worker(slot, make) for slot in slots]
    self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in self._workers:
      self._free.put(worker)

  def __len__(self) -> int:
    return len(self._workers)

  @property
  def pids(self) -> list[int]:
    """Of the processes that live."""
    return [w.pid for w in self._workers if w.pid is not None]

  def call(self, method: str, *args: Any) -> dict[str, Any]:
    """Calls a method on the next device that is free; waits for one.

    Args:
      args: what JSON can hold.

    Raises:
      SpecPilotError: what the method raised, in one line.
    """
    worker = self._free.get()
    try:
      return worker.call(method, args)
    finally:
      self._free.put(worker)

  @contextlib.contextmanager
  def device(self) -> Generator[Slot]:
    """A device for something else, leased to this process."""
    worker = self._free.get()
    try:
      with leases.explore(worker.slot):
        yield worker.slot
    finally:
      self._free.put(worker)

  def close(self) -> None:
    """Ends all processes: no lease is left, and no engine."""
    for worker in self._workers:
      worker.close()

  def __enter__(self) -> "Explorers":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


@dataclasses.dataclass
class _Serving:
  """Answers calls until the pipe ends."""

  commands: int
  replies: int

  def run(self) -> None:
    slot, make = _read(self.commands)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Engines die with the thread that began them: the work is the main one's.
    threading.Thread(target=self._listen, args=(calls,), daemon=True).start()
    with contextlib.ExitStack() as stack:
      world = None
      while (call := calls.get()) is not None:
        method, args = call
        try:
          if world is None:
            world = stack.enter_context(make(slot))
          answer = ("done", getattr(world, method)(*args))
        except SpecPilotError as e:
          answer = ("error", str(e))
        except Exception as e:
          answer = ("error", f"{type(e).__name__}: {e}")
        _write(self.replies, answer)

  def _listen(self, calls: "queue.SimpleQueue[Any]") -> None:
    try:
      while True:
        calls.put(_read(self.commands))
    except _Died:
      calls.put(None)
      # A measurement that nobody waits for: its engines die with this process.
      late = threading.Timer(CHILD_END_S / 2, os._exit, (1,))
      late.daemon = True
      late.start()


def main() -> None:
  """Serves; see the module."""
  with contextlib.suppress(_Died):
    _Serving(int(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
  main()
