"""Prints at the end of a run what the tests noted, in whichever process."""

from tests import notes


def pytest_sessionfinish(session):
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["notes"] = notes.lines


class Collected:
  """Takes over what the processes of a distributed run noted."""

  def pytest_testnodedown(self, node):
    notes.lines += getattr(node, "workeroutput", {}).get("notes", [])


def pytest_configure(config):
  if config.pluginmanager.hasplugin("dsession"):
    config.pluginmanager.register(Collected())


def pytest_terminal_summary(terminalreporter):
  if notes.lines:
    form = "full" if notes.FULL else "small; SPECPILOT_FULL=1 is the full form"
    terminalreporter.section(f"notes ({form})")
    for line in notes.lines:
      terminalreporter.write_line(line)
