#!/usr/bin/env bash
# Lint, format check, type check and the whole test suite, from a fresh
# machine: creates .venv and fetches the model and the prompt sets that the
# tests read (checksums checked). Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

setup_venv dev
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
"$VENV_PYTHON" -m experiments.fetch all
say "ruff check"
"$VENV_PYTHON" -m ruff check
say "ruff format --check"
"$VENV_PYTHON" -m ruff format --check
say "pyrefly check"
"$VENV_PYTHON" -m pyrefly check --python-interpreter-path "$VENV_PYTHON"
say "pytest"
# In the order of tests/conftest.py, which knows the long ones.
exec "$VENV_PYTHON" -m pytest --numprocesses=2 --dist=loadfile \
  --no-loadscope-reorder "$@"
