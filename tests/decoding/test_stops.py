"""Ends of a request: stop ids, stop strings, limits, loops, streams.

Every end is where one-token decoding has it, whatever a step emitted at once.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl.testing import parameterized
from flax import nnx
from tokenizers import decoders, models

from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding import stops
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.tokenizer import TOKENIZER_FILE, Tokenizer
from tests.decoding import kit

CONFIG = kit.hybrid()
PROMPT = [34, 41, 48, 36, 39, 40, 13, 27]
K = 5
LENGTH = 40
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


def byte_letters() -> dict[int, str]:
  """The character that byte-level BPE writes for each byte."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  table = {b: chr(b) for b in plain}
  others = (b for b in range(256) if b not in plain)
  table.update({b: chr(256 + n) for n, b in enumerate(others)})
  return table


def tokenizer_of(pieces: dict[int, bytes], size: int) -> Tokenizer:
  """A byte-level tokenizer whose id i stands for pieces[i], or for its name."""
  letters = byte_letters()
  vocab = {}
  for i in range(size):
    data = pieces.get(i, f" w{i}".encode())
    vocab["".join(letters[b] for b in data)] = i
  assert len(vocab) == size, "two ids stand for the same bytes"
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  backend.decoder = decoders.ByteLevel()
  return Tokenizer.from_files(
    {
      TOKENIZER_FILE: backend.to_str().encode(),
      "tokenizer_config.json": json.dumps({}).encode(),
    },
    "tiny",
  )


class StopsTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    self.plain = kit.autoregressive(CONFIG, "float64")
    self.fast = kit.speculative(CONFIG, "float64", K)
    self.output = self.plain.generate(PROMPT, GREEDY).token_ids
    self.load("oracle")

  def load(self, mode, **settings):
    self.fast.load(mode, [*PROMPT, *self.output], **settings)

  def with_tokenizer(self, pieces):
    """Both engines, fresh, with a tokenizer made to fit the output."""
    tokenizer = tokenizer_of(pieces, CONFIG.vocab_size)
    return [
      kit.sibling(engine, tokenizer=tokenizer, host_lag=lag)
      for engine, lag in ((self.plain, 0), (self.fast, 0), (self.fast, 1))
    ]

  def check_same(self, a, b):
    """Outputs alike but for measurements."""
    for field in ("prompt_ids", "token_ids", "text", "finish_reason",
                  "stop_reason"):  # fmt: skip
      self.assertEqual(getattr(a, field), getattr(b, field), field)

  def first(self, position):
    """The first place where the token at `position` stands."""
    return self.output.index(self.output[position])

  def unique_run(self, *, start, length):
    """The next place from `start` on with that many tokens seen once."""
    for at in range(start, LENGTH - length):
      run = self.output[at : at + length]
      if all(self.output.count(token) == 1 for token in run):
        return at
    raise AssertionError("the output repeats itself")

  @parameterized.parameters("oracle", "mixed", "tail_wrong")
  def test_stop_id_at_every_offset(self, mode):
    self.load(mode)
    offsets = set()
    for k in range(3 * (K + 1)):
      sampling = dataclasses.replace(GREEDY, stop_token_ids=(self.output[k],))
      reference = kit.referee(self.plain, PROMPT, sampling)
      at = self.first(k)
      offsets.add(at % (K + 1))
      self.assertEqual(reference.tokens, self.output[: at + 1])
      kit.compare(self.fast, reference)
      result = self.fast.generate(PROMPT, sampling)
      self.check_same(result, self.plain.generate(PROMPT, sampling))
      self.assertEqual(result.finish_reason, "stop")
      self.assertEqual(result.stop_reason, self.output[k])
    self.assertEqual(offsets, set(range(K + 1)))

  def test_max_tokens(self):
    for mode in ("oracle", "mixed"):
      self.load(mode)
      for limit in range(1, 18):
        sampling = dataclasses.replace(GREEDY, max_tokens=limit)
        kit.compare(self.fast, kit.referee(self.plain, PROMPT, sampling))
        result = self.fast.generate(PROMPT, sampling)
        self.assertEqual(result.token_ids, self.output[:limit])
        self.assertEqual(result.finish_reason, "length")
        self.assertIsNone(result.stop_reason)
        self.assertEqual(result.metrics.output_tokens, limit)

  def test_stop_and_limit_in_one_run(self):
    """The stop wins inside the limit; behind it the limit does."""
    at = self.unique_run(start=K + 2, length=1)
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(self.output[at],))
    for limit, reason, size in (
      (at, "length", at),
      (at + 1, "stop", at + 1),
      (at + 2, "stop", at + 1),
    ):
      limited = dataclasses.replace(sampling, max_tokens=limit)
      for engine in (self.plain, self.fast):
        result = engine.generate(PROMPT, limited)
        self.assertEqual(result.finish_reason, reason)
        self.assertEqual(result.token_ids, self.output[:size])

  def test_drafted_stop_that_the_target_refuses(self):
    never = next(i for i in range(61) if i not in self.output)
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(never,))
    self.load("mixed", wrong=never)
    result = self.fast.generate(PROMPT, sampling)
    self.assertEqual(result.token_ids, self.output)
    self.assertEqual(result.finish_reason, "length")

  def test_two_requests_on_one_engine(self):
    """The second, shorter one finds nothing of the first."""
    short = kit.prompts(5, 61, seed=9)[4]
    sampling = dataclasses.replace(GREEDY, max_tokens=9)
    reference = kit.referee(self.plain, short, sampling)
    for mode in ("oracle", "mixed"):
      self.load(mode)
      self.fast.generate([*PROMPT, *PROMPT, *PROMPT], GREEDY)
      for engine in (self.fast, kit.sibling(self.fast)):
        engine.load(mode, reference.sequence)
        kit.compare(engine, reference)
    # To the bit, a used engine is a fresh one.
    used, fresh = (
      [kit.snapshot(carry) for carry, _ in engine.steps(short, sampling)]
      for engine in (self.fast, kit.sibling(self.fast))
    )
    for a, b in zip(used, fresh, strict=True):
      self.assertEqual(max(kit.differences(a, b).values()), 0)

  def test_stop_string_across_two_runs(self):
    """It begins with the last token of one step and ends in the next."""
    at = 2 * K + 1  # last token of the second step
    while any(self.output.count(t) > 1 for t in self.output[at : at + 2]):
      at += K + 1
    a, b, *_ = self.output[at:]
    plain, *fast = self.with_tokenizer({a: b" left ST", b: b"OP right"})
    sampling = dataclasses.replace(GREEDY, stop=("no such text", "STOP"))
    expected = plain.generate(PROMPT, sampling)
    self.assertEqual(expected.finish_reason, "stop")
    self.assertEqual(expected.stop_reason, "STOP")
    self.assertEqual(expected.token_ids, self.output[: at + 2])
    self.assertTrue(str(expected.text).endswith(" left "), expected.text)
    for engine in fast:
      for mode in ("oracle", "mixed"):
        self.load(mode)
        self.check_same(engine.generate(PROMPT, sampling), expected)

  def test_stop_string_and_stop_id_in_one_run(self):
    """Whatever comes first in the text ends the request."""
    at = self.unique_run(start=K + 2, length=4)
    a, b, c, d = self.output[at : at + 4]
    pieces = {a: b" one", b: b" two", c: b" three", d: b" four"}
    for text, stop_id, reason, size in (
      ("two", c, "two", at + 2),
      ("three", b, b, at + 2),
      ("two", b, b, at + 2),  # the same token: the id is named
      ("two three", c, c, at + 3),
    ):
      sampling = dataclasses.replace(
        GREEDY, stop=(text,), stop_token_ids=(stop_id,)
      )
      plain, *fast = self.with_tokenizer(pieces)
      expected = plain.generate(PROMPT, sampling)
      self.assertEqual(expected.finish_reason, "stop")
      self.assertEqual(expected.stop_reason, reason)
      self.assertLen(expected.token_ids, size)
      # No part of a stop string is shown.
      self.assertNotIn(text, str(expected.text))
      for engine in fast:
        self.load("oracle")
        self.check_same(engine.generate(PROMPT, sampling), expected)

  def test_stop_string_and_limit(self):
    at = self.unique_run(start=K + 2, length=2)
    a, b = self.output[at : at + 2]
    pieces = {a: b" begin", b: b"END"}
    for limit, reason in ((at + 1, "length"), (at + 2, "stop")):
      sampling = dataclasses.replace(
        GREEDY, stop=("beginEND",), max_tokens=limit
      )
      plain, *fast = self.with_tokenizer(pieces)
      expected = plain.generate(PROMPT, sampling)
      self.assertEqual(expected.finish_reason, reason)
      # What was held back as a possible stop is text after all.
      self.assertEqual(
        str(expected.text).endswith(" begin"), reason == "length"
      )
      for engine in fast:
        self.check_same(engine.generate(PROMPT, sampling), expected)

  @parameterized.parameters("é".encode(), "€".encode(), "🦜".encode())
  def test_streams(self, letter):
    """Chunks join to the text and none ends inside a character."""
    size = len(letter)
    at = self.unique_run(start=K + 2 - size, length=size)
    pieces = {
      token: b"<" * (i == 0) + letter[i : i + 1] + b">" * (i == size - 1)
      for i, token in enumerate(self.output[at : at + size])
    }
    plain, *fast = self.with_tokenizer(pieces)
    expected = plain.generate(PROMPT, GREEDY)
    self.assertIn(f"<{letter.decode()}>", str(expected.text))
    self.assertNotIn("\ufffd", str(expected.text))
    for engine in (plain, *fast):
      chunks = list(engine.stream(PROMPT, GREEDY))
      text = ""
      for chunk in chunks:
        text += chunk.text
        self.assertTrue(str(expected.text).startswith(text))
        self.assertIs(chunk.output is not None, chunk is chunks[-1])
      self.assertEqual(text, expected.text)
      joined = tuple(t for chunk in chunks for t in chunk.token_ids)
      self.assertEqual(joined, self.output)
      self.check_same(chunks[-1].output, expected)

  def test_text_that_ends_inside_a_character(self):
    at = self.unique_run(start=K + 2, length=1)
    sampling = dataclasses.replace(GREEDY, max_tokens=at + 1)
    plain, *fast = self.with_tokenizer({self.output[at]: b"\xe2\x82"})
    expected = plain.generate(PROMPT, sampling)
    self.assertTrue(str(expected.text).endswith("\ufffd"))
    for engine in fast:
      self.check_same(engine.generate(PROMPT, sampling), expected)

  def test_closing_a_stream_early(self):
    for engine in (self.fast, kit.sibling(self.fast, host_lag=1)):
      stream = engine.stream(PROMPT, GREEDY)
      next(stream)
      # One request at a time, said plainly.
      with self.assertRaisesRegex(SpecPilotError, "one request at a time"):
        engine.generate(PROMPT, GREEDY)
      stream.close()
      self.assertEqual(engine.generate(PROMPT, GREEDY).token_ids, self.output)
      # Dropped without a word.
      next(engine.stream(PROMPT, GREEDY))
      self.assertEqual(engine.generate(PROMPT, GREEDY).token_ids, self.output)

  def test_host_lag(self):
    """Reading the device late changes no result, and compiles nothing."""
    late = kit.sibling(self.fast, host_lag=1)
    later = kit.sibling(self.plain, host_lag=3)
    for limit in (1, 2, K, K + 1, LENGTH):
      for stop in ((), (self.output[8],)):
        sampling = dataclasses.replace(
          GREEDY, max_tokens=limit, stop_token_ids=stop
        )
        expected = self.plain.generate(PROMPT, sampling)
        compiled = late.num_compilations
        for mode in ("oracle", "mixed"):
          self.load(mode)
          on_time = self.fast.generate(PROMPT, sampling)
          lagging = late.generate(PROMPT, sampling)
          self.check_same(lagging, expected)
          for field in ("emitted_per_step", "drafted_per_step",
                        "accepted_per_step", "cut_steps"):  # fmt: skip
            self.assertEqual(
              getattr(lagging.metrics, field), getattr(on_time.metrics, field)
            )
        self.check_same(later.generate(PROMPT, sampling), expected)
        self.assertEqual(late.num_compilations, compiled)

  def test_metrics_add_up(self):
    for mode in kit.MODES:
      self.load(mode)
      sampling = dataclasses.replace(GREEDY, stop_token_ids=(self.output[20],))
      result = self.fast.generate(PROMPT, sampling)
      m = result.metrics
      self.assertEqual(m.output_tokens, len(result.token_ids))
      self.assertEqual(m.num_steps, len(m.drafted_per_step))
      self.assertEqual(m.depth_per_step, m.drafted_per_step)  # of a chain
      lost = 0
      for emitted, drafted, accepted in zip(
        m.emitted_per_step,
        m.drafted_per_step,
        m.accepted_per_step,
        strict=True,
      ):
        self.assertLessEqual(accepted, drafted)
        self.assertBetween(emitted, 1, accepted + 1)
        lost += emitted < accepted + 1
      self.assertEqual(m.cut_steps, lost)


