"""Products by cuBLASLt: how matrices are told to it, and what takes its place without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redline.kernels import gelu_products
from redline.kernels import products as products_module
from redline.kernels.cublaslt import Operand, operand, takes
from redline.kernels.gelu_products import gelu_product, gelu_product_backward
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.model import loss as loss_module
from redline.model.loss import head_loss
from redline.model.tuned import TunedLinear, tune_layers

M, K, N = 6, 4, 8


def as_cublas_reads(memory: torch.Tensor, one: Operand) -> torch.Tensor:
    """Columns first, `ld` apart, and then transposed or not."""
    matrix = memory.as_strided((one.rows, one.columns), (1, one.ld))
    return matrix.t() if one.transposed else matrix


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda matrix: matrix.contiguous(),
    "columns": lambda matrix: matrix.t().contiguous().t(),
    "wide rows": lambda matrix: torch.cat((matrix, matrix), dim=1)[:, : matrix.size(1)],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_the_swapped_product_of_what_it_reads_is_the_product(left: str, right: str) -> None:
    a, b = LAYOUTS[left](torch.randn(M, K)), LAYOUTS[right](torch.randn(K, N))
    out = torch.empty(M, N)
    told = operand(out)
    assert (told.rows, told.columns, told.ld, told.transposed) == (N, M, N, False)
    swapped = as_cublas_reads(b, operand(b)) @ as_cublas_reads(a, operand(a))  # D' = B' A', columns first
    as_cublas_reads(out, told).copy_(swapped)
    torch.testing.assert_close(out, a @ b)


def test_a_matrix_without_neighbours_is_refused() -> None:
    with pytest.raises(ValueError, match="side by side"):
        operand(torch.randn(8, 8)[::2, ::2])


def test_only_16_bits_on_whole_lines_are_taken() -> None:
    memory = torch.zeros(2048, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() % 256 // 2 :]  # a CPU's memory begins at any multiple of 64 bytes
    fits = memory[:256].view(16, 16)
    assert takes(fits, fits.t())
    assert takes(memory[:512].view(16, 32)[:, :16])
    assert not takes(memory.view(torch.float32)[:256].view(16, 16))
    assert not takes(memory[:192].view(16, 12))  # rows of 24 bytes
    assert not takes(memory[64 : 64 + 256].view(16, 16)), "begins in the middle of a line of 256 bytes"


def test_without_a_gpu_torch_does_them() -> None:
    rows, weight, bias = (torch.randn(*sizes).bfloat16() for sizes in ((M, K), (N, K), (N,)))
    torch.testing.assert_close(product(rows, weight.t(), torch.float32), (rows @ weight.t()).float())
    torch.testing.assert_close(product_and_bias(rows, weight, bias), F.linear(rows, weight, bias))
    hidden, active = product_and_gelu(rows, weight, bias)
    torch.testing.assert_close(hidden, F.linear(rows, weight, bias))
    torch.testing.assert_close(active, F.gelu(hidden, approximate="tanh"))


def test_without_a_gpu_gelus_slope_is_autograds() -> None:
    rows, weight, bias = (torch.randn(*sizes, dtype=torch.float64) for sizes in ((M, K), (N, K), (N,)))
    hidden = F.linear(rows, weight, bias).requires_grad_()
    wanted = F.gelu(hidden, approximate="tanh")
    slope, active = gelu_product(rows, weight, bias)
    torch.testing.assert_close(active, wanted.detach())
    torch.testing.assert_close(slope, *torch.autograd.grad(wanted.sum(), hidden))
    rounded, _ = gelu_product(rows.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - slope).norm() < 2e-2 * slope.norm()


OPERATORS = (product, product_and_bias, product_and_gelu, gelu_product, gelu_product_backward)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda one: one._name)
def test_operators_keep_their_promises_to_the_compiler(operator: object) -> None:
    rows, weight, bias = (torch.randn(*sizes).bfloat16() for sizes in ((M, K), (N, K), (N,)))
    words: tuple[object, ...] = rows, weight, bias
    if operator is product:
        words = rows, weight.t(), torch.float32
    if operator is gelu_product_backward:
        words = rows, weight.t().contiguous(), torch.randn(M, N).bfloat16()
    torch.library.opcheck(operator, words)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_without_a_gpu_gelus_gradient_follows_the_product(dtype: torch.dtype) -> None:
    above, weight, slope = (torch.randn(*sizes, dtype=dtype) for sizes in ((M, K), (K, N), (M, N)))
    kept = slope.clone()
    gradient, sums = gelu_product_backward(above, weight, slope)
    wanted = (above @ weight).double() * slope.double()
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, wanted.to(dtype))
    torch.testing.assert_close(sums.double(), wanted.sum(dim=0), rtol=1e-5, atol=1e-5)
    assert torch.equal(slope, kept)


def test_quack_is_asked_only_where_it_is_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for version, capability, there in (("0.6.5", (9, 0), True), ("0.6.5", (10, 0), False), (None, (9, 0), False)):
        monkeypatch.setattr(gelu_products, "is_installed", lambda version=version: version is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        gelu_products.is_there.cache_clear()
        assert gelu_products.is_there(device) is there
    gelu_products.is_there.cache_clear()


def test_only_matrices_whose_rows_touch_are_given_to_quack() -> None:
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() % 256 // 2 :]
    fits = memory[:256].view(16, 16)
    assert gelu_products.lie_well(fits, fits)
    assert not gelu_products.lie_well(fits, fits.t())
    assert not gelu_products.lie_well(fits, memory[:512].view(16, 32)[:, :16])
    assert not gelu_products.lie_well(fits, memory[:192].view(16, 12))
    assert not gelu_products.lie_well(memory[:16].view(1, 16), fits)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_tuned_layer_is_the_layer(bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(K, N, bias=bias))
    tuned = nn.Sequential(nn.Linear(K, N, bias=bias))
    tuned.load_state_dict(plain.state_dict())
    kept = dict(tuned.named_parameters())
    tune_layers(tuned, torch.bfloat16)
    assert type(tuned[0]) is TunedLinear
    assert all(parameter is kept[name] for name, parameter in tuned.named_parameters())
    x = torch.randn(2, 3, K)
    gradients = []
    for model in (plain, torch.compile(tuned) if compiled else tuned):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(given)
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        gradients.append([given.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


VOCAB, ROWS = 13, 16


def of_head(run: Callable[..., torch.Tensor], dtype: torch.dtype, **choices: object) -> list[torch.Tensor]:
    """The loss, and what it gives features [2, 5, K] and an fp32 weight, or one of fp64 where `dtype` is that."""
    torch.manual_seed(0)
    features, weight = torch.randn(2, 5, K, dtype=dtype), torch.randn(ROWS, K, dtype=torch.float64)
    weight = weight.to(torch.promote_types(dtype, torch.float32))
    inputs = features.requires_grad_(), weight.requires_grad_()
    loss = run(*inputs, torch.arange(10).view(2, 5), vocab=VOCAB, dtype=dtype, **choices)
    return [loss.detach(), *torch.autograd.grad(3 * loss, inputs)]


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_tuned_head_is_the_head(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 to the bit. In bf16 a whole batch's gradient of the weight is asked for in fp32, pieces' as it was."""
    wanted = of_head(head_loss, torch.float64, pieces=pieces)
    asked: list[tuple[tuple[int, ...], torch.dtype]] = []

    def seen(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        asked.append(((a.size(0), b.size(1)), dtype))
        return product(a, b, dtype)

    monkeypatch.setattr(loss_module, "product", seen)
    for one, other in zip(of_head(head_loss, torch.float64, pieces=pieces, tuned=True), wanted, strict=True):
        assert torch.equal(one, other)
    asked.clear()
    plain, tuned = (of_head(head_loss, torch.bfloat16, pieces=pieces, tuned=one) for one in (False, True))
    of_weight = torch.float32 if pieces == 1 else torch.bfloat16
    sizes = [len(part) for part in torch.arange(10).chunk(pieces)]
    assert asked == [
        one
        for tokens in sizes
        for one in (((tokens, ROWS), torch.bfloat16), ((tokens, K), torch.bfloat16), ((ROWS, K), of_weight))
    ]
    assert [one.dtype for one in tuned] == [one.dtype for one in plain]
    assert torch.equal(tuned[0], plain[0])
    assert torch.equal(tuned[1], plain[1])
    torch.testing.assert_close(tuned[2], plain[2], rtol=2e-2, atol=1e-3)


def test_the_compiler_sees_a_tuned_head_as_one_graph() -> None:
    """Its own code generator is tested on GPUs."""
    wanted = of_head(head_loss, torch.bfloat16, pieces=1, tuned=True)
    run = torch.compile(head_loss, backend="aot_eager", fullgraph=True)
    for one, other in zip(of_head(run, torch.bfloat16, pieces=1, tuned=True), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_third_type_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt writes what it reads, or fp32."""
    asked = []
    monkeypatch.setattr(products_module, "_chosen", lambda *_: asked.append(1))
    a, b = torch.randn(M, K).half(), torch.randn(K, N).half()
    assert product(a, b, torch.bfloat16).dtype == torch.bfloat16
    assert not asked
    assert product(a, b, torch.float32).dtype == torch.float32
    assert asked
