"""What a pass costs by its nodes, and what its nodes are worth: two tables.

In a batch every node of a verify pass costs compute. Which nodes pay depends
on the card, the weights and the load; the policies for batches decide with
tables that were profiled on the deployment itself.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from specpilot_jax.configs import is_integer, is_positive
from specpilot_jax.errors import SpecPilotError


@dataclasses.dataclass(frozen=True)
class _Curve:
  """Straight lines between points; `points` is checked and named by `what`."""

  nodes: tuple[int, ...]
  values: tuple[float, ...]

  what = "table"

  def __post_init__(self):
    if not self.nodes or len(self.nodes) != len(self.values):
      raise SpecPilotError(
        f"{self.what}: {len(self.nodes)} numbers of nodes and"
        f" {len(self.values)} values, expected as many, at least one"
      )
    for nodes, value in zip(self.nodes, self.values, strict=True):
      if not is_integer(nodes) or nodes < 1 or not is_positive(value):
        raise SpecPilotError(
          f"{self.what}: {value!r} at {nodes!r} nodes, expected numbers above 0"
        )
    if any(a >= b for a, b in zip(self.nodes, self.nodes[1:], strict=False)):
      raise SpecPilotError(
        f"{self.what}: nodes must increase, got {list(self.nodes)}"
      )

  def at(self, nodes: float) -> float:
    """At any number of nodes; outside of the points as at the nearest."""
    place = bisect.bisect_right(self.nodes, nodes)
    if place == 0:
      return self.values[0]
    if place == len(self.nodes):
      return self.values[-1]
    a, b = self.nodes[place - 1], self.nodes[place]
    low, high = self.values[place - 1], self.values[place]
    return low + (high - low) * (nodes - a) / (b - a)


class StepCosts(_Curve):
  """Microseconds of a whole step, draft and commit included, by the nodes of
  its pass, all requests together.

  Outside of what was profiled the nearest point counts: no step is taken for
  dearer or cheaper than one that was seen.
  """

  what = "step costs"


class Yields(_Curve):
  """Tokens that a pass emits for a request, by the nodes that it verifies."""

  what = "yields"


def nodes_for(
  load: int,
  costs: StepCosts,
  yields: Yields,
  choices: Sequence[int],
  rate: float | None = None,
) -> int:
  """Nodes of a pass that emits the most tokens a second.

  Args:
    load: requests that decode, at least 1.
    costs, yields: of the deployment.
    choices: numbers of nodes to choose from; more than the requests themselves
      where there are such, otherwise a node for each request.
    rate: tokens a microsecond that other passes emit; then it is the pass with
      the most tokens beyond what those would emit in its time.

  Returns:
    One of the choices, or `load`; of equally good ones the smallest.
  """

  def worth(nodes: int) -> float:
    tokens, us = load * yields.at(nodes / load), costs.at(nodes)
    return tokens / us if rate is None else tokens - rate * us

  return max([load, *sorted(n for n in choices if n > load)], key=worth)


def node_price(
  load: int, costs: StepCosts, yields: Yields, nodes: int
) -> float:
  """Tokens that a node more must bring to be worth its time.

  The time that it takes, at what the pass emits in that time.

  Args:
    load: requests that decode.
    costs, yields: of the deployment.
    nodes: of the pass, all requests together.
  """
  inside = [n for n in costs.nodes if n <= nodes]
  below = inside[-1] if inside else costs.nodes[0]
  above = next((n for n in costs.nodes if n > below), below)
  if above == below:
    # The last point: the slope that leads there.
    place = len(costs.nodes) - 1
    below = costs.nodes[max(place - 1, 0)]
  if above == below:
    return 0.0
  slope = (costs.at(above) - costs.at(below)) / (above - below)
  rate = load * yields.at(max(nodes / load, 1)) / costs.at(nodes)
  return max(slope, 0.0) * rate
