"""Profiles that only a CUDA device can give: kernels, idle gaps, synchronisations, the allocator's history."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from redline.core import profile as names
from redline.core.job import Job, RunDirectory
from redline.core.profile import Profile
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.data.tokens import prepare_tokens
from redline.predict.gemms import linear_gemms
from redline.predict.memory import predict_memory
from redline.rungs import plan_of
from redline.search.launch import launch_profile

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
WORKLOAD = Workload(name="small", shape=SHAPE, tokenizer="bytes", micro_batch=8, learning_rate=1e-3)
PLAIN = ("tf32",)
FAST = ("tf32", "no-sync", "bf16", "compile", "flash", "padded-vocab", "fused-adamw")


def profile_of(tmp_path: Path, rungs: tuple[str, ...]) -> Profile:
    run = RunDirectory(tmp_path)
    prepare_tokens(WORKLOAD, tmp_path / "tokens.npy")
    job = Job(
        workload=WORKLOAD,
        recipe=Recipe(rungs=rungs, micro_batch=8),
        device="cuda",
        tokens="tokens.npy",
        kind="profile",
    )
    answer = launch_profile(run, job, 240, lambda *_, **__: None)
    assert isinstance(answer, Profile), answer
    return answer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return profile_of(folder, PLAIN), folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile_of(tmp_path_factory.mktemp("fast"), FAST)


def test_parts_add_up(plain, fast):
    for profile in (plain[0], fast):
        assert sum(part.seconds for part in profile.parts) == pytest.approx(profile.step_seconds.median)
        assert 0 < profile.busy_share <= 1
        assert profile.launches > 10


def test_kernels_are_told_apart(plain):
    groups = plain[0].by_group()
    for group in (names.CONTRACTION, names.ATTENTION, names.NORMALISATION, names.LOSS, names.OPTIMIZER):
        assert groups[group] > 0
    assert groups[names.OTHER] < 0.02 * plain[0].step_seconds.median


def test_the_flops_of_the_products_are_the_predicted_ones(plain):
    ran = sum(kernel.flops or 0 for kernel in plain[0].kernels if kernel.group == names.CONTRACTION)
    wanted = sum(gemm.flops for gemm in linear_gemms(SHAPE, plan_of(PLAIN), micro_batch=8))
    assert ran <= wanted
    assert (
        ran > 0.5 * wanted
    )  # kernels beyond the longest thirty, and those with parts of unknown work, are not counted


def test_modules_have_both_passes(plain):
    rows = {row.module: row for row in plain[0].modules}
    assert rows["h.0.mlp.c_fc"].forward > 0
    assert rows["h.0.mlp.c_fc"].backward > 0


def test_the_read_of_the_loss_is_a_synchronisation(plain, fast):
    (found,) = {(each.where, each.rung) for each in plain[0].findings if each.kind == "synchronisation"}
    assert found == (names.RECIPE, "no-sync")
    assert plain[0].sync_idle_seconds > 0
    assert not [each for each in fast.findings if each.kind == "synchronisation" and (each.per_step or 0) >= 1]


def test_compiled_code_names_its_attention_and_breaks_no_graph(fast):
    assert fast.compiled
    assert "flash" in (fast.attention or "")
    assert not [each for each in fast.findings if each.kind in ("graph-break", "recompile")]
    assert any(kernel.name.startswith("triton_") and kernel.bytes for kernel in fast.kernels)


def test_compiled_code_shows_the_modules_of_the_same_step_without_compile(fast):
    assert {row.module for row in fast.modules} == {None}
    assert fast.uncompiled is not None, fast.notes
    assert (fast.uncompiled.micro_batch, fast.uncompiled.undone) == (8, ("compile",))
    rows = {row.module: row for row in fast.uncompiled.modules}
    for module in ("h.0.mlp.c_fc", "h.1.attn.c_attn", "ln_f"):
        assert rows[module].forward > 0
        assert rows[module].backward > 0
    assert rows["h.0.attn"].forward > 0  # the fused kernel
    assert 0 < fast.uncompiled.work_seconds <= fast.uncompiled.step_seconds


@pytest.mark.parametrize("which", ["plain", "fast"])
def test_the_allocators_peak_is_anatomised(which, plain, fast):
    profile = plain[0] if which == "plain" else fast
    memory = profile.memory
    assert memory is not None
    assert sum(memory.categories.values()) == memory.peak_bytes
    assert memory.reserved_bytes >= memory.peak_bytes
    predicted = predict_memory(SHAPE, plan_of(PLAIN if which == "plain" else FAST), micro_batch=8)
    assert memory.categories["weights"] >= 0.98 * (predicted.weights - SHAPE.sequence**2)  # without the mask
    assert memory.categories["optimizer"] >= 0.98 * predicted.optimizer
    assert memory.categories["activations"] > 0.5 * predicted.activation_bytes
    assert memory.peak_bytes == pytest.approx(predicted.allocated, rel=0.35)  # workspaces are much of so small a model


def test_memory_has_lines_of_the_model(plain):
    assert any("redline/model/" in line.file for line in plain[0].memory.lines)
    assert plain[0].memory.modules["h.0.attn"] > 0


def test_what_other_steps_reserved_is_no_fragmentation():
    import torch
    from torch import nn

    from redline.engine.fit import free_memory
    from redline.engine.memory_snapshot import watch_memory

    device = torch.device("cuda")
    model = nn.Linear(1024, 1024, device=device)
    batch = torch.randn(1024, 1024, device=device)
    free_memory(device)
    before = torch.cuda.memory_reserved()
    large = torch.empty(2**30, dtype=torch.uint8, device=device)
    del large  # to the allocator's cache, where an uncompiled step leaves its own
    found = watch_memory(lambda rows: model(rows).sum().backward(), batch, module=model, optimizer=None, device=device)
    assert found.peak_bytes <= found.reserved_bytes < before + 2**30
    assert sum(found.categories.values()) == found.peak_bytes


def test_memory_of_compiled_code_has_lines_and_no_modules(fast):
    own = sum(fast.memory.modules.values())
    assert own + fast.memory.elsewhere_bytes == fast.memory.peak_bytes
    assert fast.memory.elsewhere_bytes >= fast.memory.categories["activations"]
    assert any("redline/model/" in line.file for line in fast.memory.lines)


def test_the_trace_has_kernels(plain):
    profile, folder = plain
    events = json.loads(gzip.decompress((folder / profile.trace).read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_what_a_user_plants_is_found_on_the_device():
    import torch
    from torch import nn

    from redline.engine.profiling import profile_step

    device = torch.device("cuda")
    model = nn.Linear(64, 64, device=device)

    def step(batch: torch.Tensor) -> None:
        rows = torch.arange(4)  # on the host
        y = model(batch) + rows.to(device).sum()
        y.sum().backward()
        y[y > 0].sum().item()
        model.zero_grad()

    batches = itertools.repeat(torch.randn(8, 64, device=device))
    profile = profile_step(step, batches, module=model, device=device)
    kinds = {found.kind for found in profile.findings}
    assert {"host-tensor", "host-copy", "synchronisation"} <= kinds
    assert all(found.file == __file__ for found in profile.findings if found.file)
