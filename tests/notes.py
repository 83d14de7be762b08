"""Lines that tests want in the output of a run, whether or not they pass.

Findings, not failures: the size of the worst difference, the list of float32
divergences. `conftest.py` prints them at the end.
"""

import os

FULL = os.environ.get("SPECPILOT_FULL") == "1"
"""The full form of the tests: the same checks on more and longer requests."""

lines: list[str] = []


def note(line: str) -> None:
  lines.append(line)
