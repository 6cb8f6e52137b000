"""Traces by hand: every microsecond of the window is accounted for once, and goes where a person would put it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.core import profile as names
from redline.core.profile import Part
from redline.engine.profiling_groups import group_of_kernel, group_of_operators
from redline.engine.profiling_summary import fit_parts, kernels_of, launches_of, modules_of, parts_of, work_factor
from redline.engine.profiling_timeline import DATA_RANGE, MODULE, STEP, WINDOW, Segment, read_timeline, without_overlap
from redline.engine.profiling_work import work_of
from redline.predict import operations

MAIN, AUTOGRAD, STREAM, COPIES = 1, 2, 7, 8


def event(name: str, category: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "pid": 1,
        "tid": thread,
        "args": arguments,
    }


def operator(name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> dict[str, Any]:
    return event(name, "cpu_op", start, end, thread, **arguments)


def mark(name: str, start: float, end: float) -> dict[str, Any]:
    return event(name, "user_annotation", start, end)


def launch(at: float, correlation: int, thread: int = MAIN) -> dict[str, Any]:
    return event("cudaLaunchKernel", "cuda_runtime", at, at + 1, thread, correlation=correlation)


def kernel(name: str, start: float, end: float, correlation: int, stream: int = STREAM) -> dict[str, Any]:
    return event(name, "kernel", start, end, stream, correlation=correlation)


MATRICES = {"Input Dims": [[8, 4], [4, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


def gpu_step() -> list[dict[str, Any]]:
    """One step of 100 us on a GPU: a batch, a product, its gradient in autograd's thread, an update, and a wait.

    host    |data 0-10|step 10-80: mm, backward, update, item waits to 78|          window to 100
    device            20 gemm 40   45 gemm 60   62 adam 70
    """
    return [
        mark(WINDOW, 0, 100),
        mark(DATA_RANGE, 0, 10),
        mark(STEP, 10, 80),
        mark(MODULE + "h.0.mlp", 11, 18),
        operator("aten::mm", 12, 16, **{"Sequence number": 5}, **MATRICES),
        launch(13, 100),
        kernel("nvjet_gemm", 20, 40, 100),
        operator("autograd::engine::evaluate_function: MmBackward0", 20, 30, AUTOGRAD, **{"Sequence number": 5}),
        operator("aten::mm", 22, 28, AUTOGRAD, **MATRICES),
        launch(24, 101, AUTOGRAD),
        kernel("nvjet_gemm", 45, 60, 101),
        mark("Optimizer.step#AdamW.step", 40, 50),
        operator("aten::_fused_adamw_", 42, 48),
        launch(44, 102),
        kernel("multi_tensor_apply_kernel", 62, 70, 102),
        operator("aten::item", 60, 79),
        event("cudaStreamSynchronize", "cuda_runtime", 61, 78),
        {"ph": "M", "name": "process_name"},  # what a trace holds besides
    ]


def groups_of(events: list[dict[str, Any]], device: str) -> dict[str, float]:
    """Microseconds of a step of 100, over all phases."""
    found: dict[str, float] = defaultdict(float)
    for part in parts_of(read_timeline(events), 100e-6, device=device):
        found[part.group] += part.seconds * 1e6
    return dict(found)


# on a GPU


def test_a_gpu_step_by_group_and_phase():
    timeline = read_timeline(gpu_step())  # from its first kernel on: what was before is the profiler's beginning
    parts = {(part.phase, part.group): part.seconds * 1e6 for part in parts_of(timeline, 80e-6, device="cuda")}
    assert parts == pytest.approx(
        {
            (names.FORWARD, names.CONTRACTION): 20,
            (names.BACKWARD, names.IDLE): 5,  # of the phase that it delays
            (names.BACKWARD, names.CONTRACTION): 15,
            (names.UPDATE, names.IDLE): 2 + 30,
            (names.UPDATE, names.OPTIMIZER): 8,
        }
    )


def test_a_gpu_waits_for_data_between_steps_and_not_before_the_first():
    events = [
        mark(WINDOW, 0, 100),
        *(mark(DATA_RANGE, start, start + 20) for start in (0, 50)),
        *(mark(STEP, start, start + 10) for start in (20, 70)),
        *(
            event
            for start in (25, 75)
            for event in (launch(start - 3, start), kernel("nvjet_gemm", start, start + 15, start))
        ),
    ]
    parts = {part.group: part.seconds * 1e6 for part in parts_of(read_timeline(events), 50e-6, device="cuda")}
    # Of 75: two kernels of 15; 20 for the second batch and 25 for nothing, which fill what a step has beside its work.
    assert parts == pytest.approx({names.CONTRACTION: 15, names.DATA_WAIT: 35 * 20 / 45, names.IDLE: 35 * 25 / 45})


def test_the_gradient_belongs_to_the_module_of_its_forward():
    timeline = read_timeline(gpu_step())
    (row,) = modules_of(timeline, 1.0)
    assert row.module == "h.0.mlp"
    assert (row.forward, row.backward) == pytest.approx((20e-6, 15e-6))


def test_idle_time_behind_a_synchronisation_is_told_apart():
    timeline = read_timeline(gpu_step())
    assert timeline.sync_idle_seconds == pytest.approx(30e-6)  # 70 to 100: the wait ended at 78
    assert timeline.host_seconds == pytest.approx((10 + 70 - 17) * 1e-6)


def test_kernels_carry_the_work_of_the_operator_that_launched_them():
    (gemm, adam) = kernels_of(read_timeline(gpu_step()), 1.0, device="cuda")
    assert (gemm.calls, gemm.seconds, gemm.flops) == pytest.approx((2, 35e-6, 2 * 2 * 8 * 4 * 16))
    assert gemm.bytes == 2 * 2 * (8 * 4 + 4 * 16 + 8 * 16)
    assert gemm.dtype == "bf16"
    assert (adam.name, adam.flops, adam.bytes) == ("multi_tensor_apply_kernel", None, None)
    assert launches_of(read_timeline(gpu_step()), device="cuda") == 3


def test_an_operators_work_goes_to_its_longest_kernel_once():
    events = [
        mark(WINDOW, 0, 100),
        mark(STEP, 0, 90),
        operator("aten::mm", 0, 10, **MATRICES),
        launch(1, 1),
        launch(3, 2),
        kernel("nvjet_gemm", 10, 40, 1),
        kernel("splitKreduce_kernel", 40, 45, 2),
    ]
    gemm, reduction = kernels_of(read_timeline(events), 1.0, device="cuda")
    assert gemm.flops == 2 * 8 * 4 * 16
    assert (reduction.name, reduction.flops, reduction.bytes) == ("splitKreduce_kernel", None, None)


def test_communication_behind_computation_costs_nothing():
    events = [
        mark(WINDOW, 0, 100),
        mark(STEP, 0, 90),
        operator("aten::mm", 0, 10),
        launch(1, 1),
        kernel("nvjet_gemm", 20, 60, 1),
        kernel("ncclDevKernel_AllReduce", 10, 80, 9, stream=COPIES),
    ]
    groups = groups_of(events, "cuda")
    assert groups[names.CONTRACTION] == pytest.approx(40)
    assert groups[names.COMMUNICATION] == pytest.approx(10 + 20)


def test_a_collective_is_communication_wherever_it_is_asked_for():
    """Clipping sums norms over ranks within the update, and a tensor group its attention's outputs within that."""
    events = [
        *gpu_step(),
        operator("_c10d_functional::all_reduce", 51, 54),
        launch(52, 103),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 72, 79, 103),
        mark(MODULE + "h.0.attn", 11.0, 11.9),
        operator("aten::bmm", 11.1, 11.3),
        operator("aten::_softmax", 11.3, 11.5),
        operator("_c10d_functional::all_reduce", 11.6, 11.8, **{"Sequence number": 4}),
        event("cudaLaunchKernelExC", "cuda_runtime", 11.7, 11.75, correlation=104),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 15, 18, 104),
    ]
    found = {call.name: call.group for call in kernels_of(read_timeline(events), 1.0, device="cuda")}
    assert {group for name, group in found.items() if "nccl" in name} == {names.COMMUNICATION}
    assert groups_of(events, "cuda")[names.OPTIMIZER] == pytest.approx(8, rel=0.3)


