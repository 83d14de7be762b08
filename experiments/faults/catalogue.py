"""The faults: what each does, and the trees that have them."""

import dataclasses
import json
from collections.abc import Mapping

from experiments.controller import tree

WORKER = "experiments/controller/worker.py"
INJECTED = "experiments/faults/injected.py"
BATCHED = "experiments/faults/batched.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """One fault.

  Attributes:
    name: of `injected.NAMES`.
    size: of the fault, where it has one.
    says: what goes wrong.
    late: whether it acts behind token 2,048 alone.
    harmless: whether outputs stay stock's: it must change no verdict.
    recurrent: whether it needs a recurrent layer.
    options: of the system that has it, over stock's; a fault of a mechanism is
      none of stock.
  """

  name: str
  says: str
  size: float = 0.0
  late: bool = False
  harmless: bool = False
  recurrent: bool = False
  options: str = ""

  @property
  def id(self) -> str:
    text = f"{self.name}={self.size:g}" if self.size else self.name
    return f"{text} ({self.options})" if self.options else text


W12, TWO_LEVEL = "weights=w12", "verification=two_level"

CATALOGUE = (
  Fault(name="none", says="a no-op, the control", harmless=True),
  *(
    Fault(
      name="logit_bias_after_2048",
      says="a logit bias on a seeded half of the vocabulary, late",
      size=size,
      late=True,
    )
    for size in (0.01, 0.1, 1.0, 5.0)
  ),
  Fault(
    name="logit_noise",
    says="logits are not the same in the next process",
    size=1e-4,
  ),
  Fault(
    name="gdn_state_stale_after_long_accept",
    says="a pass that emits six tokens or more leaves the recurrent state as it"
    " was",
    size=6,
    recurrent=True,
  ),
  Fault(
    name="gdn_commit_clamped",
    says="the recurrent state takes three tokens of a run at most",
    size=3,
    recurrent=True,
  ),
  Fault(
    name="gdn_path_mixed_up",
    says="two nodes of a path change places in the recurrent state",
    recurrent=True,
  ),
  Fault(
    name="conv_window_off_by_one",
    says="the convolution's window ends a token early",
    recurrent=True,
  ),
  Fault(name="last_kv_missing", says="a run's last keys and values are zeros"),
  Fault(
    name="rejected_kv_left",
    says="a rejected token stays behind each run, in keys, values and position",
  ),
  Fault(
    name="rope_wraps",
    says="positions from 2,048 on are rotated as if they began again",
    size=2_048,
    late=True,
  ),
  Fault(
    name="accept_one_extra", says="the draft behind the run is not verified"
  ),
  Fault(name="early_end", says="an output ends early", size=20),
  Fault(name="cached_replies", says="a reply is that of another request"),
  Fault(
    name="repeats_late",
    says="late tokens repeat the one before",
    size=2_048,
    late=True,
  ),  # fmt: skip
  *(
    Fault(
      name="none",
      says=f"a no-op of a system with {options}",
      harmless=True,
      options=options,
    )
    for options in (W12, TWO_LEVEL)
  ),
  Fault(
    name="w12_lists_dropped",
    says="weights outside of their row's window are zeros",
    options=W12,
  ),
  Fault(
    name="w12_base_off_by_one",
    says="a row of every matrix has the exponent above its own",
    options=W12,
  ),
  Fault(
    name="level_one_unverified",
    says="what the first level chose is taken without the exact pass",
    options=TWO_LEVEL,
  ),
  Fault(
    name="batch",
    says="a no-op, in a batch of three whose slots are used again",
    harmless=True,
  ),
  Fault(
    name="batch_rows_permuted",
    says="where three decode, a request gets the choices of another's rows",
  ),
  Fault(
    name="batch_keys_of_a_mate",
    says="where three decode, attention reads another slot's keys and values",
  ),
  Fault(
    name="batch_stash_of_a_mate",
    says="where three decode, a slot commits what another's nodes left",
  ),
  Fault(
    name="batch_slot_keeps_state",
    says="a slot's next request begins with the recurrent state of its last",
    recurrent=True,
  ),
  Fault(
    name="batch_chunk_shifts_position",
    says="behind the first one, a chunk of a prompt stands a position late",
  ),
  Fault(
    name="lying_clock",
    says="the engine's clock runs ten times too slow",
    size=10,
    harmless=True,
  ),  # fmt: skip
)


def faulty(base: Mapping[str, bytes], fault: Fault) -> dict[str, bytes]:
  """Files of a tree with a fault: the base's, and a worker that injects it."""
  worker = base[WORKER].decode()
  mark = 'if __name__ == "__main__":\n'
  assert worker.count(mark) == 1, "the worker has one entry"
  call = "  from experiments.faults import injected\n\n  injected.from_file()\n"
  told = {"name": fault.name, "size": fault.size}
  return {
    **base,
    WORKER: worker.replace(mark, mark + call).encode(),
    "experiments/faults/__init__.py": b'"""Faults."""\n',
    INJECTED: (tree.ROOT / INJECTED).read_bytes(),
    BATCHED: (tree.ROOT / BATCHED).read_bytes(),
    "experiments/faults/fault.json": json.dumps(told).encode(),
  }
