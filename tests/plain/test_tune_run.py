"""`redline tune` without a machine: words to a run directory, answers that are kept and found again, an interrupt, a
resumed run, a report, and the mistakes that stop before anything is written. Workers are made up."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from redline.cli import main
from redline.commands.tune import bytes_of
from redline.core.errors import UserError
from redline.core.job import Job, RunDirectory
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe, load_recipe
from redline.report.tune_page import render_tune_page
from redline.search import answers as answers_module
from redline.search import ladder as ladder_module
from redline.search.answers import TrialAnswers, context_of, open_cache
from redline.workloads import resolve_workload

made_up = runpy.run_path(str(Path(__file__).with_name("test_tune.py")))  # tests are no package
Machine, H200 = made_up["Machine"], made_up["H200"]
PROBE = "redline.search.words.probe_machine"
VERSIONS = {"torch": "2.13", "redline": "0.1.0"}
WORDS = ("tune", "tiny", "--rungs", "bf16,compile,flash,cudnn-attention", "--micro-batch", "4", "--check-steps", "5")
TINY = resolve_workload("tiny")


class Workers:
    """In the place of launch(): the made-up machine, at once; `stop_at` is a Ctrl-C in that answer."""

    def __init__(self, **machine) -> None:
        self.machine, self.asked, self.stop_at = Machine(noise=0.0, **machine), [], None

    def launch(self, run, job, timeout_seconds, on_phase, *, compile_cache=None):
        if self.stop_at is not None and len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(job)
        result = self.machine.answer(job)
        if isinstance(result, Measurement) and result.gradients is not None:
            small = replace(result.gradients, loss=TINY.shape.ln_vocab)
            result = replace(result, gradients=small)
        return result


@pytest.fixture
def workers(monkeypatch, tmp_path) -> Workers:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hired = Workers()
    monkeypatch.setattr(answers_module, "launch", hired.launch)
    monkeypatch.setattr(answers_module, "probe_machine", lambda device: (H200, VERSIONS))
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (H200, VERSIONS))
    return hired


def tune(capsys, *words: object) -> tuple[int, dict, str]:
    code = main([*map(str, words), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else {}, shown.err


def test_from_words_to_a_recipe_that_train_takes(workers, capsys):
    code, document, _ = tune(capsys, *WORDS, "--out", "run")
    assert code == 0
    best = load_recipe(Path("run/best.json"))
    assert list(best.rungs) == document["best"]["rungs"]
    assert best.micro_batch == 4
    assert {"bf16", "compile", "tied-weights"} <= set(best.rungs)
    assert document["best"]["verdict"] == "rounding"
    assert document["best"]["speedup"] > 1
    assert document["workload"]["name"] == "tiny"
    assert document["versions"] == VERSIONS
    run = json.loads(Path("run/run.json").read_text())
    assert run["kind"] == "tune"
    assert run["settings"]["rungs"] == ["bf16", "compile", "flash", "cudnn-attention"]
    lines = [json.loads(line) for line in Path("run/results.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [job.key for job in workers.asked]
    assert all(line["seconds"] is not None for line in lines)


def test_a_second_call_asks_no_worker(workers, capsys):
    _, first, _ = tune(capsys, *WORDS, "--out", "one")
    asked = len(workers.asked)
    _, second, _ = tune(capsys, *WORDS, "--out", "two")
    assert len(workers.asked) == asked
    assert second["best"] == first["best"]
    assert second["budget"]["remembered_trials"] == second["budget"]["trials"] == first["budget"]["trials"]
    assert RunDirectory(Path("two")).answers() == RunDirectory(Path("one")).answers()


def ladder_before(monkeypatch, workers, capsys, *words: object) -> set[str]:
    """A ladder of the same workload in 'climbed'; the keys of the jobs it asked."""
    monkeypatch.setattr(ladder_module, "launch", workers.launch)
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (H200, VERSIONS))
    rungs = ("--rungs", "bf16,compile,flash,tied-weights", "--check-steps", "5", "--out", "climbed")
    code, *_ = tune(capsys, "ladder", "tiny", *rungs, *words)
    assert code == 0
    asked = {job.key for job in workers.asked}
    workers.asked.clear()
    return asked


def test_what_a_ladder_measured_is_not_measured_again(workers, capsys, monkeypatch):
    _, plain, _ = tune(capsys, *WORDS, "--out", "alone", "--fresh")
    workers.asked.clear()
    known = ladder_before(monkeypatch, workers, capsys, "--micro-batch", 4)
    words = tuple(word for word in WORDS if word not in ("--check-steps", "5"))  # the ladder's own
    code, document, _ = tune(capsys, *words, "--after", "climbed", "--out", "run")
    assert code == 0
    assert not known & {job.key for job in workers.asked}
    assert document["budget"]["remembered_trials"] > 0
    assert document["budget"]["remembered_seconds"] == 0, "a ladder's minutes are not the search's"
    assert document["settings"]["check_steps"] == 5
    assert document["best"]["rungs"] == plain["best"]["rungs"]
    assert known & set(RunDirectory(Path("run")).answers()), "what is used belongs to this run too"


def test_a_model_that_cannot_be_built_stops_at_once(workers, capsys, monkeypatch):
    mistake = ("transformers cannot build the config", "it knows no 'magic'", "mend it")
    failure = Failure(kind="error", reason="", mistake=mistake)
    monkeypatch.setattr(answers_module, "launch", lambda *words, **_: workers.asked.append(words) or failure)
    code, _, err = tune(capsys, *WORDS, "--out", "run")
    assert (code, len(workers.asked)) == (2, 1)
    assert f"problem: {mistake[0]}" in err
    assert not Path("run").exists()
    code, *_ = tune(capsys, *WORDS, "--out", "run")
    assert (code, len(workers.asked)) == (2, 2), "nobody remembers it: a newer transformers may build it"


def test_a_ladder_that_began_with_a_recipe_is_remembered_too(workers, capsys, monkeypatch):
    """Its recipes begin with the recipe's rungs, and a search's are in the ladder's order."""
    Path("first.json").write_text(json.dumps({"rungs": ["tied-weights"], "micro_batch": 4}))
    monkeypatch.setattr(ladder_module, "launch", workers.launch)
    rungs = ("--rungs", "bf16,compile,flash", "--check-steps", "5", "--from", "first.json", "--out", "climbed")
    assert tune(capsys, "ladder", "tiny", *rungs)[0] == 0
    measured = {frozenset(job.recipe.rungs) for job in workers.asked if job.kind == "measure"}
    workers.asked.clear()
    code, document, _ = tune(capsys, *WORDS, "--after", "climbed", "--out", "run")
    assert code == 0
    assert document["budget"]["remembered_trials"] > 0
    assert not measured & {frozenset(job.recipe.rungs) for job in workers.asked if job.kind == "measure"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(("--sequence", "64"), "its workload is not the same", id="workload"),
        pytest.param(("--fresh",), "one of them forgets what the other remembers", id="fresh"),
    ],
)
def test_another_ladder_is_no_beginning(workers, capsys, monkeypatch, words, why):
    ladder_before(monkeypatch, workers, capsys)
    code, _, err = tune(capsys, *WORDS, "--after", "climbed", *words, "--out", "run")
    assert code == 2
    assert why in err
    assert not Path("run").exists()


