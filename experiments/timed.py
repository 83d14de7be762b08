"""Decodes the prompts of a benchmark: compiled and warm first, then timed."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import environment, metrics, prompts, results
from experiments.console import Progress, say
from experiments.settings import AR, Settings
from specpilot_jax import compilation
from specpilot_jax.configs import AUTO
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.mechanisms import registry

_WARM_UP_TOKENS = 16


def warm_up(
  settings: Settings,
  engines: Mapping[str, Engine],
  requests: Sequence[prompts.Prompt],
  folder: results.RunFolder,
) -> dict[str, dict[str, Any]]:
  """Compiles and warms up each system; what it took, by system.

  `ar` and the first system of each form of the weights are compiled alone: XLA
  tries products out while it compiles, and the others find what was chosen for
  those that they share. Those are compiled side by side, and say of themselves
  what all of them took; but systems that time their own steps are alone again.
  `first_token_s` is counted from the start of the process; of a system it holds
  what those before it, or beside it, took.
  """

  def compiled(name: str) -> dict[str, Any]:
    before = compilation.num_compilations_here()
    started = time.monotonic()
    engines[name].warm_up(settings.sampling)
    seconds = time.monotonic() - started
    say(f"compiled {name} in {seconds:.1f} s (not part of any figure)")
    return {
      "compile_s": round(seconds, 3),
      "executables": compilation.num_compilations_here() - before,
      # A request of two tokens: the first was there a step before.
      "first_token_s": round(environment.process_age_s(), 3),
    }

  first: dict[tuple[bool, str], str] = {}
  for name in engines:
    first.setdefault((name == AR, settings.system(name).weights), name)
  found = {name: compiled(name) for name in first.values()}
  rest = [name for name in engines if name not in found]
  timing = [n for n in rest if settings.system(n).verification == AUTO]
  beside = [n for n in rest if n not in timing]
  pool = concurrent.futures.ThreadPoolExecutor(compilation.workers())
  try:
    found |= dict(zip(beside, pool.map(compiled, beside), strict=True))
  finally:  # Whoever interrupts does not wait for the compiler.
    pool.shutdown(wait=False, cancel_futures=True)
  found |= {name: compiled(name) for name in timing}
  out = {name: found[name] for name in engines}
  sampling = dataclasses.replace(
    settings.sampling,
    max_tokens=min(_WARM_UP_TOKENS, settings.sampling.max_tokens),
  )
  for name, engine in engines.items():
    started = time.monotonic()
    for i in range(settings.num_warmups):
      engine.generate(ids_of(requests[i % len(requests)]), sampling)
    engine.wait()
    out[name]["warm_up_s"] = round(time.monotonic() - started, 3)
    folder.event("warmed_up", system=name, **out[name])
  return out


def measure(
  settings: Settings,
  engines: Mapping[str, Engine],
  requests: Sequence[prompts.Prompt],
  folder: results.RunFolder,
  label: Mapping[str, Any],
  deadline: float,
) -> tuple[dict[str, list[dict[str, Any]]], bool]:
  """Decodes all prompts, one after another, by every system in turn.

  Args:
    label: of the run, for every record.
    deadline: of `time.monotonic()`; no prompt is begun after it.

  Returns:
    The records by system, and whether time ran out.
  """
  records: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
  total = len(engines) * len(requests)
  with Progress("decode", total) as progress:
    for index, prompt in enumerate(requests):
      if time.monotonic() > deadline:
        folder.event("time_limit", requests_done=index)
        return records, True
      sampling = dataclasses.replace(
        settings.sampling, seed=(settings.sampling.seed + index) % 2**32
      )
      order = list(engines)[:: -1 if index % 2 else 1]
      for place, name in enumerate(order):
        output, itl_ms = _decode(engines[name], ids_of(prompt), sampling)
        record = {
          "request": prompt.id,
          "system": name,
          "domain": prompt.domain,
          "place": place,
          **record_of(output, itl_ms),
          "sampling": dataclasses.asdict(sampling),
          "options": registry.assignments(settings.system(name)),
          "target": settings.target,
          "drafter": "none" if name == AR else settings.drafter,
          "run": label,
        }
        metrics.check_identity(results.to_json(record))
        records[name].append(results.to_json(record))
        folder.request(record)
        folder.event("request", request=prompt.id, system=name)
        m = output.metrics
        progress.advance(
          f"{prompt.id} {name}: {m.output_tokens} tokens,"
          f" {1e3 * m.output_tokens / m.e2e_ms:.1f} tok/s, tau"
          f" {m.acceptance_length:.2f}, {output.finish_reason}"
        )
  return records, False


def ids_of(prompt: prompts.Prompt) -> Sequence[int]:
  """The token ids of a prompt that was read with a tokenizer."""
  assert prompt.token_ids is not None, "prompts were read with a tokenizer"
  return prompt.token_ids


def _decode(
  engine: Engine, prompt_ids: Sequence[int], sampling: SamplingParams
) -> tuple[RequestOutput, list[float]]:
  """One timed request, and the gaps between its chunks in ms.

  The device is idle when it returns: the next request's clock must not run
  while the steps behind this one's end do.
  """
  times, output = [], None
  for chunk in engine.stream(prompt_ids, sampling):
    times.append(time.perf_counter())
    output = chunk.output
  engine.wait()
  assert output is not None
  gaps = [1e3 * (b - a) for a, b in zip(times[:-1], times[1:], strict=True)]
  return output, gaps


def record_of(output: RequestOutput, itl_ms: Sequence[float]) -> dict[str, Any]:
  """What a record says of an output; gaps between its passes in ms."""
  m = output.metrics
  return {
    "prompt_ids": output.prompt_ids,
    "output_ids": output.token_ids,
    "text": output.text,
    "finish_reason": output.finish_reason,
    "stop_reason": output.stop_reason,
    "metrics": {
      "ttft_ms": m.ttft_ms,
      "tpot_ms": m.tpot_ms,
      "e2el_ms": m.e2e_ms,
      "itl_ms": itl_ms,
      "acceptance_length": m.acceptance_length,
      "num_spec_steps": m.num_steps,
      "num_draft_tokens": sum(m.drafted_per_step),
      "num_accepted_draft_tokens": sum(m.accepted_per_step),
      "emitted_per_step": m.emitted_per_step,
      "drafted_per_step": m.drafted_per_step,
      "depth_per_step": m.depth_per_step,
      "accepted_per_step": m.accepted_per_step,
      "cut_steps": m.cut_steps,
    },
  }
