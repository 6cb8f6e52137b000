"""8-bit products with GELU at their ends, by QuACK: against fp64 of the same 8-bit numbers, every tile and both ways
back, in a graph, and inside a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from redline.core.workload import Shape
from redline.kernels.gelu_backward import slope_of, times_slope_
from redline.kernels.gelu_products import HOPPER, is_installed
from redline.kernels.narrow_products import (
    narrow_gelu_product,
    narrow_gelu_product_backward,
    narrow_gelu_product_backward_in_both,
    narrow_gelu_product_in_both,
)
from redline.model.fp8 import operands, scale_beforehand
from redline.model.gpt import GPT, initialise
from redline.model.loss import next_token_loss
from redline.model.tuned import tune_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed(), reason="quack-kernels is not installed"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="it is for Hopper"
    ),
]
# bf16 rounds by 2^-9 at most; the tensor core adds 8-bit products up in fewer bits than fp32.
BOUND = 8e-3
SIZES = [(3, 16, 8), (128, 64, 192), (1000, 80, 200), (129, 768, 3072), (4099, 1600, 6400), (40_000, 768, 3072)]
every_size = pytest.mark.parametrize(("rows", "width", "wide"), SIZES)
Words = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def forget() -> Iterator[Any]:
    """A fallback would pass as well: some plan must have been made."""
    from redline.kernels import narrow_products_quack as by_quack

    by_quack.FORWARD.clear()
    by_quack.BACKWARD.clear()
    yield by_quack
    assert by_quack.FORWARD or by_quack.BACKWARD


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(*sizes: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*sizes, device="cuda")).bfloat16()


def apart(rows: int, width: int, wide: int) -> Words:
    """8-bit operands whose rows have scales that differ by octaves."""
    spread = [torch.logspace(-1, 1, size, device="cuda")[:, None] for size in (rows, wide)]
    return operands(spread[0] * drawn(rows, width), spread[1] * drawn(wide, width, scale=width**-0.5))


def in_fp64(rows: torch.Tensor, others: torch.Tensor, inverse: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (rows.double() * inverse) @ (others.double() * other).t()


@every_size
def test_gelu_of_a_product_is_that_of_fp64(rows: int, width: int, wide: int, forget: Any) -> None:
    words, bias = apart(rows, width, wide), drawn(wide)
    wanted = in_fp64(*words) + bias.double()
    ways: list[Callable[..., Words]] = [narrow_gelu_product, *forget.forward_ways(*words, bias)]
    for way in ways:
        slope, active = way(*words, bias)
        assert slope.dtype == active.dtype == torch.bfloat16
        assert off(slope, slope_of(wanted)) < BOUND
        assert off(active, F.gelu(wanted, approximate="tanh")) < BOUND
        for row in (0, rows // 2, rows - 1):  # each by itself: the largest would hide the others
            assert off(slope[row], slope_of(wanted[row])) < BOUND


@every_size
def test_gradient_and_sums_are_those_of_fp64(rows: int, width: int, wide: int, forget: Any) -> None:
    words, slope = apart(rows, width, wide), drawn(rows, wide, scale=3)
    kept = slope.clone()
    wanted = in_fp64(*words)
    wanted_sums = times_slope_(wanted, slope.double())
    ways: list[Callable[..., Words]] = [narrow_gelu_product_backward, *forget.backward_ways(*words, slope)]
    for way in ways:
        gradient, sums = way(*words, slope)
        assert gradient.dtype == torch.bfloat16
        assert gradient.is_contiguous()
        assert sums.dtype == torch.float32
        assert off(gradient, wanted) < BOUND
        assert off(sums, wanted_sums) < BOUND
        assert torch.equal(slope, kept)


@every_size
@pytest.mark.parametrize("back", [False, True])
def test_8_bits_besides_are_those_of_fp64(rows: int, width: int, wide: int, back: bool, forget: Any) -> None:
    """Of random numbers a factor made beforehand loses a few octaves, not the format's precision."""
    wide = -(-wide // 16) * 16
    x, weight = drawn(rows, width), drawn(wide, width, scale=width**-0.5)
    last = drawn(rows, wide, scale=3) if back else drawn(wide, scale=0.1)
    words = operands(x, weight)
    factors = scale_beforehand(x, weight, None if back else last)
    wanted = in_fp64(*words)
    if back:
        times_slope_(wanted, last.double())
    else:
        wanted = F.gelu(wanted + last.double(), approximate="tanh")
    ways = (forget.backward_ways if back else forget.forward_ways)(*words, last, factors)
    operator = narrow_gelu_product_backward_in_both if back else narrow_gelu_product_in_both
    for way in [operator, *ways]:
        first, second, narrow = way(*words, last, factors)
        assert off(first if back else second, wanted) < BOUND
        assert narrow.dtype == words[0].dtype
        assert narrow.is_contiguous()
        assert off(narrow.double() / factors, wanted) < 3.5e-2


def test_what_is_no_number_stays_in_its_row() -> None:
    above, slope = drawn(256, 64), drawn(256, 192)
    above[7, 3] = torch.nan
    words = operands(above, drawn(192, 64))
    gradient, sums = narrow_gelu_product_backward(*words, slope)
    assert gradient[7].isnan().all()
    assert sums.isnan().all()
    assert not torch.cat((gradient[:7], gradient[8:])).isnan().any()
    forward, _ = narrow_gelu_product(*words, drawn(192))
    assert forward[7].isnan().all()
    assert not torch.cat((forward[:7], forward[8:])).isnan().any()


@pytest.mark.parametrize("back", [False, True])
def test_a_graph_may_be_captured_and_nothing_waits(back: bool) -> None:
    words = (*apart(256, 128, 64), drawn(256, 64) if back else torch.zeros_like(drawn(64)))
    run: Callable[..., Words] = narrow_gelu_product_backward if back else narrow_gelu_product
    wanted = run(*words)  # compiles, and chooses
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(*words)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(again, wanted, strict=True):
        assert torch.equal(one, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*words)
    words[2].mul_(2)  # the factor of every row
    graph.replay()
    torch.testing.assert_close(found[0], 2 * wanted[0])


@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
@pytest.mark.parametrize("way", ["tuned", "fused", "MLPs"])
def test_a_compiled_models_gradients_are_near_those_in_16_bits(way: str, graphs: bool, forget: Any) -> None:
    fused = way != "tuned"
    shape = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=512, sequence=128)
    tokens = torch.randint(shape.vocab, (8, shape.sequence), device="cuda")
    found = []
    for narrow in (False, True):
        with torch.device("cuda"):
            model = GPT(shape, fused=torch.bfloat16, attention="flash")
        initialise(model, seed=3)
        tune_layers(model.h, torch.bfloat16, fused=fused, narrow=narrow, narrow_mlp=narrow and way == "MLPs")
        torch.compiler.reset()
        run = torch.compile(partial(loss_of, model), options={"triton.cudagraphs": graphs}, fullgraph=True)
        for _ in range(4):  # graphs are recorded after a warm-up, and replayed after that
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens)
            loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    assert bool(forget.FORWARD) is bool(forget.BACKWARD) is fused
    forget.FORWARD["seen"] = forget.FORWARD  # without fused products there is nothing of QuACK's
    for name, gradient in found[0].items():
        assert off(found[1][name], gradient.double()) < 0.12, name
    whole = [torch.cat([gradient.flatten() for gradient in each.values()]) for each in found]
    assert 5e-3 < off(whole[1], whole[0].double()) < (0.07 if way == "MLPs" else 0.055)  # on a CPU 0.058 and 0.045


def loss_of(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(tokens), tokens)
