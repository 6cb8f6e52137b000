"""A recipe on a module of one's own: the numbers of the measured step, bit for bit, and a reason for all that is left
out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from html import unescape
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redline
import redline.api.loss as loss_module
import redline.api.prepare as prepare_module
from redline.api.realise import calls_sdpa
from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.engine.build import Training
from redline.engine.step import INITIAL_LOSS_SCALE
from redline.model.gpt import GPT, initialise
from redline.model.loss import next_token_loss
from redline.optim import warm_up
from redline.rungs import LADDER, find_rung, plan_of

STEPS = 4


def gpt_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(batch[0]), batch[1])


class Blocks(nn.Module):
    """A stack of equal blocks, each of which counts its calls."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gelu, self.calls = nn.Linear(8, 8), nn.GELU(approximate="tanh"), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.gelu(self.layer(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 5, (16,), generator=generator)


# numbers


RECIPES = {
    "baseline": (),
    "bf16, fused": ("bf16", "fused-adamw"),
    "fp16, scaled": ("fp16",),
    "flash, recomputed": ("bf16", "flash", "checkpointing", "fused-adamw"),
    "lion": ("lion",),
}


@pytest.mark.parametrize("rungs", RECIPES.values(), ids=RECIPES)
def test_steps_are_those_of_the_measured_step_bit_for_bit(train: Callable[..., Training], small, rungs) -> None:
    measured = train(plan_of(rungs))
    batches = [next(measured.batches) for _ in range(STEPS)]
    model = GPT(small.shape, tied=False, attention="flash" if "flash" in rungs else "naive")
    initialise(model, small.seed)
    rate = partial(warm_up, peak=small.learning_rate, warmup_steps=small.warmup_steps)
    prepared = redline.prepare(
        model, rungs, learning_rate=rate, weight_decay=small.weight_decay, clip_norm=small.clip_norm, loss=gpt_loss
    )
    assert prepared.left_out == {}
    assert [prepared.step(batch).item() for batch in batches] == [measured.step(batch).item() for batch in batches]
    theirs = dict(measured.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("rungs", [(), ("bf16", "fused-adamw"), ("fp16",)], ids=["fp32", "bf16", "fp16"])
def test_a_loop_of_ones_own_gives_the_same_numbers(blocks, batch, rungs) -> None:
    weights = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}
    whole = redline.prepare(blocks, rungs, learning_rate=1e-2)
    expected = [whole.step(batch).item() for _ in range(STEPS)]

    other = Blocks()
    other.load_state_dict(weights)
    parts = redline.prepare(other, rungs, learning_rate=1e-2)
    losses = []
    for _ in range(STEPS):
        with parts.autocast():
            loss = F.cross_entropy(parts.model(batch[0]).float(), batch[1])
        parts.scaler.scale(loss).backward()
        parts.scaler.unscale_(parts.optimizer)
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses == expected
    assert losses[-1] < losses[0]


def test_precision_and_scaler_are_the_recipes(blocks) -> None:
    bf16 = redline.prepare(blocks, ["bf16"])
    with bf16.autocast():
        assert blocks(torch.ones(2, 8)).dtype == torch.bfloat16
    assert not bf16.scaler.is_enabled()
    fp16 = redline.prepare(Blocks(), ["fp16"])
    assert fp16.scaler.is_enabled()
    assert fp16.scaler.get_scale() == INITIAL_LOSS_SCALE
    with redline.prepare(Blocks(), []).autocast():
        assert blocks(torch.ones(2, 8)).dtype == torch.float32


# learning rates


def test_torchs_schedulers_change_a_number(blocks, batch) -> None:
    prepared = redline.prepare(blocks, [], learning_rate=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(prepared.optimizer, lambda step: 0.5**step)
    prepared.step(batch)
    scheduler.step()
    prepared.step(batch)
    assert [group["lr"] for group in prepared.optimizer.param_groups] == [0.5, 0.5]


def test_a_function_of_the_steps_sets_the_rate_and_other_optimizers_have_their_factor(blocks, batch) -> None:
    prepared = redline.prepare(blocks, ["lion"], learning_rate=lambda steps: 1.0 + steps, weight_decay=0.3)
    seen = []
    for _ in range(3):
        prepared.step(batch)
        seen.append(prepared.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.1, 0.2, 0.3])
    assert [group["weight_decay"] for group in prepared.optimizer.param_groups] == pytest.approx([3.0, 0.0])


