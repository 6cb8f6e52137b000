"""A step of somebody's own under the profiler: its lines are found, its model is left as it was."""

from __future__ import annotations

import gzip
import inspect
import json
import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import redline
from redline.core.errors import UserError
from redline.core.profile import Finding
from redline.engine import profiling


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Few steps: nothing here depends on how well the times are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "WARMUP_STEPS_BETWEEN", (1, 2))
        patch.setattr(profiling, "TIMED_STEPS_BETWEEN", (2, 2))
        yield


class Waits(nn.Module):
    """With batch norm, whose averages move, dropout, which draws, and a planted wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        if x.sum().item() > 1e9:  # planted
            raise OverflowError
        return x


PLANTED = next(
    number
    for number, line in enumerate(inspect.getsource(inspect.getmodule(Waits)).splitlines(), 1)
    if "# planted" in line
)
BATCH = torch.ones(4, 8), torch.zeros(4, 8)


def prepared_one(*rungs: str) -> redline.Prepared:
    torch.manual_seed(0)
    return redline.prepare(Waits(), rungs, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))


@pytest.fixture(scope="module")
def found(short, tmp_path_factory) -> tuple[redline.Document, redline.Prepared, list[torch.Tensor]]:
    prepared = prepared_one("fused-adamw")
    prepared.step(BATCH)  # the optimizer has a state that must come back
    before = everything(prepared)
    document = redline.profile(prepared.step, batches=[BATCH], steps=2, out=tmp_path_factory.mktemp("trace") / "new")
    return document, prepared, before


def of_the_code(document: redline.Document) -> list[dict]:
    """Without what is a matter of time: how long a step of microseconds waits for its batch."""
    return [each for each in document["findings"] if each["kind"] != "loader-starvation"]


def everything(prepared: redline.Prepared) -> list[torch.Tensor]:
    """Weights, averages, the optimizer's state, the generator's."""
    state = [value for one in prepared.optimizer.state.values() for value in one.values()]
    held = [*prepared.step.model.state_dict().values(), *state, torch.get_rng_state()]
    return [torch.as_tensor(tensor).clone() for tensor in held]


def test_the_line_that_waits_is_found(found) -> None:
    assert [(each["kind"], each["file"], each["line"], each["function"]) for each in of_the_code(found[0])] == [
        ("synchronisation", os.path.relpath(__file__), PLANTED, "forward")
    ]


def test_groups_phases_and_modules_are_those_of_a_profile(found) -> None:
    document = found[0]
    step = document["step_seconds"]["median"]
    assert sum(each["seconds"] for each in document["groups"]) == pytest.approx(step)
    assert sum(each["seconds"] for each in document["phases"]) == pytest.approx(step)
    phases = {each["phase"]: each["seconds"] for each in document["phases"]}
    assert all(phases[name] > 0 for name in ("forward", "backward", "optimizer"))
    assert "layers.0" in {each["module"] for each in document["modules"]}
    flops = sum(each["flops"] or 0 for each in document["kernels"])
    forward = 2 * 4 * 8 * 32 * 2
    assert flops == 3 * forward - forward / 2  # the first layer's input needs no gradient


def test_model_optimizer_and_random_numbers_are_as_they_were(found) -> None:
    _, prepared, before = found
    after = everything(prepared)
    assert len(after) == len(before)
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours, theirs)
    assert prepared.step.steps_taken == 1
    assert all(parameter.grad is None for parameter in prepared.step.model.parameters())


def test_training_goes_on_as_if_nothing_had_been(found) -> None:
    _, prepared, _ = found
    other = prepared_one("fused-adamw")
    other.step(BATCH)
    torch.manual_seed(3)
    expected = [other.step(BATCH).item() for _ in range(2)]
    torch.manual_seed(3)
    assert [prepared.step(BATCH).item() for _ in range(2)] == expected


def test_it_is_shown_and_saved(found) -> None:
    document = found[0]
    text = str(document)
    assert f"test_api_profile.py:{PLANTED}" in " ".join(text.split())
    assert max(map(len, text.splitlines()[:-1])) <= 100  # the last is the trace's path, in one piece
    assert "to do first" not in text
    html = document._repr_html_()
    assert "Found in the code" in html
    assert "What to do next" not in html
    assert json.loads(json.dumps(document)) == document
    with gzip.open(document["trace"]) as file:
        assert json.load(file)["traceEvents"]


def test_what_takes_a_workload_is_null(found) -> None:
    for name in ("advice", "roofline", "rates", "tokens_per_second", "recipe"):
        assert found[0][name] is None
    assert found[0]["memory"]["predicted"] is None
    assert found[0]["memory"]["categories"]["weights"] == 4 * (8 * 32 + 32 + 2 * 32 + 32 * 8 + 8)


def test_a_function_without_arguments_is_a_step_too(monkeypatch) -> None:
    starved = Finding(kind="loader-starvation", detail="each step waits", per_step=1)
    monkeypatch.setattr(profiling, "starvation", lambda *_: (starved,))
    prepared = prepared_one()
    document = redline.profile(lambda: prepared.step(BATCH), steps=1)
    assert any("give model and optimizer" in note for note in document["notes"])
    assert {each["module"] for each in document["modules"]} <= {None}
    assert [each["line"] for each in document["findings"]] == [PLANTED]  # and nothing about a loader


def test_a_loop_of_ones_own_is_put_back_with_its_model_and_optimizer() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = model.weight.detach().clone()
    document = redline.profile(step, batches=[torch.ones(2, 8)], model=model, optimizer=optimizer, steps=1)
    assert torch.equal(model.weight, before)
    assert document["workload"]["name"].endswith("step")
    assert of_the_code(document) == []


def test_a_step_that_fails_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()

    def step() -> None:
        with torch.no_grad():
            model.weight.zero_()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        redline.profile(step, model=model)
    assert torch.equal(model.weight, before)


def test_batches_start_again_and_what_cannot_is_told() -> None:
    model = nn.Linear(8, 8)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    with pytest.raises(UserError, match="the batches came to an end"):
        redline.profile(step, batches=iter([torch.ones(2, 8)] * 3), model=model, steps=1)
    with pytest.raises(UserError, match="there are no batches"):
        redline.profile(step, batches=[], model=model, steps=1)
    with pytest.raises(UserError, match="the step takes a batch and there are none"):
        redline.profile(step, model=model, steps=1)
    with pytest.raises(UserError, match="a module and not a step"):
        redline.profile(model)