def test_attention_written_out_is_told_from_other_products():
    module = mark(MODULE + "h.0.attn", 0, 40)
    events = [
        mark(WINDOW, 0, 100),
        mark(STEP, 0, 100),
        module,
        mark(MODULE + "h.0.attn.c_attn", 0, 10),
        operator("aten::addmm", 1, 9),
        operator("aten::bmm", 10, 20),
        operator("aten::div", 20, 24),
        operator("aten::_softmax", 24, 30),
        mark(MODULE + "h.0.ln_1", 50, 60),
        operator("aten::native_layer_norm", 50, 60),
    ]
    groups = groups_of(events, "cpu")
    assert groups[names.ATTENTION] == pytest.approx(20)
    assert groups[names.CONTRACTION] == pytest.approx(8)
    assert groups[names.NORMALISATION] == pytest.approx(10)


def test_compiled_attention_has_no_module_and_is_found_all_the_same():
    events = [
        mark(WINDOW, 0, 100),
        mark(STEP, 0, 100),
        operator("aten::bmm", 10, 20),
        operator("graph_0_cpp_fused__softmax_div_masked_fill_2", 20, 30),
        operator("graph_0_cpp_fused_native_layer_norm_3", 30, 35),
    ]
    groups = groups_of(events, "cpu")
    assert groups[names.ATTENTION] == pytest.approx(20)
    assert groups[names.NORMALISATION] == pytest.approx(5)


