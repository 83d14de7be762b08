"""The stages as one run: what each leaves for the next, and bad input."""

import dataclasses
import json
import pathlib
import tempfile
import time
from unittest import mock

import numpy as np
import safetensors
from absl.testing import absltest, parameterized

from specpilot_jax import loading
from specpilot_jax.checkpoints import ZOO, hf
from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.config import DFlash2Config, DSparkConfig
from specpilot_jax.zoo import data, optimizer, recipes, stages, store
from specpilot_jax.zoo.text import Rows
from tests.checkpoints.builders import BFLOAT16
from tests.decoding import kit
from tests.zoo.test_training import drafter_config

TARGET = kit.hybrid(
  name=ZOO, vocab_size=recipes.VOCABULARY, tie_embeddings=True
)
SCHEDULE = recipes.Schedule(
  phases=(recipes.Phase(steps=4, length=32, sequences=2),),
  peak=1e-2,
  warmup=1,
  muon=True,
)
DRAFTER = dataclasses.replace(
  recipes.ZOO_DRAFTER,
  config=dataclasses.replace(drafter_config(TARGET), mask_token_id=3),
  schedule=dataclasses.replace(SCHEDULE, muon=False),
  anchors=3,
  rounds=2,
  rows=4,
  prompt_tokens=8,
  visits=2,
)


OTHERS = {
  "zoo-dflash2": dataclasses.replace(
    DRAFTER,
    config=dataclasses.replace(
      drafter_config(TARGET, DFlash2Config), mask_token_id=3
    ),
    selector=1.0,
  ),
  "zoo-dspark": dataclasses.replace(
    DRAFTER,
    config=dataclasses.replace(
      drafter_config(TARGET, DSparkConfig), mask_token_id=3
    ),
    confidence=1.0,
  ),
}


def documents() -> list[data.Document]:
  rng = np.random.default_rng(0)
  texts = [
    "".join(f"v{rng.integers(1000)} = {rng.integers(99)}\n" for _ in range(60))
    for _ in range(300)
  ]
  return [data.Document(f"pkg/{i}.py", "MIT", t) for i, t in enumerate(texts)]


class StagesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.work = pathlib.Path(scratch.name) / "work"
    self.enterContext(kit.quick_compilation())
    self.enterContext(mock.patch.object(recipes, "TARGET", TARGET))
    self.enterContext(mock.patch.object(recipes, "TARGET_SCHEDULE", SCHEDULE))
    self.enterContext(
      mock.patch.dict(recipes.DRAFTERS, {ZOO: DRAFTER, **OTHERS})
    )
    self.enterContext(mock.patch.object(data, "corpus", documents))

  def run_stages(self, *wanted, name=ZOO, **kwargs):
    return stages.run(name, wanted or stages.STAGES, self.work, **kwargs)

  def refused(self, pattern, *wanted, **kwargs):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      self.run_stages(*wanted, **kwargs)
    self.assertLen(str(caught.exception).splitlines(), 1)

  def test_all(self):
    past = time.monotonic() - 1
    self.assertEqual(self.run_stages(deadline=past), "text")
    # What is held out is in no training text.
    kept = [json.loads(x) for x in (self.work / "held_out.jsonl").open()]
    held_out = {d.source for d in documents() if data.is_held_out(d)}
    self.assertNotEmpty(held_out)
    self.assertEqual({d["source"] for d in kept}, held_out)
    stream = np.load(self.work / "train.npy")
    ends = int((stream == recipes.END_ID).sum())
    self.assertEqual(ends, len(documents()) - len(held_out))

    trained = (self.work / stages.TARGET_FILE).read_bytes()
    self.assertIsNone(self.run_stages())
    self.assertEqual((self.work / stages.TARGET_FILE).read_bytes(), trained)
    first, second = (
      Rows.load(self.work / "text" / f"{i:03}.npz") for i in range(2)
    )
    self.assertFalse((first.tokens[:, :8] == second.tokens[:, :8]).all())
    release = self.work / "release"
    self.assertEqual(
      {p.name for p in release.iterdir()},
      {"target", "dflash", "prompts.jsonl", "prompts_512.jsonl.gz"},
    )
    for name in ("target", "dflash"):
      found = {path.name for path in (release / name).glob("*.safetensors")}
      self.assertEqual(found, {"model.w12.safetensors"})
    loaded = hf.load(release / "target")
    self.assertEqual(loaded.config.layer_types, TARGET.layer_types)
    with safetensors.safe_open(self.work / stages.TARGET_FILE, "numpy") as file:
      for name, array in loaded.params.items():
        rounded = file.get_tensor(name).astype(BFLOAT16)
        np.testing.assert_array_equal(array, rounded)
    drafter = drafter_io.load(release / "dflash", "float32")
    self.assertEqual(drafter.config.target_layers, (0, 2))
    self.assertIsNone(self.run_stages())  # all of it is there

    self.refused("holds a run of the recipe zoo", name="smollm2")
    path = self.work / stages.TARGET_FILE
    path.write_bytes(path.read_bytes()[:1000])
    self.refused("target.safetensors: damaged", "text")
    self.refused("target.safetensors: damaged", "release")
    self.assertTrue((release / "target").exists())

  def test_drafters_of_the_target_that_ships(self):
    """They share what the target said, and each is trained and released."""
    shipped = loading.LoadedModel(
      target=target_lib.build(
        TARGET, target_lib.random_params(TARGET, 1), "bfloat16"
      ),
      tokenizer=None,
      notes=(),
      sha256={},
    )
    with mock.patch.object(
      loading, "load_target", return_value=shipped
    ) as loaded:
      past = time.monotonic() - 1
      stopped = self.run_stages(name="zoo-dflash2", deadline=past)
      self.assertEqual(stopped, "text")
      self.assertIsNone(self.run_stages(name="zoo-dflash2"))
      text = {p: p.read_bytes() for p in (self.work / "text").iterdir()}
      self.assertIsNone(self.run_stages(name="zoo-dspark"))
      self.assertEqual({p: p.read_bytes() for p in text}, text)
      self.assertEqual({*loaded.call_args.args}, {ZOO, "bfloat16"})
    tokenizer = (self.work / "tokenizer.json").read_bytes()
    self.assertEqual(tokenizer, (store.TARGET / "tokenizer.json").read_bytes())
    release = self.work / "release"
    self.assertEqual({p.name for p in release.iterdir()}, {"dflash2", "dspark"})
    for kind in ("dflash2", "dspark"):
      drafter = drafter_io.load(release / kind, "float32")
      self.assertEqual(drafter.config.kind, kind)
      self.assertEqual(
        {p.name for p in (release / kind).iterdir()},
        {"config.json", "model.w12.safetensors"},
      )
    self.refused("holds a run of the recipe zoo drafters, not zoo")

  def test_a_stage_without_what_comes_before_it(self):
    self.refused("run the target stage first", "text")
    self.refused("run the target stage first", "drafter")
    self.refused("config.json is missing", "release")
    with self.assertRaises(FileNotFoundError):  # the command names it
      self.run_stages("target")

  def test_damaged_text(self):
    self.run_stages("data", "target")
    self.refused("run the text stage first", "drafter")
    self.run_stages("text")
    path = self.work / "text" / "001.npz"
    whole = path.read_bytes()
    for damaged in (b"", b"no archive", whole[:-100]):
      path.write_bytes(damaged)
      self.refused("001.npz: damaged", "drafter")
    path.unlink()
    self.run_stages("text")
    self.assertEqual(Rows.load(path).tokens.shape, (4, 32))

  @parameterized.parameters(
    ("a.jsonl", b'{"a": "b"}\n{bad\n', "line 2 is not JSON"),
    ("a.jsonl.gz", b"xx", "not a whole gzip file"),
    ("a.txt", b"\xff", "not UTF-8"),
  )
  def test_damaged_test_text(self, name, content, pattern):
    path = self.work.parent / name
    path.write_bytes(content)
    self.refused(pattern, "data", test_files=[path])
    self.assertFalse((self.work / "corpus.json").exists())

  def test_held_out_file(self):
    path = self.work.parent / "held_out.jsonl"
    path.write_text('{"source": "a/b.py", "text": "x"}\n\n')
    self.assertEqual(data.held_out_texts(path, 1), {"code": ["x"]})
    for line in ("{bad", "[1]", '{"source": "a"}'):
      path.write_text(line + "\n")
      with self.assertRaisesRegex(SpecPilotError, "held_out.jsonl: "):
        data.held_out_texts(path, 1)


class LogTest(absltest.TestCase):
  def test_lines_behind_the_last_save_are_dropped(self):
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    path = pathlib.Path(scratch.name) / "loss.jsonl"
    lines = [json.dumps({"step": s, "loss": 1.0}) + "\n" for s in (5, 10, 15)]
    path.write_text("".join(lines) + '{"step": 2')
    optimizer._cut_log(path, 10)
    self.assertEqual(path.read_text(), "".join(lines[:2]))
    path.write_text("".join(lines) + '{"step": 2')
    optimizer._cut_log(path, 20)
    self.assertEqual(path.read_text(), "".join(lines))


if __name__ == "__main__":
  absltest.main()
