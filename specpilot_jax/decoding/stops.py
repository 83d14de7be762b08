"""Finish reasons that the host decides, one token at a time.

Both are functions of the emitted tokens alone, so that a speculative engine,
which sees several tokens at once, ends exactly where one that sees single
tokens does.
"""

from collections.abc import Sequence

import numpy as np

LOOP_MAX_PERIOD = 128
"""Longest repeated unit that counts as a loop, in tokens."""
LOOP_MIN_REPEATS = 4
LOOP_MIN_TOKENS = 64


class LoopDetector:
  """True once the output ends in one unit repeated over and over.

  A loop is a suffix of at least `LOOP_MIN_TOKENS` tokens that repeats a unit
  of at most `LOOP_MAX_PERIOD` tokens at least `LOOP_MIN_REPEATS` times.
  """

  def __init__(self):
    self._tokens: list[int] = []
    # _run[p - 1]: how many of the last tokens equal the one p before them.
    self._run = np.zeros(LOOP_MAX_PERIOD, np.int64)
    periods = np.arange(1, LOOP_MAX_PERIOD + 1)
    self._needed = (
      np.maximum(LOOP_MIN_TOKENS, LOOP_MIN_REPEATS * periods) - periods
    )

  def push(self, token: int) -> bool:
    """Takes the next token; returns whether the output loops now."""
    past = np.asarray(self._tokens[: -LOOP_MAX_PERIOD - 1 : -1], np.int64)
    self._tokens.append(token)
    same = np.zeros(LOOP_MAX_PERIOD, bool)
    same[: past.size] = past == token
    self._run = np.where(same, self._run + 1, 0)
    return bool((self._run >= self._needed).any())


class StopStrings:
  """Finds the first stop string and holds back text that may begin one."""

  def __init__(self, stops: Sequence[str]):
    self._stops = tuple(stops)
    self._held = ""
    self.found: str | None = None

  def push(self, text: str) -> str:
    """Takes new text; returns what of it may be shown.

    Sets `found` once a stop string is complete: the text before it is shown,
    the rest never.
    """
    text = self._held + text
    hits = [(text.find(s), s) for s in self._stops if s in text]
    if hits:
      at, self.found = min(hits)
      self._held = ""
      return text[:at]
    keep = max(
      (
        n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])
      ),
      default=0,
    )
    cut = len(text) - keep
    self._held = text[cut:]
    return text[:cut]

  def flush(self) -> str:
    """What was held back when the request ends for another reason."""
    held, self._held = self._held, ""
    return held
