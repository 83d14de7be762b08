"""`python -m memory`."""

import json
import shutil

import pytest

from experiments.agents.protocol import Limits, Task
from experiments.agents.replay import Replay
from memory import __main__ as program
from memory import commands, patches, sources
from memory.store import Store
from tests.memory import kit


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory):
  root = tmp_path_factory.mktemp("memory")
  kit.build(root)
  return root


@pytest.fixture(name="run")
def _run(root, tmp_path, capsys):
  """Runs a command line on a copy; its lines, or its one line of error."""
  place = tmp_path / "memory"
  shutil.copytree(root, place)

  def run(*argv: str) -> list[str]:
    program.main(["memory", *argv, f"--memory={place}"])
    return capsys.readouterr().out.splitlines()

  def refused(*argv: str) -> str:
    with pytest.raises(SystemExit) as e:
      program.main(["memory", *argv, f"--memory={place}"])
    assert e.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line

  run.refused, run.root = refused, place  # type: ignore
  return run


def test_list_show_and_graph(run):
  lines = run("list")
  assert len(lines) == 5
  assert "mechanism  tau" in lines[1] and "+30.0 %" in lines[1]
  assert "slower" in lines[4] and "a product of its own" in lines[4]
  assert len(run("list", "--kind=negative")) == 1
  third = lines[2].split()[0]
  shown = run("show", third[:9])
  assert shown[0] == f"{third}: mechanism third"
  assert "settings: third=on" in shown
  assert f"source: {kit.NEW}" in shown
  assert any(line.startswith("deployment: observed +20.0 %") for line in shown)
  assert sum(line.startswith("depends_on: ") for line in shown) == 2
  graph = run("graph")
  first, second = (line.split()[0] for line in lines[:2])
  at = graph.index(f"{third}  mechanism third")
  below = {line.split()[1] for line in graph[at + 1 : at + 3]}
  assert below == {first, second}
  assert all(graph.index(line) < at for line in graph if line.startswith(first))


def test_verify_says_what_it_verified(run):
  (line,) = run("verify")
  assert "5 entries" in line and "4 source trees reproduce" in line
  entry = run("list")[0].split()[0]
  (run.root / "entries" / entry / "patch.diff").write_bytes(b"")
  assert run.refused("verify") == (
    f"error: memory: entries/{entry}/patch.diff was changed"
  )
  assert "was changed" in run.refused("list")


def test_sources_of_an_entry_are_written(run, tmp_path):
  third = run("list")[2].split()[0]
  (line,) = run("show", third, f"--sources={tmp_path / 'out'}")
  store = Store(run.root)
  tree = dict(store.trees.after(third))
  assert sources.read(tmp_path / "out") == tree and "4 files" in line
  assert "not an empty folder" in run.refused(
    "show", third, f"--sources={tmp_path / 'out'}"
  )


def test_a_change_between_two_checkouts_is_added(run, tmp_path):
  """The change is taken from the checkouts' tree to the dependencies'."""
  store = Store(run.root)
  third = [n for n in store.entries][2]
  before = dict(store.trees.after(third))
  after = kit.register(kit.edited(before, kit.B, 15, "new"), "late")
  for name, tree in (("before", before), ("after", after)):
    sources.write(tree, tmp_path / name)
  record = tmp_path / "record.json"
  fields = {
    "kind": "mechanism", "title": "late", "factor": "tau",
    "settings": "num_drafts=3", "options": ["num_drafts"],
  }  # fmt: skip
  record.write_text(json.dumps(fields))
  figures = tmp_path / "figures.json"
  figures.write_text("{}")
  (line,) = run(
    "add", f"--record={record}", f"--before={tmp_path / 'before'}",
    f"--after={tmp_path / 'after'}", f"--evidence={figures}",
  )  # fmt: skip
  store = Store(run.root)
  entry = store[line.split(":")[0]]
  made = store.trees.after(entry.id)
  assert sources.registered(made) == {"late"}
  assert b"new\n" in made[kit.B] and made[kit.A] == kit.LINES
  assert entry.record.options[0]["domain"].startswith("block or a whole")
  assert list(entry.evidence) == ["evidence/figures.json"]
  assert "5 entries" not in run("verify")[0]

  # A system: all in which the checkout differs from its dependencies.
  fields = {"kind": "system", "title": "now", "depends_on": [third, entry.id]}
  record.write_text(json.dumps(fields))
  (line,) = run("add", f"--record={record}", f"--after={tmp_path / 'after'}")
  store = Store(run.root)
  assert store.trees.after(line.split(":")[0]) == after


