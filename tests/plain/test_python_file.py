"""A user's Python file without running it: its words, what stands in it, and the arithmetic on what was seen of it."""

from __future__ import annotations

import hashlib
import io
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.core.devices import find_device
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.measurement import GradientCheck, Measurement
from redline.core.plan import Plan
from redline.core.traced import (
    Attention,
    Blocks,
    Embedding,
    Line,
    Place,
    Product,
    Recurrent,
    Saved,
    Sync,
    Tensors,
    Traced,
    Unlisted,
)
from redline.core.units import batch_text, rate_unit
from redline.core.user_code import blaming, users_line
from redline.core.values import from_json, to_json
from redline.core.workload import Shape, Workload
from redline.predict.efficiency import efficiency
from redline.predict.estimate import Target
from redline.predict.fitting import TracedCase, case_of
from redline.predict.lint_rules import MEANINGFUL_GAIN
from redline.predict.memory import predict_memory
from redline.predict.tiles import estimate
from redline.predict.traced import gemms_of, step_of
from redline.predict.traced_estimate import TracedSubject, traced_document
from redline.predict.traced_lint import findings_of, quiet_sizes, traced_lint_document, unjudged_products
from redline.predict.verdict import judge
from redline.report.estimate import print_estimate
from redline.report.next_steps import ladder_steps
from redline.report.table import shown_columns
from redline.rungs import LADDER, find_rung, published_rungs, usual_rungs, why_not
from redline.search import inspect
from redline.search.batch_size import range_of
from redline.workloads.python_file import find_python_file, for_training, python_workload

GOOD = "def net():\n    return 1\n\ndef make_batch(size, seed):\n    return 2\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def to_file(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


@pytest.fixture
def seen() -> Traced:
    """Two layers of 10 to 30 to 20, seven items a sample."""
    return Traced(
        parameters=960,
        trainable=950,
        tensors=(Tensors(sizes=(30, 10), of_layer=True), Tensors(sizes=(650,), of_layer=False)),
        buffer_bytes=100,
        items_per_sample=7,
        loss="model",
        batch_bytes=40,
        flops_forward=Line(constant=5.0, per_sample=1e9),
        flops_backward=Line(constant=0.0, per_sample=2e9),
        saved=(
            Saved(precision="fp32", attention="naive", checkpointing="none", bytes=Line(constant=1, per_sample=1000)),
            Saved(precision="bf16", attention="naive", checkpointing="none", bytes=Line(constant=2, per_sample=600)),
            Saved(precision="bf16", attention="fused", checkpointing="none", bytes=Line(constant=2, per_sample=500)),
            Saved(precision="fp32", attention="naive", checkpointing="full", bytes=Line(constant=1, per_sample=50)),
        ),
        products=(
            Product(where="up", kind="linear", m=7, n=30, k=10, grows="m", count=3, made=Place(file="a.py", line=4)),
            Product(where="mix", kind="product", m=7, n=7, k=8, batch=2, grows="batch"),
        ),
    )


def workload_with(seen: Traced, write: Callable[[str], Path]) -> Workload:
    found = find_python_file(f"{write(GOOD)}:net")
    assert found is not None
    return python_workload(found, seen)


# words and files


@pytest.mark.parametrize("words", ["gpt2", "models/config.json", "python", "file.pyx:net"])
def test_words_that_mean_something_else(words: str) -> None:
    assert find_python_file(words) is None


def test_a_file_is_known_by_its_place_and_its_bytes(write: Callable[[str], Path]) -> None:
    path = write(GOOD)
    found = find_python_file(f"{path}:net")
    assert found is not None
    assert found.source.digest == hashlib.sha256(GOOD.encode()).hexdigest()
    assert (found.source.kind, found.source.file, found.source.factory) == ("python", str(path.resolve()), "net")


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        pytest.param(GOOD, "", "model.py:net", id="no-name"),
        pytest.param("class Net: ...\n" + GOOD, "", "model.py:net", id="factory-before-class"),
        pytest.param("class Net: ...\nmake_batch = 1\n", "", "model.py:Net", id="class-alone"),
        pytest.param(GOOD, "nett", "did you mean 'net'?", id="misspelt"),
        pytest.param("def net():\n    return (1\n", "net", "model.py:2", id="no-python"),
        pytest.param("def net():\n    return 1\n", "net", "def make_batch(size, seed)", id="no-batches"),
    ],
)
def test_mistakes_that_can_be_seen_without_running_it(
    text: str, name: str, said: str, write: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError) as raised:
        find_python_file(f"{write(text)}:{name}")
    assert said in " ".join(text for _, text in raised.value.lines())


