"""Noise, filters and penalties against plain oracles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from scipy import stats

from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.sampling import SamplingParams, Stream
from tests import trees


def arrays(dtype=np.float32, **settings) -> sampling_lib.Sampling:
  return sampling_lib.Sampling.of(SamplingParams(**settings), dtype)


def noise(seed, positions, size, stream=Stream.TARGET, dtype=jnp.float32):
  return np.asarray(
    sampling_lib.gumbel(
      jnp.uint32(seed), jnp.asarray(positions, jnp.int32), size, stream, dtype
    )
  )


class GumbelTest(parameterized.TestCase):
  def test_law(self):
    x = noise(1, np.arange(400), 500).ravel().astype(np.float64)
    self.assertTrue(np.isfinite(x).all())
    # Five standard errors.
    self.assertAlmostEqual(
      x.mean(), np.euler_gamma, delta=5 * np.sqrt(np.pi**2 / 6 / x.size)
    )
    self.assertAlmostEqual(x.var(), np.pi**2 / 6, delta=0.03)
    self.assertGreater(stats.kstest(x, "gumbel_r").pvalue, 1e-3)
    # The upper tail decides an argmax.
    tail = x[x > 5] - 5
    expected = x.size * -np.expm1(-np.exp(-5))
    self.assertAlmostEqual(tail.size, expected, delta=5 * np.sqrt(expected))
    self.assertGreater(stats.kstest(tail, "expon").pvalue, 1e-3)

  def test_streams_positions_and_seeds_are_independent(self):
    size = 20_000
    drawn = [
      noise(seed, [position], size, stream)[0]
      for seed in (0, 1, 2**32 - 1)
      for position in (0, 1, 2)
      for stream in Stream
    ]
    correlation = np.corrcoef(drawn)
    off = correlation[~np.eye(len(drawn), dtype=bool)]
    self.assertLess(np.abs(off).max(), 5 / np.sqrt(size))

  def test_a_position_has_its_noise_in_any_pass(self):
    whole = noise(5, np.arange(8), 30)
    for position in range(8):
      np.testing.assert_array_equal(
        noise(5, [position], 30)[0], whole[position]
      )
    np.testing.assert_array_equal(noise(5, [3, 3, 6], 30), whole[[3, 3, 6]])

  def test_same_bits_in_every_precision(self):
    """A float64 referee draws the noise of a float32 engine."""
    single = noise(7, np.arange(20), 1000)
    with jax.enable_x64(True):
      same = noise(7, np.arange(20), 1000)
      double = noise(7, np.arange(20), 1000, dtype=jnp.float64)
    np.testing.assert_array_equal(single, same)
    self.assertEqual(double.dtype, np.float64)
    np.testing.assert_allclose(single, double, atol=3e-6)

  def test_uniform(self):
    u = np.asarray(
      sampling_lib.uniform(
        jnp.uint32(3), jnp.arange(50_000, dtype=jnp.int32), Stream.ACCEPT
      )
    )
    self.assertGreaterEqual(u.min(), 0)
    self.assertLess(u.max(), 1)
    self.assertGreater(stats.kstest(u, "uniform").pvalue, 1e-3)


def kept_oracle(scaled, top_k, top_p, min_p):
  """Tokens that survive, one row: min-p, then top-k, then top-p.

  Each filter keeps whole groups of equal scores.
  """
  law = np.exp(scaled - scaled.max())
  law /= law.sum()
  kept = law >= min_p * law.max() * (1 - 1e-12)
  if top_k:
    kept &= scaled >= np.sort(scaled)[::-1][min(top_k, scaled.size) - 1]
  if top_p < 1:
    inside = np.where(kept, law, 0)
    inside /= inside.sum()
    chosen, mass = np.zeros(scaled.size, bool), 0.0
    for token in np.argsort(-inside, kind="stable"):
      if mass >= top_p or not kept[token]:
        break
      chosen[token] = True
      mass += inside[token]
    kept &= scaled >= scaled[chosen].min()
  return kept


class FilterTest(parameterized.TestCase):
  @parameterized.product(
    top_k=(0, 1, 3, 100), top_p=(1.0, 0.9, 0.3, 1e-9), min_p=(0.0, 0.05, 1.0)
  )
  def test_thresholds(self, top_k, top_p, min_p):
    with jax.enable_x64(True):
      rng = np.random.default_rng(0)
      logits = rng.normal(size=(40, 12)) * 3
      # Ties at every place, and ids that do not exist.
      logits[20:] = np.round(logits[20:])
      logits[30:, 9:] = -np.inf
      sampling = arrays(
        np.float64, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p
      )
      features = sampling_lib.Features(False, True, False)
      law = np.asarray(
        sampling_lib.law(jnp.asarray(logits), sampling, features)
      )
      for row in range(40):
        scaled = logits[row] / 0.7
        kept = kept_oracle(scaled, top_k, top_p, min_p) & np.isfinite(scaled)
        self.assertEqual((law[row] > 0).tolist(), kept.tolist())
        expected = np.where(kept, np.exp(scaled - scaled.max()), 0)
        np.testing.assert_allclose(
          law[row], expected / expected.sum(), atol=1e-12
        )

  def test_choice_stays_inside(self):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(500, 30)).astype(np.float32)
    sampling = arrays(temperature=1.0, top_k=4, seed=3)
    features = sampling_lib.Features(False, True, False)
    positions = jnp.arange(500, dtype=jnp.int32)
    chosen = np.asarray(
      sampling_lib.choose(jnp.asarray(logits), sampling, features, positions)
    )
    best = np.argsort(-logits, axis=1)[:, :4]
    self.assertTrue((chosen[:, None] == best).any(axis=1).all())
    self.assertGreater(len(set((chosen[:, None] == best).argmax(axis=1))), 3)

  def test_greedy_takes_the_lowest_id_of_equals(self):
    logits = jnp.asarray([[1.0, 3.0, 3.0, 0.0]])
    features = sampling_lib.Features(True, False, False)
    chosen = sampling_lib.choose(
      logits, arrays(), features, jnp.zeros((1,), jnp.int32)
    )
    self.assertEqual(chosen.tolist(), [1])

  def test_gap(self):
    """Distance from being the choice, in logits, at any temperature."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(50, 20)).astype(np.float32)
    positions = jnp.arange(50, dtype=jnp.int32)
    for settings, greedy in ((dict(), True), (dict(temperature=2.0), False)):
      sampling = arrays(**settings)
      features = sampling_lib.Features(greedy, False, False)
      noised = logits.copy()
      if not greedy:
        noised += 2.0 * noise(0, np.arange(50), 20)
      for token in (0, 7):
        gap = sampling_lib.choice_gap(
          jnp.asarray(logits),
          sampling,
          features,
          positions,
          jnp.full(50, token),
          0.5,
        )
        np.testing.assert_allclose(
          gap, noised.max(axis=1) - noised[:, token], atol=1e-5
        )

  def test_gap_at_a_cut_off(self):
    """A token just below the cut-off is held to that distance alone."""
    logits = np.array([[2.0, 1.0, 0.9, -3.0]], np.float32)
    sampling = arrays(temperature=1.0, top_k=2, seed=0)
    features = sampling_lib.Features(False, True, False)
    positions = jnp.arange(300, dtype=jnp.int32)
    rows = jnp.repeat(jnp.asarray(logits), 300, axis=0)
    chosen = sampling_lib.choose(rows, sampling, features, positions)
    gaps = sampling_lib.choice_gap(
      rows, sampling, features, positions, jnp.full(300, 2), 0.5
    )
    # Places where the token wins unless it is cut off.
    wins = (rows + noise(0, np.arange(300), 4)).argmax(axis=1) == 2
    self.assertFalse((np.asarray(chosen)[wins] == 2).any())
    gaps = np.asarray(gaps)[wins]
    self.assertGreater(len(gaps), 20)
    np.testing.assert_allclose(gaps, 0.1, atol=1e-6)


