"""Nodes of a tree through a Gated DeltaNet mixer, behind its convolution.

Gates, normalised keys and queries, and the tree form of the delta rule: in
plain JAX a dozen operations per layer, as a kernel a single launch.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float

from pallas_kernels import dispatch, gated_delta


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the kernel is cut.

  Attributes:
    columns: of a value head's state per program at most.
    num_warps: per program.
  """

  columns: int
  num_warps: int


# By padded nodes. On an H200 (27B shapes) 16 nodes take 12.8 us; 64 columns and
# 8 warps take 13.4. A prototype of the larger ones: 20.3 and 26.9 us.
TILES = {
  16: Tile(columns=32, num_warps=4),
  32: Tile(columns=64, num_warps=8),
  64: Tile(columns=32, num_warps=4),
}


def max_nodes(memory: int, key_dim: int = 128) -> int:
  """The most nodes that the kernel takes on a GPU.

  Triton keeps keys and queries of all nodes in shared memory, in two layouts
  each: 128 kB for 64 nodes with keys of 128 numbers.

  Args:
    memory: shared memory of a program in bytes.
    key_dim: K.
  """
  return max(n for n in TILES if 4 * 4 * n * key_dim <= memory)


def verify(
  mixed: Float[Array, "N C"],
  projected: Float[Array, "N P"],
  a_log: Float[Array, " Hv"],
  dt_bias: Float[Array, " Hv"],
  state: Float[Array, "Hv K V"],
  mask: Bool[Array, "N N"],
  *,
  key_heads: int,
  implementation: dispatch.Implementation = "reference",
) -> tuple[
  Float[Array, "N Hv V"],
  Float[Array, "N Hk K"],
  Float[Array, "N Hv V"],
  Float[Array, "N Hv"],
]:
  """`gated_delta.tree_verify` of what `gated_delta.prepare` makes.

  Args:
    mixed: [q | k | v] behind convolution and activation, in the state's dtype.
    projected: its last columns are [b | a]; the others are not read.
    state: float32 (float64 in the reference).
    mask: mask[i, j] is True where j is i or an ancestor of i; parents come
      before their children.
    key_heads: Hk; C = 2 Hk K + Hv V.
    implementation: the kernel takes float32 and up to 64 nodes.

  Returns:
    Outputs before the gated norm, and what `gated_delta.commit` needs:
    normalised keys, updates u, path log-decays.
  """
  if implementation != "reference":
    return _verify_kernel(
      mixed, projected, a_log, dt_bias, state, mask, key_heads, implementation
    )
  heads, key_dim, _ = state.shape
  b, a = jnp.split(projected[:, -2 * heads :].astype(state.dtype), 2, axis=-1)
  q, k, v, g, beta = gated_delta.prepare(
    mixed, b, a, a_log, dt_bias, key_heads=key_heads, key_dim=key_dim
  )
  o, u, decay = gated_delta.tree_verify(q, k, v, g, beta, state, mask)
  return o, k, u, decay


def _program(
  q_ref,
  k_ref,
  v_ref,
  b_ref,
  a_ref,
  a_log_ref,
  dt_bias_ref,
  mask_ref,
  state_ref,
  o_ref,
  key_ref,
  u_ref,
  decay_ref,
  *,
  repeat,
  precision,
):
  """One value head, some columns of its state.

  The system is inverted as `gated_delta.unit_lower_inverse` does it, on whole
  matrices: with M the inverses of the diagonal blocks and C what joins pairs
  of them, the inverses of the joined blocks are M - M C M.
  """
  dot = functools.partial(
    jnp.dot, precision=precision, preferred_element_type=jnp.float32
  )
  head, block = pl.program_id(0), pl.program_id(1)
  q = gated_delta.l2_normalize(q_ref[...])  # [N, K]
  q = q * q.shape[1] ** -0.5
  k = gated_delta.l2_normalize(k_ref[...])

  @pl.when((head % repeat == 0) & (block == 0))
  def _():
    key_ref[...] = k

  beta = jax.nn.sigmoid(b_ref[...].astype(jnp.float32))[:, None]
  a = a_ref[...].astype(jnp.float32) + dt_bias_ref[head].astype(jnp.float32)
  softplus = jnp.maximum(a, 0) + jnp.log(1 + jnp.exp(-jnp.abs(a)))
  g = -jnp.exp(a_log_ref[head].astype(jnp.float32)) * softplus
  state = state_ref[...]  # [K, columns]
  mask = mask_ref[...] != 0  # [N, N]
  n = q.shape[0]
  row = lax.broadcasted_iota(jnp.int32, (n, n), 0)
  column = lax.broadcasted_iota(jnp.int32, (n, n), 1)

  decay = jnp.sum(jnp.where(mask, g[None, :], 0.0), axis=1)
  difference = jnp.where(mask, decay[:, None] - decay[None, :], 0.0)
  ratio = jnp.where(mask, jnp.exp(difference), 0.0)
  system = jnp.where(row != column, beta * dot(k, k.T) * ratio, 0.0)
  inverse = jnp.where(row == column, 1.0, 0.0)
  size = 1
  while size < n:
    joins = (row // (2 * size) == column // (2 * size)) & (
      row // size != column // size
    )
    between = jnp.where(joins, system, 0.0)
    if size > 1:
      between = dot(inverse, dot(between, inverse))
    inverse = inverse - between
    size *= 2

  carried = jnp.exp(decay)[:, None]
  u = dot(inverse, beta * (v_ref[...] - carried * dot(k, state)))
  o_ref[...] = carried * dot(q, state) + dot(dot(q, k.T) * ratio, u)
  u_ref[...] = u
  decay_ref[...] = decay  # each program of a head writes the same


