"""Layouts: pieces that add up to the model, a choice that no other beats, refusals that name what works."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import redline
from redline import cli
from redline.core.devices import find_device
from redline.core.errors import UserError
from redline.core.interconnects import choose_links
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.activations import Rank
from redline.predict.communication import Fabric, bubble
from redline.predict.fitting import Case
from redline.predict.flops import executed_flops
from redline.predict.layouts import (
    SAME_SPEED,
    Bench,
    Search,
    expected_peaks,
    piece_of,
    predict_parallel,
    recommend,
    step_notes,
    usual_global_batch,
)
from redline.predict.memory import predict_memory
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import (
    Layout,
    check_layout,
    check_product,
    divisors,
    gpus_in_a_node,
    layout_for_batch,
    possible_cuts,
)
from redline.predict.roofline import TYPICAL, predict_step, reachable, roofline, sheet_peaks
from redline.workloads import PRESETS

cuts_in = runpy.run_path(str(Path(__file__).with_name("test_parallel.py")))["cuts_in"]

GPT2, XL = PRESETS["gpt2"].shape, PRESETS["gpt2-xl"].shape
LLAMA = Shape(
    layers=32,
    heads=32,
    kv_heads=8,
    d_model=4096,
    d_ff=14336,
    vocab=128256,
    sequence=4096,
    gated=True,
    positions="rope",
    norm="rmsnorm",
    biases=False,
    tied=False,
    fused_qkv=False,
)
FAST = Plan(autocast="bf16", attention="flash", compile=True, optimizer="adamw-fused", tied=True, vocab_multiple=64)
H100 = find_device("H100-SXM")
PEAKS = expected_peaks(FAST, H100, None)
quick = settings(deadline=None, max_examples=40)


def fabric_of(words="ib-400", gpus_per_node=8, device=H100):
    return Fabric(gpus_per_node=gpus_per_node, links=choose_links(words, device))


def predicted(shape=GPT2, plan=FAST, *, zero=0, fabric=None, **layout):
    case = Case(shape=shape, plan=plan, layout=Layout(**layout), zero=zero)
    return predict_parallel(case, fabric or fabric_of(), PEAKS)


# one GPU's piece


@pytest.mark.parametrize("shape", [replace(GPT2, vocab=50304), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 4)])
def test_pieces_add_up_to_the_model(shape, tp, pp):
    """Every matmul of the model is done by one GPU of a replica, and by one only; each stage's piece has a head."""
    piece, plan = piece_of(shape, FAST, Layout(gpus=tp * pp, tp=tp, pp=pp))
    whole, part = executed_flops(shape, FAST), executed_flops(piece, plan)
    assert tp * pp * part.linear.total == pytest.approx(whole.linear.total)
    assert tp * pp * part.attention.total == pytest.approx(whole.attention.total)
    assert tp * part.head.total == pytest.approx(whole.head.total)
    assert (piece.d_model, piece.head_width) == (shape.d_model, shape.head_width)


def test_windows_are_shared_among_stages():
    shape = replace(LLAMA, window=1024, windowed_layers=16)
    piece, _ = piece_of(shape, FAST, Layout(gpus=4, pp=4))
    assert (piece.layers, piece.layers_with_window) == (8, 4)


def test_one_replica_computes_what_one_gpu_does():
    step = predicted(gpus=8, micro_batch=16)
    alone = predict_step(
        GPT2, FAST, micro_batch=16, sheet=sheet_peaks(FAST, H100), reached=reachable(FAST, H100, None)
    ).expected
    assert step.time.compute.passes + step.time.compute.update == pytest.approx(alone.seconds)
    assert step.alone_seconds == pytest.approx(alone.seconds)
    assert step.tokens == 8 * 16 * 1024
    assert step.efficiency == pytest.approx(step.tokens_per_second / 8 / alone.tokens_per_second)


def test_stages_share_the_work():
    """Four stages of a replica: embedding in the first, head and loss in the last, the layers in all; the slowest
    decides, and it is the last."""
    one, four = (predicted(gpus=pp, pp=pp, micro_batch=4, accumulation=32, shape=LLAMA).time for pp in (1, 4))
    assert one.compute.forward / 4 < four.compute.forward < one.compute.forward / 3
    assert four.bubble_seconds > 0 == one.bubble_seconds


