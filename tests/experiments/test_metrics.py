"""Figures computed by hand, and accounting that does not add up."""

import copy
import math

from absl.testing import parameterized

from experiments import metrics


def record(name, emitted, drafted, accepted, *, cut=0, **fields):
  tokens = sum(emitted)
  return {
    "request": name,
    "system": "stock",
    "domain": "code",
    "prompt_ids": [1, 2],
    "output_ids": list(range(tokens)),
    "finish_reason": "stop",
    "metrics": {
      "ttft_ms": 100.0,
      "e2el_ms": 100.0 + 10.0 * (tokens - 1),
      "tpot_ms": 10.0 if tokens > 1 else None,
      "itl_ms": [10.0] * (len(emitted) - 1),
      "acceptance_length": tokens / max(len(emitted), 1),
      "num_spec_steps": len(emitted),
      "num_draft_tokens": sum(drafted),
      "num_accepted_draft_tokens": sum(accepted),
      "emitted_per_step": emitted,
      "drafted_per_step": drafted,
      "accepted_per_step": accepted,
      "cut_steps": cut,
    },
  } | fields


# 9 tokens in 4 passes; the last pass accepted 3 and was cut to 2 tokens.
A = record("a", [3, 1, 3, 2], [3, 0, 2, 3], [2, 0, 2, 3], cut=1)
# 3 tokens in 2 passes, and it looped.
B = record("b", [1, 2], [2, 1], [0, 1], finish_reason="loop", domain="math")


class AcceptanceTest(parameterized.TestCase):
  def test_by_hand(self):
    a = metrics.acceptance([A, B])
    assert a["verify_passes"] == 6 and a["cut_passes"] == 1
    assert a["drafted_tokens"] == 11 and a["accepted_tokens"] == 8
    assert a["histogram"] == [2, 1, 2, 1]
    assert a["histogram_by_draft_length"] == {
      "0": [1], "1": [0, 1], "2": [1, 0, 1], "3": [0, 0, 1, 1],
    }  # fmt: skip
    assert a["unconditional_rates"] == [4 / 6, 3 / 6, 1 / 6]
    # Position 1: five passes drafted it. Position 2: three accepted the first
    # and drafted a second. Position 3: two accepted two and drafted a third.
    assert a["conditional_rates"] == [4 / 5, 3 / 3, 1 / 2]
    # Without the cut pass: 10 tokens in 5 passes.
    assert a["acceptance_length_uncut"] == 2
    assert a["spec_decode_num_drafts"] == 5
    assert a["spec_decode_acceptance_length"] == 1 + 8 / 5
    assert math.isclose(a["spec_decode_acceptance_rate"], 100 * 8 / 11)
    assert a["spec_decode_per_position_acceptance_rates"] == [
      4 / 5,
      3 / 5,
      1 / 5,
    ]

  def test_trees(self):
    """Positions are those of paths; drafts are all nodes."""
    tree = record("t", [3, 1, 2], [7, 5, 1], [2, 0, 1])
    tree["metrics"]["depth_per_step"] = [3, 2, 1]
    a = metrics.acceptance([tree])
    assert a["drafted_tokens"] == a["spec_decode_draft_tokens"] == 13
    assert a["histogram"] == [1, 1, 1, 0]
    assert a["histogram_by_draft_length"] == {
      "1": [0, 1], "2": [1, 0, 0], "3": [0, 0, 1, 0],
    }  # fmt: skip
    assert a["unconditional_rates"] == [2 / 3, 1 / 3, 0]
    assert a["conditional_rates"] == [2 / 3, 1, 0]
    assert math.isclose(a["spec_decode_acceptance_rate"], 100 * 3 / 13)
    for depths in ([3, 2, 2], [1, 2, 1], [3, 2]):
      tree["metrics"]["depth_per_step"] = depths
      with self.assertRaises(metrics.MeasurementError):
        metrics.acceptance([tree])

  def test_without_drafts(self):
    a = metrics.acceptance([record("c", [1, 1], [0, 0], [0, 0])])
    assert a["histogram"] == [2] and a["unconditional_rates"] == []
    assert a["spec_decode_acceptance_rate"] is None

  @parameterized.parameters(
    # A pass emitted less than it accepted, and more followed.
    dict(emitted_per_step=[2, 1, 3, 3], cut_steps=2),
    # More than accepted plus one.
    dict(emitted_per_step=[3, 2, 2, 2]),
    # Accepted more than drafted.
    dict(drafted_per_step=[1, 0, 2, 3]),
    # Passes missing in one field.
    dict(accepted_per_step=[2, 0, 2]),
    dict(cut_steps=0),
    # Tokens that no pass emitted.
    dict(emitted_per_step=[3, 1, 3, 1]),
    dict(emitted_per_step=[], drafted_per_step=[], accepted_per_step=[]),
    # Figures that do not follow from what stands beside them.
    dict(acceptance_length=3.0),
    dict(num_spec_steps=5),
    dict(num_draft_tokens=9),
    dict(num_accepted_draft_tokens=8),
    dict(tpot_ms=9.0),
    dict(tpot_ms=None),
    dict(itl_ms=[10.0]),
  )
  def test_contradictions(self, **wrong):
    metrics.check_identity(A)
    broken = copy.deepcopy(A)
    broken["metrics"] |= wrong
    for check in (metrics.check_identity, lambda r: metrics.acceptance([r])):
      with self.assertRaisesRegex(metrics.MeasurementError, "stock a: "):
        check(broken)

  def test_the_identity_is_real(self):
    # What check_identity asserts of each pass makes tau 1 + the sum of rates.
    a = metrics.acceptance([B])
    assert a["acceptance_length_uncut"] == 1 + sum(a["unconditional_rates"])
    shifted = copy.deepcopy(B)
    # The totals agree, the passes do not.
    shifted["metrics"]["emitted_per_step"] = [2, 1]
    with self.assertRaisesRegex(metrics.MeasurementError, "nothing cut"):
      metrics.check_identity(shifted)


