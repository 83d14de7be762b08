"""Widening keeps the function, and each of its rules is needed for that."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax.checkpoints import widen, widen_drafter
from specpilot_jax.configs import ATTENTION, GDN
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from tests.decoding import kit
from tests.notes import FULL
from tests.zoo.test_training import drafter_config

SMALL = kit.hybrid()
DRAFTER = drafter_config(SMALL, sliding_window=9)
TOLERANCE = 1e-9
"""Float64: extra layers add 2^-40 of the residual stream, and sums of copies
are formed in another order."""
TOKENS = np.arange(24, dtype=np.int32) * 7 % SMALL.vocab_size


def wide_pair(r: int, small=SMALL, drafter=DRAFTER, **overrides):
  """Shapes with every width `r` times, and extra layers of both types."""
  config = dataclasses.replace(
    small,
    name=f"wide-{r}",
    vocab_size=small.vocab_size + 19,
    tokenizer_size=None,
    tie_embeddings=False,
    hidden_size=small.hidden_size * r,
    intermediate_size=small.intermediate_size * r,
    layer_types=(GDN, GDN, ATTENTION, ATTENTION, GDN, GDN, ATTENTION),
    num_heads=small.num_heads * r,
    num_kv_heads=small.num_kv_heads * r,
    gdn_num_key_heads=small.gdn_num_key_heads * r,
    gdn_num_value_heads=small.gdn_num_value_heads * r,
  )
  config = dataclasses.replace(config, **overrides)
  return config, wide_drafter(r, config, drafter)


def wide_drafter(r: int, config, drafter):
  """The same of a drafter alone; ranks grow less."""
  rank = {
    name: getattr(drafter, name) * 2
    for name in ("selector_rank", "markov_rank")
    if hasattr(drafter, name)
  }
  return dataclasses.replace(
    drafter,
    **rank,
    name=f"wide-{drafter.kind}-{r}",
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=drafter.intermediate_size * r,
    num_layers=drafter.num_layers + 1,
    num_heads=drafter.num_heads * r,
    num_kv_heads=drafter.num_kv_heads * r,
    target_layers=(1, 5),
    num_target_layers=config.num_layers,
    mask_token_id=config.vocab_size - 1,
    sliding_window=None,
  )


@functools.cache
def small_params(small=SMALL):
  return target_lib.random_params(small, 3, kit.SCALE)


def small_drafter(dtype=jnp.float64, config=DRAFTER) -> DFlash:
  """Random weights of a size at which every part of it matters."""
  model = learned.module(config, dtype, nnx.Rngs(1))
  arrays = assembly.parameters(model)
  rng = np.random.default_rng(5)
  for name, array in arrays.items():
    drawn = rng.normal(0, array.shape[-1] ** -0.5, array.shape)
    drawn = drawn if array.ndim == 2 else 1 + 0.2 * drawn
    arrays[name] = jnp.asarray(drawn, dtype)
  return assembly.assemble(
    config.name, lambda: learned.module(config, dtype, nnx.Rngs(0)), arrays
  )


def widened(r=2, small=SMALL, wide=None, drafter=None, dtype="float64", seed=0):
  """The widened tiny pair."""
  made, made_drafter = wide_pair(r, small)
  wide, drafter = wide or made, drafter or made_drafter
  target = widen.widen_target(
    small,
    small_params(small),
    wide,
    seed,
    taps=widen_drafter.drafter_taps(DRAFTER, drafter),
    dtype=dtype,
  )
  model = widen_drafter.widen_drafter(
    small_drafter(jnp.dtype(dtype)), drafter, seed, dtype=dtype
  )
  return target, model


_RUNS = {}
"""Compiled by shapes: weights alone differ between most runs."""


def run(target, model):
  """Logits [T, V], taps [T, L, D] and the drafter's lattice."""
  target_def, target_state = nnx.split(target)
  drafter_def, drafter_state = nnx.split(model)

  def compute(target_state, drafter_state):
    target = nnx.merge(target_def, target_state)
    model = nnx.merge(drafter_def, drafter_state)
    drafter = learned.drafter(model, target, candidates=8)
    size = jnp.int32(TOKENS.size)
    nodes = state_lib.run_of(jnp.asarray(TOKENS), size, prefill=False)
    state = state_lib.init_state(target.config, 64, target.dtype)
    out = target(nodes, state, drafter.taps)
    context = drafter.extend(
      drafter.params,
      drafter.init_context(64),
      nodes.tokens,
      out.taps,
      jnp.int32(0),
      size,
    )
    lattice = drafter.draft(drafter.params, context, jnp.int32(5), size)
    return target.logits(out.hidden), out.taps, lattice

  key = (target.config, target.dtype, model.config)
  return _RUNS.setdefault(key, jax.jit(compute))(target_state, drafter_state)


