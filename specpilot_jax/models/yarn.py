"""YaRN: rotary embeddings for contexts longer than a model was trained on.

(arXiv 2309.00071.) Dimensions that turn less than `beta_slow` times within the
original context turn `factor` times slower, those that turn more than
`beta_fast` times as they did; in between a linear ramp over dimensions.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
  """Settings, named as in `rope_parameters` of Hugging Face files."""

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0

  @property
  def scale(self) -> float:
    """Of the rotated queries and keys: what keeps the softmax as sharp."""
    return 0.1 * math.log(self.factor) + 1.0

  def frequencies(self, dim: int, theta: float) -> np.ndarray:
    """Radians per position of each pair of dimensions.

    Args:
      dim: rotated dimensions.
      theta: base of the wavelengths.

    Returns:
      [dim / 2], float64.
    """
    original = theta ** (-np.arange(dim // 2, dtype=np.float64) / (dim // 2))

    def pair_that_turns(times: float) -> float:
      length = self.original_max_position_embeddings
      return (
        dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))
      )

    first = max(math.floor(pair_that_turns(self.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(self.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2) - first) / max(last - first, 1e-3)
    slow = np.clip(ramp, 0.0, 1.0)
    return original * (1 - slow) + original / self.factor * slow
