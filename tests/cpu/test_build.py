"""A plan becomes code in one place: every field reaches its part, one attention backend is left on, and `restore` is
step 0 again to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.compiler.config as compiler_config
import torch.nn.functional as F
from torch import nn

import redline.engine.build as build_module
import redline.model.adapter as adapter_module
import redline.model.gpt as gpt_module
from redline.core.plan import Plan
from redline.core.workload import Shape, Workload
from redline.engine.budget import draws, keep_share, share_kept
from redline.engine.build import Training, build, in_fp32, pin_attention
from redline.model.attention import ATTENTION
from redline.model.fp8 import Fp8Linear
from redline.model.fused import products_of
from redline.model.gpt import GELU, GPT, initialise
from redline.model.loss import head_loss, next_token_loss
from redline.model.tuned import TunedLinear, tune_layers

Train = Callable[..., Training]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tied=True, vocab_multiple=128),
        Plan(optimizer="adamw-foreach"),
        Plan(optimizer="adamw-fused", attention="flash"),
        Plan(optimizer="adamw-bf16", weights="bf16", autocast="bf16"),
        Plan(autocast="bf16", loss_scaling=True, read_loss_every=2),
        Plan(loss="chunked", checkpointing="full"),
    ],
    ids=["plain", "tied padded", "foreach", "fused flash", "bf16 weights", "bf16 scaled", "in pieces"],
)
def test_restore_gives_the_same_steps_again_bit_for_bit(train: Train, plan: Plan) -> None:
    training = train(plan)
    batches = list(itertools.islice(training.batches, 4))
    places = [parameter.data_ptr() for parameter in training.model.parameters()]
    first = [training.step(batch) for batch in batches]
    first_weights = [parameter.detach().clone() for parameter in training.model.parameters()]

    training.step.compute_gradients(batches[0])  # gradients left behind by the check of step 0 must go too
    training.restore()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    again = [training.step(batch) for batch in batches]
    assert torch.equal(torch.stack(again), torch.stack(first))
    assert all(map(torch.equal, training.model.parameters(), first_weights))
    assert places == [parameter.data_ptr() for parameter in training.model.parameters()], "compiled code holds these"


def test_restore_is_what_a_new_training_starts_with(train: Train) -> None:
    used, new = train(Plan()), train(Plan())
    for _ in range(3):
        used.step(next(used.batches))
    used.restore()
    assert all(map(torch.equal, used.model.parameters(), new.model.parameters()))
    assert used.step.steps_taken == new.step.steps_taken == 0


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_pinning_leaves_exactly_one_backend_on(backend: str) -> None:
    pin_attention(backend)
    cuda = torch.backends.cuda
    assert {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    } == {"flash": backend == "flash", "cudnn": backend == "cudnn", "efficient": False, "math": False}


def test_a_naive_plan_pins_nothing(train: Train) -> None:
    def switches() -> list[bool]:
        cuda = torch.backends.cuda
        return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]

    before = switches()
    train(Plan())
    assert switches() == before


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_matmul_precision_reaches_the_process(train: Train, precision: str) -> None:
    train(Plan(matmul_precision=precision))
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("attention", ATTENTION)
def test_attention_reaches_every_block(train: Train, attention: str) -> None:
    model = train(Plan(attention=attention)).model
    assert all(block.attn.attend is ATTENTION[attention] for block in model.h)


@pytest.mark.parametrize(("multiple", "rows"), [(1, 257), (64, 320), (128, 384)])
@pytest.mark.parametrize("tied", [False, True])
def test_padding_and_tying_reach_the_model(train: Train, tied: bool, multiple: int, rows: int) -> None:
    model = train(Plan(tied=tied, vocab_multiple=multiple)).model
    assert model.wte.weight.shape[0] == model.lm_head.weight.shape[0] == rows
    assert (model.wte.weight is model.lm_head.weight) == tied


@pytest.mark.parametrize("optimizer", ["adamw-loop", "adamw-foreach", "adamw-fused"])
def test_the_optimizer_reaches_the_step(train: Train, small: Workload, optimizer: str) -> None:
    training = train(Plan(optimizer=optimizer))
    defaults = training.step.optimizer.defaults
    assert (bool(defaults["fused"]), bool(defaults["foreach"])) == (
        optimizer == "adamw-fused",
        optimizer == "adamw-foreach",
    )
    assert [group["weight_decay"] for group in training.step.optimizer.param_groups] == [small.weight_decay, 0.0]
    held = {id(parameter) for group in training.step.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in training.model.parameters()}


def test_another_optimizer_gets_its_own_rate_and_as_much_decay(train: Train, small: Workload) -> None:
    """A workload states AdamW's rate; Lion takes a tenth of it, at the peak and on the way there."""
    step = train(Plan(optimizer="lion")).step
    peak = 0.1 * small.learning_rate
    assert [step.learning_rate(k) for k in (0, 19, 1000)] == pytest.approx([peak / 20, peak, peak])
    assert [group["weight_decay"] for group in step.optimizer.param_groups] == [10 * small.weight_decay, 0.0]


