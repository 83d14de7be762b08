"""Learned drafters by their configuration."""

from typing import Any

from flax import nnx

from specpilot_jax.models.drafters.config import (
  DFlash2Config,
  DrafterConfig,
  DSparkConfig,
)
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from specpilot_jax.models.drafters.dflash2 import DFlash2, DFlash2Drafter
from specpilot_jax.models.drafters.dspark import DSpark, DSparkDrafter
from specpilot_jax.models.target import Target

_KINDS: dict[str, tuple[type[DFlash], type[DFlashDrafter]]] = {
  DrafterConfig.kind: (DFlash, DFlashDrafter),
  DFlash2Config.kind: (DFlash2, DFlash2Drafter),
  DSparkConfig.kind: (DSpark, DSparkDrafter),
}

KINDS = tuple(_KINDS)
"""Names of learned drafters."""

CANDIDATES = 16
"""Per slot, of drafters that were not released with a number of them."""


def module(config: DrafterConfig, dtype: Any, rngs: nnx.Rngs) -> DFlash:
  """A drafter's parameters, at their initial values.

  Raises:
    SpecPilotError: float16.
  """
  return _KINDS[config.kind][0](config, dtype, rngs)


def drafter(
  model: DFlash,
  target: Target,
  *,
  candidates: int | None = None,
  view: str | None = None,
) -> DFlashDrafter:
  """A drafter of an engine: see `DFlashDrafter`.

  Args:
    candidates: per slot; by default those that it was released with, or
      `CANDIDATES`.
  """
  if candidates is None:
    candidates = getattr(model.config, "selector_top_k", CANDIDATES)
  kind = _KINDS[model.config.kind][1]
  return kind(model, target, candidates=candidates, view=view)
