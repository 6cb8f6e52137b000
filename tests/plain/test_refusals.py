"""Refusals of ranks, layouts and batches: whatever one proposes, the check that refused accepts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from redline import cli
from redline.commands.ranks import check_resumed_shares, check_shares, layout_of
from redline.commands.train_order import global_sequences
from redline.commands.train_recipe import check_needs, check_parallel, shared_recipe
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Source, Workload
from redline.predict.parallel import Beside, check_cut_copies
from redline.search.ranks import check_cuts, check_global_batch, check_ranks, layout_for, uncut_copies
from redline.workloads import PRESETS

quick = settings(deadline=None, max_examples=100)  # another run on the same cores must not fail a test
few, some = st.integers(1, 6), st.integers(1, 24)
TINY = PRESETS["tiny"]
CUDA = Hardware(kind="cuda", name="a GPU", count=8, cpu_cores=8, features=("bf16",))
LLAMA = replace(TINY, source=Source(kind="huggingface", config={"model_type": "llama"}))


def refused(check: Any, *given_: Any, **more: Any) -> str | None:
    """The fix; None where nothing is refused."""
    try:
        check(*given_, **more)
    except UserError as error:
        return error.fix
    return None


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def model(heads: int, layers: int) -> Workload:
    shape = replace(TINY.decoder, heads=heads, layers=layers, d_model=64 * heads, d_ff=720)
    return replace(TINY, shape=shape)


# --- layouts ----------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(2, 40), few, few, some, some, st.sampled_from([None, 1, 2, 4, 6]))
def test_cuts_and_ranks_that_are_proposed_are_accepted(ranks, tensor, pipeline, heads, layers, in_a_node):
    """By --gpus all ranks are in one node; torchrun says how many are."""
    cut, workload = {"tensor": tensor, "pipeline": pipeline, "replicas": 1}, model(heads, layers)
    with pytest.MonkeyPatch.context() as patch:
        if in_a_node is not None:
            patch.setenv("LOCAL_WORLD_SIZE", str(in_a_node))
        fix = refused(check_cuts, cut, ranks, workload)
        divides = not (heads % tensor or 720 % tensor or layers % pipeline or ranks % (tensor * pipeline))
        assert (fix is None) == (divides and (in_a_node or ranks) % tensor == 0)
        for number in numbers(fix.split(" GPUs")[0]) if fix and " GPUs" in fix else ():
            check_cuts(cut, number, workload)
        for words in re.split(r",? or (?=--)", fix.removeprefix("use ")) if fix else ():
            if words.startswith("--"):
                other = {name: int(size) for name, size in re.findall(r"--(\w+) (\d+)", words)}
                check_cuts({"tensor": 1, "pipeline": 1, "replicas": 1, **other}, ranks, workload)


def proposals(fix: str, **said: int) -> list[dict[str, int]]:
    """Each as the options that it comes to, on top of what was said: '6 or 8 GPUs, or --tensor 2 with --replicas 1', '6
    or 8 GPUs, or 2 GPUs with --tensor 2'."""
    found = []
    for words in re.split(r",? or (?=--|neither|\d+ GPUs? with)", fix.removeprefix("use ")):
        if words.endswith(("GPU", "GPUs")):
            found += [{**said, "gpus": number} for number in numbers(words)]
            continue
        cut = {"tensor": 1, "pipeline": 1}
        if elsewhere := re.fullmatch(r"(\d+) GPUs? with (.*)", words):
            cut, words = {**cut, "gpus": int(elsewhere[1])}, elsewhere[2]
        options = {name.replace("-", "_"): int(size) for name, size in re.findall(r"--([a-z-]+) (\d+)", words)}
        assert options or words == "neither --tensor nor --pipeline", fix
        found.append({**said, **cut, **options})
    return found


