"""Order, throttling, slow-downs and floors of a session."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments import devices
from experiments.controller import (
  checks,
  paired,
  process,
  process_blocks,
  session,
  tree,
)
from experiments.controller.checks import CANDIDATE, STOCK
from specpilot_jax import configs
from tests.exploits import standin


def test_both_systems_decode_both_requests_once():
  first_request, second_request = standin.requests(2)
  pair = (first_request, second_request)
  for first, expected in ((True, "SCCS"), (False, "CSSC")):
    found = session.order(first, pair)
    letters = "".join("S" if name == STOCK else "C" for name, _ in found)
    assert letters == expected
    assert len(set(found)) == 4
    # A linear drift is the same for both.
    places = {STOCK: 0, CANDIDATE: 0}
    for place, (name, _) in enumerate(found):
      places[name] += place
    assert places[STOCK] == places[CANDIDATE]


def test_forms_are_drawn_half_and_half():
  drawn = [session.forms(8, np.random.default_rng(i)) for i in range(8)]
  assert all(x.sum() == 4 for x in drawn)
  assert len({tuple(x) for x in drawn}) > 1


@pytest.mark.parametrize(
  ("reasons", "throttled"),
  [
    ("0x0000000000000000", False),
    ("0x0000000000000001", False),  # Idle.
    ("0x0000000000000004", False),  # The power cap that holds always.
    ("0x0000000000000008", True),
    ("0x0000000000000020", True),
    ("0x0000000000000040", True),
    ("0x0000000000000080", True),
    ("[N/A]", False),
  ],
)
def test_throttling(reasons, throttled):
  state = {"clocks_event_reasons.active": reasons}
  assert session.is_throttled(state) == throttled
  assert not session.is_throttled(None)


class Engine:
  """Answers at once, in as many seconds as it is told."""

  def __init__(self, seconds: float):
    self.seconds = seconds
    self.ready: dict[str, object] = {}

  def generate(self, prompt_ids, sampling, vocab):
    return process.Answer([1, 2], [self.seconds], [2], self.seconds, {}, 0.0)

  def check_quiet(self):
    pass

  def check_idle(self, before_s, wall_s):
    pass

  def processor_s(self):
    return 0.0

  def __enter__(self):
    return self

  def __exit__(self, *error):
    pass


HOT = {"clocks_event_reasons.active": "0x0000000000000040"}


def run(hot: tuple[str, ...], groups: int) -> session.Times:
  """A session of 8 pairs in which the card was throttled for some systems, in
  the first groups."""
  seen: list[str] = []

  def watch():
    # Called before the sink, after every request.
    place = len(seen)
    name = names[place]
    return HOT if name in hot and place < 4 * groups else None

  rng = np.random.default_rng(3)
  begins = session.forms(8, np.random.default_rng(3))
  requests = standin.requests(16)
  names = [
    name
    for first, pair in zip(begins, session.pairs(requests), strict=True)
    for name, _ in session.order(bool(first), pair)
  ]
  runner = session.Session(
    vocab=standin.VOCAB,
    sink=lambda name, *_: seen.append(name),
    rng=rng,
    deadline=np.inf,
    watch=watch,
  )
  stock: Any = Engine(2.0)
  candidate: Any = Engine(1.0)
  times = runner.run(stock, candidate, requests)
  assert seen == names
  return times


def test_what_throttles_stock_alone_is_left_out():
  """A candidate that heats the card must not choose which pairs count."""
  for hot, dropped in (
    ((STOCK,), 2),
    ((CANDIDATE,), 0),
    ((STOCK, CANDIDATE), 0),
  ):
    times = run(hot, groups=2)
    assert (times.dropped, len(times.units)) == (dropped, 8 - dropped)
    assert not times.drops_too_many


def judge(times):
  return paired.judge(
    paired.Measured({STOCK: [], CANDIDATE: []}, times=times),
    config=standin.config(),
    tokenizer=None,
    forced=None,
    floor=None,
    noise=0.01,
  )


def test_a_session_that_leaves_much_out_says_nothing():
  verdict = judge(run((STOCK,), groups=3))
  assert (verdict.verdict, verdict.check) == (paired.INVALID, "throttled")
  assert "3 of 8" in verdict.reason
  assert judge(run((STOCK,), groups=2)).check != "throttled"


class Bench:
  """Starts an `Engine`; counts."""

  def __init__(self):
    self.started: list[str] = []

  def prepare(self, name, subject):
    pass

  def timed(self, name, subject, **changes):
    self.started.append(name)
    return name


def blocks(monkeypatch, requests, count, hot=(), deadline=np.inf, clock=None):
  bench: Any = Bench()
  subject: Any = None
  lines = []
  monkeypatch.setattr(process_blocks, "EngineProcess", lambda _: Engine(1.0))
  monkeypatch.setattr(
    process_blocks,
    "recorder",
    lambda *_: lambda name, request, *_: lines.append((name, request.id)),
  )
  if clock is not None:
    monkeypatch.setattr(session.time, "monotonic", lambda: clock(bench))
  measured = process_blocks.measure(
    bench,
    subject,
    subject,
    standin.requests(requests),
    standin.requests(1),
    blocks=count,
    vocab=standin.VOCAB,
    rng=np.random.default_rng(0),
    deadline=deadline,
    watch=lambda: HOT if bench.started[-1] in hot else None,
  )
  assert measured.fault is None and measured.times is not None
  return measured.times, bench.started, lines


@pytest.mark.parametrize(
  ("hot", "dropped"), [((STOCK,), 4), ((CANDIDATE,), 0), ((), 0)]
)
def test_blocks_have_the_same_rule(monkeypatch, hot, dropped):
  times, _, _ = blocks(monkeypatch, 8, 4, hot)
  assert (times.dropped, len(times.stock)) == (dropped, 4 - dropped)


@pytest.mark.parametrize(("requests", "units"), [(3, 3), (4, 4), (0, 0)])
def test_no_block_is_empty(monkeypatch, requests, units):
  times, _, _ = blocks(monkeypatch, requests, 4)
  assert np.isfinite(times.stock).all() and len(times.stock) == units


def test_time_that_runs_out_in_a_block(monkeypatch):
  """Six launches begin in time: one block, and a half that is left out."""
  times, started, lines = blocks(
    monkeypatch, 8, 4, deadline=5.5, clock=lambda bench: len(bench.started)
  )
  assert times.late and len(started) == 6
  assert len(times.stock) == 1
  assert len(lines) == 8


def test_slow_down():
  alone = [1.0, 2.0, 1.5, 3.0]
  drifted = [1.1 * s for s in alone]
  between = [1.1**0.5 * s for s in alone]
  share, slower = session.slow_down(alone, between, drifted, None)
  assert share == pytest.approx(0.0, abs=1e-9) and not slower
  beside = [1.2 * s for s in between]
  share, slower = session.slow_down(alone, beside, drifted, None)
  assert share == pytest.approx(0.2) and slower
  assert not session.slow_down(alone, beside, drifted, 0.15)[1]
  # One request bounds nothing: it is not the same as no slow-down.
  assert session.slow_down([1.0], [2.0], [1.0], None) == (None, False)


def test_the_floor_of_a_card():
  """A 27B on an H200 reads 40 GB in 12 bits at 4.8 TB/s in every pass."""
  card = devices.CARDS["h200"]
  floor = checks.Floor(
    weight_bytes=40e9, flops=54e9, bandwidth=card.bandwidth, peak=card.bfloat16
  )
  assert floor.seconds(100, 50) == pytest.approx(50 * 40e9 / card.bandwidth)
  # Passes that it denies do not make it faster.
  assert floor.seconds(1280, 1) == pytest.approx(10 * 40e9 / card.bandwidth)
  metrics = {"e2el_ms": 400.0, "num_spec_steps": 50}
  record = {"request": "r", "output_ids": [1] * 100, "metrics": metrics}
  assert "nominal peak" in str(floor.check([record]))
  metrics["e2el_ms"] = 430.0
  assert floor.check([record]) is None


def test_a_model_of_codes_reads_fewer_bytes():
  config, card = configs.preset("Qwen3.8-27B"), devices.CARDS["h200"]
  packed = checks.Floor.of(config, card)
  codes = checks.Floor.of(config, card, in_fp8=True)
  assert codes.flops == packed.flops
  assert 0.65 < codes.weight_bytes / packed.weight_bytes < 0.75


def test_a_small_model_has_no_floor_of_bytes():
  """It may lie in the caches."""
  floor = checks.Floor.of(standin.config(), devices.CARDS["h200"])
  assert floor.weight_bytes == 0
  assert checks.device_floor(standin.config(), "cpu") is None


def test_requests_are_taken_two_by_two():
  requests = standin.requests(5)
  assert session.pairs(requests) == [
    (requests[0], requests[1]),
    (requests[2], requests[3]),
  ]
  assert dataclasses.is_dataclass(requests[0])


def test_stock_is_alone_with_requests_of_all_parts():
  """The first eight alone would leave the rest of a session to a candidate."""
  requests = standin.requests(65)
  places = []
  for seed in range(20):
    drawn = session.Session(
      vocab=standin.VOCAB,
      sink=lambda *_: None,
      rng=np.random.default_rng(seed),
      deadline=0.0,
    ).draw_solo(requests)
    found = [requests.index(r) for r in drawn]
    assert [i // 8 for i in found] == list(range(session.SOLO_REQUESTS))
    places += found
  assert len(set(places)) > 48 and 64 not in places


@pytest.mark.parametrize("edited", ["tree", "checkout"])
def test_who_is_blamed_for_a_changed_file(tmp_path, edited):
  """A tree that was changed refuses the candidate; an edited checkout does
  not: the measurement says nothing."""
  base = {path: b"x" for path in ("specpilot_jax/a.py", "experiments/b.py")}
  base |= {f"{top}/c.py": b"x" for top in tree.PROTECTED}
  root = tmp_path / "checkout"
  for path, data in base.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
  built = tree.build(tmp_path / "tree", base)
  subject = paired.Subject(tree=built, settings={}, trusted=False, record={})
  before = tree.protected(root)
  paired.check_trees([subject], before, root)
  path = (built.root if edited == "tree" else root) / "specpilot_jax/a.py"
  path.chmod(0o644)
  path.write_text("y")
  with pytest.raises(process.EngineFault) as caught:
    paired.check_trees([subject], before, root)
  verdict = paired.blame(caught.value)
  expected = {"tree": paired.REFUSED, "checkout": paired.INVALID}[edited]
  assert (verdict.verdict, verdict.check) == (expected, "tree")
  assert "specpilot_jax/a.py was changed" in verdict.reason
