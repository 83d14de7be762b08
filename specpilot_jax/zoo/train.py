"""Train the zoo: `python -m specpilot_jax.zoo.train --work_dir=DIR`

Recipes: `zoo` trains the target and its DFlash drafter, `zoo-dflash2` and
`zoo-dspark` the other drafters of the zoo that ships, `smollm2` a DFlash
drafter for SmolLM2-135M-Instruct. Stages, each resumable and done once: `data`
(corpus, split, hashes, overlap check, and byte-level BPE or function heads),
`target`, `text` (what the target generates), `drafter`, `release` (the folders
that ship, weights in W12). Recipes of drafters for the zoo that ships may share
a work folder, and then share its text. A stage that is complete is not run
again; a stage that hits --max_wall_s saves its state, and the same command goes
on.
"""

import math
import pathlib
import time

from absl import flags

from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.zoo import recipes, stages

_RECIPE = flags.DEFINE_enum(
  "recipe", "zoo", sorted(recipes.DRAFTERS), "What to train."
)
_STAGE = flags.DEFINE_enum(
  "stage", "all", ("all", *stages.STAGES), "What to run."
)
_WORK_DIR = flags.DEFINE_string(
  "work_dir", None, "Keeps everything.", required=True
)
_MAX_WALL_S = flags.DEFINE_float(
  "max_wall_s",
  None,
  "Save and stop after so long, at a multiple of 50 steps or a round of text.",
)
_SCALE = flags.DEFINE_float("scale", 1.0, "Multiplies all step counts.")
_TESTS = flags.DEFINE_multi_string(
  "test_text", [], "Files whose text must not overlap with the corpus."
)


def main() -> None:
  if not _WORK_DIR.value:
    raise SpecPilotError("--work_dir is empty; expected a folder")
  if not 0 < _SCALE.value < math.inf:
    raise SpecPilotError(f"--scale must be above 0, got {_SCALE.value}")
  deadline = None
  if _MAX_WALL_S.value is not None:
    deadline = time.monotonic() + _MAX_WALL_S.value
  stopped = stages.run(
    _RECIPE.value,
    stages.STAGES if _STAGE.value == "all" else (_STAGE.value,),
    pathlib.Path(_WORK_DIR.value).absolute(),
    scale=_SCALE.value,
    test_files=_TESTS.value,
    deadline=deadline,
  )
  if stopped:
    print(f"{stopped}: not finished, run again", flush=True)


if __name__ == "__main__":
  cli.run(main)
