"""cuDNN forward and flash-attn-4 backward: against the formulas in fp64, against torch's, compiled and recorded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.kernels.flash4_attention import flash4_attention, flash4_attention_backward, is_there, takes
from redline.kernels.packed_attention import plain_packed_attention, plain_packed_attention_backward
from redline.model.fused import PackedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_there(), reason="flash-attn-4 is not installed"),
]
SIZES = [(64, 1024, 12, 64), (2, 128, 4, 64), (3, 200, 2, 128), (1, 77, 3, 32), (5, 1000, 1, 64), (2, 300, 2, 32)]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is taken on Hopper only")


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(
    sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k and v side by side, and the gradient from above."""
    batch, sequence, heads, head = sizes
    qkv = torch.randn(batch, sequence, 3 * heads * head, device="cuda") * scale
    return qkv.to(dtype), torch.randn(batch, sequence, heads * head, device="cuda").to(dtype)


def true(qkv: torch.Tensor, above: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In fp64: the output, the sums' logarithms and the gradient."""
    out, sums = plain_packed_attention(qkv.double(), heads)
    return out, sums, plain_packed_attention_backward(above.double(), qkv.double(), out, sums, heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_and_its_gradients_are_the_formulas(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    qkv, above = drawn(sizes, dtype)
    heads = sizes[2]
    assert takes(qkv, heads)
    out, stats = flash4_attention(qkv, heads)
    assert out.is_contiguous()
    gradient = flash4_attention_backward(above, qkv, out, stats, heads)
    last = slice(-2, None)  # sequences: fp64 squares of all would not fit
    wanted, sums, of_qkv = true(qkv[last], above[last], heads)
    assert off(out[last], wanted) < 5e-3
    assert off(stats[last], sums) < 1e-4
    for found, part in zip(gradient[last].chunk(3, dim=2), of_qkv.chunk(3, dim=2), strict=True):
        assert off(found, part) < 1e-2
    assert torch.isfinite(gradient).all()


def test_heads_that_the_kernel_gets_wrong_go_by_the_formulas() -> None:
    qkv, above = drawn((2, 96, 2, 16))
    assert not takes(qkv, 2)
    out, stats = flash4_attention(qkv, 2)
    gradient = flash4_attention_backward(above, qkv, out, stats, 2)
    assert off(gradient, true(qkv, above, 2)[2]) < 1e-2


def by_cudnn_alone(qkv: torch.Tensor, above: torch.Tensor, heads: int) -> torch.Tensor:
    leaf = qkv.clone().requires_grad_()
    q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in leaf.chunk(3, dim=2))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return torch.autograd.grad(out, leaf, above)[0]


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_flat_and_sharp_softmaxes(scale: float) -> None:
    """Weights that are all alike, and weights of which one is all: scores go to thousands. There the gradients of q and
    k are small differences of large numbers, for cuDNN's own backward as well."""
    qkv, above = drawn((2, 200, 2, 64), scale=scale)
    out, stats = flash4_attention(qkv, 2)
    gradient = flash4_attention_backward(above, qkv, out, stats, 2)
    wanted, _, of_qkv = true(qkv, above, 2)
    assert off(out, wanted) < 5e-3
    cudnns = by_cudnn_alone(qkv, above, 2)
    for found, other, part in zip(*(each.chunk(3, dim=2) for each in (gradient, cudnns, of_qkv)), strict=True):
        assert torch.isfinite(found).all()
        assert off(found, part) < 2 * off(other, part) + 5e-3


def test_tokens_behind_the_last_gradient_get_none() -> None:
    qkv, above = drawn((2, 200, 2, 64))
    above[:, 130:] = 0
    out, stats = flash4_attention(qkv, 2)
    gradient = flash4_attention_backward(above, qkv, out, stats, 2)
    assert not gradient[:, 130:].any()
    assert gradient[:, :130].any()


def attended(qkv: torch.Tensor) -> torch.Tensor:
    mixed: torch.Tensor = PackedAttention.apply(qkv * 1, 4, "flash4")  # type: ignore[no-untyped-call]
    return mixed * 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_compiled_step_is_the_eager_one(mode: str) -> None:
    """'reduce-overhead' records and replays CUDA graphs: other numbers in the same place must give other gradients."""
    compiled = torch.compile(attended, mode=mode, fullgraph=True)
    for _ in range(5):
        qkv, above = drawn((2, 256, 4, 64))
        found = []
        for run in (attended, compiled):
            leaf = qkv.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            run(leaf).backward(above)
            found.append(leaf.grad)
        assert found[0] is not None
        assert off(found[1], found[0].double()) < 5e-3  # dq is added up in whatever order


def test_a_recorded_graph_computes_again() -> None:
    qkv, above = drawn((2, 256, 4, 64))

    def run() -> torch.Tensor:
        return flash4_attention_backward(above, qkv, *flash4_attention(qkv, 4), 4)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient = run()
    fresh, fresh_above = drawn((2, 256, 4, 64))
    qkv.copy_(fresh)
    above.copy_(fresh_above)
    graph.replay()
    assert off(gradient, true(fresh, fresh_above, 4)[2]) < 1e-2


def test_deterministic_steps_repeat_every_bit() -> None:
    qkv, above = drawn((4, 1024, 4, 64))
    out, stats = flash4_attention(qkv, 4)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (flash4_attention_backward(above, qkv, out, stats, 4) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first, other) for other in others)
    assert off(first, true(qkv, above, 4)[2]) < 1e-2
