"""Flags of the jobs that measure candidates, in one place."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from absl.testing import flagsaver

from experiments import settings as settings_lib
from experiments.settings import Settings

flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class ControllerSettings:
  """What is asked of the controller beside a run's own settings.

  Attributes:
    candidate: settings of the candidate's own flag file; None without one.
    patch: its unified diff; None without one.
    aa_sessions: A/A sessions to have on record before a test.
  """

  candidate: Settings | None
  patch: Path | None
  aa_sessions: int


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

  def read(settings: Callable[[], Settings]) -> ControllerSettings:
    own, code = None, patch.value
    if candidate.value is not None:
      own, code = _parse(candidate.value, settings, patch)
    return ControllerSettings(
      own, None if code is None else Path(code), aa_sessions.value
    )

  return read


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
