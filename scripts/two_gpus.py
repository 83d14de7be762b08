"""The paired test on two GPUs and on one: `python -m scripts.two_gpus`.

    python -m scripts.two_gpus --output_dir=DIR [--max_wall_s=560]
        [--candidate=weights=w12] [--candidate=...] [--base=FLAGFILE]
        [--flag=--name=value ...]

Runs, for `h200_single.flags` unless `--base` names another file: the A/A
sessions on devices 0 and 1, swapped; each candidate against stock there; the
A/A sessions on device 0 alone; each candidate there. Prints both designs side
by side: s_AA, what the devices differ by, what the swap takes out, and whether
the bounds agree.

It goes on where it was cut: what has a result in DIR is not run again, and A/A
sessions that were measured count (they are kept in the data folder, by
machine). `--max_wall_s` begins nothing that would not end in time, a session
of `--session_s` and behind a test `--forcing_s` more. The exit status is 0 when
all is there, 3 when the same command has more to do.

Expected on H200s at 27B shapes, with 35 prompts (not measured yet): 4 minutes
a session, of which loading and compiling is half, so 35 minutes for each
design's A/A sessions and 6 for each candidate with its token forcing; 80
minutes for one candidate in both designs.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.console import say, table
from experiments.controller.section import percent
from experiments.controller.statistics import WANTED_SESSIONS
from specpilot_jax.errors import SpecPilotError

DESIGNS = {"two": "0,1", "one": "0"}
"""Devices by design."""
MORE = 3
"""Exit status with which the same command has more to do."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """What the command line says."""
  parser = argparse.ArgumentParser("two_gpus", description=__doc__)
  parser.add_argument("--output_dir", type=Path, required=True)
  parser.add_argument("--base", default="h200_single.flags")
  parser.add_argument("--candidate", action="append")
  parser.add_argument("--flag", action="append", default=[])
  parser.add_argument("--num_prompts", type=int, default=35)
  parser.add_argument("--aa_sessions", type=int, default=WANTED_SESSIONS)
  parser.add_argument("--max_wall_s", type=float, default=math.inf)
  parser.add_argument("--session_s", type=float, default=240.0)
  parser.add_argument("--forcing_s", type=float, default=150.0)
  asked = parser.parse_args(argv)
  asked.candidate = asked.candidate or ["weights=w12"]
  return asked


def steps(candidates: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
  """(name, devices, candidate) in the order of running; None is A/A alone."""
  for design, devices in DESIGNS.items():
    yield f"{design}-aa", devices, None
    for options in candidates:
      name = "".join(c if c.isalnum() else "-" for c in options)
      yield f"{design}-{name}", devices, options


def finished(folder: Path, candidate: str | None, wanted: int):
  """The result of a step that has come to its end; None where none has."""
  for path in sorted(folder.glob("*")):
    if not (path / results.RESULT).exists():
      continue
    result = results.read_result(path)
    if len(result["aa"]["means"]) < wanted:
      continue
    if candidate is None or result["paired_test"]:
      return result
  return None


def command(
  asked: argparse.Namespace,
  devices: str,
  candidate: str | None,
  where: Path,
  seconds: float,
) -> list[str]:
  """The command line of a step's slice."""
  line = [
    sys.executable, "-m", "experiments.main", f"--flagfile={asked.base}",
    "--job=paired_test", f"--devices={devices}",
    f"--num_prompts={asked.num_prompts}", f"--aa_sessions={asked.aa_sessions}",
    f"--output_dir={where}", *asked.flag,
  ]  # fmt: skip
  if math.isfinite(seconds):
    line.append(f"--max_wall_s={seconds:.0f}")
  if candidate is not None:
    line.append(f"--set={candidate}")
  return line


def run_step(
  asked: argparse.Namespace,
  folder: Path,
  devices: str,
  candidate: str | None,
  deadline: float,
) -> dict[str, Any] | None:
  """A step, or as much of it as there is time for; its result where it ended.

  Raises:
    SpecPilotError: it failed.
  """
  while True:
    result = finished(folder, candidate, asked.aa_sessions)
    if result is not None:
      return result
    left = deadline - time.monotonic()
    if candidate is not None:
      left -= asked.forcing_s
    if left < asked.session_s:
      return None
    where = folder / f"{len(list(folder.glob('*'))):02}"
    done = subprocess.run(command(asked, devices, candidate, where, left))
    # 1 is a verdict, too: a candidate that was refused.
    if not (where / results.RESULT).exists():
      raise SpecPilotError(
        f"{where}: the run ended with status {done.returncode} and no result"
      )


def _row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
  aa = result["aa"]
  devices = aa["devices"] or {}
  differ, fixed = devices.get("aa_asymmetries"), devices.get("aa_unswapped")
  test = result["paired_test"]
  d = (test["verdict"]["decision"] or {}) if test else {}
  share = "-" if aa["s_aa"] is None else f"{aa['s_aa']:.3%}"
  return (
    name,
    share,
    "-" if not differ else percent(math.expm1(sum(differ) / len(differ))),
    "-" if not fixed else f"{max(fixed):.3%}",
    percent(d.get("gain")),
    percent(d.get("bound")),
    test["verdict"]["verdict"] if test else "-",
  )


def agree(one: dict[str, Any], two: dict[str, Any]) -> bool | None:
  """Whether the intervals of two tests of a candidate overlap: from the lower
  bound as far above the gain as that is below it. None without a decision."""
  ends = []
  for result in (one, two):
    d = result["paired_test"]["verdict"]["decision"]
    if d is None:
      return None
    ends.append((d["bound"], 2 * d["gain"] - d["bound"]))
  return max(low for low, _ in ends) <= min(high for _, high in ends)


def summary(done: dict[str, dict[str, Any]]) -> str:
  """Both designs side by side."""
  header = (
    "design-candidate", "s_AA", "device 1 - 0", "s_AA unswapped", "gain",
    "lower bound", "verdict",
  )  # fmt: skip
  text = table(header, [_row(name, result) for name, result in done.items()])
  lines = [text]
  for name, result in done.items():
    other = done.get(name.replace("two-", "one-", 1))
    if name.startswith("two-") and other and result["paired_test"]:
      told = {True: "agree", False: "do NOT agree", None: "are not both there"}
      lines.append(
        f"{name.removeprefix('two-')}: the bounds of two devices and of one"
        f" {told[agree(result, other)]}"
      )
  return "\n".join(lines)


def run(asked: argparse.Namespace) -> int:
  """Runs what is missing, and prints what is there; the exit status."""
  deadline = time.monotonic() + asked.max_wall_s
  done: dict[str, dict[str, Any]] = {}
  missing = []
  for name, devices, candidate in steps(asked.candidate):
    folder = asked.output_dir / name
    result = run_step(asked, folder, devices, candidate, deadline)
    if result is None:
      missing.append(name)
    else:
      done[name] = result
  say(summary(done))
  if missing:
    say(f"not there yet: {', '.join(missing)}; the same command goes on")
  return MORE if missing else 0


def main() -> None:
  """Runs the command line."""
  try:
    sys.exit(run(parse(sys.argv[1:])))
  except SpecPilotError as e:
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main()
