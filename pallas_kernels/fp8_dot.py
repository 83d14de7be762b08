"""A product of two tiles of e4m3 in the FP8 units of the card, for Triton.

`jnp.dot` in a Pallas kernel leaves Triton's `max_num_imprecise_acc` at 0, which
forbids the units of compute capability 9.0 (`QGMMA`, whose sums keep fewer bits
than float32) and makes float16 of both tiles instead. Here it is the depth of
the tile: sums of one product are the unit's, and the caller adds products in
float32. The units want 64 rows of the left tile, 16 of the right one and four
warps; smaller tiles are converted all the same.
"""

import jax.numpy as jnp
from jax import lax
from jax._src.pallas.triton import lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect
from jaxtyping import Array, Float

_dot = Primitive("fp8_dot")


def dot(
  left: Float[Array, "M K"], right: Float[Array, "N K"]
) -> Float[Array, "M N"]:
  """left right^T in float32, of e4m3 tiles; in a Triton kernel, or in JAX."""
  return _dot.bind(left, right)


def _plain(left, right):
  return lax.dot_general(
    left.astype(jnp.float32),
    right.astype(jnp.float32),
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST,
  )


@_dot.def_abstract_eval
def _result(left, right):
  return ShapedArray((left.shape[0], right.shape[0]), jnp.float32)


_dot.def_impl(_plain)
mlir.register_lowering(_dot, mlir.lower_fun(_plain, multiple_results=False))


@lowering.register_lowering(_dot)
def _lower(ctx, left, right):
  (rows, depth), (columns, _) = (aval.shape for aval in ctx.avals_in)
  kind = ir.RankedTensorType.get([rows, columns], ir.F32Type.get())
  zeros = lowering._zeros(kind)
  right = dialect.trans(right, (1, 0))
  return dialect.dot(left, right, zeros, max_num_imprecise_acc=depth)
