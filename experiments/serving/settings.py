"""What a run is asked to serve beside its own settings."""

import dataclasses
from collections.abc import Mapping

from experiments.serving.arrivals import Level
from specpilot_jax.errors import SpecPilotError

DEFAULT_SLOTS = 16
"""Requests decoded at once where no level limits them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSettings:
  """Loads to serve, one after the other.

  Attributes:
    levels: the loads.
    goodput: what is promised of a request, in milliseconds, by name.
    max_num_seqs: requests decoded at once at most; None for the largest
      concurrency of the levels, or `DEFAULT_SLOTS` where one has none.
  """

  levels: tuple[Level, ...]
  goodput: Mapping[str, float]
  max_num_seqs: int | None

  def __post_init__(self):
    if self.max_num_seqs is not None and self.max_num_seqs < 1:
      raise SpecPilotError(
        f"max_num_seqs must be at least 1, got {self.max_num_seqs}"
      )

  @property
  def slots(self) -> int:
    """Requests decoded at once at most."""
    if self.max_num_seqs is not None:
      return self.max_num_seqs
    known = [n for n in map(_most, self.levels) if n is not None]
    unlimited = len(known) < len(self.levels)
    return max([*known, DEFAULT_SLOTS] if unlimited else known)

  def slots_of(self, level: Level) -> int:
    """Requests of a level decoded at once at most."""
    most = level.max_concurrency
    return self.slots if most is None else min(most, self.slots)

  def slot_buckets_of(self, level: Level) -> tuple[int, ...] | None:
    """Numbers of slots to compile passes for: all of a closed loop, which keeps
    as many busy and copies no state then; None for the engine's own where the
    load varies."""
    return None if level.varies else (self.slots_of(level),)


def _most(level: Level) -> int | None:
  return level.max_concurrency
