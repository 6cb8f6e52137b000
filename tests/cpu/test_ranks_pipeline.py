"""Stages of a pipeline are one process: the same weights after the same updates, tied weights and checkpoints included.

As in test_ranks.py, ranks are real processes with gloo, and one start of them runs many cases.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.layout import Layout
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import load_from
from redline.engine.pipeline import Pipelined
from redline.engine.session import TrainOrder, load_model, train
from redline.engine.shard import fill, give_memory
from redline.model.adapter import adapter_of
from redline.model.gpt import GPT
from redline.model.stage import Stage, layers_of
from redline.predict.memory import predict_memory
from redline.predict.parallel import Layout as Cut
from redline.rungs import plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).resolve().parent
SAME = runpy.run_path(str(HERE / "same_weights.py"))
STEPS = 4
SHARED = ("ddp", "fsdp", "tensor-parallel", "pipeline-parallel", "pipeline-gpipe")
TIED = ("tied-weights", "fused-adamw")
TWO, TWO_BY_TWO, FOUR = Layout(ranks=2, pipeline=2), Layout(ranks=4, pipeline=2), Layout(ranks=4, pipeline=4)
BY_TENSOR = Layout(ranks=4, pipeline=2, tensor=2)


@dataclass(frozen=True)
class Case:
    layout: Layout | None
    rungs: tuple[str, ...]
    micro_batch: int = 1
    steps: int = STEPS
    goes_on_from: str | None = None
    bound: float = 1e-5


# A global batch of 8 each; those that end at step 2 are gone on with by others.
CASES = {
    "1f1b-tied": Case(TWO, ("ddp", "pipeline-parallel", *TIED)),
    "gpipe": Case(TWO, ("ddp", "pipeline-gpipe"), micro_batch=2),
    "one-piece": Case(TWO, ("ddp", "pipeline-parallel", *TIED), micro_batch=8),
    "1f1b-half": Case(TWO, ("ddp", "pipeline-parallel", *TIED), steps=2),
    "from-one": Case(TWO, ("ddp", "pipeline-parallel", *TIED), goes_on_from="one-half"),
    "ddp-1f1b": Case(
        TWO_BY_TWO, ("ddp", "pipeline-parallel", "padded-vocab", "chunked-loss", "checkpointing", "tied-weights")
    ),
}
MORE = {
    "ddp-gpipe-tied": Case(TWO_BY_TWO, ("ddp", "pipeline-gpipe", *TIED)),
    "fsdp-1f1b-tied": Case(TWO_BY_TWO, ("fsdp", "pipeline-parallel", *TIED)),
    "fsdp-whole-1f1b-tied": Case(TWO_BY_TWO, ("fsdp-whole", "pipeline-parallel", *TIED)),
    "fsdp-half": Case(TWO_BY_TWO, ("fsdp", "pipeline-parallel", *TIED), steps=2),
    "four-tied": Case(FOUR, ("ddp", "pipeline-parallel", *TIED)),
    "four-from-two": Case(FOUR, ("ddp", "pipeline-gpipe", *TIED), goes_on_from="1f1b-half"),
    # Tensor parallel alone differs as much in a few numbers: where a gradient is next to nothing, AdamW makes a step of
    # its rounding. A step is 3e-3.
    "tensor": Case(BY_TENSOR, ("ddp", "pipeline-gpipe", "tensor-parallel", "padded-vocab"), bound=5e-5),
    "tensor-tied": Case(
        BY_TENSOR, ("ddp", "pipeline-parallel", "tensor-parallel", *TIED), goes_on_from="1f1b-half", bound=5e-5
    ),
    "fsdp-from-two": Case(Layout(ranks=4), ("fsdp", *TIED), goes_on_from="1f1b-half"),
}
ALONE = {
    "one-half": Case(None, TIED, steps=2),
    "one-from-two": Case(None, TIED, goes_on_from="1f1b-half"),
    "one-from-fsdp": Case(None, TIED, goes_on_from="fsdp-half"),
}
EVERY = CASES | MORE | ALONE
WORKLOAD = Workload(
    name="staged",
    shape=Shape(layers=4, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=1,
    learning_rate=3e-3,
)


@dataclass(frozen=True)
class Runs:
    folder: Path
    told: dict[str, list[dict[str, Any]]]
    """Of each case, what every rank reported."""
    held: dict[str, list[dict[str, Any]]]
    one_process: Callable[[str], Path]
    """The run directory of one process with the case's recipe."""

    def notes(self, name: str) -> list[str]:
        return [fields["text"] for kind, fields in self.told[name][0]["events"] if kind == "note"]

    def start(self, names: list[str], looked_at: tuple[str, ...] = ()) -> None:
        """Those cases, which have the same number of ranks."""
        orders = {name: order_of(self.folder, name) for name in names}
        for name in names:
            begin_where(self.folder, name)
        layout = EVERY[names[0]].layout
        assert layout is not None
        place = self.folder / f"start-{len(self.told)}"
        found = start(place, layout.ranks, list(orders.values()), [orders[name] for name in looked_at])
        self.told.update({name: [rank[orders[name].out] for rank in found] for name in names})
        self.held.update({name: [rank[f"held {list(EVERY[name].rungs)}"] for rank in found] for name in looked_at})


