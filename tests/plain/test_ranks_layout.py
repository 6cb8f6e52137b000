"""Ranks of a measurement that share layers, without starting any: what is refused, asked, counted and predicted."""

from __future__ import annotations

import io
import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from redline.cli import main
from redline.commands.ranks import layout_of as train_layout_of
from redline.core.errors import UserError
from redline.core.hardware import Hardware, known_device
from redline.core.interconnects import choose_links
from redline.core.layout import Layout
from redline.core.values import from_json, to_json
from redline.core.workload import Source
from redline.predict.communication import Fabric
from redline.predict.fitting import Case, case_of
from redline.predict.layouts import expected_peaks, predict_parallel
from redline.predict.memory import predict_memory
from redline.predict.parallel import Layout as Cut
from redline.report.next_steps import text_options
from redline.report.table import layout_of, print_ladder, ranks_text, sharing_text, step_of_ranks
from redline.rungs import find_rung, plan_of
from redline.search.answers import graph_key
from redline.search.document import ladder_document
from redline.search.ladder import notes_of_ways, open_ladder
from redline.search.ranks import (
    check_measured,
    layout_for,
    not_measured,
    notes_of_rungs,
    ranked_rungs,
    rate_of_ranks,
    refused_beside,
    undone_in,
    usual_beside,
)
from redline.search.space import open_space
from redline.workloads import resolve_workload

HERE = Path(__file__)
climbs = runpy.run_path(str(HERE.with_name("test_climb.py")))
tunes = runpy.run_path(str(HERE.with_name("test_tune.py")))
GPT2 = resolve_workload("gpt2")
SQUARE, PAIR, COPIES = Layout(ranks=4, tensor=2), Layout(ranks=2, tensor=2), Layout(ranks=4, replicas=2)
PAIR_OF_DATA = Layout(ranks=2)
RUN = {"versions": {}, "command": "", "date": "", "settings": {}}


def machine_with(layout: Layout, hardware: Any = climbs["H200"]) -> Hardware:
    return replace(hardware, count=layout.ranks, ranks=layout.ranks, layout=None if layout.is_plain else layout)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "one-process": (("--tensor", "2"), "--tensor 2 with one process", "say --gpus 2 too"),
    "no-replicas": (("--gpus", "3", "--tensor", "2"), "3 GPUs cannot", "2 or 4 GPUs, or --tensor"),
    "copies": (("--gpus", "4", "--replicas", "3"), "4 ranks with data of their own cannot be 3 replicas", "1 or 2"),
    "uncut": (
        ("--gpus", "4", "--replicas", "4"),
        "--replicas 4 leaves one rank to each copy",
        "or use --replicas 2",
    ),
    "zero": (("--gpus", "2", "--tensor", "0"), "--tensor is 0", ""),
}


