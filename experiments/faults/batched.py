"""Faults of batches, by name; a module of faulty trees alone.

A request is decoded in a batch of three: beside two mates with prompts of their
own, in a slot that another one had before, while mates end and others take
their slots. The request's outputs are what the checks see; without a fault they
are those of the request alone. Faults act where three decode at once, as those
that public engines had.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

SLOTS = 3
FIRST_TOKENS, MATE_TOKENS = 24, 96
"""Of the outputs of the first mate, whose slot the request gets, and of others:
one prompt is read at a time, so that short ones would hardly meet."""
CHUNKS = 4
"""Of what the engine reads of a prompt in one pass: more passes, more seams."""


def inject(name: str) -> None:
  """Puts a fault in place, and decodes in batches, for the life of this
  process."""
  from specpilot_jax.decoding.engine import Engine

  _FAULTS[name]()
  _replace(Engine, "stream", _stream)


def _replace(owner: Any, name: str, value: Any) -> None:
  setattr(owner, name, value)


def _batch(engine: Any, sampling: Any) -> Any:
  """The batch engine beside an engine, compiled; made once."""
  import jax
  from flax import nnx

  from specpilot_jax.decoding.batch.engine import BatchEngine

  if "_batch" not in vars(engine):
    engine._batch = BatchEngine(
      nnx.merge(engine.fns.graphdef, engine.params[0]),
      drafter=engine.drafter,
      tokenizer=engine.tokenizer,
      system=engine.system,
      slots=SLOTS,
      slot_buckets=(SLOTS,),
      max_seq_len=engine.max_seq_len,
      prefill_chunk=max(2, engine.prefill_chunk // CHUNKS),
      host_lag=engine.host_lag,
    )
    engine._batch.warm_up((sampling,))
    jax.block_until_ready(engine._batch._slots)
  return engine._batch


def _mates(prompt: Sequence[int], sampling: Any, room: int) -> Iterator[Any]:
  """Requests beside one: turned prompts, of several lengths."""
  from specpilot_jax.decoding.batch.scheduler import Request

  for i in itertools.count(1):
    at = i * 7 % len(prompt)
    turned = [*prompt[at:], *prompt[:at]][: max(1, len(prompt) - i % 5)]
    tokens = FIRST_TOKENS if i == 1 else MATE_TOKENS + 8 * (i % 4)
    turned = turned[: max(1, room - tokens)]
    yield Request(
      id=f"mate {i}",
      prompt=turned,
      max_tokens=max(1, min(tokens, room - len(turned))),
      payload=dataclasses.replace(
        sampling, seed=(sampling.seed + i) % 2**32, max_tokens=tokens,
        ignore_eos=True, stop=(), stop_token_ids=(),
      ),
    )  # fmt: skip


def _stream(self, prompt_ids, sampling):
  """`Engine.stream`, in a batch."""
  from specpilot_jax.decoding.batch.scheduler import ERROR, Request
  from specpilot_jax.decoding.request import StreamChunk
  from specpilot_jax.errors import SpecPilotError

  batch = _batch(self, sampling)
  mates = _mates(list(prompt_ids), sampling, self.max_seq_len)
  scheduler = batch.scheduler()
  for mate in itertools.islice(mates, SLOTS):
    scheduler.submit(mate)
  room = self.max_seq_len - len(prompt_ids)
  own = Request(
    id="own",
    prompt=list(prompt_ids),
    max_tokens=max(1, min(sampling.max_tokens, room)),
    payload=sampling,
  )
  scheduler.submit(own)  # It waits for the slot of the first that ends.
  try:
    while True:
      for update in scheduler.advance(0.0):
        if update.finish == ERROR:
          raise SpecPilotError(update.figures.error)
        if update.request is not own:
          if update.finish is not None:
            scheduler.submit(next(mates))
          continue
        if update.figures is None:  # It was admitted.
          continue
        output = update.figures.output
        if update.tokens or output is not None:
          yield StreamChunk(update.tokens, update.figures.text, output)
        if output is not None:
          return
  finally:
    for slot in range(SLOTS):
      batch.abort(slot)
    batch.wait()


def _crowded(nodes: Any) -> Any:
  """Whether all slots take part in a pass; traced."""
  return (nodes.count > 0).sum() >= SLOTS


def _rolled(tree: Any, condition: Any) -> Any:
  """What another request has, where a condition holds."""
  import jax
  import jax.numpy as jnp

  return jax.tree.map(
    lambda x: jnp.where(condition, jnp.roll(x, 1, axis=0), x), tree
  )


def _rows_permuted() -> None:
  """The target's choices are those for another request's rows."""
  from specpilot_jax.decoding.batch.step import BatchFns

  right = BatchFns._choices

  def choices(self, logits, own, packed):
    out = right(self, logits, own, packed)
    rows = packed.nodes.tokens.shape
    turned = _rolled(out.reshape(rows), _crowded(packed.nodes))
    return turned.reshape(out.shape)

  _replace(BatchFns, "_choices", choices)


def _keys_of_a_mate() -> None:
  """Attention reads another slot's keys and values."""
  from specpilot_jax.models.packed import Packed
  from specpilot_jax.models.state import AttentionState

  right = Packed.over

  def over(self, mix, rows, *request):
    if isinstance(request[0], AttentionState):
      other = _rolled(request[0], _crowded(self.nodes))
      request = (other, *request[1:])
    return right(self, mix, rows, *request)

  _replace(Packed, "over", over)


