"""DFlash2's convolution and selector against their formulas, in NumPy."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from scipy.special import log_softmax, logsumexp

from specpilot_jax.decoding import draft, sampling
from specpilot_jax.models import assembly
from specpilot_jax.models.drafters import config as config_lib
from specpilot_jax.models.drafters import dflash2, learned
from specpilot_jax.models.drafters.config import DFlash2Config
from specpilot_jax.models.drafters.dflash import DFlash
from tests.checkpoints.test_widen import small_drafter
from tests.decoding import kit
from tests.zoo.test_training import drafter_config

CONFIG = drafter_config(kit.hybrid(), DFlash2Config)
GROUP = CONFIG.conv_group_size


def convolved(x, base, delta, block):
  """out_t = (base_0 + delta_0) x_t + (base_1 + delta_1) x_(t-1).

  Args:
    x: [N, D], the rows of blocks in turn.
    base: [2 taps, D].
    delta: [N, 2 taps, groups].
  """
  out = np.zeros_like(x)
  for t in range(x.shape[0]):
    for c in range(x.shape[1]):
      group = c // GROUP
      out[t, c] = (base[0, c] + delta[t, 0, group]) * x[t, c]
      if t % block:  # the first row of a block has none before it
        out[t, c] += (base[1, c] + delta[t, 1, group]) * x[t - 1, c]
  return out


def layer_of(model: DFlash, index: int) -> dflash2.ConvDraftLayer:
  layer = model.layers[index]
  assert isinstance(layer, dflash2.ConvDraftLayer)
  return layer


def around(conv: dflash2.GroupedConv, h, sublayer):
  weight = np.asarray(conv.kernel_projection.weight[...])
  base = np.asarray(conv.base_kernel[...])
  delta = (h @ weight.T).reshape(h.shape[0], 2, 2, -1)
  block = CONFIG.block_size
  inner = sublayer(convolved(h, base[0], delta[:, 0], block))
  return convolved(np.asarray(inner), base[1], delta[:, 1], block)


class ConvolutionTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    model = small_drafter(config=CONFIG)
    assert isinstance(model, dflash2.DFlash2)
    self.model = model
    rng = np.random.default_rng(0)
    self.x = rng.normal(size=(2 * CONFIG.block_size, CONFIG.hidden_size))

  def test_around_a_sublayer(self):
    conv = layer_of(self.model, 0).attention_conv
    found = conv.around(jnp.asarray(self.x), jnp.tanh)
    expected = around(conv, self.x, np.tanh)
    np.testing.assert_allclose(found, expected, atol=1e-12)

  def test_blocks_do_not_see_each_other(self):
    conv = layer_of(self.model, 0).mlp_conv
    whole = conv.around(jnp.asarray(self.x), jnp.tanh)
    alone = conv.around(jnp.asarray(self.x[CONFIG.block_size :]), jnp.tanh)
    np.testing.assert_allclose(whole[CONFIG.block_size :], alone, atol=1e-12)

  def test_at_first_it_is_the_identity(self):
    fresh = learned.module(CONFIG, jnp.float64, nnx.Rngs(0))
    conv = layer_of(fresh, 0).attention_conv
    found = conv.around(jnp.asarray(self.x), jnp.tanh)
    np.testing.assert_array_equal(found, jnp.tanh(self.x))

  def test_a_layer(self):
    """Both sublayers, inside of the residual stream and behind the norms."""
    layer = layer_of(self.model, 1)
    positions = jnp.arange(self.x.shape[0], dtype=jnp.int32)

    def attention(q, k, v):
      del k
      return q * jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)

    def attended(h):
      h = jnp.asarray(h)
      q = layer.attention.queries(h, positions)
      k, v = layer.attention.keys_values(h, positions)
      out = attention(q, k, v).reshape(h.shape[0], -1)
      return layer.attention.o_proj(out)

    x = self.x + around(
      layer.attention_conv,
      np.asarray(layer.input_norm(jnp.asarray(self.x))),
      attended,
    )
    x = x + around(
      layer.mlp_conv,
      np.asarray(layer.post_norm(jnp.asarray(x))),
      lambda h: layer.mlp(jnp.asarray(h)),
    )
    found = layer(jnp.asarray(self.x), positions, attention)
    np.testing.assert_allclose(found, x, atol=1e-12)


class SelectorTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    target = kit.build(kit.hybrid(), "float64")
    self.drafter = learned.drafter(small_drafter(config=CONFIG), target)
    rng = np.random.default_rng(1)
    slots = CONFIG.block_size - 1
    self.hidden = rng.normal(size=(slots, CONFIG.hidden_size))
    self.logits = 0.3 * rng.normal(size=(slots, CONFIG.vocab_size))
    self.anchor = 7
    self.lattice = self.drafter.lattice(
      self.drafter.model(),
      jnp.asarray(self.hidden),
      jnp.asarray(self.logits),
      jnp.int32(self.anchor),
    )

  def table(self, slot, parent):
    """S(p, c) of every token."""
    model = self.drafter.model()
    assert isinstance(model, dflash2.DFlash2)
    selector = model.candidate_selector
    a, b = (
      np.asarray(x[...])
      for x in (selector.predecessor_codebook, selector.successor_codebook)
    )
    w = np.asarray(selector.hidden_projection.weight[...])
    return self.logits[slot] + b @ (a[parent] * (w @ self.hidden[slot]))

  def test_scores(self):
    found = self.lattice
    width = CONFIG.selector_top_k
    self.assertEqual(found.scores.shape, (4, width, width))
    self.assertIsNone(found.confidence)
    for slot in range(4):
      best = np.argsort(-self.logits[slot])[:width]
      np.testing.assert_array_equal(found.tokens[slot], best)
      law = log_softmax(self.logits[slot])
      share = logsumexp(law[best])
      for place in range(width):
        parent = (
          self.anchor if slot == 0 else int(found.tokens[slot - 1, place])
        )
        expected = log_softmax(self.table(slot, parent)[best]) + share
        np.testing.assert_allclose(
          found.scores[slot, place], expected, atol=1e-12
        )

  def test_a_chain_is_the_walk_of_the_released_drafter(self):
    """Each slot's best candidate given the one chosen before it."""
    parent, expected = self.anchor, []
    for slot in range(4):
      best = np.argsort(-self.logits[slot])[: CONFIG.selector_top_k]
      parent = int(best[np.argmax(self.table(slot, parent)[best])])
      expected.append(parent)
    drafts = draft.chain(
      self.lattice,
      valid_vocab=CONFIG.vocab_size,
      limit=jnp.int32(4),
      sampling=sampling.Sampling.of(sampling.SamplingParams(), jnp.float64),
      position=jnp.int32(9),
      sample=False,
    )
    self.assertEqual(drafts.tokens.tolist(), expected)
    blind = np.argmax(self.logits, axis=1).tolist()
    self.assertNotEqual(expected, blind)


class The27BTest(parameterized.TestCase):
  @parameterized.parameters(
    # Published: 1.924 G.
    ("dflash2", 1_924_404_480, 194_191_360, 7),
    ("dspark", 1_857_358_337, 127_145_217, 7),
  )
  def test_parameters(self, kind, whole, beyond, slots):
    config = config_lib.PRESETS_BY_KIND[kind]["Qwen3.8-27B"]
    self.assertEqual(config.num_slots, slots)

    def size(config):
      structs = assembly.structs(
        lambda: learned.module(config, jnp.bfloat16, nnx.Rngs(0))
      )
      return sum(leaf.size for leaf in structs.values())

    self.assertEqual(size(config), whole)
    plain = config_lib.PRESETS["Qwen3.8-27B"]
    self.assertEqual(size(config) - size(plain), beyond)


if __name__ == "__main__":
  absltest.main()