def test_each_end_of_a_pipeline_has_its_own_work():
    """Beyond a stage in the middle: the embedding at one end, the head and the loss at the other."""
    layout = Layout(gpus=4, pp=4, micro_batch=2)
    bench = Bench(peaks=PEAKS)
    first, middle, last = (
        bench.work(
            Rank(
                shape=GPT2,
                plan=FAST,
                micro_batch=2,
                layout=layout,
                zero=0,
                optimizer=find_optimizer("adamw-fused"),
                first=stage == 0,
                last=stage == 2,
            )
        ).passes
        for stage in range(3)
    )
    piece, plan = piece_of(GPT2, FAST, layout)
    rows = roofline(piece, plan, micro_batch=2, peaks=PEAKS, assumptions=TYPICAL).rows
    times = {name: sum(row.seconds for row in rows if row.operation.name == name) for name in ENDS}
    assert first - middle == pytest.approx(times.pop("embedding"))
    assert last - middle == pytest.approx(sum(times.values()))
    assert min(times.values()) > 0


ENDS = ("embedding", "head", "head dgrad", "head wgrad", "loss")


def test_zero_shares_the_update():
    plain, shared = (predicted(gpus=8, micro_batch=16, zero=zero).time.compute for zero in (0, 1))
    assert shared.update == pytest.approx(plain.update / 8)
    assert shared.passes == plain.passes


def test_memory_is_the_memory_models():
    layout = Layout(gpus=64, tp=4, pp=2, micro_batch=2, accumulation=16)
    step = predict_parallel(Case(shape=LLAMA, plan=FAST, layout=layout, zero=3), fabric_of(), PEAKS)
    assert step.memory == predict_memory(LLAMA, FAST, micro_batch=2, layout=layout, zero=3)


@quick
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 12]), st.sampled_from([1, 2, 8, 64]), st.integers(1, 16))
def test_gbs_is_mbs_times_dp_times_gas(tp, pp, dp, passes):
    step = predicted(gpus=tp * pp * dp, tp=tp, pp=pp, micro_batch=2, accumulation=passes)
    assert step.layout.global_batch == 2 * dp * passes
    assert step.tokens == step.layout.global_batch * 1024
    assert step.tokens_per_second == pytest.approx(step.tokens / step.time.seconds)
    assert step.time.seconds >= step.time.compute.passes


def test_more_nodes_and_slower_links_are_never_faster():
    rates = [predicted(gpus=gpus, micro_batch=16).tokens_per_second / gpus for gpus in (8, 16, 32, 128)]
    assert rates == sorted(rates, reverse=True)
    by_link = [
        predicted(gpus=16, micro_batch=1, fabric=fabric_of(words)).tokens_per_second
        for words in ("ib-800", "ib-400", "ethernet-100", "ethernet-10")
    ]
    assert by_link == sorted(by_link, reverse=True)
    assert by_link[-1] < by_link[0] / 5


def test_without_a_link_or_peaks_there_are_bytes_and_no_time():
    case = Case(shape=GPT2, plan=FAST, layout=Layout(gpus=16, micro_batch=4))
    for fabric, peaks, reason in ((fabric_of(None), PEAKS, "between nodes"), (fabric_of(), None, "no device")):
        step = predict_parallel(case, fabric, peaks, "no device" if peaks is None else None)
        assert reason in step.reason
        assert step.time is step.tokens_per_second is step.efficiency is None
        assert sum(one.sent for one in step.traffic) > 0


# the recommendation


@cache
def search_of(shape, gpus, batch, memory=H100.memory_bytes, micro_batch=None, peaks=True, link="ib-400"):
    case = Case(shape=shape, plan=replace(FAST, tied=shape.tied))
    return Search(
        case=case,
        fabric=fabric_of(link),
        gpus=gpus,
        memory_bytes=memory,
        global_batch=batch,
        micro_batch=micro_batch,
        peaks=PEAKS if peaks else None,
        reason=None if peaks else "no device",
    )