def test_what_goes_with_a_model_is_not_proposed_as_one(write: Callable[[str], Path]) -> None:
    text = "class Net: ...\ndef _hidden(): ...\ndef a_loss(): ...\ndef net_batch(): ...\ndef net_shape(): ...\n"
    with pytest.raises(UserError) as raised:
        find_python_file(f"{write(text + GOOD)}:other")
    assert raised.value.fix == "known: a_loss, net"  # there is no a that a_loss could be the loss of


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        pytest.param(
            "def b(size, seed): ...\ndef net(): ...\ndef vit(width=3): ...\n", ":net (or vit)", id="batch-first"
        ),
        pytest.param("def b(size=2, *, seed=0): ...\ndef net(*_, **__): ...\n", ":net", id="batch-with-defaults"),
        pytest.param("def loss(): ...\ndef main(): ...\ndef wide(*, width): ...\nclass Net: ...\n", ":Net", id="class"),
        pytest.param(
            "class Wide:\n    def __init__(self, width): ...\nclass Net:\n    def __init__(self, width=3): ...\n",
            ":Net",
            id="class-without-arguments",
        ),
        pytest.param("def b(size, seed): ...\n", ":build", id="none"),
    ],
)
def test_a_file_alone_is_answered_with_what_can_make_a_model(text: str, fix: str, write: Callable[[str], Path]) -> None:
    path = write(text)
    with pytest.raises(UserError) as raised:
        find_python_file(str(path))
    assert raised.value.fix.endswith(f"behind a colon: {path}{fix}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        find_python_file(f"{tmp_path}/nothing.py:net")


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import net, make_batch\n",
        "from elsewhere import *\n",
        "try:\n    import x as net\nexcept ImportError:\n    net = None\nmake_batch = net\n",
        "class net: ...\ndef net_batch(size, seed): ...\n",
    ],
    ids=["imported", "starred", "tried", "class-with-its-own-batch"],
)
def test_names_that_come_from_elsewhere_are_left_to_the_process_that_runs_it(
    text: str, write: Callable[[str], Path]
) -> None:
    assert find_python_file(f"{write(text)}:net") is not None


def test_the_file_is_not_run(write: Callable[[str], Path]) -> None:
    assert find_python_file(f"{write(GOOD + 'raise SystemExit(1)')}:net") is not None


# a workload


def test_a_traced_workload_is_its_own_json(seen: Traced, write: Callable[[str], Path]) -> None:
    workload = workload_with(
        replace(
            seen,
            attention=(Attention(place=Place(file="a.py", line=3, last=5), causal=True),),
            syncs=(Sync(place=Place(file="a.py", line=9), detail="waits", kind="synchronisation"),),
            blocks=Blocks(name="blocks", kind="Block", count=4),
            imports={"b.py": "00"},
        ),
        write,
    )
    assert from_json(Workload, json.loads(json.dumps(to_json(workload)))) == workload
    assert from_json(Workload, to_json(workload)).shape.layers == 4


def test_a_union_takes_the_class_whose_fields_fit(tiny: Workload) -> None:
    again = from_json(Workload, to_json(tiny))
    assert isinstance(again.shape, Shape)
    with pytest.raises(ValueError, match="has no field nonsense"):
        from_json(Workload, {**to_json(tiny), "shape": {"nonsense": 1}})


def test_every_rung_either_applies_or_says_why_not(seen: Traced, write: Callable[[str], Path], h200: Hardware) -> None:
    workload = workload_with(seen, write)
    for rung in LADDER[1:]:
        reason = why_not(rung, workload, h200, Plan(autocast="bf16", compile=True))
        assert reason is None or len(reason) > 10
    assert not set(usual_rungs(workload, h200)) & workload.cannot.keys()
    assert published_rungs(workload) == ()
    assert {"bf16", "compile", "fused-adamw", "no-sync", "loader-workers"} <= set(usual_rungs(workload, h200))


def test_what_is_seen_opens_rungs(seen: Traced, write: Callable[[str], Path]) -> None:
    plain = workload_with(seen, write).cannot
    able = replace(seen, sdpa=True, tanh_gelus=1, blocks=Blocks(name="layers", kind="Layer", count=2))
    opened = plain.keys() - workload_with(able, write).cannot.keys()
    assert opened == {"flash", "cudnn-attention", "sigmoid-gelu", "checkpointing"}
    for name in opened:
        find_rung(name)


@pytest.mark.parametrize(
    ("rows", "said"), [(None, "no embedding was found"), (50257, "make them 50,304"), (50304, "128 already")]
)
def test_why_a_vocabulary_is_not_padded_from_outside(
    rows: int | None, said: str, seen: Traced, write: Callable[[str], Path]
) -> None:
    tables = () if rows is None else (Embedding(name="wte", rows=rows, width=8, made=Place(file="m.py", line=31)),)
    head = Product(where="head", kind="linear", m=7, n=rows or 5, k=8, grows="m", made=Place(file="m.py", line=40))
    reason = workload_with(replace(seen, embeddings=tables, products=(head,)), write).cannot["padded-vocab"]
    assert said in reason
    assert ("m.py:31" in reason) == ("m.py:40" in reason) == (rows == 50257)


