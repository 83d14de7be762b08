"""Every form of the gated delta rule against its token-by-token definition."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import gated_delta
from tests import trees

TOLERANCE = 1e-11


def inputs(rng, n, *, repeat=2, key_heads=2, key_dim=4, value_dim=3, decay=1.0):
  """q, k, v, g, beta and a state, as a layer would make them."""
  heads = key_heads * repeat

  def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  q = unit(rng.normal(size=(n, key_heads, key_dim))) * key_dim**-0.5
  k = unit(rng.normal(size=(n, key_heads, key_dim)))
  v = rng.normal(size=(n, heads, value_dim))
  g = -rng.exponential(decay, size=(n, heads))
  beta = rng.uniform(size=(n, heads))
  state = rng.normal(size=(heads, key_dim, value_dim))
  return (q, k, v, g, beta), state


def recurrence(tokens, state):
  """The definition in loops: decay first, then the delta, then the read."""
  q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
  s = np.array(state, np.float64)
  group = v.shape[1] // k.shape[1]
  outputs = np.zeros(v.shape)
  for t in range(v.shape[0]):
    for head in range(v.shape[1]):
      key, query = k[t, head // group], q[t, head // group]
      s[head] *= np.exp(g[t, head])
      delta = beta[t, head] * (v[t, head] - s[head].T @ key)
      s[head] += np.outer(key, delta)
      outputs[t, head] = s[head].T @ query
  return outputs, s


tree_verify = jax.jit(gated_delta.tree_verify)
commit = jax.jit(gated_delta.commit)
chunk_prefill = jax.jit(gated_delta.chunk_prefill)


def select(tokens, index):
  return tuple(x[np.asarray(index)] for x in tokens)


class GatedDeltaTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))

  @parameterized.parameters(1, 2, 3)
  def test_recurrent(self, repeat):
    tokens, state = inputs(np.random.default_rng(0), 5, repeat=repeat)
    outputs, last = gated_delta.recurrent(*tokens, state)
    expected, expected_last = recurrence(tokens, state)
    np.testing.assert_allclose(outputs, expected, atol=TOLERANCE)
    np.testing.assert_allclose(last, expected_last, atol=TOLERANCE)

  @parameterized.parameters(1, 2, 3)
  def test_one_token(self, repeat):
    tokens, state = inputs(np.random.default_rng(0), 1, repeat=repeat)
    outputs, last = gated_delta.one_token(*tokens, state)
    expected, expected_last = recurrence(tokens, state)
    np.testing.assert_allclose(outputs, expected, atol=TOLERANCE)
    np.testing.assert_allclose(last, expected_last, atol=TOLERANCE)
    _, same = chunk_prefill(*tokens, state, jnp.int32(0))
    np.testing.assert_array_equal(same, state)

  @parameterized.product(repeat=(1, 2, 3), size=(1, 6, 16))
  def test_tree_verify_and_commit(self, repeat, size):
    """Each node's output is its own path's; so is each committed state."""
    rng = np.random.default_rng(size * 10 + repeat)
    chain = list(range(-1, size - 1))
    for parents in (chain, *(trees.random_parents(rng, size) for _ in "ab")):
      tokens, state = inputs(rng, size, repeat=repeat)
      o, u, decay = tree_verify(*tokens, state, trees.mask_of(parents))
      for node in range(size):
        path = trees.path_to(parents, node)
        expected, after = recurrence(select(tokens, path), state)
        np.testing.assert_allclose(o[node], expected[-1], atol=TOLERANCE)
        # What stands behind the path in the array must not matter.
        padded = np.array(path + [size - 1] * (size - len(path)), np.int32)
        committed = commit(
          state, tokens[1], u, decay, padded, np.int32(len(path))
        )
        np.testing.assert_allclose(committed, after, atol=TOLERANCE)

  def test_commit_of_a_part_of_a_path_and_of_nothing(self):
    tokens, state = inputs(np.random.default_rng(1), 6)
    path = np.arange(6, dtype=np.int32)
    _, u, decay = tree_verify(*tokens, state, np.tril(np.ones((6, 6), bool)))
    for count in range(7):
      after = commit(state, tokens[1], u, decay, path, np.int32(count))
      if count == 0:
        np.testing.assert_array_equal(after, state)
      else:
        _, expected = recurrence(select(tokens, path[:count]), state)
        np.testing.assert_allclose(after, expected, atol=TOLERANCE)

  def test_nodes_that_do_not_exist(self):
    """Padding behind the real nodes, whatever it holds, changes nothing."""
    tokens, state = inputs(np.random.default_rng(2), 8)
    mask = np.tril(np.ones((8, 8), bool))
    o, u, decay = tree_verify(*tokens, state, mask)
    other = tuple(x.copy() for x in tokens)
    for x in other:
      x[5:] = 100 * x[5:] - 7
    o2, u2, decay2 = tree_verify(*other, state, mask)
    for a, b in ((o, o2), (u, u2), (decay, decay2)):
      np.testing.assert_array_equal(a[:5], b[:5])
    path = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(
      commit(state, tokens[1], u, decay, path, np.int32(5)),
      commit(state, other[1], u2, decay2, path, np.int32(5)),
    )

  @parameterized.parameters(
    (1, 1), (5, 5), (7, 3), (64, 64), (64, 63), (65, 65), (150, 150),
    (150, 129), (150, 0),
  )  # fmt: skip
  def test_chunk_prefill(self, size, count):
    tokens, state = inputs(np.random.default_rng(size + count), size)
    o, after = chunk_prefill(*tokens, state, np.int32(count))
    real = select(tokens, np.arange(count, dtype=np.int32))
    expected, expected_state = recurrence(real, state)
    self.assertEqual(o.shape, (size, *expected.shape[1:]))
    np.testing.assert_allclose(o[:count], expected, atol=TOLERANCE)
    np.testing.assert_allclose(after, expected_state, atol=TOLERANCE)

  def test_prefill_in_two_runs_is_one_run(self):
    tokens, state = inputs(np.random.default_rng(3), 100)
    whole, last = chunk_prefill(*tokens, state, np.int32(100))
    for cut in (1, 63, 64, 65):
      first = select(tokens, np.arange(cut))
      second = select(tokens, np.arange(cut, 100))
      a, middle = chunk_prefill(*first, state, np.int32(cut))
      b, end = chunk_prefill(*second, middle, np.int32(100 - cut))
      np.testing.assert_allclose(np.concatenate([a, b]), whole, atol=TOLERANCE)
      np.testing.assert_allclose(end, last, atol=TOLERANCE)

  @parameterized.parameters(1, 2, 6, 16, 21)
  def test_both_solvers(self, size):
    """One of them runs on a CPU, the other elsewhere."""
    rng = np.random.default_rng(size)
    strict = jnp.tril(jnp.asarray(rng.normal(size=(2, 3, size, size))), -1)
    rhs = jnp.asarray(rng.normal(size=(2, 3, size, 5)))
    for solve in (gated_delta.solve_unit_lower, gated_delta.solve_by_inverse):
      solution = solve(strict, rhs)
      np.testing.assert_allclose(
        solution + strict @ solution,
        rhs,
        atol=1e-9 * float(jnp.abs(solution).max()),
      )

  @parameterized.parameters(np.float32, np.float64)
  def test_strong_decay(self, dtype):
    """exp(G_i - G_j) overflows where j is no ancestor of i."""
    rng = np.random.default_rng(4)
    size = 80
    tokens, state = inputs(rng, size)
    q, k, v, g, beta = (x.astype(dtype) for x in tokens)
    state = state.astype(dtype)
    g = np.full_like(g, -50)
    tokens = (q, k, v, g, beta)
    atol = TOLERANCE if dtype == np.float64 else 1e-5
    o, after = chunk_prefill(*tokens, state, np.int32(size))
    expected, expected_state = recurrence(tokens, state)
    np.testing.assert_allclose(o, expected, atol=atol)
    np.testing.assert_allclose(after, expected_state, atol=atol)
    # Siblings at very different decay: one branch forgets all, one nothing.
    parents = [-1] + [i - 1 if i % 2 else max(i - 2, 0) for i in range(1, size)]
    g = np.where(np.arange(size)[:, None] % 2, g, 0)
    tokens = (q, k, v, g.astype(dtype), beta)
    o, _, _ = tree_verify(*tokens, state, trees.mask_of(parents))
    for node in (1, 2, size - 2, size - 1):
      path = trees.path_to(parents, node)
      expected, _ = recurrence(select(tokens, path), state)
      np.testing.assert_allclose(o[node], expected[-1], atol=atol)
