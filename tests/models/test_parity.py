"""Parity of the targets with `transformers`, on checkpoints that it wrote.

`tests/golden/make_golden.py` made the files and says what they hold.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import nnx
from jax import lax

from pallas_kernels import gated_delta as kernels
from specpilot_jax.checkpoints import hf
from specpilot_jax.configs import GDN
from specpilot_jax.decoding import commit
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import layers, state, target
from tests.decoding.kit import quick_compilation

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = (
  "hybrid1",
  "hybrid2",
  "hybrid3",
  "hybrid1_tied",
  "hybrid2_tied",
  "hybrid3_tied",
  "qwen3",
  "llama",
)
LENGTH = 300
PROMPT = 32

# Both sides round in float32: the reference is up to 3.6e-5 from its float64
# self (`float32_error` of the files); the largest difference seen is 4.9e-5.
FLOAT32_TOLERANCE = 2e-4
# Largest difference seen: 6.0e-5, in passes of one token.
CHUNK_TOLERANCE = 1e-4
# Largest difference seen: 8.5e-14.
FLOAT64_TOLERANCE = 1e-11


@functools.cache
def checkpoint(case):
  return hf.load(GOLDEN / case)


@functools.cache
def golden(case):
  with np.load(GOLDEN / case / "golden.npz") as file:
    return dict(file)


@contextlib.contextmanager
def precision(dtype):
  """float64 exists in JAX only where x64 is enabled."""
  before = jax.config.read("jax_enable_x64")
  jax.config.update("jax_enable_x64", before or dtype == "float64")
  try:
    yield
  finally:
    jax.config.update("jax_enable_x64", before)


def run(graphdef, params, tokens, count, start, prefill):
  """Passes over tokens [passes, chunk], each committed before the next.

  `count` tokens exist, the first of them. Returns logits [passes * chunk, V].
  """
  model = nnx.merge(graphdef, params)
  passes, chunk = tokens.shape

  def step(carry, inputs):
    chunk_tokens, index = inputs
    there = jnp.minimum(count - index * chunk, chunk)
    nodes = state.run_of(chunk_tokens, there, prefill=prefill)
    out = model(nodes, carry)
    path = jnp.arange(chunk, dtype=jnp.int32)
    carry = commit.commit(carry, out.stash, path, nodes.count)
    return carry, model.logits(out.hidden)

  index = jnp.arange(passes, dtype=jnp.int32)
  _, logits = lax.scan(step, start, (tokens, index))
  return logits.reshape(passes * chunk, -1)


jitted_run = jax.jit(run, static_argnums=(0, 5))


def logits_of(
  case,
  dtype,
  *,
  length=LENGTH,
  chunk=LENGTH,
  prefill=True,
  config=None,
  params=None,
  run=jitted_run,
):
  """Logits [length, V] of the first golden tokens, `chunk` at a time."""
  ckpt, ids = checkpoint(case), golden(case)["token_ids"][:length]
  config = ckpt.config if config is None else config
  with precision(dtype):
    built = target.build(
      config, ckpt.params if params is None else params, dtype
    )
    graphdef, leaves = nnx.split(built)
    chunk = min(chunk, length)
    passes = -(-length // chunk)
    tokens = np.zeros(passes * chunk, np.int32)
    tokens[:length] = ids
    start = state.init_state(config, passes * chunk, jnp.dtype(dtype))
    out = run(
      graphdef,
      leaves,
      jnp.asarray(tokens.reshape(passes, chunk)),
      jnp.asarray(length, jnp.int32),
      start,
      prefill,
    )
    assert out.dtype == jnp.dtype(dtype)
    return np.asarray(out)[:length]


@functools.cache
def one_pass(case):
  return logits_of(case, "float32")


def kept(logits):
  """Of all logits, those that golden.npz has."""
  return logits[:, ::16]


def largest(a, b):
  return float(np.abs(a - b).max())


class ParityTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(quick_compilation())

  @parameterized.parameters(*CASES)
  def test_float64_logits(self, case):
    expected = golden(case)["logits_f64"]
    actual = logits_of(case, "float64", length=len(expected))
    self.assertLess(largest(kept(actual), expected), FLOAT64_TOLERANCE)

  @parameterized.parameters(
    *itertools.product(CASES, (LENGTH,)),
    # Whether embeddings are tied is nothing that chunks are about.
    *itertools.product((c for c in CASES if "tied" not in c), (1, 7, 64)),
  )
  def test_prefill_in_chunks(self, case, chunk):
    """One pass is right by the golden logits, the others by it as well."""
    whole = chunk == LENGTH
    chunked = (
      one_pass(case) if whole else logits_of(case, "float32", chunk=chunk)
    )
    expected = golden(case)["logits"]
    self.assertLess(largest(kept(chunked), expected), FLOAT32_TOLERANCE)
    if not whole:
      self.assertLess(largest(chunked, one_pass(case)), CHUNK_TOLERANCE)

  # One-token decode and a verify chain: the tree form, committed by rebuild.
  @parameterized.product(case=("hybrid2", "hybrid3", "llama"), nodes=(1, 8))
  def test_decoding_equals_one_pass(self, case, nodes):
    decoded = logits_of(case, "float32", chunk=nodes, prefill=False)
    self.assertLess(largest(decoded, one_pass(case)), CHUNK_TOLERANCE)

  @parameterized.parameters(*CASES)
  def test_greedy_tokens(self, case):
    ckpt, file = checkpoint(case), golden(case)
    expected = file["greedy"].tolist()
    # Rounding cannot decide any of these tokens.
    self.assertGreater(file["greedy_min_margin"], 5 * FLOAT32_TOLERANCE)
    self.assertGreaterEqual(len(set(expected)), 24)
    engine = Engine(target.build(ckpt.config, ckpt.params, "float32"))
    output = engine.generate(
      file["token_ids"][:PROMPT].tolist(),
      SamplingParams(max_tokens=len(expected), loop_detection=False),
    )
    self.assertEqual(list(output.token_ids), expected)


def spread(start, width, order):
  """Indices of blocks of `width` rows from `start`, in another order."""
  return (start + order[:, None] * width + np.arange(width)).ravel()


def modulo_order(heads, groups):
  """Moves head h to a place that reads group h % groups.

  Consecutive heads share a group, so that a model whose heads are stored in
  this order computes what one that maps heads by modulo would.
  """
  return np.arange(heads).reshape(-1, groups).T.ravel()


def edit(suffix, change):
  """A variant with every parameter of that name changed."""

  def variant(config, params):
    hits = [name for name in params if name.endswith(suffix)]
    assert hits
    return config, params | {n: change(config, params[n]) for n in hits}

  return variant


def reconfigure(**changes):
  return lambda config, params: (dataclasses.replace(config, **changes), params)


def query_rows(change):
  """A variant with the rows of q and gate, [heads, 2, head_dim], changed."""

  def rows(c, weight):
    n = c.num_heads * 2 * c.head_dim
    wrong = change(c, weight[:n].reshape(c.num_heads, 2, c.head_dim, -1))
    return np.concatenate([wrong.reshape(n, -1), weight[n:]])

  return edit("mixer.qkv.weight", rows)


def swap_halves(_, weight):
  return np.roll(weight, len(weight) // 2, axis=0)


def swap_b_a(c, weight):
  n = 2 * c.gdn_num_value_heads
  return np.concatenate([weight[:-n], swap_halves(c, weight[-n:])])


def value_heads_modulo(c, params):
  order = modulo_order(c.gdn_num_value_heads, c.gdn_num_key_heads)
  heads, width = c.gdn_num_value_heads, c.gdn_value_head_dim
  value = spread(2 * c.gdn_key_dim, width, order)
  z = c.gdn_conv_dim
  b = z + c.gdn_value_dim
  conv = np.concatenate([np.arange(2 * c.gdn_key_dim), value])
  rows = np.concatenate(
    [conv, spread(z, width, order), b + order, b + heads + order]
  )
  params = dict(params)
  for i, kind in enumerate(c.layer_types):
    if kind == GDN:
      mixer = f"layers.{i}.mixer."
      for name, index in (
        ("in_proj.weight", rows),
        ("conv_weight", conv),
        ("a_log", order),
        ("dt_bias", order),
        ("out_proj.weight", (slice(None), spread(0, width, order))),
      ):
        params[mixer + name] = params[mixer + name][index]
  return c, params


def query_heads_modulo(c, params):
  order = modulo_order(c.num_heads, c.num_kv_heads)
  c, params = query_rows(lambda _, q: q[order])(c, params)
  columns = spread(0, c.head_dim, order)
  return edit("mixer.o_proj.weight", lambda _, w: w[:, columns])(c, params)


def decay_after_delta(q, k, v, g, beta, initial, count):
  """The recurrence with its two factors in the wrong order."""
  del count  # all of them
  repeat = v.shape[1] // k.shape[1]
  q, k = (jnp.repeat(x, repeat, axis=1) for x in (q, k))

  def step(s, token):
    q_t, k_t, v_t, g_t, beta_t = token
    u = beta_t[:, None] * (v_t - jnp.einsum("hkv,hk->hv", s, k_t))
    s = jnp.exp(g_t)[:, None, None] * (s + k_t[:, :, None] * u[:, None, :])
    return s, jnp.einsum("hkv,hk->hv", s, q_t)

  last, outputs = lax.scan(step, initial, (q, k, v, g, beta))
  return outputs, last


def unscaled_queries(q, *args):
  return PREFILL(q * q.shape[-1] ** 0.5, *args)


def epsilon_outside_root(x):
  return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def interleaved_rope(x, positions, rotary_dim, theta):
  pairs = np.arange(rotary_dim).reshape(-1, 2).T.ravel()
  turned = ROPE(x[..., pairs], positions, rotary_dim, theta)
  turned = turned[..., np.argsort(pairs)]
  return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)


def shifted_window(*args):
  right = COMMIT(*args)
  return state.TargetState(
    layers=tuple(
      state.GDNState(
        recurrent=layer.recurrent, conv=jnp.roll(layer.conv, 1, axis=0)
      )
      if isinstance(layer, state.GDNState)
      else layer
      for layer in right.layers
    ),
    length=right.length,
  )


COMMIT, PREFILL, ROPE = commit.commit, kernels.chunk_prefill, layers.rope

# Float64 where float32 cannot tell the difference from rounding.
WRONG_PARAMETERS = {
  "norms_not_zero_centred": ("float32", reconfigure(zero_centered_norm=False)),
  "gdn_norm_zero_centred": (
    "float32",
    edit("mixer.norm.weight", lambda _, w: 1 + w),
  ),
  "norm_epsilon": ("float32", reconfigure(norm_eps=1.1e-6)),
  "all_dimensions_rotate": ("float32", reconfigure(rotary_dim=32)),
  "rope_base": ("float32", reconfigure(rope_theta=1.01e4)),
  "gate_before_query": ("float32", query_rows(lambda _, q: q[:, ::-1])),
  "queries_then_gates": (
    "float32",
    query_rows(
      lambda c, q: np.swapaxes(q.reshape(2, c.num_heads, c.head_dim, -1), 0, 1)
    ),
  ),
  "query_heads_modulo": ("float32", query_heads_modulo),
  "value_heads_modulo": ("float32", value_heads_modulo),
  "b_and_a_swapped": ("float32", edit("mixer.in_proj.weight", swap_b_a)),
  "mlp_gate_and_up_swapped": (
    "float32",
    edit("mlp.gate_up.weight", swap_halves),
  ),
  "convolution_reversed": (
    "float32",
    edit("mixer.conv_weight", lambda _, w: w[:, ::-1]),
  ),
}
WRONG_CODE = {
  "decay_after_delta": (
    "float32",
    (kernels, "chunk_prefill", decay_after_delta),
  ),
  "interleaved_rope": ("float32", (layers, "rope", interleaved_rope)),
  "convolution_window_shifted": (
    "float32",
    (commit, "commit", shifted_window),
  ),
  "l2_epsilon_outside_root": (
    "float64",
    (kernels, "l2_normalize", epsilon_outside_root),
  ),
  # The gated norm behind it divides the factor out again, but for epsilon.
  "unscaled_queries": (
    "float32",
    (kernels, "chunk_prefill", unscaled_queries),
  ),
}


class NegativeControlTest(parameterized.TestCase):
  """Implementations that are wrong in one point miss the tolerance by far."""

  CASE = "hybrid2"  # two value heads per key head, three queries per key head
  LENGTH = 64
  FACTOR = 8

  def setUp(self):
    super().setUp()
    self.enterContext(quick_compilation())

  def check(self, dtype, **kwargs):
    file = golden(self.CASE)
    expected, tolerance = {
      "float32": (file["logits"][: self.LENGTH], FLOAT32_TOLERANCE),
      "float64": (file["logits_f64"][: self.LENGTH], FLOAT64_TOLERANCE),
    }[dtype]
    actual = logits_of(self.CASE, dtype, length=self.LENGTH, chunk=32, **kwargs)
    error = largest(kept(actual), expected)
    self.assertGreater(error, self.FACTOR * tolerance)

  @parameterized.named_parameters(
    (name, *case) for name, case in WRONG_PARAMETERS.items()
  )
  def test_wrong_parameters(self, dtype, variant):
    ckpt = checkpoint(self.CASE)
    config, params = variant(ckpt.config, ckpt.params)
    self.check(dtype, config=config, params=params)

  @parameterized.named_parameters(
    (name, *case) for name, case in WRONG_CODE.items()
  )
  def test_wrong_code(self, dtype, wrong):
    module, name, replacement = wrong
    with mock.patch.object(module, name, replacement):
      # A function object of its own, or JAX would run what it traced before.
      fresh = jax.jit(lambda *args: run(*args), static_argnums=(0, 5))
      self.check(dtype, run=fresh)

  @parameterized.parameters("float32", "float64")
  def test_nothing_wrong(self, dtype):
    with self.assertRaises(AssertionError):
      self.check(dtype)
