"""A scripted model, an auditor of what it is told, and a simulated load."""

import collections
import dataclasses
import heapq
import random
from typing import Any

from specpilot_jax.decoding.batch import scheduler as scheduler_lib
from specpilot_jax.decoding.batch.scheduler import Chunk, Emitted, Request
from specpilot_jax.errors import SpecPilotError


class AuditError(AssertionError):
  """A rule of the scheduler was broken."""


def require(condition, what: str) -> None:
  if not condition:
    raise AuditError(what)


def output_of(request: Request) -> list[int]:
  """What the scripted model answers: its payload says how many tokens."""
  return [len(request.prompt) * 1000 + i for i in range(request.payload)]


@dataclasses.dataclass
class _Slot:
  request: Request
  rows: int  # reserved, by the auditor's own arithmetic
  read: int = 0
  emitted: int = 0
  done: bool = False


class Audited:
  """Decodes by script; raises `AuditError` where the scheduler breaks a rule.

  Args:
    slots, kv_tokens, page_tokens, chunk, max_seq_len: as the scheduler has
      them.
    lag: steps that results come late.
    refused: ids of requests that cannot be decoded.
    broken: of those whose logits turn NaN in their second step.
  """

  def __init__(
    self,
    *,
    slots,
    kv_tokens,
    page_tokens=1,
    chunk,
    max_seq_len=None,
    lag=0,
    refused=frozenset(),
    broken=frozenset(),
  ):
    self.slots: dict[int, _Slot] = {}
    self.places, self.chunk = slots, chunk
    self.max_seq_len = max_seq_len or kv_tokens
    self.refused, self.broken = refused, broken
    self.page_tokens = page_tokens
    self.pages = kv_tokens // page_tokens
    self.lag = lag
    self.in_flight: collections.deque[list[Emitted]] = collections.deque()
    # In the order in which they must be admitted; told by the simulation.
    self.queue: collections.deque[Request] = collections.deque()
    self.gone: set[str] = set()
    self.prefilled_since_step = 0
    self.decoding_before: set[int] = set()
    self.steps = self.chunks = self.ridden = self.full = 0

  def _rows(self, request) -> int:
    return min(len(request.prompt) + request.max_tokens, self.max_seq_len)

  def _pages_used(self) -> int:
    return sum(-(-s.rows // self.page_tokens) for s in self.slots.values())

  def must_admit(self, now: float) -> bool:
    """Whether nothing keeps the next request from its slot."""
    while self.queue and self.queue[0].id in self.gone:
      self.queue.popleft()
    if not self.queue or self.queue[0].arrival_s > now:
      return False
    first = self.queue[0]
    rows = self._rows(first)
    reading = any(
      s.read < len(s.request.prompt) - 1 for s in self.slots.values()
    )
    if reading or len(self.slots) == self.places:
      return False
    fits = self._pages_used() + -(-rows // self.page_tokens) <= self.pages
    self.full += not fits
    return fits

  def admit(self, slot, request):
    require(0 <= slot < self.places, f"slot {slot} does not exist")
    require(slot not in self.slots, f"slot {slot} is taken")
    while self.queue and self.queue[0].id in self.gone:
      self.queue.popleft()
    require(
      self.queue and self.queue.popleft() is request,
      f"{request.id} was admitted out of order",
    )
    if request.id in self.refused:
      raise SpecPilotError(f"{request.id} cannot be decoded")
    self.slots[slot] = _Slot(request, self._rows(request))
    require(self._pages_used() <= self.pages, "more rows than there are")

  def prefill(self, slot, chunk: Chunk):
    self._read(slot, chunk)
    self.prefilled_since_step += chunk.count
    self.chunks += 1
    if self.decoding_before:
      require(
        self.prefilled_since_step <= self.chunk,
        "running requests wait for more than a chunk",
      )

  def _read(self, slot, chunk):
    require(slot in self.slots, f"a chunk for slot {slot}, which is free")
    state = self.slots[slot]
    require(chunk.start == state.read, "a chunk was left out or came twice")
    require(1 <= chunk.count <= self.chunk, "a chunk of another size")
    state.read += chunk.count
    require(state.read < len(state.request.prompt), "a chunk behind the prompt")

  def step(self, slots, limits, riders=()):
    ready = {
      slot
      for slot, state in self.slots.items()
      if state.read == len(state.request.prompt) - 1
    }
    require(set(slots) == ready, "a step without all that decode")
    require(list(slots) == sorted(set(slots)), "slots of a step in disorder")
    require(len(riders) <= 1, "more than one chunk rides")
    for slot, chunk in riders:
      self._read(slot, chunk)
      self.ridden += 1
    self.steps += 1
    self.prefilled_since_step = 0
    emitted = []
    for slot in slots:
      state = self.slots[slot]
      if state.done:
        # In flight when its end became known: nothing more comes of it.
        emitted.append(Emitted(slot, state.request))
        continue
      if state.request.id in self.broken and state.emitted:
        state.done = True
        emitted.append(Emitted(slot, state.request, finish="error"))
        continue
      whole = output_of(state.request)
      count = min(1 + (self.steps + slot) % 3, len(whole) - state.emitted)
      tokens = tuple(whole[state.emitted : state.emitted + count])
      state.emitted += count
      state.done = state.emitted == len(whole)
      finish = "stop" if state.done else None
      emitted.append(Emitted(slot, state.request, tokens, finish, limits))
    self.in_flight.append(emitted)
    if len(self.in_flight) <= self.lag:
      self.decoding_before = set(slots)
      return []
    told = self.in_flight.popleft()
    for e in told:
      state = self.slots.get(e.slot)
      if e.finish and state is not None and state.request is e.request:
        del self.slots[e.slot]
    self.decoding_before = {s for s in slots if s in self.slots}
    return told

  def abort(self, slot):
    require(slot in self.slots, f"abort of slot {slot}, which is free")
    del self.slots[slot]
    self.decoding_before.discard(slot)


@dataclasses.dataclass
class Outcome:
  """What came back of a request."""

  tokens: list[int] = dataclasses.field(default_factory=list)
  finish: str | None = None
  admitted: int = 0
  wait_s: float = 0.0


def random_load(rng: random.Random, count: int) -> list[Request]:
  """Bursts and lulls, short prompts and long ones, one-token outputs too."""
  requests, now = [], 0.0
  for i in range(count):
    crowded = (i // 200) % 3 == 2
    now += rng.expovariate(0.45 if crowded else 0.15)
    prompt = rng.choice((1, 2, 15, 16, 17, 18, rng.randint(1, 120)))
    output = rng.choice((1, 2, rng.randint(1, 40), rng.randint(20, 160)))
    requests.append(
      Request(
        id=f"r{i}",
        prompt=range(prompt),
        max_tokens=output + rng.choice((0, 0, 25)),
        arrival_s=now,
        payload=output,
      )
    )
  return requests


def simulate(
  make=scheduler_lib.Scheduler,
  *,
  seed=0,
  count=2000,
  slots=8,
  kv_tokens=400,
  page_tokens=16,
  chunk=16,
  max_seq_len=None,
  lag=0,
  aborted=0.1,
  failing=0.0,
  ride=None,
) -> tuple[Audited, dict[str, Outcome]]:
  """A load over the scripted model, to its end; all rules audited.

  Args:
    make: the scheduler's class.
    aborted: share of requests that are taken back at a random time; others are
      while they run.
    failing: share of requests that are refused, and of those that break off.
    ride: as the scheduler's.

  Returns:
    The model and what came back, by request.

  Raises:
    AuditError: a broken rule, a lost request, a leak.
  """
  rng = random.Random(seed)
  sizes: dict[str, Any] = dict(
    slots=slots, kv_tokens=kv_tokens, page_tokens=page_tokens
  )
  sizes |= dict(chunk=chunk, max_seq_len=max_seq_len)
  load = random_load(rng, count)
  fails = random.Random(seed + 1)
  refused, broken = (
    {request.id for request in load if fails.random() < failing}
    for _ in range(2)
  )
  model = Audited(**sizes, lag=lag, refused=refused, broken=broken)
  scheduler = make(model, **sizes, **({"ride": ride} if ride else {}))
  aborts = [
    # Some before they arrive, most while they wait, others when they are over.
    (request.arrival_s + rng.uniform(-2, 30), request.id)
    for request in load
    if rng.random() < aborted
  ]
  heapq.heapify(aborts)
  outcomes = {request.id: Outcome() for request in load}
  by_id = {request.id: request for request in load}
  # In disorder: the time of arrival counts.
  order = load[:]
  rng.shuffle(order)
  for request in order:
    scheduler.submit(request)
  model.queue.extend(load)
  now, idle = 0.0, 0
  while scheduler.busy or scheduler.next_arrival_s is not None:
    if not scheduler.busy:
      now = max(now, scheduler.next_arrival_s or 0)
    back = []
    while aborts and aborts[0][0] <= now:
      back.append(heapq.heappop(aborts)[1])
    if model.slots and rng.random() < aborted / 4:
      back.append(model.slots[rng.choice(list(model.slots))].request.id)
    for request_id in back:
      update = scheduler.abort(request_id)
      outcome = outcomes[request_id]
      require(
        (update is None) == (outcome.finish is not None),
        f"{request_id} could not be taken back",
      )
      if update is not None:
        require(update.request is by_id[request_id], "another one's end")
        outcome.finish = update.finish
        model.gone.add(request_id)
    due = model.must_admit(now)
    updates = scheduler.advance(now)
    require(
      not due or any(u.admitted or u.request.id in refused for u in updates),
      "a request waits for nothing",
    )
    for update in updates:
      outcome = outcomes[update.request.id]
      require(outcome.finish is None, f"{update.request.id} ended twice")
      if update.admitted:
        outcome.admitted += 1
        outcome.wait_s = now - update.request.arrival_s
      fails = update.request.id in refused | broken
      require(
        update.finish in (None, "stop") or (fails and update.finish == "error"),
        "a request was killed",
      )
      outcome.tokens += update.tokens
      outcome.finish = update.finish
    idle = 0 if updates or model.slots else idle + 1
    require(idle < 50, "the scheduler stands still")
    now += 1
  for request_id, outcome in outcomes.items():
    whole = output_of(by_id[request_id])
    require(outcome.finish is not None, f"{request_id} was lost")
    if request_id in refused:
      require(not outcome.admitted and not outcome.tokens, "a refused request")
    elif outcome.finish == "stop":
      require(outcome.tokens == whole, f"{request_id} has other tokens")
      require(outcome.admitted == 1, f"{request_id} was admitted twice")
    else:
      require(
        outcome.tokens == whole[: len(outcome.tokens)],
        f"{request_id} has another one's tokens",
      )
  require(not model.slots, "a slot was never given back")
  load_now = scheduler.load
  require(load_now.free_pages == kv_tokens // page_tokens, "a page leaked")
  require(load_now.decoding == load_now.prefilling == 0, "a slot is in use")
  require(load_now.free_slots == slots, "a slot leaked")
  return model, outcomes
