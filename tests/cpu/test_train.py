"""Training that stops and goes on is training that never stopped: bit for bit, whatever stopped it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import redline.engine.checkpoint as checkpoint_module
import redline.engine.session as session_module
import redline.engine.train as train_module
from redline.cli import interrupt, main
from redline.commands.common import options_of
from redline.commands.train import add_train
from redline.commands.train_order import end_of_schedule, resumed_order
from redline.core.errors import UserError
from redline.core.layout import Layout
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.values import to_json
from redline.core.workload import Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import CheckpointStore, latest_checkpoint, load_from
from redline.engine.distributed import alone
from redline.engine.session import TrainOrder, load_model, train
from redline.engine.step import INITIAL_LOSS_SCALE, TrainStep
from redline.engine.train import asked_to_stop

Events = list[tuple[str, dict[str, Any]]]
Order = Callable[..., TrainOrder]


@pytest.fixture(scope="module")
def shards(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our licence, paragraph by paragraph, a fifth of them held out."""
    folder = tmp_path_factory.mktemp("shards")
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    prepare(Preparation(sources=(str(text),), out=folder / "data", tokenizer="bytes", val_fraction=0.2, processes=1))
    return folder / "data"


@pytest.fixture
def order(small: Workload, shards: Path, tmp_path: Path) -> Order:
    def make(*rungs: str, steps: int = 12, name: str = "run", **changes: Any) -> TrainOrder:
        settings = TrainSettings(
            micro_batch=2,
            global_batch=4,
            learning_rate=3e-3,
            budget=Budget(steps=steps),
            schedule_steps=12,
            warmup_steps=3,
            cycle_steps=5,
            eval_every=4,
            eval_batches=2,
            checkpoint_every=4,
        )
        recipe = Recipe(rungs=rungs, micro_batch=2)
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        return TrainOrder(
            workload=small,
            recipe=recipe,
            settings=replace(settings, **changes),
            device="cpu",
            data=str(shards),
            out=str(out),
        )

    return make


def run(order: TrainOrder) -> tuple[dict[str, Any], Events]:
    events: Events = []
    summary = train(order, lambda kind, **fields: events.append((kind, fields)))
    return summary, events


def saved(order: TrainOrder) -> dict[str, torch.Tensor]:
    loaded, notes = latest_checkpoint(Path(order.out) / "checkpoints")
    assert loaded is not None, notes
    return dict(loaded.tensors().items())


def losses_of(events: Events) -> list[float]:
    return [loss for kind, fields in events if kind == "cycle" for loss in fields["losses"]]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "rungs", [(), ("bf16", "flash", "padded-vocab", "tied-weights", "fused-adamw", "chunked-loss"), ("fp16",)], ids=str
)
def test_stopping_and_going_on_is_never_having_stopped(order: Order, rungs: tuple[str, ...]) -> None:
    whole = order(*rungs, name="whole")
    summary, events = run(whole)
    parts = order(*rungs, steps=7, name="parts")
    _, first = run(parts)
    again = order(*rungs, name="parts")
    resumed, rest = run(again)
    assert losses_of(first) + losses_of(rest) == losses_of(events)
    assert_same(saved(again), saved(whole))
    for name in ("updates", "documents", "loss", "validation_loss"):
        assert resumed[name] == summary[name], name
    assert resumed["tokens"]["train"] == summary["tokens"]["train"]
    assert (summary["ended"], summary["updates"]) == ("steps", 12)


def test_the_loss_falls_and_events_add_up(order: Order) -> None:
    summary, events = run(order(steps=12))
    losses = losses_of(events)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    assert [fields["updates"] for kind, fields in events if kind == "validation"] == [4, 8, 12]
    assert [fields["updates"] for kind, fields in events if kind == "checkpoint"] == [4, 8, 12]
    assert [fields["updates"] for kind, fields in events if kind == "cycle"] == [4, 8, 12]
    assert summary["tokens"]["train"] == 12 * 4 * 64
    last = [fields for kind, fields in events if kind == "cycle"][-1]
    assert last["tokens"] == summary["tokens"]["train"]
    assert 0 <= last["data_wait"] <= 1


