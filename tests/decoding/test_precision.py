"""Lower precision: every difference is a rounding event, and is listed."""

import dataclasses

import jax
from absl.testing import parameterized

from experiments import token_forcing
from specpilot_jax.decoding.sampling import SamplingParams
from tests.decoding import kit
from tests.notes import FULL, note

PROMPTS, TOKENS = (40, 128) if FULL else (6, 48)
CONTROLS = max(PROMPTS, 16)
"""One-token outputs that show bfloat16's rounding: gaps are rare."""
BFLOAT16_SCALE = 0.7
"""Of the weights: rounding then moves logits by 0.01, far from any fault."""
FLOAT32_GAP = 1e-4
CONFIG = kit.hybrid()
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
MODES = ("oracle", "mixed", "always_wrong")


class PrecisionTest(parameterized.TestCase):
  """As users run it: without 64-bit types, compiled with optimisation."""

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

  @parameterized.named_parameters(("greedy", GREEDY), ("sampled", SAMPLED))
  def test_bfloat16_token_forcing(self, sampling):
    """The benchmark's own verdict, on speculative and on spoilt outputs."""
    plain = kit.autoregressive(CONFIG, "bfloat16", scale=BFLOAT16_SCALE)
    fast = kit.speculative(CONFIG, "bfloat16", scale=BFLOAT16_SCALE)
    requests = [
      (prompt, dataclasses.replace(sampling, seed=i))
      for i, prompt in enumerate(kit.prompts(CONTROLS, CONFIG.vocab_size))
    ]
    outputs = [plain.generate(*request).token_ids for request in requests]

    def score(i, tokens, name):
      prompt, seeded = requests[i]
      gaps = plain.score(prompt, tokens, seeded).gaps
      return token_forcing.Scored(f"{name} {i}", tuple(tokens), gaps)

    own = [score(i, tokens, "one-token") for i, tokens in enumerate(outputs)]
    control = token_forcing.Control(
      "ar",
      tokens=sum(s.gaps.size for s in own),
      flips=sum(s.flips for s in own),
      max_gap=max(s.max_gap for s in own),
    )

    def judge(scored):
      return token_forcing.judge(
        scored, control, dtype="bfloat16", min_control_tokens=CONTROLS * TOKENS
      )

    forced, differ, accepted = [], 0, 0
    for i, (prompt, seeded) in enumerate(requests[:PROMPTS]):
      for mode in MODES:
        fast.load(mode, [*prompt, *outputs[i]], seed=i)
        result = fast.generate(prompt, seeded)
        forced.append(score(i, result.token_ids, mode))
        differ += result.token_ids != outputs[i]
        accepted += sum(result.metrics.accepted_per_step)
    verdict = judge(forced)
    note(
      f"bfloat16 token forcing, {self._testMethodName[28:]}:"
      f" {verdict['verdict']}; {verdict['reason']}; largest gap"
      f" {verdict['max_margin']:.3g}, of the control {control.max_gap:.3g};"
      f" {differ} of {len(forced)} outputs differ"
    )
    self.assertEqual(verdict["verdict"], token_forcing.PASS, verdict["reason"])
    self.assertEqual(verdict["tokens"], len(MODES) * PROMPTS * TOKENS)
    # Behind a divergence the script is that of another text.
    self.assertGreater(accepted, verdict["tokens"] // 8)
    self.assertEqual(judge(own)["verdict"], token_forcing.PASS)

    # Tokens of another state, or of another seed's noise, do not pass.
    spoilt = list(outputs[0])
    spoilt[TOKENS // 2 :] = outputs[1][TOKENS // 2 :]
    verdict = judge([*forced, score(0, spoilt, "spoilt")])
    self.assertEqual(verdict["verdict"], token_forcing.FAIL)
    self.assertEqual(verdict["first_failure"]["request"], "spoilt 0")
    self.assertGreaterEqual(verdict["first_failure"]["index"], TOKENS // 2)
