#!/usr/bin/env bash
# From a fresh machine to a report: creates .venv, fetches SmolLM2-135M and
# the HumanEval prompts (checksums checked) and runs the CPU smoke deployment.
# Arguments go to experiments.main, for instance --output_dir=/tmp/run; a
# relative path counts from the repository root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

setup_venv gguf
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
"$VENV_PYTHON" -m experiments.fetch smollm2 humaneval
exec "$VENV_PYTHON" -m experiments.main --flagfile=cpu_smoke.flags "$@"
