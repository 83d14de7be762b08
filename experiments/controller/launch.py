"""How an engine process is started, and what it may touch."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import hosts
from experiments.controller import sandbox
from experiments.controller.tree import Tree
from specpilot_jax.errors import SpecPilotError

_BOOT = (
  "import runpy, sys; sys.path.insert(0, sys.argv.pop(1));"
  " runpy.run_module('experiments.controller.worker', run_name='__main__',"
  " alter_sys=True)"
)
SYSTEM_FILES = (
  "/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc", "/sys",
  "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd",
  "/etc/group", "/etc/alternatives",
)  # fmt: skip
DEVICES = (
  "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
  "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
)  # fmt: skip


LIBRARIES = "LD_LIBRARY_PATH"


def python_folders() -> list[str]:
  """Where Python and its packages are."""
  return sorted({sys.prefix, sys.base_prefix, sys.exec_prefix})


def library_folders() -> list[str]:
  """Where this process looks for shared libraries, beside the usual folders."""
  parts = os.environ.get(LIBRARIES, "").split(os.pathsep)
  return sorted({part for part in parts if os.path.isabs(part)})


def device_files(slot: hosts.Slot | None) -> list[str]:
  """Device files of a process that has this device, or all."""
  minor = None if slot is None else slot.minor
  numbers = range(8) if minor is None else [minor]
  return [*DEVICES, *(f"/dev/nvidia{i}" for i in numbers)]


def check_out_of_reach(places: Sequence[Path], readable: Sequence[str]) -> None:
  """Refuses what would let a process read the sealed prompts.

  Args:
    places: where they are: the checkout, the data folder.
    readable: files and folders that the process may read.

  Raises:
    SpecPilotError: names the place and the folder that it lies in.
  """
  for place in places:
    for path in readable:
      if place.resolve().is_relative_to(Path(path).resolve()):
        raise SpecPilotError(
          f"{place} lies in {path}, which a confined process may read, and has"
          " the sealed prompts: take a checkout or a data folder elsewhere"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """How an engine process is started.

  Attributes:
    name: for people and for records.
    tree: what it runs from.
    settings: see `worker.Server.load`.
    place: a folder of its own; `temporary` and `data` in it are removed when it
      ends.
    readable: model files that it needs beside its tree.
    assets: those of them that it looks for in its data folder, by path there.
    compiled: folder of compiled executables that outlives it, of its tree
      alone. None starts without any.
    keeps: whether it writes to that folder. Otherwise it has a copy of its
      own in `place`, so that nothing passes from one launch to the next.
    autotuned: table of choices of the compiler, read only.
    table: file in `place` to write such a table to.
    slot: its device, the only one that it sees, and its cores; None shows all.
    platform: JAX's; None is its own choice.
    memory_fraction: of the device, on a GPU.
    layers: what this machine isolates with.
    start_s, step_s: longest wait for the engine to be ready, and for a frame.
  """

  name: str
  tree: Tree
  settings: Mapping[str, Any]
  place: Path
  readable: Sequence[Path] = ()
  assets: Mapping[str, Path] = dataclasses.field(default_factory=dict)
  compiled: Path | None = None
  keeps: bool = False
  autotuned: Path | None = None
  table: str | None = None
  slot: hosts.Slot | None = None
  platform: str | None = None
  memory_fraction: float = 0.45
  layers: sandbox.Layers
  start_s: float = 600.0
  step_s: float = 60.0

  @property
  def temporary(self) -> Path:
    return self.place / "tmp"

  @property
  def data(self) -> Path:
    return self.place / "data"

  @property
  def own_processes(self) -> int:
    """Descendants that the process has without any doing of the engine."""
    if self.layers.bubblewrap is not None:
      return 2  # bubblewrap's first process, and what it runs.
    return 1 if self.layers.namespaces else 0

  def environment(self) -> dict[str, str]:
    """All variables of the process; nothing is inherited but where shared
    libraries are: a card's driver may be found by that alone."""
    own = str(self.temporary)
    flags = []
    if self.autotuned is not None:
      flags.append(f"--xla_gpu_load_autotune_results_from={self.autotuned}")
    if self.table is not None:
      path = self.temporary / self.table
      flags.append(f"--xla_gpu_dump_autotune_results_to={path}")
    variables = {
      "PATH": "/usr/bin:/bin",
      "LANG": "C.UTF-8",
      "HOME": own,
      "TMPDIR": own,
      "SPECPILOT_DATA": str(self.data),
      "XLA_CLIENT_MEM_FRACTION": f"{self.memory_fraction:g}",
    }
    if LIBRARIES in os.environ:
      variables[LIBRARIES] = os.environ[LIBRARIES]
    if flags:
      variables["XLA_FLAGS"] = " ".join(flags)
    if self.platform is not None:
      variables["JAX_PLATFORMS"] = self.platform
    if self.slot is not None:
      variables["CUDA_VISIBLE_DEVICES"] = self.slot.visible
    return variables

  def policy(self) -> sandbox.Policy:
    """What it may touch."""
    read = [*SYSTEM_FILES, *python_folders(), *library_folders()]
    read.append(str(self.tree.root))
    own = (*self.readable, *self.assets.values())
    read += [str(path.resolve()) for path in own]
    if self.autotuned is not None:
      read.append(str(self.autotuned))
    write = [str(self.temporary), str(self.data)]
    if self.compiled is not None and self.keeps:
      write.append(str(self.compiled))
    slot = self.slot
    return sandbox.Policy(
      read=sorted(read),
      write=write,
      devices=device_files(slot),
      landlock=self.layers.landlock > 0,
      namespaces=self.layers.namespaces and self.layers.bubblewrap is None,
      cores=() if slot is None else slot.cores,
    )

  def command(self, commands: int, replies: int) -> list[str]:
    """The command line, with the two pipes' descriptors."""
    policy = self.policy()
    program = [
      sys.executable, "-I", "-B", "-c", _BOOT, str(self.tree.root),
      str(commands), str(replies),
    ]  # fmt: skip
    line = sandbox.command(policy, program)
    if self.layers.bubblewrap is None:
      return line
    visible = dataclasses.replace(
      policy, read=[*policy.read, str(Path(sandbox.__file__).resolve())]
    )
    return [*sandbox.bubblewrap(self.layers.bubblewrap, visible), *line]
