"""The load generator over a scripted model, on a clock of its own."""

import math
from typing import Any

from absl.testing import parameterized

from experiments.metrics import MeasurementError
from experiments.serving import drive
from experiments.serving.arrivals import Level
from specpilot_jax.decoding.batch.records import Figures
from specpilot_jax.decoding.batch.scheduler import ERROR, Emitted, Scheduler
from specpilot_jax.decoding.request import RequestMetrics, RequestOutput
from specpilot_jax.decoding.sampling import SamplingParams

STEP_S = 0.25


class Clock:
  """Time passes in steps of the model, and in sleeps."""

  def __init__(self):
    self.now = 100.0
    self.slept = 0.0

  def __call__(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    assert seconds > 0
    self.now += seconds
    self.slept += seconds


class Scripted:
  """Emits a token a step for every request, `max_tokens` of them.

  It is its own policy and model.
  """

  def __init__(self, clock, *, slots=8, nan=None):
    self.clock, self.slots = clock, slots
    self.nan = nan
    self.live: dict[int, Any] = {}
    self.most = 0
    self.observed: list[Any] = []

  def scheduler(self) -> Scheduler:
    return Scheduler(self, slots=self.slots, kv_tokens=10_000, chunk=4)

  def observe(self, update):
    self.observed.append(update)

  def admit(self, slot, request):
    self.live[slot] = [request, 0]
    self.most = max(self.most, len(self.live))

  def prefill(self, slot, chunk):
    self.clock.now += STEP_S

  def abort(self, slot):
    del self.live[slot]

  def step(self, slots, limits, riders=()):
    self.clock.now += STEP_S
    emitted = []
    for slot in slots:
      request, count = self.live[slot]
      count += 1
      self.live[slot][1] = count
      if request.id == self.nan:
        figures: Any = Figures(None, error="logits turned NaN")  # type: ignore
        emitted.append(Emitted(slot, request, (), ERROR, figures))
        continue
      over = count == request.max_tokens
      output = self._output(request, count) if over else None
      if over:
        del self.live[slot]
      figures = Figures(None, output=output)  # type: ignore
      finish = "length" if over else None
      emitted.append(Emitted(slot, request, (7,), finish, figures))
    return emitted

  def _output(self, request, count):
    ones = (1,) * count
    zeros = (0,) * count
    return RequestOutput(
      prompt_ids=tuple(request.prompt),
      token_ids=(7,) * count,
      text=None,
      finish_reason="length",
      stop_reason=None,
      metrics=RequestMetrics(0, 0, ones, zeros, zeros, zeros, 0),
    )


def orders(*outputs, prompt=1):
  return [
    drive.Order(
      id=f"r{i}",
      prompt=[0] * prompt,
      sampling=SamplingParams(max_tokens=n),
    )
    for i, n in enumerate(outputs)
  ]


def serve(level, wanted, **settings):
  clock = Clock()
  known = {"slots", "nan"} & settings.keys()
  model = Scripted(clock, **{k: settings.pop(k) for k in known})
  served = drive.serve(
    model, wanted, level, clock=clock, sleep=clock.sleep, **settings
  )
  return served, model, clock


class DriveTest(parameterized.TestCase):
  def test_closed_loop(self):
    """Each answer sends the next; never more than so many are on their way."""
    served, model, clock = serve(Level(max_concurrency=2), orders(4, 2, 2, 3))
    self.assertEqual([s.order.id for s in served], ["r1", "r0", "r2", "r3"])
    self.assertEqual(model.most, 2)
    arrivals = {s.order.id: s.arrival_s for s in served}
    # One request is admitted a round: r1 comes a step behind r0.
    self.assertEqual(arrivals, {"r0": 0, "r1": 0, "r2": 0.75, "r3": 1.0})
    self.assertEqual(clock.slept, 0)
    one = served[0]
    self.assertEqual(one.passes, (1, 2))
    self.assertEqual(one.itl_ms, (250.0,))
    self.assertEqual((one.output.metrics.ttft_ms, one.queue_ms), (500, 250))
    self.assertEqual(one.output.metrics.e2e_ms, 750)
    self.assertLen([u for u in model.observed if u.tokens], 11)

  def test_open_loop(self):
    """Requests come by the clock, whoever is still being answered."""
    level = Level(request_rate=0.5)
    wanted = orders(*[2] * 20)
    served, model, clock = serve(level, wanted, seed=3)
    due = level.arrivals_s(20, 3)
    self.assertEqual([s.arrival_s for s in served], due)
    self.assertGreater(clock.slept, 10)
    for s in served:
      # Noticed after a sleep at most, or behind the step that was on.
      self.assertBetween(
        s.output.metrics.ttft_ms, 250, 250 + 1000 * STEP_S + 50
      )
    self.assertLess(model.most, 5)

  def test_recorded(self):
    times = (0.0, 0.1, 7.0)
    served, _, _ = serve(Level(recorded_s=times), orders(3, 3, 3))
    self.assertEqual(tuple(s.arrival_s for s in served), times)

  def test_waiting_to_be_sent_counts(self):
    """An open loop's time runs from when a request was due."""
    level = Level(recorded_s=(0.0, 0.0), max_concurrency=1)
    served, _, _ = serve(level, orders(4, 1))
    self.assertEqual(served[1].arrival_s, 0)
    self.assertEqual(served[1].output.metrics.ttft_ms, 1250)
    self.assertEqual(served[1].queue_ms, 1000)

  def test_few_slots(self):
    """Sent and not admitted: the queue is in the time to the first token."""
    served, model, _ = serve(Level(), orders(3, 3), slots=1)
    self.assertEqual(model.most, 1)
    self.assertEqual([s.queue_ms for s in served], [0, 750])

  def test_prompts_are_read(self):
    served, _, _ = serve(Level(), orders(1, prompt=9))
    self.assertEqual(served[0].output.metrics.ttft_ms, 750)  # two chunks

  def test_deadline(self):
    """What was sent is answered, the rest is not sent."""
    served, _, _ = serve(
      Level(max_concurrency=1), orders(*[2] * 9), deadline=100.9
    )
    self.assertEqual([s.order.id for s in served], ["r0", "r1"])

  def test_a_nan_ends_the_run(self):
    with self.assertRaisesRegex(MeasurementError, "r1: logits turned NaN"):
      serve(Level(), orders(2, 2), nan="r1")

  def test_single_tokens(self):
    served, _, _ = serve(Level(), orders(1, 1, 1))
    self.assertEqual([s.itl_ms for s in served], [(), (), ()])
    self.assertTrue(math.isnan(served[0].output.metrics.tpot_ms))
