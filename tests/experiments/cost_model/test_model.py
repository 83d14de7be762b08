"""The cost model from recorded files, by hand."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import results
from experiments.cost_model import (
  floors,
  kernels,
  lattices,
  model,
  sections,
)
from specpilot_jax.errors import SpecPilotError
from tests.decoding import kit

CLASSES_US = {
  "target_gemm": 50.0, "recurrent": 20.0, "attention": 10.0, "drafter": 15.0,
  "prefill": 0.0, "other": 5.0,
}  # fmt: skip


def record(system, emitted, e2el_ms):
  tokens = sum(emitted)
  return {
    "request": "a",
    "system": system,
    "domain": "d",
    "prompt_ids": [1, 2, 3],
    "output_ids": [1, 3, 5, 6][:tokens],
    "finish_reason": "length",
    "options": {},
    "sampling": dataclasses.asdict(results.SamplingParams()),
    "metrics": {
      "ttft_ms": 1.0,
      "tpot_ms": (e2el_ms - 1) / (tokens - 1),
      "e2el_ms": e2el_ms,
      "itl_ms": [1.0] * (len(emitted) - 1),
      "acceptance_length": tokens / len(emitted),
      "num_spec_steps": len(emitted),
      "num_draft_tokens": 2 * len(emitted),
      "num_accepted_draft_tokens": tokens - len(emitted),
      "emitted_per_step": list(emitted),
      "drafted_per_step": [2] * len(emitted),
      "accepted_per_step": [e - 1 for e in emitted],
      "cut_steps": 0,
    },
  }


def columns(parts_us):
  """Kernels one after the other, one class each."""
  scopes = {
    "target_gemm": "weights", "recurrent": "recurrent",
    "attention": "attention", "drafter": "drafter", "other": "rest",
  }  # fmt: skip
  at, found = 0, []
  for name, scope in scopes.items():
    duration = round(2e3 * parts_us[name])  # two steps
    found.append(kernels.Kernel(name, scope, "jit_step", at, duration))
    at += duration + 7
  names = {scope: f"jit(step)/{scope}/mul" for scope in scopes.values()}
  return kernels.to_columns(found, names)


@pytest.fixture(name="run")
def run_fixture(tmp_path):
  """Files of a run: the chain emits 2, 1, 1; the tree of 16 nodes 3, 1."""
  recorded = lattices.Recording(
    request="a",
    looped=False,
    prompt_length=3,
    output=np.asarray([1, 3, 5, 6], np.int32),
    tokens=np.asarray(
      [[[1, 4], [2, 3]], [[3, 1], [5, 5]], [[0, 5], [6, 0]], [[6, 0], [0, 1]]],
      np.int32,
    ),
    scores=np.tile(np.log([0.6, 0.4]), (4, 2, 1)).astype(np.float16),
    order=None,
    counts=np.full(4, 2, np.int16),
  )
  lattices.save(tmp_path / lattices.LATTICES, [recorded])
  lines = [record("ar", (1, 1, 1, 1), 1.33), record("stock", (2, 1, 1), 1.3)]
  (tmp_path / results.REQUESTS).write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  profile = {
    "format": 1,
    "kind": model.PROFILED,
    "device_kind": "NVIDIA H200",
    "dtype": "float32",
    "target": dataclasses.asdict(kit.hybrid()),
    "drafter": "prompt_lookup",
    "drafter_config": None,
    # Nothing is bound by bytes, so that nodes cost in proportion.
    "roofline": dataclasses.asdict(
      floors.Roofline(flops=1e15, bytes=1e10, source="made up")
    ),
    "prefill": {"rows": 16, "context": 0, "measured_us": 80.0},
    "systems": {
      "ar": {
        "nodes": 1, "context": 5.0, "steps": 2,
        "kernels": columns(CLASSES_US | {"drafter": 0.0}),
      },
      "stock": {
        "nodes": 3, "context": 5.0, "steps": 2, "kernels": columns(CLASSES_US),
      },
    },
  }  # fmt: skip
  (tmp_path / model.PROFILE).write_text(json.dumps(profile))
  return tmp_path


def test_factors_by_hand(run):
  out = model.compute(run)
  stock = out["systems"]["stock"]
  assert stock["profiled_step_us"] == pytest.approx(100)
  # 0.3 ms over the two steps behind the first.
  assert stock["measured_step_us"] == pytest.approx(150)
  assert out["overhead_factor"] == pytest.approx(1.5)
  assert out["systems"]["ar"]["overhead_factor"] == pytest.approx(110 / 85)
  assert out["replay"]["stock"]["tau"] == pytest.approx(4 / 3)
  assert out["replay"]["stock"]["steps_agreeing"] == 3
  trees = out["replay"]["policies"]["best_first"]
  by_nodes = {b["nodes"]: b["tau"] for b in trees}
  assert by_nodes == {3: pytest.approx(4 / 3)} | dict.fromkeys(
    (8, 16, 24, 32, 48, 64, 96), 2
  )
  (chain,) = out["replay"]["policies"]["chain"]
  assert (chain["nodes"], chain["tau"]) == (3, pytest.approx(4 / 3))
  # This lattice is blind to parents as it is.
  assert out["replay"]["policies"]["marginal"] == trees
  best = max(trees, key=lambda b: b["tau"] / b["floor_us"])
  assert out["best_tree"] == best
  assert out["tau_factor"] == pytest.approx(best["tau"] / (4 / 3))
  assert out["kernel_factor"] == pytest.approx(100 / best["floor_us"])
  assert out["ceiling_speedup"] == pytest.approx(
    out["tau_factor"] * out["kernel_factor"] * out["overhead_factor"]
  )
  # The ceiling is the measured time of a token over its floor.
  assert out["ceiling_speedup"] == pytest.approx(
    150 / (4 / 3) / (best["floor_us"] / best["tau"])
  )
  factors = {name: out[f"{name}_factor"] for name in model.FACTORS}
  assert out["largest"] == max(factors, key=lambda name: factors[name])
  assert {n: c["measured_us"] for n, c in out["classes"].items()} == (
    pytest.approx(CLASSES_US)
  )
  assert sum(c["floor_us"] for c in out["classes"].values()) == (
    pytest.approx(best["floor_us"])
  )
  assert out["verify_over_ar_step"] == pytest.approx(85 / 85)
  # What decodes without drafts has no path to wait for.
  certain = floors.Step(nodes=1, context=5.0, committed=1, certain=True)
  assert out["systems"]["ar"]["classes"]["recurrent"]["bytes"] == (
    floors.recurrent(kit.hybrid(), "float32", certain).bytes
  )
  assert out["notes"] == []


def test_the_plot_has_the_floors_of_the_table(run, monkeypatch):
  """Not those of the best tree, which has more nodes than were measured."""
  shown = {}
  monkeypatch.setattr(
    sections.plots, "classes_and_floors", lambda c: shown.update(c) or b""
  )
  out = model.compute(run)
  out["best_tree"] = out["best_tree"] | {"nodes": 64}
  for name in kernels.CLASSES:
    out["classes"][name]["floor_us"] *= 4
  sections.blocks(out)
  assert set(shown) == set(CLASSES_US) - {"prefill"}
  for name, c in shown.items():
    table = out["systems"]["stock"]["classes"][name]
    assert c == {f: table[f] for f in ("measured_us", "floor_us")}


def test_classes_of_a_step_without_graphs(run):
  path = run / model.PROFILE
  profile = json.loads(path.read_text())
  stock = profile["systems"]["stock"]
  named = columns(CLASSES_US | {"target_gemm": 46.0})
  stock["without_graphs"] = {"context": 5.0, "steps": 2, "kernels": named}
  path.write_text(json.dumps(profile))
  out = model.compute(run)
  stock = out["systems"]["stock"]
  assert stock["profiled_step_us"] == pytest.approx(100)
  assert stock["classes"]["target_gemm"]["measured_us"] == pytest.approx(46)
  assert stock["classes_over_step"] == pytest.approx(0.96)
  notes = " ".join(out["notes"])
  assert "compiled without CUDA graphs" in notes
  assert "the classes sum to 96.0%" in notes


def test_loops_alone_are_told(run):
  path = run / lattices.LATTICES
  recorded = lattices.load(path)
  lattices.save(path, [dataclasses.replace(r, looped=True) for r in recorded])
  out = model.compute(run)
  assert any("every recorded output ended as a loop" in n for n in out["notes"])


def test_misses_are_told(run):
  path = run / model.PROFILE
  profile = json.loads(path.read_text())
  heavy = CLASSES_US | {"other": 90.0, "recurrent": 0.001}
  profile["systems"]["stock"]["kernels"] = columns(heavy)
  profile["roofline"] |= {"flops_limit": 1e15, "bytes_limit": 1.1e10}
  path.write_text(json.dumps(profile))
  lines = results.read_requests(run)
  lines[1]["metrics"] |= record("stock", (1, 2, 1), 1.3)["metrics"]
  (run / results.REQUESTS).write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  notes = " ".join(model.compute(run)["notes"])
  assert "stock: class other is 5" in notes
  assert "recurrent took 0.0 us, less than" in notes
  assert "repeats 33.3% of its steps" in notes


@pytest.mark.parametrize(
  ("change", "culprit"),
  [
    ({"format": 2}, "format 2, expected 1"),
    ({"systems": {}}, "'stock' is missing"),
    ({"roofline": {"flops": 1}}, "damaged"),
    ({"drafter": "medusa"}, "'medusa'"),
    ({"prefill": None}, "damaged"),
  ],
)
def test_damaged_profiles(run, change, culprit):
  path = run / model.PROFILE
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(SpecPilotError, match=culprit):
    model.compute(run)


def test_files_of_another_run(run):
  lines = results.read_requests(run)
  lines[1]["output_ids"][2] = 9
  (run / results.REQUESTS).write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  with pytest.raises(SpecPilotError, match="lattices of request a are not"):
    model.compute(run)
