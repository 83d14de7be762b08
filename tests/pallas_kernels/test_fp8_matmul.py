"""Products with FP8: the definition, the kernel interpreted, its lowering."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import fp8_array, fp8_dot, fp8_matmul, fp8_rows
from pallas_kernels.fp8_array import BLOCK, E4M3, FP8Array
from tests.decoding import kit
from tests.pallas_kernels import lowering

BLOCKS = (BLOCK, BLOCK)
BFLOAT16 = ml_dtypes.bfloat16
STATIC = ("out_dtype", "implementation", "shares", "together")
matmul = jax.jit(fp8_matmul.matmul, static_argnames=STATIC)
interpreted = functools.partial(
  matmul, out_dtype=jnp.float32, implementation="interpret"
)
quantize_rows = jax.jit(fp8_array.quantize_rows, static_argnums=1)
quantize = jax.jit(fp8_array.quantize, static_argnums=1)


def gaussian(high: int, width: int, seed: int = 0) -> np.ndarray:
  """Rows of sizes from 2^-8 to 2^8."""
  rng = np.random.default_rng(seed)
  size = np.exp2(rng.integers(-8, 9, (high, 1)))
  return (rng.normal(size=(high, width)) * size).astype(np.float32)


def rows(n: int, width: int) -> np.ndarray:
  return gaussian(n, width, seed=n).astype(BFLOAT16)


def made(*parts: Any) -> FP8Array:
  return FP8Array(*parts)


def packed(matrix, block: tuple[int, int]) -> FP8Array:
  codes, scale = quantize(matrix, block)
  rest = np.zeros((0, matrix.shape[1]), BFLOAT16)
  return made(codes, scale, rest, block)


def struct(high: int, width: int, block: tuple[int, int]) -> FP8Array:
  scales = fp8_array.scale_shape(high, width, block)
  return made(
    jax.ShapeDtypeStruct((high, width), E4M3),
    jax.ShapeDtypeStruct(scales, jnp.float32),
    jax.ShapeDtypeStruct((0, width), jnp.bfloat16),
    block,
  )


def exact(x, w: FP8Array) -> tuple[np.ndarray, np.ndarray]:
  """The formula in float64, and the size of its terms."""
  codes, scale = quantize_rows(x, w.block[1])
  width = x.shape[1]
  scale = np.repeat(np.asarray(scale, np.float64), w.block[1], axis=1)
  values = np.asarray(codes).astype(np.float64) * scale[:, :width]
  scale = np.repeat(np.asarray(w.scale, np.float64), w.block[0], axis=0)
  scale = np.repeat(scale, w.block[1], axis=1)[: w.shape[0], :width]
  matrix = np.asarray(w.codes).astype(np.float64) * scale
  return values @ matrix.T, np.abs(values) @ np.abs(matrix).T


class CodesTest(parameterized.TestCase):
  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_rows_against_the_codec(self, dtype):
    x = np.asarray(jnp.asarray(gaussian(5, 300), dtype))
    codes, scale = quantize_rows(x, BLOCK)
    for group in range(3):
      part = np.asarray(x[:, group * BLOCK : (group + 1) * BLOCK], np.float32)
      own = np.abs(part).max(axis=1) * np.float32(1 / 448)
      np.testing.assert_array_equal(scale[:, group], own)
      expected = np.clip(part / own[:, None], -448, 448)
      np.testing.assert_array_equal(
        codes[:, group * BLOCK : (group + 1) * BLOCK].astype(jnp.float32),
        expected.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
      )

  @parameterized.parameters(BLOCKS, (1, 300))
  def test_matrix(self, *block):
    """The largest of a block is 448; zeros have scale 1."""
    matrix = gaussian(200, 300)
    matrix[:128, 128:256] = 0
    matrix[3] = 0
    w = packed(matrix, block)
    down, across = w.scale.shape
    for i in range(down):
      for j in range(across):
        here = np.s_[
          i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
        ]
        largest = np.abs(matrix[here]).max()
        codes = np.abs(np.asarray(w.codes[here].astype(jnp.float32)))
        self.assertEqual(codes.max(), 448 if largest else 0)
        wanted = largest * np.float32(1 / 448) if largest else 1
        self.assertEqual(w.scale[i, j], wanted)
    error = np.abs(np.asarray(fp8_array.decode(w)) - matrix)
    # Half of the last of three bits, or of the smallest step of the block.
    step = np.asarray(fp8_array.row_scales(w)).max() * 2.0**-10
    self.assertTrue((error <= np.abs(matrix) / 16 * 1.001 + step).all())

  @parameterized.product(n=(1, 20), width=(128, 300), whole=(False, True))
  def test_kernel(self, n, width, whole):
    x = rows(n, width)
    columns = width if whole else BLOCK
    run = jax.jit(fp8_rows.quantize, static_argnums=(1, 2, 3))
    codes, scale = run(x, columns, 32, "interpret")
    wanted, wanted_scale = quantize_rows(x, columns)
    bits = np.asarray(codes).view(np.uint8)
    wanted = np.asarray(wanted).view(np.uint8)
    np.testing.assert_array_equal(bits[:n, :width], wanted)
    np.testing.assert_array_equal(scale.T[:n], wanted_scale)
    self.assertEqual(codes.shape, (32, -(-width // BLOCK) * BLOCK))
    self.assertFalse((bits[n:] & 127).any() | (bits[:, width:] & 127).any())


class ProductTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(kit.quick_compilation())

  @parameterized.parameters(
    (1, 256, 384, BLOCKS, 2),
    (5, 130, 200, BLOCKS, 1),
    (16, 200, 384, (1, BLOCK), 3),
    (20, 128, 256, (1, 256), 2),
    (3, 48, 32, (1, 32), None),
  )
  def test_against_float64(self, n, high, width, block, shares):
    x, w = rows(n, width), packed(gaussian(high, width), block)
    wanted, size = exact(x, w)
    for found in (
      matmul(x, w, out_dtype=jnp.float32),
      interpreted(x, w, shares=shares),
    ):
      self.assertEqual(found.shape, (n, high))
      self.assertEqual(found.dtype, jnp.float32)
      error = np.abs(np.asarray(found, np.float64) - wanted) / size
      self.assertLess(error.max(), 1e-6)

  def test_float64(self):
    """What speculation is proved with: sums of a block are exact."""
    with jax.enable_x64(True):
      x = jnp.asarray(gaussian(300, 256), jnp.float64)
      w = packed(gaussian(64, 256), BLOCKS)
      found = matmul(x, w)
      self.assertEqual(found.dtype, jnp.float64)
      wanted, size = exact(x, w)
      found = np.asarray(found)
    self.assertLess((np.abs(found - wanted) / size).max(), 1e-15)

  @parameterized.parameters("reference", "interpret")
  def test_rounds_once(self, implementation):
    x, w = rows(3, 256), packed(gaussian(64, 256), BLOCKS)
    product = functools.partial(matmul, x, w, implementation=implementation)
    self.assertEqual(product().dtype, jnp.bfloat16)
    wide = product(out_dtype=jnp.float32)
    np.testing.assert_array_equal(product(), wide.astype(jnp.bfloat16))

  @parameterized.parameters(BLOCKS, (1, 640))
  def test_rows_alone_and_together(self, *block):
    """The same bits, whatever else is in the call.

    Codes are such that the sum of a block is exact in any order, as that of an
    FP8 unit is the same for any number of rows; what is left is the order of
    blocks and shares.
    """
    rng = np.random.default_rng(0)
    w = packed(gaussian(192, 640), block)
    w = made(
      rng.integers(-15, 16, (192, 640)).astype(E4M3),
      w.scale,
      w.rest,
      block,
    )
    x = rng.integers(-15, 16, (130, 640)) * rng.normal(size=(130, 1))
    x = x.astype(BFLOAT16)
    codes = np.asarray(quantize_rows(x, block[1])[0]).astype(np.float32)
    # 128 products of even numbers up to 448 and integers up to 15.
    self.assertTrue((codes % 2 == 0).all())
    self.assertGreater(len(np.unique(codes)), 20)
    together = interpreted(x, w)
    for n in (40, 5):
      mine = np.sort(rng.permutation(130)[:n])
      np.testing.assert_array_equal(interpreted(x[mine], w), together[mine])

  @parameterized.parameters(BLOCKS, (1, 640), (1, BLOCK))
  def test_one_program_for_all_shares(self, *block):
    """What one for each leaves, in both types: to the bit where a scale is
    multiplied before the sum. Behind it a CPU may fuse it with the next one."""
    x, w = rows(150, 640), packed(gaussian(192, 640), block)
    for dtype in (jnp.float32, jnp.bfloat16):
      one, each = (
        matmul(
          x, w, out_dtype=dtype, implementation="interpret", shares=3,
          together=together,
        )
        for together in (True, False)
      )  # fmt: skip
      self.assertEqual(one.dtype, dtype)
      if block[1] == BLOCK:
        np.testing.assert_array_equal(one, each)
      _, size = exact(x, w)
      error = np.abs(np.asarray(one, float) - np.asarray(each, float)) / size
      self.assertLess(error.max(), 1e-6 if dtype == jnp.float32 else 2**-8)

  def test_many_rows_are_programs_enough(self):
    wide, long = struct(34816, 5120, BLOCKS), struct(5120, 17408, BLOCKS)
    with lowering.on("NVIDIA H200"):
      mine = fp8_matmul.card()
      shares = fp8_matmul.shares_of(long, mine.programs)
    self.assertGreater(shares, 4)
    for n, w, rows_of_w, together in (
      (16, long, 64, False),
      (128, long, 128, False),  # 40 or 80 programs for 132 multiprocessors
      (129, long, 64, True),
      (512, long, 128, True),
      (16, wide, 64, False),
      (128, wide, 128, True),
    ):
      tile, found = fp8_matmul.cut(mine, n, w)
      self.assertEqual((tile.rows, found), (rows_of_w, together))

  def test_shares_are_the_matrix_alone(self):
    for name in lowering.GPUS:
      with lowering.on(name):
        programs = fp8_matmul.card().programs
        found = [
          fp8_matmul.shares_of(struct(high, width, BLOCKS), programs)
          for high, width in ((34816, 5120), (5120, 17408), (64, 128))
        ]
        self.assertEqual(found[0], 1)
        self.assertGreater(found[1], 4)
        self.assertEqual(found[2], 1)

  def test_nan_stays_in_its_row(self):
    x, w = rows(4, 256), packed(gaussian(64, 256), BLOCKS)
    bad = x.copy()
    bad[2] = np.nan
    for implementation in ("reference", "interpret"):
      product = functools.partial(matmul, w=w, implementation=implementation)
      found = np.asarray(product(bad), np.float32)
      np.testing.assert_array_equal(
        np.delete(found, 2, 0),
        np.delete(np.asarray(product(x), np.float32), 2, 0),
      )
      self.assertTrue(np.isnan(found[2]).all())


class LoweringTest(parameterized.TestCase):
  @parameterized.product(
    gpu=tuple(lowering.SERVERS),
    n=(1, 128, 512),
    block=(BLOCKS, (1, 17408)),
  )
  def test_lowers_at_27b_shapes(self, gpu, n, block):
    with mock.patch.object(
      fp8_dot.dialect, "dot", wraps=fp8_dot.dialect.dot
    ) as dot:
      text = lowering.lower(
        functools.partial(fp8_matmul.matmul, implementation="triton"),
        gpu,
        jax.ShapeDtypeStruct((n, 17408), jnp.bfloat16),
        struct(5120, 17408, block),
      )
    for name in ("fp8_rows", "fp8_matmul", "__gpu$xla.gpu.triton"):
      self.assertIn(name, text)
    # With less the FP8 units of compute capability 9.0 are not used.
    for call in dot.call_args_list:
      self.assertEqual(call.kwargs, {"max_num_imprecise_acc": BLOCK})
    self.assertTrue(dot.called)

  @parameterized.parameters((200, 320, BLOCKS), (104, 300, (1, 300)))
  def test_lowers_odd_shapes(self, high, width, block):
    lowering.lower(
      functools.partial(fp8_matmul.matmul, implementation="triton"),
      "NVIDIA H200",
      jax.ShapeDtypeStruct((3, width), jnp.float32),
      struct(high, width, block),
    )

  @parameterized.parameters(*lowering.GPUS)
  def test_tiles_fit(self, gpu):
    with lowering.on(gpu):
      card, limit = fp8_matmul.card(), fp8_matmul.dispatch.shared_memory()
    self.assertIs(
      card, fp8_matmul.SMALL if "6000" in gpu else fp8_matmul.HOPPER
    )
    self.assertEqual(max(card.tiles), fp8_matmul.MOST_ROWS)
    most = fp8_matmul.MOST_ROWS
    for n, tile in (*card.tiles.items(), *((most, t) for t in card.whole)):
      self.assertLessEqual((tile.rows + n) * BLOCK * tile.num_stages, limit)
      # A warpgroup of the FP8 units has 64 rows.
      self.assertGreaterEqual(tile.rows * 4, 16 * tile.num_warps)


if __name__ == "__main__":
  absltest.main()
