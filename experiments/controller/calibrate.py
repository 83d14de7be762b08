"""Prints how often the gate accepts candidates of known gains.

    python -m experiments.controller.calibrate --repetitions=2000

About three minutes on one core; `simulation` says what is drawn.
"""

from absl import flags

from experiments.console import say, table
from experiments.controller import simulation
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError

_REPETITIONS = flags.DEFINE_integer("repetitions", 2_000, "Of every cell.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def main() -> None:
  """Prints the table."""
  if _REPETITIONS.value < 1:
    raise SpecPilotError(
      f"repetitions must be at least 1, got {_REPETITIONS.value}"
    )
  header = (
    "design, noise", "launch", *(f"true {g:+.0%}" for g in simulation.GAINS)
  )  # fmt: skip
  say(table(header, simulation.rows(_REPETITIONS.value, seed=_SEED.value)))


if __name__ == "__main__":
  cli.run(main)
