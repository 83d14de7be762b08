"""Gaps above a bfloat16 tolerance, judged again in float32."""

import copy
import dataclasses
import json
import math
import pathlib
import time
import types
from typing import Any

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from experiments import (
  adjudication,
  benchmark,
  forcing,
  plan,
  report,
  results,
  token_forcing,
)
from specpilot_jax import footprint, loading
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.mechanisms import registry
from specpilot_jax.models import assembly
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from tests.checkpoints import builders
from tests.decoding import kit
from tests.experiments import tiny
from tests.experiments.test_token_forcing import scored, with_gaps

CONTROL = token_forcing.Control("ar", tokens=6000, flips=30, max_gap=0.2)


def judge(gaps, float32, control=CONTROL, dtype="bfloat16", calls=None):
  """A verdict on 1,000 chosen tokens and an output with these gaps."""

  def rescore(index):
    if calls is not None:
      calls.append(index)
    if isinstance(float32, str):
      raise token_forcing.Unavailable(float32)
    return np.asarray(float32, float)

  return token_forcing.judge(
    [scored(np.zeros(1000), "first"), scored(gaps)],
    control,
    dtype=dtype,
    min_control_tokens=5000,
    rescore=rescore,
  )


class JudgeTest(parameterized.TestCase):
  def test_rounding_of_the_scoring_pass_is_excused(self):
    calls = []
    verdict = judge(
      with_gaps(50, _3=0.25, _7=0.418), with_gaps(50, _7=0.229), calls=calls
    )
    assert verdict["verdict"] == "pass"
    assert "(1 of them by float32 scores)" in verdict["reason"]
    # Only the output with such a token.
    assert calls == [1]
    assert verdict["adjudicated"] == 1
    assert verdict["adjudicated_tokens"] == [
      {
        "request": "r", "index": 7, "token": 7, "gap": 0.418,
        "float32_gap": 0.229, "accepted": True,
      }
    ]  # fmt: skip
    # The figures stay those of the scores in bfloat16.
    assert verdict["max_margin"] == 0.418 and verdict["flips"] == 2
    assert verdict["first_failure"] is None
    assert verdict["decile_flip_rates"][1] > 0

  def test_a_gap_in_float32_too_fails(self):
    verdict = judge(
      with_gaps(50, _7=0.31, _9=0.45), with_gaps(50, _7=0.29, _9=0.4)
    )
    assert verdict["verdict"] == "fail"
    assert verdict["reason"].endswith("above the tolerance 0.3, in float32 0.4")
    # The first was excused.
    assert verdict["first_failure"]["index"] == 9
    assert [t["accepted"] for t in verdict["adjudicated_tokens"]] == [
      True, False,
    ]  # fmt: skip

  def test_nothing_above_the_cap_is_excused(self):
    verdict = judge(with_gaps(50, _7=0.51), np.zeros(50))
    assert verdict["verdict"] == "fail"
    assert "above any tolerance (0.5 logit), in float32 0" in verdict["reason"]
    assert not verdict["adjudicated_tokens"][0]["accepted"]

  def test_without_float32_scores_it_fails(self):
    verdict = judge(with_gaps(50, _7=0.4), "float32 cannot judge it: why")
    assert verdict["verdict"] == "fail"
    assert verdict["reason"] == (
      "largest gap 0.4 is above the tolerance 0.3; float32 cannot judge it: why"
    )
    assert verdict["adjudicated"] == 0
    assert verdict["first_failure"]["index"] == 7

  def test_more_than_chance_has_are_not_excused(self):
    # 0.01 in 6,000 tokens of the control: four or more are no accident.
    assert token_forcing.excusable(1050, 6000) == 3
    calls = []
    for count, verdict in ((3, "pass"), (4, "fail")):
      gaps = with_gaps(50, **{f"_{i}": 0.4 for i in range(count)})
      found = judge(gaps, np.zeros(50), calls=calls)
      assert found["verdict"] == verdict
      assert found["max_excusable_tokens"] == 3
    assert calls == [1]
    assert "4 tokens are above 0.3, float32 may excuse 3" in found["reason"]
    assert found["adjudicated_tokens"] == []

  def test_the_flip_rate_counts_excused_tokens(self):
    control = token_forcing.Control("ar", tokens=10**6, flips=1, max_gap=0.2)
    gaps = with_gaps(50, _1=0.01, _2=0.01, _7=0.31)
    assert judge(gaps, np.zeros(50), control)["verdict"] == "fail"
    control = dataclasses.replace(control, tokens=6000)
    verdict = judge(with_gaps(50, _7=0.31), np.zeros(50), control)
    assert verdict["verdict"] == "pass" and verdict["flips"] == 1

  @parameterized.parameters("float32", "float64")
  def test_wide_dtypes_are_never_adjudicated(self, dtype):
    calls = []
    verdict = judge(
      with_gaps(50, _7=0.4), np.zeros(50), dtype=dtype, calls=calls
    )
    assert verdict["verdict"] == "fail" and calls == []
    assert verdict["reason"] == "largest gap 0.4 is above the tolerance 0.3"
    assert verdict["adjudicated"] == 0 and verdict["adjudicated_tokens"] == []

  def test_only_a_calibrated_tolerance_excuses(self):
    calls = []
    few = dataclasses.replace(CONTROL, tokens=4999)
    wild = dataclasses.replace(CONTROL, max_gap=0.6)
    for gap, control, verdict in (
      (0.4, few, "inconclusive"),
      (0.6, few, "fail"),
      (0.7, wild, "inconclusive"),
    ):
      found = judge(with_gaps(50, _7=gap), np.zeros(50), control, calls=calls)
      assert found["verdict"] == verdict
    # Nor does one that nothing exceeds.
    judge(with_gaps(50, _7=0.29), np.zeros(50), calls=calls)
    assert calls == []


