"""How many positions a request verifies, against sums written out."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.mechanisms import dynamic_draft
from specpilot_jax.mechanisms.dynamic_draft import Recent
from tests.decoding import kit

length = jax.jit(dynamic_draft.length)
learned = jax.jit(dynamic_draft.learned)


def recent(expected, accepted):
  return Recent(jnp.float32(expected), jnp.float32(accepted))


def oracle(expected, accepted, survival, price) -> int:
  trust = (accepted + 1) / (expected + 1)
  best, most = None, -np.inf
  for positions in (16, 12, 8):
    worth = sum(min(trust * p, 1) - price for p in survival[: positions - 1])
    if worth > most + 1e-6:
      best, most = positions, worth
  assert best is not None
  return best


class DynamicDraftTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def test_against_sums(self):
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
      survival = np.cumprod(rng.uniform(0.5, 1, 15)).astype(np.float32)
      expected, accepted = rng.exponential(10, 2)
      price = rng.exponential(0.1)
      got = int(length(recent(expected, accepted), survival, price))
      self.assertEqual(got, oracle(expected, accepted, survival, price))
      seen.add(got)
    self.assertEqual(seen, {16, 12, 8})

  def test_free_nodes_are_all_verified(self):
    """As stock does: at low load a node costs nothing."""
    for survival in (np.zeros(15), np.full(15, 1e-9), np.ones(15)):
      got = length(recent(9, 0), survival.astype(np.float32), 0.0)
      self.assertEqual(int(got), 16)

  def test_dear_nodes(self):
    survival = np.cumprod(np.full(15, 0.8)).astype(np.float32)
    lengths = [
      int(length(recent(0, 0), survival, price))
      for price in (0.0, 0.03, 0.05, 0.08, 0.2)
    ]
    self.assertEqual(lengths, sorted(lengths, reverse=True))
    self.assertEqual((lengths[0], lengths[-1]), (16, 8))

  def test_a_short_block_is_not_cut(self):
    """Fewer positions than the shortest length: nothing to decide."""
    survival = np.full(7, 0.01, np.float32)
    self.assertEqual(int(length(recent(0, 0), survival, 0.5)), 16)

  def test_recent_acceptance_counts(self):
    survival = np.cumprod(np.full(15, 0.8)).astype(np.float32)
    seen = Recent.fresh()
    lengths = []
    for accepted in [0] * 8 + [15] * 30:
      positions = length(seen, survival, 0.05)
      lengths.append(int(positions))
      accepted = jnp.minimum(accepted, positions - 1)
      seen = learned(seen, survival, positions - 1, accepted)
    self.assertEqual(lengths[7], 8)
    self.assertEqual(lengths[-1], 16)

  def test_sums_forget(self):
    survival = np.full(15, 0.5, np.float32)
    seen = learned(recent(10, 20), survival, jnp.int32(4), jnp.int32(3))
    memory = dynamic_draft.MEMORY
    np.testing.assert_allclose(seen.expected, 10 * memory + 2)
    np.testing.assert_allclose(seen.accepted, 20 * memory + 3)

  @parameterized.parameters(False, True)
  def test_survival(self, confident):
    """Of first choices: the confidence head's word where there is one."""
    rng = np.random.default_rng(1)
    raw = rng.normal(size=(5, 3, 3))
    sure = rng.uniform(size=(5, 3)).astype(np.float32)
    lattice = Lattice(
      tokens=jnp.asarray([[4, 1, 2]] * 5, jnp.int32),
      scores=jnp.asarray(raw),
      count=jnp.asarray(4),
      confidence=jnp.asarray(sure) if confident else None,
    )
    first = draft_lib.chain(
      lattice,
      valid_vocab=9,
      limit=lattice.count,
      sampling=sampling_lib.Sampling.of(
        sampling_lib.SamplingParams(), jnp.float32
      ),
      position=jnp.asarray(0),
      sample=False,
    )
    got = dynamic_draft.survival(lattice, first)
    want, place, so_far = [], 0, 1.0
    for slot in range(4):
      row = np.exp(raw[slot, place]) / np.exp(raw[slot, place]).sum()
      so_far *= sure[slot, place] if confident else row.max()
      want.append(so_far)
      place = int(np.argmax(row))
    np.testing.assert_allclose(got, [*want, 0], rtol=1e-5)
