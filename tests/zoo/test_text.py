"""Training text of drafters: prompts, rows, batches, and training on them."""

import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from flax import nnx

from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.zoo import (
  drafter_stages,
  drafter_training,
  prompting,
  recipes,
  self_text,
  training,
)
from specpilot_jax.zoo.text import Rows, Shelf, chosen_rows
from tests.decoding import kit
from tests.notes import in_full_form
from tests.zoo.test_training import CONFIG, drafter_config

RECIPE = recipes.DrafterRecipe(
  target="zoo",
  config=drafter_config(CONFIG),
  schedule=recipes.Schedule(
    phases=(recipes.Phase(steps=40, length=64, sequences=4),),
    peak=1e-2,
    warmup=4,
    muon=True,
  ),
  anchors=4,
  gamma=4.0,
  reach=0.5,
  soft=True,
  variation=0.5,
  temperatures=(0.0, 1.0),
  rounds=2,
  rows=6,
  prompt_tokens=16,
  visits=5,
  surprise=0.0,
)


class HeadsTest(absltest.TestCase):
  def test_top_level_functions_with_docstrings(self):
    text = (
      "import os\n\n"
      "def plain(x: int = 3) -> list[int]:\n"
      '    """Returns x as often as the caller wants to have it."""\n'
      "    return [x]\n\n"
      "def no_docstring(x):\n"
      "    return x\n\n"
      "class A:\n"
      "    def method(self):\n"
      '        """Methods are not heads, however long they explain."""\n'
      "def short():\n"
      '    """Too short."""\n'
    )
    heads = prompting.function_heads([text, text])
    self.assertEqual(
      heads,
      [
        "def plain(x: int = 3) -> list[int]:\n"
        '    """Returns x as often as the caller wants to have it."""\n'
      ],
    )


class FakeTokenizer:
  """A character an id; the chat template is a pair of brackets."""

  eos_token_ids = (0,)

  def encode(self, text):
    return [ord(c) % 60 + 2 for c in text]

  def decode(self, ids):
    return "".join(chr(i) for i in ids)

  def chat(self, messages, add_generation_prompt=True):
    del add_generation_prompt
    return "[" + messages[0]["content"] + "]"


class PlainTokenizer(FakeTokenizer):
  def encode(self, text):
    return [ord(c) for c in text]


class PromptsTest(absltest.TestCase):
  def test_kinds_and_lengths(self):
    tokenizer: Any = FakeTokenizer()
    heads = ["h" * n for n in range(2, 30)]
    own = ["o" * n for n in range(2, 30)]
    questions = ["q" * n for n in range(2, 30)]

    def wanted(longest):
      return prompting.answers_wanted(
        heads, own, questions, tokenizer, 8, longest, [0]
      )

    prompts = wanted(120)
    self.assertLen(prompts, 8)
    encode = tokenizer.encode
    for kind, places in (("o", (0, 3, 7)), ("h", (1, 5))):
      for i in places:
        self.assertEqual(set(prompts[i]), set(encode(kind)))
      self.assertLen({tuple(prompts[i]) for i in places}, len(places))
    opening = encode("[" + prompting.SOLVE[:20])
    self.assertEqual(prompts[4][: len(opening)], opening)
    for i in (2, 6):
      self.assertEqual(prompts[i][:2], encode("[q"))
    with self.assertRaisesRegex(ValueError, "too few prompts"):
      wanted(40)

  def test_questions_end_and_are_allowed(self):
    said = np.asarray(
      [[97, 98, 0, 99], [100, 101, 102, 103], [97, 98, 0, 5], [120, 0, 0, 0]]
    )

    def generate(target, prompts, new_tokens, temperatures, seed):
      return np.concatenate([np.asarray(prompts), said], axis=1)

    tokenizer: Any = FakeTokenizer()
    unused: Any = None
    with mock.patch.object(self_text, "generate", generate):
      found = prompting.questions(
        unused, tokenizer, 4, 0, lambda text: text != "x"
      )
    self.assertEqual(found, ["ab"])

  def test_own_heads_are_whole_and_allowed(self):
    signatures = [" f(x):\n  return", " g(x) -> int:\n", " broken(", " h():\n"]
    docstrings = ["A.", 'B.""" and', 'C."""', "never closed"]
    calls = []

    def generate(target, prompts, new_tokens, temperatures, seed):
      calls.append([tokenizer.decode(p) for p in prompts])
      texts = signatures if len(calls) == 1 else docstrings
      width = max(map(len, prompts)) + new_tokens
      rows = np.zeros((len(prompts), width), np.int64)
      for row, prompt, text in zip(rows, prompts, texts, strict=True):
        said = (text + " " * new_tokens)[:new_tokens]
        row[: len(prompt) + new_tokens] = [*prompt, *map(ord, said)]
      return rows

    tokenizer: Any = PlainTokenizer()
    unused: Any = None

    def heads(allowed):
      calls.clear()
      with mock.patch.object(self_text, "generate", generate):
        return prompting.own_heads(unused, tokenizer, 4, 0, allowed)

    first, second = prompting.OPENINGS
    found = heads(lambda text: True)
    # Three signatures, the first of them again; two docstrings that end.
    self.assertEqual(
      calls[1],
      [
        first + ' f(x):\n    """',
        second + ' g(x) -> int:\n    """',
        second + ' h():\n    """',
        first + ' f(x):\n    """',
      ],
    )
    self.assertEqual(
      found,
      [
        'def g(x) -> int:\n    """B."""\n',
        second + ' h():\n    """C."""\n',
      ],
    )
    self.assertEqual(heads(lambda text: "B." not in text), found[1:])


