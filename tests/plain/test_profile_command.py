"""`redline profile` around its worker: mistakes, failures, the document, and a view that fits 100 columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import redline
from redline.cli import main
from redline.commands import profile as command
from redline.core import profile as names
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import Job
from redline.core.layout import Layout
from redline.core.measurement import Failure, Spread
from redline.core.profile import (
    FINDINGS,
    Finding,
    Kernel,
    MemoryLine,
    MemoryProfile,
    ModuleTime,
    Part,
    Profile,
    Uncompiled,
)
from redline.core.values import from_json, to_json
from redline.report.profile import bar, folded, fullest_moments, plain_rate, print_profile, short_kernel
from redline.report.profile_page import render_profile_page
from redline.search import launch
from redline.workloads import PRESETS

STEP = 0.1
MEMORY = MemoryProfile(
    source="by hand",
    peak_bytes=40 * 2**20,
    peak_seconds=0.04,
    start_bytes=6 * 2**20,
    reserved_bytes=50 * 2**20,
    categories={"activations": 30 * 2**20, "weights": 2 * 2**20, "optimizer": 4 * 2**20, "temporary": 4 * 2**20},
    modules={"h.0.attn": 20 * 2**20},
    elsewhere_bytes=20 * 2**20,
    lines=(MemoryLine(file="/home/somebody/model.py", line=12, function="forward", bytes=20 * 2**20),),
    timeline_seconds=(0.0, 0.04, 0.06),
    timeline_bytes=(6 * 2**20, 40 * 2**20, 6 * 2**20),
)
PROFILE = Profile(
    device="cuda",
    steps=3,
    step_seconds=Spread(median=STEP, p10=0.09, p90=0.11, n=10),
    profiled_seconds=0.12,
    parts=(
        Part(phase=names.FORWARD, group=names.CONTRACTION, seconds=0.05),
        Part(phase=names.BACKWARD, group=names.ATTENTION, seconds=0.03),
        Part(phase=names.UPDATE, group=names.IDLE, seconds=0.02),
    ),
    modules=(
        ModuleTime(module="h.0.attn", forward=0.01, backward=0.02),
        ModuleTime(module="h.1.attn", forward=0.01, backward=0.03),
        ModuleTime(module=None, forward=0.01, backward=0.0),
    ),
    kernels=(
        Kernel(
            name="void cutlass::Kernel2<cutlass_80_tensorop_gemm_with_a_very_long_name>(Params)",
            group=names.CONTRACTION,
            calls=12,
            seconds=0.05,
            flops=25e12,
            bytes=1e9,
            dtype="bf16",
        ),
        Kernel(name="mystery", group=names.OTHER, calls=1, seconds=0.01, flops=None, bytes=None, dtype=None),
    ),
    launches=120,
    busy_share=0.8,
    host_seconds=0.05,
    cpu_seconds=0.1,
    sync_idle_seconds=0.01,
    attention="bmm + softmax",
    compiled=False,
    findings=(
        Finding(kind="synchronisation", detail="read", file="/home/somebody/model.py", line=57, per_step=2),
        Finding(kind="synchronisation", detail="the loss", per_step=1, rung="no-sync"),
    ),
    memory=MEMORY,
    trace="trace.json.gz",
)
VERSIONS = {"python": "3.11", "torch": "2.13"}


@pytest.fixture
def machine(h200, monkeypatch, tmp_path) -> Hardware:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nobody has measured anything here
    monkeypatch.setattr(launch, "probe_machine", lambda device: (h200, VERSIONS))
    return h200


@pytest.fixture
def answer(machine, monkeypatch):
    """answer(value) makes that the worker's answer; the jobs that were asked come back in a list."""
    asked: list[Job] = []

    def say(value):
        def launched(directory, job, timeout_seconds, on_phase):
            asked.append(job)
            return value

        monkeypatch.setattr(launch, "launch_profile", launched)
        return asked

    return say


def run(*words: str) -> int:
    return main(["profile", *words])


