"""Faults put in on purpose: the losslessness checks must see each of them.

The faults are those that public engines had, patched in from outside. A check
that lets one through proves nothing when it passes.
"""

import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from jax import lax

from pallas_kernels import gated_delta as kernels
from pallas_kernels import tree_attention as attention_kernels
from specpilot_jax.decoding import accept
from specpilot_jax.decoding import commit as commit_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import attention, gated_delta
from tests.decoding import kit

CONFIG = kit.hybrid()
K = 5
TOKENS = 40
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=11)
STOPPED = dataclasses.replace(GREEDY, max_tokens=TOKENS - 1)
"""Ends at a stop id in the middle of an accepted run."""
PENALIZED = dataclasses.replace(GREEDY, frequency_penalty=0.8)

_kernel_commit = kernels.commit
_tree_verify = kernels.tree_verify
_tree_attention = attention_kernels.tree_attention
_commit = commit_lib.commit
_match = accept.match
_cut = accept.cut
_choose = sampling_lib.choose
_penalize = sampling_lib.penalize
_conv_windows = gated_delta.conv_windows
_rope = attention.layers.rope
_extend = step_lib.StepFns.extend


def nothing():
  """The control."""
  return mock.patch.object(step_lib, "commit", _commit)


def stale_after_full_accept():
  def commit(state, k, u, decay, path, count):
    new = _kernel_commit(state, k, u, decay, path, count)
    return jnp.where(count == path.shape[0], state, new)

  return mock.patch.object(kernels, "commit", commit)


def state_keeps_rejected_tokens():
  """Only the attention layers are rolled back."""

  def commit(state, k, u, decay, path, count):
    whole = jnp.where(count > 0, path.shape[0], 0)
    return _kernel_commit(state, k, u, decay, path, whole)

  return mock.patch.object(kernels, "commit", commit)


def commit_clamped_at_3():
  """The bound of the convolution's history used as the accepted count."""

  def commit(state, k, u, decay, path, count):
    return _kernel_commit(state, k, u, decay, path, jnp.minimum(count, 3))

  return mock.patch.object(kernels, "commit", commit)


def decay_after_delta():
  def tree_verify(q, k, v, g, beta, state, mask):
    repeat = v.shape[1] // k.shape[1]
    s, outputs, updates = state, [], []
    for i in range(q.shape[0]):
      key, query = (jnp.repeat(x[i], repeat, axis=0) for x in (k, q))
      u = beta[i][:, None] * (v[i] - jnp.einsum("hkv,hk->hv", s, key))
      s = s + key[:, :, None] * u[:, None]
      s = jnp.exp(g[i])[:, None, None] * s
      outputs.append(jnp.einsum("hkv,hk->hv", s, query))
      updates.append(u)
    del mask
    return jnp.stack(outputs), jnp.stack(updates), jnp.cumsum(g, axis=0)

  return mock.patch.object(kernels, "tree_verify", tree_verify)


def verify_from_an_empty_state():
  def tree_verify(q, k, v, g, beta, state, mask):
    return _tree_verify(q, k, v, g, beta, jnp.zeros_like(state), mask)

  return mock.patch.object(kernels, "tree_verify", tree_verify)


def conv_window_off_by_one():
  shim = types.SimpleNamespace(
    dynamic_update_slice=lax.dynamic_update_slice,
    dynamic_slice_in_dim=lambda x, start, size: lax.dynamic_slice_in_dim(
      x, start - 1, size
    ),
  )
  return mock.patch.object(commit_lib, "lax", shim)


def conv_ignores_the_committed_rows():
  def conv_windows(parents, kernel):
    rows = _conv_windows(parents, kernel)
    # A node of the pass where a committed row belongs.
    return jnp.maximum(rows, kernel - 1)

  return mock.patch.object(gated_delta, "conv_windows", conv_windows)


def rejected_key_kept():
  """The length counts one rejected row."""

  def commit(state, stash, path, count):
    new = _commit(state, stash, path, count)
    kept = jnp.where(count < path.shape[0], 1, 0)
    return dataclasses.replace(new, length=new.length + kept)

  return mock.patch.object(step_lib, "commit", commit)


def keys_in_memory_order():
  """Keys and values of the wrong nodes are kept."""

  def append(cache, rows, path, count, length):
    return _append(cache, jnp.roll(rows, 1, axis=0), path, count, length)

  _append = commit_lib._append_rows
  return mock.patch.object(commit_lib, "_append_rows", append)


def nodes_see_later_nodes():
  def tree_attention(q, k, v, k_prefix, v_prefix, length, mask, *rest, **named):
    return _tree_attention(
      q, k, v, k_prefix, v_prefix, length, jnp.ones_like(mask), *rest, **named
    )

  return mock.patch.object(attention_kernels, "tree_attention", tree_attention)


def positions_do_not_count_up():
  shim = mock.MagicMock(wraps=attention.layers)
  shim.rope = lambda x, positions, *rest: _rope(
    x, jnp.broadcast_to(positions[0], positions.shape), *rest
  )
  return mock.patch.object(attention, "layers", shim)


def one_token_too_many():
  def match(nodes, choices):
    found = _match(nodes, choices)
    return dataclasses.replace(
      found, accepted=jnp.minimum(found.accepted + 1, nodes.count - 1)
    )

  return mock.patch.object(accept, "match", match)


def stop_seen_only_at_the_end_of_a_run():
  def cut(acceptance, stop_ids, remaining):
    found = _cut(acceptance, jnp.full_like(stop_ids, -1), remaining)
    last = acceptance.emitted[found.count - 1]
    return dataclasses.replace(found, stopped=jnp.any(stop_ids == last))

  return mock.patch.object(accept, "cut", cut)


