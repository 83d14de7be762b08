"""Rounds in a scripted world: decisions, resumption, replay, budgets."""

import collections
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import time

import pytest

from experiments.agents.protocol import Limits, Proposal, Session, cut
from experiments.agents.replay import Replay
from experiments.rounds import phases, section
from experiments.rounds.log import Budget, BudgetSpent, Log
from specpilot_jax.errors import SpecPilotError
from tests.experiments.rounds import scripted

ROOT = pathlib.Path(__file__).parents[3]


def verdicts(result) -> dict[str, str]:
  return {t["option"] or t["task"]: t["verdict"] for t in result["trials"]}


@pytest.fixture(name="whole")
def _whole(tmp_path):
  return scripted.run(tmp_path / "whole")


def test_a_round(whole):
  assert whole["champion"] == {"options": "d=1,b=1", "patch": ""}
  assert verdicts(whole) == {
    "overhead/h": "floor",
    "a=1": "small",
    "b=1": "accept",
    "b=2": "slower",
    "c=1": "conflict",
    "d=1": "accept",
    "e=1": "slower",
    "f=1": "refused",
    "tau/g": "refused",
  }
  assert whole["sealed"]["speedup_vs_stock"] == pytest.approx(1.42)
  assert len(whole["accepted"]) == 2
  # The largest factor first.
  assert [d["factor"] for d in whole["directions"]] == (
    ["tau"] * 7 + ["kernel", "overhead"]
  )
  reasons = {t["option"]: t["reason"] for t in whole["trials"]}
  assert "not the target's" in reasons["f=1"]
  assert "conflicts" in reasons["c=1"]


def test_what_has_ended_is_not_done_again(tmp_path, whole):
  before = (tmp_path / "whole" / "paid").read_text()
  assert scripted.run(tmp_path / "whole") == whole
  assert (tmp_path / "whole" / "paid").read_text() == before


def test_recorded_results_give_the_same_champion(tmp_path, whole):
  """A replay: the log's results, in a world that would measure otherwise."""
  source = tmp_path / "whole" / "events.jsonl"
  (tmp_path / "again").mkdir()
  (tmp_path / "again" / "events.jsonl").write_bytes(source.read_bytes())
  log = Log(tmp_path / "again" / "events.jsonl")
  world = scripted.World(tmp_path / "again" / "paid")
  world.gains = {name: -gain for name, gain in scripted.GAINS.items()}
  result = phases.Round(
    log, world, [scripted.Proposer()], Budget(log), scripted.plan(),
    tmp_path / "again" / "agents",
  ).run()  # fmt: skip
  assert result == whole
  assert not (tmp_path / "again" / "paid").exists()


def test_a_second_round_starts_from_the_champion(tmp_path, whole):
  (tmp_path / "next").mkdir()
  log = Log(tmp_path / "next" / "events.jsonl")
  result = phases.Round(
    log, scripted.World(tmp_path / "next" / "paid"), [scripted.Proposer()],
    Budget(log), scripted.plan(champion=whole["champion"]),
    tmp_path / "next" / "agents",
  ).run()  # fmt: skip
  assert result["factors"]["tau"] < whole["factors"]["tau"]
  assert result["champion"] == whole["champion"]
  assert result["sealed"] is None and result["accepted"] == []
  assert set(verdicts(result).values()) <= {
    "slower", "refused", "floor", "small"
  }  # fmt: skip


def test_replayed_proposals(tmp_path):
  path = tmp_path / "recorded.jsonl"
  made = [Proposal(task=f"tau/{x}", options=f"{x}=1") for x in "abcdefg"]
  made.append(Proposal(task="kernel/open", options="b=1"))
  path.write_text("".join(json.dumps(p.as_dict()) + "\n" for p in made))
  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, scripted.World(tmp_path / "paid"), [Replay.read(path)], Budget(log),
    scripted.plan(workers=3), tmp_path / "agents",
  ).run()  # fmt: skip
  assert result["champion"]["options"] == "d=1,b=1"
  with pytest.raises(SpecPilotError, match="nothing was recorded"):
    Replay({}).propose(
      phases.Task(id="x", factor="tau", option=None, bound=1.0),
      tmp_path,
      Limits(),
    )


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("{", ":1: not a proposal"),
    ("{}", ":1: not a proposal"),
    ('{"task": "t", "surprise": 1}', "unknown field 'surprise'"),
    ('{"task": "t", "patch": 1}', "'patch' must be text"),
    ('{"task": "t", "prediction": "x"}', "'prediction' must be a finite"),
    ('{"task": "t", "prediction": NaN}', "must be a finite number"),
  ],
)
def test_a_damaged_recording(tmp_path, line, reason):
  (tmp_path / "r.jsonl").write_text(line + "\n")
  with pytest.raises(SpecPilotError, match=reason):
    Replay.read(tmp_path / "r.jsonl")


