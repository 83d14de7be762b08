"""One finished benchmark of a tiny model, shared by the tests."""

import pytest

from tests.experiments import tiny


@pytest.fixture(scope="package", name="built")
def _built(tmp_path_factory):
  """A folder with a model, prompts, a data folder and a finished run."""
  folder = tmp_path_factory.mktemp("experiments")
  tiny.save_model(folder / "model")
  tiny.save_prompts(folder / "prompts.jsonl")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("SPECPILOT_DATA", str(folder / "data"))
    status = tiny.run(
      f"--target={folder / 'model'}",
      f"--prompts={folder / 'prompts.jsonl'}",
      "--dtype=float32",
      "--max_tokens=40",
      "--prefill_chunk=16",
      "--set=num_drafts=3",
      "--min_control_tokens=50",
      f"--output_dir={folder / 'run'}",
    )
  assert status == 0
  return folder


@pytest.fixture(name="place")
def _place(built, monkeypatch):
  """That folder, its data folder in use."""
  monkeypatch.setenv("SPECPILOT_DATA", str(built / "data"))
  return built


@pytest.fixture(name="finished")
def _finished(place):
  """The finished benchmark; it has three systems."""
  return place / "run"


@pytest.fixture(name="command")
def _command(place):
  """Flags of a benchmark of the tiny model."""
  return (
    f"--target={place / 'model'}",
    f"--prompts={place / 'prompts.jsonl'}",
    "--dtype=float32",
    "--max_tokens=40",
    "--prefill_chunk=16",
  )
