"""Several ranks without starting any: what is refused, asked, predicted and said; and traces of collectives by hand."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.commands.common import command_line
from redline.commands.ranks import (
    change_of_ranks,
    check_meeting_place,
    check_resumed_shares,
    follow,
    keep_log,
    start_ranks,
)
from redline.core.errors import UserError
from redline.core.job import RunDirectory
from redline.core.layout import Layout as Ranked
from redline.core.measurement import Failure, Measurement, Sharing
from redline.core.profile import COMMUNICATION, IDLE
from redline.core.rank_processes import killed_by
from redline.core.recipe import Recipe
from redline.engine.profiling_timeline import STEP, WINDOW, read_timeline, union
from redline.predict.memory import predict_memory
from redline.predict.parallel import Beside, Layout
from redline.rungs import plan_of
from redline.rungs.ladder import for_layout
from redline.search.document import ladder_document
from redline.search.launch import kill_ranks, standing_in
from redline.search.ranks import check_global_batch, check_ranks, rate_of_ranks
from redline.search.space import open_space
from redline.search.tune_run import prepare_tune
from redline.search.words import check_same_machine
from redline.workloads import resolve_workload

HERE = Path(__file__)
climbs = runpy.run_path(str(HERE.with_name("test_climb.py")))
tunes = runpy.run_path(str(HERE.with_name("test_tune.py")))
traces = runpy.run_path(str(HERE.with_name("test_profile_timeline.py")))
event, kernel, launch, operator = (traces[name] for name in ("event", "kernel", "launch", "operator"))
GPT2, XL = resolve_workload("gpt2"), resolve_workload("gpt2-xl")
EIGHT = replace(tunes["H200"], count=8, ranks=8)
GIB = 1024**3
NOT_MEASURED = {
    "tensor-parallel": "--tensor N says how many do",
    "pipeline-parallel": "a measured step is one micro batch",
    "pipeline-gpipe": "a measured step is one micro batch",
}


# --- what is refused --------------------------------------------------------------------------------------------------


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="9 ranks on this machine") as caught:
        check_ranks(EIGHT, 9)
    assert "use --gpus 8" in caught.value.fix


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (2, 8), (3, 12), (16, 64)])
def test_a_cpu_has_room_for_four_ranks_on_a_core_and_for_eight_in_any_case(cores: int, most: int) -> None:
    cpu = replace(EIGHT, kind="cpu", count=1, cpu_cores=cores)
    assert check_ranks(cpu, most).ranks == most
    with pytest.raises(UserError, match=f"{most + 1} ranks on this CPU") as caught:
        check_ranks(cpu, most + 1)
    assert caught.value.fix == f"use --gpus {most} or fewer"
    assert check_ranks(replace(cpu, kind="cuda", count=most + 1), most + 1).ranks == most + 1


def test_as_many_ranks_are_proposed_as_go_with_the_batch() -> None:
    cpu = replace(EIGHT, kind="cpu", count=1, cpu_cores=2)
    for batch, most in ((8, 4), (16, 8), (12, 6)):
        with pytest.raises(UserError, match="64 ranks on this CPU") as caught:
            check_ranks(cpu, 64, beside=Beside(micro_batch=2, batch=batch))
        assert caught.value.fix == f"use --gpus {most}"
    with pytest.raises(UserError) as caught:
        check_ranks(EIGHT, 9, Ranked(ranks=9), Beside(micro_batch=1, batch=6))
    assert caught.value.fix == "use --gpus 6"


def test_a_global_batch_that_ranks_cannot_share_is_refused_with_the_nearest() -> None:
    check_global_batch(None, 3)
    check_global_batch(6, 3)
    with pytest.raises(UserError, match="10 does not divide among 4 ranks") as caught:
        check_global_batch(10, 4)
    assert "8 or 12" in caught.value.fix


def test_ranks_cannot_be_asked_for_the_bits_of_one_process() -> None:
    with pytest.raises(UserError, match="--allow bit-exact with --gpus 2"):
        prepare_tune(workload="tiny", minutes=1, allow="bit-exact", gpus=2)


def order(micro_batch: int, global_batch: int) -> Any:
    return SimpleNamespace(
        out="runs/mine", settings=SimpleNamespace(micro_batch=micro_batch, global_batch=global_batch)
    )


def test_fewer_ranks_keep_the_global_batch_and_say_so() -> None:
    check_resumed_shares("runs/mine", 2, 16, Ranked(ranks=2))
    assert change_of_ranks(4, Ranked(ranks=4), order(2, 16)) is None
    text = change_of_ranks(4, Ranked(ranks=1), order(2, 16))
    assert text == (
        "1 rank where the run began with 4: the global batch stays at 16 sequences, accumulated from 8 x 2 on each rank"
    )


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "ranks", "fix"),
    [
        (2, 16, 3, "go on with 1 or 2 ranks"),
        (4, 8, 4, "go on with 1 or 2 ranks or with --micro-batch 2"),
        (4, 6, 2, "go on with --micro-batch 3"),
    ],
    ids=["count", "both", "size"],
)
def test_a_number_that_does_not_divide_the_global_batch_is_refused(
    micro_batch: int, global_batch: int, ranks: int, fix: str
) -> None:
    with pytest.raises(UserError, match=f"{ranks} ranks cannot go on with runs/mine") as caught:
        check_resumed_shares("runs/mine", micro_batch, global_batch, Ranked(ranks=ranks))
    assert caught.value.fix == fix
    assert f"keeps its global batch of {global_batch} sequences" in caught.value.why


def test_a_run_of_more_ranks_than_are_here_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has the same name, and the versions are the same."""
    versions = {"torch": "2.13.0"}
    directory = RunDirectory(tmp_path)
    directory.write("run.json", json.dumps({"versions": versions}))

    def resume_with(gpus: int) -> None:
        monkeypatch.setattr("redline.search.words.probe_machine", lambda _: (replace(EIGHT, count=gpus), versions))
        check_same_machine(directory, GPT2, EIGHT, "cuda", fix="start a new one")

    resume_with(8)
    with pytest.raises(UserError, match="8 ranks on this machine") as caught:
        resume_with(4)
    assert caught.value.fix == "use --gpus 4"


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_ranks_record_the_command_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's place is taken by a process that writes down what a rank would record."""
    record = (
        "from redline.commands.common import command_line; import sys; open(sys.argv[1], 'w').write(command_line())"
    )
    words = ["train", "tiny", "--data", "my text.txt", "--gpus=4", "--parallel", "fsdp"]
    monkeypatch.setattr("redline.commands.train_order.check_order", lambda *_, **__: (None, replace(EIGHT, kind="cpu")))
    agent = [sys.executable, "-c", record, str(tmp_path / "command")]
    monkeypatch.setattr("redline.commands.ranks.agent_command", lambda *_: agent)
    assert start_ranks(argparse.Namespace(gpus=4, words=words)) == 0
    assert (tmp_path / "command").read_text() == "redline train tiny --data 'my text.txt' --gpus=4 --parallel fsdp"


