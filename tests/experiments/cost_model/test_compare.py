"""Replayed chains beside real runs of them."""

import copy
import json
import shutil

import pytest

from experiments import results
from experiments.blocks import Plot
from experiments.cost_model import __main__, budgets, compare, model, sections
from specpilot_jax.configs import SystemConfig
from specpilot_jax.errors import SpecPilotError
from tests.experiments.cost_model.test_model import record, run_fixture

run = run_fixture


def one_draft(**fields):
  """A real run with one draft, which emits 2, 1, 1."""
  out = record("candidate", (2, 1, 1), 1.3)
  return out | {"options": {"num_drafts": "1", "acceptance": "match"}} | fields


def add(folder, *lines):
  with open(folder / results.REQUESTS, "a") as out:
    out.write("".join(json.dumps(line) + "\n" for line in lines))


def test_another_budget_of_the_same_run(run):
  add(run, one_draft())
  out = model.compute(run)
  (found,) = out["replay"]["real_runs"]
  assert (found["system"], found["policy"]) == ("candidate", "a chain of 1")
  assert (found["nodes"], found["rows"], found["weights"]) == (2, 2, "bf16")
  assert found["step_us"] == pytest.approx(150)
  assert found["tau"] == found["tau_measured"] == pytest.approx(4 / 3)
  assert found["difference"] == 0
  assert found["same_output"] == {
    "requests": 1, "tau": found["tau"], "tau_measured": found["tau"],
    "difference": 0, "steps": 3, "steps_agreeing": 3,
  }  # fmt: skip
  assert out["notes"] == []
  assert "3 of 3 steps repeated" in compare.describe(found)


def test_a_difference_is_told(run):
  # It is said to have taken four passes for four tokens.
  add(run, one_draft(**{"metrics": record("c", (1, 1, 1, 1), 1.3)["metrics"]}))
  out = model.compute(run)
  (found,) = out["replay"]["real_runs"]
  assert found["difference"] == pytest.approx(1 / 3)
  # Its second step begins where no replay would, and accepts less.
  assert found["same_output"]["steps_agreeing"] < 4
  assert any(
    "candidate: tau 1.333" in n and "1% off" in n for n in out["notes"]
  )


def test_outputs_that_differ_are_kept_apart(run):
  add(run, one_draft(output_ids=[1, 3, 5, 0]))
  (found,) = model.compute(run)["replay"]["real_runs"]
  assert found["requests"] == 1 and found["same_output"] is None
  assert "none with stock's output" in compare.describe(found)


@pytest.mark.parametrize(
  "fields",
  [
    {"finish_reason": "loop"},
    {"prompt_ids": [1, 2]},
    {"drafter": "another"},
    {"request": "b"},
    {"options": {"tree_nodes": "32"}},
    {
      "options": {"acceptance": "rejection"},
      "sampling": record("c", (1, 1), 2.0)["sampling"] | {"temperature": 1.0}
    },
  ],
)  # fmt: skip
def test_what_cannot_be_compared_is_left_out(run, fields):
  add(run, one_draft(**fields))
  assert model.compute(run)["replay"]["real_runs"] == []


def test_greedy_decoding_has_one_rule(run):
  assert compare.system_of(one_draft()) == SystemConfig(num_drafts=1)
  greedy = one_draft(options={"acceptance": "rejection"})
  assert compare.system_of(greedy) == SystemConfig()
  sampled = copy.deepcopy(greedy)
  sampled["sampling"]["temperature"] = 1.0
  assert compare.system_of(sampled) is None
  block = one_draft(options={"num_drafts": "block", "weights": "w12"})
  assert compare.system_of(block) == SystemConfig(weights="w12")
  # Its lattices are other ones.
  block["options"]["drafter_view"] = "midpoint"
  assert compare.system_of(block) is None


