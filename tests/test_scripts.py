"""The interpreter choice of `scripts/_env.sh`, with interpreters made up."""

import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"
# What the script calls; the real PATH has interpreters of its own.
TOOLS = (
  "bash", "cat", "cksum", "cut", "dirname", "find", "flock", "grep", "ls",
  "mkdir", "rm", "tail", "tr",
)  # fmt: skip

GOOD = f'exec "{sys.executable}" "$@"'
# A pyenv shim of a version that is not selected.
SHIM = 'echo "pyenv: python3.12: command not found" >&2; exit 127'


def older(version: str, setup: str = "") -> str:
  """An interpreter that believes to be another one; runs `-c CODE [ARG]`."""
  tuple_ = ", ".join(version.split("."))
  return (
    f'shift; exec "{sys.executable}" -c \'import sys; '
    f'sys.version_info = ({tuple_}); {setup} exec(sys.argv.pop(1))\' "$@"'
  )


OLD = older("3.9.2")
FREE_THREADED = older(
  "3.14.0",
  "import sysconfig; sysconfig.get_config_var = lambda name: 1;",
)
NO_VENV = older("3.13.0", 'sys.modules["ensurepip"] = None;')


@pytest.fixture(name="place")
def _place(tmp_path):
  """A copy of the script in a tree of its own, and folders for programs."""
  (tmp_path / "scripts").mkdir()
  shutil.copy(SCRIPTS / "_env.sh", tmp_path / "scripts")
  (tmp_path / "tools").mkdir()
  for name in TOOLS:
    found = shutil.which(name)
    if found:
      (tmp_path / "tools" / name).symlink_to(found)
  (tmp_path / "bin").mkdir()
  return tmp_path


def add(path: pathlib.Path, body: str) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{body}\n")
  path.chmod(0o755)
  return path


def call(place, code: str, **variables) -> subprocess.CompletedProcess:
  source = f'set -euo pipefail; source "{place}/scripts/_env.sh"; '
  return subprocess.run(
    [shutil.which("bash") or "bash", "-c", source + code],
    env={
      "PATH": f"{place}/bin:{place}/tools",
      "HOME": str(place),
      "PYENV_ROOT": str(place / "pyenv"),
    }
    | variables,
    capture_output=True,
    text=True,
    timeout=60,
  )


def chosen(place, **variables) -> str:
  done = call(place, 'find_python; echo "$BASE_PYTHON"', **variables)
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


def test_the_first_that_runs_is_taken(place):
  add(place / "bin/python3.12", SHIM)
  newer = add(place / "bin/python3.13", GOOD)
  add(place / "bin/python3", GOOD)
  assert chosen(place) == str(newer)


def test_3_12_comes_first(place):
  add(place / "bin/python3.13", GOOD)
  add(place / "bin/python3", GOOD)
  tested = add(place / "bin/python3.12", GOOD)
  assert chosen(place) == str(tested)


@pytest.mark.parametrize("unfit", [SHIM, OLD, FREE_THREADED, NO_VENV])
def test_unfit_ones_are_passed_over(place, unfit):
  add(place / "bin/python3", unfit)
  good = add(place / "bin/python", GOOD)
  assert chosen(place) == str(good)


def test_pyenv_versions_behind_a_shim(place):
  add(place / "bin/python3.12", SHIM)
  add(place / "bin/python3", OLD)
  good = add(place / "pyenv/versions/3.12.4/bin/python3.12", GOOD)
  assert chosen(place) == str(good)


def test_the_users_choice_wins(place):
  add(place / "bin/python3.12", GOOD)
  mine = add(place / "mine/python", GOOD)
  assert chosen(place, PYTHON=str(mine)) == str(mine)


@pytest.mark.parametrize(
  ("body", "reason"),
  [
    (None, "is not there"),
    (SHIM, "it does not run"),
    (OLD, "3.9.2 is older than 3.12"),
    (FREE_THREADED, "free-threaded"),
    (NO_VENV, "lacks the venv module"),
  ],
)
def test_the_users_choice_is_not_replaced(place, body, reason):
  add(place / "bin/python3.12", GOOD)
  mine = place / "mine/python"
  if body:
    add(mine, body)
  done = call(place, "setup_venv dev", PYTHON=str(mine))
  assert done.returncode == 1 and done.stdout == ""
  assert done.stderr.startswith(f"error: PYTHON={mine}")
  assert reason in done.stderr and done.stderr.count("\n") == 1
  assert not (place / ".venv").exists()


@pytest.mark.parametrize("found", [{}, {"python3": OLD, "python3.12": SHIM}])
def test_none_at_all_is_one_line(place, found):
  for name, body in found.items():
    add(place / "bin" / name, body)
  done = call(place, "setup_venv dev")
  assert done.returncode == 1 and done.stdout == ""
  assert done.stderr.startswith("error: Python 3.12 or newer is needed, or uv")
  assert done.stderr.count("\n") == 1
  if not found:
    assert "(found no Python)" in done.stderr
  for name in found:
    assert f"{place}/bin/{name}: " in done.stderr
  assert not (place / ".venv").exists()
