"""Training on text that was never prepared: it stops and goes on in the middle of an epoch, to the last bit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli import main
from redline.core.errors import UserError
from redline.core.recipe import Recipe
from redline.core.training import Budget, TrainSettings
from redline.core.workload import Workload
from redline.data import survey as survey_module
from redline.data.prepare import is_val
from redline.data.sources import document_key
from redline.data.survey import Survey, open_text, survey
from redline.data.tokenizer import tokenizer
from redline.engine import session
from redline.engine.checkpoint import Loaded, latest_checkpoint
from redline.engine.session import TrainOrder, train

SETTINGS = TrainSettings(
    micro_batch=2,
    global_batch=4,
    learning_rate=3e-3,
    budget=Budget(steps=12),
    schedule_steps=12,
    warmup_steps=3,
    cycle_steps=5,
    eval_every=4,
    eval_batches=2,
    checkpoint_every=4,
)


DOCUMENTS = [
    f"document {number} says {number * number} and no more than that, but says it twice" for number in range(30)
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twelve updates of 256 tokens are more than an epoch of it."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[1:]))
    (folder / "b.txt").write_text(DOCUMENTS[0])
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No workers: their start takes longer than the training."""
    monkeypatch.setattr(session, "STREAM_WORKERS", 0)
    monkeypatch.setattr(survey_module, "SMALLEST_PART", 400)


@pytest.fixture
def order(small: Workload, corpus: Path, tmp_path: Path, here: None) -> TrainOrder:
    fields = {"tokenizer": "bytes", "val_fraction": 0.3, "val_tokens": 2 * 2 * 64 + 1}
    survey(Survey(sources=(str(corpus),), out=tmp_path / "text", **fields))
    return TrainOrder(
        workload=small,
        recipe=Recipe(rungs=(), micro_batch=2),
        settings=SETTINGS,
        device="cpu",
        data=str(tmp_path / "text"),
        out=str(tmp_path / "whole"),
    )


def run(order: TrainOrder, steps: int = 12) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    asked = replace(order, settings=replace(order.settings, budget=Budget(steps=steps)))
    summary = train(asked, lambda kind, **fields: events.append({"kind": kind, **fields}))
    return summary, events


def newest(order: TrainOrder) -> Loaded:
    loaded, notes = latest_checkpoint(Path(order.out) / "checkpoints")
    assert loaded is not None, notes
    return loaded


def losses_of(events: list[dict[str, Any]]) -> list[float]:
    return [loss for event in events if event["kind"] == "cycle" for loss in event["losses"]]


def test_stopping_in_an_epoch_and_going_on_is_never_having_stopped(
    order: TrainOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, events = run(order)
    parts = replace(order, out=str(tmp_path / "parts"))
    _, first = run(parts, steps=7)
    monkeypatch.setattr(session, "STREAM_WORKERS", 2)  # who reads the text is nobody's business
    resumed, rest = run(parts)
    assert losses_of(first) + losses_of(rest) == losses_of(events)
    one, other = newest(order), newest(parts)
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
    assert one.state["data"] == other.state["data"]
    for name in ("updates", "documents", "loss", "validation_loss", "epoch"):
        assert resumed[name] == summary[name], name
    assert first[-1]["kind"] == "checkpoint"
    cycles = [event for event in first if event["kind"] == "cycle"]
    assert 0 < cycles[-1]["epoch"] != round(cycles[-1]["epoch"])  # it was in the middle of one
    assert summary["epoch"] > 1
    assert summary["documents"] > 10
    assert [event["updates"] for event in events if event["kind"] == "validation"] == [4, 8, 12]
    assert all(0 <= event["data_wait"] <= 1 for event in cycles)


def test_only_documents_of_train_are_trained_on(order: TrainOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the first epoch are all of them and none of the others."""
    seen: list[torch.Tensor] = []
    real = session.TextStream.__next__

    def watched(stream: session.TextStream) -> torch.Tensor:
        seen.append(real(stream))
        return seen[-1]

    monkeypatch.setattr(session.TextStream, "__next__", watched)
    run(order, steps=8)
    text, end = open_text(Path(order.data)), "<|endoftext|>"
    count = text.index["text_bytes"]["train"] + text.index["documents"]["train"]
    inputs = torch.cat([batch[0].flatten() for batch in seen])[:count].tolist()
    *documents, rest = tokenizer("bytes").decode(inputs).split(end)
    held_out = tokenizer("bytes").decode(text.val.gather([0], text.val.tokens)[0].tolist()).split(end)
    assert rest == ""
    assert sorted(documents) == sorted(text for text in DOCUMENTS if not is_val(document_key(text.encode()), 0.3))
    assert set(held_out[:-1]) <= set(DOCUMENTS) - set(documents)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda corpus: (corpus / "b.txt").write_text(DOCUMENTS[0].upper()),
            r"b\.txt was written since and holds other words",
        ),
        (lambda corpus: (corpus / "c.txt").write_text("more"), r"c\.txt is new"),
    ],
)
def test_another_text_is_refused_with_the_difference(order: TrainOrder, corpus: Path, change: Any, text: str) -> None:
    run(order, steps=1)
    change(corpus)
    with pytest.raises(UserError, match=text):
        run(order, steps=2)


def test_a_text_that_was_surveyed_anew_is_another_run(order: TrainOrder, corpus: Path) -> None:
    run(order, steps=1)
    (corpus / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[2:]))
    survey(Survey(sources=(str(corpus),), out=Path(order.data), tokenizer="bytes", val_fraction=0.3, val_tokens=257))
    with pytest.raises(UserError, match=r"data\.documents\.train: \d+ there, \d+ here; data\.bytes of text\.train"):
        run(order, steps=2)


def test_a_touched_file_is_the_same_text(order: TrainOrder, corpus: Path) -> None:
    run(order, steps=1)
    os.utime(corpus / "b.txt")
    summary, events = run(order, steps=2)
    assert summary["updates"] == 2
    assert any("1 of 2 files were modified" in event["text"] for event in events if event["kind"] == "note")


def test_the_command_streams_and_goes_on(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text('{"rungs": [], "micro_batch": 1}')
    out, recipe = str(tmp_path / "run"), str(tmp_path / "recipe.json")
    words = ["train", "tiny", "--device", "cpu", "--recipe", recipe, "--out", out, "--json", "--val-fraction", "0.3"]
    assert main([*words, "--steps", "2", "--data", str(corpus), "--stream"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 2
    assert main(["train", "--resume", out, "--stream"]) == 2
    assert "--stream cannot change in a resumed run" in capsys.readouterr().err
    assert main(["train", "--resume", out, "--steps", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 3
