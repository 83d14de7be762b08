"""Step classes as executables of their own, where no profiler tells kernels.

Each class is the engine's own modules with the others' part cut out: the mixers
without their projections (whose outputs are noise), the projections and MLPs
alone, the drafter alone. What is left of the whole step, timed alone too, is
class `other`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.cost_model import kernels
from experiments.cost_model.floors import Roofline, itemsize
from experiments.cost_model.recorder import Session
from specpilot_jax import configs
from specpilot_jax.decoding.commit import commit
from specpilot_jax.models import layers
from specpilot_jax.models import state as state_lib

_REPEATS, _SECONDS = 20, 1.0


def time_us(function: Callable[..., Any], *args: Any) -> float:
  """Least time of a compiled function's calls, the first not counted.

  The least, since all that disturbs a call on a shared processor adds to it:
  with four other jobs on two cores, calls of one executable took 2 to 21 ms
  (2026-11-29).
  """

  def again(state, *args):
    del state
    return function(*args), None

  return time_chain_us(again, None, *args)


def time_chain_us(
  function: Callable[..., Any], state: Any, *args: Any
) -> float:
  """Least time of `state, _ = function(state, *args)`, called again and again.

  A state that is donated is updated in place, as in decoding.
  """
  times: list[float] = []
  while len(times) <= _REPEATS or sum(times) < _SECONDS:
    started = time.perf_counter()
    state, rest = function(state, *args)
    jax.block_until_ready((state, rest))
    times.append(time.perf_counter() - started)
  return 1e6 * min(times[1:])


class _Cut:
  """Stands in for a projection: keeps its input, returns noise."""

  def __init__(self, rows: int, noise: jax.Array, inputs: list[jax.Array]):
    self._rows, self._noise, self._inputs = rows, noise, inputs

  def __call__(self, x: jax.Array) -> jax.Array:
    self._inputs.append(x)
    return _matrix(self._noise, x.shape[0], self._rows)


def _matrix(noise: jax.Array, rows: int, columns: int) -> jax.Array:
  return noise[: rows * columns].reshape(rows, columns)


_PROJECTIONS = ("qkv", "o_proj", "in_proj", "out_proj")


class Parts:
  """The classes of one session's step as functions to be timed."""

  def __init__(self, session: Session, carry: Any, request: Any):
    self._session = session
    self._carry, self._request = carry, request
    config, dtype = session.target.config, session.target.dtype
    self._nodes = session.policy.rows
    self._path = session.policy.path
    widest = max(_widest(config), config.hidden_size, config.intermediate_size)
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.5, self._nodes * widest)
    self._noise = jnp.asarray(noise, dtype)

  def classes_us(self) -> tuple[dict[str, float], float]:
    """Times of the classes, and of the whole step.

    Class `other` is the step less the others, at least 0.
    """
    session = self._session
    params, noise = session.params, self._noise
    request = self._request

    def in_place(function, **kwargs):
      return jax.jit(function, donate_argnums=0, **kwargs)

    def fresh():
      return jax.tree.map(jnp.copy, self._carry)

    classes = dict.fromkeys(kernels.CLASSES, 0.0)
    classes[kernels.TARGET_GEMM] = time_us(
      jax.jit(self._weights), params[0], noise
    )
    for kind, name in (
      (configs.GDN, kernels.RECURRENT),
      (configs.ATTENTION, kernels.ATTENTION),
    ):
      if kind in session.target.config.layer_types:
        mixers = in_place(functools.partial(self._mixers, kind))
        state = self._part(fresh().target, kind)
        classes[name] = time_chain_us(mixers, state, params[0], noise)
    if session.drafter is not None:
      carry = fresh()
      classes[kernels.DRAFTER] = time_chain_us(
        in_place(self._drafter),
        carry.drafter,
        params[1],
        carry.anchor,
        carry.target.length,
        request,
        noise,
      )
    step_us = time_chain_us(
      lambda carry: session.step(params, carry, request), fresh()
    )
    rest = step_us - sum(classes.values())
    classes[kernels.OTHER] = max(rest, 0.0)
    return classes, step_us

  def _part(self, state, kind) -> state_lib.TargetState:
    """The layers of one kind."""
    kinds = self._session.target.config.layer_types
    return state_lib.TargetState(
      layers=tuple(
        s for s, own in zip(state.layers, kinds, strict=True) if own == kind
      ),
      length=state.length,
    )

  def _model(self, params):
    return nnx.merge(self._session.fns.graphdef, params)

  def _weights(self, params, noise):
    model, n, out = self._model(params), self._nodes, []
    width = model.config.hidden_size
    for layer in model.layers:
      for name in _PROJECTIONS:
        linear = getattr(layer.mixer, name, None)
        if linear is not None:
          out.append(linear(_matrix(noise, n, linear.weight.shape[1])))
      out.append(layer.mlp(_matrix(noise, n, width)))
    out.append(model.logits(_matrix(noise, n, width)))
    return out

  def _mixers(self, kind, state, params, noise):
    """Mixers of one kind, and the commit of what they stash."""
    model, n = self._model(params), self._nodes
    index = jnp.arange(n, dtype=jnp.int32)
    # As in the step: without drafts the anchor is certain to be committed.
    nodes = state_lib.run_of(index, n, prefill=self._session.drafter is None)
    positions = state.length + nodes.depth
    x = _matrix(noise, n, model.config.hidden_size)
    inputs: list[jax.Array] = []
    stash = []
    mixers = [
      layer.mixer
      for layer, own in zip(model.layers, model.config.layer_types, strict=True)
      if own == kind
    ]
    for mixer, s in zip(mixers, state.layers, strict=True):
      for name in _PROJECTIONS:
        linear = getattr(mixer, name, None)
        if linear is not None:
          # The module is this trace's own copy.
          cut = _Cut(linear.weight.shape[0], noise, inputs)
          object.__setattr__(mixer, name, cut)
      if kind == configs.GDN:
        stash.append(mixer(x, nodes, s)[1])
      else:
        stash.append(mixer(x, nodes, positions, s, state.length)[1])
    # The longest path that a pass may accept.
    path = index[: self._path]
    return commit(state, tuple(stash), path, jnp.int32(self._path)), inputs

  def _drafter(self, context, params, anchor, position, request, noise):
    session = self._session
    drafter, n = session.drafter, self._path
    assert drafter is not None
    lattice = drafter.draft(params, context, anchor, position)
    drafted = session.fns.drafted(
      lattice,
      request,
      anchor=anchor,
      position=position,
      remaining=jnp.asarray(session.capacity, jnp.int32),
    )
    width = session.target.config.hidden_size
    taps = _matrix(noise, n, width)[:, None]
    taps = jnp.broadcast_to(taps, (n, len(drafter.taps), width))
    nodes = drafted.nodes
    count = jnp.minimum(nodes.count, n)
    context = drafter.extend(
      params, context, nodes.tokens[:n], taps, position, count
    )
    return context, nodes


