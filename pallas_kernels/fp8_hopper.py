"""y = x W^T with W in FP8 for a Hopper GPU, by Mosaic GPU.

y^T = W x^T: rows of W are those of `wgmma`, rows of x its columns, so that few
rows of x waste nothing. A program, one on a multiprocessor, has some rows of W
and some of x at a time, and all columns: a warp group asks for codes ahead of
time (TMA, a ring in shared memory), two others multiply. The products of a
block of 128 columns are the FP8 units', which keep fewer bits than float32;
they are added up in float32, one block after the other. So what a row yields
depends neither on how many rows there are nor on how they are cut up, and
`fp8_tiles.plan` may choose.

Programs of a cluster have other rows of W and the same ones of x: each asks for
a part of these, for all of them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxlib.mlir.dialects import math as mlir_math
from jaxtyping import Array, Float

from pallas_kernels import dispatch, fp8_rows
from pallas_kernels.fp8_array import BLOCK, FP8Array
from pallas_kernels.fp8_tiles import (
  CONSUMERS,
  EIGHT,
  HIGH,
  PROGRAMS,
  ROOMY,
  Tile,
  clusters_of,
  plan,
)

REGISTERS = {"multiply": 240, "load": 24}
"""Of a thread."""


def takes(w: FP8Array) -> bool:
  """Whether the kernel takes the matrix: its rows, columns and scales."""
  rows, columns = w.codes.shape
  scales = (BLOCK, BLOCK), (1, columns)
  return (
    rows > 0
    and rows % EIGHT == 0
    and columns % BLOCK == 0
    and w.block in scales
  )


def matmul(
  x: Float[Array, "N I"],
  w: FP8Array,
  out_dtype,
  *,
  tile: Tile | None = None,
  interpret: bool = False,
) -> Float[Array, "N Q"]:
  """x W^T for a matrix that the kernel `takes`, rounded once.

  Args:
    tile: instead of that of `fp8_tiles.plan`.
    interpret: step by step in JAX, where clusters are of one program.
  """
  if not takes(w):
    raise ValueError(
      "fp8_hopper takes rows in eights, columns in 128s and scales of 128 by"
      f" 128 or of a row, not {w.codes.shape} and {w.block}"
    )
  programs = min(PROGRAMS, dispatch.multiprocessors(PROGRAMS))
  rows, columns = w.codes.shape

  @jax.custom_batching.custom_vmap
  def one(x, w):
    own = tile or plan(x.shape[0], rows, programs)
    return _matmul(
      x, w, own.filled(columns // BLOCK), programs, jnp.dtype(out_dtype),
      interpret,
    )  # fmt: skip

  @one.def_vmap
  def _(size, batched, x, w):
    own, of_weight = batched
    if not own or any(jax.tree.leaves(of_weight)):
      raise ValueError("a batch of weights in FP8, expected one for all")
    return one(x.reshape(-1, columns), w).reshape(size, -1, rows), True

  return one(x, w)


@dispatch.once("tile", "programs", "out_dtype", "interpret")
def _matmul(x, w, tile, programs, out_dtype, interpret):
  n = x.shape[0]
  rows, columns = w.codes.shape
  across = pl.cdiv(n, tile.columns)
  padded = across * tile.columns
  if interpret:  # Sums are not set to zero.
    tile = dataclasses.replace(tile, ahead=tile.blocks * tile.pieces)
  codes, scale = fp8_rows.quantize(
    x, w.block[1], padded, "interpret" if interpret else "triton"
  )
  weights, scales = w.codes, w.scale
  whole = w.block[1] == columns
  down = pl.cdiv(pl.cdiv(rows, tile.rows), tile.cluster)
  if whole:
    scales = scales[:, 0]
  if interpret:  # Codes are not multiplied.
    codes, weights = (x.astype(jnp.float32) for x in (codes, weights))
  swizzled = ()
  if not interpret:
    swizzled = (
      plgpu.TilingTransform((EIGHT, BLOCK)),
      plgpu.SwizzleTransform(128),
    )

  def ring(rows):
    shape = tile.stages, rows, tile.blocks * BLOCK
    return plgpu.SMEM(shape, codes.dtype, transforms=swizzled)

  shared = tile.cluster > 1
  scratch = dict(
    w_ring=ring(tile.padded),
    x_ring=ring(tile.columns),
    full=plgpu.Barrier(
      num_arrivals=2 if whole else 3, num_barriers=tile.stages
    ),
    empty=plgpu.ClusterBarrier(
      collective_axes=("peer",),
      num_arrivals=CONSUMERS,
      num_barriers=tile.stages,
    )
    if shared
    else plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
  )
  if not whole:
    scratch["s_ring"] = plgpu.SMEM(
      (tile.stages, tile.scales, tile.columns), jnp.float32
    )
  units = down * across
  turns = pl.cdiv(units, clusters_of(tile, programs))
  kernel = plgpu.kernel(
    functools.partial(
      _program, tile=tile, across=across, units=units, interpret=interpret
    ),
    # Who stores would have to tell rows of x that there are not.
    out_type=jax.ShapeDtypeStruct((padded, rows), out_dtype),
    scratch_types=scratch,
    grid=(pl.cdiv(units, turns),),
    grid_names=("program",),
    cluster=(tile.cluster,) if shared else (),
    cluster_names=("peer",) if shared else (),
    num_threads=1 + CONSUMERS,
    thread_name="group",
    interpret=plgpu.InterpretGPUParams() if interpret else None,
    kernel_name="fp8_hopper",
  )
  return kernel(codes, scale, weights, scales)[:n]


def _program(
  x_ref, s_ref, w_ref, scale_ref, out_ref, *, tile, across, units, interpret,
  w_ring, x_ring, full, empty, s_ring=None,
):  # fmt: skip
  """Some rows of W and of x after others.

  Args:
    x_ref: codes [n, I].
    s_ref: their scales [C, n].
    w_ref: codes [Q, I].
    scale_ref: their scales [R, C], or [Q].
    out_ref: [n, Q].
    across: tiles that all rows of x are.
    units: what clusters share out, a row tile for each program at a time.
  """
  cluster, clusters = lax.axis_index("program"), lax.axis_size("program")
  peer = lax.axis_index("peer") if tile.cluster > 1 else 0
  group = lax.axis_index("group")
  steps = x_ref.shape[1] // (BLOCK * tile.blocks)
  mine = (units - 1 - cluster) // clusters + 1

  def place(i):
    """The first row of W and of x."""
    unit = cluster + i * clusters
    down = unit // across * tile.cluster + peer
    return down * tile.rows, lax.rem(unit, across) * tile.columns

  @pl.when(group == CONSUMERS)
  def _():
    if not interpret:
      plgpu.set_max_registers(REGISTERS["load"], action="decrease")
    _load(
      x_ref, s_ref, w_ref, x_ring, s_ring, w_ring, full, empty,
      place, mine, steps, tile=tile,
    )  # fmt: skip

  @pl.when(group < CONSUMERS)
  def _():
    if not interpret:
      plgpu.set_max_registers(REGISTERS["multiply"], action="increase")

    def unit(i, _):
      row, column = place(i)
      height = jnp.minimum(tile.rows, out_ref.shape[1] - row)
      if tile.by_rows:
        row, height = row + group * HIGH, height - group * HIGH
      else:
        column += group * tile.own
      totals = _sum_up(
        x_ring, s_ring, w_ring, scale_ref, full, empty, i * steps, steps,
        row, group, tile=tile, interpret=interpret,
      )  # fmt: skip
      width = tile.own // tile.pieces
      for p, total in enumerate(totals):
        first = column + p * width
        if s_ring is None:
          total *= _outer(
            _row_scales(scale_ref, row, interpret),
            plgpu.load(
              s_ref.at[0, pl.ds(first, width)],
              layout=plgpu.Layout.WGMMA.reduce(0),
              optimized=False,
            ),
          )
        _store(out_ref, total, row, first, height, interpret)

    lax.fori_loop(0, mine, unit, None)


def _load(
  x_ref, s_ref, w_ref, x_ring, s_ring, w_ring, full, empty, place, mine, steps,
  *, tile,
):  # fmt: skip
  """Keeps the ring full."""
  axes = ("peer",) if tile.cluster > 1 else None
  depth = tile.blocks * BLOCK
  # TMA writes to multiples of 128 bytes.
  parted = tile.columns % (32 * tile.cluster) == 0

  def load(item, _):
    slot = lax.rem(item, tile.stages)

    @pl.when(item >= tile.stages)
    def _():
      plgpu.barrier_wait(empty.at[slot])

    # Behind the wait: a loader has few registers.
    barrier, k = full.at[slot], lax.rem(item, steps)
    row, column = place(item // steps)
    # Rows behind the last are zeros.
    plgpu.copy_gmem_to_smem(
      w_ref.at[pl.ds(row, tile.rows), pl.ds(k * depth, depth)],
      w_ring.at[slot, pl.ds(0, tile.rows)],
      barrier,
    )
    columns = pl.ds(column, tile.columns)
    plgpu.copy_gmem_to_smem(
      x_ref.at[columns, pl.ds(k * depth, depth)],
      x_ring.at[slot],
      barrier,
      collective_axes=axes,
    )
    if s_ring is not None:
      plgpu.copy_gmem_to_smem(
        s_ref.at[pl.ds(k * tile.blocks, tile.blocks), columns],
        s_ring.at[slot, pl.ds(0, tile.blocks)],
        barrier,
        collective_axes=axes if parted else None,
      )

  items = mine * steps
  lax.fori_loop(0, items, load, None)
  # No barrier is left with a phase that nobody has waited for, nor a program
  # while others write to its memory.
  lax.fori_loop(
    jnp.maximum(items - tile.stages, 0),
    items,
    lambda item, _: plgpu.barrier_wait(empty.at[lax.rem(item, tile.stages)]),
    None,
  )


def _sum_up(
  x_ring, s_ring, w_ring, scale_ref, full, empty, begin, steps, row, group,
  *, tile, interpret,
):  # fmt: skip
  """Sums over all columns, [64, rows of x] each.

  Args:
    begin: items of the ring before.
    row: the consumer's first one of W.
  """
  width = tile.own // tile.pieces
  products = [(b, p) for b in range(tile.blocks) for p in range(tile.pieces)]
  high = pl.ds(group * HIGH if tile.by_rows else 0, HIGH)
  # Whether all rows of a tile have the same scale.
  same = BLOCK % tile.rows == 0
  # Whether scales of x have to wait for room in registers.
  tight = tile.own > ROOMY

  def scales(k):
    """Of W, of the blocks of a step: of the rows up to the next multiple of
    128, and of those from there on."""
    if s_ring is None:
      return ()
    last = scale_ref.shape[0] - 1
    here = [jnp.minimum(row // BLOCK, last)]
    if not same:
      here.append(jnp.minimum(row // BLOCK + 1, last))
    first = jnp.minimum(k, steps - 1) * tile.blocks
    return tuple(
      tuple(scale_ref[r, first + b] for r in here) for b in range(tile.blocks)
    )

  def columns(p):
    first = p * width
    return pl.ds(first if tile.by_rows else group * tile.own + first, width)

  def step(k, carry):
    *totals, own = carry
    slot = lax.rem(begin + k, tile.stages)
    ahead = scales(k + 1)
    plgpu.barrier_wait(full.at[slot])

    def scope(*sums):
      found = list(totals)
      factors = {}

      def factor(b, p):
        if s_ring is None:
          return None
        of_x = plgpu.load(
          s_ring.at[slot, b, columns(p)], layout=plgpu.Layout.WGMMA.reduce(0)
        )
        if same:
          return _spread(of_x * own[b][0], 1, width)
        return _outer(_either(own[b], row), of_x)

      def start(i):
        b, p = products[i]
        here = pl.ds(b * BLOCK, BLOCK)
        acc = sums[i % len(sums)]
        if i >= len(sums):
          acc[...] = _zeros(width)
        plgpu.wgmma(
          acc,
          w_ring.at[slot, high, here],
          x_ring.at[slot, columns(p), here].transpose((1, 0)),
        )
        if not tight:
          factors[i] = factor(b, p)

      for i in range(len(sums)):
        start(i)
      for i, (b, p) in enumerate(products):
        left = min(len(sums), len(products) - i) - 1
        product = plgpu.wgmma_accumulator_load(sums[i % len(sums)], wait_n=left)
        own_factor = factor(b, p) if tight else factors.pop(i)
        found[p] = _add(found[p], product, own_factor, interpret)
        if i + len(sums) < len(products):
          start(i + len(sums))
      return found

    accumulators = [plgpu.ACC((HIGH, width), jnp.float32)] * tile.ahead
    totals = pl.run_scoped(scope, *accumulators)
    if tile.cluster > 1:
      _meet()
    plgpu.barrier_arrive(empty.at[slot])
    return *totals, ahead

  carry = (*[_zeros(width)] * tile.pieces, scales(0))
  return lax.fori_loop(0, steps, step, carry)[: tile.pieces]


def _meet():
  """Waits for all warps of a group: one of them tells other programs that what
  was in a slot has been read, scales too."""

  @plgpu.inline_mgpu()
  def wait(_):
    mgpu.utils.warpgroup_barrier()

  wait()


def _zeros(width):
  return plgpu.layout_cast(
    jnp.zeros((HIGH, width), jnp.float32), plgpu.Layout.WGMMA
  )


def _spread(x, axis, width):
  """A row or a column as [64, width]."""
  return lax.broadcast_in_dim(x, (HIGH, width), [axis])


def _outer(of_w, of_x):
  width = of_x.shape[0]
  return _spread(of_x, 1, width) * _spread(of_w, 0, width)


def _row_scales(scale_ref, row, interpret):
  """Of 64 rows from one on; behind the last, its scale."""
  last = scale_ref.shape[0] - 1
  if interpret:
    return scale_ref[...][jnp.minimum(row + jnp.arange(HIGH), last)]
  layout = plgpu.Layout.WGMMA.reduce(1)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
    return_type=plgpu.ShapeDtypeStruct((HIGH,), jnp.float32, layout=layout),
  )
  def read(_, scale_ref, row):
    index = ir.IndexType.get()
    one = ir.VectorType.get((1,), ir.F32Type.get())
    first, quad, _ = _thread()
    at = arith.addi(row.registers.item(), arith.addi(first, quad))
    values = []
    for half in range(2):
      here = arith.addi(at, _constant(EIGHT * half))
      here = arith.minui(here, _constant(last))
      value = memref.load(scale_ref, [arith.index_cast(index, here)])
      values.append(vector.from_elements(one, [value]))
    kept = layout.to_mgpu()
    return mgpu.FragmentedArray(
      _registers=np.array(values).reshape(kept.registers_shape((HIGH,))),
      _layout=kept,
      _is_signed=None,
    )

  return read(scale_ref, row)


def _either(scales, row):
  """The second from the next multiple of 128 rows on, before it the first."""
  low, high = scales
  index = plgpu.broadcasted_iota(
    jnp.int32, (HIGH,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
  )
  return jnp.where(index < BLOCK - lax.rem(row, BLOCK), low, high)


def _add(total, product, factor, interpret):
  """total + product * factor, rounded once; without a factor the sum."""
  if factor is None:
    return total + product
  if interpret:
    return total + product * factor
  layout = plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(layout,) * 3,
    return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout),
  )
  def fused(_, total, product, factor):
    return product._pointwise(mlir_math.fma, factor, total)

  return fused(total, product, factor)


def _store(out_ref, total, row, column, height, interpret):
  """Writes the first `height` rows of a total, as columns.

  Args:
    out_ref: [n, Q]; Q is a multiple of 8, and so is the height.
  """
  width = total.shape[1]
  if interpret:
    for first in range(0, HIGH, EIGHT):

      @pl.when(first < height)
      def _(first=first):
        at = pl.ds(row + first, EIGHT)
        part = total[first : first + EIGHT]
        out_ref[pl.ds(column, width), at] = part.T.astype(out_ref.dtype)

    return
  stride = out_ref.shape[1]
  narrow = out_ref.dtype == jnp.bfloat16
  scalar = plgpu.Layout.WG_SPLAT(())

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar)
  )
  def write(_, out_ref, total, row, column, height):
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    row, column, height = (x.registers.item() for x in (row, column, height))
    c = _constant
    first, quad, pair = _thread()
    # After a transposition of 8 by 8 a thread has two rows of a column.
    across, down = (quad, pair) if narrow else (pair, quad)
    kind = ir.BF16Type.get() if narrow else ir.F32Type.get()
    if narrow:
      total = total.astype(kind)
    registers = total.registers.reshape(width // EIGHT, 2)
    at = arith.addi(
      arith.muli(arith.extui(i64, arith.addi(column, across)), c(stride, i64)),
      arith.extui(i64, arith.addi(arith.addi(row, first), down)),
    )
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out_ref), [at], kind)
    for half in range(2):
      values = []
      for j in range(width // EIGHT):
        value = registers[j, half]
        if narrow:
          word = mgpu.utils.bitcast(value, i32)
          values.append([(0, _transpose(word))])
        else:
          values.append(
            [(i, llvm.extractelement(value, c(i))) for i in range(2)]
          )
      top = arith.addi(first, c(EIGHT * half))
      inside = arith.cmpi(arith.CmpIPredicate.slt, top, height)
      branch = scf.IfOp(inside)
      with ir.InsertionPoint(branch.then_block):
        for j, parts in enumerate(values):
          for i, value in parts:
            offset = (EIGHT * j + i) * stride + EIGHT * half
            place = mgpu.utils.getelementptr(base, [offset], kind)
            llvm.store(value, place, alignment=4)
        scf.yield_([])

  write(out_ref, total, row, column, height)


def _constant(value, kind=None) -> Any:
  return mgpu.c(value, kind or ir.IntegerType.get_signless(32))


def _thread() -> tuple[Any, Any, Any]:
  """The first row of its warp; its row there, and its first column, of 8 by 8
  sums of a product."""
  c = _constant
  thread = arith.remui(mgpu.utils.thread_idx(), c(128))
  lane = arith.remui(thread, c(32))
  first = arith.muli(arith.divui(thread, c(32)), c(16))
  pair = arith.muli(arith.remui(lane, c(4)), c(2))
  return first, arith.divui(lane, c(4)), pair


def _transpose(word) -> Any:
  """8 by 8 numbers of 16 bits, two in a row for each thread of a warp."""
  i32 = ir.IntegerType.get_signless(32)
  return llvm.inline_asm(
    i32, [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r",
    has_side_effects=True,
  )  # fmt: skip
