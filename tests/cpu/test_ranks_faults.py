"""A rank that is lost ends the job soon, with one sentence that names it; what was saved goes on, by hand or by itself.

The faults are planted from outside (`rank_fault.py`), in real processes under torchrun's real agent.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from redline.cli import main
from redline.commands.ranks import agent_command, train_along
from redline.core.checkpoints import list_checkpoints
from redline.core.errors import FailedRunError, UserError
from redline.core.layout import Layout
from redline.core.measurement import Failure
from redline.core.process_groups import processes_of
from redline.core.rank_processes import Interrupt, inside, mark_over
from redline.core.recipe import Recipe
from redline.core.values import to_json
from redline.engine import agent, distributed, rank_stores, session
from redline.engine.checkpoint import load_from
from redline.engine.distributed import NEVER_SEEN, End, Mark, MistakeOfRankError, Ranks, describe_straggler
from redline.engine.worker import RANK_FAILURE_FILE, failure_of_ranks
from redline.search.launch import probe_machine

HERE = Path(__file__).resolve().parent
SAME = runpy.run_path(str(HERE / "same_weights.py"))
STEPS = 6
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def words(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`redline train` of something that takes no time, but for --out."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "recipe.json").write_text(json.dumps(to_json(Recipe(rungs=(), micro_batch=1))))
    shape = {"layers": 1, "heads": 2, "d_model": 16, "d_ff": 32, "vocab": 257, "sequence": 16}
    (folder / "small.json").write_text(json.dumps(shape))
    text, data = folder / "text.txt", folder / "data"
    text.write_text((repository / "LICENSE").read_text())
    assert main(["data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(data)]) == 0
    return [
        *("train", str(folder / "small.json"), "--recipe", str(folder / "recipe.json"), "--data", str(data)),
        *("--device", "cpu", "--steps", str(STEPS), "--global-batch", "4", "--checkpoint-every", "2", "--cycle", "1"),
    ]


@pytest.fixture(scope="module")
def never_stopped(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main([*words, "--out", str(out)]) == 0
    return out


@pytest.fixture
def with_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `--gpus 2` starts the ranks, or as the agent that is named does."""

    def run(kind: str, words: list[str], *agent: str, step: int = 3) -> subprocess.CompletedProcess[str]:
        fault = [str(HERE / "rank_fault.py"), kind, str(step), str(tmp_path / "flag")]
        if not agent:
            monkeypatch.setattr("redline.commands.ranks.agent_command", partial(faulty, fault))
            monkeypatch.setattr("redline.search.launch.probe_machine", asked_once)
            capfd.readouterr()
            code = main([*words, "--gpus", "2"])
            return subprocess.CompletedProcess(words, code, *capfd.readouterr())
        command = [sys.executable, "-m", *agent, "--standalone", "--nproc-per-node=2", *fault]
        return subprocess.run(
            [*command, *words],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=150,
        )

    return run


def faulty(fault: list[str], options: Any, logs: str) -> list[str]:
    """The agent's words with the fault's script in the place of `-m redline`."""
    words = agent_command(options, logs)
    at = words.index("redline") - 1
    return [*words[:at], *fault, *words[at + 2 :]]


def only_ours(told: str, out: Path) -> None:
    """Nothing of torch's is on the screen: it is in the log, which the last line names."""
    lines = told.splitlines()
    assert lines[-1] == f"tracebacks, and what torch wrote: {out / 'ranks.log'}"
    stopped = lines[-4 if list_checkpoints(out / "checkpoints") else -2 :]
    assert stopped[0].startswith("training stopped: ")
    foreign = re.compile(r"Traceback|File \"|\[rank\d|[WE]\d{4} |elastic|c10d|gloo|Warning")
    assert not [line for line in lines[: -len(stopped)] if foreign.search(line)]
    assert "torch/distributed/elastic" in (out / "ranks.log").read_text(), "the agent's own words"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "LOGLEVEL": "CRITICAL"}


def assert_same_weights(run: Path, reference: Path) -> None:
    ours, theirs = (load_from(each / "checkpoints" / f"step-{STEPS:08d}").tensors() for each in (run, reference))
    assert max(SAME["differences"](ours, theirs).values()) < 1e-5


