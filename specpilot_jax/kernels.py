"""The choice of kernels: as text, and whether a model can run with it."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import (
  dispatch,
  gdn_verify,
  tree_hopper,
  w12_hopper,
  w12_matmul,
)
from pallas_kernels.dispatch import ALTERNATIVES, IMPLEMENTATIONS, Kernels
from specpilot_jax.configs import GDN, MAX_NODES, ModelConfig
from specpilot_jax.errors import SpecPilotError

_GDN_SIZES = ("gdn_key_head_dim", "gdn_value_head_dim")
_POWERS_OF_TWO = {
  "gdn_decode": _GDN_SIZES,
  "gdn_prefill": _GDN_SIZES,
  "gdn_verify": _GDN_SIZES,
  "gdn_commit": _GDN_SIZES,
  "tree_attention": ("head_dim",),
  "prompt_attention": ("head_dim",),
}
"""Sizes that a kernel's tiles are made of."""


def parse(text: str) -> Kernels:
  """`reference`, `triton` or `interpret`, op=implementation,..., or both.

  Operations that a list leaves out take the word that it begins with, or the
  reference: `triton,w12_matmul=mosaic`. Some have alternatives of their own
  (`dispatch.ALTERNATIVES`).

  Raises:
    SpecPilotError: an unknown operation or implementation, one named twice.
  """
  word, *parts = text.split(",")
  kernels = Kernels()
  if "=" in word:
    parts = [word, *parts]
  else:
    kernels = Kernels.all(_implementation(word.strip(), "kernels"))
  chosen: dict[str, Any] = {}
  for part in parts:
    name, _, value = (x.strip() for x in part.partition("="))
    if name not in Kernels.operations():
      raise SpecPilotError(
        f"kernels: unknown operation {name!r}; operations:"
        f" {', '.join(Kernels.operations())}"
      )
    if name in chosen:
      raise SpecPilotError(f"kernels: {name} is given twice")
    chosen[name] = _implementation(
      value, f"kernels: {name}", ALTERNATIVES.get(name, ())
    )
  return dataclasses.replace(kernels, **chosen)


def _implementation(
  text: str, what: str, alternatives: tuple[str, ...] = ()
) -> Any:
  known = (*IMPLEMENTATIONS, *alternatives)
  if text not in known:
    choices = " or ".join((", ".join(known[:-1]), known[-1]))
    raise SpecPilotError(f"{what} must be {choices}, got {text!r}")
  return text


def check(kernels: Kernels, config: ModelConfig, dtype: str) -> None:
  """Refuses kernels that a model cannot run here.

  Args:
    kernels: the choice.
    config: of the target.
    dtype: of its weights.

  Raises:
    SpecPilotError: a kernel without an NVIDIA GPU that runs it, a dtype or a
      head size that a kernel does not take.
  """
  for name, implementation in as_dict(kernels).items():
    if not dispatch.is_kernel(implementation):
      continue
    compiled = implementation != "interpret"
    if compiled and jax.default_backend() != "gpu":
      raise SpecPilotError(
        f"kernel {name}: {implementation} needs an NVIDIA GPU, JAX runs on"
        f" {jax.default_backend()}; take reference"
      )
    if implementation == "mosaic" and not _is_hopper(jax.devices()[0]):
      raise SpecPilotError(
        f"kernel {name}: mosaic needs a Hopper GPU (compute capability 9.0),"
        f" not {jax.devices()[0].device_kind}; take triton"
      )
    if name == "tree_attention" and implementation == "mosaic":
      if dtype != "bfloat16":
        raise SpecPilotError(
          f"kernel {name}: mosaic takes bfloat16, not {dtype}; take triton"
        )
      _check_hopper_head(config.name, config.head_dim)
    if dtype not in ("bfloat16", "float32"):
      raise SpecPilotError(
        f"kernel {name}: {implementation} takes bfloat16 and float32, not"
        f" {dtype}"
      )
    for field in _POWERS_OF_TWO.get(name, ()):
      _check_size(name, config.name, field, getattr(config, field))


def _is_hopper(device: jax.Device) -> bool:
  return getattr(device, "compute_capability", None) == "9.0"


def check_drafter(kernels: Kernels, name: str, head_dim: int) -> None:
  """Refuses kernels that a drafter's attention cannot run with.

  Raises:
    SpecPilotError: a head size that `tree_attention` does not take.
  """
  if kernels.tree_attention != "reference":
    _check_size("tree_attention", name, "head_dim", head_dim)
  if kernels.tree_attention == "mosaic":
    _check_hopper_head(name, head_dim)