NOT_THE_SAME = {
    "torch": lambda patch: patch.setattr(PROBE, lambda device: (H200, {**VERSIONS, "torch": "2.14"})),
    "redline": lambda patch: patch.setattr(PROBE, lambda device: (H200, {"torch": "2.13"})),
    "device": lambda patch: patch.setattr(PROBE, lambda device: (replace(H200, driver="581"), VERSIONS)),
    "code": lambda patch: patch.setattr(answers_module, "code_fingerprint", lambda: "another one"),
    "OMP_NUM_THREADS": lambda patch: patch.setenv("OMP_NUM_THREADS", "7"),
    "text": lambda patch: Path("novel.txt").write_text("It was a bright cold day in April. " * 500),  # and stays so
}


def test_a_ladder_of_something_else_is_no_beginning(workers, capsys, monkeypatch):
    """Whatever makes another folder of the cache; one ladder for all of them, since it is what takes time."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("novel.txt").write_text("It was a dark and stormy night. " * 500)
    ladder_before(monkeypatch, workers, capsys, "--data", "novel.txt")
    for name, change in NOT_THE_SAME.items():
        with monkeypatch.context() as patch:
            change(patch)
            code, _, err = tune(capsys, *WORDS, "--data", "novel.txt", "--after", "climbed", "--out", "run")
        assert code == 2
        assert f"its {name} is not the same" in err
        assert not Path("run").exists()


@pytest.mark.parametrize("changed", [False, True], ids=["the same code", "another code"])
def test_a_ladder_whose_rows_are_of_two_codes_is_no_beginning(workers, capsys, monkeypatch, changed):
    ladder_before(monkeypatch, workers, capsys)
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (H200, VERSIONS))
    if changed:
        monkeypatch.setattr(answers_module, "code_fingerprint", lambda: "another one")
    assert tune(capsys, "ladder", "--resume", "climbed")[0] == 0
    code, _, err = tune(capsys, *WORDS, "--after", "climbed", "--out", "run")
    assert code == (2 if changed else 0)
    assert ("does not say with which code, text and environment" in err) == changed


def test_a_ladder_of_an_older_version_is_no_beginning(workers, capsys, monkeypatch):
    ladder_before(monkeypatch, workers, capsys)
    run = json.loads(Path("climbed/run.json").read_text())
    del run["surroundings"]
    Path("climbed/run.json").write_text(json.dumps(run))
    code, _, err = tune(capsys, *WORDS, "--after", "climbed", "--out", "run")
    assert code == 2
    assert "does not say with which code, text and environment" in err


def test_a_tune_is_no_ladder(workers, capsys):
    tune(capsys, *WORDS, "--out", "tuned")
    code, _, err = tune(capsys, *WORDS, "--after", "tuned", "--out", "run")
    assert code == 2
    assert "problem: tuned is a tune, not a ladder" in err
    assert "why:     its run.json says that `redline tune` made it" in err


def test_a_search_counts_and_sizes_as_its_ladder_did(workers, capsys, monkeypatch):
    """Timed steps, check steps and the workload's micro batch are part of the question."""
    known = ladder_before(monkeypatch, workers, capsys, "--steps", 7, "--micro-batch", TINY.micro_batch + 1)
    words = ("tune", "tiny", "--rungs", "bf16,compile,flash", "--micro-batch", TINY.micro_batch + 1)
    code, document, _ = tune(capsys, *words, "--after", "climbed", "--out", "run")
    assert code == 0
    assert (document["settings"]["timed_steps"], document["settings"]["check_steps"]) == (7, 5)
    assert document["workload"]["micro_batch"] == TINY.micro_batch + 1
    assert document["budget"]["remembered_trials"] > 0
    assert not known & {job.key for job in workers.asked}
    code, document, _ = tune(capsys, *words, "--steps", 8, "--check-steps", 6, "--after", "climbed", "--out", "own")
    assert (document["settings"]["timed_steps"], document["settings"]["check_steps"]) == (8, 6)


