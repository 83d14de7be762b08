"""Conversion: every way there and back, interruptions, refusals, memory."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tracemalloc
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest, parameterized

from pallas_kernels.w12_array import W12Array
from specpilot_jax import configs
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints import (
  conversion,
  hf,
  hf_writer,
  load_checkpoint,
  orbax,
  orbax_arrays,
  progress,
  source,
  stored,
  unfinished,
  w12,
)
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders, test_gguf

W12, BF16, SAFETENSORS = conversion.FORMATS


def contents(folder):
  """Relative path -> bytes of all files."""
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob("*")
    if path.is_file()
  }


class ConversionTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)
    self.source = self.scratch / "source"
    self.output = self.scratch / "output"
    self.partial = self.scratch / "output.partial"

  def write_source(self, family="qwen3_5", dtype=builders.BFLOAT16, **changes):
    config = builders.config(family)
    params = builders.params(config, dtype) | changes
    files = builders.tokenizer_files()
    hf.save(self.source, config, params, tokenizer_files=files)
    return hf.load(self.source)

  def convert(self, kind=W12, origin=None, output=None, **kwargs):
    return conversion.convert(
      origin or self.source, output or self.output, kind, **kwargs
    )

  def refused(self, pattern, *args, **kwargs):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      self.convert(*args, **kwargs)
    self.assertLen(str(caught.exception).splitlines(), 1)

  def interrupted(self, number, error, kind=W12):
    """Converts until the write of a parameter fails."""
    writes = []
    write = unfinished.Unfinished.record

    def record(work, name, entry):
      if len(writes) == number:
        raise error
      writes.append(name)
      write(work, name, entry)

    with mock.patch.object(unfinished.Unfinished, "record", record):
      with self.assertRaises((SpecPilotError, type(error))) as caught:
        self.convert(kind)
    return writes, caught.exception


class RoundTripTest(ConversionTestCase):
  @parameterized.product(family=configs.FAMILIES, kind=(W12, BF16))
  def test_there_and_back_is_byte_for_byte(self, family, kind):
    loaded = self.write_source(family)
    there = self.convert(kind, verify=True)
    self.assertTrue(there.verified)
    self.assertEqual(there.parameters, len(loaded.params))
    back = self.scratch / "back"
    self.convert(SAFETENSORS, self.output, back, verify=True)
    for file in (hf.WEIGHTS, *builders.tokenizer_files()):
      self.assertEqual(
        (back / file).read_bytes(), (self.source / file).read_bytes(), file
      )
    again = hf.load(back)
    self.assertEqual(
      dataclasses.replace(again.config, name="source"), loaded.config
    )
    self.assertIsNone(conversion.different(again.params, loaded.params))
    self.assertFalse(self.partial.exists())

  def test_formats_from_orbax_to_orbax(self):
    loaded = self.write_source()
    self.convert(BF16)
    second, third = self.scratch / "second", self.scratch / "third"
    self.convert(W12, self.output, second, verify=True)
    self.convert(W12, second, third, verify=True)
    back = orbax.load(third, weights="bf16")
    self.assertIsNone(conversion.different(back.params, loaded.params))
    # What it was made from at first stays known.
    self.assertEqual(back.sha256, loaded.sha256)

  def test_w12_leaves_and_what_passes_unchanged(self):
    config = builders.config("qwen3_5")
    wide = {
      name: array
      for name, array in builders.params(config).items()
      if name.endswith(("a_log", "norm.weight", "conv_weight"))
    }
    loaded = self.write_source(**wide)
    self.convert(verify=True)
    found = orbax.load(self.output)
    for name, value in found.params.items():
      matrix = value.ndim == 2 and "conv" not in name
      self.assertEqual(isinstance(value, W12Array), matrix, name)
      self.assertEqual(value.dtype, loaded.params[name].dtype, name)
    decoded = load_checkpoint(self.output)
    self.assertIsNone(conversion.different(decoded.params, loaded.params))
    metadata = json.loads((self.output / orbax.METADATA).read_text())
    self.assertEqual(metadata["version"], orbax.W12_VERSION)
    self.assertEqual(metadata["sha256"], dict(loaded.sha256))
    self.assertEqual(metadata["conversion"]["sha256"], dict(loaded.sha256))

  @parameterized.parameters(W12, BF16)
  def test_orbax_restores_it_as_one_tree(self, kind):
    loaded = self.write_source()
    self.convert(kind)
    tree = ocp.PyTreeCheckpointer().restore(self.output / orbax.PARAMS)
    self.assertEqual(set(tree), set(loaded.params))
    head = tree["lm_head.weight"]
    if kind == BF16:
      self.assertEqual(
        head.tobytes(), loaded.params["lm_head.weight"].tobytes()
      )
    else:
      found = orbax.load(self.output).params["lm_head.weight"]
      self.assertEqual(head["low"].tobytes(), found.low.tobytes())

  def test_saved_w12_loads(self):
    self.write_source()
    self.convert()
    first = orbax.load(self.output)
    orbax.save(self.scratch / "saved", first)
    second = orbax.load(self.scratch / "saved", weights="bf16")
    first = orbax.load(self.output, weights="bf16")
    self.assertIsNone(conversion.different(first.params, second.params))

  def test_shards(self):
    loaded = self.write_source()
    self.convert(SAFETENSORS, max_shard_bytes=20_000, verify=True)
    back = hf.load(self.output)
    self.assertIsNone(conversion.different(back.params, loaded.params))
    files = sorted(path.name for path in self.output.glob("*.safetensors"))
    self.assertGreater(len(files), 2)
    library = self.scratch / "library"
    hf.save(library, loaded.config, loaded.params, max_shard_bytes=20_000)
    for file in (*files, hf.INDEX, hf.CONFIG):
      self.assertEqual(
        (self.output / file).read_bytes(), (library / file).read_bytes()
      )

  def test_a_matrix_that_w12_does_not_suit(self):
    config = builders.config("llama")
    down = builders.params(config, builders.BFLOAT16)[
      "layers.0.mlp.down.weight"
    ]
    # A power of two of its own for every column: most are outside a window.
    down = np.ldexp(down.astype(np.float32), np.arange(64) - 32)
    down = down.astype(builders.BFLOAT16)
    self.write_source("llama", **{"layers.0.mlp.down.weight": down})
    report = self.convert(verify=True)
    self.assertEqual(list(report.kept_bf16), ["layers.0.mlp.down.weight"])
    metadata = json.loads((self.output / orbax.METADATA).read_text())
    entry = metadata["params"]["layers.0.mlp.down.weight"]
    self.assertRegex(entry["kept_bf16"], "% of its weights are outside")
    kept = orbax.load(self.output).params["layers.0.mlp.down.weight"]
    self.assertEqual(kept.tobytes(), down.tobytes())

  def test_rows_come_in_blocks(self):
    loaded = self.write_source()
    with mock.patch.object(source, "BLOCK_BYTES", 300):
      self.convert(W12, verify=True)
      back = self.scratch / "back"
      self.convert(SAFETENSORS, self.output, back, verify=True)
      again = hf.load(back)
    self.assertIsNone(conversion.different(again.params, loaded.params))


class RoundingTest(ConversionTestCase):
  @parameterized.product(kind=(W12, BF16), dtype=(np.float16, np.float32))
  def test_matrices_on_request_alone(self, kind, dtype):
    loaded = self.write_source("llama", dtype)
    self.refused(
      f"source: matrix 'embed.weight' is {np.dtype(dtype)}; {kind} would round"
      " it: give --round_to_bf16",
      kind,
    )
    self.assertEqual(list(self.scratch.iterdir()), [self.source])
    report = self.convert(kind, round_to_bf16=True, verify=True)
    matrices = [n for n, a in loaded.params.items() if a.ndim == 2]
    wanted = {n: a for n, a in loaded.params.items()} | {
      n: loaded.params[n].astype(builders.BFLOAT16) for n in matrices
    }
    changed = sum(
      np.count_nonzero(wanted[n].astype(dtype) != loaded.params[n])
      for n in matrices
    )
    values = sum(loaded.params[n].size for n in matrices)
    self.assertEqual((report.changed, report.rounded), (changed, values))
    self.assertIn(
      f"weights are rounded to bfloat16 ({changed} of {values} changed)",
      report.notes,
    )
    back = load_checkpoint(self.output)
    self.assertEqual(back.notes, report.notes)
    self.assertIsNone(conversion.different(back.params, wanted))

  def test_safetensors_keep_their_types(self):
    loaded = self.write_source("llama", np.float32)
    self.convert(SAFETENSORS, verify=True)
    back = hf.load(self.output)
    self.assertIsNone(conversion.different(back.params, loaded.params))

  def test_overflow(self):
    head = np.full((300, 32), 3.4e38, np.float32)
    self.write_source("llama", np.float32, **{"lm_head.weight": head})
    self.refused("'lm_head.weight' overflows bfloat16", round_to_bf16=True)
    self.assertFalse(self.output.exists())
    # Nobody can go on with it, and nobody has to delete it.
    self.assertFalse(self.partial.exists())

  def test_quantised_gguf(self):
    config = builders.config()
    tensors = test_gguf.gguf_tensors(config, builders.params(config))
    path = self.scratch / "tiny.gguf"
    kinds = {
      n: test_gguf.Q8_0 for n in tensors if "ffn" in n and "norm" not in n
    }
    test_gguf.write(path, tensors, test_gguf.metadata(config), kinds=kinds)
    self.refused("tiny.gguf: matrix .* is float32", W12, path)
    with mock.patch.object(source, "BLOCK_BYTES", 300):
      report = self.convert(W12, path, round_to_bf16=True, verify=True)
    self.assertGreater(report.changed, 0)
    self.assertLen(report.notes, 2)
    loaded, back = load_checkpoint(path), load_checkpoint(self.output)
    for name, array in loaded.params.items():
      wanted = array.astype(back.params[name].dtype)
      self.assertEqual(back.params[name].tobytes(), wanted.tobytes(), name)


class ResumeTest(ConversionTestCase):
  @parameterized.parameters(*conversion.FORMATS)
  def test_goes_on_where_it_stopped(self, kind):
    loaded = self.write_source()
    done, _ = self.interrupted(7, KeyboardInterrupt(), kind)
    self.assertLen(done, 7)
    self.assertFalse(self.output.exists())
    result = self.partial / unfinished.RESULT
    with self.assertRaisesRegex(SpecPilotError, "neither a Hugging Face"):
      load_checkpoint(result)
    self.assertEqual(list(result.rglob(orbax.METADATA)), [])
    whole = {
      path: path.stat().st_mtime_ns
      for path in result.rglob("*")
      if path.is_file()
      and path.relative_to(result)
      .as_posix()
      .startswith(tuple(f"params/{name}" for name in done))
    }
    self.assertEqual(bool(whole), kind != SAFETENSORS)
    report = self.convert(kind, verify=True)
    self.assertEqual(report.resumed, 7)
    for path, written in whole.items():
      moved = self.output / path.relative_to(result)
      self.assertEqual(moved.stat().st_mtime_ns, written, path)
    back = load_checkpoint(self.output)
    self.assertIsNone(conversion.different(back.params, loaded.params))
    self.assertFalse(self.partial.exists())
    # It is what it would have been at once.
    once = self.scratch / "once"
    self.convert(kind, output=once)
    for file, content in contents(once).items():
      if not file.startswith("params/_"):  # Orbax notes the time.
        self.assertEqual((self.output / file).read_bytes(), content, file)

  def test_what_is_lost_of_the_first_part_is_written_again(self):
    loaded = self.write_source()
    done, _ = self.interrupted(7, KeyboardInterrupt())
    params = self.partial / unfinished.RESULT / orbax.PARAMS
    first = sorted(path for path in params.iterdir())[0]
    file = next(path for path in first.iterdir() if path.name[0] != ".")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    journal = self.partial / unfinished.JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])
    report = self.convert(verify=True)
    self.assertLess(report.resumed, 7)
    back = load_checkpoint(self.output)
    self.assertIsNone(conversion.different(back.params, loaded.params))

  def test_refuses_another_source_or_other_settings(self):
    self.write_source()
    self.interrupted(3, KeyboardInterrupt())
    before = contents(self.partial)
    self.refused(r"output.partial: begun with to='w12', not 'bf16'; ", BF16)
    self.refused("begun with round_to_bf16=False, not True", round_to_bf16=True)
    content = (self.source / hf.WEIGHTS).read_bytes()
    (self.source / hf.WEIGHTS).write_bytes(content[:-1] + b"\x01")
    self.refused(
      "output.partial: model.safetensors of the source is not what it was when"
      " the conversion began; delete .*output.partial to begin anew"
    )
    self.assertEqual(contents(self.partial), before)
    (self.source / hf.WEIGHTS).write_bytes(content)
    (self.partial / unfinished.BEGUN).unlink()
    self.refused("output.partial: holds no unfinished conversion")

  def test_one_process_at_a_time(self):
    self.write_source()
    begun = {"sha256": {}}
    with unfinished.unfinished(self.output, begun):
      self.refused("output.partial: another process converts to it")
    self.assertFalse(self.partial.exists())

  def test_full_disk(self):
    self.write_source()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = []
    write = orbax_arrays.write

    def fails(folder, arrays):
      if len(written) == 4:
        raise full
      written.append(arrays)
      write(folder, arrays)

    with mock.patch.object(orbax_arrays, "write", fails):
      self.refused(
        r"output: cannot be written \(No space left on device\); run it again"
        " to go on where it stopped"
      )
    self.assertFalse(self.output.exists())
    with self.assertRaises(SpecPilotError):
      load_checkpoint(self.partial / unfinished.RESULT)
    self.assertEqual(self.convert().resumed, 4)

  @parameterized.parameters(*conversion.FORMATS)
  def test_full_disk_at_the_end(self, kind):
    self.write_source()
    write = common.write_whole

    def fails(path, content):
      if path.name in (orbax.METADATA, hf.CONFIG):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      write(path, content)

    with mock.patch.object(common, "write_whole", fails):
      self.refused("No space left on device", kind)
    self.assertFalse(self.output.exists())
    with self.assertRaises(SpecPilotError):
      load_checkpoint(self.partial / unfinished.RESULT)
    self.convert(kind, verify=True)

  def test_nothing_remains_of_what_could_not_begin(self):
    self.write_source()
    _, error = self.interrupted(0, OSError(errno.EIO, "broken"))
    self.assertRegex(str(error), r"output: cannot be written \(broken\)$")
    self.assertEqual(list(self.scratch.iterdir()), [self.source])

  def test_taken_output(self):
    self.write_source()
    self.output.mkdir()
    self.convert()  # An empty folder is free.
    self.refused("output: exists and is not an empty folder")


class CommandTest(ConversionTestCase):
  def run_command(self, *args):
    return subprocess.run(
      [
        sys.executable,
        "-m",
        "specpilot_jax.checkpoints.convert",
        f"--source={self.source}",
        f"--output={self.output}",
        *args,
      ],
      cwd=pathlib.Path(__file__).parents[2],
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=300,
    )

  def test_output_and_errors(self):
    loaded = self.write_source("llama", np.float32)
    done = self.run_command()
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, r"^error: .*give --round_to_bf16\n$")
    done = self.run_command("--round_to_bf16", "--verify")
    self.assertEqual((done.returncode, done.stderr), (0, ""))
    lines = done.stdout.splitlines()
    self.assertRegex(lines[0], r"output: w12, .* read back bit for bit$")
    matrices = [a for a in loaded.params.values() if a.ndim == 2]
    values = sum(a.size for a in matrices)
    self.assertRegex(lines[1], rf"^rounding .* changed \d+ of {values} values$")
    self.assertRegex(lines[2], "^note: weights are rounded to bfloat16")

  def test_progress(self):
    stream = io.StringIO()
    with (
      mock.patch.object(progress, "LINE_EVERY_S", 0.0),
      contextlib.redirect_stderr(stream),
    ):
      self.write_source()
      self.convert(show_progress=True, verify=True)
    lines = stream.getvalue().splitlines()
    self.assertRegex(lines[1], r"^to w12: \d+ of \d+ MB \(.* MB/s\), next \w")
    self.assertStartsWith(lines[-1], "verifying: ")


class VerifyTest(ConversionTestCase):
  @parameterized.product(kind=conversion.FORMATS, recorded=(False, True))
  def test_a_flipped_bit(self, kind, recorded):
    """With a damaged file, and with a checksum of the damaged bytes."""
    self.write_source()
    crc32, write = orbax_arrays.crc32, hf_writer.HuggingFaceWriter._write
    flipped = []

    def flip(array):
      flat = np.ascontiguousarray(array).copy()
      if not flipped and flat.nbytes > 1000:
        flat.reshape(-1).view(np.uint8)[500] ^= 4
        flipped.append(True)
      return flat

    def arrays(name, value):
      found = stored_arrays(name, value)
      return {key: flip(array) for key, array in found.items()}

    def flipped_write(writer, file, offset, content):
      write(writer, file, offset, flip(content))

    stored_arrays = stored.arrays
    with (
      mock.patch.object(stored, "arrays", arrays),
      mock.patch.object(hf_writer.HuggingFaceWriter, "_write", flipped_write),
      mock.patch.object(
        orbax_arrays, "crc32", (lambda _: 0) if recorded else crc32
      ),
      mock.patch.object(
        hf_writer.zlib,
        "crc32",
        (lambda *_: 0) if recorded else hf_writer.zlib.crc32,
      ),
    ):
      self.refused("embed|embed_tokens", kind, verify=True)
    self.assertFalse(self.output.exists())
    report = self.convert(kind, verify=True)
    if not recorded:  # With a checksum of 0 none of them is whole.
      self.assertEqual(report.resumed, report.parameters - 1)


class MemoryTest(ConversionTestCase):
  @parameterized.parameters(*conversion.FORMATS)
  def test_under_twice_the_largest_parameter(self, kind):
    config = builders.config(
      "llama", vocab_size=16384, hidden_size=256, num_heads=4, head_dim=64,
      rotary_dim=64, intermediate_size=4096, num_kv_heads=4,
      layer_types=(configs.ATTENTION,) * 3,
    )  # fmt: skip
    hf.save(self.source, config, builders.params(config, builders.BFLOAT16))
    largest = 16384 * 256 * 2
    total = (self.source / hf.WEIGHTS).stat().st_size
    self.assertGreater(total, 3 * largest)
    with (
      mock.patch.object(source, "BLOCK_BYTES", 1 << 16),
      mock.patch.object(w12, "BLOCK", 1 << 15),
    ):
      self.convert(kind, output=self.scratch / "warm")
      tracemalloc.start()
      self.addCleanup(tracemalloc.stop)
      before, _ = tracemalloc.get_traced_memory()
      self.convert(kind, verify=True)
      _, peak = tracemalloc.get_traced_memory()
    self.assertLess(peak - before, 2 * largest)
    if kind == SAFETENSORS:
      self.assertLess(peak - before, largest // 4)


if __name__ == "__main__":
  absltest.main()
