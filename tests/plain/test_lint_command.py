"""`redline lint` in this process: words in, exit code, streams and files out. Nothing is timed; times are made up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import redline
from redline import cli
from redline.commands import lint as lint_command
from redline.core.devices import find_device
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.values import from_json
from redline.core.workload import Shape
from redline.predict.lint_rules import RULES
from redline.search import launch, matmuls
from redline.workloads import PRESETS, resolve_shape
from redline.workloads.huggingface import FAMILIES
from redline.workloads.shapes import shape_fields

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 10922,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty current folder, and a machine without a GPU."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def lint(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main(["lint", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def document(lint):
    def call(*words):
        code, out, err = lint(*words, "--json")
        assert (code, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    return call


@pytest.fixture
def mistake(lint, workplace):
    def call(*words):
        before = sorted(workplace.rglob("*"))
        code, out, err = lint(*words)
        assert (code, out) == (2, ""), err
        lines = err.splitlines()
        assert [line[:9] for line in lines] == ["problem: ", "why:     ", "fix:     "], err
        assert sorted(workplace.rglob("*")) == before
        return {"problem": lines[0][9:], "why": lines[1][9:], "fix": lines[2][9:]}

    return call


@pytest.fixture
def write(workplace):
    def write(data, name="config.json"):
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace / name).write_text(json.dumps(data, indent=2))
        return workplace / name

    return write


# the document


def test_gpt2_has_one_finding(document):
    found = document("gpt2", "--gpu", "H200")
    assert found["shape"]["vocab"] == 50257
    assert found["hardware"]["name"] == "H200"
    (finding,) = found["findings"]
    assert (finding["rule"], finding["kind"]) == ("vocabulary", "alignment")
    assert "50304" in finding["fix"]
    assert 1.0 < finding["predicted_gain"] < 1.3  # measured: 1.08
    assert finding["measured_gain"] is None
    assert found["suggested"] == {**found["shape"], "vocab": 50304}


def test_the_suggested_shape_has_none(document, write):
    shape = write(shape_fields(replace(PRESETS["gpt2"].shape, vocab=50304)), "shape.json")
    found = document(shape, "--gpu", "H200", "--micro-batch", 16)
    assert (found["findings"], found["suggested"]) == ([], None)


def test_gpt2_is_the_default(document):
    assert document()["name"] == "gpt2"


def test_gpt2_xl_has_its_heads(document):
    rules = [finding["rule"] for finding in document("gpt2-xl", "--gpu", "H200")["findings"]]
    assert rules == ["head-count", "vocabulary"]
    assert [finding["rule"] for finding in document("gpt2-xl", "--ignore", "head-count")["findings"]] == ["vocabulary"]


def test_without_a_device_alignment_and_rules_alone(document):
    found = document("gpt2")
    assert found["hardware"]["name"] is None
    assert found["hardware"]["reason"]
    assert found["findings"][0]["predicted_gain"] is None
    assert any(note.startswith("unknown device: alignment checked for 128 bytes") for note in found["notes"])


def test_this_machines_device_is_the_default(document, monkeypatch):
    import redline.machine

    machine = replace(redline.machine.this_machine(), kind="cuda", name="NVIDIA A100-SXM4-80GB")
    gpu = redline.machine.Gpu(name=machine.name, index=0, multiprocessors=108)
    monkeypatch.setattr(redline.machine, "this_machine", lambda: replace(machine, gpus=(gpu,)))
    assert document("gpt2")["hardware"]["name"] == "A100-80-SXM"


def test_settings_reach_the_gemms(document, write):
    path = write(LLAMA)
    found = document(
        path, "--gpu", "A100-80", "--micro-batch", "3", "--sequence", "512", "--tp", "2", "--dtype", "fp16"
    )
    assert found["settings"] == {"micro_batch": 3, "tp": 2, "dtype": "fp16"}
    assert "up forward 1536x5461x4096" in found["findings"][0]["where"]


def test_choices_made_for_the_user_are_noted(document, write):
    found = document(write(LLAMA), "--gpu", "H200")
    assert found["shape"]["sequence"] == 4096
    assert found["settings"]["micro_batch"] == 4
    notes = "\n".join(found["notes"])
    assert "sequences of 4096 tokens are assumed, the context is 131072" in notes
    assert "micro batch 4 is assumed, 16,384 tokens" in notes


def test_the_dtype_follows_the_device(document, mistake):
    assert document("gpt2", "--gpu", "T4")["settings"]["dtype"] == "fp16"
    assert document("gpt2", "--gpu", "H200")["settings"]["dtype"] == "bf16"
    assert "fp16" in mistake("gpt2", "--gpu", "T4", "--dtype", "bf16")["fix"]


# people


def test_the_table_fits_100_columns_and_cuts_nothing(lint, document, write, workplace):
    code, out, err = lint(write(LLAMA), "--gpu", "H200")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out
    finding = document(workplace / "config.json", "--gpu", "H200")["findings"][0]
    shown = set(out.split())
    for text in (finding["problem"], finding["fix"], finding["why"], "mlp-width up, down predicted"):
        assert set(text.split()) <= shown
    assert "measured" not in shown


def test_a_clean_shape_says_what_was_checked(lint, write):
    shape = write(shape_fields(replace(PRESETS["gpt2"].shape, vocab=50304)), "shape.json")
    _, out, _ = lint(shape, "--gpu", "H200")
    assert "nothing ugly: alignment, tiles, waves and rules of thumb of every GEMM" in out
    _, out, _ = lint(shape)
    assert "nothing ugly: alignment and rules of thumb of every GEMM" in out


def test_strict_fails_on_findings_alone(lint, write):
    assert lint("gpt2", "--strict")[0] == 1
    assert lint("gpt2", "--strict", "--ignore", "vocabulary")[0] == 0
    assert lint("gpt2", "--strict", "--json")[0] == 1


def test_strict_lets_pass_what_nothing_says_costs_anything(lint, document, write):
    mild = write(shape_fields(replace(PRESETS["gpt2"].shape, vocab=50264)), "mild.json")
    code, out, _ = lint(mild, "--gpu", "H200", "--strict")
    assert code == 0
    assert "mild: --strict lets it pass" in out
    (finding,) = document(mild, "--gpu", "H200")["findings"]
    assert (finding["mild"], finding["predicted_gain"]) == (True, None)
    assert finding["no_predicted_gain"] == "no published figure says what rows of 16 bytes cost"
    assert document("gpt2", "--gpu", "H200")["findings"][0]["mild"] is False


def test_a_gain_that_is_not_predicted_has_a_reason(lint):
    _, out, _ = lint("gpt2", "--tp", "2", "--gpu", "H200")
    assert "no gain is predicted: 2 GPUs cannot share vocabulary 50257" in " ".join(out.split())


# --fix


def test_fix_writes_a_config_that_differs_in_the_fix_alone(lint, write, workplace):
    path = write(LLAMA, "llama/config.json")
    before = path.read_bytes()
    code, out, _ = lint(workplace / "llama", "--gpu", "H200", "--fix")
    assert code == 0
    fixed = json.loads((workplace / "llama.fixed.json").read_text())
    assert fixed == {**LLAMA, "intermediate_size": 10944}
    assert list(fixed) == list(LLAMA)
    assert path.read_bytes() == before
    assert "wrote llama.fixed.json" in out
    assert lint(workplace / "llama.fixed.json", "--gpu", "H200", "--strict")[0] == 0


def test_fix_of_a_preset_is_a_shape_file(lint, document, workplace):
    lint("gpt2", "--fix", "mine.json")
    assert resolve_shape("mine.json").shape == replace(PRESETS["gpt2"].shape, vocab=50304)
    assert document("mine.json")["findings"] == []


def test_fix_overwrites_only_when_told(lint, mistake, write, workplace):
    path = write(LLAMA)
    assert "--overwrite" in mistake(path, "--fix", path)["fix"]
    folder = mistake(path, "--fix", workplace)
    assert "is a folder" in folder["problem"]
    assert "fixed.json" in folder["fix"]
    assert lint(path, "--fix", path, "--overwrite")[0] == 0
    assert json.loads(path.read_text()) == {**LLAMA, "intermediate_size": 10944}
    assert "cannot write" in mistake("gpt2", "--fix", "absent/folder/x.json")["problem"]


def test_fix_writes_nothing_when_no_size_is_to_change(lint, workplace):
    code, out, _ = lint("gpt2", "--ignore", "vocabulary", "--fix")
    assert code == 0
    assert "nothing was written" in out
    assert list(workplace.iterdir()) == []


def test_a_shorter_sequence_is_a_setting_and_no_size_of_the_model(lint, document, write, workplace):
    """1000 tokens at a time: GPT-2 keeps its 1024 positions, whatever else is mended."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 2048}
    path = write({**config, "vocab_size": 50257})
    found = document(path, "--gpu", "H200", "--sequence", "1000")
    assert [finding["rule"] for finding in found["findings"]] == ["vocabulary", "sequence-length"]
    assert (found["shape"]["sequence"], found["shape"]["max_positions"]) == (1000, 2048)
    lint(path, "--gpu", "H200", "--sequence", "1000", "--fix", "fixed.json")
    assert json.loads((workplace / "fixed.json").read_text()) == {**config, "vocab_size": 50304}
    code, out, _ = lint("gpt2", "--sequence", "1000", "--ignore", "vocabulary", "--fix")
    assert (code, "nothing was written" in out) == (0, True)