def order_of(folder: Path, name: str) -> TrainOrder:
    case = EVERY[name]
    settings = TrainSettings(
        micro_batch=case.micro_batch,
        global_batch=8,
        learning_rate=3e-3,
        budget=Budget(steps=case.steps),
        schedule_steps=STEPS,
        warmup_steps=1,
        cycle_steps=3,
        eval_every=2,
        eval_batches=3,
        checkpoint_every=2,
        sample_every=2 if name.endswith("tied") else None,
        keep_last=9,
    )
    return TrainOrder(
        workload=WORKLOAD,
        recipe=Recipe(rungs=case.rungs, micro_batch=case.micro_batch),
        settings=settings,
        device="cpu",
        data=str(folder / "data"),
        out=str(folder / name),
        layout=case.layout,
    )


def start(folder: Path, ranks: int, orders: list[TrainOrder], held: list[TrainOrder]) -> list[dict[str, Any]]:
    folder.mkdir()
    cases = {"orders": [to_json(order) for order in orders], "held": [to_json(order) for order in held]}
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [sys.executable, str(HERE / "rank_cases.py"), str(ranks), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def runs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("stages")
    text = folder / "text.jsonl"
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    prepare(Preparation(sources=(str(text),), out=folder / "data", tokenizer="bytes", val_fraction=0.2, processes=1))
    made: dict[tuple[str, ...], Path] = {}

    def one_process(name: str) -> Path:
        rungs = tuple(rung for rung in EVERY[name].rungs if rung not in SHARED)
        if rungs not in made:
            made[rungs] = folder / f"alone-{len(made)}"
            recipe = Recipe(rungs=rungs, micro_batch=1)
            train(replace(order_of(folder, "1f1b-tied"), recipe=recipe, out=str(made[rungs]), layout=None), quiet)
        return made[rungs]

    runs = Runs(folder=folder, told={}, held={}, one_process=one_process)
    train(order_of(folder, "one-half"), quiet)
    runs.start([name for name in CASES if name != "ddp-1f1b"], ("1f1b-tied", "gpipe"))
    runs.start(["ddp-1f1b"], ("ddp-1f1b",))
    return runs


@pytest.fixture(scope="module")
def more(runs: Runs) -> Runs:
    runs.start(list(MORE))
    return runs


def begin_where(folder: Path, name: str) -> None:
    source = EVERY[name].goes_on_from
    if source is not None:
        shutil.copytree(folder / source, folder / name)


def quiet(*_: object, **__: object) -> None:
    pass


def differences(run: Path, reference: Path) -> dict[str, float]:
    ours, theirs = (load_from(run / "checkpoints" / f"step-{STEPS:08d}").tensors() for run in (run, reference))
    found: dict[str, float] = SAME["differences"](ours, theirs)
    return found


def check_weights(runs: Runs, name: str) -> None:
    resumed = "resumed from step-00000002 at step 2" in runs.notes(name)
    assert resumed == (EVERY[name].goes_on_from is not None)
    found = differences(runs.folder / name, runs.one_process(name))
    assert max(found.values()) < EVERY[name].bound, found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.steps == STEPS])
def test_stages_train_what_one_process_trains(runs: Runs, name: str) -> None:
    check_weights(runs, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in MORE.items() if case.steps == STEPS])
def test_more_stages_train_what_one_process_trains(more: Runs, name: str) -> None:
    check_weights(more, name)


def check_goes_on(runs: Runs, name: str) -> None:
    begin_where(runs.folder, name)
    notes: list[str] = []
    train(order_of(runs.folder, name), lambda kind, **fields: notes.append(fields["text"]) if kind == "note" else None)
    assert "resumed from step-00000002 at step 2" in notes
    found = differences(runs.folder / name, runs.one_process("1f1b-tied"))
    assert max(found.values()) < 1e-5, found


def test_one_process_goes_on_from_what_stages_saved(runs: Runs) -> None:
    check_goes_on(runs, "one-from-two")


@pytest.mark.long
def test_one_process_goes_on_from_what_sharded_stages_saved(more: Runs) -> None:
    check_goes_on(more, "one-from-fsdp")


