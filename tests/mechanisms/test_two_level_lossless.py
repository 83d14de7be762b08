"""Two levels change no token and no bit of state that matters (float64).

The referee decodes with the one-token executable. The view of random weights is
a model that often disagrees, so that every case of the exact pass occurs:
trunks that it confirms, and trunks that it leaves early.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from experiments import prompts
from specpilot_jax import loading
from specpilot_jax.configs import AUTO, TWO_LEVEL, SystemConfig
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.mechanisms import level_choice, registry
from tests.decoding import kit
from tests.decoding.test_lossless import FILTERED, GREEDY, SAMPLED
from tests.mechanisms import two_level_kit
from tests.notes import FULL, note

PROMPTS, TOKENS = (40, 128) if FULL else (8, 64)
FEW = PROMPTS if FULL else 3
BASE = kit.hybrid()
PROCESSED = dataclasses.replace(FILTERED, temperature=1.0)
TREE = dict(tree="best_first")
LONGEST = 8
"""Nodes of a path, less than a trunk and the drafts behind it may have."""
SMALL, WIDE = TREE | dict(node_budget=24), TREE | dict(node_budget=33)


@functools.cache
def referees(sampling, count):
  """The one-token runs: without drafter, and with its context."""
  engine = two_level_kit.autoregressive(BASE)
  # One node a pass. The context has nothing of how tokens were drawn: in the
  # small form one law stands for all.
  bare = None
  if FULL or sampling is GREEDY:
    bare = two_level_kit.engine(BASE, "one_level")
    bare.set_limits(nodes=1)
  pairs = []
  for i, prompt in enumerate(kit.prompts(count, BASE.vocab_size)):
    seeded = dataclasses.replace(sampling, seed=100 + i, max_tokens=TOKENS)
    plain = kit.referee(engine, prompt, seeded)
    runs = [plain]
    if bare is not None:
      bare.load("mixed", plain.sequence)
      states: list[kit.Snapshot] = []
      kit.compare(bare, plain, keep=states)
      runs.append(dataclasses.replace(plain, states=states, drafter=True))
    pairs.append(tuple(runs))
  return pairs


@dataclasses.dataclass
class Totals:
  """What the runs of one case did."""

  tokens: int = 0
  steps: int = 0
  looked: int = 0
  left: int = 0  # trunks that the exact pass did not follow to their end
  beyond: int = 0  # steps that accepted drafts behind a trunk
  beside: int = 0  # steps that accepted drafts beside one
  worst: float = 0.0
  deepest: int = 0  # drafts of a path of a pass


def check(case, engine, sampling, modes, count=PROMPTS) -> Totals:
  """Runs the modes against the referees."""
  total = Totals()
  steps = engine.steps

  def watched(*args):
    for carry, result in steps(*args):
      trunk, confirmed = result.trunk, result.confirmed
      assert 0 <= confirmed <= min(trunk, result.accepted)
      assert result.drafted >= trunk
      total.deepest = max(total.deepest, result.depth)
      total.looked += trunk > 0
      total.left += confirmed < trunk
      if trunk:
        total.beyond += confirmed == trunk and result.accepted > trunk
        total.beside += confirmed < trunk and result.accepted > confirmed
      yield carry, result

  engine.steps = watched
  try:
    for mode in modes:
      for i, pair in enumerate(referees(sampling, count)):
        engine.load(mode, pair[0].sequence, seed=i)
        done = kit.compare(engine, *pair)
        if len(pair) > 1:
          case.assertContainsSubset(
            ("drafter.length", "drafter.tokens", "drafter.taps"), done.worst
          )
        total.tokens += sum(done.emitted)
        total.steps += len(done.emitted)
        total.worst = max(total.worst, done.worst_state)
  finally:
    del engine.steps
  note(
    f"two levels, {case._testMethodName}: {total.tokens} tokens,"
    f" {total.tokens / total.steps:.2f} per exact pass; of {total.steps} steps"
    f" {total.looked} looked, {total.left} left the trunk, {total.beyond} went"
    f" beyond it, {total.beside} beside it; largest state difference"
    f" {total.worst:.2g}"
  )
  case.assertGreater(total.looked, 0)
  case.assertGreater(total.left, 0)
  case.assertGreater(total.beyond, 0)
  return total


class LosslessTwoLevelTest(kit.Float64TestCase):
  @parameterized.named_parameters(
    ("chain_greedy", GREEDY, TWO_LEVEL, {}),
    # Penalties follow trunk and tree.
    ("tree_sampled", PROCESSED, TWO_LEVEL, SMALL | dict(longest=LONGEST)),
    ("auto_tree_greedy", GREEDY, AUTO, SMALL),
    ("auto_chain_sampled", SAMPLED, AUTO, dict(variable_length=True)),
    *(
      (
        ("chain_sampled", SAMPLED, TWO_LEVEL, {}),
        ("packed_sampled", SAMPLED, TWO_LEVEL, dict(weights="w12")),
        ("wide_greedy", GREEDY, TWO_LEVEL, WIDE),
        ("wide_sampled", SAMPLED, TWO_LEVEL, WIDE),
        ("twice_greedy", GREEDY, TWO_LEVEL, dict(passes=2)),
        ("twice_sampled", SAMPLED, TWO_LEVEL, WIDE | dict(passes=2)),
        ("auto_wide_sampled", SAMPLED, AUTO, WIDE),
        ("auto_chain_greedy", GREEDY, AUTO, {}),
        ("tiny_greedy", GREEDY, TWO_LEVEL, TREE | dict(node_budget=5)),
      )
      if FULL
      else ()
    ),
  )
  def test_scripted_drafters(self, sampling, verification, shape):
    """All tokens and states, the drafter's context too."""
    engine = two_level_kit.engine(BASE, verification, **shape)
    modes = ["mixed", "first"] + ["empty"] * ("variable_length" in shape)
    if FULL:
      modes += ["always_wrong", "out_of_range", "second"]
    found = check(self, engine, sampling, modes)
    if "longest" in shape:
      self.assertEqual(found.deepest, LONGEST - 1)
    else:
      self.assertGreater(found.deepest, LONGEST - 1)
    if verification == AUTO:
      self.assertLess(found.looked, found.steps)
    elif "node_budget" not in shape:
      # What level 1 refused hangs beside the trunk, and is right where that
      # is wrong.
      self.assertGreater(found.beside, 0)

  def test_passes_of_any_size(self):
    """Limits are traced; a trunk may leave nothing for new drafts."""
    engine = two_level_kit.engine(BASE, AUTO, **SMALL)
    engine.set_plan(level_choice.Plan.of(1, 0))  # Always two.
    try:
      for nodes, depth in ((1, 5), (2, 5), (5, 2), (16, 0)):
        engine.set_limits(nodes=nodes, depth=depth)
        for i, pair in enumerate(referees(GREEDY, 2)):
          engine.load("first", pair[0].sequence, seed=i)
          done = kit.compare(engine, *pair)
          self.assertLess(max(done.drafted), nodes)
          self.assertEqual(max(done.drafted) > 0, nodes > 1 and depth > 0)
          self.check_learned(engine, nodes, depth)
    finally:
      engine.set_limits()
      engine.set_plan(None)

  def check_learned(self, engine, nodes, depth):
    """What `auto` knows is about the drafts that a pass had room for."""
    carry = engine._carry
    assert carry is not None
    recent = carry.schedule
    most = min(nodes - 1, depth)
    self.assertLessEqual(float(recent.expected), most * float(recent.steps))
    # Level 1 saw them accepted, though of two nodes the trunk has but one.
    if most:
      self.assertGreater(float(recent.accepted), 0.5 * float(recent.steps))
    else:
      self.assertEqual(float(recent.accepted), 0)
    # Behind the end nothing is looked at, and nothing emitted.
    features = sampling_lib.Features.of(GREEDY)
    request = engine.request(GREEDY)
    carry, out = engine._compiled(features).step(engine.params, carry, request)
    engine._carry = carry
    self.assertTrue(bool(carry.done))
    self.assertEqual((int(out.trunk), int(out.count)), (0, 0))

  def test_nothing_of_level_1_stays(self):
    """Level 1 in NaN, weights, choices and taps: nothing changes but speed."""
    clean = two_level_kit.engine(BASE, TWO_LEVEL)
    schedule = clean.schedule
    assert schedule is not None
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), schedule.params)
    self.assertNotEmpty(jax.tree.leaves(nan))
    poisoned = two_level_kit.sibling(clean, params=nan)
    for i, pair in enumerate(referees(GREEDY, FEW)):
      poisoned.load("oracle", pair[0].sequence, seed=i)
      # The drafts that level 1 refused, all of them, are right.
      done = kit.compare(poisoned, *pair)
      self.assertGreater(max(done.accepted), 1)
      carry = poisoned._carry
      assert carry is not None
      for leaf in jax.tree.leaves((carry.target, carry.drafter)):
        self.assertFalse(bool(jnp.isnan(leaf).any()))


