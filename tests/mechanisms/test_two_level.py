"""Two-level verification: the tree that is composed, the view, the policy."""

import dataclasses
import types
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from pallas_kernels import w12_array
from pallas_kernels.w12_array import W12Array
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import ATTENTION, GDN, MAX_NODES, VIEWS, SystemConfig
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.policy import Limits, Policy
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.decoding.schedule import Seen
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import level_choice, registry, two_level, w12
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from tests.decoding import kit
from tests.mechanisms import two_level_kit
from tests.mechanisms.test_w12 import bfloat16_values

CONFIG = kit.hybrid(layer_types=(GDN, ATTENTION))


def tree(parents, tokens, size) -> state_lib.Nodes:
  """Nodes by their parents, parents first, padded to `size` places."""
  n = len(parents)
  depth, mask = np.zeros(size, np.int32), np.eye(size, dtype=bool)
  for i, parent in enumerate(parents):
    if parent >= 0:
      depth[i] = depth[parent] + 1
      mask[i] |= mask[parent]

  def padded(values):
    return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, size - n)))

  return state_lib.Nodes(
    tokens=padded(tokens),
    parents=padded(parents),
    depth=jnp.asarray(depth),
    mask=jnp.asarray(mask),
    count=jnp.asarray(n, jnp.int32),
  )


def paths(nodes: state_lib.Nodes) -> list[tuple[int, ...]]:
  """Every node's tokens from the root down; checks that all fields agree."""
  host = jax.device_get(nodes)
  found = []
  for i in range(int(host.count)):
    above, at = [], i
    while at >= 0:
      above.append(at)
      at = int(host.parents[at])
      assert at < i
    assert sorted(above) == np.flatnonzero(host.mask[i]).tolist()
    assert len(above) - 1 == host.depth[i]
    found.append(tuple(int(host.tokens[n]) for n in reversed(above)))
  assert len(set(found)) == len(found)
  return found


# 0 is the anchor; level 1 goes 0, 2, 5 and adds 30.
FIRST = tree([-1, 0, 0, 1, 2, 2, 5], [10, 11, 12, 13, 14, 15, 16], 8)
PATH, ACCEPTED, CHOICE = [0, 2, 5, 1, 3], 2, 30
SECOND = tree([-1, 0, 0, 1], [30, 31, 32, 33], 6)
TRUNK = [(10,), (10, 12), (10, 12, 15), (10, 12, 15, 30)]
BEHIND = [(*TRUNK[-1], *rest) for rest in ((31,), (32,), (31, 33))]
BESIDE = [(10, 11), (10, 11, 13), (10, 12, 14), (10, 12, 15, 16)]


class ComposedTest(parameterized.TestCase):
  def composed(self, second=SECOND, trunk=3, limit=99, rows=16):
    return jax.jit(two_level.composed, static_argnames="rows")(
      FIRST,
      jnp.asarray(PATH),
      jnp.asarray(ACCEPTED),
      jnp.asarray(CHOICE),
      second,
      trunk=jnp.asarray(trunk),
      limit=jnp.asarray(limit),
      rows=rows,
    )

  def test_all_fits(self):
    self.assertEqual(paths(self.composed()), TRUNK + BEHIND + BESIDE)

  @parameterized.parameters(4, 6, 7, 8, 9, 11)
  def test_what_does_not_fit_is_dropped_from_the_end(self, nodes):
    everything = TRUNK + BEHIND + BESIDE
    for found in (self.composed(limit=nodes), self.composed(rows=nodes)):
      self.assertEqual(paths(found), everything[:nodes])

  @parameterized.parameters(0, 1, 2)
  def test_a_trunk_cut_short(self, trunk):
    """Near the limit on tokens: nothing follows, and nothing leaves it."""
    alone = tree([-1], [CHOICE], 6)
    found = paths(self.composed(alone, trunk=trunk, limit=trunk + 1))
    self.assertEqual(found, TRUNK[: trunk + 1])

  def test_nothing_drafted_behind(self):
    found = self.composed(tree([-1], [CHOICE], 6))
    self.assertEqual(paths(found), TRUNK + BESIDE)


class ShapeTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(), 1, (32, 32)),
    (dict(num_drafts=7), 1, (16, 16)),
    (dict(num_drafts=7), 2, (24, 24)),
    (dict(tree="best_first"), 1, (32, 32)),
    (dict(tree="best_first", tree_depth=4), 1, (32, 10)),
    (dict(tree="best_first", node_budget=64), 2, (64, 48)),
    # As far as a path may be.
    (dict(), 2, (48, 32), 32),
    (dict(num_drafts=7), 2, (24, 24), 32),
    (dict(tree="best_first", node_budget=64), 2, (64, 32), 32),
  )
  def test_shape(self, system, passes, expected, longest=MAX_NODES):
    policy = Policy.of_slots(SystemConfig(**system), 15, "test")
    self.assertEqual(two_level.shape(policy, passes, longest), expected)


def coarse(weight: np.ndarray, *, midpoint: bool) -> np.ndarray:
  """The view of one matrix by arithmetic: mantissas cut to three bits."""
  exponent = np.floor(np.log2(np.abs(np.where(weight == 0, 1.0, weight))))
  unit = np.exp2(exponent - 3)
  cut = np.trunc(weight / unit) * unit
  return cut + np.sign(weight) * unit / 2 * midpoint


class ViewTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    self.target = target_lib.build(CONFIG, bfloat16_values(CONFIG), "float64")
    self.packed = w12.target(self.target)

  @parameterized.parameters(True, False)
  def test_values(self, midpoint):
    """Inside the window; what is outside of it is next to nothing."""
    for name, leaf in assembly.leaves(self.packed).items():
      if not isinstance(leaf, W12Array):
        continue
      weight = np.asarray(w12_array.decode(leaf), np.float64)
      found = np.asarray(
        w12_array.decode_view(leaf, midpoint=midpoint), np.float64
      )
      codes = np.asarray(w12_array.codes(leaf))[: leaf.shape[0]]
      outside = codes >> 7 & 15 == 0
      expected = coarse(weight, midpoint=midpoint)
      np.testing.assert_array_equal(found[~outside], expected[~outside], name)
      rest = np.abs(found) / np.abs(weight).max(axis=1, keepdims=True)
      self.assertLess(rest[outside].max(initial=0), 2.0**-14)
      if not midpoint:
        self.assertEqual(np.abs(found[outside]).max(initial=0), 0)

  @parameterized.parameters(*VIEWS)
  def test_every_product_reads_it(self, view):
    """Inside of W12, and in the model beside a target in bf16."""
    state = state_lib.init_state(CONFIG, 16, jnp.float64)
    nodes = state_lib.run_of(jnp.arange(7), 7, prefill=False)

    def logits(model):
      def run(params):
        own = layers.read_view(nnx.merge(graphdef, params), view)
        return own.logits(own(nodes, state).hidden)

      graphdef, params = nnx.split(model)
      return np.asarray(jax.jit(run)(params))

    # What a model of the coarse numbers computes; tokens are looked up exactly.
    gain = layers.VIEW_GAIN if view == layers.SCALED else 1.0
    arrays = dict(assembly.leaves(self.target))
    for name, leaf in assembly.leaves(self.packed).items():
      if isinstance(leaf, W12Array) and name != "embed.weight":
        dense = w12_array.decode_view(leaf, midpoint=view == layers.MIDPOINT)
        arrays[name] = gain * dense.astype(jnp.float64)
    expected = logits(target_lib.assemble(CONFIG, arrays, jnp.float64))
    for model in (self.packed, two_level.coarse_target(self.target, view)):
      np.testing.assert_allclose(logits(model), expected, rtol=1e-9, atol=1e-12)
    exact = logits(self.target)
    self.assertGreater(np.abs(expected - exact).max(), 1e-3)

  def test_one_matrix_at_a_time(self):
    """Beside a target there is never more than one of its matrices in W12."""
    held, before = [], w12.hold

    def hold(name, leaf):
      alive = [x for x in held if x() is not None]
      self.assertLessEqual(len(alive), 1)
      packed = before(name, leaf)
      if isinstance(packed, W12Array):
        held.append(weakref.ref(packed))
      return packed

    with mock.patch.object(w12, "hold", hold):
      two_level.coarse_target(self.target, "midpoint")
    self.assertGreater(len(held), 5)

  def test_the_module_itself_stays_exact(self):
    layers.read_view(self.packed, "midpoint")
    for _, part in nnx.iter_modules(self.packed):
      self.assertIsNone(getattr(part, "view", None))