def test_the_head_of_a_classifier_is_not_its_vocabularys(seen: Traced, write: Callable[[str], Path]) -> None:
    table = Embedding(name="emb", rows=1000, width=8, made=Place(file="m.py", line=3))
    head = Product(where="head", kind="linear", m=1, n=5, k=8, grows="m", made=Place(file="m.py", line=4))
    cannot = workload_with(replace(seen, embeddings=(table,), products=(head,)), write).cannot
    reason = "the head is not the vocabulary's: head (made at m.py:4) gives 5 outputs, and emb has 1,000 rows"
    assert (cannot["padded-vocab"], cannot["tied-weights"]) == (reason, reason)


def test_lint_and_ladder_pad_a_vocabulary_alike(seen: Traced, write: Callable[[str], Path]) -> None:
    table = Embedding(name="wte", rows=257, width=64, made=Place(file="m.py", line=3))
    head = Product(where="head", kind="linear", m=512, n=257, k=64, grows="m", made=Place(file="m.py", line=4))
    model = replace(seen, embeddings=(table,), products=(head,))
    (found,) = findings_of(model, micro_batch=16, dtype="bf16", device=None)
    assert found.fix.startswith("384 at m.py:3, m.py:4;")
    reason = workload_with(model, write).cannot["padded-vocab"]
    assert reason == "wte has 257 rows at m.py:3: make them 384 there, and the head's at m.py:4"


def test_a_size_that_costs_too_little_is_told_with_its_gain(seen: Traced) -> None:
    """30 channels read more than they compute, on a fast device: mending them is predicted to give little."""
    first, second = (
        Product(where=where, kind="convolution", m=256, n=30, k=k, area=9, grows="m")
        for where, k in (("a", 27), ("b", 270))
    )
    classes = Product(where="head", kind="linear", m=1, n=7, k=30, grows="m")
    grouped = Product(where="c", kind="convolution", m=256, n=15, k=135, batch=2, area=9, grows="m", count=2)
    model = replace(seen, products=(first, replace(second, count=2), grouped, classes), embeddings=())
    device = find_device("NVIDIA H200")
    assert findings_of(model, micro_batch=512, dtype="bf16", device=device) == ()
    (told,) = quiet_sizes(model, micro_batch=512, dtype="bf16", device=device)
    assert "30 (a, b, head) is no multiple of 8" in told
    assert float(told.partition("give +")[2].partition(" %")[0]) < 100 * MEANINGFUL_GAIN
    (finding,) = findings_of(model, micro_batch=512, dtype="bf16", device=None)  # nobody knows what it costs
    assert finding.problem.startswith("30 is no multiple of 8")
    assert quiet_sizes(model, micro_batch=512, dtype="bf16", device=None) == ()


def test_training_drops_what_the_file_drops(seen: Traced, write: Callable[[str], Path]) -> None:
    workload = workload_with(replace(seen, sdpa=True, sdpa_drops=True, dropout=("drop",)), write)
    assert not workload.source.dropout
    assert for_training(workload, "cuda").source.dropout
    assert "flash" not in for_training(workload, "cuda").cannot
    assert "no dropout" in for_training(workload, "cpu").cannot["flash"]
    # What drops or draws elsewhere is no business of attention's kernel.
    elsewhere = workload_with(replace(seen, sdpa=True, random=True, dropout=("mlp.3",)), write)
    assert "flash" not in for_training(elsewhere, "cpu").cannot


def test_a_shape_that_is_not_the_models_is_told(seen: Traced, write: Callable[[str], Path]) -> None:
    sizes = {"layers": 1, "heads": 1, "d_model": 2, "d_ff": 2, "vocab": 3, "sequence": 4, "tied": False}
    notes = workload_with(replace(seen, described=sizes), write).notes
    (note,) = [note for note in notes if "shape()" in note]
    assert note.endswith("and the model has 960")


def test_places_read_as_people_write_them() -> None:
    assert str(Place(file="/x/vit.py", line=41, last=44)) == "vit.py:41-44"
    assert str(Place(file="/x/vit.py", line=41)) == "vit.py:41"


# arithmetic


def test_memory_adds_up_what_was_seen(seen: Traced) -> None:
    memory = predict_memory(seen, Plan(), micro_batch=8)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * 960 + 100, 4 * 950, 8 * 950)
    assert memory.activation_bytes == 1 + 8 * 1000
    assert predict_memory(seen, Plan(autocast="bf16"), micro_batch=8).activation_bytes == 2 + 8 * 600
    fused = Plan(autocast="bf16", attention="flash")
    assert predict_memory(seen, fused, micro_batch=8).activation_bytes == 2 + 8 * 500
    assert predict_memory(seen, Plan(checkpointing="full"), micro_batch=8).activation_bytes == 1 + 8 * 50
    assert memory.temporary - predict_memory(seen, Plan(), micro_batch=1).temporary == 7 * 40
    with pytest.raises(UserError, match="with a Python file"):
        predict_memory(seen, Plan(), micro_batch=8, inference=True)


def test_the_largest_micro_batch_fits_and_the_next_does_not(seen: Traced) -> None:
    case, limit = case_of(seen, Plan()), 2 * 10**9
    most = case.largest(limit)
    assert case.memory(most).total <= limit < case.memory(most + 1).total


