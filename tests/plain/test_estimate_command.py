"""`redline estimate` in this process: words in, exit code and streams out; the machine is made up."""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
import time

import pytest

import redline
from redline import cli
from redline.api.arguments import in_python
from redline.core.devices import find_device
from redline.core.errors import UserError
from redline.core.hardware import MeasuredPeaks
from redline.core.units import human_bytes
from redline.core.values import to_json
from redline.machine import Gpu, Machine, local, save_measured
from redline.predict.memory import predict_memory
from redline.report.estimate import BAR_COLUMNS, PARTS, flops_table, memory_bar, parts_of
from redline.rungs import plan_of
from redline.workloads import PRESETS

CONTRACT = {
    "parameters",
    "flops_per_token",
    "memory",
    "max_micro_batch",
    "roofline",
    "tokens_per_second",
}
OPERATION = {"name", "group", "direction", "flops", "bytes", "bound", "seconds"}
MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "temporary", "context")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}


def machine(**changes):
    usual = {"kind": "cpu", "name": "a CPU", "cpu_name": "a CPU", "cpu_cores": 2, "ram_bytes": None, "versions": {}}
    return Machine(**{**usual, **changes})


def measured(**changes):
    """As `redline hardware --measure` would have kept it on an H200."""
    fields = {
        "name": find_device("H200").names[0],
        "driver": None,
        "kind": "cuda",
        "matmul_tflops": {"bf16": 790.0},
        "bandwidth": 4e12,
        "bandwidths": {"copy": 4e12},
        "rates": (),
        "workload": "gpt2",
        "micro_batch": 16,
        "date": "2026-11-15T00:00:00+00:00",
        "versions": {},
        "command": "redline hardware --measure",
    }
    return MeasuredPeaks(**{**fields, **changes})


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder, no measurements, and a machine without a GPU."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("redline.machine.this_machine", machine)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def estimate(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main(["estimate", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def document(estimate):
    def call(*words):
        code, out, err = estimate(*words, "--json")
        assert (code, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    return call


# the contract


def test_the_contract(document):
    found = document("--gpu", "A100-80", "gpt2-xl", "--micro-batch", 8)
    assert found.keys() >= CONTRACT
    assert found["parameters"] == 1_557_611_200  # GPT-2 XL as published
    assert found["flops_per_token"]["convention"] == "full attention square, unpadded"
    assert found["flops_per_token"].keys() >= {"model", "hardware", "convention"}
    assert set(found["memory"]) == {*MEMORY, "total"}
    assert sum(found["memory"][name] for name in MEMORY) == found["memory"]["total"]
    assert found["fits"] is True
    assert found["max_micro_batch"] >= 8
    assert 0 < found["tokens_per_second"] < found["roofline"]["light"]["tokens_per_second"]
    assert found["roofline"]["light"]["seconds"] > found["roofline"]["floor"]["seconds"]


def test_it_is_the_memory_model(document):
    found = document("gpt2", "--gpu", "H200", "--micro-batch", 32, "--rungs", "tf32,bf16,flash")
    memory = predict_memory(PRESETS["gpt2"].shape, plan_of(["tf32", "bf16", "flash"]), micro_batch=32)
    assert found["memory"]["total"] == memory.total
    assert found["memory_detail"]["allocated"] == memory.allocated
    assert found["memory_detail"]["activations"] == memory.activations
    assert found["parameters"] == 124_439_808  # as published, whatever the rungs
    (note,) = [note for note in found["notes"] if "tied-weights" in note]
    assert "163,037,184 parameters" in note  # untied without that rung: another table of 50257 x 768


def test_the_largest_micro_batch_fits_and_one_more_does_not(document):
    largest = document("gpt2", "--gpu", "A100-40-SXM")["max_micro_batch"]
    assert document("gpt2", "--gpu", "A100-40-SXM", "--micro-batch", largest)["fits"] is True
    assert document("gpt2", "--gpu", "A100-40-SXM", "--micro-batch", largest + 1)["fits"] is False


def test_without_a_device_there_is_memory_and_no_speed(document):
    found = document("gpt2")
    assert found["memory"]["total"] > 0
    for name in ("max_micro_batch", "fits", "roofline", "tokens_per_second"):
        assert found[name] is None
    assert found["what_to_change"] == []
    assert "a CPU" in found["hardware"]["reason"]


def test_an_unknown_gpu_has_its_memory_and_no_peaks(document, monkeypatch):
    gpu = Gpu(name="NVIDIA B9000", index=0)
    unknown = machine(kind="cuda", name="NVIDIA B9000", gpus=(gpu,), memory_bytes=64 * 1024**3)
    monkeypatch.setattr("redline.machine.this_machine", lambda: unknown)
    found = document("gpt2")
    assert found["max_micro_batch"] > 0
    assert found["roofline"] is found["tokens_per_second"] is None
    assert "NVIDIA B9000" in found["hardware"]["reason"]


def test_this_machines_gpu_is_taken(document, monkeypatch):
    device = find_device("H200")
    gpu = Gpu(name=device.names[0], index=0, multiprocessors=132)
    here = machine(kind="cuda", name=device.names[0], gpus=(gpu,), memory_bytes=150 * 10**9)
    monkeypatch.setattr("redline.machine.this_machine", lambda: here)
    found = document("gpt2")
    assert found["hardware"]["name"] == "H200"
    assert found["hardware"]["memory_bytes"] == 150 * 10**9  # what the driver says, not the table
    assert found["tokens_per_second"] > 0


def test_measured_peaks_replace_the_typical_share(document):
    before = document("gpt2", "--gpu", "H200")
    save_measured(measured(matmul_tflops={"bf16": 100.0}))
    after = document("gpt2", "--gpu", "H200")
    assert after["roofline"]["expected"]["peaks"]["matmul_tflops"] == 100.0
    assert "2026-11-15" in after["roofline"]["expected"]["peaks"]["source"]
    assert after["tokens_per_second"] < before["tokens_per_second"] / 3
    assert after["roofline"]["light"] == before["roofline"]["light"]


def test_a_measurement_beyond_the_data_sheet_is_not_used(document):
    """151 % of the data sheet: the file is passed over, and the expected step stays what it was."""
    before = document("gpt2", "--gpu", "H200")
    path = save_measured(measured(matmul_tflops={"bf16": 1494.0}))
    after = document("gpt2", "--gpu", "H200")
    assert after["roofline"] == before["roofline"]
    assert any(str(path) in note and "151% of what the data sheet" in note for note in after["notes"])


def test_a_small_boost_never_beats_the_speed_of_light(document):
    save_measured(measured(matmul_tflops={"bf16": 1.09 * 989.4}, bandwidth=1.09 * 4.8e12))
    roofline = document("gpt2", "--gpu", "H200", "--micro-batch", 64)["roofline"]
    assert roofline["expected"]["peaks"]["matmul_tflops"] == 989.4
    for ideal, real in zip(roofline["light"]["operations"], roofline["expected"]["operations"], strict=True):
        assert real["seconds"] > ideal["seconds"]


@pytest.mark.parametrize(("gpu", "rate"), [("A100-80", 271.2), ("MI300X", 668.4), ("L4", 0.8 * 121), ("H200", 795)])
def test_expected_takes_the_best_that_was_measured(document, gpu, rate):
    peaks = document("gpt2", "--gpu", gpu)["roofline"]["expected"]["peaks"]
    assert peaks["matmul_tflops"] == pytest.approx(rate)
    assert ("MAMF" in peaks["source"]) is (gpu != "L4")


def test_every_operation_is_listed(document):
    """FLOPs, bytes, bound and time of each; together they are the step."""
    found = document("gpt2", "--gpu", "H200", "--micro-batch", 16)
    for name in ("light", "expected"):
        side = found["roofline"][name]
        rows = side["operations"]
        assert all(row.keys() == OPERATION for row in rows)
        assert {row["bound"] for row in rows} == {"compute", "memory"}
        assert sum(row["seconds"] for row in rows) == pytest.approx(side["seconds"])
        flops = found["flops_per_token"]["hardware"] * found["roofline"]["tokens"]
        assert sum(row["flops"] for row in rows) == pytest.approx(flops)
        for group, seconds in side["groups"].items():
            assert sum(row["seconds"] for row in rows if row["group"] == group) == pytest.approx(seconds)
    (up,) = [row for row in found["roofline"]["light"]["operations"] if row["name"] == "up"]
    assert up["flops"] == 12 * 2 * 16384 * 768 * 3072
    assert up["bytes"] == 12 * 2 * (16384 * 768 + 768 * 3072 + 16384 * 3072)
    assert up["seconds"] == pytest.approx(up["flops"] / 989.4e12)
    assert (up["group"], up["direction"], up["bound"]) == ("tensor contraction", "forward", "compute")


def test_accumulation_repeats_the_passes_and_not_the_update(document):
    words = ("gpt2", "--gpu", "H200", "--micro-batch", 8)
    once, many = document(*words)["roofline"], document(*words, "--global-batch", 32)["roofline"]
    assert many["tokens"] == 4 * once["tokens"]
    assert many["light"]["groups"]["optimizer"] == once["light"]["groups"]["optimizer"]
    contraction = "tensor contraction"
    assert many["light"]["groups"][contraction] == pytest.approx(4 * once["light"]["groups"][contraction])
    assert many["light"]["seconds"] < 4 * once["light"]["seconds"]
    assert many["expected"]["tokens_per_second"] > once["expected"]["tokens_per_second"]


# the subject


def test_default_rungs_are_the_ladders(document):
    rungs = document("gpt2", "--gpu", "H200")["settings"]["rungs"]
    assert {"tf32", "bf16", "compile", "flash", "padded-vocab", "tied-weights", "fused-adamw"} <= set(rungs)
    assert not {"fp16", "cudnn-attention", "chunked-loss", "checkpointing"} & set(rungs)


def test_default_rungs_before_ampere(document):
    rungs = document("gpt2", "--gpu", "T4")["settings"]["rungs"]
    assert "fp16" in rungs
    assert not {"tf32", "bf16", "flash", "cudnn-attention"} & set(rungs)


def test_a_config_is_estimated_at_a_usual_length(document, workplace):
    (workplace / "config.json").write_text(json.dumps(LLAMA))
    found = document("config.json", "--gpu", "H200")
    assert found["parameters"] == 8_030_261_248  # Llama 3 8B
    assert found["settings"]["sequence"] == 4096
    assert "tied-weights" not in found["settings"]["rungs"]
    assert any("sequences of 4096 tokens are assumed" in note for note in found["notes"])
    assert document("config.json", "--sequence", 512)["settings"]["sequence"] == 512


def test_parameters_do_not_change_with_rungs_or_length(document, workplace):
    """As published, always: GPT-2's 1024 learned positions stay when fewer tokens are read."""
    (workplace / "config.json").write_text(json.dumps(LLAMA))
    for rungs in ("none", "tf32,bf16,flash", "tf32,bf16,tied-weights"):
        assert document("gpt2", "--rungs", rungs)["parameters"] == 124_439_808
        assert document("config.json", "--rungs", rungs)["parameters"] == 8_030_261_248
    short = document("gpt2", "--sequence", 256)
    assert short["parameters"] == 124_439_808
    assert short["memory"]["weights"] == 4 * (124_439_808 + 47 * 768) + 256**2  # padded rows, a mask of 256 tokens
    assert short["settings"]["sequence"] == 256


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rungs", ["bf16", "bf16,tied-weights"])
def test_a_config_is_tied_as_it_says(document, workplace, tied, rungs):
    """A ladder unties GPT-2 to show what tying does; Llama is run as it is, and a note says what was changed."""
    (workplace / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": tied}))
    found = document("config.json", "--rungs", rungs)
    assert found["settings"]["plan"]["tied"] is tied
    assert ("tied-weights" in found["settings"]["rungs"]) is tied
    changed = ("tied-weights" in rungs) is not tied
    assert any(note.startswith("tied-weights is") for note in found["notes"]) is changed
    assert found["memory"]["weights"] == 4 * found["parameters"] + 4096**2  # and naive attention's mask


def test_rungs_that_the_model_does_not_allow_are_not_assumed(document, workplace):
    (workplace / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "silu"}))
    assumed = document("config.json", "--gpu", "H200")["settings"]["rungs"]
    assert "bf16-residual" in assumed
    assert "sigmoid-gelu" not in assumed, "it has no tanh GELU"


