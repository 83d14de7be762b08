"""The notebooks: stripped, alike in their first cells, and run in a CPU form.

Here they run in this process, on a tiny model; SPECPILOT_FULL=1 runs each as it
stands, on the model that ships.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main, results, settings
from experiments.cost_model import measure, separate
from specpilot_jax import configs
from specpilot_jax.checkpoints import hf
from specpilot_jax.models import target as target_lib
from tests.checkpoints import builders
from tests.decoding import kit
from tests.experiments import tiny
from tests.notes import in_full_form

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


def wrong(book: Book) -> list[str]:
  """What a notebook must not have, or lacks."""
  found = []
  for index, cell in enumerate(book["cells"]):
    if cell.get("outputs") or cell.get("execution_count") is not None:
      found.append(f"cell {index} has an output")
    if cell["metadata"] not in ({}, PARAMETERS):
      found.append(f"cell {index} has metadata {cell['metadata']}")
    for place in re.findall(
      r"\w+://|/(?:home|tmp|work|content|root)\b", text(cell)
    ):
      found.append(f"cell {index} names {place}")
  install, device, parameters = code(book)[:3]
  if "pip" not in text(install) or 'REPOSITORY = ""' not in text(install):
    found.append("the first cell of code does not install")
  if "CPU = False" not in text(device) or "ON_CPU" not in text(device):
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
  assert wrong(read(name)) == []


def test_first_cells_are_the_same():
  for place in (0, 1):
    assert len({text(code(read(name))[place]) for name in NAMES}) == 1


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
  book = read("quick_start")
  book["cells"][place] |= change
  assert any(fault in line for line in wrong(book))


def translate(source: str) -> str:
  """Lines that begin with `!`, as IPython has them, as calls of `shell`."""
  return re.sub(
    r"^( *)!((?:.*\\\n)*.*)$",
    lambda m: f"{m[1]}shell(f{m[2].replace(chr(92) + chr(10), ' ')!r})",
    source,
    flags=re.M,
  )


def execute(name: str, shell, **changes: Any) -> dict[str, Any]:
  """Runs a notebook's cells with other parameters; what they defined."""
  space: dict[str, Any] = {"__name__": "__main__", "shell": shell}
  for cell in code(read(name)):
    source = text(cell).replace("CPU = False", "CPU = True")
    exec(compile(translate(source), f"{name}.ipynb", "exec"), space)
    if cell["metadata"] == PARAMETERS:
      assert changes.keys() <= space.keys()
      space |= changes
  plt.close("all")
  return space


def test_commands_are_translated():
  said: list[str] = []
  exec(
    translate("if True:\n  !python -m x --a={A} \\\n    --b\nc = 1\n"),
    {"A": 3, "shell": said.append},
  )
  assert [shlex.split(line) for line in said] == [
    ["python", "-m", "x", "--a=3", "--b"]
  ]


def run_here(line: str) -> None:
  """A command of `experiments.main`, in this process."""
  program, *args = shlex.split(line)
  assert [program, *args[:2]] == ["python", "-m", "experiments.main"], line
  assert tiny.run(*args[2:]) == 0


def run_apart(line: str) -> None:
  args = [sys.executable, *shlex.split(line)[1:]]
  subprocess.run(args, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.fixture(autouse=True)
def _as_in_a_notebook(monkeypatch):
  monkeypatch.setenv("MPLBACKEND", "Agg")
  for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
    monkeypatch.setenv(name, os.environ.get(name, "cpu"))
  with kit.quick_compilation():
    yield


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory):
  """A folder with a Llama of one layer whose weights are bfloat16 values."""
  folder = tmp_path_factory.mktemp("bf16") / "model"
  config = builders.config(
    context_length=128, eos_token_ids=(2,), layer_types=(configs.ATTENTION,)
  )
  params = {
    name: np.asarray(value).astype(ml_dtypes.bfloat16)
    for name, value in target_lib.random_params(config, 0, 1.3).items()
  }
  hf.save(folder, config, params, tokenizer_files=builders.tokenizer_files())
  return folder


def test_quick_start(place, model, capsys):
  execute(
    "quick_start",
    run_here,
    MODEL=str(model),
    DRAFTER="prompt_lookup",
    PROMPT="the cat",
    MAX_TOKENS=16,
    RUN=place / "run",
  )
  out = capsys.readouterr().out
  assert out.count("the same tokens: True") == 3
  assert "token forcing: candidate pass" in out


