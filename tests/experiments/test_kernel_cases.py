"""What is timed of the kernels as they ship, and what is made of the times."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import devices, kernel_cases, tile_timing
from pallas_kernels import gated_delta
from specpilot_jax import configs
from tests.decoding import kit


@pytest.fixture
def us(monkeypatch):
  """Every case takes a microsecond more than the one before."""
  monkeypatch.setattr(tile_timing, "BUFFERS", 2)

  def kernel_us(cases):
    return [10.0 + i for i, _ in enumerate(cases)]

  monkeypatch.setattr(tile_timing, "kernel_us", kernel_us)


def test_products_beside_xla(us):
  found = kernel_cases.products((64, 128), 3, [2], [2], ["interpret"])
  assert [sorted({"w12", "view"} & set(one)) for one in found] == [
    ["w12"],
    ["view"],
  ]
  # bfloat16 outputs of the right matrix: half a unit in the last place.
  assert all(0 < one["error"] < 2**-8 for one in found)
  assert all(one["xla"]["us"] == 10 for one in found)
  assert found[0]["w12"]["us"] == 12 and found[1]["view"]["us"] == 13
  other = found[0] | {"shape": (64, 384), "count": 1, "w12": {"us": 5.0}}
  text = kernel_cases.summary(
    [*found, other | {"w12": {"us": 5.0, "label": ""}}]
  )
  # Three matrices of 10 / 12 and one of as many bytes of 2.
  assert "w12, 2 rows: 1.417 weighted by bytes" in text
  assert "view, 2 rows: 0.769 over a pass's products" in text


def test_a_wrong_product_shows(us, monkeypatch):
  """The error is of the output that was timed."""
  monkeypatch.setattr(
    tile_timing,
    "shipped_case",
    lambda xs, packed, view, implementation: tile_timing.Case(
      "w12 wrong",
      jax.jit(lambda xs, packed: [jnp.zeros((2, 64), jnp.bfloat16)] * 2),
      (xs, packed),
      kind="w12",
    ),
  )
  found = kernel_cases.products((64, 128), 1, [2], [], ["wrong"])
  assert found[0]["error"] == 1


def test_operations_of_a_tree(us, monkeypatch):
  with kit.quick_compilation():
    check_operations(monkeypatch)


def check_operations(monkeypatch):
  monkeypatch.setattr(kernel_cases, "LAYERS", 1)
  monkeypatch.setattr(kernel_cases, "RUNS", (8,))
  monkeypatch.setattr(kernel_cases, "KEYS_BYTES", 1)
  config = kit.hybrid()
  operations = [
    *kernel_cases.recurrent(config, [17]),
    *kernel_cases.attention(config, [2], [24], ["reference"]),
  ]
  names = ["gdn_decode", *2 * ["gdn_prefill 8 tokens"]]
  names += ["gdn_verify 17 nodes", "gdn_commit 17 nodes"]
  names.append("tree_attention 2 nodes at 24")
  assert [o.name for o in operations] == names
  kinds = [o.implementation for o in operations]
  # A run of prompt beside the form in plain JAX.
  assert [i for i, kind in enumerate(kinds) if kind == "reference"] == [2, 5]
  here = [
    dataclasses.replace(o, implementation="reference") for o in operations
  ]

  def nothing(q, *_, implementation):
    return q if implementation == "reference" else 0 * q

  wrong = dataclasses.replace(here[-1], call=nothing, implementation="triton")
  device = devices.lookup("NVIDIA H200")
  found = kernel_cases.time_operations(iter(here), device)
  assert [one["operation"] for one in found] == names
  # Activations in bfloat16 beside the same numbers in float32.
  assert all(0 <= one["error"] < 0.02 for one in found)
  assert found[0]["us"] == 10
  state = 4 * 48 * 128 * 128
  monkeypatch.setattr(kernel_cases, "LAYERS", 1)
  whole = kernel_cases.recurrent(configs.preset("Qwen3.8-27B"), [])
  assert next(whole).nbytes == 2 * state
  found = kernel_cases.time_operations(iter([wrong]), device)
  assert found[0]["error"] == 1


def test_operations_of_several_requests_of_prompts_and_in_fp8(us, monkeypatch):
  """As a batch maps them: each request's are what it has alone."""
  monkeypatch.setattr(kernel_cases, "LAYERS", 1)
  monkeypatch.setattr(kernel_cases, "RUNS", (8,))
  config = kit.hybrid()
  with kit.quick_compilation():
    several = list(kernel_cases.of_requests(config, 2, [16, 17]))
    assert several[0].name == (
      "gdn_verify 16 nodes of 2 requests, 32 columns 4 warps"
    )
    assert several[-1].name == "gdn_commit of 2 requests, 128 columns 8 warps"
    assert several[-1].nbytes == 2 * several[0].nbytes
    commit = several[-1]
    (arguments,) = commit.layers
    both = commit.call(*arguments, implementation="reference")
    one = gated_delta.commit(*(x[1] for x in arguments))
    np.testing.assert_allclose(both[1], one, rtol=1e-6, atol=1e-6)
    prompts = list(kernel_cases.prompt_attention(config))
    assert [o.implementation for o in prompts] == ["triton", "reference"]
    shape, n, tile = kernel_cases.fp8_tile("64x256:3:40x16x1x2")
    codes = list(kernel_cases.fp8(shape, [n], [(n, tile)]))
    assert [o.implementation for o in codes] == ["mosaic", "triton", "mosaic"]
    assert codes[1].name == "fp8_matmul 64x256, 3 rows"
    assert codes[0].name.startswith(codes[1].name + ", Tile(rows=40, columns=1")
    here = [
      dataclasses.replace(o, implementation="reference")
      for o in (prompts[0], *codes)
    ]
    found = kernel_cases.time_operations(
      iter(here), devices.lookup("NVIDIA H200")
    )
  assert found[0]["operation"] == "prompt_attention 8 tokens behind 8"
  assert all(0 < one["error"] < 0.02 for one in found)


def test_matrices_of_codes():
  assert kernel_cases.fp8_shapes(configs.preset("Qwen3.8-27B")) == [
    (5120, 6144),
    (5120, 17408),
    (14336, 5120),
    (16384, 5120),
    (34816, 5120),
  ]


def test_a_tree_of_chains():
  mask = kernel_cases.chain_and_bush(32)
  assert mask.sum(axis=1).tolist() == [
    *range(1, 17),
    *range(2, 10),
    *range(3, 11),
  ]
