"""Lines that tests want in the output of a run, whether or not they pass.

Findings, not failures: the size of the worst difference, the list of float32
divergences. `conftest.py` prints them at the end.
"""

import os

import pytest

FULL = os.environ.get("SPECPILOT_FULL") == "1"
"""The full form of the tests: the same checks on more and longer requests."""

in_full_form = pytest.mark.skipif(
  not FULL, reason="part of the full form: SPECPILOT_FULL=1"
)
"""For tests of what cheaper ones check on smaller models or by parts."""

lines: list[str] = []


def note(line: str) -> None:
  lines.append(line)
