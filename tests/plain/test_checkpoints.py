"""Checkpoints as files: crashes at every system call, full disks, flipped and missing bytes, rotation, other runs.

The promise under test is one sentence: whatever happens, the newest checkpoint that was reported as written is found
whole, and nothing that is not whole is ever taken for one. No torch: the bytes of tensors are only bytes here.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core import checkpoint_writer, checkpoints
from redline.core.checkpoint_writer import remove_leftovers, rotate, write_checkpoint
from redline.core.checkpoints import (
    Checkpoint,
    UnusableError,
    check_same_run,
    differences,
    list_checkpoints,
    load_checkpoint,
    newest,
    read_checkpoint,
    state_text,
)
from redline.core.errors import UserError

IDENTITY = {"model": {"vocab": 257, "layers": 2}, "tokenizer": "bytes"}
SIZE = 600


def files_of(step: int, metric: float | None = None) -> dict[str, list[bytes]]:
    text = state_text(step=step, metric=metric, identity=IDENTITY, state={"lr": 0.1 + 0.2})
    return {
        "model.safetensors": [b"header", bytes([step % 251]) * SIZE],
        "optimizer.safetensors": [bytes([step % 241]) * 2 * SIZE],
        "state.json": [text.encode()],
    }


def put(folder: Path, step: int, metric: float | None = None) -> Path:
    return write_checkpoint(folder, step, files_of(step, metric))


def find(folder: Path) -> Checkpoint | None:
    return newest(folder, read_checkpoint)[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_whole(found: Checkpoint) -> None:
    """Not by the code under test: the very bytes."""
    for name, parts in files_of(found.step, found.metric).items():
        assert (found.path / name).read_bytes() == b"".join(parts)


# --- reading what was written -----------------------------------------------------------------------------------------


def test_what_was_written_is_read_back(tmp_path):
    path = put(tmp_path, 7, metric=3.25)
    found = read_checkpoint(path)
    assert path == tmp_path / "step-00000007"
    assert (found.path, found.step, found.metric, found.identity) == (path, 7, 3.25, IDENTITY)
    assert found.state == {"lr": 0.30000000000000004}
    assert [file.name for file in found.tensor_files] == ["model.safetensors", "optimizer.safetensors"]
    assert_whole(found)


def test_the_manifest_can_be_checked_by_hand(tmp_path):
    """With sha256sum, as docs/checkpoints.md says."""
    path = put(tmp_path, 7)
    for name, record in json.loads((path / "manifest.json").read_text())["files"].items():
        assert record["bytes"] == (path / name).stat().st_size
        done = subprocess.run(["sha256sum", path / name], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == record["sha256"]


def test_the_newest_is_the_one_of_the_latest_step_not_of_the_latest_name(tmp_path):
    for step in (99_999_999, 100_000_000, 5):  # the ninth digit sorts before the eighth as text
        put(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-100000000", "step-99999999", "step-00000005"]


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert newest(tmp_path / "nowhere", read_checkpoint) == (None, ())


def test_a_file_in_place_of_the_folder_is_the_users_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot read the checkpoints in"):
        newest(tmp_path / "file", read_checkpoint)


# --- damage -----------------------------------------------------------------------------------------------------------

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
every_file = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def pair(tmp_path) -> Path:
    """The newer of two checkpoints, to be damaged."""
    put(tmp_path, 1)
    return put(tmp_path, 2)


def assert_passed_over(damaged: Path, name: str, *why: str) -> None:
    found, notes = newest(damaged.parent, read_checkpoint)
    assert found is not None
    assert found.step == 1
    assert_whole(found)
    [note] = notes
    assert note.startswith(f"passed over step-00000002: {name}: ")
    assert any(text in note for text in why), note
    with pytest.raises(UserError, match="cannot use the checkpoint") as caught:
        load_checkpoint(damaged, read_checkpoint)
    assert caught.value.why.startswith(f"{name}: ")
    assert caught.value.fix == "use another: step-00000001"


@every_file
def test_any_flipped_byte_is_seen_and_the_previous_one_is_used(pair, name):
    whole = (pair / name).read_bytes()
    small = name.endswith(".json")
    for position in range(len(whole)) if small else (0, 5, 6, 300, len(whole) - 1):
        for mask in (1, 0x80):
            (pair / name).write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            assert_passed_over(pair, name, "bytes changed", "unreadable JSON", "format", "not a JSON object")
    (pair / name).write_bytes(whole)
    assert find(pair.parent).step == 2


@every_file
def test_a_file_cut_short_at_any_length_is_seen(pair, name):
    whole = (pair / name).read_bytes()
    for length in (0, 1, 8, len(whole) // 2, len(whole) - 1):
        (pair / name).write_bytes(whole[:length])
        assert_passed_over(pair, name, f"cut short, {length:,} bytes of {len(whole):,}", "unreadable JSON", "changed")


@every_file
def test_a_file_that_grew_is_seen(pair, name):
    with open(pair / name, "ab") as file:
        file.write(b"\n")
    assert_passed_over(pair, name, "too long", "bytes changed")


@every_file
def test_a_missing_file_is_seen(pair, name):
    (pair / name).unlink()
    assert_passed_over(pair, name, "missing")


def test_sizes_and_json_are_checked_without_reading_tensors(pair):
    """What `verify=False` is for: gigabytes are not read. A flip in a tensor is then not seen, and a cut is."""
    model = pair / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(bytes(len(whole)))
    assert read_checkpoint(pair, verify=False).step == 2
    model.write_bytes(whole[:-1])
    with pytest.raises(UnusableError, match="cut short"):
        read_checkpoint(pair, verify=False)
    model.write_bytes(whole)
    (pair / "state.json").write_bytes(bytes((pair / "state.json").stat().st_size))
    with pytest.raises(UnusableError, match="state.json: its checksum"):
        read_checkpoint(pair, verify=False)


def test_a_manifest_of_another_format_says_which(pair):
    manifest = pair / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert_passed_over(pair, "manifest.json", "format 2, and this version of redline reads 1")


@pytest.mark.parametrize("name", ["../step-00000001/state.json", "/etc/hostname"])
def test_a_manifest_cannot_point_outside_its_folder(pair, name):
    size = 100
    record = checkpoints.FileRecord(bytes=size, sha256="0" * 64)
    text = checkpoints.manifest_text({"state.json": record, name: record})
    (pair / "manifest.json").write_text(text)
    assert_passed_over(pair, "manifest.json", "files of its own folder only")


def test_when_all_are_damaged_there_is_none_and_a_note_for_each(tmp_path):
    for step in (1, 2, 3):
        (put(tmp_path, step) / "state.json").unlink()
    found, notes = newest(tmp_path, read_checkpoint)
    assert found is None
    assert [note.split(":")[0] for note in notes] == [f"passed over step-0000000{step}" for step in (3, 2, 1)]


# --- a crash at every system call -------------------------------------------------------------------------------------

# Adds step 3 to a folder that holds 1 and 2, and is killed at system call number argv[2], halfway through a write.
CRASHING = """
import os, signal, sys
from pathlib import Path
from redline.core.checkpoint_writer import rotate, write_checkpoint

