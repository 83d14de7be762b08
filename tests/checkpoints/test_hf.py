"""Hugging Face folders: what loads, what is refused, what is written."""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from specpilot_jax import configs
from specpilot_jax.checkpoints import hf, load_checkpoint
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders


def read_weights(folder):
  tensors = {}
  for file in sorted(folder.glob("*.safetensors")):
    tensors |= safetensors.numpy.load_file(file)
  return tensors


def write_weights(folder, tensors):
  safetensors.numpy.save_file(tensors, folder / hf.WEIGHTS)


def edit_json(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class HfTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)
    self.folder = self.scratch / "model"

  def write(self, family="llama", dtype=np.float32, **kwargs):
    changes = kwargs.pop("config", {})
    config = builders.config(family, name="model", **changes)
    params = builders.params(config, dtype)
    hf.save(self.folder, config, params, **kwargs)
    return config, params

  def refused(self, pattern, call=None, *args):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      (call or hf.load)(*(args or (self.folder,)))
    self.assertLen(str(caught.exception).splitlines(), 1)

  def assert_same(self, got, want):
    self.assertEqual(list(got), list(want))
    for name in want:
      self.assertEqual(got[name].dtype, want[name].dtype, name)
      self.assertEqual(got[name].tobytes(), want[name].tobytes(), name)

  @parameterized.product(
    family=configs.FAMILIES,
    tied=(False, True),
    dtype=(np.float32, np.float16, builders.BFLOAT16),
    max_shard_bytes=(10_000, 2**30),
  )
  def test_round_trip(self, family, tied, dtype, max_shard_bytes):
    config, params = self.write(
      family,
      dtype,
      config={"tie_embeddings": tied, "eos_token_ids": (2, 5)},
      max_shard_bytes=max_shard_bytes,
    )
    loaded = load_checkpoint(self.folder)
    self.assertEqual(loaded.config, config)
    self.assert_same(loaded.params, params)
    self.assertEqual(loaded.notes, ())
    self.assertIsNone(loaded.tokenizer)
    sharded = (self.folder / hf.INDEX).is_file()
    self.assertEqual(sharded, max_shard_bytes == 10_000)
    weights = [f for f in loaded.sha256 if f.endswith(".safetensors")]
    self.assertEqual(len(weights) > 1, sharded)

  @parameterized.parameters(
    *sorted(p.parent.name for p in builders.GOLDEN.glob("*/config.json"))
  )
  def test_loads_what_transformers_wrote(self, name):
    loaded = hf.load(builders.GOLDEN / name)
    hf.save(self.folder, loaded.config, loaded.params)
    ours = read_weights(self.folder)
    theirs = {
      tensor.replace("model.language_model.", "model."): array
      for tensor, array in read_weights(builders.GOLDEN / name).items()
      if not tensor.startswith(("model.visual.", "mtp."))
    }
    self.assertEqual(ours.keys(), theirs.keys())
    for tensor, array in theirs.items():
      np.testing.assert_array_equal(ours[tensor], array)

  @parameterized.parameters(
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "model.language_model.lm_head.weight"),
  )
  def test_multimodal_names(self, prefix, head):
    config, params = self.write("qwen3_5")
    tensors = {
      prefix + n.removeprefix("model.") if n.startswith("model.") else head: t
      for n, t in read_weights(self.folder).items()
    }
    extra = np.ones((2, 3), np.int64)  # Skipped whatever they hold.
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": extra}
    tensors |= {"visual.pos_embed.weight": extra, "mtp.fc.weight": extra}
    write_weights(self.folder, tensors)
    text = json.loads((self.folder / hf.CONFIG).read_text())
    wrapper = {
      "architectures": ["Qwen3_5ForConditionalGeneration"],
      "model_type": "qwen3_5",
      "text_config": text | {"eos_token_id": 1},
      "vision_config": {"depth": 1},
      "eos_token_id": 2,
      "image_token_id": 7,
      "tie_word_embeddings": False,
    }
    (self.folder / hf.CONFIG).write_text(json.dumps(wrapper))
    loaded = hf.load(self.folder)
    self.assertEqual(loaded.config, config)
    self.assert_same(loaded.params, params)
    self.assertEqual(
      loaded.notes,
      (
        "2 vision tensors are not used",
        "1 multi-token-prediction tensors are not used",
      ),
    )

  def test_mtp_tensor_of_a_dense_model_is_unknown(self):
    self.write("llama")
    tensors = read_weights(self.folder)
    write_weights(self.folder, tensors | {"mtp.fc.weight": np.ones(1)})
    self.refused("unknown tensor 'mtp.fc.weight' for llama")

  def test_generation_config_adds_end_ids(self):
    self.write()
    path = self.folder / hf.GENERATION_CONFIG
    path.write_text(json.dumps({"eos_token_id": [2, 9], "top_k": 5}))
    self.assertEqual(hf.load(self.folder).config.eos_token_ids, (2, 9))
    path.write_text(json.dumps({"eos_token_id": 300}))
    self.refused("generation_config.json: eos_token_id 300 is outside")
    path.write_text(json.dumps({"eos_token_id": True}))
    self.refused("generation_config.json: eos_token_id True is outside")

  def test_tokenizer_sets_size_and_ids(self):
    self.write(
      config={"eos_token_ids": ()}, tokenizer_files=builders.tokenizer_files()
    )
    loaded = hf.load(self.folder)
    self.assertEqual(loaded.config.tokenizer_size, builders.tokenizer().size)
    self.assertLess(loaded.config.valid_vocab, loaded.config.vocab_size)
    self.assertEqual(loaded.config.eos_token_ids, (2,))
    self.assertEqual(loaded.config.bos_token_id, 1)
    self.assertIn("tokenizer.json", loaded.sha256)

  def test_tokenizer_larger_than_the_embedding(self):
    self.write(
      config={"vocab_size": 200}, tokenizer_files=builders.tokenizer_files()
    )
    self.refused(r"the tokenizer has \d+ ids, the embedding only 200 rows")

  @parameterized.named_parameters(
    ("missing", lambda t: t.pop("model.norm.weight"),
     "tensor 'model.norm.weight' is missing"),
    ("missing_head", lambda t: t.pop("lm_head.weight"),
     "tensor 'lm_head.weight' is missing"),
    ("unknown", lambda t: t.update(extra=np.ones(1)), "unknown tensor 'extra'"),
    ("bias", lambda t: t.update(
      {"model.layers.0.self_attn.q_proj.bias": np.ones(32)}),
     "unknown tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ("layer", lambda t: t.update(
      {"model.layers.2.input_layernorm.weight": np.ones(32)}),
     "unknown tensor 'model.layers.2.input_layernorm.weight'"),
    ("shape", lambda t: t.update({"model.norm.weight": np.ones(
      31, np.float32)}), r"'model.norm.weight' has shape \[31\], expected"),
    ("transposed", lambda t: t.update(
      {"lm_head.weight": np.ones((32, 300), np.float32)}),
     r"'lm_head.weight' has shape \[32, 300\], expected \[300, 32\]"),
    ("dtype", lambda t: t.update({"model.norm.weight": np.ones(
      32, np.float64)}), "'model.norm.weight' has dtype F64, supported are"),
    ("nan", lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__(
      (3, 4), np.nan), "'model.layers.1.mlp.up_proj.weight' has 1 values"),
    ("inf", lambda t: t["lm_head.weight"].__setitem__(0, -np.inf),
     "'lm_head.weight' has 32 values that are NaN or infinite"),
    ("twice", lambda t: t.update(
      {"model.language_model.norm.weight": np.ones(32, np.float32)}),
     "are the same"),
  )  # fmt: skip
  def test_bad_tensors(self, change, pattern):
    self.write()
    tensors = {k: v.copy() for k, v in read_weights(self.folder).items()}
    change(tensors)
    write_weights(self.folder, tensors)
    self.refused(pattern)

  @parameterized.parameters(
    (builders.BFLOAT16, np.nan), (np.float16, np.inf), (np.float32, -np.inf)
  )
  def test_nonfinite_in_every_dtype(self, dtype, value):
    self.write(dtype=dtype)
    tensors = {k: v.copy() for k, v in read_weights(self.folder).items()}
    tensors["model.norm.weight"][5] = value
    write_weights(self.folder, tensors)
    self.refused("'model.norm.weight' has 1 values that are NaN or infinite")

  def test_tied_head_must_equal_the_embedding(self):
    config, params = self.write(config={"tie_embeddings": True})
    tensors = read_weights(self.folder)
    head = params["embed.weight"].copy()
    write_weights(self.folder, tensors | {"lm_head.weight": head})
    self.assert_same(hf.load(self.folder).params, params)
    head[7, 3] += 1
    write_weights(self.folder, tensors | {"lm_head.weight": head})
    self.refused("ties the embeddings, but tensor 'lm_head.weight' differs")
    write_weights(self.folder, tensors | {"lm_head.weight": head[1:]})
    self.refused(r"'lm_head.weight' has shape \[299, 32\]")

  @parameterized.parameters(0, 4, 8, 100, -1)
  def test_truncated(self, size):
    self.write()
    path = self.folder / hf.WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    self.refused("model.safetensors: truncated or not safetensors")

  @parameterized.parameters(
    b"\xff" * 64, b"\x08" + b"\0" * 7 + b"{garbage", b"{}" * 40
  )
  def test_bad_header(self, content):
    self.write()
    (self.folder / hf.WEIGHTS).write_bytes(content)
    self.refused("model.safetensors: truncated or not safetensors")

  def test_bad_folders(self):
    self.refused("no such folder|neither a known name", load_checkpoint,
                 self.scratch / "absent")  # fmt: skip
    self.refused("neither a Hugging Face folder", load_checkpoint,
                 self.scratch)  # fmt: skip
    self.refused("config.json is missing", hf.load, self.scratch)
    self.write()
    (self.folder / hf.WEIGHTS).unlink()
    self.refused("no model.safetensors and no model.safetensors.index.json")
    for content, pattern in (
      ("{", "config.json: not JSON"),
      ("[]", "config.json: not a JSON object"),
      ("\xff", "config.json: "),
    ):
      (self.folder / hf.CONFIG).write_text(content, encoding="latin-1")
      self.refused(pattern)

  @parameterized.parameters(
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
  )
  def test_folders_and_dead_links_are_not_absent_files(self, file):
    self.write(tokenizer_files=builders.tokenizer_files())
    hf.load(self.folder)
    path = self.folder / file
    path.unlink(missing_ok=True)
    path.mkdir()
    self.refused(
      f"{file}: .*(directory|not a file)", load_checkpoint, self.folder
    )
    path.rmdir()
    path.symlink_to("nowhere")
    self.refused(rf"{file}(:| is missing)", load_checkpoint, self.folder)

  def test_index(self):
    self.write(max_shard_bytes=10_000)
    path = self.folder / hf.INDEX
    index = json.loads(path.read_text())["weight_map"]
    # A shard that holds more tensors than this one.
    name, shard = "model.norm.weight", index["model.norm.weight"]
    self.assertGreater(list(index.values()).count(shard), 1)
    last = sorted(set(index.values()) - {shard})[-1]

    edit_json(path, weight_map=index | {name: "model-9.safetensors"})
    self.refused("shard model-9.safetensors, named by .* is missing")
    edit_json(path, weight_map=index | {name: "../model.safetensors"})
    self.refused("'../model.safetensors' is not a file name")
    edit_json(path, weight_map=index | {name: last})
    self.refused(f"{shard}: tensor '{name}' is not listed there")
    edit_json(path, weight_map=index | {"more": last})
    self.refused(f"{last}: tensor 'more', listed by .* is missing")
    edit_json(path, weight_map={})
    self.refused("weight_map is missing")

    edit_json(path, weight_map=index)
    tensors = safetensors.numpy.load_file(self.folder / last)
    tensors[name] = read_weights(self.folder)[name]
    safetensors.numpy.save_file(tensors, self.folder / last)
    self.refused(f"tensor '{name}' is in both ")

  @parameterized.parameters(
    ({"new_field": 1}, "unknown config field 'new_field'"),
    ({"hidden_size": None}, "config field 'hidden_size' is missing"),
    ({"hidden_size": "32"}, "'hidden_size' must be a positive integer"),
    ({"num_attention_heads": 0}, "'num_attention_heads' must be a positive"),
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ({"rope_parameters": 3}, "rope_parameters is not a mapping"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling="),
    ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
    ({"attention_bias": True}, "attention_bias=True is not supported"),
    ({"eos_token_id": "</s>"}, "eos token id '</s>' is outside"),
    ({"bos_token_id": 300}, "bos token id 300 is outside"),
    ({"quantization_config": {}}, "quant_method None is not supported"),
  )
  def test_bad_config(self, changes, pattern):
    self.write()
    edit_json(self.folder / hf.CONFIG, **changes)
    self.refused(pattern)

  def test_save_refuses(self):
    config = builders.config()
    params = builders.params(config)

    def save(changed):
      hf.save(self.folder, config, changed)

    fewer = {k: v for k, v in params.items() if k != "norm.weight"}
    self.refused("parameter 'norm.weight' is missing", save, fewer)
    self.refused("unknown parameter 'x'", save, params | {"x": np.ones(1)})
    bad = params | {"norm.weight": np.full(32, np.nan, np.float32)}
    self.refused("'norm.weight' has 32 values", save, bad)
    wide = params | {"norm.weight": np.ones(32)}
    self.refused("'norm.weight' has dtype float64", save, wide)
    odd = builders.config("llama", qk_norm=True)
    self.refused("qk_norm=True cannot be written as a llama config",
                 hf.save, self.folder, odd, builders.params(odd))  # fmt: skip
    self.assertEqual(list(self.scratch.iterdir()), [])

    self.folder.mkdir()
    (self.folder / "kept.txt").write_text("kept")
    self.refused("exists and is not an empty folder", save, params)
    self.assertEqual([p.name for p in self.folder.iterdir()], ["kept.txt"])
    blocker = self.scratch / "file"
    blocker.write_text("")
    self.refused("cannot be written", hf.save, blocker / "m", config, params)


if __name__ == "__main__":
  absltest.main()
