"""Prints at the end of a run what the tests noted, in whichever process.

And saves time: see `quick_kernels` and `LONG`.
"""

import collections
import os
import pathlib

import jax
import pytest

from tests import notes


def quick_kernels() -> None:
  """Has XLA write a CPU's fused kernels straight in LLVM, without MLIR.

  Its MLIR emitters set up a context and all of their rewriting rules anew for
  every kernel, which costs small models more than all the rest of XLA. The
  flags are read once, before the first compilation, and processes that the
  tests start inherit them. An XLA without the option passes over it. The full
  form compiles as users do.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  if not notes.FULL and "xla_backend_extra_options" not in flags:
    option = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ["XLA_FLAGS"] = f"{flags} {option}".strip()


quick_kernels()

MAPS = 40_000
"""Memory maps of this process at which its executables are given up. Each has
some of its own, and XLA crashes where Linux allows no more (65,530)."""


LONG = (
  "decoding/test_tree_lossless.py",
  "mechanisms/test_two_level_lossless.py",
  "decoding/test_precision.py",
  "mechanisms/test_w12.py",
  "checkpoints/test_widen_check.py",
  "zoo/test_stages.py",
  "mechanisms/test_two_level_faults.py",
  "mechanisms/test_fp8.py",
)
"""Files of a few tests that take long. Processes take one file after another,
and at the end none should wait for another's."""


def pytest_collection_modifyitems(items):
  """Those first, then the files with the most tests."""
  root = pathlib.Path(__file__).parent
  first = [root / name for name in LONG]
  count = collections.Counter(item.path for item in items)
  items.sort(
    key=lambda item: (
      first.index(item.path) if item.path in first else len(first),
      -count[item.path],
    )
  )


@pytest.fixture(autouse=True, scope="module")
def room_for_executables():
  yield
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and len(maps.read_bytes().splitlines()) > MAPS:
    jax.clear_caches()


def pytest_sessionfinish(session):
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["notes"] = notes.lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  """A process of a distributed run has ended."""
  notes.lines += getattr(node, "workeroutput", {}).get("notes", [])


def pytest_terminal_summary(terminalreporter):
  if notes.lines:
    form = "full" if notes.FULL else "small; SPECPILOT_FULL=1 is the full form"
    terminalreporter.section(f"notes ({form})")
    for line in notes.lines:
      terminalreporter.write_line(line)
