"""The tree that the device builds against the heap that defines it."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from experiments.cost_model import lattices, replay
from specpilot_jax.decoding import draft, sampling
from specpilot_jax.decoding import tree as tree_lib
from tests import trees

VOCAB = 40
BUDGETS = (1, 2, 7, 16, 33, 64, 128)
SLOTS, CANDIDATES = 15, 6


def lattice(seed, *, conditional, step=None, slots=SLOTS, missing=0.2):
  """Tokens, scores, order (or None) and count, best candidate first.

  Args:
    seed: of everything.
    conditional: with a parent axis.
    step: scores are multiples of it, 0 among them: ties, and sums that are
      exact; None for normalised float32 scores.
    slots: of the lattice.
    missing: how often a candidate is not there.
  """
  rng = np.random.default_rng(seed)
  shape = (slots, CANDIDATES) + ((CANDIDATES,) if conditional else ())
  tokens = np.stack(
    [rng.permutation(VOCAB)[:CANDIDATES] for _ in range(slots)]
  ).astype(np.int32)
  scores = rng.normal(0, 2.0, shape)
  scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
  if step is not None:
    scores = np.round(scores / step) * step
  scores = np.where(rng.random(shape) < missing, -np.inf, scores)
  scores = np.asarray(scores, np.float32)
  count = slots if rng.random() < 0.5 else int(rng.integers(0, slots + 1))
  if conditional:
    ids = np.broadcast_to(tokens[:, None], shape)
    order = np.lexsort((ids, -scores), axis=-1)
    scores = np.take_along_axis(scores, order, axis=-1)
    return tokens, scores, order.astype(np.uint8), count
  order = np.lexsort((tokens, -scores), axis=-1)
  tokens = np.take_along_axis(tokens, order, axis=-1)
  return tokens, np.take_along_axis(scores, order, axis=-1), None, count


def oracle(tokens, scores, order, count, *, nodes, depth=None, blind=False):
  """The heap's tree over a lattice, sums in float32."""
  recording = lattices.Recording(
    request="r",
    looped=False,
    prompt_length=1,
    output=np.zeros(1, np.int32),
    tokens=tokens[None],
    scores=scores[None],
    order=None if order is None else order[None],
    counts=np.asarray([count], np.int16),
  )
  policy = replay.BestFirst(nodes, depth=depth, single=True, blind=blind)
  return policy.build(recording, 0)


def grow(tokens, scores, order, count, depth, drafts, *, nodes):
  return tree_lib.best_first(
    jnp.asarray(7),
    tokens,
    scores,
    count,
    order=order,
    nodes=nodes,
    valid_vocab=VOCAB,
    depth=depth,
    drafts=drafts,
  )


build = jax.jit(grow, static_argnames=("nodes",))


def device(tokens, scores, order, count, *, nodes, depth=None, drafts=None):
  """The device's tree, in NumPy."""
  depth = tokens.shape[0] if depth is None else depth
  drafts = nodes - 1 if drafts is None else drafts
  tree = build(tokens, scores, order, count, depth, drafts, nodes=nodes)
  return jax.tree.map(np.asarray, tree)


def check(tree: tree_lib.Tree, expected: list[replay.Node]):
  """The same nodes in the same order, with the same scores."""
  count = int(tree.count)
  assert count == 1 + len(expected)
  got = zip(
    tree.parents[1:count] - 1,
    tree.depth[1:count] - 1,
    tree.tokens[1:count],
    tree.scores[1:count],
    strict=True,
  )
  assert [tuple(map(float, n)) for n in got] == [
    (n.parent, n.slot, n.token, n.score) for n in expected
  ]
  assert (tree.tokens[0], tree.parents[0], tree.depth[0]) == (7, -1, 0)
  assert tree.scores[0] == 0
  # What holds no node is harmless.
  assert (tree.tokens[count:] == 0).all()
  assert (tree.parents[count:] == 0).all()
  assert (tree.depth[count:] == 1).all()
  assert (tree.scores[count:] == -np.inf).all()


