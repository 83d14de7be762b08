"""Score a text: `python -m specpilot_jax.score --model=smollm2 --text_file=F`

Prints each token's log-probability given the tokens before it, in nats, and
the mean negative log-likelihood. The first token has nothing before it and is
not scored. With --json the last line is {token_ids, logprobs, mean_nll};
logprobs[0] is null.
"""

import json

from absl import flags

from specpilot_jax import cli, loading
from specpilot_jax.configs import DTYPES
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.errors import SpecPilotError

_MODEL = flags.DEFINE_string(
  "model", None, "smollm2, a Hugging Face folder, a .gguf file or an Orbax"
  " folder.", required=True,
)  # fmt: skip
_TEXT_FILE = flags.DEFINE_string("text_file", None, "UTF-8 text to score.")
_TOKEN_IDS = flags.DEFINE_string(
  "token_ids", None, "Token ids to score: 1,2,3. Needs no tokenizer."
)
_DTYPE = flags.DEFINE_enum(
  "dtype", None, DTYPES, "bfloat16 on an accelerator, float32 on a CPU."
)
_JSON = flags.DEFINE_boolean("json", False, "One JSON line, the last.")


def main() -> None:
  text_file = _TEXT_FILE.value
  if (text_file is None) == (_TOKEN_IDS.value is None):
    raise SpecPilotError("give exactly one of --text_file and --token_ids")
  loading.prepare_jax(_DTYPE.value)
  model = loading.load_target(_MODEL.value, _DTYPE.value)
  if _TOKEN_IDS.value is not None:
    ids = cli.parse_ids(_TOKEN_IDS.value, "token_ids")
  elif model.tokenizer is None or text_file is None:
    raise SpecPilotError(f"{_MODEL.value} has no tokenizer: give --token_ids")
  else:
    ids = model.tokenizer.encode(cli.read_text(text_file))
  if len(ids) < 2:
    raise SpecPilotError(
      f"scoring needs at least 2 tokens, the text has {len(ids)}"
    )
  engine = Engine(
    model.target,
    tokenizer=model.tokenizer,
    max_seq_len=loading.sequence_room(model.config, 1, len(ids) - 1),
  )
  logprobs = engine.score(ids[:1], ids[1:]).logprobs
  mean_nll = float(-logprobs.mean())
  if _JSON.value:
    result = {
      "token_ids": ids,
      "logprobs": [None, *logprobs.tolist()],
      "mean_nll": mean_nll,
    }
    print(json.dumps(result))
    return
  for token, logprob in zip(ids[1:], logprobs, strict=True):
    piece = model.tokenizer.decode([token]) if model.tokenizer else ""
    print(f"{token:>8} {logprob:10.4f} {piece!r}")
  print(f"mean NLL {mean_nll:.4f} nats per token over {len(logprobs)} tokens")


if __name__ == "__main__":
  cli.run(main)
