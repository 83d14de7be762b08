"""Speculation changes no token and no bit of state that matters (float64)."""

import dataclasses

import numpy as np
from absl.testing import parameterized

from specpilot_jax.configs import ATTENTION, GDN
from specpilot_jax.decoding.sampling import SamplingParams
from tests.decoding import kit
from tests.notes import FULL, note

PROMPTS, TOKENS = (40, 128) if FULL else (6, 48)

GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
PENALTIES = dict(
  presence_penalty=0.3, frequency_penalty=0.4, repetition_penalty=1.2
)
PENALIZED = dataclasses.replace(GREEDY, **PENALTIES)
FILTERED = dataclasses.replace(
  SAMPLED, temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, **PENALTIES
)

BASE = kit.hybrid()


def check_variety(references) -> None:
  """A model that repeats itself would let a stale state pass."""
  for reference in references:
    distinct = len(set(reference.tokens))
    wanted = min(len(reference.tokens), BASE.vocab_size) // 4
    assert distinct > wanted, reference.tokens
  assert len({r.tokens for r in references}) == len(references)


class LosslessTest(kit.Float64TestCase):
  def references(self, autoregressive, scripted, sampling, count):
    """The one-token runs of `count` prompts, without and with a drafter."""
    pairs = []
    vocab = autoregressive.config.valid_vocab
    for i, prompt in enumerate(kit.prompts(count, vocab)):
      seeded = dataclasses.replace(sampling, seed=100 + i)
      plain = kit.referee(autoregressive, prompt, seeded)
      drafter = kit.referee(scripted, prompt, seeded, plain.sequence)
      self.assertEqual(drafter.tokens, plain.tokens)
      pairs.append((plain, drafter))
    check_variety([plain for plain, _ in pairs])
    return pairs

  def check_modes(self, name, pairs, scripted, modes=kit.MODES):
    """Each drafter on each prompt; what it did goes to the notes."""
    k = scripted.num_drafts
    for mode in modes:
      accepted, drafted, steps, worst = 0, 0, 0, 0.0
      for i, (plain, drafter) in enumerate(pairs):
        scripted.load(mode, plain.sequence, seed=i)
        done = kit.compare(scripted, plain, drafter)
        self.assertContainsSubset(
          ("drafter.length", "drafter.tokens", "drafter.taps"), done.worst
        )
        accepted += sum(done.accepted)
        drafted += sum(done.drafted)
        steps += len(done.emitted)
        worst = max(worst, done.worst_state)
      # The script did what its name says.
      if mode == "oracle":
        self.assertEqual(accepted, drafted)
        self.assertGreater(drafted, 0)
      elif mode == "always_wrong":
        self.assertEqual(accepted, 0)
        self.assertGreater(drafted, 0)
      elif mode == "none":
        self.assertEqual(drafted, 0)
      elif mode == "tail_wrong" and k > 1:
        self.assertGreater(accepted, 0)
        self.assertLess(accepted, drafted)
      elif mode == "mixed":
        self.assertGreater(accepted, 0)
        self.assertLess(accepted, drafted)
      elif mode == "out_of_range":
        # A chain ends before an id that does not exist.
        self.assertEqual(accepted, drafted)
      elif mode == "empty":
        self.assertGreater(accepted, 0)
      tokens = sum(len(plain.tokens) for plain, _ in pairs)
      note(
        f"lossless {name} {mode}: {len(pairs)} prompts, {tokens} tokens,"
        f" {tokens / steps:.2f} per step, largest state difference {worst:.2g}"
      )

  @parameterized.named_parameters(
    ("greedy", GREEDY, False),
    ("sampled", SAMPLED, False),
    ("greedy_with_a_branch_of_one_node", GREEDY, True),
  )
  def test_scripted_drafters(self, sampling, variable_length):
    scripted = kit.speculative(BASE, "float64", variable_length=variable_length)
    pairs = self.references(
      kit.autoregressive(BASE, "float64"), scripted, sampling, PROMPTS
    )
    self.check_modes(self._testMethodName[23:], pairs, scripted)

  @parameterized.named_parameters(("greedy", GREEDY), ("sampled", SAMPLED))
  def test_prompt_lookup(self, sampling):
    engine = kit.prompt_lookup(BASE, "float64")
    # Of the drafter's context: the same executable, but no drafts.
    silent = kit.prompt_lookup(BASE, "float64", silent=True)
    accepted, drafted, steps, tokens, worst = 0, 0, 0, 0, 0.0
    for i, prompt in enumerate(kit.prompts(PROMPTS, BASE.vocab_size)):
      seeded = dataclasses.replace(sampling, seed=100 + i)
      reference = kit.referee(
        kit.autoregressive(BASE, "float64"), prompt, seeded
      )
      drafter = kit.referee(silent, prompt, seeded)
      done = kit.compare(engine, reference, drafter)
      self.assertIn("drafter.tokens", done.worst)
      accepted += sum(done.accepted)
      drafted += sum(done.drafted)
      steps += len(done.emitted)
      tokens += len(reference.tokens)
      worst = max(worst, done.worst_state)
    self.assertGreater(drafted, 0)
    if sampling == GREEDY or FULL:  # at temperature 1 hits are rare
      self.assertGreater(accepted, 0)
    note(
      f"lossless {self._testMethodName[5:]}: {PROMPTS} prompts, {tokens}"
      f" tokens, {tokens / steps:.2f} per step, {accepted} of {drafted} drafts"
      f" accepted, largest state difference {worst:.2g}"
    )

  @parameterized.named_parameters(
    # One value head per key head, the shortest window, one token per prefill
    # pass; attention first, so that a GDN layer reads what verification wrote.
    dict(
      testcase_name="one_value_head_chunk_1",
      config=kit.hybrid(
        layer_types=(ATTENTION, GDN, GDN),
        gdn_num_value_heads=2,
        gdn_conv_kernel=2,
      ),
      num_slots=3,
      chunk=1,
    ),
    # Three heads, and more accepted drafts than the window is long.
    dict(
      testcase_name="three_value_heads_15_drafts",
      config=kit.hybrid(
        layer_types=(GDN, GDN, ATTENTION, GDN), gdn_num_value_heads=6
      ),
      num_slots=15,
      chunk=64,
    ),
  )
  def test_shapes(self, config, num_slots, chunk):
    sizes = dict(prefill_chunk=chunk)
    scripted = kit.speculative(config, "float64", num_slots, **sizes)
    pairs = self.references(
      kit.autoregressive(config, "float64", **sizes),
      scripted,
      SAMPLED,
      PROMPTS // 2,
    )
    modes = ("oracle", "always_wrong", "mixed", "tail_wrong")
    self.check_modes(self._testMethodName[5:], pairs, scripted, modes)

  @parameterized.named_parameters(
    ("penalties_greedy", PENALIZED), ("filters_and_penalties", FILTERED)
  )
  def test_processing(self, sampling):
    scripted = kit.speculative(BASE, "float64")
    pairs = self.references(
      kit.autoregressive(BASE, "float64"), scripted, sampling, PROMPTS // 2
    )
    plain = [
      kit.autoregressive(BASE, "float64")
      .generate(
        r.prompt,
        dataclasses.replace(
          GREEDY, temperature=sampling.temperature, seed=r.sampling.seed
        ),
      )
      .token_ids
      for r, _ in pairs
    ]
    # The settings matter: without them the output is another one.
    self.assertNotEqual(plain, [r.tokens for r, _ in pairs])
    modes = ("oracle", "always_wrong", "mixed")
    self.check_modes(self._testMethodName[5:], pairs, scripted, modes)

  def test_rejection_rule_at_temperature_0(self):
    scripted = kit.speculative(BASE, "float64", acceptance="rejection")
    pairs = self.references(
      kit.autoregressive(BASE, "float64"), scripted, GREEDY, PROMPTS // 2
    )
    modes = ("oracle", "always_wrong", "mixed")
    self.check_modes("greedy under rejection", pairs, scripted, modes)

  @parameterized.named_parameters(
    ("greedy", GREEDY), ("sampled", SAMPLED), ("filtered", FILTERED)
  )
  def test_scores_of_autoregressive_output(self, sampling):
    """Scoring in chunks agrees with decoding one token at a time."""
    engine = kit.autoregressive(BASE, "float64")
    for i, prompt in enumerate(kit.prompts(3, BASE.vocab_size)):
      seeded = dataclasses.replace(sampling, seed=100 + i)
      output = engine.generate(prompt, seeded).token_ids
      scores = engine.score(prompt, output, seeded)
      self.assertEqual(tuple(scores.argmax), output)
      np.testing.assert_array_equal(scores.gaps, 0)
      # A wrong token is seen, and only it: the rest is scored after it.
      changed = list(output)
      changed[7] = (changed[7] + 1) % BASE.vocab_size
      scores = engine.score(prompt, changed, seeded)
      np.testing.assert_array_equal(scores.gaps[:7], 0)
      self.assertGreater(scores.gaps[7], 1e-4)
