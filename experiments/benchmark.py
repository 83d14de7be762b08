"""The jobs `benchmark` and `profile`.

A benchmark decodes every prompt with every system, in an order that turns
around from prompt to prompt (A B, B A), so that drift of the machine does not
favour one. Each system is compiled and warmed up first; nothing may be
compiled while requests are timed. Stock then scores the outputs. A profile is a
benchmark that also records lattices and step times for the cost model.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from experiments import (
  adjudication,
  environment,
  forcing,
  metrics,
  plan,
  prompts,
  report,
  results,
  timed,
)
from experiments.ablation import compare as ablation
from experiments.ablation import section as ablation_section
from experiments.console import Progress, number, say, table
from experiments.cost_model import measure, sections
from experiments.cost_model import model as cost_model
from experiments.settings import AR, STOCK, Settings
from specpilot_jax import compilation, footprint, loading
from specpilot_jax.checkpoints import widened
from specpilot_jax.configs import TWO_LEVEL, SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry, two_level
from specpilot_jax.models import assembly
from specpilot_jax.models.target import Target

_NO_COST_MODEL = "the cost model failed"


@dataclasses.dataclass
class Clock:
  """Wall time of the parts of a run, and its limit."""

  limit_s: float | None
  started: float = dataclasses.field(default_factory=time.monotonic)
  parts: dict[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self._mark = self.started

  def lap(self, name: str) -> None:
    now = time.monotonic()
    self.parts[name] = round(now - self._mark, 3)
    self._mark = now

  @property
  def deadline(self) -> float:
    return math.inf if self.limit_s is None else self.started + self.limit_s


def run(settings: Settings, *, profile: bool = False) -> int:
  """Runs a benchmark; returns the exit status.

  Args:
    settings: what to run.
    profile: record what the cost model needs too, and compute it.

  Returns:
    0, or 1 where something was compiled in the timed region, or token forcing
    or the cost model failed (the results are written all the same).

  Raises:
    SpecPilotError: bad input; nothing was written.
  """
  clock = Clock(settings.max_wall_s)
  startup: dict[str, Any] = {"program_s": _age_s()}
  if settings.output_dir is not None:
    results.check_output_dir(settings.output_dir)
  if profile and STOCK not in settings.systems:
    raise SpecPilotError(
      "--job=profile measures stock against its ceiling: it needs a drafter,"
      f" and {STOCK} among the systems"
    )
  loading.prepare_jax(settings.dtype)
  measure.prepare()
  if settings.card is not None:
    plan.check_card(settings.card)
  source = loading.open_target(settings.target)
  requests = load_requests(settings, source)
  longest = max(len(p.token_ids or ()) for p in requests)
  room = sequence_room(source, longest, settings.sampling.max_tokens)
  planned = _plan(settings, source, room, profile=profile)
  say(plan.check_memory(planned, footprint.device_bytes()))
  model = source.build(settings.dtype, settings.kernels, settings.weights)
  drafter = loading.make_drafter(settings.drafter, model.target)
  jax.block_until_ready(
    (assembly.leaves(model.target), drafter and drafter.params)
  )
  startup["weights_s"] = _age_s()
  peaks = plan.Peaks(planned)
  peaks.note("weights")

  @functools.cache
  def prepared(weights: str, plain: bool):
    """Systems share weights of one form."""
    return registry.prepare(
      SystemConfig(weights=weights), model.target, None if plain else drafter
    )

  @functools.cache
  def coarse(view: str):
    """So do level 1's, beside weights in bf16."""
    return two_level.coarse_target(model.target, view)

  def engine(name: str) -> Engine:
    system = settings.system(name)
    target, drafter = registry.prepare(
      system, *prepared(system.weights, name == AR)
    )
    return Engine(
      target,
      drafter=drafter,
      tokenizer=model.tokenizer,
      system=system,
      schedule=registry.schedule(system, target, drafter, coarse=coarse),
      max_seq_len=room,
      prefill_chunk=settings.prefill_chunk,
    )

  subject = None

  def looking() -> Target | None:
    """What level 1's choices are recorded with, which replay needs; weights in
    W12 hold the view already."""
    systems = list(map(settings.system, settings.systems))
    if not any(s.verification == TWO_LEVEL for s in systems):
      return None
    if any(s.weights == "w12" for s in systems):
      return prepared("w12", False)[0]
    return coarse(SystemConfig().view)

  if profile and drafter is not None:
    subject = measure.Subject(
      target=model.target,
      drafter=drafter,
      sampling=settings.sampling,
      max_seq_len=room,
      prefill_chunk=settings.prefill_chunk,
      candidate=settings.options,
      coarse=looking(),
    )
    measure.check(subject)
  engines = {name: engine(name) for name in settings.systems}
  # A calibration that cannot be read or kept is told now, not after the
  # measurement.
  store = forcing.calibration(
    model,
    settings.prefill_chunk,
    greedy=settings.sampling.temperature == 0,
  )
  if settings.token_forcing:
    store.check_writable()
  env = environment.describe(settings.flags, model.target)
  job = "profile" if profile else "benchmark"
  result = results.empty_result(job)
  result["environment"] = env
  result["deployment"] = deployment(settings, model, env, room)
  result["sampling"] = dataclasses.asdict(settings.sampling)
  result["prompts"] = {
    "sets": list(settings.prompt_sets),
    "split": settings.split,
    "chat": requests[0].chat,
    "requests": len(requests),
    # Of a conversation only what the user says first is answered.
    "turns": 1,
    "longest_tokens": longest,
  }
  folder = results.RunFolder(
    settings.output_dir or default_folder(result["deployment"]["name"])
  )
  announce(settings, model, env, requests)
  say(f"results: {folder.path}")
  folder.event("run_started", job=job, environment=env)
  try:
    clock.lap("load")
    result["compilation"] = timed.warm_up(settings, engines, requests, folder)
    clock.lap("warm_up")
    peaks.note("warm_up")
    startup["first_token_s"] = {
      name: told["first_token_s"]
      for name, told in result["compilation"].items()
    }
    result["startup"] = startup
    say(f"seconds since the process started: {_startup(startup)}")
    before = compilation.num_compilations()
    records, stopped = timed.measure(
      settings,
      engines,
      requests,
      folder,
      environment.run_label(env),
      clock.deadline,
    )
    result["recompiles"] = compilation.num_compilations() - before
    result["stopped_early"] = stopped
    clock.lap("measure")
    peaks.note("measure")
    result["systems"] = {
      name: metrics.summarize(members, records.get(AR, ()))
      | {"options": registry.assignments(settings.system(name))}
      for name, members in records.items()
      if members
    }
    if settings.ablation:
      result["ablation"] = ablation.result_of(settings.ablation, records)
    result["requests_sha256"] = results.sha256(folder.path / results.REQUESTS)
    result["notes"] = notes_of(result, model)
    if subject is not None:
      result["cost_model"] = _cost_model(
        folder, subject, records, result, clock, engines
      )
      clock.lap("profile")
      peaks.note("profile")
    if settings.token_forcing:
      force_own(
        settings, model, room, planned, store, records, result, folder, clock,
        peaks,
      )  # fmt: skip
    result["device_memory"] = peaks.told()
    result["notes"] += peaks.notes()
    return finish(folder, result, records, clock)
  except BaseException as e:
    folder.event("run_failed", error=f"{type(e).__name__}: {e}")
    raise
  finally:
    folder.close()


