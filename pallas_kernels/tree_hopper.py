"""The first kernel of a tree's attention for a Hopper GPU, by Mosaic GPU.

One program on every multiprocessor, for two times 64 query rows of a key head
and a part of its keys: a warp group asks for keys and values ahead of time
(TMA, a ring in shared memory), one or two others multiply them with queries
that stay in shared memory (`wgmma`), and keep sums in registers. Parts of a
softmax are added up by `tree_parts.combine`.

Query rows of a key head are its heads' nodes: eight nodes of one head lie
next to each other in shared memory as `wgmma` and TMA want them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch, tree_parts
from pallas_kernels.tree_parts import LOG2_E, MASKED

PROGRAMS = 132
"""Multiprocessors of an H100 or H200; some Hopper cards have fewer."""
ROWS = 64
"""Query rows of a warp group: those of a `wgmma`."""
CONSUMERS = 2
"""Warp groups that multiply, at most; one more loads."""
BLOCK = 64
"""Keys, or values, of a slot of the ring: what `wgmma` takes of values."""
WORDS = BLOCK // 32
IN_FLIGHT = 1
"""Products that may be while weights are computed: 1, those with values."""
REGISTERS = {"multiply": 232, "load": 40}
"""Of a thread, where two warp groups multiply."""
SHARED_MEMORY = 225 << 10
"""Bytes of a program's queries and ring."""
MOST_SLOTS = 8
EIGHT = 8
"""Rows of a tile in shared memory: copies begin at multiples."""
DIMS = (64, 128, 256)
"""Sizes of a head."""


def takes(q: Array, k_prefix: Array, scale: float) -> bool:
  """Whether the kernel takes the operands of `attend`."""
  return (
    q.dtype == k_prefix.dtype == jnp.bfloat16
    and q.shape[2] in DIMS
    and k_prefix.shape[1] % EIGHT == 0
    and scale > 0
  )


LONG, MANY = 2048, 32
"""Room for rows of the prefix from which on the kernel is faster than Triton's,
and nodes from which on it is so with less. On an H200 (24 heads of 256) 1, 16,
32 and 64 nodes take 10.5, 13.0, 14.1 and 14.4 us at 1,024 rows (Triton's 8.9,
10.7, 12.0 and 16.5), 13.6 to 21.5 at 4,096 (15.5 to 27.0) and 27.2 to 53.5 at
16,384 (38.7 to 71.1)."""


def pays(q: Array, k_prefix: Array) -> bool:
  """Whether the kernel is the faster one, by the shapes of `attend`."""
  return k_prefix.shape[1] >= LONG or q.shape[0] > MANY


def attend(
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
  interpret: bool = False,
) -> Float[Array, "N H D"]:
  """What `tree_attention` has, for operands that it `takes`.

  Rows of the prefix behind `length` may be read, and do not matter.

  Args:
    interpret: step by step in JAX.
  """
  if not takes(q, k_prefix, scale):
    raise ValueError(
      "tree_hopper takes bfloat16, heads of 64, 128 or 256, room for a multiple"
      f" of 8 rows and a positive scale, not {q.dtype}, {q.shape[2]},"
      f" {k_prefix.shape[1]} and {scale}"
    )
  return _attend(
    q, k_nodes, v_nodes, k_prefix, v_prefix, length, mask,
    jnp.asarray(first, jnp.int32), scale=scale, interpret=interpret,
    programs=min(PROGRAMS, dispatch.multiprocessors(PROGRAMS)),
  )  # fmt: skip


