"""A user's own file, from inspection to every command: what is seen of it against what can be worked out by hand.

The models are small and plain; three of them have a fault planted: a line that makes a GPU wait, attention that SDPA
could replace, and code that torch.compile cannot take in one piece. Most commands run their workers in this process;
one profile and one mistake go through real ones.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from redline.cli import main
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.traced import Traced
from redline.core.user_code import PACKAGE, check_neighbours, load_functions, load_module, neighbours, raised_in
from redline.core.values import from_json, to_json
from redline.core.workload import Shape, Source, Workload
from redline.data.batches import stream_batches
from redline.data.made import MadeBatches
from redline.engine import inspect_model, probe, worker
from redline.engine.build import build
from redline.engine.equivalence import relative_errors
from redline.model.adapter import adapter_of
from redline.model.python_adapter import PythonAdapter
from redline.predict.flops import model_flops, parameters
from redline.predict.memory import predict_memory
from redline.report.training import summary_lines
from redline.rungs import find_rung, plan_of, usual_rungs, why_not
from redline.search.inspect import inspect_file
from redline.workloads.python_file import PythonFile, find_python_file, for_training, python_workload

CPU = torch.device("cpu")
PLANTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x):
        h = self.up(x).relu()
        self.seen = h.abs().max().item()  # waits
        return self.down(h)

def net():
    return Net()

def make_batch(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :5].argmax(1)
"""
ENCODER = """
import torch
import torch.nn.functional as F
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids)))

def encoder():
    return Encoder()

def make_batch(size, seed):
    ids = torch.randint(64, (size, 8), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "hidden": ids.roll(1, dims=1)}

def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["hidden"].flatten())

items_per_sample, unit = 8, "token"
"""
NORMED = """
import torch
import torch.nn.functional as F
from torch import nn

def normed():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(approximate="tanh"), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )

def make_batch(size, seed):
    x = torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.mean((1, 2, 3)).sign().long() + 1
"""
RANDOM = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = F.dropout(self.a(x), 0.5, self.training)
        return self.b(h).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
"""
DROPS = RANDOM
RANDOM = DROPS.replace("F.dropout(self.a(x), 0.5, self.training)", "self.a(x) * torch.rand_like(x)")  # noise
BREAKS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.a(x)
        print("seen", h.shape)
        return self.b(h).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
"""


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """A worker's process ends; this one goes on to the next file."""
    path, threads = list(sys.path), torch.get_num_threads()
    inspect_file.cache_clear()
    torch.set_num_threads(1)  # matrices this small only make threads wait for one another
    yield
    sys.path[:] = path
    torch.set_num_threads(threads)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def to_file(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def traced(words: str) -> Traced:
    found = find_python_file(words)
    assert found is not None
    return traced_file(found)


@functools.cache  # by its digest too
def traced_file(found: PythonFile) -> Traced:
    seen = inspect_model.inspect_model(found.source, seed=1337)
    assert from_json(Traced, json.loads(json.dumps(to_json(seen)))) == seen
    return seen


def workload_of(words: str) -> Workload:
    found = find_python_file(words)
    assert found is not None
    return python_workload(found, traced(words))


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


# --- what is seen, by hand --------------------------------------------------------------------------------------------


def test_an_mlp_by_hand(repository: Path) -> None:
    seen = traced(f"{repository}/examples/mlp.py:mlp")
    widths = (784, 512, 512, 10)
    pairs = list(zip(widths, widths[1:], strict=False))
    assert seen.parameters == seen.trainable == sum(a * b + b for a, b in pairs)
    forward = sum(2 * a * b for a, b in pairs)
    assert (seen.flops_forward.per_sample, seen.flops_forward.constant) == (forward, 0)
    # Twice the forward, less the gradient of the images, which nobody asks for.
    assert seen.flops_backward.per_sample == 2 * forward - 2 * 784 * 512
    # What each ReLU gives, which it and the next layer share, and the log-probabilities; the images are the batch.
    assert seen.saved_bytes("fp32", "naive", "none").per_sample == 4 * (512 + 512 + 10)
    assert [(p.m, p.n, p.k, p.grows) for p in seen.products] == [(1, b, a, "m") for a, b in pairs]
    assert [p.made.line for p in seen.products if p.made] == [14, 16, 18]
    assert (seen.loss, seen.unit, seen.blocks, seen.splits, seen.random) == (
        "cross-entropy",
        "sample",
        None,
        True,
        False,
    )
    assert seen.batch_bytes == 784 * 4 + 8


def test_a_vision_transformer_by_hand(repository: Path) -> None:
    seen = traced(f"{repository}/examples/vit.py:vit")
    T, C, layers = 17, 64, 2  # 16 patches and a token
    block = 4 * C * C + 4 * C + 8 * C * C + 5 * C + 4 * C
    assert seen.parameters == layers * block + (192 * C + C) + (T + 1) * C + 2 * C + (C * 10 + 10)
    linear, attention = 2 * T * 12 * C * C, 4 * T * T * C
    forward = layers * (linear + attention) + 2 * 16 * 192 * C + 2 * C * 10
    assert seen.flops_forward.per_sample == forward
    assert seen.flops_backward.per_sample == 2 * forward - 2 * 16 * 192 * C  # no gradient of the images
    assert seen.sdpa
    assert not seen.attention
    assert seen.blocks is not None
    assert (seen.blocks.name, seen.blocks.count) == ("blocks", layers)
    assert (seen.dropout, seen.tanh_gelus) == (("blocks.0.mlp.3", "blocks.1.mlp.3"), 2)
    kept = {(each.precision, each.attention, each.checkpointing): each.bytes.per_sample for each in seen.saved}
    assert len(kept) == 8
    for precision in ("fp32", "bf16"):
        assert kept[precision, "fused", "none"] < kept[precision, "naive", "none"]
        # Of each block its input; the embedding before it and the norm, the head and the loss behind it stay.
        assert kept[precision, "naive", "full"] < kept[precision, "naive", "none"] / 3
    assert kept["bf16", "naive", "none"] < kept["fp32", "naive", "none"]


@pytest.mark.parametrize(
    ("given", "drops"),
    [
        ("", False),
        (", dropout_p=0.0", False),
        (", dropout_p=0.1 if self.training else 0.0", True),
        (", None, 0.1", True),
        (", dropout_p=self.drop.p", True),  # the rate of a module that is silenced while measuring
    ],
    ids=["none", "zero", "number", "by-order", "of-a-module"],
)
def test_dropout_is_attentions_where_its_call_has_a_rate(
    repository: Path, write: Callable[[str], Path], given: str, drops: bool
) -> None:
    """A CPU's fused kernel refuses just those, as torch itself says."""
    text = (repository / "examples/vit.py").read_text(encoding="utf-8")
    text = text.replace("attention(q, k, v)", f"attention(q, k, v{given})")
    text = text.replace("self.heads = heads", "self.heads, self.drop = heads, nn.Dropout(0.1)")
    path = write(text)
    seen = traced(f"{path}:vit")
    assert seen.sdpa
    assert seen.sdpa_drops is drops
    assert seen.dropout[0] == "blocks.0.attention.drop"
    assert not any("F.dropout" in name for name in seen.dropout)  # the pass that looks for it notes no lines
    found = find_python_file(f"{path}:vit")
    assert found is not None
    trained = for_training(python_workload(found, seen), "cpu")
    assert ("flash" in trained.cannot) is drops
    model = load_functions(found.source).factory().train()
    refused = pytest.raises(RuntimeError, match="No available kernel") if drops else contextlib.nullcontext()
    with refused, warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        warnings.simplefilter("ignore")  # torch's reasons
        model(torch.randn(2, 3, 32, 32))


def test_the_dropout_of_torchs_own_attention_is_found(write: Callable[[str], Path]) -> None:
    elsewhere = ENCODER.replace("batch_first=True)", "batch_first=True); layer.self_attn.dropout = 0.0")
    for text, drops in ((ENCODER, True), (elsewhere, False)):
        seen = traced(f"{write(text)}:encoder")
        assert (seen.sdpa_drops, seen.random) == (drops, False)
        assert "layers.layers.0.dropout1" in seen.dropout


def test_the_published_vision_transformer_has_its_published_size(repository: Path) -> None:
    found = find_python_file(f"{repository}/examples/vit.py:vit_base")
    assert found is not None
    with torch.device("meta"):
        model = load_functions(found.source).factory()
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656


def test_a_decoder_is_counted_as_its_shape_says(repository: Path) -> None:
    seen = traced(f"{repository}/examples/naive_gpt.py:gpt")
    assert seen.described is not None
    shape = Shape(**seen.described)
    assert seen.parameters == parameters(shape, tied=False).total
    per_token = model_flops(shape, "full")
    assert seen.flops.per_sample / seen.items_per_sample == pytest.approx(per_token.total, rel=1e-9)
    assert (seen.ln_vocab, seen.sequence, seen.unit) == (pytest.approx(shape.ln_vocab), 64, "token")


def test_products_add_up_to_the_counted_flops(repository: Path) -> None:
    for words in ("mlp.py:mlp", "vit.py:vit", "naive_gpt.py:gpt"):
        seen = traced(f"{repository}/examples/{words}")
        products = sum(2 * p.m * p.n * p.k * p.batch * p.count for p in seen.products)
        assert products == seen.flops_forward.per_sample
        assert seen.products_left_out == 0


RECURRENT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 24)
        self.layers = nn.LSTM(24, 40, num_layers=2, batch_first=True)
        self.head = nn.Linear(40, 50)

    def forward(self, x):
        return self.head(self.layers(self.wte(x))[0])

def net():
    return Net()

def make_batch(size, seed):
    x = torch.randint(50, (size, 12), generator=torch.Generator().manual_seed(seed))
    return x, x
