"""The command line in this process, with a machine and workers that are made up: words in, exit code and streams out.

A mistake leaves with exit code 2 and three lines on standard error, prints nothing else and writes nothing at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import redline
from redline import cli
from redline.commands.ladder import CHOICES
from redline.core import job as job_module
from redline.core.errors import UserError
from redline.core.job import RunDirectory
from redline.core.measurement import Failure, GradientCheck, Measurement
from redline.rungs import LADDER
from redline.search import ladder as ladder_module
from redline.search.answers import graph_key

VERSIONS = {"redline": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "cuda": None}
START = 5.6  # near ln 257 = 5.549
GRADIENTS = GradientCheck(
    loss=START,
    reference_loss=START,
    error=0.0,
    yardstick=0.0,
    tensor_errors={"wte": 0.0},
    tensor_yardsticks={"wte": 0.0},
)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty current folder, so that a default run directory would show."""
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    assert signal.getsignal(signal.SIGTERM) == before, "a command that is over leaves signals as they were"


class Workers:
    """Stands in for `launch`: every recipe runs, each rung a tenth faster."""

    def __init__(self):
        self.jobs = []
        self.stop_at = None
        self.failures, self.curves, self.caches = {}, {}, {}

    def launch(self, run, job, timeout_seconds, on_phase, *, compile_cache):
        if self.stop_at == len(self.jobs):
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.caches.setdefault(compile_cache, len(self.caches))
        on_phase("timing", done=None, total=10, seconds=4.0)
        last = job.recipe.rungs[-1] if job.recipe.rungs else "baseline"
        if last in self.failures and job.kind == "measure":
            return self.failures[last]
        curve = tuple(START - 0.1 * step for step in range(job.check_steps))
        curve = self.curves.get(last, curve) if job.kind == "measure" else curve
        steps = (0.9 ** len(job.recipe.rungs),) * (job.timed_steps or 8)
        pair = True if job.bit_exact_rung else None
        return Measurement(loss_curve=curve, step_seconds=steps, gradients=GRADIENTS, pair_bitwise=pair)


@pytest.fixture
def workers(monkeypatch):
    workers = Workers()
    monkeypatch.setattr(ladder_module, "launch", workers.launch)
    return workers


@pytest.fixture
def machine(monkeypatch, cpu):
    """What the probe says; change it to move to another machine. No process is started."""
    seen = {"hardware": cpu, "versions": VERSIONS}
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (seen["hardware"], seen["versions"]))
    monkeypatch.setattr(ladder_module, "launch", lambda *_, **__: pytest.fail("a worker was started"))
    return seen


