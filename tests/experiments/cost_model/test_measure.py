"""Profiled steps, with the processor's own trace in place of a GPU's."""

import dataclasses
import glob
import types

import jax
import pytest

from experiments.cost_model import kernels, measure, model
from pallas_kernels import gdn_decode, gdn_verify
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from tests.decoding import kit

# Of jaxlib's own type, on the first look at an event.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats")


@pytest.fixture(name="subject")
def _subject(monkeypatch, tmp_path):
  """A small hybrid; its activities come from the CPU's lines of a trace."""

  def trace(run):
    with jax.profiler.trace(str(tmp_path)):
      run()
    files = glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)
    profile = jax.profiler.ProfileData.from_file(max(files))
    found = []
    for plane in profile.planes:
      for line in plane.lines:
        for event in line.events:
          stats = dict(event.stats)
          if "hlo_op" in stats:
            found.append(
              kernels.Kernel(
                event.name,
                str(stats["hlo_op"]),
                str(stats["hlo_module"]),
                round(event.start_ns),
                round(event.duration_ns),
              )
            )
    return found

  monkeypatch.setattr(measure, "trace", trace)
  with kit.quick_compilation():
    yield measure.Subject(
      target=kit.build(kit.hybrid(), "float32"),
      drafter=PromptLookup(3),
      sampling=SamplingParams(),
      max_seq_len=96,
      prefill_chunk=16,
    )


def test_measurements_have_a_cache_of_their_own_sources(tmp_path, monkeypatch):
  folders = []
  monkeypatch.setattr(
    measure.compilation, "use_persistent_cache", folders.append
  )
  source = tmp_path / "package" / "model.py"
  source.parent.mkdir()
  source.write_text("scope = 1\n")
  package = types.SimpleNamespace(__path__=[str(source.parent)])
  monkeypatch.setattr(measure, "decoding", package)
  before = jax.config.jax_compilation_cache_dir
  try:
    jax.config.update("jax_compilation_cache_dir", None)
    measure.prepare()
    assert folders == []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    measure.prepare()
    measure.prepare()
    source.write_text("scope = 2\n")
    measure.prepare()
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  assert folders[0] == folders[1] != folders[2]
  assert all(f.parent == tmp_path / "compiled" for f in folders)


def test_every_class_is_found(subject):
  session = subject.session("stock")
  system = measure._profiled(session, [1, 2, 1, 2, 1], SamplingParams())
  assert system["nodes"] == 4 and system["steps"] == measure.PROFILED_STEPS
  # Two steps before, half of the others behind.
  assert 4 < system["context"] < 4 + 4 * (2 + measure.PROFILED_STEPS)
  measured = model.measured_of(system)
  classes = measured.breakdown.classes
  for name in ("target_gemm", "recurrent", "attention", "drafter", "other"):
    assert classes[name] > 0, name
  assert classes["prefill"] == 0
  assert sum(classes.values()) == pytest.approx(measured.breakdown.step_us)
  # Every activity has an instruction of the executable.
  assert measured.breakdown.unattributed_us == 0
  assert measured.heaviest


def test_arguments_have_the_names_that_classes_go_by(subject):
  session = subject.session("stock")
  request = session.request(SamplingParams())
  step = session.step.lower(session.params, session.start([1, 2]), request)
  text = step.compile().as_text() or ""
  for argument in ("params[0]", "carry.drafter", "carry.target.layers[0]."):
    assert argument in text.replace("\\'", "'"), argument
  scopes = set(kernels.op_names(text).values())
  assert not any(s.startswith(("params", "carry.target.l")) for s in scopes)


