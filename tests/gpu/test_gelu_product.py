"""A product with GELU's gradient on its way out, by QuACK: against fp64, in a graph, and inside a compiled model."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.gelu_backward import plain_gelu_backward_
from redline.kernels.gelu_product import HOPPER, is_installed, product_and_gelu_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed(), reason="quack-kernels is not installed"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="it was tried on Hopper"
    ),
    pytest.mark.filterwarnings("default"),  # QuACK and its DSL warn of their own affairs
]
NARROW = {torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def quack_did_it() -> None:
    """A fallback would pass as well."""
    from redline.kernels import gelu_product_quack

    gelu_product_quack.PLANS.clear()
    yield
    assert gelu_product_quack.PLANS


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(*sizes: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*sizes, device="cuda")).to(dtype)


def wanted_of(above: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = above.double() @ weight.double()
    sums = plain_gelu_backward_(gradient, hidden.double())
    return gradient, sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "hidden_width"),
    [(1, 8, 8), (128, 64, 192), (1000, 72, 200), (129, 768, 3072), (4099, 1600, 6400), (40_000, 768, 3072)],
)
def test_gradient_and_sums_are_those_of_fp64(rows: int, width: int, hidden_width: int, dtype: torch.dtype) -> None:
    above, weight = drawn(rows, width, dtype=dtype), drawn(width, hidden_width, dtype=dtype, scale=width**-0.5)
    hidden = drawn(rows, hidden_width, dtype=dtype, scale=3)
    kept = hidden.clone()
    gradient, sums = product_and_gelu_backward(above, weight, hidden)
    wanted, wanted_sums = wanted_of(above, weight, hidden)
    assert gradient.dtype == dtype
    assert sums.dtype == torch.float32
    assert off(gradient, wanted) < NARROW[dtype]
    assert off(sums, wanted_sums) < 1e-4
    assert torch.equal(hidden, kept)


def test_where_gelu_is_straight_or_flat() -> None:
    above, weight = drawn(256, 64, dtype=torch.bfloat16), drawn(64, 192, dtype=torch.bfloat16, scale=0.1)
    hidden = drawn(256, 192, dtype=torch.bfloat16)
    hidden[:, 0], hidden[:, 1], hidden[:, 2], hidden[:, 3] = 1e4, -1e4, 0, 30
    gradient, sums = product_and_gelu_backward(above, weight, hidden)
    product = above.double() @ weight.double()
    assert (gradient[:, 1] == 0).all()
    assert sums[1] == 0
    for column, slope in ((0, 1.0), (2, 0.5), (3, 1.0)):
        assert off(gradient[:, column], slope * product[:, column]) < NARROW[torch.bfloat16]
        assert off(sums[column], slope * product[:, column].sum()) < 1e-3


def test_numbers_that_are_none_stay_where_they_are() -> None:
    above, weight = drawn(256, 64, dtype=torch.bfloat16), drawn(64, 192, dtype=torch.bfloat16)
    hidden = drawn(256, 192, dtype=torch.bfloat16)
    above[7] = torch.nan
    gradient, sums = product_and_gelu_backward(above, weight, hidden)
    assert gradient[7].isnan().all()
    assert sums.isnan().all()
    assert not torch.cat((gradient[:7], gradient[8:])).isnan().any()


def test_two_calls_give_the_same_numbers() -> None:
    words = [drawn(*sizes, dtype=torch.bfloat16) for sizes in ((5000, 128), (128, 512), (5000, 512))]
    for one, other in zip(product_and_gelu_backward(*words), product_and_gelu_backward(*words), strict=True):
        assert torch.equal(one, other)


def test_a_graph_may_be_captured_and_nothing_waits() -> None:
    above, weight, hidden = (drawn(*sizes, dtype=torch.bfloat16) for sizes in ((256, 128), (128, 64), (256, 64)))
    wanted = product_and_gelu_backward(above, weight, hidden)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        product_and_gelu_backward(above, weight, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product_and_gelu_backward(above, weight, hidden)
    above.mul_(2)
    graph.replay()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, 2 * other)


@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
def test_a_compiled_models_gradients_are_those_without_it(graphs: bool) -> None:
    from redline.core.workload import Shape
    from redline.model.gpt import GPT, initialise
    from redline.model.loss import next_token_loss
    from redline.model.tuned import tune_layers

    shape = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=512, sequence=128)
    tokens = torch.randint(shape.vocab, (8, shape.sequence), device="cuda")
    found = []
    for fused in (False, True):
        with torch.device("cuda"):
            model = GPT(shape, fused=torch.bfloat16, attention="flash")
        initialise(model, seed=3)
        tune_layers(model.h, torch.bfloat16, fused=fused)
        torch.compiler.reset()
        run = torch.compile(
            lambda tokens, model=model: next_token_loss(model(tokens), tokens), options={"triton.cudagraphs": graphs}
        )
        for _ in range(4):  # graphs are recorded after a warm-up, and replayed after that
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens)
            loss.backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert off(found[1][name], gradient.double()) < 1e-2, name
