"""Faults of two levels put in on purpose: the checks must see each.

Which fault is in is an argument of one executable.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from experiments import token_forcing
from specpilot_jax.configs import ATTENTION, GDN, TWO_LEVEL
from specpilot_jax.decoding import accept
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.mechanisms import two_level
from tests.decoding import kit, tree_kit
from tests.mechanisms import two_level_kit

CONFIG = kit.hybrid(layer_types=(GDN, ATTENTION))
TOKENS = 48
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

_match = accept.match
_verify = step_lib.StepFns._verify


def level_1_tokens_accepted(active):
  """The exact pass takes the trunk without a look at it."""

  def verify(self, params, carry, request, drafted, size, *, pad_to):
    def match(nodes, choices):
      index = jnp.arange(nodes.size)
      given = jnp.where(
        active & (index < drafted.trunk), jnp.roll(nodes.tokens, -1), choices
      )
      return _match(nodes, given)

    with mock.patch.object(accept, "match", match):
      return _verify(self, params, carry, request, drafted, size, pad_to=pad_to)

  return mock.patch.object(step_lib.StepFns, "_verify", verify)


def _of_level_1(active, field):
  """The exact pass's output has level 1's rows where level 1 had any."""
  # What stands there already may be another fault.
  seen, before = [], step_lib.StepFns._pass

  def run(self, model, carry, request, nodes):
    out, logits = before(self, model, carry, request, nodes)
    if not seen:  # Level 1 comes first.
      seen.append(out)
      return out, logits
    coarse = getattr(seen.pop(), field)
    mixed = jax.tree.map(
      lambda x, y: jnp.where(active, x.at[: y.shape[0]].set(y), x),
      getattr(out, field),
      coarse,
    )
    return dataclasses.replace(out, **{field: mixed}), logits

  return mock.patch.object(step_lib.StepFns, "_pass", run)


def level_1_state_committed(active):
  return _of_level_1(active, "stash")


def level_1_taps_kept(active):
  return _of_level_1(active, "taps")


def _changed(active, change):
  """A fault of the tree that the exact pass gets."""

  before = two_level.composed

  def composed(*args, trunk, **named):
    right = before(*args, trunk=trunk, **named)
    wrong = change(right, trunk, jnp.arange(right.size, dtype=jnp.int32))
    return jax.tree.map(lambda x, y: jnp.where(active, x, y), wrong, right)

  return mock.patch.object(two_level, "composed", composed)


def drafts_without_their_trunk(active):
  """New drafts see the anchor and each other, not what is between."""

  def change(nodes, trunk, index):
    between = (index > 0) & (index <= trunk)
    cut = (index > trunk)[:, None] & between[None, :]
    return dataclasses.replace(nodes, mask=nodes.mask & ~cut)

  return _changed(active, change)


def drafts_one_position_further(active):
  def change(nodes, trunk, index):
    return dataclasses.replace(nodes, depth=nodes.depth + (index > trunk))

  return _changed(active, change)


def refused_drafts_one_position_further(active):
  def change(nodes, trunk, index):
    beside = ~nodes.mask[:, trunk] & (index > trunk)
    return dataclasses.replace(nodes, depth=nodes.depth + beside)

  return _changed(active, change)


STATE = {"recurrent", "conv", "k", "v"}
LAYERS = {"tokens", "drafter.taps"} | STATE

# Fault, and the checks of which one must be the first to see it.
FAULTS = (
  (level_1_tokens_accepted, {"tokens"}),
  (level_1_state_committed, STATE),
  (level_1_taps_kept, {"drafter.taps"}),
  (drafts_without_their_trunk, LAYERS),
  (drafts_one_position_further, LAYERS),
  (refused_drafts_one_position_further, LAYERS),
)
NONE = -1


@functools.cache
def prepared():
  """An engine, the referee's runs, and a step that takes a fault's index."""
  clean = two_level_kit.engine(CONFIG, TWO_LEVEL)
  referee = two_level_kit.autoregressive(CONFIG)
  bare = two_level_kit.engine(CONFIG, "one_level")
  bare.set_limits(nodes=1)
  pairs = []
  for prompt in kit.prompts(8, CONFIG.vocab_size):
    plain = kit.referee(referee, prompt, GREEDY)
    bare.load("first", plain.sequence)
    states: list[kit.Snapshot] = []
    kit.compare(bare, plain, keep=states)
    context = dataclasses.replace(plain, states=states, drafter=True)
    pairs.append((plain, context))
  features = sampling_lib.Features.of(GREEDY)
  fns = dataclasses.replace(clean._base, features=features)

  @jax.jit
  def step(params, carry, request, which):
    with contextlib.ExitStack() as faults:
      for index, (fault, _) in enumerate(FAULTS):
        faults.enter_context(fault(which == index))
      return fns.step(params, carry, request)

  return two_level_kit.sibling(clean), clean._compiled(features), pairs, step


class TwoLevelFaultsTest(kit.Float64TestCase):
  def engine_with(self, index):
    engine, compiled, pairs, step = prepared()

    def faulty(params, carry, request):
      return step(params, carry, request, index)

    features = sampling_lib.Features.of(GREEDY)
    engine._fns_by_features = {
      features: dataclasses.replace(compiled, step=faulty)
    }
    return engine, pairs

  def compare_all(self, index):
    engine, pairs = self.engine_with(index)
    for pair in pairs:
      engine.load("first", pair[0].sequence)
      yield kit.compare(engine, *pair)

  def test_control(self):
    """The same executable without a fault finds nothing."""
    found = list(self.compare_all(NONE))
    for done in found:
      self.assertGreater(max(done.accepted), tree_kit.SLOTS)

  @parameterized.named_parameters(
    (fault.__name__, index, checks)
    for index, (fault, checks) in enumerate(FAULTS)
  )
  def test_caught(self, index, checks):
    with self.assertRaises(kit.Mismatch) as caught:
      list(self.compare_all(index))
    self.assertIn(caught.exception.check, checks, str(caught.exception))

  @parameterized.named_parameters(
    ("control", NONE, token_forcing.PASS),
    ("level_1_tokens_accepted", 0, token_forcing.FAIL),
  )
  def test_token_forcing(self, index, verdict):
    """Stock scores what was decoded."""
    engine, pairs = self.engine_with(index)
    scored, tokens = [], 0
    for i, (plain, _) in enumerate(pairs):
      engine.load("first", plain.sequence)
      output = engine.generate(plain.prompt, GREEDY).token_ids
      gaps = two_level_kit.autoregressive(CONFIG).score(plain.prompt, output)
      scored.append(token_forcing.Scored(str(i), output, gaps.gaps))
      tokens += len(output)
    found = token_forcing.judge(
      scored,
      token_forcing.Control("ar", tokens=tokens, flips=0, max_gap=0.0),
      dtype="float64",
      min_control_tokens=tokens,
    )
    self.assertEqual(found["verdict"], verdict)
