"""How fast this machine multiplies matrices and moves memory, measured in a worker process.

    time_gemms(gemms, dtype="bf16", device=None, seconds=10) -> [9.1e-05, 3.4e-05, None, ...]  seconds per call
    measure_peaks("gpt2", micro_batch=16) -> MeasuredPeaks: the highest rates over GPT-2's own products and square ones

The worker (engine/matmuls.py) owns torch and the device; this side chooses what to ask and reads the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redline.core.errors import UserError, unknown_name
from redline.core.hardware import Hardware, MeasuredPeaks, MeasuredRate
from redline.core.host import timestamp
from redline.core.job import write_atomically
from redline.core.plan import Plan
from redline.core.workload import Shape, check_positive
from redline.predict.gemms import Gemm, linear_gemms
from redline.search import launch
from redline.workloads import PRESETS, default_workload, resolve_shape

DTYPES = ("fp32", "tf32", "bf16", "fp16")
SQUARES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024, 2048)}
SQUARE = "square"
SQUARE_MEMORY_SHARE = 0.25  # share of the device's memory for the three matrices of a square product in fp32
SECONDS = {"cuda": 20.0, "cpu": 10.0}
SECONDS_BETWEEN = (1.0, 90.0)
MICRO_BATCH = 8  # for a shape that has none; the answer records which was used
GRACE_SECONDS = 120.0  # for importing torch and for the one call that is under way when the time is up

OnProgress = Callable[..., None]
"""on_progress(phase, done=None, total=None, seconds=None), as the workers of a ladder report"""


def time_gemms(
    gemms: Sequence[Gemm],
    *,
    dtype: str,
    device: str | None = None,
    seconds: float,
    on_progress: OnProgress | None = None,
) -> list[float | None]:
    """Return the median seconds of one call of each GEMM, in order; None for one that failed or does not fit."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    device = device or launch.probe_machine(None)[0].kind
    answer = ask(device, [product_of(gemm, dtype) for gemm in gemms], seconds, on_progress)
    return [product.get("median_seconds") for product in answer["products"]]