def test_longer_than_the_context_is_said(document, workplace):
    (workplace / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 8192}))
    notes = document("config.json", "--sequence", 16384)["notes"]
    assert any("longer than the context of 8192" in note for note in notes)


def test_what_was_not_measured_is_said(document):
    def told(*words):
        return " ".join(note for note in document("gpt2", *words)["notes"] if note.startswith("memory is reasoned"))

    assert told("--gpu", "H200") == ""  # the default, with the fused loss
    assert told("--rungs", "tf32,bf16,compile,flash") == ""
    assert "several GPUs" in told("--rungs", "bf16", "--gpus", 8)
    assert "the optimizer lion" in told("--rungs", "bf16", "--optimizer", "lion")
    assert "inference" in told("--inference")


def test_a_recipe_gives_rungs_and_micro_batch(document, workplace):
    (workplace / "best.json").write_text('{"rungs": ["tf32", "bf16"], "micro_batch": 5}')
    settings = document("gpt2", "--from", "best.json")["settings"]
    assert (settings["rungs"], settings["micro_batch"]) == (["tf32", "bf16"], 5)
    assert document("gpt2", "--from", "best.json", "--micro-batch", 3)["settings"]["micro_batch"] == 3
    assert document("gpt2", "--rungs", "none")["settings"]["precision"] == "fp32"