def test_a_search_for_sizes_starts_from_what_was_traced(seen: Traced) -> None:
    where = range_of(
        seen, Plan(), device="cuda", micro_batch=4, seconds_per_sequence=None, memory_bytes=2 * 10**9, headroom=0.5
    )
    assert where.start == case_of(seen, Plan()).largest(10**9)


def test_mfu_is_counted_flops_over_the_peak(seen: Traced, h200: Hardware) -> None:
    found = efficiency(seen, Plan(autocast="bf16"), h200, tokens_per_second=70_000)
    assert h200.peak_tflops is not None
    assert found.mfu == pytest.approx(3e9 / 7 * 70_000 / (h200.peak_tflops["bf16"] * 1e12))
    assert found.hfu is None
    assert found.convention.startswith("counted while the model ran")
    assert efficiency(seen, Plan(), h200, tokens_per_second=1e12).mfu is None


def test_a_product_has_two_of_the_backward_behind_it(seen: Traced) -> None:
    sizes = [(gemm.where, gemm.direction, gemm.m, gemm.n, gemm.k, gemm.batch) for gemm in gemms_of(seen, 4)]
    assert sizes == [
        ("up", "forward", 28, 30, 10, 1),
        ("up", "dgrad", 28, 10, 30, 1),
        ("up", "wgrad", 30, 10, 28, 1),
        ("mix", "forward", 7, 7, 8, 8),
        ("mix", "dgrad", 7, 8, 7, 8),
        ("mix", "wgrad", 7, 8, 7, 8),
    ]


def test_a_bound_is_the_longer_of_flops_and_bytes(seen: Traced) -> None:
    slow_memory = step_of(seen, Plan(), micro_batch=4, matmul_tflops=1e9, bandwidth=1e3)
    up = 3 * 3 * (28 * 10 + 10 * 30 + 28 * 30) * 4
    mix = 3 * (7 * 8 + 8 * 7 + 7 * 7) * 8 * 4
    assert slow_memory.products_seconds == pytest.approx((up + mix) / 1e3)
    slow_compute = step_of(seen, Plan(), micro_batch=4, matmul_tflops=1e-12, bandwidth=1e12)
    assert slow_compute.products_seconds == pytest.approx(3 * (3 * 2 * 28 * 30 * 10 + 2 * 7 * 7 * 8 * 8))
    assert slow_compute.floor_seconds == pytest.approx(5 + 4 * 3e9)


def test_lint_speaks_of_sizes_that_cost_and_of_no_others(seen: Traced) -> None:
    device = find_device("H200")
    large = Product(where="head", kind="linear", m=1024, n=50257, k=768, grows="m", made=Place(file="m.py", line=9))
    small = Product(where="probe", kind="linear", m=1, n=10, k=768, grows="m")
    model = replace(seen, products=(large, small))
    (found,) = findings_of(model, micro_batch=16, dtype="bf16", device=device)
    assert found.where == ("head",)
    assert found.fix.startswith("50,304 at m.py:9")
    assert found.gain is not None
    assert found.gain > 0.05
    assert (
        findings_of(
            replace(model, products=(replace(large, n=50304), small)), micro_batch=16, dtype="bf16", device=device
        )
        == ()
    )
    (unknown,) = findings_of(model, micro_batch=16, dtype="bf16", device=None)
    assert (unknown.gain, unknown.no_gain) == (None, "the device is unknown")
    assert findings_of(model, micro_batch=16, dtype="bf16", device=device, ignore=("layer-size",)) == ()


def layer(where: str, n: int, k: int, *, area: int = 1, batch: int = 1) -> Product:
    kind = "linear" if area == 1 else "convolution"
    return Product(where=where, kind=kind, m=1024, n=n, k=k * area, batch=batch, area=area, grows="m")


def advised(
    seen: Traced, *layers: Product, embeddings: tuple[Embedding, ...] = ()
) -> list[tuple[str, tuple[str, ...]]]:
    model = replace(seen, products=layers, embeddings=embeddings)
    found = findings_of(model, micro_batch=16, dtype="bf16", device=None)
    return [(each.fix.partition(";")[0], each.where) for each in found]


def test_lint_speaks_of_channels_and_not_of_the_area_of_a_kernel(seen: Traced) -> None:
    first, second = layer("0", 30, 3, area=9), layer("3", 64, 30, area=9)
    assert advised(seen, first, second, layer("6", 10, 64)) == [("32", ("0", "3"))]
    assert advised(seen, first, layer("5", 8, 30 * 4)) == [("32", ("0",))]  # flattened: 30 are still taken in
    assert advised(seen, layer("0", 70, 3, area=9), layer("3", 64, 70, area=9)) == [("128", ("0", "3"))]
    assert advised(seen, layer("grouped", 12, 12, area=9, batch=3), layer("3", 64, 36)) == []  # 12 of 36 in a group


