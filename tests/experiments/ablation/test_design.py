"""What `--ablate` makes systems of, and what it refuses."""

from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main, settings
from experiments.ablation import design
from experiments.settings import FLAG_FOLDER
from specpilot_jax.configs import SystemConfig
from specpilot_jax.errors import SpecPilotError

FLAG_FILES = sorted(path.name for path in FLAG_FOLDER.glob("*.flags"))


def parse(*texts: str, **changes: Any) -> design.Ablation:
  given: dict[str, Any] = {"baseline": "stock", "drafter": True, "batch": False}
  given |= changes
  return design.parse(texts, **given)


def read(*args: str) -> settings.Settings:
  with flagsaver.flagsaver():
    flags.FLAGS(settings.expand_flag_files(["main", *args]))
    return main.read_settings()


def test_values_of_one_option():
  told = parse("num_drafts = 3, block,7")
  assert told.design == "grid"
  assert told.arms == {
    "num_drafts=3": "num_drafts=3",
    "num_drafts=block": "stock",
    "num_drafts=7": "num_drafts=7",
  }
  # The baseline runs anyway.
  assert told.systems == {
    "num_drafts=3": SystemConfig(num_drafts=3),
    "num_drafts=7": SystemConfig(num_drafts=7),
  }
  assert told.reference == "num_drafts=3"
  assert told.pairs == (
    ("stock", "num_drafts=3"),
    ("num_drafts=7", "num_drafts=3"),
    ("num_drafts=3", "stock"),
    ("num_drafts=7", "stock"),
  )


def test_stock_first_is_the_reference():
  told = parse("tree=chain,best_first")
  assert told.reference == "stock"
  assert told.pairs == (("tree=best_first", "stock"),)


def test_several_options():
  axes = ("tree=chain,best_first", "node_budget=16,8", "weights=w12")
  grid = parse(*axes)
  assert list(grid.arms) == [
    f"tree={tree},node_budget={nodes},weights=w12"
    for tree in ("chain", "best_first")
    for nodes in (16, 8)
  ]
  # A single value is held fixed.
  assert {s.weights for s in grid.systems.values()} == {"w12"}
  single = parse(*axes, design="one_at_a_time")
  assert list(single.arms) == [
    "tree=chain,node_budget=16,weights=w12",
    "tree=best_first,node_budget=16,weights=w12",
    "tree=chain,node_budget=8,weights=w12",
  ]
  assert single.reference == "node_budget=16,weights=w12"
  assert single.reference == grid.reference


def test_mechanisms_of_a_deployment():
  assert list(design.mechanisms(drafter=True, batch=False)) == [
    "tree", "weights", "verification",
  ]  # fmt: skip
  # A load is not verified in two levels.
  assert list(design.mechanisms(drafter=True, batch=True)) == [
    "tree", "weights", "shared_budget", "dynamic_draft", "prompt_admission",
  ]  # fmt: skip
  assert design.mechanisms(drafter=False, batch=False) == {
    "weights": {"weights": "w12"}
  }
  told = design.mechanisms(drafter=True, batch=False, in_fp8=True)
  assert list(told) == ["tree", "verification"]


def test_mechanisms_alone_together_and_left_out():
  told = parse("mechanisms=weights,tree=best_first+node_budget=16,verification")
  tree = "tree=best_first,node_budget=16"
  assert list(told.systems) == [
    "weights=w12",
    tree,
    "verification=two_level",
    "all",
    "all-but-weights",
    "all-but-tree",
    "all-but-verification",
  ]
  best = SystemConfig(tree="best_first", node_budget=16)
  assert told.systems[tree] == best
  assert told.systems["all-but-verification"] == SystemConfig(
    tree="best_first", node_budget=16, weights="w12"
  )
  assert told.systems["all-but-tree"].node_budget is None
  assert [pair for pair in told.pairs if pair[0] == "all"] == [
    ("all", "stock"),
    ("all", "all-but-weights"),
    ("all", "all-but-tree"),
    ("all", "all-but-verification"),
  ]


