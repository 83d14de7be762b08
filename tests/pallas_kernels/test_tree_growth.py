"""The tree's kernels are the reference bit for bit, interpreted; they lower."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import tree_growth
from specpilot_jax.decoding import draft, policy
from specpilot_jax.decoding import tree as tree_lib
from tests import notes
from tests.pallas_kernels import lowering

VOCAB = 40
SLOTS, CANDIDATES = 15, 16
CASES = 200 if notes.FULL else 20
"""Random lattices per shape."""

NO_LIMITS = np.int32(SLOTS), np.int32(SLOTS), np.int32(127)
"""Slots, depth, drafts."""

SIZES = (1, 2, 16, 33, 64, 96, 128) if notes.FULL else (1, 33, 128)


@functools.partial(jax.jit, static_argnames=("nodes", "implementation"))
def build(case, *, nodes, implementation):
  tokens, scores, order, count, depth, drafts = case
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
    implementation=implementation,
  )


def lattice(
  rng, *, by_parent, ordered=False, slots=SLOTS, candidates=CANDIDATES
):
  """Tokens, scores, order and limits: ties, gaps, strangers, short counts."""
  rows = [rng.permutation(VOCAB + 4)[:candidates] - 2 for _ in range(slots)]
  shape = (slots, candidates) + ((candidates,) if by_parent else ())
  scores = rng.normal(0, 2.0, shape)
  scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
  step = rng.choice([0, 0.125, 1.0, 4.0])
  if step:  # -0 among them
    scores = np.round(scores / step) * step
  draw = rng.random(shape)
  scores = np.where(draw < rng.choice([0, 0.2, 0.6]), -np.inf, scores)
  scores = np.where(draw > 0.97, np.nan, scores)
  order = np.argsort(rng.random(shape), axis=-1) if ordered else None
  limited = rng.random(3) < 0.3
  count, depth, drafts = np.where(
    limited, rng.integers(0, (slots + 1, slots + 2, 140)), (slots, slots, 140)
  )
  return (
    np.stack(rows).astype(np.int32),
    scores.astype(np.float32),
    None if order is None else order.astype(np.uint8),
    np.int32(count),
    np.int32(depth),
    np.int32(drafts),
  )


def bits(x):
  x = np.asarray(x)
  return x.view(np.int32) if x.dtype == np.float32 else x


class TreeGrowthTest(parameterized.TestCase):
  def check(self, case, nodes) -> int:
    """The same to the last bit, places without a node included."""
    expected, found = (
      jax.tree.map(bits, build(case, nodes=nodes, implementation=x))
      for x in ("reference", "interpret")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    self.assertEqual(
      [x.dtype for x in jax.tree.leaves(found)],
      [x.dtype for x in jax.tree.leaves(expected)],
    )
    return int(expected.count)

  @parameterized.product(nodes=SIZES, by_parent=(False, True))
  def test_is_the_reference(self, nodes, by_parent):
    rng = np.random.default_rng(nodes)
    sizes = [
      self.check(lattice(rng, by_parent=by_parent), nodes) for _ in range(CASES)
    ]
    self.assertIn(nodes, sizes)

  @parameterized.parameters(
    dict(by_parent=True, ordered=True, candidates=6),
    dict(by_parent=True, slots=31, candidates=3),
    dict(by_parent=False, slots=1, candidates=1),
  )
  def test_other_shapes(self, **shape):
    rng = np.random.default_rng(0)
    for _ in range(CASES):
      self.check(lattice(rng, **shape), 33)

  def test_all_scores_equal(self):
    """Token, then age of the parent, decide."""
    tokens = np.tile(np.arange(CANDIDATES, dtype=np.int32), (SLOTS, 1))
    for shape in ((SLOTS, CANDIDATES), (SLOTS, CANDIDATES, CANDIDATES)):
      case = tokens, np.zeros(shape, np.float32), None, *NO_LIMITS
      self.assertEqual(self.check(case, 128), 128)

  def test_half_precision(self):
    rng = np.random.default_rng(0)
    tokens, scores, *rest = lattice(rng, by_parent=True)
    self.check((tokens, jnp.asarray(scores, jnp.bfloat16), *rest), 33)

  def test_sums_that_overflow_are_no_paths(self):
    tokens, scores, *_ = lattice(np.random.default_rng(0), by_parent=True)
    scores = np.maximum(scores, -10) * np.float32(3e37)
    case = tokens, scores, None, *NO_LIMITS
    self.check(case, 128)

  def test_many_at_once(self):
    rng = np.random.default_rng(0)
    cases = [lattice(rng, by_parent=True) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *cases)
    many = jax.vmap(
      functools.partial(build, nodes=33, implementation="interpret")
    )(stacked)
    for i, case in enumerate(cases):
      one = build(case, nodes=33, implementation="reference")
      jax.tree.map(
        lambda a, b, i=i: np.testing.assert_array_equal(bits(a[i]), bits(b)),
        many,
        one,
      )

  def test_marginal(self):
    """Where there are candidates; the others are not defined."""
    rng = np.random.default_rng(0)
    blind = jax.jit(
      functools.partial(tree_lib.marginal, valid_vocab=VOCAB),
      static_argnames="implementation",
    )
    for _ in range(CASES):
      tokens, scores, *_ = lattice(rng, by_parent=True)
      (expected_ids, expected), (ids, found) = (
        blind(tokens, scores, implementation=x)
        for x in ("reference", "interpret")
      )
      there = np.asarray(expected) > -np.inf
      np.testing.assert_array_equal(bits(found)[there], bits(expected)[there])
      np.testing.assert_array_equal(found > -np.inf, there)
      np.testing.assert_array_equal(ids[there], expected_ids[there])

  @parameterized.product(
    gpu=tuple(lowering.SERVERS), nodes=(16, 128), by_parent=(False, True)
  )
  def test_lowers(self, gpu, nodes, by_parent):
    """One at a time, or many; two launches, and no loop around either."""
    chosen = policy.Policy("best_first", nodes, 16, nodes)

    def run(tokens, scores, count, anchor, limit, depth):
      tree = chosen.tree_of(
        draft.Lattice(tokens, scores, count),
        anchor,
        nodes=limit,
        depth=depth,
        valid_vocab=248_077,
        implementation="triton",
      )
      return tree_lib.nodes_of(tree)

    batch = (4,) if nodes == 16 else ()
    given = [
      jax.ShapeDtypeStruct((*batch, *shape), dtype)
      for shape, dtype in (
        ((SLOTS, CANDIDATES), jnp.int32),
        ((SLOTS, *(CANDIDATES,) * (1 + by_parent)), jnp.float32),
        *[((), jnp.int32)] * 4,
      )
    ]
    text = lowering.lower(jax.vmap(run) if batch else run, gpu, *given)
    self.assertEqual(text.count("@__gpu$xla.gpu.triton"), 2)
    self.assertIn("tree_table", text)
    self.assertIn("tree_growth", text)
    for operation in ("while", "sort", "case"):
      self.assertNotIn(f"stablehlo.{operation}", text)

  def test_refusals(self):
    tokens, scores, *rest = lattice(np.random.default_rng(0), by_parent=True)
    with jax.enable_x64(True):
      case = (tokens, np.float64(scores), *rest)
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        build(case, nodes=16, implementation="interpret")
      tree = jax.eval_shape(
        functools.partial(build, nodes=16, implementation="reference"), case
      )
      self.assertEqual(tree.scores.dtype, jnp.float64)

  @parameterized.parameters(
    (200, 256, 64, True),
    (300, 256, 64, True),
    (300, 256, 65, False),
    (600, 256, 64, False),
  )
  def test_entries_that_an_int32_does_not_hold(self, slots, wide, nodes, fits):
    number = jax.ShapeDtypeStruct((), jnp.int32)
    grow = functools.partial(
      tree_growth.grow,
      order=None,
      nodes=nodes,
      valid_vocab=1000,
      implementation="interpret",
    )
    expectation = contextlib.nullcontext()
    if not fits:
      expectation = self.assertRaisesRegex(
        ValueError, f"does not take {nodes} nodes over [0-9]* addresses"
      )
    with expectation:
      jax.eval_shape(
        grow,
        number,
        jax.ShapeDtypeStruct((slots, wide), jnp.int32),
        jax.ShapeDtypeStruct((slots, wide, wide), jnp.float32),
        slots=number,
        limit=number,
      )


if __name__ == "__main__":
  absltest.main()
