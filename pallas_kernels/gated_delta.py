"""Gated DeltaNet: the recurrence, its tree form, its chunk form, the commit.

Notation (Gated Delta Networks, arXiv 2412.06464; tree form: DESIGN section 4).
Each value head has a state S [key_dim, value_dim]. One token does

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

with decay first, q and k L2-normalised and q scaled by key_dim^-0.5. Key head
h serves the value heads h*R .. h*R + R-1, R = value heads / key heads.

Every function takes q, k [N, Hk, K], v [N, Hv, V], g, beta [N, Hv] and a state
[Hv, K, V], all in the accumulation dtype (float32, or float64 for the
reference engine), and computes at full precision of that dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

PREFILL_CHUNK = 64
"""Tokens solved at once in prefill, as in the published chunk form."""

L2_EPS = 1e-6
"""Inside the square root, as in the family's reference model."""

_HIGHEST = lax.Precision.HIGHEST


def _einsum(
  spec: str, *operands: Array, precision: lax.Precision = _HIGHEST
) -> Array:
  return jnp.einsum(spec, *operands, precision=precision)


def _heads_first(x: Array) -> Array:
  return jnp.swapaxes(x, 0, 1)


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
  """x over its length."""
  return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def prepare(
  mixed: Float[Array, "N C"],
  b: Float[Array, "N Hv"],
  a: Float[Array, "N Hv"],
  a_log: Float[Array, " Hv"],
  dt_bias: Float[Array, " Hv"],
  *,
  key_heads: int,
  key_dim: int,
) -> tuple[Array, Array, Array, Array, Array]:
  """q, k, v, g, beta of every function below.

      g = -exp(a_log) softplus(a + dt_bias);   beta = sigmoid(b)

  Args:
    mixed: [q | k | v] behind convolution and activation, C = 2 Hk K + Hv V.
    b, a: what the gates are made of.
  """
  n, heads = b.shape
  keys = key_heads * key_dim
  q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
  q, k = (l2_normalize(x.reshape(n, key_heads, key_dim)) for x in (q, k))
  g = -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)
  v = v.reshape(n, heads, -1)
  return q * key_dim**-0.5, k, v, g, jax.nn.sigmoid(b)


def recurrent(
  q: Float[Array, "N Hk K"],
  k: Float[Array, "N Hk K"],
  v: Float[Array, "N Hv V"],
  g: Float[Array, "N Hv"],
  beta: Float[Array, "N Hv"],
  state: Float[Array, "Hv K V"],
) -> tuple[Float[Array, "N Hv V"], Float[Array, "Hv K V"]]:
  """Token-by-token definition: the oracle of every other form.

  Returns:
    Outputs [N, Hv, V] and the state after the last token [Hv, K, V].
  """
  repeat = v.shape[1] // k.shape[1]

  def step(s, token):
    q_t, k_t, v_t, g_t, beta_t = token
    q_t, k_t = (jnp.repeat(x, repeat, axis=0) for x in (q_t, k_t))  # [Hv, K]
    s = jnp.exp(g_t)[:, None, None] * s
    u = beta_t[:, None] * (v_t - _einsum("hkv,hk->hv", s, k_t))
    s = s + k_t[:, :, None] * u[:, None, :]
    return s, _einsum("hkv,hk->hv", s, q_t)

  state, outputs = lax.scan(step, state, (q, k, v, g, beta))
  return outputs, state