def differences(small, wide) -> tuple[float, float]:
  """Largest differences of logits, and of the drafter's log-probabilities."""
  logits, _, lattice = run(*small)
  wide_logits, _, wide_lattice = run(*wide)
  known = wide_logits[:, : logits.shape[1]]
  # Scores by token, as two orders of equal ones are the same law.
  order, wide_order = (
    np.argsort(np.asarray(x.tokens), axis=1) for x in (lattice, wide_lattice)
  )
  scores, wide_scores = (
    np.take_along_axis(np.asarray(x.scores), o, axis=1)
    for x, o in ((lattice, order), (wide_lattice, wide_order))
  )
  tokens, wide_tokens = (
    np.take_along_axis(np.asarray(x.tokens), o, axis=1)
    for x, o in ((lattice, order), (wide_lattice, wide_order))
  )
  drafts = float(np.abs(scores - wide_scores).max())
  if not np.array_equal(tokens, wide_tokens):
    drafts = np.inf
  return float(np.abs(logits - known).max()), drafts


def small_pair(small=SMALL, dtype="float64"):
  return (
    target_lib.build(small, small_params(small), dtype),
    small_drafter(jnp.dtype(dtype)),
  )


class FunctionTest(kit.Float64TestCase):
  @parameterized.named_parameters(
    ("by_2", 2, {}),
    ("by_4", 4, {}),
    ("tied", 2, dict(tie_embeddings=True)),
    ("padded", 2, dict(tokenizer_size=58)),
    ("without_gates", 2, dict(attention_gate=False, qk_norm=False)),
  )
  def test_the_function_is_kept(self, r, overrides):
    small = dataclasses.replace(SMALL, **overrides)
    wide = widened(r, small)
    logits, taps, lattice = run(*small_pair(small))
    wide_logits, wide_taps, wide_lattice = run(*wide)
    valid = small.valid_vocab
    np.testing.assert_allclose(
      wide_logits[:, :valid], logits[:, :valid], atol=TOLERANCE, rtol=0
    )
    np.testing.assert_array_equal(wide_logits[:, valid:], -np.inf)
    np.testing.assert_allclose(
      wide_taps, np.tile(taps, r), atol=TOLERANCE, rtol=0
    )
    np.testing.assert_array_equal(wide_lattice.tokens, lattice.tokens)
    self.assertLess(int(wide_lattice.tokens.max()), valid)
    np.testing.assert_allclose(
      wide_lattice.scores, lattice.scores, atol=TOLERANCE, rtol=0
    )
    # The model says something: its choices vary, and so do the drafts.
    self.assertGreater(len(np.unique(np.argmax(logits, axis=1))), 6)
    self.assertGreater(float(np.std(lattice.scores)), 0.01)

  def test_unequal_ratios(self):
    wide, drafter = wide_pair(
      2,
      num_heads=SMALL.num_heads,
      num_kv_heads=SMALL.num_kv_heads,
      gdn_num_key_heads=SMALL.gdn_num_key_heads * 4,
      gdn_num_value_heads=SMALL.gdn_num_value_heads * 4,
      intermediate_size=SMALL.intermediate_size * 8,
    )
    made = widened(wide=wide, drafter=drafter)
    self.assertLess(max(differences(small_pair(), made)), TOLERANCE)

  def test_decoding(self):
    temperatures = (0.0, 1.0) if FULL else (0.0,)
    outputs = []
    for target, model in (small_pair(), widened(2)):
      engine = Engine(
        target,
        drafter=DFlashDrafter(model, target),
        max_seq_len=128,
        prefill_chunk=16,
      )
      requests = [
        (
          prompt,
          SamplingParams(max_tokens=32, ignore_eos=True, temperature=t),
        )
        for t in temperatures
        for prompt in kit.prompts(3, SMALL.vocab_size)
      ]
      outputs.append([engine.generate(*request) for request in requests])
    for small, wide in zip(*outputs, strict=True):
      self.assertEqual(small.token_ids, wide.token_ids)
      self.assertEqual(
        small.metrics.accepted_per_step, wide.metrics.accepted_per_step
      )

  def test_float32(self):
    pair = widened(2, dtype="float32")
    self.assertLess(max(differences(small_pair(dtype="float32"), pair)), 1e-3)


