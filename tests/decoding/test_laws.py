"""The law of sampled output, both acceptance rules, against the exact law.

A block of drafts is verified at once; its second and third token come from
noise, acceptance draws and residuals of their own. The step function runs for
many seeds at once on a small vocabulary, with a drafter whose law is wrong on
purpose, and the joint counts of three tokens are compared with the target's
law computed without the engine. Variants that are biased on purpose show what
the test can see.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from scipy import stats

from specpilot_jax.configs import ATTENTION, GDN
from specpilot_jax.decoding import accept
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import state as state_lib
from tests.decoding import kit
from tests.notes import FULL, note

VOCAB = 6
SEEDS = 200_000 if FULL else 10_000
CONFIG = kit.hybrid(VOCAB, layer_types=(GDN, ATTENTION))
SCALE = 0.7  # a law with several likely tokens
PROMPT = [1, 4, 2]
PLAIN = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
# Hot enough that top-p and top-k cut differently from place to place.
FILTERED = dataclasses.replace(PLAIN, temperature=1.3, top_p=0.8, top_k=5)


class WrongDrafter:
  """A fixed law per slot over four of six ids, one of them twice."""

  name = "wrong"
  num_slots = 3
  taps: tuple[int, ...] = ()
  vocab_size: int | None = VOCAB
  variable_length = False
  params: Any = ()

  tokens = np.array([[0, 1, 2, 5], [3, 2, 2, 1], [5, 0, 4, 3]], np.int32)
  scores = np.log(
    np.array(
      [[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4], [0.4, 0.3, 0.2, 0.1]],
      np.float32,
    )
  )

  def offered(self, anchor):
    """Drafts offered behind this anchor."""
    return jnp.full_like(anchor, self.num_slots)

  def init_context(self, capacity):
    del capacity
    return ()

  def extend(self, params, context, tokens, taps, start, count):
    del params, tokens, taps, start, count
    return context

  def draft(self, params, context, anchor, position):
    del params, context, position
    # It depends on the anchor, as a real one does.
    return draft_lib.Lattice(
      tokens=jnp.asarray(self.tokens),
      scores=jnp.asarray(np.stack([self.scores] * VOCAB))[anchor]
      * (1 + anchor / VOCAB),
      count=self.offered(anchor),
    )

  def law(self, slot, anchor, temperature):
    logits = self.scores[slot] * (1 + anchor / VOCAB) / temperature
    q = np.zeros(VOCAB)
    np.add.at(q, self.tokens[slot], np.exp(logits) / np.exp(logits).sum())
    return q


class FickleDrafter(WrongDrafter):
  """Offers from no draft to three of them, as the anchor says."""

  name = "fickle"
  variable_length = True

  def offered(self, anchor):
    # Two at first: PROMPT ends with 2.
    return jnp.asarray([0, 3, 2, 1, 0, 1], jnp.int32)[anchor]


class ConditionalDrafter(WrongDrafter):
  """Its law of a slot depends on the draft before."""

  name = "conditional"

  def draft(self, params, context, anchor, position):
    given = super().draft(params, context, anchor, position)
    rolled = [jnp.roll(given.scores, place, axis=1) for place in range(4)]
    return dataclasses.replace(given, scores=jnp.stack(rolled, axis=1))


@functools.cache
def target():
  return kit.build(CONFIG, "float32", seed=3, scale=SCALE)


@functools.cache
def exact_law(sampling) -> np.ndarray:
  """p(x1, x2, x3 | prompt) from the model's logits, in NumPy."""

  model = target()

  @jax.jit
  def logits_after(tokens):
    state = state_lib.init_state(CONFIG, 1, "float32")
    nodes = state_lib.run_of(tokens, tokens.shape[0], prefill=True)
    return model.logits(model(nodes, state).hidden)

  def law(logits):
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    if sampling.top_k:
      p[order[sampling.top_k :]] = 0
      p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()

  joint = np.zeros((VOCAB,) * 3)
  for a in range(VOCAB):
    for b in range(VOCAB):
      rows = logits_after(jnp.asarray([*PROMPT, a, b], jnp.int32))
      first, second, third = (law(rows[i]) for i in (2, 3, 4))
      joint[a, b] = first[a] * second[b] * third
  assert abs(joint.sum() - 1) < 1e-9
  return joint


@functools.cache
def prefilled():
  """An engine, and its carry after the prompt."""
  engine = Engine(
    target(), drafter=WrongDrafter(), max_seq_len=16, prefill_chunk=2
  )
  features = sampling_lib.Features.of(PLAIN)
  carry = engine._start(
    engine._compiled(features), np.asarray(PROMPT, np.int32), 4
  )
  return engine, carry


