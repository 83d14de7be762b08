"""What a process is kept from: files, the network, other processes.

Run as a program, this file confines itself and then becomes another program:

    python -I -S sandbox.py '{"read": [...], "write": [...], ...}' PROGRAM ...

It needs the standard library alone and no privilege. Layers, each used where
the kernel has it and told where it has not:

- Landlock (Linux 5.13; network from ABI 4, signals and abstract sockets from
  ABI 6): files outside the lists cannot be opened, other processes neither
  traced nor signalled, no TCP connection made. Inherited by every child.
- Namespaces (as root, or where the system allows user namespaces): of the
  network, with nothing in it, so that no address can be reached by whatever
  protocol; of processes, so that no other can be named (to be stopped, or put
  on another core), and whatever is left dies with the first; of System V memory
  and message queues, which would outlive it.
- /dev/shm is an empty one, gone with the process, where it can be mounted;
  elsewhere there is none under Landlock.
- bubblewrap, where it is installed: a root without anything that is not listed.
- No capability is left to root. Core dumps and files have a limit. The process
  dies with the one that started it.

System calls and flags: linux/landlock.h, linux/prctl.h.
"""

import ctypes
import dataclasses
import functools
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_DEATH_SIGNAL, _DROP_BOUNDING, _NO_NEW_PRIVS = 1, 24, 38
_CAPABILITIES = 64

# MS_*: linux/mount.h.
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1 << 1, 1 << 2, 1 << 3
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_MEMORY, _MEMORY_BYTES = "/dev/shm", 1 << 30

# LANDLOCK_ACCESS_FS_*: bits 0 to 12 in ABI 1, refer 13 in 2, truncate 14 in 3,
# ioctl_dev 15 in 5.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP = 0b11  # Bind and connect, from ABI 4.
_SCOPES = 0b11  # Abstract Unix sockets and signals, from ABI 6.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """What a process may do.

  Attributes:
    read: files and folders that it may read and execute.
    write: folders in which it may do everything.
    devices: device files that it may read, write and control.
    max_file_bytes: largest file that it may write.
    cores: of the processor on which it begins; none for all. A process may
      choose others: this keeps the honest out of each other's way.
    network: whether it may use the network.
    landlock, namespaces: whether to use these; the caller knows from
      `available` that they are there.
  """

  read: Sequence[str]
  write: Sequence[str]
  devices: Sequence[str] = ()
  max_file_bytes: int = 1 << 32
  cores: Sequence[int] = ()
  network: bool = False
  landlock: bool = True
  namespaces: bool = True

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Layers:
  """What this machine has to isolate with.

  Attributes:
    landlock: ABI; 0 where the kernel has none.
    namespaces: whether those of network and processes can be made.
    bubblewrap: its path; None where it is not installed or does not run.
  """

  landlock: int
  namespaces: bool
  bubblewrap: str | None

  @property
  def confines_files(self) -> bool:
    return self.landlock > 0 or self.bubblewrap is not None

  @property
  def confines_network(self) -> bool:
    # Landlock alone refuses TCP, not other protocols.
    return self.namespaces or self.bubblewrap is not None

  def statement(self) -> list[str]:
    """One line per layer, for the record: enforced, or not and why."""
    lines = []
    if self.landlock:
      lines.append(
        f"files: Landlock ABI {self.landlock}"
        + (", TCP refused" if self.landlock >= 4 else "")
        + (", signals refused" if self.landlock >= 6 else "")
      )
      if self.landlock < 6:
        lines.append(
          f"signals to other processes: NOT refused, Landlock ABI"
          f" {self.landlock} is below 6"
        )
    else:
      lines.append("files: NOT confined, this kernel has no Landlock")
    if self.namespaces:
      lines.append("network: a namespace of its own, empty")
      lines.append("processes and shared memory: namespaces of their own")
    else:
      lines.append(
        "processes: NOT hidden, no namespace can be made; one that leaves its"
        " group may live on, and so may System V memory"
      )
      tcp = "TCP alone" if self.landlock >= 4 else "nothing"
      lines.append(
        f"network: NOT cut off, no namespace can be made; {tcp} is refused"
      )
    if self.bubblewrap:
      lines.append(f"bubblewrap: {self.bubblewrap}")
    else:
      lines.append("bubblewrap: not here")
    return lines

  def as_dict(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "statement": self.statement()}


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
  """The kernel's Landlock ABI; 0 where there is none."""
  if not sys.platform.startswith("linux"):
    return 0
  abi = _libc().syscall(_CREATE_RULESET, None, 0, _VERSION)
  return max(abi, 0)


def command(policy: Policy, program: Sequence[str]) -> list[str]:
  """The command line that runs a program under a policy."""
  return [
    sys.executable, "-I", "-S", "-B", os.path.abspath(__file__),
    policy.to_json(), *program,
  ]  # fmt: skip


@functools.cache
def available() -> Layers:
  """The layers of this machine, each tried out."""
  no_more = Policy(read=(), write=(), landlock=False)
  found = shutil.which("bwrap")
  if found and not _runs([found, *_BWRAP_PROBE]):
    found = None
  namespaces = hasattr(os, "unshare") and _runs(command(no_more, ["/bin/true"]))
  return Layers(landlock_abi(), namespaces, found)