def test_a_killed_rank_is_named_and_one_process_goes_on(
    words: list[str],
    with_fault: Run,
    never_stopped: Path,
    tmp_path: Path,
    left_behind: Callable[[Path], list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    done = with_fault("kill", [*words, "--out", str(out), "--json"])
    assert done.returncode == 1
    assert "training stopped: rank 1 was killed by SIGKILL" in done.stderr
    only_ours(done.stderr, out)
    document = json.loads(done.stdout)
    assert document["reason"].startswith("rank 1 was killed by SIGKILL")
    assert (document["ended"], document["checkpoint"]) == ("failed", f"{out}/checkpoints/step-00000002")
    assert document["layout"] == to_json(Layout(ranks=2))
    assert reported(out, capfd, "ended ", "why ")[1] == f"why       {document['reason']}"
    ways = [f"saved     {out}/checkpoints/step-00000002", f"go on     redline train --resume {out} --gpus 2"]
    assert "\n".join(["", *ways, ""]) in done.stderr
    assert reported(out, capfd) == ways
    assert left_behind(out) == []
    typed = shlex.join(["redline", *words, "--out", str(out), "--json", "--gpus", "2"])
    assert json.loads((out / "run.json").read_text())["command"] == typed
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["command"] == typed
    for _ in range(2):  # the second finds nothing left to train
        assert main(["train", "--resume", str(out)]) == 0
        (said,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("speed ")]
        assert reported(out, capfd, "speed ") == [said]
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert json.loads(capfd.readouterr().out).keys() == document.keys()
    assert_same_weights(out, never_stopped)
    ways = [f"saved     {out}/checkpoints/step-{STEPS:08d}", f"go on     redline train --resume {out}"]
    assert reported(out, capfd) == ways, "the last session had one process"


def reported(out: Path, capfd: pytest.CaptureFixture[str], *names: str) -> list[str]:
    """What `redline report` says was saved, and how to go on; or its lines of other names."""
    capfd.readouterr()
    assert main(["report", str(out)]) == 0
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith(names or ("saved ", "go on "))]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("leave", "rank 1 left with exit code 7"),
        pytest.param("0:leave-as-if-told", "rank 0 left with exit code 1", marks=pytest.mark.long),
        pytest.param("leave-as-if-done", "rank 1 left with exit code 0 before the end", marks=pytest.mark.long),
        pytest.param(
            "mistake",
            "rank 1 failed: training my.py:model raised ValueError: odd and more: my.py:7 in forward",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_leaves_or_that_the_users_file_ends_is_named(
    words: list[str], with_fault: Run, tmp_path: Path, kind: str, text: str
) -> None:
    out = tmp_path / "run"
    done = with_fault(kind, [*words, "--out", str(out), "--rank-timeout", "6"], step=5)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    at = told.index(f"training stopped: {text}")
    assert told[at + 1].startswith(f"saved     {out}/checkpoints/step-")
    assert told[at + 2] == f"go on     redline train --resume {out} --gpus 2"
    only_ours(done.stderr, out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mistake", "rank 1 failed: training my.py:model raised ValueError: odd and more"),
        ("hang", "no rank has made progress"),
        ("0:memory", "rank 0 failed: out of memory with micro batches of 1 sequence"),
    ],
)
def test_torchrun_and_those_that_go_on_are_told_the_one_cause(
    words: list[str], with_fault: Run, tmp_path: Path, kind: str, text: str
) -> None:
    out = tmp_path / "run"
    again = ("torch.distributed.run", "--max-restarts=1")
    done = with_fault(kind, [*words, "--out", str(out), "--rank-timeout", "8"], *again)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (note,) = [line["text"] for line in metrics if "started all ranks again" in line.get("text", "")]
    assert note.startswith(f"torchrun has started all ranks again: {text}")
    assert "without saying why" not in note
    assert "LostRankError: rank 0" not in (out / "ranks.log").read_text(), "it has told its end"


@pytest.mark.long
def test_torchrun_starts_again_from_the_last_checkpoint(
    words: list[str], with_fault: Run, never_stopped: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    again = ("torch.distributed.run", "--max-restarts=1")
    # At step 5 the checkpoint of step 2 is on the disk: the one of step 4 has waited for it.
    done = with_fault("kill", [*words, "--out", str(out), "--parallel", "fsdp"], *again, step=5)
    assert done.returncode == 0, done.stderr
    assert "resumed from step-0000000" in done.stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    again = [line["text"] for line in metrics if "started all ranks again" in line.get("text", "")]
    assert len(again) == 1
    assert "rank 1 ended without saying why (killed, or its machine is gone)" in again[0]
    assert_same_weights(out, never_stopped)


@pytest.mark.parametrize(
    ("ends", "seen", "expected"),
    [
        ({0: End(1, "rank 0 failed: E: closed", when=3.0), 1: None}, 2.0, "again: rank 1 ended without saying why"),
        (
            {0: End(2, "rank 0 failed: E: closed", when=50.0), 1: End(1, "rank 1 failed: E: x", when=90.0)},
            1.0,
            "again: rank 1 failed: E: x",
        ),
        ({0: End(2, "", when=3.0), 1: End(1, "rank 1 failed: E: x", when=2.0)}, 2.0, "again: rank 1 failed: E: x"),
        ({0: None, 1: End(1, "rank 1 failed: E: x", when=2.0)}, 2.5, "is gone); then rank 1 failed: E: x"),
        ({0: None, 1: End(1, "rank 1 failed: E: x", when=2.0)}, 31.0, "again: rank 1 failed: E: x"),
        ({0: End(2, "", when=3.0), 1: End(1, "", when=2.0)}, 2.0, None),
        ({0: End(1, "rank 1 was last seen", lost=True, when=3.0), 1: None}, 2.0, "again: rank 1 was last seen"),
    ],
    ids=["killed", "first", "ended-by-the-agent", "nobody-knows", "killed-by-the-agent", "nobody", "frozen"],
)
def test_what_was_lost_is_told_by_those_that_go_on(
    ends: dict[int, End | None], seen: float, expected: str | None
) -> None:
    """`seen`: when those that have told nothing gave their last sign of life."""
    found = distributed.describe_ends(ends, dict.fromkeys(ends, seen))
    assert found is None if expected is None else expected in (found or "")


def test_of_ranks_that_all_were_killed_the_first_is_told() -> None:
    """By the agent, 30 s later, where they could say nothing: in the driver no signal reaches them."""
    found = distributed.describe_ends(dict.fromkeys(range(3)), {0: 130.0, 1: 100.0, 2: 130.5})
    assert (
        found
        == "torchrun has started all ranks again: rank 1 ended without saying why (killed, or its machine is gone)"
    )
    together = distributed.describe_ends(dict.fromkeys(range(3)), {0: 100.5, 1: 100.0, 2: 101.0})
    assert "rank 0, rank 1, rank 2 ended without saying why" in (together or "")


def test_those_that_go_on_know_when_a_rank_was_last_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Told()
    monkeypatch.setattr(distributed.time, "time", lambda: 50.0)
    killed, failed, after = (Ranks(rank=rank, count=2) for rank in (0, 1, 0))
    for ranks in (killed, failed, after):
        ranks._store = ranks._lasting = store
    killed.remember("count/0", 2)
    failed.report_end("rank 1 failed: E: x")
    monkeypatch.setattr(distributed.time, "time", lambda: 80.0)
    killed._beat()  # in the driver still, half a minute later
    monkeypatch.setattr(Ranks, "attempt", 1)
    assert after.lost_before() == "torchrun has started all ranks again: rank 1 failed: E: x"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "rank 0 failed: RuntimeError: [pair.cc:553] Read error [127.0.0.1]:31: Connection reset by peer. This is "
            "typically caused by another. Good luck",
            "rank 0 failed: RuntimeError: Read error [127.0.0.1]:31: Connection reset by peer",
        ),
        (
            "rank 0 failed: DistBackendError: NCCL error in: NCCLUtils.cpp:77, NCCL version 2.28.9. ncclRemoteError: a",
            "rank 0 failed: DistBackendError: NCCL error in: NCCLUtils.cpp:77, NCCL version 2.28.9",
        ),
        ("rank 0 failed: ValueError: odd. 1.5 is\nand more", "rank 0 failed: ValueError: odd. 1.5 is"),
        ("", ""),
    ],
    ids=["gloo", "nccl", "users", "nothing"],
)
def test_those_that_go_on_are_told_what_happened_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    ranks, remembered = Ranks(), {}
    monkeypatch.setattr(ranks, "remember", lambda key, value: remembered.update({key: value[1]}))
    ranks.report_end(text)
    assert remembered == {"end/0/0": told}
    ranks.report_end("and so it failed")
    assert remembered == {"end/0/0": told}, "what comes after it is of it"


