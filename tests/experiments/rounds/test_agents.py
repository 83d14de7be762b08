"""Agents: plain search, and a program in a clone."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from experiments.agents.command import Command
from experiments.agents.protocol import Limits, Task, join
from experiments.agents.search import Search
from experiments.controller import launch, sandbox
from experiments.hosts import Slot
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


def program(tmp_path, code: str, base, **more) -> Command:
  path = tmp_path / "agent.py"
  path.write_text(code)
  command = [sys.executable, str(path), "{task}"]
  return Command(command, base, readable=[path], **more)


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
  session = program(tmp_path, code, base).propose(task("tree"), place, Limits())
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
  session = program(tmp_path, "print('hm')", base).propose(
    task(), _new(tmp_path), Limits()
  )
  assert session.proposals == () and session.usd is None


def test_a_program_that_takes_too_long_is_killed_with_its_children(
  base, tmp_path
):
  code = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '60'])\n"
    "subprocess.Popen(['sleep', '61'], start_new_session=True)\n"
    "print('began', flush=True)\n"
    "time.sleep(60)\n"
  )
  began = time.monotonic()
  session = program(tmp_path, code, base).propose(
    task(), _new(tmp_path), Limits(seconds=1)
  )
  assert time.monotonic() - began < 20
  assert "began" in session.transcript and "killed" in session.transcript
  # Also one that left its group.
  for pid in filter(str.isdecimal, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
      assert file.read() != "sleep\x0061\x00"


REACHES = """
import json, os, pathlib, socket, subprocess, sys
reached = []
for name, code in json.loads(os.environ["REACHES"]).items():
  try:
    exec(code)
    reached.append(name)
  except OSError:
    pass
print("reached", reached)
"""


def test_a_program_is_confined(base, tmp_path, monkeypatch):
  """It has its folder, its variables and the network, and nothing else."""
  secret = tmp_path / "sealed.jsonl"
  secret.write_text("sealed")
  server = socket.create_server(("127.0.0.1", 0))
  reaches = {
    "own files": f"pathlib.Path({FILE!r}).write_text('1')",
    "home": "open(os.environ['HOME'] + '/x', 'w')",
    "the network": f"socket.create_connection({server.getsockname()!r}, 5)",
    "sealed prompts": f"open({str(secret)!r}).read()",
    "the base": f"open({str(base / FILE)!r}).read()",
    "records": f"open({str(tmp_path / 'noise.json')!r}, 'w')",
    "the checkout": f"open({__file__!r}).read()",
    "this process": f"os.kill({os.getpid()}, 0)",
  }
  monkeypatch.setenv("REACHES", json.dumps(reaches))
  agent = program(tmp_path, REACHES, base, environment=["REACHES"])
  with server:
    session = agent.propose(task(), _new(tmp_path), Limits())
  layers = sandbox.available()
  if not layers.confines_files:
    assert "NOT confined" in session.transcript
    return
  assert "confined to its folder" in session.transcript
  assert f"reached {list(reaches)[:3]}" in session.transcript


def test_an_unconfined_program_is_told(base, tmp_path):
  bare = sandbox.Layers(0, False, None)
  agent = program(tmp_path, "print('ran')", base, layers=bare)
  session = agent.propose(task(), _new(tmp_path), Limits())
  assert session.transcript.startswith("[the agent's program is NOT confined")
  assert "ran" in session.transcript


def test_no_prompts_and_no_history(base, tmp_path):
  """Of the base in its clone, where a sealed prompt was committed once."""
  withheld = base / "specpilot_jax/zoo/weights/prompts.jsonl"
  withheld.parent.mkdir(parents=True)
  withheld.write_text("sealed")
  for args in (
    ("add", "-A"),
    ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "more"),
  ):
    subprocess.run(["git", "-C", str(base), *args], check=True)
  code = (
    "import pathlib, subprocess\n"
    "print(sorted(str(p) for p in pathlib.Path('.').rglob('*.*')"
    " if '.git' not in p.parts))\n"
    "print(subprocess.run(['git', 'log', '--all', '--format=%s'],"
    " capture_output=True, text=True).stdout.split())\n"
  )
  session = program(tmp_path, code, base).propose(
    task(), _new(tmp_path), Limits()
  )
  assert f"[{FILE!r}]\n['base']" in session.transcript
  # What it was not given is no change of its own.
  assert session.proposals == ()


def test_what_it_configures_runs_nowhere_else(base, tmp_path):
  """Filters run when files are added: with its own data they would run here."""
  mark = tmp_path / "ran"
  code = (
    "import pathlib, subprocess\n"
    f"run = 'touch {mark}; cat'\n"
    "for name in ('clean', 'process', 'smudge'):\n"
    "  subprocess.run(['git', 'config', f'filter.x.{name}', run], check=True)\n"
    "subprocess.run(['git', 'config', 'core.fsmonitor', run], check=True)\n"
    "pathlib.Path('.gitattributes').write_text('* filter=x diff=x\\n')\n"
    f"pathlib.Path({FILE!r}).write_text('one\\n2\\n')\n"
  )
  session = program(tmp_path, code, base).propose(
    task(), _new(tmp_path), Limits()
  )
  (proposal,) = session.proposals
  assert "+2" in proposal.patch and not mark.exists()


def test_a_device_is_leased_to_a_program(base, tmp_path):
  cores = tuple(sorted(os.sched_getaffinity(0))[:1])
  slot = Slot(index=1, uuid="GPU-b", minor=1, cores=cores)
  code = (
    "import json, os, sys\nprint(os.environ['CUDA_VISIBLE_DEVICES'],"
    " json.load(sys.stdin)['device'], os.sched_getaffinity(0))\n"
  )
  session = program(tmp_path, code, base).propose(
    task(), _new(tmp_path), Limits(device=slot)
  )
  if sandbox.available().confines_files:
    assert f"GPU-b 1 {set(cores)}" in session.transcript
  else:
    assert "GPU-b 1" in session.transcript


def test_sealed_prompts_are_out_of_reach(base, tmp_path):
  with pytest.raises(SpecPilotError, match="is not there"):
    Command("true", base, readable=[tmp_path / "none"])
  with pytest.raises(SpecPilotError, match="has the sealed prompts"):
    Command(
      "true", base, readable=[tmp_path],
      layers=sandbox.Layers(7, True, None),
    )  # fmt: skip
  # An engine too: one that is installed among Python's packages.
  with pytest.raises(SpecPilotError, match="has the sealed prompts"):
    launch.check_out_of_reach([base], [str(tmp_path)])
  launch.check_out_of_reach([base], [str(base / "specpilot_jax")])


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
    program(tmp_path, code, base).propose(task(), _new(tmp_path), Limits())


def test_changes_that_are_not_text(base, tmp_path):
  code = f"open({FILE!r}, 'wb').write(b'caf\\xe9\\n')\n"
  with pytest.raises(SpecPilotError, match="changes: git diff: .* not UTF-8"):
    program(tmp_path, code, base).propose(task(), _new(tmp_path), Limits())


def test_commands_that_cannot_be_run(base, tmp_path):
  with pytest.raises(SpecPilotError, match="empty"):
    Command("", base)
  with pytest.raises(SpecPilotError, match="not-a-program"):
    Command("not-a-program", base).propose(task(), _new(tmp_path), Limits())
  with pytest.raises(SpecPilotError, match="git archive"):
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
