"""The plain model's first step, left by one row for the next."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.job import Job
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.engine import kept, measure
from redline.engine.equivalence import Expected
from redline.engine.kept import kept_reference
from redline.engine.measure import Bench, expected_of
from redline.rungs import plan_of

QUESTION = {"workload": "tiny", "micro_batch": 4}


def an_answer(shift: float = 0.0) -> Expected:
    columns = torch.arange(6.0).view(2, 3).t() + shift  # not contiguous: of a convolution they may not be
    return Expected(
        loss=4.0 + shift,
        gradients={"a.weight": columns, "b": torch.tensor(2.0)},
        sizes={"a.weight": 3.0, "b": 1e-30},
        noise={"a.weight": 1e-7, "b": 0.0},
        swing={},
        weights={"a.weight": columns + 1, "b": torch.tensor(math.nan)},
        update_norms={"a.weight": math.inf, "b": math.nan},
        yardstick_errors={"a.weight": 0.1 + 0.2, "b": 0.0},
        yardstick_error=0.25,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return torch.equal(*(torch.as_tensor(each, dtype=torch.float64).nan_to_num(nan=-7.0) for each in (one, other)))


def never() -> Expected:
    raise AssertionError("it was to be found")


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    made = kept_reference(tmp_path / "new", QUESTION, an_answer)
    found = kept_reference(tmp_path / "new", QUESTION, never)
    for field in fields(Expected):
        one, other = getattr(made, field.name), getattr(found, field.name)
        assert set(one) == set(other) if isinstance(one, dict) else True
        assert same({name: other[name] for name in one} if isinstance(one, dict) else other, one), field.name
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".safetensors"]


def test_another_question_has_another_answer(tmp_path: Path) -> None:
    kept_reference(tmp_path, QUESTION, an_answer)
    other = kept_reference(tmp_path, {**QUESTION, "micro_batch": 8}, lambda: an_answer(1.0))
    assert (other.loss, kept_reference(tmp_path, QUESTION, never).loss) == (5.0, 4.0)


@pytest.mark.parametrize("damage", [lambda text: text[:-8], lambda text: b"", lambda text: b"?" * len(text)])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept_reference(tmp_path, QUESTION, an_answer)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert kept_reference(tmp_path, QUESTION, lambda: an_answer(1.0)).loss == 5.0
    assert kept_reference(tmp_path, QUESTION, never).loss == 5.0


def test_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "save_file", full)
    assert kept_reference(tmp_path, QUESTION, an_answer).loss == 4.0
    assert not list(tmp_path.iterdir()), "half a file takes room that others need"


def test_a_disk_with_little_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda _: usage)
    assert kept_reference(tmp_path, QUESTION, an_answer).loss == 4.0
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept() -> None:
    assert kept_reference(None, QUESTION, an_answer).loss == 4.0
    assert kept_reference(None, QUESTION, lambda: an_answer(1.0)).loss == 5.0


def test_rows_share_it_where_they_are_held_against_the_same(
    small: Workload, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    def make(workload: Workload, reference: Any, plan: Any, *, micro_batch: int, **_: Any) -> Expected:
        made.append((plan.precision, micro_batch))
        return an_answer()

    monkeypatch.setattr(measure, "reference_gradients", make)

    def ask(*rungs: str, micro_batch: int = 4, workload: Workload = small) -> None:
        recipe = Recipe(rungs=rungs, micro_batch=micro_batch)
        job = Job(workload=workload, recipe=recipe, device="cpu", tokens=tokens.name)
        bench = Bench(
            job=job, tokens=tokens, device=torch.device("cpu"), report=lambda *_: None, references=tmp_path / "kept"
        )
        expected_of(bench, plan_of(rungs))

    ask("flash")
    ask("flash", "fused-adamw")
    assert made == [("fp32", 4)]
    ask("bf16")
    ask("bf16", "flash", "compile")
    assert made[1:] == [("bf16", 4)]
    ask("bf16", micro_batch=8)
    ask("bf16", "tied-weights")  # another published model: the reference is tied too
    ask("bf16", workload=replace(small, seed=1))
    assert made[2:] == [("bf16", 8), ("bf16", 4), ("bf16", 4)]