class SummaryTest(parameterized.TestCase):
  def test_by_hand(self):
    slow = copy.deepcopy([A, B])
    for r in slow:
      r["metrics"]["tpot_ms"] *= 2
      for field in ("ttft_ms", "e2el_ms"):
        r["metrics"][field] *= 2
    s = metrics.summarize([A, B], slow)
    assert s["acceptance_length"] == 12 / 6
    assert s["acceptance_length_per_request"] == (9 / 4 + 3 / 2) / 2
    assert s["acceptance_length_without_loops"] == 9 / 4
    assert s["loop_requests"] == 1
    assert s["finish_reasons"] == {"loop": 1, "stop": 1}
    # 180 ms and 120 ms.
    assert math.isclose(s["output_throughput"], 12 / 0.3)
    assert math.isclose(s["decode_throughput"], 10 / 0.1)
    assert s["speedup_vs_ar"] == 2 and s["decode_speedup_vs_ar"] == 2
    assert math.isclose(s["paired_speedup_vs_ar"]["geomean"], 2)
    assert s["mean_tpot_ms"] == 10 and s["mean_ttft_ms"] == 100
    assert s["median_e2el_ms"] == 150
    assert s["same_output_as_ar"] == 2
    assert s["domains"]["math"]["requests"] == 1
    assert sum(d["loop_requests"] for d in s["domains"].values()) == 1
    for r, name in ((A, A["domain"]), (B, B["domain"])):
      own, tau = s["domains"][name], r["metrics"]["acceptance_length"]
      assert own["acceptance_length_per_request"] == tau
      ended = None if r["finish_reason"] == "loop" else tau
      assert own["acceptance_length_without_loops"] == ended
    assert list(s["lengths"]) == ["1-64"]

  def test_only_loops_and_one_token(self):
    only = record("d", [1], [0], [0], finish_reason="loop")
    s = metrics.summarize([only], [])
    assert s["acceptance_length_without_loops"] is None
    assert s["mean_tpot_ms"] is None and s["speedup_vs_ar"] is None
    assert s["same_output_as_ar"] is None

  def test_divergence_counts(self):
    other = copy.deepcopy(A)
    other["output_ids"][3] += 1
    assert metrics.same_outputs([A, B], [other, B]) == 1

  @parameterized.parameters(
    (1, "1-64"), (64, "1-64"), (65, "65-128"), (4096, "2049-4096"),
    (4097, "4097+"),
  )  # fmt: skip
  def test_length_buckets(self, tokens, bucket):
    assert metrics.length_bucket(tokens) == bucket
