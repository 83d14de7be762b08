"""What command-line entry points share: flags to values, errors to lines."""

import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import flags

from specpilot_jax.errors import SpecPilotError


def run(main: Callable[[], None], argv: Sequence[str] | None = None) -> None:
  """Parses flags, runs `main`, and exits.

  A `SpecPilotError`, a flag error or an operating-system error about a file
  becomes one line on stderr and exit status 2.
  """
  argv = list(sys.argv if argv is None else argv)
  try:
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
  except OSError as e:
    if e.filename is None:
      raise
    fail(f"{e.filename}: {e.strerror}")
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def fail(error: object) -> None:
  """Prints one line and exits with status 2."""
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  sys.exit(2)


def parse_ids(text: str, flag: str) -> list[int]:
  """`1,2,3` as integers."""
  try:
    return [int(part) for part in text.split(",")]
  except ValueError:
    raise SpecPilotError(
      f"--{flag} must be integers separated by commas, got {text!r}"
    ) from None


def read_text(path: str) -> str:
  """A UTF-8 text file."""
  try:
    return pathlib.Path(path).read_text(encoding="utf-8")
  except UnicodeDecodeError as e:
    raise SpecPilotError(f"{path}: not UTF-8 text (byte {e.start})") from None
