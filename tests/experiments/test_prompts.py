"""Prompt sets: the real ones, and files of a user's own."""

import gzip
import json

import pytest

from experiments.prompts import PROMPT_SETS, load_prompts
from specpilot_jax import paths
from specpilot_jax.checkpoints import load_checkpoint
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.zoo import store

COUNTS = {
  "zoo-128": 128, "zoo-512": 128, "HumanEval-164": 164, "MT-Bench-80": 80,
  "GSM8K-100": 100,
}  # fmt: skip
SHIPPED, LONG = "zoo-128", "zoo-512"
FETCHED = tuple(name for name in PROMPT_SETS if name not in (SHIPPED, LONG))


class UpperTokenizer:
  """A tokenizer whose ids are code points, with a visible chat template."""

  def encode(self, text, *, add_special_tokens=True):
    return [ord(c) for c in text]

  def chat(self, messages, add_generation_prompt=True):
    (message,) = messages
    assert add_generation_prompt
    return f"<{message['role']}>{message['content']}<assistant>"


def one_line(error) -> str:
  assert "\n" not in str(error.value)
  return str(error.value)


def test_the_sets_are_these():
  assert set(PROMPT_SETS) == set(COUNTS)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_counts_and_halves(name):
  everything = load_prompts(name)
  dev = load_prompts(name, split="dev")
  sealed = load_prompts(name, split="sealed")
  assert len(everything) == COUNTS[name]
  assert len({p.id for p in everything}) == COUNTS[name]
  assert len(dev) == len(sealed) == COUNTS[name] // 2
  assert {p.id for p in dev} | {p.id for p in sealed} == {
    p.id for p in everything
  }
  assert all(p.text and p.token_ids is None for p in everything)
  assert {p.chat for p in everything} == {name in FETCHED}


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_limit_takes_the_first(name):
  assert load_prompts(name, limit=3) == load_prompts(name)[:3]
  assert len(load_prompts(name, limit=10_000)) == COUNTS[name]


def test_the_zoo_prompts_need_no_fetching(tmp_path, monkeypatch):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path))
  prompts = load_prompts(SHIPPED, UpperTokenizer())
  assert [p.text for p in prompts] == [p["text"] for p in store.prompts()]
  assert all("".join(map(chr, p.token_ids or ())) == p.text for p in prompts)
  assert {p.domain for p in prompts} == {"code"}
  assert load_prompts(SHIPPED, split="dev") == load_prompts(SHIPPED)[:64]


def test_long_prompts_are_code_and_documentation():
  tokenizer = load_checkpoint("zoo").tokenizer
  assert tokenizer is not None
  prompts = load_prompts(LONG, tokenizer)
  assert [p.id for p in prompts[:2]] == ["zoo-512/0", "zoo-512/1"]
  # In turn, so that the first few of a half are of both.
  assert [p.domain for p in prompts] == ["code", "documentation"] * 64
  assert all(512 <= len(p.token_ids or ()) <= 1024 for p in prompts)
  text = gzip.decompress(store.LONG_PROMPTS.read_bytes()).decode()
  lines = text.splitlines()
  files = [json.loads(line)["source"].rpartition(":")[0] for line in lines]
  assert not set(files[:64]) & set(files[64:])
  assert store.LONG_PROMPTS.stat().st_size < 120_000


def test_a_damaged_domain_is_named(tmp_path, monkeypatch):
  path = tmp_path / "prompts_512.jsonl"
  path.write_text('{"text": "a", "domain": "verse"}\n' * 128)
  monkeypatch.setattr(store, "LONG_PROMPTS", path)
  with pytest.raises(SpecPilotError, match="zoo-512: .* is damaged"):
    load_prompts(LONG)


def test_zoo_prompts_go_through_a_template_if_asked():
  (prompt,) = load_prompts(SHIPPED, UpperTokenizer(), 1, chat=True)
  rendered = "".join(map(chr, prompt.token_ids or ()))
  assert rendered == f"<user>{prompt.text}<assistant>"


@pytest.mark.parametrize(
  "lines", [['{"text": "a"}'], ['{"text": "a"}'] * 63 + ['{"text": ""}'], ["{"]]
)
def test_damaged_zoo_prompts_are_named(lines, tmp_path, monkeypatch):
  path = tmp_path / "prompts.jsonl"
  path.write_text("\n".join(lines))
  monkeypatch.setattr(store, "PROMPTS", path)
  with pytest.raises(SpecPilotError) as error:
    load_prompts(SHIPPED)
  assert f"{path}" in one_line(error)


def test_human_eval_wording():
  first = load_prompts("HumanEval-164")[0]
  assert first.id == "HumanEval/0"
  assert first.domain == "code"
  assert first.text.startswith(
    "Write a solution to the following problem and make sure that it passes "
    "the tests:\n```python\nfrom typing import List\n"
  )
  assert first.text.endswith('True\n    """\n\n```')
  assert first.reference is not None
  assert "abs(elem - elem2)" in first.reference


def test_human_eval_bare_is_the_function_head():
  first = load_prompts("HumanEval-164", limit=1, chat=False)[0]
  assert not first.chat
  assert first.text.startswith("from typing import List\n")
  assert first.text.endswith('True\n    """\n')


def test_human_eval_halves_are_by_task_number():
  dev = load_prompts("HumanEval-164", split="dev")
  assert [p.id for p in dev] == [f"HumanEval/{i}" for i in range(82)]


def test_gsm8k_wording():
  first = load_prompts("GSM8K-100")[0]
  assert first.domain == "math"
  assert first.text.startswith("Melanie is a door-to-door saleswoman.")
  assert first.text.endswith(
    "start with?\nPlease reason step by step, and put your final answer "
    "within \\boxed{}."
  )
  assert first.reference == "18"


