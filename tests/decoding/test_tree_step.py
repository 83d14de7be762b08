"""Trees in the decoding step: width one, wider trees, any order of nodes."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import tree_growth
from specpilot_jax.configs import ATTENTION, SystemConfig
from specpilot_jax.decoding import policy as policy_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import tree as tree_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.target import Target
from tests.decoding import kit, tree_kit
from tests.notes import FULL

CONFIG = kit.hybrid()
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
HOT = dataclasses.replace(GREEDY, temperature=1.0, frequency_penalty=0.6)
SLOTS = 15


class ShortRuns(kit.ScriptedDrafter):
  """Mostly right for a slot or none, so that there are many steps."""

  def load(self, mode, reference, seed=0, wrong=kit.ANY):
    super().load(mode, reference, seed, wrong)
    assert self._script is not None
    tokens, right, offered, wrong = self._script
    right = np.where(np.arange(right.size) % 10 == 0, right, right // 10)
    self._script = (tokens, right, offered, wrong)


class WidthOneTest(parameterized.TestCase):
  """A tree of one candidate per slot is the chain, bit for bit.

  Compiled with optimisation: two programs may round differently without.
  """

  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))

  @parameterized.named_parameters(
    ("greedy", "float32", GREEDY),
    *((("sampled", "float64", HOT),) if FULL else ()),
  )
  def test_it_is_the_chain(self, dtype, sampling):
    chain, tree = (
      kit.ScriptedEngine(
        kit.build(CONFIG, dtype),
        drafter=ShortRuns(SLOTS, CONFIG),
        system=system,
        max_seq_len=448,
        prefill_chunk=8,
      )
      for system in (
        SystemConfig(),
        SystemConfig(tree="best_first", node_budget=1 + SLOTS),
      )
    )
    self.assertEqual(chain.policy.rows, tree.policy.rows)
    sampling = dataclasses.replace(sampling, max_tokens=400)
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    plain = kit.autoregressive(CONFIG, dtype, max_seq_len=448)
    sequence = [*prompt, *plain.generate(prompt, sampling).token_ids]
    for engine in (chain, tree):
      engine.load("mixed", sequence, seed=5)
    steps = longest = 0
    runs = zip(
      chain.steps(prompt, sampling), tree.steps(prompt, sampling), strict=True
    )
    for (a, one), (b, other) in runs:
      self.assertEqual(one, other)
      a, b = kit.snapshot(a), kit.snapshot(b)
      self.assertEqual(a.keys(), b.keys())
      for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)
      steps += 1
      longest = max(longest, one.accepted)
    self.assertGreater(steps, 200)
    self.assertGreater(longest, 3)


class WiderTreesTest(kit.Float64TestCase):
  BUDGETS = (1, 2, 4, 7, 16, 33, 64)

  def test_a_wider_tree_never_accepts_less(self):
    """From the same state; and what both accept is the same."""
    engine = tree_kit.engine(CONFIG)
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    plain = kit.referee(kit.autoregressive(CONFIG, "float64"), prompt, GREEDY)
    step = engine._compiled(sampling_lib.Features.of(GREEDY)).step
    grown = set()
    for mode in ("mixed", "second"):
      engine.load(mode, plain.sequence)
      engine.set_limits(nodes=7)
      for carry, _ in engine.steps(prompt, GREEDY):
        if int(carry.remaining) == 0:
          continue
        accepted, emitted = [], []
        for budget in self.BUDGETS:
          engine.set_limits(nodes=budget)
          # The step donates its carry.
          copy = jax.tree.map(jnp.copy, carry)
          _, out = step(engine._params, copy, engine.request(GREEDY))
          self.assertLess(int(out.drafted), budget)
          accepted.append(int(out.accepted))
          emitted.append(out.tokens[: int(out.count)].tolist())
        self.assertEqual(accepted, sorted(accepted))
        for short, long in zip(emitted, emitted[1:], strict=False):
          self.assertEqual(long[: len(short)], short)
        grown.add((accepted[0], accepted[-1]))
    self.assertGreater(len(grown), 3)

  def test_limits_compile_nothing(self):
    engine = tree_kit.engine(CONFIG)
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    plain = kit.referee(kit.autoregressive(CONFIG, "float64"), prompt, GREEDY)
    engine.load("second", plain.sequence)
    engine.set_limits()
    engine.generate(prompt, GREEDY)
    before = engine.num_compilations
    found = []
    for limits in (dict(nodes=9), dict(depth=2), dict(nodes=40, depth=4), {}):
      engine.set_limits(**limits)
      metrics = engine.generate(prompt, GREEDY).metrics
      found.append((max(metrics.drafted_per_step), max(metrics.depth_per_step)))
    self.assertEqual(engine.num_compilations, before)
    # Two slots of four candidates have twenty nodes.
    self.assertEqual(found, [(8, 5), (20, 2), (39, 4), (63, 5)])
    for name, value in (
      ("nodes", 65),
      ("nodes", 0),
      ("depth", 6),
      ("depth", 2.5),
    ):
      wrong: dict[str, Any] = {name: value}
      with self.assertRaisesRegex(SpecPilotError, f"{name} must be a whole"):
        engine.set_limits(**wrong)

  def test_what_is_left_limits_paths(self):
    """Two tokens may still be emitted: one draft, and its siblings."""
    engine = tree_kit.engine(CONFIG)
    engine.set_limits()
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    for limit, depth, drafted in ((1, 0, 0), (2, 1, 4), (3, 2, 20)):
      sampling = dataclasses.replace(GREEDY, max_tokens=limit)
      engine.load("first", [*prompt, 1, 2, 3])
      metrics = engine.generate(prompt, sampling).metrics
      self.assertEqual(metrics.depth_per_step[0], depth)
      self.assertEqual(metrics.drafted_per_step[0], drafted)


_best_first = tree_lib.best_first


def shuffled(anchor, *args, nodes, drafts, **settings):
  """Best-first trees whose nodes stand in another order, half of them twice.

  Parents come first still. A node and its double are siblings with the same
  token; the children of either may stand under both.
  """
  half = nodes // 2
  tree = _best_first(
    anchor,
    *args,
    nodes=half,
    drafts=jnp.minimum(drafts, half - 1),
    **settings,
  )
  index = jnp.arange(half)
  drafted = (index > 0) & (index < tree.count)
  keys = jax.random.split(jax.random.fold_in(jax.random.key(1), anchor), 3)
  twin = drafted & (jax.random.uniform(keys[0], (half,)) < 0.5)
  # Under which of two parents a node and its double stand.
  other = jax.random.bernoulli(keys[1], shape=(2, half))
  doubled = twin[tree.parents] & (tree.parents > 0)
  parents = tree.parents + jnp.where(other & doubled, half, 0)
  parents = parents.at[0, 0].set(-1).reshape(-1)
  exists = jnp.concatenate([index < tree.count, twin])
  parents = jnp.where(exists, parents, 0)
  tokens, depth = jnp.tile(tree.tokens, 2), jnp.tile(tree.depth, 2)
  # Any order in which parents come first: sums along paths that grow.
  mask = tree_growth.ancestors(parents, nodes)
  order = jnp.where(mask, jax.random.uniform(keys[2], (nodes,)), 0).sum(-1)
  order = jnp.where(exists, order, jnp.inf).at[0].set(-1)
  at = jnp.argsort(order)
  place = jnp.argsort(at)
  parents = jnp.where(exists, place[jnp.maximum(parents, 0)], 0)
  parents = parents.at[0].set(-1)[at]
  return tree_lib.Tree(
    tokens=jnp.where(exists, tokens, 0)[at],
    parents=parents.astype(jnp.int32),
    depth=jnp.where(exists, depth, 1)[at],
    scores=jnp.tile(tree.scores, 2)[at],
    mask=tree_growth.ancestors(parents, nodes),
    count=exists.sum(dtype=jnp.int32),
  )


class OrderTest(kit.Float64TestCase):
  def test_nodes_in_any_order(self):
    """Doubles, children before their uncles, parents at every depth."""
    clean = tree_kit.engine(CONFIG)
    prompt = kit.prompts(6, CONFIG.vocab_size)[5]
    plain = kit.referee(kit.autoregressive(CONFIG, "float64"), prompt, GREEDY)
    states: list[kit.Snapshot] = []
    clean.set_limits(nodes=1)
    clean.load("mixed", plain.sequence)
    kit.compare(clean, plain, keep=states)
    context = dataclasses.replace(plain, states=states, drafter=True)
    engine = kit.sibling(clean)
    features = sampling_lib.Features.of(GREEDY)
    fns = dataclasses.replace(engine._base, features=features)
    engine._fns_by_features = {
      features: dataclasses.replace(
        clean._compiled(features),
        step=jax.jit(lambda *args: fns.step(*args)),
      )
    }
    clean.set_limits(nodes=32)
    with mock.patch.object(tree_lib, "best_first", shuffled):
      for mode in ("mixed", "second", "first"):
        for each in (clean, engine):
          each.load(mode, plain.sequence)
        found = kit.compare(engine, plain, context)
        expected = kit.compare(clean, plain, context)
        self.assertEqual(found.accepted, expected.accepted)
        self.assertGreater(max(found.accepted), 2)
        # Doubles are there, beside what the other has.
        self.assertGreater(max(found.drafted), max(expected.drafted) + 5)


class HealthTest(parameterized.TestCase):
  def test_empty_rows_are_no_nodes(self):
    """NaN counts where a node is, however deep; empty rows hold none."""
    config = kit.hybrid(layer_types=(ATTENTION,))
    engine = tree_kit.engine(config, "float32", node_budget=16)
    engine.set_limits(nodes=7)
    engine.load("first", list(range(40)))
    drafter = engine.drafter
    assert isinstance(drafter, tree_kit.LatticeDrafter)
    features = sampling_lib.Features.of(GREEDY)
    fns = dataclasses.replace(engine._base, features=features)
    logits = Target.logits

    @jax.jit
    def healthy(carry, row):
      def spoilt(model, hidden):
        return logits(model, hidden).at[row].set(jnp.nan)

      with mock.patch.object(Target, "logits", spoilt):
        _, out = fns.step(engine._params, carry, engine.request(GREEDY))
      return out.healthy, out.drafted

    carry = engine.fresh_carry()
    carry = dataclasses.replace(
      carry,
      drafter=drafter.scripted(carry.drafter),
      remaining=jnp.asarray(40, jnp.int32),
    )
    seen = [jax.device_get(healthy(carry, row)) for row in range(16)]
    self.assertEqual({int(drafted) for _, drafted in seen}, {6})
    self.assertEqual([bool(good) for good, _ in seen], [False] * 7 + [True] * 9)


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    (15, {}, (16, 16, 16)),
    # A block whose anchor predicts too: a row more than a tile has.
    (16, {}, (17, 17, 17)),
    (16, dict(node_budget=16), (16, 16, 16)),
    (16, dict(node_budget=1), (1, 1, 1)),
    (15, dict(num_drafts=5), (6, 6, 6)),
    (15, dict(num_drafts=5, node_budget=9, tree_depth=3), (4, 4, 4)),
    (15, dict(tree="best_first"), (32, 16, 32)),
    (15, dict(tree="best_first", node_budget=1), (1, 16, 16)),
    (15, dict(tree="best_first", node_budget=17), (17, 16, 32)),
    (15, dict(tree="marginal", node_budget=33), (33, 16, 48)),
    (15, dict(tree="best_first", node_budget=49), (49, 16, 64)),
    (15, dict(tree="best_first", node_budget=65), (65, 16, 96)),
    (15, dict(tree="best_first", node_budget=128), (128, 16, 128)),
    (31, dict(tree="best_first", node_budget=16), (16, 16, 16)),
    (15, dict(tree="best_first", tree_depth=6), (32, 7, 32)),
    (15, dict(tree="best_first", num_drafts=5), (6, 16, 16)),
  )
  def test_shapes(self, slots, system, expected):
    policy = Policy.of(SystemConfig(**system), PromptLookup(slots))
    self.assertEqual((policy.nodes, policy.path, policy.rows), expected)
    limits = policy.limits()
    self.assertEqual(int(limits.nodes), policy.nodes)
    self.assertEqual(int(limits.depth), policy.path - 1)

  def test_without_a_drafter(self):
    policy = Policy.of(SystemConfig(), None)
    self.assertEqual((policy.nodes, policy.path, policy.rows), (1, 1, 1))

  @parameterized.parameters(
    (
      dict(num_drafts=16),
      "num_drafts=16 is more than the 15 that drafter prompt_lookup",
    ),
    (
      dict(node_budget=17),
      "node_budget=17 is more than the 16 nodes of a chain",
    ),
    (
      dict(tree="best_first", tree_depth=16),
      "tree_depth=16 is more than the 15",
    ),
  )
  def test_more_than_there_is(self, system, message):
    with self.assertRaisesRegex(SpecPilotError, message):
      Policy.of(SystemConfig(**system), PromptLookup(15))

  def test_envelopes(self):
    self.assertEqual(policy_lib.ENVELOPES, (16, 32, 48, 64, 96, 128))
    SystemConfig(node_budget=policy_lib.ENVELOPES[-1])


def test_sixteen_nodes_of_a_drafter_with_sixteen_slots():
  """Where 16 nodes are meant it verifies 15 drafts and the anchor."""
  drafter = kit.ScriptedDrafter(16, CONFIG)
  for system, rows in (
    (SystemConfig(), 17),
    (SystemConfig(node_budget=16), 16),
  ):
    engine = Engine(
      kit.build(CONFIG, "float32"),
      drafter=drafter,
      system=system,
      max_seq_len=64,
    )
    sizes, call = [], Target.__call__

    def counted(model, nodes, *args, sizes=sizes, call=call):
      sizes.append(nodes.size)
      return call(model, nodes, *args)

    with mock.patch.object(Target, "__call__", counted):
      _, out = jax.eval_shape(
        engine._base.step,
        engine._params,
        engine.fresh_carry(),
        engine.request(GREEDY),
      )
    assert sizes == [rows] and out.tokens.shape == (rows,)


def test_rejection_is_for_chains():
  engine = Engine(
    kit.build(CONFIG, "float32"),
    drafter=kit.ScriptedDrafter(3, CONFIG),
    system=SystemConfig(tree="best_first", acceptance="rejection"),
    max_seq_len=64,
  )
  hot = dataclasses.replace(GREEDY, temperature=0.7)
  with pytest.raises(SpecPilotError, match="rejection .* is for chains"):
    engine.generate([1, 2], hot)
  engine.request(GREEDY)


def test_trees_need_a_drafter():
  for system, name in (
    (SystemConfig(tree="best_first"), "tree=best_first"),
    (SystemConfig(node_budget=16), "node_budget=16"),
    (SystemConfig(tree_depth=3), "tree_depth=3"),
  ):
    with pytest.raises(SpecPilotError, match=f"{name} needs a drafter"):
      Engine(kit.build(CONFIG, "float32"), system=system)
