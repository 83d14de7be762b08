"""The agent that is a language model: its tools, and a scripted model."""

import json

import pytest

from experiments.agents.llm import LLM, Draft
from experiments.agents.protocol import Limits, Task
from memory import patches
from specpilot_jax.errors import SpecPilotError

FILE = "specpilot_jax/decoding/a.py"
FILES = {
  FILE: b"one\ntwo\nthree\n",
  "specpilot_jax/zoo/weights/x.bin": b"\0",
  "experiments/controller/worker.py": b"pass\n",
}
TASK = Task(id="tau/open", factor="tau", option=None, bound=0.2)


def test_a_draft():
  draft = Draft(FILES)
  assert draft.patch == ""
  assert draft.list_files("specpilot_jax/") == f"{FILE} (3 lines)"
  assert draft.read_file(FILE, first=2, lines=1) == "2: two"
  assert draft.find("th") == f"{FILE}:3: three"
  assert draft.find("four") == "no line contains 'four'"
  draft.replace(FILE, "two", "2")
  draft.write_file("specpilot_jax/decoding/b.py", "x = 1")
  changes = patches.apply(FILES, patches.parse(draft.patch.encode()))
  assert changes[FILE] == b"one\n2\nthree\n"
  assert changes["specpilot_jax/decoding/b.py"] == b"x = 1\n"
  for line, call in (
    ("0 times", lambda: draft.replace(FILE, "two", "3")),
    ("no source", lambda: draft.read_file("specpilot_jax/zoo/weights/x.bin")),
    (
      "protected",
      lambda: draft.write_file("experiments/controller/worker.py", "x"),
    ),
    ("is empty", lambda: draft.find("")),
    ("UTF-8", lambda: draft.write_file(FILE, "\ud800")),
  ):
    with pytest.raises(SpecPilotError, match=line):
      call()
  assert "b.py" in draft.patch and "worker" not in draft.patch


@pytest.fixture(name="models", scope="module")
def _models():
  reason = "the extra llm is not installed: pip install 'specpilot-jax[llm]'"
  pytest.importorskip("pydantic_ai", reason=reason)
  from pydantic_ai import messages, usage
  from pydantic_ai.models import function

  return messages, function, usage


def scripted(models, turns):
  """A model that says what is written down, and notes what it is told."""
  messages, function, usage = models
  heard = []

  def answer(history, info):
    heard.append(history)
    name, arguments = turns[min(len(heard), len(turns)) - 1]
    if name == "answer":
      name = info.output_tools[0].name
    return messages.ModelResponse(
      parts=[messages.ToolCallPart(name, arguments)],
      usage=usage.RequestUsage(input_tokens=9, output_tokens=3),
    )

  return function.FunctionModel(answer), heard


def test_a_model_edits_sources(models, tmp_path):
  model, heard = scripted(
    models,
    [
      ("read_file", {"path": FILE}),
      ("replace", {"path": "experiments/x.py", "old": "a", "new": "b"}),
      ("replace", {"path": FILE, "old": "two", "new": "2"}),
      ("answer", {"options": "a=on", "hypothesis": "h", "prediction": 0.1}),
    ],
  )
  session = LLM(model, FILES).propose(TASK, tmp_path, Limits(usd=1.0))
  (proposal,) = session.proposals
  assert (proposal.options, proposal.prediction) == ("a=on", 0.1)
  assert "-two\n+2\n" in proposal.patch and proposal.task == TASK.id
  # It saw the task, the file, and why an edit was refused.
  told = session.transcript
  assert "tau/open" in told and "1: one" in told and "no source" in told
  assert json.loads((tmp_path / "transcript.json").read_text())
  assert len(heard) == 4


def test_what_ends_a_model(models, tmp_path):
  turn = ("read_file", {"path": FILE})
  model, heard = scripted(models, [turn])
  session = LLM(model, FILES).propose(TASK, tmp_path, Limits(usd=1.0))
  assert session.proposals == () and "UsageLimitExceeded" in session.transcript
  assert len(heard) == 80

  late, _ = scripted(models, [turn])
  session = LLM(late, FILES).propose(
    TASK, tmp_path, Limits(usd=1.0, seconds=0.0)
  )
  assert session.proposals == () and "TimeoutError" in session.transcript
  nothing, _ = scripted(models, [("answer", {})])
  session = LLM(nothing, FILES).propose(TASK, tmp_path, Limits(usd=1.0))
  assert session.proposals == ()
  with pytest.raises(SpecPilotError, match="--agent_usd"):
    LLM(nothing, FILES).propose(TASK, tmp_path, Limits())
  with pytest.raises(SpecPilotError, match="agent llm: "):
    LLM("nobody:x", FILES).propose(TASK, tmp_path, Limits(usd=1.0))


def test_without_the_extra(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "pydantic_ai", None)
  with pytest.raises(SpecPilotError, match="needs the extra llm"):
    LLM("openai:x", FILES)
