"""The first kernel of a W12 product for a Hopper GPU, by Mosaic GPU.

One program on every multiprocessor: a warp group asks for tiles and rows of x
ahead of time (TMA, a ring in shared memory), two others decode them into the
registers that the tensor cores read weights from: in turn, each tile by one of
them, and then what the two sum up is added in shared memory, so that a program
leaves half the sums that one of `w12_matmul` with as many registers does; or,
where sums of four quarters do not fit, two quarters of every tile each. Sums
are added up, scaled and completed by the lists in `w12_parts`.
"""

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
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Float

from pallas_kernels import dispatch, w12_array, w12_parts, w12_unpack
from pallas_kernels.w12_array import TILE, W12Array
from pallas_kernels.w12_parts import Shares, rows_of

PROGRAMS = 132
"""Multiprocessors of an H100 or H200; some Hopper cards have fewer."""
DECODERS = 2
"""Warp groups that decode; one more loads."""
REGISTERS = {"decode": 224, "load": 56}
"""Of a thread."""
MAX_ROWS = 128
"""Rows of x."""
FEW, SOME = 32, 64
"""Rows of x up to which four quarters of a tile fit in registers decoded, and
up to which their sums do."""
SHARED_MEMORY = 224 << 10
"""Bytes of a program's ring and sums."""
MOST_STAGES = 4
"""More are slower on an H200: by 1 to 2 % at 16 rows (8 stages), by 4 to 9 %
at 64 (6 stages); 2 are slower by 16 to 21 %."""
ROUND = 16
"""Rows of x that are written by columns at a time."""


def takes(w: W12Array) -> bool:
  """Whether the kernel takes the matrix: planes in tiles of 64 by 64."""
  return w.tiled and w.low.shape[2:] == (TILE, TILE)


def matmul(
  x: Float[Array, "N I"],
  w: W12Array,
  out_dtype,
  *,
  view: bool = False,
  midpoint: bool = True,
  expanded: Array | None = None,
  interpret: bool = False,
) -> Float[Array, "N O"]:
  """x W^T as `w12_matmul.matmul` has it, for 1 to 128 rows of x in bfloat16.

  Args:
    expanded: [4, T, K, h, w] bfloat16, see `w12_matmul.matmul`.
    interpret: step by step in JAX.
  """
  if x.dtype != jnp.bfloat16 or not takes(w):
    raise ValueError(
      "w12_hopper takes bfloat16 rows and planes in tiles of 64 by 64, not"
      f" {x.dtype} and {w.low.shape}"
    )
  n = x.shape[0]
  if n > 8 and n % 8:  # TMA takes fewer than eight, or eights.
    x = jnp.pad(x, ((0, -n % 8), (0, 0)))
  shares = Shares.of(w, TILE, min(PROGRAMS, dispatch.multiprocessors(PROGRAMS)))
  planes = [w.view01, w.view23] if view else [w.view01, w.view23, w.low]
  if expanded is not None:
    planes = list(expanded)
  parts, *columns = _stream(
    x, planes, shares, lists=not view, midpoint=midpoint, interpret=interpret
  )
  return w12_parts.finish(
    parts,
    w,
    n,
    out_dtype,
    columns=columns[0] if columns else None,
    shares=shares,
    run=TILE,
    interpret=interpret,
  )


