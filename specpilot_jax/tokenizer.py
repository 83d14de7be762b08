"""Tokenizers: text to ids, ids to text, chat templates, streamed decoding.

The vocabulary work is done by the `tokenizers` library. Decoding is done here,
byte by byte, because a stream has to know which bytes are final: for the two
decoders that the supported families use, every token stands for a fixed byte
string, the text of a sequence is the UTF-8 decoding of the concatenation, and
bytes that are no UTF-8 become U+FFFD.

* byte-level BPE (Qwen, SmolLM2, Llama 3): the same text as the library gives,
  for any ids whatever;
* byte fallback (`<0xE2>` tokens, Llama 2): the same text as the library
  wherever the bytes are UTF-8. Where they are not, only the offending bytes
  become U+FFFD here (the library replaces the whole run of byte tokens, which
  no stream could know in advance).
"""

import codecs
import json
import operator
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specpilot_jax.chat import ChatTemplate
from specpilot_jax.errors import SpecPilotError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")

# GGUF `tokenizer.ggml.token_type`: the kinds that are not plain vocabulary.
_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER, _GGUF_BYTE = 2, 3, 4, 6
_GGUF_PRE = ("smollm", "gpt-2")
_GGUF_KEYS = frozenset({
  "model", "pre", "tokens", "token_type", "scores", "merges",
  "add_bos_token", "add_eos_token", "add_space_prefix",
  "remove_extra_whitespaces",
})  # fmt: skip