def test_an_empty_recipe_is_the_baseline(document, workplace):
    (workplace / "plain.json").write_text('{"rungs": [], "micro_batch": 2}')
    assert document("gpt2", "--from", "plain.json")["settings"]["rungs"] == []


def test_optimizers_change_their_part_only(document):
    usual = document("gpt2", "--gpu", "H200")["memory"]
    found = document("gpt2", "--gpu", "H200", "--optimizer", "adamw-8bit")
    light = found["memory"]
    assert light["optimizer"] == pytest.approx(usual["optimizer"] / 4, rel=0.02)  # and its scales
    assert light["weights"] == usual["weights"]
    update = {row["name"]: row["bytes"] for row in found["roofline"]["light"]["operations"] if "adamw" in row["name"]}
    assert list(update) == ["adamw-8bit"]


def test_many_gpus(document):
    found = document(
        "gpt2-xl", "--gpu", "A100-80", "--gpus", 16, "--zero", 3, "--micro-batch", 4, "--global-batch", 512
    )
    assert found["batch"]["accumulation"] == 8
    assert "MBS 4 x DP 16 x GAS 8 = a global batch of 512 sequences" in found["batch"]["sentence"]
    assert found["memory"]["optimizer"] < document("gpt2-xl", "--gpu", "A100-80")["memory"]["optimizer"] / 15
    assert found["roofline"] is not None
    assert found["tokens_per_second"] is None
    assert "traffic" in found["tokens_per_second_reason"]
    cut = document("gpt2-medium", "--gpu", "A100-80", "--gpus", 8, "--tp", 4, "--pp", 2)
    assert cut["roofline"] is None


