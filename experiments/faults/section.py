"""The matrix of faults in a report."""

from collections.abc import Mapping
from typing import Any

from experiments.blocks import Block, Heading, Table
from experiments.console import table
from experiments.faults.matrix import CHECKS

HEADER = ("fault", "part", *CHECKS, "identical")


def table_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
  """A row per fault and part: which checks saw it."""
  return [
    (
      row["fault"],
      row["part"],
      *("x" if name in row["caught"] else "-" for name in CHECKS),
      f"{row['identical']} of {row['outputs']}",
    )
    for row in result["faults"]["rows"]
  ]


def matrix_table(result: Mapping[str, Any]) -> str:
  """The matrix for a console."""
  return table(HEADER, table_rows(result))


def blocks(result: Mapping[str, Any]) -> list[Block]:
  """The section of a report."""
  told = result["faults"]["verdicts"]
  return [
    Heading("Faults"),
    Table(HEADER, tuple(table_rows(result))),
    Table(
      ("fault", "verdict", "by"),
      tuple((name, v["verdict"], v["reason"]) for name, v in told.items()),
      left=True,
    ),
  ]
