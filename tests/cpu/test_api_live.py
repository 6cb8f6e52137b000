"""Lint and estimate of modules that are already there, and functions that build them: counted against sums by hand."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redline
import redline.commands.tune as tune_command
import redline.search.ladder as ladder_search
from redline.api.loss import live_loss, loss_of_logits
from redline.core.errors import UserError
from redline.core.user_code import Functions
from redline.model.python_adapter import check_logits, cross_entropy, find_loss, loss_function, takes_inputs_only

CLASSES = torch.zeros(6, dtype=torch.int64)


def mlp() -> nn.Sequential:
    """8 -> 30 -> 4, with what an inspection would change."""
    return nn.Sequential(nn.Linear(8, 30), nn.Dropout(0.5), nn.Linear(30, 4))


class Naive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)  # written out
        y = scores.softmax(dim=-1) @ v
        if y.sum().item() > 1e9:  # waits
            raise OverflowError
        return self.head(y.mean(dim=1))


def line_of(words: str) -> int:
    lines, first = inspect.getsourcelines(Naive)
    return first + next(number for number, line in enumerate(lines) if words in line)


def pair(width: int = 8, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(count, width), CLASSES[:count]


# estimate


def test_parameters_and_flops_are_those_of_a_sum_by_hand() -> None:
    found = redline.estimate(mlp(), batch=pair(), rungs="none", gpu="H200")
    assert found["parameters"] == 8 * 30 + 30 + 30 * 4 + 4
    # a product forward and two backward, but for the first layer, whose input needs no gradient
    assert found["flops_per_token"]["model"] == 2 * (2 * 8 * 30 + 3 * 30 * 4)
    assert found["flops_per_token"]["unit"] == "sample"
    assert found["settings"]["micro_batch"] == 6
    assert found["memory"]["weights"] == 4 * found["parameters"]
    assert found["memory"]["optimizer"] >= 2 * 4 * found["parameters"]
    assert found["tokens_per_second"] is None
    assert "redline.estimate(gpu='H200', rungs='none')" in found["command"]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_batch_of_any_size_will_do_and_says_how_large_a_step_is(count) -> None:
    found = redline.estimate(mlp(), batch=pair(count=count), rungs="none")
    assert found["settings"]["micro_batch"] == count
    assert found["flops_per_token"]["model"] == 2 * (2 * 8 * 30 + 3 * 30 * 4)
    assert redline.estimate(mlp(), batch=pair(), rungs="none", micro_batch=2)["settings"]["micro_batch"] == 2


def test_the_module_is_left_alone() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(3)))
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    redline.estimate(model, batch=pair(), rungs="none")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [block[2].p for block in model] == [0.5] * 3
    assert not model.training
    assert not any("forward" in vars(module) for module in model.modules())  # nothing was wrapped
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokens_of_transformers_are_counted_as_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=257, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    ids = torch.zeros(3, 16, dtype=torch.int64)
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    found = redline.estimate(transformers.AutoModelForCausalLM.from_config(config), batch=batch, rungs="none")
    assert found["flops_per_token"]["unit"] == "token"
    sizes = {"layers": 1, "heads": 2, "d_model": 32, "d_ff": 128, "vocab": 257, "sequence": 16}
    from redline.core.workload import Shape
    from redline.predict.flops import flops_per_token, parameters

    assert found["parameters"] == parameters(Shape(**sizes)).total
    assert found["flops_per_token"]["model"] == pytest.approx(flops_per_token(Shape(**sizes)), rel=1e-3)
    assert any("dropout was off" in note for note in found["notes"])


MISTAKES = {
    "no batch": ({}, "an estimate of a module takes a batch"),
    "no tensors": ({"batch": "text"}, "do not agree on how many samples"),
    "two sizes": ({"batch": (torch.ones(3, 8), torch.ones(4))}, "do not agree on how many samples"),
    "a scalar": ({"batch": torch.tensor(1.0)}, "do not agree on how many samples"),
    "no loss": ({"batch": torch.ones(3, 8)}, r"returned a float32 tensor of \[2, 4\]"),
    "several GPUs": ({"batch": pair(), "tensor": 2}, "tensor with a Python file"),
    "a sequence": ({"batch": pair(), "sequence": 4}, "redline.estimate was given sequence"),
}


@pytest.mark.parametrize(("given", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told(given, said) -> None:
    with pytest.raises(UserError, match=said):
        redline.estimate(mlp(), **given)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x, mask=None, labels=None):
        return F.cross_entropy(self.a(x if mask is None else x * mask), labels)


def test_a_batch_may_hold_none_for_a_tensor_that_there_is_not() -> None:
    x, labels = pair()
    given = {"mask": None, "x": x, "labels": labels % 3}
    settings = {"gpu": "H200"}
    found, without = (
        redline.estimate(Masked(), batch=batch, **settings) for batch in (given, {"x": x, "labels": labels % 3})
    )
    assert found["shape"] == without["shape"]
    assert redline.lint(Masked(), batch=given, **settings)["findings"] is not None
    with pytest.raises(UserError, match="do not agree"):
        redline.lint(Masked(), batch={"mask": None}, **settings)


def test_a_frozen_module_has_sizes_and_no_step() -> None:
    frozen = mlp().requires_grad_(False)
    for look in (redline.estimate, redline.lint):
        with pytest.raises(UserError, match="Sequential has no parameters to train") as caught:
            look(frozen, batch=pair())
        assert caught.value.why == "none of its 4 parameters takes a gradient: it is frozen"
    assert redline.lint(frozen)["name"] == "Sequential"


LOSSES = """
import far