@pytest.mark.long
def test_a_lost_node_leaves_the_others_to_go_on_with_the_same_global_batch(
    words: list[str], never_stopped: Path, tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    """Two agents as on two machines. The second and its rank are gone at once; the first starts again alone."""
    out, flag = tmp_path / "run", tmp_path / "flag"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    impatient = "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"
    agent = [sys.executable, "-m", "redline.engine.agent", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=lost", f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf", impatient]
    command = [*agent, str(HERE / "rank_fault.py"), "node", "5", str(flag), *words, "--out", str(out)]
    with open(tmp_path / "first.txt", "w") as told:  # the one that hosts the store: it must live
        first = subprocess.Popen(command, env=environment(), stderr=told, stdout=told)
    until = time.monotonic() + 60
    while not listens(port) and time.monotonic() < until:
        time.sleep(0.1)
    second = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert second.returncode == -signal.SIGKILL, second.stderr
    assert first.wait(timeout=180) == 0, (tmp_path / "first.txt").read_text()
    text = " ".join((tmp_path / "first.txt").read_text().split())
    assert "1 rank where the run began with 2: the global batch stays at 4 sequences" in text
    assert "resumed from step-0000000" in text
    assert_same_weights(out, never_stopped)
    assert left_behind(out) == []


@pytest.mark.long
def test_a_node_whose_ranks_are_well_goes_on_with_the_others_at_once(
    words: list[str], never_stopped: Path, tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    """Two agents as on two machines. torch's counts of restarts differ afterwards: only the node whose rank was killed
    has counted one, where the other had no time to fail of it."""
    out, flag = tmp_path / "run", tmp_path / "flag"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=two", f"--rdzv-endpoint=localhost:{port}"]
    command = [*agent, str(HERE / "rank_fault.py"), "kill", "5", str(flag), *words, "--out", str(out)]
    nodes = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor() as pool:  # both pipes are read
        told = list(pool.map(lambda node: node.communicate(timeout=150)[1], nodes))
    assert [node.returncode for node in nodes] == [0, 0], told
    notes = [json.loads(line).get("text", "") for line in (out / "metrics.jsonl").read_text().splitlines()]
    (again,) = [note for note in notes if "started all ranks again" in note]
    assert again.startswith("torchrun has started all ranks again: rank 1 ended without saying why")
    assert not any("already in use" in text for text in told)
    assert_same_weights(out, never_stopped)
    assert left_behind(out) == []


def test_ranks_agree_on_the_attempt_whatever_their_nodes_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    lasting = PrefixStore("job", store)
    ended = threading.Event()
    lasting.set("hello/1", "one that died before anybody answered")
    with ThreadPoolExecutor() as pool:
        for expected in (0, 1, 2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(expected // 2))  # rank 0's node has counted fewer
            attempt = distributed.next_attempt(lasting)
            answering = pool.submit(distributed.welcome, lasting, attempt, 3, ended)
            asking = [pool.submit(distributed.ask_attempt, lasting, rank, 20.0) for rank in (1, 2)]
            assert [attempt, *(one.result(20) for one in asking)] == [expected] * 3
            answering.result(20)  # it ends when all have come
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    another = PrefixStore("another", store)
    assert distributed.next_attempt(another) == 4, "a new store knows of no attempt before it"
    assert distributed.next_attempt(another) == 5, "though rank 0's node has counted no further"
    with pytest.raises(distributed.LostRankError, match="rank 0 gave no sign of life for 0 s"):
        distributed.ask_attempt(lasting, 1, 0.2)


def listens(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("localhost", port)) == 0


@pytest.mark.parametrize("kind", ["memory", pytest.param("mistake", marks=pytest.mark.long)])
def test_a_rank_0_that_fails_alone_tells_it_itself(
    words: list[str], with_fault: Run, tmp_path: Path, kind: str, left_behind: Callable[[Path], list[str]]
) -> None:
    """And nobody accuses the other one, whose connection has closed."""
    out = tmp_path / "run"
    done = with_fault(f"0:{kind}", [*words, "--out", str(out), "--rank-timeout", "20"])
    told = {
        "memory": "training stopped: rank 0: out of memory with micro batches of 1 sequence",
        "mistake": "problem: rank 0: training my.py:model raised ValueError: odd",
    }
    assert done.returncode == 1
    assert told[kind] in done.stderr
    assert "rank 1" not in done.stderr
    assert left_behind(out) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raise", "rank 1 failed: ArithmeticError: the planted fault"),
        ("memory", "rank 1 failed: RuntimeError: out of memory with micro batches of 1 sequence ("),
        ("hang", "s, at step 3, in the step: rank 1 is in hang, rank_fault.py"),
        ("freeze", "; its process gives no sign of life"),
    ],
)
def test_a_rank_that_fails_is_named_with_the_cause(
    words: list[str], with_fault: Run, tmp_path: Path, kind: str, text: str, left_behind: Callable[[Path], list[str]]
) -> None:
    out = tmp_path / "run"
    done = with_fault(kind, [*words, "--out", str(out), "--rank-timeout", "8"])
    assert done.returncode == 1
    stopped = [line for line in done.stderr.splitlines() if line.startswith("training stopped")]
    assert len(stopped) == 1
    assert text in stopped[0]
    assert kind != "freeze" or stopped[0].startswith("training stopped: rank 1 was last seen ")
    only_ours(done.stderr, out)
    if kind == "raise":
        assert "rank_fault.py" in (out / "ranks.log").read_text(), "the line that failed"
    assert left_behind(out) == []


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        pytest.param("begun", "training stopped: rank 1 has not been seen in ", marks=pytest.mark.long),
        ("connect", "training stopped: rank 1 was last seen "),
        ("over", "training is over: rank 1 has not ended 6 s after the training, last seen at step "),
    ],
    ids=["begun", "connect", "over"],
)
def test_a_rank_that_freezes_before_the_first_step_or_after_the_last_is_named(
    words: list[str], with_fault: Run, tmp_path: Path, moment: str, text: str, left_behind: Callable[[Path], list[str]]
) -> None:
    out = tmp_path / "run"
    done = with_fault(moment, [*words, "--steps", "2", "--out", str(out), "--rank-timeout", "6"])
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("training ")]
    assert len(told) == 1, done.stderr
    assert told[0].startswith(text)
    assert "; its process gives no sign of life" in told[0]
    assert ("all steps are done" in done.stdout) == (moment == "over")
    assert left_behind(out) == []


@pytest.mark.long
def test_ctrl_c_saves_and_leaves(words: list[str], tmp_path: Path, left_behind: Callable[[Path], list[str]]) -> None:
    out = tmp_path / "run"
    longer = [*words, "--steps", "1000000", "--out", str(out), "--gpus", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "redline", *longer], env=environment(), stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert not any(path.name.endswith(".draft") for path in (out / "checkpoints").iterdir())
    assert left_behind(out) == []
    last = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["ended"] == "interrupted"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("SIGTERM-connect", "asked to stop (SIGTERM)"),
        pytest.param("SIGINT-connect", "asked to stop (SIGINT)", marks=pytest.mark.long),
        pytest.param("SIGTERM-begun", "asked to stop (SIGTERM)", marks=pytest.mark.long),
        pytest.param("SIGINT-begun", "asked to stop (SIGINT)", marks=pytest.mark.long),
        ("interrupt", "interrupted (KeyboardInterrupt)"),
    ],
)
def test_a_rank_that_is_asked_to_stop_or_interrupts_itself_is_named(
    words: list[str], with_fault: Run, tmp_path: Path, kind: str, text: str, left_behind: Callable[[Path], list[str]]
) -> None:
    """Whoever asks while all train is answered in order, by a checkpoint and a summary."""
    out = tmp_path / "run"
    done = with_fault(kind, [*words, "--out", str(out)], step=5)
    assert done.returncode == 130
    told = [line for line in done.stderr.splitlines() if line.startswith("training ")]
    assert told == [f"training stopped: rank 1 was {text}"]
    assert left_behind(out) == []
    if kind == "interrupt":
        assert f"\ngo on     redline train --resume {out} --gpus 2\n" in done.stderr
        assert "rank_fault.py" in (out / "ranks.log").read_text(), "the line that interrupts"


def test_what_a_killed_rank_leaves_in_shared_memory_is_removed() -> None:
    """torch kills a rank's whole group once its grace is over; multiprocessing's tracker in there has to live on."""
    code = (
        "import multiprocessing, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(600)"
    )
    close = SubprocessHandler.close
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with rank:
        left = Path("/dev/shm", f"sem.{rank.stdout.readline().strip().removeprefix('/')}")
        assert left.exists()
        while not any(processes_of(rank.pid).values()):  # the tracker may be a fork of the rank yet
            time.sleep(0.01)
        handler: Any = SimpleNamespace(proc=rank, _stdout=None, _stderr=None)
        with agent.trackers_outlive_ranks():
            SubprocessHandler.close(handler, death_sig=signal.SIGKILL)
        assert rank.wait(timeout=20) == -signal.SIGKILL
    until = time.monotonic() + 20
    while left.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not left.exists()
    assert SubprocessHandler.close is close


def test_ranks_that_do_not_come_at_all_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE left over in a shell, or another node that never starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "leave_with_parent", lambda _: None)
    with pytest.raises(FailedRunError, match="2 ranks have not found each other in 1 s") as told:
        distributed.join(1.0)
    assert "torchrun" in told.value.fix


KILLED, ASKED_TO = -signal.SIGKILL, 130
WAS_KILLED = "training stopped: rank 1 was killed by SIGKILL (the system may be out of memory)"
WAS_ASKED = "training stopped: rank 1 was asked to stop (SIGTERM)"
ENDED_0, ASKED_1 = ("interrupted-0=SIGTERM",), ("interrupted-1=SIGTERM",)


