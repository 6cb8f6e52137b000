"""The store of checkpoints: bits, threads, kill -9, full disks; and the optimizer's state and generators it carries.

What concerns the files alone (crashes at every system call, damage, rotation) is in tests/plain/test_checkpoints.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from redline.core import checkpoint_writer
from redline.core.errors import UserError
from redline.core.workload import Shape
from redline.engine import checkpoint
from redline.engine.checkpoint import CheckpointStore, latest_checkpoint, load_from
from redline.engine.snapshot import capture_rng, copy_into, load_optimizer_tensors, optimizer_tensors, restore_rng
from redline.engine.tensor_files import DTYPES, HostImage, layout_of
from redline.model.gpt import GPT, initialise
from redline.optim import OPTIMIZERS, build_optimizer

CPU = torch.device("cpu")
SHAPE = Shape(layers=1, heads=2, d_model=16, d_ff=64, vocab=61, sequence=8)
TRIALS = 40  # of kill -9
SECONDS = 30  # after which a thread that should have moved on has not


@pytest.fixture
def store(tmp_path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "checkpoints") as opened:
        yield opened


def save(store: CheckpointStore, step: int, tensors: dict[str, torch.Tensor] | None = None, **more: Any) -> Any:
    tensors = {"model.weight": torch.full((50,), float(step))} if tensors is None else tensors
    return store.save(step=step, tensors=tensors, **{"state": {"step": step}, "identity": {"vocab": 257}, **more})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    assert torch.equal(*bits)


# --- bit for bit ------------------------------------------------------------------------------------------------------


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every pattern: NaNs with their payload, infinities, denormals. Booleans have only two."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    return torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def test_every_type_and_form_comes_back_bit_for_bit(store):
    shapes = {"matrix": (3, 5), "number": (), "nothing": (0, 4), "one": (1,)}
    tensors = {f"model.{d}.{name}": random_bits(shape, d) for d in DTYPES for name, shape in shapes.items()}
    tensors["optimizer.turned"] = torch.randn(4, 6).t()
    tensors["optimizer.every-other"] = torch.arange(10)[::2]
    save(store, 3, tensors, state={"lr": 0.1 + 0.2, "none": None, "inf": float("inf")}, metric=1 / 3)
    loaded = store.latest()
    assert (loaded.step, loaded.metric, loaded.identity) == (3, 1 / 3, {"vocab": 257})
    assert loaded.state == {"lr": 0.30000000000000004, "none": None, "inf": float("inf")}
    found = loaded.tensors("cpu")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)


names_of_tensors = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
forms = st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple))


@settings(deadline=None)
@given(forms=st.dictionaries(names_of_tensors, forms, max_size=6))
def test_the_files_are_what_the_format_says(forms):
    """Judged by safetensors itself, which refuses holes, overlaps and lengths that do not fit."""
    tensors = {name: random_bits(shape, dtype) for name, (dtype, shape) in forms.items()}
    image = HostImage(layout_of(tensors), pinned=False)
    image.copy_from(tensors)
    header, data = image.parts()
    assert len(header) % 8 == 0
    assert all(place.start % place.dtype.itemsize == 0 for place in image.layout.places)
    found = safetensors.torch.load(bytes(header) + bytes(data))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)


def test_tied_weights_are_stored_once_and_found_under_both_names(store):
    model = GPT(SHAPE, tied=True)
    initialise(model, seed=3)
    save(store, 1, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    loaded = store.latest()
    file = loaded.path / "model.safetensors"
    parameters = sum(parameter.numel() for parameter in model.parameters())  # counts the tied one once
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == header_bytes + 4 * parameters
    assert_same_bits(loaded.tensors()["model.lm_head.weight"], model.wte.weight)
    assert_same_bits(loaded.tensors()["model.wte.weight"], model.wte.weight)
    other = GPT(SHAPE, tied=True)  # and others can read it: their own loader, names and all
    safetensors.torch.load_model(other, file)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_equal_numbers_at_other_addresses_are_not_tied(store):
    base = torch.arange(12.0)
    tensors = {"model.a": base[:6], "model.b": base[6:], "model.c": base[:6].view(2, 3), "model.d": base[:6].clone()}
    save(store, 1, tensors)
    found = store.latest().tensors()
    for name, tensor in tensors.items():
        assert_same_bits(found[name], tensor)


def test_a_name_without_its_kind_and_a_type_without_a_name_are_refused(store):
    with pytest.raises(ValueError, match="needs a name such as model.weight"):
        save(store, 1, {"weight": torch.ones(1)})
    with pytest.raises(ValueError, match="z is torch.complex64, which a checkpoint cannot hold"):
        save(store, 1, {"model.z": torch.ones(1, dtype=torch.complex64)})
    assert names(store.folder) == []


# --- saving while training --------------------------------------------------------------------------------------------


class Gate:
    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    """A disk that takes its time: nothing is flushed until the gate is open."""
    gate, real = Gate(), os.fsync

    def fsync(descriptor: int) -> None:
        gate.reached.set()
        assert gate.opened.wait(SECONDS)
        real(descriptor)

    monkeypatch.setattr(checkpoint_writer.os, "fsync", fsync)
    yield gate
    gate.opened.set()


def test_saving_returns_before_anything_is_on_the_disk_and_keeps_what_was_true_then(store, gate):
    weight, state = torch.ones(1000), {"position": [1]}
    save(store, 1, {"model.weight": weight}, state=state)
    weight.fill_(2)  # the training goes on
    state["position"].append(2)
    assert gate.reached.wait(SECONDS)
    assert names(store.folder) == ["step-00000001.draft"]
    assert store.last_saved is None
    assert latest_checkpoint(store.folder) == (None, ())
    gate.opened.set()
    assert store.wait() is None
    assert store.last_saved == 1
    loaded = store.latest()
    assert loaded.state == {"position": [1]}
    assert torch.equal(loaded.tensors()["model.weight"], torch.ones(1000))


def test_a_second_save_waits_for_the_first(store, gate):
    save(store, 1)
    second = threading.Thread(target=save, args=(store, 2))
    second.start()
    assert gate.reached.wait(SECONDS)
    second.join(0.2)
    assert second.is_alive()
    assert names(store.folder) == ["step-00000001.draft"]  # one at a time
    gate.opened.set()
    second.join(SECONDS)
    assert not second.is_alive()
    store.wait()
    assert names(store.folder) == ["step-00000001", "step-00000002"]
    assert [load_from(path).tensors()["model.weight"][0].item() for path in sorted(store.folder.glob("step-*"))] == [
        1,
        2,
    ]


def test_host_memory_is_taken_once(store):
    def addresses() -> set[int]:
        return {image.data.data_ptr() for image in store._images.values()}

    save(store, 1, {"model.a": torch.ones(9), "optimizer.a": torch.zeros(3)})
    first = addresses()
    save(store, 2, {"model.a": torch.zeros(9), "optimizer.a": torch.ones(3)})
    assert addresses() == first
    assert len(first) == 2
    save(store, 3, {"model.a": torch.full((4, 2), 3.0)})  # another form is another image
    assert torch.equal(store.latest().tensors()["model.a"], torch.full((4, 2), 3.0))


def test_tensors_are_read_when_asked_for_and_outlive_their_files(store):
    save(store, 1, {"model.weight": torch.arange(100_000)})
    loaded = store.latest()
    for file in loaded.path.iterdir():
        file.unlink()
    loaded.path.rmdir()
    assert torch.equal(loaded.tensors()["model.weight"], torch.arange(100_000))


def test_rotation_follows_each_save(tmp_path):
    with CheckpointStore(tmp_path, keep_last=1, keep_best=1) as store:
        for step, metric in enumerate((3.0, 1.0, 2.0, 4.0), 1):
            save(store, step, metric=metric)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_what_is_passed_over_is_in_the_notes(store):
    for step in (1, 2):
        save(store, step)
    store.wait()
    file = store.folder / "step-00000002" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert store.latest().step == 1
    assert store.notes == [
        "passed over step-00000002: model.safetensors: its checksum does not hold: bytes changed after it was written"
    ]
    assert store.latest(verify=False).step == 2
    with pytest.raises(UserError, match=r"cannot use the checkpoint .*step-00000002: model.safetensors"):
        load_from(file.parent)
    assert load_from(store.folder / "step-00000001").step == 1


def test_a_file_that_is_no_safetensors_is_named(store):
    """Its checksum holds: somebody else wrote this checkpoint."""
    save(store, 1)
    store.wait()
    parts = {
        "model.safetensors": [b"not a header"],
        "state.json": [(store.folder / "step-00000001/state.json").read_bytes()],
    }
    checkpoint_writer.write_checkpoint(store.folder, 2, parts)
    assert store.latest().step == 1
    assert store.notes[0].startswith("passed over step-00000002: model.safetensors: cannot be opened")


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch) -> Callable[[bool], None]:
    """full_disk(True): from now on nothing can be written."""
    real = os.write

    def fail(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda full: monkeypatch.setattr(checkpoint_writer.os, "write", fail if full else real)


def test_a_full_disk_stops_nobody_and_is_told(store, full_disk):
    save(store, 1)
    store.wait()
    full_disk(True)
    assert save(store, 2) is None  # not known yet
    failure = store.wait()
    assert failure is store.last_error
    assert failure.problem == "the checkpoint of step 2 was not written"
    assert failure.why == f"No space left on device ({store.folder})"
    assert "free some space" in failure.fix
    assert names(store.folder) == ["step-00000001"]
    assert store.last_saved == 1
    full_disk(False)
    assert save(store, 3) is failure  # told, and tried all the same
    assert store.wait() is None
    assert store.latest().step == 3


def test_closing_raises_when_the_last_checkpoint_is_missing(tmp_path, full_disk):
    store = CheckpointStore(tmp_path)
    full_disk(True)
    save(store, 1)
    with pytest.raises(UserError, match="the checkpoint of step 1 was not written"):
        store.close()
    full_disk(False)
    CheckpointStore(tmp_path).close()  # the folder is free again


def test_what_ended_the_training_is_not_hidden_by_a_failed_write(tmp_path, full_disk):
    full_disk(True)
    store = CheckpointStore(tmp_path)

    def train() -> None:
        with store:
            save(store, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert store.last_error is not None


def test_a_failure_that_nobody_thought_of_is_kept_too(store, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *_: [][0])
    save(store, 1)
    failure = store.wait()
    assert failure.why == "IndexError: list index out of range"
    monkeypatch.undo()
    save(store, 2)  # so that the fixture closes in peace


def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=1m")


@pytest.fixture
def read_only_disk(tmp_path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "ro")


def test_on_a_disk_that_is_really_full_the_older_ones_stay_whole(small_disk):
    """1 MiB holds three checkpoints of 300 kB; nothing is rotated away."""
    with CheckpointStore(small_disk, keep_last=9) as store:
        for step in range(1, 7):
            save(store, step, {"model.weight": torch.full((75_000,), float(step))})
            failure = store.wait()
            assert (failure is None) == (step <= 3)
        assert failure.why.startswith("No space left on device")
        assert names(small_disk) == ["step-00000001", "step-00000002", "step-00000003"]
        assert torch.equal(store.latest().tensors()["model.weight"], torch.full((75_000,), 3.0))
        checkpoint_writer.remove_checkpoint(small_disk / "step-00000001")
        save(store, 7, {"model.weight": torch.full((75_000,), 7.0)})
        assert store.wait() is None
        assert store.latest().step == 7


def assert_cannot_write(folder: Path, why: str) -> None:
    with pytest.raises(UserError, match="cannot write checkpoints to") as caught:
        CheckpointStore(folder)
    assert caught.value.why == why
    assert "--out" in caught.value.fix


def test_a_file_system_that_is_read_only_is_found_at_once(read_only_disk):
    assert_cannot_write(read_only_disk, "Read-only file system")
    assert_cannot_write(read_only_disk / "run" / "checkpoints", "Read-only file system")
    assert latest_checkpoint(read_only_disk) == (None, ())  # reading is allowed


def test_a_folder_that_may_not_be_written_is_found_at_once(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / ".lock").touch()  # an earlier run was allowed to
    tmp_path.chmod(0o500)
    assert_cannot_write(tmp_path, "Permission denied")


def test_a_file_in_place_of_the_folder_is_found_at_once(tmp_path):
    (tmp_path / "file").touch()
    assert_cannot_write(tmp_path / "file", "File exists")
    assert_cannot_write(tmp_path / "file" / "checkpoints", "Not a directory")


@pytest.mark.parametrize("counts", [{"keep_last": 0}, {"keep_best": -1}])
def test_a_run_keeps_at_least_its_last(tmp_path, counts):
    with pytest.raises(UserError, match="keep at least 1 last and 0 best"):
        CheckpointStore(tmp_path, **counts)


# --- two at once ------------------------------------------------------------------------------------------------------


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    with CheckpointStore(tmp_path):
        with pytest.raises(UserError, match="another run writes checkpoints to"):
            CheckpointStore(tmp_path)
        assert latest_checkpoint(tmp_path) == (None, ())  # readers may
    CheckpointStore(tmp_path).close()


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with CheckpointStore(tmp_path) as store:
        assert "has no file locks" in store.notes[0]
        save(store, 1)
    assert latest_checkpoint(tmp_path)[0].step == 1


def test_readers_beside_a_writer_always_see_a_whole_one(tmp_path):
    """With one kept, each save removes what a reader may be reading."""
    done, faults, seen = threading.Event(), [], []

    def read() -> None:
        last = 1
        while not done.is_set():
            found, notes = latest_checkpoint(tmp_path)
            values = set(found.tensors()["model.weight"].tolist())
            if notes or found.step < last or values != {float(found.step)}:
                faults.append((found.step, last, values, notes))
            last = found.step
            seen.append(last)

    def guarded() -> None:
        try:
            read()
        except Exception as error:  # a thread's error would be lost
            faults.append(error)

    with CheckpointStore(tmp_path, keep_last=1, keep_best=0) as store:
        save(store, 1)
        store.wait()
        readers = [threading.Thread(target=guarded) for _ in range(2)]
        for reader in readers:
            reader.start()
        for step in range(2, 60):
            save(store, step)
    done.set()
    for reader in readers:
        reader.join(SECONDS)
    assert faults == []
    assert len(set(seen)) > 5  # they did read while it wrote


# --- kill -9 ----------------------------------------------------------------------------------------------------------

# One process imports torch once and forks a run per line of input: "FOLDER REPORTS SHARE". The run goes on from the
# newest checkpoint and reports that, and then each one that is safely written. SIGKILL comes after so many reports, and
# a share of the time between the last two: at any moment of a save, however fast the disk.
NURSERY = """
import os, signal, sys, time
from pathlib import Path
import torch
from redline.engine.checkpoint import CheckpointStore

