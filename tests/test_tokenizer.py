"""Tokenizers, streamed decoding and chat templates."""

import datetime
import json
import pathlib
import tempfile

import hypothesis
import numpy as np
import tokenizers
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from tokenizers import processors

from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import StreamDecoder, Tokenizer
from tests.checkpoints import builders

BYTE_LEVEL = builders.tokenizer()
BYTE_FALLBACK = Tokenizer.from_files(
  builders.tokenizer_files(
    builders.byte_fallback_backend(), bos_token="<s>", eos_token="</s>"
  ),
  "spm",
)
KINDS = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK}


def library_decode(tokenizer, ids, skip):
  return tokenizer._backend.decode(ids, skip_special_tokens=skip)


class StreamTest(parameterized.TestCase):
  @parameterized.product(kind=sorted(KINDS), skip=(True, False))
  def test_stream_is_exactly_decode(self, kind, skip):
    tokenizer = KINDS[kind]

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.integers(0, tokenizer.size - 1)))
    def check(ids):
      stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
      pieces = [stream.push(i) for i in ids]
      pieces.append(stream.flush())
      whole = tokenizer.decode(ids, skip_special_tokens=skip)
      self.assertEqual("".join(pieces), whole)
      data = b"".join(
        tokenizer.token_bytes(i)
        for i in ids
        if not (skip and i in tokenizer.special_ids)
      )
      text = data.decode("utf-8", "replace")
      if kind == "byte_fallback":
        text = text.removeprefix(" ")
      self.assertEqual(whole, text)
      library = library_decode(tokenizer, ids, skip)
      if kind == "byte_level" or "\ufffd" not in library:
        self.assertEqual(whole, library)

    check()

  @parameterized.parameters(*sorted(KINDS))
  def test_text_comes_back_and_no_character_is_split(self, kind):
    tokenizer = KINDS[kind]

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
    @hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
      # SentencePiece cannot tell its own space from one in the text.
      hypothesis.assume(kind == "byte_level" or "▁" not in text)
      hypothesis.assume(kind == "byte_level" or not text.startswith(" "))
      hypothesis.assume(not any(t in text for t in ("<|", "<s", "</s", "<u")))
      hypothesis.assume("Ġé" not in text)  # Added under this very name.
      ids = tokenizer.encode(text)
      stream = StreamDecoder(tokenizer)
      so_far = ""
      for i in ids:
        so_far += stream.push(i)
        self.assertStartsWith(text, so_far)
      self.assertEqual(so_far + stream.flush(), text)

    check()

  def test_bytes_around_a_skipped_special_token_join(self):
    vocabulary = BYTE_LEVEL._backend.get_vocab()
    euro = [vocabulary[c] for c in "âĤ¬"]
    ids = [*euro[:2], 2, euro[2]]
    self.assertEqual(BYTE_LEVEL.decode(ids), "€")
    stream = StreamDecoder(BYTE_LEVEL)
    self.assertEqual([stream.push(i) for i in ids], ["", "", "", "€"])
    self.assertEqual(stream.flush(), "")
    self.assertEqual(BYTE_LEVEL.decode(euro[:2]), "\ufffd")
    self.assertEqual(
      BYTE_LEVEL.decode(ids, skip_special_tokens=False),
      "\ufffd<|end|>\ufffd",
    )

  def test_accepts_numpy_ids_and_refuses_others(self):
    ids = np.asarray(BYTE_LEVEL.encode("the cat"), np.int32)
    self.assertEqual(BYTE_LEVEL.decode(ids), "the cat")
    for bad in (-1, BYTE_LEVEL.size):
      with self.assertRaisesRegex(SpecPilotError, f"token id {bad} is outside"):
        BYTE_LEVEL.decode([bad])


