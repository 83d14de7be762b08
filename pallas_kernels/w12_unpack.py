"""Bits of W12's planes into the numbers that kernels multiply with."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import w12_array


def unpack(q, *parts, filled=w12_array.MIDPOINT):
  """Row q of every lane times 2^(113 - base), bfloat16.

  Args:
    filled: lower mantissa bits of the view.
  """
  byte = parts[q // 2].astype(jnp.int32) >> (8 * (q % 2))
  low = filled
  if len(parts) == 3:
    low = (parts[2].astype(jnp.int32) >> (4 * q)) & 15
  sign, field, mantissa = byte & 128, (byte >> 3) & 15, (byte & 7) << 4 | low
  pattern = (sign << 8) | ((field + 112) << 7) | mantissa
  normal = lax.bitcast_convert_type(pattern.astype(jnp.uint16), jnp.bfloat16)
  # Field 0 is below the normal numbers, as in bfloat16; some processors take
  # those for zeros, so that no product can make them.
  least = mantissa.astype(jnp.float32) * jnp.where(
    sign > 0, -(2.0**-21), 2.0**-21
  )
  return jnp.where(field > 0, normal, least.astype(jnp.bfloat16))


def assembly(q: int, low: bool, filled: int = w12_array.MIDPOINT) -> str:
  """The same in PTX, for two lanes side by side.

  $0 is the pair of bfloat16, $1 two lanes of the view's plane that has row q,
  $2 the two of the plane of lower bits.

  Args:
    low: whether there is one; if not, `filled` stands for it.
  """
  # Everything but the sign in place in a, the sign in b.
  sign = "$1"
  if q % 2:
    lines = ["shr.b32 a, $1, 4;"]
  else:
    lines = ["shl.b32 a, $1, 4;", "shl.b32 b, $1, 8;"]
    sign = "b"
  if low:
    nibble = "$2"
    lines.append(f"and.b32 b, {sign}, 0x80008000;")
    lines.append("lop3.b32 a, a, 0x07f007f0, b, 0xea;")  # (a & c) | b
    if q:
      lines.append(f"shr.b32 b, $2, {4 * q};")
      nibble = "b"
    lines.append(f"lop3.b32 a, {nibble}, 0x000f000f, a, 0xea;")
  else:
    # Taken by the mask: sign where it is set, a elsewhere.
    lines.append(f"lop3.b32 a, {sign}, a, 0x80008000, 0xe4;")
    lines.append("mov.b32 b, 0x87f087f0;")
    lines.append(f"lop3.b32 a, a, b, {filled << 16 | filled:#010x}, 0xea;")
  lines.append("mov.b32 b, 0x77807780;")  # 2^112, twice.
  lines.append("mul.rn.bf16x2 $0, a, b;")
  return "{ .reg .b32 a, b; " + " ".join(lines) + " }"


def in_assembly(q, *parts, filled=w12_array.MIDPOINT):
  """`unpack` for two lanes at a time, by `assembly` in Triton."""
  pair, low = parts[q // 2], parts[2:]
  (out,) = pltriton.elementwise_inline_asm(
    assembly(q, bool(low), filled),
    args=[pair, *low],
    constraints=",".join(["=r"] + ["r"] * (1 + len(low))),
    pack=2,
    result_shape_dtypes=[jax.ShapeDtypeStruct(pair.shape, jnp.bfloat16)],
  )
  return out
