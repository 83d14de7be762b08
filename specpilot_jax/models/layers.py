"""Building blocks shared by targets and drafters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import (
  add_norm,
  fp8_matmul,
  w12_array,
  w12_decode,
  w12_matmul,
)
from pallas_kernels.dispatch import (
  FP8Implementation,
  Implementation,
  W12Implementation,
)
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax import configs
from specpilot_jax.models.yarn import Yarn

_INIT = nnx.initializers.normal(0.02)

Weight = Float[Array, "O I"] | W12Array | FP8Array
"""A matrix, the same in 12 bits, or one of FP8 codes, which rounds what it is
multiplied with."""

MIDPOINT, TRUNCATED, SCALED = VIEWS = configs.VIEWS
"""Forms of the 8-bit view of a matrix in W12: with the midpoint of what it cuts
off; without; without, and the product multiplied by `VIEW_GAIN` instead."""

VIEW_GAIN = 1 / (1 - 7.5 / 128 * math.log(2))
"""Cut-off mantissa bits are worth 7.5 of 128 on average, and the mean of 1 over
an evenly spread mantissa in [1, 2) is ln 2."""


def accumulation_dtype(dtype) -> jnp.dtype:
  """float32 for bfloat16 and float32 activations, float64 for float64."""
  return jnp.promote_types(dtype, jnp.float32)


def exact(dtype) -> lax.Precision | None:
  """Precision of products that stand for `dtype`.

  float32 means float32 on a GPU too; bfloat16 products are exact in any case.
  """
  return None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
  """Whether a parameter is a matrix that rows are multiplied with."""
  return len(shape) == 2 and name.endswith(".weight")


@jax.named_scope("weights")
def matmul(
  x: Float[Array, "N I"],
  weight: Weight,
  out_dtype=None,
  w12: W12Implementation = "reference",
  view: str | None = None,
  fp8: FP8Implementation = "reference",
  definition: bool = False,
) -> Float[Array, "N O"]:
  """x W^T with accumulation in at least float32: every weight is read here.

  Args:
    x: activations; their dtype is the dtype of the result unless `out_dtype`.
    weight: [out, in], as checkpoints store it; one in a narrower dtype than x
      is widened for the product.
    w12: implementation for weights in W12; of so many rows that no kernel
      takes them, a product with the decoded matrix.
    view: one of `VIEWS`: the product with that view of a weight in W12, and
      with no bit of the rest of it. Other weights have none.
    fp8: implementation for weights in FP8, of any number of rows.
    definition: whether to take no kernel's product: W12 is decoded first, FP8
      is multiplied by its reference.
  """
  out_dtype = x.dtype if out_dtype is None else out_dtype
  n = x.shape[0]
  if isinstance(weight, FP8Array):
    fp8 = "reference" if definition else fp8
    out = fp8_matmul.matmul(x, weight, out_dtype=out_dtype, implementation=fp8)
    if not weight.rest.shape[0]:
      return out
    rest = matmul(x, weight.rest.astype(x.dtype), out_dtype)
    return jnp.concatenate([out, rest], axis=1)
  if isinstance(weight, W12Array) and view is not None:
    # The kernel's reference is the op's definition, for any number of rows.
    out = w12_matmul.matmul(
      x,
      weight,
      out_dtype=out_dtype,
      view=True,
      midpoint=view == MIDPOINT,
      implementation=w12,
    )
    return out * VIEW_GAIN if view == SCALED else out
  if isinstance(weight, W12Array):
    few = n <= w12_matmul.max_rows(w12, weight)
    if w12 != "reference" and few and not definition:
      return few_rows(out_dtype, w12)(x, weight)
    weight = w12_decode.decode(weight, implementation=w12).astype(x.dtype)
  elif weight.dtype != x.dtype:
    # Not before its turn: all matrices at once might not fit.
    weight, x = lax.optimization_barrier((weight, x))
    weight = weight.astype(x.dtype)
  if n == 1 and _sums_rows(x, weight):
    return sum_of_products(out_dtype)(x, weight)
  # A bfloat16 result is still accumulated in float32, and rounded once.
  product = functools.partial(
    jnp.einsum,
    precision=exact(x.dtype),
    preferred_element_type=out_dtype,
  )
  if n == 1 or x.dtype == jnp.bfloat16 or jax.default_backend() != "cpu":
    return product("ni,oi->no", x, weight)
  # XLA's CPU backend rearranges the right operand of every product, which
  # costs more than the product itself where that is the weight. The barrier
  # keeps it from swapping the operands back. It computes 4, 8 or 16 columns
  # at once; numbers in between take longer.
  columns = 4 if n <= 4 else 8 if n <= 8 else 16
  x = jnp.pad(x, ((0, -n % columns), (0, 0)))
  return lax.optimization_barrier(product("oi,ni->on", weight, x)).T[:n]


MOST_READS = 3
"""Of a matrix in W12 for a batch's rows, before it is decoded instead."""


