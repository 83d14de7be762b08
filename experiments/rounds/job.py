"""The job `round`: phases 0 to 4 of a deployment, in slices if need be."""

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import benchmark, devices, hosts, report, results
from experiments.agents.command import Command
from experiments.agents.llm import LLM
from experiments.agents.protocol import Agent, Limits, Session, Task
from experiments.agents.recall import PORT, Recall
from experiments.agents.replay import Replay
from experiments.agents.search import Search
from experiments.agents.tiles import Tiles, preset_of
from experiments.console import say
from experiments.controller import noise, paired_test, tree
from experiments.controller.lab import Lab
from experiments.environment import cpu_model
from experiments.rounds import reuse
from experiments.rounds import section as round_section
from experiments.rounds.cluster import ClusterSettings
from experiments.rounds.log import Budget, BudgetSpent, Log
from experiments.rounds.phases import STOCK, Plan, Round
from experiments.rounds.world import LabWorld, Sealed
from experiments.settings import Settings
from memory import sources
from memory.schema import Fingerprint
from memory.store import Store
from specpilot_jax import loading
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import config as drafter_configs

LOG = "round.jsonl"
AGENTS = ("memory", "search", "tiles", "replay", "command", "llm")
CODERS = (Command, LLM)
"""Agents that write code: they are asked about open tasks and ports."""
DEVELOPMENT = 2_048
"""Tokens of an output at most, but for the sealed test's long ones: a candidate
that is wrong behind them alone must not have been chosen by them."""
LIMITS = ("max_wall_s", "max_trials", "max_device_s", "max_usd")
UNMARKED = (*LIMITS, "agent_workers", "workers")
"""Flags and settings that may differ when a round is taken up again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSettings:
  """A round, beside the settings of a run.

  Attributes:
    agents: of `AGENTS`, in the order in which they are asked; `memory` is the
      first in any case.
    command: of the agent `command`.
    environment, readable: of the agent `command`, see there.
    model: of the agent `llm`.
    proposals: JSON lines, of the agent `replay`.
    champion: folder of a finished round whose champion is the start.
    aa_sessions: that the gate needs.
    screen_units: of each stage of screening.
    limits: of an agent per task.
    workers: tasks that agents work on side by side.
    max_trials, max_device_s, max_usd: of the whole round; None for any.
    sealed: the last test.
    devices: indices. Screenings run on all side by side, tests on the first
      two, swapped; none is JAX's choice.
    prompts, tokens: of each set, and of an output, in the place of the run's.
    options: that the agent search tries; none for all.
    cluster: on which screenings run; None for the devices of this host.
  """

  agents: tuple[str, ...] = ("memory", "search")
  command: str | None = None
  environment: tuple[str, ...] = ()
  readable: tuple[Path, ...] = ()
  model: str | None = None
  proposals: Path | None = None
  champion: Path | None = None
  aa_sessions: int = 8
  screen_units: tuple[int, ...] = (2, 4)
  limits: Limits = Limits()
  workers: int = 1
  max_trials: int | None = None
  max_device_s: float | None = None
  max_usd: float | None = None
  sealed: Sealed = Sealed()
  devices: tuple[int, ...] = ()
  prompts: int | None = None
  tokens: int | None = None
  options: tuple[str, ...] = ()
  cluster: ClusterSettings | None = None

  def settings(self, settings: Settings) -> Settings:
    """A run's settings as the sessions of the round have them."""
    if self.prompts is not None:
      settings = dataclasses.replace(settings, num_prompts=self.prompts)
    if self.tokens is not None:
      sampling = dataclasses.replace(settings.sampling, max_tokens=self.tokens)
      settings = dataclasses.replace(settings, sampling=sampling)
    if settings.sampling.max_tokens > DEVELOPMENT:
      raise SpecPilotError(
        f"outputs of a round's sessions end at {DEVELOPMENT} tokens, got"
        f" {settings.sampling.max_tokens} (--round_tokens): what goes wrong"
        " later is looked for by the sealed test's long outputs"
      )
    return settings

  def __post_init__(self):
    unknown = [name for name in self.agents if name not in AGENTS]
    if unknown or not self.agents:
      raise SpecPilotError(
        f"agents must be of {', '.join(AGENTS)}, got"
        f" {', '.join(unknown) or 'none'}"
      )
    for name, value, flag in (
      ("command", self.command, "--agent_command=COMMAND"),
      ("replay", self.proposals, "--proposals=FILE"),
      ("llm", self.model, "--agent_model=PROVIDER:MODEL"),
      ("llm", self.limits.usd, "--agent_usd=AMOUNT, since it spends money"),
    ):
      if name in self.agents and value is None:
        raise SpecPilotError(f"agent {name} needs {flag}")
    if self.cluster is not None and not self.devices:
      raise SpecPilotError(
        "--cluster needs --devices, on which tests run while nothing explores"
      )
    if not self.screen_units or min(self.screen_units) < 1:
      raise SpecPilotError("screen_units must be whole numbers from 1 on")


