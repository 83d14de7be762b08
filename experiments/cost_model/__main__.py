"""Computes the cost model of a finished run again, from its files.

    python -m experiments.cost_model DIR

DIR is the folder of a run of --job=profile. Its result.json and reports are
written again; no device is needed. Exit status: 0, or 2 for bad input.
"""

import sys
from pathlib import Path

from experiments import report, results
from experiments.cost_model import model, sections
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError


def recompute(folder: Path) -> None:
  """Writes result.json and the reports anew, and prints the factors."""
  result = results.read_result(folder)
  cost_model = results.to_json(model.compute(folder))
  result["cost_model"] = cost_model
  results.write_result(folder, result)
  written = report.rewrite(folder)
  for note in cost_model["notes"]:
    print(f"note: {note}")
  print(sections.factors_line(cost_model))
  print(f"report: {written}")


def main(argv: list[str]) -> None:
  """Runs a command line, program name first."""
  if {"--help", "-help", "-h"} & set(argv[1:]):
    print((__doc__ or "").strip())
    return
  if len(argv) != 2:
    cli.fail("expected one argument, the folder of a run of --job=profile")
  try:
    recompute(Path(argv[1]))
  except SpecPilotError as e:
    cli.fail(e)


if __name__ == "__main__":
  main(sys.argv)
