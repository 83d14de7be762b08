"""Systems of an ablation, held against each other request by request.

The figures are pure functions of requests.jsonl, like those of
`experiments.metrics`, whose paired ratio of TPOT they are. An interval is of
one comparison: of twenty, one misses what it should cover. It decides nothing;
what is promoted is tested by the controller, in fresh processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import metrics
from experiments.ablation.design import Ablation

Records = Mapping[str, Sequence[metrics.Record]]


def result_of(ablation: Ablation, records: Records) -> dict[str, Any]:
  """`ablation` of result.json.

  Args:
    ablation: what ran.
    records: requests by system, or by system and load.
  """
  told = ablation.as_dict()
  return told | {"comparisons": comparisons(told["pairs"], records)}


def comparisons(
  pairs: Sequence[Sequence[str]], records: Records
) -> list[dict[str, Any]]:
  """Each pair under each load; those that were decoded.

  Returns:
    `of` and `against`, names of `systems`; `tpot_ratio`, how many times as fast
    the first decodes (geometric mean over the requests of both), its 95 %
    interval `ci95` and the number of `requests` (with fewer than two the first
    two are None); `outputs` that both decoded and how many are the
    `same_output`, token for token.
  """
  levels = dict.fromkeys(metrics.at_level("", name) for name in records)
  out = []
  for of, against in pairs:
    for level in levels:
      one, other = records.get(of + level), records.get(against + level)
      if one and other:
        out.append(_compare(of + level, against + level, one, other))
  return out


def _compare(of: str, against: str, records, reference) -> dict[str, Any]:
  paired = metrics.paired_speedup(records, reference) or {}
  ids = {r["request"] for r in reference}
  both = [r for r in records if r["request"] in ids]
  return {
    "of": of,
    "against": against,
    "tpot_ratio": paired.get("geomean"),
    "ci95": paired.get("ci95"),
    "requests": paired.get("requests", 0),
    "outputs": len(both),
    "same_output": metrics.same_outputs(both, reference),
  }
