"""A round: what is tried, in which order, and what is kept.

Every decision follows from the event log alone, so that the same results give
the same champion, whether they were measured now, before an interruption, or
in another round that is replayed.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from experiments.agents.protocol import (
  Agent,
  Limits,
  Proposal,
  Task,
  cut,
  join,
)
from experiments.hosts import Slot
from experiments.rounds.log import PROPOSE, Budget, Log
from specpilot_jax.errors import SpecPilotError

GATE = 0.03
"""Gain after overhead below which a proposal is not worth code of its own."""

System = Mapping[str, str]
"""`options` and `patch` of a candidate, over stock and base."""

STOCK: System = {"options": "", "patch": ""}


class World(Protocol):
  """What measures. All results are what JSON holds.

  Attributes:
    parallel: screenings that can run side by side, each on a device of its own.
  """

  @property
  def parallel(self) -> int: ...

  @property
  def noise(self) -> str:
    """Of the machine, the code and the design whose A/A sessions count."""
    ...

  def device(self) -> contextlib.AbstractContextManager[Slot | None]:
    """A device for an agent, leased to it; None where none was named."""
    ...

  def factors(self, champion: System) -> dict[str, Any]:
    """`tau`, `kernel` and `overhead`: what each could gain, as factors; None
    where it was not measured."""
    ...

  def aa(self) -> dict[str, Any]:
    """One A/A session: `kind`, `reason`, `mean`."""
    ...

  def check(self, system: System) -> str | None:
    """Why a system cannot be built; None where it can. Nothing runs."""
    ...

  def merge(self, champion: System, patch: str) -> dict[str, Any]:
    """`patch` over the base of both, or `conflict`."""
    ...

  def replayed(self, system: System, against: System) -> dict[str, Any]:
    """The evidence that costs no device: `bound` of the gain by exact replay,
    None where a replay says nothing; see `evidence.bound`."""
    ...

  def screen(self, system: System, against: System, units: int) -> dict:
    """A short timing: `kind` (ok, refused, infra), `reason`, `gain`, `upper`
    (bound of the gain), `identical`, `outputs`."""
    ...

  def test(self, system: System, against: System) -> dict[str, Any]:
    """A paired test: `kind`, `verdict`, `reason`, `gain`, `bound`."""
    ...

  def seal(self, system: System) -> dict[str, Any]:
    """The sealed test against stock: `kind`, `verdict`, `reason`,
    `speedup_vs_stock`, `lcb`, `tokens_forced`."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How a round goes.

  Attributes:
    directions: (factor, option) to explore, of which those with the largest
      factor come first.
    aa_sessions: that a gate needs.
    screen_units: of each stage of screening, a candidate must survive all.
    limits: of an agent per task.
    champion: system that the round starts from.
    workers: agents that work side by side.
    details: of tasks, by id.
  """

  directions: Sequence[tuple[str, str | None]]
  aa_sessions: int = 8
  screen_units: Sequence[int] = (2, 4)
  limits: Limits = Limits()
  champion: System = dataclasses.field(default_factory=lambda: dict(STOCK))
  workers: int = 1
  details: Mapping[str, str] = dataclasses.field(default_factory=dict)


def mark(system: System) -> str:
  """Of a system in keys of the log: what was measured against one champion
  says nothing of another."""
  text = json.dumps([system["options"], system["patch"]])
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def coarse(gain: float | None) -> str:
  """A gain in bins: what agents are told of it."""
  if gain is None:
    return "not measured"
  for low, text in (
    (0.10, "above +10 %"),
    (0.05, "+5 to +10 %"),
    (0.03, "+3 to +5 %"),
    (-0.03, "within 3 %"),
  ):
    if gain >= low:
      return text
  return "slower"


class Round:
  """Runs phases 0 to 4; may be killed at any point and run again.

  Args:
    log: of the round.
    world: measures.
    agents: propose; the first that has something for a task is heard first.
    budget: checked before every piece of work.
    plan: what to do.
    workspace: folder for agents.
  """

  def __init__(
    self,
    log: Log,
    world: World,
    agents: Sequence[Agent],
    budget: Budget,
    plan: Plan,
    workspace: Path,
  ):
    self._log, self._world, self._agents = log, world, agents
    self._budget, self._plan, self._workspace = budget, plan, workspace
    self._trials: list[dict[str, Any]] = []

  def _do(self, key: str, work, **cost: float) -> Any:
    return self._log.do(
      key, work, cost=cost, check=lambda: self._budget.check(cost)
    )

  def _measured(self, key: str, work, trials: int = 1) -> dict[str, Any]:
    """Work on a machine that may fail: done once more where it does."""
    result: dict[str, Any] = {}
    for name in (key, f"{key}/again"):
      replayed = name in self._log
      result = self._do(name, work, trials=trials)
      failed = result["kind"] == "infra"
      if not replayed:  # What failed in an earlier slice ends no later one.
        self._budget.tell(failed=failed)
      if not failed:
        break
    return result

  def run(self) -> dict[str, Any]:
    """The whole round.

    Raises:
      BudgetSpent: a limit is reached; what has ended stays in the log.
    """
    start = dict(self._plan.champion)
    factors = self._do("factors", lambda: self._world.factors(start))
    tasks = self._tasks(factors, start)
    validated = self._explore(tasks, start)
    # Screenings have no gate. Of another machine the noise is another one: a
    # round that goes on there measures it there.
    for i in range(self._plan.aa_sessions):
      key = f"aa/{self._world.noise}/{i}"
      self._measured(key, self._world.aa, trials=0)
    champion, accepted = self._integrate(validated, start)
    kernels = [t for t in tasks if t.factor == "kernel"]
    champion, tuned = self._tune(kernels, champion, factors)
    accepted += tuned
    sealed = None
    if champion != start:
      sealed = self._measured(
        f"seal/{mark(champion)}", lambda: self._world.seal(champion)
      )
    promoted = sealed is not None and sealed["verdict"] == "accept"
    result = {
      "factors": factors,
      "directions": [
        {k: v for k, v in t.as_dict().items() if k != "detail"} for t in tasks
      ],
      "trials": self._trials,
      "accepted": accepted if promoted else [],
      "integrated": accepted,
      "champion": champion if promoted else start,
      "sealed": sealed,
    }
    return json.loads(json.dumps(result))

  def _tasks(self, factors: Mapping[str, Any], champion: System) -> list[Task]:
    found = []
    for factor, option in self._plan.directions:
      known = factors[factor]
      bound = None if known is None else float(known) - 1
      name = f"{factor}/{option or 'open'}"
      found.append(
        Task(
          id=name,
          factor=factor,
          option=option,
          bound=bound,
          champion=champion["options"],
          detail=self._plan.details.get(name, ""),
        )
      )
    # The largest factor first, then what was not measured; within a factor as
    # the registry has them.
    found.sort(key=lambda t: math.inf if t.bound is None else -t.bound)
    return found

  def _propose(self, task: Task) -> list[Proposal]:
    """What all agents say, kept before anything is done with it."""
    proposals: dict[str, Proposal] = {}
    for agent in self._agents:
      key = f"{PROPOSE}{task.id}/{agent.name}"

      def ask(agent=agent, key=key) -> dict[str, Any]:
        self._workspace.mkdir(parents=True, exist_ok=True)
        # Of a killed round the same task may have left one.
        stem = f"{key.replace('/', '-')}-"
        place = Path(tempfile.mkdtemp(prefix=stem, dir=self._workspace))
        try:
          with self._world.device() as slot:
            limits = dataclasses.replace(self._plan.limits, device=slot)
            session = agent.propose(task, place, limits)
        except SpecPilotError as e:
          return {"proposals": [], "usd": None, "transcript": f"error: {e}"}
        return cut(session, task, self._plan.limits).as_dict()

      cost = {"usd": self._plan.limits.usd or 0.0} if agent.paid else {}
      session = self._do(key, ask, **cost)
      for fields in session["proposals"]:
        proposal = Proposal.from_dict(fields)
        proposals.setdefault(proposal.id, proposal)
    return list(proposals.values())

  def _explore(self, tasks: Sequence[Task], start: System):
    """Phase 1: (gain, proposal) of what is worth a paired test."""
    worth = []
    for task in tasks:
      if task.bound is not None and task.bound < GATE:
        told = f"at most {task.bound:+.1%}"
        self._trials.append(_trial(task.id, None, "floor", told))
      else:
        worth.append(task)
    answers = _side_by_side(self._propose, worth, self._plan.workers)
    # The first task that proposes it has it, whoever was faster.
    ordered: dict[str, Proposal] = {}
    for proposal in (p for proposals in answers for p in proposals):
      ordered.setdefault(proposal.id, proposal)
    screened = _side_by_side(
      lambda proposal: self._screen(proposal, start),
      list(ordered.values()),
      self._world.parallel,
    )
    best: list[tuple[float, Proposal]] = []
    for proposal, found in zip(ordered.values(), screened, strict=True):
      self._trials.append(found.trial)
      if found.gain is not None:
        best.append((found.gain, proposal))
    best.sort(key=lambda pair: (-pair[0], pair[1].id))
    return best

  def _screen(self, proposal: Proposal, start: System) -> "_Screened":
    place = f"{proposal.id}/{mark(start)}"
    system = {
      "options": join([start["options"], proposal.options]),
      "patch": proposal.patch,
    }
    if start["patch"]:
      merged = self._do(
        f"merge/{place}",
        lambda: self._world.merge(start, proposal.patch),
      )
      if "conflict" in merged:
        return _refused(proposal.task, proposal, "conflict", merged["conflict"])
      system["patch"] = merged["patch"]
    wrong = self._do(f"check/{place}", lambda: self._world.check(system))
    if wrong is not None:
      return _refused(proposal.task, proposal, "refused", wrong)
    replayed = self._do(
      f"replayed/{place}", lambda: self._world.replayed(system, start)
    )
    most = replayed["bound"]
    if most is not None and most < GATE:
      told = f"by exact replay {most:+.1%} at most"
      return _refused(proposal.task, proposal, "floor", told, most)
    if proposal.patch:
      # With its option off a patched tree is stock. What has no option of its
      # own (a table of tiles) is for the champion's: off, they are stock's.
      own = system["options"] != start["options"]
      without = start["options"] if own else STOCK["options"]
      off = {"options": without, "patch": system["patch"]}
      base = {"options": without, "patch": start["patch"]}
      result = self._measured(
        f"off/{place}", lambda: self._world.screen(off, base, 1)
      )
      wrong = _not_stock(result)
      if wrong is not None:
        return _refused(proposal.task, proposal, "refused", wrong)
    gain = None
    for stage, units in enumerate(self._plan.screen_units):
      result = self._measured(
        f"screen/{place}/{stage}",
        lambda units=units: self._world.screen(system, start, units),
      )
      if result["kind"] != "ok":
        return _refused(
          proposal.task, proposal, result["kind"], result["reason"]
        )
      gain = result["gain"]
      if result["upper"] is not None and result["upper"] < GATE:
        return _refused(
          proposal.task, proposal, "slower", f"{coarse(gain)}", gain
        )
    if gain is None or gain < GATE:
      return _refused(proposal.task, proposal, "small", coarse(gain), gain)
    found = _trial(proposal.task, proposal, "validated", coarse(gain), gain)
    return _Screened(gain, found)

  def _integrate(
    self, validated: Sequence[tuple[float, Proposal]], start: System
  ) -> tuple[dict[str, str], list[str]]:
    """Phase 2: greedy, largest gain first, each step a paired test."""
    champion, accepted = dict(start), []
    for _, proposal in validated:
      changed, verdict = self._stack(proposal, champion)
      if verdict:
        champion = changed
        accepted.append(proposal.id)
    return champion, accepted

  def _stack(
    self, proposal: Proposal, champion: System
  ) -> tuple[dict[str, str], bool]:
    step = f"{proposal.id}/{mark(champion)}"
    merged = self._do(
      f"stack/{step}", lambda: self._world.merge(champion, proposal.patch)
    )
    patch = merged.get("patch")
    if patch is None:
      patch = self._merged(proposal, champion, merged["conflict"])
    if patch is None:
      self._verdict(proposal, "conflict", merged["conflict"])
      return dict(champion), False
    system = {
      "options": join([champion["options"], proposal.options]), "patch": patch
    }  # fmt: skip
    if system == champion:
      self._verdict(proposal, "inert", "the champion has it already")
      return system, False
    wrong = self._do(f"fits/{step}", lambda: self._world.check(system))
    if wrong is not None:
      self._verdict(proposal, "conflict", wrong)
      return dict(champion), False
    if proposal.patch and champion["patch"]:
      # Each was stock with its option off; together they are new code.
      off = {"options": STOCK["options"], "patch": patch}
      result = self._measured(
        f"merged/{step}", lambda: self._world.screen(off, STOCK, 1)
      )
      wrong = _not_stock(result)
      if wrong is not None:
        self._verdict(proposal, "refused", f"merged: {wrong}")
        return dict(champion), False
    result = self._measured(
      f"test/{step}", lambda: self._world.test(system, champion)
    )
    self._verdict(proposal, result["verdict"], result["reason"], result)
    return system, result["verdict"] == "accept"

  def _merged(
    self, proposal: Proposal, champion: System, conflict: str
  ) -> str | None:
    """One patch for two that clash, of an agent that writes code; or None."""
    factor = proposal.task.partition("/")[0]
    patches = f"{champion['patch']}\n\n{proposal.patch}"
    task = Task(
      id=f"merge/{proposal.id}-{mark(champion)}",
      factor=factor,
      option=None,
      bound=None,
      champion=champion["options"],
      detail=f"make one change of both patches: {conflict}\n\n{patches}",
    )
    made = [answer.patch for answer in self._propose(task) if answer.patch]
    return made[0] if made else None

  def _verdict(self, proposal, verdict, reason, result=None) -> None:
    # The newest: a proposal may be tried again on another champion.
    trial = next(t for t in reversed(self._trials) if t["id"] == proposal.id)
    trial |= {"verdict": verdict, "reason": reason}
    if result:
      trial |= {
        "measured": result.get("gain"),
        "lcb": result.get("bound"),
        "s_aa": result.get("s_aa"),
      }

  def _tune(
    self, kernels: Sequence[Task], champion: dict[str, str], factors
  ) -> tuple[dict[str, str], list[str]]:
    """Phase 3: kernels furthest from their floor first, tables as patches.

    Only agents that write code answer tasks without an option.
    """
    excess = factors.get("kernel_classes") or {}
    names = sorted(excess, key=lambda name: (-excess[name], name))
    found: list[str] = []
    for name in names:
      if not kernels or excess[name] - 1 < GATE:
        continue
      task = Task(
        id=f"kernel/tiles/{name}",
        factor="kernel",
        option=None,
        bound=excess[name] - 1,
        champion=champion["options"],
      )
      for proposal in self._propose(task):
        screened = self._screen(proposal, champion)
        self._trials.append(screened.trial)
        if screened.gain is None:
          continue
        changed, verdict = self._stack(proposal, champion)
        if verdict:
          champion = changed
          found.append(proposal.id)
    return champion, found


@dataclasses.dataclass(frozen=True)
class _Screened:
  """What came of a screening: the gain of what is worth a paired test."""

  gain: float | None
  trial: dict[str, Any]


def _trial(
  task: str,
  proposal: Proposal | None,
  verdict: str,
  reason: str,
  gain: float | None = None,
) -> dict[str, Any]:
  """An entry of `trials` of result.json."""
  return {
    "id": proposal.id if proposal else None,
    "task": task,
    "option": proposal.options if proposal else None,
    "patch": bool(proposal and proposal.patch),
    "prediction": proposal.prediction if proposal else None,
    "evidence": gain,
    "measured": None,
    "lcb": None,
    "s_aa": None,
    "verdict": verdict,
    "reason": reason,
  }


def _refused(
  task: str,
  proposal: Proposal,
  verdict: str,
  reason: str,
  gain: float | None = None,
) -> _Screened:
  return _Screened(None, _trial(task, proposal, verdict, reason, gain))


def _side_by_side[In, Out](
  work: Callable[[In], Out], items: Sequence[In], workers: int
) -> list[Out]:
  """Results in the order of the items, whoever was faster."""
  if workers == 1:
    return [work(item) for item in items]
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(work, items))


def _not_stock(result: Mapping[str, Any]) -> str | None:
  if result["kind"] != "ok":
    return f"with its option off: {result['reason']}"
  if result["identical"] < result["outputs"]:
    return (
      f"with its option off {result['outputs'] - result['identical']} of"
      f" {result['outputs']} outputs are not those of the system before it"
    )
  return None
