"""What the controller checks of every output that it timed.

Times in a record are the controller's own. What the engine said of its passes
is kept beside the tokens and must fit them, but decides nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import devices, endings, results
from experiments.controller.process import Answer
from experiments.prompts import Prompt
from specpilot_jax import footprint
from specpilot_jax.configs import MAX_NODES, ModelConfig
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.tokenizer import Tokenizer

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]

STOCK, CANDIDATE = "stock", "candidate"

CACHED_BYTES = 1 << 28
"""More than the caches of any card of the table hold from pass to pass."""


@dataclasses.dataclass(frozen=True)
class Request:
  """A request of a test.

  Attributes:
    prompt: its id, domain and token ids.
    sampling: how it is decoded.
  """

  prompt: Prompt
  sampling: SamplingParams

  @property
  def id(self) -> str:
    return self.prompt.id

  @property
  def prompt_ids(self) -> Sequence[int]:
    assert self.prompt.token_ids is not None, "prompts were read by a tokenizer"
    return self.prompt.token_ids


def record(
  system: str, request: Request, answer: Answer, extra: Mapping[str, Any]
) -> dict[str, Any]:
  """A line of requests.jsonl.

  Args:
    extra: options, target, drafter and run of the system.

  Raises:
    SpecPilotError: the engine's diagnostics are not of their form.
  """
  end = answer.end
  times = [1e3 * t for t in answer.times_s]
  tokens, steps = len(answer.token_ids), len(answer.counts)
  fields = (
    "emitted_per_step", "drafted_per_step", "depth_per_step",
    "accepted_per_step",
  )  # fmt: skip
  told = {field: end.get(field) for field in fields}

  def total(field: str) -> Any:
    values = told[field]
    good = isinstance(values, list) and all(type(v) is int for v in values)
    return sum(values) if good else -1  # -1 is refused below.

  ttft, last = times[0], 1e3 * answer.seconds
  line = {
    "request": request.id,
    "system": system,
    "domain": request.prompt.domain,
    "prompt_ids": list(request.prompt_ids),
    "output_ids": answer.token_ids,
    "text": end.get("text"),
    "finish_reason": end.get("finish_reason"),
    "stop_reason": end.get("stop_reason"),
    "sampling": dataclasses.asdict(request.sampling),
    "metrics": {
      "ttft_ms": ttft,
      "tpot_ms": (last - ttft) / (tokens - 1) if tokens > 1 else None,
      "e2el_ms": last,
      "itl_ms": [b - a for a, b in zip(times[:-1], times[1:], strict=True)],
      "acceptance_length": tokens / steps,
      "num_spec_steps": steps,
      "num_draft_tokens": total("drafted_per_step"),
      "num_accepted_draft_tokens": total("accepted_per_step"),
      "cut_steps": end.get("cut_steps"),
      **told,
    },
    "after_ms": 1e3 * answer.after_s,
    **extra,
  }
  line = results.to_json(line)
  results.check_record(line, f"{system} {request.id}")
  return line


@dataclasses.dataclass(frozen=True)
class Exactness:
  """Whether a candidate's outputs are stock's.

  Attributes:
    verdict: `pass`, `fail` or `inconclusive`.
    reason: one line.
    outputs, identical: how many there are, and how many are stock's own, token
      for token.
    forcing: stock's verdict on the candidate's tokens, None where all are
      identical and it was not asked.
  """

  verdict: str
  reason: str
  outputs: int
  identical: int
  forcing: Mapping[str, Any] | None

  @property
  def diverged(self) -> bool:
    return self.identical < self.outputs


Judge = Callable[[Records], Mapping[str, Any]]
"""Token forcing of the candidate by stock; see `forcing.Forcing.judge_all`."""


def exactness(
  records: Records,
  config: ModelConfig,
  tokenizer: Tokenizer | None,
  judge: Judge | None,
) -> Exactness:
  """Checks all outputs of the candidate, and that they are whole.

  Args:
    records: of stock and candidate, the same requests.
    config, tokenizer: of the target.
    judge: scores tokens by stock; without one only identical outputs pass.
  """
  mine, stock = records[CANDIDATE], records[STOCK]
  by_id = {r["request"]: r for r in stock}
  same = sum(
    r["request"] in by_id
    and r["output_ids"] == by_id[r["request"]]["output_ids"]
    for r in mine
  )
  broken = [
    *endings.faults(mine, config, tokenizer),
    *endings.set_faults(mine, stock),
  ]
  if broken:
    return Exactness("fail", broken[0].text, len(mine), same, None)
  forced = judge(records) if judge is not None else None
  if forced is not None and forced["verdict"] == "fail":
    return Exactness("fail", forced["reason"], len(mine), same, forced)
  if same == len(mine):
    reason = f"{same} outputs are stock's, token for token"
    return Exactness("pass", reason, len(mine), same, forced)
  if forced is None:
    reason = f"{len(mine) - same} outputs differ, and nothing was forced"
    return Exactness("inconclusive", reason, len(mine), same, None)
  return Exactness(forced["verdict"], forced["reason"], len(mine), same, forced)


@dataclasses.dataclass(frozen=True)
class Floor:
  """What a request costs at least on a card, at its nominal peaks.

  Attributes:
    weight_bytes: that a pass reads at least: the matrices in 12 bits, or as
      FP8 codes where the model has those, without the embedding (rows of it
      are read) and without what caches may keep.
    flops: of a token at least, one node.
    bandwidth, peak: of the card.
  """

  weight_bytes: float
  flops: float
  bandwidth: float
  peak: float

  @classmethod
  def of(
    cls, config: ModelConfig, card: devices.Device, *, in_fp8: bool = False
  ) -> "Floor":
    """The floor of a target on a card."""
    embedding = 0
    if not config.tie_embeddings:
      embedding = config.vocab_size * config.hidden_size
    packed = footprint.w12_bytes(config, None) - 1.5 * embedding
    if in_fp8:
      packed = footprint.fp8_bytes(config, "bfloat16") - 2 * embedding
    numbers = footprint.target_bytes(config, "bfloat16") / 2 - embedding
    return cls(
      weight_bytes=max(0.0, packed - CACHED_BYTES),
      flops=2 * numbers,
      bandwidth=card.bandwidth,
      peak=max(card.bfloat16, card.float8),
    )

  def seconds(self, tokens: int, passes: int) -> float:
    """Of a request: a pass reads all weights, a token costs one node.

    Args:
      passes: that the engine says it made; no pass emits more than
        `MAX_NODES` tokens, whatever it says.
    """
    passes = max(passes, -(-tokens // MAX_NODES))
    memory = passes * self.weight_bytes / self.bandwidth
    return max(memory, tokens * self.flops / self.peak)

  def check(self, records: Sequence[Record]) -> str | None:
    """Why the times of records are impossible; None where they are not."""
    for r in records:
      m = r["metrics"]
      least = 1e3 * self.seconds(len(r["output_ids"]), m["num_spec_steps"])
      if m["e2el_ms"] < least:
        return (
          f"{r['request']}: {m['e2el_ms']:.3g} ms for {m['num_spec_steps']}"
          f" passes, beyond the card's nominal peak ({least:.3g} ms)"
        )
    return None


def device_floor(
  config: ModelConfig, device_kind: str, *, in_fp8: bool = False
) -> Floor | None:
  """The floor on a device; None where its peaks are not known."""
  try:
    return Floor.of(config, devices.lookup(device_kind), in_fp8=in_fp8)
  except SpecPilotError:
    return None
