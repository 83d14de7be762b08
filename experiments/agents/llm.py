"""The agent that is a language model, by the library that speaks to most.

It reads and edits a copy of the sources through five tools and ends with what
its change is for. The copy is a dictionary of this process: nothing that the
model writes runs here, and its patch goes through the same gates as any other.
Which model is named as the library names them, `provider:model`; keys come from
this process's environment, as the provider's own client reads them.

Needs the extra `llm`.
"""

import asyncio
import dataclasses
import decimal
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.agents.protocol import Limits, Proposal, Session, Task
from memory import patches
from specpilot_jax import extras
from specpilot_jax.errors import SpecPilotError

MAX_TRANSCRIPT = 1 << 16
MAX_REQUESTS = 80
"""Answers of the model to a task at most."""
MAX_LINES, MAX_HITS = 400, 60
"""Of a file that is read at once; lines that a search tells."""

INSTRUCTIONS = """\
You make speculative decoding faster in a JAX engine. You get one task: a \
direction, and the gain that a cost model allows for it. Read the sources with \
your tools, change what the task needs, and end with an answer.
What you add must be behind an option of specpilot_jax/mechanisms/registry.py \
whose default leaves the engine as it is, token for token. With the option on, \
outputs must be the target's own: every token is checked. Your patch may only \
touch sources of the engine and its kernels; a refused edit says why. A change \
of an option's value alone needs no edit. If nothing is worth 3 percent, \
answer without edits and without options."""


@dataclasses.dataclass
class Answer:
  """How the model ends.

  Attributes:
    options: `option=value,...` that switch its change on; empty for none.
    hypothesis: why it should be faster, one line.
    prediction: gain that it expects, as a share; None where it does not say.
  """

  options: str = ""
  hypothesis: str = ""
  prediction: float | None = None


class Draft:
  """Sources that are read and edited in memory.

  Every method answers with text for the model.

  Args:
    files: of the base, by path.

  Raises:
    SpecPilotError: by every method, one line on what cannot be done.
  """

  def __init__(self, files: Mapping[str, bytes]):
    self._base = dict(files)
    self._new = dict(files)

  @property
  def patch(self) -> str:
    """What is different now, as a unified diff; empty for nothing."""
    return patches.render(self._base, self._new).decode()

  def _text(self, path: str) -> str:
    if path not in self._new or not path.endswith(".py"):
      raise SpecPilotError(f"{path}: no source; list_files tells what there is")
    return self._new[path].decode()

  def list_files(self, folder: str = "") -> str:
    """Lists the Python sources whose path begins so, with their lines."""
    found = [
      f"{path} ({data.count(10)} lines)"
      for path, data in sorted(self._new.items())
      if path.startswith(folder) and path.endswith(".py")
    ]
    return "\n".join(found) or f"no source begins with {folder!r}"

  def read_file(self, path: str, first: int = 1, lines: int = 200) -> str:
    """Reads lines of a source, with their numbers, from `first` on."""
    whole = self._text(path).splitlines()
    first = max(1, first)
    end = first - 1 + max(1, min(lines, MAX_LINES))
    part = whole[first - 1 : end]
    shown = "\n".join(f"{first + i}: {x}" for i, x in enumerate(part))
    return shown or f"{path} has {len(whole)} lines"

  def find(self, text: str, folder: str = "") -> str:
    """Finds lines that contain a text, in sources whose path begins so."""
    if not text:
      raise SpecPilotError("the text to find is empty")
    found = []
    for path in sorted(self._new):
      if path.startswith(folder) and path.endswith(".py"):
        lines = self._text(path).splitlines()
        found += [
          f"{path}:{i}: {line.strip()}"
          for i, line in enumerate(lines, start=1)
          if text in line
        ]
    more = len(found) - MAX_HITS
    told = found[:MAX_HITS] + ([f"and {more} more"] if more > 0 else [])
    return "\n".join(told) or f"no line contains {text!r}"

  def replace(self, path: str, old: str, new: str) -> str:
    """Replaces a text that a source has exactly once."""
    text = self._text(path)
    count = text.count(old) if old else 0
    if count != 1:
      raise SpecPilotError(
        f"{path}: has that text {count} times, expected once"
      )
    return self._put(path, text.replace(old, new))

  def write_file(self, path: str, text: str) -> str:
    """Writes a source whole: a new one, or another text for one."""
    return self._put(path, text)

  def _put(self, path: str, text: str) -> str:
    patches.check_path(path)
    if not text.endswith("\n"):
      text += "\n"
    try:
      self._new[path] = text.encode()
    except UnicodeEncodeError:
      raise SpecPilotError(f"{path}: not UTF-8 text") from None
    if self._new != self._base:
      patches.parse(self.patch.encode())  # What it would be refused for later.
    return f"{path}: {text.count(chr(10))} lines now"

  @property
  def tools(self) -> list[Callable[..., str]]:
    return [
      self.list_files, self.read_file, self.find, self.replace, self.write_file,
    ]  # fmt: skip


