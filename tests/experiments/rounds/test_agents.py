"""Agents: plain search, and a program in a clone."""

import json
import subprocess
import sys
import time

import pytest

from experiments.agents.command import Command
from experiments.agents.protocol import Limits, Task, join
from experiments.agents.search import Search
from memory import patches
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

FILE = "specpilot_jax/decoding/a.py"


def task(option=None, factor="tau") -> Task:
  return Task(id=f"{factor}/{option}", factor=factor, option=option, bound=0.5)


def test_search_proposes_what_options_can_be_set_to(tmp_path):
  agent = Search(sampled=False, drafter=True)
  directions = list(agent.tasks())
  assert ("tau", "acceptance") not in directions  # Only where it samples.
  assert {"tree", "num_drafts", "weights"} <= {name for _, name in directions}
  every = []
  for factor, option in directions:
    session = agent.propose(task(option, factor), tmp_path, Limits())
    assert session.proposals, option
    assert len(session.proposals) <= 8
    for proposal in session.proposals:
      system = registry.parse_options(proposal.options)
      assert option in registry.changed(system)
      every.append(proposal.id)
  assert len(every) >= 6 and len(set(every)) == len(every)
  # An option that a chain does not have comes with a tree.
  depth = agent.propose(task("tree_depth"), tmp_path, Limits())
  assert all("tree=" in p.options for p in depth.proposals)
  assert not agent.propose(task(None), tmp_path, Limits()).proposals
  plain = {name for _, name in Search(sampled=True, drafter=False).tasks()}
  assert "tree" not in plain and "weights" in plain


def test_join():
  assert join(["a=1,b=2", "", " b = 3 ,c=4"]) == "a=1,b=3,c=4"
  assert join([]) == ""


@pytest.fixture(name="base")
def _base(tmp_path):
  base = tmp_path / "base"
  (base / "specpilot_jax/decoding").mkdir(parents=True)
  (base / FILE).write_text("one\ntwo\n")
  for args in (
    ("init", "-q"),
    ("add", "-A"),
    ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "base"),
  ):
    subprocess.run(["git", "-C", str(base), *args], check=True)
  return base


def program(tmp_path, code: str) -> list[str]:
  path = tmp_path / "agent.py"
  path.write_text(code)
  return [sys.executable, str(path), "{task}"]


def test_a_program_edits_files(base, tmp_path, monkeypatch):
  monkeypatch.setenv("SECRET", "1")
  code = (
    "import json, os, pathlib, subprocess, sys\n"
    "told = json.load(open(sys.argv[1]))\n"
    "assert json.load(sys.stdin) == told\n"
    "assert 'SECRET' not in os.environ\n"
    f"pathlib.Path({FILE!r}).write_text('one\\n2\\n')\n"
    "subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x',"
    " 'commit', '-qam', 'mine'], check=True)\n"
    "pathlib.Path('specpilot_jax/decoding/new.py').write_text('x = 1\\n')\n"
    "json.dump({'options': 'tree=best_first', 'hypothesis': 'why', 'usd':"
    " 0.25, 'prediction': 0.1}, open('../PROPOSAL.json', 'w'))\n"
    "print('done with', told['task']['id'])\n"
  )
  place = tmp_path / "work"
  place.mkdir()
  session = Command(program(tmp_path, code), base).propose(
    task("tree"), place, Limits()
  )
  assert session.usd == 0.25
  assert "done with tau/tree" in session.transcript
  (proposal,) = session.proposals
  assert (proposal.options, proposal.hypothesis) == ("tree=best_first", "why")
  changes = patches.parse(proposal.patch.encode())
  files = patches.apply({FILE: b"one\ntwo\n"}, changes)
  assert files == {
    FILE: b"one\n2\n",
    "specpilot_jax/decoding/new.py": b"x = 1\n",
  }
  # The clone is its own: nothing of it is in the base.
  told = subprocess.run(
    ["git", "-C", str(base), "log", "--all", "--oneline"],
    capture_output=True, text=True,
  )  # fmt: skip
  assert len(told.stdout.splitlines()) == 1
  assert (base / FILE).read_text() == "one\ntwo\n"


