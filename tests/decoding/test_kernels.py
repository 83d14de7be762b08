"""Kernels in the engine: which run where, and that tokens stay the same."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from pallas_kernels import (
  add_norm,
  dispatch,
  gdn_commit,
  gdn_decode,
  gdn_prefill,
  gdn_verify,
  tree_attention,
  tree_growth,
  w12_matmul,
)
from pallas_kernels.dispatch import REFERENCE, Kernels
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import ATTENTION, MAX_NODES, SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.decoding import kit
from tests.pallas_kernels import lowering
from tests.zoo.test_training import drafter_config

# So few ids that a random drafter is right now and then.
CONFIG = kit.hybrid(vocab_size=5)
DRAFTER = drafter_config(CONFIG)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
GDN_LAYERS, ATTENTION_LAYERS = 2, 1
FUNCTIONS = {
  "gdn_decode": (gdn_decode, "_decode_kernel"),
  "gdn_prefill": (gdn_prefill, "_prefill_kernel"),
  "gdn_verify": (gdn_verify, "_verify_kernel"),
  "gdn_commit": (gdn_commit, "_commit_kernel"),
  "tree_attention": (tree_attention, "_tree_attention_kernel"),  # of runs too
  "add_norm": (add_norm, "_add_norm_kernel"),
  "w12_matmul": (w12_matmul, "_matmul_kernel"),
  "tree_growth": (tree_growth, "_grow_kernel"),
}


def target(kernels: Kernels) -> target_lib.Target:
  """The same weights with a choice of kernels; nothing is copied."""
  built = kit.build(CONFIG, "float32")
  return target_lib.assemble(
    CONFIG, target_lib.parameters(built), jnp.float32, kernels
  )


def engine(
  kernels: Kernels, *, stock: bool, system: SystemConfig | None = None
) -> Engine:
  own = target(kernels)
  drafter = None
  if stock:
    model = DFlash(DRAFTER, jnp.float32, nnx.Rngs(1))
    drafter = DFlashDrafter(model, own)
  return Engine(
    own, drafter=drafter, system=system, max_seq_len=128, prefill_chunk=8
  )


@functools.cache
def decoded(kernels: Kernels, stock: bool):
  """Per prompt, the tokens that each step emitted."""
  running = engine(kernels, stock=stock)
  return [
    [result.tokens for _, result in running.steps(prompt, GREEDY)]
    for prompt in kit.prompts(4, CONFIG.vocab_size)
  ]


@contextlib.contextmanager
def counted():
  """How often each kernel is put into an executable."""
  with contextlib.ExitStack() as stack:
    yield {
      name: stack.enter_context(
        mock.patch.object(module, function, wraps=getattr(module, function))
      )
      for name, (module, function) in FUNCTIONS.items()
    }


class EngineTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.parameters(False, True)
  def test_same_greedy_tokens(self, stock):
    """With the drafter's blocks: every step emits as many."""
    expected = decoded(REFERENCE, stock)
    self.assertEqual(decoded(Kernels.all("interpret"), stock), expected)
    if stock:
      lengths = {len(step) for steps in expected for step in steps[:-1]}
      self.assertGreater(len(lengths), 1)

  def test_paths_one_by_one(self):
    chosen = Kernels(gdn_verify="per_path")
    self.assertEqual(decoded(chosen, True), decoded(REFERENCE, True))

  @parameterized.product(
    operation=(*Kernels.operations(), None), stock=(False, True)
  )
  def test_each_is_where_it_belongs(self, operation, stock):
    chosen = f"{operation}=interpret" if operation else "reference"
    running = engine(kernels_lib.parse(chosen), stock=stock)
    fns, carry = running._base, running.fresh_carry()
    with counted() as calls:
      jax.eval_shape(fns.step, running._params, carry, running.request(GREEDY))
      found = {name: call.call_count for name, call in calls.items()}
      # A run of prompt takes the references, but for its own kernels.
      tokens, count = jnp.zeros(8, jnp.int32), jnp.int32(8)
      jax.eval_shape(fns.prefill, running._params, carry, tokens, count)
      behind = {name: call.call_count for name, call in calls.items()}
      # Scores are the definition's.
      jax.eval_shape(
        fns.score, running._params, carry, running.request(GREEDY), tokens,
        tokens, count, jnp.float32(0),
      )  # fmt: skip
    expected = dict.fromkeys(FUNCTIONS, 0)
    if operation == "tree_attention":
      expected[operation] = ATTENTION_LAYERS + stock * DRAFTER.num_layers
    elif operation == "add_norm":
      expected[operation] = 2 * CONFIG.num_layers + 1
    elif operation in (
      ("gdn_verify", "gdn_commit") if stock else ("gdn_decode",)
    ):
      expected[operation] = GDN_LAYERS
    self.assertEqual(found, expected)
    if operation == "gdn_prefill":
      expected[operation] = GDN_LAYERS
    elif operation == "prompt_attention":
      expected["tree_attention"] = ATTENTION_LAYERS
    self.assertEqual(behind, expected)
    self.assertEqual({k: v.call_count for k, v in calls.items()}, expected)

  @parameterized.parameters(
    ("reference", "best_first"), ("interpret", "best_first"),
    ("interpret", "marginal"),
  )  # fmt: skip
  def test_trees(self, implementation, tree):
    running = engine(
      Kernels(tree_growth=implementation),
      stock=True,
      system=SystemConfig(tree=tree, node_budget=16),
    )
    fns, carry = running._base, running.fresh_carry()
    with counted() as calls:
      jax.eval_shape(fns.step, running._params, carry, running.request(GREEDY))
    expected = dict.fromkeys(FUNCTIONS, 0)
    expected["tree_growth"] = int(implementation == "interpret")
    self.assertEqual({k: v.call_count for k, v in calls.items()}, expected)

  @parameterized.parameters(
    (dict(tree="best_first", node_budget=128), None),
    (dict(num_drafts=31), None),
    (
      dict(num_drafts=32),
      "gdn_verify takes paths of at most 32 nodes, a pass has one of 33;"
      " limit num_drafts or tree_depth",
    ),
  )
  def test_too_many_nodes(self, options, refused):
    own = target(Kernels(gdn_verify="interpret"))
    expectation = contextlib.nullcontext()
    if refused:
      expectation = pytest.raises(SpecPilotError, match=refused)
    slots = options.get("num_drafts", 9)
    with expectation:
      Engine(
        own,
        drafter=PromptLookup(slots),
        system=SystemConfig(**options),
        max_seq_len=128,
      )

  def test_more_rows_than_the_kernel_of_packed_weights_takes(self):
    chosen = Kernels(w12_matmul="interpret")
    kernels_lib.check_passes(chosen, 64, 128, "w12")
    kernels_lib.check_passes(chosen, 96, 128, "bf16")
    with pytest.raises(SpecPilotError, match="at most 64 rows, .* 96 nodes"):
      kernels_lib.check_passes(chosen, 96, 128, "w12")
    kernels_lib.check_passes(chosen, 64, 128, "bf16", dtype="float32")
    with pytest.raises(SpecPilotError, match="takes bfloat16, not float32"):
      kernels_lib.check_passes(chosen, 64, 128, "w12", dtype="float32")

  def test_targets_without_recurrent_layers_have_no_such_limits(self):
    chosen = Kernels.all("interpret")
    kernels_lib.check_passes(chosen, 64, 64, "bf16", path=64, recurrent=False)
    config = dataclasses.replace(CONFIG, layer_types=(ATTENTION,))
    assert kernels_lib.longest_path(chosen, config) == MAX_NODES
    assert kernels_lib.longest_path(Kernels(), CONFIG) == MAX_NODES
    longest = kernels_lib.longest_path(chosen, CONFIG)
    assert longest == kernels_lib.GDN_PATH

  def test_fewer_nodes_where_shared_memory_is_small(self):
    chosen = Kernels(gdn_verify="triton")
    for gpu in lowering.GPUS:
      with lowering.on(gpu):
        kernels_lib.check_passes(chosen, 64, 64, "bf16")
        refusal = contextlib.nullcontext()
        if "RTX" in gpu:
          refusal = pytest.raises(SpecPilotError, match="64 nodes.* has 128")
        with refusal:
          kernels_lib.check_passes(chosen, 128, 64, "bf16")
    with mock.patch.object(dispatch, "shared_memory", return_value=80 << 10):
      kernels_lib.check_passes(chosen, 48, 64, "bf16")
      with pytest.raises(SpecPilotError, match="at most 48 nodes.* has 49"):
        kernels_lib.check_passes(chosen, 49, 64, "bf16")

  def test_paths_one_by_one_take_any_number_of_nodes_and_any_dtype(self):
    chosen = kernels_lib.parse("gdn_verify=per_path")
    kernels_lib.check_passes(chosen, 128, 64, "bf16", path=128)
    kernels_lib.check(chosen, CONFIG, "float64")

  def test_a_wrong_kernel_for_prompts_is_seen_by_scores(self):
    """They read the prompt by definition too."""

    def wrong(mixed, *rest):
      state = rest[3]
      heads, _, value = state.shape
      return jnp.zeros((len(mixed), heads, value)), 0 * state

    prompt, output = kit.prompts(1, CONFIG.vocab_size)[0] * 4, [1, 0, 2, 1]
    expected = engine(REFERENCE, stock=False).score(prompt, output)
    with mock.patch.object(gdn_prefill, "_prefill_kernel", wrong):
      running = engine(Kernels(gdn_prefill="interpret"), stock=False)
      scored = running.score(prompt, output)
      decoded = running.generate(prompt, GREEDY).token_ids
    self.assertEqual(scored.gaps.tolist(), expected.gaps.tolist())
    own = engine(REFERENCE, stock=False).generate(prompt, GREEDY).token_ids
    self.assertNotEqual(decoded, own)

  def test_scores_are_the_references(self):
    for chosen in ("gdn_decode", "gdn_prefill", "add_norm"):
      own = target(kernels_lib.parse(f"{chosen}=interpret"))
      with pytest.raises(
        SpecPilotError, match="prefill_chunk must be at least"
      ):
        Engine(own, max_seq_len=128, prefill_chunk=1)
    Engine(target(REFERENCE), max_seq_len=128, prefill_chunk=1)


