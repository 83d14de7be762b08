"""The agent that is a program: any coding agent with a command line.

It runs in a repository of its own, with the task as JSON on standard input and
in `TASK.json` beside it. What it changed there is its proposal; what it printed
is the transcript. The repository has the base's committed files in one commit,
without the prompts, whose sealed half no agent may see, and without a history,
which would have them. A repository, not a worktree: worktrees share their
branches and stashes with each other.

The program is confined as engines are, but for the network, which a coding
agent needs: it may write its folder alone, and read that, the system, Python
and what `readable` names; with its process namespace ends all that it started.
Where the machine cannot confine it, its transcript says so.

Its changes are taken with a copy of the repository's data that it cannot
write: what it configured in its own (filters, hooks) runs nowhere else.
"""

import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.agents.protocol import (
  Limits,
  Proposal,
  Session,
  Task,
  number,
)
from experiments.controller import launch, procfs, sandbox, tree
from experiments.hosts import Slot
from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError

MAX_TRANSCRIPT = 1 << 16
PROPOSAL = "PROPOSAL.json"
"""File beside the repository in which the program may say more: options,
hypothesis, prediction, usd."""

_GIT = (
  "git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false",
  "-c", "user.name=base", "-c", "user.email=base@localhost",
  "-c", "commit.gpgSign=false",
)  # fmt: skip
_GIT_ENVIRONMENT = {
  "PATH": os.environ.get("PATH", os.defpath),
  "GIT_CONFIG_NOSYSTEM": "1",
  "GIT_CONFIG_GLOBAL": "/dev/null",
  "GIT_TERMINAL_PROMPT": "0",
}
_NETWORK_FILES = (
  "/etc/resolv.conf", "/etc/hosts", "/etc/ssl", "/etc/pki",
  "/etc/ca-certificates", "/etc/gai.conf", "/etc/host.conf", "/etc/services",
)  # fmt: skip