def test_gsm8k_halves_are_by_position():
  everything = load_prompts("GSM8K-100")
  assert load_prompts("GSM8K-100", split="dev") == everything[:50]


def test_mt_bench_has_two_turns_and_eight_categories():
  everything = load_prompts("MT-Bench-80")
  assert everything[0].id == "mtbench-81"
  assert everything[0].text.startswith("Compose an engaging travel blog post")
  assert all(len(p.later_turns) == 1 for p in everything)
  domains = [p.domain for p in everything]
  assert sorted(domains.count(d) for d in set(domains)) == [10] * 8


def test_mt_bench_halves_are_by_parity():
  for split, parity in (("dev", 1), ("sealed", 0)):
    for prompt in load_prompts("MT-Bench-80", split=split):
      assert int(prompt.id.removeprefix("mtbench-")) % 2 == parity


def test_a_tokenizer_fills_token_ids():
  (chat,) = load_prompts("GSM8K-100", UpperTokenizer(), 1)
  (bare,) = load_prompts("GSM8K-100", UpperTokenizer(), 1, chat=False)
  assert chat.token_ids is not None and bare.token_ids is not None
  assert "".join(map(chr, chat.token_ids)) == f"<user>{chat.text}<assistant>"
  assert "".join(map(chr, bare.token_ids)) == bare.text


@pytest.mark.parametrize("name", FETCHED)
def test_a_missing_set_names_the_command(name, tmp_path, monkeypatch):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path))
  with pytest.raises(SpecPilotError) as error:
    load_prompts(name)
  assert "python -m experiments.fetch " in one_line(error)


@pytest.mark.parametrize("name", ["humaneval", "HumanEval", "GSM8K-1319", ""])
def test_an_unknown_set_lists_the_known(name):
  with pytest.raises(SpecPilotError) as error:
    load_prompts(name)
  for known in (repr(name), *PROMPT_SETS):
    assert known in one_line(error)


def test_an_unknown_split_lists_the_known():
  with pytest.raises(SpecPilotError, match="'test'.*dev, sealed, all"):
    load_prompts("GSM8K-100", split="test")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_bad_limit_is_named(limit):
  with pytest.raises(SpecPilotError, match=f"limit of prompts is {limit}"):
    load_prompts("GSM8K-100", limit=limit)


@pytest.mark.parametrize("damage", ["short", "cut", "no gzip", "empty"])
def test_a_damaged_set_names_file_and_command(damage, tmp_path, monkeypatch):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path))
  path = tmp_path / paths.ASSET_FILES["humaneval"]
  path.parent.mkdir()
  record = {"task_id": "HumanEval/0", "prompt": "p", "canonical_solution": "c"}
  data = gzip.compress((json.dumps(record) + "\n").encode())
  path.write_bytes(
    {
      "short": data,
      "cut": data[:-12],
      "no gzip": b"text",
      "empty": b"",
    }[damage]
  )
  with pytest.raises(SpecPilotError) as error:
    load_prompts("HumanEval-164")
  message = one_line(error)
  assert str(path) in message
  assert "python -m experiments.fetch humaneval" in message


def test_a_text_file_is_one_prompt(tmp_path):
  path = tmp_path / "head.txt"
  path.write_text("def fib(n):\n")
  (prompt,) = load_prompts(str(path), UpperTokenizer())
  assert prompt.text == "def fib(n):\n"
  assert prompt.domain == "head"
  assert not prompt.chat
  assert prompt.token_ids == tuple(map(ord, prompt.text))


def test_a_json_lines_file(tmp_path):
  path = tmp_path / "mine.jsonl"
  path.write_text(
    '{"prompt": "one\u2028line"}\n\n'
    '{"prompt": "two", "id": "b", "domain": "d", "chat": true,'
    ' "reference": "r", "note": 1}\n'
  )
  first, second = load_prompts(str(path))
  assert (first.id, first.domain, first.chat) == ("mine.jsonl:1", "mine", False)
  assert first.text == "one\u2028line"
  assert (second.id, second.domain, second.chat) == ("b", "d", True)
  assert second.reference == "r"
  assert all(p.chat for p in load_prompts(str(path), chat=True))


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("", "holds no prompt"),
    ('{"prompt": "a"}\n{"prompt": ', ":2: not a JSON object"),
    ('["a"]\n', ":1: not a JSON object"),
    ('{"text": "a"}\n', ":1: field 'prompt' must be a text"),
    ('{"prompt": ""}\n', ":1: field 'prompt' must be a text, not empty"),
    ('{"prompt": 3}\n', ":1: field 'prompt' must be a text"),
    (
      '{"prompt": "a", "chat": "yes"}\n',
      "field 'chat' is 'yes', expected bool",
    ),
    ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "the id 'x'"),
  ],
)
def test_a_bad_file_is_one_line(tmp_path, text, words):
  path = tmp_path / "mine.jsonl"
  path.write_text(text)
  with pytest.raises(SpecPilotError) as error:
    load_prompts(str(path))
  assert words in one_line(error)
  assert str(path) in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
  path = tmp_path / "gone.txt"
  with pytest.raises(SpecPilotError, match="gone.txt: No such file"):
    load_prompts(str(path))
  path.write_text("")
  with pytest.raises(SpecPilotError, match="gone.txt:1: .*not empty"):
    load_prompts(str(path))
  path.write_bytes(b"\xff\xfe")
  with pytest.raises(SpecPilotError, match="gone.txt is not UTF-8 text"):
    load_prompts(str(path))


def test_a_file_has_no_halves(tmp_path):
  path = tmp_path / "head.txt"
  path.write_text("a")
  with pytest.raises(SpecPilotError, match="has no split 'dev'"):
    load_prompts(str(path), split="dev")
