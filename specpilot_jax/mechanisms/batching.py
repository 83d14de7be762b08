"""The policies of a batch as one: what its engine and its scheduler are told.

On the device an `Allocation` decides which drafts of which request a pass
verifies. On the host a `BatchPolicy` decides how many rows the pass has, since
shapes are compiled, and whether a chunk of a prompt rides in it: from the step
times of the engine itself, and from what drafts have been worth of late.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Kernels
from specpilot_jax import configs
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import ON, SystemConfig
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.engine import BatchEngine, StepLimits
from specpilot_jax.decoding.batch.scheduler import (
  Load,
  Scheduler,
  Update,
)
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import (
  batch_profile,
  dynamic_draft,
  prompt_admission,
)
from specpilot_jax.mechanisms import shared_budget as shared_budget_lib
from specpilot_jax.mechanisms.step_costs import (
  StepCosts,
  Yields,
  node_price,
  nodes_for,
)
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target

SHARES = (2, 4, 8)
"""Rows for each slot of a pass that may be compiled, beside the full block and
one row each: then there are no drafts to verify, and none are made."""

TILE = 16
"""Rows below which a pass is no cheaper: products go by tiles of so many."""

RIDER_CHUNK = 32
"""Places for a prompt in a verify pass, where chunks ride."""

MEMORY = 0.99
"""What a step of a request keeps of the sums over those before it: what drafts
are worth is an average of the latest hundred."""

REFRESH = 32
"""Steps after which the number of nodes is chosen again under the same load."""

LEARNING = 0.1
"""Share of a step's time in what steps of its shape are taken to cost."""

PROBE = 64
"""Steps of which one is of the next larger pass than was chosen: without drafts
nobody would notice that they got better, nor that their pass is cheaper than it
once was."""


class Plan(NamedTuple):
  """What a step's allocation is told; traced.

  Attributes:
    budget: nodes of all requests, anchors included.
    price: tokens that a node must bring, see `step_costs.node_price`.
  """

  budget: Int[Array, ""] | np.integer
  price: Float[Array, ""] | np.floating

  @classmethod
  def of(cls, budget: int, price: float) -> "Plan":
    return cls(np.int32(budget), np.float32(price))


@dataclasses.dataclass(frozen=True)
class Allocation:
  """Who gets the rows of a pass; see `decoding.batch.step.Allocate`.

  Whatever else, more nodes than rows go to the highest path scores.

  Attributes:
    chains: every request's nodes are a chain.
    shared: the plan's budget counts.
    dynamic: requests verify as many positions as they are worth.
    lengths: of those, see `dynamic_draft.length`.
  """

  chains: bool
  shared: bool
  dynamic: bool
  lengths: tuple[int, ...] = dynamic_draft.LENGTHS

  @property
  def dense(self) -> bool:
    """Lengths alone decide how many rows the next pass has; with a budget the
    host does, and a pass with a row for every node is stock's."""
    return not self.shared

  def fresh(self) -> Any:
    return dynamic_draft.Recent.fresh() if self.dynamic else ()

  def __call__(self, offer: batch_step.Offer) -> state_lib.Nodes:
    nodes, scores, budget = offer.nodes, offer.scores, offer.rows
    if self.dynamic:
      positions = jax.vmap(
        lambda recent, survival: dynamic_draft.length(
          recent, survival, offer.plan.price, self.lengths
        )
      )(offer.learned, self._survival(offer))
      scores = jnp.where(nodes.depth < positions[:, None], scores, -jnp.inf)
    if self.shared:
      budget = jnp.minimum(offer.plan.budget, budget)
    return shared_budget_lib.allocate(
      nodes, scores, offer.live, budget, chains=self.chains
    )

  def learned(
    self,
    offer: batch_step.Offer,
    verified: Int[Array, " S"],
    accepted: Int[Array, " S"],
  ) -> Any:
    if not self.dynamic:
      return offer.learned
    return jax.vmap(dynamic_draft.learned)(
      offer.learned, self._survival(offer), verified, accepted
    )

  def _survival(self, offer):
    return jax.vmap(dynamic_draft.survival)(offer.lattice, offer.first)


def allocation(system: SystemConfig) -> Allocation | None:
  """Of a system; None where every request verifies what it offers."""
  shared, dynamic = system.shared_budget == ON, system.dynamic_draft == ON
  if not (shared or dynamic):
    return None
  return Allocation(system.tree == configs.CHAIN, shared, dynamic)


def engine(
  system: SystemConfig,
  target: Target,
  drafter: Drafter | None,
  **settings: Any,
) -> BatchEngine:
  """The batch engine of a system.

  Args:
    system: what is wanted.
    target, drafter: as `registry.prepare` makes them.
    settings: of `BatchEngine`.
  """
  rides = system.prompt_admission == ON
  # W12's kernel takes few rows: one tile of them for a prompt.
  most = TILE if _few_rows(system, target.kernels) else RIDER_CHUNK
  chunk = min(settings.get("prefill_chunk", most), most)
  return BatchEngine(
    target,
    drafter=drafter,
    system=system,
    allocate=allocation(system) if drafter is not None else None,
    rider_chunk=chunk if rides else 0,
    **settings,
  )