def test_the_gradient_of_the_loss_belongs_to_it_whatever_computes_it():
    events = [
        mark(WINDOW, 0, 100),
        mark(STEP, 0, 100),
        operator("aten::cross_entropy_loss", 0, 20),
        operator("aten::mul", 5, 15, **{"Sequence number": 9}),  # label smoothing
        operator("autograd::engine::evaluate_function: MulBackward0", 30, 50, **{"Sequence number": 9}),
        operator("aten::mul", 32, 48),
        operator("autograd::engine::evaluate_function: MulBackward0", 50, 70, **{"Sequence number": 7}),
        operator("aten::mul", 52, 68),
    ]
    groups = groups_of(events, "cpu")
    assert groups[names.LOSS] == pytest.approx(20 + 16)
    assert groups[names.ELEMENTWISE] == pytest.approx(16)


def test_a_modules_name_decides_no_group():
    events = [
        mark(WINDOW, 0, 20),
        mark(STEP, 0, 20),
        mark(MODULE + "layer_norm.softmax", 0, 20),
        operator("aten::mm", 0, 20),
    ]
    (part,) = parts_of(read_timeline(events), 20e-6, device="cpu")
    assert part.group == names.CONTRACTION


# on a CPU


def test_operators_on_a_cpu_own_what_their_children_do_not():
    events = [
        mark(WINDOW, 0, 100),
        mark(DATA_RANGE, 0, 10),
        operator("aten::copy_", 2, 6),  # making a batch in this process is waiting for data
        mark(STEP, 10, 100),
        operator("aten::linear", 10, 50),  # says nothing: the product inside does
        operator("aten::addmm", 20, 45),
        operator("aten::copy_", 22, 25),  # part of the product
        operator("aten::view", 60, 62),
        operator("aten::gelu", 70, 80),
    ]
    groups = groups_of(events, "cpu")
    expected = {names.DATA_WAIT: 10, names.CONTRACTION: 25, names.ELEMENTWISE: 10, names.IDLE: 55}
    assert groups == pytest.approx(expected)


def test_a_step_without_a_backward_pass_is_all_forward():
    events = [mark(WINDOW, 0, 10), mark(STEP, 0, 10), operator("aten::gelu", 2, 8)]
    assert {part.phase for part in parts_of(read_timeline(events), 1e-5, device="cpu")} == {names.FORWARD}


# sums


spans = st.tuples(st.floats(-20, 120), st.floats(0.1, 60), st.sampled_from([STREAM, COPIES]), st.booleans())


@given(st.lists(spans, max_size=30), st.floats(10e-6, 300e-6))
def test_parts_add_up_to_the_step_whatever_ran(spans, step_seconds):
    events = [mark(WINDOW, 0, 100), mark(DATA_RANGE, 0, 15), mark(STEP, 15, 95)]
    for number, (start, length, stream, communicates) in enumerate(spans):
        name = "ncclDevKernel" if communicates else "nvjet_gemm"
        events.append(kernel(name, start, start + length, number, stream))
    timeline = read_timeline(events)
    first = min((start for start, *_ in spans if 0 <= start < 100), default=0)
    assert sum(segment.seconds for segment in timeline.segments) == pytest.approx((100 - first) * 1e-6)
    for before, after in zip(timeline.segments, timeline.segments[1:], strict=False):
        assert before.end == after.start
    parts = parts_of(timeline, step_seconds, device="cuda")
    assert sum(part.seconds for part in parts) == pytest.approx(step_seconds)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), max_size=20))
