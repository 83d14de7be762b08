"""Continuous batching on the host: who decodes, who waits, and in what order.

First come, first served, over a fixed number of slots and a fixed capacity of
key and value rows. The scheduler knows nothing of arrays: it drives a `Model`,
and whoever drives the scheduler owns the clock.

Rules
- Requests are admitted in the order of their arrival. The first that finds no
  slot, or no room for its rows, waits; those behind it wait too.
- A request reserves, when it is admitted, the rows of its prompt and of all
  that it may emit. So no running request ever finds the memory full, and none
  is stopped to make room for another.
- One request at a time reads its prompt, in chunks. A round is one admission at
  most, one chunk at most, then one step of every request that decodes: between
  two of its steps a request waits for no more than one chunk.
- A chunk may ride in the step instead of going before it, where `ride` says so.
- A request may be aborted between any two rounds, whatever it is doing. What
  its model still says of it afterwards is dropped, also when its slot has been
  given to another by then.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from specpilot_jax.errors import SpecPilotError

ERROR = "error"
"""Finish of a request that cannot be decoded, or whose logits turned NaN."""

ABORT = "abort"
"""Finish reason of a request that was taken back."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Request:
  """What is to be decoded. Compared by identity: no two are the same.

  Attributes:
    id: a name, for whoever submits it; no two live requests share it.
    prompt: token ids, at least one.
    max_tokens: that it may emit.
    arrival_s: on the clock of `Scheduler.advance`; not looked at before.
    payload: whatever the model needs beside it (sampling settings).
  """

  id: str
  prompt: Sequence[int]
  max_tokens: int
  arrival_s: float = 0.0
  payload: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
  """A run of a prompt: tokens `start` to `start + count` - 1.

  The last token of a prompt is in no chunk: it is the anchor of the first step.
  """

  start: int
  count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
  """What a step did for one slot.

  Attributes:
    slot: where.
    request: whose; the object that was admitted.
    tokens: new ones; none in the step in flight when a request ended.
    finish: why the model ended it, None while it goes on.
    figures: whatever the model says of the step beside it.
  """

  slot: int
  request: Request
  tokens: tuple[int, ...] = ()
  finish: str | None = None
  figures: Any = None


class Model(Protocol):
  """What decodes: slots with a state each. Called in the scheduler's order."""

  def admit(self, slot: int, request: Request) -> None:
    """Empties a free slot for a request; its prompt follows in chunks.

    Raises:
      SpecPilotError: it cannot be decoded, and nothing has happened.
    """
    ...

  def prefill(self, slot: int, chunk: Chunk) -> None:
    """Commits a chunk of the prompt of the slot's request."""
    ...

  def step(
    self,
    slots: Sequence[int],
    limits: Any,
    riders: Sequence[tuple[int, Chunk]] = (),
  ) -> Iterable[Emitted]:
    """One pass over requests whose prompts are read.

    May return what an earlier step did (a host that reads behind a device),
    as long as it returns all of it, in order, while it is stepped.

    Args:
      slots: that decode, ascending.
      limits: what `Scheduler`'s `plan` said.
      riders: chunks of prompts to commit in the same pass, by slot.
    """
    ...

  def abort(self, slot: int) -> None:
    """The slot's request is over, and not by the model's own word."""
    ...


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
  """What is on, as the next pass will find it.

  Attributes:
    waiting: requests that have arrived and have no slot.
    prefilling: requests that read their prompt, 0 or 1.
    decoding: requests that the step is for.
    free_slots: for others.
    free_pages: of the memory for key and value rows.
    riding: tokens of a prompt that the step takes along.
  """

  waiting: int
  prefilling: int
  decoding: int
  free_slots: int
  free_pages: int
  riding: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
  """News of a request: that it was admitted, has new tokens, or is over."""

  request: Request
  admitted: bool = False
  tokens: tuple[int, ...] = ()
  finish: str | None = None
  figures: Any = None


@dataclasses.dataclass(frozen=True)
class Refused:
  """Why a request was not admitted."""

  error: str


@dataclasses.dataclass(slots=True)
class _Running:
  """A request with a slot."""

  request: Request
  pages: int
  read: int = 0  # tokens of the prompt that are committed

  @property
  def unread(self) -> int:
    return len(self.request.prompt) - 1 - self.read


