"""Recorded lattices: what the drafter offers at every position of an output.

One file per run, `lattices.npz`: float16 scores and ids, best candidate first,
so that rounding the scores changes no drafter's first choice. float16 keeps 11
bits: a log-probability of -8 is off by 0.004 at most.
"""

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from specpilot_jax.errors import SpecPilotError

LATTICES = "lattices.npz"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Recording:
  """One recorded output and the lattices along it.

  The lattice at i is what the drafter offers when output[:i] is committed: slot
  s is about output[i + s].

  Attributes:
    request: its id.
    looped: whether the output ended as a loop.
    prompt_length: tokens of the prompt.
    output: its n tokens, int32.
    tokens: candidate ids [n, slots, candidates], int32; best first unless there
      is a parent axis.
    scores: their log-probabilities up to a constant per slot, float16; -inf
      where there is no candidate. [n, slots, candidates], or
      [n, slots, candidates, candidates] where the drafter conditions on the
      parent: axis 2 is the parent (a place in the slot before; the first
      slot's parent is the anchor, place 0), axis 3 the rank under it.
    order: with a parent axis, the candidate (a place on the last axis of
      `tokens`) that has each rank, uint8; else None.
    counts: slots that hold a draft [n], int16.
    limit: tokens that the request might emit at most. Near it a pass has no
      path behind it, and nodes to spare for siblings. 0 where it is not known.
    level_one: whether the 8-bit view, run over the output from the exact state
      at i, chooses output[i + k], bool [n, depths]; False behind the output's
      end. None where it was not recorded.
  """

  request: str
  looped: bool
  prompt_length: int
  output: np.ndarray
  tokens: np.ndarray
  scores: np.ndarray
  order: np.ndarray | None
  counts: np.ndarray
  limit: int = 0
  level_one: np.ndarray | None = None

  def __post_init__(self):
    def require(good, what):
      if not good:
        raise SpecPilotError(f"lattices of {self.request}: {what}")

    n = self.output.shape[0]
    require(n > 0 and self.output.ndim == 1, "no output")
    require(
      self.tokens.ndim == 3 and self.tokens.shape[0] == n,
      f"tokens of shape {self.tokens.shape} for {n} positions",
    )
    slots, candidates = self.tokens.shape[1:]
    shape = (n, slots, candidates)
    if self.order is not None:
      shape += (candidates,)
      require(self.order.shape == shape, f"order of shape {self.order.shape}")
      require((self.order < candidates).all(), "order names no candidate")
    require(self.scores.shape == shape, f"scores of shape {self.scores.shape}")
    require(not np.isnan(self.scores).any(), "a score is NaN")
    require(self.limit == 0 or self.limit >= n, f"limit {self.limit} below {n}")
    require(
      self.counts.shape == (n,)
      and ((self.counts >= 0) & (self.counts <= slots)).all(),
      "counts that are no numbers of slots",
    )
    require(
      self.level_one is None
      or (self.level_one.ndim == 2 and self.level_one.shape[0] == n),
      "level 1's choices are not one row per position",
    )

  def __len__(self) -> int:
    return self.output.shape[0]

  @property
  def num_slots(self) -> int:
    return self.tokens.shape[1]

  def depth(self, position: int) -> int:
    """Drafts of a path at most at a position: slots, and what is left."""
    slots = int(self.counts[position])
    return min(slots, self.limit - position - 1) if self.limit else slots


