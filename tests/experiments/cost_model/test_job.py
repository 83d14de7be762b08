"""The job `profile`, and the notebooks that read its run."""

import shutil

import pytest

from experiments import results
from experiments.cost_model import __main__, kernels, measure, model, separate
from specpilot_jax.errors import SpecPilotError
from tests.decoding import kit
from tests.experiments import books, tiny


@pytest.fixture(scope="module", name="profiled")
def _profiled(built):
  """A finished run of --job=profile, an ablation of mechanisms among it."""
  tiny.save_model(built / "bf16", layers=1, exact=True)
  with pytest.MonkeyPatch.context() as patch, kit.quick_compilation():
    patch.setenv("SPECPILOT_DATA", str(built / "data"))
    patch.setattr(separate, "_SECONDS", 0.0)
    patch.setattr(separate, "_REPEATS", 2)
    patch.setattr(measure, "prepare", lambda: None)
    status = tiny.run(
      "--job=profile",
      f"--target={built / 'bf16'}",
      f"--prompts={built / 'prompts.jsonl'}",
      "--dtype=float32",
      "--max_tokens=40",
      "--prefill_chunk=16",
      "--min_control_tokens=50",
      "--systems=ar,stock,candidate",
      "--set=tree=best_first,node_budget=5",
      "--ablate=mechanisms=tree=best_first+node_budget=24,verification",
      f"--output_dir={built / 'profiled'}",
    )
  assert status == 0
  return built / "profiled"


def test_job_profile(profiled):
  result = results.read_result(profiled)
  assert result["job"] == "profile" and result["recompiles"] == 0
  cost = result["cost_model"]
  assert cost["timing"] == "timed separately"
  assert cost["roofline"]["source"].startswith("measured here")
  assert set(cost["classes"]) == set(kernels.CLASSES)
  for name in ("target_gemm", "attention", "drafter"):
    assert cost["classes"][name]["measured_us"] > 0
    assert cost["classes"][name]["floor_us"] > 0
  # A dense model: no recurrent layers.
  assert cost["classes"]["recurrent"] == {
    "measured_us": 0, "floor_us": 0, "floor_at_measured_nodes_us": 0,
  }  # fmt: skip
  for name in model.FACTORS:
    assert cost[f"{name}_factor"] > 0
  assert cost["systems"]["stock"]["classes_over_step"] == pytest.approx(1)
  stock = cost["replay"]["stock"]
  assert stock["steps_agreeing"] == stock["steps"]
  assert stock["tau"] == pytest.approx(stock["tau_measured"])
  page = (profiled / "report.html").read_text()
  assert "Kernel classes of stock against floors" in page
  text = (profiled / "report.md").read_text()
  assert "timed separately" in text and "best-first tree of 64 nodes" in text


TREE, TWO = "tree=best_first,node_budget=24", "verification=two_level"


def test_systems_beside_stock(profiled):
  """Real runs of trees stand beside their replay, and time the passes."""
  result = results.read_result(profiled)
  assert list(result["systems"]) == [
    "ar",
    "stock",
    "candidate",
    TREE,
    TWO,
    "all",
  ]
  options = result["systems"][TREE]["options"]
  assert (options["tree"], options["node_budget"]) == ("best_first", "24")
  cost = result["cost_model"]
  runs = {run["system"]: run for run in cost["replay"]["real_runs"]}
  assert (runs["candidate"]["nodes"], runs["candidate"]["rows"]) == (5, 16)
  assert (runs[TREE]["nodes"], runs[TREE]["rows"]) == (24, 32)
  for name in ("candidate", TREE):  # Two levels are replayed approximately.
    run = runs[name]
    same = run["same_output"]
    assert same["steps_agreeing"] == same["steps"]
    assert run["tau"] == pytest.approx(run["tau_measured"])
  times = cost["replay"]["pass_times"]["bf16"]
  assert list(times["us"]) == ["10", "16", "32"] and times["best"]
  # The candidate's step is measured by class, others' are not.
  assert set(cost["systems"]) == {"ar", "stock", "candidate"}
  assert cost["systems"]["candidate"]["nodes"] == 5
  assert cost["systems"]["candidate"]["verify_over_ar_step"] > 0
  page = (profiled / "report.html").read_text()
  assert "Replayed speed by node budget, pass times bf16" in page


def test_an_ablation_of_mechanisms(profiled):
  result = results.read_result(profiled)
  told = result["ablation"]
  # What is left of two without one is the other, which does not run twice.
  assert told["arms"] == {
    TREE: TREE,
    TWO: TWO,
    "all": "all",
    "all-but-tree": TWO,
    "all-but-verification": TREE,
  }
  pairs = [(c["of"], c["against"]) for c in told["comparisons"]]
  assert pairs == [
    (TREE, "stock"),
    (TWO, "stock"),
    ("all", "stock"),
    ("all", TWO),
    ("all", TREE),
  ]
  for c in told["comparisons"]:
    assert c["requests"] == c["outputs"] == c["same_output"] == 4
    low, high = c["ci95"]
    assert low < c["tpot_ratio"] < high
  for name in (TREE, TWO, "all"):
    assert result["token_forcing"][name]["verdict"] == "pass"
  text = (profiled / "report.md").read_text()
  assert "| mechanism | alone tok/s" in text
  assert "Decoding speed of the same requests, with 95 % intervals" in text