def _few_rows(system: SystemConfig, kernels: Kernels) -> bool:
  """Whether passes are limited to `kernels.w12_rows`."""
  return system.weights == "w12" and kernels.w12_matmul != "reference"


class BatchPolicy:
  """Decides for one engine, step by step.

  Args:
    system: of the engine.
    engine: made by `engine`.
    profile: of its steps; `warm_up` measures one where it is needed. Steps
      that run correct it.
    clock: in seconds.
  """

  def __init__(
    self,
    system: SystemConfig,
    engine: BatchEngine,
    profile: batch_profile.Profile | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.engine = engine
    self.profile = profile
    has_drafts = engine.nodes > 1
    self._shared = system.shared_budget == ON and has_drafts
    self._dynamic = system.dynamic_draft == ON and has_drafts
    self._fixed = system.shared_nodes
    self._rides = engine.rider_chunk > 0 and engine.slots > 1
    self._most_rows: int | None = None
    if _few_rows(system, engine.kernels):
      most = kernels_lib.w12_rows(engine.kernels)
      self._most_rows = most - engine.rider_chunk
    places = engine.nodes - 1
    # Sums over steps: how many, what the best n drafts were expected to add,
    # and what all verified ones were expected to and did.
    self._count, self._best = 0.0, np.zeros(places)
    self._expected = self._accepted = 0.0
    self._seen = 0
    self._last: dict[str, int] = {}  # nodes of each request's latest step
    self._rows: int | None = None  # of the latest step
    self._chosen: tuple[int, StepLimits] | None = None
    self._age = 0
    self._clock = clock
    # Microseconds of a step by slots and rows, as of late; and the step that
    # is on: its slots, its rows, and when it was planned.
    self._us: dict[int, dict[int, float]] = {}
    self._on: tuple[int, int, float] | None = None

  def rows_of(self, slots: int) -> tuple[int | None, ...]:
    """Rows that passes over so many slots may have; None for all places.

    Raises:
      SpecPilotError: none that the kernels take.
    """
    whole = slots * self.engine.nodes
    if not (self._shared or self._dynamic):
      return (None,)
    if self._shared and self._fixed is not None:
      found = [max(slots, self._fixed)]
    else:
      shares = [max(slots * share, TILE) for share in SHARES]
      found = [slots, *shares, self._most_rows or whole, whole]
    most = self._most_rows
    found = sorted({min(n, whole) for n in found})
    rows = [n for n in found if slots <= n <= (most or n)]
    if not rows:
      least = slots if self._fixed is None else max(slots, self._fixed)
      raise SpecPilotError(
        f"a pass over {slots} requests has {least} rows, weights=w12 takes"
        f" at most {most}"
      )
    return tuple(None if n == whole else n for n in rows)

  @property
  def _is_profiled(self) -> bool:
    by_load = self._shared and self._fixed is None
    return by_load or self._dynamic or self._rides

  def warm_up(self, sampling: Iterable[SamplingParams]) -> None:
    """Compiles all shapes, and times them where a policy wants to know.

    Args:
      sampling: a request of every kind that will come.
    """
    plan: Any = ()
    if self._shared or self._dynamic:
      plan = Plan.of(1, 0.0)
    kinds = list(sampling)
    self.engine.warm_up(kinds, rows=self.rows_of, plan=plan)
    if self._is_profiled and self.profile is None:
      self.profile = batch_profile.measure(
        self.engine, self.rows_of, plan, kinds[0]
      )

  def scheduler(self) -> Scheduler:
    """Drives the engine by this policy; its updates go to `observe`."""
    return self.engine.scheduler(plan=self.plan, ride=self.ride)

  def observe(self, update: Update) -> None:
    """Learns from what a step did."""
    figures = update.figures
    if update.finish is not None:
      self._last.pop(update.request.id, None)
      self._on = None  # Perhaps nothing follows for a while.
    if figures is None or figures.scores is None or not update.tokens:
      return
    if not (self._shared or self._dynamic):
      return
    drafted = figures.result.drafted
    if update.finish is None:
      self._last[update.request.id] = 1 + drafted
    self._seen += 1
    # A few requests of a step will do: this is the host's time.
    if self._seen % (self.engine.slots // 4 | 1):
      return
    scores = np.nan_to_num(figures.scores[1:].astype(np.float64), nan=-np.inf)
    worth = np.exp(np.minimum(scores, 0))
    best = np.cumsum(np.sort(worth)[::-1])
    self._count = MEMORY * self._count + 1
    self._best = MEMORY * self._best + best
    expected = best[drafted - 1] if drafted else 0.0
    self._expected = MEMORY * self._expected + expected
    self._accepted = MEMORY * self._accepted + figures.result.accepted

  @property
  def yields(self) -> Yields:
    """Tokens of a pass for a request by its nodes, as of late."""
    trust = (self._accepted + 1) / (self._expected + 1)
    best = trust * self._best / max(self._count, 1.0)
    if not self._count:
      best = np.arange(1.0, best.size + 1)  # All drafts are good.
    return Yields(tuple(range(1, best.size + 2)), (1.0, *(1 + best).tolist()))

  def _slots_of(self, requests: int) -> int:
    return min(n for n in self.engine.slot_buckets if n >= requests)

  def plan(self, load: Load) -> StepLimits | None:
    """The scheduler's: rows of the next pass, and what its allocation needs."""
    if not (self._shared or self._dynamic):
      return None
    self._age += 1
    now = self._clock()
    if self._on is not None and not load.prefilling:
      self._took(*self._on[:2], 1e6 * (now - self._on[2]))
    limits = self._limits(load)
    slots = self._slots_of(load.decoding)
    rows = limits.rows or slots * self.engine.nodes
    self._on = None if load.prefilling else (slots, rows, now)
    return limits

  def _costs(self, slots: int) -> StepCosts | None:
    """Times of steps over so many slots, as of late."""
    if self.profile is None:
      return None
    if slots not in self._us:
      costs = self.profile.steps[slots]
      self._us[slots] = dict(zip(costs.nodes, costs.values, strict=True))
    us = self._us[slots]
    return StepCosts(tuple(us), tuple(us.values()))

  def _took(self, slots: int, rows: int, us: float) -> None:
    """A step's time, from one plan to the next; a hiccup counts as twice."""
    if self._costs(slots) is None or rows not in self._us[slots] or us <= 0:
      return
    known = self._us[slots][rows]
    self._us[slots][rows] += LEARNING * (min(us, 2 * known) - known)

  def _limits(self, load: Load) -> StepLimits:
    kept = self._shared and (self._fixed is not None or self._age % REFRESH)
    if kept and self._chosen and self._chosen[0] == load.decoding:
      limits = self._chosen[1]
    else:
      limits = self._choose(load.decoding)
      self._chosen = load.decoding, limits
      self._rows = limits.rows
    by_load = self._shared and self._fixed is None
    if by_load and not self._age % PROBE:
      return self._probe(self._slots_of(load.decoding), limits)
    return limits

  def _probe(self, slots: int, limits: StepLimits) -> StepLimits:
    """A step of the next larger pass: what does it take, what does it bring?"""
    whole = slots * self.engine.nodes
    choices = [whole if n is None else n for n in self.rows_of(slots)]
    larger = [n for n in choices if n > (limits.rows or whole)]
    if not larger:
      return limits
    return dataclasses.replace(
      limits,
      rows=None if larger[0] == whole else larger[0],
      plan=limits.plan._replace(budget=np.int32(larger[0])),
    )

  def _choose(self, requests: int) -> StepLimits:
    slots = self._slots_of(requests)
    whole = slots * self.engine.nodes
    choices = [whole if n is None else n for n in self.rows_of(slots)]
    costs = self._costs(slots)
    if self._shared and self._fixed is not None:
      budget = max(self._fixed, requests)
    elif self._shared:
      assert costs is not None, "warm_up comes first"
      budget = nodes_for(requests, costs, self.yields, choices)
    else:
      budget = self._wanted(requests)
    rows = next((n for n in choices if n >= budget), choices[-1])
    price = 0.0
    if self._dynamic and costs is not None:
      price = node_price(requests, costs, self.yields, rows)
    return StepLimits(
      rows=None if rows == whole else rows,
      plan=Plan.of(min(budget, rows), price),
    )

  def _wanted(self, requests: int) -> int:
    """Nodes that requests are expected to ask for: what they last verified.

    Where that was all there was room for, one more: the next larger pass.
    """
    known = list(self._last.values())[:requests]
    nodes = sum(known) + (requests - len(known)) * self.engine.nodes
    return nodes + (self._rows is not None and nodes >= self._rows)

  def ride(self, load: Load, unread: int) -> int:
    """The scheduler's: tokens of a prompt that ride in the next step."""
    if not self._rides:
      return 0
    assert self.profile is not None, "warm_up comes first"
    slots = self._slots_of(load.decoding)
    limits = self.plan(load)
    rows = slots * self.engine.nodes
    if limits is not None and limits.rows is not None:
      rows = limits.rows
    more = self.profile.ridden[slots].at(rows) - self.profile.steps[slots].at(
      rows
    )
    return prompt_admission.riding(
      unread,
      places=self.engine.rider_chunk,
      chunk=self.engine.prefill_chunk,
      more_us=max(more, 0.0),
      own_us=self.profile.prefill_us,
    )
