"""The agent that needs no model: it goes through what options can be set to.

Plain search under the same budget is what agents have to beat, so it is the
default. The order is fixed: same registry, same proposals.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from experiments.agents.protocol import Limits, Proposal, Session, Task
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry
from specpilot_jax.mechanisms.registry import Choice, Option

COUNTS = (7, 3, 11, 16, 32, 5, 8, 48, 64, 12, 4, 24)
"""Values of options that take whole numbers, in the order of trying: what
budgets and lengths have been best at on CPUs and cards first."""

BUDGET = "node_budget"
BUDGETS = (48, 16, 64, 96, 24, 128)
"""The same of a tree's nodes, whose own default is 32. A chain's budget is
`num_drafts`, by another name."""
BESIDE = {BUDGET: "tree=best_first"}
"""What an option is tried with, where alone it is another one's."""


class Search:
  """Proposes values of the option of a task.

  Args:
    sampled: whether requests have a temperature above 0.
    drafter: whether the deployment has one.
    batch: whether it decodes several requests at once.
    options: the registry.
    names: of the options that are tried; None for all.
  """

  name = "search"
  paid = False

  def __init__(
    self,
    *,
    sampled: bool,
    drafter: bool,
    batch: bool = False,
    options: Mapping[str, Option] | None = None,
    names: Collection[str] | None = None,
  ):
    self._holds = {"sampled": sampled, "drafter": drafter, "batch": batch}
    self._options = registry.OPTIONS if options is None else options
    unknown = [n for n in names or () if n not in self._options]
    if unknown:
      raise SpecPilotError(
        f"search: unknown option {unknown[0]!r}; options:"
        f" {', '.join(self._options)}"
      )
    self._names = names

  def tasks(self) -> Iterator[tuple[str, str]]:
    """(factor, option) of all options that this deployment has a use for."""
    for option in self._options.values():
      wanted = self._names is None or option.name in self._names
      if wanted and all(self._holds[d] for d in option.deployments):
        yield option.factor, option.name

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    del workspace
    if task.option not in self._options:
      return Session(proposals=())
    option = self._options[task.option]
    found = []
    for value in self._values(option):
      settings = self._settings(option, value)
      if settings is not None:
        found.append(
          Proposal(
            task=task.id,
            options=settings,
            hypothesis=f"{option.name} acts on {option.factor}:"
            f" {option.summary}",
          )
        )
    return Session(proposals=tuple(found[: limits.proposals]))

  def _values(self, option: Option) -> Iterator[str]:
    if isinstance(option.domain, Choice):
      for value in option.domain.values:
        if value != option.default and value not in option.other_models:
          yield value
      return
    for count in BUDGETS if option.name == BUDGET else COUNTS:
      in_domain = count >= option.domain.lowest
      if option.domain.highest is not None:
        in_domain &= count <= option.domain.highest
      if in_domain:
        yield str(count)

  def _settings(self, option: Option, value: str) -> str | None:
    """The assignment, with what it needs; None where nothing makes it valid.

    What an option needs (`requires`) is set with it; one that only does
    something beside another value of a second one (`conflicts`) gets each of
    that one's other values in turn.
    """
    own = f"{option.name}={value}"
    first = BESIDE.get(option.name, "")
    if first.partition("=")[0] not in self._options:
      first = ""
    for other in (first, *option.requires, *self._companions(option)):
      text = ",".join(filter(None, (other, own)))
      try:
        registry.parse_options(text, self._options)
        return text
      except SpecPilotError:
        continue
    return None

  def _companions(self, option: Option) -> Iterator[str]:
    for setting in option.conflicts:
      name = setting.partition("=")[0]
      yield from (f"{name}={v}" for v in self._values(self._options[name]))
