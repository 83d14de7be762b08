"""Attention of tree nodes over a committed prefix and over their ancestors.

Two score blocks share one softmax: [nodes, prefix], unmasked up to the
committed length, and [nodes, nodes], masked to ancestors-or-self. No mask has
the length of the context.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, tree_hopper, tree_parts
from pallas_kernels.tree_parts import LOG2_E, MASKED, power_of_two


def tree_attention(
  q: Float[Array, "N H D"],
  k_nodes: Float[Array, "N Hkv D"],
  v_nodes: Float[Array, "N Hkv D"],
  k_prefix: Float[Array, "Hkv T D"],
  v_prefix: Float[Array, "Hkv T D"],
  length: Int[Array, ""],
  mask: Bool[Array, "N N"] | None,
  scale: float,
  first: Int[Array, ""] | int = 0,
  *,
  implementation: dispatch.AttentionImplementation = "reference",
) -> Float[Array, "N H D"]:
  """Softmax attention of each node over prefix [0, length) and ancestors.

  Query head h reads key head h // (H / Hkv). Scores, softmax and sums are in
  float32 (float64 for float64 inputs); probabilities are rounded to the
  values' dtype before the product, as in the family's reference model.

  Args:
    length: committed rows of the prefix; rows behind it do not matter, whatever
      finite values they hold.
    mask: mask[i, j] is True where j is i or an ancestor of i. None of a run:
      each node sees itself and those before it.
    scale: factor on q k^T.
    first: first visible row of the prefix (a sliding window's edge).
    implementation: the kernel takes bfloat16 and float32. `mosaic` is the one
      for Hopper GPUs (`tree_hopper.takes`), for one request and where it is
      faster (`tree_hopper.pays`); elsewhere and under `vmap` it is `triton`.

  Returns:
    Attention outputs [N, H, D] in the dtype of q.
  """
  if implementation != "reference":
    rest = (length, jnp.asarray(first, jnp.int32))
    if mask is not None:
      rest = (*rest, mask)
    return _kernel(scale, implementation)(
      q, k_nodes, v_nodes, k_prefix, v_prefix, *rest
    )
  n, heads, dim = q.shape
  kv_heads, capacity, _ = k_prefix.shape
  if mask is None:
    mask = jnp.tril(jnp.ones((n, n), bool))
  acc = jnp.promote_types(q.dtype, jnp.float32)

  def einsum(spec, *operands):
    return jnp.einsum(
      spec,
      *operands,
      # float32 means float32 on a GPU too.
      precision=None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
      preferred_element_type=acc,
    )

  q = q.reshape(n, kv_heads, heads // kv_heads, dim)
  row = jnp.arange(capacity)
  visible = (row >= first) & (row < length)
  prefix = einsum("nkgd,ktd->kgnt", q, k_prefix) * scale
  prefix = jnp.where(visible, prefix, MASKED)
  nodes = einsum("nkgd,mkd->kgnm", q, k_nodes) * scale
  nodes = jnp.where(mask, nodes, MASKED)
  # Every node sees itself, so that the maximum is a real score.
  top = jnp.maximum(prefix.max(-1), nodes.max(-1))[..., None]
  prefix, nodes = jnp.exp(prefix - top), jnp.exp(nodes - top)
  total = prefix.sum(-1) + nodes.sum(-1)  # [Hkv, G, N]
  # Results heads first: XLA's CPU backend has no bfloat16 product that writes
  # the transposed form.
  out = einsum("kgnt,ktd->kgnd", prefix.astype(v_prefix.dtype), v_prefix)
  out += einsum("kgnm,mkd->kgnd", nodes.astype(v_nodes.dtype), v_nodes)
  out = jnp.moveaxis(out / total[..., None], 2, 0)
  return out.reshape(n, heads, dim).astype(q.dtype)


def _kernel(scale: float, implementation: dispatch.AttentionImplementation):
  """A kernel of the operands; Triton's where `vmap` has several requests."""

  def attend(requests, *operands):
    q, k_nodes, v_nodes, k_prefix, v_prefix, length, first, *mask = operands
    alone = implementation == "mosaic" and requests == 1
    if alone and mask and tree_hopper.pays(q, k_prefix):
      return tree_hopper.attend(
        q, k_nodes, v_nodes, k_prefix, v_prefix, length, *mask,
        scale=scale, first=first,
      )  # fmt: skip
    return _tree_attention_kernel(
      *operands,
      scale=scale,
      interpret=implementation == "interpret",
      requests=requests,
    )

  return dispatch.by_requests(attend)


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the kernel is cut.

  Attributes:
    rows: query rows (nodes x heads of a group) of a program at most.
    block: rows of the prefix that it reads at a time at most.
    programs: the prefix is cut so that no more run.
    num_warps: per program.
    num_stages: blocks that are asked for before they are used, and one.
  """

  rows: int
  block: int
  programs: int
  num_warps: int
  num_stages: int = 2

  @property
  def in_flight(self) -> int:
    """Blocks in shared memory: one more where products read them there."""
    return self.num_stages - (self.rows < 64)

  @property
  def nodes(self) -> int:
    """Nodes that are read at a time at most: as much as blocks in flight."""
    return 1 << ((self.in_flight * self.block).bit_length() - 1)


# By query rows of a key head at most. On an H200 (24 heads of 256): one node at
# 1,024 rows 7.4 us with 64 programs and 8.2 with 128, both with the merge;
# without it 16 nodes 8.1 (64 query rows 7.4, 128 9.9) and 64 nodes at
# 1,024, 4,096 and 16,384 rows: 14.0, 27.2 and 80.3 us with blocks of 32 and
# three stages, 14.5, 27.6 and 84.1 with 64 and two, 13.4, 30.9 and 108 with 64
# query rows.
TILES = {
  16: Tile(rows=16, block=64, programs=64, num_warps=4),
  128: Tile(rows=32, block=64, programs=132, num_warps=4),
  192: Tile(rows=64, block=64, programs=132, num_warps=4),
}
MANY_ROWS = Tile(rows=128, block=32, programs=132, num_warps=8, num_stages=3)


def shared_bytes(tile: Tile, dim: int, itemsize: int) -> int:
  """Shared memory that Triton takes for a tile at most: 192 kB for 128 x 64.

  Queries, the blocks of keys and values in flight, the weights, and a little
  to reduce over.
  """
  blocks = tile.in_flight * 2 * tile.block * dim
  numbers = tile.rows * dim + blocks + tile.rows * tile.block
  return itemsize * numbers + 1024


def tile_for(rows: int, dim: int, itemsize: int, memory: int) -> Tile:
  """The tile for so many query rows, cut to what fits a program.

  Args:
    rows: query rows of a key head.
    dim: of a head.
    itemsize: bytes of a number.
    memory: shared memory of a program in bytes.
  """
  tile = next((t for most, t in TILES.items() if rows <= most), MANY_ROWS)
  while memory < shared_bytes(tile, dim, itemsize):
    if tile.num_stages > 2:
      tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
    elif tile.rows > tile.block:
      tile = dataclasses.replace(tile, rows=tile.rows // 2)
    elif tile.block > 16:
      tile = dataclasses.replace(tile, block=tile.block // 2)
    else:
      break
  return tile


SEVERAL = 4
"""Times as many programs as run at once, for several requests; not timed."""

NODE_STEPS = 2
"""Blocks of the prefix that the nodes of a tree take as long as: loads wait for
loads."""


def _program(
  q_ref,
  k_nodes_ref,
  v_nodes_ref,
  k_ref,
  v_ref,
  first_ref,
  length_ref,
  *refs,
  n,
  rows,
  columns,
  group,
  scale,
  splits,
  block,
  node_steps,
  precision,
):
  """One key head, some query rows; one part of the nodes and the prefix.

  The mask comes before what is left behind, of a run there is none. Query rows
  are pairs (node, head of the group). Leaves sum 2^(score - top) v,
  top and sum 2^(score - top) of its part, scores times log2(e). Parts without
  a step leave a sum of 0.
  """
  *masks, out_ref, top_ref, total_ref = refs
  kv_head, part = pl.program_id(0), pl.program_id(2)
  kv_heads = pl.num_programs(0)
  first, length = first_ref[0], length_ref[0]
  steps, share = tree_parts.shares(
    first, length, node_steps=node_steps, splits=splits, block=block
  )
  begin = part * share
  begin_row = pl.program_id(1) * rows
  row = begin_row + lax.iota(jnp.int32, rows)
  last = (jnp.minimum(begin_row + rows, n * group) - 1) // group
  # Rows behind the last are computed as if they were its own, and never read.
  node = jnp.minimum(row // group, n - 1)
  dim, capacity = q_ref.shape[1], k_ref.shape[0]
  dot = functools.partial(
    jnp.dot, precision=precision, preferred_element_type=jnp.float32
  )

  def add(carry, keys, values, visible):
    top, total, out = carry
    scores = dot(q, keys.T) * (scale * LOG2_E)
    scores = jnp.where(visible, scores, MASKED)
    higher = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - higher)
    weights = jnp.exp2(scores - higher[:, None])
    if masks and columns < n:  # a row that has seen nothing has a masked top
      weights = jnp.where(visible, weights, 0.0)
    out = out * shrink[:, None] + dot(weights.astype(values.dtype), values)
    return higher, total * shrink + weights.sum(axis=1), out

  def add_some_nodes(at, carry):
    other = at + lax.iota(jnp.int32, columns)
    inside = other < n
    other = jnp.minimum(other, n - 1)
    if masks:
      seen = masks[0][node[:, None], other[None, :]] != 0
    else:
      seen = other[None, :] <= node[:, None]
    keys, values = (
      ref[other * kv_heads + kv_head, :] for ref in (k_nodes_ref, v_nodes_ref)
    )
    return add(carry, keys, values, seen & inside[None, :])

  def add_nodes(carry):
    if masks:
      for at in range(0, power_of_two(n), columns):
        carry = add_some_nodes(at, carry)
      return carry
    return lax.fori_loop(
      0,
      last // columns + 1,
      lambda i, carry: add_some_nodes(i * columns, carry),
      carry,
    )

  def add_block(i, carry):
    index = first + (i - node_steps) * block + lax.iota(jnp.int32, block)
    inside = index < length  # one at least
    index = jnp.minimum(index, capacity - 1)
    return add(carry, k_ref[index, :], v_ref[index, :], inside[None, :])

  q = q_ref[(node * kv_heads + kv_head) * group + row % group, :]  # [rows, D]

  @pl.when(begin < steps)
  def _():
    nothing = (
      jnp.full((rows,), MASKED, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
      jnp.zeros((rows, dim), jnp.float32),
    )
    start = lax.cond(part == 0, add_nodes, lambda carry: carry, nothing)
    top, total, out = lax.fori_loop(
      jnp.maximum(begin, node_steps),
      jnp.minimum(begin + share, steps),
      add_block,
      start,
    )
    top_ref[...], total_ref[...] = top, total
    out_ref[...] = (out * (1 / total)[:, None]).astype(out_ref.dtype)

  @pl.when(begin >= steps)
  def _():
    top_ref[...] = jnp.full((rows,), MASKED, jnp.float32)
    total_ref[...] = jnp.zeros((rows,), jnp.float32)


@dispatch.once("scale", "interpret", "requests")
def _tree_attention_kernel(
  q, k_nodes, v_nodes, k_prefix, v_prefix, length, first, mask=None, *,
  scale, interpret, requests,
):  # fmt: skip
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"tree_attention's kernel does not take {q.dtype}")
  n, heads, dim = q.shape
  kv_heads, capacity, _ = k_prefix.shape
  group = heads // kv_heads
  tile = tile_for(n * group, dim, q.dtype.itemsize, dispatch.shared_memory())
  row_tiles = pl.cdiv(n * group, tile.rows)
  most = 1 + -(-capacity // tile.block)
  # Of several requests in more programs than run at once, since their prefixes
  # differ in length; in as many parts as alone the parts would be more bytes
  # than the keys.
  programs = tile.programs if requests == 1 else SEVERAL * tile.programs
  splits = max(1, min(programs // (kv_heads * row_tiles * requests), most))
  bounds = [jnp.asarray(x, jnp.int32).reshape(1) for x in (first, length)]
  run = mask is None
  masks = [] if mask is None else [mask.astype(jnp.int32)]
  # The nodes of a run come in a loop, with blocks in flight of its own.
  node_steps = pl.cdiv(n, tile.block) if run else NODE_STEPS

  def whole(x):
    return pl.BlockSpec(x.shape, lambda *index: (0,) * x.ndim)

  def of_part(*shape):
    zeros = (0,) * (len(shape) - 1)
    return pl.BlockSpec(
      (None, None, *shape), lambda head, row, part: (head, part, row, *zeros)
    )

  small = (
    q.reshape(n * heads, dim),
    k_nodes.reshape(n * kv_heads, dim),
    v_nodes.reshape(n * kv_heads, dim),
  )
  prefix = pl.BlockSpec(
    (None, capacity, dim), lambda head, row, part: (head, 0, 0)
  )
  rows = row_tiles * tile.rows
  partial = pl.pallas_call(
    functools.partial(
      _program,
      n=n,
      rows=tile.rows,
      columns=min(power_of_two(n), tile.block if run else tile.nodes),
      group=group,
      scale=scale,
      precision=None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
      splits=splits,
      block=tile.block,
      node_steps=node_steps,
    ),
    grid=(kv_heads, row_tiles, splits),
    in_specs=[
      *(whole(x) for x in small),
      prefix,
      prefix,
      *(whole(x) for x in (*bounds, *masks)),
    ],
    out_specs=[of_part(tile.rows, dim), of_part(tile.rows), of_part(tile.rows)],
    out_shape=[
      # Rounded as weights are: at 64 nodes they are more than the prefix.
      jax.ShapeDtypeStruct((kv_heads, splits, rows, dim), q.dtype),
      jax.ShapeDtypeStruct((kv_heads, splits, rows), jnp.float32),
      jax.ShapeDtypeStruct((kv_heads, splits, rows), jnp.float32),
    ],
    compiler_params=pltriton.CompilerParams(
      num_warps=tile.num_warps, num_stages=tile.num_stages
    ),
    interpret=interpret,
    name="tree_attention",
  )(*small, k_prefix, v_prefix, *bounds, *masks)

  return tree_parts.combine(*partial, nodes=n, group=group, interpret=interpret)
