"""What the clock of a timed request holds."""

import threading
from typing import Any
from unittest import mock

import jax

from experiments import timed
from specpilot_jax import compilation
from specpilot_jax.configs import SystemConfig
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


class Compiling:
  """An engine with one executable of its own."""

  def __init__(self):
    self.step = jax.jit(lambda x: x + 1)

  def warm_up(self, sampling=None) -> None:
    self.step(1.0)

  def generate(self, prompt, sampling):
    self.step(1.0)

  def wait(self):
    pass


def test_the_first_of_each_form_is_compiled_alone():
  """Those behind it side by side."""
  met, done = threading.Barrier(2, timeout=60), []

  class Waiting(Compiling):
    """Compiles once another one does so too."""

    def warm_up(self, sampling=None) -> None:
      met.wait()
      super().warm_up(sampling)
      done.append(None)

  class Timing(Compiling):
    """Times its steps, when nobody compiles."""

    def warm_up(self, sampling=None) -> None:
      assert met.n_waiting == 0 and len(done) == 2
      super().warm_up(sampling)

  settings = mock.Mock(sampling=SamplingParams(max_tokens=2), num_warmups=1)
  folder = mock.Mock()
  kinds = {
    "ar": Compiling, "stock": Compiling, "one": Waiting, "auto": Timing,
    "packed": Compiling, "two": Waiting,
  }  # fmt: skip
  settings.system = lambda name: SystemConfig(
    weights="w12" if name == "packed" else "bf16",
    verification="auto" if name == "auto" else "one_level",
  )
  engines: dict[str, Any] = {n: kind() for n, kind in kinds.items()}
  prompt: Any = mock.Mock(token_ids=[1, 2, 3])
  with mock.patch.object(compilation, "workers", lambda: 2):
    told = timed.warm_up(settings, engines, [prompt], folder)
  before = compilation.num_compilations()
  for engine in engines.values():
    engine.generate([1, 2, 3], settings.sampling)
  assert list(told) == list(kinds)
  assert all(each["executables"] > 0 for each in told.values())
  assert compilation.num_compilations() == before
  assert folder.event.call_count == 6
