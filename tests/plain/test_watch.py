"""`redline watch`: what another process measures, row by row, until it ends; nothing is written and nobody is stopped.

The other process is played by the poll: each time the watcher sleeps, the run it watches goes one step further.
"""

from __future__ import annotations

import fcntl
import json
import runpy
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.cli import main
from redline.commands import watch as watch_module
from redline.commands.standing import read_standing
from redline.commands.watch import Tail
from redline.search import answers as answers_module
from redline.search import ladder as ladder_module

HERE = Path(__file__)
CLIMBS, TUNES, TRAINING = (
    runpy.run_path(str(HERE.with_name(name))) for name in ("test_climb.py", "test_tune_run.py", "test_training_page.py")
)
VERSIONS = {"torch": "2.13.0"}


@pytest.fixture(autouse=True)
def signal_kept() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests put in the place of sleep() is for the watch alone: other threads sleep too."""
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(sleep=time.sleep, monotonic=time.monotonic))


class Played:
    """A run directory that gets the lines of a finished one, one a poll, under the lock of whoever measures."""

    def __init__(self, finished: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finished, self.path = finished, path
        path.mkdir()
        shutil.copy(finished / "run.json", path / "run.json")
        self.lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
        self.lock = open(path / "run.json")  # noqa: SIM115
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.job: Any = None
        monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: self.go_on())

    def go_on(self) -> None:
        if not self.lines:
            if (self.finished / "tune.json").exists():
                shutil.copy(self.finished / "tune.json", self.path / "tune.json")
            self.lock.close()
            return
        if self.job is None:  # first the folder of a job, then its answer
            self.job = json.loads(self.lines[0])["job"]
            folder = self.path / "jobs" / json.loads(self.lines[0])["key"]
            folder.mkdir(parents=True)
            (folder / "job.json").write_text(json.dumps(self.job))
            return
        self.job = None
        with open(self.path / "results.jsonl", "a") as file:
            file.write(self.lines.pop(0))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Played]]:
    runs: list[Played] = []

    def start(finished: Path) -> Played:
        runs.append(Played(finished, tmp_path / "run", monkeypatch))
        return runs[-1]

    yield start
    for run in runs:
        run.lock.close()


@pytest.fixture
def finished_ladder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Path:
    machine = CLIMBS["Machine"]()
    monkeypatch.setattr(ladder_module, "launch", lambda run, job, seconds, on_phase, **_: machine.ask(job))
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (CLIMBS["H200"], VERSIONS))
    words = ["ladder", "tiny", "--rungs", "tf32,bf16", "--check-steps", "5", "--repeats", "2"]
    assert main([*words, "--out", str(tmp_path / "finished")]) == 0
    capsys.readouterr()
    return tmp_path / "finished"


def watched(capsys: Any, *words: object) -> tuple[int, str, str]:
    code = main(["watch", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_ladder_is_followed_to_its_end(finished_ladder: Path, play: Any, capsys: Any) -> None:
    played = play(finished_ladder)
    code, out, err = watched(capsys, played.path)
    assert code == 0
    lines = err.splitlines()
    started = [line.split("] ")[1] for line in lines if line.startswith("[")]
    first = ["fp32 reference: no rung", "measuring: no rung", "measuring: tf32", "measuring: bf16 on 1 more"]
    repeats = ["measuring: no rung", "measuring: tf32", "measuring: bf16 on 1 more"]
    assert started == [f"{words}, micro batch 4" for words in [*first, *repeats]]
    rows = [line.split()[0] for line in lines if line.startswith("  ")]
    assert rows == ["baseline", "tf32", "bf16"] * 2, "each when it is known, and again with its repeat"
    assert "bf16" in out.split("best  ")[1]
    main(["report", str(finished_ladder)])
    assert capsys.readouterr().out.startswith(out), "the table is the ladder's own"
    assert {path.name for path in played.path.iterdir()} == {"run.json", "results.jsonl", "jobs"}, "nothing was written"


def test_json_is_the_document_at_the_end(finished_ladder: Path, play: Any, capsys: Any) -> None:
    played = play(finished_ladder)
    code, out, _ = watched(capsys, played.path, "--json")
    assert code == 0
    main(["report", str(finished_ladder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert json.loads(out) == {**document, "under_way": False}


def test_what_nobody_measures_is_shown_and_left(finished_ladder: Path, monkeypatch: Any, capsys: Any) -> None:
    lines = (finished_ladder / "results.jsonl").read_text().splitlines(keepends=True)
    (finished_ladder / "results.jsonl").write_text("".join(lines[:2]))
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: pytest.fail("there is nothing to wait for"))
    code, out, _ = watched(capsys, finished_ladder)
    assert code == 0
    assert "the run was interrupted: later rungs are not here" in out


def test_ctrl_c_leaves_and_the_run_goes_on(finished_ladder: Path, play: Any, monkeypatch: Any, capsys: Any) -> None:
    played = play(finished_ladder)

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module.time, "sleep", leave)
    code, out, err = watched(capsys, played.path)
    assert (code, out) == (0, "")
    assert err.endswith("stopped watching; the run goes on\n")
    assert ladder_module.is_measuring(played.path)


def test_a_tune_is_followed_to_its_end(tmp_path: Path, play: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workers = TUNES["Workers"]()
    monkeypatch.setattr(answers_module, "launch", workers.launch)
    monkeypatch.setattr(answers_module, "probe_machine", lambda device: (TUNES["H200"], VERSIONS))
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (TUNES["H200"], VERSIONS))
    assert main([*TUNES["WORDS"], "--out", str(tmp_path / "finished"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    played = play(tmp_path / "finished")
    code, out, err = watched(capsys, played.path, "--json")
    assert code == 0
    assert json.loads(out) == document
    rows = [line.split()[0] for line in err.splitlines() if line.startswith("  ")]
    numbers = sorted(f"{row['number']:02d}" for row in document["rows"])
    assert sorted(set(rows)) == numbers, "every trial"
    assert rows.index("01") < rows.index(numbers[-1])


def test_a_resumed_tune_is_not_shown_as_it_was_before(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """tune.json of the first part is there while the second goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workers = TUNES["Workers"]()
    workers.stop_at = 1
    monkeypatch.setattr(answers_module, "launch", workers.launch)
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (TUNES["H200"], VERSIONS))
    assert main([*TUNES["WORDS"], "--fresh", "--out", str(tmp_path / "run"), "--json"]) == 130
    first = json.loads(capsys.readouterr().out)
    seen: list[dict[str, Any]] = []

    def launch(*words: Any, **named: Any) -> Any:
        if len(workers.asked) == 3:
            seen.append(watch_module.rows_to_show(read_standing(tmp_path / "run")))
        return workers.launch(*words, **named)

    workers.stop_at = None
    monkeypatch.setattr(answers_module, "launch", launch)
    assert main(["tune", "--resume", str(tmp_path / "run"), "--fresh", "--json"]) == 0
    assert len(seen[0]) > len(first["rows"])


