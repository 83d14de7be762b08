"""`experiments.main` end to end on a tiny model."""

import json
import re
import tempfile

import pytest

from experiments import metrics, results
from specpilot_jax import compilation
from tests.experiments import tiny
from tests.notes import in_full_form

# DESIGN of result.json, schema 1.
TOP = {
  "schema", "deployment", "environment", "systems", "token_forcing",
  "cost_model", "trials", "accepted", "sealed", "memory", "recompiles",
  "compilation", "timing_s", "notes", "prompts", "sampling", "stopped_early",
  "job",
}  # fmt: skip
SYSTEM = {
  "output_throughput", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms",
  "acceptance_length", "acceptance_length_per_request", "speedup_vs_ar",
  "requests", "output_tokens", "loop_requests", "options",
}  # fmt: skip
FORCING = {"tokens", "flips", "max_margin", "first_failure", "verdict"}
ENVIRONMENT = {
  "commit", "jax", "jaxlib", "device_kind", "driver", "python", "flags",
}  # fmt: skip
DEPLOYMENT = {
  "name", "target", "drafter", "weights", "device", "widened", "batch",
}  # fmt: skip


def test_result(finished):
  result = results.read_result(finished)
  assert result.keys() >= TOP
  assert result["schema"] == 1
  assert result["deployment"].keys() >= DEPLOYMENT
  assert result["environment"].keys() >= ENVIRONMENT
  assert result["environment"]["flags"]["max_tokens"] == "40"
  assert set(result["environment"]["kernels"].values()) == {"reference"}
  assert list(result["systems"]) == ["ar", "stock", "candidate"]
  for system in result["systems"].values():
    assert system.keys() >= SYSTEM
    assert system["requests"] == len(tiny.PROMPTS)
    assert system["same_output_as_ar"] == len(tiny.PROMPTS)
  assert result["systems"]["ar"]["acceptance_length"] == 1
  assert result["systems"]["ar"]["speedup_vs_ar"] == 1
  assert result["systems"]["stock"]["options"]["num_drafts"] == "block"
  assert result["systems"]["candidate"]["options"]["num_drafts"] == "3"
  assert len(result["systems"]["candidate"]["acceptance"]["histogram"]) <= 4
  assert result["recompiles"] == 0
  # A result does not say where it lies.
  assert str(finished) not in json.dumps(result)
  assert result["prompts"]["turns"] == 1
  assert result["cost_model"] is None and result["trials"] == []


def test_speculation_happened(finished):
  result = results.read_result(finished)
  stock = result["systems"]["stock"]
  assert stock["acceptance"]["accepted_tokens"] > 0
  assert stock["acceptance_length"] > 1


def test_token_forcing_passes(finished):
  forcing = results.read_result(finished)["token_forcing"]
  assert list(forcing) == ["stock", "candidate"]
  for name, control in (("stock", "ar"), ("candidate", "stock")):
    verdict = forcing[name]
    assert verdict.keys() >= FORCING
    assert verdict["verdict"] == "pass", verdict["reason"]
    assert verdict["control"]["name"] == control
    assert verdict["first_failure"] is None
    # Equal outputs are scored once.
    assert verdict["outputs"] == len(tiny.PROMPTS)
    assert verdict["outputs_sharing_scores"] == len(tiny.PROMPTS)


def test_start_up_is_counted_from_the_process(finished):
  result = results.read_result(finished)
  startup = result["startup"]
  seconds = [startup["program_s"], startup["weights_s"]]
  seconds += startup["first_token_s"].values()
  assert seconds == sorted(seconds) and 0 < seconds[0] <= seconds[-1]
  assert list(startup["first_token_s"]) == ["ar", "stock", "candidate"]
  text = (finished / "report.md").read_text()
  assert "from process start to first token of stock" in text
  assert "planned bytes: target" in text


