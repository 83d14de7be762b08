"""The fetch command: on wheels made here, and on what it really fetched."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from experiments import fetch
from specpilot_jax import paths
from specpilot_jax.errors import SpecPilotError

CONTENT = b'{"prompt": "hello"}\n'
WHEEL = "toy_prompts-1.0-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
  """A wheel that pip accepts; importing its package fails."""
  info = "toy_prompts-1.0.dist-info"
  files = {
    "toy_prompts/__init__.py": b"raise AssertionError('imported')\n",
    "toy_prompts/data.jsonl": content,
    f"{info}/LICENSE": b"The licence.\n",
    f"{info}/METADATA": (
      b"Metadata-Version: 2.1\nName: toy-prompts\nVersion: 1.0\n"
      b"Requires-Dist: a-package-that-is-not-there\n"
    ),
    f"{info}/WHEEL": (
      b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ),
  }
  files[f"{info}/RECORD"] = "".join(
    f"{name},,\n" for name in (*files, f"{info}/RECORD")
  ).encode()
  path = folder / WHEEL
  with zipfile.ZipFile(path, "w") as archive:
    for name, data in files.items():
      # A fixed date, so that the bytes are the same every time.
      archive.writestr(zipfile.ZipInfo(name), data)
  return path


class Toy:
  """A toy asset, its wheel, and a download that counts its calls."""

  def __init__(self, folder: Path):
    self.wheel = write_wheel(folder)
    self.downloads = 0
    self.asset = fetch.Asset(
      name="toy",
      summary="one prompt",
      licence="MIT",
      package="toy-prompts",
      version="1.0",
      wheel_sha256=fetch.sha256(self.wheel),
      wheel_bytes=self.wheel.stat().st_size,
      member="toy_prompts/data.jsonl",
      file_sha256=hashlib.sha256(CONTENT).hexdigest(),
      licence_members=("toy_prompts-1.0.dist-info/LICENSE",),
    )

  def download(self, asset, folder, progress):
    del asset
    self.downloads += 1
    progress(self.wheel.stat().st_size)
    copy = folder / self.wheel.name
    copy.write_bytes(self.wheel.read_bytes())
    return copy

  def fetch(self, **changes) -> bool:
    asset = dataclasses.replace(self.asset, **changes)
    return fetch.fetch(asset, download=self.download)


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
  folder = tmp_path / "data"
  monkeypatch.setenv("SPECPILOT_DATA", str(folder))
  return folder


@pytest.fixture
def toy(tmp_path, monkeypatch, data) -> Toy:
  monkeypatch.setitem(paths.ASSET_FILES, "toy", "toy/data.jsonl")
  index = tmp_path / "index"
  index.mkdir()
  return Toy(index)


def tree(folder: Path) -> set[str]:
  return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_keeps_the_file_and_its_licence_and_nothing_else(toy, data):
  assert toy.fetch()
  assert tree(data) == {"toy/data.jsonl", "toy/LICENSE"}
  assert paths.asset_path("toy").read_bytes() == CONTENT


def test_a_second_fetch_downloads_nothing(toy):
  assert toy.fetch()
  assert not toy.fetch()
  assert toy.downloads == 1


@pytest.mark.parametrize("damage", ["truncated", "changed", "no licence"])
def test_what_is_damaged_is_fetched_again(toy, data, damage):
  toy.fetch()
  file = paths.asset_path("toy")
  if damage == "truncated":
    file.write_bytes(CONTENT[:-3])
  elif damage == "changed":
    file.write_bytes(CONTENT.replace(b"hello", b"hallo"))
  else:
    (data / "toy/LICENSE").unlink()
  assert toy.fetch()
  assert file.read_bytes() == CONTENT
  assert tree(data) == {"toy/data.jsonl", "toy/LICENSE"}


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_changes_nothing(toy, data, field):
  toy.fetch()
  file = paths.asset_path("toy")
  file.write_bytes(b"what was there")
  with pytest.raises(SpecPilotError, match="SHA-256 .* expected 000") as error:
    toy.fetch(**{field: "0" * 64})
  assert "\n" not in str(error.value)
  assert "toy" in str(error.value)
  assert file.read_bytes() == b"what was there"
  assert tree(data) == {"toy/data.jsonl", "toy/LICENSE"}


def test_a_wheel_without_the_file_is_named(toy, data):
  with pytest.raises(SpecPilotError, match="no readable toy_prompts/gone"):
    toy.fetch(member="toy_prompts/gone.jsonl")
  assert tree(data) == set()


def test_a_wheel_that_is_no_zip_is_named(toy, data):
  toy.wheel.write_bytes(b"not a zip file")
  with pytest.raises(SpecPilotError, match=f"{WHEEL} holds no readable"):
    toy.fetch(wheel_sha256=fetch.sha256(toy.wheel))
  assert tree(data) == set()


def test_an_unwritable_folder_is_named(toy, data):
  data.write_text("a file where the folder should be")
  with pytest.raises(SpecPilotError, match=f"cannot write to {data}/toy"):
    toy.fetch()


def test_leftovers_of_a_killed_fetch_go_after_a_day(toy, data):
  toy.fetch()
  old, running = data / "toy/.fetch-old", data / "toy/.fetch-running"
  for folder in (old, running):
    folder.mkdir()
  day_ago = time.time() - 90_000
  os.utime(old, (day_ago, day_ago))
  paths.asset_path("toy").unlink()
  assert toy.fetch()
  assert not old.exists()
  assert running.exists()


@pytest.fixture
def offline_pip(toy, monkeypatch) -> Toy:
  """pip looks at the toy's folder and at no index."""
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", toy.wheel.parent.as_uri())
  return toy


