"""DSpark's Markov and confidence heads against their formulas, in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from scipy.special import expit, log_softmax, logsumexp

from specpilot_jax.decoding import draft, sampling
from specpilot_jax.models.drafters import dspark, learned
from specpilot_jax.models.drafters.config import DFlash2Config, DSparkConfig
from tests.checkpoints.test_widen import small_drafter
from tests.decoding import kit
from tests.zoo.test_training import drafter_config

CONFIG = drafter_config(kit.hybrid(), DSparkConfig)
SLOTS, VOCAB = CONFIG.block_size, CONFIG.vocab_size
ANCHOR = 7


class HeadsTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    self.target = kit.build(kit.hybrid(), "float64")
    model = small_drafter(config=CONFIG)
    assert isinstance(model, dspark.DSpark)
    self.model = model
    rng = np.random.default_rng(1)
    self.hidden = rng.normal(size=(SLOTS, CONFIG.hidden_size))
    self.base = 0.7 * rng.normal(size=(SLOTS, VOCAB))
    self.w1 = np.asarray(model.markov_head.markov_w1[...])
    self.w2 = np.asarray(model.markov_head.markov_w2.weight[...])

  def lattice(self, candidates: int) -> draft.Lattice:
    drafter = learned.drafter(self.model, self.target, candidates=candidates)
    return drafter.lattice(
      self.model,
      jnp.asarray(self.hidden),
      jnp.asarray(self.base),
      jnp.int32(ANCHOR),
    )

  def logits(self, slot: int, parent: int) -> np.ndarray:
    return self.base[slot] + self.w2 @ self.w1[parent]

  def parents(self, lattice, slot: int) -> list[int]:
    if slot == 0:
      return [ANCHOR]
    return np.asarray(lattice.tokens[slot - 1]).tolist()

  def likely(self) -> list[int]:
    """Parents that two passes find."""
    chosen = self.base
    for _ in range(2):
      parents = [ANCHOR, *np.argmax(chosen, axis=1)[:-1].tolist()]
      chosen = np.stack([self.logits(s, p) for s, p in enumerate(parents)])
    return parents

  def test_every_block_row_is_a_slot(self):
    self.assertEqual(self.lattice(6).tokens.shape, (SLOTS, 6))
    drafter = learned.drafter(self.model, self.target)
    self.assertEqual(drafter.num_slots, CONFIG.block_size)

  def test_with_every_token_the_law_is_exact(self):
    found = self.lattice(VOCAB)
    for slot in range(SLOTS):
      order = np.asarray(found.tokens[slot])
      self.assertEqual(sorted(order.tolist()), list(range(VOCAB)))
      for place, parent in enumerate(self.parents(found, slot)):
        np.testing.assert_allclose(
          found.scores[slot, place],
          log_softmax(self.logits(slot, parent))[order],
          atol=1e-12,
        )

  def test_scores_of_few(self):
    found = self.lattice(6)
    for slot, likely in enumerate(self.likely()):
      full = self.logits(slot, likely)
      best = np.argsort(-full)[:6]
      np.testing.assert_array_equal(found.tokens[slot], best)
      rest = np.delete(full, best)
      for place, parent in enumerate(self.parents(found, slot)):
        own = self.logits(slot, parent)[best]
        expected = own - logsumexp(np.concatenate([own, rest]))
        np.testing.assert_allclose(
          found.scores[slot, place], expected, atol=1e-11
        )
        if parent == likely:
          np.testing.assert_allclose(
            expected, log_softmax(full)[best], atol=1e-12
          )

  def test_a_chain_draws_from_left_to_right(self):
    """As the released drafter samples: full logits given the token before."""
    parent, expected = ANCHOR, []
    for slot in range(SLOTS):
      parent = int(np.argmax(self.logits(slot, parent)))
      expected.append(parent)
    for candidates in (VOCAB, 6):
      drafts = draft.chain(
        self.lattice(candidates),
        valid_vocab=VOCAB,
        limit=jnp.int32(SLOTS),
        sampling=sampling.Sampling.of(sampling.SamplingParams(), jnp.float64),
        position=jnp.int32(9),
        sample=False,
      )
      self.assertEqual(drafts.tokens.tolist(), expected)
    self.assertNotEqual(expected, np.argmax(self.base, axis=1).tolist())

  def test_confidence(self):
    found = self.lattice(6)
    head = self.model.confidence_head
    assert found.confidence is not None
    w, b = np.asarray(head.weight[...]), float(head.bias[0])
    for slot in range(SLOTS):
      for place, parent in enumerate(self.parents(found, slot)):
        read = np.concatenate([self.hidden[slot], self.w1[parent]])
        self.assertAlmostEqual(
          float(found.confidence[slot, place]), expit(w @ read + b), places=12
        )


def width(aval: Any) -> int:
  return aval.shape[-1]


class SizeTest(parameterized.TestCase):
  @parameterized.parameters(DFlash2Config, DSparkConfig)
  def test_no_whole_vocabulary_is_sorted(self, made):
    target = kit.build(kit.hybrid(vocab_size=20_000), "float32")
    config = dataclasses.replace(
      drafter_config(target.config, made), mask_token_id=1
    )
    model = small_drafter(jnp.float32, config)
    drafter = learned.drafter(model, target, candidates=8)
    jaxpr = jax.make_jaxpr(
      lambda h, u: drafter.lattice(model, h, u, jnp.int32(3))
    )(
      jnp.zeros((config.num_slots, config.hidden_size)),
      jnp.zeros((config.num_slots, 20_000)),
    )
    sorted_sizes = [
      width(eqn.invars[0].aval)
      for eqn in jaxpr.eqns
      if eqn.primitive.name in ("top_k", "sort")
    ]
    self.assertNotEmpty(sorted_sizes)
    self.assertLessEqual(max(sorted_sizes), 8 * 256)


if __name__ == "__main__":
  absltest.main()
