"""What DFlash2 and DSpark are trained on, slot by slot from the formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax.models.drafters import dflash2, dspark, learned
from specpilot_jax.models.drafters.config import DFlash2Config, DSparkConfig
from specpilot_jax.zoo import drafter_training, optimizer, recipes, training
from tests.checkpoints.test_widen import small_drafter
from tests.decoding import kit
from tests.zoo.test_training import CONFIG, drafter_config

ANCHORS = (3, 20, 50)
END = 53
"""So that the last anchor has two labels."""
GAMMA = 4.0


def mixed(logits, label, mix, inside=None):
  """Loss and overlap of softmax(logits) with a law `label` [V]."""
  if inside is None:
    inside = np.ones(logits.size, bool)
  odds = np.where(inside, np.exp(logits - logits.max()), 0)
  law = odds / odds.sum()
  said = inside & (label > 0)
  cross = -(label[said] * np.log(law[said])).sum()
  overlap = np.minimum(law, label).sum()
  return (1 - mix) * cross + mix * (1 - overlap), overlap


@functools.cache
def heard():
  """A target's head, tokens, taps and hidden states."""
  target = kit.build(CONFIG, "float64")
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(0, 60, 64), jnp.int32)
  hidden, taps = jax.jit(training.hidden_states, static_argnums=2)(
    target, tokens, (0, 2)
  )
  return target.embed.weight[...], tokens, taps, hidden


@functools.cache
def compiled(config, recipe):
  """(state, sampled, selector) -> ((loss, accuracy), gradients), blocks."""
  head, tokens, taps, hidden = heard()
  graphdef, _ = nnx.split(small_drafter(config=config))

  def value(state, sampled, selector):
    text = drafter_training.Text(
      tokens=tokens[None],
      ends=jnp.asarray([END]),
      sampled=sampled[None],
      features=taps[None],
      hidden=hidden[None],
    )
    return drafter_training.loss(
      nnx.merge(graphdef, state),
      head,
      head,
      text,
      jnp.asarray([ANCHORS]),
      recipe,
      selector,
    )

  def both(state, sampled, selector):
    blocks = drafter_training.block_hidden(
      nnx.merge(graphdef, state), head, tokens, taps, jnp.asarray(ANCHORS)
    )
    found = jax.value_and_grad(value, has_aux=True)(state, sampled, selector)
    return found, blocks

  return jax.jit(both)


