"""What a deployment needs of a machine, told before anything is loaded."""

from typing import Any

import jax

from experiments import devices
from specpilot_jax import footprint
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters.config import DrafterConfig

SCORED_COPIES = 3
"""Of a scored chunk's logits in float32 that live at once: the model's own,
with noise, and without what filters cut."""


def check_card(card: str) -> None:
  """Refuses a machine that a deployment is not for.

  Args:
    card: key of `devices.CARDS`. Any card of its generation will do.
  """
  wanted = devices.CARDS[card]
  major, minor = wanted.compute_capability
  need = (
    f"this deployment needs a GPU of compute capability {major}.{minor}"
    f" ({wanted.name})"
  )
  device = jax.devices()[0]
  if device.platform != "gpu":
    raise SpecPilotError(
      f"{need}, this machine has none; --flagfile=cpu_smoke.flags runs here"
    )
  found = devices.lookup(device.device_kind)
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


def memory(
  target: ModelConfig,
  drafter: DrafterConfig | None,
  *,
  dtype: str,
  max_seq_len: int,
  prefill_chunk: int,
  drafting: int,
  plain: int,
) -> dict[str, int]:
  """Bytes by purpose of the engines of one run.

  Args:
    target, drafter: shapes; a drafter without weights is None.
    dtype: of weights and caches.
    max_seq_len, prefill_chunk: of every engine.
    drafting: engines with the drafter.
    plain: engines without one, token forcing's included.
  """
  shape = dict(
    dtype=dtype, max_seq_len=max_seq_len, prefill_chunk=prefill_chunk
  )
  with_drafter = footprint.footprint(target, drafter, **shape)
  without = footprint.footprint(target, None, **shape)
  rows = min(prefill_chunk, max_seq_len)
  return {
    "target": with_drafter.target_bytes,
    "drafter": with_drafter.drafter_bytes if drafting else 0,
    "keys_and_values": drafting * with_drafter.kv_cache_bytes
    + plain * without.kv_cache_bytes,
    "drafter_context": drafting * with_drafter.drafter_cache_bytes,
    "recurrent_state": (drafting + plain) * without.recurrent_bytes,
    "workspace": SCORED_COPIES * rows * target.vocab_size * 4,
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


def peak_bytes() -> int | None:
  """The most that was held so far; None where the device does not count."""
  stats: dict[str, Any] | None = jax.devices()[0].memory_stats()
  return (stats or {}).get("peak_bytes_in_use")
