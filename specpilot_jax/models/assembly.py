"""Modules and their parameters by dotted name, without a copy.

A module is described by a function that makes it, of which only shapes are
evaluated: no random initial value is ever computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import w12_array
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import layers

Leaf = jax.Array | W12Array | FP8Array


def _flat(state) -> dict[str, nnx.Variable]:
  return {
    ".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)
  }


def structs(make: Callable[[], nnx.Module]) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of every parameter, in a fixed order."""
  _, state = nnx.split(nnx.eval_shape(make))
  return {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for name, leaf in sorted(_flat(state).items())
  }


def leaves(module: nnx.Module) -> dict[str, Leaf]:
  """What a module holds, by the names of `structs`."""
  _, state = nnx.split(module)
  return {name: leaf.get_value() for name, leaf in sorted(_flat(state).items())}


def parameters(module: nnx.Module) -> dict[str, Any]:
  """The arrays of a module, by the names of `structs`; W12 is decoded.

  FP8 stays FP8: no array multiplies as it does.
  """
  return {
    name: w12_array.decode(leaf) if isinstance(leaf, W12Array) else leaf
    for name, leaf in leaves(module).items()
  }


def check_names(
  what: str, wanted: Mapping[str, object], given: Mapping[str, object]
) -> None:
  """Refuses a missing and an unknown parameter."""
  for name in wanted:
    if name not in given:
      raise SpecPilotError(f"{what}: parameter {name!r} is missing")
  for name in given:
    if name not in wanted:
      raise SpecPilotError(f"{what}: unknown parameter {name!r}")


def assemble[M: nnx.Module](
  what: str,
  make: Callable[[], M],
  arrays: Mapping[str, Leaf],
  *,
  narrower: bool = False,
) -> M:
  """The module that `make` describes, around the given arrays.

  Args:
    what: for errors.
    make: makes the module; traced for shapes only.
    arrays: of the names, shapes and dtypes of `structs(make)`; they are used
      as they are, wherever they lie. Any matrix may be in W12 or FP8.
    narrower: whether matrices may be in bfloat16 where `make` has a wider
      dtype; products widen them.

  Raises:
    SpecPilotError: a missing or extra name, a wrong shape or dtype.
  """
  graphdef, state = nnx.split(nnx.eval_shape(make))
  check_names(what, _flat(state), arrays)
  leaves = []
  for path, leaf in nnx.to_flat_state(state):
    name = ".".join(map(str, path))
    array = arrays[name]
    # The values of a matrix in W12 are those of the same in bfloat16.
    widened = narrower and layers.is_matrix(name, array.shape)
    widened &= array.dtype == jnp.bfloat16
    packed = isinstance(array, W12Array) or widened
    fields = ("shape",) if packed else ("shape", "dtype")
    for field in fields:
      own, expected = getattr(array, field), getattr(leaf, field)
      if own != expected:
        raise SpecPilotError(
          f"{what}: parameter {name!r} has {field} {own}, expected {expected}"
        )
    leaves.append((path, leaf.replace(array)))
  return nnx.merge(graphdef, nnx.from_flat_state(leaves))
