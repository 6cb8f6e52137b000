"""benchmarks/long_run.py: the same batches for both sides, finished runs that stay, and the verdict."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.core.errors import UserError
from redline.core.workload import Workload
from redline.data.prepare import Preparation, prepare
from redline.data.shards import open_dataset
from redline.engine import probe

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def loaded(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports: a kernels.py lies there too
        patch.syspath_prepend(str(repository / "benchmarks"))
        import long_run
    return long_run


@pytest.fixture
def bench(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return loaded


@pytest.fixture(scope="module")
def shards(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    prepare(Preparation(sources=(str(text),), out=folder / "data", tokenizer="bytes", val_fraction=0.2, processes=1))
    return folder / "data"


@pytest.fixture
def order(bench: Any, small: Workload) -> Any:
    return bench.Order(
        side="plain",
        seed=1,
        workload=small,
        rungs=("tied-weights",),
        steps=8,
        tail=3,
        batch=2,
        warmup_steps=2,
        validation_batches=4,
        device="cpu",
        data="some",
    )


# a run


class Told:
    """A step that keeps its batches; its losses are 1, 2, 3 and so on, a held-out batch's is its first token."""

    def __init__(self, small: Workload) -> None:
        from redline.model.adapter import adapter_of

        self.batches: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.adapter, self.model, self.device = adapter_of(small), torch.nn.Identity(), torch.device("cpu")

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch.clone())
        return torch.tensor(float(len(self.batches)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return batch[0, 0, 0].float()


def test_both_sides_see_the_same_batches_and_all_seeds_the_last_ones(
    bench: Any, order: Any, shards: Path, small: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, workloads, found = [], [], []

    def build(workload: Workload, plan: Any, *, learning_rate: Callable[[int], float], **_: Any) -> Told:
        assert plan.read_loss_every == 0
        steps.append(Told(small))
        steps[-1].rates = [learning_rate(taken) for taken in range(8)]
        workloads.append(workload)
        return steps[-1]

    monkeypatch.setattr(bench, "build_step", build)
    monkeypatch.setattr(bench, "READ_EVERY", 2)
    data = open_dataset(shards)
    for changes in ({}, {"side": "fast", "rungs": ("bf16", "tied-weights")}, {"seed": 2}):
        found.append(bench.trained(replace(order, **changes), data))
    plain, fast, other = (step.batches for step in steps)
    assert [workload.seed for workload in workloads] == [1, 1, 2]
    assert len(plain) == 8
    assert all(torch.equal(one, two) for one, two in zip(plain, fast, strict=True))
    assert [torch.equal(one, two) for one, two in zip(plain, other, strict=True)] == [False] * 5 + [True] * 3
    assert all(one["losses"] == [1, 2, 3, 4, 5, 6, 7, 8] for one in found)
    assert found[0]["final_loss"] == 7.0  # of 6, 7, 8
    held_out = bench.WindowBatches(split=data.val, seed=bench.COMMON_SEED, micro_batch=2, sequence=64)
    firsts = [float(held_out[index][0, 0, 0]) for index in range(min(4, held_out.windows // 2))]
    assert {one["validation_loss"] for one in found} == {sum(firsts) / len(firsts)}
    rates = steps[0].rates
    assert rates[:2] == [1.5e-3, 3e-3]  # warms up to the workload's rate
    assert rates[2] == 3e-3 > rates[3] > rates[7] > 0.1 * 3e-3


def test_a_loss_that_is_no_number_leaves_its_mean_unknown(bench: Any) -> None:
    losses = bench.numbers(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    assert losses == [1.0, None, 3.0, None]
    assert bench.mean(losses) is bench.mean([]) is None
    assert bench.mean([1.0, 2.0]) == 1.5


# from one command to the next


@pytest.fixture
def command(
    bench: Any, small: Workload, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """command(stop_after=3) -> exit code, record and the runs that were made: real ones, in this process."""
    (tmp_path / "fast.json").write_text(json.dumps({"rungs": ["tied-weights", "fused-adamw"], "micro_batch": 2}))
    monkeypatch.setattr(bench, "probe_machine", lambda _: (probe.probe("cpu"), probe.versions()))
    monkeypatch.setattr(bench, "resolve_workload", lambda _: small)
    made: list[str] = []

    def run(capsys: Any, *more: str, stop_after: int = 99) -> tuple[int, Any, list[str]]:
        made.clear()

        def run_all(waiting: list[Any], options: Namespace, about: dict[str, Any]) -> None:
            for one in waiting[:stop_after]:
                made.append(one.name)
                path = tmp_path / "order.json"
                path.write_text(json.dumps({"order": bench.to_json(one), **about}))
                assert bench.work(path, options.data, options.out) == 0
            if len(waiting) > stop_after:
                raise KeyboardInterrupt

        monkeypatch.setattr(bench, "run_all", run_all)
        words = f"small --recipe {tmp_path}/fast.json --data {shards} --out {tmp_path}/out --plain tied-weights"
        sizes = "--seeds 1,2 --steps 6 --tail 3 --batch 1 --warmup-steps 2 --validation-batches 2 --json"
        code = bench.main([*words.split(), *sizes.split(), *more])
        out = capsys.readouterr()
        return code, json.loads(out.out) if out.out else out.err, list(made)

    return run


def test_finished_runs_are_kept_and_not_run_again(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, record, made = command(capsys, stop_after=3)
    assert made == ["plain-1", "plain-2", "fast-1"]
    assert (code, record["equal"]) == (1, None)
    assert record["verdict"] == "Not finished: fast-2."
    code, record, made = command(capsys)
    assert made == ["fast-2"]
    # The sides differ in how AdamW is written: far less than two seeds do.
    assert code == 0
    for metric in ("final_loss", "validation_loss"):
        found = record["comparison"][metric]
        assert found["equal"]
        assert found["every_seed"]
        assert max(map(abs, found["differences"])) < 1e-3 < found["band"]
    assert record["runs"]["plain-1"]["losses"] == [pytest.approx(record["runs"]["fast-1"]["losses"][0], abs=1e-3)]
    assert record["data"]["fingerprint"] == record["runs"]["fast-2"]["order"]["data"]
    assert command(capsys)[2] == []
    code, error, _ = command(capsys, "--batch", "3")
    assert code == 2
    assert "it differs in batch" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--seeds", "1"), "two baselines differ by"),
        (("--steps", "100"), "100 updates are too few"),
        (("--plain", "tied-weights,bf16"), "the baseline computes in bf16"),
        (("--plain", "tf32"), "different models"),
        (("--at-once", "0"), "--at-once is 0"),
    ],
    ids=["one-seed", "too-few-steps", "bf16-baseline", "another-model", "none-at-once"],
)
def test_mistakes_stop_before_anything_runs(
    bench: Any,
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "probe_machine", lambda _: pytest.fail("too late"))
    (tmp_path / "fast.json").write_text(json.dumps({"rungs": ["tied-weights", "bf16"], "micro_batch": 2}))
    given = ["gpt2", "--recipe", f"{tmp_path}/fast.json", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert bench.main([*given, *words]) == 2
    assert text in capsys.readouterr().err


def test_two_thousand_updates_of_eight_sequences_fit_ten_minutes_of_an_h200(bench: Any, order: Any) -> None:
    """By prediction: the default size must be one that the default number of seeds can pay."""
    from redline.workloads import resolve_workload

    fast = ("tf32", "no-sync", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw")
    whole = replace(order, workload=resolve_workload("gpt2"), steps=2000, batch=8, rungs=bench.PLAIN_RUNGS)
    orders = [replace(whole, rungs=rungs) for rungs in (bench.PLAIN_RUNGS, fast) for _ in SEEDS]
    seconds = sum(bench.predicted_seconds(one, "NVIDIA H200") for one in orders)
    assert 250 < seconds < 450
    assert f"6 runs to go: about {seconds:.0f} s" in bench.cost_words(orders, "NVIDIA H200")
    assert bench.cost_words(orders, "some card") == "6 runs to go"


# the verdict


def runs_of(plain: list[float | None], fast: list[float | None], validation: list[float | None] | None = None) -> Any:
    found = {}
    for seed, one, other, held_out in zip(SEEDS, plain, fast, validation or [None] * 3, strict=True):
        found[f"plain-{seed}"] = {"final_loss": one, "validation_loss": held_out}
        found[f"fast-{seed}"] = {"final_loss": other, "validation_loss": held_out}
    return found


def test_equal_means_within_what_two_baselines_differ_by(bench: Any) -> None:
    found = bench.judged(runs_of([3.00, 3.02, 3.01], [3.01, 3.02, 3.00], [4.0, 4.1, 4.2]), SEEDS)
    one = found["comparison"]["final_loss"]
    assert one["band"] == pytest.approx(0.02)
    assert one["differences"] == pytest.approx([0.01, 0.0, -0.01])
    assert one["mean_difference"] == pytest.approx(0.0)
    assert found["comparison"]["validation_loss"]["band"] == pytest.approx(0.2)
    assert found["equal"]
    assert found["verdict"].startswith("Equal. The fast recipe's final loss is 0.0000")
    assert "differ by up to 0.0200: within the band; 3 of 3 single seeds lie within it." in found["verdict"]


def test_a_seed_outside_is_told_and_a_mean_outside_is_not_equal(bench: Any) -> None:
    found = bench.judged(runs_of([3.00, 3.02, 3.01], [3.05, 3.02, 2.97]), SEEDS)
    assert found["equal"]
    assert "(standard error 0.0260); two baselines differ by up to 0.0200: within" in found["verdict"]
    assert found["verdict"].endswith("1 of 3 single seeds lie within it.")
    assert found["comparison"]["validation_loss"]["measured"] is False
    for shift, side in ((0.03, "above"), (-0.03, "below")):
        found = bench.judged(runs_of([3.00, 3.02, 3.01], [value + shift for value in (3.00, 3.02, 3.01)]), SEEDS)
        assert found["equal"] is False
        assert found["verdict"].startswith(f"Not equal. The fast recipe's final loss is 0.0300 {side} the baseline's")
        assert found["verdict"].endswith("outside the band; 0 of 3 single seeds lie within it.")


def test_what_is_not_known_is_not_equal(bench: Any) -> None:
    found = bench.judged(runs_of([3.0, 3.0, 3.1], [3.0, None, 3.1]), SEEDS)
    assert found["equal"] is None
    assert found["verdict"] == "Losses that are no numbers: fast-2."
    runs = runs_of([3.0, 3.0, 3.1], [3.0, 3.0, 3.1])
    del runs["plain-3"]
    found = bench.judged(runs, SEEDS)
    assert (found["equal"], found["verdict"]) == (None, "Not finished: plain-3.")


@pytest.mark.parametrize(("after", "gains"), [(0.95, True), (1.05, True), (1.0, False)])
def test_changed_maths_is_worth_the_updates_that_the_fast_recipe_needs_for_as_much(
    bench: Any, after: float, gains: bool
) -> None:
    def loss(seed: int, updates: float) -> float:
        return 4 + 0.01 * seed - (0.5 * math.log(updates) if gains else 0)

    runs = runs_of([3.0, 3.1, 3.2], [loss(seed, 1.0) for seed in SEEDS])
    for seed in SEEDS:
        runs[f"changed-{seed}"] = {"final_loss": loss(seed, after), "validation_loss": None}
        runs[f"shorter-{seed}"] = {"final_loss": loss(seed, 0.9), "validation_loss": None}
    found = bench.worth(runs, SEEDS, speed_up=1.2)
    assert found["final_loss"]["share"] == (pytest.approx(after) if gains else None)
    assert found["at_equal_loss"] == (pytest.approx(1.2 * after) if gains else None)
    assert (f"{after:.1%} of the updates" if gains else "is not known") in found["words"]
    assert found["validation_loss"]["gap"] is None
    del runs["changed-2"]
    assert bench.worth(runs, SEEDS, speed_up=1.2)["at_equal_loss"] is None


def test_a_changed_recipe_is_run_beside_and_weighed(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "changed.json").write_text(json.dumps({"rungs": ["tied-weights", "bf16"], "micro_batch": 2}))
    more = ("--changed", f"{tmp_path}/changed.json", "--steps", "10", "--speed-up", "1.5")
    _, record, made = command(capsys, *more)
    assert made == [f"{side}-{seed}" for side in ("plain", "fast", "changed", "shorter") for seed in (1, 2)]
    assert [record["runs"][f"{side}-1"]["order"]["steps"] for side in ("fast", "changed", "shorter")] == [10, 10, 9]
    assert record["recipes"]["changed"] == ["tied-weights", "bf16"]
    assert record["recipes"]["shorter"] == record["recipes"]["fast"]
    assert 0 < abs(record["worth"]["final_loss"]["gap"]) < 0.1
    assert command(capsys, "--speed-up", "1.5")[0] == 2


@pytest.mark.long
def test_real_processes_share_the_device(
    bench: Any, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fast.json").write_text(json.dumps({"rungs": ["tied-weights", "fused-adamw"], "micro_batch": 2}))
    words = f"tiny --recipe {tmp_path}/fast.json --data {shards} --out {tmp_path}/out --plain tied-weights --device cpu"
    sizes = "--steps 5 --tail 2 --batch 1 --warmup-steps 2 --validation-batches 1 --seeds 1,2 --at-once 2 --json"
    assert bench.main([*words.split(), *sizes.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{name}.json" for name in sorted(record["runs"])
    ]
    assert len(record["runs"]) == 4


def test_a_folder_of_another_comparison_is_refused(bench: Any, order: Any, tmp_path: Path) -> None:
    (tmp_path / "plain-1.json").write_text(json.dumps({"order": bench.to_json(order)}))
    assert bench.finished(order, tmp_path) is not None
    assert bench.finished(replace(order, seed=2), tmp_path) is None
    with pytest.raises(UserError, match="it differs in data"):
        bench.finished(replace(order, data="other"), tmp_path)