def recent(steps=0.0, expected=0.0, accepted=0.0, judged=0.0, agreed=0.0):
  values = (steps, expected, accepted, judged, agreed)
  return level_choice.Recent(*(jnp.asarray(v, jnp.float32) for v in values))


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(0.5, 0.9, 0.97, 1.0)
  def test_expected_tokens(self, agreement):
    """Against a simulation of what the formula says."""
    one, two = level_choice.expected_tokens(
      *(jnp.asarray(x) for x in (agreement, 6.0, 5.0))
    )
    self.assertAlmostEqual(float(one), 7, places=4)
    rng = np.random.default_rng(0)
    agrees = rng.random((200_000, 7)) < agreement
    followed = np.cumprod(agrees, axis=1).sum(axis=1)
    emitted = 1 + followed + 5 * (followed == 7)
    self.assertAlmostEqual(float(two), emitted.mean(), delta=0.05)

  def pays(self, ratio, hoped=5.0, left=1e3, **sums):
    return bool(
      level_choice.pays(
        recent(**sums),
        jnp.asarray(hoped),
        jnp.asarray(left),
        level_choice.Plan.of(1.0, ratio),
      )
    )

  def test_a_request_starts_with_trust(self):
    """With perfect agreement a second level is a step in itself."""
    for hoped in (0.1, 5.0):
      self.assertTrue(self.pays(1.95, hoped))
      self.assertFalse(self.pays(2.05, hoped))

  @parameterized.parameters(0.85, 0.9, 0.97)
  def test_usual_steps_pay_from_the_break_even_on(self, agreement):
    sums = dict(
      steps=1e5, expected=8e5, accepted=5e5, judged=1e6, agreed=agreement * 1e6
    )
    one, two = level_choice.expected_tokens(
      *(jnp.asarray(x) for x in (agreement, 5.0, 5.0))
    )
    even = float(two / one)
    # Five of eight hoped for are accepted.
    self.assertTrue(self.pays(even - 0.01, 8.0, **sums))
    self.assertFalse(self.pays(even + 0.01, 8.0, **sums))
    # A longer trunk is likelier to break.
    self.assertFalse(self.pays(even - 0.01, 16.0, **sums))
    self.assertTrue(self.pays(even + 0.01, 4.0, **sums))

  def test_nothing_pays_at_the_end(self):
    self.assertFalse(self.pays(1.2, left=6.0))
    self.assertTrue(self.pays(1.2, left=12.0))

  def test_what_is_learned(self):
    """Of level 1, also where its trunk was cut; of an agreement no less."""
    before = recent(steps=1, expected=2, accepted=3, judged=4, agreed=5)

    def learned(**seen):
      seen = Seen(**{k: jnp.asarray(v) for k, v in seen.items()})
      after = before.learned(jnp.asarray(6.0), seen)
      return [float(x) for x in jax.tree.leaves(after)]

    keep, drift = level_choice.MEMORY, level_choice.DRIFT
    sums = [keep + 1, 2 * keep + 6]
    np.testing.assert_allclose(
      learned(trunk=3, confirmed=2, accepted=4, foreseen=7),
      [*sums, 3 * keep + 7, 4 * keep + 3, 5 * keep + 2],
      rtol=1e-6,
    )
    np.testing.assert_allclose(
      learned(trunk=0, confirmed=0, accepted=4, foreseen=0),
      [*sums, 3 * keep + 4, 4 * drift, 5 * drift],
      rtol=1e-6,
    )

  @parameterized.parameters(
    # Chances of four slots; their confidence; limits; expected drafts.
    ((0.5, 0.5, 0.5, 0.5), None, (99, 99), 0.9375),
    ((0.5, 0.5, 0.5, 0.5), None, (99, 2), 0.75),
    ((0.5, 0.5, 0.5, 0.5), None, (2, 99), 0.5),
    ((0.5, 0.5, 0.5, 0.5), None, (1, 99), 0.0),
    ((0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 0.5, 1.0), (99, 99), 3.0),
    ((0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 0.5, 1.0), (4, 99), 2.5),
  )
  def test_expected_drafts(self, chances, confidence, limits, expected):
    """Those that are verified, by the confidence head where there is one."""
    chance = jnp.asarray(chances)[:, None]
    sure = None
    if confidence is not None:
      # Of the other parent, which the chain does not go by, nothing is sure.
      sure = jnp.stack([jnp.asarray(confidence), jnp.zeros(4)], axis=1)
    lattice = draft_lib.Lattice(
      tokens=jnp.tile(jnp.asarray([[3, 5]]), (4, 1)),
      scores=jnp.log(jnp.concatenate([chance, 1 - chance], axis=1)),
      count=jnp.asarray(4),
      confidence=sure,
    )
    schedule = two_level.TwoLevel(
      SystemConfig(), Policy.of_slots(SystemConfig(), 4, "test"), 99, "midpoint"
    )
    sampling = sampling_lib.Sampling.of(SamplingParams(), jnp.float32)
    found = schedule._expected(
      types.SimpleNamespace(config=CONFIG),
      types.SimpleNamespace(
        target=types.SimpleNamespace(length=jnp.asarray(0))
      ),
      step_lib.Request(
        sampling=sampling,
        stop_ids=jnp.zeros(1, jnp.int32),
        limits=Limits(*map(jnp.asarray, limits)),
      ),
      lattice,
    )
    self.assertAlmostEqual(float(found), expected, places=5)

  @parameterized.parameters(
    ("one_us", 0.0), ("one_us", float("nan")), ("two_us", -1.0)
  )
  def test_times_are_times(self, name, value):
    with self.assertRaisesRegex(SpecPilotError, f"{name} must be a time above"):
      level_choice.StepTimes(**({"one_us": 1.0, "two_us": 1.0} | {name: value}))


