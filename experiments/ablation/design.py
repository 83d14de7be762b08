"""What an ablation runs: from `option=value,value,...` to systems.

Every system starts from stock. A single value is held fixed. Several options
make a grid, or are varied one at a time around their first values. `mechanisms`
runs each mechanism alone, all of them, and all but each.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specpilot_jax.configs import SystemConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry
from specpilot_jax.mechanisms.registry import Choice, Option

GRID, ONE_AT_A_TIME, MECHANISMS = "grid", "one_at_a_time", "mechanisms"
DESIGNS = (GRID, ONE_AT_A_TIME)
ALL, ALL_BUT = "all", "all-but-"

Settings = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
  """Systems to run beside stock, and which of them to hold against which.

  Attributes:
    design: `grid`, `one_at_a_time` or `mechanisms`.
    axes: of a grid or one at a time: option to its values; of mechanisms: a
      mechanism to its settings.
    baseline: the system that has every option at stock's value.
    arms: what was asked for, to the name of the system that does so. Arms that
      are the same system share it: nothing runs twice.
    systems: those to run, the baseline left out.
    reference: the system of the first values; of mechanisms, the baseline.
    pairs: (system, the one that it is held against).
  """

  design: str
  axes: Mapping[str, tuple[str, ...]]
  baseline: str
  arms: Mapping[str, str]
  systems: Mapping[str, SystemConfig]
  reference: str
  pairs: tuple[tuple[str, str], ...]

  def as_dict(self) -> dict[str, Any]:
    """For result.json."""
    return {
      "design": self.design,
      "axes": {name: list(values) for name, values in self.axes.items()},
      "baseline": self.baseline,
      "reference": self.reference,
      "arms": dict(self.arms),
      "pairs": [list(pair) for pair in self.pairs],
    }


def parse(
  texts: Sequence[str],
  design: str = GRID,
  *,
  baseline: str,
  drafter: bool,
  batch: bool,
  in_fp8: bool = False,
) -> Ablation:
  """The ablation that `--ablate` asks for, once or several times.

  Args:
    texts: `option=value,value,...` each; or `mechanisms`, or
      `mechanisms=M,M,...`, alone, where M is an option, or settings of it with
      others behind a `+`: `tree=best_first+node_budget=16`.
    design: of `DESIGNS`; what several options make.
    baseline: name of the system that is `SystemConfig()`.
    drafter, batch: of the deployment, to tell which mechanisms it has.
    in_fp8: whether its target is in FP8, which has no W12.

  Raises:
    SpecPilotError: an unknown option or mechanism, a value outside of the
      domain, something given twice, settings that exclude each other; the line
      names the option and what it takes.
  """
  if any(text.partition("=")[0].strip() == MECHANISMS for text in texts):
    if len(texts) > 1:
      raise SpecPilotError(
        f"--ablate={MECHANISMS} stands alone: give no other --ablate"
      )
    _, _, listed = texts[0].partition("=")
    known = mechanisms(drafter=drafter, batch=batch, in_fp8=in_fp8)
    return _of_mechanisms(_chosen(texts[0], listed, known), baseline)
  axes: dict[str, tuple[str, ...]] = {}
  for text in texts:
    name, values = _axis(text)
    if name in axes:
      raise SpecPilotError(f"option {name} is in --ablate twice")
    axes[name] = values
  return _of_values(axes, design, baseline)


def mechanisms(
  *, drafter: bool, batch: bool, in_fp8: bool = False
) -> dict[str, Settings]:
  """The settings that switch on each mechanism of a deployment, by option.

  These are the options of named values that keep the target's own output and
  can be switched on by themselves, at their first value beside stock's.
  """
  out: dict[str, Settings] = {}
  for option in registry.OPTIONS.values():
    value = _first(option)
    if value is None or not _serves(option, drafter=drafter, batch=batch):
      continue
    if in_fp8 and option.other_models:
      continue
    if not (batch and _excluded_by_loads(option)):
      out[option.name] = {option.name: value}
  return out


def _first(option: Option) -> str | None:
  """The value that switches a mechanism on; None where the option is none."""
  if not isinstance(option.domain, Choice) or option.exactness != "token":
    return None
  for value in _values(option):
    if value == option.default:
      continue
    try:
      registry.parse_options(f"{option.name}={value}")
    except SpecPilotError:
      continue  # It needs others beside it.
    return value
  return None


def _excluded_by_loads(option: Option) -> bool:
  """Whether what loads have mechanisms for wants it at stock's value: they are
  not verified in two levels."""
  stock = f"{option.name}={option.domain.format(option.default)}"
  return any(
    stock in other.requires
    for other in registry.OPTIONS.values()
    if "batch" in other.deployments
  )


def _values(option: Option) -> list[str]:
  assert isinstance(option.domain, Choice)
  return [v for v in option.domain.values if v not in option.other_models]


def _serves(option: Option, *, drafter: bool, batch: bool) -> bool:
  holds = {"drafter": drafter, "batch": batch}
  return all(holds.get(d, True) for d in option.deployments)


def _option(name: str, text: str) -> Option:
  if name not in registry.OPTIONS:
    raise SpecPilotError(
      f"--ablate={text}: unknown option {name!r}; options:"
      f" {', '.join(registry.OPTIONS)}; or {MECHANISMS}"
    )
  return registry.OPTIONS[name]


def _value(option: Option, text: str) -> str:
  """A value as the registry writes it."""
  if text in option.other_models:
    raise SpecPilotError(
      f"option {option.name}={text} is another model, no setting of this one:"
      f" expected {_legal(option)}"
    )
  try:
    return option.domain.format(option.domain.parse(text))
  except ValueError:
    raise SpecPilotError(
      f"option {option.name}={text!r}: expected {_legal(option)}"
    ) from None


def _legal(option: Option) -> str:
  if isinstance(option.domain, Choice):
    return "|".join(_values(option))
  return str(option.domain)


def _axis(text: str) -> tuple[str, tuple[str, ...]]:
  """An option and its values."""
  name, equals, listed = (part.strip() for part in text.partition("="))
  if not name:
    raise SpecPilotError(
      "--ablate: expected option=value,value,... or mechanisms; options:"
      f" {', '.join(registry.OPTIONS)}"
    )
  option = _option(name, text)
  if not equals or not listed:
    raise SpecPilotError(
      f"--ablate={text}: expected {name}=value,value,... of {_legal(option)}"
    )
  values = tuple(_value(option, v.strip()) for v in listed.split(","))
  for value in values:
    if values.count(value) > 1:
      raise SpecPilotError(f"--ablate: {name}={value} is given twice")
  return name, values


def _system(settings: Settings) -> SystemConfig:
  return registry.parse_options(_text(settings))


def _text(settings: Settings) -> str:
  return ",".join(f"{name}={value}" for name, value in settings.items())


def _combinations(
  axes: Mapping[str, Sequence[str]], design: str
) -> Iterator[Settings]:
  """Settings of the arms, the first values first."""
  if design == GRID:
    for values in itertools.product(*axes.values()):
      yield dict(zip(axes, values, strict=True))
    return
  first = {name: values[0] for name, values in axes.items()}
  yield first
  for name, values in axes.items():
    for value in values[1:]:
      yield first | {name: value}


class _Arms:
  """Arms and the systems that they share."""

  def __init__(self, baseline: str):
    self._baseline = baseline
    self.arms: dict[str, str] = {}
    self.systems: dict[str, SystemConfig] = {}

  def add(self, label: str, settings: Settings, name: str = "") -> str:
    """The name of an arm's system, by default its settings."""
    system = _system(settings)
    if system == SystemConfig():
      found = self._baseline
    else:
      same = [n for n, s in self.systems.items() if s == system]
      found = same[0] if same else name or _text(registry.changed(system))
      self.systems[found] = system
    self.arms[label] = found
    return found


