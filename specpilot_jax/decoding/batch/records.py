"""What a batch engine is told of a step, and what it says of one."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specpilot_jax.decoding import policy as policy_lib
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.scheduler import ERROR, Emitted, Request
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.decoding.transcript import StepResult, Transcript
from specpilot_jax.errors import SpecPilotError

LEAST_CHUNK = 128
"""Tokens of a prompt below which a pass over fewer is hardly cheaper."""


def prefill_sizes(chunk: int) -> tuple[int, ...]:
  """Places of passes over prompts: a chunk of so many, and its halves.

  The end of a prompt is short, and empty places are computed too.
  """
  found = [chunk]
  while found[0] // 2 >= LEAST_CHUNK:
    found.insert(0, found[0] // 2)
  return tuple(found)


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
    bucket: slots of the pass at least.
  """

  nodes: Sequence[int] | np.ndarray | None = None
  depth: Sequence[int] | np.ndarray | None = None
  rows: int | None = None
  plan: Any = ()
  bucket: int = 1

  def of_slots(
    self, index: np.ndarray, slots: int, nodes: int, depth: int
  ) -> policy_lib.Limits:
    """Of the slots of a pass, what there is room for at most.

    Args:
      index: the slots; others from `slots` on.
      slots: that there are.
      nodes: places of a request in a pass.
      depth: drafts of a path at most.

    Raises:
      SpecPilotError: not a number for each slot, or one below its least.
    """
    chosen: dict[str, Any] = {}
    for name, least, most in (("nodes", 1, nodes), ("depth", 0, depth)):
      own = np.full(index.size, most, np.int32)
      given = getattr(self, name)
      if given is not None:
        given = np.asarray(given)
        if given.shape != (slots,) or (given < least).any():
          raise SpecPilotError(
            f"{name} of a step must be {slots} numbers from {least} on, one for"
            f" each slot, got {given.tolist()}"
          )
        there = index < slots
        own[there] = np.minimum(own[there], given[index[there]])
      chosen[name] = own
    return policy_lib.Limits(**chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
  """How long a step took, from the end of the one before it.

  Attributes:
    slots: of its pass.
    rows: of its verify nodes; those for a prompt are not counted.
    rides: whether it had such.
    us: microseconds.
  """

  slots: int
  rows: int
  rides: bool
  us: float


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


def emitted_of(
  slot: int,
  ticket: Ticket,
  out: Any,
  at: int,
  now: float,
  nan: str,
) -> Emitted:
  """What a step that was read did for a request; its transcript has it then.

  Args:
    out: of the step, its `batch.step.BatchOutput` on the host.
    at: the request's row in it.
    now: when it was read.
    nan: what to say where its logits turned NaN.
  """
  step = jax.tree.map(lambda x: x[at], out.step)
  scores = None if out.scores is None else out.scores[at]
  result = StepResult.of(step)
  if not step.healthy:
    result = dataclasses.replace(result, tokens=())
    figures = Figures(result, scores=scores, error=nan)
    return Emitted(slot, ticket.request, finish=ERROR, figures=figures)
  chunk = ticket.transcript.push(result, now)
  return Emitted(
    slot,
    ticket.request,
    chunk.token_ids,
    chunk.output.finish_reason if chunk.output else None,
    Figures(result, chunk.text, scores, chunk.output),
  )


def unions(sampling: Iterable[SamplingParams]) -> set[Features]:
  """What steps need, whichever of such requests meet in them."""
  kinds = sorted({Features.of(s) for s in sampling}, key=str)
  return {
    Features.union(some)
    for n in range(1, len(kinds) + 1)
    for some in itertools.combinations(kinds, n)
  }
