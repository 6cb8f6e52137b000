"""What other programs took from a step: by made-up accounts, and by the kernel's while loops run beside this test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.engine import neighbours as module
from redline.engine.neighbours import TICKS, Neighbours


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(module, "core_count", lambda: 4)
    (tmp_path / "proc").mkdir()
    clock = iter((0.0, 10.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    return tmp_path


def account(root: Path, busy: float, own: float, stranger: float = 0.0) -> None:
    """Seconds: of all programs, of two processes of this session, and of one of another."""
    proc = root / "proc"
    (proc / "stat").write_text(f"cpu  {round(busy * TICKS)} 0 0 999999 7 0 0 0 0 0\ncpu0 1 2 3\n")
    for pid, session, seconds in ((10, os.getsid(0), own / 2), (11, os.getsid(0), own / 2), (12, 1, stranger)):
        (proc / str(pid)).mkdir(exist_ok=True)
        times = f"{round(seconds * TICKS)} 0 0 0"
        (proc / str(pid) / "stat").write_text(f"{pid} (a name) with) S 1 1 {session} 0 -1 0 0 0 0 0 {times} 20 0")


@pytest.mark.parametrize(
    ("threads", "others", "missing"),
    [
        (4, 0.0, 0.0),
        (4, 9.0, 0.9),  # nine seconds of ten on a core that a thread needs
        (3, 9.0, 0.0),  # there was a core for it
        (2, 30.0, 1.0),
        (8, 5.0, 0.5),  # more threads than cores take turns anyway
    ],
)
def test_what_is_missing_is_what_others_had_of_what_the_threads_need(
    proc: Path, threads: int, others: float, missing: float
) -> None:
    account(proc, busy=100, own=50, stranger=7)
    neighbours = Neighbours(threads, proc)
    account(proc, busy=100 + 20 + others, own=50 + 20, stranger=7 + others)
    assert neighbours.cores_missing() == pytest.approx(missing, abs=0.01)


@pytest.mark.parametrize("limit", ["taskset", "quota", "short"])
def test_what_there_is_no_account_of_is_not_known(proc: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    if limit == "taskset":
        monkeypatch.setattr(module, "core_count", lambda: 2)
    if limit == "quota":
        (proc / "sys/fs/cgroup").mkdir(parents=True)
        (proc / "sys/fs/cgroup/cpu.max").write_text("200000 100000\n")
    if limit == "short":
        clock = iter((0.0, 0.03))
        monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    account(proc, busy=100, own=50)
    neighbours = Neighbours(4, proc)
    account(proc, busy=140, own=60)
    assert neighbours.cores_missing() is None


def test_without_the_kernels_accounts_nothing_is_known(tmp_path: Path) -> None:
    assert Neighbours(2, tmp_path).cores_missing() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("something else\n")
    assert Neighbours(2, tmp_path).cores_missing() is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux keeps these accounts in /proc")
def test_a_busy_loop_in_another_session_is_seen_and_ones_own_is_not() -> None:
    """Other tests may run beside this one, so nothing is said of how little is missing."""
    loop = "while True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in range(os.cpu_count() or 1)
    ]
    try:
        neighbours = Neighbours(threads=os.cpu_count() or 1)
        time.sleep(1.0)
        missing = neighbours.cores_missing()
    finally:
        for other in others:
            other.kill()
            other.wait()
    if missing is None:
        pytest.skip("this process may use only some of the cores")
    assert missing > 0.3
    own = subprocess.Popen([sys.executable, "-c", loop])
    try:
        before = Neighbours(threads=1)
        at = before._own_ticks()
        time.sleep(0.5)
        assert before._own_ticks() - at > 0.1 * TICKS, "a child in this session counts as the step's own"
    finally:
        own.kill()
        own.wait()
