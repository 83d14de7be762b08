"""The job `benchmark` under loads of many requests.

Each load is served by every system in turn, in an order that turns around from
load to load, so that drift of the machine does not favour one: all have their
slots at the same time, beside weights that they share. Each is compiled and
warmed up first; nothing may be compiled while requests are served.
Stock, decoding one request at a time, then scores the outputs.
"""

import dataclasses
import functools
import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import (
  benchmark,
  environment,
  forcing,
  metrics,
  plan,
  prompts,
  results,
  timed,
)
from experiments.ablation import compare as ablation
from experiments.console import Progress, say, table
from experiments.cost_model import measure
from experiments.serving import drive, passes, section
from experiments.serving.arrivals import Level
from experiments.serving.settings import LoadSettings
from experiments.settings import AR, STOCK, Settings
from specpilot_jax import compilation, footprint, loading
from specpilot_jax.configs import (
  CHAIN,
  DEFAULT_TREE_NODES,
  ONE_LEVEL,
  SystemConfig,
)
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import batching, registry
from specpilot_jax.models import assembly

_WARM_UP_TOKENS = 16


@dataclasses.dataclass(eq=False)
class _Run:
  """What the systems of a run have in common."""

  settings: Settings
  load: LoadSettings
  model: loading.LoadedModel
  drafter: Any
  room: int
  requests: Sequence[prompts.Prompt]
  folder: results.RunFolder
  label: Mapping[str, Any]
  deadline: float
  profile: bool = False

  @functools.cache  # noqa: B019  (lives as long as the run)
  def _prepared(self, weights: str, plain: bool):
    """Systems share weights of one form."""
    return registry.prepare(
      SystemConfig(weights=weights),
      self.model.target,
      None if plain else self.drafter,
    )

  def policy(self, name: str, level: Level) -> batching.BatchPolicy:
    """A system, with slots of its own, as many as the level needs."""
    system = self.settings.system(name)
    target, drafter = registry.prepare(
      system, *self._prepared(system.weights, name == AR)
    )
    engine = batching.engine(
      system,
      target,
      drafter,
      tokenizer=self.model.tokenizer,
      slots=self.load.slots_of(level),
      slot_buckets=self.load.slot_buckets_of(level),
      max_seq_len=self.room,
      prefill_chunk=self.settings.prefill_chunk,
    )
    return batching.BatchPolicy(system, engine)

  def orders(self) -> list[drive.Order]:
    """The requests, with the seeds that they have one at a time."""
    s = self.settings.sampling
    orders = []
    for index, prompt in enumerate(self.requests):
      ids = timed.ids_of(prompt)
      sampling = dataclasses.replace(
        s,
        seed=(s.seed + index) % 2**32,
        max_tokens=min(s.max_tokens, self.room - len(ids)),
      )
      orders.append(drive.Order(id=prompt.id, prompt=ids, sampling=sampling))
    return orders

  def record(self, name: str, level: Level, served: drive.Served):
    """A line of requests.jsonl."""
    prompt = next(p for p in self.requests if p.id == served.order.id)
    rest = timed.record_of(served.output, served.itl_ms)
    return results.to_json(
      {
        "request": prompt.id,
        "system": f"{name}{metrics.AT}{level.name}",
        "domain": prompt.domain,
        "arrival_s": served.arrival_s,
        "level": self._level(level),
        **rest,
        "metrics": rest["metrics"]
        | {"queue_ms": served.queue_ms, "pass_per_step": served.passes},
        "sampling": dataclasses.asdict(served.order.sampling),
        "options": registry.assignments(self.settings.system(name)),
        "target": self.settings.target,
        "drafter": "none" if name == AR else self.settings.drafter,
        "run": self.label,
      }
    )

  def _level(self, level: Level) -> dict[str, Any]:
    rate = level.request_rate
    return {
      "name": level.name,
      "request_rate": rate if math.isfinite(rate) else "inf",
      "max_concurrency": level.max_concurrency,
      "burstiness": level.burstiness,
      "recorded": level.recorded_s is not None,
      "max_num_seqs": self.load.slots,
      "goodput": dict(self.load.goodput),
    }


