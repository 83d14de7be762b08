"""Trees that engines run from: base + patch, known by their hashes.

A tree holds what an engine process needs and no more: the engine, the kernels,
and the worker that serves them. Prompts, tests and the controller are not in
it.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from memory import patches
from memory.manifest import Manifest, manifest_of
from specpilot_jax.errors import SpecPilotError

ROOT = Path(__file__).parents[2]

PACKAGES = ("pallas_kernels", "specpilot_jax")
WORKER = (
  "experiments/__init__.py",
  "experiments/controller/__init__.py",
  "experiments/controller/frames.py",
  "experiments/controller/worker.py",
)
PROTECTED = ("experiments", "memory", "pallas_kernels", "specpilot_jax")
WITHHELD = ("prompts.jsonl", "prompts_512.jsonl", "prompts_512.jsonl.gz")
"""Files of the packages that neither an engine nor an agent gets: prompts, the
sealed ones among them."""


def _walk(root: Path, top: str) -> list[str]:
  found = []
  for folder, folders, names in os.walk(root / top):
    folders[:] = sorted(f for f in folders if f != "__pycache__")
    for name in folders + names:
      path = Path(folder) / name
      if path.is_symlink():
        raise SpecPilotError(f"{path} is a symbolic link")
    for name in names:
      path = (Path(folder) / name).relative_to(root).as_posix()
      if not path.endswith((".pyc", ".pyo")):
        found.append(path)
  return sorted(found)


def read_base(root: Path = ROOT) -> dict[str, bytes]:
  """What a tree is made of, by path, from a checkout or an installation."""
  paths = [p for package in PACKAGES for p in _walk(root, package)]
  wanted = [p for p in paths if Path(p).name not in WITHHELD] + list(WORKER)
  return {path: (root / path).read_bytes() for path in wanted}


def protected(root: Path = ROOT) -> Manifest:
  """Everything that judges: it must not change while a candidate runs."""
  paths = [p for top in PROTECTED for p in _walk(root, top)]
  return manifest_of({path: (root / path).read_bytes() for path in paths})


@dataclasses.dataclass(frozen=True)
class Tree:
  """A tree on disk, not writable.

  Attributes:
    root: its folder.
    manifest: what base + patch gives; `check` compares the disk with it.
  """

  root: Path
  manifest: Manifest

  def check(self) -> None:
    """Refuses a tree that is not what it was made as.

    Raises:
      SpecPilotError: names the first file that differs.
    """
    files = {}
    for path in _walk(self.root, "."):
      files[Path(path).as_posix()] = (self.root / path).read_bytes()
    wrong = self.manifest.differences(manifest_of(files))
    if wrong:
      raise SpecPilotError(f"tree {self.root.name}: {wrong[0]}")


def build(
  root: Path,
  base: Mapping[str, bytes],
  changes: Sequence[patches.FileChange] = (),
) -> Tree:
  """Writes base + patch below a folder that is not there yet.

  Raises:
    patches.PatchError: the patch does not fit the base.
  """
  files = patches.apply(base, changes) if changes else dict(base)
  try:
    root.mkdir(parents=True)
    for path, data in files.items():
      (root / path).parent.mkdir(parents=True, exist_ok=True)
      (root / path).write_bytes(data)
      (root / path).chmod(0o444)
  except OSError as e:
    raise SpecPilotError(f"{root}: {e.strerror}") from None
  for folder, _, _ in os.walk(root):
    os.chmod(folder, 0o555)
  tree = Tree(root, manifest_of(files))
  tree.check()
  return tree


def remove(root: Path) -> None:
  """Removes a tree and whatever is left in it."""
  for folder, _, _ in os.walk(root):
    os.chmod(folder, 0o755)
  shutil.rmtree(root, ignore_errors=True)
