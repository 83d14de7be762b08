"""Which check sees which fault.

Every fault decodes the same requests as stock: short ones, as development
measures, and long ones beyond 2,048 tokens. The checks are the controller's:

- `process`: the rules of processes and frames;
- `endings`: replayed endings and token accounting;
- `forcing`: stock scores the tokens;
- `tau`: the acceptance length is not stock's (an alarm, not a proof).

A fault is *caught* where one of the first three refuses it. An engine that dies
before its first answer shows nothing of the kind: its injection is *broken*,
since no check of outputs came to see any. Where the outputs
are stock's own, token for token, nothing is there to catch: the matrix then
says how rare a change such a number of tokens would have missed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import endings
from experiments.controller import checks
from experiments.controller.checks import Request
from experiments.controller.process import EngineFault, EngineProcess
from experiments.faults.catalogue import Fault
from specpilot_jax.configs import ModelConfig
from specpilot_jax.tokenizer import Tokenizer

CHECKS = ("process", "endings", "forcing", "tau")
PROOFS = ("process", "endings", "forcing")
TAU_ALARM = 0.05
"""Share by which the acceptance length may differ from stock's: identical
outputs from identical drafts have identical ones."""
MISSED = 0.05
"""Chance with which a change of the stated rate would have been missed."""

BAD = ("missed", "false alarm", "broken")
"""Verdicts with which the job fails."""

Records = Sequence[Mapping[str, Any]]
Force = Callable[[Records, Records], Mapping[str, Any]]
"""Stock's verdict on the second records, controlled by the first."""


class Broken(EngineFault):
  """A faulty engine that never answered."""


@dataclasses.dataclass(frozen=True)
class Row:
  """What the checks say of a fault on one set of requests.

  Attributes:
    fault: its id.
    part: `short` or `long`.
    caught: by check, the reason; only checks that saw something.
    identical, outputs: outputs that are stock's, of all.
    tokens: that were checked where the fault acts.
    broken: why the engine never answered; None where it did.
  """

  fault: str
  part: str
  caught: Mapping[str, str]
  identical: int
  outputs: int
  tokens: int
  broken: str | None = None

  @property
  def proved(self) -> bool:
    """Whether a check that refuses saw it."""
    return any(name in self.caught for name in PROOFS)

  @property
  def bound(self) -> float | None:
    """The rate per token of changes that these outputs would have missed with
    a chance of `MISSED`: 1 - MISSED^(1/tokens); None where outputs differ."""
    if self.identical < self.outputs or not self.tokens:
      return None
    return 1 - MISSED ** (1 / self.tokens)

  def as_dict(self) -> dict[str, Any]:
    return {
      **dataclasses.asdict(self), "proved": self.proved, "bound": self.bound
    }  # fmt: skip


def decode(
  launch: Any, name: str, requests: Sequence[Request], vocab: int, extra
) -> list[dict[str, Any]]:
  """Records of an engine's answers.

  Raises:
    EngineFault: of the process; `Broken` where it failed before its first
      answer, other than by breaking a rule with it.
  """
  records, ready = [], False
  try:
    with EngineProcess(launch) as engine:
      ready = True
      for request in requests:
        answer = engine.generate(request.prompt_ids, request.sampling, vocab)
        records.append(checks.record(name, request, answer, extra))
  except EngineFault as e:
    if not ready or (not records and e.kind in ("error", "died")):
      raise Broken(e.engine, e.kind, e.reason) from None
    raise
  return records


def judge(
  fault: Fault,
  part: str,
  stock: Records,
  mine: Records | EngineFault,
  *,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
  force: Force,
  late: int,
) -> Row:
  """The row of a fault.

  Args:
    part: `short` or `long`.
    stock, mine: records of the same requests; or what ended the process.
    force: token forcing.
    late: token from which late faults act.
  """
  if isinstance(mine, Broken):
    reason = f"{mine.kind}: {mine.reason}"
    return Row(fault.id, part, {}, 0, len(stock), 0, reason)
  if isinstance(mine, EngineFault):
    told = {"process": f"{mine.kind}: {mine.reason}"}
    return Row(fault.id, part, told, 0, len(stock), 0)
  caught = {}
  broken = [
    *endings.faults(mine, config, tokenizer),
    *endings.set_faults(mine, stock),
  ]
  if broken:
    caught["endings"] = broken[0].text
  own = {r["request"]: r["output_ids"] for r in stock}
  identical = sum(r["output_ids"] == own[r["request"]] for r in mine)
  if identical < len(mine):
    forced = force(stock, mine)
    if forced["verdict"] == "fail":
      caught["forcing"] = forced["reason"]
  taus = [_tau(stock), _tau(mine)]
  # Of a mechanism it is another one, faulty or not.
  if not fault.options and abs(taus[1] / taus[0] - 1) > TAU_ALARM:
    caught["tau"] = f"{taus[1]:.2f}, stock's is {taus[0]:.2f}"
  first = late if fault.late else 0
  tokens = sum(
    max(0, len(r["prompt_ids"]) + len(r["output_ids"]) - first)
    if first
    else len(r["output_ids"])
    for r in mine
  )
  return Row(fault.id, part, caught, identical, len(mine), tokens)


def _tau(records: Records) -> float:
  tokens = sum(len(r["output_ids"]) for r in records)
  return tokens / sum(r["metrics"]["num_spec_steps"] for r in records)


def verdicts(
  rows: Sequence[Row], faults: Sequence[Fault]
) -> dict[str, tuple[str, str]]:
  """(verdict, why) by fault: `caught`, `passes` (harmless ones), `below` (its
  outputs are stock's, with the bound), `missed`, `false alarm`, `broken`."""
  found = {}
  for fault in faults:
    mine = [row for row in rows if row.fault == fault.id]
    seen = [row for row in mine if row.proved]
    broken = [row.broken for row in mine if row.broken is not None]
    if broken:
      found[fault.id] = ("broken", f"never answered: {broken[0]}")
    elif fault.harmless:
      found[fault.id] = (
        ("false alarm", _first(seen[0])) if seen else ("passes", "no check")
      )
    elif seen:
      parts = ", ".join(row.part for row in seen)
      found[fault.id] = ("caught", f"{parts}: {_first(seen[0])}")
    else:
      bounds = [row.bound for row in mine if row.tokens]
      if bounds and all(b is not None for b in bounds):
        least = min(b for b in bounds if b is not None)
        found[fault.id] = (
          "below",
          f"outputs are stock's; a change of {least:.2g} per token and less"
          f" would be missed with a chance of {MISSED:.0%}",
        )
      else:
        found[fault.id] = ("missed", "outputs differ and no check says so")
  return found


def status(told: Mapping[str, tuple[str, str]]) -> int:
  """Exit status for `verdicts`: 1 where any is of `BAD`."""
  return int(any(verdict in BAD for verdict, _ in told.values()))


def _first(row: Row) -> str:
  name = next(n for n in PROOFS if n in row.caught)
  return f"{name}: {row.caught[name]}"
