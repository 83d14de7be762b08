"""The losslessness kit for batches: scripted requests in slots, and a referee.

Every request of a batch has been decoded by itself before, by the one-token
executable of the single engine. In the batch it must emit the same tokens, and
after each step its slot's state must be the referee's.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.batch.engine import BatchEngine
from specpilot_jax.decoding.batch.scheduler import Request, Scheduler
from specpilot_jax.decoding.sampling import Features, SamplingParams
from tests.decoding import kit, tree_kit

CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2, CHUNK + 2, 17, 5)
"""Of prompts. Their last token is in no chunk: CHUNK + 1 is one chunk."""
TOKENS = 18
BASE = kit.hybrid()
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
FILTERED = dataclasses.replace(
  SAMPLED,
  temperature=1.4,
  top_k=20,
  top_p=0.9,
  min_p=0.02,
  presence_penalty=0.3,
  frequency_penalty=0.4,
  repetition_penalty=1.2,
)
MIXED = (GREEDY, SAMPLED, FILTERED)


EVERYTHING = Features(greedy=False, filters=True, penalties=True)


class ScriptedBatchEngine(BatchEngine):
  """A batch engine that puts a request's script into its slot.

  Attributes:
    scripts: by request id, what `ScriptedDrafter.load` takes.
    placed: by request id, its slot.
    features: of every step, however little its requests need: it is compiled
      once. None for what they need.
  """

  features: Features | None = None

  def __init__(self, *args, **settings):
    super().__init__(*args, **settings)
    self.scripts: dict[str, dict[str, Any]] = {}
    self.placed: dict[str, int] = {}

  def _step(self, features):
    return super()._step(self.features or features)

  def admit(self, slot, request):
    super().admit(slot, request)
    self.placed[request.id] = slot
    drafter = self._one.drafter
    if not isinstance(drafter, kit.ScriptedDrafter):
      return
    drafter.load(**self.scripts[request.id])
    carry = self._slots.carry
    context = drafter.scripted(of_slot(carry.drafter, slot))
    carry = dataclasses.replace(
      carry,
      drafter=jax.tree.map(
        lambda x, own: x.at[slot].set(own), carry.drafter, context
      ),
    )
    self._slots = dataclasses.replace(self._slots, carry=carry)


def of_slot(tree: Any, slot: int) -> Any:
  """A slot's part of arrays that lead with slots."""
  return jax.tree.map(lambda x: x[slot], tree)


def snapshot(engine: BatchEngine, slot: int, penalties: bool) -> kit.Snapshot:
  """See `kit.snapshot`; penalty counts where the request has penalties."""
  # Whole arrays: a slice on the device is an executable for each slot.
  carry = of_slot(jax.tree.map(np.array, engine._slots.carry), slot)
  if not penalties:
    carry = dataclasses.replace(carry, history=None)
  return kit.snapshot(carry)


@functools.cache
def engine(
  kind: str = "chain",
  slots: int = 5,
  buckets: tuple[int, ...] | None = None,
  *,
  allocate: Any = None,
  rider_chunk: int = 0,
  acceptance: str = "match",
  features: Features | None = EVERYTHING,
  variable_length: bool = False,
) -> ScriptedBatchEngine:
  """A batch engine with scripts, shared by whoever asks for the same.

  Args:
    kind: `chain`, `tree`, or `none` for no drafter.
  """
  made = make(
    kind,
    slots,
    buckets,
    allocate=allocate,
    rider_chunk=rider_chunk,
    acceptance=acceptance,
    variable_length=variable_length,
  )
  made.features = features
  return made


def make(
  kind: str,
  slots: int,
  buckets: tuple[int, ...] | None = None,
  *,
  allocate: Any = None,
  rider_chunk: int = 0,
  acceptance: str = "match",
  variable_length: bool = False,
  like: ScriptedBatchEngine | None = None,
) -> ScriptedBatchEngine:
  """A fresh one: see `engine`.

  Args:
    like: one of the same shapes, whose compiled functions it shares, but for
      the steps.
  """
  drafter, system = None, SystemConfig()
  if kind != "none":
    drafter = tree_kit.LatticeDrafter(
      tree_kit.SLOTS, BASE, conditional=True, variable_length=variable_length
    )
    system = SystemConfig(acceptance=acceptance)
  if kind == "tree":
    system = SystemConfig(tree="best_first", node_budget=16)
  made = ScriptedBatchEngine(
    target=kit.build(BASE, "float64"),
    drafter=drafter,
    system=system,
    slots=slots,
    slot_buckets=buckets or (slots,),
    max_seq_len=64,
    prefill_chunk=CHUNK,
    rider_chunk=rider_chunk,
    allocate=allocate,
  )
  if like is not None:
    made._admit, made._prefill = like._admit, like._prefill
  return made