def _verify_kernel(
  mixed, projected, a_log, dt_bias, state, mask, key_heads, implementation
):
  n = mixed.shape[0]
  heads, key_dim, value_dim = state.shape
  if state.dtype != jnp.float32:
    raise ValueError(f"verify's kernel takes float32, not {state.dtype}")
  nodes = max(16, 1 << (n - 1).bit_length())
  if nodes not in TILES:
    raise ValueError(f"verify's kernel takes at most 64 nodes, got {n}")
  tile = TILES[nodes]
  repeat = heads // key_heads
  first_value = 2 * key_heads * key_dim
  columns = math.gcd(tile.columns, value_dim, first_value)
  # Nodes that do not exist see nothing, themselves included, and change
  # nothing.
  rows = ((0, nodes - n),)
  mixed, projected = (jnp.pad(x, (*rows, (0, 0))) for x in (mixed, projected))
  mask = jnp.pad(mask.astype(jnp.int32), rows * 2)
  gates = projected.shape[1] - 2 * heads

  def key_rows(first):
    return pl.BlockSpec(
      (nodes, key_dim), lambda head, block: (0, first + head // repeat)
    )

  def value_rows(head, block):
    return 0, (first_value + head * value_dim) // columns + block

  def gate(first):
    return pl.BlockSpec((nodes, None), lambda head, block: (0, first + head))

  def whole(x):
    return pl.BlockSpec(x.shape, lambda head, block: (0,) * x.ndim)

  per_head = pl.BlockSpec(
    (nodes, None, columns), lambda head, block: (0, head, block)
  )
  per_key_head = pl.BlockSpec(
    (nodes, None, key_dim), lambda head, block: (0, head // repeat, 0)
  )
  interpret = implementation == "interpret"
  outputs = pl.pallas_call(
    functools.partial(
      _program,
      repeat=repeat,
      precision=lax.Precision.HIGHEST
      if interpret
      else lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    ),
    grid=(heads, value_dim // columns),
    in_specs=[
      key_rows(0),
      key_rows(key_heads),
      pl.BlockSpec((nodes, columns), value_rows),
      gate(gates),
      gate(gates + heads),
      whole(a_log),
      whole(dt_bias),
      whole(mask),
      pl.BlockSpec(
        (None, key_dim, columns), lambda head, block: (head, 0, block)
      ),
    ],
    out_specs=[per_head, per_key_head, per_head, gate(0)],
    out_shape=[
      jax.ShapeDtypeStruct((nodes, heads, value_dim), jnp.float32),
      jax.ShapeDtypeStruct((nodes, key_heads, key_dim), jnp.float32),
      jax.ShapeDtypeStruct((nodes, heads, value_dim), jnp.float32),
      jax.ShapeDtypeStruct((nodes, heads), jnp.float32),
    ],
    compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps),
    interpret=interpret,
    name="gdn_verify",
  )(mixed, mixed, mixed, projected, projected, a_log, dt_bias, mask, state)
  return tuple(x[:n] for x in outputs)