calls = 0
def crashing(call):
    def run(*arguments, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            if call is write:
                write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return run

write = os.write
for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
    setattr(os, name, crashing(getattr(os, name)))
folder = Path(sys.argv[1])
path = write_checkpoint(folder, 3, {file.name: [file.read_bytes()] for file in Path(sys.argv[3]).iterdir()})
print("written", flush=True)
rotate(folder, path, keep_last=1, keep_best=0)
print("rotated", calls, flush=True)
"""


def test_a_crash_at_any_system_call_leaves_a_whole_checkpoint(tmp_path):
    """Until the calls run out. What is found afterwards is the old one or the new one, and the next start cleans up."""
    seen, source = set(), tmp_path / "source"
    source.mkdir()
    for name, parts in files_of(3).items():
        (source / name).write_bytes(b"".join(parts))
    for call in range(1, 200):
        folder = tmp_path / str(call)
        folder.mkdir()
        put(folder, 1)
        put(folder, 2)
        command = [sys.executable, "-c", CRASHING, str(folder), str(call), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found = find(folder)
        assert found is not None, call
        assert_whole(found)
        assert found.step in ((3,) if "written" in done.stdout else (2, 3)), call
        seen.add((done.returncode, found.step, *(Path(name).suffix for name in names(folder) if "." in name)))
        remove_leftovers(folder)
        assert find(folder).path == found.path
        assert not [name for name in names(folder) if "." in name]
        if "rotated" in done.stdout:
            break
    assert done.stdout.split() == ["written", "rotated", str(call - 1)], done.stderr
    assert names(folder) == ["step-00000003"]
    # Every stage was really met: before the draft, in it, after the new name, in the middle of a removal, the end.
    assert seen == {(-9, 2), (-9, 2, ".draft"), (-9, 3), (-9, 3, ".removing"), (0, 3)}


def test_everything_is_on_the_disk_before_it_is_called_a_checkpoint(tmp_path, monkeypatch):
    """What a power cut leaves is what was flushed. So: each file, then the draft's folder, the new name, its folder."""
    log: list[tuple[str, str]] = []

    def path_of(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)

    real_write, real_sync, real_rename = os.write, os.fsync, os.rename
    watched = {
        "write": lambda fd, data: (log.append(("write", path_of(fd))), real_write(fd, data))[1],
        "fsync": lambda fd: (log.append(("fsync", path_of(fd))), real_sync(fd))[1],
        "rename": lambda old, new: (log.append(("rename", Path(new).name)), real_rename(old, new))[1],
    }
    for name, call in watched.items():
        monkeypatch.setattr(checkpoint_writer.os, name, call)
    put(tmp_path, 1)
    draft = "step-00000001.draft"
    assert log == [
        ("write", f"{draft}/model.safetensors"),
        ("write", f"{draft}/model.safetensors"),
        ("fsync", f"{draft}/model.safetensors"),
        ("write", f"{draft}/optimizer.safetensors"),
        ("fsync", f"{draft}/optimizer.safetensors"),
        ("write", f"{draft}/state.json"),
        ("fsync", f"{draft}/state.json"),
        ("write", f"{draft}/manifest.json"),
        ("fsync", f"{draft}/manifest.json"),
        ("fsync", draft),
        ("rename", "step-00000001"),
        ("fsync", "."),
    ]


def test_a_system_that_takes_one_byte_at_a_time_gets_them_all(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(checkpoint_writer.os, "write", lambda fd, data: real(fd, data[:1]))
    put(tmp_path, 1)
    monkeypatch.undo()
    assert_whole(find(tmp_path))


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_after_any_number_of_bytes_costs_nothing_but_the_new_one(tmp_path, monkeypatch):
    put(tmp_path, 1)
    real, room = os.write, 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(checkpoint_writer.os, "write", write)
    total = sum(file.stat().st_size for file in (tmp_path / "step-00000001").iterdir())
    for space in [*range(0, total, 37), total - 1]:
        room = space
        with pytest.raises(OSError, match="No space left on device"):
            put(tmp_path, 2)
        assert names(tmp_path) == ["step-00000001"], space
    assert_whole(find(tmp_path))
    room = total
    put(tmp_path, 2)
    assert_whole(find(tmp_path))
    assert find(tmp_path).step == 2


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_at_the_end_counts_as_not_written(tmp_path, monkeypatch, call):
    put(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_writer.os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        put(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


# --- rotation ---------------------------------------------------------------------------------------------------------


def kept(folder: Path) -> list[int]:
    return sorted(read_checkpoint(path).step for path in list_checkpoints(folder))


def run_through(folder: Path, metrics: list[float | None], *, keep_last: int, keep_best: int) -> None:
    for step, metric in enumerate(metrics, 1):
        assert rotate(folder, put(folder, step, metric), keep_last=keep_last, keep_best=keep_best) == []


@pytest.mark.parametrize(
    ("metrics", "keep_last", "keep_best", "expected"),
    [
        ([None] * 5, 2, 1, [4, 5]),
        ([5.0, 2.0, 4.0, 3.0, 6.0], 2, 1, [2, 4, 5]),
        ([5.0, 2.0, 4.0, 3.0, 6.0], 1, 2, [2, 4, 5]),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 2, 1, [4, 5]),  # the best is among the last
        ([5.0, 2.0, 4.0], 1, 0, [3]),
        ([2.0, 2.0, 3.0], 1, 1, [2, 3]),  # of equals the later
        ([2.0, math.nan, math.inf, 3.0, 4.0], 1, 2, [1, 4, 5]),  # NaN is not best
        ([math.nan, math.nan, math.nan], 1, 1, [3]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, metrics, keep_last, keep_best, expected):
    run_through(tmp_path, metrics, keep_last=keep_last, keep_best=keep_best)
    assert kept(tmp_path) == expected
    assert len(names(tmp_path)) == len(expected)


@settings(max_examples=25, deadline=None)  # every example waits for the disk
@given(
    metrics=st.lists(st.none() | st.floats(allow_nan=True), min_size=1, max_size=6),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 3),
)
def test_the_last_and_the_best_ever_seen_are_always_there(tmp_path_factory, metrics, keep_last, keep_best):
    folder = tmp_path_factory.mktemp("run")
    run_through(folder, metrics, keep_last=keep_last, keep_best=keep_best)
    steps = range(1, len(metrics) + 1)
    judged = [step for step in steps if metrics[step - 1] is not None and not math.isnan(metrics[step - 1])]
    best = sorted(judged, key=lambda step: (metrics[step - 1], -step))[:keep_best]
    assert kept(folder) == sorted({*steps[-keep_last:], *best})
    shutil.rmtree(folder)


def test_damaged_ones_are_not_counted_among_those_kept(tmp_path):
    """With one to keep, a damaged later one must not push out the whole one."""
    put(tmp_path, 1)
    (put(tmp_path, 3) / "model.safetensors").unlink()
    written = put(tmp_path, 2)  # resumed from 1, since 3 is damaged
    rotate(tmp_path, written, keep_last=1, keep_best=0)
    assert find(tmp_path).step == 2
    rotate(tmp_path, put(tmp_path, 3), keep_last=1, keep_best=0)
    assert names(tmp_path) == ["step-00000003.2"]
    assert find(tmp_path).step == 3


def test_a_step_saved_again_replaces_the_first_only_when_it_is_whole(tmp_path):
    put(tmp_path, 5, metric=1.0)
    again = put(tmp_path, 5, metric=2.0)
    assert names(tmp_path) == ["step-00000005", "step-00000005.2"]
    assert find(tmp_path).metric == 2.0
    rotate(tmp_path, again, keep_last=2, keep_best=1)
    assert names(tmp_path) == ["step-00000005.2"]
    put(tmp_path, 5, metric=3.0)
    assert find(tmp_path).path.name == "step-00000005.3"
    (tmp_path / "step-00000005.3" / "state.json").unlink()
    assert find(tmp_path).metric == 2.0


def test_what_cannot_be_removed_is_told_and_the_rest_goes_on(tmp_path, monkeypatch):
    for step in (1, 2):
        put(tmp_path, step)
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        if Path(old).name == "step-00000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(old, new)

    written = put(tmp_path, 3)
    monkeypatch.setattr(checkpoint_writer.os, "rename", rename)
    notes = rotate(tmp_path, written, keep_last=1, keep_best=0)
    assert notes == ["step-00000001 could not be removed: Operation not permitted"]
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_drafts_and_half_deleted_folders_are_never_checkpoints_and_go_at_the_next_start(tmp_path):
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    os.rename(tmp_path / "step-00000003", tmp_path / "step-00000003.draft")  # whole, but never named one
    os.rename(tmp_path / "step-00000004", tmp_path / "step-00000004.2.removing")
    (tmp_path / "step-00000004.2.removing" / "model.safetensors").unlink()
    for name in ("notes.draft", "step-00000002.txt", "step-2", "best"):
        (tmp_path / name).mkdir()  # somebody's: not ours to remove, and no checkpoint
    assert newest(tmp_path, read_checkpoint)[1] == ()
    assert find(tmp_path).step == 2
    remove_leftovers(tmp_path)
    theirs = ["best", "notes.draft", "step-00000001", "step-00000002", "step-00000002.txt", "step-2"]
    assert names(tmp_path) == theirs


# --- readers beside a writer ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_vanishes_while_it_is_read_is_looked_for_again(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    reads = []

    def read(path: Path) -> Checkpoint:
        reads.append(path.name)
        if len(reads) == 1:  # the writer gets in between
            rotate(tmp_path, put(tmp_path, 3), keep_last=1, keep_best=0)
        return read_checkpoint(path)

    found, notes = newest(tmp_path, read)
    assert (found.step, notes) == (3, ())
    assert reads == ["step-00000002", "step-00000003"]


def test_a_folder_that_never_holds_still_ends_in_words(tmp_path):
    def read(path: Path) -> Checkpoint:
        put(tmp_path, checkpoints.order_of(path)[0] + 1)
        shutil.rmtree(path)
        return read_checkpoint(path)

    put(tmp_path, 1)
    with pytest.raises(UserError, match="replaced faster than they can be read"):
        newest(tmp_path, read)


# --- the same run? ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"vocab": 50257}, {"vocab": 257}, ["vocab: 50257 there, 257 here"]),
        ({"tokenizer": "gpt2"}, {"tokenizer": "bytes"}, ["tokenizer: 'gpt2' there, 'bytes' here"]),
        ({"model": {"layers": 2, "heads": 2}}, {"model": {"layers": 3, "heads": 2}}, ["model.layers: 2 there, 3 here"]),
        ({"files": ["a", "b"]}, {"files": ["a", "c"]}, ["files[1]: 'b' there, 'c' here"]),
        ({"files": ["a", "b"]}, {"files": ["a"]}, ["files: 2 items there, 1 items here"]),
        ({"a": 1}, {}, ["a: 1 there, not here"]),
        ({}, {"a": 1}, ["a: here, not there"]),
        ({"a": None}, {"a": 0}, ["a: null there, 0 here"]),
        ({"tied": True}, {"tied": 1}, ["tied: true there, 1 here"]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}, ["a: 1 there, 2 here", "b: 2 there, 1 here"]),
        ({"betas": [0.9, 0.95]}, {"betas": (0.9, 0.95)}, []),  # JSON knows no tuples
        ({"a": 1, "b": {"c": []}}, {"b": {"c": []}, "a": 1}, []),
    ],
)
def test_differences_in_words(saved, now, expected):
    assert differences(saved, now) == expected


def test_another_run_is_refused_with_the_difference(tmp_path):
    check_same_run(tmp_path, IDENTITY, IDENTITY)
    with pytest.raises(UserError, match="belongs to another run") as caught:
        check_same_run(tmp_path, IDENTITY, {**IDENTITY, "tokenizer": "gpt2"})
    assert caught.value.why == "tokenizer: 'bytes' there, 'gpt2' here"
    assert "start anew" in caught.value.fix


def test_many_differences_are_counted_not_listed(tmp_path):
    with pytest.raises(UserError) as caught:
        check_same_run(tmp_path, dict.fromkeys("abcdefghijkl", 0), dict.fromkeys("abcdefghijkl", 1))
    assert caught.value.why.endswith("h: 0 there, 1 here; and 4 more")
