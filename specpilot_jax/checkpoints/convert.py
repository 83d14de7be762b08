"""Convert a model: `python -m specpilot_jax.checkpoints.convert`

    --source=zoo|smollm2|PATH --output=DIR [--format=w12|bf16|safetensors]

`w12` is this package's own Orbax checkpoint with every bfloat16 matrix in 12
bits a weight, none of them changed; `bf16` the same without W12; `safetensors`
a Hugging Face folder (config.json, tokenizer) that `transformers` loads. One
parameter at a time is in memory. What is interrupted leaves DIR.partial, and
goes on where it stopped when it is run again.

Matrices that are float16, float32 or quantised become bfloat16 with
--round_to_bf16 alone, which says how many values change. --verify reads the
output back, decodes it and compares every bit with the source.
"""

from absl import flags

from specpilot_jax import cli
from specpilot_jax.checkpoints import conversion

_SOURCE = flags.DEFINE_string(
  "source", None, "zoo, smollm2, a Hugging Face folder, a .gguf file or an"
  " Orbax folder.", required=True,
)  # fmt: skip
_OUTPUT = flags.DEFINE_string(
  "output", None, "Folder to write; it must not exist, or be empty.",
  required=True,
)  # fmt: skip
_FORMAT = flags.DEFINE_enum(
  "format", conversion.W12, conversion.FORMATS, "What to write."
)
_ROUND = flags.DEFINE_boolean(
  "round_to_bf16", False, "Round matrices that are stored wider."
)
_VERIFY = flags.DEFINE_boolean(
  "verify", False, "Read the output back and compare it bit for bit."
)


def main() -> None:
  done = conversion.convert(
    _SOURCE.value,
    _OUTPUT.value,
    _FORMAT.value,
    round_to_bf16=_ROUND.value,
    verify=_VERIFY.value,
    show_progress=True,
  )
  resumed = f" ({done.resumed} of an earlier run)" if done.resumed else ""
  verified = ", read back bit for bit" if done.verified else ""
  print(
    f"{_OUTPUT.value}: {done.kind}, {done.parameters} parameters{resumed},"
    f" {done.output_bytes / 1e6:.1f} MB from {done.source_bytes / 1e6:.1f} MB"
    f"{verified}"
  )
  if _ROUND.value:
    print(
      f"rounding to bfloat16 changed {done.changed} of {done.rounded} values"
    )
  for name, why in done.kept_bf16.items():
    print(f"{name} stays bfloat16: {why}")
  for note in done.notes:
    print(f"note: {note}")


if __name__ == "__main__":
  cli.run(main)
