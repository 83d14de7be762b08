"""What a batch engine is told of a step, and what it says of one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.scheduler import Request
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import Features
from specpilot_jax.decoding.transcript import StepResult, Transcript


@dataclasses.dataclass(frozen=True)
class StepLimits:
  """What a step may verify, beside the limits of the system.

  Attributes:
    nodes: of each slot at most, the anchor included, by slot; None for no
      limit.
    depth: drafts of a path at most, by slot.
    rows: of the pass: a packed one of so many verify nodes in all. None for the
      dense form, which has room for all nodes of all slots.
    plan: what the allocation is told, see `batch.step.Offer`; arrays, so that
      nothing is compiled again.
  """

  nodes: Sequence[int] | np.ndarray | None = None
  depth: Sequence[int] | np.ndarray | None = None
  rows: int | None = None
  plan: Any = ()


@dataclasses.dataclass(frozen=True)
class Figures:
  """What a step did for one request, beside its tokens.

  Attributes:
    result: the step, as of a single request.
    text: new text; empty without a tokenizer.
    scores: of the nodes that were offered to verification, path by path; None
      without a drafter.
    output: the request's, once it has ended.
    error: why it ended with reason `error`.
  """

  result: StepResult
  text: str = ""
  scores: np.ndarray | None = None
  output: RequestOutput | None = None
  error: str | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
  """A request in its slot; the slot's next one has another."""

  request: Request
  prompt: np.ndarray
  features: Features
  transcript: Transcript
  read: int = 0


def rider_of(slot: int, tokens: np.ndarray, count: int) -> batch_step.Rider:
  """Its numbers stay on the host until the call that takes them."""
  numbers: Any = (np.int32(slot), tokens, np.int32(count))
  return batch_step.Rider(*numbers)