@dispatch.once("shares", "lists", "midpoint", "interpret")
def _stream(
  x, planes, shares: Shares, *, lists: bool, midpoint: bool, interpret: bool
):
  """What programs sum up and, where lists are to be applied, x by columns.

  Returns:
    parts [T, 4, 64 groups, rows], float32, not scaled, and x [I, rows]; rows
    are `rows_of` those of x.
  """
  padded = rows_of(x.shape[0])
  quarters = meeting(padded)
  stages = stages_of(len(planes), padded, quarters)
  swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))

  def ring(rows, dtype):
    return plgpu.SMEM((stages, rows, TILE), dtype, transforms=swizzled)

  scratch = dict(
    x_ring=ring(padded, x.dtype),
    rings=[ring(TILE, plane.dtype) for plane in planes],
    full=plgpu.Barrier(num_arrivals=1 + len(planes), num_barriers=stages),
    empty=plgpu.Barrier(
      num_arrivals=1 if quarters else DECODERS, num_barriers=stages
    ),
  )
  if quarters:
    scratch["sums"] = plgpu.SMEM((quarters, TILE, padded), jnp.float32)
    scratch["both"] = plgpu.Barrier(num_arrivals=DECODERS)
  if interpret:
    scratch["operand"] = plgpu.SMEM((DECODERS, TILE, TILE), x.dtype)
  parts = jax.ShapeDtypeStruct(
    (shares.parts, 4, shares.groups * TILE, padded), jnp.float32
  )
  columns = jax.ShapeDtypeStruct((x.shape[1], padded), x.dtype)
  kernel = plgpu.kernel(
    functools.partial(
      _program,
      shares=shares,
      stages=stages,
      planes=len(planes),
      filled=w12_array.MIDPOINT if midpoint else 0,
      interpret=interpret,
    ),
    out_type=(parts, columns) if lists else (parts,),
    scratch_types=scratch,
    grid=(shares.programs,),
    grid_names=("program",),
    num_threads=1 + DECODERS,
    thread_name="group",
    interpret=plgpu.InterpretGPUParams() if interpret else None,
    kernel_name="w12_hopper" if lists else "w12_hopper_view",
  )
  return kernel(x, *planes)


def meeting(padded: int) -> int:
  """Quarters whose sums meet in shared memory at a time.

  None where a decoder has two quarters of every tile, not all of every other.
  """
  return 4 if padded <= FEW else 2 if padded <= SOME else 0