@pytest.mark.parametrize("changed", [False, True], ids=["the same code", "another code"])
def test_a_resumed_search_knows_what_its_ladder_measured(workers, capsys, monkeypatch, changed):
    known = ladder_before(monkeypatch, workers, capsys, "--micro-batch", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("another").resolve()))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrialAnswers, "adopt", interrupt)  # in the first answer, which the ladder had
        assert tune(capsys, *WORDS, "--after", "climbed", "--out", "run")[0] == 130
    assert not RunDirectory(Path("run")).answers()
    shutil.rmtree("climbed")
    if changed:
        monkeypatch.setattr(answers_module, "code_fingerprint", lambda: "another one")
    assert tune(capsys, "tune", "--resume", "run")[0] == 0
    assert known & set(RunDirectory(Path("run")).answers())
    assert bool(known & {job.key for job in workers.asked}) == changed


def test_fresh_asks_again_and_remembers_nothing(workers, capsys):
    tune(capsys, *WORDS, "--out", "one")
    asked = len(workers.asked)
    tune(capsys, *WORDS, "--out", "two", "--fresh")
    assert len(workers.asked) == 2 * asked


@pytest.mark.parametrize("stop_at", [0, 1, 3, 5])
def test_an_interrupted_run_goes_on_where_it_was(workers, capsys, stop_at):
    workers.stop_at = stop_at
    code, document, stderr = tune(capsys, *WORDS, "--out", "run", "--fresh")
    assert code == 130
    assert document["stopped"]["why"] == "interrupted"
    assert not document["finished"]
    assert "--resume run" in stderr
    workers.stop_at = None
    code, resumed, _ = tune(capsys, "tune", "--resume", "run", "--fresh")
    assert code == 0
    assert resumed["finished"]
    assert len({job.key for job in workers.asked}) == len(workers.asked)  # nothing twice
    workers.asked.clear()
    _, whole, _ = tune(capsys, *WORDS, "--out", "whole", "--fresh")
    assert resumed["best"]["rungs"] == whole["best"]["rungs"]


