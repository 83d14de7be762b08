"""W12 files: every bit back, and one line for what is damaged."""

import json
import pathlib
import tempfile
from unittest import mock

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from absl.testing import absltest, parameterized

from specpilot_jax.checkpoints import hf, tensor_file, w12_file, w12_storage
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders, w12_matrices

MATRIX = "layers.0.mlp.down.weight"


def some_tensors():
  rng = np.random.default_rng(0)
  wide = rng.standard_normal((6, 40)).astype(np.float32)
  return {
    MATRIX: w12_matrices.gaussian(33, 100),
    "patterns": w12_matrices.every_pattern(64, 1024),
    "small": w12_matrices.gaussian(3, 320),
    "norm.weight": w12_matrices.gaussian(1, 9)[0],
    "conv.weight": w12_matrices.gaussian(64, 4)[:, None],
    "scalar": np.float32(3),
    "none": np.zeros((0, 4), ml_dtypes.bfloat16),
    "float32": wide,
    "float16": wide.astype(np.float16),
  }


def pad_with_codes(view23):
  """The last three of 36 rows pad a matrix of 33."""
  view23[6:] |= 0x0800
  return view23


class W12FileTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)
    self.path = self.scratch / w12_file.WEIGHTS

  def refused(self, pattern, call=w12_file.load, *args):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      call(*(args or (self.path,)))
    self.assertLen(str(caught.exception).splitlines(), 1)

  def assert_same(self, got, want):
    self.assertEqual(got.keys(), want.keys())
    for name, array in want.items():
      self.assertEqual(got[name].dtype, array.dtype, name)
      self.assertEqual(got[name].shape, array.shape, name)
      self.assertEqual(got[name].tobytes(), array.tobytes(), name)


class RoundTripTest(W12FileTestCase):
  def test_every_bit_comes_back(self):
    tensors = some_tensors()
    w12_file.save(self.path, tensors)
    self.assert_same(w12_file.load(self.path), tensors)
    with w12_file.opened(self.path) as file:
      # Three rows become four; the patterns are mostly in lists.
      self.assertEqual(file.matrices(), [MATRIX])
      for name in file.names():
        self.assertEqual(file.shape(name), tensors[name].shape)
      self.assertEqual(file.dtype_name(MATRIX), "BF16")
      blocks = np.concatenate(list(file.blocks(MATRIX)))
    np.testing.assert_array_equal(blocks, tensors[MATRIX])

  @parameterized.named_parameters(w12_matrices.adversarial().items())
  def test_hard_matrices(self, matrix):
    w12_file.save(self.path, {"m": matrix})
    self.assert_same(w12_file.load(self.path), {"m": matrix})

  def test_names_shapes_and_types(self):
    w12_file.save(self.path, some_tensors())
    with safetensors.safe_open(self.path, "numpy") as file:
      self.assertEqual(
        file.metadata(), {"format": w12_file.FORMAT, "version": "1"}
      )
      parts = {n for n in file.keys() if n.startswith(f"{MATRIX}.")}
      low = file.get_slice(f"{MATRIX}.low")
      self.assertEqual((low.get_dtype(), low.get_shape()), ("U16", [9, 100]))
    self.assertEqual(parts, {f"{MATRIX}.{p}" for p in w12_storage.NAMES})

  def test_the_same_tensors_give_the_same_bytes(self):
    tensors = some_tensors()
    w12_file.save(self.path, tensors)
    content = self.path.read_bytes()
    w12_file.save(self.path, dict(reversed(tensors.items())))
    self.assertEqual(self.path.read_bytes(), content)
    self.assertEqual(list(self.scratch.iterdir()), [self.path])

  def test_writes_as_the_library_does(self):
    tensors = some_tensors()
    tensor_file.write(self.path, tensors, {"format": "pt"})
    whole = {n: np.asarray(a) for n, a in tensors.items()}
    theirs = safetensors.numpy.save(whole, metadata={"format": "pt"})
    self.assertEqual(self.path.read_bytes(), theirs)