def test_inference(document):
    found = document("gpt2", "--gpu", "H200", "--inference")
    training = document("gpt2", "--gpu", "H200")
    assert found["memory"]["optimizer"] == found["memory"]["gradients"] == 0
    head = 2 * 50257 * 768
    assert found["flops_per_token"]["model"] == training["flops_per_token"]["model"] / 3 - head * 1023 / 1024
    assert found["max_micro_batch"] > training["max_micro_batch"]
    assert document("gpt2", "--inference", "half")["memory"]["weights"] < found["memory"]["weights"]


def test_inference_flops_by_hand(document):
    """A prompt of 1024 tokens: 12 layers of 12 x 768^2 weights, attention's pairs, the head once; then one token."""
    flops = document("gpt2", "--gpu", "H200", "--inference")["flops_per_token"]
    layers, head = 2 * 12 * 12 * 768**2, 2 * 50257 * 768
    assert flops["model"] == layers + 12 * 4 * 768 * 1024 + head / 1024
    assert flops["causal"] == layers + 12 * 4 * 768 * 1025 / 2 + head / 1024
    assert flops["hardware"] == layers + 12 * 4 * 768 * 1025 / 2 + 2 * 50304 * 768 / 1024  # the vocabulary is padded
    assert flops["decode"] == layers + head + 12 * 4 * 768 * 1025
    assert document("gpt2")["flops_per_token"]["decode"] is None


