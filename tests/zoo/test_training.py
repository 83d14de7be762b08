"""The training code on models small enough for a CPU."""

import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.zoo import (
  drafter_training,
  optimizer,
  recipes,
  self_text,
  training,
)
from tests.decoding import kit

CONFIG = kit.hybrid(vocab_size=64, tie_embeddings=True)
SCHEDULE = recipes.Schedule(
  phases=(
    recipes.Phase(steps=24, length=32, sequences=4),
    recipes.Phase(steps=6, length=64, sequences=2),
  ),
  peak=1e-2,
  warmup=4,
)


OWN: dict[type[DrafterConfig], dict[str, Any]] = {
  DrafterConfig: {},
  DFlash2Config: dict(conv_group_size=8, selector_rank=4, selector_top_k=6),
  DSparkConfig: dict(markov_rank=4),
}


def drafter_config[C: DrafterConfig](
  config, made: type[C] = DrafterConfig, **overrides
) -> C:
  """A drafter of some kind for a small target."""
  settings: dict[str, Any] = OWN[made] | dict(
    name=f"tiny-{made.kind}",
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    block_size=5,
    mask_token_id=config.vocab_size - 1,
    target_layers=(0, 2),
    num_target_layers=config.num_layers,
  )
  return made(**(settings | overrides))


def corpus() -> np.ndarray:
  """Text with a rule: counting up, from random starts."""
  rng = np.random.default_rng(0)
  runs = [(rng.integers(60) + np.arange(40)) % 60 for _ in range(100)]
  return np.concatenate(runs).astype(np.int32)


class TrainingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)
    self.enterContext(kit.quick_compilation())

  def run_target(self, folder, *, deadlines=(None,)):
    """Trains from the same start, once per deadline; (params, done, losses)."""
    stream = corpus()
    # A layer of either kind.
    config = dataclasses.replace(CONFIG, layer_types=CONFIG.layer_types[:2])
    params = target_lib.random_params(config, seed=0)
    params["embed.weight"] *= 0.1
    graphdef, state = nnx.split(target_lib.build(config, params, "float32"))

    def batch_at(step):
      phase = SCHEDULE.phase_at(step)
      rng = np.random.default_rng([1, step])
      starts = rng.integers(0, stream.size - 100, phase.sequences)
      return np.stack([stream[s : s + phase.length + 1] for s in starts])

    def loss(state, tokens):
      model = nnx.merge(graphdef, training.cast(state, jnp.float32))
      return training.next_token_loss(model, tokens)

    trained, done = state, False
    for deadline in deadlines:
      trained, done = optimizer.train(
        state,
        loss,
        batch_at,
        SCHEDULE,
        self.scratch / folder,
        deadline=deadline,
        log_every=5,
      )
    lines = (self.scratch / folder / "loss.jsonl").read_text().splitlines()
    return trained, done, [json.loads(line) for line in lines]

  def test_loss_falls_and_a_killed_run_ends_with_the_same_bits(self):
    whole, done, losses = self.run_target("whole")
    self.assertTrue(done)
    self.assertLess(losses[-1]["loss"], 0.6 * losses[0]["loss"])
    past = time.monotonic() - 1
    _, done, again = self.run_target("parts", deadlines=(past,))
    self.assertFalse(done)
    self.assertEqual(again[-1]["step"], 5)
    parts, done, again = self.run_target("parts")
    self.assertTrue(done)
    self.assertEqual(
      [(line["step"], line["loss"]) for line in again],
      [(line["step"], line["loss"]) for line in losses],
    )
    for a, b in zip(
      jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True
    ):
      np.testing.assert_array_equal(a, b)

  def test_decays_stay_in_float32(self):
    params = target_lib.random_params(CONFIG, seed=0)
    target = target_lib.build(CONFIG, params, "float32")
    graphdef, state = nnx.split(target)
    model = nnx.merge(graphdef, training.cast(state, jnp.bfloat16))
    for name, value in target_lib.parameters(model).items():
      wide = name.endswith(("a_log", "dt_bias"))
      self.assertEqual(value.dtype, jnp.float32 if wide else jnp.bfloat16, name)

  def test_learning_rate(self):
    rate = optimizer.learning_rate(SCHEDULE)
    np.testing.assert_allclose(
      [np.asarray(rate(step)) for step in (0, 2, 4, 20, 30)],
      [0, 5e-3, 1e-2, 1e-2, 0],
      atol=1e-9,
    )
    self.assertLess(np.asarray(rate(29)), 2e-3)


