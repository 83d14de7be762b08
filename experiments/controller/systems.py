"""What a paired test compares, and what comes of it."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.controller import noise, paired
from specpilot_jax.configs import SystemConfig
from specpilot_jax.mechanisms import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """What is compared: a tree, and how it decodes.

  Attributes:
    options: assignments, `option=value,...`; empty is stock.
    drafter: name or path.
    kernels: as --kernels has them.
    patch: unified diff over the base; None is the base itself.
  """

  options: str
  drafter: str
  kernels: str
  patch: bytes | None = None

  @property
  def id(self) -> str:
    """From content: of the patch and the settings."""
    patch = hashlib.sha256(self.patch).hexdigest() if self.patch else None
    return "opt-" + noise.digest(
      [self.options, self.drafter, self.kernels, patch]
    )[:16]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tested:
  """A paired test: verdict, what was measured, and its place in the ledger."""

  id: str
  verdict: paired.Verdict
  measured: paired.Measured
  test: int
  familywise: float
  seen_before: int
  trees: Mapping[str, str]
  review: Sequence[str]
  forcing: Mapping[str, Any] | None
  seconds: float


def options_text(system: SystemConfig) -> str:
  """A system as `option=value,...`; empty for stock."""
  return ",".join(f"{k}={v}" for k, v in registry.changed(system).items())
