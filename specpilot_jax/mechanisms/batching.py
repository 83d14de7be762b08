"""The policies of a batch as one: what its engine and its scheduler are told.

On the device an `Allocation` decides which drafts of which request a pass
verifies. On the host a `BatchPolicy` decides how many rows the pass has, since
shapes are compiled, and whether a chunk of a prompt rides in it: from the step
times of the engine itself, and from what drafts have been worth of late.
"""

import collections
import dataclasses
from collections.abc import Iterable
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

RIDER_CHUNK = 192
"""Places for a prompt in a verify pass, where chunks ride.

A pass is bound by the weights that it reads up to some 140 (H200) to 200 rows
(H100: 990 TFLOP/s to 4.8 or 3.35 TB/s, at 60 and 90 % of them, two bytes to two
FLOP a row; FP8 has half of both). Few places mean many rounds in which slots
wait for a prompt. At scripted costs all policies together, 16 requests at once,
are 1.29, 1.33 and 1.30 times as fast as stock with 128, 192 and 256 places
(WORKSPACE_NOTES.md).
"""

MEMORY = 0.99
"""What a step of a request keeps of the sums over those before it: whether
drafts are worth what they promise is an average of the latest hundred."""

PRIOR = 16
"""Drafts that came true as expected, assumed beside those seen: a few bad ones
at the start would end all drafting, and with it all learning, for a while."""

SEEN = 128
"""Latest steps of requests by which nodes are shared out beforehand."""

REFRESH = 32
"""Steps after which the number of nodes is chosen again under the same load."""

LEARNING = 0.1
"""Share of a step's time in what steps of its shape are taken to cost."""

