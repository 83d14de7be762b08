"""Loads at scripted costs: what the choices of the policies are worth.

64 requests of 512 to 1,024 tokens emit 256 each. The table of rounds and rates
is a note of the run, and in WORKSPACE_NOTES.md.
"""

import functools
from typing import Any

import numpy as np
from absl.testing import parameterized

from specpilot_jax.mechanisms import batching, prompt_admission
from tests.mechanisms import scripted_costs
from tests.notes import note

ALL = ("shared_budget", "dynamic_draft", "prompt_admission")
PROMPTS = tuple(np.random.default_rng(1).integers(512, 1025, 64).tolist())


class Patient(batching.BatchPolicy):
  """Rides wherever that takes less of the device, whoever waits."""

  def ride(self, load, unread):
    assert self.profile is not None
    chunk = self.engine.prefill_chunk
    us = [self.profile.ridden[16].at(64), self.profile.steps[16].at(64)]
    return prompt_admission.riding(
      unread,
      places=self.engine.rider_chunk,
      chunk=chunk,
      more_us=us[0] - us[1],
      own_us=self.profile.prefill_us[chunk] * -(-unread // chunk),
    )


@functools.cache
def served(
  options=(), chunk=512, places=0, slots=16, policy=batching.BatchPolicy,
  spoilt=1.0, prompts=PROMPTS,
):  # fmt: skip
  engine = scripted_costs.Engine(
    scripted_costs.Costs(),
    slots=slots,
    prefill_chunk=chunk,
    rider_chunk=places,
  )
  return scripted_costs.serve(
    engine,
    dict.fromkeys(options, "on"),
    prompts=prompts,
    tokens=256,
    policy=policy,
    spoilt=spoilt,
  )


class LoadTest(parameterized.TestCase):
  def test_sixteen_at_once(self):
    stock = served()
    rows = {
      "stock, chunks of 128": served(chunk=128),
      "stock, chunks of 512": stock,
      "shared budget, no rides, 128": served(ALL[:1], chunk=128),
      "shared budget, no rides, 512": served(ALL[:1]),
      "all, 32 places wherever cheaper, 128": served(ALL, 128, 32, 16, Patient),
      "all, 32 places, 128": served(ALL, 128, 32),
      "all, 128 places, 128": served(ALL, 128, 128),
      "all, 192 places, 512": served(ALL, 512, batching.RIDER_CHUNK),
    }
    for name, o in rows.items():
      note(
        f"{name}: {o.steps} rounds, {o.decoding:.1f} requests decode,"
        f" {o.tok_s:.0f} tok/s, {o.tok_s / stock.tok_s:.2f} of stock"
      )
    # One prompt is read at a time: in small pieces few requests decode.
    self.assertLess(rows["all, 32 places wherever cheaper, 128"].decoding, 4)
    self.assertGreater(rows["all, 32 places, 128"].decoding, 7)
    best = rows["all, 192 places, 512"]
    self.assertEqual(best.tok_s, max(o.tok_s for o in rows.values()))
    self.assertGreater(best.decoding, 12)
    self.assertGreater(best.tok_s, 1.2 * stock.tok_s)
    self.assertGreater(best.rounds["ridden"], 100)
    alone = rows["shared budget, no rides, 512"]
    self.assertGreater(best.tok_s, 1.03 * alone.tok_s)

  def test_one_at_a_time(self):
    """No slower than stock."""
    stock, best = (
      served(options, slots=1, prompts=PROMPTS[:16]) for options in ((), ALL)
    )
    self.assertLess(best.ms, 1.01 * stock.ms)

  def test_times_of_a_host_that_is_behind(self):
    """Of each shape its own, also where one follows another."""
    o = served(ALL, 512, batching.RIDER_CHUNK, spoilt=1.5)
    engine: Any = o.policy.engine
    near = 0
    for (_, rides), table in o.policy._us.items():
      places = batching.RIDER_CHUNK if rides else 0
      for rows, us in table.items():
        true_us = engine.step_us(rows, places)
        self.assertBetween(us, 0.999 * true_us, 1.501 * true_us)
        near += us < 1.02 * true_us
    self.assertGreaterEqual(near, 2)
