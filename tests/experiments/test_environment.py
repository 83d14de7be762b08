"""What a figure depends on beside the code."""

import subprocess
import sys
import time

from experiments import environment


def test_age_of_this_process():
  before = environment.process_age_s()
  time.sleep(0.05)
  assert 0.04 < environment.process_age_s() - before < 5


def test_age_counts_from_the_start_of_the_program():
  code = (
    "import time; time.sleep(0.5)\n"
    "from experiments import environment\n"
    "print(environment.process_age_s())"
  )
  started = time.monotonic()
  out = subprocess.run(
    [sys.executable, "-c", code],
    cwd=environment.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  # Ticks of a hundredth of a second.
  assert 0.48 < float(out.stdout) < time.monotonic() - started + 0.02


def test_where_the_system_does_not_tell(monkeypatch):
  monkeypatch.setattr(environment, "_IMPORTED", time.monotonic() - 3)
  # A system without such files or clocks.
  monkeypatch.delattr(environment.time, "CLOCK_BOOTTIME")
  monkeypatch.setattr(environment.os, "sysconf", lambda name: 100)
  assert 3 <= environment.process_age_s() < 8