_BWRAP_PROBE = ("--ro-bind", "/", "/", "--unshare-net", "--", "/bin/true")


def _runs(program: Sequence[str]) -> bool:
  try:
    done = subprocess.run(
      program, capture_output=True, stdin=subprocess.DEVNULL, timeout=20
    )
  except (OSError, subprocess.SubprocessError):
    return False
  return done.returncode == 0


def bubblewrap(bwrap: str, policy: Policy) -> list[str]:
  """A command line before the program's: a root of the listed paths alone."""
  args = [
    bwrap, "--die-with-parent", "--unshare-ipc", "--unshare-pid",
    "--proc", "/proc", "--dev", "/dev",
  ]  # fmt: skip
  if not policy.network:
    args.append("--unshare-net")
  for path in policy.read:
    # /proc is bubblewrap's own.
    if os.path.exists(path) and not path.startswith("/proc"):
      args += ["--ro-bind", path, path]
  for path in policy.write:
    args += ["--bind", path, path]
  for path in policy.devices:
    if os.path.exists(path):
      args += ["--dev-bind", path, path]
  return [*args, "--"]


def _unshare(*, network: bool) -> None:
  """Leaves the network (unless it is to be had) and System V objects, and the
  process namespace with the next fork."""
  flags = os.CLONE_NEWPID | os.CLONE_NEWIPC
  if not network:
    flags |= os.CLONE_NEWNET
  uid, gid = os.getuid(), os.getgid()
  if uid != 0:
    flags |= os.CLONE_NEWUSER
  os.unshare(flags)
  if uid != 0:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _private_memory() -> bool:
  """Mounts an empty /dev/shm that this process and its children alone have.

  Returns:
    Whether it could: containers often may make namespaces, but not mount.
  """
  libc, options = _libc(), f"mode=1777,size={_MEMORY_BYTES}".encode()
  try:
    os.unshare(os.CLONE_NEWNS)
  except OSError:
    return False
  # Nothing that is mounted here is to be seen by those outside.
  if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
    return False
  safe = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
  return not libc.mount(b"tmpfs", _MEMORY.encode(), b"tmpfs", safe, options)


def _become_the_first_process() -> None:
  """Returns in a child that is the first of its namespace; waits for it here.

  What the child forks dies with it, whatever sessions it made.
  """
  child = os.fork()
  if not child:
    _die_with_parent()
    return
  _, status = os.waitpid(child, 0)
  os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _die_with_parent() -> None:
  _libc().prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _drop_capabilities() -> None:
  for capability in range(_CAPABILITIES):
    _libc().prctl(_DROP_BOUNDING, capability, 0, 0, 0)


def _restrict(policy: Policy) -> None:
  """Puts this process under Landlock, for good."""
  libc, abi = _libc(), landlock_abi()
  if abi < 1:
    raise OSError("this kernel has no Landlock")
  handled = (1 << 13) - 1
  for since, bit in ((2, 13), (3, 14), (5, 15)):
    if abi >= since:
      handled |= 1 << bit
  attributes = struct.pack(
    "QQQ", handled, _TCP if abi >= 4 and not policy.network else 0,
    _SCOPES if abi >= 6 else 0,
  )  # fmt: skip
  # An older kernel refuses a structure that is longer than its own.
  size = 24 if abi >= 6 else 16 if abi >= 4 else 8
  ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
  if ruleset < 0:
    raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
  readable = _EXECUTE | _READ_FILE | _READ_DIR
  for paths, access in (
    (policy.read, readable),
    (policy.write, handled & ~_IOCTL_DEV),
    (policy.devices, _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEV),
  ):
    for path in paths:
      if not os.path.exists(path):
        continue
      allowed = access & handled
      if not os.path.isdir(path):
        allowed &= _OF_FILES
      fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
      rule = struct.pack("=Qi", allowed, fd)
      if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
      os.close(fd)
  if libc.syscall(_RESTRICT_SELF, ruleset, 0):
    raise OSError(ctypes.get_errno(), "landlock_restrict_self")
  os.close(ruleset)


def confine(policy: Policy) -> None:
  """Puts this process, and all that it becomes, under a policy.

  Raises:
    OSError: a layer that was asked for cannot be had; nothing may run then.
  """
  _die_with_parent()
  if policy.cores:
    os.sched_setaffinity(0, policy.cores)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  limit = (policy.max_file_bytes, policy.max_file_bytes)
  resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  if policy.namespaces:
    _unshare(network=policy.network)
    if _private_memory():
      policy = dataclasses.replace(policy, write=[*policy.write, _MEMORY])
    _become_the_first_process()
  _drop_capabilities()  # Root's alone: others have none to drop.
  if _libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
  if policy.landlock:
    _restrict(policy)


def main() -> None:
  """Confines this process and becomes the program."""
  policy = Policy(**json.loads(sys.argv[1]))
  confine(policy)
  os.execve(sys.argv[2], sys.argv[2:], dict(os.environ))


if __name__ == "__main__":
  main()
