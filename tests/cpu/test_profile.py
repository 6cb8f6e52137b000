"""A real step under the profiler: its parts add up, its work is what the formulas say, its memory as predicted."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from redline.core import profile as names
from redline.core.job import Job, RunDirectory
from redline.core.plan import Plan
from redline.core.profile import Profile
from redline.core.recipe import Recipe
from redline.core.values import from_json, to_json
from redline.engine import profiling
from redline.engine.build import Training, build
from redline.engine.memory_snapshot import (
    Block,
    Known,
    anatomy,
    blocks_of_history,
    held_blocks,
    thin,
    timeline_of,
    watch_memory,
)
from redline.engine.profiling import modules_without_compile, profile_job, profile_step
from redline.engine.profiling_frames import Frame
from redline.engine.profiling_work import ATTENTIONS
from redline.predict.gemms import attention_gemms, linear_gemms
from redline.predict.memory import WORKSPACES, predict_memory
from redline.search.launch import launch_profile

CPU = torch.device("cpu")


def profile_of(training: Training, **choices) -> Profile:
    return profile_step(
        training.step,
        training.batches,
        module=training.model,
        optimizer=training.step.optimizer,
        device=CPU,
        steps=2,
        **choices,
    )


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Few steps: nothing here depends on how well the times are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "WARMUP_STEPS_BETWEEN", (1, 2))
        patch.setattr(profiling, "TIMED_STEPS_BETWEEN", (2, 2))
        yield


@pytest.fixture(scope="module")
def plain(short, small, tokens, tmp_path_factory) -> Iterator[tuple[Profile, bytes]]:
    """The baseline's profile, and its trace."""
    training = build(small, Plan(), micro_batch=6, tokens=tokens, device=CPU)
    trace = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    try:
        profile = profile_of(training, trace=trace)
    finally:
        training.close()
    return profile, trace.read_bytes()


# time


def test_parts_add_up_to_the_step_without_a_profiler(plain):
    profile, _ = plain
    assert sum(part.seconds for part in profile.parts) == pytest.approx(profile.step_seconds.median)
    assert sum(profile.by_group().values()) == pytest.approx(profile.step_seconds.median)
    assert sum(profile.by_phase().values()) == pytest.approx(profile.step_seconds.median)
    assert all(profile.by_phase()[phase] > 0 for phase in (names.FORWARD, names.BACKWARD, names.UPDATE))
    assert profile.steps == 2


def test_every_group_of_a_plain_gpt_is_there_and_nothing_is_unknown(plain):
    groups = plain[0].by_group()
    for group in (names.CONTRACTION, names.ATTENTION, names.NORMALISATION, names.LOSS, names.OPTIMIZER):
        assert groups[group] > 0
    assert groups[names.OTHER] == 0
    assert groups[names.COMMUNICATION] == 0


def test_the_products_that_ran_are_the_products_that_were_predicted(plain, small):
    """FLOPs read off the trace against the formulas: every matmul, once, in its group."""
    kernels = [kernel for kernel in plain[0].kernels if kernel.flops]
    ran = {group: sum(kernel.flops for kernel in kernels if kernel.group == group) for group in names.GROUPS}
    assert ran[names.CONTRACTION] == sum(gemm.flops for gemm in linear_gemms(small.shape, Plan(), micro_batch=6))
    assert ran[names.ATTENTION] == sum(gemm.flops for gemm in attention_gemms(small.shape, micro_batch=6))
    assert {kernel.dtype for kernel in kernels} == {"fp32"}


def test_modules_share_the_work_of_forward_and_backward(plain):
    profile, _ = plain
    work = sum(part.seconds for part in profile.parts if part.phase in (names.FORWARD, names.BACKWARD))
    waiting = sum(
        part.seconds
        for part in profile.parts
        if part.phase in (names.FORWARD, names.BACKWARD) and part.group in (names.IDLE, names.DATA_WAIT)
    )
    assert sum(row.forward + row.backward for row in profile.modules) == pytest.approx(work - waiting)
    rows = {row.module: row for row in profile.modules}
    assert rows["h.1.mlp.c_fc"].forward > 0
    assert rows["h.1.mlp.c_fc"].backward > 0
    assert rows["h.0.attn"].backward > 0  # attention's own products, without c_attn and c_proj


def test_the_read_of_the_loss_is_the_recipes_and_no_line_of_the_users(plain):
    (found,) = [each for each in plain[0].findings if each.kind == "synchronisation"]
    assert (found.where, found.file, found.rung) == (names.RECIPE, None, "no-sync")


def test_the_trace_can_be_opened(plain):
    events = json.loads(gzip.decompress(plain[1]))["traceEvents"]
    assert any(event.get("name") == "redline: step" for event in events)


def test_a_profile_travels_as_json(plain):
    assert from_json(Profile, json.loads(json.dumps(to_json(plain[0])))) == plain[0]


def test_hooks_leave_no_trace_behind(train):
    training = train(Plan(attention="flash"))
    profile = profile_of(training)
    assert profile.attention == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert profile.trace is None
    for module in training.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(parameter._post_accumulate_grad_hooks in (None, {}) for parameter in training.model.parameters())