def every_layout(search):
    """All that divide and fit, tried one by one."""
    for tp, pp in possible_cuts(search.case.shape, search.gpus, 8):
        dp = search.gpus // (tp * pp)
        if search.global_batch % dp:
            continue
        for size in divisors(search.global_batch // dp):
            sizes = {"gpus": search.gpus, "tp": tp, "pp": pp, "micro_batch": size}
            layout = layout_for_batch(**sizes, global_batch=search.global_batch)
            for zero in range(4) if dp > 1 else (0,):
                step = predict_parallel(replace(search.case, layout=layout, zero=zero), search.fabric, search.peaks)
                if step.memory.total <= search.memory_bytes:
                    yield step


@pytest.mark.parametrize(
    ("shape", "gpus", "batch", "gib"),
    [(GPT2, 16, 64, 80), (LLAMA, 8, 16, 80), (LLAMA, 16, 16, 40), (XL, 8, 24, 20)],
    ids=["gpt2", "llama", "llama-small-cards", "xl-small-cards"],
)
def test_nothing_else_is_faster_or_simpler(shape, gpus, batch, gib):
    search = search_of(shape, gpus, batch, memory=gib * 2**30)
    found, everything = recommend(search), list(every_layout(search))
    fastest = max(step.tokens_per_second for step in everything)
    assert found.best.memory.total <= search.memory_bytes
    assert found.best.layout.global_batch == batch
    assert found.best.tokens_per_second >= (1 - SAME_SPEED) * fastest
    least = min(cuts(step) for step in everything if step.tokens_per_second >= (1 - SAME_SPEED) * fastest)
    assert cuts(found.best) == least
    named = [cuts(step) for step in (found.best, *found.others)]
    assert len(set(named)) == len(named) == 4
    rates = [step.tokens_per_second for step in found.others]
    assert rates == sorted(rates, reverse=True)
    assert max(rates) >= max(step.tokens_per_second for step in everything if cuts(step) not in named)
    assert found.fitting == len({cuts(step) for step in everything})


def cuts(step):
    return step.layout.tp, step.layout.pp, step.zero


def test_what_fits_one_gpu_is_not_cut():
    found = recommend(search_of(GPT2, 8, 256))
    assert cuts(found.best) == (1, 1, 0)
    assert "TP 1: a GPU holds whole layers" in found.reason
    assert "ZeRO 0: each replica holds all state" in found.reason


def test_tensor_parallel_grows_only_as_far_as_it_must():
    """Small cards and long sequences: without TP not even one sequence's activations fit, whatever else is cut."""
    shape = replace(LLAMA, sequence=16384)
    search = search_of(shape, 64, 64, memory=60 * 2**30)
    found = recommend(search)
    fitting = {cuts(step)[0] for step in every_layout(search)}
    assert found.best.layout.tp == min(fitting) > 1
    assert f"TP {found.best.layout.tp}: with less nothing fits" in found.reason


def test_where_nothing_fits_the_smallest_is_shown():
    found = recommend(search_of(LLAMA, 8, 8, memory=8 * 2**30))
    assert (found.fitting, found.best.memory.total > 8 * 2**30) == (0, True)
    assert found.reason.endswith("this one needs least memory")
    assert all(step.memory.total >= found.best.memory.total for step in found.others)


def test_without_a_speed_the_least_cut_that_fits_is_chosen():
    for search in (search_of(LLAMA, 16, 16, link=None), search_of(LLAMA, 16, 16, peaks=False)):
        found = recommend(search)
        assert found.best.tokens_per_second is None
        assert cuts(found.best) == min(cuts(step) for step in every_layout(search))
        assert "no speed is known" in found.reason
        assert ("stand idle" in found.reason) == (found.best.layout.pp > 1)


def test_without_a_network_a_pipeline_still_has_a_small_bubble():
    """That much is known: idle stages need no link. 12 GPUs and 64 sequences leave three stages at the least."""
    found = recommend(search_of(GPT2, 12, 64, link=None))
    layout = found.best.layout
    assert (layout.dp, layout.tp, layout.pp, found.best.tokens_per_second) == (4, 1, 3, None)
    assert layout.accumulation >= 8
    assert f"its stages stand idle for {bubble(layout):.0%} of the passes" in found.reason


def test_a_step_that_mostly_waits_says_so():
    """DDP has many calls, and the wait was fitted on FSDP's."""
    fabric = Fabric(gpus_per_node=8, links=choose_links("nvlink4,ib-400", None))
    for shape, waits in ((XL, True), (LLAMA, False)):
        case = Case(shape=shape, plan=FAST, layout=Layout(gpus=64, micro_batch=8, accumulation=1 if waits else 16))
        notes = list(step_notes(predict_parallel(case, fabric, PEAKS)))
        assert any("waiting for the slowest node" in note for note in notes) is waits, notes


def test_two_neighbours_of_a_pipeline_wait_for_nobody_else():
    """They are 32 GPUs apart here, and what each sends the other is not among the calls that wait."""
    fabric = Fabric(gpus_per_node=8, links=choose_links("nvlink4,ib-400", None))
    case = Case(shape=GPT2, plan=FAST, layout=Layout(gpus=64, pp=2, micro_batch=2, accumulation=4))
    step = predict_parallel(case, fabric, PEAKS)
    sent = {one.kind: one.calls for one in step.traffic}
    (note,) = [note for note in step_notes(step) if "waiting for the slowest node" in note]
    assert set(sent) == {"all-reduce", "point-to-point"}
    assert f"node, {sum(one.calls for one in step.traffic if one.kind == 'all-reduce')} times" in note, note


def test_a_micro_batch_that_was_named_stays():
    found = recommend(search_of(GPT2, 8, 256, micro_batch=4))
    assert {step.layout.micro_batch for step in (found.best, *found.others)} == {4}
    assert {step.layout.global_batch for step in (found.best, *found.others)} == {256}


def test_a_batch_that_only_some_layouts_give():
    """Seven sequences do not go round eight, four or two replicas: only one replica of all GPUs is left."""
    found = recommend(search_of(GPT2, 8, 7))
    assert found.best.layout.dp == 1
    assert all(step.layout.dp == 1 for step in found.others)
    assert f"PP {found.best.layout.pp}: " in found.reason
    assert "a GPU holds all layers" not in found.reason
    assert "less does not give this batch" in found.reason


def test_a_batch_that_no_layout_gives_is_refused():
    with pytest.raises(UserError, match="a global batch of 7 is not a number of passes"):
        recommend(search_of(XL, 8, 7, micro_batch=2))


@pytest.mark.parametrize(
    ("shape", "gpus", "batch", "size"), [(GPT2, 1024, 100, None), (GPT2, 96, 3, 2), (XL, 64, 7, 2)]
)
def test_batches_that_are_proposed_instead_are_given_by_some_layout(shape, gpus, batch, size):
    """And none nearer is: every other one is asked for."""
    with pytest.raises(UserError) as caught:
        recommend(search_of(shape, gpus, batch, micro_batch=size))
    proposed = [int(word) for word in caught.value.fix.split() if word.isdecimal()]
    possible = []
    for other in range(1, 2 * max(proposed)):
        with contextlib.suppress(UserError):
            recommend(search_of(shape, gpus, other, micro_batch=size, peaks=False))
            possible.append(other)
    below, above = ([one for one in possible if (one < batch) == less] for less in (True, False))
    assert proposed == [*below[-1:], *above[:1]]


@pytest.mark.parametrize(
    ("shape", "gpus", "micro_batch", "tokens"), [(GPT2, 8, 1, 2**19), (XL, 64, 16, 2**20), (LLAMA, 64, 1, 2**21)]
)
def test_the_usual_batch_is_gpt3s(shape, gpus, micro_batch, tokens):
    """0.5M, 1M and 2M tokens for models of 124M, 1.5B and 8B parameters (arXiv 2005.14165, table 2.1)."""
    batch = usual_global_batch(shape, gpus, micro_batch)
    assert batch * shape.sequence == tokens
    assert batch % (gpus * micro_batch) == 0
    assert usual_global_batch(shape, 2**16, micro_batch) == 2**16 * micro_batch  # one pass at least


# refusals


@pytest.mark.parametrize(
    ("layout", "gpus", "per_node", "problem", "fix"),
    [
        (
            Layout(gpus=16, tp=4),
            8,
            8,
            "the layout takes 16 GPUs and there are 8",
            "use --tensor 4 or --tensor 2 on 8 GPUs; DP is what is left of them",
        ),
        (Layout(gpus=4), 8, 8, "the layout takes 4 GPUs and there are 8", "use --tensor 1 or --tensor 2 on 8 GPUs"),
        (
            Layout(gpus=16, tp=4),
            16,
            2,
            "--tensor 4 does not stay inside a node of 2 GPUs",
            "use --tensor 2 or --tensor 1",
        ),
        (
            Layout(gpus=12, tp=6),
            12,
            4,
            "--tensor 6 does not stay inside a node of 4 GPUs",
            "use --tensor 4 or --tensor 2",
        ),
        (Layout(gpus=16, tp=8), 16, 8, "12 heads cannot be shared by --tensor 8", "use --tensor 4 or --tensor 2"),
        (Layout(gpus=5, pp=5), 5, 8, "12 layers cannot be shared by --pipeline 5", "use --pipeline 1"),
    ],
)
def test_layouts_that_cannot_run(layout, gpus, per_node, problem, fix):
    with pytest.raises(UserError) as error:
        check_layout(GPT2, layout, gpus, per_node)
    assert error.value.problem == problem
    assert error.value.fix.startswith(fix)


@quick
@given(st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(1, 12), st.integers(1, 8))
def test_what_is_proposed_runs(gpus, tp, pp, per_node):
    """Every cut that a refusal names runs on those GPUs and nodes; one that is accepted does so by itself."""
    layout = Layout(gpus=tp * pp * max(1, gpus // (tp * pp)), tp=tp, pp=pp)
    try:
        check_layout(GPT2, layout, gpus, per_node)
    except UserError as error:
        named = cuts_in(error.fix)
        there = gpus if "there are" in error.problem else layout.gpus
        for t, p in named:
            check_layout(GPT2, Layout(gpus=there, tp=t, pp=p), there, per_node)
    else:
        assert layout.gpus == gpus
        assert per_node % tp == 0


def test_replicas_that_do_not_go_with_the_gpus():
    check_product(64, dp=8, tp=4, pp=2)
    with pytest.raises(UserError) as error:
        check_product(64, dp=4, tp=4, pp=2)
    assert error.value.problem == "DP 4 x TP 4 x PP 2 takes 32 GPUs, not 64"
    assert error.value.fix == "use --dp 8, or leave --dp out"
    with pytest.raises(UserError, match="use 15 or 18 GPUs, or --tensor 4 or --tensor 2$"):
        check_product(16, dp=4, tp=3, pp=1)


def test_nodes():
    assert [gpus_in_a_node(gpus) for gpus in (1, 4, 8, 12, 16, 13)] == [1, 4, 8, 6, 8, 1]
    assert gpus_in_a_node(16, 4) == 4
    with pytest.raises(UserError) as error:
        gpus_in_a_node(16, 3)
    assert error.value.problem == "16 GPUs cannot be shared evenly by 3 nodes"
    assert error.value.fix == "use 2 or 4 nodes, or 15 or 18 GPUs"


# the command


@pytest.fixture
def document(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words):
        capsys.readouterr()
        assert cli.main(["estimate", *map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


WORDS = ("gpt2-xl", "--gpu", "H100-SXM", "--gpus", 64, "--interconnect", "ib-400")


LACKING = ("gpt2-xl", "--gpu", "A100-40", "--gpus", 8, "--micro-batch", 16, "--parallel", "ddp")


def keys_of(value, prefix=""):
    """Every key of a document: those of lists once, without the table of seconds that a model is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys_of(item)
    elif isinstance(value, list) and value:
        yield from keys_of(value[0])


def test_every_key_is_on_the_page(document):
    page = (Path(__file__).resolve().parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    cut = document(*WORDS, "--tp", 1, "--pp", 2, "--zero", 1, "--global-batch", 512)["parallel"]
    lacking = document(*LACKING)["parallel"]
    for key in {*keys_of(document(*WORDS)["parallel"]), *keys_of(cut), *keys_of(lacking)}:
        assert re.search(rf"\b{re.escape(key)}\b", page), key


def test_a_layout_that_was_named_is_taken(document):
    found = document(*WORDS, "--pp", 2, "--dp", 32, "--zero", 1, "--micro-batch", 4, "--global-batch", 512)
    parallel = found["parallel"]
    layout = parallel["layout"]
    assert parallel["recommendation"] is None
    assert [layout[key] for key in ("nodes", "gpus_per_node", "dp", "tp", "pp", "zero")] == [8, 8, 32, 1, 2, 1]
    assert layout["global_batch"] == 512 == layout["micro_batch"] * layout["dp"] * layout["accumulation"]
    assert found["tokens_per_second"] == parallel["tokens_per_second"]
    assert found["memory"]["total"] == predict_of(found).total
    step = parallel["step"]
    parts = ("forward_seconds", "backward_seconds", "update_seconds", "exposed_seconds", "bubble_seconds")
    assert sum(step[key] for key in parts) == pytest.approx(step["seconds"])
    assert step["hidden_seconds"] + step["exposed_seconds"] == pytest.approx(step["communication_seconds"])
    assert parallel["tokens_per_second"] == pytest.approx(512 * 1024 / step["seconds"])
    assert parallel["bubble"] == pytest.approx(1 / (4 + 1))
    kinds = {one["kind"] for one in parallel["collectives"]}
    assert kinds == set(parallel["sent_bytes"]) == {"all-reduce", "all-gather", "reduce-scatter", "point-to-point"}
    for kind, size in parallel["sent_bytes"].items():
        sent = sum(one["sent_bytes"] for one in parallel["collectives"] if one["kind"] == kind)
        assert size == pytest.approx(sent)


@pytest.mark.parametrize(
    ("words", "ranks", "stage", "who"),
    [
        (("--gpus", 8, "--dp", 8), [0, 7], None, "ranks 0 to 7 need"),
        (("--gpus", 8, "--pp", 2), [4, 7], "last", "ranks 4 to 7, the last stage of the pipeline, need"),
        # eight micro batches in flight: the first of two stages keeps two of them, the last one
        (
            ("--gpus", 2, "--pp", 2, "--global-batch", 128),
            [0, 0],
            "first",
            "rank 0, the first stage of the pipeline, needs",
        ),
        (("--gpus", 2, "--dp", 2), [0, 1], None, "ranks 0 and 1 need"),
    ],
    ids=["ddp", "last", "first", "two"],
)
def test_what_does_not_fit_says_who_lacks_how_much_and_what_fits(capsys, document, words, ranks, stage, who):
    words = ("gpt2-xl", "--gpu", "A100-40", "--micro-batch", 16 if stage != "last" else 64, *words)
    found = document(*words)
    parallel = found["parallel"]
    shortage = parallel["shortage"]
    assert found["fits"] is False
    assert shortage["ranks"] == ranks
    assert shortage["stage"] == stage
    assert shortage["needed_bytes"] == found["memory"]["total"] == predict_of(found).total
    assert shortage["memory_bytes"] == found["hardware"]["memory_bytes"] < shortage["needed_bytes"]
    for key in ("tokens_per_second", "tokens_per_second_per_gpu", "scaling_efficiency"):
        assert parallel[key] is None
    assert found["tokens_per_second"] is None
    assert parallel["reason"] == "it does not fit"
    assert parallel["step"]["seconds"] > 0
    other = shortage["instead"]
    assert other["memory_bytes"] <= shortage["memory_bytes"]
    assert other["layout"]["global_batch"] == parallel["layout"]["global_batch"]
    assert cli.main(["estimate", *map(str, words)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    said = " ".join(out.split())
    assert f"does not fit: {who} " in said
    assert "a step, if it fitted" in said
    assert f"what fits is DP {other['layout']['dp']} x TP" in said
    assert "— tokens/s: it does not fit" in said
    assert " per GPU" not in said
    assert "it does not fit; what fits: redline train gpt2-xl --gpus" in said


def test_what_is_said_to_fit_does(document):
    """Estimated by the very options of its line: it fits, with the memory and the speed that were told."""
    other = document(*LACKING)["parallel"]["shortage"]["instead"]
    words = other["command"].removeprefix("redline train ").split()
    found = document(*words, "--gpu", "A100-40")
    assert found["fits"] is True
    assert found["parallel"]["shortage"] is None
    assert found["parallel"]["layout"] == other["layout"]
    assert found["memory"]["total"] == other["memory_bytes"]
    assert found["tokens_per_second"] == other["tokens_per_second"]
    assert found["parallel"]["train"]["command"] == other["command"]


def test_where_no_layout_fits_none_is_proposed_and_none_has_a_speed(capsys, document, tmp_path):
    shape = tmp_path / "wide.json"
    sizes = {"layers": 32, "heads": 32, "d_model": 4096, "d_ff": 16384, "vocab": 50257, "sequence": 2048}
    shape.write_text(json.dumps(sizes))
    words = (shape, "--gpu", "A100-40", "--gpus", 2)
    advice = document(*words)["parallel"]
    assert advice["shortage"]["instead"] is None
    assert advice["recommendation"]["fitting"] == 0
    rows = [advice["recommendation"]["best"], *advice["recommendation"]["others"]]
    assert len(rows) > 1
    assert {row["tokens_per_second"] for row in rows} == {row["scaling_efficiency"] for row in rows} == {None}
    assert cli.main(["estimate", *map(str, words)]) == 0
    assert "no layout of these GPUs fits with these rungs" in " ".join(capsys.readouterr().out.split())


def predict_of(found):
    """The memory of what the document says it is about."""
    layout = found["parallel"]["layout"]
    sizes = {key: layout[key] for key in ("gpus", "tp", "pp", "micro_batch", "accumulation")}
    plan = Plan(**found["settings"]["plan"])
    return predict_memory(XL, plan, micro_batch=layout["micro_batch"], layout=Layout(**sizes), zero=layout["zero"])


def test_without_a_layout_one_is_recommended(document):
    found = document(*WORDS)
    advice, layout = found["parallel"]["recommendation"], found["parallel"]["layout"]
    assert advice["best"]["layout"] == layout
    assert len(advice["others"]) == 3
    assert advice["best"]["memory_bytes"] == found["memory"]["total"] == predict_of(found).total
    assert found["settings"]["micro_batch"] == layout["micro_batch"]
    assert found["settings"]["zero"] == layout["zero"]
    assert found["batch"]["dp"] == layout["dp"]
    assert found["fits"] is True
    assert any("1,024 sequences, 1,048,576 tokens, is assumed" in note for note in found["notes"])
    assert any("8 nodes of 8 GPUs are assumed" in note for note in found["notes"])


def test_nodes_and_links_are_not_guessed(document):
    one_node = document("gpt2", "--gpu", "H100-SXM", "--gpus", 8)
    assert one_node["parallel"]["interconnect"]["inside"]["name"] == "nvlink4"
    assert one_node["tokens_per_second"] > 0
    for words, reason in (
        (("--gpu", "H100-SXM", "--gpus", 16), "between nodes"),
        (("--gpu", "H100-SXM", "--gpus", 8, "--nodes", 2), "between nodes"),
        (("--gpu", "L40S", "--gpus", 4), "inside a node"),
    ):
        found = document("gpt2", *words)
        assert found["tokens_per_second"] is found["parallel"]["step"] is None
        assert reason in found["tokens_per_second_reason"] == found["parallel"]["reason"]
        assert sum(found["parallel"]["sent_bytes"].values()) > 0
    assert document("gpt2", "--gpu", "H200")["parallel"] is None
    assert document("gpt2", "--gpu", "H200", "--gpus", 8, "--inference")["parallel"] is None


def test_a_short_step_over_nodes_is_said_to_be_less_certain(document):
    words = ("gpt2", "--gpu", "H100-SXM", "--interconnect", "ib-400", "--zero", 0, "--micro-batch", 16)
    assert any("less certain" in note for note in document(*words, "--gpus", 16)["notes"])
    assert not any("less certain" in note for note in document(*words, "--gpus", 8)["notes"])
    assert not any("less certain" in note for note in document(*words, "--gpus", 16, "--global-batch", 8192)["notes"])


def test_it_fits_the_terminal(capsys, document):
    for words in (WORDS, (*WORDS, "--pp", 4, "--zero", 3, "--global-batch", 512), WORDS[:5]):
        assert cli.main(["estimate", *map(str, words)]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100
        assert "sent by one GPU in a step" in out
    assert cli.main(["estimate", *map(str, WORDS)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of one GPU with these micro batches" in out
    assert "TP 1: a GPU holds whole layers" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpus", "16", "--nodes", "3"), "16 GPUs cannot be shared evenly by 3 nodes"),
        (("--gpus", "8", "--nodes", "0"), "--nodes is 0"),
        (("--gpus", "8", "--dp", "-1"), "--dp is -1"),
        (("--gpus", "8", "--dp", "4"), "DP 4 x TP 1 x PP 1 takes 4 GPUs, not 8"),
        (("--gpus", "8", "--interconnect", "ib-40"), "unknown interconnect 'ib-40'"),
        (("--gpus", "24", "--nodes", "6", "--tp", "6"), "--tensor 6 does not stay inside a node of 4 GPUs"),
        (("--interconnect", "ib-400", "--inference"), "--interconnect with --inference"),
        (("--gpu", "H200", "--gpus", "8", "--global-batch", "7", "--micro-batch", "2"), "a global batch of 7"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes(capsys, words, problem):
    assert cli.main(["estimate", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[0].startswith(f"problem: {problem}")
    assert len(shown.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "short"),
    [
        (("--tensor", 2, "--pipeline", 2), ("--tp", 2, "--pp", 2)),
        (("--parallel", "fsdp"), ("--zero", 3)),
        (("--parallel", "ddp"), ("--zero", 0)),
    ],
    ids=["cuts", "fsdp", "ddp"],
)
def test_the_options_of_train_are_understood(document, options, short):
    found, other = (document("gpt2", "--gpu", "H100-SXM", "--gpus", 8, *words) for words in (options, short))
    assert {**found, "command": ""} == {**other, "command": ""}


@pytest.mark.parametrize("way", ["fsdp-keep", "fsdp-whole"])
def test_ways_without_a_stage_of_their_own_have_their_own_line(document, way):
    found = document("gpt2", "--gpu", "H100-SXM", "--gpus", 8, "--parallel", way)
    assert found["settings"]["plan"]["parallel"] == way
    assert f"--parallel {way}" in found["parallel"]["train"]["command"]
    assert found["words"].endswith(way)


@pytest.fixture
def llama(tmp_path):
    """Eight billion parameters, with a head of its own."""
    config = {
        **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu"},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": False},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_recommended_micro_batch_is_the_only_one_that_is_told(document, llama):
    found = document(llama, "--gpu", "H100-SXM", "--gpus", 4)
    size = found["parallel"]["layout"]["micro_batch"]
    assert not any("micro batch" in note for note in found["notes"])
    assert found["words"] is None, "one GPU does not hold it: no ladder has its baseline and its reference"
    named = document(llama, "--gpu", "H100-SXM", "--gpus", 4, "--parallel", "fsdp", "--micro-batch", 2)
    assert "--micro-batch 2 --gpus 4 --rungs" in named["words"]
    assert named["words"].endswith(",fsdp")
    assert f"--micro-batch {size} " in found["parallel"]["train"]["command"]
    named = document(llama, "--gpu", "H100-SXM", "--gpus", 4, "--zero", 3)
    assert any("micro batch 4 is assumed, 16,384 tokens per pass" in note for note in named["notes"])


def test_a_ladder_is_named_where_it_measures_that(document):
    words = ("gpt2", "--gpu", "H100-SXM", "--interconnect", "ib-400", "--micro-batch", 16)
    assert document(*words, "--gpus", 8, "--zero", 0)["words"] == "gpt2 --gpus 8"
    assert document(*words, "--gpus", 8, "--tensor", 2)["words"] is None, "in a layout it is for the user to ask"
    assert document(*words, "--gpus", 16, "--zero", 0)["words"] is None, "they are on one machine"
    assert document(*words, "--gpus", 8, "--zero", 1)["words"] is None, "nobody runs it"


def test_all_reasons_are_given(document, llama):
    cut = ("--gpus", 8, "--tensor", 2, "--pipeline", 2, "--zero", 1, "--micro-batch", 64)
    train = document(llama, "--gpu", "H100-SXM", *cut)["parallel"]["train"]
    first, *others = train["reason"].split("; ")
    assert train["command"] is None
    assert first == "it does not fit"
    assert [reason.split(":")[0] for reason in others] == ["train has no ZeRO 1", "--tensor", "--pipeline"]


def test_dp_alone_says_how_many_gpus(document):
    layout = document("gpt2", "--gpu", "H100-SXM", "--dp", 2, "--tp", 2)["parallel"]["layout"]
    assert (layout["gpus"], layout["dp"], layout["tp"]) == (4, 2, 2)


HYBRID = ("gpt2-xl", "--gpu", "H100-SXM", "--gpus", 16, "--interconnect", "ib-400", "--parallel", "fsdp")


def test_copies_that_are_cut_are_predicted(document, capsys):
    """A GPU holds what it would with the GPUs of one copy, and sends gradients alone to the other."""
    words = (*HYBRID, "--micro-batch", 2, "--global-batch", 256)
    found, flat = document(*words, "--replicas", 2), document(*words)
    alone = document(*words[:4], 8, *words[5:-1], 128)
    assert found["parallel"]["layout"]["replicas"] == 2
    assert found["memory"] == alone["memory"]
    assert found["memory"]["optimizer"] == pytest.approx(2 * flat["memory"]["optimizer"], rel=1e-3)
    own = [one for one in found["parallel"]["collectives"] if one["ranks"] == 8]
    assert own == alone["parallel"]["collectives"]
    (between,) = [one for one in found["parallel"]["collectives"] if one["ranks"] == 2]
    assert (between["what"], between["kind"], between["nodes"]) == ("gradients between copies", "all-reduce", 2)
    assert between["bytes"] == pytest.approx(own[-1]["bytes"] / own[-1]["calls"] * between["calls"] / 8)
    assert found["parallel"]["step"]["update_seconds"] == 2 * flat["parallel"]["step"]["update_seconds"]
    assert "--replicas 2 --parallel fsdp" in found["parallel"]["train"]["command"]
    assert cli.main(["estimate", *map(str, words), "--replicas", "2"]) == 0
    assert "ZeRO 3 in 2 copies" in capsys.readouterr().out


def test_one_copy_is_fsdp_and_two_are_measured_as_two(document):
    words = ("gpt2-xl", "--gpu", "H200", "--gpus", 8, "--parallel", "fsdp", "--micro-batch", 2)
    assert document(*words, "--replicas", 1)["parallel"] == document(*words)["parallel"]
    assert " --gpus 8 --replicas 2 --rungs " in document(*words, "--replicas", 2)["words"]


def test_from_python(document):
    given = {"gpu": "H100-SXM", "gpus": 64, "interconnect": "ib-400", "nodes": 8, "dp": 64, "zero": 3}
    found = redline.estimate("gpt2-xl", **given)
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    assert json.loads(json.dumps(found))["parallel"] == document("gpt2-xl", *words)["parallel"]


def test_rungs_that_a_layout_undoes_are_told(document):
    def undone(*words):
        return [note for note in document("gpt2", "--gpu", "H100-SXM", *words)["notes"] if "undoes it" in note]

    assert undone("--gpus", 8) == undone() == []
    cut = undone("--gpus", 8, "--tensor", 2)
    assert [note.split()[0] for note in cut] == ["fused-loss", "fused-backward"]
    assert all("tensor-parallel undoes it" in note for note in cut)