torch.set_num_threads(1)

def run(folder, report):
    store = CheckpointStore(folder, keep_last=2, keep_best=1)
    found = store.latest()
    assert not store.notes, store.notes
    step = found.step if found else 0
    os.write(report, b"%d\\n" % step)
    while True:
        step += 1
        tensors = {"model.a": torch.full((3000,), float(step)), "optimizer.a": torch.full((7000,), float(step))}
        store.save(step=step, tensors=tensors, state={"step": step}, identity={}, metric=float(step % 7))
        if store.last_saved:
            os.write(report, b"%d\\n" % store.last_saved)

for line in sys.stdin:
    folder, count, share = line.split()
    reading, report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run(Path(folder), report)
    os.close(report)
    with os.fdopen(reading) as lines:
        for _ in range(int(count) - 1):
            reported = lines.readline()
        before = time.monotonic()
        reported = lines.readline()
        time.sleep(float(share) * (time.monotonic() - before))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        print([reported, *lines][-1].strip(), flush=True)
"""


def test_a_run_killed_at_random_moments_loses_nothing_that_was_finished(tmp_path):
    draw = random.Random(20261115)
    nursery = subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    left: set[str] = set()
    newest = 0
    with nursery:
        for _ in range(TRIALS):
            nursery.stdin.write(f"{tmp_path} {draw.randint(2, 4)} {draw.uniform(0, 1.2)}\n")
            nursery.stdin.flush()
            reported = int(nursery.stdout.readline())
            assert reported >= newest  # it went on from what we found last time
            found, notes = latest_checkpoint(tmp_path)
            newest = found.step
            assert notes == ()
            assert newest >= reported
            assert found.state == {"step": newest}
            for name, length in (("model.a", 3000), ("optimizer.a", 7000)):
                assert torch.equal(found.tensors()[name], torch.full((length,), float(newest)))
            left |= {Path(name).suffix for name in names(tmp_path)}
        nursery.stdin.close()
        assert nursery.wait(SECONDS) == 0
    assert ".draft" in left  # some were killed in the middle of a write
    assert newest >= TRIALS  # each run got somewhere


# --- the optimizer's state --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied, with a vector, and a matrix inside a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def make(build: Callable[..., torch.optim.Optimizer], *, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    matrices = [parameter for parameter in net.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in net.parameters() if parameter.dim() < 2]
    return net, build([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def take_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors, values = optimizer_tensors(optimizer, net)
    numbers = {f"value {json.dumps(values, sort_keys=True)}": torch.zeros(0)}
    return {**{name: p.detach() for name, p in net.named_parameters()}, **tensors, **numbers}


def through_the_store(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    tensors, values = optimizer_tensors(optimizer, net)
    named = {f"model.{name}": p for name, p in net.named_parameters()}
    named |= {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
    with CheckpointStore(folder) as store:
        store.save(step=1, tensors=named, state={"optimizer": values}, identity={})
        loaded = store.latest()
    return loaded.tensors(), loaded.state["optimizer"]


BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw-loop": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "adamw-tensor-lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),  # without momentum: hardly any state
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),  # has state from the start
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9, centered=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2, t0=1),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_saved_at_three_and_gone_on_is_the_uninterrupted_run(name, tmp_path):
    straight, its = make(BUILDERS[name])
    take_steps(straight, its, range(6))

    first, of_first = make(BUILDERS[name])
    take_steps(first, of_first, range(3))
    tensors, values = through_the_store(tmp_path, first, of_first)

    second, of_second = make(BUILDERS[name], seed=1)  # other weights
    copy_into(dict(second.named_parameters()), tensors.of("model"), what="model")
    load_optimizer_tensors(of_second, second, tensors.of("optimizer"), values)
    same(everything(second, of_second), everything(first, of_first))
    take_steps(second, of_second, range(3, 6))
    same(everything(second, of_second), everything(straight, its))


# torchao's 8-bit AdamW would compile for a minute, where it is installed: see the packed tensors below.
@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.needs is None])
def test_every_optimizer_of_the_table_goes_on_exactly(name, tmp_path):
    def build(seed: int) -> tuple[GPT, torch.optim.Optimizer]:
        model = GPT(SHAPE).to(OPTIMIZERS[name].weights)
        initialise(model, seed)
        return model, build_optimizer(name, model, learning_rate=1e-3, weight_decay=0.1)

    straight, its = build(seed=1)
    take_steps(straight, its, range(4))
    first, of_first = build(seed=1)
    take_steps(first, of_first, range(2))
    tensors, values = through_the_store(tmp_path, first, of_first)
    second, of_second = build(seed=2)
    copy_into(dict(second.named_parameters()), tensors.of("model"), what="model")
    load_optimizer_tensors(of_second, second, tensors.of("optimizer"), values)
    take_steps(second, of_second, range(2, 4))
    same(everything(second, of_second), everything(straight, its))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert_same_bits(left[name], right[name])


def test_state_that_is_there_is_filled_in_place():
    """Fused kernels and compiled code know it by address."""
    net, optimizer = make(BUILDERS["adamw-fused"])
    take_steps(net, optimizer, range(3))
    tensors, values = optimizer_tensors(optimizer, net)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    take_steps(net, optimizer, range(3, 5))
    load_optimizer_tensors(optimizer, net, saved, values)
    now, _ = optimizer_tensors(optimizer, net)
    same(now, saved)
    assert {name: tensor.data_ptr() for name, tensor in now.items()} == addresses


def test_names_are_those_of_the_parameters_and_a_tied_one_counts_once():
    net, optimizer = make(BUILDERS["adamw-loop"])
    take_steps(net, optimizer, range(1))
    tensors, values = optimizer_tensors(optimizer, net)
    expected = {f"{p}.{key}" for p, _ in net.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == expected
    assert "head.weight.exp_avg" not in tensors
    assert [group["weight_decay"] for group in values["groups"]] == [0.1, 0.0]
    json.dumps(values)


@pytest.mark.parametrize("before", ["adamw-loop", "adamw-fused"])
@pytest.mark.parametrize("after", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_a_run_may_go_on_with_another_implementation(before, after):
    """The recipe may have changed; the numbers of the state are the same, and the new one keeps its own switches."""
    first, of_first = make(BUILDERS[before])
    take_steps(first, of_first, range(3))
    tensors, values = optimizer_tensors(of_first, first)
    second, of_second = make(BUILDERS[after])
    switches = [{key: group[key] for key in ("foreach", "fused")} for group in of_second.param_groups]
    load_optimizer_tensors(of_second, second, tensors, json.loads(json.dumps(values)))
    same(dict(optimizer_tensors(of_second, second)[0]), tensors)
    assert [{key: group[key] for key in ("foreach", "fused")} for group in of_second.param_groups] == switches
    assert of_second.param_groups[0]["betas"] == (0.9, 0.999)  # a tuple again


def test_options_of_groups_come_back_too():
    """Some optimizers count there; a schedule leaves its learning rate there."""
    first, of_first = make(BUILDERS["adamw-loop"])
    for number, group in enumerate(of_first.param_groups):
        group.update(lr=0.1 * (number + 1), updates=7)
    tensors, values = optimizer_tensors(of_first, first)
    second, of_second = make(BUILDERS["adamw-loop"])
    load_optimizer_tensors(of_second, second, tensors, json.loads(json.dumps(values)))
    assert [(group["lr"], group["updates"]) for group in of_second.param_groups] == [(0.1, 7), (0.2, 7)]


def test_an_option_that_is_a_tensor_is_filled_in_place():
    first, of_first = make(BUILDERS["adamw-tensor-lr"])
    of_first.param_groups[1]["lr"].fill_(0.5)
    tensors, values = optimizer_tensors(of_first, first)
    assert "lr" not in values["groups"][1]
    second, of_second = make(BUILDERS["adamw-tensor-lr"])
    rate = of_second.param_groups[1]["lr"]
    load_optimizer_tensors(of_second, second, tensors, values)
    assert of_second.param_groups[1]["lr"] is rate
    assert rate.item() == 0.5


def test_making_state_leaves_weights_and_gradients_alone():
    first, of_first = make(BUILDERS["sgd-momentum"])
    take_steps(first, of_first, range(2))
    tensors, values = optimizer_tensors(of_first, first)
    second, of_second = make(BUILDERS["sgd-momentum"], seed=1)
    gradient = torch.ones(4)
    second.layers[0].bias.grad = gradient
    weights = {name: parameter.detach().clone() for name, parameter in second.named_parameters()}
    load_optimizer_tensors(of_second, second, tensors, values)
    same({name: parameter.detach() for name, parameter in second.named_parameters()}, weights)
    assert second.layers[0].bias.grad is gradient
    assert second.layers[1].bias.grad is None


def test_a_parameter_that_never_moved_has_no_state_afterwards_either():
    first, of_first = make(BUILDERS["adamw-loop"])
    first.embedding.weight.grad = torch.ones(7, 4)
    of_first.step()
    tensors, values = optimizer_tensors(of_first, first)
    assert list(values["state"]) == ["embedding.weight"]
    second, of_second = make(BUILDERS["adamw-loop"])
    take_steps(second, of_second, range(2))  # here every one has
    load_optimizer_tensors(of_second, second, tensors, values)
    same(optimizer_tensors(of_second, second)[0], tensors)
    third, of_third = make(BUILDERS["adamw-loop"])  # and here none
    load_optimizer_tensors(of_third, third, tensors, values)
    same(optimizer_tensors(of_third, third)[0], tensors)


class Packed(torch.Tensor):
    """A tensor that wraps others, as torchao's 8-bit moments do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{call} on a packed tensor")


