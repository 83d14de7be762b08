"""Kernels under a batch: the same results, and one launch for all requests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx

from pallas_kernels import (
  gdn_commit,
  gdn_decode,
  gdn_verify,
  tree_attention,
  w12_array,
)
from pallas_kernels.dispatch import REFERENCE, Kernels
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.checkpoints import w12
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding import policy as policy_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.engine import (
  BatchEngine,
  StepLimits,
  rider_of,
)
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import batching
from specpilot_jax.models import layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.checkpoints import w12_matrices
from tests.decoding import kit, test_kernels
from tests.pallas_kernels import lowering

CONFIG = test_kernels.CONFIG
GREEDY = dataclasses.replace(test_kernels.GREEDY, max_tokens=10)


def engine(kernels: Kernels, slots: int) -> BatchEngine:
  own = test_kernels.target(kernels)
  model = DFlash(test_kernels.DRAFTER, jnp.float32, nnx.Rngs(1))
  return BatchEngine(
    own,
    drafter=DFlashDrafter(model, own),
    slots=slots,
    slot_buckets=(slots,),
    max_seq_len=64,
    prefill_chunk=8,
  )


def _verify(draw):
  heads, key_heads, k, v, n = 4, 2, 16, 16, 5
  width = 2 * key_heads * k + heads * v
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (2, n, n))
  shapes = draw(2, n, width), draw(2, n, 2 * heads), draw(2, heads, k, v), mask
  a_log, bias = draw(heads), draw(heads)
  return lambda mixed, projected, state, mask: gdn_verify.verify(
    mixed, projected, a_log, bias, state, mask,
    key_heads=key_heads, implementation="interpret",
  ), shapes  # fmt: skip


def _commit(draw):
  heads, key_heads, k, v, n = 4, 2, 16, 16, 5
  path = jnp.asarray([[0, 1, 3], [0, 2, 4]])
  shapes = (
    draw(2, heads, k, v), draw(2, n, key_heads, k), draw(2, n, heads, v),
    -jnp.abs(draw(2, n, heads)), path, jnp.asarray([2, 0]),
  )  # fmt: skip
  return functools.partial(
    gdn_commit.commit, implementation="interpret"
  ), shapes


def _decode(draw):
  heads, key_heads, k, v = 4, 2, 16, 16
  width = 2 * key_heads * k + heads * v
  weight, a_log, bias = draw(width, 4), draw(heads), draw(heads)
  shapes = (
    draw(2, width + heads * v + 2 * heads), draw(2, 3, width),
    draw(2, heads, k, v), jnp.asarray([True, False]),
  )  # fmt: skip
  return lambda projected, conv, state, live: gdn_decode.decode(
    projected, conv, weight, a_log, bias, state, live,
    key_heads=key_heads, implementation="interpret",
  ), shapes  # fmt: skip


def _attention(draw):
  heads, kv_heads, dim, n, rows = 4, 2, 16, 5, 40
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (2, n, n))
  shapes = (
    draw(2, n, heads, dim), *(draw(2, n, kv_heads, dim) for _ in range(2)),
    *(draw(2, kv_heads, rows, dim) for _ in range(2)),
    jnp.asarray([33, 7]), mask,
  )  # fmt: skip
  return functools.partial(
    tree_attention.tree_attention, scale=0.25, implementation="interpret"
  ), shapes


MAPPED = {
  "gdn_verify": _verify,
  "gdn_commit": _commit,
  "gdn_decode": _decode,
  "tree_attention": _attention,
}
"""Kernels of one request, that a batch maps: a function and its inputs."""


class Offering:
  """A drafter of the right shapes."""

  name, variable_length, taps, vocab_size = "offering", False, (), None
  num_slots, params = 15, ()

  def init_context(self, capacity):
    return jnp.zeros((capacity,), jnp.int32)

  def extend(self, params, context, tokens, taps, start, count):
    return jax.lax.dynamic_update_slice(context, tokens, (start,))

  def draft(self, params, context, anchor, position):
    return Lattice(context[:15, None], jnp.zeros((15, 1)), jnp.int32(15))


def lowered(gpu: str, slots: int | None) -> str:
  """A step with the family's head sizes; of one request without `slots`."""
  config = kit.hybrid(
    head_dim=256,
    rotary_dim=64,
    gdn_key_head_dim=128,
    gdn_value_head_dim=128,
    hidden_size=256,
  )
  kernels = Kernels.all("triton")
  model = nnx.eval_shape(
    lambda: target_lib.Target(config, jnp.bfloat16, nnx.Rngs(0), kernels)
  )
  graphdef, params = nnx.split(model)
  drafter: Any = Offering()
  fns = step_lib.StepFns(
    config=config,
    graphdef=graphdef,
    drafter=drafter,
    policy=policy_lib.Policy.of(SystemConfig(), drafter),
    kernels=kernels,
    acceptance="match",
    features=Features(greedy=True, filters=False, penalties=False),
  )

  def slot():
    carry = step_lib.Carry(
      target=state_lib.init_state(config, 96, jnp.bfloat16),
      drafter=drafter.init_context(96),
      anchor=jnp.zeros((), jnp.int32),
      remaining=jnp.zeros((), jnp.int32),
      history=None,
      done=jnp.zeros((), bool),
    )
    request = step_lib.Request(
      sampling=batch_step.sampling_lib.Sampling.of(
        SamplingParams(), jnp.float32
      ),
      stop_ids=jnp.zeros((16,), jnp.int32),
      limits=fns.policy.limits(),
    )
    return batch_step.Slots(carry, request, jnp.zeros((), bool))

  one = jax.eval_shape(slot)
  if slots is None:
    return lowering.lower(
      lambda p, c, r: fns.step((p, ()), c, r),
      gpu,
      params,
      one.carry,
      one.request,
    )
  many = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((slots, *x.shape), x.dtype), one
  )
  batch = batch_step.BatchFns(fns)
  return lowering.lower(
    lambda p, s, listed, limits: batch.step(
      (p, ()), s, None, listed, limits, (), None, rows=40
    ),
    gpu,
    params,
    many,
    jax.ShapeDtypeStruct((slots,), bool),
    many.request.limits,
  )