def test_learned_positions_have_an_end(mistake):
    error = mistake("gpt2", "--sequence", "2048")
    assert error["problem"] == "2048 tokens do not fit 1024 learned positions"
    assert "1024 tokens or fewer" in error["fix"]


FAMILY = {
    "hidden_size": 1000,
    "intermediate_size": 2666,
    "num_hidden_layers": 8,
    "num_attention_heads": 25,
    "vocab_size": 32001,
    "max_position_embeddings": 1000,
}
ODD_GPT2 = {"n_embd": 1000, "n_layer": 8, "n_head": 25, "vocab_size": 32001, "n_positions": 1000}


@pytest.mark.parametrize(
    "more", [{}, {"num_key_value_heads": 25}, {"num_key_value_heads": 5}, {"head_dim": 40}], ids=str
)
@pytest.mark.parametrize("device", [(), ("--gpu", "H200")], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_fix_writes_reads_as_what_was_suggested(document, write, workplace, family, device, more):
    sizes = ODD_GPT2 if family == "gpt2" else {"num_key_value_heads": 25, **FAMILY, **more}
    path = write({"model_type": family, **sizes})
    suggested = document(path, *device, "--fix", "fixed.json")["suggested"]
    read, shape = resolve_shape("fixed.json").shape, from_json(Shape, suggested)
    same = {"kv_heads": 1, "head_dim": 1}  # compared below: a shape leaves out what says no more than the heads do
    assert replace(read, **same) == replace(shape, **same)
    assert (read.key_value_heads, read.head_width) == (shape.key_value_heads, shape.head_width)
    assert read != resolve_shape(str(path)).shape


# mistakes


@pytest.mark.parametrize("option", ["--tp", "--micro-batch", "--sequence"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", str(2**40)])
def test_counts_are_whole_and_sane(mistake, option, value):
    assert option in mistake("gpt2", f"{option}={value}")["problem"]


def test_a_call_from_python_gives_the_same_document_and_the_same_mistakes(document):
    found, shown = redline.lint("gpt2", gpu="H200", tp=2), document("gpt2", "--gpu", "H200", "--tp", "2")
    own = ("command", "date")
    assert {key: found[key] for key in found if key not in own} == {key: shown[key] for key in shown if key not in own}
    with pytest.raises(UserError, match="int3"):
        redline.lint("gpt2", dtype="int3")


def test_wrong_names_list_the_right_ones(mistake):
    assert "gpt2-medium" in mistake("gpt2-medum")["fix"]
    assert "H200" in mistake("gpt2", "--gpu", "H20O")["fix"]
    assert all(rule.name in mistake("gpt2", "--ignore", "vocab")["fix"] for rule in RULES)
    assert "'int3'" in mistake("gpt2", "--dtype", "int3")["problem"]


def test_options_that_need_another(mistake):
    assert "--fix" in mistake("gpt2", "--overwrite")["fix"]
    assert "--measure" in mistake("gpt2", "--seconds", "5")["fix"]
    assert "--seconds" in mistake("gpt2", "--measure", "--seconds", "0")["problem"]


def test_negative_sizes_of_a_file(mistake, write):
    assert "vocab_size is -1" in mistake(write({**LLAMA, "vocab_size": -1}))["problem"]


# --measure, with a machine and times that are made up


@pytest.fixture
def h200_here(monkeypatch):
    """Every call takes its FLOPs at 1 TFLOP/s, and twice that where a row is odd; the calls are kept."""
    asked = []

    def time_gemms(gemms, *, dtype, device, seconds, on_progress):
        asked.append((gemms, dtype, device, seconds))
        on_progress("timing", done=1, total=len(gemms))
        return [gemm.flops / 1e12 * (2 if {gemm.m, gemm.n, gemm.k} & {50257, 10922} else 1) for gemm in gemms]

    seen = Hardware(kind="cuda", name="NVIDIA H200", multiprocessors=132, driver="580.1")
    monkeypatch.setattr(launch, "probe_machine", lambda device: (seen, {"torch": "2.11.0"}))
    monkeypatch.setattr(matmuls, "time_gemms", time_gemms)
    return asked


def test_measured_beside_predicted(lint, h200_here):
    code, out, _ = lint("gpt2", "--measure", "--json", "--seconds", "7")
    found = json.loads(out)
    (finding,) = found["findings"]
    ((gemms, dtype, device, seconds),) = h200_here
    assert (dtype, device, seconds) == ("bf16", "cuda", 7.0)
    rows = [row for row in found["gemms"] if row["state"] == "before"]
    before = sum(row["count"] * row["seconds"] for row in rows)
    after = sum(row["count"] * row["seconds"] for row in found["gemms"] if row["state"] == "after")
    assert len(rows) == 4 * 3 + 3 + 6
    assert finding["measured_gain"] == pytest.approx(before / after - 1)
    assert finding["measured_gain"] > 0.1
    assert found["hardware"]["name"] == "H200"
    assert found["hardware"]["measured"] == {"name": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2.11.0"}}
    _, out, err = lint("gpt2", "--measure")
    assert f"{100 * finding['measured_gain']:+.1f} %" in out
    assert "measured" in out


def test_a_clean_shape_is_not_measured(lint, h200_here):
    assert lint("gpt2", "--ignore", "vocabulary", "--measure")[0] == 0
    assert h200_here == []


def test_a_product_that_could_not_be_timed_leaves_the_gain_unknown(lint, h200_here, monkeypatch):
    monkeypatch.setattr(matmuls, "time_gemms", lambda gemms, **_: [None] * len(gemms))
    found = json.loads(lint("gpt2", "--measure", "--json")[1])
    assert found["findings"][0]["measured_gain"] is None


def test_measuring_needs_the_device_that_is_here(mistake, h200_here, monkeypatch, cpu):
    assert "NVIDIA H200" in mistake("gpt2", "--measure", "--gpu", "A100-80")["why"]
    monkeypatch.setattr(launch, "probe_machine", lambda device: (cpu, {}))
    assert mistake("gpt2", "--measure")["problem"] == "no GPU to measure on"
    assert h200_here == []


def test_the_named_device_may_be_this_one(lint, h200_here):
    assert lint("gpt2", "--measure", "--gpu", find_device("H200").label)[0] == 0


# the shapes of the records


@pytest.mark.parametrize(("name", "rule"), [("dff10922", "mlp-width"), ("width1000", "model-width")])
def test_shapes_of_the_records(document, repository, name, rule):
    (finding,) = document(repository / "records" / "shapes" / f"{name}.json", "--gpu", "H200")["findings"]
    assert finding["rule"] == rule


# without torch

BLOCKED = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "numpy", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTorch())
from redline.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [("gpt2", "--gpu", "H200"), ("gpt2-xl", "--json"), ("config.json", "--fix")], ids=str)
def test_works_without_torch(words, write):
    """How long it takes is measured in benchmarks/startup.py."""
    write(LLAMA)
    done = subprocess.run([sys.executable, "-c", BLOCKED, "lint", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lint", "--help"])
    shown = capsys.readouterr().out
    for name in ("gpu", "dtype", "tp", "micro-batch", "sequence", "ignore", "strict", "fix", "measure", "json"):
        assert f"--{name}" in shown
    assert lint_command.DEFAULT_WORKLOAD in shown
