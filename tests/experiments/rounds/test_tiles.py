"""Tiles as proposals: what the micro-benchmark says becomes a patch."""

import dataclasses

import pytest

from experiments.agents import tiles
from experiments.agents.protocol import Limits, Task
from experiments.agents.tiles import Tiles
from experiments.controller import tree
from experiments.rounds import job
from memory import patches
from pallas_kernels.w12_matmul import TILES, WIDE, Tile
from specpilot_jax import kernels
from specpilot_jax.errors import SpecPilotError
from tests.experiments import test_settings

FASTER = Tile(lanes=16, num_warps=1)
CHAMPION = "weights=w12,tree=best_first,node_budget=32"


def task(**changes) -> Task:
  base = Task(
    id=tiles.TASK, factor="kernel", option=None, bound=0.2, champion=CHAMPION
  )
  return dataclasses.replace(base, **changes)


def found(fast: float, *, second: bool = True):
  """Two shapes; the tile of the table takes 10 us of each."""

  def one(tile, us):
    return {"tile": dataclasses.asdict(tile), "us": us}

  shape = [one(TILES[32], 10.0), one(FASTER, fast), one(WIDE, 30.0)]
  rest = shape if second else shape[:1]
  return [{"count": 64, "tiles": shape}, {"count": 3, "tiles": rest}]


@pytest.fixture(name="files", scope="module")
def _files():
  return {tiles.SOURCE: (tree.ROOT / tiles.SOURCE).read_bytes()}


def propose(files, told, tmp_path, preset="qwen3.8-27b"):
  asked = []

  def measure(workspace, rows, limits):
    asked.append(rows)
    return told

  agent = Tiles(files, preset, 15, measure)
  return agent.propose(task(), tmp_path, Limits()), asked


def test_a_faster_tile_is_a_patch(files, tmp_path):
  session, asked = propose(files, found(8.0), tmp_path)
  assert asked == [32]  # Rows of the champion's pass.
  (proposal,) = session.proposals
  assert proposal.options == CHAMPION
  assert proposal.prediction == pytest.approx(0.25)
  after = patches.apply(files, patches.parse(proposal.patch.encode()))
  space: dict = {"Tile": Tile, "WIDE": WIDE}
  text = after[tiles.SOURCE].decode()
  start = text.index("TILES = {")
  exec(text[start : text.index("}", start) + 1], space)
  assert space["TILES"] == {**TILES, 32: FASTER}


def test_what_is_no_faster_is_no_proposal(files, tmp_path):
  for told in (found(9.9), found(8.0, second=False)):
    session, _ = propose(files, told, tmp_path)
    assert session.proposals == () and "32 rows" in session.transcript
  session, _ = propose(files, [], tmp_path)
  assert "was not timed" in session.transcript


def test_what_it_is_not_asked(files, tmp_path):
  session, asked = propose(files, found(1.0), tmp_path, preset=None)
  assert session.proposals == () and not asked
  agent = Tiles(files, "qwen3.8-27b", 15, lambda *args: found(1.0))
  for other in (
    task(id="kernel/tiles/attention"),
    task(champion="tree=best_first"),
    task(champion="weights=w12,tree=best_first,node_budget=96"),
  ):
    assert agent.propose(other, tmp_path, Limits()).proposals == ()
  with pytest.raises(SpecPilotError, match="no table of tiles"):
    Tiles({tiles.SOURCE: b"x\n"}, "q", 15, lambda *args: found(1.0)).propose(
      task(), tmp_path, Limits()
    )


def test_whose_tiles_are_timed():
  """Of a card's flag file, where the product has the table at all."""
  card = test_settings.shipped("h200_single.flags")
  triton = dataclasses.replace(card, kernels=kernels.parse("triton"))
  assert job._tiles(triton)._preset == "qwen3.8-27b"
  mosaic = kernels.parse("triton,w12_matmul=mosaic")
  for other in (
    dataclasses.replace(card, kernels=mosaic),
    test_settings.shipped("cpu_smoke.flags"),
  ):
    assert job._tiles(other)._preset is None
