"""This checkout with a mechanism taken out of its engine, and who brings it
back: a round of code, through every gate.

    python -m tests.experiments.rounds.stripped FOLDER

writes a repository whose engine has no best-first trees (FOLDER/checkout), the
recorded proposals that a round is to judge (FOLDER/proposals.jsonl) and a
program that edits files (FOLDER/agent.py). Two rounds are then

    cd FOLDER/checkout
    python -m experiments.main --flagfile=cpu_smoke.flags --job=round \\
      --agents=replay --proposals=../proposals.jsonl --proposals_per_task=2 \\
      --temperature=1 --output_dir=../one
    python -m experiments.main --flagfile=cpu_smoke.flags --job=round \\
      --agents=command --agent_command="python $PWD/../agent.py" \\
      --agent_readable=$PWD/../agent.py --champion=../one --temperature=1 \\
      --output_dir=../two

At temperature 1 stock verifies far more drafts than it accepts, so that the
mechanism gains most on a processor.
"""

import ast
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.agents.protocol import Proposal
from experiments.controller import tree
from memory import patches

POLICY = "specpilot_jax/decoding/policy.py"
REGISTRY = "specpilot_jax/mechanisms/registry.py"
STEP = "specpilot_jax/decoding/step.py"
TREE = "specpilot_jax/decoding/tree.py"
ACCEPT = "specpilot_jax/decoding/accept.py"

FUNCTIONS = {
  POLICY: ("of_tree", "tree_of"),
  TREE: ("best_first", "marginal"),
}
"""What builds the trees; their shapes stay, which the cost model reads."""
OPTIONS = ("tree", "node_budget", "tree_depth")
SETTINGS = "tree=best_first,node_budget=8,tree_depth=5"
"""Of the recorded proposal: a processor pays for each row of a pass."""
ENVELOPES = "ENVELOPES = (16, ", "ENVELOPES = (8, 16, "
"""Rows that trees may have, without and with those of the proposal."""
AGENT = '''"""A scripted coding agent: it edits one line and says what for."""

import json
import pathlib
import sys

OLD = "rows = min(n for n in ENVELOPES if n >= nodes)"

task = json.load(sys.stdin)["task"]
print(f"asked for {task['id']}, on a champion with {task['champion']!r}")
if task["id"] == "tau/open":
  path = pathlib.Path("specpilot_jax/decoding/policy.py")
  text = path.read_text()
  assert text.count(OLD) == 1
  path.write_text(text.replace(OLD, "rows = nodes"))
  said = {
    "options": "node_budget=6,tree_depth=5",
    "hypothesis": "a pass of as many rows as nodes costs a processor less",
    "prediction": 0.05,
  }
  pathlib.Path("../PROPOSAL.json").write_text(json.dumps(said))
'''


def _without(text: str, functions: Sequence[str]) -> str:
  """Source without some functions, of modules or of classes."""
  lines, gone = text.splitlines(keepends=True), set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef) and node.name in functions:
      gone.update(range(node.lineno - 1, node.end_lineno or node.lineno))
  assert gone, functions
  return "".join(line for i, line in enumerate(lines) if i not in gone)


def _without_options(text: str) -> str:
  """The registry without some options, and without what names their values."""
  lines, gone = text.splitlines(keepends=True), set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Option":
      told = {k.arg: ast.unparse(k.value) for k in node.keywords}
      if ast.literal_eval(told["name"]) in OPTIONS:
        gone.update(range(node.lineno - 1, node.end_lineno or node.lineno))
  text = "".join(line for i, line in enumerate(lines) if i not in gone)
  return _replaced(text, '    requires=("tree=chain",),\n', "")


def _replaced(text: str, old: str, new: str) -> str:
  assert text.count(old) == 1, old
  return text.replace(old, new)


def _branch(text: str) -> str:
  """The source of the step that builds trees."""
  start = text.index("    if self.policy.tree != configs.CHAIN:\n")
  end = text.index("    chain = draft_lib.chain(", start)
  return text[start:end]


def strip(files: Mapping[str, bytes]) -> dict[str, bytes]:
  """Sources without best-first trees.

  Args:
    files: of `tree.read_base`.
  """
  text = {path: files[path].decode() for path in (*FUNCTIONS, REGISTRY, STEP)}
  for path, functions in FUNCTIONS.items():
    text[path] = _without(text[path], functions)
  text[REGISTRY] = _without_options(text[REGISTRY])
  text[STEP] = text[STEP].replace(_branch(text[STEP]), "")
  return dict(files) | {path: t.encode() for path, t in text.items()}


def proposals(files: Mapping[str, bytes]) -> list[Proposal]:
  """What a round over the stripped sources is to judge.

  A mechanism that was found before, as code, with trees of so few rows as pay
  on a processor; and a cheat that would be faster: it takes a draft that
  nothing verified.
  """
  base = strip(files)
  narrow = _replaced(files[POLICY].decode(), *ENVELOPES)
  cheat = _replaced(
    base[ACCEPT].decode(),
    "agrees = agrees | (index == 0)",
    "agrees = agrees | ((index < 2) & (index < nodes.count))",
  )
  return [
    Proposal(
      task="tau/open",
      options=SETTINGS,
      patch=patches.render(base, {**files, POLICY: narrow.encode()}).decode(),
      hypothesis="a tree of the best candidates accepts more than a chain",
      prediction=0.15,
    ),
    Proposal(
      task="tau/open",
      patch=patches.render(base, {**base, ACCEPT: cheat.encode()}).decode(),
      hypothesis="one draft more is nearly always right",
      prediction=0.2,
    ),
  ]


def write(folder: Path, root: Path = tree.ROOT) -> None:
  """The checkout and the proposals; see the module."""
  checkout = folder / "checkout"
  whole = subprocess.run(
    ["git", "-C", str(root), "archive", "HEAD"], capture_output=True, check=True
  )
  checkout.mkdir(parents=True)
  with tarfile.open(fileobj=io.BytesIO(whole.stdout)) as archive:
    archive.extractall(checkout, filter="data")
  files = tree.read_base(checkout)
  for path, data in strip(files).items():
    if data != files[path]:
      (checkout / path).write_bytes(data)
  for command in (
    ("init", "-q"),
    ("add", "--all", "--force"),
    ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "stripped"),
  ):
    subprocess.run(["git", "-C", str(checkout), *command], check=True)
  lines = [json.dumps(p.as_dict()) + "\n" for p in proposals(files)]
  (folder / "proposals.jsonl").write_text("".join(lines))
  (folder / "agent.py").write_text(AGENT)


if __name__ == "__main__":
  write(Path(sys.argv[1]).absolute())
