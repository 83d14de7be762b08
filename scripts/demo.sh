#!/usr/bin/env bash
# From a fresh machine to a report: creates .venv and runs the CPU smoke
# deployment on the model that ships with the package. Arguments go to
# experiments.main, for instance --output_dir=/tmp/run; a relative path counts
# from the repository root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

setup_venv
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# Not by exec: a report counts from the start of its process.
"$VENV_PYTHON" -m experiments.main --flagfile=cpu_smoke.flags "$@"
