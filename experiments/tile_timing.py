"""Times tiles of the W12 product beside XLA's bfloat16 ones.

Weights are in six buffers that take turns, so that no cache helps. Times are
unions of kernel intervals of the JAX profiler and hold everything that a
product needs: the sum over parts, the sparse lists, exact zeros.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from experiments.console import say, table
from experiments.cost_model import kernels, measure
from pallas_kernels import w12_matmul
from pallas_kernels.w12_matmul import Tile
from specpilot_jax import configs
from specpilot_jax.checkpoints import w12_device
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import config as drafter_configs
from specpilot_jax.models.drafters.dflash import DFlash

Shape = tuple[int, int]

BUFFERS = 6
"""Copies of a matrix that take turns."""

REPEATS = 4
"""Launches of each copy that are timed."""

ZEROS = 1e-3
"""Share of weights that are exact zeros."""

PROGRAMS = (132, 264, 396, 528, 792, 1320)
"""That share a matrix: one to ten for each multiprocessor of an H200."""

PAUSE_S = 0.012
"""Between two cases, so that their kernels are told apart in a profile."""

ATTEMPTS = 3
"""Profiles of the same cases that are made until one shows them all."""


@dataclasses.dataclass(frozen=True)
class Case:
  """Something to time.

  Attributes:
    label: of its line.
    run: a jitted function of `arguments`, one launch per buffer.
    arguments: its arguments.
    tile: that was asked for.
    kind: `xla`, `w12`, `view` (the 8-bit view alone), or another operation.
    launches: of the operation in a call of `run`.
  """

  label: str
  run: Any
  arguments: tuple[Any, ...]
  tile: Tile | None = None
  kind: str = "xla"
  launches: int = BUFFERS


def model_name(text: str) -> str:
  """The name of a preset with a drafter, in whatever case it is given.

  Raises:
    SpecPilotError: there is none of that name.
  """
  known = {name.lower(): name for name in drafter_configs.PRESETS}
  if text.lower() not in known:
    raise SpecPilotError(
      f"unknown model {text!r}; there are: {', '.join(known)}"
    )
  return known[text.lower()]


def shapes_of(preset: str) -> Counter[Shape]:
  """Matrix shapes of a model and its drafter, and how often a pass has each.

  The embedding is read by rows and does not count.

  Raises:
    SpecPilotError: no such preset, or none with a drafter.
  """
  name = model_name(preset)
  config = drafter_configs.PRESETS[name]
  parameters = target_lib.structs(configs.preset(name), jnp.bfloat16)
  drafter = assembly.structs(lambda: DFlash(config, jnp.bfloat16, nnx.Rngs(0)))
  head = parameters["lm_head.weight"].shape
  found = Counter(
    leaf.shape
    for key, leaf in (*parameters.items(), *drafter.items())
    if layers.is_matrix(key, leaf.shape) and key != "embed.weight"
  )
  # The drafter reads the target's head as well.
  return found + Counter([head])


def chosen_shapes(preset: str, texts: Sequence[str]) -> Counter[Shape]:
  """Those of `shapes_of` that a flag names, OUTxIN each; all where it is empty.

  Raises:
    SpecPilotError: as `shapes_of`; a text of another form.
  """
  known = shapes_of(preset)
  if not texts:
    return known
  chosen = Counter()
  for text in texts:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(s.isdecimal() and int(s) for s in sizes):
      raise SpecPilotError(f"shape {text!r} is not of the form OUTxIN")
    shape = (int(sizes[0]), int(sizes[1]))
    chosen[shape] = known.get(shape, 1)
  return chosen


def parse_rows(texts: Sequence[str]) -> list[int]:
  """Numbers of rows of x, as a flag gives them.

  Raises:
    SpecPilotError: more than the kernel takes, none, or no number.
  """
  limit = w12_matmul.MAX_ROWS
  for text in texts:
    if not text.isdecimal() or not 1 <= int(text) <= limit:
      raise SpecPilotError(f"rows must be 1 to {limit}, got {text!r}")
  return [int(text) for text in texts]


FORMS = (
  Tile(lanes=32, num_warps=2),
  Tile(lanes=32, num_warps=2, num_stages=2),
  Tile(lanes=32, num_warps=2, num_stages=4),
  Tile(lanes=16, num_warps=1),
  Tile(lanes=64, num_warps=4),
)
"""Tiles but for the number of programs."""

MANY_ROWS = (
  Tile(lanes=32, num_warps=2),
  Tile(lanes=64, num_warps=4),
  Tile(lanes=64, num_warps=4, num_stages=2),
  Tile(lanes=64, num_warps=8),
)
"""The same above 32 rows, where sums fill the registers."""


def tiles(n: int) -> list[Tile]:
  """Tiles worth trying for n rows of x."""
  return [
    dataclasses.replace(form, programs=programs)
    for form in (FORMS if n <= 32 else MANY_ROWS)
    for programs in PROGRAMS
  ]


@functools.partial(jax.jit, static_argnums=1)
def weights(key, shape: Shape):
  """A normal matrix in bfloat16 with some exact zeros."""
  values, zero = jax.random.split(key)
  matrix = 0.02 * jax.random.normal(values, shape, jnp.float32)
  kept = jax.random.uniform(zero, shape, jnp.float32) >= ZEROS
  return jnp.where(kept, matrix, 0).astype(jnp.bfloat16)


def _each(product: Callable[[Any, Any], Any]) -> Any:
  """A jitted function of as many rows and matrices."""
  once = jax.jit(product)  # Traced and lowered for one of them.
  return jax.jit(
    lambda xs, ws: [once(x, w) for x, w in zip(xs, ws, strict=True)]
  )


def _dot(x, w):
  return lax.dot_general(
    x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
  )


def _sum_of_products(x, w):
  product = w.astype(jnp.float32) * x.astype(jnp.float32)
  return product.sum(axis=1).astype(x.dtype)[None]


def xla_cases(n: int, xs, matrices) -> list[Case]:
  """XLA's forms of the product; of one row there are two."""
  forms: dict[str, Callable[[Any, Any], Any]] = {
    "xla dot": _dot,
    "xla dot, W first": lambda x, w: _dot(w, x).T,
  }
  if n == 1:
    forms["xla sum of products"] = _sum_of_products
  return [
    Case(label, _each(form), (xs, matrices)) for label, form in forms.items()
  ]


