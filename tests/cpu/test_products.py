"""Products by cuBLASLt: how matrices are told to it, and what takes its place without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redline.kernels.cublaslt import Operand, operand, takes
from redline.kernels.products import product, product_and_bias, product_and_gelu
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
    fits = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert takes(fits, fits.t())
    assert not takes(fits.float())
    assert not takes(torch.zeros(16, 12, dtype=torch.bfloat16))  # rows of 24 bytes
    assert not takes(torch.zeros(16, 17, dtype=torch.bfloat16)[:, 1:])


def test_without_a_gpu_torch_does_them() -> None:
    rows, weight, bias = (torch.randn(*sizes).bfloat16() for sizes in ((M, K), (N, K), (N,)))
    torch.testing.assert_close(product(rows, weight.t(), torch.float32), (rows @ weight.t()).float())
    torch.testing.assert_close(product_and_bias(rows, weight, bias), F.linear(rows, weight, bias))
    hidden, active = product_and_gelu(rows, weight, bias)
    torch.testing.assert_close(hidden, F.linear(rows, weight, bias))
    torch.testing.assert_close(active, F.gelu(hidden, approximate="tanh"))


@pytest.mark.parametrize("operator", [product, product_and_bias, product_and_gelu], ids=lambda one: one._name)
def test_operators_keep_their_promises_to_the_compiler(operator: object) -> None:
    rows, weight, bias = (torch.randn(*sizes).bfloat16() for sizes in ((M, K), (N, K), (N,)))
    words = (rows, weight.t(), torch.float32) if operator is product else (rows, weight, bias)
    torch.library.opcheck(operator, words)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.13 does it, tracing
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