def test_excusable_tokens():
  # As many tokens as the control has: 0.5 ** 9 and a little less.
  assert token_forcing.excusable(24_000, 24_000) == 9
  assert token_forcing.excusable(0, 24_000) == 0
  # A single one of few tokens above all of many is rare enough.
  assert token_forcing.excusable(20, 24_000) == 0
  assert token_forcing.excusable(1000, 24_000) == 2
  # By simulation: the exceedances of equal laws, however heavy their tails.
  rng = np.random.default_rng(0)
  gaps = rng.pareto(1.0, (20_000, 90))
  above = (gaps[:, :60] > gaps[:, 60:].max(1)[:, None]).sum(1)
  limit = token_forcing.excusable(60, 30)
  assert (above > limit).mean() < 2 * token_forcing.ALPHA
  assert (above > limit - 4).mean() > token_forcing.ALPHA


def make_target(family="llama"):
  config = builders.config(family, context_length=64)
  params = target_lib.random_params(config, 3)
  return target_lib.build(config, params, "bfloat16")


def scratch_bytes(engine: Engine) -> int:
  """Of the executable that scores a chunk, beside arguments and results."""
  sampling = SamplingParams()
  compiled = engine._compiled(Features.of(sampling))
  request = dataclasses.replace(engine.request(sampling), plan=())
  with engine._one_request():
    carry = engine._start(compiled, np.asarray([1, 2], np.int32), 1)
    engine._carry = carry
  tokens = np.zeros(engine.prefill_chunk, np.int32)
  lowered = compiled.score.lower(
    engine._params, carry, request, tokens, tokens, np.int32(1), np.float32(0)
  )
  return lowered.compile().memory_analysis().temp_size_in_bytes


class ArbiterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())
    self.target = make_target()
    self.record = {
      "prompt_ids": [3, 4, 5],
      "output_ids": list(range(20, 50)),
      "sampling": dataclasses.asdict(
        SamplingParams(temperature=0.8, top_p=0.9, seed=7)
      ),
    }

  def arbiter(self, planned=0):
    return adjudication.Arbiter(
      self.target, max_seq_len=64, prefill_chunk=16, planned=planned
    )

  def test_scores_as_a_float32_engine_of_the_same_weights(self):
    arbiter = self.arbiter()
    gaps = arbiter.gaps(self.record, 0.1)
    rounded = {
      name: np.asarray(value.astype("float32"))
      for name, value in target_lib.parameters(self.target).items()
    }
    engine = Engine(
      target_lib.build(self.target.config, rounded, "float32"),
      max_seq_len=64,
      prefill_chunk=16,
    )
    expected = engine.score(
      self.record["prompt_ids"],
      self.record["output_ids"],
      results.sampling_of(self.record),
      cut_tolerance=0.1,
    ).gaps
    np.testing.assert_array_equal(gaps, expected)
    assert gaps.max() > 0
    # The same output again is a look-up, and nothing is built twice.
    made = arbiter._engine
    assert arbiter.gaps(self.record | {"request": "b"}, 0.1) is gaps
    assert arbiter.made and arbiter._engine is made
    # The target itself is as it was.
    assert str(self.target.dtype) == "bfloat16"

  @parameterized.parameters("bf16", "w12")
  def test_no_matrix_is_held_twice(self, weights):
    """Of a hybrid too; W12 is decoded for each product."""
    own = make_target("qwen3_5")
    shape = dict(max_seq_len=64, prefill_chunk=16, planned=0)
    expected = adjudication.Arbiter(own, **shape).gaps(self.record, 0.1)
    if weights == "w12":
      system = SystemConfig(weights="w12")
      own, _ = registry.prepare(system, own, None)
    arbiter = adjudication.Arbiter(own, **shape)
    np.testing.assert_array_equal(arbiter.gaps(self.record, 0.1), expected)
    engine = arbiter._engine
    assert engine is not None and engine.dtype == "float32"
    held = jax.tree.leaves(engine._params)
    mine = {id(x) for x in jax.tree.leaves(assembly.leaves(own))}
    # Norms, gates and convolutions are its own.
    extra = [x for x in held if id(x) not in mine]
    assert extra and sum(x.size for x in extra) < 0.05 * sum(
      math.prod(leaf.shape) for leaf in assembly.leaves(own).values()
    )

  def test_matrices_are_widened_one_by_one(self):
    """Not all of them before the first product."""
    config = dataclasses.replace(
      self.target.config, layer_types=("attention",) * 8
    )
    names = target_lib.structs(config, "bfloat16")
    own = target_lib.build(
      config,
      {name: np.zeros(leaf.shape, "float32") for name, leaf in names.items()},
      "bfloat16",
    )
    arbiter = adjudication.Arbiter(
      own, max_seq_len=64, prefill_chunk=16, planned=0
    )
    engine = arbiter._make()
    wide = target_lib.build(
      config,
      {name: np.zeros(leaf.shape, "float32") for name, leaf in names.items()},
      "float32",
    )
    plain = Engine(wide, max_seq_len=64, prefill_chunk=16)
    temporary = [scratch_bytes(e) for e in (engine, plain)]
    sizes = [
      4 * math.prod(x.shape) for x in names.values() if len(x.shape) == 2
    ]
    assert temporary[0] - temporary[1] < 2 * max(sizes) < sum(sizes) / 4

  def test_memory_is_counted_beside_what_is_held(self):
    needed = sum(self.arbiter().needed.values())
    head = 4 * self.target.config.vocab_size * self.target.config.hidden_size
    own = self.arbiter().needed["target"]
    weights = footprint.target_bytes(self.target.config, "float32")
    assert 2 * head < own < weights
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(footprint, "device_bytes", lambda: 10**9 + needed)
      self.arbiter(10**9)._make()
      arbiter = self.arbiter(10**9 + 1)
      with pytest.raises(token_forcing.Unavailable, match="cannot judge it"):
        arbiter.gaps(self.record, 0.1)
      assert not arbiter.made
      # What is really held counts where it is more than the plan.
      patch.setattr(plan, "held_bytes", lambda: 10**9 + 1)
      with pytest.raises(token_forcing.Unavailable, match="beside the 1 that"):
        self.arbiter().gaps(self.record, 0.1)

  def test_a_device_that_refuses_is_asked_once(self):
    arbiter, calls = self.arbiter(), []

    def full():
      calls.append(1)
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x\ny")

    arbiter._make = full
    for _ in range(2):
      with pytest.raises(
        token_forcing.Unavailable,
        match="^float32 cannot judge it: RESOURCE_EXHAUSTED: x$",
      ):
        arbiter.gaps(self.record, 0.1)
    assert len(calls) == 1


