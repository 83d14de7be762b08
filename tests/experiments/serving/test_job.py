"""A benchmark under a load, end to end on a tiny model."""

import json

import pytest

from experiments import main, metrics, results
from specpilot_jax.errors import SpecPilotError
from tests.decoding import kit
from tests.experiments import test_main, test_settings, tiny

SYSTEMS = ["ar@c2", "candidate@c2"]


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
  """A run of one closed loop; the candidate has all policies of a batch."""
  folder = tmp_path_factory.mktemp("serving")
  tiny.save_model(folder / "model")
  tiny.save_prompts(folder / "prompts.jsonl")
  with pytest.MonkeyPatch.context() as patch, kit.quick_compilation():
    patch.setenv("SPECPILOT_DATA", str(folder / "data"))
    status = tiny.run(
      f"--target={folder / 'model'}",
      f"--prompts={folder / 'prompts.jsonl'}",
      "--dtype=float32",
      "--max_tokens=20",
      "--prefill_chunk=4",
      "--systems=ar,candidate",
      "--set=shared_budget=on,shared_nodes=6,dynamic_draft=on,"
      "prompt_admission=on",
      "--max_concurrency=2",
      "--goodput=ttft:100000,tpot:100000",
      "--min_control_tokens=50",
      f"--output_dir={folder / 'run'}",
    )
  assert status == 0
  return folder


def test_result(folder):
  result = results.read_result(folder / "run")
  assert result.keys() >= test_main.TOP
  assert result["deployment"]["batch"] == 2
  assert list(result["systems"]) == SYSTEMS
  assert result["recompiles"] == 0 and not result["stopped_early"]
  for name, s in result["systems"].items():
    assert s.keys() >= test_main.SYSTEM
    assert s["requests"] == s["same_output_as_ar"] == len(tiny.PROMPTS)
    assert s["level"]["name"] == "c2" and s["level"]["max_concurrency"] == 2
    assert s["max_concurrent_requests"] == 2
    assert 1 < s["requests_per_pass"] <= 2
    assert s["requests_per_pass"] <= s["nodes_per_pass"] <= 6
    assert s["good_requests"] == len(tiny.PROMPTS)
    assert s["request_goodput"] == pytest.approx(s["request_throughput"])
    for key in ("ttft", "tpot", "itl", "e2el", "queue"):
      assert 0 <= s[f"p50_{key}_ms"] <= s[f"p99_{key}_ms"]
    assert s["speedup_vs_stock"] is None
    assert (s["profile"] is not None) == (name != "ar@c2")
  assert result["systems"]["ar@c2"]["speedup_vs_ar"] == 1
  assert result["systems"]["ar@c2"]["nodes_per_pass"] == pytest.approx(
    result["systems"]["ar@c2"]["requests_per_pass"]
  )
  assert result["systems"]["candidate@c2"]["acceptance"]["drafted_tokens"] > 0
  timed = result["systems"]["candidate@c2"]["profile"]["step_us"]
  assert list(timed["2"]) == ["6"]


def test_outputs_are_proved(folder):
  """Over all loads, by the name of the system."""
  forcing = results.read_result(folder / "run")["token_forcing"]
  assert list(forcing) == ["candidate"]
  assert forcing["candidate"]["verdict"] == "pass"
  assert forcing["candidate"]["outputs"] == len(tiny.PROMPTS)


def test_records(folder):
  records = results.read_requests(folder / "run")
  assert len(records) == 2 * len(tiny.PROMPTS)
  for r in records:
    m = r["metrics"]
    assert r["system"] in SYSTEMS
    assert 0 <= m["queue_ms"] <= m["ttft_ms"] <= m["e2el_ms"]
    assert m["pass_per_step"] == sorted(set(m["pass_per_step"]))
    assert len(m["pass_per_step"]) == m["num_spec_steps"]
  stopped = [r for r in records if r["finish_reason"] == "length"]
  assert {len(r["output_ids"]) for r in stopped} <= {20}