def rank(
  tokens: np.ndarray, scores: np.ndarray, valid_vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Sorts candidates by score, lowest id first on ties, and drops strangers.

  Args:
    tokens: [n, slots, candidates].
    scores: the same shape, or [n, slots, candidates, candidates] with the
      parent on axis 2; any float dtype, NaN where there is no candidate.
    valid_vocab: ids below it exist; others get the score -inf.

  Returns:
    Tokens, scores and order as a `Recording` has them.
  """
  ids, conditional = tokens, scores.ndim == tokens.ndim + 1
  if conditional:
    ids = np.broadcast_to(tokens[..., None, :], scores.shape)
  exists = (ids >= 0) & (ids < valid_vocab) & (scores > -np.inf)
  if conditional:
    # Before the first slot stands the anchor alone.
    exists[:, 0, 1:] = False
  scores = np.where(exists, scores, -np.inf)
  at = np.lexsort((ids, -scores), axis=-1)
  ordered = np.take_along_axis(scores, at, axis=-1)
  # Below float16's range is not "no candidate".
  low = np.finfo(np.float16).min
  ordered = np.where(ordered == -np.inf, ordered, np.maximum(ordered, low))
  ordered = ordered.astype(np.float16)
  if conditional:
    return tokens.astype(np.int32), ordered, at.astype(np.uint8)
  return np.take_along_axis(tokens, at, axis=-1).astype(np.int32), ordered, None


def save(path: Path, recordings: Sequence[Recording]) -> None:
  """Writes the file whole or not at all."""
  conditional = {r.order is not None for r in recordings}
  shapes = {r.tokens.shape[1:] for r in recordings}
  if len(conditional) != 1 or len(shapes) != 1:
    raise SpecPilotError(f"{path}: lattices of one drafter must be recorded")
  arrays = {
    "format": np.asarray(_FORMAT),
    "requests": np.asarray([r.request for r in recordings]),
    "looped": np.asarray([r.looped for r in recordings]),
    "prompt_lengths": np.asarray([r.prompt_length for r in recordings]),
    "lengths": np.asarray([len(r) for r in recordings]),
    "limits": np.asarray([r.limit for r in recordings]),
    "output": np.concatenate([r.output for r in recordings]),
    "tokens": _narrow(np.concatenate([r.tokens for r in recordings])),
    "scores": np.concatenate([r.scores for r in recordings]),
    "counts": np.concatenate([r.counts for r in recordings]),
  }
  if conditional == {True}:
    arrays["order"] = np.concatenate(
      [r.order for r in recordings if r.order is not None]
    )
  known = [r.level_one for r in recordings if r.level_one is not None]
  if len(known) == len(recordings):
    arrays["level_one"] = np.concatenate(known)
  # In memory first: a run records tens of megabytes.
  buffer = io.BytesIO()
  np.savez_compressed(buffer, **arrays)  # pyrefly: ignore[bad-argument-type]
  temporary = path.with_name(f".{path.name}.part")
  try:
    temporary.write_bytes(buffer.getvalue())
    os.replace(temporary, path)
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror}") from None


def _narrow(ids: np.ndarray) -> np.ndarray:
  """Ids in two bytes where all of them fit."""
  fits = ids.size == 0 or (ids.min() >= 0 and ids.max() < 1 << 16)
  return ids.astype(np.uint16) if fits else ids


def load(path: Path) -> list[Recording]:
  """Reads the file.

  Raises:
    SpecPilotError: not there, damaged, of another format.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      if int(file["format"]) != _FORMAT:
        raise SpecPilotError(
          f"{path}: format {int(file['format'])}, expected {_FORMAT}"
        )
      arrays = {name: file[name] for name in file.files}
    return list(_split(arrays))
  except FileNotFoundError:
    raise SpecPilotError(f"{path}: no recorded lattices") from None
  except SpecPilotError:  # It is a ValueError.
    raise
  except OSError as e:
    raise SpecPilotError(f"{path}: {e.strerror or e}") from None
  except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as e:
    raise SpecPilotError(f"{path}: damaged lattices ({e})") from None


def _split(arrays: dict[str, np.ndarray]) -> Iterator[Recording]:
  ends = np.cumsum(arrays["lengths"])
  limits = arrays.get("limits", np.zeros_like(ends))
  for i, end in enumerate(ends):
    part = slice(end - arrays["lengths"][i], end)
    yield Recording(
      request=str(arrays["requests"][i]),
      looped=bool(arrays["looped"][i]),
      prompt_length=int(arrays["prompt_lengths"][i]),
      output=arrays["output"][part].astype(np.int32),
      tokens=arrays["tokens"][part].astype(np.int32),
      scores=arrays["scores"][part],
      order=arrays["order"][part] if "order" in arrays else None,
      counts=arrays["counts"][part],
      limit=int(limits[i]),
      level_one=arrays["level_one"][part] if "level_one" in arrays else None,
    )
