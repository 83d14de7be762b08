"""A run of prompt through a Gated DeltaNet mixer, behind its convolution.

The chunk form of the delta rule in two launches: in plain JAX it is fifty
kernels, among them products in float32 that no tensor core computes. A chunk is
a tree of one path
(`gated_delta.tree_verify`: D, G), and what it does is linear in the state S
before it. With A its system without decays, B = (I + A)^-1 diag(beta) and P the
lower triangle of Q K^T,

    U = U0 - e^G (W S),   U0 = (B o D) V,      W = B K
    O = O0 + e^G (X S),   O0 = ((P B) o D) V,  X = Q - P W
    S' = e^G_last S + K^T (e^(G_last - G) U)

The first launch makes what does not depend on S, a program for each chunk of a
value head; the second takes some columns of a value head's state through the
whole run, and the state never leaves it.

The state and the updates have one power of two for all columns of a program:
errors are of the largest value, not of each column's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, gated_delta, gdn_verify, halves

ROWS = 64
"""Tokens of a chunk: what a product on Hopper's tensor cores takes at least."""
COLUMNS = 64
"""Of a value head's state per program at most."""
LEAST_DECAY = -128.0
"""Of a token: e^-104 is 0 in float32, and sums of 64 of these are exact."""
# With activations in bfloat16 each spills 0.3 kB (the second 2 kB with 4
# warps), in float32 0.5 and 1.3 kB.
SOLVE_WARPS = 4
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
  implementation: dispatch.Implementation = "reference",
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


