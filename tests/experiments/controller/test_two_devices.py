"""Two devices with swap: scripted engines, and processes of the stand-in."""

import math
import os
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from experiments import hosts
from experiments.controller import (
  paired,
  process,
  session,
  statistics,
  tree,
  two_devices,
)
from experiments.controller.checks import CANDIDATE, STOCK
from experiments.hosts import Slot
from tests.exploits import standin

SLOTS = (Slot(index=0), Slot(index=1))
HOT = {"clocks_event_reasons.active": "0x0000000000000040"}


class Script:
  """Engines in as many seconds as they are told.

  Args:
    seconds: of (system, device, whether the other decodes too).
    faults: (system, device) of engines that break a rule.
  """

  def __init__(self, seconds, faults=()):
    self.seconds, self.faults = seconds, faults
    self.launches: list[tuple[str, int]] = []
    self.living: dict[str, int] = {}
    self.lines: list[tuple[str, str, int]] = []

  def prepare(self, name, subject, slot):
    assert slot == SLOTS[0]

  def timed(self, name, subject, slot, memory_fraction):
    assert memory_fraction > 0.5  # It has the device for itself.
    return types.SimpleNamespace(name=name, slot=slot)

  def engine(self, launch):
    return Engine(self, launch.name, launch.slot.index)

  def sink(self, measured, subjects, folder):
    del measured, subjects, folder
    return lambda name, request, answer, extra: self.lines.append(
      (name, request.id, extra["device"])
    )


class Engine:
  """Of a script; both of a request must be at work at once."""

  def __init__(self, script, name, device):
    self.script, self.name, self.device = script, name, device
    self.ready: dict[str, Any] = {}
    self.output = bytearray()

  def begin(self):
    assert self.device not in self.script.living.values()
    self.script.launches.append((self.name, self.device))
    self.script.living[self.name] = self.device

  def wait_ready(self):
    # The other was begun before this one is waited for.
    assert len(self.script.living) == 2

  def check_quiet(self):
    pass

  def generate(self, prompt_ids, sampling, vocab):
    both = len(self.script.living) == 2
    if both and (self.name, self.device) in self.script.faults:
      raise process.EngineFault(self.name, "tokens", "none at all")
    if both and not self.script.faults:
      MEET.wait(timeout=10)
    seconds = self.script.seconds(self.name, self.device, both)
    return process.Answer([1, 2], [seconds], [2], seconds, {}, 0.0)

  def __exit__(self, *error):
    self.script.living.pop(self.name, None)


MEET = threading.Barrier(2)
BIAS = {0: 1.0, 1: 1.3}


def run(
  monkeypatch, script, requests=8, seed=0, deadline=np.inf,
  watch=lambda slot: None,
):  # fmt: skip
  monkeypatch.setattr(two_devices, "EngineProcess", script.engine)
  monkeypatch.setattr(two_devices, "recorder", script.sink)
  subject: Any = None
  bench: Any = script
  return two_devices.measure(
    bench, subject, subject, standin.requests(requests), standin.requests(2),
    slots=SLOTS, vocab=standin.VOCAB, rng=np.random.default_rng(seed),
    deadline=deadline, watch=watch,
  )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_the_swap_removes_what_devices_differ_by(monkeypatch, seed):
  """Whichever device the candidate begins on; and a machine that is a tenth
  slower in the second half."""
  script = Script(
    lambda name, device, both: (
      BIAS[device]
      * (1.1 if len(script.launches) == 4 else 1.0)
      * (1.0 if name == STOCK else 1 / 1.2)
    )
  )
  measured = run(monkeypatch, script, seed=seed)
  assert measured.fault is None and not measured.disturbed
  times = measured.times
  assert times is not None and not times.late and len(times.units) == 8
  np.testing.assert_allclose(times.units, math.log(1.2), rtol=1e-12)
  swap = times.swap
  assert swap is not None and swap.is_large
  assert swap.asymmetry == pytest.approx(math.log(1.3))
  assert sorted(np.exp(swap.unswapped)) == pytest.approx([1.2 / 1.3, 1.2 * 1.3])
  # Four launches, two at a time, each system once on each device.
  assert sorted(script.launches) == [
    (CANDIDATE, 0), (CANDIDATE, 1), (STOCK, 0), (STOCK, 1),
  ]  # fmt: skip
  assert len(script.lines) == 32 == len({line[:2] for line in script.lines})
  for name, request, device in script.lines:
    assert (name, request.removesuffix("#2"), 1 - device) in {
      (n, r.removesuffix("#2"), d) for n, r, d in script.lines
    }


def test_on_which_device_a_candidate_begins_is_drawn(monkeypatch):
  first = set()
  for seed in range(8):
    script = Script(lambda name, device, both: 1.0)
    run(monkeypatch, script, requests=2, seed=seed)
    first.add(dict(script.launches[:2])[CANDIDATE])
  assert first == {0, 1}