def test_a_wider_convolution_has_a_wider_kernel(seen: Traced) -> None:
    """Its gain is that of the sizes it would have: channels times the area."""
    layers = layer("0", 30, 3, area=9), layer("3", 64, 30, area=9), layer("6", 16, 64)
    wide = layer("0", 32, 3, area=9), layer("3", 64, 32, area=9), layer("6", 16, 64)
    device = find_device("H200")
    before, after = (
        sum(gemm.count * estimate(gemm, device, "bf16").seconds for gemm in gemms_of(model, 64))
        for model in (replace(seen, products=layers), replace(seen, products=wide))
    )
    (found,) = findings_of(replace(seen, products=layers), micro_batch=64, dtype="bf16", device=device)
    assert found.gain == pytest.approx(before / after - 1)


def seconds_of(seen: Traced, *layers: Product) -> float:
    gemms = gemms_of(replace(seen, products=layers), 16)
    return sum(gemm.count * estimate(gemm, find_device("H200"), "bf16").seconds for gemm in gemms)


@pytest.mark.parametrize("area", [1, 9], ids=["linear", "convolution"])
def test_sizes_of_a_product_that_pay_only_together_are_found(area: int, seen: Traced) -> None:
    def layers(middle: int, last: int) -> tuple[Product, ...]:
        return layer("up", middle, 128), layer("head", last, middle, area=area)

    model = replace(seen, products=layers(333, 5001), embeddings=())
    found = findings_of(model, micro_batch=16, dtype="bf16", device=find_device("H200"))
    assert [(each.fix.partition(";")[0], each.where) for each in found] == [
        ("384", ("up", "head")),
        ("5,056", ("head",)),
    ]
    states = [seconds_of(seen, *layers(*sizes)) for sizes in ((333, 5001), (384, 5001), (384, 5056))]
    assert [each.gain for each in found] == pytest.approx([states[0] / states[1] - 1, states[1] / states[2] - 1])
    assert found[0].gain is not None
    alone = states[0] / seconds_of(seen, *layers(333, 5056)) - 1
    assert max(found[0].gain, alone) < MEANINGFUL_GAIN
    assert "pays together with the sizes below" in found[0].why
    assert "together" not in found[1].why
    document = traced_lint_document(model, found, hardware={}, micro_batch=16, dtype="bf16")
    assert document["predicted_gain"] == pytest.approx(states[0] / states[2] - 1)
    assert quiet_sizes(model, micro_batch=16, dtype="bf16", device=find_device("H200")) == ()


def test_a_size_that_brings_nothing_beside_others_is_no_finding(seen: Traced) -> None:
    """100 goes into one small product; what its neighbours bring is not put down to it."""
    small = replace(layer("up", 100, 64), m=300)
    layers = small, replace(layer("down", 64, 100), m=300), layer("a", 333, 4096), layer("b", 4097, 333)
    model = replace(seen, products=layers, embeddings=())
    device = find_device("H200")
    found = findings_of(model, micro_batch=16, dtype="bf16", device=device)
    assert [each.problem.split()[0] for each in found] == ["333", "4,097"]


def test_the_width_of_a_recurrent_layer_is_not_that_of_its_gates(seen: Traced) -> None:
    inputs, state = layer("rnn", 308, 33), replace(layer("rnn", 308, 77), m=1, count=20)
    head = layer("head", 64, 77)
    model = replace(seen, products=(inputs, state, head), recurrent=(Recurrent(where="rnn", width=77, gates=4),))
    (found,) = findings_of(model, micro_batch=16, dtype="bf16", device=find_device("H200"))
    assert found.problem.startswith("77 is no multiple of 8: rows of rnn, head")
    after = replace(inputs, n=512), replace(state, n=512, k=128), replace(head, k=128)
    assert found.gain == pytest.approx(seconds_of(seen, inputs, state, head) / seconds_of(seen, *after) - 1)


@pytest.mark.parametrize("grows", ["m", "n"])
def test_weights_that_are_no_layers_are_told(grows: str, seen: Traced) -> None:
    """The side that does not grow with the batch, as einsum gives it; attention's products grow in their batch."""
    m, n = (16, 332) if grows == "m" else (332, 16)
    line = Place(file="m.py", line=9)
    stack = Product(where="", kind="product", m=m, n=n, k=96, batch=4, grows=grows, place=line)
    scores = Product(where="mix", kind="product", m=197, n=197, k=30, batch=2, grows="batch")
    model = replace(seen, products=(stack, scores), products_left_out=3)
    bare, left_out = unjudged_products(model, "bf16")
    shown = "96 x 332" if grows == "m" else "332 x 96"
    assert bare.startswith(f"m.py:9 multiplies by {shown} weights that belong to no layer: 332 is no multiple of 8")
    assert left_out.startswith("3 products whose sizes do not simply grow")
    good = replace(stack, m=16, n=336, grows="m")
    assert unjudged_products(replace(model, products=(good, scores), products_left_out=0), "bf16") == ()