def _solve(
  mixed_ref,
  projected_ref,
  a_log_ref,
  dt_bias_ref,
  count_ref,
  x_ref,
  k_ref,
  w_ref,
  u_ref,
  o_ref,
  largest_ref,
  decay_ref,
  left_ref,
  *,
  repeat,
  products,
):
  """What a chunk of one value head has to do with no state.

  Whatever `products` says, they stand for float32's wherever rows may cancel
  afterwards, as they do where keys repeat.
  """
  head, first = pl.program_id(0), pl.program_id(1) * ROWS
  heads, key_dim = a_log_ref.shape[0], k_ref.shape[-1]
  value_dim = u_ref.shape[-1]
  n, channels = mixed_ref.shape
  parts = x_ref.shape[0]
  count = jnp.minimum(count_ref[0], n)
  token = first + lax.iota(jnp.int32, ROWS)
  live = token < count
  rows = jnp.minimum(token, n - 1)
  split = functools.partial(halves.split, products=products)

  def vectors(start, width):
    x = mixed_ref[rows, pl.ds(start, width)]
    return jnp.where(live[:, None], x, 0.0)

  def gate(start):
    return projected_ref[rows, start + head].astype(jnp.float32)

  @pl.when(first < count)
  def _():
    first_value = channels - heads * value_dim
    key_head = head // repeat * key_dim
    k = vectors(first_value // 2 + key_head, key_dim)
    q = vectors(key_head, key_dim)
    first_gate = projected_ref.shape[1] - 2 * heads
    beta, g = gdn_verify.gates(
      gate(first_gate + heads) + dt_bias_ref[head],
      gate(first_gate),
      a_log_ref[head],
    )
    # No decay and no update: a token that does not exist changes nothing.
    beta, g = (jnp.where(live, x, 0.0) for x in (beta, g))
    # Below, all is forgotten in float32 anyway; so the sums are exact.
    g = jnp.maximum(g, LEAST_DECAY)
    # In two sums, the coarse one exact: large ones may differ by little.
    coarse = jnp.floor(g * 2.0**10) * 2.0**-10
    decay = jnp.cumsum(coarse), jnp.cumsum(g - coarse)
    decay_ref[...] = sum(decay)
    left_ref[...] = sum(
      jnp.sum(x) - y for x, y in zip((coarse, g - coarse), decay, strict=True)
    )
    q = gated_delta.l2_normalize(q)
    keys = halves.split(gated_delta.l2_normalize(k), 3)

    @pl.when(head % repeat == 0)
    def _():
      _store(k_ref, keys)

    across = halves.transpose(keys)
    row, column = gdn_verify.indices(ROWS)
    system = beta[:, None] * halves.dot(keys, across)
    system = jnp.where(row > column, system, 0.0)
    # Masked before the exponential: above the diagonal it may overflow.
    ratio = sum(x[:, None] - x[None, :] for x in decay)
    ratio = gdn_verify.exp(jnp.where(row >= column, ratio, 0.0))
    ratio = jnp.where(row >= column, ratio, 0.0)
    scores = halves.dot(halves.split(q, 3), across)
    scores = jnp.where(row >= column, scores, 0.0)

    inverse = _inverse(system) * beta[None, :]
    solved = halves.split(inverse, 3)
    weights = halves.dot(halves.split(scores, 3), solved)
    _store(w_ref, split(halves.dot(solved, keys)))
    _store(x_ref, split(q - halves.dot(split(weights), keys[:parts])))
    # As late as this: loaded with the keys they would spill more.
    v = vectors(first_value + head * value_dim, value_dim)
    down, up = halves.window(jnp.max(jnp.abs(v), axis=0)[None, :])
    v = halves.split(v * down, 3)
    u = up * halves.dot(halves.split(inverse * ratio, 3), v)
    u_ref[...] = u
    largest_ref[0] = jnp.max(jnp.abs(u))
    o = halves.dot(split(weights * ratio), v[:parts])
    o_ref[...] = o * (up * key_dim**-0.5)


def _store(ref, parts):
  for i, part in enumerate(parts):
    ref[i] = part


def _inverse(system):
  """(I + A)^-1 of a strictly lower triangular matrix, to about 2^-18.

  As `gated_delta.unit_lower_inverse` does it, on whole matrices: with M the
  inverses of the diagonal blocks, M - M A M where two of them are joined.
  """
  row, column = gdn_verify.indices(ROWS)
  eye = jnp.where(row == column, 1.0, 0.0)
  inverse = eye - jnp.where((row >> 1) == (column >> 1), system, 0.0)
  system = halves.split(system, 3)
  for level in range(1, ROWS.bit_length() - 1):
    rough = halves.split(inverse, 1)
    left = halves.split(halves.dot(rough, system[:1]), 1)
    joined = ((row ^ column) >> level) == 1
    inverse -= jnp.where(joined, halves.dot(left, rough), 0.0)
  # That is rough; a step of refinement squares its error.
  rough = halves.split(inverse, 1)
  inverse = rough[0].astype(jnp.float32)
  left = halves.split(eye - inverse - halves.dot(system, rough), 1)
  return inverse + halves.dot(rough, left)


def _run(
  x_ref,
  k_ref,
  w_ref,
  u_ref,
  first_ref,
  largest_ref,
  decay_ref,
  left_ref,
  count_ref,
  state_ref,
  o_ref,
  after_ref,
  *,
  products,
):
  """One value head, some columns of its state, chunk by chunk."""
  size, key_dim = o_ref.shape[0], state_ref.shape[0]
  chunks = pl.cdiv(jnp.minimum(count_ref[0], size), ROWS)
  split = functools.partial(halves.split, products=products)

  def load(i):
    rows = pl.ds(i * ROWS, ROWS)
    parts = [
      [ref[part, rows, :] for part in range(ref.shape[0])]
      for ref in (x_ref, k_ref, w_ref)
    ]
    last = decay_ref[i * ROWS + ROWS - 1]
    whole = u_ref[rows, :], first_ref[rows, :]
    decays = decay_ref[rows], left_ref[rows], last
    return *parts, *whole, largest_ref[i], *decays

  def chunk(i, carry):
    state, loaded = carry
    # Asked for here, they come while products wait for each other.
    following = load(jnp.minimum(i + 1, chunks - 1))
    x, keys, w, u, o, largest, decay, left, last = loaded
    # A row of W is at most 1 long, an update below sqrt(K) + 1 times this: in
    # the range of float16 for K up to 512.
    top = jnp.maximum(jnp.max(jnp.abs(state)), largest)
    down, up = halves.window(top, lowest=10, step=1)
    before = split(state * down)
    kept = gdn_verify.exp(decay)[:, None]
    u = u * down - kept * halves.dot(w, before)
    o += kept * halves.dot(x, before) * (up * key_dim**-0.5)
    o_ref[pl.ds(i * ROWS, ROWS), :] = o
    u *= gdn_verify.exp(left)[:, None]
    added = halves.dot(halves.transpose(keys), halves.split(u, 3))
    return gdn_verify.exp(last) * state + up * added, following

  after, _ = lax.fori_loop(0, chunks, chunk, (state_ref[...], load(0)))
  after_ref[...] = after

  def nothing(i, _):
    # What follows is finite everywhere.
    o_ref[pl.ds(i * ROWS, ROWS), :] = jnp.zeros((ROWS, o_ref.shape[1]))

  lax.fori_loop(chunks, size // ROWS, nothing, None)


@dispatch.once("key_heads", "implementation")
def _prefill_kernel(
  mixed, projected, a_log, dt_bias, state, count, key_heads, implementation
):
  heads, key_dim, value_dim = state.shape
  if state.dtype != jnp.float32:
    raise ValueError(f"prefill's kernel takes float32, not {state.dtype}")
  n = mixed.shape[0]
  repeat = heads // key_heads
  columns = min(COLUMNS, value_dim)
  chunks = pl.cdiv(n, ROWS)
  size = chunks * ROWS
  products = gdn_verify.products_for(projected.dtype)
  parts = 1 if products == 1 else 2
  count = jnp.asarray(count, jnp.int32).reshape(1)

  def single(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def half(parts, heads, width):
    return jax.ShapeDtypeStruct((parts, heads, size, width), jnp.float16)

  solved = [
    half(parts, heads, key_dim),  # X
    half(2, key_heads, key_dim),  # K
    half(parts, heads, key_dim),  # W
    single(heads, size, value_dim),  # U0
    single(heads, size, value_dim),  # O0
    single(heads, chunks),  # the largest of U0
    single(heads, size),  # G
    single(heads, size),  # G_last - G
  ]

  def specs(rows, columns, chunk, block):
    """Of `solved`, by what the second index of a grid behind heads means."""

    def halved(x):
      of = heads // x.shape[1]
      return pl.BlockSpec(
        (x.shape[0], None, rows, x.shape[3]),
        lambda head, i: (0, head // of, chunk(i), 0),
      )

    def vector(length):
      return pl.BlockSpec((None, length), lambda head, i: (head, chunk(i)))

    tile = pl.BlockSpec(
      (None, rows, columns), lambda head, i: (head, chunk(i), block(i))
    )
    return [
      *map(halved, solved[:3]),
      tile,
      tile,
      vector(rows // ROWS),
      vector(rows),
      vector(rows),
    ]

  made = pl.pallas_call(
    functools.partial(_solve, repeat=repeat, products=products),
    grid=(heads, chunks),
    out_specs=specs(ROWS, value_dim, chunk=lambda i: i, block=lambda i: 0),
    out_shape=solved,
    compiler_params=pltriton.CompilerParams(
      num_warps=SOLVE_WARPS, num_stages=1
    ),
    interpret=implementation == "interpret",
    name="gdn_prefill_solve",
  )(mixed, projected, a_log, dt_bias, count)

  tile = pl.BlockSpec((None, key_dim, columns), lambda head, i: (head, 0, i))
  outputs, after = pl.pallas_call(
    functools.partial(_run, products=products),
    grid=(heads, value_dim // columns),
    in_specs=[
      *specs(size, columns, chunk=lambda i: 0, block=lambda i: i),
      pl.BlockSpec((1,), lambda head, i: (0,)),
      tile,
    ],
    out_specs=[
      pl.BlockSpec((size, None, columns), lambda head, i: (0, head, i)),
      tile,
    ],
    out_shape=[single(size, heads, value_dim), single(*state.shape)],
    input_output_aliases={9: 1},  # each program reads its own tile
    compiler_params=pltriton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
    interpret=implementation == "interpret",
    name="gdn_prefill",
  )(*made, count, state)
  return outputs[:n], after
