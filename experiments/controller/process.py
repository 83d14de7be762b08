"""An engine in a process of its own, as the controller sees it.

The clock is the controller's. Frames of an engine are taken one by one against
what was asked: a frame that nobody asked for, a token too many, a frame that is
late or too long ends the process, with the reason.
"""

import contextlib
import dataclasses
import os
import secrets
import selectors
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.controller import frames, procfs
from experiments.controller.launch import Launch
from specpilot_jax.decoding.sampling import SamplingParams

MAX_OUTPUT_BYTES = 1 << 20
"""Of what a process prints; an engine prints a few lines."""
KEPT_BYTES = 1 << 16
MAX_REASON = 600
"""Characters of a fault's reason."""
END_S = 10.0
"""Time that a process has to end when its commands have."""
IDLE_SHARE, IDLE_S = 0.05, 0.05
"""Processor time that a process may use while others are timed: a share of that
time so far, and so many seconds."""
AFTER_SHARE, AFTER_PASSES, AFTER_S, PASS_TOKENS = 0.05, 2, 0.25, 8
"""Time that an engine may take between the end of its answers and being idle,
off the clock: a share of the time of its answers so far, so many mean passes of
each (those under way when the last token came out), and so many seconds. A
frame of more than `PASS_TOKENS` tokens counts as several passes."""


class EngineFault(Exception):
  """An engine process broke a rule, or died.

  Attributes:
    engine: its name.
    kind: short name of the rule.
    reason: one line of printable characters: an engine may have written it, and
      it goes into records and onto screens.
  """

  def __init__(self, engine: str, kind: str, reason: str):
    reason = "".join(c if c.isprintable() else " " for c in reason)
    reason = " ".join(reason.split())[:MAX_REASON]
    super().__init__(f"{engine}: {kind}: {reason}")
    self.engine, self.kind, self.reason = engine, kind, reason


@dataclasses.dataclass(frozen=True)
class Answer:
  """A request that was timed.

  Attributes:
    token_ids: in the order of arrival.
    times_s: since the request began to be sent, of each frame of tokens.
    counts: tokens of each frame.
    seconds: since the request began to be sent, of its last frame.
    end: the frame that ended it: finish reason and diagnostics.
    after_s: from that frame until the engine was idle; not in `seconds`.
  """

  token_ids: list[int]
  times_s: list[float]
  counts: list[int]
  seconds: float
  end: dict[str, Any]
  after_s: float


def _copy(source: Path, target: Path) -> None:
  """Copies the files of a folder that an engine wrote.

  Anything but a file is left out: a link would be followed with the
  controller's rights, and reading a pipe never ends.
  """
  for folder, _, names in os.walk(source):
    where = target / Path(folder).relative_to(source)
    where.mkdir()
    for name in names:
      path = Path(folder) / name
      if stat.S_ISREG(path.lstat().st_mode):
        shutil.copyfile(path, where / name, follow_symlinks=False)


