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

OPENINGS = ("from typing import List\n\n\ndef", "import math\n\n\ndef")
SIGNATURE_TOKENS = 32
DOCSTRING_TOKENS = 96

_SIGNATURE = re.compile(r" \w+\([^\n]*\)[^\n]*:\n")
_QUOTES = '"""'

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
  found: dict[str, None] = {}
  for row in _said(target, [prompt] * count, QUESTION_TOKENS, seed):
    ends = np.flatnonzero(np.isin(row, tokenizer.eos_token_ids))
    if ends.size:
      text = tokenizer.decode(row[: ends[0]].tolist()).strip()
      if text and allowed(text):
        found[text] = None
  return list(found)


def own_heads(
  target: Target,
  tokenizer: Tokenizer,
  count: int,
  seed: int,
  allowed: Callable[[str], bool],
) -> list[str]:
  """Function heads that the target itself writes: signature, then docstring.

  Every other one is left without the import that it began with. Heads that are
  not complete within the limits, repeat another or are not `allowed` are left
  out.
  """

  def continued(beginnings, new_tokens, seed):
    prompts = [tokenizer.encode(text) for text in beginnings]
    rows = _said(target, prompts, new_tokens, seed)
    return [tokenizer.decode(row.tolist()) for row in rows]

  openings = [OPENINGS[i % len(OPENINGS)] for i in range(count)]
  signed = []
  for opening, text in zip(
    openings, continued(openings, SIGNATURE_TOKENS, seed), strict=True
  ):
    if match := _SIGNATURE.match(text):
      signed.append(f"{opening}{match.group(0)}    {_QUOTES}")
  if not signed:
    return []
  # As many as before, so that one executable serves every call.
  signed = [signed[i % len(signed)] for i in range(count)]
  found: dict[str, None] = {}
  for i, (head, text) in enumerate(
    zip(signed, continued(signed, DOCSTRING_TOKENS, seed + 1), strict=True)
  ):
    docstring, quotes, _ = text.partition(_QUOTES)
    if quotes and docstring.strip():
      head = f"{head}{docstring}{_QUOTES}\n"
      if i % 2:
        head = head[head.index("def ") :]
      if allowed(head):
        found[head] = None
  return list(found)


def _said(target, prompts, new_tokens, seed) -> list[np.ndarray]:
  """What the target says after each prompt at temperature 1."""
  rows = self_text.generate(
    target, prompts, new_tokens, np.ones(len(prompts)), seed
  )
  return [
    row[len(prompt) : len(prompt) + new_tokens]
    for row, prompt in zip(rows, prompts, strict=True)
  ]


def answers_wanted(
  heads: Sequence[str],
  own: Sequence[str],
  questions: Sequence[str],
  tokenizer: Tokenizer,
  count: int,
  longest: int,
  seed: Sequence[int],
) -> list[list[int]]:
  """`count` prompts, of eight: three own heads, two of the corpus, one of them
  worded as a task, two questions.

  Args:
    heads: function heads of the corpus.
    own: function heads that the target wrote.
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

  def bare(head):
    return head

  def chat(text):
    return tokenizer.chat([{"role": "user", "content": text}])

  written = stream(own, bare)
  taken = stream(heads, bare)
  asked = stream(questions, chat)
  tasks = stream(heads, lambda head: chat(SOLVE.format(prompt=head)))
  kinds = (written, taken, asked, written, tasks, taken, asked, written)
  prompts = []
  for i in range(count):
    ids = next(kinds[i % len(kinds)], None)
    if ids is None:
      raise ValueError(f"too few prompts of at most {longest} ids: {i}")
    prompts.append(ids)
  return prompts
