"""A report where the disk is full or results are damaged: it names no file that is not there and leaves no draft."""

from __future__ import annotations

import errno
import json
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.cli import main
from redline.core.job import RunDirectory, write_atomically
from redline.search import ladder as ladder_module

HERE = Path(__file__)
CLIMBS = runpy.run_path(str(HERE.with_name("test_climb.py")))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """A finished ladder of three rows, on a machine that was made up."""
    before, machine = signal.getsignal(signal.SIGTERM), CLIMBS["Machine"]()
    monkeypatch.setattr(ladder_module, "launch", lambda run, job, timeout_seconds, on_phase, **_: machine.ask(job))
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (CLIMBS["H200"], {"torch": "2.13.0"}))
    out = tmp_path / "run"
    assert main(["ladder", "tiny", "--rungs", "tf32,bf16", "--check-steps", "5", "--out", str(out)]) == 0
    capsys.readouterr()
    yield out
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can be made there, and nothing be written into it."""

    def write_text(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise FULL

    monkeypatch.setattr(Path, "write_text", write_text)


def test_what_cannot_be_written_leaves_no_draft_and_the_old_file(tmp_path: Path, full_disk: None) -> None:
    target = tmp_path / "report.html"
    with open(target, "w") as file:
        file.write("old")
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "old"


def test_a_name_that_cannot_be_taken_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "report.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_report_on_a_full_disk_names_only_files_that_are_there(
    run: Path, full_disk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run.iterdir())
    main(["report", str(run)])
    caught = capsys.readouterr()
    assert f"recipe   {run / 'best.json'}" in caught.out
    assert "page " not in caught.out, "an old one is not this one"
    assert "No space left" in caught.err
    (run / "best.json").unlink()
    main(["report", str(run)])
    assert "best.json" not in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == [name for name in before if name != "best.json"]


@pytest.mark.parametrize(("damage", "words"), [(1, "1 line of"), (3, "3 lines of")], ids=["one", "three"])
def test_lines_that_cannot_be_read_are_counted_and_told(
    run: Path, damage: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RunDirectory(run).unreadable_lines() == 0
    assert main(["report", str(run), "--json"]) == 0
    assert "unreadable_lines" not in json.loads(capsys.readouterr().out)
    with open(run / "results.jsonl", "a") as file:
        file.write("\n" + '{"key": "cut sho\n' * damage)
    assert RunDirectory(run).unreadable_lines() == damage, "an empty line is none"
    assert main(["report", str(run)]) == 0
    told = f"{words} results.jsonl could not be read"
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (run / "report.html").read_text()
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable_lines"] == damage


def test_the_page_of_a_run_names_its_folder(run: Path, tmp_path: Path) -> None:
    """Where it lies now, so that its commands can be pasted."""
    moved = run.rename(tmp_path / "moved")
    assert main(["report", str(moved)]) == 0
    page = (moved / "report.html").read_text()
    assert f"--recipe {moved / 'best.json'}" in page
    assert str(run / "best.json") not in page