# --- training ---------------------------------------------------------------------------------------------------------


def play_training(monkeypatch: Any, steps: list[Callable[[], None]]) -> None:
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: steps.pop(0)())


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, **fields}) + "\n"


def cycle(updates: int) -> str:
    return line("cycle", time=1000.0 + 60 * updates, **TRAINING["cycle"](updates, 3.0))


END = line("end", time=9999.0, ended="steps", reason=None, checkpoint=None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record = TRAINING["RUN"]
    budget = {"steps": 400, "tokens": None, "minutes": None}
    order = {**record["order"], "settings": {**record["order"]["settings"], "budget": budget}}
    (tmp_path / "run.json").write_text(json.dumps({**record, "order": order}))
    return tmp_path


def append(run: Path, text: str) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text)


def test_a_training_run_is_followed_to_its_end(run: Path, monkeypatch: Any, capsys: Any) -> None:
    append(run, line("session") + "".join(map(cycle, range(1, 301))))
    half = cycle(302)
    steps = [
        lambda: append(run, cycle(301) + half[:40]),
        lambda: append(run, half[40:] + "no JSON\n" + line("validation", updates=302, tokens=302 * 1024, loss=2.5)),
        lambda: append(run, END + line("session")),  # resumed at once: not the end yet
        lambda: append(run, cycle(303) + line("an event of another version")),
        lambda: append(run, END),
    ]
    play_training(monkeypatch, steps)
    code, out, err = watched(capsys, run)
    assert code == 0
    assert steps == []
    shown = [int(text.split()[0]) for text in err.splitlines() if text.split()[0].isdigit()]
    assert shown == [*range(261, 302), 302, 302, 303], "the newest of what was, and then everything"
    assert "validation loss 2.5000" in err
    assert out.splitlines()[0].startswith("ended     all steps are done: 303 updates")


def test_a_training_run_that_has_ended_is_summed_up(run: Path, monkeypatch: Any, capsys: Any) -> None:
    append(run, line("session") + cycle(1) + END)
    play_training(monkeypatch, [])
    code, out, err = watched(capsys, run, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["updates"] == 1


def test_silence_is_told(run: Path, monkeypatch: Any, capsys: Any) -> None:
    """Nothing has come since long ago: it may have been killed, which no file says."""
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: float(next(clock)))
    play_training(monkeypatch, [lambda: None, lambda: None, lambda: append(run, line("session") + cycle(1) + END)])
    code, _, err = watched(capsys, run)
    assert code == 0
    assert err.count("nothing new for 180 s: it is busy, or it was killed") == 1


def test_a_training_run_without_a_budget_is_of_another_version(run: Path, capsys: Any) -> None:
    (run / "run.json").write_text(json.dumps({"kind": "train", "order": {}}))
    code, _, err = watched(capsys, run)
    assert code == 2
    assert "this is not a training run this version can watch" in err


def test_half_a_line_waits(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.events() == []
    append(tmp_path, '{"kind": "a"}\n{"ki')
    assert tail.events() == [{"kind": "a"}]
    assert tail.events() == []
    append(tmp_path, 'nd": "b"}\n[]\n{"kind": 3}\n')
    assert tail.events() == [{"kind": "b"}]


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_is_waited_for(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"kind": "profile"}))
    failed = {"kind": "profile", "status": "failed", "reason": "out of memory"}
    steps = [lambda: None, lambda: (tmp_path / "profile.json").write_text(json.dumps(failed))]
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: steps.pop(0)())
    code, out, err = watched(capsys, tmp_path)
    assert (code, out) == (0, "nothing was profiled: out of memory\n")
    assert err == "no result yet\n"


def test_what_is_no_run(tmp_path: Path, capsys: Any) -> None:
    code, _, err = watched(capsys, tmp_path)
    assert code == 2
    assert "is not a run directory" in err