def live(tree: tree_lib.Tree):
  """The arrays of the nodes that there are, but for the mask."""
  fields = (tree.tokens, tree.parents, tree.depth, tree.scores)
  return [field[: int(tree.count)].tolist() for field in fields]


STEPS = (None, 0.125, 1.0, 4.0)
KINDS = tuple(itertools.product((False, True), STEPS))


class TreeTest(parameterized.TestCase):
  @parameterized.parameters(*KINDS)
  def test_it_is_the_heaps(self, conditional, step):
    """With ties, gaps, short counts, at every budget."""
    sizes = set()
    for seed in range(12):
      case = lattice(seed, conditional=conditional, step=step)
      for nodes in BUDGETS:
        tree = device(*case, nodes=nodes)
        check(tree, oracle(*case, nodes=nodes))
        sizes.add(int(tree.count))
    assert sizes >= set(BUDGETS)  # Full trees among them.

  @parameterized.parameters(*KINDS)
  def test_limits_are_the_heaps(self, conditional, step):
    for seed in range(25):
      case = lattice(100 + seed, conditional=conditional, step=step)
      rng = np.random.default_rng(seed)
      depth, drafts = int(rng.integers(0, 17)), int(rng.integers(0, 40))
      expected = oracle(*case, nodes=1 + min(drafts, 32), depth=depth)
      check(device(*case, nodes=33, depth=depth, drafts=drafts), expected)

  @parameterized.parameters(False, True)
  def test_the_order_of_candidates_does_not_matter(self, conditional):
    for seed in range(10):
      case = lattice(seed, conditional=conditional, step=0.5)
      tokens, scores, order, count = case
      rng = np.random.default_rng(seed)
      if order is None:
        to = rng.permuted(np.tile(np.arange(CANDIDATES), (SLOTS, 1)), axis=1)
        tokens = np.take_along_axis(tokens, to, axis=1)
        scores = np.take_along_axis(scores, to, axis=1)
      else:  # Axis 2 in the order of the places.
        scores = np.take_along_axis(scores, np.argsort(order, axis=-1), -1)
      shuffled = device(tokens, scores, None, count, nodes=64)
      assert live(shuffled) == live(device(*case, nodes=64))

  @parameterized.parameters(False, True)
  def test_strangers_are_no_candidates(self, conditional):
    """Ids outside the vocabulary, and NaN, are as good as -inf."""
    for seed in range(10):
      case = lattice(seed, conditional=conditional, step=0.5)
      tokens, scores, order, count = case
      rng = np.random.default_rng(seed)
      strange = rng.random(tokens.shape) < 0.3
      given = np.where(strange, rng.choice([-1, VOCAB], tokens.shape), tokens)
      gone = strange
      if order is not None:
        wide = np.broadcast_to(strange[:, None], order.shape)
        gone = np.take_along_axis(wide, order, -1)
      dropped = np.where(gone, np.float32(-np.inf), scores)
      expected = live(device(tokens, dropped, order, count, nodes=64))
      assert live(device(given, scores, order, count, nodes=64)) == expected
      nan = np.where(gone, np.float32(np.nan), scores)
      assert live(device(tokens, nan, order, count, nodes=64)) == expected

  @parameterized.parameters(*KINDS)
  def test_larger_trees_begin_with_smaller_ones(self, conditional, step):
    for seed in range(5):
      case = lattice(seed, conditional=conditional, step=step)
      largest = live(device(*case, nodes=128))
      for nodes in BUDGETS:
        got = live(device(*case, nodes=nodes))
        limited = live(device(*case, nodes=128, drafts=nodes - 1))
        assert got == limited == [field[:nodes] for field in largest]

  @parameterized.parameters(*KINDS)
  def test_structure(self, conditional, step):
    """Parents first, ancestors in the mask, no child twice."""
    for seed in range(6):
      case = lattice(seed, conditional=conditional, step=step)
      for nodes in (1, 7, 64):
        tree = device(*case, nodes=nodes)
        index = np.arange(nodes)
        assert (tree.parents < index).all()
        np.testing.assert_array_equal(tree.mask, trees.mask_of(tree.parents))
        np.testing.assert_array_equal(tree.depth, trees.depths(tree.parents))
        n = int(tree.count)
        children = list(zip(tree.parents[:n], tree.tokens[:n], strict=True))
        assert len(set(children)) == n
        sent = tree_lib.nodes_of(tree)
        assert not sent.prefill and sent.size == tree.size == nodes
        assert sent.mask is tree.mask and sent.count is tree.count

  @parameterized.parameters(*STEPS)
  def test_of_width_one_it_is_the_chain(self, step):
    """One candidate per slot, or no room for more than first choices."""
    request = sampling.Sampling(
      **dict.fromkeys(
        (f for f in sampling.Sampling.__dataclass_fields__),
        jnp.asarray(0),
      )
    )
    for seed in range(8):
      tokens, scores, _, count = lattice(seed, conditional=False, step=step)
      for limit in (0, 5, 15):
        chain = draft.chain(
          draft.Lattice(
            jnp.asarray(tokens), jnp.asarray(scores), jnp.asarray(count)
          ),
          valid_vocab=VOCAB,
          limit=jnp.asarray(limit),
          sampling=request,
          position=jnp.asarray(0),
          sample=False,
        )
        length = int(chain.count)
        expected = [7, *np.asarray(chain.tokens)[:length].tolist()]
        thin = device(
          tokens[:, :1], scores[:, :1], None, count, nodes=16, drafts=limit
        )
        wide = device(tokens, scores, None, count, nodes=128, depth=limit)
        assert live(thin)[0] == expected
        assert live(thin)[1] == list(range(-1, length))
        assert [field[: length + 1] for field in live(wide)] == live(thin)

  def test_first_choices_follow_the_parent(self):
    for seed in range(20):
      case = lattice(seed, conditional=True, step=None)
      tokens, scores, order, count = case
      assert order is not None
      place, expected = 0, []
      for slot in range(min(count, 9)):
        if scores[slot, place, 0] == -np.inf:
          break
        place = int(order[slot, place, 0])
        expected.append(int(tokens[slot, place]))
      tree = device(*case, nodes=16, depth=9)
      got = live(tree)[0][1 : 1 + len(expected)]
      assert got == expected
      assert live(tree)[1][: 1 + len(expected)] == list(
        range(-1, len(expected))
      )

  @parameterized.parameters(None, 0.5)
  def test_marginal_is_blind_to_parents(self, step):
    differ = 0
    for seed in range(20):
      case = lattice(seed, conditional=True, step=step)
      tokens, scores, order, count = case
      assert order is not None
      place, flat, ids = 0, [], []
      for slot in range(SLOTS):
        flat.append(scores[slot, place])
        ids.append(tokens[slot, order[slot, place]])
        place = int(order[slot, place, 0])
      flat, ids = np.stack(flat), np.stack(ids)
      blind = tree_lib.marginal(
        jnp.asarray(tokens),
        jnp.asarray(scores),
        order=jnp.asarray(order),
        valid_vocab=VOCAB,
      )
      blind_ids, blind_scores = map(np.asarray, blind)
      np.testing.assert_array_equal(blind_scores, flat)
      there = flat > -np.inf
      np.testing.assert_array_equal(blind_ids[there], ids[there])
      tree = device(blind_ids, blind_scores, None, count, nodes=33)
      check(tree, oracle(ids, flat, None, count, nodes=33))
      check(tree, oracle(*case, nodes=33, blind=True))
      aware = device(*case, nodes=33)
      differ += live(tree) != live(aware)
      length = 1 + sum(
        n.slot == i for i, n in enumerate(oracle(*case, nodes=1 + SLOTS))
      )
      assert [f[:length] for f in live(tree)] == [
        f[:length] for f in live(aware)
      ]
    assert differ > 10

  def test_text_that_is_copied(self):
    """Prompt lookup: one certain candidate per slot, and none."""
    tokens = np.asarray([[3], [1], [3], [0]], np.int32)
    scores = np.zeros((4, 1), np.float32)
    tree = device(tokens, scores, None, 4, nodes=7)
    assert live(tree)[:2] == [[7, 3, 1, 3, 0], [-1, 0, 1, 2, 3]]
    assert device(tokens, scores, None, 0, nodes=7).count == 1

  def test_ties_among_certain_nodes(self):
    """Equal scores everywhere: token, then age of the parent, decide."""
    tokens = np.tile(np.asarray([4, 9, 30], np.int32), (4, 1))
    for order in (None, np.tile(np.arange(3, dtype=np.uint8), (4, 3, 1))):
      shape = (4, 3) if order is None else (4, 3, 3)
      case = (tokens, np.zeros(shape, np.float32), order, 4)
      for nodes in BUDGETS:
        check(device(*case, nodes=nodes), oracle(*case, nodes=nodes))

  def test_float64_lattices_keep_their_sums(self):
    tokens, scores, _, count = lattice(3, conditional=False)
    rng = np.random.default_rng(0)
    scores = np.sort(scores + 1e-9 * rng.random(scores.shape))[:, ::-1]
    with jax.enable_x64(True):
      tree = device(tokens, scores, None, count, nodes=64)
    assert tree.scores.dtype == np.float64
    recording = lattices.Recording(
      "r",
      False,
      1,
      np.zeros(1, np.int32),
      tokens[None],
      scores[None],
      None,
      np.asarray([count], np.int16),
    )
    check(tree, replay.BestFirst(64).build(recording, 0))

  def test_half_precision_sums_are_float32(self):
    tokens, scores, _, count = lattice(4, conditional=False)
    scores = scores.astype(np.float16)
    tree = device(tokens, scores, None, count, nodes=64)
    assert tree.scores.dtype == np.float32
    check(tree, oracle(tokens, scores, None, count, nodes=64))

  def test_a_tree_has_an_anchor(self):
    tokens, scores, order, count = lattice(0, conditional=False)
    with pytest.raises(ValueError, match="a tree of 0 nodes"):
      device(tokens, scores, order, count, nodes=0)


