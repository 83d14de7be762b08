"""The script of both designs: resumption, slices, its table."""

import json
import math
import pathlib
import subprocess
import types

import pytest

from experiments import results
from scripts import two_gpus
from specpilot_jax.errors import SpecPilotError


class Machine:
  """Runs commands: so many A/A sessions of a design per call, then a test."""

  def __init__(self, per_call: int):
    self.per_call = per_call
    self.sessions = {"0,1": 0, "0": 0}
    self.lines: list[list[str]] = []

  def __call__(self, line):
    self.lines.append(line)
    told = dict(
      x.removeprefix("--").partition("=")[::2] for x in line if x[:2] == "--"
    )
    where = pathlib.Path(told["output_dir"])
    devices, wanted = told["devices"], int(told["aa_sessions"])
    had = self.sessions[devices]
    self.sessions[devices] = have = min(wanted, had + self.per_call)
    test = None
    if "set" in told and have == wanted:
      gain = 0.10 if devices == "0" else 0.11
      test = {
        "verdict": {
          "verdict": "accept", "decision": {"gain": gain, "bound": gain - 0.01}
        }
      }  # fmt: skip
    two = {"aa_asymmetries": [0.01] * have, "aa_unswapped": [0.012, 0.009]}
    result = results.empty_result("paired_test") | {
      "aa": {
        "means": [0.001] * have,
        "s_aa": 0.001 if have >= 5 else None,
        "devices": two if devices == "0,1" else None,
      },
      "paired_test": test,
    }
    where.mkdir(parents=True)
    (where / results.RESULT).write_text(json.dumps(result))
    return types.SimpleNamespace(returncode=0)


def test_it_goes_on_where_it_was_cut(tmp_path, monkeypatch, capsys):
  machine = Machine(per_call=3)
  monkeypatch.setattr(subprocess, "run", machine)
  asked = two_gpus.parse([f"--output_dir={tmp_path}", "--flag=--max_tokens=8"])
  # No time for a session: nothing is begun.
  asked.max_wall_s = 100.0
  assert two_gpus.run(asked) == two_gpus.MORE and not machine.lines
  assert "not there yet: two-aa, two-weights-w12" in capsys.readouterr().out
  asked.max_wall_s = math.inf
  assert two_gpus.run(asked) == 0
  assert len(machine.lines) == 2 * (3 + 1)  # 3 + 3 + 2 sessions, and a test.
  assert all("--max_tokens=8" in line for line in machine.lines)
  out = capsys.readouterr().out
  (row,) = [x for x in out.splitlines() if x.startswith("two-weights-w12")]
  assert row.split()[1:] == [
    "0.100%", "+1.01%", "1.200%", "+11.00%", "+10.00%", "accept"
  ]  # fmt: skip
  assert "weights-w12: the bounds of two devices and of one agree" in out
  # All is there: nothing runs again.
  assert two_gpus.run(asked) == 0 and len(machine.lines) == 8


def test_a_run_that_fails(tmp_path, monkeypatch):
  monkeypatch.setattr(
    subprocess, "run", lambda line: types.SimpleNamespace(returncode=2)
  )
  asked = two_gpus.parse([f"--output_dir={tmp_path}"])
  with pytest.raises(SpecPilotError, match="two-aa/00: .* status 2"):
    two_gpus.run(asked)


@pytest.mark.parametrize(
  ("one", "two", "expected"),
  [
    ((0.10, 0.09), (0.115, 0.10), True),
    ((0.10, 0.09), (0.15, 0.14), False),
    (None, (0.1, 0.09), None),
  ],
)
def test_whether_bounds_agree(one, two, expected):
  def result(pair):
    d = (
      None if pair is None else dict(zip(("gain", "bound"), pair, strict=True))
    )
    return {"paired_test": {"verdict": {"decision": d}}}

  assert two_gpus.agree(result(one), result(two)) is expected
