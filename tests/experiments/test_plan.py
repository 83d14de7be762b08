"""What a run says of cards and memory before it loads anything."""

import json
import types

import jax
import pytest

from experiments import plan
from experiments.cost_model import measure
from specpilot_jax import configs, footprint, loading
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.prompt_lookup import PromptLookup
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters import config as drafter_configs
from tests.experiments import test_settings, tiny


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


def test_views_beside_weights():
  def systems(*weights):
    return [
      configs.SystemConfig(weights=form, verification="two_level")
      for form in weights
    ]

  assert plan.views([configs.SystemConfig()], profile=True) == 0
  for profile in (False, True):
    assert plan.views(systems("bf16"), profile=profile) == 1
    # In W12 level 1 reads the weights themselves, recorded or not.
    assert plan.views(systems("w12"), profile=profile) == 0
    assert plan.views(systems("bf16", "w12"), profile=profile) == 1


def a_plan(drafting=1, plain=2, **more):
  return plan.memory(
    configs.preset("Qwen3.8-27B"),
    drafter_configs.PRESETS["Qwen3.8-27B"],
    dtype="bfloat16",
    max_seq_len=1280,
    prefill_chunk=64,
    drafting=drafting,
    plain=plain,
    **more,
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
  batch = a_plan(pass_rows=256, copied=8)
  own = one.kv_cache_bytes + one.recurrent_bytes
  assert batch["workspace"] == 3 * 256 * 248_320 * 4 + 2 * 8 * own
  alone = a_plan(drafting=0, plain=1)
  assert alone["drafter"] == alone["drafter_context"] == 0


def test_the_27b_in_fp8():
  """24 GB of codes, 5 of embedding and head, and the drafter as it is."""
  plain, found = a_plan(), a_plan(weights=("fp8",))
  assert "target" not in found
  assert found["drafter"] == plain["drafter"]
  own = found["weights_in_fp8"]
  assert own == footprint.fp8_bytes(configs.preset("Qwen3.8-27B"), "bfloat16")
  assert 0.54 < own / plain["target"] < 0.56


def test_memory_is_checked(monkeypatch):
  found = a_plan()
  assert plan.check_memory(found, 80 * 10**9).endswith("in all of 80")
  assert "in all" in plan.check_memory(found, None)
  with pytest.raises(SpecPilotError, match="the device offers 40"):
    plan.check_memory(found, 40 * 10**9)
  assert (footprint.device_bytes() or 0) > 10**9
  a_gpu(monkeypatch, "NVIDIA H200", {"bytes_limit": 7, "peak_bytes_in_use": 5})
  assert (footprint.device_bytes(), plan.peak_bytes()) == (7, 5)


@pytest.mark.parametrize(("unit", "noted"), [(10**9, True), (10**6, False)])
def test_the_peak_is_held_against_the_plan(monkeypatch, unit, noted):
  stats = {"bytes_limit": 10**12}
  a_gpu(monkeypatch, "NVIDIA H200", stats)
  peaks = plan.Peaks({"target": 90 * unit, "drafter": 10 * unit})
  for part, peak in (("weights", 95), ("warm_up", 104), ("measure", 104)):
    stats["peak_bytes_in_use"] = peak * unit
    peaks.note(part)
  told = peaks.told()
  assert told["planned_total_bytes"] == 100 * unit
  assert told["peak_bytes"] == 104 * unit
  assert told["peak_bytes_after"] == {
    "weights": 95 * unit, "warm_up": 104 * unit, "measure": 104 * unit,
  }  # fmt: skip
  assert told["peak_over_plan"] == pytest.approx(1.04)
  assert "(+4.0%)" in (plan.describe(told) or "")
  assert peaks.notes() == []
  stats["peak_bytes_in_use"] = 106 * unit
  peaks.note("profile")
  # 6 MB more than planned say nothing: compiling takes as much.
  assert ["(+6.0%): more than 5%" in note for note in peaks.notes()] == (
    [True] if noted else []
  )


def test_a_processor_counts_no_peak():
  peaks = plan.Peaks({"target": 900})
  peaks.note("weights")
  assert peaks.told()["peak_over_plan"] is None
  assert plan.describe(peaks.told()) is None and peaks.notes() == []


@pytest.mark.parametrize(
  ("name", "kind", "offered"),
  [
    ("h200", "NVIDIA H200", 105 * 10**9),
    # Three quarters of the card, which JAX takes unless told otherwise.
    ("h100", "NVIDIA H100 80GB HBM3", 64 * 10**9),
    (
      "rtx_pro_6000",
      "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
      76 * 10**9,
    ),
  ],
)
def test_the_27b_fits_its_cards(name, kind, offered, monkeypatch):
  run = test_settings.shipped(f"{name}_single.flags")
  assert (run.card, run.target) == (name, "widened:qwen3.8-27b")
  assert run.dtype is not None and run.card is not None
  source = loading.open_target(run.target)
  found = plan.memory(
    source.config,
    loading.drafter_config(run.drafter, source.config),
    dtype=run.dtype,
    max_seq_len=1024 + run.sampling.max_tokens,
    prefill_chunk=run.prefill_chunk,
    drafting=len(run.systems) - 1,
    plain=2,
  )
  a_gpu(monkeypatch, kind, {"bytes_limit": offered})
  plan.check_card(run.card)
  line = plan.check_memory(found, footprint.device_bytes())
  assert "target 53.8, drafter 3.46" in line


def test_engines_share_one_copy_of_the_weights(place):
  model = loading.load_target(str(place / "model"), "float32")
  engines = [
    Engine(model.target, max_seq_len=64),
    Engine(model.target, drafter=PromptLookup(), max_seq_len=64),
  ]
  subject = measure.Subject(
    target=model.target,
    drafter=PromptLookup(),
    sampling=SamplingParams(),
    max_seq_len=64,
    prefill_chunk=16,
  )
  own = {
    x.unsafe_buffer_pointer()
    for x in target_lib.parameters(model.target).values()
  }
  for held in (*(e._params for e in engines), subject.session("stock").params):
    leaves = jax.tree.leaves(held[0])
    assert {x.unsafe_buffer_pointer() for x in leaves} == own
  for engine in engines:
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
  # Nothing was donated or replaced.
  assert all(not x.is_deleted() for x in jax.tree.leaves(engines[0]._params))


def test_a_learned_drafter_reads_the_targets_own_tables():
  target = loading.load_target("zoo", "float32").target
  drafter = loading.make_drafter("dflash", target)
  assert drafter is not None
  own = target_lib.parameters(target)
  _, embedding, head = drafter.params
  assert embedding.unsafe_buffer_pointer() == (
    own["embed.weight"].unsafe_buffer_pointer()
  )
  # The zoo ties them.
  head_name = "lm_head.weight" if "lm_head.weight" in own else "embed.weight"
  assert head.unsafe_buffer_pointer() == own[head_name].unsafe_buffer_pointer()


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