@dataclasses.dataclass(frozen=True)
class Plant:
  """A last token of an output of stock that is not its choice."""

  request: str
  token: int
  gap: float
  float32_gap: float

  def into(self, records) -> int:
    """Changes that token; returns its index. No token follows it."""
    (record,) = (
      r
      for r in records
      if r["system"] == "stock" and r["request"] == self.request
    )
    record["output_ids"][-1] = self.token
    return len(record["output_ids"]) - 1


def near_ties(target, records) -> list[Plant]:
  """Last tokens of which stock has a gap below the cap."""
  engine = Engine(target, max_seq_len=64, prefill_chunk=16)
  arbiter = adjudication.Arbiter(
    target, max_seq_len=64, prefill_chunk=16, planned=0
  )

  @jax.jit
  def last_logits(tokens, count):
    state = state_lib.init_state(target.config, 128, target.dtype)
    nodes = state_lib.run_of(tokens, count, prefill=True)
    return target.logits(target(nodes, state).hidden)[count - 1]

  found = []
  for record in records:
    if record["finish_reason"] != "length":
      continue
    ids = [*record["prompt_ids"], *record["output_ids"][:-1]]
    tokens = np.zeros(64, np.int32)
    tokens[: len(ids)] = ids
    row = np.asarray(last_logits(tokens, np.int32(len(ids))), float)
    for token in np.flatnonzero(row > row.max() - token_forcing.CAP):
      other = copy.deepcopy(record)
      other["output_ids"][-1] = int(token)
      gap = engine.score(
        other["prompt_ids"], other["output_ids"], results.sampling_of(other)
      ).gaps[-1]
      if token > 2 and 0 < gap < token_forcing.CAP:
        float32 = float(arbiter.gaps(other, 0.0)[-1])
        found.append(Plant(record["request"], int(token), float(gap), float32))
  return found


@dataclasses.dataclass
class Run:
  """A benchmark in bfloat16 with a token planted before stock scores it."""

  folder: pathlib.Path
  status: int
  plant: Plant
  tolerance: float

  @property
  def records(self):
    return results.read_requests(self.folder)


def tolerate(patch, tolerance: float) -> None:
  """The tolerance, the control having none of its own."""
  patch.setitem(token_forcing.FLOORS, "bfloat16", tolerance)


@pytest.fixture(scope="module", name="run")
def _run(built, tmp_path_factory):
  folder = tmp_path_factory.mktemp("bfloat16")
  rng = np.random.default_rng(1)
  words = [" ".join(rng.choice(["the", "cat", "mat", "on"], 6)) for _ in "123"]
  prompts = [{"id": f"p{i}", "prompt": w} for i, w in enumerate(words)]
  prompts += [{"id": c * 3, "prompt": c * 3} for c in "abcdefghij"]
  (folder / "prompts.jsonl").write_text(
    "".join(json.dumps(p) + "\n" for p in prompts)
  )
  target = loading.load_target(built / "model", "bfloat16").target
  told: dict[str, Any] = {}
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("SPECPILOT_DATA", str(folder / "data"))

    def force(engine, store, arbiter, records, *args, **named):
      ties = near_ties(target, records["stock"])
      plant = max(ties, key=lambda p: p.gap - p.float32_gap)
      plant.into(records["stock"])
      tolerance = (plant.gap + plant.float32_gap) / 2
      tolerate(patch, tolerance)
      told.update(plant=plant, tolerance=tolerance)
      return real(engine, store, arbiter, records, *args, **named)

    real = benchmark.force
    patch.setattr(benchmark, "force", force)
    status = tiny.run(
      f"--target={built / 'model'}",
      f"--prompts={folder / 'prompts.jsonl'}",
      "--dtype=bfloat16",
      "--max_tokens=16",
      "--prefill_chunk=16",
      "--systems=ar,stock",
      "--num_warmups=1",
      "--min_control_tokens=50",
      f"--output_dir={folder / 'run'}",
    )
  return Run(folder / "run", status, **told)