def boom(model, batch):
    return {"logits": model(batch[0])}["loss"]

def further(model, batch):
    return far.away(batch)

def through(model, batch):
    return model(batch[0][..., 1:]).sum()

def one(model):
    return 0

unnamed = lambda model: 0
"""
FAR = """
def away(batch):
    return batch["x"]
"""
RAISING = {
    "in the loss": ("boom", "the loss boom() of", "losses.py:5: return {", "fix that line"),
    "in another folder": ("further", "the loss further() of", 'far.py:3: return batch["x"]', "fix that line"),
    "in the model": ("through", "the forward pass of", "q, k, v = self.qkv(x)", "15 features come in"),
    "not called so": ("one", "the loss one() of", "losses.py:13: def one(model):", "write `def one(model, batch)`"),
    "a lambda": ("unnamed", "the loss of", "losses.py:16: unnamed = lambda model: 0", "write `def loss(model, batch)`"),
}


@pytest.mark.parametrize(("name", "problem", "why", "fix"), RAISING.values(), ids=RAISING)
def test_what_raises_is_named_with_its_own_file(tmp_path, monkeypatch, name, problem, why, fix) -> None:
    """The model, its loss and what that calls lie in three folders."""
    for module, text in (("far", FAR), ("losses", LOSSES)):
        (tmp_path / f"of_{module}").mkdir()
        (tmp_path / f"of_{module}" / f"{module}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / f"of_{module}")
    losses = importlib.import_module("losses")
    monkeypatch.delitem(sys.modules, "far")
    monkeypatch.delitem(sys.modules, "losses")
    with pytest.raises(UserError) as caught:
        redline.estimate(Naive(), batch=(torch.ones(4, 3, 16), CLASSES[:4]), loss=getattr(losses, name))
    told = caught.value
    assert told.problem.startswith(f"{problem} test_api_live.py:Naive raised ")
    assert why in told.why
    assert fix in told.fix


def test_without_a_loss_it_is_the_forward_pass_that_raises() -> None:
    with pytest.raises(UserError, match=r"^the forward pass of test_api_live.py:Naive raised RuntimeError") as caught:
        redline.estimate(Naive(), batch=(torch.ones(4, 3, 15), CLASSES[:4]))
    assert f"test_api_live.py:{line_of('q, k, v')}: " in caught.value.why


def test_a_loss_that_nobody_can_mend_is_to_be_exchanged() -> None:
    with pytest.raises(UserError, match=r"^the loss getitem\(\) of .* raised TypeError") as caught:
        redline.estimate(Naive(), batch=pair(16), loss=operator.getitem)
    assert caught.value.fix == "take a function of your own for getitem"


def test_what_a_workload_brings_itself_is_refused() -> None:
    with pytest.raises(UserError, match="redline.estimate was given batch: a workload brings its own"):
        redline.estimate("gpt2", batch=pair())
    with pytest.raises(UserError, match="redline.lint was given loss"):
        redline.lint("gpt2", loss=lambda model, batch: None)


# the loss

SEGMENTS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "targets", "taken"),
    [
        pytest.param(torch.ones(2, 5, 3), SEGMENTS, True, id="classes-last"),
        pytest.param(torch.ones(2, 3, 5), SEGMENTS, True, id="classes-second"),
        pytest.param(torch.ones(2, 3, 6), SEGMENTS, False, id="another-length"),
        pytest.param(torch.ones(2, 5), SEGMENTS, False, id="no-classes"),
        pytest.param(torch.ones(2, 5, 3), SEGMENTS.float(), False, id="no-classes-as-targets"),
        pytest.param(torch.ones(2, 5, 3, dtype=torch.int64), SEGMENTS, False, id="integers"),
        pytest.param((torch.ones(2, 5, 3),), SEGMENTS, False, id="tuple"),
    ],
)
def test_a_file_and_a_module_have_one_rule_for_logits(logits, targets, taken) -> None:
    functions = Functions(file="net.py", name="net", factory=nn.ReLU, make_batch=lambda size, seed: None)
    if taken:
        assert check_logits(logits, targets, functions) == "cross-entropy"
        assert loss_of_logits(logits, targets).item() == pytest.approx(math.log(3))
        return
    with pytest.raises(UserError, match="for targets of"):
        check_logits(logits, targets, functions)
    with pytest.raises(UserError) as raised:
        loss_of_logits(logits, targets)
    assert "for targets of" in raised.value.why


def test_cross_entropy_of_classes_second_is_the_mean_over_all_targets() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
    rows = logits.movedim(1, -1).log_softmax(-1).flatten(0, 1)
    by_hand = -rows[torch.arange(10), targets.flatten()].mean()
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand)
    torch.testing.assert_close(cross_entropy(logits.movedim(1, -1), targets), by_hand)


class Takes(nn.Module):
    def forward(self, x, y=None): ...


class TakesTargets(nn.Module):
    def forward(self, x, targets=None): ...


class TakesBoth(nn.Module):
    def forward(self, x, y2): ...


@pytest.mark.parametrize(
    ("kind", "alone"), [(nn.ReLU, True), (TakesTargets, False), (Takes, False), (TakesBoth, False)]
)
def test_a_second_argument_for_targets_gets_them(kind, alone) -> None:
    assert takes_inputs_only(kind()) == alone


def test_a_loss_that_is_no_number_is_told() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(UserError, match="is no number: inf on the first batch"):
        redline.estimate(model, batch=torch.ones(2, 8), loss=lambda model, batch: model(batch).mean() + math.inf)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(UserError) as raised:
        redline.estimate(model, batch=pair())
    assert "weight holds NaN before the first step" in raised.value.why
    with pytest.raises(UserError) as raised:
        redline.estimate(mlp(), batch=(torch.full((2, 8), math.nan), CLASSES[:2]))
    assert "the batch itself holds NaN" in raised.value.why


# lint


def test_lines_are_found_with_a_batch() -> None:
    found = redline.lint(Naive(), batch=(torch.randn(4, 8, 16), CLASSES[:4]))
    where = {each["rule"]: each["where"] for each in found["findings"]}
    first = line_of("# written out")
    assert where["written-out-attention"] == [f"{Path(__file__).name}:{first}-{first + 1}"]
    assert where["synchronisation"] == [f"{Path(__file__).name}:{line_of('# waits')}"]
    assert found["settings"]["micro_batch"] == 4


def test_sizes_are_found_without_one() -> None:
    model = nn.Sequential(nn.Linear(64, 1001), nn.Linear(1001, 64))
    found = redline.lint(model)
    assert [(each["rule"], each["where"], each["fix"]) for each in found["findings"]] == [
        ("layer-size", ["0", "1"], "1,024; what is added may stay unused")
    ]
    assert found["findings"][0]["predicted_gain"] is None
    assert "without a batch" in found["findings"][0]["no_predicted_gain"]
    assert found["settings"]["micro_batch"] is None
    assert found["shape"]["flops_forward"] is None
    assert redline.lint(model, ignore="layer-size")["findings"] == []
    assert redline.lint(model, gpu="H200")["findings"][0]["predicted_gain"] is None
    assert redline.lint(nn.Linear(64, 1024))["findings"] == []


def test_a_gain_takes_a_batch_and_a_device() -> None:
    model = nn.Sequential(nn.Linear(64, 1001), nn.Linear(1001, 64))
    batch = torch.ones(512, 64), torch.zeros(512, dtype=torch.int64)
    assert redline.lint(model, batch=batch, gpu="H200")["findings"][0]["predicted_gain"] > 0


@pytest.mark.parametrize("given", [{}, {"batch": (torch.randn(4, 8, 16), CLASSES[:4])}], ids=["sizes", "lines"])
def test_they_are_shown(given) -> None:
    documents = [redline.lint(Naive(), **given)]
    documents += [redline.estimate(Naive(), **given, gpu="H200")] if given else []
    for found in documents:
        assert json.loads(json.dumps(found)) == found
        assert "Naive: " in str(found)
        assert max(map(len, str(found).splitlines())) <= 100
        assert "Naive" in found._repr_html_()


# functions that build


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A user's file with a factory, imported."""
    path = tmp_path / "user_model.py"
    path.write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(8, 4)\n"
        "def make_batch(size, seed):\n    return torch.ones(size, 8), torch.zeros(size, dtype=torch.int64)\n"
    )
    spec = importlib.util.spec_from_file_location("user_model", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "user_model", module)
    spec.loader.exec_module(module)
    return module.build


