"""A paired test of two engines, from processes to a verdict.

The verdicts: `accept`, `reject` and `inconclusive` are the gate's, over sound
measurements. `refused` is a candidate that broke a rule, with the check that
caught it. `invalid` is a measurement that says nothing of the candidate: stock
failed, or time ran out.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import hosts
from experiments.controller import checks, sandbox, statistics, tree
from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.launch import Launch, check_out_of_reach
from experiments.controller.process import Answer, EngineFault, EngineProcess
from experiments.controller.session import (
  Session,
  Sink,
  Times,
  Watch,
  slow_down,
)
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

REFUSED, INVALID = "refused", "invalid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """An engine that takes part in a session.

  Attributes:
    tree: what it runs from.
    settings: see `worker.Server.load`.
    trusted: whether its tree is the base, without a patch: then executables
      that it compiled are kept.
    record: options, target, drafter and run, for every record of it.
  """

  tree: tree.Tree
  settings: Mapping[str, Any]
  trusted: bool
  record: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
  """Where sessions run.

  Attributes:
    place: a folder for what processes write; each gets a new one in it.
    layers: what isolates them.
    readable, assets: model files that they need; see `Launch`.
    compiled: folder of executables by tree, of trees without a patch; None
      keeps none.
    slot, platform: see `Launch`.
    start_s, step_s: see `Launch`.
    autotuned: the compiler's choices, of stock, for both.
    prepared: subjects whose executables are compiled and kept.
    together: whether both engines of a session load at the same time, on a
      machine whose loading leaves the device and most cores idle. Then stock
      has not decoded alone before the candidate came, only after it has gone.
  """

  place: Path
  layers: sandbox.Layers
  readable: Sequence[Path] = ()
  assets: Mapping[str, Path] = dataclasses.field(default_factory=dict)
  compiled: Path | None = None
  slot: hosts.Slot | None = None
  platform: str | None = None
  start_s: float = 900.0
  step_s: float = 120.0
  autotuned: Path | None = None
  prepared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
  together: bool = False

  def prepare(self, name: str, subject: Subject, **changes: Any) -> None:
    """Compiles a subject in a process that is not timed; see `launch`.

    An executable that was compiled in a process and one that was read back do
    not run alike: stock that compiled was 15 % slower than stock that read (two
    cores, standard error 6 %). So all that are timed have read theirs.

    Raises:
      EngineFault: of the process.
    """
    key = (subject.tree.manifest.root_hash, repr(subject.settings))
    if key not in self.prepared:
      with EngineProcess(self.launch(name, subject, keeps=True, **changes)):
        self.prepared.add(key)

  def timed(self, name: str, subject: Subject, **changes: Any) -> Launch:
    """How a subject is started to be timed: with a copy of its executables, so
    that nothing it writes is there at its next launch. See `launch`."""
    return self.launch(name, subject, keeps=False, **changes)

  def launch(self, name: str, subject: Subject, **changes: Any) -> Launch:
    """How a subject is started.

    What a patch compiles is kept by `prepare` alone, which shows it no prompt.

    Raises:
      SpecPilotError: a patch, where nothing keeps it from the controller's own
        files, or these lie in what it may read.
    """
    if not subject.trusted and not self.layers.confines_files:
      raise SpecPilotError(
        "a patch is not run on this machine: it has neither Landlock (Linux"
        " 5.13 or newer) nor bubblewrap to confine it"
      )
    # What a patch compiled is for itself alone, and gone with the bench.
    place = self.place / "compiled" if not subject.trusted else self.compiled
    compiled = None
    if place is not None:
      compiled = place / subject.tree.manifest.root_hash[:16]
    launch = Launch(
      name=name,
      tree=subject.tree,
      settings=subject.settings,
      place=Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.place)),
      readable=self.readable,
      assets=self.assets,
      compiled=compiled,
      keeps=subject.trusted,
      autotuned=self.autotuned,
      slot=self.slot,
      platform=self.platform,
      layers=self.layers,
      start_s=self.start_s,
      step_s=self.step_s,
    )
    launch = dataclasses.replace(launch, **changes)
    if not subject.trusted:
      check_out_of_reach([tree.ROOT], launch.policy().read)
    return launch


@dataclasses.dataclass
class Measured:
  """What a session gave.

  Attributes:
    records: by system, of all requests that were answered.
    times: None where a fault ended it.
    fault: what ended it.
    ready: what each engine said of itself.
    slowed: stock's slow-down beside the candidate, as a share.
    disturbed: whether that is more than noise; see `session.slow_down`.
    output: the beginning of what each process printed.
  """

  records: dict[str, list[dict[str, Any]]]
  times: Times | None = None
  fault: EngineFault | None = None
  ready: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  slowed: float | None = None
  disturbed: bool = False
  output: dict[str, str] = dataclasses.field(default_factory=dict)


def recorder(
  measured: Measured, subjects: Mapping[str, Subject], folder: Any
) -> Sink:
  """What takes answers: to the records of a session, and to its folder."""

  def sink(system: str, request: Request, answer: Answer, extra) -> None:
    try:
      line = checks.record(
        system, request, answer, {**subjects[system].record, **extra}
      )
    except SpecPilotError as e:
      raise EngineFault(system, "frames", str(e)) from None
    measured.records[system].append(line)
    if folder is not None:
      folder.request(line)

  return sink


def measure(
  bench: Bench,
  stock: Subject,
  candidate: Subject,
  requests: Sequence[Request],
  warm_ups: Sequence[Request],
  *,
  vocab: int,
  rng: np.random.Generator,
  deadline: float,
  noise: float | None = None,
  folder: Any = None,
  watch: Watch = lambda: None,
) -> Measured:
  """Runs one session of fresh processes.

  Args:
    bench: where.
    stock, candidate: what is compared; stock against stock is an A/A session.
    requests: taken two by two.
    warm_ups: others, of which a drawn number is decoded first.
    vocab: ids are below it.
    rng: of the order, with a seed that the candidate does not know.
    deadline: of `time.monotonic()`.
    noise: s_AA, for the comparison of stock with itself.
    folder: a `results.RunFolder` that takes the records.
    watch: of the card; see `session.Watch`.
  """
  measured = Measured({STOCK: [], CANDIDATE: []})
  subjects = {STOCK: stock, CANDIDATE: candidate}

  sink = recorder(measured, subjects, folder)
  session = Session(
    vocab=vocab, sink=sink, rng=rng, deadline=deadline, watch=watch
  )
  alone = session.draw_solo(requests)
  engines: dict[str, EngineProcess] = {}
  try:
    for name, subject in subjects.items():
      bench.prepare(name, subject)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as guest:

      def start(name: str, stack: contextlib.ExitStack) -> EngineProcess:
        engines[name] = EngineProcess(bench.timed(name, subjects[name]))
        stack.push(engines[name])
        engines[name].begin()
        return engines[name]

      def ready(engine: EngineProcess) -> EngineProcess:
        engine.wait_ready()
        measured.ready[engine.name] = engine.ready
        return engine

      # Which starts first is drawn: the first idles while the other starts.
      before: dict[str, float] = {}
      order = [(STOCK, held), (CANDIDATE, guest)]
      stock_first = rng.random() < 0.5
      if not stock_first:
        order.reverse()
      if bench.together:
        for engine in [start(*one) for one in order]:
          ready(engine)
      else:
        for name, stack in order:
          ready(start(name, stack))
          if stock_first and name == STOCK:
            session.warm_up(engines[STOCK], warm_ups)
            before = session.solo(engines[STOCK], alone)
      session.warm_up_both(engines[STOCK], engines[CANDIDATE], warm_ups)
      times = session.run(engines[STOCK], engines[CANDIDATE], requests)
      guest.close()
      after = session.solo(engines[STOCK], alone)
    beside = {
      r["request"]: r["metrics"]["e2el_ms"] / 1e3
      for r in measured.records[STOCK]
    }
    # Time may have run out before some of them.
    ids = [r.id for r in alone if r.id in beside]
    measured.slowed, measured.disturbed = slow_down(
      [(before or after)[i] for i in ids],
      [beside[i] for i in ids],
      [after[i] for i in ids],
      noise,
    )
    measured.times = times
  except EngineFault as e:
    measured.fault = e
  for name, engine in engines.items():
    measured.output[name] = engine.output.decode("utf-8", "replace")[-2000:]
  return measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """What becomes of a candidate.

  Attributes:
    verdict, reason: see the module.
    check: which check decided: `gate`, `exactness`, `peak`, the kind of an
      `EngineFault`, `tree`.
    decision: the gate's figures; None where there were no sound ones.
    exactness: of the outputs; None where none were compared.
  """

  verdict: str
  check: str
  reason: str
  decision: statistics.Decision | None = None
  exactness: checks.Exactness | None = None

  def as_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def blame(fault: EngineFault) -> Verdict:
  """A candidate's fault refuses it; another's says nothing of it."""
  verdict = REFUSED if fault.engine == CANDIDATE else INVALID
  return Verdict(verdict=verdict, check=fault.kind, reason=fault.reason)


def judge(
  measured: Measured,
  *,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
  forced: checks.Judge | None,
  floor: checks.Floor | None,
  noise: float | None,
  min_units: int = statistics.MIN_UNITS,
  seed: int = 0,
) -> Verdict:
  """The verdict on a session.

  Args:
    measured: of `measure`.
    config, tokenizer: of the target.
    forced: token forcing by stock.
    floor: of the card; None where its peaks are not known.
    noise: s_AA of the deployment.
    min_units: that a decision needs.
    seed: of the bootstrap.
  """
  fault = measured.fault
  if fault is not None:
    return blame(fault)
  times = measured.times
  assert times is not None, "a session without a fault has times"
  if times.drops_too_many:
    return Verdict(
      verdict=INVALID,
      check="throttled",
      reason=f"the card was throttled for stock alone in {times.dropped} of"
      f" {times.dropped + len(times.stock)} units",
    )
  if not len(times.stock):
    return Verdict(
      verdict=INVALID, check="time", reason="no pair of requests was measured"
    )
  exact = checks.exactness(measured.records, config, tokenizer, forced)
  if exact.verdict == "fail":
    return Verdict(
      verdict=REFUSED, check="exactness", reason=exact.reason, exactness=exact
    )
  if floor is not None:
    beyond = floor.check(measured.records[CANDIDATE])
    if beyond is not None:
      return Verdict(
        verdict=REFUSED, check="peak", reason=beyond, exactness=exact
      )
  if measured.disturbed:
    return Verdict(
      verdict=INVALID,
      check="interference",
      reason=f"stock is {measured.slowed:.1%} slower beside the candidate than"
      " alone: the machine was busy, or the candidate kept its device so",
      exactness=exact,
    )
  decision = statistics.decide(
    times.units,
    noise,
    diverged=exact.diverged or times.divided,
    min_units=min_units,
    seed=seed,
  )
  verdict, reason = decision.verdict, decision.reason
  if exact.verdict != "pass" and verdict == statistics.ACCEPT:
    verdict = statistics.INCONCLUSIVE
    reason = f"outputs: {exact.reason}"
  return Verdict(
    verdict=verdict,
    check="gate",
    reason=reason,
    decision=decision,
    exactness=exact,
  )


def check_trees(
  subjects: Sequence[Subject], before: tree.Manifest, root: Path = tree.ROOT
) -> None:
  """Refuses where anything changed that must not.

  Args:
    subjects: whose trees are compared with their manifests.
    before: `tree.protected` of the root, from before the session.

  Raises:
    EngineFault: names the first file: of the candidate for a tree, of the
      controller for a file of its own. An engine could write to neither; who
      edits the checkout while it is measured is no candidate.
  """
  try:
    for subject in subjects:
      subject.tree.check()
  except SpecPilotError as e:
    raise EngineFault(CANDIDATE, "tree", str(e)) from None
  changed = before.differences(tree.protected(root))
  if changed:
    raise EngineFault("controller", "tree", f"protected: {changed[0]}")