def test_a_page_is_left_in_the_run_directory(workers, capsys):
    _, document, _ = tune(capsys, *WORDS, "--out", "run")
    assert Path("run/report.html").read_text() == render_tune_page({**document, "directory": "run"})
    Path("run/report.html").unlink()
    assert main(["report", "run"]) == 0
    assert f"page     {Path('run/report.html')}" in capsys.readouterr().out
    assert Path("run/report.html").read_text() == render_tune_page({**document, "directory": "run"})
    Path("run/report.html").unlink()
    Path("run/report.html.draft").mkdir()  # root may write anywhere, but not over a folder
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().err.startswith("warning: cannot write run/report.html: ")


def test_a_report_draws_it_again(workers, capsys):
    _, document, _ = tune(capsys, *WORDS, "--out", "run")
    asked = len(workers.asked)
    assert tune(capsys, "report", "run")[1] == document
    Path("run/tune.json").unlink()  # as after a power cut
    again = tune(capsys, "report", "run")[1]
    assert again["best"] == document["best"]
    assert not again["finished"]
    assert again["stopped"]["why"] == "interrupted"
    assert [row["number"] for row in again["rows"]] == [row["number"] for row in document["rows"]]
    assert len(workers.asked) == asked


@pytest.mark.parametrize("name", ["run.json", "tune.json"])
@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_damaged_files_are_told_or_worked_around(workers, capsys, name, text):
    _, document, _ = tune(capsys, *WORDS, "--out", "run")
    Path("run", name).write_text(text)
    code, again, stderr = tune(capsys, "report", "run")
    if name == "tune.json":  # the answers tell the same
        assert again["best"] == document["best"]
        return
    assert code == 2
    assert "problem: run/run.json is damaged" in stderr
    assert tune(capsys, "tune", "--resume", "run")[0] == 2


def test_a_resumed_search_takes_the_ranks_it_has_and_no_others(workers, capsys):
    assert tune(capsys, *WORDS, "--out", "run")[0] == 0
    assert tune(capsys, "tune", "--resume", "run", "--gpus", "1")[0] == 0
    code, _, stderr = tune(capsys, "tune", "--resume", "run", "--gpus", "2")
    assert code == 2
    assert "problem: --resume does not go with --gpus 2" in stderr
    assert "why:     run has --gpus 1, and rows of other ranks could not be compared" in stderr


def test_a_device_that_is_back_is_measured(workers, capsys):
    """Lost in the first answers; a resumed run asks them again, and so does another run."""
    workers.machine.gone_after = -1
    code, document, _ = tune(capsys, *WORDS, "--out", "run")
    assert code == 1
    assert all(row["status"] == "failed" for row in document["rows"])
    workers.machine.gone_after = None
    for words in (("tune", "--resume", "run"), (*WORDS, "--out", "other")):
        code, document, _ = tune(capsys, *words)
        assert code == 0
        assert document["baseline"]["tokens_per_second"] > 0


