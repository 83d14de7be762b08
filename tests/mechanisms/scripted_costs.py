"""A batch engine whose passes take what a script says, for its policies.

Nothing is computed: requests accept drafts by chance, seeded, and the device is
a clock. The host reads a step behind it, as on a GPU.
"""

import collections
import dataclasses
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from pallas_kernels.dispatch import REFERENCE
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.batch.records import StepTime, prefill_sizes
from specpilot_jax.decoding.batch.scheduler import Emitted, Request, Scheduler
from specpilot_jax.mechanisms.batch_profile import Profile
from specpilot_jax.mechanisms.batching import BatchPolicy
from specpilot_jax.mechanisms.step_costs import StepCosts

NODES = 16


@dataclasses.dataclass(frozen=True)
class Costs:
  """Milliseconds of passes of Qwen3.8-27B in bfloat16 on an H200.

  Measured there (WORKSPACE_NOTES.md): a token without drafts 12.8 ms, a chain
  of 16 nodes 16.0, of which 3.2 for the draft. By arithmetic, not measured: a
  row of a product 54 GFLOP at 600 TFLOP/s, a slot's recurrent state 0.15 GB
  three times, its draft 16 rows of drafter and head.
  """

  weights: float = 12.4
  row: float = 0.09

  def products(self, rows: int) -> float:
    return (self.weights**4 + (self.row * rows) ** 4) ** 0.25

  def step(self, slots: int, rows: int, places: int = 0) -> float:
    """Of `places` for a prompt beside the rows."""
    draft = 3.0 + 0.125 * slots if rows > slots else 0.0
    prompt = 2.0 if places else 0.0
    return 0.6 + 0.12 * slots + draft + prompt + self.products(rows + places)

  def prefill(self, chunk: int) -> float:
    return 2.6 + self.products(chunk)