def _of_values(
  axes: Mapping[str, tuple[str, ...]], design: str, baseline: str
) -> Ablation:
  made = _Arms(baseline)
  for settings in _combinations(axes, design):
    made.add(_text(settings), settings)
  names = list(dict.fromkeys(made.arms.values()))
  reference = names[0]
  pairs = [(name, reference) for name in names[1:]]
  if reference != baseline:
    pairs += [(name, baseline) for name in names if name != baseline]
  if not pairs:
    raise SpecPilotError(
      f"--ablate={_text({n: v[0] for n, v in axes.items()})} is stock itself:"
      " give it another value"
    )
  return Ablation(
    design=design,
    axes=axes,
    baseline=baseline,
    arms=made.arms,
    systems=made.systems,
    reference=reference,
    pairs=tuple(dict.fromkeys(pairs)),
  )


def _chosen(
  text: str, listed: str, known: Mapping[str, Settings]
) -> dict[str, Settings]:
  """The mechanisms that were asked for; all where none is named."""
  legal = ", ".join(known)
  if "=" not in text:
    if not known:
      raise SpecPilotError(
        f"--ablate={MECHANISMS}: this deployment has no mechanism to switch on"
      )
    return dict(known)
  out: dict[str, Settings] = {}
  for item in listed.split(","):
    settings: dict[str, str] = {}
    for part in item.split("+"):
      name, equals, value = (p.strip() for p in part.partition("="))
      if not settings and name not in known:
        raise SpecPilotError(
          f"--ablate={MECHANISMS}: {name!r} is no mechanism of this deployment;"
          f" mechanisms: {legal}"
        )
      option = _option(name, text)
      if settings and not equals:
        raise SpecPilotError(
          f"--ablate={MECHANISMS}: {item.strip()!r}: expected"
          f" {name}={_legal(option)}"
        )
      settings[name] = _value(option, value) if equals else known[name][name]
    name = next(iter(settings))
    if name in out:
      raise SpecPilotError(f"--ablate={MECHANISMS}: {name} is given twice")
    if _system(settings) == SystemConfig():
      raise SpecPilotError(
        f"--ablate={MECHANISMS}: {_text(settings)} is stock, expected another"
        f" value of {_legal(registry.OPTIONS[name])}"
      )
    out[name] = settings
  return out


def _of_mechanisms(chosen: Mapping[str, Settings], baseline: str) -> Ablation:
  made = _Arms(baseline)
  pairs = []
  for settings in chosen.values():
    pairs.append((made.add(_text(settings), settings), baseline))
  everything = made.add(ALL, _joined(chosen), ALL)
  pairs.append((everything, baseline))
  for name in chosen:
    rest = {n: s for n, s in chosen.items() if n != name}
    label = ALL_BUT + name
    without = made.add(label, _joined(rest), label)
    # What the mechanism adds to all the others.
    pairs.append((everything, without))
  return Ablation(
    design=MECHANISMS,
    axes={
      name: tuple(f"{n}={v}" for n, v in settings.items())
      for name, settings in chosen.items()
    },
    baseline=baseline,
    arms=made.arms,
    systems=made.systems,
    reference=baseline,
    pairs=tuple(dict.fromkeys(pairs)),
  )


def _joined(chosen: Mapping[str, Settings]) -> Settings:
  out: dict[str, str] = {}
  for settings in chosen.values():
    for name, value in settings.items():
      if out.setdefault(name, value) != value:
        raise SpecPilotError(
          f"--ablate={MECHANISMS}: option {name} is {out[name]} for one"
          f" mechanism and {value} for another"
        )
  return out