@pytest.fixture
def redline_command(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def everything_in(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def mistake(redline_command, machine, workplace):
    """Calls redline with a mistake and returns what it said, after checking how it said it."""

    def call(*words):
        before = everything_in(workplace)
        code, out, err = redline_command(*words)
        assert code == 2, err
        assert out == ""
        lines = err.splitlines()
        assert [line[:9] for line in lines] == ["problem: ", "why:     ", "fix:     "], err
        assert all(len(line.strip()) > 9 for line in lines)
        assert everything_in(workplace) == before
        return {"problem": lines[0][9:], "why": lines[1][9:], "fix": lines[2][9:]}

    return call


# mistakes: words


def test_an_unknown_workload(mistake):
    said = mistake("ladder", "gpt2-medum")
    assert said["problem"] == "unknown workload 'gpt2-medum'"
    assert "did you mean 'gpt2-medium'?" in said["fix"]
    assert all(name in said["fix"] for name in ("tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"))
    mistake("ladder", "")


@pytest.mark.parametrize("option", ["--rungs", "--also", "--without"])
@pytest.mark.parametrize("words", ["flsh", "tf32,flsh", "tf32, flsh ,bf16", "flsh,"])
def test_an_unknown_rung(mistake, option, words):
    said = mistake("ladder", "tiny", option, words)
    assert said["problem"] == "unknown rung 'flsh'"
    assert said["fix"].startswith("did you mean 'flash'? known: ")
    assert all(rung.name in said["fix"] for rung in LADDER)


@pytest.mark.parametrize("option", ["--micro-batch", "--repeats", "--steps", "--check-steps"])
@pytest.mark.parametrize("value", ["0", "-1", "text", "1.5", "", "nan"])
def test_counts_are_whole_numbers_from_1(mistake, option, value):
    assert option in mistake("ladder", "tiny", option, value)["problem"]


@pytest.mark.parametrize("command", [("ladder",), ("tune", "--minutes", "1")], ids=lambda words: words[0])
def test_a_corpus_that_cannot_be_read_is_told_before_the_machine_is_asked(mistake, workplace, monkeypatch, command):
    monkeypatch.setattr("redline.search.words.probe_machine", lambda _: pytest.fail("the machine was asked"))
    said = mistake(*command, "--data", workplace / "none.txt")
    assert str(workplace / "none.txt") in said["problem"]


@pytest.mark.parametrize("size", [2**20 + 1, 10**9, 10**30])
def test_an_absurd_micro_batch_is_a_mistake_and_no_failed_row(mistake, workplace, monkeypatch, size):
    monkeypatch.setattr("redline.search.words.probe_machine", lambda _: pytest.fail("the machine was asked"))
    said = mistake("ladder", "tiny", "--micro-batch", size)
    assert said["problem"] == f"--micro-batch is {size:,}"
    assert "1,048,576" in said["why"]
    (workplace / "recipe.json").write_text(json.dumps({"rungs": [], "micro_batch": size}))
    said = mistake("ladder", "tiny", "--from", workplace / "recipe.json")
    assert said["problem"] == f"the recipe's micro batch is {size:,}"
    assert "--micro-batch" in said["fix"]


def test_a_micro_batch_may_be_as_large_as_the_text_and_no_larger(
    redline_command, mistake, machine, workplace, monkeypatch
):
    """300 bytes and their end are 301 tokens: windows of 256 + 1 start at 45 places."""
    (workplace / "short.txt").write_text("word " * 60)
    words = ("ladder", "tiny", "--rungs", "none", "--data", workplace / "short.txt", "--micro-batch")
    said = mistake(*words, "46")
    assert said["problem"].endswith("is too short for a micro batch of 46")
    assert "301 tokens hold 45 different sequences of 256" in said["why"]
    assert "--micro-batch to 45 or less" in said["fix"]
    assert "--data" in said["fix"]
    monkeypatch.setattr(ladder_module, "launch", Workers().launch)
    assert redline_command(*words, "45", "--out", workplace / "run")[0] == 0


@pytest.mark.parametrize("value", ["0", "-1", "-0.5", "nan", "text", ""])
def test_a_time_limit_is_a_positive_number(mistake, value):
    assert "timeout" in mistake("ladder", "tiny", f"--timeout={value}")["problem"]


def test_the_python_function_leaves_what_the_command_leaves(machine, workers, monkeypatch):
    document = redline.ladder("tiny", rungs=["no-sync"], repeats=2, out="mine")
    assert document["command"] == "redline.ladder(workload='tiny', rungs='no-sync', repeats=2, out=PosixPath('mine'))"
    assert {"run.json", "results.jsonl", "best.json", "report.html"} <= {path.name for path in Path("mine").iterdir()}
    write = RunDirectory.write

    def full(directory, name, text):
        if name == "report.html":
            raise OSError(28, "No space left on device")
        return write(directory, name, text)

    monkeypatch.setattr(RunDirectory, "write", full)  # a page that cannot be written costs nobody the document
    assert redline.ladder("tiny", rungs=["no-sync"], out="other")["rows"]


def test_the_python_function_checks_its_time_limit_too(machine, workplace):
    before = everything_in(workplace)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(UserError, match="timeout"):
            redline.ladder("tiny", timeout=seconds)
    assert everything_in(workplace) == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("climb",), "'climb'"),
        (("ladder", "tiny", "--faster"), "--faster"),
        (("ladder", "tiny", "gpt2"), "gpt2"),
        (("ladder", "--device", "tpu"), "'tpu'"),
        (("ladder", "--keep", "slower"), "'slower'"),
        (("ladder", "--out"), "--out"),
        (("report",), "DIR"),
        (("report", "a", "b", "c"), "c"),
        (("watch",), "DIR"),
        (("--json",), "COMMAND"),
    ],
    ids=str,
)
def test_words_that_are_no_command(mistake, words, named):
    said = mistake(*words)
    assert named in said["problem"]
    assert "--help" in said["fix"]


def test_debug_shows_the_traceback_before_the_three_lines(redline_command, machine):
    code, out, err = redline_command("ladder", "nope", "--debug")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert [line[:9] for line in err.splitlines()[-3:]] == ["problem: ", "why:     ", "fix:     "]


# mistakes: the text


def test_a_corpus_that_cannot_be_read(mistake, workplace):
    assert "No such file" in mistake("ladder", "tiny", "--data", workplace / "absent.txt")["why"]
    assert "directory" in mistake("ladder", "tiny", "--data", workplace)["why"]
    assert "'sample'" in mistake("ladder", "tiny", "--data", "")["fix"]
    assert "regular file" in mistake("ladder", "tiny", "--data", "/dev/zero")["why"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04\x00\x00", "is not UTF-8 text"),
        (b"caf\xe9 au lait " * 100, "is not UTF-8 text"),
        (b"too short", "is too short"),
        (b"x" * 256, "is too short"),  # 256 bytes and the end of text: one token short of two windows
    ],
    ids=["empty", "binary", "latin1", "short", "one short"],
)
def test_a_corpus_that_is_no_text_to_train_on(mistake, workplace, content, problem):
    corpus = workplace / "corpus.txt"
    corpus.write_bytes(content)
    assert problem in mistake("ladder", "tiny", "--data", corpus)["problem"]


