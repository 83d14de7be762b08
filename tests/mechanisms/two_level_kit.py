"""Engines that verify in two levels, on the scripts of the losslessness kit."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.mechanisms import level_choice, registry, two_level
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.target import Target
from tests.decoding import kit, tree_kit

TIMES = level_choice.StepTimes(one_us=1.0, two_us=1.5)
"""With which `auto` looks at the drafts of some steps, and not of others."""


@functools.cache
def target(config) -> Target:
  """A target in float64 whose weights W12 holds: their view is another model,
  which disagrees with it every few tokens."""
  params = {
    name: np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32)
    for name, value in target_lib.random_params(config, 3, kit.SCALE).items()
  }
  return target_lib.build(config, params, "float64")


@functools.cache
def autoregressive(config) -> Engine:
  """The referee."""
  return Engine(target(config), max_seq_len=256, prefill_chunk=8)


@functools.cache
def engine(
  config,
  verification: str,
  *,
  tree: str = "chain",
  node_budget: int | None = None,
  passes: int = 1,
  variable_length: bool = False,
  weights: str = "bf16",
  longest: int | None = None,
) -> kit.ScriptedEngine:
  """Its `load` sets the script; chains and trees of the same lattices.

  Args:
    longest: nodes of a path at most, instead of what the kernels take.
  """
  drafter = tree_kit.LatticeDrafter(
    tree_kit.SLOTS, config, conditional=True, variable_length=variable_length
  )
  system = SystemConfig(
    tree=tree,
    node_budget=node_budget,
    verification=verification,
    level_one_passes=passes,
    weights=weights,
  )
  model, _ = registry.prepare(system, target(config), drafter)
  schedule = two_level.schedule(system, model, drafter, times=TIMES)
  if longest is not None:
    assert schedule is not None
    schedule = dataclasses.replace(schedule, longest=longest)
  return scripted(model, drafter, system, schedule)


def scripted(model, drafter, system, schedule) -> kit.ScriptedEngine:
  """An engine of the kit's shape."""
  return kit.ScriptedEngine(
    model,
    drafter=drafter,
    system=system,
    schedule=schedule,
    max_seq_len=256,
    prefill_chunk=8,
  )


def sibling(engine: kit.ScriptedEngine, **changes) -> kit.ScriptedEngine:
  """The same with another schedule of its kind, and the same executables."""
  assert isinstance(engine.schedule, two_level.TwoLevel)
  schedule = dataclasses.replace(engine.schedule, **changes)
  other = scripted(
    target(engine.config), engine.drafter, engine.system, schedule
  )
  other._fns_by_features = engine._fns_by_features
  return other
