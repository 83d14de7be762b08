"""Records lattices along given outputs, with the engine's own functions.

Prompt and output are teacher-forced through the target in chunks, as in
prefill. At every output position the drafter drafts from exactly the committed
tokens before it, then takes the next one in: all positions of a chunk are one
scan in one executable.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import metrics
from experiments.cost_model import lattices
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.commit import commit
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target


class Session:
  """One request at a time, driven by hand.

  Args:
    target, drafter: as an engine has them; no drafter is one-token decoding.
    max_seq_len: prompt plus output tokens at most.
    prefill_chunk: tokens per teacher-forced pass.
    features: what the step must be able to do.
    num_drafts: drafts per step; None is the drafter's block.
  """

  def __init__(
    self,
    target: Target,
    drafter: draft_lib.Drafter | None,
    *,
    max_seq_len: int,
    prefill_chunk: int,
    features: sampling_lib.Features,
    num_drafts: int | None = None,
  ):
    graphdef, params = nnx.split(target)
    self.target = target
    self.drafter = drafter
    self.params: Any = (params, drafter.params if drafter else ())
    drafts = (num_drafts or drafter.num_slots) if drafter else 0
    self.num_drafts = drafts
    self.chunk = min(prefill_chunk, max_seq_len)
    self.capacity = max_seq_len + max(self.chunk, 1 + drafts)
    self.fns = step_lib.StepFns(
      config=target.config,
      graphdef=graphdef,
      drafter=drafter,
      num_drafts=drafts,
      acceptance="match",
      features=features,
    )
    self._reset = jax.jit(self.fns.reset, donate_argnums=0)
    self.prefill = jax.jit(self.fns.prefill, donate_argnums=1)
    self.step = jax.jit(self.fns.step, donate_argnums=1)
    self._record = jax.jit(self._record_chunk, donate_argnums=1)

  def request(self, sampling: sampling_lib.SamplingParams) -> step_lib.Request:
    """Settings of a request that no stop id ends."""
    acc = jnp.promote_types(self.target.dtype, jnp.float32)
    return step_lib.Request(
      sampling=sampling_lib.Sampling.of(sampling, acc),
      stop_ids=jnp.full((sampling_lib.MAX_STOP_IDS,), -1, jnp.int32),
    )

  def start(self, tokens: Sequence[int]) -> step_lib.Carry:
    """A carry whose anchor is the last token; all before it are committed."""
    drafter = self.drafter
    carry = step_lib.Carry(
      target=state_lib.init_state(
        self.target.config, self.capacity, self.target.dtype
      ),
      drafter=drafter.init_context(self.capacity) if drafter else None,
      anchor=jnp.zeros((), jnp.int32),
      remaining=jnp.zeros((), jnp.int32),
      history=None,
      done=jnp.zeros((), bool),
    )
    padded = np.zeros(self.capacity, np.int32)
    padded[: len(tokens)] = tokens
    room = self.capacity - len(tokens)
    carry = self._reset(carry, padded, np.int32(len(tokens)), np.int32(room))
    for chunk, count in self._chunks(tokens[:-1]):
      carry = self.prefill(self.params, carry, chunk, count)
    return carry

  def _chunks(self, tokens: Sequence[int]):
    for start in range(0, len(tokens), self.chunk):
      part = tokens[start : start + self.chunk]
      chunk = np.zeros(self.chunk, np.int32)
      chunk[: len(part)] = part
      yield chunk, np.int32(len(part))

  def _record_chunk(self, params, carry, tokens, count):
    drafter = self.drafter
    assert drafter is not None
    model = nnx.merge(self.fns.graphdef, params[0])
    nodes = state_lib.run_of(tokens, count, prefill=True)
    out = model(nodes, carry.target, drafter.taps)
    start = carry.target.length

    def row(context, i):
      position = start + i
      lattice = drafter.draft(params[1], context, tokens[i], position)
      context = drafter.extend(
        params[1],
        context,
        jax.lax.dynamic_slice_in_dim(tokens, i, 1),
        jax.lax.dynamic_slice_in_dim(out.taps, i, 1),
        position,
        (i < count).astype(jnp.int32),
      )
      return context, lattice

    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    context, recorded = jax.lax.scan(row, carry.drafter, index)
    carry = dataclasses.replace(
      carry,
      target=commit(carry.target, out.stash, index, nodes.count),
      drafter=context,
    )
    return carry, recorded

  def record(
    self,
    request: str,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    looped: bool,
  ) -> lattices.Recording:
    """The lattices along an output, on the host."""
    carry = self.start(prompt)
    parts = []
    # The drafter never sees the last token: nothing is drafted after it.
    for chunk, count in self._chunks([prompt[-1], *output[:-1]]):
      carry, lattice = self._record(self.params, carry, chunk, count)
      parts.append(jax.tree.map(lambda x, c=count: x[:c], lattice))
    parts = jax.device_get(parts)
    tokens, scores = lattices.rank(
      np.concatenate([p.tokens for p in parts]),
      np.concatenate([p.scores for p in parts]),
      self.target.config.valid_vocab,
    )
    return lattices.Recording(
      request=request,
      looped=looped,
      prompt_length=len(prompt),
      output=np.asarray(output, np.int32),
      tokens=tokens,
      scores=scores,
      order=None,
      counts=np.concatenate([p.count for p in parts]).astype(np.int16),
    )


def record_all(
  session: Session,
  records: Sequence[Mapping[str, Any]],
  progress: Callable[[str], None],
) -> list[lattices.Recording]:
  """Lattices of recorded requests.

  Args:
    session: of the drafter that decoded them.
    records: lines of requests.jsonl, all of one system.
    progress: called with a line after each request.

  Raises:
    SpecPilotError: requests that rejection sampling decoded, whose tokens
      depend on what was drafted: no other policy can be followed on them.
  """
  out = []
  for record in records:
    sampled = bool(record["sampling"]["temperature"])
    if sampled and record["options"].get("acceptance") == "rejection":
      raise SpecPilotError(
        f"request {record['request']} was decoded with rejection sampling; a"
        " replay needs the rule 'match', whose tokens no draft changes"
      )
    out.append(
      session.record(
        record["request"],
        record["prompt_ids"],
        record["output_ids"],
        looped=record["finish_reason"] == metrics.LOOP,
      )
    )
    progress(f"{record['request']}: {len(record['output_ids'])} positions")
  return out
