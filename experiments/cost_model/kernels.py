"""Kernel classes of a profiled step: which kernel is whose, and for how long.

The JAX profiler (`jax.profiler.ProfileData`) gives one line per GPU stream,
with one event per kernel or copy: its name, start, duration, and the HLO
instruction that launched it. The text of the compiled executable says which
named scope an instruction came from. Time is counted once: where kernels of
different streams run at the same time, each gets an equal share, so that the
classes add up to the union of all intervals.
"""

import dataclasses
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specpilot_jax.errors import SpecPilotError

TARGET_GEMM, RECURRENT, ATTENTION = "target_gemm", "recurrent", "attention"
DRAFTER, PREFILL, OTHER = "drafter", "prefill", "other"
CLASSES = (TARGET_GEMM, RECURRENT, ATTENTION, DRAFTER, PREFILL, OTHER)

WEIGHTS = "weights"
# Scopes of the engine, and the class of what is innermost in one.
_SCOPES = {
  WEIGHTS: TARGET_GEMM,
  "mlp": TARGET_GEMM,
  "recurrent": RECURRENT,
  "attention": ATTENTION,
}
# Everything in this scope is the drafter's, its own weights too.
_DRAFTER_SCOPE = "drafter"
_PREFILL_MODULE = "jit_prefill"

# Kernels and fusions that multiply matrices, by name: XLA's Triton fusions,
# cuBLAS, cuBLASLt, CUTLASS.
_GEMM_NAME = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE)

# Our own, where a CUDA graph keeps the scope to itself; attention is then the
# drafter's too.
_OWN_NAMES = (
  (re.compile(r"(w12|fp8)_"), TARGET_GEMM),
  (re.compile(r"gdn_"), RECURRENT),
  (re.compile(r"tree_(attention|hopper)"), ATTENTION),
  (re.compile(r"tree_(growth|table)"), DRAFTER),
)

