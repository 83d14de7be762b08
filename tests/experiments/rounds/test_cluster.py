"""Exploring on a local cluster: two actors at once, and one that is killed."""

import functools
import os
import signal

import pytest

from experiments import leases
from experiments.hosts import Slot
from experiments.rounds import job, phases
from experiments.rounds.cluster import Cluster, ClusterSettings, slot_of
from experiments.rounds.log import Budget, Log
from specpilot_jax.errors import SpecPilotError
from tests.experiments.rounds import explored, scripted


def test_the_device_of_an_actor():
  gpus = {0: "GPU-a", 1: "GPU-b"}
  assert slot_of(3, None, {}) == Slot(index=3)
  for visible in ("1", "GPU-b", "1,0"):
    assert slot_of(0, visible, gpus).uuid == "GPU-b"
  for visible in (None, "", "2"):
    with pytest.raises(SpecPilotError, match="its host has 0, 1"):
      slot_of(0, visible, gpus)


def _no_world(slot):
  raise AssertionError(f"nothing explores on {slot}")


def test_what_a_cluster_needs(monkeypatch):
  with pytest.raises(SpecPilotError, match="--cluster needs --devices"):
    job.RoundSettings(cluster=ClusterSettings())
  with pytest.raises(SpecPilotError, match="got 0"):
    Cluster(_no_world, ClusterSettings(actors=0))
  monkeypatch.setitem(__import__("sys").modules, "ray", None)
  with pytest.raises(SpecPilotError, match="needs the extra cluster"):
    Cluster(_no_world, ClusterSettings(actors=1))


class World(explored.World):
  """Screens on the cluster, and tests with the host to itself."""

  def __init__(self, folder, cluster):
    scripted.World.__init__(self, folder / "paid")
    self._folder, self.explorers = folder, cluster


def test_a_round_on_a_local_cluster(tmp_path, monkeypatch):
  reason = "Ray is not installed: pip install 'specpilot-jax[cluster]'"
  ray = pytest.importorskip("ray", reason=reason)
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))
  monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
  folder = tmp_path / "round"
  folder.mkdir()
  make = functools.partial(explored.child, folder, 0.0)
  own = Slot(index=9)
  with Cluster(make, ClusterSettings(actors=2), own) as cluster:
    log = Log(folder / "events.jsonl")
    result = phases.Round(
      log, World(folder, cluster), [scripted.Proposer()], Budget(log),
      scripted.plan(workers=2), folder / "agents",
    ).run()  # fmt: skip
    log.close()
    assert result == scripted.run(tmp_path / "alone")
    # Both were at work, in processes of their own; see `explored.meet`.
    begun = {path.name for path in folder.glob("begun-*")}
    assert begun == {"begun-0", "begun-1"}
    with pytest.raises(SpecPilotError, match="^no prompts$"):
      cluster.call("fail")
    with (
      cluster.device() as slot,
      pytest.raises(SpecPilotError, match="leased"),
    ):
      assert slot == own
      with leases.pair([own], deadline=0.0):
        pass
    first = cluster.call("where")
    assert first["pid"] != os.getpid()
    os.kill(first["pid"], signal.SIGKILL)
    told = [cluster.call("where") for _ in range(4)]
    lost = [x for x in told if x.get("kind") == "infra"]
    assert len(lost) == 1 and "ended" in lost[0]["reason"]
    assert first["pid"] not in {x.get("pid") for x in told}
  assert not ray.is_initialized()
  with leases.pair([own], deadline=0.0):
    pass