class MappedKernelsTest(parameterized.TestCase):
  @parameterized.parameters(*MAPPED)
  def test_mapped_kernel(self, name):
    """Interpreted over a batch: what it gives for each alone.

    To the last bit, so compiled with all optimisations: without them XLA may
    round the two of them differently.
    """
    rng = np.random.default_rng(1)

    def draw(*shape):
      return jnp.asarray(rng.normal(size=shape), jnp.float32)

    function, shapes = MAPPED[name](draw)
    mapped = jax.jit(jax.vmap(function))(*shapes)
    for i in range(2):
      alone = jax.jit(function)(*(x[i] for x in shapes))
      for got, expected in zip(
        jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True
      ):
        np.testing.assert_array_equal(got[i], expected)


class BatchKernelsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def test_float32(self):
    """A learned drafter: what the single engine emits, step by step."""
    prompts = kit.prompts(4, CONFIG.vocab_size)
    one = test_kernels.engine(REFERENCE, stock=True)
    batch = engine(REFERENCE, 2).generate(prompts, GREEDY)
    accepted = 0
    for prompt, got in zip(prompts, batch, strict=True):
      own = one.generate(prompt, GREEDY)
      if got.token_ids != own.token_ids:
        # Sums of other orders may decide between near equals, and only there.
        self.assertLess(one.score(prompt, got.token_ids).gaps.max(), 1e-4)
        continue
      self.assertEqual(
        got.metrics.accepted_per_step, own.metrics.accepted_per_step
      )
      accepted += sum(own.metrics.accepted_per_step)
    self.assertGreater(accepted, 0)

  def test_one_launch_for_all(self):
    """As many launches as for one request, and no loop around any."""
    gpu = "NVIDIA H200"
    name = "__gpu$xla.gpu.triton"
    alone, all_of_them = lowered(gpu, None), lowered(gpu, 4)
    self.assertGreater(alone.count(name), 4)
    self.assertEqual(all_of_them.count(name), alone.count(name))
    self.assertEqual(
      all_of_them.count("stablehlo.while"), alone.count("stablehlo.while")
    )

  def test_a_riding_prompt_copies_no_slots(self):
    """Memory of a step: keys, values and states are updated where they lie."""
    system = SystemConfig(prompt_admission="on", shared_budget="on")
    own = test_kernels.target(REFERENCE)
    model = DFlash(test_kernels.DRAFTER, jnp.float32, nnx.Rngs(1))
    running = batching.engine(
      system,
      own,
      DFlashDrafter(model, own),
      slots=4,
      slot_buckets=(4,),
      max_seq_len=480,
      prefill_chunk=16,
    )
    index = np.arange(4, dtype=np.int32)
    rider = rider_of(3, np.zeros(16, np.int32), 4)
    scratch = []
    for riding in (None, rider):
      lowered = running.lowered(
        Features.of(GREEDY), index, index < 3, StepLimits(rows=8), riding
      )
      used = lowered.compile().memory_analysis()
      assert used is not None
      scratch.append(used.temp_size_in_bytes)
    carry = running._slots.carry
    held = sum(x.nbytes for x in jax.tree.leaves((carry.target, carry.drafter)))
    self.assertLess(scratch[1] - scratch[0], 0.8 * held)

  def test_w12_reads_a_weight_once(self):
    """Rows of a batch are rows of one product."""
    rng = np.random.default_rng(0)
    weight = w12_array.tile(w12.encode(w12_matrices.gaussian(64, 128)))
    x = jnp.asarray(rng.normal(size=(3, 4, 128)), jnp.bfloat16)

    def product(rows):
      return layers.matmul(rows, weight, w12="interpret")

    mapped = jax.vmap(product)
    jaxpr = str(jax.make_jaxpr(mapped)(x))
    alone = str(jax.make_jaxpr(product)(x.reshape(12, 128)))
    self.assertEqual(jaxpr.count("pallas_call"), alone.count("pallas_call"))
    np.testing.assert_array_equal(
      mapped(x).reshape(12, -1), product(x.reshape(12, 128))
    )
    # More rows than the kernel takes: read again, up to a point.
    for size, kernels in ((20, 2), (60, 0)):
      shape = jax.ShapeDtypeStruct((size, 4, 128), jnp.bfloat16)
      jaxpr = str(jax.make_jaxpr(mapped)(shape))
      self.assertEqual(jaxpr.count("name=_sums"), kernels)

  def test_rows_that_no_kernel_takes(self):
    with self.assertRaisesRegex(SpecPilotError, "at most 64 rows, a pass over"):
      kernels_lib.check_rows(Kernels(w12_matmul="interpret"), 65, "w12")
    kernels_lib.check_rows(Kernels(w12_matmul="interpret"), 64, "w12")
    kernels_lib.check_rows(Kernels(w12_matmul="interpret"), 65, "bf16")