def test_segments_without_overlap_cover_what_the_segments_covered(spans):
    segments = [Segment(start, start + length, names.FORWARD, names.CONTRACTION) for start, length in spans]
    flat = list(without_overlap(segments, 0, 100))
    moments = [index / 10 + 0.05 for index in range(1000)]

    def covered(list_of, moment):
        return any(each.start <= moment < each.end for each in list_of)

    assert all(covered(flat, moment) == covered(segments, moment) for moment in moments)


def part(group: str, seconds: float) -> Part:
    return Part(phase=names.FORWARD, group=group, seconds=seconds)


def test_the_profiler_slows_the_host_and_not_the_kernels():
    measured = [part(names.CONTRACTION, 6.0), part(names.IDLE, 3.0), part(names.DATA_WAIT, 1.0)]
    assert [each.seconds for each in fit_parts(measured, 8.0, keep_work=True)] == pytest.approx([6.0, 1.5, 0.5])
    assert [each.seconds for each in fit_parts(measured, 8.0, keep_work=False)] == pytest.approx([4.8, 2.4, 0.8])
    # Nothing waits: there is nothing to stretch but the work.
    assert [each.seconds for each in fit_parts([part(names.CONTRACTION, 6.0)], 8.0, keep_work=True)] == [8.0]
    # Kernels that took longer than the whole step without a profiler are scaled: a sum must stay a sum.
    assert [each.seconds for each in fit_parts(measured, 5.0, keep_work=True)] == pytest.approx([3.0, 1.5, 0.5])


def test_kernels_scale_as_the_parts_do():
    timeline = read_timeline(gpu_step())
    assert work_factor(timeline, 100e-6, device="cuda") == 1.0
    assert work_factor(timeline, 40e-6, device="cpu") == pytest.approx(0.5)
    assert work_factor(timeline, 16e-6, device="cuda") == pytest.approx(0.2)


# names


@pytest.mark.parametrize(
    ("operators", "group"),
    [
        (["aten::linear", "aten::addmm", "aten::copy_"], names.CONTRACTION),
        (["aten::matmul", "aten::clone", "aten::copy_"], names.MOVEMENT),
        (["aten::matmul", "aten::bmm"], names.CONTRACTION),
        (["aten::layer_norm", "aten::native_layer_norm"], names.NORMALISATION),
        (["aten::cross_entropy_loss", "aten::log_softmax"], names.LOSS),
        (["autograd::engine::evaluate_function: LogSoftmaxBackward0", "aten::_log_softmax_backward_data"], names.LOSS),
        (["redline::cross_entropy_", "aten::exp_"], names.LOSS),
        (["redline::norm_backward", "aten::sum"], names.NORMALISATION),
        (["redline::gelu_backward_", "aten::sum"], names.ELEMENTWISE),
        (["redline::side_by_side"], names.ELEMENTWISE),
        (["redline::gelu_product"], names.CONTRACTION),
        (["redline::gelu_product_backward"], names.CONTRACTION),
        (["redline::packed_attention_backward"], names.ATTENTION),
        (["redline::flash4_attention_backward", "aten::empty"], names.ATTENTION),
        (["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention"], names.ATTENTION),
        (["aten::_softmax"], names.NORMALISATION),
        (["aten::masked_fill", "aten::clone", "aten::copy_"], names.ELEMENTWISE),
        (["aten::embedding", "aten::index_select"], names.MOVEMENT),
        (["Torch-Compiled Region: 0/0", "CompiledFunction", "triton_poi_fused_gelu_3"], names.ELEMENTWISE),
        (["nccl:all_reduce"], names.COMMUNICATION),
        (["autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0", "aten::t"], names.IDLE),
        (["aten::view"], names.IDLE),
        (["mine::secret"], names.OTHER),
        ([], None),
    ],
)
def test_groups_of_operators(operators, group):
    assert group_of_operators(operators) == group


@pytest.mark.parametrize(
    ("kernel_name", "group"),
    [
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_8", names.LOSS),
        ("triton_per_fused_add_native_layer_norm_2", names.NORMALISATION),
        ("triton_poi_fused__to_copy_5", names.MOVEMENT),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_add_7", names.ELEMENTWISE),
        ("triton_tem_fused_mm_12", names.CONTRACTION),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", names.CONTRACTION),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", names.CONTRACTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", names.ATTENTION),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", names.ATTENTION),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_", names.ATTENTION),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess", names.ATTENTION),
        ("Memcpy DtoH (Device -> Pinned)", names.MOVEMENT),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", names.ELEMENTWISE),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", names.COMMUNICATION),
        ("_cross_entropy_whole_row", names.LOSS),
        ("_norm_backward", names.NORMALISATION),
        ("_gelu_backward", names.ELEMENTWISE),
        ("_side_by_side", names.ELEMENTWISE),
        ("somebodys_kernel", names.OTHER),
    ],
)
def test_groups_of_kernels(kernel_name, group):
    assert group_of_kernel(kernel_name) == group


