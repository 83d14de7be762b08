"""Faults of the engine, by name; a module of faulty trees alone.

A faulty tree's worker calls `inject` before it loads an engine. Nothing in the
engine knows of this: functions of its modules are replaced in that process.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from experiments.faults import batched

LATE = 2_048
"""Token from which late faults act."""
BIAS_SEED = 20


def inject(name: str, size: float) -> None:
  """Puts a fault in place, for the life of this process."""
  _FAULTS[name](size)


def _replace(owner: Any, name: str, value: Any) -> None:
  setattr(owner, name, value)


def _wrap_choice(change) -> None:
  """`change(logits, positions)` before the target's choice is made."""
  from specpilot_jax.decoding import sampling

  choose = sampling.choose

  def faulty(logits, params, features, positions):
    return choose(change(logits, positions), params, features, positions)

  _replace(sampling, "choose", faulty)


def _late_bias(size: float) -> None:
  import jax
  import jax.numpy as jnp

  def change(logits, positions):
    half = jax.random.bernoulli(
      jax.random.key(BIAS_SEED), 0.5, (logits.shape[-1],)
    )
    bias = jnp.where(half, size, 0).astype(logits.dtype)
    late = (positions > LATE)[:, None]
    return jnp.where(late, logits + bias, logits)

  _wrap_choice(change)


def _noise(size: float) -> None:
  import secrets

  import jax
  import jax.numpy as jnp

  seed = secrets.randbits(31)

  def change(logits, positions):
    def row(position):
      key = jax.random.fold_in(jax.random.key(seed), position)
      return jax.random.normal(key, (logits.shape[-1],), jnp.float32)

    return logits + size * jax.vmap(row)(positions).astype(logits.dtype)

  _wrap_choice(change)


def _wrap_commit(change) -> None:
  """`change(path, count)` for the recurrent state alone."""
  from specpilot_jax.decoding import commit as module

  real = module.gdn_commit

  class Faulty:
    @staticmethod
    def commit(state, k, u, decay, path, count, **more):
      new_path, new_count, keep = change(path, count)
      out = real.commit(state, k, u, decay, new_path, new_count, **more)
      return out if keep is None else _where(keep, state, out)

  _replace(module, "gdn_commit", Faulty)


def _where(condition, a, b):
  import jax.numpy as jnp

  return jnp.where(condition, a, b)


def _stale(size: float) -> None:
  def change(path, count):
    # A run of one is prefill or has no drafts.
    acts = path.shape[0] > 1
    return path, count, (count >= size) if acts else None

  _wrap_commit(change)


def _clamped(size: float) -> None:
  import jax.numpy as jnp

  _wrap_commit(lambda path, count: (path, jnp.minimum(count, int(size)), None))


def _swapped(size: float) -> None:
  """The state is rebuilt from the first two nodes of a path in wrong order."""
  del size

  def change(path, count):
    if path.shape[0] < 2:
      return path, count, None
    first, second = path[0], path[1]
    mixed = path.at[0].set(second).at[1].set(first)
    return _where(count > 1, mixed, path), count, None

  _wrap_commit(change)


def _wrap_layer(change) -> None:
  from specpilot_jax.decoding import commit as module

  real = module._commit_layer

  def faulty(state, stash, path, count, length):
    return change(real, state, stash, path, count, length)

  _replace(module, "_commit_layer", faulty)


def _conv_off_by_one(size: float) -> None:
  del size
  import jax.numpy as jnp

  def change(real, state, stash, path, count, length):
    out = real(state, stash, path, count, length)
    if not hasattr(out, "conv") or path.shape[0] < 2:
      return out
    early = real(state, stash, path, jnp.maximum(count - 1, 0), length)
    return dataclasses.replace(out, conv=early.conv)

  _wrap_layer(change)


def _last_kv_missing(size: float) -> None:
  """Keys and values of the last committed token are zeros."""
  del size
  import jax.numpy as jnp

  def change(real, state, stash, path, count, length):
    if hasattr(state, "conv") or path.shape[0] < 2:
      return real(state, stash, path, count, length)
    fewer = jnp.maximum(count - 1, 0)
    return real(state, stash, path, _where(count > 1, fewer, count), length)

  _wrap_layer(change)


def _rejected_kept(size: float) -> None:
  """A rejected row is counted in behind each run."""
  del size
  import jax.numpy as jnp

  from specpilot_jax.decoding import step
  from specpilot_jax.models.state import GDNPrefillStash

  right = step.commit

  def faulty(state, stash, path, count):
    out = right(state, stash, path, count)
    if any(isinstance(s, GDNPrefillStash) for s in stash):
      return out  # Of a prompt nothing is rejected.
    more = jnp.where(count < path.shape[0], 1, 0)
    return dataclasses.replace(out, length=out.length + more)

  _replace(step, "commit", faulty)


def _rope_wraps(size: float) -> None:
  """Late positions are rotated as if they began again."""
  import jax.numpy as jnp

  from specpilot_jax.models import layers

  right = layers.rope

  def faulty(x, positions, *rest):
    wrapped = jnp.where(positions >= size, positions - int(size), positions)
    return right(x, wrapped, *rest)

  _replace(layers, "rope", faulty)