def _stash_of_a_mate() -> None:
  """What is committed is what another request's nodes left."""
  from specpilot_jax.decoding.batch.step import BatchFns

  right = BatchFns._pass

  def passed(self, params, own, drafted, packed, rider, ridden):
    seen, also = right(self, params, own, drafted, packed, rider, ridden)
    stash = _rolled(seen.stash, _crowded(packed.nodes))
    return dataclasses.replace(seen, stash=stash), also

  _replace(BatchFns, "_pass", passed)


def _slot_keeps_state() -> None:
  """A slot's next request begins with the recurrent state of its last."""
  from specpilot_jax.decoding.batch.step import BatchFns
  from specpilot_jax.models.state import GDNState

  right = BatchFns.admit

  def admit(self, slots, slot, *rest):
    new = right(self, slots, slot, *rest)
    layers = tuple(
      dataclasses.replace(fresh, recurrent=old.recurrent)
      if isinstance(fresh, GDNState)
      else fresh
      for fresh, old in zip(
        new.carry.target.layers, slots.carry.target.layers, strict=True
      )
    )
    target = dataclasses.replace(new.carry.target, layers=layers)
    carry = dataclasses.replace(new.carry, target=target)
    return dataclasses.replace(new, carry=carry)

  _replace(BatchFns, "admit", admit)


def _chunk_shifts() -> None:
  """Behind the first one, a chunk of a prompt stands a position late."""
  import jax.numpy as jnp

  from specpilot_jax.decoding.batch.step import BatchFns

  right = BatchFns.prefill

  def prefill(self, params, slots, rider):
    target = slots.carry.target
    late = jnp.where(target.length[rider.slot] > 0, 1, 0)
    length = target.length.at[rider.slot].add(late)
    carry = dataclasses.replace(
      slots.carry, target=dataclasses.replace(target, length=length)
    )
    slots = dataclasses.replace(slots, carry=carry)
    return right(self, params, slots, rider)

  _replace(BatchFns, "prefill", prefill)


_FAULTS = {
  "batch": lambda: None,
  "batch_rows_permuted": _rows_permuted,
  "batch_keys_of_a_mate": _keys_of_a_mate,
  "batch_stash_of_a_mate": _stash_of_a_mate,
  "batch_slot_keeps_state": _slot_keeps_state,
  "batch_chunk_shifts_position": _chunk_shifts,
}
NAMES = tuple(_FAULTS)
