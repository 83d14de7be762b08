"""The one exception type that a user is meant to read."""


class SpecPilotError(ValueError):
  """Bad input: one line that names the culprit and what was expected.

  Library code raises it before anything reaches a kernel and before anything
  is written; command-line entry points print it without a traceback and exit
  with status 2.
  """