def _check_hopper_head(model: str, size: int) -> None:
  if size not in tree_hopper.DIMS:
    raise SpecPilotError(
      f"kernel tree_attention: {model} has head_dim {size}, mosaic takes one of"
      f" {tree_hopper.DIMS}; take triton"
    )


def _check_size(kernel: str, model: str, field: str, size: int) -> None:
  if size & (size - 1):
    raise SpecPilotError(
      f"kernel {kernel}: {model} has {field} {size}, expected a power of two"
    )


GDN_PATH = 32
"""Nodes of a path at most: the depth to which the kernel `gdn_verify` has to be
exact (DESIGN section 4)."""


def longest_path(kernels: Kernels, config: ModelConfig) -> int:
  """Nodes of a root path that a target's passes can verify."""
  recurrent = GDN in config.layer_types
  if recurrent and dispatch.is_kernel(kernels.gdn_verify):
    return GDN_PATH
  return MAX_NODES


def check_passes(
  kernels: Kernels,
  nodes: int,
  prefill_chunk: int,
  weights: str,
  *,
  path: int = 1,
  dtype: str = "bfloat16",
  recurrent: bool = True,
) -> None:
  """Refuses passes that would take the wrong implementation.

  Args:
    nodes: of a verify pass at most.
    prefill_chunk: tokens of a pass over prompt or scored text.
    weights: of the target, one of `configs.WEIGHTS`.
    path: nodes of a root path at most.
    dtype: of activations.
    recurrent: whether the target has Gated DeltaNet layers.

  Raises:
    SpecPilotError: more nodes, or a longer path, than a kernel takes, or
      another dtype; chunks
      of so few tokens that they would be computed by the kernels that scoring
      is to judge.
  """
  limit = gdn_verify.MAX_NODES
  if kernels.gdn_verify == "triton":
    limit = gdn_verify.max_nodes(dispatch.shared_memory())
  recurrent = recurrent and dispatch.is_kernel(kernels.gdn_verify)
  if recurrent and nodes > limit:
    raise SpecPilotError(
      f"kernel gdn_verify takes at most {limit} nodes, a pass has {nodes}"
    )
  if recurrent and path > GDN_PATH:
    raise SpecPilotError(
      f"kernel gdn_verify takes paths of at most {GDN_PATH} nodes, a pass has"
      f" one of {path}; limit num_drafts or tree_depth"
    )
  check_products(kernels, nodes, weights, dtype=dtype)
  if kernels != dispatch.REFERENCE and prefill_chunk == 1:
    raise SpecPilotError(
      "prefill_chunk must be at least 2 with kernels other than the"
      " references, which compute scores"
    )


def check_products(
  kernels: Kernels, nodes: int, weights: str, *, dtype: str
) -> None:
  """Refuses passes whose products with weights would decode matrices.

  Args:
    nodes: of a pass at most.
    weights: that it reads, one of `configs.WEIGHTS`.
    dtype: of activations.

  Raises:
    SpecPilotError: more nodes than the kernel takes, or another dtype.
  """
  packed = kernels.w12_matmul != "reference" and weights == "w12"
  if packed and dtype != "bfloat16":
    raise SpecPilotError(
      f"kernel w12_matmul takes bfloat16, not {dtype}; take its reference"
    )
  most = w12_rows(kernels)
  if packed and nodes > most:
    raise SpecPilotError(
      f"kernel w12_matmul takes at most {most} rows, a pass has {nodes} nodes"
    )


def w12_rows(kernels: Kernels) -> int:
  """Rows that the chosen kernel for large matrices in W12 takes."""
  if kernels.w12_matmul == "mosaic":
    return w12_hopper.MAX_ROWS
  return w12_matmul.MAX_ROWS


def check_rows(kernels: Kernels, rows: int, weights: str) -> None:
  """Refuses passes of more rows than their products are made for.

  Args:
    rows: of a pass over several requests.
    weights: of the target, one of `configs.WEIGHTS`.

  Raises:
    SpecPilotError: more than the kernel for W12 takes: such a product would
      decode the matrix for every pass, and be slower than without W12.
  """
  packed = kernels.w12_matmul != "reference" and weights == "w12"
  most = w12_rows(kernels)
  if packed and rows > most:
    raise SpecPilotError(
      f"kernel w12_matmul takes at most {most} rows, a pass over several"
      f" requests has {rows}; take fewer slots, a packed pass of fewer rows, or"
      " weights=bf16"
    )


def as_dict(kernels: Kernels) -> dict[str, str]:
  """Implementation by operation, for records."""
  return {name: getattr(kernels, name) for name in Kernels.operations()}