def test_a_window_rolls_the_cache(document, workplace):
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
    (workplace / "config.json").write_text(json.dumps(mistral))
    found = document("config.json", "--inference", "half", "--sequence", 32768, "--micro-batch", 1)
    assert found["memory_detail"]["activations"]["keys and values"] == 2**29  # half a GiB, not four


def test_what_does_not_fit_has_no_speed_and_says_what_to_change(document):
    found = document("gpt2-xl", "--gpu", "RTX-4090", "--micro-batch", 16)
    assert found["fits"] is False
    assert found["tokens_per_second"] is None
    assert found["tokens_per_second_reason"] == "it does not fit"
    assert found["what_to_change"][-1]["fits"] is True
    assert found["what_to_change"][-1]["total"] <= found["hardware"]["memory_bytes"]


def test_changes_apply_on_the_device(document):
    named = [change["what"] for change in document("gpt2", "--gpu", "T4", "--micro-batch", 16)["what_to_change"]]
    assert named
    assert not any("flash" in what or "bf16" in what for what in named)


# for people


@pytest.mark.parametrize(
    "words",
    [
        ("gpt2",),
        ("--gpu", "A100-80", "gpt2-xl", "--micro-batch", "8"),
        ("gpt2-xl", "--gpu", "T4", "--micro-batch", "64"),
        ("gpt2", "--gpu", "H200", "--inference"),
        ("gpt2-large", "--gpu", "H100-SXM", "--gpus", "64", "--tp", "4", "--global-batch", "1024"),
    ],
    ids=" ".join,
)
def test_people_get_at_most_100_columns(estimate, words):
    code, out, err = estimate(*words)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for text in ("parameters", "full attention square", "optimizer", "total", "batch"):
        assert text in out


def test_the_page_says_the_numbers(estimate, document):
    words = ("gpt2-xl", "--gpu", "A100-80", "--micro-batch", 8)
    found, (_, out, _) = document(*words), estimate(*words)
    assert f"the largest micro batch that fits is {found['max_micro_batch']}" in " ".join(out.split())
    assert human_bytes(found["memory"]["total"]) in out
    assert f"{found['tokens_per_second']:,.0f} expected" in out
    assert "1,557,611,200 parameters" in out


def test_people_may_see_the_operations(estimate, document):
    words = ("gpt2", "--gpu", "H200", "--micro-batch", 16)
    assert "bound" not in estimate(*words)[1]
    _, out, _ = estimate(*words, "--operations")
    assert max(map(len, out.splitlines())) <= 100
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("operation "))
    rows = lines[start + 2 : start + 12]
    expected = document(*words)["roofline"]["expected"]["operations"]
    dearest = sorted(expected, key=lambda row: row["seconds"], reverse=True)[:10]
    assert [row["name"] in line and row["bound"] in line for row, line in zip(dearest, rows, strict=True)] == [
        True
    ] * 10
    assert lines[start + 12].strip() == ""


def test_only_what_the_ladder_takes_is_sent_there(estimate, workplace):
    (workplace / "config.json").write_text(json.dumps(LLAMA))
    assert "measure it with redline ladder gpt2" in " ".join(estimate("gpt2", "--gpu", "H200")[1].split())
    text = estimate("config.json", "--gpu", "B200", "--optimizer", "adamw-8bit", "--micro-batch", 1)[1]
    assert "expected" in text
    assert "measure it with redline ladder config.json --sequence 4096" in " ".join(text.split())
    (workplace / "shape.json").write_text(json.dumps(to_json(PRESETS["gpt2"].shape)))
    assert "redline ladder" not in estimate("shape.json", "--gpu", "H200")[1]


