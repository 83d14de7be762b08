"""The sampling settings of a request as command-line flags, in one place."""

from collections.abc import Callable

from absl import flags

from specpilot_jax.decoding.sampling import SamplingParams

# To absl the flags below belong to the module that asks for them, so that its
# help lists them.
flags.disclaim_key_flags()


def define_sampling_flags() -> Callable[[], SamplingParams]:
  """Defines the flags; called once, by a module that is run.

  Returns:
    What makes the settings out of the parsed flags. It raises SpecPilotError
    for a value out of range.
  """
  max_tokens = flags.DEFINE_integer("max_tokens", 256, "Output tokens at most.")
  temperature = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
  top_p = flags.DEFINE_float("top_p", 1.0, "Nucleus probability.")
  top_k = flags.DEFINE_integer("top_k", 0, "Keep the k best; 0 keeps all.")
  min_p = flags.DEFINE_float(
    "min_p", 0.0, "Keep what has this part of the best token's probability."
  )
  presence = flags.DEFINE_float(
    "presence_penalty", 0.0, "Off the logit of a token that was output."
  )
  frequency = flags.DEFINE_float(
    "frequency_penalty", 0.0, "Off the logit for each time it was output."
  )
  repetition = flags.DEFINE_float(
    "repetition_penalty", 1.0, "Divides the logit of known tokens; 1 is off."
  )
  seed = flags.DEFINE_integer(
    "seed", 0, "Of the noise; request i of a benchmark draws with seed + i."
  )
  stop = flags.DEFINE_multi_string("stop", [], "Stop string; repeatable.")
  ignore_eos = flags.DEFINE_boolean(
    "ignore_eos", False, "Do not end at end-of-sequence ids nor on loops."
  )

  def read() -> SamplingParams:
    return SamplingParams(
      temperature=temperature.value,
      top_k=top_k.value,
      top_p=top_p.value,
      min_p=min_p.value,
      presence_penalty=presence.value,
      frequency_penalty=frequency.value,
      repetition_penalty=repetition.value,
      seed=seed.value,
      max_tokens=max_tokens.value,
      stop=tuple(stop.value),
      ignore_eos=ignore_eos.value,
    )

  return read
