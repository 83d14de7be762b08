"""Trees change no token and no bit of state that matters (float64).

The referee decodes with the one-token executable. Of the small form the budgets
are limits of one executable; of the full form each has its own envelope.
"""

import dataclasses
import functools

import jax.numpy as jnp
from absl.testing import parameterized
from flax import nnx

from experiments import prompts
from specpilot_jax import loading
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.decoding import kit, tree_kit
from tests.decoding.test_lossless import (
  FILTERED,
  GREEDY,
  PENALIZED,
  check_variety,
)
from tests.notes import FULL, note
from tests.zoo.test_training import drafter_config

PROMPTS, TOKENS = (40, 128) if FULL else (8, 64)
BUDGETS = (1, 7, 16, 33, 64)
BASE = kit.hybrid()


def sampled(sampling, seed):
  return dataclasses.replace(sampling, seed=100 + seed, max_tokens=TOKENS)


@functools.cache
def plain_runs(config, sampling, count) -> list[kit.Reference]:
  """The referee's runs."""
  engine = kit.autoregressive(config, "float64")
  texts = kit.prompts(count, config.vocab_size)
  runs = [
    kit.referee(engine, p, sampled(sampling, i)) for i, p in enumerate(texts)
  ]
  if config is BASE:
    check_variety(runs)
  return runs


def at_budget(make, budget: int):
  """An engine that verifies at most so many nodes."""
  if FULL:
    return make(budget)
  engine = make(max(BUDGETS))
  engine.set_limits(nodes=budget)
  return engine


class Totals:
  """What the runs of one case did."""

  def __init__(self, name):
    self._name = name
    self.accepted = self.drafted = self.steps = self.tokens = 0
    self.beside = self.widest = 0
    self.worst = 0.0

  def add(self, done: kit.Comparison, budget: int) -> None:
    for accepted, drafted, depth in zip(
      done.accepted, done.drafted, done.depths, strict=True
    ):
      assert accepted <= depth <= drafted < budget
      self.beside += drafted > depth
      self.widest = max(self.widest, drafted)
    self.accepted += sum(done.accepted)
    self.drafted += sum(done.drafted)
    self.steps += len(done.emitted)
    self.tokens += sum(done.emitted)
    self.worst = max(self.worst, done.worst_state)

  def note(self) -> None:
    note(
      f"lossless tree {self._name}: {self.tokens} tokens,"
      f" {self.tokens / self.steps:.2f} per step, {self.accepted} of"
      f" {self.drafted} nodes accepted, largest state difference"
      f" {self.worst:.2g}"
    )


