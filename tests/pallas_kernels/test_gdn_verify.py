"""The verify kernel: its arithmetic interpreted, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import gated_delta, gdn_verify
from tests import notes, trees
from tests.decoding import kit
from tests.pallas_kernels import lowering

KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 16, 32
SIZES = (16, 48, 64)
TREES = 1000 if notes.FULL else 60
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-3}
"""Of the largest value, by the dtype of the activations."""


def run(implementation, *given, mask, count=None):
  verify = functools.partial(
    gdn_verify.verify, key_heads=KEY_HEADS, implementation=implementation
  )
  return verify(*given, mask=mask, count=count)


interpreted = jax.jit(functools.partial(run, "interpret"))


def chain(size):
  return list(range(-1, size - 1))


def arguments(rng, size, *, repeat=3, decay=0.1):
  """mixed, projected, a_log, dt_bias, state; decays are about `decay`."""
  heads = KEY_HEADS * repeat
  channels = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
  return (
    rng.normal(size=(size, channels)),
    # z stands before the gates, and must not be read.
    np.where(
      np.arange(heads * VALUE_DIM + 2 * heads) < heads * VALUE_DIM,
      np.nan,
      rng.normal(size=(size, heads * VALUE_DIM + 2 * heads)),
    ),
    np.log(decay) + rng.normal(size=heads),
    rng.normal(size=heads),
    rng.normal(size=(heads, KEY_DIM, VALUE_DIM)),
  )


def cast(given, dtype):
  """What a model of this dtype hands over."""
  mixed, projected, *rest = (jnp.asarray(x, jnp.float32) for x in given)
  return mixed, projected.astype(dtype), *rest


def with_equal_keys(given, *, noise=0.0):
  """The same key at each node, all of it written, nothing forgotten."""
  mixed, projected, a_log, dt_bias, state = (x.copy() for x in given)
  keys = slice(KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM)
  mixed[:, keys] = mixed[:1, keys] + noise * mixed[:, keys]
  projected[:, -2 * len(a_log) : -len(a_log)] = 40.0  # beta is 1
  a_log[:] = -40.0  # no decay
  return mixed, projected, a_log, dt_bias, state


def tokens_of(given):
  """q, k, v, g, beta of given arrays, in float64."""
  mixed, projected, a_log, dt_bias, state = (
    np.asarray(x, np.float64) for x in given
  )
  heads = len(a_log)
  b, a = projected[:, -2 * heads : -heads], projected[:, -heads:]
  q, k, v = np.split(
    mixed, (KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM), axis=1
  )
  q, k = (x.reshape(len(x), KEY_HEADS, KEY_DIM) for x in (q, k))
  q, k = (
    x / np.sqrt((x * x).sum(-1, keepdims=True) + gated_delta.L2_EPS)
    for x in (q, k)
  )
  g = -np.exp(a_log) * np.logaddexp(0, a + dt_bias)
  beta = 1 / (1 + np.exp(-b))
  v = v.reshape(len(v), heads, -1)
  return (q * KEY_DIM**-0.5, k, v, g, beta), state


def recurrence(tokens, state, parents):
  """Outputs of every node, and the states after them, from its parent's."""
  q, k, v, g, beta = tokens
  group = v.shape[1] // k.shape[1]
  q, k = (np.repeat(x, group, axis=1) for x in (q, k))
  outputs, states = [], []
  for i, parent in enumerate(parents):
    s = state if parent < 0 else states[parent]
    s = np.exp(g[i])[:, None, None] * s
    delta = beta[i][:, None] * (v[i] - np.einsum("hkv,hk->hv", s, k[i]))
    s = s + k[i][:, :, None] * delta[:, None, :]
    outputs.append(np.einsum("hkv,hk->hv", s, q[i]))
    states.append(s)
  return np.stack(outputs), states


class VerifyTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  def check(self, given, parents, dtype, node=-1):
    """Every output, and the state after a node's path."""
    narrow = cast(given, dtype)
    o, k, u, decay = interpreted(*narrow, mask=trees.mask_of(parents))
    tokens, state = tokens_of(narrow)
    outputs, states = recurrence(tokens, state, parents)
    node %= len(parents)
    path = jnp.asarray(trees.path_to(parents, node))
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in (state, k, u, decay)]
      committed = gated_delta.commit(
        *wide, path=path, count=jnp.int32(len(path))
      )
    for found, expected in ((o, outputs), (committed, states[node])):
      error = np.abs(np.asarray(found, np.float64) - expected).max()
      self.assertLess(error / np.abs(expected).max(), TOLERANCES[dtype])

  @parameterized.product(size=SIZES, dtype=tuple(TOLERANCES))
  def test_random_trees(self, size, dtype):
    """Any decay; children of a node in any order and at any distance."""
    rng = np.random.default_rng(0)
    for i in range(-(-TREES // 6)):
      given = arguments(rng, size, decay=10.0 ** rng.uniform(-4, 1))
      parents = chain(size) if i == 0 else trees.random_parents(rng, size)
      self.check(given, parents, dtype, node=int(rng.integers(size)))

  @parameterized.parameters(20, 32, 64)
  def test_several_requests_some_of_few_nodes(self, places):
    """Each has what it has alone; what does not exist is finite."""
    rng = np.random.default_rng(places)
    counts = (1, 5, gdn_verify.FEW, gdn_verify.FEW + 1, places)
    given = [cast(arguments(rng, places), jnp.bfloat16) for _ in counts]
    parents = [trees.random_parents(rng, places) for _ in counts]
    masks = jnp.stack([trees.mask_of(x) for x in parents])
    found = jax.vmap(
      lambda *x: interpreted(*x[:-2], mask=x[-2], count=x[-1]),
    )(
      *(jnp.stack(x) for x in zip(*given, strict=True)),
      masks,
      jnp.array(counts),
    )
    for one, own, mask, count in zip(
      zip(*found, strict=True), given, masks, counts, strict=True
    ):
      alone = interpreted(*own, mask=mask)
      for a, b in zip(one, alone, strict=True):
        self.assertTrue(np.isfinite(a).all())
        largest = np.abs(b[:count]).max()
        np.testing.assert_allclose(
          a[:count], b[:count], atol=TOLERANCES[jnp.bfloat16] * largest
        )

  @parameterized.parameters((90, jnp.bfloat16), (128, jnp.float32))
  def test_more_tiles(self, size, dtype):
    rng = np.random.default_rng(0)
    given = arguments(rng, size)
    self.check(given, trees.random_parents(rng, size), dtype)
    self.check(with_equal_keys(given), [*chain(32), *chain(size - 32)], dtype)

  def test_few_nodes_with_a_key_head_each(self):
    rng = np.random.default_rng(0)
    given = arguments(rng, 5, repeat=1)
    self.check(given, trees.random_parents(rng, 5), jnp.float32)

  @parameterized.product(size=SIZES, noise=(0.0, 1e-3), dtype=tuple(TOLERANCES))
  def test_repeated_keys(self, size, noise, dtype):
    """Where a power series of the system cancels: (I + A)^-1 stays small.

    Nodes one below the other, as deep as there are nodes.
    """
    given = arguments(np.random.default_rng(0), size)
    self.check(with_equal_keys(given, noise=noise), chain(size), dtype)

  @parameterized.parameters(*TOLERANCES)
  def test_magnitudes(self, dtype):
    """Powers of two far from 1, in the state, the values, or one column."""
    rng = np.random.default_rng(0)
    parents = trees.random_parents(rng, 16)
    for of_state, of_values in ((1e8, 1), (1, 1e8), (1e-8, 1e-8), (0, 1e-9)):
      mixed, *rest, state = arguments(rng, 16)
      mixed[:, 2 * KEY_HEADS * KEY_DIM :] *= of_values
      self.check((mixed, *rest, state * of_state), parents, dtype)
      state[..., 0] *= 1e6  # each column has its own power of two
      self.check((mixed, *rest, state * of_state), parents, dtype)

  def test_decays_that_overflow_outside_the_path(self):
    given = arguments(np.random.default_rng(0), 16, decay=60.0)
    self.check(given, [-1, *[0] * 15], jnp.float32)

  @parameterized.parameters(*TOLERANCES)
  def test_nodes_do_not_depend_on_those_they_do_not_see(self, dtype):
    """Bit for bit."""
    rng = np.random.default_rng(0)
    given = arguments(rng, 48)
    mask = trees.mask_of(chain(16) + [0] * 32)
    expected = interpreted(*cast(given, dtype), mask=mask)
    other = arguments(rng, 48)
    for x, y in zip(given[:2], other[:2], strict=True):
      x[16:] = 3 * y[16:]
    found = interpreted(*cast(given, dtype), mask=mask)
    for a, b in zip(found, expected, strict=True):
      np.testing.assert_array_equal(a[:16], b[:16])

  @parameterized.product(
    gpu=tuple(lowering.SERVERS),
    case=((1, jnp.float32), (16, jnp.bfloat16), (48, jnp.bfloat16),
          (64, jnp.float32), (128, jnp.bfloat16)),
  )  # fmt: skip
  def test_lowers_at_27b_shapes(self, gpu, case):
    nodes, dtype = case

    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    text = lowering.lower(
      functools.partial(
        gdn_verify.verify, key_heads=16, implementation="triton"
      ),
      gpu,
      shape(nodes, 10240),
      shape(nodes, 16480, dtype=dtype),
      shape(48),
      shape(48),
      shape(48, 128, 128),
      shape(nodes, nodes, dtype=jnp.bool_),
    )
    self.assertIn("gdn_verify", text)
    self.assertIn("__gpu$xla.gpu.triton", text)

  @parameterized.parameters(16, 24, 48, 64, 96, 128)
  def test_lowers_for_several_requests(self, nodes):
    def shape(*dims, dtype=jnp.float32):
      return jax.ShapeDtypeStruct(dims, dtype)

    verify = functools.partial(
      gdn_verify.verify, key_heads=16, implementation="triton"
    )
    text = lowering.lower(
      jax.vmap(verify, in_axes=(0, 0, None, None, 0, 0, 0)),
      "NVIDIA H200",
      shape(4, nodes, 10240),
      shape(4, nodes, 16480, dtype=jnp.bfloat16),
      shape(48),
      shape(48),
      shape(4, 48, 128, 128),
      shape(4, nodes, nodes, dtype=jnp.bool_),
      shape(4, dtype=jnp.int32),
    )
    self.assertIn("gdn_verify", text)

  @parameterized.parameters(
    (227 << 10, 128, 128), (99 << 10, 128, 64), (90 << 10, 128, 48),
    (99 << 10, 256, 16),
  )  # fmt: skip
  def test_nodes_that_fit_the_shared_memory(self, memory, key_dim, nodes):
    self.assertEqual(gdn_verify.max_nodes(memory, key_dim), nodes)

  def test_refusals(self):
    given = arguments(np.random.default_rng(0), 129)
    mask = trees.mask_of(chain(129))
    with self.assertRaisesRegex(ValueError, "at most 128 nodes, got 129"):
      interpreted(*cast(given, jnp.float32), mask=mask)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in given]
      with self.assertRaisesRegex(ValueError, "float32, not float64"):
        interpreted(*wide, mask=mask)


class PerPathTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.parameters((1, 1), (7, 3), (128, 1))
  def test_as_the_tree_form_does(self, size, repeat):
    rng = np.random.default_rng(size)
    parents = trees.random_parents(rng, size)
    given = arguments(rng, size, repeat=repeat)
    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in given]
      mask = jnp.asarray(trees.mask_of(parents))
      for a, b in zip(
        jax.jit(functools.partial(run, "per_path"))(*wide, mask=mask),
        jax.jit(functools.partial(run, "reference"))(*wide, mask=mask),
        strict=True,
      ):
        self.assertEqual(a.dtype, jnp.float64)
        np.testing.assert_allclose(a, b, atol=1e-11)


if __name__ == "__main__":
  absltest.main()