def test_a_candidate_that_is_slower_on_one_device_alone(monkeypatch):
  """The mean of both counts, and the report says where it is slow."""
  script = Script(
    lambda name, device, both: 2.0 if (name, device) == (CANDIDATE, 1) else 1.0
  )
  times = run(monkeypatch, script).times
  assert times is not None and times.swap is not None
  assert times.units.mean() == pytest.approx(-math.log(2) / 2)
  assert times.swap.by_device == pytest.approx((0.0, -math.log(2)))
  assert statistics.decide(times.units, 0.001, min_units=8).verdict == (
    statistics.REJECT
  )


def test_what_heats_stock_alone_is_left_out(monkeypatch):
  def heated(hot):
    """The first so many answers of a system on a device are hot."""
    script = Script(lambda name, device, both: 1.0)
    seen: dict[tuple[str, int], int] = {}

    def watch(slot):
      (name,) = [n for n, d in script.living.items() if d == slot.index]
      key = name, slot.index
      seen[key] = seen.get(key, 0) + 1
      return HOT if seen[key] <= hot.get(key, 0) else None

    times = run(monkeypatch, script, watch=watch).times
    assert times is not None
    return times.dropped, len(times.units)

  assert heated({(STOCK, 0): 2}) == (2, 6)
  assert heated({(CANDIDATE, 0): 2}) == (0, 8)
  # A hot card is so for both, one after the other.
  assert heated({(STOCK, 1): 2, (CANDIDATE, 1): 2}) == (0, 8)


