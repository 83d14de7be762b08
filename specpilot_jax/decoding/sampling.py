"""From logits to the target's own choice.

The choice at a node is one argmax: of the logits at temperature 0, else of the
filtered logits / T plus Gumbel noise keyed by (request seed, absolute
position). It does not depend on what was drafted, so speculation is exact, and
the sampled output of any engine setting can be compared token for token.

Order of processing (as in vLLM): penalties, temperature, min-p, top-k, top-p.
All three filters amount to one threshold per node; ties at it are kept.
"""

import dataclasses
import enum
import numbers
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specpilot_jax.errors import SpecPilotError

MAX_STOP_IDS = 16
"""Stop ids a request may have, end-of-sequence ids of the model included."""

LARGEST = 1e6
"""Bound of temperature and penalties."""


class Stream(enum.IntEnum):
  """Independent random streams of one request."""

  TARGET = 0  # the target's choice
  ACCEPT = 1  # rejection sampling's uniform draws
  DRAFT = 2  # the drafter's choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """Settings of one request.

  >>> SamplingParams(temperature=0.7, top_p=0.9).max_tokens
  256
  >>> SamplingParams(top_p=0)
  Traceback (most recent call last):
  specpilot_jax.errors.SpecPilotError: top_p must be in (0, 1], got 0

  Attributes:
    temperature: 0 is greedy.
    top_k: keep the k best; 0 keeps all.
    top_p: keep the smallest set of probability at least top_p.
    min_p: keep what has at least min_p of the best token's probability.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens
      in the output, once and per occurrence.
    repetition_penalty: divides positive and multiplies negative logits of
      tokens in prompt or output.
    seed: of the request's noise.
    max_tokens: output tokens at most; the context limit may be nearer.
    stop: strings that end the request; they are not part of the text. Special
      tokens have no text: name them in `stop_token_ids`.
    stop_token_ids: ids that end it, beside the model's end-of-sequence ids.
    ignore_eos: do not end at end-of-sequence ids, nor on loops.
    loop_detection: end with reason `loop` when the output repeats itself.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  seed: int = 0
  max_tokens: int = 256
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  loop_detection: bool = True

  def __post_init__(self):
    def check(good, field, expected):
      if not good:
        value = getattr(self, field)
        raise SpecPilotError(f"{field} must be {expected}, got {value!r}")

    def number(field, low, high, expected):
      value = getattr(self, field)
      good = isinstance(value, numbers.Real) and low <= value <= high
      check(good, field, expected)

    def whole(value):
      return isinstance(value, numbers.Integral) and value is not True

    def integer(field, low, high, expected):
      value = getattr(self, field)
      check(whole(value) and low <= value <= high, field, expected)

    # Bounds that keep every product finite in float32: infinity times zero
    # would turn a masked logit into NaN.
    number("temperature", 0, LARGEST, f"a number from 0 to {LARGEST:g}")
    check(
      self.temperature == 0 or self.temperature >= 1e-3,
      "temperature",
      "0 (greedy) or at least 0.001",
    )
    integer("top_k", 0, 2**31 - 1, "0 (off) or a positive integer")
    number("top_p", 0, 1, "in (0, 1]")
    check(self.top_p > 0, "top_p", "in (0, 1]")
    number("min_p", 0, 1, "in [0, 1]")
    for field in ("presence_penalty", "frequency_penalty"):
      number(field, -LARGEST, LARGEST, f"a number within +-{LARGEST:g}")
    number(
      "repetition_penalty",
      1 / LARGEST,
      LARGEST,
      f"a number from {1 / LARGEST:g} to {LARGEST:g}",
    )
    integer("seed", 0, 2**32 - 1, "an integer in [0, 2^32)")
    integer("max_tokens", 1, 2**31 - 1, "a positive integer")
    check(
      isinstance(self.stop, (tuple, list))
      and all(isinstance(s, str) and s for s in self.stop),
      "stop",
      "a tuple of non-empty strings",
    )
    check(
      isinstance(self.stop_token_ids, (tuple, list))
      and all(whole(i) and i >= 0 for i in self.stop_token_ids),
      "stop_token_ids",
      "a tuple of token ids",
    )

  @property
  def loops_end(self) -> bool:
    return self.loop_detection and not self.ignore_eos

  def stop_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends the request."""
    eos = () if self.ignore_eos else tuple(eos_token_ids)
    ids = tuple(dict.fromkeys(eos + tuple(self.stop_token_ids)))
    if len(ids) > MAX_STOP_IDS:
      raise SpecPilotError(
        f"{len(ids)} stop token ids, at most {MAX_STOP_IDS} are supported"
      )
    return ids


@dataclasses.dataclass(frozen=True)
class Features:
  """What a compiled step must be able to do (static)."""

  greedy: bool
  filters: bool
  penalties: bool

  @classmethod
  def of(cls, params: SamplingParams) -> "Features":
    greedy = params.temperature == 0
    return cls(
      greedy=greedy,
      filters=not greedy
      and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
      penalties=params.presence_penalty != 0
      or params.frequency_penalty != 0
      or params.repetition_penalty != 1,
    )

  @classmethod
  def union(cls, kinds: Iterable["Features"]) -> "Features":
    """What a step needs that serves requests of all these kinds."""
    kinds = list(kinds)
    return cls(
      greedy=all(f.greedy for f in kinds),
      filters=any(f.filters for f in kinds),
      penalties=any(f.penalties for f in kinds),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
  """A request's settings as arrays, so that no value is compiled in."""

  temperature: Float[Array, ""]
  top_k: Int[Array, ""]
  top_p: Float[Array, ""]
  min_p: Float[Array, ""]
  presence: Float[Array, ""]
  frequency: Float[Array, ""]
  repetition: Float[Array, ""]
  seed: Int[Array, ""]

  @classmethod
  def of(cls, params: SamplingParams, dtype) -> "Sampling":
    return cls(
      temperature=jnp.asarray(params.temperature or 1.0, dtype),
      top_k=jnp.asarray(params.top_k, jnp.int32),
      top_p=jnp.asarray(params.top_p, dtype),
      min_p=jnp.asarray(params.min_p, dtype),
      presence=jnp.asarray(params.presence_penalty, dtype),
      frequency=jnp.asarray(params.frequency_penalty, dtype),
      repetition=jnp.asarray(params.repetition_penalty, dtype),
      seed=jnp.asarray(params.seed, jnp.uint32),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
  """Token counts that penalties read."""

  output: Int[Array, " V"]  # occurrences in the output so far
  prompt: Bool[Array, " V"]


def _keys(seed, positions: Int[Array, " N"], stream: Stream):
  base = jax.random.fold_in(jax.random.key(seed), int(stream))
  return jax.vmap(lambda p: jax.random.fold_in(base, p))(positions)


def gumbel(
  seed: Int[Array, ""],
  positions: Int[Array, " N"],
  size: int,
  stream: Stream,
  dtype,
) -> Float[Array, "N V"]:
  """Standard Gumbel noise [N, size] keyed by (seed, position).

  The random bits do not depend on `dtype`, so a float64 engine draws the noise
  of a float32 one up to rounding. g = -log(-log1p(-v)) with v uniform keeps
  float32 resolution in the upper tail, where the argmax is decided.
  """
  bits = jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32))(
    _keys(seed, positions, stream)
  )
  v = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
  # Rounding may reach 1, whose noise would be -inf.
  v = jnp.minimum(v, jnp.float32(1 - 2.0**-24)).astype(dtype)
  return -jnp.log(-jnp.log1p(-v))


