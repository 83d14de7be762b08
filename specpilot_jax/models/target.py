"""The target model: hybrid Qwen3.5 family, dense Qwen3, Llama-style.

One forward pass serves prefill, one-token decode, chain and tree verification:
it reads a committed state, runs `Nodes` on top of it and returns, beside the
hidden states, a stash from which any accepted path can be committed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.fp8_array import FP8Array
from pallas_kernels.w12_array import W12Array
from specpilot_jax import configs
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import (
  assembly,
  attention,
  fp8,
  gated_delta,
  layers,
)
from specpilot_jax.models.state import LayerStash, Nodes, TargetState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
  """What a pass returns.

  Attributes:
    hidden: final-normed hidden states [N, D]; `Target.logits` takes any rows.
    taps: residual stream after the tapped layers [N, taps, D].
    stash: one entry per layer, for `decoding.commit`.
  """

  hidden: Float[Array, "N D"]
  taps: Float[Array, "N L D"]
  stash: tuple[LayerStash, ...]


class DecoderLayer(nnx.Module):
  """x + mixer(norm(x)), then x + mlp(norm(x))."""

  def __init__(
    self, config: configs.ModelConfig, kind: str, dtype, rngs, kernels: Kernels
  ):
    def norm():
      return layers.RMSNorm(
        config.hidden_size,
        config.norm_eps,
        config.zero_centered_norm,
        dtype,
        kernels.add_norm,
      )

    self.input_norm = norm()
    if kind == configs.GDN:
      self.mixer = gated_delta.GatedDeltaNet(config, dtype, rngs, kernels)
    else:
      self.mixer = attention.Attention(config, dtype, rngs, kernels)
    self.post_norm = norm()
    self.mlp = layers.MLP(
      config.hidden_size,
      config.intermediate_size,
      dtype,
      rngs,
      kernels.w12_matmul,
      kernels.fp8_matmul,
    )

  def __call__(self, x, delta, nodes, positions, state, length):
    """Residual stream and what is to be added to it, before and after."""
    x, h = self.input_norm.after(x, delta, nodes.is_prompt)
    # Profiles tell kernel classes apart by the innermost of these scopes.
    if isinstance(self.mixer, gated_delta.GatedDeltaNet):
      with jax.named_scope("recurrent"):
        h, stash = self.mixer(h, nodes, state)
    else:
      with jax.named_scope("attention"):
        h, stash = self.mixer(h, nodes, positions, state, length)
    x, h = self.post_norm.after(x, h, nodes.is_prompt)
    with jax.named_scope("mlp"):
      h = self.mlp(h)
    return x, h, stash


class Target(nnx.Module):
  """A target model; parameters as in `parameter_shapes`."""

  def __init__(
    self,
    config: configs.ModelConfig,
    dtype,
    rngs: nnx.Rngs,
    kernels: Kernels = REFERENCE,
  ):
    self.config = config
    self.kernels = kernels
    self.dtype = jnp.dtype(dtype)
    self.embed = layers.Embedding(
      config.vocab_size, config.hidden_size, dtype, rngs, kernels.w12_matmul
    )
    self.layers = nnx.List(
      [
        DecoderLayer(config, kind, dtype, rngs, kernels)
        for kind in config.layer_types
      ]
    )
    self.norm = layers.RMSNorm(
      config.hidden_size,
      config.norm_eps,
      config.zero_centered_norm,
      dtype,
      kernels.add_norm,
    )
    if not config.tie_embeddings:
      self.lm_head = layers.Embedding(
        config.vocab_size, config.hidden_size, dtype, rngs, kernels.w12_matmul
      )

  @property
  def weights(self) -> str:
    """How its matrices are held, one of `configs.WEIGHTS`."""
    if isinstance(self.embed.weight.get_value(), W12Array):
      return "w12"
    linear = (
      module
      for _, module in nnx.iter_modules(self)
      if isinstance(module, layers.Linear)
    )
    # Released checkpoints leave some of them as they are.
    codes = any(isinstance(m.weight.get_value(), FP8Array) for m in linear)
    return "fp8" if codes else "bf16"

  def __call__(
    self, nodes: Nodes, state: TargetState, taps: tuple[int, ...] = ()
  ) -> TargetOutput:
    """Runs the nodes on top of `state`, which is read and never written.

    Args:
      nodes: N nodes with ids in range.
      state: the committed state.
      taps: layer indices whose residual stream (after the layer) is returned.
    """
    x = self.embed(nodes.tokens)
    positions = nodes.positions(state.length)
    # A layer leaves its last sum to the norm that follows.
    delta, stash, tapped = jnp.zeros_like(x), [], {}
    for i, layer in enumerate(self.layers):
      x, delta, s = layer(
        x, delta, nodes, positions, state.layers[i], state.length
      )
      stash.append(s)
      if i in taps:
        tapped[i] = x + delta
    n = nodes.size
    features = (
      jnp.stack([tapped[i] for i in taps], axis=1)
      if taps
      else jnp.zeros((n, 0, self.config.hidden_size), x.dtype)
    )
    _, hidden = self.norm.after(x, delta, nodes.is_prompt)
    return TargetOutput(hidden=hidden, taps=features, stash=tuple(stash))

  def logits(self, hidden: Float[Array, "N D"]) -> Float[Array, "N V"]:
    """Logits in the accumulation dtype; ids beyond the tokenizer are -inf."""
    head = self.embed if self.config.tie_embeddings else self.lm_head
    out = head.attend(hidden, layers.accumulation_dtype(self.dtype))
    if self.config.valid_vocab < self.config.vocab_size:
      real = jnp.arange(self.config.vocab_size) < self.config.valid_vocab
      out = jnp.where(real, out, -jnp.inf)
    return out


def _make(config: configs.ModelConfig, dtype, kernels: Kernels = REFERENCE):
  return lambda: Target(config, dtype, nnx.Rngs(0), kernels)


def structs(
  config: configs.ModelConfig, dtype
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of every parameter of a target built in `dtype`."""
  return assembly.structs(_make(config, dtype))


