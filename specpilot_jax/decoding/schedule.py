"""The passes before the exact one: the hook, none by default.

A step verifies what the drafter offers with one pass of the target. A schedule
may first look at the drafts with cheaper passes, and hand the exact pass a
longer tree. Whatever it does, the exact pass decides: a schedule accepts
nothing and commits nothing. What its passes compute is dropped, or written
over by the commit before anything reads it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Int

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.sampling import SamplingParams

if TYPE_CHECKING:
  from specpilot_jax.decoding import engine, step


class Seen(NamedTuple):
  """What the exact pass of a step said.

  Attributes:
    trunk: drafts of its tree that a coarser pass chose; 0 where the drafts went
      to the exact pass at once.
    confirmed: of them, those that it accepted.
    accepted: drafts accepted, before a stop or the limit cut the run.
    foreseen: drafts that the last coarser pass accepted of what it looked at,
      before anything cut its trunk.
  """

  trunk: Int[Array, ""]
  confirmed: Int[Array, ""]
  accepted: Int[Array, ""]
  foreseen: Int[Array, ""]


class Schedule(Protocol):
  """What precedes the exact pass of a step. All but `plan` is traced by jit.

  Attributes:
    system: what it was made for.
    params: weights of its own, a pytree that every call gets as `params[2]`.
    rows: of the exact pass.
    path: nodes of a root path of it at most, the anchor included; no fewer than
      those of the drafts.
  """

  @property
  def system(self) -> SystemConfig: ...

  @property
  def params(self) -> Any: ...

  @property
  def rows(self) -> int: ...

  @property
  def path(self) -> int: ...

  def fresh(self) -> Any:
    """What it has learned of a request before its first step; a pytree."""
    ...

  def plan(self, engine: "engine.Engine", sampling: SamplingParams) -> Any:
    """What it weighs, a pytree of every request; asked for between requests,
    once for all that share their executable. May run requests on the engine, to
    time its steps."""
    ...

  def wanted(
    self,
    step: "step.StepFns",
    carry: "step.Carry",
    request: "step.Request",
    lattice: Lattice,
    drafted: "step.Drafted",
  ) -> Bool[Array, ""] | None:
    """Whether this step looks at the drafts first; None for always."""
    ...

  def continued(
    self,
    step: "step.StepFns",
    params: Any,
    carry: "step.Carry",
    request: "step.Request",
    drafted: "step.Drafted",
  ) -> tuple["step.Drafted", Any]:
    """What the exact pass verifies, `rows` nodes, instead of the drafts.

    And the drafter's context: that of the carry, which may have been extended
    at the anchor's position, by `path` rows at most. The commit extends it
    there by as many, and nothing reads them before.
    """
    ...

  def learned(
    self,
    step: "step.StepFns",
    carry: "step.Carry",
    request: "step.Request",
    lattice: Lattice,
    seen: Seen,
  ) -> Any:
    """What it knows of the request behind a step; `carry` is that before it."""
    ...
