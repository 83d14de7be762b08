"""Prompt sets: zoo-128, zoo-512, HumanEval-164, MT-Bench-80, GSM8K-100, files.

zoo-128 and zoo-512 ship with the package: text from files that the zoo was not
trained on, to be continued. zoo-128 is Python, 200 tokens each; zoo-512 has
Python and documentation in turn, 512 to 1,024 tokens each. The other sets are
fetched: `python -m experiments.fetch NAME`. The wording around each problem is
the one that the evaluations of the released DFlash and DSpark drafters use, so
that acceptance lengths compare.

Each set is cut in two. What is tuned on, searched with or looked at belongs
to the `dev` half; the `sealed` half serves the final test alone.

Benchmarks answer one turn, the first: MT-Bench's second question, which takes
the model's own reply into its prompt, is read but not asked.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.zoo import data, store

SPLITS = ("dev", "sealed", "all")

_HUMANEVAL = (
  "Write a solution to the following problem and make sure that it passes "
  "the tests:\n```python\n{prompt}\n```"
)
_GSM8K = (
  "{prompt}\nPlease reason step by step, and put your final answer within "
  "\\boxed{{}}."
)


class ChatTokenizer(Protocol):
  """The part of `specpilot_jax.tokenizer.Tokenizer` that prompts need."""

  def encode(
    self, text: str, *, add_special_tokens: bool = True
  ) -> list[int]: ...

  def chat(
    self, messages: list[dict[str, str]], add_generation_prompt: bool = True
  ) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One prompt.

  Attributes:
    id: unique in its set, for instance `HumanEval/0` or `zoo/0`.
    domain: what results are grouped by: code, math, an MT-Bench category, or
      the name of the user's file.
    text: what the user says (`chat`), or the text to be continued.
    chat: whether `text` goes through the model's chat template.
    reference: the set's own answer, where it has one.
    later_turns: what the user says after each reply (MT-Bench: one more);
      benchmarks do not ask it.
    token_ids: `text` as the given tokenizer encodes it, chat template
      applied; None where no tokenizer was given.
  """

  id: str
  domain: str
  text: str
  chat: bool
  reference: str | None = None
  later_turns: tuple[str, ...] = ()
  token_ids: tuple[int, ...] | None = None

  def render(self, tokenizer: ChatTokenizer) -> str:
    """The text that the model reads, chat template applied.

    Raises:
      SpecPilotError: `chat`, and the tokenizer has no chat template.
    """
    if not self.chat:
      return self.text
    return tokenizer.chat(
      [{"role": "user", "content": self.text}], add_generation_prompt=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PromptSet:
  """How to read one set.

  Attributes:
    asset: its name in `experiments.fetch`; or the path of the file that the
      package ships.
    count: prompts in it; anything else is an error.
    chat: whether its prompts are chats, unless the caller says otherwise.
    read: (index, record, chat) -> (prompt, whether it belongs to dev).
  """

  asset: str | Callable[[], Path]
  count: int
  chat: bool
  read: Callable[[int, Mapping[str, Any], bool], tuple[Prompt, bool]]


def _zoo(index: int, record: Mapping[str, Any], chat: bool):
  text = record["text"]
  if not isinstance(text, str) or not text:
    raise ValueError("no text")
  return Prompt(id=f"zoo/{index}", domain="code", text=text, chat=chat), (
    index < 64
  )


def _zoo_long(index: int, record: Mapping[str, Any], chat: bool):
  prompt, is_dev = _zoo(index, record, chat)
  domain = record["domain"]
  if domain not in data.DOMAINS:
    raise ValueError(f"no domain {domain!r}")
  return dataclasses.replace(
    prompt, id=f"zoo-512/{index}", domain=domain
  ), is_dev


def _humaneval(index: int, record: Mapping[str, Any], chat: bool):
  prompt = Prompt(
    id=record["task_id"],
    domain="code",
    text=_HUMANEVAL.format(prompt=record["prompt"])
    if chat
    else record["prompt"],
    chat=chat,
    reference=record["canonical_solution"],
  )
  return prompt, index < 82


def _gsm8k(index: int, record: Mapping[str, Any], chat: bool):
  prompt = Prompt(
    id=record["id"],
    domain="math",
    text=_GSM8K.format(prompt=record["prompt"]),
    chat=chat,
    reference=record["expected"],
  )
  return prompt, index < 50


def _mt_bench(index: int, record: Mapping[str, Any], chat: bool):
  del index
  first, *later = record["turns"]
  prompt = Prompt(
    id=f"mtbench-{record['question_id']}",
    domain=record["category"],
    text=first,
    chat=chat,
    later_turns=tuple(later),
  )
  return prompt, record["question_id"] % 2 == 1


_SETS: Mapping[str, _PromptSet] = {
  "zoo-128": _PromptSet(
    asset=lambda: store.PROMPTS, count=128, chat=False, read=_zoo
  ),
  "zoo-512": _PromptSet(
    asset=lambda: store.LONG_PROMPTS, count=128, chat=False, read=_zoo_long
  ),
  "HumanEval-164": _PromptSet(
    asset="humaneval", count=164, chat=True, read=_humaneval
  ),
  "MT-Bench-80": _PromptSet(
    asset="mtbench", count=80, chat=True, read=_mt_bench
  ),
  "GSM8K-100": _PromptSet(asset="gsm8k", count=100, chat=True, read=_gsm8k),
}
PROMPT_SETS = tuple(_SETS)


def load_prompts(
  name: str,
  tokenizer: ChatTokenizer | None = None,
  limit: int | None = None,
  *,
  split: str = "all",
  chat: bool | None = None,
) -> list[Prompt]:
  """Reads a prompt set or a file of prompts.

  Args:
    name: one of `PROMPT_SETS`, or a path. A `.txt` file is one prompt, its
      whole text. A `.jsonl` file has one object a line with a field `prompt`
      and, if wanted, `id`, `domain`, `chat` and `reference`; other fields are
      not read.
    tokenizer: fills `Prompt.token_ids` when given.
    limit: at most so many prompts, the first ones; None for all.
    split: `dev`, `sealed` or `all`. HumanEval: tasks 0 to 81 are dev. zoo-128,
      zoo-512 and GSM8K: the first half. MT-Bench: the odd question ids. A file
      has no halves.
    chat: whether the chat template is applied. None is the set's own way:
      zoo-128 and zoo-512 are continued as they stand, the other sets are
      chats, a file is continued unless its lines say otherwise. False suits a
      model without a chat template; HumanEval's text is then the bare function
      head.

  Returns:
    The prompts in the order of the file.

  Raises:
    SpecPilotError: unknown name, set not fetched (the command is named), a
      file that cannot be read, a wrong count, an empty prompt, a bad split or
      limit.
  """
  if split not in SPLITS:
    raise SpecPilotError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
  if limit is not None and limit < 1:
    raise SpecPilotError(f"limit of prompts is {limit}, expected at least 1")
  if name in _SETS:
    prompts = _load_set(name, split, _SETS[name].chat if chat is None else chat)
  elif Path(name).suffix in (".txt", ".jsonl"):
    if split != "all":
      raise SpecPilotError(f"{name}: a file has no split {split!r}, only 'all'")
    prompts = _load_file(Path(name), chat)
  else:
    raise SpecPilotError(
      f"unknown prompt set {name!r}; known: {', '.join(_SETS)}, "
      "or a path ending in .txt or .jsonl"
    )
  prompts = prompts[:limit]
  if tokenizer is None:
    return prompts
  return [
    dataclasses.replace(
      p,
      token_ids=tuple(
        # A chat template writes the special tokens itself.
        tokenizer.encode(p.render(tokenizer), add_special_tokens=not p.chat)
      ),
    )
    for p in prompts
  ]


def _load_set(name: str, split: str, chat: bool) -> list[Prompt]:
  prompt_set = _SETS[name]
  if isinstance(prompt_set.asset, str):
    path = paths.asset_path(prompt_set.asset)
    hint = f"fetch it again: python -m experiments.fetch {prompt_set.asset}"
  else:
    path, hint = prompt_set.asset(), "install the package again"
  prompts, halves = [], []
  try:
    for index, (_, record) in enumerate(_records(path)):
      prompt, is_dev = prompt_set.read(index, record, chat)
      prompts.append(prompt)
      halves.append("dev" if is_dev else "sealed")
  except (KeyError, TypeError, ValueError) as e:
    raise SpecPilotError(f"{name}: {path} is damaged; {hint}") from e
  if len(prompts) != prompt_set.count:
    raise SpecPilotError(
      f"{name}: {path} holds {len(prompts)} prompts, expected "
      f"{prompt_set.count}; {hint}"
    )
  return [
    p for p, half in zip(prompts, halves, strict=True) if split in (half, "all")
  ]


def _read_text(path: Path) -> str:
  try:
    content = path.read_bytes()
    if path.suffix == ".gz":
      content = gzip.decompress(content)
    return content.decode("utf-8")
  except UnicodeDecodeError as e:
    raise SpecPilotError(f"{path} is not UTF-8 text") from e
  except (OSError, EOFError, zlib.error) as e:
    reason = getattr(e, "strerror", None) or "not a readable file"
    raise SpecPilotError(f"{path}: {reason}") from e


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line number from 1, object) of a JSON Lines file, gzipped or not."""
  # Not splitlines(): it cuts at characters that JSON strings may hold.
  for number, line in enumerate(_read_text(path).split("\n"), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except ValueError as e:
      raise SpecPilotError(f"{path}:{number}: not a JSON object") from e
    if not isinstance(record, dict):
      raise SpecPilotError(f"{path}:{number}: not a JSON object")
    yield number, record


def _load_file(path: Path, chat: bool | None) -> list[Prompt]:
  if path.suffix == ".txt":
    records = [(1, {"prompt": _read_text(path)})]
  else:
    records = list(_records(path))
  if not records:
    raise SpecPilotError(f"{path} holds no prompt")
  prompts = [
    _from_record(path, number, record, chat) for number, record in records
  ]
  seen: set[str] = set()
  for prompt in prompts:
    if prompt.id in seen:
      raise SpecPilotError(f"{path}: two prompts have the id {prompt.id!r}")
    seen.add(prompt.id)
  return prompts


def _from_record(
  path: Path, number: int, record: Mapping[str, Any], chat: bool | None
) -> Prompt:
  where = f"{path}:{number}"
  values: dict[str, Any] = {
    "id": f"{path.name}:{number}",
    "domain": path.stem,
    "chat": False,
    "reference": None,
  }
  kinds = {"id": str, "domain": str, "chat": bool, "reference": str}
  for field, kind in kinds.items():
    if record.get(field) is None:
      continue
    if not isinstance(record[field], kind):
      raise SpecPilotError(
        f"{where}: field {field!r} is {record[field]!r}, expected "
        f"{kind.__name__}"
      )
    values[field] = record[field]
  text = record.get("prompt")
  if not isinstance(text, str) or not text:
    raise SpecPilotError(f"{where}: field 'prompt' must be a text, not empty")
  if chat is not None:
    values["chat"] = chat
  return Prompt(text=text, **values)
