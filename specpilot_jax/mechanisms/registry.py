"""The registry of options: what may be set on a system, and what it means.

Every field of `SystemConfig` has one `Option`. Command lines, search spaces,
records and documentation are made from these; the default is read from
`SystemConfig` itself, so that stock is defined in one place.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specpilot_jax.configs import (
  ACCEPTANCE_RULES,
  DEFAULT_TREE_NODES,
  DRAFTER_VIEWS,
  EXACT,
  MAX_NODES,
  SWITCH,
  TREES,
  VERIFICATIONS,
  VIEWS,
  WEIGHTS,
  SystemConfig,
  runs_on,
)
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.schedule import Schedule
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import fp8, two_level, w12
from specpilot_jax.mechanisms.level_choice import StepTimes
from specpilot_jax.models.target import Target

FACTORS = ("tau", "kernel", "overhead")
"""Acceptance length, time of the kernels, time around the kernels."""

EXACTNESS = {
  "token": "the output is the target's own, token for token",
  "distribution": "the output follows the target's law, but other draws of it",
}

DEPLOYMENTS = {
  "drafter": "has a drafter",
  "sampled": "temperature above 0",
  "batch": "decodes several requests at once",
}

Value = str | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A domain of named values."""

  values: tuple[str, ...]

  def __str__(self) -> str:
    return "|".join(self.values)

  def parse(self, text: str) -> Value:
    if text not in self.values:
      raise ValueError
    return text

  def format(self, value: Value) -> str:
    return str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
  """Whole numbers from `lowest` on, and perhaps a word that stands for None.

  `highest` is the last of them; None where there is none.
  """

  lowest: int
  none: str | None = None
  highest: int | None = None

  def __str__(self) -> str:
    end = "" if self.highest is None else f" to {self.highest}"
    word = "" if self.none is None else f"{self.none} or "
    return f"{word}a whole number from {self.lowest}{end}"

  def parse(self, text: str) -> Value:
    if self.none is not None and text == self.none:
      return None
    # int() would take "1_0", " 3" and digits of other scripts too.
    if not (text.isascii() and text.isdigit()) or int(text) < self.lowest:
      raise ValueError
    if self.highest is not None and int(text) > self.highest:
      raise ValueError
    return int(text)

  def format(self, value: Value) -> str:
    return str(self.none if value is None else value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
  """One thing that can be set on a system.

  Attributes:
    name: the field of `SystemConfig`.
    summary: what it does, one line.
    domain: the values that it takes.
    factor: which part of the speed it acts on, of `FACTORS`.
    exactness: what any value of it keeps, a key of `EXACTNESS`.
    deployments: keys of `DEPLOYMENTS`; all must hold for it to do anything.
    requires: `option=value` settings without which a value other than the
      default is refused.
    conflicts: `option=value` settings with which it is refused.
    other_models: values that change what is computed: a deployment has them,
      and no optimisation of it is one.
  """

  name: str
  summary: str
  domain: Choice | Count
  factor: str
  exactness: str
  deployments: tuple[str, ...] = ()
  requires: tuple[str, ...] = ()
  conflicts: tuple[str, ...] = ()
  other_models: tuple[str, ...] = ()

  def __post_init__(self):
    assert self.factor in FACTORS, self.factor
    assert self.exactness in EXACTNESS, self.exactness
    assert set(self.deployments) <= set(DEPLOYMENTS), self.deployments

  @property
  def default(self) -> Any:
    """Stock's value."""
    for field in dataclasses.fields(SystemConfig):
      if field.name == self.name:
        return field.default
    raise AssertionError(f"SystemConfig has no field {self.name}")

  def parse(self, text: str) -> Value:
    """A value from its text; raises `SpecPilotError` naming the domain."""
    try:
      return self.domain.parse(text)
    except ValueError:
      raise SpecPilotError(
        f"option {self.name}={text!r}: expected {self.domain}"
      ) from None

  def describe(self) -> str:
    """One line of documentation."""
    return (
      f"{self.name}={self.domain} (stock: {self.domain.format(self.default)};"
      f" acts on {self.factor}): {self.summary}"
    )


_ALL = (
  Option(
    name="acceptance",
    summary="follow the target's own choice, or sample against the drafter",
    domain=Choice(values=ACCEPTANCE_RULES),
    factor="tau",
    exactness="distribution",
    deployments=("drafter", "sampled"),
  ),
  Option(
    name="num_drafts",
    summary="drafts verified per pass at most",
    domain=Count(lowest=1, none="block"),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
    requires=("tree=chain",),
  ),
  Option(
    name="tree",
    summary="which candidates a pass verifies: the drafter's first choices, or"
    " a tree of the best, each scored given its own parent (marginal: blind to"
    " parents)",
    domain=Choice(values=TREES),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
  ),
  Option(
    name="node_budget",
    summary="nodes of a pass at most, the anchor included; default is the block"
    f" for a chain, {DEFAULT_TREE_NODES} for a tree",
    domain=Count(lowest=1, none="default", highest=MAX_NODES),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
    requires=("num_drafts=block",),
  ),
  Option(
    name="tree_depth",
    summary="drafts of a path of the tree at most",
    domain=Count(lowest=1, none="block"),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
    conflicts=("tree=chain",),
  ),
  Option(
    name="weights",
    summary="how matrices are held: w12 is 12 bits a weight, bit for bit the"
    " same values; fp8 rounds them and what they multiply to e4m3, which is"
    " another model, exact to itself",
    domain=Choice(values=WEIGHTS),
    factor="kernel",
    exactness="token",
    other_models=("fp8",),
  ),
  Option(
    name="verification",
    summary="two_level looks at the drafts with the 8-bit view of the weights,"
    " drafts on from there, and verifies both exactly in one pass; auto does so"
    " in the steps where it is expected to pay",
    domain=Choice(values=VERIFICATIONS),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
  ),
  Option(
    name="level_one_passes",
    summary="passes with the view before the exact one",
    domain=Count(lowest=1),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
    # What `auto` weighs is one pass.
    conflicts=("verification=one_level", "verification=auto"),
  ),
  Option(
    name="view",
    summary="what the view has for the bits that it cuts off: their midpoint,"
    " nothing, or nothing and products scaled up",
    domain=Choice(values=VIEWS),
    factor="tau",
    exactness="token",
    deployments=("drafter",),
    conflicts=("verification=one_level",),
  ),
  Option(
    name="drafter_view",
    summary="what the drafter reads of its weights in W12: all, or a view as"
    " above, which is fewer bytes and other drafts",
    domain=Choice(values=DRAFTER_VIEWS),
    factor="kernel",
    exactness="token",
    deployments=("drafter",),
    requires=("weights=w12",),
  ),
  Option(
    name="shared_budget",
    summary="a pass has a number of nodes for all requests, given to the drafts"
    " with the highest path scores; every request keeps its anchor",
    domain=Choice(values=SWITCH),
    factor="kernel",
    exactness="token",
    deployments=("drafter", "batch"),
    requires=("verification=one_level",),
  ),
  Option(
    name="shared_nodes",
    summary="nodes of such a pass, anchors included; by load, from profiled"
    " step times",
    domain=Count(lowest=1, none="load"),
    factor="kernel",
    exactness="token",
    deployments=("drafter", "batch"),
    conflicts=("shared_budget=off",),
  ),
  Option(
    name="dynamic_draft",
    summary="16, 12 or 8 positions of a request are verified, by recent"
    " acceptance and the draft's confidence; the full block is drafted",
    domain=Choice(values=SWITCH),
    factor="kernel",
    exactness="token",
    deployments=("drafter", "batch"),
    requires=("verification=one_level",),
  ),
  Option(
    name="prompt_admission",
    summary="chunks of waiting prompts ride in verify passes where they would"
    " otherwise hold up those that decode",
    domain=Choice(values=SWITCH),
    factor="overhead",
    exactness="token",
    deployments=("batch",),
    requires=("verification=one_level",),
  ),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _ALL}


def parse_options(
  text: str, options: Mapping[str, Option] | None = None
) -> SystemConfig:
  """A system from `option=value,option=value`; stock from an empty text.

  >>> changed(parse_options("tree=best_first, node_budget=32"))
  {'tree': 'best_first', 'node_budget': '32'}
  >>> parse_options("") == SystemConfig()
  True
  >>> parse_options("tree=bush")
  Traceback (most recent call last):
  specpilot_jax.errors.SpecPilotError: option tree='bush': expected \
chain|best_first|marginal

  Args:
    text: assignments; spaces around them do not matter.
    options: the registry; `OPTIONS` by default.

  Raises:
    SpecPilotError: unknown option, value outside the domain, an option set
      twice, or a requirement or conflict; the line names option and domain.
  """
  options = OPTIONS if options is None else options
  values: dict[str, Any] = {}
  for part in filter(None, (p.strip() for p in text.split(","))):
    name, equals, value = (p.strip() for p in part.partition("="))
    if not equals:
      raise SpecPilotError(f"{part!r} is not of the form option=value")
    if name not in options:
      raise SpecPilotError(
        f"unknown option {name!r}; options: {', '.join(options)}"
      )
    if name in values:
      raise SpecPilotError(f"option {name} is set twice")
    values[name] = options[name].parse(value)
  check_together(values, options)
  return SystemConfig(**values)


def parse_sweep(text: str, base: SystemConfig) -> dict[str, SystemConfig]:
  """Systems that differ in one option, from `option=value|value|...`.

  Args:
    text: the option and its values; none from an empty text.
    base: what the other options are.

  Returns:
    A system per value, named `option=value`.

  Raises:
    SpecPilotError: as `parse_options`; a value given twice.
  """
  if not text.strip():
    return {}
  name, _, values = (part.strip() for part in text.partition("="))
  kept = {n: v for n, v in changed(base).items() if n != name}
  out: dict[str, SystemConfig] = {}
  for value in values.split("|"):
    setting = f"{name}={value.strip()}"
    if setting in out:
      raise SpecPilotError(f"sweep: {setting} is given twice")
    parts = [f"{n}={v}" for n, v in kept.items()]
    out[setting] = parse_options(",".join([*parts, setting]))
  return out


def check_together(
  values: Mapping[str, Value], options: Mapping[str, Option]
) -> None:
  """Refuses settings that need others, or that exclude each other."""

  def holds(setting: str) -> bool:
    name, _, text = setting.partition("=")
    option = options[name]
    return values.get(name, option.default) == option.parse(text)

  for name, value in values.items():
    option = options[name]
    if value == option.default:
      continue
    own = f"option {name}={option.domain.format(value)}"
    for setting in option.requires:
      if not holds(setting):
        raise SpecPilotError(f"{own} requires {setting}")
    for setting in option.conflicts:
      if holds(setting):
        raise SpecPilotError(f"{own} conflicts with {setting}")


def assignments(
  system: SystemConfig, *, only: Iterable[str] | None = None
) -> dict[str, str]:
  """A system as option name to text; `parse_options` reads it back."""
  names = OPTIONS if only is None else only
  return {
    name: OPTIONS[name].domain.format(getattr(system, name)) for name in names
  }


def changed(system: SystemConfig) -> dict[str, str]:
  """The options of a system that are not stock's."""
  names = [n for n, o in OPTIONS.items() if getattr(system, n) != o.default]
  return assignments(system, only=names)


def needs_drafter(system: SystemConfig) -> list[str]:
  """The changed options of a system that do nothing without a drafter."""
  return [n for n in changed(system) if "drafter" in OPTIONS[n].deployments]


def needs_batch(system: SystemConfig) -> list[str]:
  """The changed options of a system that do nothing for a single request."""
  return [n for n in changed(system) if "batch" in OPTIONS[n].deployments]


def prepare(
  system: SystemConfig, target: Target, drafter: Drafter | None
) -> tuple[Target, Drafter | None]:
  """Target and drafter as a system wants them; the same where it wants nothing.

  Raises:
    SpecPilotError: weights that W12 or FP8 does not hold, or another form than
      those that they can be made of; a view of a drafter without weights.
  """
  if runs_on(system.weights, target.weights):
    if system.drafter_view != EXACT:
      drafter = w12.drafter(drafter, target, view=system.drafter_view)
    return target, drafter
  if target.weights != "bf16":
    raise SpecPilotError(
      f"{target.config.name} is in {target.weights}, a system with"
      f" weights={system.weights} cannot be made of it"
    )
  if system.weights == "fp8":
    return fp8.target(target), drafter
  target = w12.target(target)
  return target, w12.drafter(drafter, target, view=system.drafter_view)


def schedule(
  system: SystemConfig,
  target: Target,
  drafter: Drafter | None,
  *,
  times: StepTimes | None = None,
  coarse: Callable[[str], Target] | None = None,
) -> Schedule | None:
  """What precedes the exact pass of a system's engine; None where nothing does.

  Args:
    system: what is wanted.
    target, drafter: as `prepare` makes them.
    times, coarse: see `two_level.schedule`.

  Raises:
    SpecPilotError: as `two_level.schedule`.
  """
  return two_level.schedule(system, target, drafter, times=times, coarse=coarse)
