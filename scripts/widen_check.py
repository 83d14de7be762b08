"""Does a widened model keep its function? `python -m scripts.widen_check`

Widens the zoo on this machine and prints JSON lines: in float64 whether the
greedy tokens are the same, in bfloat16 the acceptance of both drafters on the
same text, and the verdict of token forcing on what the wide pair decodes.
The control of token forcing is the zoo, whose function the wide pair renders
anew. Exits with status 1 unless all of it holds.
"""

import dataclasses
import json
import sys
import time

from absl import flags

from experiments import token_forcing
from specpilot_jax import cli, loading
from specpilot_jax.checkpoints import widen_check
from specpilot_jax.models.drafters import learned

_MODEL = flags.DEFINE_string(
  "model", "widened:hybrid-1280", "Widened model to check."
)
_DRAFTER = flags.DEFINE_enum(
  "drafter", "dflash", learned.KINDS, "Drafter of both."
)
_PROMPTS = flags.DEFINE_integer("prompts", 20, "Held-out prompts.")
_LENGTH = flags.DEFINE_integer("prompt_tokens", 200, "Ids of a prompt at most.")
_TOKENS = flags.DEFINE_integer("tokens", 128, "Output tokens per prompt.")
_DECODE = flags.DEFINE_boolean(
  "decode",
  True,
  "Decode token by token in float64 too, and not only along the zoo's tokens.",
)
_BFLOAT16 = flags.DEFINE_boolean(
  "bfloat16", True, "Acceptance and token forcing in bfloat16 too."
)
_ACCEPTANCE = flags.DEFINE_float(
  "acceptance", 0.02, "Relative difference of acceptance at most."
)


def forcing(found: widen_check.InBfloat16) -> dict:
  """The verdict on the wide pair's outputs."""

  def scored(name, tokens, gaps):
    return [
      token_forcing.Scored(f"{name} {i}", t, g)
      for i, (t, g) in enumerate(zip(tokens, gaps, strict=True))
    ]

  control = scored("zoo", found.control_tokens, found.control_gaps)
  count = sum(s.gaps.size for s in control)
  return token_forcing.judge(
    scored("wide", found.tokens, found.gaps),
    token_forcing.Control(
      "zoo, token by token",
      tokens=count,
      flips=sum(s.flips for s in control),
      max_gap=max(s.max_gap for s in control),
    ),
    dtype="bfloat16",
    min_control_tokens=count,
  )


def main() -> None:
  started = time.perf_counter()

  def tell(what: str, **values) -> None:
    at = round(time.perf_counter() - started, 1)
    print(json.dumps({"check": what, **values, "at_s": at}), flush=True)

  loading.prepare_jax("float64")
  prompts = widen_check.prompts(_PROMPTS.value, _LENGTH.value)
  exact = widen_check.in_float64(
    _MODEL.value,
    _DRAFTER.value,
    prompts,
    _TOKENS.value,
    decodes=_DECODE.value,
  )
  tell(
    "float64",
    forced=exact.forced,
    decoded=exact.decoded,
    logit_difference=exact.logits,
    acceptance=dataclasses.asdict(exact.acceptance),
  )
  good = exact.forced and exact.decoded is not False
  if not _BFLOAT16.value:
    sys.exit(0 if good else 1)
  rounded = widen_check.in_bfloat16(
    _MODEL.value, _DRAFTER.value, prompts, exact.outputs
  )
  relative = rounded.acceptance.relative
  tell(
    "acceptance",
    **dataclasses.asdict(rounded.acceptance),
    relative=relative,
    logit_difference=rounded.logits,
  )
  verdict = forcing(rounded)
  tell("token_forcing", **verdict)
  good &= abs(relative) <= _ACCEPTANCE.value
  good &= verdict["verdict"] == token_forcing.PASS
  sys.exit(0 if good else 1)


if __name__ == "__main__":
  cli.run(main)
