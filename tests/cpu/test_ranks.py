"""Many ranks are one process: the same weights after the same updates, whoever holds them and whoever goes on.

Ranks are real processes with gloo. Starting them costs seconds, so a start runs many cases (`rank_cases.py`); the
tests then compare what the cases left behind. What happens when a rank is lost: test_ranks_faults.py.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties

from redline.core.checkpoints import UnusableError
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Shape, Workload
from redline.data.prepare import Preparation, prepare
from redline.data.share import Share
from redline.engine.checkpoint import load_from
from redline.engine.distributed import Ranks
from redline.engine.session import TrainOrder, load_model, open_data, open_loader, train
from redline.engine.tensor_files import METADATA_FILE, open_sharded
from redline.model.adapter import adapter_of
from redline.predict.activations import Rank
from redline.predict.communication import ALL_REDUCE, REDUCE_SCATTER, traffic
from redline.predict.fitting import ZERO
from redline.predict.flops import parameters
from redline.predict.memory import WORKSPACES, predict_memory
from redline.predict.optimizers import find_optimizer
from redline.predict.parallel import Layout
from redline.rungs import plan_of
from redline.rungs.parallel import WAYS

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).resolve().parent
SAME = runpy.run_path(str(HERE / "same_weights.py"))
STEPS = 4
# (name, rungs): all of them with a global batch of 8 in micro batches of 1, so that 4 ranks add up two each.
CASES = {
    "ddp": ("ddp",),
    "ddp-tied": ("ddp", "tied-weights", "fused-adamw"),
    "fsdp": ("fsdp",),
    "fsdp-tied": ("fsdp", "tied-weights", "fused-adamw", "checkpointing"),
    "fsdp-keep-padded": ("fsdp-keep", "padded-vocab", "chunked-loss", "foreach-adamw", "tied-weights"),
    "fsdp-whole-tied": ("fsdp-whole", "tied-weights", "fused-adamw", "checkpointing"),
    "fsdp-bf16": ("fsdp", "bf16"),
    "fsdp-whole-bf16": ("fsdp-whole", "bf16"),
}
ROUNDED = [name for name in CASES if name.endswith("bf16")]
WORKLOAD = Workload(
    name="ranked",
    shape=Shape(layers=2, heads=2, d_model=32, d_ff=64, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=1,
    learning_rate=3e-3,
)

# More blocks than FSDP has gathered at a time, and an update of three micro batches: what a step holds, and sends.
DEEP = replace(WORKLOAD, name="deep", shape=replace(WORKLOAD.decoder, layers=6))
PIECES = 3


@dataclass(frozen=True)
class Runs:
    """Run directories: `at(name)` of the ranks, `alone(name)` of one process."""

    folder: Path
    orders: dict[str, TrainOrder]
    told: dict[int, list[dict[str, Any]]]
    """By number of ranks: what each of them reported."""

    def at(self, name: str) -> Path:
        return self.folder / name


def order_of(folder: Path, data: Path, name: str, rungs: tuple[str, ...], steps: int = STEPS) -> TrainOrder:
    settings = TrainSettings(
        micro_batch=1,
        global_batch=8,
        learning_rate=3e-3,
        budget=Budget(steps=steps),
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
        recipe=Recipe(rungs=rungs, micro_batch=1),
        settings=settings,
        device="cpu",
        data=str(data),
        out=str(folder / name),
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
    folder = tmp_path_factory.mktemp("ranks")
    text = folder / "text.jsonl"
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    data = folder / "data"
    prepare(Preparation(sources=(str(text),), out=data, tokenizer="bytes", val_fraction=0.2, processes=1))
    orders = {name: order_of(folder, data, name, rungs) for name, rungs in CASES.items()}
    half = [
        order_of(folder, data, f"{name}-half", CASES[name], steps=2) for name in ("ddp", "fsdp-tied", "fsdp-whole-tied")
    ]
    told = {4: start(folder / "of-4", 4, [*orders.values(), *half], [orders["fsdp"], orders["ddp"]])}
    # What four ranks began two go on with, each family with its own and with the other one's checkpoint.
    further = {
        "ddp-by-two": ("ddp-half", CASES["ddp"]),
        "ddp-as-fsdp": ("ddp-half", CASES["fsdp"]),
        "fsdp-tied-by-two": ("fsdp-tied-half", CASES["fsdp-tied"]),
        "fsdp-tied-as-ddp": ("fsdp-tied-half", CASES["ddp-tied"]),
        "fsdp-tied-by-one": ("fsdp-tied-half", CASES["fsdp-tied"]),
        "fsdp-whole-tied-by-two": ("fsdp-whole-tied-half", CASES["fsdp-whole-tied"]),
        "fsdp-whole-tied-as-fsdp": ("fsdp-whole-tied-half", CASES["fsdp-tied"]),
        "fsdp-whole-tied-by-one": ("fsdp-whole-tied-half", CASES["fsdp-whole-tied"]),
        "ddp-by-one": ("ddp-half", CASES["ddp"]),
    }
    for name, (source, rungs) in further.items():
        shutil.copytree(folder / source, folder / name)
        orders[name] = order_of(folder, data, name, rungs)
    two = [orders[name] for name in further if not name.endswith("one")]
    deep = [replace(orders["ddp"], workload=DEEP, recipe=Recipe(rungs=(way,), micro_batch=1)) for way in WAYS]
    told[2] = start(folder / "of-2", 2, two, deep)
    return Runs(folder=folder, orders=orders, told=told)


@pytest.fixture(scope="module")
def one_process(runs: Runs) -> Callable[..., Path]:
    """one_process("fsdp") -> a run directory: the case's own recipe without ranks."""
    made: dict[tuple[str, ...], Path] = {}

    def train_alone(rungs: tuple[str, ...]) -> Path:
        key = tuple(name for name in rungs if name not in WAYS)
        if key not in made:
            out = runs.folder / f"alone-{len(made)}"
            train(replace(runs.orders["ddp"], recipe=Recipe(rungs=rungs, micro_batch=1), out=str(out)), quiet)
            made[key] = out
        return made[key]

    return train_alone