# mistakes: the recipe


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json", "is not a recipe"),
        ("[]", "is not a recipe"),
        ('{"rungs": ["tf32"]}', "is not a recipe"),
        ('{"rungs": "tf32", "micro_batch": 4}', "is not a recipe"),
        ('{"rung": ["tf32"], "micro_batch": 4}', "is not a recipe"),
        ('{"rungs": ["tf32"], "micro_batch": 0}', "micro batch is 0"),
        ('{"rungs": ["tf32", "flsh"], "micro_batch": 4}', "unknown rung 'flsh'"),
        ('{"rungs": ["bf16", "fp16"], "micro_batch": 4}', "bf16"),
        ('{"rungs": ["cudnn-attention", "bf16", "flash"], "micro_batch": 4}', "cudnn-attention"),
    ],
)
def test_a_recipe_that_is_none(mistake, workplace, text, named):
    recipe = workplace / "recipe.json"
    recipe.write_text(text)
    assert named in mistake("ladder", "tiny", "--from", recipe)["problem"]


def test_a_recipe_that_is_not_there(mistake, workplace):
    assert "No such file" in mistake("ladder", "tiny", "--from", workplace / "absent.json")["why"]
    assert "directory" in mistake("ladder", "tiny", "--from", workplace)["why"]


# mistakes: where to write


def test_a_place_that_is_taken(mistake, workplace):
    (workplace / "full").mkdir()
    (workplace / "full" / "thesis.txt").write_text("all of it")
    said = mistake("ladder", "tiny", "--out", workplace / "full")
    assert said["problem"].endswith("is already in use")
    assert "--resume" not in said["fix"]  # a thesis cannot be gone on with
    mistake("ladder", "tiny", "--out", workplace / "full" / "thesis.txt")


@pytest.mark.parametrize("out", ["file/run", "/proc/run", "new/" + "x" * 300])
def test_a_place_that_cannot_be(mistake, workplace, out):
    """Not even the folders above it, when the last of them cannot be made."""
    (workplace / "file").touch()
    said = mistake("ladder", "tiny", "--out", workplace / out)
    assert said["problem"].startswith("cannot write the run directory")