class EndsTest(kit.Float64TestCase):
  """Ends that need a model of their own: its EOS, its context, its loops."""

  CONTEXT = 40

  def engines(self, config, **settings):
    return (
      kit.autoregressive(config, "float64", **settings),
      kit.speculative(config, "float64", K, **settings),
    )

  def test_context_limit_and_eos_of_the_model(self):
    long = kit.autoregressive(CONFIG, "float64")
    text = kit.prompts(6, 61)[5] + kit.prompts(6, 61)[3]
    plain, fast = self.engines(CONFIG, max_seq_len=self.CONTEXT)
    sampling = dataclasses.replace(GREEDY, max_tokens=1000)
    for room in (1, 2, 3, K, K + 1, K + 2, 20):
      prompt = text[: self.CONTEXT - room]
      output = long.generate(
        prompt, dataclasses.replace(GREEDY, max_tokens=room)
      )
      for mode in ("oracle", "mixed", "always_wrong"):
        fast.load(mode, [*prompt, *output.token_ids])
        for engine in (plain, fast):
          result = engine.generate(prompt, sampling)
          self.assertEqual(result.token_ids, output.token_ids)
          self.assertLen(result.token_ids, room)
          self.assertEqual(result.finish_reason, "length")
        kit.compare(fast, kit.referee(plain, prompt, sampling))
    for engine in (plain, fast):
      for size in (self.CONTEXT, self.CONTEXT + 1):
        with self.assertRaisesRegex(SpecPilotError, f"prompt of {size} tokens"):
          engine.generate(text[:size], sampling)
    # Scoring has the same limit.
    with self.assertRaisesRegex(SpecPilotError, "do not fit a context of 40"):
      plain.score(text[:20], text[:21])
    # The EOS of the model ends the request, unless it is told to go on.
    prompt = text[:8]
    output = long.generate(prompt, GREEDY).token_ids
    eos = output[K + 3]
    at = output.index(eos)
    for engine in (plain, fast):
      fast.load("oracle", [*prompt, *output])
      engine.config = dataclasses.replace(CONFIG, eos_token_ids=(eos,))
      try:
        result = engine.generate(prompt, SamplingParams(max_tokens=20))
        self.assertEqual(result.token_ids, output[: at + 1])
        self.assertEqual(result.stop_reason, eos)
        going_on = SamplingParams(max_tokens=20, ignore_eos=True)
        self.assertEqual(
          engine.generate(prompt, going_on).token_ids, output[:20]
        )
      finally:
        engine.config = CONFIG

  def test_loops(self):
    """A model that goes round in a circle ends with reason `loop`."""
    params = {
      # Nothing but the last token matters: the output must come to a circle.
      name: np.zeros_like(p) if name.endswith(("out_proj.weight", "down.weight",
                                               "o_proj.weight")) else p
      for name, p in target_lib.random_params(CONFIG, 5, 1.3).items()
    }  # fmt: skip
    model = target_lib.build(CONFIG, params, "float64")
    _, state = nnx.split(model)
    plain = kit.sibling(kit.autoregressive(CONFIG, "float64"))
    fast = kit.sibling(kit.speculative(CONFIG, "float64", K))
    late = kit.sibling(kit.speculative(CONFIG, "float64", K), host_lag=1)
    for engine in (plain, fast, late):
      engine._params = step_lib.Params.of(state, engine._params[1])
    looping = SamplingParams(max_tokens=200)
    expected = plain.generate(PROMPT, looping)
    self.assertEqual(expected.finish_reason, "loop")
    self.assertLess(len(expected.token_ids), 150)
    for sampling in (
      dataclasses.replace(looping, ignore_eos=True),
      dataclasses.replace(looping, loop_detection=False),
    ):
      result = plain.generate(PROMPT, sampling)
      self.assertEqual(result.finish_reason, "length")
      self.assertLen(result.token_ids, 200)
      self.assertEqual(
        result.token_ids[: len(expected.token_ids)], expected.token_ids
      )
    for engine in (fast, late):
      for mode in ("oracle", "mixed", "tail_wrong"):
        engine.load(mode, [*PROMPT, *result.token_ids])
        found = engine.generate(PROMPT, looping)
        self.assertEqual(found.token_ids, expected.token_ids)
        self.assertEqual(found.finish_reason, "loop")