def run(
  settings: Settings, load: LoadSettings, *, profile: bool = False
) -> int:
  """Serves all loads by all systems; returns the exit status.

  Args:
    settings, load: what to run.
    profile: on a GPU, also time the passes of every system by class.

  Returns:
    0, or 1 where something was compiled while requests were served, or token
    forcing failed (the results are written all the same).

  Raises:
    SpecPilotError: bad input; nothing was written.
    MeasurementError: a request that was not answered.
  """
  clock = benchmark.Clock(settings.max_wall_s)
  for name in settings.systems:
    verification = settings.system(name).verification
    if verification != ONE_LEVEL:
      raise SpecPilotError(
        f"verification={verification} decodes one request at a time, not a load"
      )
  if settings.output_dir is not None:
    results.check_output_dir(settings.output_dir)
  loading.prepare_jax(settings.dtype)
  if profile:
    if jax.default_backend() != "gpu":
      raise SpecPilotError("passes of a load are profiled on a GPU alone")
    measure.prepare()
  if settings.card is not None:
    plan.check_card(settings.card)
  source = loading.open_target(settings.target)
  requests = benchmark.load_requests(settings, source)
  for level in load.levels:
    level.arrivals_s(len(requests), 0)  # Too few recorded ones are told now.
  longest = max(len(p.token_ids or ()) for p in requests)
  room = benchmark.sequence_room(source, longest, settings.sampling.max_tokens)
  planned = _plan(settings, load, source, room)
  say(plan.check_memory(planned, footprint.device_bytes()))
  model = source.build(settings.dtype, settings.kernels, settings.weights)
  drafter = loading.make_drafter(settings.drafter, model.target)
  jax.block_until_ready(
    (assembly.leaves(model.target), drafter and drafter.params)
  )
  peaks = plan.Peaks(planned)
  peaks.note("weights")
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
  result["deployment"] = benchmark.deployment(settings, model, env, room)
  result["deployment"]["batch"] = load.slots
  result["sampling"] = dataclasses.asdict(settings.sampling)
  result["prompts"] = {
    "sets": list(settings.prompt_sets),
    "split": settings.split,
    "chat": requests[0].chat,
    "requests": len(requests),
    "turns": 1,
    "longest_tokens": longest,
  }
  folder = results.RunFolder(
    settings.output_dir
    or benchmark.default_folder(result["deployment"]["name"])
  )
  benchmark.announce(settings, model, env, requests)
  names = ", ".join(level.name for level in load.levels)
  say(f"loads: {names}, at most {load.slots} requests at once")
  say(f"results: {folder.path}")
  folder.event("run_started", job=job, environment=env)
  try:
    clock.lap("load")
    told = _Run(
      settings=settings,
      load=load,
      model=model,
      drafter=drafter,
      room=room,
      requests=requests,
      folder=folder,
      label=environment.run_label(env),
      deadline=clock.deadline,
      profile=profile,
    )
    records = _measure(told, result, clock, peaks)
    if settings.ablation:
      result["ablation"] = ablation.result_of(settings.ablation, records)
    result["requests_sha256"] = results.sha256(folder.path / results.REQUESTS)
    result["notes"] = benchmark.notes_of(result, model)
    result["notes"] += section.notes(result["systems"])
    if settings.token_forcing:
      benchmark.force_own(
        settings, model, room, planned, store, records, result, folder, clock,
        peaks,
      )  # fmt: skip
    result["device_memory"] = peaks.told()
    result["notes"] += peaks.notes()
    say()
    say(table(section.HEADER, section.rows(result["systems"])))
    return benchmark.finish(folder, result, records, clock)
  except BaseException as e:
    folder.event("run_failed", error=f"{type(e).__name__}: {e}")
    raise
  finally:
    folder.close()


def _plan(settings, load, source, room: int) -> dict[str, int]:
  """Bytes by purpose: the slots of all systems, and the scorer's request."""
  drafting = sum(name != AR for name in settings.systems)
  plain = len(settings.systems) - drafting
  wanted = {source.held(settings.system(n).weights) for n in settings.systems}
  drafter = loading.drafter_config(settings.drafter, source.config)
  chain = 1 + (drafter.num_slots if drafter is not None else 0)
  nodes = 1
  for name in settings.systems:
    system = settings.system(name)
    tree = system.node_budget or DEFAULT_TREE_NODES
    own = chain if system.tree == CHAIN else tree
    nodes = max(nodes, 1 if name == AR else own)
  # Passes over fewer slots than there are, of loads that vary: the power of two
  # below is the most of them.
  varies = any(level.varies for level in load.levels)
  fewer = (1 << (load.slots - 1).bit_length()) // 2 if load.slots > 1 else 0
  return plan.memory(
    source.config,
    drafter,
    dtype=settings.dtype or loading.default_dtype(),
    max_seq_len=room,
    prefill_chunk=settings.prefill_chunk,
    drafting=load.slots * drafting,
    plain=load.slots * plain + settings.token_forcing,
    weights=sorted(wanted),
    pass_rows=load.slots * nodes,
    copied=fewer if varies else 0,
  )