def test_w12_checkpoint(model, tmp_path, capsys):
  space = execute(
    "w12_checkpoint",
    run_here,
    SOURCE=str(model),
    OUTPUT=tmp_path / "w12",
    PROMPT="the cat",
    MAX_TOKENS=8,
  )
  out = capsys.readouterr().out
  assert "the same tokens: True" in out and "verified: True" in out
  assert space["sizes"].total.weights > 10_000
  # Random normal values: two bits and a half say the exponent.
  assert all(2 < bits < 3 for bits in space["entropies"].values())


def test_two_level_and_tree_budget(place, model, monkeypatch, capsys):
  """One run, made by the first notebook's command, read by both."""
  monkeypatch.setattr(separate, "_SECONDS", 0.0)
  monkeypatch.setattr(separate, "_REPEATS", 2)
  monkeypatch.setattr(measure, "prepare", lambda: None)
  shared = {
    "TARGET": str(model),
    "DRAFTER": "prompt_lookup",
    "PROMPTS": str(place / "prompts.jsonl"),
    "SPLIT": "all",
    "NUM_PROMPTS": 3,
    "MAX_TOKENS": 32,
    "RUN": place / "two_levels",
  }
  two = execute("two_level", run_here, **shared)
  out = capsys.readouterr().out
  assert "two levels pay" in out or "two levels do not pay" in out
  assert "drafts accepted: two levels pay from an agreement of" in out
  assert 0 < two["agreement"]["agreement"] <= 1
  # What the run says of the ablation is what its report does.
  result = results.read_result(place / "two_levels")
  told = result["ablation"]
  assert told["arms"] == {
    "verification=one_level": "stock",
    "verification=two_level": "verification=two_level",
  }
  (compared,) = told["comparisons"]
  assert compared["of"] == "verification=two_level"
  assert compared["against"] == "stock" and compared["requests"] == 3
  assert compared["same_output"] == compared["outputs"] == 3
  low, high = compared["ci95"]
  assert low < compared["tpot_ratio"] < high
  report = (place / "two_levels" / "report.md").read_text()
  assert "Decoding speed of the same requests, with 95 % intervals" in report
  assert tiny.run("--job=report", f"--output_dir={place / 'two_levels'}") == 0
  assert (place / "two_levels" / "report.md").read_text() == report

  capsys.readouterr()
  tree = execute("tree_budget", run_here, **shared)
  out = capsys.readouterr().out
  stock = tree["stock"]
  assert stock["steps_agreeing"] == stock["steps"]
  assert set(tree["curves"]) >= {"chain", "best_first", "marginal"}
  assert "16 nodes, depth unlimited: tau" in out and "best budget" in out


def test_round_report(capsys):
  execute("round_report", run_here)
  out = capsys.readouterr().out
  assert "no champion, so nothing was sealed" in out
  assert "tree=best_first,node_budget=16,tree_depth=7" in out
  assert re.search(r"^screen +\d+\.\d s$", out, re.M)


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_ones_that_the_program_reads(name, tmp_path, monkeypatch):
  """With the parameters as they stand: flags exist, and fit together."""
  said: list[str] = []
  book = read(name)
  space: dict[str, Any] = {"ON_CPU": False, "shell": said.append}
  (parameters,) = [c for c in code(book) if c["metadata"] == PARAMETERS]
  exec(text(parameters), space)
  monkeypatch.chdir(tmp_path)
  for cell in code(book):
    if re.search(r"^ *!", text(cell), re.M):
      exec(translate(text(cell)), space)
  for line in said:
    program, *args = shlex.split(line)
    assert [program, *args[:2]] == ["python", "-m", "experiments.main"]
    with flagsaver.flagsaver():
      flags.FLAGS(settings.expand_flag_files(["main", *args[2:]]))
      assert main.read_settings().systems
  assert bool(said) == (name != "round_report")


@in_full_form
@pytest.mark.parametrize("name", NAMES)
def test_as_it_stands(name, tmp_path, monkeypatch):
  monkeypatch.setenv(
    "PYTHONPATH", str(FOLDER.parents[1]) + os.pathsep + os.environ.get(
      "PYTHONPATH", ""
    ),
  )  # fmt: skip
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))
  monkeypatch.chdir(tmp_path)
  execute(name, run_apart)