class Moody(scripted.World):
  """Fails to measure so often."""

  def __init__(self, paid, failures):
    super().__init__(paid)
    self.failures = failures

  def screen(self, system, against, units):
    if self.failures:
      self.failures -= 1
      return {"kind": "infra", "reason": "stock died"}
    return super().screen(system, against, units)


@pytest.mark.parametrize("failures", [1, 2, 100])
def test_failures_of_the_machine(tmp_path, failures):
  log = Log(tmp_path / "events.jsonl")
  work = phases.Round(
    log, Moody(tmp_path / "paid", failures), [scripted.Proposer()],
    Budget(log), scripted.plan(), tmp_path / "agents",
  )  # fmt: skip
  if failures == 100:
    with pytest.raises(BudgetSpent, match="in a row"):
      work.run()
    return
  found = verdicts(work.run())
  # Measured again; or, told apart from a rejection.
  assert found["a=1"] == ("small" if failures == 1 else "infra")


def test_failures_of_an_earlier_slice_do_not_end_a_later_one(tmp_path):
  log = Log(tmp_path / "events.jsonl")

  def go(failures):
    return phases.Round(
      log, Moody(tmp_path / "paid", failures), [scripted.Proposer()],
      Budget(log), scripted.plan(), tmp_path / "agents",
    ).run()  # fmt: skip

  with pytest.raises(BudgetSpent, match="in a row"):
    go(100)
  found = verdicts(go(0))
  assert found["a=1"] == "infra"  # Measured twice: that is its verdict.
  assert found["d=1"] == "accept"


def test_budgets(tmp_path):
  log = Log(tmp_path / "events.jsonl")

  def go(**limits):
    return phases.Round(
      log, scripted.World(tmp_path / "paid"), [scripted.Proposer()],
      Budget(log, **limits), scripted.plan(), tmp_path / "agents",
    ).run()  # fmt: skip

  with pytest.raises(BudgetSpent, match="trials: 4"):
    go(trials=4)
  assert log.spent("trials") == 4
  with pytest.raises(BudgetSpent, match="this slice"):
    go(deadline=time.monotonic() - 1)
  with pytest.raises(BudgetSpent, match="seconds of work"):
    go(device_s=0.0)
  assert go(trials=100)["champion"]["options"] == "d=1,b=1"


class Paid(scripted.Proposer):
  """Spends more than is reserved for it."""

  paid = True

  def __init__(self, usd):
    self._usd = usd

  def propose(self, task, workspace, limits):
    session = super().propose(task, workspace, limits)
    return dataclasses.replace(session, usd=self._usd)


@pytest.mark.parametrize(
  ("usd", "reserved", "asked"),
  [(0.5, None, 4), (0.1, 0.5, 4), (2.5, 0.5, 1), (None, 1.0, 2)],
)
def test_money(tmp_path, usd, reserved, asked):
  """What was said or reserved counts, the larger; and the limit binds."""
  log = Log(tmp_path / "events.jsonl")
  work = phases.Round(
    log, scripted.World(tmp_path / "paid"), [Paid(usd)], Budget(log, usd=2.0),
    scripted.plan(limits=Limits(usd=reserved)), tmp_path / "agents",
  )  # fmt: skip
  with pytest.raises(BudgetSpent, match="usd: 2"):
    work.run()
  keys = [x["key"] for x in log if x["event"] == "done"]
  assert sum(key.startswith("propose/") for key in keys) == asked
  assert log.spent("usd") == pytest.approx(asked * max(usd or 0, reserved or 0))


def test_search_costs_nothing(tmp_path):
  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, scripted.World(tmp_path / "paid"), [scripted.Proposer()],
    Budget(log, usd=0.0), scripted.plan(limits=Limits(usd=1.0)),
    tmp_path / "agents",
  ).run()  # fmt: skip
  assert result["champion"]["options"] == "d=1,b=1"
  assert log.spent("usd") == 0


