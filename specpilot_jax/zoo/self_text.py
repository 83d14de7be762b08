"""Text that a target generates itself, many sequences at once.

Drafters learn what their target says, so they are trained on it. Generation
runs past end-of-text ids.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specpilot_jax.decoding.commit import commit
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
  graphdef,
  new_tokens: int,
  params,
  empty: state_lib.TargetState,
  prompts: Int[Array, "R P"],
  lengths: Int[Array, " R"],
  temperatures: Float[Array, " R"],
  key,
) -> Int[Array, "R T"]:
  """The outputs alone. `empty` is an argument because XLA would compute what
  is masked of a constant."""
  rows, longest = prompts.shape

  def start(prompt, length):
    model = nnx.merge(graphdef, params)
    nodes = state_lib.run_of(prompt[:-1], length - 1, prefill=True)
    out = model(nodes, empty)
    path = jnp.arange(longest - 1, dtype=jnp.int32)
    return commit(empty, out.stash, path, nodes.count), prompt[length - 1]

  def step(carry, key, temperature):
    model = nnx.merge(graphdef, params)
    state, token = carry
    out = model(state_lib.run_of(token[None], 1, prefill=False), state)
    logits = model.logits(out.hidden)[0]
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    token = jnp.argmax(logits + temperature * noise).astype(jnp.int32)
    one = jnp.zeros((1,), jnp.int32)
    return (commit(state, out.stash, one, jnp.int32(1)), token), token

  def body(carry, key):
    return jax.vmap(step)(carry, jax.random.split(key, rows), temperatures)

  carry = jax.vmap(start)(prompts, lengths)
  return jax.lax.scan(body, carry, jax.random.split(key, new_tokens))[1].T


def generate(
  model: Target,
  prompts: Sequence[Sequence[int]],
  new_tokens: int,
  temperatures: np.ndarray,
  seed: int,
) -> np.ndarray:
  """Samples `new_tokens` after each prompt.

  Args:
    prompts: ids, at least 2 each.
    temperatures: one per row; 0 is greedy.

  Returns:
    Prompts and outputs [R, longest prompt + new_tokens], int32; behind a
    shorter prompt's output a row is zero.
  """
  graphdef, params = nnx.split(model)
  lengths = np.asarray([len(p) for p in prompts], np.int32)
  width = int(lengths.max())
  # Rounded up, so that few executables serve prompts of all lengths.
  padded = np.zeros((len(prompts), -(-width // 64) * 64), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  capacity = padded.shape[1] + new_tokens + 1
  outputs = np.asarray(
    _run(
      graphdef,
      new_tokens,
      params,
      state_lib.init_state(model.config, capacity, model.dtype),
      padded,
      lengths,
      np.asarray(temperatures, np.float32),
      jax.random.key(seed),
    )
  )
  result = np.zeros((len(prompts), width + new_tokens), np.int32)
  for row, prompt, output in zip(result, prompts, outputs, strict=True):
    row[: len(prompt)] = prompt
    row[len(prompt) : len(prompt) + new_tokens] = output
  return result


def loop_starts(
  tokens: np.ndarray,
  stops: np.ndarray,
  *,
  window: int = 96,
  period: int = 48,
) -> np.ndarray:
  """Where each row starts to repeat itself: what follows teaches nothing.

  Args:
    tokens: [R, N].
    stops: [R], where each row ends.
    window: a row loops if its last `window` tokens have a period.
    period: of at most so many tokens.

  Returns:
    int [R]: index of the second repetition's first token; `stops` where a row
    does not loop.
  """
  n = tokens.shape[1]
  index = np.arange(n)
  starts = stops.copy()
  for p in range(1, period + 1):
    differs = np.zeros(tokens.shape, bool)
    differs[:, p:] = tokens[:, p:] != tokens[:, :-p]
    differs &= index < stops[:, None]
    last = np.where(differs.any(1), n - 1 - differs[:, ::-1].argmax(1), p - 1)
    first = last + 1  # the first token that repeats, to the end
    loops = (starts == stops) & (stops - first >= window - p)
    starts[loops] = first[loops]
  return starts
