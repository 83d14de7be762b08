"""The passes of a batch under a profiler, which this machine has not."""

import pytest

from experiments.cost_model import kernels, measure
from experiments.serving import passes
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.sampling import SamplingParams
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
      for i in range(passes.STEPS)
      for odd in (0, 1)
    ]

  monkeypatch.setattr(measure, "trace", trace)
  return calls


def policy(system, **kwargs):
  own = test_kernels.target(test_kernels.REFERENCE)
  model = test_kernels.DFlash(
    test_kernels.DRAFTER, test_kernels.jnp.float32, test_kernels.nnx.Rngs(1)
  )
  engine = batching.engine(
    system,
    own,
    test_kernels.DFlashDrafter(model, own),
    slots=2,
    slot_buckets=(2,),
    max_seq_len=64,
    prefill_chunk=16,
    **kwargs,
  )
  return batching.BatchPolicy(system, engine)


def test_all_shapes_are_profiled(traced):
  system = SystemConfig(
    shared_budget="on", dynamic_draft="on", prompt_admission="on"
  )
  with quick_compilation():
    own = policy(system)
    sampling = SamplingParams(max_tokens=8)
    own.warm_up([sampling])
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
  for one in found:
    assert one["classes_us"][kernels.TARGET_GEMM] == pytest.approx(
      one["step_us"]
    )
    assert one["kernels"] == 2
  assert len(engine.free_slots) == engine.slots
  assert len(passes.rows(found)[0]) == len(passes.HEADER)
