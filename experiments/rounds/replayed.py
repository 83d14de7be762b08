"""A round again from its recorded times: the same times, the same champion.

    python -m experiments.rounds.replayed RUN

RUN is the folder of a finished round. Every gain, bound and verdict is computed
anew from the log-ratios and A/A means that it recorded, and the decisions of
all phases follow from these; nothing is measured. Exit status: 0 where the
trials' verdicts, the accepted set and the champion are those of result.json, 1
where they are not.
"""

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import results
from experiments.agents.protocol import Limits, Session, Task
from experiments.controller import statistics
from experiments.hosts import Slot
from experiments.rounds.log import DONE, PROPOSE, Budget, Log
from experiments.rounds.phases import Plan, Round
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError

LOG = "round.jsonl"
TIMED = ("screen/", "off/", "merged/", "test/", "seal/")
"""Of the keys of work that was timed."""

JUDGED = (statistics.ACCEPT, statistics.REJECT)


class _Nothing:
  """A world and an agent in which nothing can be had any more.

  Args:
    name: of the agent, whose proposals are in the log.
  """

  paid = False
  parallel = 1

  def __init__(self, name: str = "", noise: str = ""):
    self.name, self.noise = name, noise

  def device(self) -> contextlib.AbstractContextManager[Slot | None]:
    return contextlib.nullcontext()

  def _absent(self, *args: Any) -> Any:
    raise SpecPilotError("the recorded decisions go another way: not recorded")

  factors = aa = check = merge = replayed = screen = test = seal = _absent

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    del workspace, limits
    return self._absent(task)


def _nobody(keys: Sequence[str]) -> Any:
  """The world: of several machines the noise is the last one's, whose A/A
  sessions are all there."""
  marks = [k.split("/")[1] for k in keys if k.startswith("aa/")]
  return _Nothing(noise=marks[-1] if marks else "")


def decided(told: Mapping[str, Any], noise: float | None) -> dict[str, Any]:
  """A timed result with its figures and verdict from its log-ratios.

  A verdict that was not the gate's (a refusal, a disturbed session, outputs
  that nothing proved) is no matter of times, and stays.

  Args:
    told: a line's result, of a screening, a test or the timed part of a seal.
    noise: s_AA.
  """
  ratios = told.get("log_ratios")
  if not ratios:
    return dict(told)
  r = np.asarray(ratios, np.float64)
  if "verdict" not in told:  # A screening.
    upper = -statistics.t_bound(-r)
    return {
      **told,
      "gain": math.expm1(float(r.mean())),
      "upper": math.expm1(upper) if math.isfinite(upper) else None,
    }
  diverged = told["identical"] < told["outputs"]
  d = statistics.decide(
    r,
    noise,
    diverged=diverged,
    # A lab's blocks are fewer than its units ever are.
    min_units=min(statistics.MIN_UNITS, max(told["units"], 1)),
  )
  new = {"gain": d.gain, "bound": d.bound, "threshold": d.threshold}
  if told["verdict"] in JUDGED:
    new |= {"verdict": d.verdict, "reason": f"gate: {d.reason}"}
  return {**told, **new, "s_aa": noise}


def _sealed(told: Mapping[str, Any], noise: float | None) -> dict[str, Any]:
  if told["kind"] != "ok" or "timed" not in told:
    return dict(told)
  timed = decided(told["timed"], noise)
  new: dict[str, Any] = {"timed": timed, "lcb": timed["bound"]}
  if timed["gain"] is not None:
    new["speedup_vs_stock"] = 1 + timed["gain"]
  passed = told["long"]["verdict"] == "pass"
  if passed or timed["verdict"] != statistics.ACCEPT:
    new |= {"verdict": timed["verdict"], "reason": timed["reason"]}
  return {**told, **new}


def _again(line: Mapping[str, Any], noise: float | None) -> dict[str, Any]:
  """A line of the log with what its times say."""
  if line["event"] != DONE or not str(line["key"]).startswith(TIMED):
    return dict(line)
  of = _sealed if line["key"].startswith("seal/") else decided
  return {**line, "result": of(line["result"], noise)}


@dataclasses.dataclass(frozen=True)
class Replayed:
  """What the recorded times say.

  Attributes:
    outcome: of the round, see `Round.run`.
    differences: from result.json, one line each.
  """

  outcome: Mapping[str, Any]
  differences: tuple[str, ...]


def replay(folder: Path) -> Replayed:
  """Decides a finished round again.

  Raises:
    SpecPilotError: no finished round; its decisions go where nothing was
      measured.
  """
  result = results.read_result(folder)
  if result["job"] != "round":
    raise SpecPilotError(f"{folder}: not of a round, of {result['job']!r}")
  told = result["round"]
  log = Log(folder / LOG)
  lines = list(log)
  log.close()
  means = told["aa_means"]
  noise = None
  if len(means) >= statistics.MIN_SESSIONS:
    noise = statistics.s_aa(means)
  keys = [str(x["key"]) for x in lines if x["event"] == DONE]
  asked = [key for key in keys if key.startswith(PROPOSE)]
  stages = {int(k.split("/")[3]) for k in keys if k.startswith("screen/")}
  plan = Plan(
    directions=[(d["factor"], d["option"]) for d in told["directions"]],
    aa_sessions=len({k.split("/")[2] for k in keys if k.startswith("aa/")}),
    # Their number counts: how many units each had is in the results.
    screen_units=(1,) * (1 + max(stages, default=0)),
    champion=told["start"],
  )
  names = dict.fromkeys(key.rpartition("/")[2] for key in asked)
  with tempfile.TemporaryDirectory(prefix="specpilot-replay-") as place:
    path = Path(place) / LOG
    path.write_text("".join(json.dumps(_again(x, noise)) + "\n" for x in lines))
    again, nobody = Log(path), _nobody(keys)
    try:
      outcome = Round(
        again, nobody, [_Nothing(name) for name in names], Budget(again),
        plan, Path(place) / "agents",
      ).run()  # fmt: skip
    finally:
      again.close()
  return Replayed(outcome, tuple(_differences(result, outcome)))


def _differences(result: Mapping[str, Any], outcome: Mapping[str, Any]):
  for name in ("accepted", "champion"):
    if result[name] != outcome[name]:
      yield f"{name}: {outcome[name]}, recorded is {result[name]}"
  trials = [
    [(t["id"], t["verdict"]) for t in x["trials"]] for x in (outcome, result)
  ]
  for mine, recorded in zip(*trials, strict=False):
    if mine != recorded:
      yield f"{mine[0]}: {mine[1]}, recorded is {recorded[1]} of {recorded[0]}"
  if len(trials[0]) != len(trials[1]):
    yield f"{len(trials[0])} trials, recorded are {len(trials[1])}"


def main(argv: list[str]) -> int:
  """Replays the round of a command line, program name first."""
  if len(argv) != 2 or argv[1].startswith("-"):
    raise SpecPilotError("expected one argument, the folder of a round")
  found = replay(Path(argv[1]))
  print(f"accepted: {', '.join(found.outcome['accepted']) or 'nothing'}")
  for text in found.differences:
    print(f"differs: {text}")
  print("as recorded" if not found.differences else "NOT as recorded")
  return int(bool(found.differences))


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv))
  except SpecPilotError as error:
    cli.fail(error)