class CountingDrafter:
  """Offers nothing; its empty context is not zero."""

  name = "counting"
  num_slots = 2
  taps: tuple[int, ...] = ()
  vocab_size: int | None = None
  variable_length = False
  params: Any = ()

  def __init__(self):
    self.capacities = set()

  def init_context(self, capacity):
    self.capacities.add(capacity)
    return jnp.full((), 1000, jnp.int32)

  def extend(self, params, context, tokens, taps, start, count):
    del params, tokens, taps, start
    return context + count

  def draft(self, params, context, anchor, position):
    del params, context, anchor, position
    return Lattice(
      tokens=jnp.zeros((2, 1), jnp.int32),
      scores=jnp.zeros((2, 1)),
      count=jnp.zeros((), jnp.int32),
    )


class ResetTest(parameterized.TestCase):
  def test_each_request_begins_with_an_empty_context(self):
    drafter = CountingDrafter()
    engine = Engine(
      kit.build(CONFIG, "float32"),
      drafter=drafter,
      max_seq_len=32,
      prefill_chunk=4,
    )
    for _ in range(2):
      contexts = [
        int(carry.drafter)
        for carry, _ in engine.steps(PROMPT, SamplingParams(max_tokens=3))
      ]
      # The anchor is not part of it.
      start = 1000 + len(PROMPT)
      self.assertEqual(contexts, [start, start + 1, start + 2])
    # Always of one size: prompt and output, and the rows of one more pass.
    self.assertEqual(drafter.capacities, {32 + 4})


