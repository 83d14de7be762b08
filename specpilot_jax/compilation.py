"""Compilation: the persistent cache, and a count of what was compiled."""

import concurrent.futures
import os
from collections.abc import Iterable

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_counts = {"compilations": 0}


def _listen(event: str, duration_secs: float, **kwargs) -> None:
  del duration_secs, kwargs
  if event == _BACKEND_COMPILE:
    _counts["compilations"] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
  """Executables built by this process so far (cache reads count too).

  The difference over a timed region must be 0.
  """
  return _counts["compilations"]


def use_persistent_cache(directory: str | os.PathLike) -> None:
  """Keeps compiled executables in `directory` between processes."""
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> None:
  """Compiles several functions at once, half of the machine's cores at most.

  Calls of the same functions with arguments of the same shapes find the
  executables then. Tracing is Python's and goes on one after another, beside
  the compiler's work.

  Args:
    lowered: what to compile.
  """
  workers = max(1, min((os.cpu_count() or 1) // 2, 8))
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for done in [pool.submit(each.compile) for each in lowered]:
      done.result()
