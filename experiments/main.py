"""Runs an experiment.

    python -m experiments.main --flagfile=cpu_smoke.flags
    python -m experiments.main --target=PATH --prompts=my.jsonl
    python -m experiments.main --flagfile=cpu_smoke.flags --job=profile
    python -m experiments.main --flagfile=cpu_smoke.flags --max_concurrency=1,4
    python -m experiments.main --flagfile=cpu_smoke.flags \\
      --ablate=node_budget=8,16,32
    python -m experiments.main --job=token_force --target=PATH --requests=RUN
    python -m experiments.main --job=paired_test --flagfile=A.flags \\
      --candidate=B.flags
    python -m experiments.main --flagfile=cpu_smoke.flags --job=round
    python -m experiments.main --flagfile=cpu_smoke.flags --job=replay
    python -m experiments.main --flagfile=cpu_smoke.flags --job=faults
    python -m experiments.main --job=report --output_dir=RUN

A flag file named without a folder is looked for in the working directory, then
in experiments/flags/. Exit status: 0, 1 where token forcing failed, a
measurement is not valid or a candidate was refused, 2 for bad input.
"""

import dataclasses
import sys
from pathlib import Path

from absl import flags

from experiments import (
  benchmark,
  controller_flags,
  devices,
  judging,
  prompts,
  report,
  serving_flags,
  settings,
)
from experiments.ablation import design
from experiments.controller import paired_test
from experiments.faults import job as faults
from experiments.metrics import MeasurementError
from experiments.rounds import job as rounds
from experiments.serving import job as serving
from pallas_kernels.dispatch import IMPLEMENTATIONS, Kernels
from specpilot_jax import cli, kernels, loading, sampling_flags
from specpilot_jax.configs import DTYPES, SystemConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

JOBS = (
  "benchmark", "profile", "token_force", "paired_test", "round", "replay",
  "faults", "report",
)  # fmt: skip

