"""Flags of loads, in one place; names are those of vLLM's benchmark."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from experiments.serving import arrivals, figures
from experiments.serving.settings import LoadSettings
from specpilot_jax.errors import SpecPilotError

flags.disclaim_key_flags()


def define_serving_flags() -> Callable[[], LoadSettings | None]:
  """Defines the flags; called once, by a module that is run.

  Returns:
    What makes the settings out of the parsed flags; None where none of them
    asks for a load: requests are then decoded one at a time.
  """
  rates = flags.DEFINE_list(
    "request_rate", [], "Requests per second, open loop; several are served one"
    " after the other. inf sends all at once, or, with --max_concurrency, the"
    " next with each answer.",
  )  # fmt: skip
  concurrency = flags.DEFINE_list(
    "max_concurrency", [], "Requests sent and not answered at most; several are"
    " served one after the other.",
  )  # fmt: skip
  burstiness = flags.DEFINE_float(
    "burstiness", 1.0, "Shape of the gamma law of the gaps between requests: 1"
    " is a Poisson process, less comes in bursts.",
  )  # fmt: skip
  recorded = flags.DEFINE_string(
    "arrivals", None, "Run folder or JSON lines whose arrival_s are replayed."
  )
  goodput = flags.DEFINE_list(
    "goodput", [], "NAME:MILLISECONDS of ttft, tpot, e2el: what a request must"
    " keep to count.",
  )  # fmt: skip
  slots = flags.DEFINE_integer(
    "max_num_seqs", None, "Requests decoded at once at most; the largest"
    " --max_concurrency by default.",
  )  # fmt: skip

  def read() -> LoadSettings | None:
    if not rates.value and not concurrency.value and recorded.value is None:
      for flag in (goodput, slots):
        if flag.value:
          raise SpecPilotError(
            f"--{flag.name} is of a load: give --max_concurrency or"
            " --request_rate"
          )
      return None
    times = None
    if recorded.value is not None:
      times = arrivals.recorded(Path(recorded.value))
    return LoadSettings(
      levels=arrivals.levels(
        _numbers("request_rate", rates.value, float) or [math.inf],
        _numbers("max_concurrency", concurrency.value, int) or [None],
        burstiness.value,
        times,
      ),
      goodput=figures.objectives(goodput.value),
      max_num_seqs=slots.value,
    )

  return read


def _numbers(name: str, texts: Sequence[str], kind: type) -> list:
  try:
    return [kind(text) for text in texts]
  except ValueError:
    raise SpecPilotError(
      f"{name} must be numbers, got {','.join(texts)!r}"
    ) from None