def test_acceptance_by_domain(finished):
  result = results.read_result(finished)
  domains = result["systems"]["stock"]["domains"]
  assert set(domains) == {"even", "odd"}
  text = (finished / "report.md").read_text()
  rows = [line for line in text.splitlines() if line.startswith("| stock odd")]
  tau = domains["odd"]["acceptance_length_per_request_without_loops"]
  assert len(rows) == 1 and (tau is None or f"{tau:.2f}" in rows[0])


def test_requests_and_events(finished):
  records = results.read_requests(finished)
  assert len(records) == 3 * len(tiny.PROMPTS)
  # The order turns around from prompt to prompt.
  assert [r["system"] for r in records[:6]] == [
    "ar", "stock", "candidate", "candidate", "stock", "ar",
  ]  # fmt: skip
  for record in records:
    metrics.check_identity(record)
    assert record["run"].keys() >= {"commit", "flags", "jax", "dtype"}
    assert len(record["metrics"]["itl_ms"]) == (
      record["metrics"]["num_spec_steps"] - 1
    )
  lines = (finished / results.EVENTS).read_text().splitlines()
  events = [json.loads(line)["event"] for line in lines]
  assert events[0] == "run_started" and events[-1] == "run_finished"
  assert events.count("request") == len(records)


def test_report_stands_alone(finished):
  page = (finished / "report.html").read_text()
  assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?\s*(https?:)?//", page)
  assert "http" not in re.sub(r"base64,[^\"]*", "", page)
  assert page.count("data:image/png;base64,") >= 5
  text = (finished / "report.md").read_text()
  assert "| stock |" in text and "token forcing: stock pass" in text
  assert "the first turn alone" in text


def test_report_job_writes_the_same(finished):
  before = (finished / "report.md").read_text()
  (finished / "report.html").unlink()
  (finished / "report.md").unlink()
  assert tiny.run("--job=report", f"--output_dir={finished}") == 0
  assert (finished / "report.md").read_text() == before
  assert (finished / "report.html").exists()


def force(place, requests, name, *more) -> tuple[int, dict]:
  folder = place / name
  status = tiny.run(
    "--job=token_force",
    f"--target={place / 'model'}",
    f"--requests={requests}",
    "--prefill_chunk=16",
    f"--output_dir={folder}",
    *more,
  )
  return status, results.read_result(folder)["token_forcing"]


def test_recorded_requests_pass(place, finished):
  status, forcing = force(place, finished, "again", "--min_control_tokens=50")
  assert status == 0
  assert {v["verdict"] for v in forcing.values()} == {"pass"}


def test_too_few_tokens(place, finished):
  status, forcing = force(place, finished, "few")
  assert status == 0
  assert forcing["stock"]["verdict"] == "inconclusive"
  reason = forcing["stock"]["reason"]
  assert "5000 are needed" in reason
  # What to do about it.
  assert "--num_prompts" in reason and "accumulate" in reason


def test_one_changed_token_fails(place, finished):
  records = results.read_requests(finished)
  at = 17
  doctored = next(
    r for r in records if r["system"] == "stock" and len(r["output_ids"]) > 30
  )
  doctored["output_ids"][at] = (doctored["output_ids"][at] + 7) % 280 + 3
  path = place / "doctored.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  calibration = {p: p.read_bytes() for p in (place / "data").rglob("*.json")}
  status, forcing = force(place, path, "caught", "--min_control_tokens=50")
  assert status == 1
  verdict = forcing["stock"]
  assert verdict["verdict"] == "fail"
  first = verdict["first_failure"]
  assert (first["request"], first["index"]) == (doctored["request"], at)
  # The candidate's own tokens are sound, but their control is not.
  assert forcing["candidate"]["verdict"] == "inconclusive"
  assert calibration and all(
    p.read_bytes() == b for p, b in calibration.items()
  )


