"""What command-line entry points share: flags to values, errors to lines."""

import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Sequence

import jax
from absl import flags

from specpilot_jax.errors import SpecPilotError


def run(main: Callable[[], None], argv: Sequence[str] | None = None) -> None:
  """Parses flags, runs `main`, and exits.

  --help prints the module's text and flags. A `SpecPilotError`, a flag error,
  an operating-system error about a file or a device out of memory becomes one
  line on stderr and exit status 2.
  """
  argv = list(sys.argv if argv is None else argv)
  wants_help = {"--help", "-help", "-h", "--helpfull"} & set(argv[1:])
  try:
    if wants_help:
      print((sys.modules["__main__"].__doc__ or "").strip(), end="\n\n")
      print(flags.FLAGS.main_module_help().strip(), flush=True)
      return
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise SpecPilotError(
        f"unexpected argument {rest[1]!r}; flags are --name=value"
      )
    main()
  except flags.Error as e:
    fail(e)
  except SpecPilotError as e:
    fail(e)
  except BrokenPipeError:
    # The reader of our output is gone; nothing may be flushed to it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
  except OSError as e:
    if e.filename is None:
      raise
    fail(f"{e.filename}: {e.strerror}")
  except jax.errors.JaxRuntimeError as e:
    if "RESOURCE_EXHAUSTED" not in str(e):
      raise
    fail(f"out of device memory: {str(e).splitlines()[0]}")
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def fail(error: object) -> None:
  """Prints one line and exits with status 2."""
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(2)


def parse_ids(text: str, flag: str) -> list[int]:
  """`1,2,3` as integers."""
  if not re.fullmatch(r"\s*-?[0-9]+\s*(,\s*-?[0-9]+\s*)*", text):
    raise SpecPilotError(
      f"--{flag} must be integers separated by commas, got {text!r}"
    )
  return [int(part) for part in text.split(",")]


def read_text(path: str) -> str:
  """A UTF-8 text file."""
  try:
    return pathlib.Path(path).read_text(encoding="utf-8")
  except UnicodeDecodeError as e:
    raise SpecPilotError(f"{path}: not UTF-8 text (byte {e.start})") from None
