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


def swiglu(
  x: Float[Array, " I"],
  gate_up: Float[Array, "O2 I"],
  *,
  implementation: dispatch.Implementation = "reference",
) -> Float[Array, " O"]:
  """silu(W_gate x) * W_up x, each product rounded to the dtype of x.

  Args:
    gate_up: gate rows, then as many up rows.
    implementation: as of `matvec`.
  """
  if implementation != "reference":
    return _matvec_kernel(x, gate_up, x.dtype, implementation, gated=True)
  gate, up = jnp.split(matvec(x, gate_up, out_dtype=x.dtype), 2)
  return jax.nn.silu(gate) * up


def _program(x_ref, *refs, block):
  """Some rows of a matrix; or of a gate and of the matrix that it gates."""
  *weight_refs, out_ref = refs
  rows, size = weight_refs[0].shape

  def body(i, totals):
    at = pl.ds(i * block, block)
    x = x_ref[at].astype(jnp.float32)[None, :]
    return [
      total + weight_ref[:, at].astype(jnp.float32) * x
      for total, weight_ref in zip(totals, weight_refs, strict=True)
    ]

  totals = [jnp.zeros((rows, block), jnp.float32) for _ in weight_refs]
  totals = lax.fori_loop(0, size // block, body, totals)
  gate, *up = (t.sum(axis=1).astype(out_ref.dtype) for t in totals)
  if up:
    gate, up = (y.astype(jnp.float32) for y in (gate, *up))
    gate = gate * jax.nn.sigmoid(gate) * up
  out_ref[...] = gate.astype(out_ref.dtype)


def _matvec_kernel(x, weight, out_dtype, implementation, gated=False):
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"matvec's kernel does not take {x.dtype}")
  parts = 2 if gated else 1
  outputs, size = weight.shape[0] // parts, weight.shape[1]
  rows, block = math.gcd(outputs, ROWS // parts), math.gcd(size, BLOCK)

  def part(k):
    first = k * outputs // rows
    return pl.BlockSpec((rows, size), lambda i: (first + i, 0))

  return pl.pallas_call(
    functools.partial(_program, block=block),
    grid=(outputs // rows,),
    in_specs=[
      pl.BlockSpec((size,), lambda i: (0,)),
      *(part(k) for k in range(parts)),
    ],
    out_specs=pl.BlockSpec((rows,), lambda i: (i,)),
    out_shape=jax.ShapeDtypeStruct((outputs,), out_dtype),
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS),
    interpret=implementation == "interpret",
    name="swiglu" if gated else "matvec",
  )(x, *[weight] * parts)
