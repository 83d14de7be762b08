"""Generate text: `python -m specpilot_jax.generate --model=NAME --prompt=...`

Streams the text and ends with one line of measurements (tau is the tokens
emitted per target pass). With --json the last line on stdout is one JSON
object: {prompt_ids, token_ids, text, finish_reason, acceptance_length,
decode_tok_s}.
"""

import json
import sys

from absl import flags

from specpilot_jax import cli, loading, sampling_flags
from specpilot_jax.configs import DTYPES
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

_MODEL = flags.DEFINE_string(
  "model", "zoo", "zoo, smollm2, widened:PRESET (the zoo at a big model's"
  " shape), a Hugging Face folder, a .gguf file or an Orbax folder; fp8:NAME is"
  " NAME in FP8.",
)  # fmt: skip
_DRAFTER = flags.DEFINE_string(
  "drafter",
  None,
  f"One of {', '.join(loading.DRAFTERS)}, or a folder. By"
  " default the model's own, else prompt_lookup.",
)
_PROMPT = flags.DEFINE_string("prompt", None, "Prompt text.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "UTF-8 prompt file.")
_PROMPT_IDS = flags.DEFINE_string(
  "prompt_ids", None, "Prompt token ids: 1,2,3. Needs no tokenizer."
)
_CHAT = flags.DEFINE_boolean(
  "chat", False, "Wrap the prompt in the model's chat template."
)
_SAMPLING = sampling_flags.define_sampling_flags()
_DTYPE = flags.DEFINE_enum(
  "dtype", None, DTYPES, "bfloat16 on an accelerator, float32 on a CPU."
)
_SET = flags.DEFINE_string("set", "", "Options: name=value,name=value.")
_JSON = flags.DEFINE_boolean("json", False, "One JSON line, the last.")


def _prompt_ids(tokenizer) -> list[int]:
  given = [f for f in (_PROMPT, _PROMPT_FILE, _PROMPT_IDS) if f.present]
  if len(given) != 1:
    raise SpecPilotError(
      "give exactly one of --prompt, --prompt_file and --prompt_ids"
    )
  if _PROMPT_IDS.value is not None:
    if _CHAT.value:
      raise SpecPilotError("--chat needs a prompt text, not --prompt_ids")
    return cli.parse_ids(_PROMPT_IDS.value, "prompt_ids")
  if tokenizer is None:
    raise SpecPilotError(f"{_MODEL.value} has no tokenizer: give --prompt_ids")
  text = _PROMPT.value or ""
  if _PROMPT_FILE.value is not None:
    text = cli.read_text(_PROMPT_FILE.value)
  if _CHAT.value:
    return tokenizer.encode(
      tokenizer.chat([{"role": "user", "content": text}]),
      add_special_tokens=False,
    )
  return tokenizer.encode(text)


def main() -> None:
  sampling = _SAMPLING()
  system = registry.parse_options(_SET.value)
  system.check_temperature(sampling.temperature)
  loading.prepare_jax(_DTYPE.value)
  model = loading.load_target(_MODEL.value, _DTYPE.value)
  drafter = loading.make_drafter(
    _DRAFTER.value or loading.default_drafter(model.config), model.target
  )
  prompt_ids = _prompt_ids(model.tokenizer)
  target, drafter = registry.prepare(system, model.target, drafter)
  engine = Engine(
    target,
    drafter=drafter,
    tokenizer=model.tokenizer,
    system=system,
    schedule=registry.schedule(system, target, drafter),
    max_seq_len=loading.sequence_room(
      model.config, len(prompt_ids), sampling.max_tokens
    ),
  )
  output = None
  for chunk in engine.stream(prompt_ids, sampling):
    if not _JSON.value:
      shown = chunk.text if model.tokenizer else f"{list(chunk.token_ids)} "
      print(shown, end="", flush=True)
    output = chunk.output
  assert output is not None
  metrics = output.metrics
  if _JSON.value:
    result = {
      "prompt_ids": output.prompt_ids,
      "token_ids": output.token_ids,
      "text": output.text,
      "finish_reason": output.finish_reason,
      "acceptance_length": metrics.acceptance_length,
      # A single token has no decode rate.
      "decode_tok_s": (
        metrics.decode_tok_s if metrics.output_tokens > 1 else None
      ),
    }
    print(json.dumps(result))
    return
  print()
  speed = ""
  if metrics.output_tokens > 1:  # a single token has no decode rate
    speed = f" {metrics.decode_tok_s:.1f} tok/s,"
  print(
    f"[{metrics.output_tokens} tokens, finish {output.finish_reason}, tau"
    f" {metrics.acceptance_length:.2f} over {metrics.num_steps} passes,{speed}"
    f" first token after {metrics.ttft_ms / 1e3:.2f} s with compilation]",
    file=sys.stderr,
  )
  for note in model.notes:
    print(f"[{note}]", file=sys.stderr)


if __name__ == "__main__":
  cli.run(main)