class TokenizerTest(parameterized.TestCase):
  def refused(self, pattern, files):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      Tokenizer.from_files(files, "tiny")
    self.assertLen(str(caught.exception).splitlines(), 1)

  def test_identity(self):
    self.assertEqual(BYTE_LEVEL.size, 284)
    self.assertEqual(BYTE_LEVEL.special_ids, {0, 1, 2})
    self.assertEqual(BYTE_LEVEL.bos_token_id, 1)
    self.assertEqual(BYTE_LEVEL.eos_token_ids, (2,))
    self.assertEqual(BYTE_LEVEL.encode(""), [])
    self.assertEqual(BYTE_LEVEL.decode([]), "")

  def test_added_tokens_in_text_are_recognised(self):
    ids = BYTE_LEVEL.encode("<|begin|><think>the<|end|>")
    self.assertEqual((ids[0], ids[1], ids[-1]), (1, 280, 2))
    self.assertEqual(BYTE_LEVEL.decode(ids), "<think>the")
    self.assertEqual(
      BYTE_LEVEL.decode(ids, skip_special_tokens=False),
      "<|begin|><think>the<|end|>",
    )

  def test_bos_is_added_once(self):
    backend = builders.byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
      single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    tokenizer = Tokenizer.from_files(builders.tokenizer_files(backend), "tiny")
    plain = BYTE_LEVEL.encode("cat")
    self.assertEqual(tokenizer.encode("cat"), [1, *plain])
    self.assertEqual(tokenizer.encode("<|begin|>cat"), [1, *plain])
    self.assertEqual(tokenizer.encode("cat", add_special_tokens=False), plain)
    self.assertEqual(tokenizer.encode(""), [1])

  def test_truncation_and_padding_in_the_file_do_not_apply(self):
    backend = builders.byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_files(builders.tokenizer_files(backend), "tiny")
    text = "a longer text than that"
    self.assertEqual(tokenizer.encode(text), BYTE_LEVEL.encode(text))

  def test_lone_surrogates(self):
    with self.assertRaisesRegex(SpecPilotError, "not valid Unicode"):
      BYTE_LEVEL.encode("a\ud800b")

  def test_save_and_read_folder(self):
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch)
      BYTE_LEVEL.save(folder)
      (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
      loaded = Tokenizer.from_hf_folder(folder)
    self.assertEqual(loaded.encode("the mat"), BYTE_LEVEL.encode("the mat"))
    # The separate file wins over tokenizer_config.json.
    self.assertEqual(loaded.chat([{"role": "user", "content": "Hi"}]), "Hi!")
    self.assertIn("chat_template.jinja", loaded.files)

  def test_tokens_that_only_the_config_lists(self):
    entry = {"content": "<|new|>", "special": True}
    files = builders.tokenizer_files(added_tokens_decoder={"284": entry})
    tokenizer = Tokenizer.from_files(files, "tiny")
    self.assertEqual(tokenizer.encode("<|new|>"), [284])
    self.assertIn(284, tokenizer.special_ids)
    files = builders.tokenizer_files(added_tokens_decoder={"292": entry})
    self.refused("'<|new|>' has id 292, tokenizer.json gives 284", files)

  def test_refused_files(self):
    files = builders.tokenizer_files()
    self.refused("tokenizer.json is missing", {})
    self.refused("not a tokenizer", files | {"tokenizer.json": b"{}"})
    config = "tokenizer_config.json"
    self.refused("not JSON", files | {config: b"{"})
    self.refused("not a JSON object", files | {config: b"[]"})
    self.refused("'<none>' is not in the vocabulary",
                 builders.tokenizer_files(bos_token="<none>"))  # fmt: skip
    self.refused("chat_template is not a string",
                 builders.tokenizer_files(chat_template=3))  # fmt: skip
    backend = builders.byte_level_backend()
    backend.decoder = tokenizers.decoders.WordPiece()
    self.refused("tokenizer decoder WordPiece is not supported",
                 builders.tokenizer_files(backend))  # fmt: skip


class GgufMetadataTest(parameterized.TestCase):
  def metadata(self, **changes):
    tokens = ["<e>", "<b>", "<u>", "a", "b", "1", "2", "Ġ", "ab", "Ġab"]
    fields = {
      "model": "gpt2",
      "pre": "smollm",
      "tokens": tokens,
      "token_type": [3, 3, 4, *[1] * 7],
      "merges": ["a b", "Ġ ab"],
      "bos_token_id": 1,
      "eos_token_id": 0,
      "add_bos_token": False,
    } | changes
    return {
      f"tokenizer.ggml.{key}": value
      for key, value in fields.items()
      if value is not None
    }

  def test_rebuilt(self):
    tokenizer = Tokenizer.from_gguf_metadata(self.metadata(), "m.gguf")
    self.assertEqual(tokenizer.encode("<b>ab ab<u>"), [1, 8, 9, 2])
    self.assertEqual(tokenizer.decode([1, 8, 9, 2]), "ab ab<u>")
    self.assertEqual(tokenizer.special_ids, {0, 1})
    self.assertEqual(tokenizer.eos_token_ids, (0,))
    self.assertFalse(tokenizer.has_chat_template)
    saved = Tokenizer.from_files(tokenizer.files, "saved")
    self.assertEqual(saved.encode("<b>ab12"), tokenizer.encode("<b>ab12"))
    self.assertEqual(saved.eos_token_ids, (0,))

  def test_bos_and_end_of_turn(self):
    tokenizer = Tokenizer.from_gguf_metadata(
      self.metadata(add_bos_token=True, eot_token_id=2), "m.gguf"
    )
    self.assertEqual(tokenizer.encode("ab"), [1, 8])
    self.assertEqual(tokenizer.eos_token_ids, (0, 2))

  @parameterized.parameters(
    ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; supported"),
    ({"pre": None}, "tokenizer.ggml.pre is missing"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens is empty or has dupl"),
    ({"token_type": [1]}, "token_type has 1 entries for 10 tokens"),
    ({"token_type": [6] * 10}, "token_type has byte tokens"),
    ({"merges": ["a 1"]}, "merges has 'a 1'"),
    ({"merges": ["ab"]}, "merges has 'ab'"),
    ({"eos_token_id": 10}, "eos_token_id 10 is outside the 10 tokens"),
    ({"add_space_prefix": True}, "add_space_prefix is true"),
    ({"add_eos_token": True}, "add_eos_token is true"),
    ({"precompiled_charsmap": [1]}, "precompiled_charsmap is not understood"),
  )
  def test_refused(self, changes, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      Tokenizer.from_gguf_metadata(self.metadata(**changes), "m.gguf")
    self.assertLen(str(caught.exception).splitlines(), 1)


class ChatTest(parameterized.TestCase):
  USER = ({"role": "user", "content": "Hi <&> é"},)

  def tokenizer(self, template):
    files = builders.tokenizer_files(chat_template=template)
    return Tokenizer.from_files(files, "tiny")

  def test_generation_prompt(self):
    self.assertEqual(
      BYTE_LEVEL.chat(self.USER), "<|user|>Hi <&> é<|end|><|assistant|>"
    )
    self.assertEqual(
      BYTE_LEVEL.chat(self.USER, add_generation_prompt=False),
      "<|user|>Hi <&> é<|end|>",
    )

  @parameterized.parameters(
    ("{{ bos_token }}{{ eos_token }}", "<|begin|><|end|>"),
    ("{% if true %}\nA\n{% endif %}\n", "A\n"),
    ("  {% if true %}x{% endif %}", "x"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <&> é"}'),
    ("{% if tools %}T{% else %}none{% endif %}", "none"),
    ("{% for i in [1, 2] %}{% if i > 1 %}{% break %}{% endif %}{{ i }}"
     "{% endfor %}", "1"),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
    ("{{ enable_thinking }}", "False"),
  )  # fmt: skip
  def test_helpers(self, template, expected):
    tokenizer = self.tokenizer(template)
    self.assertEqual(tokenizer.chat(self.USER, enable_thinking=False), expected)

  def test_strftime_now(self):
    tokenizer = self.tokenizer("{{ strftime_now('%Y') }}")
    year = int(tokenizer.chat(self.USER))
    self.assertBetween(year, 2024, datetime.datetime.now().year)

  def test_named_templates(self):
    tokenizer = self.tokenizer(
      [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
      ]
    )
    self.assertEqual(tokenizer.chat(self.USER), "D")

  @parameterized.parameters(
    (
      "{{ raise_exception('only\nusers') }}",
      "chat template failed .only users",
    ),
    ("{{ ''.__class__.__mro__ }}", "chat template failed"),
    ("{{ messages.append(1) }}", "chat template failed"),
    ("{{ messages[0].content + 1 }}", "chat template failed"),
    ("{% for i in range(10000000) %}{% endfor %}", "chat template failed"),
    ("{{ missing.field }}", "chat template failed"),
  )
  def test_template_failures(self, template, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      self.tokenizer(template).chat(self.USER)
    self.assertLen(str(caught.exception).splitlines(), 1)

  def test_template_that_does_not_compile(self):
    with self.assertRaisesRegex(SpecPilotError, "does not compile"):
      self.tokenizer("{% if %}")

  @parameterized.parameters(
    ([], "at least one message"),
    (["Hi"], "message 0 needs a string 'role'"),
    ([{"role": "user"}], "message 0 needs a string 'content'"),
    ([{"role": "user", "content": 3}], "message 0 needs a string 'content'"),
  )
  def test_malformed_messages(self, messages, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern):
      BYTE_LEVEL.chat(messages)

  def test_no_template(self):
    files = builders.tokenizer_files()
    config = json.loads(files["tokenizer_config.json"])
    del config["chat_template"]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    with self.assertRaisesRegex(SpecPilotError, "has no chat template"):
      Tokenizer.from_files(files, "tiny").chat(self.USER)


if __name__ == "__main__":
  absltest.main()
