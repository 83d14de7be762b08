"""Products with W12: the kernel interpreted, and its lowering."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import w12_array, w12_matmul, w12_parts, w12_unpack
from pallas_kernels.w12_array import W12Array
from specpilot_jax.checkpoints import w12
from tests.checkpoints import w12_matrices
from tests.pallas_kernels import lowering

TILE = w12_matmul.Tile(lanes=16, programs=8)
interpreted = functools.partial(
  w12_matmul.matmul,
  out_dtype=jnp.float32,
  implementation="interpret",
  tile=TILE,
)


def packed(matrix: np.ndarray) -> W12Array:
  return w12_array.tile(jax.tree.map(jnp.asarray, w12.encode(matrix)))


def rows(n: int, width: int) -> jax.Array:
  return jnp.asarray(
    np.random.default_rng(n).normal(size=(n, width)), "bfloat16"
  )


def magnitude(x, matrix) -> np.ndarray:
  """Of what a sum's terms are; float32 holds no normal numbers below."""
  terms = (
    np.abs(np.asarray(x, np.float64)) @ np.abs(matrix.astype(np.float64)).T
  )
  return terms + 1e-29


def hard(high: int, width: int) -> np.ndarray:
  """Zeros of both signs, outliers, rows that lie in the list."""
  matrix = w12_matrices.gaussian(high, width).astype(np.float32)
  matrix[1] = 0
  matrix[2, ::3] = -0.0
  matrix[3, 5] = 3e20
  matrix[4, : width // 2] *= 1e-12
  matrix[high - 1, width - 1] = -7.0
  matrix[high // 2] *= 1e-30
  return matrix.astype(ml_dtypes.bfloat16)


class ProductTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 64, 96), (5, 65, 64), (8, 130, 32), (16, 80, 320), (33, 64, 64)
  )
  def test_against_float64(self, n, high, width):
    matrix, x = hard(high, width), rows(n, width)
    found = interpreted(x, packed(matrix))
    self.assertEqual(found.dtype, jnp.float32)
    expected = np.asarray(x, np.float64) @ matrix.astype(np.float64).T
    # Sum by sum: one row holds an outlier, another tiny numbers.
    scale = magnitude(x, matrix)
    self.assertEqual(found.shape, (n, high))
    error = np.abs(np.asarray(found, np.float64) - expected) / scale
    self.assertLess(error.max(), 1e-6)

  def test_infinities_and_nan(self):
    """Of the matrix; they stay in their rows."""
    matrix = w12_matrices.gaussian(64, 64)
    matrix[3, 4], matrix[5, 6], matrix[5, 7] = np.inf, np.nan, -np.inf
    x = rows(2, 64)
    found = np.asarray(interpreted(x, packed(matrix)))
    np.testing.assert_array_equal(
      found[:2, 3], np.inf * np.sign(np.asarray(x, np.float32)[:, 4])
    )
    self.assertTrue(np.isnan(found[:2, 5]).all())
    self.assertTrue(np.isfinite(np.delete(found[:2], (3, 5), axis=1)).all())

  @parameterized.parameters(1, 16)
  def test_same_kernel_on_decoded_tiles(self, n):
    """Decoding changes no bit of any sum."""
    w = packed(hard(96, 128))
    code = np.asarray(w12_array.codes(w))
    field = (code >> 7) & 15
    size = np.where(
      field > 0, (1 + (code & 127) / 128) * np.exp2(field - 15.0), 0
    )
    expanded = np.where(code >> 11, -size, size).reshape(4, w.lanes, 128)
    expanded = jnp.stack(
      [
        w12_array.tile_plane(jnp.asarray(quarter, "bfloat16"))
        for quarter in expanded
      ]
    )
    x = rows(n, 128)
    np.testing.assert_array_equal(
      interpreted(x, w), interpreted(x, w, expanded=expanded)
    )

  def test_view(self):
    matrix, x = hard(64, 128), rows(16, 128)
    w = packed(matrix)
    found = np.asarray(interpreted(x, w, view=True), np.float64)
    view = np.asarray(w12_array.decode_view(w), np.float64)
    expected = np.asarray(x, np.float64) @ view.T
    scale = magnitude(x, view)
    self.assertLess((np.abs(found - expected) / scale).max(), 1e-6)

  def test_lists_of_any_length(self):
    """More entries in a row than are applied at a time, and none."""
    matrix = w12_matrices.gaussian(64, 256).astype(np.float32)
    matrix[7] *= np.where(np.arange(256) % 2, 1e9, 1)
    matrix[9:30, 3:] *= np.where(np.arange(253) % 3, 1, 1e12)
    matrix = matrix.astype(ml_dtypes.bfloat16)
    w = packed(matrix)
    counts = np.diff(w.row_start)
    self.assertGreater(counts.max(), 2 * w12_parts.ENTRIES)
    self.assertEqual(counts.min(), 0)
    x = rows(8, 256)
    zeros = jnp.zeros_like(w.low)
    alone = dataclasses.replace(w, view01=zeros, view23=zeros, low=zeros)
    listed = np.where(
      np.asarray(w12_array.codes(w))[:64] & 0x7FF, 0, matrix.astype(np.float64)
    )
    expected = np.asarray(x, np.float64) @ listed.T
    found = np.asarray(interpreted(x, alone), np.float64)
    error = np.abs(found - expected) / magnitude(x, listed)
    self.assertLess(error.max(), 1e-6)

  @parameterized.parameters(1, 2, 3, 7, 12, 40)
  def test_any_number_of_programs(self, programs):
    """They begin and end anywhere among three groups of four tiles."""
    matrix, x = hard(180, 256), rows(5, 256)
    tile = w12_matmul.Tile(lanes=16, programs=programs)
    found = np.asarray(interpreted(x, packed(matrix), tile=tile), np.float64)
    expected = np.asarray(x, np.float64) @ matrix.astype(np.float64).T
    error = np.abs(found - expected) / magnitude(x, matrix)
    self.assertLess(error.max(), 1e-6)

  @parameterized.product(
    groups=(1, 3, 40), steps=(1, 5, 80), programs=(1, 7, 132, 528)
  )
  def test_shares(self, groups, steps, programs):
    """Every unit has the owner that begins and ends around it."""
    units = groups * steps
    shares = w12_parts.Shares(groups, steps, min(programs, units))
    owner = np.asarray([shares.owner(unit) for unit in range(units)])
    begin = np.asarray([shares.begin(i) for i in range(shares.programs + 1)])
    sizes = np.diff(begin)
    self.assertLessEqual(sizes.max() - sizes.min(), 1)
    np.testing.assert_array_equal(
      owner, np.repeat(np.arange(shares.programs), sizes)
    )
    owners = [
      len(set(owner[g * steps : (g + 1) * steps])) for g in range(groups)
    ]
    self.assertEqual([shares.owners(g) for g in range(groups)], owners)
    self.assertEqual(shares.parts, max(owners))

  @parameterized.parameters("reference", "interpret")
  def test_rounds_once(self, implementation):
    matrix, x = w12_matrices.gaussian(64, 64), rows(3, 64)
    product = functools.partial(
      w12_matmul.matmul, x, packed(matrix), implementation=implementation
    )
    self.assertEqual(product().dtype, jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ matrix.astype(np.float64).T
    wide = np.asarray(product(out_dtype=jnp.float32), np.float64)
    np.testing.assert_allclose(wide, exact, atol=1e-6)
    np.testing.assert_array_equal(
      product(), wide.astype(np.float32).astype(ml_dtypes.bfloat16)
    )

  def test_what_no_kernel_takes(self):
    w = packed(w12_matrices.gaussian(64, 64))
    with self.assertRaisesRegex(ValueError, "does not take float32"):
      interpreted(rows(1, 64).astype(jnp.float32), w)
    with self.assertRaisesRegex(ValueError, "takes planes in tiles"):
      interpreted(rows(1, 64), w12_array.untile(w))

  @parameterized.parameters((64, 24), (32, 64))
  def test_small_matrices(self, high, width):
    """Where no tile is enough for the tensor cores, by the definition."""
    for larger in ((36, 64), (64, 48)):
      self.assertTrue(w12_matmul.takes(packed(w12_matrices.gaussian(*larger))))
    matrix, x = w12_matrices.gaussian(high, width), rows(3, width)
    w = packed(matrix)
    self.assertFalse(w12_matmul.takes(w))
    exact = np.asarray(x, np.float64) @ matrix.astype(np.float64).T
    for implementation in ("interpret", "mosaic"):
      self.assertEqual(w12_matmul.max_rows(implementation, w), 0)
      found = w12_matmul.matmul(
        x, w, out_dtype=jnp.float32, implementation=implementation
      )
      np.testing.assert_allclose(found, exact, atol=1e-5)


def look_up(x: int, y: int, z: int, table: int) -> int:
  """PTX `lop3`: bit by bit the entry of the table."""
  out = 0
  for i in range(32):
    at = (x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)
    out |= (table >> at & 1) << i
  return out


OPERATIONS = {
  "mov.b32": lambda x: x,
  "shr.b32": lambda x, n: x >> n,
  "shl.b32": lambda x, n: (x << n) & 0xFFFFFFFF,
  "and.b32": lambda x, y: x & y,
  "lop3.b32": look_up,
}


class AssemblyTest(parameterized.TestCase):
  """No interpreter runs it, so it is run here, integers as integers."""

  @parameterized.product(q=tuple(range(4)), view=(False, True))
  def test_against_the_codec(self, q, view):
    lane = jnp.zeros(2, jnp.uint16)
    planes = [lane] * (2 if view else 3)
    with mock.patch.object(
      w12_unpack.pltriton, "elementwise_inline_asm", return_value=(None,)
    ) as assembly:
      w12_unpack.in_assembly(q, *planes)
    text = assembly.call_args.args[0].strip("{} ")
    self.assertIs(assembly.call_args.kwargs["args"][0], planes[q // 2])
    declared, *lines, last = (x.strip() for x in text.strip(";").split(";"))
    self.assertEqual(declared, ".reg .b32 a, b")
    self.assertEqual(last, "mul.rn.bf16x2 $0, a, b")
    rng = np.random.default_rng(q)
    for pair, low in rng.integers(0, 1 << 32, (200, 2)).tolist():
      registers = {"$1": pair, "$2": low}
      for line in lines:
        name, _, rest = line.partition(" ")
        out, *inputs = (x.strip() for x in rest.split(","))
        values = [registers[x] if x in registers else int(x, 0) for x in inputs]
        registers[out] = OPERATIONS[name](*values)
      for shift in (0, 16):
        byte = pair >> shift >> (8 * (q % 2)) & 255
        rest = 8 if view else low >> shift >> (4 * q) & 15
        expected = (byte & 128) << 8 | (byte & 127) << 4 | rest
        self.assertEqual(registers["a"] >> shift & 0xFFFF, expected)
      self.assertEqual(registers["b"], 0x7780 << 16 | 0x7780)
    factor = jax.lax.bitcast_convert_type(jnp.uint16(0x7780), jnp.bfloat16)
    self.assertEqual(float(factor), 2.0**112)


class LoweringTest(parameterized.TestCase):
  @parameterized.product(
    gpu=tuple(lowering.SERVERS),
    n=(1, 16, 32, 64),
    view=(False, True),
  )
  def test_lowers_at_27b_shapes(self, gpu, n, view):
    # The last tile is not full.
    w = w12_matrices.struct(16480, 5120)
    text = lowering.lower(
      functools.partial(w12_matmul.matmul, view=view, implementation="triton"),
      gpu,
      jax.ShapeDtypeStruct((n, w.shape[1]), jnp.bfloat16),
      w,
    )
    for name in ("w12_view",) if view else ("w12_matmul", "w12_finish"):
      self.assertIn(name, text)
    self.assertIn("__gpu$xla.gpu.triton", text)


if __name__ == "__main__":
  absltest.main()
