"""The losslessness kit: small hybrids, scripted drafters, and a referee.

A referee decodes with the one-token executable and keeps the state after every
token. A speculative engine must emit the same tokens, and after each of its
commits its state must equal the referee's after the same number of tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specpilot_jax import configs
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.models import state as state_lib
from specpilot_jax.models import target as target_lib

MODES = (
  "oracle",
  "always_wrong",
  "empty",
  "mixed",
  "out_of_range",
  "tail_wrong",
  "none",
)


def hybrid(vocab_size=61, **overrides) -> configs.ModelConfig:
  """Three GDN layers, one attention layer; two value heads per key head."""
  settings = dict(
    name="tiny-hybrid",
    family="qwen3_5",
    vocab_size=vocab_size,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(configs.GDN,) * 3 + (configs.ATTENTION,),
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


def build(config, dtype: str, seed: int = 0, scale: float = 1.3):
  params = target_lib.random_params(config, seed, scale)
  return target_lib.build(config, params, dtype)


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
  """Random prompts; their lengths cover 1, conv, chunk and block edges."""
  rng = np.random.default_rng(seed)
  edges = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33]
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
  wrong: jax.Array  # [T] what wrong drafts say; 0 for a token in range
  seen: jax.Array  # [T]
  features: jax.Array  # [T, taps, D]
  length: jax.Array


class ScriptedDrafter:
  """Drafts read off a script: right, then wrong, as many as it says."""

  name = "scripted"
  taps = (0, 3)
  vocab_size = None
  params = ()

  def __init__(self, num_slots: int, config, *, variable_length=False):
    self.num_slots = num_slots
    self.vocab = config.valid_vocab
    self.hidden = config.hidden_size
    self.variable_length = variable_length
    self._script = None

  def load(self, mode: str, reference, seed: int = 0) -> None:
    """Sets the script; the engine must start a new request afterwards."""
    rng = np.random.default_rng(seed)
    size, k = len(reference), self.num_slots
    right, offered = np.full(size, k), np.full(size, k)
    wrong = np.zeros(size)
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
      wrong = np.where(rng.random(size) < 0.5, -1, self.vocab + 7)
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

    reference, right, offered, wrong = self._script
    return dataclasses.replace(
      context,
      reference=place(reference),
      right=place(right),
      offered=place(offered),
      wrong=place(wrong),
    )

  def extend(self, params, context, tokens, taps, start, count):
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
    slots = jnp.arange(self.num_slots, dtype=jnp.int32)
    capacity = context.reference.shape[0]
    right = context.reference[jnp.minimum(position + 1 + slots, capacity - 1)]
    wrong = (right + 1 + slots) % self.vocab
    scripted = context.wrong[position]
    wrong = jnp.where(scripted == 0, wrong, scripted)
    tokens = jnp.where(slots < context.right[position], right, wrong)
    return Lattice(
      tokens=tokens[:, None].astype(jnp.int32),
      scores=jnp.zeros((self.num_slots, 1), jnp.float32),
      count=context.offered[position],
    )


class ScriptedEngine(Engine):
  """An engine that puts the script back after the reset."""

  def _start(self, compiled, prompt, limit):
    carry = super()._start(compiled, prompt, limit)
    if isinstance(self.drafter, ScriptedDrafter):
      carry = dataclasses.replace(
        carry, drafter=self.drafter.scripted(carry.drafter)
      )
    return carry


def snapshot(carry) -> list[np.ndarray]:
  """The meaningful part of a carry as host arrays.

  Position, anchor, keys and values up to the length, GDN states, conv windows,
  and what a scripted drafter's context holds (after the rest).
  """
  length = int(carry.target.length)
  parts = [np.asarray(length), np.asarray(carry.anchor)]
  for layer in carry.target.layers:
    if isinstance(layer, state_lib.AttentionState):
      parts += [np.asarray(layer.k)[:, :length], np.asarray(layer.v)[:, :length]]
    else:
      parts += [np.asarray(layer.recurrent), np.asarray(layer.conv)]
  if isinstance(carry.drafter, ScriptContext):
    parts += [np.asarray(carry.drafter.length)]
    parts += [np.asarray(carry.drafter.seen)[:length]]
    parts += [np.asarray(carry.drafter.features)[:length]]
  return parts


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
  """Largest absolute difference; infinite where shapes differ."""
  worst = 0.0
  # A referee without a drafter has no drafter context to compare.
  for x, y in zip(a, b, strict=False):
    if x.shape != y.shape:
      return float("inf")
    if x.size:
      worst = max(worst, float(np.max(np.abs(x - y))))
  return worst


@dataclasses.dataclass
class Reference:
  """A referee's run: tokens, and the state after each of them."""

  output: object
  states: list[list[np.ndarray]]

  def state_after(self, tokens: int) -> list[np.ndarray]:
    return self.states[tokens - 1]


def referee(engine: Engine, prompt, sampling) -> Reference:
  """Runs the one-token engine and records every state."""
  states = [
    snapshot(carry) for carry, _ in engine.steps(prompt, sampling)
  ]
  return Reference(output=engine.generate(prompt, sampling), states=states)