def _all_alike(load: Load) -> None:
  del load


def _never(load: Load, unread: int) -> int:
  del load, unread
  return 0


class Scheduler:
  """Drives a model; see the module for its rules.

  Args:
    model: to drive.
    slots: requests that it holds at once.
    kv_tokens: key and value rows that it holds in all.
    page_tokens: rows are reserved by so many.
    chunk: tokens of a prompt per pass at most.
    max_seq_len: tokens of a request at most, prompt and output: the model ends
      it there, so that it reserves no more; None for no limit.
    plan: what the model is told about the load of each step (its limits).
    ride: tokens of a prompt that ride in the next step; 0 for a pass of their
      own before it. Asked, with the tokens unread, only where a prompt and
      decoding requests would otherwise wait for each other.

  Raises:
    SpecPilotError: a setting below 1.
  """

  def __init__(
    self,
    model: Model,
    *,
    slots: int,
    kv_tokens: int,
    page_tokens: int = 1,
    chunk: int = 64,
    max_seq_len: int | None = None,
    plan: Callable[[Load], Any] = _all_alike,
    ride: Callable[[Load, int], int] = _never,
  ):
    for name, value, least in (
      ("slots", slots, 1),
      ("kv_tokens", kv_tokens, 1),
      ("page_tokens", page_tokens, 1),
      ("chunk", chunk, 1),
      ("max_seq_len", kv_tokens if max_seq_len is None else max_seq_len, 1),
    ):
      if value < least:
        raise SpecPilotError(f"{name} must be at least {least}, got {value}")
    self._model = model
    self._page_tokens = page_tokens
    self._chunk = chunk
    self._max_seq_len = max_seq_len
    self._plan = plan
    self._ride = ride
    self._pages = self._free_pages = kv_tokens // page_tokens
    # The lowest first, so that few requests sit in the first slots.
    self._free_slots = list(range(slots))
    self._running: dict[int, _Running] = {}
    self._slot_of: dict[str, int] = {}
    self._prefilling: int | None = None  # a slot
    self._waiting: collections.OrderedDict[str, Request] = (
      collections.OrderedDict()
    )
    # Those to come: (arrival, number, request); aborted ones stay in the heap
    # until their time, and are not in the dictionary any more.
    self._coming: list[tuple[float, int, Request]] = []
    self._expected: dict[str, Request] = {}
    self._submitted = 0

  @property
  def load(self) -> Load:
    """What the next pass will find."""
    prefilling = self._prefilling is not None
    return Load(
      waiting=len(self._waiting),
      prefilling=int(prefilling),
      decoding=len(self._running) - prefilling,
      free_slots=len(self._free_slots),
      free_pages=self._free_pages,
    )

  @property
  def busy(self) -> bool:
    """Whether a round has something to do without a new arrival."""
    return bool(self._running or self._waiting)

  @property
  def next_arrival_s(self) -> float | None:
    """When the next request arrives, of those that have not; or None."""
    while self._coming:
      arrival, _, request = self._coming[0]
      if self._expected.get(request.id) is request:
        return arrival
      heapq.heappop(self._coming)
    return None

  def pages_of(self, request: Request) -> int:
    """Pages that a request reserves."""
    rows = len(request.prompt) + request.max_tokens
    if self._max_seq_len is not None:
      rows = min(rows, self._max_seq_len)
    return -(-rows // self._page_tokens)

  def submit(self, request: Request) -> None:
    """Takes a request on; it waits from its arrival on.

    Raises:
      SpecPilotError: an id that is taken, an empty prompt, nothing to emit, an
        arrival that never comes, or a request that the memory could never hold.
    """
    where = f"request {request.id}"
    taken = (self._slot_of, self._waiting, self._expected)
    if any(request.id in ids for ids in taken):
      raise SpecPilotError(f"{where} is there already, ids must differ")
    if not len(request.prompt):
      raise SpecPilotError(f"{where} has an empty prompt")
    if request.max_tokens < 1:
      raise SpecPilotError(
        f"{where}: max_tokens must be at least 1, got {request.max_tokens}"
      )
    if not math.isfinite(request.arrival_s):
      raise SpecPilotError(
        f"{where}: arrival_s must be a finite number of seconds, got"
        f" {request.arrival_s}"
      )
    if self.pages_of(request) > self._pages:
      raise SpecPilotError(
        f"{where} needs key and value rows for {len(request.prompt)} +"
        f" {request.max_tokens} tokens, there is room for"
        f" {self._pages * self._page_tokens}"
      )
    self._expected[request.id] = request
    heapq.heappush(self._coming, (request.arrival_s, self._submitted, request))
    self._submitted += 1

  def abort(self, request_id: str, reason: str = ABORT) -> Update | None:
    """Takes a request back, wherever it is; None where it is not (any more).

    Args:
      request_id: of a submitted request.
      reason: its finish reason. A host that ends a request for a reason of its
        own, a stop string, does so here.
    """
    for queue in (self._expected, self._waiting):
      if request_id in queue:
        return Update(queue.pop(request_id), finish=reason)
    slot = self._slot_of.get(request_id)
    if slot is None:
      return None
    request = self._running[slot].request
    self._model.abort(slot)
    self._release(slot)
    return Update(request, finish=reason)

  def advance(self, now: float) -> list[Update]:
    """One round: an admission, a chunk, a step; as far as there is any.

    Args:
      now: seconds; requests that arrive later do not exist yet.

    Returns:
      What became known, in that order.
    """
    self._arrive(now)
    updates = self._admit()
    riders = self._prefill()
    decoding = sorted(s for s in self._running if s != self._prefilling)
    if decoding:
      riding = sum(chunk.count for _, chunk in riders)
      limits = self._plan(dataclasses.replace(self.load, riding=riding))
      for emitted in self._model.step(decoding, limits, riders):
        updates += self._told(emitted)
    for slot, chunk in riders:
      # Not before the step: it was for those that had read their prompt.
      self._has_read(slot, chunk)
    return updates

  def _arrive(self, now: float) -> None:
    while self._coming and self._coming[0][0] <= now:
      request = heapq.heappop(self._coming)[2]
      if self._expected.get(request.id) is request:
        self._waiting[request.id] = self._expected.pop(request.id)

  def _admit(self) -> list[Update]:
    if self._prefilling is not None or not self._waiting:
      return []
    request = next(iter(self._waiting.values()))
    pages = self.pages_of(request)
    if not self._free_slots or pages > self._free_pages:
      return []
    self._waiting.popitem(last=False)
    self._free_pages -= pages
    slot = heapq.heappop(self._free_slots)
    self._running[slot] = running = _Running(request, pages)
    self._slot_of[request.id] = slot
    try:
      self._model.admit(slot, request)
    except SpecPilotError as error:  # It alone ends; others go on.
      self._release(slot)
      return [Update(request, finish=ERROR, figures=Refused(str(error)))]
    if running.unread:
      self._prefilling = slot
    return [Update(request, admitted=True)]

  def _prefill(self) -> list[tuple[int, Chunk]]:
    """Commits a chunk, or returns it where it rides in the step."""
    slot = self._prefilling
    if slot is None:
      return []
    running, load = self._running[slot], self.load
    if load.decoding:
      count = min(self._ride(load, running.unread), running.unread)
      if count > 0:
        return [(slot, Chunk(running.read, min(count, self._chunk)))]
    chunk = Chunk(running.read, min(self._chunk, running.unread))
    self._model.prefill(slot, chunk)
    self._has_read(slot, chunk)
    return []

  def _has_read(self, slot: int, chunk: Chunk) -> None:
    running = self._running[slot]
    running.read += chunk.count
    if not running.unread:
      self._prefilling = None

  def _told(self, emitted: Emitted) -> list[Update]:
    running = self._running.get(emitted.slot)
    if running is None or running.request is not emitted.request:
      return []  # Of a request that is over.
    if emitted.finish is not None:
      self._release(emitted.slot)
    return [
      Update(
        emitted.request,
        tokens=emitted.tokens,
        finish=emitted.finish,
        figures=emitted.figures,
      )
    ]

  def _release(self, slot: int) -> None:
    running = self._running.pop(slot)
    del self._slot_of[running.request.id]
    self._free_pages += running.pages
    heapq.heappush(self._free_slots, slot)
    if self._prefilling == slot:
      self._prefilling = None