def test_downloads_with_pip(offline_pip, data):
  assert fetch.fetch(offline_pip.asset)
  assert tree(data) == {"toy/data.jsonl", "toy/LICENSE"}


def test_needs_no_installed_pip(offline_pip, monkeypatch):
  find_spec = fetch.importlib.util.find_spec
  monkeypatch.setattr(
    fetch.importlib.util,
    "find_spec",
    lambda name: None if name == "pip" else find_spec(name),
  )
  command, variables = fetch._pip_command()
  version = subprocess.run(
    [*command, "--version"],
    env=os.environ | variables,
    capture_output=True,
    text=True,
    check=True,
  )
  assert variables["PYTHONPATH"] in version.stdout
  assert fetch.fetch(offline_pip.asset)


def test_a_package_that_pip_does_not_find_is_named(offline_pip, data):
  asset = dataclasses.replace(offline_pip.asset, version="9.9")
  with pytest.raises(SpecPilotError) as error:
    fetch.fetch(asset)
  assert "toy: pip could not download toy-prompts==9.9" in str(error.value)
  assert "No matching distribution" in str(error.value)
  assert "\n" not in str(error.value)
  assert tree(data) == set()


def test_no_network_is_said_in_one_line(toy, monkeypatch):
  # A closed port of this machine stands for a network that is not there.
  monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
  monkeypatch.setenv("PIP_RETRIES", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
  monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
  with pytest.raises(SpecPilotError) as error:
    fetch.fetch(toy.asset)
  assert str(error.value) == (
    "toy: pip could not download toy-prompts==1.0: "
    "no connection to the package index"
  )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "experiments.fetch", *arguments],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[2],
  )


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((), ("no name given", "smollm2", "humaneval", "mtbench", "gsm8k")),
    (("nothing",), ("unknown name 'nothing'", "smollm2")),
    (("smollm2", "nothing"), ("unknown name 'nothing'",)),
    (("--fast",), ("--fast",)),
  ],
)
def test_a_bad_command_line_is_one_line(data, arguments, words):
  result = run(*arguments)
  assert result.returncode == 2
  assert result.stderr.startswith("error: ")
  assert result.stderr.count("\n") == 1
  for word in words:
    assert word in result.stderr
  assert not data.exists()


def test_a_bad_data_folder_is_one_line(data):
  data.write_text("a file where the folder should be")
  result = run("humaneval")
  assert result.returncode == 2
  assert result.stderr.startswith("error: humaneval: cannot write to")
  assert result.stderr.count("\n") == 1


def test_list_says_what_is_there(data, capsys):
  assert fetch.main(["--list"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == list(fetch.ASSETS)
  assert all(line.endswith("not fetched") for line in lines)


def test_main_fetches_each_name_once(toy, monkeypatch, capsys):
  monkeypatch.setattr(fetch, "ASSETS", {"toy": toy.asset})
  real = fetch.fetch
  monkeypatch.setattr(
    fetch, "fetch", lambda asset, progress: real(asset, progress, toy.download)
  )
  assert fetch.main(["toy", "toy"]) == 0
  assert toy.downloads == 1
  assert "toy: fetching (toy-prompts==1.0)" in capsys.readouterr().out
  paths.asset_path("toy").write_bytes(b"")
  assert fetch.main(["all"]) == 0
  assert "toy: damaged, fetching again" in capsys.readouterr().out


def test_every_asset_has_a_file_that_is_looked_for():
  assert set(fetch.ASSETS) == set(paths.ASSET_FILES)


@pytest.mark.parametrize("name", fetch.ASSETS)
def test_the_real_assets_are_intact(name):
  """Needs `python -m experiments.fetch all`; the error says so."""
  assert fetch.sha256(paths.asset_path(name)) == fetch.ASSETS[name].file_sha256
  assert not fetch.fetch(fetch.ASSETS[name], download=_no_download)


def _no_download(asset, folder, progress):
  raise AssertionError(f"{asset.name} was there")
