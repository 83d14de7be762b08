"""Training text of drafters: files of rows, and the features of one file.

What the target computes over a file (taps, final hidden states) is kept on the
device while steps visit that file, so that the target runs once per file and
not once per step.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from specpilot_jax.models.target import Target
from specpilot_jax.zoo import training
from specpilot_jax.zoo.drafter_training import Text

FEATURE_TOKENS = 32_768
"""Tokens that the target reads at a time."""


@dataclasses.dataclass(frozen=True)
class Rows:
  """One file: prompts and what a target said after them.

  Attributes:
    tokens: [R, N] uint16 ids.
    starts: [R] int32, length of each prompt.
    ends: [R] int32, where the output ends or starts to loop.
    sampled: [R] bool, whether it was sampled.
  """

  tokens: np.ndarray
  starts: np.ndarray
  ends: np.ndarray
  sampled: np.ndarray

  def save(self, path: pathlib.Path) -> None:
    np.savez(path, **dataclasses.asdict(self))

  @classmethod
  def load(cls, path: pathlib.Path) -> "Rows":
    with np.load(path) as f:
      return cls(**{name: f[name] for name in f.files})

  @property
  def anchors(self) -> np.ndarray:
    """How many positions of each row can be anchors."""
    return np.maximum(self.ends - self.starts, 0)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _computed(graphdef, params, tokens, taps):
  model = nnx.merge(graphdef, params)
  hidden, features = jax.lax.map(
    lambda row: training.hidden_states(model, row, taps),
    tokens,
    batch_size=max(1, FEATURE_TOKENS // tokens.shape[1]),
  )
  return features, hidden


class Shelf:
  """Batches that stay on one file for some steps; they depend on the step.

  Args:
    paths: text files, all of one shape.
    target: whose text it is.
    taps: target layers.
    rows, anchors: of a batch.
    visits: steps on a file before the next one.
    seed: of the order and of every draw.
  """

  def __init__(
    self,
    paths: Sequence[pathlib.Path],
    target: Target,
    taps: tuple[int, ...],
    *,
    rows: int,
    anchors: int,
    visits: int,
    seed: int,
  ):
    self._paths = list(paths)
    self._graphdef, self._params = nnx.split(target)
    self._taps = taps
    self._shape = (rows, anchors)
    self._visits = visits
    self._seed = seed
    self._open: tuple[int, Rows, Text] | None = None

  def _file(self, visit: int) -> tuple[Rows, Text]:
    lap, place = divmod(visit, len(self._paths))
    order = np.random.default_rng([self._seed, lap]).permutation(
      len(self._paths)
    )
    index = int(order[place])
    if self._open is None or self._open[0] != index:
      rows = Rows.load(self._paths[index])
      tokens = jnp.asarray(rows.tokens, jnp.int32)
      self._open = None  # frees the last file before the next is computed
      features, hidden = _computed(
        self._graphdef, self._params, tokens, self._taps
      )
      text = Text(
        tokens=tokens,
        ends=jnp.asarray(rows.ends, jnp.int32),
        sampled=jnp.asarray(rows.sampled),
        features=features,
        hidden=hidden,
      )
      self._open = (index, rows, text)
    return self._open[1], self._open[2]

  def at(
    self, step: int
  ) -> tuple[Text, Int[np.ndarray, " R"], Int[np.ndarray, "R A"]]:
    """The file, the rows of a step, and their anchors.

    Rows are drawn by their number of anchors, so that each token of a file is
    an anchor as often as any other.
    """
    rows, text = self._file(step // self._visits)
    rng = np.random.default_rng([self._seed, 0, step])
    count = rows.anchors
    chosen = rng.choice(
      len(count), self._shape[0], p=count / count.sum()
    ).astype(np.int32)
    anchors = rng.integers(
      rows.starts[chosen, None] - 1, rows.ends[chosen, None] - 1, self._shape
    )
    return text, chosen, anchors.astype(np.int32)


def chosen_rows(text: Text, rows: Int[np.ndarray, " R"]) -> Text:
  """The named rows of a file."""
  return jax.tree.map(lambda x: x[rows], text)