class LossTest(kit.Float64TestCase):
  def run_loss(self, made, recipe, sampled, selector=1.0):
    """The model and its loss; `slots` says what that is of."""
    config = drafter_config(CONFIG, made)
    model = small_drafter(config=config)
    found, self.blocks = compiled(config, recipe)(
      nnx.split(model)[1], jnp.asarray(sampled), jnp.asarray(selector)
    )
    (value, right), grads = found
    self.assertLen(right, config.num_slots)
    if selector:
      for path, grad in nnx.to_flat_state(grads):
        self.assertGreater(float(jnp.abs(grad[...]).max()), 0, path)
    return model, float(value)

  def slots(self, config, sampled):
    """Hidden state, label, parent and weight of each slot that counts."""
    head, tokens, _, hidden = heard()
    laws = np.asarray(jax.nn.softmax(hidden @ head.T, axis=-1))
    for anchor, block in zip(ANCHORS, np.asarray(self.blocks), strict=True):
      for slot, h in enumerate(block[-config.num_slots :]):
        place = anchor + 1 + slot
        if place < END:
          label = laws[place - 1]
          if not sampled:
            label = np.eye(CONFIG.vocab_size)[int(tokens[place])]
          parent = int(tokens[place - 1])
          yield h, label, parent, np.exp(-slot / GAMMA)

  @parameterized.product(sampled=(False, True), selector=(0.0, 0.5))
  def test_dflash2(self, sampled, selector):
    recipe = dataclasses.replace(
      recipes.ZOO_DFLASH2, gamma=GAMMA, reach=0.0, variation=0.3
    )
    model, found = self.run_loss(DFlash2Config, recipe, sampled, selector)
    assert isinstance(model, dflash2.DFlash2)
    head = np.asarray(heard()[0])
    table = model.candidate_selector
    a, b, w = (
      np.asarray(x[...])
      for x in (
        table.predecessor_codebook,
        table.successor_codebook,
        table.hidden_projection.weight,
      )
    )
    total = weights = outside = 0.0
    for h, label, parent, weight in self.slots(model.config, sampled):
      logits = head @ h
      inside = logits >= np.sort(logits)[-model.config.selector_top_k]
      scores = logits + b @ (a[parent] * (w @ h))
      own = mixed(logits, label, 0.3)[0]
      chosen = mixed(scores, label, 0.3, inside)[0]
      outside += label[~inside].sum()
      total += weight * (own + selector * chosen)
      weights += weight
    self.assertGreater(outside, 0.5)  # what the selector is not taught
    self.assertAlmostEqual(found, total / weights, delta=1e-4)

  @parameterized.parameters(False, True)
  def test_dspark(self, sampled):
    recipe = dataclasses.replace(
      recipes.ZOO_DSPARK, gamma=GAMMA, reach=0.0, confidence=0.7
    )
    self.assertEqual(recipe.variation, 0.9)
    model, found = self.run_loss(DSparkConfig, recipe, sampled)
    assert isinstance(model, dspark.DSpark)
    w1 = np.asarray(model.markov_head.markov_w1[...])
    w2 = np.asarray(model.markov_head.markov_w2.weight[...])
    head = np.asarray(model.confidence_head.weight[...])
    total = weights = 0.0
    for h, label, parent, weight in self.slots(model.config, sampled):
      logits = np.asarray(heard()[0]) @ h + w2 @ w1[parent]
      own, overlap = mixed(logits, label, 0.9)
      odds = head @ np.concatenate([h, w1[parent]])
      odds += float(model.confidence_head.bias[0])
      sure = 1 / (1 + np.exp(-odds))
      doubt = -overlap * np.log(sure) - (1 - overlap) * np.log(1 - sure)
      total += weight * (own + 0.7 * doubt)
      weights += weight
    self.assertAlmostEqual(found, total / weights, delta=1e-4)

  @parameterized.product(
    soft=(False, True), inside=(False, True), mix=(0.0, 0.3, 1.0)
  )
  def test_the_gradient_is_that_of_the_value(self, soft, inside, mix):
    rng = np.random.default_rng(0)
    logits, target = 2 * rng.normal(size=(2, 7, 13))
    labels = rng.integers(0, 13, 7)
    sampled = jnp.asarray(rng.random(7) < 0.5)
    kept = logits >= np.sort(logits)[:, 8:9] if inside else None
    weights = jnp.asarray(rng.random(7))

    def written(x):
      said = drafter_training._Said(
        jnp.asarray(labels),
        jnp.asarray(labels),
        jnp.asarray(target) if soft else None,
        sampled,
      )
      terms = drafter_training._terms(x, said, mix, kept)
      return (terms.nll * weights).sum()

    def plain(x):
      label = jax.nn.one_hot(labels, 13)
      if soft:
        label = jnp.where(sampled[:, None], jax.nn.softmax(target), label)
      law = jax.nn.log_softmax(x if kept is None else jnp.where(kept, x, -1e9))
      part = label if kept is None else jnp.where(kept, label, 0)
      cross = -(part * law).sum(-1)
      overlap = jnp.minimum(jnp.exp(law), label).sum(-1)
      return (((1 - mix) * cross + mix * (1 - overlap)) * weights).sum()

    found, expected = (
      jax.value_and_grad(f)(jnp.asarray(logits)) for f in (written, plain)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-12)


class RecipeTest(parameterized.TestCase):
  def test_the_selector_grows(self):
    recipe = recipes.ZOO_DFLASH2
    self.assertEqual(recipe.schedule.steps, 15_500)
    weights = [recipe.selector_at(step) for step in (0, 7, 12, 16, 15_499)]
    self.assertEqual(weights[:2], [0.0, 0.0])
    self.assertAlmostEqual(weights[2], 12 / 7.75 - 1)
    self.assertEqual(weights[3:], [1.0, 1.0])

  def test_the_shape_is_that_of_dflash(self):
    for config in (recipes.DFLASH2, recipes.DSPARK):
      shape = recipes.DFLASH.shape()
      self.assertEqual({**config.shape(), **shape}, config.shape())

  @parameterized.parameters(DFlash2Config, DSparkConfig)
  def test_what_muon_takes_and_what_decays(self, made):
    config = drafter_config(CONFIG, made)
    _, state = nnx.split(
      nnx.eval_shape(lambda: learned.module(config, jnp.float32, nnx.Rngs(0)))
    )

    def chosen(tree):
      return {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf is not None and leaf is not False
      }

    muon = " ".join(chosen(optimizer._matrices(state)))
    decayed = " ".join(chosen(optimizer._decayed(state)))
    for name in ("codebook", "markov_w", "norm", "base_kernel"):
      self.assertNotIn(name, muon)
    self.assertNotIn("base_kernel", decayed)
    self.assertNotIn("norm", decayed)
    own = "codebook" if made is DFlash2Config else "markov_w"
    self.assertIn(own, decayed)
    for found in (muon, decayed):
      self.assertIn("fc", found)
      self.assertIn("q_proj", found)


if __name__ == "__main__":
  absltest.main()
