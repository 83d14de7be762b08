"""The scheduler against an auditor: loads, aborts, full memory, faults."""

import re
import time
from typing import Any

from absl.testing import parameterized

from specpilot_jax.decoding.batch import scheduler as scheduler_lib
from specpilot_jax.decoding.batch.scheduler import Chunk, Request, Scheduler
from specpilot_jax.errors import SpecPilotError
from tests.decoding.batch import scripted


def request(name, prompt=1, output=1, arrival_s=0.0):
  return Request(
    id=name,
    prompt=range(prompt),
    max_tokens=output,
    arrival_s=arrival_s,
    payload=output,
  )


def rides(load, unread):
  """Half of the time, seven tokens or what is left."""
  return min(unread, 7) if (load.decoding + unread) % 2 else 0


class LostOnAbort(Scheduler):
  """Drops the request behind a waiting one that is taken back."""

  def abort(self, request_id, reason=scheduler_lib.ABORT):
    if request_id in self._waiting and len(self._waiting) > 1:
      update = super().abort(request_id, reason)
      self._waiting.popitem()
      return update
    return super().abort(request_id, reason)


class KeepsSlot(Scheduler):
  """Does not give the slot of an aborted request back."""

  def abort(self, request_id, reason=scheduler_lib.ABORT):
    free = list(self._free_slots)
    update = super().abort(request_id, reason)
    if request_id not in self._slot_of:
      self._free_slots = free
    return update


class KeepsPages(Scheduler):
  """Gives a page less back than it took."""

  def _release(self, slot):
    super()._release(slot)
    self._free_pages -= 1 if len(self._waiting) == 3 else 0


class Overtakes(Scheduler):
  """Admits what fits when the first does not."""

  def _admit(self):
    updates = super()._admit()
    if updates or not self._waiting or self._prefilling is not None:
      return updates
    first = next(iter(self._waiting))
    self._waiting.move_to_end(first)
    return super()._admit()


class LastFirst(Scheduler):
  def _arrive(self, now):
    super()._arrive(now)
    if self._waiting:
      self._waiting.move_to_end(next(reversed(self._waiting)), last=False)


class ReadsOn(Scheduler):
  """Reads a prompt to its end while others wait."""

  def _prefill(self):
    riders = super()._prefill()
    while self._prefilling is not None and not riders:
      riders = super()._prefill()
    return riders


