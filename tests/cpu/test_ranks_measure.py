"""Measurements of several ranks: right against one process, wrong where one of them is, and failed where one fails.

Ranks are real processes with gloo. Measurements share one start of them (`rank_measures.py`); the commands are run as a
user runs them, with faults that are planted from outside (`planted/sitecustomize.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli import main
from redline.core.job import Job
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Shape, Workload
from redline.data.batches import TokenBatches
from redline.engine.measure import Bench, measure_reference
from redline.predict.verdict import Equivalence, judge

HERE = Path(__file__).resolve().parent
CHECK_STEPS = 6
SMALL = {"layers": 1, "heads": 2, "d_model": 16, "d_ff": 32, "vocab": 257, "sequence": 16}
WORKLOAD = Workload(name="ranked", shape=Shape(**SMALL), tokenizer="bytes", micro_batch=3, learning_rate=3e-3)
JOB = Job(
    workload=WORKLOAD,
    recipe=Recipe(rungs=("ddp",), micro_batch=3),
    device="cpu",
    ranks=2,
    tokens="tokens.npy",
    check_steps=CHECK_STEPS,
    timed_steps=3,
)
CASES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "ddp": (("ddp",), None),
    "fsdp": (("fsdp", "padded-vocab", "fused-adamw"), None),
    "unreduced": (("ddp",), "unreduced"),
    "other-share": (("ddp",), "other-share"),
    "other-share-cut": (("fsdp",), "other-share"),
}


@pytest.fixture(scope="module")
def measured(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Measurement]]:
    """By rank and case."""
    folder = tmp_path_factory.mktemp("measures")
    shutil.copy(tokens, folder / JOB.tokens)
    jobs = {}
    for name, (rungs, fault) in CASES.items():
        job = replace(JOB, recipe=Recipe(rungs=rungs, micro_batch=3), kind="measure" if fault is None else "trial")
        jobs[name] = {"job": to_json(job), "fault": fault}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_measures.py"), "2", str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return [{name: from_json(Measurement, one) for name, one in rank.items()} for rank in told]


@pytest.fixture(scope="module")
def reference(tokens: Path) -> tuple[float, ...]:
    """One process on what both ranks share, in pieces of one rank's size."""
    job = replace(JOB, kind="reference", recipe=Recipe(micro_batch=3))
    bench = Bench(job=job, tokens=tokens, device=torch.device("cpu"), report=lambda *_, **__: None)
    return measure_reference(bench).loss_curve


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "LOGLEVEL": "CRITICAL", **more}


def verdict(measurement: Measurement, reference: tuple[float, ...]) -> Equivalence:
    return judge(
        maths="rounding-only",
        precision="fp32",
        measurement=measurement,
        reference=reference,
        base=None,
        plain=reference,
        ln_vocab=WORKLOAD.shape.ln_vocab,
    )


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_ranks_are_held_against_one_process_on_their_whole_batch(
    measured: list[dict[str, Measurement]], reference: tuple[float, ...], case: str
) -> None:
    found = measured[0][case]
    assert verdict(found, reference).verdict == "rounding"
    assert found.gradients is not None
    assert found.gradients.error < 1e-5
    assert found.loss_curve == pytest.approx(reference, abs=1e-4)
    assert found.gradients.loss == pytest.approx(reference[0], abs=1e-5)


@pytest.mark.parametrize("case", ["unreduced", "other-share", "other-share-cut"])
def test_a_rank_that_goes_its_own_way_is_different(
    measured: list[dict[str, Measurement]], reference: tuple[float, ...], case: str
) -> None:
    """The fault is rank 1's alone; rank 0's own gradients may be right."""
    found = verdict(measured[0][case], reference)
    assert found.verdict == "different", found
    assert "gradient" in found.detail


def test_ranks_bring_back_one_answer_and_the_worst_of_each_figure(measured: list[dict[str, Measurement]]) -> None:
    for case in ("ddp", "fsdp"):
        first, second = (rank[case] for rank in measured)
        assert first.step_seconds == second.step_seconds
        assert (first.peak_bytes, first.loss_curve) == (second.peak_bytes, second.loss_curve)
        assert first.gradients == second.gradients
        assert len(first.step_seconds) == 3
        assert first.sharing == second.sharing
        assert first.sharing is not None
        assert 0 < first.sharing.exposed_seconds <= first.sharing.communication_seconds
        assert len(first.sharing.compute_seconds) == 2
        assert max(first.sharing.compute_seconds) < statistics.median(first.step_seconds)
        assert first.proof.groups is not None
        assert first.proof.groups["communication"] > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_batch_that_one_process_draws(tokens: Path, ranks: int) -> None:
    each: dict[str, Any] = {"path": tokens, "seed": 7, "sequence": 16}
    whole = TokenBatches(**each, micro_batch=4 * ranks)
    shares = [TokenBatches(**each, micro_batch=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    for index in (0, 5):
        assert torch.equal(torch.cat([share[index] for share in shares], dim=1), whole[index])


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """command("ladder", "--rungs", "none", fault="memory") -> exit code and document."""

    def run(name: str, *words: str, fault: str | None = None) -> tuple[int, dict[str, Any]]:
        for variable, value in environment().items():
            monkeypatch.setenv(variable, value)
        if fault is not None:
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "planted"), str(HERE.parents[1])]))
            monkeypatch.setenv("PLANTED_FAULT", fault)
        common = ("--gpus", "2", "--device", "cpu", "--steps", "3", "--out", str(tmp_path / "run"), "--json")
        code = main([name, str(model), *common, *words])
        return code, json.loads(capfd.readouterr().out)

    return run


