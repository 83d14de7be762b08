"""A resumable optimisation loop."""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from specpilot_jax.zoo.recipes import Schedule


def learning_rate(schedule: Schedule) -> optax.Schedule:
  """Warm-up, constant, then linear decay to zero over the last steps."""
  decay = max(1, int(schedule.steps * schedule.decay_fraction))
  return optax.join_schedules(
    [
      optax.linear_schedule(0.0, schedule.peak, schedule.warmup),
      optax.constant_schedule(schedule.peak),
      optax.linear_schedule(schedule.peak, 0.0, decay),
    ],
    [schedule.warmup, max(schedule.warmup, schedule.steps - decay)],
  )


_TABLES = {
  "embed",
  "conv_weight",
  "predecessor_codebook",
  "successor_codebook",
  "markov_head",
}
"""Parts of names of what has an axis of tokens or taps."""


def _names(path) -> set[Any]:
  return {getattr(p, "key", getattr(p, "name", p)) for p in path}


def _matrices(params: Any) -> Any:
  """Which parameters are matrices between hidden spaces."""

  def leaf(path, x):
    hidden = x.ndim == 2 and not _TABLES & _names(path)
    return optax.contrib.MuonDimensionNumbers() if hidden else None

  return jax.tree_util.tree_map_with_path(leaf, params)


def _decayed(params: Any) -> Any:
  """All but vectors, and kernels whose rest is the identity."""

  def leaf(path, x):
    return x.ndim > 1 and "base_kernel" not in _names(path)

  return jax.tree_util.tree_map_with_path(leaf, params)


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
  """AdamW or Muon before its learning rate; `_decayed` says what decays."""
  rule = optax.scale_by_adam(b1=0.9, b2=0.95)
  if schedule.muon:
    rule = optax.chain(
      optax.contrib.muon(
        1.0,
        consistent_rms=0.2,
        adam_b2=0.95,
        muon_weight_dimension_numbers=_matrices,
      ),
      optax.scale(-1.0),  # back to an ascent direction, as Adam's is
    )
  return optax.chain(
    optax.clip_by_global_norm(schedule.clip),
    rule,
    optax.add_decayed_weights(
      schedule.weight_decay,
      mask=_decayed,
    ),
  )


def _cut_log(path: pathlib.Path, step: int) -> None:
  """Drops the lines of steps that a killed run took after its last save."""
  kept = []
  for line in path.read_text().splitlines():
    try:
      if json.loads(line)["step"] > step:
        break
    except ValueError:  # killed while it wrote
      break
    kept.append(line + "\n")
  part = path.with_suffix(".part")
  part.write_text("".join(kept))
  part.rename(path)


def train(
  params: Any,
  loss: Callable[[Any, Any], jax.Array],
  batch_at: Callable[[int], Any],
  schedule: Schedule,
  work_dir: pathlib.Path,
  *,
  deadline: float | None = None,
  save_every_s: float = 120.0,
  log_every: int = 50,
) -> tuple[Any, bool]:
  """Minimises `loss`, resuming from `work_dir` where it was interrupted.

  Batches depend on the step alone, so that a resumed run takes the same steps
  as one that was never interrupted.

  Args:
    params: float32 master parameters, a pytree.
    loss: (params, batch) -> scalar.
    batch_at: step -> batch, a pytree of arrays.
    schedule: steps and learning rate.
    work_dir: holds `state` (Orbax) and `loss.jsonl`.
    deadline: `time.monotonic()` value after which the state is saved and the
      loop left.

  Returns:
    Parameters, and whether all steps are done.
  """
  work_dir = pathlib.Path(work_dir).absolute()
  work_dir.mkdir(parents=True, exist_ok=True)
  opt = optimizer(schedule)
  state = {
    "params": params,
    "opt": opt.init(params),
    "step": jnp.zeros((), jnp.int32),
  }
  store = ocp.CheckpointManager(
    work_dir / "state",
    options=ocp.CheckpointManagerOptions(
      max_to_keep=1, enable_async_checkpointing=False
    ),
  )
  if store.latest_step() is not None:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    state = store.restore(
      store.latest_step(), args=ocp.args.StandardRestore(abstract)
    )
  start = int(np.asarray(state["step"]).item())
  steps = jnp.arange(schedule.steps)
  rates = np.asarray(jnp.asarray(jax.vmap(learning_rate(schedule))(steps)))
  rates = rates.astype(np.float32)

  # The rate is an argument: one executable whatever the number of steps.
  @jax.jit
  def update(state, batch, rate):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    updates, opt_state = opt.update(grads, state["opt"], state["params"])
    updates = jax.tree.map(lambda u: -rate * u, updates)
    new = {
      "params": optax.apply_updates(state["params"], updates),
      "opt": opt_state,
      "step": state["step"] + 1,
    }
    return new, value

  def save(step):
    if store.latest_step() != step:
      store.save(step, args=ocp.args.StandardSave(state))

  if (work_dir / "loss.jsonl").exists():
    _cut_log(work_dir / "loss.jsonl", start)
  saved = began = time.monotonic()
  pending = []
  with (work_dir / "loss.jsonl").open("a") as log:

    def flush(step):
      nonlocal pending
      mean = float(jnp.stack(pending).mean())
      elapsed = time.monotonic() - began
      line = {"step": step, "loss": round(mean, 5), "s": round(elapsed, 1)}
      log.write(json.dumps(line) + "\n")
      log.flush()
      print(json.dumps(line), flush=True)
      pending = []

    for step in range(start, schedule.steps):
      state, value = update(state, batch_at(step), rates[step])
      pending.append(value)
      now = time.monotonic()
      if (step + 1) % log_every == 0:
        flush(step + 1)
        now = time.monotonic()
        if deadline is not None and now > deadline:
          save(step + 1)
          return state["params"], False
        if now - saved > save_every_s:
          save(step + 1)
          saved = time.monotonic()
    if pending:
      flush(schedule.steps)
  save(schedule.steps)
  return state["params"], True