if FULL:
  # The small form's zoo in two levels is that of the commands' tests.

  class LosslessZooTest(kit.Float64TestCase):
    @parameterized.named_parameters(
      ("greedy", 0.0, TWO_LEVEL, "bf16"),
      ("packed_greedy", 0.0, TWO_LEVEL, "w12"),
      ("sampled", 1.0, AUTO, "bf16"),
    )
    def test_zoo(self, temperature, verification, weights):
      """The trained pair."""
      model = loading.load_target("zoo", "float64")
      drafter = loading.make_drafter("dflash", model.target)
      system = SystemConfig(verification=verification, weights=weights)
      target, drafter = registry.prepare(system, model.target, drafter)
      shape = dict(max_seq_len=384, prefill_chunk=64)
      assert model.tokenizer is not None
      asked = prompts.load_prompts(
        "zoo-128", model.tokenizer, split="dev", limit=PROMPTS
      )
      referee = Engine(model.target, **shape)
      engine = Engine(
        target,
        drafter=drafter,
        system=system,
        schedule=registry.schedule(system, target, drafter),
        **shape,
      )
      tokens = steps = 0
      for i, prompt in enumerate(asked):
        sampling = dataclasses.replace(
          GREEDY,
          temperature=temperature,
          seed=i,
          max_tokens=TOKENS if FULL else 40,
        )
        assert prompt.token_ids is not None
        done = kit.compare(
          engine, kit.referee(referee, prompt.token_ids, sampling)
        )
        tokens, steps = tokens + sum(done.emitted), steps + len(done.emitted)
      note(
        f"two levels of the zoo, {verification} in {weights}: tau"
        f" {tokens / steps:.2f}"
      )
      self.assertGreater(tokens / steps, 4 if temperature == 0 else 2)