def test_sampled_requests_are_forced_too(place, command):
  folder = place / "sampled"
  status = tiny.run(
    *command,
    "--temperature=1",
    "--top_p=0.9",
    "--num_prompts=2",
    "--min_p=0.01",
    "--stop=zz",
    "--stop=a",
    "--max_tokens=24",
    "--min_control_tokens=20",
    f"--output_dir={folder}",
  )
  assert status == 0
  result = results.read_result(folder)
  assert result["token_forcing"]["stock"]["verdict"] == "pass"
  assert result["sampling"]["stop"] == ["zz", "a"]
  assert result["environment"]["flags"]["min_p"] == "0.01"


def test_rejection_sampling_is_not_forced(place, command):
  folder = place / "rejection"
  status = tiny.run(
    *command,
    "--temperature=1",
    "--num_prompts=1",
    "--max_tokens=8",
    "--systems=candidate",
    "--set=acceptance=rejection",
    f"--output_dir={folder}",
  )
  assert status == 0
  verdict = results.read_result(folder)["token_forcing"]["candidate"]
  assert verdict["verdict"] == "inconclusive"
  assert "rejection sampling" in verdict["reason"]


def test_weights_in_w12(place, command):
  """Without a drafter there is no stock: AR's outputs are the control."""
  folder = place / "w12"
  status = tiny.run(
    *command,
    "--drafter=none",
    "--systems=ar,candidate",
    "--set=weights=w12",
    "--dtype=bfloat16",
    "--min_control_tokens=100",
    f"--output_dir={folder}",
  )
  assert status == 0
  result = results.read_result(folder)
  assert result["systems"]["candidate"]["options"]["weights"] == "w12"
  assert result["systems"]["ar"]["options"]["weights"] == "bf16"
  verdict = result["token_forcing"]["candidate"]
  assert verdict["verdict"] == "pass"
  assert verdict["control"]["name"] == "ar"
  assert result["device_memory"]["planned_bytes"]["weights_in_w12"] > 0


def test_wall_time_ends_a_run(place, command):
  folder = place / "late"
  status = tiny.run(*command, "--max_wall_s=0", f"--output_dir={folder}")
  assert status == 0
  result = results.read_result(folder)
  assert result["stopped_early"] and result["systems"] == {}


def test_recompilation_fails_loudly(place, command, monkeypatch, capsys):
  counts = iter(range(10**6))
  monkeypatch.setattr(compilation, "num_compilations", lambda: next(counts))
  folder = place / "recompiled"
  status = tiny.run(
    *command,
    "--num_prompts=1",
    "--max_tokens=4",
    "--notoken_forcing",
    f"--output_dir={folder}",
  )
  assert status == 1
  assert results.read_result(folder)["recompiles"] > 0
  assert "figures are not valid" in capsys.readouterr().out