def test_a_rate_that_was_chosen_is_said(blocks) -> None:
    prepared = redline.prepare(blocks, [])
    assert prepared.optimizer.param_groups[0]["lr"] == 6e-4
    assert prepared.notes == ("learning rate 0.0006: GPT-3's for 261 parameters (learning_rate=...)",)
    assert redline.prepare(blocks, [], learning_rate=1e-3).notes == ()


# recipes


def test_a_file_a_recipe_and_a_list_are_the_same(blocks, tmp_path) -> None:
    names = ["fused-adamw", "bf16"]
    path = tmp_path / "best.json"
    path.write_text(json.dumps({"rungs": names, "micro_batch": 4}))
    ways = (path, str(path), Recipe(rungs=tuple(names), micro_batch=4), names)
    found = [redline.prepare(Blocks(), way) for way in ways]
    assert {prepared.rungs for prepared in found} == {("bf16", "fused-adamw")}
    assert len({prepared.plan for prepared in found}) == 1


MISTAKES = {
    "unknown rung": (Blocks, ["bf61"], "did you mean 'bf16'"),
    "two of a kind": (Blocks, ["bf16", "fp16"], "bf16 and fp16 were given together"),
    "no such file": (Blocks, "nowhere.json", "cannot read the recipe nowhere.json"),
    "no module": (dict, [], "a recipe was put on a dict"),
    "no parameters": (nn.GELU, [], "GELU has no parameters"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), [], "none of its 2 parameters takes a gradient"),
}


