"""Lowers Pallas kernels for GPUs that this machine does not have."""

import contextlib

import jax

GPUS = {
  "NVIDIA H100 80GB HBM3": 132,
  "NVIDIA H200": 132,
  "NVIDIA RTX PRO 6000 Blackwell Server Edition": 188,
}
"""Streaming multiprocessors by device kind."""


SERVERS = GPUS | {"NVIDIA B200": 148}
"""Those, and one that no flag file is for."""


def on(gpu: str) -> contextlib.AbstractContextManager:
  """Traces and lowers for a GPU; a key of `SERVERS`."""
  device = jax.sharding.AbstractDevice(gpu, SERVERS[gpu], "cuda")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


def lower(function, gpu: str, *arguments) -> str:
  """StableHLO text of a jitted function for a GPU.

  Args:
    gpu: a key of `SERVERS`.
    arguments: `jax.ShapeDtypeStruct`s.
  """
  with on(gpu):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
