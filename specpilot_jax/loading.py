"""From names and paths to things that decode."""

import dataclasses
import os
import pathlib

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.fp8_array import FP8Array
from specpilot_jax import compilation, footprint, paths
from specpilot_jax.checkpoints import (
  SMOLLM2,
  ZOO,
  Checkpoint,
  load_checkpoint,
  widen,
  widened,
)
from specpilot_jax.checkpoints import drafter as drafter_lib
from specpilot_jax.configs import ModelConfig
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import fp8, w12
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.config import DrafterConfig
from specpilot_jax.tokenizer import Tokenizer
from specpilot_jax.zoo import store

DRAFTERS = ("none", "prompt_lookup", *learned.KINDS)
"""Drafters by name; a learned one is that which was trained for the model."""

MEMORY_FRACTION = 0.9
"""Of a GPU's memory, for a process: JAX's own share of 0.75 leaves 38 GB of an
H200 idle. Several processes on a device set XLA_CLIENT_MEM_FRACTION."""

_MEMORY_VARIABLES = (
  "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # fmt: skip

FP8_PREFIX = "fp8:"
"""Before a model's name: the same, rounded to FP8."""

FP8_NOTE = (
  "fp8: matrices rounded to e4m3 in blocks of 128x128, activations per token"
  " and 128 columns"
)
"""What every table with figures of such a model must say."""

_OWN_DRAFTERS = {
  ZOO: store.DRAFTERS["zoo"],
  SMOLLM2: store.DRAFTERS["smollm2"],
}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A target that is ready to decode.

  Attributes:
    target: the built model.
    tokenizer: None where the checkpoint has none.
    notes: what a reader of results must know of the weights.
    sha256: of the source files, by file name.
  """

  target: target_lib.Target
  tokenizer: Tokenizer | None
  notes: tuple[str, ...]
  sha256: dict[str, str]

  @property
  def config(self) -> ModelConfig:
    return self.target.config


def default_dtype() -> str:
  """bfloat16 on an accelerator, float32 on a CPU.

  CPUs without bfloat16 instructions emulate them: one-token decoding of
  SmolLM2-135M took 177 ms in bfloat16 and 21 to 32 ms in float32 on two cores
  of an EPYC (2026-11-29).
  """
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def prepare_jax(dtype: str | None) -> None:
  """Process-wide settings, before anything is compiled.

  float64 needs `jax_enable_x64`; executables are kept between processes. Of a
  GPU's memory a process takes `MEMORY_FRACTION`, where the environment does not
  say how much.
  """
  if dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if not any(name in os.environ for name in _MEMORY_VARIABLES):
    os.environ[_MEMORY_VARIABLES[0]] = str(MEMORY_FRACTION)
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as e:
    wanted = os.environ.get("JAX_PLATFORMS", "any platform")
    reason = str(e).splitlines()[0] if str(e) else "none found"
    raise SpecPilotError(f"no JAX device of {wanted}: {reason}") from None
  cache = paths.data_dir() / "compiled"
  try:
    cache.mkdir(parents=True, exist_ok=True)
  except OSError:
    return  # Compilation is repeated in each process.
  if os.access(cache, os.W_OK):
    compilation.use_persistent_cache(cache)


@dataclasses.dataclass(frozen=True)
class Source:
  """A model that is known but not on the device yet.

  Attributes:
    name: name or path it was opened by.
    config: its shape.
    checkpoint: what it is made of; the zoo's for a widened model.
    quantize: whether it is to be in FP8, where the checkpoint is not.
  """

  name: str
  config: ModelConfig
  checkpoint: Checkpoint
  quantize: bool = False

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self.checkpoint.tokenizer

  @property
  def in_fp8(self) -> bool:
    """Whether the model is one of FP8 codes, whatever holds it."""
    return self.quantize or self._stored_in_fp8

  @property
  def _stored_in_fp8(self) -> bool:
    stored = self.checkpoint.params.values()
    return any(isinstance(value, FP8Array) for value in stored)

  def held(self, weights: str) -> str:
    """How a target is held that is built for `weights`.

    Raises:
      SpecPilotError: a model in FP8 is to be in W12.
    """
    if not self.in_fp8:
      return weights
    if weights == "w12":
      raise SpecPilotError(
        f"{self.name} is in FP8, weights=w12 cannot be made of it"
      )
    return "fp8"

  def build(
    self,
    dtype: str | None = None,
    kernels: Kernels = REFERENCE,
    weights: str = "bf16",
  ) -> LoadedModel:
    """Builds the target in `dtype`; `default_dtype()` by default.

    Args:
      kernels: implementations of its operations.
      weights: `w12` holds its matrices in that alone, `fp8` makes codes of
        them.

    Raises:
      SpecPilotError: the weights alone are more than the device can hold, or
        the kernels cannot run on it; weights that W12 does not hold.
    """
    dtype = dtype or default_dtype()
    weights = self.held(weights)
    needed = footprint.target_bytes(self.config, dtype)
    if weights == "w12":
      needed = footprint.w12_bytes(self.config, None)
    elif weights == "fp8":
      needed = footprint.fp8_bytes(self.config, dtype)
    available = footprint.device_bytes()
    if available is not None and needed > available:
      raise SpecPilotError(
        f"{self.config.name} in {dtype} has {needed / 1e9:.3g} GB of weights,"
        f" this device offers {available / 1e9:.3g} GB"
      )
    notes = tuple(self.checkpoint.notes)
    if widened.is_widened(self.name):
      hold = _hold(self.config, weights)
      target = widened.target(self.name, self.checkpoint, dtype, kernels, hold)
      notes = (*notes, widened.note(self.name))
    else:
      target = target_lib.build(
        self.config, self.checkpoint.params, dtype, kernels
      )
      if weights == "w12":
        target = w12.target(target)
      elif weights == "fp8" and target.weights != "fp8":
        target = fp8.target(target)
    if weights == "fp8" and not self._stored_in_fp8:
      notes = (*notes, FP8_NOTE)
    return LoadedModel(
      target=target,
      tokenizer=self.tokenizer,
      notes=notes,
      sha256=dict(self.checkpoint.sha256),
    )


def _hold(config: ModelConfig, weights: str) -> widen.Hold:
  """What a widened model holds of each tensor."""
  if weights == "fp8":
    return fp8.hold(config)
  return w12.hold if weights == "w12" else widen.as_it_is


def open_target(name_or_path: str | os.PathLike[str]) -> Source:
  """Reads a model, without anything on the device.

  >>> source = open_target("fp8:zoo")
  >>> source.config.name, source.config.hidden_size, source.in_fp8
  ('zoo', 320, True)
  >>> open_target("widened:qwen3.8-27b").config.hidden_size
  5120

  Args:
    name_or_path: see `checkpoints.load_checkpoint`; or `widened:PRESET`, the
      zoo at the shape of a big model (`checkpoints.widened`). `fp8:` before
      any of these is that model with its matrices rounded to FP8, for models
      that are not released so.
  """
  name = str(name_or_path)
  if not name:
    raise SpecPilotError("the name or path of the model is empty")
  if name.lower().startswith(FP8_PREFIX):
    inner = open_target(name[len(FP8_PREFIX) :])
    if inner.in_fp8:
      raise SpecPilotError(f"{inner.name} is in FP8 already, so not {name!r}")
    return dataclasses.replace(inner, quantize=True)
  if widened.is_widened(name):
    zoo = load_checkpoint(ZOO)
    return Source(name, widened.target_config(name, zoo), zoo)
  checkpoint = load_checkpoint(name_or_path)
  return Source(name, checkpoint.config, checkpoint)


def located(name: str) -> str:
  """The name of a model or drafter, a path made absolute."""
  prefix = name[: len(FP8_PREFIX)]
  if prefix.lower() == FP8_PREFIX:
    return prefix + located(name[len(FP8_PREFIX) :])
  return str(pathlib.Path(name).absolute()) if os.path.exists(name) else name


def load_target(
  name_or_path: str | os.PathLike[str],
  dtype: str | None = None,
  kernels: Kernels = REFERENCE,
) -> LoadedModel:
  """Loads a checkpoint and builds the target.

  Args:
    name_or_path: see `open_target`.
    dtype: `bfloat16`, `float32` or `float64`; `default_dtype()` by default.
    kernels: implementations of its operations.
  """
  return open_target(name_or_path).build(dtype, kernels)


def default_drafter(config: ModelConfig) -> str:
  """`dflash` where the model has its own, else `prompt_lookup`."""
  own = config.name in _OWN_DRAFTERS or widened.is_widened(config.name)
  return "dflash" if own else "prompt_lookup"


def make_drafter(
  name: str | os.PathLike[str], target: target_lib.Target | None = None
) -> Drafter | None:
  """A drafter for a target; None for `none`, autoregressive decoding.

  Args:
    name: one of `DRAFTERS`, or a folder with a released DFlash, DFlash2 or
      DSpark drafter.
    target: that it drafts for; `none` and `prompt_lookup` need none. With a
      target in W12 the drafter's own matrices are held so too.

  Raises:
    SpecPilotError: an unknown name, a model without a drafter of its own, a
      folder that does not load, a drafter of another target.
  """
  if name == "none":
    return None
  if name == "prompt_lookup":
    return PromptLookup()
  if target is None:
    raise SpecPilotError(f"drafter {str(name)!r} needs its target")
  packed = target.weights == "w12"
  dtype = str(target.dtype)
  if name in learned.KINDS and widened.is_widened(target.config.name):
    hold = w12.hold if packed else widen.as_it_is
    model = widened.drafter(target.config.name, str(name), dtype, hold)
  else:
    model = drafter_lib.load(_folder(name, target.config), dtype)
  drafter = learned.drafter(model, target)
  return w12.drafter(drafter, target) if packed else drafter


def _folder(name: str | os.PathLike[str], target: ModelConfig) -> pathlib.Path:
  """Where a learned drafter lies."""
  if name in learned.KINDS:
    own = _OWN_DRAFTERS.get(target.name, {})
    if name not in own:
      raise SpecPilotError(
        f"{target.name} has no {name} drafter of its own; give the folder of"
        " one"
      )
    return own[str(name)]
  folder = pathlib.Path(name)
  if not folder.is_dir():
    raise SpecPilotError(
      f"drafter {str(name)!r} is neither a known name"
      f" ({', '.join(DRAFTERS)}) nor a folder"
    )
  return folder


def drafter_config(
  name: str | os.PathLike[str], target: ModelConfig
) -> DrafterConfig | None:
  """Shape of the drafter that `make_drafter` makes; None where it has no
  weights. Raises as that does."""
  if name in ("none", "prompt_lookup"):
    return None
  if name in learned.KINDS and widened.is_widened(target.name):
    return widened.drafter_config(target.name, str(name))
  return drafter_lib.load_config(_folder(name, target))


def sequence_room(config: ModelConfig, prompt: int, output: int) -> int:
  """A `max_seq_len` that fits, rounded up so that executables are shared.

  Args:
    config: of the target; its context length is the upper limit.
    prompt, output: tokens.
  """
  return min(config.context_length, -(-(prompt + output) // 256) * 256)