@quick
@given(st.integers(2, 24), few, few, some, some, st.integers(1, 3), st.integers(1, 8), st.integers(1, 64))
def test_what_train_proposes_for_a_layout_goes_with_its_batch_and_its_copies(
    gpus, tensor, pipeline, heads, layers, replicas, micro_batch, global_batch
):
    """The refusal of a cut, then that of the batch: nobody who did as told meets the second."""
    workload = model(heads, layers)

    def check(gpus, micro_batch, global_batch, **degrees):
        beside = Beside(micro_batch=micro_batch, batch=global_batch)
        layout = layout_of(SimpleNamespace(**degrees), gpus, workload, beside)
        check_shares(micro_batch, global_batch, layout)

    said = {"gpus": gpus, "tensor": tensor, "pipeline": pipeline, "replicas": replicas}
    said |= {"micro_batch": micro_batch, "global_batch": global_batch}
    cut = {"tensor": tensor, "pipeline": pipeline, "replicas": replicas}
    beside = Beside(micro_batch=micro_batch, batch=global_batch)
    fix = refused(check_cuts, cut, gpus, workload, beside=beside)
    for proposed in proposals(fix, **said) if fix else ():
        check(**proposed)


@quick
@given(st.integers(2, 24), few, some, st.integers(1, 3), st.integers(1, 64))
def test_what_measurements_propose_for_a_layout_goes_with_their_batch(gpus, tensor, heads, replicas, global_batch):
    workload = model(heads, 12)

    def check(gpus, global_batch, **degrees):
        cut = {"tensor": degrees["tensor"], "replicas": degrees["replicas"]}
        assert degrees.get("pipeline", 1) == 1  # there is no such option
        check_global_batch(global_batch, layout_for(gpus, cut, workload).data)

    cut = {"tensor": tensor, "replicas": replicas}
    fix = refused(check_cuts, {**cut, "pipeline": 1}, gpus, workload, beside=Beside(batch=global_batch, stages=False))
    for proposed in proposals(fix, gpus=gpus, **cut, global_batch=global_batch) if fix else ():
        check(**proposed)


@quick
@given(st.integers(2, 24), few, few, some, some, st.integers(1, 8), st.integers(1, 64))
def test_cuts_that_are_proposed_to_a_run_that_goes_on_keep_its_batch(
    gpus, tensor, pipeline, heads, layers, micro_batch, global_batch
):
    workload, kept = model(heads, layers), Beside(micro_batch=micro_batch, batch=global_batch, option=None)
    fix = refused(check_cuts, {"tensor": tensor, "pipeline": pipeline, "replicas": 1}, gpus, workload, beside=kept)
    if fix is None:
        return
    for proposed in proposals(fix, gpus=gpus, tensor=tensor, pipeline=pipeline, micro_batch=micro_batch):
        assert "global_batch" not in proposed
        size, degrees = proposed["micro_batch"], {name: proposed[name] for name in ("tensor", "pipeline")}
        layout = layout_for(proposed["gpus"], degrees, workload)
        check_resumed_shares("runs/mine", size, global_batch, layout)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("train tiny --gpus 8 --tensor 3 --micro-batch 1 --global-batch 4", "use --tensor 4 or --tensor 2"),
        ("train tiny --gpus 8 --tensor 3 --micro-batch 1 --global-batch 2", "use --tensor 4"),
        (
            "train tiny --gpus 2 --tensor 3 --micro-batch 4 --global-batch 2",
            "use --tensor 2 with --micro-batch 2 or --tensor 1 with --micro-batch 1",
        ),
        (
            "train tiny --gpus 9 --tensor 3 --micro-batch 1 --global-batch 4",
            "use --tensor 1 with --global-batch 9",
        ),
        (
            "train tiny --sequence 64 --gpus 9 --tensor 3 --micro-batch 1 --batch-tokens 256",
            "use --tensor 1 with --batch-tokens 576",
        ),
        (
            "train tiny --gpus 3 --tensor 3 --micro-batch 16 --global-batch 8",
            "use --tensor 1 with --global-batch 9 and --micro-batch 3",
        ),
        ("train tiny --gpus 8 --tensor 3 --replicas 4", "use --tensor 1"),
        (
            "train tiny --tensor 2 --replicas 2 --micro-batch 1 --global-batch 3",
            "say --gpus 8 with --global-batch 4 too",
        ),
        ("estimate tiny --gpus 8 --tensor 3 --micro-batch 1 --global-batch 2", "use --tensor 4"),
        (
            "estimate tiny --gpus 8 --dp 2 --micro-batch 1 --global-batch 2",
            "use --dp 8, or leave --dp out, with --global-batch 8",
        ),
        ("ladder tiny --gpus 8 --tensor 3 --rebatch --global-batch 2", "use --tensor 4"),
    ],
    ids=lambda words: words if words.startswith(("train ", "estimate ", "ladder ")) else "",
)
def test_what_commands_propose_goes_with_the_batch(capsys, words, fix):
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.removeprefix("fix:     ").split(", or leave --tensor")[0] == fix


