"""What a run is asked to do, and flag files."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.ablation.design import Ablation
from pallas_kernels.dispatch import Kernels
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

AR = "ar"
STOCK = "stock"
CANDIDATE = "candidate"

FLAG_FOLDER = Path(__file__).parent / "flags"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """One run; command-line flags become this and are read nowhere else.

  Attributes:
    target, drafter: names or paths.
    systems: what runs side by side: `ar` decodes without drafts, `stock` is
      `SystemConfig()`, `candidate` is what `options` describes; and those of
      the sweep.
    options: the candidate; None without one.
    sweep: more systems by name, those of an ablation among them.
    prompt_sets: names or files, see `experiments.prompts`.
    num_prompts: at most so many of each set; None for all.
    split: `dev`, `sealed` or `all`; None is dev for sets, all for files.
    chat: whether prompts go through the chat template; None is the set's way.
    sampling: of every request; request i draws with seed + i.
    dtype: None is what suits the device.
    kernels: of every system.
    prefill_chunk: prompt tokens per pass, and scored tokens per pass.
    num_warmups: requests before the measured ones, per system.
    token_forcing: whether stock scores the outputs.
    min_control_tokens: None is 5,000 on a CPU and 20,000 elsewhere.
    max_wall_s: no request and no scoring starts later than this.
    output_dir: None is `runs/<time>-<deployment>`.
    requests: recorded requests that token forcing judges.
    card: key of `devices.CARDS` that the run is for; None runs anywhere.
    flags: every flag as text, for the record.
    batch: whether requests are decoded several at a time.
    ablation: which of the systems are held against which; None without one.
  """

  target: str
  drafter: str
  systems: tuple[str, ...]
  options: SystemConfig | None
  prompt_sets: tuple[str, ...]
  num_prompts: int | None
  split: str | None
  chat: bool | None
  sampling: SamplingParams
  dtype: str | None
  kernels: Kernels
  prefill_chunk: int
  num_warmups: int
  token_forcing: bool
  min_control_tokens: int | None
  max_wall_s: float | None
  output_dir: Path | None
  requests: Path | None
  card: str | None
  flags: Mapping[str, str]
  sweep: Mapping[str, SystemConfig] = dataclasses.field(default_factory=dict)
  batch: bool = False
  ablation: Ablation | None = None

  def __post_init__(self):
    known = (AR, STOCK, CANDIDATE, *self.sweep)
    for name in self.systems:
      if name not in known:
        raise SpecPilotError(
          f"unknown system {name!r}; systems: {', '.join(known)}"
        )
      if name == STOCK and self.drafter == "none":
        raise SpecPilotError(f"system {name} needs a drafter, not 'none'")
    if not self.systems or len(set(self.systems)) < len(self.systems):
      raise SpecPilotError("systems must name each system once, at least one")
    if (CANDIDATE in self.systems) != (self.options is not None):
      raise SpecPilotError(
        "system candidate is what --set describes: give both"
      )
    if set(self.sweep) - set(self.systems):
      raise SpecPilotError("the systems of a sweep all run")
    described = dict(self.sweep)
    if self.options is not None:
      described["--set"] = self.options
    for name, system in described.items():
      alone = [] if self.batch else registry.needs_batch(system)
      if alone:
        raise SpecPilotError(
          f"{alone[0]} is for several requests at once: give --max_concurrency"
          " or --request_rate"
        )
      idle = registry.needs_drafter(system)
      if self.drafter == "none" and (idle or system == SystemConfig()):
        what = f"--set={','.join(idle)}" if name == "--set" else name
        raise SpecPilotError(
          f"{what} needs a drafter, not 'none': without one decoding is"
          " autoregressive"
        )
      system.check_temperature(self.sampling.temperature)
    if not self.prompt_sets:
      raise SpecPilotError("prompts must name at least one set or file")
    for field, lowest in (
      ("num_prompts", 1),
      ("num_warmups", 0),
      ("min_control_tokens", 1),
      ("max_wall_s", 0),
    ):
      value = getattr(self, field)
      # Also refuses NaN.
      if value is not None and not value >= lowest:
        raise SpecPilotError(f"{field} must be at least {lowest}, got {value}")

  @property
  def weights(self) -> str:
    """How the target is loaded: as it is where systems want several forms."""
    wanted = {self.system(name).weights for name in self.systems}
    return wanted.pop() if len(wanted) == 1 else "bf16"

  def system(self, name: str) -> SystemConfig:
    """How a system decodes."""
    if name == CANDIDATE:
      assert self.options is not None
      return self.options
    return self.sweep.get(name, SystemConfig())


def default_systems(
  drafter: str, options: SystemConfig | None, *, swept: bool = False
) -> list[str]:
  """AR, stock where there is a drafter, the candidate where there is one.

  Args:
    swept: whether the options are those that a sweep starts from: then they are
      no candidate of their own.
  """
  systems = [AR]
  if drafter != "none":
    systems.append(STOCK)
  if options is not None and not swept:
    systems.append(CANDIDATE)
  return systems


def expand_flag_files(argv: Sequence[str]) -> list[str]:
  """Replaces every `--flagfile=NAME` by the lines of that file.

  A name without a folder is looked for in the working directory, then in
  `experiments/flags/`. Lines are `--name=value`, blank, or comments that begin
  with `#`. A file may name another one. A later flag wins over an earlier one.

  Args:
    argv: program name first.

  Raises:
    SpecPilotError: no such file, not text, a line that is no flag, a file
      that includes itself.
  """
  return [*argv[:1], *_expand(argv[1:], ())]


def _expand(args: Sequence[str], open_files: tuple[Path, ...]) -> list[str]:
  expanded: list[str] = []
  rest = iter(args)
  for arg in rest:
    name, equals, value = arg.partition("=")
    if arg == "--":
      return [*expanded, arg, *rest]
    if name not in ("--flagfile", "-flagfile"):
      expanded.append(arg)
      continue
    if not equals:
      value = next(rest, "")
    path = _find_flag_file(value)
    if path in open_files:
      raise SpecPilotError(f"flag file {path} includes itself")
    expanded += _expand(_read_flag_file(path), (*open_files, path))
  return expanded


def _find_flag_file(name: str) -> Path:
  places = [Path(name)]
  if Path(name).name == name:
    places.append(FLAG_FOLDER / name)
  for path in places:
    if path.is_file():
      return path.resolve()
  shipped = sorted(path.name for path in FLAG_FOLDER.glob("*.flags"))
  raise SpecPilotError(
    f"no flag file {name!r} here or in experiments/flags (there:"
    f" {', '.join(shipped)})"
  )


def _read_flag_file(path: Path) -> list[str]:
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except UnicodeDecodeError:
    raise SpecPilotError(f"flag file {path} is not UTF-8 text") from None
  flags = []
  for number, line in enumerate(lines, start=1):
    line = line.strip()
    if not line or line.startswith("#"):
      continue
    if not line.startswith("-") or line == "--":
      raise SpecPilotError(f"{path}:{number}: not a flag: {line}")
    flags.append(line)
  return flags
