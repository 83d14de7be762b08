"""From one checkpoint format to another; `checkpoints.convert` runs it.

One parameter is in memory at a time, and of W12 its parts beside it: under
twice the largest parameter. A parameter is what this package stores as one,
such as q, k and v of a layer together.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import hf, open_source, orbax_arrays, progress
from specpilot_jax.checkpoints.hf_writer import HuggingFaceWriter
from specpilot_jax.checkpoints.source import Source
from specpilot_jax.checkpoints.unfinished import (
  RESULT,
  Unfinished,
  folder_of,
  unfinished,
)
from specpilot_jax.checkpoints.writers import (
  Entry,
  OrbaxWriter,
  Parameter,
  Prepared,
  Writer,
  digest,
)
from specpilot_jax.errors import SpecPilotError

W12, BF16, SAFETENSORS = common.W12, common.BF16, "safetensors"
FORMATS = (W12, BF16, SAFETENSORS)
FORMAT = "specpilot-jax conversion"
VERSION = 1
"""Of what an unfinished conversion leaves."""

MAX_PENDING = 4
"""Parameters that wait to be written."""


@dataclasses.dataclass(frozen=True)
class Report:
  """What a conversion did.

  Attributes:
    output: the folder.
    kind: its format.
    parameters: how many were written.
    resumed: of these, how many an earlier run had written.
    source_bytes: of the weights as they were read.
    output_bytes: of all files.
    rounded: values of matrices that were stored wider than bfloat16.
    changed: of these, how many are others now.
    kept_bf16: matrices that W12 does not suit -> why.
    notes: the checkpoint's.
    verified: whether all was read back and compared.
  """

  output: str
  kind: str
  parameters: int
  resumed: int
  source_bytes: int
  output_bytes: int
  rounded: int
  changed: int
  kept_bf16: Mapping[str, str]
  notes: tuple[str, ...]
  verified: bool


def different(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> str | None:
  """Name of the first parameter whose dtype, shape or bits differ."""
  for name in sorted(a.keys() | b.keys()):
    if name not in a or name not in b:
      return name
    x, y = np.ascontiguousarray(a[name]), np.ascontiguousarray(b[name])
    if x.dtype != y.dtype or x.shape != y.shape:
      return name
    if not np.array_equal(x.view(np.uint8), y.view(np.uint8)):
      return name
  return None


def convert(
  source: str | os.PathLike[str],
  output: str | os.PathLike[str],
  kind: str,
  *,
  round_to_bf16: bool = False,
  verify: bool = False,
  max_shard_bytes: int = hf.MAX_SHARD_BYTES,
  show_progress: bool = False,
) -> Report:
  """Writes a model in another format.

  What an earlier run with the same arguments left unfinished is taken up.

  Args:
    source: see `load_checkpoint`.
    output: folder that must not exist, or be empty.
    kind: one of `FORMATS`.
    round_to_bf16: round matrices that are stored wider than bfloat16; vectors
      and depthwise kernels keep what they are stored in.
    verify: read the output back, decode it, and compare every bit with the
      source's.
    max_shard_bytes: of a safetensors file, unless one tensor has more.
    show_progress: on stderr.

  Raises:
    SpecPilotError: a source that does not load, an output that is taken or
      cannot be written, matrices that would have to be rounded without leave,
      an unfinished conversion of something else, a failed verification.
  """
  if kind not in FORMATS:
    raise SpecPilotError(f"format {kind!r} is not one of {', '.join(FORMATS)}")
  output = pathlib.Path(os.path.abspath(output))
  common.check_free(output)
  with open_source(source) as opened:
    if opened.fp8:
      raise SpecPilotError(
        f"{source}: its matrices are in FP8; {kind} would make another model of"
        " them"
      )
    plan = _plan(opened, str(source), kind, round_to_bf16)
    begun = {
      "format": FORMAT,
      "version": VERSION,
      "to": kind,
      "round_to_bf16": round_to_bf16,
      "max_shard_bytes": max_shard_bytes,
      "sha256": dict(opened.fingerprint()),
    }
    # Before anything is written: a config may have no form in the format.
    folder = folder_of(output) / RESULT
    writer: Writer = OrbaxWriter(folder, encode=kind == W12)
    if kind == SAFETENSORS:
      writer = HuggingFaceWriter(folder, opened.config, plan, max_shard_bytes)
    with unfinished(output, begun) as work:
      with _progress(show_progress, f"to {kind}", opened) as advance:
        try:
          resumed = _write_all(opened, plan, writer, work, advance)
        except SpecPilotError:
          work.refused = True
          raise
      entries = {name: work.done[name] for name in plan}
      writer.close(entries)
      if verify:
        with _progress(show_progress, "verifying", opened) as advance:
          _verify_all(opened, plan, writer, work, advance)
      report = _report(opened, plan, entries, output, kind)
      made = {"source": str(source), **begun}
      writer.finish(entries, opened, report.notes, made)
      size = sum(
        path.stat().st_size for path in work.result.rglob("*") if path.is_file()
      )
      work.publish(output)
  return dataclasses.replace(
    report, resumed=resumed, output_bytes=size, verified=verify
  )


def _plan(
  source: Source, name: str, kind: str, round_to_bf16: bool
) -> dict[str, np.dtype]:
  """What each parameter is written in, before W12."""
  plan = {}
  for parameter, dtype in source.dtypes.items():
    if source.table[parameter].is_matrix and dtype != common.BFLOAT16:
      if round_to_bf16:
        dtype = common.BFLOAT16
      elif kind != SAFETENSORS:
        raise SpecPilotError(
          f"{name}: matrix {parameter!r} is {dtype}; {kind} would round it:"
          " give --round_to_bf16"
        )
    plan[parameter] = dtype
  return plan


def _progress(
  shown: bool, title: str, source: Source
) -> contextlib.AbstractContextManager[progress.Advance]:
  if not shown:
    return contextlib.nullcontext(progress.silent)
  return progress.show(title, sum(map(source.nbytes, source.dtypes)))


def _write_all(
  source: Source,
  plan: Mapping[str, np.dtype],
  writer: Writer,
  work: Unfinished,
  advance: progress.Advance,
) -> int:
  """Writes what is not written yet; returns how much was."""
  resumed = 0
  counts = {name: _Count() for name in plan}
  parameters = {
    name: _parameter(source, name, dtype, counts[name])
    for name, dtype in plan.items()
  }
  most = max(map(writer.working_bytes, parameters.values()))

  def finished(name: str, entry: Entry) -> None:
    count = counts[name]
    rounding = {"rounded": count.values, "changed": count.lost}
    work.record(name, entry | rounding)
    advance(source.nbytes(name), name)

  with orbax_arrays.quiet(), _Behind(most, finished) as behind:
    for name, parameter in parameters.items():
      if name in work.done:
        if _is_whole(writer, name, work.done[name]):
          resumed += 1
          advance(source.nbytes(name), name)
          continue
        work.forget(name)
      behind.make_room(writer.working_bytes(parameter))
      behind.add(name, writer.prepare(parameter))
  return resumed


class _Behind:
  """Writes in a thread of its own, while the next parameters are prepared.

  Args:
    most_bytes: that may be in memory, in all.
    finished: called in this thread with what is written, in order.
  """

  def __init__(self, most_bytes: int, finished: Callable[[str, Entry], None]):
    self._most = most_bytes
    self._finished = finished
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._pending: collections.deque[
      tuple[str, int, concurrent.futures.Future[Entry]]
    ] = collections.deque()

  def make_room(self, nbytes: int) -> None:
    """Waits until so much more may be in memory."""
    while self._pending and (
      len(self._pending) >= MAX_PENDING
      or nbytes + sum(size for _, size, _ in self._pending) > self._most
    ):
      self._wait()

  def add(self, name: str, prepared: Prepared) -> None:
    future = self._thread.submit(prepared.write)
    self._pending.append((name, prepared.nbytes, future))

  def _wait(self) -> None:
    name, _, future = self._pending.popleft()
    try:
      entry = future.result()
    except (SpecPilotError, OSError):
      raise
    except Exception as error:  # TensorStore's are of other types.
      raise _os_error(error, name) from None
    self._finished(name, entry)

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback) -> None:
    try:
      # What was written before a failure is done all the same.
      while self._pending:
        self._wait()
    except Exception:
      if kind is None:
        raise
    finally:
      self._thread.shutdown(cancel_futures=True)


def _os_error(error: Exception, name: str) -> OSError:
  """What it would have been outside of TensorStore."""
  code = re.search(r"os_error_code='(\d+)'", str(error))
  if code is not None:
    return OSError(int(code[1]), os.strerror(int(code[1])))
  return OSError(f"{common.first_line(error)}; parameter {name!r}")


def _is_whole(writer: Writer, name: str, entry: Entry) -> bool:
  """Whether what the journal says is written is."""
  try:
    for _ in writer.blocks(name, entry):
      pass
  except (SpecPilotError, KeyError, AttributeError, TypeError):
    return False
  return True


@dataclasses.dataclass
class _Count:
  """Values that were rounded, and those that changed by it."""

  values: int = 0
  lost: int = 0


def _parameter(
  source: Source, name: str, dtype: np.dtype, count: _Count
) -> Parameter:
  fused = source.table[name]

  def blocks() -> Iterator[np.ndarray]:
    for block in source.read_blocks(name):
      if block.dtype == dtype:
        yield block
        continue
      # What overflows is refused below.
      with np.errstate(over="ignore"):
        rounded = block.astype(dtype)
      if common.nonfinite(rounded):
        raise SpecPilotError(
          f"{source.name}: tensor {name!r} overflows bfloat16"
        )
      count.values += block.size
      count.lost += int(np.count_nonzero(rounded.astype(block.dtype) != block))
      yield rounded

  return Parameter(name, fused.shape, dtype, fused.is_matrix, blocks)


def _verify_all(
  source: Source,
  plan: Mapping[str, np.dtype],
  writer: Writer,
  work: Unfinished,
  advance: progress.Advance,
) -> None:
  """Reads source and result again, one after the other: beside each other
  they could be twice the largest parameter.
  """
  for name, dtype in plan.items():
    advance(0, name)
    wanted = digest(_parameter(source, name, dtype, _Count()).blocks())
    found = None
    try:
      found = digest(writer.blocks(name, work.done[name]))
    finally:
      # It is written anew when the conversion is run again.
      if found != wanted:
        work.forget(name)
    if found != wanted:
      raise SpecPilotError(
        f"{work.folder}: parameter {name!r} reads back otherwise"
      )
    advance(source.nbytes(name), name)


def _report(
  source: Source,
  plan: Mapping[str, np.dtype],
  entries: Mapping[str, Entry],
  output: pathlib.Path,
  kind: str,
) -> Report:
  rounded = sum(entry["rounded"] for entry in entries.values())
  changed = sum(entry["changed"] for entry in entries.values())
  kept = {
    name: entry["kept_bf16"]
    for name, entry in entries.items()
    if "kept_bf16" in entry
  }
  notes = source.notes
  if changed:
    notes = (
      *notes,
      f"weights are rounded to bfloat16 ({changed} of {rounded} changed)",
    )
  return Report(
    output=str(output),
    kind=kind,
    parameters=len(plan),
    resumed=0,
    source_bytes=sum(map(source.nbytes, plan)),
    output_bytes=0,
    rounded=rounded,
    changed=changed,
    kept_bf16=kept,
    notes=notes,
    verified=False,
  )