def test_lint_is_silent_about_sizes_that_are_given(seen: Traced) -> None:
    assert advised(seen, layer("value", 1, 16)) == []
    assert advised(seen, layer("up", 64, 13), layer("head", 10, 64)) == []  # features of the batch, classes
    assert advised(seen, layer("in", 64, 12), layer("out", 12, 64)) == []  # an output as wide as the input
    assert advised(seen, layer("down", 4, 64), layer("up", 64, 4)) == []  # a rank
    assert advised(seen, layer("policy", 10, 64), layer("value", 1, 64)) == []
    assert advised(seen, layer("up", 30, 16), layer("down", 16, 30)) == [("64", ("up", "down"))]
    words = Embedding(name="wte", rows=51, width=16)
    assert advised(seen, layer("head", 51, 16), embeddings=(words,)) == [("128", ("head",))]
    narrow = Embedding(name="wte", rows=64, width=30)
    assert advised(seen, layer("head", 64, 30), embeddings=(narrow,)) == [("64", ("head",))]


def test_a_training_run_says_that_it_drops(seen: Traced, write: Callable[[str], Path]) -> None:
    measured = workload_with(replace(seen, dropout=("drop",)), write)
    assert any(note.startswith("dropout is off while measuring (drop)") for note in measured.notes)
    trained = for_training(measured, "cpu")
    assert not any("off" in note for note in trained.notes)
    assert "dropout as the file has it (drop); measurements leave it out" in trained.notes
    assert not any("dropout" in note for note in for_training(workload_with(seen, write), "cpu").notes)


def test_a_loss_that_is_no_mean_may_be_a_sum(seen: Traced, write: Callable[[str], Path]) -> None:
    notes = workload_with(replace(seen, splits=False), write).notes
    assert any('reduction="sum"' in note for note in notes)


def test_reasons_name_the_lines_of_attention_gelus_and_blocks(seen: Traced, write: Callable[[str], Path]) -> None:
    places = tuple(Place(file="m.py", line=line) for line in (7, 8, 9, 10))
    written = Attention(place=Place(file="m.py", line=3, last=5), causal=True)
    helped = replace(
        seen,
        blocks=None,
        attention=(written,),
        sdpa_calls=places[:1],
        tanh_gelus=0,
        gelu_calls=places,
        unlisted=Unlisted(kind="Block", count=4, made=places),
    )
    cannot = workload_with(helped, write).cannot
    assert "put the attention at m.py:3-5, m.py:7 into a function" in cannot["selective-checkpointing"]
    assert "at m.py:7, m.py:8, m.py:9 and 1 more: make nn.GELU" in cannot["sigmoid-gelu"]
    assert "hold the 4 Block (made at m.py:7, m.py:8, m.py:9 and 1 more) in one" in cannot["checkpointing"]
    nothing = replace(helped, attention=(), sdpa_calls=(), gelu_calls=(), unlisted=None)
    cannot = workload_with(nothing, write).cannot
    names = ("selective-checkpointing", "sigmoid-gelu", "checkpointing")
    assert all(" was " in cannot[name] or "has no" in cannot[name] for name in names)
    assert not any("m.py" in cannot[name] for name in names)


def test_reasons_name_the_lines_of_embedding_and_head(seen: Traced, write: Callable[[str], Path]) -> None:
    made, called = (Place(file="m.py", line=line) for line in (4, 14))
    table = Embedding(
        name="wte", rows=64, width=16, made=Place(file="m.py", line=3), called=Place(file="m.py", line=13)
    )
    head = Product(where="head", kind="linear", m=7, n=64, k=16, grows="m", made=made, place=called)
    blocks = Blocks(name="layers", kind="Layer", count=2)
    whole = replace(seen, blocks=blocks, embeddings=(table,), products=(*seen.products, head))
    cannot = workload_with(whole, write).cannot
    assert "`self.head.weight = self.wte.weight`" in cannot["tied-weights"]
    assert "(wte at m.py:3) (head at m.py:4)" in cannot["tied-weights"]
    assert "the head (called at m.py:14)" in cannot["fused-loss"]
    assert "behind wte (called at m.py:13)" in cannot["bf16-residual"]
    other = replace(head, where="0", place=None)  # no attribute to assign to; made somewhere all the same
    cannot = workload_with(replace(seen, embeddings=(table,), products=(other,)), write).cannot
    assert "the head's weight (made at m.py:4) and that of wte (made at m.py:3)" in cannot["tied-weights"]
    assert "the head (made at m.py:4)" in cannot["chunked-loss"]
    nothing = workload_with(replace(seen, blocks=blocks, products=()), write).cannot
    assert not any("m.py" in nothing[name].replace("model.py", "") for name in ("fused-loss", "bf16-residual"))


def test_weights_of_different_sizes_are_not_to_be_shared(seen: Traced, write: Callable[[str], Path]) -> None:
    table = Embedding(name="wte", rows=50, width=24, made=Place(file="m.py", line=3))
    head = Product(where="head", kind="linear", m=7, n=50, k=40, grows="m", made=Place(file="m.py", line=4))
    for n, k, size in ((50, 40, "50 x 40"), (128, 24, "128 x 24")):
        other = replace(seen, embeddings=(table,), products=(replace(head, n=n, k=k),))
        reason = workload_with(other, write).cannot["tied-weights"]
        sizes = f"that of wte (made at m.py:3) is 50 x 24, that of the head (made at m.py:4) {size}"
        assert reason == f"one weight cannot be both: {sizes}"


