"""`redline estimate` in this process: words in, exit code and streams out; the machine is made up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from redline import cli
from redline.core.devices import find_device
from redline.core.hardware import MeasuredPeaks
from redline.core.units import human_bytes
from redline.machine import Gpu, Machine, local, save_measured
from redline.predict.memory import predict_memory
from redline.report.estimate import BAR_COLUMNS, PARTS, memory_bar, parts_of
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
    assert found["parameters"] == 163_037_184  # untied without that rung: another table of 50257 x 768


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
    slow = MeasuredPeaks(
        name=find_device("H200").names[0],
        driver=None,
        kind="cuda",
        matmul_tflops={"bf16": 100.0},
        bandwidth=4e12,
        bandwidths={"copy": 4e12},
        rates=(),
        workload="gpt2",
        micro_batch=16,
        date="2026-11-15T00:00:00+00:00",
        versions={},
        command="redline hardware --measure",
    )
    save_measured(slow)
    after = document("gpt2", "--gpu", "H200")
    assert after["roofline"]["expected"]["peaks"]["matmul_tflops"] == 100.0
    assert "2026-11-15" in after["roofline"]["expected"]["peaks"]["source"]
    assert after["tokens_per_second"] < before["tokens_per_second"] / 3
    assert after["roofline"]["light"] == before["roofline"]["light"]


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
    assert light["optimizer"] == usual["optimizer"] / 4
    assert light["weights"] == usual["weights"]
    assert any("only memory knows adamw-8bit" in note for note in found["notes"])


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
    assert found["flops_per_token"]["model"] == training["flops_per_token"]["model"] / 3
    assert found["max_micro_batch"] > training["max_micro_batch"]
    assert document("gpt2", "--inference", "half")["memory"]["weights"] < found["memory"]["weights"]


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
        (("--optimizer", "adam"), "unknown optimizer 'adam'"),
        (("--zero", "7", "--gpus", "8"), "ZeRO stage 7"),
        (("--zero", "-1"), "ZeRO stage -1"),
        (("--zero", "1"), "ZeRO stage 1 with one replica"),
        (("--tp", "3"), "1 GPUs cannot be cut into replicas of 3 x 1"),
        (("--tp", "5", "--gpus", "5"), "12 heads cannot be shared by TP 5"),
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
