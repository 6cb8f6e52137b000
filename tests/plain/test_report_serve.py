"""`redline report DIR --serve`: the page as it is now, to this machine alone, and a clean end.

The server runs in this process on a free port; runs are made by the commands with machines that other tests made up.
"""

from __future__ import annotations

import errno
import fcntl
import http.client
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from redline.cli import main
from redline.commands import serve as serve_module
from redline.commands.serve import REFRESH_SECONDS, Pages, open_server
from redline.commands.standing import read_standing, running
from redline.core.errors import UserError
from redline.core.job import RunDirectory
from redline.core.values import to_json
from redline.search import ladder as ladder_module
from redline.search.ladder import is_measuring, only_climb_in

HERE = Path(__file__)
CLIMBS = runpy.run_path(str(HERE.with_name("test_climb.py")))
TRAINING = runpy.run_path(str(HERE.with_name("test_training_page.py")))


class Workers:
    """In the place of launch(): a Ctrl-C in answer `stop_at`."""

    def __init__(self) -> None:
        self.machine, self.stop_at = CLIMBS["Machine"](), None

    def launch(self, run: Any, job: Any, timeout_seconds: float, on_phase: Any, *, compile_cache: str) -> Any:
        if self.stop_at is not None and len(self.machine.jobs) == self.stop_at:
            raise KeyboardInterrupt
        return self.machine.ask(job)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    before, hired = signal.getsignal(signal.SIGTERM), Workers()
    monkeypatch.setattr(ladder_module, "launch", hired.launch)
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (CLIMBS["H200"], {"torch": "2.13.0"}))
    yield hired
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def half_done(workers: Workers, tmp_path: Path) -> Path:
    """A ladder of four rows that was interrupted after two."""
    workers.stop_at = 3  # the reference, and two rows
    words = ["ladder", "tiny", "--rungs", "tf32,bf16,flash", "--check-steps", "5", "--out", str(tmp_path / "run")]
    assert main(words) == 130
    return tmp_path / "run"


@contextmanager
def held(path: Path) -> Iterator[None]:
    """As a process that measures there holds it."""
    with open(path / "run.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def serving(path: Path) -> Iterator[Any]:
    """ask(...) -> (status, headers, text)"""
    with open_server(Pages(path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask(path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
            line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            line.request(method, path, headers=headers)
            answer = line.getresponse()
            text = answer.read().decode()
            line.close()
            return answer.status, dict(answer.getheaders()), text

        ask.server = server  # type: ignore[attr-defined]
        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_commands_on_a_served_page_name_the_run_that_is_served(half_done: Path) -> None:
    with serving(half_done) as ask:
        assert f"redline ladder --resume {half_done}</code>" in ask()[2]


def test_a_run_that_goes_on_is_drawn_anew_when_it_has_more(half_done: Path, workers: Workers) -> None:
    with serving(half_done) as ask:
        with held(half_done):
            status, headers, page = ask()
            assert status == 200
            assert headers["Content-Type"] == "text/html; charset=utf-8"
            assert headers["Refresh"] == str(REFRESH_SECONDS)
            assert "This run goes on" in page
            assert "interrupted" not in page
            assert marks_of(page) == {"baseline", "tf32"}
        status, headers, page = ask()
        assert "This run was interrupted" in page
        assert "Refresh" not in headers, "nobody measures there any more"
        workers.stop_at = None
        assert main(["ladder", "--resume", str(half_done)]) == 0
        status, headers, page = ask("/report.html")
        assert (status, "Refresh" in headers) == (200, False)
        assert marks_of(page) == {"baseline", "tf32", "bf16", "flash"}
        assert page == (half_done / "report.html").read_text(), "as the command itself has drawn it"


def marks_of(page: str) -> set[str]:
    return set(re.findall(r'data-rung="([^"]+)"', page))


def test_drawing_takes_a_core_so_it_is_done_once(half_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(serve_module, "page_of", lambda standing, path: drawn.append(standing) or f"page {len(drawn)}")
    pages = Pages(half_done)
    assert [pages.current() for _ in range(3)] == [(b"page 1", False)] * 3
    with held(half_done):
        assert [pages.current() for _ in range(2)] == [(b"page 2", True)] * 2
    with open(half_done / "results.jsonl", "a") as file:
        file.write("\n")
    assert pages.current() == (b"page 3", False)


def test_nothing_is_written(half_done: Path) -> None:
    def everything() -> dict[str, Any]:
        return {str(path): path.stat().st_mtime_ns for path in sorted(half_done.rglob("*"))}

    before = everything()
    with serving(half_done) as ask:
        ask()
    assert everything() == before


def test_a_training_run_is_served_until_it_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(TRAINING["RUN"]))
    with serving(tmp_path) as ask:
        assert "Refresh" in ask()[1], "before its first event"
        with open(tmp_path / "metrics.jsonl", "w") as file:
            for number in (1, 2):
                file.write(json.dumps({"kind": "session"}) + "\n" if number == 1 else "")
                file.write(json.dumps({"kind": "cycle", **TRAINING["cycle"](number, 3.0)}) + "\n")
        _, headers, page = ask()
        assert "Refresh" in headers
        assert 'data-curve="tokens per second"' in page
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"kind": "end", "ended": "steps", "reason": None, "checkpoint": None}) + "\n")
        assert "Refresh" not in ask()[1]


def test_a_profile_is_waited_for(tmp_path: Path) -> None:
    run = {
        "kind": "profile",
        "workload": {"name": "<b>tiny"},
        "hardware": {"name": "a CPU"},
        "command": "redline profile",
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    with serving(tmp_path) as ask:
        status, headers, page = ask()
        assert (status, "Refresh" in headers) == (200, True)
        assert "This profile has no result yet" in page
        assert "&lt;b&gt;tiny" in page
        assert "<b>tiny" not in page
        failed = {**run, "status": "failed", "reason": "out of memory"}
        (tmp_path / "profile.json").write_text(json.dumps(failed))
        _, headers, page = ask()
        assert "Nothing was profiled: out of memory" in page
        assert "Refresh" not in headers
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        read_standing(tmp_path)


def test_a_run_that_cannot_be_read_is_said_and_tried_again(half_done: Path) -> None:
    text = (half_done / "run.json").read_text()
    with serving(half_done) as ask:
        (half_done / "run.json").write_text("{")
        status, headers, said = ask()
        assert status == 500
        assert said.startswith(f"problem: {half_done / 'run.json'} is damaged\nwhy: ")
        assert "Refresh" in headers
        (half_done / "run.json").unlink()
        assert ask()[0] == 500
        (half_done / "run.json").write_text(text)
        assert ask()[0] == 200


# --- to whom ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost", 200),
        ("LocalHost:9999", 200),
        ("127.0.0.1:1", 200),
        ("evil.example", 403),
        ("evil.example:8765", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("192.168.1.7:8765", 403),
        ("", 403),
    ],
    ids=str,
)
def test_it_answers_to_its_own_name_alone(half_done: Path, host: str, status: int) -> None:
    with serving(half_done) as ask:
        found, _, text = ask(Host=host)
    assert found == status
    assert ("redline" in text and "<html" in text) is (status == 200)


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(request)
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    return answer


def test_no_name_or_two_are_nobodys(half_done: Path) -> None:
    with serving(half_done) as ask:
        port = ask.server.server_port
        assert b" 403 " in raw(port, b"GET / HTTP/1.0\r\n\r\n").splitlines()[0]
        two = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert b" 403 " in raw(port, two).splitlines()[0]


@pytest.mark.parametrize("path", ["/run.json", "/../run.json", "/%2e%2e/run.json", "/report.html/..", "*"], ids=str)
def test_there_is_one_page(half_done: Path, path: str) -> None:
    with serving(half_done) as ask:
        assert ask(path)[0] == 404
        assert ask("/?again")[0] == 200


def test_methods_and_headers(half_done: Path) -> None:
    with serving(half_done) as ask:
        status, headers, text = ask(method="HEAD")
        assert (status, text) == (200, "")
        assert int(headers["Content-Length"]) == len(ask()[2].encode())
        assert ask(method="POST")[0] == 501
        assert headers["Server"] == "redline"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert ask.server.server_address[0] == "127.0.0.1"


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_and_a_port_that_is_none(half_done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", str(half_done), "--serve", "--port", str(port)]) == 2
    problem, why, fix = capsys.readouterr().err.splitlines()[-3:]
    assert problem == f"problem: cannot serve on port {port}"
    assert why == f"why:     {os.strerror(errno.EADDRINUSE)}"
    assert "--port 0" in fix
    assert main(["report", str(half_done), "--serve", "--port", "70000"]) == 2
    assert "--port is 70000" in capsys.readouterr().err


def test_a_folder_without_a_run_takes_no_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--serve", "--port", "0"]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly(half_done: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "redline", "report", str(half_done), "--serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=repository, **pipes) as process:  # type: ignore[call-overload]
        try:
            line = process.stdout.readline()
            assert line.startswith("serving http://127.0.0.1:")
            port = int(line.split("/")[2].split(":")[1])
            with socket.create_connection(("127.0.0.1", port), timeout=10):  # a browser keeps one: it must not matter
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=20) == 0
            assert process.stderr.read() == "no longer serving\n"
        finally:
            process.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