def sample(
  sampling, acceptance, drafter=WrongDrafter
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Three tokens per seed [SEEDS, 3]; accepted drafts [SEEDS] of the first
  step; and drafts [SEEDS, 3] of each step.
  """
  engine, carry = prefilled()
  fns = dataclasses.replace(
    engine._base,
    drafter=drafter(),
    acceptance=acceptance,
    features=sampling_lib.Features.of(sampling),
  )
  request = engine.request(sampling)

  @jax.jit
  @jax.vmap
  def run(seed):
    now = dataclasses.replace(
      request, sampling=dataclasses.replace(request.sampling, seed=seed)
    )

    def step(state, _):
      state, out = fns.step(engine._params, state, now)
      return state, (out.tokens, out.count, out.accepted, out.drafted)

    # Each step emits a token or more.
    _, (tokens, counts, accepted, drafted) = jax.lax.scan(step, carry, length=3)
    starts = jnp.cumsum(counts) - counts
    index = jnp.arange(tokens.shape[1])
    # Tokens behind the count land where nobody looks.
    places = jnp.where(index < counts[:, None], starts[:, None] + index, 15)
    return (
      jnp.zeros(16, jnp.int32).at[places].set(tokens)[:3],
      accepted[0],
      drafted,
    )

  parts = [
    jax.device_get(run(jnp.arange(start, start + 10_000, dtype=jnp.uint32)))
    for start in range(0, SEEDS, 10_000)
  ]
  tokens, accepted, drafted = map(np.concatenate, zip(*parts, strict=True))
  return tokens, accepted, drafted


def p_value(counts, law) -> float:
  """Chi-square; cells that expect fewer than five draws are one cell."""
  counts, expected = counts.ravel(), law.ravel() * counts.sum()
  if counts[expected == 0].any():
    return 0.0  # what has no probability was drawn
  rare = expected < 5
  counts = np.append(counts[~rare], counts[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  keep = expected > 0
  return stats.chisquare(counts[keep], expected[keep], sum_check=False).pvalue


def p_values(tokens, joint) -> dict[str, float]:
  """Of the second token, the third, and all three together."""
  counts = np.zeros((VOCAB,) * 3)
  np.add.at(counts, tuple(tokens.T), 1)
  return {
    "second": p_value(counts.sum(axis=(0, 2)), joint.sum(axis=(0, 2))),
    "third": p_value(counts.sum(axis=(0, 1)), joint.sum(axis=(0, 1))),
    "joint": p_value(counts, joint),
  }


# The biased variants: patches of what the step calls.

_rejection = accept.rejection
_choose = sampling_lib.choose
_gumbel = sampling_lib.gumbel
_chain = draft_lib.chain


def lenient(nodes, drafts, law, sampling, position):
  """Accepts with probability min(1, 1.3 p / q)."""
  lower = dataclasses.replace(drafts, log_law=drafts.log_law - np.log(1.3))
  return _rejection(nodes, lower, law, sampling, position)


def no_residual(nodes, drafts, law, sampling, position):
  """After a refusal samples from p, not from max(p - q, 0)."""
  right = _rejection(nodes, drafts, law, sampling, position)
  noise = _gumbel(
    sampling.seed,
    (position + 1 + right.accepted)[None],
    law.shape[1],
    sampling_lib.Stream.TARGET,
    law.dtype,
  )[0]
  final = jnp.argmax(jnp.log(law[right.accepted]) + noise).astype(jnp.int32)
  index = jnp.arange(right.emitted.shape[0])
  return dataclasses.replace(
    right, emitted=jnp.where(index < right.accepted, right.emitted, final)
  )


def residual_without_draft(nodes, drafts, law, sampling, position):
  """Where drafts ran out, samples as if one had been refused."""
  right = _rejection(nodes, drafts, law, sampling, position)
  ran_out = right.accepted == nodes.count - 1
  slot = jnp.minimum(right.accepted, drafts.tokens.shape[0] - 1)
  q = (
    jnp.zeros(law.shape[1])
    .at[drafts.candidates[slot]]
    .add(jnp.exp(drafts.log_law[slot]))
  )
  noise = _gumbel(
    sampling.seed,
    (position + 1 + right.accepted)[None],
    law.shape[1],
    sampling_lib.Stream.TARGET,
    law.dtype,
  )[0]
  residual = jnp.maximum(law[right.accepted] - q, 0)
  final = jnp.argmax(jnp.log(residual) + noise).astype(jnp.int32)
  index = jnp.arange(right.emitted.shape[0])
  return dataclasses.replace(
    right,
    emitted=jnp.where(
      ran_out & (index >= right.accepted), final, right.emitted
    ),
  )


def step_noise(logits, sampling, features, positions):
  """One noise for all nodes of a pass."""
  return _choose(
    logits, sampling, features, jnp.broadcast_to(positions[0], positions.shape)
  )


def one_stream(seed, positions, size, stream, dtype):
  """Drafts and target draw the same noise, of the same tokens."""
  del stream
  return _gumbel(seed, positions, size, sampling_lib.Stream.TARGET, dtype)


def certain_drafts(lattice, **settings):
  """Drafts are the best candidates; the law says that they were drawn."""
  drafts = _chain(lattice, **settings)
  best = jnp.argmax(lattice.scores, axis=1)[:, None]
  tokens = jnp.take_along_axis(lattice.tokens, best, axis=1)[:, 0]
  return dataclasses.replace(drafts, tokens=tokens)


def law_of_the_best_parent(lattice, **settings):
  """Drafts are drawn given their parents; the law is that of the best one."""
  drafts = _chain(lattice, **settings)
  best = _chain(lattice, **(settings | {"sample": False}))
  return dataclasses.replace(drafts, log_law=best.log_law)


class LawTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.product(
    (
      dict(sampling=PLAIN, drafter=WrongDrafter),
      dict(sampling=FILTERED, drafter=WrongDrafter),
      dict(sampling=PLAIN, drafter=FickleDrafter),
    ),
    acceptance=("match", "rejection"),
  )
  def test_exact(self, acceptance, sampling, drafter):
    self.check(acceptance, sampling, drafter)

  def test_exact_given_the_parent(self):
    self.check("rejection", PLAIN, ConditionalDrafter)

  def check(self, acceptance, sampling, drafter):
    joint = exact_law(sampling)
    tokens, accepted, drafted = sample(sampling, acceptance, drafter)
    found = p_values(tokens, joint)
    shown = ", ".join(f"{which} {p:.2g}" for which, p in found.items())
    kind = "filtered" if sampling.top_k else "plain"
    note(
      f"law {acceptance} {kind}, {drafter.name} drafter: {SEEDS} seeds, p of"
      f" chi-square: {shown}"
    )
    for which, p in found.items():
      self.assertGreater(p, 1e-3, which)
    # Several lengths of the first run occur, or nothing was tested.
    lengths = np.bincount(accepted, minlength=4) / SEEDS
    self.assertGreater(lengths[:3].min(), 0.005)
    if drafter is FickleDrafter:
      self.assertEqual(set(drafted[:, 0]), {2})
      second = np.bincount(drafted[:, 1], minlength=3) / SEEDS
      self.assertGreater(second[:2].min(), 0.05)
    # The share of first drafts accepted is the rule's own.
    p = joint.sum(axis=(1, 2))
    q = drafter().law(0, PROMPT[-1], sampling.temperature)
    rate = p[q.argmax()]
    if acceptance == "rejection":
      rate = np.minimum(p, q).sum()
    self.assertAlmostEqual(
      (accepted > 0).mean(), rate, delta=4 * np.sqrt(rate / SEEDS)
    )

  @parameterized.named_parameters(
    ("accepts_too_much", accept, "rejection", lenient),
    ("residual_not_subtracted", accept, "rejection", no_residual),
    ("law_of_drafts_wrong", draft_lib, "chain", certain_drafts),
    (
      "law_of_another_parent",
      draft_lib,
      "chain",
      law_of_the_best_parent,
      "rejection",
      ConditionalDrafter,
    ),
    ("noise_shared", sampling_lib, "gumbel", one_stream),
    ("noise_keyed_by_step", sampling_lib, "choose", step_noise, "match"),
    (
      "residual_without_draft",
      accept,
      "rejection",
      residual_without_draft,
      "rejection",
      FickleDrafter,
    ),
  )
  def test_biased(
    self, module, name, variant, acceptance="rejection", drafter=WrongDrafter
  ):
    with mock.patch.object(module, name, variant):
      tokens, _, _ = sample(PLAIN, acceptance, drafter)
    found = p_values(tokens, exact_law(PLAIN))
    self.assertLess(found["joint"], 1e-6)
    self.assertLess(min(found["second"], found["third"]), 1e-3)
