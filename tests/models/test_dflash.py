"""DFlash in the engine: lossless, and its context is what was committed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from specpilot_jax.zoo import training
from tests.decoding import kit
from tests.notes import FULL
from tests.zoo.test_training import drafter_config

# So few ids that a random drafter is right now and then.
CONFIG = kit.hybrid(vocab_size=5)
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)


def drafter(
  window=None, dtype=jnp.float64, made=DrafterConfig
) -> DFlashDrafter:
  overrides = dict(selector_top_k=4) if made is DFlash2Config else {}
  config = drafter_config(CONFIG, made, sliding_window=window, **overrides)
  target = kit.build(CONFIG, str(jnp.dtype(dtype)))
  return learned.drafter(learned.module(config, dtype, nnx.Rngs(1)), target)


class DFlashTest(kit.Float64TestCase):
  @parameterized.named_parameters(
    ("greedy", GREEDY, None, DrafterConfig),
    ("sampled", SAMPLED, None, DrafterConfig),
    ("greedy_window", GREEDY, 6, DrafterConfig),
    ("dflash2_sampled", SAMPLED, None, DFlash2Config),
    ("dspark_greedy", GREEDY, 6, DSparkConfig),
  )
  def test_lossless(self, sampling, window, made):
    engine = Engine(
      kit.build(CONFIG, "float64"),
      drafter=drafter(window, made=made),
      max_seq_len=256,
      prefill_chunk=8,
    )
    accepted = drafted = 0
    for i, prompt in enumerate(kit.prompts(4, CONFIG.vocab_size)):
      reference = kit.referee(
        kit.autoregressive(CONFIG, "float64"),
        prompt,
        dataclasses.replace(sampling, seed=i),
      )
      done = kit.compare(engine, reference)
      accepted += sum(done.accepted)
      drafted += sum(done.drafted)
    self.assertGreater(accepted, 10)
    self.assertLess(accepted, drafted)

  def test_context_is_that_of_the_committed_tokens(self):
    learned = drafter()
    engine = Engine(
      kit.build(CONFIG, "float64"),
      drafter=learned,
      max_seq_len=256,
      prefill_chunk=8,
    )
    model = nnx.merge(learned._graphdef, learned.params[0])
    prompt = kit.prompts(3, CONFIG.vocab_size)[2]
    tokens, contexts, accepted = list(prompt), [], 0
    for carry, result in engine.steps(prompt, GREEDY):
      length = int(carry.target.length)
      contexts.append(
        [np.array(x[:, :length]) for x in (*carry.drafter.k, *carry.drafter.v)]
      )
      tokens += result.tokens
      accepted += result.accepted
    self.assertGreater(accepted, 0)
    _, taps = training.hidden_states(
      kit.build(CONFIG, "float64"),
      jnp.asarray(tokens[: contexts[-1][0].shape[1]], jnp.int32),
      learned.taps,
    )
    fresh = model.inject(taps, jnp.arange(taps.shape[0], dtype=jnp.int32))
    expected = [k for k, _ in fresh] + [v for _, v in fresh]
    for context in contexts:
      for ours, theirs in zip(context, expected, strict=True):
        theirs = np.swapaxes(theirs, 0, 1)[:, : ours.shape[1]]
        np.testing.assert_allclose(ours, theirs, atol=kit.STATE_TOLERANCE)

  def test_rejection_follows_the_target(self):
    """Frequencies of the first two tokens against the target's own law."""
    prompt = [1, 2, 3]
    counts = np.zeros((5, 5))
    engine = Engine(
      kit.build(CONFIG, "float64"),
      drafter=drafter(),
      system=SystemConfig(acceptance="rejection"),
      max_seq_len=64,
      prefill_chunk=8,
    )
    accepted, n = 0, 3000 if FULL else 400
    for seed in range(n):
      output = engine.generate(
        prompt, dataclasses.replace(SAMPLED, max_tokens=2, seed=seed)
      )
      accepted += sum(output.metrics.accepted_per_step)
      counts[output.token_ids] += 1
    self.assertGreater(accepted, n // 10)
    target, law = kit.build(CONFIG, "float64"), np.zeros((5, 5))

    def next_law(ids):
      hidden, _ = training.hidden_states(target, jnp.asarray(ids, jnp.int32))
      logits = np.asarray(target.logits(hidden[-1:]))[0]
      odds = np.exp(logits - logits.max())
      return odds / odds.sum()

    first = next_law(prompt)
    for token in range(5):
      law[token] = first[token] * next_law([*prompt, token])
    likely = law > 5 / n
    chi2 = ((counts - n * law) ** 2 / (n * law))[likely].sum()
    # 99.99 % point of chi-squared with 24 degrees of freedom.
    self.assertLess(chi2, 59.0)

  def test_wrong_targets_are_refused(self):
    for field, config in (
      ("vocab_size", kit.hybrid(vocab_size=6)),
      ("hidden_size", kit.hybrid(vocab_size=5, hidden_size=64)),
      (
        "number of layers",
        kit.hybrid(vocab_size=5, layer_types=CONFIG.layer_types[:2]),
      ),
    ):
      with self.assertRaisesRegex(SpecPilotError, field):
        drafter().config.check_target(config)

  def test_float16_is_refused(self):
    with self.assertRaisesRegex(SpecPilotError, "float16"):
      DFlash(drafter_config(CONFIG), jnp.float16, nnx.Rngs(0))


if __name__ == "__main__":
  absltest.main()
