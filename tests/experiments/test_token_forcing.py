"""Verdicts on made-up gaps, and the calibration file."""

import json
import pathlib
import tempfile

import numpy as np
from absl.testing import parameterized

from experiments import token_forcing
from specpilot_jax.errors import SpecPilotError

CLEAN = token_forcing.Control("ar", tokens=6000, flips=0, max_gap=0.0)
ROUGH = token_forcing.Control("ar", tokens=6000, flips=3, max_gap=0.1)


def scored(gaps, name="r"):
  gaps = np.asarray(gaps, float)
  return token_forcing.Scored(name, tuple(range(gaps.size)), gaps)


def judge(gaps, control, dtype="float32"):
  return token_forcing.judge(
    [scored(np.zeros(100), "first"), scored(gaps)],
    control,
    dtype=dtype,
    min_control_tokens=5000,
  )


def with_gaps(size, **at):
  gaps = np.zeros(size)
  for index, gap in at.items():
    gaps[int(index[1:])] = gap
  return gaps


class VerdictTest(parameterized.TestCase):
  def test_all_chosen(self):
    verdict = judge(np.zeros(50), CLEAN)
    assert verdict["verdict"] == "pass"
    assert verdict["tokens"] == 150 and verdict["flips"] == 0
    assert verdict["max_margin"] == 0 and verdict["first_failure"] is None

  def test_a_control_without_flips_leaves_room_for_rounding(self):
    assert judge(with_gaps(50, _7=2e-6), CLEAN)["verdict"] == "pass"
    assert judge(with_gaps(50, _7=2e-4), CLEAN)["verdict"] == "fail"
    # In float64 the same gap is no rounding.
    assert judge(with_gaps(50, _7=2e-6), CLEAN, "float64")["verdict"] == "fail"

  def test_gap_within_and_above_the_tolerance(self):
    assert judge(with_gaps(50, _7=0.14), ROUGH)["verdict"] == "pass"
    verdict = judge(with_gaps(50, _3=0.05, _7=0.16, _9=0.3), ROUGH)
    assert verdict["verdict"] == "fail"
    assert abs(verdict["tolerance"] - 0.15) < 1e-12
    assert verdict["max_margin"] == 0.3 and verdict["flips"] == 3
    assert verdict["first_failure"] == {
      "request": "r", "index": 7, "token": 7, "gap": 0.16,
    }  # fmt: skip

  def test_the_tolerance_is_capped(self):
    control = token_forcing.Control("ar", tokens=6000, flips=9, max_gap=0.45)
    assert control.tolerance("bfloat16") == 0.5
    assert judge(with_gaps(50, _7=0.49), control)["verdict"] == "pass"
    verdict = judge(with_gaps(50, _2=0.51, _7=0.9), control)
    assert verdict["verdict"] == "fail"
    assert verdict["first_failure"]["index"] == 2

  def test_too_many_small_flips(self):
    # 20 in 150 tokens against 3 in 6000, each within the tolerance.
    gaps = with_gaps(50, **{f"_{i}": 0.01 for i in range(5, 25)})
    verdict = judge(gaps, ROUGH)
    assert verdict["verdict"] == "fail"
    assert verdict["flip_p_value"] < 1e-9
    assert verdict["first_failure"]["index"] == 5
    # One flip proves nothing.
    assert judge(with_gaps(50, _5=0.01), ROUGH)["verdict"] == "pass"

  def test_inconclusive(self):
    few = token_forcing.Control("ar", tokens=4999, flips=0, max_gap=0.0)
    assert judge(np.zeros(9), few)["verdict"] == "inconclusive"
    # But no control could excuse this.
    assert judge(with_gaps(9, _4=0.7), few)["verdict"] == "fail"
    wild = token_forcing.Control("ar", tokens=6000, flips=1, max_gap=0.6)
    verdict = judge(with_gaps(9, _4=3.0), wild)
    assert verdict["verdict"] == "inconclusive"
    assert "control itself" in verdict["reason"]
    nothing = token_forcing.judge(
      [], CLEAN, dtype="float32", min_control_tokens=5000
    )
    assert nothing["verdict"] == "inconclusive"
    assert "no tokens" in nothing["reason"]

  def test_deciles(self):
    gaps = with_gaps(20, _0=1, _1=1, _19=1)
    rates = token_forcing.decile_rates([scored(gaps), scored(np.zeros(20))])
    assert rates == [0.5, *[0.0] * 8, 0.25]
    # Outputs shorter than ten tokens leave some tenths empty.
    short = token_forcing.decile_rates([scored([1.0, 0.0])])
    assert short[0] == 1 and short[5] == 0 and short[1] is None


class CalibrationTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # create_tempdir() needs parsed flags, which pytest does not have.
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)

  def open(self, **fingerprint):
    return token_forcing.Calibration(
      self.folder, {"dtype": "float32"} | fingerprint
    )

  def test_accumulates_each_output_once(self):
    first = self.open()
    assert first.control("ar", {}).tokens == 0
    first.save("ar", {"a": (100, 1, 0.01), "b": (50, 0, 0.0)})
    second = self.open()
    # `b` again, and a new one.
    control = second.control("ar", {"b": (50, 0, 0.0), "c": (30, 2, 0.2)})
    assert control == token_forcing.Control("ar", 180, 3, 0.2)
    assert self.open().control("ar", {}).tokens == 150
    assert second.control("stock", {}).tokens == 0

  def test_two_runs_at_once_keep_both(self):
    first, second = self.open(), self.open()
    first.save("ar", {"a": (1, 0, 0.0)})
    second.save("ar", {"b": (2, 0, 0.0)})
    assert self.open().control("ar", {}).tokens == 3

  def test_a_fault_is_not_kept(self):
    store = self.open()
    store.save("ar", {"a": (10, 1, 0.7), "b": (10, 0, 0.0)})
    assert store.control("ar", {}).tokens == 10
    assert store.control("ar", {"a": (10, 1, 0.7)}).max_gap == 0.7

  def test_deployments_are_apart(self):
    self.open().save("ar", {"a": (10, 0, 0.0)})
    assert self.open(dtype="bfloat16").control("ar", {}).tokens == 0

  @parameterized.parameters(
    "", "{}", "[]", "null", "garbage", '{"fingerprint": {}, "controls": {}}',
    "bad entry", "negative", "infinite",
  )  # fmt: skip
  def test_damage(self, content):
    store = self.open()
    store.save("ar", {"a": (10, 1, 0.1)})
    wrong = {"bad entry": [1, 2], "negative": [10, -1, 0.1]}
    if content == "infinite":
      wrong["infinite"] = [10, 1, float("inf")]
    if content in wrong:
      whole = json.loads(store.path.read_text())
      whole["controls"]["ar"]["a"] = wrong[content]
      content = json.dumps(whole)
    store.path.write_text(content)
    with self.assertRaisesRegex(SpecPilotError, store.path.name):
      self.open()

  def test_the_key_names_prompt_sampling_and_output(self):
    record = {"prompt_ids": [1], "output_ids": [2], "sampling": {"seed": 0}}
    key = token_forcing.output_key(record)
    assert key == token_forcing.output_key(dict(reversed(record.items())))
    for change in (
      {"prompt_ids": [2]}, {"output_ids": [2, 3]}, {"sampling": {"seed": 1}},
    ):  # fmt: skip
      assert token_forcing.output_key(record | change) != key