def _champion(told: RoundSettings) -> Mapping[str, str]:
  if told.champion is None:
    return STOCK
  result = results.read_result(told.champion)
  if not result.get("champion"):
    raise SpecPilotError(f"{told.champion}: not a finished round")
  return result["champion"]


def _agents(
  settings: Settings, told: RoundSettings, store: Store
) -> list[Agent]:
  made: list[Agent] = []
  for name in sorted(told.agents, key=lambda name: name != Recall.name):
    if name == Recall.name:
      made.append(_recall(settings, store))
    elif name == "search":
      made.append(_search(settings, told.options))
    elif name == "tiles":
      made.append(_tiles(settings))
    elif name == "replay":
      assert told.proposals is not None
      made.append(Replay.read(told.proposals))
    elif name == "llm":
      made.append(LLM(told.model, tree.read_base()))
    else:
      assert told.command is not None
      made.append(
        Command(told.command, tree.ROOT, told.environment, told.readable)
      )
  return made


def _recall(settings: Settings, store: Store) -> Recall:
  """What the memory has for a deployment, on the sources of this checkout."""
  card = settings.card
  target = loading.open_target(settings.target)
  meets = {
    "gpu": card is not None,
    "drafter": settings.drafter != "none",
    "sampled": settings.sampling.temperature > 0,
    "batch": False,  # Requests of a round come one by one.
    "fp8": target.in_fp8,
  }
  where = Fingerprint(
    target=target.config.name,
    drafter=settings.drafter,
    dtype=settings.dtype,
    device=cpu_model() if card is None else devices.CARDS[card].kinds[0],
    jax=importlib.metadata.version("jax"),
    batch=1,
    temperature=settings.sampling.temperature,
  )
  recall = Recall.of(
    store,
    where,
    sources.read(tree.ROOT),
    [need for need, met in meets.items() if met],
  )
  for port in recall.ports:
    say(f"memory: does not apply to these sources: {port}")
  return recall


def _search(settings: Settings, names: Sequence[str]) -> Search:
  return Search(
    sampled=settings.sampling.temperature > 0,
    drafter=settings.drafter != "none",
    names=names or None,
  )


def _tiles(settings: Settings) -> Tiles:
  """Of a card's deployment with a drafter, whose W12 product is the one with a
  table of tiles; one that says nothing otherwise."""
  preset = preset_of(settings.target)
  of_table = settings.kernels.w12_matmul == "triton"
  if settings.card is None or settings.drafter == "none" or not of_table:
    preset = None
  slots = 0
  if preset is not None:  # A widened drafter keeps the block of its kind.
    known = {name.lower(): name for name in drafter_configs.PRESETS}
    slots = drafter_configs.PRESETS[known[preset.lower()]].num_slots
  return Tiles(tree.read_base(), preset, slots)