def _measure(told: _Run, result, clock, peaks) -> dict[str, list[Any]]:
  """Serves all; fills in systems, compilation, recompiles of the result."""
  settings, load = told.settings, told.load
  records: dict[str, list[Any]] = {}
  extras: dict[str, dict[str, Any]] = {}
  result["recompiles"] = 0
  for index, level in enumerate(load.levels):
    policies = {
      name: _warmed_up(told, name, level, result) for name in settings.systems
    }
    clock.lap("warm_up")
    peaks.note("warm_up")
    total = len(settings.systems) * len(told.requests)
    with Progress(f"serve {level.name}", total) as progress:
      for name in list(policies)[:: -1 if index % 2 else 1]:
        key = f"{name}{metrics.AT}{level.name}"
        policy = policies.pop(name)
        held, before = plan.held_bytes(), compilation.num_compilations()
        records[key] = _serve(told, name, level, policy, progress)
        result["recompiles"] += compilation.num_compilations() - before
        result["stopped_early"] |= len(records[key]) < len(told.requests)
        extras[key] = {
          "options": registry.assignments(settings.system(name)),
          "held_bytes": [held, plan.held_bytes()],
          "profile": policy.profile.told() if policy.profile else None,
        }
        told.folder.event("served", system=name, level=level.name)
        if told.profile and time.monotonic() < told.deadline:
          extras[key]["passes"] = _profiled(told, key, policy)
        # Its slots are free before those of the next level are made.
        del policy
        gc.collect()
    clock.lap("serve")
    peaks.note("serve")
  # In the order of the systems, whoever came first under a load.
  records = {
    key: records[key]
    for name in settings.systems
    for level in load.levels
    for key in [f"{name}{metrics.AT}{level.name}"]
    if records[key]
  }
  result["systems"] = {
    key: metrics.summarize(members, records.get(metrics.at_level(AR, key), ()))
    | extras[key]
    for key, members in records.items()
  }
  _beside_stock(result["systems"])
  return records


def _profiled(
  told: _Run, key: str, policy: batching.BatchPolicy
) -> list[dict[str, Any]]:
  """The passes of a system, over requests of median length; none where that
  failed, which is told: what was served is worth keeping."""
  orders = sorted(told.orders(), key=lambda order: len(order.prompt))
  order = orders[len(orders) // 2]
  try:
    found = passes.profile(policy, order.prompt, order.sampling)
  except (SpecPilotError, jax.errors.JaxRuntimeError) as e:
    told.folder.event("profile_failed", system=key, error=str(e))
    say(f"the passes of {key} were not profiled: {str(e).splitlines()[0]}")
    return []
  say(f"passes of {key}, us:")
  say(table(passes.HEADER, passes.rows(found)))
  return found


def _beside_stock(systems: dict[str, dict[str, Any]]) -> None:
  """What each is to stock under the same load."""
  for key, own in systems.items():
    stock = systems.get(metrics.at_level(STOCK, key))
    for name, field in (
      ("speedup_vs_stock", "output_throughput"),
      ("steady_speedup_vs_stock", "steady_throughput"),
    ):
      base = (stock or {}).get(field)
      own[name] = own[field] / base if base and own[field] else None


def _warmed_up(
  told: _Run, name: str, level: Level, result
) -> batching.BatchPolicy:
  """A system for a level, compiled and warmed up.

  Its policies forget what they learned of the requests by which they were: some
  of those that are timed.
  """
  before, started = compilation.num_compilations(), time.monotonic()
  policy = told.policy(name, level)
  policy.warm_up([told.settings.sampling])
  orders = [
    dataclasses.replace(
      order,
      sampling=dataclasses.replace(
        order.sampling,
        max_tokens=min(_WARM_UP_TOKENS, order.sampling.max_tokens),
      ),
    )
    for order in told.orders()[
      : told.settings.num_warmups * policy.engine.slots
    ]
  ]
  if orders:
    drive.serve(policy, orders, Level())
    policy.engine.wait()
  told_so_far = result["compilation"].setdefault(
    name, {"compile_s": 0.0, "executables": 0}
  )
  seconds = round(time.monotonic() - started, 3)
  executables = compilation.num_compilations() - before
  told_so_far["compile_s"] = round(told_so_far["compile_s"] + seconds, 3)
  told_so_far["executables"] += executables
  told.folder.event(
    "warmed_up",
    system=name,
    level=level.name,
    compile_s=seconds,
    executables=executables,
  )
  say(
    f"compiled {name} for {level.name} in {seconds:.1f} s (not part of any"
    " figure)"
  )
  return policy.fresh()


def _serve(told: _Run, name, level, policy, progress) -> list[Any]:
  records: list[Any] = []
  offset = time.perf_counter() - time.monotonic()

  def done(served: drive.Served) -> None:
    record = told.record(name, level, served)
    metrics.check_identity(record)
    records.append(record)
    told.folder.request(record)
    m = served.output.metrics
    progress.advance(
      f"{served.order.id} {name} {level.name}: {m.output_tokens} tokens, TTFT"
      f" {m.ttft_ms:.0f} ms, TPOT {m.tpot_ms:.1f} ms, tau"
      f" {m.acceptance_length:.2f}, {served.output.finish_reason}"
    )

  answers = drive.serve(
    policy,
    told.orders(),
    level,
    seed=told.settings.sampling.seed,
    deadline=told.deadline + offset,
  )
  policy.engine.wait()
  # Not while others are served: it takes time.
  for served in answers:
    done(served)
  return records
