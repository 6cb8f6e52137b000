"""Layers that are cut, and models that are cut and copied, are one process: tensor parallel alone, with DDP and with
FSDP2, and hybrid sharding. As in test_ranks.py, one start of real gloo processes runs many cases.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import load_from
from redline.engine.export import export_huggingface, read_weights
from redline.engine.session import TrainOrder, load_model, train
from redline.model.tensor_parallel import ByInputs
from redline.predict.activations import Rank
from redline.predict.communication import ALL_REDUCE, REDUCE_SCATTER, traffic
from redline.predict.flops import parameters
from redline.predict.memory import predict_memory
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout as Cut
from redline.rungs import plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).resolve().parent
SAME = runpy.run_path(str(HERE / "same_weights.py"))
STEPS = 4
ALONE = {"ddp", "fsdp", "fsdp-keep", "tensor-parallel"}  # what one process does without
TWO = Layout(ranks=2, tensor=2)
SQUARE = Layout(ranks=4, tensor=2)
HYBRID = Layout(ranks=4, replicas=2)
TENSOR = "tensor-parallel"
# (layout, rungs): a global batch of 4 in micro batches of 1, so that every rank adds several up. 257 rows of the
# vocabulary do not divide: ranks differ by one. padded-vocab's hidden rows lie on the last of them.
CASES = {
    "tp2-tied": (TWO, (TENSOR, "tied-weights", "flash", "padded-vocab", "fused-adamw")),
    "tp2-ddp": (SQUARE, (TENSOR, "ddp", "tied-weights", "checkpointing")),
    "tp2-fsdp": (SQUARE, (TENSOR, "fsdp", "tied-weights", "fused-adamw")),
    "hybrid": (HYBRID, ("fsdp", "tied-weights")),
}
LONG_CASES = {
    "tp2": (TWO, (TENSOR,)),
    "tp2-compiled": (TWO, (TENSOR, "compile")),
    "tp2-fsdp-keep": (SQUARE, (TENSOR, "fsdp-keep", "padded-vocab", "foreach-adamw", "selective-checkpointing")),
    "hybrid-tp2": (Layout(ranks=8, tensor=2, replicas=2), (TENSOR, "fsdp", "tied-weights")),
    "tp2-bf16": (TWO, (TENSOR, "bf16")),
    "tp2-fsdp-bf16": (SQUARE, (TENSOR, "fsdp", "bf16")),
    "tp2-fsdp-whole": (SQUARE, (TENSOR, "fsdp-whole", "tied-weights")),
    "hybrid-whole": (HYBRID, ("fsdp-whole", "tied-weights", "fused-adamw")),
}
# What one layout began another goes on with; None is one process.
FURTHER = {
    "dp4-as-tp2-dp2": (Layout(ranks=4), ("ddp", "tied-weights"), SQUARE, (TENSOR, "ddp", "tied-weights")),
    "one-as-tp2": (None, (), TWO, (TENSOR,)),
    "tp2-as-one": (TWO, (TENSOR, "tied-weights"), None, ("tied-weights",)),
}
LONG_FURTHER = {
    "tp2-fsdp-as-hybrid": (SQUARE, (TENSOR, "fsdp"), HYBRID, ("fsdp",)),
    "hybrid-as-tp2-fsdp": (HYBRID, ("fsdp",), SQUARE, (TENSOR, "fsdp")),
    "tp2-fsdp-as-tp2": (SQUARE, (TENSOR, "fsdp"), TWO, (TENSOR,)),
    "tp2-fsdp-as-one": (SQUARE, (TENSOR, "fsdp", "padded-vocab"), None, ("padded-vocab",)),
}


def short_and_long(short: Iterable[str], long: Iterable[str]) -> list[Any]:
    return [*short, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


WORKLOAD = Workload(
    name="cut",
    shape=Shape(layers=2, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=1,
    learning_rate=1e-3,
)


@dataclass(frozen=True)
class Runs:
    """Run directories of ranks. `make test` starts those of the short cases; the long ones when the first is asked."""

    folder: Path
    data: Path
    told: dict[str, list[dict[str, Any]]]
    """By start, such as 'short-4': what each of its ranks reported."""

    def order(self, name: str, rungs: tuple[str, ...], layout: Layout | None, steps: int = STEPS) -> TrainOrder:
        settings = TrainSettings(
            micro_batch=1,
            global_batch=4,
            learning_rate=1e-3,
            budget=Budget(steps=steps),
            schedule_steps=STEPS,
            warmup_steps=1,
            cycle_steps=3,
            eval_every=2,
            eval_batches=3,
            checkpoint_every=2,
            sample_every=4 if name == "tp2-tied" else None,
            keep_last=9,
        )
        return TrainOrder(
            workload=WORKLOAD,
            recipe=Recipe(rungs=rungs, micro_batch=1),
            settings=settings,
            device="cpu",
            data=str(self.data),
            out=str(self.folder / name),
            layout=layout,
        )

    def at(self, name: str) -> Path:
        self.ranks(name)
        return self.folder / name

    def ranks(self, name: str) -> list[dict[str, Any]]:
        """What each rank reported of the start that this case was in, the last one where there were two."""
        kind = "short" if name in CASES or name in FURTHER else "long"
        layout = {**CASES, **LONG_CASES, **{key: (row[2],) for key, row in (FURTHER | LONG_FURTHER).items()}}[name][0]
        counts = (4, 2, 8) if kind == "long" else (4, 2)
        for count in counts[: counts.index(layout.ranks) + 1] if layout is not None else counts:
            if f"{kind}-{count}" not in self.told:
                self.told[f"{kind}-{count}"] = self.started(kind, count)
        return [] if layout is None else self.told[f"{kind}-{layout.ranks}"]

    def started(self, kind: str, count: int) -> list[dict[str, Any]]:
        cases, further = (CASES, FURTHER) if kind == "short" else (LONG_CASES, LONG_FURTHER)
        orders = [self.order(name, rungs, layout) for name, (layout, rungs) in cases.items() if layout.ranks == count]
        held = orders if kind == "short" else []
        for name, (begun, before, gone_on, after) in further.items():
            first = self.order(f"{name}-begun", before, begun, steps=2)
            if begun is not None and begun.ranks == count:
                orders = [*orders, first]
            if gone_on is not None and gone_on.ranks == count:
                if begun is None:
                    train(first, quiet)
                orders = [*orders, self.order(name, after, gone_on)]
        return start(self.folder / f"{kind}-{count}", count, orders, held)

    def events(self, name: str, rank: int = 0) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = self.ranks(name)[rank][str(self.folder / name)]["events"]
        return found


def start(folder: Path, ranks: int, orders: list[TrainOrder], held: list[TrainOrder]) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    cases = {"orders": [to_json(order) for order in orders], "held": [to_json(order) for order in held]}
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),  # nobody else's
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_cases.py"), str(ranks), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def runs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    text = folder / "text.jsonl"
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    data = folder / "data"
    prepare(Preparation(sources=(str(text),), out=data, tokenizer="bytes", val_fraction=0.2, processes=1))
    return Runs(folder=folder, data=data, told={})


@pytest.fixture(scope="module")
def one_process(runs: Runs) -> Callable[[tuple[str, ...]], Path]:
    """one_process(rungs) -> a run directory: the case's own recipe without ranks."""
    made: dict[tuple[str, ...], Path] = {}

    def train_alone(rungs: tuple[str, ...]) -> Path:
        key = tuple(sorted(set(rungs) - ALONE))
        if key not in made:
            order = runs.order(f"alone-{len(made)}", rungs, None)
            train(order, quiet)
            made[key] = Path(order.out)
        return made[key]

    return train_alone


