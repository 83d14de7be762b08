"""How far a long piece of work is: a bar on a terminal, lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from rich import console as rich_console
from rich import progress as rich_progress

LINE_EVERY_S = 10.0
"""Least time between two lines."""

Advance = Callable[[int, str], None]
"""Called with the bytes that were done, and with what is done next."""


def silent(done_bytes: int, what: str) -> None:
  """Shows nothing."""


@contextlib.contextmanager
def show(title: str, total_bytes: int) -> Generator[Advance]:
  """Shows on stderr how many bytes are done while the block runs."""
  console = rich_console.Console(stderr=True)
  if not console.is_terminal:
    yield _lines(title, total_bytes)
    return
  with rich_progress.Progress(
    rich_progress.TextColumn("{task.description}"),
    rich_progress.BarColumn(),
    rich_progress.DownloadColumn(),
    rich_progress.TransferSpeedColumn(),
    rich_progress.TimeRemainingColumn(),
    rich_progress.TextColumn("{task.fields[what]}"),
    console=console,
    transient=True,
  ) as bar:
    task = bar.add_task(title, total=total_bytes, what="")

    def advance(done_bytes: int, what: str) -> None:
      bar.update(task, advance=done_bytes, what=what)

    yield advance


def _lines(title: str, total_bytes: int) -> Advance:
  start = last = time.monotonic()
  done = 0

  def advance(done_bytes: int, what: str) -> None:
    nonlocal done, last
    done += done_bytes
    now = time.monotonic()
    if now - last < LINE_EVERY_S:
      return
    last = now
    print(
      f"{title}: {done / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB"
      f" ({done / 1e6 / (now - start):,.0f} MB/s), next {what}",
      file=sys.stderr,
      flush=True,
    )

  return advance