def test_agents_take_no_device(tmp_path):
  ticks = iter(range(0, 10_000, 10))
  log = Log(tmp_path / "events.jsonl", clock=lambda: float(next(ticks)))
  log.do("propose/tau/a/x", lambda: 1)
  Budget(log, device_s=1.0).check({})
  log.do("screen/x", lambda: 1)
  with pytest.raises(BudgetSpent, match="seconds of work"):
    Budget(log, device_s=1.0).check({})


class Failing(scripted.World):
  """The first measurement of one kind fails."""

  def __init__(self, paid, kind):
    super().__init__(paid)
    self.kind = kind

  def _once(self, kind):
    if self.kind != kind:
      return None
    self.kind = ""
    return {"kind": "infra", "reason": "stock died", "verdict": "invalid"}

  def aa(self):
    return self._once("aa") or super().aa()

  def seal(self, system):
    return self._once("seal") or super().seal(system)


@pytest.mark.parametrize("kind", ["aa", "seal"])
def test_what_the_machine_failed_is_measured_again(tmp_path, whole, kind):
  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, Failing(tmp_path / "paid", kind), [scripted.Proposer()], Budget(log),
    scripted.plan(), tmp_path / "agents",
  ).run()  # fmt: skip
  assert result == whole
  done = [x["key"] for x in log if x["event"] == "done"]
  again = [key for key in done if key.endswith("/again")]
  assert len(again) == 1 and again[0].startswith(kind)


def test_tuning_measures_against_its_own_champion(tmp_path):
  """The same proposal, once in phase 2 and once on the champion of phase 2:
  another measurement."""

  class World(scripted.World):
    def factors(self, champion):
      told = {"kernel_classes": {"matmul": 3.0}}
      return super().factors(champion) | told

    def test(self, system, against):
      result = super().test(system, against)
      if system["options"] != "d=1":
        result["verdict"] = "reject"
      return result

  class Proposer(scripted.Proposer):
    def propose(self, task, workspace, limits):
      if task.option is None and "tiles" in task.id:
        made = (Proposal(task=task.id, options="b=1"),)
        return Session(proposals=made)
      return super().propose(task, workspace, limits)

  log = Log(tmp_path / "events.jsonl")
  plan = scripted.plan(
    directions=(("tau", "b"), ("tau", "d"), ("kernel", None))
  )
  result = phases.Round(
    log, World(tmp_path / "paid"), [Proposer()], Budget(log), plan,
    tmp_path / "agents",
  ).run()  # fmt: skip
  tasks = [t["task"] for t in result["trials"] if t["option"] == "b=1"]
  assert tasks == ["tau/b", "kernel/tiles/matmul"]
  screened = [
    x["key"] for x in log
    if x["event"] == "done" and x["key"].startswith("screen/")
  ]  # fmt: skip
  b = Proposal(task="", options="b=1").id
  marks = {key.split("/")[2] for key in screened if key.split("/")[1] == b}
  assert len(marks) == 2
  assert marks == {
    phases.mark(phases.STOCK),
    phases.mark({"options": "d=1", "patch": ""}),
  }


def test_a_factor_that_was_not_measured(tmp_path):
  """It is neither a floor nor 1: its directions are tried, last."""

  class World(scripted.World):
    def factors(self, champion):
      return super().factors(champion) | {
        "tau": None, "of": "stock", "largest": "kernel"
      }  # fmt: skip

  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, World(tmp_path / "paid"), [scripted.Proposer()], Budget(log),
    scripted.plan(), tmp_path / "agents",
  ).run()  # fmt: skip
  assert result["champion"]["options"] == "d=1,b=1"
  told = [(d["factor"], d["bound"]) for d in result["directions"]]
  assert [f for f, _ in told] == ["kernel", "overhead"] + 7 * ["tau"]
  assert told[-1][1] is None
  more = {"s_aa": None, "aa_means": [], "familywise": 0.0}
  shown = section.lines({**result, "round": result | more})
  assert shown[0].startswith("phase 0: tau not measured x kernel 1.200 x")
  for start, end in (
    ({}, "champion: none, nothing was accepted"),
    ({"options": "a=1"}, 'nothing was added: {"options": "a=1"}'),
  ):
    kept = {**result, "sealed": None, "round": result | more | {"start": start}}
    assert section.lines(kept)[-1].endswith(end)


