"""Products of float32 matrices on half-precision tensor cores.

A float32 number is a float16 one and what is left of it, itself rounded to
float16: 22 of its 24 bits. Three products of such halves, summed in float32,
are a product as good as float32's own (2^-22 of the largest operands; one in
TF32 has 2^-11, bfloat16 split the same way 2^-16), at half the instructions of
three in TF32. One product of the leading halves alone has 2^-12.

Halves hold numbers of up to 65,504 and lose bits below 6e-5. Normalised keys
and what is made of them lie within [-1, 1]; what may be large is multiplied by
a power of two first (`window`), which rounds nothing.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_STEP, _LOWEST = 16, -7
"""A window is [2^-7, 2^9) times a power of 2^16: so wide that what else is in
a tile seldom moves it, and 2^7 below the largest float16."""


def split(x: Float[Array, "*B"], products: int) -> tuple[Array, ...]:
  """The halves that so many products take: one of them, or two for 3."""
  leading = x.astype(jnp.float16)
  if products == 1:
    return (leading,)
  return leading, (x - leading.astype(jnp.float32)).astype(jnp.float16)


def transpose(halves: Sequence[Array]) -> tuple[Array, ...]:
  """Of matrices."""
  return tuple(x.T for x in halves)


def dot(a: Sequence[Array], b: Sequence[Array]) -> Float[Array, "M N"]:
  """Product of two matrices in halves, small terms first, in float32."""

  def one(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)

  if len(a) == len(b) == 1:
    return one(a[0], b[0])
  if len(a) == 1 or len(b) == 1:
    return one(a[-1], b[-1]) + one(a[0], b[0])
  return one(a[1], b[0]) + one(a[0], b[1]) + one(a[0], b[0])


def window(
  top: Float[Array, "*B"], *, lowest: int = _LOWEST, step: int = _STEP
) -> tuple[Array, Array]:
  """Powers of two into float16's range and back.

  Args:
    top: the largest magnitude of what is to be split.
    lowest, step: its exponent will be in [lowest, lowest + step); a power of
      two up to 32.

  Returns:
    down, with 2^-7 <= down * top < 2^9 if nothing else is asked for, and
    1 / down. Both stay finite: zeros stay zeros, and numbers beyond 2^105
    overflow as they would in float32.
  """
  exponent = (lax.bitcast_convert_type(top, jnp.int32) >> 23) - 127
  bound = 96 // step
  steps = (
    jnp.clip((exponent - lowest) >> (step.bit_length() - 1), -bound, bound)
    * step
  )

  def power(e):
    return lax.bitcast_convert_type((e + 127) << 23, jnp.float32)

  return power(-steps), power(steps)
