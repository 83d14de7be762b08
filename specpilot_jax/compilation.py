"""Compilation: the persistent cache, and a count of what was compiled."""

import concurrent.futures
import os
import threading
from collections.abc import Iterable

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_counts = {"compilations": 0}
_here = threading.local()


def _listen(event: str, duration_secs: float, **kwargs) -> None:
  del duration_secs, kwargs
  if event == _BACKEND_COMPILE:
    _counts["compilations"] += 1
    _here.compilations = num_compilations_here() + 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
  """Executables built by this process so far (cache reads count too).

  The difference over a timed region must be 0.
  """
  return _counts["compilations"]


def num_compilations_here() -> int:
  """Those of them that the calling thread asked for."""
  return getattr(_here, "compilations", 0)


def workers() -> int:
  """Threads to compile with: half of the machine's cores, eight at most."""
  return max(1, min((os.cpu_count() or 1) // 2, 8))


def use_persistent_cache(directory: str | os.PathLike) -> None:
  """Keeps compiled executables in `directory` between processes."""
  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> None:
  """Compiles several functions at once.

  Calls of the same functions with arguments of the same shapes find the
  executables then. Tracing is Python's and goes on one after another, beside
  the compiler's work.

  Args:
    lowered: what to compile.
  """
  with concurrent.futures.ThreadPoolExecutor(workers()) as pool:
    for done in [pool.submit(each.compile) for each in lowered]:
      done.result()
