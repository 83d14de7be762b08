"""Orbax: exact round trips, and what is refused."""

import dataclasses
import json
import logging
import pathlib
import shutil
import tempfile
from typing import cast

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels.w12_array import W12Array
from specpilot_jax import configs
from specpilot_jax.checkpoints import (
  Checkpoint,
  conversion,
  hf,
  load_checkpoint,
  orbax,
  orbax_arrays,
  w12_storage,
)
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders


class OrbaxTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)
    self.folder = self.scratch / "saved"

  def checkpoint(self, family="llama", dtype=np.float32, tokenizer=None):
    config = builders.config(family)
    return Checkpoint(
      config=config,
      params=builders.params(config, dtype),
      tokenizer=tokenizer,
      source="somewhere/model.gguf",
      notes=("weights are dequantised Q4_1 (3 tensors)",),
      sha256={"model.gguf": "ab" * 32},
    )

  def refused(self, pattern, call=None, *args):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      (call or orbax.load)(*(args or (self.folder,)))
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.product(
    family=configs.FAMILIES, dtype=(np.float32, np.float16, builders.BFLOAT16)
  )
  def test_round_trip_is_bit_exact(self, family, dtype):
    saved = self.checkpoint(family, dtype)
    # Signed zeros and subnormals are values too.
    saved.params["norm.weight"][:3] = [-0.0, 1e-40, 6e-8]
    orbax.save(self.folder, saved)
    loaded = load_checkpoint(self.folder)
    self.assertEqual(list(loaded.params), list(saved.params))
    for name, array in saved.params.items():
      self.assertEqual(loaded.params[name].dtype, array.dtype)
      self.assertEqual(loaded.params[name].tobytes(), array.tobytes(), name)
    for field in ("config", "source", "notes", "sha256", "tokenizer"):
      self.assertEqual(getattr(loaded, field), getattr(saved, field))

  def test_tokenizer_lies_beside_the_weights(self):
    tokenizer = builders.tokenizer()
    orbax.save(self.folder, self.checkpoint(tokenizer=tokenizer))
    loaded = orbax.load(self.folder).tokenizer
    assert loaded is not None
    self.assertEqual(loaded.files, tokenizer.files)
    self.assertEqual(loaded.encode("the cat"), tokenizer.encode("the cat"))
    (self.folder / "tokenizer" / "tokenizer.json").unlink()
    self.refused("tokenizer.json: cannot be read")

  def test_refuses_a_folder_in_use(self):
    self.folder.mkdir()
    (self.folder / "kept.txt").write_text("kept")
    saved = self.checkpoint()
    self.refused("exists and is not an empty", orbax.save, self.folder, saved)
    self.assertEqual([p.name for p in self.scratch.rglob("*.*")], ["kept.txt"])
    (self.folder / "kept.txt").unlink()
    orbax.save(self.folder, saved)  # An empty folder is free.
    self.refused("exists and is not an empty", orbax.save, self.folder, saved)
    orbax.load(self.folder)

  def test_a_failed_save_leaves_nothing(self):
    saved = self.checkpoint()
    del saved.params["norm.weight"]
    self.refused("parameter 'norm.weight' is missing",
                 orbax.save, self.folder, saved)  # fmt: skip
    broken = dataclasses.replace(
      self.checkpoint(tokenizer=builders.tokenizer()),
      sha256={"model.gguf": cast(str, object())},
    )
    with self.assertRaises(TypeError):  # Metadata is written last.
      orbax.save(self.folder, broken)
    self.assertEqual(list(self.scratch.iterdir()), [])

  def test_metadata(self):
    orbax.save(self.folder, self.checkpoint())
    path = self.folder / orbax.METADATA
    metadata = json.loads(path.read_text())

    def write(**changes):
      path.write_text(json.dumps(metadata | changes))

    write(version=3)
    self.refused("specpilot.json: version is 3, this release reads 1 and 2")
    write(format="other")
    self.refused("specpilot.json: format is 'other', expected")
    write(notes=None)
    self.refused("field 'notes' is missing or malformed")
    write(config={k: v for k, v in metadata["config"].items() if k != "family"})
    self.refused("config field 'family' is missing")
    write(config=metadata["config"] | {"colour": 1})
    self.refused("config field 'colour' is unknown")
    write(config=metadata["config"] | {"hidden_size": 16})
    self.refused(r"'embed.weight' has shape \[300, 32\], expected \[300, 16\]")
    entry = {"shape": [32], "dtype": "bfloat16"}
    write(params=metadata["params"] | {"norm.weight": entry})
    self.refused("'norm.weight' has dtype float32, specpilot.json says bfloat")
    path.write_text("{")
    self.refused("specpilot.json: not JSON")
    path.unlink()
    self.refused("specpilot.json is missing")

  # Orbax leaves reads to an event loop that is closed by the time they end.
  @pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
  def test_missing_and_damaged_weights(self):
    saved = self.checkpoint()
    orbax.save(self.folder, saved)
    other = self.scratch / "other"
    fewer = dataclasses.replace(
      saved.config, layer_types=(configs.ATTENTION,), tie_embeddings=True
    )
    orbax.save(
      other,
      dataclasses.replace(
        saved, config=fewer, params=builders.params(fewer, seed=1)
      ),
    )
    whole = self.scratch / "whole"
    (self.folder / "params").rename(whole)
    self.refused("params: the weights are missing")
    shutil.copytree(other / "params", self.folder / "params")
    self.refused("parameter 'layers.1.input_norm.weight' is missing")
    shutil.rmtree(other / "params")
    shutil.copytree(whole, other / "params")
    self.refused("unknown parameter 'layers.1", orbax.load, other)

    def truncated(content):
      return content[: len(content) // 2]

    for pattern, damage, what in (
      ("d/*", truncated, "unreadable metadata"),
      ("d/*", lambda b: b[:-9] + b"damaged!!", "unreadable metadata"),
      ("_METADATA", truncated, "unreadable metadata"),
      ("manifest.ocdbt", truncated, "unreadable metadata"),
      ("ocdbt.*/d/*", truncated, "OUT_OF_RANGE|DATA_LOSS"),
    ):
      shutil.rmtree(self.folder / "params")
      shutil.copytree(whole, self.folder / "params")
      for file in (self.folder / "params").glob(pattern):
        file.write_bytes(damage(file.read_bytes()))
      # The error says it, and nothing else does.
      with self.assertNoLogs("absl", "DEBUG"):
        self.refused(rf"params: damaged Orbax checkpoint \(({what})")
    self.assertFalse(logging.getLogger("absl").disabled)


class StoredW12Test(parameterized.TestCase):
  """What is refused of a matrix in W12."""

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name) / "saved"
    self.name = "layers.0.mlp.down.weight"
    config = builders.config("qwen3")
    params = builders.params(config, builders.BFLOAT16)
    matrix = params[self.name]
    matrix[3, 5] = 3e38
    matrix[7, 60] = 1e-38
    hf.save(self.folder.parent / "source", config, params)
    conversion.convert(self.folder.parent / "source", self.folder, "w12")
    self.params = self.folder / "params"
    self.path = self.folder / orbax.METADATA
    self.metadata = json.loads(self.path.read_text())
    self.entry = self.metadata["params"][self.name]

  def refused(self, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      orbax.load(self.folder)
    self.assertLen(str(caught.exception).splitlines(), 1)

  def write_metadata(self):
    self.path.write_text(json.dumps(self.metadata))

  def chunk(self, part):
    chunks = (self.params / f"{self.name}.{part}").iterdir()
    return next(path for path in chunks if path.name[0] != ".")

  @parameterized.parameters(*w12_storage.NAMES)
  def test_parts(self, part):
    orbax.load(self.folder)
    chunk = self.chunk(part)
    content = chunk.read_bytes()
    at = len(content) // 2
    flipped = bytes([content[at] ^ 16])
    chunk.write_bytes(content[:at] + flipped + content[at + 1 :])
    self.refused(f"part '{part}' of parameter '{self.name}' is damaged")
    # As if it had been written like that: the codec's own checks remain.
    recorded = self.entry["parts"][part]
    array = orbax_arrays.read(self.params, [f"{self.name}.{part}"])[0]
    recorded["crc32"] = orbax_arrays.crc32(array)
    self.write_metadata()
    if part in ("row_start", "columns", "shape", "version"):
      self.refused(f"parameter '{self.name}': ")
    chunk.write_bytes(content[:-1])
    self.refused(f"damaged Orbax checkpoint .*'{self.name}.{part}'")
    chunk.unlink()
    self.refused(f"damaged Orbax checkpoint .*'{self.name}.{part}'")
    shutil.rmtree(chunk.parent)
    self.refused(f"params: part '{part}' of parameter '{self.name}' is missing")

  def test_records(self):
    parts = self.entry["parts"]
    low = parts.pop("low")
    self.write_metadata()
    self.refused(f"part 'low' of parameter '{self.name}' is unknown")
    parts["low"] = low
    parts["high"] = low
    self.write_metadata()
    self.refused(f"part 'high' of parameter '{self.name}' is missing")
    del parts["high"]
    parts["low"] = low | {"shape": [1, 64]}
    self.write_metadata()
    self.refused(r"part 'low' .* has shape \[8, 64\], specpilot.json says")
    parts["low"] = low | {"dtype": "uint8"}
    self.write_metadata()
    self.refused("part 'low' .* has dtype uint16, specpilot.json says uint8")
    parts["low"] = 3
    self.write_metadata()
    self.refused(f"specpilot.json: the entry of '{self.name}' is malformed")
    parts["low"] = low
    self.entry["encoding"] = "w11"
    self.write_metadata()
    self.refused(f"'{self.name}' has encoding 'w11', this release reads 'w12'")
    del self.entry["encoding"]
    self.write_metadata()
    self.refused(f"params: parameter '{self.name}' is missing")
    self.metadata["params"][self.name] = []
    self.write_metadata()
    self.refused(f"specpilot.json: the entry of '{self.name}' is malformed")

  def test_metadata_of_an_array(self):
    path = self.params / f"{self.name}.low" / ".zarray"
    path.write_text(path.read_text()[:9])
    self.refused(rf"\(unreadable metadata in {self.name}.low/.zarray\)")

  def test_weights(self):
    for call in (orbax.load, load_checkpoint):
      for weights, kind in (("w12", W12Array), ("bf16", np.ndarray)):
        loaded = call(self.folder, weights=weights)
        self.assertIsInstance(loaded.params[self.name], kind)
      with self.assertRaisesRegex(SpecPilotError, "weights='w8' is not one of"):
        call(self.folder, weights="w8")


if __name__ == "__main__":
  absltest.main()