def one_token(
  q: Float[Array, "1 Hk K"],
  k: Float[Array, "1 Hk K"],
  v: Float[Array, "1 Hv V"],
  g: Float[Array, "1 Hv"],
  beta: Float[Array, "1 Hv"],
  state: Float[Array, "Hv K V"],
) -> tuple[Float[Array, "1 Hv V"], Float[Array, "Hv K V"]]:
  """`recurrent` of one token, from one read of the state.

  u = beta (v - e^g S^T k);   o = e^g S^T q + (q . k) u;   S' = e^g S + k u^T
  """
  repeat = v.shape[1] // k.shape[1]
  q, k = (jnp.repeat(x[0], repeat, axis=0) for x in (q, k))  # [Hv, K]
  both = _einsum("hxk,hkv->hxv", jnp.stack([k, q], axis=1), state)
  kept = jnp.exp(g[0])[:, None]
  u = beta[0][:, None] * (v[0] - kept * both[:, 0])  # [Hv, V]
  o = kept * both[:, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * u
  return o[None], kept[..., None] * state + k[:, :, None] * u[:, None, :]


def solve_unit_lower(
  strict: Float[Array, "*B N N"], rhs: Float[Array, "*B N V"]
) -> Float[Array, "*B N V"]:
  """(I + A)^-1 B of strictly lower triangular A."""
  eye = jnp.eye(strict.shape[-1], dtype=strict.dtype)
  return jax.scipy.linalg.solve_triangular(
    strict + eye, rhs, lower=True, unit_diagonal=True
  )


def solve_by_inverse(
  strict: Float[Array, "*B N N"], rhs: Float[Array, "*B N V"]
) -> Float[Array, "*B N V"]:
  """The same without BLAS, whose threads and XLA's wait for each other."""
  n = strict.shape[-1]
  fill = pl.next_power_of_2(n) - n  # rows of the identity
  pad = ((0, 0),) * (strict.ndim - 2) + ((0, fill), (0, fill))
  inverse = unit_lower_inverse(jnp.pad(strict, pad))[..., :n, :n]
  return _einsum("...ij,...jv->...iv", inverse, rhs)


def tree_verify(
  q: Float[Array, "N Hk K"],
  k: Float[Array, "N Hk K"],
  v: Float[Array, "N Hv V"],
  g: Float[Array, "N Hv"],
  beta: Float[Array, "N Hv"],
  state: Float[Array, "Hv K V"],
  mask: Bool[Array, "N N"],
) -> tuple[
  Float[Array, "N Hv V"], Float[Array, "N Hv V"], Float[Array, "N Hv"]
]:
  """Outputs of every node of a tree from one read of the committed state.

  With G_i the sum of g over the path to i and D_ij = exp(G_i - G_j) for
  ancestors-or-self j of i, else 0:

      (I + diag(beta) [(K K^T) o D]_strict) U = diag(beta) (V - e^G K S)
      O = e^G Q S + [(Q K^T) o D] U

  Args:
    mask: mask[i, j] is True where j is i or an ancestor of i. Parents come
      before their children, so that the system is unit lower triangular.

  Returns:
    Outputs [N, Hv, V]; the updates u [N, Hv, V] and path log-decays G [N, Hv]
    that `commit` needs.
  """
  n, key_heads, _ = k.shape
  value_heads, _, value_dim = state.shape
  repeat = value_heads // key_heads
  group = (key_heads, repeat)

  q, k = _heads_first(q), _heads_first(k)  # [Hk, N, K]
  v = _heads_first(v).reshape(*group, n, value_dim)
  decay = _einsum("ij,jh->hi", mask.astype(g.dtype), g)  # [Hv, N]
  difference = decay[:, :, None] - decay[:, None, :]
  # Masked before the exponential: outside the path it may overflow.
  ratio = jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0)), 0)
  ratio = ratio.reshape(*group, n, n)
  decay_h = decay.reshape(*group, n)
  beta_h = beta.T.reshape(*group, n)

  kk = _einsum("hik,hjk->hij", k, k)[:, None]  # shared by a group's heads
  qk = _einsum("hik,hjk->hij", q, k)[:, None]
  strict = mask & ~jnp.eye(n, dtype=bool)
  system = jnp.where(strict, beta_h[..., None] * kk * ratio, 0)
  # One product per value head: the state is read once, where it lies.
  both = jnp.repeat(jnp.concatenate([k, q], axis=1), repeat, axis=0)
  k_state, q_state = jnp.split(
    _einsum("hnk,hkv->hnv", both, state).reshape(*group, 2 * n, value_dim),
    2,
    axis=2,
  )
  carried = jnp.exp(decay_h)[..., None]
  rhs = beta_h[..., None] * (v - carried * k_state)
  u = lax.platform_dependent(
    system, rhs, cpu=solve_by_inverse, default=solve_unit_lower
  )
  o = carried * q_state + _einsum("hrij,hrjv->hriv", qk * ratio, u)
  o, u = (_heads_first(x.reshape(value_heads, n, value_dim)) for x in (o, u))
  return o, u, decay.T


