"""Policies of a batch change no token and no state, and do what they are for.

In float64, over scripted drafts, against runs of single requests.
"""

import collections
import dataclasses
import statistics
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels.dispatch import Kernels
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.records import StepLimits, StepTime
from specpilot_jax.decoding.batch.scheduler import Load, Request, Update
from specpilot_jax.decoding.draft import Drafts, Lattice
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import batch_profile, batching
from specpilot_jax.mechanisms.batch_profile import Profile
from specpilot_jax.mechanisms.batching import Allocation, BatchPolicy
from specpilot_jax.mechanisms.step_costs import StepCosts
from specpilot_jax.models import state as state_lib
from tests.decoding import batch_kit, kit

SLOTS = 4
ROWS = 12
CHAINS = Allocation(chains=True, shared=True, dynamic=True, lengths=(6, 4, 2))
TREES = Allocation(chains=False, shared=True, dynamic=True, lengths=(6, 4, 2))
LOAD = Load(waiting=0, prefilling=0, decoding=4, free_slots=0, free_pages=0)
FLAT = Profile(
  steps={SLOTS: StepCosts((4, 24), (100.0, 101.0))},
  ridden={SLOTS: StepCosts((4, 24), (110.0, 111.0))},
  prefill_us={8: 100.0},
)
STEEP = Profile(
  steps={SLOTS: StepCosts((4, 24), (100.0, 900.0))},
  ridden={SLOTS: StepCosts((4, 24), (400.0, 1200.0))},
  prefill_us={8: 100.0},
)


def trees() -> batch_kit.ScriptedBatchEngine:
  """Shared by all tests."""
  return batch_kit.engine("tree", SLOTS, allocate=TREES, features=None)


def shape(**settings: Any) -> Any:
  """As much of an engine as a policy asks for."""
  kernels = types.SimpleNamespace(w12_matmul="reference")
  known = dict(slots=SLOTS, slot_buckets=(SLOTS,), nodes=16, rider_chunk=0)
  known |= dict(prefill_chunk=8, kernels=kernels)
  known |= dict(step_times=collections.deque())
  return types.SimpleNamespace(**(known | settings))


def profile(costs: StepCosts) -> Profile:
  return Profile({SLOTS: costs}, {}, {8: 1.0})


class Run(batch_kit.Run):
  """A batch whose policy sees what its steps did."""

  def __init__(self, engine, policy: BatchPolicy, references, **settings):
    super().__init__(
      engine, references, plan=policy.plan, ride=policy.ride, **settings
    )
    advance = self.scheduler.advance

    def observed(now):
      updates = advance(now)
      for update in updates:
        policy.observe(update)
      return updates

    self.scheduler.advance = observed


class Steady(BatchPolicy):
  """Its passes have one shape, whatever it would choose: one is compiled."""

  def rows_of(self, slots, rides=False):
    del slots, rides
    return (ROWS,)


def system(**settings: Any) -> SystemConfig:
  return SystemConfig(
    tree="best_first",
    node_budget=16,
    shared_budget="on",
    dynamic_draft="on",
    prompt_admission="on",
    **settings,
  )


