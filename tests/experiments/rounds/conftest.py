"""A deployment whose engine is the stand-in."""

import dataclasses
import types

import pytest

from experiments import benchmark, results
from experiments.controller import lab as lab_lib
from experiments.controller import tree
from experiments.rounds.world import LabWorld
from pallas_kernels.dispatch import REFERENCE
from specpilot_jax import loading
from specpilot_jax.decoding.sampling import SamplingParams
from tests.experiments import test_settings
from tests.exploits import standin


@pytest.fixture(name="settings")
def _settings(monkeypatch, tmp_path):
  """Settings of the stand-in, and a lab that takes it for the engine."""
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))
  source = types.SimpleNamespace(
    config=standin.config(),
    tokenizer=None,
    checkpoint=types.SimpleNamespace(notes=()),
  )
  monkeypatch.setattr(loading, "open_target", lambda name: source)

  def prompts(settings, model):
    del model
    count = 39 if settings.split == "dev" else 36
    made = standin.requests(count)
    return [
      dataclasses.replace(r.prompt, id=f"{settings.split}/{r.id}")
      for r in made[: settings.num_prompts]
    ]

  monkeypatch.setattr(benchmark, "load_requests", prompts)
  monkeypatch.setattr(tree, "read_base", lambda root=tree.ROOT: standin.base())

  def force(self, run):
    del self
    records: dict[str, list] = {}
    for record in results.read_requests(run):
      records.setdefault(record["system"], []).append(record)
    return standin.judge(records)

  monkeypatch.setattr(lab_lib.Lab, "_force", force)
  monkeypatch.setattr(
    LabWorld,
    "factors",
    lambda self, champion: {"tau": 1.5, "kernel": 1.4, "overhead": 1.0},
  )
  return dataclasses.replace(
    test_settings.shipped("cpu_smoke.flags"),
    target="zoo",
    drafter="dflash",
    systems=("ar", "stock"),
    options=None,
    num_prompts=None,
    split="dev",
    dtype="float32",
    kernels=REFERENCE,
    sampling=SamplingParams(max_tokens=12, ignore_eos=True),
    flags={"kernels": "reference"},
  )