def test_what_was_asked_for_reaches_the_search(workers, capsys):
    _, document, _ = tune(
        capsys,
        "tune",
        "tiny",
        "--rungs",
        "bf16,flash,lion",
        "--allow",
        "bit-exact",
        "--global-batch",
        "12",
        "--out",
        "a",
    )
    assert document["best"]["rungs"] == ["tied-weights"]
    assert {12 % job.recipe.micro_batch for job in workers.asked} == {0}
    assert document["best"]["accumulation"] * document["best"]["micro_batch"] == 12


def test_a_trial_gets_no_more_than_its_timeout(workers, capsys, monkeypatch):
    allowed, launch = [], workers.launch
    monkeypatch.setattr(
        answers_module,
        "launch",
        lambda run, job, seconds, *rest, **more: (allowed.append(seconds), launch(run, job, seconds, *rest, **more))[1],
    )
    tune(capsys, *WORDS, "--timeout", "33", "--out", "run")
    assert max(allowed) == 33


def test_the_best_so_far_is_on_the_disk_while_the_search_goes_on(workers, capsys, monkeypatch):
    there, launch = [], workers.launch
    monkeypatch.setattr(
        answers_module,
        "launch",
        lambda *words, **more: (there.append(Path("run/best.json").exists()), launch(*words, **more))[1],
    )
    tune(capsys, *WORDS, "--out", "run")
    assert not there[0]
    assert there[-1]


def test_a_device_that_does_not_answer_is_trouble(tmp_path, monkeypatch):
    def gone(device: str) -> None:
        raise UserError("no cuda device to measure on", "torch sees none", "look for it")

    monkeypatch.setattr(answers_module, "probe_machine", gone)
    assert asking(tmp_path).trouble() == "no cuda device to measure on: torch sees none"
    monkeypatch.setattr(answers_module, "probe_machine", lambda device: (H200, VERSIONS))
    assert asking(tmp_path).trouble() is None


def test_the_command_that_trains_it_keeps_text_and_update(workers, capsys):
    Path("novel.txt").write_text("It was a dark and stormy night. " * 500)
    assert main([*WORDS, "--global-batch", "8", "--data", "novel.txt", "--out", "run"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("train it"))
    assert line.split("train it ")[1] == "redline train tiny --recipe run/best.json --data novel.txt --global-batch 8"


def test_nothing_that_runs_is_exit_code_1(workers, capsys):
    workers.machine.failures["tied-weights"] = Failure(kind="oom", reason="out of memory")
    code, document, _ = tune(capsys, *WORDS, "--out", "run")
    assert code == 1
    assert document["best"] is None
    assert not Path("run/best.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--minutes", "0"), "--minutes is 0"),
        (("--minutes", "nan"), "--minutes is nan"),
        (("--micro-batch", "0"), "--micro-batch is 0"),
        (("--micro-batch", "7", "--global-batch", "16"), "a global batch of 16 is not a multiple of the micro batch 7"),
        (("--memory-limit", "much"), "--memory-limit is 'much'"),
        (("--memory-limit", "1MiB"), "tiny does not fit at micro batch"),
        (("--rungs", "flsh"), "unknown rung 'flsh'"),
        (("--timeout", "0"), "timeout is 0"),
        (("--resume", "nowhere"), "--resume does not go with workload"),
    ],
)
def test_mistakes_stop_before_anything_is_written(workers, capsys, words, problem):
    code, document, stderr = tune(capsys, "tune", "tiny", *words, "--out", "run")
    assert code == 2
    assert document == {}
    assert f"problem: {problem}" in stderr
    assert "fix:" in stderr
    assert not Path("run").exists()
    assert workers.asked == []