def events(folder) -> list[dict[str, Any]]:
  lines = (folder / results.EVENTS).read_text().splitlines()
  return [e for e in map(json.loads, lines) if e["event"] == "adjudicated"]


def check_accepted(run, folder, index) -> None:
  """The plant is accepted, and every file of the run says so."""
  verdict = results.read_result(folder)["token_forcing"]["stock"]
  assert verdict["verdict"] == "pass", verdict["reason"]
  assert verdict["tolerance"] == run.tolerance
  token = {
    "request": run.plant.request,
    "index": index,
    "token": run.plant.token,
    "gap": run.plant.gap,
    "float32_gap": run.plant.float32_gap,
    "accepted": True,
  }
  assert verdict["adjudicated"] == 1
  assert verdict["adjudicated_tokens"] == [token]
  assert verdict["max_margin"] == run.plant.gap > verdict["tolerance"]
  (event,) = events(folder)
  del event["time"]
  assert event == {"event": "adjudicated", "system": "stock"} | token
  line = (
    "adjudicated in float32: stock 1 above the tolerance, 1 accepted (request"
    f" {run.plant.request}, output token {index}: gap {run.plant.gap:.3f}, in"
    f" float32 {run.plant.float32_gap:.3f}, accepted)"
  )
  for name in (report.MARKDOWN, report.HTML):
    assert line in (folder / name).read_text()


def test_a_benchmark_excuses_its_own_rounding(run):
  assert run.status == 0
  check_accepted(run, run.folder, 15)
  memory = results.read_result(run.folder)["device_memory"]
  planned = memory["planned_bytes"]
  assert planned["adjudication"] > planned["target"]


def test_a_run_without_adjudication_does_not_speak_of_it(finished):
  verdict = results.read_result(finished)["token_forcing"]["stock"]
  assert verdict["adjudicated"] == 0 and verdict["adjudicated_tokens"] == []
  assert events(finished) == []
  memory = results.read_result(finished)["device_memory"]
  assert "adjudication" not in memory["planned_bytes"]
  assert "adjudicated in" not in (finished / report.MARKDOWN).read_text()
  # Nor do runs of before.
  del verdict["adjudicated_tokens"]
  assert forcing.describe_adjudication("stock", verdict) is None


def test_a_line_names_a_few_tokens():
  token = dataclasses.asdict(
    token_forcing.Adjudicated("r", 3, 9, 0.4, 0.2, True)
  )
  line = forcing.describe_adjudication(
    "stock", {"adjudicated_tokens": [token] * 6}
  )
  assert line is not None
  assert line.count("gap 0.400") == 4 and "2 more in result.json" in line


def judge_file(path, records, built, folder, *more) -> int:
  """Writes requests and judges them."""
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return tiny.run(
    "--job=token_force",
    f"--target={built / 'model'}",
    f"--requests={path}",
    "--prefill_chunk=16",
    "--min_control_tokens=50",
    f"--output_dir={folder / 'run'}",
    *more,
  )


def force(run, built, folder, plant, *more) -> int:
  """Judges the recorded requests, a token changed."""
  records = run.records
  plant.into(records)
  return judge_file(folder / "planted.jsonl", records, built, folder, *more)


@pytest.fixture(name="data")
def _data(run, monkeypatch):
  monkeypatch.setenv("SPECPILOT_DATA", str(run.folder.parent / "data"))