BF16_WEIGHTS = Plan(weights="bf16", optimizer="adamw-bf16")


def test_weights_are_stored_as_the_plan_says(train: Train) -> None:
    """Rounded from the very numbers that fp32 weights start with; padding, stream and norms do not depend on it."""
    plain, stored = train(Plan(vocab_multiple=128)), train(replace(BF16_WEIGHTS, vocab_multiple=128, autocast="bf16"))
    for one, other in zip(plain.model.parameters(), stored.model.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)
    seen: set[torch.dtype] = set()
    for block in stored.model.h:
        block.register_forward_hook(lambda _block, given, result: seen.update((given[0].dtype, result.dtype)))
    stored.step.compute_gradients(next(stored.batches))
    assert seen == {torch.float32}
    assert {parameter.grad.dtype for parameter in stored.model.parameters()} == {torch.bfloat16}
    assert stored.model(next(stored.batches)[0]).isfinite().any()  # as sampling calls it, without autocast


@pytest.mark.parametrize("changes", [{}, {"tied": True, "vocab_multiple": 128}, {"loss": "chunked"}])
def test_stored_bf16_weights_without_autocast_compute_in_fp32(train: Train, changes: dict[str, object]) -> None:
    """The reference of a recipe with bf16 weights: an fp32 model that starts from the same, rounded weights."""
    stored, wide = train(replace(BF16_WEIGHTS, **changes)), train(replace(Plan(), **changes))
    with torch.no_grad():
        for mine, theirs in zip(wide.model.parameters(), stored.model.parameters(), strict=True):
            mine.copy_(theirs)
    batch = next(wide.batches)
    assert torch.equal(stored.step.compute_gradients(batch), wide.step.compute_gradients(batch))
    for mine, theirs in zip(stored.model.parameters(), wide.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad.bfloat16())


def test_a_module_of_two_names_keeps_its_stored_weights() -> None:
    """A pass in fp32 puts back what it took, and gradients reach it."""
    layer = nn.Linear(3, 1, dtype=torch.bfloat16)
    twice = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    before = list(twice.named_parameters(remove_duplicate=False))
    loss = in_fp32(twice, lambda x: twice["b"](x).sum())(torch.ones(2, 3))
    after = list(twice.named_parameters(remove_duplicate=False))
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(before, after, strict=True))
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.full((1, 3), 2.0, dtype=torch.bfloat16))


