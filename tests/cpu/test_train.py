"""Training that stops and goes on is training that never stopped: bit for bit, whatever stopped it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import redline.engine.session as session_module
from redline.cli import main
from redline.core.errors import UserError
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Workload
from redline.data.prepare import Preparation, prepare
from redline.engine.checkpoint import latest_checkpoint
from redline.engine.session import TrainOrder, load_model, train
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


def test_micro_batches_add_up_to_the_global_batch(order: Order) -> None:
    """The same updates in one pass and in four; only rounding tells them apart."""
    _, one = run(order(steps=4, name="one", micro_batch=4))
    _, four = run(order(steps=4, name="four", micro_batch=1))
    assert losses_of(four) == pytest.approx(losses_of(one), rel=1e-4)


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


def test_a_first_signal_asks_and_a_second_leaves() -> None:
    with asked_to_stop() as asked:
        assert asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
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
