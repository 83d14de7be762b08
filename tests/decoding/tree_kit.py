"""Scripted lattices for trees: where the right token stands, slot by slot."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from tests.decoding import kit

SLOTS, CANDIDATES = 5, 4
FIRST, SECOND, RANDOM = 0, 1, -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatticeContext(kit.ScriptContext):
  """A script whose lattices have more than one candidate.

  `rank` is the right token's rank under every parent when the anchor stands at
  a position: `FIRST`, `SECOND`, or `RANDOM` for another one in each row.
  """

  rank: jax.Array  # [T]


class LatticeDrafter(kit.ScriptedDrafter):
  """Candidates off a script, one of each slot right as far as it says.

  Scores of the best two are close, so that trees branch at every depth; those
  of the rest are far below.

  Args:
    conditional: scores depend on the parent.
  """

  name = "lattices"

  def __init__(self, num_slots, config, *, conditional, variable_length=False):
    super().__init__(num_slots, config, variable_length=variable_length)
    self.conditional = conditional
    self._rank: Any = None

  def load(self, mode, reference, seed=0, wrong=kit.ANY):
    """As of a chain; `first` and `second` say the right token's rank too."""
    rank = {"first": FIRST, "second": SECOND}.get(mode, RANDOM)
    chain = "oracle" if mode in ("first", "second") else mode
    super().load(chain, reference, seed, wrong)
    rng = np.random.default_rng(seed + 1)
    size = len(reference)
    self._rank = np.full(size, rank)
    if mode == "mixed":
      self._rank = rng.integers(RANDOM, SECOND + 1, size)

  def init_context(self, capacity):
    plain = super().init_context(capacity)
    fields = {
      field.name: getattr(plain, field.name)
      for field in dataclasses.fields(plain)
    }
    return LatticeContext(rank=jnp.zeros((capacity,), jnp.int32), **fields)

  def scripted(self, context):
    rank = np.resize(self._rank.astype(np.int32), context.seen.shape[0])
    context = super().scripted(context)
    return dataclasses.replace(context, rank=jnp.asarray(rank))

  def draft(self, params, context, anchor, position):
    chain = super().draft(params, context, anchor, position)
    slots = self.num_slots
    index = jnp.arange(slots, dtype=jnp.int32)
    # `chain` says the right token, or a wrong one from some slot on. The
    # others differ from it; strangers may be among them.
    said = chain.tokens[:, :1]
    others = (said + 1 + jnp.arange(CANDIDATES)) % self.vocab
    scripted = context.wrong[position]
    strangers = (scripted != kit.ANY) & (jnp.arange(CANDIDATES) % 2 == 1)
    others = jnp.where(strangers, scripted, others)
    key = jax.random.fold_in(jax.random.key(7), position)
    keys = jax.random.split(key, 4)
    place = jax.random.randint(keys[0], (slots,), 0, CANDIDATES)
    tokens = others.at[index, place].set(said[:, 0])

    parents = CANDIDATES if self.conditional else 1
    shape = (slots, parents, CANDIDATES)
    gaps = jax.random.uniform(keys[1], shape, jnp.float32)
    gaps = gaps * jnp.asarray([0.02, 0.02, 4.0, 8.0])
    by_rank = -jnp.cumsum(gaps, axis=-1)
    ranks = jnp.argsort(jax.random.uniform(keys[2], shape), axis=-1)
    wanted = context.rank[position]
    free = jax.random.randint(keys[3], shape[:2], 0, CANDIDATES)
    wanted = jnp.where(wanted == RANDOM, free, wanted)[..., None]
    # Who has the wanted rank changes places with the right token.
    here = jnp.arange(CANDIDATES) == place[:, None, None]
    own = jnp.where(here, ranks, 0).sum(axis=-1, keepdims=True)
    ranks = jnp.where(ranks == wanted, own, jnp.where(here, wanted, ranks))
    scores = jnp.take_along_axis(by_rank, ranks, axis=-1)
    return Lattice(
      tokens=tokens.astype(jnp.int32),
      scores=scores if self.conditional else scores[:, 0],
      count=chain.count,
    )


@functools.cache
def engine(
  config,
  dtype: str = "float64",
  *,
  tree: str = "best_first",
  node_budget: int | None = 64,
  conditional: bool = True,
  num_slots: int = SLOTS,
  variable_length: bool = False,
  max_seq_len: int = 256,
) -> kit.ScriptedEngine:
  """An engine with scripted lattices; its `load` sets the script."""
  return kit.ScriptedEngine(
    kit.build(config, dtype),
    drafter=LatticeDrafter(
      num_slots,
      config,
      conditional=conditional,
      variable_length=variable_length,
    ),
    system=SystemConfig(tree=tree, node_budget=node_budget),
    max_seq_len=max_seq_len,
    prefill_chunk=8,
  )


@functools.cache
def prompt_lookup(config, node_budget: int = 64) -> Engine:
  """An engine that verifies trees of prompt lookup."""
  return Engine(
    kit.build(config, "float64"),
    drafter=PromptLookup(SLOTS, min_ngram=1),
    system=SystemConfig(tree="best_first", node_budget=node_budget),
    max_seq_len=256,
    prefill_chunk=8,
  )