@pytest.mark.parametrize(
    ("number", "words"),
    [(9, "was killed by SIGKILL (the system may be out of memory)"), (11, "was killed by SIGSEGV"), (40, "signal 40")],
)
def test_every_signal_has_a_name_or_a_number(number: int, words: str) -> None:
    assert killed_by(number).endswith(words)


def test_an_agent_that_is_asked_to_stop_is_an_interruption() -> None:
    """It passes that on; rank 0 saves and tells."""
    assert follow(subprocess.Popen(["sh", "-c", "exit 143"]), Path("nowhere", "rank-0")) == 130


def test_an_agent_that_is_killed_is_told_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It cannot say so itself, and its ranks leave without a word."""
    monkeypatch.setattr("redline.commands.train_order.check_order", lambda *_, **__: (None, EIGHT))
    monkeypatch.setattr("redline.commands.ranks.agent_command", lambda *_: ["sh", "-c", "kill -KILL $$"])
    assert start_ranks(argparse.Namespace(gpus=4, words=["train"])) == 1
    told = "training stopped: the process that holds the ranks together was killed by SIGKILL (the system may be out of"
    assert capfd.readouterr().err.startswith(told)


@pytest.mark.parametrize("missing", [("MASTER_ADDR",), ("MASTER_ADDR", "MASTER_PORT")])
def test_ranks_that_cannot_meet_are_told_so(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.delenv(name, raising=False) if name in missing else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{' and '.join(missing)} not") as caught:
        check_meeting_place()
    assert "unset RANK" in caught.value.fix


def test_what_nobody_catches_any_more_goes_to_the_log(tmp_path: Path) -> None:
    """A signal may come in the interpreter's last moments, and the screen has redline's own words alone."""
    code = "from redline.core.rank_processes import take_screen; take_screen(); raise KeyboardInterrupt"
    with open(tmp_path / "screen", "w+") as screen, open(tmp_path / "log", "w+") as log:
        environment = {**os.environ, "REDLINE_SCREEN_IS_STDIN": "1"}
        subprocess.run([sys.executable, "-c", code], stdin=screen, stderr=log, env=environment, timeout=60)
    assert (tmp_path / "screen").read_text() == ""
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()


def test_a_process_of_its_own_and_torchruns_ranks_record_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDLINE_TYPED_WORDS", raising=False)
    monkeypatch.setattr("sys.argv", ["redline", "train", "tiny"])
    assert command_line() == "redline train tiny"


# --- a signal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_signal", "answer"),
    [
        (None, None),  # the agent has no handler yet, and rank 0 no process id
        ("exit 143", None),
        ("touch left; exit 1", None),
        ("exit 130", 130),
        ("exit 1", 1),
    ],
    ids=["agent-alone", "agent-handles", "rank-left", "rank-saved", "rank-failed"],
)
def test_a_signal_is_an_interruption_unless_rank_0_answers_it(
    tmp_path: Path, on_signal: str | None, answer: int | None
) -> None:
    """One shell is the agent, and rank 0 where it says so."""
    known = "" if on_signal in (None, "exit 143") else "echo $$ > rank-0;"
    trap = f"trap '{on_signal}' INT TERM;" if on_signal else ""
    script = f"{trap} {known} touch ready; while true; do sleep 0.02; done"
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path)

    before = signal.getsignal(signal.SIGINT)

    def press_keys() -> None:
        while not (tmp_path / "ready").exists() or signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.01)
        time.sleep(0.3)  # a signal just before the wait begins would be answered when that is over, which is never
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_keys, daemon=True).start()
    try:
        assert follow(process, tmp_path / "rank-0") == answer
    finally:
        process.kill()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_agent_that_somebody_else_ends_is_no_interruption(tmp_path: Path) -> None:
    assert follow(subprocess.Popen(["sh", "-c", "kill -TERM $$"]), tmp_path / "rank-0") == 1


@pytest.mark.parametrize(
    ("code", "in_run", "kept"),
    [(1, True, "run"), (1, False, "elsewhere"), (130, True, "run"), (130, False, ""), (None, True, ""), (2, False, "")],
    ids=["failed", "failed-early", "stopped", "stopped-early", "interrupted", "mistake"],
)
def test_a_log_stays_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, in_run: bool, kept: str
) -> None:
    folder, run, elsewhere = (tmp_path / name for name in ("folder", "run", "elsewhere"))
    for made in (folder, run, elsewhere):
        made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    (folder / "ranks.log").write_text("of torch")
    if in_run:
        (folder / "run").write_text(json.dumps([str(run), "--gpus 2"]))
    log = keep_log(folder, code)
    assert [path.parent.name for path in tmp_path.glob("*/*.log") if path.parent != folder] == ([kept] if kept else [])
    assert (log.read_text() if log else "") == ("of torch" if kept else "")


# --- a ladder ---------------------------------------------------------------------------------------------------------


def ranked_climb(machine: Any, rungs: tuple[str, ...]) -> Any:
    hardware = replace(climbs["H200"], count=4, ranks=4)
    return climbs["climbed"](machine, hardware, rungs=rungs, start=("ddp",))


def test_a_ladder_of_ranks_begins_with_ddp_and_counts_all_of_them() -> None:
    machine = climbs["Machine"]()
    climb = ranked_climb(machine, ("tf32", "fsdp"))
    assert [(row.name, row.recipe.rungs) for row in climb.finished] == [
        ("ddp", ("ddp",)),
        ("tf32", ("ddp", "tf32")),
        ("fsdp", ("tf32", "fsdp")),
    ]
    assert {job.ranks for job in machine.jobs} == {4}
    assert {job.recipe.rungs for job in machine.jobs if job.kind == "reference"} == {()}
    run = {"versions": {}, "command": "", "date": "", "settings": {}}
    document = ladder_document(climb, run, True)
    first = document["rows"][0]
    assert first["tokens_per_second"] == pytest.approx(4 * 4 * 16 / first["step_seconds"]["median"])
    alone = ladder_document(climbs["climbed"](climbs["Machine"](), rungs=()), run, True)["rows"][0]
    per_token = alone["mfu"] / alone["tokens_per_second"]
    assert first["mfu"] == pytest.approx(per_token * first["tokens_per_second"] / 4), "a share of four peaks"
    shape, plan = climb.workload.shape, plan_of(("tf32", "fsdp"))
    cut = predict_memory(shape, plan, micro_batch=4, layout=Layout(gpus=4), zero=3).allocated
    assert document["rows"][2]["predicted_peak_bytes"] == cut


def test_a_rung_that_the_way_to_share_refuses_is_skipped() -> None:
    machine = climbs["Machine"](factors={"fsdp": 0.5})
    hardware = replace(climbs["H200"], count=4, ranks=4)
    climb = climbs["climbed"](machine, hardware, rungs=("muon",), start=("fsdp",))
    assert climb.finished[1].status == "skipped"
    assert "whole ones only" in climb.finished[1].reason
    for name, why in NOT_MEASURED.items():
        climb = climbs["climbed"](machine, hardware, rungs=(name,), start=("ddp",))
        assert climb.finished[1].status == "skipped"
        assert why in climb.finished[1].reason


def test_the_key_of_a_job_of_one_process_is_what_it_was() -> None:
    """Runs of before ranks are resumed; and several ranks are another question."""
    machine = climbs["Machine"]()
    climbs["climbed"](machine, rungs=())
    job = machine.jobs[-1]
    assert job.ranks == 1
    assert job.key == "c1c0fdafa7d8087e"
    assert replace(job, ranks=2).key not in (job.key, replace(job, ranks=4).key)
    assert (replace(job, ranks=2).processes, replace(job, ranks=2, kind="reference").processes) == (2, 1)
    assert replace(job, ranks=2).global_batch == 8


def test_what_ranks_cost_one_another_stands_in_the_document() -> None:
    sharing = Sharing(communication_seconds=0.3, exposed_seconds=0.1, compute_seconds=(1.0, 1.4, 1.1))
    assert sharing.straggler_seconds == pytest.approx(0.3)
    assert replace(sharing, compute_seconds=(1.0, 1.4)).straggler_seconds == pytest.approx(0.4), "all that one is late"
    machine = climbs["Machine"]()
    asked = machine.ask

    def ask(job: Any) -> Any:
        found = asked(job)
        return replace(found, sharing=sharing) if isinstance(found, Measurement) and job.kind == "measure" else found

    machine.ask = ask
    climb = ranked_climb(machine, ())
    row = ladder_document(climb, {"versions": {}, "command": "", "date": "", "settings": {}}, True)["rows"][0]
    assert row["sharing"] == {
        "communication_seconds": 0.3,
        "exposed_seconds": 0.1,
        "compute_seconds": [1.0, 1.4, 1.1],
        "straggler_seconds": pytest.approx(0.3),
        "by_group": None,
    }


def test_what_is_left_of_ranks_is_ended_and_who_stood_still_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.killpg", lambda group, number: number == signal.SIGKILL and killed.append(group))
    for rank, number in ((0, 4001), (1, 4002)):
        (tmp_path / f"rank-{rank}.pid").write_text(str(number))
    assert standing_in(tmp_path) == ""
    (tmp_path / "standing.txt").write_text("rank 1 is in hang\n")
    kill_ranks(tmp_path)
    assert sorted(killed) == [4001, 4002]
    assert standing_in(tmp_path) == "rank 1 is in hang"
    assert not list(tmp_path.glob("*.pid"))


# --- a tune -----------------------------------------------------------------------------------------------------------


def test_how_ranks_share_a_step_is_a_knob_that_always_has_a_choice() -> None:
    space = open_space(GPT2, EIGHT)
    knob = next(knob for knob in space.knobs if knob.name == "ddp")
    assert knob.choices == ("ddp", "fsdp", "fsdp-keep", "fsdp-whole")
    assert all(len(set(recipe.rungs) & set(knob.choices)) == 1 for recipe in space.neighbours(space.start()))
    assert "ddp" in space.baseline().rungs
    assert "cuda-graphs" in space.left_out
    for name, why in NOT_MEASURED.items():
        assert why in space.left_out[name]
    assert open_space(GPT2, EIGHT, rungs=("bf16", "fsdp")).ways == ("ddp", "fsdp")
    assert open_space(GPT2, EIGHT, without=("ddp",)).ways == ("fsdp", "fsdp-keep", "fsdp-whole")
    assert open_space(GPT2, replace(EIGHT, ranks=1)).ways == ()


def test_the_search_begins_where_the_prediction_with_communication_says() -> None:
    """Memory is that of a rank: a model whose state does not fit one begins with the first way that does."""
    roomy = open_space(GPT2, EIGHT).start()
    assert "ddp" in roomy.rungs
    assert open_space(GPT2, EIGHT).predicted_rate(roomy) == rate_of_ranks(
        GPT2.shape, plan_of(roomy.rungs), roomy.micro_batch, EIGHT
    )
    tight = open_space(XL, EIGHT, memory_limit=20 * GIB)
    start = tight.start()
    assert set(start.rungs) & {"fsdp", "fsdp-keep"}
    assert tight.refuses(start) is None
    assert tight.refuses(replace(start, rungs=(*start.rungs[:-1], "ddp"), micro_batch=1)) is not None


def test_predicted_ranks_are_as_fast_as_estimate_says_and_no_faster_than_alone() -> None:
    plan = plan_of(("bf16", "flash", "ddp"))
    one = open_space(GPT2, replace(EIGHT, ranks=1)).predict(Recipe(rungs=("bf16", "flash"), micro_batch=16))
    together = rate_of_ranks(GPT2.shape, plan, 16, EIGHT)
    assert one is not None
    assert together is not None
    assert 4 < together / one.expected.tokens_per_second <= 8 * (1 + 1e-9)  # all of its traffic may hide; sums round
    assert rate_of_ranks(GPT2.shape, plan, 16, replace(EIGHT, name="a card that nobody knows")) is None


def test_tune_tries_sharding_where_memory_is_short_and_not_elsewhere() -> None:
    machine = tunes["Machine"](factors={"fsdp": 1.1, "fsdp-keep": 1.05, "ddp": 1.0})
    roomy = tunes["tuned"](machine, open_space(GPT2, EIGHT, micro_batch=16))
    assert not any({"fsdp", "fsdp-keep"} & set(job.recipe.rungs) for job in machine.jobs)
    assert {job.ranks for job in machine.jobs} == {8}
    best = roomy.best
    assert best is not None
    assert roomy.rate(best) == pytest.approx(8 * best.recipe.micro_batch * 1024 / best.step_seconds)

    short = tunes["Machine"](factors={"fsdp": 0.9, "ddp": 1.0})
    tuned = tunes["tuned"](short, open_space(GPT2, EIGHT, memory_limit=4 * GIB))
    assert any("fsdp" in job.recipe.rungs for job in short.jobs)
    assert tuned.best is not None


def test_a_rank_that_runs_out_of_memory_makes_the_start_smaller() -> None:
    machine = tunes["Machine"](fits=12)
    tuned = tunes["tuned"](machine, open_space(GPT2, EIGHT, global_batch=8 * 64))
    assert tuned.best is not None
    assert tuned.best.recipe.micro_batch <= 12
    assert all(64 % job.recipe.micro_batch == 0 for job in machine.jobs), "sizes that divide a rank's part"
    failed = [trial for trial in tuned.trials.values() if isinstance(trial.failure, Failure)]
    assert {trial.failure.kind for trial in failed} == {"oom"}


# --- traces -----------------------------------------------------------------------------------------------------------

MAIN, GLOO = 1, 3


def cpu_step() -> list[dict[str, Any]]:
    """100 us. The main thread computes, keeps books while a collective runs, and stands until it has ended.

    main   |mm 0-30|books 30-40|mm 40-60|........waits to 80|add 80-95|
    gloo             all_reduce 20 ------------------- 75
    """
    return [
        event(WINDOW, "user_annotation", 0, 100),
        event(STEP, "user_annotation", 0, 100),
        operator("aten::mm", 0, 30),
        operator("aten::mm", 40, 60),
        event("gloo:all_reduce", "user_annotation", 20, 75, GLOO),
        operator("aten::add", 80, 95),
    ]


def test_a_collective_costs_what_the_step_waits_for_it() -> None:
    timeline = read_timeline(cpu_step())
    spent: dict[str, float] = {}
    for segment in timeline.segments:
        spent[segment.group] = spent.get(segment.group, 0.0) + 1e6 * segment.seconds
    assert spent[COMMUNICATION] == pytest.approx(75 - 60)
    assert spent[IDLE] == pytest.approx(10 + 5 + 5), "books, and what comes after the collective has ended"
    assert sum(spent.values()) == pytest.approx(100)
    assert 1e6 * timeline.communication_seconds == pytest.approx(55)


def test_on_a_gpu_only_what_nothing_hides_is_exposed() -> None:
    events = [
        event(WINDOW, "user_annotation", 0, 100),
        event(STEP, "user_annotation", 0, 100),
        operator("aten::mm", 1, 5),
        launch(2, 10),
        kernel("nvjet_gemm", 10, 50, 10),
        operator("c10d::allreduce_", 6, 9),
        launch(7, 11),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30, 70, 11, 9),
        event("gloo:all_gather", "user_annotation", 75, 90, GLOO),
    ]
    timeline = read_timeline(events)
    exposed = sum(segment.seconds for segment in timeline.segments if segment.group == COMMUNICATION)
    assert 1e6 * exposed == pytest.approx(70 - 50)
    assert 1e6 * timeline.communication_seconds == pytest.approx(40), "hosts that talk do not hold the device up"


def test_collectives_on_a_gpu_are_told_apart_by_their_mesh() -> None:
    """Two sums of a layer, one of them while gradients are averaged; one that no mesh has made leaves all unknown."""

    def nccl(start: float, end: float, number: int, mesh: str) -> dict[str, Any]:
        found = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, end, number, 9)
        return {**found, "args": {**found["args"], "Process Group Description": mesh}}

    steps = [event(WINDOW, "user_annotation", 0, 100), event(STEP, "user_annotation", 0, 100)]
    both = [nccl(30, 55, 2, "mesh_shard"), nccl(40, 60, 4, "mesh_replicate")]  # of data with replicas, partly at once
    events = [*steps, nccl(10, 20, 1, "mesh_tp"), *both, nccl(50, 65, 3, "mesh_tp")]
    found = read_timeline(events)
    assert found.communication_by_group is not None
    assert {name: 1e6 * seconds for name, seconds in found.communication_by_group.items()} == {
        "tensor": pytest.approx(25),
        "data": pytest.approx(30),
    }
    assert 1e6 * found.communication_seconds == pytest.approx(45), "each moment once"
    assert read_timeline([*events, nccl(70, 80, 4, "default_pg")]).communication_by_group is None
    assert read_timeline(cpu_step()).communication_by_group is None


def test_a_union_has_every_moment_once() -> None:
    assert list(union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)])) == [(0.0, 4.0), (5.0, 7.0)]
    assert list(union([])) == []


# --- which rungs count ------------------------------------------------------------------------------------------------

MINE = ("bf16", "tied-weights", "fused-loss", "fused-backward")


@pytest.mark.parametrize(
    ("more", "layout", "expected"),
    [
        (("ddp",), Ranked(), ()),
        (("fsdp",), Ranked(), ()),
        (("tensor-parallel", "pipeline-gpipe", "fsdp-keep"), Ranked(), ()),
        ((), Ranked(ranks=4), ("ddp",)),
        (("fsdp-keep",), Ranked(ranks=4), ("fsdp-keep",)),
        (("fsdp",), Ranked(ranks=4, tensor=4), ("tensor-parallel",)),
        (("tensor-parallel", "fsdp"), Ranked(ranks=4, pipeline=2), ("pipeline-parallel", "fsdp")),
        (("pipeline-gpipe",), Ranked(ranks=2, pipeline=2), ("pipeline-gpipe",)),
    ],
    ids=["ddp", "fsdp", "everything", "several", "their-way", "no-data", "stages", "their-order"],
)
def test_rungs_of_degrees_of_one_are_left_out_with_what_they_undo(
    more: tuple[str, ...], layout: Ranked, expected: tuple[str, ...]
) -> None:
    found = for_layout((*MINE, *more), layout)
    assert found == (*MINE, *expected)
    if not expected:
        assert plan_of(found) == plan_of(MINE)
        assert plan_of(found).backward == plan_of(found).loss == "fused"
