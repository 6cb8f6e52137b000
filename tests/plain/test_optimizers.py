"""Bytes of an optimizer's state, by hand. That real optimizers have them is tested in tests/cpu/test_optim.py."""

from __future__ import annotations

import pytest

from redline.core.errors import UserError
from redline.predict.optimizers import OPTIMIZERS, find_optimizer

MATRIX, VECTOR = (96, 512), (96,)  # 49152 numbers: 192 blocks of 256


def state_of(name, sizes, *, of_layer=False):
    return OPTIMIZERS[name].state_bytes(sizes, of_layer=of_layer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_large_matrix_of_a_layer_has_the_bytes_of_the_table(name):
    """Scales, rows and columns come on top: 2 % at most."""
    row, numbers = OPTIMIZERS[name], 4096 * 1024
    assert row.state * numbers <= state_of(name, (4096, 1024), of_layer=True) <= 1.02 * row.state * numbers


@pytest.mark.parametrize("name", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_adamw_keeps_two_fp32_moments_of_everything(name):
    assert state_of(name, MATRIX, of_layer=True) == state_of(name, MATRIX) == 8 * 49152
    assert state_of(name, VECTOR) == 8 * 96


def test_8bit_adamw_adds_a_scale_per_block_and_a_table_per_moment():
    assert state_of("adamw-8bit", MATRIX) == 2 * 49152 + 2 * 4 * 192 + 2 * 4 * 256


@pytest.mark.parametrize("sizes", [VECTOR, (64, 63), (257, 64)], ids=["small", "below 4096", "not of whole blocks"])
def test_8bit_adamw_leaves_small_and_odd_tensors_in_fp32(sizes):
    assert state_of("adamw-8bit", sizes) == OPTIMIZERS["adamw-fused"].state_bytes(sizes, of_layer=False)


def test_8bit_adamw_quantises_from_4096_numbers_on():
    assert state_of("adamw-8bit", (64, 64)) == 2 * 4096 + 2 * 4 * 16 + 2 * 4 * 256


def test_adafactor_keeps_rows_and_columns_of_matrices_and_two_moments_of_vectors():
    assert state_of("adafactor", MATRIX) == 4 * 49152 + 4 * (96 + 512)
    assert state_of("adafactor", VECTOR) == 8 * 96


def test_muon_has_one_moment_inside_the_layers_and_adamw_elsewhere():
    assert state_of("muon", MATRIX, of_layer=True) == 4 * 49152
    assert state_of("muon", MATRIX) == 8 * 49152
    assert state_of("muon", VECTOR) == 8 * 96


@pytest.mark.parametrize(("name", "total"), [("adamw-bf16", 8), ("adamw-bf16-kahan", 10), ("adamw-fused", 16)])
def test_bytes_per_parameter_in_all(name, total):
    """Weight, gradient and state. The 8 that people quote for pure bf16 are without Kahan's second tensor."""
    row = OPTIMIZERS[name]
    assert 2 * row.weights + row.state == total
    assert state_of(name, MATRIX) == row.state * 49152


def test_one_fp32_moment():
    for name in ("lion", "sgd-momentum"):
        assert state_of(name, MATRIX, of_layer=True) == state_of(name, MATRIX) == 4 * 49152
        assert state_of(name, VECTOR) == 4 * 96


def test_an_unknown_name_lists_the_known():
    with pytest.raises(UserError, match=r"unknown optimizer 'adamw-16bit'.*did you mean 'adamw-8bit'.*muon"):
        find_optimizer("adamw-16bit")
