"""Products of 8-bit operands with GELU behind them, where torch does them: against fp64 of the same 8-bit numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from redline.engine import flop_counter
from redline.engine.profiling_groups import OWN_PRODUCTS
from redline.kernels.gelu_backward import slope_of, times_slope_
from redline.kernels.narrow_products import (
    lie_well,
    narrow_gelu_product,
    narrow_gelu_product_backward,
    narrow_gelu_product_backward_in_both,
    narrow_gelu_product_in_both,
)
from redline.model.fp8 import E4M3, operands, scale_beforehand

M, C, WIDE = 24, 48, 64


def random(*size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def by_rows_apart(rows: int, others: int) -> tuple[torch.Tensor, ...]:
    """Scales of rows that differ by several octaves, on either side."""
    spread = [torch.logspace(-1, 1, size)[:, None] for size in (rows, others)]
    return operands(spread[0] * random(rows, C, seed=0), spread[1] * random(others, C, seed=1, scale=C**-0.5))


def in_fp64(rows: torch.Tensor, others: torch.Tensor, inverse: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (rows.double() * inverse) @ (others.double() * other).t()


def test_both_operands_lie_in_rows() -> None:
    rows, turned, inverse, turned_inverse = operands(random(M, C, seed=0), random(C, WIDE, seed=1).t())
    assert (rows.shape, turned.shape) == ((M, C), (WIDE, C))
    assert (inverse.shape, turned_inverse.shape) == ((M, 1), (WIDE, 1))
    assert rows.dtype == turned.dtype == E4M3
    assert turned.is_contiguous()


def test_gelu_of_a_product_is_that_of_fp64() -> None:
    words, bias = by_rows_apart(M, WIDE), random(WIDE, seed=2)
    wanted = in_fp64(*words) + bias
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
        slope, active = narrow_gelu_product(*words, bias.to(dtype))
        assert slope.dtype == active.dtype == dtype
        for mine, other in zip(slope, slope_of(wanted), strict=True):  # each row by itself: one could hide the others
            assert relative(mine, other) < bound
        assert relative(active, F.gelu(wanted, approximate="tanh")) < bound


def test_gradient_and_sums_are_those_of_fp64() -> None:
    words, slope = by_rows_apart(M, WIDE), random(M, WIDE, seed=3, scale=2)
    wanted = in_fp64(*words)
    wanted_sums = times_slope_(wanted, slope.double())
    kept = slope.clone()
    gradient, sums = narrow_gelu_product_backward(*words, slope)
    assert torch.equal(slope, kept)
    assert sums.dtype == torch.float32
    assert relative(gradient, wanted) < 1e-5
    assert relative(sums, wanted_sums) < 1e-5


IN_BOTH = narrow_gelu_product_in_both, narrow_gelu_product_backward_in_both


@pytest.mark.parametrize(
    "operator", [narrow_gelu_product, narrow_gelu_product_backward, *IN_BOTH], ids=lambda one: one._name
)
def test_operators_keep_their_promises_to_the_compiler(operator: Any) -> None:
    """But for the check of the schema, which multiplies 8-bit numbers: torch has no such kernel for a CPU."""
    last = random(M, WIDE, seed=3) if "backward" in operator._name else random(WIDE, seed=2)
    words = (*by_rows_apart(M, WIDE), last.bfloat16(), *([torch.ones(M, 1)] if operator in IN_BOTH else []))
    torch.library.opcheck(operator, words, test_utils=("test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("back", [False, True])
def test_8_bits_besides_are_those_of_the_16_multiplied(back: bool) -> None:
    words = (*by_rows_apart(M, WIDE), random(M, WIDE, seed=3) if back else random(WIDE, seed=2))
    alone: Any = narrow_gelu_product_backward if back else narrow_gelu_product
    factors = torch.exp2(torch.arange(M)[:, None] % 5 - 2.0)
    *wide, narrow = IN_BOTH[back](*words, factors)
    for mine, other in zip(wide, alone(*words), strict=True):
        assert torch.equal(mine, other)
    read = wide[0] if back else wide[1]
    assert narrow.dtype == E4M3
    torch.testing.assert_close(narrow.float() / factors, read, rtol=2.0**-4, atol=2.0**-6)


@pytest.mark.parametrize("alike", [False, True], ids=["random", "every row the same"])
def test_a_scale_beforehand_fits_whatever_comes_out(alike: bool) -> None:
    """Rows that all point one way reach the bound; random ones lose a few of e4m3's octaves."""
    one = random(1, C, seed=5)
    rows = (one if alike else random(M, C, seed=0)) * torch.logspace(-4, 4, M)[:, None]
    weight, bias = (one if alike else random(WIDE, C, seed=1)).expand(WIDE, C), random(WIDE, seed=2)
    values, others, inverse, other = operands(rows, weight)
    product = (values.float() * inverse) @ (others.float() * other).t()
    for sizes, scale in (
        (product + bias, scale_beforehand(rows, weight, bias)),
        (1.13 * product, scale_beforehand(rows, weight)),
    ):
        largest = (sizes * scale).abs().amax(dim=1)
        assert scale.shape == (M, 1)
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        assert (largest <= 448).all()
        assert (largest[M // 2 :] > (140 if alike else 6)).all()  # the bias is large beside the smallest rows


@pytest.mark.parametrize(
    ("rows", "others", "well"),
    [((24, 48), (64, 48), True), ((24, 40), (64, 40), False), ((24, 48), (60, 48), False), ((1, 48), (64, 48), False)],
)
def test_what_is_given_to_quack(rows: tuple[int, int], others: tuple[int, int], well: bool) -> None:
    assert lie_well(torch.empty(rows, dtype=E4M3), torch.empty(others, dtype=E4M3)) is well


def test_what_lies_otherwise_is_not() -> None:
    fits, memory = torch.empty(64, 64, dtype=E4M3), torch.empty(8192, dtype=E4M3)
    assert not lie_well(fits, fits.t())
    assert not lie_well(memory[: 64 * 96].view(64, 96)[:, :64], fits)
    assert not lie_well(memory[8 : 8 + 4096].view(64, 64), fits)


@pytest.mark.parametrize("name", OWN_PRODUCTS)
def test_every_product_of_ours_has_its_flops(name: str) -> None:
    """Two for each row and each weight, whatever is done at the ends."""
    rows, weight = torch.Size((8, 16)), torch.Size((16, 32) if name.endswith("::product") else (32, 16))
    assert flop_counter.OURS[name.removeprefix("redline::")](rows, weight) == 2 * 8 * 16 * 32