@pytest.mark.parametrize("merges", [True, False])
def test_patches_that_clash_are_an_agents_to_merge(tmp_path, merges):
  """What it makes of both passes the same gates; without it, a conflict."""

  class World(scripted.World):
    def merge(self, champion, patch):
      if "both" in patch:
        return {"patch": patch}
      return super().merge(champion, patch)

  class Coder(scripted.Proposer):
    def propose(self, task, workspace, limits):
      if task.id.startswith("merge/"):
        assert "both patches change" in task.detail and "two" in task.detail
        made = Proposal(task=task.id, patch="both" if merges else "")
        return cut(Session(proposals=(made,)), task, limits)
      patch = {"b": "one", "c": "two"}[task.option]
      made = Proposal(
        task=task.id, options=f"{task.option}=1", patch=patch
      )  # fmt: skip
      return Session(proposals=(made,))

  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, World(tmp_path / "paid"), [Coder()], Budget(log),
    scripted.plan(directions=(("tau", "b"), ("tau", "c"))),
    tmp_path / "agents",
  ).run()  # fmt: skip
  if merges:
    assert result["champion"] == {"options": "b=1,c=1", "patch": "both"}
    # With its options off the merged tree was stock.
    (key,) = [
      x["key"] for x in log
      if x["event"] == "done" and x["key"].startswith("merged/")
    ]  # fmt: skip
    assert log.result(key)["kind"] == "ok"
  else:
    assert result["champion"] == {"options": "b=1", "patch": "one"}
    assert verdicts(result)["c=1"] == "conflict"


def test_what_agents_may_not(tmp_path):
  """More than their number, nothing at all, another one's task."""

  class Eager:
    name = "eager"
    paid = False

    def propose(self, task, workspace, limits):
      one = Proposal(task="other", options="a=1")
      rest = [Proposal(task="x", options=f"z={i}") for i in range(20)]
      return Session(proposals=(Proposal(task="x"), one, one, *rest))

  log = Log(tmp_path / "events.jsonl")
  result = phases.Round(
    log, scripted.World(tmp_path / "paid"), [Eager()], Budget(log),
    scripted.plan(directions=(("tau", "a"),), limits=Limits(proposals=3)),
    tmp_path / "agents",
  ).run()  # fmt: skip
  assert [t["option"] for t in result["trials"]] == ["a=1", "z=0", "z=1"]
  assert {t["task"] for t in result["trials"]} == {"tau/a"}


def test_a_torn_line_is_cut_off_and_a_damaged_one_refused(tmp_path):
  path = tmp_path / "events.jsonl"
  log = Log(path)
  log.do("a", lambda: 1)
  log.close()
  whole = path.read_bytes()
  path.write_bytes(whole + b'{"event": "done", "key": "b", "resu')
  again = Log(path)
  assert "a" in again and "b" not in again
  assert path.read_bytes() == whole
  again.close()
  path.write_bytes(b'{"event": "done"}\n' + whole)
  with pytest.raises(SpecPilotError, match=":1: damaged"):
    Log(path)


def test_killed_at_any_moment_it_ends_the_same(tmp_path, whole):
  """kill -9 at random moments, then to the end: same result, no proposal
  lost, and no more work repeated than was under way at a kill."""
  kills = 20
  rng = random.Random(0)
  command = [sys.executable, "-m", "tests.experiments.rounds.scripted"]
  done = 0
  folder = tmp_path / "killed"
  folder.mkdir()
  for _ in range(kills):
    process = subprocess.Popen(
      [*command, str(folder), "0.02"], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
      process.wait(timeout=rng.uniform(0.05, 0.4))
      done += 1
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    finally:
      assert process.stdout is not None
      process.stdout.close()
  last = subprocess.run(
    [*command, str(folder), "0"], cwd=ROOT, capture_output=True, check=True
  )
  assert json.loads(last.stdout) == whole
  assert done < kills
  paid = collections.Counter((folder / "paid").read_text().splitlines())
  once = collections.Counter(
    (tmp_path / "whole" / "paid").read_text().splitlines()
  )
  assert set(paid) == set(once)
  assert sum((paid - once).values()) <= kills
  log = Log(folder / "events.jsonl")
  keys = [x["key"] for x in log if x["event"] == "done"]
  assert len(keys) == len(set(keys))
  log.close()


def test_coarse_feedback_has_no_digits_of_the_measurement():
  told = {phases.coarse(g / 1000) for g in range(-200, 400)}
  assert len(told) == 5
  assert phases.coarse(None) == "not measured"
  assert dataclasses.is_dataclass(phases.Plan)
