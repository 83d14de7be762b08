"""A shared budget against a heap over all requests, in plain Python."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding import tree as tree_lib
from specpilot_jax.mechanisms import shared_budget
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.state import Nodes
from tests import trees
from tests.decoding import kit

SLOTS, SIZE = 5, 12


def oracle(parents, scores, counts, live, budget) -> list[list[int]]:
  """Nodes that each request verifies, by a heap that opens up children."""
  keep = [[0] if on else [] for on in live]
  waiting = []

  def open_up(slot, node, at_most):
    for child in range(1, counts[slot]):
      score = min(float(scores[slot, child]), at_most)
      if parents[slot][child] == node and score > -np.inf:
        heapq.heappush(waiting, (-score, child, slot))

  for slot, on in enumerate(live):
    if on:
      open_up(slot, 0, np.inf)
  for _ in range(budget - sum(live)):
    if not waiting:
      break
    negated, node, slot = heapq.heappop(waiting)
    keep[slot].append(node)
    open_up(slot, node, -negated)
  return [sorted(nodes) for nodes in keep]


def random_case(rng, *, ties=False, wild=False):
  """Trees with path scores; `wild`: scores that are no sums, and no numbers."""
  parents = [trees.random_parents(rng, SIZE) for _ in range(SLOTS)]
  counts = rng.integers(1, SIZE + 1, SLOTS)
  scores = np.zeros((SLOTS, SIZE), np.float32)
  for slot in range(SLOTS):
    for node in range(1, SIZE):
      step = -rng.exponential()
      if ties:
        step = -float(rng.integers(0, 3))
      if wild:
        step = rng.choice([-np.inf, np.nan, 1.0, step, step, step])
      scores[slot, node] = scores[slot, parents[slot][node]] + step
  nodes = Nodes(
    tokens=jnp.asarray(rng.integers(0, 99, (SLOTS, SIZE)), jnp.int32),
    parents=jnp.asarray(parents, jnp.int32),
    depth=jnp.asarray([trees.depths(p) for p in parents]),
    mask=jnp.asarray([trees.mask_of(p) for p in parents]),
    count=jnp.asarray(counts, jnp.int32),
  )
  return parents, nodes, scores


chosen = jax.jit(shared_budget.chosen)
allocate = jax.jit(shared_budget.allocate, static_argnames="chains")


class SharedBudgetTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.product(ties=(False, True), wild=(False, True))
  def test_against_a_heap(self, ties, wild):
    rng = np.random.default_rng(10 * ties + wild)
    for _ in range(40):
      parents, nodes, scores = random_case(rng, ties=ties, wild=wild)
      live = rng.random(SLOTS) < 0.8
      budget = int(rng.integers(0, SLOTS * SIZE + 2))
      got = np.asarray(chosen(nodes, scores, live, budget))
      clean = np.where(np.isnan(scores), -np.inf, scores)
      want = oracle(parents, clean, np.asarray(nodes.count), live, budget)
      self.assertEqual([np.flatnonzero(row).tolist() for row in got], want)

  def test_the_trees_of_what_is_chosen(self):
    rng = np.random.default_rng(1)
    for _ in range(20):
      parents, nodes, scores = random_case(rng)
      live = np.ones(SLOTS, bool)
      budget = int(rng.integers(SLOTS, 40))
      want = oracle(parents, scores, np.asarray(nodes.count), live, budget)
      got = allocate(nodes, scores, live, budget, chains=False)
      for slot, keep in enumerate(want):
        n = len(keep)
        self.assertEqual(int(got.count[slot]), n)
        old = [parents[slot][i] for i in keep]
        new = [-1 if p < 0 else keep.index(p) for p in old]
        self.assertEqual(got.parents[slot, :n].tolist(), new)
        np.testing.assert_array_equal(
          got.tokens[slot, :n], np.asarray(nodes.tokens)[slot, keep]
        )
        np.testing.assert_array_equal(got.depth[slot, :n], trees.depths(new))
        np.testing.assert_array_equal(
          got.mask[slot, :n, :n], trees.mask_of(new)
        )
        # What is behind them is nobody's ancestor.
        self.assertFalse(np.asarray(got.mask)[slot, :n, n:].any())

  @parameterized.parameters(2, 3)
  def test_a_budget_that_does_not_bind_changes_nothing(self, rank):
    """To the last bit, of the trees that requests get alone."""
    rng = np.random.default_rng(rank)
    shape = (SLOTS, 4, 3, 3)[: rank + 1]
    grow = functools.partial(tree_lib.best_first, nodes=SIZE, valid_vocab=90)
    tokens = np.stack(
      [[rng.permutation(99)[:3] for _ in range(shape[1])] for _ in range(SLOTS)]
    ).astype(np.int32)
    scores = jax.nn.log_softmax(jnp.asarray(rng.normal(size=shape)), axis=-1)
    tree = jax.jit(jax.vmap(grow))(
      jnp.arange(SLOTS),
      jnp.asarray(tokens),
      scores,
      jnp.asarray([4, 3, 0, 1, 4]),
    )
    nodes = tree_lib.nodes_of(tree)
    total = int(nodes.count.sum())
    live = np.ones(SLOTS, bool)
    same = allocate(nodes, tree.scores, live, total, chains=False)
    np.testing.assert_array_equal(same.count, nodes.count)
    for slot, n in enumerate(nodes.count.tolist()):
      for name in ("tokens", "parents", "depth"):
        np.testing.assert_array_equal(
          getattr(same, name)[slot, :n], getattr(nodes, name)[slot, :n], name
        )
      np.testing.assert_array_equal(
        same.mask[slot, :n, :n], nodes.mask[slot, :n, :n]
      )
    less = allocate(nodes, tree.scores, live, total - 1, chains=False)
    self.assertEqual(int(less.count.sum()), total - 1)

  def test_saturated(self):
    """No drafts are left, but every live request keeps its anchor."""
    rng = np.random.default_rng(3)
    _, nodes, scores = random_case(rng)
    live = np.array([True, False, True, True, True])
    for budget in (0, 3, 4):
      got = allocate(nodes, scores, live, budget, chains=False)
      np.testing.assert_array_equal(got.count, live)
      np.testing.assert_array_equal(
        got.tokens[:, 0], np.where(live, nodes.tokens[:, 0], 0)
      )

  def test_rows_change_nothing_for_each_other(self):
    """Permuted, and beside a dead row full of NaN."""
    rng = np.random.default_rng(4)
    _, nodes, scores = random_case(rng)
    live = np.array([True, True, False, True, True])
    want = chosen(nodes, scores, live, 20)
    scores[2] = np.nan
    np.testing.assert_array_equal(chosen(nodes, scores, live, 20), want)
    order = np.array([3, 2, 0, 4, 1])
    moved = jax.tree.map(lambda x: x[order], nodes)
    np.testing.assert_array_equal(
      chosen(moved, scores[order], live[order], 20), np.asarray(want)[order]
    )

  def test_chains(self):
    """Only counts change; a sure request gets what an unsure one leaves."""
    sure, unsure = np.full(7, -0.1), np.full(7, -2.0)
    scores = np.concatenate([np.zeros((2, 1)), np.cumsum([sure, unsure], 1)], 1)
    nodes = jax.vmap(lambda t: state_lib.run_of(t, 8, prefill=False))(
      jnp.arange(16).reshape(2, 8)
    )
    live = np.ones(2, bool)
    for budget, want in ((16, [8, 8]), (10, [8, 2]), (9, [8, 1]), (4, [3, 1])):
      got = allocate(nodes, scores, live, budget, chains=True)
      self.assertEqual(got.count.tolist(), want)
      np.testing.assert_array_equal(got.parents, nodes.parents)
      np.testing.assert_array_equal(got.mask, nodes.mask)