class Command:
  """Runs a program per task.

  Args:
    command: its command line; `{task}` stands for the path of TASK.json.
    base: repository that it begins with; its committed state counts.
    environment: variables that the program gets beside PATH and LANG.
    readable: files and folders that it needs: its own, and its credentials.
    layers: that confine it; those of this machine by default.

  Raises:
    SpecPilotError: an empty command; one of `readable` is not there, or holds
      the checkout or the data folder, which have the sealed prompts.
  """

  name = "command"
  paid = True

  def __init__(
    self,
    command: str | Sequence[str],
    base: Path,
    environment: Sequence[str] = (),
    readable: Sequence[Path] = (),
    layers: sandbox.Layers | None = None,
  ):
    parts = shlex.split(command) if isinstance(command, str) else command
    if not parts:
      raise SpecPilotError("the command of the agent is empty")
    self._command = list(parts)
    self._base = base
    self._environment = tuple(environment)
    self._layers = sandbox.available() if layers is None else layers
    for path in readable:
      if not path.exists():
        raise SpecPilotError(f"--agent_readable: {path} is not there")
    self._readable = [
      *launch.SYSTEM_FILES, *_NETWORK_FILES, *launch.python_folders(),
      *launch.library_folders(),
      *(str(path.resolve()) for path in readable),
    ]  # fmt: skip
    if self._layers.confines_files:
      launch.check_out_of_reach([base, paths.data_dir()], self._readable)

  def statement(self) -> str:
    """What confines the program, or what does not."""
    if not self._layers.confines_files:
      return (
        "the agent's program is NOT confined: this machine has neither Landlock"
        " nor bubblewrap; it may read what this user may, the sealed prompts"
        " included, and write it"
      )
    kept = "" if self._layers.namespaces or self._layers.bubblewrap else " NOT"
    return (
      "the agent's program is confined to its folder; it has the network;"
      f" what it starts does{kept} end with it for certain"
    )

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    workspace = workspace.absolute()
    with tempfile.TemporaryDirectory(prefix="specpilot-base-") as kept:
      clone, data = workspace / "clone", Path(kept) / "git"
      self._make(clone, data)
      path = workspace / "TASK.json"
      told = {
        "task": task.as_dict(),
        "seconds": limits.seconds,
        "usd": limits.usd,
        "device": None if limits.device is None else limits.device.index,
      }
      path.write_text(json.dumps(told, indent=1) + "\n")
      command = [part.replace("{task}", str(path)) for part in self._command]
      transcript = self._run(command, workspace, json.dumps(told), limits)
      said = _said(workspace / PROPOSAL)
      try:
        patch = self._changes(clone, data)
      except SpecPilotError as e:
        raise SpecPilotError(f"agent: its changes: {e}") from None
    usd = said.pop("usd", None)
    if usd is not None:
      usd = number(usd, f"agent: {PROPOSAL}: field 'usd'", least=0.0)
    fields = {
      name: said[name]
      for name in ("options", "hypothesis", "prediction")
      if name in said
    }
    proposals = ()
    if patch or fields.get("options"):
      one = Proposal.from_dict({"task": task.id, "patch": patch, **fields})
      proposals = (one,)
    return Session(
      proposals=proposals,
      usd=usd,
      transcript=f"[{self.statement()}]\n{transcript}",
    )

  def _make(self, clone: Path, data: Path) -> None:
    """A repository of the base's files, and a copy of its data."""
    whole = _git_bytes("-C", str(self._base), "archive", "HEAD")
    clone.mkdir()
    try:
      with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        for member in archive:
          if Path(member.name).name not in tree.WITHHELD:
            archive.extract(member, clone, filter="data")
    except (OSError, tarfile.TarError) as e:
      raise SpecPilotError(f"the agent's repository: {e}") from None
    _git("-C", str(clone), "init", "--quiet", "--template=")
    # What is committed may be ignored, too.
    _git("-C", str(clone), "add", "--all", "--force")
    _git("-C", str(clone), "commit", "--quiet", "--allow-empty", "-m", "base")
    shutil.copytree(clone / ".git", data)

  def _changes(self, clone: Path, data: Path) -> str:
    """All that is different now, committed or not, new files too."""
    place = (f"--git-dir={data}", f"--work-tree={clone}")
    # It may have put links in the place of folders.
    if clone.is_symlink() or not clone.is_dir():
      raise SpecPilotError("the repository is not there any more")
    _git("-C", str(clone), *place, "add", "--all")
    return _git(
      "-C", str(clone), *place, "diff", "--cached", "--no-renames",
      "--no-color", "--no-ext-diff", "--no-textconv", "HEAD",
    )  # fmt: skip

  def _program(
    self, command: list[str], workspace: Path, slot: Slot | None
  ) -> list[str]:
    """The command line, confined where that can be."""
    found = shutil.which(command[0])
    if found is None:
      raise SpecPilotError(f"agent {command[0]}: no such program")
    command = [found, *command[1:]]
    layers = self._layers
    if not layers.confines_files:
      return command
    policy = sandbox.Policy(
      read=sorted({*self._readable, found, str(Path(found).resolve())}),
      write=[str(workspace)],
      devices=launch.device_files(slot),
      landlock=layers.landlock > 0,
      namespaces=layers.namespaces and layers.bubblewrap is None,
      cores=() if slot is None else slot.cores,
      network=True,
    )
    line = sandbox.command(policy, command)
    if layers.bubblewrap is None:
      return line
    own = str(Path(sandbox.__file__).resolve())
    visible = [*policy.read, own]
    return [
      *sandbox.bubblewrap(
        layers.bubblewrap, dataclasses.replace(policy, read=visible)
      ),
      *line,
    ]

  def _run(
    self, command: list[str], workspace: Path, task: str, limits: Limits
  ) -> str:
    home = workspace / "home"
    home.mkdir()
    variables = {
      name: os.environ[name]
      for name in ("PATH", "LANG", launch.LIBRARIES, *self._environment)
      if name in os.environ
    }
    variables |= {"HOME": str(home), "TMPDIR": str(home)}
    # git stops at a file of the system that it may not read.
    variables["GIT_CONFIG_NOSYSTEM"] = "1"
    if limits.device is not None:
      variables["CUDA_VISIBLE_DEVICES"] = limits.device.visible
    with tempfile.TemporaryFile() as out:
      try:
        process = subprocess.Popen(
          self._program(command, workspace, limits.device),
          cwd=workspace / "clone",
          env=variables,
          stdin=subprocess.PIPE,
          stdout=out,
          stderr=subprocess.STDOUT,
          start_new_session=True,
        )
      except OSError as e:
        raise SpecPilotError(f"agent {command[0]}: {e.strerror}") from None
      late = ""
      try:
        process.communicate(task.encode(), timeout=limits.seconds)
      except subprocess.TimeoutExpired:
        late = f"\n[killed after {limits.seconds:g} s]"
      except BrokenPipeError:
        process.wait()
      finally:
        family = (
          procfs.Family(process.pid) if process.returncode is None else None
        )
        try:
          os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
          pass
        process.wait()
        if family is not None:
          family.kill()
          family.close()
      size = out.seek(0, os.SEEK_END)
      out.seek(max(0, size - MAX_TRANSCRIPT))
      return out.read().decode("utf-8", "replace") + late


def _git(*args: str) -> str:
  try:
    return _git_bytes(*args).decode("utf-8")
  except UnicodeDecodeError:
    raise SpecPilotError(f"{_name(args)}: what it says is not UTF-8") from None


def _git_bytes(*args: str) -> bytes:
  try:
    done = subprocess.run(
      [*_GIT, *args],
      capture_output=True,
      env=_GIT_ENVIRONMENT,
      timeout=120,
    )
  except (OSError, subprocess.SubprocessError) as e:
    raise SpecPilotError(f"git: {e}") from None
  if done.returncode:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise SpecPilotError(f"{_name(args)}: {lines[-1] if lines else 'failed'}")
  return done.stdout


def _name(args: Sequence[str]) -> str:
  """The git command among its arguments, without the folders."""
  rest = [x for x in args[2:] if not x.startswith(("--git-dir", "--work-tree"))]
  return f"git {rest[0]}"


def _said(path: Path) -> dict:
  if path.is_symlink() or not path.is_file():
    return {}
  try:
    said = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError):
    raise SpecPilotError(f"agent: {PROPOSAL} is not JSON") from None
  if not isinstance(said, dict):
    raise SpecPilotError(f"agent: {PROPOSAL} is no JSON object")
  return said
