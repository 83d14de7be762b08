"""Recorded requests that were changed: verdicts, refusals, reports."""

import copy
import json
import math
import shutil

import pytest

from experiments import endings, forcing, results, token_forcing
from specpilot_jax import loading
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from tests.checkpoints import builders
from tests.experiments import tiny

CONFIG = builders.config(context_length=128, eos_token_ids=(2,))
PASSES = [3, 4, 5] * 13 + [6]


def end(ids, prompt_tokens=4, tokenizer=None, **sampling):
  found = endings.ending(
    prompt_tokens, ids, SamplingParams(**sampling), CONFIG, tokenizer
  )
  if found is None:
    return None
  return found.tokens, found.finish_reason, found.stop_reason


def test_endings():
  assert end(PASSES) is None
  assert end([3, 2, 4, 2]) == (2, "stop", 2)
  assert end([3, 2, 4], ignore_eos=True) is None
  assert end([3, 9, 4], stop_token_ids=(9,)) == (2, "stop", 9)
  assert end(PASSES, max_tokens=7) == (7, "length", None)
  assert end(PASSES, prompt_tokens=100) == (28, "length", None)
  # A stop id at the limit is a stop.
  assert end([3, 2], max_tokens=2) == (2, "stop", 2)
  assert end([7] * 80) == (64, "loop", None)
  assert end([7] * 80, loop_detection=False) is None
  assert end([7] * 80, ignore_eos=True) is None
  assert end([7] * 80, max_tokens=64) == (64, "length", None)


def test_stop_strings_are_found_in_the_text():
  tokenizer = builders.tokenizer()
  ids = tokenizer.encode("the cat on the mat", add_special_tokens=False)
  ended = end(ids, tokenizer=tokenizer, stop=("on", "zz"))
  assert ended is not None
  count, reason, found = ended
  assert (reason, found) == ("stop", "on")
  assert "on" in tokenizer.decode(ids[:count])
  assert "on" not in tokenizer.decode(ids[: count - 1])
  assert end(ids, tokenizer=tokenizer, stop=("dog",)) is None


@pytest.fixture(scope="module", name="judge")
def _judge(built):
  """Judges lists of records; nothing is kept."""
  model = loading.load_target(built / "model", "float32")
  engine = Engine(
    model.target,
    tokenizer=model.tokenizer,
    max_seq_len=128,
    prefill_chunk=16,
  )

  def judge(records):
    by_system = {}
    for record in records:
      by_system.setdefault(record["system"], []).append(record)
    return forcing.Forcing(
      engine=engine,
      store=token_forcing.Calibration(built / "nowhere", {}),
      dtype="float32",
      min_tokens=50,
      keep=False,
      deadline=math.inf,
      progress=lambda line: None,
    ).judge_all(by_system)

  return judge


@pytest.fixture(name="records")
def _records(finished):
  return results.read_requests(finished)


def pick(records, system="stock"):
  """The longest output of a system."""
  members = [r for r in records if r["system"] == system]
  return max(members, key=lambda r: len(r["output_ids"]))


def cut(record, tokens, reason="stop", stop=None, accounts=True):
  """Shortens an output; its accounts are made to fit."""
  record["output_ids"] = record["output_ids"][:tokens]
  record["finish_reason"], record["stop_reason"] = reason, stop
  if not accounts:
    return
  m = record["metrics"]
  m["emitted_per_step"] = [1] * tokens
  for field in ("drafted", "depth", "accepted"):
    m[f"{field}_per_step"] = [0] * tokens
  m["cut_steps"] = m["num_draft_tokens"] = m["num_accepted_draft_tokens"] = 0
  m["num_spec_steps"], m["acceptance_length"] = tokens, 1.0
  m["itl_ms"] = [1.0] * (tokens - 1)
  m["e2el_ms"] = m["ttft_ms"] + tokens - 1
  m["tpot_ms"] = 1.0 if tokens > 1 else None


def test_sound_records_pass(judge, records):
  verdicts = judge(records)
  assert list(verdicts) == ["stock", "candidate"]
  for verdict in verdicts.values():
    assert verdict["verdict"] == "pass" and "faults" not in verdict


def wrong_stop(record):
  cut(record, 1, stop=2)


