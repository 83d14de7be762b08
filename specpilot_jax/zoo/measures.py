"""What is measured of the zoo: acceptance, and bits per byte."""

import gzip
import lzma
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specpilot_jax import loading
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import recipes, training


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
  """Pooled acceptance over the requests that did not loop, and over all.

  `slot_rates[k]` is the share of passes that accepted slot k.
  """
  straight = [o for o in outputs if o.finish_reason != "loop"]

  def tau(chosen):
    steps = sum(o.metrics.num_steps for o in chosen)
    return sum(o.metrics.output_tokens for o in chosen) / max(steps, 1)

  accepted = [a for o in straight for a in o.metrics.accepted_per_step]
  slots = max((max(o.metrics.depth_per_step) for o in outputs), default=0)
  rates = [float(np.mean([a > k for a in accepted])) for k in range(slots)]
  return {
    "tau": round(tau(straight), 3),
    "tau_with_loops": round(tau(outputs), 3),
    "requests": len(outputs),
    "loops": len(outputs) - len(straight),
    "tokens": sum(o.metrics.output_tokens for o in straight),
    "slot_rates": [round(r, 3) for r in rates] if accepted else [],
  }


def decode(
  target: Target,
  drafter: Drafter | None,
  prompts: Sequence[Sequence[int]],
  *,
  temperature: float,
  rule: str,
  max_tokens: int,
  tokenizer=None,
) -> list[RequestOutput]:
  """One request per prompt, seeded by its index."""
  longest = max(map(len, prompts))
  engine = Engine(
    target,
    drafter=drafter,
    tokenizer=tokenizer,
    system=SystemConfig(acceptance=rule),
    max_seq_len=loading.sequence_room(target.config, longest, max_tokens),
  )
  return [
    engine.generate(
      prompt,
      SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i),
    )
    for i, prompt in enumerate(prompts)
  ]


def bits_per_byte(
  target: Target, tokenizer, texts: Sequence[str], *, progress=None
) -> float:
  """Bits that the target needs per UTF-8 byte, each text from its beginning.

  A text longer than the context goes on in a fresh one, from its last token.
  """
  graphdef, params = nnx.split(target)
  context = target.config.context_length

  @jax.jit
  def nats(params, inputs, targets, count):
    model = nnx.merge(graphdef, params)
    hidden, _ = training.hidden_states(model, inputs)

    def block(args):
      hidden, targets = args
      logits = model.logits(hidden)
      picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
      return jax.nn.logsumexp(logits, axis=-1) - picked

    rows = min(inputs.shape[0], 512)
    nll = jax.lax.map(
      block,
      (hidden.reshape(-1, rows, hidden.shape[-1]), targets.reshape(-1, rows)),
    ).reshape(-1)
    return jnp.where(jnp.arange(nll.size) < count, nll, 0).sum()

  total = size = 0.0
  for i, text in enumerate(texts):
    ids = [recipes.END_ID, *tokenizer.encode(text)]
    for start in range(0, len(ids) - 1, context):
      part = ids[start : start + context + 1]
      count = len(part) - 1
      padded = np.zeros((2, max(256, 1 << (count - 1).bit_length())), np.int32)
      padded[0, :count], padded[1, :count] = part[:-1], part[1:]
      total += float(nats(params, padded[0], padded[1], np.int32(count)))
    size += len(text.encode())
    if progress and (i + 1) % 20 == 0:
      progress(i + 1, total / math.log(2) / size)
  return total / math.log(2) / size


def compressors(texts: Sequence[str]) -> dict[str, float]:
  """Bits per byte of gzip -9 and xz -9e, file by file and as one archive."""
  raw = [text.encode() for text in texts]
  whole, size = b"".join(raw), sum(map(len, raw))

  def xz(data):
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)

  def bits(packed):
    return round(8 * sum(map(len, packed)) / size, 4)

  return {
    "gzip_per_file": bits([gzip.compress(b, 9) for b in raw]),
    "xz_per_file": bits([xz(b) for b in raw]),
    "gzip_together": bits([gzip.compress(whole, 9)]),
    "xz_together": bits([xz(whole)]),
  }
