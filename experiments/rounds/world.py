"""The world of a round: this machine, through the controller."""

import contextlib
import dataclasses
import functools
import math
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import leases, results
from experiments import plan as plan_lib
from experiments.console import say
from experiments.controller import (
  forced,
  noise,
  paired,
  statistics,
  systems,
  tree,
)
from experiments.controller import lab as lab_lib
from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.lab import Lab
from experiments.controller.process import EngineFault
from experiments.hosts import Slot
from experiments.rounds import evidence
from experiments.rounds.cluster import Cluster, ClusterSettings
from experiments.rounds.explorers import Explorers
from experiments.rounds.phases import STOCK as STOCK_SYSTEM
from experiments.rounds.phases import System
from experiments.settings import Settings
from memory import patches
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

PROFILED = 6
"""Requests of the profile of phase 0."""
LATE, LATE_SHARE = 3_000, 0.3
"""Tokens beyond which an output is a late one, and the share of such outputs in
the sealed test: what goes wrong late shows nowhere else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sealed:
  """The sealed test.

  Attributes:
    long_requests: whose outputs are forced at full length.
    long_tokens: of each, without stops.
  """

  long_requests: int = 4
  long_tokens: int = 4_096


class LabWorld:
  """Measures systems of one deployment; each session runs to its end.

  Args:
    settings: of the run.
    folder: of the run; every session has one below it.
    sealed: the last test.
    aa_sessions: that are enough; those of earlier runs count.
    slots: devices. On the first two tests run, swapped, and nothing else on the
      host meanwhile; on several, screenings run side by side, in a process and
      with a lease each. None is JAX's choice, without leases.
    cluster: on whose actors screenings run instead; None for none.
  """

  def __init__(
    self,
    settings: Settings,
    folder: Path,
    sealed: Sealed,
    *,
    aa_sessions: int = statistics.WANTED_SESSIONS,
    slots: Sequence[Slot] = (),
    cluster: ClusterSettings | None = None,
  ):
    self._settings, self._folder = settings, folder
    self._slots = tuple(slots)
    self._device = slots[0].index if len(slots) == 1 else None
    self._sealed = sealed
    self._aa_sessions = aa_sessions
    self._labs: dict[str, Lab] = {}
    self._stack = contextlib.ExitStack()
    self._explorers: Explorers | Cluster | None = None
    make = functools.partial(on_device, settings, folder, sealed)
    if cluster is not None:
      own = self._slots[0] if self._slots else None
      self._explorers = self._stack.enter_context(Cluster(make, cluster, own))
    elif len(self._slots) > 1:
      self._explorers = self._stack.enter_context(Explorers(self._slots, make))

  @property
  def parallel(self) -> int:
    return 1 if self._explorers is None else len(self._explorers)

  @property
  def noise(self) -> str:
    return self.lab().sessions.path.stem[:12]

  def device(self) -> contextlib.AbstractContextManager[Slot | None]:
    if self._explorers is not None:
      return self._explorers.device()
    return self._own_device()

  @contextlib.contextmanager
  def _own_device(self) -> Generator[Slot | None]:
    slot = self._slots[0] if self._slots else None
    with leases.explore(slot, say):
      yield slot

  def _alone(self) -> contextlib.AbstractContextManager[None]:
    """The devices of tests, and the host with them."""
    return leases.pair(self._slots[:2], say)

  def open(self) -> Lab:
    """The lab of development requests, made now.

    Raises:
      SpecPilotError: the settings are refused.
    """
    with self._alone():
      return self.lab()

  def __enter__(self) -> "LabWorld":
    return self

  def __exit__(self, *error) -> None:
    self._stack.close()

  def lab(self, name: str = "dev") -> Lab:
    """The lab of a set of requests: `dev`, `sealed` or `long`."""
    if name not in self._labs:
      settings = self._settings
      if name != "dev":
        settings = dataclasses.replace(settings, split="sealed")
      if name == "long":
        settings = dataclasses.replace(
          settings,
          num_prompts=max(self._sealed.long_requests, lab_lib.WARM_UPS + 2),
          sampling=dataclasses.replace(
            settings.sampling,
            max_tokens=self._sealed.long_tokens,
            ignore_eos=True,
          ),
        )
      lab = self._stack.enter_context(
        lab_lib.open_lab(settings, self._slots[:2])
      )
      if settings.card is not None:
        plan_lib.check_kind(settings.card, lab.machine)
      self._labs[name] = lab
    return self._labs[name]

  def _system(self, system: System) -> systems.System:
    patch = system["patch"].encode() or None
    return systems.System(
      options=system["options"],
      drafter=self._settings.drafter,
      kernels=self._settings.flags.get("kernels", "reference"),
      patch=patch,
    )

  def _place(self, kind: str, system: System) -> results.RunFolder:
    stem = f"{kind}-{self._system(system).id}"
    if self._device is not None:  # Several processes may count the same.
      stem += f"-on-{self._device}"
    number = len(list((self._folder / "sessions").glob("*")))
    return results.RunFolder(self._folder / "sessions" / f"{number:03}-{stem}")

  def factors(self, champion: System) -> dict[str, Any]:
    """What is left to gain over the champion, by a profile.

    `tau` is what another choice of nodes could give: the best tree's acceptance
    over its own (`acceptance`) times the floors of its own step over those of
    that tree's, since fewer nodes may pay too. `kernel` is its profiled step
    over its own floors, `overhead` its measured over its profiled step: their
    product is the cost model's ceiling. What was not measured is None.

    A profile runs beside the controller, so that it is of stock or of options
    alone. What a patch has gained is measured from outside: see `_beside`.
    """
    told = self._profile("" if champion["patch"] else champion["options"])
    if champion["patch"]:
      told |= self._beside(champion, told)
    known = {
      name: told[name]
      for name in ("tau", "kernel", "overhead")
      if told[name] is not None
    }
    largest = max(known, key=lambda name: known[name]) if known else None
    return {**told, "largest": largest}

  def _profile(self, own: str) -> dict[str, Any]:
    """The factors of a system by its options.

    Raises:
      SpecPilotError: the profile failed.
    """
    s = self._settings
    count = len(list(self._folder.glob("profile*")))
    where = self._folder / f"profile-{count}"
    command = [
      sys.executable, "-m", "experiments.main", "--job=profile",
      f"--target={s.target}", f"--drafter={s.drafter}",
      f"--prompts={','.join(s.prompt_sets)}",
      f"--num_prompts={min(s.num_prompts or PROFILED, PROFILED)}",
      f"--max_tokens={s.sampling.max_tokens}",
      f"--temperature={s.sampling.temperature}",
      f"--kernels={s.flags.get('kernels', 'reference')}",
      f"--prefill_chunk={s.prefill_chunk}", f"--output_dir={where}",
      f"--set={own}",
      f"--systems=ar,stock{',candidate' if own else ''}",
    ]  # fmt: skip
    if s.dtype is not None:
      command.append(f"--dtype={s.dtype}")
    if s.split is not None:
      command.append(f"--split={s.split}")
    slot = self._slots[0] if self._slots else None
    with self._alone():
      done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tree.ROOT,
        env=forced.environment(slot),
      )
    result = None
    if (where / results.RESULT).exists():
      result = results.read_result(where)
    if result is None or not result["cost_model"]:
      lines = (done.stderr or done.stdout).strip().splitlines()
      raise SpecPilotError(f"profile: {lines[-1] if lines else 'failed'}")
    model = result["cost_model"]
    classes = {
      name: c["measured_us"] / c["floor_us"]
      for name, c in model["classes"].items()
      if c["floor_us"]
    }
    name = CANDIDATE if own else STOCK
    taus = {n: x["acceptance_length"] for n, x in result["systems"].items()}
    mine = model["systems"][name]
    floor = sum(c["floor_us"] for c in model["classes"].values())
    tau = model["tau_factor"] * taus[STOCK] / taus[name]
    return {
      "tau": tau * mine["floor_step_us"] / floor,
      "kernel": mine["kernel_factor"],
      "overhead": mine["overhead_factor"],
      "acceptance": tau,
      "of": "stock" if not own else own,
      "kernel_classes": classes,
      "stock_over_ar": result["systems"][STOCK].get("speedup_vs_ar"),
      "profile": where.name,
    }

  def _beside(
    self, champion: System, stock: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Factors of a champion that is a patch, from those of stock.

    A short session of both tells what the patch has changed: its acceptance
    divides `tau`; the time of its steps, by the controller's clock, multiplies
    `kernel`, since nobody sees from outside in which part of a step it lies.
    The floors of its own passes are not known: those of stock stand for them.
    """
    folder = self._place("champion", champion)
    of = f"{champion['options']} with its patch, beside stock"
    with self._alone():
      try:
        measured, verdict = self.lab().screen(
          self._system(champion), self._system(STOCK_SYSTEM), PROFILED // 2,
          folder, math.inf,
        )  # fmt: skip
      finally:
        folder.close()
    if measured.fault is not None or not measured.records[CANDIDATE]:
      unknown = dict.fromkeys(("tau", "kernel", "overhead", "acceptance"))
      return {**unknown, "of": f"{of}: {verdict.reason}"}
    accepted, step = {}, {}
    for name, records in measured.records.items():
      metrics = [r["metrics"] for r in records]
      steps = sum(m["num_spec_steps"] for m in metrics)
      accepted[name] = sum(len(r["output_ids"]) for r in records) / steps
      step[name] = sum(m["e2el_ms"] for m in metrics) / steps

    def scaled(name: str, ratio: float) -> float | None:
      return None if stock[name] is None else stock[name] * ratio

    longer = accepted[STOCK] / accepted[CANDIDATE]
    return {
      "tau": scaled("tau", longer),
      "acceptance": scaled("acceptance", longer),
      "kernel": scaled("kernel", step[CANDIDATE] / step[STOCK]),
      "of": of,
      "session": folder.path.name,
    }

  def aa(self) -> dict[str, Any]:
    with self._alone():
      return self._aa(self.lab())

  def _aa(self, lab: Lab) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": "ok", "reason": "", "mean": None}
    # Sessions of earlier runs of this deployment count.
    reused = len(lab.sessions) >= self._aa_sessions
    if not reused:
      try:
        told["mean"] = lab.aa_session(math.inf)
      except noise.Unmeasured as e:
        told |= {"kind": "infra", "reason": str(e)}
    return told | {"sessions": len(lab.sessions), "reused": reused}

  def check(self, system: System) -> str | None:
    try:
      if not system["patch"]:
        parsed = registry.parse_options(system["options"])
        parsed.check_temperature(self._settings.sampling.temperature)
        return None
      changes = patches.parse(system["patch"].encode())
      patches.apply(self.lab().base, changes)
      return None
    except SpecPilotError as e:
      return str(e)

  def merge(self, champion: System, patch: str) -> dict[str, Any]:
    try:
      merged = patches.merge(
        self.lab().base, champion["patch"].encode(), patch.encode()
      )
      return {"patch": merged.decode()}
    except patches.PatchError as e:
      return {"conflict": str(e)}

  def replayed(self, system: System, against: System) -> dict[str, Any]:
    profiles = sorted(self._folder.glob("profile-*"))
    if system["patch"] or against["patch"] or not profiles:
      return {"bound": None}  # A patch may change anything.
    found = evidence.bound(
      profiles[-1],
      registry.parse_options(system["options"]),
      registry.parse_options(against["options"]),
    )
    return found or {"bound": None}

  def screen(
    self, system: System, against: System, units: int
  ) -> dict[str, Any]:
    if self._explorers is not None:
      return self._explorers.call("screen", system, against, units)
    with self._own_device():
      return self._screen(system, against, units)

  def _screen(
    self, system: System, against: System, units: int
  ) -> dict[str, Any]:
    folder = self._place("screen", system)
    try:
      measured, verdict = self.lab().screen(
        self._system(system), self._system(against), units, folder, math.inf
      )
    except patches.PatchError as e:
      return {"kind": "refused", "reason": str(e)}
    finally:
      folder.close()
    if verdict.verdict == paired.REFUSED:
      return {
        "kind": "refused", "reason": f"{verdict.check}: {verdict.reason}"
      }  # fmt: skip
    times, exact = measured.times, verdict.exactness
    # A short session may be disturbed: it is a filter, and may be wrong.
    if times is None or exact is None or not len(times.stock):
      return {"kind": "infra", "reason": verdict.reason}
    r = times.units
    upper = -statistics.t_bound(-r)
    return {
      "kind": "ok",
      "reason": verdict.reason,
      "gain": math.expm1(float(r.mean())),
      "upper": math.expm1(upper) if math.isfinite(upper) else None,
      "log_ratios": [float(x) for x in r],
      "identical": exact.identical,
      "outputs": exact.outputs,
      "session": folder.path.name,
    }

  def test(self, system: System, against: System) -> dict[str, Any]:
    with self._alone():
      return self._paired(self.lab(), "test", system, against)

  def _paired(
    self, lab: Lab, kind: str, system: System, against: System
  ) -> dict[str, Any]:
    folder = self._place(kind, system)
    try:
      tested = lab.test(
        self._system(system), folder, math.inf, self._system(against)
      )
    except patches.PatchError as e:
      return {"kind": "refused", "verdict": paired.REFUSED, "reason": str(e)}
    finally:
      folder.close()
    verdict = tested.verdict
    reason, outcome = f"{verdict.check}: {verdict.reason}", verdict.verdict
    if outcome == statistics.ACCEPT and tested.seen_before:
      outcome = statistics.INCONCLUSIVE
      reason = f"{tested.seen_before} of the requests are not fresh"
    d = verdict.decision
    times = tested.measured.times
    return {
      "kind": "infra" if outcome == paired.INVALID else "ok",
      "verdict": outcome,
      "reason": reason,
      "gain": d.gain if d else None,
      "bound": d.bound if d else None,
      "threshold": d.threshold if d else None,
      "s_aa": d.s_aa if d else None,
      "units": d.units if d else 0,
      "log_ratios": [float(x) for x in times.units]
      if times is not None and len(times.stock)
      else [],
      "identical": verdict.exactness.identical if verdict.exactness else None,
      "outputs": verdict.exactness.outputs if verdict.exactness else None,
      "test": tested.test,
      "familywise": tested.familywise,
      "session": folder.path.name,
    }

  def seal(self, system: System) -> dict[str, Any]:
    """Unseen requests, timed; then long outputs, forced. Any failure rejects.

    The times of sealed requests have s_AA of sealed sessions where there are
    any, else that of the development requests, whose design is the same.
    """
    with self._alone():
      return self._seal(system)

  def _seal(self, system: System) -> dict[str, Any]:
    lab = self.lab("sealed")
    if lab.sessions.s_aa is None:
      lab.sessions = self.lab().sessions
    timed = self._paired(lab, "seal", system, STOCK_SYSTEM)
    scored = self._force_long(system)
    verdict, reason = timed["verdict"], timed["reason"]
    if verdict == statistics.ACCEPT and scored["verdict"] != "pass":
      verdict = (
        paired.REFUSED if scored["verdict"] == "fail"
        else statistics.INCONCLUSIVE
      )  # fmt: skip
      reason = f"outputs of {self._sealed.long_tokens}: {scored['reason']}"
    gain = timed["gain"]
    kind = timed["kind"]
    if scored.get("failed") and timed["verdict"] == statistics.ACCEPT:
      kind = "infra"
    return {
      "kind": kind,
      "verdict": verdict,
      "reason": reason,
      "speedup_vs_stock": None if gain is None else 1 + gain,
      "lcb": timed["bound"],
      "tokens_forced": scored.get("tokens", 0),
      "timed": timed,
      "long": scored,
    }

  def _force_long(self, system: System) -> Mapping[str, Any]:
    lab = self.lab("long")
    requests: list[Request] = lab.requests[: self._sealed.long_requests]
    folder = self._place("long", system)
    try:
      for name, which in ((STOCK, STOCK_SYSTEM), (CANDIDATE, system)):
        lab.generate(self._system(which), name, requests, folder)
    except EngineFault as e:
      mine = e.engine == CANDIDATE
      return {
        "verdict": "fail" if mine else "inconclusive",
        "reason": str(e),
        "tokens": 0,
        "failed": not mine,  # Stock's failure says nothing of the candidate.
      }
    finally:
      folder.close()
    records = results.read_requests(folder.path)
    outputs = {(r["system"], r["request"]): r["output_ids"] for r in records}
    late = [
      len(ids) > LATE for (name, _), ids in outputs.items() if name == CANDIDATE
    ]
    scored = dict(lab.force(folder.path))
    same = all(
      outputs[STOCK, r.id] == outputs[CANDIDATE, r.id] for r in requests
    )
    if scored["verdict"] == "inconclusive" and same:
      scored |= {
        "verdict": "pass",
        "reason": f"{len(requests)} outputs are stock's, token for token",
      }
    if scored["verdict"] == "pass" and sum(late) < LATE_SHARE * len(late):
      scored |= {
        "verdict": "inconclusive",
        "reason": f"{sum(late)} of {len(late)} outputs are longer than {LATE}"
        " tokens: what goes wrong late was not looked for",
      }
    return scored


def on_device(
  settings: Settings, folder: Path, sealed: Sealed, slot: Slot
) -> LabWorld:
  """The world of a process that explores on one device."""
  return LabWorld(settings, folder, sealed, slots=(slot,))
