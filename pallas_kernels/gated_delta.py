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

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch

PREFILL_CHUNK = 64
"""Tokens solved at once in prefill, as in the published chunk form."""

_HIGHEST = lax.Precision.HIGHEST


def _einsum(
  spec: str, *operands: Array, precision: lax.Precision = _HIGHEST
) -> Array:
  return jnp.einsum(spec, *operands, precision=precision)


def _heads_first(x: Array) -> Array:
  return jnp.swapaxes(x, 0, 1)


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
  fill = (1 << (n - 1).bit_length()) - n  # rows of the identity
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
  *,
  implementation: dispatch.Implementation = "reference",
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
    implementation: the kernel (`triton`, `interpret`) takes float32 and up to
      64 nodes.

  Returns:
    Outputs [N, Hv, V]; the updates u [N, Hv, V] and path log-decays G [N, Hv]
    that `commit` needs.
  """
  if implementation != "reference":
    return _tree_verify_kernel(q, k, v, g, beta, state, mask, implementation)
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


@dataclasses.dataclass(frozen=True)
class TreeTile:
  """How `tree_verify`'s kernel is cut.

  Attributes:
    columns: of a value head's state per program.
    num_warps: per program.
  """

  columns: int
  num_warps: int


# By padded nodes. Of a prototype on an H200 (27B shapes, TF32x3): 9.1, 20.3 and
# 26.9 us; other cards have not been measured.
TREE_TILES = {
  16: TreeTile(columns=64, num_warps=8),
  32: TreeTile(columns=64, num_warps=8),
  64: TreeTile(columns=32, num_warps=4),
}


def _tree_program(
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  beta_ref,
  mask_ref,
  state_ref,
  o_ref,
  u_ref,
  decay_ref,
  *,
  precision,
):
  """One value head, some columns of its state.

  The system is inverted as `unit_lower_inverse` does it, on whole matrices:
  with M the inverses of the diagonal blocks and C what joins pairs of them,
  the inverses of the joined blocks are M - M C M.
  """
  dot = functools.partial(
    jnp.dot, precision=precision, preferred_element_type=jnp.float32
  )
  q, k = q_ref[...], k_ref[...]  # [N, K]
  state = state_ref[...]  # [K, columns]
  mask = mask_ref[...] != 0  # [N, N]
  beta = beta_ref[...][:, None]
  n = q.shape[0]
  row = lax.broadcasted_iota(jnp.int32, (n, n), 0)
  column = lax.broadcasted_iota(jnp.int32, (n, n), 1)

  decay = jnp.sum(jnp.where(mask, g_ref[...][None, :], 0.0), axis=1)
  difference = jnp.where(mask, decay[:, None] - decay[None, :], 0.0)
  ratio = jnp.where(mask, jnp.exp(difference), 0.0)
  system = jnp.where(row != column, beta * dot(k, k.T) * ratio, 0.0)
  inverse = jnp.where(row == column, 1.0, 0.0)
  size = 1
  while size < n:
    joins = (row // (2 * size) == column // (2 * size)) & (
      row // size != column // size
    )
    between = jnp.where(joins, system, 0.0)
    if size > 1:
      between = dot(inverse, dot(between, inverse))
    inverse = inverse - between
    size *= 2

  carried = jnp.exp(decay)[:, None]
  u = dot(inverse, beta * (v_ref[...] - carried * dot(k, state)))
  o_ref[...] = carried * dot(q, state) + dot(dot(q, k.T) * ratio, u)
  u_ref[...] = u
  decay_ref[...] = decay  # each program of a head writes the same


def _tree_verify_kernel(q, k, v, g, beta, state, mask, implementation):
  n, key_heads, key_dim = k.shape
  value_heads, _, value_dim = state.shape
  if state.dtype != jnp.float32:
    raise ValueError(f"tree_verify's kernel takes float32, not {state.dtype}")
  nodes = max(16, 1 << (n - 1).bit_length())
  if nodes not in TREE_TILES:
    raise ValueError(f"tree_verify's kernel takes at most 64 nodes, got {n}")
  tile = TREE_TILES[nodes]
  columns = min(tile.columns, value_dim)
  repeat = value_heads // key_heads
  # Nodes that do not exist see nothing, themselves included, and change
  # nothing.
  padding = ((0, nodes - n),)
  q, k, v, g, beta = (
    jnp.pad(x, padding + ((0, 0),) * (x.ndim - 1)) for x in (q, k, v, g, beta)
  )
  mask = jnp.pad(mask.astype(jnp.int32), padding * 2)

  def key_rows(head, block):
    del block
    return 0, head // repeat, 0

  def value_rows(head, block):
    return 0, head, block

  def scalars(head, block):
    del block
    return 0, head

  keys = pl.BlockSpec((nodes, None, key_dim), key_rows)
  values = pl.BlockSpec((nodes, None, columns), value_rows)
  per_node = pl.BlockSpec((nodes, None), scalars)
  interpret = implementation == "interpret"
  o, u, decay = pl.pallas_call(
    functools.partial(
      _tree_program,
      precision=_HIGHEST
      if interpret
      else lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    ),
    grid=(value_heads, value_dim // columns),
    in_specs=[
      keys,
      keys,
      values,
      per_node,
      per_node,
      pl.BlockSpec((nodes, nodes), lambda head, block: (0, 0)),
      pl.BlockSpec(
        (None, key_dim, columns), lambda head, block: (head, 0, block)
      ),
    ],
    out_specs=[values, values, per_node],
    out_shape=[
      jax.ShapeDtypeStruct(v.shape, jnp.float32),
      jax.ShapeDtypeStruct(v.shape, jnp.float32),
      jax.ShapeDtypeStruct(g.shape, jnp.float32),
    ],
    compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps),
    interpret=interpret,
    name="gdn_tree_verify",
  )(q, k, v, g, beta, mask, state)
  return o[:n], u[:n], decay[:n]


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
  chunk = min(1 << (n - 1).bit_length(), PREFILL_CHUNK)
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
