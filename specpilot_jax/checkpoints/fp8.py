"""FP8 in checkpoints: which tensors are codes, and how they make parameters.

Released checkpoints have linear layers of the model in e4m3, and leave in
bfloat16 the embedding, the output head, and the small projections b and a of
Gated DeltaNet. A fused parameter has the codes of its tensors as rows, then
what was left.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_array
from pallas_kernels.fp8_array import BLOCK, FP8Array
from specpilot_jax.checkpoints import checkpoint as common
from specpilot_jax.checkpoints.layout import EMBEDDING, LM_HEAD, Fused, Part
from specpilot_jax.errors import SpecPilotError

E4M3_NAME = "F8_E4M3"
"""Of the type of codes, in safetensors."""

FIELD = "quantization_config"
BLOCKS = (BLOCK, BLOCK)

_LEFT = (".linear_attn.in_proj_a.weight", ".linear_attn.in_proj_b.weight")


def is_linear(part: Part) -> bool:
  """Whether a tensor is of a linear layer, which may be in FP8."""
  matrix = len(part.shape) == 2 and part.name.endswith(".weight")
  return matrix and part.name not in (EMBEDDING, LM_HEAD)


def converted(part: Part) -> bool:
  """Whether released checkpoints have it in FP8."""
  return is_linear(part) and not part.name.endswith(_LEFT)


@dataclasses.dataclass(frozen=True)
class Quantization:
  """What `config.json` says of a checkpoint in FP8.

  Attributes:
    block: rows and columns of a scale; None has one for each row.
    suffix: of the names of scales, in place of `weight`.
    left: modules that are no codes; `re:` begins an expression.
  """

  block: tuple[int, int] | None
  suffix: str
  left: tuple[str, ...]

  def leaves(self, module: str) -> bool:
    """Whether a module is said to be no codes."""
    for entry in self.left:
      if entry.startswith("re:"):
        if re.match(entry[3:], module):
          return True
      elif module == entry or module.startswith(f"{entry}."):
        return True
    return False

  def scale_shapes(self, part: Part) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of a tensor may have."""
    rows, columns = part.shape
    if self.block is None:
      return (rows, 1), (rows,)
    return (fp8_array.scale_shape(rows, columns, self.block),)


def parse(fields: Any, name: str) -> Quantization:
  """Reads `quantization_config`.

  Two forms: `fp8` with `weight_block_size` [128, 128], as Qwen and DeepSeek
  release it, and `compressed-tensors` with e4m3 weights per channel (or in
  such blocks) and dynamic activations.

  Args:
    fields: the parsed value.
    name: of the model, for errors.

  Raises:
    SpecPilotError: another method or scheme; the line names the field.
  """
  if not isinstance(fields, Mapping):
    raise SpecPilotError(f"{name}: {FIELD} is not a mapping")
  method = fields.get("quant_method")
  if method == "fp8":
    return _fine_grained(fields, name)
  if method == "compressed-tensors":
    return _compressed(fields, name)
  raise SpecPilotError(
    f"{name}: {FIELD}.quant_method {method!r} is not supported (only 'fp8' and"
    " 'compressed-tensors')"
  )


def _expect(
  fields: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], where: str
) -> None:
  """Refuses unknown fields, and values other than those given.

  Args:
    wanted: field to values; none for any. None among them lets it be missing.
  """
  for field in sorted(fields.keys() - wanted.keys()):
    raise SpecPilotError(f"{where}.{field} is not a known field")
  for field, values in wanted.items():
    value = fields.get(field)
    if values and not any(
      type(value) is type(v) and value == v for v in values
    ):
      raise SpecPilotError(
        f"{where}.{field}={value!r} is not supported (only"
        f" {', '.join(repr(v) for v in values if v is not None)})"
      )


def _names(value: Any, where: str) -> tuple[str, ...]:
  if value is None:
    return ()
  if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
    raise SpecPilotError(f"{where} is not a list of names")
  for entry in value:
    try:
      re.compile(entry.removeprefix("re:"))
    except re.error as error:
      raise SpecPilotError(f"{where}: {entry!r} ({error})") from None
  return tuple(value)


def _fine_grained(fields, name: str) -> Quantization:
  where = f"{name}: {FIELD}"
  _expect(
    fields,
    {
      "quant_method": ("fp8",),
      "activation_scheme": ("dynamic",),
      "fmt": ("e4m3", None),
      "scale_fmt": (None, "float"),
      "weight_block_size": (list(BLOCKS),),
      "modules_to_not_convert": (),
      "ignored_layers": (),
    },
    where,
  )
  left = [
    entry
    for field in ("modules_to_not_convert", "ignored_layers")
    for entry in _names(fields.get(field), f"{where}.{field}")
  ]
  return Quantization(BLOCKS, "weight_scale_inv", tuple(left))


