"""Nodes of a tree through a Gated DeltaNet mixer, behind its convolution.

Gates, normalised keys and queries, and the tree form of the delta rule: in
plain JAX a dozen operations per layer, as a kernel a single launch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, gated_delta, halves


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the kernel is cut.

  Attributes:
    columns: of a value head's state per program at most.
    num_warps: per program.
    rows: nodes whose system is inverted as a whole, at most; those behind them
      are solved by substitution.
  """

  columns: int
  num_warps: int
  rows: int = 32


# By padded nodes and by the products that stand for one in float32
# (`products_for`). On an H200 (27B shapes), 16, 32, 48 and 64 nodes: 5.5, 7.8,
# 11.5 and 14.3 us with one product, 6.2, 10.1, 14.5 and 21.2 with three. Of the
# others 32 columns and 4 warps come closest (5.9, 9.4, 12.4, 26). 96 and 128
# nodes spill 0.5 and 1.1 kB (compiled for an H200, not timed).
TILES = {
  (16, 1): Tile(columns=64, num_warps=4),
  (32, 1): Tile(columns=64, num_warps=4),
  (48, 1): Tile(columns=64, num_warps=8),
  (64, 1): Tile(columns=64, num_warps=8),
  (96, 1): Tile(columns=64, num_warps=8),
  (128, 1): Tile(columns=64, num_warps=8),
  (16, 3): Tile(columns=64, num_warps=4),
  (32, 3): Tile(columns=64, num_warps=4),
  (48, 3): Tile(columns=64, num_warps=8),
  (64, 3): Tile(columns=64, num_warps=8),
  (96, 3): Tile(columns=64, num_warps=8),
  (128, 3): Tile(columns=64, num_warps=8),
}

SEVERAL = {(16, 1): Tile(columns=128, num_warps=4)}
"""Instead, for several requests at once. Of 16 with 16 nodes each 34.4 us where
64 columns take 39.0 (8 warps 46.4), 32 47.9, 128 with 8 warps 36.8; 10.5 by
bytes."""

FEW = 16
"""Nodes up to which a tree has a tile of so many rows among several requests,
whatever places it has: where they share a budget, few have many nodes. Not
timed; 32 rows take 64 us of 16 requests, 16 rows 37."""

MAX_NODES = max(nodes for nodes, _ in TILES)

_LOG2_E = math.log2(math.e)


def products_for(dtype: jnp.dtype) -> int:
  """Half-precision products for one of float32, by the activations' dtype.

  bfloat16 activations carry 2^-9, so that single products (2^-12) are as good;
  float32 ones take three. The solve is accurate to float32 with both.
  """
  return 1 if dtype == jnp.bfloat16 else 3


def max_nodes(memory: int, key_dim: int = 128) -> int:
  """The most nodes that the kernel takes on a GPU, whatever the dtype.

  Triton keeps keys and queries of all nodes and a block of the state in shared
  memory, two halves of each: 96 kB for 64 nodes with keys of 128 numbers,
  160 kB for 128.

  Args:
    memory: shared memory of a program in bytes.
    key_dim: K.
  """
  return max(
    nodes
    for (nodes, products), tile in TILES.items()
    if products == 3 and 4 * key_dim * (tile.columns + 2 * nodes) <= memory
  )


def _padded(n: int) -> int:
  """Nodes of the smallest tile that has room for so many."""
  if n > MAX_NODES:
    raise ValueError(
      f"verify's kernel takes at most {MAX_NODES} nodes, got {n}"
    )
  return min(nodes for nodes, _ in TILES if n <= nodes)


def tile_for(nodes: int, products: int, requests: int = 1) -> Tile:
  """How the kernel is cut for trees of so many nodes."""
  key = _padded(nodes), products
  return SEVERAL.get(key, TILES[key]) if requests > 1 else TILES[key]


def _row_tiles(nodes: int, rows: int) -> list[tuple[int, int]]:
  """First row and rows of each tile: powers of two, as Triton's are."""
  tiles, first = [], 0
  while first < nodes:
    size = min(rows, 1 << ((nodes - first).bit_length() - 1))
    tiles.append((first, size))
    first += size
  return tiles


