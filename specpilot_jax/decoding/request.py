"""What a request returns, and its measurements."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
  """Measurements of one request, on the host's clock.

  Attributes:
    ttft_ms: from the call to the first token on the host.
    e2e_ms: from the call to the token that ended the request.
    emitted_per_step: tokens kept of each verify pass, bonus included.
    drafted_per_step: drafts verified in each pass, all nodes of a tree.
    depth_per_step: those on the longest path of each pass; all of a chain.
    accepted_per_step: drafts accepted in each pass, before a stop or the token
      limit cut the run.
    cut_steps: passes whose run was cut.
    trunk_per_step: drafts of each pass that a coarser pass chose; 0 where
      there was none.
    confirmed_per_step: of them, those that the pass accepted.
  """

  ttft_ms: float
  e2e_ms: float
  emitted_per_step: tuple[int, ...]
  drafted_per_step: tuple[int, ...]
  depth_per_step: tuple[int, ...]
  accepted_per_step: tuple[int, ...]
  cut_steps: int
  trunk_per_step: tuple[int, ...] = ()
  confirmed_per_step: tuple[int, ...] = ()

  @property
  def num_steps(self) -> int:
    """Verify passes."""
    return len(self.emitted_per_step)

  @property
  def output_tokens(self) -> int:
    return sum(self.emitted_per_step)

  @property
  def tpot_ms(self) -> float:
    """(e2e - ttft) / (tokens - 1); NaN for a single token."""
    if self.output_tokens < 2:
      return float("nan")
    return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

  @property
  def decode_tok_s(self) -> float:
    """Tokens per second after the first; NaN for a single token."""
    return 1000 / self.tpot_ms

  @property
  def acceptance_length(self) -> float:
    """Tokens emitted per verify pass, bonus included."""
    return self.output_tokens / max(self.num_steps, 1)


@dataclasses.dataclass(frozen=True)
class RequestOutput:
  """A finished request.

  Attributes:
    prompt_ids: as given.
    token_ids: the output, with the token that ended it.
    text: decoded output, up to a stop string; None without a tokenizer.
    finish_reason: `stop` (stop id or stop string), `length` (max_tokens or the
      context limit) or `loop`.
    stop_reason: the stop id or stop string where there is one.
    metrics: measurements.
  """

  prompt_ids: tuple[int, ...]
  token_ids: tuple[int, ...]
  text: str | None
  finish_reason: str
  stop_reason: int | str | None
  metrics: RequestMetrics


@dataclasses.dataclass(frozen=True)
class StreamChunk:
  """New tokens of a request; `output` is set on the last chunk alone.

  `text` never ends inside a UTF-8 character and may lag behind `token_ids`
  (a stop string that may have begun is held back).
  """

  token_ids: tuple[int, ...]
  text: str
  output: RequestOutput | None = None


@dataclasses.dataclass(frozen=True)
class TokenScores:
  """Teacher-forced scores of given output tokens, one entry per token.

  Attributes:
    logprobs: natural log-probabilities under the raw law (temperature 1, no
      filter, no penalty).
    argmax: the target's own choice at that place (processed and noised).
    gaps: distance of the given token from being that choice, in logits.
  """

  logprobs: np.ndarray
  argmax: np.ndarray
  gaps: np.ndarray