def test_step_fields_reach_the_step(train: Train, small: Workload) -> None:
    step = train(Plan(autocast="bf16", loss_scaling=True, read_loss_every=7), chunk=2).step
    assert (step.plan.autocast, step.plan.read_loss_every, step.chunk) == ("bf16", 7, 2)
    assert step.scaler.is_enabled()
    assert step.clip_norm == small.clip_norm
    rate = small.learning_rate
    assert [step.learning_rate(k) for k in (0, 19, 1000)] == pytest.approx([rate / 20, rate, rate])
    assert not train(Plan()).step.scaler.is_enabled()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_reach_the_loader(small: Workload, tokens: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    seen = {}

    def stream(batches: object, device: torch.device, workers: int) -> object:
        seen.update(batches=batches, device=device, workers=workers)
        return iter(())

    monkeypatch.setattr(build_module, "stream_batches", stream)
    build(small, Plan(loader_workers=workers), micro_batch=5, tokens=tokens, device=CPU)
    assert (seen["workers"], seen["device"]) == (workers, CPU)
    asked = seen["batches"]
    assert (asked.path, asked.seed, asked.micro_batch, asked.sequence) == (tokens, small.seed, 5, small.shape.sequence)


@pytest.mark.parametrize("compiled", [False, True])
def test_only_a_compiled_plan_is_compiled(train: Train, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(build_module, "compile_loss", lambda loss_of, plan: "the compiled loss")
    training = train(Plan(compile=compiled))
    assert (training.step.loss_of == "the compiled loss") == compiled


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("autotune", [False, True])
def test_ways_of_compiling_reach_inductor(
    train: Train, monkeypatch: pytest.MonkeyPatch, graphs: bool, autotune: bool
) -> None:
    seen: dict[str, bool] = {}
    monkeypatch.setattr(torch, "compile", lambda loss_of, dynamic, options: seen.update(options) or loss_of)
    train(Plan(compile=True, cuda_graphs=graphs, max_autotune=autotune))
    assert seen["triton.cudagraphs"] == graphs
    assert seen.get("max_autotune", False) == seen.get("coordinate_descent_tuning", False) == autotune


@pytest.mark.parametrize("chunk", [None, 2])
def test_what_a_cuda_graph_overwrites_is_copied(
    train: Train, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """A graph writes its loss and its gradients to the same places at every run; here a loss does that."""
    place = torch.zeros(())

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return place.copy_(loss.detach())

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    begun: list[bool] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    monkeypatch.setattr(build_module, "compile_loss", lambda loss_of, plan: lambda *pair: Graph.apply(loss_of(*pair)))
    training, plain = train(Plan(compile=True, cuda_graphs=True), chunk=chunk), train(Plan(), chunk=chunk)
    batches = list(itertools.islice(training.batches, 3))
    graphed, eager = ([one.step(batch) for batch in batches] for one in (training, plain))
    assert torch.equal(torch.stack(graphed), torch.stack(eager))
    assert len(begun) == 3 * (1 if chunk is None else 3)  # six sequences, two at a time
    hooked = [parameter for parameter in training.model.parameters() if parameter._backward_hooks]
    assert len(hooked) == (0 if chunk is None else len(list(training.model.parameters())))


@pytest.mark.parametrize("chosen", [None, "max_split_size_mb:512"])
def test_segments_grow_beside_what_the_user_chose(
    train: Train, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", chosen)
    train(Plan())
    assert seen == []
    train(Plan(expandable_segments=True))
    assert seen == ["expandable_segments:True" if chosen is None else f"{chosen},expandable_segments:True"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_checkpointing_reaches_the_model(train: Train, recompute: str) -> None:
    model = train(Plan(checkpointing=recompute)).model
    assert model.recompute_blocks == (recompute == "full")
    cores = {block.attn.attend is ATTENTION["naive"] for block in model.h}
    assert cores == {recompute != "selective"}


def kept_and_gradients(
    budget: float, products: str, vocab: int, loss: str
) -> tuple[int, dict[str, torch.Tensor | None]]:
    """Bytes that a compiled model keeps for its backward pass, but for weights, and what comes of them."""
    build_module.switch_process(Plan(activation_budget=budget))
    fused = None if products == "torch's" else torch.float32
    shape = Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=vocab, sequence=32)
    model = GPT(shape, attention="flash", fused=fused)
    initialise(model, seed=1)
    if fused is not None:
        tune_layers(model.h, fused, fused=products == "fused")
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(0 if tensor.data_ptr() in weights else tensor.nbytes)
        return tensor

    def run(tokens: torch.Tensor) -> torch.Tensor:
        if loss == "of logits":
            return next_token_loss(model(tokens), tokens)
        head = {"vocab": vocab, "pieces": 2 if loss == "in pieces" else 1, "tuned": fused is not None}
        return head_loss(model.features(tokens), model.lm_head.weight, tokens, **head)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager_decomp_partition")  # Inductor's partitioner, without its code
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = compiled(torch.arange(1024).view(32, 32) % vocab)
    found.backward()
    return sum(kept), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss", ["of logits", "on the spot", "in pieces"])
@pytest.mark.parametrize("products", ["torch's", "tuned", "fused"])
def test_a_budget_halves_what_a_compiled_step_keeps(products: str, loss: str) -> None:
    """Also where the logits, which are never kept if the loss is on the spot, would fill the budget by themselves."""
    with functorch.patch(activation_memory_budget=1.0):  # torch's own: monkeypatch would delete it
        whole, wanted = kept_and_gradients(1.0, products, 512, loss)
        half, found = kept_and_gradients(0.5, products, 512, loss)
    assert 0.35 * whole < half < 0.65 * whole
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


class OneReads(nn.Module):
    """Attention of one position: of the keys' and values' product all is read, of the queries' next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(32, 96), nn.Linear(32, 32))) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out in self.layers:
            q, k, v = (part.view(8, 32, 2, 16).transpose(1, 2) for part in qkv(x).split(32, -1))
            x = x + out(F.scaled_dot_product_attention(q[:, :, :1], k, v).transpose(1, 2).reshape(8, 1, 32))
        return x.square().mean()


@torch.library.custom_op("redline_test::drop", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drop(x: torch.Tensor, rate: float) -> torch.Tensor:
    return (torch.rand_like(x) > rate).to(x.dtype)


@drop.register_fake
def _(x: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.empty_like(x)


class OwnDropout(nn.Module):
    """By an operator of the user's own library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * drop(x.detach(), 0.3)


class Dropping(nn.Module):
    def __init__(self, dropout: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(128, 128), nn.GELU(), dropout()) for _ in range(4))
        self.layers = nn.Sequential(*layers, nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), torch.arange(x.size(0)) % 10)


def kept_share(model: nn.Module, x: torch.Tensor, budget: float) -> int:
    kept = [0]
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one):
            compiled(x).backward()
    return sum(kept)


@pytest.fixture
def told() -> Iterator[None]:
    """What the compiler is told stays for good; its budget does not."""
    with functorch.patch(activation_memory_budget=1.0), compiler_config.patch(cache_key_tag=""):
        build_module.switch_process(Plan(activation_budget=0.5))
        yield


@pytest.mark.usefixtures("told")
def test_a_budget_is_spent_on_what_is_read_in_part() -> None:
    """A product that is read by a slice costs as much as the slice, and is worth what it is worth."""
    model, x = OneReads(), torch.randn(8, 32, 32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    whole, half, little = (kept_share(model, x, budget) - weights for budget in (1.0, 0.7, 0.01))
    assert little < 0.5 * half
    assert half < 0.8 * whole


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [0.3, 0.5])
@pytest.mark.parametrize("dropout", [partial(nn.Dropout, 0.3), OwnDropout], ids=["torch's", "own"])
def test_what_is_dropped_is_not_drawn_again_under_a_budget(
    dropout: Callable[[], nn.Module], budget: float, backend: str
) -> None:
    """Along a direction the gradient says what two losses say. torch's own choice draws anew on the way back."""
    torch.manual_seed(0)
    model, x = Dropping(dropout).double(), torch.randn(512, 128, dtype=torch.float64)
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled = torch.compile(model, backend=backend)

        def loss() -> torch.Tensor:
            torch.manual_seed(5)
            return compiled(x)

        loss().backward()
        parameters = list(model.parameters())
        ways = [torch.randn_like(parameter) for parameter in parameters]
        slope = sum(float((parameter.grad * way).sum()) for parameter, way in zip(parameters, ways, strict=True))  # type: ignore[operator]
        found = []
        for step in (1e-6, -1e-6):
            for parameter, way in zip(parameters, ways, strict=True):
                parameter.data.add_(way, alpha=step)
            found.append(loss().item())
            for parameter, way in zip(parameters, ways, strict=True):
                parameter.data.sub_(way, alpha=step)
    assert (found[0] - found[1]) / 2e-6 == pytest.approx(slope, rel=1e-4)


def test_a_tensor_counts_what_would_be_kept_in_its_place() -> None:
    """A product of 96 columns: a third is read by what may be kept, a sixth by the backward pass itself."""
    graph = torch.fx.Graph()

    def call(operator: Any, *arguments: Any, columns: int) -> torch.fx.Node:
        node = graph.call_function(operator, arguments)
        node.meta["val"] = torch.empty(32, columns)
        return node

    narrow, aten = torch.ops.aten.slice.Tensor, torch.ops.aten
    x, gradient = graph.placeholder("x"), graph.placeholder("tangents")
    product = call(aten.mm.default, x, x, columns=96)
    kept = call(aten.relu.default, call(narrow, product, 1, 0, 32, columns=32), columns=32)
    read = call(narrow, product, 1, 32, 48, columns=16)
    after = [call(aten.mul.Tensor, one, gradient, columns=columns) for one, columns in ((kept, 32), (read, 16))]
    assert share_kept(product, [product, kept], after) == pytest.approx(1 / 3 + 1 / 6)
    assert share_kept(kept, [product, kept], after) == 1
    assert share_kept(product, [product], after) == pytest.approx(1 / 3 + 1 / 6)  # relu's output is read in its place


def test_cached_graphs_are_known_by_a_tag_beside_the_users() -> None:
    """Else a graph that torch chose by itself would be served."""
    with functorch.patch(activation_memory_budget=1.0), compiler_config.patch(cache_key_tag="mine"):
        keep_share(0.5)
        tag = compiler_config.cache_key_tag
        keep_share(0.3)
        assert compiler_config.cache_key_tag == tag
    assert tag.startswith("mine redline ")


@pytest.mark.usefixtures("told")
def test_attention_draws_where_it_drops() -> None:
    """Its operator may draw; without a rate it does not, and may be computed again."""
    graph = torch.fx.Graph()
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    one = graph.placeholder("x")
    plain, zero, dropping, named = (
        graph.call_function(attention, (one, one, one, *rest), given)
        for rest, given in (((), {}), ((0.0,), {}), ((0.1,), {}), ((), {"dropout_p": 0.1}))
    )
    product, drawn = (
        graph.call_function(each, (one,)) for each in (torch.ops.aten.sin.default, torch.ops.aten.bernoulli.default)
    )
    assert [draws(node) for node in (plain, zero, dropping, named, product, drawn)] == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("residual", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_residual_type_is_that_between_the_blocks(train: Train, residual: str, dtype: torch.dtype) -> None:
    training = train(Plan(residual=residual, autocast="bf16"))
    seen = []
    for block in training.model.h:
        block.register_forward_hook(lambda _block, given, result: seen.extend((given[0].dtype, result.dtype)))
    training.step.compute_gradients(next(training.batches))
    assert set(seen) == {dtype}
    assert {parameter.grad.dtype for parameter in training.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("gelu", GELU)
def test_gelu_reaches_every_block(train: Train, gelu: str) -> None:
    assert {block.mlp.gelu for block in train(Plan(gelu=gelu)).model.h} == {GELU[gelu]}


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        (Plan(autocast="bf16"), None),
        (Plan(backward="fused"), torch.float32),
        (Plan(backward="fused", autocast="bf16"), torch.bfloat16),
    ],
    ids=["autograd", "fused in fp32", "fused in bf16"],
)
def test_a_fused_backward_reaches_every_block(
    train: Train, monkeypatch: pytest.MonkeyPatch, plan: Plan, dtype: torch.dtype | None
) -> None:
    seen: list[torch.dtype] = []
    own = gpt_module.mlp
    monkeypatch.setattr(gpt_module, "mlp", lambda *given: (seen.append(given[-1]), own(*given))[1])
    training = train(plan)
    training.step(next(training.batches))
    assert seen == ([] if dtype is None else [dtype] * len(training.model.h))


@pytest.mark.parametrize(("loss", "pieces"), [("full", None), ("fused", 1), ("chunked", 8)])
def test_the_loss_reaches_the_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, loss: str, pieces: int | None
) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(adapter_module, "head_loss", lambda *_, **choices: seen.update(choices))
    training = train(Plan(loss=loss, autocast="bf16"))
    batch = next(training.batches)
    training.step.loss_of(batch[0], batch[1])
    wanted = {"vocab": 257, "pieces": pieces, "dtype": torch.bfloat16, "fp8": False, "tuned": False}
    assert seen == ({} if pieces is None else wanted)


