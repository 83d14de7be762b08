"""Flags of the jobs that measure candidates, in one place."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from absl.testing import flagsaver

from experiments import hosts
from experiments import settings as settings_lib
from experiments.agents.protocol import Limits
from experiments.controller.statistics import WANTED_SESSIONS
from experiments.rounds.cluster import ClusterSettings
from experiments.rounds.job import AGENTS, RoundSettings
from experiments.rounds.world import Sealed
from experiments.settings import Settings
from specpilot_jax.errors import SpecPilotError

flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class ControllerSettings:
  """What is asked of the controller beside a run's own settings.

  Attributes:
    candidate: settings of the candidate's own flag file; None without one.
    patch: its unified diff; None without one.
    aa_sessions: A/A sessions to have on record before a test.
    blocks: of processes in a paired test; 0 holds both engines at once.
    devices: indices; none is JAX's choice.
    round: what is asked of a round.
    faults: of the catalogue; none for all.
    fault_requests: short ones, and long ones.
  """

  candidate: Settings | None
  patch: Path | None
  aa_sessions: int
  blocks: int
  devices: tuple[int, ...]
  round: RoundSettings
  faults: tuple[str, ...]
  fault_requests: tuple[int, int]


Reader = Callable[[Callable[[], Settings]], ControllerSettings]


def define_controller_flags() -> Reader:
  """Defines the flags; called once, by a module that is run.

  Returns:
    What makes the settings out of the parsed flags, given the function that
    makes a run's.
  """
  candidate = flags.DEFINE_string(
    "candidate", None, "Flag file of the candidate of a paired test: its --set,"
    " --drafter, --kernels and --patch; by default those of the run.",
  )  # fmt: skip
  patch = flags.DEFINE_string(
    "patch", None, "Unified diff over this checkout, the candidate's code."
  )
  aa_sessions = flags.DEFINE_integer(
    "aa_sessions", 0, "A/A sessions to have on record first; 8 make a gate.",
    lower_bound=0,
  )  # fmt: skip
  blocks = flags.DEFINE_integer(
    "blocks", 0, "Blocks of four processes in a paired test, for engines that"
    " do not fit on the device together; 0 holds both.",
    lower_bound=0,
  )  # fmt: skip
  devices = flags.DEFINE_list(
    "devices", [], "GPUs by index, as nvidia-smi lists them (without one:"
    " emulated). Two serve stock and candidate side by side and are swapped; a"
    " round explores on all of them and tests on the first two.",
  )  # fmt: skip
  agents = flags.DEFINE_list(
    "agents",
    ["memory", "search"],
    f"Who proposes in a round: {', '.join(AGENTS)}.",
  )
  command = flags.DEFINE_string(
    "agent_command", None, "Of the agent command: a program that is run in a"
    " clone; {task} stands for the file of its task.",
  )  # fmt: skip
  variables = flags.DEFINE_list(
    "agent_env", [], "Environment variables that the agent command gets, by"
    " name: its keys."
  )  # fmt: skip
  readable = flags.DEFINE_list(
    "agent_readable", [], "Files and folders that the agent command may read"
    " beside its own, the system and Python: where it is installed.",
  )  # fmt: skip
  model = flags.DEFINE_string(
    "agent_model", None, "Of the agent llm: PROVIDER:MODEL, as pydantic-ai"
    " names them; its key is in the environment.",
  )  # fmt: skip
  proposals = flags.DEFINE_string(
    "proposals", None, "Of the agent replay: JSON lines, one proposal each."
  )
  options = flags.DEFINE_list(
    "search_options", [], "Options that the agent search tries; all by default."
  )
  champion = flags.DEFINE_string(
    "champion", None, "Folder of a finished round whose champion is the start."
  )
  screen_units = flags.DEFINE_list(
    "screen_units", ["2", "4"], "Pairs of requests of each screening stage."
  )
  per_task = flags.DEFINE_integer(
    "proposals_per_task", 8, "Proposals taken of an agent.", lower_bound=1
  )
  agent_s = flags.DEFINE_float(
    "agent_s", 600.0, "Seconds that an agent has for a task.", lower_bound=0
  )
  agent_usd = flags.DEFINE_float(
    "agent_usd", None, "Money that an agent may spend on a task."
  )
  workers = flags.DEFINE_integer(
    "agent_workers", None, "Tasks that agents work on side by side; by default"
    " one, or one per device.", lower_bound=1,
  )  # fmt: skip
  cluster = flags.DEFINE_string(
    "cluster", None, "Ray cluster on whose devices a round explores: HOST:PORT,"
    " auto, or local for one on this host.",
  )  # fmt: skip
  actors = flags.DEFINE_integer(
    "cluster_actors", 2, "Devices of the cluster that explore.", lower_bound=1
  )
  max_trials = flags.DEFINE_integer(
    "max_trials", None, "Sessions of a round at most."
  )
  max_device_s = flags.DEFINE_float(
    "max_device_s", None, "Seconds of work of a round at most, all slices."
  )
  max_usd = flags.DEFINE_float("max_usd", None, "Money of a round at most.")
  round_prompts = flags.DEFINE_integer(
    "round_prompts", None, "In a round, in the place of --num_prompts: 3 to"
    " warm up with and two per unit of a test.", lower_bound=1,
  )  # fmt: skip
  round_tokens = flags.DEFINE_integer(
    "round_tokens", None, "In a round, in the place of --max_tokens.",
    lower_bound=1,
  )  # fmt: skip
  long_requests = flags.DEFINE_integer(
    "sealed_long_requests", 4, "Long outputs of the sealed test.",
    lower_bound=1,
  )  # fmt: skip
  long_tokens = flags.DEFINE_integer(
    "sealed_long_tokens", 4_096, "Their length, without stops.", lower_bound=2
  )

  faults = flags.DEFINE_list(
    "faults", [], "Faults to inject, by name; the whole catalogue by default."
  )
  fault_short = flags.DEFINE_integer(
    "fault_short", 4, "Requests of --max_tokens per fault.", lower_bound=1
  )
  fault_long = flags.DEFINE_integer(
    "fault_long", 1, "Requests of 2,304 tokens per fault.", lower_bound=1
  )

  def read_round() -> RoundSettings:
    if not all(text.isdecimal() for text in screen_units.value):
      raise SpecPilotError(
        f"screen_units must be whole numbers, got {screen_units.value}"
      )
    return RoundSettings(
      agents=tuple(agents.value),
      command=command.value,
      environment=tuple(variables.value),
      readable=tuple(map(Path, readable.value)),
      model=model.value,
      proposals=_path(proposals.value),
      champion=_path(champion.value),
      aa_sessions=aa_sessions.value or WANTED_SESSIONS,
      screen_units=tuple(map(int, screen_units.value)),
      limits=Limits(
        seconds=agent_s.value, usd=agent_usd.value, proposals=per_task.value
      ),
      workers=workers.value or max(1, len(devices.value)),
      max_trials=max_trials.value,
      max_device_s=max_device_s.value,
      max_usd=max_usd.value,
      devices=hosts.parse(devices.value),
      prompts=round_prompts.value,
      tokens=round_tokens.value,
      options=tuple(options.value),
      cluster=None
      if cluster.value is None
      else ClusterSettings(address=cluster.value, actors=actors.value),
      sealed=Sealed(
        long_requests=long_requests.value, long_tokens=long_tokens.value
      ),
    )

  def read(settings: Callable[[], Settings]) -> ControllerSettings:
    own, code = None, patch.value
    if candidate.value is not None:
      own, code = _parse(candidate.value, settings, patch)
    return ControllerSettings(
      candidate=own,
      patch=_path(code),
      aa_sessions=aa_sessions.value,
      blocks=blocks.value,
      devices=hosts.parse(devices.value),
      round=read_round(),
      faults=tuple(faults.value),
      fault_requests=(fault_short.value, fault_long.value),
    )

  return read


def _path(text: str | None) -> Path | None:
  return None if text is None else Path(text)


def _parse(
  file: str,
  settings: Callable[[], Settings],
  patch: flags.FlagHolder,
) -> tuple[Settings, str | None]:
  """Settings and patch of a flag file on top of the run's flags, whose --set
  and --patch do not count."""
  argv: Sequence[str] = settings_lib.expand_flag_files(
    ["candidate", f"--flagfile={file}"]
  )
  with flagsaver.flagsaver(set="", patch=None, systems=None, sweep=""):
    flags.FLAGS(argv)
    return settings(), patch.value
