"""The losslessness kit: small hybrids, scripted drafters, and a referee.

A referee decodes with the one-token executable and keeps the state after every
token. A speculative engine must emit the same tokens, and after each of its
commits its state must equal the referee's after the same number of tokens.
State comparison finds a roll-back fault within one step, where the text may
take hundreds of tokens to show it.
"""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax import configs
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import (
  PromptLookup,
  PromptLookupContext,
)
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.dflash import DFlashContext
from tests.notes import FULL

MODES = (
  "oracle",
  "always_wrong",
  "empty",
  "mixed",
  "out_of_range",
  "tail_wrong",
  "none",
)
SCALE = 1.3
STATE_TOLERANCE = 1e-10
"""Float64; summation orders differ, and nothing else may."""


@contextlib.contextmanager
def quick_compilation():
  """Compiles without optimisation: most of a test's time is compilation.

  The full form of the tests compiles as users do.
  """
  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, before or not FULL)
  try:
    yield
  finally:
    jax.config.update(name, before)


class Float64TestCase(parameterized.TestCase):
  """A test that runs with 64-bit types; other tests run as users do."""

  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))
    self.enterContext(quick_compilation())


def hybrid(vocab_size=61, **overrides) -> configs.ModelConfig:
  """GDN layers before and behind attention; two value heads per key head."""
  settings: dict[str, Any] = dict(
    name="tiny-hybrid",
    family="qwen3_5",
    vocab_size=vocab_size,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(configs.GDN, configs.ATTENTION, configs.GDN),
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    context_length=512,
    qk_norm=True,
    attention_gate=True,
    zero_centered_norm=True,
    gdn_num_key_heads=2,
    gdn_num_value_heads=4,
    gdn_key_head_dim=8,
    gdn_value_head_dim=8,
    gdn_conv_kernel=4,
  )
  return configs.ModelConfig(**(settings | overrides))