def few_rows(out_dtype, implementation: W12Implementation):
  """x W^T with W in W12, as its kernel computes it; of a batch, all rows.

  Under `vmap` the kernel would read the weight once for each of the batch.
  """

  @jax.custom_batching.custom_vmap
  def one(x: Float[Array, "N I"], weight: W12Array) -> Array:
    return w12_matmul.matmul(
      x, weight, out_dtype=out_dtype, implementation=implementation
    )

  @one.def_vmap
  def _(size, batched, x, weight):
    own, of_weight = batched
    if not own or any(jax.tree.leaves(of_weight)):
      raise ValueError("a batch of weights in W12, expected one for all")
    rows = x.reshape(-1, x.shape[-1])
    most = w12_matmul.max_rows(implementation, weight)
    # Reading 12 bits some times is less than decoding: 12 + 16 + 16 bits.
    if len(rows) > MOST_READS * most:
      most = len(rows)
    pieces = [
      matmul(rows[i : i + most], weight, out_dtype, implementation)
      for i in range(0, len(rows), most)
    ]
    out = jnp.concatenate(pieces)
    return out.reshape(size, -1, out.shape[-1]), True

  return one


def _sums_rows(x, weight) -> bool:
  """Whether one row is a sum of products per row of W.

  So XLA reads W at 4.4 to 4.7 TB/s on an H200, and at 4.0 to 4.6 as a dot; but
  at 2.4, not 4.1, where W is much wider than high.
  """
  high = weight.shape[0] > weight.shape[1]
  return high and x.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"


def sum_of_products(out_dtype):
  """x W^T of one row, as sums over products; of a batch of rows, a dot.

  Under `vmap` the products would be those of the whole batch. Not to be
  differentiated: `custom_vmap` has no reverse mode.
  """

  @jax.custom_batching.custom_vmap
  def one(x: Float[Array, "1 I"], weight: Float[Array, "O I"]) -> Array:
    acc = accumulation_dtype(x.dtype)
    products = weight.astype(acc) * x.astype(acc)
    return products.sum(axis=1).astype(out_dtype)[None]

  @one.def_vmap
  def _(size, batched, x, weight):
    del size
    dot = functools.partial(
      jnp.einsum, "ni,oi->no", preferred_element_type=out_dtype
    )
    axes = tuple(0 if each else None for each in batched)
    return jax.vmap(dot, in_axes=axes)(x, weight), True

  return one


def rows(weight: Weight, index: Int[Array, " N"]) -> Float[Array, "N I"]:
  """Some rows of a matrix; ids are clipped to the range."""
  if isinstance(weight, W12Array):
    return w12_array.take(weight, index)
  if isinstance(weight, FP8Array):
    raise TypeError("rows of FP8 matrices are not looked up")
  return jnp.take(weight, index, axis=0, mode="clip")


class Linear(nnx.Module):
  """y = x W^T without bias; W [out_features, in_features]."""

  def __init__(
    self,
    in_features: int,
    out_features: int,
    dtype,
    rngs,
    w12: W12Implementation = "reference",
    fp8: FP8Implementation = "reference",
  ):
    self.w12, self.fp8 = w12, fp8
    self.view: str | None = None  # see `read_view`
    self.definition = False  # see `by_definition`
    self.weight = nnx.Param(
      _INIT(rngs.params(), (out_features, in_features), dtype)
    )

  def __call__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
    weight = self.weight.get_value()
    return matmul(
      x,
      weight,
      w12=self.w12,
      view=self.view,
      fp8=self.fp8,
      definition=self.definition,
    )