class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("reference", REFERENCE),
    ("triton", Kernels.all("triton")),
    ("gdn_decode=triton", Kernels(gdn_decode="triton")),
    ("gdn_verify=per_path", Kernels(gdn_verify="per_path")),
    (
      "gdn_decode=triton, tree_attention=interpret",
      Kernels(gdn_decode="triton", tree_attention="interpret"),
    ),
    (
      "triton, w12_matmul=mosaic",
      dataclasses.replace(Kernels.all("triton"), w12_matmul="mosaic"),
    ),
    ("tree_attention=mosaic", Kernels(tree_attention="mosaic")),
    ("fp8_matmul=mosaic", Kernels(fp8_matmul="mosaic")),
  )
  def test_parse(self, text, expected):
    self.assertEqual(kernels_lib.parse(text), expected)

  @parameterized.parameters(
    ("", "kernels must be reference, triton or interpret, got ''"),
    ("cuda", "got 'cuda'"),
    ("gdn=triton", "unknown operation 'gdn'; operations: gdn_decode"),
    ("gdn_decode=", "kernels: gdn_decode must be reference"),
    ("per_path", "kernels must be reference, triton or interpret"),
    ("gdn_commit=per_path", "kernels: gdn_commit must be reference"),
    ("gdn_verify=x", "triton, interpret or per_path, got 'x'"),
    ("gdn_decode=triton,gdn_decode=triton", "gdn_decode is given twice"),
    ("gdn_decode=triton,triton", "unknown operation 'triton'"),
  )
  def test_bad_text(self, text, message):
    with self.assertRaisesRegex(SpecPilotError, message):
      kernels_lib.parse(text)

  def test_heads_that_the_hopper_kernel_does_not_take(self):
    kernels = Kernels(tree_attention="mosaic")
    kernels_lib.check_drafter(kernels, "a drafter", 128)
    with self.assertRaisesRegex(
      SpecPilotError, "has head_dim 32, mosaic takes"
    ):
      kernels_lib.check_drafter(kernels, "a drafter", 32)

  def test_mosaic_needs_a_hopper_gpu(self):
    gpu = mock.patch.object(jax, "default_backend", return_value="gpu")
    for name in ("fp8_matmul", "w12_matmul"):
      kernels = kernels_lib.parse(f"{name}=mosaic")
      with (
        gpu,
        self.assertRaisesRegex(
          SpecPilotError, f"kernel {name}: mosaic needs a Hopper GPU.*triton"
        ),
      ):
        kernels_lib.check(kernels, CONFIG, "bfloat16")

  def test_triton_needs_a_gpu(self):
    for name in Kernels.operations():
      with self.assertRaisesRegex(
        SpecPilotError, f"kernel {name}: triton needs an NVIDIA GPU.*cpu"
      ):
        target(kernels_lib.parse(f"{name}=triton"))

  def test_what_no_kernel_takes(self):
    params = target_lib.random_params(CONFIG, 0)
    with self.assertRaisesRegex(SpecPilotError, "not float16"):
      kernels_lib.check(Kernels.all("interpret"), CONFIG, "float16")
    odd = kit.hybrid(head_dim=12)
    with self.assertRaisesRegex(SpecPilotError, "head_dim 12, expected a pow"):
      target_lib.build(
        odd, params, "float32", Kernels(tree_attention="interpret")
      )
    odd = kit.hybrid(gdn_value_head_dim=12)
    with self.assertRaisesRegex(SpecPilotError, "gdn_value_head_dim 12"):
      target_lib.build(odd, params, "float32", Kernels(gdn_decode="interpret"))

  def test_a_drafter_whose_heads_no_kernel_takes(self):
    odd = dataclasses.replace(DRAFTER, head_dim=12)
    model = DFlash(odd, jnp.float32, nnx.Rngs(1))
    DFlashDrafter(model, target(Kernels(add_norm="interpret")))
    with self.assertRaisesRegex(
      SpecPilotError, f"{odd.name} has head_dim 12, expected a power of two"
    ):
      DFlashDrafter(model, target(Kernels(tree_attention="interpret")))


if __name__ == "__main__":
  absltest.main()
