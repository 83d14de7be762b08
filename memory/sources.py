"""Source trees: what patches apply to, read from a checkout or from a base.

Source is the Python of the engine and its kernels. Weights, prompts and
everything that measures are not: a tree from the memory runs on those of the
checkout at hand.
"""

import ast
import gzip
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from memory import patches
from memory.patches import PatchError
from specpilot_jax.errors import SpecPilotError

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "specpilot_jax")
REGISTRY = "specpilot_jax/mechanisms/registry.py"


def read(root: Path = ROOT) -> dict[str, bytes]:
  """The sources of a checkout or an installation, by path.

  Raises:
    SpecPilotError: a package is missing, or a symbolic link is among them.
  """
  found: dict[str, bytes] = {}
  for package in PACKAGES:
    if not (root / package).is_dir():
      raise SpecPilotError(f"{root}: no {package} is there")
    for folder, folders, names in os.walk(root / package):
      folders[:] = sorted(f for f in folders if f != "__pycache__")
      for name in folders + names:
        if (Path(folder) / name).is_symlink():
          raise SpecPilotError(f"{Path(folder) / name} is a symbolic link")
      for name in names:
        path = Path(folder) / name
        if path.suffix == ".py":
          found[path.relative_to(root).as_posix()] = path.read_bytes()
  return dict(sorted(found.items()))


def check_source(path: str) -> None:
  """Refuses what is no source; `patches.check_path` is stricter.

  >>> check_source("specpilot_jax/generate.py")

  Raises:
    PatchError: path and reason.
  """
  tops = "|".join(PACKAGES)
  if not re.fullmatch(rf"({tops})/(\w+/)*\w+\.py", path):
    raise PatchError(
      f"{path}: no source; a source is a .py of {', '.join(PACKAGES)}"
    )


def pack(files: Mapping[str, bytes]) -> bytes:
  """A tree in compact form; the same tree gives the same bytes under one zlib.

  >>> unpack(pack({"specpilot_jax/a.py": b"x = 1"}))
  {'specpilot_jax/a.py': b'x = 1'}
  """
  text = json.dumps({p: d.decode() for p, d in sorted(files.items())})
  return gzip.compress(text.encode(), 9, mtime=0)


def unpack(data: bytes) -> dict[str, bytes]:
  """Reads `pack`.

  Raises:
    SpecPilotError: damaged, or not of source files.
  """
  try:
    files = json.loads(gzip.decompress(data))
    tree = {path: text.encode() for path, text in files.items()}
  except (OSError, EOFError, ValueError, AttributeError, TypeError, zlib.error):
    raise SpecPilotError("damaged: no packed tree") from None
  for path in tree:
    check_source(path)
  return tree


def write(files: Mapping[str, bytes], root: Path) -> None:
  """Writes a tree below a folder that is empty or not there.

  Raises:
    SpecPilotError: something is there.
  """
  if root.exists() and (not root.is_dir() or any(root.iterdir())):
    raise SpecPilotError(f"{root} is not an empty folder")
  for path, data in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)


def registered(files: Mapping[str, bytes]) -> set[str]:
  """Names of the options that a tree registers, read from its source.

  >>> text = b'OPTIONS = (Option(name="tree"), Option(name="view"))'
  >>> sorted(registered({REGISTRY: text}))
  ['tree', 'view']

  Raises:
    SpecPilotError: a registry that is no Python.
  """
  try:
    parsed = ast.parse(files.get(REGISTRY, b""))
  except (SyntaxError, ValueError):
    raise SpecPilotError(f"{REGISTRY} is no Python") from None
  names = set()
  for node in ast.walk(parsed):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Option":
      for keyword in node.keywords:
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
          names.add(str(keyword.value.value))
  return names


def changed(
  before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> list[str]:
  """Paths that differ, in order."""
  paths = sorted(before.keys() | after.keys())
  return [p for p in paths if before.get(p) != after.get(p)]


def patch(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
  """The change as a patch; empty where nothing changed."""
  return patches.render(before, after)
