"""The device table: what a card can do at most, in one place.

Peaks are the makers' nominal figures: dense (without structured sparsity), with
float32 accumulation, at boost clock. bfloat16 and float8 are tensor-core rates,
float32 is the rate of ordinary multiply-adds, which float32 products at full
precision use.
"""

import dataclasses

from specpilot_jax.errors import SpecPilotError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """Nominal figures of one card.

  Attributes:
    name: for people.
    kinds: JAX's `device_kind` of it.
    bfloat16, float8, float32: peak dense FLOP/s.
    bandwidth: of the memory, in bytes per second.
    memory_bytes: nominal size; a little of it is not for programs.
    compute_capability: CUDA's.
  """

  name: str
  kinds: tuple[str, ...]
  bfloat16: float
  float8: float
  float32: float
  bandwidth: float
  memory_bytes: int
  compute_capability: tuple[int, int]

  def peak(self, dtype: str) -> float:
    """Peak dense FLOP/s of products in a dtype.

    Raises:
      SpecPilotError: a dtype without a figure (float64 is for proofs alone).
    """
    peaks = {
      "bfloat16": self.bfloat16,
      "float8": self.float8,
      "float32": self.float32,
    }
    if dtype not in peaks:
      raise SpecPilotError(
        f"{self.name}: no peak of {dtype} products is known (of"
        f" {', '.join(peaks)} it is)"
      )
    return peaks[dtype]


DEVICES = (
  # H100 and H200 data sheets; the tensor-core figures there are with sparsity,
  # twice these.
  Device(
    name="H100 SXM 80GB",
    kinds=("NVIDIA H100 80GB HBM3",),
    bfloat16=989.4e12,
    float8=1978.9e12,
    float32=66.9e12,
    bandwidth=3.35e12,
    memory_bytes=80 * 10**9,
    compute_capability=(9, 0),
  ),
  Device(
    name="H200",
    kinds=("NVIDIA H200",),
    bfloat16=989.4e12,
    float8=1978.9e12,
    float32=66.9e12,
    bandwidth=4.8e12,
    memory_bytes=141 * 10**9,
    compute_capability=(9, 0),
  ),
  # RTX Blackwell PRO architecture paper.
  Device(
    name="RTX PRO 6000 Blackwell",
    kinds=(
      "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
      "NVIDIA RTX PRO 6000 Blackwell",
    ),
    bfloat16=503.8e12,
    float8=1007.6e12,
    float32=125.95e12,
    bandwidth=1.792e12,
    memory_bytes=96 * 10**9,
    compute_capability=(12, 0),
  ),
  # Its data sheet gives float32 and bandwidth; the tensor-core rates are those
  # of the workstation card at the clock that its float32 rate implies.
  Device(
    name="RTX PRO 6000 Blackwell Server",
    kinds=("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
    bfloat16=480e12,
    float8=960e12,
    float32=120e12,
    bandwidth=1.597e12,
    memory_bytes=96 * 10**9,
    compute_capability=(12, 0),
  ),
)  # fmt: skip


CARDS = dict(zip(("h100", "h200", "rtx_pro_6000"), DEVICES[:3], strict=True))
"""Cards that flag files are for."""


def lookup(device_kind: str) -> Device:
  """The entry of a JAX `device_kind`.

  Raises:
    SpecPilotError: a device that the table does not have.
  """
  for device in DEVICES:
    if device_kind in device.kinds:
      return device
  raise SpecPilotError(
    f"device {device_kind!r} is not in the device table (there:"
    f" {', '.join(device.name for device in DEVICES)})"
  )
