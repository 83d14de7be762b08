"""Replayed chains beside real runs of them."""

import copy
import json
import shutil

import pytest

from experiments import results
from experiments.cost_model import __main__, compare, model
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
  assert (found["system"], found["drafts"]) == ("candidate", 1)
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
  assert compare.drafts_of(one_draft(), 15) == 1
  greedy = one_draft(options={"acceptance": "rejection"})
  assert compare.drafts_of(greedy, 15) == 15
  sampled = copy.deepcopy(greedy)
  sampled["sampling"]["temperature"] = 1.0
  assert compare.drafts_of(sampled, 15) is None
  assert compare.drafts_of(one_draft(options={"num_drafts": "block"}), 15) == 15


def test_another_run(run, tmp_path):
  other = tmp_path / "other"
  other.mkdir()
  add(other, record("ar", (1, 1, 1, 1), 1.33), one_draft(system="stock"))
  (found,) = model.compute(run, other)["replay"]["real_runs"]
  assert found["system"] == f"stock of {other}" and found["difference"] == 0
  shutil.rmtree(other)
  other.mkdir()
  add(other, record("ar", (1, 1, 1, 1), 1.33))
  with pytest.raises(SpecPilotError, match="no system there") as caught:
    model.compute(run, other)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "args", [["RUN", "--against="], ["--against=A", "--against=B", "RUN"]]
)
def test_command_line(args, capsys):
  with pytest.raises(SystemExit) as end:
    __main__.main(["cost_model", *args])
  assert end.value.code == 2
  assert "at most one --against=OTHER" in capsys.readouterr().err
