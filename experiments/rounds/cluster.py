"""Who explores, on a cluster: a Ray actor per device, on any of its hosts.

It stands in for `explorers.Explorers`: an actor holds a world of its own and
leases its device, on its own host, while it measures. What all hosts need is
the same checkout at the same path, and a run folder that all of them see.
Tests stay with the round, on the devices of its host.

An actor ends with the round, in whatever way that ends. One that died is
replaced at the next call.

Needs the extra `cluster`.
"""

import contextlib
import dataclasses
import os
import queue
import sys
from collections.abc import Generator, Mapping
from typing import Any

from experiments import environment, hosts, leases
from experiments.controller import tree
from experiments.hosts import Slot
from experiments.rounds.explorers import Maker
from specpilot_jax import extras
from specpilot_jax.errors import SpecPilotError


def slot_of(number: int, visible: str | None, gpus: Mapping[int, str]) -> Slot:
  """The device of an actor, as its own host names it.

  Args:
    number: of the actor, which is an emulated device's where there is no GPU.
    visible: CUDA_VISIBLE_DEVICES as the cluster set it for the actor.
    gpus: uuid by index of the actor's host.

  Raises:
    SpecPilotError: the cluster gave it none of the host's GPUs.
  """
  if not gpus:
    return Slot(index=number)
  named = [x for x in (visible or "").split(",") if x]
  found = [i for i, uuid in gpus.items() if named[:1] in ([str(i)], [uuid])]
  if not found:
    raise SpecPilotError(
      f"the cluster gave an actor device {visible!r}, its host has"
      f" {', '.join(map(str, sorted(gpus)))}"
    )
  return hosts.slots((found[0],), gpus)[0]


class _Actor:
  """What runs on a host of the cluster."""

  def __init__(self, number: int, make: Maker):
    # Actors share a host's variables with nobody: engines get their own.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    self._slot = slot_of(number, visible, environment.gpu_uuids())
    self._make = make
    self._stack = contextlib.ExitStack()
    self._world: Any = None

  def call(self, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    """(`done`, result), or (`error`, one line)."""
    try:
      if self._world is None:
        self._world = self._stack.enter_context(self._make(self._slot))
      return "done", getattr(self._world, method)(*args)
    except SpecPilotError as e:
      return "error", str(e)
    except Exception as e:
      return "error", f"{type(e).__name__}: {e}"

  def close(self) -> None:
    self._stack.close()


LOCAL = "local"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings:
  """A cluster.

  Attributes:
    address: of a running one, HOST:PORT or `auto`; `local` begins one on this
      host, which ends with the round.
    actors: devices that explore.
  """

  address: str = LOCAL
  actors: int = 2


@dataclasses.dataclass
class _Worker:
  """A place for an actor; the actor may be replaced."""

  number: int
  actor: Any = None


class Cluster:
  """Actors of a cluster; use as a context. See `explorers.Explorers`.

  Args:
    make: of a world, on each device.
    settings: of the cluster.
    own: device of this host, for what is no exploring; None takes no lease.

  Raises:
    SpecPilotError: the extra is not installed; there is no such cluster.
  """

  def __init__(
    self, make: Maker, settings: ClusterSettings, own: Slot | None = None
  ):
    count, address = settings.actors, settings.address
    if count < 1:
      raise SpecPilotError(f"a cluster explores with actors, got {count}")
    self._ray = extras.load("ray", "cluster", "--cluster")
    self._make, self._own = make, own
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
      where |= {"num_cpus": count, "include_dashboard": False}
    # Its hosts have the checkout: nothing is packed and sent.
    paths = os.pathsep.join([str(tree.ROOT), *sys.path])
    try:
      self._ray.init(
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        **where,
      )
    except (OSError, RuntimeError, ValueError) as e:
      raise SpecPilotError(f"cluster {address}: {e}") from None
    # All hosts are of this one's kind: what they measure is compared.
    gpus = int(bool(environment.gpu_uuids()))
    self._remote = self._ray.remote(num_cpus=1, num_gpus=gpus)(_Actor)
    self._workers = [_Worker(number) for number in range(count)]
    self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in self._workers:
      self._free.put(worker)

  def __len__(self) -> int:
    return len(self._workers)

  def call(self, method: str, *args: Any) -> dict[str, Any]:
    """Calls a method on the next device that is free; waits for one.

    Returns:
      Its result; one of kind `infra` where its actor died.

    Raises:
      SpecPilotError: what the method raised, in one line.
    """
    worker = self._free.get()
    try:
      if worker.actor is None:
        worker.actor = self._remote.remote(worker.number, self._make)
      kind, value = self._ray.get(worker.actor.call.remote(method, args))
    except self._ray.exceptions.RayError as e:
      worker.actor = None
      told = " ".join(str(e).split())[:200]
      return {
        "kind": "infra",
        "reason": f"the actor that explores as {worker.number} ended: {told}",
      }
    finally:
      self._free.put(worker)
    if kind == "error":
      raise SpecPilotError(value)
    return value

  @contextlib.contextmanager
  def device(self) -> Generator[Slot | None]:
    """A device of this host for something else, leased to this process."""
    with leases.explore(self._own):
      yield self._own

  def close(self) -> None:
    """Ends all actors, and a cluster that was begun here."""
    alive = [w.actor for w in self._workers if w.actor is not None]
    with contextlib.suppress(self._ray.exceptions.RayError):
      self._ray.get([actor.close.remote() for actor in alive], timeout=20)
    self._ray.shutdown()

  def __enter__(self) -> "Cluster":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()