class Embedding(nnx.Module):
  """Token table W [vocab, features]."""

  def __init__(
    self,
    vocab_size: int,
    features: int,
    dtype,
    rngs,
    w12: W12Implementation = "reference",
  ):
    self.w12 = w12
    self.view: str | None = None  # see `read_view`; rows are read as they are
    self.definition = False  # see `by_definition`
    self.dtype = jnp.dtype(dtype)
    self.weight = nnx.Param(_INIT(rngs.params(), (vocab_size, features), dtype))

  def __call__(self, tokens: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Rows of the given ids, all of which must be in range."""
    return rows(self.weight.get_value(), tokens).astype(self.dtype)

  def attend(self, x: Float[Array, "N D"], out_dtype) -> Float[Array, "N V"]:
    """Logits of a tied head."""
    return matmul(
      x,
      self.weight.get_value(),
      out_dtype,
      self.w12,
      self.view,
      definition=self.definition,
    )


def read_view[M: nnx.Module](module: M, view: str) -> M:
  """The same module, around the same arrays, whose products read a view.

  Every matrix that rows are multiplied with is read as its 8-bit view, the head
  too. The few rows that a lookup of tokens reads cost the same either way, so
  they stay exact.

  Args:
    module: whose matrices are in W12; others are read as they are.
    view: one of `VIEWS`.
  """
  module = nnx.merge(*nnx.split(module))
  for _, part in nnx.iter_modules(module):
    if isinstance(part, Linear | Embedding):
      part.view = view
  return module


def by_definition[M: nnx.Module](
  module: M, decoder: W12Implementation | None = None
) -> M:
  """The module, none of its products and none of its runs a kernel's.

  Kernels take prompts too, so what judges their outputs has to be told.

  Args:
    decoder: what decodes W12 before a product; None is what the module has.
  """
  for _, part in nnx.iter_modules(module):
    if hasattr(part, "definition"):
      setattr(part, "definition", True)  # noqa: B010
    if isinstance(part, Linear | Embedding) and decoder is not None:
      part.w12 = decoder
  return module


class RMSNorm(nnx.Module):
  """y = x / rms(x) * weight, or * (1 + weight) where the family centres it.

  Computed in the accumulation dtype and rounded once.
  """

  def __init__(
    self,
    features: int,
    eps: float,
    zero_centered: bool,
    dtype,
    add_norm: Implementation = "reference",
  ):
    self.eps = eps
    self.zero_centered = zero_centered
    self.implementation = add_norm
    init = jnp.zeros if zero_centered else jnp.ones
    self.weight = nnx.Param(init((features,), dtype))

  def __call__(self, x: Array) -> Array:
    return add_norm.norm(x, self.weight[...], self.eps, self.zero_centered)

  def after(
    self, x: Float[Array, "N D"], delta: Float[Array, "N D"], prompt: bool
  ) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """The residual stream x + delta, and its norm.

    Args:
      prompt: the rows are a run of prompt, which takes the reference.
    """
    return add_norm.add_norm(
      x,
      delta,
      self.weight[...],
      eps=self.eps,
      zero_centered=self.zero_centered,
      implementation="reference" if prompt else self.implementation,
    )


class MLP(nnx.Module):
  """SwiGLU: down(silu(gate) * up), gate and up fused as rows of one matrix."""

  def __init__(
    self,
    features: int,
    hidden: int,
    dtype,
    rngs,
    w12: W12Implementation = "reference",
    fp8: FP8Implementation = "reference",
  ):
    self.gate_up = Linear(features, 2 * hidden, dtype, rngs, w12, fp8)
    self.down = Linear(hidden, features, dtype, rngs, w12, fp8)

  def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
    return self.down(jax.nn.silu(gate) * up)


def rope(
  x: Float[Array, "N H D"],
  positions: Int[Array, " N"],
  rotary_dim: int,
  theta: float,
  yarn: Yarn | None = None,
) -> Float[Array, "N H D"]:
  """Rotary embedding of the first `rotary_dim` dimensions of each head.

  Half-split layout: dimension i pairs with i + rotary_dim / 2 (RoFormer, arXiv
  2104.09864, in the layout of Hugging Face checkpoints). Angles are computed
  in the accumulation dtype of x.
  """
  acc = accumulation_dtype(x.dtype)
  half = rotary_dim // 2
  frequency = 1.0 / theta ** (np.arange(half, dtype=np.float64) / half)
  if yarn is not None:
    frequency = yarn.frequencies(rotary_dim, theta)
  angle = positions[:, None].astype(acc) * jnp.asarray(frequency, acc)
  cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]  # [N, 1, half]
  if yarn is not None:
    cos, sin = cos * yarn.scale, sin * yarn.scale
  first, second, rest = jnp.split(x, (half, rotary_dim), axis=-1)
  first, second = first.astype(acc), second.astype(acc)
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate([r.astype(x.dtype) for r in rotated] + [rest], axis=-1)