@pytest.mark.parametrize(("make", "recipe", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told(make, recipe, said) -> None:
    with pytest.raises(UserError, match=said):
        redline.prepare(make(), recipe)


# what is done, what is left out


NAMES = [rung.name for rung in LADDER[1:]]


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_is_done_or_has_a_reason(blocks, name, eagerly) -> None:
    prepared = redline.prepare(blocks, [name], learning_rate=1e-3)
    assert (name in prepared.rungs) != (name in prepared.left_out)
    assert prepared.plan == replace(plan_of(prepared.rungs), read_loss_every=0)
    if name in prepared.left_out:
        assert len(prepared.left_out[name]) > 20
        assert f"left out   {name}: " in str(prepared)
    shown = unescape(unescape(prepared._repr_html_()))
    assert f'<th scope="row">{name}</th>' in shown
    assert prepared.left_out.get(name, find_rung(name).title) in shown


def test_ranks_are_the_business_of_the_loop(blocks) -> None:
    """A best.json of `tune --gpus` names how they shared."""
    prepared = redline.prepare(blocks, ["fused-adamw", "fsdp"], learning_rate=1e-3)
    assert prepared.rungs == ("fused-adamw",)
    assert "DDP or FSDP" in prepared.left_out["fsdp"]


def test_the_loss_is_never_read_by_the_step(blocks, batch) -> None:
    prepared = redline.prepare(blocks, [])
    prepared.step(batch)
    assert prepared.plan.read_loss_every == 0
    assert prepared.step.last_read_loss != prepared.step.last_read_loss  # still no number


def test_blocks_are_recomputed_and_the_gradients_stay(blocks, batch) -> None:
    weights = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}
    redline.prepare(blocks, [], learning_rate=1e-3).step.compute_gradients(batch)
    plain = [parameter.grad.clone() for parameter in blocks.parameters()]
    assert [block.calls for block in blocks.blocks] == [1, 1, 1]

    other = Blocks()
    other.load_state_dict(weights)
    redline.prepare(other, ["checkpointing"], learning_rate=1e-3).step.compute_gradients(batch)
    assert [block.calls for block in other.blocks] == [2, 2, 2]
    assert list(other.state_dict()) == list(weights)
    for ours, theirs in zip((parameter.grad for parameter in other.parameters()), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_tanh_gelus_are_exchanged_and_compute_the_same(blocks, batch) -> None:
    expected = blocks(batch[0])
    prepared = redline.prepare(blocks, ["sigmoid-gelu"])
    assert prepared.rungs == ("sigmoid-gelu",)
    assert not any(isinstance(module, nn.GELU) for module in blocks.modules())
    torch.testing.assert_close(blocks(batch[0]), expected)


def test_attention_is_pinned_where_it_is_called(small) -> None:
    prepared = redline.prepare(GPT(small.shape, attention="flash"), ["flash"])
    assert prepared.rungs == ("flash",)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.math_sdp_enabled()


def test_attention_that_is_written_out_is_left_out_and_nothing_is_pinned(small) -> None:
    prepared = redline.prepare(GPT(small.shape), ["flash"])
    assert "no call of F.scaled_dot_product_attention was found" in prepared.left_out["flash"]
    assert torch.backends.cuda.math_sdp_enabled()


class Attends(nn.Module):
    """Drops in its attention, by a rate of its own or by one that stands in the call."""

    def __init__(self, rate: float, *, literal: bool = False) -> None:
        super().__init__()
        self.linear, self.drop, self.literal = nn.Linear(8, 8), nn.Dropout(rate), literal

    def forward(self, x):
        x = self.linear(x)
        if self.literal:
            return literal_rate(x).square().mean()
        return self.drop(own_rate(x, self.drop.p)).square().mean()


class Streams(nn.Module):
    """Drops, and not in its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        x = self.linear(x)
        return self.drop(F.scaled_dot_product_attention(x, x, x, is_causal=True)).square().mean()


def own_rate(x, rate):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=rate, is_causal=True)


def literal_rate(x):
    return F.scaled_dot_product_attention(x, x, x, None, 0.1)


HEADS = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "drops"),
    [
        (lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True), True),
        (lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), False),
        (lambda: Attends(0.1), True),
        (lambda: Attends(0.0), False),
        (Streams, False),
    ],
    ids=["torch's", "torch's-without", "own", "own-without", "stream-alone"],
)
def test_a_cpu_has_no_fused_attention_that_drops(make, drops) -> None:
    prepared = redline.prepare(make(), ["bf16", "flash"], loss=lambda model, batch: model(*batch).square().mean())
    assert ("flash" in prepared.left_out) is drops
    assert prepared.rungs == (("bf16",) if drops else ("bf16", "flash"))
    batch = (HEADS[0], HEADS[1]) if isinstance(prepared.model, nn.Transformer) else (HEADS,)
    assert torch.isfinite(prepared.step(batch))
    if drops:
        assert prepared.left_out["flash"] == "the kernel for CPUs drops nothing, and the model's attention does"


def test_a_rate_that_nobody_saw_is_told_when_the_kernel_refuses_it() -> None:
    prepared = redline.prepare(Attends(0.0, literal=True), ["flash"])
    with pytest.raises(UserError, match="no kernel of flash attention takes this call") as caught:
        prepared.step(HEADS)
    assert "test_api_prepare.py" in caught.value.why
    assert "leave flash and cudnn-attention out" in caught.value.fix


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda: nn.TransformerEncoderLayer(8, 2), True),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(8, 2)), True),
        (Blocks, False),
        (lambda: nn.Conv2d(3, 3, 3), False),
    ],
    ids=["encoder", "multi-head", "blocks", "convolution"],
)
def test_calls_of_attention_are_found_in_the_code(make, calls) -> None:
    assert calls_sdpa(make()) is calls


def test_weights_in_16_bit_leave_fused_adamw_in_their_place(blocks) -> None:
    prepared = redline.prepare(blocks, ["bf16", "adamw-bf16"])
    assert prepared.rungs == ("bf16", "fused-adamw")
    assert "fused-adamw takes its place" in prepared.left_out["adamw-bf16"]
    assert blocks.head.weight.dtype == torch.float32


def test_shared_weights_are_tied_already(small) -> None:
    assert redline.prepare(GPT(small.shape, tied=True), ["tied-weights"]).rungs == ("tied-weights",)
    assert (
        "where the model is built"
        in redline.prepare(GPT(small.shape, tied=False), ["tied-weights"]).left_out["tied-weights"]
    )


@pytest.fixture
def eagerly(monkeypatch) -> Iterator[list[Plan]]:
    """torch.compile without a compiler: what is compiled, and with which plan."""
    plans: list[Plan] = []

    def compile_loss(loss_of, plan):
        plans.append(plan)
        return torch.compile(loss_of, backend="eager")

    monkeypatch.setattr(prepare_module, "compile_loss", compile_loss)
    yield plans
    torch._dynamo.reset()


def test_loss_and_model_are_both_compiled(blocks, batch, eagerly) -> None:
    prepared = redline.prepare(blocks, ["compile"], learning_rate=1e-2)
    assert [plan.compile for plan in eagerly] == [True, True]
    assert prepared.model is not blocks
    assert torch.equal(prepared.model(batch[0]), blocks(batch[0]))
    expected = F.cross_entropy(blocks(batch[0]), batch[1]).item()
    assert prepared.step(batch).item() == pytest.approx(expected)
    assert next(prepared.model.parameters()) is next(blocks.parameters())


# losses


class WithLoss(nn.Linear):
    def forward(self, inputs: torch.Tensor, labels: torch.Tensor):  # type: ignore[override]
        return type("Output", (), {"loss": F.mse_loss(super().forward(inputs), labels)})()


def test_what_the_model_returns_is_the_loss() -> None:
    data = {"inputs": torch.ones(2, 3), "labels": torch.zeros(2, 3)}
    model = WithLoss(3, 3)
    expected = F.mse_loss(F.linear(data["inputs"], model.weight, model.bias), data["labels"])
    for given in (data, tuple(data.values())):
        assert redline.prepare(model, []).loss(given).item() == expected.item()


NO_LOSS = {
    "a tensor": (torch.ones(2, 8), r"returned a float32 tensor of \[2, 5\]"),
    "float targets": ((torch.ones(2, 8), torch.ones(2, 5)), r"for targets of a float32 tensor of \[2, 5\]"),
}


@pytest.mark.parametrize(("given", "said"), NO_LOSS.values(), ids=NO_LOSS)
def test_a_model_without_a_loss_is_told_what_it_returned(blocks, given, said) -> None:
    with pytest.raises(UserError, match=said) as caught:
        redline.prepare(blocks, []).step(given)
    assert "loss=lambda model, batch" in caught.value.fix


@pytest.mark.parametrize("given", ["abc", None, 3, [], {"x": 3}, torch.ones(2, 8).numpy()], ids=repr)
def test_a_step_without_a_tensor_is_told_what_it_was_given(blocks, given) -> None:
    with pytest.raises(UserError, match=r"^the step was given (an? |nothing)") as caught:
        redline.prepare(blocks, ["bf16"]).step(given)
    assert "TypeError" in caught.value.why
    assert "a tensor, or tuples and dicts of tensors" in caught.value.fix


def test_a_model_may_read_strings_and_objects() -> None:
    class Reads(nn.Linear):
        def forward(self, words: Any) -> torch.Tensor:
            return super().forward(torch.tensor([[float(len(word))] for word in words])).square().mean()

    prepared = redline.prepare(Reads(1, 1), [])
    assert prepared.step((["a", "be"],)).item() > 0
    with pytest.raises(TypeError, match="not iterable"):  # the user's own affair, as it came
        prepared.step(object())


class Scatters(nn.Module):
    """Adds what a linear layer gives, which autocast makes bf16, to what is fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        return out.index_add_(0, torch.arange(len(x)), self.layer(self.norm(x)))  # adds


SCATTERS = {"bf16": "RuntimeError: index_add_", "fp16": "RuntimeError: index_add_"}


@pytest.mark.parametrize("precision", SCATTERS)
def test_a_step_that_autocast_breaks_is_told_with_the_line(precision) -> None:
    model, batch = Scatters(), (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(UserError, match=f"^a step under {precision} autocast raised {SCATTERS[precision]}") as caught:
        redline.prepare(model, [precision]).step(batch)
    lines, first = inspect.getsourcelines(Scatters)
    number = first + next(index for index, line in enumerate(lines) if "# adds" in line)
    assert f"it happened at {__file__.rpartition('/')[2]}:{number}: return out.index_add_" in caught.value.why
    assert f"leave {precision} out" in caught.value.fix
    assert redline.prepare(model, []).step(batch).item() > 0


def test_what_autocast_did_not_break_is_raised_as_it_came() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        redline.prepare(nn.Linear(8, 8), ["bf16"]).step((torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)))


def test_parameters_without_a_size_or_not_in_fp32_are_refused(batch) -> None:
    with pytest.raises(UserError, match="LazyLinear has no size for weight") as caught:
        redline.prepare(nn.LazyLinear(4), [])
    assert "run one batch through the model first" in caught.value.fix
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5, bias=False).bfloat16())
    for rungs in ([], ["bf16", "adamw-bf16"]):
        with pytest.raises(UserError, match=r"not float32: 1\.weight \(bfloat16\)") as caught:
            redline.prepare(model, rungs)
        assert "model.float()" in caught.value.fix
    model[1].requires_grad_(False)
    redline.prepare(model, ["bf16", "fused-adamw"]).step(batch)


