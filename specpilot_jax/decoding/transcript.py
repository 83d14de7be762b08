"""What a request has said so far, and what ends it on the host.

An engine hands in what each step emitted; a transcript cuts it where a stop
string or a loop ends the request, makes text of it, and keeps the measurements.
One request at a time or many: each has a transcript of its own.
"""

import dataclasses
from collections.abc import Sequence

from specpilot_jax.decoding import stops
from specpilot_jax.decoding.request import (
  RequestMetrics,
  RequestOutput,
  StreamChunk,
)
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.tokenizer import StreamDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class StepResult:
  """One step as the host sees it; see `step.StepOutput`."""

  tokens: tuple[int, ...]
  drafted: int
  depth: int
  accepted: int
  stopped: bool
  exhausted: bool
  trunk: int
  confirmed: int

  @classmethod
  def of(cls, out) -> "StepResult":
    """Of a `step.StepOutput` on the host."""
    return cls(
      tokens=tuple(int(t) for t in out.tokens[: int(out.count)]),
      drafted=int(out.drafted),
      depth=int(out.depth),
      accepted=int(out.accepted),
      stopped=bool(out.stopped),
      exhausted=bool(out.exhausted),
      trunk=int(out.trunk),
      confirmed=int(out.confirmed),
    )


class Transcript:
  """A request from its first step to its output.

  Args:
    prompt_ids: as given.
    sampling: what ends it.
    tokenizer: for text; None for none.
    started: when the request began, in seconds on the clock of `push`.
  """

  def __init__(
    self,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    started: float,
  ):
    self._prompt = prompt_ids
    self._started = self._first = self._now = started
    self._decoder = StreamDecoder(tokenizer) if tokenizer else None
    self._watch = stops.StopStrings(sampling.stop)
    self._loop = stops.LoopDetector() if sampling.loops_end else None
    self._tokens: list[int] = []
    self._text: list[str] = []
    self._steps: list[StepResult] = []
    self._emitted: list[int] = []

  def push(self, result: StepResult, now: float) -> StreamChunk:
    """Takes a step in; the chunk that ends the request has its output.

    Args:
      result: what the step emitted.
      now: when the host had it, in seconds.
    """
    self._now = now
    if not self._tokens:
      self._first = now
    finish: tuple[str, int | str | None] | None = None
    new: list[int] = []
    text = ""
    for i, token in enumerate(result.tokens):
      self._tokens.append(token)
      new.append(token)
      if self._decoder:
        text += self._watch.push(self._decoder.push(token))
      last = i == len(result.tokens) - 1
      looping = self._loop is not None and self._loop.push(token)
      if last and result.stopped:
        finish = ("stop", token)
      elif self._watch.found is not None:
        finish = ("stop", self._watch.found)
      elif last and result.exhausted:
        finish = ("length", None)
      elif looping:
        finish = ("loop", None)
      if finish:
        break
    self._steps.append(result)
    self._emitted.append(len(new))
    if finish and self._decoder and self._watch.found is None:
      # Only now is it known that no stop string follows.
      text += self._watch.push(self._decoder.flush())
      text += self._watch.flush()
    self._text.append(text)
    output = self._output(*finish) if finish else None
    return StreamChunk(tuple(new), text, output)

  def _output(self, reason: str, by: int | str | None) -> RequestOutput:
    steps, emitted = self._steps, self._emitted
    return RequestOutput(
      prompt_ids=tuple(map(int, self._prompt)),
      token_ids=tuple(self._tokens),
      text="".join(self._text) if self._decoder else None,
      finish_reason=reason,
      stop_reason=by,
      metrics=RequestMetrics(
        ttft_ms=1e3 * (self._first - self._started),
        e2e_ms=1e3 * (self._now - self._started),
        emitted_per_step=tuple(emitted),
        drafted_per_step=tuple(s.drafted for s in steps),
        depth_per_step=tuple(s.depth for s in steps),
        accepted_per_step=tuple(s.accepted for s in steps),
        cut_steps=sum(
          kept != step.accepted + 1
          for kept, step in zip(emitted, steps, strict=True)
        ),
        trunk_per_step=tuple(s.trunk for s in steps),
        confirmed_per_step=tuple(s.confirmed for s in steps),
      ),
    )
