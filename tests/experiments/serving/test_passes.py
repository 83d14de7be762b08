"""The passes of a batch under a profiler, which this machine has not."""

from unittest import mock

import pytest

from experiments.cost_model import kernels, measure
from experiments.serving import job, passes
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import batching
from tests.decoding import test_kernels
from tests.decoding.kit import quick_compilation


@pytest.fixture
def traced(monkeypatch):
  """Every pass is a product of 2 us and a kernel that nobody knows."""
  calls = []

  def trace(run):
    run()
    calls.append(run)
    return [
      kernels.Kernel("gemm_1", "", "jit_step", 10_000 * i, 2_000 - 1_500 * odd)
      for i in range(1, 3)
      for odd in (0, 1)
    ]

  monkeypatch.setattr(measure, "trace", trace)
  return calls


def policy(system, slots=2, **kwargs):
  own = test_kernels.target(test_kernels.REFERENCE)
  model = test_kernels.DFlash(
    test_kernels.DRAFTER, test_kernels.jnp.float32, test_kernels.nnx.Rngs(1)
  )
  engine = batching.engine(
    system,
    own,
    test_kernels.DFlashDrafter(model, own),
    slots=slots,
    max_seq_len=66,
    prefill_chunk=16,
    **kwargs,
  )
  return batching.BatchPolicy(system, engine)


def test_all_shapes_are_profiled(traced, monkeypatch):
  system = SystemConfig(
    shared_budget="on", dynamic_draft="on", prompt_admission="on"
  )
  with quick_compilation():
    own = policy(system)
    few = mock.Mock(side_effect=lambda slots, rides=False: (4,))
    monkeypatch.setattr(own, "rows_of", few)
    sampling = SamplingParams(max_tokens=8)
    prompt = [i % test_kernels.CONFIG.vocab_size for i in range(24)]
    found = passes.profile(own, prompt, sampling)
  engine = own.engine
  kinds = {
    kind: [o for o in found if o["kind"] == kind]
    for kind in ("step", "ridden", "prefill")
  }
  assert [o["rows"] for o in kinds["step"]] == list(own.rows_of(2, False))
  assert [o["rows"] for o in kinds["ridden"]] == list(own.rows_of(2, True))
  assert [o["rows"] for o in kinds["prefill"]] == list(engine.prefill_sizes)
  assert len(traced) == len(found) == sum(map(len, kinds.values()))
  assert [o["tokens"] for o in kinds["prefill"]] == list(engine.prefill_sizes)
  assert {o["tokens"] for o in kinds["ridden"]} == {engine.rider_chunk}
  for one in found:
    assert one["classes_us"][kernels.TARGET_GEMM] == pytest.approx(
      one["step_us"]
    )
    assert one["kernels"] * passes.STEPS == pytest.approx(4)
  assert len(engine.free_slots) == engine.slots


def test_stock_with_passes_of_few_rows(traced, slots=3):
  """Without an allocation the nodes must fit the rows; slots are not a power
  of two, and passes are over all of them."""
  with quick_compilation():
    own = policy(SystemConfig(), slots)
    sampling = SamplingParams(max_tokens=4)
    found = passes.profile(own, [1, 2, 3], sampling)
  shapes = [(o["kind"], o["rows"]) for o in found]
  assert shapes == [
    *(("step", rows) for rows in own.rows_of(slots, False)),
    *(("prefill", size) for size in own.engine.prefill_sizes),
  ]
  assert len(traced) == len(found)
  assert len(passes.rows(found)[0]) == len(passes.HEADER)


def test_a_failed_profile_keeps_what_was_served(monkeypatch, capsys):
  fails = mock.Mock(side_effect=SpecPilotError("the profiler wrote 0 traces"))
  monkeypatch.setattr(passes, "profile", fails)
  told = mock.Mock()
  told.orders.return_value = [mock.Mock(prompt=[1])]
  assert job._profiled(told, "stock@c2", mock.Mock()) == []
  assert "stock@c2 were not profiled: the profiler" in capsys.readouterr().out
  assert told.folder.event.call_args.args == ("profile_failed",)
