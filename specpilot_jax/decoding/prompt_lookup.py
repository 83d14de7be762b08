"""Prompt lookup: drafts copied from the last place where the text matched.

The drafter needs no training: it looks for the longest n-gram that ends at the
anchor and stood earlier in prompt or output, and proposes what followed it
(the latest such place counts).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specpilot_jax.configs import is_integer
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.errors import SpecPilotError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookupContext:
  """The committed tokens by position; those before the anchor's count."""

  tokens: Int[Array, " T"]


class PromptLookup:
  """N-gram drafter.

  The defaults were the fastest of those tried with SmolLM2-135M on HumanEval
  prompts in float32 on two CPU cores (WORKSPACE_NOTES, 2026-11-29).

  Args:
    num_slots: drafts per step at most.
    max_ngram, min_ngram: lengths of n-gram to look for, longest first.
  """

  name = "prompt_lookup"
  taps: tuple[int, ...] = ()
  vocab_size = None
  variable_length = True
  params = ()

  def __init__(
    self, num_slots: int = 9, *, max_ngram: int = 5, min_ngram: int = 3
  ):
    for what, value in (
      ("num_slots", num_slots),
      ("max_ngram", max_ngram),
      ("min_ngram", min_ngram),
    ):
      if not is_integer(value):
        raise SpecPilotError(
          f"prompt_lookup: {what} must be an integer, got {value!r}"
        )
    if num_slots < 1:
      raise SpecPilotError(f"prompt_lookup: num_slots {num_slots} is below 1")
    if not 1 <= min_ngram <= max_ngram:
      raise SpecPilotError(
        f"prompt_lookup: n-grams from {min_ngram} to {max_ngram} tokens do not"
        " make a range of positive lengths"
      )
    self.num_slots = num_slots
    self.max_ngram = max_ngram
    self.min_ngram = min_ngram

  def init_context(self, capacity: int) -> PromptLookupContext:
    return PromptLookupContext(tokens=jnp.zeros((capacity,), jnp.int32))

  def extend(
    self,
    params: tuple[()],
    context: PromptLookupContext,
    tokens: Int[Array, " P"],
    taps: Float[Array, "P L D"],
    start: Int[Array, ""],
    count: Int[Array, ""],
  ) -> PromptLookupContext:
    """Appends `count` committed tokens; needs room for all P of them."""
    del params, taps
    kept = jnp.where(jnp.arange(tokens.shape[0]) < count, tokens, 0)
    return PromptLookupContext(
      tokens=lax.dynamic_update_slice(context.tokens, kept, (start,))
    )

  def draft(
    self,
    params: tuple[()],
    context: PromptLookupContext,
    anchor: Int[Array, ""],
    position: Int[Array, ""],
  ) -> Lattice:
    """What followed the latest occurrence of the longest matching n-gram."""
    del params
    capacity = context.tokens.shape[0]
    end = position + 1  # tokens known, anchor included
    history = lax.dynamic_update_index_in_dim(
      context.tokens, anchor, position, 0
    )
    index = jnp.arange(capacity, dtype=jnp.int32)
    # matched[i]: the length of the run that ends before i and equals the run
    # that ends at the anchor, up to max_ngram.
    matched = jnp.zeros((capacity,), jnp.int32)
    running = jnp.ones((capacity,), dtype=bool)
    for back in range(self.max_ngram):
      same = jnp.roll(history, back + 1) == history[position - back]
      running &= same & (index > back) & (position >= back)
      matched += running
    matched = jnp.where((index < end) & (matched >= self.min_ngram), matched, 0)
    # Longest first, then latest.
    place = jnp.argmax(matched * capacity + index * (matched > 0))
    found = matched[place] > 0
    slots = jnp.arange(self.num_slots, dtype=jnp.int32)
    # Past the end of the text the copy repeats with its own period.
    source = place + slots % jnp.maximum(end - place, 1)
    count = jnp.where(found, self.num_slots, 0)
    return Lattice(
      tokens=history[source][:, None],
      scores=jnp.zeros((self.num_slots, 1), jnp.float32),
      count=count.astype(jnp.int32),
    )