def path_verify(
  q: Float[Array, "N Hk K"],
  k: Float[Array, "N Hk K"],
  v: Float[Array, "N Hv V"],
  g: Float[Array, "N Hv"],
  beta: Float[Array, "N Hv"],
  state: Float[Array, "Hv K V"],
  mask: Bool[Array, "N N"],
) -> tuple[
  Float[Array, "N Hv V"], Float[Array, "N Hv V"], Float[Array, "N Hv"]
]:
  """`tree_verify` by recomputing the path from the root to every node.

  What an engine does that has the recurrence alone: a state for each node,
  taken along the node's own path token by token.
  """
  repeat = v.shape[1] // k.shape[1]
  q, k = (jnp.repeat(x, repeat, axis=1) for x in (q, k))  # [N, Hv, K]
  states = jnp.broadcast_to(state, (len(q), *state.shape))

  def step(states, token):
    j, q_j, k_j, v_j, g_j, beta_j, on_path = token
    s = jnp.exp(g_j)[:, None, None] * states
    u = beta_j[:, None] * (v_j - _einsum("nhkv,hk->nhv", s, k_j))
    s = s + k_j[:, :, None] * u[:, :, None, :]
    states = jnp.where(on_path[:, None, None, None], s, states)
    return states, (_einsum("hkv,hk->hv", states[j], q_j), u[j])

  tokens = (jnp.arange(len(q)), q, k, v, g, beta, mask.T)
  _, (o, u) = lax.scan(step, states, tokens)
  return o, u, _einsum("ij,jh->ih", mask.astype(g.dtype), g)


def commit(
  state: Float[Array, "Hv K V"],
  k: Float[Array, "N Hk K"],
  u: Float[Array, "N Hv V"],
  decay: Float[Array, "N Hv"],
  path: Int[Array, " P"],
  count: Int[Array, ""],
) -> Float[Array, "Hv K V"]:
  """State after the first `count` nodes of a root path.

      S' = e^{G_last} S + sum_{j on path} exp(G_last - G_j) k_j u_j^T

  Args:
    k, u, decay: what `tree_verify` read and returned.
    path: node indices from the root down; entries from `count` on are ignored.
    count: nodes to commit, 0 leaves the state as it is.
  """
  repeat = state.shape[0] // k.shape[1]
  on_path = jnp.arange(path.shape[0]) < count  # [P]
  k, u, decay = k[path], u[path], decay[path]
  last = decay[jnp.maximum(count - 1, 0)]  # [Hv]
  weight = jnp.where(
    on_path[:, None],
    jnp.exp(jnp.where(on_path[:, None], last - decay, 0)),
    0,
  )
  u = jnp.where(on_path[:, None, None], weight[:, :, None] * u, 0)
  k = jnp.where(on_path[:, None, None], k, 0)
  u = u.reshape(u.shape[0], k.shape[1], repeat, u.shape[2])
  added = _einsum("phk,phrv->hrkv", k, u).reshape(state.shape)
  kept = jnp.where(count > 0, jnp.exp(last), 1)
  return kept[:, None, None] * state + added


@jax.custom_vjp
def unit_lower_inverse(
  strict: Float[Array, "*B N N"],
) -> Float[Array, "*B N N"]:
  """(I + A)^-1 of strictly lower triangular matrices, N a power of two.

  Pairs of diagonal blocks are joined, smallest first:

      [[L1, 0], [X, L2]]^-1 = [[T1, 0], [-T2 X T1, T2]]

  log2(N) rounds of small products instead of N rows of substitution, and as
  stable (a power series of A is not: its terms cancel where keys repeat).
  """
  n = strict.shape[-1]
  if n & (n - 1):
    raise ValueError(f"unit_lower_inverse needs a power of two, got {n}")
  batch = strict.shape[:-2]
  blocks = jnp.ones((*batch, n, 1, 1), strict.dtype)  # inverses on the diagonal
  size = 1
  while size < n:
    pairs = n // (2 * size)
    below = strict.reshape(*batch, pairs, 2, size, pairs, 2, size)
    below = below[..., 1, :, :, 0, :]  # [pairs, size, pairs, size]
    below = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    joined = -_einsum("...ij,...jk,...kl->...il", second, below, first)
    blocks = jnp.concatenate(
      [
        jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
        jnp.concatenate([joined, second], axis=-1),
      ],
      axis=-2,
    )
    size *= 2
  return blocks[..., 0, :, :]


def _inverse_fwd(strict):
  inverse = unit_lower_inverse(strict)
  return inverse, inverse


