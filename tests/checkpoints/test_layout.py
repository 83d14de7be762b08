"""The table that maps Hugging Face tensors to fused parameters."""

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized

from specpilot_jax import configs
from specpilot_jax.checkpoints import source
from specpilot_jax.checkpoints.layout import layout, split
from specpilot_jax.models import target
from tests.checkpoints import builders


def joined(fused, tensors):
  """The parameter that is read from these tensors, block by block."""
  dtypes = source.fused_dtypes(
    {"x": fused}, lambda part: tensors[part.name].dtype
  )

  def blocks(part):
    tensor = tensors[part.name]
    for start, end in source.row_blocks(tensor.shape, 1 << 20):
      yield tensor[start:end]

  found = source.fused_blocks(fused, dtypes["x"], blocks)
  return source.assemble(found, fused.shape, dtypes["x"])


class LayoutTest(parameterized.TestCase):
  @parameterized.product(
    family=configs.FAMILIES, tied=(False, True), value_heads=(2, 4, 6)
  )
  def test_shapes_are_those_of_the_model(self, family, tied, value_heads):
    config = builders.config(family, tie_embeddings=tied)
    if family == "qwen3_5":
      config = dataclasses.replace(config, gdn_num_value_heads=value_heads)
    shapes = {name: fused.shape for name, fused in layout(config).items()}
    self.assertEqual(shapes, dict(target.parameter_shapes(config)))

  def test_27b_has_the_published_number_of_tensors(self):
    table = layout(configs.preset("Qwen3.8-27B"))
    self.assertEqual(sum(len(f.parts) for f in table.values()), 851)

  @parameterized.parameters(*configs.FAMILIES)
  def test_reading_undoes_split(self, family):
    config = builders.config(family)
    for name, array in builders.params(config).items():
      fused = layout(config)[name]
      tensors = split(fused, array)
      for part in fused.parts:
        self.assertEqual(tensors[part.name].shape, part.shape)
      np.testing.assert_array_equal(joined(fused, tensors), array)

  def test_mixed_dtypes_join_exactly(self):
    config = builders.config("qwen3_5")
    fused = layout(config)["layers.0.mixer.in_proj.weight"]
    whole = builders.params(config, builders.BFLOAT16)
    whole = whole["layers.0.mixer.in_proj.weight"]
    tensors = split(fused, whole)
    other = fused.parts[2].name
    tensors[other] = tensors[other].astype(np.float32)
    found = joined(fused, tensors)
    self.assertEqual(found.dtype, np.float32)
    np.testing.assert_array_equal(found, whole.astype(np.float32))


if __name__ == "__main__":
  absltest.main()
