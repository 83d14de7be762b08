"""Measures whether a widened pair says what the zoo pair says.

In float64 both must decode the same greedy tokens. In bfloat16 they are two
renderings of one function: the drafter must be accepted alike on the same
text, and what the wide pair decodes must be its target's own choices, up to
rounding as large as the zoo's own.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from specpilot_jax import loading
from specpilot_jax.decoding import draft
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import store, training

PREFILL_CHUNK = 32
POSITIONS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Pair:
  """A target, its drafter, and an engine with and one without it."""

  target: Target
  drafter: Drafter
  stock: Engine
  autoregressive: Engine

  @classmethod
  def load(cls, name: str, kind: str, dtype: str, room: int) -> "Pair":
    """A model by name, with a drafter of its own.

    Args:
      name: as `loading.load_target` takes it.
      kind: of the drafter, one of `learned.KINDS`.
      dtype: of weights and activations.
      room: prompt plus output tokens at most.
    """
    target = loading.load_target(name, dtype).target
    drafter = loading.make_drafter(kind, target)
    assert drafter is not None

    def engine(drafter: Drafter | None) -> Engine:
      return Engine(
        target,
        drafter=drafter,
        max_seq_len=room,
        prefill_chunk=PREFILL_CHUNK,
      )

    return cls(
      target=target,
      drafter=drafter,
      stock=engine(drafter),
      autoregressive=engine(None),
    )


def prompts(count: int, length: int) -> list[list[int]]:
  """The first ids of held-out files."""
  tokenizer = loading.load_target("zoo", "float32").tokenizer
  assert tokenizer is not None
  texts = [prompt["text"] for prompt in store.prompts()[:count]]
  return [tokenizer.encode(text)[:length] for text in texts]


def decode(
  engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> list[tuple[int, ...]]:
  """Greedy outputs of `tokens` ids each."""
  sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
  return [engine.generate(prompt, sampling).token_ids for prompt in prompts]


@dataclasses.dataclass(frozen=True)
class Forced:
  """What a pair says along a given text, per output token.

  Attributes:
    logits: of the target, before each output token [n, V].
    accepted: drafts that agree with the text when a block starts at the
      token before it [n]; the text's end limits it.
  """

  logits: np.ndarray
  accepted: np.ndarray


def force(
  pair: Pair, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[Forced]:
  """Teacher-forces texts through a pair; a block is drafted at every token."""
  graphdef, state = nnx.split(pair.target)
  drafter = pair.drafter
  longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
  room = -(-longest // 64) * 64
  count = max(map(len, outputs))
  greedy = sampling_lib.Sampling.of(SamplingParams(), jnp.float32)

  @jax.jit
  def run(state, params, tokens, length, first):
    model = nnx.merge(graphdef, state)
    hidden, taps = training.hidden_states(model, tokens, drafter.taps)
    context = drafter.extend(
      params,
      drafter.init_context(room),
      tokens,
      taps,
      jnp.int32(0),
      length,
    )

    def accepted(anchor):
      lattice = drafter.draft(params, context, tokens[anchor], anchor)
      drafts = draft.chain(
        lattice,
        valid_vocab=pair.target.config.valid_vocab,
        limit=jnp.int32(drafter.num_slots),
        sampling=greedy,
        position=anchor,
        sample=False,
      )
      at = anchor + 1 + jnp.arange(drafter.num_slots)
      right = drafts.tokens == tokens[jnp.minimum(at, room - 1)]
      return jnp.cumprod(right & (at < length)).sum()

    anchors = first + jnp.arange(count, dtype=jnp.int32)
    logits = model.logits(hidden[jnp.minimum(anchors, room - 1)])
    return logits, lax.map(accepted, anchors, batch_size=POSITIONS_AT_ONCE)

  found = []
  for prompt, output in zip(prompts, outputs, strict=True):
    tokens = np.zeros(room, np.int32)
    length = len(prompt) + len(output)
    tokens[:length] = [*prompt, *output]
    logits, accepted = run(
      state,
      drafter.params,
      tokens,
      np.int32(length),
      np.int32(len(prompt) - 1),
    )
    n = len(output)
    valid = pair.target.config.valid_vocab
    found.append(
      Forced(np.asarray(logits)[:n, :valid], np.asarray(accepted)[:n])
    )
  return found


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """Acceptance of two pairs on the same text.

  Attributes:
    small, wide: mean of accepted drafts plus one, over all tokens.
    same: share of tokens where both accept equally many.
  """

  small: float
  wide: float
  same: float

  @property
  def relative(self) -> float:
    """Wide over small, less 1."""
    return self.wide / self.small - 1

  @classmethod
  def of(cls, small: Sequence[Forced], wide: Sequence[Forced]) -> "Acceptance":
    a, b = (np.concatenate([f.accepted for f in x]) for x in (small, wide))
    return cls(
      small=float(1 + a.mean()),
      wide=float(1 + b.mean()),
      same=float((a == b).mean()),
    )


def logit_difference(small: Sequence[Forced], wide: Sequence[Forced]) -> float:
  """Largest difference of any two logits."""
  return max(
    float(np.abs(a.logits.astype(np.float64) - b.logits).max())
    for a, b in zip(small, wide, strict=True)
  )


def gaps(
  engine: Engine,
  prompts: Sequence[Sequence[int]],
  outputs: Sequence[Sequence[int]],
) -> list[np.ndarray]:
  """How far each output token is from being the target's choice, in logits."""
  return [
    engine.score(prompt, output).gaps
    for prompt, output in zip(prompts, outputs, strict=True)
  ]


