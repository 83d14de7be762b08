"""Records lattices along given outputs, with the engine's own functions.

The passes of the run that wrote an output are repeated: each verifies what the
output says next and commits what that run's pass committed, so that the drafter
reads taps rounded as they were then. At every output position it drafts from
exactly the committed tokens before it; one executable records a pass.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import metrics, results
from experiments.cost_model import lattices
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.commit import commit
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target


class Session:
  """One request at a time, driven by hand.

  Args:
    target, drafter: as an engine has them; no drafter is one-token decoding.
    max_seq_len: prompt plus output tokens at most.
    prefill_chunk: prompt tokens per pass.
    features: what the step must be able to do.
    system: how a step decodes; a chain of the drafter's block by default.
    coarse: the target that level 1 of two-level verification runs, or one in
      W12 whose view it reads; its choices are recorded then.
  """

  def __init__(
    self,
    target: Target,
    drafter: draft_lib.Drafter | None,
    *,
    max_seq_len: int,
    prefill_chunk: int,
    features: sampling_lib.Features,
    system: SystemConfig | None = None,
    coarse: Target | None = None,
  ):
    graphdef, params = nnx.split(target)
    self.target = target
    self.drafter = drafter
    own = drafter.params if drafter else ()
    self._coarse, coarse_params = None, ()
    if coarse is not None:
      self._coarse, coarse_params = nnx.split(coarse)
    # Not `step.Params`: kernels are told apart by the names of arguments.
    self.params: Any = (params, own, coarse_params)
    system = SystemConfig() if system is None else system
    self.policy = policy = Policy.of(system, drafter)
    self.max_seq_len = max_seq_len
    self.chunk = min(prefill_chunk, max_seq_len)
    self.capacity = max_seq_len + max(self.chunk, policy.path)
    self.fns = step_lib.StepFns(
      config=target.config,
      graphdef=graphdef,
      drafter=drafter,
      policy=policy,
      kernels=target.kernels,
      acceptance="match",
      features=features,
    )
    self._reset = jax.jit(self.fns.reset, donate_argnums=0)
    self.prefill = jax.jit(self.fns.prefill, donate_argnums=1)
    self.step = jax.jit(self.fns.step, donate_argnums=1)
    self._record = jax.jit(self._record_pass, donate_argnums=1)

  @property
  def depths(self) -> int:
    """Tokens behind a commit at which level 1's choices are recorded: those of
    the longest trunk."""
    return 1 + (self.drafter.num_slots if self.drafter else 0)

  def request(self, sampling: sampling_lib.SamplingParams) -> step_lib.Request:
    """Settings of a request that no stop id ends."""
    acc = jnp.promote_types(self.target.dtype, jnp.float32)
    return step_lib.Request(
      sampling=sampling_lib.Sampling.of(sampling, acc),
      stop_ids=jnp.full((sampling_lib.MAX_STOP_IDS,), -1, jnp.int32),
      limits=self.policy.limits(),
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

  def _record_pass(self, params, carry, ahead, count, emitted, request):
    """The lattices before and inside one pass of the run, then its commit.

    Args:
      ahead: the anchor and what follows it, enough for level 1 to go on from
        the last of the pass.
      count: nodes of the pass that are known.
      emitted: tokens that the pass committed.
      request: the noise of level 1's choices.

    Returns:
      The carry behind the pass; lattices, and level 1's choices where they are
      recorded, stacked over the nodes, those of the first `emitted` filled in.
    """
    drafter = self.drafter
    assert drafter is not None
    model = nnx.merge(self.fns.graphdef, params[0])
    tokens = ahead[: self.policy.path]
    nodes = state_lib.run_of(tokens, count, prefill=False)
    out = model(nodes, carry.target, drafter.taps)
    start = carry.target.length

    def context(committed):
      return drafter.extend(
        params[1], carry.drafter, tokens, out.taps, start, committed
      )

    def draft(i):
      return drafter.draft(params[1], context(i), tokens[i], start + i)

    def choices(i):
      """What level 1 chooses along the output, from the exact state at i."""
      if self._coarse is None:
        return ()
      state = commit(carry.target, out.stash, path, i)
      run = jax.lax.dynamic_slice_in_dim(ahead, i, self.depths)
      exact = dataclasses.replace(carry, target=state)
      looking = nnx.merge(self._coarse, params[2])
      return self.fns.choices(
        layers.read_view(looking, SystemConfig().view),
        exact,
        request,
        state_lib.run_of(run, self.depths, prefill=False),
      )

    def both(i):
      return draft(i), choices(i)

    def row(i, recorded):
      return jax.tree.map(lambda x, one: x.at[i].set(one), recorded, both(i))

    path = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    shapes = jax.eval_shape(both, jnp.zeros((), jnp.int32))
    empty = jax.tree.map(
      lambda x: jnp.zeros((tokens.shape[0], *x.shape), x.dtype), shapes
    )
    recorded = jax.lax.fori_loop(0, emitted, row, empty)
    carry = dataclasses.replace(
      carry,
      target=commit(carry.target, out.stash, path, emitted),
      drafter=context(emitted),
    )
    return carry, recorded

  def record(
    self,
    request: str,
    prompt: Sequence[int],
    output: Sequence[int],
    emitted: Sequence[int],
    *,
    looped: bool,
    max_tokens: int | None = None,
    sampling: sampling_lib.SamplingParams | None = None,
  ) -> lattices.Recording:
    """The lattices along an output, on the host.

    Args:
      emitted: tokens of each pass of the run that wrote the output.
      looped: whether the output ended as a loop.
      max_tokens: that the request asked for; None where it is not known.
      sampling: how it was drawn; greedy by default.

    Raises:
      SpecPilotError: passes that do not make up the output, or one of more
        tokens than this session verifies.
    """
    size = self.policy.path
    if sum(emitted) != len(output) or not all(0 < e <= size for e in emitted):
      raise SpecPilotError(
        f"request {request}: {len(output)} tokens in passes of"
        f" {list(emitted)}; a pass has 1 to {size}"
      )
    carry = self.start(prompt)
    # The drafter never sees the last token: nothing is drafted after it.
    known = np.asarray([prompt[-1], *output[:-1]], np.int32)
    request_of = self.request(sampling or sampling_lib.SamplingParams())
    rows, at = [], 0
    room = size + self.depths
    for taken in emitted:
      ahead = known[at : at + room]
      count = min(size, ahead.size)
      carry, found = self._record(
        self.params,
        carry,
        np.pad(ahead, (0, room - ahead.size)),
        np.int32(count),
        np.int32(taken),
        request_of,
      )
      rows.append(jax.tree.map(lambda x, n=taken: x[:n], found))
      at += taken
    rows = jax.device_get(rows)
    parts = [lattice for lattice, _ in rows]
    level_one = None
    if self._coarse is not None:
      chosen = np.concatenate([choices for _, choices in rows])
      # No id is negative.
      padded = np.pad(output, (0, self.depths), constant_values=-1)
      level_one = (
        chosen
        == np.lib.stride_tricks.sliding_window_view(padded, self.depths)[
          : len(output)
        ]
      )
    tokens, scores, order = lattices.rank(
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
      order=order,
      counts=np.concatenate([p.count for p in parts]).astype(np.int16),
      limit=min(max_tokens or 0, self.max_seq_len - len(prompt)),
      level_one=level_one,
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
        record["metrics"]["emitted_per_step"],
        looped=record["finish_reason"] == metrics.LOOP,
        max_tokens=record["sampling"]["max_tokens"],
        sampling=results.sampling_of(record),
      )
    )
    progress(f"{record['request']}: {len(record['output_ids'])} positions")
  return out
