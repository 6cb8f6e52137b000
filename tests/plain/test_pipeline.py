"""What can be said of a pipeline before one is built: which layouts there are, and how long its stages idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.commands.train_recipe import shared_recipe
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.layout import Layout, bubble
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.workload import Source
from redline.predict import communication
from redline.predict.parallel import Layout as Cut
from redline.report.training import pipeline_text
from redline.rungs import find_rung, plan_of
from redline.rungs.ladder import cuts_of
from redline.search.ranks import check_cuts
from redline.workloads import PRESETS

GPT2 = PRESETS["gpt2"]
RECIPE = Recipe(rungs=("ddp",), micro_batch=1)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "share"), [(1, 5, 0.0), (2, 1, 1 / 2), (4, 4, 3 / 7), (4, 16, 3 / 19)]
)
def test_the_bubble(stages: int, micro_batches: int, share: float) -> None:
    """By counting slots: every stage computes m of the m + p - 1 that pass from the first to the last."""
    assert bubble(stages, micro_batches) == pytest.approx(share)
    slots = [{(stage, stage + number) for number in range(micro_batches)} for stage in range(stages)]
    length = 1 + max(slot for busy in slots for _, slot in busy)
    assert 1 - len(slots[0]) / length == pytest.approx(share)
    assert communication.bubble(Cut(gpus=stages, pp=stages, accumulation=micro_batches)) == pytest.approx(share)


def test_the_bubble_in_words() -> None:
    layout = Layout(ranks=8, pipeline=4)
    assert layout.describe_bubble(16) == "16 micro batches per update through 4 stages: each idles 16% of the time"
    assert layout.describe_bubble(3).endswith("50% of the time (fewer than stages: a larger --global-batch idles less)")
    told = pipeline_text({"stages": 4, "micro_batches": 1, "bubble": 0.75})
    assert told == "4 stages, 1 micro batch per update: a bubble of 75.0 %"
    assert pipeline_text(None) == ""


@pytest.mark.parametrize(
    ("layout", "problem", "fix"),
    [
        (Layout(ranks=5, pipeline=5), "12 layers cannot be shared by --pipeline 5", "--pipeline 1"),
        (Layout(ranks=8, pipeline=8), "12 layers cannot be shared by --pipeline 8", "--pipeline 4"),
        (Layout(ranks=24, pipeline=24), "12 layers cannot be shared by --pipeline 24", "--pipeline 12"),
    ],
    ids=["uneven", "power", "too-many"],
)
def test_layouts_that_cannot_be(layout: Layout, problem: str, fix: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        check_cuts({"tensor": 1, "pipeline": layout.pipeline, "replicas": 1}, layout.ranks, GPT2)
    assert fix in error.value.fix


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 12])
def test_layouts_that_can(stages: int) -> None:
    check_cuts({"tensor": 1, "pipeline": stages, "replicas": 1}, 2 * stages, GPT2)


def test_a_layout_has_its_rung() -> None:
    layout = Layout(ranks=4, pipeline=2)
    assert shared_recipe(RECIPE, None, layout).rungs == ("pipeline-parallel", "ddp")
    chosen = replace(RECIPE, rungs=("pipeline-gpipe", "bf16"))
    assert cuts_of(chosen.rungs, layout) == ["pipeline-gpipe"]
    assert shared_recipe(chosen, "fsdp", layout).rungs == ("bf16", "pipeline-gpipe", "fsdp")
    assert cuts_of(chosen.rungs, Layout(ranks=4)) == []
    assert cuts_of(RECIPE.rungs, Layout(ranks=4, pipeline=2, tensor=2)) == ["tensor-parallel", "pipeline-parallel"]


def test_what_has_no_stages() -> None:
    hardware = Hardware(kind="cuda", name="NVIDIA H200", ranks=4)
    theirs = replace(GPT2, source=Source(kind="huggingface"))
    for name, schedule in {"pipeline-parallel": "1f1b", "pipeline-gpipe": "gpipe"}.items():
        assert plan_of((name,)).pipeline == schedule
        rung = find_rung(name)
        assert rung.needs(GPT2, hardware, Plan()) is None
        assert "built-in GPT only" in (rung.needs(theirs, hardware, Plan()) or "")
        assert "cuda-graphs" in (rung.needs(GPT2, hardware, Plan(cuda_graphs=True)) or "")
        assert "one process" in (rung.needs(GPT2, replace(hardware, ranks=1), Plan()) or "")