def _inverse_bwd(inverse, grad):
  # d(L^-1) = -L^-1 dL L^-1.
  back = -_einsum("...ji,...jk,...lk->...il", inverse, grad, inverse)
  return (jnp.tril(back, -1),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def chunk_prefill(
  q: Float[Array, "N Hk K"],
  k: Float[Array, "N Hk K"],
  v: Float[Array, "N Hv V"],
  g: Float[Array, "N Hv"],
  beta: Float[Array, "N Hv"],
  state: Float[Array, "Hv K V"],
  count: Int[Array, ""],
  precision: lax.Precision = _HIGHEST,
) -> tuple[Float[Array, "N Hv V"], Float[Array, "Hv K V"]]:
  """A run of tokens, `PREFILL_CHUNK` at a time: a chunk is a one-path tree.

  The tree's system is linear in the state, U = U0 - W S, so that all chunks
  are solved at once:

      U0 = (I + A)^-1 diag(beta) V,   W = (I + A)^-1 diag(beta e^G) K

  and so is the state, S' = M S + B with

      M = e^G_last I - K_out^T W,   B = K_out^T U0,
      row j of K_out being exp(G_last - G_j) k_j

  so that one product per chunk is all that goes from chunk to chunk.

  Args:
    count: tokens that exist; those behind it leave the state alone and their
      outputs mean nothing.
    precision: of the products, but for the inverse's, which are full.

  Returns:
    Outputs [N, Hv, V] and the state after `count` tokens [Hv, K, V].
  """
  n, key_heads, key_dim = k.shape
  value_heads, value_dim = v.shape[1:]
  chunk = min(pl.next_power_of_2(n), PREFILL_CHUNK)
  num = -(-n // chunk)
  valid = (jnp.arange(n) < count)[:, None]
  # No decay and no update: a token that does not exist changes nothing.
  g, beta = jnp.where(valid, g, 0), jnp.where(valid, beta, 0)
  if n == 1:
    return one_token(q, k, v, g, beta, state)

  def split(x, heads):
    """[N, heads * R, ...] to [chunks, heads, R, chunk, ...]."""
    x = jnp.pad(x, ((0, num * chunk - n),) + ((0, 0),) * (x.ndim - 1))
    x = x.reshape(num, chunk, heads, -1, *x.shape[2:])
    return jnp.moveaxis(x, 1, 3)

  q, k = split(q, key_heads)[:, :, 0], split(k, key_heads)[:, :, 0]
  v = split(v, key_heads)  # [chunks, Hk, R, chunk, V]
  beta, g = split(beta, key_heads), split(g, key_heads)
  decay = jnp.cumsum(g, axis=-1)  # [chunks, Hk, R, chunk]
  causal = jnp.tril(jnp.ones((chunk, chunk), dtype=bool))
  difference = decay[..., :, None] - decay[..., None, :]
  # Masked before the exponential: above the diagonal it may overflow.
  ratio = jnp.where(causal, jnp.exp(jnp.where(causal, difference, 0)), 0)
  einsum = functools.partial(_einsum, precision=precision)
  kk = einsum("chik,chjk->chij", k, k)[:, :, None]
  strict = causal & ~jnp.eye(chunk, dtype=bool)
  inverse = unit_lower_inverse(
    jnp.where(strict, beta[..., None] * kk * ratio, 0)
  )
  carried = (beta * jnp.exp(decay))[..., None] * k[:, :, None]
  solved = einsum(
    "chrij,chrjd->chrid",
    inverse,
    jnp.concatenate([beta[..., None] * v, carried], axis=-1),
  )
  u0, w = jnp.split(solved, (value_dim,), axis=-1)
  total = decay[..., -1:]
  k_out = jnp.exp(total - decay)[..., None] * k[:, :, None]
  added, removed = jnp.split(
    einsum("chrik,chrid->chrkd", k_out, solved), (value_dim,), axis=-1
  )
  kept = jnp.exp(total)[..., None] * jnp.eye(key_dim, dtype=k.dtype) - removed

  def step(s, x):
    kept, added = x
    return einsum("hrkl,hrlv->hrkv", kept, s) + added, s

  grouped = state.reshape(key_heads, -1, key_dim, value_dim)
  grouped, before = lax.scan(step, grouped, (kept, added))
  u = u0 - einsum("chrik,chrkv->chriv", w, before)
  scores = einsum("chik,chjk->chij", q, k)[:, :, None] * ratio
  q_in = jnp.exp(decay)[..., None] * q[:, :, None]
  outputs = einsum("chrik,chrkv->chriv", q_in, before)
  outputs += einsum("chrij,chrjv->chriv", scores, u)
  outputs = jnp.moveaxis(outputs, 3, 1)  # [chunks, chunk, Hk, R, V]
  outputs = outputs.reshape(num * chunk, value_heads, value_dim)[:n]
  return outputs, grouped.reshape(state.shape)
