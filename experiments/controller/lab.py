"""A deployment on this machine, with everything that its paired tests need."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import benchmark, environment, results
from experiments.console import say
from experiments.controller import (
  checks,
  draws,
  forced,
  ledger,
  noise,
  paired,
  process_blocks,
  sandbox,
  statistics,
  tree,
  two_devices,
)
from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.process import EngineFault, EngineProcess
from experiments.controller.systems import System, Tested
from experiments.hosts import Slot
from experiments.settings import Settings
from memory import patches
from specpilot_jax import kernels as kernels_lib
from specpilot_jax import loading, paths
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

WARM_UPS = 3
"""Requests kept for warming up; a drawn number of them is decoded."""
AUTOTUNED = "autotuned.textproto"
CONTROL = "control"
"""Folder of a run for stock's outputs, where it measured against another."""


class Lab:
  """Runs sessions of one deployment; use `open_lab`.

  Args:
    settings: of the run; its target, prompts and sampling.
    place: a temporary folder.
    slots: its devices; none is JAX's choice. On two of them stock and candidate
      decode side by side and are swapped.
    blocks: of processes, for engines that do not fit together; 0 holds both.
      Of two devices each has one engine, whatever its size.
  """

  def __init__(
    self,
    settings: Settings,
    place: Path,
    slots: Sequence[Slot] = (),
    blocks: int = 0,
  ):
    self.settings = settings
    self.slots = tuple(slots)
    self.blocks = blocks
    self.place = place
    self.source = loading.open_target(settings.target)
    prompts = benchmark.load_requests(settings, self.source)
    longest = max(len(p.token_ids or ()) for p in prompts)
    self.room = benchmark.sequence_room(
      self.source, longest, settings.sampling.max_tokens
    )
    self.requests = [
      Request(
        prompt,
        dataclasses.replace(
          settings.sampling, seed=(settings.sampling.seed + i) % 2**32
        ),
      )
      for i, prompt in enumerate(prompts)
    ]
    if len(slots) > 2:
      raise SpecPilotError(
        f"devices must be one or two, which a test swaps, got {len(slots)}"
      )
    if blocks and len(slots) == 2:
      raise SpecPilotError(
        "blocks are for engines that share a device: of two devices each has"
        " one"
      )
    if blocks and blocks < statistics.MIN_BLOCKS:
      raise SpecPilotError(
        f"blocks must be at least {statistics.MIN_BLOCKS}, or 0, got {blocks}"
      )
    least = max(2, blocks + blocks % 2)  # Pairs are taken, blocks dealt.
    if len(self.requests) < WARM_UPS + least:
      raise SpecPilotError(
        f"a paired test needs {WARM_UPS} prompts to warm up and"
        f" {least} at least to measure, got {len(self.requests)}"
      )
    readable, assets = [], {}
    for name in (settings.target, settings.drafter):
      if name in paths.ASSET_FILES:
        assets[paths.ASSET_FILES[name]] = paths.asset_path(name)
      elif Path(name).exists():
        readable.append(Path(name).absolute())
    self.base = tree.read_base()
    self.layers = sandbox.available()
    self.bench = paired.Bench(
      place=place,
      layers=self.layers,
      readable=readable,
      assets=assets,
      compiled=paths.data_dir() / "engines",
      slot=self.slots[0] if self.slots else None,
      platform=os.environ.get("JAX_PLATFORMS"),
    )
    self.stock_system = System(
      options="",
      drafter=settings.drafter,
      kernels=settings.flags.get("kernels", "reference"),
    )
    self._trees: dict[str | None, tree.Tree] = {}
    self._run_label: dict[str, Any] | None = None
    self.stock = self._subject(self.stock_system)
    self.rng = np.random.default_rng()
    self._probe()

  @property
  def units(self) -> int:
    """Pairs of requests of a test, or blocks, or requests on two devices."""
    if self.swaps:
      return 2 * self._pairs
    return self.blocks or self._pairs

  @property
  def swaps(self) -> bool:
    """Whether tests run on two devices."""
    return len(self.slots) == 2

  @property
  def design(self) -> str:
    """How sessions run, for fingerprints and people."""
    if self.swaps:
      return f"two devices, swapped, {self.units} requests"
    return f"one device, S C C S, {self._pairs} pairs, {self.blocks} blocks"

  @property
  def _least(self) -> int:
    """Requests that are enough for a decision; an even number."""
    if self.swaps:
      return statistics.MIN_UNITS
    return self.blocks + self.blocks % 2 or 2 * statistics.MIN_UNITS

  @property
  def _pairs(self) -> int:
    return (len(self.requests) - WARM_UPS) // 2

  def _tree(self, patch: bytes | None) -> tuple[tree.Tree, list[str]]:
    key = None if patch is None else hashlib.sha256(patch).hexdigest()
    changes = patches.parse(patch) if patch is not None else []
    if key not in self._trees:
      name = "base" if key is None else f"patched-{key[:16]}"
      where = self.place / "trees" / name
      self._trees[key] = tree.build(where, self.base, changes)
    return self._trees[key], patches.review(changes)

  def _subject(self, system: System) -> paired.Subject:
    built, _ = self._tree(system.patch)

    settings = {
      "target": loading.located(self.settings.target),
      "drafter": loading.located(system.drafter),
      "dtype": self.settings.dtype,
      "options": system.options,
      "kernels": system.kernels,
      "max_seq_len": self.room,
      "prefill_chunk": self.settings.prefill_chunk,
      "sampling": dataclasses.asdict(self.settings.sampling),
    }
    if system.patch is None:
      options = registry.assignments(registry.parse_options(system.options))
    else:
      # A patch may bring options that are not known here.
      parts = (p.partition("=") for p in system.options.split(",") if p)
      options = {name.strip(): value.strip() for name, _, value in parts}
    return paired.Subject(
      tree=built,
      settings=settings,
      trusted=system.patch is None,
      record={
        "options": options,
        "target": self.settings.target,
        "drafter": system.drafter,
        "run": self._run_label,
      },
    )

  def _probe(self) -> None:
    """Starts stock once: what the machine is, and the compiler's choices."""
    compiled = self.bench.compiled
    assert compiled is not None
    place = compiled / self.stock.tree.manifest.root_hash[:16]
    table = place / AUTOTUNED
    launch = self.bench.launch(STOCK, self.stock)
    wants_table = self._state(self.bench.slot) is not None
    if wants_table and not table.exists():
      launch = dataclasses.replace(launch, table=AUTOTUNED, compiled=None)
    try:
      with EngineProcess(launch) as engine:
        ready = engine.ready
        written = launch.temporary / AUTOTUNED
        if wants_table and not table.exists() and written.exists():
          place.mkdir(parents=True, exist_ok=True)
          results.write_whole(table, written.read_text())
    except EngineFault as e:
      raise SpecPilotError(f"stock does not start: {e.reason}") from None
    if wants_table and table.exists():
      self.bench = dataclasses.replace(self.bench, autotuned=table)
    if ready["machine"]["platform"] == "gpu":
      # The first half of a load is the host's, with cores to spare.
      self.bench = dataclasses.replace(self.bench, together=True)
    self.machine: dict[str, Any] = {
      **ready["machine"],
      "dtype": ready["dtype"],
      "kernels": kernels_lib.as_dict(self.settings.kernels),
    }
    self.environment = environment.of_machine(self.machine, self.settings.flags)
    self.weights_sha256 = dict(ready["sha256"])
    run = environment.run_label(self.environment)
    self._run_label = run
    self.stock = self._subject(self.stock_system)
    s = self.settings
    self.deployment_mark = {
      "target": self.source.config.name,
      "weights": self.weights_sha256,
      "drafter": s.drafter,
      "dtype": self.machine["dtype"],
      "kernels": self.machine["kernels"],
      "prefill_chunk": s.prefill_chunk,
      "max_seq_len": self.room,
      "sampling": dataclasses.asdict(s.sampling),
      "prompts": list(s.prompt_sets),
      "batch": 1,
      **({"form": "fp8"} if self.source.in_fp8 else {}),
    }
    # The noise is that of this code, these requests and these processes.
    launched = {
      "tree": self.stock.tree.manifest.root_hash,
      "split": s.split,
      "chat": self.requests[0].prompt.chat,
      "isolation": dataclasses.asdict(self.layers),
      "autotuned": results.sha256(self.bench.autotuned)
      if self.bench.autotuned is not None
      else None,
      # Two cards of a kind are two machines.
      "devices": [dataclasses.asdict(slot) for slot in self.slots],
    }
    card = {k: self.environment[k] for k in ("cpu", "cores", "driver")}
    self.sessions = noise.Sessions(
      noise.fingerprint(
        {**self.deployment_mark, **launched},
        {**self.machine, **card},
        self.design,
      )
    )
    self.ledger = ledger.Ledger(
      noise.digest([self.deployment_mark, self.machine["device_kind"]])
    )

  def _state(self, slot: Slot | None) -> dict[str, Any] | None:
    if slot is not None and slot.is_emulated:
      return None
    return environment.gpu_state(0 if slot is None else slot.visible)

  def _watch(self) -> dict[str, Any] | None:
    if self.machine["platform"] != "gpu":
      return None
    return self._state(self.bench.slot)

  def _measure(
    self,
    candidate: paired.Subject,
    requests: Sequence[Request],
    warm_ups: Sequence[Request],
    deadline: float,
    folder: results.RunFolder | None,
    against: paired.Subject | None = None,
  ) -> paired.Measured:
    if self.blocks:
      return process_blocks.measure(
        self.bench,
        against or self.stock,
        candidate,
        requests,
        warm_ups,
        blocks=self.blocks,
        vocab=self.source.config.valid_vocab,
        rng=self.rng,
        deadline=deadline,
        folder=folder,
        watch=self._watch,
      )
    if self.swaps:
      return two_devices.measure(
        self.bench,
        against or self.stock,
        candidate,
        requests,
        warm_ups,
        slots=self.slots,
        vocab=self.source.config.valid_vocab,
        rng=self.rng,
        deadline=deadline,
        noise=self.sessions.s_aa,
        folder=folder,
        watch=self._state,
      )
    return paired.measure(
      self.bench,
      against or self.stock,
      candidate,
      requests,
      warm_ups,
      vocab=self.source.config.valid_vocab,
      rng=self.rng,
      deadline=deadline,
      noise=self.sessions.s_aa,
      folder=folder,
      watch=self._watch,
    )

  def aa_session(self, deadline: float) -> float:
    """Stock against stock with fresh processes; the mean log-ratio, kept.

    A session in which stock ran slower beside itself than alone is not kept,
    nor is one of which the card's throttling left less than `noise.SHARE`.

    Raises:
      noise.Unmeasured: it is not kept; says why.
    """
    drawn = [self.requests[i] for i in self.rng.permutation(len(self.requests))]
    measured = self._measure(
      self.stock, drawn[WARM_UPS:], drawn[:WARM_UPS], deadline, None
    )
    wrong = noise.fault(measured, self.units)
    if wrong is not None:
      raise noise.Unmeasured(f"A/A session: {wrong}")
    times = measured.times
    assert times is not None
    outputs = [
      {r["request"]: r["output_ids"] for r in measured.records[name]}
      for name in (STOCK, CANDIDATE)
    ]
    if outputs[0] != outputs[1]:
      say("note: stock's outputs differ between two of its own processes")
    mean, swap = float(times.units.mean()), times.swap
    asymmetry = None if swap is None else swap.asymmetry
    self.sessions.add(mean, len(times.units), asymmetry)
    return mean

  def test(
    self,
    system: System,
    folder: results.RunFolder,
    deadline: float,
    against: System | None = None,
  ) -> Tested:
    """A paired test of a system against stock, or against a champion.

    The level is spent in the ledger before anything is measured. Tokens are
    always forced by stock.

    Args:
      folder: takes records and events.
      deadline: of `time.monotonic()`.
      against: in the place of stock.

    Raises:
      patches.PatchError: the patch is refused before anything runs.
    """
    began = time.monotonic()
    _, review = self._tree(system.patch)
    candidate = self._subject(system)
    base = self.stock if against is None else self._subject(against)
    used = self.ledger.used_requests
    requests, warm_ups, seen = draws.for_test(
      self.requests, used, self.rng, WARM_UPS, self._least
    )
    protected = tree.protected()
    number = self.ledger.begin(system.id, [r.id for r in requests])
    trees = {
      STOCK: base.tree.manifest.root_hash,
      CANDIDATE: candidate.tree.manifest.root_hash,
      "protected": protected.root_hash,
    }
    folder.event("test_begun", id=system.id, test=number, trees=trees)
    for line in review:
      folder.event("needs_review", id=system.id, line=line)
    measured = self._measure(
      candidate, requests, warm_ups, deadline, folder, base
    )
    scored: dict[str, Any] = {}

    def force(records: checks.Records) -> Mapping[str, Any]:
      scored.update(self._forced(folder.path, base, requests))
      return scored

    verdict = self._judge(measured, [base, candidate], protected, force)
    outcome = {"verdict": verdict.verdict, "reason": verdict.reason}
    self.ledger.end(number, outcome)
    folder.event("test_ended", id=system.id, test=number, **outcome)
    return Tested(
      id=system.id,
      verdict=verdict,
      measured=measured,
      test=number,
      familywise=self.ledger.familywise,
      seen_before=seen,
      trees=trees,
      review=review,
      forcing=scored or None,
      seconds=time.monotonic() - began,
    )

  def _judge(self, measured, subjects, protected, force) -> paired.Verdict:
    kind = self.machine["device_kind"]
    try:
      paired.check_trees(subjects, protected)
    except EngineFault as e:
      return paired.blame(e)
    return paired.judge(
      measured,
      config=self.source.config,
      tokenizer=self.source.tokenizer,
      forced=force,
      floor=checks.device_floor(
        self.source.config, kind, in_fp8=self.source.in_fp8
      ),
      noise=self.sessions.s_aa,
      min_units=statistics.MIN_BLOCKS if self.blocks else statistics.MIN_UNITS,
    )

  def screen(
    self,
    system: System,
    against: System,
    units: int,
    folder: results.RunFolder,
    deadline: float,
  ) -> tuple[paired.Measured, paired.Verdict]:
    """A short session of development requests: no look that counts.

    What survives it was chosen by its requests, so no test takes them for
    fresh. Requests that are used already come first, and the more of them are
    left to tests. Tokens are forced where any output differs.
    """
    candidate, base = self._subject(system), self._subject(against)
    requests, warm_ups = draws.for_screening(
      self.requests, self.ledger.used_requests, self.rng, WARM_UPS,
      2 * min(units, self._pairs),
    )  # fmt: skip
    self.ledger.screened(system.id, [r.id for r in requests])
    protected = tree.protected()
    measured = self._measure(
      candidate, requests, warm_ups, deadline, folder, base
    )

    def force(records: checks.Records) -> Mapping[str, Any]:
      outputs = [
        {r["request"]: r["output_ids"] for r in records[name]}
        for name in (STOCK, CANDIDATE)
      ]
      if outputs[0] == outputs[1]:
        return {"verdict": "pass", "reason": "all outputs are stock's"}
      return self._forced(folder.path, base, requests)

    verdict = self._judge(measured, [base, candidate], protected, force)
    return measured, verdict

  def generate(
    self,
    system: System,
    name: str,
    prompts: Sequence[Request],
    folder: results.RunFolder,
  ) -> None:
    """Untimed outputs of a system, for token forcing.

    Args:
      name: of the system in the records: `stock` or `candidate`.
      prompts: with their own sampling.

    Raises:
      EngineFault: of the process.
    """
    subject = self._subject(system)
    with EngineProcess(self.bench.launch(name, subject)) as engine:
      for request in prompts:
        answer = engine.generate(
          request.prompt_ids, request.sampling, self.source.config.valid_vocab
        )
        try:
          line = checks.record(name, request, answer, subject.record)
        except SpecPilotError as e:
          raise EngineFault(name, "frames", str(e)) from None
        folder.request(line)

  def force(self, folder: Path) -> Mapping[str, Any]:
    """Stock's verdict on the candidate's records in a folder."""
    return self._force(folder)

  def _forced(
    self, run: Path, base: paired.Subject, requests: Sequence[Request]
  ) -> Mapping[str, Any]:
    """Stock's verdict on the candidate's tokens, with stock's as the control.

    Beside a champion there are none of stock's among the records. The
    champion's own gaps as a control would allow the next candidate half as
    much again, and so on: so stock decodes the same requests, untimed.

    Args:
      run: folder of the records.
      base: what was measured as stock.
      requests: of the session.
    """
    same_tree = base.tree.manifest == self.stock.tree.manifest
    if same_tree and base.settings == self.stock.settings:
      return self._force(run)
    mine = [r for r in results.read_requests(run) if r["system"] == CANDIDATE]
    answered = {r["request"] for r in mine}
    wanted = [
      r
      for request in requests
      for r in (request, process_blocks.again(request))
      if r.id in answered
    ]
    beside = results.RunFolder(run / CONTROL)
    try:
      for record in mine:
        beside.request(record)
      self.generate(self.stock_system, STOCK, wanted, beside)
    except EngineFault as e:
      return {
        "verdict": "inconclusive",
        "reason": f"forcing failed: {e}",
        "failed": True,
      }
    finally:
      beside.close()
    return self._force(run / CONTROL)

  def _force(self, run: Path) -> Mapping[str, Any]:
    """Stock's verdict on the candidate's tokens."""
    return forced.by_stock(
      self.settings, self.stock_system.kernels, run, self.bench.slot
    )


@contextlib.contextmanager
def open_lab(
  settings: Settings, slots: Sequence[Slot] = (), blocks: int = 0
) -> Generator[Lab]:
  """A lab whose temporary files are gone when it ends."""
  place = Path(tempfile.mkdtemp(prefix="specpilot-lab-"))
  try:
    yield Lab(settings, place, slots, blocks)
  finally:
    tree.remove(place)
    shutil.rmtree(place, ignore_errors=True)