_JOB = flags.DEFINE_enum(
  "job", "benchmark", JOBS, "benchmark: systems side by side. profile: that,"
  " and the cost model of stock; of a load, its passes by class. token_force:"
  " judge recorded requests. paired_test: a candidate against stock, apart."
  " round: explore, integrate, tune, seal. replay: a round of what the memory"
  " holds, alone. faults: which check sees which fault. report: write a run's"
  " report again.",
)  # fmt: skip
_OUTPUT_DIR = flags.DEFINE_string(
  "output_dir", None, "Folder of the run; runs/<time>-<deployment> by default."
)
_TARGET = flags.DEFINE_string(
  "target", None, "zoo, smollm2, widened:PRESET (the zoo at a big model's"
  " shape), a Hugging Face folder, a .gguf or Orbax folder; fp8:NAME is NAME"
  " in FP8.",
)  # fmt: skip
_DRAFTER = flags.DEFINE_string(
  "drafter", "prompt_lookup", f"One of {', '.join(loading.DRAFTERS)}."
)
_SET = flags.DEFINE_string(
  "set", "", "Options of the system `candidate`, option=value,option=value: "
  + "; ".join(option.describe() for option in registry.OPTIONS.values()),
)  # fmt: skip
_SWEEP = flags.DEFINE_string(
  "sweep", "", "OPTION=VALUE|VALUE|...: a system for each value, with the"
  " options of --set beside it.",
)  # fmt: skip
_ABLATE = flags.DEFINE_multi_string(
  "ablate", None, "OPTION=VALUE,VALUE,...: a system for each value, all else"
  " as stock has it, held against that of the first value and against stock"
  " request by request; a single value is held fixed, several --ablate make a"
  " grid. mechanisms: each alone, all, and all but each; or"
  " mechanisms=OPTION,OPTION=VALUE+OPTION=VALUE,... of your choice.",
)  # fmt: skip
_ABLATE_DESIGN = flags.DEFINE_enum(
  "ablate_design", None, design.DESIGNS, "What several --ablate make: a grid,"
  " or one at a time, the others at their first values.",
)  # fmt: skip
_SYSTEMS = flags.DEFINE_list(
  "systems", None, "Of ar, stock, candidate; by default ar, stock where there"
  " is a drafter and candidate where --set says something.",
)  # fmt: skip
_PROMPTS = flags.DEFINE_list(
  "prompts", ["HumanEval-164"], f"Of {', '.join(prompts.PROMPT_SETS)}, or"
  " paths that end in .txt or .jsonl.",
)  # fmt: skip
_NUM_PROMPTS = flags.DEFINE_integer(
  "num_prompts", None, "At most so many of each set, the first ones."
)
_SPLIT = flags.DEFINE_enum(
  "split", None, prompts.SPLITS, "Part of the sets; dev by default."
)
_CHAT = flags.DEFINE_boolean(
  "chat", None, "Chat template on or off; by default the set's own way."
)
read_controller = controller_flags.define_controller_flags()
read_load = serving_flags.define_serving_flags()
read_sampling = sampling_flags.define_sampling_flags()
_DTYPE = flags.DEFINE_enum(
  "dtype", None, DTYPES, "bfloat16 on an accelerator, float32 on a CPU."
)
_KERNELS = flags.DEFINE_string(
  "kernels", "reference", f"{', '.join(IMPLEMENTATIONS)}: of every operation"
  " that has a kernel; or op=implementation,... of"
  f" {', '.join(Kernels.operations())}. gdn_verify also takes per_path,"
  " w12_matmul and tree_attention mosaic (Hopper GPUs).",
)  # fmt: skip
_PREFILL_CHUNK = flags.DEFINE_integer(
  "prefill_chunk", 64, "Tokens per pass in prefill and in scoring."
)
_NUM_WARMUPS = flags.DEFINE_integer(
  "num_warmups", 1, "Requests per system before the measured ones."
)
_TOKEN_FORCING = flags.DEFINE_boolean(
  "token_forcing", True, "Stock scores every output after the measurement."
)
_MIN_CONTROL_TOKENS = flags.DEFINE_integer(
  "min_control_tokens", None, "Control tokens that a verdict needs; 5000 on a"
  " CPU, else 20000.",
)  # fmt: skip
_CARD = flags.DEFINE_enum(
  "card", None, sorted(devices.CARDS), "GPU generation that the run needs."
)
_REQUESTS = flags.DEFINE_string(
  "requests", None, "requests.jsonl or its folder, for --job=token_force."
)
_MAX_WALL_S = flags.DEFINE_float(
  "max_wall_s", None, "No request and no scoring starts later than this."
)


def read_settings() -> settings.Settings:
  """What the parsed flags ask for."""
  if _TARGET.value is None:
    raise SpecPilotError(
      "--target is missing (a name or a path), or take a flag file:"
      " --flagfile=cpu_smoke.flags"
    )
  options = registry.parse_options(_SET.value) if _SET.value else None
  sweep = registry.parse_sweep(_SWEEP.value, options or SystemConfig())
  ablation = _ablation(batch=read_load() is not None)
  systems = _SYSTEMS.value
  if systems is None:
    systems = settings.default_systems(
      _DRAFTER.value, options, swept=bool(sweep)
    )
  if sweep and settings.CANDIDATE not in systems:
    options = None  # What the sweep starts from.
  if ablation is not None:
    systems = dict.fromkeys((*systems, ablation.baseline))
    sweep |= ablation.systems
  return settings.Settings(
    target=_TARGET.value,
    drafter=_DRAFTER.value,
    systems=(*systems, *sweep),
    options=options,
    sweep=sweep,
    prompt_sets=tuple(_PROMPTS.value),
    num_prompts=_NUM_PROMPTS.value,
    split=_SPLIT.value,
    chat=_CHAT.value,
    sampling=read_sampling(),
    dtype=_DTYPE.value,
    kernels=kernels.parse(_KERNELS.value),
    prefill_chunk=_PREFILL_CHUNK.value,
    num_warmups=_NUM_WARMUPS.value,
    token_forcing=_TOKEN_FORCING.value,
    min_control_tokens=_MIN_CONTROL_TOKENS.value,
    max_wall_s=_MAX_WALL_S.value,
    output_dir=_path(_OUTPUT_DIR.value),
    requests=_path(_REQUESTS.value),
    card=_CARD.value,
    flags=_flag_values(),
    batch=read_load() is not None,
    ablation=ablation,
  )


