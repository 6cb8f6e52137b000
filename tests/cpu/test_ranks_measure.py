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
from redline.core.layout import Layout
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
PLAIN = Layout(ranks=2)
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
Case = tuple[tuple[str, ...], str | None, Layout | None]
Measured = list[dict[str, Measurement]]
PAIR, SQUARE = Layout(ranks=2, tensor=2), Layout(ranks=4, tensor=2)
CASES: dict[str, Case] = {
    "ddp": (("ddp",), None, None),
    "fsdp": (("fsdp", "padded-vocab", "fused-adamw"), None, None),
    "unreduced": (("ddp",), "unreduced", None),
    "other-share": (("ddp",), "other-share", None),
    "other-share-cut": (("fsdp",), "other-share", None),
    "tensor": (("tensor-parallel",), None, PAIR),
    "tensor-padded": (("tensor-parallel", "padded-vocab", "fused-adamw"), None, PAIR),
    "cut-across": (("tensor-parallel",), "cut-across", PAIR),
    "twice": (("tensor-parallel",), "twice", PAIR),
    "unsummed": (("tensor-parallel",), "unsummed", PAIR),
}
FOUR_CASES: dict[str, Case] = {
    "tensor-ddp": (("tensor-parallel", "ddp"), None, SQUARE),
    "tensor-fsdp": (("tensor-parallel", "fsdp"), None, SQUARE),
    "tensor-unreduced": (("tensor-parallel", "ddp"), "unreduced", SQUARE),
    "tensor-other-share": (("tensor-parallel", "fsdp"), "other-share", SQUARE),
    "hybrid": (("fsdp",), None, Layout(ranks=4, replicas=2)),
}


