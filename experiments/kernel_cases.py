"""The kernels as they ship, at a model's shapes: what is timed, and how.

Products with W12 beside the best of XLA's bfloat16 forms, with weights in six
buffers that take turns; the kernels of a tree over layers that have their own
states, keys and values. Times are unions of kernel intervals of the JAX
profiler and hold all that an operation launches; those of kernels that write a
state where it lies (all of Gated DeltaNet but gdn_verify) also the copy that
keeps it for the next run, which no model makes. Errors are those against a
product in float32 (W12) or the reference in float32, of its largest value.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import devices, tile_timing
from experiments.console import say, table
from experiments.tile_timing import Case, Shape
from pallas_kernels import (
  fp8_array,
  fp8_hopper,
  fp8_matmul,
  fp8_tiles,
  gdn_commit,
  gdn_decode,
  gdn_prefill,
  gdn_verify,
  tree_attention,
  w12_array,
)
from pallas_kernels.fp8_array import FP8Array
from specpilot_jax.checkpoints import w12_device
from specpilot_jax.configs import ModelConfig
from specpilot_jax.models import layers
from specpilot_jax.models import target as target_lib

RUNS = (128, 512)
"""Tokens of a run of prompt."""
LAYERS = 24
"""States that take turns: 75 MB of them at 48 heads of 128 by 128."""
KEYS_BYTES = 100 << 20
"""Of keys and values that take turns, at least: twice an H200's L2 cache."""


def products(
  shape: Shape,
  count: int,
  row_counts: Sequence[int],
  view_rows: Sequence[int],
  implementations: Sequence[str],
) -> list[dict[str, Any]]:
  """Times of a matrix shape, by implementation and rows.

  Args:
    count: products of this shape in a pass.

  Returns:
    What `tile_timing.summary` takes, with `implementation` and `error`.
  """
  keys = jax.random.split(jax.random.key(0), tile_timing.BUFFERS)
  matrices = [tile_timing.weights(key, shape) for key in keys]
  packed = [w12_device.encode_on_device(w) for w in matrices]
  found = []
  for n in sorted({*row_counts, *view_rows}):
    xs = [jax.random.normal(key, (n, shape[1]), jnp.bfloat16) for key in keys]
    cases = tile_timing.xla_cases(n, xs, matrices)
    for implementation in implementations:
      for view in (False, True):
        if n in (view_rows if view else row_counts):
          cases.append(
            tile_timing.shipped_case(
              xs, packed, view=view, implementation=implementation
            )
          )
    cases = tile_timing.compiled(cases)
    times = tile_timing.kernel_us(cases)
    xla = tile_timing.best(
      [c for c in cases if c.kind == "xla"],
      [us for c, us in zip(cases, times, strict=True) if c.kind == "xla"],
    )
    for case, us in zip(cases, times, strict=True):
      if case.kind == "xla":
        continue
      one = {"shape": shape, "count": count, "rows": n, **xla}
      one[case.kind] = {"us": us, "label": case.label, "tile": None}
      one["implementation"] = case.label.split()[-1]
      one["error"] = _product_error(
        case.run(*case.arguments)[0], xs[0], packed[0], case.kind == "view"
      )
      found.append(one)
      say(
        f"{shape[0]} x {shape[1]}, {n} rows: {us:8.2f} us  {case.label},"
        f" {xla['xla']['us'] / us:.3f} of XLA, error {one['error']:.1e}"
      )
  return found


@functools.partial(jax.jit, static_argnums=3)
def _product_error_of(y, x, w, view):
  dense = w12_array.decode_view(w) if view else w12_array.decode(w)
  exact = jnp.einsum(
    "ni,oi->no",
    x.astype(jnp.float32),
    dense.astype(jnp.float32),
    precision=lax.Precision.HIGHEST,
  )
  return jnp.abs(y.astype(jnp.float32) - exact).max() / jnp.abs(exact).max()


def _product_error(y, x, w, view) -> float:
  return float(_product_error_of(y, x, w, view))