@pytest.mark.parametrize("name", ["ladder", "tune", "profile"])
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_layouts_that_no_model_allows_are_refused_in_the_same_words(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("redline.search.words", "redline.search.launch"):
        monkeypatch.setattr(f"{place}.probe_machine", lambda _: pytest.fail("the machine was asked"))
    words, problem, fix = REFUSED[case]
    out = tmp_path / "run"
    assert main([name, "tiny", *words, "--device", "cpu", "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert fix in told
    assert not out.exists()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_train_refuses_the_same(case: str) -> None:
    words, problem, fix = REFUSED[case]
    given = {name.removeprefix("--"): int(size) for name, size in zip(words[::2], words[1::2], strict=True)}
    degrees = SimpleNamespace(**{"tensor": None, "pipeline": None, "replicas": None, **given})
    with pytest.raises(UserError, match=problem) as caught:
        train_layout_of(degrees, given.get("gpus", 1), GPT2)  # type: ignore[arg-type]
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["ladder", "tune", "profile"])
def test_heads_that_do_not_divide_are_refused_with_the_nearest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(climbs["H200"], count=8)
    for place in ("redline.search.words", "redline.search.launch"):
        monkeypatch.setattr(f"{place}.probe_machine", lambda _: (here, {"torch": "2.13.0"}))
    out = tmp_path / "run"
    assert main([name, "gpt2", "--gpus", "8", "--tensor", "8", "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert "12 heads cannot be shared by" in told
    assert "use --tensor 4" in told
    assert not out.exists()


def test_a_model_of_others_has_no_table_of_cuts() -> None:
    other = replace(GPT2, source=Source(kind="huggingface"))
    with pytest.raises(UserError, match="--tensor 2 does not apply here") as caught:
        check_measured(ranked_rungs((), PAIR), PAIR, other, machine_with(PAIR))
    assert "built-in GPT only" in caught.value.why
    assert "or leave it out" in caught.value.fix


def test_copies_of_what_nobody_cuts_are_refused_as_in_train() -> None:
    with pytest.raises(UserError, match="--replicas 2 with ddp"):
        check_measured(("ddp",), COPIES, GPT2, machine_with(COPIES))


# --- where they begin, and which rungs there are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rungs", "layout", "expected"),
    [
        ((), Layout(), ()),
        (("ddp",), Layout(), ("ddp",)),
        (("bf16",), Layout(ranks=4), ("bf16", "ddp")),
        (("bf16",), SQUARE, ("bf16", "tensor-parallel", "ddp")),
        (("fsdp", "bf16"), SQUARE, ("bf16", "tensor-parallel", "fsdp")),
        (("tensor-parallel", "ddp", "bf16"), SQUARE, ("bf16", "tensor-parallel", "ddp")),
        (("bf16", "ddp"), PAIR, ("bf16", "tensor-parallel")),
        ((), COPIES, ("fsdp",)),
        (("fsdp-keep",), COPIES, ("fsdp-keep",)),
        (("tensor-parallel",), Layout(ranks=2), ("tensor-parallel", "ddp")),
    ],
    ids=["alone", "alone-asked", "data", "square", "their-way", "again", "no-data", "copies", "kept", "no-degree"],
)
def test_what_ranks_begin_with(rungs: tuple[str, ...], layout: Layout, expected: tuple[str, ...]) -> None:
    assert ranked_rungs(rungs, layout) == expected


def test_a_way_that_is_left_out_is_told() -> None:
    assert list(notes_of_ways(("bf16", "ddp"), ranked_rungs(("bf16", "ddp"), PAIR))) == [
        "ddp is left out: nobody has data of their own in this layout"
    ]
    assert list(notes_of_ways(("ddp",), ranked_rungs(("ddp",), SQUARE))) == []


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("tensor-parallel", Layout(ranks=4), "--tensor N says how many do"),
        ("tensor-parallel", SQUARE, None),
        ("fsdp", PAIR, "the 2 ranks of the tensor group are all there are"),
        ("fsdp", SQUARE, None),
        ("ddp", COPIES, "nothing to cut into --replicas 2"),
        ("pipeline-gpipe", SQUARE, "a measured step is one micro batch"),
        ("ddp", Layout(), None),
    ],
    ids=["no-group", "group", "no-data", "data", "copies", "stages", "alone"],
)
def test_rungs_of_other_layouts_are_no_choice(name: str, layout: Layout, why: str | None) -> None:
    found = not_measured(name, layout)
    assert (found is None) if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("name", "onto", "why"),
    [
        ("fused-loss", ("tensor-parallel",), "tensor-parallel undoes it"),
        ("fused-backward", ("bf16", "compile", "fsdp"), "fsdp undoes it"),
        ("muon", ("tensor-parallel", "ddp"), "tried with whole ones only"),
        ("fused-adamw", ("tensor-parallel", "ddp"), None),
        ("fused-loss", ("ddp",), None),
        ("fsdp", ("tensor-parallel",), None),
    ],
    ids=["undone", "undone-by-fsdp", "refused", "adamw", "ddp", "both"],
)
def test_what_has_no_place_beside_the_ways_to_share(name: str, onto: tuple[str, ...], why: str | None) -> None:
    found = refused_beside(find_rung(name), onto, GPT2, machine_with(SQUARE))
    assert (found is None) if why is None else why in (found or "")