@pytest.mark.parametrize(("autocast", "tuned"), [("bf16", 4), (None, 0)])
def test_tuned_layers_reach_the_model_where_autocast_does(train: Train, autocast: str | None, tuned: int) -> None:
    model = train(Plan(autocast=autocast, tuned_matmuls=True)).model
    found = [module for module in model.modules() if isinstance(module, TunedLinear)]
    assert len(found) == tuned * len(model.h)
    assert {module.dtype for module in found} == ({torch.bfloat16} if tuned else set())


@pytest.mark.parametrize("kernels", ["cudnn", "flash4"])
def test_attention_that_stays_packed_reaches_every_block(train: Train, kernels: str) -> None:
    training = train(Plan(backward="fused", packed_attention=kernels))
    assert {block.attn.packed for block in training.model.h} == {kernels}
    assert {block.attn.packed for block in train(Plan(backward="fused")).model.h} == {None}


@pytest.mark.parametrize("fused", [True, False])
def test_fused_products_reach_the_layers(train: Train, fused: bool) -> None:
    model = train(Plan(autocast="bf16", tuned_matmuls=True, fused_matmuls=fused)).model
    assert {module.fused for module in model.modules() if isinstance(module, TunedLinear)} == {fused}


def test_a_tuned_head_reaches_the_step_where_autocast_does(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(adapter_module, "head_loss", lambda *_, **choices: seen.update(choices))
    for autocast in ("bf16", None):
        training = train(Plan(loss="fused", autocast=autocast, tuned_matmuls=True))
        batch = next(training.batches)
        training.step.loss_of(batch[0], batch[1])
        assert seen["tuned"] is (autocast is not None)


def test_an_8_bit_head_reaches_the_step_where_autocast_does(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(adapter_module, "head_loss", lambda *_, **choices: seen.update(choices))
    for autocast in ("bf16", None):
        training = train(Plan(loss="fused", autocast=autocast, fp8_head=True))
        batch = next(training.batches)
        training.step.loss_of(batch[0], batch[1])
        assert seen["fp8"] is (autocast is not None)


@pytest.mark.parametrize(("autocast", "narrow"), [("bf16", 4), (None, 0)])
def test_8_bit_layers_reach_the_model_where_autocast_does(train: Train, autocast: str | None, narrow: int) -> None:
    model = train(Plan(autocast=autocast, fp8_linears=True)).model
    found = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert len(found) == narrow * len(model.h)
    assert {module.narrow_dtype for module in found} == ({torch.bfloat16} if narrow else set())


@pytest.mark.parametrize("fused", [False, True])
def test_beside_tuned_products_only_some_of_a_block_are_narrow(train: Train, fused: bool) -> None:
    plan = Plan(autocast="bf16", fp8_linears=True, tuned_matmuls=True, fused_matmuls=fused, backward="fused")
    model = train(plan).model
    found = {products_of(layer) for layer in model.h.modules() if isinstance(layer, torch.nn.Linear)}
    assert found == {"fp8-fused" if fused else "fp8-tuned"}
    model = train(replace(plan, fp8_mlps=True)).model
    found = {products_of(layer) for layer in model.h.modules() if isinstance(layer, torch.nn.Linear)}
    assert found == {"fp8-mlp" if fused else "fp8-tuned"}


def test_switches_come_before_the_model(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name in ("switch_process", "adapter_of", "build_optimizer", "stream_batches"):
        real = getattr(build_module, name)
        monkeypatch.setattr(
            build_module, name, lambda *words, _n=name, _r=real, **more: (order.append(_n), _r(*words, **more))[1]
        )
    train(Plan())
    assert order == ["switch_process", "adapter_of", "build_optimizer", "stream_batches"]


def test_every_field_of_a_plan_is_covered_above() -> None:
    """A new knob needs a line here, and a test that it reaches its place."""
    assert {field.name for field in fields(Plan)} == {
        "matmul_precision",
        "attention",
        "tied",
        "vocab_multiple",
        "residual",
        "gelu",
        "backward",
        "loss",
        "tuned_matmuls",
        "fused_matmuls",
        "packed_attention",
        "fp8_head",
        "fp8_linears",
        "fp8_mlps",
        "checkpointing",
        "activation_budget",
        "compile",
        "max_autotune",
        "cuda_graphs",
        "expandable_segments",
        "autocast",
        "loss_scaling",
        "optimizer",
        "weights",
        "read_loss_every",
        "loader_workers",
        "parallel",  # test_ranks.py
        "tensor_parallel",  # test_tensor_parallel.py
        "pipeline",  # test_ranks_pipeline.py
    }


def test_closing_ends_the_stream(train: Train) -> None:
    training = train(Plan())
    next(training.batches)
    training.close()
    with pytest.raises(StopIteration):
        next(training.batches)