def test_flops_that_are_incomplete_give_no_mfu(seen: Traced) -> None:
    h200 = Hardware(kind="cuda", name="NVIDIA H200")
    assert efficiency(seen, Plan(), h200, 1.0).mfu is not None
    found = efficiency(replace(seen, uncounted=("aten._fft_r2c",)), Plan(), h200, 1.0)
    assert (found.mfu, found.hfu) == (None, None)
    assert found.convention == "no MFU: FLOPs are incomplete, operators without a formula: aten._fft_r2c"


def test_only_equal_blocks_have_a_stream_between_them(seen: Traced, write: Callable[[str], Path]) -> None:
    """An embedding alone makes none: a recurrent layer behind it adds nothing up."""
    table = Embedding(name="wte", rows=50, width=24, called=Place(file="m.py", line=13))
    alone = replace(seen, blocks=None, unlisted=None, embeddings=(table,))
    reason = "no list of equal blocks was found in model.py, so no stream runs between any"
    assert workload_with(alone, write).cannot["bf16-residual"] == reason
    beside = replace(alone, unlisted=Unlisted(kind="Block", count=4))
    assert "x = x.bfloat16()" in workload_with(beside, write).cannot["bf16-residual"]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("cross-entropy", "the model in model.py returns what comes behind it"),
        ("own", "loss() in model.py goes from inputs to loss"),
        ("model", "the model in model.py goes from inputs to loss"),
    ],
)
def test_a_model_without_words_is_not_told_about_them(
    loss: str, words: str, seen: Traced, write: Callable[[str], Path]
) -> None:
    """Of an MLP: there is nothing to tie, nothing to pad and no stream, and so no line to change for them."""
    cannot = workload_with(replace(seen, loss=loss), write).cannot
    assert cannot["padded-vocab"] == "no embedding was found in model.py"
    assert cannot["tied-weights"] == "no embedding was found in model.py that a head could share"
    assert cannot["bf16-residual"] == "no list of equal blocks was found in model.py, so no stream runs between any"
    assert cannot["fused-loss"].endswith(words)


GPT_WORDS = ("token", "sequence", "vocab", "head", "logit", "causal", "attention", "TP", "GAS", "GPUs")


def test_an_estimate_of_samples_speaks_of_samples(seen: Traced) -> None:
    """Seen on the screen, line by line: nothing that only a language model has."""
    found = estimate_of(replace(seen, items_per_sample=1, unit="sample"), words="mlp.py:mlp")
    text = printed(found)
    assert [word for word in GPT_WORDS if word in text] == []
    assert "16 samples in a step, on one GPU." in text
    assert "parameters and buffers" in text
    assert "with everything alive at once" in text
    assert "measure it with redline ladder mlp.py:mlp" in text
    assert "a micro batch of 1,048,576 fits, and larger ones were not tried" in text
    assert found["memory"]["logits"] is found["memory_detail"]["autocast_cache"] is None


def test_an_estimate_of_a_module_names_the_meter(seen: Traced) -> None:
    """A module of somebody's own program has no words for the command line; with attention its square is told."""
    found = estimate_of(replace(seen, sdpa=True, unit="frame"), words=None)
    assert found["tokens_per_second_reason"].endswith("measure it with redline.Meter")
    assert found["flops_per_token"]["convention"].endswith("of attention the whole square")
    assert "16 x 7 frames in a step" in printed(found)


def estimate_of(traced: Traced, words: str | None) -> dict[str, Any]:
    device = find_device("H200")
    subject = TracedSubject(
        name="mlp",
        origin="Python file",
        case=TracedCase(shape=traced, plan=Plan()),
        rungs=(),
        micro_batch=16,
        notes=(),
        words=words,
    )
    hardware = Hardware(kind="cuda", name="H200", cpu_cores=8)
    target = Target(device=device, memory_bytes=device.memory_bytes, hardware=hardware)
    return traced_document(subject, target)