class ReachedError(Exception):
    pass


def test_ladder_and_tune_are_told_file_and_name(built, monkeypatch) -> None:
    def reached(*_, **choices):
        raise ReachedError(choices.get("workload"))

    monkeypatch.setattr(ladder_search, "prepare_ladder", reached)
    with pytest.raises(ReachedError, match=r"user_model.py:build$"):
        redline.ladder(built)
    monkeypatch.setattr(tune_command, "tune", lambda options, command: reached(workload=options.workload))
    with pytest.raises(ReachedError, match=r"user_model.py:build$"):
        redline.tune(built)


def test_an_estimate_of_a_factory_is_made_by_a_worker(built) -> None:
    found = redline.estimate(built, rungs="none")
    assert found["parameters"] == 36
    assert found["name"] == "build"
    assert "user_model.py:build" in found["command"]


def test_a_live_module_is_nothing_for_workers() -> None:
    with pytest.raises(UserError, match="redline.ladder was given a module and not a function that builds one"):
        redline.ladder(mlp())


class Named(nn.Module):
    """Returns several things by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"logits": logits, **({} if loss is None else {"loss": loss})}


def named_functions() -> Functions:
    return Functions(file="net.py", name="net", factory=nn.ReLU, make_batch=lambda size, seed: None)


def test_a_dict_with_a_loss_is_a_loss_and_one_with_logits_gets_cross_entropy() -> None:
    batch = torch.randn(5, 4), torch.arange(5) % 3
    with_labels = {"x": batch[0], "labels": batch[1]}
    model = Named()
    expected = F.cross_entropy(model.head(batch[0]), batch[1])
    assert find_loss(named_functions(), model, with_labels) == "attribute"
    assert torch.equal(loss_function(named_functions(), model, "attribute")(with_labels), expected)
    assert torch.equal(live_loss(model, None)(with_labels), expected)
    model.forward = lambda x: {"logits": model.head(x)}  # type: ignore[method-assign, assignment]
    assert find_loss(named_functions(), model, batch) == "cross-entropy"
    assert torch.allclose(live_loss(model, None)(batch), expected)


@pytest.mark.parametrize("targets", [(5,), (5, 7)], ids=["last", "second"])
def test_logits_in_a_tuple_are_pointed_at_and_the_line_works(targets: tuple[int, ...]) -> None:
    made = torch.randn(targets[0], 3, *targets[1:])  # [5, 3], and [5, 3, 7] with the classes second
    classes = torch.zeros(targets, dtype=torch.int64)
    with pytest.raises(UserError, match=r"returned a tuple for targets of an int64 tensor") as raised:
        check_logits((None, made), classes, named_functions())
    line = raised.value.fix.split("`")[3].removeprefix("return ")
    value = eval(line, {"F": F, "model": lambda x: (None, x), "batch": (made, classes)})
    assert torch.equal(value, cross_entropy(made, classes))


@pytest.mark.parametrize(
    ("batch", "written"),
    [
        (
            torch.zeros(4, 20, dtype=torch.int64),
            "F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())",
        ),
        ({"input": torch.zeros(4, 20, dtype=torch.int64)}, "my_loss(model(**batch), ...), one number"),
        ((torch.zeros(4, 20, dtype=torch.int64), torch.zeros(4, 20, 101)), "F.mse_loss(model(batch[0]), batch[1])"),
    ],
    ids=["tokens", "dict", "pair"],
)
def test_a_missing_loss_is_written_for_the_batch_that_was_given(batch: Any, written: str) -> None:
    """And the sizes in the message are of the samples that were taken."""
    model = nn.Sequential(nn.Embedding(101, 8), nn.Linear(8, 101))
    with pytest.raises(UserError) as raised:
        redline.estimate(model, batch=batch)
    assert "[2, 20, 101]" in raised.value.why
    assert raised.value.why.endswith("(2 samples were taken of the batch's 4)")
    assert raised.value.fix == f"give one: loss=lambda model, batch: {written}"
    if "my_loss" not in written:
        loss = eval(f"lambda model, batch: {written}", {"F": F})
        assert redline.estimate(model, batch=batch, loss=loss)["parameters"] == 101 * 8 + 8 * 101 + 101
    assert "samples were taken" not in refusal(model, torch.zeros(2, 20, dtype=torch.int64))


class Several(nn.Module):
    """Returns more than its loss, or more than its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.head(x), x


