"""When requests come."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
from absl.testing import parameterized

from experiments.serving import arrivals
from experiments.serving.arrivals import Level
from specpilot_jax.errors import SpecPilotError


class ArrivalsTest(parameterized.TestCase):
  def test_poisson(self):
    times = np.array(Level(request_rate=5.0).arrivals_s(20_000, 0))
    gaps = np.diff(times)
    self.assertEqual(times[0], 0)
    self.assertAlmostEqual(gaps.mean(), 0.2, delta=0.005)
    # Of an exponential law the deviation is the mean.
    self.assertAlmostEqual(gaps.std(), 0.2, delta=0.005)

  @parameterized.parameters(0.25, 4.0)
  def test_burstiness(self, shape):
    level = Level(request_rate=5.0, burstiness=shape)
    gaps = np.diff(level.arrivals_s(20_000, 0))
    self.assertAlmostEqual(gaps.mean(), 0.2, delta=0.01)
    self.assertAlmostEqual(gaps.std(), 0.2 / math.sqrt(shape), delta=0.02)

  def test_seeds(self):
    level = Level(request_rate=2.0)
    self.assertEqual(level.arrivals_s(9, 1), level.arrivals_s(9, 1))
    self.assertNotEqual(level.arrivals_s(9, 1), level.arrivals_s(9, 2))
    self.assertEqual(level.arrivals_s(5, 1), level.arrivals_s(9, 1)[:5])

  def test_all_at_once(self):
    self.assertEqual(Level(max_concurrency=4).arrivals_s(3, 0), [0, 0, 0])

  def test_names(self):
    for level, name in (
      (Level(), "all"),
      (Level(max_concurrency=16), "c16"),
      (Level(request_rate=0.5), "0.5rps"),
      (Level(request_rate=8.0, max_concurrency=2), "8rps-c2"),
      (Level(recorded_s=(0.0,), max_concurrency=2), "recorded-c2"),
    ):
      self.assertEqual(level.name, name)

  def test_levels(self):
    found = arrivals.levels([1.0, math.inf], [None, 4], 1.0, None)
    names = [level.name for level in found]
    self.assertEqual(names, ["1rps", "1rps-c4", "all", "c4"])
    with self.assertRaisesRegex(SpecPilotError, "the load c4 is given twice"):
      arrivals.levels([math.inf], [4, 4], 1.0, None)
    with self.assertRaisesRegex(SpecPilotError, "have their own rate"):
      arrivals.levels([1.0], [None], 1.0, (0.0,))

  @parameterized.parameters(
    (dict(request_rate=0.0), "request_rate must be above 0, or inf, got 0"),
    (dict(request_rate=math.nan), "request_rate .* got nan"),
    (dict(max_concurrency=0), "max_concurrency must be at least 1, got 0"),
    (dict(burstiness=0.0), "burstiness must be above 0, got 0"),
    (dict(burstiness=math.inf), "burstiness must be above 0, got inf"),
  )
  def test_refuses(self, settings, message):
    with self.assertRaisesRegex(SpecPilotError, message):
      Level(**settings)

  def write(self, *lines):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    path = Path(folder.name) / "arrivals.jsonl"
    texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path

  def test_recorded(self):
    path = self.write(
      {"arrival_s": 3.5, "system": "ar"},
      {"arrival_s": 9, "system": "stock"},
      "",
      {"arrival_s": 2.5, "system": "ar"},
    )
    self.assertEqual(arrivals.recorded(path), (0, 1))
    self.assertEqual(arrivals.recorded(path, "stock"), (0,))
    level = Level(recorded_s=arrivals.recorded(path))
    self.assertEqual(level.arrivals_s(1, 7), [0])
    with self.assertRaisesRegex(SpecPilotError, "--num_prompts=2 or fewer"):
      level.arrivals_s(3, 0)

  @parameterized.parameters(
    (("{}",), ":1: not a JSON object with arrival_s"),
    (("[1]",), ":1: not a JSON object"),
    (("x",), ":1: not a JSON object"),
    (({"arrival_s": -1},), ":1: arrival_s must be seconds from 0 on, got -1"),
    (({"arrival_s": 1}, {"arrival_s": "2"}), ":2: arrival_s must be"),
    (("",), "holds no arrivals"),
  )
  def test_refuses_files(self, lines, message):
    with self.assertRaisesRegex(SpecPilotError, message):
      arrivals.recorded(self.write(*lines))

  def test_no_file(self):
    with self.assertRaisesRegex(SpecPilotError, "none: No such file"):
      arrivals.recorded(Path("none"))