def whole(spread: widen.Spread) -> np.ndarray:
  """Rows of a fused tensor tiled as if it were one block."""
  return np.sort(np.unique(spread.rows))[
    np.arange(spread.rows.size) % np.unique(spread.rows).size
  ]


def interleaved(index: np.ndarray) -> np.ndarray:
  """Each copy beside its original instead of whole copies in turn."""
  size = np.unique(index).size
  return np.repeat(np.arange(size, dtype=np.int32), index.size // size)


def changed(table_name: str, parameter: str, change):
  """A table of `widen` whose entry for one parameter is changed."""
  module = widen if table_name == "target_layer" else widen_drafter
  original = getattr(module, table_name)

  def table(*args):
    entries = original(*args)
    if parameter in entries:
      entries[parameter] = change(entries[parameter])
    return entries

  return mock.patch.object(module, table_name, table)


def undivided(spread):
  return dataclasses.replace(spread, copies=1)


def rows_as_one_block(spread):
  return dataclasses.replace(spread, rows=whole(spread))


def rows_interleaved(spread):
  return dataclasses.replace(spread, rows=interleaved(spread.rows))


def columns_interleaved(spread):
  return dataclasses.replace(spread, columns=interleaved(spread.columns))


TARGET_BREAKS = (
  ("target_layer", "mixer.qkv.weight", undivided),
  ("target_layer", "mixer.o_proj.weight", undivided),
  ("target_layer", "mixer.in_proj.weight", undivided),
  ("target_layer", "mixer.out_proj.weight", undivided),
  ("target_layer", "mlp.gate_up.weight", undivided),
  ("target_layer", "mlp.down.weight", undivided),
  ("target_layer", "mixer.qkv.weight", rows_as_one_block),
  ("target_layer", "mixer.in_proj.weight", rows_as_one_block),
  ("target_layer", "mixer.conv_weight", rows_as_one_block),
  ("target_layer", "mlp.gate_up.weight", rows_as_one_block),
  ("target_layer", "mixer.qkv.weight", columns_interleaved),
  ("target_layer", "mixer.o_proj.weight", columns_interleaved),
  ("target_layer", "mixer.o_proj.weight", rows_interleaved),
  ("target_layer", "mixer.out_proj.weight", columns_interleaved),
  ("target_layer", "mixer.a_log", rows_interleaved),
  ("target_layer", "mixer.dt_bias", rows_interleaved),
  ("target_layer", "mlp.down.weight", columns_interleaved),
  ("target_layer", "input_norm.weight", rows_interleaved),
  ("target_layer", "post_norm.weight", rows_interleaved),
)
DRAFTER_BREAKS = (
  ("drafter_layer", "attention.q_proj.weight", columns_interleaved),
  ("drafter_layer", "attention.q_proj.weight", rows_interleaved),
  ("drafter_layer", "attention.kv_proj.weight", undivided),
  ("drafter_layer", "attention.kv_proj.weight", rows_as_one_block),
  ("drafter_layer", "attention.o_proj.weight", undivided),
  ("drafter_layer", "mlp.gate_up.weight", undivided),
  ("drafter_layer", "mlp.gate_up.weight", rows_as_one_block),
  ("drafter_layer", "mlp.down.weight", undivided),
  ("drafter_ends", "fc.weight", columns_interleaved),
  (
    "drafter_ends",
    "fc.weight",  # the taps tiled as a whole, not each by itself
    lambda s: dataclasses.replace(
      s, columns=np.arange(s.columns.size) % (s.columns.max() + 1)
    ),
  ),
  ("drafter_ends", "hidden_norm.weight", rows_interleaved),
  ("drafter_ends", "norm.weight", rows_interleaved),
)
SEEN = 1e-5
"""Far above the tolerance: what a broken rule changes at the least."""


class BrokenRulesTest(kit.Float64TestCase):
  """No rule can be broken without the comparison above seeing it."""

  @parameterized.parameters(*TARGET_BREAKS)
  def test_target(self, table, name, change):
    with changed(table, name, change):
      logits, drafts = differences(small_pair(), widened())
    self.assertGreater(logits, SEEN)
    self.assertGreater(drafts, SEEN)  # by its taps

  @parameterized.parameters(*DRAFTER_BREAKS)
  def test_drafter(self, table, name, change):
    with changed(table, name, change):
      logits, drafts = differences(small_pair(), widened())
    self.assertLess(logits, TOLERANCE)
    self.assertGreater(drafts, SEEN)

  def test_damping(self):
    with mock.patch.object(widen, "DAMPING", 1.0):
      logits, drafts = differences(small_pair(), widened())
    self.assertGreater(logits, SEEN)
    self.assertGreater(drafts, SEEN)

  @parameterized.parameters(((0, 5),), ((2, 5),), ((1, 3),), ((5, 1),))
  def test_a_tap_after_another_layer(self, taps):
    """The target was made for taps after layers 1 and 5."""
    target, model = widened()
    config = dataclasses.replace(model.config, target_layers=taps)
    moved = assembly.assemble(
      "moved",
      lambda: DFlash(config, jnp.float64, nnx.Rngs(0)),
      assembly.parameters(model),
    )
    drafts = differences(small_pair(), (target, moved))[1]
    # The small layers lie at 0, 2 and 4: a tap may move between them.
    if taps == (0, 5):
      self.assertLess(drafts, TOLERANCE)
    else:
      self.assertGreater(drafts, SEEN)


class WeightsTest(parameterized.TestCase):
  def test_bfloat16_copies_are_exact(self):
    params = {
      name: value.astype(ml_dtypes.bfloat16)
      for name, value in small_params().items()
    }
    wide, drafter = wide_pair(4)
    taps = widen_drafter.drafter_taps(DRAFTER, drafter)
    target = widen.widen_target(SMALL, params, wide, taps=taps)
    made = target_lib.parameters(target)
    ratios = widen.target_ratios(SMALL, wide)
    placed = widen.placement(SMALL.layer_types, wide.layer_types, taps)
    for i, kind in enumerate(SMALL.layer_types):
      for suffix, spread in widen.target_layer(SMALL, kind, ratios).items():
        small = np.asarray(params[f"layers.{i}.{suffix}"], np.float32)
        array = made[f"layers.{placed[i]}.{suffix}"]
        vector = suffix in ("mixer.a_log", "mixer.dt_bias")
        self.assertEqual(array.dtype, jnp.float32 if vector else jnp.bfloat16)
        expected = small[spread.rows]
        if spread.columns is not None:
          expected = expected[:, spread.columns] / spread.copies
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected)

  def test_every_parameter_is_spread(self):
    """The tables name all of a layer, with the shapes that it has."""
    wide, drafter = wide_pair(2)
    target, model = widened(2, dtype="float32")
    self.assertEqual(
      {n: a.shape for n, a in target_lib.parameters(target).items()},
      target_lib.parameter_shapes(wide),
    )
    self.assertEqual(
      model.config,
      dataclasses.replace(
        drafter, mask_token_id=DRAFTER.mask_token_id, sliding_window=9
      ),
    )

  def test_random_weights(self):
    first, second, other = (
      target_lib.parameters(widened(4, dtype="float32", seed=seed)[0])
      for seed in (0, 0, 1)
    )
    layer = "layers.3."  # an extra one: attention
    for name, array in first.items():
      np.testing.assert_array_equal(array, second[name])
      extra = name.startswith(layer) and array.ndim == 2
      if extra:
        self.assertGreater(float(jnp.abs(array - other[name]).max()), 0)
        values = np.asarray(array, np.float64).ravel()
        deviation = values.std()
        self.assertLess(abs(values.mean()), 5 * deviation / values.size**0.5)
        # Kurtosis 3, and neighbours that know nothing of each other.
        self.assertAlmostEqual(
          ((values / deviation) ** 4).mean(), 3.0, delta=0.25
        )
        for lag in (1, array.shape[1]):
          c = np.corrcoef(values[:-lag], values[lag:])[0, 1]
          self.assertLess(abs(c), 5 / values.size**0.5)
        small = np.asarray(small_params()[f"layers.1.{name[len(layer) :]}"])
        writes = name.endswith(("o_proj.weight", "down.weight"))
        expected = small.std() / 2 * (widen.DAMPING if writes else 1)
        self.assertAlmostEqual(deviation / expected, 1.0, delta=0.05)
    self.assertGreater(
      float(jnp.abs(first["embed.weight"][SMALL.vocab_size :]).min()), 0
    )


