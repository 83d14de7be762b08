"""Prints at the end of a run what the tests noted, in whichever process."""

import pytest

from tests import notes


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