def w12_case(
  tile: Tile, xs, packed, *, view: bool = False, implementation: Any = "triton"
) -> Case:
  """A tile's product: kernel, sum over parts, rounding."""

  def product(x, w):
    return w12_matmul.matmul(
      x, w, view=view, implementation=implementation, tile=tile
    )

  stages = f"{tile.num_stages} stages"
  label = f"{tile.lanes} lanes {tile.num_warps} warps {stages}"
  return Case(
    f"{'view' if view else 'w12'} {label} {tile.programs} programs",
    _each(product),
    (xs, packed),
    tile,
    "view" if view else "w12",
  )


def shipped_case(xs, packed, *, view: bool, implementation: Any) -> Case:
  """The product as a model has it: whichever kernel an implementation takes."""

  def product(x, w):
    return w12_matmul.matmul(x, w, view=view, implementation=implementation)

  kind = "view" if view else "w12"
  return Case(
    f"{kind} {implementation}", _each(product), (xs, packed), kind=kind
  )


def compiled(cases: Sequence[Case]) -> list[Case]:
  """The cases with executables; those that do not compile are left out.

  XLA tries out products while it compiles, for which it is alone.
  """

  def attempt(case: Case) -> Case | None:
    try:
      executable = case.run.lower(*case.arguments).compile()
    except Exception as e:  # A tile may need more than a program can have.
      say(f"{case.label}: {(str(e).splitlines() or [repr(e)])[0][:120]}")
      return None
    return dataclasses.replace(case, run=executable)

  alone = [case for case in cases if case.kind == "xla"]
  others = [case for case in cases if case.kind != "xla"]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    done = list(pool.map(attempt, others))
  return [c for c in [*map(attempt, alone), *done] if c is not None]


def kernel_us(cases: Sequence[Case]) -> list[float]:
  """Microseconds of a launch of each case, from one profile.

  Raises:
    SpecPilotError: no profile of several shows as many cases.
  """

  def run():
    for case in cases:
      out = None
      for _ in range(REPEATS):
        out = case.run(*case.arguments)
      jax.block_until_ready(out)
      time.sleep(PAUSE_S)

  for case in cases:  # What is lazy about a first call is not timed.
    jax.block_until_ready(case.run(*case.arguments))
  groups: list[list[kernels.Kernel]] = []
  for _ in range(ATTEMPTS):
    groups = _parted(measure.trace(run))
    # A host that is held up amid a case makes two of it.
    if len(groups) == len(cases):
      break
  else:
    raise SpecPilotError(
      f"the profile shows {len(groups)} cases, {len(cases)} were run"
    )
  return [
    1e-3
    * kernels.union_ns([(k.start_ns, k.duration_ns) for k in group])
    / (REPEATS * case.launches)
    for case, group in zip(cases, groups, strict=True)
  ]