class ForwardTest(kit.Float64TestCase):
  """Training computes what decoding computes."""

  def setUp(self):
    super().setUp()
    self.target = kit.build(CONFIG, "float64")
    rng = np.random.default_rng(0)
    self.tokens = jnp.asarray(rng.integers(0, 60, 64), jnp.int32)

  def test_target(self):
    hidden, taps = training.hidden_states(self.target, self.tokens, (0, 2))
    out = self.target(
      state_lib.run_of(self.tokens, 64, prefill=True),
      state_lib.init_state(CONFIG, 64, self.target.dtype),
      taps=(0, 2),
    )
    np.testing.assert_allclose(hidden, out.hidden, atol=1e-12)
    np.testing.assert_allclose(taps, out.taps, atol=1e-12)

  @parameterized.parameters(
    (None, DrafterConfig),
    (8, DrafterConfig),
    (8, DFlash2Config),
    (None, DSparkConfig),
  )
  def test_drafter_block(self, window, made):
    config = drafter_config(CONFIG, made, sliding_window=window)
    model = learned.module(config, jnp.float64, nnx.Rngs(3))
    _, taps = training.hidden_states(self.target, self.tokens, (0, 2))
    anchors = jnp.asarray([3, 20, 50])
    blocks = drafter_training.block_hidden(
      model, self.target.embed.weight[...], self.tokens, taps, anchors
    )
    drafter = learned.drafter(model, self.target, candidates=CONFIG.vocab_size)
    for anchor, hidden in zip(anchors, blocks, strict=True):
      context = drafter.init_context(80)
      for start in range(0, int(anchor), 16):  # as prefill does it
        count = min(16, int(anchor) - start)
        context = drafter.extend(
          drafter.params,
          context,
          self.tokens[start : start + 16],
          taps[start : start + 16],
          jnp.int32(start),
          jnp.int32(count),
        )
      lattice = drafter.draft(
        drafter.params, context, self.tokens[anchor], jnp.int32(anchor)
      )
      hidden = hidden[-config.num_slots :]
      expected = drafter.lattice(
        model, hidden, self.target.logits(hidden), self.tokens[anchor]
      )
      np.testing.assert_array_equal(lattice.tokens, expected.tokens)
      np.testing.assert_allclose(lattice.scores, expected.scores, atol=1e-12)
      if made is DrafterConfig:
        law = jax.nn.log_softmax(self.target.logits(hidden), axis=-1)
        np.testing.assert_allclose(
          lattice.scores,
          jnp.take_along_axis(law, lattice.tokens, axis=1),
          atol=1e-12,
        )

  @parameterized.product(sampled=(False, True), variation=(0.0, 0.25))
  def test_drafter_loss_is_the_decayed_mean(self, sampled, variation):
    recipe = dataclasses.replace(
      recipes.ZOO_DRAFTER, gamma=4.0, reach=0.0, variation=variation
    )
    config = drafter_config(CONFIG)
    model = DFlash(config, jnp.float64, nnx.Rngs(3))
    anchors = jnp.asarray([[3, 20, 50]])
    hidden, taps = training.hidden_states(self.target, self.tokens, (0, 2))
    text = drafter_training.Text(
      tokens=self.tokens[None],
      ends=jnp.asarray([53]),  # the last anchor has two labels
      sampled=jnp.asarray([sampled]),
      features=taps[None],
      hidden=hidden[None],
    )
    embedding = self.target.embed.weight[...]
    value, right = drafter_training.loss(
      model, embedding, embedding, text, anchors, recipe
    )
    laws = jax.nn.softmax(self.target.logits(hidden), axis=-1)
    blocks = drafter_training.block_hidden(
      model, self.target.embed.weight[...], self.tokens, taps, anchors[0]
    )
    total = weight = 0.0
    for anchor, hidden in zip([3, 20, 50], blocks, strict=True):
      law = jax.nn.log_softmax(self.target.logits(hidden), axis=-1)
      for slot in range(1, 5 if anchor < 50 else 3):
        w = np.exp(-(slot - 1) / 4.0)
        if sampled:  # the target's law of the token at this place
          label = laws[anchor + slot - 1]
        else:
          label = jax.nn.one_hot(self.tokens[anchor + slot], CONFIG.vocab_size)
        distance = 0.5 * jnp.abs(label - jnp.exp(law[slot])).sum()
        total -= w * (1 - variation) * float(label @ law[slot])
        total += w * variation * float(distance)
        weight += w
    self.assertAlmostEqual(float(value), total / weight, delta=1e-4)
    self.assertLen(right, 4)

  def test_reach_is_the_slope_of_the_expected_length(self):
    overlap = jnp.asarray(np.random.default_rng(0).random((3, 5)))
    overlap = overlap.at[1, 2].set(0.0)  # nothing behind it is reached
    slope = jax.grad(lambda a: jnp.cumprod(a, axis=1).sum())(overlap)
    np.testing.assert_allclose(
      drafter_training._reach(overlap), slope, atol=1e-12
    )

  def test_weights_by_reach_follow_the_drafter(self):
    config = drafter_config(CONFIG)
    model = DFlash(config, jnp.float64, nnx.Rngs(3))
    hidden, taps = training.hidden_states(self.target, self.tokens, (0, 2))
    text = drafter_training.Text(
      tokens=self.tokens[None],
      ends=jnp.asarray([64]),
      sampled=jnp.asarray([False]),
      features=taps[None],
      hidden=hidden[None],
    )
    embedding = self.target.embed.weight[...]

    def value(reach, variation=1.0):
      recipe = dataclasses.replace(
        recipes.ZOO_DRAFTER, gamma=4.0, reach=reach, variation=variation
      )
      anchors = jnp.asarray([[20]])
      return drafter_training.loss(
        model, embedding, embedding, text, anchors, recipe
      )[0]

    block = drafter_training.block_hidden(
      model, embedding, self.tokens, taps, jnp.asarray([20])
    )[0, 1:]
    said = jax.nn.softmax(self.target.logits(block), axis=-1)
    overlap = jnp.stack([said[i, self.tokens[21 + i]] for i in range(4)])
    decay = np.exp(-np.arange(4) / 4.0)
    slope = jax.grad(lambda a: jnp.cumprod(a).sum())(overlap)
    for reach in (0.5, 1.0):
      weights = (1 - reach) * decay + reach * slope
      expected = ((1 - overlap) * weights).sum() / weights.sum()
      self.assertAlmostEqual(float(value(reach)), float(expected), delta=1e-5)


