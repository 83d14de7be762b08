"""A batch changes no token and no state of any of its requests (float64)."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.engine import StepLimits
from specpilot_jax.decoding.batch.scheduler import ERROR, Request
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.packed import fit
from tests.decoding import batch_kit, kit
from tests.decoding.batch_kit import BASE, EVERYTHING, Run
from tests.notes import FULL, note


def arrivals(count: int, seed: int) -> list[float]:
  """Some at once, others while those decode."""
  rng = np.random.default_rng(seed)
  return np.floor(np.cumsum(rng.exponential(1.5, count)) - 1.5).tolist()


class RandomNodes:
  """An allocation of whatever nodes, as long as ancestors come along.

  Its plan seeds the draw, below 0 all are kept; what it learns is how many
  steps there were.
  """

  dense = True

  def fresh(self):
    return jnp.zeros((), jnp.int32)

  def __call__(self, offer):
    key = jax.random.fold_in(jax.random.key(offer.plan), offer.learned.sum())
    drawn = jax.random.bernoulli(key, 0.7, offer.scores.shape)
    drawn = drawn.at[:, 0].set(True) | (offer.plan < 0)
    kept = jnp.all(~offer.nodes.mask | drawn[:, None, :], axis=-1)
    return batch_step.keep(offer.nodes, kept)

  def learned(self, offer, verified, accepted):
    del verified, accepted
    return offer.learned + 1


ALLOCATE = RandomNodes()
SLOTS = 16


SAMPLED = Features(greedy=False, filters=False, penalties=False)
GREEDY = Features(greedy=True, filters=False, penalties=False)


def chains(features: Features = EVERYTHING) -> batch_kit.ScriptedBatchEngine:
  """Shared by most tests."""
  engine = batch_kit.engine("chain", SLOTS, rider_chunk=4)
  engine.features = features
  return engine


class BatchTest(kit.Float64TestCase):
  @parameterized.named_parameters(("2", 2), ("3", 3), ("5", 5), ("16", 16))
  def test_batches(self, size):
    """Random arrivals, greedy: the states after each step too."""
    engine = chains(GREEDY)
    references = batch_kit.references(size)
    run = Run(
      engine,
      references,
      arrivals=arrivals(size, size),
      states=True,
      slots=size,
    )
    self.assertEqual(set(run.finished().values()), {"length"})
    self.assertGreater(run.accepted, 0)
    self.assertGreater(run.worst, 0)  # it was looked at
    note(
      f"batch of {size}: largest state difference {run.worst:.2g},"
      f" {run.accepted} drafts accepted"
    )

  def test_mixed_sampling(self):
    """Greedy, sampled, and filtered with penalties, in one step."""
    references = batch_kit.references(8, mixed=True)
    run = Run(chains(), references, arrivals=arrivals(8, 1), states=True)
    run.finished()
    self.assertGreater(run.accepted, 0)

  def test_aborts_at_every_step(self):
    """Waiting, reading its prompt, decoding: its slot serves the next one."""
    references = batch_kit.references(8)
    ends, heirs = set(), set()
    for victim in range(8) if FULL else (3,):
      for k in range(20):
        run = Run(chains(GREEDY), references)
        for _ in range(k):
          run.advance()
        run.abort(str(victim))
        ends.add(run.finished()[str(victim)])
        if str(victim) in run.slots:
          at = run.slots.pop(str(victim))
          heirs |= {name for name, slot in run.slots.items() if slot == at}
    self.assertEqual(ends, {"abort", "length"})
    self.assertNotEmpty(heirs)

  def test_stop_ids(self):
    """Wherever in an accepted run one stands; its mates go on."""
    cut = []
    for i, plain in enumerate(batch_kit.references(8)):
      stop = plain.tokens[i % 6] if i % 4 else BASE.vocab_size - 1
      sampling = dataclasses.replace(plain.sampling, stop_token_ids=(stop,))
      end = plain.tokens.index(stop) + 1 if stop in plain.tokens else None
      cut.append(
        dataclasses.replace(plain, sampling=sampling, tokens=plain.tokens[:end])
      )
    run = Run(chains(GREEDY), cut, mode="first")
    for i, plain in enumerate(batch_kit.references(8)):
      # Drafts go on behind the stop.
      run.engine.scripts[str(i)]["reference"] = plain.sequence
    finish = run.finished()
    for i, own in enumerate(cut):
      stopped = own.tokens[-1] in own.sampling.stop_token_ids
      self.assertEqual(finish[str(i)], "stop" if stopped else "length")
    self.assertEqual(set(finish.values()), {"stop", "length"})

  def test_trees(self):
    """Packed: all nodes that there is room for, then any that are trees."""
    engine = batch_kit.engine(
      "tree", 5, allocate=ALLOCATE, features=SAMPLED, variable_length=True
    )
    references = [
      r for r in batch_kit.references(8, mixed=True) if not r.sampling.top_k
    ]
    most = {}
    for seed in (-1, 3):

      def plan(load, seed=seed):
        return StepLimits(rows=24, plan=np.int32(seed))

      run = Run(engine, references, plan=plan, states=True)
      run.finished()
      self.assertGreater(run.accepted, 0)
      most[seed] = max(f.result.drafted for _, f in run.figures)
      beside = [f.result.drafted > f.result.depth for _, f in run.figures]
      self.assertTrue(any(beside))
    self.assertEqual(most[-1], 15)
    # Where nobody drafts, a pass has a node of each.
    run = Run(engine, references, plan=plan, mode="none", states=True)
    run.finished()
    self.assertEqual(run.accepted, 0)

  def test_limits_by_slot(self):
    """Without an allocation, limits that fit the rows."""
    limits = np.resize([1, 2, 4, 6, 3], SLOTS)
    run = Run(
      chains(GREEDY),
      batch_kit.references(5),
      mode="first",
      plan=lambda load: StepLimits(nodes=limits, rows=20),
    )
    run.finished()
    widest = {}
    for name, figures in run.figures:
      drafted = figures.result.drafted
      widest[name] = max(widest.get(name, 0), drafted)
    for name, drafted in widest.items():
      self.assertEqual(drafted, limits[run.slots[name]] - 1)
    with self.assertRaisesRegex(SpecPilotError, "without an allocation"):
      run = Run(
        chains(), batch_kit.references(5), plan=lambda load: StepLimits(rows=20)
      )
      run.finished()
    for slot in range(SLOTS):
      chains().abort(slot)

  def test_host_lag(self):
    """The host reads a step late, and a slot may have its next request by
    then."""
    engine = chains()
    with mock.patch.object(engine._one, "host_lag", 1):
      references = batch_kit.references(8, mixed=True)
      run = Run(engine, references)
      for _ in range(6):
        run.advance()
      run.abort("1")
      run.finished()
    self.assertEmpty(engine._pending)

  def test_interrupted(self):
    """Requests are lost, and the engine says so; the next ones are served."""
    engine = batch_kit.make("chain", SLOTS, like=chains())
    engine._steps = chains()._steps
    engine.features = chains().features
    references = batch_kit.references(3, mixed=True)
    run = Run(engine, references)
    for _ in range(3):
      run.advance()
    with mock.patch.object(
      engine, "_step", return_value=mock.Mock(side_effect=KeyboardInterrupt)
    ):
      with self.assertRaises(KeyboardInterrupt):
        run.advance()
    with self.assertRaisesRegex(SpecPilotError, "lost the states"):
      run.advance()
    for name in "012":
      run.abort(name)
    Run(engine, references).finished()

  def test_interrupted_while_it_waits(self):
    """What the device did is read the next time."""
    run = Run(chains(), batch_kit.references(2))
    for _ in range(4):
      run.advance()
    with mock.patch.object(jax, "device_get", side_effect=KeyboardInterrupt):
      with self.assertRaises(KeyboardInterrupt):
        run.advance()
    run.finished()

  def test_a_request_that_is_refused_ends_alone(self):
    engine = chains()
    (reference,) = batch_kit.references(1)
    for name in ("good", "0", "1"):
      engine.scripts[name] = dict(
        mode="none", reference=reference.sequence, seed=0
      )
    scheduler = engine.scheduler()
    for name, prompt in (("bad", [10**6]), ("good", [1, 2, 3])):
      scheduler.submit(Request(id=name, prompt=prompt, max_tokens=4))
    ends = {}
    while scheduler.busy or scheduler.next_arrival_s is not None:
      for update in scheduler.advance(0.0):
        if update.finish is not None:
          ends[update.request.id] = update
    self.assertEqual(ends["bad"].finish, ERROR)
    self.assertRegex(ends["bad"].figures.error, "token id 1000000")
    self.assertEqual(ends["good"].finish, "length")
    with self.assertRaisesRegex(SpecPilotError, "token id 1000000"):
      engine.generate([[1, 2], [10**6]], SamplingParams(max_tokens=4))
    self.assertLen(engine.free_slots, SLOTS)
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    self.assertEqual(output.token_ids, ends["good"].figures.output.token_ids)

  def test_prompts_that_ride(self):
    """A chunk of one request's prompt in the verify pass of the others."""
    references = batch_kit.references(8)
    engine, rode = chains(GREEDY), []
    call = engine._run

    def noted(features, index, listed, limits, rider):
      if rider is not None:
        rode.append((int(rider.count), int(listed.sum())))
      return call(features, index, listed, limits, rider)

    self.enterContext(mock.patch.object(engine, "_run", noted))
    run = Run(
      engine,
      references,
      arrivals=arrivals(8, 3),
      states=True,
      ride=lambda load, unread: 4,
    )
    run.finished()
    # Beside others that decode, whole chunks and the ends of prompts.
    self.assertGreater(len(rode), 4)
    self.assertGreater(max(beside for _, beside in rode), 2)
    self.assertGreater(len({count for count, _ in rode}), 1)

  def test_mates_and_slots_change_nothing(self):
    """The same requests in another order, and each with other mates."""
    references = batch_kit.references(8, mixed=True)
    texts = []
    for order in (range(8), (3, 1, 7, 0, 5, 2, 4, 6), (6, 0), (2,)):
      run = Run(chains(), [references[i] for i in order])
      run.finished()
      texts.append({i: run.tokens[str(n)] for n, i in enumerate(order)})
    for other in texts[1:]:
      for i, tokens in other.items():
        self.assertEqual(tokens, texts[0][i])

  def test_nan_in_idle_slots(self):
    """States of slots without a request may hold anything, before and while
    others decode, and when one is admitted to them."""
    engine = chains()

    def spoilt(x):
      free = np.isin(np.arange(SLOTS), engine.free_slots)
      free = free.reshape(-1, *[1] * (x.ndim - 1))
      if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(free, jnp.nan, x)
      return x

    run = Run(engine, batch_kit.references(4, mixed=True), states=True)
    while run.busy:
      engine._slots = jax.tree.map(spoilt, engine._slots)
      run.advance()
    run.finished()
    self.assertGreater(run.accepted, 0)

  def test_nan_ends_its_own_request(self):
    engine = chains()
    run = Run(engine, batch_kit.references(3))
    for _ in range(4):
      run.advance()
    at = run.slots["1"]
    carry = engine._slots.carry
    target = jax.tree.map(
      lambda x: x.at[at].set(jnp.nan) if x.ndim > 1 else x, carry.target
    )
    engine._slots = dataclasses.replace(
      engine._slots, carry=dataclasses.replace(carry, target=target)
    )
    while run.busy:
      run.advance()
    self.assertEqual(run.finish, {"0": "length", "1": "error", "2": "length"})
    self.assertIn("NaN", [f.error for _, f in run.figures if f.error][0])
    # Its slot serves another.
    Run(engine, batch_kit.references(8)).finished()

  def test_rejection_rule(self):
    """Drafts drawn from their laws, as the single engine draws them."""
    batch = batch_kit.make(
      "chain", SLOTS, acceptance="rejection", like=chains()
    )
    batch.features = SAMPLED
    one = kit.ScriptedEngine(
      kit.build(BASE, "float64"),
      drafter=batch._one.drafter,
      system=batch._one.system,
      max_seq_len=64,
      prefill_chunk=batch_kit.CHUNK,
    )
    sampled = dataclasses.replace(batch_kit.SAMPLED, seed=5)
    runs = []
    for i, plain in enumerate(batch_kit.references(5)):
      one.load("mixed", plain.sequence, seed=i)
      if i != 2:  # that one is greedy, amid the others
        tokens = one.generate(plain.prompt, sampled).token_ids
        self.assertNotEqual(tokens, plain.tokens)
        plain = dataclasses.replace(plain, sampling=sampled, tokens=tokens)
      runs.append(plain)
    run = Run(batch, runs)
    for i, plain in enumerate(batch_kit.references(5)):
      # Drafts follow the text that they followed there.
      batch.scripts[str(i)]["reference"] = plain.sequence
    run.finished()
    self.assertGreater(run.accepted, 0)

  def test_compiles_nothing_behind_the_warm_up(self):
    """Without a drafter; whatever the load is, and whoever meets whom."""
    engine = batch_kit.engine("none", 3, (2, 3), features=None)
    engine.warm_up((batch_kit.GREEDY, batch_kit.SAMPLED))
    references = batch_kit.references(8, mixed=True)
    plain = [r for r in references if r.sampling.top_k == 0]
    before = engine.num_compilations
    for few in (1, 6, 2, 5):
      asked = plain[:few]
      got = engine.generate(
        [r.prompt for r in asked], [r.sampling for r in asked]
      )
      self.assertEqual([g.token_ids for g in got], [r.tokens for r in asked])
    self.assertEqual(engine.num_compilations, before)
    # Memory is that of the slots, whatever happened in them.
    self.assertEqual(
      sum(x.nbytes for x in jax.tree.leaves(engine._slots)),
      sum(x.nbytes for x in jax.tree.leaves(engine._fresh())),
    )


class FitTest(parameterized.TestCase):
  def test_fit(self):
    count, least = jnp.asarray([4, 0, 3, 5]), jnp.asarray([1, 0, 1, 1])
    for rows, expected in (
      (12, [4, 0, 3, 5]),
      (11, [4, 0, 3, 4]),
      (8, [4, 0, 3, 1]),
      (4, [2, 0, 1, 1]),
      (3, [1, 0, 1, 1]),
    ):
      np.testing.assert_array_equal(fit(count, rows, least), expected)
