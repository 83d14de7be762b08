"""What programs of a W12 product share, and the kernel that adds it up.

A first kernel (`w12_matmul`, `w12_hopper`) sums up runs of tiles; where a run
begins or ends amid the columns of some rows, their sum is in parts. The second
one, here, adds parts in a fixed order and applies the sparse lists. (In the
first one they would wait for memory that is busy, and hold registers.)
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import dispatch, w12_array
from pallas_kernels.w12_array import W12Array


@dataclasses.dataclass(frozen=True)
class Shares:
  """Which program sums up what.

  A unit is one tile of the planes, or the part of it that a program's lanes
  are; units run over the columns of the first lanes, then of the next ones.

  Attributes:
    groups: of lanes.
    steps: units of a group.
    programs: no more than units.
  """

  groups: int
  steps: int
  programs: int

  @classmethod
  def of(
    cls, w: W12Array, lanes: int, programs: int, align: float = 0
  ) -> "Shares":
    """At most so many programs of so many lanes.

    Args:
      align: share of the programs that may be missing so that none has lanes
        of two groups.
    """
    steps = w.low.shape[1]
    groups = pl.cdiv(w.lanes, lanes)
    whole = groups * (programs // groups)
    if whole >= (1 - align) * programs:
      programs = whole
    return cls(groups, steps, min(programs, groups * steps))

  def begin(self, program):
    """First unit of a program."""
    return program * (self.groups * self.steps) // self.programs

  def owner(self, unit):
    """The program that a unit belongs to."""
    return ((unit + 1) * self.programs - 1) // (self.groups * self.steps)

  def first_owner(self, group):
    return self.owner(group * self.steps)

  def owners(self, group):
    """How many programs share a group's columns."""
    return (
      self.owner((group + 1) * self.steps - 1) - self.first_owner(group) + 1
    )

  @property
  def parts(self) -> int:
    """The most programs that share some columns."""
    return max(self.owners(group) for group in range(self.groups))


FINISH_ROWS, FINISH_N = 32, {8: 8, 16: 16, 32: 16, 64: 32, 128: 32}
"""Rows of W and of x that a program of the second kernel has at most, the
latter by rows of x. It waits three times for memory, so it is small and there
are many."""
FINISH_MANY = {8: 32_768, 16: 8192, 32: 8192, 64: 8192, 128: 8192}
"""Rows of W, by rows of x, from which on that are programs enough; below, they
have half."""
ENTRIES = 32
"""Of the lists of its rows that such a program applies at a time: more than
32 rows of 5,120 have. Twice as many where its rows hold more than
`ENTRIES_WEIGHTS` weights."""
ENTRIES_WEIGHTS = 262_144


def rows_of(n: int) -> int:
  """Rows that a kernel for n rows works on."""
  return max(8, pl.next_power_of_2(n))


@dispatch.once("n", "out_dtype", "shares", "run", "interpret")
def finish(
  parts: Float[Array, "T N R"] | Float[Array, "T 4 L N"],
  w: W12Array,
  n: int,
  out_dtype,
  *,
  columns: Array | None,
  shares: Shares,
  run: int,
  interpret: bool,
) -> Float[Array, "N O"]:
  """Parts in their order, then what the lists make of x.

  Args:
    parts: sums of n rows of x, float32; of them, only what was summed up has
      been written. Either by rows of x and of W, or by quarters of W, their
      lanes and rows of x, and not yet scaled.
    columns: [I, `rows_of(n)`], x with each column a row: of the lists, an
      entry is of one column, and side by side its numbers are one piece of
      memory. None applies no lists (the view).
    shares: of lanes, which have as many parts as they have owners.
    run: lanes of a group.
  """
  rows, few = w.shape[0], FINISH_N[rows_of(n)]
  many = rows >= FINISH_MANY[rows_of(n)]
  high = FINISH_ROWS if many else FINISH_ROWS // 2
  longer = high * w.shape[1] > ENTRIES_WEIGHTS
  scaled = parts.ndim == 3
  inputs = [parts]
  if not scaled:
    inputs.append(w.base)
  if columns is not None:
    inputs += [columns, w.row_start, w.columns, w.values]
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    functools.partial(
      _finish,
      size=w.lanes,
      scaled=scaled,
      owners=lambda lane: shares.owners(lane // run),
      run=run,
      few=few,
      high=high,
      entries=2 * ENTRIES if longer else ENTRIES,
    ),
    grid=(pl.cdiv(rows, high), pl.cdiv(n, few)),
    in_specs=[anywhere] * len(inputs),
    out_shape=jax.ShapeDtypeStruct((n, rows), out_dtype),
    out_specs=anywhere,
    compiler_params=pltriton.CompilerParams(
      num_warps=pl.cdiv(few, 8), num_stages=1
    ),
    interpret=interpret,
    name="w12_finish",
  )(*inputs)