BAD = (
  (["--no_such_flag=1"], "no_such_flag"),
  (["stray"], "'stray'"),
  (["--job=rounds"], "--job=rounds"),
  (["--flagfile=absent.flags"], "absent.flags"),
  (["--prompts=HumanEval-163"], "HumanEval-163"),
  (["--prompts="], "prompts"),
  (["--num_prompts=0"], "num_prompts"),
  (["--set=num_draft=2"], "'num_draft'"),
  (["--set=num_drafts=none"], "num_drafts='none'"),
  (["--drafter=medusa"], "'medusa'"),
  (["--drafter=none", "--systems=stock"], "stock needs a drafter"),
  (
    ["--drafter=none", "--set=num_drafts=2"],
    "--set=num_drafts needs a drafter",
  ),
  (["--set=weights=int8"], "weights='int8'"),
  (
    ["--set=tree=best_first,acceptance=rejection", "--temperature=1"],
    "acceptance=rejection at temperature 1 is for chains",
  ),
  (["--drafter=none", "--set=tree=marginal"], "--set=tree needs a drafter"),
  (["--sweep=node_budget"], "node_budget=''"),
  (["--sweep=budget=8|16"], "unknown option 'budget'"),
  (["--sweep=node_budget=8|8"], "node_budget=8 is given twice"),
  (["--sweep=node_budget=8|200"], "node_budget='200'"),
  (["--sweep=tree_depth=3|4"], "tree_depth=3 conflicts with tree=chain"),
  (
    ["--drafter=none", "--sweep=node_budget=8"],
    "node_budget=8 needs a drafter",
  ),
  (
    [
      "--set=acceptance=rejection",
      "--sweep=tree=chain|marginal",
      "--temperature=1",
    ],
    "not for tree=marginal",
  ),
  (["--set=weights=w12"], "are not bfloat16 ones"),
  (["--systems=ar,best"], "'best'"),
  (["--systems=ar,ar"], "once"),
  (["--systems=candidate"], "--set"),
  (["--temperature=-1"], "temperature"),
  (["--temperature=warm"], "temperature"),
  (["--max_tokens=0"], "max_tokens"),
  (["--max_wall_s=nan"], "max_wall_s"),
  (["--num_warmups=-1"], "num_warmups"),
  (["--prefill_chunk=0"], "prefill_chunk"),
  (["--kernels=mosaic"], "'mosaic'"),
  (["--kernels=gdn_decod=triton"], "'gdn_decod'"),
  (["--kernels=triton"], "triton needs an NVIDIA GPU"),
  (["--target=/no/such/model"], "/no/such/model"),
  (["--job=token_force"], "--requests"),
  (["--job=token_force", "--requests=/no/such/file"], "/no/such/file"),
)


def beside_the_plan(out: str) -> list[str]:
  """Printed lines but for the memory plan, which precedes all loading."""
  return [x for x in out.splitlines() if not x.startswith("memory plan")]


@pytest.mark.parametrize(("args", "culprit"), BAD, ids=lambda x: str(x))
def test_bad_input(place, command, args, culprit, capsys):
  folder = place / "never"
  assert tiny.run(*command, f"--output_dir={folder}", *args) == 2
  out, err = capsys.readouterr()
  assert err.startswith("error: ") and culprit in err
  assert err.count("\n") == 1
  assert not beside_the_plan(out)
  assert not folder.exists()


def test_missing_target(capsys):
  assert tiny.run() == 2
  assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "below a file", "full"])
def test_output_dir_that_cannot_be_written(place, command, kind, capsys):
  taken = place / "taken"
  taken.write_text("mine")
  full = place / "full"
  full.mkdir(exist_ok=True)
  (full / "mine").write_text("mine")
  folder = {"file": taken, "below a file": taken / "run", "full": full}[kind]
  assert tiny.run(*command, f"--output_dir={folder}") == 2
  out, err = capsys.readouterr()
  assert str(folder) in err and err.count("\n") == 1 and out == ""
  assert taken.read_text() == "mine" and len(list(full.iterdir())) == 1


def test_output_dir_of_an_unfinished_run(place, command, tmp_path, capsys):
  folder = results.RunFolder(tmp_path / "half")
  folder.event("run_started")
  folder.close()
  for job in ((), ("--job=report",)):
    assert tiny.run(*command, *job, f"--output_dir={folder.path}") == 2
    out, err = capsys.readouterr()
    assert "unfinished run (result.json is missing)" in err
    assert str(folder.path) in err and err.count("\n") == 1 and out == ""


def test_report_of_nothing(place, capsys):
  assert tiny.run("--job=report", f"--output_dir={place / 'none'}") == 2
  assert "result.json" in capsys.readouterr().err


def test_prompt_longer_than_the_context(place, command, capsys):
  path = place / "long.jsonl"
  path.write_text(json.dumps({"id": "big", "prompt": "xyz " * 200}) + "\n")
  status = tiny.run(
    *command, f"--prompts={path}", f"--output_dir={place / 'never'}"
  )
  assert status == 2
  assert "prompt big has" in capsys.readouterr().err


