"""The agent that times tiles: a table's entry is a proposal too.

It is asked where the kernels of a champion are tuned. What it knows is the W12
product, whose tiles stand in one table by rows: it times all tiles on the
shapes that read most bytes, and proposes the fastest where the table has a
slower one. The micro-benchmark is its evidence: below the gate it says nothing.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tile_timing
from experiments.agents.protocol import Limits, Proposal, Session, Task
from experiments.controller import forced, tree
from memory import patches
from pallas_kernels import w12_matmul
from pallas_kernels.w12_matmul import TILES, Tile
from pallas_kernels.w12_parts import rows_of
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry, two_level

TASK = "kernel/tiles/target_gemm"
SOURCE = "pallas_kernels/w12_matmul.py"
TABLE = re.compile(r"^TILES = \{.*\}$", re.MULTILINE)
GATE = 0.03
SHAPES = 2
"""Of a model that are timed: those that read most bytes in a pass."""

Found = Sequence[Mapping[str, Any]]
Measure = Callable[[Path, int, Limits], Found]
"""Times of all tiles for so many rows; see `tile_timing.measure_shape`."""


class Tiles:
  """Proposes entries of the table of W12's tiles.

  Args:
    files: the sources, of `tree.read_base`.
    preset: shapes of the target, as `experiments.autotune` names them; None
      where it has none: then there is nothing to propose.
    slots: drafts that the drafter offers.
    measure: times them, on this machine by default.
  """

  name = "tiles"
  paid = False

  def __init__(
    self,
    files: Mapping[str, bytes],
    preset: str | None,
    slots: int,
    measure: Measure | None = None,
  ):
    self._files, self._preset, self._slots = files, preset, slots
    self._measure = measure or self._timed

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    champion = task.champion.split(",")
    if task.id != TASK or self._preset is None or "weights=w12" not in champion:
      return Session(proposals=())
    rows = self._rows(task.champion)
    if rows > w12_matmul.MAX_ROWS:
      return Session(proposals=(), transcript=f"{rows} rows have no table")
    found = self._measure(workspace, rows, limits)
    times = _totals(found)
    mine = TILES[rows_of(rows)]
    if not times or mine not in times:
      return Session(
        proposals=(), transcript=f"{mine} was not timed with {rows} rows"
      )
    best = min(times, key=lambda tile: times[tile])
    gain = times[mine] / times[best] - 1
    told = (
      f"{rows} rows: {times[mine]:.1f} us with {mine}, {times[best]:.1f} with"
      f" {best}: {gain:+.1%}"
    )
    if gain < GATE:
      return Session(proposals=(), transcript=told)
    one = Proposal(
      task=task.id,
      options=task.champion,
      patch=self._patch(rows_of(rows), best),
      hypothesis=f"a faster tile of the W12 product ({told})",
      prediction=gain,
    )
    return Session(proposals=(one,), transcript=told)

  def _rows(self, options: str) -> int:
    """Of the exact pass of a system."""
    system = registry.parse_options(options)
    policy = Policy.of_slots(system, self._slots, "of this deployment")
    if system.verification == "one_level":
      return policy.rows
    return two_level.shape(policy, system.level_one_passes)[0]

  def _patch(self, rows: int, tile: Tile) -> str:
    text = self._files[SOURCE].decode()
    entries = [
      f"  {n}: {tile if n == rows else old},\n" for n, old in TILES.items()
    ]
    new, count = TABLE.subn("TILES = {\n" + "".join(entries) + "}", text)
    if count != 1:
      raise SpecPilotError(f"{SOURCE}: no table of tiles on one line")
    changed = {**self._files, SOURCE: new.encode()}
    return patches.render(self._files, changed).decode()

  def _timed(self, workspace: Path, rows: int, limits: Limits) -> Found:
    """By `experiments.autotune`, in a process of its own."""
    assert self._preset is not None
    shapes = tile_timing.shapes_of(self._preset)
    most = sorted(shapes, key=lambda s: -shapes[s] * s[0] * s[1])[:SHAPES]
    output = workspace / "tiles.json"
    command = [
      sys.executable, "-m", "experiments.autotune", f"--model={self._preset}",
      f"--rows={rows}", f"--output={output}", f"--max_wall_s={limits.seconds}",
      f"--shapes={','.join(f'{high}x{wide}' for high, wide in most)}",
    ]  # fmt: skip
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      cwd=tree.ROOT,
      env=forced.environment(limits.device),
    )
    if not output.exists():
      lines = (done.stderr or done.stdout).strip().splitlines()
      raise SpecPilotError(f"tiles: {lines[-1] if lines else 'failed'}")
    return json.loads(output.read_text())["found"]


def _totals(found: Found) -> dict[Tile, float]:
  """Microseconds of a pass's products by tile, of those timed on all shapes."""
  times: dict[Tile, list[float]] = defaultdict(list)
  for shape in found:
    for one in shape["tiles"]:
      tile = Tile(**one["tile"])
      times[tile].append(shape["count"] * one["us"])
  return {t: sum(us) for t, us in times.items() if len(us) == len(found)}


def preset_of(target: str) -> str | None:
  """The shapes of a target, where they have a name; None where not.

  >>> preset_of("widened:qwen3.8-27b")
  'qwen3.8-27b'
  >>> preset_of("zoo") is None
  True
  """
  kind, _, name = target.partition(":")
  return name if kind == "widened" and name else None