@dispatch.once("scale", "interpret", "programs")
def _attend(
  q, k_nodes, v_nodes, k_prefix, v_prefix, length, mask, first,
  *, scale, interpret, programs,
):  # fmt: skip
  n, heads, dim = q.shape
  kv_heads = k_prefix.shape[0]
  group = heads // kv_heads
  padded = -(-n // EIGHT) * EIGHT
  if n > EIGHT and n < padded:  # TMA takes fewer than eight, or eights.
    q, k_nodes, v_nodes = (
      jnp.pad(x, ((0, padded - n), (0, 0), (0, 0)))
      for x in (q, k_nodes, v_nodes)
    )
  consumers = min(CONSUMERS, pl.cdiv(group * padded, ROWS))
  row_tiles = pl.cdiv(group * padded, consumers * ROWS)
  rows = row_tiles * consumers * ROWS
  node_steps = pl.cdiv(n, BLOCK)
  most = node_steps + pl.cdiv(k_prefix.shape[1], BLOCK)
  splits = max(1, min(programs // (kv_heads * row_tiles), most))
  slots = min(
    MOST_SLOTS,
    (SHARED_MEMORY // (2 * dim) - consumers * ROWS) // BLOCK,
  )
  # Which nodes a row sees, in words of 32.
  seen = jnp.pad(mask, ((0, padded - n), (0, node_steps * BLOCK - n)))
  seen = jnp.tile(seen, (pl.cdiv(rows, padded), 1))[:rows].reshape(rows, -1, 32)
  seen = jnp.where(seen, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), 0)
  seen = lax.bitcast_convert_type(
    seen.sum(axis=2, dtype=jnp.uint32).T, jnp.int32
  )
  bounds = (first.reshape(1), length.astype(jnp.int32).reshape(1))

  swizzled = (plgpu.TilingTransform((EIGHT, 64)), plgpu.SwizzleTransform(128))
  chunk = math.gcd(padded, ROWS)
  scratch = dict(
    queries=plgpu.SMEM((consumers, ROWS, dim), q.dtype, transforms=swizzled),
    ring=plgpu.SMEM((slots, BLOCK, dim), q.dtype, transforms=swizzled),
    asked=plgpu.Barrier(num_arrivals=consumers * (ROWS // chunk)),
    full=plgpu.Barrier(num_barriers=slots),
    empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
  )
  if interpret:
    scratch["operand"] = plgpu.SMEM((consumers, ROWS, BLOCK), q.dtype)
  parts = plgpu.kernel(
    functools.partial(
      _program, scale=scale, group=group, padded=padded, chunk=chunk,
      node_steps=node_steps, splits=splits, consumers=consumers,
      interpret=interpret,
    ),
    out_type=(
      # Rounded as weights are: at 64 nodes they are more than the prefix.
      jax.ShapeDtypeStruct((kv_heads, splits, rows, dim), q.dtype),
      jax.ShapeDtypeStruct((kv_heads, splits, rows), jnp.float32),
      jax.ShapeDtypeStruct((kv_heads, splits, rows), jnp.float32),
    ),
    scratch_types=scratch,
    grid=(kv_heads, row_tiles, splits),
    grid_names=("head", "rows", "part"),
    num_threads=1 + consumers,
    thread_name="group",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=plgpu.InterpretGPUParams() if interpret else None,
    kernel_name="tree_hopper",
  )(q, k_nodes, v_nodes, k_prefix, v_prefix, *bounds, seen)  # fmt: skip
  return tree_parts.combine(
    *parts, nodes=n, group=group, padded=padded, interpret=interpret
  )


def _program(
  q_ref, k_nodes_ref, v_nodes_ref, k_ref, v_ref, first_ref, length_ref,
  seen_ref, out_ref, top_ref, total_ref, *,
  scale, group, padded, chunk, node_steps, splits, consumers, interpret,
  queries, ring, asked, full, empty, operand=None,
):  # fmt: skip
  """Some query rows of a key head; a part of the nodes and the prefix.

  Leaves what `tree_parts.combine` takes.
  """
  head, row_tile, part = (lax.axis_index(x) for x in ("head", "rows", "part"))
  thread = lax.axis_index("group")
  loads = thread == consumers
  # Who asks for keys has to wait for these; queries are on their way by then.
  first, length = first_ref[0], length_ref[0]

  @pl.when(loads)
  def _():
    _load_queries(
      q_ref, queries, asked, head, row_tile,
      group=group, padded=padded, chunk=chunk,
    )  # fmt: skip

  steps, share = tree_parts.shares(
    first, length,
    node_steps=node_steps, splits=splits, block=BLOCK, align=EIGHT,
  )  # fmt: skip
  begin = jnp.minimum(part * share, steps)
  end = jnp.minimum(begin + share, steps)
  # Where block i of the prefix begins, if blocks of nodes were the first ones.
  start = first // EIGHT * EIGHT - node_steps * BLOCK

  @pl.when(loads)
  def _():
    if consumers > 1 and not interpret:
      plgpu.set_max_registers(REGISTERS["load"], action="decrease")
    _load(
      (k_nodes_ref, v_nodes_ref), (k_ref, v_ref), ring, full, empty,
      head, begin, end, start, node_steps=node_steps,
    )  # fmt: skip

  @pl.when(thread < consumers)
  def _():
    if consumers > 1 and not interpret:
      plgpu.set_max_registers(REGISTERS["multiply"], action="increase")
    rows = pl.ds((row_tile * consumers + thread) * ROWS, ROWS)

    def words(i):
      first = jnp.minimum(i, node_steps - 1) * WORDS
      return [
        plgpu.load(
          seen_ref.at[first + word, rows],
          layout=plgpu.Layout.WGMMA.reduce(1),
          optimized=False,
        )
        for word in range(WORDS)
      ]

    # Before keys come, not once they have.
    of_first = words(begin)

    def visible(i, begins: bool):
      column = _columns()
      index = start + i * BLOCK + column
      inside = (index >= first) & (index < length)
      if not begins and node_steps == 1:
        return inside
      bits, *more = (
        lax.broadcast_in_dim(word, column.shape, [0])
        for word in (of_first if begins else words(i))
      )
      for word, value in enumerate(more, 1):
        bits = jnp.where(column >= 32 * word, value, bits)
      bits = lax.shift_right_logical(bits, column & 31) & 1
      return jnp.where(_everywhere(i < node_steps), bits != 0, inside)

    plgpu.barrier_wait(asked)

    @pl.when(begin < end)
    def _():
      top, total, out = _attend_to(
        queries.at[thread], ring, full, empty, begin, end, visible, scale=scale,
        operand=None if operand is None else operand.at[thread],
      )  # fmt: skip
      top_ref[head, part, rows] = top
      total_ref[head, part, rows] = total
      out *= lax.broadcast_in_dim(1 / total, out.shape, [0])
      # All products with the queries are done.
      queries[thread] = out.astype(queries.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(queries.at[thread], out_ref.at[head, part, rows])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(begin == end)
    def _():
      top_ref[head, part, rows], total_ref[head, part, rows] = _nothing()


def _load_queries(
  q_ref, queries, asked, head, row_tile, *, group, padded, chunk
):  # fmt: skip
  """Asks for a program's query rows, some nodes of a head at a time."""
  consumers = queries.shape[0]
  of_head = padded // chunk
  for consumer in range(consumers):
    for i in range(ROWS // chunk):
      at = (row_tile * consumers + consumer) * (ROWS // chunk) + i
      # Rows behind the last are another head's once more, and never read.
      member = jnp.minimum(at // of_head, group - 1)
      nodes = pl.ds(lax.rem(at, of_head) * chunk, chunk)
      plgpu.copy_gmem_to_smem(
        q_ref.at[nodes, head * group + member],
        queries.at[consumer, pl.ds(i * chunk, chunk)],
        asked,
      )


def _load(
  nodes, prefix, ring, full, empty, head, begin, end, start, *, node_steps
):  # fmt: skip
  """Keeps the ring full: keys and values take turns."""
  slots = ring.shape[0]

  def load(i, _):
    for which in range(2):
      item = 2 * (i - begin) + which
      slot = lax.rem(item, slots)

      @pl.when(item >= slots)
      def _(slot=slot):
        plgpu.barrier_wait(empty.at[slot])

      @pl.when(i < node_steps)
      def _(slot=slot, ref=nodes[which]):
        plgpu.copy_gmem_to_smem(
          ref.at[pl.ds(i * BLOCK, BLOCK), head], ring.at[slot], full.at[slot]
        )

      @pl.when(i >= node_steps)
      def _(slot=slot, ref=prefix[which]):
        rows = pl.ds(pl.multiple_of(start + i * BLOCK, EIGHT), BLOCK)
        plgpu.copy_gmem_to_smem(
          ref.at[head, rows], ring.at[slot], full.at[slot]
        )

  lax.fori_loop(begin, end, load, None)
  # No barrier is left with a phase that nobody has waited for.
  items = 2 * (end - begin)
  lax.fori_loop(
    jnp.maximum(items - slots, 0),
    items,
    lambda i, _: plgpu.barrier_wait(empty.at[lax.rem(i, slots)]),
    None,
  )


def _columns():
  return plgpu.broadcasted_iota(
    jnp.int32, (ROWS, BLOCK), 1, layout=plgpu.Layout.WGMMA
  )


def _everywhere(value):
  return plgpu.layout_cast(
    jnp.broadcast_to(value, (ROWS, BLOCK)), plgpu.Layout.WGMMA
  )


def _nothing():
  """Largest score and sum of weights of no key."""
  return tuple(
    plgpu.layout_cast(
      jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
    )
    for value in (MASKED, 0)
  )


def _attend_to(
  queries, ring, full, empty, begin, end, visible, *, scale, operand
):  # fmt: skip
  """Largest score, sum of weights, weighted values of blocks begin to end - 1.

  While keys of a block are multiplied, values of the block before are: weights
  are computed beside the latter.

  Args:
    visible: which keys of a block each row sees [64, 64], by block and whether
      it is the first one.
    operand: shared memory for weights where the interpreter is to multiply
      them; it does not with registers.
  """
  slots = ring.shape[0]
  dim = queries.shape[1]

  def slot(item):
    return lax.rem(item, slots)

  def weigh(i, scores, top, total, begins=False):
    scores = jnp.where(visible(i, begins), scores, MASKED)
    factor = scale * LOG2_E
    higher = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - higher)
    weights = jnp.exp2(
      scores * factor - lax.broadcast_in_dim(higher, scores.shape, [0])
    )
    total = total * shrink + weights.sum(axis=1)
    return higher, total, shrink, weights

  def add_values(item, out, weights, sums):
    """Starts, or does."""
    plgpu.barrier_wait(full.at[slot(item)])
    if operand is None:
      sums[...] = out
      plgpu.wgmma(sums, weights, ring.at[slot(item)])
    else:
      operand[...] = weights
      plgpu.wgmma(sums, operand, ring.at[slot(item)])

  def result(out, sums):
    return sums[...] if operand is None else out + sums[...]

  def multiply_keys(item, scores):
    plgpu.barrier_wait(full.at[slot(item)])
    plgpu.wgmma(scores, queries, ring.at[slot(item)].transpose((1, 0)))

  def step(i, carry):
    top, total, out, weights = carry
    item = 2 * (i - begin)

    def scope(scores, sums):
      multiply_keys(item, scores)
      add_values(item - 1, out, weights, sums)
      found = plgpu.wgmma_accumulator_load(scores, wait_n=IN_FLIGHT)
      plgpu.barrier_arrive(empty.at[slot(item)])
      # The compiler would compute weights once the sums have come.
      higher, sum_, shrink, own = lax.optimization_barrier(
        weigh(i, found, top, total)
      )
      added = result(out, sums)
      plgpu.barrier_arrive(empty.at[slot(item - 1)])
      added *= lax.broadcast_in_dim(shrink, added.shape, [0])
      # A product's operands are not to change while others are in flight.
      return higher, sum_, added, own.astype(ring.dtype)

    return pl.run_scoped(scope, accumulator(BLOCK), accumulator(dim))

  def first_step(scores):
    multiply_keys(0, scores)
    found = scores[...]
    plgpu.barrier_arrive(empty.at[0])
    top, total, _, weights = weigh(begin, found, *_nothing(), begins=True)
    out = plgpu.layout_cast(
      jnp.zeros((ROWS, dim), jnp.float32), plgpu.Layout.WGMMA
    )
    return top, total, out, weights.astype(ring.dtype)

  def last_step(out, weights, sums):
    item = 2 * (end - begin) - 1
    add_values(item, out, weights, sums)
    out = result(out, sums)
    plgpu.barrier_arrive(empty.at[slot(item)])
    return out

  def accumulator(columns):
    return plgpu.ACC((ROWS, columns), jnp.float32)

  carry = pl.run_scoped(first_step, accumulator(BLOCK))
  top, total, out, weights = lax.fori_loop(begin + 1, end, step, carry)
  out = pl.run_scoped(
    functools.partial(last_step, out, weights), accumulator(dim)
  )
  return top, total, out