class RowsTest(kit.Float64TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.work = pathlib.Path(scratch.name)
    self.target = kit.build(CONFIG, "float32")

  def prompts(self, i):
    rng = np.random.default_rng(i)
    return [rng.integers(0, 60, n).tolist() for n in (16, 9, 4, 16, 2, 7)]

  def write(self, recipe=RECIPE, deadline=None):
    return drafter_stages.write_text(
      recipe, self.target, self.prompts, self.work / "text", (), deadline
    )

  def test_ends(self):
    tokens = np.random.default_rng(0).integers(10, 4000, (3, 400))
    tokens[0, 50] = 7  # a stop id inside the output
    tokens[1, 5] = 7  # and one in a prompt
    tokens[2, 150:] = 9  # a loop
    rows = drafter_stages.rows_of(
      tokens,
      np.asarray([20, 20, 30]),
      360,
      np.asarray([True, False, False]),
      stop_ids=(7,),
    )
    self.assertEqual(rows.ends.tolist(), [51, 380, 151])
    self.assertEqual(rows.anchors.tolist(), [31, 360, 121])

  def test_files_are_written_once_and_read_back(self):
    past = time.monotonic() - 1
    self.assertFalse(self.write(deadline=past))
    self.assertTrue(self.write())
    files = sorted((self.work / "text").iterdir())
    self.assertEqual([f.name for f in files], ["000.npz", "001.npz"])
    before = files[0].read_bytes()
    self.assertTrue(self.write())
    self.assertEqual(files[0].read_bytes(), before)
    rows = Rows.load(files[0])
    self.assertEqual(rows.tokens.shape, (6, 64))
    self.assertEqual(rows.starts.tolist(), [16, 9, 4, 16, 2, 7])
    self.assertEqual(rows.sampled.tolist(), [False, True] * 3)
    for row, prompt in zip(rows.tokens, self.prompts(0), strict=True):
      self.assertEqual(row[: len(prompt)].tolist(), prompt)

  def test_rounds_are_sampled_with_noise_of_their_own(self):
    with mock.patch.object(self, "prompts", lambda _, own=self.prompts: own(0)):
      self.write()
    first, second = (
      Rows.load(self.work / "text" / f"{i:03}.npz").tokens for i in range(2)
    )
    np.testing.assert_array_equal(first[::2], second[::2])  # greedy
    self.assertFalse((first[1::2] == second[1::2]).all())

  def shelf(self, surprise=0.0, anchors=3):
    return Shelf(
      sorted((self.work / "text").glob("???.npz")),
      self.target,
      RECIPE.config.target_layers,
      rows=4,
      anchors=anchors,
      visits=5,
      surprise=surprise,
      seed=5,
    )

  def test_batches_depend_on_the_step_alone(self):
    self.write()
    shelf = self.shelf()
    seen = [shelf.at(step) for step in range(12)]
    self.assertIs(seen[0][0], seen[4][0])
    self.assertIsNot(seen[4][0], seen[5][0])
    for step in (11, 3):
      text, rows, anchors = self.shelf().at(step)
      np.testing.assert_array_equal(text.features, seen[step][0].features)
      np.testing.assert_array_equal(rows, seen[step][1])
      np.testing.assert_array_equal(anchors, seen[step][2])

  def test_anchors_have_a_label_and_features_are_the_targets(self):
    self.write()
    text, rows, anchors = self.shelf().at(0)
    starts, ends = np.asarray([16, 9, 4, 16, 2, 7]), np.asarray(text.ends)
    self.assertTrue((anchors >= starts[rows, None] - 1).all())
    self.assertTrue((anchors < ends[rows, None] - 1).all())
    hidden, taps = training.hidden_states(
      self.target, text.tokens[2], RECIPE.config.target_layers
    )
    np.testing.assert_allclose(text.features[2], taps, atol=1e-4)
    np.testing.assert_allclose(text.hidden[2], hidden, atol=1e-4)

  def test_surprising_tokens_are_anchors_more_often(self):
    self.write()
    for surprise in (0.0, 8.0):
      text, rows, anchors = self.shelf(surprise, anchors=20_000).at(0)
      row = int(rows[0])
      logits = self.target.logits(text.hidden[row])
      law = jax.nn.softmax(logits, axis=-1)
      said = np.take_along_axis(
        np.asarray(law)[:-1], np.asarray(text.tokens[row])[1:, None], axis=1
      )[:, 0]
      first, last = anchors[0].min(), anchors[0].max()
      weights = 1 + surprise * (1 - said[first - 1 : last])
      counts = np.bincount(anchors[0], minlength=64)[first : last + 1]
      expected = weights / weights.sum() * counts.sum()
      self.assertLess(np.abs(counts - expected).max(), 5 * counts.max() ** 0.5)

  def test_logits_in_parts_give_the_same_loss(self):
    self.write()
    text, rows, chosen = self.shelf().at(0)
    anchors = jnp.asarray(chosen)
    model = DFlash(RECIPE.config, jnp.float32, nnx.Rngs(0))
    embedding = self.target.embed.weight[...]

    def value():
      return drafter_training.loss(
        model, embedding, embedding, chosen_rows(text, rows), anchors, RECIPE
      )[0]

    whole = value()
    with mock.patch.object(drafter_training, "LOGITS", 3 * 4 * 64):
      np.testing.assert_allclose(value(), whole, rtol=1e-6)

  @in_full_form
  def test_training_learns_and_goes_on_where_it_stopped(self):
    self.write()
    past = time.monotonic() - 1
    recipe = dataclasses.replace(
      RECIPE,
      schedule=dataclasses.replace(
        RECIPE.schedule,
        phases=(recipes.Phase(steps=60, length=64, sequences=4),),
      ),
    )
    self.assertFalse(drafter_stages.train(recipe, self.target, self.work, past))
    self.assertFalse((self.work / "dflash").exists())
    self.assertTrue(drafter_stages.train(recipe, self.target, self.work, None))
    parts = drafter_io.load(self.work / "dflash", "float32")
    other = self.work / "other"
    other.mkdir()
    (other / "text").symlink_to(self.work / "text")
    self.assertTrue(drafter_stages.train(recipe, self.target, other, None))
    lines = (other / "dflash_training" / "loss.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["loss"] for line in (lines[0], lines[-1]))
    self.assertLess(last, 0.5 * first)
    whole = drafter_io.load(other / "dflash", "float32")
    for a, b in zip(
      jax.tree.leaves(nnx.split(parts)[1]),
      jax.tree.leaves(nnx.split(whole)[1]),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
  absltest.main()
