"""Evaluate the zoo: `python -m specpilot_jax.zoo.evaluate`

Acceptance lengths of the drafter on held-out prompts, greedy and sampled,
with the requests that ended in a loop counted apart. With --held_out (the
`held_out.jsonl` of a training run) also, by domain, the target's bits per byte
beside what gzip and xz need for the same files.
"""

import json
import pathlib

from absl import flags

from specpilot_jax import cli, loading
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.zoo import data, measures, store

_MODEL = flags.DEFINE_string("model", "zoo", "Target.")
_DRAFTER = flags.DEFINE_string("drafter", "dflash", "Drafter name or folder.")
_PROMPTS = flags.DEFINE_integer(
  "prompts", 32, "Prompts per setting.", lower_bound=0
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Output tokens at most.")
_SAMPLES = flags.DEFINE_integer("samples", 0, "Outputs to print per setting.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "held_out.jsonl of a run.")
_EVERY = flags.DEFINE_integer(
  "every", 1, "Take one held-out file in so many.", lower_bound=1
)

SETTINGS = ((0.0, "match"), (1.0, "rejection"), (1.0, "match"))


def main() -> None:
  loading.prepare_jax(None)
  model = loading.load_target(_MODEL.value)
  drafter = loading.make_drafter(_DRAFTER.value, model.target)
  if model.tokenizer is None:
    raise SpecPilotError(f"{_MODEL.value} has no tokenizer")
  texts = [p["text"] for p in store.prompts()][: _PROMPTS.value]
  prompts = [model.tokenizer.encode(text) for text in texts]
  for temperature, rule in SETTINGS if prompts else ():
    outputs = measures.decode(
      model.target,
      drafter,
      prompts,
      temperature=temperature,
      rule=rule,
      max_tokens=_MAX_TOKENS.value,
      tokenizer=model.tokenizer,
    )
    line = {
      "temperature": temperature,
      "rule": rule,
      **measures.acceptance(outputs),
    }
    print(json.dumps(line), flush=True)
    for prompt, output in list(zip(texts, outputs, strict=True))[
      : _SAMPLES.value
    ]:
      print(f"--- prompt\n{prompt}\n--- {output.finish_reason}\n{output.text}")
  if _HELD_OUT.value is None:
    return
  by_domain = data.held_out_texts(pathlib.Path(_HELD_OUT.value), _EVERY.value)
  for domain, texts in by_domain.items():
    bits = measures.bits_per_byte(
      model.target,
      model.tokenizer,
      texts,
      progress=lambda n, bits: print(f"{n} files: {bits:.4f}", flush=True),
    )
    line = {
      "domain": domain,
      "files": len(texts),
      "bytes": sum(len(t.encode()) for t in texts),
      "target": round(bits, 4),
      **measures.compressors(texts),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
  cli.run(main)