def _compressed(fields, name: str) -> Quantization:
  where = f"{name}: {FIELD}"
  _expect(
    fields,
    {
      "quant_method": ("compressed-tensors",),
      "format": ("float-quantized", "naive-quantized"),
      "quantization_status": ("compressed", None),
      "config_groups": (),
      "ignore": (),
      "kv_cache_scheme": (None,),
      "global_compression_ratio": (),
      "sparsity_config": ({}, None),
      "transform_config": ({}, None),
      "version": (),
    },
    where,
  )
  groups = fields.get("config_groups")
  if not isinstance(groups, Mapping) or len(groups) != 1:
    raise SpecPilotError(f"{where}.config_groups is not one group")
  ((key, group),) = groups.items()
  where = f"{where}.config_groups.{key}"
  if not isinstance(group, Mapping):
    raise SpecPilotError(f"{where} is not a mapping")
  _expect(
    group,
    {
      "targets": (["Linear"],),
      "weights": (),
      "input_activations": (),
      "output_activations": (None,),
      "format": ("float-quantized", "naive-quantized", None),
    },
    where,
  )
  weights = _arguments(group.get("weights"), f"{where}.weights")
  blocks = weights.get("strategy") == "block"
  _expect(
    weights,
    _SCHEME
    | {
      "strategy": ("block", "channel"),
      "dynamic": (False,),
      "block_structure": (list(BLOCKS),) if blocks else (None,),
      "group_size": (None,),
    },
    f"{where}.weights",
  )
  _expect(
    _arguments(group.get("input_activations"), f"{where}.input_activations"),
    _SCHEME
    | {
      "strategy": ("group",) if blocks else ("token",),
      "dynamic": (True,),
      "block_structure": (None,),
      "group_size": (BLOCK,) if blocks else (None,),
    },
    f"{where}.input_activations",
  )
  left = _names(fields.get("ignore"), f"{name}: {FIELD}.ignore")
  return Quantization(BLOCKS if blocks else None, "weight_scale", left)


_SCHEME: dict[str, tuple[Any, ...]] = {
  "num_bits": (8,),
  "type": ("float",),
  "symmetric": (True,),
  "actorder": (None,),
  "scale_dtype": (),
  "zp_dtype": (),
  "observer": (),
  "observer_kwargs": (),
}
"""Of weights and of activations; observers are for calibration."""


def _arguments(value: Any, where: str) -> Mapping[str, Any]:
  if not isinstance(value, Mapping):
    raise SpecPilotError(f"{where} is not a mapping")
  return value


def joint_block(
  heights: Sequence[int], block: tuple[int, int]
) -> tuple[int, int]:
  """The block of tensors of so many rows, one below the other.

  Where a tensor ends amid a block, every row has scales of its own.
  """
  ragged = any(height % block[0] for height in heights[:-1])
  return (1, block[1]) if ragged else block


def join(
  coded: Sequence[tuple[Any, Any]],
  rest: Sequence[Any],
  block: tuple[int, int] | None,
) -> FP8Array:
  """A parameter of tensors one below the other; see `joint_block`.

  Args:
    coded: codes and scales of each tensor in FP8, all of one width.
    rest: the other tensors, below them.
    block: see `Quantization`.
  """
  columns = coded[0][0].shape[1]
  size = (1, columns) if block is None else block
  scales = [
    scale.reshape(fp8_array.scale_shape(len(codes), columns, size))
    for codes, scale in coded
  ]
  joint = joint_block([len(codes) for codes, _ in coded], size)
  if joint != size:
    scales = [
      scale.repeat(size[0], axis=0)[: len(codes)]
      for (codes, _), scale in zip(coded, scales, strict=True)
    ]
  # One wider block than the matrix is a row's.
  size = (joint[0], min(joint[1], columns))
  lib: Any = np if isinstance(coded[0][0], np.ndarray) else jnp
  empty = lib.zeros((0, columns), common.BFLOAT16)
  return FP8Array(
    codes=lib.concatenate([codes for codes, _ in coded]),
    scale=lib.concatenate(scales).astype(np.float32),
    rest=lib.concatenate([*rest]) if rest else empty,
    block=size,
  )


def refuse_to_write(params: Mapping[str, Any], where: str) -> None:
  """Refuses parameters in FP8, of which no writer knows."""
  for name, value in params.items():
    if isinstance(value, FP8Array):
      raise SpecPilotError(
        f"{where}: parameter {name!r} is in FP8, which is not written"
      )


def split_rows(fused: Fused, where: str, is_coded) -> int:
  """How many of a parameter's tensors are codes: the first ones.

  Args:
    is_coded: of a part.

  Raises:
    SpecPilotError: codes below what is none.
  """
  flags = [is_coded(part) for part in fused.parts]
  count = sum(flags)
  if not all(flags[:count]):
    first = flags.index(False)
    raise SpecPilotError(
      f"{where}: tensor {fused.parts[first + 1].name!r} is in FP8 and"
      f" {fused.parts[first].name!r} is not; they are fused in this order"
    )
  return count