@functools.cache
def build(config, dtype: str, seed: int = 3, scale: float = SCALE):
  """A target with random weights, large enough that its outputs vary.

  With the default seed no output of the full form falls into a loop.
  """
  params = target_lib.random_params(config, seed, scale)
  return target_lib.build(config, params, dtype)


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
  """Random prompts; their lengths cover 1, conv, chunk and block edges."""
  rng = np.random.default_rng(seed)
  edges = [1, 4, 9, 17, 2, 33, 3, 5, 6, 7, 8, 10, 15, 16, 18, 31]
  lengths = (edges * (count // len(edges) + 1))[:count]
  return [rng.integers(0, vocab, n).tolist() for n in lengths]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptContext:
  """The reference sequence by position, and how right each draft is.

  `seen`, `features` and `length` are what the engine has committed so far: the
  drafter's context proper, compared with the referee's.
  """

  reference: jax.Array  # [T] token at each position
  right: jax.Array  # [T] drafts that are right when the anchor stands there
  offered: jax.Array  # [T] drafts that are offered
  wrong: jax.Array  # [T] what wrong drafts say; ANY for a token in range
  seen: jax.Array  # [T]
  features: jax.Array  # [T, taps, D]
  length: jax.Array


ANY = -100


class ScriptedDrafter:
  """Drafts read off a script: right, then wrong, as many as it says."""

  name = "scripted"
  vocab_size: int | None = None
  params: Any = ()

  def __init__(self, num_slots: int, config, *, variable_length=False):
    self.num_slots = num_slots
    self.vocab = config.valid_vocab
    self.hidden = config.hidden_size
    self.taps: tuple[int, ...] = (0, config.num_layers - 1)
    self.variable_length = variable_length
    self._script = None

  def load(self, mode: str, reference, seed: int = 0, wrong=ANY) -> None:
    """Sets the script; the engine must start a new request afterwards.

    Args:
      mode: one of `MODES`.
      reference: prompt and output of the referee.
      wrong: what every wrong draft says; by default a token in range that
        differs from the right one.
    """
    rng = np.random.default_rng(seed)
    size, k = len(reference), self.num_slots
    right, offered = np.full(size, k), np.full(size, k)
    wrong = np.full(size, wrong)
    if mode == "none":
      offered[:] = 0
    elif mode == "always_wrong":
      right[:] = 0
    elif mode == "empty":
      offered = np.where(rng.random(size) < 0.5, 0, k)
    elif mode == "mixed":
      right = rng.integers(0, k + 1, size)
      offered = rng.integers(0, k + 1, size)
    elif mode == "tail_wrong":
      right[:] = k - 1
    elif mode == "out_of_range":
      right = rng.integers(0, k + 1, size)
      wrong = np.where(rng.random(size) < 0.5, -1, self.vocab)
    else:
      assert mode == "oracle", mode
    self._script = (np.asarray(reference), right, offered, wrong)

  def init_context(self, capacity):
    zeros = jnp.zeros((capacity,), jnp.int32)
    return ScriptContext(
      reference=zeros,
      right=zeros,
      offered=zeros,
      wrong=zeros,
      seen=zeros,
      features=jnp.zeros((capacity, len(self.taps), self.hidden)),
      length=jnp.zeros((), jnp.int32),
    )

  def scripted(self, context):
    """A context with the script in place (the engine's reset clears it)."""
    capacity = context.seen.shape[0]

    def place(x):
      return jnp.asarray(np.resize(np.asarray(x, np.int32), capacity))

    assert self._script is not None, "no script loaded"
    reference, right, offered, wrong = self._script
    return dataclasses.replace(
      context,
      reference=place(reference),
      right=place(right),
      offered=place(offered),
      wrong=place(wrong),
    )

  def extend(self, params, context, tokens, taps, start, count):
    del params
    kept = jnp.arange(tokens.shape[0]) < count
    zero = jnp.zeros((), start.dtype)
    return dataclasses.replace(
      context,
      seen=jax.lax.dynamic_update_slice(
        context.seen, jnp.where(kept, tokens, 0), (start,)
      ),
      features=jax.lax.dynamic_update_slice(
        context.features,
        jnp.where(kept[:, None, None], taps, 0).astype(context.features.dtype),
        (start, zero, zero),
      ),
      length=start + count,
    )

  def draft(self, params, context, anchor, position):
    del params, anchor
    slots = jnp.arange(self.num_slots, dtype=jnp.int32)
    capacity = context.reference.shape[0]
    right = context.reference[jnp.minimum(position + 1 + slots, capacity - 1)]
    scripted = context.wrong[position]
    wrong = jnp.where(
      scripted == ANY, (right + 1 + slots) % self.vocab, scripted
    )
    tokens = jnp.where(slots < context.right[position], right, wrong)
    return Lattice(
      tokens=tokens[:, None].astype(jnp.int32),
      scores=jnp.zeros((self.num_slots, 1), jnp.float32),
      count=context.offered[position],
    )


class ScriptedEngine(Engine):
  """An engine that puts the script back after the reset."""

  def load(self, mode: str, reference, **settings) -> None:
    """See `ScriptedDrafter.load`."""
    assert isinstance(self.drafter, ScriptedDrafter)
    self.drafter.load(mode, reference, **settings)

  def _start(self, compiled, prompt, limit, read=None):
    carry = super()._start(compiled, prompt, limit, read)
    if isinstance(self.drafter, ScriptedDrafter):
      carry = dataclasses.replace(
        carry, drafter=self.drafter.scripted(carry.drafter)
      )
    return carry


class SilentPromptLookup(PromptLookup):
  """Takes in all that is committed, and offers nothing."""

  name = "silent_prompt_lookup"

  def draft(self, params, context, anchor, position):
    lattice = super().draft(params, context, anchor, position)
    return dataclasses.replace(lattice, count=jnp.zeros_like(lattice.count))


@functools.cache
def autoregressive(
  config,
  dtype: str,
  max_seq_len: int = 256,
  prefill_chunk: int = 8,
  scale: float = SCALE,
) -> Engine:
  """The referee: the one-token executable."""
  return Engine(
    build(config, dtype, scale=scale),
    max_seq_len=max_seq_len,
    prefill_chunk=prefill_chunk,
  )


@functools.cache
def speculative(
  config,
  dtype: str,
  num_slots: int = 5,
  *,
  max_seq_len: int = 256,
  prefill_chunk: int = 8,
  acceptance: str = "match",
  variable_length: bool = False,
  scale: float = SCALE,
) -> ScriptedEngine:
  """An engine with a scripted drafter; its `load` sets the script."""
  return ScriptedEngine(
    build(config, dtype, scale=scale),
    drafter=ScriptedDrafter(num_slots, config, variable_length=variable_length),
    system=SystemConfig(acceptance=acceptance),
    max_seq_len=max_seq_len,
    prefill_chunk=prefill_chunk,
  )


@functools.cache
def prompt_lookup(
  config, dtype: str, num_slots: int = 5, *, silent: bool = False
) -> Engine:
  """An engine with prompt lookup; with `silent` its referee."""
  kind = SilentPromptLookup if silent else PromptLookup
  return Engine(
    build(config, dtype),
    drafter=kind(num_slots, min_ngram=1),
    max_seq_len=256,
    prefill_chunk=8,
  )


def sibling[E: Engine](engine: E, **settings: Any) -> E:
  """A fresh engine of the same shapes that shares the compiled functions.

  Args:
    engine: one from this module.
    settings: what the host alone decides: `tokenizer`, `host_lag`.
  """
  other = type(engine)(
    build(engine.config, str(engine.dtype)),
    drafter=engine.drafter,
    system=engine.system,
    max_seq_len=engine.max_seq_len,
    prefill_chunk=engine.prefill_chunk,
    **settings,
  )
  other._fns_by_features = engine._fns_by_features
  return other


Snapshot = dict[str, np.ndarray]
"""The meaningful part of a carry as host arrays, by name."""


def snapshot(carry) -> Snapshot:
  """Position, anchor, budget, penalty counts, keys and values up to the
  length, GDN states, conv windows, and the drafter's context.
  """
  # Copies: on a CPU the host array would share the device's buffer, which the
  # next step writes over. Whole ones: a slice on the device is an executable
  # for each length.
  carry = jax.tree.map(np.array, carry)
  length = int(carry.target.length)
  parts = {
    "position": carry.target.length,
    "anchor": carry.anchor,
    "remaining": carry.remaining,
  }
  for i, layer in enumerate(carry.target.layers):
    if isinstance(layer, state_lib.AttentionState):
      parts[f"{i}.k"] = layer.k[:, :length]
      parts[f"{i}.v"] = layer.v[:, :length]
    else:
      parts[f"{i}.recurrent"] = layer.recurrent
      parts[f"{i}.conv"] = layer.conv
  if carry.history is not None:
    parts["history.output"] = carry.history.output
    parts["history.prompt"] = carry.history.prompt.astype(np.int32)
  context = carry.drafter
  if isinstance(context, ScriptContext):
    parts["drafter.length"] = context.length
    parts["drafter.tokens"] = context.seen[:length]
    parts["drafter.taps"] = context.features[:length]
  elif isinstance(context, PromptLookupContext):
    parts["drafter.tokens"] = context.tokens[:length]
  elif isinstance(context, DFlashContext):
    for i, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
      parts[f"drafter.{i}.k"] = k[:, :length]
      parts[f"drafter.{i}.v"] = v[:, :length]
  else:
    assert not jax.tree.leaves(context), f"unknown {type(context)}"
  return parts


def differences(
  a: Snapshot, b: Snapshot, *, drafter: bool = True
) -> dict[str, float]:
  """Largest absolute difference per part.

  Infinite where shapes differ, and for a part that only one side has.

  Args:
    a, b: what to compare.
    drafter: whether the drafter's context is compared; an engine without a
      drafter has none.
  """
  result = {}
  for name in a.keys() | b.keys():
    if name.startswith("drafter.") and not drafter:
      continue
    x, y = a.get(name), b.get(name)
    if x is None or y is None or x.shape != y.shape:
      result[name] = float("inf")
    else:
      difference = np.abs(x.astype(np.float64) - y).max(initial=0.0)
      result[name] = float("inf") if np.isnan(difference) else float(difference)
  return result


@dataclasses.dataclass(frozen=True)
class Reference:
  """A referee's run: tokens, and the state after each of them.

  `drafter` says whether the states have a drafter's context.
  """

  prompt: list[int]
  sampling: SamplingParams
  tokens: tuple[int, ...]
  states: list[Snapshot]
  drafter: bool

  @property
  def sequence(self) -> list[int]:
    return [*self.prompt, *self.tokens]


def referee(engine: Engine, prompt, sampling, reference=None) -> Reference:
  """Runs an engine that commits one token per step and records every state.

  Args:
    reference: for an engine with a scripted drafter, which then offers no
      drafts: the referee of the drafter's context.
  """
  if isinstance(engine.drafter, ScriptedDrafter):
    engine.drafter.load("none", reference)
  tokens, states = [], []
  for carry, result in engine.steps(prompt, sampling):
    assert len(result.tokens) == 1
    tokens += result.tokens
    states.append(snapshot(carry))
  return Reference(
    list(prompt), sampling, tuple(tokens), states, engine.drafter is not None
  )


class Mismatch(AssertionError):
  """The speculative engine is not the referee.

  Attributes:
    check: what differs: `tokens`, or the name of a part of the state without
      its layer.
  """

  def __init__(self, check: str, text: str):
    super().__init__(f"{check}: {text}")
    self.check = check


@dataclasses.dataclass
class Comparison:
  """What a speculative run did, and its largest distance from the referee."""

  accepted: list[int]
  drafted: list[int]
  depths: list[int]
  emitted: list[int]
  worst: dict[str, float]

  @property
  def worst_state(self) -> float:
    return max(self.worst.values(), default=0.0)


def compare(
  engine: Engine,
  reference: Reference,
  *more: Reference,
  keep: list[Snapshot] | None = None,
) -> Comparison:
  """Runs the request speculatively; checks every token and every state.

  Args:
    engine: its script, if any, is loaded.
    reference: the one-token referee's run.
    more: further runs to compare the states with.
    keep: where the state after each step goes.

  Raises:
    Mismatch: at the first difference.
  """
  tokens: list[int] = []
  done = Comparison([], [], [], [], {})
  for carry, result in engine.steps(reference.prompt, reference.sampling):
    tokens += result.tokens
    done.accepted.append(result.accepted)
    done.drafted.append(result.drafted)
    done.depths.append(result.depth)
    done.emitted.append(len(result.tokens))
    step = f"step {len(done.emitted)}, {len(tokens)} tokens"
    if tuple(tokens) != reference.tokens[: len(tokens)]:
      raise Mismatch(
        "tokens",
        f"{step}: {result.tokens} instead of"
        f" {reference.tokens[len(tokens) - len(result.tokens) : len(tokens)]}",
      )
    if not tokens:
      raise Mismatch("tokens", f"{step}: nothing was emitted")
    now = snapshot(carry)
    if keep is not None:
      keep.append(now)
    for other in (reference, *more):
      found = differences(
        now, other.states[len(tokens) - 1], drafter=other.drafter
      )
      name = max(found, key=lambda n: (found[n], n))
      if found[name] > STATE_TOLERANCE:
        raise Mismatch(
          name.rsplit(".", 1)[-1] if name[0].isdigit() else name,
          f"{step}: {name} differs by {found[name]:.3g}",
        )
      for part, value in found.items():
        done.worst[part] = max(done.worst.get(part, 0.0), value)
  if tuple(tokens) != reference.tokens:
    raise Mismatch(
      "tokens", f"{len(tokens)} instead of {len(reference.tokens)}"
    )
  return done


def kernel_calls(engine: Engine, module, name: str) -> list[int]:
  """How often prefill, step and score of 8 tokens call a module's function."""
  fns, carry = engine._base, engine.fresh_carry()
  tokens, count = jnp.zeros(8, jnp.int32), jnp.int32(8)
  request = engine.request(SamplingParams())
  calls = []
  for function, arguments in (
    (fns.prefill, (tokens, count)),
    (fns.step, (request,)),
    (fns.score, (request, tokens, tokens, count, 0.0)),
  ):
    with mock.patch.object(module, name, wraps=getattr(module, name)) as kernel:
      jax.eval_shape(function, engine._params, carry, *arguments)
    calls.append(kernel.call_count)
  return calls