def summary(found: Sequence[dict[str, Any]]) -> str:
  """A table of shapes, and means over them weighted by bytes."""
  lines = []
  for implementation in dict.fromkeys(one["implementation"] for one in found):
    own = [one for one in found if one["implementation"] == implementation]
    lines += [f"w12_matmul={implementation}", tile_timing.summary(own)]
    for kind in ("w12", "view"):
      for n in sorted({one["rows"] for one in own}):
        some = [one for one in own if kind in one and one["rows"] == n]
        if some:
          # Every product of a pass weighs as many bytes as its matrix.
          sizes = [one["count"] * np.prod(one["shape"]) for one in some]
          ratios = [one["xla"]["us"] / one[kind]["us"] for one in some]
          mean = np.average(ratios, weights=sizes)
          lines.append(f"{kind}, {n} rows: {mean:.3f} weighted by bytes")
  return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Operation:
  """A kernel of a tree to time.

  Attributes:
    name: with its sizes.
    call: of one layer's arguments and an implementation's name.
    layers: arguments by layer.
    implementation: of the kernel.
    nbytes: that a layer has to move.
    flops: of a layer's products in bfloat16.
  """

  name: str
  call: Callable[..., Any]
  layers: Sequence[tuple[Any, ...]]
  implementation: str
  nbytes: int
  flops: int = 0

  def case(self, implementation: str | None = None) -> Case:
    """All layers in one executable."""
    implementation = implementation or self.implementation
    call = functools.partial(self.call, implementation=implementation)
    return Case(
      f"{self.name} {implementation}",
      jax.jit(lambda layers: [call(*layer) for layer in layers]),
      (self.layers,),
      kind="tree",
      launches=len(self.layers),
    )


def _normal(key, shape, dtype=jnp.float32, scale=1.0):
  return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def chain_and_bush(nodes: int) -> np.ndarray:
  """mask[i, j]: j is i or an ancestor of i. A chain of up to 16, with the rest
  in chains of up to eight beside it."""
  mask = np.eye(nodes, dtype=bool)
  for i in range(1, nodes):
    start = i >= 16 and (i - 16) % 8 == 0
    parent = (i - 16) // 8 if start else i - 1
    mask[i] |= mask[parent]
  return mask


def _layer(config: ModelConfig, seed, n: int) -> tuple[jax.Array, ...]:
  """What the Gated DeltaNet kernels of a layer take, for n tokens."""
  heads, key_heads = config.gdn_num_value_heads, config.gdn_num_key_heads
  key, value = config.gdn_key_head_dim, config.gdn_value_head_dim
  channels = 2 * key_heads * key + heads * value
  projected = channels + heads * value + 2 * heads
  k = jax.random.split(jax.random.key(seed), 6)
  return (
    _normal(k[0], (n, channels)),
    _normal(k[1], (n, projected), jnp.bfloat16),
    _normal(k[2], (heads,)) - 3,
    _normal(k[3], (heads,)),
    _normal(k[4], (heads, key, value), scale=0.1),
  )


def recurrent(
  config: ModelConfig, counts: Sequence[int]
) -> Iterator[Operation]:
  """The Gated DeltaNet kernels of a layer."""
  heads, key_heads = config.gdn_num_value_heads, config.gdn_num_key_heads
  key, value = config.gdn_key_head_dim, config.gdn_value_head_dim
  channels = 2 * key_heads * key + heads * value
  state_bytes = 4 * heads * key * value
  layer = functools.partial(_layer, config)

  def token(seed):
    mixed, projected, a_log, dt_bias, state = layer(seed, 8)
    conv, taps = mixed[:3], mixed[3:7].T
    narrow = [x.astype(jnp.bfloat16) for x in (conv, taps)]
    return projected[0], *narrow, a_log, dt_bias, state, jnp.bool_(True)

  yield Operation(
    "gdn_decode",
    functools.partial(gdn_decode.decode, key_heads=key_heads),
    [token(i) for i in range(LAYERS)],
    "triton",
    2 * state_bytes,
  )
  for n in RUNS:
    layers = [(*layer(i, n), jnp.int32(n)) for i in range(LAYERS)]
    for implementation in ("triton", "reference"):
      yield Operation(
        f"gdn_prefill {n} tokens",
        functools.partial(gdn_prefill.prefill, key_heads=key_heads),
        layers,
        implementation,
        2 * state_bytes + 4 * n * (channels + heads * value),
      )
  for n in counts:
    mask = jnp.asarray(chain_and_bush(n))
    layers = [(*layer(i, n), mask) for i in range(LAYERS)]
    yield Operation(
      f"gdn_verify {n} nodes",
      functools.partial(gdn_verify.verify, key_heads=key_heads),
      layers,
      "triton",
      state_bytes,
    )
    stash = jax.jit(
      lambda layers: [
        gdn_verify.verify(*layer, key_heads=key_heads)[1:] for layer in layers
      ]
    )(layers)
    path = jnp.arange(min(n, 16), dtype=jnp.int32)
    yield Operation(
      f"gdn_commit {n} nodes",
      gdn_commit.commit,
      [
        (layer[4], *kept, path, jnp.int32(path.size))
        for layer, kept in zip(layers, stash, strict=True)
      ],
      "triton",
      2 * state_bytes,
    )


