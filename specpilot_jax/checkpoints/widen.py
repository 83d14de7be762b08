"""A small hybrid at the shapes of a big one; `widen_drafter` has drafters.

Widening by replication keeps the function. The wide residual stream is `r`
copies of the small one, [copy 0 | copy 1 | ...], and so are heads and MLP
units; a matrix that reads copies is divided by their number, which is exact
in bfloat16 as every number of copies is a power of two. Layers beyond the
small model's have random weights whose outputs are damped below what a
residual stream keeps. Bytes, operations and kernels are those of the wide
shape; tokens and acceptance those of the small, trained model.

Weights are computed where they are used, tensor by tensor from the small
tensor and a counter-based hash: nothing of the wide model crosses from the
host, and no intermediate has the size of a wide tensor. Tensors of one shape
share an executable.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels.dispatch import REFERENCE, Kernels
from specpilot_jax import configs
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import ModelConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import assembly
from specpilot_jax.models import target as target_lib

DAMPING = 2.0**-40
"""On the writers of extra layers: lost in any bfloat16 sum, and yet normal
numbers in an ordinary range of exponents."""


@dataclasses.dataclass(frozen=True)
class Ratios:
  """Copies of each width: wide over small, all powers of two."""

  hidden: int
  mlp: int
  attention: int
  gdn: int = 1
  rank: int = 1


@dataclasses.dataclass(frozen=True)
class Spread:
  """How a wide tensor is made of a small one.

  Attributes:
    rows: small row of each wide row.
    columns: small index of each wide one of the last axis; None keeps what is
      behind the first axis.
    copies: of what its columns read: the divisor.
    writes: whether it writes the residual stream.
    channels: its last axis is that of the residual stream, channel by channel:
      a kernel and no matrix.
    matrix: whether an extra layer draws it at random; all else of an extra
      layer is that of a small one.
  """

  rows: np.ndarray
  columns: np.ndarray | None = None
  copies: int = 1
  writes: bool = False
  channels: bool = False

  @property
  def matrix(self) -> bool:
    return self.columns is not None and not self.channels


def tiled(*blocks: tuple[int, int]) -> np.ndarray:
  """Small index of each wide one: blocks of (small size, copies), in turn.

  Fused tensors are tiled block by block: [q | k] becomes [q q | k k].
  """
  start, parts = 0, []
  for size, copies in blocks:
    parts.append(
      np.tile(np.arange(start, start + size, dtype=np.int32), copies)
    )
    start += size
  return np.concatenate(parts)


def reader(rows: np.ndarray, residual: int, r: Ratios) -> Spread:
  return Spread(rows, tiled((residual, r.hidden)), r.hidden)


def writer(residual: int, columns: int, copies: int, r: Ratios) -> Spread:
  return Spread(
    tiled((residual, r.hidden)), tiled((columns, copies)), copies, writes=True
  )


def unchanged(size: int) -> Spread:
  return Spread(tiled((size, 1)))


def _attention(c: ModelConfig, r: Ratios) -> dict[str, Spread]:
  queries = c.num_heads * c.head_dim
  rows = queries * (2 if c.attention_gate else 1)
  kv = c.num_kv_heads * c.head_dim
  heads = tiled((rows, r.attention), (kv, r.attention), (kv, r.attention))
  table = {
    "qkv.weight": reader(heads, c.hidden_size, r),
    "o_proj.weight": writer(c.hidden_size, queries, r.attention, r),
  }
  if c.qk_norm:
    table |= {f"{name}_norm.weight": unchanged(c.head_dim) for name in "qk"}
  return table


def _gated_delta(c: ModelConfig, r: Ratios) -> dict[str, Spread]:
  keys, values, heads = c.gdn_key_dim, c.gdn_value_dim, c.gdn_num_value_heads
  qkv = ((keys, r.gdn), (keys, r.gdn), (values, r.gdn))
  rest = ((values, r.gdn), (heads, r.gdn), (heads, r.gdn))  # z, b, a
  return {
    "in_proj.weight": reader(tiled(*qkv, *rest), c.hidden_size, r),
    "conv_weight": Spread(tiled(*qkv)),
    "a_log": Spread(tiled((heads, r.gdn))),
    "dt_bias": Spread(tiled((heads, r.gdn))),
    "norm.weight": unchanged(c.gdn_value_head_dim),
    "out_proj.weight": writer(c.hidden_size, values, r.gdn, r),
  }


def around_mixer(hidden: int, units: int, r: Ratios) -> dict[str, Spread]:
  """What every layer has around its mixer."""
  gate_up = tiled((units, r.mlp), (units, r.mlp))
  return {
    "input_norm.weight": Spread(tiled((hidden, r.hidden))),
    "post_norm.weight": Spread(tiled((hidden, r.hidden))),
    "mlp.gate_up.weight": reader(gate_up, hidden, r),
    "mlp.down.weight": writer(hidden, units, r.mlp, r),
  }


def target_layer(c: ModelConfig, kind: str, r: Ratios) -> dict[str, Spread]:
  """Every parameter of a target layer, by its name within the layer."""
  mixer = (_gated_delta if kind == configs.GDN else _attention)(c, r)
  table = {f"mixer.{name}": spread for name, spread in mixer.items()}
  return table | around_mixer(c.hidden_size, c.intermediate_size, r)


def width_ratio(names: str, small, wide, field: str) -> int:
  """Wide over small; refused unless it is a power of two."""
  own, other = getattr(small, field), getattr(wide, field)
  ratio, rest = divmod(other, own)
  if rest or ratio < 1 or ratio & (ratio - 1):
    raise SpecPilotError(
      f"{names}: {field} {own} to {other} is not a power of two times wider"
    )
  return ratio


def check_equal(names: str, small, wide, fields: Sequence[str]) -> None:
  for field in fields:
    own, other = getattr(small, field), getattr(wide, field)
    if own != other:
      raise SpecPilotError(
        f"{names}: {field} is {own} in one and {other} in the other; widening"
        " keeps it"
      )


def group_ratio(names, small, wide, many: str, few: str) -> int:
  """Copies of whole groups: heads `many` that share one of `few`."""
  groups = [getattr(c, many) // getattr(c, few) for c in (small, wide)]
  if groups[0] != groups[1]:
    raise SpecPilotError(
      f"{names}: {many} to {few} is {groups[0]}:1 in one and {groups[1]}:1 in"
      " the other; widening copies whole groups"
    )
  return width_ratio(names, small, wide, few)


def target_ratios(small: ModelConfig, wide: ModelConfig) -> Ratios:
  """Copies of each width.

  Raises:
    SpecPilotError: a shape that is no power-of-two widening of the small one,
      equations that differ, a tied wide model, too small a vocabulary.
  """
  names = f"{small.name} to {wide.name}"
  check_equal(
    names,
    small,
    wide,
    (
      "family", "head_dim", "rotary_dim", "rope_theta", "norm_eps", "qk_norm",
      "attention_gate", "zero_centered_norm",
    ),
  )  # fmt: skip
  if wide.tie_embeddings:
    raise SpecPilotError(
      f"{names}: {wide.name} ties its embeddings; a wide lm_head is divided and"
      " its embedding is not"
    )
  if wide.vocab_size < small.vocab_size:
    raise SpecPilotError(
      f"{names}: the vocabulary of {wide.vocab_size} is smaller than"
      f" {small.vocab_size}"
    )
  gdn = 1
  if configs.GDN in small.layer_types + wide.layer_types:
    fields = ("gdn_key_head_dim", "gdn_value_head_dim", "gdn_conv_kernel")
    check_equal(names, small, wide, fields)
    gdn = group_ratio(
      names, small, wide, "gdn_num_value_heads", "gdn_num_key_heads"
    )
  return Ratios(
    hidden=width_ratio(names, small, wide, "hidden_size"),
    mlp=width_ratio(names, small, wide, "intermediate_size"),
    attention=group_ratio(names, small, wide, "num_heads", "num_kv_heads"),
    gdn=gdn,
  )


def placement(
  small: Sequence[str],
  wide: Sequence[str],
  taps: Sequence[tuple[int, int]] = (),
  names: str = "layers",
) -> tuple[int, ...]:
  """Wide index of each small layer: the first that fits.

  A small layer lies at a wide layer of its own type, in order. A tap after
  small layer s that a drafter reads after wide layer l asks that s lies at or
  before l, and the small layer behind s after l.

  Args:
    small, wide: types of the layers.
    taps: (s, l) for each tap.
    names: for errors.

  Raises:
    SpecPilotError: there is no such placement.
  """
  placed: list[int] = []
  for i, kind in enumerate(small):
    above = max([-1, *placed[-1:], *(l for s, l in taps if s < i)])  # noqa: E741
    at = next((j for j in range(above + 1, len(wide)) if wide[j] == kind), None)
    if at is None:
      raise SpecPilotError(
        f"{names}: no {kind} layer after layer {above} of {len(wide)} is left"
        f" for layer {i}"
      )
    placed.append(at)
  for s, l in taps:  # noqa: E741
    if placed[s] > l:
      raise SpecPilotError(
        f"{names}: a tap after layer {l} cannot see layer {s}, which lies at"
        f" {placed[s]}"
      )
  return tuple(placed)


def _hash(x: Array) -> Array:
  """A bijection of 32-bit integers that mixes all bits ("lowbias32", from
  Chris Wellons's search for integer hashes)."""
  x ^= x >> 16
  x *= np.uint32(0x7FEB352D)
  x ^= x >> 15
  x *= np.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _normal(shape: tuple[int, ...], key: Array) -> Array:
  """Standard normal float32 numbers, each a function of key and index alone.

  Unlike the bits of a generator they need no memory: the compiler computes
  them where they are used. The same on every device, up to rounding.
  """
  index = lax.broadcasted_iota(jnp.uint32, shape, 0) * np.uint32(shape[1])
  index += lax.broadcasted_iota(jnp.uint32, shape, 1)
  bits = _hash(_hash(index ^ key) + key)
  # Odd multiples of 2^-24 in (-1, 1): symmetric, and never an end.
  odd = 2 * (bits >> 8).astype(jnp.int32) + (1 - 2**24)
  uniform = odd.astype(jnp.float32) * np.float32(2.0**-24)
  return np.float32(2.0**0.5) * lax.erf_inv(uniform)


def _deviation(small: Array) -> Array:
  return jnp.sqrt(jnp.mean(jnp.square(small.astype(jnp.float32))))


@functools.partial(jax.jit, static_argnames="dtype")
def _copied(small, rows, columns, scale, *, dtype):
  """Rows and columns of `small`, times a power of two."""
  if columns is not None:
    small = jnp.take(small, columns, axis=-1, mode="clip")
  small = small.astype(dtype) * scale.astype(dtype)
  return jnp.take(small, rows, axis=0, mode="clip")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _drawn(small, scale, key, *, shape, dtype):
  """Normal numbers with the deviation of `small` times `scale`."""
  return (_normal(shape, key) * (_deviation(small) * scale)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def _vocabulary(small, columns, scale, key, *, size, dtype):
  """The rows of `small`, then random ones, `size` in all."""
  wide = jnp.take(small, columns, axis=1, mode="clip")
  wide = wide.astype(dtype) * scale.astype(dtype)
  real = small.shape[0]
  row = jnp.arange(size, dtype=jnp.int32)
  drawn = _normal((size, columns.shape[0]), key) * (_deviation(small) * scale)
  return jnp.where(
    (row < real)[:, None],
    jnp.take(wide, jnp.minimum(row, real - 1), axis=0, mode="clip"),
    drawn.astype(dtype),
  )


Hold = Callable[[str, Array], assembly.Leaf]
"""Name and tensor to what the model is to hold of it."""


def as_it_is(name: str, tensor: Array) -> assembly.Leaf:
  """Holds the tensor itself."""
  del name
  return tensor


@dataclasses.dataclass(frozen=True)
class Maker:
  """Makes tensors of one wide model."""

  small: Mapping[str, Array]
  structs: Mapping[str, jax.ShapeDtypeStruct]
  seed: int

  def _key(self, name: str) -> np.uint32:
    return np.uint32(zlib.crc32(f"{self.seed} {name}".encode()))

  def copy(self, name: str, source: str, spread: Spread) -> Array:
    return _copied(
      self.small[source],
      spread.rows,
      spread.columns,
      np.float32(1 / spread.copies),
      dtype=self.structs[name].dtype,
    )

  def draw(self, name: str, source: str, spread: Spread) -> Array:
    """Random, with activations of the small layer's size behind it."""
    scale = spread.copies**-0.5 * (DAMPING if spread.writes else 1)
    struct = self.structs[name]
    return _drawn(
      self.small[source],
      np.float32(scale),
      self._key(name),
      shape=struct.shape,
      dtype=struct.dtype,
    )

  def vocabulary(
    self, name: str, source: str, columns: np.ndarray, scale: float
  ) -> Array:
    struct = self.structs[name]
    return _vocabulary(
      self.small[source],
      columns,
      np.float32(scale),
      self._key(name),
      size=struct.shape[0],
      dtype=struct.dtype,
    )

  def layers(
    self, kinds: Sequence[str], placed: Sequence[int], tables
  ) -> Iterator[tuple[str, Array]]:
    """Every layer of the wide model.

    Args:
      kinds: type of each wide layer.
      placed: wide index of each small layer.
      tables: type to its parameters.
    """
    origin = {wide: small for small, wide in enumerate(placed)}
    model: dict[str, int] = {}  # a small layer of each type
    for wide, small in origin.items():
      model.setdefault(kinds[wide], small)
    for i, kind in enumerate(kinds):
      for suffix, spread in tables[kind].items():
        name = f"layers.{i}.{suffix}"
        if i in origin or not spread.matrix:
          source = f"layers.{origin.get(i, model[kind])}.{suffix}"
          yield name, self.copy(name, source, spread)
        else:
          source = f"layers.{model[kind]}.{suffix}"
          yield name, self.draw(name, source, spread)


def held(
  tensors: Iterable[tuple[str, Array]], hold: Hold
) -> dict[str, assembly.Leaf]:
  return {name: hold(name, tensor) for name, tensor in tensors}


def widened_target_config(small: ModelConfig, wide: ModelConfig) -> ModelConfig:
  """The wide shape with what belongs to the text: tokens and context."""
  return dataclasses.replace(
    wide,
    name=f"widened:{wide.name}",
    tokenizer_size=small.valid_vocab,
    context_length=small.context_length,
    bos_token_id=small.bos_token_id,
    eos_token_ids=small.eos_token_ids,
  )


def widen_target(
  small: ModelConfig,
  params: Mapping[str, np.ndarray | Array],
  wide: ModelConfig,
  seed: int = 0,
  *,
  taps: Sequence[tuple[int, int]] = (),
  dtype: str = "bfloat16",
  kernels: Kernels = REFERENCE,
  hold: Hold = as_it_is,
) -> target_lib.Target:
  """The function of a small target at the shape of a wide one.

  Args:
    small, params: the small target, as `target.build` takes it.
    wide: the shape, which may have more layers and a larger vocabulary. Its
      token ids and context length give way to the small target's.
    seed: of the weights that are random: extra layers, and rows beyond the
      small vocabulary, which are masked.
    taps: (small layer, wide layer) of each tap of a drafter that is to be
      widened too.
    dtype: of the result.
    kernels: implementations of its operations.
    hold: called with each tensor as soon as it is made, so that no two forms
      of the whole model are held at once.

  Raises:
    SpecPilotError: see `target_ratios` and `placement`; kernels that cannot
      run here.
  """
  target_lib.check_dtype(dtype)
  kernels_lib.check(kernels, wide, dtype)
  ratios = target_ratios(small, wide)
  names = f"{small.name} to {wide.name}"
  placed = placement(small.layer_types, wide.layer_types, taps, names)
  for kind in set(wide.layer_types) - set(small.layer_types):
    raise SpecPilotError(
      f"{names}: {small.name} has no {kind} layer that an extra one could be"
      " like"
    )
  config = widened_target_config(small, wide)
  maker = Maker(
    {name: jnp.asarray(value) for name, value in params.items()},
    target_lib.structs(config, jnp.dtype(dtype)),
    seed,
  )
  kinds = sorted(set(wide.layer_types))
  tables = {kind: target_layer(small, kind, ratios) for kind in kinds}
  residual = tiled((small.hidden_size, ratios.hidden))
  head = "embed.weight" if small.tie_embeddings else "lm_head.weight"

  def ends() -> Iterator[tuple[str, Array]]:
    name = "norm.weight"
    yield name, maker.copy(name, name, Spread(residual))
    name = "embed.weight"
    yield name, maker.vocabulary(name, name, residual, 1)
    name = "lm_head.weight"
    yield name, maker.vocabulary(name, head, residual, 1 / ratios.hidden)

  layers = maker.layers(wide.layer_types, placed, tables)
  arrays = held(itertools.chain(layers, ends()), hold)
  return target_lib.assemble(config, arrays, jnp.dtype(dtype), kernels)