FAULTS = {
    "memory": ("rank 1: out of memory: planted", ()),
    "kill": ("rank 1 was killed by SIGKILL (the system may be out of memory)", ()),
    "raise": ("rank 1: ArithmeticError: the planted fault", ()),
    "hang": ("rank 1 is in hang, sitecustomize.py", ("--timeout", "60")),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["memory", "kill", "raise", "hang"])
def test_what_one_rank_meets_is_the_row_of_all_and_the_ladder_goes_on(
    command: Callable[..., tuple[int, dict[str, Any]]],
    tmp_path: Path,
    fault: str,
    left_behind: Callable[[Path], list[str]],
) -> None:
    text, more = FAULTS[fault]
    size = ("--micro-batch", "2", "--check-steps", "4")
    code, document = command("ladder", "--rungs", "flash,fused-adamw", *size, *more, fault=fault)
    assert code == 0
    first, failed, last = document["rows"]
    assert (first["rung"], first["status"], first["equivalence"]["verdict"]) == ("ddp", "ok", "rounding")
    assert (failed["rung"], failed["status"]) == ("flash", "failed")
    assert text in failed["reason"]
    assert (last["recipe"], last["status"], last["equivalence"]["verdict"]) == (
        ["ddp", "fused-adamw"],
        "ok",
        "rounding",
    )
    assert first["tokens_per_second"] == pytest.approx(2 * 2 * 16 / first["step_seconds"]["median"])
    assert document["hardware"]["ranks"] == 2
    assert first["sharing"]["communication_seconds"] > 0
    assert left_behind(tmp_path / "run") == []
    assert "comm ms" in (tmp_path / "run" / "report.html").read_text()


def test_a_profile_of_ranks_has_their_communication(
    command: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    code, document = command("profile", "--rungs", "flash", "--micro-batch", "2")
    assert code == 0
    assert document["recipe"]["rungs"] == ["flash", "ddp"]
    seconds = {each["group"]: each["seconds"] for each in document["groups"]}
    assert seconds["communication"] > 0
    assert sum(seconds.values()) == pytest.approx(document["step_seconds"]["median"])
    sharing = document["sharing"]
    assert sharing["exposed_seconds"] <= sharing["communication_seconds"]
    assert len(sharing["compute_seconds"]) == 2
    assert document["tokens_per_second"] == pytest.approx(2 * 2 * 16 / document["step_seconds"]["median"])
    assert document["memory"]["predicted"]["allocated"] > 0
    assert "of communication a step" in (tmp_path / "run" / "report.html").read_text()
    assert left_behind(tmp_path / "run") == []


@pytest.mark.long
def test_tune_finds_a_recipe_for_ranks_that_train_takes(
    command: Callable[..., tuple[int, dict[str, Any]]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--rungs", "flash,fused-adamw", "--minutes", "4", "--check-steps", "4", "--global-batch", "16")
    code, document = command("tune", *words)
    assert code == 0
    best = document["best"]
    assert best["verdict"] == "rounding"
    assert "ddp" in best["rungs"]
    assert best["micro_batch"] * 2 * best["accumulation"] == 16
    assert all(8 % row["micro_batch"] == 0 for row in document["rows"])
    recipe = str(tmp_path / "run" / "best.json")
    train = ["train", str(model), "--recipe", recipe, "--gpus", "2", "--device", "cpu", "--global-batch", "16"]
    assert main([*train, "--steps", "2", "--out", str(tmp_path / "trained")]) == 0


@pytest.mark.parametrize("name", ["ladder", "tune", "profile"])
def test_what_cannot_be_is_refused_before_anything_is_made(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([name, str(model), "--gpus", "0", "--device", "cpu", "--out", str(out)]) == 2
    assert "--gpus is 0" in capfd.readouterr().err
    assert not out.exists()
