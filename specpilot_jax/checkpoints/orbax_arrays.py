"""Single arrays of an Orbax checkpoint, written and read one at a time.

Orbax saves and restores whole trees. A conversion writes an array when it has
it, and the tree's own files when it has them all; what stands there then is
an ordinary checkpoint of a PyTree, which Orbax restores as one. The handler
that does it for NumPy arrays within a tree does it here for one of them.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import pathlib
import shutil
import sys
import zlib
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.errors import SpecPilotError

CHUNK_BYTES = 64 << 20
"""Of a file of an array, where its shape can be cut that far: the half of it
at least, which the allocator gives back to the system at once. What is in one
piece is in memory twice while it is read."""

_READ_LIMIT = {"limit": 1}
"""Of the pieces that are copied or decompressed at a time: what a second one
would need stays with the process."""
_SKELETON = ".skeleton"


def crc32(array: np.ndarray) -> int:
  """Of the bytes, which stand in the metadata beside shape and dtype."""
  return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _run(task: Coroutine) -> Any:
  """The result, whether or not an event loop runs in this thread."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(task)
  with concurrent.futures.ThreadPoolExecutor(1) as executor:
    return executor.submit(asyncio.run, task).result()


def _infos(
  folder: pathlib.Path, names: Iterable[str], *, ocdbt: bool, reading: bool
) -> list[Any]:
  # Files are not flushed one by one: what a power cut loses of them does not
  # fit the checksums.
  settings: dict[str, Any] = {"file_io_sync": False}
  if reading:
    settings["file_io_concurrency"] = _READ_LIMIT
    settings["data_copy_concurrency"] = _READ_LIMIT
  if ocdbt:
    settings["cache_pool#ocdbt"] = {"total_bytes_limit": 1 << 25}
  context = tensorstore.Context(settings)
  return [
    ocp.type_handlers.ParamInfo(
      name=name,
      parent_dir=epath.Path(folder),
      is_ocdbt_checkpoint=ocdbt,
      use_compression=False,
      raise_array_data_missing_error=True,
      ts_context=context,
    )
    for name in names
  ]