def fp8_shapes(config: ModelConfig) -> list[Shape]:
  """Matrices of codes of a target: not its head, nor what makes gates."""
  shapes = set()
  for name, x in target_lib.structs(config, jnp.bfloat16).items():
    parts = name.split(".")
    if not layers.is_matrix(name, x.shape) or parts[0] in ("embed", "lm_head"):
      continue
    rows, columns = x.shape
    gates = 2 * config.gdn_num_value_heads if "in_proj" in parts else 0
    shapes.add((rows - gates, columns))
  return sorted(shapes)


def fp8_tile(text: str) -> tuple[Shape, int, fp8_tiles.Tile]:
  """`34816x5120:64:88x64x2`: a matrix, rows of x, numbers of a tile."""
  shape, n, tile = text.split(":")
  rows, columns = map(int, shape.split("x"))
  chosen = fp8_tiles.Tile(*map(int, tile.split("x")))
  return (rows, columns), int(n), chosen


def fp8(
  shape: Shape,
  row_counts: Sequence[int],
  tiles: Sequence[tuple[int, fp8_tiles.Tile]] = (),
) -> Iterator[Operation]:
  """Products with a matrix in FP8 of blocks; floors are at FP8's peak.

  Args:
    tiles: of the Hopper kernel, to be timed beside those that it plans; with
      so many rows of x.
  """
  rows, columns = shape
  block = (fp8_array.BLOCK, fp8_array.BLOCK)
  scales = fp8_array.scale_shape(rows, columns, block)
  matrices = [
    FP8Array(
      _normal(key, shape).astype(fp8_array.E4M3),
      jnp.full(scales, columns**-0.5, jnp.float32),
      jnp.zeros((0, columns), jnp.bfloat16),
      block,
    )
    for key in jax.random.split(jax.random.key(0), tile_timing.BUFFERS)
  ]

  def tiled(x, w, implementation, tile):
    if implementation == "mosaic":
      return fp8_hopper.matmul(x, w, x.dtype, tile=tile)
    return fp8_matmul.matmul(x, w, implementation=implementation)

  def activations(n):
    return _normal(jax.random.key(n), (n, columns), jnp.bfloat16)

  for n, tile in tiles:
    x = activations(n)
    yield Operation(
      f"fp8_matmul {rows}x{columns}, {n} rows, {tile}",
      functools.partial(tiled, tile=tile),
      [(x, w) for w in matrices],
      "mosaic",
      rows * columns,
      rows * columns * n,
    )
  for n in row_counts:
    x = activations(n)
    for implementation in ("triton", "mosaic"):
      yield Operation(
        f"fp8_matmul {rows}x{columns}, {n} rows",
        fp8_matmul.matmul,
        [(x, w) for w in matrices],
        implementation,
        rows * columns,
        rows * columns * n,  # two each, at twice the peak of bfloat16
      )


def of_requests(
  config: ModelConfig, requests: int, counts: Sequence[int]
) -> Iterator[Operation]:
  """The kernels of a tree's states for several requests, as a batch maps them,
  with the tiles that they ship with and others; by places for nodes of each,
  of which it has as many as its number."""
  heads, key_heads = config.gdn_num_value_heads, config.gdn_num_key_heads
  state_bytes = 4 * heads * config.gdn_key_head_dim * config.gdn_value_head_dim
  verify = functools.partial(gdn_verify.verify, key_heads=key_heads)

  def operation(name, function, layers, tile, nbytes):
    def call(*arguments, implementation):
      own = functools.partial(
        function, implementation=implementation, tile=tile
      )
      return jax.vmap(own)(*arguments)

    cut = f"{tile.columns} columns {tile.num_warps} warps"
    name = f"{name} of {requests} requests, {cut}"
    return Operation(name, call, layers, "triton", requests * nbytes)

  def layers_of(nodes):
    mask = jnp.asarray(chain_and_bush(nodes))
    return [
      jax.vmap(
        lambda seed: (*_layer(config, seed, nodes), mask, seed % nodes + 1)
      )(jnp.arange(i * requests, (i + 1) * requests))
      for i in range(LAYERS)
    ]

  layers = []
  for nodes in counts:
    layers = layers_of(nodes)
    shipped = gdn_verify.tile_for(nodes, 1, requests)
    for columns, warps in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)):
      tile = dataclasses.replace(shipped, columns=columns, num_warps=warps)
      name = f"gdn_verify {nodes} nodes"
      yield operation(name, verify, layers, tile, state_bytes)
  stash = jax.jit(
    lambda layers: [jax.vmap(verify)(*layer)[1:] for layer in layers]
  )(layers)
  longest = min(counts[-1], 16)
  path = jnp.tile(jnp.arange(longest, dtype=jnp.int32), (requests, 1))
  count = jnp.arange(requests, dtype=jnp.int32) % longest + 1
  layers = [
    (layer[4], *kept, path, count)
    for layer, kept in zip(layers, stash, strict=True)
  ]
  for columns, warps in (
    (16, 4),
    (32, 4),
    (64, 4),
    (64, 8),
    (128, 4),
    (128, 8),
  ):
    tile = gdn_commit.Tile(columns, warps)
    yield operation(
      "gdn_commit", gdn_commit.commit, layers, tile, 2 * state_bytes
    )


