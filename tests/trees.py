"""Random trees for tests, and plain Python walks over them."""

import numpy as np


def random_parents(rng, size: int) -> list[int]:
  """Parents first; -1 for the root. Chains, bushes and what is between."""
  reach = rng.integers(1, size + 1)
  return [-1] + [
    int(rng.integers(max(0, i - reach), i)) for i in range(1, size)
  ]


def path_to(parents, node: int) -> list[int]:
  """Nodes from the root down to `node`."""
  path = []
  while node >= 0:
    path.append(node)
    node = parents[node]
  return path[::-1]


def depths(parents) -> np.ndarray:
  paths = [path_to(parents, i) for i in range(len(parents))]
  return np.array([len(path) - 1 for path in paths], np.int32)


def mask_of(parents) -> np.ndarray:
  """mask[i, j]: j is i or an ancestor of i."""
  mask = np.zeros((len(parents), len(parents)), bool)
  for i in range(len(parents)):
    mask[i, path_to(parents, i)] = True
  return mask