PROBE = 64
"""Steps of which one is of the next larger pass than was chosen, and of twice
as many one of the next smaller: without drafts nobody would notice that they
got better, nor that a pass is cheaper than it once was."""


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
    dynamic: requests verify as many positions as they are worth; where they
      share a budget, recent acceptance weighs their scores.
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

  def unplanned(self) -> Plan:
    return Plan.of(np.iinfo(np.int32).max, 0.0)

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
      if self.dynamic:
        # Promises count as much as they came true, beside those of others; no
        # more, as paths above their anchor's probability would be equal.
        trust = jnp.log(jnp.minimum(dynamic_draft.trust(offer.learned), 1))
        scores += jnp.where(nodes.depth > 0, trust[:, None], 0)
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

  Raises:
    SpecPilotError: a view of the drafter's weights, whose products are of one
      request: over several, they would be read once for each; the kernel for
      tree attention that takes no batch.
  """
  if target.kernels.tree_attention == "mosaic":
    raise SpecPilotError(
      "kernel tree_attention: mosaic takes one request at a time; take triton"
    )
  if system.drafter_view != configs.EXACT and settings.get("slots") != 1:
    raise SpecPilotError(
      f"drafter_view={system.drafter_view} is for one request at a time;"
      f" several take drafter_view={configs.EXACT}"
    )
  # Beside a single request nobody reads a prompt: no passes are made for it.
  rides = system.prompt_admission == ON and settings.get("slots") != 1
  most = RIDER_CHUNK
  if _few_rows(system, target.kernels):
    # Half of them are for a prompt.
    most = kernels_lib.w12_rows(target.kernels) // 2
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
  """

  def __init__(
    self,
    system: SystemConfig,
    engine: BatchEngine,
    profile: batch_profile.Profile | None = None,
  ):
    self.system, self.engine = system, engine
    self.profile = profile
    has_drafts = engine.nodes > 1
    self._shared = system.shared_budget == ON and has_drafts
    self._dynamic = system.dynamic_draft == ON and has_drafts
    self._fixed = system.shared_nodes if self._shared else None
    self._rides = engine.rider_chunk > 0 and engine.slots > 1
    self._most_rows: int | None = None
    if _few_rows(system, engine.kernels):
      self._most_rows = kernels_lib.w12_rows(engine.kernels)
    # What the drafts of the latest steps of requests were expected to add, and
    # sums over steps of what those that were verified were expected to and did.
    self._worth: collections.deque[np.ndarray] = collections.deque(maxlen=SEEN)
    self._expected = self._accepted = 0.0
    self._seen = 0
    self._yields: tuple[int, Yields] | None = None  # and after how many seen
    self._last: dict[str, int] = {}  # nodes of each request's latest step
    self._rows: int | None = None  # of the latest step
    # What was chosen, when and for how many requests, of passes that a prompt
    # does and does not ride in.
    self._chosen: dict[bool, tuple[int, int, StepLimits]] = {}
    self._age = 0
    # Microseconds of a step by slots and whether a prompt rides, and by rows,
    # as of late.
    self._us: dict[tuple[int, bool], dict[int, float]] = {}

  def fresh(self) -> "BatchPolicy":
    """One that has the profile, and has seen no request."""
    return BatchPolicy(self.system, self.engine, self.profile)

  def rows_of(self, slots: int, rides: bool = False) -> tuple[int | None, ...]:
    """Rows that passes over so many slots may have; None for all places.

    Where no policy shares them out there is a block for each of fewer requests
    than slots: places of nobody are not computed then.

    Args:
      rides: whether a chunk of a prompt is in them too. There may be no such
        passes.

    Raises:
      SpecPilotError: none that the kernels take.
    """
    nodes, most = self.engine.nodes, self._most_rows
    whole = slots * nodes
    if most is not None and rides:
      most -= self.engine.rider_chunk
    if self._fixed is not None:
      found = {max(slots, self._fixed)}
    else:
      found = {max(slots * share, TILE) for share in SHARES}
      found |= {most or whole}
      # A prompt comes instead of the least likely drafts.
      found |= {slots} if self._shared else set()
      found |= set() if self._shared and rides and slots > 1 else {whole}
      if not (self._shared or self._dynamic):
        found = {n for n in found if n >= nodes}
    rows = sorted(min(n, whole) for n in found)
    rows = [n for n in dict.fromkeys(rows) if slots <= n <= (most or n)]
    least = max(slots, min(found))
    if not (self._shared or self._dynamic) and whole not in rows:
      # All requests have whole blocks, whatever they get.
      rows, least = [], whole
    if not rows and rides:
      few = least == whole or most is None or most < slots
      return () if few else (most,)
    if not rows:
      raise SpecPilotError(
        f"a pass over {slots} requests has {least} rows, weights=w12 takes at"
        f" most {most}; take fewer requests at a time, shared_budget=on or"
        " weights=bf16"
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
    if figures is None or not update.tokens or figures.scores is None:
      return
    if not (self._shared or self._dynamic):
      return
    drafted = figures.result.drafted
    if update.finish is None:
      self._last[update.request.id] = 1 + drafted
    self._seen += 1
    # A few requests of a step will do: this is the host's time. But where most
    # steps draft nothing, all of the one that does count.
    seldom = self._rows is not None and self._rows <= self.engine.slots
    if not seldom and self._seen % (self.engine.slots // 4 | 1):
      return
    scores = np.nan_to_num(figures.scores[1:].astype(np.float64), nan=-np.inf)
    worth = np.exp(np.minimum(scores, 0))
    self._worth.append(worth)
    expected = np.sort(worth)[worth.size - drafted :].sum()
    self._expected = MEMORY * self._expected + expected
    self._accepted = MEMORY * self._accepted + figures.result.accepted

  @property
  def yields(self) -> Yields:
    """Tokens of a pass for a request by its share of the nodes, as of late.

    The nodes of all go to the best drafts of all, whosever they are: a request
    whose drafts are good verifies more than one whose drafts are not.
    """
    known = self._yields
    if known is not None and self._seen - known[0] < self.engine.slots:
      return known[1]
    places = self.engine.nodes - 1
    added = np.arange(1.0, places + 1)  # All drafts are good.
    if self._worth:
      trust = (self._accepted + PRIOR) / (self._expected + PRIOR)
      best = np.sort(np.concatenate(self._worth))[::-1]
      added = best.reshape(places, -1).sum(axis=1).cumsum() / len(self._worth)
      added *= trust
    found = Yields(tuple(range(1, places + 2)), (1.0, *(1 + added).tolist()))
    self._yields = self._seen, found
    return found

  def _slots_of(self, requests: int) -> int:
    return min(n for n in self.engine.slot_buckets if n >= requests)

  def plan(self, load: Load) -> StepLimits | None:
    """The scheduler's: rows of the next pass, and what its allocation needs."""
    if self.engine.nodes == 1:
      return None
    self._age += 1
    self._learn()
    rides = load.riding > 0
    limits = self._limits(load.decoding, rides)
    self._rows = limits.rows
    by_load = self._shared and self._fixed is None
    if by_load and not rides:
      return self._probe(self._slots_of(load.decoding), limits)
    return limits

  def _learn(self) -> None:
    """Corrects times of steps by those that ended; a hiccup counts as twice."""
    times = self.engine.step_times
    while times:
      step = times.popleft()
      if self._costs(step.slots, step.rides) is None:
        continue
      table = self._us[step.slots, step.rides]
      if step.rows in table and step.us > 0:
        known = table[step.rows]
        table[step.rows] += LEARNING * (min(step.us, 2 * known) - known)

  def _costs(self, slots: int, rides: bool) -> StepCosts | None:
    """Times of steps over so many slots, as of late."""
    if self.profile is None:
      return None
    if (slots, rides) not in self._us:
      tables = self.profile.ridden if rides else self.profile.steps
      if slots not in tables:
        return None
      costs = tables[slots]
      self._us[slots, rides] = dict(zip(costs.nodes, costs.values, strict=True))
    us = self._us[slots, rides]
    return StepCosts(tuple(us), tuple(us.values()))

  def _limits(self, requests: int, rides: bool) -> StepLimits:
    """What is chosen, for a while under the same load; for less of it while
    little is known."""
    if self._shared and rides in self._chosen:
      at, of, limits = self._chosen[rides]
      if of == requests and self._age - at < min(REFRESH, 1 + at):
        return limits
    limits = self._choose(requests, rides)
    self._chosen[rides] = self._age, requests, limits
    return limits

  def _choices(self, slots: int, rides: bool) -> list[int]:
    whole = slots * self.engine.nodes
    return [whole if n is None else n for n in self.rows_of(slots, rides)]

  def _probe(self, slots: int, limits: StepLimits) -> StepLimits:
    """Now and then the next larger or smaller pass: what does it take?"""
    whole = slots * self.engine.nodes
    rows = limits.rows or whole
    # A pass without drafts emits so little that it is not for a try.
    choices = [n for n in self._choices(slots, False) if n > slots]
    found: list[int] = []
    if self._age % PROBE == 0:
      found = [n for n in choices if n > rows][:1]
    elif self._age % (2 * PROBE) == PROBE // 2:
      found = [n for n in choices if n < rows][-1:]
    if not found:
      return limits
    return dataclasses.replace(
      limits,
      rows=None if found[0] == whole else found[0],
      plan=limits.plan._replace(budget=np.int32(found[0])),
    )

  def _choose(self, requests: int, rides: bool) -> StepLimits:
    slots = self._slots_of(requests)
    whole = slots * self.engine.nodes
    choices = self._choices(slots, rides)
    costs = self._costs(slots, rides)
    if self._fixed is not None:
      budget = max(self._fixed, requests)
    elif self._shared:
      assert costs is not None, "warm_up comes first"
      drafts = [n for n in choices if n > slots]  # nobody has any below
      rate = None
      if rides:
        # What a prompt saves elsewhere does not depend on the rows beside it.
        apart = self._limits(requests, False)
        apart_us = self._step_us(requests, False, apart)
        rate = self._emitted(requests, apart) / apart_us
      budget = nodes_for(requests, costs, self.yields, drafts, rate)
    elif self._dynamic:
      budget = self._wanted(requests)
    else:
      budget = requests * self.engine.nodes
    rows = next((n for n in choices if n >= budget), choices[-1])
    if not (self._shared or self._dynamic):
      return StepLimits(rows=None if rows == whole else rows)
    price = 0.0
    # Of a shared budget's rows all are paid for, whoever fills them.
    if self._dynamic and not self._shared and costs is not None:
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
    requests = load.decoding
    if not self._rides or not self.rows_of(self._slots_of(requests), True):
      return 0
    assert self.profile is not None, "warm_up comes first"
    alone = self._limits(requests, False)
    alone_us = self._step_us(requests, False, alone)
    emitted = self._emitted(requests, alone)
    along = self._limits(requests, True)
    # With fewer drafts beside the prompt a pass emits less.
    less = 1 - self._emitted(requests, along) / emitted
    more_us = self._step_us(requests, True, along) - alone_us * (1 - less)
    # Slots that wait for the prompt, and for those behind it.
    idle = 1 + min(load.waiting, load.free_slots)
    missed = self._emitted(requests + idle, alone) / emitted - 1
    return prompt_admission.riding(
      unread,
      places=self.engine.rider_chunk,
      chunk=self.engine.prefill_chunk,
      more_us=max(more_us, 0.0),
      own_us=self.profile.reading_us(unread),
      idle_us=alone_us * max(missed, 0.0),
    )

  def _rows_in(self, requests: int, limits: StepLimits) -> int:
    whole = self._slots_of(requests) * self.engine.nodes
    return whole if limits.rows is None else limits.rows

  def _step_us(self, requests: int, rides: bool, limits: StepLimits) -> float:
    costs = self._costs(self._slots_of(requests), rides)
    assert costs is not None
    return costs.at(self._rows_in(requests, limits))

  def _emitted(self, requests: int, limits: StepLimits) -> float:
    """Tokens of a pass for so many requests, or what is in proportion."""
    requests = min(requests, self.engine.slots)
    rows = self._rows_in(requests, limits)
    if not self._shared or rows <= self._slots_of(requests):
      return requests
    return requests * self.yields.at(max(rows / requests, 1))
