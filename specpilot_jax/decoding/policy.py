"""Which nodes a pass verifies: compiled shapes, and limits that are traced."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.dispatch import Implementation
from specpilot_jax import configs
from specpilot_jax.decoding import draft as draft_lib
from specpilot_jax.decoding import tree as tree_lib
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import state as state_lib

ENVELOPES = (16, 32, 48, 64, 96, 128)
"""Rows that a pass over a tree may have: the edges of kernel tiles, where a
node more costs a tile more. A tree of fewer nodes leaves rows empty."""


@state_lib.pytree
class Limits:
  """What a request may verify; traced, so that it is compiled once.

  Attributes:
    nodes: of a pass at most, the anchor included.
    depth: drafts of a path at most.
  """

  nodes: Int[Array, ""]
  depth: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Policy:
  """Which nodes of a drafter's lattice a pass verifies.

  Attributes:
    tree: one of `configs.TREES`.
    nodes: of a pass at most, the anchor included.
    path: nodes of a path at most, the anchor included.
    rows: of a pass: a chain has its nodes, a tree the envelope around them.
  """

  tree: str
  nodes: int
  path: int
  rows: int

  @classmethod
  def of(
    cls, system: configs.SystemConfig, drafter: draft_lib.Drafter | None
  ) -> "Policy":
    """The policy of a system with a drafter; one node without.

    Raises:
      SpecPilotError: as `of_slots`.
    """
    if drafter is None:
      return cls(configs.CHAIN, nodes=1, path=1, rows=1)
    return cls.of_slots(system, drafter.num_slots, drafter.name)

  @classmethod
  def of_slots(
    cls, system: configs.SystemConfig, slots: int, name: str
  ) -> "Policy":
    """The policy of a system whose drafter offers so many slots.

    Every limit of the system is an upper one: the smallest counts.

    Args:
      name: of the drafter, for errors.

    Raises:
      SpecPilotError: a limit beyond what the drafter offers.
    """
    for field in ("num_drafts", "tree_depth"):
      value = getattr(system, field)
      if value is not None and value > slots:
        raise SpecPilotError(
          f"{field}={value} is more than the {slots} that drafter {name} offers"
        )
    depth = min(slots, system.tree_depth or slots)
    limits = [
      system.node_budget,
      None if system.num_drafts is None else 1 + system.num_drafts,
    ]
    if system.tree == configs.CHAIN:
      if system.node_budget is not None and system.node_budget > 1 + slots:
        raise SpecPilotError(
          f"node_budget={system.node_budget} is more than the {1 + slots} nodes"
          f" of a chain of drafter {name}; a tree may have more"
        )
      nodes = min(n for n in (1 + depth, *limits) if n is not None)
      return cls(system.tree, nodes=nodes, path=nodes, rows=nodes)
    if system.node_budget is None:
      limits.append(configs.DEFAULT_TREE_NODES)
    nodes = min(n for n in limits if n is not None)
    rows = min(n for n in ENVELOPES if n >= nodes)
    return cls(system.tree, nodes, path=1 + min(depth, rows - 1), rows=rows)

  def limits(
    self, nodes: int | None = None, depth: int | None = None
  ) -> Limits:
    """The policy's own limits, or others that its shapes have room for.

    Args:
      nodes: of a pass at most, the anchor included.
      depth: drafts of a path at most.

    Raises:
      SpecPilotError: a limit out of range.
    """
    nodes = self.nodes if nodes is None else nodes
    depth = self.path - 1 if depth is None else depth
    for name, value, low, high in (
      ("nodes", nodes, 1, self.rows),
      ("depth", depth, 0, self.path - 1),
    ):
      if not configs.is_integer(value) or not low <= value <= high:
        raise SpecPilotError(
          f"{name} must be a whole number from {low} to {high}, which a pass"
          f" has room for, got {value!r}"
        )
    return Limits(
      nodes=jnp.asarray(nodes, jnp.int32), depth=jnp.asarray(depth, jnp.int32)
    )

  def tree_of(
    self,
    lattice: draft_lib.Lattice,
    anchor: Int[Array, ""],
    *,
    nodes: Int[Array, ""],
    depth: Int[Array, ""],
    valid_vocab: int,
    implementation: Implementation = "reference",
  ) -> tree_lib.Tree:
    """A pass over a tree, with the scores of its nodes: `rows` places, `nodes`
    of them used at most.

    Args:
      lattice: what the drafter offers.
      anchor: id of the last committed token.
      nodes: of the pass at most, the anchor included.
      depth: drafts of a path at most.
      valid_vocab: ids below it exist.
      implementation: of `tree_growth`.
    """
    tokens, scores = lattice.tokens, lattice.scores
    if self.tree == configs.MARGINAL and scores.ndim == 3:
      tokens, scores = tree_lib.marginal(
        tokens,
        scores,
        valid_vocab=valid_vocab,
        implementation=implementation,
      )
    return tree_lib.best_first(
      anchor,
      tokens,
      scores,
      lattice.count,
      nodes=self.rows,
      valid_vocab=valid_vocab,
      depth=depth,
      drafts=nodes - 1,
      implementation=implementation,
    )