class TakesMore(Scheduler):
  """Reserves the prompt's rows alone."""

  def pages_of(self, request):
    return -(-len(request.prompt) // self._page_tokens)


class BelievesAll(Scheduler):
  """Takes what comes late for the slot's new request."""

  def _told(self, emitted):
    running = self._running.get(emitted.slot)
    if running is None:
      return []
    return super()._told(
      scheduler_lib.Emitted(
        emitted.slot, running.request, emitted.tokens, emitted.finish
      )
    )


class LeavesOut(Scheduler):
  """Steps without the newest of several."""

  def advance(self, now):
    model = self._model
    step = model.step

    def shorter(slots, limits, riders=()):
      return step(slots[:-1] if len(slots) > 3 else slots, limits, riders)

    model.step = shorter
    try:
      return super().advance(now)
    finally:
      model.step = step


class SkipsTokens(Scheduler):
  """Loses a token of a prompt between two chunks."""

  def _has_read(self, slot, chunk):
    more = self._running[slot].unread > chunk.count
    super()._has_read(slot, Chunk(chunk.start, chunk.count + more))


class Kills(Scheduler):
  """Makes room for the first that waits."""

  def _admit(self):
    updates = super()._admit()
    if not updates and len(self._waiting) > 1 and self._running:
      victim = max(self._running)
      if victim != self._prefilling:
        update = self.abort(self._running[victim].request.id)
        updates += [update] if update else []
    return updates


FAULTS = (
  LostOnAbort, KeepsSlot, KeepsPages, Overtakes, LastFirst, ReadsOn, TakesMore,
  BelievesAll, LeavesOut, SkipsTokens, Kills,
)  # fmt: skip


class SchedulerTest(parameterized.TestCase):
  def test_twenty_thousand_requests(self):
    started = time.monotonic()
    model, outcomes = scripted.simulate(
      count=20_000, slots=16, kv_tokens=700, failing=0.01
    )
    self.assertLess(time.monotonic() - started, 60)
    ends = [o.finish for o in outcomes.values()]
    # The load is what it is meant to be: most finish, many are taken back, in
    # every state; the memory is full when slots are not.
    self.assertGreater(ends.count("stop"), 15_000)
    taken = [o for o in outcomes.values() if o.finish == "abort"]
    self.assertGreater(sum(not o.admitted for o in taken), 100)
    self.assertGreater(sum(o.admitted and not o.tokens for o in taken), 50)
    self.assertGreater(sum(bool(o.tokens) for o in taken), 100)
    self.assertGreater(model.full, 1000)
    self.assertGreater(max(o.wait_s for o in outcomes.values()), 50)
    # Refused, or with NaN: they end alone.
    self.assertBetween(ends.count("error"), 250, 450)

  @parameterized.parameters(
    dict(lag=1), dict(lag=2, slots=3), dict(ride=rides), dict(slots=1),
    dict(page_tokens=1), dict(lag=1, ride=rides), dict(chunk=1, count=300),
    # A memory of the largest request alone.
    dict(kv_tokens=320, slots=4),
    # The model ends whoever asks for more.
    dict(kv_tokens=1120, slots=4, page_tokens=280, max_seq_len=280),
  )  # fmt: skip
  def test_loads(self, **settings):
    model, _ = scripted.simulate(**settings)
    self.assertGreater(model.steps, 100)
    self.assertEqual(bool(model.ridden), "ride" in settings)

  @parameterized.parameters(*FAULTS)
  def test_faults_are_caught(self, fault):
    with self.assertRaises(scripted.AuditError):
      scripted.simulate(fault, lag=1, count=1000)

  def test_the_same_load_twice(self):
    first, second = (scripted.simulate(count=300)[1] for _ in range(2))
    self.assertEqual(first, second)

  def test_every_step_may_be_the_last(self):
    """One of three is taken back after so many rounds; the others go on."""
    alone = None
    for rounds in range(30):
      model = scripted.Audited(slots=2, kv_tokens=200, chunk=4)
      s = Scheduler(model, slots=2, kv_tokens=200, chunk=4)
      three = [request(n, prompt=11, output=9) for n in "abc"]
      model.queue.extend(three)
      for r in three:
        s.submit(r)
      tokens: dict[str, list[int]] = {n: [] for n in "abc"}
      ended, now = {}, 0
      while s.busy or s.next_arrival_s is not None:
        updates = s.advance(now)
        now += 1
        if now == rounds + 1:
          update = s.abort("b")
          if update is not None:
            updates.append(update)
            model.gone.add("b")
          self.assertIsNone(s.abort("b"))
        for u in updates:
          tokens[u.request.id] += u.tokens
          if u.finish:
            ended[u.request.id] = u.finish
      self.assertEqual((ended["a"], ended["c"]), ("stop", "stop"))
      whole = scripted.output_of(three[0])
      self.assertEqual((tokens["a"], tokens["c"]), (whole, whole))
      self.assertEqual(tokens["b"], whole[: len(tokens["b"])])
      alone = ended["b"]
      self.assertEqual(s.load.free_pages, 200)
    self.assertEqual(alone, "stop")  # Some round came after its end.

  def test_limits_follow_the_load(self):
    seen = []

    def plan(load):
      seen.append(load)
      return load.decoding

    model = scripted.Audited(slots=2, kv_tokens=12, chunk=4)
    s = Scheduler(model, slots=2, kv_tokens=12, chunk=4, plan=plan)
    three = [request("a", 1, 4), request("b", 6, 1), request("c", 1, 1)]
    model.queue.extend(three)
    for r in three:
      s.submit(r)
    figures = [u.figures for u in s.advance(0) + s.advance(1) if u.tokens]
    self.assertEqual(figures, [1, 1])
    load = seen[1]
    self.assertEqual((load.waiting, load.prefilling), (1, 1))
    self.assertEqual((load.free_slots, load.free_pages), (0, 0))

  def test_a_chunk_never_rides_where_nobody_waits(self):
    asked = []

    def ride(load, unread):
      asked.append((load.decoding, unread))
      return 2

    model = scripted.Audited(slots=2, kv_tokens=99, chunk=4)
    s = Scheduler(model, slots=2, kv_tokens=99, chunk=4, ride=ride)
    two = [request("a", 9, 8), request("b", 4, 1)]
    model.queue.extend(two)
    for r in two:
      s.submit(r)
    while s.busy or s.next_arrival_s is not None:
      s.advance(0)
    self.assertEqual(asked, [(1, 3), (1, 1)])
    self.assertEqual((model.chunks, model.ridden), (2, 2))

  def test_arrivals_wait_for_their_time(self):
    model = scripted.Audited(slots=1, kv_tokens=9, chunk=4)
    s = Scheduler(model, slots=1, kv_tokens=9, chunk=4)
    late = request("late", arrival_s=5.0)
    model.queue.append(late)
    s.submit(late)
    self.assertEqual((s.advance(4.9), s.busy), ([], False))
    self.assertEqual(s.next_arrival_s, 5.0)
    self.assertLen(s.advance(5.0), 2)
    self.assertIsNone(s.next_arrival_s)
    s.submit(late)  # Its id is free again.
    update = s.abort("late")
    self.assertIsNotNone(update)
    self.assertEqual((update.request, update.finish), (late, "abort"))
    self.assertIsNone(s.next_arrival_s)

  def test_refusals(self):
    model = scripted.Audited(slots=1, kv_tokens=20, chunk=4)
    s = Scheduler(model, slots=1, kv_tokens=20, page_tokens=8, chunk=4)
    model.queue.append(request("a", 10, 4))
    s.submit(model.queue[0])
    for bad, message in (
      (request("a"), "request a is there already, ids must differ"),
      (request("b", 0), "request b has an empty prompt"),
      (request("b", 1, 0), "request b: max_tokens must be at least 1, got 0"),
      (
        request("b", 10, 7),
        "request b needs key and value rows for 10 + 7 tokens, there is room"
        " for 16",
      ),
      (
        request("b", arrival_s=float("nan")),
        "request b: arrival_s must be a finite number of seconds, got nan",
      ),
    ):
      with self.assertRaisesRegex(SpecPilotError, f"^{re.escape(message)}$"):
        s.submit(bad)
    s.advance(0)
    with self.assertRaisesRegex(SpecPilotError, "is there already"):
      s.submit(request("a"))
    for name in ("slots", "kv_tokens", "page_tokens", "chunk"):
      sizes: dict[str, Any] = dict(slots=1, kv_tokens=1) | {name: 0}
      with self.assertRaisesRegex(SpecPilotError, f"^{name} must be at least"):
        Scheduler(model, **sizes)