def _port_tasks(agents: Sequence[Agent]) -> dict[tuple[str, str], str]:
  """Entries that do not go onto these sources, for agents that write code."""
  if not any(isinstance(agent, CODERS) for agent in agents):
    return {}
  recalls = [agent for agent in agents if isinstance(agent, Recall)]
  return {key: text for r in recalls for key, text in r.port_tasks().items()}


def _directions(
  settings: Settings, agents: Sequence[Agent]
) -> list[tuple[str, str | None]]:
  found: dict[tuple[str, str | None], None] = {}
  for agent in agents:
    if isinstance(agent, Search | Recall):
      found |= dict.fromkeys(agent.tasks())
    elif isinstance(agent, Tiles):
      found["kernel", None] = None  # Which lets phase 3 begin.
    elif isinstance(agent, Replay):
      for task in agent.tasks:
        factor, _, option = task.partition("/")
        found[factor, None if option == "open" else option] = None
    else:
      found |= dict.fromkeys((f, None) for f in ("tau", "kernel", "overhead"))
  return list(found | dict.fromkeys(_port_tasks(agents)))


class _Patient:
  """An agent that is not asked about tasks of others."""

  def __init__(self, agent: Agent):
    self._agent, self.name, self.paid = agent, agent.name, agent.paid

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    agent = self._agent
    if isinstance(agent, Replay) and task.id not in agent.tasks:
      return Session(proposals=())
    if isinstance(agent, CODERS) and not (task.option or PORT).startswith(PORT):
      return Session(proposals=())
    return agent.propose(task, workspace, limits)


def round_mark(
  settings: Settings, told: RoundSettings, start: Mapping[str, str]
) -> str:
  """Of what a round is: flags, code and champion, but not how far it goes."""
  same = {k: v for k, v in settings.flags.items() if k not in UNMARKED}
  asked = {
    k: str(v) for k, v in dataclasses.asdict(told).items() if k not in UNMARKED
  }
  code = tree.manifest_of(tree.read_base()).root_hash
  return noise.digest([same, asked, dict(start), code])


def run(settings: Settings, told: RoundSettings) -> int:
  """Runs a round, or goes on with one; the exit status.

  Returns:
    0 where it came to its end, or to the end of its slice or budget (the
    last line says so); a folder that holds the beginning of the same round is
    taken up where it ended.
  """
  started = time.monotonic()
  settings = told.settings(settings)
  start = _champion(told)
  # A damaged memory is told now, not at the end.
  agents = _agents(settings, told, Store())
  mark = round_mark(settings, told, start)
  name = settings.target.replace("/", "_").replace(":", "_").strip("_")
  folder = settings.output_dir or benchmark.default_folder(f"round-{name}")
  _check_folder(folder, mark)

  slots = hosts.slots(told.devices)
  with LabWorld(
    settings, folder, told.sealed, aa_sessions=told.aa_sessions, slots=slots,
    cluster=told.cluster,
  ) as world:  # fmt: skip
    # Settings that are refused leave no folder behind.
    lab = world.open()
    log = Log(folder / LOG, _tell)
    try:
      return _run(log, world, lab, agents, settings, told, start, mark, started)
    finally:
      log.close()


def _tell(key: str, result: Any, seconds: float) -> None:
  say(f"{key}: {_told(result)} ({seconds:.0f} s)")


