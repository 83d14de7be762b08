"""A request that breaks off leaves an engine that decodes the next one."""

import dataclasses
from typing import Any

import pytest

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from tests.decoding import kit

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = list(range(1, 21))


@pytest.fixture(scope="module")
def target():
  return kit.build(kit.hybrid(), "float32")


def fresh(target, **settings: Any) -> Engine:
  settings.setdefault("drafter", PromptLookup(3, min_ngram=1))
  return Engine(target, max_seq_len=64, prefill_chunk=8, **settings)


@pytest.fixture(scope="module")
def engine(target):
  return fresh(target)


@pytest.mark.parametrize(
  ("where", "when"),
  [("reset", 0), ("prefill", 0), ("prefill", 1), ("step", 0), ("step", 1),
   ("score", 0), ("score", 1)],
)  # fmt: skip
def test_interrupt_inside_a_donated_call(engine, where, when):
  expected = engine.generate(PROMPT, SAMPLING).token_ids
  features, compiled = next(iter(engine._fns_by_features.items()))
  genuine = getattr(compiled, where)
  calls = 0

  def interrupted(*args):
    nonlocal calls
    result = genuine(*args)  # the carry is donated by now
    calls += 1
    if calls > when:
      raise KeyboardInterrupt
    return result

  engine._fns_by_features[features] = dataclasses.replace(
    compiled, **{where: interrupted}
  )
  with pytest.raises(KeyboardInterrupt):
    if where == "score":
      engine.score(PROMPT, expected, SAMPLING)
    else:
      engine.generate(PROMPT, SAMPLING)
  engine._fns_by_features[features] = compiled
  assert engine.generate(PROMPT, SAMPLING).token_ids == expected


def test_one_request_at_a_time(engine):
  expected = engine.generate(PROMPT, SAMPLING).token_ids
  running = engine.stream(PROMPT, SAMPLING)
  next(running)
  with pytest.raises(SpecPilotError, match="one request at a time"):
    engine.generate(PROMPT, SAMPLING)
  with pytest.raises(SpecPilotError, match="one request at a time"):
    engine.score(PROMPT, expected, SAMPLING)
  running.close()
  assert engine.generate(PROMPT, SAMPLING).token_ids == expected


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"drafter": None, "system": SystemConfig(acceptance="rejection")},
      "acceptance=rejection needs a drafter",
    ),
    (
      {"drafter": None, "system": SystemConfig(num_drafts=2)},
      "num_drafts=2 needs a drafter",
    ),
    (
      {"system": SystemConfig(num_drafts=4)},
      "num_drafts=4 is more than the 3 that drafter prompt_lookup offers",
    ),
  ],
)
def test_options_that_cannot_act_are_refused(target, settings, message):
  with pytest.raises(SpecPilotError, match=message):
    fresh(target, **settings)


def test_sizes_must_be_whole(target):
  with pytest.raises(SpecPilotError, match="max_seq_len must be an integer"):
    Engine(target, max_seq_len=64.0)  # pyrefly: ignore
  with pytest.raises(SpecPilotError, match="prefill_chunk must be an integer"):
    Engine(target, prefill_chunk=8.5)  # pyrefly: ignore
  Engine(target, max_seq_len=2, prefill_chunk=10**12).warm_up()
