"""Libraries that only an extra installs."""

import importlib
from typing import Any

from specpilot_jax.errors import SpecPilotError


def load(library: str, extra: str, user: str) -> Any:
  """The library.

  Args:
    library: name of its module.
    extra: of this package, which installs it.
    user: what needs it.

  Raises:
    SpecPilotError: it is not installed.
  """
  try:
    return importlib.import_module(library)
  except ImportError:
    raise SpecPilotError(
      f"{user} needs the extra {extra}: pip install 'specpilot-jax[{extra}]'"
    ) from None