def test_groups_that_predictions_know_have_the_same_names():
    assert set(operations.GROUPS) <= set(names.GROUPS)


# work


FLOATS = {"Input type": ["float", "float"], "Input Strides": [[4, 1], [0, 1]]}


@pytest.mark.parametrize(
    ("name", "arguments", "flops", "size"),
    [
        ("aten::mm", {"Input Dims": [[3, 5], [5, 7]], "Input type": ["float"] * 2}, 2 * 3 * 5 * 7, 4 * (15 + 35 + 21)),
        (
            "aten::addmm",
            {"Input Dims": [[7], [3, 5], [5, 7]], "Input type": ["c10::Half"] * 3},
            2 * 3 * 5 * 7,
            2 * (15 + 35 + 21),
        ),
        (
            "aten::bmm",
            {"Input Dims": [[6, 3, 5], [6, 5, 7]], "Input type": ["float"] * 2},
            6 * 2 * 3 * 5 * 7,
            4 * 6 * (15 + 35 + 21),
        ),
        (
            "redline::product_and_bias",
            {"Input Dims": [[3, 5], [7, 5], [7]], "Input type": ["c10::BFloat16"] * 3},
            2 * 3 * 5 * 7,
            2 * (15 + 35 + 21),
        ),
        (
            "redline::gelu_product",
            {"Input Dims": [[3, 5], [7, 5], [7]], "Input type": ["c10::BFloat16"] * 3},
            2 * 3 * 5 * 7,
            2 * (15 + 35 + 2 * 21),
        ),
        (
            "redline::gelu_product_backward",
            {"Input Dims": [[3, 5], [5, 7], [3, 7]], "Input type": ["c10::BFloat16"] * 3},
            2 * 3 * 5 * 7,
            2 * (15 + 35 + 2 * 21),
        ),
        ("aten::add", {"Input Dims": [[3, 4], [3, 4]], **FLOATS}, 0, 4 * (12 + 4 + 12)),  # the second is broadcast
        ("aten::copy_", {"Input Dims": [[3, 4], [3, 4]], **FLOATS}, 0, 4 * (12 + 4)),
        ("triton_poi_fused_add_0", {"kernel_num_gb": 0.5}, 0, 0.5e9),
    ],
)
def test_work_by_hand(name, arguments, flops, size):
    work = work_of(name, arguments)
    assert work is not None
    assert (work.flops, work.bytes) == (flops, size)


def test_fused_attention_counts_the_pairs_it_computes():
    dims = [[2, 3, 8, 16]] * 3
    arguments = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * 3, "Concrete Inputs": ["", "", "", "0.", "True"]}
    work = work_of("aten::_scaled_dot_product_flash_attention", arguments)
    assert work is not None
    assert work.flops == 4 * 2 * 3 * (8 * 9 / 2) * 16
    whole = {**arguments, "Concrete Inputs": ["", "", "", "0.", "False"]}
    assert work_of("aten::_scaled_dot_product_flash_attention", whole).flops == 4 * 2 * 3 * 64 * 16  # type: ignore[union-attr]


def test_fused_adamw_reads_four_lists_and_writes_three():
    lists = [[[3, 4], [5]]] * 4
    arguments = {"Input Dims": lists, "Input type": ["TensorList"] * 4}
    work = work_of("aten::_fused_adamw_", arguments, parameter_bytes=4)
    assert work is not None
    assert work.bytes == 7 * 4 * 17
    assert work_of("aten::_fused_adamw_", arguments) is None  # a trace does not tell the type of lists
    long = {**arguments, "Input Dims": [[]] * 4}
    assert work_of("aten::_fused_adamw_", long, parameter_bytes=4) is None  # nor the shapes of more than thirty tensors


@pytest.mark.parametrize("name", ["aten::nonsense", "aten::mm", "aten::_scaled_dot_product_cudnn_attention"])
def test_unknown_work_is_none(name):
    assert work_of(name, {}) is None
    assert work_of(name, {"Input Dims": [[], []], "Input type": ["", ""]}) is None
