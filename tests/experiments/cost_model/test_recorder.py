"""Recorded lattices replay real runs: every step of them in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.cost_model import lattices, recorder, replay
from specpilot_jax import loading
from specpilot_jax.configs import ATTENTION, GDN, SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.decoding import kit
from tests.notes import FULL, in_full_form, note
from tests.zoo.test_training import drafter_config

PROMPTS = (
  "def fib(n):\n  if n < 2:\n    return n\n  return fib(n - 1) + ",
  "import numpy as np\n\ndef mean(x):\n",
  "class Stack:\n  def __init__(self):\n    self._items = []\n\n  def push(",
  "for i in range(10):\n  print(",
)
COUNT, TOKENS = (4, 128) if FULL else (2, 32)


class ReplayTest(kit.Float64TestCase):
  def session(self, target, drafter, room):
    return recorder.Session(
      target,
      drafter,
      max_seq_len=room,
      prefill_chunk=16,
      features=Features(greedy=True, filters=False, penalties=False),
    )

  def compare(self, name, target, drafter, prompts, room, shorter=None):
    """Stock greedy and sampled, and a shorter chain where one is given."""
    session = self.session(target, drafter, room)
    steps = 0
    # One engine for both temperatures: it compiles less.
    engines = {
      drafts: Engine(
        target,
        drafter=drafter,
        max_seq_len=room,
        prefill_chunk=16,
        system=SystemConfig(num_drafts=drafts),
      )
      for drafts in (None, shorter)
    }
    runs = [(0.0, None), (1.0, None)] + [(0.0, shorter)] * bool(shorter)
    for temperature, drafts in runs:
      engine = engines[drafts]
      for seed, prompt in enumerate(prompts):
        out = engine.generate(
          prompt,
          SamplingParams(
            max_tokens=TOKENS,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
          ),
        )
        if drafts is None:
          self.kept[temperature, seed] = session.record(
            str(seed),
            prompt,
            out.token_ids,
            out.metrics.emitted_per_step,
            looped=False,
          )
        recorded = self.kept[temperature, seed]
        # The matching rule: fewer drafts, the same tokens.
        self.assertSequenceEqual(recorded.output.tolist(), out.token_ids)
        policy = replay.Chain(drafts or drafter.num_slots)
        emitted = out.metrics.emitted_per_step
        self.assertEqual(replay.replay([recorded], policy).emitted, (emitted,))
        self.assertEqual(
          replay.agreement(recorded, policy, emitted), len(emitted)
        )
        steps += len(emitted)
    note(f"replay of {name}: {steps} steps of real runs, all of them repeated")

  def setUp(self):
    super().setUp()
    self.kept = {}

  @in_full_form
  def test_zoo(self):
    model = loading.load_target("zoo", "float64")
    drafter = loading.make_drafter("dflash", model.target)
    assert model.tokenizer is not None and drafter is not None
    prompts = [model.tokenizer.encode(text) for text in PROMPTS[:COUNT]]
    shorter = 4 if FULL else None
    self.compare("the zoo", model.target, drafter, prompts, 192, shorter)
    # A wider tree never accepts less than the chain inside it from one place.
    for recorded in self.kept.values():
      for at in range(len(recorded)):
        chain = replay.Chain(drafter.num_slots).path(recorded, at)
        tree = replay.BestFirst(32).path(recorded, at)
        self.assertGreaterEqual(len(tree), len(chain))

  def test_passes_that_are_no_passes_of_the_output(self):
    target = kit.build(kit.hybrid(vocab_size=7), "float64")
    session = self.session(target, PromptLookup(5), 96)
    for emitted in ((2, 2), (0, 3), (7,)):
      output = [1] * max(3, emitted[0])
      with self.assertRaisesRegex(SpecPilotError, "passes of .* 1 to 6"):
        session.record("a", [1, 2], output, emitted, looped=False)

  def test_prompt_lookup(self):
    """Slots without drafts, and prompts of one token."""
    target = kit.build(kit.hybrid(vocab_size=7), "float64")
    drafter = PromptLookup(5, max_ngram=2, min_ngram=1)
    prompts = [[3], [1, 2, 1, 2, 1], [0, 5, 6] * 7]
    self.compare("prompt lookup", target, drafter, prompts, 96, shorter=2)
    counts = np.concatenate([r.counts for r in self.kept.values()])
    self.assertTrue((counts == 0).any() and (counts > 0).any())


class Conditional(DFlashDrafter):
  """Scores given the parent, in steps that float16 holds: replay is exact."""

  def draft(self, params, context, anchor, position):
    given = super().draft(params, context, anchor, position)
    parents = jnp.roll(given.tokens, 1, axis=0)[:, :, None]
    parents = parents.at[0].set(anchor)
    own = given.tokens[:, None]
    likes = jnp.where((parents * 3 + own) % 5 < 2, 0.0, -0.75)
    scores = jnp.round(given.scores[:, None] * 4) / 4 + likes
    return dataclasses.replace(given, scores=scores)


class TreesTest(kit.Float64TestCase):
  def test_trees_given_the_parent(self):
    """Real runs of trees, and their replay along stock's output."""
    config = kit.hybrid(vocab_size=5, layer_types=(ATTENTION, GDN, ATTENTION))
    target = kit.build(config, "float64")
    model = DFlash(drafter_config(config), jnp.float64, nnx.Rngs(1))
    drafter = Conditional(model, target)
    session = recorder.Session(
      target,
      drafter,
      max_seq_len=96,
      prefill_chunk=16,
      features=Features(greedy=True, filters=False, penalties=False),
    )
    engines = {
      tree: Engine(
        target,
        drafter=drafter,
        system=SystemConfig(tree=tree, node_budget=budget),
        max_seq_len=96,
        prefill_chunk=16,
      )
      for tree, budget in (
        ("chain", None), ("best_first", 16), ("marginal", 16)
      )
    }  # fmt: skip
    prompts = kit.prompts(4, config.vocab_size)
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    recorded = []
    for i, prompt in enumerate(prompts):
      out = engines["chain"].generate(prompt, sampling)
      recorded.append(
        session.record(
          str(i),
          prompt,
          out.token_ids,
          out.metrics.emitted_per_step,
          looped=False,
          max_tokens=48,
        )
      )
      self.assertIsNotNone(recorded[-1].order)
    taus = {}
    for tree, budget in (
      ("chain", None), ("best_first", 7), ("best_first", 16), ("marginal", 16)
    ):  # fmt: skip
      engine = engines[tree]
      engine.set_limits(nodes=budget)
      emitted = []
      for prompt, recording in zip(prompts, recorded, strict=True):
        out = engine.generate(prompt, sampling)
        self.assertSequenceEqual(recording.output.tolist(), out.token_ids)
        emitted.append(out.metrics.emitted_per_step)
      policy = (
        replay.Chain(drafter.num_slots)
        if budget is None
        else replay.BestFirst(budget, blind=tree == "marginal")
      )
      found = replay.replay(recorded, policy)
      self.assertEqual(found.emitted, tuple(emitted))
      taus[tree, budget] = found.tau
    self.assertGreater(taus["best_first", 16], taus["chain", None])
    self.assertEqual(len(set(taus.values())), 4)