@pytest.mark.parametrize(
    ("marks", "codes", "saved", "answer", "told"),
    [
        ((), {1: KILLED}, True, 1, [WAS_KILLED, ...]),
        ((), {1: KILLED}, False, 1, [WAS_KILLED]),
        (("asked", "left"), {0: ASKED_TO, 1: -signal.SIGINT}, True, 143, []),
        (("asked",), {0: -signal.SIGTERM}, True, 143, []),
        (("asked",), {0: ASKED_TO}, True, 130, []),
        (("left",), {1: -signal.SIGINT}, False, 130, ["training stopped: rank 1 was asked to stop (SIGINT)"]),
        ((*ENDED_0, *ASKED_1), {1: -signal.SIGINT, 0: ASKED_TO}, True, 130, [WAS_ASKED, ...]),
        (ASKED_1, {1: 1, 0: -signal.SIGTERM}, False, 130, [WAS_ASKED]),
        (ENDED_0, {1: -signal.SIGTERM, 0: ASKED_TO}, False, 130, [WAS_ASKED]),
        (ENDED_0, {1: KILLED, 0: -signal.SIGINT}, False, 1, [WAS_KILLED]),
        (ASKED_1, {0: ASKED_TO, 1: ASKED_TO}, True, 130, []),
        (("asked", "left", *ENDED_0), {0: ASKED_TO}, True, 143, []),
        (
            ("interrupted-1=KeyboardInterrupt",),
            {1: ASKED_TO, 0: -signal.SIGTERM},
            True,
            130,
            ["training stopped: rank 1 was interrupted (KeyboardInterrupt)", ...],
        ),
        (("asked",), {1: KILLED}, True, 1, [WAS_KILLED, ...]),
        ((), {0: ASKED_TO, 1: 7}, True, 1, ["training stopped: rank 1 left with exit code 7", ...]),
        (("inside-1",), {}, True, 1, ["training stopped: rank 1 left with exit code 0 before the end", ...]),
        ((), {0: 2}, True, 2, []),
        ((), {}, True, 0, []),
    ],
    ids=[
        *("killed", "nothing-saved", "rank-left", "at-the-end", "rank-saved", "rank-asked-as-it-began"),
        *("rank-asked", "rank-asked-in-import", "other-ended-later", "killed-and-ended", "saved-and-ended"),
        *("all-asked", "own-code", "killed-while-it-saves", "exit-code", "exit-code-0", "told-by-rank-0", "done"),
    ],
)
def test_the_agent_tells_of_failures_and_not_of_what_the_user_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marks: tuple[str, ...],
    codes: dict[int, int],
    saved: bool,
    answer: int,
    told: list[Any],
) -> None:
    run, screen = tmp_path / "mine", io.StringIO()
    for step in (2, 4) if saved else ():
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "run").write_text(json.dumps([str(run), "--gpus 2"]))
    for mark in marks:
        name, _, text = mark.partition("=")
        (tmp_path / name).write_text(text)
    failures = {rank: ProcessFailure(rank, 0, code, agent.NO_FILE) for rank, code in codes.items()}
    monkeypatch.setenv("REDLINE_RANK_PID_FILE", str(tmp_path / "rank-0"))
    monkeypatch.setattr(agent, "run_ranks", lambda words: failures)
    monkeypatch.setattr(agent, "open_screen", lambda: screen)
    ways = [f"saved     {run}/checkpoints/step-00000004", f"go on     redline train --resume {run} --gpus 2"]
    assert agent.main([]) == answer
    assert screen.getvalue().splitlines() == [line for part in told for line in (ways if part is ... else [part])]


def test_what_rank_0_has_told_in_its_summary_the_agent_tells_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "run").write_text(json.dumps([str(tmp_path / "mine"), "--gpus 2"]))
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": LOST, "extraInfo": {"timestamp": 100}}}))
    screen = io.StringIO()
    monkeypatch.setenv("REDLINE_RANK_PID_FILE", str(tmp_path / "rank-0"))
    mark_over(600.0)
    failures = {0: ProcessFailure(0, 0, 1, str(tmp_path / "error.json")), 1: ProcessFailure(1, 0, KILLED, "<N/A>")}
    monkeypatch.setattr(agent, "run_ranks", lambda words: failures)
    monkeypatch.setattr(agent, "open_screen", lambda: screen)
    assert agent.main([]) == 1
    assert screen.getvalue() == "training is over: rank 1 was last seen 25 s ago\n"
    left = [thread for thread in threading.enumerate() if thread.name == "limit-the-end"]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left), "it would end a process that has nothing to do with it"


def test_the_agent_ends_a_rank_0_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, ended = io.StringIO(), threading.Event()

    def run_ranks(words: list[str]) -> None:
        mark_over(0.0)
        assert ended.wait(30), "nobody ended the agent"
        raise SignalException("by the thread", signal.SIGTERM)

    monkeypatch.setenv("REDLINE_RANK_PID_FILE", str(tmp_path / "rank-0"))
    monkeypatch.setattr(agent, "run_ranks", run_ranks)
    monkeypatch.setattr(agent, "open_screen", lambda: screen)
    monkeypatch.setattr(agent, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(agent.os, "kill", lambda process, number: ended.set() if number == signal.SIGTERM else None)
    assert agent.main([]) == 1
    assert screen.getvalue() == "training is over: rank 0 did not exit in time\n"


GONE, LOST = "RuntimeError: connection closed by peer", "LostRankError: rank 1 was last seen 25 s ago"
MISTAKE = "MistakeOfRankError: training my.py raised ValueError"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: (1, 100, GONE), 1: (KILLED, 101, None)}, "rank 1 was killed by SIGKILL"),
        ({0: (1, 100, LOST), 1: (KILLED, 131, None)}, "rank 1 was last seen 25 s ago"),
        ({0: (1, 100, LOST), 1: (KILLED, 101, None)}, "rank 1 was last seen 25 s ago"),
        ({0: (KILLED, 130, None), 1: (1, 100, "ArithmeticError: planted")}, "rank 1 failed: ArithmeticError: planted"),
        ({0: (KILLED, 131, None), 1: (KILLED, 101, None)}, "rank 1 was killed by SIGKILL"),
        ({0: (-signal.SIGTERM, 100, None), 1: (1, 100, GONE)}, "rank 1 failed: RuntimeError: connection closed"),
        ({0: (1, 100, GONE), 1: (7, 101, None)}, "rank 1 left with exit code 7"),
        ({0: (1, 100, GONE), 1: (1, 101, None)}, "rank 1 left with exit code 1"),
        ({0: (130, 100, None), 1: (7, 100, None)}, "rank 1 left with exit code 7"),
        ({0: (-signal.SIGABRT, 100, None), 1: (7, 100, None)}, "rank 1 left with exit code 7"),
        ({0: (1, 100, GONE), 1: (0, 101, None)}, "rank 1 left with exit code 0 before the end"),
        ({0: (7, 100, None), 1: (1, 100, GONE)}, "rank 0 left with exit code 7"),
        ({0: (1, 101, None), 1: (1, 100, None)}, ""),
        ({0: (1, 101, None), 1: (130, 100, None)}, ""),
        ({0: (2, 101, None), 1: (2, 100, None)}, ""),
        ({0: (1, 100, LOST), 1: (130, 101, None)}, "rank 1 was last seen 25 s ago"),
        ({0: (130, 100, None), 1: (1, 100, MISTAKE)}, "rank 1 failed: training my.py raised ValueError"),
        ({1: (1, 101, GONE), 0: (-signal.SIGTERM, 100, "E: planted")}, "rank 0 failed: E: planted"),
    ],
    ids=[
        *("noticed-first", "frozen", "frozen-and-killed", "agent-killed", "two-kills", "agent-ended"),
        *("left", "left-with-1", "left-and-ended", "left-and-aborted", "left-with-0", "rank-0-left", "rank-0-tells"),
        *("rank-1-follows", "both-refuse", "outstayed", "mistake", "failed-and-ended"),
    ],
)
def test_the_cause_is_not_what_the_agent_did_afterwards(
    tmp_path: Path, failures: dict[int, tuple[int, int, str | None]], expected: str
) -> None:
    """(exit code, seconds, what the rank recorded). The agent kills 30 s after the first failure."""
    found = {}
    for rank, (code, seconds, told) in failures.items():
        path = tmp_path / f"{rank}.json"
        if told is not None:
            path.write_text(json.dumps({"message": {"message": told, "extraInfo": {"timestamp": seconds}}}))
        found[rank] = ProcessFailure(rank, 0, code, str(path))
        found[rank].timestamp = seconds
    rank, cause = agent.cause_of(found, agent.quiet_ranks(found))
    words = agent.describe_failure(rank, cause) or ""
    assert words.startswith(expected)
    assert bool(words) == bool(expected)
    assert words or rank == 0, "its exit code is the job's"


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_rank_0_that_left_in_the_middle_has_told_nothing_whatever_its_exit_code(code: int) -> None:
    failures = {0: ProcessFailure(0, 0, code, agent.NO_FILE), 1: ProcessFailure(1, 0, -signal.SIGTERM, agent.NO_FILE)}
    assert agent.quiet_ranks(failures) == set()
    assert agent.quiet_ranks(failures, inside=[0]) == {0}
    assert agent.cause_of(failures, {0})[0] == 0


