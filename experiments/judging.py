"""The job `token_force`: recorded requests, judged by stock."""

from collections.abc import Mapping
from typing import Any

from experiments import benchmark, environment, forcing, plan, results
from experiments.console import say
from experiments.settings import Settings
from specpilot_jax import loading
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError


def token_force(settings: Settings) -> int:
  """Judges recorded requests; returns the exit status, 1 for a failure.

  The controls of earlier benchmarks are used. Those in the file count in this
  run alone: they were not decoded here.
  """
  clock = benchmark.Clock(settings.max_wall_s)
  if settings.requests is None:
    raise SpecPilotError(
      "token_force needs --requests=PATH (requests.jsonl or its folder)"
    )
  if settings.output_dir is not None:
    results.check_output_dir(settings.output_dir)
  recorded = results.read_requests(settings.requests)
  if not recorded:
    raise SpecPilotError(f"{settings.requests} holds no requests")
  greedy = {results.sampling_of(r).temperature == 0 for r in recorded}
  if len(greedy) > 1:
    raise SpecPilotError(
      f"{settings.requests} mixes greedy and sampled requests; each has its"
      " own calibration"
    )
  run_label = recorded[0].get("run")
  recorded_dtype = run_label["dtype"] if run_label else None
  dtype = settings.dtype or recorded_dtype
  loading.prepare_jax(dtype)
  model = loading.load_target(settings.target, dtype, settings.kernels)
  lengths = [len(r["prompt_ids"]) + len(r["output_ids"]) for r in recorded]
  room = benchmark.sequence_room(model, max(lengths), 0)
  engine = Engine(
    model.target,
    tokenizer=model.tokenizer,
    max_seq_len=room,
    prefill_chunk=settings.prefill_chunk,
  )
  for record in recorded:
    where = f"{settings.requests}: request {record['request']}"
    engine.check_ids(record["prompt_ids"], f"{where} prompt")
    engine.check_ids(record["output_ids"], f"{where} output")
    if len(record["prompt_ids"]) + len(record["output_ids"]) > room:
      raise SpecPilotError(f"{where}: longer than the context of {room}")
  store = forcing.calibration(
    model, settings.prefill_chunk, greedy=greedy.pop()
  )
  records: dict[str, list[Mapping[str, Any]]] = {}
  for record in recorded:
    records.setdefault(record["system"], []).append(record)
  env = environment.describe(settings.flags, model.target)
  result = results.empty_result("token_force")
  result["environment"] = env
  result["deployment"] = benchmark.deployment(settings, model, env, room)
  result["sampling"] = dict(recorded[0]["sampling"])
  result["prompts"] = {
    "sets": [str(settings.requests)],
    "requests": len({r["request"] for r in recorded}),
  }
  folder = results.RunFolder(
    settings.output_dir
    or benchmark.default_folder(result["deployment"]["name"])
  )
  say(
    f"token_force: {settings.requests}: {len(recorded)} outputs of"
    f" {', '.join(records)}, scored by {model.config.name} in"
    f" {model.target.dtype} on {env['device_kind']}"
  )
  folder.event("run_started", job="token_force", environment=env)
  try:
    clock.lap("load")
    planned = plan.memory(
      model.config,
      None,
      dtype=str(model.target.dtype),
      max_seq_len=room,
      prefill_chunk=settings.prefill_chunk,
      drafting=0,
      plain=1,
    )
    arbiter = benchmark.make_arbiter(settings, model, room, planned)
    result["token_forcing"], result["notes"] = benchmark.force(
      engine, store, arbiter, records, settings, folder, clock, keep=False
    )
    clock.lap("token_forcing")
    if not result["token_forcing"]:
      result["notes"].append(
        "only autoregressive outputs were recorded: there is nothing to judge"
      )
    return benchmark.finish(folder, result, {}, clock)
  except BaseException as e:
    folder.event("run_failed", error=f"{type(e).__name__}: {e}")
    raise
  finally:
    folder.close()