def test_trees_are_followed(run):
  """Nodes: 1, 1-2, then 4 and 1-3: the tree accepts the second sibling."""
  tree = record("candidate", (2, 2), 1.2)
  tree["options"] = {"tree": "best_first", "node_budget": "5"}
  add(run, tree)
  out = model.compute(run)
  (found,) = out["replay"]["real_runs"]
  assert found["policy"] == "a best_first tree of 5 nodes"
  assert (found["nodes"], found["rows"]) == (5, 16)
  assert found["tau"] == found["tau_measured"] == 2
  assert found["same_output"]["steps_agreeing"] == 2
  # 0.2 ms over the one step behind the first; stock's 150 us.
  times = out["replay"]["pass_times"]["bf16"]
  assert times["us"] == {"3": pytest.approx(150), "16": pytest.approx(200)}
  by_nodes = {
    (tree, b["nodes"]): b["tok_s"]["bf16"]
    for tree, entries in out["replay"]["policies"].items()
    for b in entries
  }
  assert by_nodes["chain", 3] == pytest.approx(1e6 * (4 / 3) / 150)
  assert by_nodes["best_first", 8] == pytest.approx(1e4)
  assert by_nodes["best_first", 32] is None  # Beyond what was measured.
  assert times["best"] == {
    "policy": "best_first", "nodes": 8, "depth": None, "tau": 2.0,
    "tok_s": pytest.approx(1e4),
  }  # fmt: skip
  assert times["over_stock"] == pytest.approx(9 / 8)


def test_another_run(run, tmp_path):
  other = tmp_path / "other"
  other.mkdir()
  add(other, record("ar", (1, 1, 1, 1), 1.33), one_draft(system="stock"))
  (found,) = model.compute(run, [other])["replay"]["real_runs"]
  assert found["system"] == f"stock of {other}" and found["difference"] == 0
  shutil.rmtree(other)
  other.mkdir()
  add(other, record("ar", (1, 1, 1, 1), 1.33))
  with pytest.raises(SpecPilotError, match="no system there") as caught:
    model.compute(run, [other])
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["RUN", "--against="], "any number of --against=OTHER"),
    (["--against=A"], "any number of --against=OTHER"),
    (["RUN", "--pass_us=1:2", "--pass_us=1:3"], "at most one --pass_us"),
    (["RUN", "--pass_us=16"], "'16': expected ROWS:MICROSECONDS"),
    (["RUN", "--pass_us=16:9,16:9"], "'16:9': expected ROWS:MICROSECONDS"),
    (["RUN", "--pass_us=16:0"], "'16:0': expected ROWS:MICROSECONDS"),
    (["RUN", "--pass_us=16:nan"], "'16:nan': expected ROWS:MICROSECONDS"),
  ],
)
def test_command_line(args, message, capsys):
  with pytest.raises(SystemExit) as end:
    __main__.main(["cost_model", *args])
  assert end.value.code == 2
  err = capsys.readouterr().err
  assert message in err and err.count("\n") == 1


def test_given_pass_times(run):
  """Rows are those of envelopes: 8 and 16 nodes of a tree take equally long."""
  given = budgets.parse_times("3:100, 16:140.5,32:160")
  assert given == {3: 100.0, 16: 140.5, 32: 160.0}
  out = model.compute(run, given_us=given)
  found = out["replay"]["pass_times"]["given"]
  assert (found["best"]["policy"], found["best"]["nodes"]) == ("best_first", 8)
  assert found["best"]["tok_s"] == pytest.approx(2e6 / 140.5)
  assert found["over_stock"] == pytest.approx((2 / 140.5) / (4 / 3 / 100))
  entries = out["replay"]["policies"]["best_first"]
  by_nodes = {b["nodes"]: b["tok_s"]["given"] for b in entries}
  assert by_nodes[8] == by_nodes[16] and by_nodes[24] == by_nodes[32]
  assert by_nodes[48] is None
  assert "best budget, pass times given: best_first of 8 nodes" in " ".join(
    sections.lines(out)
  )
  shown = [b.caption for b in sections.blocks(out) if isinstance(b, Plot)]
  assert "Replayed speed by node budget, pass times given" in shown
  # Stock's own time alone is no sweep.
  assert "Replayed speed by node budget, pass times bf16" not in shown


def test_pass_times_between_measured_rows():
  times = {16: 100.0, 32: 120.0, 64: 200.0}
  assert budgets.pass_us(times, 32) == 120
  assert budgets.pass_us(times, 48) == 160
  assert budgets.pass_us(times, 8) is None is budgets.pass_us(times, 96)
  assert budgets.pass_us({}, 16) is None