def _age_s() -> float:
  return round(environment.process_age_s(), 3)


def _startup(startup: Mapping[str, Any]) -> str:
  parts = [f"weights {startup['weights_s']:.1f}"]
  for name, seconds in startup["first_token_s"].items():
    parts.append(f"first token of {name} {seconds:.1f}")
  return ", ".join(parts)


def _plan(
  settings: Settings, source: loading.Source, room: int, *, profile: bool
) -> dict[str, int]:
  drafting = sum(name != AR for name in settings.systems)
  plain = len(settings.systems) - drafting + settings.token_forcing
  # A profile has a request of its own beside the engines'.
  drafting += profile
  wanted = {source.held(settings.system(n).weights) for n in settings.systems}
  return plan.memory(
    source.config,
    loading.drafter_config(settings.drafter, source.config),
    dtype=settings.dtype or loading.default_dtype(),
    max_seq_len=room,
    prefill_chunk=settings.prefill_chunk,
    drafting=drafting,
    plain=plain,
    weights=sorted(wanted),
    views=plan.views(map(settings.system, settings.systems), profile=profile),
    packed_views=settings.kernels.w12_matmul != "reference",
  )


def load_requests(
  settings: Settings, model: loading.Source
) -> list[prompts.Prompt]:
  """The prompts that settings ask for, each of a length that fits."""
  if model.tokenizer is None:
    raise SpecPilotError(f"{settings.target} has no tokenizer to read prompts")
  loaded: list[prompts.Prompt] = []
  for name in settings.prompt_sets:
    default = "dev" if name in prompts.PROMPT_SETS else "all"
    loaded += prompts.load_prompts(
      name,
      model.tokenizer,
      settings.num_prompts,
      split=settings.split or default,
      chat=settings.chat,
    )
  seen: set[str] = set()
  limit = model.config.context_length
  for prompt in loaded:
    if prompt.id in seen:
      raise SpecPilotError(f"two prompts have the id {prompt.id!r}")
    seen.add(prompt.id)
    size = len(prompt.token_ids or ())
    if not 0 < size < limit:
      raise SpecPilotError(
        f"prompt {prompt.id} has {size} tokens, expected 1 to {limit - 1}"
        f" (the context of {model.config.name} is {limit})"
      )
  return loaded