@in_full_form
def test_lattices_are_of_the_contexts_that_the_run_had():
  """In bfloat16, where passes of other rows leave taps rounded otherwise."""
  config = kit.hybrid(vocab_size=5)
  target = kit.build(config, "bfloat16")
  drafter = DFlashDrafter(
    DFlash(drafter_config(config), jnp.bfloat16, nnx.Rngs(1)), target
  )
  features = Features(greedy=True, filters=False, penalties=False)
  session = recorder.Session(
    target, drafter, max_seq_len=96, prefill_chunk=16, features=features
  )
  prompt = [1, 2, 3, 1, 2, 0, 4]
  carry = session.start(prompt)
  request = session.request(SamplingParams())
  draft = jax.jit(drafter.draft)
  output, emitted, starts, drafted = [], [], [], []
  while len(output) < 24:
    drafted.append(
      draft(session.params[1], carry.drafter, carry.anchor, carry.target.length)
    )
    starts.append(len(output))
    carry, out = session.step(session.params, carry, request)
    emitted.append(int(out.count))
    output += out.tokens[: emitted[-1]].tolist()
  assert len(set(emitted)) > 1
  recorded = session.record("a", prompt, output, emitted, looped=False)
  for at, lattice in zip(starts, drafted, strict=True):
    lattice = jax.device_get(lattice)
    tokens, scores, _ = lattices.rank(
      lattice.tokens[None], lattice.scores[None], config.valid_vocab
    )
    np.testing.assert_array_equal(recorded.tokens[at], tokens[0])
    np.testing.assert_array_equal(recorded.scores[at], scores[0])


def test_rejection_sampling_is_refused():
  record = {
    "request": "a",
    "sampling": {"temperature": 1.0},
    "options": {"acceptance": "rejection"},
  }
  with pytest.raises(SpecPilotError, match="request a .*rejection sampling"):
    recorder.record_all(None, [record], print)  # pyrefly: ignore
