# Sourced by the scripts beside it: finds a Python, keeps .venv up to date.
#
#   setup_venv [EXTRA]  creates .venv at the repository root where it is
#                       missing or broken, installs the project with EXTRA, if
#                       any, when pyproject.toml or constraints.txt changed, and
#                       sets VENV_PYTHON.
#
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
# Present while .venv is being built: one found at the start was interrupted.
VENV_UNFINISHED="$VENV/.unfinished"

say() { printf 'specpilot: %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints why an interpreter cannot be used, nothing where it can. A pyenv shim
# of a version that is not selected exists but does not run. With a second
# argument the environment is there already and need not be made.
python_unfit() {
  "$1" -c '
import sys, sysconfig
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
  print(version + " is older than 3.12")
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
  print(version + " is a free-threaded build")
elif len(sys.argv) == 1:
  try:
    import ensurepip, venv
  except ImportError:
    print(version + " lacks the venv module (Debian: python3-venv)")
' ${2+"$2"} 2>/dev/null || echo "it does not run"
}

# Sets BASE_PYTHON to an interpreter, or to nothing where only uv can help.
# 3.12 comes first: constraints.txt was resolved and is tested with it.
find_python() {
  local candidate reason
  BASE_PYTHON=""
  UNFIT=""
  if [ -n "${PYTHON:-}" ]; then
    candidate="$(command -v "$PYTHON" || true)"
    [ -n "$candidate" ] || die "PYTHON=$PYTHON is not there"
    reason="$(python_unfit "$candidate")"
    [ -z "$reason" ] || die "PYTHON=$PYTHON: $reason"
    BASE_PYTHON="$candidate"
    return
  fi
  local candidates=() name
  for name in python3.12 python3.13 python3.14 python3 python; do
    candidate="$(command -v "$name" || true)"
    [ -z "$candidate" ] || candidates+=("$candidate")
  done
  for name in 12 13 14 15 16 17 18 19; do
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"python3.$name"
    do
      [ ! -x "$candidate" ] || candidates+=("$candidate")
    done
  done
  for candidate in ${candidates[@]+"${candidates[@]}"}; do
    reason="$(python_unfit "$candidate")"
    if [ -z "$reason" ]; then
      BASE_PYTHON="$candidate"
      return
    fi
    UNFIT="${UNFIT:+$UNFIT; }$candidate: $reason"
  done
}

# uv makes environments without pip.
give_pip() {
  {
    "$VENV_PYTHON" -m pip --version || "$VENV_PYTHON" -m ensurepip ||
      uv pip install --python "$VENV_PYTHON" pip
  } >/dev/null 2>&1
}

# Whether .venv exists and works.
venv_works() {
  [ ! -e "$VENV_UNFINISHED" ] && "$VENV_PYTHON" -c '' 2>/dev/null && give_pip
}

make_venv() {
  local log
  find_python
  if [ -z "$BASE_PYTHON" ] && ! command -v uv >/dev/null 2>&1; then
    die "Python 3.12 or newer is needed, or uv; set PYTHON=/path/to/python" \
      "(found ${UNFIT:-no Python})"
  fi
  mkdir -p "$VENV" 2>/dev/null || die "cannot write to $ROOT"
  : >"$VENV_UNFINISHED" || die "cannot write to $VENV"
  # Not --clear: it would take the marker away first. What an interrupted run
  # left is removed by hand, the marker stays until the end.
  find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$VENV_UNFINISHED" \
    -exec rm -rf {} +
  if [ -n "$BASE_PYTHON" ]; then
    say "creating .venv with $BASE_PYTHON"
    log="$("$BASE_PYTHON" -m venv "$VENV" 2>&1)" ||
      die "$BASE_PYTHON -m venv failed: $(tail -n 1 <<<"$log")"
  else
    say "creating .venv with uv"
    # Any that it knows of; failing that, it downloads a 3.12.
    uv venv --quiet --no-project --allow-existing --no-python-downloads \
      --python '>=3.12,<3.15' "$VENV" >/dev/null 2>&1 ||
      log="$(uv venv --quiet --no-project --allow-existing \
        --python 3.12 "$VENV" 2>&1)" ||
      die "no Python >= 3.12 here (found ${UNFIT:-none}), and uv got none:" \
        "$(tr -s ' \n' ' ' <<<"$log" | cut -c 1-200)"
  fi
  give_pip || die "no pip could be installed into $VENV"
}

# What an installation depends on. The path counts: the project is installed
# in place.
install_key() {
  { printf '%s\n%s\n' "$ROOT" "$1"; cat pyproject.toml constraints.txt; } |
    cksum
}

install_project() {
  local extra="$1" log="$VENV/install.log"
  local suffix="${extra:+[$extra]}"
  say "installing specpilot-jax$suffix (some minutes at first; log: $log)"
  : >"$VENV_UNFINISHED"
  if ! "$VENV_PYTHON" -m pip install --quiet --no-input \
    --disable-pip-version-check -c constraints.txt -e ".$suffix" \
    >"$log" 2>&1; then
    # pip gave up by itself and left nothing half done.
    rm -f "$VENV_UNFINISHED"
    grep -v '^WARNING' "$log" | tail -n 15 >&2 || true
    die "pip could not install specpilot-jax$suffix; full log: $log"
  fi
  install_key "$extra" >"$VENV/.installed-${extra:-base}"
  rm -f "$VENV_UNFINISHED"
}

is_installed() {
  local record="$VENV/.installed-${1:-base}"
  [ -e "$record" ] && [ "$(cat "$record")" = "$(install_key "$1")" ]
}

setup_venv() {
  local extra="${1:-}"
  cd "$ROOT"
  # Two scripts at once would build one environment together.
  if command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock" || die "cannot write to $ROOT"
    flock 9
  fi
  if ! venv_works; then
    # Only what a virtual environment or these scripts left is replaced.
    if [ -d "$VENV" ] && [ ! -e "$VENV_UNFINISHED" ] &&
      [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
      die "$VENV is no virtual environment; move it away"
    fi
    make_venv
  fi
  local reason
  reason="$(python_unfit "$VENV_PYTHON" made)"
  [ -z "$reason" ] || die "$VENV: Python $reason; remove it and run again"
  # dev holds everything that the others hold.
  if ! is_installed "$extra" && ! is_installed dev; then
    install_project "$extra"
  fi
  rm -f "$VENV_UNFINISHED"
  if command -v flock >/dev/null 2>&1; then
    exec 9>&-
  fi
}
