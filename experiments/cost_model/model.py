"""The cost model of a run, from its files: no device is needed.

Reads requests.jsonl, lattices.npz and profile.json of a run folder.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import metrics, results
from experiments.cost_model import (
  budgets,
  compare,
  floors,
  kernels,
  lattices,
  replay,
  two_level,
)
from experiments.settings import AR, STOCK
from specpilot_jax import configs
from specpilot_jax.configs import ModelConfig, SystemConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import config as drafters
from specpilot_jax.models.yarn import Yarn

PROFILE = "profile.json"
FORMAT = 1
PROFILED, TIMED = "profiled", "timed separately"
FACTORS = ("tau", "kernel", "overhead")

# What the figures must keep; a miss is told in the report.
STEPS_AGREE, TAU_AGREES, CLASSES_AGREE, OTHER_AT_MOST = 0.99, 0.005, 0.03, 0.08


@dataclasses.dataclass(frozen=True)
class Measured:
  """One system's steady step.

  Attributes:
    nodes: verified per step.
    context: mean committed tokens in the profiled steps.
    breakdown: profiled time by class.
    heaviest: kernels that take most time; empty where classes were timed
      separately.
    alone_us: the whole step, where classes were timed separately.
    without_graphs: whether the classes are those of the step compiled without
      CUDA graphs.
  """

  nodes: int
  context: float
  breakdown: kernels.Breakdown
  heaviest: list[dict[str, Any]]
  alone_us: float | None
  without_graphs: bool = False


def models_of(profile: Mapping[str, Any]) -> floors.Models:
  """What was profiled, from profile.json."""
  target: dict[str, Any] = dict(profile["target"])
  for field in ("layer_types", "eos_token_ids"):
    target[field] = tuple(target[field])
  drafter = None
  if profile["drafter_config"] is not None:
    fields: dict[str, Any] = dict(profile["drafter_config"])
    fields["target_layers"] = tuple(fields["target_layers"])
    if fields["yarn"] is not None:
      fields["yarn"] = Yarn(**fields["yarn"])
    drafter = drafters.KINDS[profile["drafter"]](**fields)
  return floors.Models(
    target=ModelConfig(**target),
    dtype=profile["dtype"],
    drafter=profile["drafter"],
    drafter_config=drafter,
    weights=profile.get("weights", "bf16"),
  )


def measured_of(system: Mapping[str, Any]) -> Measured:
  """One system of profile.json."""
  if "kernels" in system:
    activities, names = kernels.from_columns(system["kernels"])
    steps = system["steps"]
    breakdown = kernels.breakdown(activities, names, steps)
    if "without_graphs" in system:
      # The same step again, with an instruction behind every kernel: it tells
      # the classes, not the time of the step.
      step_us, count = breakdown.step_us, breakdown.kernels
      plain = system["without_graphs"]
      activities, names = kernels.from_columns(plain["kernels"])
      steps = plain["steps"]
      breakdown = dataclasses.replace(
        kernels.breakdown(activities, names, steps),
        step_us=step_us,
        kernels=count,
      )
    heaviest = kernels.heaviest(activities, names, steps)
  else:
    classes = {name: system["classes_us"][name] for name in kernels.CLASSES}
    # Timed apart, classes may take longer than together.
    breakdown = kernels.Breakdown(
      step_us=max(system["step_alone_us"], sum(classes.values())),
      classes=classes,
      kernels=0,
      unattributed_us=0.0,
    )
    heaviest = []
  return Measured(
    nodes=system["nodes"],
    context=system["context"],
    breakdown=breakdown,
    heaviest=heaviest,
    alone_us=system.get("step_alone_us"),
    without_graphs="without_graphs" in system,
  )


def _tau(records: Sequence[Mapping[str, Any]]) -> float:
  tokens = sum(len(r["output_ids"]) for r in records)
  return tokens / sum(r["metrics"]["num_spec_steps"] for r in records)


def compute(
  folder: Path,
  against: Sequence[Path] = (),
  given_us: Mapping[int, float] | None = None,
) -> dict[str, Any]:
  """The `cost_model` of result.json.

  Args:
    folder: of a run of --job=profile.
    against: other runs of the same requests, whose chains and trees are
      replayed on this one's lattices. Those of this run's systems always are.
    given_us: step times by rows of a pass that the caller knows.

  Raises:
    SpecPilotError: a file is missing, damaged or not of this format; nothing
      in the other run can be compared.
  """
  profile = kernels.read_columns(folder / PROFILE)
  if profile.get("format") != FORMAT:
    raise SpecPilotError(
      f"{folder / PROFILE}: format {profile.get('format')!r}, expected {FORMAT}"
    )
  records: dict[str, list[Mapping[str, Any]]] = {}
  for record in results.read_requests(folder):
    records.setdefault(record["system"], []).append(record)
  recordings = lattices.load(folder / lattices.LATTICES)
  real = {n: r for n, r in records.items() if n not in (AR, STOCK)}
  for other in against:
    for record in results.read_requests(other):
      if record["system"] != AR:
        label = f"{record['system']} of {other}"
        real.setdefault(label, []).append(record)
  try:
    out = _compute(profile, records, recordings, real, given_us or {})
    for other in against:
      if not any(
        run["system"].endswith(f" of {other}")
        for run in out["replay"]["real_runs"]
      ):
        raise SpecPilotError(
          f"{other}: no system there decoded drafts of the same drafter for a"
          f" request of {folder}, with its prompt and sampling settings"
        )
    return out
  except SpecPilotError:  # It is a ValueError.
    raise
  except KeyError as e:
    raise SpecPilotError(
      f"{folder / PROFILE}: damaged, {e} is missing"
    ) from None
  except (TypeError, ValueError, IndexError) as e:
    raise SpecPilotError(f"{folder / PROFILE}: damaged ({e})") from None


def _compute(profile, records, recordings, real, given_us) -> dict[str, Any]:
  stock_records = records.get(STOCK, ())
  by_id = {r["request"]: r for r in stock_records}
  for recording in recordings:
    record = by_id.get(recording.request)
    if record is None or record["output_ids"] != recording.output.tolist():
      raise SpecPilotError(
        f"lattices of request {recording.request} are not those of the output"
        f" of {STOCK} in {results.REQUESTS}"
      )
  models = models_of(profile)
  roofline = floors.Roofline(**profile["roofline"])
  measured = {
    name: measured_of(system) for name, system in profile["systems"].items()
  }
  stock = measured[STOCK]
  # Loops inflate acceptance.
  straight = [r for r in recordings if not r.looped] or list(recordings)
  chosen = [by_id[r.request] for r in straight]
  tau = _tau(chosen)
  replayed = _replays(straight, chosen, models, roofline, stock, tau)
  runs = (
    compare.compare(name, members, by_id, recordings)
    for name, members in real.items()
  )
  replayed["level_one"] = (
    None
    if any(r.level_one is None for r in straight)
    else two_level.recorded_agreement(straight)
  )
  if replayed["level_one"] is not None:
    replayed["level_one"]["policies"] = budgets.in_two_levels(straight)
  replayed["of_loops"] = all(r.looped for r in recordings)
  replayed["real_runs"] = [run for run in runs if run is not None]
  policies = replayed["policies"]
  best = max(
    itertools.chain(policies[configs.BEST_FIRST], policies[budgets.LIMITED]),
    key=lambda b: b["tau_per_floor_ms"],
  )
  times = budgets.measured_times(
    [
      {
        "weights": SystemConfig().weights,
        "rows": stock.nodes,
        "step_us": compare.wall_step_us(chosen),
      },
      *(
        run
        for run in replayed["real_runs"]
        if run["verification"] == configs.ONE_LEVEL
      ),
    ]
  )
  if given_us:
    times[budgets.GIVEN] = dict(given_us)
  replayed["pass_times"] = budgets.add_speeds(policies, times, stock.nodes)

  systems = {}
  for name, m in measured.items():
    work = floors.step_work(
      models if name != AR else _without_drafter(models),
      floors.Step(
        nodes=m.nodes,
        context=m.context,
        committed=1.0 if name == AR else _straight_tau(records, name, tau),
        certain=name == AR,
      ),
    )
    systems[name] = _system(m, records.get(name, ()), work, roofline)
  main = systems[STOCK]
  others = {
    name: measured_of(system)
    for name, system in profile.get("others", {}).items()
  }
  # The ceiling is a step of the best tree: its floors, not those of the chain.
  work = floors.step_work(
    models,
    floors.Step(
      nodes=best["nodes"], context=stock.context, committed=best["tau"]
    ),
  )
  floor = floors.floors_us(work, roofline)
  factors = {
    "tau": best["tau"] / replayed["stock"]["tau"],
    "kernel": main["profiled_step_us"] / sum(floor.values()),
    "overhead": main["overhead_factor"],
  }
  out = {
    "tau_factor": factors["tau"],
    "kernel_factor": factors["kernel"],
    "overhead_factor": factors["overhead"],
    "ceiling_speedup": _product(factors.values()),
    "largest": max(
      FACTORS, key=lambda f: -1.0 if factors[f] is None else factors[f]
    ),
    "classes": {
      name: {
        "measured_us": stock.breakdown.classes[name],
        "floor_us": floor[name],
        "floor_at_measured_nodes_us": main["classes"][name]["floor_us"],
      }
      for name in kernels.CLASSES
    },
    "timing": profile["kind"],
    "roofline": profile["roofline"],
    "best_tree": best,
    "replay": replayed,
    "systems": systems,
    "others": {
      name: {
        "nodes": m.nodes,
        "profiled_step_us": m.breakdown.step_us,
        "classes_us": m.breakdown.classes,
        "kernels_per_step": m.breakdown.kernels,
        "unattributed_us": m.breakdown.unattributed_us,
        "heaviest": m.heaviest,
      }
      for name, m in others.items()
    },
    "prefill_pass": _prefill(profile["prefill"], models, roofline),
  }
  if AR in systems:
    one = systems[AR]["profiled_step_us"]
    for name, system in systems.items():
      drafts = measured[name].breakdown.classes[kernels.DRAFTER]
      system["verify_over_ar_step"] = (
        None if name == AR else (system["profiled_step_us"] - drafts) / one
      )
    out["verify_over_ar_step"] = main["verify_over_ar_step"]
  out["notes"] = _notes(out)
  return out


def _product(values) -> float | None:
  product = 1.0
  for value in values:
    if value is None:
      return None
    product *= value
  return product


def _without_drafter(models: floors.Models) -> floors.Models:
  return dataclasses.replace(models, drafter="none", drafter_config=None)


def _replays(
  recordings, records, models, roofline, stock, tau
) -> dict[str, Any]:
  """Stock's chain against the run, and each policy by budget."""
  chain = replay.Chain(stock.nodes - 1)
  own = replay.replay(recordings, chain)
  steps = sum(r["metrics"]["num_spec_steps"] for r in records)
  agreed = sum(
    replay.agreement(recording, chain, record["metrics"]["emitted_per_step"])
    for recording, record in zip(recordings, records, strict=True)
  )
  policies = budgets.curves(recordings, stock.nodes)
  for entry in itertools.chain.from_iterable(policies.values()):
    work = floors.step_work(
      models,
      floors.Step(
        nodes=entry["nodes"], context=stock.context, committed=entry["tau"]
      ),
    )
    floor = sum(floors.floors_us(work, roofline).values())
    entry["floor_us"] = floor
    entry["tau_per_floor_ms"] = 1e3 * entry["tau"] / floor
  return {
    "requests": len(recordings),
    "positions": sum(map(len, recordings)),
    "stock": {
      "drafts": chain.drafts,
      "tau": own.tau,
      "tau_per_request": own.tau_per_request,
      "tau_measured": tau,
      "steps": steps,
      "steps_agreeing": agreed,
    },
    "policies": policies,
  }