@pytest.mark.parametrize(
    ("rungs", "layout", "joined", "told"),
    [
        (("fsdp",), Layout(ranks=2, tensor=2), True, "fsdp does nothing here"),
        (("fsdp",), Layout(), False, "fsdp does nothing here"),
        (("fsdp",), Layout(), True, "one rank"),
        (("fsdp",), Layout(ranks=2), True, None),
        (("ddp",), Layout(ranks=2, tensor=2), True, None),
        ((), Layout(), False, None),
    ],
)
def test_a_way_to_share_that_shares_nothing_says_so(
    order: Order, rungs: tuple[str, ...], layout: Layout, joined: bool, told: str | None
) -> None:
    ranks: Any = SimpleNamespace(lost_before=lambda: None, count=layout.ranks, layout=layout, joined=joined)
    asked = order(*rungs)
    notes = list(session_module.notes_of_ranks(asked, session_module.training_plan(asked.recipe, layout), ranks))
    found = [note for note in notes if "nothing" in note or "nobody" in note]
    assert [told] == [note[: len(told)] for note in found] if told else not found


def test_every_checkpoint_is_told_however_slow_the_disk(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is written for longer than the updates until the next is waited for then, and told."""
    write = CheckpointStore._write
    monkeypatch.setattr(CheckpointStore, "_write", lambda *words: time.sleep(0.5) or write(*words))
    _, events = run(order(steps=12))
    assert [fields["updates"] for kind, fields in events if kind == "checkpoint"] == [4, 8, 12]


def test_micro_batches_add_up_to_the_global_batch(order: Order) -> None:
    """The same updates in one pass and in four; only rounding tells them apart."""
    _, one = run(order(steps=4, name="one", micro_batch=4))
    _, four = run(order(steps=4, name="four", micro_batch=1))
    assert losses_of(four) == pytest.approx(losses_of(one), rel=1e-4)


@pytest.mark.parametrize("size", [2, 3], ids=["same-pieces", "a-shorter-piece"])
def test_the_validation_set_is_the_runs_whatever_the_micro_batch(
    order: Order, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The same sequences, each token once: a run that goes on with another micro batch is judged as it was."""
    seen, passes, loss = {}, [], TrainStep.loss
    monkeypatch.setattr(TrainStep, "loss", lambda step, piece: passes.append(piece.size(1)) or loss(step, piece))
    for micro_batch in (1, 2, 4):
        passes.clear()
        asked = order(steps=4, name=f"{size} in {micro_batch}", micro_batch=micro_batch, eval_batch=size)
        summary, _ = run(asked)
        seen[micro_batch] = summary["validation_loss"]
        assert summary["tokens"]["validation"] == 2 * size * asked.workload.shape.sequence
        assert max(passes) <= micro_batch, "memory may be the reason for it"
    assert seen[1] == pytest.approx(seen[4], rel=1e-5)
    assert seen[2] == pytest.approx(seen[4], rel=1e-5)


@pytest.mark.parametrize("remembered", [True, False], ids=["new", "without-the-field"])
def test_a_resumed_run_keeps_the_validation_set_it_began_with(order: Order, remembered: bool) -> None:
    begun = order(steps=1)
    record = {"kind": "train", "order": to_json(begun), "hardware": {}}
    assert record["order"]["settings"]["eval_batch"] == 2
    if not remembered:
        del record["order"]["settings"]["eval_batch"]
    (Path(begun.out) / "run.json").write_text(json.dumps(record))
    again = resumed_order(options_of(add_train, "train", {"resume": Path(begun.out), "micro_batch": 1}))
    assert (again.settings.micro_batch, again.settings.eval_batch) == (1, 2)


def test_a_ladder_is_not_resumed_as_a_training_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"kind": "ladder"}))
    assert main(["train", "--resume", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"problem: {tmp_path} is a ladder, not a training run\n" in told
    assert f"fix:     `redline ladder --resume {tmp_path}` goes on with it" in told


def test_a_finished_run_that_is_resumed_is_not_evaluated_again(order: Order) -> None:
    asked = order(steps=4, eval_every=3)  # its last checkpoint is due where no evaluation is
    first, _ = run(asked)
    again, events = run(asked)
    assert [kind for kind, _ in events if kind in ("cycle", "validation", "checkpoint")] == []
    for name in ("tokens", "validation_loss", "best_validation_loss", "updates"):
        assert again[name] == first[name], name


@pytest.mark.parametrize(("budget", "ended"), [(Budget(tokens=700), "tokens"), (Budget(minutes=1e-6), "minutes")])
def test_other_budgets_end_a_run_too(order: Order, budget: Budget, ended: str) -> None:
    summary, _ = run(order(budget=budget))
    assert summary["ended"] == ended
    if ended == "tokens":
        assert summary["updates"] == 3  # 256 tokens an update: the first to reach 700


def test_another_model_is_refused_with_the_difference(order: Order) -> None:
    run(order(steps=4))
    other = order(steps=8)
    wider = replace(other.workload, shape=replace(other.workload.shape, d_ff=512))
    with pytest.raises(UserError, match="d_ff") as caught:
        run(replace(other, workload=wider))
    assert "256" in str(caught.value)
    assert "512" in str(caught.value)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(order: Order) -> None:
    whole = order(name="whole")
    run(whole)
    broken = order(steps=8, name="broken")
    run(broken)
    newest = sorted((Path(broken.out) / "checkpoints").glob("step-*"))[-1]
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    _, events = run(order(name="broken"))
    notes = " ".join(fields["text"] for kind, fields in events if kind == "note")
    assert file.name in notes
    assert "resumed from step-00000004" in notes
    assert_same(saved(order(name="broken")), saved(whole))


def test_gradients_that_stay_no_numbers_stop_the_run_at_the_last_good_checkpoint(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session_module.build_step

    def poisoned(*words: Any, **more: Any) -> Any:
        step = real(*words, **more)
        loss_of = step.loss_of
        step.loss_of = lambda inputs, targets: loss_of(inputs, targets) * (torch.nan if step.steps_taken >= 6 else 1)
        return step

    monkeypatch.setattr(session_module, "build_step", poisoned)
    asked = order("fused-adamw", steps=40, most_skipped=3, eval_every=None)
    summary, events = run(asked)
    assert summary["ended"] == "diverged"
    assert "6 updates in a row" in summary["reason"]
    assert summary["checkpoint"] == str(Path(asked.out) / "checkpoints" / "step-00000008")
    assert [place for kind, fields in events if kind == "cycle" for place in fields["skipped_at"]] == list(range(7, 13))
    tensors = saved(asked)
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())


def test_a_checkpoint_is_judged_by_its_own_loss_alone(order: Order) -> None:
    """Evaluations at 4, 8 and 12, checkpoints at every third update: what was not evaluated has no figure."""
    asked = order(checkpoint_every=3, keep_last=9)
    _, events = run(asked)
    seen = {fields["updates"]: fields["loss"] for kind, fields in events if kind == "validation"}
    found = {one.step: one.metric for one in map(load_from, (Path(asked.out) / "checkpoints").glob("step-*"))}
    assert found == {3: None, 6: None, 9: None, 12: seen[12]}


def test_rotation_keeps_as_many_as_it_is_told(order: Order) -> None:
    asked = order(checkpoint_every=2, eval_every=None, keep_last=3, keep_best=0)
    run(asked)
    names = sorted(path.name for path in (Path(asked.out) / "checkpoints").glob("step-*"))
    assert names == ["step-00000008", "step-00000010", "step-00000012"]


def test_a_last_checkpoint_that_does_not_fit_ends_the_run_as_failed(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once, at once, with what is whole; the summary is there all the same."""
    real = checkpoint_module.write_checkpoint

    def full(folder: Path, step: int, files: Any) -> Path:
        if step > 4:
            raise OSError(28, "No space left on device", str(folder))
        return real(folder, step, files)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", full)
    asked = order()
    summary, events = run(asked)
    assert summary["ended"] == "failed"
    assert "step 12 was not written: No space left on device" in summary["reason"]
    assert summary["updates"] == 12
    assert Path(summary["checkpoint"]).name == "step-00000004"
    assert [fields["updates"] for kind, fields in events if kind == "checkpoint"] == [4]
    notes = [fields["text"] for kind, fields in events if kind == "note"]
    assert [f"step {step} was not written" in " ".join(notes) for step in (8, 12)] == [True, True]


def test_the_best_loss_is_the_lowest_and_skipped_updates_are_counted(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session_module.build_step

    def poisoned(*words: Any, **more: Any) -> Any:
        step = real(*words, **more)
        loss_of = step.loss_of
        step.loss_of = lambda *batch: loss_of(*batch) * (torch.nan if step.steps_taken in (5, 9) else 1)
        return step

    monkeypatch.setattr(session_module, "build_step", poisoned)
    summary, events = run(order("fused-adamw"))
    losses = [fields["loss"] for kind, fields in events if kind == "validation"]
    assert summary["best_validation_loss"] == min(losses) < max(losses)
    assert summary["skipped"] == 2
    assert [fields["skipped"] for kind, fields in events if kind == "cycle"] == [0, 1, 2]


def test_waiting_for_data_is_the_share_that_was_waited(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that says it stood still for half a second at every batch."""
    real = session_module.open_loader

    class Slow:
        def __init__(self, inner: Any) -> None:
            self.inner, self.batches = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        @property
        def waited_seconds(self) -> float:
            return 0.5 * self.batches

        def __next__(self) -> torch.Tensor:
            self.batches += 1
            return next(self.inner)

    monkeypatch.setattr(session_module, "open_loader", lambda *words: Slow(real(*words)))
    _, events = run(order(steps=4, eval_every=None))
    (cycle,) = [fields for kind, fields in events if kind == "cycle"]
    assert cycle["data_wait"] == pytest.approx(0.5 * 4 / cycle["seconds"])


def test_the_scaler_goes_on_where_it_was(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """One overflow halves the scale; a resumed run that began with the first scale again would not know."""
    real, poison = session_module.build_step, {3}

    def poisoned(*words: Any, **more: Any) -> Any:
        step = real(*words, **more)
        loss_of = step.loss_of
        step.loss_of = lambda *batch: loss_of(*batch) * (torch.inf if step.steps_taken in poison else 1)
        steps.append(step)
        return step

    steps: list[Any] = []
    monkeypatch.setattr(session_module, "build_step", poisoned)
    run(order("fp16", steps=8))
    run(order("fp16", steps=12))
    first, again = (step.scaler.get_scale() for step in steps)
    assert again == first < INITIAL_LOSS_SCALE


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_is_switched_on_when_it_is_asked_for(order: Order, asked: bool) -> None:
    try:
        run(order(steps=1, eval_every=None, deterministic=asked))
        assert torch.are_deterministic_algorithms_enabled() is asked
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_second_interrupt_does_not_wait_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    monkeypatch.setattr(checkpoint_module, "write_checkpoint", lambda *_: written.wait())

    def interrupted() -> None:
        with CheckpointStore(tmp_path) as store:
            store.save(step=1, tensors={"model.x": torch.zeros(2)}, state={}, identity={})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not written.is_set()  # it would have waited for ever
    CheckpointStore(tmp_path).close()  # and the folder is free
    written.set()


def test_a_run_begins_with_the_weights_of_a_folder(
    order: Order, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = order("padded-vocab", "tied-weights", steps=4, name="first")
    run(first)
    assert main(["export", first.out, "--out", str(tmp_path / "hf")]) == 0
    going_on = replace(order("tied-weights", steps=1, name="second"), init=str(tmp_path / "hf"))
    _, events = run(going_on)
    _, fresh = run(order("tied-weights", steps=1, name="third"))
    assert losses_of(events)[0] < losses_of(fresh)[0] - 0.1
    shutil.copytree(tmp_path / "hf", tmp_path / "kept")
    shutil.rmtree(tmp_path / "hf")  # a run that goes on has its own weights
    longer = replace(going_on, settings=replace(going_on.settings, budget=Budget(steps=2)))
    assert run(longer)[0]["updates"] == 2
    shutil.move(tmp_path / "kept", tmp_path / "hf")
    assert main(["sample", str(tmp_path / "hf"), "--tokens", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]) <= 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "a loader process died"),
        (ConnectionResetError(104, "Connection reset by peer"), "a loader process died"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory with micro batches of 2"),
    ],
    ids=["worker", "server", "memory"],
)
def test_what_is_nobodys_mistake_ends_in_a_summary(
    order: Order, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    real = session_module.build_step

    def failing(*given: Any, **more: Any) -> Any:
        step = real(*given, **more)
        loss_of = step.loss_of

        def loss(*batch: torch.Tensor) -> torch.Tensor:
            if step.steps_taken >= 6:
                raise error
            return loss_of(*batch)

        step.loss_of = loss
        return step

    monkeypatch.setattr(session_module, "build_step", failing)
    ranks, told = alone(), []
    monkeypatch.setattr(ranks, "report_failure", told.append)
    summary = train(order(), lambda *_, **__: None, ranks)
    assert summary["ended"] == "failed"
    assert words in summary["reason"]
    assert told == [f"rank 0 failed: {summary['reason']}"], "those that torchrun starts next know it from this"
    assert Path(summary["checkpoint"]).name == "step-00000004"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--learning-rate", "0"), "--learning-rate is 0"),
        (("--learning-rate", "nan"), "--learning-rate is nan"),
        (("--learning-rate", "-1"), "--learning-rate is -1"),
        (("--warmup-steps", "-5"), "--warmup-steps is -5"),
        (("--keep-last", "0"), "--keep-last is 0"),
        (("--steps", "0"), "--steps is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_stop_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    out = tmp_path / "run"
    assert main(["train", "tiny", "--device", "cpu", "--steps", "1", *words, "--out", str(out)]) == 2
    assert f"problem: {problem}" in capsys.readouterr().err
    assert not out.exists()


def test_a_resumed_run_is_told_that_its_schedule_ends(order: Order) -> None:
    begun = order()
    per_update = begun.settings.global_batch * begun.workload.decoder.sequence

    def told(**budget: float) -> str | None:
        return end_of_schedule(replace(begun, settings=replace(begun.settings, budget=Budget(**budget))))

    assert end_of_schedule(begun) is None
    assert told(tokens=12 * per_update) is None
    assert "cosine schedule ends at step 12" in (told(steps=40) or "")
    assert "ends at step 12" in (told(minutes=1) or "")
    assert "ends at step 12" in (told(tokens=12 * per_update + 1) or "")


def test_a_first_signal_asks_and_a_second_ctrl_c_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked_to_stop() as asked:
        assert asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == "interrupted"
        os.kill(os.getpid(), signal.SIGINT)  # the same request, to the process and to its group
        monkeypatch.setattr(train_module, "ONE_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)  # a job manager that repeats itself still wants a checkpoint
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_checkpoint_is_finished_though_the_failed_rank_is_told_to_end(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent tells it as soon as another rank is lost, and then waits for half a minute."""
    step, wait, taken = TrainStep.__call__, CheckpointStore.wait, []

    def fails_later(self: TrainStep, batch: Any) -> torch.Tensor:
        taken.append(batch)
        if len(taken) == 2:
            raise ArithmeticError("a rank is gone")
        return step(self, batch)

    def told_meanwhile(self: CheckpointStore) -> UserError | None:
        if len(taken) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(self)

    monkeypatch.setattr(TrainStep, "__call__", fails_later)
    monkeypatch.setattr(CheckpointStore, "wait", told_meanwhile)
    wanted = order(steps=3, cycle_steps=1, checkpoint_every=1, eval_every=None)
    before = signal.signal(signal.SIGTERM, interrupt)  # as the command line has it
    ranks = alone()
    try:
        with pytest.raises((ArithmeticError, KeyboardInterrupt)) as caught:
            train(wanted, lambda *_, **__: None, ranks)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.type is ArithmeticError
    assert ranks.asked, "a rank that waits for the agent's signal next must know that it has come"
    loaded, _ = latest_checkpoint(Path(wanted.out) / "checkpoints")
    assert loaded is not None
    assert loaded.step == 1


@pytest.mark.parametrize("asked", [True, False], ids=["asked-to-stop", "by-itself"])
def test_a_loader_that_dies_by_the_signal_that_stops_the_training_is_no_failure(
    order: Order, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """As `timeout` or a job manager ends a whole group. The third batch never comes; two updates are saved."""
    monkeypatch.setattr(train_module, "ONE_REQUEST_SECONDS", 0.0)
    opened = session_module.open_loader

    class Dying:
        def __init__(self, loader: Any) -> None:
            self.loader, self.given = loader, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.loader, name)

        def __next__(self) -> Any:
            self.given += 1
            if self.given == 3:
                if asked:
                    os.kill(os.getpid(), signal.SIGTERM)
                raise EOFError("unexpected EOF")
            return next(self.loader)

    monkeypatch.setattr(session_module, "open_loader", lambda *words: Dying(opened(*words)))
    wanted = order(steps=5, cycle_steps=1, eval_every=None)
    found = train(wanted, lambda *_, **__: None)
    assert found["ended"] == ("interrupted" if asked else "failed")
    assert found["updates"] == 2
    assert (found["checkpoint"] is not None) is asked


def test_data_that_prove_broken_leave_no_run(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Path(shutil.copytree(shards, tmp_path / "broken"))
    shard = next(broken.glob("train*"))
    text = bytearray(shard.read_bytes())
    text[-2:] = b"\xff\xff"
    shard.write_bytes(text)
    out = tmp_path / "run"
    assert main(["train", "tiny", "--data", str(broken), "--steps", "1", "--device", "cpu", "--out", str(out)]) == 2
    assert shard.name in capsys.readouterr().err
    assert not out.exists()


def test_a_checkpoint_is_sampled_and_exported(order: Order, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = order("padded-vocab", "tied-weights", steps=4)
    run(asked)
    assert main(["sample", asked.out, "--prompt", "The licence", "--tokens", "8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert 0 < len(shown["tokens"]) <= 8
    assert main(["export", asked.out, "--out", str(tmp_path / "hf")]) == 0
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    adapter, model = load_model(Path(asked.out))
    tokens = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[..., :257], theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert adapter.workload.tokenizer == "bytes"
    assert theirs.config.vocab_size == 257
    assert main(["export", asked.out, "--out", str(tmp_path / "hf")]) == 2
    assert main(["sample", str(tmp_path)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err


# --- the command ------------------------------------------------------------------------------------------------------


def redline(*words: object, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "redline", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def train_words(out: Path) -> list[object]:
    words = [
        "train",
        "tiny",
        "--device",
        "cpu",
        "--steps",
        "100000",
        "--out",
        out,
        "--recipe",
        out.parent / "recipe.json",
    ]
    return [*words, "--checkpoint-every", "5", "--cycle", "5", "--eval-every", "1000000", "--schedule", "constant"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),  # one handler: test_a_first_signal_asks...
        signal.SIGKILL,
    ],
    ids=lambda number: number.name,
)
def test_a_run_that_is_ended_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    """Asked, it saves and says how to go on; killed, it loses what came after the last checkpoint."""
    (tmp_path / "recipe.json").write_text('{"rungs": ["flash", "tied-weights", "fused-adamw"], "micro_batch": 1}')
    out = tmp_path / "run"
    process = redline(*train_words(out))
    limit = time.monotonic() + 120
    while len(list((out / "checkpoints").glob("step-*[0-9]"))) < 2 and time.monotonic() < limit:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    loaded, _ = latest_checkpoint(out / "checkpoints")
    assert loaded is not None
    if number != signal.SIGKILL:
        assert process.returncode == 130, stderr
        assert "--resume" in stdout
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert loaded.step == [line["updates"] for line in lines if line["kind"] == "cycle"][-1]
        assert "This run was interrupted" in (out / "report.html").read_text()
    again = redline("train", "--resume", out, "--steps", loaded.step + 5, "--json")
    stdout, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr
    assert json.loads(stdout)["updates"] == loaded.step + 5
    assert f"resumed from step-{loaded.step:08d}" in stderr


# --- out of memory ----------------------------------------------------------------------------------------------------

CUTS, RECOMPUTED = "--parallel fsdp or --tensor N with several GPUs", "a --recipe with checkpointing"
SHORTER = "a new run can have a shorter --sequence"


@pytest.mark.parametrize(
    ("rungs", "layout", "device", "said"),
    [
        ((), Layout(), "cuda", (CUTS, RECOMPUTED, SHORTER)),
        ((), Layout(), "cpu", (RECOMPUTED, SHORTER)),
        (("muon", "checkpointing"), Layout(), "cuda", (SHORTER,)),
        (("fsdp",), Layout(ranks=2), "cuda", ("--tensor N with several GPUs", RECOMPUTED, SHORTER)),
        (("fsdp", "tensor-parallel"), Layout(ranks=4, tensor=2), "cuda", (RECOMPUTED, SHORTER)),
    ],
    ids=["plain", "cpu", "muon", "fsdp", "tensor"],
)
def test_out_of_memory_at_one_sequence_names_what_can_be_done(order: Order, rungs, layout, device, said) -> None:
    one = replace(order(*rungs, micro_batch=1), device=device)
    plan = session_module.training_plan(one.recipe, layout)
    reason = session_module.known_failure(torch.OutOfMemoryError("CUDA out of memory"), one, plan)
    assert reason is not None
    assert reason.startswith("out of memory with micro batches of 1 sequence (")
    parts = reason.partition("(")[2].removesuffix(")").split("; ")
    assert len(parts) == len(said)
    assert all(part.startswith(words) for part, words in zip(parts, said, strict=True))


def test_out_of_memory_at_two_sequences_proposes_one(order: Order) -> None:
    two = order()
    reason = session_module.known_failure(torch.OutOfMemoryError(""), two, session_module.training_plan(two.recipe))
    assert reason == "out of memory with micro batches of 2 sequences (a smaller --micro-batch makes the same updates)"
