"""Whether recorded requests are whole: token accounting, endings, same set.

Token forcing by itself accepts an output that was cut short, since each token
that is left is still stock's own choice. Endings follow from the tokens alone,
so they are replayed here by the rules of `Engine.stream`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import metrics, results
from specpilot_jax.configs import ModelConfig
from specpilot_jax.decoding import stops
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.tokenizer import StreamDecoder, Tokenizer

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fault:
  """What is wrong with a request.

  Attributes:
    request: its id.
    index: of the output token where it shows; None where it is not a token.
    text: one line that names system and request.
  """

  request: str
  index: int | None
  text: str


@dataclasses.dataclass(frozen=True)
class Ending:
  """Where and why decoding ends: fields as in `RequestOutput`."""

  tokens: int
  finish_reason: str
  stop_reason: int | str | None


def ending(
  prompt_tokens: int,
  output_ids: Sequence[int],
  sampling: SamplingParams,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
) -> Ending | None:
  """The first place where these tokens end a request; None where none does.

  Args:
    prompt_tokens: length of the prompt.
    output_ids: what was decoded.
    sampling: of the request.
    config: of the target.
    tokenizer: finds stop strings; not needed without them.
  """
  stop_ids = set(sampling.stop_ids(config.eos_token_ids))
  limit = min(sampling.max_tokens, config.context_length - prompt_tokens)
  loop = stops.LoopDetector() if sampling.loops_end else None
  watch = stops.StopStrings(sampling.stop)
  decoder = None
  if sampling.stop and tokenizer is not None:
    decoder = StreamDecoder(tokenizer)
  for count, token in enumerate(output_ids, start=1):
    if decoder:
      watch.push(decoder.push(token))
    looping = loop is not None and loop.push(token)
    if token in stop_ids:
      return Ending(count, "stop", token)
    if watch.found is not None:
      return Ending(count, "stop", watch.found)
    if count == limit:
      return Ending(count, "length", None)
    if looping:
      return Ending(count, "loop", None)
  return None


def _ending_fault(
  record: Record, config: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[int, str] | None:
  """(index of the token, what is wrong)."""
  sampling = results.sampling_of(record)
  size = len(record["output_ids"])
  if sampling.stop and tokenizer is None:
    return size - 1, "has stop strings, and the target has no tokenizer"
  due = ending(
    len(record["prompt_ids"]), record["output_ids"], sampling, config, tokenizer
  )
  given = Ending(size, record["finish_reason"], record.get("stop_reason"))
  if due == given:
    return None
  told = _describe(given)
  if due is None:
    return size - 1, f"ends {told}, but nothing ends it there"
  return due.tokens - 1, f"ends {told}, but decoding ends {_describe(due)}"


def _describe(end: Ending) -> str:
  why = end.finish_reason
  if end.stop_reason is not None:
    why += f" on {end.stop_reason!r}"
  return f"after {end.tokens} tokens ({why})"


def faults(
  records: Sequence[Record], config: ModelConfig, tokenizer: Tokenizer | None
) -> list[Fault]:
  """What is wrong with the records of one system, each by itself.

  Args:
    records: as `results.read_requests` gives them.
    config: of the target.
    tokenizer: of the target.
  """
  found = []
  for record in records:
    request = record["request"]
    try:
      metrics.check_identity(record)
    except metrics.MeasurementError as e:
      found.append(Fault(request, None, str(e)))
      continue
    wrong = _ending_fault(record, config, tokenizer)
    if wrong:
      at, what = wrong
      where = f"{record['system']} {request}"
      found.append(Fault(request, at, f"{where}: {what}"))
  return found


def set_faults(
  records: Sequence[Record], reference: Sequence[Record]
) -> list[Fault]:
  """Where the requests of two systems are not the same ones.

  Args:
    records: of the system that is judged, at least one.
    reference: of the system beside it; empty where there is none.
  """
  if not reference:
    return []
  system, other = records[0]["system"], reference[0]["system"]
  mine = {r["request"]: r for r in records}
  theirs = {r["request"]: r for r in reference}
  found = []
  for request in [*theirs, *(r for r in mine if r not in theirs)]:
    what = None
    if request not in mine:
      what = f"is missing, {other} has it"
    elif request not in theirs:
      what = f"is not among the requests of {other}"
    elif mine[request]["prompt_ids"] != theirs[request]["prompt_ids"]:
      what = f"has another prompt than {other}"
    elif mine[request]["sampling"] != theirs[request]["sampling"]:
      what = f"has other sampling settings than {other}"
    if what:
      found.append(Fault(request, None, f"{system} {request}: {what}"))
  return found
