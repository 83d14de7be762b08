"""What the documentation shows: its example applies, its figures are ours."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TRIAL = """
from pathlib import Path
from experiments.agents.protocol import Limits, Task
from experiments.agents.search import Search
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.policy import Policy
search = Search(sampled=False, drafter=True)
assert ("tau", "half_block") in list(search.tasks())
task = Task(id="tau/half_block", factor="tau", option="half_block", bound=None)
(made,) = search.propose(task, Path("."), Limits()).proposals
assert made.options == "half_block=on", made
for value, nodes in (("off", 16), ("on", 9)):
  system = SystemConfig(half_block=value)
  assert Policy.of_slots(system, 15, "dflash").rows == nodes, nodes
"""


def test_the_first_mechanism_applies_and_the_search_agent_tries_it(tmp_path):
  for package in ("pallas_kernels", "specpilot_jax", "memory", "experiments"):
    shutil.copytree(
      ROOT / package,
      tmp_path / package,
      ignore=lambda folder, names: [
        name
        for name in names
        if not (Path(folder) / name).is_dir() and not name.endswith(".py")
      ],
    )
  subprocess.run(
    ["git", "apply", str(DOCS / "first_mechanism.diff")],
    cwd=tmp_path,
    check=True,
  )
  subprocess.run([sys.executable, "-c", TRIAL], cwd=tmp_path, check=True)


def _rows():
  """Rows of the README's table of results, the run's folder with each."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  _, _, text = text.partition("\n## Results\n")
  folder = None
  for line in text.partition("\n## ")[0].splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) == 7 and re.fullmatch(r"[\d.]+", cells[2]):
      link = re.search(r"\]\((.*)\)", cells[0])
      folder = link[1] if link else folder
      yield folder, cells


@pytest.mark.parametrize(
  ("folder", "cells"), list(_rows()), ids=lambda x: str(x)[:40]
)
def test_results_are_those_of_the_files(folder, cells):
  _, name, tpot, rate, over, tau, verdict = cells
  result = json.loads((ROOT / folder / "result.json").read_text())
  assert result["environment"]["device_kind"] == "NVIDIA H200"
  own = result["systems"][name.partition(" ")[0]]
  ar = result["systems"]["ar"]["mean_tpot_ms"]
  assert f"{own['mean_tpot_ms']:.2f}" == tpot
  assert f"{1000 / own['mean_tpot_ms']:.1f}" == rate
  assert f"{ar / own['mean_tpot_ms']:.2f}" == over
  assert f"{own['acceptance_length_without_loops']:.2f}" == tau
  forced = result["token_forcing"].get(name.partition(" ")[0])
  assert verdict == ("control" if forced is None else forced["verdict"])


def test_there_are_results():
  assert len(list(_rows())) >= 7


@pytest.mark.parametrize(
  "page", sorted([ROOT / "README.md", *DOCS.glob("*.md")]), ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
  targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
  for target in targets:
    assert (page.parent / target).exists(), target