def verify(
  mixed: Float[Array, "N C"],
  projected: Float[Array, "N P"],
  a_log: Float[Array, " Hv"],
  dt_bias: Float[Array, " Hv"],
  state: Float[Array, "Hv K V"],
  mask: Bool[Array, "N N"],
  count: Int[Array, ""] | None = None,
  *,
  key_heads: int,
  implementation: dispatch.VerifyImplementation = "reference",
  tile: Tile | None = None,
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
    state: float32 (float64 in the references).
    mask: mask[i, j] is True where j is i or an ancestor of i; parents come
      before their children.
    count: nodes that exist, the first ones; all of them where None. Outputs of
      the others are finite, and mean nothing.
    key_heads: Hk; C = 2 Hk K + Hv V.
    implementation: `per_path` recomputes each node's path from the root, as
      engines without the tree form do. The kernel takes float32 and up to 128
      nodes; its products are `products_for` the dtype of `projected`.
    tile: how the kernel is cut; `tile_for` the nodes by default.

  Returns:
    Outputs before the gated norm, and what `gated_delta.commit` needs:
    normalised keys, updates u, path log-decays.
  """
  if dispatch.is_kernel(implementation):

    def kernel(requests, *operands):
      return _verify_kernel(
        *operands, key_heads, implementation, tile, requests
      )

    count = jnp.asarray(mask.shape[0] if count is None else count, jnp.int32)
    return dispatch.by_requests(kernel)(
      mixed, projected, a_log, dt_bias, state, mask, count
    )
  heads, key_dim, _ = state.shape
  b, a = jnp.split(projected[:, -2 * heads :].astype(state.dtype), 2, axis=-1)
  q, k, v, g, beta = gated_delta.prepare(
    mixed, b, a, a_log, dt_bias, key_heads=key_heads, key_dim=key_dim
  )
  form = (
    gated_delta.path_verify
    if implementation == "per_path"
    else gated_delta.tree_verify
  )
  o, u, decay = form(q, k, v, g, beta, state, mask)
  return o, k, u, decay


def _after_the_loads(x):
  """x, of which Triton asks for another layout only where this stands.

  It would else convert, and wait for x, between this load and the next ones.
  A reduction over nothing is what its passes do not move.
  """
  return jnp.max(x[None], axis=0)


def _largest(x):
  """Of each column."""
  return jnp.max(jnp.abs(x), axis=0)


def exp(x):
  """Its argument rounded to float32 once more: one instruction, not eight."""
  return jnp.exp2(x * _LOG2_E)


def indices(n):
  return (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))


def gates(a, b, rate):
  """beta and g, as `gated_delta.prepare` makes them; the bias is in a."""
  softplus = jnp.maximum(a, 0) + jnp.log(1 + jnp.exp(-jnp.abs(a)))
  return jax.nn.sigmoid(b), -jnp.exp(rate) * softplus


def _unit_lower_inverses(systems):
  """(I + A)^-1 of strictly lower triangular tiles, to about 2^-9.

  As `gated_delta.unit_lower_inverse` does it, on whole matrices: with M the
  inverses of the diagonal blocks and C what joins pairs of them, the inverses
  of the joined blocks are M - M C M.
  """

  inverses = []
  for system in systems:
    row, column = indices(system.shape[0])
    pair = (row >> 1) == (column >> 1)
    eye = jnp.where(row == column, 1.0, 0.0)
    inverses.append(eye - jnp.where(pair, system, 0.0))
  # A loop would be a third of the code, and is slower (8.1 us or 8.9 for 32
  # nodes): its masks are not constants.
  for level in range(1, max(x.shape[0] for x in systems).bit_length() - 1):
    for i, system in enumerate(systems):
      if system.shape[0] < 4 << (level - 1):
        continue  # all of it is joined
      row, column = indices(system.shape[0])
      joins = ((row >> (level + 1)) == (column >> (level + 1))) & (
        (row >> level) != (column >> level)
      )
      between = halves.split(jnp.where(joins, system, 0.0), 1)
      half = halves.split(inverses[i], 1)
      right = halves.split(halves.dot(between, half), 1)
      inverses[i] -= halves.dot(half, right)
  return inverses


def _program(
  q_ref,
  k_ref,
  v_ref,
  b_ref,
  a_ref,
  a_log_ref,
  dt_bias_ref,
  mask_ref,
  count_ref,
  state_ref,
  o_ref,
  key_ref,
  u_ref,
  decay_ref,
  *,
  repeat,
  tiles,
  few,
  products,
):
  """One value head, some columns of its state.

  Args:
    tiles: of all nodes, first row and rows of each.
    few: nodes of a smaller tile, for a tree that has no more; 0 for none.
  """
  head, block = pl.program_id(0), pl.program_id(1)
  state = state_ref[...]  # [K, columns]
  refs = (
    q_ref, k_ref, v_ref, b_ref, a_ref, a_log_ref, dt_bias_ref, mask_ref, o_ref,
    key_ref, u_ref, decay_ref,
  )  # fmt: skip
  run = functools.partial(
    _nodes, head, (head % repeat == 0) & (block == 0), state, refs, products
  )
  if not few:
    run(tiles)
    return

  @pl.when(count_ref[0] <= few)
  def _():
    run([(0, few)])
    # What does not exist is finite all the same.
    for first, size in _row_tiles(o_ref.shape[0] - few, few):
      for ref in (o_ref, key_ref, u_ref, decay_ref):
        ref[pl.ds(few + first, size)] = jnp.zeros((size, *ref.shape[1:]))

  @pl.when(count_ref[0] > few)
  def _():
    run(tiles)


def _nodes(head, writes_keys, state, refs, products, tiles):
  """Nodes in some tiles, behind the state [K, columns].

  Every number that a program needs is asked for before any is used, and none
  is written before all are read: loads do not pass stores.
  """
  (
    q_ref, k_ref, v_ref, b_ref, a_ref, a_log_ref, dt_bias_ref, mask_ref, o_ref,
    key_ref, u_ref, decay_ref,
  ) = refs  # fmt: skip
  nodes = [pl.ds(*x) for x in tiles]
  number = range(len(tiles))
  pairs = [(i, j) for i in number for j in range(i + 1)]
  rate, bias = a_log_ref[head], dt_bias_ref[head]
  a = [a_ref[i].astype(jnp.float32) + bias for i in nodes]
  b = [b_ref[i].astype(jnp.float32) for i in nodes]
  seen = {(i, j): mask_ref[nodes[i], nodes[j]] != 0 for i, j in pairs}
  v = [v_ref[i, :] for i in nodes]
  k = [k_ref[i, :] for i in nodes]  # [rows, K]
  q = [q_ref[i, :] for i in nodes]
  v = [_after_the_loads(x) for x in v]

  def updated(i, u):
    u_ref[nodes[i], :] = u

  def output(i, o, decay):
    o_ref[nodes[i], :] = o
    decay_ref[nodes[i]] = decay  # each program of a head writes the same

  keys = solve(
    q, k, v, a, b, rate, seen, state, products,
    updated=updated, output=output,
  )  # fmt: skip

  @pl.when(writes_keys)
  def _():
    for i in number:
      key_ref[nodes[i], :] = keys[i]


def solve(
  q: list[Array],
  k: list[Array],
  v: list[Array],
  a: list[Array],
  b: list[Array],
  rate: Array,
  seen: dict[tuple[int, int], Array],
  state: Array,
  products: int,
  *,
  updated: Callable[[int, Array], None],
  output: Callable[[int, Array, Array], None],
) -> list[Array]:
  """The tree form of the delta rule for one value head, inside of a kernel.

  Args:
    q, k: [rows, K] by tile of rows, not yet normalised.
    v: [rows, columns].
    a, b: what the gates are made of, [rows]; the bias is in a.
    rate: a_log.
    seen: masks between tiles, of (i, j) for j <= i.
    state: [K, columns].
    products: see `products_for`.
    updated, output: take a tile's u; its o and path log-decays. Called where
      they are known, so that they need not be kept.

  Returns:
    Normalised keys, [rows, K].
  """
  number = range(len(k))
  pairs = [(i, j) for i in number for j in range(i + 1)]
  split = functools.partial(halves.split, products=products)

  # The state and what is solved for, in the range of halves.
  down, up = halves.window(  # [1, columns]
    functools.reduce(jnp.maximum, [_largest(x) for x in (state, *v)])[None, :]
  )
  before = split(state * down)
  k = [gated_delta.l2_normalize(x) for x in k]
  q = [gated_delta.l2_normalize(x) for x in q]  # times K^-0.5 in the end
  scale = k[0].shape[1] ** -0.5

  # Products that share an operand stand together: it need not be kept.
  kk, qk, k_state, q_state = {}, {}, [], []
  keys = [split(x) for x in k]
  across = [halves.transpose(x) for x in keys]
  for i in number:
    for j in range(i + 1):
      kk[i, j] = halves.dot(keys[i], across[j])
    k_state.append(halves.dot(keys[i], before))
  for i in number:
    queries = split(q[i])
    for j in range(i + 1):
      qk[i, j] = halves.dot(queries, across[j])
    q_state.append(halves.dot(queries, before))

  gated = [gates(*x, rate) for x in zip(a, b, strict=True)]
  beta, g = [x for x, _ in gated], [x for _, x in gated]
  beta = [x[:, None] for x in beta]
  decay = [jnp.zeros(x.shape[0], jnp.float32) for x in k]
  for i, j in pairs:
    seen_g = jnp.where(seen[i, j], g[j][None, :], 0.0)
    decay[i] += jnp.sum(seen_g, axis=1)
  system, weights = {}, {}
  for i, j in pairs:
    difference = decay[i][:, None] - decay[j][None, :]
    # Masked before the exponential: outside the path it may overflow.
    ratio = exp(jnp.where(seen[i, j], difference, 0.0))
    ratio = jnp.where(seen[i, j], ratio, 0.0)
    weights[i, j] = split(qk[i, j] * ratio)
    system[i, j] = beta[i] * kk[i, j] * ratio
    if i == j:
      row, column = indices(k[i].shape[0])
      system[i, i] = jnp.where(row != column, system[i, i], 0.0)
  inverse = _unit_lower_inverses([system[i, i] for i in number])

  # The inverse is rough; a step of refinement squares its error. What is left
  # of the right-hand side takes three products whatever the others take.
  u: list[Sequence[Array]] = []
  for i in number:
    kept = exp(decay[i])[:, None]
    right = beta[i] * (v[i] * down - kept * k_state[i])
    for j in range(i):
      right -= halves.dot(halves.split(system[i, j], 3), u[j])
    rough = halves.split(inverse[i], 1)
    solved = halves.dot(rough, halves.split(right, 1))
    left = right - solved
    left -= halves.dot(halves.split(system[i, i], 3), halves.split(solved, 3))
    solved += halves.dot(rough, halves.split(left, 1))
    u.append(halves.split(solved, 3))
    updated(i, solved * up)
  for i in number:
    o = exp(decay[i])[:, None] * q_state[i]
    for j in range(i + 1):
      o += halves.dot(weights[i, j], u[j][: len(weights[i, j])])
    output(i, o * (up * scale), decay[i])
  return k


@dataclasses.dataclass(frozen=True)
class Rows:
  """Blocks of rows [q | k | v] and of gates that a program of a grid of value
  heads and blocks of their columns has.

  Attributes:
    size: rows.
    key_dim, value_dim: of a head.
    columns: of a value head per program.
    repeat: value heads of a key head.
  """

  size: int
  key_dim: int
  value_dim: int
  columns: int
  repeat: int

  def keys(self, first: int) -> pl.BlockSpec:
    """Queries or keys; `first` counts heads of keys from the left."""
    return pl.BlockSpec(
      (self.size, self.key_dim),
      lambda head, block: (0, first + head // self.repeat),
    )

  def values(self, first: int) -> pl.BlockSpec:
    """Values, from a column on."""
    return pl.BlockSpec(
      (self.size, self.columns),
      lambda head, block: (
        0,
        (first + head * self.value_dim) // self.columns + block,
      ),
    )

  def gate(self, first: int) -> pl.BlockSpec:
    """A gate of each row, from a column on."""
    return pl.BlockSpec(
      (self.size, None), lambda head, block: (0, first + head)
    )

  def whole(self, x: Array) -> pl.BlockSpec:
    """All of an array."""
    return pl.BlockSpec(x.shape, lambda head, block: (0,) * x.ndim)


@dispatch.once("key_heads", "implementation", "tile", "requests")
def _verify_kernel(
  mixed, projected, a_log, dt_bias, state, mask, count, key_heads,
  implementation, tile, requests,
):  # fmt: skip
  n = mixed.shape[0]
  heads, key_dim, value_dim = state.shape
  if state.dtype != jnp.float32:
    raise ValueError(f"verify's kernel takes float32, not {state.dtype}")
  nodes = _padded(n)
  products = products_for(projected.dtype)
  tile = tile or tile_for(n, products, requests)
  repeat = heads // key_heads
  first_value = 2 * key_heads * key_dim
  columns = math.gcd(tile.columns, value_dim, first_value)
  # Nodes that do not exist see nothing, themselves included, and change
  # nothing.
  rows = ((0, nodes - n),)
  mixed, projected = (jnp.pad(x, (*rows, (0, 0))) for x in (mixed, projected))
  mask = jnp.pad(mask.astype(jnp.int32), rows * 2)
  gates = projected.shape[1] - 2 * heads

  rows_of = Rows(nodes, key_dim, value_dim, columns, repeat)
  gate, whole = rows_of.gate, rows_of.whole

  per_head = pl.BlockSpec(
    (nodes, None, columns), lambda head, block: (0, head, block)
  )
  per_key_head = pl.BlockSpec(
    (nodes, None, key_dim), lambda head, block: (0, head // repeat, 0)
  )
  outputs = pl.pallas_call(
    functools.partial(
      _program,
      repeat=repeat,
      tiles=_row_tiles(nodes, tile.rows),
      few=FEW if requests > 1 and nodes > FEW else 0,
      products=products,
    ),
    grid=(heads, value_dim // columns),
    in_specs=[
      rows_of.keys(0),
      rows_of.keys(key_heads),
      rows_of.values(first_value),
      gate(gates),
      gate(gates + heads),
      whole(a_log),
      whole(dt_bias),
      whole(mask),
      pl.BlockSpec((1,), lambda head, block: (0,)),
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
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=1
    ),
    interpret=implementation == "interpret",
    name="gdn_verify",
  )(
    mixed, mixed, mixed, projected, projected, a_log, dt_bias, mask,
    count.reshape(1), state,
  )  # fmt: skip
  return tuple(x[:n] for x in outputs)
