"""The gate: bounds, margins, skewness, and its calibration."""

import math

import numpy as np
import pytest
from absl.testing import parameterized
from scipy import stats

from experiments.controller import simulation, statistics
from specpilot_jax.errors import SpecPilotError


class BoundTest(parameterized.TestCase):
  @parameterized.parameters(8, 16, 64)
  def test_t_bound_is_scipys(self, k):
    r = np.random.default_rng(k).normal(0.02, 0.01, k)
    test = stats.ttest_1samp(r, 0.0, alternative="greater")
    self.assertAlmostEqual(
      statistics.t_bound(r), test.confidence_interval(0.95).low, places=12
    )

  @parameterized.parameters(32, 64)
  def test_bca_bound_is_scipys(self, k):
    r = np.random.default_rng(k).gamma(2.0, 0.01, k)
    found = stats.bootstrap(
      (r,), np.mean, alternative="greater", method="BCa", n_resamples=9_999,
      rng=np.random.default_rng(1),
    )  # fmt: skip
    low = found.confidence_interval.low
    self.assertLess(
      abs(statistics.bca_bound(r) - low), 0.1 * abs(r.mean() - low)
    )

  def test_a_single_unit_bounds_nothing(self):
    self.assertEqual(statistics.t_bound(np.array([0.1])), -math.inf)

  def test_the_smaller_bound_counts(self):
    for k in (29, 30):
      r = np.random.default_rng(5).gamma(0.5, 0.02, k)
      d = statistics.decide(r, 0.001)
      if k < statistics.BOOTSTRAP_UNITS:
        self.assertIsNone(d.bca_bound)
        self.assertEqual(d.bound, d.t_bound)
      else:
        self.assertIsNotNone(d.bca_bound)
        self.assertEqual(d.bound, min(d.t_bound, d.bca_bound or 0.0))

  def test_bounds_repeat(self):
    r = np.random.default_rng(2).normal(0.0, 0.01, 40)
    self.assertEqual(statistics.bca_bound(r), statistics.bca_bound(r))


class UnitTest(parameterized.TestCase):
  def test_a_linear_drift_cancels(self):
    drift = np.exp(0.01 * np.arange(8.0).reshape(2, 4))
    # S C C S, then C S S C; the true ratio is 1.1.
    stock = 1.1 * np.stack([drift[0, [0, 3]], drift[1, [1, 2]]])
    candidate = np.stack([drift[0, [1, 2]], drift[1, [0, 3]]])
    r = statistics.one_device_units(stock, candidate)
    np.testing.assert_allclose(r, math.log(1.1), rtol=1e-12)

  def test_devices_cancel(self):
    device = np.array([1.0, 1.3])
    r, a = statistics.two_device_units(1.1 * device[None], device[None])
    np.testing.assert_allclose(r, math.log(1.1), rtol=1e-12)
    np.testing.assert_allclose(a, math.log(1.3), rtol=1e-12)

  @parameterized.parameters(
    ([[1.0, 2.0, 3.0]],), ([1.0, 2.0],), ([],), ([[1.0, 0.0]],),
    ([[1.0, math.nan]],), ([[1.0, -1.0]],),
  )  # fmt: skip
  def test_wrong_times_are_refused(self, times):
    with pytest.raises(SpecPilotError, match="times of stock"):
      statistics.one_device_units(np.array(times), np.ones((1, 2)))


class GateTest(parameterized.TestCase):
  def test_no_noise_no_gate(self):
    d = statistics.decide(np.full(64, 0.5) + np.arange(64) * 1e-4, None)
    self.assertEqual(d.verdict, statistics.INCONCLUSIVE)
    self.assertIn("s_AA", d.reason)

  def test_too_few_units(self):
    d = statistics.decide(np.linspace(0.5, 0.51, 15), 0.001)
    self.assertEqual(d.verdict, statistics.INCONCLUSIVE)

  @parameterized.parameters(
    (0.0, False, 0.01), (0.004, False, 0.018), (0.004, True, 0.03),
    (0.02, True, 0.05),
  )  # fmt: skip
  def test_threshold(self, noise, diverged, expected):
    self.assertAlmostEqual(
      statistics.threshold(noise, diverged=diverged), expected
    )

  @parameterized.parameters((0.019, "reject"), (0.022, "accept"))
  def test_the_bound_decides(self, gain, verdict):
    r = math.log1p(gain) + np.random.default_rng(0).normal(0, 1e-3, 32)
    d = statistics.decide(r, 0.005)
    self.assertEqual(d.verdict, verdict)
    d = statistics.decide(r, 0.005, diverged=True)
    self.assertEqual(d.verdict, statistics.REJECT)

  def test_a_left_tail_is_not_trusted(self):
    r = np.full(20, 0.3) + np.random.default_rng(0).normal(0, 1e-3, 20)
    r[:2] = 0.1  # Two very slow requests of twenty.
    d = statistics.decide(r, 0.001)
    self.assertEqual(d.verdict, statistics.INCONCLUSIVE)
    self.assertIn("skewness", d.reason)

  @parameterized.parameters(4, 0)
  def test_too_few_sessions(self, k):
    with pytest.raises(SpecPilotError, match="A/A sessions"):
      statistics.s_aa([0.001] * k)

  def test_s_aa_is_a_root_mean_square(self):
    self.assertAlmostEqual(statistics.s_aa([3e-3, -4e-3] * 4), 12.5e-6**0.5)

  def test_values_that_are_no_numbers(self):
    with pytest.raises(SpecPilotError, match="finite"):
      statistics.decide(np.array([0.1, math.nan]), 0.001)
    with pytest.raises(SpecPilotError, match="not finite"):
      statistics.s_aa([math.inf] * 8)

  def test_familywise(self):
    self.assertAlmostEqual(statistics.familywise(0.05, 2), 1 - 0.95**2)
    self.assertEqual(statistics.familywise(0.05, 0), 0.0)


class CalibrationTest(parameterized.TestCase):
  """The small form of `calibrate`, whose table is in WORKSPACE_NOTES.md."""

  @parameterized.product(design=simulation.DESIGNS, noise=simulation.NOISES)
  def test_rates(self, design, noise):
    repetitions = 40
    model = simulation.Model(design=design, noise=noise)

    def rate(gain):
      return simulation.acceptance_rate(model, gain, repetitions)

    def most(share):  # Of as many, with three standard errors.
      return share + 3 * simulation.standard_error(share, repetitions)

    self.assertLessEqual(rate(0.0), most(0.01))
    self.assertLessEqual(rate(0.01), most(0.05))
    self.assertGreaterEqual(rate(0.03), 0.9)

  def test_a_gate_without_margin_would_be_caught(self):
    """The simulation tells a wrong rule from the right one: a bound above 0
    over requests passes null candidates of one launch by the dozen."""
    model = simulation.Model(launch=0.005)
    rng = np.random.default_rng(0)
    passed = sum(
      statistics.t_bound(simulation.session(model, rng, 0.0)) > 0
      for _ in range(200)
    )
    self.assertGreater(passed, 40)
