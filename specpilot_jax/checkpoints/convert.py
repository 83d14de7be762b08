"""Convert a model: `python -m specpilot_jax.checkpoints.convert`

    --source=zoo|smollm2|PATH --output=DIR --format=safetensors|bf16

`safetensors` is a Hugging Face folder (config.json, tokenizer) that
`transformers` loads; `bf16` is this package's own Orbax checkpoint. The
weights keep their values: where a format would round them, --round_to_bf16
says so.
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
  "format", "bf16", conversion.FORMATS, "What to write."
)
_ROUND = flags.DEFINE_boolean(
  "round_to_bf16", False, "Round weights that are stored wider."
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
  )
  size = sum(array.nbytes for array in done.params.values())
  verified = ", read back bit for bit" if _VERIFY.value else ""
  print(
    f"{_OUTPUT.value}: {_FORMAT.value}, {len(done.params)} tensors,"
    f" {size / 1e6:.1f} MB{verified}"
  )


if __name__ == "__main__":
  cli.run(main)