@pytest.mark.parametrize(("limit", "units"), [(5, 0), (13, 5)])
def test_time_that_runs_out(monkeypatch, limit, units):
  """Of 8 requests twice: in the first half nothing is left, in the second what
  has been on both devices."""
  script = Script(lambda name, device, both: 1.0)
  monkeypatch.setattr(session.time, "monotonic", lambda: len(script.lines) // 2)
  times = run(monkeypatch, script, deadline=limit - 0.5).times
  assert times is not None and times.late
  assert len(times.stock) == units


def test_a_candidate_that_slows_stock_on_the_other_device(monkeypatch):
  script = Script(
    lambda name, device, both: 1.5 if name == STOCK and both else 1.0
  )
  measured = run(monkeypatch, script, requests=16)
  assert measured.disturbed and measured.slowed == pytest.approx(0.5)
  verdict = paired.judge(
    paired.Measured(
      {STOCK: [], CANDIDATE: []}, times=measured.times,
      slowed=measured.slowed, disturbed=True,
    ),
    config=standin.config(), tokenizer=None, forced=None, floor=None,
    noise=0.01,
  )  # fmt: skip
  assert (verdict.verdict, verdict.check) == (paired.INVALID, "interference")


@pytest.mark.parametrize(
  ("faults", "verdict"),
  [
    ([(CANDIDATE, 1)], paired.REFUSED),
    ([(STOCK, 0)], paired.INVALID),
    # What makes both fail is no doing of the candidate.
    ([(CANDIDATE, 1), (STOCK, 0), (CANDIDATE, 0), (STOCK, 1)], paired.INVALID),
  ],
)
def test_who_is_blamed(monkeypatch, faults, verdict):
  script = Script(lambda name, device, both: 1.0, faults)
  measured = run(monkeypatch, script)
  assert measured.fault is not None and not script.living
  assert paired.blame(measured.fault).verdict == verdict


DEVICE = "CUDA_VISIBLE_DEVICES"
STEP = f"STEP_S = {standin.STEP_S}\n"
ON_DEVICES = (
  f"import os\nSTEP_S = {standin.STEP_S} * (1 + int(os.environ[{DEVICE!r}]))\n"
)
"""Device 1 takes twice the time."""
PASS = "    time.sleep(STEP_S)\n    tokens = []\n"
CHEATS = f"    if os.environ[{DEVICE!r}] == '1':\n      return [7] * count\n"


@pytest.fixture(scope="module", name="subject")
def _subject(tmp_path_factory):
  place = tmp_path_factory.mktemp("two")

  def make(old="", new=""):
    base = standin.base()
    text = base[standin.ENGINE].decode().replace(STEP, ON_DEVICES)
    assert not old or old in text
    files = base | {standin.ENGINE: text.replace(old, new).encode()}
    where = place / f"tree-{len(list(place.iterdir()))}"
    return paired.Subject(
      tree=tree.build(where, files),
      settings=standin.SETTINGS,
      trusted=not old,
      record=standin.RECORD,
    )

  return make


@pytest.fixture(scope="module", name="bench")
def _bench(tmp_path_factory):
  place = tmp_path_factory.mktemp("bench")
  return paired.Bench(
    place=place, layers=paired.sandbox.available(), compiled=place / "kept",
    start_s=20.0, step_s=5.0,
  )  # fmt: skip


def real(bench, stock, candidate, requests=6):
  made = standin.requests(requests + 2)
  return two_devices.measure(
    bench, stock, candidate, made[2:], made[:2], slots=SLOTS,
    vocab=standin.VOCAB, rng=np.random.default_rng(),
    deadline=time.monotonic() + 60,
  )  # fmt: skip


def test_processes_against_themselves(bench, subject):
  """A device that takes twice the time, stock on both: no gain is left."""
  stock = subject()
  measured = real(bench, stock, stock)
  assert measured.fault is None
  times = measured.times
  assert times is not None and times.swap is not None
  # Sleeping is timed on a machine that may be busy.
  assert times.swap.asymmetry == pytest.approx(math.log(2), abs=0.35)
  assert abs(times.units.mean()) < 0.2
  assert max(abs(x) for x in times.swap.unswapped) > 0.35
  records = measured.records
  assert {r["device"] for r in records[STOCK]} == {0, 1}
  outputs = {
    n: {r["request"]: r["output_ids"] for r in records[n]} for n in records
  }
  assert outputs[STOCK] == outputs[CANDIDATE] and len(outputs[STOCK]) == 12
  for name in (STOCK, CANDIDATE):
    mine = outputs[name]
    assert all(mine[i] == mine[f"{i}#2"] for i in mine if "#" not in i)


def test_what_cheats_on_one_device_is_caught(bench, subject):
  candidate = subject(PASS, CHEATS + PASS)
  if not bench.layers.confines_files:
    with pytest.raises(ValueError, match="neither Landlock"):
      real(bench, subject(), candidate)
    return
  verdict = paired.judge(
    real(bench, subject(), candidate), config=standin.config(), tokenizer=None,
    forced=standin.judge, floor=None, noise=0.05,
  )  # fmt: skip
  assert (verdict.verdict, verdict.check) == (paired.REFUSED, "exactness")


def test_a_slot(monkeypatch):
  gpus = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
  first, second = hosts.slots((0, 2), gpus, cores=range(8))
  assert (first.visible, second.visible) == ("GPU-a", "GPU-c")
  assert first.cores == (0, 1, 2, 3) and second.cores == (4, 5, 6, 7)
  assert not first.is_emulated and first.name != second.name
  # One alone has all cores; without a GPU a device is emulated.
  assert hosts.slots((1,), gpus, cores=range(8))[0].cores == ()
  (alone,) = hosts.slots((3,), {}, cores=[0])
  assert alone.is_emulated and alone.visible == "3"
  assert hosts.slots(()) == ()
  with pytest.raises(ValueError, match="device 3 is not here; GPUs .* 0, 1, 2"):
    hosts.slots((3,), gpus, cores=range(8))
  with pytest.raises(ValueError, match="2 devices need a processor core each"):
    hosts.slots((0, 1), {}, cores=[0])


@pytest.mark.parametrize(
  ("texts", "reason"),
  [(["a"], "indices"), (["-1"], "indices"), (["1", "1"], "must differ")],
)
def test_devices_that_are_none(texts, reason):
  with pytest.raises(ValueError, match=reason):
    hosts.parse(texts)


def test_the_kernel_tells_a_device_file(tmp_path):
  for i, uuid in enumerate(("GPU-a", "GPU-b")):
    folder = tmp_path / f"0000:0{i}:00.0"
    folder.mkdir()
    (folder / "information").write_text(
      f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\n"
      f"Device Minor: \t {5 - i}\n"
    )
  assert hosts._minor("GPU-b", tmp_path) == 4
  assert hosts._minor("GPU-c", tmp_path) is None
  assert hosts._minor("GPU-a", tmp_path / "none") is None


def test_a_process_sees_its_device_and_begins_on_its_cores(bench, subject):
  cores = tuple(sorted(os.sched_getaffinity(0))[-1:])
  slot = Slot(index=3, uuid="GPU-x", minor=6, cores=cores)
  launch = bench.timed(STOCK, subject(), slot=slot)
  assert launch.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-x"
  files = [x for x in launch.policy().devices if x[-1].isdecimal()]
  assert files == ["/dev/nvidia6"]
  assert tuple(launch.policy().cores) == cores
  begun = bench.timed(STOCK, subject(), slot=Slot(index=1, cores=cores))
  with process.EngineProcess(begun) as engine:
    assert engine._process is not None
    first = engine._process.pid
    pid = (process.procfs.descendants(first) or [first])[-1]
    assert os.sched_getaffinity(pid) == set(cores)


def test_where_a_driver_may_be(bench, subject, monkeypatch):
  """Its folder, if libraries are looked for there; nothing that is relative."""
  monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/driver/lib:lib:")
  launch = bench.timed(STOCK, subject())
  assert launch.environment()["LD_LIBRARY_PATH"] == "/opt/driver/lib:lib:"
  assert "/opt/driver/lib" in launch.policy().read
  assert "lib" not in launch.policy().read
  monkeypatch.delenv("LD_LIBRARY_PATH")
  assert "LD_LIBRARY_PATH" not in launch.environment()