@contextlib.contextmanager
def unprivileged():
    """Permissions do not stop root, so tests run by root put their privileges down for a moment."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_place_without_permission(redline_command, machine):
    folder = Path(tempfile.mkdtemp())  # not tmp_path: only its owner may pass its parents
    folder.chmod(0o555)
    try:
        with unprivileged():
            code, out, err = redline_command("ladder", "tiny", "--out", folder / "deep" / "run")
        assert (code, out) == (2, "")
        assert err.splitlines()[1] == "why:     Permission denied"
        assert "--out" in err.splitlines()[2]
    finally:
        folder.chmod(0o700)
        folder.rmdir()  # fails if anything was left in it


def test_a_disk_that_is_full_leaves_nothing(mistake, workplace, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(numpy, "save", full)
        assert mistake("ladder", "tiny", "--out", workplace / "run")["why"] == "No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write", full)
        assert mistake("ladder", "tiny", "--out", workplace / "run")["why"] == "No space left on device"


def test_a_name_with_a_line_end_stays_on_its_line(mistake, workplace):
    (workplace / "two\nlines").touch()
    mistake("ladder", "tiny", "--out", workplace / "two\nlines")
    mistake("ladder", "tiny", "--from", workplace / "no\nrecipe")
    mistake("ladder", "two\nlines")


# mistakes: a run that is none


@pytest.mark.parametrize("words", [("ladder", "--resume"), ("report",)], ids=["resume", "report"])
class TestNoRun:
    def test_absent_or_something_else(self, mistake, workplace, words):
        for path in (workplace, workplace / "absent"):
            said = mistake(*words, path)
            assert said["problem"] == f"{path} is not a run directory"
        (workplace / "file").touch()
        kind = "no results document" if words == ("report",) else "not a run directory"
        assert mistake(*words, workplace / "file")["problem"] == f"{workplace / 'file'} is {kind}"

    @pytest.mark.parametrize("text", [b"", b'{"half', b"\xff\xfe\x00", b"PK\x03\x04", b"[]", b"null", b"3", b'"run"'])
    def test_damaged(self, mistake, workplace, words, text):
        (workplace / "run.json").write_bytes(text)
        assert mistake(*words, workplace)["problem"].endswith("run.json is damaged")

    @pytest.mark.parametrize("text", ["{}", '{"workload": {}}', '{"workload": null}'])
    def test_json_of_something_else(self, mistake, workplace, words, text):
        (workplace / "run.json").write_text(text)
        assert "not a ladder this version can read" in mistake(*words, workplace)["problem"]

    @pytest.mark.parametrize("key", ["workload", "hardware", "settings", "versions", "command", "date"])
    def test_a_part_is_missing(self, mistake, finished_run, words, key):
        rewrite(finished_run, lambda run: run.pop(key))
        assert "not a ladder this version can read" in mistake(*words, finished_run)["problem"]

    @pytest.mark.parametrize("key", ["workload", "hardware", "settings"])
    def test_a_part_of_another_version(self, mistake, finished_run, words, key):
        rewrite(finished_run, lambda run: run[key].update(colour="red"))
        said = mistake(*words, finished_run)
        assert "has no field colour" in said["why"]


def rewrite(run: Path, change) -> None:
    document = json.loads((run / "run.json").read_text())
    change(document)
    (run / "run.json").write_text(json.dumps(document))


@pytest.fixture
def finished_run(redline_command, machine, workplace, monkeypatch) -> Path:
    """A finished ladder of two rows."""
    with monkeypatch.context() as patch:
        patch.setattr(ladder_module, "launch", Workers().launch)
        assert redline_command("ladder", "tiny", "--rungs", "compile", "--out", workplace / "run", "--json")[0] == 0
    return workplace / "run"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("tiny",), "workload"),
        (("--rungs", "tf32"), "--rungs"),
        (("--rungs", ""), "--rungs"),
        (("--without", "tf32"), "--without"),
        (("--from", "best.json"), "--from"),
        (("--micro-batch", "2"), "--micro-batch"),
        (("--micro-batch", "0"), "--micro-batch"),
        (("--data", "sample"), "--data"),
        (("--device", "cpu"), "--device"),
        (("--keep", "all"), "--keep"),
        (("--repeats", "2"), "--repeats"),
        (("--aa",), "--aa"),
        (("--steps", "3"), "--steps"),
        (("--check-steps", "3"), "--check-steps"),
        (("--out", "elsewhere"), "--out"),
        (("--aa", "--steps", "3"), "--aa, --steps"),
    ],
    ids=str,
)
def test_resuming_takes_no_other_choice(mistake, finished_run, words, named):
    """Named as it was typed; an option that would be passed over in silence is a mistake too."""
    said = mistake("ladder", "--resume", finished_run, *words)
    assert said["problem"] == f"--resume does not go with {named}"
    assert f"--resume {finished_run}" in said["fix"]


@pytest.mark.parametrize(
    ("words", "other", "own"),
    [
        (("--gpus", "4"), None, None),
        (("--gpus", "4", "--tensor", "2", "--replicas", "1"), None, None),
        (("--gpus", "2"), "--gpus 2", "--gpus 4"),
        (("--gpus", "4", "--tensor", "4"), "--tensor 4", "--tensor 2"),
        (("--gpus", "2", "--replicas", "2"), "--gpus 2, --replicas 2", "--gpus 4, --replicas 1"),
        (("--aa", "--gpus", "2"), "--aa", None),
    ],
    ids=["same", "all-the-same", "fewer", "tensor", "two-others", "another-choice-first"],
)
def test_resuming_takes_the_ranks_that_the_run_has_and_no_others(
    redline_command, mistake, finished_run, monkeypatch, words, other, own
):
    layout = {"ranks": 4, "tensor": 2, "pipeline": 1, "replicas": 1}
    rewrite(finished_run, lambda run: run["hardware"].update(ranks=4, layout=layout))
    if other is None:
        monkeypatch.setattr(ladder_module, "launch", Workers().launch)  # rows of one process are not those of four
        assert redline_command("ladder", "--resume", finished_run, *words, "--json")[0] == 0
        return
    said = mistake("ladder", "--resume", finished_run, *words)
    assert said["problem"] == f"--resume does not go with {other}"
    assert own is None or said["why"].startswith(f"{finished_run} has {own}, and rows of other ranks")
    assert f"redline ladder --resume {finished_run}" in said["fix"]


def test_resuming_one_process(redline_command, mistake, finished_run):
    assert redline_command("ladder", "--resume", finished_run, "--gpus", "1", "--json")[0] == 0
    assert "has --gpus 1, and" in mistake("ladder", "--resume", finished_run, "--gpus", "2")["why"]


def test_resuming_with_a_bad_time_limit(mistake, finished_run):
    assert "timeout" in mistake("ladder", "--resume", finished_run, "--timeout", "0")["problem"]


def test_resuming_on_other_versions(mistake, machine, finished_run):
    machine["versions"] = {**VERSIONS, "torch": "2.14.0"}
    said = mistake("ladder", "--resume", finished_run)
    assert said["problem"] == f"{finished_run} was measured elsewhere"
    assert said["why"] == "torch was 2.13.0, is 2.14.0"


def test_resuming_on_another_machine(mistake, machine, h200, finished_run):
    machine["hardware"] = h200
    assert mistake("ladder", "--resume", finished_run)["why"] == "device was a CPU, is NVIDIA H200"


def test_a_machine_that_cannot_be_asked(mistake, workplace, monkeypatch):
    def no_device(device):
        raise UserError(
            f"no {device} device on this machine", "torch sees no CUDA device", "--device cpu takes the CPU"
        )

    monkeypatch.setattr("redline.search.words.probe_machine", no_device)
    assert mistake("ladder", "tiny", "--device", "cuda")["problem"] == "no cuda device on this machine"


# help


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("ladder", "--help"), ("report", "--help")], ids=str)
def test_help_is_on_standard_output_and_no_mistake(capsys, words):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    shown = capsys.readouterr()
    assert left.value.code == 0
    assert "usage: redline" in shown.out
    assert shown.err == ""


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"redline {redline.__version__}\n"


def test_help_names_every_option_it_takes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ladder", "--help"])
    shown = capsys.readouterr().out
    for name in set(CHOICES) - {"workload", "start"}:
        assert f"--{name.replace('_', '-')}" in shown


def test_the_rungs_are_listed_without_a_machine(redline_command, workplace, monkeypatch):
    monkeypatch.setattr("redline.search.words.probe_machine", lambda _: pytest.fail("the machine was asked"))
    code, out, err = redline_command("ladder", "--list-rungs")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [rung.name for rung in LADDER]
    code, out, err = redline_command("ladder", "--list-rungs", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)[1] == {"rung": "tf32", "class": "rounding-only", "title": "TF32 tensor-core matmuls"}
    assert everything_in(workplace / "here") == {}


# a ladder that runs


def test_json_is_one_document_and_nothing_else(redline_command, machine, workers, workplace):
    code, out, err = redline_command("ladder", "--json", "--out", workplace / "run", "--check-steps", "3")
    assert code == 0
    document = json.loads(out)
    assert out.count("\n") == 1
    assert [row["rung"] for row in document["rows"]] == [rung.name for rung in LADDER if not rung.when_named]
    assert document["versions"] == VERSIONS
    assert document["finished"] is True
    assert "workload tiny: the default on a CPU machine (a CPU)" in err
    assert {job.check_steps for job in workers.jobs} == {3}
    run = workplace / "run"
    assert {"run.json", "results.jsonl", "report.html", "best.json", "tokens.npy"} == set(os.listdir(run))
    best = json.loads((run / "best.json").read_text())
    assert best == {"rungs": [row for row in document["rows"] if row["kept"]][-1]["recipe"], "micro_batch": 4}
    assert len((run / "results.jsonl").read_text().splitlines()) == len(workers.jobs)


def test_without_json_people_get_a_table_and_two_paths(redline_command, machine, workers, workplace):
    code, out, err = redline_command("ladder", "tiny", "--rungs", "compile", "--out", workplace / "run")
    assert code == 0
    assert "baseline" in out
    assert "compile" in out
    for name in ("report.html", "best.json"):
        assert str(workplace / "run" / name) in out
        assert (workplace / "run" / name).exists()


def test_the_default_run_directory_is_under_runs(redline_command, machine, workers, workplace):
    assert redline_command("ladder", "--rungs", "none", "--json")[0] == 0
    (run,) = (workplace / "here" / "runs").iterdir()
    assert run.name.startswith("ladder-tiny-")


@pytest.mark.parametrize(
    ("words", "climbed"),
    [
        (("--rungs", "none"), []),
        (("--rungs", "padded-vocab, compile"), ["compile", "padded-vocab"]),
        (("--rungs", "baseline,compile"), ["compile"]),
        (("--rungs", "compile,padded-vocab", "--without", "compile"), ["padded-vocab"]),
        (("--rungs", "compile", "--aa"), ["compile", "a/a"]),
        (("--rungs", "compile", "--also", "chunked-loss,tf32"), ["tf32", "compile", "chunked-loss"]),
    ],
    ids=str,
)
def test_rungs_are_climbed_in_the_ladders_order(redline_command, machine, workers, words, climbed):
    rows = json.loads(redline_command("ladder", "tiny", *words, "--json")[1])["rows"]
    assert [row["rung"] for row in rows] == ["baseline", *climbed]


def test_also_and_without_do_not_go_together(redline_command, machine):
    code, _, err = redline_command("ladder", "tiny", "--also", "chunked-loss,lion", "--without", "tf32,lion")
    assert (code, "problem: lion in --also and in --without" in err) == (2, True)


def test_also_adds_to_the_usual_ones(redline_command, machine, workers):
    rows = json.loads(redline_command("ladder", "tiny", "--also", "chunked-loss", "--json")[1])["rows"]
    assert [row["rung"] for row in rows] == [
        rung.name for rung in LADDER if not rung.when_named or rung.name == "chunked-loss"
    ]


def test_a_recipe_is_climbed_on_and_its_own_rungs_left_out(redline_command, machine, workers, workplace):
    (workplace / "recipe.json").write_text('{"rungs": ["compile", "bf16"], "micro_batch": 3}')
    words = ("ladder", "tiny", "--from", workplace / "recipe.json", "--rungs", "compile,padded-vocab", "--json")
    rows = json.loads(redline_command(*words)[1])["rows"]
    assert [(row["rung"], row["micro_batch"]) for row in rows] == [("recipe", 3), ("padded-vocab", 3)]
    rows = json.loads(redline_command(*words, "--micro-batch", "5", "--out", "run")[1])["rows"]
    assert {row["micro_batch"] for row in rows} == {5}


def test_a_row_that_is_different_fails_the_command(redline_command, machine, workers, workplace):
    workers.curves["compile"] = (9.0,) * 20
    code, out, _ = redline_command("ladder", "tiny", "--rungs", "compile", "--json")
    assert code == 1
    assert json.loads(out)["rows"][1]["equivalence"]["verdict"] == "different"


def test_a_loss_that_is_no_number_is_still_json(redline_command, machine, workers):
    workers.curves["compile"] = (*(5.6,) * 19, float("nan"))
    code, out, _ = redline_command("ladder", "tiny", "--rungs", "compile", "--json")
    assert code == 1

    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    assert json.loads(out, parse_constant=refuse)["rows"][1]["loss_last"] is None


def test_a_failed_row_does_not_fail_the_command(redline_command, machine, workers):
    workers.failures["compile"] = Failure(kind="timeout", reason="stopped after 600 s while compiling")
    code, out, _ = redline_command("ladder", "tiny", "--rungs", "compile", "--json")
    assert code == 0
    assert json.loads(out)["rows"][1]["status"] == "failed"


def test_when_nothing_could_be_measured_the_command_fails_and_names_no_recipe(
    redline_command, machine, workers, workplace
):
    workers.failures["baseline"] = Failure(kind="oom", reason="out of memory")
    code, out, _ = redline_command("ladder", "tiny", "--rungs", "none", "--out", workplace / "run")
    assert code == 1
    assert not (workplace / "run" / "best.json").exists()
    assert "best.json" not in out


# interrupted, resumed, drawn again


def test_an_interrupt_keeps_every_finished_row_and_resuming_repeats_none(redline_command, machine, workers, workplace):
    words = ("ladder", "tiny", "--rungs", "compile,padded-vocab,fused-adamw", "--repeats", "2", "--json")
    whole = json.loads(redline_command(*words, "--out", workplace / "whole")[1])
    questions = [job.key for job in workers.jobs]

    workers.jobs.clear()
    run = workplace / "run"
    for stop in range(len(questions)):
        workers.stop_at = len(workers.jobs) if stop == 0 else len(workers.jobs) + 1
        again = ("ladder", "--resume", run, "--json")
        code, out, err = redline_command(*((*words, "--out", run) if stop == 0 else again))
        document = json.loads(out)
        assert code == 130
        assert document["finished"] is False
        assert f"redline ladder --resume {run}" in err
        assert [job.key for job in workers.jobs] == questions[:stop]
        code, out, _ = redline_command("report", run, "--json")
        assert (code, json.loads(out)) == (0, document)
    workers.stop_at = None
    code, out, _ = redline_command("ladder", "--resume", run, "--json")
    assert code == 0
    assert [job.key for job in workers.jobs] == questions
    assert {**json.loads(out), "date": None, "command": None} == {**whole, "date": None, "command": None}


def test_resuming_a_finished_run_starts_nothing(redline_command, machine, finished_run):
    first = json.loads(redline_command("report", finished_run, "--json")[1])
    code, out, _ = redline_command("ladder", "--resume", finished_run, "--json")
    assert (code, json.loads(out)) == (0, first)


def test_a_line_cut_short_costs_that_row_alone(redline_command, machine, finished_run, monkeypatch):
    """The machine died while the last result was written."""
    results = finished_run / "results.jsonl"
    first = json.loads(redline_command("report", finished_run, "--json")[1])
    os.truncate(results, results.stat().st_size - 20)
    workers = Workers()
    monkeypatch.setattr(ladder_module, "launch", workers.launch)
    code, out, _ = redline_command("ladder", "--resume", finished_run, "--json")
    assert (code, json.loads(out)) == (0, first)
    assert [job.recipe.rungs for job in workers.jobs] == [("compile",)]


def test_a_run_is_drawn_again_anywhere(redline_command, finished_run, workplace, monkeypatch):
    """From a copy, without the machine, with the page lost."""
    monkeypatch.setattr("redline.search.words.probe_machine", lambda _: pytest.fail("the machine was asked"))
    first = redline_command("report", finished_run, "--json")[1]
    copy = workplace / "copy"
    shutil.copytree(finished_run, copy)
    (copy / "report.html").unlink()
    code, out, err = redline_command("report", copy, "--json")
    assert (code, out, err) == (0, first, "")
    assert (copy / "report.html").read_text().lstrip().lower().startswith("<!doctype html")


def read_only(path: Path, monkeypatch) -> None:
    """As on a mounted snapshot; permissions would not stop root."""

    def refuse(self, name, text):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path / name))

    monkeypatch.setattr(RunDirectory, "write", refuse)


def test_a_report_of_a_read_only_copy_shows_the_table_and_warns(redline_command, finished_run, monkeypatch):
    shown = redline_command("report", finished_run)[1]
    document = redline_command("report", finished_run, "--json")[1]
    read_only(finished_run, monkeypatch)
    code, out, err = redline_command("report", finished_run)
    assert code == 0
    assert out == shown.replace(f"page     {finished_run / 'report.html'}\n", "")
    assert len(out) < len(shown), "no page is named that was not written"
    assert err.startswith(f"warning: cannot write {finished_run / 'report.html'}: Read-only file system; ")
    assert err.count("\n") == 1
    code, out, err = redline_command("report", finished_run, "--json")
    assert (code, out) == (0, document)
    assert err.startswith("warning: ")


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["people", "json"])
def test_a_ladder_that_cannot_write_its_page_shows_its_rows_first(
    redline_command, machine, finished_run, monkeypatch, options
):
    shown = redline_command("report", finished_run, *options)[1]
    monkeypatch.setattr(RunDirectory, "append", lambda *_: pytest.fail("a row was measured again"))
    with monkeypatch.context() as patch:
        patch.setattr(ladder_module.LadderRun, "_keep_best", lambda *_: None)  # that file is not the page
        read_only(finished_run, patch)
        code, out, err = redline_command("ladder", "--resume", finished_run, *options)
    assert code == 2
    assert out == shown.replace(f"page     {finished_run / 'report.html'}\n", "")
    lines = err.splitlines()[-3:]
    assert lines[0] == f"problem: cannot write {finished_run / 'report.html'}"
    assert lines[1] == "why:     Read-only file system"
    assert "redline report" in lines[2]


def full_disk(monkeypatch, appended: int) -> None:
    """The disk has room for so many results and half of the next."""
    real, writes = open, iter(range(10**6))

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_with_little_room(path, mode="r", **more):
        file = real(path, mode, **more)
        return Full(file) if mode == "ab" and next(writes) >= appended else file

    monkeypatch.setattr(job_module, "open", open_with_little_room, raising=False)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_share_code_that_was_compiled_ahead_and_no_other(redline_command, machine, workers, monkeypatch, ahead):
    """What a row finds compiled took as long as it took for the row that compiled it."""

    def compiling(run, job, *words, compile_cache):
        found = workers.launch(run, job, *words, compile_cache=compile_cache)
        seconds = 30.0 + len(workers.jobs) if "compile" in job.recipe.rungs else None
        return replace(found, compile_seconds=seconds)

    monkeypatch.setattr(ladder_module, "launch", compiling)
    monkeypatch.setattr(ladder_module, "compile_side_by_side", lambda *_, **__: {})  # as if all of them had failed
    words = ("--rungs", "compile,padded-vocab,fused-adamw", "--json", *(("--compile-ahead", "4") if ahead else ()))
    code, out, _ = redline_command("ladder", "tiny", *words)
    assert code == 0
    seconds = {row["rung"]: row["compile_seconds"] for row in json.loads(out)["rows"]}
    assert seconds["baseline"] is None
    assert seconds["padded-vocab"] == seconds["compile"] + 1
    assert seconds["fused-adamw"] == seconds["padded-vocab"] + (0 if ahead else 1)
    if ahead:
        assert len(workers.caches) == 3, "the reference's and the baseline's, compile's, padded-vocab's"
    else:
        assert set(workers.caches) == {None}, "each its own"


def test_code_is_compiled_ahead_where_it_is_asked_for(redline_command, machine, workers, workplace, monkeypatch):
    asked = []

    def ahead(run, jobs, *, at_once, timeout_seconds, on_progress):
        on_progress(0, 2)
        asked.append(([job.recipe.rungs for job in jobs], at_once))
        assert workers.jobs == [], "before anything is measured"
        return {graph_key(job): 55.0 for job in jobs if "compile" in job.recipe.rungs}

    def launch(*words, **named):
        return replace(workers.launch(*words, **named), compile_seconds=5.0)

    monkeypatch.setattr(ladder_module, "compile_side_by_side", ahead)
    monkeypatch.setattr(ladder_module, "launch", launch)
    words = ("--rungs", "compile,padded-vocab", "--compile-ahead", "4", "--out", workplace / "run", "--json")
    code, out, _ = redline_command("ladder", "tiny", *words)
    document = json.loads(out)
    assert code == 0
    assert asked == [([(), ("compile",), ("compile", "padded-vocab")], 4)]
    assert [row["compile_seconds"] for row in document["rows"]] == [5.0, 55.0, 55.0]
    assert document["settings"]["compile_ahead"] == 4
    redline_command("ladder", "--resume", workplace / "run", "--json")
    assert len(asked) == 1, "nothing is left to compile"


def test_a_model_that_cannot_be_built_stops_at_once(redline_command, machine, workers, workplace):
    """Every row would say the same."""
    mistake = ("transformers cannot build the config", "it knows no 'magic'", "mend it")
    failure = Failure(kind="error", reason=": ".join(mistake[:2]), mistake=mistake)
    run = workplace / "run"

    def refuse(*words, **named):
        workers.jobs.append(words)
        return failure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "launch", refuse)
        code, out, err = redline_command("ladder", "tiny", "--out", run, "--json")
    assert (code, out, len(workers.jobs)) == (2, "", 1)
    assert err.splitlines()[-3:] == [f"problem: {mistake[0]}", f"why:     {mistake[1]}", f"fix:     {mistake[2]}"]
    assert not run.exists()


def test_ranks_do_not_compile_ahead(redline_command, machine):
    code, _, err = redline_command("ladder", "tiny", "--compile-ahead", "2", "--gpus", "2")
    assert code == 2
    assert "problem: --compile-ahead with --gpus 2" in err


def test_a_disk_that_fills_up_keeps_the_finished_rows(redline_command, machine, workers, workplace, monkeypatch):
    run = workplace / "run"

    def compile_and_launch(*words, **named):
        (run / "cache").mkdir(exist_ok=True)
        return workers.launch(*words, **named)

    with monkeypatch.context() as patch:
        full_disk(patch, appended=2)
        patch.setattr(ladder_module, "launch", compile_and_launch)
        code, out, err = redline_command("ladder", "tiny", "--rungs", "compile,padded-vocab", "--out", run, "--json")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    problem, why, fix = err.splitlines()[-3:]
    assert problem == f"problem: the run in {run} had to stop"
    assert why == "why:     No space left on device"
    assert f"--resume {run}" in fix
    assert "finished rows are kept" in fix
    assert len(RunDirectory(run).results()) == 2, "the reference and the baseline"
    assert not (run / "cache").exists(), "what takes most room is given back"
    asked = len(workers.jobs)
    code, out, _ = redline_command("ladder", "--resume", run, "--json")
    assert code == 0
    assert [row["status"] for row in json.loads(out)["rows"]] == ["ok"] * 3
    assert len(workers.jobs) == asked + 2, "the row that was lost, and the one that never began"


@pytest.mark.parametrize("step", ["launch", "write"])
def test_a_disk_that_fills_up_elsewhere_is_explained_too(
    redline_command, machine, workers, workplace, monkeypatch, step
):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/job.json")

    assert redline_command("ladder", "tiny", "--rungs", "none", "--out", workplace / "run", "--json")[0] == 0
    (workplace / "run" / "results.jsonl").write_text("")
    monkeypatch.setattr(*{"launch": (ladder_module, "launch"), "write": (RunDirectory, "write")}[step], no_room)
    code, out, err = redline_command("ladder", "--resume", workplace / "run")
    assert (code, out) == (2, "")
    assert "why:     No space left on device (somewhere/job.json)" in err.splitlines()


def test_a_ladder_that_is_interrupted_before_its_first_row_shows_no_empty_table(
    redline_command, machine, workplace, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder_module.LadderRun, "_compile_ahead", interrupted)
    code, out, err = redline_command("ladder", "tiny", "--out", workplace / "run")
    assert code == 130
    assert "nothing was measured yet" in out
    assert "the run was interrupted" in out
    assert "verdict" not in out
    assert "best" not in out
    assert f"redline ladder --resume {workplace / 'run'}" in err


@pytest.mark.parametrize(
    ("wanted", "kind", "problem", "fix"),
    [
        ("ladder", "train", "is a training run, not a ladder", "`redline train --resume {0}` goes on with it"),
        ("ladder", "tune", "is a tune, not a ladder", "`redline tune --resume {0}` goes on with it"),
        ("tune", "ladder", "is a ladder, not a tune", "`redline ladder --resume {0}` goes on with it"),
        ("ladder", "profile", "is a profile, not a ladder", "`redline report {0}` shows it"),
    ],
    ids=lambda value: value if value and " " not in value else "",
)
def test_the_folder_of_another_command_is_named(mistake, workplace, wanted, kind, problem, fix):
    run = workplace / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"kind": kind}))
    said = mistake(wanted, "--resume", run)
    assert said["problem"] == f"{run} {problem}"
    assert said["fix"].startswith(fix.format(run))


def test_an_interrupt_anywhere_else_is_no_traceback(redline_command, monkeypatch):
    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setattr("redline.search.words.probe_machine", interrupted)
    assert redline_command("ladder", "tiny") == (130, "", "interrupted\n")


# a reader that leaves


@pytest.mark.parametrize(
    "words",
    [
        "hardware --list",
        "hardware --name T4 --json",  # short enough to wait in Python's buffer until the end
        "estimate gpt2 --gpu H200",
        "estimate gpt2 --gpu H200 --json",
        "lint gpt2 --gpu H200",
    ],
)
def test_a_reader_that_leaves_is_no_failure(words):
    """As in `redline estimate | head -1`: rich leaves with exit code 1 there, and Python itself with 120."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "redline", *words.split()]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_leaving_for_another_reason_keeps_its_code(monkeypatch):
    def leave(options):
        raise SystemExit(7)

    monkeypatch.setattr("redline.commands.hardware.run_hardware", leave)
    with pytest.raises(SystemExit) as left:
        cli.main(["hardware"])
    assert left.value.code == 7