def _widest(config: configs.ModelConfig) -> int:
  """Rows of the widest projection of a mixer, its inputs included."""
  c = config
  packed = c.num_heads * c.head_dim * (2 if c.attention_gate else 1)
  return max(
    packed + 2 * c.num_kv_heads * c.head_dim,
    c.gdn_conv_dim + c.gdn_value_dim + 2 * c.gdn_num_value_heads,
  )


def probe(dtype: str) -> Roofline:
  """What this processor reaches: a large product, and streams of memory.

  Rates, not nominal figures: floors use all of them. The product has 1,024
  rows and columns; memory is read and written by an addition over 128 MiB, and
  read by a product with one row.
  """
  rng = np.random.default_rng(0)
  side = 1024
  square = jnp.asarray(rng.normal(size=(side, side)), dtype)
  product = jax.jit(lambda a: layers.matmul(a, a))
  flops = 2 * side**3 / time_us(product, square) * 1e6
  rows = (128 << 20) // itemsize(dtype) // side
  block = jnp.broadcast_to(square[:1], (rows, side)) + 0
  size = block.size * itemsize(dtype)
  added = 2 * size / time_us(jax.jit(lambda a: a + 1), block) * 1e6
  read = size / time_us(jax.jit(layers.matmul), square[:1], block) * 1e6
  best = max(added, read)
  return Roofline(
    flops=flops,
    bytes=best,
    source=(
      f"measured here: {flops / 1e9:.1f} GFLOP/s in {dtype},"
      f" {best / 1e9:.1f} GB/s"
    ),
  )
