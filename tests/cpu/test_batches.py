"""Batches are a pure function of (tokens, seed, i), whoever makes them; and a closed stream leaves nothing running."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.data import batches as batches_module
from redline.data.batches import TokenBatches, stream_batches
from redline.data.tokens import open_tokens, write_tokens

CPU = torch.device("cpu")
COUNT, B, T = 5000, 4, 16
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> TokenBatches:
    """Token n is n, so that every token tells its place."""
    path = tmp_path_factory.mktemp("batches") / "tokens.npy"
    write_tokens(path, numpy.arange(COUNT), 65536)
    return TokenBatches(path=path, seed=1337, micro_batch=B, sequence=T)


def first(batches: TokenBatches, count: int, *, workers: int, start: int = 0) -> torch.Tensor:
    stream = stream_batches(batches, CPU, workers, start)
    try:
        return torch.stack([batch.clone() for batch in islice(stream, count)])
    finally:
        stream.close()


def test_batch_is_what_the_plain_code_says(batches: TokenBatches) -> None:
    tokens = open_tokens(batches.path)
    for index in (0, 1, 7, 10**12):
        starts = numpy.random.default_rng((1337, index)).integers(COUNT - T, size=B)
        inputs = [tokens[start : start + T].tolist() for start in starts]
        targets = [tokens[start + 1 : start + T + 1].tolist() for start in starts]
        assert batches[index].tolist() == [inputs, targets]


def test_form(batches: TokenBatches) -> None:
    batch = batches[0]
    assert batch.dtype == torch.int64
    assert batch.shape == (2, B, T)
    assert all(half.is_contiguous() for half in batch)


def test_targets_are_inputs_shifted_by_one(batches: TokenBatches) -> None:
    inputs, targets = batches[3]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)


@given(
    sequence=st.integers(1, 40),
    extra=st.integers(1, 60),
    micro_batch=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    index=st.integers(0, 2**40),
)
def test_windows_stay_in_range(
    tmp_path_factory: pytest.TempPathFactory, sequence: int, extra: int, micro_batch: int, seed: int, index: int
) -> None:
    count = sequence + extra
    path = tmp_path_factory.mktemp("range") / "tokens.npy"
    write_tokens(path, numpy.arange(count), count)
    inputs, targets = TokenBatches(path=path, seed=seed, micro_batch=micro_batch, sequence=sequence)[index]
    assert inputs.shape == (micro_batch, sequence)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(sequence))  # one unbroken run of tokens per row
    assert torch.equal(targets, inputs + 1)
    assert inputs.min() >= 0
    assert targets.max() < count


def test_every_window_is_drawn_the_first_and_the_last_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.npy", numpy.arange(T + 4), 257)
    few = TokenBatches(path=tmp_path / "tokens.npy", seed=0, micro_batch=B, sequence=T)
    starts = {int(start) for index in range(30) for start in few[index][0, :, 0]}
    assert starts == {0, 1, 2, 3}


def test_seeds_and_indices_differ(batches: TokenBatches) -> None:
    seen = {str(replace(batches, seed=seed)[index].tolist()) for seed in range(5) for index in range(5)}
    assert len(seen) == 25


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_order_does_not_depend_on_workers(batches: TokenBatches, workers: int) -> None:
    assert torch.equal(first(batches, 12, workers=workers), first(batches, 12, workers=0))


@pytest.mark.parametrize("workers", [0, 2])
def test_start_continues_exactly(batches: TokenBatches, workers: int) -> None:
    whole = first(batches, 9, workers=0)
    assert torch.equal(first(batches, 4, workers=workers, start=5), whole[5:])


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_leaves_the_random_numbers_of_the_model_alone(batches: TokenBatches, workers: int) -> None:
    before = torch.get_rng_state()
    first(batches, 3, workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_pickling_carries_the_path_and_not_the_tokens(batches: TokenBatches) -> None:
    batch = batches[5]  # the map is open now
    data = pickle.dumps(batches)
    assert len(data) < 1000 < COUNT
    again = pickle.loads(data)
    assert again == batches
    assert "windows" not in vars(again)
    assert torch.equal(again[5], batch)


def test_the_map_is_opened_at_first_use(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    early = TokenBatches(path=path, seed=0, micro_batch=B, sequence=T)
    write_tokens(path, numpy.arange(COUNT), COUNT)
    assert early[0].shape == (2, B, T)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_missing_file_is_told_at_once_and_as_itself(tmp_path: Path, workers: int) -> None:
    nothing = TokenBatches(path=tmp_path / "none.npy", seed=0, micro_batch=B, sequence=T)
    with pytest.raises(UserError, match=r"none\.npy"):
        stream_batches(nothing, CPU, workers)


def children_of(parent_pid: int) -> dict[int, str]:
    """Living processes and zombies, with their command lines (empty for a zombie)."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()  # state, parent, ...
            if int(after_name[1]) == parent_pid:
                found[int(entry.name)] = (entry / "cmdline").read_text()
        except (OSError, ValueError, IndexError):
            continue  # no process, or it ended as we looked
    return found


def fork_server() -> int:
    """The helper that Python keeps for the life of this process; the workers are its children."""
    [pid] = [pid for pid, line in children_of(os.getpid()).items() if "forkserver import main" in line]
    return pid


def workers_running() -> list[int]:
    return sorted(children_of(fork_server()))