def parameter_shapes(config: configs.ModelConfig) -> dict[str, tuple[int, ...]]:
  """Names and shapes of all parameters, in a fixed order."""
  return {
    name: tuple(leaf.shape)
    for name, leaf in structs(config, jnp.float32).items()
  }


def parameters(target: Target) -> dict[str, Any]:
  """The parameters of a built target, by the names of `parameter_shapes`.

  Matrices in FP8 stay `FP8Array`.
  """
  return assembly.parameters(target)


def assemble(
  config: configs.ModelConfig,
  arrays: Mapping[str, assembly.Leaf],
  dtype,
  kernels: Kernels = REFERENCE,
  *,
  narrower: bool = False,
) -> Target:
  """A target around arrays that are on the device already; nothing is copied.

  Args:
    config: the model.
    arrays: as `structs(config, dtype)` says, any matrix in W12 or FP8 where
      that is wanted; not checked for NaN or infinity.
    dtype: of activations and weights.
    kernels: implementations of its operations.
    narrower: whether matrices may be in bfloat16 where `dtype` is wider.

  Raises:
    SpecPilotError: a missing or extra name, a wrong shape or dtype, kernels
      that cannot run here.
  """
  kernels_lib.check(kernels, config, str(jnp.dtype(dtype)))
  return assembly.assemble(
    config.name, _make(config, dtype, kernels), arrays, narrower=narrower
  )


def check_dtype(dtype: str) -> None:
  """Refuses a dtype that no model is built in, or not in this process."""
  if dtype not in configs.DTYPES:
    raise SpecPilotError(
      f"dtype {dtype!r} is not one of {', '.join(configs.DTYPES)}"
    )
  if dtype == "float64" and not jax.config.read("jax_enable_x64"):
    raise SpecPilotError("dtype float64 needs jax_enable_x64=True")


def build(
  config: configs.ModelConfig,
  params: Mapping[str, Any],
  dtype: str,
  kernels: Kernels = REFERENCE,
) -> Target:
  """Builds a target from named arrays.

  Args:
    config: the model.
    params: arrays of any float dtype by the names of `parameter_shapes`; they
      are cast to `dtype`, a_log and dt_bias to at least float32. Matrices may
      be `FP8Array`, whose codes and scales are taken as they are.
    dtype: `bfloat16`, `float32` or `float64` (needs `jax_enable_x64`).
    kernels: implementations of its operations.

  Raises:
    SpecPilotError: a missing or extra name, a wrong shape, a value that is not
      finite, an unknown dtype, kernels that cannot run here.
  """
  check_dtype(dtype)
  kernels_lib.check(kernels, config, dtype)
  wanted = structs(config, jnp.dtype(dtype))
  assembly.check_names(config.name, wanted, params)
  arrays: dict[str, assembly.Leaf] = {}
  for name, leaf in wanted.items():
    if isinstance(params[name], FP8Array):
      arrays[name] = fp8.on_device(
        params[name], f"{config.name}: parameter {name!r}", leaf
      )
      continue
    value = np.asarray(params[name])
    if value.shape != tuple(leaf.shape):
      raise SpecPilotError(
        f"{config.name}: parameter {name!r} has shape {value.shape}, expected"
        f" {tuple(leaf.shape)}"
      )
    arrays[name] = array = jnp.asarray(value).astype(leaf.dtype)
    if not bool(jnp.isfinite(array).all()):
      raise SpecPilotError(
        f"{config.name}: parameter {name!r} holds NaN or infinity"
      )
  return assemble(config, arrays, jnp.dtype(dtype), kernels)


def random_params(
  config: configs.ModelConfig, seed: int, scale: float = 1.0
) -> dict[str, np.ndarray]:
  """Random float32 parameters whose outputs vary with the input.

  Matrices are normal with standard deviation `scale` / sqrt(fan in), the
  embedding with `scale`; norms, decays and biases are spread around the values
  that trained models have.
  """
  rng = np.random.default_rng(seed)

  def draw(name, shape):
    kind = name.rsplit(".", 1)[-1]
    if kind == "a_log":
      return np.log(rng.uniform(0.5, 8.0, shape))
    if kind == "dt_bias":
      return rng.normal(-2.0, 1.0, shape)
    if len(shape) == 1:
      centre = (
        0.0 if config.zero_centered_norm and "mixer.norm" not in name else 1.0
      )
      return centre + rng.normal(0.0, 0.2, shape)
    if name == "embed.weight":
      return rng.normal(0.0, scale, shape)
    return rng.normal(0.0, scale / math.sqrt(shape[-1]), shape)

  return {
    name: draw(name, shape).astype(np.float32)
    for name, shape in parameter_shapes(config).items()
  }