def _finish(parts_ref, *refs, size, scaled, owners, run, few, high, entries):
  """Some rows of W and of x; see `finish`."""
  (*refs, out_ref) = refs
  base_ref, list_refs = (None, refs) if scaled else (refs[0], refs[1:])
  n, rows = out_ref.shape
  row = pl.program_id(0) * high + jnp.arange(high)
  each = pl.program_id(1) * few + jnp.arange(few)
  live = row < rows
  wanted = (each < n)[:, None] & live[None, :]
  spans = row_spans(list_refs[1], high, row, rows) if list_refs else None
  if size % high or run % high:
    many = owners(row % size)
    many = many[None, :] if scaled else many[:, None]
  else:
    many = owners(pl.program_id(0) * high % size)

  def load(part):
    if scaled:
      place = parts_ref.at[part, each[:, None], row[None, :]]
      mask = wanted
    else:
      quarter, lane = (row // size)[:, None], (row % size)[:, None]
      place = parts_ref.at[part, quarter, lane, each[None, :]]
      mask = live[:, None] & (each < n)[None, :]
    return pltriton.load(place, mask=mask & (part < many), other=0)

  parts = [load(part) for part in range(parts_ref.shape[0])]
  # Lists come first: their loads wait for one another, and for nothing else.
  listed = []
  if spans is not None:
    columns_ref, _, *entry_refs = list_refs
    listed = [_listed(columns_ref, entry_refs, spans, each, entries)]
  if base_ref is None:
    parts += [x.T for x in listed]
    total = functools.reduce(operator.add, parts)
  else:
    base = pltriton.load(base_ref.at[row], mask=live, other=1)
    total = functools.reduce(operator.add, parts) * scale_of(base)[:, None]
    total = functools.reduce(operator.add, [total, *listed]).T
  place = out_ref.at[each[:, None], row[None, :]]
  pltriton.store(place, total.astype(out_ref.dtype), mask=wanted)


def scale_of(base):
  """What makes decoded numbers of rows the weights, a power of two."""
  exponent = base.astype(jnp.int32) + w12_array.SCALE_OFFSET
  return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def row_spans(start_ref, high, row, rows):
  """Where the lists of rows of W begin and end: of all, then of each."""
  first = pl.program_id(0) * high
  whole = start_ref[first], start_ref[jnp.minimum(first + high, rows)]
  # Rows that there are none of are behind every list.
  live, behind = row < rows, 2**31 - 1
  start = pltriton.load(start_ref.at[row], mask=live, other=behind)
  end = pltriton.load(start_ref.at[row + 1], mask=live, other=behind)
  return *whole, start, end


def _listed(columns_ref, entry_refs, spans, each, entries):
  """What the lists of rows of W make of rows `each` of x, float32.

  The lists of all rows follow one another: so many entries at a time are a
  small matrix, each in the row that it is of, and a product.

  Args:
    columns_ref: x [I, rows], each column a row.
    entry_refs: columns and values.
    spans: see `row_spans`.
  """
  column_ref, value_ref = entry_refs
  first, last, start, end = spans

  def step(i, total):
    at = first + i * entries + jnp.arange(entries)
    real = at < last
    column = pltriton.load(column_ref.at[at], mask=real, other=0)
    value = pltriton.load(value_ref.at[at], mask=real, other=0)
    x = columns_ref[column[:, None], each[None, :]]
    # What is behind the last entry is in no row.
    own = (start[:, None] <= at[None, :]) & (at[None, :] < end[:, None])
    value = jnp.where(own, value.astype(jnp.float32)[None, :], 0.0)
    value = value.astype(jnp.bfloat16)
    return total + jnp.dot(value, x, preferred_element_type=jnp.float32)

  zeros = jnp.zeros((start.size, each.size), jnp.float32)
  return lax.fori_loop(0, pl.cdiv(last - first, entries), step, zeros)