@functools.cache
def references(
  count: int, mixed: bool = False, seed: int = 0
) -> tuple[kit.Reference, ...]:
  """Runs of the single engine, the same for every batch."""
  one = kit.autoregressive(BASE, "float64", max_seq_len=64, prefill_chunk=CHUNK)
  rng = np.random.default_rng(seed)
  found = []
  for i in range(count):
    prompt = rng.integers(0, BASE.vocab_size, LENGTHS[i % len(LENGTHS)])
    sampling = MIXED[i % 3] if mixed else GREEDY
    sampling = dataclasses.replace(
      sampling, seed=100 + i, max_tokens=TOKENS - 5 * (i % 3)
    )
    found.append(kit.referee(one, prompt.tolist(), sampling))
  assert len({r.tokens for r in found}) == count
  return tuple(found)


class Run:
  """A batch from its first arrival to its last token.

  Args:
    engine: in whose slots.
    references: what each request is to emit; its index is its id.
    mode: of all scripts, see `kit.MODES`.
    states: whether states are compared too.
    slots: of the engine's, those that are used at most.
    settings: of the scheduler.
  """

  def __init__(
    self,
    engine: ScriptedBatchEngine,
    references: Sequence[kit.Reference],
    *,
    arrivals: Sequence[float] | None = None,
    mode: str = "mixed",
    states: bool = False,
    slots: int = 5,
    **settings: Any,
  ):
    self.engine, self.references = engine, references
    slots = min(slots, engine.slots)
    self.scheduler = Scheduler(
      engine,
      slots=slots,
      kv_tokens=slots * engine.max_seq_len,
      page_tokens=engine.max_seq_len,
      chunk=engine.prefill_chunk,
      **settings,
    )
    self.tokens: dict[str, list[int]] = {}
    self.finish: dict[str, str] = {}
    self.figures: list[tuple[str, Any]] = []
    self.slots: dict[str, int] = {}
    self.worst = 0.0
    self._states = states
    self._now = 0.0
    for i, reference in enumerate(references):
      name = str(i)
      engine.scripts[name] = dict(
        mode=mode, reference=reference.sequence, seed=i
      )
      self.tokens[name] = []
      self.scheduler.submit(
        Request(
          id=name,
          prompt=reference.prompt,
          max_tokens=reference.sampling.max_tokens,
          arrival_s=arrivals[i] if arrivals is not None else 0.0,
          payload=reference.sampling,
        )
      )

  @property
  def busy(self) -> bool:
    return self.scheduler.busy or self.scheduler.next_arrival_s is not None

  def abort(self, name: str) -> None:
    """Takes a request back."""
    if self.scheduler.abort(name) is not None:
      self.finish[name] = "abort"

  def advance(self) -> None:
    """One round; whatever is emitted is compared."""
    for update in self.scheduler.advance(self._now):
      name = update.request.id
      own = self.tokens[name]
      own += update.tokens
      reference = self.references[int(name)]
      if tuple(own) != reference.tokens[: len(own)]:
        raise kit.Mismatch(
          "tokens", f"request {name}: {own} instead of {reference.tokens}"
        )
      if update.admitted:
        self.slots[name] = self.engine.placed[name]
      if update.figures is not None:
        self.figures.append((name, update.figures))
      if update.finish is not None:
        self.finish[name] = update.finish
      elif self._states and update.tokens:
        self._compare(name, self.slots[name], len(own))
    self._now += 1.0

  def _compare(self, name: str, slot: int, emitted: int) -> None:
    reference = self.references[int(name)]
    expected = reference.states[emitted - 1]
    now = snapshot(self.engine, slot, "history.output" in expected)
    found = kit.differences(now, expected, drafter=reference.drafter)
    part = max(found, key=lambda n: (found[n], n))
    if found[part] > kit.STATE_TOLERANCE:
      raise kit.Mismatch(
        part.rsplit(".", 1)[-1] if part[0].isdigit() else part,
        f"request {name} in slot {slot}, {emitted} tokens: {part} differs by"
        f" {found[part]:.3g}",
      )
    self.worst = max(self.worst, found[part])

  def finished(self) -> Mapping[str, str]:
    """Runs to the end; finish reasons by request."""
    while self.busy:
      self.advance()
    for i, reference in enumerate(self.references):
      name = str(i)
      if self.finish[name] != "abort":
        if tuple(self.tokens[name]) != reference.tokens:
          raise kit.Mismatch("tokens", f"request {name} ended early")
    assert len(self.engine.free_slots) == self.engine.slots
    return self.finish

  @property
  def accepted(self) -> int:
    """Drafts accepted in all steps."""
    return sum(f.result.accepted for _, f in self.figures)
