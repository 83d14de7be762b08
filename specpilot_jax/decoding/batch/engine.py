"""The batch engine: many requests in slots, one executable per shape of a pass.

It is a `scheduler.Model`: a scheduler says who is admitted, which chunk is read
and who is stepped. The step is that of one request (`decoding.step`), see
`batch.step`.

Shapes: a pass is over a number of slots (`slot_buckets`) and, where it is
packed, a number of rows that the host picks. Each pair, and each set of
features that the sampling of its requests needs, is an executable; `warm_up`
makes them all.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specpilot_jax import compilation
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import ONE_LEVEL, SystemConfig, is_integer
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.records import (
  StepLimits,
  StepTime,
  Ticket,
  emitted_of,
  prefill_sizes,
  rider_of,
  unions,
)
from specpilot_jax.decoding.batch.scheduler import (
  ERROR,
  Chunk,
  Emitted,
  Request,
  Scheduler,
)
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.decoding.transcript import Transcript
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.target import Target
from specpilot_jax.tokenizer import Tokenizer


class BatchEngine:
  """Decodes requests in slots; see the module.

  Args:
    target, drafter, tokenizer, system, prefill_chunk, host_lag: see `Engine`.
    max_seq_len: prompt plus output tokens of a request at most. Every slot has
      rows for as many.
    slots: requests at once at most.
    slot_buckets: numbers of slots that passes are compiled for; the powers of
      two up to `slots`, and it, by default. A pass over fewer slots than there
      are copies their states to and from; one over all of them does not.
    rider_chunk: tokens of a prompt that a step can take along; 0 for none.
    allocate: who gets the rows of a pass; None where limits fit.
    clock: seconds, for the measurements of requests.

  Raises:
    SpecPilotError: a setting that does not fit the target or the drafter, or
      that needs passes over one request alone.
  """

  def __init__(
    self,
    target: Target,
    *,
    drafter: Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    system: SystemConfig | None = None,
    slots: int = 8,
    slot_buckets: Sequence[int] | None = None,
    max_seq_len: int | None = None,
    prefill_chunk: int = 64,
    rider_chunk: int = 0,
    allocate: batch_step.Allocate | None = None,
    host_lag: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    system = SystemConfig() if system is None else system
    if system.verification != ONE_LEVEL:
      raise SpecPilotError(
        f"verification={system.verification} decodes one request at a time; a"
        f" batch takes verification={ONE_LEVEL}"
      )
    for name, value, least in (
      ("slots", slots, 1), ("rider_chunk", rider_chunk, 0),
    ):  # fmt: skip
      if not is_integer(value) or value < least:
        raise SpecPilotError(
          f"{name} must be a whole number from {least}, got {value!r}"
        )
    if slot_buckets is None:
      powers = [1 << i for i in range(slots.bit_length())]
      slot_buckets = [*(n for n in powers if n < slots), slots]
    buckets = sorted(set(slot_buckets))
    if buckets[-1:] != [slots] or buckets[0] < 1:
      raise SpecPilotError(
        f"slot_buckets {list(slot_buckets)} must be from 1 to {slots}, the"
        " slots, and end with them"
      )
    self._one = one = Engine(
      target,
      drafter=drafter,
      tokenizer=tokenizer,
      system=system,
      max_seq_len=max_seq_len,
      prefill_chunk=prefill_chunk,
      host_lag=host_lag,
    )
    if rider_chunk == 1 or rider_chunk > one.capacity - one.max_seq_len:
      raise SpecPilotError(
        f"rider_chunk must be 0, or from 2 to"
        f" {one.capacity - one.max_seq_len}, the prefill_chunk, got"
        f" {rider_chunk}"
      )
    self.tokenizer, self.params = tokenizer, one.params
    self.slots = slots
    self.slot_buckets = tuple(buckets)
    self.prefill_chunk = one.prefill_chunk
    self.prefill_sizes = prefill_sizes(one.prefill_chunk)
    self.rider_chunk = rider_chunk
    self._weights, self.kernels = target.weights, target.kernels
    self._allocate, self._clock = allocate, clock
    fns = batch_step.BatchFns(one.fns, allocate)
    self._admit = jax.jit(fns.admit, donate_argnums=0)
    self._prefill = jax.jit(fns.prefill, donate_argnums=1)
    self._steps: dict[Features, Any] = {}
    self._tickets: list[Ticket | None] = [None] * slots
    # Steps that the host has not read: the output, who was in it, and its shape
    # where the device did nothing else since the step before.
    self._pending: deque[
      tuple[
        batch_step.BatchOutput,
        list[tuple[int, int, Ticket]],
        tuple[int, int, bool] | None,
      ]
    ] = deque()
    self._steps_alone = False  # the device had nothing else since a step
    self._read_at: float | None = None  # when the latest step was read
    self.step_times: deque[StepTime] = deque(maxlen=64)
    # `Slots`; None while a call has them.
    self._slots: Any = self._fresh()

  def _fresh(self) -> batch_step.Slots:
    """Empty slots."""
    one, vocab = self._one, self._one.config.vocab_size

    def a_slot():
      carry = dataclasses.replace(
        one.fresh_carry(),
        history=sampling_lib.History(
          output=jnp.zeros((vocab,), jnp.int32),
          prompt=jnp.zeros((vocab,), bool),
        ),
      )
      return batch_step.Slots(
        carry=carry,
        request=self._settings(SamplingParams()),
        sampled=jnp.zeros((), bool),
        learned=self._allocate.fresh() if self._allocate else (),
      )

    return jax.tree.map(
      lambda x: jnp.zeros((self.slots, *x.shape), x.dtype),
      jax.eval_shape(a_slot),
    )

  def _taken(self) -> batch_step.Slots:
    """The slots, for a call that they are donated to.

    Whoever breaks off inside such a call, a Ctrl-C among them, takes the states
    of all requests along.
    """
    slots, self._slots = self._slots, None
    if slots is not None:
      return slots
    if len(self.free_slots) < self.slots:
      raise SpecPilotError(
        "an interrupted call has lost the states of all slots; abort them"
      )
    self._forget()
    return self._fresh()

  def _donated(self, call: Callable[[batch_step.Slots], Any]) -> Any:
    """A call that the slots are donated to."""
    slots = self._taken()
    try:
      return call(slots)
    except Exception:
      # What failed before it ran, while it was traced, has taken nothing.
      if not any(x.is_deleted() for x in jax.tree.leaves(slots)):
        self._slots = slots
      raise

  def _forget(self) -> None:
    """Steps that nobody waits for any more."""
    self._pending.clear()
    self._steps_alone, self._read_at = False, None

  def _settings(self, sampling: SamplingParams):
    return dataclasses.replace(self._one.request(sampling), plan=())

  @property
  def max_seq_len(self) -> int:
    """Prompt plus output tokens of a request at most."""
    return self._one.max_seq_len

  @property
  def nodes(self) -> int:
    """Places for nodes that a request has in a pass."""
    return self._one.fns.policy.rows

  @property
  def free_slots(self) -> tuple[int, ...]:
    """Slots without a request."""
    return tuple(i for i, t in enumerate(self._tickets) if t is None)

  @property
  def num_compilations(self) -> int:
    """See `compilation.num_compilations`."""
    return compilation.num_compilations()

  def admit(self, slot: int, request: Request) -> None:
    """Gives a free slot to a request; its prompt follows in chunks.

    Args:
      request: `payload` is its `SamplingParams`, greedy where there is none;
        of both `max_tokens` the lower counts.

    Raises:
      SpecPilotError: a slot that is taken, ids out of range, a prompt without
        room for output, settings that cannot be met. Nothing has happened then.
    """
    if self._tickets[slot] is not None:
      raise SpecPilotError(f"slot {slot} has a request already")
    sampling = request.payload or SamplingParams()
    if not isinstance(sampling, SamplingParams):
      raise SpecPilotError(
        f"request {request.id}: payload must be SamplingParams, got"
        f" {type(sampling).__name__}"
      )
    if sampling.stop and self.tokenizer is None:
      raise SpecPilotError("stop strings need a tokenizer")
    prompt = self._one.check_ids(request.prompt, f"prompt of {request.id}")
    room = self.max_seq_len - prompt.size
    if room < 1:
      raise SpecPilotError(
        f"prompt of {prompt.size} tokens leaves no room for output in a context"
        f" of {self.max_seq_len}"
      )
    settings = self._settings(sampling)
    padded = np.zeros(self._one.capacity, np.int32)
    padded[: prompt.size] = prompt
    fixed = (
      np.int32(slot),
      padded,
      np.int32(prompt.size),
      np.int32(min(sampling.max_tokens, request.max_tokens, room)),
      settings,
      np.bool_(sampling.temperature > 0),
    )
    self._steps_alone = False
    self._slots = self._donated(lambda slots: self._admit(slots, *fixed))
    self._tickets[slot] = Ticket(
      request,
      prompt,
      Features.of(sampling),
      Transcript(request.prompt, sampling, self.tokenizer, self._clock()),
    )

  def _reader(self, slot: int, chunk: Chunk, most: int) -> batch_step.Rider:
    """A chunk of a slot's prompt, padded."""
    ticket = self._tickets[slot]
    if ticket is None:
      raise SpecPilotError(f"slot {slot} has no request to read a prompt of")
    last = ticket.prompt.size - 1
    if chunk.start != ticket.read or not 1 <= chunk.count <= min(
      most, last - chunk.start
    ):
      raise SpecPilotError(
        f"slot {slot} has read {ticket.read} of {last} tokens; a chunk of at"
        f" most {most} must follow, got {chunk.count} from {chunk.start} on"
      )
    tokens = np.zeros(most, np.int32)
    end = chunk.start + chunk.count
    tokens[: chunk.count] = ticket.prompt[chunk.start : end]
    return rider_of(slot, tokens, chunk.count)

  def _has_read(self, slot: int, chunk: Chunk) -> None:
    """Once the device was told: a call that was refused has read nothing."""
    ticket = self._tickets[slot]
    assert ticket is not None
    ticket.read += chunk.count

  def prefill(self, slot: int, chunk: Chunk, places: int = 1) -> None:
    """Commits a chunk of the prompt of the slot's request.

    Args:
      places: for tokens that the pass has at least.
    """
    least = min(max(chunk.count, places), self.prefill_chunk)
    size = min(n for n in self.prefill_sizes if n >= least)
    rider = self._reader(slot, chunk, size)
    self._steps_alone = False
    self._slots = self._donated(
      lambda slots: self._prefill(self.params, slots, rider)
    )
    self._has_read(slot, chunk)

  def abort(self, slot: int) -> None:
    """Frees a slot, whatever its request is doing."""
    self._tickets[slot] = None
    if len(self.free_slots) == self.slots:
      self._forget()

  def _step(self, features: Features) -> Any:
    if features not in self._steps:
      one = dataclasses.replace(self._one.fns, features=features)
      fns = batch_step.BatchFns(one, self._allocate)
      self._steps[features] = jax.jit(
        fns.step, donate_argnums=1, static_argnames="rows"
      )
    return self._steps[features]

  def step(
    self,
    slots: Sequence[int],
    limits: StepLimits | None = None,
    riders: Sequence[tuple[int, Chunk]] = (),
  ) -> list[Emitted]:
    """One pass over requests whose prompts are read.

    With a host lag it returns what the step before did.

    Args:
      slots: that take part.
      limits: what may be verified; None for what the system says.
      riders: a chunk of another slot's prompt that the pass takes along.

    Raises:
      SpecPilotError: a slot without a request or with an unread prompt, more
        rows than kernels take, limits that do not fit the rows.
    """
    limits = limits or StepLimits()
    tickets = {slot: self._ready(slot) for slot in slots}
    index = self._index(slots, limits.bucket)
    if len(riders) > 1 or (riders and not self.rider_chunk):
      raise SpecPilotError(
        f"a step takes {1 if self.rider_chunk else 0} chunks of prompts along,"
        f" got {len(riders)}; see rider_chunk"
      )
    where = {slot: at for at, slot in enumerate(index.tolist())}
    listed = np.zeros(index.size, bool)
    listed[[where[slot] for slot in slots]] = True
    rider = None
    for slot, chunk in riders:
      rider = self._reader(slot, chunk, self.rider_chunk)
    out = self._run(
      Features.union(ticket.features for ticket in tickets.values()),
      index,
      listed,
      limits,
      rider,
    )
    for slot, chunk in riders:
      self._has_read(slot, chunk)
    who = [(where[slot], slot, ticket) for slot, ticket in tickets.items()]
    whole = index.size * self.nodes
    shape = index.size, min(limits.rows or whole, whole), rider is not None
    self._pending.append((out, who, shape if self._steps_alone else None))
    self._steps_alone = True
    emitted = []
    while len(self._pending) > self._one.host_lag:
      emitted += self._read_next()
    if len(self.free_slots) == self.slots:
      self._forget()  # steps behind the last one of the last request
    return emitted

  def _ready(self, slot: int) -> Ticket:
    """The request of a slot that is to be stepped."""
    ticket = self._tickets[slot]
    if ticket is None or ticket.read < ticket.prompt.size - 1:
      raise SpecPilotError(
        f"slot {slot} is to be stepped, and has"
        f" {'no request' if ticket is None else 'not read its prompt'}"
      )
    return ticket

  def _index(self, slots: Sequence[int], least: int = 1) -> np.ndarray:
    """The slots of a pass; `self.slots` where there is none."""
    if len(set(slots)) != len(slots) or not slots:
      raise SpecPilotError(f"a step is over slots, each once; got {slots}")
    least = min(max(len(slots), least), self.slots)
    bucket = min(n for n in self.slot_buckets if n >= least)
    if bucket == self.slots:
      return np.arange(self.slots, dtype=np.int32)
    index = np.full(bucket, self.slots, np.int32)
    index[: len(slots)] = slots
    return index

  def _arguments(self, index, listed, limits: StepLimits, rider):
    """Of a step's function, behind parameters and slots; and its rows."""
    bucket = index.size
    policy = self._one.fns.policy
    given = limits.of_slots(index, self.slots, policy.rows, policy.path - 1)
    rows = limits.rows
    if rows is not None:
      if not is_integer(rows) or rows < bucket:
        raise SpecPilotError(
          f"rows={rows!r} of a pass over {bucket} slots, expected one for each"
        )
      if rows >= bucket * self.nodes:
        rows = None  # there is room for all
      elif self._allocate is None and given.nodes[listed].sum() > rows:
        raise SpecPilotError(
          f"limits of {given.nodes[listed].sum()} nodes in all for {rows} rows;"
          " without an allocation they must fit"
        )
    in_all = bucket * self.nodes if rows is None else rows
    if rider is not None:
      in_all += self.rider_chunk
    kernels_lib.check_rows(self.kernels, in_all, self._weights)
    plan = limits.plan
    if isinstance(plan, tuple) and not plan and self._allocate is not None:
      plan = self._allocate.unplanned()
    if bucket == self.slots:
      index = None
    return (index, listed, given, plan, rider), rows

  def _run(self, features, *call) -> batch_step.BatchOutput:
    """Hands a step to the device; see `_arguments`."""
    arguments, rows = self._arguments(*call)
    step = self._step(features)
    self._slots, out = self._donated(
      lambda slots: step(self.params, slots, *arguments, rows=rows)
    )
    return out

  def _read_next(self) -> list[Emitted]:
    """What the oldest step did for requests that are still there.

    Whoever breaks off while it waits, a Ctrl-C among them, loses nothing: the
    step is read the next time. If the device failed, all states are lost.
    """
    out, who, shape = self._pending[0]
    try:
      out = jax.device_get(out)
    except Exception:
      self._slots = None
      raise
    self._pending.popleft()
    now = self._clock()
    if shape is not None and self._read_at is not None:
      self.step_times.append(StepTime(*shape, 1e6 * (now - self._read_at)))
    self._read_at = now
    nan = f"{self._one.config.name}: logits turned NaN in {self._one.dtype}"
    emitted = []
    for at, slot, ticket in who:
      if self._tickets[slot] is not ticket or not out.live[at]:
        continue  # it has ended meanwhile
      told = emitted_of(slot, ticket, out, at, now, nan)
      if told.finish is not None:
        self._tickets[slot] = None
      emitted.append(told)
    return emitted

  def warm_up(
    self,
    sampling: Iterable[SamplingParams] = (SamplingParams(),),
    *,
    rows: Callable[[int, bool], Iterable[int | None]] = lambda *_: (None,),
    plan: Any = (),
  ) -> None:
    """Compiles all that requests with such settings need, however they meet.

    Args:
      sampling: a request of every kind.
      rows: of steps over so many slots, without and with a chunk of a prompt.
      plan: an allocation's, of the shapes that steps will have.

    Raises:
      SpecPilotError: rows that no pass has room in; requests in the slots.
    """
    if len(self.free_slots) < self.slots or self._pending:
      raise SpecPilotError("warm-up is for an engine without requests")
    self.admit(0, Request(id="warm-up", prompt=[0, 0], max_tokens=1))
    reader = [rider_of(0, np.zeros(n, np.int32), 0) for n in self.prefill_sizes]
    nobody = rider_of(0, np.zeros(self.rider_chunk, np.int32), 0)
    riders = (None, nobody) if self.rider_chunk else (None,)
    calls = []
    for features, bucket in itertools.product(
      unions(sampling), self.slot_buckets
    ):
      index = self._index(range(bucket))
      listed = np.zeros(index.size, bool)
      for rider in riders:
        for few in rows(bucket, rider is not None):
          limits = StepLimits(
            nodes=np.ones(self.slots, np.int32), rows=few, plan=plan
          )
          calls.append((features, index, listed, limits, rider))
    prefills = map(self.lowered_prefill, reader)
    steps = (self.lowered(*call) for call in calls)
    compilation.compile_all(itertools.chain(prefills, steps))
    for call in calls:
      self._run(*call)
    for r in reader:
      self._slots = self._prefill(self.params, self._slots, r)
    self.abort(0)
    self.wait()

  def lowered_prefill(self, rider) -> jax.stages.Lowered:
    """A pass over a chunk of a prompt."""
    return self._prefill.lower(self.params, self._slots, rider)

  def lowered(self, features, *call) -> jax.stages.Lowered:
    """A step of `Features`, index, listed slots, limits and a rider."""
    arguments, rows = self._arguments(*call)
    return self._step(features).lower(
      self.params, self._slots, *arguments, rows=rows
    )

  def wait(self) -> None:
    """Returns once the device has done all that it was given."""
    jax.block_until_ready(self._slots)

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    plan: Callable[[Any], StepLimits | None] = lambda load: None,
  ) -> list[RequestOutput]:
    """Decodes prompts, as many at once as there are slots.

    Args:
      sampling: of all prompts, or of each.
      plan: see `Scheduler`.

    Returns:
      An output per prompt, in their order.

    Raises:
      SpecPilotError: a request that cannot be decoded, or whose logits turned
        NaN.
    """
    if not isinstance(sampling, Sequence):
      sampling = [sampling or SamplingParams()] * len(prompts)
    scheduler = self.scheduler(plan=plan)
    for i, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
      room = max(self.max_seq_len - len(prompt), 1)
      scheduler.submit(
        Request(
          id=str(i),
          prompt=prompt,
          max_tokens=min(own.max_tokens, room),
          payload=own,
        )
      )
    outputs: dict[str, RequestOutput] = {}
    try:
      while scheduler.busy or scheduler.next_arrival_s is not None:
        for update in scheduler.advance(0.0):
          if update.finish == ERROR:
            raise SpecPilotError(update.figures.error)
          if update.finish is not None:
            outputs[update.request.id] = update.figures.output
    finally:  # Whatever broke off, the slots are free again.
      for slot in range(self.slots):
        self.abort(slot)
    return [outputs[str(i)] for i in range(len(prompts))]

  def scheduler(self, **settings: Any) -> Scheduler:
    """A scheduler that drives this engine.

    Args:
      settings: `plan` and `ride` of `Scheduler`.
    """
    return Scheduler(
      self,
      slots=self.slots,
      kv_tokens=self.slots * self.max_seq_len,
      page_tokens=self.max_seq_len,  # a slot
      max_seq_len=self.max_seq_len,
      chunk=self.prefill_chunk,
      **settings,
    )
