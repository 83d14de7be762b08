"""float32 scores of outputs whose gaps lie above a bfloat16 tolerance.

The scoring pass rounds as the systems do, so in bfloat16 a gap above the
tolerance may be the pass's own. A copy of the target in float32 scores such
outputs again with the same code; `token_forcing` says what follows from it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import plan, results, token_forcing
from specpilot_jax import footprint
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib

DTYPE = "float32"


class Arbiter:
  """Scores recorded outputs with a float32 copy of a target.

  The copy and its engine are made once, when a first output needs them.

  Args:
    target: that scored in its own dtype; it stays where it is.
    max_seq_len, prefill_chunk: of the engine that scored.
    planned: bytes that the run holds beside the copy, by its memory plan.

  Attributes:
    made: whether there is a copy.
    needed: bytes of the copy with caches and workspace, by purpose.
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
    )

  @property
  def made(self) -> bool:
    return self._engine is not None

  def gaps(self, record: Mapping[str, Any], cut_tolerance: float) -> np.ndarray:
    """float32 gaps of a recorded output [tokens], in logits.

    Args:
      record: a line of requests.jsonl.
      cut_tolerance: as `Engine.score` takes it.

    Raises:
      token_forcing.Unavailable: the copy does not fit beside what is held, or
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
        f"a copy needs {needed / 1e9:.3g} GB beside the {held / 1e9:.3g} that"
        f" are held, the device offers {available / 1e9:.3g}"
      )
    config = self._target.config
    wanted = target_lib.structs(config, jnp.dtype(DTYPE))
    own = target_lib.parameters(self._target)
    arrays = {name: own[name].astype(x.dtype) for name, x in wanted.items()}
    copy = target_lib.assemble(config, arrays, jnp.dtype(DTYPE))
    return Engine(copy, **self._shape)
