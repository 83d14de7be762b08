"""Chains through lattices, with and without a parent axis, by plain walks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding import draft
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import tree as tree_lib

VOCAB, SLOTS, CANDIDATES = 40, 15, 6
POSITION = 11


def lattice(seed, *, conditional, step=None) -> draft.Lattice:
  """Random ids, strangers among them, and scores; NaN and -inf among them.

  Args:
    seed: of everything.
    conditional: with a parent axis.
    step: scores are multiples of it, so that there are ties.
  """
  rng = np.random.default_rng(seed)
  shape = (SLOTS, CANDIDATES) + ((CANDIDATES,) if conditional else ())
  tokens = np.stack(
    [rng.permutation(VOCAB + 4)[:CANDIDATES] for _ in range(SLOTS)]
  )
  tokens = np.where(tokens >= VOCAB + 2, -1, tokens)
  scores = rng.normal(0, 2.0, shape)
  if step is not None:
    scores = np.round(scores / step) * step
  for value in (-np.inf, np.nan):
    scores = np.where(rng.random(shape) < 0.1, value, scores)
  # A parent without children now and then.
  gone = rng.random((*shape[:-1], 1)) < 0.03
  scores = np.where(gone, -np.inf, scores)
  count = SLOTS if rng.random() < 0.7 else rng.integers(0, SLOTS + 1)
  return draft.Lattice(
    tokens=jnp.asarray(tokens, jnp.int32),
    scores=jnp.asarray(scores, jnp.float32),
    count=jnp.asarray(count, jnp.int32),
  )


def request(temperature=1.0, seed=0) -> sampling_lib.Sampling:
  params = sampling_lib.SamplingParams(temperature=temperature, seed=seed)
  return sampling_lib.Sampling.of(params, jnp.float32)


@functools.partial(jax.jit, static_argnames=("sample",))
def chain(lattice, limit, sampling, *, sample):
  return draft.chain(
    lattice,
    valid_vocab=VOCAB,
    limit=limit,
    sampling=sampling,
    position=jnp.asarray(POSITION, jnp.int32),
    sample=sample,
  )


@jax.jit
def first_choices(lattice, limit):
  """The chain as the best-first tree has it: no room for more."""
  return tree_lib.best_first(
    jnp.asarray(7),
    lattice.tokens,
    lattice.scores,
    lattice.count,
    nodes=1 + SLOTS,
    valid_vocab=VOCAB,
    depth=limit,
  )


def rows_of(given: draft.Lattice):
  """scores[slot](parent) and tokens, in NumPy; NaN and strangers dropped."""
  scores = np.asarray(given.scores, np.float64)
  tokens = np.asarray(given.tokens)
  there = (tokens >= 0) & (tokens < VOCAB)

  def row(slot, parent):
    own = scores[slot] if scores.ndim == 2 else scores[slot, parent]
    return np.where(there[slot] & ~np.isnan(own), own, -np.inf)

  return tokens, row


class ChainTest(parameterized.TestCase):
  @parameterized.product(conditional=(False, True), step=(None, 0.5, 2.0))
  def test_greedy(self, conditional, step):
    """The best given the actual parent; a tree of width one."""
    lengths = set()
    for seed in range(25):
      given = lattice(seed, conditional=conditional, step=step)
      tokens, row = rows_of(given)
      for limit in (0, 4, SLOTS):
        expected, parent = [], 0
        for slot in range(min(limit, int(given.count))):
          scores = row(slot, parent)
          if scores.max() == -np.inf:
            break
          best = np.flatnonzero(scores == scores.max())
          parent = best[np.argmin(tokens[slot, best])]
          expected.append(int(tokens[slot, parent]))
        found = chain(given, limit, request(), sample=False)
        count = int(found.count)
        lengths.add(count)
        self.assertEqual(found.tokens[:count].tolist(), expected)
        tree = first_choices(given, limit)
        if limit == SLOTS or limit == 0:
          # Where there is room, other nodes stand behind the chain.
          self.assertEqual(
            tree.tokens[1 : 1 + count].tolist(), expected, (seed, limit)
          )
    self.assertGreater(len(lengths), 5)

  @parameterized.product(conditional=(False, True), temperature=(0.6, 1.0, 1.7))
  def test_sampled(self, conditional, temperature):
    """Drawn given the parent drawn; the law is that of this parent."""
    for seed in range(15):
      given = lattice(seed, conditional=conditional)
      tokens, row = rows_of(given)
      noise = np.asarray(
        sampling_lib.gumbel(
          jnp.uint32(seed),
          POSITION + 1 + jnp.arange(SLOTS, dtype=jnp.int32),
          CANDIDATES,
          sampling_lib.Stream.DRAFT,
          jnp.float32,
        )
      )
      found = chain(given, SLOTS, request(temperature, seed), sample=True)
      parent, count = 0, 0
      for slot in range(int(given.count)):
        scores = row(slot, parent)
        if scores.max() == -np.inf:
          break
        odds = np.exp((scores - scores.max()) / temperature)
        np.testing.assert_allclose(
          np.exp(found.log_law[slot]), odds / odds.sum(), atol=1e-6
        )
        there = scores > -np.inf
        np.testing.assert_array_equal(
          found.candidates[slot][there], tokens[slot][there]
        )
        parent = int(np.argmax(scores / temperature + noise[slot]))
        self.assertEqual(int(found.tokens[slot]), tokens[slot, parent])
        count += 1
      self.assertEqual(int(found.count), count)

  def test_ties_are_those_of_the_scores(self):
    """Normalised, both scores would be the same float32 number."""
    given = draft.Lattice(
      tokens=jnp.asarray([[4, 9], [4, 9]], jnp.int32),
      scores=jnp.asarray([[-1e-9, 0.0], [0.0, 0.0]], jnp.float32),
      count=jnp.asarray(2, jnp.int32),
    )
    found = chain(given, SLOTS, request(), sample=False)
    self.assertEqual(found.log_law[0, 0], found.log_law[0, 1])
    self.assertEqual(found.tokens.tolist(), [9, 4])
    tree = tree_lib.best_first(
      jnp.asarray(7),
      given.tokens,
      given.scores,
      given.count,
      nodes=3,
      valid_vocab=VOCAB,
    )
    self.assertEqual(tree.tokens.tolist(), [7, 9, 4])