def test_weights_without_numbers_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(UserError, match="Linear has no numbers in weight") as caught:
        redline.prepare(nn.Linear(8, 5, device="meta"), [])
    assert "meta device" in caught.value.why
    for layer in (nn.Embedding(9, 5, sparse=True), nn.EmbeddingBag(9, 5, sparse=True)):
        with pytest.raises(UserError, match=r"Sequential has a sparse gradient: that of 0\.weight") as caught:
            redline.prepare(nn.Sequential(layer), [])
        assert caught.value.fix == "take sparse=True out"
        ids = torch.zeros(4, 3, dtype=torch.int64)
        with pytest.raises(UserError, match=r"Sequential has a sparse gradient: that of 0\.weight"):
            redline.lint(nn.Sequential(layer), batch=ids, loss=lambda model, ids: model(ids).mean())
        layer.requires_grad_(False)
        redline.prepare(nn.Sequential(layer, nn.Linear(5, 5)), [])


def error_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


BAD_LOSSES: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    "a float": (lambda each: each.mean().item(), r"the loss bad\(\) returned a float", "not its .item()"),
    "nothing": (lambda each: None, r"the loss bad\(\) returned nothing", "let bad() return the mean loss"),
    "a vector": (lambda each: each, r"the loss bad\(\) returned a float32 tensor of \[16\]", ".mean() of that"),
    "a tuple": (lambda each: (each.mean(), 3), r"the loss bad\(\) returned a tuple", r"let bad() return element [0]"),
    "detached": (
        lambda each: each.mean().detach(),
        r"the loss bad\(\) has no gradient",
        "a function of the model's parameters",
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own look at what .item() is called on
@pytest.mark.parametrize("rungs", [[], ["compile"]], ids=["eager", "compiled"])
@pytest.mark.parametrize(("spoil", "problem", "fix"), BAD_LOSSES.values(), ids=BAD_LOSSES)
def test_a_loss_that_is_none_is_told_at_the_first_step(blocks, batch, eagerly, spoil, problem, fix, rungs) -> None:
    before = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}

    def bad(model: nn.Module, batch: Any) -> Any:
        return spoil(error_of(model, batch))

    prepared = redline.prepare(blocks, rungs, loss=bad)
    for _ in range(2):  # the first that is right ends the looking, not the first that was seen
        with pytest.raises(UserError, match=problem) as caught:
            prepared.step(batch)
        assert fix in caught.value.fix
    assert all(torch.equal(before[name], tensor) for name, tensor in blocks.state_dict().items())


