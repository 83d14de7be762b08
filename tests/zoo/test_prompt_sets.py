"""Prompt sets made of held-out files."""

import gzip
import json
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest

from specpilot_jax.checkpoints import load_checkpoint
from specpilot_jax.zoo import data, store

LICENCES = {"a": "MIT", "b": "BSD", "c": "ISC", "unlisted": None}


class Words:
  """A stand-in for a `tokenizers.Tokenizer`: lines of one-letter tokens."""

  def encode(self, text):
    class Encoding:
      ids = [ord(c) for c in text]

    return Encoding

  def decode(self, ids):
    return "".join(map(chr, ids))


def document(source, lines, seed):
  rng = np.random.default_rng(seed)
  rows = [
    "".join(map(chr, rng.integers(97, 123, rng.integers(1, 60)))) + "\n"
    for _ in range(lines)
  ]
  return {"source": source, "text": "".join(rows)}


HELD_OUT = [
  document(f"{name}/{i}{suffix}", lines, [i, ord(name), ord(suffix[1])])
  for name, lines in (("a", 400), ("b", 60), ("c", 10), ("d", 400))
  for suffix in (".py", ".md", ".rst")
  for i in range(12)
]


class PromptSetsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.path = pathlib.Path(scratch.name) / store.PROMPTS.name
    self.long = self.path.with_name(store.LONG_PROMPTS.name)

  def write(self, held_out=HELD_OUT, **kwargs):
    licences = {n: name for n, name in LICENCES.items() if name}
    store.write_prompts(self.path, held_out, licences, Words(), **kwargs)
    return [
      [json.loads(line) for line in text.splitlines()]
      for text in (
        self.path.read_bytes(),
        gzip.decompress(self.long.read_bytes()),
      )
    ]

  def assert_from_its_file(self, prompt):
    source, _, line = prompt["source"].rpartition(":")
    texts = {d["source"]: d["text"] for d in HELD_OUT}
    lines = texts[source].splitlines(keepends=True)
    self.assertStartsWith("".join(lines[int(line) - 1 :]), prompt["text"])
    self.assertEqual(prompt["licence"], LICENCES[source[0]])

  def test_both_sets(self):
    short, long = self.write(count=16)
    self.assertBetween(len(short), 10, 16)
    for prompt in short:
      self.assertEqual(set(prompt), {"source", "licence", "text"})
      self.assertLen(prompt["text"], 200)
      self.assertIn(".py:", prompt["source"])
      self.assert_from_its_file(prompt)
    self.assertLen(long, 4 * store.LONG_PER_HALF)
    domains = [prompt["domain"] for prompt in long]
    self.assertEqual(domains, list(data.DOMAINS) * (len(long) // 2))
    lengths = [len(prompt["text"]) for prompt in long]
    self.assertGreater(min(lengths), 511)
    self.assertLess(max(lengths), 1025)
    self.assertGreater(max(lengths) - min(lengths), 200)
    for prompt in long:
      source = prompt["source"].rpartition(":")[0]
      self.assertEqual(prompt["domain"], data.domain_of(source))
      self.assert_from_its_file(prompt)

  def test_no_file_is_in_both_halves_and_no_text_twice(self):
    _, long = self.write()
    files = [p["source"].rpartition(":")[0] for p in long]
    half = len(long) // 2
    self.assertEmpty(set(files[:half]) & set(files[half:]))
    self.assertLen({p["text"] for p in long}, len(long))
    texts = {d["source"]: d["text"] for d in HELD_OUT}
    for file in set(files):
      own = [p["text"] for p, f in zip(long, files, strict=True) if f == file]
      spans = sorted((texts[file].index(t), len(t)) for t in own)
      for (start, size), (after, _) in zip(spans, spans[1:], strict=False):
        self.assertLessEqual(start + size, after)

  def test_every_distribution_has_its_turn(self):
    _, long = self.write()
    names = [p["source"][0] for p in long]
    # The short files of c hold no prompt; d declares no licence.
    self.assertEqual(set(names), {"a", "b"})
    self.assertGreater(names.count("b"), len(long) // 4)

  def test_the_same_files_give_the_same_prompts(self):
    self.assertEqual(self.write(), self.write())

  def test_few_files_give_few_prompts(self):
    short, long = self.write(HELD_OUT[:3])
    self.assertLessEqual(len(short), 3)
    self.assertEmpty(long)

  def test_the_zoo_tokenizer(self):
    zoo = load_checkpoint("zoo")
    assert zoo.tokenizer is not None
    with gzip.open(store.LONG_PROMPTS) as file:
      prompts = [json.loads(line) for line in file]
    for prompt in prompts[:8]:
      ids = zoo.tokenizer.encode(prompt["text"])
      self.assertBetween(len(ids), *store.LONG_LENGTHS)
      self.assertEqual(zoo.tokenizer.decode(ids), prompt["text"])


if __name__ == "__main__":
  absltest.main()
