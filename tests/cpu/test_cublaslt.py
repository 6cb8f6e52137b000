"""What redline.kernels.cublaslt tells the library, by one that does as it is told on a CPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from redline.engine.memory import is_out_of_memory
from redline.kernels import cublaslt, products
from redline.kernels.cublaslt import AUX_POINTER, BIAS, BIAS_POINTER, GELU_AUX_BIAS, Library, LtError, Plan
from redline.kernels.products import product, product_and_bias, product_and_gelu

M, K, N = 6, 4, 8


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        from fake_cublaslt import FakeLt
    monkeypatch.setattr(cublaslt, "stream_of", lambda _: 0)
    monkeypatch.setattr(Plan, "_time", lambda self, pointers, one: 1.0 if one.algorithm[0] == 71 else 2.0)
    return FakeLt()


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("turned", ["neither", "left", "right", "both"])
def test_a_product_is_the_product(fake: Any, turned: str, dtype: torch.dtype) -> None:
    lt = Library(fake)
    for _ in range(2):  # the second time by what was prepared, of other tensors
        a = drawn(K, M).t() if turned in ("left", "both") else drawn(M, K)
        b = drawn(N, K).t() if turned in ("right", "both") else drawn(K, N)
        torch.testing.assert_close(lt.product(a, b, out_dtype=dtype), (a.float() @ b.float()).to(dtype))
    assert len(lt.plans) == 1
    assert fake.taken == [71, 71], "the fastest of three, once it is known"


def test_forms_do_not_share_an_algorithm(fake: Any) -> None:
    lt = Library(fake)
    a, b = drawn(M, M), drawn(M, M)
    for left in (a, a.t(), torch.cat((a, a), dim=1)[:, :M]):
        for right in (b, b.t()):
            for dtype in (torch.bfloat16, torch.float32):
                found = lt.product(left, right, out_dtype=dtype)
                torch.testing.assert_close(found, (left.float() @ right.float()).to(dtype))
    assert len(lt.plans) == 12


def test_pointers_are_told_when_they_change(fake: Any) -> None:
    lt = Library(fake)
    rows, weight = drawn(M, K), drawn(N, K)
    biases, told = [drawn(N) for _ in range(2)], []
    for bias in (biases[0], biases[0], biases[1]):
        fake.told.clear()
        wanted = F.linear(rows.float(), weight.float(), bias.float())
        found = lt.product(rows, weight.t(), bias=bias, epilogue=BIAS)
        torch.testing.assert_close(found, wanted.bfloat16())
        told.append(fake.told.count(BIAS_POINTER))
        hidden = torch.empty(M, N, dtype=torch.bfloat16)
        active = lt.product(rows, weight.t(), bias=bias, epilogue=GELU_AUX_BIAS, aux=hidden)
        torch.testing.assert_close(hidden, wanted.bfloat16())
        torch.testing.assert_close(active, F.gelu(wanted, approximate="tanh").bfloat16())
    assert told == [1, 0, 1]
    assert AUX_POINTER in fake.told


def test_a_form_without_an_algorithm_is_torchs(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lt, asked = Library(fake), []

    def none_proposed(*words: Any) -> int:
        asked.append(words)
        return 15

    monkeypatch.setattr(fake, "cublasLtMatmulAlgoGetHeuristic", none_proposed)
    for _ in range(2):
        assert lt.product(drawn(M, K), drawn(K, N)) is None
    assert len(asked) == 1, "it is remembered"
    monkeypatch.setattr(products, "_chosen", lambda *_: lt)
    rows, weight, bias = drawn(M, K), drawn(N, K), drawn(N)
    wanted = torch.addmm(bias, rows, weight.t())
    assert torch.equal(product_and_bias(rows, weight, bias), wanted)
    assert torch.equal(product(rows, weight.t(), torch.float32), (rows @ weight.t()).float())
    hidden, active = product_and_gelu(rows, weight, bias)
    assert torch.equal(hidden, wanted)
    assert torch.equal(active, F.gelu(wanted, approximate="tanh"))


def test_texts_of_all_lengths_are_not_timed_for_ever(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MOST_FORMS", 3)
    lt = Library(fake)
    found = [lt.product(drawn(length, K), drawn(K, N)) for length in (1, 2, 3, 4, 5, 2)]
    assert [one is None for one in found] == [False, False, False, True, True, False]


def test_a_full_device_is_out_of_memory(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lt = Library(fake)
    monkeypatch.setattr(fake, "cublasLtMatmulAlgoGetHeuristic", lambda *_: 3)
    with pytest.raises(LtError, match="ALLOC_FAILED") as caught:
        lt.product(drawn(M, K), drawn(K, N))
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(LtError("cublasLtMatmul", 13))


@pytest.mark.parametrize(("allowed", "masks"), [(True, []), (False, [2])])
def test_what_the_user_forbids_is_not_proposed(
    fake: Any, monkeypatch: pytest.MonkeyPatch, allowed: bool, masks: list[int]
) -> None:
    """cublasLt.h: preference 3 is the mask of reduction schemes, and 2 the one in the type of the computation."""
    given: dict[int, int] = {}

    def noted(preference: Any, name: int, value: Any, size: Any) -> int:
        given[name] = value._obj.value
        return 0

    monkeypatch.setattr(fake, "cublasLtMatmulPreferenceSetAttribute", noted)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        Library(fake).product(drawn(M, K), drawn(K, N))
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    assert given.pop(cublaslt.MAX_WORKSPACE_BYTES) == cublaslt.WORKSPACE_BYTES
    assert list(given.values()) == masks
    assert set(given) <= {3}


def test_a_call_that_fails_says_so(fake: Any) -> None:
    lt = Library(fake)
    lt.matmul = lambda *_: 13
    with pytest.raises(LtError, match="cublasLtMatmul: CUBLAS_STATUS_EXECUTION_FAILED"):
        lt.product(drawn(M, K), drawn(K, N))


def test_a_thread_that_warms_up_for_a_graph_does_not_own_the_workspace(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives a graph what the thread that warms up asks for meanwhile, and wants it back."""
    asked, empty = [], torch.empty

    def seen(*words: Any, **named: Any) -> torch.Tensor:
        asked.append(threading.get_ident())
        return empty(*words, **named)

    monkeypatch.setattr(torch, "empty", seen)
    lt = Library(fake)
    first, again = lt.workspace(torch.device("cpu")), lt.workspace(torch.device("cpu"))
    assert first is again
    assert first.numel() == cublaslt.WORKSPACE_BYTES
    assert len(asked) == 1
    assert asked[0] != threading.get_ident()
