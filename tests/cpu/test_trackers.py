"""Trackers are told what metrics.jsonl is told; `redline train` tells log, page and tracker alike; report redraws."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

import redline.engine.session as session_module
import redline.engine.trackers as trackers
import redline.search.launch as launch
from redline.cli import main
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.engine.trackers import SCALARS, TensorBoard, Tracker, TrackerFeed, check_tracker
from redline.engine.train import Trainer
from redline.rungs.ladder import NoSync


def cycle(updates: int, **changes: Any) -> dict[str, Any]:
    fields = dict.fromkeys(SCALARS, 1.0) | {"losses": [1.0] * 5, "gradient_norms": [2.0, 3.0], "updates": updates}
    return {**fields, **changes}


class Heard(Tracker):
    """Another tracker is one class: this one remembers."""

    package = "json"  # is installed
    newest: Heard

    def __init__(self, run: Path) -> None:
        self.told: list[Any] = []
        Heard.newest = self

    def begin(self, updates: int) -> None:
        self.told.append(("begin", updates))

    def scalars(self, figures: Mapping[str, float], updates: int) -> None:
        self.told.append((updates, dict(figures)))

    def text(self, name: str, text: str, updates: int) -> None:
        self.told.append((updates, text))

    def close(self) -> None:
        self.told.append(("close", None))


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_what_was_told(tmp_path: Path) -> None:
    feed = TrackerFeed(TensorBoard(tmp_path))
    feed("session", command="redline train")
    feed("cycle", **cycle(5, loss=4.5, mfu=None))
    feed("validation", updates=5, tokens=1280, loss=4.25)
    feed("sample", updates=5, text="words")
    feed("cycle", **cycle(10, loss=4.0, mfu=None))
    feed.close()
    found = read(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in found.Scalars("loss/train")] == [(5, 4.5), (10, 4.0)]
    assert [(event.step, event.value) for event in found.Scalars("loss/validation")] == [(5, 4.25)]
    assert found.Scalars("training/gradient_norm")[0].value == 3.0
    names = set(SCALARS.values()) - {"speed/mfu"} | {"loss/validation", "training/gradient_norm"}
    assert set(found.Tags()["scalars"]) == names
    assert found.Tensors("sample/text_summary")[0].tensor_proto.string_val == [b"words"]


def test_tensorboard_forgets_what_a_killed_session_told_after_its_checkpoint(tmp_path: Path) -> None:
    first = TrackerFeed(TensorBoard(tmp_path))
    for updates in (5, 10, 15):
        first("cycle", **cycle(updates, loss=float(updates)))
    first.close()
    second = TrackerFeed(TensorBoard(tmp_path))
    second("cycle", **cycle(15, loss=99.0))  # five updates from the checkpoint at 10
    second.close()
    losses = [(event.step, event.value) for event in read(tmp_path / "tensorboard").Scalars("loss/train")]
    assert losses == [(5, 5.0), (10, 10.0), (15, 99.0)]


def test_a_tracker_that_is_not_installed_is_a_mistake_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert main(["train", "tiny", "--steps", "1", "--out", str(tmp_path / "run"), "--tracker", "tensorboard"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "problem: --tracker tensorboard needs the package tensorboard"
    assert "pip install tensorboard" in lines[2]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        check_tracker("tensorbord")


def test_a_tracker_that_fails_is_left_and_the_training_goes_on(tmp_path: Path) -> None:
    class Full(Heard):
        def scalars(self, figures: Mapping[str, float], updates: int) -> None:
            super().scalars(figures, updates)
            raise ConnectionError("the service is gone")

    tracker = Full(tmp_path)
    feed = TrackerFeed(tracker)
    feed("cycle", **cycle(5))
    feed("cycle", **cycle(10))
    feed.close()
    assert feed.trouble == "the service is gone"
    assert [told[0] for told in tracker.told] == ["begin", 5]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def train_command(
    tmp_path: Path, repository: Path, cpu: Hardware, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """redline train in this process, on our licence; a machine is not asked what it is."""
    monkeypatch.setattr(launch, "probe_machine", lambda device: (cpu, {"torch": torch.__version__}))
    (tmp_path / "recipe.json").write_text('{"rungs": ["no-sync", "flash", "fused-adamw"], "micro_batch": 1}')
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in paragraphs))

    def run(*words: object) -> int:
        return main(["train", *map(str, words), "--device", "cpu", "--json"])

    return run


def test_a_run_its_log_its_page_and_its_tracker_agree(
    tmp_path: Path, train_command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "heard", Heard)
    monkeypatch.setattr(session_module, "SAMPLE_TOKENS", 3)
    out = tmp_path / "run"
    words = ["tiny", "--recipe", tmp_path / "recipe.json", "--data", tmp_path / "text.jsonl", "--out", out]
    words += ["--steps", 6, "--cycle", 2, "--eval-every", 4, "--sample-every", 4, "--batch-tokens", 512]
    assert train_command(*words, "--tracker", "heard") == 0
    summary = json.loads(capsys.readouterr().out)
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    cycles = [event for event in events if event["kind"] == "cycle"]
    assert [event["kind"] for event in events[:2] + events[-1:]] == ["session", "cycle", "end"]
    assert summary["tokens"]["train"] == 6 * 512 == cycles[-1]["tokens"]
    assert summary["checkpoint"] == str(out / "checkpoints" / "step-00000006")
    assert summary["page"] == str(out / "report.html")
    assert (summary["mfu"], summary["reason"]) == (None, None)  # of a CPU nobody knows the peak
    told = Heard.newest.told
    losses = [figures["loss/train"] for _, figures in told if isinstance(figures, dict) and "loss/train" in figures]
    assert losses == [event["loss"] for event in cycles]
    assert (told[0], told[-1]) == (("begin", 0), ("close", None))
    windows = cycles[0]["epoch"] and 2 * 2 / cycles[0]["epoch"]  # two sequences an update, two updates
    assert cycles[-1]["epoch"] == pytest.approx(12 / windows)
    assert cycles[1]["epoch_seconds"] == pytest.approx(windows / 4 * cycles[1]["seconds"])
    page = (out / "report.html").read_text()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").read_text() == page
    capsys.readouterr()
    assert train_command("--resume", out, "--steps", 8, "--micro-batch", 2) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 8
    document = json.loads((main(["report", str(out), "--json"]), capsys.readouterr().out)[1])
    assert [session["from_updates"] for session in document["sessions"]] == [0, 6]
    assert len(document["curves"]["loss"]) == 8


def test_resuming_with_what_would_change_an_update_is_refused(
    tmp_path: Path, train_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_command("--resume", tmp_path, "--warmup-steps", 3, "--batch-tokens", 512) == 2
    assert "--batch-tokens, --warmup-steps cannot change in a resumed run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "run.json is damaged"),
        ('{"kind": "train"}', "not a training run this version can read"),
        ('{"kind": "train", "order": {"colour": "red"}}', "not a training run this version can read"),
        ('{"workload": {}}', "is no training run"),
    ],
)
def test_a_folder_of_something_else_is_told(
    text: str, problem: str, tmp_path: Path, train_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert train_command("--resume", tmp_path) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--batch-tokens", "700"), "--batch-tokens 700 is not a multiple of 256"),
        (("--batch-tokens", "512", "--global-batch", "2"), "--global-batch and --batch-tokens"),
        (("--batch-tokens", "0"), "--batch-tokens"),
    ],
)
def test_a_batch_in_tokens_is_whole_micro_batches(
    words: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    train_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.json"
    assert train_command("tiny", "--recipe", recipe, "--steps", 1, "--out", tmp_path / "run", *words) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_out_of_memory_ends_a_run_in_words_and_leaves_a_page(
    tmp_path: Path, train_command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    real = session_module.build_step

    def small_device(*words: Any, **more: Any) -> Any:
        step = real(*words, **more)

        def loss_of(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        step.loss_of = loss_of
        return step

    monkeypatch.setattr(session_module, "build_step", small_device)
    out = tmp_path / "run"
    words = ["tiny", "--recipe", tmp_path / "recipe.json", "--data", tmp_path / "text.jsonl", "--out", out]
    assert train_command(*words, "--steps", 4) == 1
    caught = capsys.readouterr()
    assert "training stopped: out of memory with micro batches of 1 sequence (" in caught.err
    assert "smaller --micro-batch" not in caught.err
    assert json.loads(caught.out)["ended"] == "failed"
    assert "Training stopped: out of memory" in (out / "report.html").read_text()


class Waits(TorchDispatchMode):
    """Notes what would make the host wait for a device: reading a number, or asking how many are not zero."""

    NAMES = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, words: Any = (), more: Any = None) -> Any:
        if str(function).startswith(self.NAMES):
            self.calls.append(str(function))
        return function(*words, **(more or {}))


@pytest.mark.parametrize(("recipe", "waits"), [('["no-sync", "flash", "fused-adamw"]', False), ("[]", True)])
def test_nothing_in_a_cycle_reads_a_number_from_the_device(
    recipe: str, waits: bool, tmp_path: Path, train_command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's test has the last word; this one is by design. A recipe without no-sync shows that it can fail."""
    real, seen = Trainer._queue_updates, Waits()

    def watched(self: Trainer, *words: Any) -> Any:
        with seen:
            return real(self, *words)

    monkeypatch.setattr(Trainer, "_queue_updates", watched)
    monkeypatch.setattr(NoSync, "needs", lambda *_: None)  # on a CPU it is left out of a recipe: it gains nothing there
    (tmp_path / "recipe.json").write_text(f'{{"rungs": {recipe}, "micro_batch": 1}}')
    words = ["tiny", "--recipe", tmp_path / "recipe.json", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "run"]
    assert train_command(*words, "--steps", 4, "--cycle", 2) == 0
    assert bool(seen.calls) == waits, seen.calls