class LosslessTest(kit.Float64TestCase):
  @parameterized.parameters(FLAT, STEEP)
  def test_all_three(self, profile):
    """With arrivals. (Any allocation is exact at any temperature, and so are
    chunks that ride: the tests of the batch engine.)"""
    policy = Steady(system(), trees(), profile)
    run = Run(
      trees(),
      policy,
      batch_kit.references(8),
      arrivals=[0, 0, 0, 2, 3, 3, 9, 12],
      states=True,
    )
    run.finished()
    self.assertGreater(run.accepted, 0)
    results = [f.result for _, f in run.figures]
    drafts = [r.drafted for r in results]
    if profile is FLAT:
      # Some get more than their share, and not only chains.
      self.assertGreater(max(drafts), ROWS // SLOTS)
      self.assertGreater(statistics.mean(drafts[8:]), 2)
      self.assertTrue(any(r.drafted > r.depth for r in results))
    else:
      # A node costs more than it brings: few drafts, if any.
      self.assertLess(statistics.mean(drafts[8:]), 1)

  def test_saturated(self):
    """A budget of a node each: no drafts, a token a step, the same tokens."""
    policy = Steady(system(shared_nodes=1), trees(), FLAT)
    run = Run(trees(), policy, batch_kit.references(4), mode="first")
    run.finished()
    self.assertEqual({f.result.drafted for _, f in run.figures}, {0})
    self.assertEqual(run.accepted, 0)

  def test_its_own_rows(self):
    """All places, packed ones, and a row each, as costs change, with a host
    that is a step behind."""
    engine = trees()
    policy = BatchPolicy(
      system(),
      engine,
      Profile(
        {SLOTS: StepCosts((SLOTS, ROWS, 64), (99.0, 100.0, 101.0))},
        {},
        {8: 1.0},
      ),
    )
    self.enterContext(mock.patch.multiple(batching, SHARES=(3,), TILE=1))
    self.assertEqual(policy.rows_of(SLOTS), (SLOTS, ROWS, None))
    self.enterContext(mock.patch.object(engine._one, "host_lag", 1))
    run = Run(engine, policy, batch_kit.references(8), mode="first")
    plan, seen = policy.plan, []

    def dearer(load):
      # What is dear: all places, then packed ones, then a row each.
      engine.step_times.clear()
      rows = (64, ROWS, SLOTS)[len(seen) // 8 % 3]
      for _ in range(12 if seen else 0):
        engine.step_times.append(StepTime(SLOTS, rows, False, 1e6))
      limits = plan(load)
      assert limits is not None
      seen.append(limits.rows)
      return limits

    run.scheduler._plan = dearer
    run.finished()
    self.assertEqual(set(seen), {None, ROWS, SLOTS})
    kinds = {f.scores is None: [] for _, f in run.figures}
    for _, f in run.figures:
      kinds[f.scores is None].append(f.result)
    # Nothing is drafted, and later drafts are as good as ever.
    self.assertEqual({r.drafted for r in kinds[True]}, {0})
    self.assertGreater(max(r.accepted for r in kinds[False]), 1)

  def test_prompts_ride(self):
    """Where it is cheaper than passes of their own, and only there."""
    for profile, rode in ((FLAT, True), (STEEP, False)):
      policy = Steady(system(), shape(rider_chunk=4), profile)
      load = dataclasses.replace(LOAD, prefilling=1, decoding=2, free_slots=1)
      for _ in range(2):  # Asking changes nothing.
        self.assertEqual(policy.ride(load, 7), 4 if rode else 0)
      self.assertEqual(policy._age, 0)


def offer(rng, tokens) -> batch_step.Offer:
  """Two chains of five drafts; only `tokens` are drawn."""
  scores = np.log(rng.uniform(0.2, 0.9, (2, 5)))
  nodes = jax.vmap(lambda t: state_lib.run_of(t, 6, prefill=False))(tokens)
  candidates = jnp.asarray(rng.integers(0, 9, (2, 5, 1)), jnp.int32)
  first = Drafts(
    tokens=candidates[..., 0],
    count=jnp.full(2, 5),
    candidates=candidates,
    log_law=jnp.asarray(scores)[..., None],
    scores=jnp.asarray(scores),
  )
  lattice = Lattice(candidates, jnp.asarray(scores)[..., None], jnp.full(2, 5))
  paths = np.concatenate([np.zeros((2, 1)), np.cumsum(scores, 1)], 1)
  return batch_step.Offer(
    nodes=nodes,
    scores=jnp.asarray(paths),
    live=jnp.ones(2, bool),
    lattice=lattice,
    first=first,
    learned=jax.vmap(lambda _: CHAINS.fresh())(jnp.arange(2)),
    plan=batching.Plan.of(7, 0.4),
    rows=12,
  )


class PolicyTest(kit.Float64TestCase):
  def test_drawn_tokens_are_not_looked_at(self):
    """Under rejection sampling that would bend the law of the output."""
    allocate = jax.jit(CHAINS)
    for seed in range(5):
      counts = [
        allocate(
          offer(np.random.default_rng(seed), jnp.full((2, 6), token))
        ).count.tolist()
        for token in (1, 7)
      ]
      self.assertEqual(counts[0], counts[1])
      self.assertLessEqual(sum(counts[0]), 7)

  def test_promises_count_as_much_as_they_came_true(self):
    """Of two requests with the same drafts, one of which failed of late."""
    given = offer(np.random.default_rng(0), jnp.full((2, 6), 1))
    alike = jax.tree.map(lambda x: jnp.stack([x[0]] * 2), given.learned)
    same = jnp.stack([given.scores[0]] * 2)
    first = jax.tree.map(lambda x: jnp.stack([x[0]] * 2), given.first)
    given = given._replace(
      scores=same, first=first, plan=batching.Plan.of(8, 0.0)
    )
    self.assertEqual(CHAINS(given).count.tolist(), [4, 4])
    failed = dataclasses.replace(alike, expected=jnp.array([0.0, 5.0]))
    more, less = CHAINS(given._replace(learned=failed)).count.tolist()
    self.assertEqual(more + less, 8)
    self.assertGreater(more, less)
    # What came true more often than promised keeps the order of paths.
    lucky = dataclasses.replace(alike, accepted=jnp.array([9.0, 0.0]))
    self.assertEqual(
      CHAINS(given._replace(learned=lucky)).count.tolist(), [4, 4]
    )

  def test_rows_that_are_paid_for_have_no_price(self):
    for shared in ("on", "off"):
      system = SystemConfig(dynamic_draft="on", shared_budget=shared)
      limits = BatchPolicy(system, shape(nodes=6), STEEP).plan(LOAD)
      assert limits is not None
      self.assertEqual(limits.plan.price == 0, shared == "on")

  def test_rows(self):
    """Few shapes, none below a tile; what W12's kernel does not take is out."""
    engine = shape()
    shared = BatchPolicy(SystemConfig(shared_budget="on"), engine)
    self.assertEqual(shared.rows_of(4), (4, 16, 32, None))
    self.assertEqual(shared.rows_of(1), (1, None))
    fixed = SystemConfig(shared_budget="on", shared_nodes=20)
    policy = BatchPolicy(fixed, engine)
    self.assertEqual([policy.rows_of(n) for n in (1, 4, 32)],
                     [(None,), (20,), (32,)])  # fmt: skip
    stock = BatchPolicy(SystemConfig(), engine)
    # Fewer requests than slots: places of nobody are not computed.
    self.assertEqual(stock.rows_of(4), (16, 32, None))
    self.assertEqual(stock.rows_of(1), (None,))
    rows = {1: 16, 2: 32, 3: None, 4: None}
    for decoding, expected in rows.items():
      limits = stock.plan(dataclasses.replace(LOAD, decoding=decoding))
      assert limits is not None
      self.assertEqual((limits.rows, limits.plan), (expected, ()))
    plain = BatchPolicy(SystemConfig(), shape(nodes=1))
    self.assertEqual(plain.rows_of(4), (None,))
    self.assertIsNone(plain.plan(LOAD))
    # Places for prompts, where several requests are decoded.
    target = kit.build(batch_kit.BASE, "float64")
    for slots, places in ((2, 8), (1, 0)):
      made = batching.engine(
        SystemConfig(prompt_admission="on"), target, None, slots=slots,
        max_seq_len=64, prefill_chunk=8,
      )  # fmt: skip
      self.assertEqual(made.rider_chunk, places)
    # Lengths alone always have drafts.
    alone = BatchPolicy(SystemConfig(dynamic_draft="on"), engine)
    self.assertEqual(alone.rows_of(4), (16, 32, None))
    # W12's kernel takes 64 rows, of which a prompt has 16 where it rides.
    packed = BatchPolicy(
      SystemConfig(shared_budget="on", weights="w12"),
      shape(rider_chunk=16, kernels=types.SimpleNamespace(w12_matmul="triton")),
    )
    self.assertEqual(packed.rows_of(4), (4, 16, 32, None))
    self.assertEqual(packed.rows_of(8), (8, 16, 32, 64))
    self.assertEqual(packed.rows_of(8, True), (8, 16, 32, 48))
    self.assertEqual(packed.rows_of(64, True), ())
    self.assertEqual(packed.rows_of(64), (64,))
    with self.assertRaisesRegex(SpecPilotError, "65 rows, weights=w12 takes"):
      packed.rows_of(65)
    # Without a budget every request has its block: refused before a load is.
    alone = BatchPolicy(
      SystemConfig(weights="w12"),
      shape(rider_chunk=16, kernels=types.SimpleNamespace(w12_matmul="triton")),
    )
    blocks = 64 // alone.engine.nodes
    self.assertEqual(alone.rows_of(blocks)[-1], None)
    self.assertEqual(alone.rows_of(blocks, True), ())
    with self.assertRaisesRegex(SpecPilotError, "weights=w12 takes at most 64"):
      alone.rows_of(blocks + 1)

  def test_what_is_for_one_request(self):
    system = SystemConfig(weights="w12", drafter_view="midpoint")
    with self.assertRaisesRegex(SpecPilotError, "drafter_view=midpoint is for"):
      batching.engine(system, mock.Mock(), mock.Mock(), slots=2)
    target = mock.Mock(kernels=Kernels(tree_attention="mosaic"))
    with self.assertRaisesRegex(SpecPilotError, "mosaic takes one request"):
      batching.engine(SystemConfig(), target, None, slots=1)

  def test_nodes_follow_costs(self):
    """Dear rows are given up, and taken again where drafts get better."""
    engine = shape()
    settings = SystemConfig(
      tree="best_first", node_budget=16, shared_budget="on"
    )
    for us, rows in (
      ((90.0, 100.0, 101.0, 102.0), None),
      ((90.0, 100.0, 120.0, 900.0), 32),
      ((90.0, 100.0, 800.0, 900.0), 16),
      ((9.0, 100.0, 800.0, 900.0), 4),
    ):
      costs = StepCosts((4, 16, 32, 64), us)
      policy = BatchPolicy(settings, engine, profile(costs))
      limits = policy.plan(LOAD)
      assert limits is not None
      self.assertEqual(limits.rows, rows)
      self.assertIs(policy.plan(LOAD), limits)  # while nothing has changed

  def update(self, name, *, drafted, accepted, score=-0.1, finish=None):
    """News of a step with 15 drafts offered, all alike."""
    result = types.SimpleNamespace(drafted=drafted, accepted=accepted)
    scores = np.concatenate([[0.0], score * np.arange(1, 16)])
    return Update(
      Request(id=name, prompt=[0], max_tokens=9),
      tokens=(1,),
      finish=finish,
      figures=types.SimpleNamespace(result=result, scores=scores),
    )

  def test_nodes_follow_what_drafts_are_worth(self):
    costs = StepCosts((4, 16, 32, 64), (100.0, 115.0, 150.0, 220.0))
    policy = BatchPolicy(
      SystemConfig(shared_budget="on"), shape(), profile(costs)
    )
    rows = []
    for drafted, accepted in ((15, 12), (15, 0), (15, 12)):
      for _ in range(400):
        policy.observe(self.update("a", drafted=drafted, accepted=accepted))
        limits = policy.plan(LOAD)
        assert limits is not None
      rows.append(limits.rows)
    self.assertEqual(rows, [None, 4, None])
    # Where nothing is drafted nothing is seen, but for a step now and then.
    for _ in range(400):
      policy.observe(self.update("a", drafted=15, accepted=0))
      policy.plan(LOAD)
    seen = []
    for _ in range(6400):
      limits = policy.plan(LOAD)
      assert limits is not None
      if limits.rows != 4:
        for _ in range(4):
          policy.observe(self.update("a", drafted=3, accepted=3))
      seen.append(limits.rows)
    self.assertEqual((seen[:64].count(4), seen[:64].count(16)), (63, 1))
    self.assertNotEqual(seen[-1], 4)
    # By hand: of drafts alike but for their place, all accepted as expected.
    fresh = BatchPolicy(SystemConfig(shared_budget="on"), shape())
    worth = np.exp(-0.1 * np.arange(1, 16))
    fresh.observe(self.update("a", drafted=15, accepted=int(worth.sum())))
    prior = batching.PRIOR
    trust = (int(worth.sum()) + prior) / (worth.sum() + prior)
    self.assertAlmostEqual(fresh.yields.at(4), 1 + trust * worth[:3].sum())

  def test_times_are_corrected(self):
    """A profile that a busy machine spoilt is not believed for ever."""
    costs = StepCosts((4, 16, 32, 64), (100.0, 900.0, 950.0, 999.0))
    engine = shape()
    policy = BatchPolicy(
      SystemConfig(shared_budget="on"), engine, profile(costs)
    )
    true_us = {4: 100, 16: 101, 32: 102, None: 103}
    for _ in range(40):
      policy.observe(self.update("a", drafted=15, accepted=4))
    seen = []
    for _ in range(6400):
      limits = policy.plan(LOAD)
      assert limits is not None
      rows = limits.rows
      engine.step_times.append(StepTime(4, rows or 64, False, true_us[rows]))
      # Of passes that a prompt rode in, and of other shapes.
      engine.step_times.append(StepTime(4, rows or 64, True, 1e6))
      engine.step_times.append(StepTime(2, 4, False, 1e6))
      seen.append(rows)
      policy.observe(self.update("a", drafted=15, accepted=4))
    self.assertEqual(set(seen[:32]), {4})
    known = policy._costs(4, False)
    assert known is not None
    self.assertAlmostEqual(known.at(4), 100, delta=1)
    # One step of 64 is of the next larger or smaller pass, up to the best.
    self.assertIsNone(statistics.mode(seen[-64:]))
    self.assertAlmostEqual(known.at(64), 103, delta=1)
    self.assertAlmostEqual(known.at(32), 102, delta=10)

  def test_rows_follow_what_requests_ask_for(self):
    """Dynamic drafts alone: the pass that their last lengths fit."""
    costs = StepCosts((4, 16, 32, 64), (100.0, 110.0, 150.0, 220.0))
    policy = BatchPolicy(
      SystemConfig(dynamic_draft="on"), shape(), profile(costs)
    )

    def rows(requests, *drafted, finish=None):
      for i, count in enumerate(drafted):
        policy.observe(
          self.update(str(i), drafted=count, accepted=0, finish=finish)
        )
      limits = policy.plan(dataclasses.replace(LOAD, decoding=requests))
      assert limits is not None
      return limits.rows

    self.assertIsNone(rows(4))  # Nothing is known: room for all.
    self.assertIsNone(rows(4, 15, 7, 7, 7))
    self.assertEqual(rows(4, 7, 7, 7, 7), 32)
    # Those 32 are full now: perhaps more was asked for.
    self.assertIsNone(rows(4, 7, 7, 7, 7))
    self.assertEqual(rows(4, 7, 7, 7, 6), 32)
    self.assertEqual(rows(3, 7, 7, 7, 6), 32)  # one has ended, nobody said so
    policy.observe(self.update("3", drafted=0, accepted=0, finish="stop"))
    self.assertEqual(rows(2, 2, 2), 16)

  def test_all_places_are_stock(self):
    """With a budget, a pass that has room for all is not asked about."""
    fns = batch_step.BatchFns(None, TREES)  # type: ignore
    self.assertIsNone(fns._asked(None))
    self.assertIs(fns._asked(ROWS), TREES)
    alone = dataclasses.replace(TREES, shared=False)
    fns = dataclasses.replace(fns, allocate=alone)
    self.assertIs(fns._asked(None), alone)

  def test_a_step_without_a_plan(self):
    """All nodes, of the shapes that planned ones have: nothing is compiled."""
    index = trees()._index([0])
    listed = np.ones(index.size, bool)
    (*_, plan, _), _ = trees()._arguments(index, listed, StepLimits(), None)
    known = batching.Plan.of(3, 0.5)
    self.assertEqual([x.dtype for x in plan], [x.dtype for x in known])
    self.assertGreaterEqual(plan.budget, SLOTS * trees().nodes)
    self.assertEqual(plan.price, 0)

  def test_timing(self):
    """Every shape has a time, those with a prompt too, and those over all slots
    though one of them reads; slots are free again."""
    engine = Noted()
    profile = batch_profile.measure(
      engine,  # type: ignore
      lambda slots, rides: (slots, None),
      (),
      batch_kit.GREEDY,
    )
    steps = [
      (bucket, rides, rows)
      for bucket in (1, 2)
      for rides in (False, True)
      for rows in (bucket, None)
    ]
    self.assertEqual(list(dict.fromkeys(engine.steps)), steps)
    self.assertEqual(set(engine.prefills), {4, 8})
    told = profile.told()
    for table in ("step_us", "step_with_prompt_us"):
      self.assertEqual(
        {k: list(v) for k, v in told[table].items()},
        {"1": ["1", "16"], "2": ["2", "32"]},
      )
    self.assertEqual(list(told["prefill_us"]), ["4", "8"])
    us = {4: 3.0, 8: 5.0}
    by_hand = dataclasses.replace(profile, prefill_us=us)
    self.assertEqual(
      [by_hand.reading_us(n) for n in (1, 4, 5, 8, 9, 21)],
      [3.0, 3.0, 5.0, 5.0, 8.0, 15.0],
    )
    self.assertEmpty(engine.step_times)
    self.assertEqual(engine.taken, set())


class Noted:
  """An engine that writes down what it is told."""

  slots, slot_buckets, nodes, max_seq_len = 2, (1, 2), 16, 99
  rider_chunk, prefill_sizes = 4, (4, 8)

  def __init__(self):
    self.steps, self.prefills = [], []
    self.taken: set[int] = set()
    self.step_times = [0]

  def admit(self, slot, request):
    del request
    self.taken.add(slot)

  def abort(self, slot):
    self.taken.discard(slot)

  def prefill(self, slot, chunk, places):
    del slot, chunk
    self.prefills.append(places)

  def step(self, slots, limits, riders):
    assert {*slots, *(slot for slot, _ in riders)} <= self.taken
    self.steps.append((limits.bucket, bool(riders), limits.rows))

  def wait(self):
    pass