def test_the_usual_rungs_beside_a_cut_change_its_step() -> None:
    """Each of them: what the cut undoes is not named."""
    rungs = usual_beside(("tensor-parallel",), GPT2, machine_with(PAIR))
    assert {"bf16", "compile", "flash", "fused-adamw"} <= set(rungs)
    assert not {"fused-loss", "fused-backward"} & set(rungs)
    whole = plan_of((*rungs, "tensor-parallel"))
    assert all(plan_of((*(one for one in rungs if one != name), "tensor-parallel")) != whole for name in rungs)


# --- a ladder ---------------------------------------------------------------------------------------------------------


def square_climb(machine: Any, rungs: tuple[str, ...] = ("fused-loss", "fsdp", "tensor-parallel")) -> Any:
    start = ranked_rungs((), SQUARE)
    return climbs["climbed"](machine, machine_with(SQUARE), rungs=rungs, start=start)


def test_a_ladder_in_a_layout_begins_with_it_and_counts_a_groups_tokens_once() -> None:
    machine = climbs["Machine"](factors={"fsdp": 0.5})
    climb = square_climb(machine, ("fused-loss", "fsdp"))
    first, undone, cut = climb.finished
    assert (first.name, first.title, first.recipe.rungs) == (
        "tensor-parallel",
        "tensor-parallel + ddp",
        ("tensor-parallel", "ddp"),
    )
    assert (undone.status, undone.reason) == ("skipped", "tensor-parallel undoes it: the step would be the same")
    assert (cut.status, cut.recipe.rungs) == ("ok", ("tensor-parallel", "fsdp"))
    assert {(job.ranks, job.layout, job.global_batch) for job in machine.jobs} == {(4, SQUARE, 2 * 4)}
    assert {job.recipe.rungs for job in machine.jobs if job.kind == "reference"} == {()}

    document = ladder_document(climb, RUN, True)
    row = document["rows"][0]
    assert row["tokens_per_second"] == pytest.approx(2 * 4 * 16 / row["step_seconds"]["median"])
    alone = ladder_document(climbs["climbed"](climbs["Machine"](), rungs=()), RUN, True)["rows"][0]
    per_token = alone["mfu"] / alone["tokens_per_second"]
    assert row["mfu"] == pytest.approx(per_token * row["tokens_per_second"] / 4), "a share of four peaks"
    shape, plan = climb.workload.shape, plan_of(("tensor-parallel", "fsdp"))
    held = predict_memory(shape, plan, micro_batch=4, layout=Cut(gpus=4, tp=2), zero=3).allocated
    assert document["rows"][2]["predicted_peak_bytes"] == held
    assert document["hardware"]["layout"] == {"ranks": 4, "tensor": 2, "pipeline": 1, "replicas": 1}


def test_another_layout_is_another_question() -> None:
    machine = climbs["Machine"]()
    square_climb(machine, ())
    job = machine.jobs[-1]
    assert replace(job, layout=None).key not in (job.key, replace(job, layout=COPIES).key)
    assert graph_key(job) != graph_key(replace(job, layout=None))
    assert from_json(type(job), to_json(job)) == job
    assert (replace(job, kind="reference").processes, job.processes) == (1, 4)


def test_a_run_that_goes_on_keeps_its_layout(tmp_path: Path) -> None:
    climb = square_climb(climbs["Machine"](), ())
    record = {**RUN, "workload": to_json(climb.workload), "hardware": to_json(climb.hardware)}
    record["settings"] = to_json(climb.settings)
    (tmp_path / "run.json").write_text(json.dumps({**record, "kind": "ladder"}))
    found = open_ladder(tmp_path)
    assert found.hardware.arranged == SQUARE
    assert found.hardware == climb.hardware


