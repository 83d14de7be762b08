"""What a deployment needs of a machine, told before anything is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from experiments import devices
from specpilot_jax import footprint
from specpilot_jax.configs import (
  ONE_LEVEL,
  TWO_LEVEL,
  ModelConfig,
  SystemConfig,
)
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters.config import DrafterConfig

PLAN_HOLDS = 0.05
"""Share of the plan that the peak may differ from it."""

UNPLANNED_BYTES = 1 << 28
"""And what it may differ by in any case: temporaries of compiling and of
reading weights are not planned, and are more than a small model."""

SCORED_COPIES = 3
"""Of a scored chunk's logits in float32 that live at once: the model's own,
with noise, and without what filters cut."""


def check_card(card: str) -> None:
  """Refuses a machine that a deployment is not for.

  Args:
    card: key of `devices.CARDS`. Any card of its generation will do.
  """
  device = jax.devices()[0]
  check_kind(
    card, {"platform": device.platform, "device_kind": device.device_kind}
  )


def check_kind(card: str, machine: Mapping[str, Any]) -> None:
  """As `check_card`, for a machine that was described.

  Args:
    card: key of `devices.CARDS`.
    machine: has JAX's `platform` and `device_kind`.
  """
  wanted = devices.CARDS[card]
  major, minor = wanted.compute_capability
  need = (
    f"this deployment needs a GPU of compute capability {major}.{minor}"
    f" ({wanted.name})"
  )
  if machine["platform"] != "gpu":
    raise SpecPilotError(
      f"{need}, this machine has none; --flagfile=cpu_smoke.flags runs here"
    )
  found = devices.lookup(machine["device_kind"])
  if found.compute_capability != wanted.compute_capability:
    fitting = [
      f"--flagfile={key}_single.flags"
      for key, other in devices.CARDS.items()
      if other.compute_capability == found.compute_capability
    ]
    raise SpecPilotError(
      f"{need}, this machine has a {found.name}; {' or '.join(fitting)} runs"
      " here"
    )


def views(systems: Iterable[SystemConfig], *, profile: bool) -> int:
  """How many views of a target they hold beside weights in bf16.

  Args:
    profile: whether their agreement is measured, by the default view, which
      weights in W12 hold already.
  """
  systems = list(systems)
  looking = [s for s in systems if s.verification != ONE_LEVEL]
  held = {s.view for s in looking if s.weights == "bf16"}
  in_w12 = any(s.weights == "w12" for s in systems)
  if profile and any(s.verification == TWO_LEVEL for s in looking):
    held |= set() if in_w12 else {SystemConfig().view}
  return len(held)


def memory(
  target: ModelConfig,
  drafter: DrafterConfig | None,
  *,
  dtype: str,
  max_seq_len: int,
  prefill_chunk: int,
  drafting: int,
  plain: int,
  weights: Sequence[str] = ("bf16",),
  views: int = 0,
  packed_views: bool = False,
  pass_rows: int = 1,
  copied: int = 0,
) -> dict[str, int]:
  """Bytes by purpose of the engines of one run.

  Args:
    target, drafter: shapes; a drafter without weights is None.
    dtype: of weights and caches.
    max_seq_len, prefill_chunk: of every engine.
    drafting: engines with the drafter.
    plain: engines without one, token forcing's included.
    weights: the forms that they are held in, of `configs.WEIGHTS`.
    views: targets of 8-bit views beside weights in bf16.
    packed_views: whether those are in W12, as kernels read them, and not
      matrices.
    pass_rows: of the largest pass that chooses tokens.
    copied: slots whose states a step copies to and from.
  """
  shape = dict(
    dtype=dtype, max_seq_len=max_seq_len, prefill_chunk=prefill_chunk
  )
  with_drafter = footprint.footprint(target, drafter, **shape)
  without = footprint.footprint(target, None, **shape)
  rows = max(min(prefill_chunk, max_seq_len), pass_rows)
  of_slot = with_drafter.kv_cache_bytes + with_drafter.recurrent_bytes
  held = {}
  if "bf16" in weights:
    held["target"] = with_drafter.target_bytes
    held["drafter"] = with_drafter.drafter_bytes if drafting else 0
  if "w12" in weights:
    own = drafter if drafting else None
    held["weights_in_w12"] = footprint.w12_bytes(target, own)
  if "fp8" in weights:
    held["weights_in_fp8"] = footprint.fp8_bytes(target, dtype)
    # A drafter stays as it is.
    held["drafter"] = with_drafter.drafter_bytes if drafting else 0
  if views:
    one = with_drafter.target_bytes
    if packed_views:
      one = footprint.w12_bytes(target, None)
    held["views"] = views * one
  return {
    **held,
    "keys_and_values": drafting * with_drafter.kv_cache_bytes
    + plain * without.kv_cache_bytes,
    "drafter_context": drafting * with_drafter.drafter_cache_bytes,
    "recurrent_state": (drafting + plain) * without.recurrent_bytes,
    "workspace": SCORED_COPIES * rows * target.vocab_size * 4
    + 2 * copied * of_slot,
  }


def check_memory(plan: dict[str, int], available: int | None) -> str:
  """The plan as a line.

  Raises:
    SpecPilotError: more than is available.
  """
  total = sum(plan.values())
  parts = ", ".join(
    f"{name.replace('_', ' ')} {size / 1e9:.3g}" for name, size in plan.items()
  )
  line = f"memory plan, GB: {parts}; {total / 1e9:.3g} in all"
  if available is None:
    return line
  if total > available:
    raise SpecPilotError(f"{line}, and the device offers {available / 1e9:.3g}")
  return f"{line} of {available / 1e9:.3g}"


def _memory_stats() -> dict[str, Any]:
  stats: dict[str, Any] | None = jax.devices()[0].memory_stats()
  return stats or {}


def peak_bytes() -> int | None:
  """The most that was held so far; None where the device does not count."""
  return _memory_stats().get("peak_bytes_in_use")


def held_bytes() -> int | None:
  """What is held now; None where the device does not count."""
  return _memory_stats().get("bytes_in_use")


class Peaks:
  """The most that was held, beside the plan.

  Args:
    planned: bytes by purpose.
  """

  def __init__(self, planned: dict[str, int]):
    self._planned = dict(planned)
    self._after: dict[str, int] = {}

  def note(self, part: str) -> None:
    """Keeps the peak up to now under the name of what has just ended."""
    peak = peak_bytes()
    if peak is not None:
      self._after[part] = peak

  def also(self, purpose: str, size: int) -> None:
    """Plans for what only turned out to be needed while the run went on."""
    self._planned[purpose] = size

  def told(self) -> dict[str, Any]:
    """`device_memory` of result.json.

    `peak_bytes` is the largest, None where the device does not count;
    `peak_bytes_after` has it by part of the run, so that a peak of compilation
    (which tries out products) is told from one of decoding.
    """
    total = sum(self._planned.values())
    peak = max(self._after.values(), default=None)
    return {
      "planned_bytes": self._planned,
      "planned_total_bytes": total,
      "peak_bytes": peak,
      "peak_bytes_after": dict(self._after),
      "peak_over_plan": None if peak is None else peak / total,
    }

  def notes(self) -> list[str]:
    """What a reader must know of a plan that did not hold."""
    told = self.told()
    if told["peak_bytes"] is None:
      return []
    total = told["planned_total_bytes"]
    allowed = max(PLAN_HOLDS * total, UNPLANNED_BYTES)
    if abs(told["peak_bytes"] - total) <= allowed:
      return []
    return [f"{describe(told)}: more than {PLAN_HOLDS:.0%} from it"]


def describe(memory: Mapping[str, Any]) -> str | None:
  """One line on `device_memory`; None where the device does not count."""
  ratio = memory["peak_over_plan"]
  if ratio is None:
    return None
  return (
    f"peak memory {memory['peak_bytes'] / 1e9:.4g} GB, planned"
    f" {memory['planned_total_bytes'] / 1e9:.4g} GB ({ratio - 1:+.1%})"
  )
