"""Devices of this host: which processes may use which, and their cores.

A device is a GPU by its index, as `nvidia-smi` lists them. On a machine without
one it is emulated: a share of the processor's cores. Emulated devices are for
trying out how processes work together, not for timing.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import environment
from specpilot_jax.errors import SpecPilotError

_KERNEL_FOLDER = Path("/proc/driver/nvidia/gpus")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
  """A device as a process gets it.

  Attributes:
    index: of the GPU, or of the emulated device.
    uuid: the GPU's; None for an emulated device.
    minor: number N of its device file, /dev/nvidiaN; None where the kernel does
      not tell: then the files of all are open to its processes, whose CUDA sees
      this one alone.
    cores: of the processor, for its processes; none for all.
  """

  index: int
  uuid: str | None = None
  minor: int | None = None
  cores: tuple[int, ...] = ()

  @property
  def name(self) -> str:
    """Unique on this host, and a file name."""
    return self.uuid or f"emulated-{self.index}"

  @property
  def visible(self) -> str:
    """Of CUDA_VISIBLE_DEVICES: one device, whatever order CUDA has them in."""
    return self.uuid or str(self.index)

  @property
  def is_emulated(self) -> bool:
    return self.uuid is None


def parse(texts: Sequence[str]) -> tuple[int, ...]:
  """Indices of a flag.

  Raises:
    SpecPilotError: one that is no index, or that is named twice.
  """
  if not all(text.strip().isdecimal() for text in texts):
    raise SpecPilotError(
      f"devices must be indices as nvidia-smi lists them, got"
      f" {','.join(texts)!r}"
    )
  found = tuple(int(text) for text in texts)
  if len(set(found)) < len(found):
    raise SpecPilotError(f"devices must differ, got {','.join(texts)}")
  return found


def slots(
  devices: Sequence[int],
  gpus: Mapping[int, str] | None = None,
  cores: Sequence[int] | None = None,
) -> tuple[Slot, ...]:
  """Devices by index, with a share of the cores each.

  Two devices have cores of their own, so that their processes do not wait for
  each other; one alone has them all.

  Args:
    devices: indices.
    gpus: uuid by index; asked of the machine by default.
    cores: to share; by default those that this process may use.

  Raises:
    SpecPilotError: no such GPU; fewer cores than devices.
  """
  if not devices:
    return ()
  gpus = environment.gpu_uuids() if gpus is None else gpus
  if cores is None:
    cores = sorted(os.sched_getaffinity(0))
  if gpus:
    missing = [i for i in devices if i not in gpus]
    if missing:
      raise SpecPilotError(
        f"device {missing[0]} is not here; GPUs of this machine:"
        f" {', '.join(map(str, sorted(gpus)))}"
      )
  count = len(devices)
  if len(cores) < count:
    raise SpecPilotError(
      f"{count} devices need a processor core each, this process may use"
      f" {len(cores)}"
    )
  share = len(cores) // count
  return tuple(
    Slot(
      index=index,
      uuid=gpus.get(index),
      minor=_minor(gpus[index]) if index in gpus else None,
      cores=tuple(cores[i * share : (i + 1) * share]) if count > 1 else (),
    )
    for i, index in enumerate(devices)
  )


def _minor(uuid: str, folder: Path = _KERNEL_FOLDER) -> int | None:
  """Number of a GPU's device file, as the kernel's driver tells it."""
  try:
    for path in folder.glob("*/information"):
      lines = path.read_text().splitlines()
      told = {
        k.strip(): v.strip() for k, _, v in (x.partition(":") for x in lines)
      }
      if told.get("GPU UUID") == uuid and told["Device Minor"].isdecimal():
        return int(told["Device Minor"])
  except (OSError, KeyError):
    pass  # Some drivers do not show it.
  return None