def test_any_callable_can_be_profiled():
    """A user's own model: no optimizer that we know of, no text, no plan."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    profile = profile_step(step, itertools.repeat(torch.randn(128, 64)), module=model, device=CPU, steps=1)
    assert {row.module for row in profile.modules} >= {"0", "1", "2"}
    assert profile.memory is not None
    assert profile.memory.categories["weights"] == 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ATTENTIONS)
def test_fused_attention_arguments_stand_where_the_table_says(name):
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    arguments = [argument.name for argument in schema.arguments]
    assert arguments[ATTENTIONS[name].query] == "query"
    assert arguments[ATTENTIONS[name].query + 1] == "key"
    assert arguments[ATTENTIONS[name].causal] == "is_causal"


# memory


PLANS = {
    "plain": Plan(),
    "flash": Plan(attention="flash", optimizer="adamw-fused"),
    "chunked": Plan(attention="flash", loss="chunked", optimizer="adamw-fused"),
    "checkpointing": Plan(checkpointing="full", optimizer="adamw-fused"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_measured_peak_is_the_predicted_one(plan, train, small):
    training = train(plan)
    batch = next(training.batches)
    training.step(batch)
    found = watch_memory(training.step, batch, module=training.model, optimizer=training.step.optimizer, device=CPU)
    predicted = predict_memory(small.shape, plan, micro_batch=6)
    assert found.peak_bytes == pytest.approx(predicted.allocated - WORKSPACES, rel=0.02)
    assert sum(found.categories.values()) == found.peak_bytes
    assert sum(found.modules.values()) + found.elsewhere_bytes == found.peak_bytes
    assert found.categories["weights"] + found.categories["buffers"] == predicted.weights
    # fp32 counters of the steps taken stand beside the moments: four bytes a tensor
    assert found.categories["optimizer"] == pytest.approx(predicted.optimizer, abs=4 * 64)
    assert max(found.timeline_bytes) == found.peak_bytes
    assert found.reserved_bytes is None


def test_memory_has_lines_and_modules(plain):
    memory = plain[0].memory
    assert memory.modules["h.0.attn"] > memory.modules["h.0.ln_1"]
    assert any(line.file.endswith("model/attention.py") and line.function == "naive_attention" for line in memory.lines)


def test_compiled_memory_on_a_cpu_is_unknown_and_says_why():
    model = nn.Linear(4, 4)
    profile = profile_step(
        lambda batch: model(batch).sum().backward(),
        itertools.repeat(torch.randn(2, 4)),
        module=model,
        device=CPU,
        steps=1,
        compiled=True,
    )
    assert profile.memory is None
    assert "compiled" in profile.memory_reason
    assert {row.module for row in profile.modules} == {None}


# modules of compiled code


def test_a_compiled_recipe_shows_the_modules_of_the_same_step_without_compile(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda loss_of, **_: loss_of)  # what is compiled here is of no account
    phases: list[str] = []
    found = profile_job(
        bench("compile", "flash", timed_steps=1, report=lambda phase, **_: phases.append(phase)), tmp_path
    )
    assert phases[-2:] == ["memory", "modules without compile"]  # after everything that it could disturb
    assert {row.module for row in found.modules} == {None}
    assert found.uncompiled is not None
    assert (found.uncompiled.micro_batch, found.uncompiled.undone) == (6, ("compile",))
    rows = {row.module: row for row in found.uncompiled.modules}
    assert rows["h.0.mlp.c_fc"].forward > 0
    assert rows["h.0.mlp.c_fc"].backward > 0
    assert 0 < found.uncompiled.work_seconds <= found.uncompiled.step_seconds
    assert found.notes == ()
    assert from_json(Profile, json.loads(json.dumps(to_json(found)))) == found


def test_a_step_that_does_not_fit_without_compile_is_halved(bench, monkeypatch):
    tried: list[int] = []

    def look(_, micro_batch: int) -> int:
        tried.append(micro_batch)
        if micro_batch > 2:
            raise torch.cuda.OutOfMemoryError(f"{micro_batch} sequences do not fit")
        return micro_batch

    monkeypatch.setattr(profiling, "look_at_modules", look)
    assert modules_without_compile(bench("compile")) == 2
    assert tried == [6, 3, 2]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "not even one sequence fits"),
        (KeyError("lost"), "KeyError: 'lost'"),
        (RuntimeError(), "RuntimeError: no message"),
    ],
    ids=["memory", "with-words", "without"],
)
def test_a_failure_without_compile_is_a_note_on_a_whole_profile(error, reason, plain, bench, tmp_path, monkeypatch):
    whole = replace(plain[0], compiled=True, modules=())
    monkeypatch.setattr(profiling, "profile_recipe", lambda *_: whole)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(profiling, "build", fails)
    found = profile_job(bench("compile"), tmp_path)
    assert found == replace(whole, notes=(f"modules were not told apart without compile: {reason}",))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled-in-part", "plain"])
def test_modules_that_were_told_apart_are_left_alone(compiled, plain, bench, tmp_path, monkeypatch):
    whole = replace(plain[0], compiled=compiled)
    monkeypatch.setattr(profiling, "profile_recipe", lambda *_: whole)
    monkeypatch.setattr(profiling, "modules_without_compile", lambda _: pytest.fail("one more pass"))
    assert profile_job(bench("compile"), tmp_path) is whole


# the CUDA allocator's history, by hand


OURS = [{"filename": "/home/me/model.py", "line": 7, "name": "forward"}]
MAIN = [*OURS, {"filename": "/x/redline/engine/memory_snapshot.py", "line": 1, "name": "run_watched"}]
HISTORY = [
    {"action": "segment_alloc", "addr": 0, "size": 1 << 20, "time_us": 10_000_000},
    {"action": "alloc", "addr": 1000, "size": 400, "time_us": 10_100_000, "frames": MAIN},  # kept for the backward
    {"action": "alloc", "addr": 2000, "size": 100, "time_us": 10_150_000, "frames": MAIN},
    {"action": "free_requested", "addr": 2000, "size": 100, "time_us": 10_180_000},
    {"action": "free_completed", "addr": 2000, "size": 100, "time_us": 10_180_000},
    {
        "action": "alloc",
        "addr": 2000,
        "size": 300,
        "time_us": 10_300_000,
        "frames": [],
    },  # autograd's thread: a gradient
    {"action": "alloc", "addr": 3000, "size": 200, "time_us": 10_300_000, "frames": []},  # the peak
    {"action": "free_completed", "addr": 3000, "size": 200, "time_us": 10_350_000},
    {"action": "free_completed", "addr": 1000, "size": 400, "time_us": 10_400_000},
]
SNAPSHOT = {
    "segments": [
        {
            "blocks": [
                {"address": 1, "size": 64, "state": "active_allocated"},
                {"address": 65, "size": 32, "state": "active_allocated"},
                {"address": 97, "size": 500, "state": "inactive"},
            ]
        }
    ]
}


def test_the_allocators_history_becomes_an_anatomy():
    known = Known(
        held={1: ("weights", "layer")},
        gradients=[(2000, 0.32, "layer")],
        modules=[(0.05, "layer"), (0.2, None)],
    )
    blocks = blocks_of_history(HISTORY, held_blocks(SNAPSHOT), began=10.0)
    found = anatomy(blocks, known, source="by hand", peak_bytes=1024, reserved_bytes=2048)
    assert found.categories == {
        "activations": 400,
        "gradients": 300,
        "temporary": 200,
        "weights": 64,
        "other": 32,
        "rounding": 1024 - 996,  # the allocator hands out more than was asked for
    }
    assert found.modules == {"layer": 400 + 300 + 64}
    assert found.elsewhere_bytes == 200 + 32 + 28
    assert (found.start_bytes, found.peak_bytes, found.fragmentation_bytes) == (96, 1024, 1024)
    assert found.peak_seconds == pytest.approx(0.3, abs=1e-6)
    assert [(line.file, line.line, line.bytes) for line in found.lines] == [("/home/me/model.py", 7, 400)]


def test_a_block_that_dies_before_the_backward_pass_is_no_activation():
    blocks = [
        Block(key=1, size=10, start=0.0, end=0.5, frame=Frame("a.py", 1, "f")),
        Block(key=2, size=1, start=0.6, end=0.7, backward=True),
    ]
    assert anatomy(blocks, Known(), source="").categories == {"temporary": 10}


def test_sizes_over_time():
    blocks = [Block(key=1, size=10, start=-math.inf), Block(key=2, size=5, start=1.0, end=2.0)]
    assert timeline_of(blocks) == [(-math.inf, 10), (1.0, 15), (2.0, 10)]
    assert timeline_of([]) == [(0.0, 0)]


def test_thinning_keeps_the_peak():
    moments = [(float(at), at % 97) for at in range(5000)]
    thinned = thin(moments, points=50)
    assert len(thinned) <= 50
    assert max(size for _, size in thinned) == 96


# in a worker


def test_a_job_in_a_process_of_its_own(small, tokens, tmp_path):
    run = RunDirectory(tmp_path)
    (tmp_path / "tokens.npy").write_bytes(tokens.read_bytes())
    job = Job(
        workload=small,
        recipe=Recipe(rungs=("flash",), micro_batch=2),
        device="cpu",
        tokens="tokens.npy",
        kind="profile",
        timed_steps=1,
    )
    profile = launch_profile(run, job, 120, lambda *_, **__: None)
    assert isinstance(profile, Profile), profile
    assert profile.steps == 1
    assert (tmp_path / "trace.json.gz").exists()
    assert not profile.compiled


def test_profile_job_reports_its_phases(bench, tmp_path):
    phases: list[str] = []
    made: Callable[..., None] = lambda phase, **_: phases.append(phase)  # noqa: E731
    found = profile_job(replace(bench("flash", timed_steps=1), report=made), tmp_path)
    assert phases == ["building", "warming up", "timing", "profiling", "finding causes", "memory"]
    assert found.trace == "trace.json.gz"