"""


def test_a_recurrent_model_by_hand(write: Callable[[str], Path]) -> None:
    seen = traced(f"{write(RECURRENT)}:net")
    T, gates = 12, 4 * 40
    forward = 2 * T * (gates * (24 + 40) + gates * (40 + 40) + 40 * 50)
    assert (seen.flops_forward.per_sample, seen.flops_backward.per_sample) == (forward, 2 * forward)
    assert seen.uncounted == ()
    assert seen.saved_bytes("fp32", "naive", "none").per_sample > 2 * T * gates * 4  # the gates of both layers
    # Of each layer the inputs at once and the state step by step, as torch's own loop has them.
    assert sum(2 * p.m * p.n * p.k * p.count for p in seen.products) == forward
    assert [(p.m, p.n, p.k, p.count) for p in seen.products] == [
        (T, gates, 24, 1),
        (1, gates, 40, 2 * T),
        (T, gates, 40, 1),
        (T, 50, 40, 1),
    ]


def test_operators_without_a_formula_leave_flops_unknown(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lstm = "self.layers(self.wte(x))[0]"
    text = RECURRENT.replace(lstm, f"torch.fft.fft({lstm}, dim=1).real")
    words = f"{write(text)}:net"
    assert "aten._fft_c2c" in traced(words).uncounted
    estimated = command(capsys, "estimate", words, "--gpu", "H200")
    assert (estimated["flops_per_token"]["model"], estimated["roofline"]) == (None, None)
    assert "operators without a formula: aten._fft_r2c" in estimated["flops_per_token"]["convention"]
    assert any(note.startswith("FLOPs are unknown") for note in estimated["notes"])
    assert main(["estimate", words, "--gpu", "H200"]) == 0
    assert re.search(r"model \(MFU counts it\) +— +unknown", capsys.readouterr().out)
    (found,) = command(capsys, "lint", words, "--gpu", "H200")["findings"]
    assert found["predicted_gain"] is None
    assert "operators without a formula" in found["no_predicted_gain"]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_that_makes_the_host_wait(write: Callable[[str], Path]) -> None:
    (sync,) = traced(f"{write(PLANTED)}:net").syncs
    assert (Path(sync.place.file).name, sync.place.line) == ("model.py", line_of(PLANTED, "# waits"))
    assert sync.kind == "synchronisation"


def test_attention_that_is_written_out(repository: Path) -> None:
    path = repository / "examples/naive_gpt.py"
    workload, text = workload_of(f"{path}:gpt"), path.read_text()
    assert isinstance(workload.shape, Traced)
    (found,) = workload.shape.attention
    first, last = line_of(text, "scores = q @ k"), line_of(text, "y = weights @ v")
    assert (found.place.line, found.place.last, found.causal, found.count) == (first, last, True, 2)
    assert workload.cannot["flash"] == (
        f"attention is written out at naive_gpt.py:{first}-{last}: call "
        "F.scaled_dot_product_attention(q, k, v, is_causal=True) there"
    )
    assert f"naive_gpt.py:{line_of(text, 'nn.Embedding(VOCAB')}: make them 384" in workload.cannot["padded-vocab"]


def test_torchs_own_attention_is_written_out_when_its_weights_are_asked_for(write: Callable[[str], Path]) -> None:
    text = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=WANTED)[0].square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(seed))
"""
    reason = workload_of(f"{write(text.replace('WANTED', 'True'))}:net").cannot["flash"]
    assert "model.py:11" in reason
    assert "need_weights=False" in reason
    without = workload_of(f"{write(text.replace('WANTED', 'False'))}:net")
    assert "flash" not in without.cannot
    assert isinstance(without.shape, Traced)
    assert without.shape.attention == ()


def test_a_softmax_that_is_no_attention(write: Callable[[str], Path]) -> None:
    text = PLANTED.replace("h.abs().max().item()", "torch.bmm(h[:, None], h[..., None]).softmax(-1)")
    workload = workload_of(f"{write(text)}:net")
    assert workload.cannot["flash"].startswith("no attention was seen")


def test_random_numbers_are_found_where_they_are_drawn(write: Callable[[str], Path]) -> None:
    workload = workload_of(f"{write(RANDOM)}:net")
    assert isinstance(workload.shape, Traced)
    assert [str(place) for place in workload.shape.draws] == [f"model.py:{line_of(RANDOM, 'rand_like')}"]
    assert workload.why_unchecked is not None
    assert f"model.py:{line_of(RANDOM, 'rand_like')}" in workload.why_unchecked
    modules = DROPS.replace("F.dropout(self.a(x), 0.5, self.training)", "self.drop(self.a(x))").replace(
        "nn.Linear(6, 1)", "nn.Linear(6, 1); self.drop = nn.Dropout(0.5)"
    )
    quiet = workload_of(f"{write(modules)}:net")
    assert isinstance(quiet.shape, Traced)
    assert (quiet.why_unchecked, quiet.shape.dropout) == (None, ("drop",))
    assert any("dropout is off while measuring (drop)" in note for note in quiet.notes)


DRAWN = """
import random
import numpy as np
import torch
from torch import nn

ROWS = torch.randn(64, 6), np.random.randn(64), random.random()

def net():
    model = nn.Linear(6, 3)
    drawn = torch.from_numpy(np.random.randn(3, 6)) + random.gauss(0, 1)
    with torch.no_grad():
        model.weight.copy_(drawn)
    return model

def make_batch(size, seed):
    rows = torch.from_numpy(np.random.randint(0, 64, size))
    x = ROWS[0][rows] + torch.from_numpy(ROWS[1])[rows, None].float() + ROWS[2]
    return x, torch.full((size,), random.randrange(3))
"""


def test_numbers_of_python_and_numpy_are_the_seeds(write: Callable[[str], Path]) -> None:
    """Drawn by the factory, by make_batch and by importing the file, in this process and in a loader's worker."""
    workload = workload_of(f"{write(DRAWN)}:net")
    assert workload.why_unchecked is None
    batches = MadeBatches(source=workload.source, seed=7, micro_batch=4)
    found = []
    for seed in (1, 2):  # wherever a process stands
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        load_module.cache_clear()
        model = adapter_of(workload).build(Plan(), CPU)
        stream = stream_batches(batches, CPU, workers=seed - 1)
        found.append([model.weight.detach(), *next(stream), *next(stream)])
        stream.close()
        batches = replace(batches)  # which has not loaded the file
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][1], found[0][3])  # of two batches


def test_a_training_starts_where_the_seed_says(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = FORWARD.replace("WHAT", "keep = random.random() + np.random.rand()")
    words = ("train", f"{write(text)}:net", *PLAIN, "--steps", 3, "--out")
    losses = [command(capsys, *words, name)["loss"] for name in ("one", "other")]
    assert losses[0] == losses[1]


FORWARD = """
import random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.h = nn.Linear(6, 6), nn.Linear(6, 3)
        self.table, self.own = None, torch.Generator().manual_seed(0)
        self.rates = nn.Parameter(torch.tensor([0.0, 1.0]), requires_grad=False)

    def forward(self, x):
        WHAT
        return self.h(x + keep * self.a(x))

def net():
    return Net()

def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)
"""
RARE = {  # two passes seldom differ
    "a-layer": ("keep = float(torch.rand([]) >= 0.001)", ()),
    "a-sample": ("keep = x.new_empty(len(x), 1).bernoulli_(0.999)", ()),
    "a-range": ("keep = float(torch.empty([]).uniform_(2, 3) < 2.999)", ()),
    "coins-of-a-tensor": ("keep = torch.bernoulli(torch.full([], 0.999))", ()),
    "own-generator": ("keep = float(torch.rand([], generator=self.own) >= 0.001)", ()),
    "unmarked": ("keep = float(torch.empty(4).random_(1000).sum() != 7)", ()),
    "python": ("keep = float(random.randint(0, 1000) != 7)", ("Python's random",)),
    "numpy": ("keep = float(np.random.rand() >= 0.001)", ("NumPy's generator",)),
}
SETTLED = {  # numbers are drawn, and decide nothing or are always the same
    "a-rate-of-zero": "keep = float(torch.rand([]) >= 0.0)",
    "a-rate-of-one": "keep = x.new_empty(len(x), 1).bernoulli_(1.0)",
    "rates-of-zero-and-one": "keep = torch.bernoulli(self.rates).sum()",
    "seeded": "keep = torch.rand(6, generator=torch.Generator().manual_seed(3))",
    "seeded-by-python": "keep = random.Random(3).random() + np.random.default_rng(3).random()",
    "filled-once": "self.table = torch.rand(6) if self.table is None else self.table; keep = self.table",
    "dropout-of-zero": "keep = torch.dropout(torch.ones(6), 0.0, True)",
}


@pytest.mark.parametrize("name", RARE)
def test_a_draw_makes_a_model_random_though_two_losses_agree(name: str, write: Callable[[str], Path]) -> None:
    what, generators = RARE[name]
    text = FORWARD.replace("WHAT", what)
    python, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    seen = traced(f"{write(text)}:net")
    assert (seen.random, [str(place) for place in seen.draws]) == (True, [f"model.py:{line_of(text, 'keep =')}"])
    assert seen.generators == generators
    assert all(name in (seen.why_random or "") for name in generators)
    # A module may be looked at in a process that goes on drawing.
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, numpy_state)


@pytest.mark.parametrize("name", SETTLED)
def test_a_draw_that_decides_nothing_leaves_a_model_comparable(name: str, write: Callable[[str], Path]) -> None:
    seen = traced(f"{write(FORWARD.replace('WHAT', SETTLED[name]))}:net")
    assert (seen.random, seen.draws, seen.generators, seen.why_random) == (False, (), (), None)


def test_a_draw_that_no_line_of_the_file_makes_is_told_too(write: Callable[[str], Path]) -> None:
    text = FORWARD.replace("WHAT", "pass").replace("return Net()", "return nn.Sequential(nn.Linear(6, 3), nn.RReLU())")
    seen = traced(f"{write(text)}:net")
    assert (seen.random, seen.draws, seen.generators) == (True, (), ("torch's generator",))


def test_shared_weights_are_told_and_counted_once(write: Callable[[str], Path]) -> None:
    text = ENCODER.replace("self.head = nn.Linear(16, 64)", "self.head = nn.Linear(16, 64, bias=False)").replace(
        "    def forward(self, ids)", "        self.head.weight = self.embedding.weight\n\n    def forward(self, ids)"
    )
    tied, untied = workload_of(f"{write(text)}:encoder"), workload_of(f"{write(ENCODER)}:encoder")
    assert tied.cannot["tied-weights"] == "the file ties its weights itself: embedding.weight = head.weight"
    assert isinstance(tied.shape, Traced)
    assert isinstance(untied.shape, Traced)
    assert untied.shape.parameters - tied.shape.parameters == 64 * 16 + 64


TWO_NAMES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 5)
        self.net = nn.Sequential(self.up, self.norm, nn.ReLU(), self.down)

    def forward(self, x):
        return self.net(x)