def _parted(activities: Sequence[kernels.Kernel]) -> list[list[kernels.Kernel]]:
  """Kernels between two pauses."""
  groups: list[list[kernels.Kernel]] = []
  end = None
  for kernel in activities:
    if end is None or kernel.start_ns - end > PAUSE_S / 3 * 1e9:
      groups.append([])
    groups[-1].append(kernel)
    end = max(end or 0, kernel.start_ns + kernel.duration_ns)
  return groups


def best(cases: Sequence[Case], times: Sequence[float]) -> dict[str, Any]:
  """The fastest of each kind: label and microseconds, tiles too."""
  out: dict[str, Any] = {}
  for case, us in sorted(
    zip(cases, times, strict=True), key=lambda pair: pair[1]
  ):
    if case.kind not in out:
      tile = None if case.tile is None else dataclasses.asdict(case.tile)
      out[case.kind] = {"us": us, "label": case.label, "tile": tile}
  return out


def summary(found: Sequence[dict[str, Any]]) -> str:
  """Lines per shape and rows, then the means weighted by a pass's bytes.

  Args:
    found: `shape`, `count`, `rows`, and what `best` says.
  """
  rows = []
  for one in found:
    for kind in ("w12", "view"):
      if kind in one:
        ratio = one["xla"]["us"] / one[kind]["us"]
        high, width = one["shape"]
        rows.append(
          (
            f"{high} x {width}",
            str(one["rows"]),
            f"{one['xla']['us']:.1f} {one['xla']['label']}",
            f"{one[kind]['us']:.1f} {one[kind]['label']}",
            f"{ratio:.3f}",
          )
        )
  lines = [table(("shape", "rows", "XLA us", "W12 us", "ratio"), rows)]
  for kind, n in itertools.product(
    ("w12", "view"), sorted({one["rows"] for one in found})
  ):
    own = [one for one in found if one["rows"] == n and kind in one]
    if own:
      # Times of a pass: shapes count as often as it has them.
      xla = sum(one["count"] * one["xla"]["us"] for one in own)
      packed = sum(one["count"] * one[kind]["us"] for one in own)
      lines.append(
        f"{kind}, {n} rows: {xla / packed:.3f} over a pass's products"
        f" ({xla:,.0f} us with XLA, {packed:,.0f})"
      )
  return "\n".join(lines)


def measure_shape(
  shape: Shape,
  count: int,
  row_counts: Sequence[int],
  *,
  view: bool,
) -> list[dict[str, Any]]:
  """Times every case of a shape and prints it.

  Args:
    count: products of this shape in a pass.
    row_counts: rows of x.
    view: the 8-bit view too.

  Returns:
    What `summary` takes, and all `tiles` of the product with their times.
  """
  keys = jax.random.split(jax.random.key(0), BUFFERS)
  matrices = [weights(key, shape) for key in keys]
  packed = [w12_device.encode_on_device(w) for w in matrices]
  found = []
  for n in row_counts:
    xs = [jax.random.normal(key, (n, shape[1]), jnp.bfloat16) for key in keys]
    cases = xla_cases(n, xs, matrices)
    for tile in tiles(n):
      cases.append(w12_case(tile, xs, packed))
      if view:
        cases.append(w12_case(tile, xs, packed, view=True))
    cases = compiled(cases)
    times = kernel_us(cases)
    pairs = zip(cases, times, strict=True)
    for case, us in sorted(pairs, key=lambda pair: pair[1]):
      say(f"{shape[0]} x {shape[1]}, {n} rows: {us:8.2f} us  {case.label}")
    every = [
      {"tile": dataclasses.asdict(case.tile), "us": us}
      for case, us in zip(cases, times, strict=True)
      if case.tile is not None and case.kind == "w12"
    ]
    one = {"shape": shape, "count": count, "rows": n, "tiles": every}
    found.append(one | best(cases, times))
  return found
