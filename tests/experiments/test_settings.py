"""Flag files: where they are looked for and what they may hold."""

import re
import shlex
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main, prompts, settings
from specpilot_jax import loading
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError

FLAG_FILES = sorted(p.name for p in settings.FLAG_FOLDER.glob("*.flags"))


def expand(*args):
  return settings.expand_flag_files(["main", *args])[1:]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def with_flags(function, *args: str):
  """What a function makes of a command line's flags."""
  with flagsaver.flagsaver():
    flags.FLAGS(["main", *expand(*args)])
    return function()


def read(*args: str) -> settings.Settings:
  return with_flags(main.read_settings, *args)


def shipped(name: str) -> settings.Settings:
  return read(f"--flagfile={name}")


def test_shipped_files_are_found_from_anywhere():
  assert "--target=zoo" in expand("--flagfile=cpu_smoke.flags")
  assert "--target=zoo" in expand("--flagfile", "cpu_smoke.flags")


@pytest.mark.parametrize("name", FLAG_FILES)
def test_shipped_files_describe_a_proved_run(name):
  run = shipped(name)
  assert {settings.AR, settings.STOCK} <= set(run.systems)
  assert run.token_forcing and run.sampling.loops_end
  assert set(run.prompt_sets) <= set(prompts.PROMPT_SETS)
  assert run.drafter in loading.DRAFTERS
  # Loops end requests, so outputs are shorter than allowed: half is a margin.
  sizes = {"zoo-128": 128, "zoo-512": 64, "HumanEval-164": 164}
  count = sum(sizes[s] for s in run.prompt_sets)
  count = min(count, run.num_prompts or count)
  assert count * run.sampling.max_tokens / 2 >= 0.9 * 5000


def test_commands_of_the_readme_have_prompts_that_the_model_reads():
  """The zoo has no chat template, in which some sets are worded."""
  text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
  text = text.replace("\\\n", " ")  # Lines that go on.
  commands = re.findall(r"^ *python -m experiments\.main (.*)$", text, re.M)
  jobs = [shlex.split(c) for c in commands if "job=report" not in c]
  assert len(jobs) > 3
  for args in jobs:
    run = read(*args)
    if run.target == "zoo" and run.requests is None:
      for name in run.prompt_sets:
        assert prompts.load_prompts(
          name, loading.open_target("zoo").tokenizer, 1, chat=run.chat
        ), args


def test_temperature_one_is_the_same_deployment():
  greedy, sampled = map(shipped, ("h200_single.flags", "h200_single_t1.flags"))
  assert (greedy.sampling.temperature, sampled.sampling.temperature) == (0, 1)
  for field in ("target", "drafter", "prompt_sets", "num_prompts", "dtype"):
    assert getattr(greedy, field) == getattr(sampled, field)
  assert sampled.system("stock").acceptance == "match"
  assert sampled.system("candidate").acceptance == "rejection"


def test_the_demo_reads_nothing_that_is_fetched(tmp_path, monkeypatch):
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "empty"))
  run = shipped("cpu_smoke.flags")
  model = loading.load_target(run.target, run.dtype)
  assert loading.make_drafter(run.drafter, model.target)
  for name in run.prompt_sets:
    assert prompts.load_prompts(name, model.tokenizer, chat=run.chat)
  assert not (tmp_path / "empty").exists()


def test_the_working_directory_comes_first(tmp_path):
  (tmp_path / "cpu_smoke.flags").write_text("--target=mine\n")
  assert expand("--flagfile=cpu_smoke.flags") == ["--target=mine"]


def test_order_comments_and_nesting(tmp_path):
  (tmp_path / "a").write_text("# why\n\n--x=1\n  --flagfile=b\n--y=2\n")
  (tmp_path / "b").write_text("--x=3")
  assert expand("--w=0", "--flagfile=a", "--x=4") == [
    "--w=0", "--x=1", "--x=3", "--y=2", "--x=4",
  ]  # fmt: skip


def test_nothing_is_expanded_behind_a_double_dash():
  assert expand("--", "--flagfile=a") == ["--", "--flagfile=a"]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("target=mine", "flags:1: not a flag: target=mine"),
    ("--x=1\nword", "flags:2: not a flag"),
    ("--flagfile=flags", "includes itself"),
    (b"\xff\xfe", "not UTF-8"),
  ],
)
def test_bad_files(tmp_path, content, message):
  data = content if isinstance(content, bytes) else content.encode()
  (tmp_path / "flags").write_bytes(data)
  with pytest.raises(SpecPilotError, match=message) as caught:
    expand("--flagfile=flags")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "absent", "folder/cpu_smoke.flags", "."])
def test_missing_files(name):
  with pytest.raises(SpecPilotError, match="cpu_smoke.flags"):
    expand(f"--flagfile={name}")


def test_every_sampling_setting_has_its_flag():
  chosen = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    seed=4,
    max_tokens=7,
    stop=("a", "b,c"),
    ignore_eos=True,
  )
  given = [
    f"--{name}={getattr(chosen, name)}"
    for name in chosen.__dataclass_fields__
    # Settings of the Python interface alone.
    if name not in ("stop", "stop_token_ids", "loop_detection")
  ]
  with flagsaver.flagsaver():
    flags.FLAGS(["main", *given, "--stop=a", "--stop=b,c"])
    assert main.read_sampling() == chosen
  # They are the program's own flags: its records and its help have them.
  owner = flags.FLAGS.find_module_defining_flag("job")
  assert flags.FLAGS.find_module_defining_flag("min_p") == owner