@pytest.fixture(scope="module")
def measured(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """By rank and case."""
    return measured_by(2, CASES, tokens, tmp_path_factory.mktemp("measures"))


@pytest.fixture(scope="module")
def measured_by_four(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured_by(4, FOUR_CASES, tokens, tmp_path_factory.mktemp("measures"))


def measured_by(ranks: int, cases: dict[str, Case], tokens: Path, folder: Path) -> Measured:
    shutil.copy(tokens, folder / JOB.tokens)
    jobs = {}
    for name, (rungs, fault, layout) in cases.items():
        kind, size = "measure" if fault is None else "trial", 2 * JOB.recipe.micro_batch // (layout or PLAIN).data
        job = replace(JOB, recipe=Recipe(rungs=rungs, micro_batch=size), kind=kind, ranks=ranks, layout=layout)
        jobs[name] = {"job": to_json(job), "fault": fault}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_measures.py"), str(ranks), str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
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


@pytest.mark.parametrize("case", ["ddp", "fsdp", "tensor", "tensor-padded"])
def test_ranks_are_held_against_one_process_on_their_whole_batch(
    measured: Measured, reference: tuple[float, ...], case: str
) -> None:
    check_equal(measured[0][case], reference)


@pytest.mark.long  # four ranks; two do the same for data and for layers, each alone
@pytest.mark.parametrize("case", ["tensor-ddp", "tensor-fsdp"])
def test_four_ranks_that_share_data_and_layers_are_held_against_one_process(
    measured_by_four: Measured, reference: tuple[float, ...], case: str
) -> None:
    check_equal(measured_by_four[0][case], reference)


@pytest.mark.long  # as above
def test_copies_that_are_cut_have_the_gradients_of_one_process(measured_by_four: Measured) -> None:
    found = measured_by_four[3]["hybrid"].gradients
    assert found is not None
    assert found.error < 1e-5
    assert max(found.update_errors.values()) < 1e-2, "AdamW's first update divides a gradient by its own size"
    assert found.loss == pytest.approx(found.reference_loss, abs=1e-5)


def check_equal(found: Measurement, reference: tuple[float, ...]) -> None:
    assert verdict(found, reference).verdict == "rounding"
    assert found.gradients is not None
    assert found.gradients.error < 1e-5
    assert found.loss_curve == pytest.approx(reference, abs=1e-4)
    assert found.gradients.loss == pytest.approx(reference[0], abs=1e-5)


@pytest.mark.parametrize("case", ["unreduced", "other-share", "other-share-cut", "cut-across", "twice", "unsummed"])
def test_a_rank_that_goes_its_own_way_is_different(measured: Measured, reference: tuple[float, ...], case: str) -> None:
    """The fault is rank 1's alone, but for the sums of a group; rank 0's own gradients may be right."""
    check_different(measured[0][case], reference)


@pytest.mark.long  # as above
@pytest.mark.parametrize("case", ["tensor-unreduced", "tensor-other-share"])
def test_a_tensor_group_that_goes_its_own_way_is_different(
    measured_by_four: Measured, reference: tuple[float, ...], case: str
) -> None:
    check_different(measured_by_four[0][case], reference)


def check_different(measurement: Measurement, reference: tuple[float, ...]) -> None:
    found = verdict(measurement, reference)
    assert found.verdict == "different", found
    assert "gradient" in found.detail


def test_a_piece_that_is_wrong_counts_as_its_part_of_the_whole_tensor(measured: Measured) -> None:
    """Rank 1's half of one matrix is twice what it should be: nothing else of the gradients is."""
    wrong, right = (measured[0][case].gradients for case in ("twice", "tensor"))
    assert wrong is not None
    assert right is not None
    off = {name for name, error in wrong.tensor_errors.items() if error > 1e-4}
    assert off == {"h.0.mlp.c_fc.weight"}
    assert 0.3 < wrong.tensor_errors["h.0.mlp.c_fc.weight"] < 0.95, "about the root of a half"
    assert wrong.tensor_errors.keys() == right.tensor_errors.keys()


def test_ranks_bring_back_one_answer_and_the_worst_of_each_figure(measured: Measured) -> None:
    for case in ("ddp", "fsdp", "tensor"):
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
    "leave": ("rank 1 left with exit code 7", ()),
    "hang": ("rank 1 is in hang, sitecustomize.py", ("--timeout", "60")),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["memory", "kill", "raise", "leave", "hang"])
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


def test_a_profile_of_a_tensor_group_counts_its_tokens_once(
    command: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    """Also that the waits for the group's sums are communication: they are operators of the thread that trains."""
    code, document = command("profile", "--rungs", "none", "--micro-batch", "2", "--tensor", "2")
    assert code == 0
    assert document["recipe"]["rungs"] == ["tensor-parallel"]
    assert document["hardware"]["layout"] == to_json(PAIR)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["hardware"]["layout"] == to_json(PAIR)
    assert document["tokens_per_second"] == pytest.approx(2 * 16 / document["step_seconds"]["median"])
    sharing = document["sharing"]
    assert sharing["by_group"] == {"tensor": sharing["communication_seconds"]}
    assert {each["group"] for each in document["kernels"] if "wait_tensor" in each["name"]} == {"communication"}
    held, predicted = document["memory"]["peak_bytes"], document["memory"]["predicted"]["allocated"]
    assert 0.8 < held / predicted < 1.2, "of a rank's half of the layers"
    assert "2 ranks: tensor 2 x data 1" in (tmp_path / "run" / "report.html").read_text()
    assert left_behind(tmp_path / "run") == []


@pytest.mark.long  # the measurements are those of `measured`, and the rows are tests/plain/test_ranks_layout.py's
def test_a_ladder_in_a_layout_goes_on_in_it(
    command: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--tensor", "2", "--rungs", "flash,fused-adamw,chunked-loss,fsdp", "--micro-batch", "2")
    code, document = command("ladder", *words, "--check-steps", "4")
    assert code == 0
    rows = {row["rung"]: row for row in document["rows"]}
    assert list(rows) == ["tensor-parallel", "flash", "fused-adamw", "chunked-loss", "fsdp"]
    for name in ("tensor-parallel", "flash", "fused-adamw"):
        assert rows[name]["equivalence"]["verdict"] == "rounding"
        assert rows[name]["sharing"]["communication_seconds"] > 0
        assert rows[name]["tokens_per_second"] == pytest.approx(2 * 16 / rows[name]["step_seconds"]["median"])
    assert "undoes it" in rows["chunked-loss"]["reason"]
    assert "nobody has data of their own" in rows["fsdp"]["reason"]
    answers = (tmp_path / "run" / "results.jsonl").read_bytes()
    assert main(["ladder", "--resume", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert (again["hardware"], again["rows"]) == (document["hardware"], document["rows"])
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == answers, "nothing is asked twice"


@pytest.mark.long
def test_tune_finds_a_recipe_for_a_tensor_group(
    command: Callable[..., tuple[int, dict[str, Any]]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--tensor", "2", "--rungs", "flash,fused-adamw", "--minutes", "4", "--check-steps", "4")
    code, document = command("tune", *words, "--global-batch", "8")
    assert code == 0
    best = document["best"]
    assert best["verdict"] == "rounding"
    assert "tensor-parallel" in best["rungs"]
    assert "ddp" not in best["rungs"]
    assert best["micro_batch"] * best["accumulation"] == 8
    recipe = str(tmp_path / "run" / "best.json")
    train = ["train", str(model), "--recipe", recipe, "--gpus", "2", "--tensor", "2", "--device", "cpu"]
    assert main([*train, "--global-batch", "8", "--steps", "2", "--out", str(tmp_path / "trained")]) == 0


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
