"""The generate and score commands, run as a user runs them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specpilot_jax.checkpoints import hf, load_checkpoint
from specpilot_jax.models import target as target_lib
from tests.checkpoints import builders
from tests.notes import in_full_form

ROOT = Path(__file__).parents[1]
BISECT = json.loads((ROOT / "tests/data/bisect.json").read_text())


def run(
  module: str, *args: str, ok: bool = True
) -> subprocess.CompletedProcess:
  done = subprocess.run(
    [sys.executable, "-m", module, *args],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  if ok:
    assert done.returncode == 0, done.stderr
  return done


def last_json(done: subprocess.CompletedProcess) -> dict:
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
  """A folder of a hybrid with random weights and a byte-level tokenizer."""
  folder = tmp_path_factory.mktemp("model") / "tiny"
  config = builders.config("qwen3_5", context_length=256)
  hf.save(
    folder,
    config,
    target_lib.random_params(config, seed=3),
    tokenizer_files=builders.tokenizer_files(),
  )
  return str(folder)


def test_generate_is_the_same_with_and_without_drafts(tiny):
  args = (
    f"--model={tiny}",
    "--prompt=the cat the cat",
    "--max_tokens=40",
    "--temperature=0.7",
    "--seed=5",
    "--ignore_eos",
    "--json",
  )
  drafted = last_json(run("specpilot_jax.generate", *args))
  plain = last_json(run("specpilot_jax.generate", *args, "--drafter=none"))
  assert drafted["token_ids"] == plain["token_ids"]
  assert drafted["finish_reason"] == "length"
  assert len(drafted["token_ids"]) == 40
  assert plain["acceptance_length"] == 1.0
  assert set(drafted) == {
    "prompt_ids",
    "token_ids",
    "text",
    "finish_reason",
    "acceptance_length",
    "decode_tok_s",
  }
  ids = ",".join(map(str, drafted["prompt_ids"]))
  by_ids = last_json(
    run("specpilot_jax.generate", f"--prompt_ids={ids}", *args[:1], *args[2:])
  )
  assert by_ids["token_ids"] == drafted["token_ids"]


def test_generate_streams_the_text(tiny):
  args = (f"--model={tiny}", "--prompt=the mat", "--chat", "--max_tokens=24")
  shown = run("specpilot_jax.generate", *args)
  text = last_json(run("specpilot_jax.generate", *args, "--json"))["text"]
  assert shown.stdout == text + "\n"
  assert "tau" in shown.stderr and "tok/s" in shown.stderr


@pytest.mark.parametrize(
  ("module", "args", "message"),
  [
    ("generate", ("--prompt="), "prompt is empty"),
    ("generate", ("--prompt_ids=1,300"), "token id 300 at index 1"),
    ("generate", ("--prompt_ids=1,x"), "integers separated by commas"),
    ("generate", ("--prompt_file=/nowhere"), "/nowhere"),
    ("generate", ("--prompt=a --top_p=0"), "top_p"),
    ("generate", ("--prompt=a --drafter=psychic"), "psychic"),
    ("generate", ("--prompt=a --set=speed=11"), "speed"),
    ("generate", ("--prompt=a --speed=11"), "speed"),
    ("generate", ("--prompt=a --dtype=int8"), "dtype"),
    ("generate", (""), "exactly one of"),
    ("generate", ("--prompt=a --model="), "model is empty"),
    ("generate", ("--prompt_ids=1_0"), "integers separated by commas"),
    ("generate", ("--prompt_ids=99999999999999999999"), "no token ids"),
    (
      "generate",
      ("--prompt=a --drafter=none --set=acceptance=rejection"),
      "needs a drafter",
    ),
    ("score", ("--token_ids=1"), "at least 2 tokens"),
    ("score", ("--text_file=/nowhere"), "/nowhere"),
  ],
)
def test_bad_input_is_one_line(tiny, module, args, message):
  done = run(
    f"specpilot_jax.{module}", f"--model={tiny}", *args.split(), ok=False
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
  "module",
  ["specpilot_jax.generate", "specpilot_jax.score", "experiments.main"],
)
def test_help(module):
  done = run(module, "--help")
  assert "--dtype" in done.stdout
  assert done.stderr == ""


@pytest.mark.parametrize(
  ("module", "args", "message"),
  [
    ("train", "--work_dir= --stage=release", "--work_dir is empty"),
    ("train", "--work_dir={0} --scale=0", "--scale must be above 0"),
    ("train", "--work_dir={0} --scale=nan", "--scale must be above 0"),
    ("train", "--work_dir={0} --stage=text", "run the target stage first"),
    ("train", "--work_dir={0} --stage=target", "train.npy"),
    ("evaluate", "--every=0", "--every=0"),
    ("evaluate", "--prompts=-1", "--prompts=-1"),
  ],
)
def test_bad_input_to_the_zoo_is_one_line(tmp_path, module, args, message):
  filled = args.format(tmp_path / "work").split()
  done = run(f"specpilot_jax.zoo.{module}", *filled, ok=False)
  assert done.returncode == 2
  assert done.stdout == ""
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_is_no_traceback(tiny):
  command = [sys.executable, "-m", "specpilot_jax.generate"]
  command += [f"--model={tiny}", "--prompt=the", "--max_tokens=200"]
  process = subprocess.Popen(
    [*command, "--ignore_eos"],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None and process.stderr is not None
  process.stdout.read(1)
  process.stdout.close()
  assert process.stderr.read() == ""
  assert process.wait(timeout=120) == 141


def test_a_prompt_longer_than_the_context_is_refused(tiny):
  ids = ",".join(["5"] * 256)
  done = run(
    "specpilot_jax.generate", f"--model={tiny}", f"--prompt_ids={ids}",
    ok=False,
  )  # fmt: skip
  assert done.returncode == 2
  assert "256 tokens leaves no room" in done.stderr


@in_full_form
def test_score_of_smollm2_on_source_code():
  """The published value, which a wrong RoPE layout would miss by far."""
  tokenizer = load_checkpoint("smollm2").tokenizer
  assert tokenizer is not None
  text = tokenizer.decode(BISECT["token_ids"])
  assert hashlib.sha256(text.encode()).hexdigest() == BISECT["text_sha256"]
  assert tokenizer.encode(text) == BISECT["token_ids"]
  ids = ",".join(map(str, BISECT["token_ids"]))
  result = last_json(
    run(
      "specpilot_jax.score", "--model=smollm2", f"--token_ids={ids}", "--json"
    )
  )
  assert result["logprobs"][0] is None
  logprobs = np.array(result["logprobs"][1:])
  np.testing.assert_allclose(result["mean_nll"], -logprobs.mean())
  assert abs(result["mean_nll"] - 1.413) < 0.02
