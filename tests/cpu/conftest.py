"""What the torch-on-CPU tests share: a small model, its tokens, and a whole measurement with its verdict in process.

`judge_row` follows the path of a real row without the worker around it: reference curve, `measure`, `judge`. A planted
fault must reach the measured run but not the plain reference, built by the same `build`: `plant` selects by plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.job import Job
from redline.core.measurement import Measurement, Proof
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.data.tokens import prepare_tokens
from redline.engine import equivalence, measure
from redline.engine.build import Training, build
from redline.predict.verdict import Equivalence, judge
from redline.rungs import Maths, find_rung, plan_of

CPU = torch.device("cpu")
CHECK_STEPS = 20  # as many as a ladder compares by default

Fault = Callable[[Training], None]


@dataclass(frozen=True)
class Judged:
    """A row as the climb would see it."""

    verdict: str
    detail: str
    measurement: Measurement
    reference: tuple[float, ...]


@pytest.fixture(autouse=True)
def process_switches() -> Iterator[None]:
    """Switch back what a plan switches: measurements have a process each, but tests share one."""
    backends = torch.backends.cuda
    before = {
        backends.enable_flash_sdp: backends.flash_sdp_enabled(),
        backends.enable_cudnn_sdp: backends.cudnn_sdp_enabled(),
        backends.enable_mem_efficient_sdp: backends.mem_efficient_sdp_enabled(),
        backends.enable_math_sdp: backends.math_sdp_enabled(),
    }
    precision = torch.get_float32_matmul_precision()
    yield
    for switch, was_on in before.items():
        switch(was_on)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="session")
def small() -> Workload:
    """Like `tiny` in everything that decides a verdict (vocabulary, learning rate, warm-up), at a tenth of the work."""
    shape = Shape(layers=2, heads=4, d_model=64, d_ff=256, vocab=257, sequence=64)
    return Workload(name="small", shape=shape, tokenizer="bytes", micro_batch=6, learning_rate=3e-3)


@pytest.fixture(scope="session")
def tokens(small: Workload, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of our licence: real prose that is the same under every Python, unlike the sample corpus."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    prepare_tokens(replace(small, corpus=str(repository / "LICENSE")), path)
    return path


@pytest.fixture
def train(small: Workload, tokens: Path) -> Iterator[Callable[..., Training]]:
    """train(Plan(...), chunk=2, workload=...) -> Training, closed at the end of the test."""
    made: list[Training] = []

    def make(plan: Plan, *, workload: Workload = small, micro_batch: int = 6, chunk: int | None = None) -> Training:
        where: dict[str, Any] = {"micro_batch": micro_batch, "tokens": tokens, "device": CPU, "chunk": chunk}
        made.append(build(workload, plan, **where))
        return made[-1]

    yield make
    for training in made:
        training.close()


@pytest.fixture
def bench(small: Workload, tokens: Path) -> Callable[..., measure.Bench]:
    """bench("flash", check_steps=5) -> Bench: a job for this process, whose reports go nowhere."""

    def make(
        *rungs: str, workload: Workload = small, micro_batch: int = 6, report: Any = quiet, **changes: Any
    ) -> measure.Bench:
        recipe = Recipe(rungs=rungs, micro_batch=micro_batch)
        job = Job(workload=workload, recipe=recipe, device="cpu", tokens=tokens.name, timed_steps=2)
        return measure.Bench(job=replace(job, **changes), tokens=tokens, device=CPU, report=report)

    return make


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for timings to become steady: they are not judged here."""
    monkeypatch.setattr(measure, "is_steady", lambda *_: True)


@pytest.fixture
def verdict_only(no_waiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the profile at the end and freeing device memory, which no verdict needs: a row takes half the time."""
    monkeypatch.setattr(measure, "prove", lambda *_: (Proof(), None))
    monkeypatch.setattr(measure, "free_memory", lambda *_: None)


@pytest.fixture(scope="session")
def reference_curves() -> dict[Any, tuple[float, ...]]:
    return {}


@pytest.fixture
def judge_row(
    bench: Callable[..., measure.Bench], reference_curves: dict[Any, tuple[float, ...]], verdict_only: None
) -> Callable[..., Judged]:
    """judge_row("bf16", "flash") -> the verdict on the last of these rungs, added to the others."""

    def reference(rungs: tuple[str, ...], **settings: Any) -> tuple[float, ...]:
        changing = tuple(name for name in rungs if find_rung(name).maths is Maths.CHANGES)
        key = (changing, *settings.items())
        if key not in reference_curves:
            asked = bench(*changing, kind="reference", **settings)
            reference_curves[key] = measure.measure_reference(asked).loss_curve
        return reference_curves[key]

    def run(*rungs: str, maths: Maths | None = None, base: tuple[float, ...] | None = None, **changes: Any) -> Judged:
        settings = {"check_steps": CHECK_STEPS, **changes}
        rung = find_rung(rungs[-1] if rungs else "baseline")
        maths = maths or rung.maths
        curve = reference(rungs, **settings)
        pair = rung.name if maths is Maths.BIT_EXACT and rungs else None
        asked = bench(*rungs, bit_exact_rung=pair, **settings)
        found = measure.measure(asked)
        verdict: Equivalence = judge(
            maths=maths.value,
            precision=plan_of(rungs).precision,
            measurement=found,
            reference=curve,
            base=base,
            plain=reference((), **settings),
            ln_vocab=asked.job.workload.shape.ln_vocab,
        )
        return Judged(verdict=verdict.verdict, detail=verdict.detail, measurement=found, reference=curve)

    return run


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """plant(fault, on=("flash",)): whatever is built with the plan of these rungs gets the fault, nothing else does."""

    def sow(fault: Fault, *, on: tuple[str, ...]) -> None:
        broken = plan_of(on)
        assert broken != Plan(), "the plain plan is the reference's too"

        def build_with_fault(workload: Workload, plan: Plan, **where: Any) -> Training:
            training = build(workload, plan, **where)
            if plan == broken:
                fault(training)
            return training

        monkeypatch.setattr(measure, "build", build_with_fault)
        monkeypatch.setattr(equivalence, "build", build_with_fault)

    return sow


def quiet(*_: object, **__: object) -> None:
    pass


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as ranks do: for tensors this small, threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def left_behind() -> Callable[[Path], list[str]]:
    """left_behind(run) -> the command lines of processes that still mention this run."""

    def find(run: Path) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(run) in text and process.name != str(os.getpid()):
                found.append(text.replace("\0", " "))
        return found

    return find
