"""Prints at the end of a run what the tests noted."""

from tests import notes


def pytest_terminal_summary(terminalreporter):
  if notes.lines:
    form = "full" if notes.FULL else "small; SPECPILOT_FULL=1 is the full form"
    terminalreporter.section(f"notes ({form})")
    for line in notes.lines:
      terminalreporter.write_line(line)
