"""Products with GELU at their ends, by QuACK: against fp64, both ways back, in a graph, and inside a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from redline.core.workload import Shape
from redline.kernels.gelu_backward import slope_of, times_slope_
from redline.kernels.gelu_products import HOPPER, gelu_product, gelu_product_backward, is_installed
from redline.model.gpt import GPT, initialise
from redline.model.loss import next_token_loss
from redline.model.tuned import tune_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed(), reason="quack-kernels is not installed"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="it was tried on Hopper"
    ),
]
NARROW = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
SIZES = [(3, 8, 8), (128, 64, 192), (1000, 72, 200), (129, 768, 3072), (4099, 1600, 6400), (40_000, 768, 3072)]
every_size = pytest.mark.parametrize(("rows", "width", "wide"), SIZES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
WAYS = ["chosen", "straight", "turned"]


@pytest.fixture(autouse=True)
def forget() -> Iterator[Any]:
    """A fallback would pass as well: some plan must have been made."""
    from redline.kernels import gelu_products_quack as by_quack

    by_quack.FORWARD.clear()
    by_quack.BACKWARD.clear()
    yield by_quack
    assert by_quack.FORWARD or by_quack.BACKWARD


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*sizes, device="cuda")).to(dtype)


def back(by_quack: Any, way: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operator, or one of the two that it chooses from."""

    def run(*words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = by_quack.Backward(way == "turned", *words)(*words)
        by_quack.BACKWARD[way] = found
        return found

    return gelu_product_backward if way == "chosen" else run


@every_dtype
@every_size
def test_gelu_of_a_product_is_that_of_fp64(rows: int, width: int, wide: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, width, dtype=dtype), drawn(wide, width, dtype=dtype, scale=2 * width**-0.5)
    bias = drawn(wide, dtype=dtype)
    slope, active = gelu_product(x, weight, bias)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert slope.dtype == active.dtype == dtype
    assert off(slope, slope_of(wanted)) < NARROW[dtype]
    assert off(active, F.gelu(wanted, approximate="tanh")) < NARROW[dtype]


@every_dtype
@every_size
@pytest.mark.parametrize("way", WAYS)
def test_gradient_and_sums_are_those_of_fp64(
    rows: int, width: int, wide: int, dtype: torch.dtype, way: str, forget: Any
) -> None:
    above, weight = drawn(rows, width, dtype=dtype), drawn(width, wide, dtype=dtype, scale=width**-0.5)
    slope = drawn(rows, wide, dtype=dtype, scale=3)
    kept = slope.clone()
    gradient, sums = back(forget, way)(above, weight, slope)
    wanted = above.double() @ weight.double()
    wanted_sums = times_slope_(wanted, slope.double())
    assert gradient.dtype == dtype
    assert gradient.is_contiguous()
    assert sums.dtype == torch.float32
    assert off(gradient, wanted) < NARROW[dtype]
    assert off(sums, wanted_sums) < 1e-3
    assert torch.equal(slope, kept)


@pytest.mark.parametrize("way", WAYS)
def test_where_gelu_is_straight_or_flat(way: str, forget: Any) -> None:
    above, weight = drawn(256, 64), drawn(64, 192, scale=0.1)
    slope = drawn(256, 192)
    slope[:, 0], slope[:, 1], slope[:, 2] = 1, 0, 0.5
    gradient, sums = back(forget, way)(above, weight, slope)
    product = above.double() @ weight.double()
    assert (gradient[:, 1] == 0).all()
    assert sums[1] == 0
    for column, factor in ((0, 1.0), (2, 0.5)):
        wanted = factor * product[:, column]
        assert off(gradient[:, column], wanted) < NARROW[torch.bfloat16]
        assert abs(sums[column].item() - wanted.sum().item()) < 1e-3 * wanted.abs().sum().item()


def test_gelu_of_large_numbers() -> None:
    x, weight, bias = torch.zeros(256, 64), torch.zeros(192, 64), torch.linspace(-3e4, 3e4, 192)
    bias[:4] = torch.tensor([0, 30, -30, 1e4])
    x, weight, bias = (one.to("cuda", torch.bfloat16) for one in (x, weight, bias))
    slope, active = gelu_product(x, weight, bias)
    assert torch.equal(slope, torch.where(bias == 0, 0.5, (bias > 0).float()).bfloat16().expand(256, -1))
    assert torch.equal(active, F.gelu(bias.double(), approximate="tanh").to(torch.bfloat16).expand(256, -1))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_stays_in_its_row(way: str, forget: Any) -> None:
    above, weight, slope = drawn(256, 64), drawn(64, 192), drawn(256, 192)
    above[7] = torch.nan
    gradient, sums = back(forget, way)(above, weight, slope)
    assert gradient[7].isnan().all()
    assert sums.isnan().all()
    assert not torch.cat((gradient[:7], gradient[8:])).isnan().any()


def test_two_calls_give_the_same_numbers() -> None:
    words = drawn(5000, 128), drawn(128, 512), drawn(5000, 512)
    for one, other in zip(gelu_product_backward(*words), gelu_product_backward(*words), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_graph_may_be_captured_and_nothing_waits(which: str) -> None:
    if which == "forward":
        words, run = (drawn(256, 128), drawn(64, 128), torch.zeros_like(drawn(64))), gelu_product
    else:
        words, run = (drawn(256, 128), drawn(128, 64), drawn(256, 64)), gelu_product_backward
    wanted = run(*words)  # compiles, and chooses
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*words)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*words)
    words[0].mul_(2)
    graph.replay()
    for mine, other, before in zip(found, run(*words), wanted, strict=True):
        assert torch.equal(mine, other)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
def test_a_compiled_models_gradients_are_those_without_it(graphs: bool) -> None:
    shape = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=512, sequence=128)
    tokens = torch.randint(shape.vocab, (8, shape.sequence), device="cuda")
    found = []
    for fused in (False, True):
        with torch.device("cuda"):
            model = GPT(shape, fused=torch.bfloat16, attention="flash")
        initialise(model, seed=3)
        tune_layers(model.h, torch.bfloat16, fused=fused)
        torch.compiler.reset()
        run = torch.compile(partial(loss_of, model), options={"triton.cudagraphs": graphs})
        for _ in range(4):  # graphs are recorded after a warm-up, and replayed after that
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens)
            loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    for name, gradient in found[0].items():
        assert off(found[1][name], gradient.double()) < 1e-2, name


def loss_of(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(tokens), tokens)
