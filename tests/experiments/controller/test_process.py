"""The clock and the faults of an engine process, on the stand-in."""

import json
import os

import pytest

from experiments.controller import checks, paired, process, procfs, sandbox
from experiments.controller.process import EngineFault, EngineProcess
from specpilot_jax.decoding.sampling import SamplingParams
from tests.exploits import standin

SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = [1] * 3000
"""A prompt that does not fit into a small pipe."""

READ = """
import fcntl, os, sys
COMMANDS, REPLIES = int(sys.argv[1]), int(sys.argv[2])
SMALL = fcntl.fcntl(COMMANDS, 1031, 4096)  # F_SETPIPE_SZ

def slow(fd, size, read=os.read):
  if fd == COMMANDS:
    BEFORE
    return read(fd, 4096)
  return read(fd, size)

os.read = slow
"""


@pytest.fixture(scope="module", name="bench")
def _bench(tmp_path_factory):
  place = tmp_path_factory.mktemp("bench")
  return paired.Bench(
    place=place, layers=sandbox.available(), start_s=20.0, step_s=5.0
  )


def start(bench, patch=None):
  count = len(list(bench.place.iterdir()))
  subject = paired.Subject(
    tree=standin.build(bench.place / f"tree-{count}", patch),
    settings=standin.SETTINGS,
    trusted=patch is None,
    record=standin.RECORD,
  )
  return EngineProcess(bench.timed("candidate", subject))


def reading(before: str, after_request: str = "pass") -> bytes:
  """A patched engine that reads its commands in its own way."""
  text = standin._ENGINE
  imports, wait = "import time\nimport zlib\n", "def wait(self):\n    pass"
  changed = text.replace(imports, imports + READ.replace("BEFORE", before))
  changed = changed.replace(wait, wait.replace("pass", after_request))
  return standin.diff(standin.ENGINE, text, changed)


def test_the_clock_runs_while_the_prompt_is_read(bench):
  """An engine that reads a prompt slowly, to decode meanwhile, gains nothing:
  two waits at least are after the controller began to write."""
  with start(bench, reading("__import__('time').sleep(0.1)")) as engine:
    answer = engine.generate(LONG, SAMPLING, standin.VOCAB)
  assert answer.seconds > 0.2


def test_the_id_is_the_last_that_is_read(bench, monkeypatch):
  sent = []
  with start(bench) as engine:
    write = os.write

    def record(fd, data):
      if fd == engine._commands:
        sent.append(bytes(data))
      return write(fd, data)

    monkeypatch.setattr(os, "write", record)
    engine.generate([1, 2], SAMPLING, standin.VOCAB)
  assert list(json.loads(sent[0][4:]))[-1] == "id"


def test_a_frame_while_the_request_is_being_sent(bench):
  """A reader that answers after the first piece of a prompt."""
  frame = r"b'\0\0\0\2{}'"
  patch = reading(
    f"globals().get('BUSY') and (os.write(REPLIES, {frame}), time.sleep(0.2))",
    after_request="globals()['BUSY'] = True",
  )
  with pytest.raises(EngineFault, match="before the request was sent"):
    with start(bench, patch) as engine:
      engine.generate(LONG, SAMPLING, standin.VOCAB)


def test_reasons_are_lines_that_can_be_written(bench):
  fault = EngineFault("candidate", "error", "a\x1b[2J\udcff\nb" + "x" * 9999)
  assert fault.reason.startswith("a [2J b")
  assert len(fault.reason) == process.MAX_REASON
  str(fault).encode("utf-8")
  patch = standin.change(
    standin.ENGINE,
    "    tokens, emitted, accepted = [], [], []\n",
    "    raise ValueError('no \\ud800 \\x1b[31m')\n"
    "    tokens, emitted, accepted = [], [], []\n",
  )
  with pytest.raises(EngineFault) as caught, start(bench, patch) as engine:
    engine.generate([1], SAMPLING, standin.VOCAB)
  assert caught.value.reason == "ValueError: no [31m"


def test_the_memory_that_all_processes_share_is_not_listed(bench):
  """Bubblewrap binds what a policy lists; its own /dev has an empty one."""
  policy = start(bench).launch.policy()
  listed = (*policy.read, *policy.write, *policy.devices)
  assert "/dev/null" in listed
  assert not any("/dev/shm".startswith(path) for path in listed)


def test_time_that_vanishes_is_no_credit(bench, monkeypatch):
  """Processor time of children that ended before, and of an engine that works
  now: the sum may fall."""
  with start(bench) as engine:
    monkeypatch.setattr(engine, "processor_s", lambda: 90.0)
    engine.check_idle(before_s=100.0, wall_s=1.0)
    with pytest.raises(EngineFault, match=r"used 10\.00 s"):
      engine.check_idle(before_s=80.0, wall_s=1.0)


def test_another_process_is_seen_while_the_engine_waits(bench):
  """Nobody waits for the child, and it is there between requests alone: what
  it used is in no account once it has ended."""
  patch = standin.change(
    standin.ENGINE,
    "def wait(self):\n    pass",
    "def wait(self):\n"
    "    import os, signal\n"
    "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "    if not os.fork():\n"
    "      time.sleep(20)\n"
    "      os._exit(0)",
  )
  for check in ("check_quiet", "check_idle"):
    with pytest.raises(EngineFault, match="started 1 of its own"):
      with start(bench, patch) as engine:
        if check == "check_quiet":
          engine.check_quiet()
        else:
          engine.check_idle(engine.processor_s(), 1.0)


def test_the_time_after_an_answer_is_recorded_and_bounded(bench):
  patch = standin.change(
    standin.ENGINE,
    "def wait(self):\n    pass",
    "def wait(self):\n    time.sleep(0.06)",
  )
  with start(bench, patch) as engine:
    answer = engine.generate([1, 2], SAMPLING, standin.VOCAB)
    assert answer.after_s > 0.05
    request = standin.requests(1)[0]
    line = checks.record("candidate", request, answer, standin.RECORD)
    assert line["after_ms"] == pytest.approx(1e3 * answer.after_s)
    # Two passes of ten, and a twentieth: a long answer explains as much.
    for _ in range(4):
      engine._check_after(0.24, 1.0, 10)
    with pytest.raises(EngineFault, match="worked"):
      engine._check_after(0.5, 1.0, 10)


def test_a_process_that_was_waited_for_is_not_looked_for(bench, monkeypatch):
  """Its number may be another process's, whose children would be killed."""
  looked = []
  family = procfs.Family

  def look(pid):
    assert engine._process is not None
    looked.append(engine._process.returncode)
    return family(pid)

  monkeypatch.setattr(procfs, "Family", look)
  engine = start(bench)
  with engine:
    engine.generate([1, 2], SAMPLING, standin.VOCAB)
  engine.kill()
  assert looked and all(status is None for status in looked)


def test_a_program_that_cannot_start_leaves_no_pipe(bench, monkeypatch):
  engine = start(bench)
  before = len(os.listdir("/proc/self/fd"))
  with engine:
    pass
  assert len(os.listdir("/proc/self/fd")) <= before
  engine = start(bench)
  before = len(os.listdir("/proc/self/fd"))
  monkeypatch.setattr(type(engine.launch), "command", lambda *_: ["/not/there"])
  with pytest.raises(FileNotFoundError):
    engine.__enter__()
  # The selector, which was open before, is closed too.
  assert len(os.listdir("/proc/self/fd")) < before
