"""Checkpoints in FP8, as they are released: what loads, what is refused."""

import copy
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from pallas_kernels import fp8_array
from pallas_kernels.fp8_array import FP8Array
from specpilot_jax import loading
from specpilot_jax.checkpoints import (
  conversion,
  fp8,
  hf,
  load_checkpoint,
  orbax,
)
from specpilot_jax.checkpoints.layout import layout
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import fp8 as mechanism
from tests.checkpoints import builders

E4M3 = ml_dtypes.float8_e4m3fn
FINE = {
  "activation_scheme": "dynamic",
  "fmt": "e4m3",
  "modules_to_not_convert": [
    "lm_head",
    "model.layers.0.linear_attn.in_proj_a",
    "model.layers.0.linear_attn.in_proj_b",
  ],
  "quant_method": "fp8",
  "weight_block_size": [128, 128],
}
_ARGUMENTS: dict[str, Any] = {
  "actorder": None,
  "block_structure": None,
  "group_size": None,
  "num_bits": 8,
  "observer": None,
  "observer_kwargs": {},
  "symmetric": True,
  "type": "float",
}
CHANNEL: dict[str, Any] = {
  "config_groups": {
    "group_0": {
      "input_activations": _ARGUMENTS | {"dynamic": True, "strategy": "token"},
      "output_activations": None,
      "targets": ["Linear"],
      "weights": _ARGUMENTS | {"dynamic": False, "strategy": "channel"},
    }
  },
  "format": "float-quantized",
  "global_compression_ratio": None,
  "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
  "kv_cache_scheme": None,
  "quant_method": "compressed-tensors",
  "quantization_status": "compressed",
}
_quantize = jax.jit(fp8_array.quantize, static_argnums=1)


@functools.cache
def model(aligned: bool):
  """A model whose fused tensors end on the edges of blocks, or amid them."""
  wide = dict(num_heads=8, num_kv_heads=8, head_dim=16, rotary_dim=8)
  config = builders.config(
    "qwen3_5",
    name="model",
    hidden_size=160,
    intermediate_size=256 if aligned else 72,
    **(wide if aligned else {}),
  )
  return config, builders.params(config, builders.BFLOAT16)


@functools.cache
def released(aligned: bool, channel: bool):
  """Tensors by name, as a release has them."""
  config, params = model(aligned)
  tensors = {}
  for name, fused in layout(config).items():
    start = 0
    for part in fused.parts:
      rows = params[name][start : start + part.shape[0]]
      start += part.shape[0]
      tensors[part.name] = np.ascontiguousarray(rows.reshape(part.shape))
      if fp8.converted(part):
        size = (1, part.shape[1]) if channel else fp8.BLOCKS
        codes, scale = map(np.asarray, _quantize(rows, size))
        suffix = "weight_scale" if channel else "weight_scale_inv"
        tensors[part.name] = codes
        tensors[part.name.removesuffix("weight") + suffix] = scale
  return tensors


class LoadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name) / "model"

  def write(self, *, aligned=True, channel=False, change=None, **fields):
    config, params = model(aligned)
    hf.save(self.folder, config, params)
    tensors = {k: v.copy() for k, v in released(aligned, channel).items()}
    if change is not None:
      change(tensors)
    safetensors.numpy.save_file(tensors, self.folder / hf.WEIGHTS)
    path = self.folder / hf.CONFIG
    quantization = copy.deepcopy(CHANNEL if channel else FINE) | fields
    text = json.loads(path.read_text()) | {fp8.FIELD: quantization}
    path.write_text(json.dumps(text))

  def refused(self, pattern, call=None):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      (call or (lambda: hf.load(self.folder)))()
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.product(aligned=(True, False), channel=(False, True))
  def test_as_quantized_here(self, aligned, channel):
    """The same codes, scales and blocks as a bfloat16 model is given."""
    self.write(aligned=aligned, channel=channel)
    loaded = load_checkpoint(self.folder)
    config, params = model(aligned)
    self.assertEqual(loaded.config, config)
    hold = mechanism.hold(config, None if channel else fp8.BLOCKS)
    kinds = set()
    for name, value in params.items():
      wanted: Any = hold(name, jnp.asarray(value))
      found = loaded.params[name]
      self.assertIs(
        isinstance(found, FP8Array), isinstance(wanted, FP8Array), name
      )
      if not isinstance(found, FP8Array):
        np.testing.assert_array_equal(found, value)
        continue
      self.assertEqual(found.block, wanted.block)
      kinds.add(found.block[0])
      for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
      ):
        self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
        bits = np.dtype(f"u{a.dtype.itemsize}")
        np.testing.assert_array_equal(
          np.asarray(a).view(bits), np.asarray(b).view(bits)
        )
    self.assertEqual(kinds, {1} if channel else {1, 128})
    # b and a of Gated DeltaNet.
    in_proj = loaded.params["layers.0.mixer.in_proj.weight"]
    self.assertEqual(in_proj.rest.shape, (12, 160))

  def test_target(self):
    self.write()
    source = loading.open_target(self.folder)
    target = source.build("float32").target
    self.assertEqual(target.weights, "fp8")
    self.assertEqual(source.build("float32", weights="fp8").notes, ())
    self.refused(
      "is in FP8, weights=w12 cannot be made of it",
      lambda: source.build("float32", weights="w12"),
    )
    self.refused(
      "is in FP8 already", lambda: loading.open_target(f"fp8:{self.folder}")
    )
    checkpoint = source.checkpoint
    out = self.folder.parent / "out"
    for save in (
      lambda: hf.save(out, checkpoint.config, checkpoint.params),
      lambda: orbax.save(out, checkpoint),
    ):
      self.refused("is in FP8, which is not written", save)
    for kind in conversion.FORMATS:
      self.refused(
        f"in FP8; {kind} would make another model",
        lambda kind=kind: conversion.convert(self.folder, out, kind),
      )

  def test_scales_of_other_types(self):
    """Qwen's are bfloat16, and some per-channel ones have one axis."""
    name = "model.layers.0.mlp.down_proj.weight_scale"
    scale = {}

    def narrow(tensors):
      scale[name] = tensors[name][:, 0].astype(builders.BFLOAT16)
      tensors |= scale

    self.write(channel=True, change=narrow)
    found = load_checkpoint(self.folder).params["layers.0.mlp.down.weight"]
    self.assertEqual(found.scale.dtype, np.float32)
    np.testing.assert_array_equal(
      found.scale[:, 0], scale[name].astype(np.float32)
    )

  _UP = "model.layers.1.mlp.up_proj.weight"

  @parameterized.named_parameters(
    ("nan", lambda s: s.__setitem__((1, 1), np.nan), "1 scales that are NaN"),
    ("inf", lambda s: s.__setitem__(0, np.inf), "2 scales that are NaN or inf"),
    ("zero", lambda s: s.__setitem__((0, 0), 0), "1 scales that are not above"),
    ("sign", lambda s: s.__setitem__((0, 0), -1), "1 scales that are not"),
  )  # fmt: skip
  def test_bad_scales(self, change, pattern):
    self.write(change=lambda t: change(t[f"{self._UP}_scale_inv"]))
    self.refused(f"'{self._UP}' has {pattern}")

  @parameterized.named_parameters(
    ("shape", lambda t, n: t.update({f"{n}_scale_inv": np.ones(
      (1, 2), np.float32)}), r"weight_scale_inv' has shape \[1, 2\], expected"
     r" \[2, 2\]"),
    ("missing", lambda t, n: t.pop(f"{n}_scale_inv"),
     "has no weight_scale_inv"),
    ("integers", lambda t, n: t.update({f"{n}_scale_inv": np.ones(
      (2, 2), np.int32)}), "weight_scale_inv' has dtype I32, supported are"),
    ("per_channel", lambda t, n: t.update({f"{n}_scale": np.ones(
      (256, 1), np.float32)}), "unknown tensor .*weight_scale'"),
    ("e5m2", lambda t, n: t.update({n: t[n].astype(
      ml_dtypes.float8_e5m2)}), "has dtype F8_E5M2, supported are .*F8_E4M3"),
    ("nan", lambda t, n: t[n].__setitem__((3, 4), np.nan),
     "has 1 codes that are NaN"),
    ("not_codes", lambda t, n: t.update({n: t[n].astype(
      builders.BFLOAT16)}), "scales .*which is not F8_E4M3"),
    ("head", lambda t, n: t.update({"lm_head.weight": t[
      "lm_head.weight"].astype(E4M3)}), "'lm_head.weight' has dtype F8_E4M3"),
    ("left", lambda t, n: t.update({
      "model.layers.0.linear_attn.in_proj_a.weight": np.ones((6, 160), E4M3),
      "model.layers.0.linear_attn.in_proj_a.weight_scale_inv": np.ones(
        (1, 2), np.float32)}), "is F8_E4M3, config.json says .* not converted"),
    ("order", lambda t, n: (
      t.update({n.replace("up", "gate"): np.ones((256, 160), np.float32)}),
      t.pop(n.replace("up", "gate") + "_scale_inv")), "fused in this order"),
  )  # fmt: skip
  def test_bad_tensors(self, change, pattern):
    self.write(change=lambda t: change(t, self._UP))
    self.refused(pattern)

  def test_no_codes(self):
    self.write()
    config, params = model(True)
    saved = self.folder.parent / "plain"
    hf.save(saved, config, params)
    (self.folder / hf.WEIGHTS).write_bytes((saved / hf.WEIGHTS).read_bytes())
    self.refused("has a quantization_config, but no tensor is F8_E4M3")
    (saved / hf.WEIGHTS).unlink()
    safetensors.numpy.save_file(released(True, False), saved / hf.WEIGHTS)
    self.refused("unknown tensor .*_scale_inv", lambda: hf.load(saved))

  @parameterized.parameters(
    ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
    ({"weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\]"),
    ({"weight_block_size": None}, "weight_block_size=None is not supported"),
    ({"activation_scheme": "static"}, "activation_scheme='static'"),
    ({"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    ({"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not supported"),
    ({"modules_to_not_convert": "lm_head"}, "is not a list of names"),
    ({"modules_to_not_convert": ["re:("]}, "'re:\\('"),
    ({"new": 1}, "quantization_config.new is not a known field"),
  )
  def test_bad_fields(self, changes, pattern):
    self.refused(pattern, lambda: fp8.parse(FINE | changes, "m"))

  @parameterized.parameters(
    (("weights", "strategy"), "tensor", "weights.strategy='tensor'"),
    (("weights", "num_bits"), 4, "weights.num_bits=4"),
    (("weights", "dynamic"), True, "weights.dynamic=True"),
    (("input_activations", "dynamic"), False, "activations.dynamic=False"),
    (("input_activations", "strategy"), "tensor", "strategy='tensor'"),
    (("output_activations",), {}, "output_activations={}"),
    (("targets",), ["Conv1d"], r"targets=\['Conv1d'\]"),
    (("input_activations",), None, "input_activations is not a mapping"),
  )
  def test_bad_groups(self, path, value, pattern):
    fields = copy.deepcopy(CHANNEL)
    place = fields["config_groups"]["group_0"]
    for key in path[:-1]:
      place = place[key]
    place[path[-1]] = value
    self.refused(pattern, lambda: fp8.parse(fields, "m"))

  def test_compressed_blocks(self):
    fields = copy.deepcopy(CHANNEL)
    group = fields["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    group["input_activations"] |= {"strategy": "group", "group_size": 128}
    found = fp8.parse(fields, "m")
    self.assertEqual((found.block, found.suffix), (fp8.BLOCKS, "weight_scale"))
    self.assertTrue(found.leaves("model.layers.3.linear_attn.in_proj_b"))
    self.assertTrue(found.leaves("lm_head"))
    self.assertFalse(found.leaves("model.layers.3.linear_attn.in_proj_qkv"))


if __name__ == "__main__":
  absltest.main()