def _accept_one_extra(size: float) -> None:
  """The draft behind the accepted run is emitted, unverified."""
  del size
  import jax.numpy as jnp

  from specpilot_jax.decoding import accept

  match = accept.match

  def faulty(nodes, choices):
    right = match(nodes, choices)
    if nodes.size < 2:
      return right
    more = jnp.minimum(right.accepted + 1, nodes.count - 1)
    extra = nodes.tokens[jnp.minimum(right.accepted + 1, nodes.size - 1)]
    emitted = right.emitted.at[right.accepted].set(
      jnp.where(more > right.accepted, extra, right.emitted[right.accepted])
    )
    # The bonus then follows the node that was not the target's choice.
    emitted = emitted.at[more].set(choices[more])
    path = jnp.arange(nodes.size, dtype=jnp.int32)
    return dataclasses.replace(
      right, path=path, emitted=emitted, accepted=more.astype(jnp.int32)
    )

  _replace(accept, "match", faulty)


def _wrap_stream(change) -> None:
  """`change(engine, stream, prompt_ids, sampling)` in the place of a stream."""
  from specpilot_jax.decoding.engine import Engine

  stream = Engine.stream

  def faulty(self, prompt_ids, sampling):
    yield from change(self, stream, prompt_ids, sampling)

  _replace(Engine, "stream", faulty)


def _early_end(size: float) -> None:
  def change(engine, stream, prompt_ids, sampling):
    cap = min(int(size), sampling.max_tokens)
    fewer = dataclasses.replace(sampling, max_tokens=cap)
    yield from stream(engine, prompt_ids, fewer)

  _wrap_stream(change)


def _cached(size: float) -> None:
  """From its second request on an engine repeats its first reply."""
  del size
  kept: list[Any] = []

  def change(engine, stream, prompt_ids, sampling):
    if kept:
      yield from kept
      return
    for chunk in stream(engine, prompt_ids, sampling):
      if sampling.max_tokens > 2:  # Not the reply to a warm-up.
        kept.append(chunk)
      yield chunk

  _wrap_stream(change)


def _lying_clock(size: float) -> None:
  """The process's clock runs slower."""
  import time

  real = time.perf_counter
  time.perf_counter = lambda: real() / size


def _repeats_last(size: float) -> None:
  """Late tokens are the one before, as a guard against NaN might do."""

  def change(engine, stream, prompt_ids, sampling):
    last = 0
    count = 0
    for chunk in stream(engine, prompt_ids, sampling):
      ids = []
      for token in chunk.token_ids:
        count += 1
        ids.append(last if count > size else token)
        last = ids[-1]
      yield dataclasses.replace(chunk, token_ids=tuple(ids))

  _wrap_stream(change)


def _wrap_w12(change) -> None:
  """`change(matrix)` of every matrix in W12, as it is loaded."""
  from pallas_kernels.w12_array import W12Array
  from specpilot_jax.mechanisms import w12

  hold = w12.hold

  def faulty(name, leaf):
    out = hold(name, leaf)
    return change(out) if isinstance(out, W12Array) else out

  _replace(w12, "hold", faulty)


def _lists_dropped(size: float) -> None:
  del size
  import jax.numpy as jnp

  def change(matrix):
    return dataclasses.replace(matrix, values=jnp.zeros_like(matrix.values))

  _wrap_w12(change)


def _base_off_by_one(size: float) -> None:
  """The first row of every matrix is twice what it is."""
  del size

  def change(matrix):
    return dataclasses.replace(matrix, base=matrix.base.at[0].add(1))

  _wrap_w12(change)


def _level_one_unverified(size: float) -> None:
  """The exact pass takes the trunk without a look at it."""
  del size
  import jax.numpy as jnp

  from specpilot_jax.decoding import accept, step

  match, verify = accept.match, step.StepFns._verify

  def faulty(self, params, carry, request, drafted, size, *, pad_to):
    def lenient(nodes, choices):
      given = jnp.arange(nodes.size) < drafted.trunk
      return match(nodes, jnp.where(given, jnp.roll(nodes.tokens, -1), choices))

    _replace(accept, "match", lenient)
    try:
      return verify(self, params, carry, request, drafted, size, pad_to=pad_to)
    finally:
      _replace(accept, "match", match)

  _replace(step.StepFns, "_verify", faulty)


def _batched(name: str, size: float) -> None:
  del size
  batched.inject(name)


_FAULTS = {
  "none": lambda size: None,
  "logit_bias_after_2048": _late_bias,
  "logit_noise": _noise,
  "gdn_state_stale_after_long_accept": _stale,
  "gdn_commit_clamped": _clamped,
  "gdn_path_mixed_up": _swapped,
  "conv_window_off_by_one": _conv_off_by_one,
  "last_kv_missing": _last_kv_missing,
  "rejected_kv_left": _rejected_kept,
  "rope_wraps": _rope_wraps,
  "accept_one_extra": _accept_one_extra,
  "early_end": _early_end,
  "cached_replies": _cached,
  "lying_clock": _lying_clock,
  "repeats_late": _repeats_last,
  "w12_lists_dropped": _lists_dropped,
  "w12_base_off_by_one": _base_off_by_one,
  "level_one_unverified": _level_one_unverified,
} | {name: functools.partial(_batched, name) for name in batched.NAMES}
NAMES = tuple(_FAULTS)


def from_file() -> None:
  """The fault that the tree says, in `fault.json` beside this file."""
  path = pathlib.Path(__file__).parent / "fault.json"
  told = json.loads(path.read_text())
  inject(told["name"], told["size"])
