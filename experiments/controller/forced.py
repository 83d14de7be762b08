"""Token forcing of a session's records, by a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import results
from experiments.controller import tree
from experiments.controller.checks import CANDIDATE
from experiments.hosts import Slot
from experiments.settings import Settings


def by_stock(
  settings: Settings, kernels: str, run: Path, slot: Slot | None
) -> Mapping[str, Any]:
  """Stock's verdict on the candidate's tokens; `failed` where there is none.

  The device's memory is free again when the process ends.

  Args:
    settings: of the deployment.
    kernels: of stock.
    run: folder of the records; the verdict's files go into `forcing` in it.
    slot: the device that scores; None is JAX's choice.
  """
  where = run / "forcing"
  command = [
    sys.executable, "-m", "experiments.main", "--job=token_force",
    f"--target={settings.target}", f"--requests={run}",
    f"--output_dir={where}", f"--prefill_chunk={settings.prefill_chunk}",
    f"--kernels={kernels}",
  ]  # fmt: skip
  for name in ("dtype", "min_control_tokens"):
    if getattr(settings, name) is not None:
      command.append(f"--{name}={getattr(settings, name)}")
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    cwd=tree.ROOT,
    env=environment(slot),
  )
  if done.returncode not in (0, 1) or not (where / results.RESULT).exists():
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {
      "verdict": "inconclusive",
      "reason": f"forcing failed: {last}",
      "failed": True,
    }
  return results.read_result(where)["token_forcing"][CANDIDATE]


def environment(slot: Slot | None) -> dict[str, str]:
  """This process's variables, for one that uses a device."""
  if slot is None:
    return dict(os.environ)
  return {**os.environ, "CUDA_VISIBLE_DEVICES": slot.visible}