def stages_of(planes: int, padded: int, quarters: int) -> int:
  """Stages of the ring; where decoders take turns, a multiple of them.

  A slot is one decoder's then, which has to wait for it each time that it is
  filled: whether it is, is told from the last time by a parity.
  """
  unit = (TILE * TILE * planes + TILE * padded) * 2
  sums = quarters * TILE * padded * 4
  most = min(MOST_STAGES, (SHARED_MEMORY - sums) // unit)
  return most // DECODERS * DECODERS if quarters else most


def _program(
  x_ref, *refs, shares, stages, planes, filled, interpret,
  x_ring, rings, full, empty, sums=None, both=None, operand=None,
):  # fmt: skip
  plane_refs, (parts_ref, *columns_refs) = refs[:planes], refs[planes:]
  program = lax.axis_index("program")
  group = lax.axis_index("group")
  begin, end = shares.begin(program), shares.begin(program + 1)

  @pl.when(group == DECODERS)
  def _():
    if not interpret:
      plgpu.set_max_registers(REGISTERS["load"], action="decrease")
    _load(
      x_ref, plane_refs, x_ring, rings, full, empty,
      begin, end, shares=shares, stages=stages,
    )  # fmt: skip

  def decode(quarters, turns):
    if not interpret:
      plgpu.set_max_registers(REGISTERS["decode"], action="increase")
    # Nothing to decode has come yet.
    for ref in columns_refs:
      _transpose_some(
        x_ref, ref, program, group, shares=shares, interpret=interpret
      )
    first, last = begin // shares.steps, (end - 1) // shares.steps

    def lanes(i, _):
      start = (first + i) * shares.steps - begin
      unit = jnp.maximum(start, 0)
      totals = _sum_up(
        x_ring, rings, full, empty,
        unit + lax.rem(unit + group, DECODERS) if turns else unit,
        jnp.minimum(start + shares.steps, end - begin),
        DECODERS if turns else 1,
        quarters, group, stages=stages, filled=filled, operand=operand,
      )  # fmt: skip
      part = program - shares.first_owner(first + i)
      at = pl.ds((first + i) * TILE, TILE)
      if turns:
        _write_sums(parts_ref, totals, part, at, group, sums, both)
        return
      for q, total in zip(quarters, totals, strict=True):
        parts_ref[part, q, at, :] = total

    lax.fori_loop(0, last - first + 1, lanes, None)

  if sums is not None:
    pl.when(group < DECODERS)(lambda: decode(range(4), True))
  else:
    for i in range(DECODERS):
      pl.when(group == i)(lambda i=i: decode((2 * i, 2 * i + 1), False))


def _load(
  x_ref, plane_refs, x_ring, rings, full, empty, begin, end, *, shares, stages
):  # fmt: skip
  """Keeps the ring full."""
  padded = x_ring.shape[1]

  def load(i, _):
    slot = lax.rem(i, stages)

    @pl.when(i >= stages)
    def _():
      plgpu.barrier_wait(empty.at[slot])

    unit = begin + i
    lanes, k = unit // shares.steps, lax.rem(unit, shares.steps)
    for ref, ring in zip(plane_refs, rings, strict=True):
      plgpu.copy_gmem_to_smem(ref.at[lanes, k], ring.at[slot], full.at[slot])
    # A start that is known would be checked; rows behind the last are zeros.
    rows = pl.ds(0 if x_ref.shape[0] == padded else 0 * k, padded)
    plgpu.copy_gmem_to_smem(
      x_ref.at[rows, pl.ds(k * TILE, TILE)], x_ring.at[slot], full.at[slot]
    )

  units = end - begin
  lax.fori_loop(0, units, load, None)
  # No barrier is left with a phase that nobody has waited for.
  lax.fori_loop(
    jnp.maximum(units - stages, 0),
    units,
    lambda i, _: plgpu.barrier_wait(empty.at[lax.rem(i, stages)]),
    None,
  )


def _sum_up(
  x_ring, rings, full, empty, begin, end, every, quarters, group,
  *, stages, filled, operand,
):  # fmt: skip
  """Sums of units from `begin` to `end` - 1, of each quarter [64, rows].

  Args:
    every: of so many units, one.
    operand: shared memory for decoded weights where the interpreter is to
      multiply them; it does not with registers.
  """
  padded = x_ring.shape[1]

  def scope(*totals):
    def unit(i, _):
      i = begin + every * i
      slot = lax.rem(i, stages)
      plgpu.barrier_wait(full.at[slot])
      loaded = [
        plgpu.load(ring.at[slot], layout=plgpu.Layout.WGMMA) for ring in rings
      ]
      x = x_ring.at[slot].transpose((1, 0))
      for q, total in zip(quarters, totals, strict=True):
        if len(loaded) == 4:
          weights = loaded[q]
        else:
          unpack = _unpack if operand is None else w12_unpack.unpack
          weights = unpack(q, *loaded, filled=filled)
        if operand is not None:
          operand[group] = weights
          weights = operand.at[group]
        plgpu.wgmma(total, weights, x)
        if q > quarters[0] and padded > FEW:
          plgpu.wgmma_wait(1)
      plgpu.wgmma_wait(0)
      plgpu.barrier_arrive(empty.at[slot])

    lax.fori_loop(0, pl.cdiv(end - begin, every), unit, None)
    return [total[...] for total in totals]

  totals = [plgpu.ACC((TILE, padded), jnp.float32)] * len(quarters)
  return pl.run_scoped(scope, *totals)


def _write_sums(parts_ref, totals, part, at, group, sums, both):
  """Adds up what the decoders have and writes it to a part."""

  def meet():
    plgpu.barrier_arrive(both)
    plgpu.barrier_wait(both)

  room = sums.shape[0]
  for first in range(0, len(totals), room):

    @pl.when(group == 1)
    def _(first=first):
      for i in range(room):
        sums[i] = totals[first + i]
      plgpu.commit_smem()

    meet()

    @pl.when(group == 0)
    def _(first=first):
      for i in range(room):
        other = plgpu.load(sums.at[i], layout=plgpu.Layout.WGMMA)
        parts_ref[part, first + i, at, :] = totals[first + i] + other

    meet()  # Before the sums are overwritten.


def _transpose_some(
  x_ref, out_ref, program, group, *, shares: Shares, interpret: bool
):
  """Writes a program's columns of x as rows; decoders take turns."""
  tiles = pl.cdiv(out_ref.shape[1], ROUND)
  mine = (shares.steps - 1 - program) // shares.programs + 1

  def column(i, firsts):
    at = pl.ds((program + i * shares.programs) * TILE, TILE)
    _transpose(x_ref.at[:, at], out_ref.at[at, :], firsts, interpret)

  # All columns, some rows each; or, where rows are few, every other column.
  for i in range(DECODERS):
    firsts = range(0, out_ref.shape[1], ROUND)
    first, every = i, DECODERS
    if tiles > 1:
      firsts, first, every = firsts[i::DECODERS], 0, 1

    @pl.when(group == i)
    def _(firsts=firsts, first=first, every=every):
      lax.fori_loop(
        0,
        pl.cdiv(mine - first, every),
        lambda j, _: column(first + every * j, firsts),
        None,
      )


def _transpose(x_ref, out_ref, firsts, interpret: bool):
  """Writes 64 columns of x as rows, by the threads of one warp group.

  Args:
    firsts: rows of x; `ROUND` from each on are written. Those behind the last
      are copies of it, which nothing is made of.
  """
  n, padded = x_ref.shape[0], out_ref.shape[1]
  if interpret:
    for first in firsts:
      rows = jnp.minimum(jnp.arange(first, min(first + ROUND, padded)), n - 1)
      out_ref[:, first : first + rows.size] = x_ref[...][rows].T
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
  def copy(_, x_ref, out_ref):
    """A thread has eight rows of a column, of every sixteen."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
    column = arith.index_cast(index, arith.remui(thread, mgpu.c(TILE, i32)))
    half = arith.index_cast(index, arith.divui(thread, mgpu.c(TILE, i32)))
    eight = ir.VectorType.get((8,), ir.BF16Type.get())
    loaded = []
    # All are asked for before one is waited for.
    for first in firsts:
      row = arith.addi(mgpu.c(first, index), arith.muli(half, mgpu.c(8, index)))
      # Eight rows have one half of the threads; the other does the same.
      row = arith.minui(row, mgpu.c(padded - 8, index))
      values = []
      for i in range(8):
        at = arith.addi(row, mgpu.c(i, index))
        at = arith.minui(at, mgpu.c(n - 1, index))
        values.append(memref.load(x_ref, [at, column]))
      loaded.append((row, values))
    for row, values in loaded:
      vector.store(vector.from_elements(eight, values), out_ref, [column, row])

  copy(x_ref, out_ref)


def _unpack(q, *parts, filled):
  """`w12_unpack.unpack`, two weights of a row at a time."""
  pair, low = parts[q // 2], parts[2:]
  body = w12_unpack.assembly(q, bool(low), filled)
  layout = plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(layout,) * (1 + len(low)),
    return_type=plgpu.ShapeDtypeStruct(
      (TILE, TILE), jnp.bfloat16, layout=layout
    ),
  )
  def go(_, *parts):
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty_like(parts[0].registers)
    for at in np.ndindex(registers.shape):
      words = [mgpu.utils.bitcast(part.registers[at], i32) for part in parts]
      word: Any = llvm.inline_asm(
        i32, words, body, ",".join(["=r"] + ["r"] * len(words))
      )
      registers[at] = mgpu.utils.bitcast(word, pair)
    return mgpu.FragmentedArray(
      _registers=registers, _layout=parts[0].layout, _is_signed=None
    )

  return go(pair, *low)