def test_a_step_in_graphs_is_profiled_again_without(subject, monkeypatch):
  whole = measure.trace
  calls = []

  def trace(run):
    found = whole(run)
    calls.append(found)
    if len(calls) == 1:
      # What launched them is a graph, and their names are a library's.
      found = [
        dataclasses.replace(k, op="command_buffer_1", name="nvjet_1")
        for k in found
      ]
    return found

  monkeypatch.setattr(measure, "trace", trace)
  session = subject.session("stock")
  system = measure._profiled(session, [1, 2, 1, 2, 1], SamplingParams())
  assert len(calls) == 2
  measured = model.measured_of(system)
  union = kernels.union_ns([(k.start_ns, k.duration_ns) for k in calls[0]])
  # The time is that of the first, the classes are those of the second.
  assert measured.breakdown.step_us == pytest.approx(
    1e-3 * union / system["steps"]
  )
  for name in ("recurrent", "attention", "drafter"):
    assert measured.breakdown.classes[name] > 0, name
  assert measured.without_graphs and measured.breakdown.unattributed_us == 0
  assert not model.measured_of(
    measure._profiled(session, [1, 2, 1], SamplingParams())
  ).without_graphs


def test_steps_as_an_engine_decodes_them(subject):
  """Of a system without floors, as many as there is room for."""
  engine = Engine(
    subject.target, drafter=subject.drafter, max_seq_len=96, prefill_chunk=16
  )
  for prompt, steps in (
    ([1, 2, 1, 2, 1], measure.PROFILED_STEPS),
    ([1] * 84, 1),
  ):
    system = measure._decoded(engine, prompt, SamplingParams(stop=("x",)))
    assert system is not None and system["steps"] == steps
    assert len(prompt) < system["context"] < 96
    measured = model.measured_of(system)
    for name in ("target_gemm", "recurrent", "attention", "drafter"):
      assert measured.breakdown.classes[name] > 0, name
    assert measured.breakdown.unattributed_us == 0
    assert measured.nodes == 4
  assert measure._decoded(engine, [1] * 85, SamplingParams()) is None
  assert engine.generate([1, 2], SamplingParams(max_tokens=3)).token_ids


def test_few_steps_fit_a_short_sequence(subject):
  session = subject.session("stock")
  tokens = [1] * 88
  system = measure._profiled(session, tokens, SamplingParams())
  assert 1 <= system["steps"] < measure.PROFILED_STEPS
  assert system["context"] <= session.capacity


def test_a_prompt_pass(subject):
  session = subject.session("ar")
  pass_ = measure._prefill(session, list(range(20)), on_cpu=False)
  assert pass_["rows"] == 16 and pass_["measured_us"] > 0
  assert pass_["context"] == 19 + 16


def test_separate_classes_run_what_the_step_runs(subject, monkeypatch):
  """A token without drafts has a form of its own in a Gated DeltaNet layer."""
  monkeypatch.setattr(measure.separate, "_SECONDS", 0.0)
  monkeypatch.setattr(measure.separate, "_REPEATS", 1)
  for name, used in (("ar", {"decode"}), ("stock", {"verify"})):
    forms = set()

    def seen(form, function, forms=forms):
      def call(*args, **kwargs):
        forms.add(form)
        return function(*args, **kwargs)

      return call

    for module, form in ((gdn_decode, "decode"), (gdn_verify, "verify")):
      monkeypatch.setattr(module, form, seen(form, getattr(module, form)))
    parts = measure.separate.Parts
    session = subject.session(name)
    monkeypatch.setattr(session, "step", lambda params, carry, r: (carry, ()))
    carry = session.start([1, 2, 1, 2])
    forms.clear()  # Of the prompt.
    parts(session, carry, session.request(SamplingParams())).classes_us()
    assert forms == used


def test_separate_classes_of_a_hybrid(subject, monkeypatch):
  monkeypatch.setattr(measure.separate, "_SECONDS", 0.0)
  monkeypatch.setattr(measure.separate, "_REPEATS", 2)
  for name, nodes in (("ar", 1), ("stock", 4)):
    session = subject.session(name)
    system = measure._separately(session, [1, 2, 1, 2], SamplingParams())
    assert system["nodes"] == nodes and system["context"] == 3
    classes = system["classes_us"]
    for kind in ("target_gemm", "recurrent", "attention"):
      assert classes[kind] > 0
    assert (classes["drafter"] > 0) == (name == "stock")
    assert system["step_alone_us"] > 0