class EngineTest(kit.Float64TestCase):
  def engine(self, config, **settings):
    system = SystemConfig(**settings)
    target = two_level_kit.target(config)
    drafter = PromptLookup(3, min_ngram=1)
    schedule = registry.schedule(system, target, drafter)
    return Engine(
      target,
      drafter=drafter,
      system=system,
      schedule=schedule,
      max_seq_len=64,
      prefill_chunk=8,
    )

  def test_auto_times_its_own_steps(self):
    # Of so few ids that they repeat.
    config = kit.hybrid(vocab_size=5, layer_types=(GDN, ATTENTION))
    engine = self.engine(config, verification="auto")
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    output = engine.generate(prompt, sampling)
    plan = engine.plan(sampling)
    for time in (plan.one, plan.two):
      self.assertGreater(float(time), 1)
    plain = two_level_kit.autoregressive(config).generate(prompt, sampling)
    self.assertEqual(output.token_ids, plain.token_ids)
    # What it is told counts: an endless step of one level, or of two.
    for times, levels in (((1e9, 1), True), ((1, 1e9), False)):
      engine.set_plan(level_choice.Plan.of(*times))
      told = engine.generate(prompt, sampling)
      self.assertEqual(told.token_ids, plain.token_ids)
      trunks = told.metrics.trunk_per_step
      self.assertEqual(any(trunks), levels)
      self.assertLen(trunks, told.metrics.num_steps)

  def test_a_plan_that_was_forced_is_gone(self):
    """Also where steps cannot be timed: none of them has drafts."""
    config = kit.hybrid(vocab_size=5, layer_types=(ATTENTION,))
    engine = self.engine(config, verification="auto")
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.set_limits(nodes=1)
    for _ in range(2):
      with self.assertRaisesRegex(SpecPilotError, "none of .* had drafts"):
        engine.generate([1, 2, 3], sampling)
      self.assertIsNone(engine._told)
      self.assertEmpty(engine._plans)

  def test_refused(self):
    target = two_level_kit.target(CONFIG)
    system = SystemConfig(verification="two_level")
    drafter = PromptLookup(3)
    with self.assertRaisesRegex(SpecPilotError, "two_level needs a drafter"):
      registry.schedule(system, target, None)
    with self.assertRaisesRegex(SpecPilotError, "two_level needs a drafter"):
      Engine(target, system=system)
    with self.assertRaisesRegex(SpecPilotError, "two_level is to run with a"):
      Engine(target, drafter=drafter, system=system)
    with self.assertRaisesRegex(SpecPilotError, "one_level is to run without"):
      Engine(
        target,
        drafter=drafter,
        schedule=registry.schedule(system, target, drafter),
      )
    other = registry.schedule(
      dataclasses.replace(system, view="scaled"), target, drafter
    )
    with self.assertRaisesRegex(SpecPilotError, "made for another system"):
      Engine(target, drafter=drafter, system=system, schedule=other)
    many = dataclasses.replace(system, level_one_passes=99)
    with self.assertRaisesRegex(
      SpecPilotError, f"level_one_passes=99 makes .* at most {MAX_NODES} are"
    ):
      registry.schedule(many, target, drafter)
    sampled = dataclasses.replace(system, acceptance="rejection")
    sampled.check_temperature(0.0)
    with self.assertRaisesRegex(SpecPilotError, "one_level, not for two_level"):
      sampled.check_temperature(1.0)
    self.assertIsNone(registry.schedule(SystemConfig(), target, drafter))

  def test_more_rows_than_the_view_has_a_kernel_for(self):
    """Level 1 beside weights in bf16 would decode its matrices each time."""
    packed = kernels_lib.parse("w12_matmul=interpret")
    values = bfloat16_values(CONFIG)
    for dtype, budget, message in (
      ("bfloat16", 96, "w12_matmul takes at most 64 rows, a pass has 96 nodes"),
      ("float32", 16, "w12_matmul takes bfloat16, not float32"),
    ):
      target = target_lib.build(CONFIG, values, dtype, packed)
      system = SystemConfig(
        verification="two_level", tree="best_first", node_budget=budget
      )
      with self.assertRaisesRegex(SpecPilotError, message):
        registry.schedule(system, target, PromptLookup(9))

  def test_passes_of_two_sizes_are_not_padded(self):
    """Each kind of step commits what it verified, of its own size."""
    engine = two_level_kit.engine(CONFIG, "auto")
    carry = jax.eval_shape(engine.fresh_carry)
    request = engine.request(SamplingParams(max_tokens=4))
    request = dataclasses.replace(request, plan=level_choice.Plan.of(1, 1))
    jaxpr, (after, out) = jax.make_jaxpr(engine.fns.step, return_shape=True)(
      engine.params, carry, request
    )
    (either,) = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    given: list[Any] = [x.aval for x in either.outvars]
    shapes = [x.shape for x in given]
    # What the schedule learns comes behind it, of four numbers.
    kept = dataclasses.replace(after, schedule=())
    self.assertLessEqual(len(shapes), len(jax.tree.leaves((kept, out))) + 4)
    self.assertEqual(out.tokens.shape, (engine.num_drafts + 1,))
    # Nothing else is of the rows of a pass.
    rows = [s for s in shapes if s[:1] == out.tokens.shape]
    self.assertEqual(rows, [out.tokens.shape])

  def test_times_of_each_executable(self):
    """Greedy steps and those that sort a vocabulary take other times."""
    engine = self.engine(CONFIG, verification="auto")
    greedy = SamplingParams()
    filtered = SamplingParams(temperature=1.0, top_p=0.9)
    asked = []

    def times(_, sampling):
      asked.append(sampling)
      return two_level.StepTimes(one_us=len(asked), two_us=9)

    with mock.patch.object(level_choice, "step_times", times):
      for _ in range(2):
        self.assertEqual(float(engine.plan(greedy).one), 1)
        self.assertEqual(float(engine.plan(filtered).one), 2)
        self.assertEqual(float(engine.request(greedy).plan.one), 1)
    self.assertEqual(asked, [greedy, filtered])
    # Times that are given are all that there is.
    given = registry.schedule(
      engine.system,
      two_level_kit.target(CONFIG),
      engine.drafter,
      times=two_level.StepTimes(one_us=3, two_us=4),
    )
    assert given is not None
    plan = given.plan(engine, greedy)
    self.assertEqual((float(plan.one), float(plan.two)), (3, 4))

  def test_weights_that_no_view_holds(self):
    target = target_lib.build(
      CONFIG, target_lib.random_params(CONFIG, 0), "float64"
    )
    with self.assertRaisesRegex(SpecPilotError, "are not bfloat16 ones"):
      registry.schedule(
        SystemConfig(verification="auto"), target, PromptLookup(3)
      )
