"""A run of prompt through a Gated DeltaNet mixer, behind its convolution.

The chunk form of the delta rule in one launch: a program takes some columns of
a value head's state through the whole run, chunk by chunk, and the state never
leaves it. A chunk is a tree of one path (`gdn_verify.solve`), and what it adds
to the state is what a commit would add. In plain JAX the run is fifty kernels a
layer, among them products in float32 that no tensor core computes.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import (
  dispatch,
  gated_delta,
  gdn_prefill_parallel,
  gdn_verify,
  halves,
)

ROWS = 32
"""Tokens of a chunk: a system that is inverted as a whole."""
COLUMNS = 64
"""Of a value head's state per program at most."""
NUM_WARPS = 8


def prefill(
  mixed: Float[Array, "N C"],
  projected: Float[Array, "N P"],
  a_log: Float[Array, " Hv"],
  dt_bias: Float[Array, " Hv"],
  state: Float[Array, "Hv K V"],
  count: Int[Array, ""],
  *,
  key_heads: int,
  implementation: dispatch.PrefillImplementation = "reference",
) -> tuple[Float[Array, "N Hv V"], Float[Array, "Hv K V"]]:
  """`gated_delta.chunk_prefill` of what `gated_delta.prepare` makes.

  Args:
    mixed: [q | k | v] behind convolution and activation, in the state's dtype.
    projected: its last columns are [b | a]; the others are not read.
    state: float32 (float64 in the reference).
    count: tokens that exist; those behind it leave the state alone, whatever
      they hold.
    key_heads: Hk; C = 2 Hk K + Hv V.
    implementation: the kernel takes float32; its products are
      `gdn_verify.products_for` the dtype of `projected`.

  Returns:
    Outputs before the gated norm, of which those from `count` on mean nothing
    (the kernel's are zeros), and the state after `count` tokens.
  """
  if implementation == "parallel":
    return gdn_prefill_parallel.prefill(
      mixed, projected, a_log, dt_bias, state, count, key_heads=key_heads
    )
  if implementation != "reference":
    return _prefill_kernel(
      mixed, projected, a_log, dt_bias, state, count, key_heads, implementation
    )
  heads, key_dim, _ = state.shape
  b, a = jnp.split(projected[:, -2 * heads :].astype(state.dtype), 2, axis=-1)
  tokens = gated_delta.prepare(
    mixed, b, a, a_log, dt_bias, key_heads=key_heads, key_dim=key_dim
  )
  return gated_delta.chunk_prefill(*tokens, state, count)


def _program(
  q_ref,
  k_ref,
  v_ref,
  b_ref,
  a_ref,
  a_log_ref,
  dt_bias_ref,
  count_ref,
  state_ref,
  o_ref,
  after_ref,
  *,
  products,
):
  """One value head, some columns of its state."""
  head = pl.program_id(0)
  count = jnp.minimum(count_ref[0], o_ref.shape[0])
  rate, bias = a_log_ref[head], dt_bias_ref[head]
  row, column = (
    lax.broadcasted_iota(jnp.int32, (ROWS,) * 2, i) for i in (0, 1)
  )
  token = lax.iota(jnp.int32, ROWS)

  def chunk(i, state):
    rows = pl.ds(i * ROWS, ROWS)
    live = i * ROWS + token < count
    a = a_ref[rows].astype(jnp.float32) + bias
    b = b_ref[rows].astype(jnp.float32)
    v, k, q = v_ref[rows, :], k_ref[rows, :], q_ref[rows, :]
    v, k, q = (jnp.where(live[:, None], x, 0.0) for x in (v, k, q))

    def output(_, o, decay):
      del decay
      o_ref[rows, :] = o

    solved = gdn_verify.solve(
      [q], [k], [v], [a], [b], rate, {(0, 0): row >= column}, state, products,
      updated=lambda *_: None, output=output, live=[live],
    )  # fmt: skip
    (decay,), (keys,), (updates,) = solved.decay, solved.keys, solved.updates
    last = jnp.sum(jnp.where(token == ROWS - 1, decay, 0.0))
    # Halves again: products with a weight are no longer exact ones.
    u = sum(x.astype(jnp.float32) for x in updates)
    u *= jnp.exp(last - decay)[:, None]
    added = halves.dot(
      halves.transpose(halves.split(keys, 3)), halves.split(u, 3)
    )
    return jnp.exp(last) * state + solved.up * added

  chunks = pl.cdiv(count, ROWS)
  after_ref[...] = lax.fori_loop(0, chunks, chunk, state_ref[...])

  def nothing(i, _):
    # What follows is finite everywhere.
    o_ref[pl.ds(i * ROWS, ROWS), :] = jnp.zeros((ROWS, o_ref.shape[1]))

  lax.fori_loop(chunks, o_ref.shape[0] // ROWS, nothing, None)


@dispatch.once("key_heads", "implementation")
def _prefill_kernel(
  mixed, projected, a_log, dt_bias, state, count, key_heads, implementation
):
  n = mixed.shape[0]
  heads, key_dim, value_dim = state.shape
  if state.dtype != jnp.float32:
    raise ValueError(f"prefill's kernel takes float32, not {state.dtype}")
  repeat = heads // key_heads
  first_value = 2 * key_heads * key_dim
  columns = math.gcd(COLUMNS, value_dim, first_value)
  size = pl.cdiv(n, ROWS) * ROWS
  pad = ((0, size - n), (0, 0))
  gates = projected.shape[1] - 2 * heads
  # The gates alone: the rest of a projection need not be padded.
  gated = jnp.pad(projected[:, gates:], pad)
  mixed = jnp.pad(mixed, pad)

  rows_of = gdn_verify.Rows(size, key_dim, value_dim, columns, repeat)
  whole = rows_of.whole
  tile = pl.BlockSpec(
    (None, key_dim, columns), lambda head, block: (head, 0, block)
  )
  count = jnp.asarray(count, jnp.int32).reshape(1)
  outputs, after = pl.pallas_call(
    functools.partial(
      _program, products=gdn_verify.products_for(projected.dtype)
    ),
    grid=(heads, value_dim // columns),
    in_specs=[
      rows_of.keys(0),
      rows_of.keys(key_heads),
      rows_of.values(first_value),
      rows_of.gate(0),
      rows_of.gate(heads),
      whole(a_log),
      whole(dt_bias),
      whole(count),
      tile,
    ],
    out_specs=[
      pl.BlockSpec((size, None, columns), lambda head, block: (0, head, block)),
      tile,
    ],
    out_shape=[
      jax.ShapeDtypeStruct((size, heads, value_dim), jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
    ],
    input_output_aliases={8: 1},  # each program reads its own tile
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
    interpret=implementation == "interpret",
    name="gdn_prefill",
  )(mixed, mixed, mixed, gated, gated, a_log, dt_bias, count, state)
  return outputs[:n], after
