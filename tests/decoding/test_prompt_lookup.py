"""Prompt lookup against a search written out."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.errors import SpecPilotError


def search(tokens, slots, max_ngram, min_ngram) -> list[int]:
  """Longest n-gram first, then the latest place; copies go on periodically."""
  for n in range(max_ngram, min_ngram - 1, -1):
    if n > len(tokens):
      continue
    pattern = tokens[len(tokens) - n :]
    for end in range(len(tokens) - 1, n - 1, -1):
      if tokens[end - n : end] == pattern:
        copied = tokens[end:]
        return [copied[i % len(copied)] for i in range(slots)]
  return []


class PromptLookupTest(parameterized.TestCase):
  @parameterized.parameters((4, 2), (3, 1), (1, 1), (2, 2))
  def test_random_texts(self, max_ngram, min_ngram):
    drafter = PromptLookup(6, max_ngram=max_ngram, min_ngram=min_ngram)
    draft = jax.jit(drafter.draft)
    extend = jax.jit(drafter.extend)
    rng = np.random.default_rng(max_ngram)
    hits = 0
    for trial in range(60):
      size = int(rng.integers(1, 24))
      text = rng.integers(0, 2 + trial % 4, size).tolist()
      context = drafter.init_context(32)
      # Committed in runs, the last token being the anchor. What a run holds
      # behind its count was refused.
      at = 0
      while at < size - 1:
        count = min(int(rng.integers(1, 6)), size - 1 - at)
        run = rng.integers(0, 6, 6)
        run[:count] = text[at : at + count]
        context = extend(
          (), context, jnp.asarray(run, jnp.int32), jnp.zeros((6, 0, 1)),
          jnp.int32(at), jnp.int32(count),
        )  # fmt: skip
        at += count
      self.assertEqual(context.tokens[: size - 1].tolist(), text[:-1])
      lattice = draft((), context, jnp.int32(text[-1]), jnp.int32(size - 1))
      found = lattice.tokens[: int(lattice.count), 0].tolist()
      self.assertEqual(
        found, search(text, 6, max_ngram, min_ngram), f"text {text}"
      )
      hits += bool(found)
    self.assertGreater(hits, 10)
    self.assertLess(hits, 60)

  def test_settings(self):
    for settings in (
      dict(num_slots=0),
      dict(max_ngram=2, min_ngram=3),
      dict(min_ngram=0),
    ):
      with self.assertRaisesRegex(SpecPilotError, "^prompt_lookup: [^\n]+$"):
        PromptLookup(**settings)