def test_a_number_of_ranks_is_no_way_out_where_the_heads_do_not_divide():
    """TINY has 4 heads: three ranks would be refused next."""
    fix = refused(check_cuts, {"tensor": 3, "pipeline": 1, "replicas": 1}, 2, TINY)
    assert fix == "use --tensor 2 or --tensor 1"


@quick
@given(few, few, few)
def test_one_process_is_told_how_many_ranks_its_layout_takes(tensor, pipeline, replicas):
    asked = SimpleNamespace(tensor=tensor, pipeline=pipeline, replicas=replicas)
    workload = model(60, 60)
    fix = refused(layout_of, asked, 1, workload)
    if fix is None:
        assert tensor == pipeline == replicas == 1
        return
    (ranks,) = numbers(fix.split(" too")[0])
    assert fix.startswith(f"say --gpus {ranks} too, or leave --")
    assert layout_of(asked, ranks, workload).ranks == ranks
    assert replicas == 1 or layout_of(asked, ranks, workload).shards > 1
    assert layout_of(asked, 2 * ranks, workload).ranks == 2 * ranks


def test_torchrun_is_told_in_its_own_options(monkeypatch):
    """One rank of a job whose layout takes two, as after a node was lost: --gpus is refused there."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    fix = refused(layout_of, SimpleNamespace(tensor=2, pipeline=None, replicas=None), 1, TINY)
    assert fix == "start torchrun with --nproc-per-node 2, or leave --tensor 2 out: a checkpoint goes on without"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    assert refused(check_ranks, CUDA, 9) == "use --nproc-per-node 8"
    assert refused(check_ranks, replace(CUDA, count=1), 9) == "use --nproc-per-node 1"
    assert refused(check_ranks, replace(CUDA, kind="cpu", cpu_cores=1), 9) == "use --nproc-per-node 8 or fewer"


@quick
@given(st.integers(2, 40), st.integers(1, 12))
def test_replicas_that_are_proposed_are_accepted(ranks, replicas):
    fix = refused(layout_of, SimpleNamespace(tensor=None, pipeline=None, replicas=replicas), ranks, TINY)
    assert (fix is None) == (replicas == 1 or (ranks % replicas == 0 and replicas < ranks))
    for number in numbers(fix or ""):
        layout_of(SimpleNamespace(tensor=None, pipeline=None, replicas=number), ranks, TINY)


def test_torchruns_ranks_that_are_left_go_on_uncut_and_are_told(monkeypatch):
    """Of eight with --replicas 2 two are left: a job that can go on does."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    layout = layout_of(SimpleNamespace(tensor=None, pipeline=None, replicas=2), 2, TINY)
    assert uncut_copies(layout).startswith("--replicas 2 of 2 ranks with data of their own: nothing is cut then")
    assert uncut_copies(replace(layout, ranks=4)) is None
    assert uncut_copies(Layout(ranks=2)) is None


# --- batches ----------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 100))
def test_batches_that_train_proposes_are_accepted(data, micro_batch, global_batch):
    """The settings have a check of their own, which knows nothing of ranks: what it accepts too is what counts."""

    def check(size: int, whole: int) -> None:
        check_shares(size, whole, Layout(ranks=data))
        TrainSettings(micro_batch=size, global_batch=whole, learning_rate=1e-3, budget=Budget(steps=1))

    fix = refused(check, micro_batch, global_batch)
    assert (fix is None) == (global_batch % (data * micro_batch) == 0)
    for words in fix.removeprefix("set --global-batch to ").split(", or ") if fix else ():
        if words.startswith("--micro-batch to "):
            for size in numbers(words):
                check(size, global_batch)
        elif "with --micro-batch" in words:
            whole, size = numbers(words)
            check(size, whole)
        elif words != "choose another --micro-batch":
            for whole in numbers(words):
                check(micro_batch, whole)


