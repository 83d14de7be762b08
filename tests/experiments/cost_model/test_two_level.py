"""When two levels pay, and their replay beside real runs."""

import dataclasses
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from experiments.cost_model import (
  budgets,
  lattices,
  recorder,
  replay,
  two_level,
)
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import level_choice, registry, w12
from specpilot_jax.mechanisms import two_level as mechanism
from tests.decoding import kit
from tests.mechanisms import two_level_kit
from tests.notes import FULL, note

TIMES = two_level.PassTimes(
  level_one=6.0, exact=9.0, exact_of_two=10.0, draft=1.0
)
PROMPTS, TOKENS = (12, 128) if FULL else (4, 48)


class BreakEvenTest(parameterized.TestCase):
  def test_break_even(self):
    # (C8 + C12 + 2 D) / (C12 + D)
    self.assertAlmostEqual(two_level.break_even(TIMES), (6 + 10 + 2) / (9 + 1))
    self.assertEqual(TIMES.step_times, level_choice.StepTimes(10.0, 18.0))
    twice = two_level.PassTimes(
      level_one=6.0, exact=9.0, exact_of_two=10.0, draft=1.0, passes=2
    )
    self.assertAlmostEqual(two_level.break_even(twice), 2.5)

  @parameterized.parameters(0.8, 0.97, 1.0)
  def test_tau_ratio(self, agreement):
    """Beside what `auto` expects of a request that was always like this."""
    one, two = level_choice.expected_tokens(
      *(jnp.asarray(x) for x in (agreement, 5.0, 5.0))
    )
    ratio = two_level.tau_ratio(agreement, 5)
    self.assertAlmostEqual(ratio, float(two) / float(one), places=2)

  def test_perfect_agreement_doubles(self):
    # Behind a trunk of 1 + d tokens come d more, and the bonus.
    self.assertAlmostEqual(two_level.tau_ratio(1.0, 5), 12 / 6)

  def test_agreement_needed(self):
    needed = two_level.agreement_needed(TIMES, 5)
    assert needed is not None
    self.assertAlmostEqual(
      two_level.tau_ratio(needed, 5), two_level.break_even(TIMES)
    )
    slow = two_level.PassTimes(
      level_one=9.0, exact=9.0, exact_of_two=12.0, draft=1.0
    )
    self.assertIsNone(two_level.agreement_needed(slow, 5))

  def test_refused(self):
    with self.assertRaisesRegex(SpecPilotError, "pass time draft must be"):
      two_level.PassTimes(level_one=1.0, exact=1.0, exact_of_two=1.0, draft=0.0)
    for bad in ((1.1, 3), (0.9, -1)):
      with self.assertRaises(ValueError):
        two_level.tau_ratio(*bad)

  def test_agreement(self):
    found = two_level.Agreement.of(
      [
        np.asarray([True, True, False, True]),
        np.asarray([False, True, True, True]),
      ]
    )
    self.assertEqual((found.tokens, found.agreed), (8, 6))
    self.assertEqual(found.runs, (2, 1, 0, 3))
    self.assertEqual((found.per_token, found.mean_run), (0.75, 1.5))


def recording(tokens: int, slots: int) -> lattices.Recording:
  """An output whose drafts are all right, and level 1 too."""
  ahead = np.arange(tokens)[:, None] + np.arange(slots)
  return lattices.Recording(
    request="r",
    looped=False,
    prompt_length=1,
    output=np.arange(tokens, dtype=np.int32),
    tokens=ahead[..., None].astype(np.int32),
    scores=np.zeros((tokens, slots, 1), np.float16),
    order=None,
    counts=np.full(tokens, slots, np.int16),
    level_one=np.ones((tokens, tokens), bool),
  )


