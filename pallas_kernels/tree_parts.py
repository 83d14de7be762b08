"""Parts of a tree attention's softmax: who leaves them, and their sum.

A program of a first kernel attends to some of the nodes and the prefix, the
keys of a query row being cut into parts: it leaves the weighted mean of its
values, the largest score and the sum of weights. A second kernel adds up
what the parts left, in their order.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

MASKED = -1e30
"""Score of an invisible position: finite, so that no row turns into NaN."""

LOG2_E = math.log2(math.e)

MERGED_ROWS = 4
"""Query rows of a program that merges parts, at most."""

PARTS_AT_ONCE = 16
"""Parts that it asks for together."""


def power_of_two(n: int) -> int:
  """The least from `n` on, 16 at least."""
  return max(16, pl.next_power_of_2(n))


def shares(
  first, length, *, node_steps: int, splits: int, block: int, align: int = 1
):
  """Steps of a pass and of a part: the nodes first, then prefix blocks.

  The nodes are all in the first part.

  Args:
    first, length: the visible rows of the prefix are [first, length).
    node_steps: steps that the nodes are.
    splits: parts at most.
    block: rows of the prefix that are a step.
    align: the first block begins at a multiple of so many rows.
  """
  if align > 1:
    first = first // align * align
  steps = node_steps + pl.cdiv(jnp.maximum(length - first, 0), block)
  return steps, jnp.maximum(node_steps, pl.cdiv(steps, splits))


def combine(
  out: Float[Array, "Hkv S R D"],
  top: Float[Array, "Hkv S R"],
  total: Float[Array, "Hkv S R"],
  *,
  nodes: int,
  group: int,
  padded: int | None = None,
  interpret: bool,
) -> Float[Array, "N H D"]:
  """What the parts of each query row are together.

  Args:
    out: weighted means of values; rows are nodes' heads of the group.
    top: largest scores, times log2(e).
    total: sums of 2^(score - top). Where it is 0 and `top` is `MASKED`, a part
      without keys, `out` does not matter. (So that nobody has to wait for the
      bounds of the prefix to know how many parts there are.)
    nodes: N.
    group: query heads of a key head.
    padded: where rows are heads' nodes instead, so many of a head; eights.
  """
  kv_heads, splits, _, dim = out.shape
  heads = kv_heads * group
  # Rows one after the other that are also one program's.
  run = nodes * group if padded is None else nodes
  together = math.gcd(MERGED_ROWS, run)
  runs = run // together

  def place(index):
    """Block of packed rows."""
    if padded is None:
      return index
    return index // runs * (padded // together) + index % runs

  def of_rows(*shape):
    zeros = (0,) * len(shape)
    return pl.BlockSpec(
      (None, splits, together, *shape),
      lambda head, index: (head, 0, place(index), *zeros),
    )

  merged = pl.pallas_call(
    functools.partial(
      _combine, rows=together, group=group, splits=splits,
      runs=None if padded is None else runs,
    ),
    grid=(kv_heads, nodes * group // together),
    in_specs=[of_rows(dim), of_rows(), of_rows()],
    out_specs=pl.BlockSpec((nodes * heads, dim), lambda *index: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((nodes * heads, dim), out.dtype),
    compiler_params=pltriton.CompilerParams(num_warps=4),
    interpret=interpret,
    name="tree_attention_combine",
  )(out, top, total)  # fmt: skip
  return merged.reshape(nodes, heads, dim)


def _combine(
  out_ref, top_ref, total_ref, merged_ref, *, rows, group, splits, runs
):  # fmt: skip
  """Some query rows of a key head: the parts of their softmax."""
  kv_head, kv_heads = pl.program_id(0), pl.num_programs(0)
  parts = jnp.minimum(lax.iota(jnp.int32, power_of_two(splits)), splits - 1)
  own = lax.iota(jnp.int32, rows)
  top = top_ref[parts[:, None], own[None, :]].max(axis=0)
  batch = min(splits, PARTS_AT_ONCE)

  def add(step, carry):
    merged, total = carry
    asked = []  # for all of them before any is used
    for i in range(batch):
      at = jnp.minimum(step * batch + i, splits - 1)
      asked.append((top_ref[at, :], total_ref[at, :], out_ref[at, :, :]))
    for i, (part_top, part_total, out) in enumerate(asked):
      weight = jnp.exp2(part_top - top) * part_total
      weight = jnp.where(step * batch + i < splits, weight, 0.0)
      total += weight
      weight = weight[:, None]
      merged += jnp.where(weight > 0, weight * out.astype(jnp.float32), 0.0)
    return merged, total

  carry = (
    jnp.zeros((rows, out_ref.shape[2]), jnp.float32),
    jnp.zeros((rows,), jnp.float32),
  )
  if batch == splits:
    merged, total = add(0, carry)
  else:
    merged, total = lax.fori_loop(0, pl.cdiv(splits, batch), add, carry)
  index = pl.program_id(1)
  if runs is None:
    row = index * rows + own
    node, member = row // group, row % group
  else:
    node, member = index % runs * rows + own, index // runs
  merged_ref[(node * kv_heads + kv_head) * group + member, :] = (
    merged / total[:, None]
  ).astype(merged_ref.dtype)