def test_a_run_is_resumed_where_it_was_measured(workers, capsys, monkeypatch):
    tune(capsys, *WORDS, "--out", "run")
    monkeypatch.setattr("redline.search.words.probe_machine", lambda device: (replace(H200, name="another"), VERSIONS))
    code, _, stderr = tune(capsys, "tune", "--resume", "run")
    assert code == 2
    assert "device was NVIDIA H200, is another" in stderr


def test_more_minutes_may_be_given_to_a_resumed_run(workers, capsys):
    tune(capsys, *WORDS, "--out", "run")
    _, document, _ = tune(capsys, "tune", "--resume", "run", "--minutes", "20")
    assert document["budget"]["seconds"] == 1200
    assert json.loads(Path("run/run.json").read_text())["settings"]["minutes"] == 20


def test_a_run_that_has_used_its_minutes_says_so(workers, capsys, monkeypatch):
    """It shows again what it found, and asks nothing."""
    clock = iter(range(0, 10**6, 20))  # each answer takes 20 seconds
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: float(next(clock)))
    _, first, _ = tune(capsys, *WORDS, "--out", "run", "--minutes", "20")
    asked, answers = len(workers.asked), len(RunDirectory(Path("run")).answers())
    code, again, stderr = tune(capsys, "tune", "--resume", "run", "--minutes", "1")
    assert code == 0
    assert len(workers.asked) == asked
    assert again["best"] == first["best"]
    assert f"its answers took {answers / 3:.1f} minutes: with --minutes 1 nothing new is measured" in stderr
    *_, stderr = tune(capsys, "tune", "--resume", "run", "--minutes", "20")
    assert "nothing new is measured" not in stderr