class HostPiecesTest(parameterized.TestCase):
  def test_loop_detector(self):
    """Against a look at the whole output after each token."""

    def loops(tokens):
      n = len(tokens)
      for period in range(1, stops.LOOP_MAX_PERIOD + 1):
        size = max(stops.LOOP_MIN_TOKENS, stops.LOOP_MIN_REPEATS * period)
        tail = tokens[n - size :]
        if n >= size and tail[period:] == tail[:-period]:
          return True
      return False

    rng = np.random.default_rng(0)
    for period in (1, 2, 7, 16, 17, 100, 128, 129):
      unit = rng.integers(0, 50, period).tolist()
      text = rng.integers(0, 50, 9).tolist() + unit * (600 // period + 1)
      detector, ended = stops.LoopDetector(), None
      for i, token in enumerate(text):
        found = detector.push(token)
        self.assertEqual(found, loops(text[: i + 1]), (period, i))
        if found:
          ended = i
          break
      self.assertEqual(ended is not None, period <= 128)

  def test_stop_strings(self):
    """Whatever the pieces, what is shown is the text before the first stop."""
    rng = np.random.default_rng(1)
    ended = 0
    for _ in range(300):
      text = "".join(rng.choice(list("ab"), 14))
      found = tuple(
        "".join(rng.choice(list("ab"), rng.integers(1, 5))) + "b"
        for _ in range(2)
      )
      watch, shown, at = stops.StopStrings(found), "", 0
      while at < len(text) and watch.found is None:
        piece = text[at : at + int(rng.integers(0, 4))]
        at += len(piece)
        shown += watch.push(piece)
        hits = [text[:at].find(s) for s in found if s in text[:at]]
        if hits:
          self.assertEqual(shown, text[: min(hits)])
          self.assertIsNotNone(watch.found)
        else:
          self.assertIsNone(watch.found)
          self.assertTrue(text.startswith(shown))
      if watch.found is None:
        self.assertEqual(shown + watch.flush(), text)
      ended += watch.found is not None
    self.assertBetween(ended, 50, 299)

  def test_x64_is_off_here(self):
    """The other tests leave the process as users have it."""
    self.assertFalse(jax.config.read("jax_enable_x64"))
    self.assertFalse(jax.config.read("jax_disable_most_optimizations"))