def test_replay_writes_proposals_and_names_what_clashes(run, tmp_path):
  moved = kit.edited(kit.BASE, kit.A, 3, "something else")
  sources.write(moved, tmp_path / "checkout")
  told = tmp_path / "deployment.json"
  told.write_text('{"device": "other card"}')
  out = tmp_path / "proposals.jsonl"
  lines = run(
    "replay", f"--deployment={told}", f"--onto={tmp_path / 'checkout'}",
    f"--output={out}",
  )  # fmt: skip
  assert [line.split()[1] for line in lines[:3]] == [
    "applies", "clashes", "clashes",
  ]  # fmt: skip
  assert any(f"{kit.A}: both change line 4" in line for line in lines[3:])
  assert lines[-1] == f"1 proposals: {out}"
  agent = Replay.read(out)
  assert agent.tasks == ("tau/open",)
  task = Task(id="tau/open", factor="tau", option=None, bound=None)
  (made,) = agent.propose(task, tmp_path, Limits()).proposals
  assert made.options == "second=on"
  tree = patches.apply(moved, patches.parse(made.patch.encode()))
  assert sources.registered(tree) == {"second"}


@pytest.mark.parametrize(
  ("argv", "message"),
  (
    ((), "expected a command: list, show"),
    (("forget",), "expected a command"),
    (("list", "--kind=good"), "--kind must be of mechanism"),
    (("list", "--colour=red"), "list: '--colour=red'; flags: --kind=..."),
    (("show",), "expected one id"),
    (("show", "mem-"), "5 entries begin with 'mem-'"),
    (("show", "x"), "no entries begin with 'x'"),
    (("add",), "--record=FILE, --round=DIR or --base=DIR"),
    (("add", "--round=x", "--patch=y"), "--round takes no other flag"),
    (("add", "--record=nowhere.json"), "nowhere.json: No such file"),
    (("replay",), "--deployment=FILE is missing"),
    (("replay", "--deployment=x", "--holds=tpu"), "--holds must be of gpu"),
    (("verify", "--kind=x"), "verify: '--kind=x'"),
  ),
)
def test_bad_input_is_one_line(run, argv, message):
  if not argv:
    with pytest.raises(commands.SpecPilotError, match=message):
      list(program.run([]))
    return
  assert message in run.refused(*argv)


@pytest.mark.parametrize(
  ("text", "message"),
  (
    ("[" * 100_000, "not JSON"),
    ("[]", "not a JSON object"),
    ('{"title": NaN}', "not JSON"),
    ('{"depends_on": 5}', "depends_on must be a list of ids, got 5"),
    ('{"depends_on": [5]}', "depends_on must be a list of ids, got [5]"),
    ('{"options": 5}', "options must be a list of objects"),
    ('{"base": 5}', "base must be a sha256, got 5"),
    ('{"schema": 2}', "schema must be 1, got 2"),
  ),
)
def test_a_record_that_is_none_is_one_line(run, tmp_path, text, message):
  path = tmp_path / "record.json"
  needed = (
    '{"kind": "negative", "title": "t", "factor": "tau", "reason": "small"'
  )
  path.write_text(text.replace("{", f"{needed}, ", 1))
  assert message in run.refused("add", f"--record={path}")
  assert "5 entries" in run("verify")[0]


def test_additions_lose_no_file_and_ignore_no_flag(run, tmp_path):
  path = tmp_path / "record.json"
  path.write_text('{"kind": "negative"}')
  (tmp_path / "a").mkdir()
  for place in (path, tmp_path / "a" / "x.json", tmp_path / "x.json"):
    place.write_text('{"kind": "negative"}')
  twice = f"{tmp_path / 'a' / 'x.json'},{tmp_path / 'x.json'}"
  assert "have one name" in run.refused(
    "add", f"--record={path}", f"--evidence={twice}"
  )
  assert "--before needs --after" in run.refused(
    "add", f"--record={path}", f"--before={tmp_path}", f"--patch={path}"
  )


@pytest.mark.parametrize(
  ("text", "message"),
  (
    ('{"deployment": 1, "sampling": 1}', "damaged: no result.json"),
    ('{"device": 3}', "fingerprint device must be a line"),
    ("7", "not a JSON object"),
  ),
)
def test_a_deployment_that_is_none_is_one_line(run, tmp_path, text, message):
  path = tmp_path / "result.json"
  path.write_text(text)
  line = run.refused("replay", f"--deployment={path}")
  assert str(path) in line and message in line


def test_help(capsys):
  program.main(["memory", "--help"])
  assert "python -m memory verify" in capsys.readouterr().out