@pytest.mark.parametrize(("rank_0_failed", "asked"), [(100.5, None), (100.7, 1)], ids=["before", "since"])
def test_a_rank_that_was_interrupted_is_the_cause_of_what_failed_since(
    tmp_path: Path, rank_0_failed: float, asked: int | None
) -> None:
    """In one look of the agent's, which begins with rank 0. Python has ended rank 1 by a SIGINT of its own."""
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"message": {"message": GONE, "extraInfo": {"timestamp": 100}}}))
    os.utime(path, (rank_0_failed, rank_0_failed))
    failures = {0: ProcessFailure(0, 0, 1, str(path)), 1: ProcessFailure(1, 0, -signal.SIGINT, agent.NO_FILE)}
    interrupts = {1: Interrupt("SIGTERM", 100.6)}
    assert agent.asked_rank(failures, interrupts) == asked
    assert agent.asked_rank(failures, {}) is None
    assert agent.cause_of(failures, (), interrupts)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "signals",
    [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)],
    ids=["SIGINT", "SIGTERM", "twice"],
)
@pytest.mark.parametrize("moment", ["agent", "rank", "run"])
def test_whoever_interrupts_ranks_that_start_is_told_just_that(
    words: list[str],
    tmp_path: Path,
    moment: str,
    signals: tuple[signal.Signals, ...],
    left_behind: Callable[[Path], list[str]],
) -> None:
    """Before there is an agent's handler, when rank 0 is there, and when it has made the run directory. A terminal
    signals the whole group."""
    out, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "redline", *words, "--steps", "1000000", "--out", str(out), "--gpus", "2"],
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    awaited = {"agent": (temporary, "*/ranks.log"), "rank": (temporary, "*/rank-0"), "run": (out, "run.json")}
    folder, pattern = awaited[moment]
    until = time.monotonic() + 120
    while not list(folder.glob(pattern)) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)  # handlers are set
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.3)
    _, told = process.communicate(timeout=90)
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == "interrupted"
    assert "training stopped" not in told
    assert "Traceback" not in told
    assert [path.name for path in temporary.glob("redline-ranks-*")] == []
    assert left_behind(out) == []