def _run(
  log: Log,
  world: LabWorld,
  lab: Lab,
  agents: Sequence[Agent],
  settings: Settings,
  told: RoundSettings,
  start: Mapping[str, str],
  mark: str,
  started: float,
) -> int:
  folder = log.path.parent
  if not any(line.get("kind") == "round" for line in log):
    log.note("round", mark=mark, flags=dict(settings.flags))
  say(f"round: results in {folder}")
  for agent in agents:
    if isinstance(agent, Command):
      say(agent.statement())
  deadline = math.inf
  if settings.max_wall_s is not None:
    deadline = started + settings.max_wall_s
  plan = Plan(
    directions=_directions(settings, agents),
    aa_sessions=told.aa_sessions,
    screen_units=told.screen_units,
    limits=told.limits,
    champion=start,
    workers=told.workers,
    details={
      f"{factor}/{option}": text
      for (factor, option), text in _port_tasks(agents).items()
    },
  )
  budget = Budget(
    log,
    trials=told.max_trials,
    device_s=told.max_device_s,
    usd=told.max_usd,
    deadline=deadline,
  )
  try:
    outcome = Round(
      log, world, [_Patient(a) for a in agents], budget, plan,
      folder / "agents",
    ).run()  # fmt: skip
  except BudgetSpent as e:
    log.note("paused", reason=str(e))
    say(
      f"paused: {e} is spent; the same command with"
      f" --output_dir={folder} goes on"
    )
    return 0
  told_of = [a.statement() for a in agents if isinstance(a, Command)]
  return _finish(folder, log, lab, plan, outcome, started, told_of)


def _check_folder(folder: Path, mark: str) -> None:
  if (folder / results.RESULT).exists():
    raise SpecPilotError(f"output_dir {folder} holds a finished run")
  if not (folder / LOG).exists():
    results.check_output_dir(folder)
    return
  log = Log(folder / LOG)
  marks = [line["mark"] for line in log if line.get("kind") == "round"]
  log.close()
  if marks and marks[0] != mark:
    raise SpecPilotError(
      f"output_dir {folder} holds another round: flags or code differ"
    )


def _told(result: Any) -> str:
  if not isinstance(result, dict):
    return "fits" if result is None else str(result)
  if "verdict" in result:
    return f"{result['verdict']}: {result['reason']}"
  if "proposals" in result:
    return f"{len(result['proposals'])} proposals"
  shown = {
    k: round(v, 4) if isinstance(v, float) else v
    for k, v in result.items()
    if k
    in (
      "tau",
      "kernel",
      "overhead",
      "mean",
      "gain",
      "bound",
      "kind",
      "reason",
    )
    and v != ""
  }
  return ", ".join(f"{k} {v}" for k, v in shown.items())


def _finish(
  folder: Path,
  log: Log,
  lab: Lab,
  plan: Plan,
  outcome,
  started: float,
  notes: Sequence[str],
) -> int:
  result = results.empty_result("round")
  known = reuse.account(log, outcome["accepted"], Store())
  settings = lab.settings
  result |= {
    "environment": lab.environment,
    "deployment": paired_test.deployment(lab),
    "sampling": dataclasses.asdict(settings.sampling),
    "prompts": {
      "sets": list(settings.prompt_sets),
      "split": settings.split,
      "chat": lab.requests[0].prompt.chat,
      "requests": len(lab.requests),
      "turns": 1,
    },
    "trials": outcome["trials"],
    "accepted": outcome["accepted"],
    "sealed": outcome["sealed"],
    "champion": outcome["champion"],
    "memory": list(known.entries),
    "round": {
      "reused": list(known.reused),
      "discovered": list(known.discovered),
      "factors": outcome["factors"],
      "directions": outcome["directions"],
      "integrated": outcome["integrated"],
      "start": dict(plan.champion),
      "aa_means": lab.sessions.means,
      "s_aa": lab.sessions.s_aa,
      "familywise": lab.ledger.familywise,
      "isolation": lab.layers.as_dict(),
      "design": lab.design,
      "devices": paired_test.devices_of(lab, None),
      "work_s": log.seconds(),
      "trials_spent": log.spent("trials"),
      "usd": log.spent("usd"),
    },
    "timing_s": {"work": round(log.seconds(), 1)},
    "notes": [
      *lab.source.checkpoint.notes,
      *(x for x in lab.layers.statement() if "NOT" in x),
      *notes,
    ],
  }
  result = results.to_json(result)
  results.write_result(folder, result)
  written = report.write(folder, result, {})
  for text in round_section.lines(result):
    say(text)
  say(f"seconds of this slice: {time.monotonic() - started:.0f}")
  say(f"report: {written}")
  return 0
