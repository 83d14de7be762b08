"""Which implementation of an operation runs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Implementation = Literal["reference", "triton", "interpret"]
"""`reference`: plain JAX, the definition, on any device. `triton`: the Pallas
kernel on an NVIDIA GPU. `interpret`: the same kernel run step by step in JAX,
for tests."""

VerifyImplementation = Literal["reference", "triton", "interpret", "per_path"]
"""`per_path`: in plain JAX, each node's path recomputed from the root."""

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

W12Implementation = Literal["reference", "triton", "interpret", "mosaic"]
"""`mosaic`: the Pallas kernel for Hopper GPUs, which Mosaic GPU compiles."""

AttentionImplementation = W12Implementation
FP8Implementation = W12Implementation
"""The same choices."""

ALTERNATIVES = {
  "fp8_matmul": ("mosaic",),
  "gdn_verify": ("per_path",),
  "tree_attention": ("mosaic",),
  "w12_matmul": ("mosaic",),
}
"""What an operation has besides: other references for comparison, other
kernels."""


def is_kernel(implementation: str) -> bool:
  """Whether it is a Pallas kernel, on a GPU or interpreted."""
  return implementation in ("triton", "interpret", "mosaic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
  """The implementation of every operation that has a kernel.

  Passes over a run of prompt take the references, but for `gdn_prefill`,
  `prompt_attention` and the products with weights: `fp8_matmul` and
  `w12_matmul`, the latter up to the rows that it takes. Scores of a kernel's
  outputs come from the definition, those of runs and products too.

  Attributes:
    gdn_decode: a Gated DeltaNet mixer's one token (`gdn_decode.decode`).
    gdn_prefill: its run of prompt (`gdn_prefill.prefill`).
    gdn_verify: its nodes of a tree (`gdn_verify.verify`).
    gdn_commit: its state after an accepted path (`gdn_commit.commit`).
    tree_attention: `tree_attention.tree_attention`, the drafter's too.
    prompt_attention: that of a run of prompt.
    w12_matmul: rows times weights in W12 (`w12_matmul.matmul`).
    fp8_matmul: rows times weights in FP8 (`fp8_matmul.matmul`).
    add_norm: its residual sums and their norms (`add_norm.add_norm`).
    tree_growth: trees over a drafter's lattice (`tree_growth.grow`), and the
      order of its candidates (`tree_table.table`).
  """

  gdn_decode: Implementation = "reference"
  gdn_prefill: Implementation = "reference"
  gdn_verify: VerifyImplementation = "reference"
  gdn_commit: Implementation = "reference"
  tree_attention: AttentionImplementation = "reference"
  prompt_attention: Implementation = "reference"
  w12_matmul: W12Implementation = "reference"
  fp8_matmul: FP8Implementation = "reference"
  add_norm: Implementation = "reference"
  tree_growth: Implementation = "reference"

  @classmethod
  def all(cls, implementation: Implementation) -> "Kernels":
    """One implementation for every operation."""
    return cls(**dict.fromkeys(cls.operations(), implementation))

  @property
  def in_runs(self) -> bool:
    """Whether any is taken by passes over a run of prompt."""
    own = (
      self.gdn_prefill,
      self.prompt_attention,
      self.w12_matmul,
      self.fp8_matmul,
    )
    return any(map(is_kernel, own))

  @classmethod
  def operations(cls) -> tuple[str, ...]:
    """Names of the operations."""
    return tuple(field.name for field in dataclasses.fields(cls))


REFERENCE = Kernels()

_SHARED_MEMORY = {"H100": 227 << 10, "H200": 227 << 10}
_LEAST_SHARED_MEMORY = 99 << 10


def _device():
  """What is compiled for: the abstract device of the mesh in use, else the
  first device."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.abstract_device or jax.devices()[0]


def multiprocessors(unknown: int) -> int:
  """Of the GPU that is compiled for; `unknown` for what has none."""
  device = _device()
  for name in ("num_cores", "core_count"):
    if count := getattr(device, name, None):
      return count
  return unknown


def shared_memory() -> int:
  """Bytes of shared memory that a program may have (CUDA Programming Guide).

  Of the GPU that is compiled for. Those that are not known may have as little
  as a GPU of compute capability 12, an RTX PRO 6000.
  """
  device = _device()
  for name, size in _SHARED_MEMORY.items():
    if name in device.device_kind:
      return size
  return _LEAST_SHARED_MEMORY


def by_requests(kernel: Callable[..., Any]) -> Callable[..., Any]:
  """A function of arrays, which `vmap` maps over requests.

  Args:
    kernel: takes how many requests there are, then the arrays of one of them;
      it is mapped where there are several.
  """

  @jax.custom_batching.custom_vmap
  def one(*operands):
    return kernel(1, *operands)

  @one.def_vmap
  def several(requests, batched, *operands):
    axes = tuple(0 if x else None for x in batched)
    mapped = jax.vmap(functools.partial(kernel, requests), in_axes=axes)
    found = mapped(*operands)
    return found, jax.tree.map(lambda _: True, found)

  return one


def once(*static: str):
  """Of a function around a kernel: a jit of its own, which XLA inlines.

  A model calls few kernels in hundreds of places; without it each of them is
  traced and lowered anew (by Mosaic GPU also compiled), seconds in all for a
  step of 64 layers or minutes.

  Who changes a number of a module that such a function reads has to clear
  JAX's caches.

  Args:
    static: names of arguments that are not arrays.
  """
  return functools.partial(jax.jit, static_argnames=static)
