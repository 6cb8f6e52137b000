"""What only a CUDA device can show: pinned kernels, synchronisations, loss scaling, OOM as a row."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.data.tokens import prepare_tokens
from redline.predict.verdict import judge
from redline.rungs import find_rung, plan_of
from redline.search.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hasty_workers")]

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    prepare_tokens(WORKLOAD, directory.path / "tokens.npy")
    return directory


def job(*rungs: str, micro_batch: int = 8, **changes: object) -> Job:
    recipe = Recipe(rungs=rungs, micro_batch=micro_batch)
    made = Job(workload=WORKLOAD, recipe=recipe, device="cuda", tokens="tokens.npy", timed_steps=10)
    return replace(made, **changes)  # type: ignore[arg-type]


def ask(run: RunDirectory, question: Job) -> Measurement | Failure:
    return launch(run, question, 300, lambda *_, **__: None)


@pytest.fixture(scope="module")
def reference(run: RunDirectory) -> tuple[float, ...]:
    answer = ask(run, job(kind="reference"))
    assert isinstance(answer, Measurement), answer
    return answer.loss_curve


@pytest.mark.parametrize(
    ("rungs", "verdict", "kernel"),
    [
        (("tf32",), "rounding", "bmm + softmax"),
        (("tf32", "no-sync"), "same", "bmm + softmax"),
        (("tf32", "bf16"), "rounding", "bmm + softmax"),
        (("tf32", "fp16"), "rounding", "bmm + softmax"),
        (("bf16", "flash"), "rounding", "flash_fwd"),
        (("bf16", "cudnn-attention"), "rounding", "cudnn"),
        (("bf16", "flash", "padded-vocab"), "rounding", "flash_fwd"),
        (("bf16", "flash", "fused-adamw"), "rounding", "flash_fwd"),
        (("bf16", "flash", "loader-workers"), "same", "flash_fwd"),
        (("bf16", "compile", "flash", "bf16-residual", "fused-backward"), "rounding", "flash_fwd"),
    ],
)
def test_each_rung_keeps_its_promise(
    run: RunDirectory, reference: tuple[float, ...], rungs: tuple[str, ...], verdict: str, kernel: str
) -> None:
    rung = find_rung(rungs[-1])
    bit_exact = rung.name if rung.maths.value == "bit-exact" else None
    answer = ask(run, job(*rungs, bit_exact_rung=bit_exact))
    assert isinstance(answer, Measurement), answer
    found = judge(
        maths=rung.maths.value,
        precision=plan_of(rungs).precision,
        measurement=answer,
        reference=reference,
        base=None,
        plain=reference,
        ln_vocab=SHAPE.ln_vocab,
    )
    assert found.verdict == verdict, found.detail
    assert kernel in (answer.proof.attention or ""), answer.proof
    assert answer.peak_bytes is not None
    assert answer.outside_bytes is not None
    assert answer.outside_bytes > 0


def test_synchronisations_are_counted(run: RunDirectory) -> None:
    counts = {}
    for rungs in ((), ("no-sync",), ("no-sync", "loader-workers")):
        answer = ask(run, job(*rungs))
        assert isinstance(answer, Measurement), answer
        counts[rungs] = answer.proof.syncs_per_step
    # Baseline: the blocking copy of the batch and the read of the loss. One read in ten steps remains at the end.
    assert counts[()] == 2.0
    assert counts[("no-sync",)] == pytest.approx(1.1)
    assert counts[("no-sync", "loader-workers")] == pytest.approx(0.1)


def test_a_cycle_without_reads_never_waits(run: RunDirectory) -> None:
    import torch

    from redline.engine.build import build

    rungs = ("tf32", "no-sync", "bf16", "flash", "fused-adamw", "loader-workers")
    device = torch.device("cuda")
    training = build(WORKLOAD, plan_of(rungs), micro_batch=8, tokens=run.path / "tokens.npy", device=device)
    for _ in range(10):
        training.step(next(training.batches))
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(9):
            training.step(next(training.batches))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.close()


def test_out_of_memory_is_a_failure_with_its_kind(run: RunDirectory) -> None:
    answer = ask(run, job(micro_batch=4_000_000, check_steps=2))
    assert isinstance(answer, Failure)
    assert answer.kind == "oom", answer


def test_reference_halves_its_batch_until_it_fits(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from redline.engine import measure
    from redline.engine.measure import Bench, measure_reference

    chunks: list[int | None] = []
    curve_of = measure.reference_curve

    def noted(bench: Bench, chunk: int | None) -> list[float]:
        chunks.append(chunk)
        return curve_of(bench, chunk)

    monkeypatch.setattr(measure, "reference_curve", noted)
    question = job(kind="reference", micro_batch=64, check_steps=2)
    bench = Bench(job=question, tokens=Path(run.path / "tokens.npy"), device=torch.device("cuda"), report=_quiet)
    whole = measure_reference(bench).loss_curve
    assert chunks == [64]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.003)  # about 430 MB of an H200: 64 sequences do not fit
    try:
        halved = measure_reference(bench).loss_curve
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(chunks) > 2, "the limit was too generous to test anything"
    assert chunks[1:] == [64 >> tried for tried in range(len(chunks) - 1)]
    assert halved == pytest.approx(whole, rel=1e-4)


def _quiet(*_: object, **__: object) -> None:
    pass
