"""The state of a Gated DeltaNet layer after an accepted path.

In plain JAX the sum over the path is written out and read again, as large as
the state itself; the kernel reads and writes the state once, in place.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gated_delta, halves


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the kernel is cut.

  Attributes:
    columns: of a value head's state per program at most.
    num_warps: per program.
  """

  columns: int
  num_warps: int


TILE = Tile(columns=16, num_warps=4)
"""On an H200, 48 heads of 128 x 128, with products in bfloat16 halves: 4.5 us
for 16 nodes and for 64; 16 columns and 2 warps 4.5 and 4.6, 32 and 4 5.1, 64
and 4 5.1 and 5.4, 128 and 8 6.6."""

SEVERAL = Tile(columns=64, num_warps=4)
"""Instead, for several requests at once. Of 16 with paths of 1 to 16 nodes 62.0
us, with 8 warps 68.3; 16 columns 71.6, 32 64.1, 128 66.2; 21 by bytes."""

ROWS = 16
"""Nodes of the path that are added at a time."""


def commit(
  state: Float[Array, "Hv K V"],
  k: Float[Array, "N Hk K"],
  u: Float[Array, "N Hv V"],
  decay: Float[Array, "N Hv"],
  path: Int[Array, " P"],
  count: Int[Array, ""],
  *,
  implementation: dispatch.Implementation = "reference",
  tile: Tile | None = None,
) -> Float[Array, "Hv K V"]:
  """`gated_delta.commit`.

  Args:
    implementation: the kernel takes float32.
    tile: how it is cut; `TILE` or `SEVERAL` by default.
  """
  if implementation != "reference":

    def kernel(requests, *operands):
      own = tile or (SEVERAL if requests > 1 else TILE)
      return _commit_kernel(*operands, implementation, own)

    count = jnp.asarray(count, jnp.int32)
    return dispatch.by_requests(kernel)(state, k, u, decay, path, count)
  return gated_delta.commit(state, k, u, decay, path, count)


def _program(
  k_ref, u_ref, decay_ref, path_ref, count_ref, state_ref, after_ref
):
  """One value head, some columns of its state."""
  state = state_ref[...]
  count = jnp.minimum(count_ref[0], path_ref.shape[0])
  last = decay_ref[path_ref[jnp.maximum(count - 1, 0)]]
  last = jnp.where(count > 0, last, 0.0)  # without a path nothing decays

  def add(step, after):
    index = step * ROWS + lax.iota(jnp.int32, ROWS)
    on_path = index < count
    node = path_ref[jnp.minimum(index, path_ref.shape[0] - 1)]
    node = jnp.where(on_path, node, 0)
    weight = jnp.exp(jnp.where(on_path, last - decay_ref[node], 0.0))
    k = jnp.where(on_path[:, None], k_ref[node, :], 0.0)
    u = jnp.where(on_path[:, None], u_ref[node, :] * weight[:, None], 0.0)
    down, up = halves.window(jnp.max(jnp.abs(u), axis=0)[None, :])
    return after + up * halves.dot(
      halves.transpose(halves.split(k, 3)), halves.split(u * down, 3)
    )

  after = jnp.exp(last) * state
  if path_ref.shape[0] <= ROWS:
    after = add(0, after)
  else:  # most paths end within the first rows
    after = lax.fori_loop(0, pl.cdiv(count, ROWS), add, after)
  after_ref[...] = after


@dispatch.once("implementation", "tile")
def _commit_kernel(state, k, u, decay, path, count, implementation, tile):
  if state.dtype != jnp.float32:
    raise ValueError(f"commit's kernel takes float32, not {state.dtype}")
  heads, key_dim, value_dim = state.shape
  n, key_heads, _ = k.shape
  repeat = heads // key_heads
  columns = math.gcd(tile.columns, value_dim)
  block = pl.BlockSpec(
    (None, key_dim, columns), lambda head, block: (head, 0, block)
  )
  count = jnp.asarray(count, jnp.int32).reshape(1)
  return pl.pallas_call(
    _program,
    grid=(heads, value_dim // columns),
    in_specs=[
      pl.BlockSpec(
        (n, None, key_dim), lambda head, block: (0, head // repeat, 0)
      ),
      pl.BlockSpec((n, None, columns), lambda head, block: (0, head, block)),
      pl.BlockSpec((n, None), lambda head, block: (0, head)),
      pl.BlockSpec(path.shape, lambda head, block: (0,)),
      pl.BlockSpec((1,), lambda head, block: (0,)),
      block,
    ],
    out_specs=block,
    out_shape=jax.ShapeDtypeStruct(state.shape, jnp.float32),
    input_output_aliases={5: 0},  # each program reads its own tile
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=1
    ),
    interpret=implementation == "interpret",
    name="gdn_commit",
  )(k, u, decay, path.astype(jnp.int32), count, state)
