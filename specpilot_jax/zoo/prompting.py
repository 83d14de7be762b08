"""Prompts that a target answers to make training text for its drafter."""

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specpilot_jax.models.target import Target
from specpilot_jax.tokenizer import Tokenizer
from specpilot_jax.zoo import self_text

SOLVE = (
  "Write a solution to the following problem and make sure that it passes "
  "the tests:\n```python\n{prompt}\n```"
)
"""How evaluations of released drafters word a function head (HumanEval)."""

QUESTION_TOKENS = 64

_HEAD = re.compile(
  r'^def \w+\((?:[^()"]|\([^()"]*\))*\)[^:"\n]*:\n'
  r'( +)"""[^"\\]{40,1200}"""\n',
  re.MULTILINE,
)


def function_heads(texts: Iterable[str]) -> list[str]:
  """Signatures with docstrings of top-level functions, each once."""
  heads = {match.group(0): None for t in texts for match in _HEAD.finditer(t)}
  return list(heads)


def windows(
  stream: np.ndarray, length: int, count: int, seed: Sequence[int]
) -> np.ndarray:
  """`count` random windows of `length` tokens, int32."""
  rng = np.random.default_rng(seed)
  starts = rng.integers(0, stream.size - length, count)
  return np.stack([stream[s : s + length] for s in starts]).astype(np.int32)


def questions(
  target: Target,
  tokenizer: Tokenizer,
  count: int,
  seed: int,
  allowed: Callable[[str], bool],
) -> list[str]:
  """What the target itself says as a user of its own chat template.

  (Magpie, arXiv 2406.08464.) Turns that do not end within `QUESTION_TOKENS`,
  repeat another or are not `allowed` are left out, so fewer than `count` come
  back.
  """
  marker = "\x00"
  opening = tokenizer.chat([{"role": "user", "content": marker}])
  prompt = tokenizer.encode(opening[: opening.index(marker)])
  rows = self_text.generate(
    target, [prompt] * count, QUESTION_TOKENS, np.ones(count), seed
  )[:, len(prompt) :]
  found: dict[str, None] = {}
  for row in rows:
    ends = np.flatnonzero(np.isin(row, tokenizer.eos_token_ids))
    if ends.size:
      text = tokenizer.decode(row[: ends[0]].tolist()).strip()
      if text and allowed(text):
        found[text] = None
  return list(found)


def answers_wanted(
  heads: Sequence[str],
  questions: Sequence[str],
  tokenizer: Tokenizer,
  count: int,
  longest: int,
  seed: Sequence[int],
) -> list[list[int]]:
  """`count` prompts: half bare heads, a quarter worded heads, a quarter chat.

  Args:
    heads: function heads.
    questions: user turns.
    longest: ids in a prompt at most; longer ones are passed over.

  Raises:
    ValueError: too few of them are short enough.
  """
  rng = np.random.default_rng(seed)

  def stream(texts, render):
    for i in rng.permutation(len(texts)):
      ids = tokenizer.encode(render(texts[i]))
      if 2 <= len(ids) <= longest:
        yield ids

  def chat(text):
    return tokenizer.chat([{"role": "user", "content": text}])

  bare = stream(heads, lambda head: head)
  kinds = (
    bare,
    stream(heads, lambda head: chat(SOLVE.format(prompt=head))),
    bare,
    stream(questions, chat),
  )
  prompts = []
  for i in range(count):
    ids = next(kinds[i % len(kinds)], None)
    if ids is None:
      raise ValueError(f"too few prompts of at most {longest} ids: {i}")
    prompts.append(ids)
  return prompts