def quiet(*_: object, **__: object) -> None:
    pass


def last_of(run: Path) -> Any:
    return load_from(run / "checkpoints" / f"step-{STEPS:08d}")


def differences(run: Path, reference: Path) -> dict[str, float]:
    found: dict[str, float] = SAME["differences"](last_of(run).tensors(), last_of(reference).tensors())
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED])
def test_ranks_train_what_one_process_trains(runs: Runs, one_process: Callable[..., Path], name: str) -> None:
    found = differences(runs.at(name), one_process(CASES[name]))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("name", ROUNDED)
def test_sharded_bf16_is_bf16(runs: Runs, one_process: Callable[..., Path], name: str) -> None:
    """As close to fp32 as autocast on one process is, and no closer: the weights really travel in 16 bits."""
    exact, rounded = one_process(CASES["fsdp"]), one_process(CASES[name])
    weights = [name for name in differences(exact, rounded) if name.startswith("model.")]

    def distance(run: Path) -> float:
        ours, theirs = last_of(run).tensors(), last_of(exact).tensors()
        return float(sum((ours[name] - theirs[name]).square().sum() for name in weights)) ** 0.5

    assert 0.3 * distance(rounded) < distance(runs.at(name)) < 2 * distance(rounded)


@pytest.mark.parametrize(
    "name",
    [
        "ddp-by-two",
        "ddp-as-fsdp",
        "fsdp-tied-by-two",
        "fsdp-tied-as-ddp",
        "fsdp-whole-tied-by-two",
        "fsdp-whole-tied-as-fsdp",
    ],
)
def test_two_ranks_go_on_from_what_four_saved(runs: Runs, one_process: Callable[..., Path], name: str) -> None:
    notes = [fields["text"] for kind, fields in runs.told[2][0][str(runs.at(name))]["events"] if kind == "note"]
    assert "resumed from step-00000002 at step 2" in notes
    found = differences(runs.at(name), one_process(runs.orders[name].recipe.rungs))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("name", ["fsdp-tied-by-one", "fsdp-whole-tied-by-one", "ddp-by-one"])
def test_one_process_goes_on_from_what_four_ranks_saved(
    runs: Runs, one_process: Callable[..., Path], name: str
) -> None:
    notes: list[str] = []
    train(runs.orders[name], lambda kind, **fields: notes.append(fields["text"]) if kind == "note" else None)
    assert "resumed from step-00000002 at step 2" in notes
    found = differences(runs.at(name), one_process(CASES["fsdp-tied" if "fsdp" in name else "ddp"]))
    assert max(found.values()) < 1e-5, found