@pytest.mark.long
def test_whoever_is_killed_leaves_nobody_behind(
    words: list[str], tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    out = tmp_path / "run"
    longer = [*words, "--steps", "1000000", "--out", str(out), "--gpus", "2"]
    process = subprocess.Popen([sys.executable, "-m", "redline", *longer], env=environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while left_behind(out) and time.monotonic() < until:
        time.sleep(0.2)
    assert left_behind(out) == []


@pytest.mark.parametrize(
    ("more", "problem", "fix"),
    [
        (("--gpus", "3"), "a global batch of 4 is not a number of passes of 3", "3 or 6"),
        (("--gpus", "2", "--micro-batch", "3"), "4 is not a number of passes of 6", "6, or --micro-batch to 1 or 2"),
        (("--gpus", "0"), "--gpus is 0", "1"),
        (("--gpus", "2", "--parallel", "zero"), "unknown way to share a step 'zero'", "ddp, fsdp"),
        (("--gpus", "2", "--parallel", "fsdp", "--optimizer", "muon"), "fsdp does not apply here", "--parallel"),
        (("--gpus", "4", "--tensor", "4"), "2 heads cannot be shared by --tensor 4", "use --tensor 2 or --tensor 1"),
        (("--gpus", "3", "--tensor", "2"), "3 GPUs cannot be cut into replicas of 2 x 1", "2 or 4 GPUs"),
        (("--gpus", "2", "--tensor", "0"), "--tensor is 0", "1"),
        (("--tensor", "2"), "--tensor 2 with one process", "--gpus"),
        (
            ("--gpus", "4", "--tensor", "2", "--micro-batch", "4"),
            "4 is not a number of passes of 8",
            "--micro-batch to",
        ),
        (("--gpus", "4", "--replicas", "3", "--parallel", "fsdp"), "cannot be 3 replicas", "--replicas 1 or 2"),
        (("--gpus", "4", "--replicas", "2", "--parallel", "ddp"), "--replicas 2 with ddp", "--parallel fsdp"),
        (
            ("--gpus", "2", "--tensor", "2", "--optimizer", "muon"),
            "--tensor 2 does not apply here",
            "leave --tensor 2 out",
        ),
        (("--gpus", "2", "--tensor", "2", "--init", "folder"), "--init with tensor-parallel", "--resume"),
        (("--gpus", "2", "--rank-timeout", "-1"), "--rank-timeout is -1", "from 5 to 604800"),
        (("--gpus", "2", "--rank-timeout", "nan"), "--rank-timeout is nan", "from 5 to 604800"),
        (("--rank-timeout", "0"), "--rank-timeout is 0", "from 5 to 604800"),
        (("--gpus", "2", "--rank-timeout", "inf"), "--rank-timeout is inf", "from 5 to 604800"),
        (
            ("--gpus", "2", "--steps", "2", "--warmup-steps", "2"),
            "2 steps of warm-up do not fit into 2 steps",
            "choose a warm-up from 1 to 1 step",
        ),
        (("--steps", "3", "--warmup-steps", "3"), "3 steps of warm-up do not fit into 3 steps", "from 1 to 2"),
    ],
    ids=[
        *("batch", "micro-batch", "none", "unknown", "optimizer"),
        *("heads", "ranks", "no-tensor", "one-process", "data", "replicas", "copies", "tensor-optimizer", "init"),
        *("timeout", "timeout-nan", "timeout-alone", "timeout-inf", "warm-up", "warm-up-alone"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    problem: str,
    fix: str,
) -> None:
    monkeypatch.setattr("redline.commands.ranks.agent_command", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr("redline.search.launch.probe_machine", asked_once)
    assert main([*words, "--out", str(tmp_path / "run"), *more]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert fix in told
    assert not (tmp_path / "run").exists()


BUILDS = """
import os, time
from torch import nn, ones, zeros

def net():
    if os.environ.get("RANK") == "1":
        FAULT
    return nn.Linear(3, 3)

def make_batch(size, seed):
    return ones(size, 3), zeros(size).long()
"""


@pytest.mark.parametrize(
    ("fault", "limit", "code", "told"),
    [
        ("raise ValueError('odd')", "60", 2, "problem: rank 1: net() raised ValueError: odd"),
        pytest.param(
            *("time.sleep(600)", "8", 1),
            "training stopped: rank 1 is building the model (net, model.py) 8 s after rank 0 finished that",
            marks=pytest.mark.long,
        ),
    ],
    ids=["raises", "hangs"],
)
def test_a_rank_whose_model_does_not_come_is_named(
    tmp_path: Path, fault: str, limit: str, code: int, told: str, left_behind: Callable[[Path], list[str]]
) -> None:
    """While the others wait for it, and not in a collective, which would tell of a closed connection."""
    out, model, recipe = tmp_path / "run", tmp_path / "model.py", tmp_path / "recipe.json"
    model.write_text(BUILDS.replace("FAULT", fault))
    recipe.write_text(json.dumps(to_json(Recipe(rungs=(), micro_batch=1))))
    words = ["train", f"{model}:net", "--recipe", str(recipe), "--device", "cpu", "--steps", "2", "--gpus", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "redline", *words, "--rank-timeout", limit, "--out", str(out), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "rank 0 failed" not in done.stderr
    if code == 2:  # a mistake, and nothing was trained
        assert (done.stdout, out.exists()) == ("", False)
    else:
        assert json.loads(done.stdout)["reason"] == told.removeprefix("training stopped: ")
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [line["ended"] for line in metrics if line["kind"] == "end"] == ["failed"]
    assert left_behind(out) == []


@pytest.mark.long
def test_a_mistake_that_all_ranks_find_is_told_once_and_leaves_nothing(
    words: list[str], tmp_path: Path, left_behind: Callable[[Path], list[str]]
) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "redline", *words, "--init", str(tmp_path), "--out", str(out), "--gpus", "2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if "cannot import" in line] == [
        f"problem: cannot import {tmp_path}"
    ]
    assert "training stopped" not in done.stderr
    assert not out.exists()
    assert left_behind(out) == []


def test_whoever_runs_torchrun_reads_why_the_watch_ended_a_rank(tmp_path: Path) -> None:
    """torchrun shows the call stack of the error file, which torch's handler takes of what is being handled."""
    code = "from redline.engine import distributed; distributed.end_with(distributed.LostRankError('rank 3 stands'))"
    file = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "rank 3 stands" in json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_is_rank_0s_to_tell_if_it_finds_it(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Another rank's own comes with the exit code of a mistake, after it has left rank 0 the time."""
    happened: list[Any] = []
    monkeypatch.setattr(distributed.time, "sleep", happened.append)
    monkeypatch.setattr(distributed, "record_failure", lambda *words: happened.extend(map(repr, words)))
    mistake = UserError("problem\nof two lines", "why", "fix")
    ranks = Ranks(rank=rank, count=2, limit_seconds=9)
    monkeypatch.setattr(ranks, "remember", lambda _, end: happened.append(end.text))
    with pytest.raises((UserError, SystemExit)) as raised, distributed.recorded(ranks):
        raise mistake
    words = "problem of two lines: why"
    recorded = [2.25, repr(mistake), repr(MistakeOfRankError(words))]
    assert happened == [f"rank {rank} failed: {words}", *([] if rank == 0 else recorded)]
    assert raised.value is mistake if rank == 0 else raised.value.code == 2


@pytest.mark.parametrize("count", [1, 2])
def test_what_ends_rank_0_under_way_is_told_by_its_name(count: int) -> None:
    """The others may go on well. Of one rank alone there is nobody else to be told from."""
    with pytest.raises(FailedRunError) as raised, distributed.recorded(Ranks(rank=0, count=count)):
        raise FailedRunError("training my.py raised E", "why", "fix")
    wanted = ("rank 0: " if count > 1 else "") + "training my.py raised E"
    assert raised.value.problem == wanted
    assert Ranks(rank=0, count=count).named(raised.value) is raised.value  # once


@pytest.mark.parametrize(
    ("said", "follows"),
    [
        ({}, False),
        ({"over": 1}, True),
        ({"over": 0}, False),
        ({"end/0/0": End(1, "rank 0 failed: E: x", when=101.0)}, True),
        ({"end/0/0": End(3, "rank 0 failed: E: x", when=99.0)}, False),
        ({"end/0/0": End(1, "")}, False),
        ({"end/0/2": End(1, "rank 2 failed: E: x")}, False),
    ],
    ids=["first", "rank-0-is-over", "all-done", "rank-0-failed", "rank-0-failed-of-it", "asked-to-stop", "another"],
)
@pytest.mark.parametrize("mistake", [False, True], ids=["collective", "mistake"])
@pytest.mark.parametrize("asked", [False, True], ids=["", "asked"])
def test_a_rank_that_fails_because_rank_0_did_says_nothing(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], follows: bool, mistake: bool, asked: bool
) -> None:
    """Rank 0 tells by itself what was wrong; the agent ends this rank while it waits for that, or has asked it to while
    it trained. Whose clock is ahead is no matter."""
    store, waited, recorded = Told(), [], []
    store.add("ends/0", 1)
    for key, value in said.items():
        store.set(key, json.dumps(value))
    ranks = Ranks(rank=1, count=3, limit_seconds=8)
    ranks._store = ranks._lasting = store
    monkeypatch.setattr(distributed.time, "time", lambda: 100.0)
    monkeypatch.setattr(distributed.time, "sleep", waited.append)
    monkeypatch.setattr(distributed, "record_failure", lambda error, *_: recorded.append(error))
    if asked:
        ranks.ask()
    with pytest.raises(SystemExit) as raised, distributed.recorded(ranks):
        raise FailedRunError("training", "why", "fix") if mistake else RuntimeError("connection closed by peer")
    assert (raised.value.code, len(recorded)) == ((130, 0) if follows else (1, 1))
    assert waited == ([2.0] if (follows or mistake) and not asked else [])
    assert store.check(["end/0/1", "leaves/1"])


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt, SystemExit])
def test_whoever_stops_in_order_is_not_taken_for_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException] | None
) -> None:
    """Rank 0 leaves with 130 when the user asks it to, and torchrun starts all ranks again."""
    ranks, ends = Ranks(rank=0, count=1), {}
    monkeypatch.setattr(ranks, "remember", lambda _, end: ends.update({0: end}))
    with nullcontext() if kind is None else pytest.raises(kind), distributed.recorded(ranks):
        if kind is not None:
            raise kind
    assert ends[0].text == ""
    assert distributed.describe_ends(ends, {0: 0.0}) is None


@pytest.mark.parametrize("agent_tells", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_saved_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, agent_tells: bool
) -> None:
    """And by rank 0, which may be writing it yet. The agent of `--gpus` tells it, and how to go on, below what it tells
    of another rank; torchrun's own tells neither."""
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    monkeypatch.setattr(session, "rank_pid_file", lambda: tmp_path / "rank-0" if agent_tells else None)
    store = SimpleNamespace(folder=tmp_path / "checkpoints")
    trainer: Any = SimpleNamespace(ranks=Ranks(rank=rank, count=2), store=store, progress=SimpleNamespace(updates=5))
    order: Any = SimpleNamespace(out=str(tmp_path), options_of_ranks="--gpus 2")
    told = session.failed_run(UserError("problem", "why", "fix"), order, trainer)
    assert (told.problem, "step-00000004" in told.why) == ("problem", rank == 0)
    assert ("--resume" in told.fix) == (rank == 0 or not agent_tells)


class EndlessWriter(threading.Thread):
    """A writer whose peer is gone."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()

    def run(self) -> None:
        self.done.wait(60)


def test_after_a_failure_a_checkpoint_under_way_is_waited_for_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a model that is cut: what is said next of what was saved must not be older than what is there."""
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    ranks = Ranks(rank=1, count=2)

    def left_by(error: type[BaseException], writer: threading.Thread) -> bool:
        """Whether it had written then."""
        store = rank_stores.ShardedStore(rank_stores.FollowingStore(tmp_path, ranks), ranks)
        store._thread = writer
        writer.start()
        with pytest.raises(error), store:
            raise error
        return not writer.is_alive()

    assert left_by(RuntimeError, threading.Timer(0.5, lambda: None))
    endless = [EndlessWriter(), EndlessWriter()]
    assert not left_by(KeyboardInterrupt, endless[0]), "whoever wants to leave leaves"
    monkeypatch.setattr(rank_stores, "SETTLE_SECONDS", 0.2)
    assert not left_by(RuntimeError, endless[1])
    for writer in endless:
        writer.done.set()


def test_a_wait_for_rank_0_ends_when_the_agent_says_so(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Its signal may come while the rank trains, where it only asks to stop, or during the wait itself."""
    ranks = two_ranks(Told())
    assert not ranks.hears("over", 5.0)
    assert clock[-1] - clock[0] == 5
    monkeypatch.setattr(distributed.time, "sleep", lambda _: ranks.ask() or clock.append(clock[-1] + 1.0))
    assert not ranks.hears("over", 5.0)
    ranks.wait_for_rank_0()
    assert clock[-1] - clock[0] == 6


@pytest.mark.parametrize("over", [1, 0, None], ids=["failed-too", "done", "says-nothing"])
def test_a_failure_of_all_ranks_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, over: int | None) -> None:
    """A rank that fails alone, even after rank 0 is done, has to be recorded."""
    waited: list[float] = []
    monkeypatch.setattr("redline.commands.ranks.log_to", lambda _: None)
    monkeypatch.setattr("redline.core.values.from_json", lambda *_: SimpleNamespace(out=str(tmp_path)))
    monkeypatch.setattr("redline.engine.session.train", lambda *_: {"ended": "failed", "reason": "out of memory"})
    ranks: Any = Ranks(rank=1, count=2, limit_seconds=8)
    ranks.hear = {"order": {}, "over": over}.__getitem__
    ranks.hears = lambda key, seconds: waited.append(seconds) or over is not None
    monkeypatch.setattr("redline.commands.ranks.time.sleep", waited.append)
    if over:
        assert train_along(ranks) == 1
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            train_along(ranks)
    assert waited == [2.0] * (2 if over else 1), "much less than what makes it a rank that hangs"


@cache
def asked_once(device: str | None) -> Any:
    """The machine does not change between two mistakes, and asking takes seconds."""
    return probe_machine(device)


BEHIND = Mark(5, 2, "waiting for its batch", "next, loader.py")
FURTHER = Mark(6, 2, "in the step", "all_reduce, c10d.py")
ELSEWHERE = Mark(6, 2, "in the step", "sleep, user.py")


@pytest.mark.parametrize(
    ("marks", "seconds", "frozen", "text"),
    [
        ({0: FURTHER, 1: FURTHER}, {0: 3.0, 1: 3.0}, [], None),
        ({0: FURTHER, 1: BEHIND}, {0: 9.0, 1: 9.0}, [], None),
        ({0: FURTHER, 1: BEHIND}, {0: 10.5, 1: 11.0}, [], "rank 1 was last seen 11 s ago at step 2, waiting for its"),
        ({0: BEHIND, 1: FURTHER}, {0: 12.0, 1: 11.0}, [], "rank 0 was last seen 12 s ago"),
        (
            {0: FURTHER, 1: ELSEWHERE, 2: FURTHER},
            {0: 11.0, 1: 11.0, 2: 11.0},
            [],
            "progress for 11 s, at step 2, in the step: rank 1 is in sleep, user.py, rank 2 is in all_reduce, c10d.py",
        ),
        ({0: BEHIND, 1: FURTHER}, {0: 11.0, 1: 11.0}, [1], "rank 1 was last seen 11 s ago at step 2 or later, in"),
        ({0: BEHIND, 1: NEVER_SEEN}, {0: 1.0, 1: 11.0}, [1], "rank 1 has not been seen in 11 s; its process gives no"),
    ],
    ids=["well", "in-time", "behind", "first", "all", "frozen", "never"],
)
def test_the_watch_names_whoever_is_behind(
    marks: dict[int, Mark], seconds: dict[int, float], frozen: list[int], text: str | None
) -> None:
    found = describe_straggler(marks, seconds, frozen, 10)
    assert found is None if text is None else text in (found or "")


class Told:
    """A store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, more: int) -> int:
        self.set(key, str(int(self.values.get(key, b"0")) + more))
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def beat(self, rank: int, number: int, mark: Mark) -> None:
        self.set(f"beat/{rank}", json.dumps([number, *mark]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time, and waiting adds one."""
    now = [1000.0]
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(distributed.time, "sleep", lambda _: now.append(now[-1] + 1.0))
    return now


def two_ranks(store: Told) -> Ranks:
    ranks = Ranks(rank=0, count=2, limit_seconds=10)
    ranks._store = store
    return ranks


def test_a_process_that_lives_may_stand_still_where_no_steps_are_due(clock: list[float]) -> None:
    """Building and reading may take long; what they took does not count in the loop that follows."""
    store = Told()
    ranks, building = two_ranks(store), Mark(1, 0, "building the model", "build, build.py")

    def looked_at(seconds: int) -> str | None:
        found = None
        for _ in range(seconds):
            clock.append(clock[-1] + 1)
            for rank in (0, 1):
                store.beat(rank, len(clock), building)
            found = ranks._standing_still(10, ranks._marks_since)
        return found

    assert looked_at(30) is None
    with ranks.marking():
        assert looked_at(9) is None
        assert (looked_at(3) or "").startswith("no rank has made progress for 12 s")
    assert looked_at(1) is None
    store.beat(0, 99, building)
    clock.append(clock[-1] + 11)
    store.beat(0, 100, building)
    frozen = "rank 1 was last seen 11 s ago at step 0 or later, building the model (build, build.py); its process gives"
    assert (ranks._standing_still(10, None) or "").startswith(frozen)


class LeftError(Exception):
    """In the place of what ends a process."""


@pytest.mark.parametrize(
    ("rank", "end", "leaves", "left"),
    [
        (0, None, False, "rank 1 was last seen"),
        (0, End(1, "rank 1 failed: E: x"), True, "rank 1 failed: E: x"),
        (0, End(1, ""), True, "130"),
        (1, None, False, "rank 0 was last seen"),
        (1, End(1, "rank 0 failed: E: x"), True, "130"),
        (1, End(1, "rank 0 failed: E: x"), False, "rank 0 failed: E: x"),
    ],
    ids=["frozen", "failed", "ended", "rank-0-frozen", "rank-0-ended", "rank-0-still-reports"],
)
def test_nobody_accuses_a_rank_that_has_told_its_end(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], rank: int, end: End | None, leaves: bool, left: str
) -> None:
    """A rank 0 that has told of its failure is left the time to report it, as long as its process lives."""

    def leave(how: object) -> None:
        raise LeftError(str(how))

    other, store = 1 - rank, Told()
    ranks = Ranks(rank=rank, count=2, limit_seconds=10)
    ranks._store = ranks._lasting = store
    ranks.mark(3, "in the step")
    store.beat(other, 7, FURTHER)
    if end is not None:
        store.set(f"end/0/{other}", json.dumps(end))
    if leaves:
        store.set(f"leaves/{other}", "true")
    monkeypatch.setattr(ranks._ended, "wait", distributed.time.sleep)
    monkeypatch.setattr(distributed.os, "_exit", leave)
    monkeypatch.setattr(distributed, "end_with", leave)
    with pytest.raises(LeftError, match=left):
        ranks._live()
    waited = clock[-1] - clock[0]
    assert waited < 5 if (rank, left) == (1, "130") else waited > 10


def test_a_rank_that_left_and_wrote_nothing_down_is_the_cause_of_a_row(tmp_path: Path) -> None:
    gone = Failure(kind="error", reason="RuntimeError: connection closed by peer")
    (tmp_path / RANK_FAILURE_FILE.format(0)).write_text(json.dumps(to_json(gone)))

    def reason(**codes: int) -> str:
        found = {int(rank[-1]): ProcessFailure(0, 0, code, agent.NO_FILE) for rank, code in codes.items()}
        return failure_of_ranks(found, tmp_path).reason

    assert reason(rank0=1, rank1=7) == "rank 1 left with exit code 7"
    assert reason(rank0=1, rank1=0) == "rank 1 left with exit code 0 before the end"
    assert reason(rank0=1, rank1=-signal.SIGTERM) == f"rank 0: {gone.reason}"


def test_a_rank_that_is_still_inside_has_left_in_the_middle(tmp_path: Path) -> None:
    with inside(tmp_path, 0):
        assert list(agent.left_with_zero({}, tmp_path)) == [0]
        assert agent.left_with_zero({0: ProcessFailure(0, 0, 7, agent.NO_FILE)}, tmp_path) == {}
    assert agent.left_with_zero({}, tmp_path) == {}


MINE, ANOTHER = distributed.this_process()[0], "another machine"


@pytest.mark.parametrize(
    ("machine", "left", "ended", "text"),
    [
        (MINE, True, True, None),
        (MINE, True, False, "rank 1 has not ended 10 s after the training, last seen at step 2 or later, in the step"),
        (MINE, False, True, "its process gives no sign of life"),
        (ANOTHER, True, False, None),
        (ANOTHER, False, False, "its process gives no sign of life"),
    ],
    ids=["ended", "does-not-end", "killed", "left-elsewhere", "frozen-elsewhere"],
)
def test_rank_0_waits_for_the_others_to_end_and_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], machine: str, left: bool, ended: bool, text: str | None
) -> None:
    store = Told()
    ranks = two_ranks(store)
    store.beat(1, 7, FURTHER)
    store.set("process/1", json.dumps([machine, 4711]))
    if left:
        store.set("left/1", "true")
    monkeypatch.setattr(distributed, "has_ended", lambda process: {4711: ended}[process])
    if text is None:
        ranks.take_leave()
        assert len(clock) == 1, "nobody waited"
    else:
        with pytest.raises(distributed.LostRankError, match=re.escape(text)):
            ranks.take_leave()
        assert clock[-1] - clock[0] == 11


def test_a_process_has_ended_though_nobody_has_asked_for_its_code() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert not distributed.has_ended(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert distributed.has_ended(process.pid), "it is a zombie"
    process.wait()
    assert distributed.has_ended(process.pid)


def test_a_rank_is_where_our_code_or_the_users_is_and_not_in_a_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    def frame_in(wait: Callable[[], object]) -> str:
        """Of a thread that is taken for the one that trains."""
        with ThreadPoolExecutor(1, thread_name_prefix="training") as pool:
            waiting = pool.submit(wait)
            (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith("training"))
            monkeypatch.setattr(distributed.threading, "main_thread", lambda: thread)
            until = time.monotonic() + 10
            while not (found := distributed.main_frame()).endswith(Path(__file__).name) and time.monotonic() < until:
                time.sleep(0.01)
            done.set()
            waiting.result()
        return found

    def waiting_for_others() -> None:
        done.wait()  # in threading.py

    done = threading.Event()
    assert frame_in(waiting_for_others) == f"waiting_for_others, {Path(__file__).name}"


NUMPYS = str(Path(numpy.__file__).with_name("fromnumeric.py"))
REPEAT = [("_wrapfunc", NUMPYS), ("repeat", NUMPYS)]
WAIT = [("select", selectors.__file__), ("wait", threading.__file__)]
REDUCE = [("all_reduce", torch.distributed.distributed_c10d.__file__)]
OURS, USERS = [("fetch", distributed.__file__)], [("make_batch", str(HERE / "my_model.py"))]
START = [("<module>", "<frozen runpy>")]
COMPILED = [("call", "/tmp/torchinductor_me/ei/ceiktq3vifii4ra4uztncp7jv5mcfz7wqyghtybudlb6z6xnqitl.py")]


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        ([*REPEAT, *OURS, *START], "fetch, distributed.py, which calls repeat"),
        ([*REPEAT, *USERS, *OURS, *START], "make_batch, my_model.py, which calls repeat"),
        ([*WAIT, *REDUCE, *OURS, *START], "fetch, distributed.py, which calls all_reduce"),
        ([*WAIT, *OURS], "fetch, distributed.py"),
        ([*USERS, *REDUCE, *OURS], "make_batch, my_model.py"),
        ([*REPEAT[:1], *OURS], "fetch, distributed.py"),
        (REPEAT, "_wrapfunc, fromnumeric.py"),
        ([*COMPILED, *REDUCE, *OURS], "fetch, distributed.py, which calls compiled code"),
        ([*USERS, *COMPILED, *OURS], "make_batch, my_model.py"),
        ([], "nowhere"),
    ],
    ids=["ours", "users", "collective", "lock", "user-below-torch", "private", "nobodys", "compiled", "below", "none"],
)
def test_a_place_is_told_by_the_function_that_its_reader_knows(stack: list[tuple[str, str]], place: str) -> None:
    assert distributed.describe_place(stack) == place


@pytest.mark.parametrize("words", [["ladder", "tiny"], ["watch", "run"], ["train", "--stepz", "3"]], ids=lambda w: w[0])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_that_all_ranks_find_is_told_by_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], rank: str
) -> None:
    """`ladder` and the like are one: every rank would run all of it."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "here"}.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert bool(waited) == (rank == "1")
    assert told.count("problem:") == (rank == "0")
    if rank == "0" and words[0] != "train":
        assert "leave torchrun out" in told
        assert ("--gpus 2" in told) == (words[0] == "ladder")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "interrupted\n"),
        ({"RANK": "1"}, "interrupted\n"),  # of something else's environment: nobody has started ranks
        ({"RANK": "0", "WORLD_SIZE": "2"}, "interrupted\n"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
    ids=["alone", "no-rank", "rank-0", "rank-1"],
)
def test_a_rank_that_its_launcher_ends_says_nothing_unless_it_is_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], told: str
) -> None:
    """torchrun sends SIGTERM to those that are there when another has left."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("redline.cli.build_parser", lambda _: signal.raise_signal(signal.SIGTERM))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["ladder", "tiny"]) == 130
    assert capsys.readouterr().err == told
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_our_own_files_are_ours_in_site_packages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = os.path.join("lib", "site-packages", "redline", "")
    monkeypatch.setattr(distributed, "PACKAGE", ours)
    stack = [*REPEAT, ("fetch", f"{ours}loader.py")]
    assert distributed.describe_place(stack) == "fetch, loader.py, which calls repeat"


@pytest.mark.parametrize("step", [0, 3])
def test_a_watch_that_ends_a_slow_start_says_that_starting_counts(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    ended: list[str] = []
    ranks = Ranks(rank=0, count=2)
    ranks.mark(step, "waiting for its batch")
    monkeypatch.setattr(ranks, "_beat", lambda: ended and ranks._ended.set())
    monkeypatch.setattr(ranks, "_standing_still", lambda *_: "no rank has made progress for 10 s")
    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(distributed, "end_with", lambda error: ended.append(str(error)))
    with ranks.marking():
        ranks._live()
    assert all(text.startswith("no rank has made progress for 10 s") for text in ended)
    assert ended
    assert all(("compilation count too" in text) == (step == 0) for text in ended)
