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

from specpilot_jax import configs
from specpilot_jax.checkpoints import Checkpoint, load_checkpoint, orbax
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


if __name__ == "__main__":
  absltest.main()
