"""An FP8 target from one in bfloat16, for models of which none is released.

What released checkpoints have in e4m3 is rounded as those are: blocks of 128
rows and columns, the largest number of a block 448. It is another model than
the one that it was made of.
"""

import functools

import jax

from pallas_kernels import fp8_array
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import fp8 as form
from specpilot_jax.checkpoints.layout import Fused, layout
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.target import Target

_quantize = functools.partial(jax.jit, static_argnums=1)(fp8_array.quantize)


def hold(
  config: ModelConfig, block: tuple[int, int] | None = form.BLOCKS
) -> "Hold":
  """What a model in FP8 holds of each parameter; see `Hold`."""
  return Hold(layout(config), block)


class Hold:
  """Called with a parameter's name and array: matrices become codes.

  Args:
    table: tensors of the parameters.
    block: rows and columns of a scale; None has one for each row.
  """

  def __init__(self, table: dict[str, Fused], block: tuple[int, int] | None):
    self._table = table
    self._block = block

  def __call__(self, name: str, leaf: assembly.Leaf) -> assembly.Leaf:
    """Raises SpecPilotError for a matrix in W12."""
    fused = self._table[name]
    if isinstance(leaf, FP8Array) or not any(map(form.converted, fused.parts)):
      return leaf
    if isinstance(leaf, W12Array):
      raise SpecPilotError(
        f"weights=fp8: {name!r} is in W12, FP8 is made of bfloat16 matrices"
      )
    coded, start = [], 0
    count = form.split_rows(fused, name, form.converted)
    for part in fused.parts[:count]:
      rows, columns = part.shape
      size = (1, columns) if self._block is None else self._block
      coded.append(_quantize(leaf[start : start + rows], size))
      start += rows
    rest = [] if start == leaf.shape[0] else [leaf[start:]]
    return form.join(coded, rest, self._block).astype(leaf.dtype)


def target(
  model: Target, block: tuple[int, int] | None = form.BLOCKS
) -> Target:
  """The same target with its matrices in FP8.

  Raises:
    SpecPilotError: matrices in W12.
  """
  convert = hold(model.config, block)
  arrays = {
    name: convert(name, leaf) for name, leaf in assembly.leaves(model).items()
  }
  return target_lib.assemble(model.config, arrays, model.dtype, model.kernels)