def quiet(*_: object, **__: object) -> None:
    pass


def last_of(run: Path) -> Any:
    return load_from(run / "checkpoints" / f"step-{STEPS:08d}")


def differences(run: Path, reference: Path) -> dict[str, float]:
    found: dict[str, float] = SAME["differences"](last_of(run).tensors(), last_of(reference).tensors())
    return found


def notes(events: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    return [fields["text"] for kind, fields in events if kind == "note"]


@pytest.mark.parametrize(
    "name", short_and_long(CASES, [name for name in LONG_CASES if not name.endswith("bf16")]), ids=str
)
def test_ranks_train_what_one_process_trains(
    runs: Runs, one_process: Callable[[tuple[str, ...]], Path], name: str
) -> None:
    found = differences(runs.at(name), one_process((CASES | LONG_CASES)[name][1]))
    assert max(found.values()) < 1e-5, found


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2-bf16", "tp2-fsdp-bf16"])
def test_bf16_is_bf16(runs: Runs, one_process: Callable[[tuple[str, ...]], Path], name: str) -> None:
    """As close to fp32 as autocast on one process is, and no closer: matmuls really compute in 16 bits."""
    exact, rounded = one_process(()), one_process(("bf16",))

    def distance(run: Path) -> float:
        ours, theirs = last_of(run).tensors().of("model"), last_of(exact).tensors().of("model")
        return float(sum((ours[name] - theirs[name]).square().sum() for name in theirs)) ** 0.5

    assert 0.3 * distance(rounded) < distance(runs.at(name)) < 2 * distance(rounded)


@pytest.fixture
def one_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_small_bias_is_not_lost_in_16_bits(one_of_one: DeviceMesh) -> None:
    """Added to a sum that is rounded already, most of it would be: half of the last place is 1e-4 of what is 0.05."""
    width, small = 64, 3e-5
    layer = ByInputs(torch.nn.Linear(width, width), one_of_one).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(0.01 * torch.randn(width, width, generator=generator))
        layer.bias.fill_(small)
    x = torch.randn(8192, width, generator=generator).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    unbiased = x.double() @ layer.weight.detach().to(torch.bfloat16).double().t()
    assert found.dtype == torch.bfloat16
    assert (found.double() - unbiased).mean().item() == pytest.approx(small, abs=small / 10)
    found.float().sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((width,), 8192.0))