def _ablation(*, batch: bool) -> design.Ablation | None:
  """What --ablate asks for; None without it."""
  if not _ABLATE.value:
    if _ABLATE_DESIGN.value is not None:
      raise SpecPilotError("--ablate_design is of --ablate: give that too")
    return None
  if _SWEEP.value:
    raise SpecPilotError("--ablate and --sweep: give one of them")
  if _JOB.value not in ("benchmark", "profile"):
    raise SpecPilotError(
      f"--ablate is of --job=benchmark and --job=profile, not of {_JOB.value}"
    )
  drafter = _DRAFTER.value != "none"
  target = _TARGET.value or ""
  return design.parse(
    _ABLATE.value,
    _ABLATE_DESIGN.value or design.GRID,
    baseline=settings.STOCK if drafter else settings.AR,
    drafter=drafter,
    batch=batch,
    in_fp8=target.lower().startswith(loading.FP8_PREFIX),
  )


def _path(text: str | None) -> Path | None:
  return None if text is None else Path(text)


def _flag_values() -> dict[str, str]:
  """Every flag of this file as text, for the record.

  All but the folder of the run, which is where the record lies.
  """
  module = flags.FLAGS.find_module_defining_flag(_JOB.name) or ""
  own = flags.FLAGS.flags_by_module_dict()[module]
  return {
    flag.name: str(flag.value)
    for flag in own
    if flag.value is not None and flag.name != _OUTPUT_DIR.name
  }


def main() -> None:
  """Runs the job that the parsed flags describe."""
  if _JOB.value == "report":
    if _OUTPUT_DIR.value is None:
      raise SpecPilotError("report needs --output_dir=RUN, a finished run")
    print(f"report: {report.rewrite(Path(_OUTPUT_DIR.value))}")
    return
  load = read_load()
  jobs = ("benchmark", "profile", "token_force")
  if load is not None and _JOB.value not in jobs:
    raise SpecPilotError(
      f"--job={_JOB.value} decodes one request at a time: --max_concurrency,"
      " --request_rate and --arrivals are of --job=benchmark and --job=profile"
    )
  try:
    if _JOB.value == "token_force":
      status = judging.token_force(read_settings())
    elif _JOB.value == "paired_test":
      told = read_controller(read_settings)
      status = paired_test.run(
        read_settings(),
        told.candidate,
        told.patch,
        told.aa_sessions,
        told.blocks,
        told.devices,
      )
    elif _JOB.value == "round":
      status = rounds.run(read_settings(), read_controller(read_settings).round)
    elif _JOB.value == "replay":
      told = read_controller(read_settings).round
      told = dataclasses.replace(told, agents=("memory",))
      status = rounds.run(read_settings(), told)
    elif _JOB.value == "faults":
      told = read_controller(read_settings)
      status = faults.run(read_settings(), told.faults, *told.fault_requests)
    elif load is not None:
      status = serving.run(
        read_settings(), load, profile=_JOB.value == "profile"
      )
    else:
      status = benchmark.run(read_settings(), profile=_JOB.value == "profile")
  except MeasurementError as e:
    print(f"error: {e}", file=sys.stderr)
    status = 1
  if status:
    sys.exit(status)


def run(argv: list[str]) -> None:
  """Parses a command line, program name first, and runs it; may exit."""
  try:
    argv = settings.expand_flag_files(argv)
  except (SpecPilotError, OSError) as e:
    cli.fail(e)
  cli.run(main, argv)


if __name__ == "__main__":
  run(sys.argv)