def test_limits_compile_once():
  traces = []

  @jax.jit
  def limited(anchor, tokens, scores, order, count, depth, drafts):
    traces.append(None)
    return tree_lib.best_first(
      anchor,
      tokens,
      scores,
      count,
      order=order,
      nodes=16,
      valid_vocab=VOCAB,
      depth=depth,
      drafts=drafts,
    )

  tokens, scores, order, _ = lattice(0, conditional=True)
  for numbers in ((1, 15, 15, 15), (2, 3, 2, 9), (3, 15, 0, 0)):
    anchor, count, depth, drafts = map(np.int32, numbers)
    tree = limited(anchor, tokens, scores, order, count, depth, drafts)
    assert tree.tokens[0] == anchor and tree.count <= 1 + drafts
  assert len(traces) == 1


def test_many_at_once():
  """As a batch of requests would build them."""
  cases = [lattice(s, conditional=True, step=0.5) for s in range(4)]
  tokens, scores, order, count = (np.stack(x) for x in zip(*cases, strict=True))
  limits = np.asarray([3, 9, 15, 15])
  batch = jax.vmap(functools.partial(build, nodes=16))(
    tokens, scores, order, count, limits, limits
  )
  for i, case in enumerate(cases):
    limit = int(limits[i])
    one = device(*case, nodes=16, depth=limit, drafts=limit)
    assert live(jax.tree.map(lambda x, i=i: np.asarray(x[i]), batch)) == live(
      one
    )


def test_what_an_accelerator_runs_is_the_same():
  """There the heap's loop is unrolled, with passes to spare."""

  def default(*args, cpu, default):
    del cpu
    return default(*args)

  with mock.patch.object(jax.lax, "platform_dependent", default):
    unrolled = jax.jit(grow, static_argnames=("nodes",))
    for seed, nodes in itertools.product(range(6), (2, 9, 20)):
      case = lattice(seed, conditional=True, step=0.5)
      tree = unrolled(*case, SLOTS, nodes - 1, nodes=nodes)
      check(jax.tree.map(np.asarray, tree), oracle(*case, nodes=nodes))