@pytest.mark.parametrize("name", short_and_long(FURTHER, LONG_FURTHER), ids=str)
def test_another_layout_goes_on(runs: Runs, one_process: Callable[[tuple[str, ...]], Path], name: str) -> None:
    *_, layout, rungs = (FURTHER | LONG_FURTHER)[name]
    run = runs.at(name)
    if layout is None:
        shutil.copytree(runs.folder / f"{name}-begun", run)
        events: list[tuple[str, dict[str, Any]]] = []
        train(runs.order(name, rungs, None), lambda kind, **fields: events.append((kind, fields)))
    else:
        events = runs.events(name)
    assert "resumed from step-00000002 at step 2" in notes(events)
    found = differences(run, one_process(rungs))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("name", ["tp2-tied", "tp2-fsdp"])
def test_every_rank_sees_one_processes_numbers(runs: Runs, name: str, tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    layout, rungs = CASES[name]
    order = replace(runs.order(name, rungs, None), out=str(tmp_path / "run"))
    train(order, lambda kind, **fields: events.append((kind, fields)))
    assert layout.words(plan_of(rungs).parallel) in notes(runs.events(name))
    for rank in range(layout.ranks):
        for ours, theirs in zip(events_of(events, "cycle"), events_of(runs.events(name, rank), "cycle"), strict=True):
            assert theirs["losses"] == pytest.approx(ours["losses"], abs=1e-5)
            assert theirs["gradient_norms"] == pytest.approx(ours["gradient_norms"], abs=1e-5)
            assert (theirs["tokens"], theirs["documents"]) == (ours["tokens"], ours["documents"])
        for kind, value in (("validation", "loss"), ("sample", "text")):
            ours, theirs = (events_of(found, kind) for found in (events, runs.events(name, rank)))
            assert len(ours) == len(theirs) == {"validation": 2, "sample": name == "tp2-tied"}[kind]
            for one, other in zip(ours, theirs, strict=True):
                assert other[value] == (one[value] if kind == "sample" else pytest.approx(one[value], abs=1e-5))


def events_of(events: Iterable[tuple[str, dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    return [fields for name, fields in events if name == kind]


@pytest.mark.parametrize(
    ("name", "layout", "zero"),
    [("tp2-ddp", Cut(gpus=4, tp=2), 0), ("tp2-fsdp", Cut(gpus=4, tp=2), 3), ("hybrid", Cut(gpus=4, replicas=2), 3)],
    ids=["tp2-ddp", "tp2-fsdp", "hybrid"],
)
def test_a_rank_holds_what_is_predicted(runs: Runs, name: str, layout: Cut, zero: int) -> None:
    """Tensor parallel leaves norms, positions and two biases whole and cuts the rest; hybrid sharding is FSDP over the
    ranks of one copy. Up to rows that cannot be shared evenly."""
    shape, plan = WORKLOAD.decoder, plan_of(CASES[name][1])
    cut = predict_memory(shape, plan, micro_batch=1, layout=layout, zero=zero)
    whole, mask = 4 * parameters(shape, tied=True).total, shape.sequence**2
    for rank in runs.ranks(name):
        held = rank[f"held {list(CASES[name][1])}"]
        for what, size in (("weights", cut.weights - mask), ("optimizer", cut.optimizer)):
            assert held[what] == pytest.approx(size, rel=0.02)
            assert held[what] < 0.6 * whole * {"weights": 1, "optimizer": 2}[what]
        assert held["gradients"] == held["weights"]


def sent_for_three(name: str, layout: Cut, zero: int) -> dict[str, list[int]]:
    """[calls, bytes] of an update of three micro batches, by kind, as predicted."""
    plan = plan_of(CASES[name][1])
    rank = Rank(
        shape=WORKLOAD.decoder,
        plan=plan,
        micro_batch=1,
        layout=replace(layout, accumulation=3),
        zero=zero,
        optimizer=find_optimizer(plan.optimizer),
        first=True,
        last=True,
    )
    found: dict[str, list[int]] = {}
    for one in traffic(rank, gpus_per_node=8):
        calls, size = found.get(one.kind, [0, 0])
        found[one.kind] = [calls + one.calls, size + round(one.bytes)]
    return found


@pytest.mark.parametrize(("name", "zero"), [("tp2-ddp", 0), ("tp2-fsdp", 3)], ids=["tp2-ddp", "tp2-fsdp"])
def test_a_step_sends_what_is_predicted(runs: Runs, name: str, zero: int) -> None:
    """Of the ranks that have the odd row of the vocabulary; the others have one less."""
    expected = sent_for_three(name, Cut(gpus=4, tp=2), zero)
    for rank in runs.ranks(name)[1::2]:
        assert rank[f"held {list(CASES[name][1])}"]["sent"] == expected


def test_copies_of_a_model_average_once_per_update(runs: Runs) -> None:
    """Inside a copy that is FSDP of its two ranks; between the copies a share of the gradients, on the last of three
    micro batches."""
    inside = sent_for_three("hybrid", Cut(gpus=2), 3)
    calls, size = inside[REDUCE_SCATTER]
    expected = sent_for_three("hybrid", Cut(gpus=4, replicas=2), 3)
    assert expected == {**inside, ALL_REDUCE: [calls // 3, size // 3 // 2]}
    for rank in runs.ranks("hybrid"):
        assert rank[f"held {list(CASES['hybrid'][1])}"]["sent"] == expected


@pytest.mark.parametrize("name", ["tp2-tied", "tp2-fsdp"])
def test_a_tensor_group_builds_its_part_without_the_whole(runs: Runs, name: str) -> None:
    """What a rank holds, with one whole tensor at a time and its pieces of that: half for the group of two, and of that
    half again for FSDP."""
    shape, rungs = WORKLOAD.decoder, CASES[name][1]
    largest = 4 * plan_of(rungs).vocab_rows(shape.vocab) * shape.d_model
    for rank in runs.ranks(name):
        found = rank[f"held {list(rungs)}"]
        left, peak = found["building"]["left"], found["building"]["peak"]
        assert left == pytest.approx(found["weights"] + shape.sequence**2, rel=0.05)
        assert left + largest <= peak <= left + 1.8 * largest


def test_a_checkpoint_of_cut_layers_is_a_model(runs: Runs, tmp_path: Path) -> None:
    """What `redline sample` and `redline export` read: one file, in the published order."""
    _, model = load_model(runs.at("tp2-fsdp"))
    saved = last_of(runs.at("tp2-fsdp")).tensors().of("model")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    export_huggingface(model, tmp_path / "exported")
    exported = read_weights(tmp_path / "exported")
    for name in ("h.1.attn.c_attn.weight", "h.1.mlp.c_proj.weight"):  # transformers keeps them the other way round
        assert torch.equal(exported[f"transformer.{name}"].t(), saved[name])
    assert torch.equal(exported["transformer.wte.weight"], saved["wte.weight"])