class SelfTextTest(kit.Float64TestCase):
  def test_greedy_rows_are_what_the_engine_says(self):
    target = kit.build(CONFIG, "float64")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in (9, 9, 4)]
    rows = self_text.generate(
      target, prompts, 12, np.asarray([0.0, 1.0, 0.0]), seed=1
    )
    engine = kit.autoregressive(CONFIG, "float64")
    for i in (0, 2):
      output = engine.generate(
        prompts[i],
        SamplingParams(max_tokens=12, ignore_eos=True),
      )
      start = len(prompts[i])
      self.assertEqual(
        tuple(rows[i, start : start + 12].tolist()), output.token_ids
      )

  def test_loop_starts(self):
    rows = np.random.default_rng(0).integers(0, 4000, (4, 512))
    rows[1, 300:] = 7
    rows[2, 200:] = np.tile(np.arange(48), 7)[:312]
    rows[3, 420:] = 9  # too short a run to be a loop
    ends = np.asarray([512, 512, 512, 512])
    self.assertEqual(
      self_text.loop_starts(rows, ends).tolist(), [512, 301, 248, 512]
    )
    ends = np.asarray([300, 330, 400, 512])  # row 1: too short a run
    self.assertEqual(
      self_text.loop_starts(rows, ends).tolist(), [300, 330, 248, 512]
    )


if __name__ == "__main__":
  absltest.main()