def test_one_mechanism_is_all_of_them():
  told = parse("mechanisms", drafter=False, baseline="ar")
  assert list(told.systems) == ["weights=w12"]
  assert told.arms == {
    "weights=w12": "weights=w12",
    "all": "weights=w12",
    "all-but-weights": "ar",
  }
  assert told.pairs == (("weights=w12", "ar"),)


@pytest.mark.parametrize("name", FLAG_FILES)
def test_any_deployment_can_be_ablated(name):
  """From stock, whatever the file's own candidate is."""
  plain = read(f"--flagfile={name}")
  run = read(f"--flagfile={name}", "--ablate=mechanisms")
  assert run.systems[: len(plain.systems)] == plain.systems
  assert run.options == plain.options
  assert run.ablation is not None
  assert set(run.systems) == {*plain.systems, *run.ablation.systems}
  fp8 = run.target.startswith("fp8:")
  assert ("weights=w12" in run.systems) != fp8
  assert ("shared_budget=on" in run.systems) == run.batch
  run = read(f"--flagfile={name}", "--ablate=node_budget=8,default")
  assert run.system("node_budget=8") == SystemConfig(node_budget=8)


def test_stock_runs_whatever_systems_are_asked_for():
  run = read(
    "--target=zoo", "--drafter=dflash", "--systems=ar", "--ablate=weights=w12"
  )
  assert run.systems == ("ar", "stock", "weights=w12")
  run = read("--target=zoo", "--drafter=none", "--ablate=weights=w12")
  assert run.systems == ("ar", "weights=w12")


BAD = (
  (("tree=chain,wide",), "option tree='wide': expected chain|best_first|marg"),
  (("node_budget=8,500",), "node_budget='500': expected default or a whole"),
  (("trees=chain",), "unknown option 'trees'; options: acceptance, num_drafts"),
  (("tree",), "expected tree=value,value,... of chain|best_first|marginal"),
  (("tree=",), "expected tree=value,value,... of chain|best_first|marginal"),
  (("",), "expected option=value,value,... or mechanisms; options: accept"),
  (("tree=chain,,marginal",), "option tree='': expected chain"),
  (("tree=chain",), "tree=chain is stock itself: give it another value"),
  (("tree=marginal,marginal",), "tree=marginal is given twice"),
  (("tree=chain", "tree=marginal"), "option tree is in --ablate twice"),
  (("weights=bf16,fp8",), "weights=fp8 is another model"),
  (("tree=chain,marginal", "tree_depth=3"), "tree_depth=3 conflicts with tree"),
  (("mechanisms", "tree=marginal"), "mechanisms stands alone"),
  (("mechanisms=",), "'' is no mechanism of this deployment; mechanisms: tree"),
  (("mechanisms=num_drafts",), "'num_drafts' is no mechanism"),
  (("mechanisms=shared_budget",), "mechanisms: tree, weights, verification"),
  (("mechanisms=tree,tree=marginal",), "tree is given twice"),
  (("mechanisms=tree=chain",), "tree=chain is stock, expected another value"),
  (("mechanisms=tree+node_budget",), "expected node_budget=default or a whole"),
  (("mechanisms=tree+nodes=3",), "unknown option 'nodes'"),
  (
    ("mechanisms=tree+node_budget=16,verification+node_budget=32",),
    "option node_budget is 16 for one mechanism and 32 for another",
  ),
)


@pytest.mark.parametrize(("texts", "told"), BAD, ids=str)
def test_bad_input(texts, told):
  with pytest.raises(SpecPilotError) as caught:
    parse(*texts)
  assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("args", "told"),
  [
    (["--ablate=shared_budget=on"], "shared_budget is for several requests"),
    (["--ablate=tree=marginal", "--sweep=tree=marginal"], "give one of them"),
    (["--ablate=tree=marginal", "--job=round"], "not of round"),
    (["--ablate_design=grid"], "is of --ablate"),
    (["--ablate=tree=marginal", "--drafter=none"], "needs a drafter"),
    (
      ["--ablate=tree=marginal", "--ablate=acceptance=rejection"]
      + ["--temperature=1"],
      "not for tree=marginal",
    ),
  ],
)
def test_flags_that_do_not_go_together(args, told):
  with pytest.raises(SpecPilotError, match=told):
    read("--target=zoo", "--drafter=dflash", *args)