class PenaltyTest(parameterized.TestCase):
  def test_along_random_trees(self):
    rng = np.random.default_rng(0)
    settings = dict(
      presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.4
    )
    penalize = jax.jit(sampling_lib.penalize)
    with jax.enable_x64(True):
      sampling = arrays(np.float64, **settings)
      for _ in range(20):
        parents = trees.random_parents(rng, 9)
        tokens = rng.integers(0, 6, 9)
        prompt = rng.integers(0, 6, 3).tolist()
        output = rng.integers(0, 6, 4).tolist()
        output.append(int(tokens[0]))  # the root is the last output token
        logits = rng.normal(size=(9, 8))
        history = sampling_lib.History(
          output=jnp.asarray(np.bincount(output, minlength=8), jnp.int32),
          prompt=jnp.asarray(np.isin(np.arange(8), prompt)),
        )
        found = penalize(
          logits,
          sampling,
          history,
          jnp.asarray(tokens, jnp.int32),
          jnp.asarray(trees.mask_of(parents)),
        )
        for node in range(9):
          below_root = trees.path_to(parents, node)[1:]
          emitted = output + [int(tokens[i]) for i in below_root]
          for token in range(8):
            x = logits[node, token]
            if token in prompt or token in emitted:
              x = x / 1.4 if x > 0 else x * 1.4
            count = emitted.count(token)
            x = x + 0.3 * count - 0.7 * (count > 0)
            self.assertAlmostEqual(float(found[node, token]), x, places=12)

  def test_features_follow_the_settings(self):
    def of(**settings):
      return dataclasses.astuple(
        sampling_lib.Features.of(SamplingParams(**settings))
      )

    self.assertEqual(of(), (True, False, False))
    self.assertEqual(of(top_k=5), (True, False, False))
    self.assertEqual(of(temperature=1.0), (False, False, False))
    self.assertEqual(of(temperature=1.0, min_p=0.1), (False, True, False))
    self.assertEqual(of(frequency_penalty=0.1), (True, False, True))