def uniform(
  seed: Int[Array, ""], positions: Int[Array, " N"], stream: Stream
) -> Float[Array, " N"]:
  """Uniform draws in [0, 1), one per position."""
  return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(
    _keys(seed, positions, stream)
  )


def penalize(
  logits: Float[Array, "N V"],
  sampling: Sampling,
  history: History,
  tokens: Int[Array, " N"],
  mask: Bool[Array, "N N"],
) -> Float[Array, "N V"]:
  """Applies the three penalties along each node's own path.

  Args:
    logits: per node.
    sampling: settings.
    history: counts up to and including the root's token.
    tokens, mask: the nodes; the root is counted in `history` already.
  """
  n = tokens.shape[0]
  below_root = mask & (jnp.arange(n) > 0)[None, :]
  counts = jnp.broadcast_to(history.output, logits.shape)
  counts = counts.at[:, tokens].add(below_root.astype(counts.dtype))
  seen = (counts > 0) | history.prompt
  r = sampling.repetition
  logits = jnp.where(
    seen, jnp.where(logits > 0, logits / r, logits * r), logits
  )
  logits -= sampling.frequency * counts.astype(logits.dtype)
  return logits - sampling.presence * (counts > 0).astype(logits.dtype)


def threshold(
  scaled: Float[Array, "N V"], sampling: Sampling
) -> Float[Array, " N"]:
  """The score from which on tokens survive min-p, top-k and top-p.

  Args:
    scaled: penalised logits / temperature.
  """
  size = scaled.shape[-1]
  descending = -jnp.sort(-scaled, axis=-1)
  top = descending[:, 0]
  # min-p: p >= min_p p_max. log(0) = -inf keeps all.
  cut = top + jnp.log(sampling.min_p)
  k = jnp.where(sampling.top_k > 0, sampling.top_k, size)
  kth = jnp.take_along_axis(
    descending, jnp.full((scaled.shape[0], 1), jnp.clip(k, 1, size) - 1), axis=1
  )[:, 0]
  cut = jnp.maximum(cut, kth)
  # top-p acts on the law that min-p and top-k left.
  kept = jnp.where(descending >= cut[:, None], descending, -jnp.inf)
  law = jax.nn.softmax(kept, axis=-1)
  before = jnp.cumsum(law, axis=-1) - law
  inside = (before < sampling.top_p) & (kept > -jnp.inf)
  inside = inside.at[:, 0].set(True)
  lowest = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1)
  return jnp.where(sampling.top_p < 1, jnp.maximum(cut, lowest), cut)


