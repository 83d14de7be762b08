"""Chat templates: the model's own Jinja source, rendered in a sandbox.

A template comes with a checkpoint, that is from somewhere else: it runs in
Jinja's immutable sandbox, with the helpers that published templates expect
and nothing more.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from specpilot_jax.errors import SpecPilotError


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` marks assistant text for training; its body counts."""

  tags = {"generation"}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
  raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
  return datetime.datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None,
            sort_keys=False):  # fmt: skip
  # Jinja's own filter escapes HTML, which a prompt must not contain.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


class ChatTemplate:
  """A compiled chat template.

  Args:
    source: Jinja source.
    roles: special tokens that templates name, such as `bos_token`.
    name: what errors call the model.

  Raises:
    SpecPilotError: the source does not compile.
  """

  def __init__(self, source: str, roles: Mapping[str, str], name: str):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Any] = {
      "raise_exception": _raise_exception,
      "strftime_now": _strftime_now,
    }
    self._name = name
    self._roles = dict(roles)
    try:
      self._template = environment.from_string(source, globals=helpers)
    except jinja2.TemplateError as error:
      raise SpecPilotError(
        f"{name}: chat template does not compile ({_one_line(error)})"
      ) from None

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    **variables: Any,
  ) -> str:
    """Renders a conversation; see `Tokenizer.chat`."""
    if not messages:
      raise SpecPilotError(f"{self._name}: chat needs at least one message")
    for number, message in enumerate(messages):
      for key in ("role", "content"):
        value = message.get(key) if isinstance(message, Mapping) else None
        if not isinstance(value, str):
          raise SpecPilotError(
            f"{self._name}: chat message {number} needs a string {key!r}"
          )
    values = {"tools": None, "documents": None, **self._roles, **variables}
    try:
      return self._template.render(
        messages=[dict(m) for m in messages],
        add_generation_prompt=add_generation_prompt,
        **values,
      )
    except Exception as error:  # A template may fail in any way Python can.
      raise SpecPilotError(
        f"{self._name}: chat template failed ({_one_line(error)})"
      ) from None


def _one_line(error: Exception) -> str:
  return " ".join(str(error).split()) or type(error).__name__