@quick
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 5000))
def test_tokens_that_train_proposes_are_accepted(data, micro_batch, tokens):
    def check(count: int) -> None:
        options = SimpleNamespace(batch_tokens=count, global_batch=None)
        check_shares(micro_batch, global_sequences(options, 16, micro_batch, data), Layout(ranks=data))

    fix = refused(check, tokens)
    assert (fix is None) == (tokens % (16 * data * micro_batch) == 0)
    for count in numbers(fix.split(",")[0]) if fix else ():
        check(count)


@quick
@given(few, st.integers(1, 3), st.integers(1, 8), st.integers(1, 48), st.sampled_from([1, 2, 3]))
def test_ways_to_go_on_are_accepted(data, tensor, micro_batch, global_batch, replicas):
    """A run keeps its global batch: other ranks, a smaller micro batch or both must do, with the layout's degrees."""
    assume(data % replicas == 0)
    layout = Layout(ranks=data * tensor, tensor=tensor, replicas=replicas)
    fix = refused(check_resumed_shares, "runs/mine", micro_batch, global_batch, layout)
    assert (fix is None) == (global_batch % (data * micro_batch) == 0)
    both = fix is not None and re.search(r"(and|,) --micro-batch 1", fix)
    copies = 1 if fix and "no --replicas" in fix else replicas
    for words in re.split(r" or (?=with)", fix.removeprefix("go on ")) if fix else ():
        if words.startswith("with --micro-batch"):
            check_resumed_shares("runs/mine", numbers(words)[0], global_batch, layout)
            continue
        counts = numbers(words.split(" rank")[0])
        assert counts
        for ranks in counts:
            other = Layout(ranks=ranks, tensor=tensor, replicas=copies)
            check_cut_copies(other.data, copies)
            check_resumed_shares("runs/mine", 1 if both else micro_batch, global_batch, other)


@quick
@given(st.integers(1, 100), st.integers(1, 12))
def test_batches_that_measurements_propose_are_accepted(global_batch, ranks):
    for number in numbers(refused(check_global_batch, global_batch, ranks) or ""):
        check_global_batch(number, ranks)


# --- the option that is at fault --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rungs", "way", "layout", "problem", "fix"),
    [
        ("lion", None, Layout(ranks=2, tensor=2), "--tensor 2", "leave --tensor 2 out"),
        ("lion", None, Layout(ranks=2, pipeline=2), "--pipeline 2", "leave --pipeline 2 out"),
        ("lion", "fsdp", Layout(ranks=4, tensor=2), "--tensor 2", "leave --tensor 2 out and say --parallel ddp"),
        ("lion", "fsdp", Layout(ranks=2), "fsdp", "say --parallel ddp"),
        (
            "lion",
            None,
            Layout(ranks=8, tensor=2, replicas=2),
            "--tensor 2",
            "leave --tensor 2 out and say --parallel ddp without --replicas",
        ),
        ("lion", "fsdp", Layout(ranks=4, replicas=2), "fsdp", "say --parallel ddp without --replicas"),
        ("cuda-graphs", None, Layout(ranks=2, tensor=2), "--tensor 2", ""),
    ],
    ids=["tensor", "pipeline", "both", "way", "tensor-copies", "copies", "graphs"],
)
def test_the_fix_names_the_options_that_are_at_fault(rungs, way, layout, problem, fix):
    """And what it proposes applies; where nothing of the layout would help, it proposes another recipe alone."""
    recipe = shared_recipe(Recipe(rungs=(rungs,), micro_batch=1), way, layout)
    hardware = replace(CUDA, ranks=layout.ranks)
    with pytest.raises(UserError, match=f"{problem} does not apply here") as caught:
        check_parallel(recipe, TINY, hardware, layout)
    assert caught.value.fix == f"{fix}, or choose another recipe".removeprefix(", or ")
    if fix:
        plain = shared_recipe(Recipe(rungs=(rungs,), micro_batch=1), "ddp", Layout(ranks=layout.ranks))
        check_parallel(plain, TINY, hardware, Layout(ranks=layout.ranks))


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_a_model_that_nobody_knows_how_to_cut(name):
    """Told before how it divides: three GPUs would not help."""
    asked = SimpleNamespace(**{"tensor": None, "pipeline": None, "replicas": None, name: 3})
    with pytest.raises(UserError, match=f"--{name} 3 does not apply here.*known of the built-in GPT only") as caught:
        layout_of(asked, 2, LLAMA)
    assert caught.value.fix == f"say --parallel fsdp instead of --{name} 3, or leave it out"
    layout_of(SimpleNamespace(tensor=None, pipeline=None, replicas=None), 2, LLAMA)