def drafter_context_not_cut():
  def extend(self, params, carry, tokens, taps, start, count):
    whole = jnp.where(count > 0, tokens.shape[0], 0)
    return _extend(self, params, carry, tokens, taps, start, whole)

  return mock.patch.object(step_lib.StepFns, "extend", extend)


def drafter_gets_its_own_drafts_features():
  """Features of the nodes before, as if the anchor were not one of them."""

  def extend(self, params, carry, tokens, taps, start, count):
    moved = jnp.roll(taps, 1, axis=0)
    return _extend(self, params, carry, tokens, moved, start, count)

  return mock.patch.object(step_lib.StepFns, "extend", extend)


def drafter_misses_the_last_token():
  def extend(self, params, carry, tokens, taps, start, count):
    return _extend(self, params, carry, tokens, taps, start, count - 1)

  return mock.patch.object(step_lib.StepFns, "extend", extend)


def drafter_is_one_position_behind():
  def extend(self, params, carry, tokens, taps, start, count):
    return _extend(self, params, carry, tokens, taps, start - 1, count)

  return mock.patch.object(step_lib.StepFns, "extend", extend)


def noise_keyed_by_step():
  def choose(logits, sampling, features, positions):
    same = jnp.broadcast_to(positions[0], positions.shape)
    return _choose(logits, sampling, features, same)

  return mock.patch.object(sampling_lib, "choose", choose)


def penalties_forget_the_path():
  def penalize(logits, sampling, history, tokens, mask):
    return _penalize(logits, sampling, history, tokens, jnp.zeros_like(mask))

  return mock.patch.object(sampling_lib, "penalize", penalize)


LAYERS = {"tokens", "recurrent", "conv", "k", "v"}
"""A wrong output of one layer is a wrong input of all behind it."""

# Fault, settings, drafter, the checks of which one must be the first to see it.
FAULTS = (
  (stale_after_full_accept, GREEDY, "oracle", {"recurrent"}),
  (state_keeps_rejected_tokens, GREEDY, "tail_wrong", {"recurrent"}),
  (commit_clamped_at_3, GREEDY, "oracle", {"recurrent"}),
  (decay_after_delta, GREEDY, "mixed", LAYERS),
  (verify_from_an_empty_state, GREEDY, "mixed", LAYERS),
  (conv_window_off_by_one, GREEDY, "mixed", {"conv"}),
  (conv_ignores_the_committed_rows, GREEDY, "mixed", LAYERS),
  (rejected_key_kept, GREEDY, "mixed", {"position", "k", "v"}),
  (keys_in_memory_order, GREEDY, "mixed", {"k", "v"}),
  (nodes_see_later_nodes, GREEDY, "oracle", LAYERS),
  (positions_do_not_count_up, GREEDY, "oracle", LAYERS),
  (one_token_too_many, GREEDY, "mixed", {"tokens"}),
  (stop_seen_only_at_the_end_of_a_run, STOPPED, "oracle", {"tokens"}),
  (drafter_context_not_cut, GREEDY, "mixed", {"drafter.length"}),
  (drafter_gets_its_own_drafts_features, GREEDY, "mixed", {"drafter.taps"}),
  (drafter_misses_the_last_token, GREEDY, "lookup", {"drafter.tokens"}),
  (drafter_is_one_position_behind, GREEDY, "lookup", {"drafter.tokens"}),
  (noise_keyed_by_step, SAMPLED, "oracle", {"tokens"}),
  (penalties_forget_the_path, PENALIZED, "oracle", {"tokens"}),
)


class FaultsTest(kit.Float64TestCase):
  def run_with(self, fault, sampling, mode):
    """A request with the fault in it; `lookup` is prompt lookup's."""
    one_token = kit.autoregressive(CONFIG, "float64")
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    plain = kit.referee(one_token, prompt, sampling)
    if sampling is STOPPED:
      at = next(
        i
        for i in range(K + 2, TOKENS)
        if i % (K + 1) < K and plain.tokens.index(plain.tokens[i]) == i
      )
      sampling = dataclasses.replace(
        sampling, stop_token_ids=(plain.tokens[at],)
      )
      plain = kit.referee(one_token, prompt, sampling)
    if mode == "lookup":
      clean = kit.prompt_lookup(CONFIG, "float64", K)
      referee = kit.prompt_lookup(CONFIG, "float64", K, silent=True)
      drafter = kit.referee(referee, prompt, sampling)
    else:
      referee = clean = kit.speculative(CONFIG, "float64", K)
      drafter = kit.referee(clean, prompt, sampling, plain.sequence)
    # The referee's prefill, and a step with the fault in it.
    engine = kit.sibling(clean)
    features = sampling_lib.Features.of(sampling)
    fns = dataclasses.replace(engine._base, features=features)
    step = jax.jit(lambda *args: fns.step(*args))
    engine._fns_by_features = {
      features: dataclasses.replace(referee._compiled(features), step=step)
    }
    if isinstance(engine, kit.ScriptedEngine):
      engine.load(mode, plain.sequence)
    with fault():
      return kit.compare(engine, plain, drafter)

  @parameterized.parameters("oracle", "mixed", "tail_wrong", "lookup")
  def test_control(self, mode):
    """The same machinery without a fault finds nothing."""
    done = self.run_with(nothing, GREEDY, mode)
    self.assertGreater(sum(done.accepted), 0)
    self.assertGreater(done.worst_state, 0)

  @parameterized.named_parameters(
    (fault.__name__, fault, sampling, mode, checks)
    for fault, sampling, mode, checks in FAULTS
  )
  def test_caught(self, fault, sampling, mode, checks):
    with self.assertRaises(kit.Mismatch) as caught:
      self.run_with(fault, sampling, mode)
    self.assertIn(caught.exception.check, checks, str(caught.exception))