def prompt_attention(config: ModelConfig) -> Iterator[Operation]:
  """Attention of a run of prompt behind as many tokens, beside plain JAX."""
  heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
  for n in RUNS:
    room = (kv_heads, 2 * n + 256, dim)
    layers = []
    for i in range(LAYERS):
      k = jax.random.split(jax.random.key(i), 5)
      layers.append(
        (
          *(_normal(k[j], (n, x, dim), jnp.bfloat16)
            for j, x in enumerate((heads, kv_heads, kv_heads))),
          *(_normal(x, room, jnp.bfloat16) for x in k[3:]),
          jnp.int32(n),
          None,
        )
      )  # fmt: skip
    for implementation in ("triton", "reference"):
      yield Operation(
        f"prompt_attention {n} tokens behind {n}",
        functools.partial(tree_attention.tree_attention, scale=dim**-0.5),
        layers,
        implementation,
        2 * dim * (2 * n * heads + 4 * n * kv_heads),
        4 * heads * dim * n * (n + n // 2),
      )


def attention(
  config: ModelConfig,
  counts: Sequence[int],
  prefixes: Sequence[int],
  implementations: Sequence[str],
) -> Iterator[Operation]:
  """Attention of a tree, by prefix, nodes and implementation."""
  heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
  for prefix in prefixes:
    nbytes = 2 * 2 * kv_heads * prefix * dim
    copies = max(4, -(-KEYS_BYTES // nbytes))
    capacity = prefix + 256
    room = (kv_heads, capacity, dim)
    prefixes_of = [
      tuple(
        _normal(k, room, jnp.bfloat16)
        for k in jax.random.split(jax.random.key(i))
      )
      for i in range(copies)
    ]
    for n in counts:
      mask = jnp.asarray(chain_and_bush(n))
      layers = []
      for i, (k_prefix, v_prefix) in enumerate(prefixes_of):
        k = jax.random.split(jax.random.key(1000 + i), 3)
        layers.append(
          (
            _normal(k[0], (n, heads, dim), jnp.bfloat16),
            _normal(k[1], (n, kv_heads, dim), jnp.bfloat16),
            _normal(k[2], (n, kv_heads, dim), jnp.bfloat16),
            k_prefix,
            v_prefix,
            jnp.int32(prefix),
            mask,
          )
        )
      for implementation in implementations:
        yield Operation(
          f"tree_attention {n} nodes at {prefix}",
          functools.partial(tree_attention.tree_attention, scale=dim**-0.5),
          layers,
          implementation,
          nbytes,
          4 * heads * dim * n * prefix,
        )


def _error(found, expected) -> float:
  """The largest over all outputs, of each one's largest value."""
  errors = []
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    errors.append(np.abs(a - b).max() / np.abs(b).max())
  return float(max(errors))


def time_operations(
  operations: Iterator[Operation], device: devices.Device
) -> list[dict[str, Any]]:
  """Times and errors; a kernel that does not compile is named and left out."""
  found = []
  for operation in operations:
    cases = tile_timing.compiled([operation.case()])
    if not cases:
      continue
    us = tile_timing.kernel_us(cases)[0]
    result = cases[0].run(*cases[0].arguments)[0]
    wide = jax.tree.map(
      lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x,
      operation.layers[0],
    )
    by_definition = functools.partial(
      operation.call, implementation="reference"
    )
    error = _error(result, jax.jit(by_definition)(*wide))
    one = {
      "operation": operation.name,
      "implementation": operation.implementation,
      "us": us,
      "bytes_us": 1e6 * operation.nbytes / device.bandwidth,
      "flops_us": 1e6 * operation.flops / device.peak("bfloat16"),
      "error": error,
    }
    found.append(one)
    say(
      f"{operation.name} {operation.implementation}: {us:.2f} us, by bytes"
      f" {one['bytes_us']:.2f}, by FLOPs {one['flops_us']:.2f}, error"
      f" {error:.1e}"
    )
  return found


def operations_table(found: Sequence[dict[str, Any]]) -> str:
  """Times beside floors."""
  rows = [
    (
      one["operation"],
      one["implementation"],
      f"{one['us']:.2f}",
      f"{one['bytes_us']:.2f}",
      f"{one['flops_us']:.2f}",
      f"{one['error']:.1e}",
    )
    for one in found
  ]
  header = ("operation", "kernel", "us", "by bytes", "by FLOPs", "error")
  return table(header, rows)