def test_what_does_not_fit_is_said(estimate):
    _, out, _ = estimate("gpt2-xl", "--gpu", "RTX-4090", "--micro-batch", 16)
    text = " ".join(out.split())
    assert "which does not fit" in text
    assert "to make it fit" in text
    assert "the card ends here" in text
    assert "— (it does not fit)" in text


@pytest.mark.parametrize("micro_batch", [1, 8, 64, 500])
def test_the_bar_is_to_scale(document, micro_batch):
    found = document("gpt2", "--gpu", "A100-80", "--micro-batch", micro_batch)
    bar = memory_bar(found).plain.splitlines()[0]
    assert len(bar) == BAR_COLUMNS
    scale = max(found["memory"]["total"], found["hardware"]["memory_bytes"]) / BAR_COLUMNS
    for name, size in parts_of(found).items():
        assert abs(bar.count(PARTS[name][0]) - size / scale) <= 1
    assert sum(parts_of(found).values()) == found["memory"]["total"]


def test_many_small_parts_do_not_stretch_the_bar():
    """Nine parts of six tenths of a column are five or six columns, not nine."""
    size = 10
    memory = dict.fromkeys(MEMORY, size) | {"total": 9 * size}
    detail = {"working": size, "autocast_cache": size, "fragmentation": size}
    card = {"memory_bytes": round(9 * size / 5.4 * BAR_COLUMNS)}
    bar = memory_bar({"memory": memory, "memory_detail": detail, "hardware": card}).plain
    assert len(bar) == BAR_COLUMNS
    assert BAR_COLUMNS - bar.count("·") == 5


