"""The job `paired_test`: one candidate against stock, or stock against itself.

    python -m experiments.main --job=paired_test --flagfile=A.flags \\
      --candidate=B.flags --aa_sessions=8
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import benchmark, hosts, leases, metrics, plan, report, results
from experiments.console import say
from experiments.controller import checks, noise, paired, section, statistics
from experiments.controller import lab as lab_lib
from experiments.controller.checks import STOCK
from experiments.controller.lab import Lab
from experiments.controller.session import Times
from experiments.controller.systems import System, Tested, options_text
from experiments.settings import Settings
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

SAME = (
  "target", "prompt_sets", "num_prompts", "split", "chat", "sampling", "dtype",
  "prefill_chunk",
)  # fmt: skip
"""Fields in which candidate and stock must not differ: they are the work."""
AA_FAILURES = 3
"""A/A sessions in a row that failed: the machine is not fit for more."""


def system_of(
  settings: Settings, candidate: Settings | None, patch: Path | None
) -> System | None:
  """The candidate that flags describe; None where they describe stock.

  Args:
    settings: of the run.
    candidate: of the flag file of the candidate; None takes the options of
      `settings`.
    patch: a unified diff over this checkout.

  Raises:
    SpecPilotError: the candidate would do other work than stock; a patch that
      cannot be read.
  """
  if candidate is not None:
    for field in SAME:
      mine, its = getattr(settings, field), getattr(candidate, field)
      if mine != its:
        raise SpecPilotError(
          f"--candidate: {field} is {its!r}, the run's is {mine!r}; only --set,"
          " --drafter, --kernels and --patch may differ"
        )
  chosen = candidate or settings
  data = None
  if patch is not None:
    try:
      data = patch.read_bytes()
    except OSError as e:
      raise SpecPilotError(f"--patch {patch}: {e.strerror}") from None
  flags = chosen.flags
  if data is None:
    options = options_text(registry.parse_options(flags.get("set", "")))
  else:
    options = flags.get("set", "")  # Its options may be the patch's own.
  system = System(
    options=options,
    drafter=chosen.drafter,
    kernels=flags.get("kernels", "reference"),
    patch=data,
  )
  stock = System(
    options="",
    drafter=settings.drafter,
    kernels=settings.flags.get("kernels", "reference"),
  )
  return None if system == stock else system


def as_dict(lab: Lab, tested: Tested) -> dict[str, Any]:
  """`paired_test` of result.json."""
  times = tested.measured.times
  log_ratios = [] if times is None or not len(times.stock) else times.units
  return {
    "id": tested.id,
    "verdict": tested.verdict.as_dict(),
    "log_ratios": list(log_ratios),
    "seconds": tested.seconds,
    "per_token": bool(times and times.divided),
    "dropped_units": times.dropped if times else 0,
    "stock_slowed": tested.measured.slowed,
    "aa_sessions": len(lab.sessions),
    "aa_means": lab.sessions.means,
    "design": lab.design,
    "devices": devices_of(lab, times),
    "test": tested.test,
    "familywise": tested.familywise,
    "seen_before": tested.seen_before,
    "trees": tested.trees,
    "review": tested.review,
    "isolation": lab.layers.as_dict(),
    "autotuned": lab.bench.autotuned is not None,
    "printed": tested.measured.output,
  }


def devices_of(lab: Lab, times: Times | None) -> dict[str, Any] | None:
  """What a test on two devices says of them; None on one.

  `swap` is of this session, `aa_asymmetries` of the A/A sessions, whose s_AA
  would be `aa_unswapped` without the swap.
  """
  if not lab.swaps:
    return None
  swap = None if times is None else times.swap
  return {
    "indices": [slot.index for slot in lab.slots],
    "names": [slot.name for slot in lab.slots],
    "emulated": any(slot.is_emulated for slot in lab.slots),
    "swap": swap.as_dict() if swap else None,
    "aa_asymmetries": lab.sessions.asymmetries,
    "aa_unswapped": lab.sessions.unswapped,
    "s_aa": lab.sessions.s_aa,
  }


def _device_notes(lab: Lab, times: Times | None) -> list[str]:
  """What is to be known of two devices."""
  told = devices_of(lab, times)
  if told is None:
    return []
  notes = []
  if told["emulated"]:
    notes.append(
      "the devices are emulated, shares of one processor: this tries out the"
      " procedure and times nothing"
    )
  swap = None if times is None else times.swap
  if swap is not None and swap.is_large:
    one, two = told["indices"]
    differ = section.percent(math.expm1(swap.asymmetry), 1)
    notes.append(
      f"device {two} against device {one}: time {differ}, beyond"
      f" {statistics.ASYMMETRY:.0%}: one of them is to be looked at"
    )
  return notes


def _notes(lab: Lab, tested: Tested) -> list[str]:
  notes = list(lab.source.checkpoint.notes)
  notes += [x for x in lab.layers.statement() if "NOT" in x]
  times = tested.measured.times
  notes += _device_notes(lab, times)
  if times is not None and times.late:
    notes.append("the time limit ended the test before all requests were timed")
  if times is not None and times.dropped:
    notes.append(
      f"{times.dropped} units were left out: the card was throttled for stock"
      " alone"
    )
  if tested.seen_before:
    notes.append(
      f"{tested.seen_before} of the requests were used by earlier tests of this"
      " deployment: no fresh look, and no promotion"
    )
  if lab.bench.autotuned is None and lab.machine["platform"] == "gpu":
    notes.append(
      "the compiler wrote no table of its choices: stock and candidate tuned"
      " apart"
    )
  kind = lab.machine["device_kind"]
  if checks.device_floor(lab.source.config, kind) is None:
    notes.append(
      f"no nominal peak of {lab.environment['device_kind']} is known: speeds"
      " beyond it are not noticed"
    )
  return notes


def trial(tested: Tested, system: System) -> dict[str, Any]:
  """An entry of `trials` of result.json."""
  d = tested.verdict.decision
  return {
    "id": tested.id,
    "option": system.options,
    "patch": system.patch is not None,
    "prediction": None,
    "evidence": None,
    "measured": d.gain if d else None,
    "lcb": d.bound if d else None,
    "s_aa": d.s_aa if d else None,
    "verdict": tested.verdict.verdict,
    "reason": tested.verdict.reason,
  }


def collect_aa(lab: Lab, wanted: int, deadline: float, folder) -> float:
  """Runs the A/A sessions that are missing; seconds of the longest, 0 of none.

  None is begun with less time left than one has taken.

  Raises:
    noise.Unmeasured: `AA_FAILURES` in a row could not be measured.
  """
  failed, longest = 0, 0.0
  while len(lab.sessions) < wanted:
    began = time.monotonic()
    if began + longest > deadline:
      break
    try:
      mean = lab.aa_session(deadline)
    except noise.Unmeasured as e:
      failed += 1
      folder.event("aa_session_failed", reason=str(e))
      if failed == AA_FAILURES:
        raise
      say(f"{e}; once more")
      continue
    seconds = time.monotonic() - began
    failed, longest = 0, max(longest, seconds)
    folder.event(
      "aa_session", mean=mean, sessions=len(lab.sessions), seconds=seconds
    )
    say(
      f"A/A session {len(lab.sessions)} of {wanted}: mean"
      f" {section.percent(mean, 3)} ({seconds:.0f} s)"
    )
  return longest


def deployment(lab: Lab) -> dict[str, Any]:
  """`deployment` of result.json."""
  s, env = lab.settings, lab.environment
  name = lab.source.config.name
  parts = (name, env["dtype"], env["platform"], s.drafter)
  return {
    "name": "-".join(x.replace("/", "_").replace(":", "_") for x in parts),
    "target": name,
    "drafter": s.drafter,
    "weights": "; ".join([env["dtype"], *lab.source.checkpoint.notes]),
    "weights_sha256": lab.weights_sha256,
    "device": env["device_kind"],
    "dtype": env["dtype"],
    "widened": s.target.startswith("widened:"),
    "batch": 1,
    "max_seq_len": lab.room,
    "prefill_chunk": s.prefill_chunk,
  }


def run(
  settings: Settings,
  candidate: Settings | None,
  patch: Path | None,
  aa_sessions: int,
  blocks: int = 0,
  devices: Sequence[int] = (),
) -> int:
  """Runs the job; the exit status.

  Args:
    settings: of the run.
    candidate: of its own flag file, where there is one.
    patch: of the candidate.
    aa_sessions: A/A sessions to have on record first.
    blocks: of processes, for engines that do not fit together; 0 holds both.
    devices: indices of one or two, which are then swapped; none is JAX's
      choice. Nothing else that leases devices uses this host meanwhile.

  Returns:
    0, or 1 where the candidate was refused or the measurement says nothing.
  """
  if not settings.token_forcing:
    raise SpecPilotError(
      "paired_test proves every output that it times: --token_forcing cannot"
      " be off"
    )
  if settings.output_dir is not None:
    results.check_output_dir(settings.output_dir)
  system = system_of(settings, candidate, patch)
  if system is None and not aa_sessions:
    raise SpecPilotError(
      "nothing to test: --candidate=FLAGFILE, --set or --patch describes a"
      " candidate, --aa_sessions=N measures stock against itself"
    )
  started = time.monotonic()
  deadline = math.inf
  if settings.max_wall_s is not None:
    deadline = started + settings.max_wall_s
  slots = hosts.slots(devices)
  with (
    leases.pair(slots, say, deadline),
    lab_lib.open_lab(settings, slots, blocks) as lab,
  ):
    if settings.card is not None:
      plan.check_kind(settings.card, lab.machine)
    return _run(lab, system, aa_sessions, started, deadline)


def _run(
  lab: Lab, system: System | None, aa_sessions: int, started: float, deadline
) -> int:
  settings = lab.settings
  result = results.empty_result("paired_test")
  result["environment"] = lab.environment
  result["deployment"] = deployment(lab)
  result["sampling"] = dataclasses.asdict(settings.sampling)
  result["prompts"] = {
    "sets": list(settings.prompt_sets),
    "split": settings.split,
    "chat": lab.requests[0].prompt.chat,
    "requests": len(lab.requests) - lab_lib.WARM_UPS,
    "turns": 1,
  }
  folder = results.RunFolder(
    settings.output_dir
    or benchmark.default_folder(result["deployment"]["name"])
  )
  say(f"paired test on {lab.environment['device_kind']}: {lab.units} units")
  say(f"results: {folder.path}")
  folder.event("run_started", job="paired_test", environment=lab.environment)
  try:
    longest = collect_aa(lab, aa_sessions, deadline, folder)
    status, records = 0, {}
    # A test that time cuts off would spend requests and level for nothing, and
    # so would one without its gate.
    short = len(lab.sessions) < aa_sessions
    short = short or time.monotonic() + longest > deadline
    if system is not None and not short:
      tested = lab.test(system, folder, deadline)
      records = {n: r for n, r in tested.measured.records.items() if r}
      test = as_dict(lab, tested)
      result["paired_test"] = test
      result["trials"] = [trial(tested, system)]
      if tested.verdict.verdict == statistics.ACCEPT:
        result["accepted"] = [tested.id]
      if tested.forcing:
        result["token_forcing"] = {"candidate": tested.forcing}
      result["notes"] = _notes(lab, tested)
      result["systems"] = _systems(records)
      status = int(tested.verdict.verdict in (paired.REFUSED, paired.INVALID))
    else:
      known = lab.sessions.s_aa
      told = "not known yet" if known is None else f"{known:.3%}"
      result["notes"] = [
        f"s_AA {told}, of {len(lab.sessions)} A/A sessions ({lab.design})",
        *_device_notes(lab, None),
      ]
      if short:
        result["notes"].append(
          f"time ran out with {len(lab.sessions)} of {aa_sessions} A/A sessions"
          f"{' and before the test' if system else ''}; the same command with"
          " another --output_dir goes on"
        )
    result["aa"] = {
      "design": lab.design,
      "wanted": aa_sessions,
      "means": lab.sessions.means,
      "s_aa": lab.sessions.s_aa,
      "devices": devices_of(lab, None),
    }
    result["requests_sha256"] = results.sha256(folder.path / results.REQUESTS)
    result["timing_s"] = {"total": round(time.monotonic() - started, 3)}
    result = results.to_json(result)
    folder.result(result)
    written = report.write(folder.path, result, records)
    folder.event("run_finished", timing_s=result["timing_s"])
  except BaseException as e:
    folder.event("run_failed", error=f"{type(e).__name__}: {e}")
    raise
  finally:
    folder.close()
  if result["systems"]:
    say(benchmark.summary_table(result["systems"]))
  for note in result["notes"]:
    say(f"note: {note}")
  told = section.device_lines(result["aa"]["devices"])
  if result["paired_test"]:
    told = section.lines(result["paired_test"])
  for text in told:
    say(text)
  say(f"report: {written}")
  return status


def _systems(records: Mapping[str, Any]) -> dict[str, Any]:
  ordered = sorted(records, key=lambda name: name != STOCK)
  return {
    name: metrics.summarize(records[name], ())
    | {"options": records[name][0]["options"]}
    for name in ordered
  }