def test_recorded_requests_are_adjudicated(
  run, built, data, tmp_path, monkeypatch, capsys
):
  tolerate(monkeypatch, run.tolerance)
  assert force(run, built, tmp_path, run.plant) == 0
  check_accepted(run, tmp_path / "run", 15)
  assert "adjudicated in float32: stock 1 above" in capsys.readouterr().out


def test_a_token_that_is_wrong_in_float32_fails(
  run, built, data, tmp_path, monkeypatch
):
  tolerate(monkeypatch, 0.9 * min(run.plant.gap, run.plant.float32_gap))
  assert force(run, built, tmp_path, run.plant) == 1
  verdict = results.read_result(tmp_path / "run")["token_forcing"]["stock"]
  assert verdict["verdict"] == "fail"
  assert verdict["reason"].endswith(f"float32 {run.plant.float32_gap:.3g}")
  (token,) = verdict["adjudicated_tokens"]
  assert (token["gap"], token["accepted"]) == (run.plant.gap, False)
  assert verdict["first_failure"]["index"] == 15
  (event,) = events(tmp_path / "run")
  assert not event["accepted"]
  text = (tmp_path / "run" / report.MARKDOWN).read_text()
  assert "0 accepted" in text and ", not accepted)" in text


def test_a_wrong_token_fails_as_ever(run, built, data, tmp_path):
  records = run.records
  at = 7
  doctored = next(r for r in records if r["system"] == "stock")
  ids = doctored["output_ids"]
  ids[at] = (ids[at] + 7) % 280 + 3
  path = tmp_path / "wrong.jsonl"
  assert judge_file(path, records, built, tmp_path) == 1
  verdict = results.read_result(tmp_path / "run")["token_forcing"]["stock"]
  first = verdict["first_failure"]
  assert (first["request"], first["index"]) == (doctored["request"], at)
  assert not any(t["accepted"] for t in verdict["adjudicated_tokens"])


def test_no_memory_for_a_copy(run, built, data, tmp_path, monkeypatch):
  tolerate(monkeypatch, run.tolerance)
  config = loading.open_target(built / "model").config
  offered = footprint.target_bytes(config, "bfloat16") + 1000
  monkeypatch.setattr(footprint, "device_bytes", lambda: offered)
  assert force(run, built, tmp_path, run.plant) == 1
  verdict = results.read_result(tmp_path / "run")["token_forcing"]["stock"]
  assert verdict["verdict"] == "fail" and verdict["adjudicated"] == 0
  assert "; float32 cannot judge it: it needs " in verdict["reason"]
  assert "the device offers" in verdict["reason"]
  assert verdict["first_failure"]["index"] == 15


def test_the_time_limit_comes_first(
  run, built, data, tmp_path, monkeypatch, capsys
):
  tolerate(monkeypatch, run.tolerance)
  judge_tokens = token_forcing.judge
  ended = types.SimpleNamespace(monotonic=lambda: float("inf"))

  def late(*args, **named):
    # All outputs are scored, only float32 is left.
    monkeypatch.setattr(forcing, "time", ended)
    try:
      return judge_tokens(*args, **named)
    finally:
      monkeypatch.setattr(forcing, "time", time)

  monkeypatch.setattr(token_forcing, "judge", late)
  assert force(run, built, tmp_path, run.plant, "--max_wall_s=600") == 1
  out = capsys.readouterr().out
  assert "the time limit came before float32 could judge it" in out


def test_a_float32_target_is_its_own_judge(
  run, built, data, tmp_path, monkeypatch
):
  def never(*args):
    raise AssertionError(args)

  monkeypatch.setattr(adjudication.Arbiter, "gaps", never)
  assert force(run, built, tmp_path, run.plant, "--dtype=float32") == 1
  verdict = results.read_result(tmp_path / "run")["token_forcing"]["stock"]
  assert verdict["verdict"] == "fail" and verdict["adjudicated"] == 0
  assert "float32" not in verdict["reason"]
