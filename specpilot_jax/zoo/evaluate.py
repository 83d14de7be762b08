"""Evaluate the zoo: `python -m specpilot_jax.zoo.evaluate`

Acceptance lengths of the drafter on held-out prompts, greedy and sampled,
with the requests that ended in a loop counted apart. With --held_out (the
`held_out.jsonl` of a training run) also the target's bits per byte beside what
gzip and xz need for the same files.
"""

import gzip
import json
import lzma
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from specpilot_jax import cli, loading
from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.request import RequestOutput
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.target import Target
from specpilot_jax.zoo import recipes, store, training

_MODEL = flags.DEFINE_string("model", "zoo", "Target.")
_DRAFTER = flags.DEFINE_string("drafter", "dflash", "Drafter name or folder.")
_PROMPTS = flags.DEFINE_integer("prompts", 32, "Prompts per setting.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Output tokens at most.")
_SAMPLES = flags.DEFINE_integer("samples", 0, "Outputs to print per setting.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "held_out.jsonl of a run.")
_EVERY = flags.DEFINE_integer("every", 1, "Take one held-out file in so many.")

SETTINGS = ((0.0, "match"), (1.0, "rejection"), (1.0, "match"))


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
  """Pooled acceptance over the requests that did not loop, and over all.

  `slot_rates[k]` is the share of passes that accepted slot k.
  """
  straight = [o for o in outputs if o.finish_reason != "loop"]

  def tau(chosen):
    steps = sum(o.metrics.num_steps for o in chosen)
    return sum(o.metrics.output_tokens for o in chosen) / max(steps, 1)

  accepted = [a for o in straight for a in o.metrics.accepted_per_step]
  slots = max((max(o.metrics.drafted_per_step) for o in outputs), default=0)
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


def _read_texts(path: pathlib.Path, every: int) -> list[str]:
  lines = path.read_text(encoding="utf-8").splitlines()
  return [json.loads(line)["text"] for line in lines[::every]]


def main() -> None:
  loading.prepare_jax(None)
  model = loading.load_target(_MODEL.value)
  drafter = loading.make_drafter(_DRAFTER.value, model.target)
  if model.tokenizer is None:
    raise SpecPilotError(f"{_MODEL.value} has no tokenizer")
  texts = [p["text"] for p in store.prompts()][: _PROMPTS.value]
  prompts = [model.tokenizer.encode(text) for text in texts]
  for temperature, rule in SETTINGS if prompts else ():
    outputs = decode(
      model.target,
      drafter,
      prompts,
      temperature=temperature,
      rule=rule,
      max_tokens=_MAX_TOKENS.value,
      tokenizer=model.tokenizer,
    )
    line = {"temperature": temperature, "rule": rule, **acceptance(outputs)}
    print(json.dumps(line), flush=True)
    for prompt, output in list(zip(texts, outputs, strict=True))[
      : _SAMPLES.value
    ]:
      print(f"--- prompt\n{prompt}\n--- {output.finish_reason}\n{output.text}")
  if _HELD_OUT.value is not None:
    texts = _read_texts(pathlib.Path(_HELD_OUT.value), _EVERY.value)
    size = sum(len(t.encode()) for t in texts)
    print(json.dumps({"files": len(texts), "bytes": size}), flush=True)
    print(json.dumps(compressors(texts)), flush=True)
    bits = bits_per_byte(
      model.target,
      model.tokenizer,
      texts,
      progress=lambda n, bits: print(f"{n} files: {bits:.4f}", flush=True),
    )
    print(json.dumps({"target": round(bits, 4)}))


if __name__ == "__main__":
  cli.run(main)
