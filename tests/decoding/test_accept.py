"""Acceptance, cut, commit and convolution windows against plain walks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding import accept
from specpilot_jax.decoding import commit as commit_lib
from specpilot_jax.models import gated_delta
from specpilot_jax.models import state as state_lib
from tests import trees
from tests.decoding import kit


def tree_nodes(tokens, parents, count=None, size=None) -> state_lib.Nodes:
  """Nodes of a tree, padded to `size` with nodes that do not exist."""
  count = len(parents) if count is None else count
  size = size or len(parents)
  parents = [*parents, *([0] * (size - len(parents)))]
  tokens = [*tokens, *([tokens[1 % len(tokens)]] * (size - len(tokens)))]
  return state_lib.Nodes(
    tokens=jnp.asarray(tokens, jnp.int32),
    parents=jnp.asarray(parents, jnp.int32),
    depth=jnp.asarray(trees.depths(parents)),
    mask=jnp.asarray(trees.mask_of(parents)),
    count=jnp.asarray(count, jnp.int32),
  )


def walk(tokens, parents, count, choices) -> list[int]:
  """The longest path whose tokens are the choices; the first of equals."""
  best = [0]
  for node in range(count):
    path = trees.path_to(parents, node)
    right = all(
      tokens[child] == choices[parent]
      for parent, child in zip(path, path[1:], strict=False)
    )
    if right and len(path) > len(best):
      best = path
  return best


class MatchTest(parameterized.TestCase):
  def test_random_trees(self):
    """A small alphabet, so that equal siblings and long paths are common."""
    match = jax.jit(accept.match)
    rng = np.random.default_rng(0)
    lengths, twins = [], 0
    for _ in range(200):
      size = 12
      count = int(rng.integers(1, size + 1))
      parents = trees.random_parents(rng, count)
      tokens = rng.integers(0, 2, count).tolist()
      choices = rng.integers(0, 2, size)
      nodes = tree_nodes(tokens, parents, count, size)
      found = match(nodes, jnp.asarray(choices, jnp.int32))
      path = walk(tokens, parents, count, choices)
      self.assertEqual(int(found.accepted), len(path) - 1)
      self.assertEqual(found.path[: len(path)].tolist(), path)
      self.assertEqual(
        found.emitted[: len(path)].tolist(), [choices[i] for i in path]
      )
      lengths.append(len(path))
      pairs = list(zip(parents, tokens, strict=True))[1:]
      twins += len(pairs) - len(set(pairs))
    self.assertGreater(len(set(lengths)), 4)
    self.assertGreater(twins, 100)

  def test_padding_is_never_accepted(self):
    """Padded nodes carry a token that would match."""
    nodes = tree_nodes([3, 5], [-1, 0], count=1, size=6)
    found = accept.match(nodes, jnp.full((6,), 5, jnp.int32))
    self.assertEqual(int(found.accepted), 0)
    self.assertEqual(int(found.emitted[0]), 5)


class CutTest(parameterized.TestCase):
  def test_random_runs(self):
    cut = jax.jit(accept.cut)
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(300):
      emitted = rng.integers(0, 8, 7)
      accepted = int(rng.integers(0, 7))
      remaining = int(rng.integers(1, 10))
      stops = rng.integers(0, 8, rng.integers(0, 3)).tolist()
      # One token at a time: a stop is looked for before the limit.
      count, reason = 0, None
      while reason is None and count < accepted + 1:
        count += 1
        if emitted[count - 1] in stops:
          reason = "stopped"
        elif count == remaining:
          reason = "exhausted"
      padded = jnp.full((4,), -1, jnp.int32)
      padded = padded.at[: len(stops)].set(jnp.asarray(stops, jnp.int32))
      found = cut(
        accept.Acceptance(
          path=jnp.arange(7),
          emitted=jnp.asarray(emitted, jnp.int32),
          accepted=jnp.asarray(accepted, jnp.int32),
        ),
        padded,
        jnp.asarray(remaining, jnp.int32),
      )
      self.assertEqual(int(found.count), count)
      self.assertEqual(bool(found.stopped), reason == "stopped")
      self.assertEqual(bool(found.exhausted), reason == "exhausted")
      seen.add(reason)
    self.assertEqual(seen, {None, "stopped", "exhausted"})

  @parameterized.parameters(
    (5, 3, True, False),  # the stop is the third, inside the limit
    (3, 3, True, False),  # it is the last that the limit allows
    (2, 2, False, True),  # it is behind the limit
  )
  def test_stop_and_limit_in_one_run(self, limit, count, stopped, exhausted):
    found = accept.cut(
      accept.Acceptance(
        path=jnp.arange(6),
        emitted=jnp.asarray([10, 11, 2, 20, 21, 22], jnp.int32),
        accepted=jnp.asarray(5, jnp.int32),
      ),
      jnp.asarray([2, -1], jnp.int32),
      jnp.asarray(limit, jnp.int32),
    )
    self.assertEqual(
      (int(found.count), bool(found.stopped), bool(found.exhausted)),
      (count, stopped, exhausted),
    )


class ConvWindowTest(parameterized.TestCase):
  @parameterized.parameters(2, 3, 4)
  def test_random_trees(self, kernel):
    rng = np.random.default_rng(kernel)
    for _ in range(30):
      parents = trees.random_parents(rng, 11)
      windows = gated_delta.conv_windows(
        jnp.asarray(parents, jnp.int32), kernel
      )
      for node in range(11):
        rows = list(range(kernel - 1))  # committed, oldest first
        rows += [kernel - 1 + i for i in trees.path_to(parents, node)]
        self.assertEqual(windows[node].tolist(), rows[-kernel:])


class TreePassTest(kit.Float64TestCase):
  """A pass over a whole tree is, node by node, a pass over its paths."""

  def test_verify_and_commit_a_tree(self):
    config = kit.hybrid(gdn_num_value_heads=6)
    model = kit.build(config, "float64")
    commit = jax.jit(commit_lib.commit)

    @jax.jit
    def run(nodes, state):
      out = model(nodes, state, (1,))
      return out, model.logits(out.hidden)

    rng = np.random.default_rng(3)

    path = jnp.arange(10, dtype=jnp.int32)

    def chain_of(tokens):
      # One size for all: one executable.
      padded = np.zeros(10, np.int32)
      padded[: len(tokens)] = tokens
      return state_lib.run_of(jnp.asarray(padded), len(tokens), prefill=False)

    nodes = chain_of(rng.integers(0, 61, 5))
    start = state_lib.init_state(config, 40, "float64")
    out, _ = run(nodes, start)
    start = commit(start, out.stash, path, jnp.int32(5))
    parents = [-1, 0, 0, 1, 2, 2, 4, 3, 6]
    tokens = rng.integers(0, 61, len(parents)).tolist()
    tree = tree_nodes(tokens, parents, size=10)
    out, logits = run(tree, start)
    for node in range(len(parents)):
      along = trees.path_to(parents, node)
      alone, alone_logits = run(chain_of([tokens[i] for i in along]), start)
      last = len(along) - 1
      np.testing.assert_allclose(logits[node], alone_logits[last], atol=1e-10)
      np.testing.assert_allclose(out.taps[node], alone.taps[last], atol=1e-10)
      count = jnp.int32(len(along))
      padded = jnp.asarray(along + [9] * (10 - len(along)), jnp.int32)
      committed = commit(start, out.stash, padded, count)
      expected = commit(start, alone.stash, path, count)
      self.assertEqual(int(committed.length), 5 + len(along))
      for a, b in zip(
        jax.tree.leaves(committed), jax.tree.leaves(expected), strict=True
      ):
        np.testing.assert_allclose(a, b, atol=1e-10)

  def test_commit_of_nothing(self):
    config = kit.hybrid()
    model = kit.build(config, "float64")
    state = state_lib.init_state(config, 20, "float64")
    nodes = state_lib.run_of(jnp.arange(4), 4, prefill=False)
    path = jnp.arange(4, dtype=jnp.int32)

    @jax.jit
    def passed(tokens, state, count):
      now = dataclasses.replace(nodes, tokens=tokens)
      return commit_lib.commit(state, model(now, state).stash, path, count)

    state = passed(nodes.tokens, state, jnp.int32(4))
    same = passed(nodes.tokens + 9, state, jnp.int32(0))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(same), strict=True):
      np.testing.assert_array_equal(a, b)