INTERRUPTED = """
import atexit, os, signal, sys, time
import redline.commands.hardware as hardware
from redline.cli import main
class Unraisable:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def stop_twice(options):
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
    raise KeyboardInterrupt
def stop_where_nothing_can_be_raised(options):
    Unraisable()
    time.sleep(30)
hardware.run_hardware = {stop}
sys.argv = ["redline", "hardware"]
raise SystemExit(main())
"""


@pytest.mark.parametrize("stop", ["stop_twice", "stop_where_nothing_can_be_raised"])
def test_an_interrupt_at_a_bad_moment_is_no_traceback(stop):
    """The second Ctrl-C while the interpreter ends; and one in a callback, which Python would drop with a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(Path(redline.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(stop=stop)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


ENDED_AT_THE_END = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
from redline.cli import main
raise SystemExit(main(["--version"]))
"""


def test_a_signal_while_the_interpreter_ends_is_no_traceback():
    """As torchrun's agent sends it to a rank that is leaving because another was killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(redline.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", ENDED_AT_THE_END], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_without_words_there_is_help(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: redline" in shown.err
    assert "ladder" in shown.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", ["hardware --list", "lint gpt2 --json"])
def test_an_output_that_is_full_is_three_lines(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "redline", *command.split()], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "problem: the output could not be written",
        "why:     No space left on device",
        "fix:     free some space, or send the output elsewhere; what is finished is kept",
    ]


@pytest.mark.parametrize(
    "words", [("train", "tiny"), ("train", "--resume", "absent"), ("train", "tiny", "--gpus", "2")]
)
def test_train_chooses_how_threads_wait_before_torch_is_imported(monkeypatch, words, capsys):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert cli.main([*words, "--rank-timeout", "-1"]) == 2
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
