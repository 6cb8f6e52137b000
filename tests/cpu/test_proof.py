"""Proof of what ran: real profiles on the CPU, and traces as a GPU writes them, put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from redline.core.plan import Plan
from redline.engine.build import Training
from redline.engine.proof import attention_kernel, graph_breaks, longest_matmul, matmul_dtypes, profile_steps, prove

CPU = torch.device("cpu")
Train = Callable[..., Training]

# Names as the profiler shows them on an H200.
FLASH_FORWARD = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<64, 128, 64, 4, cutlass::bfloat16_t> >, false, true, false>(pytorch_flash::Flash_fwd_params)"
)
FLASH_BACKWARD = (
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>, false>"
    "(pytorch_flash::Flash_bwd_params)"
)
FLASH_BACKWARD_HELPERS = (
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>(pytorch_flash::Flash_bwd_params)",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>(pytorch_flash::Flash_bwd_params)",
)
CUDNN_FORWARD = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
CUDNN_BACKWARD = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_28_64x128x128_4x1x1_kernel0_0"
EFFICIENT_FORWARD = (
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)"
)
EFFICIENT_BACKWARD = (
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80"
    "(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>::Params)"
)


def kernels(*names: str, dur: int = 1) -> list[dict[str, Any]]:
    return [{"cat": "kernel", "name": name, "dur": dur} for name in names]


def operators(*names: str, dtype: str = "float") -> list[dict[str, Any]]:
    return [{"cat": "cpu_op", "name": name, "args": {"Input type": [dtype, dtype]}} for name in names]


# --- traces of a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward", "shown"),
    [
        (FLASH_FORWARD, (FLASH_BACKWARD, *FLASH_BACKWARD_HELPERS), "pytorch_flash::flash_fwd_kernel"),
        (CUDNN_FORWARD, (CUDNN_BACKWARD,), CUDNN_FORWARD),
        (EFFICIENT_FORWARD, (EFFICIENT_BACKWARD,), "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"),
    ],
    ids=["flash", "cudnn", "efficient"],
)
def test_the_forward_kernel_is_named_however_many_the_backward_has(
    forward: str, backward: tuple[str, ...], shown: str
) -> None:
    around = kernels("void at::native::vectorized_layer_norm_kernel<float>(int)", "sm90_xmma_gemm_bf16bf16_bf16f32")
    events = around + kernels(*backward) * 9 + kernels(forward) * 2 + operators("aten::bmm") * 5
    assert attention_kernel(events) == shown
    assert attention_kernel(list(reversed(events))) == shown


@pytest.mark.parametrize("backward", [FLASH_BACKWARD, *FLASH_BACKWARD_HELPERS, CUDNN_BACKWARD, EFFICIENT_BACKWARD])
def test_a_backward_kernel_alone_is_no_proof(backward: str) -> None:
    assert attention_kernel(kernels(backward)) is None


def test_kernels_that_inductor_fused_around_attention_are_not_attention() -> None:
    """Inductor names a Triton kernel after the operators whose element-wise neighbours it fused."""
    around = kernels("triton_poi_fused__scaled_dot_product_flash_attention_transpose_view_3") * 50
    assert attention_kernel(around + kernels(FLASH_FORWARD) * 24) == "pytorch_flash::flash_fwd_kernel"


def test_on_a_gpu_plain_attention_is_batched_matmuls() -> None:
    events = kernels("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "softmax_warp_forward") + operators("aten::bmm")
    assert attention_kernel(events) == "bmm + softmax"


def test_of_the_operators_the_backend_counts_and_not_the_front_door() -> None:
    names = ("aten::scaled_dot_product_attention",) * 9 + (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    assert attention_kernel(operators(*names)) is None
    backend = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert attention_kernel(operators(*names, backend)) == backend


def test_nothing_seen_nothing_said() -> None:
    events = [{"name": "no category"}, {"cat": "kernel"}, {"ph": "M"}, *operators("aten::add")]
    assert attention_kernel(events) is None
    assert matmul_dtypes(events) == ()
    assert longest_matmul(events) is None


def test_dtypes_of_matmuls_most_frequent_first() -> None:
    events = (
        operators("aten::mm", "aten::addmm", "aten::bmm", dtype="c10::BFloat16")
        + operators("aten::mm")
        + operators("aten::add", "aten::linear", "aten::matmul", dtype="double") * 9  # no leaves
        + [{"cat": "cpu_op", "name": "aten::mm", "args": {}}]
    )
    assert matmul_dtypes(events) == ("bf16", "fp32")


def test_a_dtype_without_a_short_name_keeps_its_own() -> None:
    assert matmul_dtypes(operators("aten::mm", dtype="c10::Float8_e8m0fnu")) == ("c10::Float8_e8m0fnu",)


def test_the_matmul_that_took_longest_is_named() -> None:
    often = kernels("sm80_xmma_gemm_small", dur=2) * 10
    seldom = kernels("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(Params)", dur=15) * 2
    assert longest_matmul(often + seldom + kernels("softmax", dur=1000)) == "cutlass_80_tensorop_s1688gemm"


@pytest.mark.parametrize(
    "attention",
    [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_traits<cutlass::bfloat16_t>>()",
        "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    ],
    ids=["flash", "flash-without-its-namespace", "memory-efficient"],
)
def test_attention_written_with_cutlass_is_no_matmul(attention: str) -> None:
    assert longest_matmul(kernels(attention, dur=1000)) is None
    assert longest_matmul(kernels(attention, dur=1000) + kernels("nvjet_tst_256x128", dur=1)) == "nvjet_tst_256x128"


# --- profiles of this machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "attention", "dtypes"),
    [
        (Plan(), "bmm + softmax", ("fp32",)),
        (Plan(attention="flash"), "aten::_scaled_dot_product_flash_attention_for_cpu", ("fp32",)),
        (Plan(autocast="bf16"), "bmm + softmax", ("bf16",)),
        (Plan(autocast="bf16", attention="flash"), "aten::_scaled_dot_product_flash_attention_for_cpu", ("bf16",)),
    ],
    ids=["naive", "flash", "naive bf16", "flash bf16"],
)
def test_a_row_shows_its_own_kernels(train: Train, plan: Plan, attention: str, dtypes: tuple[str, ...]) -> None:
    training = train(plan)
    proof, _ = prove(training, plan, CPU, step_seconds=0.5)
    assert proof.attention == attention
    assert proof.matmul_dtypes == dtypes
    assert proof.graph_breaks is None
    assert proof.syncs_per_step is None
    assert proof.groups is not None
    assert sum(proof.groups.values()) == pytest.approx(0.5)
    assert {"tensor contraction", "attention", "normalisation", "loss", "optimizer"} <= set(proof.groups)
    assert max(proof.groups.values()) < 0.5


def test_one_matmul_that_was_left_in_fp32_shows(train: Train) -> None:
    training = train(Plan(autocast="bf16"))
    head = training.model.lm_head
    head.forward = without_autocast(head.forward)  # type: ignore[method-assign]
    assert matmul_dtypes(profile_steps(training, CPU)) == ("bf16", "fp32")


def without_autocast(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    return run


@pytest.fixture
def counters() -> Iterator[None]:
    """A worker compiles once in its life; here the counters are everybody's."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compiled_without_a_compiler(training: Training) -> None:
    """Dynamo captures the graph as always; nothing is compiled from it, which is what would take the time."""
    training.step.loss_of = torch.compile(training.step.loss_of, dynamic=False, backend="eager")


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_our_model_is_one_graph(train: Train, counters: None, attention: str) -> None:
    from torch._dynamo.utils import counters as counted

    training = train(Plan(attention=attention, tied=True, vocab_multiple=128))
    compiled_without_a_compiler(training)
    training.step(next(training.batches))
    training.step(next(training.batches))
    assert graph_breaks() == 0
    assert counted["stats"]["unique_graphs"] == 1


# Dynamo itself looks at .grad of what crosses a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_break_is_counted(train: Train, counters: None) -> None:
    training = train(Plan())
    attend = training.model.h[1].attn.attend

    def broken(*words: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return attend(*words)

    training.model.h[1].attn.attend = broken
    compiled_without_a_compiler(training)
    training.step(next(training.batches))
    assert graph_breaks() > 0
    assert prove(training, Plan(compile=True), CPU, step_seconds=0.5)[0].graph_breaks == graph_breaks()
