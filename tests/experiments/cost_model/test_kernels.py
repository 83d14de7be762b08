"""Kernel classes from a profile made by hand, and from a compiled program."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cost_model import kernels
from specpilot_jax.errors import SpecPilotError

HLO = """
HloModule jit_step

%fused_dot (p0: bf16[16,8]) -> bf16[16,8] {
  %p0 = bf16[16,8] parameter(0)
  %dot.1 = f32[16,8] dot(%p0, %p0), metadata={op_name="jit(step)/recurrent/weights/ni,oi->no/dot_general" source_line=3}
  ROOT %add.7 = bf16[16,8] add(%dot.1, %p0), metadata={op_name="jit(step)/add"}
}

ENTRY %main (a: bf16[16,8]) -> bf16[16,8] {
  %gemm_fusion.3 = bf16[16,8] fusion(%a), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(step)/add"}
  %loop_fusion.4 = f32[16] fusion(%a), calls=%other, metadata={op_name="jit(step)/recurrent/mul"}
  %softmax.1 = f32[16] fusion(%a), calls=%other, metadata={op_name="jit(step)/attention/exp"}
  %custom-call.9 = f32[16] custom-call(%a), metadata={op_name="jit(step)/drafter/weights/dot_general"}
  %silu.2 = f32[16] fusion(%a), calls=%other, metadata={op_name="jit(step)/mlp/jit(silu)/mul"}
  ROOT %argmax.5 = f32[16] fusion(%a), calls=%other, metadata={op_name="jit(step)/argmax"}
}
"""  # noqa: E501

NAMES = kernels.op_names(HLO)


def kernel(name, op="", module="jit_step", start=0, duration=10):
  return kernels.Kernel(name, op, module, start, duration)


@pytest.mark.parametrize(
  ("op", "name", "expected"),
  [
    # The product inside decides, not the addition behind it.
    ("gemm_fusion.3", "gemm_fusion_3", kernels.TARGET_GEMM),
    ("loop_fusion.4", "loop_fusion_4", kernels.RECURRENT),
    ("softmax.1", "softmax_1", kernels.ATTENTION),
    ("custom-call.9", "nvjet_tst_128x8", kernels.DRAFTER),
    ("silu.2", "silu_2", kernels.TARGET_GEMM),
    ("argmax.5", "argmax_5", kernels.OTHER),
    # In a CUDA graph: by the kernel's own name.
    ("", "softmax_1", kernels.ATTENTION),
    ("command_buffer", "loop_fusion_4", kernels.RECURRENT),
    ("", "void cutlass::Kernel2<...>", kernels.TARGET_GEMM),
    ("", "nvjet_hsh_64x8", kernels.TARGET_GEMM),
    ("", "MemcpyD2H", kernels.OTHER),
    ("", "w12_hopper_view", kernels.TARGET_GEMM),
    ("command_buffer", "gdn_commit", kernels.RECURRENT),
    ("", "tree_attention_combine", kernels.ATTENTION),
    # Its scope says more, where there is one.
    ("custom-call.9", "w12_matmul", kernels.DRAFTER),
  ],
)
def test_classes(op, name, expected):
  assert kernels.classify(kernel(name, op), NAMES) == expected


def test_prompt_passes_are_a_class():
  k = kernel("softmax_1", "softmax.1", "jit_prefill")
  assert kernels.classify(k, NAMES) == kernels.PREFILL


@pytest.mark.parametrize(
  ("intervals", "union", "shares"),
  [
    ([(0, 10), (10, 5)], 15, [10, 5]),
    ([(0, 10), (20, 5)], 15, [10, 5]),
    ([(0, 10), (5, 10)], 15, [7.5, 7.5]),
    ([(0, 12), (0, 12), (0, 12)], 12, [4, 4, 4]),
    ([(0, 10), (2, 4)], 10, [8, 2]),
    ([(5, 0), (0, 10)], 10, [0, 10]),
    ([(7, 3)], 3, [3]),
  ],
)
def test_union_and_shares(intervals, union, shares):
  assert kernels.union_ns(intervals) == union
  np.testing.assert_allclose(kernels.shares_ns(intervals), shares)


def test_shares_always_sum_to_the_union():
  rng = np.random.default_rng(0)
  for _ in range(20):
    n = rng.integers(1, 60)
    intervals = list(
      zip(
        rng.integers(0, 500, n).tolist(),
        rng.integers(0, 40, n).tolist(),
        strict=True,
      )
    )
    total = kernels.shares_ns(intervals).sum()
    assert total == pytest.approx(kernels.union_ns(intervals))


CALLS = """HloModule jit_step, is_scheduled=true

