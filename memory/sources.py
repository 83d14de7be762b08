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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memory import patches
from memory.files import parse_json
from memory.patches import PatchError
from specpilot_jax.errors import SpecPilotError

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "specpilot_jax")
REGISTRY = "specpilot_jax/mechanisms/registry.py"
CONFIGS = "specpilot_jax/configs.py"


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
    files = parse_json(gzip.decompress(data))
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


def _parse(files: Mapping[str, bytes]) -> ast.AST:
  try:
    return ast.parse(files.get(REGISTRY, b""))
  except (SyntaxError, ValueError):
    raise SpecPilotError(f"{REGISTRY} is no Python") from None


def registered(files: Mapping[str, bytes]) -> set[str]:
  """Names of the options that a tree registers, read from its source.

  >>> text = b'OPTIONS = (Option(name="tree"), Option(name="view"))'
  >>> sorted(registered({REGISTRY: text}))
  ['tree', 'view']

  Raises:
    SpecPilotError: a registry that is no Python.
  """
  parsed = _parse(files)
  return {option["name"] for option in _options(parsed)}


def registration(
  files: Mapping[str, bytes], names: Iterable[str]
) -> list[dict[str, Any]]:
  """Options of a tree as records have them, read from its source.

  Domain and default are as they are written there.

  >>> text = b'o = Option(name="a", domain=Count(lowest=1), factor="tau")'
  >>> (option,) = registration({REGISTRY: text}, ["a"])
  >>> option["domain"], option["factor"], option["requires"]
  ('Count(lowest=1)', 'tau', [])

  Raises:
    SpecPilotError: a registry that is no Python, or without the option.
  """
  defaults = _defaults(files.get(CONFIGS, b""))
  there = {option["name"]: option for option in _options(_parse(files))}
  found = []
  for name in names:
    if name not in there:
      raise SpecPilotError(f"{REGISTRY}: no option {name!r}")
    told = there[name]
    found.append(
      {
        "name": name,
        "default": defaults.get(name, ""),
        **{k: str(told.get(k, "")) for k in ("domain", "summary")},
        **{k: str(told.get(k, "")) for k in ("factor", "exactness")},
        **{k: list(told.get(k, ())) for k in ("requires", "conflicts")},
      }
    )
  return found


def _options(parsed: ast.AST) -> Iterator[dict[str, Any]]:
  """The keywords of each `Option`; what is no literal as it is written."""
  for node in ast.walk(parsed):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Option":
      option: dict[str, Any] = {}
      for keyword in node.keywords:
        if keyword.arg is not None:
          try:
            option[keyword.arg] = ast.literal_eval(keyword.value)
          except ValueError:
            option[keyword.arg] = ast.unparse(keyword.value)
      if "name" in option:
        yield option


def _defaults(configs: bytes) -> dict[str, str]:
  """Defaults of the fields of `SystemConfig`, as they are written."""
  return {
    ast.unparse(line.target): ast.unparse(line.value)
    for node in ast.walk(ast.parse(configs))
    if isinstance(node, ast.ClassDef) and node.name == "SystemConfig"
    for line in node.body
    if isinstance(line, ast.AnnAssign) and line.value is not None
  }


def changed(
  before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> list[str]:
  """Paths that differ, in order."""
  paths = sorted(before.keys() | after.keys())
  return [p for p in paths if before.get(p) != after.get(p)]


def patch(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
  """The change as a patch; empty where nothing changed."""
  return patches.render(before, after)