def test_reports_are_written_again(folder, monkeypatch):
  run = folder / "run"
  before = (run / "report.md").read_text()
  assert "at most 2 requests at once" in before
  assert "## Loads" in before and "one at a time" not in before
  assert tiny.run("--job=report", f"--output_dir={run}") == 0
  assert (run / "report.md").read_text() == before


def test_changed_figures_are_found(folder, tmp_path, capsys):
  for name in (results.RESULT, results.REQUESTS):
    (tmp_path / name).write_bytes((folder / "run" / name).read_bytes())
  path = tmp_path / results.RESULT
  result = json.loads(path.read_text())
  result["systems"]["ar@c2"]["nodes_per_pass"] += 1
  path.write_text(json.dumps(result))
  assert tiny.run("--job=report", f"--output_dir={tmp_path}") == 2
  assert "'nodes_per_pass' of ar@c2 is not that of" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("args", "slots", "buckets", "names"),
  [
    (["--max_concurrency=1,4,16"], 16, [1, 4, 16], ["c1", "c4", "c16"]),
    (["--max_concurrency=1,4", "--max_num_seqs=2"], 2, [1, 2], ["c1", "c4"]),
    (["--request_rate=2"], 16, [16], ["2rps"]),
    (["--request_rate=2,inf", "--max_concurrency=32"], 32, [32, 32],
     ["2rps-c32", "c32"]),
    (["--flagfile=h200_batch.flags"], 32, [1, 4, 8, 16, 32],
     ["c1", "c4", "c8", "c16", "c32"]),
    (["--flagfile=h100_batch.flags", "--request_rate=1", "--max_concurrency="],
     16, [16], ["1rps"]),
  ],
)  # fmt: skip
def test_loads(args, slots, buckets, names):
  load = test_settings.with_flags(main.read_load, "--target=zoo", *args)
  assert load.slots == slots
  assert [load.slots_of(level) for level in load.levels] == buckets
  # A pass over all slots copies no state: those of a closed loop are full.
  for level in load.levels:
    known = (load.slots_of(level),) if level.name.startswith("c") else None
    assert load.slot_buckets_of(level) == known
  assert [level.name for level in load.levels] == names


def test_no_load():
  assert test_settings.with_flags(main.read_load, "--target=zoo") is None


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--goodput=ttft:5"], "--goodput is of a load: give --max_concurrency"),
    (["--max_num_seqs=4"], "--max_num_seqs is of a load"),
    (["--max_concurrency=two"], "max_concurrency must be numbers, got 'two'"),
    (["--max_concurrency=0"], "max_concurrency must be at least 1, got 0"),
    (["--request_rate=0"], "request_rate must be above 0, or inf, got 0"),
    (["--arrivals=nowhere"], "nowhere: No such file"),
    (["--max_concurrency=2", "--max_num_seqs=0"], "max_num_seqs must be at"),
  ],
)
def test_refused_loads(args, message):
  with pytest.raises(SpecPilotError, match=message):
    test_settings.with_flags(main.read_load, "--target=zoo", *args)


def test_options_for_batches_need_a_load():
  options = ("--drafter=dflash", "--set=shared_budget=on")
  with pytest.raises(SpecPilotError, match="shared_budget is for several"):
    test_settings.read("--target=zoo", *options)
  settings = test_settings.read("--target=zoo", "--max_concurrency=2", *options)
  assert settings.batch


def test_other_jobs_decode_one_at_a_time(capsys):
  assert tiny.run("--target=zoo", "--job=round", "--max_concurrency=2") == 2
  assert "--job=round decodes one request at a time" in capsys.readouterr().err


def test_two_levels_are_for_one_request(capsys):
  args = ("--set=verification=two_level", "--max_concurrency=2")
  assert tiny.run("--target=zoo", "--drafter=dflash", *args) == 2
  error = capsys.readouterr().err
  assert "verification=two_level decodes one request at a time" in error


def test_names():
  assert metrics.at_level("ar", "stock@2rps-c4") == "ar@2rps-c4"