def test_only_the_first_loss_is_looked_at_and_none_of_an_evaluation(blocks, batch, monkeypatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(loss_module, "check_loss", lambda found, *words: looked.append((found.requires_grad, *words)))
    prepared = redline.prepare(blocks, [], loss=lambda model, batch: error_of(model, batch).mean())
    with torch.no_grad():
        prepared.step.loss(batch)
    assert not looked
    for _ in range(3):
        prepared.step(batch)
    assert looked == [(True, "the loss", "loss()")]


def test_the_models_own_loss_has_a_gradient_too() -> None:
    class Cut(WithLoss):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs, labels).loss.detach()

    with pytest.raises(UserError, match="the model's loss has no gradient"):
        redline.prepare(Cut(3, 3), []).step((torch.ones(2, 3), torch.zeros(2, 3)))


# transformers


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 257, "n_positions": 16}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)

    def make():
        """With a config of its own: padding writes into it."""
        torch.manual_seed(0)
        config = transformers.GPT2Config(**sizes, **drops)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    return make


IDS = torch.arange(32).view(2, 16) % 7
OF_TRANSFORMERS = ("flash", "padded-vocab", "sigmoid-gelu", "checkpointing")


@pytest.mark.parametrize("rungs", [(name,) for name in OF_TRANSFORMERS] + [OF_TRANSFORMERS], ids="+".join)
def test_a_model_of_transformers_has_it_all_and_computes_the_same(gpt2, rungs) -> None:
    data = {"input_ids": IDS, "labels": IDS}
    plain = gpt2()
    expected = plain(**data).loss
    expected.backward()
    model = gpt2()
    prepared = redline.prepare(model, rungs)
    assert prepared.left_out == {}
    loss = prepared.step.compute_gradients(data)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grown = model.transformer.wte.weight.grad
    torch.testing.assert_close(grown[:257], plain.transformer.wte.weight.grad, atol=1e-6, rtol=1e-4)
    if "padded-vocab" in rungs:
        assert grown.shape[0] == 384
        assert not grown[257:].any()
        assert "model.resize_token_embeddings(257) before saving" in prepared.notes[-1]