def _straight_tau(records, name: str, default: float) -> float:
  """Of a system's requests that did not loop; another where there is none."""
  straight = [
    r for r in records.get(name, ()) if r["finish_reason"] != metrics.LOOP
  ]
  return _tau(straight) if straight and name != STOCK else default


def _system(m: Measured, records, work, roofline) -> dict[str, Any]:
  floor = floors.floors_us(work, roofline)
  wall = compare.wall_step_us(records)
  step = m.breakdown.step_us
  return {
    "nodes": m.nodes,
    "context": m.context,
    "measured_step_us": wall,
    "profiled_step_us": step,
    "floor_step_us": sum(floor.values()),
    "kernel_factor": step / sum(floor.values()),
    "overhead_factor": None if wall is None else wall / step,
    "kernels_per_step": m.breakdown.kernels,
    "unattributed_us": m.breakdown.unattributed_us,
    "classes_without_graphs": m.without_graphs,
    "other_share": m.breakdown.classes[kernels.OTHER] / step,
    "classes_over_step": sum(m.breakdown.classes.values()) / step,
    "classes_over_whole": (None if m.alone_us is None else step / m.alone_us),
    "classes": {
      name: {
        "measured_us": m.breakdown.classes[name],
        "floor_us": floor[name],
        "flops": work[name].flops,
        "bytes": work[name].bytes,
        "limit_us": roofline.limit_us(work[name]),
      }
      for name in kernels.CLASSES
    },
    "heaviest": m.heaviest,
  }