class BadInputTest(W12FileTestCase):
  def edit(self, change, **metadata):
    w12_file.save(self.path, some_tensors())
    tensors = safetensors.numpy.load_file(self.path)
    tensors = {name: array.copy() for name, array in tensors.items()}
    change(tensors)
    about = {"format": w12_file.FORMAT, "version": "1"} | metadata
    safetensors.numpy.save_file(tensors, self.path, about)

  @parameterized.parameters(0, 4, 8, 100, 5000, -1)
  def test_truncated(self, size):
    w12_file.save(self.path, some_tensors())
    self.path.write_bytes(self.path.read_bytes()[:size])
    self.refused("model.w12.safetensors: truncated or not safetensors")

  @parameterized.parameters(
    {"version": "2", "pattern": "version is '2', this release reads '1'"},
    {"format": "pt", "pattern": "format is 'pt', this release reads 'specp"},
  )
  def test_other_versions_and_formats(self, pattern, **metadata):
    self.edit(lambda tensors: None, **metadata)
    self.refused(f"model.w12.safetensors: {pattern}")

  def test_a_released_file_is_none(self):
    safetensors.numpy.save_file(some_tensors() | {"scalar": np.ones(1)},
                                self.path)  # fmt: skip
    self.refused("format is None, this release reads 'specpilot-w12'")
    w12_file.save(self.path, some_tensors())
    content = self.path.read_bytes()
    metadata = content[content.index(b'{"format') : content.index(b"}") + 1]
    null = b"null".ljust(len(metadata))
    self.path.write_bytes(content.replace(metadata, null, 1))
    self.refused("format is None, this release reads 'specpilot-w12'")

  @parameterized.parameters(*w12_storage.NAMES)
  def test_missing_part(self, part):
    self.edit(lambda tensors: tensors.pop(f"{MATRIX}.{part}"))
    self.refused(f"part '{part}' of tensor '{MATRIX}' is missing")

  def test_twice(self):
    self.edit(lambda t: t.update({MATRIX: np.zeros(1, np.float32)}))
    self.refused(f"tensor '{MATRIX}' is there twice")

  @parameterized.parameters(
    ("version", lambda a: a + 1, r"version is \[2\], expected \[1\]"),
    ("shape", lambda a: a[:1], "shape is .*expected int32 .2"),
    ("shape", lambda a: a.reshape(2, 1), "shape is .*expected int32 .2"),
    ("shape", lambda a: a - 4, r"expected uint16 \[8, 96\] for a matrix"),
    ("shape", lambda a: -a, "expected one row and column at least"),
    ("low", lambda a: a[1:], r"low is uint16 \[8, 100\], expected"),
    ("base", lambda a: a * 0, "base of row 0 is 0, expected 1 to 240"),
    ("view01", lambda a: a & 0x8787, "planes hold code 0 with a mantissa"),
    ("view23", pad_with_codes, "planes are not 0 at column 0 of row 33"),
    ("columns", lambda a: a - 101, "expected 0 to 99|not 0"),
    ("low", lambda a: a.astype(np.float64), "has dtype F64, supported"),
  )
  def test_damaged_parts(self, part, change, pattern):
    name = f"{MATRIX}.{part}"

    def edit(tensors):
      tensors[name] = np.ascontiguousarray(change(tensors[name]))

    self.edit(edit)
    self.refused(pattern)
    self.refused(MATRIX)
    self.refused("model.w12.safetensors: tensor")

  def test_no_file(self):
    self.refused("model.w12.safetensors: not a file")
    self.path.mkdir()
    self.refused("model.w12.safetensors: not a file")

  @parameterized.parameters(
    ({"m": np.ones((2, 2))}, "'m' has dtype float64, supported are bfloat16"),
    ({"m.low": np.ones(2, np.float32)}, "'m.low' is named like a W12 part"),
  )
  def test_not_stored(self, tensors, pattern):
    self.refused(pattern, w12_file.save, self.path, tensors)
    self.assertFalse(self.path.exists())

  def test_what_cannot_be_written_leaves_nothing(self):
    absent = self.scratch / "absent" / "file"
    self.refused("absent/file: cannot be written", w12_file.save, absent,
                 some_tensors())  # fmt: skip
    error = OSError(28, "No space left on device")
    with mock.patch.object(tensor_file.os, "replace", side_effect=error):
      self.refused("cannot be written .No space left", w12_file.save,
                   self.path, some_tensors())  # fmt: skip
    self.assertEmpty(list(self.scratch.iterdir()))


class FolderTest(W12FileTestCase):
  """Hugging Face folders with a W12 file."""

  def setUp(self):
    super().setUp()
    self.folder = self.scratch / "model"
    self.path = self.folder / w12_file.WEIGHTS
    self.config = builders.config("qwen3_5", name="model")
    self.params = builders.params(self.config, builders.BFLOAT16)
    hf.save(self.folder, self.config, self.params, encode=True)

  def refused(self, pattern, call=hf.load, *args):
    super().refused(pattern, call, *(args or (self.folder,)))

  def edit(self, change):
    tensors = w12_file.load(self.path)
    change(tensors)
    w12_file.save(self.path, tensors)

  def test_round_trip(self):
    self.assertEqual(
      {path.name for path in self.folder.iterdir()},
      {hf.CONFIG, w12_file.WEIGHTS},
    )
    loaded = hf.load(self.folder)
    self.assertEqual(loaded.config, self.config)
    self.assert_same(loaded.params, self.params)
    self.assertEqual(set(loaded.sha256), {hf.CONFIG, w12_file.WEIGHTS})

  def test_the_same_tensors_as_without(self):
    plain = self.scratch / "plain"
    hf.save(plain, self.config, self.params)
    self.assert_same(
      w12_file.load(self.path),
      safetensors.numpy.load_file(plain / hf.WEIGHTS),
    )

  def test_both_files(self):
    for file in (hf.WEIGHTS, hf.INDEX):
      (self.folder / file).touch()
      self.refused(f"both {file} and {w12_file.WEIGHTS} are there")
      (self.folder / file).unlink()
    hf.load(self.folder)

  def test_tensors_that_do_not_fit(self):
    name = "model.embed_tokens.weight"
    whole = w12_file.load(self.path)
    self.edit(lambda tensors: tensors.pop(name))
    self.refused(f"tensor '{name}' is missing")
    self.edit(lambda tensors: tensors.update({name: whole[name][4:]}))
    self.refused(rf"tensor '{name}' has shape \[296, 32\], expected")
    self.edit(lambda tensors: tensors.update({name: whole[name] * np.inf}))
    self.refused(f"tensor '{name}' has .* NaN or infinite")
    self.edit(lambda t: t.update({name: whole[name], "more": whole[name]}))
    self.refused("unknown tensor 'more'")

  def test_damage(self):
    content = self.path.read_bytes()
    self.path.write_bytes(content[:-1])
    self.refused("model.w12.safetensors: truncated or not safetensors")
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = "model.embed_tokens.weight.base"
    at = 8 + size + header[name]["data_offsets"][0]
    self.path.write_bytes(content[:at] + b"\0" + content[at + 1 :])
    self.refused("embed_tokens.weight': base of row 0 is 0, expected 1 to 240")
    self.path.unlink()
    self.refused("no model.safetensors and .*, nor model.w12.safetensors")


if __name__ == "__main__":
  absltest.main()
