"""What the job `profile` records beside a benchmark: lattices, step times.

On a GPU steady steps run under the JAX profiler; on a CPU the classes of a step
are timed separately. Both go to profile.json, from which `model` computes.
"""

import dataclasses
import hashlib
import itertools
import json
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallas_kernels
from experiments import devices, results
from experiments.cost_model import floors, kernels, lattices, model, separate
from experiments.cost_model.recorder import Session, record_all
from experiments.settings import AR, CANDIDATE, STOCK
from specpilot_jax import compilation, decoding, mechanisms
from specpilot_jax import models as models_lib
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.decoding.step import Params
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters.config import DrafterConfig
from specpilot_jax.models.target import Target

PROFILED_STEPS = 8
"""Steps under the profiler, per system."""

UNNAMED_AT_MOST = 0.01
"""Share of a step's time that kernels without an instruction may have."""

WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**31 - 1}
"""Compiler options: no run of kernels is long enough for a CUDA graph."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """What is measured.

  Attributes:
    target, drafter: as the engines have them.
    sampling: of the requests.
    max_seq_len, prefill_chunk: of the engines.
    candidate: a system whose step is measured too; None without one.
    coarse: as `recorder.Session` takes it, where level 1's choices are to be
      recorded.
  """

  target: Target
  drafter: Drafter
  sampling: SamplingParams
  max_seq_len: int
  prefill_chunk: int
  candidate: SystemConfig | None = None
  coarse: Target | None = None

  @property
  def models(self) -> floors.Models:
    """What floors are counted from.

    Raises:
      SpecPilotError: a drafter whose floors nobody has counted.
    """
    config = getattr(self.drafter, "config", None)
    return floors.Models(
      target=self.target.config,
      dtype=str(self.target.dtype),
      drafter=self.drafter.name,
      drafter_config=config if isinstance(config, DrafterConfig) else None,
      # W12 is floored as what it holds.
      weights="fp8" if self.target.weights == "fp8" else "bf16",
    )

  def session(self, name: str) -> Session:
    return Session(
      self.target,
      None if name == AR else self.drafter,
      max_seq_len=self.max_seq_len,
      prefill_chunk=self.prefill_chunk,
      features=Features.of(self.sampling),
      system=self.candidate if name == CANDIDATE else None,
      coarse=self.coarse if name == STOCK else None,
    )

  def profiled(self, records: Mapping[str, Any]) -> list[str]:
    """Systems whose steps are measured, of those that have records.

    Floors are counted for weights as stock holds them and for one pass a step,
    and chains are those of the matching rule: a candidate with others is left
    out.
    """
    names = [AR, STOCK]
    own = self.candidate
    if own is not None and all(
      getattr(own, field) == getattr(SystemConfig(), field)
      for field in ("weights", "acceptance", "verification")
    ):
      names.append(CANDIDATE)
    return [name for name in names if records.get(name)]


def check(subject: Subject) -> None:
  """Raises SpecPilotError for what no cost model can be made of.

  Cheap: called before anything is measured.
  """
  models = subject.models
  if Features.of(subject.sampling).penalties:
    raise SpecPilotError(
      "--job=profile profiles steps without penalties; leave them out"
    )
  if jax.default_backend() != "cpu":
    device = devices.lookup(jax.devices()[0].device_kind)
    floors.Roofline.of_device(device, models.dtype)


def prepare() -> None:
  """Gives measurements a compilation cache of their own sources.

  An executable from the persistent cache may carry the scopes of older sources,
  since they are no part of its key. Among executables of the same sources what
  is profiled is the very one that decoded, here or in a benchmark before.
  """
  cache = jax.config.jax_compilation_cache_dir
  if cache is not None:
    folder = Path(cache) / f"sources-{_sources_digest()[:12]}"
    compilation.use_persistent_cache(folder)


def _sources_digest() -> str:
  """SHA-256 of all that the scopes of a step come from."""
  digest = hashlib.sha256()
  for package in (models_lib, decoding, mechanisms, pallas_kernels):
    root = Path(package.__path__[0])
    for path in sorted(root.rglob("*.py")):
      digest.update(f"{path.relative_to(root.parent)}\0".encode())
      digest.update(hashlib.sha256(path.read_bytes()).digest())
  return digest.hexdigest()


def collect(
  folder: Path,
  subject: Subject,
  records: Mapping[str, Sequence[Mapping[str, Any]]],
  progress: Callable[[str], None],
  engines: Mapping[str, Engine] = types.MappingProxyType({}),
) -> None:
  """Writes lattices.npz and profile.json of a finished benchmark.

  Args:
    folder: of the run.
    records: requests by system; `stock` is one, `ar` may be.
    progress: called with a line per request and per system.
    engines: of systems that decoded; on a GPU steps of those that have no
      floors are profiled too.
  """
  stock = records[STOCK]
  session = subject.session(STOCK)
  recordings = record_all(session, stock, progress)
  lattices.save(folder / lattices.LATTICES, recordings)
  on_cpu = jax.default_backend() == "cpu"
  models = subject.models
  device = jax.devices()[0].device_kind
  roofline = (
    separate.probe(models.dtype)
    if on_cpu
    else floors.Roofline.of_device(devices.lookup(device), models.dtype)
  )
  systems = {}
  for name in subject.profiled(records):
    own = session if name == STOCK else subject.session(name)
    tokens = _middle(records[name])
    measure = _separately if on_cpu else _profiled
    systems[name] = measure(own, tokens, subject.sampling)
    progress(f"{name}: step of {systems[name]['nodes']} nodes")
  others = {}
  for name, engine in ({} if on_cpu else engines).items():
    if records.get(name) and name not in systems:
      prompt = _median(records[name])["prompt_ids"]
      if found := _decoded(engine, prompt, subject.sampling):
        others[name] = found
  content = {
    "format": model.FORMAT,
    "kind": model.TIMED if on_cpu else model.PROFILED,
    "device_kind": device,
    "dtype": models.dtype,
    "weights": models.weights,
    "target": dataclasses.asdict(models.target),
    "drafter": models.drafter,
    "drafter_config": (
      None
      if models.drafter_config is None
      else dataclasses.asdict(models.drafter_config)
    ),
    "roofline": dataclasses.asdict(roofline),
    "prefill": _prefill(session, _middle(stock), on_cpu),
    "systems": systems,
    "others": others,
  }
  text = json.dumps(results.to_json(content), allow_nan=False)
  results.write_whole(folder / model.PROFILE, text + "\n")


def _median(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
  """The request of median length."""
  ranked = sorted(
    records, key=lambda r: len(r["prompt_ids"]) + len(r["output_ids"])
  )
  return ranked[len(ranked) // 2]


def _middle(records: Sequence[Mapping[str, Any]]) -> list[int]:
  """Prompt and half of the output of the request of median length."""
  record = _median(records)
  half = (len(record["output_ids"]) + 1) // 2
  return [*record["prompt_ids"], *record["output_ids"][:half]]


def _profiled(
  session: Session, tokens: Sequence[int], sampling: SamplingParams
) -> dict[str, Any]:
  """Steady steps under the profiler.

  Kernels that ran in a CUDA graph may come without the instruction that
  launched them. Where that is more than `UNNAMED_AT_MOST` of the time, the same
  step is compiled and profiled once more without graphs, and its kernels tell
  the classes; the time of a step stays that of the first.
  """
  request = session.request(sampling)
  lowered = session.step.lower(session.params, session.start(tokens), request)
  out: dict[str, Any] = {"nodes": session.policy.nodes} | _traced(
    lowered.compile(), session, tokens, request
  )
  activities, names = kernels.from_columns(out["kernels"])
  told = kernels.breakdown(activities, names, out["steps"])
  if told.unattributed_us > UNNAMED_AT_MOST * told.step_us:
    plain = lowered.compile(compiler_options=WITHOUT_GRAPHS)
    out["without_graphs"] = _traced(plain, session, tokens, request)
  return out


def _traced(
  step: Any, session: Session, tokens: Sequence[int], request: Any
) -> dict[str, Any]:
  """Steps of a compiled function behind some tokens, and their kernels."""
  carry = session.start(tokens)
  # Two steps first: what is lazy about a first call is not of a step.
  for _ in range(2):
    carry, _ = step(session.params, carry, request)
  jax.block_until_ready(carry)
  first = int(carry.target.length)
  # No step may end the request: an ended one commits nothing.
  room = session.capacity - first - (PROFILED_STEPS + 1) * session.policy.path
  steps = PROFILED_STEPS if room >= 0 else max(1, _fitting(session, first))

  def run():
    nonlocal carry
    for _ in range(steps):
      carry, _ = step(session.params, carry, request)
    jax.block_until_ready(carry)

  activities = trace(run)
  activities, names = kernels.named(activities, step.as_text() or "", steps)
  return {
    "context": (first + int(carry.target.length)) / 2,
    "steps": steps,
    "kernels": kernels.to_columns(activities, names),
  }


def _decoded(
  engine: Engine, prompt: Sequence[int], sampling: SamplingParams
) -> dict[str, Any] | None:
  """Steps of an engine behind a prompt, as it decodes, under the profiler.

  As many as surely end no request, since an ended one commits nothing; None
  where there is no room for any.
  """
  room = engine.max_seq_len - len(prompt)
  lazy = 2 + engine.host_lag
  fitting = room // (1 + engine.num_drafts) - lazy - engine.host_lag
  if fitting < 1:
    return None
  own = dataclasses.replace(
    sampling,
    max_tokens=room,
    ignore_eos=True,
    stop=(),
    stop_token_ids=(),
  )
  running = engine.steps(prompt, own)
  try:
    # What is lazy about first calls is not of a step.
    *_, (carry, _) = itertools.islice(running, lazy)
    jax.block_until_ready(carry)
    first, steps = int(carry.target.length), min(PROFILED_STEPS, fitting)

    def run():
      nonlocal carry
      *_, (carry, _) = itertools.islice(running, steps)
      jax.block_until_ready(carry)

    activities = trace(run)
    last = int(carry.target.length)
  finally:
    running.close()
  text = engine.lowered(own).compile().as_text() or ""
  activities, names = kernels.named(
    activities, text, steps, owners(engine.params)
  )
  return {
    "nodes": engine.policy.nodes,
    "context": (first + last) / 2,
    "steps": steps,
    "kernels": kernels.to_columns(activities, names),
  }


def owners(params: Params) -> dict[str, str]:
  """Whose the arrays of an engine's parameters are, by their names in a step:
  the drafter's what the target does not have."""
  scopes: dict[str, str] = {}
  for of, places in enumerate(params.places):
    for place in places:
      scope = kernels.DRAFTER if of == 1 else kernels.WEIGHTS
      scopes.setdefault(f"params.arrays[{place}]", scope)
  return scopes