@pytest.mark.parametrize(
  "line",
  [
    "not json",
    '{"request": "a"}',
    "[]",
    '{"output_ids": [], "request": "a"}',
  ],
)
def test_bad_requests(place, line, capsys):
  path = place / "bad.jsonl"
  path.write_text(line + "\n")
  status = tiny.run(
    "--job=token_force", f"--target={place / 'model'}", f"--requests={path}"
  )
  assert status == 2
  err = capsys.readouterr().err
  assert "bad.jsonl:1" in err and err.count("\n") == 1


def test_requests_of_another_vocabulary(place, finished, capsys):
  records = results.read_requests(finished)
  records[0]["output_ids"][0] = 10_000
  path = place / "alien.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  status = tiny.run(
    "--job=token_force", f"--target={place / 'model'}", f"--requests={path}"
  )
  assert status == 2
  assert "token id 10000 at index 0" in capsys.readouterr().err


def test_damaged_calibration(place, command, finished, capsys):
  # One for greedy requests, and one for sampled ones if they were run before.
  kept = {
    path: path.read_bytes()
    for path in (place / "data" / "calibration").glob("*.json")
  }
  for path, content in kept.items():
    path.write_bytes(content[:-20])
  try:
    folder = place / "never"
    assert tiny.run(*command, f"--output_dir={folder}") == 2
    err = capsys.readouterr().err
    assert any(str(path) in err for path in kept) and err.count("\n") == 1
    assert not folder.exists()
  finally:
    for path, content in kept.items():
      path.write_bytes(content)


def test_unwritable_calibration(place, command, tmp_path, monkeypatch, capsys):
  data = tmp_path / "data"
  data.mkdir()
  (data / "compiled").symlink_to(place / "data" / "compiled")
  (data / "calibration").symlink_to("/proc/nowhere/at/all")
  monkeypatch.setenv("SPECPILOT_DATA", str(data))
  folder = tmp_path / "never"
  assert tiny.run(*command, f"--output_dir={folder}") == 2
  out, err = capsys.readouterr()
  assert str(data / "calibration") in err and "cannot be written" in err
  assert err.count("\n") == 1 and not folder.exists()
  assert not beside_the_plan(out)
  # It is not needed where nothing is judged.
  status = tiny.run(
    *command,
    "--notoken_forcing",
    "--num_prompts=1",
    "--max_tokens=2",
    f"--output_dir={folder}",
  )
  assert status == 0


def test_a_control_that_cannot_be_kept(command, tmp_path, monkeypatch):
  make = tempfile.mkstemp

  def full(**args):
    if str(args.get("dir", "")).endswith("calibration"):
      raise OSError(28, "No space left on device")
    return make(**args)

  # The check before the measurement makes its file in another way.
  monkeypatch.setattr(tempfile, "mkstemp", full)
  folder = tmp_path / "kept"
  status = tiny.run(
    *command,
    "--num_prompts=1",
    "--max_tokens=8",
    "--min_control_tokens=5",
    f"--output_dir={folder}",
  )
  assert status == 0
  result = results.read_result(folder)
  assert result["token_forcing"]["stock"]["verdict"] == "pass"
  (note,) = [n for n in result["notes"] if "not kept" in n]
  assert "No space left on device" in note


@in_full_form
def test_a_widened_model_is_called_so(place, tmp_path):
  run = tmp_path / "run"
  status = tiny.run(
    "--target=widened:hybrid-1280",
    f"--prompts={place / 'prompts.jsonl'}",
    "--num_prompts=1",
    "--dtype=float32",
    "--systems=ar",
    "--max_tokens=2",
    "--num_warmups=1",
    "--notoken_forcing",
    f"--output_dir={run}",
  )
  assert status == 0
  deployment = json.loads((run / "result.json").read_text())["deployment"]
  assert deployment["widened"]
  assert "widened: the trained zoo" in deployment["weights"]
  assert ":" not in deployment["name"]


def test_other_models_are_not_widened(finished):
  result = json.loads((finished / "result.json").read_text())
  assert not result["deployment"]["widened"]
