"""One line that names the culprit for whatever does not fit."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from tests.decoding import kit

CONFIG = kit.hybrid()
PADDED = kit.hybrid(61, tokenizer_size=50)


class QuickTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())


class BadInputTest(QuickTestCase):
  def refuses(self, what, function, *args, **kwargs):
    """The error is one line and says `what`, a regular expression."""
    with self.assertRaises(SpecPilotError) as caught:
      function(*args, **kwargs)
    text = str(caught.exception)
    self.assertNotIn("\n", text)
    self.assertTrue(re.search(what, text), text)

  def test_settings_of_batches(self):
    engine = Engine(
      kit.build(CONFIG, "float32"), system=SystemConfig(prompt_admission="on")
    )
    self.refuses(
      "^prompt_admission=on is for several requests at once, this engine",
      engine.generate,
      [1],
    )

  @parameterized.parameters(
    ([], "prompt is empty"),
    ([1, 61], "prompt: token id 61 at index 1 .* vocabulary of 61"),
    ([1, 2, -1], "prompt: token id -1 at index 2"),
    ([1.0, 2.0], "prompt must be a sequence of integers, got float64"),
    ([2**70], "prompt holds values that are no token ids"),
    ([[1, 2]], "prompt must be a sequence of integers, .* shape"),
    ([[1, 2], [3]], "prompt must be a sequence of integers"),
    (["a"], "prompt must be a sequence of integers"),
    ([True], "prompt must be a sequence of integers"),
    (None, "prompt holds values that are no token ids"),
    ([1] * 256, "prompt of 256 tokens leaves no room .* context of 256"),
    ([1] * 600, "prompt of 600 tokens"),
  )
  def test_prompts(self, prompt, what):
    engine = kit.autoregressive(CONFIG, "float32")
    self.refuses(what, engine.generate, prompt)
    # Nothing is left behind that would disturb the next request.
    self.refuses("prompt is empty", engine.generate, [])
    if prompt is not None and len(prompt) < 256:
      self.refuses(what.replace("prompt", "output"), engine.score, [1], prompt)

  def test_a_bad_prompt_leaves_the_engine_usable(self):
    engine = kit.autoregressive(CONFIG, "float32")
    sampling = SamplingParams(max_tokens=5)
    before = engine.generate([1, 2, 3], sampling).token_ids
    self.refuses("token id 99", engine.generate, [1, 99], sampling)
    self.refuses("prompt of 300", engine.generate, [1] * 300, sampling)
    self.assertEqual(engine.generate([1, 2, 3], sampling).token_ids, before)

  @parameterized.parameters(
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", 1e-9),
    ("temperature", "hot"),
    ("temperature", 1e39),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", None),
    ("presence_penalty", float("inf")),
    ("presence_penalty", 1e39),
    ("frequency_penalty", float("nan")),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e-40),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", 0.5),
    ("max_tokens", 0),
    ("max_tokens", 3.5),
    ("stop", ("",)),
    ("stop", "END"),
    ("stop", (3,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("x",)),
    ("stop_token_ids", 7),
  )
  def test_sampling_params(self, field, value):
    self.refuses(f"^{field} must be ", lambda: SamplingParams(**{field: value}))

  def test_requests_that_do_not_fit_the_engine(self):
    engine = kit.autoregressive(CONFIG, "float32")
    self.refuses(
      "stop strings need a tokenizer",
      engine.generate,
      [1],
      SamplingParams(stop=("x",)),
    )
    self.refuses(
      "17 stop token ids, at most 16",
      engine.generate,
      [1],
      SamplingParams(stop_token_ids=tuple(range(17))),
    )
    self.refuses(
      "stop token id 61 is outside the vocabulary of 61",
      engine.generate,
      [1],
      SamplingParams(stop_token_ids=(61,)),
    )
    self.assertEqual(
      len(engine.generate([1], SamplingParams(max_tokens=2)).token_ids), 2
    )

  @parameterized.parameters(
    (dict(max_seq_len=0), "max_seq_len 0 is not between 2 and .* 512"),
    (dict(max_seq_len=1), "max_seq_len 1 "),
    (dict(max_seq_len=513), "max_seq_len 513 "),
    (dict(prefill_chunk=0), "prefill_chunk must be at least 1, got 0"),
  )
  def test_engine_settings(self, settings, what):
    self.refuses(what, Engine, kit.build(CONFIG, "float32"), **settings)

  @parameterized.parameters(
    (dict(acceptance="maybe"), "acceptance 'maybe' is not one of"),
    (dict(num_drafts=0), "num_drafts must be at least 1, got 0"),
  )
  def test_systems(self, settings, what):
    self.refuses(what, SystemConfig, **settings)

  def test_drafters_that_do_not_fit(self):
    model = kit.build(CONFIG, "float32")
    drafter = kit.ScriptedDrafter(3, CONFIG)
    drafter.vocab_size = 64
    self.refuses(
      "drafter scripted has a vocabulary of 64 ids, target tiny-hybrid of 61",
      Engine,
      model,
      drafter=drafter,
    )
    for tap in (3, -1):
      drafter = kit.ScriptedDrafter(3, CONFIG)
      drafter.taps = (0, tap)
      self.refuses(
        f"drafter scripted taps layer {tap}, target tiny-hybrid has 3 layers",
        Engine,
        model,
        drafter=drafter,
      )

  def test_weights(self):
    params = target_lib.random_params(CONFIG, 0)
    for value in (np.nan, np.inf):
      bad = params | {"norm.weight": params["norm.weight"].copy()}
      bad["norm.weight"][3] = value
      self.refuses(
        "parameter 'norm.weight' holds NaN or infinity",
        target_lib.build,
        CONFIG,
        bad,
        "float32",
      )

  def test_logits_that_turn_nan(self):
    """Weights that overflow are said to, and leave the engine usable."""
    params = target_lib.random_params(CONFIG, 0)
    params["lm_head.weight"] = params["lm_head.weight"] * 1e38
    params["norm.weight"] = params["norm.weight"] + 100
    model = target_lib.build(CONFIG, params, "float32")
    engine = Engine(model, max_seq_len=32, prefill_chunk=8)
    for _ in range(2):
      self.refuses(
        "tiny-hybrid: logits turned NaN in float32", engine.generate, [1, 2]
      )
    self.refuses("tiny-hybrid: logits turned NaN", engine.score, [1, 2], [3])


class EvilDrafter:
  """Only proposes ids that the tokenizer does not have, or hides them."""

  name = "evil"
  num_slots = 3
  taps: tuple[int, ...] = ()
  vocab_size: int | None = 61
  variable_length = False
  params: Any = ()

  def init_context(self, capacity):
    del capacity
    return ()

  def extend(self, params, context, tokens, taps, start, count):
    del params, tokens, taps, start, count
    return context

  def draft(self, params, context, anchor, position):
    del params, context, anchor
    tokens = jnp.asarray([[50, 60], [7, 55], [-3, 8]], jnp.int32)
    # At odd positions the first slot has one id that exists.
    tokens = tokens.at[0, 1].set(jnp.where(position % 2 == 1, 9, 60))
    return Lattice(
      tokens=tokens,
      scores=jnp.asarray([[9.0, 0.0]] * 3),
      count=jnp.asarray(3, jnp.int32),
    )


class PaddedVocabularyTest(QuickTestCase):
  """Rows of the embedding beyond the tokenizer do not exist."""

  def with_drafts(self, acceptance):
    return Engine(
      kit.build(PADDED, "float32"),
      drafter=EvilDrafter(),
      system=SystemConfig(acceptance=acceptance),
      max_seq_len=256,
      prefill_chunk=8,
    )

  def test_hot_sampling_never_leaves_the_tokenizer(self):
    for engine in (
      kit.autoregressive(PADDED, "float32"),
      self.with_drafts("match"),
      self.with_drafts("rejection"),
    ):
      seen, drafted = set(), 0
      for seed in range(8):
        result = engine.generate(
          [1, 2, 3],
          SamplingParams(
            temperature=1e4, seed=seed, max_tokens=100, ignore_eos=True
          ),
        )
        seen |= set(result.token_ids)
        drafted += sum(result.metrics.drafted_per_step)
      # All that exist, and nothing else: 800 draws of 50 ids.
      self.assertEqual(seen, set(range(50)))
      if engine.drafter:
        self.assertGreater(drafted, 0)

  def test_greedy_and_scores(self):
    """The padded rows would win: they are the best rows of the head."""
    params = target_lib.random_params(PADDED, 0, 1.3)
    params["lm_head.weight"][50:] *= 50
    model = target_lib.build(PADDED, params, "float32")
    engine = Engine(model, max_seq_len=64, prefill_chunk=8)
    output = engine.generate([1, 2, 3], SamplingParams(max_tokens=30)).token_ids
    self.assertLess(max(output), 50)
    scores = engine.score([1, 2, 3], output)
    self.assertTrue(np.isfinite(scores.logprobs).all())
    np.testing.assert_array_equal(scores.gaps, 0)
    with self.assertRaisesRegex(SpecPilotError, "token id 50 at index 0"):
      engine.generate([50])
    with self.assertRaisesRegex(SpecPilotError, "output: token id 60"):
      engine.score([1], [60])


class CompilationTest(QuickTestCase):
  def test_a_second_request_compiles_nothing(self):
    """Prompt and output lengths, seeds and settings are not compiled in."""
    engine = Engine(
      kit.build(CONFIG, "float32"),
      drafter=PromptLookup(3),
      max_seq_len=64,
      prefill_chunk=8,
    )
    hot = SamplingParams(temperature=1.0, max_tokens=8)
    engine.warm_up()
    engine.warm_up(hot)
    before = engine.num_compilations
    for length in (1, 2, 9, 20):
      for seed in (0, 7):
        engine.generate([1] * length, SamplingParams(max_tokens=length))
        engine.generate(
          [2] * length,
          dataclasses.replace(
            hot, seed=seed, temperature=0.5 + seed, stop_token_ids=(3,)
          ),
        )
    self.assertEqual(engine.num_compilations, before)