def test_a_doctored_ablation_is_refused(profiled, tmp_path, capsys):
  copy = tmp_path / "run"
  shutil.copytree(profiled, copy)
  result = results.read_result(copy)
  result["ablation"]["comparisons"][0]["tpot_ratio"] *= 1.01
  results.write_result(copy, result)
  assert tiny.run("--job=report", f"--output_dir={copy}") == 2
  err = capsys.readouterr().err
  assert "the comparisons of the ablation are not those of" in err
  assert err.count("\n") == 1


def test_notebooks_read_the_run(place, profiled, capsys):
  parameters = {
    "TARGET": str(place / "bf16"),
    "DRAFTER": "prompt_lookup",
    "PROMPTS": str(place / "prompts.jsonl"),
    "SPLIT": "all",
    "RUN": profiled,
  }
  two = books.execute("two_level", **parameters)
  out = capsys.readouterr().out
  assert "two levels pay" in out or "two levels do not pay" in out
  assert "drafts accepted: two levels pay from an agreement of" in out
  assert 0 < two["agreement"]["agreement"] <= 1
  tree = books.execute("tree_budget", **parameters)
  out = capsys.readouterr().out
  stock = tree["stock"]
  assert stock["steps_agreeing"] == stock["steps"]
  assert set(tree["curves"]) >= {"chain", "best_first", "marginal"}
  assert "16 nodes, depth unlimited: tau" in out and "best budget" in out


def test_no_time_for_a_cost_model(place, command):
  folder = place / "no_time"
  status = tiny.run(
    *command, "--job=profile", "--max_wall_s=0", f"--output_dir={folder}"
  )
  assert status == 0
  result = results.read_result(folder)
  assert result["cost_model"] is None
  assert any("before the cost model" in note for note in result["notes"])


def test_a_cost_model_that_fails_is_told(place, command, monkeypatch, capsys):
  def trace(*args):
    raise SpecPilotError("the profile holds no kernel of a GPU")

  monkeypatch.setattr(measure, "collect", trace)
  monkeypatch.setattr(measure, "prepare", lambda: None)
  folder = place / "no_model"
  with kit.quick_compilation():
    status = tiny.run(
      *command, "--job=profile", "--notoken_forcing", f"--output_dir={folder}"
    )
  assert status == 1
  result = results.read_result(folder)
  # The benchmark is kept.
  assert result["cost_model"] is None and result["systems"]["stock"]
  told = "the cost model failed: the profile holds no kernel of a GPU"
  assert told in result["notes"] and f"note: {told}" in capsys.readouterr().out


def test_recomputed_from_files(profiled, tmp_path, capsys):
  copy = tmp_path / "run"
  shutil.copytree(profiled, copy)
  result = results.read_result(copy)
  before = result["cost_model"]
  results.write_result(copy, result | {"cost_model": None})
  (copy / "report.md").unlink()
  __main__.main(["cost_model", str(copy)])
  assert results.read_result(copy)["cost_model"] == before
  same = (profiled / "report.md").read_text()
  assert (copy / "report.md").read_text() == same
  assert "cost model: ceiling" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("args", "culprit"),
  [
    ([], "one argument"),
    (["/no/such/run"], "/no/such/run"),
    (["--help"], None),
  ],
)
def test_command_line(args, culprit, capsys):
  if culprit is None:
    __main__.main(["cost_model", *args])
    assert "python -m experiments.cost_model DIR" in capsys.readouterr().out
    return
  with pytest.raises(SystemExit) as end:
    __main__.main(["cost_model", *args])
  assert end.value.code == 2
  err = capsys.readouterr().err
  assert err.startswith("error: ") and culprit in err


def test_a_benchmark_has_no_lattices(finished):
  with pytest.raises(SpecPilotError, match="profile.json: no such file"):
    __main__.recompute(finished)


@pytest.mark.parametrize(
  ("args", "culprit"),
  [
    (["--drafter=none"], "needs a drafter"),
    (["--systems=ar"], "stock among the systems"),
    (["--presence_penalty=1"], "penalties"),
  ],
)
def test_profiles_that_cannot_be(place, command, args, culprit, capsys):
  folder = place / "never"
  status = tiny.run(*command, "--job=profile", f"--output_dir={folder}", *args)
  assert status == 2
  err = capsys.readouterr().err
  assert culprit in err and err.count("\n") == 1
  assert not folder.exists()