def measure_peaks(
    workload: str | None = None,
    *,
    micro_batch: int | None = None,
    seconds: float | None = None,
    device: str | None = None,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> MeasuredPeaks:
    """Return the highest matmul rate per dtype and the highest memory bandwidth, within `seconds` plus start-up."""
    check_seconds(seconds)
    if micro_batch is not None:
        check_positive("micro batch", micro_batch)
    chosen = resolve_shape(workload) if workload else None  # a mistake stops before any device work
    (on_progress or _silent)("looking at the machine")
    hardware, versions = launch.probe_machine(device)
    chosen = chosen or resolve_shape(default_workload(hardware.kind))
    micro_batch = micro_batch or default_micro_batch(chosen.name)
    gemms = peak_gemms(chosen.shape, micro_batch, hardware)
    asked = [(dtype, gemm) for gemm in gemms for dtype in measured_dtypes(hardware)]
    answer = ask(
        hardware.kind,
        [product_of(gemm, dtype) for dtype, gemm in asked],
        SECONDS[hardware.kind] if seconds is None else seconds,
        on_progress,
        traffic=True,
    )
    rates = tuple(filter(None, map(_rate, asked, answer["products"])))
    check_own_products(rates, asked, answer["products"], chosen.name)
    return MeasuredPeaks(
        name=hardware.name,
        driver=hardware.driver,
        kind=hardware.kind,
        matmul_tflops=_highest(rates),
        bandwidth=max(answer["traffic"].values()),
        bandwidths=answer["traffic"],
        rates=rates,
        workload=chosen.name,
        micro_batch=micro_batch,
        date=timestamp(),
        versions=versions,
        command=command,
        failed=failed_products(asked, answer["products"]),
    )


Asked = tuple[str, Gemm]  # a dtype and a product


def check_own_products(
    rates: Sequence[MeasuredRate], asked: Sequence[Asked], answers: Sequence[dict[str, Any]], name: str
) -> None:
    """Refuse a result in which only square products were timed: it says nothing about the workload, and must not
    replace an earlier measurement."""
    if any(rate.where != SQUARE for rate in rates):
        return
    own = (answer["error"] for (_, gemm), answer in zip(asked, answers, strict=True) if gemm.where != SQUARE)
    raise UserError(
        f"none of {name}'s own products could be timed",
        next(own),
        "choose a smaller --micro-batch, or free the device's memory",
    )


def failed_products(asked: Sequence[Asked], answers: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return one line for each product that has no rate, with the dtypes and the reason."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for (dtype, gemm), answer in zip(asked, answers, strict=True):
        if "error" in answer:
            product = f"{_where(gemm)} {gemm.m} x {gemm.n} x {gemm.k}"
            dtypes.setdefault((product, answer["error"]), []).append(dtype)
    return tuple(f"not timed: {product} ({', '.join(of)}): {error}" for (product, error), of in dtypes.items())


def default_micro_batch(name: str) -> int:
    return PRESETS[name].micro_batch if name in PRESETS else MICRO_BATCH


def peak_gemms(shape: Shape, micro_batch: int, hardware: Hardware) -> list[Gemm]:
    """Return the workload's own products and square ones, small to large: if time is short, the large ones are left
    out."""
    squares = [Gemm(where=SQUARE, direction="forward", m=n, n=n, k=n) for n in fitting_squares(hardware)]
    own = linear_gemms(shape, Plan(), micro_batch=micro_batch)
    return sorted([*own, *squares], key=lambda gemm: gemm.m * gemm.n * gemm.k)


def fitting_squares(hardware: Hardware) -> list[int]:
    room = SQUARE_MEMORY_SHARE * (hardware.memory_bytes or 0)
    sizes = SQUARES[hardware.kind]
    return [n for n in sizes if hardware.memory_bytes is None or 3 * 4 * n * n <= room]


def measured_dtypes(hardware: Hardware) -> list[str]:
    """Return the dtypes to measure: fp32 runs everywhere, the others where the probe found their instructions."""
    return [dtype for dtype in DTYPES if dtype == "fp32" or dtype in hardware.features]


def product_of(gemm: Gemm, dtype: str) -> dict[str, Any]:
    """Return the product as the worker expects it. For the second product of attention (weights times v), the layouts
    of forward and dgrad are swapped."""
    layouts = {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}
    if gemm.where == "mix":
        layouts = {"forward": "NN", "dgrad": "TN", "wgrad": "NT"}
    layout = layouts[gemm.direction]
    return {"dtype": dtype, "layout": layout, "m": gemm.m, "n": gemm.n, "k": gemm.k, "batch": gemm.batch}


def check_seconds(seconds: float | None) -> None:
    low, high = SECONDS_BETWEEN
    if seconds is not None and not low <= seconds <= high:
        raise UserError(
            f"--seconds is {seconds:g}",
            "less gives each product no repeats, and more only heats the device",
            f"choose {low:g} to {high:g} seconds",
        )


def ask(
    device: str,
    products: list[dict[str, Any]],
    seconds: float,
    on_progress: OnProgress | None,
    *,
    traffic: bool = False,
) -> dict[str, Any]:
    """Run one task in one worker. Return its answer, or raise the reason there is none."""
    with tempfile.TemporaryDirectory(prefix="redline-matmuls-") as name:
        folder = Path(name)
        task = {"device": device, "products": products, "seconds": seconds, "traffic": traffic}
        write_atomically(folder / "task.json", json.dumps(task))
        phase, in_time, code = _run_worker(folder, seconds + GRACE_SECONDS, on_progress or _silent)
        if not in_time:
            raise _failed(f"stopped {GRACE_SECONDS:g} s after its time while {phase}")
        return _read_answer(folder, code, phase)


def _run_worker(folder: Path, timeout_seconds: float, on_progress: OnProgress) -> tuple[str, bool, int]:
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "redline.engine.matmuls", str(folder)],
            stdin=subprocess.PIPE,  # held open: the worker exits when it closes
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **launch.import_environment()},
            start_new_session=True,
        )
        phase, in_time = launch.follow(process, timeout_seconds, on_progress)
    return phase, in_time, process.returncode


def _read_answer(folder: Path, code: int, phase: str) -> dict[str, Any]:
    answer, failure = folder / "answer.json", folder / "failure.json"
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    if failure.exists():
        raise _failed(json.loads(failure.read_text(encoding="utf-8"))["reason"])
    raise _failed(f"the worker left with exit code {code} while {phase}: {launch.last_line(folder / 'log.txt')}")


def _failed(reason: str) -> UserError:
    return UserError(
        "the matrix products could not be timed", reason, "free the device's memory, or measure the CPU: --device cpu"
    )


def _where(gemm: Gemm) -> str:
    return gemm.where if gemm.where == SQUARE else f"{gemm.where} {gemm.direction}"


def _rate(asked: Asked, answer: dict[str, Any]) -> MeasuredRate | None:
    dtype, gemm = asked
    if "error" in answer:
        return None
    return MeasuredRate(
        dtype=dtype,
        where=_where(gemm),
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        median_seconds=answer["median_seconds"],
        best_seconds=answer["best_seconds"],
    )


def _highest(rates: Sequence[MeasuredRate]) -> dict[str, float]:
    dtypes = dict.fromkeys(rate.dtype for rate in rates)
    return {dtype: max(rate.tflops for rate in rates if rate.dtype == dtype) for dtype in dtypes}


def _silent(*_: Any, **__: Any) -> None:
    pass
