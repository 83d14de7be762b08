"""Policies of a batch change no token and no state, and do what they are for.

In float64, over scripted drafts, against runs of single requests.
"""

import dataclasses
import itertools
import statistics
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.batch import step as batch_step
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
FLAT = Profile(
  steps={SLOTS: StepCosts((4, 24), (100.0, 101.0))},
  ridden={SLOTS: StepCosts((4, 24), (110.0, 111.0))},
  prefill_us=100.0,
)
STEEP = Profile(
  steps={SLOTS: StepCosts((4, 24), (100.0, 900.0))},
  ridden={SLOTS: StepCosts((4, 24), (400.0, 1200.0))},
  prefill_us=100.0,
)


def trees() -> batch_kit.ScriptedBatchEngine:
  """Shared by all tests."""
  return batch_kit.engine("tree", SLOTS, allocate=TREES, features=None)


def shape(**settings: Any) -> Any:
  """As much of an engine as a policy asks for."""
  kernels = types.SimpleNamespace(w12_matmul="reference")
  known = dict(slots=SLOTS, slot_buckets=(SLOTS,), nodes=16, rider_chunk=0)
  known |= dict(prefill_chunk=8, kernels=kernels)
  return types.SimpleNamespace(**(known | settings))


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

  def rows_of(self, slots):
    del slots
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
      self.assertTrue(any(r.drafted > r.depth for r in results))
    else:
      # A node costs more than it brings: the shortest length, no budget.
      self.assertLess(max(drafts[8:]), 2)

  def test_saturated(self):
    """A budget of a node each: no drafts, a token a step, the same tokens."""
    policy = Steady(system(shared_nodes=1), trees(), FLAT)
    run = Run(trees(), policy, batch_kit.references(4), mode="first")
    run.finished()
    self.assertEqual({f.result.drafted for _, f in run.figures}, {0})
    self.assertEqual(run.accepted, 0)

  def test_plain_steps_between(self):
    """A row each: nothing is drafted, and later drafts are as good as ever."""
    policy = Steady(system(), trees(), FLAT)
    run = Run(
      trees(), policy, batch_kit.references(8), mode="first", states=True
    )
    plan, turn = policy.plan, itertools.cycle((True, True, False))

    def sometimes(load):
      limits = plan(load)
      assert limits is not None
      return dataclasses.replace(limits, rows=ROWS if next(turn) else SLOTS)

    run.scheduler._plan = sometimes
    run.finished()
    kinds = {f.scores is None: [] for _, f in run.figures}
    for _, f in run.figures:
      kinds[f.scores is None].append(f.result)
    self.assertEqual({r.drafted for r in kinds[True]}, {0})
    self.assertGreater(max(r.accepted for r in kinds[False]), 1)

  def test_prompts_ride(self):
    """Where it is cheaper than a pass of their own, and only there."""
    for profile, rode in ((FLAT, True), (STEEP, False)):
      policy = Steady(system(), shape(rider_chunk=4), profile)
      load = Load(
        waiting=0, prefilling=1, decoding=2, free_slots=1, free_pages=9
      )
      self.assertEqual(policy.ride(load, 7), 4 if rode else 0)


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
    self.assertEqual(stock.rows_of(4), (None,))
    # W12's kernel takes 64 rows, of which a prompt has 16.
    packed = BatchPolicy(
      SystemConfig(shared_budget="on", weights="w12"),
      shape(rider_chunk=16, kernels=types.SimpleNamespace(w12_matmul="triton")),
    )
    self.assertEqual(packed.rows_of(4), (4, 16, 32, 48))
    self.assertEqual(packed.rows_of(1), (1, None))
    with self.assertRaisesRegex(SpecPilotError, "64 rows, weights=w12 takes"):
      packed.rows_of(64)

  def test_nodes_follow_costs(self):
    """Dear rows are given up, and taken again where drafts get better."""
    engine = shape()
    load = Load(waiting=0, prefilling=0, decoding=4, free_slots=0, free_pages=0)
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
      policy = BatchPolicy(
        settings, engine, Profile({4: costs}, {}, 1.0), lambda: 0.0
      )
      limits = policy.plan(load)
      assert limits is not None
      self.assertEqual(limits.rows, rows)
      self.assertIs(policy.plan(load), limits)  # while nothing has changed
    self.assertIsNone(BatchPolicy(SystemConfig(), engine).plan(load))

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
    costs = StepCosts((4, 16, 32, 64), (100.0, 110.0, 150.0, 220.0))
    policy = BatchPolicy(
      SystemConfig(shared_budget="on"),
      shape(),
      Profile({4: costs}, {}, 1.0),
      lambda: 0.0,
    )
    load = Load(waiting=0, prefilling=0, decoding=4, free_slots=0, free_pages=0)
    rows = []
    for drafted, accepted in ((15, 12), (15, 0), (15, 12)):
      for _ in range(400):
        policy.observe(self.update("a", drafted=drafted, accepted=accepted))
        limits = policy.plan(load)
        assert limits is not None
      rows.append(limits.rows)
    self.assertEqual(rows, [None, 4, None])
    # Where nothing is drafted nothing is seen, but for a step now and then.
    for _ in range(400):
      policy.observe(self.update("a", drafted=15, accepted=0))
      policy.plan(load)
    seen = []
    for _ in range(6400):
      limits = policy.plan(load)
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
    trust = (int(worth.sum()) + 1) / (worth.sum() + 1)
    self.assertAlmostEqual(fresh.yields.at(4), 1 + trust * worth[:3].sum())

  def test_times_are_corrected(self):
    """A profile that a busy machine spoilt is not believed for ever."""
    now = [0.0]
    costs = StepCosts((4, 16, 32, 64), (100.0, 900.0, 950.0, 999.0))
    spoilt = Profile({4: costs}, {}, 1.0)
    policy = BatchPolicy(
      SystemConfig(shared_budget="on"), shape(), spoilt, lambda: now[0]
    )
    load = Load(waiting=0, prefilling=0, decoding=4, free_slots=0, free_pages=0)
    busy = dataclasses.replace(load, prefilling=1)
    true_us = {4: 100, 16: 101, 32: 102, None: 103}
    for _ in range(40):
      policy.observe(self.update("a", drafted=15, accepted=4))
    seen = []
    for step in range(6400):
      limits = policy.plan(load)
      assert limits is not None
      now[0] += 1e-6 * true_us[limits.rows]
      seen.append(limits.rows)
      policy.observe(self.update("a", drafted=15, accepted=4))
      if step % 50 == 0:
        # A prompt's pass between two steps, and time without any, are none.
        policy.plan(busy)
        now[0] += 1.0
        policy.plan(busy)
        policy.observe(self.update("b", drafted=15, accepted=4, finish="stop"))
        now[0] += 1.0
    self.assertEqual(set(seen[:32]), {4})
    known = policy._costs(4)
    assert known is not None
    self.assertAlmostEqual(known.at(4), 100, delta=1)
    # One step of 64 is of the next larger pass, up to the best of all.
    self.assertIsNone(statistics.mode(seen[-64:]))
    self.assertAlmostEqual(known.at(64), 103, delta=1)

  def test_rows_follow_what_requests_ask_for(self):
    """Dynamic drafts alone: the pass that their last lengths fit."""
    costs = StepCosts((4, 16, 32, 64), (100.0, 110.0, 150.0, 220.0))
    policy = BatchPolicy(
      SystemConfig(dynamic_draft="on"), shape(), Profile({4: costs}, {}, 1.0)
    )

    def rows(requests, *drafted, finish=None):
      for i, count in enumerate(drafted):
        policy.observe(
          self.update(str(i), drafted=count, accepted=0, finish=finish)
        )
      load = Load(
        waiting=0, prefilling=0, decoding=requests, free_slots=0, free_pages=0
      )
      limits = policy.plan(load)
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

  def test_timing(self):
    """Every shape has a time, and the slots are free again."""
    engine = trees()
    for slot in range(SLOTS):
      reference = batch_kit.references(4)[slot].sequence
      engine.scripts[f"timed-{slot}"] = dict(
        mode="always_wrong", reference=reference
      )
    policy = Steady(system(), engine)
    profile = batch_profile.measure(
      engine, policy.rows_of, batching.Plan.of(1, 0.0), batch_kit.GREEDY
    )
    self.assertEqual(profile.steps[SLOTS].nodes, (ROWS,))
    told = profile.told()
    self.assertGreater(told["step_us"]["4"]["12"], 0)
    self.assertEqual(told["step_with_prompt_us"], {})
    self.assertGreater(told["prefill_us"], 0)
    self.assertLen(engine.free_slots, SLOTS)