%command_buffer (p: bf16[4]) -> bf16[4] {
  %p = bf16[4] parameter(0)
  ROOT %pallas_call.2 = (bf16[4], f32[4]) custom-call(%p), metadata={op_name="jit(step)/weights/jit(_matmul)/w12_hopper/mpmd_map"}
}

ENTRY %main (a: bf16[4]) -> bf16[4] {
  %a = bf16[4] parameter(0), metadata={op_name="params.arrays[7]"}
  %pallas_call.1 = bf16[4] custom-call(%a), metadata={op_name="jit(step)/drafter/weights/jit(_matmul)/w12_hopper/mpmd_map"}
  %call.5 = (bf16[4], f32[4]) call(%a), to_apply=%command_buffer
  %get-tuple-element.6 = bf16[4] get-tuple-element(%call.5), index=0, metadata={op_name="jit(step)/weights/jit(_matmul)/w12_hopper/mpmd_map"}
  %pallas_call.3 = bf16[4] custom-call(%a), metadata={op_name="jit(step)/attention/jit(_kernel)/tree_attention/pallas_call"}
  %gemm_fusion.9 = bf16[4] fusion(%a), kind=kCustom, calls=%other
  ROOT %pallas_call.4 = bf16[4] custom-call(%a), metadata={op_name="jit(step)/drafter/attention/jit(_kernel)/tree_attention_combine/pallas_call"}
}
"""  # noqa: E501


def test_own_kernels_in_a_graph_are_told_apart_by_their_order():
  def step(start):
    names = ("w12_hopper_mosaic_gpu_kernel",) * 2
    names += ("tree_attention", "tree_attention_combine_4")
    return [
      kernel(name, "graph", start=start + i) for i, name in enumerate(names)
    ]

  several = step(0) + step(10)
  found, names = kernels.named(several[::-1], CALLS, 2)
  classes = [kernels.classify(k, names) for k in found]
  assert classes == 2 * [
    kernels.DRAFTER, kernels.TARGET_GEMM, kernels.ATTENTION, kernels.DRAFTER
  ]  # fmt: skip
  assert kernels.breakdown(found, names, 2).unattributed_us == 0
  # One is missing, perhaps a branch not taken: by its name alone.
  found, names = kernels.named(several[1:], CALLS, 2)
  classes = [kernels.classify(k, names) for k in found]
  assert classes[0] == classes[3] == classes[4] == kernels.TARGET_GEMM
  assert classes[1:3] == classes[5:] == [kernels.ATTENTION, kernels.DRAFTER]
  # What launched a kernel counts more than its name and its place.
  for op, expected in (
    ("pallas_call.1", "pallas_call.2"),
    ("pallas_call.2", ""),
  ):
    known = [kernel("w12_hopper", op), kernel("w12_hopper", start=1)]
    found, names = kernels.named(known, CALLS, 1)
    assert [k.op for k in found] == [op, expected]


def test_arguments_whose_names_tell_nothing():
  for owner in (kernels.WEIGHTS, kernels.DRAFTER):
    names = kernels.op_names(CALLS, {"params.arrays[7]": owner})
    assert names["gemm_fusion.9"] == owner
  assert kernels.op_names(CALLS)["gemm_fusion.9"] == ""


def event(name, start, duration, **stats):
  return types.SimpleNamespace(
    name=name, start_ns=start, duration_ns=duration, stats=list(stats.items())
  )


def profile():
  """Two streams of one GPU, what only encloses them, and a host."""
  line = types.SimpleNamespace
  return line(
    planes=[
      line(
        name="/host:CPU",
        lines=[line(name="python", events=[event("step", 0, 10**6)])],
      ),
      line(
        name="/device:GPU:0",
        lines=[
          line(
            name="Stream #13(Kernel,MemcpyD2H)",
            events=[
              event(
                "gemm_fusion_3", 1000, 6000, kernel_details="regs:32",
                hlo_op="gemm_fusion.3", hlo_module="jit_step",
              ),
              event(
                "loop_fusion_4", 7000, 2000, kernel_details="regs:32",
                hlo_op="loop_fusion.4", hlo_module="jit_step",
              ),
              event("MemcpyD2H", 9500, 500, memcpy_details="size:4"),
              event("CudaGraph", 0, 20000, cuda_graph_exec_id=1),
            ],
          ),
          line(
            name="Stream #14(Kernel)",
            events=[
              event(
                "nvjet_a", 8000, 1000, kernel_details="regs:90",
                hlo_op="custom-call.9", hlo_module="jit_step",
              )
            ],
          ),
          line(
            name="Launch Stats",
            events=[event("jit_step", 0, 9999, kernel_details="")],
          ),
        ],
      ),
    ]
  )  # fmt: skip


def test_a_profile_is_divided_exactly():
  found = kernels.read_profile(profile())
  assert [k.name for k in found] == [
    "gemm_fusion_3", "loop_fusion_4", "nvjet_a", "MemcpyD2H",
  ]  # fmt: skip
  b = kernels.breakdown(found, NAMES, steps=2)
  assert b.step_us == pytest.approx(8.5 / 2)
  assert b.kernels == 2
  assert b.classes == pytest.approx(
    {
      kernels.TARGET_GEMM: 3.0,
      kernels.RECURRENT: 0.75,
      kernels.ATTENTION: 0,
      kernels.DRAFTER: 0.25,
      kernels.PREFILL: 0,
      kernels.OTHER: 0.25,
    }
  )
  assert sum(b.classes.values()) == pytest.approx(b.step_us)
  assert b.unattributed_us == pytest.approx(0.25)
  top = kernels.heaviest(found, NAMES, 2, count=1)
  assert top[0]["kernel"] == "gemm_fusion" and top[0]["us_each"] == 6


def gpu_profile(*events):
  line = types.SimpleNamespace
  stream = line(name="Stream #7(Compute)", events=list(events))
  return line(planes=[line(name="/device:GPU:0", lines=[stream])])


def test_kernels_of_command_buffers():
  """What CUPTI's collector writes: the stack of instructions, joined."""
  found = kernels.read_profile(
    gpu_profile(
      # Under the profiler XLA runs a command buffer kernel by kernel.
      event(
        "nvjet_tst_64x8_64x16", 0, 5000, kernel_details="regs:168 shm:0",
        hlo_op="command_buffer_12 (disabled for profiling)::custom-call.9",
        hlo_module="jit_step", correlation_id=71,
      ),
      event(
        "loop_add_fusion", 5000, 1000, kernel_details="regs:16",
        hlo_op="loop_fusion.4", hlo_module="jit_step",
      ),
      event("Memset", 6000, 500, Memset_details="kind:Device"),
      # In a graph that stays one: its instruction is not in the program.
      event(
        "softmax_1", 7000, 700, kernel_details="regs:16",
        hlo_op="command_buffer_3", hlo_module="jit_step",
        cuda_graph_exec_id=4,
      ),
    )
  )  # fmt: skip
  assert [k.op for k in found] == [
    "custom-call.9", "loop_fusion.4", "", "command_buffer_3",
  ]  # fmt: skip
  assert [kernels.classify(k, NAMES) for k in found] == [
    kernels.DRAFTER, kernels.RECURRENT, kernels.OTHER, kernels.ATTENTION,
  ]  # fmt: skip
  b = kernels.breakdown(found, NAMES, steps=1)
  assert b.unattributed_us == pytest.approx(0.5)


