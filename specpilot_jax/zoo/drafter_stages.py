"""From a target to its drafter: generated text, then training on it."""

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import (
  drafter_training,
  optimizer,
  recipes,
  self_text,
  training,
)
from specpilot_jax.zoo.text import Rows, Shelf, chosen_rows


def write_text(
  recipe: recipes.DrafterRecipe,
  target: Target,
  prompts_of: Callable[[int], Sequence[Sequence[int]]],
  folder: pathlib.Path,
  stop_ids: Sequence[int],
  deadline: float | None,
) -> bool:
  """Writes the rounds that `folder` lacks; False where the deadline stops it.

  Args:
    prompts_of: round -> `recipe.rows` prompts.
    stop_ids: an output ends with the first of them.
  """
  length = recipe.schedule.phases[0].length
  temperatures = np.resize(recipe.temperatures, recipe.rows)
  new_tokens = length - recipe.prompt_tokens
  folder.mkdir(exist_ok=True)
  for i in range(recipe.rounds):
    path = folder / f"{i:03}.npz"
    if path.exists():
      continue
    if deadline is not None and time.monotonic() > deadline:
      return False
    began = time.monotonic()
    prompts = prompts_of(i)
    tokens = self_text.generate(
      target, prompts, new_tokens, temperatures, seed=i
    )
    tokens = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))
    starts = np.asarray([len(p) for p in prompts], np.int32)
    rows = rows_of(tokens, starts, new_tokens, temperatures > 0, stop_ids)
    part = path.with_suffix(".part.npz")
    rows.save(part)
    part.rename(path)
    line = {
      "round": i,
      "loops": int((rows.ends < starts + new_tokens).sum()),
      "greedy_tokens": int(rows.anchors[~rows.sampled].sum()),
      "sampled_tokens": int(rows.anchors[rows.sampled].sum()),
      "s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(line), flush=True)
  return True


def rows_of(
  tokens: np.ndarray,
  starts: np.ndarray,
  new_tokens: int,
  sampled: np.ndarray,
  stop_ids: Sequence[int],
) -> Rows:
  """Rows whose outputs end at the first stop id or where they loop."""
  index = np.arange(tokens.shape[1])
  outside = (index < starts[:, None]) | (
    index >= (starts + new_tokens)[:, None]
  )
  stops = np.isin(tokens, list(stop_ids)) & ~outside
  ends = np.where(stops.any(1), stops.argmax(1) + 1, starts + new_tokens)
  ends = np.maximum(self_text.loop_starts(tokens, ends), starts)
  return Rows(
    tokens=tokens.astype(np.uint16),
    starts=starts,
    ends=ends.astype(np.int32),
    sampled=sampled,
  )


def train(
  recipe: recipes.DrafterRecipe,
  target: Target,
  work: pathlib.Path,
  deadline: float | None,
) -> bool:
  """Trains on `work/text` and writes the folder of the drafter's kind in
  `work`; False at the deadline."""
  config, schedule = recipe.config, recipe.schedule
  graphdef, state = nnx.split(learned.module(config, jnp.float32, nnx.Rngs(4)))
  compute_def, _ = nnx.split(
    nnx.eval_shape(lambda: learned.module(config, jnp.bfloat16, nnx.Rngs(0)))
  )
  shelf = Shelf(
    sorted((work / "text").glob("???.npz")),
    target,
    config.target_layers,
    rows=schedule.phases[0].sequences,
    anchors=recipe.anchors,
    visits=recipe.visits,
    surprise=recipe.surprise,
    seed=5,
  )
  head = target.embed if target.config.tie_embeddings else target.lm_head
  shared = (target.embed.weight[...], head.weight[...])

  def loss(state, batch):
    (text, rows, anchors), (embedding, head), selector = batch
    return drafter_training.loss(
      nnx.merge(compute_def, training.cast(state, jnp.bfloat16)),
      embedding,
      head,
      chosen_rows(text, rows),
      anchors,
      recipe,
      selector,
    )[0]

  state, done = optimizer.train(
    state,
    loss,
    lambda step: (
      shelf.at(step),
      shared,
      np.float32(recipe.selector_at(step)),
    ),
    schedule,
    work / f"{config.kind}_training",
    deadline=deadline,
  )
  if done:
    shutil.rmtree(work / config.kind, ignore_errors=True)
    drafter_io.save(work / config.kind, nnx.merge(graphdef, state))
  return done


def scaled(
  recipe: recipes.DrafterRecipe, scale: float
) -> recipes.DrafterRecipe:
  """A recipe with all step and round counts multiplied."""
  return dataclasses.replace(
    recipe,
    schedule=recipe.schedule.scaled(scale),
    rounds=max(1, int(recipe.rounds * scale)),
  )
