"""Exact replay of tree policies on recorded lattices, in NumPy.

Under the matching rule the output is the target's own whatever is drafted, at
any temperature. So the acceptance of any policy can be followed on a recorded
output without a device: at position i the policy builds its nodes from the
lattice at i, the accepted run is the longest path whose tokens are
output[i], output[i + 1], ..., and the next step begins behind it and the bonus
token: the policy's own step boundaries. It is exact up to the rounding of the
taps that the drafter reads, and of scores to float16.

A policy of fewer nodes verifies the first nodes of one of more. So one tree per
position tells the acceptance at every budget: `sweep`.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from experiments.cost_model.lattices import Recording

BUDGETS = (8, 16, 24, 32, 48, 64, 96)
"""Nodes of a pass, anchor included; from 16 on, and but for 24, the edges of
kernel tiles."""


class Policy(Protocol):
  """Which nodes a pass verifies."""

  @property
  def nodes(self) -> int:
    """Nodes of a pass at most, the anchor included."""
    ...

  def path(self, recording: Recording, position: int) -> Sequence[int]:
    """Drafts that the pass at a position accepts; what follows is its bonus.

    Their indices among the nodes, rising; the anchor is node 0. With `n` nodes
    the same policy accepts those below `n`.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Chain:
  """Stock: the drafter's first choices, one after another.

  Attributes:
    drafts: at most.
  """

  drafts: int

  @property
  def nodes(self) -> int:
    return 1 + self.drafts

  def path(self, recording: Recording, position: int) -> Sequence[int]:
    wanted = recording.output[position : position + self.drafts]
    path = chain(recording, position, self.drafts)[: wanted.size]
    wrong = np.flatnonzero(path != wanted[: path.size])
    return range(1, 1 + (int(wrong[0]) if wrong.size else path.size))


def chain(recording: Recording, position: int, limit: int) -> np.ndarray:
  """Tokens of the drafter's first choices, as far as it has any."""
  count = min(int(recording.counts[position]), limit)
  tokens, scores = recording.tokens[position], recording.scores[position]
  if recording.order is None:
    missing = np.flatnonzero(scores[:count, 0] == -np.inf)
    return tokens[: missing[0] if missing.size else count, 0]
  order, place, out = recording.order[position], 0, []
  for slot in range(count):
    if scores[slot, place, 0] == -np.inf:
      break
    place = int(order[slot, place, 0])
    out.append(tokens[slot, place])
  return np.asarray(out, np.int32)


@dataclasses.dataclass(frozen=True)
class Node:
  """A drafted node: slot s stands s + 1 tokens after the anchor.

  Attributes:
    parent: index in the tree; -1 is the anchor.
    score: sum of log-probabilities along its path.
    place: of its token among the slot's candidates.
  """

  parent: int
  slot: int
  token: int
  score: float
  place: int


@dataclasses.dataclass(frozen=True)
class BestFirst:
  """The best-first tree over the lattice.

  A node's score is the sum of log-probabilities given its actual parent. The
  drafter's first choices are always inside, as far as the depth allows; the
  other nodes are those of the highest scores, whose parents score at least as
  high and so are inside too. Equal scores: the lower token id, then the older
  parent, first.

  Attributes:
    nodes: of a pass, the anchor included.
    depth: of a path at most; None for all slots.
    single: take sums in float32, as an engine does whose lattice is float32;
      otherwise in float64.
    blind: every parent gets the scores that hold under the drafter's first
      choice for the slot before; the ablation `tree=marginal`.
  """

  nodes: int
  depth: int | None = None
  single: bool = False
  blind: bool = False

  def path(self, recording: Recording, position: int) -> Sequence[int]:
    output = recording.output
    by_parent: dict[int, list[tuple[int, Node]]] = {}
    for index, node in enumerate(self.build(recording, position)):
      by_parent.setdefault(node.parent, []).append((index, node))
    at, found = -1, []
    while position + len(found) < output.size:
      wanted = int(output[position + len(found)])
      child = [i for i, n in by_parent.get(at, ()) if n.token == wanted]
      if not child:
        break
      at = child[0]
      found.append(1 + at)
    return found

  def build(self, recording: Recording, position: int) -> list[Node]:
    """The drafted nodes, parents first."""
    lattice = _Lattice(recording, position, self.depth, blind=self.blind)
    budget = self.nodes - 1
    tree: list[Node] = []
    children: dict[tuple[int, int], int] = {}

    # Entries: (-score, token, parent, slot, rank under the parent, place).
    def entry(parent: int, place: int, slot: int, rank: int, above: float):
      best = lattice.candidate(slot, place, rank)
      if best is None:
        return None
      place, token, score = best
      total = above + score
      if self.single:  # Rounding the float64 sum of two is float32's own sum.
        total = float(np.float32(total))
      return (-total, token, parent, slot, rank, place)

    parent, place, above = -1, 0, 0.0
    for slot in range(budget):
      top = entry(parent, place, slot, 0, above)
      if top is None:
        break
      above, place = -top[0], top[5]
      children[parent, 0] = len(tree)
      tree.append(Node(parent, slot, top[1], above, place))
      parent = len(tree) - 1

    heap = []

    def offer(candidate):
      if candidate is not None:
        heapq.heappush(heap, candidate)

    offer(entry(-1, 0, 0, 0, 0.0))
    while heap and len(tree) < budget:
      score, token, parent, slot, rank, place = heapq.heappop(heap)
      index = children.get((parent, rank))
      if index is None:
        index = children[parent, rank] = len(tree)
        tree.append(Node(parent, slot, token, -score, place))
      above = tree[parent].score if parent >= 0 else 0.0
      from_place = tree[parent].place if parent >= 0 else 0
      offer(entry(parent, from_place, slot, rank + 1, above))
      offer(entry(index, place, slot + 1, 0, -score))
    return tree


