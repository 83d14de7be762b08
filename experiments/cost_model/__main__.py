"""Computes the cost model of a finished run again, from its files.

    python -m experiments.cost_model DIR [--against=OTHER]

DIR is the folder of a run of --job=profile. Its result.json and reports are
written again; no device is needed. With --against, chains that another run of
the same requests verified (--set=num_drafts=N) are replayed on DIR's lattices
and compared with what that run measured; systems of DIR itself always are.
Exit status: 0, or 2 for bad input.
"""

import sys
from pathlib import Path

from experiments import report, results
from experiments.cost_model import model, sections
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError

_AGAINST = "--against="


def recompute(folder: Path, against: Path | None = None) -> None:
  """Writes result.json and the reports anew, and prints the factors.

  Args:
    folder: of a run of --job=profile.
    against: see `model.compute`.
  """
  result = results.read_result(folder)
  cost_model = results.to_json(model.compute(folder, against))
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
  against = [a.removeprefix(_AGAINST) for a in argv[1:] if _AGAINST in a]
  folders = [a for a in argv[1:] if _AGAINST not in a]
  if len(folders) != 1 or len(against) > 1 or "" in against:
    cli.fail(
      "expected one argument, the folder of a run of --job=profile, and at most"
      f" one {_AGAINST}OTHER"
    )
  try:
    recompute(Path(folders[0]), *map(Path, against))
  except SpecPilotError as e:
    cli.fail(e)


if __name__ == "__main__":
  main(sys.argv)
