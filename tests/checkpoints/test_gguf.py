"""GGUF: tensors, permutation, quantised types, metadata, damaged files."""

import pathlib
import sys
import tempfile
from unittest import mock

import gguf as gguf_package
import numpy as np
from absl.testing import absltest, parameterized

from specpilot_jax import configs, paths
from specpilot_jax.checkpoints import gguf, load_checkpoint
from specpilot_jax.checkpoints.layout import layout, split
from specpilot_jax.errors import SpecPilotError
from tests.checkpoints import builders

Q8_0 = gguf_package.GGMLQuantizationType.Q8_0
BF16 = gguf_package.GGMLQuantizationType.BF16


def gguf_tensors(config, params):
  """The tensors as llama.cpp's converter writes them."""
  tensors = {}
  for name, fused in layout(config).items():
    for part, rows in split(fused, params[name]).items():
      for kind, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        if f"self_attn.{kind}_proj" in part:
          rows = (
            rows.reshape(heads, 2, config.head_dim // 2, -1)
            .swapaxes(1, 2)
            .reshape(rows.shape)
          )
      tensors[gguf._gguf_name(part)] = rows
  return tensors


def metadata(config):
  return {
    "llama.block_count": config.num_layers,
    "llama.context_length": config.context_length,
    "llama.embedding_length": config.hidden_size,
    "llama.feed_forward_length": config.intermediate_size,
    "llama.attention.head_count": config.num_heads,
    "llama.attention.head_count_kv": config.num_kv_heads,
    "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
    "llama.rope.freq_base": config.rope_theta,
    "llama.rope.dimension_count": config.head_dim,
    "llama.vocab_size": config.vocab_size,
    "tokenizer.ggml.eos_token_id": 2,
  }


def write(path, tensors, fields, architecture="llama", kinds=None):
  writer = gguf_package.GGUFWriter(path, architecture)
  for key, value in fields.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_array(key, value)
  for name, array in tensors.items():
    kind = (kinds or {}).get(name)
    if kind is None:
      writer.add_tensor(name, np.ascontiguousarray(array))
    else:
      writer.add_tensor(
        name, gguf_package.quants.quantize(array, kind), raw_dtype=kind
      )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class GgufTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.path = pathlib.Path(scratch.name) / "tiny.gguf"
    self.config = builders.config()
    self.params = builders.params(self.config)
    self.tensors = gguf_tensors(self.config, self.params)
    self.fields = metadata(self.config)

  def write(self, **kwargs):
    write(self.path, self.tensors, self.fields, **kwargs)

  def refused(self, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      gguf.load(self.path)
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.parameters(False, True)
  def test_round_trip(self, tied):
    config = builders.config(tie_embeddings=tied)
    params = {k: v for k, v in self.params.items() if k in layout(config)}
    write(self.path, gguf_tensors(config, params), self.fields)
    loaded = load_checkpoint(self.path)
    self.assertEqual(loaded.config, config)
    self.assertEqual(list(loaded.params), list(layout(config)))
    for name, array in params.items():
      np.testing.assert_array_equal(loaded.params[name], array, name)
    self.assertEqual(loaded.notes, ())
    self.assertEqual(list(loaded.sha256), ["tiny.gguf"])

  def test_quantised_and_half_types(self):
    names = [n for n in self.tensors if n.endswith("_gate.weight")]
    names += ["blk.0.attn_q.weight"]
    half = "token_embd.weight"
    self.write(kinds=dict.fromkeys(names, Q8_0) | {half: BF16})
    loaded = gguf.load(self.path)
    self.assertEqual(
      loaded.notes, (f"weights are dequantised Q8_0 ({len(names)} tensors)",)
    )
    self.assertEqual(loaded.params["embed.weight"].dtype, builders.BFLOAT16)
    np.testing.assert_array_equal(
      loaded.params["embed.weight"],
      self.params["embed.weight"].astype(builders.BFLOAT16),
    )
    for name in ("layers.0.mixer.qkv.weight", "layers.1.mlp.gate_up.weight"):
      self.assertEqual(loaded.params[name].dtype, np.float32)
      np.testing.assert_allclose(
        loaded.params[name], self.params[name], atol=0.02
      )

  @parameterized.named_parameters(
    ("missing", lambda t: t.pop("blk.1.ffn_up.weight"),
     "tensor 'blk.1.ffn_up.weight' is missing"),
    ("no_embedding", lambda t: t.pop("token_embd.weight"),
     "tensor 'token_embd.weight' is missing"),
    ("rope_factors", lambda t: t.update({"rope_freqs.weight": np.ones(
      4, np.float32)}), "unknown tensor 'rope_freqs.weight'"),
    ("shape", lambda t: t.update({"output_norm.weight": np.ones(
      33, np.float32)}), r"'output_norm.weight' has shape \[33\], expected"),
    ("nan", lambda t: t.update({"output_norm.weight": np.full(
      32, np.nan, np.float32)}), "'output_norm.weight' has 32 values"),
    ("dtype", lambda t: t.update({"output_norm.weight": np.ones(
      32, np.int32)}), "'output_norm.weight' has type I32, which"),
    ("wide", lambda t: t.update({"output_norm.weight": np.ones(
      32, np.float64)}), "'output_norm.weight' has type F64, which"),
  )  # fmt: skip
  def test_bad_tensors(self, change, pattern):
    change(self.tensors)
    self.write()
    self.refused(pattern)

  @parameterized.parameters(
    ("llama.rope.scaling.type", "yarn"),
    ("llama.rope.scaling.factor", 4.0),
    ("llama.expert_count", 8),
    ("llama.attention.sliding_window", 512),
    ("llama.rope.dimension_count", 4),
    ("llama.attention.value_length", 16),
    ("llama.block_count", 0),
    ("llama.embedding_length", "wide"),
    ("llama.attention.head_count_kv", [2, 2]),
    ("tokenizer.ggml.eos_token_id", 300),
    ("split.count", 2),
  )
  def test_metadata_that_changes_the_function(self, key, value):
    self.fields[key] = value
    self.write()
    self.refused(key if key[:9] != "tokenizer" else "eos token id 300")

  def test_neutral_metadata(self):
    self.fields["llama.rope.scaling.type"] = "none"
    self.fields["llama.expert_count"] = 0
    self.fields["general.description"] = "says nothing about the function"
    self.write()
    self.assertEqual(gguf.load(self.path).config, self.config)

  def test_other_architecture(self):
    self.write(architecture="qwen35")
    self.refused("GGUF architecture 'qwen35' is not supported")

  def test_truncated_anywhere(self):
    self.write()
    whole = self.path.read_bytes()
    sizes = [0, 1, 3, 4, 7, 20, 24, 30, 100, 500, 1000, len(whole) // 2]
    sizes += [len(whole) - 33, *range(40, 2000, 37)]
    for size in sizes:
      self.path.write_bytes(whole[:size])
      self.refused("tiny.gguf: not a usable GGUF file: ")
    self.path.write_bytes(whole[:500])
    self.refused("not a usable GGUF file: it ends inside metadata '")
    self.path.write_bytes(whole[: len(whole) - 33])
    self.refused(r"tensor '[\w.]+' ends at byte \d+, the file has")

  def test_garbage_anywhere_ends_quickly_in_one_line(self):
    self.write()
    whole = self.path.read_bytes()
    rng = np.random.default_rng(0)
    for offset in [4, 8, 12, 16, 20, *rng.integers(24, 2500, 60)]:
      damaged = bytearray(whole)
      damaged[offset : offset + 8] = rng.bytes(8)
      self.path.write_bytes(damaged)
      try:
        gguf.load(self.path)
      except SpecPilotError as error:
        self.assertLen(str(error).splitlines(), 1)
    self.path.write_bytes(rng.bytes(5000))
    self.refused("it does not begin with the letters GGUF")

  def test_without_the_package(self):
    self.write()
    with mock.patch.dict(sys.modules, {"gguf": None}):
      self.refused(r"pip install 'specpilot-jax\[gguf\]'")


class SmolLM2Test(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    paths.asset_path("smollm2")  # Says how to fetch it where it is not.
    cls.loaded = load_checkpoint("smollm2")

  def test_config_and_notes(self):
    self.assertEqual(
      self.loaded.config,
      configs.dataclasses.replace(
        configs.preset("SmolLM2-135M"), tokenizer_size=49152
      ),
    )
    self.assertEqual(
      self.loaded.notes,
      ("weights are dequantised Q4_1 (210 tensors), Q8_0 (1 tensor)",),
    )
    count = sum(array.size for array in self.loaded.params.values())
    self.assertEqual(count, 134_515_008)

  def test_tokenizer(self):
    tokenizer = self.loaded.tokenizer
    assert tokenizer is not None
    self.assertEqual(
      tokenizer.encode("The capital of France is"), [504, 3575, 282, 4649, 314]
    )
    self.assertEqual(tokenizer.encode("12"), [33, 34])  # Digit by digit.
    self.assertEqual(tokenizer.encode("<|im_end|>"), [2])
    self.assertEqual(
      (tokenizer.bos_token_id, tokenizer.eos_token_ids), (1, (2,))
    )
    text = "def f(n):\n\treturn  n # été 日本 🎉 \r\n"
    self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)
    self.assertEqual(
      tokenizer.chat([{"role": "user", "content": "Hi"}]),
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM,"
      " trained by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\n",
    )


if __name__ == "__main__":
  absltest.main()