def check_events(runs: Runs, name: str, out: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    order = replace(order_of(runs.folder, name), out=str(out), layout=None)
    train(order, lambda kind, **fields: events.append((kind, fields)))
    for rank in runs.told[name]:
        for kind, keys in {"cycle": ("losses", "gradient_norms", "documents"), "validation": ("loss",)}.items():
            ours, theirs = ([f for k, f in found if k == kind] for found in (events, rank["events"]))
            assert len(ours) == len(theirs) > 0
            for mine, other in zip(ours, theirs, strict=True):
                assert [other[key] for key in keys] == [pytest.approx(mine[key], abs=1e-5) for key in keys]
        samples = [[f["text"] for k, f in found if k == "sample"] for found in (events, rank["events"])]
        assert samples[1][:1] == samples[0][:1] != []  # step 2: the same weights but for rounding


def test_every_stage_knows_the_losses_of_one_process(runs: Runs, tmp_path: Path) -> None:
    check_events(runs, "1f1b-tied", tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp-gpipe-tied", "fsdp-1f1b-tied", "four-tied"])
def test_every_one_of_more_stages_knows_the_losses(more: Runs, name: str, tmp_path: Path) -> None:
    check_events(more, name, tmp_path / "run")


def test_the_bubble_is_told(runs: Runs) -> None:
    assert "8 micro batches per update through 2 stages: each idles 11% of the time" in runs.notes("1f1b-tied")
    few = "1 micro batch per update through 2 stages: each idles 50% of the time"
    assert f"{few} (fewer than stages: a larger --global-batch idles less)" in runs.notes("one-piece")


def test_a_tied_weight_is_the_same_bit_for_bit_on_both_ends(runs: Runs) -> None:
    first, last = (rank["checksums"] for rank in runs.held["1f1b-tied"])
    assert set(first) & set(last) == {"wte.weight"}
    assert first["wte.weight"] == last["wte.weight"]
    whole = adapter_of(WORKLOAD).build(Plan(tied=True), torch.device("cpu"))
    assert set(first) | set(last) == {name for name, _ in whole.named_parameters()}
    untied = [set(rank["checksums"]) for rank in runs.held["gpipe"]]
    assert not untied[0] & untied[1]


def test_replicas_of_a_stage_hold_the_same(runs: Runs) -> None:
    sums = [rank["checksums"] for rank in runs.held["ddp-1f1b"]]  # ranks 0 and 1 are the first stage
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert sums[0]["wte.weight"] == sums[2]["wte.weight"]


def test_a_stage_holds_its_share(runs: Runs) -> None:
    """The larger stage against the prediction, whose weights count the causal mask too."""
    shape, mask = WORKLOAD.decoder, WORKLOAD.decoder.sequence**2
    for name in ("1f1b-tied", "gpipe"):
        plan = plan_of(CASES[name].rungs)
        predicted = predict_memory(shape, plan, micro_batch=1, layout=Cut(gpus=2, pp=2, accumulation=3))
        for what, size in {"weights": predicted.weights - mask, "optimizer": predicted.optimizer}.items():
            assert max(rank[what] for rank in runs.held[name]) == size


def test_a_checkpoint_of_stages_is_a_model(runs: Runs) -> None:
    """What `redline sample` and `redline export` read."""
    _, model = load_model(runs.folder / "ddp-1f1b")
    saved = load_from(runs.folder / "ddp-1f1b" / "checkpoints" / f"step-{STEPS:08d}").tensors()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[f"model.{name}"][: parameter.size(0)])


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_stages_make_the_model(stages: int, tied: bool) -> None:
    """One after the other they compute what the whole does, from the weights that it begins with."""
    adapter, plan, cpu = adapter_of(WORKLOAD), Plan(tied=tied, vocab_multiple=64), torch.device("cpu")
    whole = adapter.build(plan, cpu)
    assert isinstance(whole, GPT)
    tokens = torch.arange(2 * 16).view(2, 16)
    x, names = tokens, []
    for number in range(stages):
        stage = adapter.build_stage(plan, layers_of(number, stages=stages, layers=4))
        assert isinstance(stage, Stage)
        assert all(parameter.is_meta for parameter in stage.parameters())
        give_memory(stage, cpu)
        fill(adapter, stage, {})
        own = [name for name, _ in stage.named_parameters()]
        assert stage.elsewhere == {name for name, _ in whole.named_parameters()} - set(own)
        names += [name for name in own if not (stage.is_copy and name == "wte.weight")]
        x = stage(x)
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert torch.equal(x, whole(tokens))


def test_layers_that_make_no_equal_stages() -> None:
    assert [layers_of(number, stages=3, layers=6) for number in range(3)] == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(ValueError, match="4 layers do not make 3 stages"):
        layers_of(0, stages=3, layers=4)


def test_what_fails_in_a_stage_is_told_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps it; whoever asks whether memory was short must see the error itself."""

    class Short:
        def step(self, *_: object, **__: object) -> None:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("[Stage 0] failed to run forward: args: (Tensor([1, 16]),)") from error

    shared = Pipelined.__new__(Pipelined)
    adapter = adapter_of(WORKLOAD)
    shared.adapter, shared.device = adapter, torch.device("cpu")
    shared.model = adapter.build_stage(Plan(), range(2))
    monkeypatch.setattr(shared, "_schedule", lambda *_: Short())
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        shared.gradients(adapter.pieces(torch.zeros((2, 2, 16), dtype=torch.int64), 1), lambda *_: torch.zeros(()))
    with pytest.raises(ValueError, match="have the same size"):
        shared.gradients(adapter.pieces(torch.zeros((2, 3, 16), dtype=torch.int64), 2), lambda *_: torch.zeros(()))