@dataclasses.dataclass(frozen=True)
class InFloat64:
  """What the pairs say in float64.

  Attributes:
    outputs: the zoo's greedy outputs.
    forced: whether each of their tokens is the wide target's choice too, which
      makes them its greedy outputs.
    decoded: whether the wide target, decoding token by token, gives them;
      None where it did not decode.
    logits: largest difference of two logits along them.
    acceptance: of the drafters along them.
  """

  outputs: list[tuple[int, ...]]
  forced: bool
  decoded: bool | None
  logits: float
  acceptance: Acceptance


def in_float64(
  name: str,
  kind: str,
  prompts: Sequence[Sequence[int]],
  tokens: int,
  *,
  decodes: bool,
) -> InFloat64:
  """Needs `jax_enable_x64`.

  Args:
    name: of the widened model.
    kind: of the drafter.
    prompts: token ids.
    tokens: output tokens per prompt.
    decodes: decode with the wide target too, and not only along the outputs.
  """
  room = max(map(len, prompts)) + tokens
  zoo = Pair.load("zoo", kind, "float64", room)
  outputs = decode(zoo.autoregressive, prompts, tokens)
  small = force(zoo, prompts, outputs)
  pair = Pair.load(name, kind, "float64", room)
  wide = force(pair, prompts, outputs)
  decoded = None
  if decodes:
    decoded = decode(pair.autoregressive, prompts, tokens) == outputs
  choices = [tuple(f.logits.argmax(axis=1).tolist()) for f in wide]
  return InFloat64(
    outputs=outputs,
    forced=choices == outputs,
    decoded=decoded,
    logits=logit_difference(small, wide),
    acceptance=Acceptance.of(small, wide),
  )


@dataclasses.dataclass(frozen=True)
class InBfloat16:
  """What the pairs say in bfloat16.

  Attributes:
    logits: largest difference of two logits along the same text.
    acceptance: of the drafters along it.
    control_tokens, control_gaps: the zoo's outputs, decoded token by token,
      and how far it is itself from choosing each: rounding alone.
    tokens, gaps: the wide pair's outputs, decoded with its drafter, and how
      far the wide target is from choosing each.
  """

  logits: float
  acceptance: Acceptance
  control_tokens: list[tuple[int, ...]]
  control_gaps: list[np.ndarray]
  tokens: list[tuple[int, ...]]
  gaps: list[np.ndarray]


def in_bfloat16(
  name: str,
  kind: str,
  prompts: Sequence[Sequence[int]],
  outputs: Sequence[Sequence[int]],
) -> InBfloat16:
  """Measures along `outputs`, and decodes as many tokens anew.

  Args:
    name: of the widened model.
    kind: of the drafter.
    prompts, outputs: the text; outputs are of one length.
  """
  tokens = len(outputs[0])
  room = max(map(len, prompts)) + tokens
  zoo = Pair.load("zoo", kind, "bfloat16", room)
  small = force(zoo, prompts, outputs)
  control = decode(zoo.autoregressive, prompts, tokens)
  control_gaps = gaps(zoo.autoregressive, prompts, control)
  pair = Pair.load(name, kind, "bfloat16", room)
  wide = force(pair, prompts, outputs)
  own = decode(pair.stock, prompts, tokens)
  return InBfloat16(
    logits=logit_difference(small, wide),
    acceptance=Acceptance.of(small, wide),
    control_tokens=control,
    control_gaps=control_gaps,
    tokens=own,
    gaps=gaps(pair.stock, prompts, own),
  )