# --- what a recipe needs comes before the degrees ---------------------------------------------------------------------

FP16, MUON = ("fp16",), ("muon",)


@pytest.mark.parametrize(
    ("rungs", "words", "why", "fix"),
    [
        (FP16, "train tiny --gpus 4 --tensor 8", "loss scaling", "leave --tensor 8 out, or choose another recipe"),
        (FP16, "train tiny --pipeline 3", "loss scaling", "leave --pipeline 3 out, or choose another recipe"),
        (
            MUON,
            "train tiny --gpus 4 --pipeline 4 --parallel fsdp",
            "muon",
            "leave --pipeline 4 out and say --parallel ddp",
        ),
        (FP16, "ladder tiny --gpus 4 --tensor 8", "loss scaling", "leave --tensor out, or take another recipe"),
        (FP16, "profile tiny --gpus 4 --tensor 8", "loss scaling", "leave --tensor out, or take another recipe"),
    ],
    ids=["tensor", "one-process", "both", "ladder", "profile"],
)
def test_a_recipe_that_goes_with_no_degree_is_offered_none(tmp_path, capsys, rungs, words, why, fix):
    (file := tmp_path / "recipe.json").write_text(json.dumps({"rungs": rungs, "micro_batch": 4}), encoding="utf-8")
    option = "--from" if words.startswith("ladder") else "--recipe"
    assert cli.main([*words.split(), option, str(file), "--device", "cpu"]) == 2
    problem, reason, proposed = capsys.readouterr().err.splitlines()
    assert problem.endswith("does not apply here")
    assert why in reason
    assert proposed.startswith(f"fix:     {fix}")


def test_an_optimizer_that_is_named_counts_as_the_recipes(capsys):
    words = "train tiny --gpus 4 --pipeline 4 --optimizer muon --parallel fsdp --device cpu"
    assert cli.main(words.split()) == 2
    assert "leave --pipeline 4 out and say --parallel ddp" in capsys.readouterr().err


def test_a_foreign_model_is_offered_fsdp_only_with_a_recipe_that_takes_it():
    asked = SimpleNamespace(tensor=3, pipeline=None, replicas=None, parallel=None)
    check_needs(asked, 2, Recipe(rungs=(), micro_batch=1), LLAMA)  # `layout_of` says it, with fsdp
    with pytest.raises(UserError, match="--tensor 3 does not apply here") as caught:
        check_needs(asked, 2, Recipe(rungs=MUON, micro_batch=1), LLAMA)
    assert "fsdp" not in caught.value.fix


def test_heads_are_asked_before_ranks(capsys):
    """Eight GPUs, which four heads would be refused on, are no way out."""
    assert cli.main(["profile", "tiny", "--gpus", "4", "--tensor", "8", "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "problem: 4 heads cannot be shared by --tensor 8"
    assert lines[-1] == "fix:     use --tensor 4 or --tensor 2"


@quick
@given(
    few,
    few,
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 2),
    st.sampled_from(["cuda", "cpu"]),
)
def test_fewer_ranks_that_are_proposed_hold_the_layout(tensor, pipeline, replicas, shards, count, nodes, kind):
    """And they are the most that do."""
    cut = {"tensor": tensor, "pipeline": pipeline, "replicas": replicas}
    here = tensor * pipeline * replicas * (shards if replicas == 1 else shards + 1)
    machine, layout = replace(CUDA, kind=kind, count=count, cpu_cores=1), Layout(ranks=nodes * here, **cut)
    most = count if kind == "cuda" else 8
    workload = model(60, 60)

    def works(number: int) -> bool:
        patch.setenv("LOCAL_WORLD_SIZE", str(number))
        return refused(lambda: check_ranks(machine, nodes * number, layout_for(nodes * number, cut, workload))) is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(here))
        fix = refused(check_ranks, machine, layout.ranks, layout)
        assert (fix is None) == (here <= most)
        if fix is None:
            return
        (number,) = numbers(fix.split(" and leave")[0])
        possible = [size for size in range(1, most + 1) if works(size)]
        assert number == max(possible, default=most)
        assert ("leave" in fix) == (not possible)