# mistakes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--micro-batch", "-3"), "--micro-batch is -3"),
        (("--micro-batch", "0"), "--micro-batch is 0"),
        (("--micro-batch", "9999999999"), "--micro-batch is 9,999,999,999"),
        (("--sequence", "0"), "--sequence is 0"),
        (("--gpus", "0"), "--gpus is 0"),
        (("--gpu", "A100"), "'A100' is not the name of one device"),
        (("--gpu", "V100-16-SXM", "--rungs", "bf16"), "bf16 does not apply"),
        (("--rungs", "flash"), "flash does not apply"),
        (("--rungs", "flsh"), "unknown rung 'flsh'"),
        (("--rungs", "tf32", "--from", "best.json"), "--from and --rungs were given together"),
        (("--from", "missing.json"), "cannot read the recipe missing.json"),
        (("--rungs", "bf16,fp16"), "bf16 and fp16 were given together"),
        (("--rungs", "bf16,flash,cudnn-attention"), "flash and cudnn-attention were given together"),
        (("--rungs", "fused-loss,chunked-loss"), "fused-loss and chunked-loss were given together"),
        (("--optimizer", "adam"), "unknown optimizer 'adam'"),
        (("--optimizer", ""), "unknown optimizer ''"),
        (("--inference", "--optimizer", ""), "--optimizer with --inference"),
        (("--sequence", "2048"), "2048 tokens do not fit 1024 learned positions"),
        (("--zero", "7", "--gpus", "8"), "ZeRO stage 7"),
        (("--zero", "-1"), "ZeRO stage -1"),
        (("--zero", "1"), "ZeRO stage 1 with one replica"),
        (("--zero", "3"), "ZeRO stage 3 with one replica"),
        (("--tp", "3"), "1 GPU cannot be cut into replicas of 3 x 1"),
        (("--tp", "5", "--gpus", "5"), "12 heads cannot be shared by --tensor 5"),
        (("--global-batch", "100", "--gpus", "8", "--micro-batch", "16"), "a global batch of 100"),
        (("--inference", "fp4"), "unknown inference precision 'fp4'"),
        (("--inference", "--zero", "1"), "--zero with --inference"),
        (("nonsense",), "unknown workload 'nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_problem_why_fix(estimate, words, problem):
    code, out, err = estimate(*words)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert lines[0].startswith(f"problem: {problem}")
    assert lines[1].startswith("why:")
    assert lines[2].startswith("fix:")


# from Python


def test_the_python_function_returns_the_document(document):
    found = redline.estimate("gpt2-xl", gpu="A100-80", micro_batch=8, rungs="bf16,flash", gpus=2, zero=1)
    words = ("gpt2-xl", "--gpu", "A100-80", "--micro-batch", 8, "--rungs", "bf16,flash", "--gpus", 2, "--zero", 1)
    assert {**found, "command": ""} == {**document(*words), "command": ""}
    assert found["command"].startswith("redline.estimate(workload='gpt2-xl', gpu='A100-80', micro_batch=8")
    assert redline.estimate(inference=True)["settings"]["inference"] is True
    assert redline.estimate(inference="half")["settings"]["inference"] == "half"
    with pytest.raises(UserError, match="^micro_batch is 0"):
        redline.estimate(micro_batch=0)


def test_lint_from_python_is_the_commands(capsys, workplace):
    for words, given in (
        (("gpt2-xl", "--gpu", "A100-80", "--tp", "2"), {"workload": "gpt2-xl", "gpu": "A100-80", "tp": 2}),
        (("--ignore", "vocabulary", "--dtype", "fp16"), {"ignore": "vocabulary", "dtype": "fp16"}),
    ):
        assert cli.main(["lint", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        found = json.loads(json.dumps(redline.lint(**given)))
        notes = [in_python(note, inspect.signature(redline.lint).parameters) for note in told["notes"]]
        apart = {"date": "", "command": ""}
        assert {**found, **apart} == {**told, **apart, "notes": notes}
    redline.lint("gpt2", gpu="H200", fix=workplace / "fixed.json")
    assert json.loads((workplace / "fixed.json").read_text())["vocab"] == 50304
    with pytest.raises(UserError, match="unknown rule"):
        redline.lint(ignore="nonsense")


def test_hardware_from_python_is_the_commands(capsys):
    cli.main(["hardware", "--name", "NVIDIA L40S", "--json"])
    assert redline.hardware("NVIDIA L40S") == json.loads(capsys.readouterr().out)
    assert redline.hardware("H200")["known"]["best_tflops"]["bf16"] == 795
    with pytest.raises(UserError, match="^seconds without measure"):
        redline.hardware(seconds=3)


# torch and time

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from redline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_works_without_torch():
    words = ("estimate", "gpt2-xl", "--gpu", "A100-80", "--micro-batch", "8")
    for more in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, *words, *more], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_arithmetic_takes_no_time(estimate):
    """Half a second is for everything, the interpreter's start included; the work itself is a small part of it."""
    estimate("gpt2-xl", "--gpu", "RTX-4090")  # imports
    start = time.process_time()
    estimate("gpt2-xl", "--gpu", "RTX-4090", "--micro-batch", 512)
    assert time.process_time() - start < 0.25


def test_the_machine_is_asked_only_when_no_gpu_is_named(estimate, monkeypatch):
    def never():
        raise AssertionError("the driver was asked")

    monkeypatch.setattr("redline.machine.this_machine", never)
    monkeypatch.setattr(local, "this_machine", never)
    assert estimate("gpt2", "--gpu", "H200")[0] == 0


@pytest.mark.parametrize(
    ("flops", "shown"), [(854.4e6, ("MFLOP", "854.4")), (256_000, ("kFLOP", "256.0")), (256, ("FLOP", "256"))]
)
def test_flops_are_shown_in_a_unit_that_leaves_them_digits(flops: float, shown: tuple[str, str]) -> None:
    unknown = dict.fromkeys(("causal", "hardware", "six_n", "decode", "causal_convention", "hardware_convention"))
    table = flops_table({"flops_per_token": {**unknown, "model": flops, "convention": "full", "passes": "forward"}})
    assert (str(table.columns[1].header).strip(), *table.columns[1].cells) == shown