class ReplayTest(kit.Float64TestCase):
  @parameterized.named_parameters(
    ("sampled", 1.0), *((("greedy", 0.0),) if FULL else ())
  )
  def test_real_runs(self, temperature):
    """Prompt lookup reads no taps: nothing of a chain is approximated."""
    config = kit.hybrid(vocab_size=5)
    target = two_level_kit.target(config)
    drafter = PromptLookup(5, min_ngram=1)
    shape = dict(max_seq_len=192, prefill_chunk=16)
    features = Features(greedy=not temperature, filters=False, penalties=False)
    # Weights in W12 hold what the view has weights of its own for otherwise.
    session, packed = (
      recorder.Session(
        target, drafter, features=features, coarse=coarse, **shape
      )
      for coarse in (
        mechanism.coarse_target(target, "midpoint"), w12.target(target)
      )
    )  # fmt: skip
    system = SystemConfig(verification="two_level")
    stock = Engine(target, drafter=drafter, **shape)
    engine = Engine(
      target,
      drafter=drafter,
      system=system,
      schedule=registry.schedule(system, target, drafter),
      **shape,
    )
    self.assertTrue(two_level.follows(system))
    _, policy = budgets.policy_of(system, drafter.num_slots)
    recordings, steps = [], 0
    for seed, prompt in enumerate(kit.prompts(PROMPTS, config.vocab_size)):
      sampling = SamplingParams(
        max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True
      )
      out = stock.generate(prompt, sampling)

      def record(session, seed=seed, prompt=prompt, sampling=sampling, out=out):
        return session.record(
          str(seed),
          prompt,
          out.token_ids,
          out.metrics.emitted_per_step,
          looped=False,
          max_tokens=TOKENS,
          sampling=sampling,
        )

      recordings.append(record(session))
      if not seed:
        np.testing.assert_array_equal(
          record(packed).level_one, recordings[0].level_one
        )
      real = engine.generate(prompt, sampling)
      self.assertEqual(real.token_ids, out.token_ids)
      followed = replay.replay(recordings[-1:], policy)
      self.assertEqual(followed.emitted, (real.metrics.emitted_per_step,))
      steps += real.metrics.num_steps
    agreement = two_level.recorded_agreement(recordings)
    self.assertEqual(agreement["tokens"], sum(map(len, recordings)))
    by_depth = agreement["agreement_by_depth"]
    self.assertLen(by_depth, drafter.num_slots + 1)
    self.assertEqual(by_depth[0], agreement["agreement"])
    for share in by_depth:
      self.assertTrue(0.5 < share < 1)
    note(
      f"replay of two levels, {self._testMethodName}: {steps} steps of real"
      f" runs, all repeated; {two_level.describe(agreement)}"
    )
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / lattices.LATTICES
      lattices.save(path, recordings)
      for kept, read in zip(recordings, lattices.load(path), strict=True):
        np.testing.assert_array_equal(kept.level_one, read.level_one)

  def accepted(self, system, tokens=8):
    _, policy = budgets.policy_of(system, 3)
    return len(policy.path(recording(tokens, 3), 0))

  @parameterized.parameters(
    # Nodes; what three drafts of the first lattice make of them.
    (1, 0),
    (2, 1),  # The draft is a trunk without what level 1 adds.
    (3, 2),
    (4, 3),
    (5, 4),  # A trunk of four, and no room behind.
    (6, 5),
    (8, 7),
  )
  def test_trees_without_room(self, nodes, accepted):
    """The trunk takes nodes, as in `TwoLevel._longer`."""
    system = SystemConfig(
      tree="best_first", node_budget=nodes, verification="two_level"
    )
    self.assertEqual(self.accepted(system), accepted)
    # Of a chain all of it fits.
    if 1 < nodes <= 4:
      chain = dataclasses.replace(system, tree="chain")
      self.assertEqual(self.accepted(chain), 2 * nodes - 1)

  @parameterized.parameters(
    # Passes, drafts of a tree of so many nodes and of a chain.
    (1, 8, 7, 7),
    (2, 8, 7, 11),
    (2, 12, 11, 11),
    (3, 16, 15, 15),
    (3, 15, 14, 15),
  )
  def test_more_passes(self, passes, nodes, tree, chain):
    """Each makes the trunk longer by four, until nodes run out."""
    system = SystemConfig(
      verification="two_level", level_one_passes=passes, node_budget=nodes
    )
    grown = dataclasses.replace(system, tree="best_first")
    self.assertEqual(self.accepted(grown, 40), tree)
    whole = dataclasses.replace(system, node_budget=None)
    self.assertEqual(self.accepted(whole, 40), chain)

  def test_which_drafts_serve(self):
    """What is replayed of every kind, and that all of it differs."""
    found = budgets.in_two_levels([recording(480, 15)])
    self.assertEqual(
      [(p["passes"], p["tree"], p["nodes"], p["rows"]) for p in found],
      [
        (passes, tree, nodes, rows)
        for passes in (1, 2)
        for tree, nodes, rows in (
          ("chain", 16, 16 * (1 + passes)),
          *(("best_first", n, n) for n in (16, 32, 48)),
        )
      ],
    )
    # All is right: a chain of 15 each time and what level 1 adds, or all nodes.
    self.assertEqual(
      [p["tau"] for p in found], [32, 16, 32, 32, 48, 16, 32, 48]
    )

  def test_what_is_not_followed(self):
    looking = SystemConfig(verification="two_level")
    for system in (
      SystemConfig(verification="auto"),
      dataclasses.replace(looking, view="scaled"),
    ):
      for ask in (budgets.policy_of, budgets.label):
        with self.assertRaisesRegex(SpecPilotError, "replay follows two"):
          ask(system, 15)

  def test_nothing_recorded(self):
    one = dataclasses.replace(recording(2, 1), level_one=None)
    with self.assertRaisesRegex(SpecPilotError, "r have no choices of level"):
      two_level.level_one(one)