@pytest.mark.parametrize(
    ("layout", "count", "fix"),
    [
        (Layout(ranks=12, tensor=3), 8, "use --gpus 6"),
        (Layout(ranks=12), 8, "use --gpus 8"),
        (Layout(ranks=16, replicas=4), 7, "use --gpus 7 and leave --replicas 4 out"),
        (Layout(ranks=4, tensor=2, pipeline=2), 3, "use --gpus 3 and leave --tensor 2 --pipeline 2 out"),
        (Layout(ranks=4, tensor=2), 1, "leave --gpus and --tensor 2 out"),
        (Layout(ranks=4), 1, "leave --gpus out"),
    ],
    ids=["tensor", "data", "copies", "stages", "one-gpu-tensor", "one-gpu"],
)
def test_more_ranks_than_there_is_room_for(layout, count, fix):
    assert refused(check_ranks, replace(CUDA, count=count), layout.ranks, layout) == fix


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        ("train tiny --gpus 2 --tensor 3", "4 heads cannot be shared by --tensor 3", "use --tensor 2 or --tensor 1"),
        ("estimate --nodes 2", "--nodes 2 without --gpus", "say --gpus 16 too, or as many as there are"),
        ("estimate --gpus 1 --nodes 2", "1 GPU cannot be shared evenly by 2 nodes", "use 1 node, or 2 GPUs"),
        ("estimate --gpus 4 --replicas 2 --zero 1", "--replicas 2 with --zero 1", "say --parallel fsdp, or leave"),
        ("ladder tiny --gpus 4 --pipeline 2", "`redline ladder` has no option --pipeline", "leave it out: `redline"),
        ("tune tiny --pipeline", "`redline tune` has no option --pipeline", "leave it out: `redline train` has"),
        ("profile --pipeline=2", "`redline profile` has no option --pipeline", "leave it out: `redline train` has"),
        ("estimate --gpus 4 --replicas 2 --parallel ddp", "--replicas 2 with ddp", "say --parallel fsdp, or leave"),
        ("estimate --gpus 4 --replicas 3 --parallel fsdp", "4 ranks with data of", "use --replicas 1 or 2"),
        (
            "estimate --gpus 4 --replicas 4 --parallel fsdp",
            "--replicas 4 leaves one rank",
            "leave --replicas out, or use",
        ),
        ("train tiny --gpus 2 --replicas 2", "--replicas 2 leaves one rank", "leave --replicas out"),
        ("estimate --inference --gpus 4 --replicas 2", "--replicas with --inference", "drop --replicas"),
        ("estimate --gpus 4 --parallel zero", "unknown way to share a step 'zero'", "known: ddp, fsdp, fsdp-keep"),
        ("estimate --gpus 4 --parallel ddp --zero 1", "--parallel and --zero were given together", "drop one"),
        ("estimate --parallel fsdp", "--parallel fsdp with one copy", "use more GPUs, or leave --parallel out"),
        ("estimate --gpus 16 --dp 2 --tensor 8", "12 heads cannot", "use --tensor 4 or --tensor 2; leave --dp out"),
        ("estimate --dp 5 --tp 8", "12 heads cannot", "use --tensor 4 or --tensor 2 with --gpus 40; leave --dp out"),
        ("estimate --inference --parallel fsdp", "--parallel with --inference", "drop --parallel"),
    ],
    ids=lambda words: words if words.startswith(("train ", "estimate ", "ladder ", "tune ", "profile ")) else "",
)
def test_commands_refuse_in_their_own_words(capsys, words, problem, fix):
    assert cli.main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"problem: {problem}")
    assert lines[-1].startswith(f"fix:     {fix}")
