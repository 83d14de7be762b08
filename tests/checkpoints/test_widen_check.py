"""The small form of `scripts/widen_check.py`, which says what it checks."""

import json
import os
import pathlib
import subprocess
import sys

from tests.notes import FULL, note

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  "--prompts=4",
  "--prompt_tokens=32",
  "--tokens=32",
  "--nodecode",
  "--nobfloat16",
)


def test_the_widened_zoo_keeps_its_function():
  done = subprocess.run(
    [sys.executable, "-m", "scripts.widen_check", *(() if FULL else SMALL)],
    cwd=ROOT,
    # Most of the small form's time would be compilation.
    env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not FULL))},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  exact, *in_bfloat16 = lines
  assert exact["forced"]
  assert exact["decoded"] is (True if FULL else None)
  # Extra layers leave 2^-40 of the residual stream.
  assert exact["logit_difference"] < 1e-9
  assert exact["acceptance"]["same"] == 1
  assert exact["acceptance"]["small"] > 2  # a trained drafter
  note(
    f"widened: {exact['acceptance']['small']:.2f} tokens per block in float64,"
    f" logits within {exact['logit_difference']:.2g}"
  )
  assert len(in_bfloat16) == (2 if FULL else 0)
  if not FULL:
    return
  acceptance, forcing = in_bfloat16
  assert abs(acceptance["relative"]) <= 0.02
  # Roundings differ, so the models are two and not one.
  assert 0 < acceptance["logit_difference"] < 2
  assert forcing["verdict"] == "pass"
  assert forcing["tokens"] == 20 * 128
  note(
    "widened, bfloat16:"
    f" {100 * acceptance['relative']:+.2f} % acceptance, the same at"
    f" {100 * acceptance['same']:.1f} % of tokens, logits within"
    f" {acceptance['logit_difference']:.2g}; token forcing:"
    f" {forcing['reason']}"
  )