@needs_proc
def test_closing_ends_the_workers(batches: TokenBatches) -> None:
    stream = stream_batches(batches, CPU, workers=2)
    next(stream)
    assert len(workers_running()) == 2
    stream.close()
    assert workers_running() == []
    assert multiprocessing.active_children() == []


@needs_proc
def test_an_abandoned_stream_ends_its_workers(batches: TokenBatches) -> None:
    for batch in stream_batches(batches, CPU, workers=2):
        assert batch.shape == (2, B, T)
        break
    gc.collect()
    assert workers_running() == []
    stream_batches(batches, CPU, workers=2).close()  # never begun
    assert workers_running() == []


class NoStream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


def without_streams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The way to a GPU on a machine without one. Tensors are listed as they are noted for the step's stream."""
    noted: list[torch.Tensor] = []
    monkeypatch.setattr(batches_module, "moved", lambda batch, *_, **__: batch)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _: noted.append(tensor))
    return noted


def test_a_none_in_a_batch_goes_to_a_gpu_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, pinned = without_streams(monkeypatch), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor)[1])
    made = [{"x": torch.tensor([index]), "mask": None} for index in range(4)]
    host = (batches_module._Parcel(batch).pin_memory().batch for batch in made)
    first_three = list(batches_module.copy_ahead(host, torch.device("cuda", 0)))
    assert first_three == made[:3]  # one is always ahead
    assert [tensor.item() for tensor in pinned] == [0, 1, 2, 3]
    assert [tensor.item() for tensor in noted] == [0, 1, 2]


@needs_proc
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("ahead", [False, True], ids=["cpu", "ahead"])
def test_an_error_that_is_kept_does_not_keep_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Its traceback holds every frame that it came through. `ahead`: the way to a GPU, without its streams."""
    if ahead:
        without_streams(monkeypatch)
    gone = TokenBatches(path=tmp_path / "gone.npy", seed=1337, micro_batch=B, sequence=T)
    write_tokens(gone.path, numpy.arange(COUNT), 65536)
    stream = stream_batches(gone, torch.device("cuda", 0) if ahead else CPU, workers=2)
    gone.path.unlink()  # before the workers open it
    with pytest.raises(UserError, match=r"gone\.npy") as raised:
        next(stream)
    assert raised.value.__traceback__ is not None
    assert workers_running() == []


@needs_proc
def test_workers_are_forked_from_a_process_with_one_thread(batches: TokenBatches) -> None:
    first(batches, 1, workers=1)
    assert len(os.listdir(f"/proc/{fork_server()}/task")) == 1


QUIET = """
import sys, threading, torch
from pathlib import Path
from redline.data.batches import TokenBatches, stream_batches
if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # autograd and CUDA have threads too
    batches = TokenBatches(path=Path(sys.argv[1]), seed=1, micro_batch=4, sequence=16)
    stream = stream_batches(batches, torch.device("cpu"), workers=int(sys.argv[2]))
    for index in range(5):
        assert torch.equal(next(stream), batches[index])
    if sys.argv[3] == "close":
        stream.close()
    print("done")
"""


# `error` alone would not do: Python 3.12 drops the error that its warning about forking threads becomes.
@pytest.mark.parametrize(
    ("warnings", "workers", "ending"), [("error", 0, "leave"), ("error", 2, "close"), ("always", 2, "leave")]
)
def test_nothing_warns(batches: TokenBatches, tmp_path: Path, warnings: str, workers: int, ending: str) -> None:
    output = tmp_path / "output"
    done = run_script(QUIET, tmp_path, batches.path, workers, ending, output=output, warnings=warnings)
    assert (done.returncode, output.read_text()) == (0, "done\n")


def run_script(
    code: str, folder: Path, *arguments: object, output: Path, warnings: str = "error"
) -> subprocess.CompletedProcess[bytes]:
    """Both its streams go to a file and not to a pipe, which a process left behind would hold open."""
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", warnings, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open(output, "wb") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=120, env=environment)


KILLED = """
import multiprocessing, os, signal, sys, torch
from pathlib import Path
from redline.data.batches import TokenBatches, stream_batches
if __name__ == "__main__":
    batches = TokenBatches(path=Path(sys.argv[1]), seed=1, micro_batch=4, sequence=16)
    stream = stream_batches(batches, torch.device("cpu"), workers=2)
    next(stream)
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
def test_a_killed_trainer_leaves_no_workers(batches: TokenBatches, tmp_path: Path) -> None:
    done = run_script(KILLED, tmp_path, batches.path, output=tmp_path / "pids")
    assert done.returncode == -signal.SIGKILL
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    limit = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < limit, "the workers outlived their trainer"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    """Zombies do not count: who reaps an orphan, and when, is the machine's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_cuda_batches_hold_still_while_a_slow_step_reads_them(batches: TokenBatches, workers: int) -> None:
    """The host runs far ahead: batches are dropped, and others copied, before the steps that read them have begun."""
    wide = replace(batches, micro_batch=64, sequence=1024)
    stream = stream_batches(wide, torch.device("cuda"), workers)
    sums = []
    for batch in islice(stream, 40):
        torch.cuda._sleep(20_000_000)  # about 10 ms in which nothing is read
        sums.append((batch * torch.arange(1, 1025, device="cuda")).sum(dim=(1, 2)))
        del batch
    stream.close()
    weights = torch.arange(1, 1025)
    assert torch.equal(torch.stack(sums).cpu(), torch.stack([(wide[i] * weights).sum(dim=(1, 2)) for i in range(40)]))
