"""Products by cuBLASLt against fp64, in every layout, with and without what is done on the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from redline.kernels import cublaslt
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.model.loss import head_loss

pytestmark = pytest.mark.gpu
SIZES = [(128, 64, 256), (1000, 72, 200), (8, 8, 8), (4096, 768, 3072)]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("turned", ["neither", "left", "right", "both"])
def test_products_are_those_of_fp64(sizes: tuple[int, int, int], turned: str, dtype: torch.dtype) -> None:
    m, k, n = sizes
    a = drawn(k, m, dtype=dtype).t() if turned in ("left", "both") else drawn(m, k, dtype=dtype)
    b = drawn(n, k, dtype=dtype).t() if turned in ("right", "both") else drawn(k, n, dtype=dtype)
    wanted = a.double() @ b.double()
    lt = cublaslt.library(torch.device("cuda:0"))
    assert lt is not None
    assert cublaslt.takes(a, b)
    lt.plans.clear()
    for out, most in ((dtype, 4e-3), (torch.float32, 1e-5)):
        found = product(a, b, out)
        assert found.dtype == out
        assert off(found, wanted) < most
        assert off(product(a, b, out), wanted) < most, "and again, by the algorithm that was chosen"
    assert len(lt.plans) == 2, "cuBLASLt did them"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bias_and_gelu_on_the_way_out(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    rows, weight, bias = (drawn(*s, dtype=torch.bfloat16) for s in ((m, k), (n, k), (n,)))
    weight = weight / 8
    wanted = rows.double() @ weight.double().t() + bias.double()
    assert off(product_and_bias(rows, weight, bias), wanted) < 4e-3
    hidden, active = product_and_gelu(rows, weight, bias)
    assert off(hidden, wanted) < 4e-3
    assert off(active, F.gelu(wanted, approximate="tanh")) < 4e-3


def test_the_fastest_of_the_proposals_is_taken() -> None:
    a, b = drawn(2048, 512, dtype=torch.bfloat16), drawn(512, 1024, dtype=torch.bfloat16)
    product(a, b, torch.bfloat16)
    lt = cublaslt.library(torch.device("cuda:0"))
    assert lt is not None
    plan = list(lt.plans.values())[-1]
    assert len(plan.seconds) > 1
    assert plan.chosen is not None


def test_a_graph_may_be_captured_and_nothing_waits() -> None:
    a, b = drawn(256, 128, dtype=torch.bfloat16), drawn(128, 64, dtype=torch.bfloat16)
    wanted = product(a, b, torch.bfloat16)  # chooses
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(a, b, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(a, b, torch.bfloat16)
    a.mul_(2)
    graph.replay()
    torch.testing.assert_close(found, 2 * wanted)


def test_the_first_call_of_all_may_warm_up_for_a_graph() -> None:
    a, b = drawn(256, 128, dtype=torch.bfloat16), drawn(128, 64, dtype=torch.bfloat16)
    lt = cublaslt.library(torch.device("cuda:0"))
    assert lt is not None
    lt.plans.clear()
    lt.workspaces.clear()
    run = torch.compile(lambda a, b: product(a, b, torch.bfloat16) + 1, options={"triton.cudagraphs": True})
    for _ in range(4):  # a graph is recorded after a warm-up, and replayed after that
        torch.compiler.cudagraph_mark_step_begin()
        found = run(a, b).clone()
    assert len(lt.workspaces) == len(lt.plans) == 1
    torch.testing.assert_close(found, a @ b + 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("pieces", [1, 8])
def test_a_tuned_heads_gradients_are_those_of_fp64(pieces: int, compiled: bool) -> None:
    vocab, rows, width, tokens = 50257, 50304, 768, 2048
    features = drawn(2, tokens // 2, width, dtype=torch.bfloat16).requires_grad_()
    weight = 0.05 * torch.randn(rows, width, device="cuda")
    weight.requires_grad_()
    targets = torch.randint(vocab, (2, tokens // 2), device="cuda")
    x, w = (tensor.detach().double().requires_grad_() for tensor in (features, weight))
    wanted_loss = F.cross_entropy((x @ w[:vocab].t()).flatten(0, 1), targets.flatten())
    wanted = torch.autograd.grad(wanted_loss, (x, w))
    run: Callable[..., torch.Tensor] = torch.compile(head_loss, fullgraph=True) if compiled else head_loss
    lt = cublaslt.library(torch.device("cuda:0"))
    assert lt is not None
    lt.plans.clear()
    loss = run(features, weight, targets, vocab=vocab, pieces=pieces, dtype=torch.bfloat16, tuned=True)
    found = torch.autograd.grad(loss, (features, weight))
    assert len(lt.plans) == 3, "cuBLASLt did them"
    assert abs(loss.item() - wanted_loss.item()) < 5e-3
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32]
    for mine, other in zip(found, wanted, strict=True):
        assert off(mine, other) < 1e-2
