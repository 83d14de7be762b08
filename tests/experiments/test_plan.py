"""What a run says of cards and memory before it loads anything."""

import json
import types

import jax
import pytest

from experiments import plan
from specpilot_jax import configs, footprint, loading
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models.drafters import config as drafter_configs
from tests.experiments import tiny


def a_gpu(monkeypatch, kind, stats=None):
  device = types.SimpleNamespace(
    platform="gpu", device_kind=kind, memory_stats=lambda: stats
  )
  monkeypatch.setattr(jax, "devices", lambda: [device])


def test_a_cpu_is_told_what_runs_there():
  with pytest.raises(SpecPilotError) as caught:
    plan.check_card("h200")
  assert str(caught.value) == (
    "this deployment needs a GPU of compute capability 9.0 (H200), this"
    " machine has none; --flagfile=cpu_smoke.flags runs here"
  )


def test_another_generation_is_refused(monkeypatch):
  a_gpu(monkeypatch, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition")
  with pytest.raises(SpecPilotError, match="9.0 .H100 SXM 80GB.* has a RTX"):
    plan.check_card("h100")
  with pytest.raises(SpecPilotError, match="rtx_pro_6000_single.flags runs"):
    plan.check_card("h200")
  plan.check_card("rtx_pro_6000")


def test_a_card_of_the_same_generation_will_do(monkeypatch):
  a_gpu(monkeypatch, "NVIDIA H200")
  plan.check_card("h100")


def a_plan(drafting=1, plain=2):
  return plan.memory(
    configs.preset("Qwen3.8-27B"),
    drafter_configs.PRESETS["Qwen3.8-27B"],
    dtype="bfloat16",
    max_seq_len=1280,
    prefill_chunk=64,
    drafting=drafting,
    plain=plain,
  )


def test_the_27b():
  one = footprint.footprint(
    configs.preset("Qwen3.8-27B"),
    drafter_configs.PRESETS["Qwen3.8-27B"],
    dtype="bfloat16",
    max_seq_len=1280,
  )
  found = a_plan()
  assert found["target"] == one.target_bytes
  assert found["drafter"] == one.drafter_bytes
  assert found["recurrent_state"] == 3 * one.recurrent_bytes
  assert found["drafter_context"] == one.drafter_cache_bytes
  assert found["keys_and_values"] == 3 * one.kv_cache_bytes
  # A chunk of 64 scored tokens over 248,320 ids.
  assert found["workspace"] == 3 * 64 * 248_320 * 4
  assert 57e9 < sum(found.values()) < 59e9
  alone = a_plan(drafting=0, plain=1)
  assert alone["drafter"] == alone["drafter_context"] == 0


def test_memory_is_checked(monkeypatch):
  found = a_plan()
  assert plan.check_memory(found, 80 * 10**9).endswith("in all of 80")
  assert "in all" in plan.check_memory(found, None)
  with pytest.raises(SpecPilotError, match="the device offers 40"):
    plan.check_memory(found, 40 * 10**9)
  assert (footprint.device_bytes() or 0) > 10**9
  a_gpu(monkeypatch, "NVIDIA H200", {"bytes_limit": 7, "peak_bytes_in_use": 5})
  assert (footprint.device_bytes(), plan.peak_bytes()) == (7, 5)


def test_weights_that_do_not_fit_are_not_made(monkeypatch):
  monkeypatch.setattr(footprint, "device_bytes", lambda: 50 * 10**9)
  source = loading.open_target("widened:qwen3.8-27b")
  with pytest.raises(
    SpecPilotError,
    match="widened:Qwen3.8-27B in bfloat16 has 53.8 GB .* offers 50 GB",
  ):
    source.build("bfloat16")


def test_a_run_ends_with_that_line(place, command, capsys):
  assert tiny.run(*command, "--card=h200") == 2
  assert "needs a GPU of compute capability 9.0" in capsys.readouterr().err


def test_a_run_prints_and_keeps_its_plan(finished):
  memory = json.loads((finished / "result.json").read_text())["device_memory"]
  assert memory["planned_bytes"]["target"] > 0
  assert memory["planned_bytes"]["drafter"] == 0