# A device activity has one of these (the profiler writes one of them with a
# capital); what only encloses activities has not.
_ACTIVITY_STATS = frozenset(
  {"kernel_details", "memcpy_details", "memset_details"}
)
_STREAM_LINE = "Stream #"
# Between the instructions that a kernel was launched by, outermost first: a
# command buffer's and its own.
_NESTED = "::"


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One activity of the device.

  Attributes:
    name: of the kernel or copy.
    op: HLO instruction that launched it; empty where the profile has none.
    module: HLO module of it, or empty.
    start_ns, duration_ns: on the profile's clock.
  """

  name: str
  op: str
  module: str
  start_ns: int
  duration_ns: int


def read_profile(profile: Any) -> list[Kernel]:
  """Kernels and copies of the first GPU of a profile, by start.

  Args:
    profile: a `jax.profiler.ProfileData`, or what has the same attributes.

  Raises:
    SpecPilotError: it holds no GPU, or nothing ran on it.
  """
  kernels: list[Kernel] = []
  seen = []
  for plane in profile.planes:
    seen.append(plane.name)
    if not plane.name.startswith("/device:GPU:0"):
      continue
    for line in plane.lines:
      seen.append(line.name)
      if line.name.startswith(_STREAM_LINE):
        kernels += _activities(line.events)
  if not kernels:
    raise SpecPilotError(
      f"the profile holds no kernel of a GPU, but {', '.join(seen[:20])}"
    )
  return sorted(kernels, key=lambda k: k.start_ns)


def _activities(events: Iterable[Any]) -> Iterable[Kernel]:
  for event in events:
    stats = {str(name).lower(): value for name, value in event.stats}
    if _ACTIVITY_STATS.isdisjoint(stats):
      continue
    yield Kernel(
      name=event.name,
      op=str(stats.get("hlo_op", "")).rpartition(_NESTED)[2],
      module=str(stats.get("hlo_module", "")),
      start_ns=round(event.start_ns),
      duration_ns=round(event.duration_ns),
    )


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_DOT = re.compile(r" (?:dot|custom-call)\(")
_PARAMETER = re.compile(r" parameter\(")
_OPERANDS = re.compile(r"[a-z\-]\((%[^)]*)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
# What a step's arguments belong to; copies of them are named after them.
_ARGUMENTS = (
  (re.compile(r"params\[0\]"), WEIGHTS),
  (re.compile(r"params\[1\]|carry\.drafter"), _DRAFTER_SCOPE),
  (re.compile(r"carry\.target\.layers\[\d+\]\.(conv|rec)"), "recurrent"),
  (re.compile(r"carry\.target\.layers\[\d+\]"), "attention"),
)


def _scoped(path: str, owners: Mapping[str, str]) -> str:
  """A path, or the scope of the argument that it names."""
  if path in owners:
    return owners[path]
  for argument, scope in _ARGUMENTS:
    if argument.match(path):
      return scope
  return path


_OWN_CALL = re.compile(r"/([^/]+)/(?:pallas_call|mpmd_map)$")
_CALLED = re.compile(r" call\(.*\bto_apply=%?([\w.\-]+)")


def named(
  kernels: Sequence[Kernel],
  hlo_text: str,
  steps: int,
  owners: Mapping[str, str] = types.MappingProxyType({}),
) -> tuple[list[Kernel], dict[str, str]]:
  """Kernels of some steps of an executable, and the scopes of what launched
  them.

  In a CUDA graph a kernel of our own keeps its name alone, which others have
  too. Where a step launches as many of a name as it has instructions that call
  it, they are those, in order, unless the profile knows better of one.

  Args:
    hlo_text: of the executable.
    steps: how many there were.
    owners: as `op_names`.

  Returns:
    The kernels, by start, and what `classify` takes.
  """
  names = op_names(hlo_text, owners)
  kernels = sorted(kernels, key=lambda k: k.start_ns)
  for own, instructions in _calls(hlo_text).items():
    spelled = re.compile(re.escape(own) + r"(_mosaic_gpu_kernel)?(_\d*)?")
    of_it = [i for i, k in enumerate(kernels) if spelled.fullmatch(k.name)]
    ops = instructions * steps
    fits = len(of_it) == len(ops) and all(
      kernels[i].op in ("", op) or kernels[i].op not in names
      for i, op in zip(of_it, ops, strict=True)
    )
    if fits:
      for i, op in zip(of_it, ops, strict=True):
        kernels[i] = dataclasses.replace(kernels[i], op=op)
  return kernels, names


def _calls(hlo_text: str) -> dict[str, list[str]]:
  """Instructions that call kernels of our own, by the kernel, in the order of a
  scheduled module: those of computations that its entry calls where it does.
  Not those of branches and loops."""
  bodies: dict[str, list[str]] = {}
  entry = body = ""
  for line in hlo_text.splitlines():
    if head := _COMPUTATION.match(line):
      body = head[1]
      if line.startswith("ENTRY"):
        entry = body
    else:
      bodies.setdefault(body, []).append(line)
  found: dict[str, list[str]] = {}

  def walk(computation: str) -> None:
    for line in bodies.get(computation, ()):
      if called := _CALLED.search(line):
        walk(called[1])
      op = _OP_NAME.search(line)
      own = _OWN_CALL.search(op[1]) if op and " custom-call(" in line else None
      instruction = _INSTRUCTION.match(line)
      if own and instruction:
        found.setdefault(own[1], []).append(instruction[1])

  walk(entry)
  return found


def op_names(
  hlo_text: str, owners: Mapping[str, str] = types.MappingProxyType({})
) -> dict[str, str]:
  """Scope paths of a compiled executable's instructions, by their names.

  A fusion that multiplies matrices is named after its product: its own
  metadata is that of what comes last, which may be the next operation's. What
  the compiler left without a name (products of one row and their sums) has
  that of what is fused in it or, if that has none either, of what it reads: a
  product that of its weights.

  Args:
    hlo_text: of the executable.
    owners: scopes of arguments whose names tell nothing, by these names.
  """
  own: dict[str, str] = {}
  parameters: dict[str, str] = {}
  operands: dict[str, list[str]] = {}
  calls: dict[str, str] = {}
  products: dict[str, str] = {}
  bodies: dict[str, str] = {}
  computation = ""
  for line in hlo_text.splitlines():
    instruction = _INSTRUCTION.match(line)
    if instruction is None:
      head = _COMPUTATION.match(line)
      if head:
        computation = head[1]
      continue
    name = instruction[1]
    op = _OP_NAME.search(line)
    path = _scoped(op[1], owners) if op else ""
    if _PARAMETER.search(line):
      parameters[name] = path
      continue
    own[name] = path
    reads = _OPERANDS.search(line)
    operands[name] = _OPERAND.findall(reads[1]) if reads else []
    called = _CALLS.search(line)
    if called:
      calls[name] = called[1]
    if path and _DOT.search(line):
      products.setdefault(computation, path)
    if _is_known(path):
      bodies.setdefault(computation, path)

  def of_weights(name: str, depth: int = 4) -> str:
    """The scope of the parameter that a product reads through copies."""
    for operand in operands.get(name, ()):
      found = parameters.get(operand, "")
      if found not in (WEIGHTS, _DRAFTER_SCOPE):
        trivial = depth and operand in own and not own[operand]
        found = of_weights(operand, depth - 1) if trivial else ""
      if found:
        return found
    return ""

  def inherited(name: str, depth: int = 8) -> str:
    fused = calls.get(name, "")
    if fused in products:
      return products[fused]
    if own.get(name):
      return own[name]
    if _GEMM_NAME.search(name):
      return of_weights(name)
    if fused in bodies:
      return bodies[fused]
    for operand in operands.get(name, ())[:1] if depth else ():
      return inherited(operand, depth - 1)
    return ""

  return {name: inherited(name) for name in own}


def _is_known(path: str) -> bool:
  return any(s in _SCOPES or s == _DRAFTER_SCOPE for s in path.split("/"))


def classify(kernel: Kernel, names: Mapping[str, str]) -> str:
  """The class of a kernel.

  Args:
    names: `op_names` of the executable.
  """
  if kernel.module.startswith(_PREFILL_MODULE):
    return PREFILL
  path = scope_path(kernel, names)
  if _DRAFTER_SCOPE in path:
    return DRAFTER
  for scope in reversed(path):
    if scope in _SCOPES:
      return _SCOPES[scope]
  if _GEMM_NAME.search(kernel.name) or _GEMM_NAME.search(kernel.op):
    return TARGET_GEMM
  for own, kind in _OWN_NAMES:
    if own.match(kernel.name):
      return kind
  return OTHER


def scope_path(kernel: Kernel, names: Mapping[str, str]) -> list[str]:
  """Scopes that a kernel ran in, outermost first; empty where unknown."""
  if kernel.op in names:
    return names[kernel.op].split("/")
  # Inside a CUDA graph a kernel may have no instruction; XLA's own kernels are
  # then known by their names, which are those of the instructions.
  return _by_kernel_name(names).get(kernel.name, "").split("/")


_kernel_names: dict[int, tuple[Mapping[str, str], dict[str, str]]] = {}


def _by_kernel_name(names: Mapping[str, str]) -> dict[str, str]:
  """`names` with instructions spelled as kernels: no dots, no dashes."""
  kept = _kernel_names.get(id(names))
  if kept is None or kept[0] is not names:
    spelled = {re.sub(r"[.\-]", "_", n): path for n, path in names.items()}
    _kernel_names.clear()
    kept = _kernel_names[id(names)] = (names, spelled)
  return kept[1]


def union_ns(intervals: Sequence[tuple[int, int]]) -> int:
  """Time covered by (start, duration) intervals, overlaps counted once."""
  total, end = 0, None
  for start, duration in sorted(intervals):
    stop = start + duration
    if end is None or start > end:
      total, end = total + duration, stop
    elif stop > end:
      total, end = total + stop - end, stop
  return total


def shares_ns(intervals: Sequence[tuple[int, int]]) -> np.ndarray:
  """Each interval's part of the union: overlaps are divided equally.

  Returns:
    float64, one per interval; they sum to `union_ns`.
  """
  starts = np.asarray([s for s, _ in intervals], np.int64)
  ends = starts + np.asarray([d for _, d in intervals], np.int64)
  edges = np.unique(np.concatenate([starts, ends]))
  first = np.searchsorted(edges, starts)
  last = np.searchsorted(edges, ends)
  running = np.zeros(edges.size + 1, np.int64)
  np.add.at(running, first, 1)
  np.add.at(running, last, -1)
  running = np.cumsum(running)[: max(edges.size - 1, 0)]
  # Time per interval up to each edge, where as many ran as did.
  part = np.diff(edges) / np.maximum(running, 1)
  upto = np.concatenate([[0.0], np.cumsum(part)])
  return upto[last] - upto[first]


@dataclasses.dataclass(frozen=True)
class Breakdown:
  """Mean step time by class, in microseconds.

  Attributes:
    step_us: union of kernel intervals, divided by steps.
    classes: their parts of it.
    kernels: activities per step.
    unattributed_us: time of kernels whose instruction is unknown; it is in
      `classes`, by kernel name or as `other`.
  """

  step_us: float
  classes: dict[str, float]
  kernels: float
  unattributed_us: float


def breakdown(
  kernels: Sequence[Kernel], names: Mapping[str, str], steps: int
) -> Breakdown:
  """Divides the time of profiled steps among the classes.

  Args:
    kernels: of all the steps, and of nothing else.
    names: `op_names` of the executable.
    steps: how many were profiled.
  """
  intervals = [(k.start_ns, k.duration_ns) for k in kernels]
  shares = shares_ns(intervals)
  classes = dict.fromkeys(CLASSES, 0.0)
  unknown = 0.0
  for kernel, share in zip(kernels, shares, strict=True):
    classes[classify(kernel, names)] += share
    if scope_path(kernel, names) == [""] and kernel.op not in names:
      unknown += share
  scale = 1e-3 / steps
  return Breakdown(
    step_us=union_ns(intervals) * scale,
    classes={name: float(t * scale) for name, t in classes.items()},
    kernels=len(kernels) / steps,
    unattributed_us=float(unknown * scale),
  )


def heaviest(
  kernels: Sequence[Kernel],
  names: Mapping[str, str],
  steps: int,
  count: int = 20,
) -> list[dict[str, Any]]:
  """The kernels that take most time, alike ones together."""
  groups: dict[tuple[str, str], list[float]] = {}
  shares = shares_ns([(k.start_ns, k.duration_ns) for k in kernels])
  for kernel, share in zip(kernels, shares, strict=True):
    # Numbered copies of a fusion differ in nothing else.
    stem = re.sub(r"[._]\d+", "", kernel.name)
    groups.setdefault((classify(kernel, names), stem), []).append(float(share))
  ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))[:count]
  return [
    {
      "class": kind,
      "kernel": stem,
      "per_step": len(parts) / steps,
      "us_per_step": sum(parts) * 1e-3 / steps,
      "us_each": sum(parts) * 1e-3 / len(parts),
    }
    for (kind, stem), parts in ranked
  ]


def to_columns(
  kernels: Sequence[Kernel], names: Mapping[str, str]
) -> dict[str, Any]:
  """Kernels and the scopes they need, compactly, for JSON."""
  kinds = list(dict.fromkeys((k.name, k.op, k.module) for k in kernels))
  at = {kind: i for i, kind in enumerate(kinds)}
  origin = min((k.start_ns for k in kernels), default=0)
  used: dict[str, str] = {}
  spelled = _by_kernel_name(names)
  for name, op, _ in kinds:
    if op in names:
      used[op] = names[op]
    elif name in spelled:
      used[name] = spelled[name]
  return {
    "kinds": [list(kind) for kind in kinds],
    "kind": [at[k.name, k.op, k.module] for k in kernels],
    "start_ns": [k.start_ns - origin for k in kernels],
    "duration_ns": [k.duration_ns for k in kernels],
    "op_names": used,
  }


def from_columns(
  columns: Mapping[str, Any],
) -> tuple[list[Kernel], dict[str, str]]:
  """The inverse of `to_columns`."""
  kinds = columns["kinds"]
  return [
    Kernel(*kinds[kind], start_ns=start, duration_ns=duration)
    for kind, start, duration in zip(
      columns["kind"],
      columns["start_ns"],
      columns["duration_ns"],
      strict=True,
    )
  ], dict(columns["op_names"])


def read_columns(path: Path) -> dict[str, Any]:
  """Reads a JSON object, one line on anything else."""
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise SpecPilotError(f"{path}: no such file") from None
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None
  except ValueError:
    raise SpecPilotError(f"{path}: not JSON") from None
  if not isinstance(content, dict):
    raise SpecPilotError(f"{path}: not a JSON object")
  return content
