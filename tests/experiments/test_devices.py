"""The device table."""

import re

import pytest

from experiments import devices
from specpilot_jax.errors import SpecPilotError


def test_every_kind_names_one_device():
  kinds = [kind for device in devices.DEVICES for kind in device.kinds]
  assert len(kinds) == len(set(kinds))
  for device in devices.DEVICES:
    for kind in device.kinds:
      assert devices.lookup(kind) is device


@pytest.mark.parametrize(
  ("kind", "bandwidth", "capability"),
  [
    ("NVIDIA H100 80GB HBM3", 3.35e12, (9, 0)),
    ("NVIDIA H200", 4.8e12, (9, 0)),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1.792e12, (12, 0)),
  ],
)
def test_figures(kind, bandwidth, capability):
  device = devices.lookup(kind)
  assert device.bandwidth == bandwidth
  assert device.compute_capability == capability
  # Dense figures: the data sheets' are with sparsity, twice these.
  assert device.peak("float8") == pytest.approx(
    2 * device.peak("bfloat16"), rel=1e-3
  )
  assert device.float32 < device.bfloat16


def test_unknown_device():
  # An H100 of another form has another bandwidth.
  with pytest.raises(SpecPilotError, match="'NVIDIA H100 PCIe'.*H200"):
    devices.lookup("NVIDIA H100 PCIe")


def test_unknown_peak():
  with pytest.raises(SpecPilotError, match=re.escape("float64")):
    devices.lookup("NVIDIA H200").peak("float64")
