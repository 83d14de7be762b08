"""float32 scores of outputs whose gaps lie above a bfloat16 tolerance.

The scoring pass rounds as the systems do, so in bfloat16 a gap above the
tolerance may be the pass's own. A target in float32 around the same matrices,
each widened for its product, scores such outputs again with the same code;
`token_forcing` says what follows from it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import plan, results, token_forcing
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax import footprint
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly, layers
from specpilot_jax.models import target as target_lib

DTYPE = "float32"


class Arbiter:
  """Scores recorded outputs with a target's weights in float32.

  It holds no second copy of the matrices. The float32 target and its engine
  are made once, when a first output needs them.

  Args:
    target: that scored in its own dtype; it stays where it is.
    max_seq_len, prefill_chunk: of the engine that scored.
    planned: bytes that the run holds beside it, by its memory plan.

  Attributes:
    made: whether there is one.
    needed: bytes that it takes with caches and workspace, by purpose.
  """

  def __init__(
    self,
    target: target_lib.Target,
    *,
    max_seq_len: int,
    prefill_chunk: int,
    planned: int,
  ):
    self._target = target
    self._shape = dict(max_seq_len=max_seq_len, prefill_chunk=prefill_chunk)
    self._planned = planned
    self._engine: Engine | None = None
    self._refusal: str | None = None
    self._known: dict[tuple[str, float], np.ndarray] = {}
    self.needed = plan.memory(
      target.config, None, dtype=DTYPE, drafting=0, plain=1, **self._shape
    ) | {"target": _own_bytes(target)}

  @property
  def made(self) -> bool:
    return self._engine is not None

  def gaps(self, record: Mapping[str, Any], cut_tolerance: float) -> np.ndarray:
    """float32 gaps of a recorded output [tokens], in logits.

    Args:
      record: a line of requests.jsonl.
      cut_tolerance: as `Engine.score` takes it.

    Raises:
      token_forcing.Unavailable: it does not fit beside what is held, or
        the device refuses it.
    """
    key = (token_forcing.output_key(record), cut_tolerance)
    if key in self._known:
      return self._known[key]
    if self._refusal is None:
      try:
        self._engine = self._engine or self._make()
        scores = self._engine.score(
          record["prompt_ids"],
          record["output_ids"],
          results.sampling_of(record),
          cut_tolerance=cut_tolerance,
        )
        self._known[key] = scores.gaps
        return scores.gaps
      except (SpecPilotError, jax.errors.JaxRuntimeError) as e:
        # The verdict without it is stricter; the run is worth keeping.
        self._refusal = f"float32 cannot judge it: {str(e).splitlines()[0]}"
    raise token_forcing.Unavailable(self._refusal)

  def _make(self) -> Engine:
    needed = sum(self.needed.values())
    held = max(self._planned, plan.held_bytes() or 0)
    available = footprint.device_bytes()
    if available is not None and held + needed > available:
      raise SpecPilotError(
        f"it needs {needed / 1e9:.3g} GB beside the {held / 1e9:.3g} that"
        f" are held, the device offers {available / 1e9:.3g}"
      )
    config, dtype = self._target.config, jnp.dtype(DTYPE)
    own = assembly.leaves(self._target)
    arrays = {
      name: _widened(name, own[name])
      for name in target_lib.structs(config, dtype)
    }
    wide = target_lib.assemble(config, arrays, dtype, narrower=True)
    decoder = self._target.kernels.w12_matmul
    return Engine(
      layers.by_definition(wide, decoder),
      system=SystemConfig(weights=self._target.weights),
      **self._shape,
    )


def _widened(name: str, leaf: assembly.Leaf) -> assembly.Leaf:
  """The leaf in float32, or itself where a product widens it."""
  if isinstance(leaf, W12Array) or (
    layers.is_matrix(name, leaf.shape) and not isinstance(leaf, FP8Array)
  ):
    return leaf
  return leaf.astype(jnp.dtype(DTYPE))


def _own_bytes(target: target_lib.Target) -> int:
  """What is not shared, and two matrices of the largest, widened."""
  size = jnp.dtype(DTYPE).itemsize
  own, shared = 0, [0]
  for name, leaf in assembly.leaves(target).items():
    wide = _widened(name, leaf)
    if wide is leaf:
      shared.append(size * math.prod(leaf.shape))
    else:  # of FP8 the codes are shared
      own += (wide.rest if isinstance(wide, FP8Array) else wide).nbytes
  return own + 2 * max(shared)
