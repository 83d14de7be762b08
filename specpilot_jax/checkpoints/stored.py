"""Parameters as an Orbax folder stores them: an array, or the parts of W12.

The folder's metadata hold a record of each, in JSON: shape and dtype of the
parameter; for W12 `encoding` and `parts`; shape, dtype and checksum of every
array. A parameter is read against its record, so that nothing damaged passes
for weights: an array without compression has no checksum of its own.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import orbax_arrays, w12, w12_storage
from specpilot_jax.checkpoints.source import row_blocks
from specpilot_jax.errors import SpecPilotError

METADATA = "specpilot.json"
W12 = "w12"
"""The encoding's name in records."""


def is_w12(record: Mapping[str, Any]) -> bool:
  return record.get("encoding") is not None


def arrays(name: str, value: np.ndarray | W12Array) -> dict[str, np.ndarray]:
  """What is stored of a parameter, by its keys in the tree."""
  if isinstance(value, W12Array):
    parts = w12_storage.to_arrays(value)
    return {f"{name}.{part}": array for part, array in parts.items()}
  return {name: value}


def record(value: np.ndarray | W12Array) -> dict[str, Any]:
  """What the metadata say of a parameter."""
  entry: dict[str, Any] = {
    "shape": list(value.shape),
    "dtype": str(value.dtype),
  }
  if isinstance(value, W12Array):
    parts = {
      part: record(array)
      for part, array in w12_storage.to_arrays(value).items()
    }
    return entry | {"encoding": W12, "parts": parts}
  return entry | {"crc32": orbax_arrays.crc32(value)}


def tree(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """The keys of the arrays of some parameters."""
  return {
    name: dict.fromkeys(entry["parts"]) if is_w12(entry) else None
    for name, entry in records.items()
  }


def check_record(name: str, entry: Any, where: str) -> None:
  """Refuses a record that is not one, or of an encoding unknown here."""
  ok = isinstance(entry, dict)
  if ok and is_w12(entry):
    if entry["encoding"] != W12:
      raise SpecPilotError(
        f"{where}: parameter {name!r} has encoding {entry['encoding']!r}, this"
        f" release reads {W12!r}"
      )
    parts = entry.get("parts")
    ok = isinstance(parts, dict) and all(
      isinstance(part, dict) for part in parts.values()
    )
  if not ok:
    raise SpecPilotError(f"{where}: the entry of {name!r} is malformed")


def check_there(
  folder: pathlib.Path, name: str, entry: Mapping[str, Any]
) -> None:
  """Refuses a parameter of which an array is missing."""
  if not is_w12(entry):
    if orbax_arrays.is_missing(folder, name):
      raise SpecPilotError(f"{folder}: parameter {name!r} is missing")
    return
  for part in entry["parts"]:
    if orbax_arrays.is_missing(folder, f"{name}.{part}"):
      raise SpecPilotError(
        f"{folder}: part {part!r} of parameter {name!r} is missing"
      )


def check_keys(
  stored: Mapping[str, Any],
  records: Mapping[str, Mapping[str, Any]],
  where: str,
) -> None:
  """Compares the keys that Orbax found with those of the records."""
  for name, entry in records.items():
    found = stored.get(name)
    if not is_w12(entry):
      if isinstance(found, Mapping):
        raise SpecPilotError(
          f"{where}: parameter {name!r} is in parts, expected an array"
        )
      continue
    keys = found.keys() if isinstance(found, Mapping) else set()
    for part in sorted(entry["parts"].keys() ^ keys):
      what = "missing" if part in entry["parts"] else "unknown"
      raise SpecPilotError(
        f"{where}: part {part!r} of parameter {name!r} is {what}"
      )


def restore(
  folder: pathlib.Path, name: str, entry: Mapping[str, Any]
) -> np.ndarray | W12Array:
  """Reads one parameter; see `check_record`.

  Args:
    folder: of the tree.
    name: of the parameter.
    entry: its record.

  Raises:
    SpecPilotError: an array that is missing, damaged or not as recorded, or
      parts that are no W12 matrix of the recorded shape.
  """
  if not is_w12(entry):
    return _array(folder, name, f"parameter {name!r}", entry)
  # One by one: an array may be in memory twice while it is read.
  parts = {
    part: _array(
      folder, f"{name}.{part}", f"part {part!r} of parameter {name!r}", item
    )
    for part, item in entry["parts"].items()
  }
  where = f"{folder}: parameter {name!r}"
  value = w12_storage.from_arrays(parts, where)
  # The codec takes any weight; a model has none that is not finite.
  bad = common.nonfinite(parts["values"])
  if bad:
    raise SpecPilotError(f"{where} has {bad} values that are NaN or infinite")
  return value


def blocks(value: np.ndarray | W12Array) -> Iterator[np.ndarray]:
  """A parameter's rows; those of W12 are decoded block by block."""
  if not isinstance(value, W12Array):
    yield value
    return
  for start, end in row_blocks(value.shape, 2 * value.shape[1]):
    yield w12.decode(value, start, end)


def _array(
  folder: pathlib.Path, key: str, what: str, entry: Mapping[str, Any]
) -> np.ndarray:
  with orbax_arrays.damage(folder, key):
    array = np.asarray(orbax_arrays.read(folder, [key])[0])
  for field in ("dtype", "shape"):
    found = getattr(array, field)
    found = str(found) if field == "dtype" else list(found)
    if found != entry.get(field):
      raise SpecPilotError(
        f"{folder}: {what} has {field} {found}, {METADATA} says"
        f" {entry.get(field)}"
      )
  if "crc32" in entry and orbax_arrays.crc32(array) != entry["crc32"]:
    raise SpecPilotError(
      f"{folder}: {what} is damaged: its bytes are not those that were written"
    )
  return array
