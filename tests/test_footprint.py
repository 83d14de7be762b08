"""Counted bytes are those of the arrays that an engine holds."""

import dataclasses
import os
from unittest import mock

import jax
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax import configs, footprint, loading
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.models.drafters import config as drafter_configs
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.decoding import kit
from tests.zoo.test_training import drafter_config


def held(tree) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class FootprintTest(parameterized.TestCase):
  @parameterized.parameters(
    ("float32", True, 64), ("bfloat16", True, 4), ("float32", False, 512)
  )
  def test_an_engine(self, dtype, drafts, chunk):
    config = kit.hybrid(tie_embeddings=chunk == 4)
    small = drafter_config(config)
    target = kit.build(config, dtype)
    drafter = None
    if drafts:
      drafter = DFlashDrafter(DFlash(small, dtype, nnx.Rngs(0)), target)
    engine = Engine(
      target, drafter=drafter, max_seq_len=96, prefill_chunk=chunk
    )
    counted = footprint.footprint(
      config,
      small if drafts else None,
      dtype=dtype,
      max_seq_len=96,
      prefill_chunk=chunk,
    )
    self.assertEqual(counted.target_bytes, held(nnx.split(target)[1]))
    carry = engine.fresh_carry()
    length = carry.target.length.nbytes
    self.assertEqual(
      counted.kv_cache_bytes + counted.recurrent_bytes,
      held(carry.target) - length,
    )
    attention = [
      held(layer)
      for layer, kind in zip(
        carry.target.layers, config.layer_types, strict=True
      )
      if kind == configs.ATTENTION
    ]
    self.assertEqual(counted.kv_cache_bytes, sum(attention))
    self.assertEqual(counted.drafter_cache_bytes, held(carry.drafter))
    own = held(drafter.params[0]) if drafter else 0
    self.assertEqual(counted.drafter_bytes, own)
    self.assertEqual(counted.total_bytes, sum(dataclasses.astuple(counted)))

  def test_the_27b(self):
    """The counts of the published shapes (no array is made)."""
    config = configs.preset("Qwen3.8-27B")
    counted = footprint.footprint(
      config,
      drafter_configs.PRESETS["Qwen3.8-27B"],
      dtype="bfloat16",
      max_seq_len=4096,
    )
    # 26.896 G parameters; a_log and dt_bias are float32.
    self.assertAlmostEqual(counted.target_bytes / 2e9, 26.896, delta=0.001)
    self.assertEqual(counted.kv_cache_bytes, (4096 + 64) * 64 * 1024)
    conv = 48 * 10240 * 3 * 2
    self.assertEqual(counted.recurrent_bytes, 144 * 2**20 + conv)
    self.assertEqual(
      counted.drafter_cache_bytes, (4096 + 64) * 5 * 2 * 8 * 128 * 2
    )
    attention = 5120 * 4096 * 2 + 2 * 5120 * 1024 + 2 * 128
    layer = attention + 3 * 5120 * 17408 + 2 * 5120
    self.assertEqual(
      counted.drafter_bytes, 2 * (5 * layer + 5 * 5120**2 + 2 * 5120)
    )

  @parameterized.parameters(
    ({}, "0.9"),
    ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, "0.4"),
    # XLA refuses both names at once.
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, None),
  )
  def test_share_of_the_device(self, given, expected):
    with mock.patch.dict(os.environ):
      for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        os.environ.pop(name, None)
      os.environ.update(given)
      loading.prepare_jax("float32")
      self.assertEqual(os.environ.get("XLA_CLIENT_MEM_FRACTION"), expected)


if __name__ == "__main__":
  absltest.main()
