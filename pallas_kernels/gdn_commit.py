"""The state of a Gated DeltaNet layer after an accepted path.

In plain JAX the sum over the path is written out and read again, as large as
the state itself; the kernel reads and writes the state once, in place.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gated_delta

COLUMNS, NUM_WARPS = 64, 4
"""Of a value head's state per program, and its warps. 16 nodes at 27B shapes on
an H200: 5.3 us; nothing else was tried."""


def commit(
  state: Float[Array, "Hv K V"],
  k: Float[Array, "N Hk K"],
  u: Float[Array, "N Hv V"],
  decay: Float[Array, "N Hv"],
  path: Int[Array, " P"],
  count: Int[Array, ""],
  *,
  implementation: dispatch.Implementation = "reference",
) -> Float[Array, "Hv K V"]:
  """`gated_delta.commit`.

  Args:
    implementation: the kernel takes float32.
  """
  if implementation != "reference":
    return _commit_kernel(state, k, u, decay, path, count, implementation)
  return gated_delta.commit(state, k, u, decay, path, count)


def _program(
  k_ref,
  u_ref,
  decay_ref,
  path_ref,
  count_ref,
  state_ref,
  after_ref,
  *,
  rows,
  precision,
):
  """One value head, some columns of its state."""
  index = lax.iota(jnp.int32, rows)
  count = count_ref[0]
  on_path = index < count
  node = path_ref[jnp.minimum(index, path_ref.shape[0] - 1)]
  node = jnp.where(on_path, node, 0)
  decay = decay_ref[node]
  last = jnp.sum(jnp.where(index == count - 1, decay, 0.0))
  weight = jnp.exp(jnp.where(on_path, last - decay, 0.0))
  k = jnp.where(on_path[:, None], k_ref[node, :], 0.0)
  u = jnp.where(on_path[:, None], u_ref[node, :] * weight[:, None], 0.0)
  added = jnp.dot(
    k.T, u, precision=precision, preferred_element_type=jnp.float32
  )
  # Without a path the last decay is 0.
  after_ref[...] = jnp.exp(last) * state_ref[...] + added


def _commit_kernel(state, k, u, decay, path, count, implementation):
  if state.dtype != jnp.float32:
    raise ValueError(f"commit's kernel takes float32, not {state.dtype}")
  heads, key_dim, value_dim = state.shape
  n, key_heads, _ = k.shape
  repeat = heads // key_heads
  columns = math.gcd(COLUMNS, value_dim)
  tile = pl.BlockSpec(
    (None, key_dim, columns), lambda head, block: (head, 0, block)
  )
  count = jnp.asarray(count, jnp.int32).reshape(1)
  interpret = implementation == "interpret"
  return pl.pallas_call(
    functools.partial(
      _program,
      rows=max(16, 1 << (path.shape[0] - 1).bit_length()),
      precision=lax.Precision.HIGHEST
      if interpret
      else lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    ),
    grid=(heads, value_dim // columns),
    in_specs=[
      pl.BlockSpec(
        (n, None, key_dim), lambda head, block: (0, head // repeat, 0)
      ),
      pl.BlockSpec((n, None, columns), lambda head, block: (0, head, block)),
      pl.BlockSpec((n, None), lambda head, block: (0, head)),
      pl.BlockSpec(path.shape, lambda head, block: (0,)),
      pl.BlockSpec((1,), lambda head, block: (0,)),
      tile,
    ],
    out_specs=tile,
    out_shape=jax.ShapeDtypeStruct(state.shape, jnp.float32),
    input_output_aliases={5: 0},  # each program reads its own tile
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS),
    interpret=interpret,
    name="gdn_commit",
  )(k, u, decay, path.astype(jnp.int32), count, state)
