"""What the clock of a timed request holds."""

from unittest import mock

import jax

from experiments import timed
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from tests.decoding import kit


def test_the_device_is_idle_between_requests():
  """The host ends a request a step before the device does."""
  with kit.quick_compilation():
    engine = Engine(
      kit.build(kit.hybrid(), "float32"), max_seq_len=64, host_lag=1
    )
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    ready = jax.block_until_ready
    with mock.patch.object(jax, "block_until_ready", side_effect=ready) as wait:
      output, _ = timed._decode(engine, [1, 2, 3], sampling)
  assert len(output.token_ids) == 2
  waited = {
    id(x) for call in wait.mock_calls for x in jax.tree.leaves(call.args)
  }
  # What the step behind the request's last one leaves.
  left = {id(x) for x in jax.tree.leaves(engine._carry)}
  assert left and left <= waited