def test_a_program_that_changes_nothing_and_says_no_price(base, tmp_path):
  session = Command(program(tmp_path, "print('hm')"), base).propose(
    task(), _new(tmp_path), Limits()
  )
  assert session.proposals == () and session.usd is None


def test_a_program_that_takes_too_long_is_killed_with_its_children(
  base, tmp_path
):
  code = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '60'])\n"
    "print('began', flush=True)\n"
    "time.sleep(60)\n"
  )
  began = time.monotonic()
  session = Command(program(tmp_path, code), base).propose(
    task(), _new(tmp_path), Limits(seconds=1)
  )
  assert time.monotonic() - began < 20
  assert "began" in session.transcript and "killed" in session.transcript


@pytest.mark.parametrize(
  ("said", "reason"),
  [
    ("{", "not JSON"),
    ("[]", "no JSON object"),
    ('{"options": 1}', "text"),
    ('{"options": "\\ud800"}', "UTF-8"),
    ('{"prediction": NaN}', "'prediction' must be a finite number"),
    ('{"prediction": 1e999}', "'prediction' must be a finite number"),
    (f'{{"prediction": 1{400 * "0"}}}', "'prediction' must be a finite"),
    ('{"usd": NaN}', "'usd' must be a finite number of 0 or more"),
    ('{"usd": -1}', "'usd' must be a finite number of 0 or more"),
    ('{"usd": true}', "'usd' must be a finite number of 0 or more"),
  ],
)
def test_a_program_that_says_nonsense(base, tmp_path, said, reason):
  code = f"open('../PROPOSAL.json', 'w').write({said!r})\nopen('a', 'w')\n"
  with pytest.raises(SpecPilotError, match=reason):
    Command(program(tmp_path, code), base).propose(
      task(), _new(tmp_path), Limits()
    )


def test_changes_that_are_not_text(base, tmp_path):
  code = f"open({FILE!r}, 'wb').write(b'caf\\xe9\\n')\n"
  with pytest.raises(SpecPilotError, match="changes: git diff: .* not UTF-8"):
    Command(program(tmp_path, code), base).propose(
      task(), _new(tmp_path), Limits()
    )


def test_commands_that_cannot_be_run(base, tmp_path):
  with pytest.raises(SpecPilotError, match="empty"):
    Command("", base)
  with pytest.raises(SpecPilotError, match="not-a-program"):
    Command("not-a-program", base).propose(task(), _new(tmp_path), Limits())
  with pytest.raises(SpecPilotError, match="git clone"):
    Command("true", tmp_path / "nothing").propose(
      task(), _new(tmp_path), Limits()
    )


def _new(tmp_path):
  place = tmp_path / f"work-{len(list(tmp_path.iterdir()))}"
  place.mkdir()
  return place


def test_patches_are_merged(base):
  files = {FILE: b"".join(b"%d\n" % i for i in range(30)), "x.py": b"x"}
  del files["x.py"]

  def patch(**changes: bytes) -> bytes:
    new = dict(files)
    for name, data in changes.items():
      new[f"specpilot_jax/decoding/{name}.py"] = data
    return patches.render(files, new)

  first = patch(a=files[FILE].replace(b"\n2\n", b"\ntwo\n"), n=b"n = 1")
  second = patch(a=files[FILE].replace(b"\n27\n", b"\nlate\n"))
  both = patches.apply(
    files, patches.parse(patches.merge(files, first, second))
  )
  assert both[FILE] == files[FILE].replace(b"\n2\n", b"\ntwo\n").replace(
    b"\n27\n", b"\nlate\n"
  )
  assert both["specpilot_jax/decoding/n.py"] == b"n = 1"
  assert patches.merge(files, b"", first) == first
  third = patch(a=files[FILE].replace(b"\n2\n", b"\nzwei\n"))
  with pytest.raises(patches.Conflict, match="both change line"):
    patches.merge(files, first, third)
  with pytest.raises(patches.Conflict, match="both add it"):
    patches.merge(files, first, patch(n=b"n = 2\n"))
  json.dumps(both[FILE].decode())