class SeveralWithLoss(Several):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        logits = self.head(x)
        return F.cross_entropy(logits, y), logits


@pytest.mark.parametrize(
    ("model", "written"),
    [
        (Several(), "F.cross_entropy(model(batch[0])[0].float().flatten(0, -2), batch[1].flatten())"),
        (SeveralWithLoss(), "model(*batch)[0]"),
    ],
    ids=["logits", "loss"],
)
def test_a_loss_in_a_tuple_is_pointed_at_and_the_line_works(model: nn.Module, written: str) -> None:
    batch = torch.randn(5, 4), torch.arange(5) % 3
    with pytest.raises(UserError) as raised:
        redline.prepare(model, [], learning_rate=1e-3).step(batch)
    assert raised.value.fix == f"give one: loss=lambda model, batch: {written}"
    loss = eval(f"lambda model, batch: {written}", {"F": F})
    found = redline.prepare(model, [], learning_rate=1e-3, loss=loss).step(batch)
    assert found.item() == pytest.approx(F.cross_entropy(model.head(batch[0]), batch[1]).item(), rel=0.1)


def refusal(model: nn.Module, batch: Any) -> str:
    with pytest.raises(UserError) as raised:
        redline.estimate(model, batch=batch)
    return raised.value.why


# what autocast breaks, and parameters that are not as they should be


