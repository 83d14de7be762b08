"""The notebooks: stripped, alike in their first cells, and run in a CPU form.

Here they run in this process, on a tiny model; SPECPILOT_FULL=1 runs each as it
stands, on the model that ships. Those that read a profile are in
`cost_model/test_job.py`, beside one.
"""

import os
import re
import shlex
import sys
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main, settings
from tests.experiments import books, tiny
from tests.experiments.books import FOLDER, NAMES, PARAMETERS, Book
from tests.notes import in_full_form


def wrong(book: Book) -> list[str]:
  """What a notebook must not have, or lacks."""
  found = []
  for index, cell in enumerate(book["cells"]):
    if cell.get("outputs") or cell.get("execution_count") is not None:
      found.append(f"cell {index} has an output")
    if cell["metadata"] not in ({}, PARAMETERS):
      found.append(f"cell {index} has metadata {cell['metadata']}")
    places = r"\w+://|/(?:home|tmp|work|content|root)\b"
    for place in re.findall(places, books.text(cell)):
      found.append(f"cell {index} names {place}")
  install, device, parameters = books.code(book)[:3]
  address = 'REPOSITORY = ""'
  if "pip" not in books.text(install) or address not in books.text(install):
    found.append("the first cell of code does not install")
  checks = {"CPU = False", "ON_CPU", "jax.devices()"}
  if not all(check in books.text(device) for check in checks):
    found.append("the second cell of code does not check the device")
  if parameters["metadata"] != PARAMETERS:
    found.append("the third cell of code is not the parameters")
  if set(book["metadata"]) != {"kernelspec", "language_info"}:
    found.append("the notebook's metadata are not the plain ones")
  if len({cell["id"] for cell in book["cells"]}) < len(book["cells"]):
    found.append("cells share an id")
  return found


def test_these_are_the_notebooks():
  assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stripped(name):
  assert wrong(books.read(name)) == []


def test_first_cells_are_the_same():
  for place in (0, 1):
    cells = {books.text(books.code(books.read(n))[place]) for n in NAMES}
    assert len(cells) == 1


@pytest.mark.parametrize(
  ("place", "change", "fault"),
  [
    (1, {"outputs": [{"output_type": "stream"}]}, "cell 1 has an output"),
    (3, {"execution_count": 4}, "cell 3 has an output"),
    (3, {"metadata": {"collapsed": True}}, "metadata"),
    (1, {"source": ["import pip\n"]}, "does not install"),
    (2, {"source": ["ON_CPU = True"]}, "does not check the device"),
    (3, {"metadata": {}}, "is not the parameters"),
    (4, {"source": ["x = '/content/drive'"]}, "names /content"),
    (4, {"source": ["# https", "://host"]}, "names https://"),
  ],
)
def test_what_is_wrong_is_seen(place, change, fault):
  book = books.read("quick_start")
  book["cells"][place] |= change
  assert any(fault in line for line in wrong(book))


def test_commands_are_translated():
  said: list[str] = []
  exec(
    books.translate("if True:\n  !python -m x --a={A} \\\n    --b\nc = 1\n"),
    {"A": 3, "shell": said.append},
  )
  assert [shlex.split(line) for line in said] == [
    ["python", "-m", "x", "--a=3", "--b"]
  ]


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("notebooks") / "model"
  return str(tiny.save_model(folder, layers=1, exact=True))


def test_quick_start(place, model, capsys):
  books.execute(
    "quick_start",
    MODEL=model,
    DRAFTER="prompt_lookup",
    PROMPT="the cat",
    MAX_TOKENS=16,
    RUN=place / "run",
  )
  out = capsys.readouterr().out
  assert out.count("the same tokens: True") == 2
  assert "token forcing: candidate pass" in out


def test_w12_checkpoint(model, tmp_path, capsys):
  space = books.execute(
    "w12_checkpoint",
    SOURCE=model,
    OUTPUT=tmp_path / "w12",
    PROMPT="the cat",
    MAX_TOKENS=8,
  )
  out = capsys.readouterr().out
  assert "the same tokens: True" in out and "verified: True" in out
  assert space["sizes"].total.weights > 10_000
  # Random normal values: two bits and a half say the exponent.
  assert all(2 < bits < 3 for bits in space["entropies"].values())


def test_round_report(capsys):
  books.execute("round_report")
  out = capsys.readouterr().out
  assert "no champion, so nothing was sealed" in out
  assert "tree=best_first,node_budget=16,tree_depth=7" in out
  assert re.search(r"^screen +\d+\.\d s$", out, re.M)


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_ones_that_the_program_reads(name, tmp_path, monkeypatch):
  """With the parameters as they stand: flags exist, and fit together."""
  said: list[str] = []
  book = books.read(name)
  space: dict[str, Any] = {"sys": sys, "ON_CPU": False, "shell": said.append}
  (parameters,) = [c for c in books.code(book) if c["metadata"] == PARAMETERS]
  exec(books.text(parameters), space)
  monkeypatch.chdir(tmp_path)
  for cell in books.code(book):
    if re.search(r"^ *!", books.text(cell), re.M):
      exec(books.translate(books.text(cell)), space)
  for line in said:
    program, *args = shlex.split(line)
    assert [program, *args[:2]] == [sys.executable, "-m", "experiments.main"]
    with flagsaver.flagsaver():
      flags.FLAGS(settings.expand_flag_files(["main", *args[2:]]))
      assert main.read_settings().systems
  assert bool(said) == (name != "round_report")


@in_full_form
@pytest.mark.parametrize("name", NAMES)
def test_as_it_stands(name, tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]), prepend=os.pathsep)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))
  monkeypatch.chdir(tmp_path)
  books.execute(name, books.run_apart)