# --- whether somebody measures there ----------------------------------------------------------------------------------


def test_the_lock_says_whether_a_run_goes_on(half_done: Path) -> None:
    assert not is_measuring(half_done)
    with held(half_done):
        assert is_measuring(half_done)
    with only_climb_in(RunDirectory(half_done)):
        assert is_measuring(half_done)
    assert not is_measuring(half_done)


def test_who_looks_at_the_lock_just_now_stops_no_run(half_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look holds the lock for an instant; the run that starts in it tries again."""
    looker = open(half_done / "run.json")  # noqa: SIM115
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr(ladder_module.time, "sleep", lambda seconds: looker.close())
    with only_climb_in(RunDirectory(half_done)):
        assert is_measuring(half_done)
    with held(half_done), pytest.raises(UserError, match="is in use"), only_climb_in(RunDirectory(half_done)):
        pass


def test_the_job_at_work_is_the_newest_that_has_no_answer(half_done: Path, workers: Workers) -> None:
    run = RunDirectory(half_done)
    assert running(run) is None
    answered = workers.machine.jobs[-1]
    for moment, job in enumerate([CLIMBS["replace"](answered, kind="look"), answered]):
        folder = run.job_folder(job)
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(to_json(job)))
        os.utime(folder / "job.json", (1000 + moment, 1000 + moment))
    doing = running(run)
    assert doing is not None
    assert (doing.what, doing.recipe) == ("a look", "tf32, micro batch 4")
    (run.path / "jobs" / "damaged").mkdir()
    (run.path / "jobs" / "damaged" / "job.json").write_text("{")
    assert running(run) == doing


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(OSError("gone"), False), (ValueError("closed file"), False), (KeyError("a bug"), True)],
    ids=["the reader left", "closed by Ctrl-C", "a mistake of ours"],
)
def test_only_mistakes_of_ours_are_told(
    half_done: Path, capsys: pytest.CaptureFixture[str], error: Exception, is_told: bool
) -> None:
    with open_server(Pages(half_done), 0) as server:
        capsys.readouterr()
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
        assert ("Exception occurred" in capsys.readouterr().err) == is_told
