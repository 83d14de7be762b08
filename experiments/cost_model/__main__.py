"""Computes the cost model of a finished run again, from its files.

    python -m experiments.cost_model DIR [--against=OTHER ...]
        [--pass_us=ROWS:US,ROWS:US,...]

DIR is the folder of a run of --job=profile. Its result.json and reports are
written again; no device is needed. With --against, chains and trees that
another run of the same requests verified
(--set=tree=best_first,node_budget=N) are replayed on DIR's lattices and
compared with what that run measured; systems of DIR itself always are. Their
times of a step, and those of --pass_us by rows of a pass, say which policy and
node budget pays best.
Exit status: 0, or 2 for bad input.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import report, results
from experiments.cost_model import budgets, model, sections
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError

_AGAINST, _PASS_US = "--against=", "--pass_us="


def recompute(
  folder: Path,
  against: Sequence[Path] = (),
  given_us: Mapping[int, float] | None = None,
) -> None:
  """Writes result.json and the reports anew, and prints the factors.

  Args:
    folder: of a run of --job=profile.
    against, given_us: see `model.compute`.
  """
  result = results.read_result(folder)
  cost_model = results.to_json(model.compute(folder, against, given_us))
  result["cost_model"] = cost_model
  results.write_result(folder, result)
  written = report.rewrite(folder)
  for note in cost_model["notes"]:
    print(f"note: {note}")
  for line in sections.lines(cost_model):
    print(line)
  print(f"report: {written}")


def main(argv: list[str]) -> None:
  """Runs a command line, program name first."""
  if {"--help", "-help", "-h"} & set(argv[1:]):
    print((__doc__ or "").strip())
    return
  against = [
    a.removeprefix(_AGAINST) for a in argv[1:] if a.startswith(_AGAINST)
  ]
  times = [a.removeprefix(_PASS_US) for a in argv[1:] if a.startswith(_PASS_US)]
  folders = [a for a in argv[1:] if not a.startswith((_AGAINST, _PASS_US))]
  if len(folders) != 1 or "" in against or len(times) > 1:
    cli.fail(
      "expected one argument, the folder of a run of --job=profile, any number"
      f" of {_AGAINST}OTHER and at most one {_PASS_US}ROWS:US,..."
    )
  try:
    given_us = budgets.parse_times(times[0]) if times else None
    recompute(Path(folders[0]), [Path(a) for a in against], given_us)
  except SpecPilotError as e:
    cli.fail(e)


if __name__ == "__main__":
  main(sys.argv)