class PlacementTest(parameterized.TestCase):
  def test_the_27b(self):
    kinds = (GDN, GDN, GDN, ATTENTION)
    taps = tuple(zip((1, 2, 4, 5, 6), (5, 19, 33, 47, 61), strict=True))
    self.assertEqual(
      widen.placement(kinds * 2, kinds * 16, taps),
      (0, 1, 6, 23, 24, 34, 48, 63),
    )

  @parameterized.named_parameters(
    ("too_few_of_a_type", (GDN, GDN), (GDN, ATTENTION), (), "no gdn layer"),
    (
      "order",
      (ATTENTION, GDN),
      (GDN, ATTENTION),
      (),
      "no gdn layer after layer 1 of 2 is left for layer 1",
    ),
    ("tap_too_early", (GDN, GDN), (GDN,) * 4, ((1, 0),), "cannot see layer 1"),
    ("tap_too_late", (GDN, GDN), (GDN,) * 4, ((0, 3),), "is left for layer 1"),
  )
  def test_refusals(self, small, wide, taps, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern):
      widen.placement(small, wide, taps)


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("ratio_3", dict(hidden_size=96), "hidden_size 32 to 96 is not a power"),
    ("narrower", dict(hidden_size=16), "hidden_size 32 to 16 is not a power"),
    ("units", dict(intermediate_size=100), "intermediate_size 48 to 100"),
    ("heads", dict(num_heads=12, num_kv_heads=6), "num_kv_heads 2 to 6"),
    ("groups", dict(num_heads=16), "num_heads to num_kv_heads is 2:1 in one"),
    (
      "gdn_groups",
      dict(gdn_num_value_heads=16),
      "gdn_num_value_heads to gdn_num_key_heads is 2:1 in one and 4:1",
    ),
    (
      "gdn_heads",
      dict(gdn_num_key_heads=6, gdn_num_value_heads=12),
      "gdn_num_key_heads 2 to 6",
    ),
    ("tied", dict(tie_embeddings=True), "ties its embeddings"),
    ("vocabulary", dict(vocab_size=60), "vocabulary of 60 is smaller than 61"),
    ("head_dim", dict(head_dim=16), "head_dim is 8 in one and 16"),
    ("theta", dict(rope_theta=1e7), "rope_theta is"),
    ("layers", dict(layer_types=(GDN,) * 8), "no attention layer"),
    (
      "order_of_layers",
      dict(layer_types=(ATTENTION, *(GDN,) * 6)),
      "no attention layer after layer 1 of 7 is left for layer 1",
    ),
  )
  def test_target(self, overrides, pattern):
    wide, _ = wide_pair(2, **overrides)
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      widen.widen_target(SMALL, small_params(), wide)
    self.assertNotIn("\n", str(caught.exception))

  def test_extra_layers_of_a_type_that_the_small_model_lacks(self):
    small = dataclasses.replace(SMALL, layer_types=(GDN,))
    with self.assertRaisesRegex(SpecPilotError, "has no attention layer"):
      widen.widen_target(small, {}, wide_pair(2)[0])

  @parameterized.named_parameters(
    ("ratio_3", dict(intermediate_size=72), "intermediate_size 24 to 72"),
    ("groups", dict(num_heads=16), "num_heads to num_kv_heads is 2:1"),
    ("block", dict(block_size=8), "block_size is 5 in one and 8"),
    ("taps", dict(target_layers=(1, 3, 5)), "2 taps cannot stand for 3"),
    ("layers", dict(num_layers=1), "no attention layer after layer 0 of 1"),
  )
  def test_drafter(self, overrides, pattern):
    wide = dataclasses.replace(wide_pair(2)[1], **overrides)
    with self.assertRaisesRegex(SpecPilotError, pattern):
      widen_drafter.widen_drafter(
        small_drafter(jnp.float32), wide, dtype="float32"
      )

  def test_dtype(self):
    with self.assertRaisesRegex(SpecPilotError, "float64 needs"):
      widened(2, dtype="float64")


if __name__ == "__main__":
  absltest.main()