class PackedMomentum(torch.optim.Optimizer):
    """Counts in whole numbers, and keeps what it remembers in a packed tensor."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    codes = torch.zeros(parameter.shape, dtype=torch.uint8)
                    state.update(step=0, packed=Packed(codes, torch.zeros(1)))
                state["step"] += 1
                state["packed"].codes.add_(parameter.grad.abs().mul(9).to(torch.uint8))
                state["packed"].scale.add_(0.5)
                parameter.sub_(state["packed"].codes * state["packed"].scale, alpha=group["lr"] / state["step"])


def test_packed_state_and_counters_come_back_too(tmp_path):
    straight, its = make(PackedMomentum)
    take_steps(straight, its, range(6))
    first, of_first = make(PackedMomentum)
    take_steps(first, of_first, range(3))
    tensors, values = through_the_store(tmp_path, first, of_first)
    assert values["state"]["embedding.weight"] == {"step": 3}
    assert tensors["optimizer.embedding.weight.packed.codes"].dtype is torch.uint8
    second, of_second = make(PackedMomentum)
    copy_into(dict(second.named_parameters()), tensors.of("model"), what="model")
    load_optimizer_tensors(of_second, second, tensors.of("optimizer"), values)
    take_steps(second, of_second, range(3, 6))
    same(everything(second, of_second), everything(straight, its))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_another_shape_or_type_is_refused_with_the_difference_and_nothing_is_copied():
    targets = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": torch.zeros(1)}
    saved = {"a": torch.ones(2, 3), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.bfloat16)}
    with pytest.raises(UserError, match="the checkpoint's model tensors do not fit") as caught:
        copy_into(targets, saved, what="model")
    assert caught.value.why == "b: float32 [3] there, float32 [2] here; c: bfloat16 [1] there, float32 [1] here"
    assert not targets["a"].any()


def test_other_names_are_refused_with_the_difference():
    with pytest.raises(UserError) as caught:
        copy_into({"a": torch.zeros(1)}, {"b": torch.ones(1)}, what="model")
    assert caught.value.why == "a: here, not there; b: there, not here"


def test_the_state_of_another_optimizer_is_refused():
    first, of_first = make(BUILDERS["adamw-loop"])
    take_steps(first, of_first, range(1))
    tensors, values = optimizer_tensors(of_first, first)
    second, of_second = make(BUILDERS["sgd-momentum"])
    with pytest.raises(UserError, match="optimizer tensors do not fit") as caught:
        load_optimizer_tensors(of_second, second, tensors, values)
    assert "embedding.weight.momentum_buffer: here, not there" in caught.value.why
    assert "more" in caught.value.why


def test_the_state_of_another_model_is_refused():
    first, of_first = make(BUILDERS["adamw-loop"])
    take_steps(first, of_first, range(1))
    tensors, values = optimizer_tensors(of_first, first)
    linear = nn.Linear(4, 4)
    other = torch.optim.AdamW([{"params": [linear.weight]}, {"params": [linear.bias]}])
    with pytest.raises(UserError, match="parameters with state do not fit.*embedding.weight: there, not here"):
        load_optimizer_tensors(other, linear, tensors, values)
    with pytest.raises(UserError, match="groups of options do not fit.*1: there, not here"):
        load_optimizer_tensors(torch.optim.AdamW(first.parameters()), first, tensors, values)


def test_an_optimizer_of_another_model_is_a_mistake_in_the_code():
    _, optimizer = make(BUILDERS["adamw-loop"])
    with pytest.raises(ValueError, match="no parameters of the model"):
        optimizer_tensors(optimizer, nn.Linear(2, 2))


# --- random generators ------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    """Enough of each to pass the ends of their buffers."""
    return [
        [random.random() for _ in range(700)],
        random.gauss(0, 1),
        numpy.random.rand(700).tolist(),
        numpy.random.randn(),
        torch.rand(700).tolist(),
        torch.randn(5).tolist(),
    ]


def test_every_generator_goes_on_exactly_where_it_was():
    random.gauss(0, 1)  # each of these keeps a second number for the next call
    numpy.random.randn()
    torch.randn(1)
    values = json.loads(json.dumps(capture_rng(CPU)))
    expected = draws()
    assert draws() != expected
    restore_rng(values, CPU)
    assert draws() == expected
    assert values.keys() == {"python", "numpy", "torch"}


def test_numpy_is_not_loaded_for_its_generator(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    values = capture_rng(CPU)
    assert "numpy" not in values
    assert "numpy" not in sys.modules
    restore_rng(values, CPU)
    assert "numpy" not in sys.modules
