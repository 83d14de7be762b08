"""What a figure depends on beside the code's own settings."""

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specpilot_jax import kernels
from specpilot_jax.models.target import Target

ROOT = Path(__file__).parents[1]
_GPU_FIELDS = (
  "driver_version",
  "clocks.sm",
  "clocks.mem",
  "clocks.max.sm",
  "temperature.gpu",
  "power.draw",
)


def describe(flags: Mapping[str, str], target: Target) -> dict[str, Any]:
  """Commit, versions, device, driver and clocks, load, flags: for JSON.

  `commit` is None outside a git checkout and ends in `-dirty` where tracked
  files differ from it. `driver` and `gpu` are None on a CPU.
  """
  device = jax.devices()[0]
  gpu = _gpu() if device.platform == "gpu" else None
  versions = {
    name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")
  }
  return {
    "commit": commit(),
    "specpilot_jax": _version("specpilot-jax"),
    **versions,
    "python": platform.python_version(),
    "platform": device.platform,
    "device_kind": device_name(),
    "devices": jax.device_count(),
    "dtype": str(target.dtype),
    "kernels": kernels.as_dict(target.kernels),
    "driver": gpu["driver_version"] if gpu else None,
    "gpu": gpu,
    "cpu": cpu_model(),
    "cores": _cores(),
    "load_average": list(os.getloadavg()),
    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "flags": dict(flags),
  }


def run_label(environment: Mapping[str, Any]) -> dict[str, Any]:
  """The part of `describe` that every line of requests.jsonl carries."""
  fields = (
    "commit", "flags", "jax", "jaxlib", "python", "dtype", "kernels",
  )  # fmt: skip
  return {
    "device_kind": environment["device_kind"],
    **{field: environment[field] for field in fields},
  }


_IMPORTED = time.monotonic()


def process_age_s() -> float:
  """Seconds since this process started; where the system does not tell, since
  this module was read."""
  try:
    # Behind the program's name, which may hold spaces: state is field 3,
    # start time field 22 in ticks since boot (proc_pid_stat(5)).
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(stat[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
  except (OSError, ValueError, IndexError, AttributeError):
    return time.monotonic() - _IMPORTED


def device_name() -> str:
  """The accelerator's name, or the processor's."""
  device = jax.devices()[0]
  return cpu_model() if device.platform == "cpu" else device.device_kind


def cpu_model() -> str:
  """The processor's name as the system gives it."""
  try:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
      name, _, value = line.partition(":")
      if name.strip() == "model name":
        return value.strip()
  except OSError:
    pass  # Not Linux.
  return platform.processor() or platform.machine()


def _cores() -> int | None:
  """Processor cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def commit() -> str | None:
  """The checked-out commit."""
  head = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
  if not head:
    return None
  status = ["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]
  return f"{head}-dirty" if _output(status) else head


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _gpu() -> dict[str, str] | None:
  query = f"--query-gpu={','.join(_GPU_FIELDS)}"
  text = _output(["nvidia-smi", query, "--format=csv,noheader"])
  if not text:
    return None
  values = text.splitlines()[0].split(", ")
  return dict(zip(_GPU_FIELDS, values, strict=False))


_STATE_FIELDS = (
  "clocks.sm",
  "clocks.mem",
  "temperature.gpu",
  "power.draw",
  "clocks_event_reasons.active",
)


def gpu_state(index: int | str = 0) -> dict[str, str] | None:
  """Clocks, temperature, power and throttle reasons; None without a GPU.

  Args:
    index: or uuid.
  """
  query = f"--query-gpu={','.join(_STATE_FIELDS)}"
  form = "--format=csv,noheader,nounits"
  text = _output(["nvidia-smi", f"--id={index}", query, form])
  if not text:
    return None
  return dict(zip(_STATE_FIELDS, text.splitlines()[0].split(", "), strict=True))


def gpu_uuids() -> dict[int, str]:
  """uuid by index, as `nvidia-smi` lists them; empty without a GPU."""
  form = "--format=csv,noheader"
  text = _output(["nvidia-smi", "--query-gpu=index,uuid", form]) or ""
  pairs = (line.partition(",") for line in text.splitlines())
  return {
    int(index): uuid.strip()
    for index, _, uuid in pairs
    if index.strip().isdecimal()
  }


def of_machine(
  machine: Mapping[str, Any], flags: Mapping[str, str]
) -> dict[str, Any]:
  """As `describe`, from what an engine process said of its device.

  The caller's own JAX stays without a device, whose memory engines need.

  Args:
    machine: see `controller.worker.machine`; with dtype and kernels.
    flags: every flag as text.
  """
  on_gpu = machine["platform"] == "gpu"
  gpu = _gpu() if on_gpu else None
  kind = cpu_model() if machine["platform"] == "cpu" else machine["device_kind"]
  return {
    "commit": commit(),
    "specpilot_jax": _version("specpilot-jax"),
    **{name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
    "python": platform.python_version(),
    "platform": machine["platform"],
    "device_kind": kind,
    "devices": 1,
    "dtype": machine["dtype"],
    "kernels": machine["kernels"],
    "driver": gpu["driver_version"] if gpu else None,
    "gpu": gpu,
    "cpu": cpu_model(),
    "cores": _cores(),
    "load_average": list(os.getloadavg()),
    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "flags": dict(flags),
  }


def _output(command: list[str]) -> str | None:
  """A command's output; None where it is missing, fails or hangs."""
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=20, check=True
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
