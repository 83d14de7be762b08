"""Widened zoo models by name: `widened:PRESET`, such as `widened:qwen3.8-27b`.

They are made of the zoo on the device each time, and never stored: see
`checkpoints.widen`.
"""

import dataclasses

from pallas_kernels.dispatch import REFERENCE, Kernels
from specpilot_jax import configs
from specpilot_jax.checkpoints import ZOO, Checkpoint, widen, widen_drafter
from specpilot_jax.checkpoints import drafter as drafter_lib
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import config as drafter_configs
from specpilot_jax.models.drafters.config import DrafterConfig
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.zoo import store

PREFIX = "widened:"
SEED = 0
"""Of the random weights: every machine has the same model."""


def is_widened(name: str) -> bool:
  """Whether a model of this name is made by widening."""
  return name.lower().startswith(PREFIX)


def preset_of(name: str) -> configs.ModelConfig:
  """The wide shape that a name asks for; upper and lower case are one.

  Raises:
    SpecPilotError: no such preset; the line lists those that have a drafter.
  """
  wanted = name[len(PREFIX) :].lower()
  for preset in drafter_configs.PRESETS:
    if preset.lower() == wanted:
      return configs.preset(preset)
  known = ", ".join(f"{PREFIX}{p.lower()}" for p in drafter_configs.PRESETS)
  raise SpecPilotError(f"unknown widened model {name!r}; there are: {known}")


def target(
  name: str,
  small: Checkpoint,
  dtype: str,
  kernels: Kernels = REFERENCE,
  hold: widen.Hold = widen.as_it_is,
) -> target_lib.Target:
  """The zoo's target at the shape of a preset.

  Args:
    small: the zoo's checkpoint.
    hold: see `widen.widen_target`.

  Raises:
    SpecPilotError: see `preset_of`.
  """
  wide = preset_of(name)
  drafter = drafter_lib.load_config(store.DFLASH)
  taps = widen_drafter.drafter_taps(drafter, drafter_configs.PRESETS[wide.name])
  return widen.widen_target(
    small.config,
    small.params,
    wide,
    SEED,
    taps=taps,
    dtype=dtype,
    kernels=kernels,
    hold=hold,
  )


def target_config(name: str, small: Checkpoint) -> configs.ModelConfig:
  """The shape of `target`."""
  return widen.widened_target_config(small.config, preset_of(name))


def drafter_config(name: str, kind: str) -> DrafterConfig:
  """The shape of `drafter`, but for what the zoo's says of its tokens.

  Its block and rotary embeddings are the zoo's, whatever the preset's: a
  drafter is trained for them.
  """
  small = drafter_lib.load_config(store.DRAFTERS[ZOO][kind])
  wide = drafter_configs.PRESETS_BY_KIND[kind][preset_of(name).name]
  return dataclasses.replace(wide, block_size=small.block_size, yarn=small.yarn)


def drafter(
  name: str, kind: str, dtype: str, hold: widen.Hold = widen.as_it_is
) -> DFlash:
  """The zoo's drafter of a kind at the shape of the preset's.

  Raises:
    SpecPilotError: the zoo's does not load, or reads other layers than the
      target was widened for.
  """
  wide = drafter_config(name, kind)
  small = drafter_lib.load(store.DRAFTERS[ZOO][kind], dtype)
  first = drafter_lib.load_config(store.DFLASH)
  if small.config.target_layers != first.target_layers:
    raise SpecPilotError(
      f"{small.config.name} reads layers {small.config.target_layers}, widened"
      f" targets are made for {first.target_layers}"
    )
  return widen_drafter.widen_drafter(small, wide, SEED, dtype=dtype, hold=hold)


def note(name: str) -> str:
  """What every table with its figures must say."""
  return (
    f"widened: the trained zoo model at the shapes of {preset_of(name).name}"
    " (weights replicated; extra layers and unused vocabulary random, seed"
    f" {SEED})"
  )
