"""A trial as a worker runs it, and one small ladder with --rebatch from the command to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.core.measurement import Proof
from redline.core.recipe import load_recipe
from redline.engine import measure, memory
from redline.engine.measure import time_steps
from redline.search.ladder import resume_ladder

BenchOf = Callable[..., measure.Bench]


def test_a_trial_is_checked_and_evaluated_but_not_profiled(
    bench: BenchOf, no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "prove", lambda *_: pytest.fail("a trial needs no profile"))
    evaluated: list[Any] = []
    monkeypatch.setattr(measure, "evaluate", lambda training: evaluated.append(training))
    found = measure.measure(bench(kind="trial", check_steps=2))
    assert found.proof == Proof()
    assert found.gradients is not None
    assert found.gradients.error < 1e-4
    assert len(found.step_seconds) == 2
    assert len(evaluated) == 1
    assert found.alloc_retries is None, "a CPU has no such counter"


def test_evaluation_is_a_forward_of_the_same_size_and_changes_nothing(train: Callable[..., Any]) -> None:
    training = train(measure.plan_of(("flash",)), micro_batch=3)
    sizes: list[torch.Size] = []
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    plain = training.step.loss_of

    def watched(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sizes.append(inputs.shape)
        return plain(inputs, targets)

    training.step.loss_of = watched
    measure.evaluate(training)
    assert sizes == [(3, training.workload.shape.sequence)]
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())


def test_an_evaluation_that_does_not_fit_is_out_of_memory(
    bench: BenchOf, no_waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB")

    monkeypatch.setattr(measure, "evaluate", too_large)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        measure.measure(bench(kind="trial", check_steps=2))
    assert memory.is_out_of_memory(caught.value)


@pytest.mark.parametrize(("kind", "count"), [("measure", 50), ("trial", 25)])
def test_a_trial_is_timed_for_half_as_long(bench: BenchOf, kind: str, count: int) -> None:
    class Idle:
        step, batches = staticmethod(lambda _: None), iter(lambda: 0, 1)

    assert len(time_steps(bench(kind=kind, timed_steps=None), Idle(), 0.05)) == count  # type: ignore[arg-type]


def test_retries_are_read_off_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls reset what the other leaves: peaks are no accumulated statistics."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: calls.append("peak"))
    monkeypatch.setattr(torch.cuda, "reset_accumulated_memory_stats", lambda _: calls.append("accumulated"))
    cuda = torch.device("cuda")
    memory.reset_peak(cuda)
    assert calls == ["peak", "accumulated"]
    assert memory.alloc_retries(cuda) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
def test_a_ladder_with_each_rung_at_its_own_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    document = redline.ladder(
        "tiny",
        rungs="none",
        steps=2,
        check_steps=3,
        micro_batch=2,
        device="cpu",
        rebatch=True,
        global_batch=2,
        out=out,
        timeout=240,
    )
    row = document["rows"][0]
    own = row["rebatched"]
    assert (row["micro_batch"], row["status"], own["status"]) == (2, "ok", "ok")
    assert {trial["micro_batch"] for trial in own["trials"]} == {1, 2}, "the divisors of 2"
    fastest = max(own["trials"], key=lambda trial: trial["tokens_per_second"])
    assert own["micro_batch"] * own["accumulation"] == 2
    assert own["tokens_per_second"] >= 0.9 * fastest["tokens_per_second"]
    fixed = next(trial for trial in own["trials"] if trial["micro_batch"] == 2)
    assert fixed["tokens_per_second"] == row["tokens_per_second"], "the row itself, not run again"
    assert all(trial["peak_bytes"] > 1 << 20 for trial in own["trials"])
    assert own["mfu"] is own["predicted_peak_bytes"] is None
    assert load_recipe(out / "best-rebatched.json").micro_batch == own["micro_batch"]
    assert "Each at its own micro batch" in (out / "report.html").read_text(encoding="utf-8")

    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(record["job"]["kind"], record["ok"]) for record in records] == [
        ("reference", True),
        ("measure", True),
        ("trial", True),
    ]
    # A second call costs nothing: every question is answered already.
    monkeypatch.setattr("redline.search.ladder.launch", lambda *_, **__: pytest.fail("asked again"))
    again = resume_ladder(out, {}).climb(timeout_seconds=1, view=Nobody())
    assert again["rows"] == document["rows"]


class Nobody:
    """A view that looks away."""

    def row_started(self, *_: Any) -> None: ...
    def phase(self, *_: Any, **__: Any) -> None: ...
    def row_finished(self, row: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("status", ["CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"])
def test_a_library_that_finds_no_room_for_itself_is_out_of_memory(status: str) -> None:
    assert memory.is_out_of_memory(RuntimeError(f"CUDA error: {status} when calling `cublasCreate(handle)`"))
    assert not memory.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