def test_the_stream_of_a_model_of_transformers_is_bf16(gpt2) -> None:
    model = gpt2()
    prepared = redline.prepare(model, ["bf16", "bf16-residual"])
    seen = []
    model.transformer.h[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    prepared.step({"input_ids": IDS, "labels": IDS})
    assert seen == [torch.bfloat16]
    assert "not bf16 here" in redline.prepare(gpt2(), ["bf16-residual"]).left_out["bf16-residual"]


def test_a_mask_that_the_kernel_would_overlook_is_refused(gpt2) -> None:
    prepared = redline.prepare(gpt2(), ["flash"])
    with pytest.raises(UserError, match="the batch has an attention_mask"):
        prepared.step({"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)})


def test_another_model_of_the_same_config_stays_as_it_is(gpt2) -> None:
    model = gpt2()
    teacher = type(model)(model.config).eval()
    assert teacher.config is model.config, "as transformers builds them"
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    before = teacher(input_ids=IDS, attention_mask=mask).logits
    redline.prepare(model, ["flash", "padded-vocab", "checkpointing"])
    assert torch.equal(teacher(input_ids=IDS, attention_mask=mask).logits, before)
    assert teacher(input_ids=IDS, labels=IDS).loss.isfinite()
    assert model.config.vocab_size % 128 == 0
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


def test_a_recipe_may_be_what_its_file_holds() -> None:
    document = {"rungs": ["bf16"], "micro_batch": 4}
    assert redline.prepare(nn.Linear(4, 4), document).rungs == ("bf16",)
    with pytest.raises(UserError, match="the recipe given is not a recipe") as caught:
        redline.prepare(nn.Linear(4, 4), {"rungs": ["bf16"]})
    assert caught.value.why == "it has no micro_batch"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"recipe": None}, "the recipe is None"),
        ({"recipe": 3}, "the recipe is 3"),
        ({"learning_rate": "3e-4"}, "learning_rate is '3e-4'"),
        ({"learning_rate": -1}, "learning_rate is -1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"clip_norm": 0}, "clip_norm is 0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"device": "cuda:77"}, "the model cannot go to cuda:77"),
    ],
    ids=str,
)
def test_mistakes_are_told_and_not_raised_from_within(words: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        redline.prepare(nn.Linear(4, 4), **{"recipe": [], **words})
    assert caught.value.problem == problem


def test_a_step_that_is_none_is_told() -> None:
    with pytest.raises(UserError, match="redline.profile was given 3"):
        redline.profile(3)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        redline.profile(redline.prepare(nn.Linear(400, 400), []))  # type: ignore[arg-type]
    assert len(caught.value.problem) < 100, "not the whole model"
    assert caught.value.fix == "such as redline.profile(prepared.step)"


def test_without_clipping_gradients_stay_as_they_are() -> None:
    batch = torch.full((2, 4), 100.0), torch.zeros(2, dtype=torch.int64)
    found = {}
    for clip_norm in (None, 1e-3, 1e9):
        torch.manual_seed(0)
        prepared = redline.prepare(nn.Linear(4, 4), [], clip_norm=clip_norm, learning_rate=1e-3)
        prepared.step(batch)
        found[clip_norm] = next(iter(prepared.optimizer.state.values()))["exp_avg"].clone()
    assert torch.equal(found[None], found[1e9])
    assert found[1e-3].norm() < 1e-2 * found[None].norm()


@pytest.mark.parametrize("names", [["bf16", "fused-adamw"], ("fused-adamw", "bf16"), "bf16, fused-adamw"], ids=str)
def test_rungs_come_in_a_list_or_with_commas(names: Any) -> None:
    assert redline.prepare(nn.Linear(4, 4), names).rungs == ("bf16", "fused-adamw")
    assert redline.prepare(nn.Linear(4, 4), "none").rungs == ()


WRONG = [
    pytest.param(called, name, id=f"{called.__name__}-{name}")
    for called in (redline.prepare, redline.Meter)
    for name in inspect.signature(called).parameters
]


@pytest.mark.parametrize(("called", "name"), WRONG)
def test_an_argument_of_another_type_is_a_mistake_in_words(called: Any, name: str) -> None:
    whole = {"model": nn.Linear(4, 4), "recipe": []} if called is redline.prepare else {"tokens_per_step": 8}
    with pytest.raises(UserError):
        called(**{**whole, name: object()})
    if name == "recipe":
        with pytest.raises(UserError):
            called(**{**whole, name: [object()]})