class LLM:
  """Asks a model per task.

  Args:
    model: `provider:model`, or a model of the library.
    files: the sources that it starts from, of `tree.read_base`.

  Raises:
    SpecPilotError: the extra is not installed, or no such provider.
  """

  name = "llm"
  paid = True

  def __init__(self, model: Any, files: Mapping[str, bytes]):
    self._ai = extras.load("pydantic_ai", "llm", "agent llm")
    self._model, self._files = model, dict(files)

  def propose(self, task: Task, workspace: Path, limits: Limits) -> Session:
    """A proposal, or none; see `Agent.propose`.

    The transcript is also a file of the workspace.

    Raises:
      SpecPilotError: no limit of money; the model cannot be asked at all.
    """
    if limits.usd is None:
      raise SpecPilotError(
        "agent llm spends money: --agent_usd says how much of it a task may"
      )
    draft = Draft(self._files)
    usage = self._ai.RunUsage()
    with self._ai.capture_run_messages() as messages:
      try:
        answer = asyncio.run(self._ask(draft, task, limits, usage))
        end = ""
      except self._ai.UserError as e:
        raise SpecPilotError(f"agent llm: {e}") from None
      except (self._ai.AgentRunError, TimeoutError, OSError) as e:
        answer, end = None, f"\n[ended: {type(e).__name__}: {e}]"
      transcript = _transcript(messages) + end
    (workspace / "transcript.json").write_text(transcript)
    proposals = ()
    if answer is not None and (draft.patch or answer.options):
      fields = dataclasses.asdict(answer) | {
        "task": task.id, "patch": draft.patch
      }  # fmt: skip
      proposals = (Proposal.from_dict(fields),)
    return Session(
      proposals=proposals,
      usd=None if usage.cost is None else float(usage.cost),
      transcript=transcript[-MAX_TRANSCRIPT:],
    )

  async def _ask(self, draft: Draft, task: Task, limits: Limits, usage) -> Any:
    agent = self._ai.Agent(
      self._model,
      output_type=Answer,
      instructions=INSTRUCTIONS,
      tools=[self._tool(function) for function in draft.tools],
    )
    run = agent.run(
      json.dumps({"task": task.as_dict(), "seconds": limits.seconds}),
      usage=usage,
      usage_limits=self._ai.UsageLimits(
        cost_limit=decimal.Decimal(str(limits.usd)), request_limit=MAX_REQUESTS
      ),
    )
    return (await asyncio.wait_for(run, limits.seconds)).output

  def _tool(self, function: Callable[..., str]) -> Any:
    """A method of the draft; what it refuses the model may try another way."""

    @functools.wraps(function)
    def tool(*args, **named):
      try:
        return function(*args, **named)
      except SpecPilotError as e:
        raise self._ai.ModelRetry(str(e)) from None

    return self._ai.Tool(tool, max_retries=MAX_REQUESTS)


def _transcript(messages: Any) -> str:
  from pydantic_ai.messages import ModelMessagesTypeAdapter

  return ModelMessagesTypeAdapter.dump_json(messages).decode()