def test_columns_come_back():
  found = kernels.read_profile(profile())
  columns = kernels.to_columns(found, NAMES)
  again, names = kernels.from_columns(columns)
  # Only what the kernels need is kept.
  assert set(names) == {"gemm_fusion.3", "loop_fusion.4", "custom-call.9"}
  assert kernels.breakdown(again, names, 2) == kernels.breakdown(
    found, NAMES, 2
  )


def test_a_profile_without_a_gpu():
  with pytest.raises(SpecPilotError, match="no kernel of a GPU, but /host:CPU"):
    kernels.read_profile(types.SimpleNamespace(planes=profile().planes[:1]))


# As XLA compiles a step for a GPU: products of one row and what adds their
# parts up have lost their names, layouts are changed on the way.
GPU_HLO = """
HloModule jit_step

%fused_reduce.2 (param_0.17: f32[16,3,128,16]) -> f32[48,16] {
  %param_0.17 = f32[16,3,128,16]{3,2,1,0} parameter(0), metadata={scheduling_name="param_0.17"}
  %multiply.35 = f32[48,128,16]{2,1,0} multiply(%param_0.17, %param_0.17), metadata={op_name="jit(step)/recurrent/mul"}
  ROOT %reduce.46 = f32[48,16]{1,0} reduce(%multiply.35), dimensions={1}, metadata={scheduling_name="reduce.46"}
}

%gemm_fusion_dot.41_computation (parameter_0.2: bf16[8,768,1]) -> f32[8,1,5120] {
  ROOT %dot.72 = f32[8,1,5120]{2,1,0} dot(%parameter_1.2, %parameter_0.2), metadata={scheduling_name="dot.72"}
}

ENTRY %main.71 (params_0.1: bf16[5120,6144]) -> f32[] {
  %params_0.1 = bf16[5120,6144]{1,0} parameter(0), metadata={op_name="params[0]['layers'][0]['mixer']['out_proj'].value"}
  %params_1.1 = bf16[5120,6144]{1,0} parameter(1), metadata={op_name="params[1][0]['layers'][0]['o_proj'].value"}
  %carry_conv.1 = bf16[3,10240]{1,0} parameter(2), metadata={op_name="carry.target.layers[0].conv"}
  %carry_k.1 = bf16[4,64,256]{1,0} parameter(3), metadata={op_name="carry.target.layers[3].k"}
  %wrapped_transpose = bf16[10240,3]{1,0} fusion(%carry_conv.1), kind=kLoop, calls=%t, metadata={op_name="carry.target.layers[0].conv"}
  %copy.4 = bf16[4,64,256]{1,0} copy(%carry_k.1), metadata={op_name="carry.target.layers[3].k"}
  %loop_mul.1 = bf16[1,6144]{1,0} fusion(%carry_conv.1), kind=kLoop, calls=%m, metadata={op_name="jit(step)/recurrent/mul"}
  %bitcast.220 = bf16[5120,8,768]{2,1,0} bitcast(%params_0.1), metadata={scheduling_name="bitcast.220"}
  %bitcast.221 = bf16[8,768,1]{2,1,0} bitcast(%loop_mul.1), metadata={scheduling_name="bitcast.221"}
  %gemm_fusion_dot.41 = f32[8,1,5120]{2,1,0} fusion(%bitcast.221, %bitcast.220), kind=kCustom, calls=%gemm_fusion_dot.41_computation
  %bitcast.222 = bf16[5120,8,768]{2,1,0} bitcast(%params_1.1)
  %gemm_fusion_dot.42 = f32[8,1,5120]{2,1,0} fusion(%bitcast.221, %bitcast.222), kind=kCustom, calls=%gemm_fusion_dot.41_computation
  %input_reduce_fusion.2 = f32[48,16]{1,0} fusion(%copy.4), kind=kInput, calls=%fused_reduce.2, metadata={deduplicated_name="input_reduce_fusion.2"}
  %get-tuple-element.34 = bf16[3,10240]{1,0} get-tuple-element(%loop_mul.1), index=0
  %copy.61 = bf16[3,10240]{1,0} copy(%get-tuple-element.34), metadata={scheduling_name="copy.61"}
  ROOT %loop_add_fusion.3 = bf16[1,5120]{1,0} fusion(%gemm_fusion_dot.41, %params_0.1), kind=kLoop, calls=%a, metadata={op_name="jit(step)/add"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
  ("op", "expected"),
  [
    ("wrapped_transpose", kernels.RECURRENT),
    ("copy.4", kernels.ATTENTION),
    # Its input is the mixer's, its weights are the target's.
    ("gemm_fusion_dot.41", kernels.TARGET_GEMM),
    ("gemm_fusion_dot.42", kernels.DRAFTER),
    ("input_reduce_fusion.2", kernels.RECURRENT),
    ("copy.61", kernels.RECURRENT),
    ("loop_add_fusion.3", kernels.OTHER),
  ],
)
def test_what_the_gpu_compiler_leaves_without_a_name(op, expected):
  names = kernels.op_names(GPU_HLO)
  assert kernels.classify(kernel(op.replace(".", "_"), op), names) == expected


def test_scopes_of_a_compiled_program():
  @jax.jit
  def step(x, w):
    with jax.named_scope("recurrent"):
      with jax.named_scope("weights"):
        y = x @ w
      y = jnp.tanh(y)
    with jax.named_scope("drafter"), jax.named_scope("attention"):
      return jnp.exp(y).sum()

  x = jnp.ones((8, 8))
  text = step.lower(x, x).compile().as_text()
  assert text is not None
  names = kernels.op_names(text)
  classes = {kernels.classify(kernel(name, name), names) for name in names}
  assert {kernels.TARGET_GEMM, kernels.DRAFTER} <= classes