@pytest.mark.parametrize(
    ("text", "count"), [("40", 40 * 1024**3), ("40GiB", 40 * 1024**3), ("1.5 gb", 1_500_000_000), ("512MiB", 2**29)]
)
def test_sizes_in_words(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 pounds", "1e3"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="memory-limit"):
        bytes_of(text)


# what is remembered


def asking(directory: Path, cache: RunDirectory | None = None) -> TrialAnswers:
    return TrialAnswers(
        RunDirectory(directory), cache=cache, device="cuda", timeout_seconds=100.0, on_phase=lambda *_, **__: None
    )


JOB = Job(workload=TINY, recipe=Recipe(micro_batch=4), device="cuda", tokens="tokens.npy")


@pytest.mark.parametrize(
    ("result", "seconds", "allowed", "recalled"),
    [
        (Measurement(loss_curve=(1.0,)), 10.0, 5.0, True),
        (Failure(kind="oom", reason="full"), 10.0, 5.0, True),
        (Failure(kind="compile", reason="no kernel"), 10.0, 5.0, True),
        (Failure(kind="killed", reason="shot"), 10.0, 5.0, False),  # from outside the recipe
        (Failure(kind="error", reason="the device is lost"), 10.0, 5.0, False),
        (Failure(kind="timeout", reason="slow"), 50.0, 55.0, True),  # as little time as then
        (Failure(kind="timeout", reason="slow"), 50.0, 90.0, False),
        (Failure(kind="timeout", reason="slow"), 100.0, 900.0, True),  # --timeout allows no more
    ],
)
def test_what_is_recalled(tmp_path, result, seconds, allowed, recalled):
    RunDirectory(tmp_path).append(JOB, result, seconds)
    found = asking(tmp_path).recall(JOB, allowed)
    assert (found is not None) == recalled
    if found is not None:
        assert (found.result, found.seconds, found.remembered) == (result, seconds, True)


STEADY, UNEVEN = (1.0,) * 9 + (1.9,) * 9, (1.0,) * 9 + (2.1,) * 9  # p90 over p10: 1.9 and 2.1


@pytest.mark.parametrize(
    ("result", "seconds", "lasts"),
    [
        pytest.param(Measurement(loss_curve=(1.0,)), 10.0, True, id="reference"),
        pytest.param(Measurement(loss_curve=(), step_seconds=STEADY), 10.0, True, id="steady"),
        pytest.param(Measurement(loss_curve=(), step_seconds=UNEVEN), 10.0, False, id="disturbed"),
        pytest.param(Failure(kind="oom", reason="full"), 10.0, True, id="oom"),
        pytest.param(Failure(kind="killed", reason="shot"), 10.0, False, id="killed"),
        pytest.param(Failure(kind="error", reason="lost"), 10.0, False, id="error"),
        pytest.param(Failure(kind="timeout", reason="slow"), 99.0, False, id="cut by the minutes"),
        pytest.param(Failure(kind="timeout", reason="slow"), 101.0, True, id="had its timeout"),  # asking() gives 100
    ],
)
def test_what_another_run_is_told(tmp_path, monkeypatch, result, seconds, lasts):
    """Neither kept for it, nor believed where an older version kept it; the run itself goes on with what it has."""
    here, cache, older = (RunDirectory(tmp_path / name) for name in ("here", "cache", "older"))
    for one in (here, cache, older):
        one.path.mkdir()
    clock = iter((0.0, seconds))
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(answers_module, "launch", lambda *_, **__: result)
    asking(here.path, cache).ask(JOB, min(seconds, 100.0))
    assert (JOB.key in cache.answers()) == lasts
    assert JOB.key in here.answers()
    older.append(JOB, result, seconds)
    found = asking(tmp_path, older).recall(JOB, 100.0)
    assert (found is not None) == lasts


def test_a_busy_machine_is_forgotten(workers, capsys, monkeypatch):
    """The first run's start is disturbed and its reference cut by the minutes; the second one is on a quiet machine."""

    def busy(run, job, timeout_seconds, *rest, **more):
        result = workers.launch(run, job, timeout_seconds, *rest, **more)
        if job.kind == "reference":
            return Failure(kind="timeout", reason="stopped")
        steps = [(1 + 3 * (at % 2)) * one for at, one in enumerate(result.step_seconds)]
        return replace(result, step_seconds=tuple(steps))

    monkeypatch.setattr(answers_module, "launch", busy)
    code, first, _ = tune(capsys, *WORDS, "--out", "busy")
    assert code == 1
    assert "the fp32 reference could not be run: stopped after" in first["unproved"]["why"]
    assert "--minutes allows no more" in first["unproved"]["why"]
    monkeypatch.setattr(answers_module, "launch", workers.launch)
    code, second, _ = tune(capsys, *WORDS, "--out", "quiet")
    assert code == 0
    assert second["budget"]["remembered_seconds"] == 0
    assert second["unproved"] is None


def test_how_long_to_stay_is_no_part_of_the_question():
    assert replace(JOB, give_up_seconds=0.1).key == JOB.key
    assert replace(JOB, kind="look").key != JOB.key


def test_whatever_changes_a_time_changes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = tmp_path / "tokens.npy"
    tokens.write_bytes(b"one text")
    paths = [open_cache(context_of(H200, VERSIONS, tokens))[0].path]
    paths.append(open_cache(context_of(replace(H200, driver="581"), VERSIONS, tokens))[0].path)
    paths.append(open_cache(context_of(replace(H200, multiprocessors=114), VERSIONS, tokens))[0].path)
    paths.append(open_cache(context_of(H200, {**VERSIONS, "torch": "2.14"}, tokens))[0].path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    paths.append(open_cache(context_of(H200, VERSIONS, tokens))[0].path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    tokens.write_bytes(b"another text")
    paths.append(open_cache(context_of(H200, VERSIONS, tokens))[0].path)
    monkeypatch.setattr(answers_module, "code_fingerprint", lambda: "other code")
    paths.append(open_cache(context_of(H200, VERSIONS, tokens))[0].path)
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(tmp_path / "redline" / "trials") for path in paths)


def test_a_cache_that_cannot_be_written_is_none(workers, capsys, monkeypatch):
    Path("file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("file").resolve()))
    code, document, stderr = tune(capsys, *WORDS, "--out", "run")
    assert code == 0
    assert document["best"] is not None
    assert "trials are not remembered beyond this run" in stderr
