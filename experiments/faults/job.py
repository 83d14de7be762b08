"""The job `faults`: the matrix of fault and check of a deployment."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import benchmark, forcing, report, results
from experiments.console import say
from experiments.controller import lab as lab_lib
from experiments.controller import paired_test, tree
from experiments.controller.checks import CANDIDATE, STOCK, Request
from experiments.controller.lab import Lab
from experiments.controller.process import EngineFault
from experiments.faults import injected, matrix, section
from experiments.faults.catalogue import CATALOGUE, Fault, faulty
from experiments.settings import Settings
from specpilot_jax import configs, loading
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

MARGIN_TOKENS = 256
"""Tokens behind the place from which late faults act."""


def chosen(names: Sequence[str]) -> list[Fault]:
  """Faults by name or id; all of the catalogue without any."""
  known = [fault.id for fault in CATALOGUE]
  for name in names:
    if not any(name in (f.id, f.name) for f in CATALOGUE):
      raise SpecPilotError(f"unknown fault {name!r}; known: {', '.join(known)}")
  if not names:
    return list(CATALOGUE)
  return [f for f in CATALOGUE if f.id in names or f.name in names]


class Forcer:
  """Stock in this process, scoring."""

  def __init__(self, lab: Lab):
    s = lab.settings
    loading.prepare_jax(s.dtype)
    model = lab.source.build(
      s.dtype, kernels_lib.parse(lab.stock_system.kernels)
    )
    self._engine = Engine(
      model.target,
      tokenizer=model.tokenizer,
      max_seq_len=lab.room,
      prefill_chunk=s.prefill_chunk,
    )
    self._store = forcing.calibration(
      model, s.prefill_chunk, greedy=s.sampling.temperature == 0
    )

  def __call__(self, stock, mine) -> Mapping[str, Any]:
    judge = forcing.Forcing(
      engine=self._engine,
      store=self._store,
      dtype=str(self._engine.dtype),
      min_tokens=1,
      keep=False,
      deadline=float("inf"),
      progress=lambda line: None,
    )
    return judge.judge_all({STOCK: stock, CANDIDATE: mine})[CANDIDATE]


def run(settings: Settings, names: Sequence[str], short: int, long: int) -> int:
  """Runs the job; 1 where a fault was missed, a no-op was refused, or an
  injection was broken.

  Args:
    names: faults; none for all.
    short, long: requests of each kind.
  """
  faults = chosen(names)
  if settings.output_dir is not None:
    results.check_output_dir(settings.output_dir)
  started = time.monotonic()
  length = injected.LATE + MARGIN_TOKENS
  wide = dataclasses.replace(
    settings,
    sampling=dataclasses.replace(settings.sampling, max_tokens=length),
  )
  with lab_lib.open_lab(wide) as lab:
    recurrent = configs.GDN in lab.source.config.layer_types
    left = {
      f.id: "this target has no recurrent layer"
      for f in faults
      if f.recurrent and not recurrent
    } | {
      f.id: f"{f.options} needs a drafter"
      for f in faults
      if settings.drafter == "none"
      and registry.needs_drafter(registry.parse_options(f.options))
    }
    faults = [f for f in faults if f.id not in left]
    requests = {
      "short": _requests(lab, short, settings.sampling.max_tokens, False),
      "long": _requests(lab, long, length, True),
    }
    vocab = lab.source.config.valid_vocab
    stock: dict[str, Any] = {}
    for part, members in requests.items():
      launch = lab.bench.launch(STOCK, lab.stock)
      stock[part] = matrix.decode(
        launch, STOCK, members, vocab, lab.stock.record
      )
    force, rows = Forcer(lab), []
    for fault in faults:
      rows += _rows(lab, fault, requests, stock, vocab, force)
    count = sum(map(len, requests.values()))
    return _finish(lab, settings, faults, left, rows, count, started)


def _requests(
  lab: Lab, count: int, max_tokens: int, endless: bool
) -> list[Request]:
  return [
    dataclasses.replace(
      r,
      sampling=dataclasses.replace(
        r.sampling, max_tokens=max_tokens, ignore_eos=endless
      ),
    )
    for r in lab.requests[:count]
  ]


def _rows(lab: Lab, fault: Fault, requests, stock, vocab, force):
  files = faulty(lab.base, fault)
  name = "".join(c if c.isalnum() else "-" for c in fault.id)
  built = tree.build(lab.place / "faults" / name, files)
  options = registry.assignments(registry.parse_options(fault.options))
  record = {**lab.stock.record, "options": options}
  subject = dataclasses.replace(
    lab.stock,
    tree=built,
    trusted=False,
    settings={**lab.stock.settings, "options": fault.options},
    record=record,
  )
  rows = []
  began = time.monotonic()
  for part, members in requests.items():
    try:
      launch = lab.bench.launch(CANDIDATE, subject, keeps=True)
      mine: Any = matrix.decode(launch, CANDIDATE, members, vocab, record)
    except EngineFault as e:
      mine = e
    rows.append(
      matrix.judge(
        fault,
        part,
        stock[part],
        mine,
        config=lab.source.config,
        tokenizer=lab.source.tokenizer,
        force=force,
        late=injected.LATE,
      )
    )
  seen = "; ".join(
    f"{row.part}: {row.broken or ', '.join(row.caught) or 'nothing'}"
    for row in rows
  )
  say(f"{fault.id}: {seen} ({time.monotonic() - began:.0f} s)")
  return rows


def _finish(lab, settings, faults, left, rows, count, started) -> int:
  told = matrix.verdicts(rows, faults)
  result = results.empty_result("faults")
  result |= {
    "environment": lab.environment,
    "deployment": paired_test.deployment(lab),
    "sampling": dataclasses.asdict(settings.sampling),
    "prompts": {
      "sets": list(settings.prompt_sets),
      "chat": lab.requests[0].prompt.chat,
      "requests": count,
      "turns": 1,
    },
    "faults": {
      "rows": [row.as_dict() for row in rows],
      "verdicts": {
        name: {"verdict": v, "reason": why} for name, (v, why) in told.items()
      },
      "not_applicable": list(left),
    },
    "timing_s": {"total": round(time.monotonic() - started, 1)},
  }
  if left:
    result["notes"] = [f"{name}: {why}" for name, why in left.items()]
  folder = settings.output_dir or Path(
    benchmark.default_folder(f"faults-{result['deployment']['name']}")
  )
  folder.mkdir(parents=True, exist_ok=True)
  result = results.to_json(result)
  results.write_result(folder, result)
  written = report.write(folder, result, {})
  say(section.matrix_table(result))
  for name, verdict in result["faults"]["verdicts"].items():
    say(f"{name}: {verdict['verdict']}: {verdict['reason']}")
  for note in result["notes"]:
    say(f"note: {note}")
  say(f"report: {written}")
  return matrix.status(told)