def scale_and_cut(
  logits: Float[Array, "N V"], sampling: Sampling, features: Features
) -> tuple[Float[Array, "N V"], Float[Array, " N"] | None]:
  """Penalised logits / T, and the threshold of the filters if there are any."""
  if features.greedy:
    return logits, None
  scaled = logits / sampling.temperature
  return scaled, threshold(scaled, sampling) if features.filters else None


def law(
  logits: Float[Array, "N V"], sampling: Sampling, features: Features
) -> Float[Array, "N V"]:
  """Probabilities that the target samples from (temperature above 0)."""
  scaled, cut = scale_and_cut(logits, sampling, features)
  if cut is not None:
    scaled = jnp.where(scaled >= cut[:, None], scaled, -jnp.inf)
  return jax.nn.softmax(scaled, axis=-1)


def choose(
  logits: Float[Array, "N V"],
  sampling: Sampling,
  features: Features,
  positions: Int[Array, " N"],
) -> Int[Array, " N"]:
  """The target's choice at each node; lowest id on ties.

  Args:
    logits: penalised logits.
    positions: absolute position of the token that is chosen.
  """
  scaled, cut = scale_and_cut(logits, sampling, features)
  if not features.greedy:
    noise = gumbel(
      sampling.seed, positions, logits.shape[-1], Stream.TARGET, logits.dtype
    )
    scaled = (
      scaled
      if cut is None
      else jnp.where(scaled >= cut[:, None], scaled, -jnp.inf)
    )
    scaled = scaled + noise
  return jnp.argmax(scaled, axis=-1).astype(jnp.int32)


def choice_gap(
  logits: Float[Array, "N V"],
  sampling: Sampling,
  features: Features,
  positions: Int[Array, " N"],
  tokens: Int[Array, " N"],
  tolerance: float,
) -> Float[Array, " N"]:
  """How far each given token is from being the target's choice, in logits.

  0 where it is the choice. With filters, a token within `tolerance` (in
  logits) of the cut-off may stand on either side of it: the given token is
  held to at most its distance below the cut-off, and it is compared with the
  tokens that are inside for certain.
  """
  scaled, cut = scale_and_cut(logits, sampling, features)
  unit = jnp.ones((), logits.dtype)
  own = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
  below = jnp.zeros_like(own)
  if not features.greedy:
    unit = sampling.temperature
    noise = gumbel(
      sampling.seed, positions, logits.shape[-1], Stream.TARGET, logits.dtype
    )
    noisy = scaled + noise
    if cut is not None:
      certain = jnp.minimum(cut + tolerance / unit, scaled.max(axis=-1))
      noisy = jnp.where(scaled >= certain[:, None], noisy, -jnp.inf)
      below = cut - own
    own = own + jnp.take_along_axis(noise, tokens[:, None], axis=1)[:, 0]
    scaled = noisy
  gap = jnp.maximum(scaled.max(axis=-1) - own, below)
  return jnp.maximum(gap, 0) * unit
