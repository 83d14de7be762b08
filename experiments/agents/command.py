"""The agent that is a program: any coding agent with a command line.

It runs in a clone of its own, with the task as JSON on standard input and in
`TASK.json` beside the clone. What it changed in the clone is its proposal; what
it printed is the transcript. A clone, not a worktree: worktrees share their
branches and stashes with each other.
"""

import json
import os
import shlex
import signal
import subprocess
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
from specpilot_jax.errors import SpecPilotError

MAX_TRANSCRIPT = 1 << 16
PROPOSAL = "PROPOSAL.json"
"""File beside the clone in which the program may say more: options,
hypothesis, prediction, usd."""

_GIT = (
  "git", "-c", "core.hooksPath=/dev/null", "-c", "protocol.file.allow=always",
  "-c", "core.fsmonitor=false",
)  # fmt: skip
_GIT_ENVIRONMENT = {
  "PATH": os.environ.get("PATH", os.defpath),
  "GIT_CONFIG_NOSYSTEM": "1",
  "GIT_CONFIG_GLOBAL": "/dev/null",
  "GIT_TERMINAL_PROMPT": "0",
}


class Command:
  """Runs a program per task.

  Args:
    command: its command line; `{task}` stands for the path of TASK.json.
    base: repository that is cloned; its committed state counts.
    environment: variables that the program gets beside PATH and HOME.
  """

  name = "command"
  paid = True

  def __init__(
    self,
    command: str | Sequence[str],
    base: Path,
    environment: Sequence[str] = (),
  ):
    parts = shlex.split(command) if isinstance(command, str) else command
    if not parts:
      raise SpecPilotError("the command of the agent is empty")
    self._command = list(parts)
    self._base = base
    self._environment = tuple(environment)

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    clone = workspace / "clone"
    _git("clone", "--quiet", "--no-hardlinks", str(self._base), str(clone))
    start = _git("-C", str(clone), "rev-parse", "HEAD").strip()
    path = workspace / "TASK.json"
    told = {
      "task": task.as_dict(),
      "seconds": limits.seconds,
      "usd": limits.usd,
    }
    path.write_text(json.dumps(told, indent=1) + "\n")
    command = [part.replace("{task}", str(path)) for part in self._command]
    transcript = self._run(command, clone, json.dumps(told), limits.seconds)
    said = _said(workspace / PROPOSAL)
    # Also what it committed, and files that are new.
    _git("-C", str(clone), "add", "--all")
    try:
      patch = _git(
        "-C", str(clone), "diff", "--cached", "--no-renames", "--no-color",
        "--no-ext-diff", "--no-textconv", start,
      )  # fmt: skip
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
      transcript=transcript,
    )

  def _run(
    self, command: list[str], clone: Path, task: str, seconds: float
  ) -> str:
    variables = {
      name: os.environ[name]
      for name in ("PATH", "HOME", "LANG", *self._environment)
      if name in os.environ
    }
    with tempfile.TemporaryFile() as out:
      try:
        process = subprocess.Popen(
          command,
          cwd=clone,
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
        process.communicate(task.encode(), timeout=seconds)
      except subprocess.TimeoutExpired:
        late = f"\n[killed after {seconds:g} s]"
      except BrokenPipeError:
        process.wait()
      finally:
        try:
          os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
          pass
        process.wait()
      size = out.seek(0, os.SEEK_END)
      out.seek(max(0, size - MAX_TRANSCRIPT))
      return out.read().decode("utf-8", "replace") + late


def _git(*args: str) -> str:
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
  try:
    return done.stdout.decode("utf-8")
  except UnicodeDecodeError:
    raise SpecPilotError(f"{_name(args)}: what it says is not UTF-8") from None


def _name(args: Sequence[str]) -> str:
  """The git command among its arguments, without the folder."""
  return f"git {args[2] if args[0] == '-C' else args[0]}"


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
