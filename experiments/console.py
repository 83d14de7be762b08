"""What a run says while it goes on: plain lines, a bar on a terminal."""

import sys
from collections.abc import Sequence
from typing import Self

from rich import progress


def say(text: str = "") -> None:
  """One line, at once."""
  print(text, flush=True)


class Progress:
  """A bar on a terminal; elsewhere one line per advance.

  Args:
    title: what is counted.
    total: advances until it is done.
  """

  def __init__(self, title: str, total: int):
    self._title, self._total, self._done = title, total, 0
    self._bar = None
    if sys.stdout.isatty():
      self._bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}"),
        # A thread that redraws would share the processor with what is timed.
        auto_refresh=False,
      )
      self._task = self._bar.add_task(title, total=total, note="")

  def __enter__(self) -> Self:
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *exception) -> None:
    if self._bar:
      self._bar.stop()

  def advance(self, note: str) -> None:
    self._done += 1
    if self._bar:
      self._bar.update(self._task, advance=1, note=note)
      self._bar.refresh()
    else:
      width = len(str(self._total))
      say(f"{self._title} {self._done:{width}}/{self._total}  {note}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Aligned columns: the first to the left, the others to the right."""
  widths = [
    max(len(row[i]) for row in [header, *rows]) for i in range(len(header))
  ]
  lines = []
  for row in [header, *rows]:
    cells = [row[0].ljust(widths[0])]
    cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
  """A figure for people; a dash where there is none."""
  return "-" if value is None else f"{value:,.{digits}f}{unit}"
