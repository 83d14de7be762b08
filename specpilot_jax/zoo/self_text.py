"""Text that a target generates itself, many sequences at once.

Drafters learn what their target says, so they are trained on it. All prompts
have one length; generation runs past end-of-text ids, into the next document,
as the training stream does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from specpilot_jax.decoding.commit import commit
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target


def generate(
  model: Target,
  prompts: Int[np.ndarray, "R P"],
  new_tokens: int,
  temperatures: np.ndarray,
  seed: int,
) -> np.ndarray:
  """Samples `new_tokens` after each prompt.

  Args:
    prompts: ids, all of one length of at least 2.
    temperatures: one per row; 0 is greedy.

  Returns:
    Prompts and outputs [R, P + new_tokens], int32.
  """
  graphdef, params = nnx.split(model)
  rows, length = prompts.shape
  capacity = length + new_tokens + 1
  one = jnp.zeros((1,), jnp.int32)

  def start(params, prompt):
    model = nnx.merge(graphdef, params)
    state = state_lib.init_state(model.config, capacity, model.dtype)
    nodes = state_lib.run_of(prompt[:-1], length - 1, prefill=True)
    out = model(nodes, state)
    path = jnp.arange(length - 1, dtype=jnp.int32)
    return commit(state, out.stash, path, nodes.count)

  def step(params, carry, key, temperature):
    model = nnx.merge(graphdef, params)
    state, token = carry
    out = model(state_lib.run_of(token[None], 1, prefill=False), state)
    logits = model.logits(out.hidden)[0]
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    scaled = logits + temperature * noise
    token = jnp.argmax(scaled).astype(jnp.int32)
    return (commit(state, out.stash, one, jnp.int32(1)), token), token

  @jax.jit
  def run(params, prompts, temperatures, key):
    states = jax.vmap(start, in_axes=(None, 0))(params, prompts)

    def body(carry, key):
      keys = jax.random.split(key, rows)
      return jax.vmap(step, in_axes=(None, 0, 0, 0))(
        params, carry, keys, temperatures
      )

    keys = jax.random.split(key, new_tokens)
    _, tokens = jax.lax.scan(body, (states, prompts[:, -1]), keys)
    return jnp.concatenate([prompts, tokens.T], axis=1)

  return np.asarray(
    run(
      params,
      jnp.asarray(prompts, jnp.int32),
      jnp.asarray(temperatures, jnp.float32),
      jax.random.key(seed),
    )
  )


def loop_starts(
  tokens: np.ndarray, *, window: int = 96, period: int = 48
) -> np.ndarray:
  """Where each row starts to repeat itself: what follows teaches nothing.

  Args:
    tokens: [R, N].
    window: a row loops if its last `window` tokens have a period.
    period: of at most so many tokens.

  Returns:
    int [R]: index of the second repetition's first token, N where a row does
    not loop.
  """
  rows, n = tokens.shape
  starts = np.full(rows, n)
  for p in range(1, period + 1):
    differs = tokens[:, p:] != tokens[:, :-p]  # [R, N - p]
    last = np.where(differs.any(1), n - p - 1 - differs[:, ::-1].argmax(1), -1)
    first = last + 1 + p  # the first token that repeats, to the end
    loops = (starts == n) & (n - first >= window - p)
    starts[loops] = first[loops]
  return starts