class EngineProcess:
  """One engine process; use as a context, so that nothing survives.

  Args:
    launch: how it is started.

  Attributes:
    ready: what it said of itself when it was ready; empty before.
    output: the beginning of what it printed.
  """

  def __init__(self, launch: Launch):
    self.launch = launch
    self.name = launch.name
    self.ready: dict[str, Any] = {}
    self.output = bytearray()
    self._printed = 0
    self._decoder = frames.Decoder()
    self._selector = selectors.DefaultSelector()
    self._process: subprocess.Popen[bytes] | None = None
    self._compilations = 0
    self._others_s = self._used_s = 0.0
    self._after_s = self._allowed_s = 0.0
    self._queue: list[tuple[float, dict[str, Any]]] = []

  def fault(self, kind: str, reason: str) -> EngineFault:
    return EngineFault(self.name, kind, reason)

  def __enter__(self) -> "EngineProcess":
    try:
      self.begin()
      self.wait_ready()
    except BaseException:
      self.kill()
      raise
    return self

  def begin(self) -> None:
    """Starts it, and does not wait: several may load at the same time.

    It dies with the thread that calls this. Whoever does not enter the context
    sees that it is left.

    Raises:
      EngineFault: its files cannot be had.
    """
    launch = self.launch
    for folder in (launch.temporary, launch.data):
      folder.mkdir(parents=True)
    if launch.compiled is not None:
      launch.compiled.mkdir(parents=True, exist_ok=True)
      if launch.keeps:
        (launch.data / "compiled").symlink_to(launch.compiled)
      else:
        try:
          _copy(launch.compiled, launch.data / "compiled")
        except OSError as e:
          raise self.fault("files", f"its executables: {e.strerror}") from None
    for name, file in launch.assets.items():
      link = launch.data / name
      link.parent.mkdir(parents=True, exist_ok=True)
      link.symlink_to(file.resolve())
    command_read, self._commands = os.pipe()
    self._replies, reply_write = os.pipe()
    self._printed_fd, print_write = os.pipe()
    inherited = (command_read, reply_write)
    try:
      self._process = subprocess.Popen(
        launch.command(*inherited),
        stdin=subprocess.DEVNULL,
        stdout=print_write,
        stderr=print_write,
        env=launch.environment(),
        cwd=launch.temporary,
        pass_fds=inherited,
        start_new_session=True,
      )
    finally:
      for fd in (*inherited, print_write):
        os.close(fd)
    for fd in (self._replies, self._printed_fd):
      os.set_blocking(fd, False)
      self._selector.register(fd, selectors.EVENT_READ)
    self._send({"kind": "load", "settings": dict(launch.settings)})

  def wait_ready(self) -> None:
    """Waits until it has loaded.

    Raises:
      EngineFault: it has not within the launch's `start_s`, or says other
        things.
    """
    ready = self._expect("ready", None, self.launch.start_s)[1]
    self.ready = {k: v for k, v in ready.items() if k != "kind"}
    self._compilations = ready.get("compilations", 0)

  def generate(
    self, prompt_ids: Sequence[int], sampling: SamplingParams, vocab: int
  ) -> Answer:
    """Sends one request and times its answer.

    Args:
      vocab: ids are below it.

    Raises:
      EngineFault: any frame but those that are due.
    """
    self.check_quiet()
    # Unguessable, so that no frame of an answer can be made before the request.
    request = secrets.token_hex(16)
    message = {
      "kind": "generate",
      "prompt_ids": list(prompt_ids),
      "sampling": dataclasses.asdict(sampling),
      "id": request,  # Last: no frame can name it before all has been read.
    }
    # Before the prompt is written: a reader that takes its time over a pipe
    # that it made small would decode meanwhile.
    started = time.perf_counter()
    self._send(message)
    tokens: list[int] = []
    times: list[float] = []
    counts: list[int] = []
    while True:
      now, frame = self._next(self.launch.step_s)
      kind = self._check_id(frame, request)
      if kind == "end":
        break
      if kind != "tokens":
        raise self.fault("frames", f"{kind!r} in place of tokens or the end")
      ids = frame.get("ids")
      if not isinstance(ids, list) or not ids or len(counts) > len(tokens):
        raise self.fault("frames", "a frame of tokens without any")
      if any(type(i) is not int or not 0 <= i < vocab for i in ids):
        raise self.fault("tokens", f"ids outside the vocabulary of {vocab}")
      tokens += ids
      times.append(now - started)
      counts.append(len(ids))
      if len(tokens) > sampling.max_tokens:
        raise self.fault(
          "tokens", f"more than the {sampling.max_tokens} asked for"
        )
    seconds = now - started
    if not tokens:
      raise self.fault("tokens", "none at all")
    ended = now
    now, idle = self._expect("idle", request, self.launch.step_s)
    passes = max(len(counts), len(tokens) / PASS_TOKENS)
    self._check_after(now - ended, seconds, passes)
    compiled = idle.get("compilations")
    if compiled != self._compilations:
      raise self.fault(
        "compilation", "something was compiled while a request was timed"
      )
    return Answer(tokens, times, counts, seconds, frame, now - ended)

  def _check_after(self, after_s: float, seconds: float, passes: float) -> None:
    """Refuses work for the next answers while no clock runs."""
    self._after_s += after_s
    self._allowed_s += seconds * (AFTER_SHARE + AFTER_PASSES / passes)
    if self._after_s > self._allowed_s + AFTER_S:
      raise self.fault(
        "untimed",
        f"worked {self._after_s:.2f} s after the ends of its answers, for"
        f" {self._allowed_s:.2f} s that passes under way explain",
      )

  def check_quiet(self) -> None:
    """Refuses frames that nobody asked for."""
    self._drain(0.0)
    self._refuse_early()
    self._refuse_others()

  def _refuse_others(self) -> None:
    """An engine that waits has no other processes: their time may be hidden.

    That of a child which nobody waits for is in no account once it has ended.
    """
    if self._process is None or self._process.returncode is not None:
      return
    others = len(procfs.descendants(self._process.pid))
    others -= self.launch.own_processes
    if others > 0:
      raise self.fault("processes", f"started {others} of its own, killed now")

  def _refuse_early(self) -> None:
    if self._queue or self._decoder.pending:
      raise self.fault("frames", "a frame before the request was sent")

  def processor_s(self) -> float:
    """Processor time that its processes have used, in seconds."""
    return procfs.processor_s(self._process.pid) if self._process else 0.0

  def check_idle(self, before_s: float, wall_s: float) -> None:
    """Refuses work while another engine was timed.

    Args:
      before_s: `processor_s` before.
      wall_s: how long the other was timed.
    """
    self._refuse_others()
    self._others_s += wall_s
    # Children that ended take their time with them: that is no credit.
    self._used_s += max(0.0, self.processor_s() - before_s)
    if self._used_s > IDLE_SHARE * self._others_s + IDLE_S:
      raise self.fault(
        "interference",
        f"used {self._used_s:.2f} s of processor in {self._others_s:.2f} s in"
        " which another engine was timed",
      )

  def _check_id(self, frame: Mapping[str, Any], request: str | None) -> str:
    kind = frame.get("kind")
    if kind == "error":
      raise self.fault("error", str(frame.get("error"))[:500])
    if request is not None and frame.get("id") != request:
      raise self.fault("frames", f"{kind!r} of another request")
    return str(kind)

  def _expect(self, kind: str, request: str | None, limit_s: float):
    now, frame = self._next(limit_s)
    found = self._check_id(frame, request)
    if found != kind:
      raise self.fault("frames", f"{found!r} in place of {kind!r}")
    return now, frame

  def _send(self, message: dict[str, Any]) -> None:
    data = memoryview(frames.encode(message))
    os.set_blocking(self._commands, False)
    deadline = time.monotonic() + self.launch.step_s
    while data:
      try:
        data = data[os.write(self._commands, data) :]
      except BlockingIOError:
        # A process that does not read its commands must not stop us.
        self._drain(0.01)
        self._refuse_early()
        if time.monotonic() > deadline:
          raise self.fault("timeout", "does not read its commands") from None
      except BrokenPipeError:
        raise self._died() from None

  def _next(self, limit_s: float) -> tuple[float, dict[str, Any]]:
    deadline = time.monotonic() + limit_s
    while not self._queue:
      left = deadline - time.monotonic()
      if left <= 0:
        raise self.fault("timeout", f"no frame for {limit_s:g} s")
      self._drain(left)
    return self._queue.pop(0)

  def _drain(self, limit_s: float) -> None:
    """Takes what there is; waits at most so long for the first of it."""
    for key, _ in self._selector.select(limit_s):
      try:
        data = os.read(key.fd, 1 << 16)
      except BlockingIOError:
        continue
      now = time.perf_counter()
      if key.fd == self._printed_fd:
        self._take_printed(data)
      elif not data:
        raise self._died()
      else:
        try:
          messages = self._decoder.feed(data)
        except frames.FrameError as e:
          raise self.fault("frames", str(e)) from None
        self._queue += [(now, message) for message in messages]

  def _take_printed(self, data: bytes) -> None:
    if not data:
      self._selector.unregister(self._printed_fd)
      return
    self._printed += len(data)
    self.output += data[: max(0, KEPT_BYTES - len(self.output))]
    if self._printed > MAX_OUTPUT_BYTES:
      raise self.fault("flood", f"printed more than {MAX_OUTPUT_BYTES} bytes")

  def _last_words(self) -> None:
    """What it printed at its end."""
    while self._printed <= MAX_OUTPUT_BYTES:
      try:
        data = os.read(self._printed_fd, 1 << 16)
      except BlockingIOError:
        return
      if not data:
        return
      self._printed += len(data)
      self.output += data[: max(0, KEPT_BYTES - len(self.output))]

  def _died(self) -> EngineFault:
    self._last_words()
    if self._process is not None:
      # Its pipes close a moment before its status is known.
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(timeout=1)
    self.kill()
    status = self._process.returncode if self._process else None
    lines = self.output.decode("utf-8", "replace").strip().splitlines()
    told = f": {lines[-1][:300]}" if lines else ""
    return self.fault("died", f"exit status {status}{told}")

  def close(self) -> None:
    """Ends it in good order, and sees that nothing of it is left.

    Raises:
      EngineFault: a process of its own lives on; it is killed all the same.
    """
    process = self._process
    if process is None or self._commands < 0:  # Not begun, or closed already.
      return
    # An engine has no other processes. In a namespace of their own they die
    # with it, elsewhere they are not its children any more when it has ended.
    family = procfs.Family(process.pid)
    others = len(family) - self.launch.own_processes
    os.close(self._commands)
    self._commands = -1
    try:
      process.wait(timeout=END_S)
      hung = False
    except subprocess.TimeoutExpired:
      hung = True
    family.kill()
    family.close()
    self._last_words()
    self.kill()
    if hung:
      raise self.fault("timeout", "did not end when its commands did")
    if others > 0:
      raise self.fault("processes", f"started {others} of its own, killed now")

  def kill(self) -> None:
    """Kills the process with everything that it started."""
    process = self._process
    # Once its end was waited for, its number may be another process's.
    if process is not None and process.returncode is None:
      family = procfs.Family(process.pid)
      procfs.kill_group(process.pid)
      process.wait()
      family.kill()
      family.close()
    self._close_pipes()
    for folder in (self.launch.temporary, self.launch.data):
      shutil.rmtree(folder, ignore_errors=True)

  def _close_pipes(self) -> None:
    self._selector.close()
    for name in ("_commands", "_replies", "_printed_fd"):
      fd = getattr(self, name, -1)
      if fd >= 0:
        os.close(fd)
        setattr(self, name, -1)

  def __exit__(self, kind, error, trace) -> None:
    if kind is None:
      self.close()
    else:
      self.kill()