def _chunk_bytes(array: np.ndarray) -> int | None:
  """What to ask Orbax for, which cuts the longer axis at its next divisor
  until the pieces are small enough: of some shapes that makes single rows.
  """
  pieces = -(-array.nbytes // CHUNK_BYTES)
  fine = all(size & -size >= pieces for size in array.shape)
  return CHUNK_BYTES if pieces > 1 and fine else None


def write(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays, replacing what an interrupted write left of them.

  Args:
    folder: of the tree.
    arrays: by keys within the tree, joined by dots; of one element at least,
      for Orbax stores no other.

  Raises:
    OSError, ValueError: they cannot be written; TensorStore's say why.
  """
  for name in arrays:
    shutil.rmtree(folder / name, ignore_errors=True)
  handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
  infos = _infos(folder, arrays, ocdbt=False, reading=False)
  values = list(arrays.values())
  save = [ocp.SaveArgs(chunk_byte_size=_chunk_bytes(x)) for x in values]

  async def task():
    return await handler.serialize(values, infos, save)

  for future in _run(task()):
    future.result()


def read(folder: pathlib.Path, names: Sequence[str]) -> list[np.ndarray]:
  """Restores single arrays by their names; raises what TensorStore does."""
  ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(epath.Path(folder))
  handler = ocp.type_handlers.NumpyHandler()

  async def task():
    infos = _infos(folder, names, ocdbt=ocdbt, reading=True)
    return await handler.deserialize(infos, [ocp.RestoreArgs()] * len(infos))

  return list(_run(task()))


class _KeysAlone(ocp.type_handlers.NumpyHandler):
  """Says what it is, and writes no array."""

  async def serialize(self, values, infos, args=None):
    del values, infos, args
    return []


def write_tree(folder: pathlib.Path, tree: Mapping[str, Any]) -> None:
  """Adds Orbax's own files to a folder of arrays.

  They say which keys there are, not what is behind them, and are therefore
  those of a tree with the same keys of which no array is written.

  Args:
    folder: with an array for every leaf of `tree`.
    tree: nested dictionaries.
  """

  def numbers(branch):
    if isinstance(branch, Mapping):
      return {key: numbers(value) for key, value in branch.items()}
    return np.zeros(1, np.uint8)

  skeleton = folder / _SKELETON
  shutil.rmtree(skeleton, ignore_errors=True)
  registry = ocp.type_handlers.create_type_handler_registry(
    (np.ndarray, _KeysAlone())
  )
  handler = ocp.PyTreeCheckpointHandler(
    use_ocdbt=False, type_handler_registry=registry
  )
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(skeleton, args=ocp.args.PyTreeSave(numbers(tree)))
  # A third file says that a save to this folder, soon another, succeeded.
  for file in skeleton.glob("_*"):
    file.replace(folder / file.name)
  shutil.rmtree(skeleton)


def read_tree(folder: pathlib.Path) -> dict[str, Any]:
  """The tree's keys, with Orbax's metadata of the array behind each.

  Raises:
    SpecPilotError: Orbax cannot read their metadata.
  """
  with (
    quiet(),
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
  ):
    with damage(folder):
      item = checkpointer.metadata(folder).item_metadata
      # Orbax logs what is wrong with it, and gives None.
      stored = None if item is None else dict(item.tree)
    if stored is None:
      raise SpecPilotError(
        f"{folder}: damaged Orbax checkpoint (unreadable metadata"
        f"{_unreadable(folder)})"
      )
  return stored


def _unreadable(folder: pathlib.Path) -> str:
  """Which of the files it is, where that can be seen."""
  for path in sorted((*folder.glob("_*"), *folder.glob("*/.zarray"))):
    try:
      json.loads(path.read_bytes())
    except (OSError, ValueError):
      return f" in {path.relative_to(folder)}"
  return ""


def is_missing(folder: pathlib.Path, name: str) -> bool:
  """Whether nothing is there of an array; False where files hold many."""
  ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(epath.Path(folder))
  return not ocdbt and not (folder / name / ".zarray").exists()


@contextlib.contextmanager
def damage(folder: pathlib.Path, name: str | None = None) -> Generator[None]:
  """Any failure inside is a damaged checkpoint."""
  try:
    yield
  except SpecPilotError:
    raise
  except Exception as error:  # Orbax raises many kinds for damaged files.
    what = common.first_line(error)
    at = "" if name is None else f"; parameter {name!r}"
    raise SpecPilotError(
      f"{folder}: damaged Orbax checkpoint ({what}{at})"
    ) from None


@contextlib.contextmanager
def quiet() -> Generator[None]:
  """Nothing is logged: what matters of it is in the error."""
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  before = [logger.disabled for logger in loggers]
  hook = sys.unraisablehook
  _AbandonedReads.install()
  for logger in loggers:
    logger.disabled = True
  try:
    yield
  except SpecPilotError:
    # The reads that Orbax gave up may end later than this.
    hook = sys.unraisablehook
    raise
  finally:
    sys.unraisablehook = hook
    for logger, disabled in zip(loggers, before, strict=True):
      logger.disabled = disabled


class _AbandonedReads:
  """An `unraisablehook` that drops what abandoned reads report.

  Orbax closes its event loop at the first read that fails. Each of the others
  then fails to call back, in a thread of its own and at any later time, and
  prints a traceback. All else goes to the hook that was there before.
  """

  def __init__(self, before):
    self._before = before

  def __call__(self, unraisable) -> None:
    error = unraisable.exc_value
    closed = isinstance(error, RuntimeError) and "loop is closed" in str(error)
    if not closed:
      self._before(unraisable)

  @classmethod
  def install(cls) -> None:
    if not isinstance(sys.unraisablehook, cls):
      sys.unraisablehook = cls(sys.unraisablehook)