class Engine:
  """As much of `BatchEngine` as a policy and a scheduler ask for.

  Attributes:
    rounds: steps and passes over prompts, by kind.
    now: the host's clock, milliseconds.
  """

  def __init__(
    self,
    costs: Costs,
    *,
    slots: int,
    prefill_chunk: int,
    rider_chunk: int = 0,
    nodes: int = NODES,
    seed: int = 0,
  ):
    self.costs = costs
    self.slots, self.slot_buckets, self.nodes = slots, (slots,), nodes
    self.prefill_chunk, self.rider_chunk = prefill_chunk, rider_chunk
    self.prefill_sizes = prefill_sizes(prefill_chunk)
    self.kernels = REFERENCE
    self.step_times: collections.deque[StepTime] = collections.deque(maxlen=64)
    self.rounds = collections.Counter()
    self.decoding: list[int] = []  # requests of each step
    self.now = self.free_at = 0.0  # the device's
    self._rng = np.random.default_rng(seed)
    self._left: dict[int, tuple[Request, int]] = {}
    self._pending: collections.deque[Any] = collections.deque()
    self._alone, self._read_at = False, 0.0

  def scheduler(self, **settings: Any) -> Scheduler:
    return Scheduler(
      self,
      slots=self.slots,
      kv_tokens=self.slots * 2048,
      page_tokens=2048,
      chunk=self.prefill_chunk,
      **settings,
    )

  def profile(self, policy: BatchPolicy, spoilt: float) -> Profile:
    """What `batch_profile.measure` would find, times `spoilt`."""

    def table(rides: bool):
      whole = self.slots * self.nodes
      places = self.rider_chunk if rides else 0
      rows = [n or whole for n in policy.rows_of(self.slots, rides)]
      us = [self.step_us(n, places) * spoilt for n in rows]
      return {self.slots: StepCosts(tuple(rows), tuple(us))}

    return Profile(
      steps=table(False),
      ridden=table(True) if self.rider_chunk else {},
      prefill_us={n: 1e3 * self.costs.prefill(n) for n in self.prefill_sizes},
    )

  def step_us(self, rows: int, places: int = 0) -> float:
    return 1e3 * self.costs.step(self.slots, rows, places)

  def _run(self, ms: float) -> float:
    self.free_at = max(self.now, self.free_at) + ms
    return self.free_at

  def admit(self, slot, request):
    self._left[slot] = request, request.max_tokens
    self._alone = False

  def prefill(self, slot, chunk):
    del slot
    self.rounds["prefill"] += 1
    self._alone = False
    size = min(n for n in self.prefill_sizes if n >= chunk.count)
    self._run(self.costs.prefill(size))

  def abort(self, slot):
    del self._left[slot]

  def step(self, slots, limits, riders=()):
    whole = self.slots * self.nodes
    rows = whole if limits is None else limits.rows or whole
    places = self.rider_chunk if riders else 0
    self.rounds["ridden" if riders else "step"] += 1
    self.decoding.append(len(slots))
    end = self._run(self.costs.step(self.slots, rows, places))
    shape = (self.slots, rows, bool(riders)) if self._alone else None
    self._pending.append((end, shape, self._emitted(slots, rows, limits)))
    self._alone = True
    if len(self._pending) < 2:
      return []
    end, shape, emitted = self._pending.popleft()
    self.now = max(self.now, end)
    if shape is not None:
      us = 1e3 * (self.now - self._read_at)
      self.step_times.append(StepTime(*shape, us=us))
    self._read_at = self.now
    told = []
    for slot, request, drafted, accepted, scores in emitted:
      if self._left.get(slot, (None,))[0] is not request:
        continue
      left = self._left[slot][1]
      count = min(1 + accepted, left)
      self._left[slot] = request, left - count
      finish = None
      if count == left:
        del self._left[slot]
        finish = "length"
      result = types.SimpleNamespace(drafted=drafted, accepted=accepted)
      figures = types.SimpleNamespace(result=result, scores=scores)
      told.append(Emitted(slot, request, (0,) * count, finish, figures))
    return told

  def _emitted(self, slots, rows, limits) -> list[tuple]:
    """Chains whose drafts are each accepted by a chance of their block's."""
    chance = self._rng.beta(1.9, 1.55, len(slots))
    scores = np.log(chance)[:, None] * np.arange(self.nodes)
    kept = np.full(len(slots), self.nodes - 1)
    if rows <= self.slots:
      kept[:] = 0
    elif getattr(limits, "plan", ()):
      budget = min(int(limits.plan.budget), rows) - len(slots)
      order = np.sort(scores[:, 1:], axis=None)[::-1]
      at_least = order[min(max(budget, 1), order.size) - 1]
      kept = (scores[:, 1:] >= at_least).sum(1)
    drawn = self._rng.random((len(slots), self.nodes - 1)) < chance[:, None]
    found = []
    for i, slot in enumerate(slots):
      run = drawn[i, : kept[i]]
      accepted = int(run.size if run.all() else run.argmin())
      own = scores[i] if rows > self.slots else None
      request = self._left[slot][0]
      found.append((slot, request, int(kept[i]), accepted, own))
    return found


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Of a load, once all is answered."""

  ms: float
  rounds: dict[str, int]
  decoding: float
  tokens: int

  policy: BatchPolicy

  @property
  def steps(self) -> int:
    return self.rounds.get("step", 0) + self.rounds.get("ridden", 0)

  @property
  def tok_s(self) -> float:
    return 1e3 * self.tokens / self.ms


def serve(
  engine: Engine,
  options: dict[str, Any],
  *,
  prompts: Iterable[int],
  tokens: int,
  policy: type[BatchPolicy] = BatchPolicy,
  spoilt: float = 1.0,
) -> Outcome:
  """A closed loop of as many requests as there are slots.

  Args:
    options: of the system.
    prompts: lengths, a request each.
    tokens: that each emits.
    policy: its class.
    spoilt: factor on the times of the profile that it begins with.
  """
  own = policy(SystemConfig(**options), engine)  # type: ignore
  own.profile = engine.profile(own, spoilt)
  scheduler = own.scheduler()
  waiting = collections.deque(enumerate(prompts))
  count, live = len(waiting), 0
  while waiting or live:
    while waiting and live < engine.slots:
      name, length = waiting.popleft()
      scheduler.submit(
        Request(id=str(name), prompt=range(length), max_tokens=tokens)
      )
      live += 1
    for update in scheduler.advance(0.0):
      own.observe(update)
      live -= update.finish is not None
  return Outcome(
    engine.now,
    dict(engine.rounds),
    float(np.mean(engine.decoding)),
    count * tokens,
    own,
  )