def test_the_header_has_the_layout_and_the_next_commands_too() -> None:
    document = ladder_document(square_climb(climbs["Machine"](), ()), RUN, True)
    assert ranks_text(document) == "4 ranks: tensor 2 x data 2"
    assert layout_of({"hardware": {"ranks": 4, "layout": "damaged"}}) == Layout(ranks=4)
    screen = io.StringIO()
    print_ladder(document, Console(file=screen, width=100))
    shown = " ".join(screen.getvalue().split())
    assert "4 ranks: tensor 2 x data 2" in shown
    assert "a step is 2 micro batches, one on each group of 2 ranks: tok/s counts all of them" in shown
    assert max(map(len, screen.getvalue().splitlines())) <= 100
    assert " ".join(text_options(document)).endswith("--gpus 4 --tensor 2")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(ranks=4), "a step is 4 micro batches, one on each"),
        (PAIR, "a step is one micro batch, which 2 ranks compute together"),
        (SQUARE, "a step is 2 micro batches, one on each group of 2 ranks"),
    ],
    ids=["data", "layers", "both"],
)
def test_what_a_step_is(layout: Layout, words: str) -> None:
    assert step_of_ranks(layout) == words


def test_communication_is_told_by_what_is_shared_where_both_are() -> None:
    sharing = {"communication_seconds": 0.004, "exposed_seconds": 0.001, "straggler_seconds": 0.0}
    both = sharing_text({**sharing, "by_group": {"tensor": 0.003, "data": 0.002}})
    assert "4.00 ms of communication a step (3.00 ms about layers, 2.00 ms about gradients and weights), of" in both
    assert "(" not in sharing_text({**sharing, "by_group": {"tensor": 0.004}})
    assert "(" not in sharing_text(sharing)


# --- a tune -----------------------------------------------------------------------------------------------------------

EIGHT_BY_TWO = machine_with(Layout(ranks=8, tensor=2), tunes["H200"])


def test_every_recipe_of_a_search_is_in_the_layout() -> None:
    space = open_space(GPT2, EIGHT_BY_TWO)
    assert space.cuts == ("tensor-parallel",)
    assert space.ways == ("ddp", "fsdp", "fsdp-keep", "fsdp-whole")
    start = space.start()
    for recipe in (space.baseline(), start, *space.neighbours(start)):
        assert "tensor-parallel" in recipe.rungs
        assert len(set(recipe.rungs) & set(space.ways)) == 1
    assert "undoes it" in space.left_out["fused-loss"]
    assert "tensor-parallel" not in {choice for knob in space.knobs for choice in knob.choices}
    assert open_space(GPT2, machine_with(Layout(ranks=2, tensor=2), tunes["H200"])).ways == ()


def test_copies_are_searched_among_the_ways_that_cut() -> None:
    space = open_space(GPT2, machine_with(COPIES, tunes["H200"]), rungs=("bf16",))
    assert space.ways == ("fsdp",)
    assert open_space(GPT2, machine_with(COPIES, tunes["H200"])).ways == ("fsdp", "fsdp-keep", "fsdp-whole")
    assert "fsdp" in space.start().rungs
    assert "nothing to cut" in space.left_out["ddp"]


def test_a_search_counts_a_groups_tokens_once_and_divides_by_those_with_data() -> None:
    machine = tunes["Machine"](fits=12)
    space = open_space(GPT2, EIGHT_BY_TWO, rungs=("bf16", "flash"), global_batch=4 * 3)
    assert space.start().micro_batch == 3
    tuned = tunes["tuned"](machine, space)
    best = tuned.best
    assert best is not None
    assert {job.layout for job in machine.jobs} == {Layout(ranks=8, tensor=2)}
    assert {job.recipe.micro_batch for job in machine.jobs} == {1, 3}, "sizes that divide a group's part"
    assert tuned.rate(best) == pytest.approx(4 * best.recipe.micro_batch * 1024 / best.step_seconds)


# --- predictions ------------------------------------------------------------------------------------------------------


