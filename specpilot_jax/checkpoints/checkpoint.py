"""What loading a model gives, and the checks that every format shares."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
WEIGHT_DTYPES = (BFLOAT16, FLOAT16, FLOAT32)

_PIECE = 1 << 20
"""Values that are looked at at once."""

W12, BF16 = "w12", "bf16"
WEIGHTS = (W12, BF16)
"""What to load a matrix as that is stored in W12."""


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
  """A model on the host.

  Attributes:
    config: shape and equations; `tokenizer_size` is set where there is a
      tokenizer.
    params: parameter name to array; bfloat16, float16 or float32 as stored
      (float32 where the weights were quantised), or a `W12Array` of NumPy
      leaves where it is stored as that and was not decoded, or an `FP8Array`
      of them.
    tokenizer: None where the checkpoint has none.
    source: where it was read from.
    notes: what a report must say about the weights, one line each.
    sha256: source file name to hex digest.
  """

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer | None
  source: str
  notes: tuple[str, ...] = ()
  sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_weight(
  array: np.ndarray, where: str, name: str, shape: tuple[int, ...]
) -> None:
  """Refuses a tensor of the wrong shape or dtype, or that is not finite."""
  if array.shape != tuple(shape):
    raise SpecPilotError(
      f"{where}: tensor {name!r} has shape {list(array.shape)}, expected"
      f" {list(shape)}"
    )
  if array.dtype not in WEIGHT_DTYPES:
    raise SpecPilotError(
      f"{where}: tensor {name!r} has dtype {array.dtype}, supported are"
      f" {', '.join(str(dtype) for dtype in WEIGHT_DTYPES)}"
    )
  bad = nonfinite(array)
  if bad:
    raise SpecPilotError(
      f"{where}: tensor {name!r} has {bad} values that are NaN or infinite"
    )


def nonfinite(array: np.ndarray) -> int:
  """Number of NaN and infinite values."""
  flat = np.ascontiguousarray(array).reshape(-1)
  # In pieces: the intermediate arrays of a whole one are larger than itself.
  return sum(
    _nonfinite(flat[start : start + _PIECE])
    for start in range(0, flat.size, _PIECE)
  )


def _nonfinite(flat: np.ndarray) -> int:
  if flat.dtype == BFLOAT16:
    # All exponent bits set; several times faster than through float32.
    return int(np.count_nonzero((flat.view(np.uint16) & 0x7F80) == 0x7F80))
  return flat.size - int(np.count_nonzero(np.isfinite(flat)))


def with_tokenizer(
  config: ModelConfig, tokenizer: Tokenizer | None, where: str
) -> ModelConfig:
  """The config with what the tokenizer knows: its size, BOS and EOS.

  Ids that the config names itself are kept.

  Raises:
    SpecPilotError: the tokenizer has more ids than the embedding has rows.
  """
  if tokenizer is None:
    return config
  if tokenizer.size > config.vocab_size:
    raise SpecPilotError(
      f"{where}: the tokenizer has {tokenizer.size} ids, the embedding only"
      f" {config.vocab_size} rows"
    )
  bos = config.bos_token_id
  return dataclasses.replace(
    config,
    tokenizer_size=tokenizer.size,
    bos_token_id=tokenizer.bos_token_id if bos is None else bos,
    eos_token_ids=config.eos_token_ids or tokenizer.eos_token_ids,
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; every failure names the file."""
  try:
    value = json.loads(path.read_bytes())
  except FileNotFoundError:
    raise SpecPilotError(f"{path.parent}: {path.name} is missing") from None
  except OSError as error:
    raise SpecPilotError(f"{path}: cannot be read ({error.strerror})") from None
  except (ValueError, RecursionError) as error:
    raise SpecPilotError(f"{path}: not JSON ({first_line(error)})") from None
  if not isinstance(value, dict):
    raise SpecPilotError(f"{path}: not a JSON object")
  return value


def check_weights_option(weights: str) -> None:
  """Refuses what is not one of WEIGHTS."""
  if weights not in WEIGHTS:
    raise SpecPilotError(
      f"weights={weights!r} is not one of {', '.join(WEIGHTS)}"
    )


def write_whole(path: pathlib.Path, content: bytes) -> None:
  """Writes a file that is there complete or not at all; raises OSError."""
  partial = path.with_name(f".{path.name}.tmp")
  partial.write_bytes(content)
  partial.replace(path)


def sha256_of(path: pathlib.Path) -> str:
  """Hex digest of a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def first_line(error: BaseException) -> str:
  """An exception's first line, or its type where it has no text."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  return lines[0].strip() if lines else type(error).__name__


@contextlib.contextmanager
def new_folder(target: str | os.PathLike[str]) -> Generator[pathlib.Path]:
  """A temporary folder that becomes `target` when the block succeeds.

  Raises:
    SpecPilotError: `target` exists and is not an empty folder, or its parent
      cannot be written.
  """
  target = pathlib.Path(target).absolute()
  check_free(target)
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(
      tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    )
  except OSError as error:
    raise SpecPilotError(
      f"{target}: cannot be written ({error.strerror})"
    ) from None
  try:
    yield staging
    check_free(target)
    # `mkdtemp` makes a private folder; the result gets ordinary permissions.
    mask = os.umask(0)
    os.umask(mask)
    staging.chmod(0o777 & ~mask)
    os.replace(staging, target)
  except OSError as error:
    raise SpecPilotError(
      f"{target}: cannot be written ({error.strerror or first_line(error)})"
    ) from None
  finally:
    shutil.rmtree(staging, ignore_errors=True)


def check_free(target: str | os.PathLike[str]) -> None:
  """Refuses a target path that holds anything."""
  target = pathlib.Path(target)
  try:
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
  except OSError as error:
    raise SpecPilotError(
      f"{target}: cannot be written ({error.strerror})"
    ) from None
  if taken:
    raise SpecPilotError(f"{target}: exists and is not an empty folder")