def net():
    return Net()

def make_batch(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :5].argmax(1)
"""


def test_a_module_of_two_names_is_traced_as_one_of_one_name(write: Callable[[str], Path]) -> None:
    once = TWO_NAMES.replace("return self.net(x)", "return self.down(self.norm(self.up(x)).relu())")
    once = "\n".join(line for line in once.splitlines() if "self.net =" not in line)
    two, one = traced(f"{write(TWO_NAMES)}:net"), traced(f"{write(once)}:net")
    for field in ("parameters", "flops_forward", "flops_backward", "saved", "batch_bytes"):
        assert getattr(two, field) == getattr(one, field), field


def test_a_block_that_is_listed_again_and_again_is_traced_as_one_that_is_called_so(
    write: Callable[[str], Path],
) -> None:
    text = TWO_NAMES.replace(
        "self.net = nn.Sequential(self.up, self.norm, nn.ReLU(), self.down)", "self.blocks = BLOCKS"
    )
    text = text.replace("return self.net(x)", "for block in LIST: x = block(x)\n        return self.down(self.up(x))")
    again = text.replace("BLOCKS", "nn.ModuleList([nn.Linear(12, 12)] * 3)").replace("LIST", "self.blocks")
    looped = text.replace("BLOCKS", "nn.Linear(12, 12)").replace("LIST", "[self.blocks] * 3")
    listed, called = traced(f"{write(again)}:net"), traced(f"{write(looped)}:net")
    assert (listed.parameters, listed.flops) == (called.parameters, called.flops)
    ways = ("bf16", "naive", "none")
    assert listed.saved_bytes(*ways) == called.saved_bytes(*ways)


def test_a_model_that_looks_at_values_is_traced_with_values(write: Callable[[str], Path]) -> None:
    plain = traced(f"{write(PLANTED.replace('.item()', ''))}:net")
    looks = traced(f"{write(PLANTED)}:net")
    assert looks.flops == plain.flops
    assert looks.saved_bytes("bf16", "naive", "none") == plain.saved_bytes("bf16", "naive", "none")


# --- batches ----------------------------------------------------------------------------------------------------------


def test_workers_make_the_batches_that_this_process_makes(write: Callable[[str], Path]) -> None:
    found = find_python_file(f"{write(ENCODER)}:encoder")
    assert found is not None
    batches = MadeBatches(source=found.source, seed=7, micro_batch=3)
    state = torch.random.get_rng_state()
    streams = [stream_batches(batches, CPU, workers, start=2) for workers in (0, 1)]
    try:
        for _ in range(3):
            one, other = map(next, streams)
            assert one.keys() == other.keys() == {"ids", "hidden"}
            assert all(
                torch.equal(mine, theirs) for mine, theirs in zip(tree_leaves(one), tree_leaves(other), strict=True)
            )
    finally:
        for stream in streams:
            stream.close()
    assert torch.equal(torch.random.get_rng_state(), state)  # what a model drops must not depend on the loader
    assert torch.equal(batches[2]["ids"], load_functions(found.source).make_batch(3, 9)["ids"])


def test_a_pair_stays_a_pair_on_its_way_out_of_a_worker(write: Callable[[str], Path]) -> None:
    found = find_python_file(f"{write(PLANTED)}:net")
    assert found is not None
    stream = stream_batches(MadeBatches(source=found.source, seed=7, micro_batch=3), CPU, workers=1)
    try:
        assert isinstance(next(stream), tuple)
    finally:
        stream.close()


# --- what a plan does from outside ------------------------------------------------------------------------------------


MASKED = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, mask, x, y):
        h = self.a(x)
        return F.cross_entropy(h if mask is None else h * mask, y)

def net():
    return Net()

def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)
    return {"mask": None, "x": x, "y": y}
"""


