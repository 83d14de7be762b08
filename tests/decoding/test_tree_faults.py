"""Faults of trees put in on purpose: the losslessness checks must see each.

Each gives a node something of another one that stands before it in memory, as
public engines did that verified a tree as a chain. On a chain none of them
changes anything, so that only a check on trees can see it. Which fault is in is
an argument of one executable.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from pallas_kernels import gated_delta as kernels
from pallas_kernels import tree_attention as attention_kernels
from specpilot_jax.configs import ATTENTION, GDN
from specpilot_jax.decoding import accept
from specpilot_jax.decoding import commit as commit_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding import tree as tree_lib
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import gated_delta
from specpilot_jax.models.state import GDNState
from tests.decoding import kit, tree_kit

CONFIG = kit.hybrid(layer_types=(GDN, ATTENTION))
TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
PENALIZED = dataclasses.replace(GREEDY, frequency_penalty=0.8)

_kernel_commit = kernels.commit
_tree_verify = kernels.tree_verify
_tree_attention = attention_kernels.tree_attention
_append_rows = commit_lib._append_rows
_commit = commit_lib.commit
_match = accept.match
_penalize = sampling_lib.penalize
_nodes_of = tree_lib.nodes_of
_verify = step_lib.StepFns._verify


def ancestors(active, mask):
  """Those that nodes in memory order would have."""
  return jnp.where(active, jnp.tril(jnp.ones_like(mask)), mask)


def first_nodes(active, path):
  """As many nodes as were accepted, but the first in memory."""
  return jnp.where(active, jnp.arange(path.size, dtype=path.dtype), path)


def conv_windows_of_the_row_before(active):
  right = gated_delta.conv_windows

  def conv_windows(parents, kernel):
    wrong = jnp.arange(parents.size, dtype=parents.dtype) - 1
    return right(jnp.where(active, wrong, parents), kernel)

  return mock.patch.object(gated_delta, "conv_windows", conv_windows)


def conv_windows_of_siblings(active):
  """A node hangs on what stands before its parent."""
  right = gated_delta.conv_windows

  def conv_windows(parents, kernel):
    return right(
      jnp.where(active & (parents > 0), parents - 1, parents), kernel
    )

  return mock.patch.object(gated_delta, "conv_windows", conv_windows)


def attention_by_memory_order(active):
  def tree_attention(q, k, v, k_prefix, v_prefix, length, mask, *rest, **named):
    return _tree_attention(
      q, k, v, k_prefix, v_prefix, length, ancestors(active, mask), *rest,
      **named,
    )  # fmt: skip

  return mock.patch.object(attention_kernels, "tree_attention", tree_attention)


def delta_rule_by_memory_order(active):
  def tree_verify(q, k, v, g, beta, state, mask):
    return _tree_verify(q, k, v, g, beta, state, ancestors(active, mask))

  return mock.patch.object(kernels, "tree_verify", tree_verify)


def keys_compacted_by_memory_order(active):
  def append(cache, rows, path, count, length):
    return _append_rows(cache, rows, first_nodes(active, path), count, length)

  return mock.patch.object(commit_lib, "_append_rows", append)


def state_of_the_first_nodes(active):
  def commit(state, k, u, decay, path, count):
    return _kernel_commit(state, k, u, decay, first_nodes(active, path), count)

  return mock.patch.object(kernels, "commit", commit)


def conv_rows_of_the_first_nodes(active):
  """Only the pre-convolution rows are not compacted."""

  def commit(state, stash, path, count):
    right = _commit(state, stash, path, count)
    wrong = _commit(state, stash, first_nodes(active, path), count)
    layers = []
    for ours, theirs in zip(right.layers, wrong.layers, strict=True):
      if isinstance(ours, GDNState) and isinstance(theirs, GDNState):
        ours = dataclasses.replace(ours, conv=theirs.conv)
      layers.append(ours)
    return dataclasses.replace(right, layers=tuple(layers))

  return mock.patch.object(step_lib, "commit", commit)


def positions_by_memory_order(active):
  def nodes_of(tree):
    nodes = _nodes_of(tree)
    wrong = jnp.arange(nodes.size, dtype=nodes.depth.dtype)
    return dataclasses.replace(
      nodes, depth=jnp.where(active, wrong, nodes.depth)
    )

  return mock.patch.object(tree_lib, "nodes_of", nodes_of)


def bonus_where_a_chain_ends(active):
  """The last token is the choice of the node whose index is the count."""

  def match(nodes, choices):
    found = _match(nodes, choices)
    last = jnp.arange(found.emitted.size) == found.accepted
    wrong = jnp.where(last, choices[found.accepted], found.emitted)
    return dataclasses.replace(
      found, emitted=jnp.where(active, wrong, found.emitted)
    )

  return mock.patch.object(accept, "match", match)


def drafter_gets_what_stands_first(active):
  """Features of the first nodes, as many as were accepted."""

  def verify(self, *args, **named):
    seen = _verify(self, *args, **named)
    # Where the step looks for the path's.
    wrong = seen.taps.at[seen.acceptance.path].set(seen.taps)
    return dataclasses.replace(seen, taps=jnp.where(active, wrong, seen.taps))

  return mock.patch.object(step_lib.StepFns, "_verify", verify)


def penalties_of_siblings(active):
  def penalize(logits, sampling, history, tokens, mask):
    return _penalize(logits, sampling, history, tokens, ancestors(active, mask))

  return mock.patch.object(sampling_lib, "penalize", penalize)


LAYERS = {"tokens", "recurrent", "conv", "k", "v", "drafter.taps"}
"""A wrong output of one layer is a wrong input of all behind it."""

# Fault, settings, the checks of which one must be the first to see it.
FAULTS = (
  (conv_windows_of_the_row_before, GREEDY, LAYERS),
  (conv_windows_of_siblings, GREEDY, LAYERS),
  (attention_by_memory_order, GREEDY, LAYERS),
  (delta_rule_by_memory_order, GREEDY, LAYERS),
  (keys_compacted_by_memory_order, GREEDY, {"k", "v"}),
  (state_of_the_first_nodes, GREEDY, {"recurrent"}),
  (conv_rows_of_the_first_nodes, GREEDY, {"conv"}),
  (positions_by_memory_order, GREEDY, LAYERS),
  (bonus_where_a_chain_ends, GREEDY, {"tokens"}),
  (drafter_gets_what_stands_first, GREEDY, {"drafter.taps"}),
  (penalties_of_siblings, PENALIZED, {"tokens"}),
)
NONE = -1


@functools.cache
def prepared(sampling: SamplingParams):
  """An engine, the referee's runs, and a step that takes a fault's index."""
  clean = tree_kit.engine(CONFIG, node_budget=16)
  prompt = kit.prompts(6, CONFIG.vocab_size)[5]
  plain = kit.referee(kit.autoregressive(CONFIG, "float64"), prompt, sampling)
  states: list[kit.Snapshot] = []
  clean.set_limits(nodes=1)
  clean.load("mixed", plain.sequence)
  kit.compare(clean, plain, keep=states)
  context = dataclasses.replace(plain, states=states, drafter=True)
  features = sampling_lib.Features.of(sampling)
  fns = dataclasses.replace(clean._base, features=features)

  @jax.jit
  def step(params, carry, request, which):
    with contextlib.ExitStack() as faults:
      for index, (fault, *_) in enumerate(FAULTS):
        faults.enter_context(fault(which == index))
      return fns.step(params, carry, request)

  return kit.sibling(clean), clean._compiled(features), (plain, context), step


class TreeFaultsTest(kit.Float64TestCase):
  def run_with(self, sampling, index):
    """A request with a fault in its steps."""
    engine, compiled, runs, step = prepared(sampling)

    def faulty(params, carry, request):
      return step(params, carry, request, index)

    features = sampling_lib.Features.of(sampling)
    engine._fns_by_features = {
      features: dataclasses.replace(compiled, step=faulty)
    }
    return kit.compare(engine, *runs)

  @parameterized.named_parameters(("greedy", GREEDY), ("penalized", PENALIZED))
  def test_control(self, sampling):
    """The same executable without a fault finds nothing."""
    done = self.run_with(sampling, NONE)
    self.assertGreater(max(done.accepted), 1)
    self.assertGreater(max(done.drafted), max(done.depths))

  @parameterized.named_parameters(
    (fault.__name__, index, sampling, checks)
    for index, (fault, sampling, checks) in enumerate(FAULTS)
  )
  def test_caught(self, index, sampling, checks):
    with self.assertRaises(kit.Mismatch) as caught:
      self.run_with(sampling, index)
    self.assertIn(caught.exception.check, checks, str(caught.exception))
