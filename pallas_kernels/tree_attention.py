"""Attention of tree nodes over a committed prefix and over their ancestors.

Two score blocks share one softmax: [nodes, prefix], unmasked up to the
committed length, and [nodes, nodes], masked to ancestors-or-self. No mask has
the length of the context.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch

_MASKED = -1e30
"""Score of an invisible position: finite, so that no row turns into NaN."""


def tree_attention(
  q: Float[Array, "N H D"],
  k_nodes: Float[Array, "N Hkv D"],
  v_nodes: Float[Array, "N Hkv D"],
  k_prefix: Float[Array, "Hkv T D"],
  v_prefix: Float[Array, "Hkv T D"],
  length: Int[Array, ""],
  mask: Bool[Array, "N N"],
  scale: float,
  first: Int[Array, ""] | int = 0,
  *,
  implementation: dispatch.Implementation = "reference",
) -> Float[Array, "N H D"]:
  """Softmax attention of each node over prefix [0, length) and ancestors.

  Query head h reads key head h // (H / Hkv). Scores, softmax and sums are in
  float32 (float64 for float64 inputs); probabilities are rounded to the
  values' dtype before the product, as in the family's reference model.

  Args:
    length: committed rows of the prefix; rows behind it are not read, whatever
      finite values they hold.
    mask: mask[i, j] is True where j is i or an ancestor of i.
    scale: factor on q k^T.
    first: first visible row of the prefix (a sliding window's edge).
    implementation: the kernel takes bfloat16 and float32.

  Returns:
    Attention outputs [N, H, D] in the dtype of q.
  """
  if implementation != "reference":
    return _tree_attention_kernel(
      q, k_nodes, v_nodes, k_prefix, v_prefix, length, mask, scale, first,
      implementation,
    )  # fmt: skip
  n, heads, dim = q.shape
  kv_heads, capacity, _ = k_prefix.shape
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
  prefix = jnp.where(visible, prefix, _MASKED)
  nodes = einsum("nkgd,mkd->kgnm", q, k_nodes) * scale
  nodes = jnp.where(mask, nodes, _MASKED)
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


BLOCK = 64
"""Rows of the prefix that a program reads at a time, at most."""

PROGRAMS = 64
"""The prefix is cut so that so many run. On an H200, 24 heads of 256 over 1,024
rows: 7.4 us with one node and 12.9 with 16; with twice as many 8.2 and 15.3."""


ROWS = 128
"""Query rows (nodes x heads of a group) of a program at most."""


def _power_of_two(n: int) -> int:
  return max(16, 1 << (n - 1).bit_length())


def tile(rows: int, dim: int, itemsize: int, memory: int) -> tuple[int, int]:
  """Query rows, and rows of the prefix at a time, that fit a program.

  Triton keeps the queries, keys and values of one block, and the weights in
  shared memory: 144 kB for 128 x 64 rows of 256 bfloat16 numbers.

  Args:
    rows: query rows, a power of two.
    dim: of a head.
    itemsize: bytes of a number.
    memory: shared memory of a program in bytes.
  """
  rows, block = min(rows, ROWS), BLOCK
  while max(rows, block) > 16 and memory < itemsize * (
    rows * dim + 2 * block * dim + rows * block
  ):
    if rows > block:
      rows //= 2
    else:
      block //= 2
  return rows, block


def _program(
  q_ref,
  k_nodes_ref,
  v_nodes_ref,
  k_ref,
  v_ref,
  bounds_ref,
  mask_ref,
  out_ref,
  top_ref,
  total_ref,
  *,
  rows,
  columns,
  group,
  scale,
  splits,
  block,
  precision,
):
  """One key head, some query rows; one part of the prefix, or the nodes.

  Query rows are pairs (node, head of the group). Leaves sum exp(score - top) v,
  top and sum exp(score - top) of its part.
  """
  kv_head, part = pl.program_id(0), pl.program_id(2)
  kv_heads, n = pl.num_programs(0), mask_ref.shape[0]
  first, length = bounds_ref[0], bounds_ref[1]
  row = pl.program_id(1) * rows + lax.iota(jnp.int32, rows)
  # Rows behind the last are computed as if they were its own, and never read.
  node = jnp.minimum(row // group, n - 1)
  q = q_ref[(node * kv_heads + kv_head) * group + row % group, :]  # [rows, D]
  dim = q.shape[1]
  capacity = k_ref.shape[0]
  dot = functools.partial(
    jnp.dot, precision=precision, preferred_element_type=jnp.float32
  )

  def scores_of(keys, visible):
    return jnp.where(visible, dot(q, keys.T) * scale, _MASKED)

  def weigh(scores, visible, top):
    # Where a row sees nothing at all, its top is that of a masked score.
    return jnp.where(visible, jnp.exp(scores - top[:, None]), 0.0)

  @pl.when(part < splits)
  def _():
    blocks = pl.cdiv(jnp.maximum(length - first, 0), block * splits)
    begin = first + part * blocks * block

    def body(i, carry):
      top, total, out = carry
      index = begin + i * block + lax.iota(jnp.int32, block)
      inside = index < length
      index = jnp.minimum(index, capacity - 1)
      keys, values = k_ref[index, :], v_ref[index, :]
      visible = jnp.broadcast_to(inside[None, :], (rows, block))
      scores = scores_of(keys, visible)
      higher = jnp.maximum(top, scores.max(axis=1))
      shrink = jnp.exp(top - higher)
      weights = weigh(scores, visible, higher)
      out = out * shrink[:, None] + dot(weights.astype(values.dtype), values)
      return higher, total * shrink + weights.sum(axis=1), out

    start = (
      jnp.full((rows,), _MASKED, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
      jnp.zeros((rows, dim), jnp.float32),
    )
    top, total, out = lax.fori_loop(0, blocks, body, start)
    top_ref[...], total_ref[...], out_ref[...] = top, total, out

  @pl.when(part == splits)
  def _():
    other = lax.iota(jnp.int32, columns)
    inside = other < n
    other = jnp.minimum(other, n - 1)
    visible = (mask_ref[node[:, None], other[None, :]] != 0) & inside[None, :]
    keys, values = (
      ref[other * kv_heads + kv_head, :] for ref in (k_nodes_ref, v_nodes_ref)
    )
    scores = scores_of(keys, visible)
    top = scores.max(axis=1)
    weights = weigh(scores, visible, top)
    top_ref[...], total_ref[...] = top, weights.sum(axis=1)
    out_ref[...] = dot(weights.astype(values.dtype), values)


def _combine(out_ref, top_ref, total_ref, merged_ref, *, padded):
  """One head of one node: the parts of its softmax."""
  parts = out_ref.shape[0]
  part = lax.iota(jnp.int32, padded)
  inside = part < parts
  part = jnp.minimum(part, parts - 1)
  top = top_ref[part]
  weight = jnp.where(inside, jnp.exp(top - top.max()), 0.0)
  out = (out_ref[part, :] * weight[:, None]).sum(axis=0)
  merged_ref[...] = (out / (total_ref[part] * weight).sum()).astype(
    merged_ref.dtype
  )


def _tree_attention_kernel(
  q, k_nodes, v_nodes, k_prefix, v_prefix, length, mask, scale, first,
  implementation,
):  # fmt: skip
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f"tree_attention's kernel does not take {q.dtype}")
  n, heads, dim = q.shape
  kv_heads, capacity, _ = k_prefix.shape
  group = heads // kv_heads
  rows = _power_of_two(n * group)
  tile_rows, block = tile(rows, dim, q.dtype.itemsize, dispatch.shared_memory())
  splits = min(max(1, PROGRAMS // kv_heads), -(-capacity // block))

  interpret = implementation == "interpret"
  bounds = jnp.stack([jnp.asarray(first, jnp.int32), length.astype(jnp.int32)])

  def whole(x):
    return pl.BlockSpec(x.shape, lambda head, row, part: (0,) * x.ndim)

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
  mask = mask.astype(jnp.int32)
  parts = splits + 1
  partial = pl.pallas_call(
    functools.partial(
      _program,
      rows=tile_rows,
      columns=_power_of_two(n),
      group=group,
      scale=scale,
      splits=splits,
      block=block,
      precision=None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
    ),
    grid=(kv_heads, rows // tile_rows, parts),
    in_specs=[
      *(whole(x) for x in small),
      prefix,
      prefix,
      whole(bounds),
      whole(mask),
    ],
    out_specs=[of_part(tile_rows, dim), of_part(tile_rows), of_part(tile_rows)],
    out_shape=[
      jax.ShapeDtypeStruct((kv_heads, parts, rows, *rest), jnp.float32)
      for rest in ((dim,), (), ())
    ],
    compiler_params=pltriton.CompilerParams(
      num_warps=4 if tile_rows <= 32 else 8, num_stages=2
    ),
    interpret=interpret,
    name="tree_attention",
  )(*small, k_prefix, v_prefix, bounds, mask)

  def of_row(*shape):
    zeros = (0,) * len(shape)
    return pl.BlockSpec(
      (None, parts, None, *shape),
      lambda node, head: (
        head // group,
        0,
        node * group + head % group,
        *zeros,
      ),
    )

  return pl.pallas_call(
    functools.partial(_combine, padded=_power_of_two(parts)),
    grid=(n, heads),
    in_specs=[of_row(dim), of_row(), of_row()],
    out_specs=pl.BlockSpec(
      (None, None, dim), lambda node, head: (node, head, 0)
    ),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=pltriton.CompilerParams(num_warps=4),
    interpret=interpret,
    name="tree_attention_combine",
  )(*partial)
