"""The examples in docstrings run, and give what they say."""

import doctest

import pytest

from experiments.cost_model import two_level
from specpilot_jax import configs, loading
from specpilot_jax.checkpoints import w12
from specpilot_jax.decoding import engine, sampling
from specpilot_jax.mechanisms import registry
from tests.decoding import kit


@pytest.mark.parametrize(
  "module",
  (configs, engine, loading, registry, sampling, two_level, w12),
  ids=lambda m: m.__name__,
)
def test_examples(module):
  with kit.quick_compilation():
    done = doctest.testmod(module)
  assert done.attempted and not done.failed
