"""Lowers Pallas kernels for GPUs that this machine does not have."""

import jax

GPUS = {
  "NVIDIA H100 80GB HBM3": 132,
  "NVIDIA H200": 132,
  "NVIDIA RTX PRO 6000 Blackwell Server Edition": 188,
}
"""Streaming multiprocessors by device kind."""


def lower(function, gpu: str, *arguments) -> str:
  """StableHLO text of a jitted function for a GPU.

  Args:
    gpu: a key of `GPUS`.
    arguments: `jax.ShapeDtypeStruct`s.
  """
  device = jax.sharding.AbstractDevice(gpu, GPUS[gpu], "cuda")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