def wrong_stop_on_its_last_token(record):
  cut(record, 1, stop=record["output_ids"][0])


def short_length(record):
  cut(record, 9, "length")


def wrong_loop(record):
  cut(record, 9, "loop")


def unknown_reason(record):
  record["finish_reason"] = "abort"


def wrong_accounts(record):
  cut(record, 9, "length", accounts=False)


def replaced_accounts(record):
  record["metrics"]["emitted_per_step"] = [1, 2]


def lowered_limit(record):
  # The system beside it had the other limit.
  cut(record, 9, "length")
  record["sampling"]["max_tokens"] = 9


def own_stop_id(record):
  cut(record, 9, "stop", record["output_ids"][8])
  record["sampling"]["stop_token_ids"] = [record["output_ids"][8]]


def other_prompt(record):
  record["prompt_ids"][0] += 1


def decoded_on(record):
  record["sampling"]["max_tokens"] = len(record["output_ids"]) - 1


CHANGES = (
  wrong_stop,
  wrong_stop_on_its_last_token,
  short_length,
  wrong_loop,
  unknown_reason,
  wrong_accounts,
  replaced_accounts,
  lowered_limit,
  own_stop_id,
  other_prompt,
  decoded_on,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_request_fails(judge, records, change):
  record = pick(records)
  change(record)
  verdict = judge(records)["stock"]
  assert verdict["verdict"] == "fail"
  assert f"stock {record['request']}: " in verdict["reason"]
  assert verdict["first_failure"]["request"] == record["request"]
  line = forcing.describe_verdict("stock", verdict)
  assert f"request {record['request']}" in line and "\n" not in line


@pytest.mark.parametrize("change", [wrong_stop, short_length])
def test_a_control_that_is_not_whole(judge, records, change):
  record = pick(records, "ar")
  change(record)
  verdicts = judge(records)
  # Nothing else would tell: AR is not judged otherwise.
  assert verdicts["ar"]["verdict"] == "fail"
  assert f"ar {record['request']}: " in verdicts["ar"]["reason"]
  assert verdicts["stock"]["verdict"] == "inconclusive"
  assert "its control is not whole" in verdicts["stock"]["reason"]
  assert verdicts["candidate"]["verdict"] == "pass"


def test_missing_and_extra_requests(judge, records):
  gone = pick(records)
  fewer = [r for r in records if r is not gone]
  verdicts = judge(fewer)
  assert verdicts["stock"]["verdict"] == "fail"
  reason = f"stock {gone['request']}: is missing, ar has it"
  assert reason in verdicts["stock"]["reason"]
  # The candidate is compared with stock.
  assert verdicts["candidate"]["verdict"] == "fail"
  more = [*records, copy.deepcopy(gone) | {"request": "new"}]
  verdict = judge(more)["stock"]
  assert verdict["verdict"] == "fail"
  assert "stock new: is not among the requests of ar" in verdict["reason"]
  # Without the control's records it is AR that counts.
  verdicts = judge([r for r in fewer if r["system"] != "stock"])
  assert list(verdicts) == ["candidate"]
  assert "faults" not in verdicts["candidate"]
  alone = [r for r in records if r["system"] == "candidate"]
  assert "faults" not in judge(alone)["candidate"]


def write(path, records):
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return path


def test_all_outputs_cut_to_one_token(place, records, tmp_path, capsys):
  for record in records:
    cut(record, 1, stop=2)
  path = write(tmp_path / "cut.jsonl", records)
  status = tiny.run(
    "--job=token_force",
    f"--target={place / 'model'}",
    f"--requests={path}",
    "--prefill_chunk=16",
    "--min_control_tokens=1",
    f"--output_dir={tmp_path / 'run'}",
  )
  assert status == 1
  verdicts = results.read_result(tmp_path / "run")["token_forcing"]
  assert {name: v["verdict"] for name, v in verdicts.items()} == {
    name: "fail" for name in ("ar", "stock", "candidate")
  }
  assert len(verdicts["stock"]["faults"]) >= len(tiny.PROMPTS) - 1
  assert "token forcing: ar fail" in capsys.readouterr().out


MALFORMED = (
  (lambda r: r.update(metrics={}), "'metrics' lacks 'ttft_ms'"),
  (lambda r: r["metrics"].update(ttft_ms=None), "'ttft_ms' must be a number"),
  (lambda r: r["metrics"].update(e2el_ms="x"), "'e2el_ms' must be a number"),
  (lambda r: r["metrics"].update(e2el_ms=math.inf), "'e2el_ms'"),
  (lambda r: r["metrics"].update(cut_steps=-1), "'cut_steps'"),
  (lambda r: r["metrics"].update(itl_ms=[None]), "'itl_ms' must be a list"),
  (
    lambda r: r["metrics"].update(emitted_per_step=[2**70]),
    "'emitted_per_step' must be a list of whole numbers",
  ),
  (lambda r: r["prompt_ids"].insert(0, -1), "'prompt_ids' must be a list"),
  (lambda r: r.update(sampling={}), "'sampling' lacks 'temperature'"),
  (lambda r: r["sampling"].pop("stop"), "'sampling' lacks 'stop'"),
  (lambda r: r["sampling"].update(beams=2), "unknown setting 'beams'"),
  (
    lambda r: r["sampling"].update(temperature="x"),
    "'sampling': temperature must be",
  ),
  (lambda r: r["sampling"].update(seed=-5), "'sampling': seed must be"),
  (lambda r: r["sampling"].update(stop=5), "'sampling': stop must be"),
)


@pytest.fixture(name="changed_run")
def _changed_run(finished, tmp_path):
  """A copy of the finished run, and its reports before."""
  folder = tmp_path / "copy"
  shutil.copytree(finished, folder)
  return folder


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_malformed_records(
  place, changed_run, records, change, message, capsys
):
  change(records[1])
  path = write(changed_run / results.REQUESTS, records)
  before = (changed_run / "report.html").read_bytes()
  for job in (
    ["--job=token_force", f"--target={place / 'model'}", f"--requests={path}"],
    ["--job=report", f"--output_dir={changed_run}"],
  ):
    assert tiny.run(*job) == 2
    out, err = capsys.readouterr()
    assert f"{path}:2: " in err
    assert message in err and err.count("\n") == 1 and out == ""
  assert (changed_run / "report.html").read_bytes() == before


def emptied(records):
  records.clear()


def one_gone(records):
  records.remove(pick(records))


def another_system(records):
  pick(records)["system"] = "weird"


def another_domain(records):
  pick(records)["domain"] = "weird"


def another_token(records):
  pick(records)["output_ids"][5] += 1


def another_setting(records):
  pick(records)["sampling"]["repetition_penalty"] = 1.5


def faster(records):
  m = pick(records)["metrics"]
  for field in ("ttft_ms", "e2el_ms", "tpot_ms"):
    m[field] /= 2


@pytest.mark.parametrize(
  "change",
  [
    emptied,
    one_gone,
    another_system,
    another_domain,
    another_token,
    another_setting,
    faster,
  ],
)
def test_reports_need_the_measured_requests(
  changed_run, records, change, capsys
):
  change(records)
  path = write(changed_run / results.REQUESTS, records)
  before = (changed_run / "report.html").read_bytes()
  assert tiny.run("--job=report", f"--output_dir={changed_run}") == 2
  out, err = capsys.readouterr()
  assert err.startswith(f"error: {path}: ") and "result.json" in err
  assert err.count("\n") == 1 and out == ""
  assert (changed_run / "report.html").read_bytes() == before


def test_a_report_names_the_line_that_contradicts_itself(
  changed_run, records, capsys
):
  cut(records[4], 9, accounts=False)
  path = write(changed_run / results.REQUESTS, records)
  assert tiny.run("--job=report", f"--output_dir={changed_run}") == 2
  err = capsys.readouterr().err
  assert f"{path}:5: " in err and "recorded" in err


@pytest.mark.parametrize("field", ["acceptance", "mean_tpot_ms", "options"])
def test_a_damaged_result(changed_run, field, capsys):
  result = results.read_result(changed_run)
  del result["systems"]["stock"][field]
  (changed_run / results.RESULT).write_text(json.dumps(result))
  assert tiny.run("--job=report", f"--output_dir={changed_run}") == 2
  err = capsys.readouterr().err
  assert f"result.json: damaged, '{field}' is missing" in err