class LosslessTreeTest(kit.Float64TestCase):
  def check(self, name, sampling, make, cases, count=PROMPTS):
    """Budgets and modes against the referee, the drafter's context too."""
    runs = plain_runs(BASE, sampling, count)
    bare = at_budget(make, 1)
    contexts = []
    for plain in runs:
      # One node a pass: the referee of the drafter's context.
      bare.load("mixed", plain.sequence)
      states: list[kit.Snapshot] = []
      done = kit.compare(bare, plain, keep=states)
      self.assertEqual(sum(done.drafted), 0)
      contexts.append(dataclasses.replace(plain, states=states, drafter=True))
    taus = {}
    for budget, mode in cases:
      totals = Totals(f"{name} {mode}, {budget} nodes")
      engine = at_budget(make, budget)
      for i, (plain, context) in enumerate(zip(runs, contexts, strict=True)):
        engine.load(mode, plain.sequence, seed=i)
        done = kit.compare(engine, plain, context)
        self.assertContainsSubset(
          ("drafter.length", "drafter.tokens", "drafter.taps"), done.worst
        )
        totals.add(done, budget)
      totals.note()
      taus[budget, mode] = totals.tokens / totals.steps
      if mode == "always_wrong":
        self.assertEqual(totals.accepted, 0)
      else:
        self.assertGreater(totals.accepted, 0)
      if budget > 7 and mode != "always_wrong":
        self.assertGreater(totals.beside, 0)
    return taus

  @parameterized.named_parameters(
    ("greedy", 0.0, "best_first", True, False),
    ("sampled", 1.0, "best_first", False, True),
    *(
      (
        ("greedy_marginals", 0.0, "best_first", False, True),
        ("sampled_given_the_parent", 1.0, "best_first", True, False),
        ("greedy_blind", 0.0, "marginal", True, False),
      )
      if FULL
      else ()
    ),
  )
  def test_scripted_drafters(self, temperature, tree, conditional, variable):
    """Given the parent or not, with and without a branch of one node."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature)

    def make(budget):
      return tree_kit.engine(
        BASE,
        tree=tree,
        conditional=conditional,
        node_budget=budget,
        variable_length=variable,
      )

    modes = ("always_wrong", "first", "second", "out_of_range", "empty")
    if not FULL:
      modes = ("second", "empty" if variable else "out_of_range")
    cases = [(budget, "mixed") for budget in BUDGETS[1:]]
    cases += [(64, mode) for mode in modes]
    name = self._testMethodName[23:]
    taus = self.check(name, sampling, make, cases)
    # Second choices at every depth: they are all inside at 64 nodes.
    self.assertGreater(taus[64, "second"], 4)
    self.assertGreater(taus[64, "mixed"], taus[7, "mixed"])

  @parameterized.named_parameters(
    ("filters_and_penalties", FILTERED),
    *((("penalties_greedy", PENALIZED),) if FULL else ()),
  )
  def test_processing(self, sampling):
    """Penalties follow each node's own path."""

    def make(budget):
      return tree_kit.engine(BASE, node_budget=budget)

    cases = [(64, "mixed"), (64, "second"), (16, "out_of_range")]
    name = f"processing {self._testMethodName[16:]}"
    self.check(name, sampling, make, cases, PROMPTS if FULL else 3)

  @parameterized.named_parameters(("greedy", 0.0), ("sampled", 1.0))
  def test_prompt_lookup(self, temperature):
    """A tree of one candidate per slot."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature)
    make = functools.partial(tree_kit.prompt_lookup, BASE)
    small = (3, 64) if temperature == 0 else (64,)
    for budget in BUDGETS if FULL else small:
      totals = Totals(f"prompt lookup {self._testMethodName[19:]}, {budget}")
      engine = at_budget(make, budget)
      for plain in plain_runs(BASE, sampling, PROMPTS):
        totals.add(kit.compare(engine, plain), budget)
      totals.note()
      self.assertLessEqual(totals.widest, min(budget - 1, tree_kit.SLOTS))
      self.assertEqual(totals.beside, 0)
      self.assertEqual(totals.drafted > 0, budget > 1)

  @parameterized.named_parameters(
    ("greedy", 0.0), *((("sampled", 1.0),) if FULL else ())
  )
  def test_dflash(self, temperature):
    """A random drafter over so few ids that some branch is often right."""
    config = kit.hybrid(vocab_size=5)
    target = kit.build(config, "float64")
    sampling = dataclasses.replace(GREEDY, temperature=temperature)
    model = DFlash(drafter_config(config), jnp.float64, nnx.Rngs(1))

    @functools.cache
    def make(budget):
      return Engine(
        target,
        drafter=DFlashDrafter(model, target),
        system=SystemConfig(tree="best_first", node_budget=budget),
        max_seq_len=256,
        prefill_chunk=8,
      )

    accepted = {}
    for budget in BUDGETS if FULL else (7, 64):
      totals = Totals(f"DFlash {self._testMethodName[12:]}, {budget}")
      engine = at_budget(make, budget)
      for plain in plain_runs(config, sampling, PROMPTS if FULL else 3):
        totals.add(kit.compare(engine, plain), budget)
      totals.note()
      accepted[budget] = totals.accepted / totals.steps
    self.assertGreater(accepted[64], accepted[7])

  @parameterized.named_parameters(
    ("greedy", 0.0), *((("sampled", 1.0),) if FULL else ())
  )
  def test_zoo(self, temperature):
    """The trained pair, on text that it knows how to go on with."""
    model = loading.load_target("zoo", "float64")
    target = model.target
    drafter = loading.make_drafter("dflash", target)
    shape = dict(max_seq_len=384, prefill_chunk=64)
    assert model.tokenizer is not None
    asked = prompts.load_prompts(
      "zoo-128", model.tokenizer, split="dev", limit=PROMPTS if FULL else 1
    )
    referee = Engine(target, **shape)
    runs = []
    for i, prompt in enumerate(asked):
      sampling = dataclasses.replace(
        GREEDY,
        temperature=temperature,
        seed=i,
        max_tokens=TOKENS if FULL else 40,
      )
      assert prompt.token_ids is not None
      runs.append(kit.referee(referee, prompt.token_ids, sampling))
    taus = {}
    for budget in BUDGETS if FULL else (33,):
      engine = Engine(
        target,
        drafter=drafter,
        system=SystemConfig(tree="best_first", node_budget=budget),
        **shape,
      )
      totals = Totals(f"zoo {self._testMethodName[9:]}, {budget} nodes")
      for plain in runs:
        totals.add(kit.compare(engine, plain), budget)
      totals.note()
      taus[budget] = totals.tokens / totals.steps
    ordered = [taus[budget] for budget in sorted(taus)]
    self.assertEqual(ordered, sorted(ordered))
    self.assertGreater(taus[33], 2)
