"""The whole ladder as a user runs it: a command, worker processes, a run directory. Interrupted, timed out, shot at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import redline
from redline.core.job import Job, RunDirectory
from redline.core.recipe import Recipe, load_recipe
from redline.search.launch import worker_environment, worker_path
from redline.workloads import resolve_workload

QUICK = ("--steps", "3", "--check-steps", "4", "--micro-batch", "2", "--device", "cpu", "--json")
LIMIT_SECONDS = 240
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

# The keys of DESIGN section 5, word for word.
DOCUMENT_KEYS = {"workload", "hardware", "versions", "reference", "rows", "best"}
ROW_KEYS = {
    "rung",
    "status",
    "reason",
    "micro_batch",
    "step_seconds",
    "tokens_per_second",
    "speedup_total",
    "speedup_step",
    "mfu",
    "mfu_convention",
    "hfu",
    "peak_bytes",
    "predicted_peak_bytes",
    "compile_seconds",
    "loss_first",
    "loss_last",
    "equivalence",
    "kernels",
}

# A test runner in the background ignores Ctrl-C, and so would what it starts: the command takes it back.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from redline.cli import main
sys.argv[0] = "redline"
raise SystemExit(main())
"""


class Command:
    """`redline ...` in a process, its two streams in files."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::DeprecationWarning", "-c", COMMAND, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": worker_path()},
            )

    def end(self) -> tuple[int, str, str]:
        try:
            code = self.process.wait(timeout=LIMIT_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
        return code, (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text()

    def wait_until(self, seen: Callable[[], Any]) -> Any:
        limit = time.monotonic() + LIMIT_SECONDS
        while not (found := seen()):
            if self.process.poll() is not None or time.monotonic() > limit:
                code, _, errors = self.end()
                pytest.fail(f"it did not happen; exit code {code}\n{errors}")
            time.sleep(0.02)
        return found


def redline_command(folder: Path, *words: object) -> tuple[int, dict[str, Any], str]:
    code, stdout, stderr = Command(folder, *words).end()
    return code, document_in(stdout, stderr), stderr


def document_in(stdout: str, stderr: str) -> dict[str, Any]:
    """Standard output is one JSON document, strictly: NaN and Infinity are Python's own and no JSON."""
    assert stdout, stderr
    document: dict[str, Any] = json.loads(stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return document


def results_of(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def running(folder: Path) -> dict[int, str]:
    """Processes, but no zombies, whose command line or environment names the folder: workers and what they started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            words = (entry / "cmdline").read_text() + (entry / "environ").read_text()
        except OSError:
            continue  # ended as we looked, or somebody else's
        if state != "Z" and str(folder) in words:
            found[int(entry.name)] = words[:200]
    return found


@needs_proc
@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
def test_from_a_command_to_its_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, document, stderr = redline_command(tmp_path, "ladder", "tiny", "--rungs", "flash,tf32", *QUICK, "--out", out)
    assert code == 0, stderr
    assert set(document) >= DOCUMENT_KEYS
    assert all(set(row) >= ROW_KEYS for row in document["rows"])
    assert [(row["rung"], row["status"]) for row in document["rows"]] == [
        ("baseline", "ok"),
        ("tf32", "skipped"),
        ("flash", "ok"),
    ]
    for row in document["rows"]:
        check_row(row)
    assert document["workload"]["name"] == "tiny"
    assert document["hardware"]["kind"] == "cpu"
    assert document["versions"]["torch"]
    assert document["finished"] is True
    assert len(document["reference"]["loss_curve"]) == 4
    measured = {row["rung"]: row for row in document["rows"] if row["status"] == "ok"}
    assert document["best"]["rung"] in measured
    assert document["best"]["tokens_per_second"] == max(row["tokens_per_second"] for row in measured.values())
    assert measured["baseline"]["equivalence"]["verdict"] == "same"
    assert measured["flash"]["equivalence"]["verdict"] in ("rounding", "same")
    assert "flash_attention" in measured["flash"]["kernels"]["attention"]

    assert len(results_of(out)) == 3  # one reference, two measurements
    assert all(record["ok"] for record in results_of(out))
    assert load_recipe(out / "best.json") == Recipe(
        rungs=tuple(measured[document["best"]["rung"]]["recipe"]), micro_batch=2
    )
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "flash" in page
    assert "http://" not in page.replace("http://www.w3.org/", ""), "self-contained"
    assert {path.name for path in out.iterdir()} == {
        "run.json",
        "results.jsonl",
        "report.html",
        "best.json",
        "tokens.npy",
        "jobs",
    }
    assert running(out) == {}

    (out / "report.html").unlink()
    code, again, stderr = redline_command(tmp_path, "report", out, "--json")
    assert code == 0, stderr
    assert again == document
    assert (out / "report.html").read_text(encoding="utf-8") == page


def check_row(row: dict[str, Any]) -> None:
    if row["status"] == "skipped":
        assert row["reason"]
        assert row["step_seconds"] is row["tokens_per_second"] is row["loss_first"] is None
        assert row["equivalence"]["verdict"] == "not-checked"
        return
    steps = row["step_seconds"]
    assert steps["n"] == 3
    assert 0 < steps["p10"] <= steps["median"] <= steps["p90"]
    assert row["tokens_per_second"] == pytest.approx(2 * 256 / steps["median"])
    assert row["micro_batch"] == 2
    assert row["mfu"] is row["hfu"] is None, "no CPU has a peak"
    assert row["peak_bytes"] > 1 << 20
    assert row["compile_seconds"] is None
    assert row["loss_first"] == pytest.approx(5.55, abs=0.2)
    assert row["loss_last"] < row["loss_first"]
    assert set(row["equivalence"]) == {"class", "verdict", "detail"}
    assert row["kernels"]["attention"]


@needs_proc
@pytest.mark.slow
@pytest.mark.usefixtures("hasty_workers")
def test_a_killed_worker_is_a_row_and_resume_repeats_only_that(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = Command(tmp_path, "ladder", "tiny", "--rungs", "flash,padded-vocab", *QUICK, "--out", out)
    os.kill(command.wait_until(lambda: worker_of(out, "measure-flash-")), signal.SIGKILL)
    command.wait_until(lambda: worker_of(out, "measure-padded-vocab-"))  # the ladder goes on
    command.process.send_signal(signal.SIGINT)
    code, stdout, stderr = command.end()
    assert code == 130, stderr
    document = document_in(stdout, stderr)
    assert document["finished"] is False
    assert [(row["rung"], row["status"]) for row in document["rows"]] == [("baseline", "ok"), ("flash", "failed")]
    killed = document["rows"][1]
    assert "killed by SIGKILL" in killed["reason"]
    assert killed["tokens_per_second"] is None
    assert killed["equivalence"]["verdict"] == "not-checked"
    assert f"--resume {out}" in stderr
    assert running(out) == {}
    assert not list(out.glob("jobs/measure-padded-vocab-*/measurement.json")), "the worker was not stopped"
    before = (out / "results.jsonl").read_bytes()
    assert [record["ok"] for record in results_of(out)] == [True, True, False]  # reference, baseline, flash
    logs = {path: path.stat().st_mtime_ns for path in out.glob("jobs/*-baseline-*/log.txt")}
    assert len(logs) == 2  # reference and baseline

    code, so_far, stderr = redline_command(tmp_path / "report", "report", out, "--json")
    assert code == 0, stderr
    assert so_far == document

    code, resumed, stderr = redline_command(tmp_path / "resume", "ladder", "--resume", out, "--json")
    assert code == 0, stderr
    assert resumed["finished"] is True
    assert resumed["rows"][0] == document["rows"][0]
    assert [(row["rung"], row["status"]) for row in resumed["rows"][1:]] == [("flash", "ok"), ("padded-vocab", "ok")]
    assert (out / "results.jsonl").read_bytes().startswith(before)
    assert len(results_of(out)) == 5
    assert {path: path.stat().st_mtime_ns for path in logs} == logs

    code, again, stderr = redline_command(tmp_path / "again", "ladder", "--resume", out, "--json")
    assert (code, again, len(results_of(out))) == (0, resumed, 5), stderr


def worker_of(out: Path, job: str) -> int | None:
    for pid in running(out):
        try:
            if job in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        except OSError:
            continue  # ended as we looked
    return None


@needs_proc
def test_a_time_limit_makes_failed_rows_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, document, stderr = redline_command(
        tmp_path, "ladder", "tiny", "--rungs", "flash", *QUICK, "--timeout", "0.3", "--out", out
    )
    assert code == 1, stderr
    assert [(row["rung"], row["status"]) for row in document["rows"]] == [("baseline", "failed"), ("flash", "failed")]
    for row in document["rows"]:
        assert "stopped after 0.3 s" in row["reason"]
        assert "--timeout" in row["reason"]
        assert row["equivalence"]["verdict"] == "not-checked"
    assert document["best"] is None
    assert not (out / "best.json").exists()
    assert (out / "report.html").exists()
    assert {record["result"]["kind"] for record in results_of(out)} == {"timeout"}
    assert not list(out.glob("jobs/*/measurement.json")), "the worker was waited for, not stopped"
    assert running(out) == {}


@pytest.mark.long  # test_rebatch.py calls the same function with workers of its own
@pytest.mark.usefixtures("hasty_workers")
def test_the_same_ladder_from_python(tmp_path: Path) -> None:
    out = tmp_path / "run"
    document = redline.ladder(
        "tiny",
        rungs="none",
        steps=2,
        check_steps=3,
        micro_batch=1,
        device="cpu",
        out=str(out),
        timeout=LIMIT_SECONDS,
    )
    assert "<html" in (out / "report.html").read_text()
    assert [(row["rung"], row["status"]) for row in document["rows"]] == [("baseline", "ok")]
    assert document["best"]["rung"] == "baseline"
    assert json.loads((out / "run.json").read_text())["settings"]["check_steps"] == 3
    assert len(RunDirectory(out).results()) == 2


COMPILES = """
import torch
from torch._dynamo.utils import counters

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g

torch.compile(lambda x: Double.apply(x).sum())(torch.ones(4, requires_grad=True)).backward()
print(*(name for name in counters["aot_autograd"] if name.startswith("autograd_cache_")))
"""


def test_a_graph_with_an_autograd_function_is_traced_once_for_all_processes_of_a_recipe(tmp_path: Path) -> None:
    """torch leaves such graphs out of its cache unless a worker's environment says otherwise."""
    job = Job(workload=resolve_workload("tiny"), recipe=Recipe(rungs=(), micro_batch=1), device="cpu", tokens="none")
    environment = worker_environment(RunDirectory(tmp_path), job)
    line = [sys.executable, "-c", COMPILES]
    seen = [subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert [text.split()[0] for text in seen] == ["autograd_cache_miss", "autograd_cache_hit"]
