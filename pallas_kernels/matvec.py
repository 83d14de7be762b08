"""A weight matrix times one row, as autoregressive decoding reads weights.

Nothing is reused, so that only memory matters: each program streams a few rows
of the matrix and keeps many loads in flight, without tensor cores.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import dispatch

ROWS, BLOCK, NUM_WARPS = 8, 512, 4
"""Rows per program, and columns of them that are read at a time. No card has
been measured; for sm_90a they leave four 16-byte loads in flight per thread
and room for seven programs per multiprocessor (72 registers)."""


def matvec(
  x: Float[Array, " I"],
  weight: Float[Array, "O I"],
  *,
  out_dtype,
  implementation: dispatch.Implementation = "reference",
) -> Float[Array, " O"]:
  """W x, accumulated in at least float32 and rounded once.

  Args:
    implementation: the kernel takes bfloat16 and float32 of any size; sizes
      that are no multiples of `ROWS` and `BLOCK` are slow.
  """
  if implementation != "reference":
    return _matvec_kernel(x, weight, out_dtype, implementation)
  return jnp.einsum(
    "i,oi->o",
    x,
    weight,
    # float32 means float32 on a GPU too.
    precision=None if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
    preferred_element_type=out_dtype,
  )


def _program(x_ref, weight_ref, out_ref, *, block):
  rows, size = weight_ref.shape

  def body(i, total):
    at = pl.ds(i * block, block)
    weight = weight_ref[:, at].astype(jnp.float32)
    return total + weight * x_ref[at].astype(jnp.float32)[None, :]

  total = jnp.zeros((rows, block), jnp.float32)
  total = lax.fori_loop(0, size // block, body, total)
  out_ref[...] = total.sum(axis=1).astype(out_ref.dtype)


def _matvec_kernel(x, weight, out_dtype, implementation):
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"matvec's kernel does not take {x.dtype}")
  outputs, size = weight.shape
  rows, block = math.gcd(outputs, ROWS), math.gcd(size, BLOCK)
  return pl.pallas_call(
    functools.partial(_program, block=block),
    grid=(outputs // rows,),
    in_specs=[
      pl.BlockSpec((size,), lambda i: (0,)),
      pl.BlockSpec((rows, size), lambda i: (i, 0)),
    ],
    out_specs=pl.BlockSpec((rows,), lambda i: (i,)),
    out_shape=jax.ShapeDtypeStruct((outputs,), out_dtype),
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS),
    interpret=implementation == "interpret",
    name="matvec",
  )(x, weight)
