"""Training text of drafters: files of rows, and the features of one file.

What the target computes over a file (taps, final hidden states) is kept on the
device while steps visit that file, so that the target runs once per file and
not once per step.
"""

import dataclasses
import functools
import pathlib
import zipfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import training
from specpilot_jax.zoo.drafter_training import Text

FEATURE_TOKENS = 32_768
"""Tokens that the target reads at a time, fewer for large vocabularies."""


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
    """Reads what `save` wrote.

    Raises:
      SpecPilotError: the file is damaged.
    """
    try:
      with np.load(path) as f:
        return cls(**{name: f[name] for name in f.files})
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile):
      raise SpecPilotError(
        f"{path}: damaged; delete it, and the text stage writes it again"
      ) from None

  @property
  def anchors(self) -> np.ndarray:
    """How many positions of each row can be anchors."""
    return np.maximum(self.ends - self.starts, 0)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _computed(graphdef, params, tokens, taps):
  """Taps, final hidden states, and each token's probability."""
  model = nnx.merge(graphdef, params)

  def of_row(row):
    hidden, features = training.hidden_states(model, row, taps)
    law = jax.nn.log_softmax(model.logits(hidden[:-1]), axis=-1)
    said = jnp.take_along_axis(law, row[1:, None], axis=1)[:, 0]
    # The first token follows nothing.
    return features, hidden, jnp.pad(jnp.exp(said), (1, 0))

  width = max(tokens.shape[1], model.config.vocab_size // 8)
  return jax.lax.map(of_row, tokens, batch_size=max(1, FEATURE_TOKENS // width))


class Shelf:
  """Batches that stay on one file for some steps; they depend on the step.

  Args:
    paths: text files, all of one shape.
    target: whose text it is.
    taps: target layers.
    rows, anchors: of a batch.
    visits: steps on a file before the next one.
    surprise: a position is drawn as an anchor with weight 1 + surprise * (1 -
      the target's probability of its token). Decoding drafts from tokens that
      the drafter missed more often than from others.
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
    surprise: float,
    seed: int,
  ):
    if not paths:
      raise SpecPilotError("no training text; run the text stage first")
    self._paths = list(paths)
    self._graphdef, self._params = nnx.split(target)
    self._taps = taps
    self._shape = (rows, anchors)
    self._visits = visits
    self._surprise = surprise
    self._seed = seed
    self._open: tuple[int, np.ndarray, Text] | None = None

  def _file(self, visit: int) -> tuple[np.ndarray, Text]:
    """Cumulative weights of anchors [R, N], and the text."""
    lap, turn = divmod(visit, len(self._paths))
    order = np.random.default_rng([self._seed, lap]).permutation(
      len(self._paths)
    )
    place = int(order[turn])
    if self._open is None or self._open[0] != place:
      rows = Rows.load(self._paths[place])
      tokens = jnp.asarray(rows.tokens, jnp.int32)
      self._open = None  # frees the last file before the next is computed
      features, hidden, said = _computed(
        self._graphdef, self._params, tokens, self._taps
      )
      index = np.arange(rows.tokens.shape[1])
      allowed = index >= rows.starts[:, None] - 1
      allowed &= index < rows.ends[:, None] - 1  # with a label behind it
      weights = 1 + self._surprise * (1 - np.asarray(said, np.float64))
      text = Text(
        tokens=tokens,
        ends=jnp.asarray(rows.ends, jnp.int32),
        sampled=jnp.asarray(rows.sampled),
        features=features,
        hidden=hidden,
      )
      self._open = (place, np.cumsum(weights * allowed, axis=1), text)
    return self._open[1], self._open[2]

  def at(
    self, step: int
  ) -> tuple[Text, Int[np.ndarray, " R"], Int[np.ndarray, "R A"]]:
    """The file, the rows of a step, and their anchors.

    Rows are drawn by the weight of their positions, so that a position of any
    row is an anchor as often as its own weight says.
    """
    cumulative, text = self._file(step // self._visits)
    rng = np.random.default_rng([self._seed, 0, step])
    total = cumulative[:, -1]
    chosen = rng.choice(len(total), self._shape[0], p=total / total.sum())
    draws = rng.random(self._shape) * total[chosen, None]
    anchors = (cumulative[chosen, None] <= draws[..., None]).sum(-1)
    return text, chosen.astype(np.int32), anchors.astype(np.int32)


def chosen_rows(text: Text, rows: Int[np.ndarray, " R"]) -> Text:
  """The named rows of a file."""
  return jax.tree.map(lambda x: x[rows], text)
