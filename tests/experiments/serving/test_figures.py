"""Figures of a load, on three requests worked out by hand."""

from typing import Any

from absl.testing import parameterized

from experiments import metrics
from experiments.serving import figures, section
from specpilot_jax.errors import SpecPilotError


def record(
  name, arrival_s, ttft_ms, itl_ms, passes, emitted, drafted, **goodput
):
  """Passes of a chain whose accepted drafts are what was emitted, less one."""
  tokens = sum(emitted)
  e2el = ttft_ms + sum(itl_ms)
  accepted = [n - 1 for n in emitted]
  m: dict[str, Any] = dict(
    ttft_ms=ttft_ms,
    itl_ms=itl_ms,
    e2el_ms=e2el,
    tpot_ms=(e2el - ttft_ms) / (tokens - 1) if tokens > 1 else None,
    queue_ms=ttft_ms / 2,
    acceptance_length=tokens / len(emitted),
    num_spec_steps=len(emitted),
    num_draft_tokens=sum(drafted),
    num_accepted_draft_tokens=sum(accepted),
    emitted_per_step=emitted,
    drafted_per_step=drafted,
    depth_per_step=drafted,
    accepted_per_step=accepted,
    cut_steps=0,
    pass_per_step=passes,
  )
  return dict(
    request=name,
    system="stock@c2",
    domain="code",
    prompt_ids=[1, 2, 3],
    output_ids=list(range(tokens)),
    finish_reason="stop",
    arrival_s=arrival_s,
    level=dict(name="c2", goodput=goodput),
    metrics=m,
  )


def load(**goodput):
  return [
    record("a", 10.0, 500.0, [400.0, 600.0], [0, 1, 3], [1, 3, 2], [3, 3, 3],
           **goodput),
    record("b", 10.2, 400.0, [800.0], [1, 3], [2, 2], [3, 1], **goodput),
    # Comes when the first one ends.
    record("c", 11.5, 500.0, [], [4], [1], [0], **goodput),
  ]  # fmt: skip


class FiguresTest(parameterized.TestCase):
  def test_by_hand(self):
    s = metrics.summarize(load(), ())
    self.assertEqual(s["duration"], 2.0)  # from 10.0 to 12.0
    self.assertEqual(s["output_throughput"], 11 / 2)
    self.assertEqual(s["total_token_throughput"], 20 / 2)
    self.assertEqual(s["request_throughput"], 3 / 2)
    self.assertEqual(s["max_concurrent_requests"], 2)
    self.assertEqual(s["passes"], 4)
    self.assertEqual(s["requests_per_pass"], 6 / 4)
    # Anchors and drafts: 4, 4 + 4, 4 + 2, 1.
    self.assertEqual(s["nodes_per_pass"], 19 / 4)
    self.assertEqual(s["tokens_per_pass"], 11 / 4)
    # Seconds from 10.0 on: 0.5, 0.6 and 0.9; 1.4, 1.5 and 2.0.
    self.assertEqual(s["max_output_tokens_per_s"], 6)
    self.assertEqual(s["acceptance_length"], 11 / 6)
    self.assertEqual(
      (s["mean_queue_ms"], s["p99_tpot_ms"] > 0), (1400 / 6, True)
    )
    self.assertIsNone(s["request_goodput"])
    self.assertIsNone(s["decode_throughput"])

  def test_steady(self):
    """From the second request's first tokens to the end behind the last
    arrival: 10.6 to 12.0, in which 3 + 2, 2 and 1 were emitted."""
    level = dict(request_rate="inf", max_concurrency=2, recorded=False)
    records = [r | dict(level=r["level"] | level) for r in load()]
    s = metrics.summarize(records, ())
    self.assertAlmostEqual(s["steady_s"], 1.4)
    self.assertAlmostEqual(s["steady_throughput"], 8 / 1.4)
    s |= dict(steady_speedup_vs_stock=None)
    self.assertEmpty(
      section.notes({"stock@c2": s | {"requests_per_pass": 1.6}})
    )
    (line,) = section.notes({"stock@c2": s})
    self.assertStartsWith(line, "stock@c2: 1.5 requests in a pass, not 2:")
    self.assertIsNone(metrics.summarize(load(), ())["steady_throughput"])

  def test_groups_have_no_speed(self):
    """Others were served beside them."""
    (group,) = metrics.summarize(load(), ())["domains"].values()
    self.assertIsNone(group["output_throughput"])
    self.assertEqual(group["mean_tpot_ms"], (1000 / 5 + 800 / 3) / 2)

  def test_goodput(self):
    s = metrics.summarize(load(ttft=450.0), ())
    self.assertEqual((s["good_requests"], s["request_goodput"]), (1, 0.5))
    s = metrics.summarize(load(ttft=500.0, tpot=250.0), ())
    self.assertEqual(s["good_requests"], 2)  # a single token has no TPOT

  def test_beside_ar(self):
    """Speedup is that of throughput, under the same load."""
    slow = [
      record("a", 0.0, 1000.0, [4000.0], [0, 1], [1, 10], [0, 9]),
    ]
    s = metrics.summarize(load(), slow)
    self.assertEqual(s["speedup_vs_ar"], 5.5 / 2.2)
    self.assertEqual(metrics.at_level("ar", "stock@c2"), "ar@c2")
    self.assertEqual(metrics.at_level("ar", "stock"), "ar")

  def test_requests_at_once(self):
    """One that comes as another ends is not beside it."""
    one = record("a", 0.0, 1000.0, [], [0], [1], [0])
    two = record("b", 1.0, 1000.0, [], [1], [1], [0])
    self.assertEqual(figures.figures([one, two])["max_concurrent_requests"], 1)

  def test_objectives(self):
    self.assertEqual(
      figures.objectives(["ttft:200", "tpot:12.5"]), {"ttft": 200, "tpot": 12.5}
    )
    for bad in ("ttft", "ttft:", "ttft:0", "ttft:nan", "itl:3", "ttft:inf"):
      with self.assertRaisesRegex(SpecPilotError, "expected NAME:MILLISECONDS"):
        figures.objectives([bad])
    with self.assertRaisesRegex(SpecPilotError, "goodput 'e2el:2'"):
      figures.objectives(["e2el:1", "e2el:2"])
