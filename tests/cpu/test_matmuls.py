"""The worker behind `hardware --measure` and `lint --measure`: the right products, timed, and failures kept apart."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.engine import matmuls as worker
from redline.engine.matmuls import Pool, Product, Timed, go_round, lay_out, multiply, time_products, time_traffic
from redline.predict.gemms import Gemm, attention_gemms, linear_gemms
from redline.search import matmuls
from redline.search.matmuls import measure_peaks, product_of, time_gemms

CPU = torch.device("cpu")
SHAPE = Shape(layers=1, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16)


def quietly(*_, **__):
    pass


def product(gemm: Gemm, dtype: str = "fp32") -> Product:
    return Product(**product_of(gemm, dtype))


GEMMS = [*linear_gemms(SHAPE, Plan(), micro_batch=3), *attention_gemms(SHAPE, micro_batch=3)]
every_gemm = pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: f"{gemm.where}-{gemm.direction}")


@every_gemm
def test_a_product_has_the_size_its_gemm_says(gemm):
    operands = Pool(CPU).operands(product(gemm))
    out = multiply(product(gemm).layout, *operands)
    wanted = (gemm.m, gemm.n) if gemm.batch == 1 else (gemm.batch, gemm.m, gemm.n)
    assert out.shape == wanted
    assert sum(operand.numel() for operand in operands) == gemm.batch * gemm.k * (gemm.m + gemm.n)


def test_layouts_are_those_of_a_linear_layer_and_its_gradients():
    """The same numbers as autograd, from operands that lie in memory as autograd has them: contiguous."""
    x, w = torch.randn(48, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    y = F.linear(x, w)
    g = torch.randn_like(y)
    dx, dw = grad(y, (x, w), g)
    qkv = {gemm.direction: product(gemm).layout for gemm in GEMMS if gemm.where == "qkv"}
    torch.testing.assert_close(multiply(qkv["forward"], x, w), y)
    torch.testing.assert_close(multiply(qkv["dgrad"], g, w), dx)
    torch.testing.assert_close(multiply(qkv["wgrad"], g, x), dw)


def test_layouts_of_attention_are_those_of_its_gradients():
    q, k, v = (torch.randn(6, 16, 8, requires_grad=True) for _ in range(3))
    scores = q @ k.mT
    weights = torch.randn(6, 16, 16, requires_grad=True)
    mixed = weights @ v
    gs, gm = torch.randn_like(scores), torch.randn_like(mixed)
    dq, dk = grad(scores, (q, k), gs)
    dweights, dv = grad(mixed, (weights, v), gm)
    layout = {(gemm.where, gemm.direction): product(gemm).layout for gemm in GEMMS}
    torch.testing.assert_close(multiply(layout["scores", "forward"], q, k), scores)
    torch.testing.assert_close(multiply(layout["scores", "dgrad"], gs, k), dq)
    torch.testing.assert_close(multiply(layout["scores", "wgrad"], gs, q), dk)
    torch.testing.assert_close(multiply(layout["mix", "forward"], weights, v), mixed)
    torch.testing.assert_close(multiply(layout["mix", "dgrad"], gm, v), dweights)
    torch.testing.assert_close(multiply(layout["mix", "wgrad"], weights, gm), dv)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_operands_are_normal_numbers_and_the_two_sides_differ(dtype):
    left, right = Pool(CPU).operands(Product(dtype=dtype, layout="TN", m=128, n=128, k=128))
    assert left.dtype == worker.DTYPES[dtype]
    for operand in (left, right):
        assert abs(operand.float().mean()) < 0.1
        assert 0.9 < operand.float().std() < 1.1
    assert not torch.equal(left, right)


def test_products_share_memory_and_the_longest_decides():
    products = [Product(dtype="fp32", layout="TN", m=size, n=size, k=size) for size in (8, 64, 16)]
    timed = lay_out(products, CPU)
    assert len({one.operands[0].data_ptr() for one in timed}) == 1
    assert timed[0].operands[0].shape == (8, 8)
    assert timed[0].operands[0].is_contiguous()


def test_tf32_is_allowed_only_to_products_that_ask():
    seen = []
    for dtype in ("tf32", "fp32", "bf16"):
        worker.set_precision(dtype)
        seen.append(torch.get_float32_matmul_precision())
    assert seen == ["high", "highest", "highest"]


def test_repeats_go_round_the_list(monkeypatch):
    order = []
    monkeypatch.setattr(Timed, "sample", lambda self, device: order.append(self.product.m) or 0.01)
    products = [Product(dtype="fp32", layout="TN", m=size, n=4, k=4) for size in (4, 5, 6)]
    timed = lay_out(products, CPU)
    for one in timed:
        one.trial = 0.01
    for _ in range(2):
        go_round(timed, CPU, math.inf)
    assert order == [4, 5, 6, 4, 5, 6]


def test_the_median_is_of_warm_samples_and_one_call(monkeypatch):
    """A clock that says 4, 3, 2, 1, 1, 1, ... seconds per sample of `calls` calls; warm-up samples are dropped."""
    now = iter(range(10_000))
    monkeypatch.setattr(worker.time, "monotonic", lambda: float(next(now)))
    taken = []

    def sample(self, device):
        taken.append(max(1.0, 40.0 - len(taken)))
        return taken[-1]

    monkeypatch.setattr(Timed, "sample", sample)
    (one,) = time_products([Product(dtype="fp32", layout="TN", m=4, n=4, k=4)], CPU, 400.0, quietly)
    answer = one.answer()
    assert one.trial == 39.0
    assert answer["median_seconds"] == answer["best_seconds"] == 1.0
    assert 10 < answer["samples"] < len(taken) - 2


def test_a_sample_is_the_time_of_one_call(monkeypatch):
    one = lay_out([Product(dtype="fp32", layout="NN", m=64, n=64, k=64)], CPU)[0]
    calls = []
    monkeypatch.setattr(worker, "multiply", lambda *_: (calls.append(1), time.sleep(0.002)))
    one.calls = 5
    assert 0.002 <= one.sample(CPU) < 0.008
    assert len(calls) == 5


def test_a_product_that_fails_does_not_end_the_others(monkeypatch):
    real = multiply

    def fail_on_the_second(layout, left, right):
        if left.shape[0] == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(layout, left, right)

    monkeypatch.setattr(worker, "multiply", fail_on_the_second)
    products = [Product(dtype="fp32", layout="TN", m=size, n=4, k=4) for size in (4, 5, 6)]
    answers = [one.answer() for one in time_products(products, CPU, 0.2, quietly)]
    assert answers[1] == {"error": "out of memory"}
    assert all(answers[index]["median_seconds"] > 0 for index in (0, 2))


def test_operands_that_do_not_fit_fail_alone():
    huge = Product(dtype="fp32", layout="TN", m=1 << 24, n=4, k=1 << 24)  # an exabyte
    fits = Product(dtype="fp32", layout="TN", m=8, n=8, k=8)
    answers = [one.answer() for one in time_products([huge, fits], CPU, 0.2, quietly)]
    assert answers[0] == {"error": "out of memory"}
    assert answers[1]["samples"] >= 1


def test_without_time_there_is_no_number():
    assert Timed(product=Product(dtype="fp32", layout="TN", m=4, n=4, k=4)).answer() == {"error": "ran out of time"}


def test_traffic_counts_reads_and_writes(monkeypatch):
    """With a clock that says one second a move, the rates are the bytes."""
    monkeypatch.setitem(worker.TRAFFIC_BYTES, "cpu", 4096)
    monkeypatch.setattr(worker.Clock, "seconds", lambda self: [1.0])
    assert time_traffic(CPU, 0.01, quietly) == {"copy": 2 * 4096, "triad": 3 * 4096, "read": 4096}


# with a real process


def test_time_gemms_times_what_it_was_given():
    small, large = (Gemm(where="square", direction="forward", m=n, n=n, k=n) for n in (32, 768))
    phases = []
    seconds = time_gemms(
        [large, small, large],
        dtype="fp32",
        device="cpu",
        seconds=1.5,
        on_progress=lambda name, **_: phases.append(name),
    )
    assert len(seconds) == 3
    assert seconds[1] < min(seconds[0], seconds[2])
    assert {"loading kernels", "timing"} <= set(phases)


def test_a_device_that_is_not_there_is_told(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    gemm = Gemm(where="square", direction="forward", m=8, n=8, k=8)
    with pytest.raises(UserError) as error:
        time_gemms([gemm], dtype="fp32", device="cuda", seconds=1)
    assert "no CUDA device" in error.value.why


def test_a_worker_that_dies_is_told(monkeypatch):
    gemm = {"dtype": "fp32", "layout": "XX", "m": 8, "n": 8, "k": 8}
    with pytest.raises(UserError) as error:
        matmuls.ask("cpu", [gemm], 1.0, None)
    assert "XX" in error.value.why


def test_peaks_of_this_cpu():
    peaks = measure_peaks("tiny", micro_batch=1, seconds=2, device="cpu", command="redline hardware --measure")
    assert peaks.kind == "cpu"
    assert 0 < peaks.matmul_tflops["fp32"] < 100
    assert 1e8 < peaks.bandwidth < 1e13
    assert {"copy", "triad", "read"} == peaks.bandwidths.keys()
    assert {rate.where for rate in peaks.rates} >= {"square", "qkv forward", "head wgrad"}
    assert all(0 < rate.best_seconds <= rate.median_seconds for rate in peaks.rates)
    assert json.dumps(peaks.versions)