class _Lattice:
  """One position's lattice, by (slot, parent's place, rank)."""

  def __init__(
    self,
    recording: Recording,
    position: int,
    depth: int | None,
    *,
    blind: bool,
  ):
    left = recording.depth(position)
    self.slots = left if depth is None else min(left, depth)
    self.tokens = recording.tokens[position].tolist()
    self.scores = recording.scores[position].astype(np.float64).tolist()
    order = recording.order
    self.order = None if order is None else order[position].tolist()
    self.parents: list[int] | None = None
    if blind and self.order is not None:
      self.parents = [0]
      for row in self.order:
        self.parents.append(row[self.parents[-1]][0])

  def candidate(
    self, slot: int, parent: int, rank: int
  ) -> tuple[int, int, float] | None:
    """Place, token and log-probability; None where there is none."""
    if slot >= self.slots or rank >= len(self.tokens[slot]):
      return None
    if self.order is None:
      place, score = rank, self.scores[slot][rank]
    else:
      if self.parents is not None:
        parent = self.parents[slot]
      place = self.order[slot][parent][rank]
      score = self.scores[slot][parent][rank]
    if score == -np.inf:
      return None
    return place, self.tokens[slot][place], score


@dataclasses.dataclass(frozen=True)
class Replay:
  """A policy followed over recorded outputs.

  Attributes:
    emitted: tokens of each step, one list per recording.
  """

  emitted: tuple[tuple[int, ...], ...]

  @property
  def steps(self) -> int:
    return sum(len(e) for e in self.emitted)

  @property
  def tau(self) -> float:
    """Tokens per step, pooled, bonus included."""
    return sum(map(sum, self.emitted)) / self.steps

  @property
  def tau_per_request(self) -> float:
    return float(np.mean([sum(e) / len(e) for e in self.emitted]))


def replay(recordings: Iterable[Recording], policy: Policy) -> Replay:
  """Follows the policy's own step boundaries."""
  return sweep(recordings, policy, [policy.nodes])[policy.nodes]


def sweep(
  recordings: Iterable[Recording], widest: Policy, budgets: Iterable[int]
) -> dict[int, Replay]:
  """Follows a policy at several budgets, each along its own step boundaries.

  Args:
    recordings: what to follow it on.
    widest: the policy with the most nodes.
    budgets: nodes of a pass, the anchor included; none above the policy's.
  """
  budgets = sorted(set(budgets))
  if budgets and not 1 <= budgets[0] <= budgets[-1] <= widest.nodes:
    raise ValueError(f"budgets {budgets} of a policy of {widest.nodes} nodes")
  emitted: dict[int, list[tuple[int, ...]]] = {n: [] for n in budgets}
  for recording in recordings:
    path = functools.cache(functools.partial(widest.path, recording))
    for budget, of_requests in emitted.items():
      steps, at = [], 0
      while at < len(recording):
        accepted = sum(node < budget for node in path(at))
        # A stop or the limit cuts the last run.
        count = min(accepted + 1, len(recording) - at)
        steps.append(count)
        at += count
      of_requests.append(tuple(steps))
  return {n: Replay(tuple(of_requests)) for n, of_requests in emitted.items()}


def agreement(
  recording: Recording, policy: Policy, emitted: Sequence[int]
) -> int:
  """Steps of a real run that the policy repeats from the same position.

  Args:
    emitted: tokens of each step of the real run, whose output was recorded.
  """
  agreed = at = 0
  for count in emitted:
    accepted = len(policy.path(recording, at))
    own = min(accepted + 1, len(recording) - at)
    agreed += own == count
    at += count
  return agreed