def test_every_rank_sees_the_same_numbers_and_rank_0_one_processes_losses(
    runs: Runs, one_process: Callable[..., Path], tmp_path: Path
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    order = replace(runs.orders["fsdp-tied"], out=str(tmp_path / "run"))
    train(order, lambda kind, **fields: events.append((kind, fields)))
    cycles = [fields for kind, fields in events if kind == "cycle"]
    told = [rank[str(runs.at("fsdp-tied"))]["events"] for rank in runs.told[4]]
    for rank in told:
        theirs = [fields for kind, fields in rank if kind == "cycle"]
        assert [fields["updates"] for fields in theirs] == [fields["updates"] for fields in cycles]
        for ours, other in zip(cycles, theirs, strict=True):
            assert other["losses"] == pytest.approx(ours["losses"], abs=1e-5)
            assert other["gradient_norms"] == pytest.approx(ours["gradient_norms"], abs=1e-5)
            assert (other["tokens"], other["documents"]) == (ours["tokens"], ours["documents"])
    for kind in ("validation", "sample"):
        ours, theirs = ([f for k, f in found if k == kind] for found in (events, told[0]))
        assert len(ours) == len(theirs) > 0
        if kind == "validation":
            assert theirs[-1]["loss"] == pytest.approx(ours[-1]["loss"], abs=1e-5)
            assert theirs[-1]["validation_tokens"] == ours[-1]["validation_tokens"]
        else:
            assert theirs[0]["text"] == ours[0]["text"]  # step 2: the same weights but for rounding


@pytest.mark.parametrize("count", [2, 4])
def test_the_order_of_the_data_does_not_depend_on_the_ranks(runs: Runs, count: int) -> None:
    order, cpu = runs.orders["ddp"], torch.device("cpu")
    adapter = adapter_of(WORKLOAD)
    data = open_data(order, quiet)

    def batches(ranks: Ranks) -> tuple[list[torch.Tensor], int]:
        with closing(open_loader(order, data, Plan(), adapter, cpu, 8, None, ranks)) as loader:
            return [next(loader) for _ in range(3)], loader.documents

    whole, documents = batches(Ranks())
    shares = [batches(Ranks(rank=rank, count=count)) for rank in range(count)]
    for number, batch in enumerate(whole):
        assert torch.equal(torch.cat([share[number] for share, _ in shares], dim=1), batch)
    assert sum(count for _, count in shares) == documents


def test_a_batch_that_cannot_be_made_in_parts_is_cut() -> None:
    adapter = adapter_of(WORKLOAD)
    whole = list(torch.arange(2 * 2 * 8 * 16).view(2, 2, 8, 16))  # two batches
    shares = [
        Share(Given(whole), cut=lambda batch, rank=rank: adapter.pieces(batch, 2)[rank][0], counts=rank == 0)
        for rank in range(4)
    ]
    for batch in whole:
        assert torch.equal(torch.cat([next(share) for share in shares], dim=1), batch)
    assert [share.documents for share in shares] == [14, 0, 0, 0]
    assert {(share.waited_seconds, share.epoch, share.state()["at"]) for share in shares} == {(1.5, 0.25, 2)}


class Given:
    """A source of these batches."""

    waited_seconds, epoch = 1.5, 0.25

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.taken = batches, 0

    @property
    def documents(self) -> int:
        return 7 * self.taken

    def __next__(self) -> torch.Tensor:
        self.taken += 1
        return self.batches[self.taken - 1]

    def state(self) -> dict[str, Any]:
        return {"at": self.taken}

    def close(self) -> None:
        pass


def test_a_rank_holds_its_share(runs: Runs) -> None:
    """FSDP2 against the prediction for ZeRO 3: a quarter of everything, up to rows that four cannot share evenly."""
    shape, plan = WORKLOAD.decoder, plan_of(("fsdp",))
    count, mask = parameters(shape, tied=False).total, shape.sequence**2
    whole = predict_memory(shape, plan, micro_batch=1, layout=Layout(gpus=4), zero=0)
    cut = predict_memory(shape, plan, micro_batch=1, layout=Layout(gpus=4), zero=3)
    expected = {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}
    assert (whole.weights, whole.optimizer) == (expected["weights"] + mask, expected["optimizer"])
    assert [rank["held ['ddp']"] | expected for rank in runs.told[4]] == [rank["held ['ddp']"] for rank in runs.told[4]]
    sharded = [rank["held ['fsdp']"] for rank in runs.told[4]]
    predicted = {"weights": cut.weights - mask, "gradients": cut.weights - mask, "optimizer": cut.optimizer}
    for what, size in predicted.items():
        assert sum(rank[what] for rank in sharded) == expected[what]
        assert max(rank[what] for rank in sharded) == pytest.approx(size, rel=0.02)


def held_by_two(runs: Runs, way: str) -> list[dict[str, Any]]:
    return [rank[f"held ['{way}']"] for rank in runs.told[2]]


def rank_of_two(way: str) -> Rank:
    return Rank(
        shape=DEEP.decoder,
        plan=plan_of((way,)),
        micro_batch=1,
        layout=Layout(gpus=2, accumulation=PIECES),
        zero=ZERO[way],
        optimizer=find_optimizer(plan_of((way,)).optimizer),
        first=True,
        last=True,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_step_sends_what_is_predicted(runs: Runs, way: str) -> None:
    """Calls and bytes of three micro batches: DDP and `fsdp-keep` reduce once, `fsdp` in every pass. `fsdp-whole`
    gathers once too, all of it, and averages what it does not cut."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for one in traffic(rank_of_two(way), gpus_per_node=2):
        calls[one.kind] += one.calls
        sizes[one.kind] += round(one.bytes)
    units = DEEP.decoder.layers + 1
    reductions = {"ddp": calls[ALL_REDUCE], "fsdp": PIECES * units, "fsdp-keep": units, "fsdp-whole": 2}[way]
    for rank in held_by_two(runs, way):
        assert rank["sent"] == {kind: [calls[kind], sizes[kind]] for kind in calls}
        assert sum(rank["sent"].get(kind, [0])[0] for kind in (ALL_REDUCE, REDUCE_SCATTER)) == reductions


@pytest.mark.parametrize(("way", "share"), [("fsdp", 2), ("fsdp-keep", 1), ("fsdp-whole", 1)])
def test_gradients_between_micro_batches_are_what_is_predicted(runs: Runs, way: str, share: int) -> None:
    """A rank's share of them, or all: up to rows that cannot be shared evenly, and the numbers of the losses."""
    predicted = rank_of_two(way).standing_gradients
    assert predicted == 4 * parameters(DEEP.decoder, tied=False).total // share
    for rank in held_by_two(runs, way):
        first, *others = rank["within"]["before"]
        assert first == 0
        assert others == pytest.approx([predicted] * (PIECES - 1), rel=0.02)


def test_weights_are_given_back_after_a_forward_unless_they_are_kept(runs: Runs) -> None:
    """The most that is whole at a time: two blocks at most, or all of them, and what lies outside the blocks. At the
    end of a forward that is there alone, or with all blocks."""
    layers, layer, outer = DEEP.decoder.layers, 4 * rank_of_two("fsdp").layer, 4 * rank_of_two("fsdp").outer
    predicted = {way: rank_of_two(way).gathered_weights(layers) for way in ("fsdp", "fsdp-keep")}
    assert predicted["fsdp-keep"] - predicted["fsdp"] == (layers - 2) * layer
    for frugal, kept in zip(held_by_two(runs, "fsdp"), held_by_two(runs, "fsdp-keep"), strict=True):
        assert kept["within"]["most whole"] == pytest.approx(predicted["fsdp-keep"], rel=0.01)  # 257 rows are 2 x 129
        assert outer + layer <= frugal["within"]["most whole"] <= 1.01 * predicted["fsdp"]
        assert kept["within"]["forward"] == pytest.approx([outer + layers * layer] * PIECES, rel=0.01)
        assert frugal["within"]["forward"] == pytest.approx([outer] * PIECES, rel=0.01)


def test_a_model_that_is_gathered_as_one_is_there_in_all_pieces(runs: Runs) -> None:
    """Of a block four biases and the norms' four vectors are never cut."""
    one, C, F = rank_of_two("fsdp-whole"), DEEP.decoder.d_model, DEEP.decoder.d_ff
    assert one.uncut == DEEP.decoder.layers * (3 * C + C + F + C + 4 * C) + 2 * C
    predicted = one.gathered_weights(0) + 4 * one.uncut
    assert predicted == 4 * parameters(DEEP.decoder, tied=False).total
    for rank in held_by_two(runs, "fsdp-whole"):
        assert rank["within"]["most whole"] == pytest.approx(predicted, rel=0.01)
        assert rank["within"]["forward"] == pytest.approx([predicted] * PIECES, rel=0.01)


def test_the_peak_of_an_update_of_a_model_that_is_gathered_as_one_is_predicted(runs: Runs) -> None:
    """Beside what a rank holds all the time: whole weights, whole gradients and activations. Nothing that was sent is
    still there in a forward, which would be as much as the weights again."""
    shape, plan, predicted = DEEP.decoder, plan_of(("fsdp-whole",)), []
    always = 4 * rank_of_two("fsdp-whole").uncut  # which count as whole weights
    for pieces in (1, PIECES):
        layout = Layout(gpus=2, accumulation=pieces)
        memory = predict_memory(shape, plan, micro_batch=1, layout=layout, zero=ZERO["fsdp-whole"])
        predicted.append(memory.allocated - WORKSPACES - memory.weights - memory.optimizer + always)
    for rank in held_by_two(runs, "fsdp-whole"):
        assert rank["peaks"] == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("way", ["fsdp", "fsdp-keep", "fsdp-whole"])
def test_a_model_that_is_cut_is_built_in_a_ranks_share_of_memory(runs: Runs, way: str) -> None:
    """And one whole tensor at a time with this rank's rows of it, from which its share is taken; DDP takes it all."""
    whole, largest = 4 * parameters(DEEP.decoder, tied=False).total, 4 * rank_of_two(way).largest
    mask, uncut = DEEP.decoder.sequence**2, 4 * rank_of_two(way).uncut
    for rank in held_by_two(runs, way):
        left, peak = rank["building"]["left"], rank["building"]["peak"]
        assert left == pytest.approx((whole + uncut) / 2 + mask, rel=0.02)
        assert left + largest <= peak <= left + 1.6 * largest < 0.8 * whole
    assert all(rank["building"]["peak"] >= whole for rank in held_by_two(runs, "ddp"))


def test_a_checkpoint_of_many_ranks_is_a_model(runs: Runs) -> None:
    """What `redline sample` and `redline export` read."""
    _, model = load_model(runs.at("fsdp-keep-padded"))
    saved = last_of(runs.at("fsdp-keep-padded")).tensors()
    assert {path.suffix for path in last_of(runs.at("fsdp")).path.iterdir()} >= {".distcp", ".json"}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[f"model.{name}"][: parameter.size(0)])


def test_a_damaged_part_is_passed_over(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.at("fsdp"), tmp_path / "run")
    part = next((tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}").glob("__3_*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    notes: list[str] = []
    order = replace(runs.orders["fsdp"], out=str(tmp_path / "run"))
    train(order, lambda kind, **fields: notes.append(fields["text"]) if kind == "note" else None)
    assert any(f"passed over step-{STEPS:08d}: {part.name}" in note for note in notes)
    assert "resumed from step-00000002 at step 2" in notes


@dataclass
class Planted:
    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def called(module: str, name: str, argument: str) -> bytes:
    """A pickle of protocol 4 that calls a function, which may be named through its module's imports."""
    words = b"".join(pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name))
    what = pickle.BINUNICODE + struct.pack("<I", len(argument)) + argument.encode()
    return pickle.PROTO + b"\x04" + words + pickle.STACK_GLOBAL + what + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


LISTS = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize("way", ["by its name", "through a module that is let in", "as an entry of bytes"])
def test_a_pickle_in_a_checkpoint_runs_nothing(runs: Runs, tmp_path: Path, way: str) -> None:
    folder, ran = tmp_path / "step-00000004", tmp_path / "ran"
    shutil.copytree(last_of(runs.at("fsdp")).path, folder)
    if way == "by its name":
        planted, words = pickle.dumps(Planted(str(ran))), r"posix.mkdir has no place in a list of tensors"
    elif way == "through a module that is let in":
        planted, words = called(LISTS, "os.mkdir", str(ran)), f"{LISTS}.os.mkdir has no place"
    else:
        (folder / "bytes").write_bytes(pickle.dumps(Planted(str(ran))))
        size, index = (folder / "bytes").stat().st_size, MetadataIndex("model.w")
        entries: dict[str, Any] = {"model.w": BytesStorageMetadata()}
        planted = pickle.dumps(Metadata(entries, storage_data={index: _StorageInfo("bytes", 0, size)}))
        words = "BytesStorageMetadata has no place"
    (folder / METADATA_FILE).write_bytes(planted)
    with pytest.raises(UnusableError, match=words):
        open_sharded(folder).read_into({"model.w": torch.zeros(2)})
    assert not ran.exists()


def test_an_entry_of_a_checkpoint_is_a_tensor(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000004"
    shutil.copytree(last_of(runs.at("fsdp")).path, folder)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Metadata({"model.w": TensorProperties()})))  # type: ignore[dict-item]
    with pytest.raises(UnusableError, match="model.w is no tensor"):
        open_sharded(folder)