class Tokenizer:
  """A vocabulary with its special tokens and chat template.

  Build one with `from_hf_folder`, `from_gguf_metadata` or `from_files`.

  Attributes:
    name: what errors call it.
    size: number of ids; the largest id is `size - 1`.
    bos_token_id: None where the model has none.
    eos_token_ids: ids that the tokenizer itself names as end of text; the
      model's configuration may know more.
    special_ids: ids that `decode` leaves out by default.
    files: file name to content of what `save` writes, in Hugging Face form.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    name: str,
    files: Mapping[str, bytes],
    roles: Mapping[str, str],
    chat_template: str | None,
    extra_eos: Sequence[str] = (),
  ):
    # A prompt is never cut or padded by the tokenizer: its length is checked
    # against the context where it is used.
    backend.no_truncation()
    backend.no_padding()
    self.name = name
    self.files = dict(files)
    self._backend = backend
    self._to_bytes, self._strip = _byte_decoder(backend, name)
    self.size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    self.special_ids = frozenset(
      i for i, t in backend.get_added_tokens_decoder().items() if t.special
    )
    self.bos_token_id = self._role_id(roles.get("bos_token"))
    eos = [self._role_id(t) for t in (roles.get("eos_token"), *extra_eos)]
    self.eos_token_ids = tuple(dict.fromkeys(i for i in eos if i is not None))
    self._template = None
    if chat_template is not None:
      self._template = ChatTemplate(chat_template, roles, name)

  def _role_id(self, token: str | None) -> int | None:
    if token is None:
      return None
    token_id = self._backend.token_to_id(token)
    if token_id is None:
      raise SpecPilotError(
        f"{self.name}: special token {token!r} is not in the vocabulary"
      )
    return token_id

  @property
  def has_chat_template(self) -> bool:
    return self._template is not None

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Text to token ids.

    Special tokens written out in the text are recognised. A tokenizer that
    puts BOS first does so here too, but not a second time where the text
    begins with it already (as a rendered chat template may).

    Args:
      text: any string; lone surrogates are refused.
      add_special_tokens: whether the tokenizer adds its own BOS.
    """
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise SpecPilotError(
        f"text is not valid Unicode: {error.reason} at character {error.start}"
      ) from None
    ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
    if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
      return ids[1:]
    return ids

  def token_bytes(self, token_id: int) -> bytes:
    """The bytes that a token stands for (special tokens included).

    An id below `size` that has no token stands for nothing.

    Raises:
      SpecPilotError: the id is outside the vocabulary.
    """
    token_id = operator.index(token_id)
    if not 0 <= token_id < self.size:
      raise SpecPilotError(
        f"token id {token_id} is outside the tokenizer (0 to {self.size - 1})"
      )
    token = self._backend.id_to_token(token_id)
    return b"" if token is None else self._to_bytes(token)

  def decode(
    self, ids: Iterable[int], *, skip_special_tokens: bool = True
  ) -> str:
    """Token ids to text; bytes that are no UTF-8 become U+FFFD."""
    stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
    return "".join([stream.push(i) for i in ids]) + stream.flush()

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> str:
    """Renders the model's own chat template (Jinja, sandboxed).

    Args:
      messages: mappings with the strings `role` and `content`.
      add_generation_prompt: end with the opening of the assistant's turn.
      **variables: further template variables, such as `enable_thinking`.

    Raises:
      SpecPilotError: no template, a malformed message, or a template that
        refuses the conversation.
    """
    if self._template is None:
      raise SpecPilotError(
        f"{self.name}: the model has no chat template; give a plain prompt"
      )
    return self._template.render(
      messages, add_generation_prompt=add_generation_prompt, **variables
    )

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the tokenizer in Hugging Face form into an existing folder."""
    for file, content in self.files.items():
      (pathlib.Path(folder) / file).write_bytes(content)

  @classmethod
  def from_hf_folder(cls, folder: str | pathlib.Path) -> Self:
    """Reads `tokenizer.json`, and `tokenizer_config.json` and
    `chat_template.jinja` where they exist.
    """
    folder = pathlib.Path(folder)
    files = {}
    for file in FILES:
      if os.path.lexists(folder / file):
        try:
          files[file] = (folder / file).read_bytes()
        except OSError as error:
          raise SpecPilotError(
            f"{folder / file}: cannot be read ({error.strerror})"
          ) from None
    return cls.from_files(files, str(folder))

  @classmethod
  def from_files(cls, files: Mapping[str, bytes], name: str) -> Self:
    """Builds a tokenizer from the contents of its Hugging Face files."""
    if TOKENIZER_FILE not in files:
      raise SpecPilotError(f"{name}: {TOKENIZER_FILE} is missing")
    where = f"{name}/{TOKENIZER_FILE}"
    try:
      backend = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
    except Exception as error:  # The library raises plain Exception.
      raise SpecPilotError(
        f"{where}: not a tokenizer ({_first_line(error)})"
      ) from None
    config = _parse_config(files.get(CONFIG_FILE, b"{}"), name)
    _add_config_tokens(backend, config, name)
    template = _config_template(config, name)
    if TEMPLATE_FILE in files:
      try:
        template = files[TEMPLATE_FILE].decode()
      except UnicodeDecodeError:
        raise SpecPilotError(f"{name}/{TEMPLATE_FILE}: not UTF-8") from None
    roles = {}
    for role in _ROLES:
      token = config.get(role)
      token = token.get("content") if isinstance(token, dict) else token
      if isinstance(token, str):
        roles[role] = token
    return cls(
      backend, name=name, files=files, roles=roles, chat_template=template
    )

  @classmethod
  def from_gguf_metadata(cls, metadata: Mapping[str, Any], name: str) -> Self:
    """Rebuilds a byte-level BPE tokenizer from GGUF metadata.

    Args:
      metadata: metadata key to Python value.
      name: what errors call the file.

    Raises:
      SpecPilotError: a tokenizer model, pre-tokenizer or setting that is not
        implemented, or inconsistent tables; the line names the key.
    """
    return _from_gguf(cls, metadata, name)


class StreamDecoder:
  """Decodes ids one at a time without ever splitting a character.

  The concatenation of all `push` results and of `flush` is exactly
  `tokenizer.decode` of all ids. Trailing bytes that may still become a
  character are held back (three at most).
  """

  def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
    self._tokenizer = tokenizer
    self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._strip = tokenizer._strip

  def push(self, token_id: int) -> str:
    """Takes the next id and returns the text that is final with it."""
    data = self._tokenizer.token_bytes(token_id)
    if token_id in self._skip:
      return ""
    return self._lead(self._utf8.decode(data))

  def flush(self) -> str:
    """Returns the rest; incomplete bytes become U+FFFD. Ends the stream."""
    return self._lead(self._utf8.decode(b"", final=True))

  def _lead(self, text: str) -> str:
    # SentencePiece puts a space before the first word; `_strip` counts how
    # many leading spaces of the whole text may still have to go.
    while self._strip and text:
      if not text.startswith(" "):
        self._strip = 0
        break
      text = text[1:]
      self._strip -= 1
    return text


def _byte_alphabet() -> dict[str, int]:
  """The printable character that byte-level BPE writes for each byte.

  Bytes that are printable in Latin-1 stand for themselves, the 68 others are
  numbered from U+0100 on in ascending order (the GPT-2 convention).
  """
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [b for b in range(256) if b not in plain]
  table = {chr(b): b for b in plain}
  table.update({chr(0x100 + n): b for n, b in enumerate(others)})
  return table


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
  try:
    return bytes([_BYTE_ALPHABET[c] for c in token])
  except KeyError:  # An added token with other characters stands for itself.
    return token.encode()


def _byte_decoder(backend, name):
  """(function token -> bytes, leading spaces to strip) of a tokenizer."""
  spec = None
  if backend.decoder is not None:
    spec = json.loads(backend.decoder.__getstate__())
  steps = [] if spec is None else [spec]
  if spec is not None and spec["type"] == "Sequence":
    steps = spec["decoders"]
  kinds = [step["type"] for step in steps]
  if kinds == ["ByteLevel"]:
    return _byte_level, 0
  body = kinds[:-1] if kinds[-1:] == ["Strip"] else kinds
  if body == ["Replace", "ByteFallback", "Fuse"]:
    pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
    strip = steps[-1] if len(body) < len(kinds) else None
    if pattern and (
      strip is None or (strip["content"] == " " and strip["stop"] == 0)
    ):

      def byte_fallback(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token[5] == ">":
          try:
            return bytes([int(token[3:5], 16)])
          except ValueError:
            pass
        return token.replace(pattern, content).encode()

      return byte_fallback, 0 if strip is None else strip["start"]
  raise SpecPilotError(
    f"{name}: tokenizer decoder {'+'.join(kinds) or None} is not supported"
    " (byte-level or byte-fallback BPE)"
  )


def _parse_config(content: bytes, name: str) -> dict[str, Any]:
  try:
    config = json.loads(content)
  except ValueError as error:
    raise SpecPilotError(
      f"{name}/{CONFIG_FILE}: not JSON ({_first_line(error)})"
    ) from None
  if not isinstance(config, dict):
    raise SpecPilotError(f"{name}/{CONFIG_FILE}: not a JSON object")
  return config


def _config_template(config, name) -> str | None:
  template = config.get("chat_template")
  if isinstance(template, list):  # Named templates; `default` is for chat.
    named = {
      entry.get("name"): entry.get("template")
      for entry in template
      if isinstance(entry, dict)
    }
    template = named.get("default")
  if template is not None and not isinstance(template, str):
    raise SpecPilotError(f"{name}/{CONFIG_FILE}: chat_template is not a string")
  return template


def _add_config_tokens(backend, config, name) -> None:
  """Adds tokens that only `tokenizer_config.json` lists, at their ids."""
  listed = config.get("added_tokens_decoder")
  if not isinstance(listed, dict):
    return
  try:
    entries = sorted((int(i), dict(t)) for i, t in listed.items())
  except (TypeError, ValueError):
    raise SpecPilotError(
      f"{name}/{CONFIG_FILE}: added_tokens_decoder is malformed"
    ) from None
  for token_id, entry in entries:
    content = entry.get("content")
    known = backend.token_to_id(content) if isinstance(content, str) else None
    if known is None and isinstance(content, str):
      fields = {
        key: bool(entry[key])
        for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if key in entry
      }
      backend.add_tokens([tokenizers.AddedToken(content, **fields)])
      known = backend.token_to_id(content)
    if known != token_id:
      raise SpecPilotError(
        f"{name}/{CONFIG_FILE}: added token {content!r} has id {token_id},"
        f" {TOKENIZER_FILE} gives {known}"
      )


def _from_gguf(cls, metadata, name):
  prefix = "tokenizer.ggml."

  def refuse(key, what):
    raise SpecPilotError(f"{name}: {prefix}{key} {what}")

  def get(key, kind, default=None):
    value = metadata.get(prefix + key, default)
    if not isinstance(value, kind) or (kind is int and value is True):
      refuse(key, f"is missing or not of type {kind.__name__}")
    return value

  for key in metadata:
    if key.startswith(prefix):
      short = key.removeprefix(prefix)
      if short not in _GGUF_KEYS and not short.endswith("token_id"):
        refuse(short, "is not understood")
  if get("model", str) != "gpt2":
    refuse("model", f"is {get('model', str)!r}; supported: 'gpt2'")
  pre = get("pre", str)
  if pre not in _GGUF_PRE:
    refuse("pre", f"is {pre!r}; supported: {', '.join(_GGUF_PRE)}")
  for flag in ("add_eos_token", "add_space_prefix"):
    if get(flag, bool, False):
      refuse(flag, "is true, which is not supported")
  tokens = get("tokens", list)
  types = get("token_type", list, [1] * len(tokens))
  vocab = {token: i for i, token in enumerate(tokens)}
  if len(vocab) != len(tokens) or not tokens:
    refuse("tokens", "is empty or has duplicates")
  if len(types) != len(tokens):
    refuse("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
  if _GGUF_BYTE in types:
    refuse("token_type", "has byte tokens, which model 'gpt2' does not have")
  merges = []
  for merge in get("merges", list):
    left, _, right = str(merge).partition(" ")
    if not {left, right, left + right} <= vocab.keys():
      refuse("merges", f"has {merge!r}, whose parts or result are no tokens")
    merges.append((left, right))

  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.pre_tokenizer = byte_level
  if pre == "smollm":
    backend.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
  backend.decoder = decoders.ByteLevel()
  for token, kind in zip(tokens, types, strict=True):
    if kind in (_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER):
      special = kind != _GGUF_USER
      backend.add_tokens(
        [tokenizers.AddedToken(token, special=special, normalized=False)]
      )

  def token_of(key) -> str | None:
    if prefix + key not in metadata:
      return None
    token_id = get(key, int)
    if not 0 <= token_id < len(tokens):
      refuse(key, f"{token_id} is outside the {len(tokens)} tokens")
    return tokens[token_id]

  roles = {
    "bos_token": token_of("bos_token_id"),
    "eos_token": token_of("eos_token_id"),
    "unk_token": token_of("unknown_token_id"),
    "pad_token": token_of("padding_token_id"),
  }
  roles = {role: token for role, token in roles.items() if token is not None}
  if get("add_bos_token", bool, False):
    if "bos_token" not in roles:
      refuse("add_bos_token", "is true but bos_token_id is missing")
    bos = roles["bos_token"]
    backend.post_processor = processors.TemplateProcessing(
      single=f"{bos}:0 $A:0", special_tokens=[(bos, vocab[bos])]
    )
  template = metadata.get("tokenizer.chat_template")
  if template is not None and not isinstance(template, str):
    raise SpecPilotError(f"{name}: tokenizer.chat_template is not a string")
  config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
  if template is not None:
    config["chat_template"] = template
  end_of_turn = token_of("eot_token_id")
  return cls(
    backend,
    name=name,
    files={
      TOKENIZER_FILE: backend.to_str(pretty=True).encode(),
      CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode(),
    },
    roles=roles,
    chat_template=template,
    extra_eos=() if end_of_turn is None else (end_of_turn,),
  )


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0]
