"""`redline data prepare`: the right tokens, the same bytes whoever made them and however often they were killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from rich.console import Console

from redline import cli
from redline.core.errors import UserError
from redline.core.values import to_json
from redline.data import prepare as module
from redline.data.pool import Progress
from redline.data.prepare import Preparation, is_val, part_size, prepare
from redline.data.shards import check_dataset, open_dataset
from redline.data.sources import Reading, document_key
from redline.data.text import read_corpus
from redline.data.tokenizer import tokenizer
from redline.report.data import PrepareView, standing_line

PART = 20_000
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(autouse=True)
def signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Real prose in many lengths, and the odd ones."""
    words = read_corpus("sample")[:120_000]
    cuts = [0, 10, 5000, 5001, 30_000, 30_500, 31_000, 90_000, len(words)]
    documents = [words[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    return [
        *documents,
        "a literal <|endoftext|> is text",
        "Gr\u00f6\u00dfe \u4f60\u597d",
        *(f"document {n}" for n in range(300)),
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    half = len(texts) // 2
    for name, some in (("a.jsonl", texts[:half]), ("b.jsonl", texts[half:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return folder


def order(corpus, out, **changes) -> Preparation:
    fields = {"sources": (str(corpus),), "out": Path(out), "val_fraction": 0.1, "part_bytes": PART, "processes": 1}
    return Preparation(**{**fields, **changes})


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tokens"))}


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(order(corpus, out))
    return out


def command(corpus, out, *words) -> list[str]:
    return [sys.executable, "-m", "redline", "data", "prepare", str(corpus), "--out", str(out), *words]


@pytest.fixture
def redline(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main(["data", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


# the tokens


def test_the_tokens_are_those_of_the_documents_in_order(prepared, texts):
    """Against the tokenizer, document by document, with nothing of ours between."""
    data, gpt2 = open_dataset(prepared), tokenizer("gpt2")
    expected: dict[bool, list[int]] = {True: [], False: []}
    for text in texts:
        side = is_val(document_key(text.encode()), 0.1)
        expected[side] += [*gpt2.encode(text).tolist(), gpt2.end_of_text]
    assert data.train.gather([0], data.train.tokens)[0].tolist() == expected[False]
    assert data.val.gather([0], data.val.tokens)[0].tolist() == expected[True]
    assert data.train.documents + data.val.documents == len(texts)
    assert 10 <= data.val.documents <= 60  # of 310, a tenth
    assert len(data.train.shards) > 3
    assert check_dataset(prepared)[1] == []


def test_the_index_tells_what_was_made_of_what(prepared, corpus, texts):
    index = json.loads((prepared / "index.json").read_text())
    assert index["sources"] == {
        "words": [str(corpus)],
        "files": 2,
        "bytes": sum(f.stat().st_size for f in corpus.iterdir()),
    }
    assert index["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert index["options"]["val_fraction"] == 0.1
    assert index["tokenizer"]["name"] == "gpt2"
    assert index["train"]["tokens"] == sum(entry["header"]["tokens"] for entry in index["train"]["shards"])


def test_a_text_of_many_parts_is_one_document(tmp_path):
    text = read_corpus("sample")[:100_000]
    (tmp_path / "a.txt").write_text(text)
    for name, encoder in (("gpt2", tokenizer("gpt2")), ("bytes", tokenizer("bytes"))):
        prepare(order(tmp_path / "a.txt", tmp_path / name, tokenizer=name, val_fraction=0))
        data = open_dataset(tmp_path / name)
        tokens = data.train.gather([0], data.train.tokens)[0]
        assert tokens.tolist() == [*encoder.encode(text).tolist(), encoder.end_of_text]
        documents = [shard.header.documents for shard in data.train.shards]
        assert documents == [0] * (len(documents) - 1) + [1]
        assert len(documents) >= 5
        assert data.val is None


def test_more_processes_make_the_same_bytes(corpus, prepared, tmp_path):
    prepare(order(corpus, tmp_path / "out", processes=3))
    assert bytes_of(tmp_path / "out") == bytes_of(prepared)
    assert open_dataset(tmp_path / "out").fingerprint == open_dataset(prepared).fingerprint


def test_a_document_is_on_one_side_whatever_its_place(tmp_path):
    for name, numbers in (("a", range(200)), ("b", reversed(range(200)))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in numbers))
        prepare(order(tmp_path / f"{name}.jsonl", tmp_path / name, tokenizer="bytes", val_fraction=0.3))
    sides = []
    for name in "ab":
        split = open_dataset(tmp_path / name).val
        text = tokenizer("bytes").decode(split.gather([0], split.tokens)[0])
        sides.append(set(text.split("<|endoftext|>")))
    assert sides[0] == sides[1]


def test_the_share_of_validation():
    keys = numpy.random.default_rng(0).integers(0, 2**64, size=20_000, dtype=numpy.uint64)
    share = sum(is_val(int(key), 0.05) for key in keys) / len(keys)
    assert share == pytest.approx(0.05, abs=0.006)
    assert not any(is_val(int(key), 0.0) for key in keys)


def test_the_size_of_a_part_is_of_the_files_alone():
    assert part_size(10) == 1 << 20
    assert part_size(1 << 30) == 1 << 22
    assert part_size(1 << 36) == 1 << 26
    assert part_size(1 << 44) == 1 << 34
    assert (1 << 44) // part_size(1 << 44) <= 1024


# interruptions


def slow_command(corpus, out, pause: float = 0.004) -> list[str]:
    """The command with small parts and a pause after each document, so that it can be caught in the middle."""
    code = f"""
import sys, time
from redline.data import prepare as module
if __name__ in ("__main__", "__mp_main__"):
    count = module.Pulse.count
    module.Pulse.count = lambda *a: (open({str(out)!r} + ".begun", "w").close(), time.sleep({pause}), count(*a))[2]
    module.part_size = lambda total: {PART}
if __name__ == "__main__":
    from redline.cli import main
    words = ["--out", {str(out)!r}, "--val-fraction", "0.1", "--processes", "2"]
    sys.exit(main(["data", "prepare", {str(corpus)!r}, *words]))
"""
    script = Path(out).parent / "slow.py"
    script.write_text(code)
    return [sys.executable, str(script)]


def wait_for(condition, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.02)


def finished_lines(out: Path) -> int:
    path = out / "parts.jsonl"
    return len([line for line in path.read_text().splitlines() if line]) if path.exists() else 0


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent and "spawn_main" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_in_the_middle_and_started_again(corpus, prepared, tmp_path, how):
    out = tmp_path / "out"
    process = subprocess.Popen(slow_command(corpus, out), stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: finished_lines(out) >= 2)
    workers = children_of(process.pid)
    assert workers
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the workers get it too
    else:
        process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    wait_for(lambda: not any(is_running(pid) for pid in workers))
    if how != signal.SIGKILL:
        assert "the same command goes on" in said
        assert "Traceback" not in said
        assert list(out.glob("*.draft")) == []
    assert not (out / "index.json").exists()
    with pytest.raises(UserError, match="is not finished"):
        open_dataset(out)

    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens") if f"{path.stem[-5:]}" in parts_done(out)}
    assert kept
    (out / "val-00001.tokens.draft").write_bytes(b"left behind")
    seen: list[Progress] = []
    prepare(order(corpus, out), seen.append)
    assert bytes_of(out) == bytes_of(prepared)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # finished parts are not made again
    assert seen[0].parts_done >= 2
    assert seen[0].bytes_kept > 0
    assert seen[-1].parts_done == seen[-1].parts
    assert list(out.glob("*.draft")) == []


def parts_done(out: Path) -> set[str]:
    return {f"{json.loads(line)['part']:05d}" for line in (out / "parts.jsonl").read_text().splitlines() if line}


@needs_proc
def test_workers_that_have_nothing_to_say_end_with_a_killed_parent_too(corpus, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(slow_command(corpus, out, pause=60))
    wait_for(lambda: (tmp_path / "out.begun").exists())
    workers = children_of(process.pid)
    process.kill()
    process.wait()
    assert workers
    wait_for(lambda: not any(is_running(pid) for pid in workers), seconds=20)


@needs_proc
def test_a_killed_worker_is_told_and_what_is_finished_stays(corpus, prepared, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(slow_command(corpus, out, pause=0.03), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: finished_lines(out) >= 1)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "SIGKILL" in said
    assert ".jsonl" in said
    prepare(order(corpus, out))
    assert bytes_of(out) == bytes_of(prepared)


def test_a_disk_that_is_full_is_told_and_the_same_command_goes_on(tmp_path):
    text = "".join(f"{n} and more words\n" for n in range(40_000))
    (tmp_path / "a.txt").write_text(text)
    words = command(tmp_path / "a.txt", tmp_path / "out", "--tokenizer", "bytes")

    def small_disk() -> None:  # no file above this size: writing fails with EFBIG as it does with ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=small_disk, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["prepare.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert open_dataset(tmp_path / "out").train.tokens == len(text) + 1


def test_a_second_time_nothing_is_left_to_do(corpus, prepared):
    before = {path: path.stat().st_mtime_ns for path in prepared.iterdir()}
    index = prepare(order(corpus, prepared))
    assert "nothing left to do" in index["notes"][-1]
    assert {path: path.stat().st_mtime_ns for path in prepared.iterdir()} == before


@pytest.mark.parametrize("harm", ["cut", "gone", "half a line"])
def test_what_was_harmed_since_is_made_again(corpus, prepared, tmp_path, harm):
    out = tmp_path / "out"
    prepare(order(corpus, out))
    if harm == "cut":
        os.truncate(out / "train-00001.tokens", 5000)
    elif harm == "gone":
        (out / "train-00001.tokens").unlink()
    else:
        (out / "index.json").unlink()
        lines = (out / "parts.jsonl").read_bytes()
        (out / "parts.jsonl").write_bytes(lines[: len(lines) - 30])
    prepare(order(corpus, out))
    assert bytes_of(out) == bytes_of(prepared)
    assert check_dataset(out)[1] == []


# what is refused


def test_another_order_in_the_same_folder_is_refused_with_the_difference(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text(f"{name} text")
    first = order(tmp_path / "in", tmp_path / "out", tokenizer="bytes", val_fraction=0)
    prepare(first)
    for changes, text in (
        ({"val_fraction": 0.2}, "its val fraction was 0 and is now 0.2"),
        ({"tokenizer": "gpt2"}, 'its tokenizer name was "bytes" and is now "gpt2"'),
        ({"reading": Reading(separator="x")}, "its separator was null and is now"),
        ({"sources": (str(tmp_path / "in" / "a.txt"),)}, "b.txt is gone"),
        ({"part_bytes": 3}, "its part bytes was"),
    ):
        with pytest.raises(UserError, match=text):
            prepare(Preparation(**{**vars(first), **changes}))
    (tmp_path / "in" / "b.txt").write_text("b text, changed")
    with pytest.raises(UserError, match=r"b\.txt has changed since \(it had 6 bytes and has 15\)") as caught:
        prepare(first)
    assert "--overwrite" in caught.value.fix
    prepare(Preparation(**{**vars(first), "overwrite": True}))
    assert open_dataset(tmp_path / "out").train.tokens == 7 + 16


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.doc").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"already in use: it holds thesis\.doc"):
            prepare(order(tmp_path / "a.txt", out, overwrite=overwrite))
    assert [path.name for path in out.iterdir()] == ["thesis.doc"]


def test_two_at_a_time_in_one_folder(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    with module.locked(tmp_path / "out"), pytest.raises(UserError, match="is being prepared already"):
        prepare(order(tmp_path / "a.txt", tmp_path / "out"))


def test_a_mistake_in_the_text_comes_out_of_a_worker_as_itself(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good " * 10_000 + b"\xff")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text: byte 50,000 is not UTF-8"):
        prepare(order(tmp_path / "a.txt", tmp_path / "out", processes=2))
    assert list((tmp_path / "out").glob("*.draft")) == []
    prepare(order(tmp_path / "a.txt", tmp_path / "out2", reading=Reading(errors="replace"), val_fraction=0))


def test_a_mended_text_may_follow_one_that_gave_no_tokens(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff")
    with pytest.raises(UserError, match="byte 5 is not UTF-8"):
        prepare(order(tmp_path / "a.txt", tmp_path / "out", tokenizer="bytes"))
    (tmp_path / "a.txt").write_bytes(b"good")
    prepare(order(tmp_path / "a.txt", tmp_path / "out", tokenizer="bytes", val_fraction=0))
    assert open_dataset(tmp_path / "out").train.tokens == 5
    (tmp_path / "out" / "parts.jsonl").unlink()  # tokens are tokens, whoever lists them
    (tmp_path / "a.txt").write_bytes(b"better")
    with pytest.raises(UserError, match="holds the tokens of something else"):
        prepare(order(tmp_path / "a.txt", tmp_path / "out", tokenizer="bytes", val_fraction=0))


def test_splits_that_are_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    notes = prepare(order(tmp_path / "a.txt", tmp_path / "out", val_fraction=1e-9))["notes"]
    assert "validation is empty: of 1 document none" in notes[-1]
    with pytest.raises(UserError, match="all of 1 document fell into validation"):
        prepare(order(tmp_path / "a.txt", tmp_path / "out2", val_fraction=1 - 1e-12))
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no document holds any text"):
        prepare(order(tmp_path / "b.jsonl", tmp_path / "out3"))


@pytest.mark.parametrize(
    "changes", [{"val_fraction": 1.0}, {"val_fraction": -0.1}, {"processes": 0}, {"part_bytes": 0}]
)
def test_numbers_that_make_no_sense(tmp_path, changes):
    with pytest.raises(UserError):
        order(tmp_path, tmp_path / "out", **changes)


# the command


def test_the_command_from_text_to_a_check(redline, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "a.txt").write_text("\n\n".join(f"chapter {n} of this book" for n in range(50)))
    words = ("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--val-fraction", "0.2")
    code, out, _ = redline(*words, "--split-documents", r"\n\n", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["train"]["documents"] + document["val"]["documents"] == 50
    assert document["took"]["bytes_done"] <= document["took"]["bytes_total"]
    code, out, _ = redline("info", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(out)["fingerprint"] == open_dataset(tmp_path / "out").fingerprint
    for action in ("info", "check"):
        code, out, _ = redline(action, tmp_path / "out")
        assert code == 0
        assert f"{document['train']['tokens']:,}" in out or "whole: 2 shards" in out
        assert all(len(line) <= 100 for line in out.splitlines())
    os.truncate(tmp_path / "out" / "train-00000.tokens", 4200)
    code, out, err = redline("check", tmp_path / "out", "--json")
    assert (code, err) == (1, "")
    report = json.loads(out)
    assert report["ok"] is False
    assert "train-00000.tokens is cut short" in report["problems"][0]["problem"]
    code, out, _ = redline("check", tmp_path / "out")
    assert code == 1
    assert "cut short" in " ".join(out.split())  # wrapped where the folder's name ends


@pytest.mark.parametrize(
    "words",
    [
        ("prepare", "missing.txt", "--out", "out"),
        ("prepare", "--out", "out"),
        ("prepare", "x"),
        ("info", "nowhere"),
        ("check", "nowhere"),
        ("prepare", "x", "--out", "o", "--tokenizer", "gpt5"),
        (),
    ],
)
def test_mistakes_are_three_lines(redline, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = redline(*words)
    assert (code, out) == (2, "")
    assert [line[:8] for line in err.splitlines()] == ["problem:", "why:    ", "fix:    "]
    assert os.listdir(tmp_path) == []


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked")
if __name__ in ("__main__", "__mp_main__"):  # the workers too
    sys.meta_path.insert(0, NoTorch())
if __name__ == "__main__":
    from redline.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def test_nothing_here_needs_torch(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "script.py").write_text(NO_TORCH)
    for words in (
        ("prepare", tmp_path / "a.txt", "--out", tmp_path / "out"),
        ("check", tmp_path / "out"),
        ("info", tmp_path / "out"),
    ):
        done = subprocess.run(
            [sys.executable, tmp_path / "script.py", "data", *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


# the progress


def test_a_line_of_progress():
    half = Progress(
        bytes_total=2**21,
        bytes_kept=2**19,
        bytes_done=2**19,
        text_bytes=3_000_000,
        documents=1204,
        tokens=70_000,
        seconds=2.0,
    )
    assert standing_line(to_json(half)) == (
        "1.00 MiB of 2.00 MiB, 1.50 MB/s, 1,204 documents, 70,000 tokens, 0:00:04 left"
    )
    nothing = Progress(bytes_total=0)
    assert standing_line(to_json(nothing)) == "0 B of \u2014, \u2014 MB/s, 0 documents, 0 tokens, \u2014 left"


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path):
    now = [0.0]
    path = tmp_path / "out"
    with open(path, "w") as file, PrepareView(Console(file=file, width=200), clock=lambda: now[0]) as view:
        for second in range(11):
            now[0] = float(second)
            view.show(to_json(Progress(bytes_total=1000, bytes_done=second * 100, seconds=float(second))))
    assert [line.split(" of ")[0] for line in path.read_text().splitlines()] == ["500 B", "1000 B"]


def test_progress_ends_where_it_should(corpus, tmp_path):
    seen: list[Progress] = []
    prepare(order(corpus, tmp_path / "out"), seen.append)
    last = seen[-1]
    assert last.bytes_done == last.bytes_total
    assert last.tokens == sum(
        split.tokens for split in (open_dataset(tmp_path / "out").train, open_dataset(tmp_path / "out").val)
    )
    assert last.parts_done == last.parts
    assert all(one.bytes_done <= other.bytes_done for one, other in zip(seen, seen[1:], strict=False))
