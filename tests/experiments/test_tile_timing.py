"""What is timed to choose tiles, and what is made of the times."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tile_timing
from experiments.cost_model import kernels, measure
from pallas_kernels import w12_matmul
from pallas_kernels.w12_matmul import Tile
from specpilot_jax.checkpoints import w12_device
from specpilot_jax.errors import SpecPilotError


def test_shapes_of_the_model_and_its_drafter():
  shapes = tile_timing.shapes_of("Qwen3.8-27B")
  # 64 layers and 5; the head of both; the drafter's projection of five taps.
  assert shapes[34816, 5120] == shapes[5120, 17408] == 69
  assert shapes[16480, 5120] == 48 and shapes[14336, 5120] == 16
  assert shapes[248320, 5120] == 2 and shapes[5120, 25600] == 1
  with pytest.raises(SpecPilotError, match="there are: qwen3.8-27b"):
    tile_timing.shapes_of("gpt-2")


def test_every_form_is_tried_with_numbers_of_programs():
  for n, forms in ((16, tile_timing.FORMS), (64, tile_timing.MANY_ROWS)):
    tried = tile_timing.tiles(n)
    assert len(set(tried)) == len(tried)
    assert len(tried) == len(forms) * len(tile_timing.PROGRAMS)


def test_no_more_rows_than_the_kernel_takes():
  """The decoded matrix would be timed in its place."""
  assert max(w12_matmul.TILES) == w12_matmul.MAX_ROWS
  limit = str(w12_matmul.MAX_ROWS)
  assert tile_timing.parse_rows(["1", limit]) == [1, w12_matmul.MAX_ROWS]
  for wrong in ("0", "x", str(w12_matmul.MAX_ROWS + 1)):
    with pytest.raises(SpecPilotError, match=f"rows must be 1 to {limit}"):
      tile_timing.parse_rows([wrong])


def test_cases_are_the_product():
  """All of them, interpreted, against float64."""
  shape = (64, 128)
  matrices = [tile_timing.weights(jax.random.key(i), shape) for i in range(2)]
  packed = [w12_device.encode_on_device(w) for w in matrices]
  assert 0 < float((matrices[0] == 0).mean()) < 0.01
  tile = Tile(lanes=16, programs=2)
  for n in (1, 3):
    xs = [
      jax.random.normal(jax.random.key(9 + i), (n, 128), jnp.bfloat16)
      for i in range(2)
    ]
    cases = tile_timing.xla_cases(n, xs, matrices)
    assert len(cases) == (3 if n == 1 else 2)
    cases.append(
      tile_timing.w12_case(tile, xs, packed, implementation="interpret")
    )
    for case in cases:
      for x, w, y in zip(xs, matrices, case.run(*case.arguments), strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(
          np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5
        )


def test_cases_are_told_apart_by_their_pauses(monkeypatch):
  cases = [
    tile_timing.Case("a", lambda: jnp.zeros(()), ()),
    tile_timing.Case("b", lambda: jnp.zeros(()), ()),
  ]
  pause = int(tile_timing.PAUSE_S * 1e9)
  # Two kernels of 240 us that overlap by half; then one of 480.
  starts = ((0, 240_000), (120_000, 240_000), (pause, 480_000))

  def trace(run):
    run()
    return [kernels.Kernel("k", "", "", s, d) for s, d in starts]

  monkeypatch.setattr(measure, "trace", trace)
  monkeypatch.setattr(time, "sleep", lambda seconds: None)
  launches = tile_timing.REPEATS * tile_timing.BUFFERS
  assert tile_timing.kernel_us(cases) == [360 / launches, 480 / launches]
  with pytest.raises(SpecPilotError, match="2 cases, 1 were run"):
    tile_timing.kernel_us(cases[:1])


def test_best_and_summary():
  tile = Tile()
  cases = [
    tile_timing.Case("xla dot", None, ()),
    tile_timing.Case("xla other", None, ()),
    tile_timing.Case("w12 slow", None, (), tile, "w12"),
    tile_timing.Case("w12 fast", None, (), tile, "w12"),
    tile_timing.Case("view", None, (), tile, "view"),
  ]
  found = tile_timing.best(cases, [12.0, 10.0, 9.0, 8.0, 5.0])
  assert found["xla"]["label"] == "xla other"
  assert found["w12"]["us"] == 8 and found["w12"]["tile"]["lanes"] == 32
  one = {"shape": (64, 32), "count": 3, "rows": 16, **found}
  other = one | {"count": 1, "w12": found["w12"] | {"us": 12.0}}
  text = tile_timing.summary([one, other])
  # 40 of 36 us over the pass.
  assert "w12, 16 rows: 1.111 over a pass's products (40 us" in text
  assert "view, 16 rows: 2.000" in text
