"""Comparisons computed by hand, and what report and console say of them."""

import math

import pytest

from experiments import plots
from experiments.ablation import compare, design, section
from experiments.blocks import Plot, Table, Text

AXES = ("node_budget=8,default,16",)


def parsed(*texts: str) -> design.Ablation:
  return design.parse(texts, baseline="stock", drafter=True, batch=False)


def record(request: str, tpot_ms: float, output=(1, 2)):
  return {
    "request": request,
    "output_ids": list(output),
    "metrics": {"tpot_ms": tpot_ms},
  }


RECORDS = {
  "stock": [record("a", 4.0), record("b", 2.0), record("c", 3.0)],
  "node_budget=8": [record("b", 1.0), record("a", 4.0)],
  "node_budget=16": [record("a", 8.0), record("b", 4.0, (1, 3))],
}


def system(tok_s: float) -> dict:
  return {
    "output_throughput": tok_s, "acceptance_length": 2.0, "mean_tpot_ms": 1.0,
  }  # fmt: skip


def result(*texts: str, records) -> dict:
  return {
    "ablation": compare.result_of(parsed(*texts), records),
    "systems": {name: system(100.0 + i) for i, name in enumerate(records)},
  }


def found(told, of, against):
  (one,) = [
    c for c in told["comparisons"] if (c["of"], c["against"]) == (of, against)
  ]
  return one


def test_by_hand():
  told = compare.result_of(parsed(*AXES), RECORDS)
  assert told["reference"] == "node_budget=8"
  eight = found(told, "node_budget=8", "stock")
  # Of a the same, of b twice as fast; c was decoded by one alone.
  assert eight["tpot_ratio"] == pytest.approx(math.sqrt(2))
  assert eight["requests"] == eight["outputs"] == eight["same_output"] == 2
  # t of one degree of freedom, 12.706, times the standard error log(2) / 2.
  half = 12.7062 * math.log(2) / 2
  low, high = map(math.log, eight["ci95"])
  assert low == pytest.approx(math.log(2) / 2 - half, rel=1e-5)
  assert high == pytest.approx(math.log(2) / 2 + half, rel=1e-5)
  sixteen = found(told, "node_budget=16", "node_budget=8")
  assert sixteen["tpot_ratio"] == pytest.approx(1 / math.sqrt(8))
  assert (sixteen["outputs"], sixteen["same_output"]) == (2, 1)
  assert len(told["comparisons"]) == 4


def test_one_request_has_no_interval():
  told = compare.result_of(
    parsed("tree=marginal"),
    {"stock": [record("a", 2.0)], "tree=marginal": [record("a", 1.0)]},
  )
  (one,) = told["comparisons"]
  assert one["tpot_ratio"] is None and one["ci95"] is None
  assert one["outputs"] == one["same_output"] == 1


def test_each_load_is_compared_with_itself():
  records = {
    f"{name}@{level}": members
    for name, members in RECORDS.items()
    for level in ("c1", "c4")
  }
  told = result(*AXES, records=records)
  pairs = {(c["of"], c["against"]) for c in told["ablation"]["comparisons"]}
  assert len(pairs) == 8
  assert ("node_budget=8@c4", "stock@c4") in pairs
  header, rows = section.header_and_rows(told)
  assert header[4:6] == ("over node_budget=8", "over stock")
  assert [row[0] for row in rows[:3]] == [
    "node_budget=8@c1", "node_budget=default (stock)@c1", "node_budget=16@c1",
  ]  # fmt: skip
  texts = [b.text for b in section.blocks(told) if isinstance(b, Text)]
  assert any("repeat the run" in text for text in texts)
  assert "repeat the run" in section.lines(told)[-1]


def test_what_is_told(monkeypatch):
  drawn = []
  monkeypatch.setattr(plots, "forest", lambda g, label: drawn.append(g) or b"")
  told = result(*AXES, records=RECORDS)
  text = "\n".join(section.lines(told))
  assert "every combination of the values: node_budget: 8, default, 16" in text
  assert "1.414 [" in text and "0.354 [" in text
  assert (
    "node_budget=16 and stock differ in 1 of 2 outputs: their times are of"
    " other tokens"
  ) in text
  blocks = section.blocks(told)
  assert [b for b in blocks if isinstance(b, Table)]
  assert [b for b in blocks if isinstance(b, Plot)]
  (groups,) = drawn
  assert [row[0] for row in groups["over stock"]] == [
    "node_budget=8", "node_budget=16",
  ]  # fmt: skip
  assert [row[0] for row in groups["over node_budget=8"]] == [
    "node_budget=default", "node_budget=16",
  ]  # fmt: skip


def test_the_table_of_mechanisms(monkeypatch):
  drawn = []
  monkeypatch.setattr(plots, "forest", lambda g, label: drawn.append(g) or b"")
  tpot = {
    "stock": 8.0,
    "tree=best_first": 4.0,
    "weights=w12": 6.0,
    "verification=two_level": 9.0,
    "all": 2.0,
    "all-but-tree": 5.0,
    "all-but-weights": 3.0,
    "all-but-verification": 1.0,
  }
  records = {
    name: [record("a", ms), record("b", ms)] for name, ms in tpot.items()
  }
  told = result("mechanisms", records=records)
  _, rows = section.header_and_rows(told)
  gains = {row[0]: (row[3].split()[0], row[6].split()[0]) for row in rows}
  assert gains == {
    "tree=best_first": ("2.000", "2.500"),
    "weights=w12": ("1.333", "1.500"),
    "verification=two_level": ("0.889", "0.500"),
    "all": ("4.000", "4.000"),
  }
  section.blocks(told)
  assert list(drawn[0]) == ["over stock", "all over all without it"]
  assert [row[:2] for row in drawn[0]["all over all without it"]] == [
    ("tree=best_first", pytest.approx(2.5)),
    ("weights=w12", pytest.approx(1.5)),
    ("verification=two_level", pytest.approx(0.5)),
  ]


def test_nothing_was_decoded():
  told = result(*AXES, records={})
  assert "nothing was decoded" in section.lines(told)[0]
  assert not [b for b in section.blocks(told) if isinstance(b, Table)]


def test_the_plot():
  groups = {"over stock": [("x" * 40, 1.2, 1.1, 1.3)], "over y": []}
  groups["over y"] = [("y", 0.9, 0.8, 1.0), ("x" * 40, 1.1, 1.0, 1.2)]
  assert plots.forest(groups, "ratio").startswith(b"\x89PNG")
