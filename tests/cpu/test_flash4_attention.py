"""Attention whose backward is flash-attn-4's: its formulas, and what the package and torch's cuDNN call are asked for.

A stand-in plays the package: it computes with autograd what it is given, in the package's own layout, and writes where
it is told to. The kernel itself is tested on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from redline.kernels import flash4_attention as module
from redline.kernels.flash4_attention import (
    CACHE,
    FOLDER,
    by_cudnn,
    by_flash4,
    flash4_attention,
    flash4_attention_backward,
    keep_kernels,
)
from redline.model.fused import PackedAttention
from redline.search.launch import worker_path

BATCH, SEQUENCE, HEADS, HEAD = 2, 7, 3, 5
WIDTH = HEADS * HEAD


def random(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def qkv() -> torch.Tensor:
    return random(BATCH, SEQUENCE, 3 * WIDTH, seed=0)


@pytest.fixture
def above() -> torch.Tensor:
    return random(BATCH, SEQUENCE, WIDTH, seed=1)


def by_torch(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(2, (HEADS, HEAD)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def by_autograd(qkv: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    leaf = qkv.clone().requires_grad_()
    return torch.autograd.grad(by_torch(leaf), leaf, above)[0]


def test_the_formulas_are_torchs_and_autograds(qkv: torch.Tensor, above: torch.Tensor) -> None:
    out, stats = flash4_attention(qkv, HEADS)
    torch.testing.assert_close(out, by_torch(qkv), rtol=1e-12, atol=1e-12)
    found = flash4_attention_backward(above, qkv, out, stats, HEADS)
    torch.testing.assert_close(found, by_autograd(qkv, above), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_their_promises_to_the_compiler(dtype: torch.dtype) -> None:
    qkv, above = (random(BATCH, SEQUENCE, width, seed=width, dtype=dtype) for width in (3 * WIDTH, WIDTH))
    torch.library.opcheck(flash4_attention, (qkv, HEADS))
    torch.library.opcheck(flash4_attention_backward, (above, qkv, *flash4_attention(qkv, HEADS), HEADS))


class Called(TorchDispatchMode):
    """The operators of a namespace, by name."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernels", "operator"), [("cudnn", "packed_attention"), ("flash4", "flash4_attention")])
def test_a_block_asks_the_kernels_that_it_was_given(qkv: torch.Tensor, kernels: str, operator: str) -> None:
    with Called("redline") as called:
        PackedAttention.apply(qkv.requires_grad_(), HEADS, kernels).sum().backward()  # type: ignore[no-untyped-call]
    assert called.names == [operator, f"{operator}_backward"]


# --- what the package is asked for ------------------------------------------------------------------------------------


class StandIn:
    """Takes and gives [B, T, heads, d], and the sums' logarithms as [B, heads, T], as flash-attn-4 does."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **more: Any) -> None:
        self.given = {"q": q, "out": out, "lse": lse, **more}
        parts = [part.detach().clone().requires_grad_() for part in (q, k, v)]
        turned = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=more["causal"])
        for place, gradient in zip(
            (more["dq"], more["dk"], more["dv"]), torch.autograd.grad(turned, parts, dout.transpose(1, 2)), strict=True
        ):
            place.copy_(gradient)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(module, "library", lambda: stand_in)
    return stand_in


def test_the_package_writes_side_by_side(qkv: torch.Tensor, above: torch.Tensor, package: StandIn) -> None:
    out, stats = flash4_attention(qkv, HEADS)
    found = by_flash4(above, qkv, out, stats, HEADS)
    torch.testing.assert_close(found, by_autograd(qkv, above), rtol=1e-12, atol=1e-12)
    assert found.is_contiguous()
    assert package.given["q"].data_ptr() == qkv.data_ptr()  # where it lies: no copy
    torch.testing.assert_close(package.given["out"].flatten(2), by_torch(qkv), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(package.given["lse"], logarithms(qkv), rtol=1e-12, atol=1e-12)


def logarithms(qkv: torch.Tensor) -> torch.Tensor:
    """Natural ones, of the sums over scaled scores."""
    q, k, _ = (part.unflatten(2, (HEADS, HEAD)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    scores = q @ k.transpose(2, 3) / HEAD**0.5
    past = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    return torch.where(past, scores.exp(), 0.0).sum(dim=3).log()


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_order_of_adding_up_is_asked_for_where_torch_wants_it(
    qkv: torch.Tensor, above: torch.Tensor, package: StandIn, deterministic: bool
) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        by_flash4(above, qkv, *flash4_attention(qkv, HEADS), HEADS)
    finally:
        torch.use_deterministic_algorithms(before)
    assert package.given["deterministic"] is deterministic


@pytest.mark.parametrize("sizes", [(2, 7, 3, 8), (1, 7, 3, 8), (2, 1, 3, 8), (2, 7, 1, 8)], ids=str)
def test_cudnns_output_lies_as_the_next_layer_reads_it(sizes: tuple[int, int, int, int]) -> None:
    """By torch's own account of shapes and strides, which its kernel follows."""
    batch, sequence, heads, head = sizes
    qkv = torch.empty(batch, sequence, 3 * heads * head, dtype=torch.bfloat16, device="meta")
    with Called("aten") as called:
        out, stats = by_cudnn(qkv, heads)
    assert "clone" not in called.names  # neither of what it is given nor of what it gives
    wanted = flash4_attention(qkv, heads)  # the operator's promise
    for found, promised in zip((out, stats), wanted, strict=True):
        assert (found.shape, found.dtype, found.is_contiguous()) == (promised.shape, promised.dtype, True)


# --- when it is imported, and where its kernels stay ------------------------------------------------------------------


def test_the_package_is_not_imported_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise SystemExit('imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), worker_path()))}
    command = [sys.executable, "-c", "import redline.cli, redline.model.gpt"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in (CACHE, FOLDER):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "redline" / "flash-attn-4"


def test_kernels_are_kept_in_the_cache_folder(nothing_set: Path) -> None:
    keep_kernels()
    assert os.environ[CACHE] == "1"
    assert os.environ[FOLDER] == str(nothing_set)
    assert nothing_set.is_dir()


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_what_the_user_has_set_stays(nothing_set: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv(CACHE, chosen)
    keep_kernels()
    assert os.environ[CACHE] == chosen
    assert FOLDER not in os.environ
    assert not nothing_set.exists()


def test_a_folder_of_the_users_is_taken(nothing_set: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    keep_kernels()
    assert (os.environ[CACHE], os.environ[FOLDER]) == ("1", str(tmp_path / "mine"))
    assert not nothing_set.exists()


def test_a_folder_that_cannot_be_made_is_none(nothing_set: Path) -> None:
    nothing_set.parent.write_text("a file where the folder should be")
    keep_kernels()
    assert CACHE not in os.environ
