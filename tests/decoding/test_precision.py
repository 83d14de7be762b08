"""Lower precision: every difference is a rounding event, and is listed."""

import dataclasses

import jax
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding.sampling import SamplingParams
from tests.decoding import kit
from tests.notes import FULL, note

PROMPTS, TOKENS = (40, 128) if FULL else (6, 48)
FLOAT32_GAP = 1e-4
CONFIG = kit.hybrid()
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
MODES = ("oracle", "mixed", "always_wrong")


class PrecisionTest(parameterized.TestCase):
  """As users run it: without 64-bit types, compiled as usual."""

  def setUp(self):
    super().setUp()
    self.assertFalse(jax.config.read("jax_enable_x64"))

  @parameterized.named_parameters(("greedy", GREEDY), ("sampled", SAMPLED))
  def test_float32(self, sampling):
    plain = kit.autoregressive(CONFIG, "float32")
    fast = kit.speculative(CONFIG, "float32")
    worst, tokens, accepted, divergences = 0.0, 0, 0, []
    for i, prompt in enumerate(kit.prompts(PROMPTS, CONFIG.vocab_size)):
      seeded = dataclasses.replace(sampling, seed=i)
      expected = plain.generate(prompt, seeded).token_ids
      for mode in MODES:
        fast.load(mode, [*prompt, *expected], seed=i)
        result = fast.generate(prompt, seeded)
        output = result.token_ids
        self.assertLen(output, len(expected))
        accepted += sum(result.metrics.accepted_per_step)
        tokens += len(output)
        # Every token, also those behind a divergence, by the referee.
        scores = plain.score(prompt, output, seeded)
        worst = max(worst, float(scores.gaps.max()))
        self.assertLess(scores.gaps.max(), FLOAT32_GAP, (i, mode))
        if output != expected:
          at = next(j for j in range(TOKENS) if output[j] != expected[j])
          divergences.append(f"prompt {i}, {mode}, token {at}: gap"
                             f" {scores.gaps[at]:.3g}")  # fmt: skip
    self.assertGreater(accepted, tokens // 4)
    note(
      f"float32 {self._testMethodName[13:]}: {PROMPTS} prompts, {tokens}"
      f" tokens, largest gap {worst:.2g}, {len(divergences)} divergences"
    )
    for line in divergences:
      note("  " + line)

  def test_bfloat16_token_forcing(self):
    """Speculative output scores no worse than one-token output does."""
    plain = kit.autoregressive(CONFIG, "bfloat16")
    fast = kit.speculative(CONFIG, "bfloat16")
    own, forced, outputs, differ = [], [], [], 0
    for prompt in kit.prompts(PROMPTS, CONFIG.vocab_size):
      expected = plain.generate(prompt, GREEDY).token_ids
      own.append(plain.score(prompt, expected, GREEDY).gaps)
      outputs.append((prompt, expected))
    tolerance = 1.5 * np.concatenate(own).max()
    for i, (prompt, expected) in enumerate(outputs):
      for mode in MODES:
        fast.load(mode, [*prompt, *expected], seed=i)
        output = fast.generate(prompt, GREEDY).token_ids
        forced.append(plain.score(prompt, output, GREEDY).gaps)
        differ += output != expected
    own, forced = np.concatenate(own), np.concatenate(forced)
    note(
      f"bfloat16 token forcing: tolerance {tolerance:.3g}; one-token output"
      f" {(own > 0).sum()} of {own.size} tokens flip, largest gap"
      f" {own.max():.3g}; speculative {(forced > 0).sum()} of {forced.size},"
      f" {forced.max():.3g}; {differ} of {len(MODES) * PROMPTS} outputs differ"
    )
    # Otherwise the tolerance would let a fault of the state through: a wrong
    # token stands several logits below the best.
    self.assertLess(tolerance, 0.5)
    self.assertLessEqual(forced.max(), tolerance)
    self.assertLess((forced > 0).mean(), 2 * (own > 0).mean() + 0.02)