class Scatters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), 4)
        return out.index_add_(0, torch.ones(len(x)).nonzero().flatten(), self.layer(x))


def test_a_module_that_autocast_breaks_is_looked_at_in_fp32() -> None:
    """What a GPU's autocast would make of it nobody knows here: the note says that it may fail there."""
    said = "return out.index_add_(0, torch.ones(len(x)).nonzero().flatten(), self.layer(x))"
    found = redline.estimate(Scatters(), batch=pair(), gpu="H200")
    assert "bf16" in found["settings"]["rungs"]
    for document in (found, redline.lint(Scatters(), batch=pair())):
        assert any("may fail on a GPU" in note and said in note for note in document["notes"])


def test_lazy_and_narrow_modules_are_refused_before_anything_runs() -> None:
    for look in (redline.lint, redline.estimate):
        with pytest.raises(UserError, match="LazyLinear has no size for weight"):
            look(nn.LazyLinear(4), batch=pair())
        with pytest.raises(UserError, match=r"not float32: 0\.weight \(float64\) and 3 more"):
            look(mlp().double(), batch=(torch.ones(6, 8, dtype=torch.float64), CLASSES))
    with pytest.raises(UserError, match="LazyLinear has no size for weight"):
        redline.lint(nn.LazyLinear(4))
    assert redline.lint(mlp().bfloat16())["name"] == "Sequential"  # sizes alone are of any type
