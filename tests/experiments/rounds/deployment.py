"""A deployment whose engine is the stand-in, in this process or another one."""

import dataclasses
import functools
import json
import pathlib
import time
import types
from collections.abc import Callable
from typing import Any

from experiments import benchmark, results
from experiments.controller import lab as lab_lib
from experiments.controller import tree
from experiments.hosts import Slot
from experiments.rounds import world
from experiments.rounds.world import LabWorld, Sealed
from experiments.settings import Settings
from pallas_kernels.dispatch import REFERENCE
from specpilot_jax import loading
from specpilot_jax.decoding.sampling import SamplingParams
from tests.experiments import test_settings
from tests.experiments.rounds import explored
from tests.exploits import standin


def install(patch: Callable[[Any, str, Any], None]) -> None:
  """Puts the stand-in in the place of engine, prompts and forcing.

  Args:
    patch: `setattr`, or one that is taken back.
  """
  source = types.SimpleNamespace(
    config=standin.config(),
    tokenizer=None,
    checkpoint=types.SimpleNamespace(notes=()),
    in_fp8=False,
  )
  patch(loading, "open_target", lambda name: source)

  def prompts(settings, model):
    del model
    count = 39 if settings.split == "dev" else 36
    made = standin.requests(count)
    return [
      dataclasses.replace(r.prompt, id=f"{settings.split}/{r.id}")
      for r in made[: settings.num_prompts]
    ]

  patch(benchmark, "load_requests", prompts)
  patch(tree, "read_base", lambda root=tree.ROOT: standin.base())

  def force(self, run):
    del self
    records: dict[str, list] = {}
    for record in results.read_requests(run):
      records.setdefault(record["system"], []).append(record)
    return standin.judge(records)

  patch(lab_lib.Lab, "_force", force)
  patch(
    LabWorld,
    "factors",
    lambda self, champion: {"tau": 1.5, "kernel": 1.4, "overhead": 1.0},
  )


def settings() -> Settings:
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


def note(
  owner: Any,
  method: str,
  kind: str,
  path: pathlib.Path,
  first: Callable[[], None] = lambda: None,
) -> None:
  """Lets a method write when it began and ended.

  Args:
    first: called within that time, before the method.
  """
  real = getattr(owner, method)

  @functools.wraps(real)
  def noted(*args, **more):
    began = time.monotonic()
    try:
      first()
      return real(*args, **more)
    finally:
      line = {"kind": kind, "began": began, "ended": time.monotonic()}
      with path.open("a") as file:
        file.write(json.dumps(line) + "\n")

  setattr(owner, method, noted)


ON_DEVICE = world.on_device


def on_device(
  settings: Settings, folder: pathlib.Path, sealed: Sealed, slot: Slot
) -> LabWorld:
  """`world.on_device` of a process of its own, with the stand-in."""
  install(setattr)
  path = folder / "intervals"
  together = functools.partial(explored.meet, folder, slot.index)
  note(lab_lib.Lab, "screen", f"screen {slot.index}", path, together)
  return ON_DEVICE(settings, folder, sealed, slot)