# what the user says


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tyni"], "unknown workload 'tyni'"),
        (["tiny", "--rungs", "flsh"], "unknown rung 'flsh'"),
        (["tiny", "--rungs", "flash,cudnn-attention"], "flash and cudnn-attention were given together"),
        (["tiny", "--micro-batch", "0"], "--micro-batch is 0"),
        (["tiny", "--steps", "0"], "--steps is 0"),
        (["tiny", "--timeout", "0"], "timeout is 0"),
        (["tiny", "--recipe", "missing.json"], "cannot read the recipe missing.json"),
        (["tiny", "--data", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_stop_before_anything_runs(words, problem, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "probe_machine", lambda device: pytest.fail("the machine was asked"))
    assert run(*words) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_recipe_and_rungs_exclude_each_other(tmp_path, capsys):
    path = tmp_path / "best.json"
    path.write_text('{"rungs": ["tf32"], "micro_batch": 2}')
    assert run("tiny", "--recipe", str(path), "--rungs", "tf32") == 2
    assert "--recipe and --rungs were given together" in capsys.readouterr().err


def test_a_rung_that_does_not_apply_is_a_mistake(machine, monkeypatch, tmp_path, capsys, cpu):
    monkeypatch.setattr(launch, "probe_machine", lambda device: (cpu, VERSIONS))
    assert run("tiny", "--rungs", "tf32", "--out", str(tmp_path / "run")) == 2
    assert "tf32 does not apply here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_recipe_becomes_a_job(answer, tmp_path, capsys):
    asked = answer(PROFILE)
    path = tmp_path / "best.json"
    path.write_text('{"rungs": ["tf32", "bf16"], "micro_batch": 2}')
    assert run("tiny", "--recipe", str(path), "--steps", "5", "--out", str(tmp_path / "run")) == 0
    (job,) = asked
    assert (job.kind, job.timed_steps, job.device) == ("profile", 5, "cuda")
    assert (job.recipe.rungs, job.recipe.micro_batch, job.workload.micro_batch) == (("tf32", "bf16"), 2, 2)
    assert (tmp_path / "run" / job.tokens).exists()


def test_without_a_word_all_rungs_that_apply_are_taken_and_named(answer, tmp_path, capsys):
    asked = answer(PROFILE)
    assert run("tiny", "--out", str(tmp_path / "run")) == 0
    assert "flash" in asked[0].recipe.rungs
    assert f"rungs {', '.join(asked[0].recipe.rungs)}: all that apply here" in capsys.readouterr().err


def test_a_tensor_group_is_profiled_with_what_goes_with_it(answer, monkeypatch, h200, tmp_path, capsys):
    """The roofline is that of a rank's half: more than half of the whole, since norms and the stream are not cut."""
    monkeypatch.setattr(launch, "probe_machine", lambda device: (replace(h200, count=2), VERSIONS))
    asked, found = answer(PROFILE), {}
    for name, words in {"whole": (), "half": ("--gpus", "2", "--tensor", "2")}.items():
        assert run("gpt2", "--json", "--out", str(tmp_path / name), *words) == 0
        found[name] = json.loads(capsys.readouterr().out)
    whole, half = asked
    assert half.layout == Layout(ranks=2, tensor=2)
    assert (half.global_batch, half.processes) == (whole.recipe.micro_batch, 2)
    assert half.recipe.rungs[-1] == "tensor-parallel"
    assert not {"ddp", "fused-loss", "fused-backward"} & set(half.recipe.rungs)
    assert not {"fused-loss", "fused-backward"} & {each["rung"] for each in found["half"]["advice"]}
    ratio = found["half"]["roofline"]["light_seconds"] / found["whole"]["roofline"]["light_seconds"]
    assert 0.5 < ratio < 1
    assert found["half"]["tokens_per_second"] == found["whole"]["tokens_per_second"], "the same step, counted once"
    page = (tmp_path / "half" / "report.html").read_text()
    assert "2 ranks: tensor 2 x data 1" in page


# what comes back


def test_the_document(answer, tmp_path, capsys):
    answer(PROFILE)
    assert run("tiny", "--rungs", "tf32,bf16", "--out", str(tmp_path / "run"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "run" / "profile.json").read_text())
    assert document["status"] == "ok"
    assert sum(group["share"] for group in document["groups"]) == pytest.approx(1)
    assert sum(phase["seconds"] for phase in document["phases"]) == pytest.approx(STEP)
    assert document["profiler_overhead"] == pytest.approx(0.2)
    assert document["tokens_per_second"] == pytest.approx(PRESETS["tiny"].micro_batch * 256 / STEP)
    gemm, mystery = document["kernels"]
    assert gemm["tflops"] == pytest.approx(500)
    assert gemm["roofline_share"] == pytest.approx(500 / 989.4)  # of the H200's data sheet
    assert gemm["bound"] == "compute"
    assert (mystery["tflops"], mystery["bytes_per_second"], mystery["roofline_share"]) == (None, None, None)
    assert document["memory"]["fragmentation_bytes"] == 10 * 2**20
    assert document["memory"]["predicted"]["allocated"] > 0
    line, recipe = document["findings"]
    assert line["fix"] == FINDINGS["synchronisation"]
    assert recipe["fix"] == "take the rung no-sync"
    assert {each["rung"] for each in document["advice"]} & {"flash", "cudnn-attention"}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "profile"


def test_a_finding_names_no_rung_that_does_not_apply(answer, tmp_path, capsys, monkeypatch, h200):
    cpu = replace(h200, kind="cpu", name="a processor", features=("bf16", "compile"))
    monkeypatch.setattr(launch, "probe_machine", lambda device: (cpu, VERSIONS))
    answer(replace(PROFILE, device="cpu"))
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    reason = "a CPU runs each operation before the next: there is no queue to keep full"
    assert document["findings"][1]["fix"] == f"the rung no-sync does not apply here: {reason}"
    assert not any("no-sync" in each["what"] for each in document["advice"])


def test_an_unknown_device_gets_dashes_and_no_roofline(answer, tmp_path, capsys, monkeypatch, h200):
    monkeypatch.setattr(launch, "probe_machine", lambda device: (replace(h200, name="NVIDIA Unheard-of"), VERSIONS))
    answer(PROFILE)
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["roofline"] is None
    assert document["kernels"][0]["roofline_share"] is None
    assert document["rates"]["source"] == "the best kernels of this profile"


@pytest.mark.parametrize("kind", ["oom", "timeout", "killed", "error"])
def test_a_worker_that_fails_is_exit_1_and_says_why(answer, tmp_path, capsys, kind):
    answer(Failure(kind=kind, reason="it broke while profiling"))
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run")) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "nothing was profiled: it broke while profiling" in said.err
    assert "log.txt" in said.err


def test_a_model_that_cannot_be_built_is_a_mistake_and_leaves_nothing(answer, tmp_path, capsys):
    mistake = ("transformers cannot build the config", "there is no magic", "mend the config")
    answer(Failure(kind="error", reason="no magic", mistake=mistake))
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err.splitlines()[-3:]
    assert [line.split(": ", 1)[1].strip() for line in said] == list(mistake)
    assert not (tmp_path / "run").exists()


def test_a_failure_is_one_json_document(answer, tmp_path, capsys):
    answer(Failure(kind="oom", reason="out of memory"))
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run"), "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["failure"], document["reason"]) == ("failed", "oom", "out of memory")


def test_a_full_disk_is_said_in_three_lines(answer, tmp_path, capsys, monkeypatch):
    answer(PROFILE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("redline.core.job.RunDirectory.write", full)
    assert run("tiny", "--rungs", "none", "--out", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert f"cannot begin the run in {tmp_path / 'run'}" in said
    assert "No space left on device" in said
    assert "--resume" not in said
    assert not (tmp_path / "run").exists()


def test_the_python_function_returns_the_same_document(answer, tmp_path):
    answer(PROFILE)
    document = redline.profile("tiny", rungs="tf32", micro_batch=2, out=tmp_path / "run")
    assert document["status"] == "ok"
    assert document["command"].startswith("redline.profile(workload='tiny'")
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(UserError, match="unknown device"):
        redline.profile("tiny", device="tpu")


def test_a_profile_is_its_own_json():
    assert from_json(Profile, json.loads(json.dumps(to_json(PROFILE)))) == PROFILE


# what people see


def shown(document, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_profile(document, console)
    return console.export_text()


@pytest.fixture
def document(answer, tmp_path):
    answer(PROFILE)
    return redline.profile("tiny", rungs="tf32,bf16", out=tmp_path / "run")


@pytest.mark.parametrize("width", [100, 160, 80])
def test_no_line_is_longer_than_100_columns(document, width):
    *lines, path = shown(document, width).splitlines()
    assert path.startswith("trace ")  # in one piece, however long
    assert max(map(len, lines)) <= min(width, 100)


def test_the_view_has_every_part(document):
    text = shown(document)
    for part in (
        "to do first",
        "where the time goes",
        "by phase",
        "by module",
        "kernels",
        "found in the code",
        "memory",
    ):
        assert part in text
    assert "h.*.attn" in text
    assert "(+20 %)" in text
    assert "model.py:57" in text
    assert "the recipe" in text
    assert "take the rung no-sync" in text
    assert "10.0 MiB (20.0 %) of it not in use at the peak" in text
    assert "trace.json.gz" in text


def test_unknown_is_a_dash(document):
    row = next(line for line in shown(document).splitlines() if line.startswith("mystery"))
    assert row.split()[-3:] == ["—", "—", "—"]


def test_compiled_code_has_no_modules_and_says_so(document):
    modules = [{"module": None, "forward": 0.01, "backward": 0.01}]
    assert "unknown: compiled code has no modules" in shown({**document, "compiled": True, "modules": modules})


UNCOMPILED = Uncompiled(
    micro_batch=PRESETS["tiny"].micro_batch,
    step_seconds=0.2,
    undone=("compile", "cuda-graphs"),
    modules=(
        ModuleTime(module="h.0.attn", forward=0.02, backward=0.03),
        ModuleTime(module="h.1.attn", forward=0.01, backward=0.02),
        ModuleTime(module=None, forward=0.02, backward=0.0),
    ),
)
BLIND = replace(PROFILE, compiled=True, modules=(ModuleTime(module=None, forward=0.05, backward=0.03),))


@pytest.fixture
def compiled(answer, tmp_path):
    answer(replace(BLIND, uncompiled=UNCOMPILED))
    return redline.profile("tiny", rungs="tf32,bf16,compile", out=tmp_path / "compiled")


def test_modules_without_compile_are_shares_of_another_step(compiled):
    assert compiled["modules"] == to_json(BLIND.modules)  # of the compiled step nothing is made up
    found = compiled["modules_without_compile"]
    assert (found["step_seconds"], found["undone"]) == (0.2, ["compile", "cuda-graphs"])
    assert [each["share"] for each in found["modules"]] == pytest.approx([0.5, 0.3, 0.2])
    text = shown(compiled)
    assert "by module, of the same step without compile: 200 ms instead of 100 ms" in text
    part = text.split("by module")[1].split("kernels")[0]
    attention = next(line for line in part.splitlines() if line.startswith("h.*.attn"))
    assert attention.split()[:7] == ["h.*.attn", "30.0", "%", "50.0", "%", "80.0", "%"]
    assert "ms" not in part.split("100 ms")[1]  # no times of a step that nobody trains
    assert "without compile, cuda-graphs" in " ".join(text.split())


def test_a_smaller_batch_without_compile_is_named_and_not_compared(compiled):
    found = {**compiled["modules_without_compile"], "micro_batch": 2}
    text = shown({**compiled, "modules_without_compile": found})
    assert "of the same step without compile, 200 ms with a micro batch of 2 (more does not fit)" in text
    assert "instead of" not in text


def test_the_page_has_the_modules_without_compile(compiled):
    page = render_profile_page(compiled)
    assert "By module, of the same step without compile: 200 ms instead of 100 ms" in page
    assert "80.0 %" in page
    assert "unknown: compiled code" not in page


def test_memory_by_module_folds_layers_of_a_kind(document):
    sizes = {"h.0.mlp": 3 * 2**20, "h.1.mlp": 2 * 2**20, "wte": 4 * 2**20}
    text = shown({**document, "memory": {**document["memory"], "modules": sizes}})
    part = text.split("by module")[-1].split("by line")[0]
    assert part.index("h.*.mlp") < part.index("wte")
    assert "5.00 MiB" in part


def test_memory_of_no_module_is_a_row_with_its_reason(document, compiled):
    assert document["memory"]["modules_reason"] is None
    assert "of none: the loss, the batch, temporaries of the backward pass" in shown(document)
    assert "of none: compiled code has no modules left; its lines are known" in shown(compiled)
    page = render_profile_page(compiled)
    assert "of none: compiled code has no modules left; its lines are known" in page


def test_the_document_names_no_folder_of_the_machine(answer, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    here = str(tmp_path / "project" / "model.py")
    line = MemoryLine(file=here, line=12, function="forward", bytes=1)
    finding = Finding(kind="graph-break", detail=f"because of {here}:3", file=here, line=57)
    answer(replace(PROFILE, findings=(finding,), memory=replace(MEMORY, lines=(line,))))
    found = redline.profile("tiny", rungs="tf32", out="run")
    assert (found["findings"][0]["file"], found["findings"][0]["detail"]) == ("model.py", "because of model.py:3")
    assert found["memory"]["lines"][0]["file"] == "model.py"
    assert [each["what"] for each in found["advice"] if "model.py" in each["what"]] == ["fix model.py:57"]
    assert str(tmp_path) not in json.dumps({**found, "command": ""})


def test_no_memory_profile_says_why(document):
    text = shown({**document, "memory": None, "memory_reason": "nobody could look"})
    assert "nobody could look" in text
    assert "at the peak" not in text


def test_only_three_things_to_do_are_shown(document):
    advice = [{"what": f"do {n}", "why": "so", "gain_seconds": 0.01 * n, "rung": None} for n in (5, 4, 3, 2)]
    text = shown({**document, "advice": advice})
    assert "do 3" in text
    assert "do 2" not in text


def test_a_bound_is_marked_as_one(document):
    advice = [{"what": "faster", "why": "so", "gain_seconds": 0.01, "rung": None, "at_most": True}]
    bounded = {**document, "advice": advice}
    assert "≤ 10.0 ms" in shown(bounded)
    assert "a bound, which nothing here is known to reach" in " ".join(shown(bounded).split())
    assert "At most 10.0 ms of a step." in render_profile_page(bounded)
    estimate = {**document, "advice": [{**advice[0], "at_most": False}]}
    assert "≤" not in shown(estimate)
    assert "About 10.0 ms of a step." in render_profile_page(estimate)


@pytest.mark.parametrize(
    ("name", "short"),
    [("h.0.attn.c_attn", "h.*.attn.c_attn"), ("blocks.12", "blocks.*"), ("", "the model itself"), ("fc1", "fc1")],
)
def test_layers_of_one_kind_are_one_row(name, short):
    assert folded(name) == short


def test_names_of_kernels_are_cut_to_what_tells_them_apart():
    assert short_kernel("void at::native::softmax_warp<float, 4>(int)") == "at::native::softmax_warp"
    assert len(short_kernel("triton_" + "x" * 100)) == 32
    gemms = [f"nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_{layout}" for layout in ("NTN", "TNN")]
    sdpa = [f"cudnn_generated_fort_native_sdpa_sm90_flash_{way}prop_wgmma_f16_knob_7_kernel0_0" for way in "fb"]
    assert len({short_kernel(name) for name in (*gemms, *sdpa)}) == 4


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "—"), (0.0312, "0.0312"), (99.94, "99.9"), (100.0, "100"), (1183.4, "1,183")],
    ids=["unknown", "small", "tens", "hundreds", "thousands"],
)
def test_rates_have_no_powers_of_ten(value, words):
    assert plain_rate(value) == words


def test_bars_show_what_is_there():
    assert bar(0) == ""
    assert bar(1e-6) == "▏"
    assert bar(1.0) == "█" * 30


def test_the_memory_plot_keeps_the_peak():
    sizes = fullest_moments(to_json(MEMORY), 10)
    assert max(sizes) == 40 * 2**20
    assert sizes[0] == 6 * 2**20


def test_the_job_asks_for_what_the_worker_knows(answer, tmp_path):
    """The worker reads `kind`; a typing slip would measure instead of profiling."""
    asked = answer(PROFILE)
    redline.profile("tiny", rungs="none", out=tmp_path / "run")
    worker = Path(command.__file__).parent.parent / "engine" / "worker.py"
    assert f'job.kind == "{asked[0].kind}"' in worker.read_text()
