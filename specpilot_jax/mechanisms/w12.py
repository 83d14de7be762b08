"""Weights in W12: three quarters of the bytes, not one bit of them changed.

Every matrix that is multiplied becomes a `W12Array`; what is added or scaled
by, and the convolutions, stay as they are. Activations keep their dtype: where
a model computes in float32 or float64, its weights must be bfloat16 values.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array

from pallas_kernels import w12_array
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import w12 as codec
from specpilot_jax.checkpoints import w12_device
from specpilot_jax.configs import EXACT
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from specpilot_jax.models.target import Target


def encode(name: str, weight: Array) -> W12Array:
  """A parameter in W12, on its device, with planes tile by tile.

  Args:
    name: for errors.
    weight: [O, I] of any float dtype.

  Raises:
    SpecPilotError: a value that bfloat16 does not hold.
  """
  if jax.default_backend() == "cpu":
    # NumPy is several times as fast there, and compiles nothing.
    host = np.asarray(weight)
    rounded = host.astype(ml_dtypes.bfloat16)
    _refuse_changed(name, weight, (rounded.astype(host.dtype) != host).sum())
    return w12_array.tile(jax.tree.map(jnp.asarray, codec.encode(rounded)))
  packed = weight.astype(jnp.bfloat16)
  _refuse_changed(name, weight, (packed.astype(weight.dtype) != weight).sum())
  return w12_device.encode_on_device(packed)


def _refuse_changed(name: str, weight: Array, changed) -> None:
  if int(changed):
    raise SpecPilotError(
      f"weights=w12: {int(changed)} of {weight.size} values of {name!r} are not"
      " bfloat16 ones"
    )


def hold(name: str, leaf: assembly.Leaf) -> assembly.Leaf:
  """What a model in W12 holds of a parameter: matrices are encoded.

  Raises:
    SpecPilotError: as `encode`.
  """
  if isinstance(leaf, W12Array):
    return w12_array.tile(leaf)
  if isinstance(leaf, FP8Array):
    raise SpecPilotError(
      f"weights=w12: {name!r} is in FP8, W12 holds bfloat16 matrices alone"
    )
  if not layers.is_matrix(name, leaf.shape):
    return leaf
  return encode(name, leaf)


def _encoded(leaves: dict[str, assembly.Leaf]) -> dict[str, assembly.Leaf]:
  return {name: hold(name, leaf) for name, leaf in leaves.items()}


def target(model: Target) -> Target:
  """The same target with its matrices in W12.

  Raises:
    SpecPilotError: as `encode`.
  """
  arrays = _encoded(assembly.leaves(model))
  return target_lib.assemble(model.config, arrays, model.dtype, model.kernels)


def drafter(
  model: Drafter | None, target: Target, *, view: str = EXACT
) -> Drafter | None:
  """The same drafter for a target in W12, whose embedding and head it uses.

  Args:
    view: what its products read of the matrices, one of
      `configs.DRAFTER_VIEWS`. Whatever it drafts, it changes no output.

  Raises:
    SpecPilotError: as `encode`; a view of a drafter without weights.
  """
  if not isinstance(model, DFlashDrafter):
    if model is not None and view != EXACT:
      raise SpecPilotError(
        f"drafter_view={view} is of a drafter's weights, {model.name} has none"
      )
    return model
  own = model.model()
  arrays = _encoded(assembly.leaves(own))

  def make() -> DFlash:
    return learned.module(own.config, own.dtype, nnx.Rngs(0))

  return learned.drafter(
    assembly.assemble(own.config.name, make, arrays),
    target,
    candidates=model.candidates,
    view=None if view == EXACT else view,
  )