def printed(document: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_estimate(document, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    return " ".join(" ".join(lines).split())


def test_columns_and_next_steps_count_what_the_model_counts(seen: Traced) -> None:
    row = {"rung": "baseline", "status": "ok", "tokens_per_second": 2300.0, "unit": "sample"}
    document = {"workload": {"name": "mlp", "shape": to_json(replace(seen, unit="sample"))}, "rows": [row]}
    names = [column.name for column in shown_columns(document)]
    assert "samples/s" in names
    assert not any("tok" in name for name in names)
    steps = ladder_steps({**document, "best": {"rung": "baseline", "tokens_per_second": 2300.0}})
    assert any("2,300 samples/s" in step.why for step in steps)
    assert not any("token" in step.why for step in steps)


# the user's own line


def raised_in(folder: Path, **files: str) -> Exception:
    """By calling `run` of the first file, which finds the others' functions among its own."""
    names: dict[str, Any] = {}
    for name, text in reversed(files.items()):
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        exec(compile(text, f"{path}.py", "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        names["run"]()
    return raised.value


OUTER, INNER = "def run():\n    return inner()\n", "def inner():\n    return 1 / 0\n"


@pytest.mark.parametrize(
    ("inner", "line"),
    [("helper", "helper.py:2"), ("venv__site-packages__library", "model.py:2"), ("model", "model.py:4")],
)
def test_the_innermost_line_that_is_the_users_own(inner: str, line: str, tmp_path: Path) -> None:
    """Not the call that led there, and not that of a package in a virtual environment beside the file."""
    files = {"model": OUTER, inner: INNER} if inner != "model" else {"model": OUTER + INNER}
    error = raised_in(tmp_path, **files)
    assert users_line(error, f"{tmp_path}/model.py") == line


def test_a_call_that_does_not_fit_is_told_with_the_line_of_the_definition(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import functools\n\n@functools.cache\ndef net(width):\n    return len(3)\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    for arguments, line in (((), "model.py:4: def net(width):"), ((1,), "model.py:5: return len(3)")):
        with pytest.raises(UserError) as raised, blaming(str(path), "net()", names["net"]):
            names["net"](*arguments)
        assert raised.value.why == f"it happened at {line}"
    with pytest.raises(UserError) as raised, blaming(str(path), "sorted()", sorted):
        sorted()  # type: ignore[call-overload]
    assert raised.value.why == "no line of the file was running"


# the process that looks


def looked_at(script: str, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> UserError:
    """By a shell script in the place of Python."""
    path = write(GOOD)
    found = find_python_file(f"{path}:net")
    assert found is not None
    shell = path.parent / "python"
    shell.write_text(f"#!/bin/sh\n{script}\n")
    shell.chmod(0o755)
    monkeypatch.setattr(inspect.sys, "executable", str(shell))
    inspect.inspect_file.cache_clear()
    with pytest.raises(UserError) as raised:
        inspect.inspect_file(found)
    return raised.value


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("kill -9 $$", f"ended by signal 9 ({signal.strsignal(9)}): it wrote nothing", id="killed"),
        pytest.param("echo one; echo two >&2; exit 3", "exit code 3: two", id="left"),
    ],
)
def test_a_process_that_dies_is_told_with_its_last_words(
    script: str, said: str, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = looked_at(script, write, monkeypatch)
    assert error.problem == "model.py:net crashed the process that inspected it"
    assert error.why == said


def test_a_process_that_takes_too_long_is_ended(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "INSPECT_SECONDS", 0.2)
    error = looked_at("exec sleep 60", write, monkeypatch)
    assert error.problem == "model.py:net takes too long to inspect"


# the verdict and the words


def measured(*losses: float, error: float = 0.0) -> Measurement:
    check = GradientCheck(
        loss=losses[0],
        reference_loss=losses[0],
        error=error,
        yardstick=0.0,
        tensor_errors={"w": error},
        tensor_yardsticks={"w": 0.0},
    )
    return Measurement(loss_curve=losses, gradients=check)


def verdict(
    found: Measurement, reference: tuple[float, ...], *, ln_vocab: float | None = None, unchecked: str | None = None
) -> str:
    return judge(
        maths="rounding-only",
        precision="fp32",
        measurement=found,
        reference=reference,
        base=None,
        plain=reference,
        ln_vocab=ln_vocab,
        unchecked=unchecked,
    ).verdict


def test_without_a_vocabulary_any_start_will_do() -> None:
    assert verdict(measured(3.0, 2.0), (3.0, 2.0)) == "same"
    assert verdict(measured(3.0, 2.0), (3.0, 2.0), ln_vocab=10.0) == "different"
    assert verdict(measured(3.0, 2.0, error=0.5), (3.0, 2.0)) == "different"


def test_a_large_loss_may_round_by_as_much_more() -> None:
    assert verdict(measured(3.0, 2.01), (3.0, 2.0)) == "different"
    assert verdict(measured(300.0, 200.01), (300.0, 200.0)) == "rounding"
    assert verdict(measured(300.0, 200.1), (300.0, 200.0)) == "different"


def test_what_cannot_be_compared_is_not_checked_unless_it_is_no_number() -> None:
    assert verdict(measured(3.0, 2.0), (9.0, 9.0), unchecked="it draws") == "not-checked"
    assert verdict(measured(3.0, float("nan")), (9.0, 9.0), unchecked="it draws") == "different"


def test_rates_and_batches_in_their_own_unit() -> None:
    assert [rate_unit(unit) for unit in (None, "token", "sample", "image")] == [
        "tok/s",
        "tok/s",
        "samples/s",
        "images/s",
    ]
    assert rate_unit("token", short=False) == "tokens/s"
    assert batch_text(16, {"sequence": 1024}) == "16 x 1024 tokens"
    assert batch_text(16, {"unit": "sample", "items_per_sample": 1}) == "16 samples"
