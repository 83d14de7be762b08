"""Which implementation of an operation runs."""

from typing import Literal

Implementation = Literal["reference", "triton", "interpret"]
"""`reference`: plain JAX, the definition, on any device. `triton`: the Pallas
kernel on an NVIDIA GPU. `interpret`: the same kernel run step by step in JAX,
for tests."""