def sequence_room(model, prompt: int, output: int) -> int:
  """Tokens to reserve memory for: a multiple of 64, within the context.

  On a CPU the time of a pass grows with it, so it follows the prompts.
  """
  room = -(-(prompt + output) // 64) * 64
  return min(model.config.context_length, room)


def deployment(settings, model, env, room: int) -> dict[str, Any]:
  """`deployment` of result.json.

  Args:
    settings: of the run.
    model: the loaded target.
    env: see `environment.describe`.
    room: tokens that memory is reserved for.
  """
  dtype = str(model.target.dtype)
  parts = (model.config.name, dtype, env["platform"], settings.drafter)
  return {
    "name": "-".join(re.sub("[/:]", "_", part) for part in parts),
    "target": model.config.name,
    "drafter": settings.drafter,
    "weights": "; ".join([dtype, *model.notes]),
    "weights_sha256": dict(model.sha256),
    "device": env["device_kind"],
    "dtype": dtype,
    "widened": widened.is_widened(model.config.name),
    "batch": 1,
    "max_seq_len": room,
    "prefill_chunk": settings.prefill_chunk,
  }


def default_folder(deployment: str) -> Path:
  """A folder of runs/ that is not there yet."""
  stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{deployment}"
  path, again = Path("runs") / stem, 1
  while path.exists():
    again += 1
    path = Path("runs") / f"{stem}-{again}"
  results.check_output_dir(path)
  return path


def announce(settings: Settings, model, env, requests) -> None:
  s = settings.sampling
  law = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
  say(
    f"benchmark: {model.config.name} in {model.target.dtype} on"
    f" {env['device_kind']} ({env['platform']}, {env['cores']} cores), drafter"
    f" {settings.drafter}"
  )
  for note in model.notes:
    say(f"weights: {note}")
  say(
    f"prompts: {len(requests)} of {', '.join(settings.prompt_sets)}, {law}, at"
    f" most {s.max_tokens} tokens each; systems side by side:"
    f" {', '.join(settings.systems)}"
  )


def _cost_model(
  folder, subject, records, result, clock, engines
) -> dict[str, Any] | None:
  """Records and computes the cost model; None where time ran out before, or
  where it failed, which a note tells."""
  if not records[STOCK] or time.monotonic() > clock.deadline:
    result["notes"].append("the time limit ended the run before the cost model")
    return None
  total = len(records[STOCK]) + len(subject.profiled(records))
  try:
    with Progress("profile", total) as progress:
      measure.collect(folder.path, subject, records, progress.advance, engines)
    return cost_model.compute(folder.path)
  except (SpecPilotError, jax.errors.JaxRuntimeError) as e:
    # The benchmark before it is worth more than nothing.
    reason = str(e).splitlines()[0]
    folder.event("cost_model_failed", error=str(e))
    result["notes"].append(f"{_NO_COST_MODEL}: {reason}")
    return None


def make_arbiter(settings, model, room, planned) -> adjudication.Arbiter:
  return adjudication.Arbiter(
    model.target,
    max_seq_len=room,
    prefill_chunk=settings.prefill_chunk,
    planned=sum(planned.values()),
  )


def force_own(
  settings, model, room, planned, store, records, result, folder, clock, peaks
) -> None:
  """Judges what this run decoded, into `result`."""
  arbiter = make_arbiter(settings, model, room, planned)
  engine = Engine(
    model.target,
    tokenizer=model.tokenizer,
    system=SystemConfig(weights=model.target.weights),
    max_seq_len=room,
    prefill_chunk=settings.prefill_chunk,
  )
  result["token_forcing"], notes = force(
    engine, store, arbiter, records, settings, folder, clock, keep=True
  )
  result["notes"] += notes
  if arbiter.made:
    peaks.also("adjudication", sum(arbiter.needed.values()))
  clock.lap("token_forcing")
  peaks.note("token_forcing")


def force(
  engine, store, arbiter, records, settings, folder, clock, *, keep: bool
):
  """Verdicts by system, and notes."""
  records = forcing.without_levels(records)
  total = forcing.num_outputs(records)
  with Progress("force", total) as progress:
    judge = forcing.Forcing(
      engine=engine,
      store=store,
      dtype=str(engine.dtype),
      min_tokens=forcing.min_control_tokens(settings.min_control_tokens),
      keep=keep,
      deadline=clock.deadline,
      progress=progress.advance,
      arbiter=arbiter,
    )
    verdicts = judge.judge_all(records)
  for name, verdict in verdicts.items():
    for token in verdict.get("adjudicated_tokens", ()):
      folder.event("adjudicated", system=name, **results.to_json(token))
  return verdicts, judge.notes


def notes_of(result, model) -> list[str]:
  notes = list(model.notes)
  if result["stopped_early"]:
    notes.append("the time limit ended the run before all prompts were decoded")
  if result["recompiles"]:
    notes.append(
      f"{result['recompiles']} executables were compiled while requests were"
      " timed: the figures are not valid"
    )
  for name, system in result["systems"].items():
    alone = name == metrics.at_level(AR, name)
    if not alone and not system["acceptance"]["drafted_tokens"]:
      notes.append(f"{name} never had a draft: it decoded one token per pass")
  return notes


def finish(folder, result, records, clock) -> int:
  """Writes result and report, prints the last lines, returns the status."""
  result["timing_s"] = clock.parts | {
    "total": round(time.monotonic() - clock.started, 3)
  }
  result = results.to_json(result)
  folder.result(result)
  written = report.write(folder.path, result, records)
  folder.event("run_finished", timing_s=result["timing_s"])
  say()
  if result["systems"]:
    say(summary_table(result["systems"]))
  if result["ablation"]:
    for line in ablation_section.lines(result):
      say(line)
  failed = bool(result["recompiles"])
  for note in result["notes"]:
    say(f"note: {note}")
    failed |= note.startswith(_NO_COST_MODEL)
  for name, verdict in result["token_forcing"].items():
    say(forcing.describe_verdict(name, verdict))
    adjudicated = forcing.describe_adjudication(name, verdict)
    if adjudicated:
      say(adjudicated)
    failed |= verdict["verdict"] == "fail"
  if result["cost_model"]:
    for note in result["cost_model"]["notes"]:
      say(f"note: {note}")
    for line in sections.lines(result["cost_model"]):
      say(line)
  if not result["token_forcing"] and result["job"] != "token_force":
    say("token forcing: nothing was judged")
  if result["device_memory"]:
    memory = plan.describe(result["device_memory"])
    if memory:
      say(memory)
  parts = ", ".join(f"{k} {v:.0f}" for k, v in result["timing_s"].items())
  say(f"seconds: {parts}")
  say(f"report: {written}")
  return 1 if failed else 0


def summary_table(systems: Mapping[str, Any]) -> str:
  """The systems side by side."""
  header = (
    "system", "tok/s", "speedup", "tau", "TTFT ms", "TPOT ms", "requests",
    "tokens", "same as ar",
  )  # fmt: skip
  rows = [
    (
      name,
      number(s["output_throughput"], 1),
      number(s["speedup_vs_ar"], 2, "x"),
      number(s["acceptance_length"]),
      number(s["mean_ttft_ms"], 0),
      number(s["mean_tpot_ms"], 2),
      str(s["requests"]),
      str(s["output_tokens"]),
      "-" if s["same_output_as_ar"] is None else str(s["same_output_as_ar"]),
    )
    for name, s in systems.items()
  ]
  return table(header, rows)