def _prefill(prefill, models, roofline) -> dict[str, Any]:
  work = floors.prefill_work(models, prefill["rows"], prefill["context"])
  return {
    "rows": prefill["rows"],
    "measured_us": prefill["measured_us"],
    "floor_us": roofline.floor_us(work),
  }


def _notes(model: Mapping[str, Any]) -> list[str]:
  """What a reader must know before trusting a figure."""
  notes = []
  if model["replay"]["of_loops"]:
    notes.append(
      "every recorded output ended as a loop: tau, replayed and measured, is"
      " that of loops, which inflate acceptance"
    )
  stock = model["replay"]["stock"]
  share = stock["steps_agreeing"] / stock["steps"]
  if share < STEPS_AGREE:
    notes.append(
      f"the replay of stock repeats {share:.1%} of its steps, below"
      f" {STEPS_AGREE:.0%}"
    )
  if abs(stock["tau"] / stock["tau_measured"] - 1) > TAU_AGREES:
    notes.append(
      f"replayed tau {stock['tau']:.3f} is more than {TAU_AGREES:.1%} from the"
      f" measured {stock['tau_measured']:.3f}"
    )
  notes += [
    f"{compare.describe(run)}: more than {compare.TAU_AGREES:.0%} off"
    for run in model["replay"]["real_runs"]
    if abs(run["difference"]) > compare.TAU_AGREES
  ]
  for name, system in model["systems"].items():
    excess = system["classes_over_whole"]
    if excess is not None and excess > 1 + CLASSES_AGREE:
      notes.append(
        f"{name}: the classes, timed apart, take {excess:.0%} of the whole"
        " step, timed alone"
      )
    if abs(system["classes_over_step"] - 1) > CLASSES_AGREE:
      notes.append(
        f"{name}: the classes sum to {system['classes_over_step']:.1%} of the"
        " profiled step"
      )
    if system["classes_without_graphs"]:
      notes.append(
        f"{name}: the profiler could not name the kernels of its step; the"
        " classes are those of the same step compiled without CUDA graphs"
      )
    if system["other_share"] > OTHER_AT_MOST:
      notes.append(
        f"{name}: class {kernels.OTHER} is {system['other_share']:.1%} of the"
        f" step, above {OTHER_AT_MOST:.0%}"
      )
    if system["unattributed_us"] > OTHER_AT_MOST * system["profiled_step_us"]:
      notes.append(
        f"{name}: {system['unattributed_us']:.0f} us of a step are kernels"
        " without an HLO instruction, classed by their names alone"
      )
    for kind, c in system["classes"].items():
      limit = c["limit_us"]
      if limit and 0 < c["measured_us"] < limit:
        notes.append(
          f"{name}: {kind} took {c['measured_us']:.1f} us, less than its bytes"
          f" and FLOPs take at 100 % of nominal peak ({limit:.1f} us): count"
          " or measurement is wrong, or its data stay in a cache"
        )
  return notes