def test_a_none_in_a_batch_is_a_tensor_that_there_is_not(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a batch with a mask of ones: through workers, through pieces and through the commands."""
    masked = MASKED.replace('"mask": None', '"mask": torch.ones(size, 3)')
    without = workload_of(f"{write(MASKED)}:net")
    source = without.source
    whole = MadeBatches(source=source, seed=7, micro_batch=8)
    halves = [MadeBatches(source=source, seed=7, micro_batch=4, rank=rank, ranks=2)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat([half["x"] for half in halves]), whole[0]["x"])
    stream = stream_batches(whole, CPU, workers=1)
    batch = next(stream)
    stream.close()
    assert [batch["mask"], *(half["mask"] for half in halves)] == [None] * 3
    found = [gradients(without, Plan(), chunk) for chunk in (None, 2)]
    ladder = command(capsys, "ladder", "model.py:net", "--rungs", "loader-workers", *QUICK, "--out", "ladder")
    assert {row["equivalence"]["verdict"] for row in ladder["rows"]} <= {"same", "rounding"}
    trained = command(capsys, "train", "model.py:net", *PLAIN, "--steps", 2, "--out", "run")["loss"]
    load_module.cache_clear()
    found.append(gradients(workload_of(f"{write(masked)}:net"), Plan()))
    assert max(loss for loss, _ in found) == pytest.approx(min(loss for loss, _ in found))
    assert max(max(relative_errors(one[1], found[0][1])[0].values()) for one in found[1:]) < 1e-5
    assert command(capsys, "train", "model.py:net", *PLAIN, "--steps", 2, "--out", "again")["loss"] == trained


def gradients(workload: Workload, plan: Plan, chunk: int | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    training = build(workload, plan, micro_batch=4, tokens=Path("none"), device=CPU, chunk=chunk)
    loss = training.step.compute_gradients(next(training.batches)).item()
    return loss, {name: each.grad for name, each in training.model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("rung", ["flash", "checkpointing", "sigmoid-gelu"])
def test_a_rung_leaves_loss_and_gradients_as_they_are(rung: str, repository: Path) -> None:
    workload = workload_of(f"{repository}/examples/vit.py:vit")
    assert rung not in workload.cannot
    plain, found = (gradients(workload, plan) for plan in (Plan(), plan_of((rung,))))
    assert found[0] == pytest.approx(plain[0], rel=1e-5)
    errors, _ = relative_errors(found[1], plain[1])
    assert max(errors.values()) < 1e-4


def test_the_rungs_are_really_there(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workload_of(f"{repository}/examples/vit.py:vit")
    ran: list[str] = []
    plain = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("redline.model.recompute.checkpoint", lambda *a, **k: (ran.append("again"), plain(*a, **k))[1])
    gradients(workload, plan_of(("checkpointing",)))
    assert ran == ["again"] * 2
    model = adapter_of(workload).build(plan_of(("sigmoid-gelu",)), CPU)
    assert not any(isinstance(module, nn.GELU) for module in model.modules())
    build(workload, plan_of(("flash",)), micro_batch=2, tokens=Path("none"), device=CPU)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == (True, False)
    build(workload, Plan(), micro_batch=2, tokens=Path("none"), device=CPU)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == (False, True)


def test_a_batch_in_pieces_has_the_gradients_of_the_whole(write: Callable[[str], Path]) -> None:
    workload = workload_of(f"{write(ENCODER)}:encoder")
    whole, pieces = gradients(workload, Plan()), gradients(workload, Plan(), chunk=3)  # 3 and 1: unequal shares
    assert pieces[0] == pytest.approx(whole[0], rel=1e-5)
    assert max(relative_errors(pieces[1], whole[1])[0].values()) < 1e-4


def test_restore_brings_weights_and_averages_back_to_the_bit(write: Callable[[str], Path]) -> None:
    workload = workload_of(f"{write(NORMED)}:normed")
    training = build(workload, Plan(), micro_batch=4, tokens=Path("none"), device=CPU)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    for _ in range(3):
        training.step(next(training.batches))
    moved = training.model.state_dict()
    assert not torch.equal(moved["1.running_mean"], before["1.running_mean"])
    training.restore()
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_dropout_is_off_while_measuring_and_on_while_training(write: Callable[[str], Path]) -> None:
    measured = workload_of(f"{write(NORMED)}:normed")
    rates = {}
    for name, workload in (("measured", measured), ("trained", for_training(measured, "cpu"))):
        adapter = adapter_of(workload)
        assert isinstance(adapter, PythonAdapter)
        model = adapter.build(Plan(), CPU)
        rates[name] = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        with adapter.evaluating(model):
            assert not model.training
        assert model.training
    assert rates == {"measured": [0.0], "trained": [0.2]}


def test_the_same_loss_as_a_plain_loop(repository: Path) -> None:
    """Nothing of ours stands between the user's code and its loss."""
    workload = workload_of(f"{repository}/examples/mlp.py:mlp")
    functions = load_functions(workload.source)
    torch.manual_seed(workload.seed)
    model = functions.factory()
    images, labels = functions.make_batch(4, workload.seed)
    assert gradients(workload, Plan())[0] == F.cross_entropy(model(images), labels).item()


# --- the commands, with workers in this process -----------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_waiting: None) -> Path:
    """tests/cpu/test_ladder.py starts real workers."""
    machine = probe.probe("cpu"), probe.versions()
    for module in ("search.words", "search.launch"):
        monkeypatch.setattr(f"redline.{module}.probe_machine", lambda _: machine)

    def launch(run: Any, job: Any, *_: object, **__: object) -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # a worker's goes to its log
            try:
                return worker.run(job, run.path, lambda *_, **__: None)
            except Exception as error:
                return worker.describe(error)

    def inspect(arguments: list[str], *_: object) -> int:
        with contextlib.redirect_stdout(sys.stderr):
            return inspect_model.main(Path(arguments[1]), Path(arguments[2]))

    monkeypatch.setattr("redline.search.ladder.launch", launch)
    monkeypatch.setattr("redline.search.inspect._run", inspect)
    monkeypatch.chdir(tmp_path)
    Path("plain.json").write_text(json.dumps(to_json(Recipe(micro_batch=4))))  # compiling takes longer than training
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == code, capsys.readouterr().err
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


PLAIN = ("--recipe", "plain.json", "--device", "cpu")
QUICK = ("--steps", 2, "--check-steps", 3, "--micro-batch", 4, "--device", "cpu", "--keep", "all")
MODELS = {"vit": "examples/vit.py:vit", "mlp": "examples/mlp.py:mlp", "encoder": ENCODER}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_goes_through_every_command(
    name: str,
    here: Path,
    verdict_only: None,
    repository: Path,
    write: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{write(ENCODER)}:encoder" if name == "encoder" else f"{repository / MODELS[name]}"
    seen = traced(words)

    found = command(capsys, "lint", words, "--gpu", "H200", "--micro-batch", 64)
    assert (found["findings"], found["shape"]["parameters"]) == ([], seen.parameters)

    estimated = command(capsys, "estimate", words, "--gpu", "H200", "--micro-batch", 64)
    assert estimated["parameters"] == seen.parameters
    assert estimated["flops_per_token"]["model"] == seen.flops.per_sample / seen.items_per_sample
    assert estimated["tokens_per_second"] is None
    assert estimated["memory"]["logits"] is None  # autograd does not say what it keeps
    assert sum(v or 0 for k, v in estimated["memory"].items() if k != "total") == estimated["memory"]["total"]
    assert estimated["roofline"]["floor"]["seconds"] <= estimated["roofline"]["light"]["seconds"]

    rungs = "flash,padded-vocab,fused-adamw,checkpointing"
    ladder = command(capsys, "ladder", words, "--rungs", rungs, *QUICK, "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    assert rows["padded-vocab"]["status"] == "skipped"
    assert (rows["flash"]["status"] == "skipped") == (name == "mlp")
    measured = [row for row in ladder["rows"] if row["status"] == "ok"]
    assert {row["equivalence"]["verdict"] for row in measured} <= {"same", "rounding"}
    assert len(measured) == {"vit": 4, "mlp": 2, "encoder": 4}[name]
    assert {row["unit"] for row in measured} == {"token" if name == "encoder" else "sample"}
    assert measured[0]["tokens_per_second"] * measured[0]["step_seconds"]["median"] == pytest.approx(
        4 * seen.items_per_sample
    )
    assert main(["report", "ladder"]) == 0
    assert ("tok/s" if name == "encoder" else "samples/s") in capsys.readouterr().out

    trained = command(capsys, "train", words, "--steps", 10, *PLAIN, "--out", "train")
    assert (trained["ended"], trained["updates"]) == ("steps", 10)
    assert trained["tokens"]["train"] == 10 * 4 * seen.items_per_sample
    assert trained["validation_loss"] is not None
    assert main(["report", "train"]) == 0
    assert capsys.readouterr().out.splitlines() == summary_lines(trained)


def test_lint_names_the_lines(
    here: Path, repository: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENCODER.replace("64", "51")
    (found,) = command(capsys, "lint", f"{write(text)}:encoder", "--gpu", "H200")["findings"]
    assert (found["rule"], found["where"]) == ("layer-size", ["head"])
    assert f"model.py:{line_of(text, 'self.head')}" in found["fix"]
    assert found["predicted_gain"] > 0.05
    both = command(capsys, "lint", f"{repository}/examples/naive_gpt.py:gpt", "--ignore", "vocabulary,head-width")
    assert [each["rule"] for each in both["findings"]] == ["written-out-attention", "synchronisation"]
    assert main(["lint", f"{repository}/examples/naive_gpt.py:gpt", "--fix"]) == 2
    assert "--fix with a Python file" in capsys.readouterr().err


GATED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LAYER(8, 77)
        self.head = nn.Linear(77, 64)

    def forward(self, x):
        return self.head(self.rnn(CALL)).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(seed))
"""


@pytest.mark.parametrize(
    ("layer", "call", "gates"),
    [("LSTM", "x.transpose(0, 1))[0]", 4), ("GRU", "x.transpose(0, 1))[0]", 3), ("GRUCell", "x[:, 0])", 3)],
    ids=["LSTM", "GRU", "GRUCell"],
)
def test_lint_knows_the_width_of_a_recurrent_layer(
    layer: str, call: str, gates: int, here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = GATED.replace("LAYER", layer).replace("CALL)", call)
    words = f"{write(text)}:net"
    (seen,) = traced(words).recurrent
    assert (seen.where, seen.width, seen.gates) == ("rnn", 77, gates)
    (found,) = command(capsys, "lint", words, "--gpu", "H200", "--micro-batch", "512")["findings"]
    assert (found["problem"].split()[0], found["where"]) == ("77", ["rnn", "head"])
    assert f"128 at model.py:{line_of(text, 'self.rnn')}" in found["fix"]


def test_lint_tells_what_it_does_not_judge(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        GATED.replace("nn.LAYER(8, 77)", "nn.Parameter(torch.randn(4, 8, 333))")
        .replace("77", "333")
        .replace("self.rnn(CALL)", "torch.einsum('bti,eio->beto', x, self.rnn)")
    )
    notes = command(capsys, "lint", f"{write(text)}:net", "--gpu", "H200")["notes"]
    (note,) = [note for note in notes if "belong to no layer" in note]
    assert note.startswith(f"model.py:{line_of(text, 'einsum')} multiplies by")


def test_layers_keep_their_names_unless_they_are_alike(write: Callable[[str], Path]) -> None:
    text = NORMED.replace(
        "nn.Linear(4 * 36, 3),", "nn.Linear(4 * 36, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),"
    )
    products = traced(f"{write(text)}:normed").products
    assert [(each.where, each.area, each.k, each.count) for each in products] == [
        ("0", 9, 9, 1),
        ("5", 1, 144, 1),
        ("6.*", 1, 3, 2),
    ]


def test_reasons_name_the_lines_that_call(write: Callable[[str], Path]) -> None:
    cannot, line = workload_of(f"{write(ENCODER)}:encoder").cannot, line_of(ENCODER, "return self.head(")
    assert f"behind embedding (called at model.py:{line})" in cannot["bf16-residual"]
    assert f"the head (called at model.py:{line})" in cannot["fused-loss"]
    assert f"(head at model.py:{line_of(ENCODER, 'self.head = ')})" in cannot["tied-weights"]


def test_a_batch_norm_is_checked_with_whole_batches(
    here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In pieces of four its statistics, and so its gradients, would be others: the row would look wrong."""
    words = f"{write(NORMED)}:normed"
    assert not traced(words).splits
    quick = [6 if word == 4 else word for word in QUICK]
    ladder = command(capsys, "ladder", words, "--rungs", "fused-adamw,loader-workers", *quick, "--out", "ladder")
    assert {row["equivalence"]["verdict"] for row in ladder["rows"]} <= {"same", "rounding"}


def test_a_random_model_is_measured_and_not_judged(
    here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{write(RANDOM)}:net"
    ladder = command(capsys, "ladder", words, "--rungs", "fused-adamw", *QUICK, "--out", "ladder", code=1)
    assert [row["equivalence"]["verdict"] for row in ladder["rows"]] == ["not-checked"] * 2
    assert f"model.py:{line_of(RANDOM, 'rand_like')}" in ladder["rows"][0]["equivalence"]["detail"]
    assert ladder["best"] is None
    Path("model.py").write_text(RANDOM.replace("rand_like", "randn_like"))
    assert main(["ladder", "--resume", "ladder"]) == 2
    assert "model.py has changed" in capsys.readouterr().err


@pytest.mark.parametrize("by_name", [False, True], ids=["F.dropout", "by-name"])
def test_dropout_by_a_function_is_off_while_measuring_and_on_in_training(
    by_name: bool, here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = DROPS.replace("F.dropout(self", "dropout(self").replace(
        "import torch.nn.functional as F", "from torch.nn.functional import dropout"
    )
    text = text if by_name else DROPS
    words, own = f"{write(text)}:net", F.dropout
    ladder = command(capsys, "ladder", words, "--rungs", "fused-adamw", *QUICK, "--out", "ladder")
    assert {row["equivalence"]["verdict"] for row in ladder["rows"]} <= {"same", "rounding"}
    assert ladder["best"] is not None
    (note,) = [note for note in ladder["workload"]["notes"] if "dropout is off" in note]
    assert f"F.dropout at model.py:{line_of(text, 'dropout(self')}" in note
    assert F.dropout is own
    plain = text.replace("0.5, self.training", "0.0, self.training")
    Path("plain.py").write_text(plain)
    if not by_name:  # a name that was imported stays what it was in this process, where both are done
        Path("recipe.json").write_text('{"rungs": [], "micro_batch": 4}')
        words = ("--recipe", "recipe.json", "--steps", 2, "--device", "cpu", "--out")
        losses = [command(capsys, "train", f"{name}.py:net", *words, name)["loss"] for name in ("model", "plain")]
        assert losses[0] != losses[1]
    without = command(capsys, "ladder", "plain.py:net", "--rungs", "none", *QUICK, "--out", "without")
    assert without["rows"][0]["loss_curve"] == ladder["rows"][0]["loss_curve"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch, importing Inductor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it after a graph break
def test_code_that_the_compiler_cannot_take_whole(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{write(BREAKS)}:net"
    ladder = command(capsys, "ladder", words, "--rungs", "compile,fused-adamw", *QUICK, "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    assert rows["compile"]["status"] == "ok", rows["compile"]["reason"]
    assert rows["compile"]["kernels"]["graph_breaks"] > 0
    assert f"model.py:{line_of(BREAKS, 'print')}" in rows["compile"]["compile_note"]
    assert rows["fused-adamw"]["status"] == "ok"


def test_code_that_the_compiler_gives_up_on_is_not_called_compiled(
    here: Path, no_waiting: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, as fast as before and equal to the bit, and would look like a rung that is right."""
    text = BREAKS.replace('print("seen", h.shape)', 'assert not torch.compiler.is_compiling(), "not today"')
    ladder = command(capsys, "ladder", f"{write(text)}:net", "--rungs", "compile", *QUICK, "--out", "ladder")
    row = ladder["rows"][1]
    assert (row["rung"], row["status"], row["kept"]) == ("compile", "ok", False)
    place = f"nothing was compiled, every step runs in eager: model.py:{line_of(text, 'assert')}: "
    assert row["reason"].startswith(place)
    assert row["kernels"]["compiled"]["graphs"] == 0
    assert json.loads(Path("ladder/best.json").read_text())["rungs"] == []


def test_a_rung_that_fails_is_a_row_and_the_ladder_goes_on(
    here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention with a mask that the fused kernel of a CPU does not take, once it is the only one left."""
    text = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        if not torch.backends.cuda.math_sdp_enabled():
            raise NotImplementedError("only the plain kernel")
        return F.scaled_dot_product_attention(self.q(x), x, x).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 2, 5, 8, generator=torch.Generator().manual_seed(seed))
"""
    words = f"{write(text)}:net"
    ladder = command(capsys, "ladder", words, "--rungs", "flash,fused-adamw", *QUICK, "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    assert (rows["flash"]["status"], rows["fused-adamw"]["status"]) == ("failed", "ok")
    assert "only the plain kernel" in rows["flash"]["reason"]


MIXES_TYPES = """
import numpy
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        out = torch.zeros_like(x)
        y = F.scaled_dot_product_attention(self.q(x), x.to(self.q(x).dtype), x.to(self.q(x).dtype))
        USES
        return (out + y).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 2, 5, 8, generator=torch.Generator().manual_seed(seed))
"""
USES = {
    "index_add": ("out.index_add_(0, torch.ones(len(x)).nonzero().flatten(), y)", "RuntimeError: index_add_()"),
    "numpy": ("self.seen = numpy.asarray(y.detach())", "TypeError: Got unsupported ScalarType BFloat16"),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_that_autocast_breaks_is_measured_without_it(
    use: str, here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line, raised = USES[use]
    path = write(MIXES_TYPES.replace("USES", line))
    words, said = f"{path}:net", f"(at model.py:{line_of(path.read_text(), line)}: {line})"
    found = traced(words)
    assert {each.precision for each in found.saved} == {"fp32"}
    assert found.no_autocast is not None
    assert found.no_autocast.startswith(f"on a CPU a step under bf16 autocast raises {raised}")
    assert found.no_autocast.endswith(said)
    rungs = ("--rungs", "bf16,fp16,flash,fused-adamw,adamw-bf16")
    ladder = command(capsys, "ladder", words, *rungs, *QUICK, "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        **dict.fromkeys(("bf16", "fp16", "adamw-bf16"), "skipped"),
        **dict.fromkeys(("baseline", "flash", "fused-adamw"), "ok"),
    }
    assert all(said in row["reason"] for row in rows.values() if row["status"] == "skipped")
    for name in ("estimate", "lint"):
        assert any(said in note for note in command(capsys, name, words)["notes"])
    assert main(["train", words, *map(str, PLAIN), "--steps", "2", "--out", "trained"]) == 0
    capsys.readouterr()


def test_a_cpu_leaves_autocast_out_and_a_gpu_tries(write: Callable[[str], Path], h200: Hardware) -> None:
    """CUDA's autocast leaves sums and softmax in fp32: a mixture of experts that breaks here may well run there."""
    line = USES["index_add"][0]
    workload, cpu = workload_of(f"{write(MIXES_TYPES.replace('USES', line))}:net"), replace(h200, kind="cpu")
    for name in ("bf16", "fp16", "adamw-bf16", "adamw-bf16-kahan"):
        assert line in (why_not(find_rung(name), workload, cpu, Plan()) or "")
    assert not {"bf16", "fp16"} & set(usual_rungs(workload, cpu))
    assert {"bf16", "fused-adamw"} <= set(usual_rungs(workload, h200))
    assert why_not(find_rung("bf16"), workload, h200, Plan()) is None


def test_a_fault_that_sizes_do_not_show_is_a_row(
    here: Path, verdict_only: None, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker names the line: see below."""
    words = f"{write(MIXES_TYPES.replace('USES', 'out[torch.arange(len(x))] = y'))}:net"
    ladder = command(capsys, "ladder", words, "--rungs", "bf16,fused-adamw", *QUICK, "--out", "ladder")
    assert [row["status"] for row in ladder["rows"]] == ["ok", "failed", "ok"]
    assert "Index put requires" in ladder["rows"][1]["reason"]


QUANTISED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (6, 6), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((6,), 0.1, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.down, self.up = nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x):
        weight = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        return (x @ weight + self.up(self.down(x)) - self.mean.float()).square().mean()

def net():
    return Net()

def make_batch(size, seed):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
"""


def test_frozen_weights_count_with_the_bytes_that_they_have(write: Callable[[str], Path]) -> None:
    seen = traced(f"{write(QUANTISED)}:net")
    trained, codes, scale, mean = 6 * 2 + 2 + 2 * 6 + 6, 36, 2 * 6, 8 * 6
    assert predict_memory(seen, Plan(), micro_batch=2).weights == 4 * trained + codes + scale + mean
    narrow = predict_memory(seen, plan_of(("bf16", "adamw-bf16")), micro_batch=2)
    assert narrow.weights == 2 * trained + codes + scale + mean
    assert narrow.gradients == 2 * trained


def test_what_is_not_trained_may_be_of_any_type(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{write(QUANTISED)}:net"
    ladder = command(capsys, "ladder", words, "--rungs", "bf16,fused-adamw,adamw-bf16", *QUICK, "--out", "ladder")
    assert [(row["rung"], row["status"]) for row in ladder["rows"]] == [
        (name, "ok") for name in ("baseline", "bf16", "fused-adamw", "adamw-bf16")
    ]
    built = PythonAdapter(workload_of(words)).build(plan_of(("bf16", "adamw-bf16")), CPU)
    assert {name: each.dtype for name, each in built.named_parameters() if name in ("codes", "down.weight")} == {
        "codes": torch.int8,
        "down.weight": torch.bfloat16,
    }
    assert main(["train", words, *map(str, PLAIN), "--steps", "2", "--out", "trained"]) == 0
    capsys.readouterr()


def test_a_worker_names_the_users_line(tmp_path: Path, write: Callable[[str], Path]) -> None:
    path = write("def broken():\n    return 1 / 0\n")
    (tmp_path / "job.json").write_text(json.dumps({"workload": {"source": {"file": str(path)}}}))
    try:
        namespace: dict[str, Any] = {}
        code = compile(path.read_text(), str(path), "exec")
        exec(code, namespace)
        namespace["broken"]()
    except ZeroDivisionError as error:
        failure = worker.with_users_line(worker.describe(error), error, tmp_path)
    assert failure.reason == "ZeroDivisionError: division by zero (at model.py:2: return 1 / 0)"


@pytest.mark.parametrize(
    "use",
    [("ladder", "--rungs", "none", "--micro-batch", 4, "--device", "cpu"), ("train", "--steps", 8, *PLAIN)],
    ids=["ladder", "train"],
)
def test_a_target_that_an_inspection_does_not_meet_is_told(
    use: tuple[Any, ...], here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of batches of two and four, none has it; targets that count for nothing may be anywhere."""
    late = "torch.tensor([-100, 2, 1, 3 if seed > 1339 else 0])[torch.arange(size) % 4]"
    name, *options = map(str, use)
    path = write(GOOD.replace("torch.zeros(size, dtype=torch.int64)", late) + f"# for {name}\n")
    code = {"ladder": 2, "train": 1}[name]
    assert main([name, f"{path}:net", *options, "--out", "run"]) == code
    problem, why, fix = capsys.readouterr().err.splitlines()[-3:]
    assert problem == "problem: make_batch for model.py:net gives the target 3, and the model has 3 classes"
    assert "the targets go from 1 to 3; they are made at model.py:5: def make_batch(size, seed):" in why
    assert "targets of 0 to 2, or the head 4 outputs or more" in fix


# --- training ---------------------------------------------------------------------------------------------------------


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = sorted((run / "checkpoints").iterdir())[-1]
    return {**load_file(newest / "model.safetensors"), **load_file(newest / "buffers.safetensors")}


def test_a_run_that_was_cut_goes_on_to_the_same_bits(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch norm's averages and dropout's random numbers are part of where a run stands."""
    words = f"{write(NORMED)}:normed"
    common = (*PLAIN, "--schedule", "constant", "--eval-every", 3, "--cycle", 3)
    command(capsys, "train", words, "--steps", 8, *common, "--out", "whole")
    command(capsys, "train", words, "--steps", 5, *common, "--out", "cut")
    command(capsys, "train", "--resume", "cut", "--steps", 8)
    whole, cut = weights_in(Path("whole")), weights_in(Path("cut"))
    assert whole.keys() == cut.keys()
    assert {"1.running_mean", "0.weight"} <= whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name


RAISES_LATE = """
import torch
from torch import nn

class Net(nn.Linear):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        FORWARD
        return super().forward(x)

def net():
    return Net(3, 3)

def make_batch(size, seed):
    BATCH
    return torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)
"""
UNDER_WAY = {  # (in forward, in make_batch), and the line that is told
    "forward": ("if Net.calls > CALLS: raise ConnectionError('late')", "pass", "model.py:10: if Net.calls"),
    "evaluation": ("if not self.training: [][0]", "pass", "model.py:10: if not self.training: [][0]"),
    "exit": ("if Net.calls > CALLS: raise SystemExit(0)", "pass", "model.py:10: if Net.calls"),
    "batch": ("pass", "if seed > 1341: open('gone')", "model.py:17: if seed > 1341: open('gone')"),
}


@pytest.mark.parametrize("name", UNDER_WAY)
def test_what_a_file_raises_under_way_is_told_with_its_line(
    name: str, here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    forward, batch, line = UNDER_WAY[name]
    looks = 2 * 20  # more calls than an inspection makes
    text = RAISES_LATE.replace("FORWARD", forward.replace("CALLS", str(looks))).replace("BATCH", batch)
    words = f"{write(text)}:net"
    often = ("--steps", 60, "--cycle", 2, "--checkpoint-every", 2, "--eval-every", 4, "--out", "run")
    assert main(["train", words, *map(str, (*PLAIN, *often)), "--json"]) == 1
    out, shown = capsys.readouterr()
    problem, why, fix = shown.splitlines()[-3:]
    assert problem.startswith("problem: ")
    assert f"it happened at {line}" in why
    assert "and start a new run" in fix
    assert "Traceback" not in shown
    summary = json.loads(out)  # one document, of what the run had come to
    assert (summary["ended"], summary["out"], summary["unit"]) == ("failed", "run", "sample")
    assert line in summary["reason"]
    saved = sorted((here / "run" / "checkpoints").iterdir())
    assert f"{Path('run', 'checkpoints', saved[-1].name)} was saved before" in why
    told = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (told["kind"], told["ended"]) == ("end", "failed")


def test_the_summary_of_a_lost_session_is_of_that_session(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And not of the one that run.json is of: the folder was moved since, and the recipe is another."""
    forward, batch, _ = UNDER_WAY["batch"]
    words = f"{write(RAISES_LATE.replace('FORWARD', forward).replace('BATCH', batch))}:net"
    often = ("--steps", 60, "--cycle", 2, "--checkpoint-every", 2, "--out", "run")
    assert main(["train", words, *map(str, (*PLAIN, *often)), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)
    (here / "run").rename(here / "moved")
    Path("other.json").write_text(json.dumps(to_json(Recipe(rungs=("no-sync",), micro_batch=4))))
    assert main(["train", "--resume", "moved", "--recipe", "other.json", "--json"]) == 1
    second = json.loads(capsys.readouterr().out)
    assert [(one["out"], one["rungs"]) for one in (first, second)] == [("run", []), ("moved", ["no-sync"])]
    assert second["checkpoint"].startswith("moved")


def test_an_abort_of_c_under_way_is_told_too(here: Path, write: Callable[[str], Path]) -> None:
    """Where a GPU is lost, torch's destructors call it: no exception comes, and the process is gone."""
    text = RAISES_LATE.replace("FORWARD", "if Net.calls > 40: __import__('os').abort()").replace("BATCH", "pass")
    often = ("--steps", 60, "--cycle", 2, "--checkpoint-every", 2, "--out", "run")
    line = [sys.executable, "-m", "redline", "train", f"{write(text)}:net", *map(str, (*PLAIN, *often))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    problem, why, fix = (text for text in done.stderr.splitlines() if text.startswith(("problem:", "why:", "fix:")))
    assert "training model.py:net ended in C++ code" in problem
    whole = sorted((here / "run" / "checkpoints").glob("step-*[0-9]"))  # another was being written
    assert f"{Path('run', 'checkpoints', whole[-1].name)} was saved before" in why
    assert "redline train --resume run" in fix


def test_an_abort_behind_an_exception_adds_nothing_to_it() -> None:
    code = (
        "from redline.engine.last_words import last_words; import os\ntry:\n  with last_words(lambda: 1/0):\n    [][0]"
    )
    code += "\nexcept IndexError:\n  print('told', flush=True)\n  os.abort()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "told\n", "")


def test_an_abort_behind_the_block_is_as_it_was() -> None:
    code = "from redline.engine.last_words import last_words; import os\nwith last_words(lambda: 1/0): pass\nos.abort()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGABRT


def test_code_that_the_compiler_was_reading_is_named(write: Callable[[str], Path]) -> None:
    """Dynamo reads it without running it: no frame is left of it, but a list of its lines."""
    text = RAISES_LATE.replace("FORWARD", "x @ torch.zeros(7, 7)").replace("BATCH", "pass")
    text = text.replace("Net.calls += 1", "pass")  # which torch 2.11 does not read
    found = find_python_file(f"{write(text)}:net")
    assert found is not None
    compiled = torch.compile(load_functions(found.source).factory(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        compiled(torch.ones(2, 3))
    mistake = raised_in(str(found.path), raised.value, "training")
    assert mistake is not None
    assert "model.py:10: x @ torch.zeros(7, 7)" in mistake.why


def test_an_index_out_of_range_on_a_gpu_names_no_line(write: Callable[[str], Path]) -> None:
    """The line that runs when it is told has nothing to do with it."""
    mistake = raised_in("model.py", RuntimeError("CUDA error: device-side assert triggered"), "training")
    assert mistake is not None
    assert "no line can be named" in mistake.why
    assert "CUDA_LAUNCH_BLOCKING=1" in mistake.fix


def test_the_traceback_of_a_failed_run_is_shown_to_whoever_asks(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(RAISES_LATE.replace("FORWARD", "if not self.training: [][1]").replace("BATCH", "pass"))
    assert main(["train", f"{path}:net", *map(str, PLAIN), "--steps", "2", "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "IndexError: list index out of range" in shown


def test_a_mistake_of_ours_stays_a_traceback(
    here: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a line of the file was running when ours was called."""
    text = RAISES_LATE.replace("FORWARD", "self.inner(x)").replace("BATCH", "pass")
    path = write(text.replace("return Net(3, 3)", "net = Net(3, 3)\n    net.inner = nn.Identity()\n    return net"))
    namespace: dict[str, Any] = {}
    exec(compile("def ours(*_):\n    1 / 0\n", f"{PACKAGE}/model/ours.py", "exec"), namespace)
    build_own = PythonAdapter.build

    def build_broken(self: PythonAdapter, plan: Plan, device: torch.device) -> nn.Module:
        model = build_own(self, plan, device)
        model.get_submodule("inner").register_forward_hook(namespace["ours"])
        return model

    monkeypatch.setattr(PythonAdapter, "build", build_broken)
    with pytest.raises(ZeroDivisionError):
        main(["train", f"{path}:net", *map(str, PLAIN), "--steps", "2"])


def test_a_run_does_not_go_on_with_another_file(
    here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(PLANTED)
    command(capsys, "train", f"{path}:net", "--steps", 2, *PLAIN, "--out", "run")
    write(PLANTED.replace("relu", "tanh"))
    load_module.cache_clear()  # a session is a process of its own
    assert main(["train", "--resume", "run", "--steps", "4"]) == 2
    assert "model.py has changed" in capsys.readouterr().err
    assert main(["export", "run", "--out", "exported"]) == 2
    assert "no config to export" in capsys.readouterr().err
    assert not Path("exported").exists()


@pytest.mark.parametrize(
    "option", [("--data", "x.txt"), ("--sample-every", "5"), ("--sequence", "128")], ids=lambda o: o[0]
)
def test_options_of_a_text_are_refused(
    option: tuple[str, str], here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"{write(PLANTED)}:net", "--steps", "2", "--device", "cpu", *option, "--out", "run"]) == 2
    shown = capsys.readouterr().err
    assert f"{option[0]} with " in shown
    assert f"leave {option[0]} out" in shown
    assert not Path("run").exists()


# --- mistakes ---------------------------------------------------------------------------------------------------------

GOOD = """import torch
from torch import nn
def net():
    return nn.Linear(3, 3)
def make_batch(size, seed):
    return torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)
"""
MISTAKES = {
    "import-raises": ("from torch import nn", "from torch import nn, nonsense", "ImportError", "model.py:2"),
    "factory-raises": ("nn.Linear(3, 3)", "nn.Linear(3, int('x'))", "ValueError", "model.py:4: return nn.Linear"),
    "no-module": ("nn.Linear(3, 3)", "[nn.Linear(3, 3)]", "returned a list", "torch.nn.Module"),
    "a-class": ("nn.Linear(3, 3)", "nn.Linear", "model.py:net returned the class Linear", "return Linear()"),
    "lazy": (
        "nn.Linear(3, 3)",
        "nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(3))",
        "model.py:net has no size for 1.weight",
        "it belongs to a LazyLinear",
        "run one batch through the model in net(), before it is returned",
    ),
    "lazy-averages": (
        "nn.Linear(3, 3)",
        "nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 3))",
        "model.py:net has no size for 0.running_mean",
    ),
    "float64": (
        "nn.Linear(3, 3)",
        "nn.Linear(3, 3).double()",
        "model.py:net has parameters that are not float32: weight (float64) and 1 more",
        "weights are trained in float32",
        "let net() return model.float(), and make_batch float32",
    ),
    "bf16": (
        "nn.Linear(3, 3)",
        "nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False, dtype=torch.bfloat16))",
        "not float32: 1.weight (bfloat16)\n",
        "model.float()",
    ),
    "factory-takes-something": (
        "def net()",
        "def net(width, depth=2, *, heads)",
        "model.py:net needs arguments: width, heads",
        "model.py:3: def net(width, depth=2, *, heads):",
        "`def build(): return net(width=..., heads=...)`",
    ),
    "shape-lacks-sizes": (
        "def make_batch",
        "def net_shape():\n    return {'layers': 2, 'vocab': 9}\ndef make_batch",
        "net_shape() at model.py:5: what it returned has no heads, d_model, d_ff, sequence\n",
        'add "heads", "d_model", "d_ff", "sequence"',
    ),
    "shape-is-a-list": (
        "def make_batch",
        "def shape():\n    return [2, 9]\ndef make_batch",
        "shape() at model.py:5: what it returned is a list",
        "a dict with layers, heads,",
    ),
    "shape-does-not-divide": (
        "def make_batch",
        "def shape():\n    return dict(layers=1, heads=3, d_model=64, d_ff=9, vocab=9, sequence=9)\ndef make_batch",
        "shape() at model.py:5: 3 heads do not divide d_model 64",
        "choose a number of heads",
    ),
    "loss-of-each-sample": (
        "def make_batch",
        "def net_loss(model, batch):\n    return model(batch[0]).mean(1)\ndef make_batch",
        "net_loss() for model.py:net returned a float32 tensor of [2]",
        "let net_loss() return the mean loss of the batch, one number: .mean() of that",
    ),
    "loss-is-text": (
        "def make_batch",
        "def loss(model, batch):\n    return 'low'\ndef make_batch",
        "loss() for model.py:net returned a str",
        "let loss() return the mean loss of the batch, one number\n",
    ),
    "own-batch-raises": (
        "make_batch(size, seed):",
        "net_batch(size, seed):\n    1 / 0",
        "net_batch(2, 1337) raised Zero",
    ),
    "own-batch-of-wrong-size": (
        "make_batch(size, seed):",
        "net_batch(size, seed):\n    return torch.ones(3)",
        "net_batch(2, seed) for model.py:net returned",
    ),
    "batch-takes-one": (
        "make_batch(size, seed)",
        "make_batch(size)",
        "TypeError",
        "model.py:5: def make_batch(size):",
        "it is called as make_batch(size, seed)",
    ),
    "no-parameters": ("nn.Linear(3, 3)", "nn.ReLU()", "has no parameters to train", "nn.ModuleList"),
    "frozen": (
        "nn.Linear(3, 3)",
        "nn.Linear(3, 3).requires_grad_(False)",
        "has no parameters to train",
        "requires_grad_(True) in net()",
    ),
    "forward-takes-more": (
        "def net():\n    return nn.Linear(3, 3)",
        "class Net(nn.Linear):\n    def forward(self, x, y, z):\n        return x\ndef net():\n    return Net(3, 3)",
        "the forward pass of model.py:net raised TypeError",
        "model.py:4: def forward(self, x, y, z):",
        "it is called as model(*batch)",
    ),
    "returns-a-tuple": (
        GOOD.partition("def net")[2],
        "():\n    return Net(3, 3)\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x).mean(), x\ndef make_batch(size, seed):\n    return torch.ones(size, 3)\n",
        "model.py:net returned a tuple",
        "`return model(batch)[0]`",
    ),
    "returns-the-loss-second": (
        GOOD.partition("def net")[2],
        "():\n    return Net(3, 3)\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        return x, super().forward(x).mean()\n"
        "def make_batch(size, seed):\n    return {'x': torch.ones(size, 3)}\n",
        "model.py:net returned a tuple",
        "`return model(**batch)[1]`",
    ),
    "loss-returns-a-tuple": (
        "def make_batch",
        "def loss(model, batch):\n    return batch[0], model(batch[0]).mean()\ndef make_batch",
        "loss() for model.py:net returned a tuple",
        "element [1] of that alone",
    ),
    "nan": (
        "def make_batch",
        "def loss(model, batch):\n    rows = model(batch[0])\n    bad = (rows * 0 - 1).log()\n    return bad.mean()\n"
        "def make_batch",
        "the loss of model.py:net is no number: nan on the first batch",
        "model.py:7: bad = (rows * 0 - 1).log()",
    ),
    "batch-raises": (
        "torch.ones(size, 3)",
        "torch.ones(size, 3) + torch.ones(7)",
        "RuntimeError",
        "model.py:6: return",
    ),
    "other-weights": (
        "    return nn.Linear(3, 3)",
        "    import numpy\n    model = nn.Linear(3, 3)\n    drawn = numpy.random.default_rng().normal(size=(3, 3))\n"
        "    model.weight.data = torch.from_numpy(drawn).float()\n    return model",
        "model.py:net gives other weights every time: weight",
        "it is made at model.py:3: def net():",
        "default_rng(0)",
    ),
    "nested-batch": (
        "return torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)",
        "return [(torch.ones(size, 3), torch.zeros(size, dtype=torch.int64))]",
        "the model was called as model(*batch), and the batch is a list of 1 (a tuple)",
        "it is made at model.py:5: def make_batch",
        "let make_batch return what the model is called with",
    ),
    "named-batch": (
        "torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)",
        "{'x': torch.ones(size, 3)}",
        "the model was called as model(**batch), and the batch is a dict of 1 (x: a float32 tensor of [2, 3])",
        "it is made at model.py:5: def make_batch",
    ),
    "no-batch": (
        "return torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)",
        "torch.ones(size, 3)",
        "make_batch(2, seed) for model.py:net returned None",
        "it is made at model.py:5: def make_batch",
        "return tensors of [size, ...]",
    ),
    "batch-of-nothing": (
        "torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)",
        "None, [None]",
        "returned no tensor at all",
        "return tensors of [size, ...]",
    ),
    "no-tensors": ("torch.ones(size, 3), torch", "[1.0] * size, torch", "returned a float", "[size, ...]"),
    "wrong-size": ("torch.ones(size, 3)", "torch.ones(3)", "float32 tensor of [3]", "in its first dimension"),
    "not-repeatable": (
        "torch.ones(size, 3)",
        "torch.rand(size, 3, generator=torch.Generator().manual_seed(__import__('time').time_ns()))",
        "two different batches",
        "manual_seed(seed)",
    ),
    "forward-raises": (
        "nn.Linear(3, 3)",
        "nn.Linear(4, 3)",
        "the forward pass of model.py:net raised RuntimeError",
        "3 features come in and the layer takes 4",
    ),
    "float-targets": (
        "dtype=torch.int64",
        "dtype=torch.float32",
        "for targets of a float32 tensor",
        "def loss(model, batch)",
    ),
    "no-scalar": (
        "torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)",
        "torch.ones(size, 3)",
        "returned a float32 tensor of [2, 3]",
        "def loss(model, batch)",
    ),
    "no-gradient": (
        "def make_batch",
        "def loss(model, batch):\n    return model(batch[0]).mean().detach()\ndef make_batch",
        "has no gradient",
        "detach()",
    ),
    "loss-raises": (
        "def make_batch",
        "def loss(model, batch):\n    return batch['x']\ndef make_batch",
        "problem: loss() for model.py:net raised TypeError",
        "model.py:6: return batch['x']",
        "fix:     fix that line\n",
    ),
    "numpy": (
        "torch.ones(size, 3), torch",
        "__import__('numpy').ones((size, 3), dtype='float32'), torch",
        "make_batch(2, seed) for model.py:net returned a float32 numpy array of [2, 3]",
        "torch.from_numpy",
    ),
    "module-for-factory": (
        "def net():\n    return nn.Linear(3, 3)",
        "net = nn.Linear(3, 3)",
        "model.py:net is a module, a Linear, and not a function",
        "made at model.py:3: net = nn.Linear(3, 3)",
        "write `def net(): return nn.Linear(3, 3)`",
    ),
    "target-too-large": (
        "torch.zeros(size, dtype=torch.int64)",
        "torch.arange(size) * 3",
        "make_batch for model.py:net gives the target 3, and the model has 3 classes",
        "the targets go from 0 to 3; they are made at model.py:5: def make_batch(size, seed):",
        "targets of 0 to 2, or the head 4 outputs or more",
    ),
    "target-too-large-in-a-larger-batch": (
        "torch.zeros(size, dtype=torch.int64)",
        "torch.arange(size)",
        "make_batch for model.py:net gives the target 3, and the model has 3 classes",
        "the targets go from 0 to 3",
    ),
    "target-negative": (
        "torch.zeros(size, dtype=torch.int64)",
        "torch.full((size,), -1)",
        "gives the target -1, and the model has 3 classes",
        "targets of 0 to 2\n",
    ),
    "target-out-of-bounds-in-own-loss": (
        "def make_batch",
        "def loss(model, batch):\n    return nn.functional.cross_entropy(model(batch[0]), 8 + batch[1])\n"
        "def make_batch",
        "loss() for model.py:net raised IndexError: Target 8 is out of bounds.",
        "model.py:6: return nn.functional.cross_entropy",
        "or give the head more outputs",
    ),
    "loss-of-logits": (
        "def make_batch",
        "def loss(logits, targets):\n    return nn.functional.cross_entropy(logits, targets)\ndef make_batch",
        "loss() for model.py:net raised TypeError",
        "model.py:6: return",
        "write `def loss(model, batch)` and call the model in it",
        "the whole batch, not logits and targets",
    ),
    "ids-are-floats": (
        "nn.Linear(3, 3)",
        "nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 3))",
        "the forward pass of model.py:net raised RuntimeError",
        "as int64: .long()",
    ),
    "recursion": (
        "return nn.Linear(3, 3)",
        "return net()",
        "net() raised RecursionError",
        "model.py:4: return net()",
        "end the endless recursion",
    ),
    "two-devices": (
        "def make_batch",
        "def loss(model, batch):\n    return (model(batch[0]) @ torch.ones(3, device='meta')).mean()\ndef make_batch",
        "loss() for model.py:net raised RuntimeError",
        "device=x.device",
    ),
    "loss-takes-three": (
        "def make_batch",
        "def loss(model, x, y):\n    return model(x).mean()\ndef make_batch",
        "loss() for model.py:net raised TypeError",
        "model.py:5: def loss(model, x, y):",
        "the whole batch, not model, x and y",
    ),
    "logits-without-gradient": (
        "def net():\n    return nn.Linear(3, 3)",
        "class Net(nn.Linear):\n    @torch.no_grad()\n    def forward(self, x):\n        return super().forward(x)\n"
        "def net():\n    return Net(3, 3)",
        "the logits of model.py:net carry no gradient",
        "they come from model.py:5: def forward(self, x):",
    ),
    "changed-in-place": (
        "def make_batch",
        "def loss(model, batch):\n    kept = model(batch[0]).sigmoid()\n    kept += 1\n    return kept.mean()\n"
        "def make_batch",
        "the backward pass of model.py:net raised RuntimeError: one of the variables needed for gradient",
        "it fails at what came from model.py:6: kept = model(batch[0]).sigmoid()",
        "x = x + 1, not x += 1",
    ),
    "sparse": (
        "def net():\n    return nn.Linear(3, 3)",
        "class Net(nn.EmbeddingBag):\n    def forward(self, x):\n        return super().forward(x.long())\n"
        "def net():\n    return nn.Sequential(Net(9, 3, sparse=True))",
        "model.py:net has a sparse gradient: that of 0.weight",
        "dense gradients; the layer is made at model.py:7: return nn.Sequential(Net(9, 3, sparse=True))",
        "take sparse=True out",
    ),
    "sparse-by-a-function": (
        "def net():\n    return nn.Linear(3, 3)",
        "class Net(nn.Linear):\n    def forward(self, x):\n"
        "        return nn.functional.embedding(x[:, 0].long(), self.weight, sparse=True)\n"
        "def net():\n    return Net(3, 3, bias=False)",
        "model.py:net has a sparse gradient: that of weight",
        "take sparse=True out",
    ),
    "meta": (
        "nn.Linear(3, 3)",
        "nn.Linear(3, 3, device='meta')",
        "model.py:net has no numbers in weight",
        "meta device",
        "make it on the host in net()",
    ),
    "complex": (
        "nn.Linear(3, 3)",
        "nn.Linear(3, 3, dtype=torch.complex64)",
        "not float32: weight (complex64) and 1 more",
        "keep weight as torch.view_as_real(...) of it",
    ),
    "async": (
        "def net()",
        "async def net()",
        "model.py:net is an async function",
        "it is defined at model.py:3",
        "write `def net()` there",
    ),
    "interrupts-itself": (
        "return nn.Linear(3, 3)",
        "raise KeyboardInterrupt",
        "model.py raised KeyboardInterrupt",
        "model.py:4: raise KeyboardInterrupt",
    ),
    "leaves": (
        "import torch\n",
        "import torch, sys; sys.exit(3)\n",
        "raised SystemExit: 3",
        "model.py:1",
        "remove the exit",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_the_users_own_line(
    name: str, here: Path, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, *said = MISTAKES[name]
    assert GOOD.count(old) == 1
    path = write(GOOD.replace(old, new))
    assert main(["ladder", f"{path}:net", "--device", "cpu", "--out", "run"]) == 2
    shown = capsys.readouterr().err
    for part in said:
        assert part in shown
    assert "Traceback" not in shown
    assert [line.split(":")[0] for line in shown.splitlines()] == ["problem", "why", "fix"]
    assert not Path("run").exists()


SIDE_BY_SIDE = """import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = x + F.scaled_dot_product_attention(self.mix(x), x, x)
        return x + self.down(F.gelu(self.up(x), approximate="tanh"))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.activation = nn.GELU(approximate="tanh")
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.activation(self.second(self.first(x))).mean((1, 2)))

def net():
    return Net()

def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, 4, 8, generator=generator), torch.randint(5, (size,), generator=generator)
"""


def test_what_only_the_file_can_change_is_named_with_its_lines(write: Callable[[str], Path]) -> None:
    workload = workload_of(f"{write(SIDE_BY_SIDE)}:net")
    seen = workload.shape
    assert isinstance(seen, Traced)
    parts = ("self.first =", "self.second =", "F.gelu", "F.scal")
    at = {part: f"model.py:{line_of(SIDE_BY_SIDE, part)}" for part in parts}
    assert (seen.tanh_gelus, list(map(str, seen.gelu_calls))) == (1, [at["F.gelu"]])  # a module calls it elsewhere
    assert "sigmoid-gelu" not in workload.cannot
    assert f"hold the 2 Block (made at {at['self.first =']}, {at['self.second =']})" in workload.cannot["checkpointing"]
    assert f"put the attention at {at['F.scal']} into a function" in workload.cannot["selective-checkpointing"]

    listed = SIDE_BY_SIDE.replace("self.first = Block()", "self.blocks = nn.Sequential(Block(), Block())")
    listed = listed.replace("self.second = Block()", "").replace("self.second(self.first(x))", "self.blocks(x)")
    listed = listed.replace('approximate="tanh")\n        self.head', ")\n        self.head")
    again = workload_of(f"{write(listed)}:net")
    assert "checkpointing" not in again.cannot
    line = f"model.py:{line_of(listed, 'F.gelu(self.up')}"
    assert f"F.gelu is a function at {line}: make nn.GELU(approximate='tanh')" in again.cannot["sigmoid-gelu"]


def test_the_file_without_the_mistakes_is_taken(here: Path, write: Callable[[str], Path]) -> None:
    assert traced(f"{write(GOOD)}:net").parameters == 12


def test_a_file_that_changes_under_way_is_refused(write: Callable[[str], Path]) -> None:
    path = write(PLANTED)
    workload = workload_of(f"{path}:net")
    changed = replace(workload, source=replace(workload.source, digest="0" * 64))
    with pytest.raises(UserError, match="has changed"):
        adapter_of(changed)


def test_a_neighbour_of_the_file_belongs_to_it(write: Callable[[str], Path], tmp_path: Path) -> None:
    helper = tmp_path / "helper_of_a_test.py"
    helper.write_text("WIDTH = 24\n")
    text = PLANTED.replace("from torch import nn", "from torch import nn\nfrom helper_of_a_test import WIDTH", 1)
    workload = workload_of(f"{write(text)}:net")
    assert isinstance(workload.shape, Traced)
    assert list(workload.shape.imports) == [helper.name]
    adapter_of(workload)
    helper.write_text("WIDTH = 25\n")
    with pytest.raises(UserError, match=re.escape(helper.name)):
        adapter_of(workload)


# --- neighbours -------------------------------------------------------------------------------------------------------

NET = "from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n"
BATCHES = """
import torch


def net():
    return blocks.Net(3, 3)


def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, generator=generator), torch.randint(3, (size,), generator=generator)
"""


@pytest.fixture
def laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Source]]:
    """laid_out("shop/net.py", "from . import blocks", blocks="shop/blocks.py") -> the first as a Source. What is
    imported meanwhile is forgotten again: other tests have packages of the same names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)

    def lay_out(file: str, line: str, *others: str, blocks: str) -> Source:
        texts = {blocks: NET, file: line + "\n" + BATCHES, **dict.fromkeys(others, "")}
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = find_python_file(f"{tmp_path / file}:net")
        assert found is not None
        return found.source

    yield lay_out
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "line", "blocks", "others", "imports"),
    [
        ("alone/net.py", "import blocks", "alone/blocks.py", (), ["blocks.py"]),
        ("bare/net.py", "from . import blocks", "bare/blocks.py", (), ["blocks.py"]),
        ("shop/net.py", "from . import blocks", "shop/blocks.py", ("shop/__init__.py",), ["__init__.py", "blocks.py"]),
        (
            "shop/net.py",
            "from shop import blocks",
            "shop/blocks.py",
            ("shop/__init__.py",),
            ["__init__.py", "blocks.py"],
        ),
        ("shop/parts/net.py", "from .. import blocks", "shop/blocks.py", (), ["../blocks.py"]),
        ("shop/parts/net.py", "from ..lib import blocks", "shop/lib/blocks.py", (), ["../lib/blocks.py"]),
        ("shop/__init__.py", "from . import blocks", "shop/blocks.py", (), ["blocks.py"]),
    ],
    ids=["script", "no-init", "package", "whole-name", "parent", "cousin", "init-itself"],
)
def test_a_file_imports_its_neighbours_as_python_lets_it(
    file: str, line: str, blocks: str, others: tuple[str, ...], imports: list[str], laid_out: Callable[..., Source]
) -> None:
    source = laid_out(file, line, *others, blocks=blocks)
    functions = load_functions(source)
    assert type(functions.factory()).__name__ == "Net"
    found = neighbours(functions.file)
    assert list(found) == imports
    check_neighbours(functions.file, found)
    (Path(functions.file).parent / imports[-1]).write_text("")
    with pytest.raises(UserError, match="has changed"):
        check_neighbours(functions.file, found)


def test_a_neighbour_that_imports_the_file_gets_the_same_classes(laid_out: Callable[..., Source]) -> None:
    source = laid_out("ring/net.py", "from . import blocks", blocks="ring/blocks.py")
    folder = Path(source.file or "").parent
    (folder / "__init__.py").write_text("from .net import net, make_batch\n")
    functions = load_functions(source)
    assert sys.modules["ring"].net is functions.factory
    assert not isinstance(sys.modules["ring.net"].__loader__, SourceFileLoader)  # from the bytes that were hashed


def test_loader_workers_import_neighbours_too(laid_out: Callable[..., Source]) -> None:
    """In processes of their own, where nothing of the package is imported yet."""
    source = laid_out("apart/net.py", "from . import blocks", blocks="apart/blocks.py")
    made = MadeBatches(source=source, seed=1, micro_batch=2)
    stream = stream_batches(made, torch.device("cpu"), workers=1)
    try:
        assert torch.equal(next(stream)[0], made[0][0])
    finally:
        stream.close()


@pytest.mark.parametrize(
    ("file", "line", "blocks", "others", "words"),
    [
        ("a.b/net.py", "from . import blocks", "a.b/blocks.py", (), "'a.b' is no name for a package"),
        ("torch/net.py", "from . import blocks", "torch/blocks.py", (), "torch, is taken"),
        ("one/net.py", "import bolcks", "one/blocks.py", (), "put bolcks.py beside net.py"),
        ("two/net.py", "import torch.bolcks", "two/blocks.py", (), "No module named 'torch.bolcks'"),
        ("six/net.py", "from json import blocks", "six/json.py", (), "rename json.py"),
    ],
    ids=["dotted-folder", "taken", "missing", "missing-in-a-library", "shadowed"],
)
def test_an_import_that_python_does_not_let_work_is_told(
    file: str, line: str, blocks: str, others: tuple[str, ...], words: str, laid_out: Callable[..., Source]
) -> None:
    with pytest.raises(UserError) as raised:
        load_functions(laid_out(file, line, *others, blocks=blocks))
    error = raised.value
    assert words in f"{error.problem} {error.fix}"


def test_a_neighbour_that_imports_relatively_beside_a_script_is_told(laid_out: Callable[..., Source]) -> None:
    source = laid_out("three/net.py", "import middle", "three/middle.py", blocks="three/blocks.py")
    (Path(source.file or "").parent / "middle.py").write_text("from . import blocks\n")
    with pytest.raises(UserError) as raised:
        load_functions(source)
    assert raised.value.why == "it happened at middle.py:1: from . import blocks"
    assert "import without the dot" in raised.value.fix


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_profile_finds_the_line_that_waits(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inspection, probe and worker are processes here: the parent imports nothing of the file."""
    monkeypatch.chdir(tmp_path)
    path = write(PLANTED)
    found = command(
        capsys, "profile", f"{path}:net", "--rungs", "none", "--steps", 1, "--micro-batch", 4, "--device", "cpu"
    )
    lines = {(each["kind"], Path(each["file"]).name, each["line"]) for each in found["findings"] if each["file"]}
    assert ("synchronisation", "model.py", line_of(PLANTED, "# waits")) in lines
    assert any("redline ladder" in advice["what"] for advice in found["advice"])


def test_a_mistake_comes_out_of_a_real_process(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(GOOD.replace("nn.Linear(3, 3)", "nn.Linear(3, int('x'))"))
    assert main(["estimate", f"{path}:net"]) == 2
    shown = capsys.readouterr().err
    assert "model.py:4: return nn.Linear(3, int('x'))" in shown
    assert "Traceback" not in shown
    assert not any(
        name.startswith("redline_user_") and path.samefile(getattr(module, "__file__", "/"))
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None)
    )


@pytest.mark.parametrize(
    ("question", "raised"),
    [("input('name? ')", "EOFError: EOF when reading a line"), ("breakpoint()", "BdbQuit")],
    ids=["input", "breakpoint"],
)
def test_a_question_finds_nobody_to_answer_it(
    question: str, raised: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process that looks at the file, which is a real one here."""
    path = write(GOOD.replace("    return nn.Linear", f"    {question}; size = 3\n    return nn.Linear"))
    assert main(["estimate", f"{path}:net"]) == 2
    shown = capsys.readouterr().err
    assert f"net() raised {raised}" in shown
    assert "it happened at model.py:" in shown
    assert f"take the {question.partition('(')[0]}() out" in shown


def test_a_worker_has_no_input_and_leaves_with_its_parent() -> None:
    lines = ["import sys, time", "from redline.engine.worker import leave_with_parent", "leave_with_parent()"]
    lines += ["print(repr(sys.stdin.read()), flush=True)", "time.sleep(600)"]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "''\n"
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()