def test_a_rank_holds_its_part_of_layers_and_copies() -> None:
    plan = plan_of(("bf16", "flash", "tensor-parallel", "fsdp"))
    found = case_of(GPT2.shape, plan, Layout(ranks=16, tensor=2, replicas=2)).memory(4)
    assert found == predict_memory(GPT2.shape, plan, micro_batch=4, layout=Cut(gpus=8, tp=2), zero=3)
    copies = case_of(GPT2.shape, plan, Layout(ranks=4, tensor=2, replicas=2)).memory(4)  # each whole, of one shard
    assert copies == predict_memory(GPT2.shape, plan, micro_batch=4, layout=Cut(gpus=2, tp=2), zero=0)


def test_the_rate_is_what_estimate_predicts_of_the_layout() -> None:
    plan = plan_of(("bf16", "flash", "tensor-parallel", "ddp"))
    device = known_device(EIGHT_BY_TWO.name, EIGHT_BY_TWO.multiprocessors)
    assert device is not None
    case = Case(shape=GPT2.decoder, plan=plan, layout=Cut(gpus=8, tp=2, micro_batch=16))
    fabric = Fabric(gpus_per_node=8, links=choose_links(None, device))
    expected = predict_parallel(case, fabric, expected_peaks(plan, device, None)).tokens_per_second
    assert rate_of_ranks(GPT2.shape, plan, 16, EIGHT_BY_TWO) == expected
    copies, fabric = machine_with(COPIES, tunes["H200"]), replace(fabric, gpus_per_node=4)
    plan = plan_of(("bf16", "flash", "fsdp"))
    case = Case(shape=GPT2.decoder, plan=plan, layout=Cut(gpus=4, replicas=2, micro_batch=16), zero=3)
    expected = predict_parallel(case, fabric, expected_peaks(plan, device, None)).tokens_per_second
    assert rate_of_ranks(GPT2.shape, plan, 16, copies) == expected


def test_degrees_that_nobody_gives_are_one() -> None:
    assert layout_for(4, {"tensor": None, "replicas": None}) == Layout(ranks=4)
    assert layout_for(4, {"tensor": 2}) == SQUARE


@pytest.mark.parametrize(
    ("names", "undone"),
    [
        (("bf16", "fused-loss", "ddp"), {}),
        (("bf16", "compile", "fused-loss", "fused-backward", "fsdp"), {"fused-backward": "fsdp"}),
        (("bf16", "compile", "fused-loss", "fused-backward", "tuned-matmuls", "fp8-head", "fsdp-whole"), {}),
        (
            ("bf16", "fused-loss", "fused-backward", "tensor-parallel", "fsdp-whole"),
            {"fused-loss": "tensor-parallel", "fused-backward": "tensor-parallel"},
        ),
        (("bf16", "chunked-loss", "tensor-parallel", "ddp"), {"chunked-loss": "tensor-parallel"}),
        (("bf16", "fused-loss", "fused-backward"), {}),
    ],
    ids=["ddp", "fsdp", "whole", "whole-tensor", "tensor", "alone"],
)
def test_what_a_layout_undoes_is_told(names, undone):
    assert undone_in(names) == undone


@pytest.mark.parametrize(
    ("names", "layout", "notes"),
    [
        (
            ("pipeline-gpipe", "fsdp"),
            PAIR_OF_DATA,
            ["pipeline-gpipe changes nothing here: it takes --pipeline 2 or more"],
        ),
        (
            ("tensor-parallel", "ddp"),
            PAIR_OF_DATA,
            ["tensor-parallel changes nothing here: it takes --tensor 2 or more"],
        ),
        (("bf16", "fused-backward", "fsdp"), PAIR_OF_DATA, ["fused-backward changes nothing here: fsdp undoes it"]),
        (("pipeline-gpipe", "ddp"), Layout(ranks=2, pipeline=2), []),
        # What one stage does not undo is not told as undone.
        (
            ("bf16", "fused-backward", "pipeline-gpipe", "ddp"),
            PAIR_OF_DATA,
            ["pipeline-gpipe changes nothing here: it takes --pipeline 2 or more"],
        ),
    ],
    ids=["stages", "tensor", "undone", "two-stages", "not-undone"],
)
def test_rungs_that_change_nothing_in_a_layout_are_told(names, layout, notes):
    assert list(notes_of_rungs(names, layout)) == notes
