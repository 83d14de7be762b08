"""Flag files: where they are looked for and what they may hold."""

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main, settings
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError


def expand(*args):
  return settings.expand_flag_files(["main", *args])[1:]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def test_shipped_files_are_found_from_anywhere():
  for path in settings.FLAG_FOLDER.glob("*.flags"):
    assert expand(f"--flagfile={path.name}")
  assert "--target=smollm2" in expand("--flagfile=cpu_smoke.flags")
  assert "--target=smollm2" in expand("--flagfile", "cpu_smoke.flags")


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
