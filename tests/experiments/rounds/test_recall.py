"""What the memory holds, at the start of a round."""

import pytest

from experiments.agents.command import Command
from experiments.agents.protocol import Limits, Proposal, Session, Task
from experiments.agents.recall import Recall
from experiments.rounds import job, phases, reuse, section
from experiments.rounds.log import Budget, Log
from memory.schema import Fingerprint
from memory.store import Store
from tests.experiments import tiny
from tests.experiments.rounds import scripted
from tests.memory import kit

HERE = Fingerprint(device="another card")
GAINS = {"first=on": 0.12, "second=on": -0.05, "first=more": 0.2, "own=1": 0.1}


class _Own:
  """Another setting of what the memory holds, and something new."""

  name = "scripted"
  paid = False

  def propose(self, task: Task, workspace, limits: Limits) -> Session:
    options = {"tau/own": "own=1", "tau/first": "first=on"}.get(task.id)
    if options is None:
      return Session(proposals=())
    return Session(proposals=(Proposal(task=task.id, options=options),))


@pytest.fixture(name="store")
def _store(tmp_path) -> Store:
  (tmp_path / "memory").mkdir()
  return kit.build(tmp_path / "memory")[0]


def play(store, tree, folder, own=False):
  """A round in the scripted world; its result and its account."""
  folder.mkdir()
  recall = Recall.of(store, HERE, tree, ("gpu", "drafter"))
  directions = dict.fromkeys(recall.tasks())
  if own:
    directions["tau", "own"] = None
  world = scripted.World(folder / "paid")
  world.gains = GAINS
  log = Log(folder / "round.jsonl")
  agents = [recall, _Own()] if own else [recall]
  plan = phases.Plan(directions=tuple(directions), aa_sessions=1)
  result = phases.Round(
    log, world, agents, Budget(log), plan, folder / "agents"
  ).run()
  log.close()
  again = Log(folder / "round.jsonl")
  return result, reuse.account(again, result["accepted"], store)


def test_reused_gains_are_no_discoveries(store, tmp_path):
  """Sources that have the mechanisms: settings alone, proved again."""
  system = next(e for e in store.current() if e.record.kind == "system")
  tree = store.trees.after(system.id)
  result, found = play(store, tree, tmp_path / "round", own=True)
  verdicts = {t["option"]: t["verdict"] for t in result["trials"]}
  assert verdicts == {
    "first=on": "accept", "second=on": "slower", "third=on": "slower",
    "own=1": "accept",
  }  # fmt: skip
  assert result["champion"]["options"] == "first=on,own=1"
  first = next(e.id for e in store.current() if "first" in e.record.title)
  own = next(t["id"] for t in result["trials"] if t["option"] == "own=1")
  assert found.entries == (first,) and found.discovered == (own,)
  assert len(found.reused) == 1 and own not in found.reused
  predicted = {t["option"]: t["prediction"] for t in result["trials"]}
  assert predicted["first=on"] == 0.1 and predicted["own=1"] is None
  told = result | {
    "memory": list(found.entries),
    "round": {
      "factors": result["factors"] | {"of": "stock", "largest": "tau"},
      "s_aa": None, "aa_means": [],
      "familywise": 0.0, "reused": found.reused, "discovered": found.discovered,
    },
  }  # fmt: skip
  line = f"accepted: 1 discovered, 1 reused from the memory ({first})"
  assert line in section.lines(told)


def test_sources_without_the_mechanisms_get_patches(store, tmp_path):
  """Each patch fits the sources and brings what its entry stands on."""
  result, found = play(store, kit.BASE, tmp_path / "round")
  assert [d["id"] for d in result["directions"]] == ["tau/open"]
  patched = [t["option"] for t in result["trials"] if t["patch"]]
  assert sorted(patched) == ["first=on", "second=on", "third=on"]
  assert "first=on" in result["champion"]["options"]
  assert "+first" in result["champion"]["patch"]
  assert found.discovered == () and len(found.reused) == 1


def test_what_clashes_is_told_and_not_proposed(store, tmp_path):
  moved = kit.edited(kit.BASE, kit.A, 3, "something else")
  recall = Recall.of(store, HERE, moved, ("gpu", "drafter"))
  task = Task(id="tau/open", factor="tau", option=None, bound=None)
  (made,) = recall.propose(task, tmp_path, Limits()).proposals
  assert made.options == "second=on"
  assert ["line 4" in str(port) for port in recall.ports] == [True, True]
  # They are tasks for agents that write code, and for no other.
  agents = [recall, Command("true", tmp_path)]
  ported = job._port_tasks(agents)
  assert job._port_tasks(agents[:1]) == {}
  assert [factor for factor, _ in ported] == ["tau", "tau"]
  (_, name), text = next(iter(ported.items()))
  assert name == f"port-{recall.ports[0].entry}"
  assert "both change line 4" in text and "+first" in text
  asked = []

  class Coder(Command):
    def propose(self, task, workspace, limits):
      asked.append(task.id)
      return Session(proposals=())

  log = Log(tmp_path / "round.jsonl")
  coder = Coder("true", tmp_path)
  world = scripted.World(tmp_path / "paid")
  world.gains = GAINS
  plan = phases.Plan(
    directions=(*recall.tasks(), *ported, ("tau", "first")),
    aa_sessions=1,
    details={f"{factor}/{name}": t for (factor, name), t in ported.items()},
  )
  result = phases.Round(
    log, world, [job._Patient(a) for a in (recall, coder)], Budget(log), plan,
    tmp_path / "agents",
  ).run()  # fmt: skip
  assert asked == ["tau/open", *(f"tau/{name}" for _, name in ported)]
  assert all("detail" not in d for d in result["directions"])


def test_another_setting_of_a_known_mechanism_is_that_one(store, tmp_path):
  log = Log(tmp_path / "round.jsonl")
  tuned = Proposal(task="tau/first", options="first=more")
  code = Proposal(task="tau/open", options="first=on", patch="a diff")
  log.do(
    "propose/tau/first/search",
    lambda: Session(proposals=(tuned, code)).as_dict(),
  )
  found = reuse.account(log, [tuned.id, code.id], store)
  assert found.reused == (tuned.id,) and found.discovered == (code.id,)


def test_replay_is_a_round_of_the_memory_alone(monkeypatch, tmp_path):
  told = []

  def run(settings, asked) -> int:
    told.append((settings, asked))
    return 0

  monkeypatch.setattr(job, "run", run)
  for name in ("replay", "round"):
    assert tiny.run("--flagfile=cpu_smoke.flags", f"--job={name}") == 0
  assert [asked.agents for _, asked in told] == [
    ("memory",), ("memory", "search"),
  ]  # fmt: skip

  # What it recalls for the demo: what needs no GPU, as this checkout has it.
  settings, asked = told[0]
  (recall,) = job._agents(settings, asked, Store())
  assert isinstance(recall, Recall) and recall.ports == ()
  assert ("tau", "tree") in set(recall.tasks())
  assert ("kernel", "weights") not in set(recall.tasks())
