"""The notebooks as the tests run them: cell by cell, in this process."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt

from experiments import main
from tests.decoding import kit

FOLDER = Path(main.__file__).parent / "notebooks"
NAMES = (
  "quick_start", "w12_checkpoint", "tree_budget", "two_level", "round_report",
)  # fmt: skip
PARAMETERS = {"tags": ["parameters"]}

Book = dict[str, Any]


def read(name: str) -> Book:
  return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code(book: Book) -> list[dict[str, Any]]:
  return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def text(cell: dict[str, Any]) -> str:
  return "".join(cell["source"])


def translate(source: str) -> str:
  """Lines that begin with `!`, as IPython has them, as calls of `shell`."""
  return re.sub(
    r"^( *)!((?:.*\\\n)*.*)$",
    lambda m: f"{m[1]}shell(f{m[2].replace(chr(92) + chr(10), ' ')!r})",
    source,
    flags=re.M,
  )


def nothing_to_run(line: str) -> None:
  raise AssertionError(f"what this makes is there already: {line}")


def run_apart(line: str) -> None:
  """A command in a process of its own, as a notebook runs it."""
  subprocess.run(shlex.split(line), check=True)


def execute(
  name: str, shell: Callable[[str], None] = nothing_to_run, **changes: Any
) -> dict[str, Any]:
  """Runs a notebook's cells on the CPU; what they defined.

  Args:
    shell: runs its commands.
    changes: parameters in the place of its own.
  """
  space: dict[str, Any] = {"__name__": "__main__", "shell": shell}
  with mock.patch.dict(os.environ, MPLBACKEND="Agg"), kit.quick_compilation():
    for cell in code(read(name)):
      source = text(cell).replace("CPU = False", "CPU = True")
      exec(compile(translate(source), f"{name}.ipynb", "exec"), space)
      if cell["metadata"] == PARAMETERS:
        assert changes.keys() <= space.keys()
        space |= changes
  plt.close("all")
  return space