def _fitting(session: Session, length: int) -> int:
  """Steps that surely fit behind `length` tokens."""
  return (session.capacity - length) // session.policy.path - 1


def trace(run: Callable[[], None]) -> list[kernels.Kernel]:
  """What the first GPU does while `run` runs."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    files = list(Path(folder).rglob("*.xplane.pb"))
    if len(files) != 1:
      raise SpecPilotError(
        f"the profiler wrote {len(files)} traces, expected one"
      )
    profile = jax.profiler.ProfileData.from_file(str(files[0]))
    return kernels.read_profile(profile)


def _separately(
  session: Session, tokens: Sequence[int], sampling: SamplingParams
) -> dict[str, Any]:
  """Classes of a step, timed as executables of their own."""
  carry, request = session.start(tokens), session.request(sampling)
  classes, step_us = separate.Parts(session, carry, request).classes_us()
  return {
    "nodes": session.policy.nodes,
    "context": len(tokens) - 1,
    "step_alone_us": step_us,
    "classes_us": classes,
  }


def _prefill(
  session: Session, tokens: Sequence[int], on_cpu: bool
) -> dict[str, Any]:
  """One pass over a chunk of prompt, behind about half of a sequence."""
  # Repeated, since a pass over padding costs the same but commits less.
  chunk = np.resize(np.asarray(tokens, np.int32), session.chunk)
  count = np.int32(session.chunk)
  keep = max(1, min(len(tokens), session.capacity - 2 * session.chunk))
  carry = session.start(tokens[:keep])
  context = int(carry.target.length)

  def read(carry):
    return session.prefill(session.params, carry, chunk, count), None

  if on_cpu:
    measured = separate.time_chain_us(read, carry)
  else:
    carry, _ = jax.block_until_ready(read(carry))
    context = int(carry.target.length)
    activities = trace(lambda: jax.block_until_ready(read(carry)))
    measured = 1e-3 * kernels.union_ns(
      [(k.start_ns, k.duration_ns) for k in activities]
    )
  return {
    "rows": session.chunk,
    "context": context,
    "measured_us": measured,
  }
